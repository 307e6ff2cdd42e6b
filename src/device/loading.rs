//! The progress of a load, which the device process reports to the server, and the log lines about it.

use std::fmt;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// How often the log reports the progress of a load.
const LOG_EVERY: Duration = Duration::from_secs(3);

/// The present step of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loading {
    /// Starting the device process, opening the NPU and the GPU.
    Device,
    /// Measuring which kernels are the fastest, and how fast memory is read.
    Tuning,
    Kernels,
    /// Bytes of the checkpoint.
    Weights {
        done: u64,
        total: u64,
    },
    SelfTest,
}

impl Loading {
    /// Whether the load is still at the same step as before.
    pub fn is_same_step(self, before: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&before)
    }
}

impl fmt::Display for Loading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("opening the device"),
            Self::Tuning => f.write_str("measuring kernels and memory"),
            Self::Kernels => f.write_str("compiling kernels"),
            Self::Weights { done, total } => {
                let percent = 100 * u128::from(*done) / u128::from((*total).max(1));
                let gb = |bytes: u64| bytes as f64 / 1e9;
                write!(f, "reading weights, {percent} % of {:.2} GB", gb(*total))
            }
            Self::SelfTest => f.write_str("testing kernels and layers"),
        }
    }
}

/// Logs the progress of one load every few seconds. If standard error is a terminal, it logs nothing, because the
/// device process shows a progress bar there.
pub(super) struct LoadLog {
    doing: Loading,
    /// When this step of the load began.
    since: Instant,
    /// When the last line was written, and how many bytes were read by then.
    last: (Instant, u64),
    is_silent: bool,
}

impl LoadLog {
    pub fn begin() -> Self {
        let now = Instant::now();
        let is_silent = std::io::stderr().is_terminal();
        Self { doing: Loading::Device, since: now, last: (now, 0), is_silent }
    }

    pub fn doing(&self) -> Loading {
        self.doing
    }

    pub fn take(&mut self, doing: Loading) {
        if !doing.is_same_step(self.doing) {
            self.since = Instant::now();
        }
        self.doing = doing;
    }

    /// Writes a line if the last one is old enough.
    pub fn log_if_due(&mut self) {
        let now = Instant::now();
        if self.is_silent || now - self.last.0 < LOG_EVERY {
            return;
        }
        tracing::info!("loading  {}", self.line(now));
        self.last = (now, read(self.doing));
    }

    fn line(&self, now: Instant) -> String {
        let (Self { doing, since, last: (before, had), .. }, spent) = (self, now - self.since);
        let Loading::Weights { done, total } = doing else {
            return format!("{doing} for {} s", spent.as_secs());
        };
        let rate = done.saturating_sub(*had) as f64 / (now - *before.max(since)).as_secs_f64();
        if rate == 0.0 {
            return format!("{doing}, no progress for {} s", (now - *before).as_secs());
        }
        let left = total.saturating_sub(*done) as f64 / rate;
        format!("{doing}, {:.2} GB/s, {} s left", rate / 1e9, left.ceil())
    }
}

/// Bytes of weights that were read at this step.
fn read(doing: Loading) -> u64 {
    match doing {
        Loading::Weights { done, .. } => done,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_progress_rate_and_remaining_time() {
        let mut log = LoadLog::begin();
        let at = |s: u64| log.since + Duration::from_secs(s);
        let times = [at(5), at(10), at(15)];
        assert_eq!(log.line(times[0]), "opening the device for 5 s");
        let weights = |done| Loading::Weights { done, total: 20_000_000_000 };
        log.doing = weights(5_000_000_000);
        assert_eq!(log.line(times[0]), "reading weights, 25 % of 20.00 GB, 1.00 GB/s, 15 s left");
        log.last = (times[0], 5_000_000_000);
        assert_eq!(log.line(times[1]), "reading weights, 25 % of 20.00 GB, no progress for 5 s");
        log.doing = weights(15_000_000_000);
        assert_eq!(log.line(times[1]), "reading weights, 75 % of 20.00 GB, 2.00 GB/s, 3 s left");
        // The time before this step does not count for its rate.
        (log.last, log.since) = ((times[0], 0), times[1]);
        log.doing = weights(10_000_000_000);
        assert_eq!(log.line(times[2]), "reading weights, 50 % of 20.00 GB, 2.00 GB/s, 5 s left");
    }
}
