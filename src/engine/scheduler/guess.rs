//! Guesses: how many a step has room for, where they come from, and the requests to the draft model.

use std::time::Duration;

use super::Scheduler;
use super::step::{Guessed, PendingStep, share_of};
use crate::engine::sequence::{Sequence, SequenceId};
use crate::engine::speculation::Guesser;
use crate::model::{DraftRequest, Draw, Input};

impl Scheduler {
    /// Whether a sequence wants guesses of the draft model now, or will when the steps under way are committed. Until
    /// these are committed, no step is to be scheduled.
    pub fn wants_draft(&self) -> bool {
        let (class, share) = (self.class(), self.draft_share());
        let wants = |s: &Sequence| s.speculating || self.wanted_guesses(s, share) > 0;
        share > 0 && self.running.iter().filter(|s| s.class() == class).any(wants)
    }

    /// The requests to the draft model before the next step is scheduled, with no step under way: one for each sequence
    /// that decodes and for which prompt lookup proposes nothing. The sequences get the blocks that their guesses need.
    pub fn wishes(&mut self) -> Vec<(SequenceId, DraftRequest)> {
        let (class, share) = (self.class(), self.draft_share());
        let mut wishes = Vec::new();
        for index in 0..self.running.len() {
            let guesses = self.wanted_guesses(&self.running[index], share);
            let sequence = &mut self.running[index];
            if guesses == 0 || sequence.drawn > 0 || sequence.class() != class {
                continue;
            }
            if !sequence.lookup.propose(&sequence.tokens, guesses).is_empty() {
                continue;
            }
            let (start, tokens) = (sequence.submitted, sequence.tokens.len());
            let grown = self.blocks.grow(&mut sequence.table, tokens + guesses);
            assert!(grown.is_ok(), "there was room");
            let input = Input::Ids(sequence.tokens[start..].to_vec());
            let draw = Draw { logprobs: None, ..sequence.draw(0, 0) };
            let own = share_of(sequence, start, input, None);
            wishes.push((sequence.id, DraftRequest { sequence: own, draw, guesses }));
        }
        wishes
    }

    /// Takes the guesses that answer [`Scheduler::wishes`], for the step that is scheduled next, and the time that they
    /// took.
    pub fn offer(&mut self, guesses: impl IntoIterator<Item = (SequenceId, Vec<u32>)>, took: Duration) {
        self.drafting = took;
        for (id, guesses) in guesses {
            if let Some(index) = self.index_of(id) {
                self.running[index].offered = guesses;
            }
        }
    }

    /// Drops the guesses that the scheduled step had no room for. They are made again in the turn of their sequences.
    pub(super) fn withdraw_offers(&mut self) {
        self.running.iter_mut().for_each(|s| s.offered.clear());
        self.drafting = Duration::ZERO;
    }

    /// How many guesses each sequence that decodes may ask the draft model for: the room for guesses, shared evenly.
    fn draft_share(&self) -> usize {
        if !self.config.draft_model {
            return 0;
        }
        let decoding = self.decoding(self.class()).count();
        let room =
            self.config.speculation_tokens.min(self.limits.max_batch_tokens).min(self.limits.max_draws);
        (room / decoding.max(1)).saturating_sub(1)
    }

    /// How many ids of its `share` the draft model is to guess for a running sequence, once all that is submitted is
    /// drawn. No sequence is preempted for guesses. There are none if a block is about to be copied.
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

    /// Guesses at the ids behind a sequence that decodes, as many as the step has room for. None if prompt lookup would
    /// guess but the last id is not known yet: the sequence sits this step out.
    pub(super) fn guess(&mut self, step: &PendingStep, index: usize) -> Option<Guessed> {
        let class = self.running[index].class();
        let waits = |s: &&Sequence| s.class() == class && s.since < self.now && s.pending() == 1;
        let waiting_decodes = self.running.iter().filter(waits).count();
        let sequence = &mut self.running[index];
        let decodes = sequence.pending() == 1 && sequence.submitted >= sequence.prompt_len;
        // Every sequence gets the id that is due before any sequence gets a guess.
        let room = self.config.speculation_tokens.saturating_sub(step.step.load.tokens);
        let room = room.min(step.draws).min(step.tokens).saturating_sub(waiting_decodes);
        let most = room.min(sequence.max_tokens - sequence.generated() - 1);
        // A mask is made for known ids only, so there is none behind a guess.
        if !decodes || most == 0 || sequence.mask.is_some() {
            return Some(Guessed::NONE);
        }
        let mut guesses =
            Guessed { ids: sequence.lookup.propose(&sequence.tokens, most), by: Guesser::Lookup };
        if guesses.ids.is_empty() {
            guesses = Guessed { ids: std::mem::take(&mut sequence.offered), by: Guesser::Model };
            guesses.ids.truncate(most);
        } else if sequence.drawn > 0 {
            return None;
        }
        // A stop id is drawn and never guessed, because nothing follows it.
        let end = guesses.ids.iter().position(|id| sequence.sampling.stop_token_ids.contains(id));
        guesses.ids.truncate(end.unwrap_or(most));
        Some(guesses)
    }
}
