//! The token mask that restricts an answer to its grammar, and to the token ids that its request allows.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::tools::MAX_TOOLS;
use crate::engine::{Restriction, TokenMask};
use crate::text::{
    CallTokens, Constraint, Grammar, TextError, ThoughtStart, ThoughtTokens, Tokenizer, mask_of,
};

/// Why an answer could not follow its grammar or the rules of its request any longer. All answers to a request share
/// it.
pub(super) type Failure = Arc<OnceLock<String>>;

/// `mask` without the ids of `others`.
fn without(mask: &Arc<[u32]>, others: Option<&[u32]>) -> Arc<[u32]> {
    match others {
        None => Arc::clone(mask),
        Some(others) => mask.iter().zip(others).map(|(word, other)| word & !other).collect(),
    }
}

/// `mask` with one more id.
fn with(mask: &[u32], id: u32) -> Arc<[u32]> {
    let mut words = mask.to_vec();
    words[id as usize / 32] |= 1 << (id % 32);
    words.into()
}

fn clear(words: &mut [u32], id: u32) {
    words[id as usize / 32] &= !(1 << (id % 32));
}

/// The bytes that an id adds to the text of an answer.
fn text_of(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if tokenizer.is_special(id) { Vec::new() } else { tokenizer.token_bytes(id).unwrap_or_default() }
}

/// A text that must not occur in an answer, and the ids that would complete it.
#[derive(Debug)]
struct BadWord {
    bytes: Vec<u8>,
    /// At index `n > 0`: the ids whose texts begin with the rest of the word after its first `n` bytes. At index 0: the
    /// ids whose texts contain the word.
    completing: Vec<Vec<u32>>,
}

/// Rules for the ids of an answer, in addition to its grammar.
pub(super) struct TokenRules {
    tokenizer: Tokenizer,
    allowed: Arc<[u32]>,
    bad_words: Vec<BadWord>,
    /// Ids that may not come before `min_tokens`.
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
}

impl TokenRules {
    /// Rules for the ids `0..vocab_size`. `allowed` are the ids that may come; `None` = all. `bad_words` are texts that
    /// must not occur; none of them is empty. `stop_token_ids` may come only after `min_tokens` ids.
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
            completing: vec![Vec::new(); text.len()],
        };
        let mut bad_words: Vec<BadWord> = bad_words.iter().map(word).collect();
        // The text of each token is looked up once for all words, and compared only where it is long enough.
        let compared = if bad_words.is_empty() { 0..0 } else { ids };
        for id in compared {
            let text = text_of(&tokenizer, id);
            for BadWord { bytes, completing } in &mut bad_words {
                let shortest = bytes.len().saturating_sub(text.len());
                if shortest == 0 && text.windows(bytes.len()).any(|part| part == bytes) {
                    completing[0].push(id);
                }
                for begun in shortest.max(1)..bytes.len() {
                    if text.starts_with(&bytes[begun..]) {
                        completing[begun].push(id);
                    }
                }
            }
        }
        Self { tokenizer, allowed: allowed.into(), bad_words, stop_token_ids, min_tokens }
    }

    /// The end of the answer's text, long enough for the beginning of every bad word.
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

    /// The ids of `mask` that may follow `answer`, or `None` if there are none. The ids of `too_early`, and of
    /// `stop_token_ids` before `min_tokens`, are included only if there are no others.
    fn apply(&self, answer: &[u32], mask: &[u32], too_early: Option<&[u32]>) -> Option<Arc<[u32]>> {
        let mut words: Vec<u32> =
            mask.iter().zip(&*self.allowed).map(|(word, allowed)| word & allowed).collect();
        let tail = self.tail(answer);
        for BadWord { bytes, completing } in &self.bad_words {
            let forbidden =
                completing.iter().enumerate().filter(|(begun, _)| tail.ends_with(&bytes[..*begun]));
            forbidden.flat_map(|(_, ids)| ids).for_each(|id| clear(&mut words, *id));
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

/// The thoughts before the text of an answer. A grammar begins after them, or after the id that opens a call. In a
/// thought, every id may come that does not end the answer; after `budget` ids of all thoughts, only the one that ends the
/// thought.
#[derive(Clone)]
pub(super) struct ThoughtGuard {
    tokens: ThoughtTokens,
    at: ThoughtStart,
    budget: Option<usize>,
    /// The number of ids in thoughts, without the tokens around them.
    ids: usize,
    /// The ids that may come in a thought.
    inside: Arc<[u32]>,
}

impl ThoughtGuard {
    pub(super) fn new(tokens: ThoughtTokens, at: ThoughtStart, budget: Option<usize>) -> Self {
        Self { tokens, at, budget, ids: 0, inside: Arc::default() }
    }

    /// Whether a thought is open, or may be opened.
    pub(super) fn may_think(&self) -> bool {
        self.at != ThoughtStart::After
    }

    /// Takes the next id of the answer. Returns whether the id belongs to a thought. `opens_call`: the id opens a call.
    fn take(&mut self, id: u32, opens_call: bool) -> bool {
        match self.at {
            // The model thinks again. The budget is that of all thoughts together.
            ThoughtStart::After if id == self.tokens.open && self.budget.is_some() => {
                self.at = ThoughtStart::Inside;
            }
            ThoughtStart::After => return false,
            _ if opens_call => {
                self.at = ThoughtStart::After;
                return false;
            }
            ThoughtStart::Before if id == self.tokens.open => self.at = ThoughtStart::Inside,
            ThoughtStart::Before => {
                self.at = ThoughtStart::After;
                return false;
            }
            ThoughtStart::Inside if id == self.tokens.close => self.at = ThoughtStart::After,
            ThoughtStart::Inside => self.ids += 1,
        }
        true
    }

    fn is_exhausted(&self) -> bool {
        self.budget.is_some_and(|budget| self.ids >= budget)
    }
}

/// The calls of an answer, for models with control tokens for them. Before the first call, the text of the answer is
/// free, unless a call is required. Each call obeys a grammar. After a call, only another call may follow, or the end.
#[derive(Clone)]
pub(super) struct CallGuard {
    tokens: CallTokens,
    /// The mask of the id that closes a call, if there is one.
    closing: Option<Arc<[u32]>>,
    grammar: Grammar,
    is_required: bool,
    is_parallel: bool,
    /// The ids that consist of white space.
    blanks: Arc<[u32]>,
    at: CallPlace,
    /// The number of calls that have begun.
    calls: usize,
}

#[derive(Clone)]
enum CallPlace {
    /// In the text before the first call. `is_empty`: there is no text yet.
    Text {
        is_empty: bool,
    },
    Inside(Box<Constraint>),
    /// After a call. One token of white space may follow.
    After {
        is_blank: bool,
    },
}

impl CallGuard {
    /// A guard of calls that match `grammar`. `blanks` is the mask of the ids that consist of white space.
    pub(super) fn new(
        tokens: &CallTokens,
        grammar: Grammar,
        is_required: bool,
        is_parallel: bool,
        blanks: &[u32],
    ) -> Self {
        let vocab_size = blanks.len() * 32;
        let closing = tokens.close.map(|close| mask_of(vocab_size, [close]).into());
        let (tokens, blanks, at) = (tokens.clone(), blanks.into(), CallPlace::Text { is_empty: true });
        Self { tokens, closing, grammar, is_required, is_parallel, blanks, at, calls: 0 }
    }

    /// Takes the next id of the answer, which belongs to no thought. Returns whether the id belongs to the text before
    /// the first call.
    fn take(&mut self, id: u32) -> Result<bool, TextError> {
        let opens = id == self.tokens.open;
        match &mut self.at {
            CallPlace::Inside(_) if Some(id) == self.tokens.close => {
                self.at = CallPlace::After { is_blank: false }
            }
            CallPlace::Inside(constraint) if !opens => constraint.push(id)?,
            CallPlace::Text { is_empty } if !opens => {
                *is_empty = false;
                return Ok(true);
            }
            CallPlace::After { is_blank } if !opens => *is_blank = true,
            _ => {
                self.calls += 1;
                self.at = CallPlace::Inside(Box::new(self.grammar.start()));
            }
        }
        Ok(false)
    }

    /// The ids that may come in a call or after one. `None` = in the text before the first call. `ends` are the ids that
    /// end the answer.
    fn mask(&mut self, ends: &[u32]) -> Result<Option<Arc<[u32]>>, TextError> {
        let (tokens, blanks) = (&self.tokens, &self.blanks);
        let may_call = self.is_parallel && self.calls < MAX_TOOLS;
        let after = || if may_call { with(ends, tokens.open) } else { ends.into() };
        match &mut self.at {
            CallPlace::Text { .. } => Ok(None),
            CallPlace::Inside(constraint) => Ok(Some(match &self.closing {
                Some(closing) => constraint.part_mask(closing)?,
                None => constraint.part_mask(&after())?,
            })),
            CallPlace::After { is_blank: true } => Ok(Some(after())),
            CallPlace::After { is_blank: false } => {
                Ok(Some(after().iter().zip(&**blanks).map(|(word, blank)| word | blank).collect()))
            }
        }
    }
}

/// Restricts one answer to a grammar, to rules, or to both. The engine must stop at the ids that end an answer. Only
/// the mask decides when these ids may come: the engine must not forbid them. If no other ids may come, the answer
/// ends, even before its minimum length.
#[derive(Clone)]
pub(super) struct AnswerMask {
    constraint: Option<Constraint>,
    rules: Option<Arc<TokenRules>>,
    /// `None` = the answer has no thoughts.
    thoughts: Option<ThoughtGuard>,
    /// `None` = the answer has no calls between control tokens.
    calls: Option<CallGuard>,
    vocab_size: usize,
    /// The ids that end an answer.
    end_ids: Arc<[u32]>,
    /// Minimum number of ids before one of `end_ids`.
    min_tokens: usize,
    /// How many of the answer's ids `constraint` has consumed.
    taken: usize,
    /// The mask for the next id, if it was computed already.
    mask: Option<Arc<[u32]>>,
    failure: Failure,
    /// The time spent on masks since the last call of `take_time`.
    took: Duration,
}

impl AnswerMask {
    /// A mask for the ids `0..vocab_size`, of which `end_token_ids` end an answer.
    pub(super) fn new(
        vocab_size: usize,
        end_token_ids: &[u32],
        min_tokens: usize,
        constraint: Option<Constraint>,
        rules: Option<TokenRules>,
        failure: Failure,
    ) -> Self {
        let ends = end_token_ids.iter().copied().filter(|id| (*id as usize) < vocab_size);
        Self {
            constraint,
            rules: rules.map(Arc::new),
            thoughts: None,
            calls: None,
            vocab_size,
            end_ids: mask_of(vocab_size, ends).into(),
            min_tokens,
            taken: 0,
            mask: None,
            failure,
            took: Duration::ZERO,
        }
    }

    /// The answer may have thoughts, after which the grammar begins.
    #[must_use]
    pub(super) fn after_thoughts(self, guard: ThoughtGuard) -> Self {
        let inside = match guard.may_think() || guard.budget.is_some() {
            true => without(&self.every_id(), Some(&self.end_ids)),
            false => Arc::default(),
        };
        Self { thoughts: Some(ThoughtGuard { inside, ..guard }), ..self }
    }

    /// The answer may call tools, if there is a guard.
    #[must_use]
    pub(super) fn with_calls(self, calls: Option<CallGuard>) -> Self {
        Self { calls, ..self }
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
        let mut opens = Vec::new();
        match &self.thoughts {
            Some(guard) if guard.at == ThoughtStart::Inside => return self.in_a_thought(guard, answer),
            Some(guard) if guard.at == ThoughtStart::Before => opens.push(guard.tokens.open),
            _ => {}
        }
        let calls = self.calls.as_mut().map(|calls| calls.mask(&self.end_ids)).transpose();
        let in_calls = calls.map_err(|error| error.to_string())?.flatten();
        // A grammar decides itself when end ids may come, and knows when nothing else may come.
        let grammar = match (in_calls, &self.calls) {
            (Some(mask), _) => Some(mask),
            (None, Some(calls)) if calls.is_required => {
                Some(mask_of(self.vocab_size, [calls.tokens.open]).into())
            }
            (None, calls) => {
                // A call may come in place of a text that must match a grammar.
                let is_empty = |calls: &&CallGuard| matches!(calls.at, CallPlace::Text { is_empty: true });
                opens.extend(calls.as_ref().filter(is_empty).map(|calls| calls.tokens.open));
                let grammar = self.constraint.as_mut().map(|constraint| constraint.mask(may_end));
                grammar.transpose().map_err(|error| error.to_string())?
            }
        };
        let has_grammar = grammar.is_some();
        let mut mask = match (grammar, &self.rules) {
            (Some(mask), _) => mask,
            // The rules exclude all others from any mask.
            (None, Some(rules)) => Arc::clone(&rules.allowed),
            (None, None) => self.every_id(),
        };
        for open in opens {
            mask = with(&mask, open);
        }
        let too_early = (!may_end && !has_grammar).then_some(&*self.end_ids);
        let Some(rules) = &self.rules else { return Ok(without(&mask, too_early)) };
        let left = rules.apply(answer, &mask, too_early);
        left.ok_or_else(|| "grammar, allowed_token_ids and bad_words together leave no token".to_owned())
    }

    /// The mask of the ids that may follow within a thought.
    fn in_a_thought(&self, guard: &ThoughtGuard, answer: &[u32]) -> Result<Arc<[u32]>, String> {
        if guard.is_exhausted() {
            return Ok(mask_of(self.vocab_size, [guard.tokens.close]).into());
        }
        let Some(rules) = &self.rules else { return Ok(Arc::clone(&guard.inside)) };
        let left = rules.apply(answer, &guard.inside, None);
        left.ok_or_else(|| "allowed_token_ids and bad_words together leave no token".to_owned())
    }

    fn every_id(&self) -> Arc<[u32]> {
        mask_of(self.vocab_size, 0..self.vocab_size as u32).into()
    }

    /// Passes the new ids of `answer` to the constraint.
    fn take(&mut self, answer: &[u32]) -> Result<(), TextError> {
        let new = &answer[self.taken..];
        self.taken = answer.len();
        if !new.is_empty() {
            self.mask = None;
        }
        for id in new {
            let opens_call = self.calls.as_ref().is_some_and(|calls| calls.tokens.open == *id);
            if self.thoughts.as_mut().is_some_and(|guard| guard.take(*id, opens_call)) {
                continue;
            }
            let is_text = self.calls.as_mut().map_or(Ok(true), |calls| calls.take(*id))?;
            if let Some(constraint) = self.constraint.as_mut().filter(|_| is_text) {
                constraint.push(*id)?;
            }
        }
        Ok(())
    }

    /// Records the problem, which ends the answer with an error. Returns a mask that allows only the ids that end the
    /// answer.
    fn fail(&self, problem: String) -> Arc<[u32]> {
        let _ = self.failure.set(problem);
        Arc::clone(&self.end_ids)
    }
}

impl TokenMask for AnswerMask {
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]> {
        self.timed(|mask| mask.mask_after(answer))
    }

    fn restriction(&mut self, answer: &[u32]) -> Restriction {
        if let Err(error) = self.timed(|mask| mask.take(answer)) {
            self.mask = Some(self.fail(error.to_string()));
        }
        let is_free = self.constraint.as_ref().is_none_or(Constraint::is_free);
        let is_free = is_free && self.rules.is_none() && answer.len() >= self.min_tokens;
        let may_think = self.thoughts.as_ref().is_some_and(ThoughtGuard::may_think);
        let is_limited = self.thoughts.as_ref().is_some_and(|guard| guard.budget.is_some());
        match &self.calls {
            _ if !is_free || may_think && is_limited => Restriction::Binding,
            Some(CallGuard { at: CallPlace::Text { .. }, is_required: false, .. }) => Restriction::Idle,
            Some(_) => Restriction::Binding,
            // A thought ends the restriction only if it cannot become one again.
            None if may_think => Restriction::Binding,
            None if is_limited => Restriction::Idle,
            None => Restriction::Over,
        }
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
        AnswerMask::new(VOCAB, &[1, 2], least[1], None, Some(rules), Failure::default())
    }

    #[test]
    fn the_time_of_a_mask_is_returned_once_and_not_to_a_copy() {
        let start = tokenizer().encode("{", false).unwrap();
        let grammars = Grammars::new(tokenizer(), VOCAB, &[1]);
        let constraint = grammars.compile(&GrammarSource::json_object()).unwrap().start();
        let mut mask = AnswerMask::new(VOCAB, &[1], 0, Some(constraint), None, Failure::default());
        assert_eq!(mask.take_time(), Duration::ZERO, "nothing was asked");
        mask.mask(&[]);
        let mut other = mask.boxed_clone();
        assert!(mask.take_time() > Duration::ZERO, "a mask");
        assert_eq!([mask.take_time(), other.take_time()], [Duration::ZERO; 2]);
        assert_eq!(mask.restriction(&start), Restriction::Binding);
        assert!(mask.take_time() > Duration::ZERO, "the new id for the next mask");
    }

    #[test]
    fn a_budget_holds_for_all_thoughts_of_an_answer() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/families/qwen-tokenizer/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap(), "tokenizer.json").unwrap();
        let tokens = tokenizer.thought_tokens().expect("a model that thinks");
        let mask = AnswerMask::new(tokenizer.vocab_size(), &[1], 0, None, None, Failure::default());
        let mut mask = mask.after_thoughts(ThoughtGuard::new(tokens, ThoughtStart::Before, Some(2)));
        assert_eq!(mask.restriction(&[]), Restriction::Binding, "a thought may begin");
        let mut answer = vec![tokens.open, 5, tokens.close, 7];
        assert_eq!(
            mask.restriction(&answer),
            Restriction::Idle,
            "text, after which the model may think again"
        );
        answer.push(tokens.open);
        assert_eq!(mask.restriction(&answer), Restriction::Binding);
        assert!(ids(&mask.mask(&answer)).len() > 100, "one id is left");
        answer.push(5);
        assert_eq!(ids(&mask.mask(&answer)), [tokens.close]);
        answer.push(tokens.close);
        assert_eq!(mask.restriction(&answer), Restriction::Idle);
    }

    #[test]
    fn a_mask_has_exactly_the_ids_that_complete_no_bad_word() {
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
            // A word that is in the answer already does not restrict the next id.
            if has(&answer, word) {
                continue;
            }
            let allowed = ids(&ruled(None, &[word], &[], [0, 0]).mask(&answer));
            for id in 0..VOCAB as u32 {
                let ends = has(&[answer.as_slice(), &[id]].concat(), word);
                assert_eq!(allowed.contains(&id), !ends, "{id} after {begun:?}, bad word {word:?}");
                forbidden += usize::from(ends);
            }
        }
        assert!(forbidden > 50, "{forbidden} forbidden ids in total");
    }

    #[test]
    fn an_end_id_may_come_early_only_if_no_other_id_may_come() {
        let ruled = |allowed: &[u32]| ruled(Some(allowed), &[], &[9], [2, 3]);
        let mut mask = ruled(&[1, 8, 9]);
        assert_eq!(ids(&mask.mask(&[])), [8]);
        assert_eq!(ids(&mask.mask(&[8, 8])), [8, 9], "a stop id after min_tokens");
        assert_eq!(ids(&mask.mask(&[8, 8, 8])), [1, 8, 9], "an end id after the min_tokens of the mask");
        assert_eq!(mask.restriction(&[8, 8, 8]), Restriction::Binding, "rules apply until the end");
        assert_eq!(ids(&ruled(&[1, 9]).mask(&[])), [1, 9]);
    }

    #[test]
    fn an_answer_without_allowed_ids_ends_with_a_reason() {
        let e = tokenizer().encode("e", false).unwrap()[0];
        let mut mask = ruled(Some(&[e]), &["e"], &[], [0, 0]);
        assert_eq!(ids(&mask.mask(&[])), [1, 2]);
        assert!(mask.failure.get().expect("a reason").contains("leave no token"));
    }
}
