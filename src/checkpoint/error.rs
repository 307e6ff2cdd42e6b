//! Errors about the files of a model, and the quoting of text from these files.

use std::fmt;

/// A file of a model is invalid. The message is one line.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{file}: {problem}")]
    File { file: String, problem: String },
    #[error("{file}: tensor {tensor}: {problem}")]
    Tensor { file: String, tensor: String, problem: String },
    /// The file may be valid; this process has no room in memory or in its address space to map it.
    #[error("{file}: there is no memory to map its {bytes} bytes: {error}")]
    NoMemory { file: String, bytes: u64, error: std::io::Error },
}

impl CheckpointError {
    pub(super) fn file(file: impl fmt::Display, problem: impl Into<String>) -> Self {
        Self::File { file: short(&file.to_string()), problem: problem.into() }
    }

    pub(super) fn no_memory(file: impl fmt::Display, bytes: u64, error: std::io::Error) -> Self {
        Self::NoMemory { file: short(&file.to_string()), bytes, error }
    }

    pub(super) fn tensor(file: impl fmt::Display, tensor: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { file: short(&file.to_string()), tensor: short(tensor), problem: problem.into() }
    }
}

/// Text from a file, escaped for a message: one line, of at most 200 characters of the text.
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

/// A serde_json error in one line. Its text must be escaped, because serde_json quotes parts of its input.
pub(super) fn one_line(error: &impl fmt::Display) -> String {
    short(&error.to_string())
}
