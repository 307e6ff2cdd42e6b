//! Speculative decoding: drafters propose the next ids as draft tokens, and one pass of the model verifies several of
//! them. A draft token is accepted if it equals the id that the model draws, so speculation never changes an answer.
//!
//! There are two drafters. Prompt lookup needs no second model: its draft tokens are the ids that followed the last
//! occurrence of the same n-gram (Saxena, Prompt Lookup Decoding, 2023). It helps if an answer repeats its prompt, as
//! summaries, edits, code and JSON do. The draft model ([`crate::model::Runner::draft`]) is used if prompt lookup finds
//! nothing.
//!
//! [`Adaptive`] limits the cost of rejected draft tokens: it requests more while they are accepted, fewer after some
//! were rejected, and none for some time after repeated failures. A mixture of experts reads more weights for each draft
//! token, so [`Adaptive::worthwhile`] requests only as many as are likely to be worth their bytes.

use std::collections::HashMap;

/// Lengths of the n-grams that are looked up, in this order.
const GRAMS: [usize; 2] = [3, 2];
/// Maximum number of draft tokens of one sequence in one step.
const MAX_DRAFT_TOKENS: usize = 15;
/// Number of draft tokens of a sequence's first draft.
const FIRST_DRAFT_TOKENS: usize = 4;
/// Maximum number of tokens that one lookup adds to its index.
const MAX_INDEXED_PER_LOOKUP: usize = 8192;
/// Length of the pause after a draft whose first token was rejected, in ids of the answer. The pause doubles with each
/// such failure in a row, from the first number to the second.
const PAUSE: [usize; 2] = [2, 64];
/// What is assumed of a text whose drafts were not judged lately: as if three of four draft tokens had been accepted.
const ASSUMED: Acceptance = Acceptance { accepted: 3.0, judged: 4.0 };
/// Factor of earlier draft tokens in the acceptance, after each draft.
const REMEMBERED: f64 = 0.8;

/// How many draft tokens were proposed to the model, and how many of them it accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafts {
    pub proposed: usize,
    pub accepted: usize,
}

/// A source of draft tokens. Metrics and `/status` call it `guesser`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drafter {
    /// Prompt lookup ([`Lookup`]).
    Lookup,
    /// The draft model.
    Model,
}

/// Counts of draft tokens, by drafter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftTotals {
    pub lookup: Drafts,
    pub model: Drafts,
}

impl DraftTotals {
    pub(super) fn of(&mut self, drafter: Drafter) -> &mut Drafts {
        match drafter {
            Drafter::Lookup => &mut self.lookup,
            Drafter::Model => &mut self.model,
        }
    }
}

/// Draft tokens that the model accepted, and that it judged: the accepted ones, and the first one that it rejected.
#[derive(Debug, Clone, Copy)]
struct Acceptance {
    accepted: f64,
    judged: f64,
}

/// How many draft tokens to request from one drafter for one text. Adapts to how many were accepted before.
#[derive(Debug)]
pub struct Adaptive {
    length: usize,
    /// Number of successive drafts whose first token was rejected.
    failures: u32,
    /// No draft tokens are requested until the text has this length.
    paused_until: usize,
    acceptance: Acceptance,
    /// The length of the text when a draft was last judged.
    judged_at: usize,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { length: FIRST_DRAFT_TOKENS, failures: 0, paused_until: 0, acceptance: ASSUMED, judged_at: 0 }
    }
}

impl Adaptive {
    /// How many draft tokens to request after a text of `total` tokens; 0 during a pause.
    pub fn length(&self, total: usize) -> usize {
        if total < self.paused_until { 0 } else { self.length }
    }

    /// How many of `most` draft tokens give the most ids for the cost of the step, after a text of `total` tokens. The
    /// step has `others` tokens of other sequences, each of which gives an id, and the sequence's next token. If each
    /// draft token is accepted with probability p, n of them give p + p^2 + ... + p^n ids more. `cost` is that of a step
    /// of some tokens, in any unit; if it is constant, the answer is `most`.
    pub fn worthwhile(&self, most: usize, others: usize, total: usize, cost: impl Fn(usize) -> f64) -> usize {
        // After a long pause, the text may be easier to guess.
        let is_recent = total <= self.judged_at + PAUSE[1];
        let Acceptance { accepted, judged } = if is_recent { self.acceptance } else { ASSUMED };
        let (probability, mut ids, mut likely) = (accepted / judged, (others + 1) as f64, 1.0);
        let (mut best, mut best_worth) = (0, ids / cost(others + 1));
        for count in 1..=most {
            likely *= probability;
            ids += likely;
            let worth = ids / cost(others + 1 + count);
            if worth >= best_worth {
                (best, best_worth) = (count, worth);
            }
        }
        best
    }

    /// Adapts to how many of the proposed draft tokens were accepted. `total` is the new length of the text.
    pub fn judge(&mut self, proposed: usize, accepted: usize, total: usize) {
        self.judged_at = total;
        self.acceptance = Acceptance {
            accepted: REMEMBERED * self.acceptance.accepted + accepted as f64,
            judged: REMEMBERED * self.acceptance.judged + (accepted + 1).min(proposed) as f64,
        };
        if accepted == proposed {
            self.length = (2 * self.length).min(MAX_DRAFT_TOKENS);
        } else {
            self.length = (accepted + 1).max(2);
        }
        if accepted > 0 {
            self.failures = 0;
        } else {
            let pause = PAUSE[0].saturating_mul(1 << self.failures.min(16)).min(PAUSE[1]);
            self.failures += 1;
            self.paused_until = total + pause;
        }
    }
}

/// The drafter that looks up n-grams in one text.
#[derive(Debug, Default)]
pub struct Lookup {
    /// For each n-gram, the position after its last occurrence.
    followed: [HashMap<[u32; 3], u32>; GRAMS.len()],
    /// How many tokens of the text `followed` covers.
    indexed: usize,
    pub adaptive: Adaptive,
}

fn gram(tokens: &[u32]) -> [u32; 3] {
    let mut key = [u32::MAX; 3];
    key[..tokens.len()].copy_from_slice(tokens);
    key
}

impl Lookup {
    /// Indexes the tokens that are new. The n-grams at the end of the text are left out, because nothing has followed
    /// them yet.
    fn index(&mut self, tokens: &[u32]) {
        // The index covers only the end of a long prompt, so that no sequence waits for the rest to be indexed.
        for next in self.indexed.max(tokens.len().saturating_sub(MAX_INDEXED_PER_LOOKUP)).max(1)..tokens.len()
        {
            for (followed, n) in self.followed.iter_mut().zip(GRAMS) {
                if let Some(start) = next.checked_sub(n) {
                    followed.insert(gram(&tokens[start..next]), next as u32);
                }
            }
        }
        self.indexed = tokens.len();
    }

    /// Up to `most` draft tokens that follow `tokens`. Empty if no n-gram at the end occurred before. The ids at the
    /// positions of images say nothing, but are looked up and drafted like others: the model verifies all drafts.
    pub fn draft(&mut self, tokens: &[u32], most: usize) -> Vec<u32> {
        self.index(tokens);
        let length = self.adaptive.length(tokens.len()).min(most);
        if length == 0 {
            return Vec::new();
        }
        let last = |n: usize| tokens.len().checked_sub(n).map(|start| gram(&tokens[start..]));
        let found =
            self.followed.iter().zip(GRAMS).find_map(|(followed, n)| followed.get(&last(n)?).copied());
        let Some(next) = found else { return Vec::new() };
        // A draft that reaches the end of the text continues from its own beginning, as if the text repeated itself.
        let next = next as usize;
        let period = tokens.len() - next;
        (0..length).map(|i| tokens[next + i % period]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_drafts_the_ids_after_the_last_occurrence_of_an_n_gram() {
        let text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3];
        let mut lookup = Lookup::default();
        assert_eq!(lookup.draft(&text, 9), [4, 5, 6, 7], "three tokens agree");
        assert_eq!(lookup.draft(&text, 2), [4, 5], "not more than requested");
        lookup.adaptive.judge(4, 4, 15);
        let longer = [&text[..], &[4, 5, 6, 7]].concat();
        assert_eq!(
            lookup.draft(&longer, 9),
            [9, 1, 2, 3, 4, 5, 6, 7],
            "the draft repeats itself at the end of the text"
        );
        assert_eq!(Lookup::default().draft(&[8, 3, 4, 5, 7, 3, 4], 9), [5, 7, 3, 4], "two tokens agree");
        assert!(Lookup::default().draft(&[1, 2, 3, 4], 9).is_empty(), "nothing is repeated");
        assert!(Lookup::default().draft(&[1], 9).is_empty() && Lookup::default().draft(&[], 9).is_empty());
        // Only the newest occurrence counts.
        assert_eq!(Lookup::default().draft(&[1, 2, 5, 1, 2, 6, 1, 2], 1), [6]);
    }

    #[test]
    fn drafts_are_shorter_if_each_token_makes_the_step_cost_more() {
        let judged = |accepted: usize| {
            let mut adaptive = Adaptive::default();
            (0..20).for_each(|i| adaptive.judge(4, accepted, i));
            adaptive
        };
        let [never, mostly, always] = [0, 3, 4].map(judged);
        let constant = |_: usize| 7.0;
        for adaptive in [&never, &mostly, &always] {
            assert_eq!(adaptive.worthwhile(15, 0, 20, constant), 15, "verifying costs nothing");
        }
        // Half of the weights are those of 8 of 128 experts.
        let mixture = |tokens: usize| 1.0 + 16.0 * (1.0 - (1.0 - 1.0 / 16.0_f64).powi(tokens as i32));
        assert_eq!(never.worthwhile(15, 0, 20, mixture), 0);
        let few = mostly.worthwhile(15, 0, 20, mixture);
        assert!((1..15).contains(&few), "{few}");
        assert_eq!(always.worthwhile(15, 0, 20, mixture), 15);
        // With many others, most experts are in use anyway.
        assert!(mostly.worthwhile(15, 63, 20, mixture) > few);
        assert!(never.worthwhile(15, 0, 20 + PAUSE[1] + 1, mixture) > 0, "a later part of the text");
    }

    #[test]
    fn drafts_that_are_always_rejected_become_rare() {
        let mut lookup = Lookup::default();
        let mut text = vec![1, 2, 3, 1, 2];
        let mut drafts = 0;
        for _ in 0..200 {
            let proposed = lookup.draft(&text, 15).len();
            drafts += usize::from(proposed > 0);
            // The text never continues as drafted, but always with an n-gram that was seen.
            text.extend([4, 1, 2]);
            if proposed > 0 {
                lookup.adaptive.judge(proposed, 0, text.len());
            }
        }
        assert!((5..20).contains(&drafts), "{drafts} of 200");
        lookup.adaptive.paused_until = 0;
        lookup.adaptive.judge(2, 1, text.len());
        assert_eq!(
            (lookup.adaptive.failures, lookup.adaptive.length),
            (0, 2),
            "one accepted token ends the failures"
        );
    }
}
