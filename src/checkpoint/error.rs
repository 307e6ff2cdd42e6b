//! What is wrong with the files of a model, and how text from such a file is quoted.

use std::fmt;

/// A file of a model is not what it should be. One line, for the person who gave the model.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{file}: {problem}")]
    File { file: String, problem: String },
    #[error("{file}: tensor {tensor}: {problem}")]
    Tensor { file: String, tensor: String, problem: String },
}

impl CheckpointError {
    pub(super) fn file(file: impl fmt::Display, problem: impl Into<String>) -> Self {
        Self::File { file: short(&file.to_string()), problem: problem.into() }
    }

    pub(super) fn tensor(file: impl fmt::Display, tensor: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { file: short(&file.to_string()), tensor: short(tensor), problem: problem.into() }
    }
}

/// Text from a file as a message may hold it: on one line, and of bounded length.
pub(crate) fn short(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    let mut out = String::new();
    for c in text.chars().take(MAX_CHARS) {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    if text.chars().nth(MAX_CHARS).is_some() {
        out.push('…');
    }
    out
}

/// serde_json quotes what it met; a message has one line all the same.
pub(super) fn one_line(error: &impl fmt::Display) -> String {
    short(&error.to_string())
}
