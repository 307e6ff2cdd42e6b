//! Restarts all sequences after the device was lost or the coprocessor failed: they are computed again.
//!
//! A prompt may be the reason why the device fails. So each sequence of a lost step becomes a suspect: it is computed
//! alone until it has as many positions as before the loss. If the device is lost again in that time, that suspect
//! caused the loss: it ends with an error, and the other sequences continue.
//!
//! If the coprocessor fails, the prompt that it computed is known. So that prompt ends immediately, and there are no suspects.

use std::iter;

use super::Scheduler;
use super::step::{SequenceShare, Step};
use crate::engine::block_manager::BlockManager;
use crate::engine::image_slots::ImageSlots;
use crate::engine::sequence::{OnDisk, Sequence, SequenceId};

impl Scheduler {
    /// The running sequences that have a share in one of these steps.
    pub fn sequences_in<'a>(&self, steps: impl IntoIterator<Item = &'a Step>) -> Vec<SequenceId> {
        self.sequences_of(steps.into_iter().flat_map(|step| &step.shares))
    }

    /// The running sequences that these shares belong to.
    pub(in crate::engine) fn sequences_of<'a>(
        &self,
        shares: impl IntoIterator<Item = &'a SequenceShare>,
    ) -> Vec<SequenceId> {
        let shares: Vec<_> = shares.into_iter().collect();
        let is_in = |s: &&Sequence| shares.iter().any(|share| share.belongs_to(s));
        self.running.iter().filter(is_in).map(|s| s.id).collect()
    }

    /// Restarts after the device was lost while it computed the sequences `in_flight`. All blocks and all slots of
    /// images are empty, no step is in flight, and every sequence waits to be computed again. Removes the sequences
    /// that caused the loss, and returns their ids with those of their forks.
    pub fn restart(&mut self, in_flight: &[SequenceId]) -> Vec<SequenceId> {
        let is_in_flight = |s: &Sequence| in_flight.contains(&s.id);
        let was_alone = self.replaying().is_some();
        let mut faulty = Vec::new();
        for sequence in self.running.iter_mut().filter(|s| is_in_flight(s)) {
            if was_alone {
                faulty.push(sequence.id);
            } else {
                sequence.suspect = Some(sequence.submitted);
            }
        }
        self.restart_without(&faulty)
    }

    /// Restarts like [`Scheduler::restart`] after a failure that exactly these sequences caused, which are removed.
    pub fn restart_without(&mut self, faulty: &[SequenceId]) -> Vec<SequenceId> {
        while let Some(last) = self.running.len().checked_sub(1) {
            self.put_back(last);
        }
        self.blocks = BlockManager::new(&self.limits.kv, self.config.turn_blocks);
        self.stored.clear();
        self.waiting.iter_mut().for_each(|s| (s.on_disk, s.lookups) = (OnDisk::default(), 0));
        self.image_slots = ImageSlots::new(self.limits.images.map_or(0, |images| images.slots));
        self.has_suspects = true;
        let (ended, waiting) = self.waiting.drain(..).partition(|s| faulty.contains(&s.id));
        self.waiting = waiting;
        let ended: Vec<Sequence> = ended;
        ended.iter().for_each(|sequence| self.forget_client(sequence.request.client));
        ended.iter().flat_map(|s| iter::once(s.id).chain(s.forks.iter().map(|fork| fork.id))).collect()
    }

    /// The suspect that is computed alone now: the first suspect in line.
    pub(super) fn replaying(&self) -> Option<&Sequence> {
        if !self.has_suspects {
            return None;
        }
        let suspects = self.waiting.iter().chain(&self.running).filter(|s| s.suspect.is_some());
        suspects.min_by_key(|s| s.line())
    }

    /// Whether a sequence may have caused the loss, because it was not computed alone since.
    pub(in crate::engine) fn is_suspect(&self, id: SequenceId) -> bool {
        let mut all = self.waiting.iter().chain(&self.running);
        all.any(|s| s.id == id && s.suspect.is_some())
    }

    /// Whether a suspect must be computed alone, but a step of other sequences is still in flight.
    pub(super) fn waits_for_others(&self) -> bool {
        let Some(suspect) = self.replaying().map(|suspect| suspect.id) else { return false };
        self.running.iter().any(|s| s.id != suspect && s.submitted > s.computed)
    }

    /// Whether a sequence may be in the next step: while there is a suspect, only that suspect.
    pub(super) fn may_run(&self, sequence: &Sequence) -> bool {
        self.replaying().is_none_or(|suspect| suspect.id == sequence.id)
    }

    /// Updates `has_suspects` when no suspect is left.
    pub(super) fn update_has_suspects(&mut self) {
        self.has_suspects = self.replaying().is_some();
    }

    /// Ends the suspicion of a sequence that has as many computed positions as before the loss.
    pub(super) fn clear_suspect(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        sequence.suspect = sequence.suspect.filter(|reached| sequence.computed < *reached);
    }
}
