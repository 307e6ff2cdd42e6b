//! The grammar of an answer, and the token mask that holds each answer to it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::engine::TokenMask;
use crate::text::{Constraint, GrammarSource, TextError};

/// The grammar of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseGrammar {
    pub source: GrammarSource,
    /// The request's field that has the grammar; errors name it.
    pub param: String,
}

/// Why an answer could not be held to its grammar any further. All answers to one request share the value.
pub(super) type Failure = Arc<OnceLock<String>>;

/// Holds one answer to a grammar. The engine must stop at the ids that end an answer, and must leave it to the mask
/// when these ids may come. Where the grammar allows no other ids, the answer ends, however few ids it has.
#[derive(Clone)]
pub(super) struct GrammarMask {
    constraint: Constraint,
    /// The least number of ids in the answer. A grammar that allows nothing but the end ends the answer earlier.
    min_tokens: usize,
    /// How many of the answer's ids `constraint` has consumed.
    taken: usize,
    /// The mask for the next id, once it was computed.
    mask: Option<Arc<[u32]>>,
    failure: Failure,
    /// The time spent on masks since the engine last asked.
    took: Duration,
}

impl GrammarMask {
    pub(super) fn new(constraint: Constraint, min_tokens: usize, failure: Failure) -> Self {
        Self { constraint, min_tokens, taken: 0, mask: None, failure, took: Duration::ZERO }
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
        let may_end = answer.len() >= self.min_tokens;
        let mask = taken.and_then(|()| self.constraint.mask(may_end));
        let mask = mask.unwrap_or_else(|error| self.fail(&error));
        self.mask = Some(Arc::clone(&mask));
        mask
    }

    /// Feeds the new ids of `answer` to the constraint.
    fn take(&mut self, answer: &[u32]) -> Result<(), TextError> {
        let new = &answer[self.taken..];
        self.taken = answer.len();
        if !new.is_empty() {
            self.mask = None;
        }
        new.iter().try_for_each(|id| self.constraint.push(*id))
    }

    /// Records the error for the reader of the answer, and masks everything but the ids that end it.
    fn fail(&self, error: &TextError) -> Arc<[u32]> {
        let _ = self.failure.set(error.to_string());
        self.constraint.ends()
    }
}

impl TokenMask for GrammarMask {
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]> {
        self.timed(|mask| mask.mask_after(answer))
    }

    fn is_free(&mut self, answer: &[u32]) -> bool {
        if let Err(error) = self.timed(|mask| mask.take(answer)) {
            self.mask = Some(self.fail(&error));
        }
        self.constraint.is_free() && answer.len() >= self.min_tokens
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
    use crate::text::{Grammars, Tokenizer};

    #[test]
    fn what_a_mask_took_is_told_once_and_is_no_other_answers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tokenizer-mini/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap(), "tokenizer.json").unwrap();
        let start = tokenizer.encode("{", false).unwrap();
        let grammars = Grammars::new(tokenizer, 512, &[1]);
        let constraint = grammars.compile(&GrammarSource::json_object()).unwrap().start();
        let mut mask = GrammarMask::new(constraint, 0, Failure::default());
        assert_eq!(mask.take_time(), Duration::ZERO, "nothing was asked");
        mask.mask(&[]);
        let mut other = mask.boxed_clone();
        assert!(mask.take_time() > Duration::ZERO, "a mask");
        assert_eq!([mask.take_time(), other.take_time()], [Duration::ZERO; 2]);
        assert!(!mask.is_free(&start));
        assert!(mask.take_time() > Duration::ZERO, "what the next mask follows from");
    }
}
