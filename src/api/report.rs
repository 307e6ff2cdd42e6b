//! What `/status` and `/metrics` report of a loaded model and its device. The code that loads the model fills it in.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use utoipa::ToSchema;

/// A loaded model and its device, apart from what the engine reports.
pub struct ModelReport {
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
    pub live: Box<dyn Fn() -> LiveReport + Send + Sync>,
}

/// What the processes and the device report at one moment.
#[derive(Debug, Clone, Default)]
pub struct LiveReport {
    pub memory: MemoryReport,
    /// What was submitted so far; none after the device was released.
    pub submitted: Option<Submitted>,
    /// The kernels' times since the last call; empty if kernels are not measured.
    pub kernels: Vec<KernelTime>,
    pub process: ProcessReport,
    /// None if no bound is configured.
    pub courtesy: Option<CourtesyReport>,
    /// The machine's energy since the model was loaded; none if it cannot be read.
    pub energy: Option<EnergyReport>,
    /// None if `npu.mode` is off, and until a device process has answered.
    pub npu: Option<NpuReport>,
}

/// What the NPU does, and did since the server started.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Npu)]
pub struct NpuReport {
    /// `npu.mode`: `auto` or `require`.
    pub mode: String,
    /// Whether prompts' attention goes to the NPU now.
    pub in_use: bool,
    /// Why it does not: the doctor's code and a sentence, or that the model's process does not answer; null if it does.
    #[schema(required)]
    pub reason: Option<String>,
    /// The device, as XRT names it, and XRT's version; null if it was not opened.
    #[schema(required)]
    pub device: Option<String>,
    #[schema(required)]
    pub xrt: Option<String>,
    /// Whether the tests' double answers, which computes on the CPU, and no NPU.
    pub is_double: bool,
    /// KV heads of each layer whose attention of prompts the NPU computes.
    pub kv_heads: usize,
    /// Attention of a layer that the NPU completed, and whose result was used; and the tokens of its rows.
    pub completed: u64,
    pub tokens: u64,
    /// Failures that the GPU stepped in for, by the doctor's code.
    pub fallbacks: BTreeMap<String, u64>,
    /// Time for which steps waited for the NPU, in seconds.
    pub waited_s: f64,
}

/// The bound on the share of the device's time while somebody works at the machine.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[schema(as = Courtesy)]
pub struct CourtesyReport {
    /// The share of the device's time that steps take at most while the bound holds.
    pub share: f64,
    /// Whether the bound holds now, because somebody works at the machine.
    pub holds: bool,
    /// Whether this machine tells who works at it. If it does not, the bound never holds.
    pub sessions_known: bool,
}

/// A reading of the machine's energy.
#[derive(Debug, Clone, Copy)]
pub struct EnergyReport {
    /// What counted it: `rapl` or `amdgpu`.
    pub source: &'static str,
    pub joules: f64,
}

/// What the processes use; none for what the system does not report.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessReport {
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
    /// Time in which the device computed steps, by its own clock; none if its queue has no clock.
    pub busy: Option<Duration>,
    /// Time for which submits were held back, so that others have the device.
    pub rested: Duration,
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
pub struct HeapReport {
    /// The heap's name, as in `placed`.
    pub heap: String,
    pub size_bytes: u64,
    pub free_bytes: u64,
}

/// Memory in use, in bytes; none for what the system does not report.
#[derive(Debug, Clone, Default)]
pub struct MemoryReport {
    pub heaps: Vec<HeapReport>,
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
