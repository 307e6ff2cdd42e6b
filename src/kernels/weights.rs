//! Weight matrices on the device: the packed layout of `shaders/common/weights.glsl`, cut into row shards where
//! one allocation cannot hold them.

use half::f16;
use rayon::prelude::*;

use crate::checkpoint::{CheckpointError, Tensor};
use crate::gpu::{Arena, Buffer, Class, GpuError, MemoryKind, Uploader};
use crate::quantize::{grouping, quantize_row};
use crate::tensor::Scheme;

/// Rows of a tile: one lane each.
pub const TILE_ROWS: usize = 32;
/// Bytes of one block: consecutive weights of one row.
pub const BLOCK_BYTES: usize = 16;

impl Scheme {
    /// Weights in one block.
    pub const fn block_weights(self) -> usize {
        match self {
            Scheme::F32 => 4,
            Scheme::Bf16 => 8,
            Scheme::Int8Row => 16,
            Scheme::Int4 { .. } => 32,
        }
    }

    const fn blocks_per_row(self, cols: usize) -> usize {
        cols.div_ceil(self.block_weights())
    }

    /// Bytes of one tile of 32 rows, without scales.
    const fn tile_bytes(self, cols: usize) -> usize {
        self.blocks_per_row(cols) * BLOCK_BYTES * TILE_ROWS
    }

    const fn scales_per_row(self, cols: usize) -> usize {
        match self {
            Scheme::F32 | Scheme::Bf16 => 0,
            Scheme::Int8Row => 1,
            Scheme::Int4 { group } => cols.div_ceil(group as usize),
        }
    }

    /// What `blocks_per_scale` is in the shaders; 1 where it does not matter.
    pub(super) fn blocks_per_scale(self) -> u32 {
        match self {
            Scheme::Int4 { group } => group / 32,
            _ => 1,
        }
    }
}

/// Packs up to 32 rows of a tensor, from `first_row` on, into one tile, quantizing where the scheme asks for it.
///
/// `blocks`: [`Scheme::tile_bytes`], zeroed. `scales`: 32 per scale of a row, zeroed.
fn pack_tile(
    scheme: Scheme,
    tensor: &Tensor,
    first_row: usize,
    blocks: &mut [u8],
    scales: &mut [f16],
) -> Result<(), CheckpointError> {
    let cols = tensor.cols();
    let per_block = scheme.block_weights();
    let mut row = vec![0.0; cols];
    let mut q = vec![0i8; cols];
    let mut row_scales = vec![f16::ZERO; scheme.scales_per_row(cols)];
    if let Scheme::Int4 { .. } = scheme {
        // Zero weights are nibbles of 8: also beyond the matrix.
        blocks.fill(0x88);
    }
    for lane in 0..TILE_ROWS.min(tensor.rows() - first_row) {
        let index = first_row + lane;
        tensor.rows_f32_into(index..index + 1, &mut row)?;
        if let Some((group, qmax)) = grouping(scheme, cols) {
            quantize_row(&row, group, qmax, &mut q, &mut row_scales)
                .map_err(|e| tensor.error(format!("row {index}: {e}")))?;
        }
        for (i, scale) in row_scales.iter().enumerate() {
            scales[i * TILE_ROWS + lane] = *scale;
        }
        for start in (0..cols).step_by(per_block) {
            let end = cols.min(start + per_block);
            let at = (start / per_block * TILE_ROWS + lane) * BLOCK_BYTES;
            let block = &mut blocks[at..at + BLOCK_BYTES];
            match scheme {
                Scheme::F32 => {
                    for (bytes, w) in block.chunks_exact_mut(4).zip(&row[start..end]) {
                        bytes.copy_from_slice(&w.to_le_bytes());
                    }
                }
                Scheme::Bf16 => {
                    for (bytes, w) in block.chunks_exact_mut(2).zip(&row[start..end]) {
                        bytes.copy_from_slice(&half::bf16::from_f32(*w).to_le_bytes());
                    }
                }
                Scheme::Int8Row => {
                    for (byte, w) in block.iter_mut().zip(&q[start..end]) {
                        *byte = *w as u8;
                    }
                }
                Scheme::Int4 { .. } => {
                    for (i, w) in q[start..end].iter().enumerate() {
                        let nibble = (w + 8) as u8;
                        let byte = &mut block[i % 16];
                        *byte = if i < 16 { *byte & 0xf0 | nibble } else { *byte & 0x0f | nibble << 4 };
                    }
                }
            }
        }
    }
    Ok(())
}

/// A matrix could not be put on the device.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Consecutive rows of a matrix in one allocation.
pub(super) struct Shard {
    pub first_row: usize,
    pub rows: usize,
    pub blocks: Buffer,
    pub scales: Option<Buffer>,
}

/// A weight matrix `[rows, cols]` in device memory.
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) scheme: Scheme,
    pub(super) rows_per_shard: usize,
    pub(super) shards: Vec<Shard>,
}

impl Matrix {
    /// Packs and uploads a `[rows, cols]` tensor. `max_shard_bytes` bounds one allocation; `each` hears how many rows
    /// have been packed, every few megabytes.
    pub fn upload(
        arena: &mut Arena,
        uploader: &mut Uploader,
        tensor: &Tensor,
        scheme: Scheme,
        max_shard_bytes: u64,
        each: &mut dyn FnMut(usize),
    ) -> Result<Matrix, UploadError> {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        let tile_bytes = scheme.tile_bytes(cols);
        let tile_scales = scheme.scales_per_row(cols) * TILE_ROWS;
        let max_tiles = (max_shard_bytes as usize / tile_bytes).max(1);
        let rows_per_shard = (max_tiles * TILE_ROWS).min(rows.next_multiple_of(TILE_ROWS));

        let mut shards = Vec::new();
        for first_row in (0..rows).step_by(rows_per_shard) {
            let shard_rows = rows_per_shard.min(rows - first_row);
            let tiles = shard_rows.div_ceil(TILE_ROWS);
            let bytes = (tiles * tile_bytes) as u64;
            let blocks = arena.alloc(MemoryKind::Device, Class::Weights, bytes, tensor.name)?;
            let mut scales = vec![f16::ZERO; tiles * tile_scales];
            uploader.fill_with(&blocks, tile_bytes as u64, |offset, piece| {
                let first_tile = offset as usize / tile_bytes;
                let tiles = piece.len() / tile_bytes;
                piece
                    .par_chunks_exact_mut(tile_bytes)
                    .zip(split(&mut scales[first_tile * tile_scales..], tile_scales, tiles))
                    .enumerate()
                    .try_for_each(|(i, (blocks, scales))| {
                        let tile_row = first_row + (first_tile + i) * TILE_ROWS;
                        pack_tile(scheme, tensor, tile_row, blocks, scales)
                    })
                    .map_err(UploadError::from)?;
                each(rows.min(first_row + (first_tile + tiles) * TILE_ROWS));
                Ok::<_, UploadError>(())
            })?;
            let scales = match tile_scales {
                0 => None,
                _ => {
                    let bytes = (scales.len() * size_of::<f16>()) as u64;
                    let buffer = arena.alloc(MemoryKind::Device, Class::Weights, bytes, tensor.name)?;
                    uploader.upload(&buffer, &scales)?;
                    Some(buffer)
                }
            };
            shards.push(Shard { first_row, rows: shard_rows, blocks, scales });
        }
        Ok(Matrix { rows, cols, scheme, rows_per_shard, shards })
    }
}

/// The first `count` pieces of `size` elements; empty pieces where there are no scales.
fn split(scales: &mut [f16], size: usize, count: usize) -> Vec<&mut [f16]> {
    match size {
        0 => (0..count).map(|_| &mut [][..]).collect(),
        size => scales.chunks_exact_mut(size).take(count).collect(),
    }
}

/// A matrix whose rows are also looked up by id: it carries the table of its shards' addresses.
pub struct Embedding {
    pub(super) matrix: Matrix,
    pub(super) table: Buffer,
}

impl Embedding {
    pub fn new(arena: &mut Arena, uploader: &mut Uploader, matrix: Matrix) -> Result<Embedding, GpuError> {
        let addresses: Vec<[u64; 2]> = matrix
            .shards
            .iter()
            .map(|s| [s.blocks.address(), s.scales.as_ref().map_or(0, |b| b.address())])
            .collect();
        let bytes = (addresses.len() * 16) as u64;
        let table = arena.alloc(MemoryKind::Device, Class::Weights, bytes, "embedding shard table")?;
        uploader.upload(&table, &addresses)?;
        Ok(Embedding { matrix, table })
    }

    /// The same weights as an output projection (tied embeddings).
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }
}
