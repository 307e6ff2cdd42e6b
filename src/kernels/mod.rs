//! Typed dispatch of every shader, one method each, and their CPU twins (`reference`, called by tests alone).
//!
//! A method states the shapes, checks them against the buffers (shaders have no bounds checks: buffers go by
//! address), and declares to the recorder what is read and written. It refuses to know what a model is.

use std::ops::Range;
use std::sync::Arc;

use crate::gpu::{Buffer, Device, GpuError, INDIRECT_BYTES, Pipeline, Recorder, Shader};
use crate::tensor::{KvDtype, Precision, Scheme};

mod attention;
mod operand;
mod peak;
#[doc(hidden)]
pub mod cost;
#[doc(hidden)]
pub mod reference;
mod weights;

pub use attention::{Item, Part, Room, Run, Shares, Splits, partial_width};
pub(crate) use operand::are_alike;
pub use operand::{ActivationsFrom, GpuTiles, Operand, Quantized, SubgroupTile, Tiles, Wants};
use operand::{LANE_COLUMNS, LANE_TILES, Products};
pub use peak::Peak;
pub use weights::{Embedding, Matrix, UploadError};

/// The table that build.rs made from `shaders/`.
#[allow(missing_docs, clippy::identity_op)]
pub mod shaders {
    include!(concat!(env!("OUT_DIR"), "/shaders.rs"));
}

/// Largest head: a workgroup of attention holds one in 64 vec4s. Heads are multiples of 4.
pub const MAX_HEAD_DIM: usize = 256;
/// Most query heads per KV head: their queries and scores fit 32 KiB of shared memory.
pub const MAX_GROUP: usize = 16;
/// Matrices that meet the same activations and can be multiplied by them in one dispatch.
const MATRICES: usize = 3;
/// An id of the embedding kernel's input that stands for "the id last sampled in slot N": this flag plus N.
pub const LAST_SAMPLED: u32 = 1 << 31;
/// What the sampler writes when logits are not finite.
pub const NO_TOKEN: u32 = u32::MAX;
/// Ids of a row that a workgroup of the sampler takes, and one of log probabilities.
const DRAW_CHUNK: usize = 4096;
/// Bins of a row of logits, each of a count and a mass of 64 bits; and undecided ids that are listed (`shaders/sample.comp`).
const DRAW_BINS: usize = 1024;
const DRAW_LIST: usize = 4096;
const DRAW_TALLIES: usize = 8;
/// Words of what a chunk says of its log probabilities (`shaders/logprobs.comp`), of which a workgroup has a row's.
const LOGPROB_PART: usize = 2 + 2 * MAX_LOGPROBS;
const MOST_CHUNKS: usize = 256;

/// Most alternatives whose log probabilities come back with an id.
pub const MAX_LOGPROBS: usize = 20;
/// Words that the log probabilities of one row take: that of the drawn id, and pairs of alternatives.
pub const LOGPROB_WORDS: usize = 1 + 2 * MAX_LOGPROBS;

/// Blocks of weights that may share a scale: groups of 16, 32 and 128 columns, where a scheme may have them.
fn scale_blocks(shader: &str) -> &'static [u32] {
    match shader {
        "fast_matmul_int8_row" => &[1],
        name if name.contains("_int8") => &[1, 2],
        // Five and six bits come from GGUF alone, which has one size of groups for each.
        name if name.contains("_int6") => &[1],
        name if name.contains("_int5") => &[2],
        name if name.ends_with("_affine16") => &[1],
        _ => &[1, 4],
    }
}

/// The constants of every width of a product with int8.
fn of_int8(shader: &'static Shader, tiles: &GpuTiles, geglu: &[bool]) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for tile in Tiles::Gpu(*tiles).blocks() {
        for group in scale_blocks(shader.name) {
            all.extend(geglu.iter().map(|geglu| tiles.pipeline_of(shader, *group, tile, *geglu).1));
        }
    }
    all
}

/// Every pipeline that a GPU may run, with the constants of each, for attention of `group` query heads per KV head.
#[doc(hidden)]
pub fn all_pipelines(group: u32, head_dim: u32) -> Vec<(&'static Shader, Vec<u32>)> {
    let constants = |shader: &'static Shader| -> Vec<Vec<u32>> {
        match shader.constants.iter().map(|(_, name)| *name).collect::<Vec<_>>()[..] {
            [] => vec![vec![]],
            ["COLUMNS"] => Tiles::COUNTED.floats().iter().map(|tile| vec![tile.columns]).collect(),
            ["COLUMNS", "GEGLU", "SCALE_BLOCKS", _] => {
                let mut all = of_int8(shader, &GpuTiles::COUNTED, &[false, true]);
                // The most that shared memory takes.
                let shared = GpuTiles {
                    activations: [ActivationsFrom::SharedMemory; LANE_TILES],
                    ..GpuTiles::COUNTED
                };
                let widest = |constants: &Vec<u32>| constants[0] == LANE_COLUMNS;
                all.extend(of_int8(shader, &shared, &[false, true]).into_iter().filter(widest));
                all
            }
            ["COLUMNS", "HALVES", "SCALE_BLOCKS", ..] => {
                let Some(lanes) = shader.name.strip_suffix("_in_tiles") else { return vec![] };
                let tiles = GpuTiles { subgroups: Some(SubgroupTile::RDNA3), ..GpuTiles::COUNTED };
                let all = of_int8(shader_named(lanes), &tiles, &[false]);
                all.into_iter().filter(|constants| constants[0] > LANE_COLUMNS).collect()
            }
            ["GROUP", "HEAD_DIM", "ROWS"] => {
                vec![attention_constants(shader, group as usize, head_dim as usize)]
            }
            ref others => panic!("{}: constants {others:?} have no values here", shader.name),
        }
    };
    let of_gpus = shaders::ALL.iter().filter(|shader| !shader.name.ends_with(operand::ON_CPU));
    of_gpus.flat_map(|shader| constants(shader).into_iter().map(move |c| (*shader, c))).collect()
}

/// The shaders of attention for a cache of such a type: for single tokens, and for tiles.
fn attention_of(kv: KvDtype) -> [&'static Shader; 2] {
    match kv {
        KvDtype::F32 => [&shaders::ATTENTION_F32, &shaders::ATTENTION_TILE_F32],
        KvDtype::F16 => [&shaders::ATTENTION_F16, &shaders::ATTENTION_TILE_F16],
        KvDtype::Int8 => [&shaders::ATTENTION_INT8, &shaders::ATTENTION_TILE_INT8],
    }
}

/// A team of single tokens has the query heads of one, one of tiles a share of those of several.
fn attention_constants(shader: &Shader, group: usize, head_dim: usize) -> Vec<u32> {
    let rows = if shader.name.starts_with("attention_tile") { attention::TILE_ROWS } else { group };
    [group, head_dim, rows].map(|n| n as u32).to_vec()
}

/// f32 activations `[rows, width]`, rows `stride` elements apart.
#[derive(Clone)]
pub struct Activations {
    pub buffer: Buffer,
    pub width: usize,
    pub stride: usize,
}

impl Activations {
    /// Elements from row to row: rows of vec4s.
    pub const fn stride_of(width: usize) -> usize {
        width.next_multiple_of(4)
    }

    pub const fn bytes(rows: usize, width: usize) -> u64 {
        (rows * Self::stride_of(width) * 4) as u64
    }

    pub fn new(buffer: Buffer, width: usize) -> Activations {
        Activations { buffer, width, stride: Self::stride_of(width) }
    }

    /// Some of its rows.
    pub fn rows(&self, rows: &Range<usize>) -> Activations {
        let buffer =
            self.buffer.slice(Self::bytes(rows.start, self.width), Self::bytes(rows.len(), self.width));
        Activations { buffer, ..*self }
    }

    /// The memory of the first `rows` rows; panics where it has fewer, or another width.
    fn used(&self, rows: usize, width: usize, what: &str) -> Buffer {
        assert_eq!(self.width, width, "{what}: width");
        words(&self.buffer, rows * self.stride, what)
    }
}

/// One layer's share of the paged KV cache: `[block][kv_head][token in block][head_dim]`, keys and values, in the type
/// that [`Kernels`] was made for (`shaders/common/kv.glsl`).
#[derive(Clone)]
pub struct KvCache {
    pub keys: Buffer,
    pub values: Buffer,
}

/// Shape of attention in one layer.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    /// Multiple of 4, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Block table entries per sequence.
    pub max_blocks: usize,
    /// Keys a token sees, itself included; `None`: all.
    pub window: Option<usize>,
}

/// The factors of an RMSNorm, `1 + w`: f32 `[width]`; and what keeps its root from 0.
#[derive(Clone)]
pub struct RmsNorm {
    pub weight: Buffer,
    pub eps: f32,
}

/// What attention in one layer is made of, beside its matrices.
pub struct Attention {
    pub shape: AttentionShape,
    pub q_norm: RmsNorm,
    pub k_norm: RmsNorm,
    /// f32 `[max position][head_dim / 2][cos, sin]`
    pub rope: Buffer,
    /// Of queries, once they are normed and turned.
    pub q_scale: f32,
    pub cache: KvCache,
}

/// Rows of logits, and what draws change of them.
#[derive(Clone)]
pub struct Logits {
    pub raw: Activations,
    /// u32 of the same shape (`shaders/common/draws.glsl`).
    pub adjusted: Activations,
    /// What the kernels of a draw leave for the next one: u32 `[rows]`[`[draw_words]`](draw_words) of the logits' width.
    pub scratch: Activations,
    /// Ids from here up are never drawn.
    pub vocab: usize,
}

/// Words that a draw needs for each row of so many logits.
pub const fn draw_words(vocab: usize) -> usize {
    let chunks = vocab.div_ceil(DRAW_CHUNK);
    (4 + 4 + LOGPROB_PART) * chunks + 3 * DRAW_LIST + DRAW_TALLIES + 3 * DRAW_BINS
}

/// [`Logits::scratch`] as the kernels that draw from so many rows see it (`shaders/sample.comp`, `shaders/logprobs.comp`).
#[doc(hidden)]
pub struct DrawScratch {
    pub maxima: Buffer,
    pub found: Buffer,
    /// First word of `found` that is a tally.
    tallies: u32,
    /// `[rows][3][DRAW_BINS]`
    pub bins: Buffer,
    /// What must be 0 before: the tallies and the bins.
    cleared: Buffer,
    parts: Buffer,
    chunks: u32,
}

impl DrawScratch {
    pub fn of(logits: &Logits, rows: usize) -> DrawScratch {
        let Logits { raw, scratch, vocab, .. } = logits;
        assert!(*vocab > 0 && *vocab <= raw.width, "draws from {vocab} ids");
        let chunks = vocab.div_ceil(DRAW_CHUNK);
        assert!(chunks <= MOST_CHUNKS, "draws from {vocab} ids, {} at most", MOST_CHUNKS * DRAW_CHUNK);
        let all = scratch.used(rows, draw_words(raw.width), "draws: scratch");
        let lists = 4 * chunks + 3 * DRAW_LIST;
        let mut offset = 0;
        let sizes = [4 * chunks, lists, DRAW_TALLIES, 3 * DRAW_BINS, LOGPROB_PART * chunks];
        let [maxima, found, tallies, bins, parts] = sizes.map(|words| {
            let bytes = 4 * (rows * words) as u64;
            offset += bytes;
            all.slice(offset - bytes, bytes)
        });
        // Parts that are next to each other.
        let both = |a: &Buffer, b: &Buffer| all.slice(a.address() - all.address(), a.size() + b.size());
        DrawScratch {
            cleared: both(&tallies, &bins),
            found: both(&found, &tallies),
            tallies: (rows * lists) as u32,
            maxima,
            bins,
            parts,
            chunks: chunks as u32,
        }
    }
}

/// Per-token arrays of a step, on the device.
#[derive(Clone)]
pub struct StepArrays {
    /// u32 `[tokens]`: id, or [`LAST_SAMPLED`] + slot.
    pub ids: Buffer,
    /// u32 `[tokens]`
    pub positions: Buffer,
    /// u32 `[tokens]`: row of `block_tables`.
    pub sequence_of: Buffer,
    /// u32 `[tokens]`: block * block_size + token in block.
    pub slot_mapping: Buffer,
    /// u32 `[sequences][max_blocks]`
    pub block_tables: Buffer,
    pub shares: ShareArrays,
}

/// [`Shares`] on the device: those of a whole step, or of some of its rows.
#[derive(Clone)]
pub struct ShareArrays {
    /// [`Item`]; none where there can be none.
    pub single: Option<Buffer>,
    pub tiles: Option<Buffer>,
    /// Three u32 for single tokens, and three for tiles: their workgroups, read when they run.
    pub groups: Buffer,
    /// u32 `[tokens][2]`
    pub merges: Buffer,
}

/// Where attention leaves what it merges: f32 `[slots]` of [`partial_width`].
#[derive(Clone)]
pub struct Partials {
    pub single: Activations,
    pub tiles: Activations,
}

impl StepArrays {
    /// Those of a part of the tokens, which is the `index`th.
    pub fn part(&self, part: &Part, index: usize) -> StepArrays {
        let rows = &part.rows;
        let some = |array: &Buffer| array.slice(4 * rows.start as u64, 4 * rows.len() as u64);
        let items = |items: &Option<Buffer>, some: &Range<usize>| {
            let bytes = |n: usize| (n * size_of::<Item>()) as u64;
            // Where there are none, nobody reads them.
            let some = if some.is_empty() { 0..1 } else { some.clone() };
            items.as_ref().map(|items| items.slice(bytes(some.start), bytes(some.len())))
        };
        let ShareArrays { single, tiles, groups, merges } = &self.shares;
        let groups_bytes = 2 * INDIRECT_BYTES;
        StepArrays {
            ids: some(&self.ids),
            positions: some(&self.positions),
            sequence_of: some(&self.sequence_of),
            slot_mapping: some(&self.slot_mapping),
            block_tables: self.block_tables.clone(),
            shares: ShareArrays {
                single: items(single, &part.single),
                tiles: items(tiles, &part.tiles),
                groups: groups.slice((1 + index as u64) * groups_bytes, groups_bytes),
                merges: merges.slice(8 * rows.start as u64, 8 * rows.len() as u64),
            },
        }
    }
}

/// One row's parameters as the shaders read them that draw (`shaders/common/draws.glsl`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SampleRequest {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub seed_low: u32,
    pub seed_high: u32,
    pub position: u32,
    pub slot: u32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Row of the history, ids of it that are penalized, and how many of these are the prompt's; no ids: no penalties.
    pub history_slot: u32,
    pub history_len: u32,
    pub prompt_len: u32,
    /// Its pairs of [`DrawArrays::bias`], no id twice.
    pub first_bias: u32,
    pub biases: u32,
    /// One more than the row of [`DrawArrays::masks`]; 0: every id may come.
    pub mask: u32,
    /// One more than the alternatives that are reported, at most [`MAX_LOGPROBS`]; 0: no log probabilities.
    pub logprobs: u32,
}

impl SampleRequest {
    /// Ids, with repetitions, whose logits are changed.
    fn changes(&self) -> u32 {
        self.history_len.max(self.biases)
    }

    /// Whether it is not the highest logit that is drawn; and whether what is left of the others takes more than a look at
    /// each.
    fn draws(&self) -> bool {
        self.temperature > 0.0
    }

    fn filters(&self, vocab: usize) -> bool {
        self.draws() && ((self.top_k > 0 && (self.top_k as usize) < vocab) || self.top_p < 1.0)
    }
}

/// What is added to the logit of an id; negative infinity forbids it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Bias {
    pub id: u32,
    pub bias: f32,
}

/// What the draws of a step take, and what comes of them.
#[derive(Clone)]
pub struct DrawArrays {
    /// [`SampleRequest`] `[rows]`
    pub requests: Buffer,
    /// [`Bias`] `[..]`
    pub bias: Buffer,
    /// u32 `[..][mask_words]`, of [`mask_words`] of the vocabulary: a bit for each id that may come.
    pub masks: Buffer,
    /// u32 `[rows]`: the ids drawn.
    pub ids: Buffer,
    /// `[rows][LOGPROB_WORDS]`: f32 of the id; pairs of u32 id and f32.
    pub logprobs: Buffer,
}

impl DrawArrays {
    fn requests_of(&self, rows: usize) -> Buffer {
        let bytes = (rows * size_of::<SampleRequest>()) as u64;
        assert!(self.requests.size() >= bytes, "{rows} requests do not fit");
        self.requests.slice(0, bytes)
    }
}

/// The ids of each slot's sequence, by position: u32 `[slots][slot_len]`.
#[derive(Clone)]
pub struct History {
    pub ids: Buffer,
    pub slot_len: usize,
}

/// Words of a mask of `vocab` ids.
pub const fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// What attention is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads per KV head, at most [`MAX_GROUP`].
    pub group: usize,
    /// Multiple of 4, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// How the cache holds keys and values.
    pub kv: KvDtype,
}

/// What a model's matrices are.
#[derive(Debug, Clone, Default)]
pub struct Matrices {
    /// Schemes of them, in any order, as often as they come.
    pub products: Vec<Scheme>,
    /// Those of them whose products may be the two that GeGLU takes.
    pub gated: Vec<Scheme>,
    /// That of the embedding, which is multiplied with too.
    pub embedding: Option<Scheme>,
    /// How products are shared out, where that is not as the device has it.
    pub tiles: Option<Tiles>,
}

/// A kernel whose result goes to f32, to int8, or to both.
struct Into {
    floats: Arc<Pipeline>,
    blocks: Arc<Pipeline>,
    both: Arc<Pipeline>,
}

impl Into {
    fn new(device: &Device, tiles: Tiles, shaders: [&'static Shader; 3]) -> Result<Into, GpuError> {
        let [floats, blocks, both] = shaders.map(|shader| device.pipeline(tiles.body_of(shader), &[]));
        Ok(Into { floats: floats?, blocks: blocks?, both: both? })
    }

    fn pipeline(&self, to: &Operand) -> &Pipeline {
        match (&to.floats, &to.blocks) {
            (_, None) => &self.floats,
            (None, Some(_)) => &self.blocks,
            (Some(_), Some(_)) => &self.both,
        }
    }
}

/// Every pipeline a model needs, compiled.
pub struct Kernels {
    precision: Precision,
    products: Products,
    /// For embeddings of such a scheme.
    embed: Option<(Scheme, Arc<Pipeline>)>,
    quantize: Arc<Pipeline>,
    rms_norm: Into,
    rms_norm_add: Arc<Pipeline>,
    rms_norm_gather: Into,
    residual: Into,
    qkv_store: Arc<Pipeline>,
    attention: Arc<Pipeline>,
    attention_tile: Arc<Pipeline>,
    attention_merge: Into,
    heads: Heads,
    geglu: Into,
    moments: Arc<Pipeline>,
    pool: Arc<Pipeline>,
    history: Arc<Pipeline>,
    adjust: [Arc<Pipeline>; 3],
    adjust_clear: Arc<Pipeline>,
    sample: SamplePipelines,
    logprobs: [Arc<Pipeline>; 2],
}

struct SamplePipelines {
    maxima: Arc<Pipeline>,
    masses: Arc<Pipeline>,
    draw: Arc<Pipeline>,
    choice: Arc<Pipeline>,
    greedy: Arc<Pipeline>,
}

impl Kernels {
    /// Compiles the kernels for such matrices, multiplied in such a precision, and for attention of such heads.
    pub fn new(
        device: &Device,
        matrices: &Matrices,
        heads: Heads,
        precision: Precision,
    ) -> Result<Kernels, GpuError> {
        let Heads { group, head_dim, kv } = heads;
        assert!(group <= MAX_GROUP && head_dim <= MAX_HEAD_DIM && head_dim.is_multiple_of(4));
        let embed = matrices.embedding.map(|scheme| {
            let pipeline = device.pipeline(shaders_of(scheme).1, &[])?;
            Ok::<_, GpuError>((scheme, pipeline))
        });
        let qkv_store = match kv {
            KvDtype::F32 => &shaders::QKV_STORE_F32,
            KvDtype::F16 => &shaders::QKV_STORE_F16,
            KvDtype::Int8 => &shaders::QKV_STORE_INT8,
        };
        let [attention, attention_tile] = attention_of(kv)
            .map(|shader| device.pipeline(shader, &attention_constants(shader, group, head_dim)));
        let tiles = matrices.tiles.unwrap_or_else(|| Tiles::of(device));
        let into = |shaders: [&'static Shader; 3]| Into::new(device, tiles, shaders);
        let one = |shader: &'static Shader| device.pipeline(tiles.body_of(shader), &[]);
        Ok(Kernels {
            precision,
            products: Products::new(device, matrices, tiles, precision)?,
            embed: embed.transpose()?,
            quantize: one(&shaders::QUANTIZE)?,
            rms_norm: into([&shaders::RMS_NORM, &shaders::RMS_NORM_INT8, &shaders::RMS_NORM_BOTH])?,
            rms_norm_add: one(&shaders::RMS_NORM_ADD)?,
            rms_norm_gather: into([
                &shaders::RMS_NORM_GATHER,
                &shaders::RMS_NORM_GATHER_INT8,
                &shaders::RMS_NORM_GATHER_BOTH,
            ])?,
            residual: into([
                &shaders::RMS_NORM_RESIDUAL,
                &shaders::RMS_NORM_RESIDUAL_INT8,
                &shaders::RMS_NORM_RESIDUAL_BOTH,
            ])?,
            qkv_store: one(qkv_store)?,
            attention: attention?,
            attention_tile: attention_tile?,
            attention_merge: into([
                &shaders::ATTENTION_MERGE,
                &shaders::ATTENTION_MERGE_INT8,
                &shaders::ATTENTION_MERGE_BOTH,
            ])?,
            heads,
            geglu: into([&shaders::GEGLU, &shaders::GEGLU_INT8, &shaders::GEGLU_BOTH])?,
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

    /// In what the matrices want what they are multiplied with.
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

    /// `out[t] = embedding[ids[t]] * scale` for `tokens` tokens; `sampled` holds each slot's last id;
    /// beyond the last row, that one is taken.
    pub fn embed(
        &self,
        recorder: &mut Recorder<'_>,
        embedding: &Embedding,
        ids: &Buffer,
        sampled: &Buffer,
        out: &Activations,
        tokens: usize,
    ) {
        let Embedding { matrix, table, scale } = embedding;
        let (made, pipeline) = self.embed.as_ref().expect("embed: made for lookup");
        assert!(made.shares_variant(matrix.scheme), "embed: {}, made for {made}", matrix.scheme);
        let shards = matrix.shards.iter().flat_map(|shard| [Some(&shard.blocks), shard.scales.as_ref()]);
        let arguments = shaders::Embed {
            shards: table,
            ids: &words(ids, tokens, "embed: ids"),
            sampled,
            embedded: &out.used(tokens, matrix.cols, "embed: out"),
            rows_per_shard: matrix.rows_per_shard as u32,
            rows: matrix.rows as u32,
            cols: matrix.cols as u32,
            out_stride: out.stride as u32,
            blocks_per_scale: matrix.scheme.blocks_per_scale() as u32,
            scale: *scale,
            followed: &shards.flatten().collect::<Vec<_>>(),
        };
        recorder.dispatch(pipeline, &arguments, [tokens as u32, 1, 1]);
    }

    /// `y[t] = W x[t]` for `tokens` rows of `x`, of each matrix; those that one dispatch can take go together. `x` is what
    /// [`Kernels::wants`] says.
    pub fn matmul(
        &self,
        recorder: &mut Recorder<'_>,
        products: &[(&Matrix, &Activations)],
        x: &Operand,
        tokens: usize,
    ) {
        self.products.record(recorder, products, x, tokens);
    }

    /// `y[t] = gelu_tanh(gate x[t]) * (up x[t])` for `tokens` rows of `x`, by way of `products` where one kernel cannot do it.
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
        self.matmul(recorder, &[(gate, products[0]), (up, products[1])], x, tokens);
        self.geglu(recorder, products[0], products[1], y, tokens);
    }

    /// `y = x`, quantized.
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

    /// `y[t] = norm(x[t])`
    pub fn rms_norm(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        norm: &RmsNorm,
        y: &Operand,
        rows: usize,
    ) {
        let pipeline = self.rms_norm.pipeline(y);
        normalize(recorder, pipeline, (x, rows, None), norm, None, (Some(y), rows));
    }

    /// `hidden[t] += norm(x[t])`
    pub fn rms_norm_add(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        norm: &RmsNorm,
        hidden: &Activations,
        rows: usize,
    ) {
        let all = (hidden, None);
        normalize(recorder, &self.rms_norm_add, (x, rows, None), norm, Some(all), (None, rows));
    }

    /// `hidden[t] += norm(x[t])`, and `y[t] = next_norm(hidden[t])`
    #[rustfmt::skip]
    pub fn residual(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        norm: &RmsNorm,
        (hidden, next_norm): (&Activations, &RmsNorm),
        y: &Operand,
        rows: usize,
    ) {
        let (pipeline, all) = (self.residual.pipeline(y), (hidden, Some(next_norm)));
        normalize(recorder, pipeline, (x, rows, None), norm, Some(all), (Some(y), rows));
    }

    /// `y[i] = norm(x[index[i]])` for `rows` entries of `index`, each a row of `x`.
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
        normalize(recorder, pipeline, (x, all, Some(&index)), norm, None, (Some(y), rows));
    }

    /// QK-norm and RoPE of `q` (in place, times its scale) and `k`, and the store of `k` and `v` in the cache.
    pub fn qkv_store(
        &self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        [q, k, v]: [&Activations; 3],
        step: &StepArrays,
        tokens: usize,
    ) {
        let Attention { shape, q_norm, k_norm, rope, q_scale, cache } = attention;
        self.check_heads(shape);
        assert!(q_norm.eps == k_norm.eps, "qkv_store: one eps");
        let [q_width, kv_width] = [shape.num_heads, shape.num_kv_heads].map(|heads| heads * shape.head_dim);
        let arguments = shaders::QkvStore {
            q: &q.used(tokens, q_width, "qkv_store: q"),
            k: &k.used(tokens, kv_width, "qkv_store: k"),
            v: &v.used(tokens, kv_width, "qkv_store: v"),
            q_norm: &words(&q_norm.weight, shape.head_dim, "qkv_store: q_norm"),
            k_norm: &words(&k_norm.weight, shape.head_dim, "qkv_store: k_norm"),
            rope,
            positions: &words(&step.positions, tokens, "qkv_store: positions"),
            slot_mapping: &words(&step.slot_mapping, tokens, "qkv_store: slot_mapping"),
            k_cache: &cache.keys,
            v_cache: &cache.values,
            num_heads: shape.num_heads as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            block_size: shape.block_size as u32,
            eps: q_norm.eps,
            q_scale: *q_scale,
        };
        let groups = [tokens as u32, (shape.num_heads + 2 * shape.num_kv_heads) as u32, 1];
        recorder.dispatch(&self.qkv_store, &arguments, groups);
    }

    /// `y[t] = softmax(q[t] K) V` over what the token may see of its sequence's cached keys, for `tokens` tokens, 0 for one of
    /// nobody. Items name rows of `q`.
    pub fn attention(
        &self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        (q, partials): (&Activations, &Partials),
        step: &StepArrays,
        y: &Operand,
        tokens: usize,
    ) {
        let Attention { shape, cache, .. } = attention;
        let ShareArrays { single, tiles, groups, .. } = &step.shares;
        self.check_heads(shape);
        assert_eq!(q.width, shape.num_heads * shape.head_dim, "attention: q");
        let kinds =
            [(single, &partials.single, &self.attention), (tiles, &partials.tiles, &self.attention_tile)];
        for (kind, (items, partials, pipeline)) in (0..).zip(kinds) {
            let Some(items) = items else { continue };
            assert_eq!(partials.width, shape.partial_width(), "attention: partials");
            let arguments = shaders::Attention {
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
            };
            let groups = groups.slice(kind * INDIRECT_BYTES, INDIRECT_BYTES);
            recorder.dispatch_indirect(pipeline, &arguments, &groups);
        }
        self.attention_merge(recorder, shape, step, partials, y, tokens);
    }

    /// What the partials of each token come to.
    fn attention_merge(
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

    fn check_heads(&self, shape: &AttentionShape) {
        assert_eq!(shape.num_heads, shape.num_kv_heads * self.heads.group, "query heads per KV head");
        assert_eq!(shape.head_dim, self.heads.head_dim, "head_dim");
    }

    /// `y = gelu_tanh(gate) * up`; where that is wanted in f32, it is so in the memory of `gate`.
    pub fn geglu(
        &self,
        recorder: &mut Recorder<'_>,
        gate: &Activations,
        up: &Activations,
        y: &Operand,
        rows: usize,
    ) {
        let input = gate.used(rows, up.width, "geglu: gate");
        if let Some(floats) = &y.floats {
            assert_eq!(floats.buffer.address(), gate.buffer.address(), "geglu: in place");
        }
        let to = y.blocks.as_ref().map(|blocks| blocks.planes(rows, up.width, "geglu: y"));
        let arguments = shaders::Geglu {
            gate: &input,
            up: &up.used(rows, gate.width, "geglu: up"),
            blocks: to.as_ref().map(|to| &to.blocks),
            scales: to.as_ref().map(|to| &to.scales),
            width: gate.width as u32,
            stride: gate.stride as u32,
            padded: to.as_ref().map_or(0, |to| to.stride),
        };
        recorder.dispatch(self.geglu.pipeline(y), &arguments, [fours(gate.width), rows as u32, 1]);
    }

    /// `sums[c] += sum of x[t, c]^2` over `tokens` rows: f32, one for each column.
    pub fn moments(&self, recorder: &mut Recorder<'_>, x: &Activations, sums: &Buffer, tokens: usize) {
        let arguments = shaders::Moments {
            x: &x.used(tokens, x.width, "moments: x"),
            sums: &words(sums, x.width, "moments: sums"),
            tokens: tokens as u32,
            width: x.width as u32,
            x_stride: x.stride as u32,
        };
        recorder.dispatch(&self.moments, &arguments, [(x.width as u32).div_ceil(64), 1, 1]);
    }

    /// Adds the `tokens` rows of `x` to the one row of `sums`, or, where that is `fresh`, makes them what it is.
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

    /// Writes the ids of `tokens` tokens where the history has their sequences; `slots`: u32 by entry of
    /// [`StepArrays::sequence_of`].
    pub fn history(
        &self,
        recorder: &mut Recorder<'_>,
        step: &StepArrays,
        slots: &Buffer,
        sampled: &Buffer,
        history: &History,
        tokens: usize,
    ) {
        let arguments = shaders::History {
            ids: &words(&step.ids, tokens, "history: ids"),
            sampled,
            positions: &words(&step.positions, tokens, "history: positions"),
            sequence_of: &words(&step.sequence_of, tokens, "history: sequence_of"),
            slots,
            history: &history.ids,
            tokens: tokens as u32,
            slot_len: history.slot_len as u32,
        };
        recorder.dispatch(&self.history, &arguments, [(tokens as u32).div_ceil(64), 1, 1]);
    }

    /// Writes what penalties and biases make of some of the logits to [`Logits::adjusted`], all of whose words are 0;
    /// [`Kernels::clear_adjusted`] makes them so again. `requests`: what [`DrawArrays::requests`] holds. Nothing is recorded
    /// where none of them changes anything.
    pub fn adjust(
        &self,
        recorder: &mut Recorder<'_>,
        logits: &Logits,
        draws: &DrawArrays,
        history: &History,
        requests: &[SampleRequest],
    ) {
        let [count, penalize, bias] = &self.adjust;
        if requests.iter().any(|request| request.history_len > 0) {
            self.adjust_by(recorder, count, logits, draws, history, requests);
            self.adjust_by(recorder, penalize, logits, draws, history, requests);
        }
        if requests.iter().any(|request| request.biases > 0) {
            self.adjust_by(recorder, bias, logits, draws, history, requests);
        }
    }

    /// Takes back what [`Kernels::adjust`] did.
    pub fn clear_adjusted(
        &self,
        recorder: &mut Recorder<'_>,
        logits: &Logits,
        draws: &DrawArrays,
        history: &History,
        requests: &[SampleRequest],
    ) {
        if requests.iter().any(|request| request.changes() > 0) {
            self.adjust_by(recorder, &self.adjust_clear, logits, draws, history, requests);
        }
    }

    fn adjust_by(
        &self,
        recorder: &mut Recorder<'_>,
        pipeline: &Pipeline,
        logits: &Logits,
        draws: &DrawArrays,
        history: &History,
        requests: &[SampleRequest],
    ) {
        let (rows, Logits { raw, adjusted, .. }) = (requests.len(), logits);
        for request in requests {
            let bytes = (request.first_bias + request.biases) as usize * size_of::<Bias>();
            assert!(draws.bias.size() >= bytes as u64, "adjust: bias");
            assert!(request.history_len as usize <= history.slot_len, "adjust: history");
        }
        let arguments = shaders::Adjust {
            logits: Some(&raw.used(rows, adjusted.width, "adjust: logits")),
            adjusted: &adjusted.used(rows, raw.width, "adjust: adjusted"),
            requests: &draws.requests_of(rows),
            history: Some(&history.ids),
            bias: Some(&draws.bias),
            stride: raw.stride as u32,
            slot_len: history.slot_len as u32,
        };
        let most = requests.iter().map(SampleRequest::changes).max().unwrap_or(0);
        recorder.dispatch(pipeline, &arguments, [most.div_ceil(256).clamp(1, 64), rows as u32, 1]);
    }

    /// Draws a token for each row of logits, with what [`Kernels::adjust`] made of them: `ids[row]`, and `sampled[slot]`.
    /// `requests`: what [`DrawArrays::requests`] holds. Only kernels that one of them needs are recorded: one pass over the
    /// logits where all are greedy, two where none has top_k or top_p, else three.
    pub fn sample(
        &self,
        recorder: &mut Recorder<'_>,
        logits: &Logits,
        draws: &DrawArrays,
        sampled: &Buffer,
        requests: &[SampleRequest],
    ) {
        let (rows, Logits { raw, adjusted, vocab, .. }) = (requests.len(), logits);
        let DrawScratch { maxima, found, tallies, bins, cleared, chunks, .. } = DrawScratch::of(logits, rows);
        let arguments = shaders::Sample {
            logits: Some(&raw.used(rows, raw.width, "sample: logits")),
            adjusted: Some(&adjusted.used(rows, raw.width, "sample: adjusted")),
            masks: Some(&draws.masks),
            requests: &draws.requests_of(rows),
            maxima: &maxima,
            bins: Some(&bins),
            found: Some(&found),
            ids: Some(&words(&draws.ids, rows, "sample: ids")),
            sampled: Some(sampled),
            vocab: *vocab as u32,
            logits_stride: raw.stride as u32,
            mask_words: mask_words(raw.width) as u32,
            tallies,
        };
        let (of_chunks, of_rows) = ([chunks, rows as u32, 1], [rows as u32, 1, 1]);
        let filters = requests.iter().any(|request| request.filters(*vocab));
        if filters {
            // Beside the first kernel, which does not touch them.
            recorder.fill(&cleared, 0);
        }
        recorder.dispatch(&self.sample.maxima, &arguments, of_chunks);
        if !requests.iter().any(SampleRequest::draws) {
            recorder.dispatch(&self.sample.greedy, &arguments, of_rows);
            return;
        }
        if filters {
            recorder.dispatch(&self.sample.masses, &arguments, of_chunks);
        }
        recorder.dispatch(&self.sample.draw, &arguments, of_chunks);
        recorder.dispatch(&self.sample.choice, &arguments, of_rows);
    }

    /// Log probabilities, by the raw logits, of the ids that were drawn, and of the most likely ones, for the rows whose
    /// requests want them.
    pub fn logprobs(&self, recorder: &mut Recorder<'_>, logits: &Logits, draws: &DrawArrays, rows: usize) {
        let Logits { raw, vocab, .. } = logits;
        let DrawScratch { parts, chunks, .. } = DrawScratch::of(logits, rows);
        let arguments = shaders::Logprobs {
            logits: &raw.used(rows, raw.width, "logprobs: logits"),
            requests: &draws.requests_of(rows),
            ids: Some(&words(&draws.ids, rows, "logprobs: ids")),
            parts: &parts,
            result: Some(&words(&draws.logprobs, rows * LOGPROB_WORDS, "logprobs: result")),
            vocab: *vocab as u32,
            logits_stride: raw.stride as u32,
            out_stride: LOGPROB_WORDS as u32,
        };
        let [of_chunks, merge] = &self.logprobs;
        recorder.dispatch(of_chunks, &arguments, [chunks, rows as u32, 1]);
        recorder.dispatch(merge, &arguments, [rows as u32, 1, 1]);
    }
}

/// Workgroups of 256 invocations that take four columns each.
fn fours(width: usize) -> u32 {
    width.div_ceil(1024) as u32
}

/// What all of the norm's variants do: `hidden`, and the norm behind it, where there are such; `y`, where there is one.
fn normalize(
    recorder: &mut Recorder<'_>,
    pipeline: &Pipeline,
    (x, x_rows, index): (&Activations, usize, Option<&Buffer>),
    norm: &RmsNorm,
    added: Option<(&Activations, Option<&RmsNorm>)>,
    (y, rows): (Option<&Operand>, usize),
) {
    let (hidden, next) = (added.map(|(hidden, _)| hidden), added.and_then(|(_, next)| next));
    let floats = y.and_then(|y| y.floats.as_ref());
    let blocks = y.and_then(|y| y.blocks.as_ref());
    let planes = blocks.map(|blocks| blocks.planes(rows, x.width, "rms_norm: y"));
    let weight = |norm: &RmsNorm| words(&norm.weight, x.width, "rms_norm: weight");
    let next_weight = next.map(weight);
    let [hidden_rows, float_rows] =
        [(hidden, "hidden"), (floats, "y")].map(|(to, name)| to.map(|to| to.used(rows, x.width, name)));
    let arguments = shaders::RmsNorm {
        x: &x.used(x_rows, x.width, "rms_norm: x"),
        weight: &weight(norm),
        next_weight: next_weight.as_ref(),
        hidden: hidden_rows.as_ref(),
        y: float_rows.as_ref(),
        blocks: planes.as_ref().map(|to| &to.blocks),
        scales: planes.as_ref().map(|to| &to.scales),
        rows: index,
        dim: x.width as u32,
        x_stride: x.stride as u32,
        // Both are as wide as x.
        y_stride: x.stride as u32,
        padded: planes.as_ref().map_or(0, |to| to.stride),
        eps: norm.eps,
        next_eps: next.map_or(0.0, |next| next.eps),
    };
    recorder.dispatch(pipeline, &arguments, [rows as u32, 1, 1]);
}

/// The first `count` 32-bit words of a buffer; panics where it has fewer.
fn words(buffer: &Buffer, count: usize, what: &str) -> Buffer {
    assert!(buffer.size() >= 4 * count as u64, "{what}: {count} words do not fit");
    buffer.slice(0, 4 * count as u64)
}

/// The shaders for matrices of a scheme: products, and rows looked up by id.
fn shaders_of(scheme: Scheme) -> (&'static Shader, &'static Shader) {
    (shader_of("matmul", scheme), shader_of("embed", scheme))
}

/// The variant of a kernel for weights of a scheme.
fn shader_of(kernel: &str, scheme: Scheme) -> &'static Shader {
    shader_named(&format!("{kernel}_{}", scheme.variant()))
}

fn shader_named(name: &str) -> &'static Shader {
    let found = shaders::ALL.iter().find(|shader| shader.name == name);
    found.unwrap_or_else(|| panic!("there is no kernel {name}"))
}
