//! Decides what the next step computes: a synchronous state machine without clock, I/O or GPU.
//!
//! One cycle is [`Scheduler::schedule`] -> the step -> [`Scheduler::commit`], and a second step may be scheduled before
//! the first is committed: what that one draws goes on without the host. Steps are committed in their order.
//!
//! Under one budget of tokens per step come those that decode, those that are amid their prompt, and as many waiting ones as
//! find a slot and blocks. Prompts are cut into chunks, and where others decode in the same step, a chunk is only so long
//! that the step stays within [`SchedulerConfig::gap`].
//!
//! Background sequences get on where no interactive one waits or runs, in steps that stay within the same gap and do not
//! overlap: one that arrives takes what it would take alone, but for the rest of one such step.
//!
//! Who waits first: of the clients the one that was given the fewest tokens so far, and of its requests the oldest
//! (virtual token counters: Sheng et al., Fairness in Serving Large Language Models, 2024). All wait while a mask is made, so
//! its time counts as the tokens that could have been computed in it. Nobody is passed over for ever: who did not get on for
//! [`SchedulerConfig::patience`] steps is interactive from then on, and first in line.
//!
//! Where blocks end, a sequence of lower priority or later arrival is preempted: it loses its blocks, waits, and is
//! computed again, from the prefix cache as far as that still has it. So the first of all always gets on.
//!
//! Where a draft model guesses ([`SchedulerConfig::draft_model`]), a cycle begins with [`Scheduler::wishes`] and
//! [`Scheduler::offer`], and no step is scheduled ahead while a sequence wants guesses ([`Scheduler::wants_draft`]): what is
//! to be guessed follows ids that are known, and those who wait for them meanwhile share the next pass.
//!
//! Somebody always gets on: where no step is under way, one is scheduled unless nobody is there
//! ([`Scheduler::expect_idle`]).
//!
//! Invariants, checked after each commit in debug builds: those of [`BlockManager::check`] and of [`Sequence`]; a slot has
//! one sequence; a step keeps within [`Limits`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::answer::Ended;
use super::block_manager::{BlockManager, BlockTable, PoolUse};
use super::mask::PendingMask;
use super::pace::{CAREFUL_TOKENS, Load, Pace};
use super::request::{ClientId, Priority};
use super::sequence::{Sequence, SequenceId};
use super::speculation::{Drafts, Guesser, Guesses};
use crate::model::{
    Batch, BatchSequence, BlockPool, DraftRequest, Draw, HistoryCopy, Input, Limits, Logprobs, Pooling,
    Sampled, Sampling,
};

#[derive(Debug, Clone, Copy)]
pub struct SchedulerConfig {
    /// What a step that others wait for may take, as far as its prefill goes: with decodes in it, or in the background.
    pub gap: Duration,
    /// Steps after which a sequence that did not get on is first in line, whatever its priority and its client.
    pub patience: u64,
    /// Sliding blocks that the prefix cache keeps for ends of turns.
    pub turn_blocks: usize,
    /// Tokens that a step which guesses may have, guesses and all; 0 is none. More of them read the same weights, up to
    /// where arithmetic costs more than memory.
    pub speculation_tokens: usize,
    /// Whether the runner has a draft model, which guesses where prompt lookup has nothing to say.
    pub draft_model: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            gap: Duration::from_millis(500),
            patience: 1024,
            turn_blocks: usize::MAX,
            speculation_tokens: 16,
            draft_model: false,
        }
    }
}

/// A step and what it is for.
#[derive(Debug, Default)]
pub struct Step {
    pub batch: Batch,
    pub sampling: Sampling,
    /// Those of the masked draws, in their order.
    pub(super) masks: Vec<PendingMask>,
    pub load: Load,
    /// Whose tokens, and what comes of them.
    pub shares: Vec<Share>,
}

/// What a step does for one sequence. Forks have a share in the step that draws their first id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    pub id: SequenceId,
    /// As [`Sequence::begun_as`].
    begun_as: SequenceId,
    life: u32,
    /// Positions that are computed when the step is done, guesses left out.
    end: usize,
    /// Those of [`Sampling::draws`] that score the ids of the prompt up to `end`, itself included.
    scores: Range<usize>,
    /// Index into [`Sampling::draws`] of the first of `1 + drafts.len()`.
    draw: Option<usize>,
    /// Index into [`Sampled::pooled`], where the step has the last of a prompt that is pooled.
    pooled: Option<usize>,
    /// Guesses at what is drawn, one behind the other: position `end` was computed with the first of them.
    drafts: Vec<u32>,
    guesser: Guesser,
}

/// What one step yielded for one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Output {
    pub id: SequenceId,
    /// Id for the reader; none where the sampled one is a stop id.
    pub token: Option<u32>,
    /// Of the sampled id, where they were wanted.
    pub logprobs: Option<Logprobs>,
    /// With the first id: those of the prompt's ids but the first, where they were wanted.
    pub prompt: Option<Vec<Logprobs>>,
    /// The mean of the prompt's hidden states, where that was wanted.
    pub pooled: Option<Vec<f32>>,
    /// Set where the sequence ended; it is gone from the scheduler then.
    pub end: Option<Ended>,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: usize,
    pub drafts: Drafts,
}

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    config: SchedulerConfig,
    blocks: BlockManager,
    /// In order of arrival.
    waiting: Vec<Sequence>,
    /// In order of arrival.
    running: Vec<Sequence>,
    free_slots: Vec<u32>,
    /// What each client was given that has a sequence here.
    served: HashMap<ClientId, Served>,
    arrivals: u64,
    /// Steps scheduled.
    now: u64,
    preemptions: u64,
    guesses: Guesses,
    /// What the draft model took before the step that is scheduled next.
    drafting: Duration,
}

/// What one client was given.
#[derive(Debug, Clone, Copy, Default)]
struct Served {
    tokens: u64,
    /// Time that its masks took, as far as it does not count as tokens yet.
    masking: Duration,
}

/// Preemptions after which a sequence is interactive, whatever its priority.
const MAX_PREEMPTIONS: u32 = 4;

/// The next tokens of a running sequence, `input` at positions `start..`, with the blocks that it has.
fn share_of(sequence: &Sequence, start: usize, input: Input, history: Option<Vec<u32>>) -> BatchSequence {
    let (sliding_first, sliding) = sequence.table.sliding();
    BatchSequence {
        slot: sequence.slot.expect("a running sequence has a slot"),
        start,
        input,
        full_blocks: sequence.table.full().to_vec(),
        sliding_blocks: sliding.collect(),
        sliding_first,
        history,
    }
}

/// A step being put together, and the room left in it.
struct Draft {
    step: Step,
    tokens: usize,
    draws: usize,
    /// Ids of history.
    history: usize,
    /// Whether it is to keep within the gap: somebody waits for an id of it or of one under way, or may come while it runs.
    hurries: bool,
    /// Whether a part of a prompt is in it.
    prefills: bool,
}

impl Scheduler {
    /// The pools must hold one sequence of full length, or the first long request could never run.
    pub fn new(limits: Limits, config: SchedulerConfig) -> Self {
        let kv = limits.kv;
        assert!(limits.max_batch_tokens > 0 && limits.max_sequences > 0, "a step holds nothing: {limits:?}");
        assert!(limits.max_draws >= limits.max_sequences, "not everybody can decode at once: {limits:?}");
        assert!(
            kv.full_blocks * kv.block_size >= limits.max_context,
            "the KV pool holds no full context: {limits:?}"
        );
        let window =
            kv.window_blocks(limits.max_batch_tokens).min(limits.max_context.div_ceil(kv.block_size));
        assert!(
            kv.sliding_window.is_none() || kv.sliding_blocks >= window,
            "the KV pool of sliding layers holds no window and step, {window} blocks: {limits:?}"
        );
        Self {
            limits,
            config,
            blocks: BlockManager::new(kv, config.turn_blocks),
            waiting: Vec::new(),
            running: Vec::new(),
            free_slots: (0..limits.max_sequences as u32).rev().collect(),
            served: HashMap::new(),
            arrivals: 0,
            now: 0,
            preemptions: 0,
            guesses: Guesses::default(),
            drafting: Duration::ZERO,
        }
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    pub fn usage(&self, pool: BlockPool) -> PoolUse {
        self.blocks.usage(pool)
    }

    /// Whether a sequence waits or runs, or is to part from one that does.
    pub fn knows(&self, id: SequenceId) -> bool {
        let mut all = self.waiting.iter().chain(&self.running);
        all.any(|s| s.id == id || s.forks.iter().any(|fork| fork.id == id))
    }

    /// Times that a sequence lost its blocks to another.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Ids guessed ahead, of all sequences so far.
    pub fn guesses(&self) -> Guesses {
        self.guesses
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Panics with its state unless nobody is there: to be called where nothing was scheduled and nothing is under way, for
    /// nothing would change that.
    pub fn expect_idle(&self) {
        assert!(self.is_idle(), "nobody gets on, and somebody is there: {}", self.state());
    }

    /// What there is to know of it when it is found in the wrong: one line of bounded length, and no token of anybody.
    fn state(&self) -> String {
        /// Sequences of each kind that are named.
        const NAMED: usize = 6;
        let Limits { max_sequences, kv, .. } = self.limits;
        let room = |pool, all: usize| {
            let PoolUse { free, cached, .. } = self.usage(pool);
            format!("{} of {all}", free + cached)
        };
        let named = |sequences: &[Sequence]| {
            let named: Vec<String> = sequences.iter().take(NAMED).map(Sequence::state).collect();
            named.join("; ")
        };
        format!(
            "step {}, {} of {max_sequences} slots free, blocks that can be had: {} full, {} sliding; {} running: {}; \
             {} waiting: {}; {:?}; {:?}",
            self.now,
            self.free_slots.len(),
            room(BlockPool::Full, kv.full_blocks),
            room(BlockPool::Sliding, kv.sliding_blocks),
            self.running.len(),
            named(&self.running),
            self.waiting.len(),
            named(&self.waiting),
            self.limits,
            self.config,
        )
    }

    /// Takes a sequence that fits `max_context`, and whose forks fit the slots; the caller has refused others.
    pub fn add(&mut self, mut sequence: Sequence) {
        debug_assert!(sequence.prompt_len + sequence.max_tokens <= self.limits.max_context);
        debug_assert!(sequence.prompt_len > 0 && sequence.max_tokens > 0);
        debug_assert!(sequence.forks.len() < self.limits.max_sequences);
        sequence.arrival = self.arrivals;
        sequence.since = self.now;
        self.arrivals += 1;
        // Who comes back after a pause does not bring a right to all that others had meanwhile.
        let tokens = self.served.values().map(|served| served.tokens).min().unwrap_or(0);
        self.served.entry(sequence.client).or_insert(Served { tokens, ..Served::default() });
        self.waiting.push(sequence);
    }

    /// Forgets a sequence and frees its blocks; what a step under way yields for it is dropped. Where others are to part from
    /// it, the first of them takes its place, and what that step computes.
    pub fn remove(&mut self, id: SequenceId) {
        for sequence in self.waiting.iter_mut().chain(&mut self.running) {
            if let Some(index) = sequence.forks.iter().position(|fork| fork.id == id) {
                sequence.forks.remove(index);
                self.free_slots.extend(sequence.fork_slots.pop());
                return;
            }
        }
        let mut all = self.waiting.iter_mut().chain(&mut self.running);
        if let Some(sequence) = all.find(|s| s.id == id && !s.forks.is_empty()) {
            let fork = sequence.forks.remove(0);
            (sequence.id, sequence.seed) = (fork.id, fork.seed);
            self.free_slots.extend(sequence.fork_slots.pop());
        } else if let Some(index) = self.waiting.iter().position(|s| s.id == id) {
            let sequence = self.waiting.remove(index);
            self.forget_client(sequence.client);
        } else if let Some(index) = self.running.iter().position(|s| s.id == id) {
            self.end(index);
        }
    }

    /// Takes a running sequence out.
    fn end(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        self.take_resources(&mut sequence);
        self.forget_client(sequence.client);
    }

    fn take_resources(&mut self, sequence: &mut Sequence) {
        self.served_of(sequence.client).masking += sequence.take_mask_time();
        self.blocks.release(std::mem::take(&mut sequence.table));
        self.free_slots.extend(sequence.slot.take());
        self.free_slots.append(&mut sequence.fork_slots);
    }

    fn served_of(&mut self, client: ClientId) -> &mut Served {
        self.served.get_mut(&client).expect("the client of a sequence is known")
    }

    fn forget_client(&mut self, client: ClientId) {
        if !self.waiting.iter().chain(&self.running).any(|s| s.client == client) {
            self.served.remove(&client);
        }
    }

    // --- the draft model ---

    /// Whether a sequence wants guesses of the draft model, or will when the steps under way are committed: until then,
    /// nothing more is to be scheduled.
    pub fn wants_draft(&self) -> bool {
        let (class, share) = (self.class(), self.draft_share());
        let wants = |s: &Sequence| s.speculating || self.wanted_guesses(s, share) > 0;
        share > 0 && self.running.iter().filter(|s| s.class() == class).any(wants)
    }

    /// What the draft model is to guess before the next step is scheduled, with none under way: for the sequences that
    /// decode, if prompt lookup has nothing to say. They get blocks for it where those are free.
    pub fn wishes(&mut self) -> Vec<(SequenceId, DraftRequest)> {
        let (class, share) = (self.class(), self.draft_share());
        let mut wishes = Vec::new();
        for index in 0..self.running.len() {
            let wanted = self.wanted_guesses(&self.running[index], share);
            let sequence = &mut self.running[index];
            if wanted == 0 || sequence.drawn > 0 || sequence.class() != class {
                continue;
            }
            if !sequence.lookup.propose(&sequence.tokens, wanted).is_empty() {
                continue;
            }
            let (start, tokens) = (sequence.submitted, sequence.tokens.len());
            let grown = self.blocks.grow(&mut sequence.table, tokens + wanted);
            assert!(grown.is_ok(), "there was room");
            let input = Input::Ids(sequence.tokens[start..].to_vec());
            let draw = Draw { logprobs: None, ..sequence.draw(0, 0) };
            let own = share_of(sequence, start, input, None);
            let request = DraftRequest { sequence: own, draw, guesses: wanted };
            wishes.push((sequence.id, request));
        }
        wishes
    }

    /// Takes the guesses that came of [`Scheduler::wishes`] for the step that is scheduled next, and how long they took.
    pub fn offer(&mut self, guesses: impl IntoIterator<Item = (SequenceId, Vec<u32>)>, took: Duration) {
        self.drafting = took;
        for (id, guesses) in guesses {
            if let Some(sequence) = self.running.iter_mut().find(|s| s.id == id) {
                sequence.offered = guesses;
            }
        }
    }

    /// Guesses that each sequence that decodes may have of the draft model: the room for guesses, shared evenly.
    fn draft_share(&self) -> usize {
        if !self.config.draft_model {
            return 0;
        }
        let decoding = self.decoding(self.class()).count();
        let room =
            self.config.speculation_tokens.min(self.limits.max_batch_tokens).min(self.limits.max_draws);
        (room / decoding.max(1)).saturating_sub(1)
    }

    /// How many ids the draft model is to guess for a running sequence once what is submitted for it is drawn, out of its
    /// `share`. Nobody makes room for guesses, and none are made where a block is about to be copied.
    fn wanted_guesses(&self, s: &Sequence, share: usize) -> usize {
        let known = s.tokens.len() + s.drawn;
        let left = s.max_tokens.saturating_sub(s.generated() + s.drawn + 1);
        let wanted = share.min(left).min(s.draft.length(known));
        let decodes = s.submitted >= s.prompt_len && s.submitted + 1 == known;
        if wanted == 0 || !decodes || s.mask.is_some() || s.unseen() > 0 {
            return 0;
        }
        let is_own = self.blocks.shared_at(&s.table, s.submitted) == [None, None];
        let has_room = self.blocks.has_room(self.blocks.missing(&s.table, known + wanted));
        if is_own && has_room { wanted } else { 0 }
    }

    // --- scheduling ---

    /// The next step, or none where nothing can get on before a step under way is committed, or nothing is there.
    pub fn schedule(&mut self, pace: &Pace) -> Option<Step> {
        self.charge(pace);
        let under_way = || self.running.iter().any(|s| s.submitted > s.computed);
        if self.class() == Priority::Background && under_way() {
            return None; // whoever comes now is to wait for one step alone
        }
        self.now += 1;
        // For good: who was raised for one step only would lose the next, and what it had computed.
        let patience = self.config.patience;
        for sequence in self.waiting.iter_mut().chain(&mut self.running) {
            sequence.raised |= sequence.is_overdue(self.now, patience);
        }
        let class = self.class();
        let mut draft = Draft {
            step: Step::default(),
            tokens: self.limits.max_batch_tokens,
            draws: self.limits.max_draws,
            history: self.limits.max_context,
            hurries: class == Priority::Background || self.decoding(class).next().is_some(),
            prefills: false,
        };
        for decodes in [true, false] {
            // By id: the list grows by forks, and shrinks by preemptions, while it is walked.
            for id in self.running_of(class, decodes) {
                if let Some(index) = self.running.iter().position(|s| s.id == id) {
                    self.place(&mut draft, index, pace);
                }
            }
        }
        self.admit(class, &mut draft, pace);
        // What is not in the step is guessed again when its turn comes.
        self.running.iter_mut().for_each(|s| s.offered.clear());
        self.drafting = Duration::ZERO;
        (!draft.step.shares.is_empty()).then_some(draft.step)
    }

    /// Counts the time of masks as tokens, and keeps what is too short for one.
    fn charge(&mut self, pace: &Pace) {
        let Some(token) = pace.per_token() else { return };
        for served in self.served.values_mut() {
            served.tokens += (served.masking.as_nanos() / token.as_nanos()) as u64;
            served.masking = Duration::from_nanos((served.masking.as_nanos() % token.as_nanos()) as u64);
        }
    }

    /// The class that gets on: the background where nobody else is there.
    fn class(&self) -> Priority {
        let mut all = self.waiting.iter().chain(&self.running);
        let interactive = all.any(|s| s.class() == Priority::Interactive);
        if interactive { Priority::Interactive } else { Priority::Background }
    }

    /// Those that run and are behind their prompt.
    fn decoding(&self, class: Priority) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(move |s| s.class() == class && s.submitted >= s.prompt_len)
    }

    fn running_of(&self, class: Priority, decodes: bool) -> Vec<SequenceId> {
        // Not those that are in the step already.
        let open = |s: &Sequence| s.since < self.now && s.pending() > 0;
        let wanted = |s: &&Sequence| open(s) && s.class() == class && (s.pending() == 1) == decodes;
        self.running.iter().filter(wanted).map(|s| s.id).collect()
    }

    /// Puts the next tokens of a running sequence into the step, as far as there is room.
    fn place(&mut self, draft: &mut Draft, index: usize, pace: &Pace) {
        let Some((drafts, guesser)) = self.guess(draft, index) else { return };
        let sequence = &self.running[index];
        let (id, start, pending) = (sequence.id, sequence.submitted, sequence.pending());
        let mut len =
            if pending > 1 { self.chunk(draft, start, pending, pace) } else { pending.min(draft.tokens) };
        let draws = if sequence.pooling { 0 } else { 1 + sequence.forks.len() };
        let unscored = sequence.unscored();
        if unscored > 0 {
            // Each has a draw, and the one behind the prompt a step of its own: they all go to the same slot.
            len = len.min(unscored).min(draft.draws);
        } else if len == pending && draws > draft.draws {
            len -= 1; // all but the token whose id has no place in this step
        }
        let unseen = sequence.unseen();
        if len == 0 || unseen > draft.history {
            return;
        }
        // From here on the sequence may move, or lose its own place.
        let Some(index) = self.make_room(draft, id, start + len + drafts.len()) else { return };
        let sequence = &mut self.running[index];
        let Ok(copies) = self.blocks.make_writable(&mut sequence.table, start) else {
            unreachable!("room was made")
        };
        draft.step.batch.copies.extend(copies);

        let known = sequence.tokens.len();
        let input = if start + len <= known {
            Input::Ids([&sequence.tokens[start..start + len], &drafts].concat())
        } else {
            assert!(len == 1 && start >= known, "an id that is not known yet is fed alone");
            Input::LastSampled
        };
        let (client, begun_as, life, end) = (sequence.client, sequence.begun_as, sequence.life, start + len);
        let batch_index = draft.step.batch.sequences.len();
        let history = (unseen > 0).then(|| sequence.tokens[..unseen].to_vec());
        draft.step.batch.sequences.push(share_of(sequence, start, input, history));
        sequence.fresh = false;
        sequence.submitted = end + drafts.len();
        sequence.speculating = !drafts.is_empty();
        sequence.drafts.proposed += drafts.len();
        self.guesses.of(guesser).proposed += drafts.len();
        sequence.since = self.now;
        let (mut draw, mut pooled) = (None, None);
        let first_draw = draft.step.sampling.draws.len();
        if unscored > 0 {
            let scores = (0..len).map(|token| sequence.score(batch_index, token, start + token + 1));
            draft.step.sampling.draws.extend(scores);
        } else if sequence.pooling {
            let last = len == pending;
            pooled = last.then(|| draft.step.sampling.pooling.iter().filter(|pooling| pooling.last).count());
            draft.step.sampling.pooling.push(Pooling { sequence: batch_index, last });
        } else if len == pending {
            draw = Some(draft.step.sampling.draws.len());
            let draws = (0..=drafts.len()).map(|ahead| sequence.draw(batch_index, len - 1 + ahead));
            draft.step.sampling.draws.extend(draws);
            draft.step.masks.extend(sequence.pending_mask());
            sequence.drawn += 1;
        }
        draft.prefills |= pending > 1;
        let tokens = len + drafts.len();
        draft.tokens -= tokens;
        draft.draws -= draft.step.sampling.draws.len() - first_draw;
        draft.history -= unseen;
        draft.step.load = draft.step.load.with(start, tokens);
        let scores = first_draw..first_draw + if unscored > 0 { len } else { 0 };
        draft.step.shares.push(Share { id, begun_as, life, end, scores, draw, pooled, drafts, guesser });
        self.served_of(client).tokens += len as u64;
        if draw.is_some() {
            self.part(draft, index, batch_index, len - 1);
        }
    }

    /// How many of the `pending` tokens of a prompt from `start` on the step has room for. Where it hurries one prompt gets a
    /// few however long the step takes then, the others what the time allows.
    fn chunk(&self, draft: &Draft, start: usize, pending: usize, pace: &Pace) -> usize {
        let wanted = pending.min(draft.tokens);
        if !draft.hurries {
            return wanted;
        }
        let least = if draft.prefills { 0 } else { CAREFUL_TOKENS };
        pace.room(draft.step.load, start, wanted, least, self.config.gap.saturating_sub(self.drafting))
    }

    /// Ids that may follow a sequence that decodes, as many as the step has room for; none at all where a guess is to be
    /// made, and what it starts from is not known yet: the sequence sits this step out.
    fn guess(&mut self, draft: &Draft, index: usize) -> Option<(Vec<u32>, Guesser)> {
        let class = self.running[index].class();
        let waits = |s: &&Sequence| s.class() == class && s.since < self.now && s.pending() == 1;
        let waiting_decodes = self.running.iter().filter(waits).count();
        let sequence = &mut self.running[index];
        let decodes = sequence.pending() == 1 && sequence.submitted >= sequence.prompt_len;
        // Everybody gets the id that is due before anybody gets a guess.
        let room = self.config.speculation_tokens.saturating_sub(draft.step.load.tokens);
        let room = room.min(draft.draws).min(draft.tokens).saturating_sub(waiting_decodes);
        let most = room.min(sequence.max_tokens - sequence.generated() - 1);
        // What a mask allows behind a guess is not asked for: it follows the answer id by id.
        if !decodes || most == 0 || sequence.mask.is_some() {
            return Some((Vec::new(), Guesser::Lookup));
        }
        let mut drafts = sequence.lookup.propose(&sequence.tokens, most);
        let mut guesser = Guesser::Lookup;
        if drafts.is_empty() {
            drafts = std::mem::take(&mut sequence.offered);
            drafts.truncate(most);
            guesser = Guesser::Model;
        } else if sequence.drawn > 0 {
            return None;
        }
        // What stops the answer is drawn behind the others, and nothing follows it.
        let end = drafts.iter().position(|id| sequence.sampling.stop_token_ids.contains(id));
        drafts.truncate(end.unwrap_or(most));
        Some((drafts, guesser))
    }

    /// Lets the forks of a sequence go their own way: its prompt is submitted, and each draws its first id from there.
    fn part(&mut self, draft: &mut Draft, index: usize, batch_index: usize, token: usize) {
        let forks = std::mem::take(&mut self.running[index].forks);
        for fork in forks {
            let parent = &mut self.running[index];
            let slot = parent.fork_slots.pop().expect("a slot was kept for each fork");
            let mut child = Sequence::new(
                fork.id,
                parent.tokens.clone(),
                Arc::clone(&parent.sampling),
                parent.max_tokens,
            );
            child.seed = fork.seed;
            child.client = parent.client;
            child.priority = parent.priority;
            child.cache_salt = parent.cache_salt.clone();
            child.raised = parent.raised;
            child.mask.clone_from(&parent.mask);
            child.arrival = parent.arrival;
            child.slot = Some(slot);
            child.table = self.blocks.fork(&parent.table);
            (child.computed, child.submitted) = (parent.computed, parent.submitted);
            if child.sampling.penalizes() {
                let from = parent.slot.expect("a running sequence has a slot");
                let copy = HistoryCopy { from, to: slot, tokens: parent.submitted };
                draft.step.batch.history_copies.push(copy);
            }
            child.cached = parent.cached;
            child.since = self.now;
            let draw = draft.step.sampling.draws.len();
            draft.step.sampling.draws.push(child.draw(batch_index, token));
            draft.step.masks.extend(child.pending_mask());
            child.drawn = 1;
            draft.draws -= 1;
            let (id, end) = (child.id, child.submitted);
            let guesser = Guesser::Lookup;
            draft.step.shares.push(Share {
                id,
                begun_as: id,
                life: 0,
                end,
                scores: 0..0,
                draw: Some(draw),
                pooled: None,
                drafts: Vec::new(),
                guesser,
            });
            let behind = self.running.partition_point(|s| s.arrival <= child.arrival);
            self.running.insert(behind, child);
        }
    }

    /// Blocks for positions `..tokens` of a running sequence, taken from others that come after it where none are free;
    /// its index then. None where it waits for others, or lost its own.
    fn make_room(&mut self, draft: &Draft, id: SequenceId, tokens: usize) -> Option<usize> {
        loop {
            let index = self.running.iter().position(|s| s.id == id)?;
            let sequence = &mut self.running[index];
            // A block that is shared and about to be written needs another one.
            let mut wanted = self.blocks.missing(&sequence.table, tokens);
            let copied = self.blocks.shared_at(&sequence.table, sequence.submitted);
            wanted
                .iter_mut()
                .zip(copied)
                .for_each(|(wanted, copied)| *wanted += usize::from(copied.is_some()));
            if self.blocks.has_room(wanted) {
                let grown = self.blocks.grow(&mut sequence.table, tokens);
                assert!(grown.is_ok(), "there was room");
                return Some(index);
            }
            let own = &self.running[index];
            let behind = |victim: &usize| self.running[*victim].line() > own.line();
            if let Some(victim) = self.last_in_line(draft).filter(behind) {
                self.preempt(victim);
                continue;
            }
            let is_last = self.running.iter().all(|s| s.line() <= own.line());
            // Those that come after it are in the step, or its own step under way will let go of what the window leaves
            // behind: it waits for them. Else nobody will make room for it.
            if own.submitted == own.computed && is_last {
                self.preempt(index);
            }
            return None;
        }
    }

    /// The running sequence that comes after all others and is not in the step.
    fn last_in_line(&self, draft: &Draft) -> Option<usize> {
        let free = |s: &Sequence| draft.step.shares.iter().all(|share| share.id != s.id);
        let candidates = self.running.iter().enumerate().filter(|(_, s)| free(s));
        candidates.max_by_key(|(_, s)| s.line()).map(|(index, _)| index)
    }

    /// Takes a sequence's blocks and slot; it waits, to be computed again.
    fn preempt(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        tracing::debug!(sequence = sequence.id, tokens = sequence.submitted, "preempted");
        self.preemptions += 1;
        self.take_resources(&mut sequence);
        (sequence.computed, sequence.submitted, sequence.drawn) = (0, 0, 0);
        sequence.speculating = false;
        sequence.offered.clear();
        sequence.scores.clear();
        sequence.life += 1;
        // Who loses what it has computed again and again never waits for long, and does not get on either.
        sequence.raised |= sequence.life >= MAX_PREEMPTIONS;
        let behind = self.waiting.partition_point(|s| s.arrival <= sequence.arrival);
        self.waiting.insert(behind, sequence);
    }

    /// Lets waiting sequences of a class run, first in line first: where that one lacks room, nobody overtakes it.
    fn admit(&mut self, class: Priority, draft: &mut Draft, pace: &Pace) {
        while let Some(index) = self.first_in_line(class) {
            if self.chunk(draft, 0, self.waiting[index].tokens.len(), pace) == 0 {
                return;
            }
            if !self.has_place(index, draft) {
                // What runs in the room that others leave makes way for those others.
                let victim = self.last_in_line(draft);
                match victim.filter(|v| class < self.running[*v].class()) {
                    Some(victim) => self.preempt(victim),
                    None => return,
                }
                continue;
            }
            let mut sequence = self.waiting.remove(index);
            let known: &[u32] = if sequence.is_computed_afresh() { &[] } else { &sequence.tokens };
            let (table, cached) = self.blocks.admit(known, sequence.priority, &sequence.cache_salt);
            sequence.table = table;
            (sequence.computed, sequence.submitted) = (cached, cached);
            sequence.cached.get_or_insert(cached.min(sequence.prompt_len));
            sequence.slot = self.free_slots.pop();
            sequence.fresh = true;
            let forks = self.free_slots.len() - sequence.forks.len();
            sequence.fork_slots = self.free_slots.split_off(forks);
            let id = sequence.id;
            let behind = self.running.partition_point(|s| s.arrival <= sequence.arrival);
            self.running.insert(behind, sequence);
            self.place(draft, behind, pace);
            if draft.step.shares.iter().all(|share| share.id != id) {
                return; // no room for its first tokens in this step
            }
        }
    }

    /// The waiting sequence whose turn it is.
    fn first_in_line(&self, class: Priority) -> Option<usize> {
        let candidates = self.waiting.iter().enumerate().filter(|(_, s)| s.class() == class);
        let turn = |s: &Sequence| {
            let overdue = s.is_overdue(self.now, self.config.patience);
            let served = if overdue { 0 } else { self.served[&s.client].tokens };
            (!overdue, served, s.arrival, s.id)
        };
        candidates.min_by_key(|(_, s)| turn(s)).map(|(index, _)| index)
    }

    /// Whether there are slots for a waiting sequence, and blocks for all that it has to compute before its first id.
    fn has_place(&self, index: usize, draft: &Draft) -> bool {
        let sequence = &self.waiting[index];
        if self.free_slots.len() < 1 + sequence.forks.len() {
            return false;
        }
        if self.running.is_empty() && draft.step.shares.is_empty() {
            return true; // all there is can be had
        }
        // What those that run amid their prompts have yet to take is theirs.
        let mut wanted = [0, 0];
        for s in self.running.iter().filter(|s| s.submitted < s.tokens.len()) {
            let [full, sliding] = self.blocks.missing(&s.table, s.tokens.len());
            wanted[0] += full;
            wanted[1] +=
                sliding.min(self.window_blocks(s.tokens.len()).saturating_sub(s.table.sliding().1.count()));
        }
        // Blocks of the prefix that are cached are counted as wanted: they stop being free when they are held. One more, or
        // the first decode would preempt.
        let blocks = sequence.tokens.len().div_ceil(self.limits.kv.block_size) + 1;
        wanted[0] += blocks;
        wanted[1] += self.window_blocks(sequence.tokens.len()).min(blocks);
        self.blocks.has_room(wanted)
            || !sequence.is_computed_afresh() && {
                wanted[0] -= self.blocks.held_prefix(&sequence.tokens, &sequence.cache_salt);
                self.blocks.has_room(wanted)
            }
    }

    /// Sliding blocks that a sequence of `tokens` holds at most.
    fn window_blocks(&self, tokens: usize) -> usize {
        self.limits.kv.window_blocks(self.limits.max_batch_tokens.min(tokens))
    }

    // --- commit ---

    /// Takes in what a step yielded; `sampled` answers `step.sampling` entry by entry.
    pub fn commit(&mut self, step: &Step, sampled: &Sampled) -> Vec<Output> {
        assert_eq!(sampled.ids.len(), step.sampling.draws.len(), "the runner sampled for others than asked");
        let mut outputs = Vec::with_capacity(step.shares.len());
        for share in &step.shares {
            // What was removed or preempted since is not waited for.
            let is_it = |s: &Sequence| s.begun_as == share.begun_as && s.life == share.life;
            let Some(index) = self.running.iter().position(is_it) else { continue };
            let sequence = &mut self.running[index];
            let id = sequence.id;
            let was_prefill = sequence.computed < sequence.prompt_len;
            sequence.computed = share.end;
            let mut end = None;
            let first = outputs.len();
            for (position, draw) in (share.end + 1 - share.scores.len()..).zip(share.scores.clone()) {
                let score = sequence.take_score(position, sampled.ids[draw], sampled.logprobs[draw].as_ref());
                if let Err(error) = score {
                    end = Some(Err(error));
                    outputs.push(Output { id, end: end.clone(), ..Output::default() });
                    break;
                }
            }
            if let Some(draw) = share.draw {
                sequence.drawn -= 1;
                for i in 0..=share.drafts.len() {
                    let (token, ended) = sequence.take(sampled.ids[draw + i]);
                    outputs.push(Output {
                        id,
                        token,
                        logprobs: sampled.logprobs[draw + i].clone(),
                        prompt: sequence.take_scores(),
                        pooled: None,
                        end: ended.clone(),
                        cached_tokens: sequence.cached.unwrap_or(0),
                        drafts: Drafts::default(),
                    });
                    end = ended;
                    // The next draw was made behind the guess: it counts where that was right.
                    if end.is_some() || share.drafts.get(i) != sampled.ids[draw + i].as_ref() {
                        break;
                    }
                    sequence.computed += 1;
                }
            }
            if let Some(at) = share.pooled {
                let (pooled, ended) = sequence.take_pooled(&sampled.pooled[at]);
                end = Some(ended);
                outputs.push(Output { id, pooled, end: end.clone(), ..Output::default() });
            }
            if !share.drafts.is_empty() {
                let accepted = outputs.len() - first - 1;
                sequence.drafts.accepted += accepted;
                self.guesses.of(share.guesser).accepted += accepted;
                let total = sequence.tokens.len();
                sequence.adaptive(share.guesser).judge(share.drafts.len(), accepted, total);
                sequence.submitted = sequence.computed;
                sequence.speculating = false;
            }
            let drafts = sequence.drafts;
            outputs[first..].iter_mut().for_each(|output| output.drafts = drafts);
            if matches!(end, Some(Err(_))) {
                let table = std::mem::take(&mut sequence.table);
                self.blocks.forget(table, self.running.iter_mut().map(|s| &mut s.table));
            } else if sequence.pooling {
                self.blocks.leave_window(&mut sequence.table, sequence.computed);
            } else {
                let computed = sequence.computed;
                self.blocks.commit(&mut sequence.table, &sequence.tokens[..computed]);
                if (was_prefill && computed >= sequence.prompt_len) || end.is_some() {
                    self.blocks.end_turn(&sequence.table);
                }
            }
            let sequence = &mut self.running[index];
            let (client, took) = (sequence.client, sequence.take_mask_time());
            self.served_of(client).masking += took;
            if end.is_some() {
                self.end(index);
            }
        }
        if cfg!(debug_assertions) {
            self.check();
        }
        outputs
    }

    /// Panics where an invariant of this file's head is broken.
    pub fn check(&self) {
        self.blocks.check(self.running.iter().map(|s| &s.table));
        let mut slots: Vec<u32> = self.free_slots.clone();
        for s in &self.running {
            slots.extend(s.slot);
            slots.extend(&s.fork_slots);
            assert_eq!(s.forks.len(), s.fork_slots.len(), "sequence {}: slots of its forks", s.id);
            assert!(s.slot.is_some() && s.computed <= s.submitted, "sequence {}", s.id);
            let known = s.tokens.len() + s.drawn;
            assert!(s.speculating || s.submitted <= known, "sequence {} submitted what is not there", s.id);
            assert!(
                s.offered.is_empty() || s.pending() == 1 && s.drawn == 0,
                "guesses for sequence {}",
                s.id
            );
            assert_eq!(*s.table.salt(), s.cache_salt, "sequence {}: the salt of its blocks", s.id);
            let blocks = s.table.full().len();
            assert!(blocks * self.limits.kv.block_size >= s.submitted, "sequence {} lacks blocks", s.id);
        }
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..self.limits.max_sequences as u32), "slots {slots:?}");
        for s in &self.waiting {
            assert!(
                s.table == BlockTable::default()
                    && s.slot.is_none()
                    && s.fork_slots.is_empty()
                    && s.offered.is_empty(),
                "waiting {}",
                s.id
            );
            assert_eq!((s.computed, s.submitted, s.drawn), (0, 0, 0), "waiting {}", s.id);
        }
        let order = |list: &[Sequence]| list.is_sorted_by_key(|s| s.arrival);
        assert!(order(&self.waiting) && order(&self.running), "order of arrival");
        for client in self.waiting.iter().chain(&self.running).map(|s| s.client) {
            assert!(self.served.contains_key(&client), "client {client} is forgotten");
        }
    }
}
