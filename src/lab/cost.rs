//! The theoretical cost of a dispatch: workgroups, trips of its steady loop, bytes. There is one function for each
//! method of [`Kernels`](crate::kernels::Kernels). `unicorn-lab isa` uses them, because it has a compiler but no GPU.
//!
//! Bytes are the bytes that a dispatch reads from memory or writes to it. No caching is assumed, except where a
//! function says so. A trip is a trip of the loop in the shader's source. If a compiler unrolls the loop,
//! [`Body::unrolled`] says how often.

use std::collections::BTreeMap;
use std::ops::Range;

use super::assembly::{Counts, Program};
use crate::gpu::Shader;
use crate::kernels::expert_kernels::route_constants;
use crate::kernels::operand::{BLOCK_COLS, Passes, SUBGROUP_ROW_TILES, expert_tile, fast_shader_of, taking};
use crate::kernels::sampling::{DRAW_BINS, DRAW_CHUNK};
use crate::kernels::shaders::{self, shaders_of};
use crate::kernels::{
    Activations, AttentionShape, Experts, GpuTiles, HiddenAct, Item, LayerKind, ProductKind, Quantized,
    Tiles, Wants, Way,
};
use crate::model::spec::AttentionHeads;
use crate::tensor::{KvDtype, Precision, Scheme, TILE_ROWS};

/// Splits of a product's columns over a workgroup (`shaders/matmul.comp`).
const SPLITS: usize = 4;
/// Keys of one tile of attention (`shaders/attention.comp`).
pub const KEYS: usize = 64;

/// The keys among the bytes that attention reads. In one trip, each lane of a workgroup reads a key of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Keys {
    /// Bytes of all keys.
    pub bytes: u64,
    /// Bytes of one key of one head.
    pub row_bytes: u64,
    /// Bytes of a key that are stored together (`shaders/common/kv.glsl`). The units of the tokens of a block follow
    /// one another.
    pub unit_bytes: u64,
}

/// The cost of a dispatch.
#[derive(Debug, Clone)]
pub struct Dispatch {
    pub shader: &'static Shader,
    pub constants: Vec<u32>,
    pub workgroups: u64,
    /// Trips of the steady loop, averaged over the workgroups.
    pub trips: f64,
    /// Bytes of weights, and how often the grid reads all of them. Adjacent workgroups share a read.
    pub weight_bytes: u64,
    pub weight_passes: u64,
    pub kv_bytes: u64,
    pub keys: Keys,
    pub activation_bytes: u64,
}

impl Dispatch {
    /// Whether another dispatch has the same pipeline and the same cost.
    pub fn costs(&self, other: &Dispatch) -> bool {
        let figures = |d: &Dispatch| {
            (d.workgroups, d.trips, d.weight_bytes, d.weight_passes, d.kv_bytes, d.activation_bytes)
        };
        (self.shader.name, &self.constants) == (other.shader.name, &other.constants)
            && figures(self) == figures(other)
    }

    fn new(shader: &'static Shader, workgroups: usize) -> Dispatch {
        Dispatch {
            shader,
            constants: Vec::new(),
            workgroups: workgroups as u64,
            trips: 1.0,
            weight_bytes: 0,
            weight_passes: 1,
            kv_bytes: 0,
            keys: Keys::default(),
            activation_bytes: 0,
        }
    }
}

/// Bytes of `n` f32.
const fn floats(n: usize) -> u64 {
    4 * n as u64
}

pub fn embed(scheme: Scheme, cols: usize, tokens: usize) -> Dispatch {
    let row_bytes = (scheme.tile_bytes(cols) / TILE_ROWS + scheme.row_scale_bytes(cols)) as u64;
    Dispatch {
        trips: scheme.blocks_per_row(cols).div_ceil(64) as f64,
        weight_bytes: tokens as u64 * row_bytes,
        activation_bytes: floats(tokens * cols),
        ..Dispatch::new(shaders_of(scheme).1, tokens)
    }
}

/// The product of `tokens` rows with several matrices of `scheme` in one dispatch. `rows` has the number of rows of
/// each matrix. Weights are read once for each tile of tokens.
pub fn matmul(precision: Precision, scheme: Scheme, rows: &[usize], cols: usize, tokens: usize) -> Dispatch {
    let all: usize = rows.iter().sum();
    let tiles: usize = rows.iter().map(|rows| rows.div_ceil(TILE_ROWS)).sum();
    let bytes = |rows: &usize| scheme.bytes(*rows, cols);
    let weight_bytes = rows.iter().map(bytes).sum();
    if precision.quantizes(scheme) {
        let dispatch = fast(scheme, tiles, cols, tokens, None);
        let activation_bytes = dispatch.activation_bytes + floats(tokens * all);
        return Dispatch { weight_bytes, activation_bytes, ..dispatch };
    }
    let tile = taking(Tiles::COUNTED.floats(), tokens);
    let passes = Passes::of_f32(scheme, tiles as u32, cols, tokens, tile);
    Dispatch {
        constants: vec![tile.columns, 0],
        trips: scheme.blocks_per_row(cols).div_ceil(SPLITS) as f64,
        weight_bytes,
        weight_passes: passes.weight_reads.into(),
        activation_bytes: floats(tokens * all) + u64::from(passes.activation_reads) * floats(tokens * cols),
        ..Dispatch::new(shaders_of(scheme).0, tiles * tokens.div_ceil(tile.columns as usize))
    }
}

/// Two products with int8, and their gated product.
pub fn gated(scheme: Scheme, rows: usize, cols: usize, tokens: usize, activation: HiddenAct) -> Dispatch {
    let dispatch = fast(scheme, rows.div_ceil(TILE_ROWS), cols, tokens, Some(activation));
    Dispatch {
        weight_bytes: 2 * scheme.bytes(rows, cols),
        activation_bytes: dispatch.activation_bytes + Quantized::bytes_of_digit(tokens, rows),
        ..dispatch
    }
}

/// A product with int8, without the bytes of its weights and results.
fn fast(scheme: Scheme, tiles: usize, cols: usize, tokens: usize, gated: Option<HiddenAct>) -> Dispatch {
    let kind = if gated.is_some() { ProductKind::Gated } else { ProductKind::Plain };
    let (tile, way) = GpuTiles::COUNTED.taking(kind, tokens);
    let (shader, group) = fast_shader_of(scheme);
    let passes = Passes::of_int8(scheme, 1 + u32::from(gated.is_some()), tiles as u32, cols, tokens, tile);
    let workgroups = tiles * tokens.div_ceil(tile.columns as usize);
    Dispatch {
        constants: way.pipeline_of(shader, group, tile, gated, 0).1,
        trips: segment_blocks(cols) as f64,
        weight_passes: passes.weight_reads.into(),
        activation_bytes: u64::from(passes.activation_reads) * Quantized::bytes_of_digit(tokens, cols),
        ..Dispatch::new(shader, workgroups)
    }
}

/// The product of experts with one of their matrices, `[rows, cols]` each, or the gated product of two. The router is
/// assumed to choose every expert equally often, so the workgroups and the bytes are expected ones. Workgroups with
/// the same weights are neighbours, so each expert in use is read once.
pub fn experts(
    precision: Precision,
    scheme: Scheme,
    experts: &Experts,
    [rows, cols]: [usize; 2],
    tokens: usize,
    (gated, grouped): (Option<HiddenAct>, u32),
) -> Dispatch {
    let tile = expert_tile(Tiles::COUNTED.floats(), experts, tokens);
    let items = experts.expected_items(tokens, tile.columns as usize);
    let workgroups = (items * f64::from(tile.parts(rows))).round() as usize;
    let pairs = experts.pairs(tokens);
    let matrices = if gated.is_some() { 2.0 } else { 1.0 };
    let of_one = scheme.bytes(rows, cols);
    let weight_bytes = (matrices * experts.expected(tokens) * of_one as f64) as u64;
    let written = if gated.is_some() { Quantized::bytes_of_digit(pairs, rows) } else { floats(pairs * rows) };
    if precision.quantizes(scheme) {
        let (shader, group) = fast_shader_of(scheme);
        return Dispatch {
            constants: Way::COUNTED.pipeline_of(shader, group, tile, gated, grouped).1,
            trips: segment_blocks(cols) as f64,
            weight_bytes,
            activation_bytes: Quantized::bytes_of_digit(pairs, cols) + written,
            ..Dispatch::new(shader, workgroups)
        };
    }
    Dispatch {
        constants: vec![tile.columns, grouped],
        trips: scheme.blocks_per_row(cols).div_ceil(SPLITS) as f64,
        weight_bytes,
        activation_bytes: floats(pairs * cols) + written,
        ..Dispatch::new(shaders_of(scheme).0, workgroups)
    }
}

/// The router of `tokens` rows of `dim` numbers.
pub fn route(experts: Experts, tokens: usize, dim: usize) -> Dispatch {
    Dispatch {
        constants: route_constants(experts).to_vec(),
        trips: dim as f64 / 1024.0,
        weight_bytes: floats(experts.count * dim + dim),
        activation_bytes: floats(2 * tokens * dim + 2 * experts.pairs(tokens)),
        ..Dispatch::new(&shaders::ROUTE, tokens)
    }
}

/// The groups of the pairs of `tokens` tokens. A trip is 256 pairs.
pub fn group_pairs(experts: Experts, tokens: usize) -> Dispatch {
    let pairs = experts.pairs(tokens);
    Dispatch {
        trips: pairs as f64 / 256.0,
        activation_bytes: floats(8 * pairs),
        ..Dispatch::new(&shaders::GROUP_PAIRS, 1)
    }
}

/// The sums of what the experts of `tokens` tokens computed, with two norms or without.
pub fn combine(experts: Experts, tokens: usize, dim: usize, is_normed: bool) -> Dispatch {
    let reads = if is_normed { 2 } else { 1 };
    Dispatch {
        constants: vec![is_normed.into()],
        trips: dim.div_ceil(1024) as f64,
        weight_bytes: if is_normed { floats(2 * dim) } else { 0 },
        activation_bytes: floats(reads * experts.pairs(tokens) * dim + 2 * tokens * dim),
        ..Dispatch::new(&shaders::COMBINE, tokens)
    }
}

/// Number of blocks of 32 columns that a subgroup computes in a product with int8 (`shaders/common/fast.glsl`).
fn segment_blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK_COLS).div_ceil(8).max(4)
}

/// Trips of the steady loop of a product with `cols` columns; `None` if the shader computes no product.
pub fn product_trips(shader: &Shader, cols: usize) -> Option<usize> {
    match shader.kernel {
        "matmul" => Some(cols.div_ceil(block_weights(shader) as usize).div_ceil(SPLITS)),
        "fast_matmul" if shader.name.ends_with("_in_tiles") => Some(cols.div_ceil(BLOCK_COLS)),
        "fast_matmul" => Some(segment_blocks(cols)),
        _ => None,
    }
}

/// The shader for `wants` among those that write f32, int8 or both, and the bytes that it writes.
fn into(wants: Wants, shaders: [&'static Shader; 3], rows: usize, width: usize) -> (&'static Shader, u64) {
    let shader = match wants {
        Wants { blocks: false, .. } => shaders[0],
        Wants { floats: false, .. } => shaders[1],
        _ => shaders[2],
    };
    let written = if wants.floats || !wants.blocks { floats(rows * width) } else { 0 };
    (shader, written + if wants.blocks { Quantized::bytes_of_digit(rows, width) } else { 0 })
}

fn norm(shader: &'static Shader, rows: usize, width: usize, norms: usize, activation_bytes: u64) -> Dispatch {
    Dispatch {
        trips: width.div_ceil(1024) as f64,
        weight_bytes: floats(norms * width),
        activation_bytes,
        ..Dispatch::new(shader, rows)
    }
}

pub fn rms_norm(rows: usize, width: usize, wants: Wants) -> Dispatch {
    let all = [&shaders::RMS_NORM, &shaders::RMS_NORM_INT8, &shaders::RMS_NORM_BOTH];
    let (shader, bytes) = into(wants, all, rows, width);
    norm(shader, rows, width, 1, floats(rows * width) + bytes)
}

pub fn rms_norm_gather(rows: usize, width: usize, wants: Wants) -> Dispatch {
    let all = [&shaders::RMS_NORM_GATHER, &shaders::RMS_NORM_GATHER_INT8, &shaders::RMS_NORM_GATHER_BOTH];
    let (shader, bytes) = into(wants, all, rows, width);
    norm(shader, rows, width, 1, floats(rows * width) + bytes)
}

pub fn rms_norm_add(rows: usize, width: usize, layers: LayerKind) -> Dispatch {
    let norms = usize::from(layers.has_post_norms);
    let dispatch = norm(&shaders::RMS_NORM_ADD, rows, width, norms, floats(3 * rows * width));
    Dispatch { constants: vec![norms as u32], ..dispatch }
}

/// With a second norm of the sum if `twice`.
pub fn residual(rows: usize, width: usize, wants: Wants, layers: LayerKind, twice: bool) -> Dispatch {
    let all =
        [&shaders::RMS_NORM_RESIDUAL, &shaders::RMS_NORM_RESIDUAL_INT8, &shaders::RMS_NORM_RESIDUAL_BOTH];
    let (shader, bytes) = into(wants, all, rows, width);
    let (norms, results) = (usize::from(layers.has_post_norms), 1 + usize::from(twice));
    let written = floats(3 * rows * width) + results as u64 * bytes;
    let constants = vec![norms as u32, twice.into()];
    Dispatch { constants, ..norm(shader, rows, width, norms + results, written) }
}

/// Heads of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub kv: KvDtype,
}

impl Heads {
    pub fn of(heads: &AttentionHeads, kv: KvDtype) -> Heads {
        let &AttentionHeads { num_attention_heads, num_key_value_heads, head_dim } = heads;
        Heads { num_heads: num_attention_heads, num_kv_heads: num_key_value_heads, head_dim, kv }
    }

    /// Bytes of a token's keys and values in all KV heads.
    fn row_bytes(&self) -> u64 {
        (2 * self.num_kv_heads * self.kv.row_bytes(self.head_dim)) as u64
    }

    /// Bytes of the keys and values that the tokens of a sequence at these positions see.
    pub fn kv_bytes(&self, positions: &Range<usize>, window: Option<usize>) -> u64 {
        (positions.end - self.shape(window).first_key(positions.start)) as u64 * self.row_bytes()
    }

    fn shape(&self, window: Option<usize>) -> AttentionShape {
        let Heads { num_heads, num_kv_heads, head_dim, .. } = *self;
        AttentionShape { num_heads, num_kv_heads, head_dim, block_size: 1, max_blocks: usize::MAX, window }
    }
}

pub fn qkv_store(heads: &Heads, tokens: usize, layers: LayerKind) -> Dispatch {
    let Heads { num_heads, num_kv_heads, head_dim, kv } = *heads;
    let shader = match kv {
        KvDtype::F32 => &shaders::QKV_STORE_F32,
        KvDtype::F16 => &shaders::QKV_STORE_F16,
        KvDtype::Int8 => &shaders::QKV_STORE_INT8,
    };
    Dispatch {
        constants: layers.constants().1.to_vec(),
        trips: head_dim.div_ceil(64) as f64,
        kv_bytes: tokens as u64 * heads.row_bytes(),
        // The kernel reads queries and writes them in place.
        activation_bytes: floats(tokens * (2 * num_heads + 2 * num_kv_heads) * head_dim),
        ..Dispatch::new(shader, tokens * (num_heads + 2 * num_kv_heads))
    }
}

/// Attention of these items, by a shader for single tokens or for tiles. The keys and values of a sequence are read
/// from memory once.
pub fn attention(
    heads: &Heads,
    window: Option<usize>,
    (shader, constants): (&'static Shader, &[u32]),
    items: &[Item],
) -> Dispatch {
    let Heads { num_heads, num_kv_heads, head_dim, .. } = *heads;
    let shape = heads.shape(window);
    let splits = shape.splits();
    let last_seen = |item: &Item| item.sees_to.max(item.position + item.tokens - 1);
    let tiles_of = |item: &Item| {
        let last = last_seen(item) as usize;
        let first = shape.first_key(item.position as usize).max(splits.start(item.first_split as usize));
        let end = (last + 1).min(splits.start((item.first_split + item.splits) as usize));
        end.div_ceil(KEYS) - first / KEYS
    };
    let walked: usize = items.iter().map(tiles_of).sum();
    let attending: usize = items.iter().map(|item| item.tokens as usize).sum();
    // The positions of each sequence.
    let mut sequences: BTreeMap<u32, Range<usize>> = BTreeMap::new();
    for item in items {
        let (start, end) = (item.position as usize, last_seen(item) as usize + 1);
        let all = sequences.entry(item.sequence).or_insert(start..end);
        *all = all.start.min(start)..all.end.max(end);
    }
    let kv_bytes = sequences.values().map(|positions| heads.kv_bytes(positions, window)).sum();
    Dispatch {
        constants: constants.to_vec(),
        trips: walked as f64 / items.len().max(1) as f64,
        kv_bytes,
        keys: Keys {
            bytes: kv_bytes / 2,
            row_bytes: heads.kv.row_bytes(head_dim) as u64,
            unit_bytes: (heads.kv.key_unit(head_dim) * heads.kv.element_bytes()) as u64,
        },
        // The activations are queries and partials.
        activation_bytes: floats(attending * (num_heads * head_dim + shape.partial_width())),
        ..Dispatch::new(shader, items.len() * num_kv_heads)
    }
}

/// The merge of the partials of `tokens` tokens.
pub fn attention_merge(heads: &Heads, tokens: usize, partials: usize, wants: Wants) -> Dispatch {
    let (shape, width) = (heads.shape(None), heads.num_heads * heads.head_dim);
    let all = [&shaders::ATTENTION_MERGE, &shaders::ATTENTION_MERGE_INT8, &shaders::ATTENTION_MERGE_BOTH];
    let (shader, written) = into(wants, all, tokens, width);
    Dispatch {
        trips: partials as f64 / tokens as f64,
        activation_bytes: floats(partials * shape.partial_width()) + written,
        ..Dispatch::new(shader, tokens * width.div_ceil(1024))
    }
}

pub fn glu(rows: usize, width: usize, wants: Wants, activation: HiddenAct) -> Dispatch {
    let (shader, bytes) = into(wants, [&shaders::GLU, &shaders::GLU_INT8, &shaders::GLU_BOTH], rows, width);
    Dispatch {
        constants: vec![activation as u32],
        activation_bytes: floats(2 * rows * width) + bytes,
        ..Dispatch::new(shader, rows * width.div_ceil(1024))
    }
}

pub fn softcap(rows: usize, width: usize) -> Dispatch {
    Dispatch {
        activation_bytes: floats(2 * rows * width),
        ..Dispatch::new(&shaders::SOFTCAP, rows * width.div_ceil(1024))
    }
}

/// The update of four residual streams before a layer, or after it.
pub fn altup(rows: usize, width: usize, corrects: bool) -> Dispatch {
    // Before: the streams, each read and written, and a copy of the first. After: also the prediction, and the scaled
    // first stream.
    let (shader, lists, weights) = match corrects {
        false => (&shaders::ALTUP_PREDICT, 9, 5 * width + 64),
        true => (&shaders::ALTUP_CORRECT, 10, 6 * width + 16),
    };
    let dispatch = norm(shader, rows, width, 0, floats(lists * rows * width));
    Dispatch { weight_bytes: floats(weights), ..dispatch }
}

/// The streams that get the size of the first one, or their mean.
pub fn streams(rows: usize, width: usize, merges: bool) -> Dispatch {
    let (shader, lists) = if merges { (&shaders::STREAMS_MERGE, 5) } else { (&shaders::STREAMS_SPREAD, 7) };
    norm(shader, rows, width, 0, floats(lists * rows * width))
}

pub fn cutoff(rows: usize, width: usize) -> Dispatch {
    norm(&shaders::CUTOFF, rows, width, 0, floats(2 * rows * width))
}

/// The patches of an image, one in each row.
pub fn patches(rows: usize, patch_size: usize) -> Dispatch {
    let (pixels, stride) = (rows * patch_size.pow(2), Activations::stride_of(3 * patch_size.pow(2)));
    Dispatch {
        activation_bytes: 3 * pixels as u64 + floats(rows * stride),
        ..Dispatch::new(&shaders::PATCHES, rows * stride.div_ceil(64))
    }
}

pub fn quantize(rows: usize, width: usize) -> Dispatch {
    Dispatch {
        activation_bytes: floats(rows * width) + Quantized::bytes_of_digit(rows, width),
        ..Dispatch::new(&shaders::QUANTIZE, rows * width.div_ceil(1024))
    }
}

/// The sum of a row and a bias, and of a product if `is_added`, and the LayerNorm of the sum.
pub fn layer_norm(rows: usize, width: usize, wants: Wants, is_added: bool) -> Dispatch {
    let all = [&shaders::LAYER_NORM, &shaders::LAYER_NORM_INT8, &shaders::LAYER_NORM_BOTH];
    let (shader, bytes) = into(wants, all, rows, width);
    let read_or_written = if is_added { 3 } else { 2 };
    let dispatch = norm(shader, rows, width, 3, floats(read_or_written * rows * width) + bytes);
    Dispatch { constants: vec![u32::from(is_added)], ..dispatch }
}

/// The activation of a product with its bias. f32 results are in place.
pub fn activate(rows: usize, width: usize, wants: Wants, activation: HiddenAct) -> Dispatch {
    let all = [&shaders::ACTIVATE, &shaders::ACTIVATE_INT8, &shaders::ACTIVATE_BOTH];
    let (shader, bytes) = into(wants, all, rows, width);
    Dispatch {
        constants: vec![activation as u32],
        weight_bytes: floats(width),
        activation_bytes: floats(rows * width) + bytes,
        ..Dispatch::new(shader, rows * width.div_ceil(1024))
    }
}

/// `rows` means of squares of `pool` * `pool` rows each. A trip is one of the latter.
pub fn average_pool(rows: usize, pool: usize, width: usize, standardizes: bool) -> Dispatch {
    Dispatch {
        constants: vec![u32::from(standardizes)],
        trips: (pool * pool) as f64,
        weight_bytes: if standardizes { floats(2 * width) } else { 0 },
        activation_bytes: floats((pool * pool + 1) * rows * width),
        ..Dispatch::new(&shaders::AVERAGE_POOL, rows * width.div_ceil(64))
    }
}

/// The sums of a column's vector and a row's, which are added to `rows` vectors if `is_added`. The vectors of columns and
/// rows stay in the cache.
pub fn grid(rows: usize, width: usize, is_added: bool) -> Dispatch {
    let read_or_written = if is_added { 2 } else { 1 };
    Dispatch {
        constants: vec![u32::from(is_added)],
        activation_bytes: floats(read_or_written * rows * width),
        ..Dispatch::new(&shaders::GRID, rows * width.div_ceil(64))
    }
}

pub fn history(tokens: usize) -> Dispatch {
    Dispatch { activation_bytes: floats(2 * tokens), ..Dispatch::new(&shaders::HISTORY, tokens.div_ceil(64)) }
}

/// How ids are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drawn {
    /// The id with the highest logit is drawn, in one pass over the logits.
    Greedy,
    /// The draw has top_k or top_p, and takes three passes over the logits.
    Filtered,
}

/// The dispatches of a draw, in their order, each after a barrier.
pub fn sample(rows: usize, vocab: usize, drawn: Drawn) -> Vec<Dispatch> {
    let chunks = vocab.div_ceil(DRAW_CHUNK);
    let (maxima, found) = (16 * rows * chunks, 16 * rows * chunks);
    // A trip reads four logits.
    let pass = |shader, other: usize| Dispatch {
        trips: vocab as f64 / (4 * 256 * chunks) as f64,
        activation_bytes: floats(rows * vocab) + other as u64,
        ..Dispatch::new(shader, rows * chunks)
    };
    let choice = |shader, bytes: usize| Dispatch {
        trips: chunks.div_ceil(256) as f64,
        activation_bytes: bytes as u64,
        ..Dispatch::new(shader, rows)
    };
    let bins = 12 * rows * DRAW_BINS;
    let mut all = vec![pass(&shaders::SAMPLE_MAXIMA, maxima)];
    if drawn == Drawn::Greedy {
        all.push(choice(&shaders::SAMPLE_GREEDY, maxima));
        return all;
    }
    all.push(pass(&shaders::SAMPLE_MASSES, maxima + bins));
    all.push(pass(&shaders::SAMPLE_DRAW, maxima + bins + found));
    all.push(choice(&shaders::SAMPLE_CHOICE, maxima + bins + found));
    all
}

/// A kernel's steady loop.
#[derive(Debug, Clone, Copy)]
pub struct Body {
    /// The instructions of one trip of the compiled loop, with inner loops as often as they run.
    pub trip: Counts,
    /// Number of trips of the source's loop in one compiled trip.
    pub unrolled: u64,
    /// Number of weights per lane in a trip of the source's loop; 0 if the kernel has no weights.
    pub weights: u64,
    /// The instructions outside the steady loop, which run once.
    pub once: Counts,
    /// In attention, the rounds of loads in which a lane reads its key; 0 in other kernels.
    pub key_rounds: u64,
}

impl Body {
    /// Vector instructions of the steady loop per weight and lane.
    pub fn valu_per_weight(&self) -> Option<f64> {
        let weights = self.weights * self.unrolled;
        (weights > 0).then(|| self.trip.valu as f64 / weights as f64)
    }
}

/// Finds the steady loop of a compiled kernel; every shader has its own case here. `None` if there is no loop.
pub fn body(shader: &Shader, constants: &[u32], program: &Program) -> Option<Body> {
    let kernel = shader.name.split('_').next().unwrap_or_default();
    match (kernel, constants) {
        ("fast", [columns, gated, _, shared, _, _]) => {
            // A trip is a block of 32 columns of a row, of one matrix or of two. If the workgroup shares activations, an
            // inner loop computes their second digits, which few blocks have.
            let weights = BLOCK_COLS as u64 * u64::from(1 + gated);
            let steady = program.inside(None).max_by_key(|i| program.trip(*i, &|_| 1).dot4)?;
            let trip = program.trip(steady, &|_| u64::from(*shared == 0));
            let unrolled = times(trip.dot4, weights / 4 * u64::from(*columns));
            Some(Body { trip, unrolled, weights, once: without(program, &[steady]), key_rounds: 0 })
        }
        // A trip is a block of 32 columns of all rows of a workgroup, which its lanes share. The loop is inside the
        // loop over segments; inside it are one or two digits, usually one.
        ("fast", [_, _, _, _, _, _, _, _, _]) => {
            let most =
                |all: &mut dyn Iterator<Item = usize>| all.max_by_key(|i| program.trip(*i, &|_| 1).wmma);
            let segments = most(&mut program.inside(None))?;
            let steady = most(&mut program.inside(Some(segments))).unwrap_or(segments);
            let trip = program.trip(steady, &|_| 1);
            let lanes: u32 = shader.workgroup.iter().product();
            let weights = u64::from(SUBGROUP_ROW_TILES * (TILE_ROWS * BLOCK_COLS) as u32 / lanes);
            Some(Body { trip, unrolled: 1, weights, once: without(program, &[segments]), key_rounds: 0 })
        }
        ("matmul", [columns, _]) => {
            let weights = u64::from(block_weights(shader));
            let steady = program.densest()?;
            let trip = program.trip(steady, &|_| 1);
            let unrolled = times(trip.macs, weights * u64::from(*columns));
            Some(Body { trip, unrolled, weights, once: without(program, &[steady]), key_rounds: 0 })
        }
        ("attention", [_, head_dim, rows]) => {
            // The outermost loop is over splits; the loop over tiles of keys is inside it.
            let splits = program
                .inside(None)
                .max_by_key(|i| (program.trip(*i, &|_| 1).macs, std::cmp::Reverse(*i)))?;
            let steady = program.inside(Some(splits));
            let steady = steady.max_by_key(|i| (program.trip(*i, &|_| 1).macs, std::cmp::Reverse(*i)));
            let steady = steady.unwrap_or(splits);
            // The loop contains three loops: a loop over the keys' dimensions, unless the compiler unrolled it, with
            // the queries in scalar registers; a loop over the values of a whole tile; and a loop over the values of a
            // part of a tile, which runs instead of the second.
            let (head_dim, rows) = (u64::from(*head_dim), u64::from(*rows));
            let fours = head_dim / 4;
            let width = 2 - fours % 2;
            let (of_value, parts) = (4 * width * rows, KEYS as u64 / (fours / width));
            let own = |index: usize| program.loops[index].own;
            let mut of_values = program.inside(Some(steady));
            let values = of_values.find(|i| own(*i).vector_loads > 0 && own(*i).scalar_loads == 0);
            let trips = |index: usize| match own(index) {
                own if own.vector_loads == 0 => 1,
                own if own.scalar_loads > 0 => times(rows * head_dim, own.macs.max(1)),
                own if Some(index) == values => times(KEYS as u64 / parts * of_value, own.macs.max(1)),
                _ => 0,
            };
            let trip = program.trip(steady, &trips);
            let of_keys =
                program.inside(Some(steady)).find(|i| own(*i).vector_loads > 0 && own(*i).scalar_loads > 0);
            let key_rounds = of_keys.map_or(1, trips);
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &[steady]), key_rounds })
        }
        // A trip is a tile of keys, inside the loop over splits. The compiler unrolls the loops over chunks and tiles.
        ("attention", [_, head_dim, _, _, _, _, _, _]) => {
            let most =
                |all: &mut dyn Iterator<Item = usize>| all.max_by_key(|i| program.trip(*i, &|_| 1).wmma);
            let splits = most(&mut program.inside(None))?;
            let steady = most(&mut program.inside(Some(splits))).unwrap_or(splits);
            let trip = program.trip(steady, &|_| 1);
            let key_rounds = u64::from(head_dim / if shader.name.ends_with("int8") { 16 } else { 8 });
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &[steady]), key_rounds })
        }
        // A trip merges a split's partial.
        ("attention", []) => {
            let steady = program.densest()?;
            let trip = program.trip(steady, &|_| 1);
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &[steady]), key_rounds: 0 })
        }
        // These kernels have loops over a row.
        ("rms" | "embed" | "moments" | "pool" | "adjust" | "peak" | "altup" | "streams" | "cutoff", [])
        | ("rms", [_] | [_, _])
        | ("layer" | "average", [_])
        | ("qkv", [_, _, _]) => {
            let outer: Vec<usize> = program.inside(None).collect();
            let trip = outer.iter().map(|i| program.trip(*i, &|_| 1)).reduce(|a, b| a + b)?;
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &outer), key_rounds: 0 })
        }
        // The steady loop is the loop over 1024 columns. In it, a loop over groups of 32 experts, unless the compiler unrolled
        // it, has one over a lane's part of an expert's row: 32 times four columns. The loops after it compare each expert
        // with all others.
        ("route", [count, ..]) => {
            let outer: Vec<usize> = program.inside(None).collect();
            let macs = |i: &usize| program.trip(*i, &|_| 2).macs;
            let steady = *outer.iter().max_by_key(|i| (macs(i), std::cmp::Reverse(**i)))?;
            let trips = |i: usize| match program.loops[i].own.macs {
                0 if program.inside(Some(i)).next().is_some() => u64::from(count.div_ceil(32)),
                0 => 1,
                macs => times(4 * 32, macs),
            };
            let trip = program.trip(steady, &trips);
            let compared = |i: usize| if i > steady { u64::from(*count) } else { 1 };
            let others = outer.iter().filter(|i| **i != steady);
            let others = others.map(|i| program.trip(*i, &|_| compared(*i)));
            let once = others.fold(without(program, &outer), |sum, each| sum + each);
            Some(Body { trip, unrolled: 1, weights: 0, once, key_rounds: 0 })
        }
        // A trip goes over 256 pairs twice: to count them, and to group them. The loop over the experts before the own
        // one runs 128 times on average.
        ("group", []) => {
            let has_inner = |i: &usize| program.inside(Some(*i)).next().is_some();
            let (steady, others): (Vec<usize>, Vec<usize>) = program.inside(None).partition(has_inner);
            let of_pairs = steady.iter().map(|i| program.trip(*i, &|_| 256));
            let trip = of_pairs.fold(Counts::default(), |sum, each| sum + each);
            let all: Vec<usize> = steady.into_iter().chain(others.iter().copied()).collect();
            let others = others.iter().map(|i| program.trip(*i, &|_| 1) * 128);
            let once = others.fold(without(program, &all), |sum, each| sum + each);
            Some(Body { trip, unrolled: 1, weights: 0, once, key_rounds: 0 })
        }
        // The loops over a row have one over a token's experts, of which there are eight in published models.
        ("combine", [_]) => {
            let outer: Vec<usize> = program.inside(None).collect();
            let trip = outer.iter().map(|i| program.trip(*i, &|_| 8)).reduce(|a, b| a + b)?;
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &outer), key_rounds: 0 })
        }
        // The steady loop is the loop over a chunk's logits, or over the results of a row's chunks. Other loops have
        // few trips and count once.
        ("sample", []) => {
            let loads = |i: &usize| program.trip(*i, &|_| 1).wide_loads;
            let outer: Vec<usize> = program.inside(None).collect();
            let steady = *outer.iter().max_by_key(|i| (loads(i), std::cmp::Reverse(**i)))?;
            let trip = program.trip(steady, &|_| 1);
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &[steady]), key_rounds: 0 })
        }
        // The steady loop is the loop over the most likely ids.
        ("logprobs", []) => {
            let outer: Vec<usize> = program.inside(None).collect();
            let trip = program.trip(*outer.first()?, &|_| 1);
            Some(Body { trip, unrolled: 1, weights: 0, once: without(program, &outer), key_rounds: 0 })
        }
        ("history" | "quantize" | "offload" | "softcap" | "patches", [])
        | ("glu" | "activate" | "grid", [_]) => None,
        _ => panic!("{}: no case says which of its loops is the steady one", shader.name),
    }
}

/// The instructions outside these outermost loops.
fn without(program: &Program, loops: &[usize]) -> Counts {
    let mut once = Counts::default();
    let spans = loops.iter().map(|i| program.loops[*i].span.clone()).collect::<Vec<_>>();
    for (at, each) in program.instructions.iter().enumerate() {
        if !spans.iter().any(|span| span.contains(&at)) {
            once += *each;
        }
    }
    once
}

/// `whole` divided by `part`, rounded. `whole` may differ slightly from a multiple, for example because the first
/// product of a sum is not a multiply-add.
fn times(whole: u64, part: u64) -> u64 {
    ((whole + part / 2) / part).max(1)
}

/// Number of weights of a block, by the name of the shader's variant.
fn block_weights(shader: &Shader) -> u32 {
    let schemes = [
        ("matmul_f32", Scheme::F32),
        ("matmul_f16", Scheme::F16),
        ("matmul_bf16", Scheme::Bf16),
        ("matmul_int4", Scheme::int4(32)),
        ("matmul_int", Scheme::Int8Row),
    ];
    let found = schemes.iter().find(|(name, _)| shader.name.starts_with(name));
    found.unwrap_or_else(|| panic!("{}: weights of no known width", shader.name)).1.block_weights() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::attention_kernels::{attention_constants, attention_of};
    use crate::kernels::{Room, Run, Shares};

    #[test]
    fn what_a_shader_needs_is_read_from_its_spirv() {
        use crate::gpu::{Access, Need};
        let (product, attention) = (&shaders::MATMUL_INT4, &shaders::ATTENTION_F32);
        assert_eq!((product.workgroup, attention.workgroup), ([32, 4, 1], [64, 1, 1]));
        assert_eq!((product.shared_bytes)(&[8, 0]), 4 * 4 * 32 * 4);
        // The workgroup holds two heads of 128: maxima and weights; a row of each key, twice; sums of four parts; the
        // merge.
        let parts = 64 * 2 * 16 + 4 * 4;
        assert_eq!(
            (attention.shared_bytes)(&[2, 128, 2]),
            2 * (16 + 64) * 4 + 2 * 64 * 4 + parts + 2 * 2 * 4
        );
        assert!(attention.needs.contains(&Need::SubgroupArithmetic));
        assert!(!product.needs.contains(&Need::SubgroupArithmetic));
        let access = |shader: &Shader, name: &str| {
            shader.pointers.iter().find(|(pointer, _)| *pointer == name).expect("it has that address").1
        };
        assert_eq!((access(product, "x"), access(product, "y")), (Access::Read, Access::Write));
        assert_eq!(access(&shaders::MATMUL_F32, "scales"), Access::None, "there are none");
        let norms = [&shaders::RMS_NORM, &shaders::RMS_NORM_ADD, &shaders::RMS_NORM_RESIDUAL_INT8];
        let each = |name| norms.map(|shader| access(shader, name));
        assert_eq!(each("y"), [Access::Write, Access::None, Access::None]);
        assert_eq!(each("hidden"), [Access::None, Access::ReadWrite, Access::ReadWrite]);
        assert!(shaders::EMBED_F16.follows && !product.follows);
    }

    #[test]
    fn a_product_walks_over_its_weights_once_for_each_tile_of_tokens() {
        let gate = |tokens| matmul(Precision::F32, Scheme::int4(128), &[21_504], 5376, tokens);
        // Each weight has 4.125 bits.
        assert_eq!(gate(1).weight_bytes, 21_504 * 5376 * 33 / 64);
        let of = |d: &Dispatch| (d.constants.clone(), d.workgroups, d.weight_passes, d.trips);
        assert_eq!(of(&gate(1)), (vec![1, 0], 672, 1, 42.0));
        assert_eq!(of(&gate(3)), (vec![4, 0], 672, 1, 42.0));
        assert_eq!(
            of(&gate(33)),
            (vec![32, 0], 672 * 2, 2, 42.0),
            "the cache has no room for 64 tokens in f32"
        );
        // With int8, a trip has 32 columns, and a subgroup takes an eighth of the 168 blocks of a row.
        let qkv = |tokens| matmul(Precision::Fast, Scheme::int4(128), &[4096, 2048, 2048], 5376, tokens);
        assert_eq!(of(&qkv(1)), (vec![1, 0, 4, 0, 0, 0], 256, 1, 21.0));
        assert_eq!(of(&qkv(33)), (vec![32, 0, 4, 0, 0, 0], 256 * 2, 1, 21.0), "two passes go together");
        assert_eq!(of(&qkv(256)), (vec![32, 0, 4, 0, 0, 0], 256 * 8, 2, 21.0), "and four do");
        assert_eq!(qkv(5).weight_bytes, 8192 * 5376 * 33 / 64);
        let both = gated(Scheme::int4(128), 21_504, 5376, 3, HiddenAct::GeluTanh);
        assert_eq!(
            (of(&both), both.weight_bytes),
            ((vec![4, 1, 4, 0, 0, 0], 672, 1, 21.0), 2 * gate(1).weight_bytes)
        );
    }

    #[test]
    fn attention_walks_over_the_tiles_that_hold_keys_it_sees() {
        let heads = Heads { num_heads: 32, num_kv_heads: 16, head_dim: 128, kv: KvDtype::F16 };
        let wants = Wants { floats: true, blocks: false };
        let cost = |positions: Range<usize>, window| {
            let run =
                Run { row: 0, start: positions.start, tokens: positions.len(), sequence: 0, sees_to: None };
            let room = Room { single: 512, tiles: 512 };
            let shares = Shares::new(&heads.shape(window), &[run], run.tokens, run.tokens, room);
            let [single, tiles] = attention_of(KvDtype::F16);
            let partials = shares.merges.iter().map(|[_, count]| *count as usize).sum();
            let merge = attention_merge(&heads, run.tokens, partials, wants);
            let attention = |shader, items: &[Item]| {
                let constants = attention_constants(shader, 2, heads.head_dim);
                attention(&heads, window, (shader, &constants), items)
            };
            [attention(single, &shares.single), attention(tiles, &shares.tiles), merge]
        };
        let one = |position: usize, window| cost(position..position + 1, window);
        let of = |[single, tiles, merge]: [Dispatch; 3]| {
            assert_eq!((tiles.workgroups, tiles.kv_bytes), (0, 0));
            (single.workgroups, single.trips, merge.trips)
        };
        assert_eq!(of(one(0, None)), (16, 1.0, 1.0));
        assert_eq!(of(one(511, None)), (32, 4.0, 2.0), "a workgroup for each split of 256 keys");
        assert_eq!(of(one(1023, Some(1024))), (64, 4.0, 4.0));
        assert_eq!(of(one(1030, Some(1024))), (80, 3.4, 5.0), "17 tiles, for the window starts in one");
        let [single, ..] = one(511, None);
        assert_eq!((single.kv_bytes, single.constants), (512 * 2 * 16 * 256, vec![2, 128, 2]));
        // A tile has sixteen tokens, and walks over its keys alone, because there are enough tiles.
        let [single, tiles, merge] = cost(0..128, None);
        assert_eq!((single.workgroups, tiles.workgroups, tiles.trips), (0, 8 * 16, 1.5));
        assert_eq!((tiles.kv_bytes, tiles.constants), (128 * 2 * 16 * 256, vec![2, 128, 8]));
        assert_eq!((merge.workgroups, merge.trips), (128 * 4, 1.0));
    }

    /// Each of 4096 patches sees all of them, so a tile of some of them walks over all keys.
    #[test]
    fn tokens_of_an_image_see_all_of_it() {
        let heads = Heads { num_heads: 16, num_kv_heads: 16, head_dim: 80, kv: KvDtype::F16 };
        let of = |sees_to: Option<usize>| {
            let run = Run { row: 0, start: 1024, tokens: 1024, sequence: 0, sees_to };
            let shares = Shares::new(&heads.shape(None), &[run], 1024, 1024, Room { single: 0, tiles: 1024 });
            let [_, shader] = attention_of(KvDtype::F16);
            attention(&heads, None, (shader, &[1, 80, 8]), &shares.tiles)
        };
        let all = of(Some(4095));
        assert_eq!((all.workgroups, all.trips), (1024 / 32 * 16, 64.0));
        assert_eq!(all.kv_bytes, 4096 * 2 * 16 * 80 * 2);
        // Of a text, the first tile sees 1056 keys, which are 17 trips, and the last one 2048.
        assert_eq!((of(None).trips, of(None).kv_bytes), (24.5, 2048 * 2 * 16 * 80 * 2));
    }

    /// A product's loop that a compiler unrolled twice has as many instructions for each weight.
    #[test]
    fn unrolling_changes_no_figure_per_weight() {
        let one = "\tglobal_load_b128 v[4:7], v[6:7], off\n\tv_mul_f32 v1, v2, v3\n\tv_cvt_f32_u32 v1, v2\n"
            .to_string()
            + &"\tv_fmac_f32 v1, v2, v3\n".repeat(3);
        let program = |times: usize| {
            Program::parse(&format!("BB1:\n{}\ts_cbranch_scc1 BB1\n", one.repeat(times))).unwrap()
        };
        let body = |times: usize| body(&shaders::MATMUL_F32, &[1, 0], &program(times)).unwrap();
        assert_eq!((body(1).unrolled, body(1).valu_per_weight()), (1, Some(1.25)));
        assert_eq!((body(2).unrolled, body(2).valu_per_weight()), (2, Some(1.25)));
    }

    #[test]
    fn attention_counts_the_loop_over_values_as_often_as_it_runs() {
        // The nested loops go over splits, tiles, dimensions of keys, values of a whole tile, and values of a part of a
        // tile.
        let text = "BB1:\n\tv_mov_b32 v0, 0\nBB2:\n\tv_add_nc_u32_e32 v1, v2, v3\nBB3:\n\ts_load_b256 s[0:7], s[8:9], 0\n\
                    \tglobal_load_b128 v[1:4], v[5:6], off\n"
            .to_string()
            + &"\tv_fma_f32 v1, v2, v3, v4\n".repeat(64)
            + "\ts_cbranch_scc1 BB3\nBB4:\n\tglobal_load_b128 v[1:4], v[5:6], off\n"
            + &"\tv_fma_f32 v1, v2, v3, v4\n".repeat(64)
            + "\ts_cbranch_scc1 BB4\nBB5:\n\tglobal_load_b128 v[1:4], v[5:6], off\n"
            + &"\tv_fma_f32 v1, v2, v3, v4\n".repeat(16)
            + "\ts_cbranch_scc1 BB5\n\ts_cbranch_scc1 BB2\n\ts_cbranch_scc1 BB1\n\ts_endpgm\n";
        let program = Program::parse(&text).unwrap();
        // Two rows of 128 make 256 products for a key. There are 16 of 64 values for each of four parts, and a lane has
        // 8 numbers of each.
        let found = body(&shaders::ATTENTION_F16, &[2, 128, 2], &program).unwrap();
        assert_eq!(found.trip.valu, 1 + 4 * 64 + 4 * 64);
        assert_eq!((found.trip.vector_loads, found.once.valu), (8, 1));
    }

    #[test]
    fn every_pipeline_has_a_case_for_its_steady_loop() {
        let program = Program::parse("BB1:\n\tv_fma_f32 v1, v2, v3, v4\n\ts_cbranch_scc1 BB1\n").unwrap();
        let experts = Experts { count: 128, per_token: 8, renormalizes: true };
        let layers = LayerKind { experts: Some(experts), has_streams: true, ..LayerKind::default() };
        for (shader, constants) in crate::kernels::all_pipelines(layers, 2, 128) {
            let found = body(shader, &constants, &program);
            let has_none = ["history", "glu", "quantize", "softcap", "activate", "patches", "grid"]
                .contains(&shader.kernel)
                || shader.kernel.starts_with("offload_");
            assert_eq!(found.is_none(), has_none, "{}", shader.name);
        }
    }
}
