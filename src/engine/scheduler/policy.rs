//! The policy: which sequences get tokens in the next step, and how many. All of these decisions are in this file.
//!
//! A step serves one class. Sequences that decode come first, then sequences in the middle of their prompts, then as
//! many waiting sequences as there are slots and blocks for. `room` allocates, shares and takes away blocks; `fairness`
//! counts the tokens of each client; `step` builds the arrays.

use super::Scheduler;
use super::step::{PendingStep, Step};
use crate::engine::pace::{Load, MIN_PREFILL_TOKENS, Pace};
use crate::engine::request::Priority;
use crate::engine::sequence::{Sequence, SequenceId};

/// The most images that are encoded for a step for which no other sequence waits. Between two steps, the engine sees requests
/// that arrived and clients that left.
const MAX_ENCODINGS: usize = 2;

impl Scheduler {
    /// The next step. `None` if there is no sequence, or if no sequence can get tokens before a step in flight is
    /// committed.
    pub fn schedule(&mut self, pace: &Pace) -> Option<Step> {
        self.served.charge(pace);
        self.update_has_suspects();
        if self.waits_for_others() {
            return None;
        }
        let is_in_flight = self.running.iter().any(|s| s.submitted > s.computed);
        if self.class() == Priority::Background && is_in_flight {
            return None; // an interactive request that arrives now must not wait for a second background step
        }
        self.steps += 1;
        self.promote_overdue();
        let class = self.class();
        let keeps_gap =
            class == Priority::Background || self.engines > 1 || self.decoding(class).next().is_some();
        let mut step = PendingStep::new(&self.limits, keeps_gap);
        self.image_slots.begin_step(if keeps_gap { 1 } else { MAX_ENCODINGS });
        let is_overdue = |s: &Sequence| s.is_overdue(self.steps, self.config.patience);
        for id in self.runnable(class, is_overdue) {
            self.add_to_step(&mut step, id, pace);
        }
        for decodes in [true, false] {
            for id in self.runnable(class, |s| (s.pending() == 1) == decodes) {
                self.add_to_step(&mut step, id, pace);
            }
        }
        self.admit(class, &mut step, pace);
        self.drop_draft_tokens();
        step.finish()
    }

    /// The class of the sequences in the next step: background only if there is no interactive sequence. While a
    /// suspect is computed alone, it is the suspect's class.
    pub(super) fn class(&self) -> Priority {
        if let Some(suspect) = self.replaying() {
            return suspect.class();
        }
        let mut all = self.waiting.iter().chain(&self.running);
        let has_interactive = all.any(|s| s.class() == Priority::Interactive);
        if has_interactive { Priority::Interactive } else { Priority::Background }
    }

    /// The running sequences of a class that have pending tokens and are not yet in the step, and that `is_wanted`
    /// selects. The list has ids, because forks and preemptions change the indices while the caller iterates over it.
    fn runnable(&self, class: Priority, is_wanted: impl Fn(&Sequence) -> bool) -> Vec<SequenceId> {
        let is_in = |s: &Sequence| s.last_step == self.steps;
        let is_runnable = |s: &Sequence| !is_in(s) && s.pending() > 0 && is_wanted(s);
        let may_run = |s: &&Sequence| s.class() == class && self.may_run(s) && is_runnable(s);
        self.running.iter().filter(may_run).map(|s| s.id).collect()
    }

    /// Puts the next tokens of a running sequence into the step, as many as the step has room for. The sequence gets
    /// none if it was preempted in the meantime, or if the host must know its last id first.
    fn add_to_step(&mut self, step: &mut PendingStep, id: SequenceId, pace: &Pace) {
        let Some(index) = self.index_of(id) else { return };
        let Some(draft) = self.draft_tokens(step, index) else { return };
        let sequence = &self.running[index];
        let len = self.next_tokens(step, sequence, pace);
        if len == 0 || sequence.missing_history() > step.history {
            return;
        }
        // `make_room` may preempt other sequences, or this one.
        let end = sequence.submitted + len + draft.ids.len();
        let Some(index) = self.make_room(step, id, end) else { return };
        let sequence = &mut self.running[index];
        sequence.last_step = self.steps;
        self.served.add_tokens(sequence.request.client, len);
        self.drafts.of(draft.by).proposed += draft.ids.len();
        if step.push(sequence, len, draft, &mut self.image_slots) {
            self.split_forks(step, index);
        }
    }

    /// How many of its pending tokens a sequence gets in the step.
    fn next_tokens(&self, step: &PendingStep, sequence: &Sequence, pace: &Pace) -> usize {
        let pending = sequence.pending();
        let len = match pending {
            0 | 1 => pending.min(step.tokens),
            _ => self.chunk(step, sequence.submitted, pending, pace),
        };
        let len = self.without_split_images(step, sequence, len);
        let draws = if sequence.request.pooling { 0 } else { 1 + sequence.forks.len() };
        match sequence.unscored() {
            0 if len == 0 => 0,
            // The step has no room for the draw after the last token, so that token waits for the next step, with the
            // rest of its image.
            0 if len == pending && draws > step.draws => {
                let image = sequence.image_split_at(sequence.submitted + len - 1);
                image.map_or(len - 1, |image| image.positions.start.saturating_sub(sequence.submitted))
            }
            0 => len,
            // A scored prompt has no images. Each scored token needs a draw. The draw after the prompt must be in a
            // later step, because all draws of a sequence write to the same slot.
            unscored => len.min(unscored).min(step.draws),
        }
    }

    /// The length of a sequence's share for which there is room for `len` tokens, so that the share does not end within
    /// an image, and so that there is a slot for each of its images. A share that would end within an image ends before
    /// it. If it would then be empty, it has the rest of the image: in a step that must stay within the gap, only if it
    /// is the first chunk of the step. An otherwise empty step always has room for that rest.
    fn without_split_images(&self, step: &PendingStep, sequence: &Sequence, len: usize) -> usize {
        let (start, mut end) = (sequence.submitted, sequence.submitted + len);
        if len == 0 || sequence.images_after(start).next().is_none() {
            return len;
        }
        let mut slots = self.image_slots.clone();
        for image in sequence.images_after(start) {
            let first = image.positions.start.max(start);
            if first >= end {
                break;
            }
            let rest = image.positions.end - start;
            let may_exceed = first == start && rest <= step.tokens && !(step.keeps_gap && step.prefills);
            if end < image.positions.end && may_exceed {
                end = image.positions.end;
            }
            if end < image.positions.end || slots.take(&image.hash).is_none() {
                return first - start;
            }
        }
        end - start
    }

    /// How many of the `pending` tokens of a prompt, from position `start` on, the step has room for. In a step that
    /// must stay within the gap, the first prompt gets a few tokens even if the step then exceeds the gap. The other
    /// prompts get as many as the gap allows.
    fn chunk(&self, step: &PendingStep, start: usize, pending: usize, pace: &Pace) -> usize {
        let wanted = pending.min(step.tokens);
        if !step.keeps_gap {
            return wanted;
        }
        let least = if step.prefills { 0 } else { MIN_PREFILL_TOKENS };
        let share = match self.engines {
            1 => self.config.gap,
            // A step that reads the weights for a few tokens only would delay the prompt and the other engines.
            n => (self.config.gap / n).max(2 * pace.predict(Load::default()).unwrap_or_default()),
        };
        let gap = share.saturating_sub(self.drafting);
        pace.room(step.step.load, start, wanted, least, gap)
    }

    /// Starts waiting sequences of a class, in the order of the line. If there is no room for the first in line, no
    /// other sequence overtakes it.
    fn admit(&mut self, class: Priority, step: &mut PendingStep, pace: &Pace) {
        let replays = self.replaying().is_some();
        while let Some(index) = self.first_in_line(class) {
            if self.chunk(step, 0, self.waiting[index].tokens.len(), pace) == 0 {
                return;
            }
            if !self.has_place(index, step) {
                // A waiting interactive sequence preempts running background sequences. A suspect preempts every other
                // sequence.
                let may_preempt = |victim: &usize| replays || class < self.running[*victim].class();
                match self.last_in_line(step).filter(may_preempt) {
                    Some(victim) => self.preempt(victim),
                    None => return,
                }
                continue;
            }
            if !self.may_start(&self.waiting[index]) {
                return; // it is looked up on disk before the next step
            }
            let id = self.start(index);
            self.add_to_step(step, id, pace);
            if !step.has(id) {
                return; // no room for its first tokens in this step
            }
        }
    }

    /// The next waiting sequence to start.
    fn first_in_line(&self, class: Priority) -> Option<usize> {
        self.first_of(class, |s| !self.waits_for_disk(s))
    }

    /// The first in line of the waiting sequences that `is_wanted` selects: an overdue sequence, or else the oldest sequence
    /// of the client that got the fewest tokens.
    pub(super) fn first_of(&self, class: Priority, is_wanted: impl Fn(&Sequence) -> bool) -> Option<usize> {
        let turn = |s: &Sequence| {
            let is_overdue = s.is_overdue(self.steps, self.config.patience);
            let served = if is_overdue { 0 } else { self.served.tokens(s.request.client) };
            (!is_overdue, served, s.arrival, s.id)
        };
        let candidates = self
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, s)| s.class() == class && self.may_run(s) && is_wanted(s));
        candidates.min_by_key(|(_, s)| turn(s)).map(|(index, _)| index)
    }
}
