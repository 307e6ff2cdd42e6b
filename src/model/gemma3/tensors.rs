//! The tensors of a Gemma-3.

use super::config::Config;
use crate::gpu::placement::Class;
use crate::model::tensors::{InputGroup, Layer, ModelTensors, Norms, Projections, Role, TensorSpec};

/// The names of the tensors of a layer in both kinds of checkpoints.
pub(super) struct Names {
    pub hugging_face: &'static str,
    pub gguf: &'static str,
}

pub(super) const NAMES: Layer<Names> = {
    const fn of(hugging_face: &'static str, gguf: &'static str) -> Names {
        Names { hugging_face, gguf }
    }
    Layer {
        projections: Projections {
            q_proj: of("self_attn.q_proj", "attn_q"),
            k_proj: of("self_attn.k_proj", "attn_k"),
            v_proj: of("self_attn.v_proj", "attn_v"),
            o_proj: of("self_attn.o_proj", "attn_output"),
            gate_proj: of("mlp.gate_proj", "ffn_gate"),
            up_proj: of("mlp.up_proj", "ffn_up"),
            down_proj: of("mlp.down_proj", "ffn_down"),
        },
        norms: Norms {
            input_layernorm: of("input_layernorm", "attn_norm"),
            post_attention_layernorm: of("post_attention_layernorm", "post_attention_norm"),
            pre_feedforward_layernorm: of("pre_feedforward_layernorm", "ffn_norm"),
            post_feedforward_layernorm: of("post_feedforward_layernorm", "post_ffw_norm"),
            q_norm: of("self_attn.q_norm", "attn_q_norm"),
            k_norm: of("self_attn.k_norm", "attn_k_norm"),
        },
    }
};

/// The tensors of a model with that config.
pub(super) fn of(config: &Config) -> ModelTensors<TensorSpec> {
    let of = |name: &str, shape, shape_in_config, role, class| TensorSpec {
        name: name.to_owned(),
        shape,
        shape_in_config,
        role,
        class,
        layer: None,
    };
    let hidden = config.hidden_size;
    ModelTensors {
        embed_tokens: of(
            "embed_tokens",
            vec![config.vocab_size, hidden],
            "vocab_size, hidden_size",
            Role::Embedding,
            Class::Embedding,
        ),
        norm: of("norm", vec![hidden], "hidden_size", Role::Norm, Class::Norms),
        layers: (0..config.num_hidden_layers).map(|layer| layer_specs(config, layer)).collect(),
    }
}

fn layer_specs(config: &Config, layer: usize) -> Layer<TensorSpec> {
    use InputGroup::{Down, GateUp, Output, Qkv};
    const Q_ROWS: &str = "num_attention_heads * head_dim, hidden_size";
    const KV_ROWS: &str = "num_key_value_heads * head_dim, hidden_size";
    const FFN_ROWS: &str = "intermediate_size, hidden_size";
    let (hidden, ffn, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
    let matrix = |rows, cols, shape_in_config, input, class| {
        (vec![rows, cols], shape_in_config, Role::Projection(input), class)
    };
    let norm = |n, shape_in_config| (vec![n], shape_in_config, Role::Norm, Class::Norms);
    let shapes = Layer {
        projections: Projections {
            q_proj: matrix(q, hidden, Q_ROWS, Qkv, Class::Attention),
            k_proj: matrix(kv, hidden, KV_ROWS, Qkv, Class::Attention),
            v_proj: matrix(kv, hidden, KV_ROWS, Qkv, Class::Attention),
            o_proj: matrix(
                hidden,
                q,
                "hidden_size, num_attention_heads * head_dim",
                Output,
                Class::Attention,
            ),
            gate_proj: matrix(ffn, hidden, FFN_ROWS, GateUp, Class::Ffn),
            up_proj: matrix(ffn, hidden, FFN_ROWS, GateUp, Class::Ffn),
            down_proj: matrix(hidden, ffn, "hidden_size, intermediate_size", Down, Class::Ffn),
        },
        norms: Norms {
            input_layernorm: norm(hidden, "hidden_size"),
            post_attention_layernorm: norm(hidden, "hidden_size"),
            pre_feedforward_layernorm: norm(hidden, "hidden_size"),
            post_feedforward_layernorm: norm(hidden, "hidden_size"),
            q_norm: norm(head_dim, "head_dim"),
            k_norm: norm(head_dim, "head_dim"),
        },
    };
    NAMES.zip(shapes).map(|(names, (shape, shape_in_config, role, class))| TensorSpec {
        name: format!("layers.{layer}.{}", names.hugging_face),
        shape,
        shape_in_config,
        role,
        class,
        layer: Some(layer),
    })
}
