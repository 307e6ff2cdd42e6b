//! Gemma 3: how its configs, tensors and GGUF files describe a model.
//!
//! A layer has a norm before and after attention, and before and after the feed-forward network; norms of queries and
//! keys; and a feed-forward network gated by GELU. Five of six layers see a window of positions. Norm weights are stored
//! as `w` and used as `1 + w`. The output head is the embedding.

mod config;
mod gguf;
mod shapes;
mod tensors;

pub use config::{Config, LayerType};

use serde_json::Value;

use super::config::ConfigError;
use super::spec::{Arch, ModelSpec};

pub(super) static ARCH: Arch = Arch {
    name: "Gemma-3",
    model_types: &["gemma3", "gemma3_text"],
    read,
    gguf: &gguf::GGUF,
    shapes: &shapes::SHAPES,
};

/// Reads a `config.json`, which messages call `file_name`.
fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    Ok(Config::from_value(config, file_name)?.spec())
}
