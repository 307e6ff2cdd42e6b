//! Counts of the NPU's work since the server started. Each device process has its own counts, which end with the
//! process. This module adds them up.

use crate::cli::npu_start::NpuStart;
use crate::model::offload::OffloadCounts;

/// The counts of all device processes, as last reported by each of them.
#[derive(Debug, Default)]
pub struct NpuAccount {
    /// The sums of the processes that have ended.
    ended: OffloadCounts,
    /// The last report of the present process, or of the previous one until the present one has reported.
    start: Option<NpuStart>,
    /// The last counts of the present process.
    present: OffloadCounts,
}

impl NpuAccount {
    /// Must be called when a new device process has started.
    pub fn process_started(&mut self) {
        self.ended = sum(&self.ended, std::mem::take(&mut self.present));
    }

    /// Stores a report of the present process.
    pub fn take(&mut self, (start, counts): (NpuStart, OffloadCounts)) {
        (self.start, self.present) = (Some(start), counts);
    }

    /// The state of the NPU at the last load, and the counts of all processes; `None` if no process has reported an
    /// NPU.
    pub fn total(&self) -> Option<(NpuStart, OffloadCounts)> {
        Some((self.start.clone()?, sum(&self.ended, self.present.clone())))
    }
}

/// The sum of both counts. The failure that ended the use of the NPU is taken from `later` only.
fn sum(earlier: &OffloadCounts, mut later: OffloadCounts) -> OffloadCounts {
    later.dispatches += earlier.dispatches;
    later.tokens += earlier.tokens;
    later.recomputed += earlier.recomputed;
    later.seconds += earlier.seconds;
    earlier.fallbacks.iter().for_each(|(code, count)| later.add_fallbacks(code, *count));
    later
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(kv_heads: usize) -> NpuStart {
        NpuStart {
            mode: "auto".into(),
            device: None,
            xrt: None,
            is_double: true,
            kv_heads,
            choices: Vec::new(),
            reason: None,
        }
    }

    fn counts(dispatches: u64, fallbacks: &[(&str, u64)], quarantined: Option<&str>) -> OffloadCounts {
        let fallbacks = fallbacks.iter().map(|(code, count)| ((*code).to_owned(), *count)).collect();
        let quarantined = quarantined.map(str::to_owned);
        OffloadCounts {
            dispatches,
            tokens: 64 * dispatches,
            seconds: 0.5,
            fallbacks,
            quarantined,
            ..Default::default()
        }
    }

    #[test]
    fn the_counts_of_a_process_are_kept_after_its_end() {
        let mut account = NpuAccount::default();
        account.process_started();
        assert!(account.total().is_none(), "no process has reported an NPU");
        account.take((start(2), counts(3, &[], None)));
        account.take((start(2), counts(7, &[("npu-timeout", 1)], Some("npu-timeout: it hangs"))));
        let total = |account: &NpuAccount| account.total().expect("a process has reported").1;
        assert_eq!(total(&account), counts(7, &[("npu-timeout", 1)], Some("npu-timeout: it hangs")));
        // The next process uses the NPU again, and the counts continue.
        account.process_started();
        assert_eq!(total(&account), counts(7, &[("npu-timeout", 1)], None));
        account.take((start(1), counts(2, &[("npu-process", 1), ("npu-timeout", 2)], None)));
        let expected =
            OffloadCounts { seconds: 1.0, ..counts(9, &[("npu-process", 1), ("npu-timeout", 3)], None) };
        assert_eq!(total(&account), expected);
        account.process_started();
        assert_eq!(
            (total(&account), account.total().expect("a process has reported").0.kv_heads),
            (expected, 1)
        );
    }
}
