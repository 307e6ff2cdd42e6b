//! Native checkpoints: weights packed as the device wants them, so that loading is reading.
//!
//! A folder with a manifest `unicorn.json`, `layer-NNN.safetensors` for each decoder layer, `shared.safetensors` for
//! the rest, and the source's configs, tokenizer and template. `docs/formats.md` specifies it.
//!
//! Refuses a manifest of a newer format or layout, files of another size than it says, and tensors whose bytes do not
//! fit scheme and shape; checksums are compared where that is asked for (`unicorn inspect --verify`).

use std::ops::Range;

use crate::tensor::{QuantizedRow, Scheme, TILE_ROWS, unpack_plain_row, unpack_row};

/// A tensor in a device layout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NativeTensor<'a> {
    pub scheme: Scheme,
    /// [`Scheme::block_bytes`] of the tensor's rows and columns.
    pub blocks: &'a [u8],
    /// [`Scheme::scale_bytes`]; empty for floating-point weights.
    pub scales: &'a [u8],
}

impl<'a> NativeTensor<'a> {
    pub(super) fn stored_bytes(&self) -> u64 {
        (self.blocks.len() + self.scales.len()) as u64
    }

    pub(super) fn quantized_row_into(&self, row: usize, out: &mut QuantizedRow) {
        let (blocks, scales) = self.tile(row / TILE_ROWS, out.q.len());
        unpack_row(self.scheme, row % TILE_ROWS, blocks, scales, out);
    }

    pub(super) fn rows_f32_into(&self, rows: Range<usize>, cols: usize, out: &mut [f32]) {
        let mut row = QuantizedRow::new(self.scheme, cols);
        for (index, out) in rows.zip(out.chunks_exact_mut(cols)) {
            match self.scheme.grouping(cols) {
                None => {
                    let (blocks, _) = self.tile(index / TILE_ROWS, cols);
                    unpack_plain_row(self.scheme, index % TILE_ROWS, blocks, out);
                }
                Some(_) => {
                    self.quantized_row_into(index, &mut row);
                    row.dequantize_into(self.scheme, out);
                }
            }
        }
    }

    fn tile(&self, tile: usize, cols: usize) -> (&'a [u8], &'a [u8]) {
        let (blocks, scales) = (self.scheme.tile_bytes(cols), self.scheme.tile_scale_bytes(cols));
        (&self.blocks[tile * blocks..][..blocks], &self.scales[tile * scales..][..scales])
    }
}
