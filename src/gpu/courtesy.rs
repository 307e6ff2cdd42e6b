//! Keeps the device idle between submits, so that this process takes no more than a share of the device's time.
//!
//! Behind each submit comes a gap in proportion to the time that the submit took. That time is the host's: from the submit
//! to the moment at which a wait saw its end. It is never less than the device's own, so the share of the device is never
//! more than what is allowed. This file reads no clock.

use std::time::{Duration, Instant};

use crate::config::Courtesy;

/// The longest gap. A process that was stopped in the middle of a submit, by a debugger or a suspend, saw it take minutes.
const LONGEST_GAP: Duration = Duration::from_secs(1);

/// The time to leave the device idle behind a submit that took `busy`.
fn gap(courtesy: Courtesy, busy: Duration) -> Duration {
    let share = courtesy.share();
    busy.mul_f64((1.0 - share) / share).min(LONGEST_GAP)
}

/// The last submit, before which the device had finished everything else.
#[derive(Debug, Clone, Copy)]
struct LastSubmit {
    /// Its value on the device's timeline.
    value: u64,
    began: Instant,
    ended: Option<Instant>,
}

/// Says how long the device is to be left idle.
#[derive(Debug)]
pub(super) struct Pacer {
    courtesy: Courtesy,
    /// `None` before the first submit that is bounded.
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

    /// Bounds the submits from now on. What was submitted unbounded is followed by no gap.
    pub fn set(&mut self, courtesy: Courtesy) {
        if self.courtesy != courtesy {
            *self = Self { courtesy, last: None };
        }
    }

    /// Notes the submit of `value` at `began`, when the device had finished everything before.
    pub fn submitted(&mut self, value: u64, began: Instant) {
        self.last = self.courtesy.is_bound().then_some(LastSubmit { value, began, ended: None });
    }

    /// Notes that the device was seen to have finished everything up to `value`.
    pub fn finished(&mut self, value: u64, now: Instant) {
        if let Some(last) = self.last.as_mut().filter(|last| last.value <= value) {
            last.ended.get_or_insert(now);
        }
    }

    /// The time until which the device is to be left idle. `None` if it may have its next submit at once.
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
    fn a_gap_is_what_keeps_a_submit_to_its_share() {
        let start = Instant::now();
        for (share, busy_ms, gap_ms) in
            [(0.5, 8, 8), (0.25, 8, 24), (0.8, 8, 2), (0.1, 8, 72), (0.1, 100, 900), (0.5, 600_000, 1000)]
        {
            let mut pacer = pacer(share);
            pacer.submitted(7, start);
            pacer.finished(7, start + busy_ms * MS);
            let until = pacer.idle_until().unwrap();
            let error = until.duration_since(start).as_secs_f64() - (busy_ms + gap_ms) as f64 / 1e3;
            assert!(error.abs() < 1e-6, "{share} of the time, behind {busy_ms} ms: {until:?}");
        }
    }

    /// The clock of this test is its own. Submits of all lengths come as soon as they may, or later.
    #[test]
    fn the_device_is_busy_for_its_share_of_the_time_at_most() {
        for share in [0.1, 0.3, 0.5, 0.9] {
            let start = Instant::now();
            let (mut pacer, mut now, mut busy) = (pacer(share), start, Duration::ZERO);
            for value in 1..500 {
                now = pacer.idle_until().map_or(now, |until| until.max(now));
                now += if value % 7 == 0 { 3 * MS } else { Duration::ZERO }; // the host had something else to do
                pacer.submitted(value, now);
                let took = (value as u32 * 37 % 90) * MS;
                (now, busy) = (now + took, busy + took);
                pacer.finished(value, now);
                pacer.finished(value, now + 50 * MS); // a second look at the same end
            }
            let until = pacer.idle_until().unwrap();
            let got = busy.as_secs_f64() / (until - start).as_secs_f64();
            assert!(got <= share + 1e-6 && got > 0.8 * share, "{got} of the time, where {share} is allowed");
        }
    }

    #[test]
    fn nothing_is_left_idle_where_nothing_is_bounded() {
        let now = Instant::now();
        let mut pacer = Pacer::default();
        pacer.submitted(1, now);
        pacer.finished(1, now + MS);
        assert_eq!(pacer.idle_until(), None);
        // Courtesy begins while a submit is under way, whose beginning is not known.
        pacer.submitted(2, now);
        pacer.set(0.5.try_into().unwrap());
        pacer.finished(2, now + 900 * MS);
        assert_eq!(pacer.idle_until(), None);
        pacer.submitted(3, now);
        assert_eq!(pacer.idle_until(), None, "it is not known to have ended");
        pacer.finished(2, now + MS);
        assert_eq!(pacer.idle_until(), None, "another one has");
        pacer.finished(4, now + MS);
        assert_eq!(pacer.idle_until(), Some(now + 2 * MS));
        pacer.set(0.5.try_into().unwrap());
        assert_eq!(pacer.idle_until(), Some(now + 2 * MS), "the same bound once more");
        pacer.set(Courtesy::NONE);
        assert_eq!(pacer.idle_until(), None);
    }
}
