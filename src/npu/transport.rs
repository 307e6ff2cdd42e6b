//! The interface to an NPU: kernels are loaded once, then dispatches run. The shim over XRT implements it
//! ([`super::shim`]), and so does the test double.
//!
//! Each call of an implementation returns within a time limit. Otherwise another process must end this process, because
//! a driver that hangs cannot be interrupted.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use super::contract::{Bucket, Job, Shape};
use super::error::NpuError;

/// A kernel on disk, whose files were validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFiles {
    pub shape: Shape,
    pub bucket: Bucket,
    /// The container that XRT registers.
    pub xclbin: PathBuf,
    /// The stream of instructions for the NPU's controller, in words.
    pub instructions: Vec<u32>,
}

/// The offsets in shared buffers are multiples of this, the size of a CPU's cache line. A sync moves whole lines,
/// including the bytes next to an array.
pub const SHARED_ALIGN: u64 = 64;

/// Facts about the opened NPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpuFacts {
    /// The version of XRT.
    pub xrt: String,
    /// The device, as XRT names it.
    pub device: String,
    /// Whether it is the test double, which computes on the CPU.
    pub is_double: bool,
}

pub trait NpuTransport: Send {
    fn facts(&self) -> &NpuFacts;

    /// Registers the xclbin, and creates its context, its kernel, and the buffers of its instructions and parameters.
    /// Returns the index that [`attend`](NpuTransport::attend) and [`attend_shared`](NpuTransport::attend_shared) take.
    fn load(&mut self, kernel: &KernelFiles) -> Result<usize, NpuError>;

    /// Removes a kernel and its buffers from the NPU, which holds only a few. Its index is no longer valid.
    fn unload(&mut self, kernel: usize) -> Result<(), NpuError>;

    /// Imports memory that another device shares: queries, keys, values and outputs of dispatches, each with its size
    /// in bytes. It replaces the previously shared memory. After an error nothing is shared.
    fn share(&mut self, buffers: [(OwnedFd, u64); 4]) -> Result<(), NpuError>;

    /// One dispatch. Copies the arrays and the parameters into the buffers, syncs, runs, waits until `deadline` at
    /// most, syncs back, and copies O to `output`. The sizes of the arrays are exactly those of the job's layout: bo0
    /// to bo2, and bo3 for `output`. `Ok` means that the command completed and wrote O ([`marks`](super::marks)). The
    /// kernel's first dispatch of this kind creates its bo0 to bo3.
    ///
    /// After an error with [`Timeout`](super::error::NpuCode::Timeout), every later call fails too.
    // A dispatch takes its arrays as separate arguments. A struct of them would only be built for each call.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &mut self,
        kernel: usize,
        job: &Job,
        queries: &[u8],
        keys: &[u8],
        values: &[u8],
        output: &mut [u8],
        deadline: Duration,
    ) -> Result<(), NpuError>;

    /// A dispatch like [`attend`](NpuTransport::attend), but the arrays are in the shared buffers at these byte
    /// offsets, and the output is written there. Each offset is a multiple of [`SHARED_ALIGN`]. `Ok` means that the
    /// command completed. The caller, which has mapped the buffers, must check whether it wrote O.
    fn attend_shared(
        &mut self,
        kernel: usize,
        job: &Job,
        offsets: [u64; 4],
        deadline: Duration,
    ) -> Result<(), NpuError>;
}
