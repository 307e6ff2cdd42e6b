//! Decides what the next step computes. The scheduler is a synchronous state machine without a clock, I/O or GPU.
//!
//! One cycle is [`Scheduler::schedule`] -> the step -> [`Scheduler::commit`]. A second step may be scheduled before the
//! first is committed: an id that the first step draws feeds the second step on the device. Steps are committed in the
//! order in which they were scheduled.
//!
//! Start with `policy`, which decides which sequences get tokens. The other files serve it: `room` finds slots and
//! blocks, `draft` gets draft tokens, `fairness` counts the tokens of each client, `step` builds the arrays, `commit`
//! applies the results, `replay` restarts all sequences after the device was lost, `stored` restores texts from the disk, and
//! `check` checks the invariants.
//!
//! A step has a budget of tokens. Prompts are split into chunks (chunked prefill). If other sequences decode in the
//! same step, the chunks are short enough that the step stays within [`SchedulerConfig::gap`].
//!
//! The tokens of an image see each other in both directions. So a chunk never ends within an image, even if the first
//! chunk of the step then exceeds the gap. An image that no slot of the runner has is encoded before the step
//! ([`Step::encodings`]), which takes about as long as a step. So at most one image is encoded for a step for which
//! others wait.
//!
//! Background sequences get tokens only if no interactive sequence waits or runs. Their steps stay within the same gap
//! and do not overlap, so an interactive request that arrives waits at most for the rest of one such step.
//!
//! The first in line is the oldest request of the client that got the fewest tokens until now. No sequence starves: a
//! sequence that got no tokens for [`SchedulerConfig::patience`] steps becomes interactive and first in line. If it
//! runs, it comes before the sequences that decode, which may leave no room for an image.
//!
//! If blocks run out, a sequence of lower priority or later arrival is preempted: it loses its blocks, waits, and is
//! computed again, except for the blocks that the prefix cache has. So the first in line always gets tokens.
//!
//! With a draft model ([`SchedulerConfig::draft_model`]), a cycle begins with [`Scheduler::draft_requests`] and
//! [`Scheduler::take_draft_tokens`]. No step is scheduled ahead while a sequence wants draft tokens
//! ([`Scheduler::wants_draft`]): draft tokens follow known ids, and all sequences that want some share one pass of the
//! draft model for each token.
//!
//! Progress is guaranteed: if no step is in flight and the scheduler has a sequence, it schedules a step
//! ([`Scheduler::expect_idle`]).
//!
//! Invariants, checked after each commit with [`SchedulerConfig::checks`]: the invariants of [`BlockManager::check`]
//! and of [`Sequence`]; a slot has at most one sequence; a step stays within [`Limits`].

mod check;
mod commit;
mod fairness;
mod draft;
mod policy;
mod replay;
mod room;
mod step;
mod stored;
mod turns;

use std::time::Duration;

use self::fairness::Served;
pub use self::step::{Output, SequenceShare, Step};
use self::turns::DiskState;
pub use self::turns::EndedTurn;
pub(in crate::engine) use self::turns::{DiskLookup, SaltedText};
use super::block_manager::{BlockManager, PoolUse};
use super::image_slots::ImageSlots;
use super::request::{ClientId, Priority};
use super::sequence::{Sequence, SequenceId};
use super::speculation::DraftTotals;
use crate::model::Limits;

#[derive(Debug, Clone, Copy)]
pub struct SchedulerConfig {
    /// Maximum duration of a step with prefill for which others wait: a step with decodes, a step of background
    /// sequences, or any step while other engines compute on the same device, which share this time.
    pub gap: Duration,
    /// A sequence that got no tokens for more than this many steps is first in line, regardless of its priority and
    /// client.
    pub patience: u64,
    /// Maximum number of blocks of a pool with a window that the prefix cache protects because a turn ended there.
    pub turn_blocks: usize,
    /// Maximum number of tokens of a step with draft tokens, including the draft tokens; 0 turns speculation off. More
    /// tokens share one pass over the weights at no cost, until the arithmetic takes longer than the memory accesses.
    pub speculation_tokens: usize,
    /// Whether the runner has a draft model. It makes draft tokens if prompt lookup finds none.
    pub draft_model: bool,
    /// Whether the ends of turns are reported, and sequences are looked up on disk before they start.
    pub stores_turns: bool,
    /// Whether every block, table and slot is checked after each step; a panic follows if one is wrong. A check takes
    /// longer than all other work of the scheduler for a step.
    pub checks: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            gap: Duration::from_millis(500),
            patience: 1024,
            turn_blocks: usize::MAX,
            speculation_tokens: 16,
            draft_model: false,
            stores_turns: false,
            checks: true,
        }
    }
}

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    config: SchedulerConfig,
    blocks: BlockManager,
    /// The images that the runner has after the steps scheduled so far.
    image_slots: ImageSlots,
    /// The waiting sequences, in order of arrival.
    waiting: Vec<Sequence>,
    /// The running sequences, in order of arrival.
    running: Vec<Sequence>,
    free_slots: Vec<u32>,
    served: Served,
    arrivals: u64,
    /// Counts calls of [`Scheduler::schedule`]: the scheduler's clock.
    steps: u64,
    preemptions: u64,
    /// The number of engines that take turns on the device.
    engines: u32,
    /// The runner's attention path. When a sequence starts, it becomes a part of the salt of its blocks.
    attention_path: u32,
    /// Whether there may be a suspect (see `replay`). All other sequences wait for suspects.
    has_suspects: bool,
    stored: DiskState,
    drafts: DraftTotals,
    /// Time that the draft model took for the draft tokens of the step that is scheduled next.
    drafting: Duration,
}

impl Scheduler {
    /// Panics if the pools have no room for one sequence of full length, because a long request could never run, or if
    /// a step has no room for an image.
    pub fn new(limits: Limits, config: SchedulerConfig) -> Self {
        assert!(
            limits.max_batch_tokens > 0 && limits.max_sequences > 0,
            "a step must have room for a token and a sequence: {limits:?}"
        );
        assert!(
            limits.max_draws >= limits.max_sequences,
            "max_draws must be at least max_sequences: {limits:?}"
        );
        assert!(
            limits.images.is_none_or(|images| {
                (1..=limits.max_batch_tokens).contains(&images.tokens) && images.slots > 0
            }),
            "a step must have room for an image: {limits:?}"
        );
        let least = limits.kv.most_blocks(limits.max_context, limits.max_batch_tokens);
        assert!(
            limits.kv.pools.iter().zip(&least).all(|(pool, least)| pool.blocks >= *least),
            "the KV pools must have room for max_context tokens, {least:?} blocks: {limits:?}"
        );
        let free_slots = (0..limits.max_sequences as u32).rev().collect();
        Self {
            blocks: BlockManager::new(&limits.kv, config.turn_blocks),
            image_slots: ImageSlots::new(limits.images.map_or(0, |images| images.slots)),
            limits,
            config,
            waiting: Vec::new(),
            running: Vec::new(),
            free_slots,
            served: Served::default(),
            arrivals: 0,
            steps: 0,
            preemptions: 0,
            engines: 1,
            attention_path: 0,
            has_suspects: false,
            stored: DiskState::default(),
            drafts: DraftTotals::default(),
            drafting: Duration::ZERO,
        }
    }

    /// Sets the number of engines that take turns on the device, with this one. Each gets its share of the gap.
    pub fn set_engines(&mut self, engines: usize) {
        self.engines = u32::try_from(engines).expect("few engines").max(1);
    }

    /// Sets the attention path. Sequences that start from now on find only blocks of this path in the prefix cache.
    pub fn set_attention_path(&mut self, path: u32) {
        self.attention_path = path;
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// The use of all pools with a window together, or of all pools without one.
    pub fn usage(&self, with_window: bool) -> PoolUse {
        let pools = self.limits.kv.pools.iter().enumerate();
        let pools = pools.filter(|(_, pool)| pool.window.is_some() == with_window);
        pools.fold(PoolUse::default(), |sum, (pool, _)| {
            let PoolUse { free, cached, held } = self.blocks.usage(pool);
            PoolUse { free: sum.free + free, cached: sum.cached + cached, held: sum.held + held }
        })
    }

    /// Whether a sequence waits or runs, or is a fork of a sequence that does.
    pub fn knows(&self, id: SequenceId) -> bool {
        let mut all = self.waiting.iter().chain(&self.running);
        all.any(|s| s.id == id || s.forks.iter().any(|fork| fork.id == id))
    }

    /// Number of preemptions.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Counts of the draft tokens of all sequences.
    pub fn drafts(&self) -> DraftTotals {
        self.drafts
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Adds a sequence. The caller must check that it fits into `max_context`, and that its forks fit into the slots.
    pub fn add(&mut self, mut sequence: Sequence) {
        debug_assert!(sequence.prompt_len + sequence.max_tokens <= self.limits.max_context);
        debug_assert!(sequence.prompt_len > 0 && sequence.max_tokens > 0);
        debug_assert!(sequence.forks.len() < self.limits.max_sequences);
        sequence.arrival = self.arrivals;
        sequence.last_step = self.steps;
        self.arrivals += 1;
        self.served.join(sequence.request.client);
        self.waiting.push(sequence);
    }

    /// Removes a sequence and frees its blocks. Results of steps in flight for the sequence are dropped. If the
    /// sequence has forks that are not separate sequences yet, the first fork takes its place, and gets those results.
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
            (sequence.id, sequence.request.seed) = (fork.id, fork.seed);
            self.free_slots.extend(sequence.fork_slots.pop());
        } else if let Some(index) = self.waiting.iter().position(|s| s.id == id) {
            let sequence = self.waiting.remove(index);
            self.drop_restored(sequence.begun_as);
            self.forget_client(sequence.request.client);
        } else if let Some(index) = self.index_of(id) {
            self.end(index);
        }
    }

    fn forget_client(&mut self, client: ClientId) {
        if !self.waiting.iter().chain(&self.running).any(|s| s.request.client == client) {
            self.served.leave(client);
        }
    }

    /// The running sequences of a class whose prompt is submitted.
    fn decoding(&self, class: Priority) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(move |s| s.class() == class && s.submitted >= s.prompt_len)
    }

    /// Makes overdue sequences interactive permanently. If a sequence were promoted for one step only, it would be
    /// preempted in the next step, and lose what was computed.
    fn promote_overdue(&mut self) {
        for sequence in self.waiting.iter_mut().chain(&mut self.running) {
            sequence.promoted |= sequence.is_overdue(self.steps, self.config.patience);
        }
    }
}
