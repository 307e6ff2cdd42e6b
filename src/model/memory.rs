//! What a Gemma-3 takes of a device, counted before any of it is taken: one list of buffers, which a load asks for in
//! this order and a plan adds up.
//!
//! Refuses, with the table of what was asked and what is free, what the policy of [`crate::gpu::placement`] finds no
//! place for, and names the largest context or the smaller scheme that would fit. Invariant: the list is complete; a
//! load that asks for anything else panics.

use super::Limits;
use super::config::Gemma3Config;
use super::weights::Gemma3Weights;
use crate::checkpoint::CheckpointError;
use crate::gpu::placement::{self, Class, Machine, MemoryKind, Plan, Refusal, Request};
use crate::kernels::{Activations, Embedding, Matrix, SampleRequest};
use crate::tensor::{QuantizeMode, Scheme};

/// Tokens per KV block.
pub const BLOCK_SIZE: usize = 16;
/// Sequences in one step.
pub const MAX_SEQUENCES: usize = 16;
/// Steps that may be submitted and not yet waited for: the engine prepares one while the other runs.
pub(super) const MAX_IN_FLIGHT: usize = 2;
/// Rows of logits computed at once: the larger of what a step may sample and what `eval` reads in one go.
pub(super) const LOGIT_ROWS: usize = 32;
/// Work per submit, in multiply-adds: some 50 ms at 1 TFLOP/s, well under the amdgpu driver's ring timeout. One layer
/// is not cut: deep into a long context, its attention alone may be more.
pub(super) const MAX_SUBMIT_MACS: u64 = 25_000_000_000;
/// Prompt tokens per step are not cut below this, however large the model.
const MIN_BATCH_TOKENS: usize = 32;

/// How the matrices of a model lie on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schemes {
    pub embedding: Scheme,
    /// In the order of `LayerWeights::projections`: q, k, v, o; gate, up, down.
    pub layers: Vec<[Scheme; 7]>,
}

impl Schemes {
    /// Of a checkpoint that is loaded with `mode`.
    pub fn of(weights: &Gemma3Weights<'_>, mode: QuantizeMode) -> Result<Schemes, CheckpointError> {
        let mut layers = Vec::with_capacity(weights.layers.len());
        for layer in &weights.layers {
            let mut schemes = [Scheme::F32; 7];
            for (scheme, tensor) in schemes.iter_mut().zip(layer.projections()) {
                *scheme = mode.projections().map_or_else(|| tensor.scheme(), Ok)?;
            }
            layers.push(schemes);
        }
        let embedding = mode.embedding().map_or_else(|| weights.embed_tokens.scheme(), Ok)?;
        Ok(Schemes { embedding, layers })
    }

    /// The same for every layer: attention, feed-forward, embedding.
    pub fn uniform(config: &Gemma3Config, attention: Scheme, ffn: Scheme, embedding: Scheme) -> Schemes {
        let layer = [attention, attention, attention, attention, ffn, ffn, ffn];
        Schemes { embedding, layers: vec![layer; config.num_hidden_layers] }
    }
}

/// A model as far as its size goes.
#[derive(Debug, Clone)]
pub struct Demand<'a> {
    pub config: &'a Gemma3Config,
    pub schemes: Schemes,
    /// Prompt tokens processed per step, as asked for.
    pub max_batch_tokens: usize,
    /// One allocation of weights is at most this large.
    pub max_shard_bytes: u64,
    /// Whether the inputs of each layer's matrices are summed up.
    pub moments: bool,
}

/// A context that fits, and where everything lies then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    /// Tokens of each sequence.
    pub context: usize,
    pub plan: Plan,
}

/// A model does not fit. Nothing was taken. One line; [`Refusal::table`] has the rows.
#[derive(Debug, thiserror::Error)]
#[error("the model does not fit with {}: {refusal}; {}", tokens_of(*.sequences, *.context), advice(self))]
pub struct DoesNotFit {
    /// Tokens of each sequence that were asked for; the least there is, where as many as fit were.
    pub context: usize,
    pub sequences: usize,
    pub refusal: Box<Refusal>,
    /// Tokens of each sequence that would fit; 0 where none do.
    pub largest_context: usize,
    /// The option, e.g. `--quantize int4-g128`, with which it would fit, and tokens of each sequence then.
    pub smaller: Option<(String, usize)>,
}

fn tokens_of(sequences: usize, context: usize) -> String {
    match sequences {
        1 => format!("a context of {context} tokens"),
        n => format!("{n} contexts of {context} tokens"),
    }
}

fn advice(error: &DoesNotFit) -> String {
    match (error.largest_context, &error.smaller) {
        (0, None) => "no smaller scheme would fit: free memory, or allow more of it (memory.vram, memory.gtt, memory.reserve)".into(),
        (0, Some((option, context))) => {
            format!("{option} would fit, with {}", tokens_of(error.sequences, *context))
        }
        (context, _) => format!("--context {context} would fit"),
    }
}

impl Demand<'_> {
    /// Tokens that a step has room for.
    pub fn batch_tokens(&self) -> usize {
        let bounded = (MAX_SUBMIT_MACS / macs_per_token_and_layer(self.config)) as usize;
        self.max_batch_tokens.min(bounded.max(MIN_BATCH_TOKENS)).min(self.config.max_position_embeddings)
    }

    /// What a runner with that context can hold.
    pub fn limits(&self, context: usize, sequences: usize) -> Limits {
        Limits {
            max_batch_tokens: self.batch_tokens().min(context),
            max_sequences: MAX_SEQUENCES,
            block_size: BLOCK_SIZE,
            num_blocks: sequences * context.div_ceil(BLOCK_SIZE),
            max_context: context,
            vocab_size: self.config.vocab_size,
        }
    }

    /// Every buffer, each class in the order in which a load asks for it.
    pub fn requests(&self, context: usize, sequences: usize) -> Vec<Request> {
        let c = self.config;
        let limits = self.limits(context, sequences);
        let mut requests = Vec::new();
        let mut add = |class, kind, bytes, name: String| requests.push(Request { class, kind, bytes, name });
        let device = MemoryKind::Device;
        let matrix = |(rows, cols): (usize, usize), scheme: Scheme| {
            Matrix::buffer_bytes(scheme, rows, cols, self.max_shard_bytes)
        };

        let (mut bytes, mut shards) = (Vec::new(), 0);
        for (blocks, scales) in matrix((c.vocab_size, c.hidden_size), self.schemes.embedding) {
            shards += 1;
            bytes.push(blocks);
            bytes.extend(scales);
        }
        bytes.push(Embedding::table_bytes(shards));
        for bytes in bytes {
            add(Class::Embedding, device, bytes, "embed_tokens".into());
        }

        let (hidden, head_dim) = (c.hidden_size as u64, c.head_dim as u64);
        let norms = [hidden, hidden, hidden, hidden, head_dim, head_dim];
        add(Class::Norms, device, 4 * hidden, "norm".into());
        let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
        let (attention, ffn) = (Class::Attention, Class::Ffn);
        let projections = [
            ("q_proj", attention, (q, c.hidden_size)),
            ("k_proj", attention, (kv, c.hidden_size)),
            ("v_proj", attention, (kv, c.hidden_size)),
            ("o_proj", attention, (c.hidden_size, q)),
            ("gate_proj", ffn, (c.intermediate_size, c.hidden_size)),
            ("up_proj", ffn, (c.intermediate_size, c.hidden_size)),
            ("down_proj", ffn, (c.hidden_size, c.intermediate_size)),
        ];
        for (i, schemes) in self.schemes.layers.iter().enumerate() {
            for ((name, class, shape), scheme) in projections.iter().zip(schemes) {
                for (blocks, scales) in matrix(*shape, *scheme) {
                    add(*class, device, blocks, format!("layers.{i}.{name}"));
                    if let Some(scales) = scales {
                        add(*class, device, scales, format!("layers.{i}.{name} scales"));
                    }
                }
            }
            for elements in norms {
                add(Class::Norms, device, 4 * elements, format!("layers.{i} norm"));
            }
        }

        for (name, rows, width) in activations(c, self.batch_tokens()) {
            add(Class::Activations, device, Activations::bytes(rows, width), name.into());
        }
        add(Class::Activations, device, SAMPLED_BYTES, "sampled ids".into());
        for name in ["rope table (sliding layers)", "rope table (full layers)"] {
            add(Class::Activations, device, rope_table_bytes(c, context), name.into());
        }

        if self.moments {
            for i in 0..c.num_hidden_layers {
                for width in moment_widths(c) {
                    add(Class::Activations, device, 4 * width as u64, format!("layers.{i} moments"));
                }
            }
        }

        add(Class::Staging, MemoryKind::Readback, logits_bytes(c), "logits readback".into());
        for step in 0..MAX_IN_FLIGHT {
            let input = step_input_bytes(&limits).iter().sum();
            add(Class::Staging, MemoryKind::Upload, input, format!("step {step} input"));
            add(Class::Staging, MemoryKind::Readback, DRAWN_IDS_BYTES, "drawn ids".into());
        }

        for i in 0..c.num_hidden_layers {
            for what in ["key", "value"] {
                let bytes = limits.num_blocks as u64 * kv_block_bytes(c);
                add(Class::KvCache, device, bytes, format!("layer {i} {what} cache"));
            }
        }
        requests
    }

    /// Everything in its place, with `sequences` contexts of `context` tokens.
    pub fn place(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        context: usize,
        sequences: usize,
    ) -> Result<Plan, Box<Refusal>> {
        placement::place(machine, limits, self.requests(context, sequences))
    }

    /// The largest context, in whole blocks or the model's own maximum, that fits that many times; 0 where none does.
    pub fn largest_context(&self, machine: &Machine, limits: &placement::Limits, sequences: usize) -> usize {
        let longest = self.config.max_position_embeddings;
        let context = |blocks: usize| (blocks * BLOCK_SIZE).min(longest);
        let fits = |blocks| self.place(machine, limits, context(blocks), sequences).is_ok();
        // Between what fits and what does not.
        let (mut fitting, mut beyond) = (0, longest.div_ceil(BLOCK_SIZE) + 1);
        while beyond - fitting > 1 {
            let middle = fitting + (beyond - fitting) / 2;
            if fits(middle) { fitting = middle } else { beyond = middle }
        }
        context(fitting)
    }

    /// Places `wanted` tokens of context, or as many as fit up to the model's maximum; each as often as there are
    /// `sequences`. `others`: options that store the weights otherwise, as [`quantize_modes`] does, with what they lead to.
    pub fn fit(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        wanted: Option<usize>,
        sequences: usize,
        others: &[(String, Schemes)],
    ) -> Result<Fit, DoesNotFit> {
        let longest = self.config.max_position_embeddings;
        let context = match wanted {
            Some(wanted) => wanted.min(longest),
            // Where not even a block fits, the refusal is that of a block.
            None => self.largest_context(machine, limits, sequences).max(BLOCK_SIZE.min(longest)),
        };
        self.place(machine, limits, context, sequences).map(|plan| Fit { context, plan }).map_err(|refusal| {
            let largest_context = self.largest_context(machine, limits, sequences);
            let smaller = if largest_context > 0 {
                None
            } else {
                self.first_smaller(machine, limits, sequences, others)
            };
            DoesNotFit { context, sequences, refusal, largest_context, smaller }
        })
    }

    /// The largest allocation, where that is what keeps more than `context`, the largest that fits, from fitting: a layer's
    /// keys are one buffer.
    pub fn allocation_limit(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        context: usize,
        sequences: usize,
    ) -> Option<u64> {
        if context >= self.config.max_position_embeddings {
            return None;
        }
        match self.place(machine, limits, context + BLOCK_SIZE, sequences).err()?.obstacle {
            placement::Obstacle::TooLarge { limit } => Some(limit),
            placement::Obstacle::Full => None,
        }
    }

    /// Of `others`, the one with the largest weights that are smaller than these and fit, and its largest context.
    fn first_smaller(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        sequences: usize,
        others: &[(String, Schemes)],
    ) -> Option<(String, usize)> {
        let with = |schemes: &Schemes| Demand { schemes: schemes.clone(), ..self.clone() };
        let mut others: Vec<_> = others
            .iter()
            .map(|(option, schemes)| (option, with(schemes)))
            .map(|(o, d)| (d.weight_bytes(), o, d))
            .collect();
        others.retain(|(bytes, ..)| *bytes < self.weight_bytes());
        others.sort_by_key(|(bytes, ..)| std::cmp::Reverse(*bytes));
        others.into_iter().find_map(|(_, option, demand)| {
            let context = demand.largest_context(machine, limits, sequences);
            (context > 0).then(|| (option.clone(), context))
        })
    }

    /// Bytes of KV cache that one token of one sequence takes.
    pub fn kv_bytes_per_token(&self) -> u64 {
        2 * self.config.num_hidden_layers as u64 * kv_block_bytes(self.config) / BLOCK_SIZE as u64
    }

    /// Bytes of weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        let weights = self.requests(BLOCK_SIZE, 1).into_iter().filter(|r| r.class.is_weights());
        weights.map(|r| r.bytes).sum()
    }
}

/// u32 per slot: the id last sampled there.
pub(super) const SAMPLED_BYTES: u64 = 4 * MAX_SEQUENCES as u64;
/// u32 per row of logits.
pub(super) const DRAWN_IDS_BYTES: u64 = 4 * LOGIT_ROWS as u64;

/// Activations of a step: name, rows, width, in the order of `Scratch`.
pub(super) fn activations(c: &Gemma3Config, tokens: usize) -> [(&'static str, usize, usize); 11] {
    let heads = c.num_attention_heads * c.head_dim;
    let kv_heads = c.num_key_value_heads * c.head_dim;
    [
        ("hidden", tokens, c.hidden_size),
        ("normed", tokens, c.hidden_size),
        ("delta", tokens, c.hidden_size),
        ("q", tokens, heads),
        ("attended", tokens, heads),
        ("k", tokens, kv_heads),
        ("v", tokens, kv_heads),
        ("gate", tokens, c.intermediate_size),
        ("up", tokens, c.intermediate_size),
        ("final rows", LOGIT_ROWS, c.hidden_size),
        ("logits", LOGIT_ROWS, c.vocab_size),
    ]
}

/// Inputs of a layer's matrices: of q, k and v; of o; of gate and up; of down.
pub(super) fn moment_widths(c: &Gemma3Config) -> [usize; 4] {
    [c.hidden_size, c.num_attention_heads * c.head_dim, c.hidden_size, c.intermediate_size]
}

/// The logits' way back to the host.
pub(super) fn logits_bytes(c: &Gemma3Config) -> u64 {
    Activations::bytes(LOGIT_ROWS, c.vocab_size)
}

/// (cos, sin) in f32 for each position and pair of dimensions.
pub(super) fn rope_table_bytes(c: &Gemma3Config, context: usize) -> u64 {
    (context * c.head_dim * size_of::<f32>()) as u64
}

/// Bytes that one KV block takes in one layer, for keys or values.
pub(super) fn kv_block_bytes(c: &Gemma3Config) -> u64 {
    (BLOCK_SIZE * c.num_key_value_heads * c.head_dim * size_of::<f32>()) as u64
}

/// The arrays of one step: ids, positions, sequence of each token, slots, block tables, logit rows, sample requests.
pub(super) fn step_input_bytes(limits: &Limits) -> [u64; 7] {
    let per_token = 4 * limits.max_batch_tokens as u64;
    let tables = 4 * (limits.max_sequences * limits.num_blocks) as u64;
    let requests = (LOGIT_ROWS * size_of::<SampleRequest>()) as u64;
    [per_token, per_token, per_token, per_token, tables, 4 * LOGIT_ROWS as u64, requests]
        .map(|bytes| bytes.next_multiple_of(256))
}

/// Multiply-adds of one layer's matrices for one token.
pub(super) fn macs_per_token_and_layer(c: &Gemma3Config) -> u64 {
    let heads = (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim;
    (c.hidden_size * (heads + 3 * c.intermediate_size)) as u64
}

/// What each mode of `--quantize` would make of a checkpoint, by option.
pub fn quantize_modes(weights: &Gemma3Weights<'_>) -> Result<Vec<(String, Schemes)>, CheckpointError> {
    let each = QuantizeMode::ALL.into_iter();
    each.map(|mode| Ok((format!("--quantize {mode}"), Schemes::of(weights, mode)?))).collect()
}
