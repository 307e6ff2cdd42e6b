//! Speculation: how many draft tokens a step has room for, which drafter they come from, and the requests to the draft
//! model.

use std::time::Duration;

use super::Scheduler;
use super::step::{DraftTokens, PendingStep, share_of};
use crate::engine::sequence::{Sequence, SequenceId};
use crate::engine::speculation::Drafter;
use crate::model::{DraftRequest, Draw, Input};

impl Scheduler {
    /// Whether a sequence wants tokens of the draft model now, or will want some when the steps under way are
    /// committed. If so, no step is to be scheduled until these are committed.
    pub fn wants_draft(&self) -> bool {
        let (class, share) = (self.class(), self.draft_share());
        let wants = |s: &Sequence| s.speculating || self.wanted_draft_tokens(s, share) > 0;
        share > 0 && self.running.iter().filter(|s| s.class() == class && self.may_run(s)).any(wants)
    }

    /// The requests to the draft model before the next step is scheduled, with no step under way: one request for each
    /// sequence that decodes and for which prompt lookup finds nothing. The sequences get the blocks that their draft
    /// tokens need.
    pub fn draft_requests(&mut self) -> Vec<(SequenceId, DraftRequest)> {
        let (class, share) = (self.class(), self.draft_share());
        let mut draft_requests = Vec::new();
        for index in 0..self.running.len() {
            let wanted = self.wanted_draft_tokens(&self.running[index], share);
            let may_run = self.may_run(&self.running[index]);
            let sequence = &mut self.running[index];
            if wanted == 0 || !may_run || sequence.drawn > 0 || sequence.class() != class {
                continue;
            }
            if !sequence.lookup.draft(&sequence.tokens, wanted).is_empty() {
                continue;
            }
            let (start, tokens) = (sequence.submitted, sequence.tokens.len());
            let grown = self.blocks.grow(&mut sequence.table, tokens + wanted);
            assert!(grown.is_ok(), "there was room");
            let input = Input::Ids(sequence.tokens[start..].to_vec());
            let draw = Draw { logprobs: None, ..sequence.draw(0, 0) };
            let own = share_of(sequence, start, input, None);
            draft_requests
                .push((sequence.id, DraftRequest { sequence: own, draw, num_draft_tokens: wanted }));
        }
        draft_requests
    }

    /// Takes the draft model's answers to [`Scheduler::draft_requests`], for the step that is scheduled next, and the
    /// time that they took.
    pub fn take_draft_tokens(
        &mut self,
        draft_tokens: impl IntoIterator<Item = (SequenceId, Vec<u32>)>,
        took: Duration,
    ) {
        self.drafting = took;
        for (id, ids) in draft_tokens {
            if let Some(index) = self.index_of(id) {
                self.running[index].draft_tokens = ids;
            }
        }
    }

    /// Drops the draft tokens that the scheduled step had no room for. The draft model makes them again when it is the
    /// turn of their sequences.
    pub(super) fn drop_draft_tokens(&mut self) {
        self.running.iter_mut().for_each(|s| s.draft_tokens.clear());
        self.drafting = Duration::ZERO;
    }

    /// How many tokens each sequence that decodes may ask the draft model for: the step's room for draft tokens, shared
    /// evenly.
    fn draft_share(&self) -> usize {
        if !self.config.draft_model {
            return 0;
        }
        let decoding = self.decoding(self.class()).count();
        let room =
            self.config.speculation_tokens.min(self.limits.max_batch_tokens).min(self.limits.max_draws);
        (room / decoding.max(1)).saturating_sub(1)
    }

    /// How many tokens of its `share` a running sequence wants of the draft model, once all that is submitted is drawn.
    /// No sequence is preempted for draft tokens. A sequence wants none while one of its blocks is about to be copied.
    fn wanted_draft_tokens(&self, s: &Sequence, share: usize) -> usize {
        let known = s.tokens.len() + s.drawn;
        let left = s.max_tokens.saturating_sub(s.generated() + s.drawn + 1);
        let wanted = share.min(left).min(s.draft_length.length(known));
        let decodes = s.submitted >= s.prompt_len && s.submitted + 1 == known;
        if wanted == 0 || !decodes || s.mask.is_some() || s.unseen() > 0 {
            return 0;
        }
        let is_own = self.blocks.shared_at(&s.table, s.submitted) == [None, None];
        let has_room = self.blocks.has_room(self.blocks.missing(&s.table, known + wanted));
        if is_own && has_room { wanted } else { 0 }
    }

    /// The draft tokens behind a sequence that decodes, as many as the step has room for. `None` if prompt lookup needs
    /// the last id and the host does not know it yet: the sequence sits this step out.
    pub(super) fn draft_tokens(&mut self, step: &PendingStep, index: usize) -> Option<DraftTokens> {
        let class = self.running[index].class();
        let waits = |s: &&Sequence| s.class() == class && s.last_step < self.steps && s.pending() == 1;
        let waiting_decodes = self.running.iter().filter(waits).count();
        let sequence = &mut self.running[index];
        let decodes = sequence.pending() == 1 && sequence.submitted >= sequence.prompt_len;
        // Every sequence gets the id that is due before any sequence gets a draft token.
        let room = self.config.speculation_tokens.saturating_sub(step.step.load.tokens);
        let room = room.min(step.draws).min(step.tokens).saturating_sub(waiting_decodes);
        let most = room.min(sequence.max_tokens - sequence.generated() - 1);
        // A mask is made for known ids only, so no mask exists behind a draft token.
        if !decodes || most == 0 || sequence.mask.is_some() {
            return Some(DraftTokens::NONE);
        }
        let mut draft =
            DraftTokens { ids: sequence.lookup.draft(&sequence.tokens, most), by: Drafter::Lookup };
        if draft.ids.is_empty() {
            draft = DraftTokens { ids: std::mem::take(&mut sequence.draft_tokens), by: Drafter::Model };
            draft.ids.truncate(most);
        } else if sequence.drawn > 0 {
            return None;
        }
        // A stop id is drawn and never drafted, because nothing follows it.
        let end = draft.ids.iter().position(|id| sequence.sampling.stop_token_ids.contains(id));
        draft.ids.truncate(end.unwrap_or(most));
        Some(draft)
    }
}
