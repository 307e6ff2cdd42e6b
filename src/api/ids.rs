//! Ids of requests and of replies, and the Unix time of an object.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderValue};

use crate::session::random_u64;

/// The header with a request's id, in the request and in the response.
pub(in crate::api) const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The client's own id if it sent a valid one, or a new one.
pub(in crate::api) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let sound = |v: &&HeaderValue| {
        (1..=MAX_REQUEST_ID_BYTES).contains(&v.len()) && v.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(sound).cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&format!("{:016x}", random_u64()))
            .expect("hexadecimal digits are a header value")
    })
}

/// Unix time in seconds, for dates only: it jumps when a clock is set, so durations are measured with an
/// [`Instant`](std::time::Instant).
pub(in crate::api) fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A Unix time as RFC 3339 writes it.
pub(in crate::api) fn rfc3339(unix_time_s: u64) -> String {
    jiff::Timestamp::from_second(unix_time_s as i64).unwrap_or_default().to_string()
}

/// The date after this time, as RFC 3339 writes it.
pub(in crate::api) fn date_after(time: Duration) -> String {
    let time = jiff::SignedDuration::try_from(time).unwrap_or(jiff::SignedDuration::MAX);
    jiff::Timestamp::now().saturating_add(time).unwrap_or(jiff::Timestamp::MAX).to_string()
}

/// An id that is unique to one reply.
pub(in crate::api) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}
