//! Text on its way in and out: tokenizer.json, the chat template, and incremental detokenization.
//!
//! | from | to | by |
//! |---|---|---|
//! | messages | messages every Gemma template accepts | [`normalize`] |
//! | messages | one prompt text, which already holds `<bos>` | [`ChatTemplate::prompt`] |
//! | that prompt | token ids, in which only the template's control tokens are control tokens | [`Prompt::ids`] |
//! | text | token ids | [`Tokenizer::encode`], [`Tokenizer::encode_text`] |
//! | one token id | the text it completes | [`Detokenizer::push`] |
//! | text as it arrives | text before the first stop string | [`StopMatcher::push`] |
//! | text as it arrives | calls of tools in it | [`CallReader::push`] |
//! | a schema, a regex, a grammar | which ids may come next | [`Constraint::mask`] |
//!
//! This module gets bytes and opens no file. It knows no model, request or engine. Whatever a checkpoint's files or a
//! client's text contain, the outcome is a result or a [`TextError`], never a panic.

mod added;
mod calls;
mod chat;
mod detokenizer;
mod error;
mod gbnf;
mod grammar;
mod jinja;
mod panics;
mod provenance;
mod refusal;
mod schema;
mod steps;
mod stop;
mod template;
mod tokenizer;
mod visible;

pub use calls::{AnswerPiece, CallPiece, CallReader, whole_parameters};
pub use chat::{Content, ContentPart, Message, normalize};
pub use detokenizer::Detokenizer;
pub use error::{MAX_TEXT_BYTES, TextError};
pub use grammar::{Constraint, Grammar, GrammarSource, Grammars, MAX_CHOICES, MAX_GRAMMAR_BYTES};
pub use panics::panic_message;
pub use provenance::Prompt;
pub use schema::SchemaPart;
pub use stop::{MAX_STOP_BYTES, MAX_STOPS, StopMatcher, Stopped};
pub use template::{ChatFiles, ChatTemplate, PromptEnding};
pub use tokenizer::Tokenizer;
pub use visible::{is_unseen, visible};
