//! Checkpoints of every format: what is read, what is refused, and the bits that arrive.

mod experts;
mod gguf;
mod legacy;
mod native;
mod packed;
mod packed_families;
mod safetensors;
