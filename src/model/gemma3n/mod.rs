//! Gemma 3n: four residual streams, of which layers compute the first (AltUp); a learned residual in each layer (Laurel);
//! per-layer embeddings; layers that use the keys and values of others; layers whose gate is 0 for most elements; and a soft
//! cap of the logits. Scores have no scale, values are normed without weights, and norm weights are used as stored. The output
//! head is the embedding.

mod config;
mod gguf;
mod shapes;
mod tensors;

use serde_json::Value;

use super::config::ConfigError;
use super::spec::{Arch, ModelSpec, Shape};

pub(super) static ARCH: Arch = Arch {
    name: "Gemma 3n",
    model_types: &["gemma3n", "gemma3n_text"],
    read,
    gguf: &gguf::GGUF,
    measured: "gemma-3n-e2b,gemma-3n-e4b",
    hub_example: "google/gemma-3n-E4B-it",
    short_names: &[
        ("gemma3n:e2b", "unsloth/gemma-3n-E2B-it-GGUF:Q4_K_M"),
        ("gemma3n:e4b", "unsloth/gemma-3n-E4B-it-GGUF:Q4_K_M"),
    ],
    shapes: &SHAPES,
};

static SHAPES: [Shape; 2] = shapes::published(read);

/// Reads a `config.json`, which messages call `file_name`.
fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    config::read(&ARCH, config, file_name)
}
