//! Why nothing can be generated for a request, or no more than was.

/// The wire formats say each in their own words, and with the name of the field that the prompt has there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// An option that cannot be had. `param` is its name, which every wire format shares.
    #[error("{param}: {problem}")]
    Invalid { param: String, problem: String },
    /// The prompt is longer than the context.
    #[error("{0}")]
    Context(String),
    /// No tokens can be made of a text of the prompt.
    #[error("{0}")]
    Text(String),
    /// Found while the answer was written.
    #[error("the answer could not be held to its grammar: {0}")]
    Grammar(String),
}

impl SessionError {
    pub(super) fn invalid(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), problem: problem.into() }
    }

    pub(super) fn text(problem: impl ToString) -> Self {
        Self::Text(problem.to_string())
    }
}
