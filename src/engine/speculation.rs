//! Guesses at what a model will draw, which one pass checks several of: how many are worth making, and where they come
//! from. A guess is accepted where it equals the draw, so the answer is the same with and without.
//!
//! Prompt lookup costs no model: what followed the last time the text said this is proposed to follow again (Saxena, Prompt
//! Lookup Decoding, 2023). It helps where an answer repeats its prompt: summaries, edits, code, JSON. Where it has nothing
//! to say, a draft model may ([`crate::model::Runner::draft`]).
//!
//! What wrong guesses cost is bounded ([`Adaptive`]): there are more of them while they come true, fewer when they do not,
//! and none for a while when they fail again and again.

use std::collections::HashMap;

/// Tokens that must agree for what followed them to be proposed; tried in this order.
const GRAMS: [usize; 2] = [3, 2];
/// Tokens guessed at once, at most and at first.
const MOST: usize = 15;
const FIRST: usize = 4;
/// Tokens taken in at once.
const INDEXED_AT_ONCE: usize = 8192;
/// Ids to draw without a guess after one that failed from the start, doubled with each in a row, up to the second.
const PAUSE: [usize; 2] = [2, 64];

/// Ids that were guessed ahead of the model, and how many of them it drew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafts {
    pub proposed: usize,
    pub accepted: usize,
}

/// Who guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guesser {
    /// [`Lookup`].
    Lookup,
    /// The draft model.
    Model,
}

/// What was guessed, and what came true, by guesser.
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

/// How many ids one guesser guesses for one text, by what became of its guesses before.
#[derive(Debug)]
pub struct Adaptive {
    length: usize,
    /// Failures in a row, and the length of the text up to which nothing is guessed.
    failures: u32,
    paused_until: usize,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { length: FIRST, failures: 0, paused_until: 0 }
    }
}

impl Adaptive {
    /// Ids to guess behind a text of `total` tokens; 0 while it pauses.
    pub fn length(&self, total: usize) -> usize {
        if total < self.paused_until { 0 } else { self.length }
    }

    /// Takes in how many of the guessed ids came true; `total` is the length of the text now.
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

/// What one text repeats of itself.
#[derive(Debug, Default)]
pub struct Lookup {
    /// For each n-gram, where the text went on the last time.
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
    /// Takes in what is new in `tokens`, but for the n-grams at its end: nothing has followed them yet.
    fn index(&mut self, tokens: &[u32]) {
        // Of a long prompt the end: nobody is to wait for the beginning.
        for next in self.indexed.max(tokens.len().saturating_sub(INDEXED_AT_ONCE)).max(1)..tokens.len() {
            for (followed, n) in self.followed.iter_mut().zip(GRAMS) {
                if let Some(start) = next.checked_sub(n) {
                    followed.insert(gram(&tokens[start..next]), next as u32);
                }
            }
        }
        self.indexed = tokens.len();
    }

    /// Up to `most` ids that may follow `tokens`; none where nothing speaks for any.
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
        // A text that repeats itself all the time goes on where the proposal itself has begun.
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
        // The newest occurrence counts.
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
            // Never what was proposed, and yet always something that was seen.
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
