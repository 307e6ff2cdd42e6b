//! The names of the tensors of a layer.

use crate::model::gemma3;
use crate::model::tensors::{KeptMatrices, Layer, Names, Norms, Projections, RouterTensors, Scalars};

pub(super) const NAMES: Layer<Names> = Layer {
    scalars: Scalars { layer_scalar: Some(Names::of("layer_scalar", "layer_output_scale.weight")) },
    ..gemma3::NAMES
};

/// The names in layers with per-layer embeddings.
pub(super) const PER_LAYER: Layer<Names> = Layer {
    norms: Norms {
        post_per_layer_input_norm: Some(Names::of("post_per_layer_input_norm", "post_norm")),
        ..NAMES.norms
    },
    kept: KeptMatrices {
        per_layer_input_gate: Some(Names::of("per_layer_input_gate", "inp_gate")),
        per_layer_projection: Some(Names::of("per_layer_projection", "proj")),
        ..NAMES.kept
    },
    ..NAMES
};

/// The names in layers with experts.
pub(super) const WITH_EXPERTS: Layer<Names> = Layer {
    projections: Projections {
        expert_gate_proj: Some(Names::of("experts.gate_proj", "ffn_gate_exps")),
        expert_up_proj: Some(Names::of("experts.up_proj", "ffn_up_exps")),
        expert_down_proj: Some(Names::of("experts.down_proj", "ffn_down_exps")),
        ..NAMES.projections
    },
    norms: Norms {
        post_feedforward_layernorm_1: Some(Names::of("post_feedforward_layernorm_1", "post_ffw_norm_1")),
        pre_feedforward_layernorm_2: Some(Names::of("pre_feedforward_layernorm_2", "pre_ffw_norm_2")),
        post_feedforward_layernorm_2: Some(Names::of("post_feedforward_layernorm_2", "post_ffw_norm_2")),
        ..NAMES.norms
    },
    router: RouterTensors {
        proj: Some(Names::of("router.proj", "ffn_gate_inp")),
        scale: Some(Names::of("router.scale", "ffn_gate_inp.scale")),
        per_expert_scale: Some(Names::of("router.per_expert_scale", "ffn_down_exps.scale")),
    },
    ..NAMES
};

/// Gate and up of all experts in one tensor of a GGUF file, and its Hugging Face name.
const FUSED: (&str, &str) = ("ffn_gate_up_exps", "experts.gate_up_proj");

/// The Hugging Face name of a layer's tensor in a GGUF file.
pub(super) fn of_gguf(name: &str, what: &str) -> Option<String> {
    let (fused, hugging_face) = FUSED;
    if (name, what) == (fused, "weight") {
        Some(hugging_face.to_owned())
    } else {
        WITH_EXPERTS.of_gguf(name, what).or_else(|| PER_LAYER.of_gguf(name, what))
    }
}
