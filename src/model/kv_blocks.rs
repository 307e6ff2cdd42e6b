//! Copies of KV blocks between the device and the host, so that keys and values can be kept outside the device.
//!
//! The bytes of a block are the keys and then the values of each layer of its pool, in the order of the layers. Layers
//! that read another layer's keys and values have none of their own.

use super::layers::DeviceLayer;
use super::memory;
use super::model_runner::ModelRunner;
use super::runner::PoolBlock;
use super::spec::LayerSpec;
use crate::gpu::{Buffer, CommandBuffer, GpuError, Submission};
use crate::kernels::KvCache;

/// A piece of a block, and its place in the staging buffer.
struct Piece {
    memory: Buffer,
    staging: Buffer,
}

impl ModelRunner {
    /// Bytes of blocks of this model, without a draft model's part of them.
    pub(super) fn own_bytes(&self, blocks: &[PoolBlock]) -> usize {
        blocks.iter().flat_map(|block| self.layers_of(block.pool)).map(|(_, half)| 2 * half as usize).sum()
    }

    /// Copies the contents of blocks to the host. The copy waits for all steps that were submitted before.
    pub(super) fn read_own_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, GpuError> {
        let mut bytes = vec![0; self.own_bytes(blocks)];
        let mut rest = &mut bytes[..];
        let mut copies = Copies::new(self)?;
        for portion in self.portions(blocks) {
            copies.run(portion.iter().map(|piece| (&piece.memory, &piece.staging)))?;
            for piece in &portion {
                let (now, later) = rest.split_at_mut(piece.staging.size() as usize);
                piece.staging.read(0, now);
                rest = later;
            }
        }
        Ok(bytes)
    }

    /// Copies the contents of blocks to the device. Panics unless `bytes` are as many as the blocks have.
    pub(super) fn write_own_blocks(&mut self, blocks: &[PoolBlock], bytes: &[u8]) -> Result<(), GpuError> {
        assert_eq!(bytes.len(), self.own_bytes(blocks), "bytes of KV blocks");
        let mut rest = bytes;
        let mut copies = Copies::new(self)?;
        for portion in self.portions(blocks) {
            for piece in &portion {
                let (now, later) = rest.split_at(piece.staging.size() as usize);
                piece.staging.write(0, now);
                rest = later;
            }
            copies.run(portion.iter().map(|piece| (&piece.staging, &piece.memory)))?;
        }
        Ok(())
    }

    /// The layers of a pool, each with the bytes of a block's keys, or values.
    fn layers_of(&self, pool: usize) -> impl Iterator<Item = (&DeviceLayer, u64)> {
        let has_own =
            move |(layer, spec): &(&DeviceLayer, &LayerSpec)| layer.pool == pool && spec.kv_source.is_none();
        self.layers.iter().zip(&self.config.layers).filter(has_own).map(|(layer, spec)| {
            (layer, memory::kv_block_bytes(&spec.heads, self.kv, self.limits.kv.block_size))
        })
    }

    /// The memory of a block: the keys and the values of each layer of its pool that has its own.
    pub(super) fn block_memory(&self, PoolBlock { pool, block }: PoolBlock) -> impl Iterator<Item = Buffer> {
        self.layers_of(pool).flat_map(move |(layer, half)| {
            let KvCache { keys, values } = &layer.attention.cache;
            [keys, values].map(|all| all.slice(u64::from(block) * half, half))
        })
    }

    /// The memory of blocks in the order of their bytes, cut into portions that fill the staging buffer.
    fn portions(&self, blocks: &[PoolBlock]) -> Vec<Vec<Piece>> {
        // No step is in flight that reads logits, so their buffer is free.
        let staging = &self.logits_readback;
        let mut portions = vec![Vec::new()];
        let mut used = 0;
        for mut memory in blocks.iter().flat_map(|block| self.block_memory(*block)) {
            while memory.size() > 0 {
                if used == staging.size() {
                    portions.push(Vec::new());
                    used = 0;
                }
                let bytes = memory.size().min(staging.size() - used);
                let piece = Piece { memory: memory.slice(0, bytes), staging: staging.slice(used, bytes) };
                portions.last_mut().expect("there is a first one").push(piece);
                used += bytes;
                memory = memory.slice(bytes, memory.size() - bytes);
            }
        }
        portions
    }
}

/// Runs copies on the device, one submit after another.
struct Copies {
    commands: CommandBuffer,
    submission: Submission,
}

impl Copies {
    fn new(model: &ModelRunner) -> Result<Self, GpuError> {
        let commands = CommandBuffer::new(&model.device, "KV blocks")?;
        Ok(Self { commands, submission: Submission::new(&model.device)? })
    }

    fn run<'a>(
        &mut self,
        copies: impl Iterator<Item = (&'a Buffer, &'a Buffer)> + Clone,
    ) -> Result<(), GpuError> {
        let Self { commands, submission } = self;
        commands.record_for_one_submit(&mut |recorder| {
            copies.clone().for_each(|(from, to)| recorder.copy(from, to, from.size()));
        })?;
        submission.submit(&mut [commands], "copying KV blocks")?;
        submission.wait()
    }
}
