//! Decides what the next step computes: a synchronous state machine without clock, I/O or GPU.
//!
//! One cycle is [`Scheduler::schedule`] -> the step -> [`Scheduler::commit`]. A second step may be scheduled before the
//! first is committed: an id that the first step draws feeds the second on the device. Steps are committed in their
//! order.
//!
//! Start with `policy`, which decides which sequences get tokens. The other files serve it: `room` finds slots and
//! blocks, `draft` gets draft tokens, `fairness` counts the tokens of each client, `step` builds the arrays, `commit`
//! takes in the results, `replay` begins anew after the device was lost, and `check` holds the invariants.
//!
//! A step has one budget of tokens. Prompts are cut into chunks. If other sequences decode in the same step, chunks are
//! so short that the step stays within [`SchedulerConfig::gap`].
//!
//! Background sequences get tokens if no interactive one waits or runs. Their steps stay within the same gap and do not
//! overlap, so an interactive request that arrives waits at most for the rest of one such step.
//!
//! The first in line is the oldest request of the client that got the fewest tokens so far. No sequence starves: a
//! sequence that got no tokens for [`SchedulerConfig::patience`] steps is interactive from then on, and first in line.
//!
//! If blocks run out, a sequence of lower priority or later arrival is preempted: it loses its blocks, waits, and is
//! computed again, except for what the prefix cache has. So the first in line always gets tokens.
//!
//! With a draft model ([`SchedulerConfig::draft_model`]), a cycle begins with [`Scheduler::draft_requests`] and
//! [`Scheduler::take_draft_tokens`]. No step is scheduled ahead while a sequence wants draft tokens
//! ([`Scheduler::wants_draft`]): draft tokens follow known ids, and all sequences that want some share one pass of the
//! draft model for each token.
//!
//! Progress is certain: if no step is under way and a sequence is there, a step is scheduled
//! ([`Scheduler::expect_idle`]).
//!
//! Invariants, checked after each commit with [`SchedulerConfig::checks`]: the invariants of [`BlockManager::check`]
//! and of [`Sequence`]; a slot has at most one sequence; a step keeps within [`Limits`].

mod check;
mod commit;
mod fairness;
mod draft;
mod policy;
mod replay;
mod room;
mod step;

use std::time::Duration;

use self::fairness::Served;
pub use self::step::{Output, SequenceShare, Step};
use super::block_manager::{BlockManager, PoolUse};
use super::request::{ClientId, Priority};
use super::sequence::{Sequence, SequenceId};
use super::speculation::DraftTotals;
use crate::model::{BlockPool, Limits};

#[derive(Debug, Clone, Copy)]
pub struct SchedulerConfig {
    /// The longest time of a step that has prefill in it and that others wait for: a step with decodes, or a step of
    /// background sequences.
    pub gap: Duration,
    /// A sequence that got no tokens for this many steps is first in line, whatever its priority and its client.
    pub patience: u64,
    /// The number of sliding blocks that the prefix cache keeps for the ends of turns.
    pub turn_blocks: usize,
    /// The most tokens of a step that has draft tokens in it, draft tokens included; 0 turns speculation off. One pass
    /// over the weights serves more tokens at no cost, until arithmetic takes longer than memory.
    pub speculation_tokens: usize,
    /// Whether the runner has a draft model. The draft model is asked if prompt lookup finds nothing.
    pub draft_model: bool,
    /// Whether every block, table and slot is checked behind each step, with a panic where one is wrong. A check takes
    /// longer than all else that the scheduler does of a step.
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
            checks: true,
        }
    }
}

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    config: SchedulerConfig,
    blocks: BlockManager,
    /// The waiting sequences, in order of arrival.
    waiting: Vec<Sequence>,
    /// The running sequences, in order of arrival.
    running: Vec<Sequence>,
    free_slots: Vec<u32>,
    served: Served,
    arrivals: u64,
    /// Number of calls of [`Scheduler::schedule`] so far: the scheduler's clock.
    steps: u64,
    preemptions: u64,
    /// The runner's, which a sequence's blocks belong to from its start on.
    attention_path: u32,
    /// Whether there may be a suspect, for which all others wait.
    has_suspects: bool,
    drafts: DraftTotals,
    /// Time that the draft model took for the draft tokens of the step that is scheduled next.
    drafting: Duration,
}

impl Scheduler {
    /// Panics if the pools do not hold one sequence of full length, because the first long request could never run.
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
            steps: 0,
            preemptions: 0,
            attention_path: 0,
            has_suspects: false,
            drafts: DraftTotals::default(),
            drafting: Duration::ZERO,
        }
    }

    /// Says by what attention is computed from now on: sequences that start find only blocks of this path.
    pub fn set_attention_path(&mut self, path: u32) {
        self.attention_path = path;
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

    /// Whether a sequence waits or runs, or is a fork of a sequence that does.
    pub fn knows(&self, id: SequenceId) -> bool {
        let mut all = self.waiting.iter().chain(&self.running);
        all.any(|s| s.id == id || s.forks.iter().any(|fork| fork.id == id))
    }

    /// How often a sequence lost its blocks to another.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Counts of the draft tokens of all sequences so far.
    pub fn drafts(&self) -> DraftTotals {
        self.drafts
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Adds a sequence. The caller has checked that it fits `max_context`, and that its forks fit the slots.
    pub fn add(&mut self, mut sequence: Sequence) {
        debug_assert!(sequence.prompt_len + sequence.max_tokens <= self.limits.max_context);
        debug_assert!(sequence.prompt_len > 0 && sequence.max_tokens > 0);
        debug_assert!(sequence.forks.len() < self.limits.max_sequences);
        sequence.arrival = self.arrivals;
        sequence.last_step = self.steps;
        self.arrivals += 1;
        self.served.join(sequence.client);
        self.waiting.push(sequence);
    }

    /// Removes a sequence and frees its blocks. The results that a step under way has for the sequence are dropped. If
    /// the sequence has forks that have not parted yet, the first fork takes its place, and gets what that step
    /// computes.
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

    /// The running sequences of a class whose prompt is submitted.
    fn decoding(&self, class: Priority) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(move |s| s.class() == class && s.submitted >= s.prompt_len)
    }

    /// Makes overdue sequences interactive for good. A sequence that was raised for one step only would be preempted in
    /// the next step, and lose what it had computed.
    fn raise_overdue(&mut self) {
        for sequence in self.waiting.iter_mut().chain(&mut self.running) {
            sequence.raised |= sequence.is_overdue(self.steps, self.config.patience);
        }
    }
}
