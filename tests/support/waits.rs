//! Waits for a condition, with a time limit: a test that waits in vain fails with a name, and does not stop the suite.

use std::time::{Duration, Instant};

use super::fake_runner::HANG;

/// How often a wait looks.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Waits until `is_so`. Panics after [`HANG`]; `what` says what was waited for.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Like [`wait_until`], in an asynchronous test.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < HANG, "never: {what}");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}
