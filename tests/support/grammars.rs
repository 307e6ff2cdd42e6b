//! Grammars for the mini tokenizer's 512 pieces, and the ids that a mask allows.

use serde_json::Value;
use unicorn::text::{GrammarSource, Grammars, TextError};

use super::tables::rows;
use super::tokenizers::tokenizer;

/// The ids that end an answer.
pub const STOPS: [u32; 2] = [1, 106];
pub const ROWS: usize = 512;

pub fn grammars() -> Grammars {
    Grammars::new(tokenizer(), ROWS, &STOPS)
}

/// The ids that a mask allows.
pub fn allowed(mask: &[u32]) -> Vec<u32> {
    (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Whether the grammar accepts `text` as a complete answer.
pub fn accepts(grammars: &Grammars, source: &GrammarSource, text: &str) -> bool {
    let mut constraint = grammars.compile(source).unwrap_or_else(|e| panic!("{source:?}: {e}")).start();
    let ids = tokenizer().encode(text, false).unwrap();
    ids.iter().all(|id| constraint.push(*id).is_ok())
        && allowed(&constraint.mask(true).unwrap()).iter().any(|id| STOPS.contains(id))
}

/// The error of a grammar that does not compile.
pub fn refusal(grammars: &Grammars, source: &GrammarSource) -> String {
    match grammars.compile(source) {
        Err(TextError::Grammar(problem)) => problem,
        Err(other) => panic!("{source:?}: {other:?}"),
        Ok(_) => panic!("{source:?} was accepted"),
    }
}

/// Checks that a grammar accepts all texts of `good` and none of `bad`.
#[track_caller]
pub fn assert_language<T: AsRef<str>>(grammars: &Grammars, source: &GrammarSource, good: &[T], bad: &[T]) {
    for text in good.iter().map(AsRef::as_ref) {
        assert!(accepts(grammars, source, text), "{source:?} refuses {text:?}");
    }
    for text in bad.iter().map(AsRef::as_ref) {
        assert!(!accepts(grammars, source, text), "{source:?} accepts {text:?}");
    }
}

/// The rows `SCHEMA => GOOD | GOOD => BAD | BAD` of a table: JSON schemas, with texts that they allow and texts that they
/// forbid.
pub fn languages(table: &str) -> impl Iterator<Item = (Value, Vec<String>, Vec<String>)> {
    let texts = |texts: &str| texts.split(" | ").map(str::to_owned).collect();
    rows(table).into_iter().map(move |(schema, good_and_bad)| {
        let schema = serde_json::from_str(&schema).unwrap_or_else(|e| panic!("{e}: {schema}"));
        let (good, bad) = good_and_bad.split_once(" => ").expect(&good_and_bad);
        (schema, texts(good), texts(bad))
    })
}

/// Checks that a grammar is refused with one short line that contains `named`.
#[track_caller]
pub fn assert_refused(grammars: &Grammars, source: &GrammarSource, named: &str) {
    let problem = refusal(grammars, source);
    assert!(
        problem.contains(named) && !problem.contains('\n') && problem.len() < 200,
        "{source:?}: {named:?} is not in {problem:?}"
    );
}
