//! Errors of preparing a request, and of answering it.

use crate::text::TextError;

/// Each wire format words these errors itself, and names the field that holds the prompt there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// An option with an invalid value, or one that this server does not support. `param` is the option's name, which
    /// is the same in every wire format.
    #[error("{param}: {problem}")]
    Invalid { param: String, problem: String },
    /// The prompt is longer than the context.
    #[error("{0}")]
    Context(String),
    /// A text of the prompt cannot be tokenized.
    #[error("{0}")]
    Text(String),
    /// The system gave the server too little for it.
    #[error("{0}")]
    Shortage(String),
    /// The answer left its grammar while it was written.
    #[error("the answer could not be held to its grammar: {0}")]
    Grammar(String),
}

impl SessionError {
    pub(super) fn invalid(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), problem: problem.into() }
    }

    pub(super) fn text(error: TextError) -> Self {
        match error {
            error @ TextError::NoThread { .. } => Self::Shortage(error.to_string()),
            error => Self::Text(error.to_string()),
        }
    }
}
