//! The container of an NPU kernel, an xclbin. tests/data/npu/xclbin/placeholder.xclbin is a seed.
#![no_main]

#[allow(dead_code)]
#[path = "../bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::npu_container(bytes.to_vec());
});
