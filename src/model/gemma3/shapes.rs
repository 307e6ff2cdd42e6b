//! The published sizes of Gemma-3, for plans and synthetic checkpoints, which need real shapes and no weights.
//!
//! The numbers are those of the `config.json` of `google/gemma-3-*-it`; the tests compare the sum of parameters with the
//! published counts.

use serde_json::{Value, json};

use crate::model::config::ConfigError;
use crate::model::spec::{ModelSpec, Shape};

/// A published size. The fields have their Hugging Face names.
struct Size {
    /// The model's name, e.g. `gemma-3-27b`.
    name: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    query_pre_attn_scalar: usize,
    sliding_window: usize,
    max_position_embeddings: usize,
    /// Factor by which the positions of full-attention layers are divided; 1 without scaling.
    rope_factor: usize,
}

/// All published sizes, from the smallest to the largest.
const SIZES: [Size; 5] = [
    Size {
        name: "gemma-3-270m",
        vocab_size: 262_144,
        hidden_size: 640,
        intermediate_size: 2048,
        num_hidden_layers: 18,
        num_attention_heads: 4,
        num_key_value_heads: 1,
        head_dim: 256,
        query_pre_attn_scalar: 256,
        sliding_window: 512,
        max_position_embeddings: 32_768,
        rope_factor: 1,
    },
    Size {
        name: "gemma-3-1b",
        vocab_size: 262_144,
        hidden_size: 1152,
        intermediate_size: 6912,
        num_hidden_layers: 26,
        num_attention_heads: 4,
        num_key_value_heads: 1,
        head_dim: 256,
        query_pre_attn_scalar: 256,
        sliding_window: 512,
        max_position_embeddings: 32_768,
        rope_factor: 1,
    },
    Size {
        name: "gemma-3-4b",
        vocab_size: 262_208,
        hidden_size: 2560,
        intermediate_size: 10_240,
        num_hidden_layers: 34,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        head_dim: 256,
        query_pre_attn_scalar: 256,
        sliding_window: 1024,
        max_position_embeddings: 131_072,
        rope_factor: 8,
    },
    Size {
        name: "gemma-3-12b",
        vocab_size: 262_208,
        hidden_size: 3840,
        intermediate_size: 15_360,
        num_hidden_layers: 48,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        head_dim: 256,
        query_pre_attn_scalar: 256,
        sliding_window: 1024,
        max_position_embeddings: 131_072,
        rope_factor: 8,
    },
    Size {
        name: "gemma-3-27b",
        vocab_size: 262_208,
        hidden_size: 5376,
        intermediate_size: 21_504,
        num_hidden_layers: 62,
        num_attention_heads: 32,
        num_key_value_heads: 16,
        head_dim: 128,
        query_pre_attn_scalar: 168,
        sliding_window: 1024,
        max_position_embeddings: 131_072,
        rope_factor: 8,
    },
];

/// The shapes of all sizes. `read` reads their configs.
pub(super) const fn published(read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>) -> [Shape; 5] {
    [
        Shape::new(SIZES[0].name, || SIZES[0].config_json(), read),
        Shape::new(SIZES[1].name, || SIZES[1].config_json(), read),
        Shape::new(SIZES[2].name, || SIZES[2].config_json(), read).with_tower(tower),
        Shape::new(SIZES[3].name, || SIZES[3].config_json(), read).with_tower(tower),
        Shape::new(SIZES[4].name, || SIZES[4].config_json(), read).with_tower(tower),
    ]
}

/// The fields of `config.json` about the vision tower, which all sizes with one share.
fn tower() -> Value {
    json!({
        "mm_tokens_per_image": 256,
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": false,
        },
    })
}

impl Size {
    /// The text of a `config.json` in the text-only layout.
    fn config_json(&self) -> String {
        let scaling = (self.rope_factor != 1)
            .then(|| json!({"factor": self.rope_factor as f64, "rope_type": "linear"}));
        let config = json!({
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": false,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "gemma3_text",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": 0,
            "query_pre_attn_scalar": self.query_pre_attn_scalar,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": scaling,
            "rope_theta": 1_000_000.0,
            "sliding_window": self.sliding_window,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
        });
        format!("{config:#}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gemma3::SHAPES;
    use crate::model::rope::RopeScaling;

    /// Weights of the language model, norms included.
    fn parameters(c: &ModelSpec) -> u64 {
        let heads = c.heads();
        let attention = 2 * (heads.q_width() + heads.kv_width()) * c.hidden_size;
        let norms = 4 * c.hidden_size + 2 * heads.head_dim;
        let layer = attention + 3 * c.hidden_size * c.intermediate_size + norms;
        (c.vocab_size * c.hidden_size + c.layers.len() * layer + c.hidden_size) as u64
    }

    /// Weights of the vision tower and of its projector.
    fn parameters_of_tower(shape: &Shape) -> u64 {
        let tensors = shape.tower().map_or_else(Vec::new, |tower| tower.tensors());
        tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum()
    }

    /// The parameters that the hub counts in each checkpoint.
    #[test]
    fn the_shapes_add_up_to_the_published_parameter_counts() {
        for (name, published) in [
            ("gemma-3-270m", 268_098_176),
            ("gemma-3-1b", 999_885_952),
            ("gemma-3-4b", 4_300_079_472),
            ("gemma-3-12b", 12_187_325_040),
            ("gemma-3-27b", 27_432_406_640),
        ] {
            let shape = SHAPES.iter().find(|shape| shape.name == name).unwrap();
            assert_eq!(parameters(&shape.spec()) + parameters_of_tower(shape), published, "{name}");
        }
    }

    #[test]
    fn every_shape_is_a_config_that_can_be_computed() {
        for (shape, size) in SHAPES.iter().zip(&SIZES) {
            let spec = shape.spec();
            assert_eq!(spec.layers.len(), size.num_hidden_layers);
            let expected = match size.rope_factor {
                1 => RopeScaling::Unscaled,
                factor => RopeScaling::Linear { factor: factor as f64 },
            };
            assert_eq!(spec.ropes[1].scaling, expected, "{}", shape.name);
            assert_eq!(spec.eos_token_ids, [1, 106]);
        }
    }
}
