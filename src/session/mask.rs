//! The token mask that holds an answer to its grammar, and to the token ids that its request allows.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::engine::TokenMask;
use crate::text::{Constraint, TextError};

/// Why an answer could not be held to its request any further. All answers to one request share the value.
pub(super) type Failure = Arc<OnceLock<String>>;

/// Token ids as a mask: bit `id % 32` of word `id / 32` is set for each of them.
fn mask_of(vocab_size: usize, ids: impl IntoIterator<Item = u32>) -> Arc<[u32]> {
    let mut words = vec![0; vocab_size.div_ceil(32)];
    for id in ids {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words.into()
}

fn clear(words: &mut [u32], id: u32) {
    words[id as usize / 32] &= !(1 << (id % 32));
}

/// Which ids may come in an answer, beside what its grammar allows.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TokenRules {
    allowed: Arc<[u32]>,
    /// Sequences that may not come: the last id is forbidden where the others stand before it.
    bad_sequences: Vec<Vec<u32>>,
    /// Ids that may not come before `min_tokens`.
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
}

impl TokenRules {
    /// Rules for the ids `0..vocab_size`. `allowed` are the ids that may come; none allows all. `bad_words` are
    /// sequences of ids that may not come, none of them empty. `stop_token_ids` end the answer, from its `min_tokens`
    /// on.
    pub(super) fn new(
        vocab_size: usize,
        allowed: Option<&[u32]>,
        bad_words: Vec<Vec<u32>>,
        stop_token_ids: Vec<u32>,
        min_tokens: usize,
    ) -> Self {
        let (single, bad_sequences): (Vec<_>, Vec<_>) = bad_words.into_iter().partition(|ids| ids.len() == 1);
        let mut words = match allowed {
            Some(ids) => mask_of(vocab_size, ids.iter().copied()).to_vec(),
            None => mask_of(vocab_size, 0..vocab_size as u32).to_vec(),
        };
        single.iter().for_each(|ids| clear(&mut words, ids[0]));
        Self { allowed: words.into(), bad_sequences, stop_token_ids, min_tokens }
    }

    /// The ids of `mask` that may follow `answer`; none if there is no such id. The ids of `too_early` are among them
    /// only if no others are.
    fn apply(&self, answer: &[u32], mask: &[u32], too_early: Option<&[u32]>) -> Option<Arc<[u32]>> {
        let mut words: Vec<u32> =
            mask.iter().zip(&*self.allowed).map(|(word, allowed)| word & allowed).collect();
        for ids in &self.bad_sequences {
            let (last, before) = ids.split_last().expect("at least two ids");
            if answer.ends_with(before) {
                clear(&mut words, *last);
            }
        }
        let mut others = words.clone();
        for (word, early) in others.iter_mut().zip(too_early.unwrap_or_default()) {
            *word &= !early;
        }
        if answer.len() < self.min_tokens {
            self.stop_token_ids.iter().for_each(|id| clear(&mut others, *id));
        }
        [others, words].into_iter().find(|words| words.iter().any(|word| *word != 0)).map(Arc::from)
    }
}

/// Holds one answer to a grammar, to rules, or to both. The engine must stop at the ids that end an answer, and must
/// leave it to the mask when these ids may come. Where no other ids may come, the answer ends, however few ids it has.
#[derive(Clone)]
pub(super) struct AnswerMask {
    constraint: Option<Constraint>,
    rules: Option<Arc<TokenRules>>,
    /// The ids that end an answer.
    ends: Arc<[u32]>,
    /// The least number of ids before one of `ends`.
    min_tokens: usize,
    /// How many of the answer's ids `constraint` has consumed.
    taken: usize,
    /// The mask for the next id, once it was computed.
    mask: Option<Arc<[u32]>>,
    failure: Failure,
    /// The time spent on masks since the engine last asked.
    took: Duration,
}

impl AnswerMask {
    /// A mask for the ids `0..vocab_size`, of which `end_token_ids` end an answer.
    pub(super) fn new(vocab_size: usize, end_token_ids: &[u32], min_tokens: usize, failure: Failure) -> Self {
        let ends = end_token_ids.iter().copied().filter(|id| (*id as usize) < vocab_size);
        Self {
            constraint: None,
            rules: None,
            ends: mask_of(vocab_size, ends),
            min_tokens,
            taken: 0,
            mask: None,
            failure,
            took: Duration::ZERO,
        }
    }

    pub(super) fn with_grammar(self, constraint: Option<Constraint>) -> Self {
        Self { constraint, ..self }
    }

    pub(super) fn with_rules(self, rules: Option<TokenRules>) -> Self {
        Self { rules: rules.map(Arc::new), ..self }
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let since = Instant::now();
        let done = work(self);
        self.took += since.elapsed();
        done
    }

    /// The mask of the ids that may follow `answer`.
    fn mask_after(&mut self, answer: &[u32]) -> Arc<[u32]> {
        let taken = self.take(answer);
        if let Some(mask) = &self.mask {
            return Arc::clone(mask);
        }
        let mask = taken.map_err(|error| error.to_string()).and_then(|()| self.computed(answer));
        let mask = mask.unwrap_or_else(|problem| self.fail(problem));
        self.mask = Some(Arc::clone(&mask));
        mask
    }

    /// The mask of the ids that may follow `answer`, which the constraint has consumed.
    fn computed(&mut self, answer: &[u32]) -> Result<Arc<[u32]>, String> {
        let may_end = answer.len() >= self.min_tokens;
        // A grammar keeps its ends away by itself, and knows where nothing else may come.
        let grammar = self.constraint.as_mut().map(|constraint| constraint.mask(may_end));
        let grammar = grammar.transpose().map_err(|error| error.to_string())?;
        let Some(rules) = &self.rules else { return Ok(grammar.expect("a grammar or rules")) };
        let too_early = (!may_end && grammar.is_none()).then_some(&*self.ends);
        let mask = grammar.as_deref().unwrap_or(&rules.allowed);
        let left = rules.apply(answer, mask, too_early);
        left.ok_or_else(|| "grammar, allowed_token_ids and bad_words together leave no token".to_owned())
    }

    /// Feeds the new ids of `answer` to the constraint.
    fn take(&mut self, answer: &[u32]) -> Result<(), TextError> {
        let new = &answer[self.taken..];
        self.taken = answer.len();
        if !new.is_empty() {
            self.mask = None;
        }
        let Some(constraint) = &mut self.constraint else { return Ok(()) };
        new.iter().try_for_each(|id| constraint.push(*id))
    }

    /// Records the problem for the reader of the answer, and masks everything but the ids that end it.
    fn fail(&self, problem: String) -> Arc<[u32]> {
        let _ = self.failure.set(problem);
        Arc::clone(&self.ends)
    }
}

impl TokenMask for AnswerMask {
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]> {
        self.timed(|mask| mask.mask_after(answer))
    }

    fn is_free(&mut self, answer: &[u32]) -> bool {
        if let Err(error) = self.timed(|mask| mask.take(answer)) {
            self.mask = Some(self.fail(error.to_string()));
        }
        let is_free = self.constraint.as_ref().is_none_or(Constraint::is_free);
        is_free && self.rules.is_none() && answer.len() >= self.min_tokens
    }

    fn take_time(&mut self) -> Duration {
        std::mem::take(&mut self.took)
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(Self { took: Duration::ZERO, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{GrammarSource, Grammars, Tokenizer};

    const VOCAB: usize = 40;

    fn ids(mask: &[u32]) -> Vec<u32> {
        (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
    }

    fn ruled(rules: TokenRules, min_tokens: usize) -> AnswerMask {
        AnswerMask::new(VOCAB, &[1, 2], min_tokens, Failure::default()).with_rules(Some(rules))
    }

    #[test]
    fn what_a_mask_took_is_told_once_and_is_no_other_answers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tokenizer-mini/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap(), "tokenizer.json").unwrap();
        let start = tokenizer.encode("{", false).unwrap();
        let grammars = Grammars::new(tokenizer, 512, &[1]);
        let constraint = grammars.compile(&GrammarSource::json_object()).unwrap().start();
        let mask = AnswerMask::new(512, &[1], 0, Failure::default());
        let mut mask = mask.with_grammar(Some(constraint));
        assert_eq!(mask.take_time(), Duration::ZERO, "nothing was asked");
        mask.mask(&[]);
        let mut other = mask.boxed_clone();
        assert!(mask.take_time() > Duration::ZERO, "a mask");
        assert_eq!([mask.take_time(), other.take_time()], [Duration::ZERO; 2]);
        assert!(!mask.is_free(&start));
        assert!(mask.take_time() > Duration::ZERO, "what the next mask follows from");
    }

    #[test]
    fn a_mask_has_what_is_allowed_and_no_end_of_a_bad_word() {
        let bad = vec![vec![7], vec![5, 6], vec![5, 6, 39]];
        let mut mask = ruled(TokenRules::new(VOCAB, Some(&[1, 5, 6, 7, 39]), bad.clone(), vec![], 0), 0);
        assert_eq!(ids(&mask.mask(&[])), [1, 5, 6, 39]);
        assert_eq!(ids(&mask.mask(&[5])), [1, 5, 39], "6 would end a bad word");
        assert_eq!(ids(&mask.mask(&[5, 6])), [1, 5, 6], "39 would");
        assert!(!mask.is_free(&[5, 6]), "rules hold to the end");
        let mut all = ruled(TokenRules::new(VOCAB, None, bad, vec![], 0), 0);
        assert_eq!(ids(&all.mask(&[])), (0..40).filter(|id| *id != 7).collect::<Vec<_>>());
    }

    #[test]
    fn an_end_comes_early_only_if_nothing_else_may() {
        let rules = |allowed: &[u32]| TokenRules::new(VOCAB, Some(allowed), vec![], vec![9], 2);
        let mut mask = ruled(rules(&[1, 8, 9]), 3);
        assert_eq!(ids(&mask.mask(&[])), [8]);
        assert_eq!(ids(&mask.mask(&[8, 8])), [8, 9], "a stop id after min_tokens");
        assert_eq!(ids(&mask.mask(&[8, 8, 8])), [1, 8, 9], "and an end after the mask's own");
        assert_eq!(ids(&ruled(rules(&[1, 9]), 3).mask(&[])), [1, 9]);
    }

    #[test]
    fn where_no_token_is_left_the_answer_ends_and_says_why() {
        let mut mask = ruled(TokenRules::new(VOCAB, Some(&[5, 6]), vec![vec![5], vec![6]], vec![], 0), 0);
        assert_eq!(ids(&mask.mask(&[])), [1, 2]);
        assert!(mask.failure.get().expect("a reason").contains("leave no token"));
    }
}
