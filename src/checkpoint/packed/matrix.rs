//! A packed matrix, and its conversion to a device layout.

use std::ops::Range;

use half::f16;
use rayon::prelude::*;

use crate::checkpoint::floats::{f16_holds, float_at};
use crate::tensor::{Bits, DType, QuantizedRow, Scales, Scheme};

/// Positions of outputs 0 to 7 in a 32-bit word of AWQ, in nibbles.
const AWQ_NIBBLE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix `[out, in]` whose integers, scales and zero points are separate tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedMatrix<'a> {
    layout: Layout,
    weights: &'a [u8],
    scales: &'a [u8],
    /// Empty if a compressed-tensors matrix is symmetric.
    zeros: &'a [u8],
}

/// How the matrix is stored in its parts. The sizes match the shapes of the parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::checkpoint) struct Layout {
    pub(super) kind: Kind,
    /// 4 or 8.
    pub(super) bits: u32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Columns per scale, at most `cols`.
    pub(super) group: usize,
    /// F16 or BF16.
    pub(super) scale_type: DType,
    pub(super) form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Gptq(GptqZeros),
    Awq,
    Compressed,
}

/// How GPTQ's zero points are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GptqZeros {
    /// "gptq_v2": unchanged.
    Unchanged,
    /// "gptq" by GPTQModel: 1 was subtracted from every zero point of a word in one subtraction, with borrows.
    WordMinusOnes,
    /// "gptq" by other writers: 1 was subtracted from each zero point separately.
    EachMinusOne,
}

/// The kind of device scales that stores this matrix's scales without loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Form {
    /// Every zero point is half of the range.
    Symmetric,
    ZeroPoint,
    /// f16 does not represent some bf16 scale exactly.
    Affine,
}

impl Layout {
    pub(super) fn per_word(self) -> usize {
        32 / self.bits as usize
    }

    pub(super) fn groups(self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Half of the range of the integers, which is the zero point of a symmetric matrix.
    fn half(self) -> u32 {
        1 << (self.bits - 1)
    }
}

impl<'a> PackedMatrix<'a> {
    pub(in crate::checkpoint) fn new(
        layout: Layout,
        weights: &'a [u8],
        scales: &'a [u8],
        zeros: &'a [u8],
    ) -> Self {
        Self { layout, weights, scales, zeros }
    }

    /// Determines [`Form`]. Reads all scales and zero points.
    pub(super) fn find_form(&self) -> Form {
        let Self { layout, scales, zeros, .. } = *self;
        let is_exact = |index| f16_holds(float_at(layout.scale_type, scales, index));
        let count = scales.len() / layout.scale_type.size();
        let exact = layout.scale_type == DType::F16 || (0..count).into_par_iter().all(is_exact);
        // Compares the four or eight zero points of a word with one comparison.
        let ones = u32::MAX / ((1 << layout.bits) - 1);
        let symmetric_word = match layout.kind {
            Kind::Gptq(GptqZeros::WordMinusOnes | GptqZeros::EachMinusOne) => ones * (layout.half() - 1),
            _ => ones * layout.half(),
        };
        // The padding of the last word is undefined.
        let whole_words = layout.rows.is_multiple_of(layout.per_word()) || zeros.is_empty();
        let symmetric = whole_words && zeros.chunks_exact(4).all(|word| word == symmetric_word.to_le_bytes());
        match (exact, symmetric) {
            (false, _) => Form::Affine,
            (true, true) => Form::Symmetric,
            (true, false) => Form::ZeroPoint,
        }
    }

    pub(in crate::checkpoint) fn stored_bytes(&self) -> u64 {
        (self.weights.len() + self.scales.len() + self.zeros.len()) as u64
    }

    pub(in crate::checkpoint) fn scheme(&self) -> Scheme {
        let Layout { bits, cols, group, form, .. } = self.layout;
        let scales = match form {
            Form::Symmetric => Scales::Symmetric,
            Form::ZeroPoint => Scales::ZeroPoint,
            Form::Affine => Scales::Affine,
        };
        let block = block_columns(bits);
        // A group of a whole row may end inside a block.
        let whole_row = group == cols;
        let group = if whole_row { cols.next_multiple_of(block) } else { group } as u32;
        match bits {
            4 => Scheme::Int { bits: Bits::Four, group, scales },
            _ if whole_row && form == Form::Symmetric => Scheme::Int8Row,
            _ => Scheme::Int { bits: Bits::Eight, group, scales },
        }
    }

    /// Writes a row in the layout of [`PackedMatrix::scheme`].
    pub(in crate::checkpoint) fn quantized_row_into(
        &self,
        row: usize,
        out: &mut QuantizedRow,
    ) -> Result<(), String> {
        let Layout { bits, form, .. } = self.layout;
        // The stored integers minus the integers on the device.
        let bias = if bits == 8 || form == Form::Symmetric { self.layout.half() } else { 0 };
        self.each_integer(row, |col, q| out.q[col] = (q as i32 - bias as i32) as i8);
        let mut records = out.scales.chunks_exact_mut(match form {
            Form::Symmetric => 2,
            Form::ZeroPoint => 4,
            Form::Affine => 8,
        });
        for group in 0..self.layout.groups() {
            let record = records.next().expect("a record for each group");
            let scale = self.scale(row, group)?;
            let zero = self.zero(row, group)? as f32 - bias as f32;
            match form {
                Form::Symmetric => record.copy_from_slice(&f16::from_f32(scale).to_le_bytes()),
                Form::ZeroPoint => {
                    record[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
                    record[2..].copy_from_slice(&f16::from_f32(zero).to_le_bytes());
                }
                Form::Affine => {
                    record[..4].copy_from_slice(&scale.to_le_bytes());
                    // The product of a bf16 and an 8-bit integer is exact in f32.
                    record[4..].copy_from_slice(&(-(scale * zero)).to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Writes the values of some rows. The products are exact: f16 times a 9-bit integer fits f32.
    pub(in crate::checkpoint) fn rows_f32_into(
        &self,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), String> {
        let Layout { cols, group, .. } = self.layout;
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            self.each_integer(row, |col, q| out[col] = q as f32);
            for (group, out) in out.chunks_mut(group).enumerate() {
                let (scale, zero) = (self.scale(row, group)?, self.zero(row, group)? as f32);
                out.iter_mut().for_each(|x| *x = scale * (*x - zero));
            }
        }
        Ok(())
    }

    /// Calls `each` with every column and its stored integer.
    fn each_integer(&self, row: usize, mut each: impl FnMut(usize, u32)) {
        let Layout { kind, bits, rows, cols, .. } = self.layout;
        let (per_word, mask) = (self.layout.per_word(), (1 << bits) - 1);
        match kind {
            Kind::Awq => {
                let shift = 4 * AWQ_NIBBLE[row % 8];
                for col in 0..cols {
                    each(col, word(self.weights, col * (rows / 8) + row / 8) >> shift & 0xf);
                }
            }
            Kind::Gptq(_) | Kind::Compressed => {
                for first in (0..cols).step_by(per_word) {
                    let index = match kind {
                        Kind::Compressed => row * cols.div_ceil(per_word) + first / per_word,
                        _ => first / per_word * rows + row,
                    };
                    let mut word = word(self.weights, index);
                    for col in first..cols.min(first + per_word) {
                        each(col, word & mask);
                        word >>= bits;
                    }
                }
            }
        }
    }

    fn scale(&self, row: usize, group: usize) -> Result<f32, String> {
        let index = match self.layout.kind {
            Kind::Compressed => row * self.layout.groups() + group,
            _ => group * self.layout.rows + row,
        };
        let scale = float_at(self.layout.scale_type, self.scales, index);
        if scale.is_finite() {
            Ok(scale)
        } else {
            Err(format!("row {row}, group {group}: its scale is NaN or infinite; expected a finite number"))
        }
    }

    fn zero(&self, row: usize, group: usize) -> Result<u32, String> {
        let Layout { kind, bits, rows, .. } = self.layout;
        let (per_word, mask) = (self.layout.per_word(), (1 << bits) - 1);
        let shifted = |word: u32, place: usize| word >> (bits as usize * place) & mask;
        let by_output = |place: usize| word(self.zeros, group * (rows / per_word) + place / per_word);
        Ok(match kind {
            Kind::Compressed if self.zeros.is_empty() => self.layout.half(),
            Kind::Compressed => {
                let word = word(self.zeros, row / per_word * self.layout.groups() + group);
                shifted(word, row % per_word)
            }
            Kind::Awq => shifted(by_output(row), AWQ_NIBBLE[row % 8] as usize),
            Kind::Gptq(GptqZeros::Unchanged) => shifted(by_output(row), row % per_word),
            Kind::Gptq(GptqZeros::WordMinusOnes) => {
                shifted(by_output(row).wrapping_add(u32::MAX / mask), row % per_word)
            }
            Kind::Gptq(GptqZeros::EachMinusOne) => match shifted(by_output(row), row % per_word) {
                stored if stored == mask => {
                    return Err(format!(
                        "row {row}, group {group}: its zero point is stored as {stored}, as AutoGPTQ writes 0, which \
                         also overwrites the zero points next to it; quantize the original model again as \"gptq_v2\""
                    ));
                }
                stored => stored + 1,
            },
        })
    }
}

/// Little-endian 32-bit word `index`.
pub(super) fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..4 * index + 4].try_into().expect("4 bytes"))
}

/// Columns of a block on the device. Group sizes must be multiples of it.
pub(super) const fn block_columns(bits: u32) -> usize {
    128 / bits as usize
}
