//! One step: the arrays for the runner, the sequences' shares, and the builder of both.

use std::ops::Range;

use rayon::prelude::*;

use crate::engine::answer::Ended;
use crate::engine::image_slots::{ImageSlots, TakenSlot};
use crate::engine::mask::PendingMask;
use crate::engine::pace::Load;
use crate::engine::request::PromptImage;
use crate::engine::sequence::{Sequence, SequenceId};
use crate::engine::speculation::{Drafter, Drafts};
use crate::model::{
    Batch, BatchSequence, HistoryCopy, ImageSpan, Input, Limits, Logprobs, Pooling, Runner, RunnerError,
    Sampling, Ticket, longest_chunk,
};

/// A step: the arrays for the runner, and the shares of the sequences in it.
#[derive(Debug, Default)]
pub struct Step {
    pub batch: Batch,
    pub sampling: Sampling,
    /// The images that are encoded before the step is submitted, with their slots.
    pub encodings: Vec<(u32, PromptImage)>,
    /// One mask for each masked draw, in the order of the draws.
    pub(in crate::engine) masks: Vec<PendingMask>,
    pub load: Load,
    /// One share for each sequence of the batch, and one for each fork that draws its first id in the step.
    pub shares: Vec<SequenceShare>,
}

impl Step {
    /// Encodes the images of the step that no slot has, and submits the step with its masks.
    pub fn submit(&self, runner: &mut dyn Runner) -> Result<Ticket, RunnerError> {
        self.encode_images(runner)?;
        self.submit_encoded(runner)
    }

    /// Encodes the images of the step that no slot has. Each step does this once, in the order of the steps.
    pub(in crate::engine) fn encode_images(&self, runner: &mut dyn Runner) -> Result<(), RunnerError> {
        self.encodings
            .iter()
            .try_for_each(|(slot, image)| runner.encode_image(*slot, image.size, &image.pixels))
    }

    /// The number of images of the step whose embeddings a slot had already, for each share that has the image.
    pub(in crate::engine) fn image_hits(&self) -> usize {
        let spans: usize = self.batch.sequences.iter().map(|sequence| sequence.images.len()).sum();
        spans - self.encodings.len()
    }

    /// Submits the step to the runner, and then the masks of its draws. The host computes the masks while the device
    /// computes the layers.
    pub(in crate::engine) fn submit_encoded(&self, runner: &mut dyn Runner) -> Result<Ticket, RunnerError> {
        let ticket = runner.submit(&self.batch, &self.sampling)?;
        if !self.masks.is_empty() {
            // A grammar takes long for a mask, so the masks are computed in parallel.
            let words: Vec<_> = self.masks.par_iter().map(PendingMask::words).collect();
            runner.masks(&ticket, &words)?;
        }
        Ok(ticket)
    }

    /// The share for whose prompt a coprocessor computes a part of the attention, if the runner has one with room for
    /// it. A coprocessor computes nothing for shares with draft tokens or images and for scored texts.
    pub(in crate::engine) fn shared_prompt(&self) -> Option<&SequenceShare> {
        let chunk = |share: &SequenceShare| share.is_prompt().then_some(share.tokens);
        longest_chunk(self.shares.iter().map(chunk)).map(|i| &self.shares[i])
    }
}

/// The part of a step that belongs to one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceShare {
    pub id: SequenceId,
    /// Copies of the sequence's fields, which identify the sequence of the share when the step is done.
    begun_as: SequenceId,
    life: u32,
    /// How many positions are computed when the step is done, without draft tokens.
    pub(super) end: usize,
    /// Number of tokens that the step computes for the sequence, including draft tokens. 0 for a fork, which draws
    /// after the tokens of its parent.
    pub(in crate::engine) tokens: usize,
    has_images: bool,
    pub(super) yields: Yields,
    pub(super) draft: DraftTokens,
}

/// The results of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Yields {
    /// No result but keys and values.
    Nothing,
    /// Log probabilities of the prompt's ids up to and including position [`SequenceShare::end`]: a range of
    /// [`Sampling::draws`].
    Scores(Range<usize>),
    /// Ids of the answer: the next id, and one more after each draft token. The number is the index of the first draw
    /// in [`Sampling::draws`].
    Ids(usize),
    /// The sums of a prompt's hidden states: the index in [`Sampled::pooled`](crate::model::Sampled::pooled).
    Pooled(usize),
}

/// The draft tokens of a share, in the order of their positions. The first is at position [`SequenceShare::end`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DraftTokens {
    pub(super) ids: Vec<u32>,
    pub(super) by: Drafter,
}

/// A result of a step for one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Output {
    pub id: SequenceId,
    /// The id for the client. `None` if the sampled id is a stop id.
    pub token: Option<u32>,
    /// Log probabilities of the sampled id, if requested.
    pub logprobs: Option<Logprobs>,
    /// Log probabilities of all ids of the prompt except the first, if requested. They are in the output of the
    /// answer's first id.
    pub prompt: Option<Vec<Logprobs>>,
    /// The mean of the prompt's hidden states, if requested.
    pub pooled: Option<Vec<f32>>,
    /// Set if the sequence ended. The scheduler has then removed it.
    pub end: Option<Ended>,
    /// Prompt tokens that the prefix cache had.
    pub cached_tokens: usize,
    pub drafts: Drafts,
}

/// A step under construction, and the room that is left in it.
pub(super) struct PendingStep {
    pub(super) step: Step,
    pub(super) tokens: usize,
    pub(super) draws: usize,
    /// How many more ids of histories the step may have.
    pub(super) history: usize,
    /// Whether the step must stay within the gap: a client waits for an id of the step, or for another engine, or an
    /// interactive request may arrive while the step runs.
    pub(super) keeps_gap: bool,
    /// Whether the step has a chunk of a prompt.
    pub(super) prefills: bool,
}

impl DraftTokens {
    pub(super) const NONE: Self = Self { ids: Vec::new(), by: Drafter::Lookup };
}

impl SequenceShare {
    /// Whether the share belongs to `sequence`. A share from before the sequence was preempted does not.
    pub(super) fn belongs_to(&self, sequence: &Sequence) -> bool {
        self.begun_as == sequence.begun_as && self.life == sequence.life
    }

    /// Whether the share is a chunk of a prompt that a coprocessor may compute: known tokens with at most one draw after
    /// them.
    fn is_prompt(&self) -> bool {
        let is_scored = matches!(&self.yields, Yields::Scores(draws) if draws.len() > 1);
        self.draft.ids.is_empty() && !is_scored && !self.has_images
    }
}

impl PendingStep {
    pub(super) fn new(limits: &Limits, keeps_gap: bool) -> Self {
        Self {
            step: Step::default(),
            tokens: limits.max_batch_tokens,
            draws: limits.max_draws,
            history: limits.max_context,
            keeps_gap,
            prefills: false,
        }
    }

    pub(super) fn has(&self, id: SequenceId) -> bool {
        self.step.shares.iter().any(|share| share.id == id)
    }

    /// Puts the next `len` tokens of a running sequence and then the draft tokens into the step. The step must have
    /// room for them, there must be slots for their images, and the sequence must have the blocks. Returns whether an
    /// id of the answer is drawn after the `len` tokens.
    pub(super) fn push(
        &mut self,
        sequence: &mut Sequence,
        len: usize,
        draft: DraftTokens,
        image_slots: &mut ImageSlots,
    ) -> bool {
        let (start, pending, missing) = (sequence.submitted, sequence.pending(), sequence.missing_history());
        let history = (missing > 0).then(|| sequence.tokens[..missing].to_vec());
        let input = if start + len <= sequence.tokens.len() {
            Input::Ids([&sequence.tokens[start..start + len], &draft.ids].concat())
        } else {
            assert!(
                len == 1 && start >= sequence.tokens.len(),
                "an unknown id must be the only token of its share"
            );
            Input::LastSampled
        };
        let draws_before = self.step.sampling.draws.len();
        let yields = self.add_draws(sequence, len, draft.ids.len());
        let images = self.take_slots(sequence, start..start + len, image_slots);
        let entry = BatchSequence { images, ..batch_entry(sequence, start, input, history) };
        self.step.batch.sequences.push(entry);
        let tokens = len + draft.ids.len();
        self.tokens -= tokens;
        self.draws -= self.step.sampling.draws.len() - draws_before;
        self.history -= missing;
        self.prefills |= pending > 1;
        self.step.load = self.step.load.with(start, tokens);
        sequence.submit(len, draft.ids.len());
        let draws = matches!(yields, Yields::Ids(_));
        self.share(sequence, start + len, tokens, yields, draft);
        draws
    }

    /// The images at some positions of a sequence, with slots. Those that no slot has are encoded before the step.
    fn take_slots(
        &mut self,
        sequence: &Sequence,
        positions: Range<usize>,
        image_slots: &mut ImageSlots,
    ) -> Vec<ImageSpan> {
        let images = sequence.images_after(positions.start);
        let images = images.take_while(|image| image.positions.start < positions.end);
        let spans = images.map(|image| {
            assert!(image.positions.end <= positions.end, "an image must not be split");
            let TakenSlot { slot, is_new } = image_slots.take(&image.hash).expect("there is a slot");
            if is_new {
                self.step.encodings.push((slot, image.clone()));
            }
            let first = image.positions.start.max(positions.start);
            ImageSpan {
                start: first - positions.start,
                tokens: image.positions.end - first,
                slot,
                row: first - image.positions.start,
            }
        });
        spans.collect()
    }

    /// Adds the draws and sums for the next `len` tokens of a sequence, before the sequence becomes the last one of the
    /// batch.
    fn add_draws(&mut self, sequence: &mut Sequence, len: usize, draft_tokens: usize) -> Yields {
        let index = self.step.batch.sequences.len();
        let Sampling { draws, pooling } = &mut self.step.sampling;
        let first = draws.len();
        let is_all = len == sequence.pending();
        if sequence.unscored() > 0 {
            let start = sequence.submitted;
            draws.extend((0..len).map(|token| sequence.score(index, token, start + token + 1)));
            Yields::Scores(first..draws.len())
        } else if sequence.request.pooling {
            let at = pooling.iter().filter(|pooling| pooling.last).count();
            pooling.push(Pooling { sequence: index, last: is_all });
            if is_all { Yields::Pooled(at) } else { Yields::Nothing }
        } else if is_all {
            draws.extend((0..=draft_tokens).map(|ahead| sequence.draw(index, len - 1 + ahead)));
            self.step.masks.extend(sequence.pending_mask());
            sequence.drawn += 1;
            Yields::Ids(first)
        } else {
            Yields::Nothing
        }
    }

    /// Adds the draw of a fork's first id after the last token of its parent. The parent must be the last sequence of
    /// the step.
    pub(super) fn push_fork(&mut self, parent: &Sequence, fork: &mut Sequence) {
        let own = self.step.batch.sequences.last().expect("the parent is in the step");
        let (index, token) = (self.step.batch.sequences.len() - 1, own.input.len() - 1);
        if fork.request.sampling.penalizes() {
            let copy = HistoryCopy { from: slot_of(parent), to: slot_of(fork), tokens: fork.submitted };
            self.step.batch.history_copies.push(copy);
        }
        let yields = Yields::Ids(self.step.sampling.draws.len());
        self.step.sampling.draws.push(fork.draw(index, token));
        self.step.masks.extend(fork.pending_mask());
        self.draws -= 1;
        fork.drawn = 1;
        self.share(fork, fork.submitted, 0, yields, DraftTokens::NONE);
    }

    fn share(&mut self, sequence: &Sequence, end: usize, tokens: usize, yields: Yields, draft: DraftTokens) {
        let &Sequence { id, begun_as, life, .. } = sequence;
        let has_images = self.step.batch.sequences.last().is_some_and(|entry| !entry.images.is_empty());
        let share = SequenceShare { id, begun_as, life, end, tokens, has_images, yields, draft };
        self.step.shares.push(share);
    }

    /// The step, or `None` if it has no sequence.
    pub(super) fn finish(self) -> Option<Step> {
        (!self.step.shares.is_empty()).then_some(self.step)
    }
}

fn slot_of(sequence: &Sequence) -> u32 {
    sequence.slot.expect("a running sequence has a slot")
}

/// The batch entry of a running sequence: `input` at positions `start..`, without images, and the blocks of the
/// sequence.
pub(super) fn batch_entry(
    sequence: &Sequence,
    start: usize,
    input: Input,
    history: Option<Vec<u32>>,
) -> BatchSequence {
    let blocks = sequence.table.blocks().to_vec();
    BatchSequence { slot: slot_of(sequence), start, input, blocks, images: Vec::new(), history }
}
