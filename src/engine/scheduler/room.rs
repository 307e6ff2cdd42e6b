//! Slots and blocks: how sequences get, share and lose them.

use super::Scheduler;
use super::step::PendingStep;
use crate::engine::sequence::{Sequence, SequenceId};
use crate::model::Limits;

/// A sequence that was preempted this often becomes interactive.
const MAX_PREEMPTIONS: u32 = 4;

impl Scheduler {
    pub(super) fn index_of(&self, id: SequenceId) -> Option<usize> {
        self.running.iter().position(|s| s.id == id)
    }

    /// Gives a running sequence blocks for positions `..tokens`. If blocks run out, preempts sequences that come after
    /// it in line. Returns the new index of the sequence, or `None` if it must wait for others or was preempted itself.
    pub(super) fn make_room(
        &mut self,
        step: &mut PendingStep,
        id: SequenceId,
        tokens: usize,
    ) -> Option<usize> {
        loop {
            let index = self.index_of(id)?;
            let sequence = &mut self.running[index];
            if self.blocks.has_room(self.blocks.wanted(&sequence.table, sequence.submitted, tokens)) {
                let grown = self.blocks.grow(&mut sequence.table, tokens);
                assert!(grown.is_ok(), "there was room");
                let copies = self.blocks.make_writable(&mut sequence.table, sequence.submitted);
                let Ok(copies) = copies else { unreachable!("room was made") };
                step.step.batch.copies.extend(copies);
                return Some(index);
            }
            // Blocks that were read from the disk for a sequence that waits.
            if self.cancel_restore() {
                continue;
            }
            let own = &self.running[index];
            let comes_after = |victim: &usize| self.running[*victim].line() > own.line();
            if let Some(victim) = self.last_in_line(step).filter(comes_after) {
                self.preempt(victim);
                continue;
            }
            let is_last = self.running.iter().all(|s| s.line() <= own.line());
            // The sequence waits if a later sequence is in the step, or if its own step in flight will free blocks
            // before the window. Otherwise no other sequence will free blocks for it, so it gives up its own.
            if own.submitted == own.computed && is_last {
                self.preempt(index);
            }
            return None;
        }
    }

    /// The running sequence that is last in line and not in the step.
    pub(super) fn last_in_line(&self, step: &PendingStep) -> Option<usize> {
        let candidates = self.running.iter().enumerate().filter(|(_, s)| !step.has(s.id));
        candidates.max_by_key(|(_, s)| s.line()).map(|(index, _)| index)
    }

    /// Whether there are slots for a waiting sequence and its forks, and blocks for everything that must be computed
    /// before its first id.
    pub(super) fn has_place(&self, index: usize, step: &PendingStep) -> bool {
        let sequence = &self.waiting[index];
        if self.free_slots.len() < 1 + sequence.forks.len() {
            return false;
        }
        if self.running.is_empty() && step.step.shares.is_empty() {
            return true; // no other sequence holds a block, except reserved ones, which are released if they are needed
        }
        let Limits { kv, max_batch_tokens, .. } = &self.limits;
        // Cached blocks of the prefix count too, because they become unavailable when the sequence holds them. One
        // block more is needed for the first decode, which would otherwise preempt.
        let mut wanted = kv.most_blocks(sequence.tokens.len() + kv.block_size, *max_batch_tokens);
        // The blocks that running sequences need for the rest of their prompts are reserved.
        for s in self.running.iter().filter(|s| s.submitted < s.tokens.len()) {
            let missing = self.blocks.missing(&s.table, s.tokens.len());
            let most = kv.most_blocks(s.tokens.len(), *max_batch_tokens);
            for (((wanted, list), missing), most) in
                wanted.iter_mut().zip(s.table.blocks()).zip(missing).zip(most)
            {
                *wanted += missing.min(most.saturating_sub(list.ids.len()));
            }
        }
        if self.blocks.has_room(wanted.iter().copied()) {
            return true;
        }
        if sequence.bypasses_cache() {
            return false;
        }
        let salt = sequence.request.cache_salt.on_path(self.attention_path);
        let held = self.blocks.held_prefix(&sequence.tokens, &sequence.request.images, &salt);
        for (pool, wanted) in wanted.iter_mut().enumerate() {
            // The sequence has its reserved blocks already. In a pool without a window, they are part of the held prefix.
            let own = kv.pools[pool].window.map_or(held, |_| self.reserved(sequence, pool));
            *wanted = wanted.saturating_sub(own);
        }
        self.blocks.has_room(wanted)
    }

    /// Starts a waiting sequence for which there is room. It gets slots, and the blocks of its text that the prefix
    /// cache has.
    pub(super) fn start(&mut self, index: usize) -> SequenceId {
        let mut sequence = self.waiting.remove(index);
        sequence.request.cache_salt = sequence.request.cache_salt.on_path(self.attention_path);
        let known: &[u32] = if sequence.bypasses_cache() { &[] } else { &sequence.tokens };
        let request = &sequence.request;
        let (table, cached) =
            self.blocks.admit(known, &request.images, request.priority, &request.cache_salt);
        sequence.table = table;
        (sequence.found, sequence.computed, sequence.submitted) = (cached, cached, cached);
        self.take_restored(&mut sequence);
        sequence.cached.get_or_insert(cached.min(sequence.prompt_len));
        sequence.slot = self.free_slots.pop();
        let others = self.free_slots.len() - sequence.forks.len();
        sequence.fork_slots = self.free_slots.split_off(others);
        let id = sequence.id;
        insert_by_arrival(&mut self.running, sequence);
        id
    }

    /// Turns the forks of a sequence into separate sequences. The last token of the prompt was just put into the step.
    /// Each fork draws its first id after that token.
    pub(super) fn split_forks(&mut self, step: &mut PendingStep, index: usize) {
        for fork in std::mem::take(&mut self.running[index].forks) {
            let parent = &mut self.running[index];
            let table = self.blocks.fork(&parent.table);
            let mut child = parent.fork(fork, table);
            step.push_fork(parent, &mut child);
            // The fork is inserted after its parent, so the index of the parent stays valid.
            insert_by_arrival(&mut self.running, child);
        }
    }

    /// Takes the blocks and the slot away from a running sequence, which waits to be computed again.
    pub(super) fn preempt(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        tracing::debug!(sequence = sequence.id, tokens = sequence.submitted, "preempted");
        // A sequence that is preempted repeatedly makes no progress, but never waits long enough to be overdue.
        sequence.promoted |= sequence.preemptions + 1 >= MAX_PREEMPTIONS;
        self.preemptions += 1;
        self.put_back(index);
    }

    /// Moves a running sequence back to the waiting sequences, without blocks and slot.
    pub(super) fn put_back(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        self.take_resources(&mut sequence);
        sequence.start_over();
        insert_by_arrival(&mut self.waiting, sequence);
    }

    /// Removes a running sequence permanently.
    pub(super) fn end(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        self.take_resources(&mut sequence);
        self.forget_client(sequence.request.client);
    }

    fn take_resources(&mut self, sequence: &mut Sequence) {
        self.served.add_mask_time(sequence.request.client, sequence.take_mask_time());
        self.blocks.release(std::mem::take(&mut sequence.table));
        self.free_slots.extend(sequence.slot.take());
        self.free_slots.append(&mut sequence.fork_slots);
    }
}

fn insert_by_arrival(list: &mut Vec<Sequence>, sequence: Sequence) {
    let index = list.partition_point(|s| s.arrival <= sequence.arrival);
    list.insert(index, sequence);
}
