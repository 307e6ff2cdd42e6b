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
use super::draft::check_draft;
use super::memory::{
    self, DEFAULT_BLOCK_SIZE, Demand, DoesNotFit, DraftDemand, MAX_IN_FLIGHT, READBACK_ROWS, Schemes,
};
use super::rates::{Rates, Work};
use super::step::{self, Frame, LayerWork, Part, PoolRequest, Submit, Wanted};
use super::weights::{Gemma3Weights, WeightsError};
use super::{
    Batch, BatchSequence, BlockCopy, BlockPool, Input, Limits, Runner, RunnerError, Sampled, Sampling, Ticket,
};
use crate::checkpoint::{Checkpoint, CheckpointError, ModelFiles, Tensor};
use crate::gpu::placement::{self, Class, MemoryKind, Placement};
use crate::gpu::residency::{self, Residency};
use crate::gpu::{Arena, Buffer, CommandBuffer, Device, GpuError, Recorder, Submission, Uploader};
use crate::kernels::{
    Activations, Attention, AttentionShape, Embedding, Heads, History, Kernels, KvCache, Logits, MAX_GROUP,
    Matrices, Matrix, Operand, Partials, Quantized, RmsNorm, SampleRequest, StepArrays, Tiles, UploadError,
    Wants,
};
use crate::tensor::{KvDtype, Precision, QuantizeMode, Scheme};

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
    /// What one submit may take on the device, as far as the time of those before tells (tests use less than any takes, to
    /// have small models cut).
    pub max_submit: Duration,
    /// What may be taken of the device's memory.
    pub memory: placement::Limits,
    /// In what matrices are multiplied with activations.
    pub precision: Precision,
    /// How such products are shared out; `None`: as is best by count.
    pub tiles: Option<Tiles>,
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
            precision: Precision::F32,
            tiles: None,
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
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    post_feedforward_layernorm: RmsNorm,
    attention: Attention,
    q_proj: Matrix,
    k_proj: Matrix,
    v_proj: Matrix,
    o_proj: Matrix,
    gate_proj: Matrix,
    up_proj: Matrix,
    down_proj: Matrix,
    /// In what the inputs of q, k and v are wanted; of o; of gate and up; of down.
    wants: [Wants; 4],
    /// Sums of squares of what meets q, k and v; o; gate and up; down: f32 for each column.
    moments: Option<[Buffer; 4]>,
}

/// Activations of a step, `[max_batch_tokens, ..]` f32 each.
#[derive(Clone)]
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
    /// What attention merges, which is of no token's row.
    partials: Partials,
    /// `[intermediate_size]`
    gate: Activations,
    up: Activations,
    /// The normed rows that logits are wanted of, `[LOGIT_ROWS, hidden_size]`, and the logits; what draws change of them is
    /// all 0 between steps.
    final_rows: Activations,
    logits: Logits,
    /// Sums of normed rows of the residual stream, a row for each slot, `[hidden_size]`.
    pooled: Activations,
    /// What matrices are multiplied with, where they want it in int8.
    normed_blocks: Quantized,
    attended_blocks: Quantized,
    gated_blocks: Quantized,
    final_blocks: Quantized,
}

/// A loaded model.
pub struct Gemma3 {
    device: Arc<Device>,
    config: Gemma3Config,
    generation: GenerationConfig,
    limits: Limits,
    kv: KvDtype,
    kernels: Kernels,
    embedding: Embedding,
    norm: RmsNorm,
    layers: Vec<Layer>,
    scratch: Scratch,
    frames: Vec<Frame>,
    /// u32 per slot: the id last sampled there.
    sampled: Buffer,
    history: History,
    /// Host-visible copy of the logits, for `eval`.
    logits_readback: Buffer,
    in_flight: VecDeque<u64>,
    next_ticket: u64,
    /// What work takes, as the submits before tell, and what one may take.
    rates: Rates,
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
        Gemma3::load_with_draft(device, files, None, options, progress).map(|(model, _)| model)
    }

    /// The same, and beside it a second model as its draft, stored as its files have it: that one shares the first one's
    /// blocks, slots and activations, so nothing but [`super::draft::Drafted`] may run it.
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
                Some((draft, weights, DraftDemand { config: &draft.config, schemes }))
            }
        };
        let held_before = device.held();
        let demand = Demand {
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
            draft: draft.as_ref().map(|(.., demand)| demand.clone()),
        };
        // Everything is placed before anything is taken, and taken before anything is read.
        let others = memory::quantize_modes(&weights)?;
        let machine = device.machine();
        let fit = demand
            .fit_to_serve(&machine, &options.memory, options.max_context, options.sequences, &others)
            .map_err(Box::new)?;
        let limits = demand.limits(fit.context, fit.pools);
        let arena = Arena::with_plan(device, fit.plan)?;
        touch(device, &arena)?;
        let draft_weights = draft.iter().flat_map(|(_, weights, _)| weights.iter());
        let mut load = Load {
            device,
            options,
            demand: &demand,
            arena,
            done: 0,
            total: weights.iter().chain(draft_weights).map(|t| t.stored_bytes()).sum(),
            progress,
        };
        let mut model = load.model(&source, &weights, &demand.schemes, limits, None)?;
        let mut draft_model = match &draft {
            None => None,
            Some((source, weights, demand)) => {
                let limits = Limits { vocab_size: source.config.vocab_size, ..limits };
                Some(load.model(source, weights, &demand.schemes, limits, Some(&model))?)
            }
        };
        let arena = load.arena;
        assert!(arena.is_exhausted(), "something was planned that nobody asked for");
        let residency = residency::compare(arena.allocated(), held_before, device.held());
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
        // An id sampled in no step must still be a row of the embedding.
        let mut commands = CommandBuffer::new(device, "clear")?;
        let mut recorder = commands.begin()?;
        recorder.fill(&model.sampled, 0);
        recorder.submit("clearing sampled ids")?;
        commands.wait()?;
        device.save_pipeline_cache();
        Ok((model, draft_model))
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

    /// Bytes that a step reads at least: every weight once, but the output head only where ids are drawn, and once the keys
    /// and values that each of its sequences sees, which has `(positions before, tokens)`.
    pub fn least_bytes(&self, shares: &[(usize, usize)], draws: bool) -> u64 {
        let head = if draws { 0 } else { self.embedding.matrix().bytes() };
        let kv =
            |&(start, tokens): &(usize, usize)| memory::kv_bytes_seen(&self.config, self.kv, start, tokens);
        self.weight_bytes - head + shares.iter().map(kv).sum::<u64>()
    }

    /// How keys and values are stored.
    pub fn kv_dtype(&self) -> KvDtype {
        self.kv
    }

    /// Runs `tokens` through the layers, for what is summed up on the way; `each` hears how many are done. Panics if the
    /// tokens do not fit the context.
    pub fn observe(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize)) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "observing beside a step in flight");
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let chunk = self.limits.max_batch_tokens;
        for (i, ids) in tokens.chunks(chunk).enumerate() {
            self.run(0, &self.alone(i * chunk, ids), &Wanted::default())?;
            self.wait_for(0)?;
            each(i * chunk + ids.len());
        }
        Ok(())
    }

    /// For each layer the sums of squares of what met q, k and v; o; gate and up; down, by column, over everything that
    /// was run. Panics unless the model was loaded with `moments`.
    pub fn take_moments(&mut self) -> Result<Vec<[Vec<f32>; 4]>, RunnerError> {
        assert!(self.in_flight.is_empty(), "reading beside a step in flight");
        let mut commands = CommandBuffer::new(&self.device, "moments")?;
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
        let (vocab, stride) = (self.config.vocab_size, self.scratch.logits.raw.stride);
        let mut padded = vec![0f32; chunk * stride];
        let mut rows = vec![0f32; chunk * vocab];
        for (i, ids) in tokens.chunks(chunk).enumerate() {
            let start = i * chunk;
            let batch = self.alone(start, ids);
            let all = Wanted { rows: (0..ids.len() as u32).collect(), ..Wanted::default() };
            self.run(0, &batch, &all)?;
            self.wait_for(0)?;
            let n = ids.len();
            self.logits_readback.read(0, &mut padded[..n * stride]);
            for (to, from) in rows.chunks_exact_mut(vocab).zip(padded.chunks_exact(stride)).take(n) {
                to.copy_from_slice(&from[..vocab]);
            }
            each(start, &rows[..n * vocab]);
        }
        Ok(())
    }

    /// Submits one step on frame `index`, of which nothing is under way.
    fn run(&mut self, index: usize, batch: &Batch, wanted: &Wanted) -> Result<(), GpuError> {
        let tokens = self.filled_up(batch.num_tokens());
        self.frames[index].fill(&self.limits, batch, tokens, wanted);
        let submits = self.plan(batch, tokens, wanted);
        self.share_out(index, batch, tokens, &submits);
        let mut commands = std::mem::take(&mut self.frames[index].commands);
        let frame = &self.frames[index];
        let mut has_masks = false;
        let result = commands.run(&self.device, tokens, &submits, &mut |r, part| match part {
            Part::Opening => self.record_opening(r, frame, batch, tokens),
            Part::Segment(layers) => {
                for layer in layers.clone() {
                    let step = frame.arrays(self.layers[layer].kind, tokens, None);
                    self.record_layer(r, layer, &step, 0..tokens);
                }
            }
            Part::Layer { layer, rows } => {
                let step = frame.arrays(self.layers[*layer].kind, tokens, Some(rows));
                self.record_layer(r, *layer, &step, rows.clone());
            }
            Part::Closing => {
                // Once, however often it is recorded: a mask is some grammar's work.
                if !std::mem::replace(&mut has_masks, true) {
                    frame.fill_masks(&self.limits, &wanted.masks);
                }
                self.record_closing(r, frame, wanted, batch.num_tokens());
            }
        });
        self.frames[index].commands = commands;
        result
    }

    /// Shares out the attention of a step on a frame, by the parts that its submits have.
    fn share_out(&mut self, index: usize, batch: &Batch, tokens: usize, submits: &[Submit]) {
        for kind in [LayerType::SlidingAttention, LayerType::FullAttention] {
            let Some(layer) = self.layers.iter().find(|layer| layer.kind == kind) else { continue };
            let parts = submits.iter().flat_map(|submit| &submit.parts).filter_map(|part| match part {
                Part::Layer { layer, rows } if self.layers[*layer].kind == kind => Some(rows.len()),
                _ => None,
            });
            // The last part may be shorter than the others.
            let rows_per_part = parts.max().unwrap_or(tokens);
            let shape = &layer.attention.shape;
            self.frames[index].share_out(kind, shape, &self.limits, batch, tokens, rows_per_part);
        }
    }

    /// Waits for the step on a frame, and learns from it how fast the device is.
    fn wait_for(&mut self, index: usize) -> Result<(), GpuError> {
        let Gemma3 { frames, rates, .. } = self;
        frames[index].commands.wait(&mut |work, took| rates.learn(work, took))
    }

    /// Tokens that a step of so many is computed as.
    fn filled_up(&self, tokens: usize) -> usize {
        // What is summed up over the tokens is not to count those of nobody.
        let sums = self.layers.iter().any(|layer| layer.moments.is_some());
        if sums { tokens } else { step::filled_up(tokens, self.limits.max_batch_tokens) }
    }

    /// Cuts a step into submits.
    fn plan(&self, batch: &Batch, tokens: usize, wanted: &Wanted) -> Vec<Submit> {
        let c = &self.config;
        let heads = (c.num_attention_heads * c.head_dim) as u64;
        // Keys that the tokens of the step see, added up: of tokens that are alone of their sequence, or of all others.
        let seen = |window: u64, alone: bool| -> u64 {
            let each =
                |s: &BatchSequence| s.input.len() as u64 * window.min((s.start + s.input.len()) as u64);
            batch.sequences.iter().filter(|s| (s.input.len() == 1) == alone).map(each).sum()
        };
        let weights = memory::macs_per_token_and_layer(c);
        let row = 2 * memory::kv_block_bytes(c, self.kv, 1);
        let [sliding, full] = [c.sliding_window as u64, u64::MAX].map(|window| LayerWork {
            weights,
            reading: row * seen(window, true),
            attention: 2 * heads * seen(window, false),
        });
        let layer = |kind: &LayerType| match kind {
            LayerType::SlidingAttention => sliding,
            LayerType::FullAttention => full,
        };
        let layers: Vec<LayerWork> = c.layer_types.iter().map(layer).collect();
        // Masks are made while the layers are under way.
        let logits = Work::draws((c.hidden_size * c.vocab_size) as u64, wanted.rows.len());
        let closing = (!wanted.rows.is_empty() || !wanted.pooling.is_empty())
            .then_some((logits, !wanted.masks.is_empty()));
        step::plan(&layers, tokens, closing, &self.rates, self.max_submit)
    }

    /// Copies of blocks, the residual stream's beginning, and the ids for later draws.
    fn record_opening(&self, r: &mut Recorder<'_>, frame: &Frame, batch: &Batch, tokens: usize) {
        for copy in &batch.copies {
            self.record_copy(r, copy);
        }
        let (ids, hidden) = (&frame.full.ids, &self.scratch.hidden);
        self.kernels.embed(r, &self.embedding, ids, &self.sampled, hidden, tokens);
        self.record_history(r, frame, batch);
    }

    /// The sums of hidden states that are wanted; the logits, and what is drawn from them, or else their way to the host.
    fn record_closing(&self, r: &mut Recorder<'_>, frame: &Frame, wanted: &Wanted, tokens: usize) {
        let (k, s, rows) = (&self.kernels, &self.scratch, wanted.rows.len());
        if !wanted.pooling.is_empty() {
            k.rms_norm(r, &s.hidden, &self.norm, &Operand::floats(&s.normed), tokens);
            let mut to = 0;
            for PoolRequest { rows, slot, fresh, last } in &wanted.pooling {
                let slot = *slot as usize;
                let sums = s.pooled.rows(&(slot..slot + 1));
                k.pool(r, &s.normed.rows(rows), &sums, *fresh, rows.len());
                if *last {
                    r.copy(&sums.buffer, &frame.pooled.rows(&(to..to + 1)).buffer, sums.buffer.size());
                    to += 1;
                }
            }
        }
        if rows == 0 {
            return;
        }
        let head = self.embedding.matrix();
        let final_rows = Operand::new(k.wants([head]), &s.final_rows, &s.final_blocks);
        k.rms_norm_gather(r, &s.hidden, &frame.logit_rows, &self.norm, &final_rows, rows);
        k.matmul(r, &[(head, &s.logits.raw)], &final_rows, rows);
        if wanted.requests.is_empty() {
            let bytes = Activations::bytes(rows, self.config.vocab_size);
            r.copy(&s.logits.raw.buffer, &self.logits_readback, bytes);
        } else {
            self.record_draws(r, frame, &wanted.requests);
        }
    }

    /// Gives a block the contents of another, in every layer of its pool.
    fn record_copy(&self, r: &mut Recorder<'_>, copy: &BlockCopy) {
        let kind = match copy.pool {
            BlockPool::Full => LayerType::FullAttention,
            BlockPool::Sliding => LayerType::SlidingAttention,
        };
        let bytes = memory::kv_block_bytes(&self.config, self.kv, self.limits.kv.block_size);
        for layer in self.layers.iter().filter(|layer| layer.kind == kind) {
            let KvCache { keys, values } = &layer.attention.cache;
            for half in [keys, values] {
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
        let (k, draws, logits, n) = (&self.kernels, &frame.draws, &self.scratch.logits, requests.len());
        k.adjust(r, logits, draws, &self.history, requests);
        k.sample(r, logits, draws, &self.sampled, requests);
        k.clear_adjusted(r, logits, draws, &self.history, requests);
        if requests.iter().any(|request| request.logprobs > 0) {
            k.logprobs(r, logits, draws, n);
        }
    }

    /// One decoder layer, for some of a step's tokens: attention and feed-forward, each between two norms, added to the
    /// residual stream; what the feed-forward adds, by the layer behind it, together with the norm that comes next there.
    fn record_layer(&self, r: &mut Recorder<'_>, index: usize, step: &StepArrays, rows: Range<usize>) {
        let layer = &self.layers[index];
        let (k, s, attention, n) = (&self.kernels, self.scratch.rows(&rows), &layer.attention, rows.len());
        let watch = |r: &mut Recorder<'_>, which: usize, x: &Activations| {
            if let Some(moments) = &layer.moments {
                k.moments(r, x, &moments[which], n);
            }
        };
        let [qkv, o, gate_up, down] = layer.wants;
        let normed = |wants| Operand::new(wants, &s.normed, &s.normed_blocks);
        let attended = Operand::new(o, &s.attended, &s.attended_blocks);
        let gated = Operand::new(down, &s.gate, &s.gated_blocks);

        match index.checked_sub(1).map(|before| &self.layers[before].post_feedforward_layernorm) {
            None => k.rms_norm(r, &s.hidden, &layer.input_layernorm, &normed(qkv), n),
            Some(norm) => {
                k.residual(r, &s.delta, norm, (&s.hidden, &layer.input_layernorm), &normed(qkv), n);
            }
        }
        watch(r, 0, &s.normed);
        let products = [(&layer.q_proj, &s.q), (&layer.k_proj, &s.k), (&layer.v_proj, &s.v)];
        k.matmul(r, &products, &normed(qkv), n);
        k.qkv_store(r, attention, [&s.q, &s.k, &s.v], step, n);
        k.attention(r, attention, (&self.scratch.q, &s.partials), step, &attended, n);
        watch(r, 1, &s.attended);
        k.matmul(r, &[(&layer.o_proj, &s.delta)], &attended, n);

        let next = (&s.hidden, &layer.pre_feedforward_layernorm);
        k.residual(r, &s.delta, &layer.post_attention_layernorm, next, &normed(gate_up), n);
        watch(r, 2, &s.normed);
        k.gated(r, [&layer.gate_proj, &layer.up_proj], &normed(gate_up), [&s.gate, &s.up], &gated, n);
        watch(r, 3, &s.gate);
        k.matmul(r, &[(&layer.down_proj, &s.delta)], &gated, n);
        if index + 1 == self.layers.len() {
            k.rms_norm_add(r, &s.delta, &layer.post_feedforward_layernorm, &s.hidden, n);
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
        for pooling in &sampling.pooling {
            let BatchSequence { slot, start, input, .. } = &batch.sequences[pooling.sequence];
            let end = ends[pooling.sequence] as usize;
            wanted.pooling.push(PoolRequest {
                rows: end - input.len()..end,
                slot: *slot,
                fresh: *start == 0,
                last: pooling.last,
            });
        }
        let ticket = self.next_ticket;
        self.run(ticket as usize % MAX_IN_FLIGHT, batch, &wanted)?;
        self.next_ticket += 1;
        self.in_flight.push_back(ticket);
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
        assert_eq!(self.in_flight.pop_front(), Some(ticket.0), "tickets are waited for in order");
        let index = ticket.0 as usize % MAX_IN_FLIGHT;
        self.wait_for(index)?;
        Ok(self.frames[index].results())
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        /// gelu_tanh(1) * 2
        const EXPECTED: f32 = 1.682_384;

        assert!(self.in_flight.is_empty(), "a probe beside a step");
        // By a kernel of every layer, where no step leaves anything that another one needs.
        let [gate, up] = [&self.scratch.gate, &self.scratch.up].map(|x| x.rows(&(0..1)));
        self.logits_readback.write(0, &[f32::NAN]);
        let mut commands = CommandBuffer::new(&self.device, "probe")?;
        let mut submission = Submission::new(&self.device)?;
        commands.record(&mut |recorder| {
            recorder.fill(&gate.buffer, 1f32.to_bits());
            recorder.fill(&up.buffer, 2f32.to_bits());
            self.kernels.geglu(recorder, &gate, &up, &Operand::floats(&gate), 1);
            recorder.copy(&gate.buffer, &self.logits_readback, 4);
        })?;
        submission.submit(&mut [&mut commands], "a probe")?;
        submission.wait()?;
        // For its times, where those are taken.
        commands.wait()?;
        let mut got = [0f32];
        self.logits_readback.read(0, &mut got);
        if (got[0] - EXPECTED).abs() < 1e-3 {
            return Ok(());
        }
        Err(RunnerError::Device(format!("gelu(1) * 2 is {}, it should be {EXPECTED}", got[0])))
    }
}

impl From<GpuError> for RunnerError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::DeviceLost { during } => {
                RunnerError::DeviceLost(format!("during {during}; see `dmesg` for the driver's reason"))
            }
            GpuError::Timeout { seconds, .. } => RunnerError::Timeout { seconds },
            error @ GpuError::NoMemory { .. } => RunnerError::OutOfMemory(error.to_string()),
            other => RunnerError::Device(other.to_string()),
        }
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

    /// Its tensors, none of which is missing, for a model that the kernels can compute.
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

/// A load under way: everything is taken, and handed out model by model.
struct Load<'a> {
    device: &'a Arc<Device>,
    options: &'a LoadOptions,
    demand: &'a Demand<'a>,
    arena: Arena,
    /// Bytes of the checkpoints.
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl Load<'_> {
    /// The next model; `of` is the one whose draft it is. What concerns all of the load is filled in when it is over.
    fn model(
        &mut self,
        source: &Source<'_>,
        weights: &Gemma3Weights<'_>,
        schemes: &Schemes,
        limits: Limits,
        of: Option<&Gemma3>,
    ) -> Result<Gemma3, LoadError> {
        let Load { device, options, demand, arena, done, total, progress } = self;
        let Source { config, checkpoint, .. } = source;
        let tokens = demand.batch_tokens();
        let group = config.num_attention_heads / config.num_key_value_heads;
        let mut loader = Loader {
            checkpoint,
            uploader: Uploader::new(device)?,
            queued: Vec::new(),
            max_shard_bytes: demand.max_shard_bytes,
            done: *done,
            total: *total,
            progress: &mut **progress,
        };

        let Schemes { embedding: embed_scheme, layers: layer_schemes } = schemes;
        let mut matrices =
            Matrices { embedding: Some(*embed_scheme), tiles: options.tiles, ..Matrices::default() };
        for [q, k, v, o, gate, up, down] in layer_schemes {
            matrices.products.extend([q, k, v, o, gate, up, down]);
            matrices.gated.extend([gate, up]);
        }
        let heads = Heads { group, head_dim: config.head_dim, kv: options.kv };
        // What meets a matrix is watched in f32.
        let precision = if options.moments { Precision::F32 } else { options.precision };
        let kernels = Kernels::new(device, &matrices, heads, precision)?;

        let embedding = loader.matrix(arena, &weights.embed_tokens, *embed_scheme, Class::Embedding)?;
        let embed_scale = (config.hidden_size as f64).sqrt() as f32;
        let embedding = Embedding::new(arena, &mut loader.uploader, embedding, embed_scale)?;
        let eps = config.rms_norm_eps;
        let norm = loader.norm(arena, &weights.norm, eps)?;
        let mut layers = Vec::new();
        for ((w, &kind), schemes) in weights.layers.iter().zip(&config.layer_types).zip(layer_schemes) {
            let [q, k, v, o, gate, up, down] = *schemes;
            let mut attention = |t, scheme| loader.matrix(arena, t, scheme, Class::Attention);
            let [q_proj, k_proj] = [attention(&w.q_proj, q)?, attention(&w.k_proj, k)?];
            let [v_proj, o_proj] = [attention(&w.v_proj, v)?, attention(&w.o_proj, o)?];
            let mut ffn = |t, scheme| loader.matrix(arena, t, scheme, Class::Ffn);
            let [gate_proj, up_proj, down_proj] =
                [ffn(&w.gate_proj, gate)?, ffn(&w.up_proj, up)?, ffn(&w.down_proj, down)?];
            let mut norm = |t: &Tensor| loader.norm(arena, t, eps);
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
        let sample_below = options.sample_below.unwrap_or(usize::MAX).min(config.vocab_size);
        let (mut scratch, sampled, history) = match of {
            Some(model) => {
                (model.scratch.by_turns(config, tokens), model.sampled.clone(), model.history.clone())
            }
            None => {
                let scratch = Scratch::new(arena, config, tokens, demand.activation_bytes())?;
                let sampled = device_buffer(arena, memory::SAMPLED_BYTES, "sampled ids")?;
                let history = device_buffer(arena, memory::history_bytes(&limits), "history")?;
                (scratch, sampled, History { ids: history, slot_len: limits.max_context })
            }
        };
        // What the model itself has no row for is no guess.
        scratch.logits.vocab = of.map_or(sample_below, |model| sample_below.min(model.scratch.logits.vocab));
        let logits_readback = match of {
            Some(model) => model.logits_readback.clone(),
            None => {
                let bytes = memory::logits_bytes(config);
                arena.alloc(MemoryKind::Readback, Class::Staging, bytes, "logits readback")?
            }
        };
        let [rope_sliding, rope_full] = [
            (config.rope_local_base_freq, 1.0, "rope table (sliding layers)"),
            (config.rope_theta, config.rope_scaling_factor, "rope table (full layers)"),
        ]
        .map(|(base, factor, name)| {
            let table = rope_table(config.head_dim, limits.max_context, base, factor);
            let bytes = memory::rope_table_bytes(config, limits.max_context);
            let buffer = device_buffer(arena, bytes, name)?;
            loader.uploader.upload(&buffer, &table)?;
            Ok::<_, LoadError>(buffer)
        });
        let (rope_sliding, rope_full) = (rope_sliding?, rope_full?);
        let mut moments = Vec::new();
        for i in 0..if options.moments && of.is_none() { layers.len() } else { 0 } {
            let [a, b, c, d] = memory::moment_widths(config)
                .map(|width| device_buffer(arena, 4 * width as u64, &format!("layer {i} moments")));
            moments.push([a?, b?, c?, d?]);
        }
        let mut moments = moments.into_iter();
        let layers = layers
            .into_iter()
            .enumerate()
            .map(|(i, (kind, matrices, norms))| {
                let bytes = memory::kv_pool_bytes(config, options.kv, &limits.kv, kind);
                let mut half = |what: &str| {
                    arena.alloc(MemoryKind::Device, Class::KvCache, bytes, &format!("layer {i} {what} cache"))
                };
                let cache = KvCache { keys: half("key")?, values: half("value")? };
                let (window, rope) = match kind {
                    LayerType::SlidingAttention => (Some(config.sliding_window), &rope_sliding),
                    LayerType::FullAttention => (None, &rope_full),
                };
                let shape = AttentionShape {
                    num_heads: config.num_attention_heads,
                    num_kv_heads: config.num_key_value_heads,
                    head_dim: config.head_dim,
                    block_size: limits.kv.block_size,
                    max_blocks: memory::table_blocks(&limits),
                    window,
                };
                let [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] = matrices;
                let [n1, n2, n3, n4, q_norm, k_norm] = norms;
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
                    moments: moments.next(),
                })
            })
            .collect::<Result<Vec<_>, LoadError>>()?;

        let frames = (0..MAX_IN_FLIGHT)
            .map(|i| Frame::new(arena, config, &limits, i))
            .collect::<Result<Vec<_>, LoadError>>()?;
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
            scratch,
            frames,
            sampled,
            history,
            logits_readback,
            in_flight: VecDeque::new(),
            next_ticket: 0,
            rates: Rates::default(),
            max_submit: options.max_submit,
            placements: Vec::new(),
            loaded,
            residency: Residency::Unknown,
            weight_bytes: demand.weight_bytes_of(config, schemes),
        })
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
        (self.progress)(Progress { done, total: self.total });
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
    /// The same of some tokens of the step; logits, which are not by token, as they are.
    fn rows(&self, rows: &Range<usize>) -> Scratch {
        let Scratch { hidden, normed, delta, q, attended, k, v, gate, up, .. } = self;
        Scratch {
            hidden: hidden.rows(rows),
            normed: normed.rows(rows),
            delta: delta.rows(rows),
            q: q.rows(rows),
            attended: attended.rows(rows),
            k: k.rows(rows),
            v: v.rows(rows),
            gate: gate.rows(rows),
            up: up.rows(rows),
            ..self.clone()
        }
    }

    /// Buffers of such names and sizes, as those of `config` need them for `tokens` at least.
    fn new(
        arena: &mut Arena,
        config: &Gemma3Config,
        tokens: usize,
        sizes: Vec<(&str, u64)>,
    ) -> Result<Scratch, GpuError> {
        let buffers = sizes.into_iter().map(|(name, bytes)| device_buffer(arena, bytes, name));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        Ok(Scratch::of(config, tokens, buffers))
    }

    /// The same buffers for another model, whose steps come before and behind those of this one.
    fn by_turns(&self, config: &Gemma3Config, tokens: usize) -> Scratch {
        let Scratch { hidden, normed, delta, q, attended, k, v, partials, gate, up, .. } = self;
        let Partials { single, tiles } = partials;
        let Scratch { final_rows, logits: Logits { raw, adjusted, scratch, .. }, pooled, .. } = self;
        let Scratch { normed_blocks, attended_blocks, gated_blocks, final_blocks, .. } = self;
        let of_layers = [hidden, normed, delta, q, attended, k, v, single, tiles, gate, up];
        let behind = [final_rows, raw, adjusted, scratch, pooled];
        let blocks = [normed_blocks, attended_blocks, gated_blocks, final_blocks];
        let floats = of_layers.into_iter().chain(behind).map(|activations| &activations.buffer);
        let all = floats.chain(blocks.map(|blocks| &blocks.buffer));
        Scratch::of(config, tokens, all.cloned().collect())
    }

    fn of(config: &Gemma3Config, tokens: usize, buffers: Vec<Buffer>) -> Scratch {
        let mut buffers = buffers.into_iter();
        let mut each = memory::activations(config, tokens)
            .map(|(name, rows, width)| {
                let buffer = buffers.next().expect("one for each field");
                assert!(buffer.size() >= Activations::bytes(rows, width), "{name}: the buffer is too small");
                Activations::new(buffer, width)
            })
            .into_iter();
        let [normed_blocks, attended_blocks, gated_blocks, final_blocks] = memory::quantized(config, tokens)
            .map(|(name, rows, width)| {
                let buffer = buffers.next().expect("one for each field");
                assert!(buffer.size() >= Quantized::bytes(rows, width), "{name}: the buffer is too small");
                Quantized::new(buffer, width)
            });
        let mut next = || each.next().expect("one for each field");
        Scratch {
            hidden: next(),
            normed: next(),
            delta: next(),
            q: next(),
            attended: next(),
            k: next(),
            v: next(),
            partials: Partials { single: next(), tiles: next() },
            gate: next(),
            up: next(),
            final_rows: next(),
            logits: Logits { raw: next(), adjusted: next(), scratch: next(), vocab: config.vocab_size },
            pooled: next(),
            normed_blocks,
            attended_blocks,
            gated_blocks,
            final_blocks,
        }
    }
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
