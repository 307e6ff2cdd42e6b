//! The layer between the clients' requests and the engine. It turns a conversation or a text into a prompt (template,
//! tools, images, grammar), and the engine's events into text, tool calls and log probabilities.
//!
//! The terminal commands and all wire formats use this module, so they give the same answers. The module knows no wire
//! format: each caller translates a [`SessionError`] to its own format.

mod answer;
mod conversation;
mod error;
mod grammar;
mod images;
mod mask;
mod request;
mod service;
mod tools;

pub use answer::{AnswerText, Delta, Reason};
pub use conversation::{Call, Conversation};
pub use error::SessionError;
pub use grammar::ResponseGrammar;
pub use images::{AskedImageTokens, Detail, Image};
pub use request::{GenerateRequest, Thinking, Truncation};
pub use service::{Prepared, Service, random_u64, truncate};
pub use tools::{MAX_TOOLS, Tool, ToolChoice, Tools};
