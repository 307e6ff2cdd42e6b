//! The device's kernels that write the inputs of the NPU, and read its output.
//!
//! The NPU computes softmax(q K) V of consecutive tokens of one sequence, for the first KV heads of a layer.

use std::sync::Arc;

use crate::gpu::{Buffer, Device, GpuError, Pipeline, Recorder};
use crate::kernels::{Activations, Attention, AttentionShape, Heads, Partials, shaders, words};
use crate::tensor::KvDtype;

/// Invocations of a workgroup.
const LANES: usize = 256;

/// The pipelines of these kernels.
pub struct OffloadKernels {
    queries: Arc<Pipeline>,
    cache: Arc<Pipeline>,
    partials: Arc<Pipeline>,
}

/// Consecutive keys and values of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatheredKeys {
    /// The position of key 0, and the number of keys.
    pub first: usize,
    pub count: usize,
    /// The first position that is read. Keys before it are zeros.
    pub first_seen: usize,
    /// The distance of two KV heads, in keys.
    pub stride: usize,
}

impl OffloadKernels {
    pub fn new(device: &Device, heads: Heads) -> Result<OffloadKernels, GpuError> {
        let cache = match heads.kv {
            KvDtype::F32 => &shaders::OFFLOAD_CACHE_F32,
            KvDtype::F16 => &shaders::OFFLOAD_CACHE_F16,
            KvDtype::Int8 => &shaders::OFFLOAD_CACHE_INT8,
        };
        Ok(OffloadKernels {
            queries: device.pipeline(&shaders::OFFLOAD_QUERIES, &[])?,
            cache: device.pipeline(cache, &[])?,
            partials: device.pipeline(&shaders::OFFLOAD_PARTIALS, &[])?,
        })
    }

    /// Writes the queries of `rows` tokens to `to`, bf16 `[heads][row_stride][head_dim]`, for the query heads of the
    /// first `kv_heads` KV heads, with zeros after the last row. `q` begins with the first token.
    pub fn queries(
        &self,
        recorder: &mut Recorder<'_>,
        shape: &AttentionShape,
        (q, rows): (&Activations, usize),
        kv_heads: usize,
        (to, row_stride): (&Buffer, usize),
    ) {
        let (heads, width) = (heads_of(shape, kv_heads), shape.num_heads * shape.head_dim);
        assert!(0 < rows && rows <= row_stride, "queries: {rows} rows, {row_stride} from head to head");
        let arguments = shaders::OffloadQueries {
            q: &q.used(rows, width, "queries: q"),
            queries: &words(to, heads * row_stride * shape.head_dim / 2, "queries: to"),
            num_heads: shape.num_heads as u32,
            fours: (shape.head_dim / 4) as u32,
            rows: rows as u32,
            row_stride: row_stride as u32,
        };
        recorder.dispatch(
            &self.queries,
            &arguments,
            [groups(row_stride * shape.head_dim / 4), heads as u32, 1],
        );
    }

    /// Writes keys and values of the first `kv_heads` KV heads to `to`, bf16 `[kv_heads][stride][head_dim]` each, with
    /// zeros after the last key. `blocks` is the sequence's row of the block tables.
    pub fn cache(
        &self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        (blocks, span): (&Buffer, &GatheredKeys),
        kv_heads: usize,
        [keys, values]: [&Buffer; 2],
    ) {
        let Attention { shape, cache, .. } = attention;
        let GatheredKeys { first, count, first_seen, stride } = *span;
        heads_of(shape, kv_heads);
        assert!(0 < count && count <= stride, "keys: {count} keys, {stride} from head to head");
        let elements = kv_heads * stride * shape.head_dim;
        let arguments = shaders::OffloadCache {
            k_cache: &cache.keys,
            v_cache: &cache.values,
            blocks: &words(blocks, (first + count).div_ceil(shape.block_size), "keys: blocks"),
            keys: &words(keys, elements / 2, "keys: to"),
            values: &words(values, elements / 2, "values: to"),
            num_kv_heads: shape.num_kv_heads as u32,
            block_size: shape.block_size as u32,
            fours: (shape.head_dim / 4) as u32,
            first_key: first as u32,
            first_seen: first_seen as u32,
            count: count as u32,
            key_stride: stride as u32,
        };
        recorder.dispatch(&self.cache, &arguments, [groups(stride * shape.head_dim / 4), kv_heads as u32, 2]);
    }

    /// Writes partials from the NPU's output, f32 `[heads][row_stride][head_dim]`, for the query heads of the first
    /// `kv_heads` KV heads of `rows` tokens. `merges` begins with the first token's entry.
    pub fn partials(
        &self,
        recorder: &mut Recorder<'_>,
        shape: &AttentionShape,
        (attended, row_stride): (&Buffer, usize),
        kv_heads: usize,
        (merges, rows): (&Buffer, usize),
        partials: &Partials,
    ) {
        let heads = heads_of(shape, kv_heads);
        assert!(0 < rows && rows <= row_stride, "partials: {rows} rows, {row_stride} from head to head");
        let Partials { single, tiles } = partials;
        for partials in [single, tiles] {
            assert_eq!(partials.width, shape.partial_width(), "partials: width");
        }
        let fours = shape.head_dim / 4;
        let arguments = shaders::OffloadPartials {
            attended: &words(attended, heads * row_stride * shape.head_dim, "partials: attended"),
            merges: &words(merges, 2 * rows, "partials: merges"),
            single: &single.buffer,
            tiles: &tiles.buffer,
            num_heads: shape.num_heads as u32,
            heads: heads as u32,
            fours: fours as u32,
            row_stride: row_stride as u32,
        };
        recorder.dispatch(&self.partials, &arguments, [groups(heads * (fours + 1)), rows as u32, 1]);
    }
}

/// The query heads of the first `kv_heads` KV heads. Panics if there are fewer, or if `kv_heads` is 0.
fn heads_of(shape: &AttentionShape, kv_heads: usize) -> usize {
    assert!((1..=shape.num_kv_heads).contains(&kv_heads), "{kv_heads} KV heads of {}", shape.num_kv_heads);
    kv_heads * (shape.num_heads / shape.num_kv_heads)
}

fn groups(lanes: usize) -> u32 {
    lanes.div_ceil(LANES) as u32
}
