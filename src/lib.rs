//! Unicorn Execution Engine: a local LLM server. Vulkan compute shaders compute every layer.
//!
//! `unicorn serve` loads a checkpoint into GPU memory, and serves the APIs of OpenAI and Anthropic on
//! `127.0.0.1:8010`. There is no fallback to the CPU: a model that the device cannot hold or compute is an error. The
//! CPU only computes references: tests compare kernels with the loops in `tests/support/reference.rs`, and the
//! self-test at the start compares the device's layers with [`model::twin`]. The first target is the GPU of an AMD
//! Ryzen 9 8945HS, a Radeon 780M. Any Vulkan 1.3 device with the features and limits of [`gpu::Caps`] works.
//!
//! # Floors
//!
//! Each module has a floor (elsewhere, `layer` means a decoder layer). A module imports only modules of lower floors,
//! and no files import each other in a circle. `tests/house/tidy.rs` checks both from the paths in the code. The binary is
//! above all modules. Three modules import another module of the same floor: [`kernels`] imports [`quantize`], because
//! weights are quantized while they are packed for the device, [`device`] imports [`model`], whose steps it executes in
//! a child process, and [`config`] imports [`tensor`].
//!
//! | floor | modules |
//! |---|---|
//! | 9 | [`lab`] |
//! | 8 | [`cli`] |
//! | 7 | [`api`] |
//! | 6 | [`library`] |
//! | 5 | [`session`] |
//! | 4 | [`engine`], [`npu`] |
//! | 3 | [`model`], [`device`] |
//! | 2 | [`kernels`], [`quantize`] |
//! | 1 | [`gpu`], [`checkpoint`], [`text`], [`hub`] |
//! | 0 | [`tensor`], [`config`], [`file`], [`image`], [`kv_disk`] |
//!
//! Most of [`npu`] needs the feature `npu`, which is on by default.
//!
//! Some imports of lower modules are forbidden too: the engine, for example, imports neither [`text`] nor [`gpu`].
//! `tests/house/tidy.rs` has the list and checks it.
//!
//! `docs/architecture.md` describes each module and its limits, and follows a prompt, a weight and a sampled id through
//! the modules.

// Without the NPU, nothing attaches a coprocessor to the model's runner.
#![cfg_attr(not(feature = "npu"), allow(dead_code))]

// In reading order: from the machine up to the request.
pub mod tensor;
pub mod config;
pub mod file;
pub mod gpu;
pub mod checkpoint;
pub mod text;
pub mod kv_disk;
pub mod hub;
pub mod image;
pub mod kernels;
pub mod quantize;
pub mod model;
pub mod device;
pub mod npu;
pub mod engine;
pub mod session;
pub mod library;
pub mod api;
pub mod cli;
pub mod lab;
