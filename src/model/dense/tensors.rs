//! The names of the tensors of a layer.

use crate::model::tensors::{
    AltUpTensors, Biases, KeptMatrices, Layer, Names, Norms, Projections, RouterTensors, Scalars,
};

/// A layer without optional tensors.
pub(in crate::model) const NAMES: Layer<Names> = Layer {
    projections: Projections {
        q_proj: Names::of("self_attn.q_proj", "attn_q"),
        k_proj: Some(Names::of("self_attn.k_proj", "attn_k")),
        v_proj: Some(Names::of("self_attn.v_proj", "attn_v")),
        o_proj: Names::of("self_attn.o_proj", "attn_output"),
        gate_proj: Some(Names::of("mlp.gate_proj", "ffn_gate")),
        up_proj: Some(Names::of("mlp.up_proj", "ffn_up")),
        down_proj: Some(Names::of("mlp.down_proj", "ffn_down")),
        expert_gate_proj: None,
        expert_up_proj: None,
        expert_down_proj: None,
    },
    norms: Norms {
        input_layernorm: Names::of("input_layernorm", "attn_norm"),
        post_attention_layernorm: None,
        pre_feedforward_layernorm: Names::of("post_attention_layernorm", "ffn_norm"),
        post_feedforward_layernorm: None,
        q_norm: None,
        k_norm: None,
        post_feedforward_layernorm_1: None,
        pre_feedforward_layernorm_2: None,
        post_feedforward_layernorm_2: None,
        post_per_layer_input_norm: None,
        post_laurel_norm: None,
        router_norm: None,
    },
    biases: Biases { q_proj: None, k_proj: None, v_proj: None },
    scalars: Scalars { layer_scalar: None },
    router: RouterTensors { proj: None, scale: None, per_expert_scale: None },
    kept: KeptMatrices {
        per_layer_input_gate: None,
        per_layer_projection: None,
        linear_left: None,
        linear_right: None,
    },
    altup: AltUpTensors {
        modality_router: None,
        prediction_coefs: None,
        correction_coefs: None,
        correct_output_scale: None,
    },
};
