//! Searches the scale of a group with the least weighted squared error. The result is never worse than
//! round-to-nearest.
//!
//! The scale and the integers q depend on each other. For a given scale, rounding gives the integers. For given
//! integers, the best scale is `sum(h x q) / sum(h q q)` (least squares), where h is the importance of each column.
//! Candidates are a grid of scales around the one that maps the largest value to the end of the range, and
//! round-to-nearest. Errors are compared with the scale as rounded to f16. A scale may be negative, because int4 has
//! one integer more below zero than above, and the largest value of a group may have either sign.

use half::f16;

use super::{RowError, round};

/// Number of candidates on each side of the scale that maps the largest value to the end of the range.
const STEPS: i32 = 16;
/// Difference of the integers to which two neighbouring candidates map the largest value. For int4, candidates map it
/// to -6.4 to -9.6.
const STEP: f32 = 0.1;
/// Number of partial sums. They are independent, so that the compiler can vectorize the loop.
const LANES: usize = 8;

/// Quantizes one row in groups, to integers from `-qmax - 1` to `qmax`. `importance` has a non-negative weight for the
/// squared error of each column. `None` = equal weights.
pub fn quantize_row_searching(
    row: &[f32],
    importance: Option<&[f32]>,
    group: usize,
    qmax: i8,
    q: &mut [i8],
    scales: &mut [f16],
) -> Result<(), RowError> {
    assert_eq!((q.len(), scales.len()), (row.len(), row.len().div_ceil(group)), "output of a row");
    assert!(importance.is_none_or(|h| h.len() == row.len()), "importance of each column");
    let (mut trial, mut found) = (vec![0i8; group.min(row.len())], vec![0i8; group.min(row.len())]);
    for (index, ((x, q), scale)) in row.chunks(group).zip(q.chunks_mut(group)).zip(scales).enumerate() {
        let column = index * group;
        let h = importance.map(|h| &h[column..column + x.len()]);
        let largest = x.iter().fold(0f32, |most, v| if v.abs() > most.abs() { *v } else { most });
        if x.iter().any(|v| !v.is_finite()) {
            return Err(RowError::NotFinite { column });
        }
        let nearest = f16::from_f32(largest.abs() / f32::from(qmax));
        if nearest.is_infinite() {
            return Err(RowError::ScaleOverflow { column });
        }
        *scale = nearest;
        if nearest == f16::ZERO {
            q.fill(0);
            continue;
        }
        let bound = f32::from(qmax);
        round_all(x, h, nearest.to_f32().recip(), -bound, bound, q);
        let nearest_error = error(x, h, nearest, q);
        let (trial, found) = (&mut trial[..x.len()], &mut found[..x.len()]);
        let (mut least, mut found_scale) = (f32::INFINITY, f16::ZERO);
        let mut keep = |sums: Sums, trial: &[i8]| {
            let s = f16::from_f32(sums.best_scale());
            let error = sums.error(s.to_f32());
            if error < least && s.is_finite() && s != f16::ZERO {
                (least, found_scale) = (error, s);
                found.copy_from_slice(trial);
            }
            found_scale
        };
        // There is one integer more below zero, so the largest value is mapped to the negative end.
        let mut best = nearest;
        for step in -STEPS..=STEPS {
            let inverse = (-bound - 1.0 - STEP * step as f32) / largest;
            best = keep(round_all(x, h, inverse, -bound - 1.0, bound, trial), trial);
        }
        // The best scale differs a little from the one that its integers were rounded with, so round once more with
        // the best scale.
        if best != f16::ZERO {
            keep(round_all(x, h, best.to_f32().recip(), -bound - 1.0, bound, trial), trial);
        }
        // `Sums::error` is inexact for small errors because of cancellation, so the final comparison sums term by term.
        if found_scale != f16::ZERO && error(x, h, found_scale, found) < nearest_error {
            *scale = found_scale;
            q.copy_from_slice(found);
        }
    }
    Ok(())
}

/// `sum(h (x - s q)^2)`, term by term.
fn error(x: &[f32], h: Option<&[f32]>, s: f16, q: &[i8]) -> f64 {
    let s = f64::from(s.to_f32());
    let term = |i: usize| {
        let difference = f64::from(x[i]) - s * f64::from(q[i]);
        h.map_or(1.0, |h| f64::from(h[i])) * difference * difference
    };
    (0..x.len()).map(term).sum()
}

/// Weighted sums over a group.
struct Sums {
    xx: f32,
    xq: f32,
    qq: f32,
}

impl Sums {
    fn best_scale(&self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }

    /// `sum(h (x - s q)^2)`
    fn error(&self, s: f32) -> f32 {
        self.xx - 2.0 * s * self.xq + s * s * self.qq
    }
}

/// Computes `q = clip(rint(x * inverse))`, and the sums over it.
fn round_all(x: &[f32], h: Option<&[f32]>, inverse: f32, low: f32, high: f32, q: &mut [i8]) -> Sums {
    let (mut xx, mut xq, mut qq) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    let mut one = |lane: usize, x: f32, h: f32, q: &mut i8| {
        *q = round(x * inverse, low, high);
        let r = f32::from(*q);
        xx[lane] += h * x * x;
        xq[lane] += h * x * r;
        qq[lane] += h * r * r;
    };
    match h {
        None => {
            for (x, q) in x.chunks(LANES).zip(q.chunks_mut(LANES)) {
                for (lane, (x, q)) in x.iter().zip(q).enumerate() {
                    one(lane, *x, 1.0, q);
                }
            }
        }
        Some(h) => {
            for ((x, h), q) in x.chunks(LANES).zip(h.chunks(LANES)).zip(q.chunks_mut(LANES)) {
                for (lane, ((x, h), q)) in x.iter().zip(h).zip(q).enumerate() {
                    one(lane, *x, *h, q);
                }
            }
        }
    }
    let sum = |lanes: [f32; LANES]| lanes.iter().sum();
    Sums { xx: sum(xx), xq: sum(xq), qq: sum(qq) }
}
