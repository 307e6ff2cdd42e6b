//! What the NPU did since the server started. Each device process counts for itself, and its counts end with it.

use crate::cli::npu_start::NpuStart;
use crate::model::offload::OffloadCounts;

/// The counts of all device processes so far, as far as each was asked for them.
#[derive(Debug, Default)]
pub struct NpuAccount {
    /// The sums of the processes that ended.
    ended: OffloadCounts,
    /// What the present process said last, or the one before it while this one has said nothing.
    start: Option<NpuStart>,
    present: OffloadCounts,
}

impl NpuAccount {
    /// Notes that another process has taken over.
    pub fn process_started(&mut self) {
        self.ended = sum(&self.ended, std::mem::take(&mut self.present));
    }

    /// Takes in what the present process says.
    pub fn take(&mut self, (start, counts): (NpuStart, OffloadCounts)) {
        (self.start, self.present) = (Some(start), counts);
    }

    /// What the last load made of the NPU, and the counts of all processes; none if no process has spoken of an NPU.
    pub fn total(&self) -> Option<(NpuStart, OffloadCounts)> {
        Some((self.start.clone()?, sum(&self.ended, self.present.clone())))
    }
}

/// The counts of both. The failure that ended the unit's use is `later`'s own.
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
    fn what_a_process_counted_outlives_it() {
        let mut account = NpuAccount::default();
        account.process_started();
        assert!(account.total().is_none(), "nobody has spoken of an NPU");
        account.take((start(2), counts(3, &[], None)));
        account.take((start(2), counts(7, &[("npu-timeout", 1)], Some("npu-timeout: it hangs"))));
        let total = |account: &NpuAccount| account.total().expect("it spoke").1;
        assert_eq!(total(&account), counts(7, &[("npu-timeout", 1)], Some("npu-timeout: it hangs")));
        // The next one has its own NPU, and the counts go on.
        account.process_started();
        assert_eq!(total(&account), counts(7, &[("npu-timeout", 1)], None));
        account.take((start(1), counts(2, &[("npu-process", 1), ("npu-timeout", 2)], None)));
        let expected =
            OffloadCounts { seconds: 1.0, ..counts(9, &[("npu-process", 1), ("npu-timeout", 3)], None) };
        assert_eq!(total(&account), expected);
        account.process_started();
        assert_eq!((total(&account), account.total().expect("it spoke").0.kv_heads), (expected, 1));
    }
}
