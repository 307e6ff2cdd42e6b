//! One prompt and its answer, as the scheduler sees it: ids, lengths, blocks and limits.

use std::sync::Arc;
use std::time::Duration;

use super::answer::{Ended, FinishReason};
use super::block_manager::BlockTable;
use super::error::EngineError;
use super::mask::{PendingMask, SharedMask};
use super::request::{CacheSalt, ClientId, Priority};
use super::speculation::{Adaptive, Drafter, Drafts, Lookup};
use crate::model::{Draw, Logprobs, SamplingParams};

/// The id of an answer inside the engine; never reused.
pub type SequenceId = u64;

/// A further answer to a prompt (`n > 1`). It shares the prompt with the first answer, and has a seed of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fork {
    pub id: SequenceId,
    pub seed: u64,
}

/// A prompt and its answer.
///
/// Once anything was submitted, `computed <= submitted < tokens + drawn`. There are two exceptions: a sequence with
/// draft tokens in flight, and a prompt that is pooled, which ends when all of it is submitted.
#[derive(Debug)]
pub struct Sequence {
    pub id: SequenceId,
    /// The id that the sequence began with, which steps under way know. If the answer of that id is removed, a fork
    /// takes its place, and `id` changes.
    pub(super) begun_as: SequenceId,
    pub client: ClientId,
    pub priority: Priority,
    pub cache_salt: CacheSalt,
    /// The prompt, and the ids of the answer that are known.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// How the ids are drawn; forks share the parameters.
    pub sampling: Arc<SamplingParams>,
    pub seed: u64,
    pub max_tokens: usize,
    pub mask: Option<SharedMask>,
    /// As [`SamplingParams::logprobs`], for the ids of the prompt but the first. Forks leave these to their parent.
    pub prompt_logprobs: Option<usize>,
    /// Asks for the sum of the prompt's hidden states in place of an answer. Such a prompt bypasses the prefix cache:
    /// the cache holds no hidden states, and an embedded text is rarely the beginning of a chat.
    pub pooling: bool,
    /// Further answers, which become sequences of their own when the prompt is submitted.
    pub forks: Vec<Fork>,
    /// The number of the sequence in the order of arrival; forks have their parent's.
    pub(super) arrival: u64,
    /// The device slot, while the sequence runs.
    pub(super) slot: Option<u32>,
    /// Slots that are kept for `forks`.
    pub(super) fork_slots: Vec<u32>,
    pub(super) table: BlockTable,
    /// The number of positions whose keys and values the committed steps have computed.
    pub(super) computed: usize,
    /// The number of positions that are computed once the submitted steps are done.
    pub(super) submitted: usize,
    /// The number of ids that the submitted steps will draw.
    pub(super) drawn: usize,
    /// Whether draft tokens are in flight. How many ids such a step draws is known when it is done.
    pub(super) speculating: bool,
    /// Time of the mask that the sequence has dropped, if that time is not charged yet.
    pub(super) mask_time: Duration,
    pub(super) lookup: Lookup,
    /// How many ids to ask the draft model for.
    pub(super) draft_length: Adaptive,
    /// The draft model's tokens for the next scheduled step. No step of the sequence is in flight while there are any.
    pub(super) draft_tokens: Vec<u32>,
    /// How many draft tokens were proposed so far, and how many were accepted.
    pub(super) drafts: Drafts,
    /// Log probabilities of the prompt's ids from the second on, as far as they are known.
    pub(super) scores: Vec<Logprobs>,
    /// Counts preemptions. A share of a step that was submitted in an earlier life is dropped.
    pub(super) life: u32,
    /// The number of tokens that the prefix cache had when the sequence was first admitted.
    pub(super) cached: Option<usize>,
    /// Whether no step since the admission has written tokens to the sequence's slot.
    pub(super) fresh: bool,
    /// The number of the scheduler's step in which the sequence last got tokens, or arrived.
    pub(super) last_step: u64,
    /// Whether the sequence waited so long that it counts as interactive for good.
    pub(super) raised: bool,
    /// Set if the device was lost with the sequence in a step: how many positions must be computed again before the
    /// sequence shares a step with others.
    pub(super) suspect: Option<usize>,
}

impl Sequence {
    /// An answer of at most `max_tokens` ids to `prompt`: of interactive priority, for client 0, with seed 0, without a
    /// salt, and in one version.
    pub fn new(
        id: SequenceId,
        prompt: Vec<u32>,
        sampling: impl Into<Arc<SamplingParams>>,
        max_tokens: usize,
    ) -> Self {
        Self {
            id,
            begun_as: id,
            client: 0,
            priority: Priority::default(),
            cache_salt: CacheSalt::default(),
            prompt_len: prompt.len(),
            tokens: prompt,
            sampling: sampling.into(),
            seed: 0,
            max_tokens,
            mask: None,
            prompt_logprobs: None,
            pooling: false,
            forks: Vec::new(),
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
            life: 0,
            cached: None,
            fresh: false,
            last_step: 0,
            raised: false,
            suspect: None,
        }
    }

    /// The number of ids of the answer that are known, a stop id included.
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
            (self.mask.is_some(), ", masked"),
            (self.prompt_logprobs.is_some(), ", scored"),
            (self.pooling, ", pooled"),
            (self.speculating, ", speculating"),
        ];
        let kinds: String = kinds.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect();
        format!(
            "sequence {}, {class}{kinds}, {} + {} of {} tokens, {} computed, {} submitted, {} drawn, {} + {} blocks, \
             {} forks, {} times preempted, got on in step {}",
            self.id,
            self.prompt_len,
            self.generated(),
            self.max_tokens,
            self.computed,
            self.submitted,
            self.drawn,
            self.table.full().len(),
            self.table.sliding().1.count(),
            self.forks.len(),
            self.life,
            self.last_step,
        )
    }

    /// The class by which the sequence is scheduled. Its blocks in the cache keep the class of its priority.
    pub(super) fn class(&self) -> Priority {
        if self.raised { Priority::Interactive } else { self.priority }
    }

    /// The place of the sequence in the line for blocks: the sequence with the larger place is preempted first. All
    /// others wait for a suspect.
    pub(super) fn line(&self) -> (bool, Priority, u64, SequenceId) {
        (self.suspect.is_none(), self.class(), self.arrival, self.id)
    }

    /// Whether the sequence got no tokens for more than `patience` steps.
    pub(super) fn is_overdue(&self, step: u64, patience: u64) -> bool {
        step - self.last_step > patience
    }

    /// Counts the next `len` tokens as submitted, and as many `draft_tokens` behind them.
    pub(super) fn submit(&mut self, len: usize, draft_tokens: usize) {
        self.fresh = false;
        self.submitted += len + draft_tokens;
        self.speculating = draft_tokens > 0;
        self.drafts.proposed += draft_tokens;
    }

    /// Forgets what was computed and submitted, because the sequence lost its blocks.
    pub(super) fn start_over(&mut self) {
        (self.computed, self.submitted, self.drawn) = (0, 0, 0);
        self.speculating = false;
        self.draft_tokens.clear();
        self.scores.clear();
        self.life += 1;
    }

    /// Makes a fork a sequence of its own, with one of the slots kept for forks, and the blocks of `table`.
    pub(super) fn fork(&mut self, fork: Fork, table: BlockTable) -> Sequence {
        let sampling = Arc::clone(&self.sampling);
        let mut child = Sequence::new(fork.id, self.tokens.clone(), sampling, self.max_tokens);
        child.seed = fork.seed;
        child.client = self.client;
        child.priority = self.priority;
        child.cache_salt = self.cache_salt.clone();
        child.mask.clone_from(&self.mask);
        child.arrival = self.arrival;
        child.slot = Some(self.fork_slots.pop().expect("a slot was kept for each fork"));
        child.table = table;
        (child.computed, child.submitted) = (self.computed, self.submitted);
        child.cached = self.cached;
        child.last_step = self.last_step;
        child.raised = self.raised;
        child
    }

    /// Takes in the id drawn behind the last token, `None` if the logits were not finite. Returns the id for the
    /// reader, and the end if the id ends the answer.
    pub(super) fn take(&mut self, drawn: Option<u32>) -> (Option<u32>, Option<Ended>) {
        let Some(id) = drawn else { return (None, Some(Err(EngineError::NotFinite))) };
        self.tokens.push(id);
        if self.sampling.stop_token_ids.contains(&id) {
            return (None, Some(Ok(FinishReason::Stop(id))));
        }
        let answer = &self.tokens[self.prompt_len..];
        if self.mask.as_ref().is_some_and(|mask| mask.is_free(answer)) {
            self.mask_time += self.mask.take().map_or(Duration::ZERO, |mask| mask.take_time());
        }
        let all = self.generated() == self.max_tokens;
        (Some(id), all.then_some(Ok(FinishReason::Length)))
    }

    /// The time that the sequence's masks took since the last call.
    pub(super) fn take_mask_time(&mut self) -> Duration {
        let latest = self.mask.as_ref().map_or(Duration::ZERO, SharedMask::take_time);
        std::mem::take(&mut self.mask_time) + latest
    }

    /// The number of tokens that the next steps must process before the sequence yields an id; 0 if it must wait for an
    /// id under way.
    pub(super) fn pending(&self) -> usize {
        // A mask is computed from known ids.
        let masked = self.mask.is_some() && self.drawn > 0;
        if self.speculating || masked || self.generated() + self.drawn == self.max_tokens {
            return 0;
        }
        self.tokens.len() + self.drawn - self.submitted
    }

    /// The number of ids before the next tokens that penalties count and the slot's history lacks, because the prefix
    /// cache had them.
    pub(super) fn unseen(&self) -> usize {
        if self.fresh && self.sampling.penalizes() { self.submitted } else { 0 }
    }

    /// The number of next tokens that have an id of the prompt behind them that is to be scored.
    pub(super) fn unscored(&self) -> usize {
        let is_scored = self.prompt_logprobs.is_some() && !self.pooling;
        if is_scored { (self.prompt_len - 1).saturating_sub(self.submitted) } else { 0 }
    }

    /// Whether the rest of the prompt must be computed even if the prefix cache has it.
    pub(super) fn is_computed_afresh(&self) -> bool {
        self.pooling || self.unscored() > 0
    }

    /// A draw that scores the prompt's id at `position`, behind a token of the `sequence`-th of a batch. A bias forces
    /// the id, so that its probability comes back.
    pub(super) fn score(&self, sequence: usize, token: usize, position: usize) -> Draw {
        /// A bias that exceeds any logit.
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
            logprobs: self.prompt_logprobs,
        }
    }

    /// Takes in the log probability of the prompt's id at `position`.
    pub(super) fn take_score(
        &mut self,
        position: usize,
        drawn: Option<u32>,
        logprobs: Option<&Logprobs>,
    ) -> Result<(), EngineError> {
        let (Some(drawn), Some(logprobs)) = (drawn, logprobs) else { return Err(EngineError::NotFinite) };
        let mut logprobs = logprobs.clone();
        if drawn != self.tokens[position] {
            logprobs.drawn = f32::NEG_INFINITY; // no bias can force an id of no text
        }
        self.scores.push(logprobs);
        Ok(())
    }

    /// The mean of the prompt's hidden states from their sums, and the end of the sequence.
    pub(super) fn take_pooled(&self, sums: &[f32]) -> (Option<Vec<f32>>, Ended) {
        let mean: Vec<f32> = sums.iter().map(|sum| sum / self.prompt_len as f32).collect();
        match mean.iter().all(|x| x.is_finite()) {
            true => (Some(mean), Ok(FinishReason::Length)),
            false => (None, Err(EngineError::NotFinite)),
        }
    }

    /// The log probabilities of the prompt's ids; only the first call returns them.
    pub(super) fn take_scores(&mut self) -> Option<Vec<Logprobs>> {
        self.prompt_logprobs.take().map(|_| std::mem::take(&mut self.scores))
    }

    pub(super) fn adaptive(&mut self, drafter: Drafter) -> &mut Adaptive {
        match drafter {
            Drafter::Lookup => &mut self.lookup.adaptive,
            Drafter::Model => &mut self.draft_length,
        }
    }

    /// The mask of the next id, if the sequence has masks.
    pub(super) fn pending_mask(&self) -> Option<PendingMask> {
        self.mask.as_ref().map(|mask| mask.behind(&self.tokens[self.prompt_len..]))
    }

    /// The draw of an id of the answer, behind a token of the `sequence`-th of a batch.
    pub(super) fn draw(&self, sequence: usize, token: usize) -> Draw {
        Draw {
            sequence,
            token,
            slot: self.slot.expect("a running sequence has a slot"),
            params: Arc::clone(&self.sampling),
            seed: self.seed,
            prompt_len: self.prompt_len,
            masked: self.mask.is_some(),
            logprobs: self.sampling.logprobs,
        }
    }
}
