//! Decides what the next step computes: a synchronous state machine without clock, I/O or GPU.
//!
//! One cycle is [`Scheduler::schedule`] -> the step -> [`Scheduler::commit`], and a second step may be scheduled before
//! the first is committed: what the first draws goes on without the host. Steps are committed in their order.
//!
//! The folder is read from `policy`, which says who gets on. What a decision takes is said elsewhere: `room` finds slots and
//! blocks, `guess` proposes ids, `fairness` counts what each client was given, `step` writes the arrays, `commit` takes in
//! what came back, and `check` holds the invariants.
//!
//! A step has one budget of tokens. Prompts are cut into chunks, and where others decode in the same step, a chunk is only so
//! long that the step stays within [`SchedulerConfig::gap`].
//!
//! Background sequences get on where no interactive one waits or runs, in steps that stay within the same gap and do not
//! overlap: an interactive request that arrives takes what it would take alone, but for the rest of one such step.
//!
//! The first of those that wait is the oldest request of the client that was given the fewest tokens so far. Nobody is
//! passed over for ever: a sequence that did not get on for [`SchedulerConfig::patience`] steps is interactive from then on,
//! and first in line.
//!
//! Where blocks end, a sequence of lower priority or later arrival is preempted: it loses its blocks, waits, and is
//! computed again, from the prefix cache as far as that still has it. So the first of all always gets on.
//!
//! Where a draft model guesses ([`SchedulerConfig::draft_model`]), a cycle begins with [`Scheduler::wishes`] and
//! [`Scheduler::offer`], and no step is scheduled ahead while a sequence wants guesses ([`Scheduler::wants_draft`]): what is
//! to be guessed follows ids that are known, and sequences that wait for them meanwhile share the next pass.
//!
//! Somebody always gets on: where no step is under way, one is scheduled unless nobody is there
//! ([`Scheduler::expect_idle`]).
//!
//! Invariants, checked after each commit in debug builds: those of [`BlockManager::check`] and of [`Sequence`]; a slot has
//! one sequence; a step keeps within [`Limits`].

mod check;
mod commit;
mod fairness;
mod guess;
mod policy;
mod room;
mod step;

use std::time::Duration;

use self::fairness::Served;
pub use self::step::{Output, Share, Step};
use super::block_manager::{BlockManager, PoolUse};
use super::request::{ClientId, Priority};
use super::sequence::{Sequence, SequenceId};
use super::speculation::Guesses;
use crate::model::{BlockPool, Limits};

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
    served: Served,
    arrivals: u64,
    /// Steps scheduled.
    now: u64,
    preemptions: u64,
    guesses: Guesses,
    /// What the draft model took before the step that is scheduled next.
    drafting: Duration,
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
            served: Served::default(),
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

    /// Takes a sequence that fits `max_context`, and whose forks fit the slots; the caller has refused others.
    pub fn add(&mut self, mut sequence: Sequence) {
        debug_assert!(sequence.prompt_len + sequence.max_tokens <= self.limits.max_context);
        debug_assert!(sequence.prompt_len > 0 && sequence.max_tokens > 0);
        debug_assert!(sequence.forks.len() < self.limits.max_sequences);
        sequence.arrival = self.arrivals;
        sequence.since = self.now;
        self.arrivals += 1;
        self.served.join(sequence.client);
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
        } else if let Some(index) = self.index_of(id) {
            self.end(index);
        }
    }

    fn forget_client(&mut self, client: ClientId) {
        if !self.waiting.iter().chain(&self.running).any(|s| s.client == client) {
            self.served.forget(client);
        }
    }

    /// The sequences of a class that run and are behind their prompt.
    fn decoding(&self, class: Priority) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(move |s| s.class() == class && s.submitted >= s.prompt_len)
    }

    /// Makes overdue sequences interactive, for good: one that was raised for one step only would lose the next, and what it
    /// had computed.
    fn raise_overdue(&mut self) {
        for sequence in self.waiting.iter_mut().chain(&mut self.running) {
            sequence.raised |= sequence.is_overdue(self.now, self.config.patience);
        }
    }
}
