//! Runs a step in which the NPU computes a part of the attention (`attention.rs`).
//!
//! In each shared layer, the device (the GPU) computes queries, keys and values, and gathers the NPU's inputs in memory
//! that the host reads. Then the device's own share of attention is put on its queue. The host waits for the inputs,
//! and passes them to the NPU while the device computes. Then the host waits for the NPU, and the device merges both
//! shares and continues. The submits of a step are in order, and all of them are on the queue before the submits of the
//! next step.
//!
//! If the NPU fails, the device computes the NPU's share of that layer, and of the step's later layers.

use std::any::Any;
use std::ops::Range;

use super::attention::{Attached, Offload, OffloadCounts, OffloadJob, OffloadRoom, OffloadWatch, UnitShare};
use super::kernels::{GatheredKeys, OffloadKernels};
use crate::gpu::{GpuError, Recorder};
use crate::model::load::LoadError;
use crate::model::memory;
use crate::model::model_runner::{Coprocessor, ModelRunner};
use crate::model::offload::{AttentionShare, OffloadBuffers};
use crate::model::rates::WorkAmount;
use crate::model::step::{Commands, Frame, StepOutputs};
use crate::model::submits::{SEGMENT_LAYERS, StepPart, Submit};
use crate::model::{Batch, BatchSequence, BlockList, Input, KvPool, RunnerError, first_seen};

/// The NPU, and the device's kernels that write its inputs and read its output.
struct UnitOfModel {
    unit: Attached,
    kernels: OffloadKernels,
}

impl Coprocessor for UnitOfModel {
    fn run(
        &mut self,
        model: &mut ModelRunner,
        index: usize,
        batch: &Batch,
        wanted: StepOutputs,
    ) -> Result<Option<StepOutputs>, RunnerError> {
        self.unit.check()?;
        // `eval` reads the logits of a prompt's rows, and draws nothing.
        let drawn = if wanted.requests.is_empty() { &[][..] } else { &wanted.rows };
        let limits = &model.offload_buffers.as_ref().expect("room for the unit").limits;
        match self.unit.share(batch, drawn, &model.limits.kv.pools, limits) {
            Some(share) => model.run_shared(index, batch, wanted, &share, self).map(|()| None),
            None => Ok(Some(wanted)),
        }
    }

    fn attention_path(&self) -> u32 {
        if self.unit.is_usable() { self.unit.kv_heads() as u32 } else { 0 }
    }
}

impl ModelRunner {
    /// Attaches an NPU, which computes a part of the attention of prompts from the next step on. The load must have
    /// reserved buffers for it, and no step may be in flight.
    pub fn attach_offload(&mut self, offload: Offload) -> Result<(), LoadError> {
        assert!(self.in_flight.is_empty(), "a unit is attached during a step");
        let Some(buffers) = &self.offload_buffers else {
            return Err(LoadError::Option(
                "the model was loaded without room for a unit that computes attention: load it with \
                 LoadOptions::offload"
                    .into(),
            ));
        };
        if self.layers.iter().any(|layer| layer.moments.is_some()) {
            return Err(LoadError::Option(
                "the model was loaded for calibration, where no other unit computes attention: load it without \
                 LoadOptions::moments"
                    .into(),
            ));
        }
        if self.config.distinct_heads().len() > 1 {
            return Err(LoadError::Option(
                "the layers of this model have heads of different sizes; the unit computes models with one size".into(),
            ));
        }
        let most = buffers.limits.kv_heads.min(self.config.heads().num_key_value_heads);
        if !(1..=most).contains(&offload.kv_heads) {
            return Err(LoadError::Option(format!(
                "the unit is to compute {} KV heads; expected 1 to {most}, which the model has and the load made room for",
                offload.kv_heads
            )));
        }
        let kernels = OffloadKernels::new(&self.device, memory::heads_of(&self.config.heads(), self.kv))?;
        let unit = Attached::new(offload, buffers)?;
        self.coprocessor = Some(Box::new(UnitOfModel { unit, kernels }));
        Ok(())
    }

    fn unit(&self) -> Option<&Attached> {
        let coprocessor: &dyn Any = self.coprocessor.as_deref()?;
        coprocessor.downcast_ref().map(|UnitOfModel { unit, .. }| unit)
    }

    /// Drops the attached NPU. No step may be in flight.
    pub fn detach_offload(&mut self) {
        assert!(self.in_flight.is_empty(), "a unit is detached during a step");
        self.coprocessor = None;
    }

    /// Sets the number of KV heads that the attached NPU computes from the next step on; 0 for none. Panics if the load
    /// reserved buffers for fewer KV heads.
    pub fn set_offload_heads(&mut self, kv_heads: usize) {
        let room = self.offload_buffers.as_ref().map_or(0, |buffers| buffers.limits.kv_heads);
        assert!(
            kv_heads <= room.min(self.config.heads().num_key_value_heads),
            "{kv_heads} KV heads for the unit"
        );
        let coprocessor = self.coprocessor.as_deref_mut().map(|unit| unit as &mut dyn Any);
        if let Some(UnitOfModel { unit, .. }) = coprocessor.and_then(|unit| unit.downcast_mut()) {
            unit.set_kv_heads(kv_heads);
        }
    }

    /// The counts of the attached NPU.
    pub fn offload_counts(&self) -> Option<OffloadCounts> {
        self.offload_watch().map(|watch| watch.counts())
    }

    /// Resets these counts.
    pub fn forget_offload_counts(&mut self) {
        if let Some(unit) = self.unit() {
            unit.forget_counts();
        }
    }

    /// Reads these counts while steps run.
    pub fn offload_watch(&self) -> Option<OffloadWatch> {
        self.unit().map(Attached::watch)
    }

    /// Computes at least the first `layers` layers of a chunk of a prompt with `depth` tokens before it, to measure the
    /// time. This reads and writes arbitrary blocks of the KV cache. Returns `false` if the chunk does not fit the
    /// limits. No step may be in flight, and no sequence may be in the cache.
    pub fn trial(&mut self, depth: usize, tokens: usize, layers: usize) -> Result<bool, RunnerError> {
        assert!(self.in_flight.is_empty(), "a trial during a step");
        let (kv, context) = (&self.limits.kv, depth + tokens);
        let end = context.div_ceil(kv.block_size);
        let list = |pool: &KvPool| {
            let first = first_seen(pool.window, depth) / kv.block_size;
            BlockList { first, ids: (0..(end - first) as u32).collect() }
        };
        let blocks: Vec<BlockList> = kv.pools.iter().map(list).collect();
        let fits = tokens <= self.limits.max_batch_tokens
            && context <= self.limits.max_context
            && kv.pools.iter().zip(&blocks).all(|(pool, list)| list.ids.len() <= pool.blocks);
        if !fits || tokens == 0 {
            return Ok(false);
        }
        let sequence = BatchSequence {
            slot: 0,
            start: depth,
            input: Input::Ids(vec![1; tokens]),
            blocks,
            images: Vec::new(),
            history: None,
        };
        let batch = Batch { sequences: vec![sequence], ..Batch::default() };
        // Whole segments, because a segment is recorded once and reused by all steps.
        self.trial_layers = layers.next_multiple_of(SEGMENT_LAYERS);
        let ran = self.run(0, &batch, StepOutputs::default()).and_then(|()| Ok(self.wait_for(0)?));
        self.trial_layers = usize::MAX;
        ran.map(|()| true)
    }

    /// Submits a step on frame `index` in which `unit` computes `share`. When this returns, all submits of the step are
    /// on the queue, except a closing submit that waits for masks.
    fn run_shared(
        &mut self,
        index: usize,
        batch: &Batch,
        wanted: StepOutputs,
        share: &UnitShare,
        UnitOfModel { unit, kernels }: &mut UnitOfModel,
    ) -> Result<(), RunnerError> {
        let padded = self.padded_tokens(batch.num_tokens());
        self.frames[index].fill(&self.limits, batch, padded, &wanted);
        let layers = self.layers_of_step(&wanted, true);
        let mut submits = self.plan(batch, padded, &wanted, layers, Some(&share.attention));
        self.share_out(index, batch, padded, &submits, Some(&share.attention));
        let closing = if wanted.masks > 0 { submits.pop() } else { None };
        let mut commands = std::mem::take(&mut self.frames[index].commands);
        let frame = &self.frames[index];
        commands.begin();
        let buffers = self.offload_buffers.as_ref().expect("room for the unit");
        let shared = Shared { model: self, frame, share, buffers, kernels };
        let result = shared.drive(&mut commands, padded, submits, unit, &mut |r, part| {
            if !shared.record(r, part) {
                self.record_part(r, frame, part, batch, &wanted, padded);
            }
        });
        self.frames[index].commands = commands;
        result?;
        self.leave_closing(closing, wanted, padded);
        Ok(())
    }
}

/// A shared step.
struct Shared<'a> {
    model: &'a ModelRunner,
    frame: &'a Frame,
    share: &'a UnitShare,
    buffers: &'a OffloadBuffers,
    kernels: &'a OffloadKernels,
}

impl Shared<'_> {
    /// The job of a layer, and the layout of its arrays.
    fn job(&self, layer: usize) -> (OffloadJob, OffloadRoom) {
        let layer = &self.model.layers[layer];
        let room = self.share.room(layer.pool).expect("a layer that is shared");
        (self.share.job(layer.attention.shape.window), room)
    }

    /// Submits the parts to the device, one after the other, and passes the layers' jobs to the NPU between the
    /// submits.
    fn drive(
        &self,
        commands: &mut Commands,
        padded: usize,
        submits: Vec<Submit>,
        unit: &mut Attached,
        record: &mut dyn FnMut(&mut Recorder<'_>, &StepPart),
    ) -> Result<(), RunnerError> {
        let mut run = |commands: &mut Commands, submit: Submit| -> Result<(), GpuError> {
            commands.run(&self.model.device, padded, &[submit], record)
        };
        // The layer whose inputs are being gathered for the NPU, and the number of submits that include them.
        let mut gathering: Option<(usize, usize)> = None;
        // The parts of the device's own share of the layer that the NPU received last.
        let mut own: Vec<Range<usize>> = Vec::new();
        for mut submit in submits {
            let joined = match submit.parts.first() {
                Some(&StepPart::Join { layer }) => Some(layer),
                _ => None,
            };
            let mut used = None;
            if let Some(layer) = joined {
                self.hand_over(gathering.take(), commands, unit)?;
                let (job, room) = self.job(layer);
                let shape = &self.model.layers[layer].attention.shape;
                if unit.is_usable() && unit.finish(&job, &room, shape, self.buffers)? {
                    used = Some(job);
                } else {
                    unit.recomputed();
                    submit.parts.remove(0);
                    for rows in own.drain(..) {
                        let parts = vec![StepPart::Recompute { layer, rows }];
                        run(commands, Submit { parts, work: WorkAmount::default() })?;
                    }
                }
                own.clear();
            }
            let mut gathered = match submit.parts.last() {
                Some(&StepPart::Gather { layer }) => Some(layer),
                _ => None,
            };
            if gathered.is_some() && !unit.is_usable() {
                submit.parts.pop();
                gathered = None;
            }
            own.extend(submit.parts.iter().filter_map(|part| match part {
                StepPart::Attention { rows, .. } => Some(rows.clone()),
                _ => None,
            }));
            // The NPU may compute all KV heads.
            let is_idle = submit.work.is_nothing()
                && submit.parts.iter().all(|part| matches!(part, StepPart::Attention { .. }));
            if is_idle {
                continue;
            }
            run(commands, submit)?;
            if let Some(job) = used {
                unit.used(&job);
            }
            // The device's own share is on the queue before the host waits for the inputs, so the device is not idle
            // during the transfer.
            self.hand_over(gathering.take(), commands, unit)?;
            gathering = gathered.map(|layer| (layer, commands.submitted()));
        }
        Ok(())
    }

    /// Waits until the inputs of a layer are gathered, and passes them to the NPU.
    fn hand_over(
        &self,
        gathering: Option<(usize, usize)>,
        commands: &mut Commands,
        unit: &mut Attached,
    ) -> Result<(), RunnerError> {
        let Some((layer, submits)) = gathering else { return Ok(()) };
        commands.wait_for_first(submits)?;
        let (job, room) = self.job(layer);
        unit.begin(&job, &room, &self.model.layers[layer].attention.shape, self.buffers)
    }

    /// Records a part of a shared layer. Returns `false` for any other part.
    fn record(&self, r: &mut Recorder<'_>, part: &StepPart) -> bool {
        let Shared { model, frame, share, .. } = *self;
        match part {
            StepPart::Projections { layer, rows } => {
                let step = frame.whole(model.layers[*layer].pool).rows(rows);
                model.record_projections(r, *layer, &step, rows.clone());
            }
            StepPart::Gather { layer } => self.record_gather(r, *layer),
            StepPart::Attention { layer, rows } => {
                let all = model.layers[*layer].attention.shape.num_kv_heads;
                self.record_attention(r, *layer, rows, 0..all, share.attention.kv_heads..all);
            }
            StepPart::Recompute { layer, rows } => {
                self.record_attention(r, *layer, rows, 0..0, 0..share.attention.kv_heads);
            }
            StepPart::Join { layer } => self.record_join(r, *layer),
            StepPart::Rest { layer, rows } => {
                let (layer, index) = (&model.layers[*layer], *layer);
                let step = frame.whole(layer.pool).rows(rows);
                let (shape, partials) = (&layer.attention.shape, &model.scratch.partials);
                let attended = model.attended(index, rows);
                model.kernels.attention_merge(r, shape, &step, partials, &attended, rows.len());
                model.record_rest(r, index, rows.clone());
            }
            _ => return false,
        }
        true
    }

    /// Attention of some rows: over the KV heads `others` for rows that are not shared, and over `shared` for rows that
    /// are shared.
    fn record_attention(
        &self,
        r: &mut Recorder<'_>,
        layer: usize,
        rows: &Range<usize>,
        others: Range<usize>,
        shared: Range<usize>,
    ) {
        let Shared { model, frame, share, .. } = *self;
        let layer = &model.layers[layer];
        let (q, step) = ((&model.scratch.q, &model.scratch.partials), frame.whole(layer.pool));
        for part in frame.parts(layer.pool).iter().filter(|part| rows.contains(&part.rows.start)) {
            let heads = if share.attention.rows.contains(&part.rows.start) { &shared } else { &others };
            model.kernels.attention_partials(r, &layer.attention, q, step, part, heads);
        }
    }

    /// Writes the NPU's inputs.
    fn record_gather(&self, r: &mut Recorder<'_>, layer: usize) {
        let Shared { model, frame, share, buffers, kernels } = *self;
        let (_, room) = self.job(layer);
        let layer = &model.layers[layer];
        let shape = &layer.attention.shape;
        let AttentionShare { rows, sequence, kv_heads, .. } = &share.attention;
        let q = model.scratch.q.rows(rows);
        let queries = (&buffers.queries, room.row_stride);
        kernels.queries(r, shape, (&q, rows.len()), *kv_heads, queries);
        let table = 4 * shape.max_blocks as u64;
        let blocks = frame.whole(layer.pool).block_tables.slice(*sequence as u64 * table, table);
        let span = GatheredKeys {
            first: room.first_key,
            count: room.keys,
            first_seen: shape.first_key(share.first),
            stride: room.key_stride,
        };
        let to = [&buffers.keys, &buffers.values];
        kernels.cache(r, &layer.attention, (&blocks, &span), *kv_heads, to);
        if buffers.limits.shared {
            r.release(&[&buffers.queries, &buffers.keys, &buffers.values]);
        }
    }

    /// Converts the NPU's output to partials.
    fn record_join(&self, r: &mut Recorder<'_>, layer: usize) {
        let Shared { model, frame, share, buffers, kernels } = *self;
        let AttentionShare { rows, kv_heads, .. } = &share.attention;
        let (_, room) = self.job(layer);
        let layer = &model.layers[layer];
        let merges = &frame.whole(layer.pool).shares.merges;
        let merges = merges.slice(8 * rows.start as u64, 8 * rows.len() as u64);
        if buffers.limits.shared {
            r.acquire(&[&buffers.output]);
        }
        let (output, partials) = ((&buffers.output, room.row_stride), &model.scratch.partials);
        let merges = (&merges, rows.len());
        kernels.partials(r, &layer.attention.shape, output, *kv_heads, merges, partials);
    }
}
