//! Gemma-3 on the device: load once, then run steps.
//!
//! The forward pass in [`Gemma3::record_layer`] reads like the architecture: what it computes is in
//! `docs/architecture.md`, how in `shaders/`. Weights, KV blocks, activations and staging are taken while loading;
//! after that nothing is allocated on the device. The residual stream is f32.
//!
//! Refuses what does not fit before the first token, naming the tensor or the context that would; has no other
//! place to compute.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::config::{ConfigError, Gemma3Config, GenerationConfig, LayerType};
use super::memory::{
    self, DEFAULT_BLOCK_SIZE, Demand, DoesNotFit, LOGIT_ROWS, MAX_IN_FLIGHT, MAX_SUBMIT_MACS, READBACK_ROWS,
    Schemes,
};
use super::weights::{Gemma3Weights, WeightsError};
use super::{
    Batch, BatchSequence, BlockCopy, BlockPool, Draw, Input, Limits, Logprobs, MAX_BIASES, MAX_LOGPROBS,
    Runner, RunnerError, Sampled, Sampling, Ticket,
};
use crate::checkpoint::{Checkpoint, CheckpointError, ModelFiles, Tensor};
use crate::gpu::placement::{self, Class, MemoryKind, Placement};
use crate::gpu::residency::{self, Residency};
use crate::gpu::{Arena, Buffer, CommandBuffer, Device, GpuError, Recorder, Uploader};
use crate::kernels::{
    Activations, AttentionShape, Bias, DrawArrays, Embedding, Heads, History, Kernels, KvCache, LAST_SAMPLED,
    LOGPROB_WORDS, MAX_GROUP, Matrix, NO_TOKEN, SampleRequest, StepArrays, UploadError, mask_words,
};
use crate::tensor::{KvDtype, QuantizeMode, Scheme};

/// How to load a model.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    pub quantize: QuantizeMode,
    /// Tokens, or the model's own maximum if that is less; refused where they do not fit. `None`: as many as fit.
    pub max_context: Option<usize>,
    /// Sequences that the KV cache is to have room for; fewer where it has not.
    pub sequences: usize,
    /// How it stores keys and values.
    pub kv: KvDtype,
    /// Tokens per block of its cache; at least 1.
    pub block_size: usize,
    /// What one submit may take on the device, as far as the time of those before tells.
    pub max_submit: Duration,
    /// What may be taken of the device's memory.
    pub memory: placement::Limits,
    /// Refuse a model that the kernel does not see in memory; off, that is a warning.
    pub strict: bool,
    /// Prompt tokens processed per step.
    pub max_batch_tokens: usize,
    /// Ids from here up are never sampled: rows of the embedding that the tokenizer does not know.
    pub sample_below: Option<usize>,
    /// Sum up the squares of every matrix's inputs, for [`Gemma3::take_moments`].
    pub moments: bool,
    /// One allocation of weights is at most this large (tests use it to cut small matrices into shards).
    pub max_shard_bytes: Option<u64>,
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
            memory: placement::Limits::default(),
            strict: true,
            max_batch_tokens: 256,
            sample_below: None,
            moments: false,
            max_shard_bytes: None,
        }
    }
}

/// What a load read.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    /// Bytes of the checkpoint's tensors.
    pub bytes: u64,
    /// Bytes of its files that are in memory afterwards, beside the device's own copy; others may hold them there.
    pub resident_bytes: u64,
}

/// How far a load is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Bytes of the checkpoint, of `total`.
    pub done: u64,
    pub total: u64,
}

/// A model could not be loaded. One line: what, in which file or tensor, what was expected.
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
        "the model is not where it was placed: {0}; other programs may have pushed it out, or the driver failed \
         (`dmesg` tells): free memory, or set hardware.strict = false to serve nevertheless"
    )]
    NotResident(Residency),
    #[error("{0}")]
    Option(String),
}

impl From<UploadError> for LoadError {
    fn from(error: UploadError) -> Self {
        match error {
            UploadError::Gpu(e) => e.into(),
            UploadError::Checkpoint(e) => e.into(),
        }
    }
}

/// The weights of one layer on the device.
struct Layer {
    kind: LayerType,
    input_layernorm: Buffer,
    post_attention_layernorm: Buffer,
    pre_feedforward_layernorm: Buffer,
    post_feedforward_layernorm: Buffer,
    q_norm: Buffer,
    k_norm: Buffer,
    q_proj: Matrix,
    k_proj: Matrix,
    v_proj: Matrix,
    o_proj: Matrix,
    gate_proj: Matrix,
    up_proj: Matrix,
    down_proj: Matrix,
    cache: KvCache,
    /// Sums of squares of what meets q, k and v; o; gate and up; down: f32 for each column.
    moments: Option<[Buffer; 4]>,
}

/// Activations of a step, `[max_batch_tokens, ..]` f32 each.
struct Scratch {
    /// The residual stream, `[hidden_size]`.
    hidden: Activations,
    /// A normed copy of it, and what a sublayer adds to it, `[hidden_size]`.
    normed: Activations,
    delta: Activations,
    /// `[num_attention_heads * head_dim]`
    q: Activations,
    attended: Activations,
    /// `[num_key_value_heads * head_dim]`
    k: Activations,
    v: Activations,
    /// `[intermediate_size]`
    gate: Activations,
    up: Activations,
    /// The normed rows that logits are wanted of, `[LOGIT_ROWS, hidden_size]`, the logits, and what draws change of them,
    /// of which all is 0 between steps.
    final_rows: Activations,
    logits: Activations,
    adjusted: Activations,
}

/// The tokens of a step whose logits are computed, and how ids are drawn from them: a request for each, or none where
/// the logits are copied to the host.
#[derive(Default)]
struct Wanted {
    rows: Vec<u32>,
    requests: Vec<SampleRequest>,
    bias: Vec<Bias>,
    masks: Vec<u32>,
}

/// What one step in flight needs for itself.
struct Frame {
    /// The step's arrays as the layers of each pool see them, host-visible, as are all others.
    full: StepArrays,
    sliding: StepArrays,
    logit_rows: Buffer,
    draws: DrawArrays,
    /// u32 of each sequence of the step, and ids that the history gets from the host.
    slots: Buffer,
    history: Buffer,
    /// One per submit of the step.
    commands: Vec<CommandBuffer>,
    /// Submits of the step in flight, by their work in multiply-adds.
    submits: Vec<u64>,
    /// What was asked of the step in flight, for each id: [`SampleRequest::logprobs`].
    logprobs: Vec<u32>,
}

/// A loaded model.
pub struct Gemma3 {
    device: Arc<Device>,
    config: Gemma3Config,
    generation: GenerationConfig,
    limits: Limits,
    kv: KvDtype,
    sample_below: usize,
    kernels: Kernels,
    embedding: Embedding,
    norm: Buffer,
    layers: Vec<Layer>,
    /// (cos, sin) per position and dimension pair: sliding layers, full layers.
    rope_sliding: Buffer,
    rope_full: Buffer,
    scratch: Scratch,
    frames: Vec<Frame>,
    /// u32 per slot: the id last sampled there.
    sampled: Buffer,
    history: History,
    /// Host-visible copy of the logits, for `eval`.
    logits_readback: Buffer,
    in_flight: VecDeque<u64>,
    next_ticket: u64,
    /// Work per submit, as the submits before allow, and the time that it is held to.
    submit_macs: u64,
    max_submit: Duration,
    placements: Vec<Placement>,
    loaded: Loaded,
    residency: Residency,
    weight_bytes: u64,
}

impl Gemma3 {
    /// Loads a checkpoint into device memory. `progress` is called every few megabytes.
    pub fn load(
        device: &Arc<Device>,
        files: &ModelFiles,
        options: &LoadOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Gemma3, LoadError> {
        if options.max_batch_tokens == 0 || options.max_context == Some(0) {
            return Err(LoadError::Option(
                "the context and the prefill chunk must be at least 1 token".into(),
            ));
        }
        let (config, generation) = Gemma3Config::load(files)?;
        let checkpoint = Checkpoint::open(files)?;
        let weights = Gemma3Weights::collect(&checkpoint, &config)?;
        weights.warn_of_defects(&checkpoint);
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
        let held_before = device.held();
        let demand = Demand {
            config: &config,
            schemes: Schemes::of(&weights, options.quantize)?,
            kv: options.kv,
            block_size: options.block_size,
            max_batch_tokens: options.max_batch_tokens,
            max_shard_bytes: options
                .max_shard_bytes
                .unwrap_or(u64::MAX)
                .min(device.info().max_allocation_bytes / 2),
            moments: options.moments,
        };
        // Everything is placed before anything is taken, and taken before anything is read.
        let others = memory::quantize_modes(&weights)?;
        let machine = device.machine();
        let fit = demand
            .fit_to_serve(&machine, &options.memory, options.max_context, options.sequences, &others)
            .map_err(Box::new)?;
        let context = fit.context;
        let limits = demand.limits(context, fit.pools);
        let tokens = demand.batch_tokens();
        let mut arena = Arena::with_plan(device, fit.plan)?;
        touch(device, &arena)?;
        let mut loader = Loader {
            checkpoint: &checkpoint,
            uploader: Uploader::new(device)?,
            queued: Vec::new(),
            max_shard_bytes: demand.max_shard_bytes,
            done: 0,
            total: weights.iter().map(|t| t.stored_bytes()).sum(),
            progress,
        };

        let Schemes { embedding: embed_scheme, layers: layer_schemes } = &demand.schemes;
        let mut schemes = layer_schemes.concat();
        schemes.dedup();
        let heads = Heads { group, head_dim: config.head_dim, kv: options.kv };
        let kernels = Kernels::new(device, &schemes, *embed_scheme, heads)?;

        let embedding = loader.matrix(&mut arena, &weights.embed_tokens, *embed_scheme, Class::Embedding)?;
        let embedding = Embedding::new(&mut arena, &mut loader.uploader, embedding)?;
        let norm = loader.norm(&mut arena, &weights.norm)?;
        let mut layers = Vec::new();
        for ((w, &kind), schemes) in weights.layers.iter().zip(&config.layer_types).zip(layer_schemes) {
            let [q, k, v, o, gate, up, down] = *schemes;
            let mut attention = |t, scheme| loader.matrix(&mut arena, t, scheme, Class::Attention);
            let [q_proj, k_proj] = [attention(&w.q_proj, q)?, attention(&w.k_proj, k)?];
            let [v_proj, o_proj] = [attention(&w.v_proj, v)?, attention(&w.o_proj, o)?];
            let mut ffn = |t, scheme| loader.matrix(&mut arena, t, scheme, Class::Ffn);
            let [gate_proj, up_proj, down_proj] =
                [ffn(&w.gate_proj, gate)?, ffn(&w.up_proj, up)?, ffn(&w.down_proj, down)?];
            let mut norm = |t: &Tensor| loader.norm(&mut arena, t);
            layers.push((
                kind,
                [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj],
                [
                    norm(&w.input_layernorm)?,
                    norm(&w.post_attention_layernorm)?,
                    norm(&w.pre_feedforward_layernorm)?,
                    norm(&w.post_feedforward_layernorm)?,
                    norm(&w.q_norm)?,
                    norm(&w.k_norm)?,
                ],
            ));
        }
        loader.read_queued()?;
        let scratch = Scratch::new(&mut arena, &config, tokens)?;
        let sampled = device_buffer(&mut arena, memory::SAMPLED_BYTES, "sampled ids")?;
        let history = device_buffer(&mut arena, memory::history_bytes(&limits), "history")?;
        let history = History { ids: history, slot_len: limits.max_context };
        let logits_readback = arena.alloc(
            MemoryKind::Readback,
            Class::Staging,
            memory::logits_bytes(&config),
            "logits readback",
        )?;
        let [rope_sliding, rope_full] = [
            (config.rope_local_base_freq, 1.0, "rope table (sliding layers)"),
            (config.rope_theta, config.rope_scaling_factor, "rope table (full layers)"),
        ]
        .map(|(base, factor, name)| {
            let table = rope_table(config.head_dim, context, base, factor);
            let buffer = device_buffer(&mut arena, memory::rope_table_bytes(&config, context), name)?;
            loader.uploader.upload(&buffer, &table)?;
            Ok::<_, LoadError>(buffer)
        });
        let mut moments = Vec::new();
        for i in 0..if options.moments { layers.len() } else { 0 } {
            let [a, b, c, d] = memory::moment_widths(&config)
                .map(|width| device_buffer(&mut arena, 4 * width as u64, &format!("layer {i} moments")));
            moments.push([a?, b?, c?, d?]);
        }
        let mut moments = moments.into_iter();
        let layers = layers
            .into_iter()
            .enumerate()
            .map(|(i, (kind, matrices, norms))| {
                let bytes = memory::kv_pool_bytes(&config, options.kv, &limits.kv, kind);
                let mut half = |what: &str| {
                    arena.alloc(MemoryKind::Device, Class::KvCache, bytes, &format!("layer {i} {what} cache"))
                };
                let cache = KvCache { keys: half("key")?, values: half("value")? };
                let [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] = matrices;
                let [n1, n2, n3, n4, q_norm, k_norm] = norms;
                Ok(Layer {
                    kind,
                    input_layernorm: n1,
                    post_attention_layernorm: n2,
                    pre_feedforward_layernorm: n3,
                    post_feedforward_layernorm: n4,
                    q_norm,
                    k_norm,
                    q_proj,
                    k_proj,
                    v_proj,
                    o_proj,
                    gate_proj,
                    up_proj,
                    down_proj,
                    cache,
                    moments: moments.next(),
                })
            })
            .collect::<Result<Vec<_>, LoadError>>()?;

        // At most a submit for each layer, and one for the logits.
        let frames = (0..MAX_IN_FLIGHT)
            .map(|i| Frame::new(device, &mut arena, &limits, layers.len() + 1, i))
            .collect::<Result<Vec<_>, LoadError>>()?;
        assert!(arena.is_exhausted(), "something was planned that nobody asked for");
        let placements = arena.placements().to_vec();
        let weight_bytes = placements.iter().filter(|p| p.class.is_weights()).map(|p| p.bytes).sum();
        let sample_below = options.sample_below.unwrap_or(usize::MAX).min(config.vocab_size);
        checkpoint.release_all();
        let loaded = Loaded { bytes: loader.total, resident_bytes: checkpoint.resident_bytes() };
        loader.uploader.finish()?;
        let residency = residency::compare(arena.allocated(), held_before, device.held());
        if let Residency::Denied { .. } = residency {
            if options.strict {
                return Err(LoadError::NotResident(residency));
            }
            tracing::warn!("the model is not where it was placed: {residency}");
        }
        let mut model = Gemma3 {
            device: device.clone(),
            config,
            generation,
            limits,
            kv: options.kv,
            sample_below,
            kernels,
            embedding,
            norm,
            layers,
            rope_sliding: rope_sliding?,
            rope_full: rope_full?,
            scratch,
            frames,
            sampled,
            history,
            logits_readback,
            in_flight: VecDeque::new(),
            next_ticket: 0,
            submit_macs: MAX_SUBMIT_MACS,
            max_submit: options.max_submit,
            placements,
            loaded,
            residency,
            weight_bytes,
        };
        // An id sampled in no step must still be a row of the embedding.
        let commands = &mut model.frames[0].commands[0];
        let mut recorder = commands.begin()?;
        recorder.fill(&model.sampled, 0);
        recorder.submit("clearing sampled ids")?;
        commands.wait()?;
        device.save_pipeline_cache();
        Ok(model)
    }

    pub fn config(&self) -> &Gemma3Config {
        &self.config
    }

    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn loaded(&self) -> Loaded {
        self.loaded
    }

    /// Where every byte lies, by class and heap.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Whether the kernel sees them there.
    pub fn residency(&self) -> Residency {
        self.residency
    }

    /// Bytes of one KV block in all sliding layers together.
    pub fn sliding_block_bytes(&self) -> u64 {
        let sliding = self.layers.iter().filter(|layer| layer.kind == LayerType::SlidingAttention).count();
        2 * sliding as u64 * memory::kv_block_bytes(&self.config, self.kv, self.limits.kv.block_size)
    }

    /// Bytes of weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Runs `tokens` through the layers, for what is summed up on the way; `each` hears how many are done. Panics if the
    /// tokens do not fit the context.
    pub fn observe(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize)) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "observing beside a step in flight");
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let chunk = self.limits.max_batch_tokens;
        for (i, ids) in tokens.chunks(chunk).enumerate() {
            self.run(0, &self.alone(i * chunk, ids), &Wanted::default())?;
            self.frames[0].wait()?;
            each(i * chunk + ids.len());
        }
        Ok(())
    }

    /// For each layer the sums of squares of what met q, k and v; o; gate and up; down, by column, over everything that
    /// was run. Panics unless the model was loaded with `moments`.
    pub fn take_moments(&mut self) -> Result<Vec<[Vec<f32>; 4]>, RunnerError> {
        assert!(self.in_flight.is_empty(), "reading beside a step in flight");
        let commands = &mut self.frames[0].commands[0];
        let readback = &self.logits_readback;
        let mut read = |sums: &Buffer| {
            let mut recorder = commands.begin()?;
            recorder.copy(sums, readback, sums.size());
            recorder.submit("reading moments")?;
            commands.wait()?;
            let mut values = vec![0f32; sums.size() as usize / 4];
            readback.read(0, &mut values);
            Ok::<_, GpuError>(values)
        };
        let mut all = Vec::new();
        for layer in &self.layers {
            let [a, b, c, d] = layer.moments.as_ref().expect("a model loaded with moments").each_ref();
            all.push([read(a)?, read(b)?, read(c)?, read(d)?]);
        }
        Ok(all)
    }

    /// A batch of one sequence that has all blocks to itself.
    fn alone(&self, start: usize, ids: &[u32]) -> Batch {
        let kv = &self.limits.kv;
        let blocks = (start + ids.len()).div_ceil(kv.block_size) as u32;
        let first = kv.sliding_window.map_or(0, |window| (start + 1).saturating_sub(window) / kv.block_size);
        // A ring of blocks: one that is written again has left the window.
        let ring = kv.sliding_blocks.max(1) as u32;
        Batch {
            sequences: vec![BatchSequence {
                slot: 0,
                start,
                input: Input::Ids(ids.to_vec()),
                full_blocks: (0..blocks).collect(),
                sliding_blocks: (first as u32..blocks).map(|block| block % ring).collect(),
                sliding_first: first,
                history: None,
            }],
            ..Batch::default()
        }
    }

    /// Logits at every position of `tokens`, computed afresh, with nothing else in flight: `each(first, rows)` gets
    /// rows of `vocab_size` f32 for positions `first..`, in order. Panics if the tokens do not fit the context.
    pub fn logits(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "logits beside a step in flight");
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let chunk = self.limits.max_batch_tokens.min(READBACK_ROWS);
        let (vocab, stride) = (self.config.vocab_size, self.scratch.logits.stride);
        let mut padded = vec![0f32; chunk * stride];
        let mut rows = vec![0f32; chunk * vocab];
        for (i, ids) in tokens.chunks(chunk).enumerate() {
            let start = i * chunk;
            let batch = self.alone(start, ids);
            let all = Wanted { rows: (0..ids.len() as u32).collect(), ..Wanted::default() };
            self.run(0, &batch, &all)?;
            self.frames[0].wait()?;
            let n = ids.len();
            self.logits_readback.read(0, &mut padded[..n * stride]);
            for (to, from) in rows.chunks_exact_mut(vocab).zip(padded.chunks_exact(stride)).take(n) {
                to.copy_from_slice(&from[..vocab]);
            }
            each(start, &rows[..n * vocab]);
        }
        Ok(())
    }

    /// Records and submits one step on frame `index`.
    fn run(&mut self, index: usize, batch: &Batch, wanted: &Wanted) -> Result<(), GpuError> {
        self.frames[index].fill(&self.limits, batch, wanted);
        let segments = self.segments(batch, wanted.rows.len());
        let mut frame = std::mem::take(&mut self.frames[index].commands);
        let result = self.record(index, &mut frame, &segments, batch, wanted);
        self.frames[index].commands = frame;
        result?;
        self.frames[index].submits = segments.iter().map(|s| s.work).collect();
        self.frames[index].logprobs = wanted.requests.iter().map(|request| request.logprobs).collect();
        Ok(())
    }

    /// Cuts a step into submits. Pieces `0..layers` are layers, piece `layers` is the logits behind them, where any are
    /// wanted; the embedding goes with the first.
    fn segments(&self, batch: &Batch, logit_rows: usize) -> Vec<Segment> {
        let c = &self.config;
        let tokens = batch.num_tokens() as u64;
        let heads = (c.num_attention_heads * c.head_dim) as u64;
        // Keys that the tokens of the step see, added up.
        let seen = |window: u64| -> u64 {
            let each =
                |s: &BatchSequence| s.input.len() as u64 * window.min((s.start + s.input.len()) as u64);
            batch.sequences.iter().map(each).sum()
        };
        let layer = |kind: &LayerType| {
            let window = match kind {
                LayerType::SlidingAttention => c.sliding_window as u64,
                LayerType::FullAttention => u64::MAX,
            };
            tokens * memory::macs_per_token_and_layer(c) + 2 * heads * seen(window)
        };
        let logits = (logit_rows * c.hidden_size * c.vocab_size) as u64;
        let work = c.layer_types.iter().map(layer).chain((logit_rows > 0).then_some(logits));
        cut(work, self.submit_macs)
    }

    fn record(
        &self,
        index: usize,
        commands: &mut [CommandBuffer],
        segments: &[Segment],
        batch: &Batch,
        wanted: &Wanted,
    ) -> Result<(), GpuError> {
        let frame = &self.frames[index];
        let (row_index, logit_rows) = (&frame.logit_rows, wanted.rows.len());
        let (k, s, tokens) = (&self.kernels, &self.scratch, batch.num_tokens());
        for (Segment { pieces: segment, .. }, commands) in segments.iter().zip(commands) {
            let mut r = commands.begin()?;
            if segment.start == 0 {
                for copy in &batch.copies {
                    self.record_copy(&mut r, copy);
                }
                let scale = (self.config.hidden_size as f64).sqrt() as f32;
                k.embed(&mut r, &self.embedding, &frame.full.ids, &self.sampled, scale, &s.hidden, tokens);
                self.record_history(&mut r, frame, batch);
            }
            for layer in &self.layers[segment.start..segment.end.min(self.layers.len())] {
                self.record_layer(&mut r, layer, frame, tokens);
            }
            if segment.end > self.layers.len() {
                let eps = self.config.rms_norm_eps;
                k.rms_norm_gather(&mut r, &s.hidden, row_index, &self.norm, eps, &s.final_rows, logit_rows);
                k.matmul(&mut r, self.embedding.matrix(), &s.final_rows, &s.logits, logit_rows);
                if !wanted.requests.is_empty() {
                    self.record_draws(&mut r, frame, &wanted.requests);
                } else {
                    let bytes = Activations::bytes(logit_rows, self.config.vocab_size);
                    r.copy(&s.logits.buffer, &self.logits_readback, bytes);
                }
            }
            r.submit("a step")?;
        }
        Ok(())
    }

    /// Gives a block the contents of another, in every layer of its pool.
    fn record_copy(&self, r: &mut Recorder<'_>, copy: &BlockCopy) {
        let kind = match copy.pool {
            BlockPool::Full => LayerType::FullAttention,
            BlockPool::Sliding => LayerType::SlidingAttention,
        };
        let bytes = memory::kv_block_bytes(&self.config, self.kv, self.limits.kv.block_size);
        for layer in self.layers.iter().filter(|layer| layer.kind == kind) {
            for half in [&layer.cache.keys, &layer.cache.values] {
                let block = |id: u32| half.slice(u64::from(id) * bytes, bytes);
                r.copy(&block(copy.from), &block(copy.to), bytes);
            }
        }
    }

    /// Writes the ids of the step's tokens where draws find them, and those before them that the host or another slot has.
    fn record_history(&self, r: &mut Recorder<'_>, frame: &Frame, batch: &Batch) {
        let ids = |slot: u32, tokens: usize| {
            let bytes = 4 * tokens as u64;
            self.history.ids.slice(4 * u64::from(slot) * self.history.slot_len as u64, bytes)
        };
        let mut offset = 0;
        for (sequence, known) in batch.sequences.iter().filter_map(|s| Some((s, s.history.as_ref()?))) {
            let bytes = 4 * known.len() as u64;
            r.copy(&frame.history.slice(offset, bytes), &ids(sequence.slot, known.len()), bytes);
            offset += bytes;
        }
        let tokens = batch.num_tokens();
        self.kernels.history(r, &frame.full, &frame.slots, &self.sampled, &self.history, tokens);
        for copy in &batch.history_copies {
            let (from, to) = (ids(copy.from, copy.tokens), ids(copy.to, copy.tokens));
            r.copy(&from, &to, 4 * copy.tokens as u64);
        }
    }

    /// Draws an id from each row of logits.
    fn record_draws(&self, r: &mut Recorder<'_>, frame: &Frame, requests: &[SampleRequest]) {
        let (k, draws, below, n) = (&self.kernels, &frame.draws, self.sample_below, requests.len());
        let Scratch { logits, adjusted, .. } = &self.scratch;
        k.adjust(r, logits, adjusted, draws, &self.history, requests);
        k.sample(r, logits, adjusted, below, draws, &self.sampled, n);
        k.clear_adjusted(r, logits, adjusted, draws, &self.history, requests);
        if requests.iter().any(|request| request.logprobs > 0) {
            k.logprobs(r, logits, below, draws, n);
        }
    }

    /// One decoder layer: attention and feed-forward, each between two norms, added to the residual stream.
    fn record_layer(&self, r: &mut Recorder<'_>, layer: &Layer, frame: &Frame, n: usize) {
        let (k, s, eps) = (&self.kernels, &self.scratch, self.config.rms_norm_eps);
        let (shape, rope, arrays) = match layer.kind {
            LayerType::SlidingAttention => {
                let shape = self.attention_shape(Some(self.config.sliding_window));
                (shape, &self.rope_sliding, &frame.sliding)
            }
            LayerType::FullAttention => (self.attention_shape(None), &self.rope_full, &frame.full),
        };
        let q_scale = self.config.query_pre_attn_scalar.powf(-0.5) as f32;
        let watch = |r: &mut Recorder<'_>, which: usize, x: &Activations| {
            if let Some(moments) = &layer.moments {
                k.moments(r, x, &moments[which], n);
            }
        };

        k.rms_norm(r, &s.hidden, &layer.input_layernorm, eps, &s.normed, n);
        watch(r, 0, &s.normed);
        k.matmul(r, &layer.q_proj, &s.normed, &s.q, n);
        k.matmul(r, &layer.k_proj, &s.normed, &s.k, n);
        k.matmul(r, &layer.v_proj, &s.normed, &s.v, n);
        let norms = [&layer.q_norm, &layer.k_norm];
        k.qkv_store(r, &shape, [&s.q, &s.k, &s.v], norms, rope, eps, q_scale, arrays, &layer.cache, n);
        k.attention(r, &shape, &s.q, &layer.cache, arrays, &s.attended, n);
        watch(r, 1, &s.attended);
        k.matmul(r, &layer.o_proj, &s.attended, &s.delta, n);
        k.rms_norm_add(r, &s.delta, &layer.post_attention_layernorm, eps, &s.hidden, n);

        k.rms_norm(r, &s.hidden, &layer.pre_feedforward_layernorm, eps, &s.normed, n);
        watch(r, 2, &s.normed);
        k.matmul(r, &layer.gate_proj, &s.normed, &s.gate, n);
        k.matmul(r, &layer.up_proj, &s.normed, &s.up, n);
        k.geglu(r, &s.gate, &s.up, n);
        watch(r, 3, &s.gate);
        k.matmul(r, &layer.down_proj, &s.gate, &s.delta, n);
        k.rms_norm_add(r, &s.delta, &layer.post_feedforward_layernorm, eps, &s.hidden, n);
    }

    fn attention_shape(&self, window: Option<usize>) -> AttentionShape {
        AttentionShape {
            num_heads: self.config.num_attention_heads,
            num_kv_heads: self.config.num_key_value_heads,
            head_dim: self.config.head_dim,
            block_size: self.limits.kv.block_size,
            max_blocks: memory::table_blocks(&self.limits),
            window,
        }
    }
}

impl Runner for Gemma3 {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        assert!(self.in_flight.len() < MAX_IN_FLIGHT, "more than {MAX_IN_FLIGHT} steps in flight");
        let mut ends = Vec::new();
        let mut end = 0;
        for sequence in &batch.sequences {
            end += sequence.input.len();
            ends.push(end as u32);
        }
        let mut wanted = Wanted::default();
        for draw in &sampling.draws {
            let sequence = &batch.sequences[draw.sequence];
            let tokens = sequence.input.len();
            assert!(draw.token < tokens, "a draw behind a token that is not there");
            wanted.rows.push(ends[draw.sequence] - (tokens - draw.token) as u32);
            wanted.draw(&self.limits, draw, sequence);
        }
        let ticket = self.next_ticket;
        self.run(ticket as usize % MAX_IN_FLIGHT, batch, &wanted)?;
        self.next_ticket += 1;
        self.in_flight.push_back(ticket);
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
        assert_eq!(self.in_flight.pop_front(), Some(ticket.0), "tickets are waited for in order");
        let frame = &mut self.frames[ticket.0 as usize % MAX_IN_FLIGHT];
        frame.wait()?;
        for (work, commands) in frame.submits.iter().zip(&frame.commands) {
            self.submit_macs = bounded(self.submit_macs, *work, commands.took(), self.max_submit);
        }
        let mut ids = vec![0u32; frame.logprobs.len()];
        frame.draws.ids.read(0, &mut ids);
        let logprobs = (0..).zip(&frame.logprobs).zip(&ids);
        let logprobs = logprobs.map(|((row, wanted), id)| frame.read_logprobs(row, *wanted, *id)).collect();
        Ok(Sampled { ids: ids.into_iter().map(|id| (id != NO_TOKEN).then_some(id)).collect(), logprobs })
    }
}

impl Wanted {
    /// Adds the request for one id, with its biases and its mask; panics where a draw breaks its bounds.
    fn draw(&mut self, limits: &Limits, draw: &Draw, sequence: &BatchSequence) {
        let (p, position) = (draw.params, (sequence.start + draw.token + 1) as u32);
        assert!(draw.bias.len() <= MAX_BIASES, "{} biases", draw.bias.len());
        assert!(draw.bias.iter().all(|(id, _)| (*id as usize) < limits.vocab_size), "bias of an id");
        assert!(draw.logprobs.is_none_or(|n| n <= MAX_LOGPROBS), "{:?} log probabilities", draw.logprobs);
        let words = mask_words(limits.vocab_size);
        let mask = draw.mask.as_ref().map_or(0, |mask| {
            assert_eq!(mask.len(), words, "words of a mask");
            self.masks.extend_from_slice(mask);
            self.masks.len() / words
        });
        self.requests.push(SampleRequest {
            temperature: p.temperature,
            top_k: p.top_k,
            top_p: p.top_p,
            min_p: p.min_p,
            seed_low: p.seed as u32,
            seed_high: (p.seed >> 32) as u32,
            position,
            slot: draw.slot,
            repetition_penalty: p.repetition_penalty,
            presence_penalty: p.presence_penalty,
            frequency_penalty: p.frequency_penalty,
            // Also that of a fork, until it has its own.
            history_slot: sequence.slot,
            history_len: if p.penalizes() { position } else { 0 },
            prompt_len: draw.prompt_len as u32,
            first_bias: self.bias.len() as u32,
            biases: draw.bias.len() as u32,
            mask: mask as u32,
            logprobs: draw.logprobs.map_or(0, |n| n as u32 + 1),
        });
        self.bias.extend(draw.bias.iter().map(|&(id, bias)| Bias { id, bias }));
    }
}

impl From<GpuError> for RunnerError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::DeviceLost { during } => RunnerError::DeviceLost(format!("during {during}")),
            GpuError::Timeout { seconds, .. } => RunnerError::Timeout { seconds },
            other => RunnerError::Device(other.to_string()),
        }
    }
}

/// Bytes of tensors that are read together, so that the disk always has enough to do, and progress shows.
const READ_TOGETHER_BYTES: u64 = 256 << 20;

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    uploader: Uploader<'a, UploadError>,
    /// Tensors that may be yet to be read.
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
        let each = &mut |rows| progress(Progress { done: before + rows as u64 * row_bytes, total: *total });
        let matrix = Matrix::upload(arena, uploader, tensor, scheme, class, *max_shard_bytes, each)?;
        self.queued.push(*tensor);
        if self.queued_bytes() >= READ_TOGETHER_BYTES {
            self.read_queued()?;
        }
        Ok(matrix)
    }

    fn queued_bytes(&self) -> u64 {
        self.queued.iter().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Reads what is yet to be read.
    fn read_queued(&mut self) -> Result<(), LoadError> {
        self.uploader.read_queued()?;
        for tensor in self.queued.drain(..) {
            self.done += tensor.stored_bytes();
            // Nothing may keep the model a second time: what is on the device leaves the page cache.
            self.checkpoint.release(&tensor);
        }
        (self.progress)(Progress { done: self.done, total: self.total });
        Ok(())
    }

    /// A norm's factors, `1 + w`.
    fn norm(&mut self, arena: &mut Arena, tensor: &Tensor) -> Result<Buffer, LoadError> {
        let mut values = self.checkpoint.read_f32(tensor)?;
        if !self.checkpoint.norms_hold_one() {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        let bytes = (4 * values.len()) as u64;
        let buffer = arena.alloc(MemoryKind::Device, Class::Norms, bytes, tensor.name)?;
        self.uploader.upload(&buffer, &values)?;
        self.done += tensor.stored_bytes();
        let done = self.done + self.queued_bytes();
        (self.progress)(Progress { done, total: self.total });
        Ok(buffer)
    }
}

/// What one submit computes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    pieces: Range<usize>,
    /// Multiply-adds.
    work: u64,
}

/// Cuts pieces of `work` into segments of at most `limit`, or of one piece where that alone is more.
fn cut(work: impl Iterator<Item = u64>, limit: u64) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for (i, work) in work.enumerate() {
        match segments.last_mut() {
            Some(last) if last.work + work <= limit => {
                last.pieces.end = i + 1;
                last.work += work;
            }
            _ => segments.push(Segment { pieces: i..i + 1, work }),
        }
    }
    segments
}

/// Submits shorter than this say little about the device's speed.
const TELLING: Duration = Duration::from_millis(1);
/// Work per submit is not cut below this, however slow the device.
const LEAST_SUBMIT_MACS: u64 = 100_000_000;

/// The bound of work per submit after one of `work` that `took` so long: down at once, up by and by.
fn bounded(limit: u64, work: u64, took: Option<Duration>, most: Duration) -> u64 {
    let Some(took) = took.filter(|took| *took >= TELLING) else { return limit };
    let allowed = (work as f64 * (most.as_secs_f64() / took.as_secs_f64())) as u64;
    let next = if allowed < limit { allowed } else { limit + (allowed - limit) / 8 };
    next.clamp(LEAST_SUBMIT_MACS, u64::MAX / 16)
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

fn device_buffer(arena: &mut Arena, bytes: u64, name: &str) -> Result<Buffer, GpuError> {
    arena.alloc(MemoryKind::Device, Class::Activations, bytes, name)
}

/// Writes zeros over all that a plan took and the load does not write itself, so that its pages are there before a
/// request needs them: a driver may hand out memory that nothing stands behind yet.
fn touch(device: &Arc<Device>, arena: &Arena) -> Result<(), GpuError> {
    let mut commands = CommandBuffer::new(device, "touch")?;
    for (_, chunk) in arena.chunks().iter().filter(|(class, _)| !class.is_weights()) {
        let mut recorder = commands.begin()?;
        recorder.fill(chunk, 0);
        recorder.submit("touching memory")?;
        commands.wait()?;
    }
    Ok(())
}

impl Scratch {
    fn new(arena: &mut Arena, config: &Gemma3Config, tokens: usize) -> Result<Scratch, GpuError> {
        let mut each = memory::activations(config, tokens).into_iter();
        let mut next = || {
            let (name, rows, width) = each.next().expect("one for each field");
            let buffer = device_buffer(arena, Activations::bytes(rows, width), name)?;
            Ok::<_, GpuError>(Activations::new(buffer, width))
        };
        Ok(Scratch {
            hidden: next()?,
            normed: next()?,
            delta: next()?,
            q: next()?,
            attended: next()?,
            k: next()?,
            v: next()?,
            gate: next()?,
            up: next()?,
            final_rows: next()?,
            logits: next()?,
            adjusted: next()?,
        })
    }
}

impl Frame {
    fn new(
        device: &Arc<Device>,
        arena: &mut Arena,
        limits: &Limits,
        submits: usize,
        index: usize,
    ) -> Result<Frame, LoadError> {
        let sizes = memory::step_input_bytes(limits);
        let name = format!("step {index} input");
        let input = arena.alloc(MemoryKind::Upload, Class::Staging, sizes.iter().sum(), &name)?;
        let mut offset = 0;
        let arrays = sizes.map(|bytes| {
            offset += bytes;
            input.slice(offset - bytes, bytes)
        });
        let [ids, positions, sequence_of, full_slots, full_tables, sliding_slots, tables, ..] =
            arrays.clone();
        let [.., logit_rows, requests, slots, history, bias, masks] = arrays;
        let [ids_bytes, logprobs_bytes] = memory::drawn_bytes();
        let bytes = ids_bytes + logprobs_bytes;
        let drawn = arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "drawn ids")?;
        let draws = DrawArrays {
            requests,
            bias,
            masks,
            ids: drawn.slice(0, ids_bytes),
            logprobs: drawn.slice(ids_bytes, logprobs_bytes),
        };
        let commands = (0..submits)
            .map(|i| CommandBuffer::new(device, &format!("step {index} submit {i}")))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Frame {
            sliding: StepArrays {
                ids: ids.clone(),
                positions: positions.clone(),
                sequence_of: sequence_of.clone(),
                slot_mapping: sliding_slots,
                block_tables: tables,
            },
            full: StepArrays {
                ids,
                positions,
                sequence_of,
                slot_mapping: full_slots,
                block_tables: full_tables,
            },
            logit_rows,
            draws,
            slots,
            history,
            commands,
            submits: Vec::new(),
            logprobs: Vec::new(),
        })
    }

    /// Writes a step's arrays; panics on a batch that breaks the limits, which would be a bug above.
    fn fill(&mut self, limits: &Limits, batch: &Batch, wanted: &Wanted) {
        let Wanted { rows: logit_rows, requests, bias, masks } = wanted;
        let tokens = batch.num_tokens();
        assert!(tokens > 0 && tokens <= limits.max_batch_tokens, "{tokens} tokens in a step");
        assert!(batch.sequences.len() <= limits.max_sequences, "{} sequences", batch.sequences.len());
        assert!(logit_rows.len() <= LOGIT_ROWS && requests.len() <= logit_rows.len());
        let mut ids = Vec::with_capacity(tokens);
        let mut positions = Vec::with_capacity(tokens);
        let mut sequence_of = Vec::with_capacity(tokens);
        let (mut full_slots, mut sliding_slots) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        let (kv, table_blocks) = (&limits.kv, memory::table_blocks(limits));
        let block_size = kv.block_size;
        // Tokens of no sequence have a slot of nobody.
        let mut slots = vec![limits.max_sequences as u32; limits.max_sequences + 1];
        let mut history = Vec::new();
        for (row, sequence) in batch.sequences.iter().enumerate() {
            let end = sequence.start + sequence.input.len();
            assert!(!sequence.input.is_empty() && end <= limits.max_context, "sequence of {end} tokens");
            assert!((sequence.slot as usize) < limits.max_sequences, "slot {}", sequence.slot);
            let BatchSequence { full_blocks, sliding_blocks, sliding_first, .. } = sequence;
            assert!(
                full_blocks.len() * block_size >= end && full_blocks.len() <= table_blocks,
                "block table"
            );
            assert!(full_blocks.iter().all(|&b| (b as usize) < kv.full_blocks), "block id");
            assert!(sliding_blocks.iter().all(|&b| (b as usize) < kv.sliding_blocks), "block id");
            if let Some(window) = kv.sliding_window {
                let behind = sliding_first + sliding_blocks.len();
                assert!(
                    behind * block_size >= end && behind <= table_blocks,
                    "block table of sliding layers"
                );
                assert!(sliding_first * block_size <= (sequence.start + 1).saturating_sub(window), "window");
            }
            slots[row] = sequence.slot;
            if let Some(known) = &sequence.history {
                assert_eq!(known.len(), sequence.start, "history");
                history.extend_from_slice(known);
            }
            match &sequence.input {
                Input::Ids(known) => {
                    assert!(known.iter().all(|&id| (id as usize) < limits.vocab_size), "token id");
                    ids.extend(known);
                }
                Input::LastSampled => ids.push(LAST_SAMPLED | sequence.slot),
            }
            for position in sequence.start..end {
                positions.push(position as u32);
                sequence_of.push(row as u32);
                let slot = |block: u32| block * block_size as u32 + (position % block_size) as u32;
                full_slots.push(slot(full_blocks[position / block_size]));
                if kv.sliding_window.is_some() {
                    sliding_slots.push(slot(sliding_blocks[position / block_size - sliding_first]));
                }
            }
            let at = |block: usize| 4 * (row * table_blocks + block) as u64;
            self.full.block_tables.write(at(0), full_blocks);
            self.sliding.block_tables.write(at(*sliding_first), sliding_blocks);
        }
        self.full.ids.write(0, &ids);
        self.full.positions.write(0, &positions);
        self.full.sequence_of.write(0, &sequence_of);
        self.full.slot_mapping.write(0, &full_slots);
        self.sliding.slot_mapping.write(0, &sliding_slots);
        self.logit_rows.write(0, logit_rows);
        assert!(history.len() <= limits.max_context, "{} ids of history in a step", history.len());
        self.slots.write(0, &slots);
        self.history.write(0, &history);
        self.draws.requests.write(0, requests);
        self.draws.bias.write(0, bias);
        self.draws.masks.write(0, masks);
    }

    /// The log probabilities of a row, where they were wanted and an id was drawn.
    fn read_logprobs(&self, row: usize, wanted: u32, id: u32) -> Option<Logprobs> {
        if wanted == 0 || id == NO_TOKEN {
            return None;
        }
        let mut words = vec![0u32; 2 * wanted as usize - 1];
        self.draws.logprobs.read((4 * row * LOGPROB_WORDS) as u64, &mut words);
        let top = words[1..].chunks_exact(2).map(|pair| (pair[0], f32::from_bits(pair[1])));
        Some(Logprobs {
            drawn: f32::from_bits(words[0]),
            top: top.filter(|(id, _)| *id != NO_TOKEN).collect(),
        })
    }

    fn wait(&mut self) -> Result<(), GpuError> {
        self.commands[..self.submits.len()].iter_mut().try_for_each(CommandBuffer::wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)] // one run of pieces
    fn work_is_cut_where_it_exceeds_the_limit() {
        let pieces = |work: &[u64], limit| -> Vec<Range<usize>> {
            cut(work.iter().copied(), limit).into_iter().map(|segment| segment.pieces).collect()
        };
        assert_eq!(pieces(&[3, 3, 3, 3], 6), [0..2, 2..4]);
        assert_eq!(pieces(&[3, 3, 3], 100), [0..3]);
        assert_eq!(pieces(&[50, 1, 50, 1, 1], 6), [0..1, 1..2, 2..3, 3..5]);
        assert_eq!(pieces(&[7], 6), [0..1]);
        assert_eq!(cut([2, 3].into_iter(), 9), [Segment { pieces: 0..2, work: 5 }]);
    }

    #[test]
    fn the_bound_of_a_submit_follows_the_devices_speed() {
        let ms = Duration::from_millis;
        // Ten times too slow: down at once.
        assert_eq!(bounded(10_000_000_000, 10_000_000_000, Some(ms(2000)), ms(200)), 1_000_000_000);
        // Four times faster than needed: up by an eighth of the way.
        assert_eq!(bounded(8_000_000_000, 8_000_000_000, Some(ms(50)), ms(200)), 11_000_000_000);
        // Without a clock, or after too short a submit: as before. Never nothing.
        assert_eq!(bounded(8_000_000_000, 1, None, ms(200)), 8_000_000_000);
        assert_eq!(bounded(8_000_000_000, 1, Some(Duration::from_micros(9)), ms(200)), 8_000_000_000);
        assert_eq!(bounded(8_000_000_000, 1, Some(ms(9)), ms(1)), LEAST_SUBMIT_MACS);
    }

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
