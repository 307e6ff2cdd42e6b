//! Prompt lookup: what followed the last time the text said this is proposed to follow again (Saxena, Prompt Lookup
//! Decoding, 2023). Costs no model; helps where an answer repeats its prompt: summaries, edits, code, JSON.
//!
//! A proposal is only ever a guess at what the model will draw: it is accepted where it equals that, so the answer is the
//! same with and without. What a wrong one costs is bounded: proposals get longer while they come true, shorter when they
//! do not, and pause when they fail again and again.

use std::collections::HashMap;

/// Tokens that must agree for what followed them to be proposed; tried in this order.
const GRAMS: [usize; 2] = [3, 2];
/// Tokens proposed at once, at most and at first.
const MOST: usize = 15;
const FIRST: usize = 4;
/// Tokens taken in at once.
const INDEXED_AT_ONCE: usize = 8192;
/// Ids to draw without a proposal after one that failed from the start, doubled with each in a row, up to the second.
const PAUSE: [usize; 2] = [2, 64];

/// What one text repeats of itself.
#[derive(Debug)]
pub struct Lookup {
    /// For each n-gram, where the text went on the last time.
    followed: [HashMap<[u32; 3], u32>; GRAMS.len()],
    /// Tokens of the text that are in `followed`.
    indexed: usize,
    length: usize,
    /// Failures in a row, and the length of the text up to which nothing is proposed.
    failures: u32,
    paused_until: usize,
}

impl Default for Lookup {
    fn default() -> Self {
        Self { followed: Default::default(), indexed: 0, length: FIRST, failures: 0, paused_until: 0 }
    }
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
        if tokens.len() < self.paused_until {
            return Vec::new();
        }
        let last = |n: usize| tokens.len().checked_sub(n).map(|start| gram(&tokens[start..]));
        let found =
            self.followed.iter().zip(GRAMS).find_map(|(followed, n)| followed.get(&last(n)?).copied());
        let Some(next) = found else { return Vec::new() };
        // A text that repeats itself all the time goes on where the proposal itself has begun.
        let (next, length) = (next as usize, self.length.min(most));
        let period = tokens.len() - next;
        (0..length).map(|i| tokens[next + i % period]).collect()
    }

    /// Takes in how many of the proposed ids came true; `total` is the length of the text now.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_before_is_proposed_again() {
        let text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3];
        let mut lookup = Lookup::default();
        assert_eq!(lookup.propose(&text, 9), [4, 5, 6, 7], "three tokens agree");
        assert_eq!(lookup.propose(&text, 2), [4, 5], "no more than wanted");
        lookup.judge(4, 4, 15);
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
                lookup.judge(proposed, 0, text.len());
            }
        }
        assert!((5..20).contains(&proposals), "{proposals} of 200");
        lookup.paused_until = 0;
        lookup.judge(2, 1, text.len());
        assert_eq!((lookup.failures, lookup.length), (0, 2), "one that comes true counts");
    }
}
