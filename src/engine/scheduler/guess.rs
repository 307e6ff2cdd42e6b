//! Guesses in a step: how many there is room for, who makes them, and what is asked of the draft model.

use std::time::Duration;

use super::Scheduler;
use super::step::{Guessed, PendingStep, share_of};
use crate::engine::sequence::{Sequence, SequenceId};
use crate::engine::speculation::Guesser;
use crate::model::{DraftRequest, Draw, Input};

impl Scheduler {
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

    /// Takes the guesses that came of [`Scheduler::wishes`] for the step that is scheduled next, and how long they took.
    pub fn offer(&mut self, guesses: impl IntoIterator<Item = (SequenceId, Vec<u32>)>, took: Duration) {
        self.drafting = took;
        for (id, guesses) in guesses {
            if let Some(index) = self.index_of(id) {
                self.running[index].offered = guesses;
            }
        }
    }

    /// Forgets the guesses that the scheduled step did not take: they are made again when the turn of their sequences comes.
    pub(super) fn withdraw_offers(&mut self) {
        self.running.iter_mut().for_each(|s| s.offered.clear());
        self.drafting = Duration::ZERO;
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

    /// Ids that may follow a sequence that decodes, as many as the step has room for; none at all where a guess is to be
    /// made, and what it starts from is not known yet: the sequence sits this step out.
    pub(super) fn guess(&mut self, step: &PendingStep, index: usize) -> Option<Guessed> {
        let class = self.running[index].class();
        let waits = |s: &&Sequence| s.class() == class && s.since < self.now && s.pending() == 1;
        let waiting_decodes = self.running.iter().filter(waits).count();
        let sequence = &mut self.running[index];
        let decodes = sequence.pending() == 1 && sequence.submitted >= sequence.prompt_len;
        // Everybody gets the id that is due before anybody gets a guess.
        let room = self.config.speculation_tokens.saturating_sub(step.step.load.tokens);
        let room = room.min(step.draws).min(step.tokens).saturating_sub(waiting_decodes);
        let most = room.min(sequence.max_tokens - sequence.generated() - 1);
        // What a mask allows behind a guess is not asked for: it follows the answer id by id.
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
        // What stops the answer is drawn behind the others, and nothing follows it.
        let end = guesses.ids.iter().position(|id| sequence.sampling.stop_token_ids.contains(id));
        guesses.ids.truncate(end.unwrap_or(most));
        Some(guesses)
    }
}
