//! The table of shaders that build.rs generates from `shaders/`, and the variants for matrices of a scheme.

use crate::gpu::Shader;
use crate::tensor::Scheme;

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// The shaders for matrices of a scheme: products, and embeddings.
pub(super) fn shaders_of(scheme: Scheme) -> (&'static Shader, &'static Shader) {
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
