//! The tensors of a Gemma-3.

use super::config::Config;
use crate::model::dense;
use crate::model::tensors::{Layer, ModelTensors, Names, Norms, Sizes, TensorSpec};

pub(super) const NAMES: Layer<Names> = Layer {
    norms: Norms {
        input_layernorm: Names::of("input_layernorm", "attn_norm"),
        post_attention_layernorm: Some(Names::of("post_attention_layernorm", "post_attention_norm")),
        pre_feedforward_layernorm: Names::of("pre_feedforward_layernorm", "ffn_norm"),
        post_feedforward_layernorm: Some(Names::of("post_feedforward_layernorm", "post_ffw_norm")),
        q_norm: Some(Names::of("self_attn.q_norm", "attn_q_norm")),
        k_norm: Some(Names::of("self_attn.k_norm", "attn_k_norm")),
    },
    ..dense::NAMES
};

/// The tensors of a model with that config.
pub(super) fn of(config: &Config) -> ModelTensors<TensorSpec> {
    let sizes = Sizes {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_hidden_layers,
        q_width: config.num_attention_heads * config.head_dim,
        kv_width: config.num_key_value_heads * config.head_dim,
        head_dim: config.head_dim,
        tie_word_embeddings: config.tie_word_embeddings,
    };
    ModelTensors::of(&NAMES, &sizes)
}
