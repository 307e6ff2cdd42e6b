//! Ids of requests and of replies, and the date that is told with them.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderValue};

use crate::session::random_u64;

/// A request's id, in its head and in that of the response.
pub(in crate::api) const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The client's own where it sent a sound one.
pub(in crate::api) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let sound = |v: &&HeaderValue| {
        (1..=MAX_REQUEST_ID_BYTES).contains(&v.len()) && v.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(sound).cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&format!("{:016x}", random_u64()))
            .expect("hexadecimal digits are a header value")
    })
}

/// For dates that are told. It jumps when a clock is set: a duration is that of an [`Instant`](std::time::Instant).
pub(in crate::api) fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// An id that no other reply has.
pub(in crate::api) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}
