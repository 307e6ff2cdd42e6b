//! The one integration test binary, `suite`. Every test file is a module of it, so the tests are linked only once.
//!
//! A folder holds the tests of one part of the program. The filter of `cargo test --test suite` is a part of a test's
//! path: `kernels::` runs that folder, `kernels::fast::` one file of it. The tests of one run share a few open Vulkan
//! devices (`support::device`). Files in `tests/support` hold what several test files use. A new test file needs a
//! `mod` line in its folder's `mod.rs`.

mod api;
mod checkpoint;
mod cli;
mod engine;
mod faults;
mod house;
mod hub;
mod image;
mod kernels;
mod model;
#[cfg(feature = "npu")]
mod npu;
mod support;
mod text;
