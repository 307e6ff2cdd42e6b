//! Unicorn Execution Engine: a local LLM server for Gemma-3. Vulkan compute shaders compute every layer.
//!
//! `unicorn serve` loads a checkpoint into GPU memory, and answers the APIs of OpenAI and Anthropic on
//! `127.0.0.1:8010`. Nothing here computes an answer on the CPU: what the device cannot hold or compute is an error
//! that says so. The plain loops that tests compare kernels with are in `tests/support/reference.rs`; those that a
//! device's layers are compared with at the start, in [`model::twin`]. The first target is the GPU of an AMD Ryzen 9
//! 8945HS, a Radeon 780M. Any Vulkan 1.3 device will do that has the features and limits of [`gpu::Caps`].
//!
//! # Floors
//!
//! Modules import downward only, and no files import each other in a circle (`tests/tidy.rs` checks both from the paths
//! that the code names). The binary stands above all modules. Two modules name a neighbour on their floor: [`kernels`]
//! names [`quantize`], since weights are quantized while they are packed for the device, and [`config`] names
//! [`tensor`].
//!
//! | floor | modules |
//! |---|---|
//! | 7 | [`cli`] |
//! | 6 | [`api`] |
//! | 5 | [`session`] |
//! | 4 | [`engine`] |
//! | 3 | [`model`] |
//! | 2 | [`kernels`], [`quantize`] |
//! | 1 | [`gpu`], `npu`, [`checkpoint`], [`text`], [`hub`] |
//! | 0 | [`tensor`], [`config`], [`file`] |
//!
//! `npu` is there with the feature of its name, which is on by default.
//!
//! Some modules may not name a module below them either: the engine, for one, names neither [`text`] nor [`gpu`].
//! `tests/tidy.rs` has the list, and checks all of this from the paths that the code names.
//!
//! `docs/architecture.md` says what each module is and what it must never do, and walks through them with a prompt, a
//! weight and a sampled id.

// In reading order: from the machine up to the request.
pub mod tensor;
pub mod config;
pub mod file;
pub mod gpu;
#[cfg(feature = "npu")]
pub mod npu;
pub mod checkpoint;
pub mod text;
pub mod hub;
pub mod kernels;
pub mod quantize;
pub mod model;
pub mod engine;
pub mod session;
pub mod api;
pub mod cli;
