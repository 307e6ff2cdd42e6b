//! Decides what the next step computes: a synchronous state machine without clock, I/O or GPU.
//!
//! One cycle is [`Scheduler::schedule`] -> the step -> [`Scheduler::commit`]. This version runs one sequence at a
//! time, in order of arrival; what changes for more is the body of `schedule`, not its callers: a [`Batch`]
//! already names slots, and every sequence contributes `(start, tokens)` under one token budget.
//!
//! Invariants, checked after each step in debug builds: every block has one owner; `computed <= total` for each
//! sequence, and its blocks hold `computed` positions.

use std::collections::VecDeque;

use super::block_manager::BlockManager;
use super::sequence::{FinishReason, Sequence, SequenceId};
use crate::model::{Batch, BatchSequence, Input, Limits, Sampled, Sampling};

/// The device slot of the one running sequence.
const SLOT: u32 = 0;

/// A step and what it is for.
#[derive(Debug)]
pub struct Step {
    pub batch: Batch,
    pub sampling: Sampling,
    /// Whose tokens: one per entry of `batch.sequences`.
    pub ids: Vec<SequenceId>,
}

/// What one step yielded for one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    pub id: SequenceId,
    /// Id for the reader; none where the sampled one is a stop id.
    pub token: Option<u32>,
    /// Set where the sequence ended; it is gone from the scheduler then, and its blocks are free.
    pub finish: Option<FinishReason>,
}

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    blocks: BlockManager,
    waiting: VecDeque<Sequence>,
    running: Option<Sequence>,
}

impl Scheduler {
    /// The pool must hold one sequence of full length, or the first long request could never run.
    pub fn new(limits: Limits) -> Self {
        assert!(limits.max_batch_tokens > 0 && limits.max_sequences > 0, "a step holds nothing: {limits:?}");
        assert!(
            limits.num_blocks * limits.block_size >= limits.max_context,
            "{} KV blocks of {} tokens do not hold a context of {}",
            limits.num_blocks,
            limits.block_size,
            limits.max_context
        );
        let blocks = BlockManager::new(limits.num_blocks, limits.block_size);
        Self { limits, blocks, waiting: VecDeque::new(), running: None }
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn num_running(&self) -> usize {
        usize::from(self.running.is_some())
    }

    pub fn free_blocks(&self) -> usize {
        self.blocks.num_free()
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_none() && self.waiting.is_empty()
    }

    /// Appends a sequence that fits `max_context`; the caller has refused others.
    pub fn add(&mut self, sequence: Sequence) {
        debug_assert!(sequence.prompt.len() + sequence.max_tokens <= self.limits.max_context);
        debug_assert!(!sequence.prompt.is_empty() && sequence.max_tokens > 0 && sequence.blocks.is_empty());
        self.waiting.push_back(sequence);
    }

    /// Forgets a sequence and frees its blocks. Not while a step is under way.
    pub fn remove(&mut self, id: SequenceId) {
        self.waiting.retain(|s| s.id != id);
        if let Some(sequence) = self.running.take_if(|s| s.id == id) {
            self.blocks.release(sequence.blocks);
        }
    }

    /// The next step, or none where nothing waits or runs.
    pub fn schedule(&mut self) -> Option<Step> {
        if self.running.is_none() {
            self.running = self.waiting.pop_front();
        }
        let sequence = self.running.as_mut()?;

        let (start, pending) = (sequence.computed, sequence.pending());
        let len = pending.min(self.limits.max_batch_tokens);
        let input = if start < sequence.prompt.len() {
            Input::Ids(sequence.prompt[start..start + len].to_vec())
        } else {
            Input::LastSampled
        };
        let grown = self.blocks.grow(&mut sequence.blocks, start + len);
        assert!(grown, "a lone sequence of {} tokens found the KV pool empty", start + len);

        let requests = if len == pending { vec![(0, sequence.sampling)] } else { Vec::new() };
        let block_table = sequence.blocks.iter().map(|b| b.id()).collect();
        let share = BatchSequence { slot: SLOT, start, input, block_table };
        let ids = vec![sequence.id];
        Some(Step { batch: Batch { sequences: vec![share] }, sampling: Sampling { requests }, ids })
    }

    /// Takes in what a step yielded; `sampled` answers `step.sampling` entry by entry.
    pub fn commit(&mut self, step: &Step, sampled: &Sampled) -> Vec<Output> {
        assert_eq!(
            sampled.ids.len(),
            step.sampling.requests.len(),
            "the runner sampled for others than asked"
        );
        let sequence = self.running.as_mut().expect("a step was committed that nothing runs for");
        assert_eq!(step.ids, [sequence.id], "a step was committed twice, or after its sequence left");
        sequence.computed += step.batch.num_tokens();

        let mut outputs = Vec::new();
        if let [token] = sampled.ids[..] {
            sequence.generated += 1;
            let stopped = sequence.stop_token_ids.contains(&token);
            let finish = if stopped {
                Some(FinishReason::Stop)
            } else {
                (sequence.generated == sequence.max_tokens).then_some(FinishReason::Length)
            };
            outputs.push(Output { id: sequence.id, token: (!stopped).then_some(token), finish });
            if finish.is_some() {
                let id = sequence.id;
                self.remove(id);
            }
        }
        if cfg!(debug_assertions) {
            self.check();
        }
        outputs
    }

    /// Panics where an invariant of this file's head is broken.
    pub fn check(&self) {
        self.blocks.check(self.running.iter().map(|s| &s.blocks[..]));
        for s in self.waiting.iter().chain(&self.running) {
            assert!(s.computed <= s.total(), "sequence {}: {} of {} computed", s.id, s.computed, s.total());
            assert!(s.blocks.len() * self.limits.block_size >= s.computed, "sequence {} lacks blocks", s.id);
        }
        assert!(self.waiting.iter().all(|s| s.blocks.is_empty()), "a waiting sequence owns blocks");
    }
}
