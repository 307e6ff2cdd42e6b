//! Why the NPU does not compute: a code, which the doctor and metrics have too, and a line for the person who meets it.

use serde::{Deserialize, Serialize};

/// What went wrong, as the doctor (`unicorn doctor`), the log and metrics name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NpuCode {
    /// `libunicorn_npu.so`, through which this program reaches XRT, is not there.
    ShimMissing,
    /// The shim is not of this version, or was built against other libraries than this machine has.
    ShimMismatch,
    /// XRT's `libxrt_coreutil.so.2` is not there.
    XrtMissing,
    /// XRT has no `hw_context`.
    XrtOld,
    /// The kernel refused to lock memory for the NPU.
    MemlockLow,
    /// Other programs hold the NPU's columns.
    NoColumns,
    /// This user may not open the NPU.
    NpuGroup,
    /// XRT finds no NPU.
    NoDevice,
    /// A dispatch did not end in time. Nothing after it is reliable.
    Timeout,
    /// A dispatch ended, and not completed.
    CommandState,
    /// A dispatch completed, and did not write its output.
    NoOutput,
    /// The shim refused a request of this program: an internal error.
    BadArgument,
    /// The NPU cannot use the GPU's memory in place.
    DmaBuf,
    /// No kernel is stored for this.
    KernelMissing,
    /// A stored kernel is not what its name says.
    KernelInvalid,
    /// What the NPU computed is wrong.
    SelfTest,
    /// The process that holds the NPU ended, or does not answer.
    Process,
    /// XRT refused, in its own words.
    Xrt,
}

impl NpuCode {
    pub fn name(self) -> &'static str {
        match self {
            NpuCode::ShimMissing => "npu-shim-missing",
            NpuCode::ShimMismatch => "npu-shim-mismatch",
            NpuCode::XrtMissing => "xrt-missing",
            NpuCode::XrtOld => "xrt-old",
            NpuCode::MemlockLow => "memlock-low",
            NpuCode::NoColumns => "npu-no-columns",
            NpuCode::NpuGroup => "npu-group",
            NpuCode::NoDevice => "npu-no-device",
            NpuCode::Timeout => "npu-timeout",
            NpuCode::CommandState => "npu-command-state",
            NpuCode::NoOutput => "npu-no-output",
            NpuCode::BadArgument => "npu-bad-argument",
            NpuCode::DmaBuf => "npu-dma-buf",
            NpuCode::KernelMissing => "npu-kernel-missing",
            NpuCode::KernelInvalid => "npu-kernel-invalid",
            NpuCode::SelfTest => "npu-self-test",
            NpuCode::Process => "npu-process",
            NpuCode::Xrt => "npu-xrt",
        }
    }
}

/// An error of the NPU's path: what happened, what was expected, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} ({})", code.name())]
pub struct NpuError {
    pub code: NpuCode,
    pub message: String,
}

impl NpuError {
    pub fn new(code: NpuCode, message: impl Into<String>) -> NpuError {
        NpuError { code, message: message.into() }
    }
}
