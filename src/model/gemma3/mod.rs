//! Gemma 3: how its configs, tensors and GGUF files describe a model.
//!
//! A layer has a norm before and after attention, and before and after the feed-forward network; norms of queries and
//! keys; and a feed-forward network gated by GELU. Five of six layers see a window of positions. Norm weights are
//! stored as `w` and used as `1 + w`. The output head is the embedding.

mod config;
mod gguf;
mod mmproj;
mod shapes;
mod tensors;

pub use config::Config;
pub(super) use config::{FULL, Rope, SLIDING};
pub(super) use gguf::TOKENS;
pub(super) use tensors::NAMES;

use serde_json::Value;

use super::config::{ConfigError, LayerType};
use super::spec::{Arch, AttentionHeads, FeedForward, LayerSpec, ModelSpec, NormWeight, Shape};
use super::tensors::{ModelTensors, Sizes};
use crate::kernels::HiddenAct;

pub(super) static ARCH: Arch = Arch {
    name: "Gemma-3",
    model_types: &["gemma3", "gemma3_text"],
    read,
    gguf: &gguf::GGUF,
    measured: "gemma-3-4b,gemma-3-27b",
    hub_example: "google/gemma-3-4b-it",
    short_names: &[
        ("gemma3:1b", "google/gemma-3-1b-it-qat-q4_0-gguf"),
        ("gemma3:4b", "google/gemma-3-4b-it-qat-q4_0-gguf"),
        ("gemma3:12b", "google/gemma-3-12b-it-qat-q4_0-gguf"),
        ("gemma3:27b", "google/gemma-3-27b-it-qat-q4_0-gguf"),
    ],
    shapes: &SHAPES,
};

static SHAPES: [Shape; 5] = shapes::published(read);

/// Reads a `config.json`, which messages call `file_name`.
fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    Ok(Config::from_value(config, file_name)?.spec())
}

impl Config {
    /// The model with this config.
    pub fn spec(&self) -> ModelSpec {
        let heads = AttentionHeads {
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        };
        let layer = |kind: &LayerType| {
            let (window, rope) = match kind {
                LayerType::SlidingAttention => (Some(self.sliding_window), SLIDING),
                LayerType::FullAttention => (None, FULL),
            };
            LayerSpec {
                window,
                rope,
                heads,
                has_values_of_keys: false,
                kv_source: None,
                intermediate_size: self.intermediate_size,
                gate_cutoff: None,
                feed_forward: FeedForward::Dense,
            }
        };
        let layers: Vec<_> = self.layer_types.iter().map(layer).collect();
        let sizes = Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            tie_word_embeddings: self.tie_word_embeddings,
            experts: (0, 0),
            per_layer: None,
            laurel_rank: None,
        };
        let rope = Rope {
            theta: self.rope_theta,
            local_theta: self.rope_local_base_freq,
            factor: self.rope_scaling_factor,
        };
        ModelSpec {
            arch: &ARCH,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            per_layer: None,
            streams: None,
            unused_tensors: Vec::new(),
            mixture: None,
            vision: self.vision.clone(),
            score_scale: self.query_pre_attn_scalar.powf(-0.5),
            has_value_norm: false,
            hidden_act: HiddenAct::GeluTanh,
            norm_eps: self.rms_norm_eps,
            norm_weight: NormWeight::OnePlus,
            embed_scale: (self.hidden_size as f64).sqrt() as f32,
            final_logit_softcap: None,
            max_position_embeddings: self.max_position_embeddings,
            tensors: ModelTensors::of(&NAMES, &sizes, layers.iter().map(LayerSpec::sizes)),
            layers,
            ropes: rope.tables(),
            suppress_tokens: Vec::new(),
            eos_token_ids: self.eos_token_ids.clone(),
            bos_token_id: self.bos_token_id,
        }
    }
}
