//! Texts on disk: which turns are to be stored, and how a waiting sequence gets blocks that are read from the disk.
//!
//! The scheduler does no I/O. It reports the ends of turns ([`Scheduler::take_turns`]), and which waiting sequence comes
//! next and was not looked up ([`Scheduler::next_lookup`]). If the disk has more of its text than the prefix cache, the
//! engine reserves blocks ([`Scheduler::begin_restore`]), writes them, and adds them to the cache
//! ([`Scheduler::finish_restore`]). The sequence waits meanwhile, and others may overtake it. Then it starts like any
//! sequence whose text is cached.
//!
//! There is one restore at a time. Its blocks are reserved until the sequence starts, or until the next restore begins. If a
//! running sequence needs their room, they are released first.

use std::time::Duration;

use super::Scheduler;
use super::step::PendingStep;
use super::turns::{DiskLookup, EndedTurn, Restored, SaltedText};
use crate::engine::block_manager::{NoRoom, NodeRef, UnwrittenBlock};
use crate::engine::request::{CacheSalt, Priority};
use crate::engine::sequence::{OnDisk, Sequence, SequenceId};

/// The most turns that wait to be taken. The oldest are dropped.
const MAX_TURNS: usize = 256;
/// How often a sequence is looked up at most. A lookup is repeated if a file turns out to be damaged. It is removed then, so
/// another lookup finds less.
const MAX_LOOKUPS: u32 = 4;

impl Scheduler {
    /// The turns that ended since the last call, the oldest first.
    pub fn take_turns(&mut self) -> impl Iterator<Item = EndedTurn> + use<> {
        std::mem::take(&mut self.stored.turns).into_iter()
    }

    /// The texts that must not be found again, since the last call.
    pub(in crate::engine) fn take_forgotten(&mut self) -> Vec<SaltedText> {
        std::mem::take(&mut self.stored.forgotten)
    }

    /// Records that the text of a running sequence must not be found again.
    pub(super) fn push_forgotten(&mut self, index: usize, salt: CacheSalt) {
        if self.config.stores_turns {
            let sequence = &self.running[index];
            let images = sequence.request.images.clone();
            let forgotten = SaltedText { salt, tokens: sequence.tokens.clone(), images };
            self.stored.forgotten.push(forgotten);
        }
    }

    /// How many sequences began with tokens from the disk and computed a step, and the tokens.
    pub fn disk_hits(&self) -> (u64, u64) {
        (self.stored.hits, self.stored.hit_tokens)
    }

    /// The block that a node of a turn has in a pool, if it was not evicted.
    pub(in crate::engine) fn registered(&self, node: NodeRef, pool: usize) -> Option<u32> {
        self.blocks.registered(node, pool)
    }

    /// Records the end of a turn of a running sequence.
    pub(super) fn push_turn(&mut self, index: usize) {
        let sequence = &self.running[index];
        if !self.config.stores_turns || sequence.request.priority == Priority::Background {
            return;
        }
        let mut nodes = self.blocks.nodes(&sequence.table);
        if sequence.generated() <= 1 {
            // The same prompt must find its blocks again. The block of its last token is always computed.
            nodes.truncate((sequence.prompt_len - 1) / self.limits.kv.block_size);
        }
        let end = nodes.len() * self.limits.kv.block_size;
        let images = &sequence.request.images;
        if end == 0 || sequence.image_split_at(end).is_some() {
            return;
        }
        let images = images.iter().filter(|image| image.positions.end <= end);
        let text = SaltedText {
            salt: sequence.table.salt().clone(),
            tokens: sequence.tokens[..end].to_vec(),
            images: images.cloned().collect(),
        };
        if self.stored.turns.len() == MAX_TURNS {
            self.stored.turns.pop_front();
        }
        self.stored.turns.push_back(EndedTurn { text, nodes });
    }

    /// Whether a waiting sequence may start: not before it was looked up on disk.
    pub(super) fn may_start(&self, sequence: &Sequence) -> bool {
        !self.config.stores_turns || sequence.on_disk == OnDisk::Settled || sequence.bypasses_cache()
    }

    /// Whether a waiting sequence waits for the disk. Others may overtake it.
    pub(super) fn waits_for_disk(&self, sequence: &Sequence) -> bool {
        self.is_restoring(sequence.begun_as) || !self.may_start(sequence) && sequence.on_disk.waits()
    }

    /// The number of blocks of a pool that are reserved for a sequence.
    pub(super) fn reserved(&self, sequence: &Sequence, pool: usize) -> usize {
        let restored =
            self.stored.restored.as_ref().filter(|restored| restored.sequence == sequence.begun_as);
        restored.map_or(0, |restored| restored.table.blocks()[pool].ids.len())
    }

    /// Whether a waiting sequence was not looked up on disk yet.
    pub(in crate::engine) fn wants_lookup(&self) -> bool {
        self.waiting.iter().any(|s| !self.may_start(s))
    }

    /// The waiting sequence that starts next, if there is a place for it and it was not looked up on disk.
    pub(in crate::engine) fn next_lookup(&mut self) -> Option<DiskLookup<'_>> {
        let is_free = self.may_begin_restore();
        let is_wanted = |s: &Sequence| {
            !self.may_start(s) && !self.is_restoring(s.begun_as) && (is_free || !s.on_disk.waits())
        };
        let index = self.first_of(self.class(), is_wanted)?;
        if !self.has_place(index, &PendingStep::new(&self.limits, false)) {
            return None;
        }
        let salt = self.waiting[index].request.cache_salt.on_path(self.attention_path);
        let sequence = &mut self.waiting[index];
        let Sequence { begun_as, ref tokens, ref request, .. } = *sequence;
        let known = self.blocks.known_prefix(tokens, &request.images, &salt);
        Some(DiskLookup { id: begun_as, tokens, images: &request.images, salt, known })
    }

    /// The sequence may start without more tokens from the disk.
    pub(in crate::engine) fn settle(&mut self, id: SequenceId) {
        self.set_on_disk(id, OnDisk::Settled);
    }

    /// The sequence waits for the restore of another one. Then so many bytes are read for it, if computing is not predicted
    /// to take less time.
    pub(in crate::engine) fn wait_for_disk(
        &mut self,
        id: SequenceId,
        bytes: u64,
        computing: Option<Duration>,
    ) {
        self.set_on_disk(id, OnDisk::Waits { bytes, computing });
    }

    /// Settles the sequences of the present class for which the wait for the disk takes longer than computing. `time` is
    /// the predicted time of reading so many bytes. Returns the number of these sequences.
    pub(in crate::engine) fn settle_late(&mut self, time: impl Fn(u64) -> Duration) -> u64 {
        let class = self.class();
        let (mut before, mut settled) = (0, 0);
        for sequence in self.waiting.iter_mut().filter(|s| s.class() == class) {
            let OnDisk::Waits { bytes, computing } = sequence.on_disk else { continue };
            if computing.is_some_and(|computing| time(before + bytes) > computing) {
                sequence.on_disk = OnDisk::Settled;
                settled += 1;
            } else {
                before += bytes;
            }
        }
        settled
    }

    /// The bytes that are read for the sequences of the present class that wait for the restore of another one.
    pub(in crate::engine) fn awaited_bytes(&self) -> u64 {
        let class = self.class();
        let awaited = |s: &Sequence| match s.on_disk {
            OnDisk::Waits { bytes, .. } if s.class() == class && !self.is_restoring(s.begun_as) => bytes,
            _ => 0,
        };
        self.waiting.iter().map(awaited).sum()
    }

    /// The sequence is looked up again, because a part of its text could not be read: less of it, or nothing, is there.
    pub(in crate::engine) fn look_up_again(&mut self, id: SequenceId) {
        if let Some(sequence) = self.waiting.iter_mut().find(|s| s.begun_as == id) {
            sequence.lookups += 1;
            let is_last = sequence.lookups == MAX_LOOKUPS;
            sequence.on_disk = if is_last { OnDisk::Settled } else { OnDisk::Unknown };
        }
    }

    fn set_on_disk(&mut self, id: SequenceId, on_disk: OnDisk) {
        if let Some(sequence) = self.waiting.iter_mut().find(|s| s.begun_as == id) {
            sequence.on_disk = on_disk;
        }
    }

    /// All waiting sequences may start without more tokens from the disk.
    pub(in crate::engine) fn settle_all(&mut self) {
        self.waiting.iter_mut().for_each(|sequence| sequence.on_disk = OnDisk::Settled);
    }

    /// Whether a restore may begin: not before the sequence of another one has started. A background sequence does not count
    /// while there are interactive ones.
    pub(in crate::engine) fn may_begin_restore(&self) -> bool {
        let class = self.class();
        let will_start = |id: SequenceId| {
            self.waiting.iter().any(|s| s.begun_as == id && s.class() == class && self.may_run(s))
        };
        self.stored.restored.as_ref().is_none_or(|restored| !will_start(restored.sequence))
    }

    /// Reserves the blocks that a sequence needs after its first `blocks` blocks. Returns those that must be written. `known`
    /// is the number of tokens that the prefix cache has. The blocks of an earlier restore are released. They are in the prefix cache, but their room may be taken.
    pub(in crate::engine) fn begin_restore(
        &mut self,
        id: SequenceId,
        known: usize,
        blocks: usize,
    ) -> Result<Vec<UnwrittenBlock>, NoRoom> {
        assert!(self.may_begin_restore(), "another restore has not ended");
        self.cancel_restore();
        let sequence = self.waiting.iter().find(|s| s.begun_as == id).ok_or(NoRoom)?;
        let (tokens, request) = (&sequence.tokens, &sequence.request);
        let salt = request.cache_salt.on_path(self.attention_path);
        let by = (request.priority, &salt);
        let (table, unwritten) = self.blocks.admit_unwritten(tokens, &request.images, by, blocks)?;
        let tokens = blocks * self.limits.kv.block_size;
        self.stored.restored = Some(Restored { sequence: id, table, tokens, known, is_complete: false });
        Ok(unwritten)
    }

    /// Whether blocks of this sequence are reserved and not written yet.
    pub(in crate::engine) fn is_restoring(&self, id: SequenceId) -> bool {
        self.stored.restored.as_ref().is_some_and(|r| r.sequence == id && !r.is_complete)
    }

    /// Adds the blocks of a restore to the prefix cache: they are written.
    pub(in crate::engine) fn finish_restore(&mut self) {
        let Some(restored) = &mut self.stored.restored else { return };
        let Some(sequence) = self.waiting.iter().find(|s| s.begun_as == restored.sequence) else {
            self.cancel_restore();
            return;
        };
        let images = &sequence.request.images;
        self.blocks.commit(&mut restored.table, &sequence.tokens[..restored.tokens], images);
        restored.is_complete = true;
        let id = restored.sequence;
        self.settle(id);
    }

    /// Releases reserved blocks. Returns whether there were any.
    pub(in crate::engine) fn cancel_restore(&mut self) -> bool {
        let Some(restored) = self.stored.restored.take() else { return false };
        self.blocks.release(restored.table);
        true
    }

    /// Releases the blocks that are reserved for a sequence which starts now, and counts the tokens that it has from the
    /// disk. The sequence has the blocks already.
    pub(super) fn take_restored(&mut self, sequence: &mut Sequence) {
        let is_its = |restored: &mut Restored| restored.sequence == sequence.begun_as;
        let Some(restored) = self.stored.restored.take_if(is_its) else { return };
        self.blocks.release(restored.table);
        sequence.restored = sequence.found.min(restored.tokens).saturating_sub(restored.known);
    }

    /// Releases the blocks that are reserved for a sequence that is removed.
    pub(super) fn drop_restored(&mut self, begun_as: SequenceId) {
        if self.stored.restored.as_ref().is_some_and(|restored| restored.sequence == begun_as) {
            self.cancel_restore();
        }
    }

    /// Counts a sequence whose first step after a restore is committed.
    pub(super) fn count_restored(&mut self, index: usize) {
        let tokens = std::mem::take(&mut self.running[index].restored);
        if tokens > 0 {
            self.stored.hits += 1;
            self.stored.hit_tokens += tokens as u64;
        }
    }
}
