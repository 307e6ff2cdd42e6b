//! The child process that drives the NPU. The end of the process ends a driver that hangs.
//!
//! [`NpuProcess`] is the parent's end: an [`AttentionUnit`] whose waits are bounded, with the self-test of the start.
//! [`serve`] is the loop of the child, over any [`NpuTransport`](crate::npu::transport::NpuTransport).
//!
//! Messages are short. The arrays of a dispatch are in one file in memory, which both processes read and write with
//! system calls. With a mapping, the child could change memory that this process has a reference to.

mod child;
mod message;
mod parent;

pub use child::serve;
pub use message::Start;
pub use parent::{HeadShape, NpuProcess};

#[cfg(doc)]
use crate::npu::attention::AttentionUnit;
