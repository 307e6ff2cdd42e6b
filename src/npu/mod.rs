//! The NPU of a Ryzen AI as a second place for attention of prompts: what a dispatch is, and what its results may be.
//!
//! | file | what it is |
//! |---|---|
//! | `contract.rs` | shapes, buckets, parameters and buffers of a dispatch; which keys a kernel reads |
//! | `tile.rs` | the kernel's arithmetic, step by step, and how far it may be from exact attention |
//! | `error.rs` | why the NPU does not compute, in a code and a line |
//! | `container.rs`, `transaction.rs` | the two files of a kernel, checked before XRT or the driver sees them |
//! | `marks.rs` | how a host sees what a dispatch did not write |
//! | `store.rs` | the kernels in a folder, and which of them computes a job |
//! | `transport.rs` | the way to an NPU: kernels go in once, then dispatches, with arrays that are copied or shared |
//! | `shim.h`, `shim.cpp` | a C interface to what XRT has in C++ alone; a shared object of its own (`make npu-shim`) |
//! | `abi.rs` | the names and types of `shim.h` in Rust |
//! | `shim.rs` | the way over that shared object, which the program starts without |
//!
//! The kernel's source is in `npu/kernels`. It knows no Vulkan, no model and no engine, and neither does this room.

pub mod account;
#[cfg(feature = "npu")]
pub mod abi;
#[cfg(feature = "npu")]
pub mod container;
#[cfg(feature = "npu")]
pub mod contract;
#[cfg(feature = "npu")]
pub mod error;
#[cfg(feature = "npu")]
pub mod marks;
#[cfg(feature = "npu")]
pub mod shim;
#[cfg(feature = "npu")]
pub mod store;
#[cfg(feature = "npu")]
pub mod tile;
#[cfg(feature = "npu")]
pub mod transaction;
#[cfg(feature = "npu")]
pub mod transport;
