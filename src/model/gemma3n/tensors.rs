//! The names of the tensors of a layer.

use crate::model::gemma3;
use crate::model::tensors::{AltUpTensors, KeptMatrices, Layer, Names, Norms};

pub(super) const NAMES: Layer<Names> = Layer {
    norms: Norms {
        post_per_layer_input_norm: Some(Names::of("post_per_layer_input_norm", "post_norm")),
        post_laurel_norm: Some(Names::of("laurel.post_laurel_norm", "laurel_post_norm")),
        router_norm: Some(Names::of("altup.router_norm", "altup_router_norm")),
        ..gemma3::NAMES.norms
    },
    kept: KeptMatrices {
        per_layer_input_gate: Some(Names::of("per_layer_input_gate", "inp_gate")),
        per_layer_projection: Some(Names::of("per_layer_projection", "proj")),
        linear_left: Some(Names::of("laurel.linear_left", "laurel_l")),
        linear_right: Some(Names::of("laurel.linear_right", "laurel_r")),
    },
    altup: AltUpTensors {
        modality_router: Some(Names::of("altup.modality_router", "altup_router")),
        prediction_coefs: Some(Names::of("altup.prediction_coefs", "altup_predict_coef")),
        correction_coefs: Some(Names::of("altup.correction_coefs", "altup_correct_coef")),
        correct_output_scale: Some(Names::of("altup.correct_output_scale", "altup_correct_scale.weight")),
    },
    ..gemma3::NAMES
};
