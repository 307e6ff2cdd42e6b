//! The one integration test binary, `suite`. Every test file is a module of it, so the tests are linked only once.
//!
//! The filter of `cargo test --test suite` is a part of a test's path: `kernels::` runs `tests/kernels.rs`. The tests
//! of one run share a few open Vulkan devices (`support::device`). Files in `tests/support` hold what several test
//! files use. A new test file needs a `mod` line here. The lines are sorted.

mod auth;
mod batching;
mod bench;
mod chat_completions;
mod checkpoint;
mod checkpoint_legacy;
mod checkpoint_native;
mod checkpoint_packed;
mod cli;
mod completions;
mod config;
mod connections;
mod control_tokens;
mod courtesy;
mod daemon;
mod demo;
mod disconnect;
mod docs;
mod doctor;
mod draft;
mod embeddings;
mod encodings;
mod engine;
mod fast;
mod faults;
mod gguf;
mod golden;
mod gbnf;
mod grammar;
mod hazards;
mod health;
mod hub;
mod jinja;
mod kernels;
mod messages;
mod model_names;
#[cfg(feature = "npu")]
mod npu_kernels;
#[cfg(feature = "npu")]
mod npu_process;
#[cfg(feature = "npu")]
mod npu_shim;
mod offload;
mod openapi;
mod options;
mod other_fields;
mod page;
mod placement;
mod prefix_sharing;
mod random_bodies;
mod recorded_refusals;
mod recovery;
mod responses;
mod routes;
mod schemas;
mod self_test;
mod server_errors;
mod structured_output;
mod support;
mod systemd;
mod target_compile;
mod text;
mod tidy;
mod token_fields;
mod tool_calls;
mod tune;
