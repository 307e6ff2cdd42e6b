//! Gemma 4: scores without a scale, values normed without weights, layers that see all positions with larger heads
//! than the others and values that are their raw keys, a number that each layer's result is multiplied by, and a soft cap
//! of the logits. A mixture has experts in addition to the dense network of each layer. The sizes
//! for small machines have per-layer embeddings, and layers that use the keys and values of others. Norm weights are used as stored. The output head is the embedding.

mod config;
mod gguf;
mod mmproj;
mod shapes;
mod tensors;

use serde_json::Value;

use super::config::ConfigError;
use super::spec::{Arch, ModelSpec, Shape};

pub(super) static ARCH: Arch = Arch {
    name: "Gemma 4",
    model_types: &["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"],
    read,
    gguf: &gguf::GGUF,
    measured: "gemma-4-12b,gemma-4-31b",
    hub_example: "google/gemma-4-12b-it",
    short_names: &[
        ("gemma4:e2b", "bartowski/google_gemma-4-E2B-it-GGUF:Q4_K_M"),
        ("gemma4:e4b", "bartowski/google_gemma-4-E4B-it-GGUF:Q4_K_M"),
        ("gemma4:26b", "bartowski/google_gemma-4-26B-A4B-it-GGUF:Q4_K_M"),
    ],
    shapes: &SHAPES,
};

static SHAPES: [Shape; 5] = shapes::published(read);

/// Reads a `config.json`, which messages call `file_name`.
fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    config::read(&ARCH, config, file_name)
}
