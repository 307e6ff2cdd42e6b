//! One step on the device: its input arrays, and its recorded commands.
//!
//! The layers of a step are recorded once for each number of tokens, in segments of a few layers, and submitted many
//! times. Each step writes its arrays again, and records its opening and its closing. Steps are padded so that few
//! different numbers of tokens occur. Padding tokens belong to no sequence: they read and write their own KV block,
//! which no sequence reads.
//!
//! The commands go to the device in the submits that `submits.rs` cuts a step into. Single layers and parts of layers
//! are recorded for each step.
//!
//! This file does not know what a layer computes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::memory::{self, LOGIT_ROWS};
use super::rates::WorkAmount;
use super::spec::ModelSpec;
use super::submits::{SEGMENT_LAYERS, StepPart, Submit};
use super::{
    Batch, BatchSequence, Draw, ImageLimits, ImageSpan, Input, Limits, Logprobs, MAX_BIASES, MAX_LOGPROBS,
    Sampled, first_seen,
};
use crate::gpu::placement::{Class, MemoryKind};
use crate::gpu::{Arena, Buffer, CommandBuffer, Device, GpuError, Recorder, Submission};
use crate::kernels::{
    self, Activations, AttentionShape, Bias, DrawArrays, LAST_SAMPLED, LOGPROB_WORDS, NO_TOKEN, Run,
    SampleRequest, ShareArrays, Shares, StepArrays, mask_words,
};

/// Numbers of tokens whose layers stay recorded. A new recording replaces the least recently run one.
const RECORDED: usize = 16;
/// The number of tokens, at most `most`, that a step of `tokens` tokens is padded to. Few numbers occur, and a step
/// grows by an eighth at most.
pub(super) fn padded_tokens(tokens: usize, most: usize) -> usize {
    let multiple = if tokens <= 8 { 1 } else { (tokens.next_power_of_two() / 16).max(8) };
    tokens.next_multiple_of(multiple).min(most)
}

/// The rows of a step whose logits are computed, and the requests for the ids to draw from them. The requests are empty
/// if the logits are copied to the host instead.
#[derive(Default)]
pub(crate) struct StepOutputs {
    pub rows: Vec<u32>,
    pub requests: Vec<SampleRequest>,
    pub bias: Vec<Bias>,
    /// Number of requests that have a mask.
    pub masks: usize,
    pub pooling: Vec<PoolRequest>,
}

/// A range of a step's rows whose hidden states are added up, and the slot of their sum.
pub(crate) struct PoolRequest {
    pub rows: Range<usize>,
    pub slot: u32,
    pub fresh: bool,
    pub last: bool,
}

/// The buffers and recordings of one step in flight. The host can access all of the buffers.
pub(crate) struct Frame {
    /// The step's arrays for the layers of each pool.
    pools: Vec<StepArrays>,
    /// The parts in which the layers of each pool take the tokens of the step in flight.
    parts: Vec<Vec<kernels::PartItems>>,
    pub logit_rows: Buffer,
    pub draws: DrawArrays,
    /// The slot of each of the step's sequences as u32, and the ids that the host adds to histories.
    pub slots: Buffer,
    pub history: Buffer,
    /// Sums of hidden states for the host, f32 `[max_sequences, hidden_size]`.
    pub pooled: Activations,
    /// [`Sampled::used_experts`], u32.
    pub used_experts: Buffer,
    pub commands: Commands,
    /// [`SampleRequest::logprobs`] of each id of the step in flight, and the number of sums in `pooled`.
    logprobs: Vec<u32>,
    sums: usize,
}

/// The command buffers of a frame.
#[derive(Default)]
pub(crate) struct Commands {
    recorded: Vec<Recorded>,
    /// Command buffers that each step records again, in the order of its parts.
    fresh: Vec<CommandBuffer>,
    /// The submissions of the step, one for each submit.
    submissions: Vec<Submission>,
    /// The work of each submit of the step in flight, and the number of `fresh` command buffers that these submits use.
    work: Vec<WorkAmount>,
    taken: usize,
    steps: u64,
}

/// The recorded layers of steps of `tokens` tokens, by segment, and whether each segment is recorded yet.
struct Recorded {
    tokens: usize,
    /// The number of the step that ran these layers last.
    used: u64,
    segments: Vec<(CommandBuffer, bool)>,
}

impl StepOutputs {
    /// The smallest range with all rows that are read after the layers. Empty if none are.
    pub fn rows_read(&self) -> Range<usize> {
        let drawn = self.rows.iter().map(|&row| row as usize..row as usize + 1);
        let pooled = self.pooling.iter().map(|pooling| pooling.rows.clone());
        let joined = |a: Range<usize>, b: Range<usize>| a.start.min(b.start)..a.end.max(b.end);
        drawn.chain(pooled).reduce(joined).unwrap_or(0..0)
    }

    /// Adds the request for one id, with its biases and its mask. Panics if the draw exceeds a bound.
    pub fn draw(&mut self, limits: &Limits, draw: &Draw, sequence: &BatchSequence) {
        let (p, position) = (&draw.params, sequence.start + draw.token + 1);
        let (bias, position) = (draw.biases(position), position as u32);
        assert!(bias.len() <= MAX_BIASES, "{} biases", bias.len());
        assert!(bias.iter().all(|(id, _)| (*id as usize) < limits.vocab_size), "bias of an id");
        assert!(draw.logprobs.is_none_or(|n| n <= MAX_LOGPROBS), "{:?} log probabilities", draw.logprobs);
        self.masks += usize::from(draw.masked);
        let mask = if draw.masked { self.masks } else { 0 };
        self.requests.push(SampleRequest {
            temperature: p.temperature,
            top_k: p.top_k,
            top_p: p.top_p,
            min_p: p.min_p,
            seed_low: draw.seed as u32,
            seed_high: (draw.seed >> 32) as u32,
            position,
            slot: draw.slot,
            repetition_penalty: p.repetition_penalty,
            presence_penalty: p.presence_penalty,
            frequency_penalty: p.frequency_penalty,
            // A fork reads its parent's history until it has its own history.
            history_slot: sequence.slot,
            history_len: if p.penalizes() { position } else { 0 },
            prompt_len: draw.prompt_len as u32,
            first_bias: self.bias.len() as u32,
            biases: bias.len() as u32,
            mask: mask as u32,
            logprobs: draw.logprobs.map_or(0, |n| n as u32 + 1),
        });
        self.bias.extend(bias.iter().map(|&(id, bias)| Bias { id, bias }));
    }
}

impl Commands {
    /// Begins another step. The frame has no step in flight.
    pub fn begin(&mut self) {
        self.steps += 1;
        self.taken = 0;
        self.work.clear();
    }

    /// Hands the next submits of a step of `tokens` tokens to the device, and records those of their parts that are not
    /// recorded yet. `record` is called again for a part if the driver had no memory for it.
    pub fn run(
        &mut self,
        device: &Arc<Device>,
        tokens: usize,
        submits: &[Submit],
        record: &mut dyn FnMut(&mut Recorder<'_>, &StepPart),
    ) -> Result<(), GpuError> {
        let segment_of = |layers: &Range<usize>| layers.start / SEGMENT_LAYERS;
        let parts = submits.iter().flat_map(|submit| &submit.parts);
        let segments =
            parts.filter_map(|p| if let StepPart::Segment(l) = p { Some(1 + segment_of(l)) } else { None });
        let segments = segments.max().unwrap_or(0);
        // Neighbouring parts that are recorded for this step share a command buffer.
        let is_fresh = |part: &StepPart| !matches!(part, StepPart::Segment(_));
        let buffers = |submit: &'_ Submit| -> Vec<Range<usize>> {
            let together = submit.parts.chunk_by(|a, b| is_fresh(a) && is_fresh(b));
            let end = together.scan(0, |end, parts| {
                *end += parts.len();
                Some(*end - parts.len()..*end)
            });
            end.collect()
        };
        let starts =
            submits.iter().flat_map(|submit| buffers(submit).into_iter().map(|b| &submit.parts[b.start]));
        let fresh = starts.filter(|part| is_fresh(part)).count();
        while self.fresh.len() < self.taken + fresh {
            self.fresh.push(CommandBuffer::new(device, "a part of a step")?);
        }
        while self.submissions.len() < self.work.len() + submits.len() {
            self.submissions.push(Submission::new(device)?);
        }
        let at = self.recorded(tokens);
        let recorded = &mut self.recorded[at];
        while recorded.segments.len() < segments {
            let name = format!("segment {} of {tokens} tokens", recorded.segments.len());
            recorded.segments.push((CommandBuffer::new(device, &name)?, false));
        }
        let mut recorded: Vec<_> = self.recorded[at].segments.iter_mut().map(Some).collect();
        let submitted = self.work.len();
        let mut unused = self.fresh[self.taken..].iter_mut();
        self.taken += fresh;
        for (submit, submission) in submits.iter().zip(&mut self.submissions[submitted..]) {
            let mut all = Vec::new();
            for parts in buffers(submit).into_iter().map(|parts| &submit.parts[parts]) {
                let mut record_all = |recorder: &mut Recorder<'_>| {
                    parts.iter().for_each(|part| record(recorder, part));
                };
                let commands = match &parts[0] {
                    StepPart::Segment(layers) => {
                        let (commands, is_recorded) =
                            recorded[segment_of(layers)].take().expect("each segment runs once");
                        if !*is_recorded {
                            commands.record_for_many_submits(&mut record_all)?;
                            *is_recorded = true;
                        }
                        commands
                    }
                    _ => {
                        let commands = unused.next().expect("counted");
                        commands.record_for_one_submit(&mut record_all)?;
                        commands
                    }
                };
                all.push(commands);
            }
            submission.submit(&mut all, "a step")?;
            self.work.push(submit.work);
        }
        Ok(())
    }

    /// The index in `self.recorded` of the recording for `tokens` tokens. If there are too many recordings, the one for
    /// a new number of tokens replaces the least recently run one.
    fn recorded(&mut self, tokens: usize) -> usize {
        let found = self.recorded.iter().position(|recorded| recorded.tokens == tokens);
        let at = match found {
            Some(at) => at,
            None if self.recorded.len() < RECORDED => {
                self.recorded.push(Recorded { tokens, used: 0, segments: Vec::new() });
                self.recorded.len() - 1
            }
            None => {
                let oldest = (0..RECORDED).min_by_key(|at| self.recorded[*at].used).expect("there are some");
                let recorded = &mut self.recorded[oldest];
                recorded.tokens = tokens;
                recorded.segments.iter_mut().for_each(|(_, is_recorded)| *is_recorded = false);
                oldest
            }
        };
        self.recorded[at].used = self.steps;
        at
    }

    /// The number of submits that the step has made until now.
    pub fn submitted(&self) -> usize {
        self.work.len()
    }

    /// Waits for the step's first `submits` submits: the host sees what they wrote.
    pub fn wait_for_first(&mut self, submits: usize) -> Result<(), GpuError> {
        self.submissions[..submits].last_mut().map_or(Ok(()), Submission::wait)
    }

    /// Waits for the step in flight. `each` gets the work of each submit, and the time it took if the device has a
    /// clock.
    pub fn wait(&mut self, each: &mut dyn FnMut(WorkAmount, Option<Duration>)) -> Result<(), GpuError> {
        for (submission, work) in self.submissions.iter_mut().zip(self.work.drain(..)) {
            submission.wait()?;
            each(work, submission.took());
        }
        // This also waits for the command buffers, because that reads the times of their kernels.
        let ran = self.recorded.iter_mut().filter(|recorded| recorded.used == self.steps);
        let segments = ran.flat_map(|recorded| &mut recorded.segments).map(|(commands, _)| commands);
        self.fresh.iter_mut().chain(segments).try_for_each(CommandBuffer::wait)
    }
}

impl Frame {
    pub fn new(
        arena: &mut Arena,
        config: &ModelSpec,
        limits: &Limits,
        index: usize,
    ) -> Result<Frame, GpuError> {
        let (of_step, of_pool) = memory::step_input_bytes(limits);
        let bytes = memory::step_input_sum(limits);
        let input = arena.alloc(MemoryKind::Upload, Class::Staging, bytes, &format!("step {index} input"))?;
        let mut offset = 0;
        let mut array = |bytes: u64| {
            offset += bytes;
            input.slice(offset - bytes, bytes)
        };
        let [ids, positions, sequence_of, logit_rows, requests, slots, history, bias, masks] =
            of_step.map(&mut array);
        let pools = limits.kv.pools.iter().map(|pool| {
            let [slot_mapping, block_tables, shares] = of_pool.map(&mut array);
            // All entries of the padding tokens' block table name one block, which comes after the pool's own blocks.
            let table_blocks = memory::table_blocks(limits);
            let row = 4 * (limits.max_sequences * table_blocks) as u64;
            block_tables.write(row, &vec![pool.blocks as u32; table_blocks]);
            // Attention reads a few entries, which are not counted.
            let block_tables = block_tables.accessing(0);
            StepArrays {
                ids: ids.clone(),
                positions: positions.clone(),
                sequence_of: sequence_of.clone(),
                slot_mapping,
                block_tables,
                shares: share_arrays(&shares, limits),
            }
        });
        let pools: Vec<StepArrays> = pools.collect();
        let sizes = memory::results_bytes(config);
        let results = arena.alloc(MemoryKind::Readback, Class::Staging, sizes.iter().sum(), "results")?;
        let mut offset = 0;
        let [drawn, logprobs, pooled, used_experts] = sizes.map(|bytes| {
            offset += bytes;
            results.slice(offset - bytes, bytes)
        });
        let draws = DrawArrays { requests, bias, masks, ids: drawn, logprobs };
        Ok(Frame {
            parts: vec![Vec::new(); pools.len()],
            pools,
            logit_rows,
            draws,
            slots,
            history,
            pooled: Activations::new(pooled, config.hidden_size),
            used_experts,
            commands: Commands::default(),
            logprobs: Vec::new(),
            sums: 0,
        })
    }

    /// Writes the arrays of a step that is padded to `padded` tokens. Panics if the batch breaks the limits, which is a
    /// bug of the caller.
    pub fn fill(&mut self, limits: &Limits, batch: &Batch, padded: usize, wanted: &StepOutputs) {
        let StepOutputs { rows: logit_rows, requests, bias, .. } = wanted;
        let tokens = batch.num_tokens();
        self.used_experts.write(0, &[0u32]);
        assert!(tokens > 0 && tokens <= padded, "{tokens} tokens in a step of {padded}");
        assert!(padded <= limits.max_batch_tokens, "{padded} tokens in a step");
        assert!(batch.sequences.len() <= limits.max_sequences, "{} sequences", batch.sequences.len());
        assert!(logit_rows.len() <= LOGIT_ROWS && requests.len() <= logit_rows.len());
        let mut ids = Vec::with_capacity(tokens);
        let mut positions = Vec::with_capacity(tokens);
        let mut sequence_of = Vec::with_capacity(tokens);
        let (kv, table_blocks) = (&limits.kv, memory::table_blocks(limits));
        let block_size = kv.block_size;
        let mut slot_mappings = vec![Vec::new(); kv.pools.len()];
        // Padding tokens have a slot that no sequence has.
        let mut slots = vec![limits.max_sequences as u32; limits.max_sequences + 1];
        let mut history = Vec::new();
        for (row, sequence) in batch.sequences.iter().enumerate() {
            let end = sequence.start + sequence.input.len();
            assert!(!sequence.input.is_empty() && end <= limits.max_context, "sequence of {end} tokens");
            assert!((sequence.slot as usize) < limits.max_sequences, "slot {}", sequence.slot);
            assert_eq!(sequence.blocks.len(), kv.pools.len(), "pools of a sequence");
            for (pool, list) in kv.pools.iter().zip(&sequence.blocks) {
                assert!(list.ids.iter().all(|&block| (block as usize) < pool.blocks), "block id");
                assert!(list.end() * block_size >= end && list.end() <= table_blocks, "block table");
                assert!(list.first * block_size <= first_seen(pool.window, sequence.start), "window");
            }
            check_images(limits, sequence);
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
            positions.extend(sequence.start as u32..end as u32);
            sequence_of.resize(positions.len(), row as u32);
            for ((arrays, slot_mapping), list) in
                self.pools.iter().zip(&mut slot_mappings).zip(&sequence.blocks)
            {
                slot_mapping.extend((sequence.start..end).map(|position| {
                    let block = list.ids[position / block_size - list.first];
                    block * block_size as u32 + (position % block_size) as u32
                }));
                arrays.block_tables.write(4 * (row * table_blocks + list.first) as u64, &list.ids);
            }
        }
        // Every padding token counts as the first token of a text, in the padding tokens' own block.
        ids.resize(padded, 0);
        positions.resize(padded, 0);
        sequence_of.resize(padded, limits.max_sequences as u32);
        for ((arrays, slot_mapping), pool) in self.pools.iter().zip(&mut slot_mappings).zip(&kv.pools) {
            slot_mapping.resize(padded, (pool.blocks * block_size) as u32);
            arrays.slot_mapping.write(0, slot_mapping);
        }
        let of_step = self.whole(0);
        of_step.ids.write(0, &ids);
        of_step.positions.write(0, &positions);
        of_step.sequence_of.write(0, &sequence_of);
        self.logit_rows.write(0, logit_rows);
        assert!(history.len() <= limits.max_context, "{} ids of history in a step", history.len());
        self.slots.write(0, &slots);
        self.history.write(0, &history);
        self.draws.requests.write(0, requests);
        self.draws.bias.write(0, bias);
        self.logprobs = requests.iter().map(|request| request.logprobs).collect();
        self.sums = wanted.pooling.iter().filter(|pooling| pooling.last).count();
    }

    /// Writes how attention is shared out over workgroups in the layers of one pool, which process the tokens in these
    /// parts. `sees_images`: whether the tokens of an image see each other in both directions there.
    pub fn share_out(
        &mut self,
        pool: usize,
        (shape, sees_images): (&AttentionShape, bool),
        limits: &Limits,
        batch: &Batch,
        rows: &[Range<usize>],
    ) {
        let mut row = 0;
        let mut runs = Vec::new();
        for (i, sequence) in batch.sequences.iter().enumerate() {
            runs.extend(runs_of(sequence, i, row, sees_images));
            row += sequence.input.len();
        }
        let room = memory::partials(limits.max_batch_tokens);
        let shares = Shares::in_parts(shape, &runs, rows, room);
        let ShareArrays { single, tiles, groups, merges } = &self.pools[pool].shares;
        for (items, shared) in [(single, &shares.single), (tiles, &shares.tiles)] {
            items.as_ref().expect("a frame has both").write(0, shared);
        }
        groups.write(0, &shares.groups(shape.num_kv_heads));
        merges.write(0, &shares.merges);
        self.parts[pool] = shares.parts;
    }

    /// The arrays of the whole step for the layers of a pool.
    pub fn whole(&self, pool: usize) -> &StepArrays {
        &self.pools[pool]
    }

    /// The parts that [`Frame::share_out`] made for the layers of a pool.
    pub fn parts(&self, pool: usize) -> &[kernels::PartItems] {
        &self.parts[pool]
    }

    /// The arrays of a step of `tokens` tokens, or of one part of its rows that [`Frame::share_out`] made.
    pub fn arrays(&self, pool: usize, tokens: usize, rows: Option<&Range<usize>>) -> StepArrays {
        let (arrays, parts) = (self.whole(pool), self.parts(pool));
        let mut arrays = match rows {
            None => arrays.clone(),
            Some(rows) => {
                let index = parts.iter().position(|part| part.rows == *rows).expect("a part of the step");
                arrays.part(&parts[index], index)
            }
        };
        if tokens == 1 {
            arrays.shares.tiles = None;
        }
        arrays
    }

    /// The log probabilities of a row. `None` if they were not requested, or if no id was drawn.
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

    /// Writes the masks of the step's draws, before the draws are submitted. Panics if the size of a mask does not
    /// match the vocabulary.
    pub fn fill_masks(&self, limits: &Limits, masks: &[Arc<[u32]>]) {
        let words = mask_words(limits.vocab_size);
        for (row, mask) in (0..).zip(masks) {
            assert_eq!(mask.len(), words, "words of a mask");
            self.draws.masks.write(4 * row * words as u64, mask);
        }
    }

    /// The results of the step. The caller has waited for the step.
    pub fn results(&self) -> Sampled {
        let mut ids = vec![0u32; self.logprobs.len()];
        self.draws.ids.read(0, &mut ids);
        let logprobs = (0..).zip(&self.logprobs).zip(&ids);
        let logprobs = logprobs.map(|((row, wanted), id)| self.read_logprobs(row, *wanted, *id)).collect();
        let pooled = (0..self.sums).map(|row| {
            let mut sums = vec![0f32; self.pooled.width];
            self.pooled.rows(&(row..row + 1)).buffer.read(0, &mut sums);
            sums
        });
        let ids = ids.into_iter().map(|id| (id != NO_TOKEN).then_some(id)).collect();
        let mut used_experts = [0u32];
        self.used_experts.read(0, &mut used_experts);
        Sampled { ids, logprobs, pooled: pooled.collect(), used_experts: used_experts[0] }
    }
}

/// Panics if the images of a sequence break the limits, which is a bug of the caller.
fn check_images(limits: &Limits, sequence: &BatchSequence) {
    let mut end = 0;
    for span in &sequence.images {
        let ImageLimits { tokens, slots, .. } = limits.images.expect("an image for a model that takes some");
        assert!(span.start >= end && span.tokens > 0, "images of a sequence overlap");
        assert!((span.slot as usize) < slots && span.row + span.tokens <= tokens, "the rows of an image");
        assert!(span.row == 0 || span.start == 0, "an input that lacks the beginning of an image");
        end = span.start + span.tokens;
    }
    assert!(end <= sequence.input.len(), "an image after the input");
}

/// The runs of a sequence whose first token is in `row`: its images, and the texts between them. If the tokens of an image
/// see only those before them (`sees_images`), an image is as a text.
fn runs_of(sequence: &BatchSequence, index: usize, row: usize, sees_images: bool) -> Vec<Run> {
    let run = |tokens: Range<usize>, is_image: bool| Run {
        row: row + tokens.start,
        start: sequence.start + tokens.start,
        tokens: tokens.len(),
        sequence: index,
        sees_to: is_image.then_some(sequence.start + tokens.end - 1),
    };
    let (mut runs, mut end) = (Vec::new(), 0);
    for &ImageSpan { start, tokens, .. } in sequence.images.iter().filter(|_| sees_images) {
        runs.extend([run(end..start, false), run(start..start + tokens, true)]);
        end = start + tokens;
    }
    runs.push(run(end..sequence.input.len(), false));
    runs.retain(|run| run.tokens > 0);
    runs
}

fn share_arrays(input: &Buffer, limits: &Limits) -> ShareArrays {
    let mut offset = 0;
    let [single, tiles, groups, merges] = memory::shares_bytes(limits).map(|bytes| {
        offset += bytes;
        input.slice(offset - bytes, bytes)
    });
    ShareArrays { single: Some(single), tiles: Some(tiles), groups, merges }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_padded_to_few_numbers_of_tokens() {
        for tokens in 1..=8192 {
            let filled = padded_tokens(tokens, 8192);
            assert!(filled >= tokens && filled - tokens <= 7.max(tokens / 8), "{tokens}: {filled}");
            assert_eq!(padded_tokens(tokens, tokens), tokens, "never more than a step holds");
        }
        let numbers: std::collections::BTreeSet<_> =
            (1..=256).map(|tokens| padded_tokens(tokens, 256)).collect();
        assert_eq!(numbers.len(), 31);
    }

    #[test]
    fn the_rows_read_after_the_layers_are_those_of_draws_and_sums() {
        let read = |rows: &[u32], pooled: &[(usize, usize)]| {
            let pooling = pooled.iter().map(|&(first, end)| PoolRequest {
                rows: first..end,
                slot: 0,
                fresh: true,
                last: true,
            });
            let outputs =
                StepOutputs { rows: rows.to_vec(), pooling: pooling.collect(), ..StepOutputs::default() };
            outputs.rows_read()
        };
        assert_eq!(read(&[], &[]), 0..0);
        assert_eq!(read(&[511], &[]), 511..512);
        assert_eq!(read(&[7, 3, 4], &[]), 3..8);
        assert_eq!(read(&[], &[(2, 9)]), 2..9);
        assert_eq!(read(&[1], &[(4, 9), (9, 12)]), 1..12);
    }
}
