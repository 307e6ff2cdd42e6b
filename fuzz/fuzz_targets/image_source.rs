//! What a client sends as an image: a `data:` URI, base64, or an address.
#![no_main]

#[allow(dead_code)]
#[path = "../bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::image_source(bytes.to_vec());
});
