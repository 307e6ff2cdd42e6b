//! Generated files of packed checkpoints, with the parts of a GPTQ matrix.

use half::f16;
use serde_json::{Value, json};

use super::checkpoints::safetensors_file;
use super::fuzz_bodies::joined;

/// A tensor of a file: name, element type, shape, bytes.
pub type PackedPart = (&'static str, &'static str, Vec<usize>, Vec<u8>);

/// Little-endian bytes of words.
pub fn words(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Little-endian bytes of the values in f16.
pub fn f16s(scales: &[f32]) -> Vec<u8> {
    scales.iter().flat_map(|s| f16::from_f32(*s).to_le_bytes()).collect()
}

/// A safetensors file of these tensors.
pub fn file(parts: &[PackedPart]) -> Vec<u8> {
    let tensors = parts.iter().map(|(name, dtype, shape, bytes)| (*name, *dtype, &shape[..], &bytes[..]));
    safetensors_file(&tensors.collect::<Vec<_>>())
}

/// The `quantization_config` of GPTQ with 4 bits.
pub fn gptq() -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"})
}

/// The `quantization_config` of AWQ.
pub fn awq() -> Value {
    json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": true})
}

/// The `quantization_config` of compressed-tensors with 4 bits and zero points.
pub fn compressed() -> Value {
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": null,
        "weights": {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 32}}}})
}

/// A GPTQ matrix of 8 rows and 64 columns in groups of 32.
pub fn gptq_parts() -> Vec<PackedPart> {
    vec![
        ("p.qweight", "I32", vec![8, 8], words(1..65)),
        ("p.qzeros", "I32", vec![2, 1], words([0x7654_3210, 0x0123_4567])),
        ("p.scales", "F16", vec![2, 8], f16s(&[0.5; 16])),
        ("p.g_idx", "I32", vec![64], words((0..64).map(|col| col / 32))),
    ]
}

/// A valid input of the fuzz target for these formats.
pub fn fuzz_input() -> Vec<u8> {
    let config = json!({"quantization_config": gptq()});
    joined(config.to_string().as_bytes(), &file(&gptq_parts()))
}
