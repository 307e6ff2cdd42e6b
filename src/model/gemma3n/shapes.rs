//! The published sizes of Gemma 3n.

use serde_json::{Value, json};

use crate::model::config::{ConfigError, LayerType};
use crate::model::spec::{ModelSpec, Shape};

/// What distinguishes one size from the other.
struct Size {
    name: &'static str,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_kv_shared_layers: usize,
}

static SIZES: [Size; 2] = [
    Size { name: "gemma-3n-e2b", intermediate_size: 8192, num_hidden_layers: 30, num_kv_shared_layers: 10 },
    Size { name: "gemma-3n-e4b", intermediate_size: 16_384, num_hidden_layers: 35, num_kv_shared_layers: 15 },
];

/// The shapes of both sizes. `read` reads their configs.
pub(super) const fn published(read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>) -> [Shape; 2] {
    [
        Shape::new(SIZES[0].name, || SIZES[0].config_json(), read),
        Shape::new(SIZES[1].name, || SIZES[1].config_json(), read),
    ]
}

impl Size {
    /// The text of a `config.json` in the text-only layout.
    fn config_json(&self) -> String {
        let each = 1..=self.num_hidden_layers;
        let kind = |layer: usize| LayerType::of(!layer.is_multiple_of(5)).name();
        let sparsity = |layer: usize| if layer <= 10 { 0.95 } else { 0.0 };
        let config = json!({
            "activation_sparsity_pattern": each.clone().map(sparsity).collect::<Vec<_>>(),
            "altup_active_idx": 0,
            "altup_correct_scale": true,
            "altup_num_inputs": 4,
            "attention_bias": false,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2048,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": vec![self.intermediate_size; self.num_hidden_layers],
            "laurel_rank": 64,
            "layer_types": each.map(kind).collect::<Vec<_>>(),
            "max_position_embeddings": 32_768,
            "model_type": "gemma3n_text",
            "num_attention_heads": 8,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": self.num_kv_shared_layers,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window": 512,
            "torch_dtype": "bfloat16",
            "vocab_size": 262_400,
            "vocab_size_per_layer_input": 262_144,
        });
        format!("{config:#}\n")
    }
}
