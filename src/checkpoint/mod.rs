//! Checkpoints on disk: finds the files of a model, maps them into memory, and checks their tensors.
//!
//! Reads safetensors in one file or in shards with an index, GGUF, native checkpoints and layer files of the original
//! project. Every header is checked first: every [`Tensor`] is within its file, and its length matches its shape.
//! Opening a checkpoint converts and copies nothing. The bytes of a tensor are paged in when they are read.
//!
//! This module knows no model. Tensor names are strings, and [`crate::model`] knows their meaning. Only the names of
//! GGUF are translated, to the Hugging Face names that the rest of the program uses.

mod direct;
mod error;
mod experts;
mod files;
mod floats;
mod format;
pub mod gguf;
mod held;
mod layer_values;
mod legacy;
mod native;
mod open;
mod packed;
mod safetensors;
mod stream_projections;
mod table;
mod view;

pub use error::CheckpointError;
pub(crate) use error::short;
pub(crate) use files::parse_config;
pub use files::{FileSlice, HeldNames, MAX_READ_BYTES, ModelFiles};
pub use format::Format;
pub use gguf::{GgmlTensor, GgmlType};
pub use layer_values::{Deviation, Expected, LayerValues};
pub use legacy::LegacyTensor;
pub use native::{FileWriter, Form, Manifest, NativeTensor, NativeWriter, NewTensor, Synthetic, verify};
pub use open::Checkpoint;
pub use packed::{PACKING_FIELDS, PackedMatrix};
pub use view::{Encoding, Stack, Tensor};
