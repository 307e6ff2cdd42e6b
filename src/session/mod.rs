//! One generation between a client and the engine: a conversation or a text becomes a prompt (template, tools, grammar), and
//! the engine's events become text, calls of tools and log probabilities.
//!
//! The terminal commands and every wire format go through here, so that all answer alike. It knows no wire format: what is
//! wrong with a request is a [`SessionError`], which whoever reads the request says in its own words.

mod answer;
mod conversation;
mod error;
mod grammar;
mod request;
mod service;
mod tools;

pub use answer::{AnswerText, Delta, End, Reason};
pub use conversation::{Call, Conversation};
pub use error::SessionError;
pub use grammar::ResponseGrammar;
pub use request::{GenerateRequest, PromptEnding};
pub use service::{Service, random_u64};
pub use tools::{MAX_TOOLS, Tool, ToolChoice, Tools};
