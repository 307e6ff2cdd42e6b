//! The device arrays that kernels read and write, and their shapes.

use std::ops::Range;

use crate::gpu::Buffer;
use crate::tensor::KvDtype;

/// The largest head dimension: 64 lanes of the attention kernel hold two vec4s of a head each. Head dimensions are
/// multiples of 4, and above 256 of 8.
pub const MAX_HEAD_DIM: usize = 512;
/// What head dimensions of about this size are multiples of: above 256, a lane of the attention kernel holds eight
/// dimensions.
pub const fn head_dim_multiple(head_dim: usize) -> usize {
    if head_dim > 256 { 8 } else { 4 }
}
/// The most query heads per KV head: their queries and scores must fit into 32 KiB of shared memory.
pub const MAX_GROUP: usize = 16;
/// The most matrices that one dispatch multiplies with the same activations.
pub(super) const MATRICES: usize = 3;
/// The embedding kernel reads an id `LAST_SAMPLED + n` as the id that was last sampled in slot `n`.
pub const LAST_SAMPLED: u32 = 1 << 31;

/// f32 activations `[rows, width]` with a row stride of `stride` elements.
#[derive(Clone)]
pub struct Activations {
    pub buffer: Buffer,
    pub width: usize,
    pub stride: usize,
}

impl Activations {
    /// The row stride in elements: `width`, rounded up to whole vec4s.
    pub const fn stride_of(width: usize) -> usize {
        width.next_multiple_of(4)
    }

    pub const fn bytes(rows: usize, width: usize) -> u64 {
        (rows * Self::stride_of(width) * 4) as u64
    }

    pub fn new(buffer: Buffer, width: usize) -> Activations {
        Activations { buffer, width, stride: Self::stride_of(width) }
    }

    /// The activations of some rows.
    pub fn rows(&self, rows: &Range<usize>) -> Activations {
        let buffer =
            self.buffer.slice(Self::bytes(rows.start, self.width), Self::bytes(rows.len(), self.width));
        Activations { buffer, ..*self }
    }

    /// Some columns of all rows. `columns` begins at a whole vec4.
    pub fn columns(&self, columns: &Range<usize>) -> Activations {
        assert!(columns.start.is_multiple_of(4) && columns.end <= self.width, "columns {columns:?}");
        let offset = 4 * columns.start as u64;
        let buffer = self.buffer.slice(offset, self.buffer.size() - offset);
        Activations { buffer, width: columns.len(), stride: self.stride }
    }

    /// The memory of the first `rows` rows. Panics if there are fewer rows, or if the width is not `width`.
    pub(crate) fn used(&self, rows: usize, width: usize, what: &str) -> Buffer {
        assert_eq!(self.width, width, "{what}: width");
        let before = rows.saturating_sub(1) * self.stride;
        words(&self.buffer, if rows > 0 { before + Self::stride_of(width) } else { 0 }, what)
    }
}

/// One layer of the paged KV cache: keys and values `[block][kv_head][token in block][head_dim]`, in the element type
/// of [`Heads::kv`] (`shaders/common/kv.glsl`).
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
    /// Dimension of a head: a multiple of 4, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Number of block table entries of each sequence.
    pub max_blocks: usize,
    /// Number of keys that a token sees, including its own. `None`: all keys up to its own.
    pub window: Option<usize>,
}

/// An RMSNorm: its epsilon, and the factors of its elements, f32 `[width]`.
#[derive(Clone)]
pub struct RmsNorm {
    pub weight: Buffer,
    pub eps: f32,
}

/// The activation of the gate in a feed-forward network, with the name that `hidden_act` has in `config.json`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum HiddenAct {
    /// `gelu_pytorch_tanh`
    #[default]
    GeluTanh,
    /// `silu`
    Silu,
}

/// The most experts of a layer, and the most that a token uses (`shaders/route.comp`).
pub const MAX_EXPERTS: usize = 256;
pub const MAX_EXPERTS_PER_TOKEN: usize = 32;
/// The rows that a kernel reads after the last pair: lanes compute up to 32 columns together. Subgroups compute more, and read
/// no row after these.
const UNUSED_ROWS: usize = 32;

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Experts {
    pub count: usize,
    pub per_token: usize,
    /// Whether the weights of a token's experts add up to 1.
    pub renormalizes: bool,
}

impl Experts {
    /// The number of pairs of a token and one of its experts.
    pub fn pairs(&self, tokens: usize) -> usize {
        tokens * self.per_token
    }

    /// Rows of the activations of pairs. Kernels read some rows after the last one.
    pub fn pair_rows(&self, tokens: usize) -> usize {
        self.pairs(tokens) + UNUSED_ROWS
    }

    /// The expected number of different experts of `tokens` tokens if every expert is equally likely:
    /// `count * (1 - (1 - per_token / count)^tokens)`.
    pub fn expected(&self, tokens: usize) -> f64 {
        let share = self.per_token as f64 / self.count as f64;
        self.count as f64 * (1.0 - (1.0 - share).powf(tokens as f64))
    }

    /// The expected number of groups of at most `columns` pairs of one expert, if every expert is equally likely: the
    /// number of an expert's pairs has a binomial distribution.
    pub fn expected_items(&self, tokens: usize, columns: usize) -> f64 {
        let share = self.per_token as f64 / self.count as f64;
        if share >= 1.0 {
            return (self.count * tokens.div_ceil(columns)) as f64;
        }
        // The probability of each number of pairs follows from that of one fewer.
        let mut probability = (1.0 - share).powf(tokens as f64);
        let mut items = 0.0;
        for pairs in 1..=tokens {
            probability *= (tokens - pairs + 1) as f64 / pairs as f64 * share / (1.0 - share);
            items += probability * pairs.div_ceil(columns) as f64;
        }
        self.count as f64 * items
    }
}

/// What the kernels of a layer compute, apart from shapes. The default has all norms with weights, and no bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerKind {
    pub activation: HiddenAct,
    /// Whether the results of attention and of the feed-forward network are normed before they are added.
    pub has_post_norms: bool,
    /// Whether queries and keys are normed.
    pub has_qk_norms: bool,
    /// Whether queries, keys and values have biases.
    pub has_biases: bool,
    /// Whether values are normed, without weights.
    pub has_value_norm: bool,
    /// The experts of layers that have some.
    pub experts: Option<Experts>,
    /// Whether the input of experts has a norm of its own, besides that of a dense network.
    pub has_expert_norm: bool,
    /// Whether a token has several residual streams.
    pub has_streams: bool,
}

impl LayerKind {
    /// The values of the specialization constants SILU and POST_NORM, and of QK_NORM, BIAS and VALUE_NORM.
    pub(crate) fn constants(self) -> ([u32; 2], [u32; 3]) {
        let LayerKind { activation, has_post_norms, has_qk_norms, has_biases, has_value_norm, .. } = self;
        (
            [activation as u32, has_post_norms.into()],
            [has_qk_norms, has_biases, has_value_norm].map(u32::from),
        )
    }
}

impl Default for LayerKind {
    fn default() -> Self {
        LayerKind {
            activation: HiddenAct::GeluTanh,
            has_post_norms: true,
            has_qk_norms: true,
            has_biases: false,
            has_value_norm: false,
            experts: None,
            has_expert_norm: false,
            has_streams: false,
        }
    }
}

/// Buffers and constants of attention in one layer, without its matrices.
pub struct Attention {
    pub shape: AttentionShape,
    /// The norms of queries and of keys, if there are any.
    pub qk_norms: Option<[RmsNorm; 2]>,
    /// The epsilon of the norms of queries, keys and values.
    pub norm_eps: f32,
    /// The biases of queries, keys and values, if there are any: f32, one for each element.
    pub biases: Option<[Buffer; 3]>,
    /// The RoPE table: f32 `[max position][head_dim / 2][cos, sin]`.
    pub rope: Buffer,
    /// Factor for the queries, applied after bias, norm and RoPE.
    pub q_scale: f32,
    /// Whether the cache is that of another layer, which stored the keys and values.
    pub shares_cache: bool,
    pub cache: KvCache,
}

/// The arrays of a step on the device.
#[derive(Clone)]
pub struct StepArrays {
    /// Id of each token, or [`LAST_SAMPLED`] + slot: u32 `[tokens]`.
    pub ids: Buffer,
    /// Position of each token in its sequence: u32 `[tokens]`.
    pub positions: Buffer,
    /// Row of `block_tables` of each token: u32 `[tokens]`.
    pub sequence_of: Buffer,
    /// Place of each token in the KV cache, block * block_size + token in block: u32 `[tokens]`.
    pub slot_mapping: Buffer,
    /// Blocks of each sequence: u32 `[sequences][max_blocks]`.
    pub block_tables: Buffer,
    pub shares: ShareArrays,
}

/// [`Shares`](super::Shares) on the device, for a whole step or for some of its rows.
#[derive(Clone)]
pub struct ShareArrays {
    /// The [`Item`](super::Item)s of single tokens. `None`: the step cannot have such items.
    pub single: Option<Buffer>,
    /// The items of tiles, likewise.
    pub tiles: Option<Buffer>,
    /// Workgroup counts of the indirect dispatches: three u32 for single tokens, then three for tiles.
    pub groups: Buffer,
    /// [`Shares::merges`](super::Shares::merges): u32 `[tokens][2]`.
    pub merges: Buffer,
}

/// The partial results of attention before the merge: f32 `[slots][partial_width]`, see
/// [`partial_width`](super::partial_width).
#[derive(Clone)]
pub struct Partials {
    pub single: Activations,
    pub tiles: Activations,
}

/// The heads that attention kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of query heads per KV head, at most [`MAX_GROUP`].
    pub group: usize,
    /// Dimension of a head: a multiple of 4, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Element type of the KV cache.
    pub kv: KvDtype,
}

/// The first `count` 32-bit words of a buffer. Panics if the buffer is smaller.
pub(crate) fn words(buffer: &Buffer, count: usize, what: &str) -> Buffer {
    assert!(buffer.size() >= 4 * count as u64, "{what}: {count} words do not fit");
    buffer.slice(0, 4 * count as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_experts_and_items_are_those_of_a_uniform_choice() {
        let experts = Experts { count: 128, per_token: 8, renormalizes: true };
        assert_eq!((experts.expected(1), experts.expected_items(1, 1)), (8.0, 8.0));
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * b, "{a} {b}");
        // With one column, each pair is an item. With as many columns as tokens, each expert in use is one.
        for tokens in [2, 16, 300] {
            close(experts.expected_items(tokens, 1), experts.pairs(tokens) as f64);
            close(experts.expected_items(tokens, tokens), experts.expected(tokens));
        }
        let all = Experts { per_token: 128, ..experts };
        assert_eq!((all.expected(5), all.expected_items(5, 4)), (128.0, 256.0));
    }
}
