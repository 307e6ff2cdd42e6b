//! The one integration binary: every suite shares one build and one Vulkan device. One `mod` line each, sorted.

mod api;
mod batching;
mod bench;
mod bodies;
mod checkpoint;
mod cli;
mod completions;
mod config;
mod daemon;
mod demo;
mod door;
mod draft;
mod drive;
mod embeddings;
mod engine;
mod failures;
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
mod hub;
mod jinja;
mod kernels;
mod leaving;
mod legacy;
mod messages;
mod native;
mod openapi;
mod packed;
mod page;
mod placement;
mod responses;
mod sharing;
mod structured;
mod support;
mod target;
mod text;
mod tidy;
mod tools;
mod watch;
