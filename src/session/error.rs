//! Errors while a request is prepared or answered.

use crate::engine::EngineError;
use crate::text::TextError;

/// Each wire format translates these errors to its own texts, and adds the name of the field with the prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// An option or a part of a message that has an invalid value, or an option that is not supported. `param` is the option's name, which is the same
    /// in every wire format.
    #[error("{param}: {problem}")]
    Invalid { param: String, problem: String },
    /// A field that asks for what this model cannot do.
    #[error("{param}: {problem}")]
    Unsupported { param: String, problem: String },
    /// The prompt is longer than the context. `tokens` are those of the prompt and of the context, if they are known.
    #[error("{problem}")]
    Context { problem: String, tokens: Option<(usize, usize)> },
    /// A text of the prompt cannot be tokenized.
    #[error("{0}")]
    Text(String),
    /// The system has too little memory or too few threads for the request, or other requests take too long.
    #[error("{0}")]
    Shortage(String),
    /// While the answer was generated, no token was left that its grammar allows.
    #[error("the answer could not follow its grammar: {0}")]
    Grammar(String),
    /// The engine could not answer.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl SessionError {
    pub(super) fn invalid(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), problem: problem.into() }
    }

    pub(super) fn text(error: TextError) -> Self {
        match error {
            error @ (TextError::NoThread { .. } | TextError::OthersCompile) => {
                Self::Shortage(error.to_string())
            }
            error => Self::Text(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_requests_cause_is_no_fault_of_the_request() {
        assert!(matches!(SessionError::text(TextError::OthersCompile), SessionError::Shortage(_)));
        assert!(matches!(SessionError::text(TextError::NoMessages), SessionError::Text(_)));
    }
}
