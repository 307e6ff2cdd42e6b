//! Weight matrices packed by others: GPTQ, AWQ and compressed-tensors (`pack-quantized`), read without loss.
//!
//! Such a checkpoint holds each projection in parts, which become one tensor `NAME.weight` `[out, in]` here. Its value
//! is `s * (q - z)`, with scale and zero point per group of consecutive inputs of a row (one output):
//!
//! | | GPTQ | AWQ | compressed-tensors |
//! |---|---|---|---|
//! | q | `.qweight` `[in / n, out]`, along `in` | `.qweight` `[in, out / 8]`, along `out`, interleaved | `.weight_packed` `[out, in / n]`, along `in` |
//! | s | `.scales` `[groups, out]` | `.scales` `[groups, out]` | `.weight_scale` `[out, groups]` |
//! | z | `.qzeros` `[groups, out / n]` | `.qzeros` `[groups, out / 8]`, interleaved | `.weight_zero_point` `[out / n, groups]`; without it half the range |
//! | | `.g_idx` `[in]`: group of each input | | `.weight_shape` `[2]`: out, in |
//!
//! q and z are unsigned, `n` of them to a 32-bit word, lowest bits first. GPTQ's first version (`checkpoint_format`
//! "gptq") stores z - 1. Where z is 0 that borrows from its neighbours: GPTQModel subtracts one from all zero points of
//! a word at once, and adding it back is exact; AutoGPTQ's files lose what was there, and are refused at that place.
//!
//! Refuses by name: other methods and formats, bits other than 4 and 8, groups that are no multiple of the device's
//! block, activation order (`g_idx` other than the trivial one), quantized activations, and every disagreement between
//! the parts' shapes, or between them and `quantization_config`.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use half::f16;
use rayon::prelude::*;

use super::view::{f16_holds, float_at};
use super::{Checkpoint, CheckpointError, Entry, ModelFiles, Span, Stored};
use crate::tensor::{Bits, DType, QuantizedRow, Scales, Scheme};

mod method;

use method::{Method, Part, PartKind, Parts};

const CONFIG_FILE: &str = "config.json";
/// Where AWQ puts output 0..8 of a word, in units of 4 bits.
const AWQ_NIBBLE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix `[out, in]` whose integers, scales and zero points lie in tensors of their own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedMatrix<'a> {
    layout: Layout,
    weights: &'a [u8],
    scales: &'a [u8],
    /// Empty where a compressed-tensors matrix is symmetric.
    zeros: &'a [u8],
}

/// How the parts hold the matrix; sizes are checked against the parts' shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layout {
    kind: Kind,
    /// 4 or 8
    bits: u32,
    rows: usize,
    cols: usize,
    /// Columns per scale, at most `cols`.
    group: usize,
    /// F16 or BF16.
    scale_type: DType,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Gptq(GptqZeros),
    Awq,
    Compressed,
}

/// What GPTQ's stored zero points mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GptqZeros {
    /// "gptq_v2"
    AsStored,
    /// "gptq" by GPTQModel: one was subtracted from every zero point of a word, as one number.
    WordLess,
    /// "gptq" by others: each one less.
    EachLess,
}

/// The device's scales that hold this matrix's without loss.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// Every zero point is half the range.
    Symmetric,
    ZeroPoint,
    /// f16 does not hold some bf16 scale.
    Affine,
}

impl Layout {
    fn per_word(self) -> usize {
        32 / self.bits as usize
    }

    fn groups(self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Half the range of the integers: what the zero point of a symmetric matrix is.
    fn half(self) -> u32 {
        1 << (self.bits - 1)
    }
}

impl<'a> PackedMatrix<'a> {
    /// The parts as `layout` describes them.
    pub(super) fn new(layout: Layout, weights: &'a [u8], scales: &'a [u8], zeros: &'a [u8]) -> Self {
        Self { layout, weights, scales, zeros }
    }

    /// What the device needs to hold the scales and zero points, of which it reads all.
    fn find_form(&self) -> Form {
        let Self { layout, scales, zeros, .. } = *self;
        let held = |index| f16_holds(float_at(layout.scale_type, scales, index));
        let count = scales.len() / layout.scale_type.size();
        let exact = layout.scale_type == DType::F16 || (0..count).into_par_iter().all(held);
        // Four or eight zero points at once: every bit pattern of a word stands for one.
        let one_each = u32::MAX / ((1 << layout.bits) - 1);
        let symmetric_word = match layout.kind {
            Kind::Gptq(GptqZeros::WordLess | GptqZeros::EachLess) => one_each * (layout.half() - 1),
            _ => one_each * layout.half(),
        };
        // The last word may be filled up with anything.
        let whole_words = layout.rows.is_multiple_of(layout.per_word()) || zeros.is_empty();
        let symmetric = whole_words && zeros.chunks_exact(4).all(|word| word == symmetric_word.to_le_bytes());
        match (exact, symmetric) {
            (false, _) => Form::Affine,
            (true, true) => Form::Symmetric,
            (true, false) => Form::ZeroPoint,
        }
    }

    pub(super) fn stored_bytes(&self) -> u64 {
        (self.weights.len() + self.scales.len() + self.zeros.len()) as u64
    }

    pub(super) fn scheme(&self) -> Scheme {
        let Layout { bits, cols, group, form, .. } = self.layout;
        let scales = match form {
            Form::Symmetric => Scales::Symmetric,
            Form::ZeroPoint => Scales::ZeroPoint,
            Form::Affine => Scales::Affine,
        };
        let block = block_columns(bits);
        // A group that is a whole row may end inside a block.
        let whole = group == cols;
        let group = if whole { cols.next_multiple_of(block) } else { group } as u32;
        match bits {
            4 => Scheme::Int { bits: Bits::Four, group, scales },
            _ if whole && form == Form::Symmetric => Scheme::Int8Row,
            _ => Scheme::Int { bits: Bits::Eight, group, scales },
        }
    }

    /// A row in the layout of [`PackedMatrix::scheme`]. The error says what is wrong where.
    pub(super) fn quantized_row_into(&self, row: usize, out: &mut QuantizedRow) -> Result<(), String> {
        let Layout { bits, form, .. } = self.layout;
        // What the device's integers are less than the stored ones.
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
                    // A bf16 times 8 bits: exact.
                    record[4..].copy_from_slice(&(-(scale * zero)).to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// The values of some rows. No product is rounded: an f16 times 9 bits fits an f32.
    pub(super) fn rows_f32_into(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), String> {
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

    /// Calls with each column and its stored integer.
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
            Kind::Gptq(GptqZeros::AsStored) => shifted(by_output(row), row % per_word),
            Kind::Gptq(GptqZeros::WordLess) => {
                shifted(by_output(row).wrapping_add(u32::MAX / mask), row % per_word)
            }
            Kind::Gptq(GptqZeros::EachLess) => match shifted(by_output(row), row % per_word) {
                stored if stored == mask => {
                    return Err(format!(
                        "row {row}, group {group}: its zero point is stored as {stored}, which is how AutoGPTQ wrote 0, \
                         overwriting those beside it; quantize the original anew (\"gptq_v2\" has room for 0)"
                    ));
                }
                stored => stored + 1,
            },
        })
    }
}

/// Little endian word `index`.
fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..4 * index + 4].try_into().expect("4 bytes"))
}

/// Columns that a group of the device's layouts is a multiple of.
const fn block_columns(bits: u32) -> usize {
    128 / bits as usize
}

impl Checkpoint {
    /// Makes one tensor of the parts of each packed matrix, by the method that config.json names. Reads their scales and
    /// zero points.
    pub(super) fn join_packed(&mut self, files: &ModelFiles) -> Result<(), CheckpointError> {
        let method = match files.read(CONFIG_FILE)? {
            None => None,
            Some(config) => Method::read(&config)
                .map_err(|problem| CheckpointError::file(files.display(CONFIG_FILE), problem))?,
        };
        let Some(method) = &method else { return self.refuse_packed() };
        self.format = method.format();
        // By name, so that messages are the same from one run to the next.
        let mut matrices: BTreeMap<String, [Option<usize>; 5]> = BTreeMap::new();
        for (index, entry) in self.tensors.iter().enumerate() {
            if let Some((base, kind)) = method.part_of(&entry.name) {
                matrices.entry(base.to_owned()).or_default()[kind as usize] = Some(index);
            }
        }
        let mut joined = HashMap::new();
        for (base, indices) in &matrices {
            joined.insert(indices[PartKind::Weights as usize], self.join_parts(method, base, indices)?);
        }
        // Each matrix takes the place of its integers.
        let entries = std::mem::take(&mut self.tensors).into_iter().enumerate();
        let keep = |(index, entry): (usize, Entry)| match method.part_of(&entry.name) {
            Some(_) => joined.remove(&Some(index)),
            None => Some(entry),
        };
        self.tensors = entries.filter_map(keep).collect();
        self.by_name.clear();
        for (index, entry) in self.tensors.iter().enumerate() {
            if self.by_name.insert(entry.name.clone(), index).is_some() {
                let problem = "is there whole, and packed in parts; expected one of them";
                return Err(CheckpointError::tensor(&self.files[entry.file].display, &entry.name, problem));
            }
        }
        Ok(())
    }

    fn join_parts(
        &self,
        method: &Method,
        base: &str,
        indices: &[Option<usize>; 5],
    ) -> Result<Entry, CheckpointError> {
        let first = indices.iter().flatten().next().expect("a matrix has a part");
        let entry = |kind: PartKind| indices[kind as usize].map(|index| &self.tensors[index]);
        let span = |kind| match entry(kind).map(|entry| &entry.stored) {
            Some(Stored::Plain { data, .. }) => Some(data.clone()),
            _ => None,
        };
        let mut parts = Parts::default();
        for kind in PartKind::ALL {
            if let Some(Entry { shape, stored: Stored::Plain { dtype, data }, .. }) = entry(kind) {
                let data = &self.files[data.file].bytes[data.range.clone()];
                parts.0[kind as usize] = Some(Part { dtype: *dtype, shape, data });
            }
        }
        let layout = method.layout(&parts).map_err(|(kind, problem)| {
            let file = entry(kind).unwrap_or(&self.tensors[*first]).file;
            let name = format!("{base}.{}", method.suffix(kind));
            CheckpointError::tensor(&self.files[file].display, &name, problem)
        })?;
        let [weights, scales, zeros] = [PartKind::Weights, PartKind::Scales, PartKind::Zeros].map(span);
        let (weights, scales) = (weights.expect("checked above"), scales.expect("checked above"));
        let bytes = |span: &Span| &self.files[span.file].bytes[span.range.clone()];
        let (integers, zero_bytes) = (bytes(&weights), zeros.as_ref().map_or(&[][..], bytes));
        let form = PackedMatrix::new(layout, integers, bytes(&scales), zero_bytes).find_form();
        Ok(Entry {
            name: format!("{base}.weight"),
            shape: vec![layout.rows, layout.cols],
            file: weights.file,
            stored: Stored::Packed { layout: Layout { form, ..layout }, weights, scales, zeros },
        })
    }

    /// Refuses parts of packed matrices where no config says how they are packed.
    fn refuse_packed(&self) -> Result<(), CheckpointError> {
        let packed =
            |entry: &&Entry| entry.name.ends_with(".qweight") || entry.name.ends_with(".weight_packed");
        match self.tensors.iter().find(packed) {
            None => Ok(()),
            Some(entry) => {
                let problem = "is a packed matrix, but config.json has no quantization_config that says how";
                Err(CheckpointError::tensor(&self.files[entry.file].display, &entry.name, problem))
            }
        }
    }
}
