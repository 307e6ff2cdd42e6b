//! Loads a checkpoint: checks its tensors, places them, and uploads them once.
//!
//! This module refuses a model that does not fit before anything is allocated, and names the tensor that does not fit,
//! or the context that would.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::Limits;
use super::config::{ConfigError, Gemma3Config, GenerationConfig, LayerType};
use super::gemma3::{Gemma3, Loaded, NotCompared};
use super::layers::{Layer, Scratch, device_buffer};
use super::memory::{
    self, DEFAULT_BLOCK_SIZE, DoesNotFit, DraftRequest, MAX_IN_FLIGHT, MemoryRequest, Schemes,
};
use super::offload::{OffloadBuffers, OffloadError, OffloadLimits};
use super::rates::Rates;
use super::self_test::{self, SelfTest, Traits};
use super::step::Frame;
use super::weights::{Gemma3Weights, LayerWeights, WeightsError};
use crate::checkpoint::{Checkpoint, CheckpointError, LayerValues, Manifest, ModelFiles, Tensor};
use crate::gpu::placement::{self, Class, MemoryKind};
use crate::gpu::residency::{self, Residency};
use crate::gpu::{Arena, Buffer, CommandBuffer, Device, GpuError, Uploader};
use crate::kernels::{
    Attention, AttentionShape, Embedding, History, Kernels, KvCache, MAX_GROUP, Matrices, Matrix, RmsNorm,
    Tiles, UploadError,
};
use crate::tensor::{KvDtype, Precision, QuantizeMode, Scheme};

/// Options of a load.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    pub quantize: QuantizeMode,
    /// Tokens of the longest sequence; refused if they do not fit, or if the model was made for fewer. `None`: as many as
    /// fit.
    pub max_context: Option<usize>,
    /// The most sequences that the KV cache gets room for; fewer if memory is short.
    pub sequences: usize,
    /// Element type of the KV cache.
    pub kv: KvDtype,
    /// Tokens per KV block; at least 1.
    pub block_size: usize,
    /// The longest GPU time of a submit, as predicted from earlier submits. Tests set less than any submit takes, so
    /// that steps of small models are cut too.
    pub max_submit: Duration,
    /// The longest GPU time of a submit while courtesy bounds the share of the device's time. Half of a frame of a desktop
    /// at 60 Hz by default: the desktop's own work then starts within the frame that it is for.
    pub max_courteous_submit: Duration,
    /// Limits on the device's memory.
    pub memory: placement::Limits,
    /// Precision of products of matrices and activations.
    pub precision: Precision,
    /// How products are shared out over workgroups. `None`: the best choice by count.
    pub tiles: Option<Tiles>,
    /// Whether a model that the kernel does not see in memory is refused. False: the load warns.
    pub strict: bool,
    /// The most prompt tokens processed per step.
    pub max_batch_tokens: usize,
    /// Number of ids that may be sampled. Higher ids are rows of the embedding that the tokenizer does not know.
    pub sample_below: Option<usize>,
    /// Whether the squares of every matrix's inputs are summed up, for [`Gemma3::take_moments`].
    pub moments: bool,
    /// The largest allocation of weights. Tests use it to cut small matrices into shards.
    pub max_shard_bytes: Option<u64>,
    /// The room for a unit that computes some of the attention of prompts ([`Gemma3::attach_offload`]); none by default.
    pub offload: Option<OffloadLimits>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            quantize: QuantizeMode::None,
            max_context: None,
            sequences: 1,
            kv: KvDtype::F32,
            block_size: DEFAULT_BLOCK_SIZE,
            max_submit: Duration::from_millis(200),
            max_courteous_submit: Duration::from_millis(8),
            memory: placement::Limits::default(),
            precision: Precision::F32,
            tiles: None,
            strict: true,
            max_batch_tokens: 256,
            sample_below: None,
            moments: false,
            max_shard_bytes: None,
            offload: None,
        }
    }
}

/// Progress of a load.
#[derive(Debug, Clone, Copy)]
pub enum Progress {
    /// Kernels are compiled.
    Kernels,
    /// Bytes of the checkpoint are loaded, of `total`.
    Weights { done: u64, total: u64 },
}

/// A model could not be loaded. One line: the problem, its file or tensor, what was expected.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    DoesNotFit(#[from] Box<DoesNotFit>),
    #[error(
        "the model is not where it was placed: {0}; other programs may have pushed it out, or the driver failed: \
         `unicorn doctor` tells (memory-taken, gpu-reset); free memory, or set hardware.strict = false to serve \
         nevertheless"
    )]
    NotResident(Residency),
    #[error(
        "a context of {wanted} tokens was asked for (engine.context, --context), and {whose} was made for {longest} at most: ask \
         for no more, or leave it out for the longest that fits"
    )]
    ContextTooLong { wanted: usize, longest: usize, whose: &'static str },
    #[error("{0}")]
    Option(String),
    /// A unit that computes attention cannot be attached.
    #[error(transparent)]
    Offload(#[from] OffloadError),
}

impl From<UploadError> for LoadError {
    fn from(error: UploadError) -> Self {
        match error {
            UploadError::Gpu(e) => e.into(),
            UploadError::Checkpoint(e) => e.into(),
        }
    }
}

impl Gemma3 {
    /// Loads a checkpoint into device memory. `progress` is called every few megabytes.
    pub fn load(
        device: &Arc<Device>,
        files: &ModelFiles,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Gemma3, LoadError> {
        Gemma3::load_with_draft(device, files, None, options, progress).map(|(model, _)| model)
    }

    /// Loads a checkpoint, and beside it a second model as its draft model, stored as its files have it. The draft
    /// model shares the first model's blocks, slots and activations, so nothing but [`super::draft::Drafted`] may run
    /// it.
    pub(super) fn load_with_draft(
        device: &Arc<Device>,
        files: &ModelFiles,
        draft_files: Option<&ModelFiles>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(Gemma3, Option<Gemma3>), LoadError> {
        if options.max_batch_tokens == 0 || options.max_context == Some(0) {
            return Err(LoadError::Option(
                "the context and the prefill chunk must be at least 1 token".into(),
            ));
        }
        let source = Source::open(files)?;
        let weights = source.weights()?;
        let draft_source = draft_files.map(Source::open).transpose()?;
        let draft = match &draft_source {
            None => None,
            Some(draft) => {
                let name = || draft.files.display("config.json");
                check_draft(&source.config, &draft.config)
                    .map_err(|problem| LoadError::Option(format!("{}: {problem}", name())))?;
                let weights = draft.weights()?;
                let schemes = Schemes::of(&weights, QuantizeMode::None)?;
                Some((draft, weights, DraftRequest { config: &draft.config, schemes }))
            }
        };
        let used_before = device.memory_use();
        let request = MemoryRequest {
            config: &source.config,
            schemes: Schemes::of(&weights, options.quantize)?,
            kv: options.kv,
            block_size: options.block_size,
            max_batch_tokens: options.max_batch_tokens,
            max_shard_bytes: options
                .max_shard_bytes
                .unwrap_or(u64::MAX)
                .min(device.info().max_allocation_bytes / 2),
            moments: options.moments,
            offload: options.offload,
            draft: draft.as_ref().map(|(.., request)| request.clone()),
        };
        if let Some((wanted, longest, whose)) = request.beyond_model(options.max_context) {
            return Err(LoadError::ContextTooLong { wanted, longest, whose });
        }
        // Everything is placed before memory is allocated, and allocated before tensors are read.
        let others = memory::quantize_modes(&weights)?;
        let machine = device.machine();
        let fit = request
            .fit_to_serve(&machine, &options.memory, options.max_context, options.sequences, &others)
            .map_err(Box::new)?;
        let limits = request.limits(fit.context, fit.pools);
        let room = request.sequences(&fit);
        if room < options.sequences {
            tracing::warn!(
                "memory has room for {room} conversations at once beside a context of {} tokens, and engine.sequences is {}: \
                 further ones wait for room",
                fit.context,
                options.sequences
            );
        }
        if limits.max_batch_tokens < options.max_batch_tokens {
            let why = if limits.max_batch_tokens == fit.context {
                "the context is no longer"
            } else {
                "a layer of more would take the device for too long"
            };
            tracing::info!(
                "prompts are read {} tokens at once, and engine.prefill_chunk is {}: {why}",
                limits.max_batch_tokens,
                options.max_batch_tokens
            );
        }
        let arena = Arena::with_plan(device, fit.plan)?;
        touch(device, &arena)?;
        let draft_weights = draft.iter().flat_map(|(_, weights, _)| weights.iter());
        let mut load = Load {
            device,
            options,
            request: &request,
            arena,
            done: 0,
            total: weights.iter().chain(draft_weights).map(|t| t.stored_bytes()).sum(),
            progress,
        };
        let mut model = load.model(&source, &weights, &request.schemes, limits, None)?;
        let mut draft_model = match &draft {
            None => None,
            Some((source, weights, request)) => {
                let limits = Limits { vocab_size: source.config.vocab_size, ..limits };
                Some(load.model(source, weights, &request.schemes, limits, Some(&model))?)
            }
        };
        let arena = load.arena;
        assert!(arena.is_exhausted(), "something was planned that nobody asked for");
        let residency = residency::compare(arena.allocated(), used_before, device.memory_use());
        if let Residency::Denied { .. } = residency {
            if options.strict {
                return Err(LoadError::NotResident(residency));
            }
            tracing::warn!("the model is not where it was placed: {residency}");
        }
        for model in [Some(&mut model), draft_model.as_mut()].into_iter().flatten() {
            model.residency = residency;
            model.placements = arena.placements().to_vec();
        }
        // All slots begin with id 0, because an id that is read before a step has sampled it must be a row of the
        // embedding.
        let mut commands = CommandBuffer::new(device, "clear")?;
        let mut recorder = commands.begin()?;
        recorder.fill(&model.sampled, 0);
        recorder.submit_alone("clearing sampled ids")?;
        commands.wait()?;
        device.save_pipeline_cache();
        Ok((model, draft_model))
    }
}

/// Whether a model with the config `draft` can be the draft model of `model`. The error says why not.
pub fn check_draft(model: &Gemma3Config, draft: &Gemma3Config) -> Result<(), String> {
    match (model.window(), draft.window()) {
        (None, Some(draft)) => Err(format!(
            "its layers see a window of {draft} tokens, and the model has no such layers, so no blocks for them: it \
             cannot be that model's draft"
        )),
        (Some(model), Some(draft)) if draft > model => Err(format!(
            "sliding_window is {draft}, and that of the model is {model}: a draft looks back as far as the model at most"
        )),
        _ => Ok(()),
    }
}

/// A checkpoint that is about to be loaded.
struct Source<'a> {
    files: &'a ModelFiles,
    config: Gemma3Config,
    generation: GenerationConfig,
    checkpoint: Checkpoint,
}

impl<'a> Source<'a> {
    fn open(files: &'a ModelFiles) -> Result<Source<'a>, LoadError> {
        let (config, generation) = Gemma3Config::load(files)?;
        Ok(Source { files, config, generation, checkpoint: Checkpoint::open(files)? })
    }

    /// What the layers are to compute, unless the weights are rounded anew.
    fn layer_values(
        &self,
        options: &LoadOptions,
    ) -> Result<Result<Arc<LayerValues>, NotCompared>, LoadError> {
        let Source { files, config, .. } = self;
        let Some(manifest) = Manifest::read(files)? else { return Ok(Err(NotCompared::NotStored)) };
        let Some(values) = manifest.layer_values(files)? else { return Ok(Err(NotCompared::NotStored)) };
        let width = values.residual[0].values.len();
        let shape = (values.residual.len(), width);
        let expected = (config.num_hidden_layers + 1, config.hidden_size);
        let fits = shape == expected
            && values.logits.values.len() <= config.vocab_size
            && values.tokens.iter().all(|id| (*id as usize) < config.vocab_size);
        if !fits {
            return Err(LoadError::Option(format!(
                "{}: its layer values are {} rows of {width} numbers; expected {} of {}, as the config says, and ids below \
                 {}: quantize the source again",
                files.location(),
                shape.0,
                expected.0,
                expected.1,
                config.vocab_size
            )));
        }
        match options.quantize {
            QuantizeMode::None => Ok(Ok(Arc::new(values))),
            _ => Ok(Err(NotCompared::RoundedAnew)),
        }
    }

    /// All tensors of the model; refuses a shape that the kernels cannot compute.
    fn weights(&self) -> Result<Gemma3Weights<'_>, LoadError> {
        let Source { files, config, checkpoint, .. } = self;
        let weights = Gemma3Weights::collect(checkpoint, config)?;
        weights.warn_of_defects(checkpoint);
        if weights.skipped_vision > 0 {
            tracing::info!(
                tensors = weights.skipped_vision,
                bytes = weights.skipped_bytes,
                "vision tensors skipped: this engine reads text only"
            );
        }
        let group = config.num_attention_heads / config.num_key_value_heads;
        if group > MAX_GROUP {
            return Err(LoadError::Option(format!(
                "{}: num_attention_heads is {group} times num_key_value_heads; the attention kernel takes at most \
                 {MAX_GROUP}",
                files.display("config.json")
            )));
        }
        Ok(weights)
    }
}

/// A load in progress: all memory is allocated, and the load hands it to one model after the other.
struct Load<'a> {
    device: &'a Arc<Device>,
    options: &'a LoadOptions,
    request: &'a MemoryRequest<'a>,
    arena: Arena,
    /// Bytes of the checkpoints that are loaded.
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl Load<'_> {
    /// Loads the next model. If `of` is a model, the next model is its draft model. The caller sets the fields that
    /// concern the whole load at its end.
    fn model(
        &mut self,
        source: &Source<'_>,
        weights: &Gemma3Weights<'_>,
        schemes: &Schemes,
        limits: Limits,
        of: Option<&Gemma3>,
    ) -> Result<Gemma3, LoadError> {
        let Load { device, options, request, arena, done, total, progress } = self;
        let Source { config, checkpoint, .. } = source;
        let tokens = request.batch_tokens();
        let mut loader = Loader {
            checkpoint,
            uploader: Uploader::new(device)?,
            queued: Vec::new(),
            max_shard_bytes: request.max_shard_bytes,
            done: *done,
            total: *total,
            progress: &mut **progress,
        };

        (loader.progress)(Progress::Kernels);
        let heads = memory::heads_of(config, options.kv);
        // The squares of matrices' inputs are summed up in f32.
        let precision = if options.moments { Precision::F32 } else { options.precision };
        let kernels = Kernels::new(device, &matrices_of(schemes, options.tiles), heads, precision)?;

        let embedding = loader.matrix(arena, &weights.embed_tokens, schemes.embedding, Class::Embedding)?;
        let embed_scale = (config.hidden_size as f64).sqrt() as f32;
        let embedding = Embedding::new(arena, &mut loader.uploader, embedding, embed_scale)?;
        let eps = config.rms_norm_eps;
        let norm = loader.norm(arena, &weights.norm, eps)?;
        let layers = weights.layers.iter().zip(&schemes.layers);
        let layers: Vec<_> = layers
            .map(|(weights, schemes)| loader.layer(arena, weights, *schemes, eps))
            .collect::<Result<_, _>>()?;
        loader.read_queued()?;
        let mut shared = match of {
            Some(model) => Shared::of(model, config, tokens),
            None => Shared::new(arena, request, &limits)?,
        };
        let offload_buffers = match (options.offload, of) {
            (Some(limits), None) => Some(OffloadBuffers::new(device, arena, config, heads, limits)?),
            _ => None,
        };
        // The draft model draws no id that the model has no row for.
        let sample_below = options.sample_below.unwrap_or(usize::MAX).min(config.vocab_size);
        shared.scratch.logits.vocab =
            of.map_or(sample_below, |model| sample_below.min(model.scratch.logits.vocab));
        let ropes = loader.rope_tables(arena, config, limits.max_context)?;
        let distinct = schemes.distinct();
        let cases =
            device_buffer(arena, self_test::buffer_bytes(&heads, &distinct), "the cases of the self-test")?;
        let moments = match options.moments && of.is_none() {
            true => (0..layers.len())
                .map(|i| layer_moments(arena, config, i).map(Some))
                .collect::<Result<_, _>>()?,
            false => vec![None; layers.len()],
        };
        let place = LayerPlace { config, kv: options.kv, limits: &limits, kernels: &kernels, ropes };
        let layers = layers.into_iter().zip(moments).enumerate();
        let layers: Vec<Layer> = layers
            .map(|(i, (weights, moments))| place.layer(arena, i, weights, moments))
            .collect::<Result<_, _>>()?;

        let frames = (0..MAX_IN_FLIGHT)
            .map(|i| Frame::new(arena, config, &limits, i))
            .collect::<Result<Vec<_>, GpuError>>()?;
        let bytes = self_test::result_bytes(&heads);
        let results = arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "results of the self-test")?;
        let traits =
            Traits {
                heads,
                schemes: distinct,
                gated: each_once(layers.iter().zip(&schemes.layers).filter_map(
                    |(layer, [.., gate, up, _])| (gate == up).then_some((*gate, layer.wants[3])),
                )),
                normed: each_once(layers.iter().flat_map(|layer| [layer.wants[0], layer.wants[2]])),
                attended: each_once(layers.iter().map(|layer| layer.wants[1])),
                activated: each_once(layers.iter().map(|layer| layer.wants[3])),
                last: kernels.wants([embedding.matrix()]),
            };
        let (self_test, image) = SelfTest::new(device, &kernels, &traits, &cases, results);
        loader.uploader.upload(&cases, &image)?;
        checkpoint.release_all();
        *done = loader.done;
        let bytes = weights.iter().map(|t| t.stored_bytes()).sum();
        let loaded = Loaded { bytes, resident_bytes: checkpoint.resident_bytes() };
        loader.uploader.finish()?;
        Ok(Gemma3 {
            device: device.clone(),
            config: config.clone(),
            generation: source.generation.clone(),
            limits,
            kv: options.kv,
            kernels,
            embedding,
            norm,
            layers,
            scratch: shared.scratch,
            frames,
            sampled: shared.sampled,
            history: shared.history,
            logits_readback: shared.logits_readback,
            self_test,
            layer_values: source.layer_values(options)?,
            offload_buffers,
            offload: None,
            trial_layers: usize::MAX,
            in_flight: VecDeque::new(),
            closing: None,
            next_ticket: 0,
            rates: Rates::default(),
            max_submit: options.max_submit,
            max_courteous_submit: options.max_courteous_submit,
            placements: Vec::new(),
            loaded,
            residency: Residency::Unknown,
            weight_bytes: request.weight_bytes_of(config, schemes),
            schemes: schemes.clone(),
        })
    }
}

fn each_once<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for one in all {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
}

/// The matrices that kernels must be able to multiply by.
fn matrices_of(schemes: &Schemes, tiles: Option<Tiles>) -> Matrices {
    let mut matrices = Matrices { embedding: Some(schemes.embedding), tiles, ..Matrices::default() };
    for &[q, k, v, o, gate, up, down] in &schemes.layers {
        matrices.products.extend([q, k, v, o, gate, up, down]);
        matrices.gated.extend([gate, up]);
    }
    matrices
}

/// Buffers that a model and its draft model share. The two models compute one after the other.
struct Shared {
    scratch: Scratch,
    sampled: Buffer,
    history: History,
    logits_readback: Buffer,
}

impl Shared {
    fn new(arena: &mut Arena, request: &MemoryRequest<'_>, limits: &Limits) -> Result<Shared, GpuError> {
        let config = request.config;
        let scratch = Scratch::new(arena, config, request.batch_tokens(), request.activation_bytes())?;
        let sampled = device_buffer(arena, memory::SAMPLED_BYTES, "sampled ids")?;
        let ids = device_buffer(arena, memory::history_bytes(limits), "history")?;
        let history = History { ids, slot_len: limits.max_context };
        let bytes = memory::logits_bytes(config);
        let logits_readback = arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "logits readback")?;
        Ok(Shared { scratch, sampled, history, logits_readback })
    }

    /// The buffers of `model`, in the shapes of a draft model with the config `draft`.
    fn of(model: &Gemma3, draft: &Gemma3Config, tokens: usize) -> Shared {
        Shared {
            scratch: model.scratch.shared_with(draft, tokens),
            sampled: model.sampled.clone(),
            history: model.history.clone(),
            logits_readback: model.logits_readback.clone(),
        }
    }
}

/// Sums of the squares of the inputs of a layer's matrices, for calibration.
fn layer_moments(arena: &mut Arena, config: &Gemma3Config, layer: usize) -> Result<[Buffer; 4], GpuError> {
    let [a, b, c, d] = memory::moment_widths(config)
        .map(|width| device_buffer(arena, 4 * width as u64, &format!("layer {layer} moments")));
    Ok([a?, b?, c?, d?])
}

/// The matrices and norms of a layer on the device.
struct LoadedLayer {
    /// The matrices q, k, v, o, gate, up and down.
    matrices: [Matrix; 7],
    /// The norms before and behind attention, before and behind the feed-forward network, of queries, and of keys.
    norms: [RmsNorm; 6],
}

/// What the layers of one model have in common.
struct LayerPlace<'a> {
    config: &'a Gemma3Config,
    kv: KvDtype,
    limits: &'a Limits,
    kernels: &'a Kernels,
    /// The RoPE tables of sliding and of full layers.
    ropes: [Buffer; 2],
}

impl LayerPlace<'_> {
    /// Loads layer `i`, with its KV cache.
    fn layer(
        &self,
        arena: &mut Arena,
        i: usize,
        loaded: LoadedLayer,
        moments: Option<[Buffer; 4]>,
    ) -> Result<Layer, GpuError> {
        let LayerPlace { config, limits, kernels, ropes: [rope_sliding, rope_full], .. } = self;
        let kind = config.layer_types[i];
        let bytes = memory::kv_pool_bytes(config, self.kv, &limits.kv, kind);
        let mut half = |what: &str| {
            arena.alloc(MemoryKind::Device, Class::KvCache, bytes, &format!("layer {i} {what} cache"))
        };
        let cache = KvCache { keys: half("key")?, values: half("value")? };
        let (window, rope) = match kind {
            LayerType::SlidingAttention => (Some(config.sliding_window), rope_sliding),
            LayerType::FullAttention => (None, rope_full),
        };
        let shape = AttentionShape {
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            block_size: limits.kv.block_size,
            max_blocks: memory::table_blocks(limits),
            window,
        };
        let [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] = loaded.matrices;
        let [n1, n2, n3, n4, q_norm, k_norm] = loaded.norms;
        let q_scale = config.query_pre_attn_scalar.powf(-0.5) as f32;
        let wants = [
            kernels.wants([&q_proj, &k_proj, &v_proj]),
            kernels.wants([&o_proj]),
            kernels.wants([&gate_proj, &up_proj]),
            kernels.wants([&down_proj]),
        ];
        Ok(Layer {
            kind,
            input_layernorm: n1,
            post_attention_layernorm: n2,
            pre_feedforward_layernorm: n3,
            post_feedforward_layernorm: n4,
            attention: Attention { shape, q_norm, k_norm, rope: rope.clone(), q_scale, cache },
            q_proj,
            k_proj,
            v_proj,
            o_proj,
            gate_proj,
            up_proj,
            down_proj,
            wants,
            moments,
        })
    }
}

/// Bytes of tensors that are read together: enough to keep the disk busy, and few enough to show progress.
const READ_TOGETHER_BYTES: u64 = 256 << 20;

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    uploader: Uploader<'a, UploadError>,
    /// Tensors that are queued, or that were read since the last release.
    queued: Vec<Tensor<'a>>,
    max_shard_bytes: u64,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl<'a> Loader<'a> {
    fn matrix(
        &mut self,
        arena: &mut Arena,
        tensor: &Tensor<'a>,
        scheme: Scheme,
        class: Class,
    ) -> Result<Matrix, LoadError> {
        let before = self.done + self.queued_bytes();
        let Loader { uploader, max_shard_bytes, total, progress, .. } = self;
        let row_bytes = tensor.stored_bytes() / tensor.rows() as u64;
        let each =
            &mut |rows| progress(Progress::Weights { done: before + rows as u64 * row_bytes, total: *total });
        let matrix = Matrix::upload(arena, uploader, tensor, scheme, class, *max_shard_bytes, each)?;
        self.queued.push(*tensor);
        if self.queued_bytes() >= READ_TOGETHER_BYTES {
            self.read_queued()?;
        }
        Ok(matrix)
    }

    /// The matrices and norms of a layer.
    fn layer(
        &mut self,
        arena: &mut Arena,
        w: &LayerWeights<'a>,
        [q, k, v, o, gate, up, down]: [Scheme; 7],
        eps: f32,
    ) -> Result<LoadedLayer, LoadError> {
        let mut attention = |t, scheme| self.matrix(arena, t, scheme, Class::Attention);
        let [q_proj, k_proj] = [attention(&w.q_proj, q)?, attention(&w.k_proj, k)?];
        let [v_proj, o_proj] = [attention(&w.v_proj, v)?, attention(&w.o_proj, o)?];
        let mut ffn = |t, scheme| self.matrix(arena, t, scheme, Class::Ffn);
        let [gate_proj, up_proj, down_proj] =
            [ffn(&w.gate_proj, gate)?, ffn(&w.up_proj, up)?, ffn(&w.down_proj, down)?];
        let mut norm = |t: &Tensor| self.norm(arena, t, eps);
        let norms = [
            norm(&w.input_layernorm)?,
            norm(&w.post_attention_layernorm)?,
            norm(&w.pre_feedforward_layernorm)?,
            norm(&w.post_feedforward_layernorm)?,
            norm(&w.q_norm)?,
            norm(&w.k_norm)?,
        ];
        Ok(LoadedLayer { matrices: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj], norms })
    }

    /// The RoPE tables of sliding and of full layers.
    fn rope_tables(
        &mut self,
        arena: &mut Arena,
        config: &Gemma3Config,
        positions: usize,
    ) -> Result<[Buffer; 2], LoadError> {
        let mut table = |base, factor, name| {
            let table = rope_table(config.head_dim, positions, base, factor);
            let buffer = device_buffer(arena, memory::rope_table_bytes(config, positions), name)?;
            self.uploader.upload(&buffer, &table)?;
            Ok::<_, LoadError>(buffer)
        };
        Ok([
            table(config.rope_local_base_freq, 1.0, "rope table (sliding layers)")?,
            table(config.rope_theta, config.rope_scaling_factor, "rope table (full layers)")?,
        ])
    }

    fn queued_bytes(&self) -> u64 {
        self.queued.iter().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Reads all queued tensors.
    fn read_queued(&mut self) -> Result<(), LoadError> {
        self.uploader.read_queued()?;
        for tensor in self.queued.drain(..) {
            self.done += tensor.stored_bytes();
            // Memory must not hold the model twice, so bytes that are on the device leave the page cache.
            self.checkpoint.release(&tensor);
        }
        (self.progress)(Progress::Weights { done: self.done, total: self.total });
        Ok(())
    }

    fn norm(&mut self, arena: &mut Arena, tensor: &Tensor, eps: f32) -> Result<RmsNorm, LoadError> {
        let mut values = self.checkpoint.read_f32(tensor)?;
        if !self.checkpoint.norms_hold_one() {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        let bytes = (4 * values.len()) as u64;
        let buffer = arena.alloc(MemoryKind::Device, Class::Norms, bytes, tensor.name)?;
        self.uploader.upload(&buffer, &values)?;
        self.done += tensor.stored_bytes();
        let done = self.done + self.queued_bytes();
        (self.progress)(Progress::Weights { done, total: self.total });
        Ok(RmsNorm { weight: buffer, eps })
    }
}

/// (cos, sin) of position * base^(-2i / head_dim) / factor, `[positions][head_dim / 2][2]`, computed in f64.
fn rope_table(head_dim: usize, positions: usize, base: f64, factor: f64) -> Vec<f32> {
    let frequencies: Vec<f64> =
        (0..head_dim / 2).map(|i| base.powf(-(2.0 * i as f64) / head_dim as f64) / factor).collect();
    let mut table = Vec::with_capacity(positions * head_dim);
    for position in 0..positions {
        for frequency in &frequencies {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            table.extend([cos as f32, sin as f32]);
        }
    }
    table
}

/// Writes zeros to all allocated memory that the load does not write itself. A driver may allocate memory without pages
/// behind it; after the write, the pages exist before a request needs them.
fn touch(device: &Arc<Device>, arena: &Arena) -> Result<(), GpuError> {
    let mut commands = CommandBuffer::new(device, "touch")?;
    for (_, chunk) in arena.chunks().iter().filter(|(class, _)| !class.is_weights()) {
        let mut recorder = commands.begin()?;
        recorder.fill(chunk, 0);
        recorder.submit_alone("touching memory")?;
        commands.wait()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rope_angles_are_exact_far_out() {
        let table = rope_table(8, 131_072, 1e6, 8.0);
        for (position, i) in [(0, 0), (1, 3), (131_071, 0), (100_003, 1)] {
            let angle = position as f64 / 1e6f64.powf(2.0 * i as f64 / 8.0) / 8.0;
            let at = (position * 4 + i) * 2;
            assert!((f64::from(table[at]) - angle.cos()).abs() < 1e-7, "{position} {i}");
            assert!((f64::from(table[at + 1]) - angle.sin()).abs() < 1e-7, "{position} {i}");
        }
    }
}
