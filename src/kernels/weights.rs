//! Weight matrices on the device, in the packed layout of `shaders/common/weights.glsl`. A matrix that is too large for
//! one allocation is split into row shards.

use crate::checkpoint::{CheckpointError, Encoding, FileSlice, Tensor};
use crate::gpu::{Arena, Buffer, Class, GpuError, MemoryKind, Uploader};
use crate::quantize::{Rounding, pack_tiles};
use crate::tensor::{Scheme, TILE_ROWS};

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
    /// A matrix packed in `scheme` in these buffers. They may be filled later.
    pub fn of_one_shard(
        scheme: Scheme,
        [rows, cols]: [usize; 2],
        blocks: Buffer,
        scales: Option<Buffer>,
    ) -> Matrix {
        let scale_bytes = scales.as_ref().map_or(0, Buffer::size);
        let expected = (scheme.block_bytes(rows, cols), scheme.scale_bytes(rows, cols));
        assert_eq!((blocks.size(), scale_bytes), expected, "a matrix of {scheme}");
        let shards = vec![Shard { first_row: 0, rows, blocks, scales }];
        Matrix { rows, cols, scheme, rows_per_shard: rows.next_multiple_of(TILE_ROWS), shards }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let shards = self.shards.iter();
        shards.map(|shard| shard.blocks.size() + shard.scales.as_ref().map_or(0, Buffer::size)).sum()
    }

    /// The addresses of each shard's blocks and scales (0 without scales), in the format of the embedding kernel's
    /// table.
    fn addresses(&self) -> Vec<[u64; 2]> {
        let of = |shard: &Shard| [shard.blocks.address(), shard.scales.as_ref().map_or(0, Buffer::address)];
        self.shards.iter().map(of).collect()
    }

    /// The sizes of the buffers of a matrix `[rows, cols]`, for each shard: bytes of the blocks, then of the scales, if
    /// any.
    pub fn buffer_bytes(
        scheme: Scheme,
        rows: usize,
        cols: usize,
        max_shard_bytes: u64,
    ) -> impl Iterator<Item = (u64, Option<u64>)> {
        let step = rows_per_shard(scheme, rows, cols, max_shard_bytes);
        (0..rows).step_by(step).map(move |first_row| {
            let rows = step.min(rows - first_row);
            let scales = scheme.scale_bytes(rows, cols);
            (scheme.block_bytes(rows, cols), Some(scales).filter(|bytes| *bytes > 0))
        })
    }

    /// Uploads a `[rows, cols]` tensor. If the tensor is already packed in `scheme`, its reads are queued with the
    /// uploader. Otherwise it is packed here, and `each` is called every few megabytes with the number of rows that are
    /// done. `max_shard_bytes` limits the size of one allocation.
    pub fn upload<'a>(
        arena: &mut Arena,
        uploader: &mut Uploader<'a, UploadError>,
        tensor: &Tensor<'a>,
        scheme: Scheme,
        class: Class,
        max_shard_bytes: u64,
        each: &mut dyn FnMut(usize),
    ) -> Result<Matrix, UploadError> {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        let tile_bytes = scheme.tile_bytes(cols);
        let tile_scales = scheme.tile_scale_bytes(cols);
        let rows_per_shard = rows_per_shard(scheme, rows, cols, max_shard_bytes);

        let packed = match tensor.encoding {
            Encoding::Native(native) if native.scheme == scheme => Some(native),
            _ => None,
        };

        let mut shards = Vec::new();
        for (first_row, (block_bytes, scale_bytes)) in
            (0..rows).step_by(rows_per_shard).zip(Matrix::buffer_bytes(scheme, rows, cols, max_shard_bytes))
        {
            let mut alloc = |bytes| arena.alloc(MemoryKind::Device, class, bytes, tensor.name);
            let (blocks, scales) = (alloc(block_bytes)?, scale_bytes.map(alloc).transpose()?);
            let first_tile = first_row / TILE_ROWS;
            if let Some(native) = packed {
                let mut read = |to: &Buffer, plane: FileSlice<'a>, skip: usize| {
                    let tensor = *tensor;
                    uploader.queue(to, move |offset, into| {
                        Ok(plane.read_at(skip as u64 + offset, into).map_err(|e| tensor.error(e))?)
                    });
                };
                read(&blocks, native.blocks, first_tile * tile_bytes);
                if let Some(scales) = &scales {
                    read(scales, native.scales, first_tile * tile_scales);
                }
            } else {
                let mut packed_scales = vec![0u8; scale_bytes.unwrap_or(0) as usize];
                uploader.fill_with(&blocks, tile_bytes as u64, |offset, piece| {
                    let first = offset as usize / tile_bytes;
                    let count = piece.len() / tile_bytes;
                    let scales = &mut packed_scales[first * tile_scales..][..count * tile_scales];
                    let tiles = first_tile + first..first_tile + first + count;
                    pack_tiles(scheme, Rounding::Nearest, tensor, tiles, piece, scales)?;
                    each(rows.min(first_row + (first + count) * TILE_ROWS));
                    Ok::<_, UploadError>(())
                })?;
                if let Some(scales) = &scales {
                    uploader.upload(scales, &packed_scales)?;
                }
            }
            let rows = rows_per_shard.min(rows - first_row);
            shards.push(Shard { first_row, rows, blocks, scales });
        }
        Ok(Matrix { rows, cols, scheme, rows_per_shard, shards })
    }
}

/// The number of rows of a shard: as many whole tiles as `max_shard_bytes` holds, but at least one.
fn rows_per_shard(scheme: Scheme, rows: usize, cols: usize, max_shard_bytes: u64) -> usize {
    let max_tiles = (max_shard_bytes as usize / scheme.tile_bytes(cols)).max(1);
    max_tiles.saturating_mul(TILE_ROWS).min(rows.next_multiple_of(TILE_ROWS))
}

/// A matrix whose rows can also be looked up by id, with a table of its shards' addresses.
pub struct Embedding {
    pub(super) matrix: Matrix,
    pub(super) table: Buffer,
    /// Factor for looked-up rows.
    pub(super) scale: f32,
    /// The row of ids beyond the last row: the last one, unless [`Embedding::with_row_beyond`] names another one.
    pub(super) beyond: u32,
}

impl Embedding {
    /// Bytes of the table.
    pub const fn table_bytes(shards: usize) -> u64 {
        (shards * size_of::<[u64; 2]>()) as u64
    }

    pub fn new(
        arena: &mut Arena,
        uploader: &mut Uploader<UploadError>,
        matrix: Matrix,
        scale: f32,
    ) -> Result<Embedding, UploadError> {
        let addresses = matrix.addresses();
        let bytes = Embedding::table_bytes(addresses.len());
        let table = arena.alloc(MemoryKind::Device, Class::Embedding, bytes, "embedding shard table")?;
        uploader.upload(&table, &addresses)?;
        let beyond = matrix.rows as u32 - 1;
        Ok(Embedding { matrix, table, scale, beyond })
    }

    /// An embedding whose matrix has one shard, and the contents that the caller must write to `table`.
    pub fn of_one_shard(matrix: Matrix, table: Buffer, scale: f32) -> (Embedding, Vec<[u64; 2]>) {
        assert_eq!(table.size(), Embedding::table_bytes(matrix.shards.len()), "the table of an embedding");
        let addresses = matrix.addresses();
        let beyond = matrix.rows as u32 - 1;
        (Embedding { matrix, table, scale, beyond }, addresses)
    }

    /// The same embedding, where ids beyond the last row have this one.
    pub fn with_row_beyond(self, row: u32) -> Embedding {
        assert!((row as usize) < self.matrix.rows, "row {row} of {}", self.matrix.rows);
        Embedding { beyond: row, ..self }
    }

    /// The embedding's matrix, which computes the logits of a model without another head.
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }
}
