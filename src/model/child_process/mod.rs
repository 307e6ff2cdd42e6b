//! A child process that drives a device, as its parent has it: messages, files, a bound for every wait, and its end.
//!
//! A driver may hang, or take its process down. Only the end of the process ends its calls and gives its memory back.
//! [`Connection`] is the parent's end, which ends the child with itself. [`Channel`] carries the messages of both.
//!
//! What is said over it, this room does not know: `device_process` and `npu_process` do.

mod channel;
mod connection;

pub use channel::{Channel, ProgressCounter};
pub use connection::{Connection, ConnectionError};
