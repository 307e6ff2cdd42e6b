//! Learns how long each kind of kernel takes on the device, to cut steps into submits.
//!
//! Kernels differ: memory bounds a product of a few tokens, arithmetic bounds a product of many tokens, and neither
//! alone bounds attention in a long context. So each kind has its own rate, and learns only from its share of a submit.
//! A kind that was never timed counts as eight times slower than estimated for the target GPU. So its first submit is
//! short, and the time of that submit corrects the rate. This module does not read a clock.

use std::ops::AddAssign;
use std::time::Duration;

/// The kinds of kernels, each with its own rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Products of few tokens, measured by the weights that they read.
    Narrow,
    /// Products of many tokens, measured by their multiply-adds.
    Wide,
    /// Attention of tokens that are the only ones of their sequence in the step, measured by the bytes of keys and
    /// values.
    Reading,
    /// Attention of several tokens of a sequence, measured by its multiply-adds.
    Attention,
    /// Logits and draws, measured by the weights that they read.
    Draws,
}

const KINDS: usize = 5;

/// The most tokens that count as few.
const FEW: usize = 16;
/// Tokens for which a product reads its weights once on a CPU. A GPU reads weights once for 32 tokens; the rates learn
/// that over time.
const TOKENS_PER_PASS: usize = 8;

/// Bytes per second that a Radeon 780M is assumed to read, where `model::heaps` did not measure the device.
const ASSUMED_BYTES_PER_S: f64 = 73e9;
/// Units of work per second, estimated by kind. A device that reads `bytes_per_s` bytes of memory per second reads half
/// a byte for each weight; keys and values; an int8 embedding, and spends as much time again in the sampler. The others
/// are of a Radeon 780M: the products of 40 tokens/s of a 27B; attention of 128 tokens of a 27B over 131,072 keys in 1.4
/// to 2.7 s.
fn estimated(bytes_per_s: f64) -> [f64; KINDS] {
    [2.0 * bytes_per_s, 1e12, bytes_per_s, 5e11, bytes_per_s / 2.0]
}
/// Factor by which a kind counts as slower until it is timed.
const CAREFUL: f64 = 8.0;
/// The shortest time that the rates distinguish: a shorter submit counts as this long.
const SHORTEST_TIMED: Duration = Duration::from_millis(1);

/// An amount of work: the number of units of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WorkAmount([u64; KINDS]);

impl WorkAmount {
    /// The products of `tokens` tokens with matrices that have `weights` weights together.
    pub fn products(weights: u64, tokens: usize) -> WorkAmount {
        let mut work = WorkAmount::default();
        if tokens <= FEW {
            work.0[Kind::Narrow as usize] = weights * passes(tokens);
        } else {
            work.0[Kind::Wide as usize] = weights * tokens as u64;
        }
        work
    }

    /// Attention of single tokens to `bytes` bytes of keys and values.
    pub fn reading(bytes: u64) -> WorkAmount {
        let mut work = WorkAmount::default();
        work.0[Kind::Reading as usize] = bytes;
        work
    }

    pub fn attention(multiply_adds: u64) -> WorkAmount {
        let mut work = WorkAmount::default();
        work.0[Kind::Attention as usize] = multiply_adds;
        work
    }

    /// The logits of `rows` tokens by an embedding of `weights` weights, and the draws from them.
    pub fn draws(weights: u64, rows: usize) -> WorkAmount {
        let mut work = WorkAmount::default();
        work.0[Kind::Draws as usize] = weights * passes(rows);
        work
    }

    pub fn is_nothing(self) -> bool {
        self == WorkAmount::default()
    }
}

fn passes(tokens: usize) -> u64 {
    tokens.div_ceil(TOKENS_PER_PASS) as u64
}

impl AddAssign for WorkAmount {
    fn add_assign(&mut self, other: WorkAmount) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, units)| *sum += units);
    }
}

impl std::ops::Add for WorkAmount {
    type Output = WorkAmount;

    fn add(mut self, other: WorkAmount) -> WorkAmount {
        self += other;
        self
    }
}

/// Seconds that a unit of each kind takes.
#[derive(Debug, Clone)]
pub(super) struct Rates {
    seconds: [f64; KINDS],
    is_timed: [bool; KINDS],
}

impl Default for Rates {
    fn default() -> Rates {
        Rates::of(None)
    }
}

impl Rates {
    /// Rates of a device on which nothing was timed yet, except that it reads memory at `bytes_per_s` if this was
    /// measured.
    pub fn of(bytes_per_s: Option<u64>) -> Rates {
        let estimated = estimated(bytes_per_s.map_or(ASSUMED_BYTES_PER_S, |bytes| bytes as f64));
        Rates { seconds: estimated.map(|units| CAREFUL / units), is_timed: [false; KINDS] }
    }

    /// The time that `work` is expected to take.
    pub fn time(&self, work: WorkAmount) -> Duration {
        Duration::from_secs_f64(self.shares(work).iter().sum::<f64>().min(1e9))
    }

    /// The seconds that each kind of work is expected to take.
    fn shares(&self, WorkAmount(units): WorkAmount) -> [f64; KINDS] {
        std::array::from_fn(|kind| units[kind] as f64 * self.seconds[kind])
    }

    /// Learns from the time that a submit `took`; `None` if the device has no timestamps. The difference from the
    /// expected time is divided among the kinds by their shares of it. A rate becomes slower immediately, and faster
    /// gradually. If a kind was never timed, its rate becomes faster immediately, too.
    pub fn learn(&mut self, work: WorkAmount, took: Option<Duration>) {
        let Some(took) = took.map(|took| took.max(SHORTEST_TIMED)) else { return };
        let shares = self.shares(work);
        let expected: f64 = shares.iter().sum();
        if expected <= 0.0 || took == SHORTEST_TIMED && expected <= SHORTEST_TIMED.as_secs_f64() {
            return;
        }
        let error = took.as_secs_f64() / expected - 1.0;
        for (kind, share) in shares.into_iter().enumerate().map(|(kind, s)| (kind, s / expected)) {
            let is_first = !self.is_timed[kind] && share > 0.5;
            self.is_timed[kind] |= is_first;
            let part = if error > 0.0 || is_first { 1.0 } else { 1.0 / 8.0 };
            self.seconds[kind] *= 1.0 + part * share * error;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn ms(rates: &Rates, work: WorkAmount) -> f64 {
        rates.time(work).as_secs_f64() * 1e3
    }

    #[test]
    fn one_kind_learns_nothing_from_another() {
        let mut rates = Rates::default();
        let (decode, prefill) =
            (WorkAmount::products(1_000_000_000, 1), WorkAmount::products(1_000_000_000, 128));
        let deep = WorkAmount::attention(1_000_000_000_000);
        let before = [prefill, deep].map(|work| ms(&rates, work));
        for _ in 0..1000 {
            rates.learn(decode, Some(7 * MS));
        }
        assert!((ms(&rates, decode) - 7.0).abs() < 0.1);
        assert_eq!([prefill, deep].map(|work| ms(&rates, work)), before);
    }

    #[test]
    fn what_was_never_timed_is_slow_and_known_after_one_submit() {
        let mut rates = Rates::default();
        let work = WorkAmount::products(10_000_000_000, 8);
        let careful = ms(&rates, work);
        assert!((careful - 8.0 * 1e10 / 146e9 * 1e3).abs() < 1.0, "{careful}");
        rates.learn(work, Some(60 * MS));
        assert!((ms(&rates, work) - 60.0).abs() < 1e-6);
        // Slower immediately; faster by an eighth of the difference.
        rates.learn(work, Some(90 * MS));
        assert!((ms(&rates, work) - 90.0).abs() < 1e-6);
        rates.learn(work, Some(10 * MS));
        assert!((ms(&rates, work) - 80.0).abs() < 1e-6);
        // A submit without a time changes nothing. A submit that is too short to measure changes nothing, either.
        rates.learn(work, None);
        rates.learn(WorkAmount::products(1000, 8), Some(MS / 2));
        rates.learn(WorkAmount::default(), Some(50 * MS));
        assert!((ms(&rates, work) - 80.0).abs() < 1e-6);
        // Short submits of a kind that was expected to take long make its rate faster. On a fast device, nothing else
        // would.
        for _ in 0..200 {
            rates.learn(work, Some(MS / 10));
        }
        assert!((ms(&rates, work) - 1.0).abs() < 1e-3);
    }

    #[test]
    fn a_measured_memory_replaces_the_assumed_one_where_memory_bounds() {
        let (assumed, measured) = (Rates::default(), Rates::of(Some(36_500_000_000)));
        let slower = |work: WorkAmount| ms(&measured, work) / ms(&assumed, work);
        let by_memory =
            [WorkAmount::products(1 << 30, 8), WorkAmount::reading(1 << 30), WorkAmount::draws(1 << 30, 1)];
        for work in by_memory {
            assert!((slower(work) - 2.0).abs() < 1e-6, "{work:?}");
        }
        for work in [WorkAmount::products(1 << 30, 64), WorkAmount::attention(1 << 40)] {
            assert!((slower(work) - 1.0).abs() < 1e-6, "{work:?}");
        }
        // A gigabyte at 36.5 GB/s, eight times slower.
        let gigabyte = ms(&measured, WorkAmount::reading(1_000_000_000));
        assert!((gigabyte - 8.0 * 1e3 / 36.5).abs() < 0.1, "{gigabyte}");
    }

    #[test]
    fn two_kinds_in_one_submit_share_the_error() {
        let (products, attention) =
            (WorkAmount::products(1_000_000_000, 64), WorkAmount::attention(40_000_000_000));
        let truth = |parts: [f64; 2]| Duration::from_secs_f64(parts[0] * 0.1 + parts[1] * 0.05);
        let mut rates = Rates::default();
        for _ in 0..200 {
            rates.learn(products, Some(truth([1.0, 0.0])));
            rates.learn(products + attention, Some(truth([1.0, 1.0])));
        }
        let (p, a) = (ms(&rates, products), ms(&rates, attention));
        assert!((p - 100.0).abs() < 5.0 && (a - 50.0).abs() < 5.0, "{p} {a}");
    }
}
