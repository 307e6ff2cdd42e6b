//! The device memory of a model, counted before any of it is allocated. There is one list of buffers: a load
//! allocates in its order, and a plan adds it up.
//!
//! This module refuses a model that [`crate::gpu::placement`] finds no place for. The error has a table of the
//! requested memory and the free memory, and names the largest context or the smaller scheme that would fit. Invariant:
//! the list is complete; a load that requests another buffer panics.

use std::collections::BTreeSet;
use std::fmt;

use super::offload::OffloadLimits;
use super::rope::RopeSpec;
use super::self_test::{self, TestedExperts};
use super::spec::{
    AttentionHeads, LayerSpec, Mixture, ModelSpec, PerLayerInputs, ResidualStreams, each_once,
};
use super::tensors::{
    KeptMatrices, Layer, ModelTensors, PerLayerEmbeddings, Projections, StreamProjections, TensorSpec,
};
use super::vision::TowerRequest;
use super::weights::Weights;
use super::{ImageLimits, KvLimits, KvPool, Limits, MAX_BIASES, first_seen};
use crate::checkpoint::{CheckpointError, Tensor};
use crate::gpu::placement::{self, Class, Machine, MemoryKind, Plan, Refusal, Request};
use crate::gpu::{INDIRECT_BYTES, MAX_WORKGROUPS};
use crate::kernels::{
    Activations, Bias, Embedding, Heads, Item, LOGPROB_WORDS, Matrix, Quantized, Room, Routing,
    SampleRequest, draw_words, mask_words, partial_width,
};
use crate::tensor::{KvDtype, QuantizeMode, Scheme};

/// Default tokens per KV block.
pub const DEFAULT_BLOCK_SIZE: usize = 16;
/// The most sequences in one step, and the most ids that a step draws.
pub const MAX_SEQUENCES: usize = 64;
/// If no context length is configured: memory goes to a context of this length first, then to more sequences, and then
/// to a longer context.
const LEAST_CONTEXT: usize = 4096;
/// Tokens of each sequence in the full step for which `kv.dtype = "auto"` counts bytes. The predictions of
/// docs/measurements.md have as many.
pub const AUTO_KV_TOKENS: usize = 512;
/// The least bytes of keys and values in f16, in percent of the bytes of weights, for which `kv.dtype = "auto"` takes
/// int8. Half of them are saved: at 10 %, 5 of 110.
const AUTO_KV_PERCENT: f64 = 10.0;
/// The most steps that are submitted and not yet waited for: the engine prepares one while the other runs.
pub(super) const MAX_IN_FLIGHT: usize = 2;
/// Rows of logits that a step computes, one for each id that it may draw.
pub(super) const LOGIT_ROWS: usize = MAX_SEQUENCES;
/// The number of rows of logits that are read back together, for `eval`.
pub(super) const READBACK_ROWS: usize = 32;
/// The most multiply-adds of a step's tokens in the matrices of one layer. They take some 20 ms at 5.6 T/s, an estimate
/// for the Radeon 780M (68 % of the rate of its integer dot products). So a request that arrives while a prompt is
/// computed waits no longer than a second or two.
const MAX_LAYER_MACS: u64 = 110_000_000_000;
/// The tokens of a whole tile of a prompt's products.
const PRODUCT_TOKENS: usize = 32;
/// Slots for partials of attention beyond one for each token. More workgroups than this fill any device.
const SPARE_PARTIALS: Room = Room { single: 448, tiles: 256 };
/// The tokens that a step has room for besides those of an image: one of every sequence, and a few of another prompt.
const TOKENS_BESIDE_IMAGE: usize = MAX_SEQUENCES + 16;
/// The least tokens of a step, however large the model is: one of every sequence, and as many of a prompt.
const MIN_BATCH_TOKENS: usize = 2 * MAX_SEQUENCES;

/// Schemes of a model's matrices on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schemes {
    pub embedding: Scheme,
    /// The matrix of the logits; `None` = the embedding.
    pub lm_head: Option<Scheme>,
    pub layers: Vec<Projections<Scheme>>,
    /// The matrices of each layer that no mode of quantization changes.
    pub kept: Vec<KeptMatrices<Scheme>>,
    pub per_layer: Option<PerLayerSchemes>,
    pub streams: Option<StreamProjections<Scheme>>,
}

/// The schemes of the table of per-layer embeddings, and of the matrix of their product.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerLayerSchemes {
    pub embedding: Scheme,
    pub projection: Scheme,
}

impl Schemes {
    /// The schemes of a checkpoint that is loaded with `mode`.
    pub fn of(weights: &Weights<'_>, mode: QuantizeMode) -> Result<Schemes, CheckpointError> {
        let in_mode = |mode: Option<Scheme>, tensor: &Tensor<'_>| mode.map_or_else(|| tensor.scheme(), Ok);
        let layers =
            weights.tensors.layers.iter().map(|layer| {
                layer.projections.as_ref().try_map(|tensor| in_mode(mode.projections(), tensor))
            });
        let layers = layers.collect::<Result<_, _>>()?;
        let ModelTensors { embed_tokens, lm_head, per_layer, streams, .. } = &weights.tensors;
        let of_vocabulary = |tensor: &Tensor<'_>| in_mode(mode.embedding(), tensor);
        let lm_head = lm_head.as_ref().map(of_vocabulary).transpose()?;
        let kept = weights.tensors.layers.iter().map(|layer| layer.kept.as_ref().try_map(Tensor::scheme));
        let kept = kept.collect::<Result<_, _>>()?;
        let of_per_layer = |tensors: &PerLayerEmbeddings<Tensor<'_>>| -> Result<_, CheckpointError> {
            Ok(PerLayerSchemes {
                embedding: of_vocabulary(&tensors.embed_tokens_per_layer)?,
                projection: tensors.per_layer_model_projection.scheme()?,
            })
        };
        let per_layer = per_layer.as_ref().map(of_per_layer).transpose()?;
        let of_streams = |tensors: &StreamProjections<Tensor<'_>>| tensors.as_ref().try_map(Tensor::scheme);
        let streams = streams.as_ref().map(of_streams).transpose()?;
        Ok(Schemes { embedding: of_vocabulary(embed_tokens)?, lm_head, layers, kept, per_layer, streams })
    }

    /// The schemes of the matrices that activations are multiplied by and that no mode of quantization changes.
    pub(super) fn kept_products(&self) -> impl Iterator<Item = &Scheme> {
        let of_layers = self.kept.iter().flat_map(KeptMatrices::iter);
        let per_layer = self.per_layer.iter().map(|schemes| &schemes.projection);
        per_layer.chain(self.streams.iter().flat_map(StreamProjections::iter)).chain(of_layers)
    }

    /// The scheme of the matrix that computes the logits.
    pub fn head(&self) -> Scheme {
        self.lm_head.unwrap_or(self.embedding)
    }

    /// Each scheme once, the embedding's first.
    pub fn distinct(&self) -> Vec<Scheme> {
        let of_layers = self.layers.iter().flat_map(Projections::iter);
        let vocabulary = [&self.embedding].into_iter().chain(&self.lm_head);
        let all = vocabulary.chain(of_layers).chain(self.kept_products());
        each_once(all.copied())
    }

    /// The schemes of a model whose layers all have the same ones: for attention, feed-forward network and embedding. The
    /// matrices that no mode of quantization changes are bf16, as in published checkpoints.
    pub fn uniform(config: &ModelSpec, attention: Scheme, ffn: Scheme, embedding: Scheme) -> Schemes {
        let layers = config.tensors.layers.iter().map(|layer| {
            layer.projections.as_ref().map(|spec| match spec.class {
                Class::Ffn | Class::Experts => ffn,
                _ => attention,
            })
        });
        let lm_head = config.tensors.lm_head.is_some().then_some(embedding);
        let of_kept = |layer: &Layer<TensorSpec>| layer.kept.as_ref().map(|_| Scheme::Bf16);
        let tensors = &config.tensors;
        let per_layer = PerLayerSchemes { embedding, projection: Scheme::Bf16 };
        Schemes {
            embedding,
            lm_head,
            layers: layers.collect(),
            kept: tensors.layers.iter().map(of_kept).collect(),
            per_layer: tensors.per_layer.as_ref().map(|_| per_layer),
            streams: tensors.streams.as_ref().map(|streams| streams.as_ref().map(|_| Scheme::Bf16)),
        }
    }
}

/// The schemes of attention, feed-forward networks and embedding, such as
/// `attention int4-g32, feed-forward int4-g32, embedding int8-row`.
impl fmt::Display for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |of: fn(&Projections<Scheme>) -> Vec<Scheme>| {
            let names: BTreeSet<String> =
                self.layers.iter().flat_map(of).map(|scheme| scheme.to_string()).collect();
            names.into_iter().collect::<Vec<_>>().join(" and ")
        };
        let attention = names(|p| [p.q_proj, p.o_proj].into_iter().chain(p.k_proj).chain(p.v_proj).collect());
        let feed_forward = names(|p| [p.gate_proj, p.up_proj, p.down_proj].into_iter().flatten().collect());
        let experts = names(|p| {
            let all = [p.expert_gate_proj, p.expert_up_proj, p.expert_down_proj];
            all.into_iter().flatten().collect()
        });
        write!(f, "attention {attention}")?;
        for (what, schemes) in [("feed-forward", feed_forward), ("experts", experts)] {
            if !schemes.is_empty() {
                write!(f, ", {what} {schemes}")?;
            }
        }
        write!(f, ", embedding {}", self.embedding)?;
        self.lm_head.map_or(Ok(()), |scheme| write!(f, ", head {scheme}"))
    }
}

/// The element type of the keys and values of a model, and the reason if the load chose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenKv {
    pub dtype: KvDtype,
    /// `None` = it was configured.
    pub why: Option<String>,
}

impl ChosenKv {
    /// What `kv.dtype = "auto"` takes on a GPU with int8 activations: int8 if keys and values are a considerable part
    /// of the bytes that a full step reads, otherwise f16. A full step has `sequences` sequences of
    /// [`AUTO_KV_TOKENS`] tokens, or one of `context` tokens, whichever reads more.
    ///
    /// The limits are those that are configured, not those that fit: what fits depends on this choice.
    pub fn auto(c: &ModelSpec, schemes: &Schemes, context: usize, sequences: usize) -> ChosenKv {
        let seen = |tokens: usize| kv_bytes_seen(c, KvDtype::F16, tokens.max(1) - 1, 1);
        let matrices = MatrixBytes::new(c, schemes);
        let of_one = seen(context) as f64 / matrices.read(1);
        let of_all = (sequences as u64 * seen(context.min(AUTO_KV_TOKENS))) as f64;
        let of_all = of_all / matrices.read(sequences);
        let percent = 100.0 * of_one.max(of_all);
        let dtype = if percent >= AUTO_KV_PERCENT { KvDtype::Int8 } else { KvDtype::F16 };
        let why =
            format!("in f16, a full step would read {percent:.1} % as many bytes of them as of weights");
        ChosenKv { dtype, why: Some(why) }
    }
}

impl fmt::Display for ChosenKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dtype)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, " (auto: {why})"))
    }
}

/// Bytes of the matrices that a step reads once.
struct MatrixBytes {
    /// Those of experts, and those of all other matrices.
    experts: u64,
    others: u64,
    mixture: Option<Mixture>,
}

impl MatrixBytes {
    fn new(c: &ModelSpec, schemes: &Schemes) -> MatrixBytes {
        let mut all = MatrixBytes { experts: 0, others: 0, mixture: c.mixture };
        let layers = c.tensors.layers.iter().zip(&schemes.layers);
        let projections = layers.flat_map(|(specs, schemes)| specs.projections.iter().zip(schemes.iter()));
        for (spec, scheme) in projections.chain([(c.head(), &schemes.head())]) {
            let (rows, cols) = (spec.rows(), spec.cols());
            let of = if spec.is_of_experts() { &mut all.experts } else { &mut all.others };
            *of += scheme.bytes(rows, cols);
        }
        all
    }

    /// What a step of `tokens` tokens reads: of experts, those that it is expected to use.
    fn read(&self, tokens: usize) -> f64 {
        let share = self
            .mixture
            .map_or(0.0, |Mixture { experts, .. }| experts.expected(tokens) / experts.count as f64);
        self.experts as f64 * share + self.others as f64
    }
}

/// Everything that determines a model's size.
#[derive(Debug, Clone)]
pub struct MemoryRequest<'a> {
    pub config: &'a ModelSpec,
    pub schemes: Schemes,
    /// Element type of the KV cache.
    pub kv: KvDtype,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Requested maximum of prompt tokens per step.
    pub max_batch_tokens: usize,
    /// The largest allocation of weights, in bytes.
    pub max_shard_bytes: u64,
    /// Whether the load makes room for the sums of squares of each layer's matrix inputs.
    pub moments: bool,
    /// The buffers to reserve for a coprocessor.
    pub offload: Option<OffloadLimits>,
    /// The draft model, if there is one.
    pub draft: Option<DraftMemoryRequest<'a>>,
    /// The tower that reads images, if the model is loaded with it.
    pub vision: Option<TowerRequest<'a>>,
}

/// A draft model, which drafts tokens for the model (`draft.rs`). It has as many KV blocks as the model, runs in the
/// same steps, and shares the model's activations.
#[derive(Debug, Clone)]
pub struct DraftMemoryRequest<'a> {
    pub config: &'a ModelSpec,
    pub schemes: Schemes,
}

/// A context that fits, and the plan for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    /// Tokens of each sequence.
    pub context: usize,
    pub pools: Vec<KvPool>,
    pub plan: Plan,
}

/// A model does not fit. Nothing was allocated. One line; [`Refusal::table`] has the rows.
#[derive(Debug, thiserror::Error)]
#[error("{} not fit with {}: {refusal}; {}", subject(self), tokens_of(*.sequences, *.context), advice(self))]
pub struct DoesNotFit {
    /// Requested tokens of each sequence. If the request was the longest context that fits, the shortest possible
    /// context.
    pub context: usize,
    pub sequences: usize,
    pub refusal: Box<Refusal>,
    /// Tokens of each sequence that would fit, or 0.
    pub largest_context: usize,
    /// The option with which the model would fit, e.g. `--quantize int4-g128`, and the tokens of each sequence then.
    pub smaller: Option<(String, usize)>,
    /// Tokens of each sequence that would fit without the draft model, or 0; `None` without a draft model.
    pub without_draft: Option<usize>,
}

fn subject(error: &DoesNotFit) -> &'static str {
    match error.without_draft {
        None => "the model does",
        Some(_) => "the model and its draft model do",
    }
}

fn tokens_of(sequences: usize, context: usize) -> String {
    match sequences {
        1 => format!("a context of {context} tokens"),
        n => format!("{n} contexts of {context} tokens"),
    }
}

fn advice(error: &DoesNotFit) -> String {
    let advice = match (error.largest_context, &error.smaller) {
        (0, None) => "no smaller scheme would fit: free memory, or allow more of it (memory.vram, memory.gtt, memory.reserve)".into(),
        (0, Some((option, context))) => {
            format!("{option} would fit, with {}", tokens_of(error.sequences, *context))
        }
        (context, _) => format!("--context {context} would fit"),
    };
    match error.without_draft {
        None | Some(0) => advice,
        Some(context) => format!("{advice}; without --draft, {} would", tokens_of(error.sequences, context)),
    }
}

/// The longest context that a model and its draft model support, and the model that sets this limit.
pub fn longest_context(model: &ModelSpec, draft: Option<&ModelSpec>) -> (usize, &'static str) {
    let longest = model.max_position_embeddings;
    match draft.map(|draft| draft.max_position_embeddings).filter(|of_draft| *of_draft < longest) {
        Some(of_draft) => (of_draft, "the draft model"),
        None => (longest, "the model"),
    }
}

impl<'a> MemoryRequest<'a> {
    /// The model and its draft model, if any, each with the prefix of its buffers' names, its config and its schemes.
    fn models(&self) -> impl Iterator<Item = (&'static str, &'a ModelSpec, &Schemes)> {
        let draft = self.draft.as_ref().map(|draft| ("draft ", draft.config, &draft.schemes));
        [("", self.config, &self.schemes)].into_iter().chain(draft)
    }

    /// The longest context that the model and its draft model support.
    pub fn longest_context(&self) -> usize {
        longest_context(self.config, self.draft.as_ref().map(|draft| draft.config)).0
    }

    /// If `wanted` is longer than both models support: `wanted`, the longest context that both models support, and the
    /// model that sets this limit.
    pub fn beyond_model(&self, wanted: Option<usize>) -> Option<(usize, usize, &'static str)> {
        let (longest, whose) = longest_context(self.config, self.draft.as_ref().map(|draft| draft.config));
        wanted.filter(|wanted| *wanted > longest).map(|wanted| (wanted, longest, whose))
    }

    /// For how many sequences the pools of `fit` have windows at the same time.
    pub fn sequences(&self, fit: &Fit) -> usize {
        let each = fit.pools.iter().zip(self.pools(fit.context, 1)).filter(|(pool, _)| pool.window.is_some());
        each.map(|(all, one)| all.blocks / one.blocks).min().unwrap_or(MAX_SEQUENCES)
    }

    /// The number of tokens that a step has room for.
    pub fn batch_tokens(&self) -> usize {
        let layers = self.models().flat_map(|(_, config, _)| {
            config.tensors.layers.iter().map(|layer| macs_per_token(config, layer))
        });
        let macs = layers.max();
        let bounded =
            (MAX_LAYER_MACS / macs.expect("a model at least")) as usize / PRODUCT_TOKENS * PRODUCT_TOKENS;
        // An image is never split over steps, and does not wait until no other sequence needs tokens.
        let image = self.vision.map_or(0, |vision| vision.most_tokens() + TOKENS_BESIDE_IMAGE);
        let most = self.max_batch_tokens.max(image).min(bounded.max(MIN_BATCH_TOKENS).max(image));
        most.min(self.dispatched_tokens()).min(self.longest_context())
    }

    /// The most tokens of a step whose pairs of a token and one of its experts fit into a dispatch: the kernels of a
    /// mixture have a row of workgroups for each pair.
    pub fn dispatched_tokens(&self) -> usize {
        let mixtures = self.models().filter_map(|(_, config, _)| config.mixture);
        let pairs = mixtures.map(|mixture| mixture.experts.per_token).max().unwrap_or(1);
        MAX_WORKGROUPS as usize / pairs
    }

    /// Pools for `sequences` sequences of `context` tokens each.
    pub fn pools(&self, context: usize, sequences: usize) -> Vec<KvPool> {
        let mut kv = KvLimits { block_size: self.block_size, pools: self.config.kv_pools() };
        // All steps in flight hold their tokens' blocks at the same time.
        let most = kv.most_blocks(context, MAX_IN_FLIGHT * self.batch_tokens());
        kv.pools.iter_mut().zip(most).for_each(|(pool, most)| pool.blocks = sequences * most);
        kv.pools
    }

    /// How the model takes images. `None` without a tower, and if a step has no room for an image: a step never has a part of
    /// one.
    fn images(&self, max_batch_tokens: usize) -> Option<ImageLimits> {
        self.vision?.limits(max_batch_tokens)
    }

    /// The limits of a runner with that context and those pools.
    pub fn limits(&self, context: usize, pools: Vec<KvPool>) -> Limits {
        let max_batch_tokens = self.batch_tokens().min(context);
        Limits {
            max_batch_tokens,
            max_sequences: MAX_SEQUENCES,
            max_draws: LOGIT_ROWS,
            max_in_flight: MAX_IN_FLIGHT,
            block_bytes: self.block_bytes(pools.len()),
            kv: KvLimits { block_size: self.block_size, pools },
            max_context: context,
            vocab_size: self.config.vocab_size,
            hidden_size: self.config.hidden_size,
            images: self.images(max_batch_tokens),
            step_bytes: match self.config.mixture {
                None => Vec::new(),
                Some(_) => {
                    let matrices = MatrixBytes::new(self.config, &self.schemes);
                    (1..=MAX_SEQUENCES).map(|tokens| matrices.read(tokens) as u64).collect()
                }
            },
        }
    }

    /// Every buffer. The buffers of each class are in the order in which a load requests them.
    pub fn requests(&self, context: usize, pools: Vec<KvPool>) -> Vec<Request> {
        let limits = self.limits(context, pools);
        let device = MemoryKind::Device;
        let mut requests = Vec::new();
        for (prefix, c, schemes) in self.models() {
            let is_draft = !prefix.is_empty();
            let mut add = |class, kind, bytes, name: String| {
                requests.push(Request { class, kind, bytes, name: format!("{prefix}{name}") });
            };
            self.weights(c, schemes, &mut |class, bytes, name| add(class, device, bytes, name));

            if !is_draft {
                for (name, bytes) in self.activation_bytes() {
                    add(Class::Activations, device, bytes, name.into());
                }
                add(Class::Activations, device, SAMPLED_BYTES, "sampled ids".into());
                add(Class::Activations, device, history_bytes(&limits), "history".into());
            }
            for (i, rope) in c.ropes.iter().enumerate() {
                let bytes = (context * c.rope_dim(i) * size_of::<f32>()) as u64;
                add(Class::Activations, device, bytes, rope_table_name(rope));
            }
            let heads = distinct_heads(c, self.kv);
            let experts = tested_experts(c, schemes, self.batch_tokens());
            let bytes = self_test::buffer_bytes(&heads, &schemes.distinct(), experts.as_ref());
            add(Class::Activations, device, bytes, "self-test".into());
            if self.moments && !is_draft {
                for (i, layer) in c.tensors.layers.iter().enumerate() {
                    for columns in layer.projections.input_columns().iter() {
                        add(Class::Activations, device, 4 * *columns as u64, format!("layers.{i} moments"));
                    }
                }
            }

            if !is_draft {
                add(Class::Staging, MemoryKind::Readback, logits_bytes(c), "logits readback".into());
                for (name, kind, bytes) in self.offload.iter().flat_map(|offload| offload.buffers(c)) {
                    add(Class::Staging, kind, bytes, name.into());
                }
            }
            let limits = Limits { vocab_size: c.vocab_size, ..limits.clone() };
            for step in 0..MAX_IN_FLIGHT {
                let input = step_input_sum(&limits);
                add(Class::Staging, MemoryKind::Upload, input, format!("step {step} input"));
                add(Class::Staging, MemoryKind::Readback, results_bytes(c).iter().sum(), "results".into());
            }

            let bytes = self_test::result_bytes(&heads, experts.as_ref());
            add(Class::Staging, MemoryKind::Readback, bytes, "results of the self-test".into());

            let pools = pools_of_layers(c, &limits.kv.pools);
            let own =
                c.layers.iter().zip(pools).enumerate().filter(|(_, (layer, _))| layer.kv_source.is_none());
            for (i, (layer, pool)) in own {
                for what in ["key", "value"] {
                    let bytes = kv_pool_bytes(&layer.heads, self.kv, &limits.kv, pool);
                    add(Class::KvCache, device, bytes, format!("layer {i} {what} cache"));
                }
            }
        }
        requests.extend(self.vision.iter().flat_map(|vision| vision.requests(limits.max_batch_tokens)));
        requests
    }

    /// The weights of one of the models, as [`MemoryRequest::requests`] lists them.
    fn weights(&self, c: &ModelSpec, schemes: &Schemes, add: &mut dyn FnMut(Class, u64, String)) {
        let matrix = |spec: &TensorSpec, scheme: Scheme| {
            // The matrices of experts are one buffer, which kernels find an expert in by its number.
            let most = if spec.is_of_experts() { u64::MAX } else { self.max_shard_bytes };
            Matrix::buffer_bytes(scheme, spec.rows(), spec.cols(), most)
        };
        let specs = &c.tensors;
        let embedding = &specs.embed_tokens;
        let (mut bytes, mut shards) = (Vec::new(), 0);
        for (blocks, scales) in matrix(embedding, schemes.embedding) {
            shards += 1;
            bytes.push(blocks);
            bytes.extend(scales);
        }
        bytes.push(Embedding::table_bytes(shards));
        for bytes in bytes {
            add(embedding.class, bytes, embedding.name.clone());
        }
        let vector_bytes = |spec: &TensorSpec| 4 * spec.elements();
        add(specs.norm.class, vector_bytes(&specs.norm), specs.norm.name.clone());
        let add_matrix = |(spec, scheme): (&TensorSpec, &Scheme), add: &mut dyn FnMut(Class, u64, String)| {
            for (blocks, scales) in matrix(spec, *scheme) {
                add(spec.class, blocks, spec.name.clone());
                if let Some(scales) = scales {
                    add(spec.class, scales, format!("{} scales", spec.name));
                }
            }
        };
        specs.lm_head.iter().zip(&schemes.lm_head).for_each(|head| add_matrix(head, add));
        if let (Some(specs), Some(schemes)) = (&specs.per_layer, &schemes.per_layer) {
            let table = &specs.embed_tokens_per_layer;
            add_matrix((table, &schemes.embedding), add);
            let shards = matrix(table, schemes.embedding).count();
            add(Class::Embedding, Embedding::table_bytes(shards), table.name.clone());
            add_matrix((&specs.per_layer_model_projection, &schemes.projection), add);
            let norm = &specs.per_layer_projection_norm;
            add(norm.class, vector_bytes(norm), norm.name.clone());
        }
        if let (Some(specs), Some(schemes)) = (&specs.streams, &schemes.streams) {
            specs.iter().zip(schemes.iter()).for_each(|matrix| add_matrix(matrix, add));
        }
        let schemes = schemes.layers.iter().zip(&schemes.kept);
        for (layer, (schemes, kept)) in specs.layers.iter().zip(schemes) {
            layer.projections.iter().zip(schemes.iter()).for_each(|matrix| add_matrix(matrix, add));
            let Layer { norms, biases, router, altup, .. } = layer;
            for spec in norms.iter().chain(biases.iter()).chain(router.iter()).chain(altup.iter()) {
                add(spec.class, vector_bytes(spec), spec.name.clone());
            }
            layer.kept.iter().zip(kept.iter()).for_each(|matrix| add_matrix(matrix, add));
        }
    }

    /// The activations of a step, each large enough for both models.
    pub(super) fn activation_bytes(&self) -> Vec<(&'static str, u64)> {
        let optional = self.optional_bytes();
        let of = |config: &'a ModelSpec| {
            let floats = activations(config, self.batch_tokens())
                .map(|(name, rows, width)| (name, Activations::bytes(rows, width)));
            let blocks = quantized(config, self.batch_tokens())
                .map(|(name, rows, width)| (name, Quantized::bytes(rows, width)));
            let of_experts = config
                .mixture
                .iter()
                .flat_map(|mixture| expert_activations(config, mixture, self.batch_tokens()));
            floats.into_iter().chain(blocks).chain(optional.clone()).chain(of_experts)
        };
        let mut largest: Vec<_> = of(self.config).collect();
        for (_, config, _) in self.models() {
            for (most, (_, bytes)) in largest.iter_mut().zip(of(config)) {
                most.1 = most.1.max(bytes);
            }
        }
        largest
    }

    /// The activations of per-layer embeddings and of residual streams, if one of the models has some.
    fn optional_bytes(&self) -> Vec<(&'static str, u64)> {
        let tokens = self.batch_tokens();
        let of_per_layer = |c: &'a ModelSpec| Some(per_layer_activations(c, &c.per_layer?, tokens).to_vec());
        let of_streams = |c: &'a ModelSpec| Some(stream_activations(c, &c.streams?, tokens).to_vec());
        let largest = |of: &dyn Fn(&'a ModelSpec) -> Option<Vec<(&'static str, u64)>>| {
            let mut largest: Vec<(&str, u64)> = Vec::new();
            for of_model in self.models().filter_map(|(_, config, _)| of(config)) {
                largest.resize(of_model.len(), ("", 0));
                for (most, (name, bytes)) in largest.iter_mut().zip(of_model) {
                    *most = (name, most.1.max(bytes));
                }
            }
            largest
        };
        [largest(&of_per_layer), largest(&of_streams)].concat()
    }

    /// Places all buffers.
    pub fn place(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        context: usize,
        pools: Vec<KvPool>,
    ) -> Result<Plan, Box<Refusal>> {
        placement::place(machine, limits, self.requests(context, pools))
    }

    /// This request, or the one without its tower, if an optional tower costs too much: if the model then does not fit, if
    /// its context becomes too short for an image, or if no context was wanted and fewer than [`LEAST_CONTEXT`] tokens are
    /// left that would fit otherwise. With the reason, if it is the latter request. `fit` places a request.
    pub fn with_tower_that_fits(
        self,
        wanted: Option<usize>,
        fit: impl Fn(&MemoryRequest<'a>) -> Result<Fit, DoesNotFit>,
    ) -> (MemoryRequest<'a>, Option<String>) {
        let Some(vision) = self.vision else { return (self, None) };
        let tokens = vision.most_tokens();
        let without = MemoryRequest { vision: None, ..self.clone() };
        let reason = match fit(&self) {
            Err(error) => Some(error.to_string()),
            Ok(Fit { context, .. }) if context < tokens => {
                Some(format!("an image has {tokens} tokens, and the context {context}"))
            }
            Ok(Fit { context, .. }) if wanted.is_none() && context < LEAST_CONTEXT => {
                let alone = fit(&without).map_or(0, |fit| fit.context);
                (alone > context).then(|| {
                    format!("with it, a context of {context} tokens would fit, and without it {alone}")
                })
            }
            Ok(_) => None,
        };
        match reason {
            Some(reason) => (without, Some(reason)),
            None => (self, None),
        }
    }

    /// The largest context for `sequences` sequences that fits, in whole blocks or the model's maximum; 0 if none fits.
    pub fn largest_context(&self, machine: &Machine, limits: &placement::Limits, sequences: usize) -> usize {
        let longest = self.longest_context();
        let context = |blocks: usize| (blocks * self.block_size).min(longest);
        let pools = |blocks| self.pools(context(blocks), sequences);
        let fits = |blocks| self.place(machine, limits, context(blocks), pools(blocks)).is_ok();
        context(largest(0, longest.div_ceil(self.block_size), fits))
    }

    /// Places a model to serve: a context of `wanted` tokens, or the longest that fits, and windows for up to
    /// `sequences` sequences. The remaining memory goes to blocks of full layers, which the sequences share, up to a
    /// full context for each. `others` has the same meaning as in [`MemoryRequest::fit`].
    pub fn fit_to_serve(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        wanted: Option<usize>,
        sequences: usize,
        others: &[(String, Schemes)],
    ) -> Result<Fit, DoesNotFit> {
        let alone = self.fit(machine, limits, wanted, 1, others)?;
        let longest = wanted.unwrap_or(usize::MAX).min(self.longest_context());
        let least = match wanted {
            Some(_) => alone.context,
            None => alone.context.min(LEAST_CONTEXT),
        };
        let (fewest, most) = (least.div_ceil(self.block_size), longest.div_ceil(self.block_size));
        let with = |blocks: usize, windows: usize| {
            let context = (blocks * self.block_size).min(longest);
            let mut pools = self.pools(context, windows);
            pools.iter_mut().filter(|pool| pool.window.is_none()).for_each(|pool| pool.blocks = blocks);
            (context, pools)
        };
        let place = |(context, pools)| self.place(machine, limits, context, pools);
        let windows = largest(1, sequences, |n| place(with(fewest, n)).is_ok());
        let blocks = largest(fewest, windows * most, |n| place(with(n, windows)).is_ok());
        let (context, pools) = with(blocks, windows);
        match place((context, pools.clone())) {
            Ok(plan) => Ok(Fit { context, pools, plan }),
            Err(_) => Ok(alone),
        }
    }

    /// Places `sequences` contexts of `wanted` tokens, or of the longest that fits. `others` are options that store the
    /// weights in other schemes, from [`quantize_modes`], with those schemes.
    pub fn fit(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        wanted: Option<usize>,
        sequences: usize,
        others: &[(String, Schemes)],
    ) -> Result<Fit, DoesNotFit> {
        let longest = self.longest_context();
        let context = match wanted {
            Some(wanted) => wanted.min(longest),
            // If not even one block fits, the refusal is about one block.
            None => self.largest_context(machine, limits, sequences).max(self.block_size.min(longest)),
        };
        let pools = self.pools(context, sequences);
        self.place(machine, limits, context, pools.clone()).map(|plan| Fit { context, pools, plan }).map_err(
            |refusal| {
                let largest_context = self.largest_context(machine, limits, sequences);
                let smaller = if largest_context > 0 {
                    None
                } else {
                    self.first_smaller(machine, limits, sequences, others)
                };
                let alone = self.draft.is_some().then(|| MemoryRequest { draft: None, ..self.clone() });
                let without_draft = alone.map(|alone| alone.largest_context(machine, limits, sequences));
                DoesNotFit { context, sequences, refusal, largest_context, smaller, without_draft }
            },
        )
    }

    /// The device's largest allocation, if it is the reason that no more than `context` tokens fit: a layer's keys are
    /// one buffer.
    pub fn allocation_limit(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        context: usize,
        sequences: usize,
    ) -> Option<u64> {
        if context >= self.longest_context() {
            return None;
        }
        let more = context + self.block_size;
        match self.place(machine, limits, more, self.pools(more, sequences)).err()?.obstacle {
            placement::Obstacle::TooLarge { limit } => Some(limit),
            placement::Obstacle::Full => None,
        }
    }

    /// The option among `others` with the largest weights that fit and are smaller than these, and its largest context.
    fn first_smaller(
        &self,
        machine: &Machine,
        limits: &placement::Limits,
        sequences: usize,
        others: &[(String, Schemes)],
    ) -> Option<(String, usize)> {
        let with = |schemes: &Schemes| MemoryRequest { schemes: schemes.clone(), ..self.clone() };
        let mut others: Vec<_> = others
            .iter()
            .map(|(option, schemes)| (option, with(schemes)))
            .map(|(o, d)| (d.weight_bytes(), o, d))
            .collect();
        others.retain(|(bytes, ..)| *bytes < self.weight_bytes());
        others.sort_by_key(|(bytes, ..)| std::cmp::Reverse(*bytes));
        others.into_iter().find_map(|(_, option, request)| {
            let context = request.largest_context(machine, limits, sequences);
            (context > 0).then(|| (option.clone(), context))
        })
    }

    /// Bytes of a block of each pool in the layers of all models that have keys and values of their own.
    fn block_bytes(&self, pools: usize) -> Vec<u64> {
        let mut bytes = vec![0; pools];
        for (_, config, _) in self.models() {
            for (layer, pool) in config.layers.iter().zip(pools_of_layers(config, &self.config.kv_pools())) {
                if layer.kv_source.is_none() {
                    bytes[pool] += 2 * kv_block_bytes(&layer.heads, self.kv, self.block_size);
                }
            }
        }
        bytes
    }

    /// Bytes of KV cache per token of a sequence, in layers without a window.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let layers = self.models().flat_map(|(_, config, _)| &config.layers);
        let full = layers.filter(|layer| layer.window.is_none() && layer.kv_source.is_none());
        full.map(|layer| 2 * kv_block_bytes(&layer.heads, self.kv, 1)).sum()
    }

    /// Most bytes of KV cache that one sequence of `context` tokens takes in layers with a window.
    pub fn window_bytes(&self, context: usize) -> u64 {
        let pools = self.pools(context, 1);
        let in_layer = |(layer, pool): (&LayerSpec, usize)| match (layer.window, layer.kv_source) {
            (None, _) | (_, Some(_)) => 0,
            (Some(_), None) => {
                let block = kv_block_bytes(&layer.heads, self.kv, self.block_size);
                2 * pools[pool].blocks as u64 * block
            }
        };
        let of = |config: &ModelSpec| -> u64 {
            config.layers.iter().zip(pools_of_layers(config, &pools)).map(in_layer).sum()
        };
        self.models().map(|(_, config, _)| of(config)).sum()
    }

    /// Bytes of weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.models().map(|(_, config, schemes)| self.weight_bytes_of(config, schemes)).sum()
    }

    /// Bytes of one model's weights on the device.
    pub(super) fn weight_bytes_of(&self, config: &ModelSpec, schemes: &Schemes) -> u64 {
        let mut sum = 0;
        self.weights(config, schemes, &mut |_, bytes, _| sum += bytes);
        sum
    }
}

/// The largest number in `fitting..=most` that fits; `fitting` is assumed to fit.
fn largest(mut fitting: usize, most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let mut beyond = most.max(fitting) + 1;
    while beyond - fitting > 1 {
        let middle = fitting + (beyond - fitting) / 2;
        if fits(middle) { fitting = middle } else { beyond = middle }
    }
    fitting
}

/// Bytes of the ids last sampled: u32 for each slot.
pub(super) const SAMPLED_BYTES: u64 = 4 * MAX_SEQUENCES as u64;
/// Bytes that a step returns to the host: a u32 id for each row of logits, the log probabilities of each row, the sum of
/// hidden states of each sequence, and the number of experts in use.
pub(super) fn results_bytes(c: &ModelSpec) -> [u64; 4] {
    let rows = LOGIT_ROWS as u64;
    let pooled = Activations::bytes(MAX_SEQUENCES, c.hidden_size);
    [4 * rows, 4 * rows * LOGPROB_WORDS as u64, pooled, 4].map(|bytes| bytes.next_multiple_of(256))
}

/// Bytes of the histories: u32 for each position of each slot, and of the padding tokens' sequence.
pub(super) fn history_bytes(limits: &Limits) -> u64 {
    4 * ((limits.max_sequences + 1) * limits.max_context) as u64
}

/// The slots for partials of attention in a step of `tokens` tokens.
pub(crate) fn partials(tokens: usize) -> Room {
    let Room { single, tiles } = SPARE_PARTIALS;
    Room { single: MAX_SEQUENCES + single, tiles: tokens + tiles }
}

/// The activations of a step, by name, rows and width, in the order of `Scratch`.
pub(super) fn activations(c: &ModelSpec, tokens: usize) -> [(&'static str, usize, usize); 16] {
    let largest = |width: fn(&AttentionHeads) -> usize| largest_of_heads(c, width);
    let [heads, kv_heads] = [largest(AttentionHeads::q_width), largest(AttentionHeads::kv_width)];
    let partial = largest(|heads| partial_width(heads.num_attention_heads, heads.head_dim));
    let slots = partials(tokens);
    [
        ("hidden", tokens, c.hidden_size),
        ("normed", tokens, c.hidden_size),
        ("delta", tokens, c.hidden_size),
        ("q", tokens, heads),
        ("attended", tokens, heads),
        ("k", tokens, kv_heads),
        ("v", tokens, kv_heads),
        ("partials of single tokens", slots.single, partial),
        ("partials of tiles", slots.tiles, partial),
        ("gate", tokens, c.intermediate_size),
        ("up", tokens, c.intermediate_size),
        ("final rows", LOGIT_ROWS, c.hidden_size),
        ("logits", LOGIT_ROWS, c.vocab_size),
        ("adjusted logits", LOGIT_ROWS, c.vocab_size),
        ("draws", LOGIT_ROWS, draw_words(c.vocab_size)),
        ("pooled", MAX_SEQUENCES, c.hidden_size),
    ]
}

/// The int8 inputs of matrices, by name, rows and width. They follow the activations.
pub(super) fn quantized(c: &ModelSpec, tokens: usize) -> [(&'static str, usize, usize); 4] {
    [
        ("normed (int8)", tokens, c.hidden_size),
        ("attended (int8)", tokens, largest_of_heads(c, AttentionHeads::q_width)),
        ("gated (int8)", tokens, c.intermediate_size),
        ("final rows (int8)", LOGIT_ROWS, c.hidden_size),
    ]
}

/// The activations of per-layer embeddings, by name and bytes, in the order of `PerLayerScratch`.
pub(super) fn per_layer_activations(
    c: &ModelSpec,
    PerLayerInputs { width, .. }: &PerLayerInputs,
    tokens: usize,
) -> [(&'static str, u64); 4] {
    let all = Activations::bytes(tokens, c.layers.len() * width);
    [
        (PER_LAYER_INPUTS, all),
        ("per-layer products", all),
        ("per-layer gate", Activations::bytes(tokens, *width)),
        ("per-layer gated (int8)", Quantized::bytes(tokens, *width)),
    ]
}

/// The name of the first of [`per_layer_activations`].
pub(super) const PER_LAYER_INPUTS: &str = "per-layer embeddings";

/// The activations of residual streams, by name and bytes, in the order of `StreamScratch`.
pub(super) fn stream_activations(
    c: &ModelSpec,
    ResidualStreams { laurel_rank, .. }: &ResidualStreams,
    tokens: usize,
) -> [(&'static str, u64); 6] {
    let stream = Activations::bytes(tokens, c.hidden_size);
    [
        (SECOND_STREAM, stream),
        ("third stream", stream),
        ("fourth stream", stream),
        ("predicted stream", stream),
        ("laurel", Activations::bytes(tokens, *laurel_rank)),
        ("laurel (int8)", Quantized::bytes(tokens, *laurel_rank)),
    ]
}

/// The name of the first of [`stream_activations`].
pub(super) const SECOND_STREAM: &str = "second stream";

/// The activations of experts, by name and bytes, in the order of `ExpertScratch`. A draft model has none.
pub(super) fn expert_activations(
    c: &ModelSpec,
    Mixture { experts, intermediate_size, .. }: &Mixture,
    tokens: usize,
) -> [(&'static str, u64); 7] {
    let rows = experts.pair_rows(tokens);
    [
        ("experts' input", Activations::bytes(tokens, c.hidden_size)),
        ("experts' input (int8)", Quantized::bytes(tokens, c.hidden_size)),
        ("experts' gate", Activations::bytes(rows, *intermediate_size)),
        ("experts' up", Activations::bytes(rows, *intermediate_size)),
        ("experts' gated (int8)", Quantized::bytes(rows, *intermediate_size)),
        ("experts' results", Activations::bytes(rows, c.hidden_size)),
        ("routing", Routing::bytes(experts.pairs(tokens)).iter().sum()),
    ]
}

/// What the self-test needs to know of a model's experts. `tokens` is [`MemoryRequest::batch_tokens`].
pub(super) fn tested_experts(c: &ModelSpec, schemes: &Schemes, tokens: usize) -> Option<TestedExperts> {
    let of_layer = |layer: &Projections<Scheme>| {
        [layer.expert_gate_proj, layer.expert_up_proj, layer.expert_down_proj].into_iter().flatten()
    };
    let schemes = each_once(schemes.layers.iter().flat_map(of_layer));
    c.mixture.map(|mixture| TestedExperts { experts: mixture.experts, tokens, schemes })
}

/// The largest of a size that depends on the heads of a layer.
fn largest_of_heads(c: &ModelSpec, size: fn(&AttentionHeads) -> usize) -> usize {
    c.layers.iter().map(|layer| size(&layer.heads)).max().expect("a layer at least")
}

/// The heads that the kernels of a layer are made for.
pub(crate) fn heads_of(heads: &AttentionHeads, kv: KvDtype) -> Heads {
    Heads { group: heads.group(), head_dim: heads.head_dim, kv }
}

/// The heads of all layers, each once, the first layer's first.
pub(crate) fn distinct_heads(c: &ModelSpec, kv: KvDtype) -> Vec<Heads> {
    each_once(c.layers.iter().map(|layer| heads_of(&layer.heads, kv)))
}

/// Bytes of the buffer that copies logits to the host, or a row of them and one of a residual stream.
pub(super) fn logits_bytes(c: &ModelSpec) -> u64 {
    let both = Activations::bytes(1, c.vocab_size) + Activations::bytes(1, c.hidden_size);
    Activations::bytes(READBACK_ROWS, c.vocab_size).max(both)
}

/// Bytes of the keys and values that `tokens` tokens after `start` positions see, each once.
pub(super) fn kv_bytes_seen(c: &ModelSpec, dtype: KvDtype, start: usize, tokens: usize) -> u64 {
    let in_layer = |layer: &LayerSpec| {
        let seen = start + tokens - first_seen(layer.window, start);
        2 * kv_block_bytes(&layer.heads, dtype, seen)
    };
    c.layers.iter().map(in_layer).sum()
}

pub(super) fn rope_table_name(rope: &RopeSpec) -> String {
    format!("rope table ({})", rope.name)
}

/// Bytes that one KV block takes in one layer, for keys or values.
pub(super) fn kv_block_bytes(heads: &AttentionHeads, kv: KvDtype, block_size: usize) -> u64 {
    kv.block_bytes(block_size * heads.num_key_value_heads, heads.head_dim) as u64
}

/// Bytes of one layer's keys, or values: its pool, and a block for padding tokens.
pub(super) fn kv_pool_bytes(heads: &AttentionHeads, dtype: KvDtype, kv: &KvLimits, pool: usize) -> u64 {
    (kv.pools[pool].blocks as u64 + 1) * kv_block_bytes(heads, dtype, kv.block_size)
}

/// The pool of each layer's KV blocks. A draft model has the pools of its model.
pub(super) fn pools_of_layers(c: &ModelSpec, pools: &[KvPool]) -> Vec<usize> {
    c.pools_of_layers(pools).expect("a pool for each group of layers: check_draft")
}

/// Number of entries of a sequence's block table.
pub(super) fn table_blocks(limits: &Limits) -> usize {
    limits.max_context.div_ceil(limits.kv.block_size)
}

/// The least rows of a part of a layer's tokens; every part but the last has a multiple of it. Smaller parts would read
/// the weights more often, on a CPU too.
pub(super) const LEAST_ROWS: usize = 8;

/// Bytes of the arrays that share out attention, in the layers of a pool: the items of single tokens and of tiles; their
/// workgroup counts, of the whole step and of each part; the merges of each token.
pub(super) fn shares_bytes(limits: &Limits) -> [u64; 4] {
    let (tokens, room) = (limits.max_batch_tokens, partials(limits.max_batch_tokens));
    let items = |slots: usize| (slots * size_of::<Item>()) as u64;
    // The rows that a coprocessor shares begin and end anywhere, which makes two more parts.
    let parts = 3 + tokens.div_ceil(LEAST_ROWS) as u64;
    [items(room.single), items(room.tiles), 2 * INDIRECT_BYTES * parts, 8 * tokens as u64]
        .map(|bytes| bytes.next_multiple_of(256))
}

/// Bytes of the arrays of one step: ids, positions, sequence of each token; logit rows, sample requests; slots of the
/// sequences, their history, biases and masks of the draws. And for each pool: slots of the tokens, block tables, the
/// arrays that share out attention. The padding tokens are one more sequence.
pub(super) fn step_input_bytes(limits: &Limits) -> ([u64; 9], [u64; 3]) {
    let tokens = 4 * limits.max_batch_tokens as u64;
    let tables = 4 * ((limits.max_sequences + 1) * table_blocks(limits)) as u64;
    let requests = (LOGIT_ROWS * size_of::<SampleRequest>()) as u64;
    let slots = 4 * (limits.max_sequences + 1) as u64;
    let history = 4 * limits.max_context as u64;
    let biases = (LOGIT_ROWS * MAX_BIASES * size_of::<Bias>()) as u64;
    let masks = (4 * LOGIT_ROWS * mask_words(limits.vocab_size)) as u64;
    let rows = 4 * LOGIT_ROWS as u64;
    let shares = shares_bytes(limits).iter().sum();
    let of_step = [tokens, tokens, tokens, rows, requests, slots, history, biases, masks];
    let of_pool = [tokens, tables, shares];
    (of_step.map(|bytes| bytes.next_multiple_of(256)), of_pool.map(|bytes| bytes.next_multiple_of(256)))
}

/// Bytes of all arrays of one step together.
pub(super) fn step_input_sum(limits: &Limits) -> u64 {
    let (of_step, of_pool) = step_input_bytes(limits);
    of_step.iter().sum::<u64>() + limits.kv.pools.len() as u64 * of_pool.iter().sum::<u64>()
}

/// Multiply-adds of a layer's matrices before attention for one token.
pub(super) fn projection_macs_per_token(layer: &Layer<TensorSpec>) -> u64 {
    let Projections { q_proj, k_proj, v_proj, .. } = &layer.projections;
    [q_proj].into_iter().chain(k_proj).chain(v_proj).map(TensorSpec::elements).sum()
}

/// Multiply-adds of a layer's matrices for one token, which uses some of the experts.
pub(super) fn macs_per_token(c: &ModelSpec, layer: &Layer<TensorSpec>) -> u64 {
    let macs = |spec: &TensorSpec| (spec.elements() as f64 * c.share_per_token(spec)) as u64;
    layer.projections.iter().chain(layer.kept.iter()).map(macs).sum()
}

/// Multiply-adds of the matrices before the first layer and after the last one, without the head, for one token.
pub(super) fn outer_macs_per_token(c: &ModelSpec) -> [u64; 2] {
    let ModelTensors { per_layer, streams, .. } = &c.tensors;
    let projected = per_layer.as_ref().map_or(0, |all| all.per_layer_model_projection.elements());
    let sum = |matrices: &[TensorSpec]| matrices.iter().map(TensorSpec::elements).sum::<u64>();
    let of_streams = streams.as_ref().map(|streams| {
        let StreamProjections { altup_projections, altup_unembed_projections } = streams;
        [sum(altup_projections), sum(altup_unembed_projections)]
    });
    let [spread, merged] = of_streams.unwrap_or_default();
    [projected + spread, merged]
}

/// The schemes that each mode of `--quantize` gives a checkpoint, by option.
pub fn quantize_modes(weights: &Weights<'_>) -> Result<Vec<(String, Schemes)>, CheckpointError> {
    let each = QuantizeMode::ALL.into_iter();
    each.map(|mode| Ok((format!("--quantize {mode}"), Schemes::of(weights, mode)?))).collect()
}
