//! The arithmetic of the NPU's attention kernel (`npu/kernels/attention.cc`), with every rounding, and the bound on its
//! error, which is the tolerance of the self-test.
//!
//! The kernel has not run on an NPU. This module computes what the kernel's source says, according to the published
//! facts about AIE2. The bound below holds for any order of f32 sums, and for sums that are truncated instead of
//! rounded.
//!
//! # The arithmetic
//!
//! A block of queries is combined with the tiles of keys in ascending order. For each row and tile, with f32 sums:
//!
//! 1. `s = Q·K`, 8 products at a time (`aie::mmul<4, 8, 4>`).
//! 2. `n = max(n, floor(log2(e) · max s) + 1)`. If `n` grows by k, `l` and `O` are divided by 2^k. This is exact: it
//!    subtracts k from their exponents. So rounding errors do not add up over tiles. They would if the exponentials
//!    were relative to the maximum itself.
//! 3. `P = bf16(exp(bf16(s - n · ln 2)))`, with the argument clamped to at least -80; 0 if the row does not see the
//!    key.
//! 4. `l += Σ P` and `O += P·V`. Both sums use the rounded P, so that both have the same weights.
//!
//! At the end the row is `O / l`.
//!
//! `exp` is the usual method on AIE2: two tables of 256 bf16 each, `exp(x) = whole[floor(x)] · part[x - floor(x)]`,
//! with x in fixed point with 8 fractional bits, rounded down, and the product in f32. The entries are `exp` rounded to
//! the nearest bf16 (mlir-aie, `aie_runtime_lib/AIE2/lut_based_ops.h` and `.cpp`). The kernel sets the rounding mode to
//! nearest even before it converts to bf16; AIE2's default is downwards (AMD UG1603, "Rounding and Saturation Modes").
//!
//! # The bound
//!
//! [`Reference`] has exact attention in f64, `o = Σ p v`, and for each number the largest allowed error of the kernel.
//! The kernel's weight of key j is `p e^η`, up to a factor that is the same for all keys of the row, and
//!
//! ```text
//! |η| <= ε =   |Δs|                           Q and K rounded to bf16: known exactly from the inputs
//!            + d |q| |k| 2^-23                d sums of products, each truncated (|q·k| summed is at most |q| |k|)
//!            + (|m| + 1) 2^-19 + |s| 2^-23    n ln 2, in f32 that bf16 emulates, and the difference
//!            + (m - s + ln 2) 2^-8            the argument rounded to bf16; m is the row's largest score
//!            + EXP_ERROR                      the tables and the rounding of P, below
//! ```
//!
//! As `Σ p (v - o) = 0`, the kernel's `O = Σ p e^η v / Σ p e^η` differs from `o` by `Σ p (e^η - 1) (v - o) / Σ p e^η`,
//! which is at most `Σ p (e^ε - 1) |v - o| / Σ p e^-ε`. Rounding V to bf16 adds `Σ p |Δv|`. The truncated sums over n
//! keys add `2 n 2^-23`, and the division adds 2^-19, both relative to the largest `|v|` that the row sees. Keys whose
//! argument is clamped to -80 add less than `n e^-79` of it.
//!
//! `EXP_ERROR`: the fixed point takes up to 2^-8 from the argument; two entries and P are each rounded by up to 2^-8.
//! An error that is the same for all keys cancels, so an interval `[-4, 3] 2^-8` counts by half its width, 3.5 · 2^-8.
//! A test tries every possible argument, and finds a narrower interval, `[-2.63, 2.05] 2^-8`. Half its width is the
//! constant.

use std::sync::LazyLock;

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::contract::Job;

/// The smallest argument of `exp`.
const LOWEST: f32 = -80.0;

/// The exponent of a row that has seen no key. It is below the exponent of any score.
const NO_EXPONENT: i32 = -(1 << 26);

/// Half the width of the interval of `ln(bf16(exp(x))) - x` over every bf16 x from -80 to 0.
const EXP_ERROR: f64 = 2.34 / 256.0;

/// A weight below this has no effect: `e^-79`.
const NEGLIGIBLE: f64 = 4.9e-35;

/// The inputs of a job, in the layout of its buffers: queries `[group][head][row][head_dim]`, keys and values
/// `[group][key][head_dim]`.
#[derive(Debug, Clone)]
pub struct Inputs<T> {
    pub queries: Vec<T>,
    pub keys: Vec<T>,
    pub values: Vec<T>,
}

impl Inputs<f32> {
    /// Random inputs of variance 1 whose scores have this standard deviation. From 5 on, each row depends on so few
    /// keys that one missing key changes some row visibly. All numbers are bf16, so every device has the same inputs.
    pub fn random(job: &Job, seed: u64, score_deviation: f32) -> Inputs<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // A sum of three uniform numbers of variance 1/3 each: close enough to normal, and bounded.
        let mut numbers = |bytes: u64, scale: f32| -> Vec<f32> {
            let number = |_| (0..3).map(|_| rng.random_range(-1f32..1.0)).sum::<f32>() * scale;
            (0..bytes / 2).map(number).map(|x| bf16::from_f32(x).to_f32()).collect()
        };
        let [queries, keys, values, ..] = job.layout().bytes();
        let scale = score_deviation / (job.head_dim() as f32).sqrt();
        Inputs { queries: numbers(queries, scale), keys: numbers(keys, 1.0), values: numbers(values, 1.0) }
    }

    /// The contents of the buffers.
    pub fn rounded(&self) -> Inputs<bf16> {
        let round = |numbers: &[f32]| numbers.iter().map(|x| bf16::from_f32(*x)).collect();
        Inputs { queries: round(&self.queries), keys: round(&self.keys), values: round(&self.values) }
    }
}

/// The kernel's output O, `[group][head][row][head_dim]`; 0 in the rows after the job's last row.
///
/// # Panics
///
/// If the sizes of the inputs are not the job's.
pub fn attend(job: &Job, inputs: &Inputs<bf16>) -> Vec<f32> {
    attend_where(job, inputs, |row, key| job.sees(row, key))
}

/// [`attend`] with another mask, for tests of the bound.
///
/// # Panics
///
/// If the sizes of the inputs are not the job's.
pub fn attend_where(job: &Job, inputs: &Inputs<bf16>, sees: impl Fn(u32, u32) -> bool + Copy) -> Vec<f32> {
    let (width, tile) = (job.head_dim() as usize, job.tile());
    let mut output = vec![0.0; inputs.queries.len()];
    for (group, head) in job.heads() {
        for first_row in (0..job.rows()).step_by(tile as usize) {
            let at = row_at(job, group, head, first_row);
            let span = at..at + tile as usize * width;
            let mut block = Block::new(first_row, width, &inputs.queries[span.clone()]);
            for first_key in (0..job.keys()).step_by(tile as usize) {
                let at = key_at(job, group, first_key);
                let span = at..at + tile as usize * width;
                block.attend(first_key, &inputs.keys[span.clone()], &inputs.values[span], sees);
            }
            block.finish(&mut output[span]);
        }
        let beyond = row_at(job, group, head, job.rows())..row_at(job, group, head, job.bucket().rows());
        output[beyond].fill(0.0);
    }
    output
}

/// The index of a row's first number in Q and in O.
fn row_at(job: &Job, group: u32, head: u32, row: u32) -> usize {
    let rows = job.bucket().rows();
    ((group * job.heads_per_group() + head) * rows + row) as usize * job.head_dim() as usize
}

/// The index of a key's first number in K and in V.
fn key_at(job: &Job, group: u32, key: u32) -> usize {
    (group as usize * job.bucket().keys() as usize + key as usize) * job.head_dim() as usize
}

/// A block of rows on a core.
struct Block<'a> {
    first_row: u32,
    width: usize,
    /// `[rows][width]`.
    queries: &'a [bf16],
    /// For each row, the power of two that `l` and `output` are relative to.
    n: Vec<i32>,
    l: Vec<f32>,
    /// `[rows][width]`.
    output: Vec<f32>,
}

impl Block<'_> {
    fn new(first_row: u32, width: usize, queries: &[bf16]) -> Block<'_> {
        let rows = queries.len() / width;
        let (n, l, output) = (vec![NO_EXPONENT; rows], vec![0.0; rows], vec![0.0; rows * width]);
        Block { first_row, width, queries, n, l, output }
    }

    /// Adds a tile: `keys` and `values` are `[keys][width]`.
    fn attend(&mut self, first_key: u32, keys: &[bf16], values: &[bf16], sees: impl Fn(u32, u32) -> bool) {
        for row in 0..self.n.len() {
            let query = &self.queries[row * self.width..][..self.width];
            let seen: Vec<bool> = (0..keys.len() / self.width)
                .map(|key| sees(self.first_row + row as u32, first_key + key as u32))
                .collect();
            let scores: Vec<f32> = keys.chunks_exact(self.width).map(|key| dot(query, key)).collect();
            let visible = scores.iter().zip(&seen).filter(|(_, seen)| **seen);
            let Some(largest) = visible.map(|(s, _)| *s).reduce(f32::max) else { continue };
            self.raise(row, exponent_above(largest));
            let reference = self.n[row] as f32 * std::f32::consts::LN_2;
            let weight = |(s, seen): (&f32, &bool)| {
                if *seen { exp(bf16::from_f32(s - reference)) } else { bf16::ZERO }
            };
            let weights: Vec<bf16> = scores.iter().zip(&seen).map(weight).collect();
            for (p, value) in weights.iter().zip(values.chunks_exact(self.width)) {
                self.l[row] += p.to_f32();
                for (o, v) in self.output[row * self.width..][..self.width].iter_mut().zip(value) {
                    *o += p.to_f32() * v.to_f32();
                }
            }
        }
    }

    /// Makes a row relative to 2^n, unless it is already relative to a larger power.
    fn raise(&mut self, row: usize, n: i32) {
        let by = n.saturating_sub(self.n[row]);
        if by > 0 {
            self.n[row] = n;
            self.l[row] = divided(self.l[row], by as u32);
            for o in &mut self.output[row * self.width..][..self.width] {
                *o = divided(*o, by as u32);
            }
        }
    }

    fn finish(self, output: &mut [f32]) {
        for ((row, numbers), l) in output.chunks_exact_mut(self.width).enumerate().zip(&self.l) {
            // Every row of a job sees a key. The padding rows after them may see none.
            let inverse = if *l == 0.0 { 0.0 } else { 1.0 / l };
            for (number, o) in numbers.iter_mut().zip(&self.output[row * self.width..]) {
                *number = o * inverse;
            }
        }
    }
}

fn dot(query: &[bf16], key: &[bf16]) -> f32 {
    // Products of two bf16 are exact in f32.
    query.iter().zip(key).fold(0.0, |sum, (q, k)| sum + q.to_f32() * k.to_f32())
}

/// The smallest n with `2^n > e^score`, or the next one.
fn exponent_above(score: f32) -> i32 {
    let limit = -(NO_EXPONENT as f32) / 2.0;
    (score * std::f32::consts::LOG2_E).floor().clamp(-limit, limit) as i32 + 1
}

/// `x / 2^by`, by subtraction from the exponent's bits; 0 if the exponent gets too small.
fn divided(x: f32, by: u32) -> f32 {
    let exponent = x.to_bits() >> 23 & 0xff;
    if exponent > by { f32::from_bits(x.to_bits() - (by << 23)) } else { 0.0 }
}

/// `exp` of a number that is at most slightly above 0, as bf16.
fn exp(x: bf16) -> bf16 {
    /// `exp(i)` for i from -128 to 127, indexed by its two's complement, and `exp(i / 256)`.
    static TABLES: LazyLock<[[bf16; 256]; 2]> = LazyLock::new(|| {
        let entry = |x: f64| bf16::from_f64(x.exp());
        [
            std::array::from_fn(|i| entry(f64::from(i as u8 as i8))),
            std::array::from_fn(|i| entry(i as f64 / 256.0)),
        ]
    });
    let fixed = (x.to_f32().clamp(LOWEST, -LOWEST) * 256.0).floor() as i16;
    let [whole, part] = &*TABLES;
    let [low, high] = fixed.to_le_bytes();
    bf16::from_f32(whole[usize::from(high)].to_f32() * part[usize::from(low)].to_f32())
}

/// Exact attention, and the largest allowed error of the kernel. It has the layout of O.
#[derive(Debug, Clone)]
pub struct Reference {
    values: Vec<f64>,
    /// Infinite in the rows after the job's last row, and in rows that are not compared.
    bounds: Vec<f64>,
}

impl Reference {
    /// Attention of the inputs before they are rounded to bf16, in f64 on the CPU. Only self-tests and tests use it.
    ///
    /// # Panics
    ///
    /// If the sizes of the inputs are not the job's.
    pub fn new(job: &Job, inputs: &Inputs<f32>) -> Reference {
        Reference::of_rows(job, inputs, 1)
    }

    /// [`Reference::new`] for every `apart`-th row and the last one. The bounds of the other rows are infinite:
    /// computing all rows of a large job takes seconds.
    ///
    /// # Panics
    ///
    /// If the sizes of the inputs are not the job's, or `apart` is 0.
    pub fn of_rows(job: &Job, inputs: &Inputs<f32>, apart: u32) -> Reference {
        let rounded = inputs.rounded();
        let width = job.head_dim() as usize;
        let mut values = vec![0.0; inputs.queries.len()];
        let mut bounds = vec![f64::INFINITY; values.len()];
        for (group, head) in job.heads() {
            for row in (0..job.rows()).filter(|row| row % apart == 0 || row + 1 == job.rows()) {
                let at = row_at(job, group, head, row);
                let seen: Vec<usize> = (0..job.keys())
                    .filter(|key| job.sees(row, *key))
                    .map(|key| key_at(job, group, key))
                    .collect();
                let scores = seen.iter().map(|key| Score {
                    exact: dot_f64(&inputs.queries[at..][..width], &inputs.keys[*key..][..width]),
                    rounded: dot_f64(&rounded.queries[at..][..width], &rounded.keys[*key..][..width]),
                    norms: norm(&rounded.queries[at..][..width]) * norm(&rounded.keys[*key..][..width]),
                });
                let vectors = seen
                    .iter()
                    .map(|key| (&inputs.values[*key..][..width], &rounded.values[*key..][..width]));
                let (value, bound) = (&mut values[at..][..width], &mut bounds[at..][..width]);
                exact_row(&scores.collect::<Vec<_>>(), &vectors.collect::<Vec<_>>(), value, bound);
            }
        }
        Reference { values, bounds }
    }

    /// The largest error of `output` in the compared rows, as a fraction of its bound. Up to 1, the output is a
    /// possible output of the kernel. Infinite for a value that is NaN, and if the length differs.
    pub fn worst(&self, output: &[f32]) -> f64 {
        if output.len() != self.values.len() {
            return f64::INFINITY;
        }
        let numbers = output.iter().zip(&self.values).zip(&self.bounds);
        let parts =
            numbers.filter(|(_, bound)| bound.is_finite()).map(|((output, value), bound)| match (f64::from(
                *output,
            ) - value)
                .abs()
            {
                0.0 => 0.0,
                error if error.is_nan() => f64::INFINITY,
                error => error / bound,
            });
        parts.fold(0.0, f64::max)
    }

    /// Exact attention, `[group][head][row][head_dim]`.
    pub fn values(&self) -> &[f64] {
        &self.values
    }
}

/// A row's score of one key.
struct Score {
    exact: f64,
    /// After rounding to bf16.
    rounded: f64,
    /// The norm of the query times the norm of the key.
    norms: f64,
}

/// One row of a [`Reference`], from its scores, and from the values that it sees, exact and rounded.
fn exact_row(scores: &[Score], vectors: &[(&[f32], &[bf16])], value: &mut [f64], bound: &mut [f64]) {
    let width = value.len() as f64;
    let largest = scores.iter().map(|s| s.exact).fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> = scores.iter().map(|s| (s.exact - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|p| *p /= sum);
    let errors: Vec<f64> = scores.iter().map(|s| weight_error(s, largest, width)).collect();
    for (p, (v, _)) in weights.iter().zip(vectors) {
        for (o, v) in value.iter_mut().zip(*v) {
            *o += p * f64::from(*v);
        }
    }
    bound.fill(0.0);
    let (mut least_sum, mut magnitude) = (0.0, 0f64);
    for ((p, error), (v, rounded)) in weights.iter().zip(&errors).zip(vectors) {
        least_sum += p * (-error).exp();
        for ((b, o), (v, rounded)) in bound.iter_mut().zip(&*value).zip(v.iter().zip(*rounded)) {
            let (v, rounded) = (f64::from(*v), f64::from(*rounded));
            *b += p * (error.exp_m1() * (rounded - o).abs() + (rounded - v).abs());
            magnitude = magnitude.max(rounded.abs());
        }
    }
    let keys = scores.len() as f64;
    let sums = magnitude * (2.0 * keys * 2f64.powi(-23) + 2f64.powi(-19) + keys * NEGLIGIBLE);
    bound.iter_mut().for_each(|b| *b = *b / least_sum + sums);
}

/// ε of the module's documentation.
fn weight_error(score: &Score, largest: f64, width: f64) -> f64 {
    let below = (largest - score.rounded).max(0.0);
    let inputs = (score.exact - score.rounded).abs();
    let products = width * score.norms * 2f64.powi(-23);
    let difference = (largest.abs() + 1.0) * 2f64.powi(-19) + score.rounded.abs() * 2f64.powi(-23);
    let argument = (below + std::f64::consts::LN_2) * 2f64.powi(-8);
    inputs + products + difference + argument + EXP_ERROR
}

fn dot_f64<T: Into<f64> + Copy>(a: &[T], b: &[T]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (*a).into() * (*b).into()).sum()
}

fn norm(x: &[bf16]) -> f64 {
    dot_f64(x, x).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::contract::{Bucket, RowRange, Shape};
    use super::*;

    /// On random data no error is more than two thirds of its bound (`tests/npu/tile.rs`). Rows that see few keys come
    /// closest to it, because errors do not cancel there.
    const MARGIN: f64 = 2.0 / 3.0;

    /// A faulty kernel exceeds its bound at least by this factor, so that the result does not depend on the random
    /// data.
    const FAULT: f64 = 4.0;

    fn planned(head_dim: u32, heads: u32, window: Option<u32>, groups: u32, first: u32, len: u32) -> Job {
        Job::plan(head_dim, heads, window, groups, RowRange { first, len }).unwrap().1
    }

    /// A small job of two groups with `offset` keys before its rows.
    fn small(offset: u32, len: u32) -> Job {
        planned(128, 2, None, 2, offset, len)
    }

    #[track_caller]
    fn within(job: &Job, inputs: &Inputs<f32>, most: f64, what: &str) {
        let worst = Reference::new(job, inputs).worst(&attend(job, &inputs.rounded()));
        println!("{what}: {worst:.3} of the bound");
        assert!(worst <= most, "{what}: {worst:.3} of the bound, {most} is expected");
    }

    #[test]
    fn adversarial_inputs_are_within_the_bound() {
        let job = small(70, 33);
        let random = Inputs::random(&job, 1, 3.0);
        let with = |change: &dyn Fn(&mut Inputs<f32>)| {
            let mut inputs = random.clone();
            change(&mut inputs);
            inputs
        };
        let scaled = |by: f32| with(&|i| i.queries.iter_mut().for_each(|q| *q *= by));
        within(&job, &scaled(0.0), 1.0, "equal scores");
        within(&job, &scaled(1e-3), 1.0, "nearly equal scores");
        within(&job, &scaled(30.0), 1.0, "scores of a deviation of 90");
        within(&job, &scaled(3000.0), 1.0, "scores of a deviation of 9000: one key has it all");
        within(&job, &with(&|i| i.values.iter_mut().for_each(|v| *v = *v * 1e4 + 1e4)), 1.0, "large values");
        within(&job, &with(&|i| i.values.fill(1.0)), 1.0, "equal values");
        // Scores that grow from key to key, so that each tile raises the exponent, and that fall.
        for step in [0.25, -0.25] {
            let along = with(&|i| {
                i.queries.iter_mut().for_each(|q| *q = 0.25);
                for (key, numbers) in i.keys.chunks_exact_mut(128).enumerate() {
                    numbers.fill(step * (key % 512) as f32 / 32.0);
                }
            });
            within(&job, &along, 1.0, "scores along the keys");
        }
        // The largest score is at the edge of the window, just inside and just outside.
        let (shape, bucket) = (Shape::new(128, 2, None).unwrap(), Bucket::new(256, 512, 2).unwrap());
        let range = |first, len| RowRange { first, len };
        let job = Job::new(shape, bucket, range(100, 40), range(0, 140), Some(64)).unwrap();
        let edge = with(&|i| {
            i.queries.iter_mut().for_each(|q| *q = 0.5);
            for key in 0..140 {
                let value = if matches!(key, 36 | 37 | 68) { 0.25 } else { 0.0 };
                i.keys[key * 128..][..128].fill(value);
            }
        });
        within(&job, &edge, 1.0, "the largest scores on the window's edge");
        // One row, which sees one key.
        let first = small(0, 1);
        within(&first, &Inputs::random(&first, 2, 3.0), 1.0, "the first row");
    }

    /// Inputs that lose bits when they are rounded to bf16. The error of a row with one key is its value's rounding
    /// error.
    #[test]
    fn rounded_inputs_are_within_the_bound() {
        for (seed, first) in [0, 200].into_iter().enumerate() {
            let job = small(first, 40);
            let mut inputs = Inputs::random(&job, seed as u64, 3.0);
            for numbers in [&mut inputs.queries, &mut inputs.keys, &mut inputs.values] {
                numbers.iter_mut().enumerate().for_each(|(i, x)| *x *= 1.0 + (i % 7) as f32 * 1e-3);
            }
            within(&job, &inputs, 1.0, "inputs that are rounded");
        }
    }

    #[test]
    fn rows_and_keys_beyond_the_real_ones_change_nothing() {
        let job = small(37, 45);
        let inputs = Inputs::random(&job, 3, 3.0).rounded();
        let mut poisoned = inputs.clone();
        for group in 0..2 {
            let keys = key_at(&job, group, job.keys())..key_at(&job, group, job.bucket().keys());
            poisoned.keys[keys.clone()].fill(bf16::from_f32(99.0));
            poisoned.values[keys].fill(bf16::from_f32(99.0));
            for head in 0..2 {
                let rows = row_at(&job, group, head, 45)..row_at(&job, group, head, 256);
                poisoned.queries[rows].fill(bf16::from_f32(99.0));
            }
        }
        assert_eq!(attend(&job, &inputs), attend(&job, &poisoned));
    }

    #[test]
    fn another_heads_queries_and_keys_exceed_the_bound() {
        let job = small(90, 60);
        let inputs = Inputs::random(&job, 20, 3.0);
        let reference = Reference::new(&job, &inputs);
        let rounded = inputs.rounded();
        let swapped = |change: &dyn Fn(&mut Inputs<bf16>)| {
            let mut inputs = rounded.clone();
            change(&mut inputs);
            reference.worst(&attend(&job, &inputs))
        };
        let (head, group) = (row_at(&job, 0, 1, 0), key_at(&job, 1, 0));
        assert!(swapped(&|_| ()) <= MARGIN);
        assert!(swapped(&|i| i.queries.rotate_left(head)) > FAULT);
        assert!(swapped(&|i| i.keys.rotate_left(group)) > FAULT);
        assert!(swapped(&|i| i.values.rotate_left(group)) > FAULT);
    }

    /// A kernel that does not divide `l`, `O` or both when a row's exponent grows.
    #[test]
    fn a_missing_rescale_exceeds_the_bound_by_far() {
        let job = small(200, 32);
        let inputs = Inputs::random(&job, 30, 3.0);
        let (reference, rounded) = (Reference::new(&job, &inputs), inputs.rounded());
        let worst = |divides_l: bool, divides_output: bool| {
            let mut output = attend(&job, &rounded);
            let mut block = Block::new(0, 128, &rounded.queries[..32 * 128]);
            for first_key in (0..job.keys()).step_by(32) {
                let at = key_at(&job, 0, first_key);
                let keys = &rounded.keys[at..][..32 * 128];
                for row in 0..32 {
                    let query = &rounded.queries[row * 128..][..128];
                    let seen = (first_key..first_key + 32).filter(|key| job.sees(row as u32, *key));
                    let scores = seen.map(|key| dot(query, &keys[(key - first_key) as usize * 128..][..128]));
                    let Some(largest) = scores.reduce(f32::max) else { continue };
                    // `attend` finds an exponent that has already grown, and divides nothing.
                    let by = exponent_above(largest).saturating_sub(block.n[row]).max(0) as u32;
                    block.n[row] += by as i32;
                    if divides_l {
                        block.l[row] = divided(block.l[row], by);
                    }
                    if divides_output {
                        block.output[row * 128..][..128].iter_mut().for_each(|o| *o = divided(*o, by));
                    }
                }
                block.attend(first_key, keys, &rounded.values[at..][..32 * 128], |row, key| {
                    job.sees(row, key)
                });
            }
            block.finish(&mut output[..32 * 128]);
            reference.worst(&output)
        };
        assert!(worst(true, true) <= MARGIN);
        for (divides_l, divides_output) in [(false, false), (true, false), (false, true)] {
            let worst = worst(divides_l, divides_output);
            assert!(worst > FAULT, "l divided: {divides_l}, O divided: {divides_output}: {worst:.2} bounds");
        }
    }

    #[test]
    fn powers_of_two_are_divided_exactly() {
        for (x, by, expected) in [
            (12.0, 2, 3.0),
            (-12.0, 3, -1.5),
            (0.0, 5, 0.0),
            (1.0, 0, 1.0),
            (1.5, 126, 1.5 * 2f32.powi(-126)),
        ] {
            assert_eq!(divided(x, by), expected, "{x} / 2^{by}");
        }
        // The result is below the smallest normal number.
        assert_eq!([divided(1.5, 127), divided(1.5, u32::MAX), divided(0.0, 0)], [0.0; 3]);
    }

    #[test]
    fn the_exponential_is_that_of_the_published_tables() {
        // Entries of `exp_ilut_ab` at 1, -1 and -80, and of `exp_flut_ab` at 1/256, 128/256 and 255/256.
        let entry = |x: f32| exp(bf16::from_f32(x)).to_bits();
        for (x, bits) in
            [(0.0, 16256), (1.0, 16430), (-1.0, 16060), (-80.0, 1472), (1.0 / 256.0, 16257), (0.5, 16339)]
        {
            assert_eq!(entry(x), bits, "exp({x})");
        }
        // Clamped to -80, also for arguments that no row of keys may cause.
        assert_eq!([entry(-1e30), entry(f32::NEG_INFINITY)], [1472; 2]);
        // A number just below 0 is rounded down to -1/256: -1 + 255/256.
        let product = bf16::from_bits(16060).to_f32() * bf16::from_bits(16429).to_f32();
        assert_eq!(entry(-1e-9), bf16::from_f32(product).to_bits());
    }

    #[test]
    fn the_error_of_every_exponential_is_known() {
        let arguments = (0..=u16::MAX).map(bf16::from_bits).filter(|x| (LOWEST..=0.0).contains(&x.to_f32()));
        let errors = arguments.map(|x| exp(x).to_f64().ln() - x.to_f64());
        let (low, high) = errors.fold((0f64, 0f64), |(low, high), e| (low.min(e), high.max(e)));
        println!("ln(exp(x)) - x is between {:.3} and {:.3} 2^-8", low * 256.0, high * 256.0);
        let half = (high - low) / 2.0;
        assert!(half <= EXP_ERROR && EXP_ERROR < half * 1.01, "{half}");
        // The analysis in the module's documentation.
        assert!(low > -4.05 / 256.0 && high < 3.05 / 256.0);
    }

    #[test]
    fn what_is_surely_zero_has_to_be_zero() {
        let job = small(10, 20);
        let mut inputs = Inputs::random(&job, 50, 3.0);
        inputs.values.fill(0.0);
        let reference = Reference::new(&job, &inputs);
        let mut output = attend(&job, &inputs.rounded());
        assert_eq!(reference.worst(&output), 0.0);
        // Row 20 is not a row of the job.
        output[row_at(&job, 1, 1, 20)] = f32::NAN;
        assert_eq!(reference.worst(&output), 0.0);
        output[row_at(&job, 1, 1, 19)] = 1e-30;
        assert_eq!(reference.worst(&output), f64::INFINITY);
    }

    /// The bound is small compared with the values. A tolerance that accepts everything would check nothing.
    #[test]
    fn the_bound_is_a_few_hundredths_of_the_values() {
        let job = planned(256, 2, None, 1, 300, 60);
        let reference = Reference::new(&job, &Inputs::random(&job, 40, 3.0));
        let real = reference.bounds.iter().filter(|b| b.is_finite());
        let mean = real.clone().sum::<f64>() / real.count() as f64;
        println!("the mean bound is {mean:.4}, of values of deviation 1");
        assert!(mean < 0.04, "{mean}");
    }
}
