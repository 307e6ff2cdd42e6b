//! Speculation: how many draft tokens a step has room for, which drafter makes them, and the requests to the draft
//! model.

use std::time::Duration;

use super::Scheduler;
use super::step::{DraftTokens, PendingStep, batch_entry};
use crate::engine::sequence::{Sequence, SequenceId};
use crate::engine::speculation::Drafter;
use crate::model::{DraftRequest, Draw, Input};

impl Scheduler {
    /// Whether a sequence wants tokens of the draft model now, or will want some when the steps in flight are
    /// committed. If so, no step may be scheduled before that.
    pub fn wants_draft(&self) -> bool {
        let (class, share) = (self.class(), self.draft_share());
        let wants = |s: &Sequence| s.speculating || self.wanted_draft_tokens(s, share) > 0;
        share > 0 && self.running.iter().filter(|s| s.class() == class && self.may_run(s)).any(wants)
    }

    /// The requests to the draft model, before the next step is scheduled and while no step is in flight: one for each
    /// sequence that decodes and for which prompt lookup finds nothing. Gives the sequences the blocks that their draft
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
            let entry = batch_entry(sequence, start, input, None);
            draft_requests
                .push((sequence.id, DraftRequest { sequence: entry, draw, num_draft_tokens: wanted }));
        }
        draft_requests
    }

    /// Stores the draft model's answers to [`Scheduler::draft_requests`] for the next step. `took` is the time that
    /// they took.
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

    /// Drops the draft tokens that the scheduled step had no room for. The draft model makes them again in a later
    /// step.
    pub(super) fn drop_draft_tokens(&mut self) {
        self.running.iter_mut().for_each(|s| s.draft_tokens.clear());
        self.drafting = Duration::ZERO;
    }

    /// How many draft tokens each decoding sequence may request from the draft model: the step's room for draft tokens,
    /// divided evenly.
    fn draft_share(&self) -> usize {
        if !self.config.draft_model {
            return 0;
        }
        let decoding = self.decoding(self.class()).count();
        let room =
            self.config.speculation_tokens.min(self.limits.max_batch_tokens).min(self.limits.max_draws);
        (room / decoding.max(1)).saturating_sub(1)
    }

    /// How many tokens of the draft model, at most `share`, a running sequence wants once all submitted ids are drawn.
    /// It wants none if that would preempt another sequence, or while one of its blocks must be copied first.
    fn wanted_draft_tokens(&self, s: &Sequence, share: usize) -> usize {
        let known = s.tokens.len() + s.drawn;
        let left = s.max_tokens.saturating_sub(s.generated() + s.drawn + 1);
        let wanted = share.min(left).min(s.draft_length.length(known));
        let others = self.decoding(self.class()).count().saturating_sub(1);
        let cost = |tokens: usize| self.limits.step_cost(tokens);
        let wanted = s.draft_length.worthwhile(wanted, others, known, cost);
        let decodes = s.submitted >= s.prompt_len && s.submitted + 1 == known;
        if wanted == 0 || !decodes || s.is_masked() || s.missing_history() > 0 {
            return 0;
        }
        let is_unshared = self.blocks.shared_at(&s.table, s.submitted).all(|block| block.is_none());
        let has_room = self.blocks.has_room(self.blocks.missing(&s.table, known + wanted));
        if is_unshared && has_room { wanted } else { 0 }
    }

    /// The draft tokens that follow a decoding sequence, as many as the step has room for. `None` if prompt lookup
    /// needs the last id and the host does not know it yet: the sequence is then not in this step.
    pub(super) fn draft_tokens(&mut self, step: &PendingStep, index: usize) -> Option<DraftTokens> {
        let class = self.running[index].class();
        let waits = |s: &&Sequence| s.class() == class && s.last_step < self.steps && s.pending() == 1;
        let waiting_decodes = self.running.iter().filter(waits).count();
        let sequence = &mut self.running[index];
        let decodes = sequence.pending() == 1 && sequence.submitted >= sequence.prompt_len;
        // Every sequence gets its next id before any sequence gets a draft token.
        let room = self.config.speculation_tokens.saturating_sub(step.step.load.tokens);
        let room = room.min(step.draws).min(step.tokens).saturating_sub(waiting_decodes);
        let most = room.min(sequence.max_tokens - sequence.generated() - 1);
        // A mask is computed from known ids only, so there is no mask for an id after a draft token.
        if !decodes || most == 0 || sequence.is_masked() {
            return Some(DraftTokens::NONE);
        }
        let (others, limits) = (step.step.load.tokens + waiting_decodes, &self.limits);
        let cost = |tokens: usize| limits.step_cost(tokens);
        let looked_up = sequence.lookup.adaptive.worthwhile(most, others, sequence.tokens.len(), cost);
        let mut draft =
            DraftTokens { ids: sequence.lookup.draft(&sequence.tokens, looked_up), by: Drafter::Lookup };
        if draft.ids.is_empty() {
            draft = DraftTokens { ids: std::mem::take(&mut sequence.draft_tokens), by: Drafter::Model };
            draft.ids.truncate(most);
        } else if sequence.drawn > 0 {
            return None;
        }
        // Stop ids are not drafted, because nothing follows them.
        let end = draft.ids.iter().position(|id| sequence.request.sampling.stop_token_ids.contains(id));
        draft.ids.truncate(end.unwrap_or(most));
        Some(draft)
    }
}
