//! Measures durations for the modules that use the GPU layer, which read no clock themselves.

use std::time::{Duration, Instant};

/// Runs `work`, and returns its result and duration.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let since = Instant::now();
    let result = work();
    (result, since.elapsed())
}
