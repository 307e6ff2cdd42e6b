//! Unicorn Execution Engine: a local LLM server for AMD Ryzen AI machines.
//!
//! A Gemma-3 checkpoint is loaded once into persistent GPU memory, every layer runs in Vulkan compute
//! shaders, and `/v1/chat/completions` answers on `localhost:8010`. There is no CPU implementation of a
//! layer in this crate: what the device cannot hold or compute is an error that says so.
//!
//! # Floors
//!
//! Modules import downward only (`tests/tidy.rs` checks it from the `use` lines):
//!
//! | floor | modules | must never |
//! |---|---|---|
//! | 7 | [`cli`] | name a Vulkan type beyond loading a model; name [`api`] except to serve |
//! | 6 | [`api`] | name a Vulkan type, or a KV block |
//! | 5 | [`session`] | know HTTP, or a wire format |
//! | 4 | [`engine`] | know text, HTTP, `ash`, or a layer; be async |
//! | 3 | [`model`] | see a request, a queue, or a clock |
//! | 2 | [`kernels`], [`quantize`] | know a model or a scheduler |
//! | 1 | [`gpu`], [`checkpoint`], [`text`], [`hub`] | import each other |
//! | 0 | [`tensor`], [`config`] | do I/O |
//!
//! # One request
//!
//! 1. [`api`] reads the wire format; [`session`] renders the chat template and tokenizes ([`text`]).
//! 2. [`engine::EngineHandle::submit`] puts token ids on a bounded queue.
//! 3. The engine thread builds a [`model::Batch`] and hands it to a [`model::Runner`].
//! 4. The runner ([`model::gemma3`]) records [`kernels`] on the [`gpu`], submits, waits once.
//! 5. Sampled ids travel back on a bounded channel; [`session`] makes text of them,
//!    and [`api`] streams it.

// In reading order: from the machine up to the request.
pub mod tensor;
pub mod config;
pub mod gpu;
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
