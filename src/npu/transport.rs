//! The way to an NPU: kernels go in once, then dispatches. The shim over XRT takes it ([`super::shim`]), and so does
//! the double of the tests.
//!
//! An implementor returns from each call within a bound, or its process is to be ended from outside: a driver that
//! hangs cannot be interrupted.

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

/// The offsets in shared buffers are multiples of this, the bytes of a line of a CPU's cache: a sync moves whole lines,
/// and with them the bytes next to an array.
pub const SHARED_ALIGN: u64 = 64;

/// What answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpuFacts {
    /// The version of XRT.
    pub xrt: String,
    /// The device, as XRT names it.
    pub device: String,
    /// Whether it is the double of the tests, which computes on the CPU, and no NPU.
    pub is_double: bool,
}

pub trait NpuTransport: Send {
    fn facts(&self) -> &NpuFacts;

    /// Registers the xclbin, and makes its context, its kernel, and the buffers of its instructions and parameters.
    /// Returns the index that [`attend`](NpuTransport::attend) and [`attend_shared`](NpuTransport::attend_shared) take.
    fn load(&mut self, kernel: &KernelFiles) -> Result<usize, NpuError>;

    /// Removes a kernel and its buffers from the NPU, which has room for few. Its index is not valid any more.
    fn unload(&mut self, kernel: usize) -> Result<(), NpuError>;

    /// Imports memory that another device shares: queries, keys, values and outputs of dispatches, with the bytes of
    /// each. It takes the place of what was shared before; after an error nothing is shared.
    fn share(&mut self, buffers: [(OwnedFd, u64); 4]) -> Result<(), NpuError>;

    /// One dispatch. Copies the arrays and the parameters into the buffers, syncs, runs, waits for `deadline` at most,
    /// syncs back, and copies O to `output`. The arrays have the bytes of the job's layout exactly: bo0 to bo2, and bo3
    /// for `output`. `Ok` means that the command completed, and wrote O ([`marks`](super::marks)). The kernel's first
    /// such dispatch makes its bo0 to bo3.
    ///
    /// After an error with [`Timeout`](super::error::NpuCode::Timeout), every later call gives an error too.
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

    /// A dispatch as [`attend`](NpuTransport::attend), whose arrays lie in the shared buffers from these bytes on, and
    /// whose output is written there. Each offset is a multiple of [`SHARED_ALIGN`]. `Ok` means that the command
    /// completed; whether it wrote O is for the caller to see, who has the buffers mapped.
    fn attend_shared(
        &mut self,
        kernel: usize,
        job: &Job,
        offsets: [u64; 4],
        deadline: Duration,
    ) -> Result<(), NpuError>;
}
