//! The instructions of an NPU kernel. tests/data/npu/xclbin/placeholder.bin is a seed.
#![no_main]

#[allow(dead_code)]
#[path = "../bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::npu_transaction(bytes.to_vec());
});
