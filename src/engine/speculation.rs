//! Speculative decoding: guesses at the next ids, several of which one pass of the model checks. A guess is accepted if
//! it equals the draw, so guesses never change an answer.
//!
//! Prompt lookup needs no second model: it proposes the ids that followed the last occurrence of the same n-gram
//! (Saxena, Prompt Lookup Decoding, 2023). It helps if an answer repeats its prompt, as summaries, edits, code and JSON
//! do. If prompt lookup proposes nothing, a draft model may ([`crate::model::Runner::draft`]).
//!
//! [`Adaptive`] bounds the cost of wrong guesses: it asks for more guesses while they are accepted, for fewer when they
//! are not, and for none for a while after repeated failures.

use std::collections::HashMap;

/// Lengths of the n-grams that are looked up, in this order.
const GRAMS: [usize; 2] = [3, 2];
/// The most tokens guessed at once.
const MOST: usize = 15;
/// Tokens guessed at once at first.
const FIRST: usize = 4;
/// The most tokens that are indexed at once.
const INDEXED_AT_ONCE: usize = 8192;
/// Ids to draw without a guess after a guess whose first id failed. The pause doubles with each such failure in a row,
/// from the first number up to the second.
const PAUSE: [usize; 2] = [2, 64];

/// How many ids were guessed ahead of the model, and how many of them the model drew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafts {
    pub proposed: usize,
    pub accepted: usize,
}

/// The source of a guess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guesser {
    /// Prompt lookup ([`Lookup`]).
    Lookup,
    /// The draft model.
    Model,
}

/// Counts of guesses, by guesser.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Guesses {
    pub lookup: Drafts,
    pub model: Drafts,
}

impl Guesses {
    pub(super) fn of(&mut self, guesser: Guesser) -> &mut Drafts {
        match guesser {
            Guesser::Lookup => &mut self.lookup,
            Guesser::Model => &mut self.model,
        }
    }
}

/// How many ids one guesser is to guess for one text, adapted to how many of its guesses were accepted.
#[derive(Debug)]
pub struct Adaptive {
    length: usize,
    /// Failures in a row.
    failures: u32,
    /// The length of the text up to which nothing is guessed.
    paused_until: usize,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { length: FIRST, failures: 0, paused_until: 0 }
    }
}

impl Adaptive {
    /// How many ids to guess behind a text of `total` tokens; 0 during a pause.
    pub fn length(&self, total: usize) -> usize {
        if total < self.paused_until { 0 } else { self.length }
    }

    /// Learns how many of the proposed ids were accepted. `total` is the length of the text now.
    pub fn judge(&mut self, proposed: usize, accepted: usize, total: usize) {
        if accepted == proposed {
            self.length = (2 * self.length).min(MOST);
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

/// Prompt lookup in one text.
#[derive(Debug, Default)]
pub struct Lookup {
    /// For each n-gram, the position behind its last occurrence.
    followed: [HashMap<[u32; 3], u32>; GRAMS.len()],
    /// Tokens of the text that are in `followed`.
    indexed: usize,
    pub adaptive: Adaptive,
}

fn gram(tokens: &[u32]) -> [u32; 3] {
    let mut key = [u32::MAX; 3];
    key[..tokens.len()].copy_from_slice(tokens);
    key
}

impl Lookup {
    /// Indexes the tokens that are new. The n-grams at the end are left out, because nothing has followed them yet.
    fn index(&mut self, tokens: &[u32]) {
        // Only the end of a long prompt is indexed, so that nobody waits for the rest.
        for next in self.indexed.max(tokens.len().saturating_sub(INDEXED_AT_ONCE)).max(1)..tokens.len() {
            for (followed, n) in self.followed.iter_mut().zip(GRAMS) {
                if let Some(start) = next.checked_sub(n) {
                    followed.insert(gram(&tokens[start..next]), next as u32);
                }
            }
        }
        self.indexed = tokens.len();
    }

    /// Up to `most` ids that may follow `tokens`; none if no n-gram at the end occurred before.
    pub fn propose(&mut self, tokens: &[u32], most: usize) -> Vec<u32> {
        self.index(tokens);
        let length = self.adaptive.length(tokens.len()).min(most);
        if length == 0 {
            return Vec::new();
        }
        let last = |n: usize| tokens.len().checked_sub(n).map(|start| gram(&tokens[start..]));
        let found =
            self.followed.iter().zip(GRAMS).find_map(|(followed, n)| followed.get(&last(n)?).copied());
        let Some(next) = found else { return Vec::new() };
        // If the proposal reaches the end of the text, it goes on from its own beginning: the text repeats itself.
        let next = next as usize;
        let period = tokens.len() - next;
        (0..length).map(|i| tokens[next + i % period]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_before_is_proposed_again() {
        let text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3];
        let mut lookup = Lookup::default();
        assert_eq!(lookup.propose(&text, 9), [4, 5, 6, 7], "three tokens agree");
        assert_eq!(lookup.propose(&text, 2), [4, 5], "no more than wanted");
        lookup.adaptive.judge(4, 4, 15);
        let longer = [&text[..], &[4, 5, 6, 7]].concat();
        assert_eq!(lookup.propose(&longer, 9), [9, 1, 2, 3, 4, 5, 6, 7], "on, and round again");
        assert_eq!(Lookup::default().propose(&[8, 3, 4, 5, 7, 3, 4], 9), [5, 7, 3, 4], "two tokens agree");
        assert!(Lookup::default().propose(&[1, 2, 3, 4], 9).is_empty(), "nothing is repeated");
        assert!(
            Lookup::default().propose(&[1], 9).is_empty() && Lookup::default().propose(&[], 9).is_empty()
        );
        // Only the newest occurrence counts.
        assert_eq!(Lookup::default().propose(&[1, 2, 5, 1, 2, 6, 1, 2], 1), [6]);
    }

    #[test]
    fn what_fails_again_and_again_is_proposed_less_and_less() {
        let mut lookup = Lookup::default();
        let mut text = vec![1, 2, 3, 1, 2];
        let mut proposals = 0;
        for _ in 0..200 {
            let proposed = lookup.propose(&text, 15).len();
            proposals += usize::from(proposed > 0);
            // The text never has what was proposed, but always an n-gram that was seen.
            text.extend([4, 1, 2]);
            if proposed > 0 {
                lookup.adaptive.judge(proposed, 0, text.len());
            }
        }
        assert!((5..20).contains(&proposals), "{proposals} of 200");
        lookup.adaptive.paused_until = 0;
        lookup.adaptive.judge(2, 1, text.len());
        assert_eq!((lookup.adaptive.failures, lookup.adaptive.length), (0, 2), "one that comes true counts");
    }
}
