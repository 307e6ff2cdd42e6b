//! The one integration binary: all test files share one build and a few Vulkan devices (`support::device`). One `mod` line
//! each, sorted.

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
mod daemon;
mod demo;
mod disconnect;
mod docs;
mod draft;
mod drive;
mod embeddings;
mod encodings;
mod engine;
mod fake_runner;
mod fast;
mod faults;
#[allow(dead_code)]
#[path = "../fuzz/bodies.rs"]
mod fuzz_bodies;
mod gguf;
mod golden;
mod grammar;
mod hazards;
mod health;
mod hub;
mod jinja;
mod kernels;
mod messages;
mod names;
mod openapi;
mod page;
mod placement;
mod prefix_sharing;
mod random_bodies;
mod recorded_refusals;
mod reference;
mod responses;
mod routes;
mod server_errors;
mod structured_output;
mod support;
mod target_compile;
mod text;
mod tidy;
mod tool_calls;
mod tune;
