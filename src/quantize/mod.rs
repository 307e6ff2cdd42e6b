//! Round-to-nearest symmetric quantization, bit for bit equal to the reference (numpy, float32).
//!
//! A row is split into groups of consecutive inputs. The last group may be shorter. No group spans two rows.
//! Each group has `s = f16(max|x| / qmax)`, rounded to nearest even (it may be subnormal, or 0), and
//! `q = clip(rint(x / f32(s)), -qmax, qmax)` with ties to even, or `q = 0` if `s` is 0. The value is
//! `f32(q) * f32(s)`. Int4 has `qmax` 7. Int8 rows have `qmax` 127 and one group per row.
//!
//! [`Rounding::Search`] takes longer and finds better scales. [`pack_tiles`] packs all weights for devices and for
//! native files.
//!
//! Rows are processed one by one, so that the largest tensor (262208 x 5376) is never in f32 as a whole. NaN,
//! infinities and scales beyond the range of f16 are refused, because each would make a weight NaN or infinite.

use std::ops::Range;

use half::f16;
use rayon::prelude::*;

use crate::checkpoint::{CheckpointError, FileWriter, Form, Tensor};
use crate::tensor::{
    Bits, DType, QuantizedRow, Scales, Scheme, TILE_ROWS, clear_tiles, pack_plain_row, pack_row,
    unpack_plain_row,
};

mod search;

pub use search::quantize_row_searching;

/// Bytes that are written or packed in one call, which gives each core several tiles.
const PIECE_BYTES: usize = 16 << 20;

/// Why a row cannot be quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    #[error("a value near column {column} is NaN or infinite; expected finite numbers")]
    NotFinite { column: usize },
    #[error("the values of the group at column {column} are too large for an f16 scale")]
    ScaleOverflow { column: usize },
}

/// (Inputs per scale, largest quantized value) of a symmetric scheme, for rows of `cols` inputs. `None` for schemes
/// that this module cannot quantize to.
pub const fn grouping(scheme: Scheme, cols: usize) -> Option<(usize, i8)> {
    match scheme {
        Scheme::Int8Row => Some((cols, 127)),
        Scheme::Int { bits: Bits::Eight, group, scales: Scales::Symmetric } => Some((group as usize, 127)),
        Scheme::Int { bits: Bits::Four, group, scales: Scales::Symmetric } => Some((group as usize, 7)),
        _ => None,
    }
}

/// The method that turns values into integers.
#[derive(Debug, Clone, Copy)]
pub enum Rounding<'a> {
    /// Round to nearest, bit for bit equal to the reference.
    Nearest,
    /// Search the scale with the least squared error, weighted by the importance of each column. `None` = equal weights.
    Search { importance: Option<Importance<'a>> },
}

/// Weights for the errors of the columns of a tensor's matrices: of one matrix, or of those of all experts.
#[derive(Debug, Clone, Copy)]
pub struct Importance<'a> {
    /// `[matrices, columns]`. Weights that are all 0 say nothing about a matrix, which is then rounded to nearest.
    pub weights: &'a [f32],
    /// Rows of each matrix.
    pub rows: usize,
}

/// How one row is rounded. `importance` has a weight for each column.
#[derive(Debug, Clone, Copy)]
enum RowRounding<'a> {
    Nearest,
    Search { importance: Option<&'a [f32]> },
}

impl<'a> Rounding<'a> {
    /// The rounding of a tensor's row of `cols` columns.
    fn of_row(self, row: usize, cols: usize) -> RowRounding<'a> {
        match self {
            Rounding::Nearest => RowRounding::Nearest,
            Rounding::Search { importance: None } => RowRounding::Search { importance: None },
            Rounding::Search { importance: Some(Importance { weights, rows }) } => {
                let weights = &weights[row / rows * cols..][..cols];
                match weights.iter().all(|weight| *weight == 0.0) {
                    true => RowRounding::Nearest,
                    false => RowRounding::Search { importance: Some(weights) },
                }
            }
        }
    }
}

/// The error of packing, summed over the weights that were rounded.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// Sum of the squared differences.
    pub error: f64,
    /// Sum of the squared weights.
    pub total: f64,
}

impl Loss {
    /// Root of the mean squared difference, divided by the root of the mean square; 0 if nothing was rounded.
    pub fn relative(&self) -> f64 {
        if self.total > 0.0 { (self.error / self.total).sqrt() } else { 0.0 }
    }
}

impl std::ops::Add for Loss {
    type Output = Loss;
    fn add(self, other: Loss) -> Loss {
        Loss { error: self.error + other.error, total: self.total + other.total }
    }
}

/// Packs up to 32 rows of a tensor, beginning with `first_row`, into one tile. Rows that are stored in `scheme` are
/// copied. Other rows are converted from their values, and rounded if necessary.
///
/// `blocks` has [`Scheme::tile_bytes`] bytes. `scales` has [`Scheme::tile_scale_bytes`] bytes, which are 0.
fn pack_tile(
    scheme: Scheme,
    rounding: Rounding,
    tensor: &Tensor,
    first_row: usize,
    blocks: &mut [u8],
    scales: &mut [u8],
) -> Result<Loss, CheckpointError> {
    let cols = tensor.cols();
    let rows = first_row..tensor.rows().min(first_row + TILE_ROWS);
    clear_tiles(scheme, cols, blocks);
    let stored = tensor.scheme()?;
    let quantized = scheme.grouping(cols).is_some();
    let mut values = vec![0.0; cols];
    let mut packed = vec![0.0; cols];
    let mut row = QuantizedRow::new(scheme, if quantized { cols } else { 0 });
    let mut loss = Loss::default();
    for (lane, index) in rows.enumerate() {
        if quantized && stored == scheme {
            tensor.quantized_row_into(index, &mut row)?;
            pack_row(scheme, &row, lane, blocks, scales);
            continue;
        }
        tensor.rows_f32_into(index..index + 1, &mut values)?;
        if quantized {
            quantize_row_to(scheme, rounding.of_row(index, cols), &values, &mut row)
                .map_err(|e| tensor.error(format!("row {index}: {e}")))?;
            pack_row(scheme, &row, lane, blocks, scales);
            row.dequantize_into(scheme, &mut packed);
        } else {
            pack_plain_row(scheme, &values, lane, blocks);
            if stored == scheme || scheme == Scheme::F32 {
                continue;
            }
            unpack_plain_row(scheme, lane, blocks, &mut packed);
            if packed.iter().any(|w| w.is_infinite()) {
                return Err(tensor.error(format!("row {index}: has a value that is too large for {scheme}")));
            }
        }
        for (x, y) in values.iter().zip(&packed) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            loss.error += (x - y) * (x - y);
            loss.total += x * x;
        }
    }
    Ok(loss)
}

/// Packs consecutive tiles on all cores; see `pack_tile`. `blocks` and `scales` have the bytes of all tiles.
pub fn pack_tiles(
    scheme: Scheme,
    rounding: Rounding,
    tensor: &Tensor,
    tiles: Range<usize>,
    blocks: &mut [u8],
    scales: &mut [u8],
) -> Result<Loss, CheckpointError> {
    let (tile_bytes, scale_bytes) =
        (scheme.tile_bytes(tensor.cols()), scheme.tile_scale_bytes(tensor.cols()));
    assert_eq!(
        (blocks.len(), scales.len()),
        (tiles.len() * tile_bytes, tiles.len() * scale_bytes),
        "output of {}",
        tensor.name
    );
    let scales: Vec<&mut [u8]> = match scale_bytes {
        0 => tiles.clone().map(|_| &mut [][..]).collect(),
        bytes => scales.chunks_exact_mut(bytes).collect(),
    };
    let tile = |(tile, (blocks, scales)): (usize, (&mut [u8], &mut [u8]))| {
        pack_tile(scheme, rounding, tensor, tile * TILE_ROWS, blocks, scales)
    };
    let parts = blocks.par_chunks_exact_mut(tile_bytes).zip(scales);
    // Summed in the order of the tiles, so that the result does not depend on the number of cores.
    let losses: Vec<Loss> = tiles.into_par_iter().zip(parts).map(tile).collect::<Result<_, _>>()?;
    Ok(losses.into_iter().fold(Loss::default(), std::ops::Add::add))
}

/// Writes a tensor to a native file: its blocks and scales, or its values. `each` is called with the number of rows that
/// are done. Holds one piece of the blocks or values and all scales in memory. Panics if plain values are to have another
/// type than the tensor's and f32.
pub fn write_tensor(
    writer: &mut FileWriter,
    tensor: &Tensor,
    form: Form,
    rounding: Rounding,
    each: &mut dyn FnMut(usize),
) -> Result<Loss, CheckpointError> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let scheme = match form {
        Form::Packed(scheme) => scheme,
        Form::Plain(dtype) => {
            let is_exact = dtype == DType::F32 || Some(dtype) == tensor.scheme()?.dtype();
            assert!(is_exact, "{} has other values in {dtype:?}", tensor.name);
            let piece = (PIECE_BYTES / (4 * cols)).max(1);
            for first in (0..rows).step_by(piece) {
                let range = first..rows.min(first + piece);
                let values = tensor.rows_f32(range.clone())?;
                let mut bytes = vec![0; values.len() * dtype.size()];
                dtype.write(&values, &mut bytes);
                writer.put(&bytes)?;
                each(range.end);
            }
            return Ok(Loss::default());
        }
    };
    let (tile_bytes, scale_bytes) = (scheme.tile_bytes(cols), scheme.tile_scale_bytes(cols));
    let tiles = rows.div_ceil(TILE_ROWS);
    let piece = (PIECE_BYTES / tile_bytes).max(1);
    let mut blocks = vec![0; piece.min(tiles) * tile_bytes];
    let mut scales = vec![0; tiles * scale_bytes];
    let mut loss = Loss::default();
    for first in (0..tiles).step_by(piece) {
        let range = first..tiles.min(first + piece);
        let blocks = &mut blocks[..range.len() * tile_bytes];
        let scales = &mut scales[first * scale_bytes..range.end * scale_bytes];
        loss = loss + pack_tiles(scheme, rounding, tensor, range.clone(), blocks, scales)?;
        writer.put(blocks)?;
        each(rows.min(range.end * TILE_ROWS));
    }
    writer.put(&scales)?;
    Ok(loss)
}

/// Quantizes one row to a symmetric scheme. `out` must have the matching sizes. Panics if the scheme is not symmetric.
fn quantize_row_to(
    scheme: Scheme,
    rounding: RowRounding,
    row: &[f32],
    out: &mut QuantizedRow,
) -> Result<(), RowError> {
    let (group, qmax) = grouping(scheme, row.len()).expect("a symmetric scheme");
    let mut scales = vec![f16::ZERO; row.len().div_ceil(group)];
    match rounding {
        RowRounding::Nearest => quantize_row(row, group, qmax, &mut out.q, &mut scales)?,
        RowRounding::Search { importance } => {
            quantize_row_searching(row, importance, group, qmax, &mut out.q, &mut scales)?;
        }
    }
    for (bytes, scale) in out.scales.chunks_exact_mut(2).zip(&scales) {
        bytes.copy_from_slice(&scale.to_le_bytes());
    }
    Ok(())
}

/// Quantizes one row into `row.len()` integers and `row.len().div_ceil(group)` scales.
pub fn quantize_row(
    row: &[f32],
    group: usize,
    qmax: i8,
    q: &mut [i8],
    scales: &mut [f16],
) -> Result<(), RowError> {
    assert_eq!((q.len(), scales.len()), (row.len(), row.len().div_ceil(group)), "output of a row");
    let qmax = qmax as f32;
    for (index, ((x, q), scale)) in row.chunks(group).zip(q.chunks_mut(group)).zip(scales).enumerate() {
        // Positive floats have the same order as their bits, and NaN comes after infinity. So one maximum over
        // integers finds both the largest value and values that are not finite. It is vectorized; a maximum over
        // floats is not.
        let max = x.iter().fold(0, |max, x| (x.to_bits() & 0x7FFF_FFFF).max(max));
        if max >= f32::INFINITY.to_bits() {
            return Err(RowError::NotFinite { column: index * group });
        }
        *scale = f16::from_f32(f32::from_bits(max) / qmax);
        if scale.is_infinite() {
            return Err(RowError::ScaleOverflow { column: index * group });
        }
        let s = scale.to_f32();
        if s == 0.0 {
            q.fill(0);
            continue;
        }
        for (q, x) in q.iter_mut().zip(x) {
            *q = round(x / s, -qmax, qmax);
        }
    }
    Ok(())
}

/// `clip(rint(x), low, high)`, with ties to even, for finite or infinite `x`. The bounds are integers within i8.
///
/// After adding 1.5 * 2^23, no bits are left for a fraction. So the addition rounds (to nearest even), and the low byte
/// of the sum is the integer in two's complement. Clipping first gives the same result, because the bounds are
/// integers. This takes a few vector instructions. `round_ties_even` is a function call on baseline x86-64.
fn round(x: f32, low: f32, high: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0;
    (x.clamp(low, high) + SHIFT).to_bits() as i8
}

#[cfg(test)]
mod tests {
    use super::round;

    #[test]
    fn rounding_is_rint_then_clip() {
        // The inputs are every multiple of 1/64 around the range, its neighbours in f32, and the extremes.
        let steps = (-130 * 64..=130 * 64).map(|i| i as f32 / 64.0);
        let near = steps.flat_map(|x| [x, x.next_up(), x.next_down()]);
        let far =
            [1e10, -1e10, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, -0.0];
        for x in near.chain(far) {
            for qmax in [7.0, 127.0] {
                let expected = x.round_ties_even().clamp(-qmax, qmax) as i8;
                assert_eq!(round(x, -qmax, qmax), expected, "{x:?} clipped at {qmax}");
            }
        }
    }
}
