//! The child process that drives the NPU. If the driver hangs, the parent ends this process.
//!
//! [`NpuProcess`] is the parent's side: an [`AttentionUnit`] with time limits, which runs the self-test at the start.
//! [`serve`] is the loop of the child, over any [`NpuTransport`](crate::npu::transport::NpuTransport).
//!
//! Messages are short. The arrays of a dispatch are in one file in memory, which both processes read and write with
//! system calls. A mapping would let the child change memory to which the parent holds a reference.

mod child;
mod message;
mod parent;

pub use child::serve;
pub use message::Start;
pub use parent::{HeadShape, NpuProcess};

#[cfg(doc)]
use crate::npu::attention::AttentionUnit;
