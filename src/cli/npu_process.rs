//! `unicorn npu-process`: the child that has the NPU. It opens XRT, and runs dispatches until its parent ends.
//!
//! Its standard input is the channel to the process that has the model.

use super::error::Error;
use super::process::outlive_signals;
use crate::device::Channel;
use crate::model::npu_process::serve;
use crate::npu::shim::Shim;
use crate::npu::transport::NpuTransport;

pub fn npu_process() -> Result<(), Error> {
    let _runtime = outlive_signals()?;
    let channel = Channel::from_stdin().map_err(Error::Channel)?;
    let open = |start: &crate::model::npu_process::Start| {
        Ok(Box::new(Shim::open(&start.shim)?) as Box<dyn NpuTransport>)
    };
    serve(channel, open).map_err(Error::Channel)
}
