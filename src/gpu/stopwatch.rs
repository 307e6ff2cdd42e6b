//! Tells how long something took to the floors above, which read no clock.

use std::time::{Duration, Instant};

/// Does `work`, and says how long it took.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let since = Instant::now();
    let result = work();
    (result, since.elapsed())
}
