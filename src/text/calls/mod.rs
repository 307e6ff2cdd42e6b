//! Tool calls in an answer: their syntax, how they are read, and the grammars that restrict them.
//!
//! | the model's syntax | a call is known by | file |
//! |---|---|---|
//! | JSON without control tokens | the text at the start of the answer | `json.rs`, by [`CallReader`] |
//! | JSON between control tokens | a token id | `json.rs` |
//! | keys without quotes, between control tokens | a token id | `bare.rs` |
//! | tags for each argument, between control tokens | a token id | `tagged.rs` |
//! | a name, a control token and JSON, after a control token | a token id | `body.rs` |
//!
//! Whatever the syntax is, the name of a tool comes first, and then its arguments as JSON, in pieces.

mod bare;
mod body;
mod format;
mod json;
mod lark;
mod pieces;
mod tagged;
mod values;

pub use format::{CallFormat, CallTokens};
pub use json::{CallReader, whole_parameters};
pub use pieces::{AnswerPiece, CallPiece};

pub(in crate::text) use body::CallsReader;
pub use lark::{CallTool, call_schema};
pub(in crate::text) use lark::{form, lark};
