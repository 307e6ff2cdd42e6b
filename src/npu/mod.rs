//! The NPU of a Ryzen AI as a second place for attention of prompts: what a dispatch is, and what its results may be.
//!
//! | file | what it is |
//! |---|---|
//! | `contract.rs` | shapes, buckets, parameters and buffers of a dispatch; which keys a kernel reads |
//! | `tile.rs` | the kernel's arithmetic, step by step, and how far it may be from exact attention |
//! | `error.rs` | why the NPU does not compute, in a code and a line |
//! | `container.rs`, `transaction.rs` | the two files of a kernel, checked before XRT or the driver sees them |
//! | `store.rs` | the kernels in a folder, and which of them computes a job |
//! | `transport.rs` | the way to an NPU: kernels go in once, then dispatches |
//!
//! The kernel's source is in `npu/kernels`. It knows no Vulkan, no model and no engine, and neither does this room.

pub mod container;
pub mod contract;
pub mod error;
pub mod store;
pub mod tile;
pub mod transaction;
pub mod transport;
