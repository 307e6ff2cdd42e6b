//! The memory of a tower: its buffers, and how its tensors fill them.

use std::ops::Range;

use super::spec::{Encoder, Form, VisionSpec, VisionTensor};
use crate::gpu::INDIRECT_BYTES;
use crate::gpu::placement::{Class, MemoryKind, Request};
use crate::kernels::{
    Activations, AttentionShape, Heads, HiddenAct, Item, LayerKind, Matrix, Quantized, partial_width,
};
use crate::model::{ImageBudget, ImageLimits};
use crate::tensor::{KvDtype, Precision, Scheme};

/// Tokens per KV block of the tower.
const BLOCK_SIZE: usize = 64;
/// A part of a layer's attention, which is submitted separately, is no more than a quarter, and has no more than so many
/// pairs of a query and a key: a quarter of 4096 patches. So it takes no longer than a layer's other products.
const ATTENTION_PARTS: usize = 4;
const ATTENTION_PAIRS: usize = 1 << 22;
/// A part of a layer's feed-forward network is no more than a half, and has no more than so many patches.
const NETWORK_PARTS: usize = 2;
const NETWORK_PATCHES: usize = 2048;
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

/// What the device has of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Stored<T> {
    /// `[rows, columns]`
    Matrix([usize; 2], T),
    /// Rows of activations of a width.
    Vectors { width: usize, each: Vec<T> },
}

impl<'a> TowerRequest<'a> {
    /// The scheme of a tower's matrices: int8 for int8 activations. Otherwise bf16, if `is_bf16` says that the checkpoint's
    /// matrices are, or f32.
    pub fn scheme_of(precision: Precision, is_bf16: bool) -> Scheme {
        match (precision, is_bf16) {
            (Precision::Fast, _) => Scheme::Int8Row,
            (_, true) => Scheme::Bf16,
            (_, false) => Scheme::F32,
        }
    }

    /// The most tokens of an image.
    pub fn most_tokens(&self) -> usize {
        self.spec.fixed_tokens().unwrap_or(self.budget.most)
    }

    /// How a model with this tower takes images, if a step has room for `max_batch_tokens` tokens. `None` if it takes none,
    /// because a step never has a part of an image.
    pub fn limits(&self, max_batch_tokens: usize) -> Option<ImageLimits> {
        let (tokens, usual_tokens) = match self.spec.fixed_tokens() {
            Some(tokens) => (tokens, tokens),
            None => {
                let most = self.budget.most.min(max_batch_tokens);
                let tokens = *ImageBudget::ALL.iter().rfind(|budget| **budget <= most)?;
                (tokens, self.budget.usual.min(tokens))
            }
        };
        let slots = LEAST_SLOTS.max(max_batch_tokens.div_ceil(tokens) + 1);
        let limits = ImageLimits { sizes: self.spec.sizes, tokens, usual_tokens, slots };
        (tokens <= max_batch_tokens).then_some(limits)
    }

    /// The type of the tower's keys and values.
    pub fn kv(&self) -> KvDtype {
        if self.precision == Precision::Fast { KvDtype::F16 } else { KvDtype::F32 }
    }

    /// The dimension of a head on the device. Subgroups multiply heads of whole tiles, so zeros are appended: they change
    /// no score and no value.
    pub(super) fn head_dim(&self) -> usize {
        let dim = self.spec.transformer().map_or(0, |layers| layers.head_dim);
        if self.precision == Precision::Fast { dim.next_multiple_of(16) } else { dim }
    }

    /// The share of a head's dimensions that the checkpoint has. The kernels divide a sum of squares by the number of all
    /// dimensions, so norms of heads need factors of its root and an epsilon that is smaller by it.
    pub(super) fn share_of_head(&self) -> f64 {
        self.spec.transformer().map_or(1.0, |layers| layers.head_dim as f64 / self.head_dim() as f64)
    }

    fn num_heads(&self) -> usize {
        self.spec.transformer().map_or(0, |layers| layers.num_attention_heads)
    }

    pub(super) fn heads_width(&self) -> usize {
        self.num_heads() * self.head_dim()
    }

    /// The heads of attention. `None` for a tower without a transformer.
    pub fn heads(&self) -> Option<Heads> {
        self.spec.transformer()?;
        Some(Heads { group: 1, head_dim: self.head_dim(), kv: self.kv() })
    }

    /// What the kernels of its layers compute.
    pub fn layer_kind(&self) -> LayerKind {
        let is_gated = matches!(self.spec.encoder, Encoder::RmsNorms { .. });
        LayerKind {
            activation: self.spec.transformer().map_or(HiddenAct::GeluTanh, |layers| layers.hidden_act),
            has_post_norms: is_gated,
            has_qk_norms: is_gated,
            has_value_norm: is_gated,
            has_biases: matches!(self.spec.encoder, Encoder::LayerNorms(_)),
            ..LayerKind::default()
        }
    }

    pub(super) fn shape(&self, max_batch_tokens: usize) -> AttentionShape {
        AttentionShape {
            num_heads: self.num_heads(),
            num_kv_heads: self.num_heads(),
            head_dim: self.head_dim(),
            block_size: BLOCK_SIZE,
            max_blocks: blocks(self.most_patches(max_batch_tokens)),
            window: None,
        }
    }

    /// The most patches of an image.
    pub(super) fn most_patches(&self, max_batch_tokens: usize) -> usize {
        let tokens = self.limits(max_batch_tokens).map_or_else(|| self.most_tokens(), |limits| limits.tokens);
        tokens * self.spec.patches_per_token()
    }

    /// The columns, and the rows, that an image has at most.
    fn most_positions(&self, max_batch_tokens: usize) -> usize {
        self.spec.most_positions(self.most_patches(max_batch_tokens) / self.spec.patches_per_token())
    }

    /// What the device has of a tensor, without values.
    pub(super) fn stored(&self, tensor: &VisionTensor, max_batch_tokens: usize) -> Stored<()> {
        let shape = &tensor.shape;
        let columns: usize = shape[1..].iter().product();
        let positions = self.most_positions(max_batch_tokens);
        let heads = |elements: usize| elements / self.stored_head() * self.head_dim();
        let vectors = |width, count| Stored::Vectors { width, each: vec![(); count] };
        match tensor.form {
            Form::Heads | Form::AxialHeads if shape.len() == 1 => vectors(heads(shape[0]), 1),
            Form::Vector | Form::OnePlus => vectors(shape[0], 1),
            Form::OfPixels if shape.len() == 1 => vectors(shape[0], 1),
            Form::Matrix | Form::OfPixels => Stored::Matrix([shape[0], columns], ()),
            Form::Transposed => Stored::Matrix([columns, shape[0]], ()),
            Form::Heads | Form::AxialHeads => Stored::Matrix([heads(shape[0]), columns], ()),
            Form::OfHeads => Stored::Matrix([shape[0], heads(columns)], ()),
            Form::Rows => vectors(Activations::stride_of(columns) * shape[0], 1),
            Form::Axes | Form::InterleavedAxes => vectors(Activations::stride_of(shape[2]) * positions, 2),
        }
    }

    /// The dimension of a head in the checkpoint.
    fn stored_head(&self) -> usize {
        self.spec.transformer().map_or(1, |layers| layers.head_dim)
    }

    /// The values of a tensor in the form in which the device has them. `values` are those of the checkpoint.
    pub(super) fn arranged(
        &self,
        tensor: &VisionTensor,
        values: Vec<f32>,
        (max_batch_tokens, has_gguf_layout): (usize, bool),
    ) -> Stored<Vec<f32>> {
        let shape = &tensor.shape;
        let columns: usize = shape[1..].iter().product();
        let is_vector = shape.len() == 1;
        let positions = self.most_positions(max_batch_tokens);
        let arranged = match tensor.form {
            Form::Vector | Form::Matrix => vec![values],
            Form::OnePlus | Form::OfPixels if has_gguf_layout => vec![values],
            Form::OnePlus => vec![values.into_iter().map(|w| 1.0 + w).collect()],
            Form::Transposed => vec![transposed(&values, shape[0])],
            Form::Heads => vec![padded_heads(&values, columns, self.stored_head(), self.head_dim())],
            Form::AxialHeads => {
                let mut heads = halved_heads(&values, columns, self.stored_head(), self.head_dim());
                if is_vector {
                    // The factors of a norm.
                    let root = self.share_of_head().sqrt() as f32;
                    heads.iter_mut().for_each(|factor| *factor *= root);
                }
                vec![heads]
            }
            Form::OfHeads => {
                let mut heads = padded_heads(&values, 1, self.stored_head(), self.head_dim());
                if matches!(self.spec.encoder, Encoder::RmsNorms { .. }) {
                    // Values have a norm without factors.
                    let root = self.share_of_head().sqrt() as f32;
                    heads.iter_mut().for_each(|weight| *weight *= root);
                }
                vec![heads]
            }
            Form::OfPixels => vec![by_channels(&values, self.spec.patch_elements())],
            Form::Rows => vec![with_stride(values.chunks_exact(columns))],
            Form::InterleavedAxes if !has_gguf_layout => {
                let axis = |axis| values.chunks_exact(shape[2]).skip(axis).step_by(2).take(positions);
                vec![with_stride(axis(0)), with_stride(axis(1))]
            }
            Form::Axes | Form::InterleavedAxes => {
                let halves = values.chunks_exact(values.len() / 2);
                halves.map(|axis| with_stride(axis.chunks_exact(shape[2]).take(positions))).collect()
            }
        };
        match self.stored(tensor, max_batch_tokens) {
            Stored::Matrix(size, ()) => {
                let [values] = arranged.try_into().expect("one matrix");
                Stored::Matrix(size, values)
            }
            Stored::Vectors { width, each } => {
                assert!(each.len() == arranged.len() && arranged.iter().all(|one| one.len() == width));
                Stored::Vectors { width, each: arranged }
            }
        }
    }

    /// (cos, sin) of the angles of an axial RoPE for each column, and for each row. A pair of a head's dimensions turns by
    /// the column or by the row, and has zeros for the other.
    pub(super) fn rope_tables(&self, theta: f64, max_batch_tokens: usize) -> [Vec<f32>; 2] {
        let pairs = self.stored_head() / 4;
        let frequency = |i: usize| theta.powf(-(i as f64) / pairs as f64);
        [0, pairs].map(|first| {
            let mut table = Vec::new();
            for position in 0..self.most_positions(max_batch_tokens) {
                let mut row = vec![0.0; self.head_dim()];
                for i in 0..pairs {
                    let (sin, cos) = (position as f64 * frequency(i)).sin_cos();
                    row[2 * (first + i)..][..2].copy_from_slice(&[cos as f32, sin as f32]);
                }
                table.extend(row);
            }
            table
        })
    }

    /// Every buffer, in the order in which the load requests them.
    pub fn requests(&self, max_batch_tokens: usize) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut add = |class, kind, bytes: u64, name: &str| {
            requests.push(Request { class, kind, bytes, name: format!("vision: {name}") });
        };
        for tensor in self.spec.tensors() {
            match self.stored(&tensor, max_batch_tokens) {
                Stored::Matrix([rows, cols], ()) => {
                    for (blocks, scales) in Matrix::buffer_bytes(self.scheme, rows, cols, u64::MAX) {
                        add(Class::Vision, MemoryKind::Device, blocks, &tensor.name);
                        scales
                            .into_iter()
                            .for_each(|bytes| add(Class::Vision, MemoryKind::Device, bytes, &tensor.name));
                    }
                }
                Stored::Vectors { width, each } => each
                    .iter()
                    .for_each(|()| add(Class::Vision, MemoryKind::Device, 4 * width as u64, &tensor.name)),
            }
        }
        let VisionSpec { hidden_size: hidden, text_hidden_size: text, .. } = *self.spec;
        let elements = self.spec.patch_elements();
        let patches = self.most_patches(max_batch_tokens);
        let tokens = patches / self.spec.patches_per_token();
        let slots = self.limits(max_batch_tokens).map_or(1, |limits| limits.slots);
        let (floats, blocks_bytes) = (Activations::bytes, Quantized::bytes);
        for (bytes, name) in [
            // Of norms without factors or biases.
            (4 * hidden.max(elements) as u64, "ones"),
            (4 * hidden.max(elements) as u64, "zeros"),
            (floats(patches, elements), "patches"),
            (blocks_bytes(patches, elements), "patches (int8)"),
            (floats(patches, hidden), "hidden"),
            (floats(patches, hidden), "normed"),
            (blocks_bytes(patches, hidden), "normed (int8)"),
            (floats(tokens, hidden), "pooled"),
            (floats(tokens, hidden), "normed pooled"),
            (blocks_bytes(tokens, hidden), "normed pooled (int8)"),
            (floats(slots * tokens, text), "embeddings"),
        ] {
            add(Class::Activations, MemoryKind::Device, bytes, name);
        }
        let pixels = (3 * patches * self.spec.patch_size.pow(2)).next_multiple_of(4) as u64;
        add(Class::Staging, MemoryKind::Upload, pixels, "pixels");
        let Some(layers) = self.spec.transformer() else {
            add(Class::Activations, MemoryKind::Device, floats(patches, elements), "normed patches");
            return requests;
        };

        let (heads, ffn) = (self.heads_width(), layers.intermediate_size);
        let of_network = largest_part(&network_parts(patches));
        let kv = self.kv().block_bytes(BLOCK_SIZE * self.num_heads(), self.head_dim()) as u64;
        let partial = partial_width(self.num_heads(), self.head_dim());
        let blocks = blocks(patches) as u64;
        for (bytes, name) in [
            (floats(patches, hidden), "delta"),
            (floats(patches, heads), "q"),
            (floats(patches, heads), "k"),
            (floats(patches, heads), "v"),
            (floats(patches, heads), "attended"),
            (blocks_bytes(patches, heads), "attended (int8)"),
            (floats(of_network, ffn), "network"),
            (blocks_bytes(of_network, ffn), "network (int8)"),
            (floats(patches, partial), "partials"),
            (blocks * kv, "keys"),
            (blocks * kv, "values"),
            (4 * patches as u64, "the sequence of patches"),
            (4 * patches as u64, "slots of patches"),
            (4 * blocks, "block table"),
        ] {
            add(Class::Activations, MemoryKind::Device, bytes, name);
        }
        match self.spec.encoder {
            Encoder::RmsNorms { .. } => {
                let table = floats(self.most_positions(max_batch_tokens), self.head_dim());
                for (bytes, name) in [
                    (table, "rotations of columns"),
                    (table, "rotations of rows"),
                    (floats(patches, self.head_dim()), "rope table"),
                    (floats(of_network, ffn), "up"),
                ] {
                    add(Class::Activations, MemoryKind::Device, bytes, name);
                }
            }
            // One row of cosines and sines: no patch is rotated.
            _ => add(Class::Activations, MemoryKind::Device, 4 * self.head_dim() as u64, "rope table"),
        }
        // The host writes these for each size of images.
        let parts = attention_parts(patches).len();
        let items = patches.div_ceil(self.shape(max_batch_tokens).tile_tokens()) + parts;
        for (bytes, name) in [
            ((items * size_of::<Item>()) as u64, "items"),
            (2 * INDIRECT_BYTES * (1 + parts as u64), "workgroups"),
            (8 * patches as u64, "merges"),
        ] {
            add(Class::Staging, MemoryKind::Upload, bytes, name);
        }
        requests
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        let all = self.requests(self.most_tokens());
        all.iter().filter(|request| request.class == Class::Vision).map(|request| request.bytes).sum()
    }
}

/// The KV blocks of so many patches.
pub(super) fn blocks(patches: usize) -> usize {
    patches.div_ceil(BLOCK_SIZE)
}

/// The patches of each part of attention.
pub(super) fn attention_parts(patches: usize) -> Vec<Range<usize>> {
    parts(patches, patches.div_ceil(ATTENTION_PARTS).min((ATTENTION_PAIRS / patches).max(1)))
}

/// The patches of each part of a feed-forward network.
pub(super) fn network_parts(patches: usize) -> Vec<Range<usize>> {
    parts(patches, patches.div_ceil(NETWORK_PARTS).min(NETWORK_PATCHES))
}

fn parts(patches: usize, each: usize) -> Vec<Range<usize>> {
    (0..patches).step_by(each).map(|first| first..(first + each).min(patches)).collect()
}

fn largest_part(parts: &[Range<usize>]) -> usize {
    parts.iter().map(Range::len).max().unwrap_or(0)
}

/// Heads of `stored` rows of `columns` values, with rows of zeros after each up to `padded`.
fn padded_heads(values: &[f32], columns: usize, stored: usize, padded: usize) -> Vec<f32> {
    let zeros = vec![0.0; (padded - stored) * columns];
    let heads = values.chunks_exact(stored * columns);
    heads.flat_map(|head| head.iter().chain(&zeros)).copied().collect()
}

/// Heads as [`padded_heads`], for the kernels, which turn row `i` of a head with row `i + padded / 2`. The checkpoint's heads
/// turn row `i` of the first half with the row a quarter after it, and so in the second half.
fn halved_heads(values: &[f32], columns: usize, stored: usize, padded: usize) -> Vec<f32> {
    let quarter = stored / 4 * columns;
    let zeros = vec![0.0; (padded - stored) / 2 * columns];
    let heads = values.chunks_exact(stored * columns);
    let quarters = |head: &[f32]| [0, 2, 1, 3].map(|i| head[i * quarter..][..quarter].to_vec());
    heads.map(quarters).flat_map(|[a, b, c, d]| [a, b, zeros.clone(), c, d, zeros.clone()].concat()).collect()
}

/// The values of rows of pixels with three channels each, channel by channel.
fn by_channels(values: &[f32], elements: usize) -> Vec<f32> {
    let rows = values.chunks_exact(elements);
    rows.flat_map(|row| (0..3).flat_map(|channel| row.iter().skip(channel).step_by(3))).copied().collect()
}

/// The values of rows with zeros between them, as activations have them.
fn with_stride<'v>(rows: impl Iterator<Item = &'v [f32]>) -> Vec<f32> {
    let mut all = Vec::new();
    for row in rows {
        all.extend_from_slice(row);
        all.resize(all.len() + Activations::stride_of(row.len()) - row.len(), 0.0);
    }
    all
}

/// The transpose of a matrix with `rows` rows.
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let cols = values.len() / rows;
    (0..cols).flat_map(|col| (0..rows).map(move |row| values[row * cols + col])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_become_the_halves_that_the_kernels_turn() {
        let head: Vec<f32> = (0..8).map(|x| x as f32).collect();
        assert_eq!(halved_heads(&head, 1, 8, 8), [0., 1., 4., 5., 2., 3., 6., 7.]);
        assert_eq!(
            halved_heads(&head, 1, 4, 8),
            [[0., 2., 0., 0., 1., 3., 0., 0.], [4., 6., 0., 0., 5., 7., 0., 0.]].concat()
        );
        assert_eq!(padded_heads(&head, 2, 2, 3), [0., 1., 2., 3., 0., 0., 4., 5., 6., 7., 0., 0.]);
    }

    #[test]
    fn parts_are_bounded_and_cover_all_patches() {
        for patches in [1, 9, 64, 630, 2520, 4096, 10_080] {
            for (parts, most) in [
                (attention_parts(patches), ATTENTION_PAIRS / patches),
                (network_parts(patches), NETWORK_PATCHES),
            ] {
                assert_eq!(parts.first().map(|part| part.start), Some(0));
                assert_eq!(parts.last().map(|part| part.end), Some(patches));
                assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
                assert!(largest_part(&parts) <= most && !parts.iter().any(Range::is_empty));
            }
        }
        assert_eq!((attention_parts(4096).len(), network_parts(4096).len()), (4, 2));
    }
}
