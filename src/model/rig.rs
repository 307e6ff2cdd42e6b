//! Times commands on a device by its own clock, and makes their buffers.
//!
//! Weights, keys and values have several copies on the device. Dispatches use them in rotation, so that caches do not
//! hold what a step would read from memory. Matrices hold random integers or random numbers.

use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::checkpoint::{Encoding, NativeTensor, Tensor};
use crate::gpu::{
    Arena, Buffer, Class, CommandBuffer, Device, GpuError, MemoryKind, Recorder, Submission, Uploader,
};
use crate::kernels::{
    Activations, AttentionBy, Heads, Kernels, Matrices, Matrix, Operand, ProductKind, Quantized, Tiles,
    UploadError, Wants,
};
use crate::tensor::{KvDtype, Precision, Scheme};

/// The least bytes of all copies together: more than the caches of large GPUs hold.
pub(crate) const ROTATED_BYTES: u64 = 256 << 20;
const MOST_COPIES: u64 = 64;
/// Random integers repeat after this many bytes, because random numbers for a whole matrix take seconds.
const RANDOM_BYTES: usize = 64 << 20;
/// The length of a measured span, and the most dispatches in it.
pub(crate) const SPAN: Duration = Duration::from_millis(20);
const MOST_REPEATS: usize = 2000;

/// A measured span by the device's clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Seconds of one repetition, with the barrier after it.
    pub seconds: f64,
    pub repeats: usize,
}

/// A device that kernels are measured on.
pub struct Rig {
    pub(crate) device: Arc<Device>,
    commands: CommandBuffer,
    submission: Submission,
}

impl Rig {
    pub fn new(device: &Arc<Device>) -> Result<Rig, GpuError> {
        Ok(Rig {
            device: device.clone(),
            commands: CommandBuffer::new(device, "measured")?,
            submission: Submission::new(device)?,
        })
    }

    /// Times `record`, repeated between two timestamps for about 20 ms. Returns the median of `runs` spans, at least 1.
    /// `None` if the device has no timestamps.
    pub fn time(
        &mut self,
        runs: usize,
        record: &mut dyn FnMut(&mut Recorder<'_>, usize),
    ) -> Result<Option<Span>, GpuError> {
        let mut span = |repeats: usize| -> Result<Option<f64>, GpuError> {
            self.commands
                .record_for_many_submits(&mut |recorder| (0..repeats).for_each(|i| record(recorder, i)))?;
            self.submission.submit(&mut [&mut self.commands], "a measured kernel")?;
            self.submission.wait()?;
            Ok(self.submission.took().map(|took| took.as_secs_f64()))
        };
        // The first span includes the driver's one-time work. The second span shows how many repetitions fill a span.
        span(1)?;
        let Some(once) = span(1)? else { return Ok(None) };
        let repeats = (SPAN.as_secs_f64() / once.max(1e-9)).clamp(1.0, MOST_REPEATS as f64) as usize;
        let mut seconds = Vec::new();
        for _ in 0..runs.max(1) {
            seconds.extend(span(repeats)?);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(Some(Span { seconds: seconds[seconds.len() / 2] / repeats as f64, repeats }))
    }

    /// The matrices on which the ways to share out products are measured.
    pub fn products(
        &mut self,
        kind: ProductKind,
        scheme: Scheme,
        [rows, cols]: [usize; 2],
    ) -> Result<Products, GpuError> {
        let mut make = self.make();
        let each = if kind == ProductKind::Gated { 2 } else { 1 };
        let bytes = each * scheme.bytes(rows, cols);
        let mut matrices = || make.matrices(scheme, rows, cols, bytes);
        let (own, up) = (matrices()?, if each == 2 { matrices()? } else { Vec::new() });
        Ok(Products { kind, scheme, rows, cols, matrices: own, up })
    }

    /// The kernels that compute `products` in `tiles`.
    pub fn kernels_of(&self, products: &Products, tiles: Tiles) -> Result<Kernels, GpuError> {
        let Products { kind, scheme, .. } = *products;
        let of_kind = |other| (kind == other).then_some(scheme);
        let matrices = Matrices {
            products: vec![scheme],
            gated: of_kind(ProductKind::Gated).into_iter().collect(),
            head: of_kind(ProductKind::Head),
            tiles: Some(tiles),
            attention: Some(AttentionBy::Lanes),
            ..Matrices::default()
        };
        self.multiplying(&matrices)
    }

    /// The kernels that multiply `matrices` with int8 activations.
    pub(crate) fn multiplying(&self, matrices: &Matrices) -> Result<Kernels, GpuError> {
        // Kernels cannot be made without attention, which is not measured.
        let heads = Heads { group: 2, head_dim: 256, kv: KvDtype::F16 };
        Kernels::new(&self.device, matrices, &[heads], Precision::Fast)
    }

    /// The time of one product with int8 activations of `tokens` tokens, and the bits of its result. `None` if the
    /// device has no timestamps.
    pub fn time_product(
        &mut self,
        products: &Products,
        kernels: &Kernels,
        tokens: usize,
        runs: usize,
    ) -> Result<Option<(Span, Vec<u32>)>, GpuError> {
        let Products { kind, rows, cols, matrices, up, .. } = products;
        let mut make = self.make();
        let wants = Wants { floats: false, blocks: true };
        let x = make.operand(kernels, wants, tokens, *cols)?;
        let mut output = |bytes| make.filled(bytes, f32::NAN.to_bits());
        let y = Activations::new(output(Activations::bytes(tokens, *rows))?, *rows);
        let is_gated = *kind == ProductKind::Gated;
        // Only gated products write these.
        let width = if is_gated { *rows } else { 1 };
        let second = Activations::new(output(Activations::bytes(tokens, width))?, width);
        let gated = Quantized::new(output(Quantized::bytes(tokens, width))?, width);
        let result = if is_gated { &gated.buffer } else { &y.buffer };
        let host = make.arena.alloc(MemoryKind::Readback, Class::Activations, result.size(), "measured")?;
        let to = Operand::blocks(&gated);
        let span = self.time(runs, &mut |recorder, i| {
            let i = i % matrices.len();
            match kind {
                ProductKind::Plain => kernels.matmul(recorder, &[(&matrices[i], &y)], &x, tokens),
                ProductKind::Head => kernels.head(recorder, &matrices[i], &y, &x, tokens),
                ProductKind::Gated => {
                    kernels.gated(recorder, [&matrices[i], &up[i]], &x, [&y, &second], &to, tokens);
                }
            }
        })?;
        self.run(|recorder| recorder.copy(result, &host, host.size()))?;
        let mut words = vec![0; host.size() as usize / 4];
        host.read(0, bytemuck::cast_slice_mut::<u32, u8>(&mut words));
        if is_gated {
            // The memory of second digits that a block does not have is undefined.
            let values = Quantized::values(bytemuck::cast_slice(&words), tokens, *rows);
            words = values.into_iter().map(f32::to_bits).collect();
        }
        Ok(span.map(|span| (span, words)))
    }

    /// Makes buffers with the same random numbers at each call.
    pub(crate) fn make(&mut self) -> Make<'_> {
        Make { arena: Arena::new(&self.device), rng: ChaCha8Rng::seed_from_u64(1), rig: self }
    }

    pub(crate) fn run(&mut self, record: impl FnOnce(&mut Recorder<'_>)) -> Result<(), GpuError> {
        let mut recorder = self.commands.begin()?;
        record(&mut recorder);
        recorder.submit_alone("what is measured, before it is")?;
        self.commands.wait()
    }
}

/// Copies of matrices of one shape, for products of one kind.
pub struct Products {
    pub kind: ProductKind,
    scheme: Scheme,
    rows: usize,
    cols: usize,
    matrices: Vec<Matrix>,
    /// The second matrices of gated products.
    up: Vec<Matrix>,
}

/// Makes the buffers of one case.
pub(crate) struct Make<'a> {
    pub(crate) arena: Arena,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) rig: &'a mut Rig,
}

impl Make<'_> {
    pub(crate) fn empty(&mut self, bytes: u64) -> Result<Buffer, GpuError> {
        self.arena.alloc(MemoryKind::Device, Class::Activations, bytes, "measured")
    }

    pub(crate) fn filled(&mut self, bytes: u64, word: u32) -> Result<Buffer, GpuError> {
        let buffer = self.empty(bytes)?;
        self.rig.run(|recorder| recorder.fill(&buffer, word))?;
        Ok(buffer)
    }

    pub(crate) fn words<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Result<Buffer, GpuError> {
        let buffer = self.empty(size_of_val(data) as u64)?;
        let mut uploader = Uploader::<GpuError>::new(&self.rig.device)?;
        uploader.upload(&buffer, data)?;
        uploader.finish()?;
        Ok(buffer)
    }

    /// Random activations from -1 to 1.
    pub(crate) fn activations(&mut self, rows: usize, width: usize) -> Result<Activations, GpuError> {
        let count = rows * Activations::stride_of(width);
        let values: Vec<f32> = (0..count).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        Ok(Activations::new(self.words(&values)?, width))
    }

    /// A random operand, in the forms that products need.
    pub(crate) fn operand(
        &mut self,
        kernels: &Kernels,
        wants: Wants,
        rows: usize,
        width: usize,
    ) -> Result<Operand, GpuError> {
        let floats = self.activations(rows, width)?;
        let blocks = Quantized::new(self.empty(Quantized::bytes(rows, width))?, width);
        self.rig.run(|recorder| kernels.quantize(recorder, &floats, &blocks, rows))?;
        Ok(Operand::new(wants, &floats, &blocks))
    }

    /// Copies of a matrix for rotation. One use of a copy moves `bytes`.
    pub(crate) fn matrices(
        &mut self,
        scheme: Scheme,
        rows: usize,
        cols: usize,
        bytes: u64,
    ) -> Result<Vec<Matrix>, GpuError> {
        self.copies(scheme, rows, cols, copies(bytes))
    }

    /// The largest allocation of a matrix.
    pub(crate) fn max_shard_bytes(&self) -> u64 {
        self.rig.device.info().max_allocation_bytes / 2
    }

    /// `count` copies of a matrix.
    pub(crate) fn copies(
        &mut self,
        scheme: Scheme,
        rows: usize,
        cols: usize,
        count: u64,
    ) -> Result<Vec<Matrix>, GpuError> {
        self.copies_in_shards(scheme, [rows, cols], count, self.max_shard_bytes())
    }

    /// A matrix in one buffer.
    pub(crate) fn whole(&mut self, scheme: Scheme, rows: usize, cols: usize) -> Result<Matrix, GpuError> {
        Ok(self.copies_in_shards(scheme, [rows, cols], 1, u64::MAX)?.remove(0))
    }

    fn copies_in_shards(
        &mut self,
        scheme: Scheme,
        [rows, cols]: [usize; 2],
        count: u64,
        shard: u64,
    ) -> Result<Vec<Matrix>, GpuError> {
        let mut blocks = vec![0; scheme.block_bytes(rows, cols) as usize];
        let deviation = 1.0 / (cols as f32).sqrt();
        let value = |rng: &mut ChaCha8Rng| rng.random_range(-deviation..deviation);
        match scheme {
            Scheme::F32 => put(&mut blocks, |_| value(&mut self.rng).to_le_bytes()),
            Scheme::F16 => put(&mut blocks, |_| f16::from_f32(value(&mut self.rng)).to_le_bytes()),
            Scheme::Bf16 => put(&mut blocks, |_| bf16::from_f32(value(&mut self.rng)).to_le_bytes()),
            _ => {
                let random = RANDOM_BYTES.min(blocks.len());
                let (random, others) = blocks.split_at_mut(random);
                self.rng.fill_bytes(random);
                others
                    .chunks_mut(RANDOM_BYTES)
                    .for_each(|others| others.copy_from_slice(&random[..others.len()]));
            }
        }
        let mut scales = vec![0; scheme.scale_bytes(rows, cols) as usize];
        put(&mut scales, |_| f16::from_f32(deviation / 8.0).to_le_bytes());
        let native = NativeTensor { scheme, blocks: blocks[..].into(), scales: scales[..].into() };
        let (shape, encoding) = ([rows, cols], Encoding::Native(native));
        let tensor = Tensor { name: "measured", file: "memory", shape: &shape, encoding, interleaved: None };
        let mut uploader = Uploader::<UploadError>::new(&self.rig.device)?;
        let mut upload = |_| {
            Matrix::upload(&mut self.arena, &mut uploader, &tensor, scheme, Class::Ffn, shard, &mut |_| {})
        };
        let all = (0..count).map(&mut upload).collect::<Result<Vec<_>, _>>().map_err(gpu_error)?;
        uploader.finish().map_err(gpu_error)?;
        Ok(all)
    }
}

/// The number of copies for rotation, if a dispatch moves `bytes`.
pub(crate) fn copies(bytes: u64) -> u64 {
    ROTATED_BYTES.div_ceil(bytes.max(1)).clamp(1, MOST_COPIES)
}

fn put<const N: usize>(bytes: &mut [u8], mut element: impl FnMut(usize) -> [u8; N]) {
    for (i, to) in bytes.chunks_exact_mut(N).enumerate() {
        to.copy_from_slice(&element(i));
    }
}

/// The error of the device. Tensors in memory cannot be damaged files, so no other error occurs.
pub(crate) fn gpu_error(error: UploadError) -> GpuError {
    match error {
        UploadError::Gpu(error) => error,
        UploadError::Checkpoint(error) => unreachable!("bytes in memory: {error}"),
    }
}
