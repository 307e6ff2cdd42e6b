//! Unpacks the quantized element types of GGUF into the device's integers and scales, without loss.
//!
//! A row is a sequence of blocks, and each block contains its scales. `ggml-common.h` of ggml defines the layouts.
//! Every product of a scale and an integer is exact in f32, so each value is rounded at most once and equals the result
//! of ggml's dequantization bit for bit.

use std::ops::Range;

use strum::VariantArray;

use crate::tensor::{Bits, QuantizedRow, Scales, Scheme, TILE_ROWS};

/// ggml's names of its element types by their ids; empty for ids that are not in use.
pub(super) const TYPE_NAMES: [&str; 42] = [
    "F32", "F16", "Q4_0", "Q4_1", "", "", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4", "NVFP4",
    "Q1_0",
];

/// A quantized element type with its id in ggml. Other element types are [`crate::tensor::DType`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::FromRepr, VariantArray)]
#[repr(u32)]
pub enum GgmlType {
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2K = 10,
    Q3K = 11,
    Q4K = 12,
    Q5K = 13,
    Q6K = 14,
    Iq4Nl = 20,
    Iq4Xs = 23,
}

/// The weights of IQ4_NL and IQ4_XS by their four bits, before they are scaled.
const IQ4_WEIGHTS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

impl GgmlType {
    pub const fn name(self) -> &'static str {
        TYPE_NAMES[self as usize]
    }

    /// Values in a block; rows are whole blocks.
    pub const fn block_values(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::Iq4Nl => 2 + 16,
            Self::Q4_1 => 2 + 2 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 2 + 2 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q2K => 16 + 64 + 2 + 2,
            Self::Q3K => 32 + 64 + 12 + 2,
            Self::Q4K => 2 + 2 + 12 + 128,
            Self::Q5K => 2 + 2 + 12 + 32 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
            Self::Iq4Xs => 2 + 2 + 4 + 128,
        }
    }

    /// The smallest device layout that holds the type without loss.
    pub const fn scheme(self) -> Scheme {
        let (bits, group, scales) = match self {
            Self::Q4_0 => (Bits::Four, 32, Scales::Symmetric),
            Self::Q4_1 => (Bits::Four, 32, Scales::HalfAffine),
            Self::Q5_0 => (Bits::Five, 32, Scales::Symmetric),
            Self::Q5_1 => (Bits::Five, 32, Scales::HalfAffine),
            Self::Q8_0 | Self::Iq4Nl => (Bits::Eight, 32, Scales::Symmetric),
            Self::Q2K => (Bits::Five, 16, Scales::Super),
            Self::Q3K | Self::Q6K => (Bits::Six, 16, Scales::SuperSymmetric),
            Self::Q4K => (Bits::Four, 32, Scales::Super),
            Self::Q5K => (Bits::Five, 32, Scales::Super),
            Self::Iq4Xs => (Bits::Eight, 32, Scales::Super),
        };
        Scheme::Int { bits, group, scales }
    }

    /// How many times as many bytes a matrix takes on the device as in the file.
    pub fn growth(self) -> f64 {
        let (rows, cols) = (TILE_ROWS, 256);
        self.scheme().bytes(rows, cols) as f64
            / (rows * cols / self.block_values() * self.block_bytes()) as f64
    }

    /// Unpacks one block into `q`, of [`Self::block_values`] integers, and `scales`, the scale bytes for that number of
    /// columns in [`Self::scheme`].
    fn unpack(self, block: &[u8], q: &mut [i8], scales: &mut [u8]) {
        match self {
            Self::Q4_0 => {
                scales.copy_from_slice(&block[..2]);
                nibbles(&block[2..], q);
                q.iter_mut().for_each(|q| *q -= 8);
            }
            Self::Q4_1 => {
                scales.copy_from_slice(&block[..4]);
                nibbles(&block[4..], q);
            }
            Self::Q5_0 => {
                scales.copy_from_slice(&block[..2]);
                nibbles(&block[6..], q);
                fifth_bits(&block[2..6], q);
                q.iter_mut().for_each(|q| *q -= 16);
            }
            Self::Q5_1 => {
                scales.copy_from_slice(&block[..4]);
                nibbles(&block[8..], q);
                fifth_bits(&block[4..8], q);
            }
            Self::Q8_0 => {
                scales.copy_from_slice(&block[..2]);
                for (q, byte) in q.iter_mut().zip(&block[2..]) {
                    *q = *byte as i8;
                }
            }
            Self::Q2K => {
                scales[..4].copy_from_slice(&block[80..]);
                for (group, byte) in scales[4..].chunks_exact_mut(2).zip(&block[..16]) {
                    group.copy_from_slice(&[byte & 15, byte >> 4]);
                }
                bit_pairs(&block[16..80], q);
            }
            Self::Q3K => {
                let (high, rest) = block.split_at(32);
                let (low, rest) = rest.split_at(64);
                let (sub_scales, d) = rest.split_at(12);
                scales[..2].copy_from_slice(d);
                for (group, scale) in scales[2..].iter_mut().enumerate() {
                    let four = sub_scales[group % 8] >> (4 * (group / 8)) & 15;
                    let two = sub_scales[8 + group % 4] >> (2 * (group / 4)) & 3;
                    *scale = (four | two << 4).wrapping_sub(32);
                }
                bit_pairs(low, q);
                for (i, q) in q.iter_mut().enumerate() {
                    *q += ((high[i % 32] >> (i / 32) & 1) << 2) as i8 - 4;
                }
            }
            Self::Q4K => {
                super_scales(block, scales);
                for (bytes, q) in block[16..].chunks_exact(32).zip(q.chunks_exact_mut(64)) {
                    let (low, high) = q.split_at_mut(32);
                    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
                        (*low, *high) = ((byte & 15) as i8, (byte >> 4) as i8);
                    }
                }
            }
            Self::Q5K => {
                super_scales(block, scales);
                let high_bits = &block[16..48];
                for (i, (bytes, q)) in block[48..].chunks_exact(32).zip(q.chunks_exact_mut(64)).enumerate() {
                    let (low, high) = q.split_at_mut(32);
                    for (((byte, bits), low), high) in bytes.iter().zip(high_bits).zip(low).zip(high) {
                        let bits = bits >> (2 * i);
                        *low = (byte & 15 | (bits & 1) << 4) as i8;
                        *high = (byte >> 4 | (bits >> 1 & 1) << 4) as i8;
                    }
                }
            }
            Self::Q6K => {
                let (low, rest) = block.split_at(128);
                let (high, rest) = rest.split_at(64);
                let (sub_scales, d) = rest.split_at(16);
                scales[..2].copy_from_slice(d);
                scales[2..].copy_from_slice(sub_scales);
                let halves = low.chunks_exact(64).zip(high.chunks_exact(32));
                for ((low, high), q) in halves.zip(q.chunks_exact_mut(128)) {
                    for (i, q) in q.iter_mut().enumerate() {
                        let (quarter, at) = (i / 32, i % 32);
                        let four = low[i % 64] >> (4 * (quarter / 2)) & 15;
                        let two = high[at] >> (2 * quarter) & 3;
                        *q = (four | two << 4) as i8 - 32;
                    }
                }
            }
            Self::Iq4Nl => {
                scales.copy_from_slice(&block[..2]);
                iq4_weights(&block[2..], q);
            }
            Self::Iq4Xs => {
                let high = u16::from_le_bytes([block[2], block[3]]);
                let low = &block[4..8];
                // The type has no minima.
                scales[..4].copy_from_slice(&[block[0], block[1], 0, 0]);
                for (group, record) in scales[4..].chunks_exact_mut(2).enumerate() {
                    let four = low[group / 2] >> (4 * (group % 2)) & 15;
                    let two = (high >> (2 * group) & 3) as u8;
                    record.copy_from_slice(&[(four | two << 4).wrapping_sub(32), 0]);
                }
                for (bytes, q) in block[8..].chunks_exact(16).zip(q.chunks_exact_mut(32)) {
                    iq4_weights(bytes, q);
                }
            }
        }
    }
}

/// Unpacks 16 bytes: the low nibbles are values 0..16, the high nibbles are values 16..32.
fn nibbles(bytes: &[u8], q: &mut [i8]) {
    let (low, high) = q.split_at_mut(16);
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = ((byte & 15) as i8, (byte >> 4) as i8);
    }
}

/// Unpacks 16 bytes of IQ4_NL and IQ4_XS.
fn iq4_weights(bytes: &[u8], q: &mut [i8]) {
    nibbles(bytes, q);
    q.iter_mut().for_each(|q| *q = IQ4_WEIGHTS[*q as usize]);
}

/// Unpacks 64 bytes: in each 32 of them, the lowest two bits are the first 32 values, and so on.
fn bit_pairs(bytes: &[u8], q: &mut [i8]) {
    for (bytes, q) in bytes.chunks_exact(32).zip(q.chunks_exact_mut(128)) {
        for (i, q) in q.iter_mut().enumerate() {
            *q = (bytes[i % 32] >> (2 * (i / 32)) & 3) as i8;
        }
    }
}

/// Adds the fifth bits: bit i of the 4 bytes is bit 4 of value i.
fn fifth_bits(bytes: &[u8], q: &mut [i8]) {
    let bits = u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    for (i, q) in q.iter_mut().enumerate() {
        *q |= ((bits >> i & 1) << 4) as i8;
    }
}

/// Unpacks the scales of a Q4_K or Q5_K block: two f16, then eight 6-bit scales and eight 6-bit minima in 12 bytes. In
/// the result, each group has its scale and then its minimum.
fn super_scales(block: &[u8], scales: &mut [u8]) {
    scales[..4].copy_from_slice(&block[..4]);
    let packed = &block[4..16];
    for (group, record) in scales[4..].chunks_exact_mut(2).enumerate() {
        let (scale, minimum) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => (
                packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                packed[group + 4] >> 4 | packed[group] >> 6 << 4,
            ),
        };
        record.copy_from_slice(&[scale, minimum]);
    }
}

/// A quantized tensor of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GgmlTensor<'a> {
    pub kind: GgmlType,
    /// Whole rows. Each row is whole blocks.
    pub data: &'a [u8],
}

impl GgmlTensor<'_> {
    pub(in crate::checkpoint) fn quantized_row_into(&self, row: usize, out: &mut QuantizedRow) {
        let (values, bytes) = (self.kind.block_values(), self.kind.block_bytes());
        let blocks = out.q.len() / values;
        let scales = out.scales.len() / blocks;
        let row = &self.data[row * blocks * bytes..][..blocks * bytes];
        let targets = out.q.chunks_exact_mut(values).zip(out.scales.chunks_exact_mut(scales));
        for (block, (q, scales)) in row.chunks_exact(bytes).zip(targets) {
            self.kind.unpack(block, q, scales);
        }
    }

    pub(in crate::checkpoint) fn rows_f32_into(&self, rows: Range<usize>, cols: usize, out: &mut [f32]) {
        let mut row = QuantizedRow::new(self.kind.scheme(), cols);
        for (index, out) in rows.zip(out.chunks_exact_mut(cols)) {
            self.quantized_row_into(index, &mut row);
            row.dequantize_into(self.kind.scheme(), out);
        }
    }
}
