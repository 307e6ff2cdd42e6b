//! `unicorn npu-process`: the child process that drives the NPU. It opens XRT, and runs dispatches until its parent
//! ends.
//!
//! Its standard input is the channel to the process that holds the model.

use crate::cli::error::Error;
use crate::cli::process::outlive_signals;
use crate::device::Channel;
use crate::npu::process::{Start, serve};
use crate::npu::shim::Shim;
use crate::npu::transport::NpuTransport;

pub fn npu_process() -> Result<(), Error> {
    let _runtime = outlive_signals()?;
    let channel = Channel::from_stdin().map_err(Error::Channel)?;
    let open = |start: &Start| Ok(Box::new(Shim::open(&start.shim)?) as Box<dyn NpuTransport>);
    serve(channel, open).map_err(Error::Channel)
}
