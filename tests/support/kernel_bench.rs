//! The bench for tests of kernels: a device with every kernel, seeded random values, and buffers that start as NaN.
//! Also inputs that several test files use.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::checkpoint::{Encoding, NativeTensor, Tensor};
use unicorn::gpu::{
    Arena, Buffer, Class, CommandBuffer, Device, DeviceInfo, DevicePolicy, GpuError, MemoryKind, Recorder,
    Uploader,
};
use unicorn::kernels::{
    Activations, AttentionBy, AttentionShape, Bias, DrawArrays, Embedding, Experts, GpuTiles, Heads, History,
    Item, Kernels, LOGPROB_WORDS, LayerKind, Logits, Matrices, Matrix, Partials, Quantized, Room, Run,
    SampleRequest, ShareArrays, Shares, StepArrays, SubgroupTile, Tiles, draw_words, mask_words, shaders,
};
use unicorn::tensor::{
    Bits, DType, KvDtype, Precision, QuantizedRow, Scales, Scheme, TILE_ROWS, pack_row, unpack_row,
};

use super::checkpoints::integers;
use super::reference::{self, BLOCK_COLS, QuantizedActivations};
use super::{device, policy, wants_all};

/// The heads that the kernels of a new bench are made for.
pub const HEADS: Heads = Heads { group: 2, head_dim: 64, kv: KvDtype::F32 };

/// Schemes that values are rounded to.
pub const SCHEMES: [Scheme; 7] = [
    Scheme::F32,
    Scheme::F16,
    Scheme::Bf16,
    Scheme::Int8Row,
    Scheme::Int { bits: Bits::Eight, group: 32, scales: Scales::Symmetric },
    Scheme::int4(32),
    Scheme::int4(128),
];

/// Integer schemes, as quantized checkpoints store them.
pub const STORED: [Scheme; 19] = {
    const fn int8(group: u32, scales: Scales) -> Scheme {
        Scheme::Int { bits: Bits::Eight, group, scales }
    }
    const fn int4(group: u32, scales: Scales) -> Scheme {
        Scheme::Int { bits: Bits::Four, group, scales }
    }
    [
        Scheme::Int8Row,
        int8(16, Scales::Symmetric),
        int8(32, Scales::Symmetric),
        int8(64, Scales::ZeroPoint),
        int8(48, Scales::Affine),
        int8(16, Scales::Super),
        int8(32, Scales::Super),
        int4(32, Scales::Symmetric),
        int4(128, Scales::Symmetric),
        int4(64, Scales::ZeroPoint),
        int4(128, Scales::ZeroPoint),
        int4(32, Scales::Affine),
        int4(32, Scales::Super),
        int4(32, Scales::HalfAffine),
        Scheme::Int { bits: Bits::Five, group: 32, scales: Scales::Symmetric },
        Scheme::Int { bits: Bits::Five, group: 32, scales: Scales::HalfAffine },
        Scheme::Int { bits: Bits::Five, group: 32, scales: Scales::Super },
        Scheme::Int { bits: Bits::Six, group: 16, scales: Scales::SuperSymmetric },
        Scheme::Int { bits: Bits::Five, group: 16, scales: Scales::Super },
    ]
};

/// A scheme of each way to read weights and to scale products.
pub const EACH_KIND: [Scheme; 4] = [STORED[0], STORED[5], STORED[7], STORED[17]];

/// The schemes of tests that compile large kernels for each of them: all in `make test-kernels`, otherwise one of each kind.
pub fn schemes_of_large_kernels() -> &'static [Scheme] {
    if wants_all("UNICORN_TEST_KERNELS") { &STORED } else { &EACH_KIND }
}

/// All `inputs` for the schemes of [`schemes_of_large_kernels`], and the first `few` of them for the others. What differs
/// between schemes is how a weight is read, which each input sees.
pub fn inputs_for<T>(scheme: Scheme, inputs: &[T], few: usize) -> &[T] {
    if schemes_of_large_kernels().contains(&scheme) { inputs } else { &inputs[..few] }
}

/// The kernel variants: every kernel has one for GPUs, and some have one for CPUs (`shaders/common/lanes.glsl`).
pub const BODIES: [Tiles; 2] = [Tiles::COUNTED, Tiles::Cpu];

/// Runs a check with the kernels for GPUs, and with those for CPUs.
pub fn with_each_body(seed: u64, check: fn(&mut Bench)) {
    for bodies in BODIES {
        println!("{bodies:?}");
        check(&mut Bench::with_bodies(&device(), seed, bodies));
    }
}

/// A device with the cooperative matrices that `tile` looks for. `None`: there is none.
pub fn device_with<T>(tile: fn(&DeviceInfo) -> Option<T>) -> Option<(Arc<Device>, T)> {
    // A validation layer without support for cooperative matrices hides them.
    let unvalidated = || Device::open(&DevicePolicy { validation: false, ..policy() }).unwrap();
    let device = if tile(device().info()).is_some() { device() } else { unvalidated() };
    let tile = tile(device.info())?;
    Some((device, tile))
}

/// Kernels for every scheme.
pub fn every_kernel(device: &Device, bodies: Tiles) -> Kernels {
    let products = [&SCHEMES[..], &STORED].concat();
    let (embeddings, head) = (vec![Scheme::Bf16], Some(Scheme::Bf16));
    let matrices = Matrices { products, embeddings, head, tiles: Some(bodies), ..Matrices::default() };
    Kernels::new(device, &matrices, &[HEADS], Precision::F32).unwrap()
}

/// A device with every kernel, and helpers to move data. Buffers start as NaN.
pub struct Bench {
    pub device: Arc<Device>,
    pub arena: Arena,
    pub kernels: Kernels,
    bodies: Tiles,
    layers: LayerKind,
    /// How attention is computed after [`Bench::make_heads`].
    pub attention: AttentionBy,
    pub rng: ChaCha8Rng,
}

impl Bench {
    pub fn new(seed: u64) -> Bench {
        println!("seed {seed}");
        Bench::on(&device(), seed)
    }

    pub fn on(device: &Arc<Device>, seed: u64) -> Bench {
        Bench::with_bodies(device, seed, Tiles::of(device))
    }

    /// A bench with the kernels for GPUs or for CPUs.
    pub fn with_bodies(device: &Arc<Device>, seed: u64, bodies: Tiles) -> Bench {
        let (arena, rng) = (Arena::new(device), ChaCha8Rng::seed_from_u64(seed));
        let kernels = every_kernel(device, bodies);
        let attention = AttentionBy::Lanes;
        Bench { arena, kernels, bodies, layers: LayerKind::default(), attention, rng, device: device.clone() }
    }

    /// Makes every kernel again for `bodies`. Later calls of [`Bench::make_heads`] use `bodies` too.
    pub fn make_bodies(&mut self, bodies: Tiles) {
        self.bodies = bodies;
        self.kernels = every_kernel(&self.device, bodies);
    }

    pub fn bodies(&self) -> Tiles {
        self.bodies
    }

    /// Makes the kernels of such layers. Later calls of [`Bench::make_heads`] make them too.
    pub fn make_layers(&mut self, layers: LayerKind) {
        self.layers = layers;
        let matrices = Matrices { layers, tiles: Some(self.bodies), ..Matrices::default() };
        self.kernels = Kernels::new(&self.device, &matrices, &[HEADS], Precision::F32).unwrap();
    }

    /// Makes the kernels for the heads of `shape`.
    pub fn make_heads(&mut self, shape: &AttentionShape, kv: KvDtype) {
        let heads = Heads { group: shape.num_heads / shape.num_kv_heads, head_dim: shape.head_dim, kv };
        let (tiles, attention) = (Some(self.bodies), Some(self.attention));
        let matrices = Matrices { layers: self.layers, tiles, attention, ..Matrices::default() };
        let precision = match self.attention {
            AttentionBy::Lanes => Precision::F32,
            AttentionBy::Subgroups(_) => Precision::Fast,
        };
        self.kernels = Kernels::new(&self.device, &matrices, &[heads], precision).unwrap();
        assert_eq!(self.kernels.attention_by(), self.attention);
    }

    /// Makes the kernels for matrices of `scheme` only: products, embeddings and gated pairs.
    pub fn make_scheme(&mut self, scheme: Scheme, precision: Precision) {
        self.make_tiles(scheme, precision, Tiles::of(&self.device), true);
    }

    /// Like [`Bench::make_scheme`], for given tiles. Without `gated` there are no gated pairs, which take as long to
    /// compile as the other kernels.
    pub fn make_tiles(&mut self, scheme: Scheme, precision: Precision, tiles: Tiles, gated: bool) {
        let gated = if gated { vec![scheme] } else { Vec::new() };
        let (embeddings, tiles) = (vec![scheme], Some(tiles));
        let (layers, head) = (self.layers, Some(scheme));
        let matrices = Matrices { layers, gated, embeddings, head, tiles, ..Matrices::default() };
        self.kernels = Kernels::new(&self.device, &matrices, &[HEADS], precision).unwrap();
    }

    /// Makes the kernels of layers with experts whose matrices have `scheme`, and of plain and gated products.
    pub fn make_experts(&mut self, experts: Experts, scheme: Scheme, precision: Precision, tiles: Tiles) {
        let layers = LayerKind { experts: Some(experts), ..self.layers };
        let all = vec![scheme];
        let matrices = Matrices {
            layers,
            products: all.clone(),
            gated: all.clone(),
            experts: all,
            tiles: Some(tiles),
            ..Matrices::default()
        };
        self.kernels = Kernels::new(&self.device, &matrices, &[HEADS], precision).unwrap();
    }

    pub fn random(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.rng.random_range(-scale..scale)).collect()
    }

    /// A buffer of `bytes` in which every word is a NaN.
    pub fn poisoned(&mut self, bytes: usize) -> Buffer {
        let buffer = self.arena.alloc(MemoryKind::Device, Class::Activations, bytes as u64, "test").unwrap();
        self.run(|_, r| r.fill(&buffer, 0x7fc0_dead));
        buffer
    }

    pub fn upload<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Buffer {
        let buffer = self.poisoned(size_of_val(data));
        let mut uploader = Uploader::<GpuError>::new(&self.device).unwrap();
        uploader.upload(&buffer, data).unwrap();
        uploader.finish().unwrap();
        buffer
    }

    pub fn readback(&mut self, bytes: u64) -> Buffer {
        self.arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "readback").unwrap()
    }

    pub fn embedding(&mut self, matrix: Matrix, scale: f32) -> Embedding {
        let mut uploader = Uploader::new(&self.device).unwrap();
        let embedding = Embedding::new(&mut self.arena, &mut uploader, matrix, scale).unwrap();
        uploader.finish().unwrap();
        embedding
    }

    pub fn download<T: bytemuck::Pod>(&mut self, buffer: &Buffer, count: usize) -> Vec<T> {
        let bytes = (count * size_of::<T>()) as u64;
        let host = self.readback(bytes);
        self.run(|_, r| r.copy(buffer, &host, bytes));
        let mut out = vec![T::zeroed(); count];
        host.read(0, &mut out);
        out
    }

    /// Rows of `width` with the stride of activations. The padding is NaN.
    pub fn activations(&mut self, rows: &[f32], width: usize) -> Activations {
        let stride = Activations::stride_of(width);
        let mut padded = vec![f32::NAN; rows.len() / width * stride];
        for (to, from) in padded.chunks_exact_mut(stride).zip(rows.chunks_exact(width)) {
            to[..width].copy_from_slice(from);
        }
        Activations::new(self.upload(&padded), width)
    }

    pub fn empty(&mut self, rows: usize, width: usize) -> Activations {
        Activations::new(self.poisoned(Activations::bytes(rows, width) as usize), width)
    }

    /// Room for the partial results that attention merges.
    pub fn partials(&mut self, shape: &AttentionShape, room: Room) -> Partials {
        let width = shape.partial_width();
        // Even if there are no partial results of a kind, its buffer has one row.
        Partials {
            single: self.empty(room.single.max(1), width),
            tiles: self.empty(room.tiles.max(1), width),
        }
    }

    pub fn shares(&mut self, shares: &Shares, num_kv_heads: usize) -> ShareArrays {
        let mut items = |items: &[Item]| (!items.is_empty()).then(|| self.upload(items));
        let (single, tiles) = (items(&shares.single), items(&shares.tiles));
        // Without tokens there is nothing to merge, but the buffer must not be empty.
        let merges = if shares.merges.is_empty() { &[[0; 2]][..] } else { &shares.merges };
        let (groups, merges) = (self.upload(&shares.groups(num_kv_heads)), self.upload(merges));
        ShareArrays { single, tiles, groups, merges }
    }

    /// Room for int8 activations.
    pub fn quantized(&mut self, rows: usize, width: usize) -> Quantized {
        Quantized::new(self.poisoned(Quantized::bytes(rows, width) as usize), width)
    }

    pub fn rows(&mut self, from: &Activations, rows: usize) -> Vec<f32> {
        let padded = self.download::<f32>(&from.buffer, rows * from.stride);
        padded.chunks_exact(from.stride).flat_map(|row| row[..from.width].to_vec()).collect()
    }

    pub fn matrix(&mut self, values: &[f32], rows: usize, cols: usize, scheme: Scheme, shard: u64) -> Matrix {
        let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape = [rows, cols];
        let encoding = Encoding::Plain { dtype: DType::F32, data: &data };
        self.matrix_of(
            &Tensor { name: "w", file: "test", shape: &shape, encoding, interleaved: None },
            scheme,
            shard,
        )
    }

    pub fn matrix_of(&mut self, tensor: &Tensor, scheme: Scheme, shard: u64) -> Matrix {
        let mut uploader = Uploader::new(&self.device).unwrap();
        let matrix =
            Matrix::upload(&mut self.arena, &mut uploader, tensor, scheme, Class::Ffn, shard, &mut |_| {})
                .unwrap();
        uploader.finish().unwrap();
        matrix
    }

    /// A matrix of random integers and scales.
    pub fn stored(&mut self, rows: usize, cols: usize, scheme: Scheme) -> Stored {
        let (least, most) = integers(scheme).unwrap();
        let [least, most] = [least, most].map(i32::from);
        let tiles = rows.div_ceil(TILE_ROWS);
        let mut stored = Stored {
            shape: [rows, cols],
            // The padding of rows and columns must not matter.
            blocks: vec![0x5a; tiles * scheme.tile_bytes(cols)],
            scales: vec![0; tiles * scheme.tile_scale_bytes(cols)],
            values: vec![0.0; rows * cols],
            scheme,
        };
        let mut row = QuantizedRow::new(scheme, cols);
        let rng = &mut self.rng;
        let mut half = |top: f32| f16::from_f32(rng.random_range(-top..top)).to_le_bytes();
        for index in 0..rows {
            let (block_bytes, scale_bytes) = (scheme.tile_bytes(cols), scheme.tile_scale_bytes(cols));
            row.scales.clear();
            let (group, scales) = scheme.grouping(cols).unwrap();
            let has_super = matches!(scales, Scales::Super | Scales::SuperSymmetric);
            for _ in 0..cols.div_ceil(if has_super { 256 } else { group }) {
                match scales {
                    Scales::Super => {
                        row.scales.extend([half(0.01), half(0.01)].concat());
                        row.scales.extend((0..2 * 256 / group).map(|_| half(1.0)[0]));
                    }
                    Scales::SuperSymmetric => {
                        row.scales.extend(half(0.01));
                        row.scales.extend((0..256 / group).map(|_| half(1.0)[0]));
                    }
                    Scales::Symmetric => row.scales.extend(half(0.1)),
                    Scales::ZeroPoint => row.scales.extend([half(0.1), half(16.0)].concat()),
                    Scales::HalfAffine => row.scales.extend([half(0.1), half(1.0)].concat()),
                    Scales::Affine => {
                        let float = |h: [u8; 2]| (f16::from_le_bytes(h).to_f32() * 1.001).to_le_bytes();
                        row.scales.extend([half(0.1), half(1.0)].map(float).concat());
                    }
                }
            }
            row.q = (0..cols).map(|_| (half(1.0)[0] as i32 * 7 % (most - least + 1) + least) as i8).collect();
            row.dequantize_into(scheme, &mut stored.values[index * cols..][..cols]);
            let (tile, lane) = (index / TILE_ROWS, index % TILE_ROWS);
            let blocks = &mut stored.blocks[tile * block_bytes..][..block_bytes];
            pack_row(scheme, &row, lane, blocks, &mut stored.scales[tile * scale_bytes..][..scale_bytes]);
        }
        stored
    }

    pub fn run(&self, record: impl FnOnce(&Kernels, &mut Recorder<'_>)) {
        let mut commands = CommandBuffer::new(&self.device, "test").unwrap();
        let mut recorder = commands.begin().unwrap();
        record(&self.kernels, &mut recorder);
        recorder.submit_alone("test").unwrap();
        commands.wait().unwrap();
    }
}

/// The activations that the device quantized. Checks that the stored sums are the sums of the integers.
pub fn download_blocks(b: &mut Bench, from: &Quantized, rows: usize) -> Vec<QuantizedActivations> {
    let blocks = from.width.div_ceil(BLOCK_COLS);
    let padded = from.buffer.size() as usize / blocks / 80;
    let bytes = b.download::<u8>(&from.buffer, from.buffer.size() as usize);
    let (ints, scales) = bytes.split_at(2 * 32 * blocks * padded);
    let row = |row: usize| {
        let mut got = QuantizedActivations { q: Default::default(), scales: Default::default() };
        for (digit, block) in
            [0, 1].into_iter().flat_map(|digit| (0..blocks).map(move |block| (digit, block)))
        {
            let at = (digit * blocks + block) * padded + row;
            let mut block: &[i8] = bytemuck::cast_slice(&ints[32 * at..][..32]);
            let record = &scales[8 * at..][..8];
            let scale = f32::from_le_bytes(record[..4].try_into().unwrap());
            if digit == 1 && scale == 0.0 {
                block = &[0; 32];
            }
            let sum = |at: usize| i32::from(i16::from_le_bytes([record[at], record[at + 1]]));
            let all = |q: &[i8]| q.iter().map(|q| i32::from(*q)).sum::<i32>();
            assert_eq!((sum(4), sum(6)), (all(&block[..16]), -8 * all(block)), "sums of row {row}");
            got.q[digit].extend(block);
            got.scales[digit].push(scale);
        }
        got
    };
    (0..rows).map(row).collect()
}

/// Panics unless each element of `got` is within `bound * magnitude` of `expected`. NaN is never within the bound.
pub fn close(got: &[f32], expected: &[f64], magnitude: &[f64], bound: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, ((g, e), m)) in got.iter().zip(expected).zip(magnitude).enumerate() {
        let difference = (f64::from(*g) - e).abs();
        assert!(difference <= bound * m.max(1e-6), "{what}: element {i}: {g} instead of {e}");
    }
}

/// A matrix as a native checkpoint stores it, and its values.
pub struct Stored {
    pub shape: [usize; 2],
    pub scheme: Scheme,
    pub blocks: Vec<u8>,
    pub scales: Vec<u8>,
    pub values: Vec<f32>,
}

impl Stored {
    pub fn rows(&self) -> Vec<QuantizedRow> {
        let [rows, cols] = self.shape;
        let (blocks, scales) = (self.scheme.tile_bytes(cols), self.scheme.tile_scale_bytes(cols));
        (0..rows)
            .map(|index| {
                let (tile, mut row) = (index / TILE_ROWS, QuantizedRow::new(self.scheme, cols));
                let (blocks, scales) =
                    (&self.blocks[tile * blocks..][..blocks], &self.scales[tile * scales..][..scales]);
                unpack_row(self.scheme, index % TILE_ROWS, blocks, scales, &mut row);
                row
            })
            .collect()
    }

    pub fn tensor(&self) -> Tensor<'_> {
        let (blocks, scales) = (self.blocks[..].into(), self.scales[..].into());
        let native = NativeTensor { scheme: self.scheme, blocks, scales };
        Tensor {
            name: "w",
            file: "test",
            shape: &self.shape,
            encoding: Encoding::Native(native),
            interleaved: None,
        }
    }
}

/// Which cache a row is in. Keys and values are stored in different orders (`shaders/common/kv.glsl`).
#[derive(Clone, Copy)]
pub enum Cached {
    Key,
    Value,
}

pub const CACHED: [Cached; 2] = [Cached::Key, Cached::Value];

/// A row of a cache: sequence, position, KV head.
pub type Place = (usize, usize, usize);

/// A random paged batch: sequences of different lengths, blocks in random order, and the new tokens at the ends.
pub struct Paged {
    pub shape: AttentionShape,
    /// For each sequence, its length and the number of its last tokens that are in the batch.
    pub sequences: Vec<(usize, usize)>,
    pub tables: Vec<Vec<u32>>,
    pub num_blocks: usize,
    /// Images: their sequence, and the positions of their tokens.
    pub images: Vec<(usize, Range<usize>)>,
}

impl Paged {
    pub fn new(b: &mut Bench, shape: AttentionShape, sequences: &[(usize, usize)]) -> Paged {
        let num_blocks = sequences.iter().map(|(len, _)| len.div_ceil(shape.block_size)).sum::<usize>() + 3;
        let mut free: Vec<u32> = (0..num_blocks as u32).collect();
        let tables = sequences
            .iter()
            .map(|(len, _)| {
                (0..len.div_ceil(shape.block_size))
                    .map(|_| free.swap_remove(b.rng.random_range(0..free.len())))
                    .collect()
            })
            .collect();
        Paged { shape, sequences: sequences.to_vec(), tables, num_blocks, images: Vec::new() }
    }

    /// The sequence and position of every token in the batch.
    pub fn tokens(&self) -> Vec<(usize, usize)> {
        let each = self.sequences.iter().enumerate();
        each.flat_map(|(s, &(len, new))| (len - new..len).map(move |p| (s, p))).collect()
    }

    pub fn slot(&self, sequence: usize, position: usize) -> u32 {
        let block = self.tables[sequence][position / self.shape.block_size];
        block * self.shape.block_size as u32 + (position % self.shape.block_size) as u32
    }

    /// The bytes of a cache before any write: every word is a NaN.
    pub fn empty_cache(&self, kv: KvDtype) -> Vec<u8> {
        let bytes = self.num_blocks * self.block_bytes(kv);
        0x7fc0_deadu32.to_le_bytes().into_iter().cycle().take(bytes).collect()
    }

    fn block_bytes(&self, kv: KvDtype) -> usize {
        kv.block_bytes(self.shape.block_size * self.shape.num_kv_heads, self.shape.head_dim)
    }

    /// The byte ranges in the cache of the elements of a KV head's key or value for a position, and of its scale.
    /// Without a scale, that range is empty.
    fn ranges(
        &self,
        kv: KvDtype,
        part: Cached,
        (sequence, position, head): Place,
    ) -> (Vec<Range<usize>>, Range<usize>) {
        let (s, d) = (&self.shape, self.shape.head_dim);
        let slot = self.slot(sequence, position) as usize;
        let (start, token) = (slot / s.block_size * self.block_bytes(kv), slot % s.block_size);
        let unit = kv.key_unit(d);
        let element = |i: usize| match part {
            Cached::Key => ((head * d / unit + i / unit) * s.block_size + token) * unit + i % unit,
            Cached::Value => (head * s.block_size + token) * d + i,
        };
        let size = kv.element_bytes();
        let elements = (0..d).map(|i| start + element(i) * size..start + (element(i) + 1) * size);
        let scale = start + (s.num_kv_heads * d + 4 * head) * s.block_size + 4 * token;
        (elements.collect(), scale..if kv == KvDtype::Int8 { scale + 4 } else { scale })
    }

    /// Writes a key or a value into the bytes of a cache of this type. Returns the values as the cache represents them.
    pub fn file_away(
        &self,
        cache: &mut [u8],
        kv: KvDtype,
        part: Cached,
        place: Place,
        values: &[f32],
    ) -> Vec<f32> {
        let (elements, scale) = self.ranges(kv, part, place);
        let bytes: Vec<u8> = match kv {
            KvDtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            KvDtype::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            KvDtype::Int8 => {
                let (s, q) = reference::kv_int8(values);
                cache[scale].copy_from_slice(&s.to_le_bytes());
                q.into_iter().map(|q| q as u8).collect()
            }
        };
        let size = bytes.len() / elements.len();
        for (element, bytes) in elements.into_iter().zip(bytes.chunks_exact(size)) {
            cache[element].copy_from_slice(bytes);
        }
        self.read(cache, kv, part, place)
    }

    pub fn read(&self, cache: &[u8], kv: KvDtype, part: Cached, place: Place) -> Vec<f32> {
        let (elements, scale) = self.ranges(kv, part, place);
        let scale = (kv == KvDtype::Int8).then(|| bytemuck::pod_read_unaligned::<f32>(&cache[scale]));
        let value = |element: Range<usize>| match (kv, &cache[element]) {
            (KvDtype::F32, bytes) => bytemuck::pod_read_unaligned(bytes),
            (KvDtype::F16, bytes) => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            (KvDtype::Int8, bytes) => f32::from(bytes[0] as i8) * scale.expect("int8 has scales"),
        };
        elements.into_iter().map(value).collect()
    }

    /// Reads a key or a value from a cache, and fills it with NaN.
    pub fn take(&self, cache: &mut [u8], kv: KvDtype, part: Cached, place: Place) -> Vec<f32> {
        let values = self.read(cache, kv, part, place);
        let (elements, scale) = self.ranges(kv, part, place);
        for at in elements.into_iter().chain([scale]).flatten() {
            cache[at] = 0x7fc0_deadu32.to_le_bytes()[at % 4];
        }
        values
    }

    /// As much room as a step has.
    pub fn room(&self) -> Room {
        let tokens = self.tokens().len();
        Room { single: tokens + 64, tiles: tokens + 64 }
    }

    /// The last position that a token sees.
    pub fn last_seen(&self, sequence: usize, position: usize) -> usize {
        let image =
            |(of, positions): &&(usize, Range<usize>)| *of == sequence && positions.contains(&position);
        self.images.iter().find(image).map_or(position, |(_, positions)| positions.end - 1)
    }

    pub fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (row, (sequence, start)) in self.tokens().into_iter().enumerate() {
            let last = self.last_seen(sequence, start);
            let is_image = self.images.iter().any(|(of, at)| *of == sequence && at.contains(&start));
            let sees_to = is_image.then_some(last);
            match runs.last_mut() {
                Some(run) if run.sequence == sequence && run.sees_to == sees_to => run.tokens += 1,
                _ => runs.push(Run { row, start, tokens: 1, sequence, sees_to }),
            }
        }
        runs
    }

    pub fn arrays(&self, b: &mut Bench) -> StepArrays {
        let tokens = self.tokens();
        let shares = Shares::new(&self.shape, &self.runs(), tokens.len(), tokens.len(), self.room());
        let positions: Vec<u32> = tokens.iter().map(|t| t.1 as u32).collect();
        let sequence_of: Vec<u32> = tokens.iter().map(|t| t.0 as u32).collect();
        let slots: Vec<u32> = tokens.iter().map(|t| self.slot(t.0, t.1)).collect();
        // Entries after a sequence's last block are invalid block numbers.
        let mut tables = vec![u32::MAX / 2; self.sequences.len() * self.shape.max_blocks];
        for (to, from) in tables.chunks_exact_mut(self.shape.max_blocks).zip(&self.tables) {
            to[..from.len()].copy_from_slice(from);
        }
        StepArrays {
            ids: b.upload(&positions),
            positions: b.upload(&positions),
            sequence_of: b.upload(&sequence_of),
            slot_mapping: b.upload(&slots),
            block_tables: b.upload(&tables),
            shares: b.shares(&shares, self.shape.num_kv_heads),
        }
    }
}

/// The shape of an attention with at most 24 blocks for each sequence.
pub fn shape(
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    window: Option<usize>,
) -> AttentionShape {
    AttentionShape { num_heads: heads, num_kv_heads: kv_heads, head_dim, block_size, max_blocks: 24, window }
}

/// Rows of logits to sample from, and the inputs of the sampler. Histories, biases and masks are not set.
pub struct Drawing {
    pub requests: Vec<SampleRequest>,
    /// `adjusted` is 0 within the rows and NaN between them. The padding must not be read and must not change.
    pub logits: Logits,
    pub arrays: DrawArrays,
    pub history: History,
    pub slots: Buffer,
}

impl Drawing {
    pub fn new(b: &mut Bench, logits: &[f32], width: usize, requests: &[SampleRequest]) -> Drawing {
        let zeros = vec![0f32; logits.len()];
        Drawing {
            requests: requests.to_vec(),
            logits: Logits {
                raw: b.activations(logits, width),
                adjusted: b.activations(&zeros, width),
                scratch: b.empty(requests.len(), draw_words(width)),
                vocab: width,
            },
            arrays: DrawArrays {
                requests: b.upload(requests),
                bias: b.poisoned(8),
                masks: b.poisoned(4),
                ids: b.poisoned(4 * requests.len()),
                logprobs: b.poisoned(4 * LOGPROB_WORDS * requests.len()),
            },
            history: History { ids: b.poisoned(4), slot_len: 1 },
            slots: b.poisoned(4 * 64),
        }
    }

    pub fn adjust(&self, b: &Bench) {
        let Drawing { requests, logits, arrays, history, .. } = self;
        b.run(|k, r| k.adjust(r, logits, arrays, history, requests));
    }

    pub fn clear(&self, b: &Bench) {
        let Drawing { requests, logits, arrays, history, .. } = self;
        b.run(|k, r| k.clear_adjusted(r, logits, arrays, history, requests));
    }

    pub fn sample(&self, b: &Bench) {
        let Drawing { requests, logits, arrays, slots, .. } = self;
        b.run(|k, r| k.sample(r, logits, arrays, slots, requests));
    }

    pub fn run(&self, b: &Bench) {
        self.adjust(b);
        self.sample(b);
        self.clear(b);
    }
}

/// Random logits with requests that differ in all parameters, and the adjusted logits that the CPU reference expects.
pub struct Adjusted {
    pub drawing: Drawing,
    pub width: usize,
    /// The logits after penalties, biases and masks.
    pub expected: Vec<Vec<f32>>,
    pub raw: Vec<f32>,
}

/// Makes `rows` rows of `width` logits, as [`Adjusted`] describes.
pub fn adjusted(b: &mut Bench, width: usize, rows: usize) -> Adjusted {
    let (slots, slot_len) = (5, 700);
    let mut raw = b.random(rows * width, 8.0);
    raw[width / 2] = 0.0;
    let words = mask_words(width);
    let history: Vec<u32> = (0..slots * slot_len).map(|_| b.rng.random_range(0..width as u32)).collect();
    let (mut requests, mut bias, mut masks, mut expected) = (vec![], vec![], vec![], vec![]);
    for row in 0..rows {
        // In turn: nothing, penalties, biases, both, a mask, and all.
        let (penalizes, biased, masked) = (row % 6 % 2 == 1, [2, 3, 5].contains(&(row % 6)), row % 6 > 3);
        let len = if penalizes { b.rng.random_range(1..=slot_len) } else { 0 };
        let request = SampleRequest {
            temperature: if row % 4 == 0 { 0.0 } else { 1.1 },
            top_p: 0.95,
            seed_low: b.rng.random(),
            position: len as u32,
            slot: row as u32,
            repetition_penalty: b.rng.random_range(0.5..2.0),
            presence_penalty: b.rng.random_range(-2.0..2.0),
            frequency_penalty: b.rng.random_range(-0.5..0.5),
            history_slot: b.rng.random_range(0..slots as u32),
            history_len: len as u32,
            prompt_len: b.rng.random_range(0..=len as u32 + 3),
            first_bias: bias.len() as u32,
            biases: if biased { b.rng.random_range(1..=width.min(300) as u32) } else { 0 },
            mask: if masked { masks.len() as u32 / words as u32 + 1 } else { 0 },
            ..SampleRequest::default()
        };
        let first = b.rng.random_range(0..width as u32);
        let pairs: Vec<(u32, f32)> = (0..request.biases)
            .map(|i| {
                let forbidden = i % 7 == 3;
                let bias = if forbidden { f32::NEG_INFINITY } else { b.rng.random_range(-9.0..9.0) };
                ((first + i) % width as u32, bias)
            })
            .collect();
        bias.extend(pairs.iter().map(|&(id, bias)| Bias { id, bias }));
        // At least one id is allowed.
        let allowed: Vec<bool> = (0..width).map(|i| i as u32 == first || b.rng.random_ratio(1, 3)).collect();
        if masked {
            masks.extend(allowed.chunks(32).map(|bits| {
                bits.iter().enumerate().fold(0u32, |word, (i, bit)| word | u32::from(*bit) << i)
            }));
        }
        let ids = &history[request.history_slot as usize * slot_len..][..len];
        let (prompt, answer) = ids.split_at(len.min(request.prompt_len as usize));
        let penalties = reference::Penalties {
            repetition: request.repetition_penalty,
            presence: request.presence_penalty,
            frequency: request.frequency_penalty,
        };
        let logits = &raw[row * width..][..width];
        let mask = masked.then_some(&allowed[..]);
        expected.push(reference::adjusted(logits, prompt, answer, &penalties, &pairs, mask));
        requests.push(request);
    }
    let mut drawing = Drawing::new(b, &raw, width, &requests);
    drawing.arrays.bias = b.upload(&bias);
    drawing.arrays.masks = b.upload(&masks);
    drawing.history = History { ids: b.upload(&history), slot_len };
    Adjusted { drawing, width, expected, raw }
}

/// Tiles that subgroups multiply, emulated element by element. In turn, the shapes of RDNA, of lavapipe, and of GPUs
/// that multiply a whole block, so that each way to scale is tested.
pub fn emulated_tiles(scheme: usize) -> Tiles {
    let shapes = [[16, 16, 16], [16, 8, 32], [8, 8, 8]];
    multiplied_by(SubgroupTile::emulated(shapes[scheme % 3]).unwrap())
}

/// GPU tiles whose products subgroups multiply in `tile`.
pub fn multiplied_by(tile: SubgroupTile) -> Tiles {
    Tiles::Gpu(GpuTiles::multiplied_by(tile))
}

/// A fused multiply-add, as a driver computes it.
pub type Fma = fn(f32, f32, f32) -> f32;

fn rounded_twice(a: f32, b: f32, c: f32) -> f32 {
    a * b + c
}

/// How the device's driver computes an fma. Some drivers multiply, round, and then add.
pub fn fma_of(b: &mut Bench) -> Fma {
    let (factor, summand) = (1.0 + 2f32.powi(-13), 1.0 / 3.0);
    let result = b.poisoned(4 * 256);
    let pipeline = b.device.pipeline(&shaders::PEAK, &[]).unwrap();
    b.run(|_, r| {
        let arguments = shaders::Peak { result: &result, rounds: 1, a: factor, b: summand };
        r.dispatch(&pipeline, &arguments, [1, 1, 1]);
    });
    let got = b.download::<f32>(&result, 256);
    let expected = |fma: Fma| -> Vec<f32> {
        let chain = |start: f32| (0..4).fold(start, |x, _| fma(x, factor, summand));
        let sum = |i: usize| (0..8).fold(0f32, |sum, c| sum + chain(i as f32 + c as f32));
        (0..256).map(sum).map(|s| s + s + s + s).collect()
    };
    let modes: [(&str, Fma); 2] = [("fused", f32::mul_add), ("multiplied, then added", rounded_twice)];
    let (name, fma) =
        modes.into_iter().find(|(_, fma)| expected(*fma) == got).expect("an fma rounds once or twice");
    println!("fma: {name}");
    fma
}
