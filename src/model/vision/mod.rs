//! The tower of a model that sees images: it turns the pixels of an image into embeddings of tokens.
//!
//! `spec` describes a tower as data, and `tower` computes it on the device.

mod spec;
mod tower;

pub use spec::{Affine, VisionLayer, VisionSpec, VisionTensor, VisionTensors};
pub(in crate::model) use tower::TowerLoad;
pub use tower::{Tower, TowerRequest};
