//! Qwen 3, dense: queries and keys have norms, and heads are wider than their part of the hidden size.

use serde_json::{Value, json};

use super::config::ConfigError;
use super::dense::{self, Defaults, Dense, NAMES, full_attention};
use super::qwen2;
use super::spec::{Arch, ModelSpec, Shape};
use super::tensors::{Layer, Names, Norms};
use crate::checkpoint::gguf::GgufArch;

pub(super) static ARCH: Arch = Arch {
    name: "Qwen 3",
    model_types: &["qwen3"],
    read,
    gguf: &GGUF,
    measured: "qwen3-4b,qwen3-8b",
    hub_example: "Qwen/Qwen3-8B",
    short_names: &[("qwen3:4b", "Qwen/Qwen3-4B-GGUF:Q4_K_M"), ("qwen3:8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M")],
    shapes: &SHAPES,
};

static SHAPES: [Shape; 3] = [
    Shape::new("qwen3-0.6b", || size((1024, 3072), 28, (16, 8), true), read),
    Shape::new("qwen3-4b", || size((2560, 9728), 36, (32, 8), true), read),
    Shape::new("qwen3-8b", || size((4096, 12_288), 36, (32, 8), false), read),
];

static GGUF: GgufArch = GgufArch {
    name: "qwen3",
    config: |keys, tensors| dense::gguf_config("qwen3", &GGUF.tokens, keys, tensors),
    layer_tensor: |name, what| WITH_QK_NORMS.of_gguf(name, what),
    interleaved: &[],
    towers: &[],
    tokens: qwen2::TOKENS,
};

pub(super) const WITH_QK_NORMS: Layer<Names> = Layer {
    norms: Norms {
        q_norm: Some(Names::of("self_attn.q_norm", "attn_q_norm")),
        k_norm: Some(Names::of("self_attn.k_norm", "attn_k_norm")),
        ..NAMES.norms
    },
    ..NAMES
};

/// transformers' `Qwen3Config`.
static DENSE: Dense = Dense {
    names: WITH_QK_NORMS,
    defaults: Defaults {
        vocab_size: 151_936,
        hidden_size: 4096,
        intermediate_size: 22_016,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: Some(32),
        head_dim: Some(128),
        max_position_embeddings: 32_768,
        bos_token_id: None,
        eos_token_id: None,
    },
    window: full_attention,
    mixture: None,
};

fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    dense::read(&ARCH, &DENSE, config, file_name)
}

/// The `config.json` of a published size: hidden and intermediate size, layers, query and KV heads, and whether the head
/// is the embedding.
fn size((hidden, ffn): (usize, usize), layers: usize, heads: (usize, usize), tied: bool) -> String {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 40_960,
        "model_type": "qwen3",
        "num_attention_heads": heads.0,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads.1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": false,
        "vocab_size": 151_936,
    });
    config.to_string()
}
