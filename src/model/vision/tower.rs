//! A tower on the device: its memory, its load, and the computation of an image.
//!
//! The patches of an image are rows, as tokens are in the language model. Attention over all of them uses the kernels of
//! the language model: the patches are the tokens of one image in a KV cache of their own. All work of an image but the
//! last part is recorded once, because every image has the same size.

use std::ops::Range;
use std::sync::Arc;

use super::spec::{VisionLayer, VisionSpec, VisionTensors};
use crate::checkpoint::{Encoding, Tensor};
use crate::gpu::placement::{Class, MemoryKind, Request};
use crate::gpu::{
    Arena, Buffer, CommandBuffer, Device, GpuError, INDIRECT_BYTES, Recorder, Submission, Uploader,
};
use crate::kernels::{
    Activations, Attention, AttentionShape, Heads, Item, Kernels, KvCache, LayerKind, LayerNorm, Matrices,
    Matrix, Operand, PartItems, Partials, Quantized, RmsNorm, Room, Run, ShareArrays, Shares, StepArrays,
    Tiles, UploadError, VisionKernels, partial_width,
};
use crate::model::{ImageBudget, ImageLimits, ImageSizes};
use crate::quantize::{Rounding, pack_tiles};
use crate::tensor::{DType, KvDtype, Precision, Scheme, TILE_ROWS};

/// Tokens per KV block of the tower.
const BLOCK_SIZE: usize = 64;
/// Parts of a layer's attention, each of which is submitted separately: a part takes no longer than a layer's other products.
const ATTENTION_PARTS: usize = 4;
/// The least number of slots for the embeddings of images. A conversation with so many images keeps them.
const LEAST_SLOTS: usize = 8;

/// What determines the memory of a tower.
#[derive(Debug, Clone, Copy)]
pub struct TowerRequest<'a> {
    pub spec: &'a VisionSpec,
    /// The scheme of all matrices on the device.
    pub scheme: Scheme,
    pub precision: Precision,
    pub budget: ImageBudget,
}

impl TowerRequest<'_> {
    /// The scheme of a tower's matrices: int8 for int8 activations. Otherwise bf16, if `is_bf16` says that the checkpoint's
    /// matrices are, or f32.
    pub fn scheme_of(precision: Precision, is_bf16: bool) -> Scheme {
        match (precision, is_bf16) {
            (Precision::Fast, _) => Scheme::Int8Row,
            (_, true) => Scheme::Bf16,
            (_, false) => Scheme::F32,
        }
    }

    /// How a model with this tower takes images, if a step has room for `max_batch_tokens` tokens.
    pub fn limits(&self, max_batch_tokens: usize) -> ImageLimits {
        let tokens = self.spec.tokens();
        let slots = LEAST_SLOTS.max(max_batch_tokens.div_ceil(tokens) + 1);
        let sizes = ImageSizes::Fixed { side: self.spec.image_size };
        ImageLimits { sizes, tokens, usual_tokens: tokens, slots }
    }

    fn kv(&self) -> KvDtype {
        if self.precision == Precision::Fast { KvDtype::F16 } else { KvDtype::F32 }
    }

    /// The dimension of a head on the device. Subgroups multiply heads of whole tiles, so zeros are appended: they change
    /// no score and no value.
    fn head_dim(&self) -> usize {
        let dim = self.spec.head_dim;
        if self.precision == Precision::Fast { dim.next_multiple_of(16) } else { dim }
    }

    fn heads_width(&self) -> usize {
        self.spec.num_attention_heads * self.head_dim()
    }

    fn heads(&self) -> Heads {
        Heads { group: 1, head_dim: self.head_dim(), kv: self.kv() }
    }

    fn shape(&self) -> AttentionShape {
        let num_heads = self.spec.num_attention_heads;
        AttentionShape {
            num_heads,
            num_kv_heads: num_heads,
            head_dim: self.head_dim(),
            block_size: BLOCK_SIZE,
            max_blocks: self.blocks(),
            window: None,
        }
    }

    fn blocks(&self) -> usize {
        self.spec.patches().div_ceil(BLOCK_SIZE)
    }

    /// How attention is shared out: every patch sees all of them.
    fn shares(&self) -> Shares {
        let patches = self.spec.patches();
        let run = Run { row: 0, start: 0, tokens: patches, sequence: 0, sees_to: Some(patches - 1) };
        Shares::in_parts(&self.shape(), &[run], &self.parts(), Room { single: 0, tiles: patches })
    }

    /// The patches of each part of attention.
    fn parts(&self) -> Vec<Range<usize>> {
        let patches = self.spec.patches();
        let rows = patches.div_ceil(ATTENTION_PARTS);
        (0..patches).step_by(rows).map(|first| first..(first + rows).min(patches)).collect()
    }

    /// `[rows, columns]` of the matrices: of the patches, of a layer (queries, keys, values, output and the two of the
    /// network), and of the projection.
    fn matrix_sizes(&self) -> ([usize; 2], [[usize; 2]; 6], [usize; 2]) {
        let VisionSpec { hidden_size: hidden, intermediate_size: ffn, text_hidden_size: text, .. } =
            *self.spec;
        let heads = self.heads_width();
        let projected = [heads, hidden];
        let of_layer = [projected, projected, projected, [hidden, heads], [ffn, hidden], [hidden, ffn]];
        ([hidden, self.spec.patch_elements()], of_layer, [text, hidden])
    }

    /// Every buffer, in the order in which the load requests them.
    pub fn requests(&self, max_batch_tokens: usize) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut add = |class, kind, bytes: u64, name: &str| {
            requests.push(Request { class, kind, bytes, name: format!("vision: {name}") });
        };
        let VisionSpec { hidden_size: hidden, intermediate_size: ffn, text_hidden_size: text, .. } =
            *self.spec;
        let (patches, tokens, heads) = (self.spec.patches(), self.spec.tokens(), self.heads_width());
        let (of_patches, of_layer, of_projection) = self.matrix_sizes();
        let mut weights = |matrices: &[[usize; 2]], vectors: &[usize], name: &str| {
            for [rows, cols] in matrices {
                for (blocks, scales) in Matrix::buffer_bytes(self.scheme, *rows, *cols, u64::MAX) {
                    add(Class::Vision, MemoryKind::Device, blocks, name);
                    scales.into_iter().for_each(|bytes| add(Class::Vision, MemoryKind::Device, bytes, name));
                }
            }
            for elements in vectors {
                add(Class::Vision, MemoryKind::Device, 4 * *elements as u64, name);
            }
        };
        let positions = Activations::bytes(patches, hidden) as usize / 4;
        weights(&[of_patches], &[hidden, positions], "patches");
        for _ in 0..self.spec.num_hidden_layers {
            // The biases of queries, keys and values; of the output; both norms; the biases of the network.
            let vectors = [heads, heads, heads, hidden, hidden, hidden, hidden, hidden, ffn, hidden];
            weights(&of_layer, &vectors, "layer");
        }
        weights(&[of_projection], &[hidden, hidden, hidden], "projection");

        let slots = self.limits(max_batch_tokens).slots;
        let kv = self.kv().block_bytes(BLOCK_SIZE * self.spec.num_attention_heads, self.head_dim()) as u64;
        let shares = self.shares();
        let partial = partial_width(self.spec.num_attention_heads, self.head_dim());
        let (floats, blocks) = (Activations::bytes, Quantized::bytes);
        for (bytes, name) in [
            (floats(patches, self.spec.patch_elements()), "patches"),
            (blocks(patches, self.spec.patch_elements()), "patches (int8)"),
            (floats(patches, hidden), "hidden"),
            (floats(patches, hidden), "normed"),
            (blocks(patches, hidden), "normed (int8)"),
            (floats(patches, hidden), "delta"),
            (floats(patches, heads), "q"),
            (floats(patches, heads), "k"),
            (floats(patches, heads), "v"),
            (floats(patches, heads), "attended"),
            (blocks(patches, heads), "attended (int8)"),
            (floats(patches, ffn), "network"),
            (blocks(patches, ffn), "network (int8)"),
            (floats(tokens, hidden), "pooled"),
            (floats(tokens, hidden), "normed pooled"),
            (blocks(tokens, hidden), "normed pooled (int8)"),
            (floats(patches, partial), "partials"),
            (self.blocks() as u64 * kv, "keys"),
            (self.blocks() as u64 * kv, "values"),
            // One row of cosines and sines: no patch is rotated.
            (4 * self.head_dim() as u64, "rope table"),
            (4 * patches as u64, "positions"),
            (4 * patches as u64, "slots of patches"),
            (4 * self.blocks() as u64, "block table"),
            ((shares.tiles.len() * size_of::<Item>()) as u64, "items"),
            (2 * INDIRECT_BYTES * (1 + shares.parts.len() as u64), "workgroups"),
            (8 * patches as u64, "merges"),
            (floats(slots * tokens, text), "embeddings"),
        ] {
            add(Class::Activations, MemoryKind::Device, bytes, name);
        }
        let pixels = (3 * self.spec.image_size.pow(2)).next_multiple_of(4) as u64;
        add(Class::Staging, MemoryKind::Upload, pixels, "pixels");
        requests
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        let all = self.requests(1);
        all.iter().filter(|request| request.class == Class::Vision).map(|request| request.bytes).sum()
    }
}

/// One layer of a tower on the device.
struct DeviceLayer {
    norms: [LayerNorm; 2],
    qkv: [Matrix; 3],
    attention: Attention,
    out: (Matrix, Buffer),
    fc1: (Matrix, Buffer),
    fc2: (Matrix, Buffer),
}

/// Activations of one image.
struct Scratch {
    patches: Activations,
    patch_blocks: Quantized,
    hidden: Activations,
    normed: Activations,
    normed_blocks: Quantized,
    delta: Activations,
    qkv: [Activations; 3],
    attended: Activations,
    attended_blocks: Quantized,
    network: Activations,
    network_blocks: Quantized,
    pooled: Activations,
    pooled_normed: Activations,
    pooled_blocks: Quantized,
    partials: Partials,
}

/// A tower on the device, with slots for the embeddings of images.
pub struct Tower {
    spec: VisionSpec,
    kernels: Kernels,
    own_kernels: VisionKernels,
    patch_embedding: (Matrix, Buffer),
    positions: Buffer,
    layers: Vec<DeviceLayer>,
    post_layernorm: LayerNorm,
    soft_emb_norm: RmsNorm,
    projection: Matrix,
    scratch: Scratch,
    step: StepArrays,
    /// The parts of attention.
    parts: Vec<PartItems>,
    pixels: Buffer,
    /// `[slots * tokens, text_hidden_size]`
    embeddings: Activations,
    slots: usize,
    /// The opening and the layers, each recorded once, and the closing, which is recorded for each image.
    recorded: Vec<CommandBuffer>,
    /// `None` only while it is recorded.
    closing: Option<CommandBuffer>,
    submissions: Vec<Submission>,
}

/// What a load of a tower needs besides its weights.
pub(in crate::model) struct TowerLoad<'a, 'b> {
    pub device: &'a Arc<Device>,
    pub request: TowerRequest<'a>,
    pub max_batch_tokens: usize,
    pub arena: &'a mut Arena,
    pub uploader: &'a mut Uploader<'b, UploadError>,
    /// How the language model divides its products.
    pub tiles: Tiles,
    /// As [`crate::checkpoint::Checkpoint::norms_hold_one`]. It is about the norm before the projection only.
    pub norms_hold_one: bool,
}

impl TowerLoad<'_, '_> {
    /// Loads a tower. `read` returns the values of a tensor.
    pub fn run<E: From<UploadError> + From<GpuError>>(
        self,
        tensors: VisionTensors<Tensor<'_>>,
        read: &mut dyn FnMut(&Tensor<'_>) -> Result<Vec<f32>, E>,
    ) -> Result<Tower, E> {
        let TowerLoad { device, request, max_batch_tokens, arena, uploader, tiles, norms_hold_one } = self;
        let spec = request.spec;
        let buffers = request
            .requests(max_batch_tokens)
            .into_iter()
            .map(|one| arena.alloc(one.kind, one.class, one.bytes, &one.name));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let mut load = Filling { request, buffers: buffers.into_iter(), uploader };
        let (hidden, ffn, heads) = (spec.hidden_size, spec.intermediate_size, request.heads_width());
        let (patches, tokens) = (spec.patches(), spec.tokens());
        let layer_kind = LayerKind {
            activation: spec.hidden_act,
            has_post_norms: false,
            has_qk_norms: false,
            has_biases: true,
            ..LayerKind::default()
        };
        let matrices = Matrices {
            layers: layer_kind,
            products: vec![request.scheme],
            tiles: Some(tiles),
            ..Matrices::default()
        };
        let kernels = Kernels::new(device, &matrices, &[request.heads()], request.precision)?;
        let own_kernels = VisionKernels::new(device, kernels.tiles(), spec.hidden_act)?;

        let (of_patches, of_layer, of_projection) = request.matrix_sizes();
        let VisionTensors {
            patch_embedding,
            position_embedding,
            layers,
            post_layernorm,
            soft_emb_norm,
            projection,
        } = tensors;
        let matrix = load.matrix(of_patches, read(&patch_embedding.weight)?)?;
        let patch_embedding = (matrix, load.vector(&read(&patch_embedding.bias)?)?);
        let stride = Activations::stride_of(hidden);
        let mut rows = vec![0.0; patches * stride];
        for (to, from) in rows.chunks_exact_mut(stride).zip(read(&position_embedding)?.chunks_exact(hidden)) {
            to[..hidden].copy_from_slice(from);
        }
        let positions = load.vector(&rows)?;
        let mut unfinished = Vec::new();
        for layer in layers {
            let VisionLayer { layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2 } = layer;
            let mut values = |tensor: &Tensor<'_>| read(tensor);
            // Matrices come first, then vectors: the order of the requests.
            let [q, k, v] = [&q_proj, &k_proj, &v_proj].map(|proj| values(&proj.weight));
            let qkv = [
                load.matrix(of_layer[0], request.padded_rows(q?, hidden))?,
                load.matrix(of_layer[1], request.padded_rows(k?, hidden))?,
                load.matrix(of_layer[2], request.padded_rows(v?, hidden))?,
            ];
            let out = load.matrix(of_layer[3], request.padded_columns(values(&out_proj.weight)?))?;
            let first = load.matrix(of_layer[4], values(&fc1.weight)?)?;
            let second = load.matrix(of_layer[5], values(&fc2.weight)?)?;
            let mut biases = Vec::new();
            for proj in [&q_proj, &k_proj, &v_proj] {
                biases.push(load.vector(&request.padded_rows(values(&proj.bias)?, 1))?);
            }
            let out = (out, load.vector(&values(&out_proj.bias)?)?);
            let norm = |load: &mut Filling<'_, '_, '_>, weight: Vec<f32>, bias: Vec<f32>| {
                let (weight, bias) = (load.vector(&weight)?, load.vector(&bias)?);
                Ok::<_, UploadError>(LayerNorm { weight, bias, eps: spec.norm_eps })
            };
            let norms = [
                norm(&mut load, values(&layer_norm1.weight)?, values(&layer_norm1.bias)?)?,
                norm(&mut load, values(&layer_norm2.weight)?, values(&layer_norm2.bias)?)?,
            ];
            let fc1 = (first, load.vector(&values(&fc1.bias)?)?);
            let fc2 = (second, load.vector(&values(&fc2.bias)?)?);
            let biases: [Buffer; 3] = biases.try_into().unwrap_or_else(|_| unreachable!("three biases"));
            unfinished.push((norms, qkv, biases, out, fc1, fc2));
        }
        // Stored as a matrix that multiplies rows from the right.
        let projection = load.matrix(of_projection, transposed(&read(&projection)?, hidden))?;
        let post_layernorm = LayerNorm {
            weight: load.vector(&read(&post_layernorm.weight)?)?,
            bias: load.vector(&read(&post_layernorm.bias)?)?,
            eps: spec.norm_eps,
        };
        let added = if norms_hold_one { 0.0 } else { 1.0 };
        let soft: Vec<f32> = read(&soft_emb_norm)?.into_iter().map(|w| added + w).collect();
        let soft_emb_norm = RmsNorm { weight: load.vector(&soft)?, eps: spec.norm_eps };

        let elements = spec.patch_elements();
        let floats = |load: &mut Filling<'_, '_, '_>, width| Activations::new(load.next(), width);
        let blocks = |load: &mut Filling<'_, '_, '_>, width| Quantized::new(load.next(), width);
        let (patch_rows, patch_blocks) = (floats(&mut load, elements), blocks(&mut load, elements));
        let (residual, normed) = (floats(&mut load, hidden), floats(&mut load, hidden));
        let normed_blocks = blocks(&mut load, hidden);
        let delta = floats(&mut load, hidden);
        let qkv = [0; 3].map(|_| floats(&mut load, heads));
        let (attended, attended_blocks) = (floats(&mut load, heads), blocks(&mut load, heads));
        let (network, network_blocks) = (floats(&mut load, ffn), blocks(&mut load, ffn));
        let (pooled, pooled_normed) = (floats(&mut load, hidden), floats(&mut load, hidden));
        let pooled_blocks = blocks(&mut load, hidden);
        let shape = request.shape();
        let partials = floats(&mut load, shape.partial_width());
        let cache = KvCache { keys: load.next(), values: load.next() };
        let rope: Vec<f32> = [1.0, 0.0].into_iter().cycle().take(request.head_dim()).collect();
        let rope = load.vector(&rope)?;
        let shares = request.shares();
        let all = |n: usize| (0..n as u32).collect::<Vec<u32>>();
        let positions_of_patches = load.words(&vec![0u32; patches])?;
        let step = StepArrays {
            ids: positions_of_patches.clone(),
            positions: positions_of_patches.clone(),
            sequence_of: positions_of_patches,
            slot_mapping: load.words(&all(patches))?,
            block_tables: load.words(&all(request.blocks()))?,
            shares: ShareArrays {
                single: None,
                tiles: Some(load.words(&shares.tiles)?),
                groups: load.words(&shares.groups(shape.num_kv_heads))?,
                merges: load.words(&shares.merges)?,
            },
        };
        let embeddings = floats(&mut load, spec.text_hidden_size);
        let pixels = load.next();
        assert!(load.buffers.next().is_none(), "a buffer of the tower that nothing uses");

        let layers = unfinished.into_iter().map(|(norms, qkv, biases, out, fc1, fc2)| DeviceLayer {
            norms,
            qkv,
            attention: Attention {
                shape,
                qk_norms: None,
                norm_eps: spec.norm_eps,
                biases: Some(biases),
                rope: rope.clone(),
                q_scale: (spec.head_dim as f64).powf(-0.5) as f32,
                cache: cache.clone(),
            },
            out,
            fc1,
            fc2,
        });
        let mut tower = Tower {
            spec: spec.clone(),
            kernels,
            own_kernels,
            patch_embedding,
            positions,
            layers: layers.collect(),
            post_layernorm,
            soft_emb_norm,
            projection,
            scratch: Scratch {
                patches: patch_rows,
                patch_blocks,
                hidden: residual,
                normed,
                normed_blocks,
                delta,
                qkv,
                attended,
                attended_blocks,
                network,
                network_blocks,
                pooled,
                pooled_normed,
                pooled_blocks,
                partials: Partials { single: partials.clone(), tiles: partials },
            },
            step,
            parts: shares.parts,
            pixels,
            embeddings,
            slots: request.limits(max_batch_tokens).slots,
            recorded: Vec::new(),
            closing: Some(CommandBuffer::new(device, "vision: projection")?),
            submissions: Vec::new(),
        };
        debug_assert_eq!(tokens, spec.tokens());
        tower.record(device)?;
        Ok(tower)
    }
}

/// Takes the buffers of a tower in their order, and fills them.
struct Filling<'a, 'b, 'c> {
    request: TowerRequest<'a>,
    buffers: std::vec::IntoIter<Buffer>,
    uploader: &'c mut Uploader<'b, UploadError>,
}

impl Filling<'_, '_, '_> {
    fn next(&mut self) -> Buffer {
        self.buffers.next().expect("a buffer was requested for each use")
    }

    fn words<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Result<Buffer, UploadError> {
        let buffer = self.next();
        self.uploader.upload(&buffer, data)?;
        Ok(buffer)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Buffer, UploadError> {
        self.words(values)
    }

    /// Packs a matrix in the tower's scheme.
    fn matrix(&mut self, [rows, cols]: [usize; 2], values: Vec<f32>) -> Result<Matrix, UploadError> {
        let scheme = self.request.scheme;
        let shape = [rows, cols];
        let data: &[u8] = bytemuck::cast_slice(&values);
        let encoding = Encoding::Plain { dtype: DType::F32, data };
        let tensor = Tensor { name: "vision", file: "memory", shape: &shape, encoding, interleaved: None };
        let mut blocks = vec![0u8; scheme.block_bytes(rows, cols) as usize];
        let mut scales = vec![0u8; scheme.scale_bytes(rows, cols) as usize];
        let tiles = 0..rows.div_ceil(TILE_ROWS);
        pack_tiles(scheme, Rounding::Nearest, &tensor, tiles, &mut blocks, &mut scales)?;
        let blocks = self.words(&blocks)?;
        let scales = if scales.is_empty() { None } else { Some(self.words(&scales)?) };
        Ok(Matrix::of_one_shard(scheme, shape, blocks, scales))
    }
}

impl TowerRequest<'_> {
    /// The rows of each head, `columns` wide, with rows of zeros after them up to the dimension on the device.
    fn padded_rows(&self, values: Vec<f32>, columns: usize) -> Vec<f32> {
        let (stored, padded) = (self.spec.head_dim * columns, self.head_dim() * columns);
        pad_each(values, stored, padded)
    }

    /// The columns of each head in a matrix that multiplies heads, with columns of zeros after them.
    fn padded_columns(&self, values: Vec<f32>) -> Vec<f32> {
        pad_each(values, self.spec.head_dim, self.head_dim())
    }
}

/// Appends zeros to each `stored` values, up to `padded`.
fn pad_each(values: Vec<f32>, stored: usize, padded: usize) -> Vec<f32> {
    if stored == padded {
        return values;
    }
    let zeros = vec![0.0; padded - stored];
    values.chunks_exact(stored).flat_map(|values| values.iter().chain(&zeros)).copied().collect()
}

/// The transpose of a matrix with `rows` rows.
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let cols = values.len() / rows;
    (0..cols).flat_map(|col| (0..rows).map(move |row| values[row * cols + col])).collect()
}

impl Tower {
    /// Records everything but the closing, in parts that are submitted separately, so that none blocks the device for long.
    fn record(&mut self, device: &Arc<Device>) -> Result<(), GpuError> {
        let mut recorded = vec![CommandBuffer::new(device, "vision: patches")?];
        recorded[0].record_for_many_submits(&mut |r| self.record_opening(r))?;
        for (i, layer) in self.layers.iter().enumerate() {
            let bias = self.bias_before(i);
            let mut record = |what: &str, part: &mut dyn FnMut(&mut Recorder<'_>)| {
                let mut commands = CommandBuffer::new(device, &format!("vision: {what} of layer {i}"))?;
                commands.record_for_many_submits(part)?;
                recorded.push(commands);
                Ok::<_, GpuError>(())
            };
            record("projections", &mut |r| self.record_projections(r, layer, bias))?;
            for (index, part) in self.parts.iter().enumerate() {
                record("attention", &mut |r| self.record_attention(r, layer, index, part))?;
            }
            record("network", &mut |r| self.record_network(r, layer))?;
        }
        let submissions = (0..=recorded.len()).map(|_| Submission::new(device));
        self.submissions = submissions.collect::<Result<_, _>>()?;
        self.recorded = recorded;
        Ok(())
    }

    /// The bias of the product that comes before layer `index`: of the last layer, or of the patches.
    fn bias_before(&self, index: usize) -> &Buffer {
        index.checked_sub(1).map_or(&self.patch_embedding.1, |before| &self.layers[before].fc2.1)
    }

    fn record_opening(&self, r: &mut Recorder<'_>) {
        let Scratch { patches, patch_blocks, hidden, delta, .. } = &self.scratch;
        let rows = self.spec.patches();
        let sizes = [self.spec.image_size, self.spec.patch_size];
        r.label("vision");
        self.own_kernels.patches(r, &self.pixels, sizes, &self.spec.pixels, patches);
        let (matrix, _) = &self.patch_embedding;
        let input = Operand::new(self.kernels.wants([matrix]), patches, patch_blocks);
        if input.blocks.is_some() {
            self.kernels.quantize(r, patches, patch_blocks, rows);
        }
        self.kernels.matmul(r, &[(matrix, delta)], &input, rows);
        r.copy(&self.positions, &hidden.buffer, self.positions.size());
    }

    /// What a layer computes before attention, after a product in `delta` whose bias is `bias`.
    fn record_projections(&self, r: &mut Recorder<'_>, layer: &DeviceLayer, bias: &Buffer) {
        let Scratch { hidden, normed, normed_blocks, delta, qkv, .. } = &self.scratch;
        let (kernels, rows) = (&self.kernels, self.spec.patches());
        let DeviceLayer { norms, qkv: matrices, attention, .. } = layer;
        r.label("vision");
        let input = Operand::new(kernels.wants(matrices), normed, normed_blocks);
        self.own_kernels.add_and_norm(r, (delta, bias), (hidden, &norms[0]), &input, rows);
        let products: Vec<_> = matrices.iter().zip(qkv).collect();
        kernels.matmul(r, &products, &input, rows);
        kernels.qkv_store(r, attention, qkv.each_ref(), &self.step, rows);
    }

    /// The attention of some patches to all, and its product with the output matrix in `delta`.
    fn record_attention(&self, r: &mut Recorder<'_>, layer: &DeviceLayer, index: usize, part: &PartItems) {
        let Scratch { delta, qkv, attended, attended_blocks, partials, .. } = &self.scratch;
        let (kernels, (out, _), rows) = (&self.kernels, &layer.out, &part.rows);
        let step = self.step.part(part, index);
        r.label("vision");
        let input = Operand::new(kernels.wants([out]), &attended.rows(rows), attended_blocks);
        // The items of attention count rows from the first patch, so the queries are not cut.
        kernels.attention(r, &layer.attention, (&qkv[0], partials), &step, &input, rows.len());
        kernels.matmul(r, &[(out, &delta.rows(rows))], &input, rows.len());
    }

    /// What a layer computes after attention. It leaves a product without its bias in `delta`.
    fn record_network(&self, r: &mut Recorder<'_>, layer: &DeviceLayer) {
        let Scratch { hidden, normed, normed_blocks, delta, network, network_blocks, .. } = &self.scratch;
        let (kernels, own, rows) = (&self.kernels, &self.own_kernels, self.spec.patches());
        let DeviceLayer { norms, out, fc1, fc2, .. } = layer;
        r.label("vision");
        let input = Operand::new(kernels.wants([&fc1.0]), normed, normed_blocks);
        own.add_and_norm(r, (delta, &out.1), (hidden, &norms[1]), &input, rows);
        kernels.matmul(r, &[(&fc1.0, network)], &input, rows);
        let input = Operand::new(kernels.wants([&fc2.0]), network, network_blocks);
        own.activate(r, (network, &fc1.1), &input, rows);
        kernels.matmul(r, &[(&fc2.0, delta)], &input, rows);
    }

    fn record_closing(&self, r: &mut Recorder<'_>, slot: u32) {
        let Scratch { hidden, normed, delta, pooled, pooled_normed, pooled_blocks, .. } = &self.scratch;
        let bias = self.bias_before(self.layers.len());
        let rows = self.spec.patches();
        r.label("vision");
        let norm = (hidden, &self.post_layernorm);
        self.own_kernels.add_and_norm(r, (delta, bias), norm, &Operand::floats(normed), rows);
        self.own_kernels.average_pool(r, normed, [self.spec.patches_across(), self.spec.pool], pooled);
        let input = Operand::new(self.kernels.wants([&self.projection]), pooled_normed, pooled_blocks);
        let tokens = self.spec.tokens();
        self.kernels.rms_norm(r, pooled, &self.soft_emb_norm, &input, tokens);
        self.kernels.matmul(r, &[(&self.projection, &self.embeddings_of(slot))], &input, tokens);
    }

    /// The embeddings of the image in a slot, `[tokens, text_hidden_size]`.
    pub(in crate::model) fn embeddings_of(&self, slot: u32) -> Activations {
        let (slot, tokens) = (slot as usize, self.spec.tokens());
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        self.embeddings.rows(&(slot * tokens..(slot + 1) * tokens))
    }

    /// Computes the embeddings of an image into a slot. `pixels` are `[image_size, image_size, 3]`.
    pub(in crate::model) fn encode(
        &mut self,
        slot: u32,
        size: [usize; 2],
        pixels: &[u8],
    ) -> Result<(), GpuError> {
        assert_eq!(size, [self.spec.image_size; 2], "the size of an image");
        assert_eq!(pixels.len(), 3 * size[0] * size[1], "the pixels of an image");
        // The last image was waited for, so the device no longer reads its pixels.
        self.pixels.write(0, pixels);
        let mut closing = self.closing.take().expect("it is not being recorded");
        let recorded = closing.record_for_one_submit(&mut |r| self.record_closing(r, slot));
        let closing = self.closing.insert(closing);
        recorded?;
        let all = self.recorded.iter_mut().chain([closing]);
        for (commands, submission) in all.zip(&mut self.submissions) {
            submission.submit(&mut [commands], "an image")?;
        }
        self.submissions.iter_mut().try_for_each(Submission::wait)
    }
}
