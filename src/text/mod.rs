//! Text on its way in and out: tokenizer.json, the chat template, and incremental detokenization.
//!
//! | from | to | by |
//! |---|---|---|
//! | messages | messages every Gemma template accepts | [`normalize`] |
//! | messages | one prompt text, which already holds `<bos>` | [`ChatTemplate::render`] |
//! | text | token ids | [`Tokenizer::encode`] |
//! | one token id | the text it completes | [`Detokenizer::push`] |
//! | text as it arrives | text before the first stop string | [`StopMatcher::push`] |
//! | text as it arrives | calls of tools in it | [`CallReader::push`] |
//! | a schema, a regex, a grammar | which ids may come next | [`Constraint::mask`] |
//!
//! This module gets bytes and opens no file. It knows no model, request or engine. What it is given by
//! others (a checkpoint's files, a client's text) ends in a result or a [`TextError`], never a panic.

mod calls;
mod chat;
mod detokenizer;
mod grammar;
mod jinja;
mod panics;
mod stop;
mod template;
mod tokenizer;

pub use calls::{CallPiece, CallReader, Said, whole_parameters};
pub use chat::{Content, Message, Part, normalize};
pub use detokenizer::Detokenizer;
pub use grammar::{Constraint, Grammar, GrammarSource, Grammars, MAX_CHOICES, MAX_GRAMMAR_BYTES};
pub use panics::panic_message;
pub use stop::{MAX_STOP_BYTES, MAX_STOPS, StopMatcher, Stopped};
pub use template::{ChatFiles, ChatTemplate};
pub use tokenizer::Tokenizer;

/// Longest text, in bytes, that is rendered from a conversation or tokenized in one call.
///
/// Encoding the worst of it takes about a second and 150 bytes of memory per byte of text, so this bounds what
/// one request can cost. It is four times the longest Gemma-3 context (131,072 tokens of about four bytes).
pub const MAX_TEXT_BYTES: usize = 2 << 20;

/// What went wrong with a tokenizer, a template, or a text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The tokenizer file cannot be used; `problem` names the field and what was expected.
    #[error("{file}: {problem}")]
    Tokenizer { file: String, problem: String },

    /// A regular token has no row in the model's embedding.
    #[error(
        "{file}: the tokenizer does not fit the model: it holds ids up to {largest} (token {token:?}), the \
         model's vocabulary has {rows} rows; take the tokenizer.json that came with the weights"
    )]
    DoesNotFit { file: String, token: String, largest: u32, rows: usize },

    /// The text holds a token that the tokenizer knows and this model does not (an image token, mostly).
    #[error(
        "the text holds the token {token:?} (id {id}), which is outside this model's vocabulary of {rows} \
         rows; remove it from the text"
    )]
    OutsideModel { token: String, id: u32, rows: usize },

    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("the text is too long: {bytes} bytes, at most {limit} are accepted")]
    TooLong { bytes: usize, limit: usize },

    /// The tokenizer's own pipeline refused the text.
    #[error("{file}: this text cannot be tokenized: {problem}")]
    Encode { file: String, problem: String },

    /// The chat template cannot be read, compiled or run; `problem` has its line where known.
    #[error("{origin}: {problem}")]
    Template { origin: String, problem: String },

    /// The chat template itself refused the conversation (`raise_exception`), in its own words.
    #[error("the chat template refused the conversation: {0}")]
    Raised(String),

    /// There is nothing to render.
    #[error("messages is empty: a conversation needs at least one message")]
    NoMessages,

    /// A grammar cannot be compiled, or followed any further; names what in it.
    #[error("{0}")]
    Grammar(String),

    /// The stop strings cannot be used.
    #[error("stop: {0}")]
    Stop(String),
}
