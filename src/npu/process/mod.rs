//! The NPU in a process of its own, so that a driver that hangs can be ended with it.
//!
//! [`NpuProcess`] is the NPU as the runner's process has it: an [`AttentionUnit`] whose waits are bounded, with the
//! start's self-test. [`serve`] is the loop of the child, over any [`NpuTransport`](crate::npu::transport::NpuTransport).
//!
//! Messages are short. The arrays of a dispatch lie in one file in memory, which both processes read and write with
//! system calls: a mapping would let a child that was killed change memory that this process holds a reference to.

mod child;
mod message;
mod parent;

pub use child::serve;
pub use message::Start;
pub use parent::{HeadShape, NpuProcess};

#[cfg(doc)]
use crate::npu::attention::AttentionUnit;
