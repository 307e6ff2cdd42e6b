//! The shader table that build.rs generates from `shaders/`, and lookups in it by scheme and name.

use crate::gpu::Shader;
use crate::tensor::Scheme;

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// The shaders for weights of a scheme: the f32 product, and the embedding lookup.
pub(crate) fn shaders_of(scheme: Scheme) -> (&'static Shader, &'static Shader) {
    (shader_of("matmul", scheme), shader_of("embed", scheme))
}

/// The variant of a kernel for weights of a scheme.
pub(super) fn shader_of(kernel: &str, scheme: Scheme) -> &'static Shader {
    shader_named(&format!("{kernel}_{}", scheme.variant()))
}

pub(super) fn shader_named(name: &str) -> &'static Shader {
    let found = ALL.iter().find(|shader| shader.name == name);
    found.unwrap_or_else(|| panic!("there is no kernel {name}"))
}
