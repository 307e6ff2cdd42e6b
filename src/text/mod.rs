//! Conversion between text and tokens: tokenizer.json, the chat template, and incremental detokenization. Also
//! thoughts, stop strings, tool calls and grammars.
//!
//! | from | to | by |
//! |---|---|---|
//! | messages | messages that the template accepts | [`ChatTemplate::arrange`] |
//! | messages | one prompt text, which includes `<bos>` | [`ChatTemplate::prompt`] |
//! | that prompt | token ids; only control tokens that the template wrote are control tokens | [`Prompt::ids`] |
//! | that prompt with images | token ids, and the positions of the images in them | [`Prompt::ids_with_images`] |
//! | text | token ids | [`Tokenizer::encode`], [`Tokenizer::encode_text`] |
//! | one token id | the text it completes | [`Detokenizer::push`] |
//! | one token id of an answer | more of a thought, of the text, or of a tool call | [`AnswerReader::push`] |
//! | text as it arrives | text before the first stop string | [`StopMatcher::push`] |
//! | text as it arrives | tool calls in it, for models whose calls have no control tokens | [`CallReader::push`] |
//! | a schema, a regex, a grammar | which ids may come next | [`Constraint::mask`] |
//!
//! This module takes bytes and opens no files. It does not depend on the model, the API or the engine. For any content
//! of a checkpoint's files or a client's text, the functions return a result or a [`TextError`] and do not panic.

mod added;
mod answer;
mod calls;
mod chat;
mod content;
mod detokenizer;
mod error;
mod family;
mod gbnf;
mod grammar;
mod images;
mod jinja;
mod kwargs;
mod panics;
mod provenance;
mod refusal;
mod schema;
mod steps;
mod stop;
mod template;
mod thoughts;
mod tokenizer;
mod visible;

pub use answer::{AnswerReader, Spoken};
pub use calls::{
    AnswerPiece, CallFormat, CallPiece, CallReader, CallTokens, CallTool, call_schema, whole_parameters,
};
pub use chat::{CalledFunction, Message, ToolCall};
pub use content::{Content, Part};
pub use detokenizer::Detokenizer;
pub use error::{MAX_TEXT_BYTES, TextError};
pub use family::CallSyntax;
pub use grammar::{Constraint, Grammar, GrammarSource, Grammars, MAX_CHOICES, MAX_GRAMMAR_BYTES, mask_of};
pub use images::ImageTokens;
pub use kwargs::TemplateKwargs;
pub use panics::panic_message;
pub use provenance::Prompt;
pub use schema::SchemaPart;
pub use stop::{MAX_STOP_BYTES, MAX_STOPS, StopMatcher, Stopped};
pub use template::{ChatFiles, ChatTemplate, PromptEnding, TemplateInput};
pub use thoughts::{ThoughtStart, ThoughtTokens};
pub use tokenizer::Tokenizer;
pub use visible::{is_unseen, visible};
