//! The tower of a model that sees images: it turns the pixels of an image into embeddings of tokens.
//!
//! `spec` describes a tower as data, `processor` checks that images are made as it was trained, `request` says what memory
//! it takes, `load` fills that memory, and `tower` computes the embeddings on the device.

mod load;
mod processor;
mod request;
mod spec;
mod tower;

pub(in crate::model) use load::TowerLoad;
pub use request::TowerRequest;
pub use spec::{Encoder, ImageAttention, Transformer, VisionSpec, VisionTensor};
pub use tower::Tower;
