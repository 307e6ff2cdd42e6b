//! The grammar of an answer.

use crate::text::GrammarSource;

/// The grammar of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseGrammar {
    pub source: GrammarSource,
    /// The request's field that has the grammar; errors name it.
    pub param: String,
}
