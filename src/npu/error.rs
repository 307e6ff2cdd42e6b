//! Why the NPU does not compute: a code, which the doctor and metrics use too, and a message for the user.

use serde::{Deserialize, Serialize};

/// What went wrong, as the doctor (`unicorn doctor`), the log and metrics name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NpuCode {
    /// `libunicorn_npu.so`, through which this program calls XRT, is missing.
    ShimMissing,
    /// The shim has another version, or was built against other libraries than this machine has.
    ShimMismatch,
    /// XRT's `libxrt_coreutil.so.2` is missing.
    XrtMissing,
    /// XRT is too old: it has no `hw_context`.
    XrtOld,
    /// The kernel refused to lock memory for the NPU.
    MemlockLow,
    /// Other programs hold the NPU's columns.
    NoColumns,
    /// This user has no permission to open the NPU.
    NpuGroup,
    /// XRT finds no NPU.
    NoDevice,
    /// A dispatch exceeded its time limit. The NPU cannot be used again.
    Timeout,
    /// A dispatch ended without completing.
    CommandState,
    /// A dispatch completed, but did not write its output.
    NoOutput,
    /// The shim refused a request of this program: an internal error.
    BadArgument,
    /// The NPU cannot use the GPU's memory in place.
    DmaBuf,
    /// No stored kernel can compute this.
    KernelMissing,
    /// A stored kernel does not match its name.
    KernelInvalid,
    /// The NPU's result is wrong.
    SelfTest,
    /// The process that holds the NPU ended, or does not answer.
    Process,
    /// XRT refused a call. The message has XRT's text.
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

/// An error of the NPU: what happened, what was expected, and what to do.
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
