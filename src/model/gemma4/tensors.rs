//! The names of the tensors of a layer.

use crate::model::gemma3;
use crate::model::tensors::{Layer, Names, Scalars};

pub(super) const NAMES: Layer<Names> = Layer {
    scalars: Scalars { layer_scalar: Some(Names::of("layer_scalar", "layer_output_scale")) },
    ..gemma3::NAMES
};
