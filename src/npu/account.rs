//! The counts of the NPU's work since the server started, and their metrics. Each device process has its own counts,
//! which are lost when it ends. This module adds them up.

use std::collections::BTreeMap;

use crate::device::{DeviceState, Metric, NpuReport};

/// The counts of all device processes, as each of them last reported them.
#[derive(Debug, Default)]
pub struct NpuAccount {
    /// The sums of the processes that have ended.
    ended: NpuReport,
    /// The process that reported last, and its report.
    last: Option<(u32, NpuReport)>,
}

impl NpuAccount {
    /// The state of the NPU with the counts of all processes; `None` if no process has reported an NPU. `device` is the
    /// current report of the device process; `None` if it does not answer.
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

/// The metrics of an NPU. Without an NPU the counts are 0, so that queries find the metrics.
pub fn metrics(npu: Option<&NpuReport>) -> Vec<Metric> {
    const REASONS: [&str; 4] = ["npu-timeout", "npu-command-state", "npu-no-output", "npu-process"];
    let metric = |name, kind, help, value| Metric { name, kind, help, samples: vec![(None, value)] };
    let heads = npu.filter(|npu| npu.in_use).map_or(0, |npu| npu.kv_heads);
    let completed = npu.map_or(0, |npu| npu.completed);
    let mut fallbacks: BTreeMap<&str, u64> = REASONS.map(|reason| (reason, 0)).into();
    fallbacks.extend(npu.iter().flat_map(|npu| &npu.fallbacks).map(|(reason, count)| (&**reason, *count)));
    let fallback = |(reason, count): (&str, u64)| (Some(("reason", reason.to_owned())), count as f64);
    vec![
        metric(
            "unicorn_npu_kv_heads",
            "gauge",
            "KV heads of each layer whose attention of prompts the NPU computes now.",
            heads as f64,
        ),
        metric(
            "unicorn_npu_completed_total",
            "counter",
            "Attention of a layer that the NPU completed, and whose result was used.",
            completed as f64,
        ),
        Metric {
            name: "unicorn_npu_fallback_total",
            kind: "counter",
            help: "Failures of the NPU that the GPU stepped in for, by the doctor's code.",
            samples: fallbacks.into_iter().map(fallback).collect(),
        },
        metric(
            "unicorn_npu_waited_seconds_total",
            "counter",
            "Time for which steps waited for the NPU.",
            npu.map_or(0.0, |npu| npu.waited_s),
        ),
    ]
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
