//! A child process that drives a device, as its parent has it: messages, files, a bound for every wait, and its end.
//!
//! A driver may hang, or take its process down. Only the end of the process ends its calls and gives its memory back.
//! [`Connection`] is the parent's end, which ends the child with itself. [`Channel`] carries the messages of both. A thread
//! of the child shows that the process runs, and another one that its device gets on.
//!
//! What is said over it, this room does not know: `device_process` and `npu_process` do.

mod channel;
mod child;
mod connection;

pub use channel::Channel;
pub use connection::{Connection, ConnectionError};
