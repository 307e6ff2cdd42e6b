//! Unicorn Execution Engine: a local LLM server for AMD Ryzen AI machines.
//!
//! A Gemma-3 checkpoint is loaded once into persistent GPU memory, every layer runs in Vulkan compute
//! shaders, and `/v1/chat/completions` answers on `localhost:8010`. There is no CPU implementation of a
//! layer in this crate: what the device cannot hold or compute is an error that says so.
//!
//! # Floors
//!
//! Modules import downward only, and no files import each other in a circle (`tests/tidy.rs` checks both from the paths
//! that the code names):
//!
//! | floor | modules |
//! |---|---|
//! | 7 | [`cli`] |
//! | 6 | [`api`] |
//! | 5 | [`session`] |
//! | 4 | [`engine`] |
//! | 3 | [`model`] |
//! | 2 | [`kernels`], [`quantize`] |
//! | 1 | [`gpu`], [`checkpoint`], [`text`], [`hub`] |
//! | 0 | [`tensor`], [`config`] |
//!
//! `docs/architecture.md` says what each is, what it must never do, and walks through them with a prompt, a weight and a
//! sampled id.

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
