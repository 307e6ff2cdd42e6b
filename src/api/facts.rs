//! What `/status` and `/metrics` report of a loaded model and its device. The code that loads the model fills it in.

use std::time::Duration;

use serde::Serialize;
use utoipa::ToSchema;

/// A loaded model and its device, apart from what the engine reports.
pub struct Facts {
    pub layers: usize,
    /// Layers of the draft model, if there is one.
    pub draft_layers: Option<usize>,
    /// How the weights are stored.
    pub weights: String,
    pub device: String,
    pub driver: String,
    pub placements: Vec<Placed>,
    /// What the kernel driver reports of the placements.
    pub residency: String,
    pub self_test: SelfTested,
    /// Reads what changes.
    pub now: Box<dyn Fn() -> Now + Send + Sync>,
}

/// What the processes and the device report at one moment.
#[derive(Debug, Clone, Default)]
pub struct Now {
    pub memory: MemoryNow,
    /// What was submitted so far; none after the device was released.
    pub submitted: Option<Submitted>,
    /// The kernels' times since the last call; empty if kernels are not measured.
    pub kernels: Vec<KernelTime>,
    pub process: ProcessNow,
    /// The machine's energy since the model was loaded; none if it cannot be read.
    pub energy: Option<EnergyNow>,
}

/// A reading of the machine's energy.
#[derive(Debug, Clone, Copy)]
pub struct EnergyNow {
    /// What counted it: `rapl` or `amdgpu`.
    pub source: &'static str,
    pub joules: f64,
}

/// What the processes use; none for what the system does not report.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessNow {
    /// Processor time of the server, and of its device process.
    pub processor: Option<Duration>,
    pub device_processor: Option<Duration>,
    /// Files that the server has open, and may have open.
    pub open_files: Option<u64>,
    pub most_files: Option<u64>,
}

/// What the self-test of the last start found right, and the seconds that it took.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub struct SelfTested {
    /// Kernels that computed what is stored of them.
    pub kernels: usize,
    /// Layers that computed what the checkpoint holds of them; null if it holds nothing for these weights.
    #[schema(required)]
    pub layers: Option<usize>,
    pub seconds: f64,
}

/// Totals of what was submitted to the device.
#[derive(Debug, Clone, Default)]
pub struct Submitted {
    pub dispatches: u64,
    pub copies: u64,
    pub barriers: u64,
    /// Calls that the driver had no memory for at first, and took later.
    pub memory_shortages: u64,
    /// Bytes that commands declared to read or write, by class.
    pub declared: Vec<(String, u64)>,
}

/// Buffers of one class in one heap.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Placed {
    pub class: String,
    pub heap: String,
    pub buffers: usize,
    pub bytes: u64,
}

/// A heap of the device's memory. `free_bytes` is how much of it this process may still allocate by the driver's
/// budget.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct HeapNow {
    /// The heap's name, as in `placed`.
    pub heap: String,
    pub size_bytes: u64,
    pub free_bytes: u64,
}

/// Memory in use, in bytes; none for what the system does not report.
#[derive(Debug, Clone, Default)]
pub struct MemoryNow {
    pub heaps: Vec<HeapNow>,
    /// Device memory of the process, as its driver reports it.
    pub vram: Option<u64>,
    pub gtt: Option<u64>,
    /// Host memory of the process.
    pub resident: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    pub kernel: String,
    pub dispatches: u64,
    pub time: Duration,
}
