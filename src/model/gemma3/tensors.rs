//! The names of the tensors of a layer.

use crate::model::dense;
use crate::model::tensors::{Layer, Names, Norms};

pub(in crate::model) const NAMES: Layer<Names> = Layer {
    norms: Norms {
        input_layernorm: Names::of("input_layernorm", "attn_norm"),
        post_attention_layernorm: Some(Names::of("post_attention_layernorm", "post_attention_norm")),
        pre_feedforward_layernorm: Names::of("pre_feedforward_layernorm", "ffn_norm"),
        post_feedforward_layernorm: Some(Names::of("post_feedforward_layernorm", "post_ffw_norm")),
        q_norm: Some(Names::of("self_attn.q_norm", "attn_q_norm")),
        k_norm: Some(Names::of("self_attn.k_norm", "attn_k_norm")),
        ..dense::NAMES.norms
    },
    ..dense::NAMES
};
