//! A GPTQ, AWQ or compressed-tensors checkpoint and its config.
#![no_main]

#[allow(dead_code)]
#[path = "../bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::packed(bytes.to_vec());
});
