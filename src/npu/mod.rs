//! The NPU of a Ryzen AI, which computes a part of the attention of prompts. The rest of the program reaches it through
//! `Coprocessor` in `src/model/model_runner.rs`, which the runner calls, and through `cli`.
//!
//! | file | what it is |
//! |---|---|
//! | `contract.rs` | shapes, buckets, parameters and buffers of a dispatch; which keys a kernel reads |
//! | `tile.rs` | the kernel's arithmetic, step by step, and how far it may be from exact attention |
//! | `error.rs` | why the NPU does not compute: a code and a line |
//! | `container.rs`, `transaction.rs` | the two files of a kernel, checked before XRT or the driver reads them |
//! | `marks.rs` | how the host detects outputs that a dispatch did not write |
//! | `store.rs` | the kernels in a folder |
//! | `transport.rs` | loads kernels and runs dispatches, with arrays that are copied or shared |
//! | `shim.h`, `shim.cpp` | a C interface to XRT, which has only a C++ interface; a separate shared object (`make npu-shim`) |
//! | `abi.rs` | the names and types of `shim.h` in Rust |
//! | `shim.rs` | the transport over that shared object; the program starts without it |
//! | `process/` | the child process that drives the NPU, and its parent's side |
//! | `attention.rs` | what the NPU computes of a step, its failures, and the counts of its work |
//! | `shared_step.rs` | runs a step in which the NPU takes part |
//! | `kernels.rs` | the GPU's kernels that write the NPU's inputs and read its output |
//! | `account.rs` | the counts of all device processes of a server |
//! | `cli/` | opens the NPU for a load; `unicorn npu`, `unicorn bench npu`, the doctor's checks |
//!
//! The source of the NPU's kernel is in `npu/kernels`.

pub mod account;
#[cfg(feature = "npu")]
pub mod abi;
#[cfg(feature = "npu")]
pub mod attention;
pub(crate) mod cli;
#[cfg(feature = "npu")]
pub mod container;
#[cfg(feature = "npu")]
pub mod contract;
#[cfg(feature = "npu")]
pub mod error;
#[cfg(feature = "npu")]
pub mod kernels;
#[cfg(feature = "npu")]
pub mod marks;
#[cfg(feature = "npu")]
pub mod process;
#[cfg(feature = "npu")]
mod shared_step;
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
