//! Published sizes, by the `config.json` of their models.

use serde_json::{Value, json};

use crate::model::config::ConfigError;
use crate::model::spec::{ModelSpec, Shape};

pub(super) const COUNT: usize = 5;

pub(super) const fn published(read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>) -> [Shape; COUNT] {
    [
        Shape::new("smollm2-135m", || smollm2_135m().to_string(), read),
        Shape::new("llama-3.2-1b", || llama3(2048, 8192, 16, (32, 64), 32.0, true).to_string(), read),
        Shape::new("llama-3.2-3b", || llama3(3072, 8192, 28, (24, 128), 32.0, true).to_string(), read),
        Shape::new("mistral-7b-v0.3", || mistral_7b().to_string(), read),
        Shape::new("llama-3.1-8b", || llama3(4096, 14_336, 32, (32, 128), 8.0, false).to_string(), read),
    ]
}

fn smollm2_135m() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "tie_word_embeddings": true,
        "vocab_size": 49_152,
    })
}

/// A size of Llama 3.1 or 3.2. Of `heads`, the first is the number of query heads, the second the dimension of a head.
fn llama3(hidden: usize, ffn: usize, layers: usize, heads: (usize, usize), factor: f64, tied: bool) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
        "head_dim": heads.1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 131_072,
        "model_type": "llama",
        "num_attention_heads": heads.0,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": tied,
        "vocab_size": 128_256,
    })
}

fn mistral_7b() -> Value {
    json!({
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 32_768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "vocab_size": 32_768,
    })
}
