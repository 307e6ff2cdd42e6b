//! Qwen 2 and Qwen 2.5: queries, keys and values have biases.

use serde_json::{Value, json};

use super::config::ConfigError;
use super::dense::{self, Defaults, Dense, NAMES, full_attention};
use super::spec::{Arch, ModelSpec, Shape};
use super::tensors::{Biases, Layer, Names};
use crate::checkpoint::gguf::{GgufArch, GgufTokens};

pub(super) static ARCH: Arch = Arch {
    name: "Qwen 2",
    model_types: &["qwen2"],
    read,
    gguf: &GGUF,
    measured: "qwen2.5-7b",
    hub_example: "Qwen/Qwen2.5-7B-Instruct",
    short_names: &[],
    shapes: &SHAPES,
};

static SHAPES: [Shape; 2] = [
    Shape::new("qwen2.5-0.5b", || size((896, 4864), 24, (14, 2), 151_936, true), read),
    Shape::new("qwen2.5-7b", || size((3584, 18_944), 28, (28, 4), 152_064, false), read),
];

static GGUF: GgufArch = GgufArch {
    name: "qwen2",
    config: |keys, tensors| dense::gguf_config("qwen2", &GGUF.tokens, keys, tensors),
    layer_tensor: |name, what| WITH_BIASES.of_gguf(name, what),
    interleaved: &[],
    towers: &[],
    tokens: TOKENS,
};

/// The special tokens of Qwen 2 and Qwen 3.
pub(super) const TOKENS: GgufTokens = GgufTokens {
    bos: None,
    eos: 151_645,
    pad: 151_643,
    own_model: None,
    add_space_prefix: false,
    end: &["<|im_end|>", "<|endoftext|>"],
    control: &[],
};

const WITH_BIASES: Layer<Names> = Layer {
    biases: Biases {
        q_proj: Some(Names::of("self_attn.q_proj", "attn_q")),
        k_proj: Some(Names::of("self_attn.k_proj", "attn_k")),
        v_proj: Some(Names::of("self_attn.v_proj", "attn_v")),
    },
    ..NAMES
};

/// transformers' `Qwen2Config`.
static DENSE: Dense = Dense {
    names: WITH_BIASES,
    defaults: Defaults {
        vocab_size: 151_936,
        hidden_size: 4096,
        intermediate_size: 22_016,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: Some(32),
        head_dim: None,
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

/// The `config.json` of a published size: hidden and intermediate size, layers, query and KV heads, vocabulary, and
/// whether the head is the embedding.
fn size(
    (hidden, ffn): (usize, usize),
    layers: usize,
    heads: (usize, usize),
    vocab: usize,
    tied: bool,
) -> String {
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 32_768,
        "model_type": "qwen2",
        "num_attention_heads": heads.0,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads.1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": false,
        "vocab_size": vocab,
    });
    config.to_string()
}
