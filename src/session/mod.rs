//! One generation between a client and the engine. A conversation or a text becomes a prompt (template, tools,
//! grammar); the engine's events become text, tool calls and log probabilities.
//!
//! The terminal commands and every wire format generate through this module, so their answers are alike. The module
//! knows no wire format: what is wrong with a request is a [`SessionError`], which each caller words for its own
//! format.

mod answer;
mod conversation;
mod error;
mod grammar;
mod mask;
mod request;
mod service;
mod tools;

pub use answer::{AnswerText, Delta, End, Reason};
pub use conversation::{Call, Conversation};
pub use error::SessionError;
pub use grammar::ResponseGrammar;
pub use request::{GenerateRequest, Truncation};
pub use service::{Service, random_u64, truncate};
pub use tools::{MAX_TOOLS, Tool, ToolChoice, Tools};
