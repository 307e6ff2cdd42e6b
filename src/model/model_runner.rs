//! A model on the device. `load` loads it once; then it runs steps, whose forward pass `forward` records.
//!
//! All weights, KV blocks, activations and staging are allocated while loading, and nothing is allocated afterwards.
//! All computation is on the device.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::config::GenerationConfig;
use super::layers::{DeviceLayer, DevicePerLayer, DeviceStreams, Scratch};
use super::memory::{self, MAX_IN_FLIGHT, Schemes};
use super::offload::{AttentionShare, OffloadBuffers};
use super::rates::{Rates, WorkAmount};
use super::self_test::SelfTest;
use super::spec::{LayerSpec, ModelSpec};
use super::step::{self, Frame, PoolRequest, StepOutputs};
use super::submits::{self, LayerWork, SEGMENT_LAYERS, SharedWork, StepPart, Submit};
use super::tensors::{Layer, TensorSpec};
use super::vision::Tower;
use super::{Batch, BatchSequence, Limits, PoolBlock, Runner, RunnerError, Sampled, Sampling, Ticket};
use crate::checkpoint::LayerValues;
use crate::config::Courtesy;
use crate::gpu::placement::Placement;
use crate::gpu::residency::Residency;
use crate::gpu::{Buffer, Class, Device, GpuError, Recorder};
use crate::kernels::{AttentionBy, Embedding, History, Kernels, Matrix, RmsNorm, Tiles};
use crate::tensor::{KvDtype, Precision};

/// Counts of the bytes that a load read, and of those that remain in memory.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    /// Bytes of the checkpoint's tensors.
    pub bytes: u64,
    /// Bytes of the checkpoint's files that were in the page cache before the load, so that it did not read the disk.
    pub cached_bytes: u64,
    /// Bytes of the checkpoint's files that are in the page cache after the load, in addition to the device's copy.
    /// Other processes may keep them there.
    pub resident_bytes: u64,
}

/// What a successful self-test checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelfTested {
    /// Kernels whose results match the stored results.
    pub kernels: usize,
    /// Kernels for which no results are stored.
    pub untested: Vec<String>,
    /// Layers whose values match the values in the checkpoint.
    pub layers: Result<usize, NotCompared>,
}

/// Why no layer was compared with the values in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotCompared {
    NotStored,
    RoundedAnew,
    ShortContext,
}

impl fmt::Display for NotCompared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStored => "no layer values in this checkpoint: `unicorn quantize` stores them",
            Self::RoundedAnew => {
                "the layer values of this checkpoint are not those of weights that --quantize rounds anew"
            }
            Self::ShortContext => "the context is shorter than the prompt of this checkpoint's layer values",
        })
    }
}

/// Records something after the layer with this number (0 = the embedding), for some rows.
pub(super) type Keep<'a> = &'a dyn Fn(&ModelRunner, &mut Recorder<'_>, usize, &Range<usize>);

/// A loaded model.
pub struct ModelRunner {
    pub(crate) device: Arc<Device>,
    pub(crate) config: ModelSpec,
    pub(super) generation: GenerationConfig,
    pub(crate) limits: Limits,
    pub(crate) kv: KvDtype,
    pub(crate) kernels: Kernels,
    pub(super) embedding: Embedding,
    /// The matrix of the logits; `None` = the embedding.
    pub(super) lm_head: Option<Matrix>,
    pub(super) per_layer: Option<DevicePerLayer>,
    pub(super) streams: Option<DeviceStreams>,
    pub(super) norm: RmsNorm,
    pub(crate) layers: Vec<DeviceLayer>,
    pub(crate) scratch: Scratch,
    pub(crate) frames: Vec<Frame>,
    /// The id last sampled in each slot, u32.
    pub(super) sampled: Buffer,
    pub(super) history: History,
    /// Host-visible copy of the logits, for `eval`. KV blocks are copied through it, too.
    pub(super) logits_readback: Buffer,
    pub(super) self_test: SelfTest,
    pub(super) layer_values: Result<Arc<LayerValues>, NotCompared>,
    /// The tower that reads images, if it is loaded.
    pub(super) vision: Option<Tower>,
    /// The buffers for a coprocessor, and the coprocessor that is attached.
    pub(crate) offload_buffers: Option<OffloadBuffers>,
    pub(crate) coprocessor: Option<Box<dyn Coprocessor>>,
    /// The number of layers that a step computes. A coprocessor reduces it to measure its speed.
    pub(crate) trial_layers: usize,
    pub(crate) in_flight: VecDeque<u64>,
    /// The rest of the step that was submitted last, while that step waits for its masks.
    pub(super) closing: Option<Closing>,
    pub(super) next_ticket: u64,
    /// The rates of the device, learned from earlier submits, and the longest time that a submit may take: in general,
    /// and while courtesy bounds the share of the device's time.
    pub(super) rates: Rates,
    pub(super) max_submit: Duration,
    pub(super) max_courteous_submit: Duration,
    pub(super) placements: Vec<Placement>,
    pub(super) loaded: Loaded,
    pub(super) residency: Residency,
    pub(super) weight_bytes: u64,
    pub(super) schemes: Schemes,
}

/// Another processor that computes a part of the attention of prompts. The runner passes it every step. The coprocessor
/// drives the steps in which it takes part.
pub(crate) trait Coprocessor: Any + Send {
    /// Submits a step on frame `index`, if the coprocessor takes part in it. If not, returns `wanted`, and the device
    /// computes the step alone.
    fn run(
        &mut self,
        model: &mut ModelRunner,
        index: usize,
        batch: &Batch,
        wanted: StepOutputs,
    ) -> Result<Option<StepOutputs>, RunnerError>;

    /// As [`Runner::attention_path`].
    fn attention_path(&self) -> u32;
}

/// The part after the layers of a step whose draws have masks. It is submitted when the masks are available.
pub(super) struct Closing {
    submit: Submit,
    wanted: StepOutputs,
    /// The number of the step's tokens, with padding.
    padded: usize,
}

impl ModelRunner {
    pub fn config(&self) -> &ModelSpec {
        &self.config
    }

    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The matrix that computes the logits.
    pub(super) fn head(&self) -> &Matrix {
        self.lm_head.as_ref().unwrap_or(self.embedding.matrix())
    }

    pub fn loaded(&self) -> Loaded {
        self.loaded
    }

    /// The placements of all bytes, by class and heap.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Whether the kernel sees the placed bytes in memory.
    pub fn residency(&self) -> Residency {
        self.residency
    }

    /// Bytes of weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// The least bytes that a step reads: every weight once, the output head only if ids are drawn, and the keys and
    /// values that each sequence sees once. `shares` has `(positions before, tokens)` of each sequence.
    pub fn least_bytes(&self, shares: &[(usize, usize)], draws: bool) -> u64 {
        let head = if draws { 0 } else { self.head().bytes() };
        self.weight_bytes - head + self.kv_bytes_seen(shares.iter().copied())
    }

    /// Bytes of the keys and values that sequences see, each once. `shares` as in [`ModelRunner::least_bytes`].
    fn kv_bytes_seen(&self, shares: impl Iterator<Item = (usize, usize)>) -> u64 {
        shares.map(|(start, tokens)| memory::kv_bytes_seen(&self.config, self.kv, start, tokens)).sum()
    }

    /// Checks on the device that each kernel computes its stored result, and that each layer computes the values in the
    /// checkpoint. No step may be in flight.
    pub fn self_test(&mut self) -> Result<SelfTested, RunnerError> {
        assert!(self.in_flight.is_empty(), "a self-test while a step is in flight");
        let kernels = self.self_test.run(&self.kernels)?;
        let layers = match self.layer_values.clone() {
            Ok(values) if values.tokens.len() > self.limits.max_context => Err(NotCompared::ShortContext),
            Ok(values) => Ok(self.check_layers(&values)?),
            Err(why) => Err(why),
        };
        Ok(SelfTested { kernels, untested: self.self_test.untested().to_vec(), layers })
    }

    /// The ways to damage results that the self-test does not detect; there should be none.
    #[doc(hidden)]
    pub fn missed_damage(&mut self) -> Result<Vec<String>, RunnerError> {
        self.self_test.missed_damage(&self.kernels)
    }

    /// The element type of keys and values.
    pub fn precision(&self) -> Precision {
        self.kernels.precision()
    }

    /// How the kernels divide products.
    pub fn tiles(&self) -> Tiles {
        self.kernels.tiles()
    }

    /// How the kernels compute attention.
    pub fn attention_by(&self) -> AttentionBy {
        self.kernels.attention_by()
    }

    /// The schemes of the weights on the device.
    pub fn schemes(&self) -> &Schemes {
        &self.schemes
    }

    pub fn kv_dtype(&self) -> KvDtype {
        self.kv
    }

    /// Submits one step on frame `index`, which has no step in flight. If draws have masks, the closing is not
    /// submitted until [`Runner::masks`]. If a coprocessor is attached, it may compute a part of the attention. Then
    /// this returns with the step's last submit.
    pub(crate) fn run(
        &mut self,
        index: usize,
        batch: &Batch,
        wanted: StepOutputs,
    ) -> Result<(), RunnerError> {
        let shares = batch.sequences.iter().map(|sequence| (sequence.start, sequence.input.len()));
        self.device.count_read(Class::KvCache, self.kv_bytes_seen(shares));
        // A coprocessor computes causal attention only.
        let has_images = batch.sequences.iter().any(|sequence| !sequence.images.is_empty());
        let Some(mut coprocessor) = self.coprocessor.take_if(|_| !has_images) else {
            return Ok(self.run_keeping(index, batch, wanted, None)?);
        };
        let left = coprocessor.run(self, index, batch, wanted);
        self.coprocessor = Some(coprocessor);
        match left? {
            Some(wanted) => Ok(self.run_keeping(index, batch, wanted, None)?),
            None => Ok(()),
        }
    }

    /// As [`ModelRunner::run`], without the coprocessor. `keep` records something after the embedding (0), and after
    /// each layer (from 1 on) or each part of its rows.
    pub(super) fn run_keeping(
        &mut self,
        index: usize,
        batch: &Batch,
        wanted: StepOutputs,
        keep: Option<Keep<'_>>,
    ) -> Result<(), GpuError> {
        let padded = self.padded_tokens(batch.num_tokens());
        self.frames[index].fill(&self.limits, batch, padded, &wanted);
        let layers = self.layers_of_step(&wanted, keep.is_some());
        let mut submits = self.plan(batch, padded, &wanted, layers, None);
        if keep.is_some() {
            // A recording that other steps run again must not contain the commands of `keep`.
            submits = submits::layer_by_layer(submits, padded);
        }
        self.share_out(index, batch, padded, &submits, None);
        let closing = if wanted.masks > 0 { submits.pop() } else { None };
        let mut commands = std::mem::take(&mut self.frames[index].commands);
        let frame = &self.frames[index];
        let keep = |r: &mut Recorder<'_>, after: usize, rows: &Range<usize>| {
            if let Some(keep) = keep {
                keep(self, r, after, rows);
            }
        };
        commands.begin();
        let result = commands.run(&self.device, padded, &submits, &mut |r, part| {
            self.record_part(r, frame, part, batch, &wanted, padded);
            match part {
                StepPart::Opening => keep(r, 0, &(0..padded)),
                StepPart::Layer { layer, rows } => keep(r, layer + 1, rows),
                _ => {}
            }
        });
        self.frames[index].commands = commands;
        result?;
        self.leave_closing(closing, wanted, padded);
        Ok(())
    }

    /// Records a part of a step. The coprocessor itself records the parts of layers in which it takes part.
    pub(crate) fn record_part(
        &self,
        r: &mut Recorder<'_>,
        frame: &Frame,
        part: &StepPart,
        batch: &Batch,
        wanted: &StepOutputs,
        padded: usize,
    ) {
        match part {
            StepPart::Opening => self.record_opening(r, frame, batch, padded),
            StepPart::Segment(layers) => {
                for layer in layers.clone() {
                    let step = frame.arrays(self.layers[layer].pool, padded, None);
                    self.record_layer(r, layer, &step, 0..padded);
                    self.record_used_experts(r, frame, layer);
                }
            }
            StepPart::Layer { layer, rows } => {
                let step = frame.arrays(self.layers[*layer].pool, padded, Some(rows));
                self.record_layer(r, *layer, &step, rows.clone());
                self.record_used_experts(r, frame, *layer);
            }
            StepPart::Projections { layer, rows } => {
                let step = frame.arrays(self.layers[*layer].pool, padded, None).rows(rows);
                self.record_projections(r, *layer, &step, rows.clone());
            }
            StepPart::Attention { layer, rows } => {
                let step = frame.arrays(self.layers[*layer].pool, padded, Some(rows));
                self.record_attention(r, *layer, &step, rows);
            }
            StepPart::Rest { layer, rows } => {
                self.record_rest(r, *layer, rows.clone());
                self.record_used_experts(r, frame, *layer);
            }
            StepPart::Closing => self.record_closing(r, frame, wanted),
            shared => unreachable!("{shared:?} in a step that is not shared"),
        }
    }

    /// Leaves a step's closing to [`Runner::masks`], if the closing waits for masks.
    pub(crate) fn leave_closing(&mut self, closing: Option<Submit>, wanted: StepOutputs, padded: usize) {
        self.closing = closing.map(|submit| Closing { submit, wanted, padded });
    }

    /// Submits the rest of the step on frame `index`, with the masks of its draws.
    fn close(&mut self, index: usize, closing: &Closing, masks: &[Arc<[u32]>]) -> Result<(), GpuError> {
        let Closing { submit, wanted, padded } = closing;
        assert_eq!(masks.len(), wanted.masks, "masks of a step");
        let mut commands = std::mem::take(&mut self.frames[index].commands);
        let frame = &self.frames[index];
        frame.fill_masks(&self.limits, masks);
        let result = commands.run(&self.device, *padded, std::slice::from_ref(submit), &mut |r, _| {
            self.record_closing(r, frame, wanted);
        });
        self.frames[index].commands = commands;
        result
    }

    /// Shares out the attention of a step on a frame over workgroups, by the parts of the step's submits.
    pub(crate) fn share_out(
        &mut self,
        index: usize,
        batch: &Batch,
        tokens: usize,
        submits: &[Submit],
        share: Option<&AttentionShare>,
    ) {
        for pool in 0..self.limits.kv.pools.len() {
            let Some(layer) = self.layers.iter().find(|layer| layer.pool == pool) else { continue };
            let parts = submits.iter().flat_map(|submit| &submit.parts).filter_map(|part| match part {
                StepPart::Layer { layer, rows } | StepPart::Attention { layer, rows }
                    if self.layers[*layer].pool == pool =>
                {
                    Some(rows.len())
                }
                _ => None,
            });
            // The last part may be shorter than the others.
            let rows_per_part = parts.max().unwrap_or(tokens);
            // The shared rows are in separate parts.
            let mut starts: Vec<usize> = (0..tokens).step_by(rows_per_part).chain([tokens]).collect();
            if let Some(share) = share.filter(|share| share.keys[pool].is_some()) {
                starts.extend([share.rows.start, share.rows.end]);
                starts.sort_unstable();
                starts.dedup();
            }
            let rows: Vec<Range<usize>> = starts.windows(2).map(|ends| ends[0]..ends[1]).collect();
            let shape = &layer.attention.shape;
            let sees_images = self.vision.as_ref().is_some_and(|tower| tower.is_seen_whole(shape.window));
            self.frames[index].share_out(pool, (shape, sees_images), &self.limits, batch, &rows);
        }
    }

    /// Waits for the step on a frame, and learns the device's rates from the times of its submits.
    pub(crate) fn wait_for(&mut self, index: usize) -> Result<(), GpuError> {
        let ModelRunner { frames, rates, .. } = self;
        frames[index].commands.wait(&mut |work, took| rates.learn(work, took))
    }

    /// The number of tokens that a step of `tokens` tokens is padded to.
    pub(crate) fn padded_tokens(&self, tokens: usize) -> usize {
        // Sums over tokens must not count padding.
        let sums = self.layers.iter().any(|layer| layer.moments.is_some());
        if sums { tokens } else { step::padded_tokens(tokens, self.limits.max_batch_tokens) }
    }

    /// The number of layers that a step computes: all if something comes after them, or if `all` is set. Otherwise the last
    /// layers without keys and values of their own are left out, because no other token reads their results.
    pub(crate) fn layers_of_step(&self, wanted: &StepOutputs, all: bool) -> usize {
        let has_end = !wanted.rows.is_empty() || !wanted.pooling.is_empty();
        let has_sums = self.layers.iter().any(|layer| layer.moments.is_some());
        let read = self.config.layers.iter().rposition(|layer| layer.kv_source.is_none());
        match read {
            // A layer is in the same segment in every step.
            Some(last) if !has_end && !has_sums && !all => {
                (last + 1).next_multiple_of(SEGMENT_LAYERS).min(self.layers.len())
            }
            _ => self.layers.len(),
        }
    }

    /// Cuts a step of so many layers into submits. `share` is the part of its attention in which a coprocessor takes part.
    pub(crate) fn plan(
        &self,
        batch: &Batch,
        tokens: usize,
        wanted: &StepOutputs,
        layers: usize,
        share: Option<&AttentionShare>,
    ) -> Vec<Submit> {
        let c = &self.config;
        // Sum of the keys that the step's tokens see: over the tokens that are the only ones of their sequence, or over
        // all other tokens.
        let seen_by = |s: &BatchSequence, window: u64| window.min((s.start + s.input.len()) as u64);
        let seen = |window: u64, alone: bool| -> u64 {
            let each = |s: &BatchSequence| s.input.len() as u64 * seen_by(s, window);
            batch.sequences.iter().filter(|s| (s.input.len() == 1) == alone).map(each).sum()
        };
        let shared = |layer: usize, window: u64, row: u64| {
            let share = share?;
            let gathered = share.keys[self.layers[layer].pool]?;
            let heads = &c.layers[layer].heads;
            let kv_heads = heads.num_key_value_heads as u64;
            let keys = seen_by(&batch.sequences[share.sequence], window);
            let all = 2 * (heads.q_width() * share.rows.len()) as u64 * keys;
            Some(SharedWork {
                rows: share.rows.clone(),
                projections: memory::projection_macs_per_token(&c.tensors.layers[layer]),
                gathered: row * gathered as u64 * share.kv_heads as u64 / kv_heads,
                all,
                own: (u128::from(all) * u128::from(kv_heads - share.kv_heads as u64) / u128::from(kv_heads))
                    as u64,
            })
        };
        let has_images = batch.sequences.iter().any(|s| !s.images.is_empty());
        let largest = |pool: usize, work: &dyn Fn(&Layer<TensorSpec>) -> u64| {
            let of_pool = self.layers.iter().zip(&c.tensors.layers).filter(|(layer, _)| layer.pool == pool);
            of_pool.map(|(_, tensors)| work(tensors)).max().unwrap_or(0)
        };
        // The layers of a pool are cut into the same parts, so the largest of them counts.
        let work = |pool: usize| {
            let layer = self.layers.iter().position(|layer| layer.pool == pool)?;
            let LayerSpec { window, heads, .. } = &c.layers[layer];
            let window = window.map_or(u64::MAX, |window| window as u64);
            let row = 2 * memory::kv_block_bytes(heads, self.kv, 1);
            Some(LayerWork {
                weights: largest(pool, &|tensors| memory::macs_per_token(c, tensors)),
                reading: row * seen(window, true),
                attention: 2 * heads.q_width() as u64 * seen(window, false),
                shared: shared(layer, window, row),
                projected_first: has_images.then(|| largest(pool, &memory::projection_macs_per_token)),
            })
        };
        let works: Vec<Option<LayerWork>> = (0..self.limits.kv.pools.len()).map(work).collect();
        let layers = self.layers.iter().take(layers.min(self.trial_layers));
        let layers: Vec<LayerWork> =
            layers.map(|layer| works[layer.pool].clone().expect("its pool has a layer")).collect();
        // A step with masks submits its closing alone, because grammars compute the masks while the layers run.
        let [before, after] = memory::outer_macs_per_token(c);
        let opening = WorkAmount::products(before, tokens);
        let read = wanted.rows_read();
        let merged = WorkAmount::products(after, read.len());
        let logits = WorkAmount::draws((c.hidden_size * c.vocab_size) as u64, wanted.rows.len());
        let closing = (!read.is_empty()).then_some((merged + logits, wanted.masks > 0));
        let limit = match self.device.courtesy().is_bound() {
            true => self.max_submit.min(self.max_courteous_submit),
            false => self.max_submit,
        };
        submits::plan(&layers, tokens, (opening, closing), &self.rates, limit)
    }
}

impl Runner for ModelRunner {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attention_path(&self) -> u32 {
        self.coprocessor.as_ref().map_or(0, |coprocessor| coprocessor.attention_path())
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        assert!(self.in_flight.len() < MAX_IN_FLIGHT, "more than {MAX_IN_FLIGHT} steps in flight");
        assert!(self.closing.is_none(), "a step before the masks of the last one");
        let mut ends = Vec::new();
        let mut end = 0;
        for sequence in &batch.sequences {
            end += sequence.input.len();
            ends.push(end as u32);
        }
        let mut wanted = StepOutputs::default();
        for draw in &sampling.draws {
            let sequence = &batch.sequences[draw.sequence];
            let tokens = sequence.input.len();
            assert!(draw.token < tokens, "a draw after a token that is not there");
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
        self.run(ticket as usize % MAX_IN_FLIGHT, batch, wanted)?;
        self.next_ticket += 1;
        self.in_flight.push_back(ticket);
        Ok(Ticket(ticket))
    }

    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError> {
        assert_eq!(self.in_flight.back(), Some(&ticket.0), "masks of another step than the last one");
        let closing = self.closing.take().expect("a step whose draws have masks");
        Ok(self.close(ticket.0 as usize % MAX_IN_FLIGHT, &closing, words)?)
    }

    fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<(), RunnerError> {
        self.device.set_courtesy(courtesy);
        Ok(())
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
        assert!(self.closing.is_none(), "a step is waited for before its masks are there");
        assert_eq!(self.in_flight.pop_front(), Some(ticket.0), "tickets are waited for in order");
        let index = ticket.0 as usize % MAX_IN_FLIGHT;
        self.wait_for(index)?;
        Ok(self.frames[index].results())
    }

    fn encode_image(&mut self, slot: u32, size: [usize; 2], pixels: &[u8]) -> Result<(), RunnerError> {
        let tower = self.vision.as_mut().expect("an image for a model that takes some");
        Ok(tower.encode(slot, size, pixels)?)
    }

    fn read_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, RunnerError> {
        Ok(self.read_own_blocks(blocks)?)
    }

    fn write_blocks(&mut self, blocks: &[PoolBlock], bytes: &[u8]) -> Result<(), RunnerError> {
        Ok(self.write_own_blocks(blocks, bytes)?)
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "a probe while a step is in flight");
        self.self_test.probe(&self.kernels)
    }
}

impl From<GpuError> for RunnerError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::DeviceLost { during } => {
                RunnerError::Lost(format!("during {during}; see `dmesg` for the driver's reason"))
            }
            GpuError::Timeout { seconds, .. } => RunnerError::Hung { seconds },
            error @ GpuError::NoMemory { .. } => RunnerError::Busy(error.to_string()),
            other => RunnerError::Lost(other.to_string()),
        }
    }
}
