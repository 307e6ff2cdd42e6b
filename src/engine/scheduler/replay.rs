//! What becomes of the sequences when the device was lost: all are computed again, and those that the lost steps had
//! are computed alone.
//!
//! A prompt may be what kills the device. So a sequence that was in a lost step is a suspect, and no step has another
//! sequence beside a suspect's, until the suspect is as far as it was. A device that is lost meanwhile is lost by that
//! suspect: it ends with an error, and the others go on.
//!
//! A unit beside the device that fails does so at one prompt, which is known. So that prompt ends at once, and nobody
//! is a suspect.

use std::iter;

use super::Scheduler;
use super::step::{SequenceShare, Step};
use crate::engine::block_manager::BlockManager;
use crate::engine::sequence::{Sequence, SequenceId};

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

    /// Begins anew after the device was lost with these sequences in its steps: no block holds anything, no step is
    /// under way, and every sequence waits to be computed again. Returns the answers that are at fault, which are
    /// removed.
    pub fn restart(&mut self, under_way: &[SequenceId]) -> Vec<SequenceId> {
        let is_under_way = |s: &Sequence| under_way.contains(&s.id);
        let was_alone = self.replaying().is_some();
        let mut faulty = Vec::new();
        for sequence in self.running.iter_mut().filter(|s| is_under_way(s)) {
            if was_alone {
                faulty.push(sequence.id);
            } else {
                sequence.suspect = Some(sequence.submitted);
            }
        }
        self.restart_without(&faulty)
    }

    /// Begins anew as [`Scheduler::restart`] does, after a failure that these sequences are at fault for and no others.
    pub fn restart_without(&mut self, faulty: &[SequenceId]) -> Vec<SequenceId> {
        while let Some(last) = self.running.len().checked_sub(1) {
            self.put_back(last);
        }
        self.blocks = BlockManager::new(self.limits.kv, self.config.turn_blocks);
        self.has_suspects = true;
        let (ended, waiting) = self.waiting.drain(..).partition(|s| faulty.contains(&s.id));
        self.waiting = waiting;
        let ended: Vec<Sequence> = ended;
        ended.iter().for_each(|sequence| self.forget_client(sequence.client));
        ended.iter().flat_map(|s| iter::once(s.id).chain(s.forks.iter().map(|fork| fork.id))).collect()
    }

    /// The suspect that is computed alone now: the first in line.
    pub(super) fn replaying(&self) -> Option<&Sequence> {
        if !self.has_suspects {
            return None;
        }
        let suspects = self.waiting.iter().chain(&self.running).filter(|s| s.suspect.is_some());
        suspects.min_by_key(|s| s.line())
    }

    /// Whether a suspect is to be computed alone, and a step of other sequences is under way.
    pub(super) fn waits_for_others(&self) -> bool {
        let Some(suspect) = self.replaying().map(|suspect| suspect.id) else { return false };
        self.running.iter().any(|s| s.id != suspect && s.submitted > s.computed)
    }

    /// Whether suspects let a sequence be in the next step.
    pub(super) fn may_run(&self, sequence: &Sequence) -> bool {
        self.replaying().is_none_or(|suspect| suspect.id == sequence.id)
    }

    /// Notices that no suspect is left.
    pub(super) fn look_for_suspects(&mut self) {
        self.has_suspects = self.replaying().is_some();
    }

    /// Lets a suspect share steps again, if it is as far as it was.
    pub(super) fn clear(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        sequence.suspect = sequence.suspect.filter(|reached| sequence.computed < *reached);
    }
}
