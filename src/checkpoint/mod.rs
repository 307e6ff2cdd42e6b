//! Checkpoints on disk: which files a model consists of, and its tensors, mapped and checked.
//!
//! Reads safetensors in one file or in shards with an index, and GGUF. Every header is checked before a byte of a
//! tensor is lent out: every [`Tensor`] is in bounds, and as long as its shape. Nothing is converted or copied on
//! opening; a tensor's bytes are paged in when they are read.
//!
//! Refuses to know a model: names are strings here, and [`crate::model`] knows their meaning. Only GGUF's names are
//! translated, into Hugging Face's, which the rest of the program uses.

mod direct;
mod error;
mod files;
mod floats;
mod format;
mod gguf;
mod held;
mod layer_values;
mod legacy;
mod native;
mod open;
mod packed;
mod safetensors;
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
pub use native::{FileWriter, Manifest, NativeTensor, NativeWriter, NewTensor, Synthetic, verify};
pub use open::Checkpoint;
pub use packed::PackedMatrix;
pub use view::{Encoding, Tensor};
