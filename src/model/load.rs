//! Loads a checkpoint: checks its tensors, places them, and uploads them once.
//!
//! Before anything is allocated, this module refuses a model that does not fit. The error names the tensor that does
//! not fit, or the context that would fit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::arch;
use super::config::{ConfigError, GenerationConfig};
use super::layers::{DeviceLayer, DevicePerLayer, DeviceStreams, Scratch, device_buffer};
use super::memory::{
    self, DEFAULT_BLOCK_SIZE, DoesNotFit, DraftMemoryRequest, Fit, MAX_IN_FLIGHT, MemoryRequest, Schemes,
};
use super::model_runner::{Loaded, ModelRunner, NotCompared};
use super::offload::{OffloadBuffers, OffloadError, OffloadLimits};
use super::rates::Rates;
use super::rope::RopeSpec;
use super::self_test::{self, SelfTest, Traits};
use super::spec::{LayerSpec, Mixture, ModelSpec, NormWeight, each_once};
use super::step::Frame;
use super::streams::ATTENTION_SCALE;
use super::tensors::{
    AltUpTensors, Biases, Inputs, KeptMatrices, Layer, Norms, Projections, RouterTensors, TensorSpec,
};
use super::vision::{Tower, TowerLoad, TowerRequest, VisionSpec};
use super::weights::{Weights, WeightsError};
use super::{ImageBudget, Limits};
use crate::checkpoint::{Checkpoint, CheckpointError, LayerValues, Manifest, ModelFiles, Tensor};
use crate::gpu::placement::{self, Class, MemoryKind, Plan};
use crate::gpu::residency::{self, Residency};
use crate::gpu::{Arena, Buffer, CommandBuffer, Device, GpuError, Uploader};
use crate::kernels::{
    AltUp, Attention, AttentionBy, AttentionShape, Embedding, History, Kernels, KvCache, MAX_GROUP, Matrices,
    Matrix, RmsNorm, Router, Tiles, UploadError, Wants,
};
use crate::tensor::{KvDtype, Precision, QuantizeMode, Scheme, VisionMode};

/// Options of a load.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    pub quantize: QuantizeMode,
    /// Tokens of the longest sequence; refused if they do not fit, or if the model supports fewer. `None` = as many as
    /// fit.
    pub max_context: Option<usize>,
    /// The most sequences that the KV cache gets room for; fewer if memory is short.
    pub sequences: usize,
    /// Whether the load is refused if the memory does not hold so many whole contexts.
    pub whole_contexts: bool,
    /// Element type of the KV cache.
    pub kv: KvDtype,
    /// Tokens per KV block; at least 1.
    pub block_size: usize,
    /// The longest GPU time of a submit, as predicted from earlier submits. Tests set less than any submit takes, so
    /// that steps of small models are cut too.
    pub max_submit: Duration,
    /// The longest GPU time of a submit while courtesy bounds the share of the device's time. The default is half of a
    /// frame of a desktop at 60 Hz, so that the desktop's own work starts within its frame.
    pub max_courteous_submit: Duration,
    /// Limits on the device's memory.
    pub memory: placement::Limits,
    /// Precision of products of matrices and activations.
    pub precision: Precision,
    /// How products are shared out over workgroups. `None`: the best choice by count.
    pub tiles: Option<Tiles>,
    /// How attention is computed. `None`: the best choice by count.
    pub attention: Option<AttentionBy>,
    /// Whether a model that the kernel does not see in memory is refused. False: the load warns.
    pub strict: bool,
    /// The most prompt tokens processed per step.
    pub max_batch_tokens: usize,
    /// Number of ids that may be sampled. Higher ids are rows of the embedding that the tokenizer does not know.
    pub sample_below: Option<usize>,
    /// Whether the squares of every matrix's inputs are summed up, for [`ModelRunner::take_moments`].
    pub moments: bool,
    /// The largest allocation of weights. Tests use it to cut small matrices into shards.
    pub max_shard_bytes: Option<u64>,
    /// The buffers to reserve for a coprocessor; `None` by default.
    pub offload: Option<OffloadLimits>,
    /// Whether the tower that reads images is loaded.
    pub vision: VisionMode,
    pub image_budget: ImageBudget,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            quantize: QuantizeMode::None,
            max_context: None,
            sequences: 1,
            whole_contexts: false,
            kv: KvDtype::F32,
            block_size: DEFAULT_BLOCK_SIZE,
            max_submit: Duration::from_millis(200),
            max_courteous_submit: Duration::from_millis(8),
            memory: placement::Limits::default(),
            precision: Precision::F32,
            tiles: None,
            attention: None,
            strict: true,
            max_batch_tokens: 256,
            sample_below: None,
            moments: false,
            max_shard_bytes: None,
            offload: None,
            vision: VisionMode::Off,
            image_budget: ImageBudget::default(),
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
    /// The coprocessor cannot be attached.
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

impl ModelRunner {
    /// Loads a checkpoint into device memory. `progress` is called every few megabytes.
    pub fn load(
        device: &Arc<Device>,
        source: &Source<'_>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<ModelRunner, LoadError> {
        ModelRunner::load_with_draft(device, source, None, options, progress).map(|(model, _)| model)
    }

    /// Loads a checkpoint, and a second one as its draft model, with the weights as its files store them. The draft
    /// model shares the first model's blocks, slots and activations, so only [`super::draft::Drafted`] may run it.
    pub(super) fn load_with_draft(
        device: &Arc<Device>,
        source: &Source<'_>,
        draft_source: Option<&Source<'_>>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(ModelRunner, Option<ModelRunner>), LoadError> {
        if options.max_batch_tokens == 0 || options.max_context == Some(0) {
            return Err(LoadError::Option(
                "the context and the prefill chunk must be at least 1 token".into(),
            ));
        }
        let weights = source.computable_weights()?;
        if let Some(growth) = weights.growth(options.quantize) {
            tracing::warn!("{}: {growth}", source.files.location());
        }
        ModelRunner::load_weights(device, source, &weights, draft_source, options, progress)
    }

    /// As [`ModelRunner::load_with_draft`], with weights that may be elsewhere than in the source's files.
    pub(crate) fn load_weights(
        device: &Arc<Device>,
        source: &Source<'_>,
        weights: &Weights<'_>,
        draft_source: Option<&Source<'_>>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(ModelRunner, Option<ModelRunner>), LoadError> {
        let draft = match draft_source {
            None => None,
            Some(draft) => {
                check_draft(&source.config, &draft.config).map_err(|problem| {
                    LoadError::Option(format!("{}: {problem}", draft.files.display("config.json")))
                })?;
                let weights = draft.computable_weights()?;
                let schemes = Schemes::of(&weights, QuantizeMode::None)?;
                Some((draft, weights, DraftMemoryRequest { config: &draft.config, schemes }))
            }
        };
        let used_before = device.memory_use();
        let (tower, missing) = source.tower_to_load(weights, options, draft.is_some())?;
        if let Some(why) = missing {
            tracing::warn!("the model is loaded without its vision tower, and refuses images: {why}");
        }
        if let (Some(_), Some(file)) = (&tower, source.files.tower()) {
            tracing::info!("the model reads images with the vision tower in {}", file.display());
        }
        let vision = tower.as_ref().map(|found| TowerRequest {
            spec: found.0,
            scheme: TowerRequest::scheme_of(options.precision, is_bf16(found)),
            precision: options.precision,
            budget: options.image_budget,
        });
        let mut request = MemoryRequest {
            config: &source.config,
            schemes: Schemes::of(weights, options.quantize)?,
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
            vision,
        };
        if options.vision == VisionMode::Auto && request.vision.is_some() {
            let others = memory::quantize_modes(weights)?;
            let fit = |request: &MemoryRequest<'_>| fit(device, request, &others, options);
            let (chosen, reason) = request.with_tower_that_fits(options.max_context, fit);
            request = chosen;
            if let Some(reason) = reason {
                tracing::warn!("the model is loaded without its vision tower, and refuses images: {reason}");
            }
        }
        let (plan, limits) = place(device, &request, weights, options)?;
        if let (Some(vision), None) = (&request.vision, limits.images) {
            return Err(LoadError::Option(format!(
                "an image has {} tokens, and the context {}: ask for a longer one (--context), or use --vision off",
                vision.most_tokens(),
                limits.max_context
            )));
        }
        let bytes_per_s = plan.slowest_read();
        let arena = Arena::with_plan(device, plan)?;
        touch(device, &arena)?;
        let draft_bytes = draft.as_ref().map_or(0, |(_, weights, _)| weights.stored_bytes());
        let tower = tower.filter(|_| request.vision.is_some());
        let tower_bytes = tower.iter().map(|(_, tensors)| stored_bytes(tensors)).sum::<u64>();
        let mut load = Load {
            device,
            options,
            request: &request,
            bytes_per_s,
            arena,
            uploader: Uploader::new(device)?,
            queued: Vec::new(),
            done: 0,
            total: weights.stored_bytes() + draft_bytes + tower_bytes,
            progress,
        };
        let mut model = load.model(source, weights, &request.schemes, limits.clone(), None)?;
        let mut draft_model = match &draft {
            None => None,
            Some((source, weights, request)) => {
                let limits = Limits { vocab_size: source.config.vocab_size, ..limits };
                Some(load.model(source, weights, &request.schemes, limits, Some(&model))?)
            }
        };
        if let (Some((_, tensors)), Some(tower)) = (tower, request.vision) {
            model.vision = Some(load.tower(source, tensors, tower, &model)?);
        }
        let Load { arena, uploader, .. } = load;
        uploader.finish()?;
        assert!(arena.is_exhausted(), "the plan has a buffer that the load does not use");
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

/// Places all buffers of the request in the device's memory, before anything is allocated.
fn place(
    device: &Device,
    request: &MemoryRequest<'_>,
    weights: &Weights<'_>,
    options: &LoadOptions,
) -> Result<(Plan, Limits), LoadError> {
    if let Some((wanted, longest, whose)) = request.beyond_model(options.max_context) {
        return Err(LoadError::ContextTooLong { wanted, longest, whose });
    }
    let others = memory::quantize_modes(weights)?;
    let fit = fit(device, request, &others, options).map_err(Box::new)?;
    let room = request.sequences(&fit);
    let limits = request.limits(fit.context, fit.pools);
    if room < options.sequences {
        tracing::warn!(
            "memory has room for {room} conversations at once with a context of {} tokens, and engine.sequences is {}: \
             further ones wait for room",
            fit.context,
            options.sequences
        );
    }
    if limits.max_batch_tokens < options.max_batch_tokens {
        let why = if limits.max_batch_tokens == fit.context {
            "the context is no longer"
        } else if limits.max_batch_tokens == request.dispatched_tokens() {
            "a dispatch has no room for the experts of more"
        } else {
            "a layer of more would take the device for too long"
        };
        tracing::info!(
            "prompts are read {} tokens at once, and engine.prefill_chunk is {}: {why}",
            limits.max_batch_tokens,
            options.max_batch_tokens
        );
    }
    Ok((fit.plan, limits))
}

/// The context and the pools that fit, and their places. `others` are smaller schemes, for the error.
fn fit(
    device: &Device,
    request: &MemoryRequest<'_>,
    others: &[(String, Schemes)],
    options: &LoadOptions,
) -> Result<Fit, DoesNotFit> {
    let machine = device.machine();
    let (context, sequences) = (options.max_context, options.sequences);
    match options.whole_contexts {
        true => request.fit(&machine, &options.memory, context, sequences, others),
        false => request.fit_to_serve(&machine, &options.memory, context, sequences, others),
    }
}

/// Whether a model with the config `draft` can be the draft model of `model`. The error says why not.
pub fn check_draft(model: &ModelSpec, draft: &ModelSpec) -> Result<(), String> {
    if draft.mixture.is_some() {
        return Err("it has experts: a mixture of experts cannot be a draft".into());
    }
    match (model.window(), draft.window()) {
        (None, Some(draft)) => Err(format!(
            "its layers see a window of {draft} tokens, and the model has no such layers, so no blocks for them: it \
             cannot be that model's draft"
        )),
        (Some(model), Some(draft)) if draft > model => Err(format!(
            "sliding_window is {draft}, and that of the model is {model}: a draft looks back as far as the model at most"
        )),
        _ if draft.pools_of_layers(&model.kv_pools()).is_none() => Err(format!(
            "its layers are of {} kinds, and those of the model of {}: it cannot be that model's draft",
            draft.kv_groups().len(),
            model.kv_groups().len()
        )),
        _ => Ok(()),
    }
}

/// An opened checkpoint with its configs, which are read once.
pub struct Source<'a> {
    pub files: &'a ModelFiles,
    pub config: ModelSpec,
    pub generation: GenerationConfig,
    pub checkpoint: Checkpoint,
}

impl<'a> Source<'a> {
    pub fn open(files: &'a ModelFiles) -> Result<Source<'a>, LoadError> {
        let (config, generation) = arch::load(files)?;
        Source::with_config(files, config, generation)
    }

    /// The checkpoint whose configs were read before.
    pub fn with_config(
        files: &'a ModelFiles,
        config: ModelSpec,
        generation: GenerationConfig,
    ) -> Result<Source<'a>, LoadError> {
        Ok(Source { files, config, generation, checkpoint: Checkpoint::open(files)? })
    }

    /// All tensors of the model.
    pub fn weights(&self) -> Result<Weights<'_>, WeightsError> {
        Weights::collect(&self.checkpoint, &self.config)
    }

    /// The expected values of the layers. There are none, for example, if the weights are rounded when they are loaded.
    fn layer_values(
        &self,
        options: &LoadOptions,
    ) -> Result<Result<Arc<LayerValues>, NotCompared>, LoadError> {
        let Source { files, config, .. } = self;
        let Some(manifest) = Manifest::read(files)? else { return Ok(Err(NotCompared::NotStored)) };
        let Some(values) = manifest.layer_values(files)? else { return Ok(Err(NotCompared::NotStored)) };
        let width = values.residual[0].values.len();
        let shape = (values.residual.len(), width);
        let expected = (config.layers.len() + 1, config.hidden_size);
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

    /// The tower that reads images, and its tensors. `None` if the model reads text only. The error says why the tower
    /// cannot be used.
    pub fn tower<'w>(&self, weights: &Weights<'w>) -> Result<Option<FoundTower<'_, 'w>>, String> {
        let Some(spec) = self.config.vision.as_ref().map_err(Clone::clone)? else { return Ok(None) };
        match weights.vision(&self.checkpoint, spec) {
            Err(error) => Err(error.to_string()),
            Ok(None) => Err("the checkpoint lacks the vision tower that config.json describes".into()),
            Ok(Some(tensors)) => Ok(Some((spec, tensors))),
        }
    }

    /// The tower to load, and its tensors. If there is none, the reason, unless the model reads text only or no tower is
    /// wanted. A tower that cannot be used is no reason to refuse texts, unless the user asks for it.
    fn tower_to_load<'w>(
        &self,
        weights: &Weights<'w>,
        options: &LoadOptions,
        has_draft: bool,
    ) -> Result<(Option<FoundTower<'_, 'w>>, Option<String>), LoadError> {
        const TEXT_ONLY: &str = "the model reads text only, and --vision on asks for its vision tower";
        let missing = |why: &str| match options.vision {
            VisionMode::On => Err(LoadError::Option(format!("{}: {why}", self.files.location()))),
            _ => Ok((None, Some(why.to_owned()))),
        };
        if options.vision == VisionMode::Off {
            return Ok((None, None));
        }
        match self.tower(weights) {
            Ok(None) if options.vision == VisionMode::Auto => Ok((None, None)),
            Ok(None) => missing(TEXT_ONLY),
            Ok(Some(_)) if has_draft => {
                missing("a model with a draft model takes no images: use --vision off, or no --draft")
            }
            Ok(tower) => Ok((tower, None)),
            Err(problem) => missing(&problem),
        }
    }

    /// The scheme of a tower's matrices on the device. `None` if a load with these options has no tower.
    pub fn tower_scheme(
        &self,
        mode: VisionMode,
        precision: Precision,
        has_draft: bool,
    ) -> Result<Option<Scheme>, LoadError> {
        let options = LoadOptions { vision: mode, precision, ..LoadOptions::default() };
        let (tower, _) = self.tower_to_load(&self.weights()?, &options, has_draft)?;
        Ok(tower.map(|found| TowerRequest::scheme_of(precision, is_bf16(&found))))
    }

    /// All tensors of the model, with a log line about defects and skipped tensors. Refuses a shape that the kernels
    /// cannot compute.
    fn computable_weights(&self) -> Result<Weights<'_>, LoadError> {
        let Source { files, config, checkpoint, .. } = self;
        let weights = self.weights()?;
        weights.warn_of_defects(checkpoint);
        if weights.skipped_vision > 0 {
            tracing::info!(
                tensors = weights.skipped_vision,
                bytes = weights.skipped_bytes,
                "tensors of images and sound, which the language model does not use"
            );
        }
        let groups = config.layers.iter().map(|layer| layer.heads.group());
        let group = groups.max().expect("a layer at least");
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

/// A tower of a checkpoint, and its tensors.
pub type FoundTower<'s, 'w> = (&'s VisionSpec, Vec<Tensor<'w>>);

/// Whether all matrices of a tower are bf16.
fn is_bf16((spec, tensors): &FoundTower<'_, '_>) -> bool {
    let wanted = spec.tensors();
    let mut matrices = wanted.iter().zip(tensors).filter(|(wanted, _)| wanted.is_matrix());
    matrices.all(|(_, tensor)| tensor.scheme().ok() == Some(Scheme::Bf16))
}

/// Bytes of a tower's tensors in their files.
fn stored_bytes(tensors: &[Tensor<'_>]) -> u64 {
    tensors.iter().map(|tensor| tensor.stored_bytes()).sum()
}

/// Bytes of tensors that are read together: enough to keep the disk busy, and few enough to show progress.
const READ_TOGETHER_BYTES: u64 = 256 << 20;

/// A load in progress. All memory is allocated already. The model uses it first, then its draft model.
struct Load<'a> {
    device: &'a Arc<Device>,
    options: &'a LoadOptions,
    request: &'a MemoryRequest<'a>,
    /// The lowest speed at which the memory of the plan was read, if this was measured.
    bytes_per_s: Option<u64>,
    arena: Arena,
    uploader: Uploader<'a, UploadError>,
    /// Tensors that are queued, or that were read since the last release.
    queued: Vec<Tensor<'a>>,
    /// Bytes of the checkpoints that are loaded, and of all tensors.
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl<'a> Load<'a> {
    /// Loads the next model. If `of` is a model, the next model is its draft model. At the end of the load, the caller
    /// sets the fields that concern the whole load.
    fn model(
        &mut self,
        source: &'a Source<'_>,
        weights: &Weights<'a>,
        schemes: &Schemes,
        limits: Limits,
        of: Option<&ModelRunner>,
    ) -> Result<ModelRunner, LoadError> {
        let Source { config, checkpoint, .. } = source;
        let options = self.options;
        let cached_bytes = checkpoint.resident_bytes();
        (self.progress)(Progress::Kernels);
        let heads = memory::distinct_heads(config, options.kv);
        // The squares of matrices' inputs are summed up in f32.
        let precision = if options.moments { Precision::F32 } else { options.precision };
        let matrices = matrices_of(config, schemes, options);
        let kernels = Kernels::new(self.device, &matrices, &heads, precision)?;

        let specs = &config.tensors;
        let tensors = &weights.tensors;
        let embedding =
            self.matrix(checkpoint, tensors.embed_tokens, &specs.embed_tokens, schemes.embedding)?;
        let embedding = Embedding::new(&mut self.arena, &mut self.uploader, embedding, config.embed_scale)?;
        let norm = self.norm(source, tensors.norm, &specs.norm)?;
        let lm_head = match (tensors.lm_head, &specs.lm_head) {
            (Some(tensor), Some(spec)) => Some(self.matrix(checkpoint, tensor, spec, schemes.head())?),
            _ => None,
        };
        let per_layer = self.per_layer_embeddings(source, weights, schemes)?;
        let streams = self.streams(source, weights, schemes)?;
        let mut of_layers = Vec::new();
        let of_schemes = schemes.layers.iter().zip(&schemes.kept);
        for ((tensors, specs), (schemes, kept)) in tensors.layers.iter().zip(&specs.layers).zip(of_schemes) {
            let projections = tensors.projections.zip(specs.projections.as_ref()).zip(*schemes);
            let projections = projections
                .try_map(|((tensor, spec), scheme)| self.matrix(checkpoint, tensor, spec, scheme))?;
            let norms = tensors.norms.zip(specs.norms.as_ref());
            let norms = norms.try_map(|(tensor, spec)| self.norm(source, tensor, spec))?;
            let biases = tensors.biases.zip(specs.biases.as_ref());
            let biases = biases.try_map(|(tensor, spec)| self.vector(source, tensor, spec, 0.0))?;
            let scalars = tensors.scalars.try_map(|tensor| self.number(source, &tensor))?;
            let router = tensors.router.zip(specs.router.as_ref());
            let router = router.try_map(|(tensor, spec)| self.vector(source, tensor, spec, 0.0))?;
            let kept = tensors.kept.zip(specs.kept.as_ref()).zip(*kept);
            let kept =
                kept.try_map(|((tensor, spec), scheme)| self.matrix(checkpoint, tensor, spec, scheme))?;
            let altup = tensors.altup.zip(specs.altup.as_ref());
            let altup = altup.try_map(|(tensor, spec)| self.vector(source, tensor, spec, 0.0))?;
            of_layers.push(Layer { projections, norms, biases, scalars, router, kept, altup });
        }
        self.read_queued(checkpoint)?;
        let tokens = self.request.batch_tokens();
        let arena = &mut self.arena;
        // A draft model uses the buffers of its model, in its own shapes.
        let (mut scratch, sampled, history, logits_readback) = match of {
            Some(model) => (
                model.scratch.shared_with(config, tokens),
                model.sampled.clone(),
                model.history.clone(),
                model.logits_readback.clone(),
            ),
            None => {
                let scratch = Scratch::new(arena, config, tokens, self.request.activation_bytes())?;
                let sampled = device_buffer(arena, memory::SAMPLED_BYTES, "sampled ids")?;
                let ids = device_buffer(arena, memory::history_bytes(&limits), "history")?;
                let history = History { ids, slot_len: limits.max_context };
                let bytes = memory::logits_bytes(config);
                let readback = arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "logits readback")?;
                (scratch, sampled, history, readback)
            }
        };
        let offload_buffers = match (options.offload, of) {
            (Some(limits), None) => Some(OffloadBuffers::new(arena, config, limits)?),
            _ => None,
        };
        // The draft model draws no id that the model has no row for.
        let sample_below = options.sample_below.unwrap_or(usize::MAX).min(config.vocab_size);
        scratch.logits.vocab = of.map_or(sample_below, |model| sample_below.min(model.scratch.logits.vocab));
        let ropes = self.rope_tables(config, limits.max_context)?;
        let arena = &mut self.arena;
        let distinct = schemes.distinct();
        let tested = memory::tested_experts(config, schemes, tokens);
        let bytes = self_test::buffer_bytes(&heads, &distinct, tested.as_ref());
        let cases = device_buffer(arena, bytes, "the cases of the self-test")?;
        let moments = match options.moments && of.is_none() {
            true => specs
                .layers
                .iter()
                .map(|specs| layer_moments(arena, specs).map(Some))
                .collect::<Result<_, _>>()?,
            false => vec![None; specs.layers.len()],
        };
        let mut layers: Vec<DeviceLayer> = Vec::new();
        let pools = memory::pools_of_layers(config, &limits.kv.pools);
        let loaded = of_layers.into_iter().zip(moments).zip(&config.layers).zip(pools);
        for (i, (((of_layer, moments), spec), pool)) in loaded.enumerate() {
            let Layer { projections, norms, biases, scalars, router, kept, altup } = of_layer;
            let bytes = memory::kv_pool_bytes(&spec.heads, options.kv, &limits.kv, pool);
            let mut half = |what: &str| {
                arena.alloc(MemoryKind::Device, Class::KvCache, bytes, &format!("layer {i} {what} cache"))
            };
            let cache = match spec.kv_source {
                Some(source) => layers[source].attention.cache.clone(),
                // A step reads a part of the cache, and `ModelRunner::run` counts its bytes.
                None => KvCache { keys: half("key")?.accessing(0), values: half("value")?.accessing(0) },
            };
            // A layer without keys of its own norms none.
            let k_norm = norms.k_norm.clone().or_else(|| norms.q_norm.clone());
            let attention = Attention {
                shape: attention_shape(spec, &limits),
                qk_norms: norms.q_norm.clone().zip(k_norm).map(Into::into),
                norm_eps: config.norm_eps,
                biases: match biases {
                    Biases { q_proj: Some(q), k_proj: Some(k), v_proj: Some(v) } => Some([q, k, v]),
                    _ => None,
                },
                rope: ropes[spec.rope].clone(),
                q_scale: config.score_scale as f32,
                shares_cache: spec.kv_source.is_some(),
                cache,
            };
            let wants = input_forms(&kernels, &projections, &kept, &norms);
            let scale = scalars.layer_scalar.unwrap_or(1.0);
            let scratch = scratch.of_layer(spec);
            let router = config.mixture.as_ref().and_then(|mixture| device_router(mixture, &norms, router));
            layers.push(DeviceLayer {
                pool,
                attention,
                projections,
                kept,
                altup: device_altup(&norms, altup),
                gate_cutoff: spec.gate_cutoff,
                norms,
                attention_scale: if config.streams.is_some() { ATTENTION_SCALE } else { 1.0 },
                scale,
                router,
                scratch,
                wants,
                moments,
            });
        }

        let frames = (0..MAX_IN_FLIGHT)
            .map(|i| Frame::new(arena, config, &limits, i))
            .collect::<Result<Vec<_>, GpuError>>()?;
        let bytes = self_test::result_bytes(&heads, tested.as_ref());
        let results = arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "results of the self-test")?;
        let gated = layers.iter().zip(&schemes.layers).filter_map(|(layer, schemes)| {
            let scheme = schemes.gate_proj.filter(|scheme| schemes.up_proj == Some(*scheme))?;
            Some((scheme, layer.wants.down?))
        });
        let gated_experts = layers.iter().zip(&schemes.layers).filter_map(|(layer, schemes)| {
            let scheme = schemes.expert_gate_proj.filter(|scheme| schemes.expert_up_proj == Some(*scheme))?;
            Some((scheme, layer.wants.expert_down?))
        });
        let traits = Traits {
            layers: config.layer_kind(),
            heads,
            schemes: distinct,
            gated: each_once(gated),
            normed: each_once(
                layers
                    .iter()
                    .flat_map(|layer| [layer.wants.qkv].into_iter().chain(layer.wants.feed_forward())),
            ),
            attended: each_once(layers.iter().map(|layer| layer.wants.output)),
            activated: each_once(layers.iter().filter_map(|layer| layer.wants.down)),
            last: kernels.wants([lm_head.as_ref().unwrap_or(embedding.matrix())]),
            has_softcap: config.final_logit_softcap.is_some(),
            experts: tested,
            gated_experts: each_once(gated_experts),
        };
        let (self_test, image) = SelfTest::new(self.device, &kernels, &traits, &cases, results);
        self.uploader.upload(&cases, &image)?;
        checkpoint.release_all();
        let (bytes, resident_bytes) = (weights.stored_bytes(), checkpoint.resident_bytes());
        let loaded = Loaded { bytes, cached_bytes, resident_bytes };
        Ok(ModelRunner {
            device: self.device.clone(),
            config: config.clone(),
            generation: source.generation.clone(),
            limits,
            kv: options.kv,
            kernels,
            embedding,
            lm_head,
            per_layer,
            streams,
            norm,
            layers,
            scratch,
            frames,
            sampled,
            history,
            logits_readback,
            self_test,
            layer_values: source.layer_values(options)?,
            offload_buffers,
            vision: None,
            coprocessor: None,
            trial_layers: usize::MAX,
            in_flight: VecDeque::new(),
            closing: None,
            next_ticket: 0,
            rates: Rates::of(self.bytes_per_s),
            max_submit: options.max_submit,
            max_courteous_submit: options.max_courteous_submit,
            placements: Vec::new(),
            loaded,
            residency: Residency::Unknown,
            weight_bytes: self.request.weight_bytes_of(config, schemes),
            schemes: schemes.clone(),
        })
    }

    fn tower(
        &mut self,
        source: &Source<'_>,
        tensors: Vec<Tensor<'a>>,
        request: TowerRequest<'_>,
        model: &ModelRunner,
    ) -> Result<Tower, LoadError> {
        let (mut done, total) = (self.done, self.total);
        let Load { device, arena, uploader, progress, .. } = self;
        let discards = uploader.discards();
        let tower = TowerLoad {
            device,
            request,
            max_batch_tokens: model.limits.max_batch_tokens,
            arena,
            uploader,
            tiles: model.kernels.tiles(),
            has_gguf_layout: source.checkpoint.has_gguf_layout(),
        };
        let tower = tower.run(tensors, &mut |tensor| {
            let values = match discards {
                true => vec![0.0; tensor.shape.iter().product()],
                false => source.checkpoint.read_f32(tensor)?,
            };
            source.checkpoint.release(tensor);
            done += tensor.stored_bytes();
            progress(Progress::Weights { done, total });
            Ok::<_, LoadError>(values)
        });
        self.done = done;
        tower
    }

    fn matrix(
        &mut self,
        checkpoint: &Checkpoint,
        tensor: Tensor<'a>,
        spec: &TensorSpec,
        scheme: Scheme,
    ) -> Result<Matrix, LoadError> {
        let before = self.done + self.queued_bytes();
        let Load { arena, uploader, request, total, progress, .. } = self;
        let row_bytes = tensor.stored_bytes() / tensor.rows() as u64;
        let each =
            &mut |rows| progress(Progress::Weights { done: before + rows as u64 * row_bytes, total: *total });
        let max_shard_bytes = if spec.is_of_experts() { u64::MAX } else { request.max_shard_bytes };
        let matrix = Matrix::upload(arena, uploader, &tensor, scheme, spec.class, max_shard_bytes, each)?;
        self.queued.push(tensor);
        if self.queued_bytes() >= READ_TOGETHER_BYTES {
            self.read_queued(checkpoint)?;
        }
        Ok(matrix)
    }

    fn norm(
        &mut self,
        source: &Source<'_>,
        tensor: Tensor<'_>,
        spec: &TensorSpec,
    ) -> Result<RmsNorm, LoadError> {
        let adds_one =
            source.config.norm_weight == NormWeight::OnePlus && !source.checkpoint.norms_hold_one();
        let weight = self.vector(source, tensor, spec, if adds_one { 1.0 } else { 0.0 })?;
        Ok(RmsNorm { weight, eps: source.config.norm_eps })
    }

    /// Loads the elements of a norm or a bias, each with `more` added.
    fn vector(
        &mut self,
        source: &Source<'_>,
        tensor: Tensor<'_>,
        spec: &TensorSpec,
        more: f32,
    ) -> Result<Buffer, LoadError> {
        let mut values = source.checkpoint.read_f32(&tensor)?;
        values.iter_mut().for_each(|value| *value += more);
        let bytes = (4 * values.len()) as u64;
        let buffer = self.arena.alloc(MemoryKind::Device, spec.class, bytes, tensor.name)?;
        self.uploader.upload(&buffer, &values)?;
        self.done += tensor.stored_bytes();
        let done = self.done + self.queued_bytes();
        (self.progress)(Progress::Weights { done, total: self.total });
        Ok(buffer)
    }

    /// Loads a tensor with one element.
    fn number(&mut self, source: &Source<'_>, tensor: &Tensor<'_>) -> Result<f32, LoadError> {
        let values = source.checkpoint.read_f32(tensor)?;
        self.done += tensor.stored_bytes();
        Ok(values[0])
    }

    /// The RoPE tables of [`ModelSpec::ropes`].
    fn rope_tables(&mut self, config: &ModelSpec, positions: usize) -> Result<Vec<Buffer>, LoadError> {
        let table = |(index, rope): (usize, &RopeSpec)| {
            let table = rope.table(config.rope_dim(index), positions);
            let bytes = (4 * table.len()) as u64;
            let buffer = device_buffer(&mut self.arena, bytes, &memory::rope_table_name(rope))?;
            self.uploader.upload(&buffer, &table)?;
            Ok(buffer)
        };
        config.ropes.iter().enumerate().map(table).collect()
    }

    /// What computes the per-layer embeddings of a token.
    fn per_layer_embeddings(
        &mut self,
        source: &'a Source<'_>,
        weights: &Weights<'a>,
        schemes: &Schemes,
    ) -> Result<Option<DevicePerLayer>, LoadError> {
        let Source { config, checkpoint, .. } = source;
        let (Some(inputs), Some(specs)) = (config.per_layer, &config.tensors.per_layer) else {
            return Ok(None);
        };
        let tensors = weights.tensors.per_layer.as_ref().expect("tensors of the specs");
        let schemes = schemes.per_layer.as_ref().expect("schemes of the specs");
        let spec = &specs.embed_tokens_per_layer;
        let table = self.matrix(checkpoint, tensors.embed_tokens_per_layer, spec, schemes.embedding)?;
        let embedding = Embedding::new(&mut self.arena, &mut self.uploader, table, inputs.embed_scale)?;
        // Ids without embeddings of their own have those of the first id.
        let embedding = embedding.with_row_beyond(0);
        let spec = &specs.per_layer_model_projection;
        let projection =
            self.matrix(checkpoint, tensors.per_layer_model_projection, spec, schemes.projection)?;
        let norm = self.norm(source, tensors.per_layer_projection_norm, &specs.per_layer_projection_norm)?;
        // The norm of `factor * x` is that of `x` with an epsilon that is divided by the factor's square.
        let eps = (f64::from(norm.eps) / f64::from(inputs.projection_scale).powi(2)) as f32;
        Ok(Some(DevicePerLayer { embedding, projection, norm: RmsNorm { eps, ..norm }, inputs }))
    }

    /// The matrices between residual streams outside of the layers.
    fn streams(
        &mut self,
        source: &'a Source<'_>,
        weights: &Weights<'a>,
        schemes: &Schemes,
    ) -> Result<Option<DeviceStreams>, LoadError> {
        let specs = &source.config.tensors.streams;
        let (Some(specs), Some(tensors), Some(schemes)) = (specs, &weights.tensors.streams, &schemes.streams)
        else {
            return Ok(None);
        };
        let all = tensors.as_ref().zip(specs.as_ref()).zip(*schemes);
        let checkpoint = &source.checkpoint;
        let matrix = |((tensor, spec), scheme): ((&Tensor<'a>, &TensorSpec), Scheme)| {
            self.matrix(checkpoint, *tensor, spec, scheme)
        };
        all.try_map(matrix).map(Some)
    }

    fn queued_bytes(&self) -> u64 {
        self.queued.iter().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Reads all queued tensors, which are `checkpoint`'s.
    fn read_queued(&mut self, checkpoint: &Checkpoint) -> Result<(), LoadError> {
        self.uploader.read_queued()?;
        for tensor in self.queued.drain(..) {
            self.done += tensor.stored_bytes();
            // Memory must not hold the model twice, so bytes that are on the device leave the page cache.
            checkpoint.release(&tensor);
        }
        (self.progress)(Progress::Weights { done: self.done, total: self.total });
        Ok(())
    }
}

fn attention_shape(spec: &LayerSpec, limits: &Limits) -> AttentionShape {
    AttentionShape {
        num_heads: spec.heads.num_attention_heads,
        num_kv_heads: spec.heads.num_key_value_heads,
        head_dim: spec.heads.head_dim,
        block_size: limits.kv.block_size,
        max_blocks: memory::table_blocks(limits),
        window: spec.window,
    }
}

/// The form in which each group of a layer's matrices takes its input. If a dense network and experts have a norm each, one
/// kernel writes the inputs of both, in the same forms.
fn input_forms(
    kernels: &Kernels,
    projections: &Projections<Matrix>,
    kept: &KeptMatrices<Matrix>,
    norms: &Norms<RmsNorm>,
) -> Inputs<Wants> {
    let Projections { q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, .. } = projections;
    let Projections { expert_gate_proj, expert_up_proj, expert_down_proj, .. } = projections;
    let gate_up = |gate: &Option<Matrix>, up: &Option<Matrix>| {
        gate.is_some().then(|| kernels.wants(gate.iter().chain(up)))
    };
    let down = |down: &Option<Matrix>| down.as_ref().map(|down| kernels.wants([down]));
    let (dense, of_experts) = (gate_up(gate_proj, up_proj), gate_up(expert_gate_proj, expert_up_proj));
    let both = norms.pre_feedforward_layernorm_2.as_ref().and(dense).zip(of_experts).map(|(a, b)| a | b);
    Inputs {
        qkv: kernels.wants([q_proj].into_iter().chain(k_proj).chain(v_proj).chain(&kept.linear_left)),
        output: kernels.wants([o_proj]),
        gate_up: both.or(dense),
        down: down(down_proj),
        expert_gate_up: both.or(of_experts),
        expert_down: down(expert_down_proj),
    }
}

/// The router of a layer with experts. Without factors of its own, its input is that of the experts.
fn device_router(mixture: &Mixture, norms: &Norms<RmsNorm>, router: RouterTensors<Buffer>) -> Option<Router> {
    let RouterTensors { proj, scale, per_expert_scale } = router;
    let shared = &norms.pre_feedforward_layernorm;
    Some(Router {
        matrix: proj?,
        norm: RmsNorm { weight: scale.unwrap_or_else(|| shared.weight.clone()), eps: shared.eps },
        factor: mixture.router_factor,
        scales: per_expert_scale,
    })
}

/// How a layer updates several residual streams.
fn device_altup(norms: &Norms<RmsNorm>, altup: AltUpTensors<Buffer>) -> Option<AltUp> {
    let AltUpTensors { modality_router, prediction_coefs, correction_coefs, correct_output_scale } = altup;
    Some(AltUp {
        router_norm: norms.router_norm.clone()?,
        router: modality_router?,
        prediction: prediction_coefs?,
        correction: correction_coefs?,
        output_scale: correct_output_scale?,
    })
}

/// The matrices that kernels must be able to multiply by.
fn matrices_of(config: &ModelSpec, schemes: &Schemes, options: &LoadOptions) -> Matrices {
    let &LoadOptions { tiles, attention, .. } = options;
    let of_per_layer = schemes.per_layer.as_ref();
    let mut matrices = Matrices {
        layers: config.layer_kind(),
        embeddings: [schemes.embedding].into_iter().chain(of_per_layer.map(|all| all.embedding)).collect(),
        head: Some(schemes.head()),
        tiles,
        attention,
        ..Matrices::default()
    };
    for layer in &schemes.layers {
        let Projections { gate_proj, up_proj, expert_gate_proj, expert_up_proj, expert_down_proj, .. } =
            layer;
        let of_experts = [expert_gate_proj, expert_up_proj, expert_down_proj];
        matrices.experts.extend(of_experts.into_iter().flatten());
        matrices.products.extend(dense_of(layer));
        matrices.gated.extend(gate_proj.iter().chain(up_proj));
    }
    matrices.products.extend(schemes.kept_products());
    matrices
}

/// The schemes of a layer's matrices apart from those of experts.
fn dense_of(layer: &Projections<Scheme>) -> impl Iterator<Item = &Scheme> {
    let Projections { q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, .. } = layer;
    let optional = [k_proj, v_proj, gate_proj, up_proj, down_proj];
    [q_proj, o_proj].into_iter().chain(optional.into_iter().flatten())
}

/// Sums of the squares of the inputs of a layer's matrices, for calibration.
fn layer_moments(arena: &mut Arena, specs: &Layer<TensorSpec>) -> Result<Inputs<Buffer>, GpuError> {
    let columns = specs.projections.input_columns();
    columns.try_map(|columns| device_buffer(arena, 4 * columns as u64, "moments"))
}

/// Writes zeros to all allocated memory that the load does not write itself. A driver may allocate memory without
/// physical pages. After the write, the pages exist before a request needs them.
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
