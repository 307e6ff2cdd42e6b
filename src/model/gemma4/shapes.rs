//! The published sizes of Gemma 4.

use serde_json::{Value, json};

use crate::model::config::{ConfigError, LayerType};
use crate::model::spec::{ModelSpec, Shape};

/// What distinguishes one size from the others.
struct Size {
    name: &'static str,
    model_type: &'static str,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    num_global_key_value_heads: usize,
    /// The number of experts, the number that a token uses, and their width.
    experts: Option<[usize; 3]>,
    /// What the sizes for small machines have.
    small: Option<Small>,
}

/// Per-layer embeddings, and layers without keys and values of their own.
struct Small {
    hidden_size_per_layer_input: usize,
    num_kv_shared_layers: usize,
    use_double_wide_mlp: bool,
    /// Of so many layers, the last one sees all positions.
    period: usize,
}

static SIZES: [Size; 5] = [
    Size {
        name: "gemma-4-e2b",
        model_type: "gemma4_text",
        hidden_size: 1536,
        intermediate_size: 6144,
        num_hidden_layers: 35,
        num_attention_heads: 8,
        num_key_value_heads: 1,
        num_global_key_value_heads: 1,
        experts: None,
        small: Some(Small {
            hidden_size_per_layer_input: 256,
            num_kv_shared_layers: 20,
            use_double_wide_mlp: true,
            period: 5,
        }),
    },
    Size {
        name: "gemma-4-e4b",
        model_type: "gemma4_text",
        hidden_size: 2560,
        intermediate_size: 10_240,
        num_hidden_layers: 42,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        num_global_key_value_heads: 2,
        experts: None,
        small: Some(Small {
            hidden_size_per_layer_input: 256,
            num_kv_shared_layers: 18,
            use_double_wide_mlp: false,
            period: 6,
        }),
    },
    Size {
        name: "gemma-4-12b",
        model_type: "gemma4_unified_text",
        hidden_size: 3840,
        intermediate_size: 15_360,
        num_hidden_layers: 48,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        num_global_key_value_heads: 1,
        experts: None,
        small: None,
    },
    Size {
        name: "gemma-4-26b-a4b",
        model_type: "gemma4_text",
        hidden_size: 2816,
        intermediate_size: 2112,
        num_hidden_layers: 30,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        num_global_key_value_heads: 2,
        experts: Some([128, 8, 704]),
        small: None,
    },
    Size {
        name: "gemma-4-31b",
        model_type: "gemma4_text",
        hidden_size: 5376,
        intermediate_size: 21_504,
        num_hidden_layers: 60,
        num_attention_heads: 32,
        num_key_value_heads: 16,
        num_global_key_value_heads: 4,
        experts: None,
        small: None,
    },
];

/// The shapes of all sizes. `read` reads their configs.
pub(super) const fn published(read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>) -> [Shape; 5] {
    [
        Shape::new(SIZES[0].name, || SIZES[0].config_json(), read),
        Shape::new(SIZES[1].name, || SIZES[1].config_json(), read),
        Shape::new(SIZES[2].name, || SIZES[2].config_json(), read).with_tower(linear_map),
        Shape::new(SIZES[3].name, || SIZES[3].config_json(), read).with_tower(transformer),
        Shape::new(SIZES[4].name, || SIZES[4].config_json(), read).with_tower(transformer),
    ]
}

/// The fields of `config.json` about what the 12B has in place of a tower.
fn linear_map() -> Value {
    json!({
        "use_bidirectional_attention": "vision",
        "vision_config": {
            "mm_embed_dim": 3840,
            "mm_posemb_size": 1120,
            "model_type": "gemma4_unified_vision",
            "patch_size": 16,
            "pooling_kernel_size": 3,
        },
    })
}

/// The fields of `config.json` about the vision tower of the larger sizes.
fn transformer() -> Value {
    json!({
        "use_bidirectional_attention": "vision",
        "vision_config": {
            "head_dim": 72,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "model_type": "gemma4_vision",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10_240,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
            "standardize": true,
            "use_clipped_linears": false,
        },
    })
}

impl Size {
    /// The text of a `config.json` in the text-only layout. Every sixth layer sees all positions in the larger sizes.
    fn config_json(&self) -> String {
        let mut config = json!({
            "attention_bias": false,
            "attention_k_eq_v": true,
            "bos_token_id": 2,
            "eos_token_id": [1, 106, 50],
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": 262_144,
            "model_type": self.model_type,
            "num_attention_heads": self.num_attention_heads,
            "num_global_key_value_heads": self.num_global_key_value_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"
                },
                "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"}
            },
            "sliding_window": 1024,
            "torch_dtype": "bfloat16",
            "vocab_size": 262_144,
        });
        if let Some([count, per_token, width]) = self.experts {
            config["enable_moe_block"] = json!(true);
            config["num_experts"] = json!(count);
            config["top_k_experts"] = json!(per_token);
            config["moe_intermediate_size"] = json!(width);
        }
        if let Some(small) = &self.small {
            let kind = |layer: usize| LayerType::of(!layer.is_multiple_of(small.period)).name();
            config["attention_k_eq_v"] = json!(false);
            config["hidden_size_per_layer_input"] = json!(small.hidden_size_per_layer_input);
            config["layer_types"] = (1..=self.num_hidden_layers).map(kind).collect();
            config["max_position_embeddings"] = json!(131_072);
            config["num_kv_shared_layers"] = json!(small.num_kv_shared_layers);
            config["sliding_window"] = json!(512);
            config["use_double_wide_mlp"] = json!(small.use_double_wide_mlp);
            config["vocab_size_per_layer_input"] = json!(262_144);
        }
        format!("{config:#}\n")
    }
}
