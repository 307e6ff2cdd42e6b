//! Who gets on in the next step, and how far: all that is decided, on one screen.
//!
//! One class gets on at a time. Within one budget of tokens come first the sequences that decode, then those amid their
//! prompts, then as many waiting ones as find a slot and blocks. How blocks are found, shared and taken away is `room`'s;
//! what each client was given is `fairness`'; what the arrays of a step look like is `step`'s.

use super::Scheduler;
use super::step::{PendingStep, Step};
use crate::engine::pace::{CAREFUL_TOKENS, Pace};
use crate::engine::request::Priority;
use crate::engine::sequence::{Sequence, SequenceId};

impl Scheduler {
    /// The next step, or none where nothing can get on before a step under way is committed, or nothing is there.
    pub fn schedule(&mut self, pace: &Pace) -> Option<Step> {
        self.served.charge(pace);
        let is_under_way = self.running.iter().any(|s| s.submitted > s.computed);
        if self.class() == Priority::Background && is_under_way {
            return None; // an interactive request that comes now is to wait for one step alone
        }
        self.now += 1;
        self.raise_overdue();
        let class = self.class();
        let hurries = class == Priority::Background || self.decoding(class).next().is_some();
        let mut step = PendingStep::new(&self.limits, hurries);
        for decodes in [true, false] {
            for id in self.open(class, decodes) {
                self.place(&mut step, id, pace);
            }
        }
        self.admit(class, &mut step, pace);
        self.withdraw_offers();
        step.finish()
    }

    /// The class that gets on: the background where nobody else is there.
    pub(super) fn class(&self) -> Priority {
        let mut all = self.waiting.iter().chain(&self.running);
        let has_interactive = all.any(|s| s.class() == Priority::Interactive);
        if has_interactive { Priority::Interactive } else { Priority::Background }
    }

    /// The running sequences of a class that decode, or the others, as far as they can get on. By id: the list grows by
    /// forks, and shrinks by preemptions, while it is walked.
    fn open(&self, class: Priority, decodes: bool) -> Vec<SequenceId> {
        let is_in = |s: &Sequence| s.since == self.now;
        let is_open = |s: &Sequence| !is_in(s) && s.pending() > 0 && (s.pending() == 1) == decodes;
        self.running.iter().filter(|s| s.class() == class && is_open(s)).map(|s| s.id).collect()
    }

    /// Puts the next tokens of a running sequence into the step, as far as there is room; nothing where it was preempted
    /// meanwhile, or waits for a guess.
    fn place(&mut self, step: &mut PendingStep, id: SequenceId, pace: &Pace) {
        let Some(index) = self.index_of(id) else { return };
        let Some(guesses) = self.guess(step, index) else { return };
        let sequence = &self.running[index];
        let len = self.next_tokens(step, sequence, pace);
        if len == 0 || sequence.unseen() > step.history {
            return;
        }
        // From here on others may be preempted, and so may this one.
        let end = sequence.submitted + len + guesses.ids.len();
        let Some(index) = self.make_room(step, id, end) else { return };
        let sequence = &mut self.running[index];
        sequence.since = self.now;
        self.served.give(sequence.client, len);
        self.guesses.of(guesses.by).proposed += guesses.ids.len();
        if step.push(sequence, len, guesses) {
            self.part(step, index);
        }
    }

    /// How many of its pending tokens a sequence gets in the step.
    fn next_tokens(&self, step: &PendingStep, sequence: &Sequence, pace: &Pace) -> usize {
        let pending = sequence.pending();
        let len = match pending {
            0 | 1 => pending.min(step.tokens),
            _ => self.chunk(step, sequence.submitted, pending, pace),
        };
        let draws = if sequence.pooling { 0 } else { 1 + sequence.forks.len() };
        match sequence.unscored() {
            // The token whose id has no place in this step comes in the next.
            0 if len == pending && draws > step.draws => len - 1,
            0 => len,
            // Each token has a draw, and the one behind the prompt a step of its own: they all go to the same slot.
            unscored => len.min(unscored).min(step.draws),
        }
    }

    /// How many of the `pending` tokens of a prompt from `start` on the step has room for. In a step that hurries, one prompt
    /// gets a few however long the step takes then, and the others what the time allows.
    fn chunk(&self, step: &PendingStep, start: usize, pending: usize, pace: &Pace) -> usize {
        let wanted = pending.min(step.tokens);
        if !step.hurries {
            return wanted;
        }
        let least = if step.prefills { 0 } else { CAREFUL_TOKENS };
        let gap = self.config.gap.saturating_sub(self.drafting);
        pace.room(step.step.load, start, wanted, least, gap)
    }

    /// Lets waiting sequences of a class run, in the order of their turns: where the first lacks room, nobody overtakes it.
    fn admit(&mut self, class: Priority, step: &mut PendingStep, pace: &Pace) {
        while let Some(index) = self.first_in_line(class) {
            if self.chunk(step, 0, self.waiting[index].tokens.len(), pace) == 0 {
                return;
            }
            if !self.has_place(index, step) {
                // A background sequence that runs makes way for an interactive one that waits.
                match self.last_in_line(step).filter(|victim| class < self.running[*victim].class()) {
                    Some(victim) => self.preempt(victim),
                    None => return,
                }
                continue;
            }
            let id = self.start(index);
            self.place(step, id, pace);
            if !step.has(id) {
                return; // no room for its first tokens in this step
            }
        }
    }

    /// The waiting sequence whose turn it is: an overdue one, or else the oldest of the client that was given least.
    fn first_in_line(&self, class: Priority) -> Option<usize> {
        let turn = |s: &Sequence| {
            let is_overdue = s.is_overdue(self.now, self.config.patience);
            let served = if is_overdue { 0 } else { self.served.tokens(s.client) };
            (!is_overdue, served, s.arrival, s.id)
        };
        let candidates = self.waiting.iter().enumerate().filter(|(_, s)| s.class() == class);
        candidates.min_by_key(|(_, s)| turn(s)).map(|(index, _)| index)
    }
}
