//! A tensor as stored in the checkpoint, and its values: as f32, or as integers and scales if it is quantized.
//!
//! Reading refuses NaN and infinities. Otherwise they would turn every later logit into NaN, and the error could not
//! name the tensor. A native checkpoint is checked when it is written, and loading copies it to the device unchecked;
//! its checksums detect later damage.

use std::fmt;
use std::ops::Range;

use super::error::CheckpointError;
use super::gguf::{GgmlTensor, GgmlType};
use super::legacy::LegacyTensor;
use super::native::NativeTensor;
use super::packed::PackedMatrix;
use super::table::{Entry, Span, Stored, Table};
use crate::tensor::{DType, QuantizedRow, Scheme};

/// A tensor of a checkpoint, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// The Hugging Face name. The file may have another name.
    pub name: &'a str,
    /// The name of its file in messages.
    pub file: &'a str,
    pub shape: &'a [usize],
    pub encoding: Encoding<'a>,
    /// The dimension of a head, if its rows are stored so that each row of the first half is followed by its counterpart
    /// in the second half. Reading returns the rows of the first half first.
    pub interleaved: Option<usize>,
}

/// How the bytes of a tensor encode its values. Tensors with equal encodings have equal values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Encoding<'a> {
    /// Little-endian elements at any alignment, as many as the product of the shape.
    Plain { dtype: DType, data: &'a [u8] },
    /// Blocks of ggml from a GGUF file.
    Ggml(GgmlTensor<'a>),
    /// Packed in the device's layout from a native checkpoint.
    Native(NativeTensor<'a>),
    /// Integers and scales from a layer file of the original project.
    Legacy(LegacyTensor<'a>),
    /// Packed by GPTQ, AWQ or compressed-tensors.
    Packed(PackedMatrix<'a>),
    /// A tensor of each expert.
    Stacked(Stack<'a>),
}

/// The matrices of all experts, one after the other.
#[derive(Clone, Copy)]
pub struct Stack<'a> {
    table: &'a Table,
    /// A matrix of each expert, all of one shape and scheme.
    parts: &'a [Entry],
}

impl fmt::Debug for Stack<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.parts.iter().map(|part| &part.name)).finish()
    }
}

impl PartialEq for Stack<'_> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.parts, other.parts)
    }
}

impl<'a> Stack<'a> {
    /// The expert's matrix that has a row of all experts, and the row's number there.
    fn row(&self, row: usize) -> (Tensor<'a>, usize) {
        let rows = self.parts[0].shape[0];
        (Tensor::of(self.table, &self.parts[row / rows]), row % rows)
    }

    fn scheme(&self) -> Result<Scheme, CheckpointError> {
        Tensor::of(self.table, &self.parts[0]).scheme()
    }

    fn stored_bytes(&self) -> u64 {
        self.parts.iter().map(|part| Tensor::of(self.table, part).stored_bytes()).sum()
    }
}

impl<'a> Tensor<'a> {
    /// The tensor of an entry.
    pub(super) fn of(table: &'a Table, entry: &'a Entry) -> Tensor<'a> {
        let slice = |span: &Span| table.files[span.file].bytes.slice(span.range.clone());
        let encoding = match &entry.stored {
            Stored::Plain { dtype, data } => Encoding::Plain { dtype: *dtype, data: slice(data).bytes },
            Stored::Ggml { kind, data } => {
                Encoding::Ggml(GgmlTensor { kind: *kind, data: slice(data).bytes })
            }
            Stored::Native { scheme, blocks, scales } => Encoding::Native(NativeTensor {
                scheme: *scheme,
                blocks: slice(blocks),
                scales: scales.as_ref().map_or((&[][..]).into(), slice),
            }),
            Stored::Legacy { layout, q, scales } => {
                Encoding::Legacy(LegacyTensor::new(*layout, slice(q).bytes, slice(scales).bytes))
            }
            Stored::Packed { layout, weights, scales, zeros } => {
                let zeros = zeros.as_ref().map_or(&[][..], |zeros| slice(zeros).bytes);
                Encoding::Packed(PackedMatrix::new(*layout, slice(weights).bytes, slice(scales).bytes, zeros))
            }
            Stored::Stacked(parts) => Encoding::Stacked(Stack { table, parts }),
        };
        Tensor {
            name: &entry.name,
            file: &table.files[entry.file].display,
            shape: &entry.shape,
            encoding,
            interleaved: entry.interleaved,
        }
    }

    /// Length of a row, the last dimension; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the last; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, rows)| rows.iter().product())
    }

    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the tensor in its file.
    pub fn stored_bytes(&self) -> u64 {
        match &self.encoding {
            Encoding::Plain { data, .. } => data.len() as u64,
            Encoding::Ggml(ggml) => ggml.data.len() as u64,
            Encoding::Native(native) => native.stored_bytes(),
            Encoding::Legacy(legacy) => legacy.stored_bytes(),
            Encoding::Packed(packed) => packed.stored_bytes(),
            Encoding::Stacked(stack) => stack.stored_bytes(),
        }
    }

    /// The scheme that stores the tensor's values on the device without loss. Integer tensors are refused, because they
    /// are not weights.
    pub fn scheme(&self) -> Result<Scheme, CheckpointError> {
        match &self.encoding {
            Encoding::Plain { dtype, .. } => Scheme::of(*dtype).ok_or_else(|| self.not_floating(*dtype)),
            Encoding::Ggml(ggml) => Ok(ggml.kind.scheme()),
            Encoding::Native(native) => Ok(native.scheme),
            Encoding::Legacy(legacy) => Ok(legacy.scheme()),
            Encoding::Packed(packed) => Ok(packed.scheme()),
            Encoding::Stacked(stack) => stack.scheme(),
        }
    }

    /// The quantized type of GGUF that the tensor has in its file, if it has one.
    pub fn ggml_type(&self) -> Option<GgmlType> {
        match &self.encoding {
            Encoding::Ggml(ggml) => Some(ggml.kind),
            Encoding::Stacked(stack) => Tensor::of(stack.table, &stack.parts[0]).ggml_type(),
            Encoding::Plain { .. } | Encoding::Native(_) | Encoding::Legacy(_) | Encoding::Packed(_) => None,
        }
    }

    /// Reads row `row` in the layout of [`Tensor::scheme`]. `out` must have the matching sizes. Refuses scales that
    /// make a weight NaN or infinite. Panics if that scheme does not quantize, or the row is beyond the tensor.
    pub fn quantized_row_into(&self, row: usize, out: &mut QuantizedRow) -> Result<(), CheckpointError> {
        assert!(row < self.rows() && out.q.len() == self.cols(), "row {row} of {}", self.name);
        let row = self.stored_row(row);
        match &self.encoding {
            Encoding::Plain { dtype, .. } => panic!("{} holds {dtype:?}: it is not quantized", self.name),
            Encoding::Ggml(ggml) => ggml.quantized_row_into(row, out),
            Encoding::Native(native) => native.quantized_row_into(row, out),
            Encoding::Legacy(legacy) => legacy.quantized_row_into(row, out).map_err(|e| self.error(e))?,
            Encoding::Packed(packed) => packed.quantized_row_into(row, out).map_err(|e| self.error(e))?,
            Encoding::Stacked(stack) => {
                let (part, row) = stack.row(row);
                return part.quantized_row_into(row, out);
            }
        }
        match out.not_finite(self.scheme()?) {
            None => Ok(()),
            Some(col) => Err(self.error(format!(
                "row {row}: a scale of its columns from {col} on is NaN, infinite or too large; expected finite numbers"
            ))),
        }
    }

    /// Reads some rows as f32 into `out` (`rows.len() * cols` values). Each value is the encoded value, rounded at most
    /// once. Refuses integers, NaN and infinities. Panics if the rows are beyond the tensor.
    pub fn rows_f32_into(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), CheckpointError> {
        let cols = self.cols();
        assert_eq!(out.len(), rows.len() * cols, "output of {}", self.name);
        assert!(rows.end <= self.rows(), "rows {rows:?} of {}", self.name);
        if self.interleaved.is_some() {
            let as_stored = Tensor { interleaved: None, ..*self };
            return rows.zip(out.chunks_exact_mut(cols)).try_for_each(|(row, out)| {
                let stored = self.stored_row(row);
                as_stored.rows_f32_into(stored..stored + 1, out)
            });
        }
        match &self.encoding {
            Encoding::Plain { dtype, data } => {
                let bytes = &data[rows.start * cols * dtype.size()..rows.end * cols * dtype.size()];
                match dtype {
                    DType::F32 => widen(bytes, out, u32::from_le_bytes),
                    DType::BF16 => widen(bytes, out, |b| (u16::from_le_bytes(b) as u32) << 16),
                    DType::F16 => widen(bytes, out, |b| half::f16::from_le_bytes(b).to_f32().to_bits()),
                    DType::I8 | DType::U8 | DType::I32 | DType::I64 => return Err(self.not_floating(*dtype)),
                }
            }
            Encoding::Ggml(ggml) => ggml.rows_f32_into(rows.clone(), cols, out),
            Encoding::Native(native) => native.rows_f32_into(rows.clone(), cols, out),
            Encoding::Legacy(legacy) => {
                legacy.rows_f32_into(rows.clone(), out).map_err(|e| self.error(e))?;
            }
            Encoding::Packed(packed) => {
                packed.rows_f32_into(rows.clone(), out).map_err(|e| self.error(e))?;
            }
            Encoding::Stacked(stack) => {
                return rows.zip(out.chunks_exact_mut(cols)).try_for_each(|(row, out)| {
                    let (part, row) = stack.row(row);
                    part.rows_f32_into(row..row + 1, out)
                });
            }
        }
        // A maximum over bits is vectorized. A loop with an early exit is not.
        if out.iter().fold(0, |max, x| (x.to_bits() & ABS).max(max)) >= INFINITY {
            let at = out.iter().position(|x| !x.is_finite()).unwrap_or(0);
            let (row, col) = (rows.start + at / cols, at % cols);
            return Err(
                self.error(format!("row {row}, column {col} is NaN or infinite; expected a finite number"))
            );
        }
        Ok(())
    }

    /// The place of a row in the file.
    fn stored_row(&self, row: usize) -> usize {
        let Some(dim) = self.interleaved else { return row };
        let (head, in_head) = (row / dim, row % dim);
        head * dim + 2 * (in_head % (dim / 2)) + in_head / (dim / 2)
    }

    /// Some rows as f32; see [`Tensor::rows_f32_into`].
    pub fn rows_f32(&self, rows: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let mut out = vec![0.0; rows.len() * self.cols()];
        self.rows_f32_into(rows, &mut out)?;
        Ok(out)
    }

    /// The whole tensor as f32, for norms and tests only: the embedding of a 27B would take 5.6 GB.
    pub fn to_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        self.rows_f32(0..self.rows())
    }

    /// Describes what the writer of the file lost, as far as the stored data shows it. `None` = nothing.
    pub fn defect(&self) -> Option<String> {
        match &self.encoding {
            Encoding::Legacy(legacy) => legacy.defect(),
            Encoding::Plain { .. }
            | Encoding::Ggml(_)
            | Encoding::Native(_)
            | Encoding::Packed(_)
            | Encoding::Stacked(_) => None,
        }
    }

    /// An error about this tensor.
    pub fn error(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::tensor(self.file, self.name, problem)
    }

    fn not_floating(&self, dtype: DType) -> CheckpointError {
        self.error(format!("holds {dtype:?}; expected F32, F16 or BF16"))
    }
}

const ABS: u32 = 0x7FFF_FFFF;
const INFINITY: u32 = 0x7F80_0000;

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], bits: impl Fn([u8; N]) -> u32) {
    for (bytes, out) in bytes.chunks_exact(N).zip(out) {
        *out = f32::from_bits(bits(bytes.try_into().expect("chunks of N bytes")));
    }
}
