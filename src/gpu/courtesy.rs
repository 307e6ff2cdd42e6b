//! Keeps the device idle between submits, so that this process uses at most a configured share of the device's time.
//!
//! Each submit is followed by an idle gap, proportional to the time that the submit took. The host measures that time:
//! from the submit until a wait finds that it has finished. The host's time is at least the device's time, so this
//! process never exceeds its share. This module reads no clock: its callers pass all times.

use std::time::{Duration, Instant};

use crate::config::Courtesy;

/// The longest gap. If the process was stopped during a submit (a debugger, a suspended machine), the submit seems to
/// have taken minutes.
const LONGEST_GAP: Duration = Duration::from_secs(1);

/// The time to leave the device idle after a submit that took `busy`.
fn gap(courtesy: Courtesy, busy: Duration) -> Duration {
    let share = courtesy.share();
    busy.mul_f64((1.0 - share) / share).min(LONGEST_GAP)
}

/// The last submit. The device had finished all earlier submits before it.
#[derive(Debug, Clone, Copy)]
struct LastSubmit {
    /// Value that the submit signals on the device's timeline semaphore.
    value: u64,
    began: Instant,
    ended: Option<Instant>,
}

/// Computes how long the device must stay idle.
#[derive(Debug)]
pub(super) struct Pacer {
    courtesy: Courtesy,
    /// `None` before the first submit under a limit.
    last: Option<LastSubmit>,
}

impl Default for Pacer {
    fn default() -> Self {
        Self { courtesy: Courtesy::NONE, last: None }
    }
}

impl Pacer {
    pub fn courtesy(&self) -> Courtesy {
        self.courtesy
    }

    /// Limits later submits. A submit that was made before the limit is not followed by a gap.
    pub fn set(&mut self, courtesy: Courtesy) {
        if self.courtesy != courtesy {
            *self = Self { courtesy, last: None };
        }
    }

    /// Notes the submit of `value` at `began`. The device must have finished all earlier submits.
    pub fn submitted(&mut self, value: u64, began: Instant) {
        self.last = self.courtesy.is_bound().then_some(LastSubmit { value, began, ended: None });
    }

    /// Notes that the device has finished all submits up to `value`, as the host found at `now`.
    pub fn finished(&mut self, value: u64, now: Instant) {
        if let Some(last) = self.last.as_mut().filter(|last| last.value <= value) {
            last.ended.get_or_insert(now);
        }
    }

    /// The time until which the device must stay idle. `None`: the next submit may start immediately.
    pub fn idle_until(&self) -> Option<Instant> {
        let LastSubmit { began, ended: Some(ended), .. } = self.last? else { return None };
        Some(ended + gap(self.courtesy, ended - began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pacer(share: f64) -> Pacer {
        let mut pacer = Pacer::default();
        pacer.set(share.try_into().unwrap());
        pacer
    }

    #[test]
    fn the_gap_after_a_submit_limits_it_to_its_share() {
        let start = Instant::now();
        for (share, busy_ms, gap_ms) in
            [(0.5, 8, 8), (0.25, 8, 24), (0.8, 8, 2), (0.1, 8, 72), (0.1, 100, 900), (0.5, 600_000, 1000)]
        {
            let mut pacer = pacer(share);
            pacer.submitted(7, start);
            pacer.finished(7, start + busy_ms * MS);
            let until = pacer.idle_until().unwrap();
            let error = until.duration_since(start).as_secs_f64() - (busy_ms + gap_ms) as f64 / 1e3;
            assert!(error.abs() < 1e-6, "{share} of the time, after {busy_ms} ms: {until:?}");
        }
    }

    /// Simulates the clock. Submits of different lengths start as soon as they may, or later.
    #[test]
    fn the_device_is_busy_for_at_most_its_share_of_the_time() {
        for share in [0.1, 0.3, 0.5, 0.9] {
            let start = Instant::now();
            let (mut pacer, mut now, mut busy) = (pacer(share), start, Duration::ZERO);
            for value in 1..500 {
                now = pacer.idle_until().map_or(now, |until| until.max(now));
                now += if value % 7 == 0 { 3 * MS } else { Duration::ZERO }; // the host was busy with other work
                pacer.submitted(value, now);
                let took = (value as u32 * 37 % 90) * MS;
                (now, busy) = (now + took, busy + took);
                pacer.finished(value, now);
                pacer.finished(value, now + 50 * MS); // the same submit is found finished again
            }
            let until = pacer.idle_until().unwrap();
            let got = busy.as_secs_f64() / (until - start).as_secs_f64();
            assert!(got <= share + 1e-6 && got > 0.8 * share, "{got} of the time, but {share} is allowed");
        }
    }

    #[test]
    fn submits_without_a_limit_are_not_followed_by_a_gap() {
        let now = Instant::now();
        let mut pacer = Pacer::default();
        pacer.submitted(1, now);
        pacer.finished(1, now + MS);
        assert_eq!(pacer.idle_until(), None);
        // The limit is set while a submit is in progress, whose start is not known.
        pacer.submitted(2, now);
        pacer.set(0.5.try_into().unwrap());
        pacer.finished(2, now + 900 * MS);
        assert_eq!(pacer.idle_until(), None);
        pacer.submitted(3, now);
        assert_eq!(pacer.idle_until(), None, "submit 3 is not known to have finished");
        pacer.finished(2, now + MS);
        assert_eq!(pacer.idle_until(), None, "only another submit has finished");
        pacer.finished(4, now + MS);
        assert_eq!(pacer.idle_until(), Some(now + 2 * MS));
        pacer.set(0.5.try_into().unwrap());
        assert_eq!(pacer.idle_until(), Some(now + 2 * MS), "the same limit again");
        pacer.set(Courtesy::NONE);
        assert_eq!(pacer.idle_until(), None);
    }
}
