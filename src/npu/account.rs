//! The counts of the NPU's work since the server started. Each device process has its own counts, which end with the
//! process. This module adds them up.

use crate::device::{DeviceState, NpuReport};

/// The counts of all device processes, as last reported by each of them.
#[derive(Debug, Default)]
pub struct NpuAccount {
    /// The sums of the processes that have ended.
    ended: NpuReport,
    /// The process that reported last, and its report.
    last: Option<(u32, NpuReport)>,
}

impl NpuAccount {
    /// The state of the NPU with the counts of all processes; `None` if no process has reported an NPU. `device` is the
    /// state that the device process has just reported; `None` if it does not answer.
    pub fn total(&mut self, device: Option<&DeviceState>) -> Option<NpuReport> {
        const SILENT: &str =
            "the process with the model is not running or does not answer: these are its last known counts";
        if let Some(DeviceState { process, npu: Some(report), .. }) = device
            && let Some((before, ended)) = self.last.replace((*process, report.clone()))
            && before != *process
        {
            self.ended = sum(&self.ended, ended);
        }
        let total = sum(&self.ended, self.last.as_ref()?.1.clone());
        match device {
            Some(_) => Some(total),
            None => Some(NpuReport { in_use: false, reason: Some(SILENT.into()), ..total }),
        }
    }
}

/// The report `later` with the counts of both.
fn sum(earlier: &NpuReport, mut later: NpuReport) -> NpuReport {
    later.completed += earlier.completed;
    later.tokens += earlier.tokens;
    later.waited_s += earlier.waited_s;
    for (code, count) in &earlier.fallbacks {
        *later.fallbacks.entry(code.clone()).or_default() += count;
    }
    later
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(completed: u64, fallbacks: &[(&str, u64)], reason: Option<&str>) -> NpuReport {
        NpuReport {
            kv_heads: 2,
            completed,
            tokens: 64 * completed,
            waited_s: 0.5,
            fallbacks: fallbacks.iter().map(|(code, count)| ((*code).to_owned(), *count)).collect(),
            in_use: reason.is_none(),
            reason: reason.map(str::to_owned),
            ..NpuReport::default()
        }
    }

    #[test]
    fn the_counts_of_a_process_are_kept_after_its_end() {
        let mut account = NpuAccount::default();
        assert_eq!(account.total(Some(&DeviceState::default())), None, "no process has reported an NPU");
        let mut take = |process, npu: NpuReport| {
            account.total(Some(&DeviceState { process, npu: Some(npu), ..DeviceState::default() })).unwrap()
        };
        take(7, counts(3, &[], None));
        let failed = counts(7, &[("npu-timeout", 1)], Some("npu-timeout: it hangs"));
        assert_eq!(take(7, failed.clone()), failed);
        // The next process uses the NPU again, and the counts continue.
        let sum = NpuReport { waited_s: 1.0, ..counts(9, &[("npu-process", 1), ("npu-timeout", 3)], None) };
        assert_eq!(take(8, counts(2, &[("npu-process", 1), ("npu-timeout", 2)], None)), sum);
        let silent = account.total(None).expect("a process has reported");
        assert_eq!((silent.in_use, silent.completed, silent.kv_heads), (false, 9, 2));
        assert_eq!(silent.fallbacks, sum.fallbacks);
    }
}
