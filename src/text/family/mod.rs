//! The conversations of a family of models, as data: control tokens, and a chat template for checkpoints without one.

mod gemma;
mod syntax;

pub use syntax::Family;

/// The family of all models that can be loaded.
pub static FAMILY: &Family = &gemma::GEMMA;
