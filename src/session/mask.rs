//! The token mask that holds an answer to its grammar, and to the token ids that its request allows.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::engine::TokenMask;
use crate::text::{Constraint, TextError, Tokenizer};

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

/// The bytes that an id adds to an answer's text.
fn text_of(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if tokenizer.is_special(id) { Vec::new() } else { tokenizer.token_bytes(id).unwrap_or_default() }
}

/// A text that an answer may not have, and the ids that would end it.
#[derive(Debug)]
struct BadWord {
    bytes: Vec<u8>,
    /// At index `n`: the ids whose texts begin with all of the word but its first `n` bytes. At index 0: the ids whose
    /// texts have the word.
    ending: Vec<Vec<u32>>,
}

/// Which ids may come in an answer, beside what its grammar allows.
pub(super) struct TokenRules {
    tokenizer: Tokenizer,
    allowed: Arc<[u32]>,
    bad_words: Vec<BadWord>,
    /// Ids that may not come before `min_tokens`.
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
}

impl TokenRules {
    /// Rules for the ids `0..vocab_size`. `allowed` are the ids that may come; none allows all. `bad_words` are texts
    /// that may not come, none of them empty. `stop_token_ids` end the answer, from its `min_tokens` on.
    pub(super) fn new(
        tokenizer: Tokenizer,
        vocab_size: usize,
        allowed: Option<&[u32]>,
        bad_words: &[String],
        stop_token_ids: Vec<u32>,
        min_tokens: usize,
    ) -> Self {
        let ids = 0..vocab_size as u32;
        let allowed = match allowed {
            Some(ids) => mask_of(vocab_size, ids.iter().copied()),
            None => mask_of(vocab_size, ids.clone()),
        };
        let word = |text: &String| BadWord {
            bytes: text.clone().into_bytes(),
            ending: vec![Vec::new(); text.len()],
        };
        let mut bad_words: Vec<BadWord> = bad_words.iter().map(word).collect();
        // Each token's text is looked up once for all words, and compared only where it is long enough.
        let compared = if bad_words.is_empty() { 0..0 } else { ids };
        for id in compared {
            let text = text_of(&tokenizer, id);
            for BadWord { bytes, ending } in &mut bad_words {
                let shortest = bytes.len().saturating_sub(text.len());
                if shortest == 0 && text.windows(bytes.len()).any(|part| part == bytes) {
                    ending[0].push(id);
                }
                for said in shortest.max(1)..bytes.len() {
                    if text.starts_with(&bytes[said..]) {
                        ending[said].push(id);
                    }
                }
            }
        }
        Self { tokenizer, allowed, bad_words, stop_token_ids, min_tokens }
    }

    /// The last bytes of the answer's text, as many as a bad word may have begun in.
    fn tail(&self, answer: &[u32]) -> Vec<u8> {
        let most = self.bad_words.iter().map(|word| word.bytes.len() - 1).max().unwrap_or(0);
        let mut tail = Vec::new();
        for id in answer.iter().rev() {
            if tail.len() >= most {
                break;
            }
            tail.splice(..0, text_of(&self.tokenizer, *id));
        }
        tail
    }

    /// The ids of `mask` that may follow `answer`; none if there is no such id. The ids of `too_early` are among them
    /// only if no others are.
    fn apply(&self, answer: &[u32], mask: &[u32], too_early: Option<&[u32]>) -> Option<Arc<[u32]>> {
        let mut words: Vec<u32> =
            mask.iter().zip(&*self.allowed).map(|(word, allowed)| word & allowed).collect();
        let tail = self.tail(answer);
        for BadWord { bytes, ending } in &self.bad_words {
            let ends = ending.iter().enumerate().filter(|(said, _)| tail.ends_with(&bytes[..*said]));
            ends.flat_map(|(_, ids)| ids).for_each(|id| clear(&mut words, *id));
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

    const VOCAB: usize = 512;

    fn tokenizer() -> Tokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tokenizer-mini/tokenizer.json");
        Tokenizer::from_bytes(&std::fs::read(path).unwrap(), "tokenizer.json").unwrap()
    }

    fn ids(mask: &[u32]) -> Vec<u32> {
        (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
    }

    /// A mask of rules alone, for a model whose answers end with 1 or 2.
    fn ruled(allowed: Option<&[u32]>, bad_words: &[&str], stops: &[u32], least: [usize; 2]) -> AnswerMask {
        let words: Vec<String> = bad_words.iter().map(|word| word.to_string()).collect();
        let rules = TokenRules::new(tokenizer(), VOCAB, allowed, &words, stops.to_vec(), least[0]);
        AnswerMask::new(VOCAB, &[1, 2], least[1], Failure::default()).with_rules(Some(rules))
    }

    #[test]
    fn what_a_mask_took_is_told_once_and_is_no_other_answers() {
        let start = tokenizer().encode("{", false).unwrap();
        let grammars = Grammars::new(tokenizer(), VOCAB, &[1]);
        let constraint = grammars.compile(&GrammarSource::json_object()).unwrap().start();
        let mask = AnswerMask::new(VOCAB, &[1], 0, Failure::default());
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
    fn a_mask_has_every_id_that_ends_no_bad_word() {
        let tokenizer = tokenizer();
        let words = ["the", "a ", "½", "n\n", "there", "e"];
        let text =
            |answer: &[u32]| -> Vec<u8> { answer.iter().flat_map(|id| text_of(&tokenizer, *id)).collect() };
        let has =
            |answer: &[u32], word: &str| text(answer).windows(word.len()).any(|part| part == word.as_bytes());
        let mut forbidden = 0;
        for (word, begun) in
            words.into_iter().flat_map(|word| ["", "t", "th", "a", "n", "½", "x th"].map(|b| (word, b)))
        {
            let answer = tokenizer.encode(begun, false).unwrap();
            // What is said stays said: a word that is there already is no concern of the next id.
            if has(&answer, word) {
                continue;
            }
            let allowed = ids(&ruled(None, &[word], &[], [0, 0]).mask(&answer));
            for id in 0..VOCAB as u32 {
                let ends = has(&[answer.as_slice(), &[id]].concat(), word);
                assert_eq!(allowed.contains(&id), !ends, "{id} behind {begun:?}, without {word:?}");
                forbidden += usize::from(ends);
            }
        }
        assert!(forbidden > 50, "{forbidden} ids in all");
    }

    #[test]
    fn an_end_comes_early_only_if_nothing_else_may() {
        let ruled = |allowed: &[u32]| ruled(Some(allowed), &[], &[9], [2, 3]);
        let mut mask = ruled(&[1, 8, 9]);
        assert_eq!(ids(&mask.mask(&[])), [8]);
        assert_eq!(ids(&mask.mask(&[8, 8])), [8, 9], "a stop id after min_tokens");
        assert_eq!(ids(&mask.mask(&[8, 8, 8])), [1, 8, 9], "and an end after the mask's own");
        assert!(!mask.is_free(&[8, 8, 8]), "rules hold to the end");
        assert_eq!(ids(&ruled(&[1, 9]).mask(&[])), [1, 9]);
    }

    #[test]
    fn where_no_token_is_left_the_answer_ends_and_says_why() {
        let e = tokenizer().encode("e", false).unwrap()[0];
        let mut mask = ruled(Some(&[e]), &["e"], &[], [0, 0]);
        assert_eq!(ids(&mask.mask(&[])), [1, 2]);
        assert!(mask.failure.get().expect("a reason").contains("leave no token"));
    }
}
