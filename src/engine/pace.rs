//! Predicts the duration of a step from earlier steps. With the prediction, the scheduler limits prefill in steps with
//! decodes.
//!
//! The model is linear: a step has a fixed cost (the weights are read once), a cost for each token, and a cost for each
//! key that a token attends to. The three costs are fitted to the observed steps; newer steps count more. The average
//! time of a token is computed separately. This file reads no clock: the engine passes the duration of each step.

use std::time::Duration;

/// The amount of work of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    pub tokens: usize,
    /// The sum over the step's tokens of the number of keys that each attends to, as if every layer were a full layer.
    pub keys: u64,
}

impl Load {
    /// The load with `tokens` more tokens, at positions `start..` of a sequence.
    pub fn with(self, start: usize, tokens: usize) -> Load {
        let (start, n) = (start as u64, tokens as u64);
        let keys = n * start + n * (n + 1) / 2;
        Load { tokens: self.tokens + tokens, keys: self.keys + keys }
    }

    fn features(self) -> [f64; 3] {
        [1.0, self.tokens as f64, self.keys as f64 / 1024.0]
    }
}

/// After this many newer steps, the weight of a step has fallen to about a third (1/e).
const MEMORY_STEPS: f64 = 200.0;
/// Maximum entry on the diagonal of the covariance.
const MAX_VARIANCE: f64 = 1e3;
/// The number of steps to observe before the fit is used.
const LEARNING_STEPS: u64 = 4;
/// Minimum number of prefill tokens in a step with decodes, so that prompts always make progress. Used alone while
/// there is no prediction.
pub(super) const MIN_PREFILL_TOKENS: usize = 16;

/// Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, chapter 10).
#[derive(Debug, Clone)]
pub struct Pace {
    seconds: [f64; 3],
    covariance: [[f64; 3]; 3],
    steps: u64,
    /// Seconds and tokens of the observed steps. Older steps count less.
    recent: [f64; 2],
}

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

impl Pace {
    pub fn new() -> Self {
        // Large prior variances relative to the scale of the features, because nothing is known yet.
        let covariance = [[1.0, 0.0, 0.0], [0.0, 1e-2, 0.0], [0.0, 0.0, 1e-2]];
        Self { seconds: [0.0; 3], covariance, steps: 0, recent: [0.0; 2] }
    }

    /// Updates the fit with a step that took `took`.
    pub fn observe(&mut self, load: Load, took: Duration) {
        let x = load.features();
        let p = &self.covariance;
        let px: [f64; 3] = std::array::from_fn(|i| (0..3).map(|j| p[i][j] * x[j]).sum());
        let forget = 1.0 - 1.0 / MEMORY_STEPS;
        let scale = forget + (0..3).map(|i| x[i] * px[i]).sum::<f64>();
        let error = took.as_secs_f64() - self.predict_raw(load);
        for (seconds, gain) in self.seconds.iter_mut().zip(px) {
            *seconds += gain / scale * error;
        }
        let next: [[f64; 3]; 3] =
            std::array::from_fn(|i| std::array::from_fn(|j| (p[i][j] - px[i] * px[j] / scale) / forget));
        // If a feature does not vary, the covariance grows without bound. So it is limited. The whole matrix is scaled,
        // so that it stays a covariance.
        let largest = (0..3).map(|i| next[i][i]).fold(0.0, f64::max);
        let bound = (MAX_VARIANCE / largest).min(1.0);
        self.covariance = next.map(|row| row.map(|p| p * bound));
        self.steps += 1;
        let new = [took.as_secs_f64(), load.tokens as f64];
        self.recent = std::array::from_fn(|i| forget * self.recent[i] + new[i]);
    }

    /// The average time of a token, at least a nanosecond. `None` after too few steps.
    pub fn per_token(&self) -> Option<Duration> {
        let [seconds, tokens] = self.recent;
        let known = self.steps >= LEARNING_STEPS && tokens > 0.0;
        known.then(|| Duration::from_secs_f64((seconds / tokens).clamp(1e-9, 1e6)))
    }

    fn predict_raw(&self, load: Load) -> f64 {
        load.features().iter().zip(self.seconds).map(|(x, s)| x * s).sum()
    }

    /// The expected time of a step. `None` after too few steps.
    pub fn predict(&self, load: Load) -> Option<Duration> {
        (self.steps >= LEARNING_STEPS).then(|| {
            let cost = load.features().iter().zip(self.seconds).map(|(x, s)| x * s.max(0.0)).sum::<f64>();
            Duration::from_secs_f64(cost.clamp(0.0, 1e6))
        })
    }

    /// How many of the `wanted` tokens at positions `start..` can be added to `load` so that the step stays within
    /// `bound`. At least `least` tokens (or all that are wanted), regardless of the time.
    pub fn room(&self, load: Load, start: usize, wanted: usize, least: usize, bound: Duration) -> usize {
        let least = least.min(wanted);
        let fits = |tokens: usize| self.predict(load.with(start, tokens)).is_some_and(|took| took <= bound);
        if wanted == least || (least > 0 && !fits(least)) {
            return least;
        }
        let (mut fitting, mut beyond) = (least, wanted + 1);
        while beyond - fitting > 1 {
            let middle = fitting + (beyond - fitting) / 2;
            if fits(middle) { fitting = middle } else { beyond = middle }
        }
        fitting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_costs_of_a_linear_device_are_learnt_and_limit_the_prefill() {
        let took = |load: Load| {
            Duration::from_secs_f64(0.020 + 0.001 * load.tokens as f64 + 2e-6 * load.keys as f64)
        };
        let mut pace = Pace::new();
        let room =
            |pace: &Pace, start, bound| pace.room(Load::default(), start, 500, MIN_PREFILL_TOKENS, bound);
        assert_eq!(room(&pace, 0, Duration::from_secs(1)), MIN_PREFILL_TOKENS, "nothing is known");
        for i in 0..400usize {
            let load = Load::default().with(37 * i % 900, 1 + 29 * i % 64).with(11 * i % 300, 1 + i % 3);
            pace.observe(load, took(load));
        }
        for (start, tokens) in [(0, 10), (500, 64), (1000, 200)] {
            let load = Load::default().with(start, tokens);
            let (expected, found) = (took(load).as_secs_f64(), pace.predict(load).unwrap().as_secs_f64());
            assert!((expected - found).abs() < 0.05 * expected, "{expected} and {found}");
        }
        let bound = Duration::from_millis(120);
        let [near, far] = [0, 4000].map(|start| room(&pace, start, bound));
        assert!(took(Load::default().with(0, near)) <= bound * 21 / 20 && near > 60, "{near}");
        assert!(far < near && far >= MIN_PREFILL_TOKENS, "chunks shrink with depth: {near}, {far}");
        assert_eq!(room(&pace, 0, Duration::ZERO), MIN_PREFILL_TOKENS, "a prompt always makes progress");
        assert_eq!(pace.room(Load::default(), 0, 500, 0, Duration::ZERO), 0, "but not every prompt");
    }

    #[test]
    fn the_time_per_token_follows_the_latest_steps() {
        let mut pace = Pace::new();
        let steps = |pace: &mut Pace, n: usize, tokens: usize| {
            (0..n).for_each(|_| pace.observe(Load::default().with(0, tokens), Duration::from_millis(40)));
            pace.per_token().map(|took| took.as_secs_f64() * 1e3)
        };
        assert_eq!(steps(&mut pace, 3, 8), None, "nothing is known");
        let near = |found: Option<f64>, expected: f64| (found.unwrap() / expected - 1.0).abs() < 0.05;
        assert!(near(steps(&mut pace, 1, 8), 5.0), "8 in 40 ms");
        assert!(near(steps(&mut pace, 2000, 1), 40.0), "one in 40 ms");
        assert!(near(steps(&mut pace, 2000, 40), 1.0), "40 in 40 ms");
    }

    #[test]
    fn many_steps_without_prefill_do_not_spoil_the_prediction_for_prefill() {
        for streams in [1, 8, 16, 64] {
            let took = |load: Load| {
                Duration::from_secs_f64(0.050 + 0.004 * load.tokens as f64 + 1e-6 * load.keys as f64)
            };
            let mut pace = Pace::new();
            let step = |depth: usize| (0..streams).fold(Load::default(), |load, _| load.with(depth, 1));
            let prefill = |pace: &mut Pace, chunk: usize| {
                let load = step(500).with(300, chunk);
                pace.observe(load, took(load));
            };
            (0..100).for_each(|i| prefill(&mut pace, 16 + 7 * i % 200));
            for i in 0..20_000 {
                let load = step(600 + i % 200);
                pace.observe(load, took(load));
            }
            (0..20).for_each(|i| prefill(&mut pace, 16 + 31 * i % 200));
            for load in [step(700), step(700).with(0, 64), step(700).with(0, 256)] {
                let (expected, found) = (took(load).as_secs_f64(), pace.predict(load).unwrap().as_secs_f64());
                assert!(
                    (expected - found).abs() < 0.25 * expected,
                    "{streams} streams: {expected} and {found}"
                );
            }
        }
    }
}
