//! Typed dispatch: one method for each shader.
//!
//! Shaders access buffers by address, without bounds checks. So each method checks the shapes against the buffers'
//! sizes, and passes the buffers to the recorder, which derives barriers. This module does not know models.

mod arrays;
mod attention;
pub(crate) mod attention_kernels;
pub(crate) mod expert_kernels;
mod experts;
pub(crate) mod operand;
mod peak;
pub(crate) mod pipelines;
pub(crate) mod sampling;
mod streams;
mod vision;
mod weights;

#[allow(missing_docs, clippy::identity_op, clippy::manual_div_ceil)]
pub mod shaders;

pub use arrays::{
    Activations, Attention, AttentionShape, Experts, Heads, HiddenAct, KvCache, LAST_SAMPLED, LayerKind,
    MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, MAX_GROUP, MAX_HEAD_DIM, Partials, RmsNorm, ShareArrays, StepArrays,
    head_dim_multiple,
};
pub use attention::{Item, PartItems, Room, Run, Shares, Splits, partial_width};
pub use attention_kernels::{AttentionBy, AttentionTile};
pub use experts::{ExpertMatrices, PairActivations, Router, Routing, RowsOf, pair_blocks_bytes};
pub use operand::{
    ActivationsFrom, GpuTiles, Matrices, Operand, ProductKind, Quantized, SubgroupTile, Tiles, WIDTH_CLASSES,
    Wants, Way,
};
pub use peak::Peak;
pub use pipelines::all_pipelines;
pub use sampling::{
    Bias, DrawArrays, DrawScratch, History, LOGPROB_WORDS, Logits, MAX_LOGPROBS, NO_TOKEN, SampleRequest,
    draw_words, mask_words,
};
pub use streams::{AltUp, STREAMS, StreamKernels};
pub use vision::{GridTables, LayerNorm, PixelScale, Standardize, VisionKernels};
pub use weights::{Embedding, Matrix, UploadError};

use std::ops::Range;
use std::sync::Arc;

pub(crate) use self::arrays::words;
use self::attention::items_of;
use self::expert_kernels::ExpertKernels;
use self::operand::Products;
use self::shaders::{shader_named, shaders_of};
use crate::gpu::{Buffer, Device, GpuError, INDIRECT_BYTES, Pipeline, Recorder, Shader};
use crate::tensor::{Precision, Scheme};

/// The variants of a kernel that write f32, int8, or both.
struct OutputVariants {
    floats: Arc<Pipeline>,
    blocks: Arc<Pipeline>,
    both: Arc<Pipeline>,
}

impl OutputVariants {
    fn new(
        device: &Device,
        tiles: Tiles,
        kernel: &str,
        constants: &[u32],
    ) -> Result<OutputVariants, GpuError> {
        let shader = |output: &str| tiles.body_of(shader_named(&format!("{kernel}{output}")));
        let one = |output: &str| device.pipeline(shader(output), constants);
        Ok(OutputVariants { floats: one("")?, blocks: one("_int8")?, both: one("_both")? })
    }

    fn pipeline(&self, to: &Operand) -> &Pipeline {
        match (&to.floats, &to.blocks) {
            (_, None) => &self.floats,
            (None, Some(_)) => &self.blocks,
            (Some(_), Some(_)) => &self.both,
        }
    }
}

struct SamplePipelines {
    maxima: Arc<Pipeline>,
    masses: Arc<Pipeline>,
    draw: Arc<Pipeline>,
    choice: Arc<Pipeline>,
    greedy: Arc<Pipeline>,
}

/// All compiled pipelines that a model needs.
pub struct Kernels {
    precision: Precision,
    layers: LayerKind,
    products: Products,
    /// The schemes of embeddings, and the pipeline of each.
    embed: Vec<(Scheme, Arc<Pipeline>)>,
    quantize: Arc<Pipeline>,
    rms_norm: OutputVariants,
    rms_norm_add: Arc<Pipeline>,
    rms_norm_gather: OutputVariants,
    residual: OutputVariants,
    /// For layers whose experts have a norm of their own.
    residual_twice: Option<OutputVariants>,
    qkv_store: Arc<Pipeline>,
    /// For each kind of heads, the kernels of single tokens and of tiles.
    attention: Vec<(Heads, [Arc<Pipeline>; 2])>,
    /// How attention is computed in fact.
    attention_by: AttentionBy,
    attention_merge: OutputVariants,
    glu: OutputVariants,
    experts: Option<ExpertKernels>,
    streams: Option<StreamKernels>,
    softcap: Arc<Pipeline>,
    moments: Arc<Pipeline>,
    pool: Arc<Pipeline>,
    history: Arc<Pipeline>,
    adjust: [Arc<Pipeline>; 3],
    adjust_clear: Arc<Pipeline>,
    sample: SamplePipelines,
    logprobs: [Arc<Pipeline>; 2],
}

impl Kernels {
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Compiles the kernels for these matrices, for layers with these heads, and for this precision. All heads have the
    /// same type of KV cache. Without heads there is no attention.
    pub fn new(
        device: &Device,
        matrices: &Matrices,
        heads: &[Heads],
        precision: Precision,
    ) -> Result<Kernels, GpuError> {
        let kv = heads.first().map(|heads| heads.kv).unwrap_or_default();
        let embed = matrices.embeddings.iter().map(|scheme| {
            let pipeline = device.pipeline(shaders_of(*scheme).1, &[])?;
            Ok::<_, GpuError>((*scheme, pipeline))
        });
        let (attention_by, attention) = attention_kernels(device, matrices.attention, heads, precision)?;
        let tiles = matrices.tiles.unwrap_or_else(|| Tiles::of(device));
        let layers = matrices.layers;
        let into = |kernel: &str, constants: &[u32]| OutputVariants::new(device, tiles, kernel, constants);
        let one =
            |shader: &'static Shader, constants: &[u32]| device.pipeline(tiles.body_of(shader), constants);
        let ([activation, post_norm], of_qkv) = layers.constants();
        Ok(Kernels {
            precision,
            layers,
            products: Products::new(device, matrices, tiles, precision)?,
            embed: embed.collect::<Result<_, _>>()?,
            quantize: one(&shaders::QUANTIZE, &[])?,
            rms_norm: into("rms_norm", &[])?,
            rms_norm_add: one(&shaders::RMS_NORM_ADD, &[post_norm])?,
            rms_norm_gather: into("rms_norm_gather", &[])?,
            residual: into("rms_norm_residual", &[post_norm, 0])?,
            residual_twice: layers
                .has_expert_norm
                .then(|| into("rms_norm_residual", &[post_norm, 1]))
                .transpose()?,
            qkv_store: one(shader_named(&format!("qkv_store_{kv}")), &of_qkv)?,
            attention,
            attention_by,
            attention_merge: into("attention_merge", &[])?,
            glu: into("glu", &[activation])?,
            experts: ExpertKernels::new(device, tiles, &layers)?,
            streams: layers.has_streams.then(|| StreamKernels::new(device, tiles)).transpose()?,
            softcap: device.pipeline(&shaders::SOFTCAP, &[])?,
            moments: device.pipeline(&shaders::MOMENTS, &[])?,
            pool: device.pipeline(&shaders::POOL, &[])?,
            history: device.pipeline(&shaders::HISTORY, &[])?,
            adjust: [
                device.pipeline(&shaders::ADJUST_COUNT, &[])?,
                device.pipeline(&shaders::ADJUST_PENALIZE, &[])?,
                device.pipeline(&shaders::ADJUST_BIAS, &[])?,
            ],
            adjust_clear: device.pipeline(&shaders::ADJUST_CLEAR, &[])?,
            sample: SamplePipelines {
                maxima: device.pipeline(&shaders::SAMPLE_MAXIMA, &[])?,
                masses: device.pipeline(&shaders::SAMPLE_MASSES, &[])?,
                draw: device.pipeline(&shaders::SAMPLE_DRAW, &[])?,
                choice: device.pipeline(&shaders::SAMPLE_CHOICE, &[])?,
                greedy: device.pipeline(&shaders::SAMPLE_GREEDY, &[])?,
            },
            logprobs: [
                device.pipeline(&shaders::LOGPROBS_PARTS, &[])?,
                device.pipeline(&shaders::LOGPROBS_MERGE, &[])?,
            ],
        })
    }

    /// The forms (f32, int8) in which these matrices need their operand.
    pub fn wants<'a>(&self, matrices: impl IntoIterator<Item = &'a Matrix>) -> Wants {
        let mut wants = Wants::default();
        for matrix in matrices {
            match self.precision.quantizes(matrix.scheme) {
                true => wants.blocks = true,
                false => wants.floats = true,
            }
        }
        wants
    }

    /// How products are divided. It differs from [`Matrices::tiles`] if the device refused kernels.
    pub fn tiles(&self) -> Tiles {
        self.products.tiles
    }

    /// How attention is computed. It differs from [`Matrices::attention`] if that does not suit the heads or the precision,
    /// or if the device refused kernels.
    pub fn attention_by(&self) -> AttentionBy {
        self.attention_by
    }

    /// A number of tokens, a power of two, for each kernel that computes products of this kind with matrices of
    /// `scheme`, in ascending order. Kernels of the head that plain products have, too, are left out.
    pub fn product_tokens(&self, kind: ProductKind, scheme: Scheme) -> Vec<usize> {
        self.products.tokens(kind, scheme)
    }

    /// The kernels of layers with several residual streams. Panics if the layers have one.
    pub fn streams(&self) -> &StreamKernels {
        self.streams.as_ref().expect("kernels of residual streams")
    }

    /// Computes `out[t] = embedding[ids[t]] * scale` for `tokens` tokens. `sampled` holds the last id of each slot. An
    /// id beyond the last row selects the row [`Embedding::beyond`].
    pub fn embed(
        &self,
        recorder: &mut Recorder<'_>,
        embedding: &Embedding,
        ids: &Buffer,
        sampled: &Buffer,
        out: &Activations,
        tokens: usize,
    ) {
        let Embedding { matrix, table, scale, beyond } = embedding;
        let made = self.embed.iter().find(|(scheme, _)| scheme.shares_variant(matrix.scheme));
        let Some((_, pipeline)) = made else { panic!("embed: no kernel for a matrix of {}", matrix.scheme) };
        // A row of each token.
        let read =
            |buffer: &Buffer| buffer.accessing((buffer.size() * tokens as u64).div_ceil(matrix.rows as u64));
        let shards = matrix.shards.iter().flat_map(|shard| [Some(&shard.blocks), shard.scales.as_ref()]);
        let shards: Vec<Buffer> = shards.flatten().map(read).collect();
        let arguments = shaders::Embed {
            shards: table,
            ids: &words(ids, tokens, "embed: ids"),
            sampled,
            embedded: &out.used(tokens, matrix.cols, "embed: out"),
            rows_per_shard: matrix.rows_per_shard as u32,
            rows: matrix.rows as u32,
            beyond: *beyond,
            cols: matrix.cols as u32,
            out_stride: out.stride as u32,
            blocks_per_scale: matrix.scheme.blocks_per_scale() as u32,
            scale: *scale,
            followed: &shards.iter().collect::<Vec<_>>(),
        };
        recorder.dispatch(pipeline, &arguments, [tokens as u32, 1, 1]);
    }

    /// Computes `y[t] = W x[t]` for `tokens` rows of `x` and each matrix `W`. One dispatch computes several matrices if
    /// possible. `x` must have the forms that [`Kernels::wants`] returns.
    pub fn matmul(
        &self,
        recorder: &mut Recorder<'_>,
        products: &[(&Matrix, &Activations)],
        x: &Operand,
        tokens: usize,
    ) {
        self.products.record(recorder, ProductKind::Plain, products, x, tokens);
    }

    /// Computes the logits `y[t] = W x[t]` for `rows` rows of `x`, with the matrix of the embedding.
    pub fn head(
        &self,
        recorder: &mut Recorder<'_>,
        head: &Matrix,
        y: &Activations,
        x: &Operand,
        rows: usize,
    ) {
        self.products.record(recorder, ProductKind::Head, &[(head, y)], x, rows);
    }

    /// Computes `y[t] = activation(gate x[t]) * (up x[t])` for `tokens` rows of `x`. If no single kernel can compute
    /// this, `products` hold both products.
    pub fn gated(
        &self,
        recorder: &mut Recorder<'_>,
        [gate, up]: [&Matrix; 2],
        x: &Operand,
        products: [&Activations; 2],
        y: &Operand,
        tokens: usize,
    ) {
        if self.products.gated(recorder, [gate, up], x, y, tokens) {
            return;
        }
        let pair = [(gate, products[0]), (up, products[1])];
        self.products.record(recorder, ProductKind::Gated, &pair, x, tokens);
        self.glu(recorder, products[0], products[1], y, tokens);
    }

    /// Quantizes `rows` rows of `x` to int8 in `y`.
    pub fn quantize(&self, recorder: &mut Recorder<'_>, x: &Activations, y: &Quantized, rows: usize) {
        let to = y.planes(rows, x.width, "quantize: y");
        let arguments = shaders::Quantize {
            x: &x.used(rows, y.width, "quantize: x"),
            blocks: &to.blocks,
            scales: &to.scales,
            width: x.width as u32,
            stride: x.stride as u32,
            padded: to.stride,
        };
        recorder.dispatch(&self.quantize, &arguments, [fours(x.width), rows as u32, 1]);
    }

    /// Computes `y[t] = norm(x[t])`.
    pub fn rms_norm(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        norm: &RmsNorm,
        y: &Operand,
        rows: usize,
    ) {
        let pipeline = self.rms_norm.pipeline(y);
        normalize(recorder, pipeline, (x, rows, None), Some(norm), None, (Some(y), rows));
    }

    /// Computes `hidden[t] = (hidden[t] + norm(x[t])) * scale`, without `norm` if the layers have no post-norms.
    pub fn rms_norm_add(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        (norm, scale): (Option<&RmsNorm>, f32),
        hidden: &Activations,
        rows: usize,
    ) {
        assert_eq!(norm.is_some(), self.layers.has_post_norms, "rms_norm_add: norm");
        let all = Added { hidden, next: None, scale, second: None };
        normalize(recorder, &self.rms_norm_add, (x, rows, None), norm, Some(all), (None, rows));
    }

    /// Computes `hidden[t] = (hidden[t] + norm(x[t])) * scale`, without `norm` if the layers have no post-norms, and then
    /// `y[t] = next_norm(hidden[t])`.
    #[rustfmt::skip]
    pub fn residual(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        (norm, scale): (Option<&RmsNorm>, f32),
        (hidden, next_norm): (&Activations, &RmsNorm),
        y: &Operand,
        rows: usize,
    ) {
        assert_eq!(norm.is_some(), self.layers.has_post_norms, "residual: norm");
        let (pipeline, all) = (self.residual.pipeline(y), Added { hidden, next: Some(next_norm), scale, second: None });
        normalize(recorder, pipeline, (x, rows, None), norm, Some(all), (Some(y), rows));
    }

    /// [`Kernels::residual`] with a factor of 1, and two norms of the sum, into operands of the same forms.
    pub fn residual_twice(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        norm: Option<&RmsNorm>,
        hidden: &Activations,
        [(next, y), second]: [(&RmsNorm, &Operand); 2],
        rows: usize,
    ) {
        assert_eq!(norm.is_some(), self.layers.has_post_norms, "residual_twice: norm");
        let pipelines = self.residual_twice.as_ref().expect("experts with a norm of their own");
        let all = Added { hidden, next: Some(next), scale: 1.0, second: Some(second) };
        normalize(recorder, pipelines.pipeline(y), (x, rows, None), norm, Some(all), (Some(y), rows));
    }

    /// Computes `y[i] = norm(x[index[i]])` for `rows` entries of `index`, which are row numbers of `x`.
    pub fn rms_norm_gather(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        index: &Buffer,
        norm: &RmsNorm,
        y: &Operand,
        rows: usize,
    ) {
        let index = words(index, rows, "rms_norm: index");
        let all = x.buffer.size() as usize / 4 / x.stride;
        let pipeline = self.rms_norm_gather.pipeline(y);
        normalize(recorder, pipeline, (x, all, Some(&index)), Some(norm), None, (Some(y), rows));
    }

    /// Applies biases, QK-norm, RoPE and the query scale to `q`, in place. Stores `k`, with biases, QK-norm and RoPE, and
    /// `v`, with biases and its norm, in the cache. `v` may be `k`.
    pub fn qkv_store(
        &self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        [q, k, v]: [&Activations; 3],
        step: &StepArrays,
        tokens: usize,
    ) {
        let Attention { shape, qk_norms, norm_eps, biases, rope, q_scale, shares_cache, cache } = attention;
        let (Heads { kv, .. }, _) = self.attention_of(shape);
        let num_kv_heads = if *shares_cache { 0 } else { shape.num_kv_heads };
        let stored = kv.block_bytes(tokens * num_kv_heads, shape.head_dim) as u64;
        assert_eq!(qk_norms.is_some(), self.layers.has_qk_norms, "qkv_store: norms");
        assert_eq!(biases.is_some(), self.layers.has_biases, "qkv_store: biases");
        let [q_width, kv_width] = [shape.num_heads, shape.num_kv_heads].map(|heads| heads * shape.head_dim);
        let norms = qk_norms.as_ref().map(|norms| {
            assert!(norms.iter().all(|norm| norm.eps == *norm_eps), "qkv_store: norms with different eps");
            norms.each_ref().map(|norm| words(&norm.weight, shape.head_dim, "qkv_store: norm"))
        });
        let norm = |i: usize| norms.as_ref().map(|norms| &norms[i]);
        let bias = |i: usize, width: usize| {
            biases.as_ref().map(|biases| words(&biases[i], width, "qkv_store: bias"))
        };
        let biases = [bias(0, q_width), bias(1, kv_width), bias(2, kv_width)];
        let [q_bias, k_bias, v_bias] = biases.each_ref().map(Option::as_ref);
        let arguments = shaders::QkvStore {
            q: &q.used(tokens, q_width, "qkv_store: q"),
            k: &k.used(tokens, kv_width, "qkv_store: k"),
            v: &v.used(tokens, kv_width, "qkv_store: v"),
            q_bias_or_none: q_bias,
            k_bias_or_none: k_bias,
            v_bias_or_none: v_bias,
            q_norm_or_none: norm(0),
            k_norm_or_none: norm(1),
            rope: &rope.accessing((4 * tokens * shape.head_dim) as u64),
            positions: &words(&step.positions, tokens, "qkv_store: positions"),
            slot_mapping: &words(&step.slot_mapping, tokens, "qkv_store: slot_mapping"),
            k_cache: &cache.keys.accessing(stored),
            v_cache: &cache.values.accessing(stored),
            num_heads: shape.num_heads as u32,
            num_kv_heads: num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            block_size: shape.block_size as u32,
            eps: *norm_eps,
            q_scale: *q_scale,
        };
        let groups = [tokens as u32, (shape.num_heads + 2 * num_kv_heads) as u32, 1];
        recorder.dispatch(&self.qkv_store, &arguments, groups);
    }

    /// Computes `y[t] = softmax(q[t] K) V` for `tokens` tokens, over the cached keys that each token sees. Padding
    /// tokens get 0. The items refer to rows of `q`.
    pub fn attention(
        &self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        (q, partials): (&Activations, &Partials),
        step: &StepArrays,
        y: &Operand,
        tokens: usize,
    ) {
        let shape = &attention.shape;
        let ShareArrays { single, tiles, groups, .. } = &step.shares;
        for (kind, items) in (0..).zip([single, tiles]) {
            let Some(items) = items else { continue };
            let (partials, pipeline) = self.attention_pipeline(shape, q, partials, kind);
            let arguments = attention_arguments(attention, q, partials, step, items, 0);
            let groups = groups.slice(kind as u64 * INDIRECT_BYTES, INDIRECT_BYTES);
            recorder.dispatch_indirect(pipeline, &arguments, &groups);
        }
        self.attention_merge(recorder, shape, step, partials, y, tokens);
    }

    /// Computes the partials of a part's items, for some of the KV heads. [`Kernels::attention`] does that for all
    /// items and heads before it merges. `step` has the arrays of all parts. The recording is valid only for this step,
    /// because the workgroup counts are recorded.
    pub fn attention_partials(
        &self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        (q, partials): (&Activations, &Partials),
        step: &StepArrays,
        part: &PartItems,
        kv_heads: &Range<usize>,
    ) {
        let shape = &attention.shape;
        assert!(kv_heads.end <= shape.num_kv_heads, "attention: KV heads {kv_heads:?}");
        let ShareArrays { single, tiles, .. } = &step.shares;
        for (kind, (items, some)) in [(single, &part.single), (tiles, &part.tiles)].into_iter().enumerate() {
            if some.is_empty() || kv_heads.is_empty() {
                continue;
            }
            let items = items_of(items.as_ref().expect("a part with items has a buffer of items"), some);
            let (partials, pipeline) = self.attention_pipeline(shape, q, partials, kind);
            let arguments = attention_arguments(attention, q, partials, step, &items, kv_heads.start);
            recorder.dispatch(pipeline, &arguments, [some.len() as u32, kv_heads.len() as u32, 1]);
        }
    }

    /// The partials and the pipeline for items of single tokens (`kind` 0) or of tiles (`kind` 1). Checks the shapes.
    fn attention_pipeline<'a>(
        &'a self,
        shape: &AttentionShape,
        q: &Activations,
        partials: &'a Partials,
        kind: usize,
    ) -> (&'a Activations, &'a Pipeline) {
        let Partials { single, tiles } = partials;
        let (partials, pipeline) = ([single, tiles][kind], &self.attention_of(shape).1[kind]);
        assert_eq!(q.width, shape.num_heads * shape.head_dim, "attention: q");
        assert_eq!(partials.width, shape.partial_width(), "attention: partials");
        (partials, pipeline)
    }

    /// Merges the partials of each token. Padding tokens get 0.
    pub fn attention_merge(
        &self,
        recorder: &mut Recorder<'_>,
        shape: &AttentionShape,
        step: &StepArrays,
        partials: &Partials,
        y: &Operand,
        tokens: usize,
    ) {
        let width = shape.num_heads * shape.head_dim;
        let floats = y.floats.as_ref().map(|floats| floats.used(tokens, width, "attention: y"));
        let to = y.blocks.as_ref().map(|blocks| blocks.planes(tokens, width, "attention: y"));
        let arguments = shaders::AttentionMerge {
            single: &partials.single.buffer,
            tiles: &partials.tiles.buffer,
            merges: &words(&step.shares.merges, 2 * tokens, "attention: merges"),
            y: floats.as_ref(),
            blocks: to.as_ref().map(|to| &to.blocks),
            scales: to.as_ref().map(|to| &to.scales),
            num_heads: shape.num_heads as u32,
            fours: (shape.head_dim / 4) as u32,
            padded: to.as_ref().map_or(0, |to| to.stride),
        };
        let groups = [fours(width), tokens as u32, 1];
        recorder.dispatch(self.attention_merge.pipeline(y), &arguments, groups);
    }

    /// The kernels of single tokens and of tiles for the heads of a layer.
    fn attention_of(&self, shape: &AttentionShape) -> &(Heads, [Arc<Pipeline>; 2]) {
        let fits = |(heads, _): &&(Heads, _)| {
            shape.num_heads == shape.num_kv_heads * heads.group && shape.head_dim == heads.head_dim
        };
        let found = self.attention.iter().find(fits);
        found.unwrap_or_else(|| panic!("attention: kernels for other heads than {shape:?}"))
    }

    /// Computes `y = activation(gate) * up`. An f32 result must be in place: `y.floats` is `gate`.
    pub fn glu(
        &self,
        recorder: &mut Recorder<'_>,
        gate: &Activations,
        up: &Activations,
        y: &Operand,
        rows: usize,
    ) {
        self.glu_rows(recorder, [gate, up], y, rows, rows);
    }

    /// [`Kernels::glu`], where the blocks of `y` have room for `room` rows.
    fn glu_rows(
        &self,
        recorder: &mut Recorder<'_>,
        [gate, up]: [&Activations; 2],
        y: &Operand,
        rows: usize,
        room: usize,
    ) {
        let input = gate.used(rows, up.width, "glu: gate");
        if let Some(floats) = &y.floats {
            assert_eq!(floats.buffer.address(), gate.buffer.address(), "glu: in place");
        }
        let to = y.blocks.as_ref().map(|blocks| blocks.planes(room, up.width, "glu: y"));
        let arguments = shaders::Glu {
            gate: &input,
            up: &up.used(rows, gate.width, "glu: up"),
            blocks: to.as_ref().map(|to| &to.blocks),
            scales: to.as_ref().map(|to| &to.scales),
            width: gate.width as u32,
            stride: gate.stride as u32,
            up_stride: up.stride as u32,
            padded: to.as_ref().map_or(0, |to| to.stride),
        };
        recorder.dispatch(self.glu.pipeline(y), &arguments, [fours(gate.width), rows as u32, 1]);
    }

    /// Computes `x[t] = cap * tanh(x[t] / cap)`, in place.
    pub fn softcap(&self, recorder: &mut Recorder<'_>, x: &Activations, cap: f32, rows: usize) {
        let arguments = shaders::Softcap {
            x: &x.used(rows, x.width, "softcap: x"),
            width: x.width as u32,
            stride: x.stride as u32,
            cap,
        };
        recorder.dispatch(&self.softcap, &arguments, [fours(x.width), rows as u32, 1]);
    }

    /// Adds the sum of `x[t, c]^2` over `tokens` rows to `sums[c]`, one f32 for each column `c`.
    pub fn moments(&self, recorder: &mut Recorder<'_>, x: &Activations, sums: &Buffer, tokens: usize) {
        let arguments = shaders::Moments {
            x: &x.used(tokens, x.width, "moments: x"),
            sums: &words(sums, x.width, "moments: sums"),
            experts_or_none: None,
            positions_or_none: None,
            count: tokens as u32,
            width: x.width as u32,
            x_stride: x.stride as u32,
            per_token: 1,
        };
        recorder.dispatch(&self.moments, &arguments, [(x.width as u32).div_ceil(64), 1, 1]);
    }

    /// Adds the sum of `tokens` rows of `x` to the single row of `sums`. If `fresh`, the row is overwritten instead.
    pub fn pool(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        sums: &Activations,
        fresh: bool,
        tokens: usize,
    ) {
        let arguments = shaders::Pool {
            x: &x.used(tokens, sums.width, "pool: x"),
            sums: &sums.used(1, x.width, "pool: sums"),
            tokens: tokens as u32,
            width: x.width as u32,
            x_stride: x.stride as u32,
            fresh: u32::from(fresh),
        };
        recorder.dispatch(&self.pool, &arguments, [(x.width as u32).div_ceil(64), 1, 1]);
    }
}

type AttentionKernels = Vec<(Heads, [Arc<Pipeline>; 2])>;

/// The kernels of attention for all kinds of heads, in one way. If subgroups cannot compute all of them, or if the device
/// refuses their kernels, lanes do.
fn attention_kernels(
    device: &Device,
    by: Option<AttentionBy>,
    heads: &[Heads],
    precision: Precision,
) -> Result<(AttentionBy, AttentionKernels), GpuError> {
    let kv = heads.first().map(|heads| heads.kv);
    for Heads { group, head_dim, kv: other } in heads {
        let is_supported = *group <= MAX_GROUP
            && *head_dim <= MAX_HEAD_DIM
            && head_dim.is_multiple_of(head_dim_multiple(*head_dim))
            && Some(*other) == kv;
        assert!(is_supported, "attention: heads {heads:?}");
    }
    let make = |by: AttentionBy| -> Result<(AttentionBy, AttentionKernels), GpuError> {
        let of = |heads: &Heads| {
            let [single, tile] =
                by.pipelines(heads).map(|(shader, constants)| device.pipeline(shader, &constants));
            Ok((*heads, [single?, tile?]))
        };
        Ok((by, heads.iter().map(of).collect::<Result<_, GpuError>>()?))
    };
    let by = by.unwrap_or_else(|| AttentionBy::of(device.info()));
    let by = if heads.iter().all(|heads| by.suits(heads, precision)) { by } else { AttentionBy::Lanes };
    match make(by) {
        Err(why) if why.is_refusal() && by != AttentionBy::Lanes => {
            let name = &device.info().name;
            tracing::warn!("{name}: subgroups cannot compute attention, so lanes do: {why}");
            make(AttentionBy::Lanes)
        }
        made => made,
    }
}

fn attention_arguments<'a>(
    Attention { shape, cache, .. }: &'a Attention,
    q: &'a Activations,
    partials: &'a Activations,
    step: &'a StepArrays,
    items: &'a Buffer,
    first_kv_head: usize,
) -> shaders::Attention<'a> {
    shaders::Attention {
        q: &q.buffer,
        k_cache: &cache.keys,
        v_cache: &cache.values,
        items,
        block_tables: &step.block_tables,
        partials: &partials.buffer,
        num_kv_heads: shape.num_kv_heads as u32,
        block_size: shape.block_size as u32,
        max_blocks: shape.max_blocks as u32,
        window: shape.window.unwrap_or(0) as u32,
        split_unit: shape.splits().unit as u32,
        first_kv_head: first_kv_head as u32,
        // The shader only uses addresses from its push constants.
        followed: &[],
    }
}

/// The number of workgroups of 256 invocations with four columns each.
fn fours(width: usize) -> u32 {
    width.div_ceil(1024) as u32
}

/// The residual stream that a normed row is added to: the factor of the sum, the norm that follows, and a second one with
/// its result.
struct Added<'a> {
    hidden: &'a Activations,
    next: Option<&'a RmsNorm>,
    scale: f32,
    second: Option<(&'a RmsNorm, &'a Operand)>,
}

/// Records any variant of the RMSNorm kernel. Without `norm`, `x` itself is added.
fn normalize(
    recorder: &mut Recorder<'_>,
    pipeline: &Pipeline,
    (x, x_rows, index): (&Activations, usize, Option<&Buffer>),
    norm: Option<&RmsNorm>,
    added: Option<Added<'_>>,
    (y, rows): (Option<&Operand>, usize),
) {
    let hidden = added.as_ref().map(|added| added.hidden);
    let next = added.as_ref().and_then(|added| added.next);
    let second = added.as_ref().and_then(|added| added.second);
    let outputs = [y, second.map(|(_, y)| y)];
    let floats = outputs.map(|y| Some(y?.floats.as_ref()?.used(rows, x.width, "rms_norm: y")));
    let planes = outputs.map(|y| Some(y?.blocks.as_ref()?.planes(rows, x.width, "rms_norm: y")));
    if let (Some((second, _)), Some(next)) = (second, next) {
        assert_eq!(second.eps, next.eps, "rms_norm: norms of the same rows");
        let forms = |i: usize| (floats[i].is_some(), planes[i].is_some());
        assert_eq!(forms(0), forms(1), "rms_norm: forms of both results");
    }
    let weight = |norm: &RmsNorm| words(&norm.weight, x.width, "rms_norm: weight");
    let [own_weight, next_weight, second_weight] =
        [norm, next, second.map(|(norm, _)| norm)].map(|norm| norm.map(weight));
    let hidden_rows = hidden.map(|hidden| hidden.used(rows, x.width, "rms_norm: hidden"));
    let [floats, second_floats] = floats.each_ref().map(Option::as_ref);
    let [planes, second_planes] = planes.each_ref().map(Option::as_ref);
    let arguments = shaders::RmsNorm {
        x: &x.used(x_rows, x.width, "rms_norm: x"),
        weight_or_none: own_weight.as_ref(),
        next_weight: next_weight.as_ref(),
        hidden: hidden_rows.as_ref(),
        y: floats,
        blocks: planes.map(|to| &to.blocks),
        scales: planes.map(|to| &to.scales),
        rows: index,
        second_weight_or_none: second_weight.as_ref(),
        second_y_or_none: second_floats,
        second_blocks_or_none: second_planes.map(|to| &to.blocks),
        second_scales_or_none: second_planes.map(|to| &to.scales),
        dim: x.width as u32,
        x_stride: x.stride as u32,
        // `y` and `hidden` are as wide as `x`.
        y_stride: x.stride as u32,
        padded: planes.map_or(0, |to| to.stride),
        eps: norm.map_or(0.0, |norm| norm.eps),
        next_eps: next.map_or(0.0, |next| next.eps),
        scale: added.map_or(1.0, |added| added.scale),
    };
    recorder.dispatch(pipeline, &arguments, [rows as u32, 1, 1]);
}
