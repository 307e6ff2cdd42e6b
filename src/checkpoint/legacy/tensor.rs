//! A tensor of a layer file, and its lossless conversion to a device layout.

use std::ops::Range;

use half::f16;

use crate::checkpoint::error::short;
use crate::checkpoint::floats::{f16_holds, float_at};
use crate::checkpoint::safetensors::TensorInfo;
use crate::tensor::{Bits, DType, QuantizedRow, Scales, Scheme};

/// Values of a flattened tensor that share a scale. The last group may have fewer.
const GROUP: usize = 128;

/// A tensor of the original project.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LegacyTensor<'a> {
    layout: Layout,
    q: &'a [u8],
    scales: &'a [u8],
}

/// How a tensor is stored, and the scheme that stores it on the device without loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::checkpoint) struct Layout {
    kind: Kind,
    /// F32, F16 or BF16.
    scale_type: DType,
    /// Columns of a row.
    cols: usize,
    scheme: Scheme,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Int8Symmetric,
    Int4Grouped,
    Int8Asymmetric,
}

impl<'a> LegacyTensor<'a> {
    pub(in crate::checkpoint) fn new(layout: Layout, q: &'a [u8], scales: &'a [u8]) -> Self {
        Self { layout, q, scales }
    }

    pub(in crate::checkpoint) fn stored_bytes(&self) -> u64 {
        (self.q.len() + self.scales.len()) as u64
    }

    pub(in crate::checkpoint) fn scheme(&self) -> Scheme {
        self.layout.scheme
    }

    /// The values of some rows. Each value is rounded at most once.
    pub(in crate::checkpoint) fn rows_f32_into(
        &self,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), String> {
        let first = rows.start * self.layout.cols;
        let q = &self.q[first..first + out.len()];
        match self.layout.kind {
            Kind::Int8Symmetric => {
                let scale = self.scale(0);
                q.iter().zip(out).for_each(|(q, out)| *out = f32::from(*q as i8) * scale);
            }
            Kind::Int4Grouped => {
                for (i, (q, out)) in q.iter().zip(out).enumerate() {
                    *out = f32::from(self.int4(first + i, *q)?) * self.scale((first + i) / GROUP);
                }
            }
            Kind::Int8Asymmetric => {
                let (scale, zero) = (self.scale(0), self.scale(1));
                q.iter().zip(out).for_each(|(q, out)| *out = (f32::from(*q) - zero) * scale);
            }
        }
        Ok(())
    }

    /// Writes a row in the layout of [`LegacyTensor::scheme`]. Panics if that scheme does not quantize.
    pub(in crate::checkpoint) fn quantized_row_into(
        &self,
        row: usize,
        out: &mut QuantizedRow,
    ) -> Result<(), String> {
        let Layout { kind, cols, scheme, .. } = self.layout;
        let first = row * cols;
        for (i, (q, out)) in self.q[first..first + cols].iter().zip(&mut out.q).enumerate() {
            *out = match kind {
                Kind::Int8Symmetric => *q as i8,
                Kind::Int4Grouped => self.int4(first + i, *q)?,
                Kind::Int8Asymmetric => (i16::from(*q) - 128) as i8,
            };
        }
        let (group, scales) = scheme.grouping(cols).expect("a scheme that quantizes");
        for (col, index) in (0..cols).step_by(group).zip(0..) {
            let scale = match kind {
                Kind::Int4Grouped => self.scale((first + col) / GROUP),
                _ => self.scale(0),
            };
            match scales {
                Scales::Affine => {
                    let offset = match kind {
                        Kind::Int8Asymmetric => (128.0 - self.scale(1)) * scale,
                        _ => 0.0,
                    };
                    let record = &mut out.scales[8 * index..8 * index + 8];
                    record[..4].copy_from_slice(&scale.to_le_bytes());
                    record[4..].copy_from_slice(&offset.to_le_bytes());
                }
                _ => {
                    out.scales[2 * index..2 * index + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes())
                }
            }
        }
        Ok(())
    }

    /// Describes what the writer of the file lost, as far as the stored data shows it. `None` = nothing.
    pub fn defect(&self) -> Option<String> {
        let count = self.q.len();
        match self.layout.kind {
            Kind::Int8Symmetric => (self.scale(0) == 0.0).then(|| "scale 0: reads as zeros".into()),
            Kind::Int4Grouped => {
                let groups = count.div_ceil(GROUP);
                let zero = (0..groups).filter(|group| self.scale(*group) == 0.0).count();
                (zero > 0).then(|| format!("{zero} of {groups} groups have scale 0: read as zeros"))
            }
            Kind::Int8Asymmetric => {
                if self.scale(0) == 0.0 {
                    return Some("constant when written: reads as zeros".into());
                }
                let (clamped, cut) = match self.scale(1) {
                    0.0 => (0u8, 255u8),
                    255.0 => (255, 0),
                    _ => return None,
                };
                // The tensor is correct if the integer of the value zero occurs: then its minimum or maximum is zero.
                // Otherwise the nearest integer that occurs shows how far the range was shifted, and thereby how much
                // was clipped at the other end.
                let shift = self.q.iter().map(|q| q.abs_diff(clamped)).min().filter(|steps| *steps > 0)?;
                let saturated = self.q.iter().filter(|q| **q == cut).count();
                let (side, loss) =
                    (if clamped == 0 { "positive" } else { "negative" }, f32::from(shift) * self.scale(0));
                let more = if shift == 255 { " or more" } else { "" };
                Some(format!(
                    "all {side}, zero point clamped to {clamped}: {saturated} of {count} values saturated, by up to \
                     {loss}{more}"
                ))
            }
        }
    }

    fn scale(&self, index: usize) -> f32 {
        float_at(self.layout.scale_type, self.scales, index)
    }

    /// Checks the integer at index `at` of the flattened tensor.
    fn int4(&self, at: usize, byte: u8) -> Result<i8, String> {
        let q = byte as i8;
        if (-7..=7).contains(&q) {
            return Ok(q);
        }
        let (row, col) = (at / self.layout.cols, at % self.layout.cols);
        Err(format!("row {row}, column {col} is {q}; expected -7 to 7 in int4_grouped"))
    }
}

impl Layout {
    /// Checks a tensor and its scales against the scheme that the metadata names. An error has the wrong one of the two.
    pub(super) fn check<'i>(
        scheme: &str,
        tensor: &'i TensorInfo,
        q: &[u8],
        scale: &'i TensorInfo,
        scales: &[u8],
    ) -> Result<Layout, (&'i TensorInfo, String)> {
        let (kind, dtype, scale_shape) = match scheme {
            "int8_symmetric" => (Kind::Int8Symmetric, DType::I8, vec![]),
            "int4_grouped" => (Kind::Int4Grouped, DType::I8, vec![q.len().div_ceil(GROUP)]),
            "int8_asymmetric" => (Kind::Int8Asymmetric, DType::U8, vec![2]),
            other => {
                let problem = format!(
                    "has scheme {:?} in the file's metadata; expected int8_symmetric, int4_grouped or int8_asymmetric",
                    short(other)
                );
                return Err((tensor, problem));
            }
        };
        if q.is_empty() {
            return Err((tensor, format!("has shape {:?}; expected values", tensor.shape)));
        }
        if tensor.dtype != dtype {
            let problem = format!("is {:?}; expected {dtype:?} by its scheme, {scheme}", tensor.dtype);
            return Err((tensor, problem));
        }
        let floats = matches!(scale.dtype, DType::F32 | DType::F16 | DType::BF16);
        if !floats || (kind == Kind::Int8Asymmetric && scale.dtype != DType::F32) {
            let expected = if kind == Kind::Int8Asymmetric { "F32" } else { "BF16, F16 or F32" };
            let problem = format!("is {:?}; expected {expected} by the scheme, {scheme}", scale.dtype);
            return Err((scale, problem));
        }
        let scale_type = scale.dtype;
        if scale.shape != scale_shape {
            let problem =
                format!("has shape {:?}; expected {scale_shape:?} by the scheme, {scheme}", scale.shape);
            return Err((scale, problem));
        }
        let count = scales.len() / scale_type.size();
        let mut values = (0..count).map(|index| float_at(scale_type, scales, index));
        if let Some(index) = values.clone().position(|scale| !scale.is_finite()) {
            let problem = format!("element {index} is NaN or infinite; expected a finite number");
            return Err((scale, problem));
        }
        if kind == Kind::Int8Asymmetric {
            let zero = float_at(scale_type, scales, 1);
            if zero.fract() != 0.0 || !(0.0..=255.0).contains(&zero) {
                let problem = format!("has zero point {zero}; expected a whole number from 0 to 255");
                return Err((scale, problem));
            }
        }
        let exact_in_f16 = values.all(f16_holds);
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let scheme = device_scheme(kind, cols, exact_in_f16, float_at(scale_type, scales, 0));
        Ok(Layout { kind, scale_type, cols, scheme })
    }
}

/// The quantized scheme that stores the values exactly; f32 if there is none.
fn device_scheme(kind: Kind, cols: usize, exact_in_f16: bool, scale: f32) -> Scheme {
    // The largest power of two that divides both 128 and the columns: no piece of that many columns crosses a group.
    let piece = 1usize << cols.trailing_zeros().min(GROUP.trailing_zeros());
    let affine =
        |group: usize| Scheme::Int { bits: Bits::Eight, group: group as u32, scales: Scales::Affine };
    let whole_row = || affine(cols.next_multiple_of(16));
    match kind {
        Kind::Int8Symmetric if exact_in_f16 => Scheme::Int8Row,
        Kind::Int8Symmetric => whole_row(),
        Kind::Int4Grouped if exact_in_f16 && piece >= 32 => Scheme::int4(piece as u32),
        Kind::Int4Grouped if piece >= 16 => affine(piece),
        // q - z has 9 bits. If the mantissa of s has at most 15 bits, products and sums are exact.
        Kind::Int8Asymmetric if scale == 0.0 || scale.is_normal() && scale.to_bits() & 0x1FF == 0 => {
            whole_row()
        }
        Kind::Int4Grouped | Kind::Int8Asymmetric => Scheme::F32,
    }
}
