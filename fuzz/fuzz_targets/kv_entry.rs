//! A file of a folder of conversations: its header, its checksums and its payload.
#![no_main]

#[allow(dead_code)]
#[path = "../bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::kv_entry(bytes.to_vec());
});
