//! Grammars over the mini tokenizer's 512 pieces, and what a mask allows.

use unicorn::text::{GrammarSource, Grammars, TextError};

use super::tokenizers::tokenizer;

/// The ids that end an answer.
pub const STOPS: [u32; 2] = [1, 106];
pub const ROWS: usize = 512;

pub fn grammars() -> Grammars {
    Grammars::new(tokenizer(), ROWS, &STOPS)
}

/// The ids of a mask.
pub fn allowed(mask: &[u32]) -> Vec<u32> {
    (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Whether `text` is an answer that the grammar allows.
pub fn accepts(grammars: &Grammars, source: &GrammarSource, text: &str) -> bool {
    let mut constraint = grammars.compile(source).unwrap_or_else(|e| panic!("{source:?}: {e}")).start();
    let ids = tokenizer().encode(text, false).unwrap();
    ids.iter().all(|id| constraint.push(*id).is_ok())
        && allowed(&constraint.mask(true).unwrap()).iter().any(|id| STOPS.contains(id))
}

/// Why a grammar does not compile.
pub fn refusal(grammars: &Grammars, source: &GrammarSource) -> String {
    match grammars.compile(source) {
        Err(TextError::Grammar(problem)) => problem,
        Err(other) => panic!("{source:?}: {other:?}"),
        Ok(_) => panic!("{source:?} was accepted"),
    }
}
