//! The process that drives a device: its messages, bounded waits, and its report.
//!
//! A driver may hang, or end its process. Only the end of the process ends such a call and frees the memory of a lost
//! device. So a server loads its model in a child process, `unicorn device-process`.
//!
//! - [`Connection`] is the parent's end of any child process: it bounds every wait, and ends the child when it is
//!   dropped. [`Channel`] carries messages and files. A thread of the child writes a heartbeat, and another thread
//!   writes the progress of the device.
//! - [`DeviceFactory`] starts the process that loads the model. [`DeviceProcess`] is the runner as the server has it:
//!   it passes batches, masks and draws on as plain data. The server submits without waiting for an answer, so steps
//!   overlap as they do in one process.
//! - [`run`] is the child: it loads the model, and then executes steps ([`serve`]).
//! - [`DeviceReport`] and [`DeviceState`] are what `/status` and `/metrics` show.
//!
//! This module does not know how a model is loaded: the caller of [`run`] gives it a function.

mod channel;
mod child;
mod connection;
mod factory;
mod loading;
mod message;
mod process;
mod report;
mod signs;
mod steps;
mod usage;

pub use channel::Channel;
pub use child::{LoadTask, LoadedModel, OnProgress, run};
pub use connection::{Connection, ConnectionError};
pub use factory::{DeviceFactory, Exclusive, Observer, StartError};
pub use loading::Loading;
pub use message::{MAX_BLOCK_BYTES, Refusal};
pub use process::DeviceProcess;
pub use report::{
    DeviceReport, DeviceState, HeapReport, KernelTime, Metric, NpuReport, Place, Placed, SelfTested,
    kernel_times,
};
pub use steps::serve;
pub use usage::{open_files, processor_time, resident_bytes, status_field};
