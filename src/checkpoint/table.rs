//! The table of a checkpoint: its files, and the location of each tensor in them.
//!
//! Every format adds its files and tensors here. [`super::Checkpoint`] gives access to the tensors.

use std::collections::HashMap;
use std::ops::Range;

use super::error::CheckpointError;
use super::files::FileBytes;
use super::gguf::blocks::GgmlType;
use super::legacy::tensor::Layout as LegacyLayout;
use super::packed::matrix::Layout as PackedLayout;
use crate::tensor::{DType, Scheme};

/// The files of a checkpoint, and its tensors by name.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub files: Vec<CheckpointFile>,
    /// Tensors by file, then by position in it.
    pub tensors: Vec<Entry>,
    pub by_name: HashMap<String, usize>,
}

impl Table {
    /// Adds a tensor of the file that will be pushed next. Messages call the file `display`.
    pub fn add(&mut self, entry: Entry, display: &str) -> Result<(), CheckpointError> {
        if let Some(&other) = self.by_name.get(&entry.name) {
            let other = self.files.get(self.tensors[other].file).map_or(display, |f| &f.display);
            let problem = format!("is also in {other}; expected it in one file");
            return Err(CheckpointError::tensor(display, &entry.name, problem));
        }
        self.by_name.insert(entry.name.clone(), self.tensors.len());
        self.tensors.push(entry);
        Ok(())
    }

    /// Replaces all tensors. `twice` says what is wrong with a name that two of them have.
    pub fn replace(&mut self, tensors: Vec<Entry>, twice: &str) -> Result<(), CheckpointError> {
        self.tensors = tensors;
        self.by_name.clear();
        for (index, entry) in self.tensors.iter().enumerate() {
            if self.by_name.insert(entry.name.clone(), index).is_some() {
                return Err(CheckpointError::tensor(&self.files[entry.file].display, &entry.name, twice));
            }
        }
        Ok(())
    }
}

/// A tensor and the location of its parts.
#[derive(Debug)]
pub(super) struct Entry {
    pub name: String,
    pub shape: Vec<usize>,
    /// Index of the file that messages name.
    pub file: usize,
    pub stored: Stored,
    /// As [`Tensor::interleaved`](super::Tensor::interleaved).
    pub interleaved: Option<usize>,
}

/// The location of the bytes of an [`Encoding`](super::Encoding).
#[derive(Debug)]
pub(super) enum Stored {
    Plain {
        dtype: DType,
        data: Span,
    },
    Ggml {
        kind: GgmlType,
        data: Span,
    },
    Native {
        scheme: Scheme,
        blocks: Span,
        scales: Option<Span>,
    },
    Legacy {
        layout: LegacyLayout,
        q: Span,
        scales: Span,
    },
    Packed {
        layout: PackedLayout,
        weights: Span,
        scales: Span,
        zeros: Option<Span>,
    },
    /// A matrix of each expert.
    Stacked(Vec<Entry>),
}

impl Stored {
    pub fn spans(&self) -> Vec<&Span> {
        let all = match self {
            Stored::Plain { data, .. } | Stored::Ggml { data, .. } => [Some(data), None, None],
            Stored::Native { blocks, scales, .. } => [Some(blocks), scales.as_ref(), None],
            Stored::Legacy { q, scales, .. } => [Some(q), Some(scales), None],
            Stored::Packed { weights, scales, zeros, .. } => [Some(weights), Some(scales), zeros.as_ref()],
            Stored::Stacked(parts) => return parts.iter().flat_map(|part| part.stored.spans()).collect(),
        };
        all.into_iter().flatten().collect()
    }
}

/// A byte range of a file.
#[derive(Debug, Clone)]
pub(super) struct Span {
    /// Index in [`Table::files`].
    pub file: usize,
    pub range: Range<usize>,
}

#[derive(Debug)]
pub(super) struct CheckpointFile {
    /// The name of the file in messages.
    pub display: String,
    pub bytes: FileBytes,
}
