//! What a coprocessor needs from a model: its buffers, and its part of a step. A coprocessor is another processor that
//! computes a part of the attention of prompts, while the device computes the rest.
//!
//! A load reserves buffers for it ([`OffloadLimits`]). The runner passes it every step (`Coprocessor` in
//! `model_runner.rs`). This module does not know what the coprocessor is, or how it computes.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::spec::ModelSpec;
use crate::gpu::placement::{Class, MemoryKind};
use crate::gpu::{Arena, Buffer, GpuError};

/// The minimum and the maximum number of neighbouring prompt tokens of a sequence in which a coprocessor takes part.
pub const LEAST_TOKENS: usize = 32;
pub const MOST_TOKENS: usize = 512;

/// The chunk of a step in which a coprocessor takes part: the longest one, up to [`MOST_TOKENS`], and the first of
/// equal ones. Each chunk is a number of tokens; `None` = not part of a prompt.
pub fn longest_chunk(chunks: impl IntoIterator<Item = Option<usize>>) -> Option<usize> {
    let chunks = chunks.into_iter().enumerate();
    let long = chunks.filter_map(|(i, tokens)| Some((i, tokens.filter(|tokens| *tokens >= LEAST_TOKENS)?)));
    long.max_by_key(|(i, tokens)| ((*tokens).min(MOST_TOKENS), Reverse(*i))).map(|(i, _)| i)
}

/// A failure of a coprocessor, which is not used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct OffloadError {
    pub code: String,
    pub message: String,
}

/// The largest work for which a load reserves buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadLimits {
    pub kv_heads: usize,
    /// Maximum number of keys of a KV head.
    pub keys: usize,
    /// Whether the coprocessor reads and writes the device's buffers. If not, the host copies them.
    pub shared: bool,
}

impl OffloadLimits {
    /// The buffers that the host and the device share, by name: queries, keys, values, and the coprocessor's output.
    pub(super) fn buffers(&self, config: &ModelSpec) -> [(&'static str, MemoryKind, u64); 4] {
        let heads = config.heads();
        let keys = (self.kv_heads * self.keys * heads.head_dim) as u64;
        let queries = (self.kv_heads * heads.group() * MOST_TOKENS * heads.head_dim) as u64;
        let [input, output] = match self.shared {
            true => [MemoryKind::Shared; 2],
            false => [MemoryKind::Readback, MemoryKind::Upload],
        };
        [
            ("queries for the coprocessor", input, 2 * queries),
            ("keys for the coprocessor", input, 2 * keys),
            ("values for the coprocessor", input, 2 * keys),
            ("output of the coprocessor", output, 4 * queries),
        ]
    }
}

/// The buffers that a load reserved.
pub(crate) struct OffloadBuffers {
    pub queries: Buffer,
    pub keys: Buffer,
    pub values: Buffer,
    pub output: Buffer,
    pub limits: OffloadLimits,
}

impl OffloadBuffers {
    pub fn new(
        arena: &mut Arena,
        config: &ModelSpec,
        limits: OffloadLimits,
    ) -> Result<OffloadBuffers, GpuError> {
        let [queries, keys, values, output] =
            limits.buffers(config).map(|(name, kind, bytes)| arena.alloc(kind, Class::Staging, bytes, name));
        Ok(OffloadBuffers { queries: queries?, keys: keys?, values: values?, output: output?, limits })
    }
}

/// The part of a step's attention in which a coprocessor takes part.
#[derive(Debug, Clone)]
pub(crate) struct AttentionShare {
    /// The rows of the step, and the index of their sequence.
    pub rows: Range<usize>,
    pub sequence: usize,
    /// The KV heads that the coprocessor computes, from 0 on.
    pub kv_heads: usize,
    /// The keys that are gathered for the coprocessor in the layers of each pool; `None` = the device computes these
    /// layers alone.
    pub keys: Vec<Option<usize>>,
}
