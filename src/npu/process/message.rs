//! The messages between the runner's process and the NPU's process.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::npu::contract::{Bucket, ContractError, PARAM_WORDS, Shape};
use crate::npu::error::NpuError;

/// The first message of the parent. The file of the arrays follows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// The library that calls XRT.
    pub shim: PathBuf,
    /// The folder of compiled kernels.
    pub kernels: PathBuf,
}

/// The first message of the child.
pub(super) type Opened = Result<Ready, NpuError>;

#[derive(Serialize, Deserialize)]
pub(super) struct Ready {
    pub xrt: String,
    pub device: String,
    pub is_double: bool,
    pub kernels: Vec<Kernel>,
    /// Stored kernels that are not valid: names and reasons.
    pub refused: Vec<(String, NpuError)>,
}

/// The numbers of a kernel's shape and bucket; a window of 0 = no window.
#[derive(Serialize, Deserialize)]
pub(super) struct Kernel([u32; 6]);

impl Kernel {
    pub fn new(shape: Shape, bucket: Bucket) -> Kernel {
        let window = shape.window().unwrap_or(0);
        Kernel([
            shape.head_dim(),
            shape.heads_per_group(),
            window,
            bucket.rows(),
            bucket.keys(),
            bucket.groups(),
        ])
    }

    pub fn parts(&self) -> Result<(Shape, Bucket), ContractError> {
        let [head_dim, heads_per_group, window, rows, keys, groups] = self.0;
        let window = (window > 0).then_some(window);
        let shape = Shape::new(head_dim, heads_per_group, window)?;
        let bucket = Bucket::new(rows, keys, groups)?;
        shape.fits(bucket).map(|()| (shape, bucket))
    }
}

/// A request of the parent. The child answers with [`Done`].
#[derive(Serialize, Deserialize)]
pub(super) enum Request {
    /// Shares memory from now on: the sizes of queries, keys, values and outputs in bytes. Their four files follow.
    Share([u64; 4]),
    Attend(Attend),
}

/// A job for some KV heads: dispatches that differ only in their KV heads.
#[derive(Serialize, Deserialize)]
pub(super) struct Attend {
    /// The index of the kernel in [`Ready::kernels`].
    pub kernel: usize,
    /// The parameters of each dispatch.
    pub words: [u32; PARAM_WORDS],
    pub dispatches: u32,
    /// The time limit for all dispatches together.
    pub deadline: Duration,
    /// Whether the arrays are in the shared memory, each at its start. Otherwise they are in the file.
    pub shared: bool,
}

pub(super) type Done = Result<(), NpuError>;

/// The offsets of queries, keys, values and outputs in the file of the arrays. The parts of each dispatch follow one
/// another. The file has holes, which use no memory.
pub(super) const ARRAYS: [u64; 4] = [0, 1 << 32, 2 << 32, 3 << 32];
