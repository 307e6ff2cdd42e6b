//! The grammar of an answer.

use crate::text::GrammarSource;

/// The grammar of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseGrammar {
    pub source: GrammarSource,
    /// The request's field with the grammar, for errors.
    pub param: String,
}
