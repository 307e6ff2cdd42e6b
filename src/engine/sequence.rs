//! The scheduler's state of one prompt and its answer: ids, lengths, blocks and limits.

use std::sync::Arc;
use std::time::Duration;

use super::answer::{Ended, FinishReason};
use super::block_manager::BlockTable;
use super::error::EngineError;
use super::mask::{PendingMask, Restriction, SharedMask};
use super::request::{Priority, PromptImage, Request};
use super::speculation::{Adaptive, Drafter, Drafts, Lookup};
use crate::model::{Draw, Logprobs, SamplingParams};

/// The id of an answer inside the engine. Ids are never reused.
pub type SequenceId = u64;

/// An additional answer to a prompt (`n > 1`). It shares the prompt with the first answer, and has its own seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fork {
    pub id: SequenceId,
    pub seed: u64,
}

/// What is known of a sequence's text on disk, before the sequence starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum OnDisk {
    #[default]
    Unknown,
    /// The disk has a part of it, which is read after the text of another sequence: this many bytes. `computing` is the
    /// predicted time of computing that part.
    Waits { bytes: u64, computing: Option<Duration> },
    /// The sequence may start: what the disk has of it is read, or not worth a read.
    Settled,
}

impl OnDisk {
    pub(super) fn waits(self) -> bool {
        matches!(self, OnDisk::Waits { .. })
    }
}

/// A prompt and its answer.
///
/// After the first submission, `computed <= submitted < tokens + drawn`. There are two exceptions: a sequence with
/// draft tokens in flight, and a pooled prompt, which ends when all of it is submitted.
#[derive(Debug)]
pub struct Sequence {
    pub id: SequenceId,
    /// The id that the sequence began with, by which steps in flight refer to it. `id` changes if the answer with that
    /// id is removed and a fork takes its place.
    pub(super) begun_as: SequenceId,
    /// The request, with the images of the prompt. Its prompt, mask and additional seeds are moved to `tokens`, `mask`
    /// and `forks`. A pooled prompt bypasses the prefix cache: the cache has no hidden states, and an embedded text is
    /// rarely the beginning of a chat.
    pub request: Request,
    /// The prompt, and the ids of the answer that are known.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// The limit of this answer, which the context may have lowered.
    pub max_tokens: usize,
    pub mask: Option<SharedMask>,
    /// Additional answers, which become separate sequences when the prompt is submitted.
    pub forks: Vec<Fork>,
    /// The number of the sequence in the order of arrival. Forks have the number of their parent.
    pub(super) arrival: u64,
    /// The device slot, while the sequence runs.
    pub(super) slot: Option<u32>,
    /// Slots that are reserved for `forks`.
    pub(super) fork_slots: Vec<u32>,
    pub(super) table: BlockTable,
    /// The number of positions whose keys and values the committed steps have computed.
    pub(super) computed: usize,
    /// The number of positions that are computed when the submitted steps are done.
    pub(super) submitted: usize,
    /// The number of ids that the submitted steps will draw.
    pub(super) drawn: usize,
    /// Whether draft tokens are in flight. The number of ids that such a step draws is unknown until it is done.
    pub(super) speculating: bool,
    /// Time of the dropped mask that is not yet charged to the client.
    pub(super) mask_time: Duration,
    pub(super) lookup: Lookup,
    /// How many tokens to request from the draft model.
    pub(super) draft_length: Adaptive,
    /// The draft model's tokens for the next scheduled step. While there are any, no step of the sequence is in flight.
    pub(super) draft_tokens: Vec<u32>,
    /// How many draft tokens were proposed, and how many were accepted.
    pub(super) drafts: Drafts,
    /// The known log probabilities of the prompt's ids, from the second id on.
    pub(super) scores: Vec<Logprobs>,
    /// Number of preemptions and restarts.
    pub(super) preemptions: u32,
    /// Changes when the results of steps in flight are no longer wanted: their shares of the sequence are dropped.
    pub(super) life: u32,
    /// The number of tokens that the prefix cache had when the sequence was first admitted.
    pub(super) cached: Option<usize>,
    /// The number of tokens that the prefix cache had when the sequence was last admitted.
    pub(super) found: usize,
    /// Whether the sequence was looked up on disk since it last lost its blocks, and how often.
    pub(super) on_disk: OnDisk,
    pub(super) lookups: u32,
    /// The number of tokens that the prefix cache had from the disk when the sequence was last admitted, until a step of
    /// the sequence is committed.
    pub(super) restored: usize,
    /// The number of the scheduler's step in which the sequence last got tokens, or arrived.
    pub(super) last_step: u64,
    /// Whether the sequence is permanently interactive, because it was overdue or often preempted.
    pub(super) promoted: bool,
    /// Set if the device was lost while it computed the sequence: how many positions must be computed before the
    /// sequence may share a step with others again.
    pub(super) suspect: Option<usize>,
}

impl Sequence {
    /// The answers to a request, each of at most `max_tokens` ids. The first has the id `id`, and the others have the ids
    /// after it.
    pub fn new(id: SequenceId, mut request: Request, max_tokens: usize) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        let seeds = std::mem::take(&mut request.more_seeds);
        Self {
            id,
            begun_as: id,
            prompt_len: tokens.len(),
            tokens,
            max_tokens,
            mask: request.mask.take().map(SharedMask::new),
            forks: (id + 1..).zip(seeds).map(|(id, seed)| Fork { id, seed }).collect(),
            request,
            arrival: 0,
            slot: None,
            fork_slots: Vec::new(),
            table: BlockTable::default(),
            computed: 0,
            submitted: 0,
            drawn: 0,
            speculating: false,
            mask_time: Duration::ZERO,
            lookup: Lookup::default(),
            draft_length: Adaptive::default(),
            draft_tokens: Vec::new(),
            drafts: Drafts::default(),
            scores: Vec::new(),
            preemptions: 0,
            life: 0,
            cached: None,
            found: 0,
            on_disk: OnDisk::default(),
            lookups: 0,
            restored: 0,
            last_step: 0,
            promoted: false,
            suspect: None,
        }
    }

    /// The number of known ids of the answer, including a stop id.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// A description for the log, without any of its tokens.
    pub(super) fn state(&self) -> String {
        let class = match self.class() {
            Priority::Interactive => "interactive",
            Priority::Background => "background",
        };
        let kinds = [
            (self.is_masked(), ", masked"),
            (self.request.prompt_logprobs.is_some(), ", scored"),
            (self.request.pooling, ", pooled"),
            (self.speculating, ", speculating"),
        ];
        let kinds: String = kinds.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect();
        format!(
            "sequence {}, {class}{kinds}, {} + {} of {} tokens, {} computed, {} submitted, {} drawn, {:?} blocks, \
             {} forks, {} times preempted, last in step {}",
            self.id,
            self.prompt_len,
            self.generated(),
            self.max_tokens,
            self.computed,
            self.submitted,
            self.drawn,
            self.table.blocks().iter().map(|list| list.ids.len()).collect::<Vec<_>>(),
            self.forks.len(),
            self.preemptions,
            self.last_step,
        )
    }

    /// The class with which the sequence is scheduled. For its blocks in the cache, `priority` counts instead.
    pub(super) fn class(&self) -> Priority {
        if self.promoted { Priority::Interactive } else { self.request.priority }
    }

    /// The sequence's position in the line for blocks: the sequence with the largest position is preempted first.
    /// Suspects come before all others.
    pub(super) fn line(&self) -> (bool, Priority, u64, SequenceId) {
        (self.suspect.is_none(), self.class(), self.arrival, self.id)
    }

    /// Whether the sequence got no tokens for more than `patience` steps.
    pub(super) fn is_overdue(&self, step: u64, patience: u64) -> bool {
        step - self.last_step > patience
    }

    /// Counts the next `len` tokens and `draft_tokens` draft tokens after them as submitted.
    pub(super) fn submit(&mut self, len: usize, draft_tokens: usize) {
        self.submitted += len + draft_tokens;
        self.speculating = draft_tokens > 0;
        self.drafts.proposed += draft_tokens;
    }

    /// Resets what was computed and submitted, because the sequence lost its blocks.
    pub(super) fn start_over(&mut self) {
        (self.found, self.computed, self.submitted, self.drawn) = (0, 0, 0, 0);
        (self.on_disk, self.lookups, self.restored) = (OnDisk::default(), 0, 0);
        self.speculating = false;
        self.draft_tokens.clear();
        self.scores.clear();
        self.preemptions += 1;
        self.life += 1;
    }

    /// Turns a fork into a separate sequence, with one of the slots reserved for forks and the blocks of `table`.
    pub(super) fn fork(&mut self, fork: Fork, table: BlockTable) -> Sequence {
        // The parent scores the prompt.
        let request = Request { prompt: self.tokens.clone(), prompt_logprobs: None, ..self.request.clone() };
        let mut child = Sequence::new(fork.id, request, self.max_tokens);
        child.request.seed = fork.seed;
        child.mask.clone_from(&self.mask);
        child.arrival = self.arrival;
        child.slot = Some(self.fork_slots.pop().expect("a slot is reserved for each fork"));
        child.table = table;
        (child.found, child.computed, child.submitted) = (self.found, self.computed, self.submitted);
        child.cached = self.cached;
        child.last_step = self.last_step;
        child.promoted = self.promoted;
        child
    }

    /// Appends the id drawn after the last token; `None` means that the logits were not finite. Returns the id for the
    /// client, and the end if this id ends the answer.
    pub(super) fn take(&mut self, drawn: Option<u32>) -> (Option<u32>, Option<Ended>) {
        let Some(id) = drawn else { return (None, Some(Err(EngineError::NotFinite))) };
        self.tokens.push(id);
        if self.request.sampling.stop_token_ids.contains(&id) {
            return (None, Some(Ok(FinishReason::Stop(id))));
        }
        let answer = &self.tokens[self.prompt_len..];
        if self.mask.as_mut().is_some_and(|mask| mask.update(answer) == Restriction::Over) {
            self.mask_time += self.mask.take().map_or(Duration::ZERO, |mask| mask.take_time());
        }
        let all = self.generated() == self.max_tokens;
        (Some(id), all.then_some(Ok(FinishReason::Length)))
    }

    /// Whether a mask restricts the next id.
    pub(super) fn is_masked(&self) -> bool {
        self.mask.as_ref().is_some_and(SharedMask::is_binding)
    }

    /// Discards the ids that steps in flight draw, because a mask restricts the first of them now. The next step computes
    /// the last token again, and draws under the mask.
    pub(super) fn draw_again(&mut self) {
        self.submitted = self.computed;
        self.drawn = 0;
        self.life += 1;
    }

    /// The time that the sequence's masks took since the last call.
    pub(super) fn take_mask_time(&mut self) -> Duration {
        let latest = self.mask.as_ref().map_or(Duration::ZERO, SharedMask::take_time);
        std::mem::take(&mut self.mask_time) + latest
    }

    /// The number of tokens that must be submitted before the next id is drawn. 0 if the sequence must first wait for
    /// the results of a step in flight, or if all its ids are drawn.
    pub(super) fn pending(&self) -> usize {
        // A mask can only be computed from known ids.
        let masked = self.is_masked() && self.drawn > 0;
        if self.speculating || masked || self.generated() + self.drawn == self.max_tokens {
            return 0;
        }
        self.tokens.len() + self.drawn - self.submitted
    }

    /// The number of ids before the next tokens that the history of the slot lacks, because they came from the prefix
    /// cache, and no step has written tokens to the slot since then. 0 without penalties, which need the history.
    pub(super) fn missing_history(&self) -> usize {
        let is_fresh = self.submitted == self.found;
        if is_fresh && self.request.sampling.penalizes() { self.submitted } else { 0 }
    }

    /// The images of the prompt that end after `position`, in their order.
    pub(super) fn images_after(&self, position: usize) -> impl Iterator<Item = &PromptImage> {
        self.request.images.iter().filter(move |image| position < image.positions.end)
    }

    /// The image that would be split if the tokens before `position` were computed without the others.
    pub(super) fn image_split_at(&self, position: usize) -> Option<&PromptImage> {
        self.request.images.iter().find(|image| image.is_split_at(position))
    }

    /// The number of next tokens after which an id of the prompt must be scored.
    pub(super) fn unscored(&self) -> usize {
        let is_scored = self.request.prompt_logprobs.is_some() && !self.request.pooling;
        if is_scored { (self.prompt_len - 1).saturating_sub(self.submitted) } else { 0 }
    }

    /// Whether the rest of the prompt must be computed even if the prefix cache has it.
    pub(super) fn bypasses_cache(&self) -> bool {
        self.request.pooling || self.unscored() > 0
    }

    /// A draw that scores the prompt's id at `position`. It follows token `token` of sequence `sequence` of a batch. A
    /// bias forces the id, so that the draw returns its log probability.
    pub(super) fn score(&self, sequence: usize, token: usize, position: usize) -> Draw {
        /// A bias that is larger than any logit.
        const FORCED: f32 = 1e30;
        let logit_bias = vec![(self.tokens[position], FORCED)];
        Draw {
            sequence,
            token,
            slot: self.slot.expect("a running sequence has a slot"),
            params: Arc::new(SamplingParams { logit_bias, ..SamplingParams::GREEDY }),
            seed: 0,
            prompt_len: self.prompt_len,
            masked: false,
            logprobs: self.request.prompt_logprobs,
        }
    }

    /// Stores the log probability of the prompt's id at `position`.
    pub(super) fn take_score(
        &mut self,
        position: usize,
        drawn: Option<u32>,
        logprobs: Option<&Logprobs>,
    ) -> Result<(), EngineError> {
        let (Some(drawn), Some(logprobs)) = (drawn, logprobs) else { return Err(EngineError::NotFinite) };
        let mut logprobs = logprobs.clone();
        if drawn != self.tokens[position] {
            logprobs.drawn = f32::NEG_INFINITY; // a bias cannot force an id that the model can never draw
        }
        self.scores.push(logprobs);
        Ok(())
    }

    /// The mean of the prompt's hidden states, computed from their sums, and the end of the sequence.
    pub(super) fn take_pooled(&self, sums: &[f32]) -> (Option<Vec<f32>>, Ended) {
        let mean: Vec<f32> = sums.iter().map(|sum| sum / self.prompt_len as f32).collect();
        match mean.iter().all(|x| x.is_finite()) {
            true => (Some(mean), Ok(FinishReason::Length)),
            false => (None, Err(EngineError::NotFinite)),
        }
    }

    /// The log probabilities of the prompt's ids. Only the first call returns them.
    pub(super) fn take_scores(&mut self) -> Option<Vec<Logprobs>> {
        self.request.prompt_logprobs.take().map(|_| std::mem::take(&mut self.scores))
    }

    pub(super) fn adaptive(&mut self, drafter: Drafter) -> &mut Adaptive {
        match drafter {
            Drafter::Lookup => &mut self.lookup.adaptive,
            Drafter::Model => &mut self.draft_length,
        }
    }

    /// The mask of the next id, if one restricts it.
    pub(super) fn pending_mask(&self) -> Option<PendingMask> {
        let binding = self.mask.as_ref().filter(|mask| mask.is_binding());
        binding.map(|mask| mask.after(&self.tokens[self.prompt_len..]))
    }

    /// The draw of an id of the answer. It follows token `token` of sequence `sequence` of a batch.
    pub(super) fn draw(&self, sequence: usize, token: usize) -> Draw {
        Draw {
            sequence,
            token,
            slot: self.slot.expect("a running sequence has a slot"),
            params: Arc::clone(&self.request.sampling),
            seed: self.request.seed,
            prompt_len: self.prompt_len,
            masked: self.is_masked(),
            logprobs: self.request.sampling.logprobs,
        }
    }
}
