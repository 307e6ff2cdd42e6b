//! What a server reports about its model's device. The device process sends these values, and `/status` and `/metrics`
//! show them.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::usage::{processor_time, resident_bytes};
use crate::gpu::placement::{Class, Placement};
use crate::gpu::{Counts, Device, DeviceInfo, DeviceKind};
use crate::model::draft::Draft;
use crate::model::memory::ChosenKv;
use crate::model::model_runner::ModelRunner;

/// The facts about a loaded model and its device that do not change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceReport {
    pub device: String,
    pub driver: String,
    pub place: Place,
    pub layers: usize,
    /// Layers of the draft model; `None` = no draft model.
    pub draft_layers: Option<usize>,
    /// The schemes of the model's weights.
    pub weights: String,
    /// The type of keys and values, and why the load chose it; `None` = it was configured.
    pub kv_dtype: String,
    pub kv_dtype_why: Option<String>,
    pub placements: Vec<Placed>,
    /// How many bytes of the device the load was allowed to use, these placements included.
    pub usable_bytes: u64,
    /// What the kernel driver reports of the placements.
    pub residency: String,
    pub self_test: SelfTested,
    /// How long the device may finish nothing before it counts as hung.
    pub hang_timeout: Duration,
    /// The state of the NPU after the load; `None` if `npu.mode` is off.
    pub npu: Option<NpuReport>,
}

impl DeviceReport {
    pub fn new(
        model: &ModelRunner,
        draft: Option<&Draft>,
        kv: ChosenKv,
        self_test: SelfTested,
        npu: Option<NpuReport>,
        usable_bytes: u64,
    ) -> Self {
        let placed = |p: &Placement| Placed {
            class: p.class.name().to_owned(),
            heap: p.heap.clone(),
            buffers: p.buffers,
            bytes: p.bytes,
        };
        let info = model.device().info();
        Self {
            device: info.name.clone(),
            driver: info.driver.clone(),
            place: Place::of(info),
            layers: model.config().layers.len(),
            draft_layers: draft.map(|draft| draft.config().layers.len()),
            weights: model.schemes().to_string(),
            kv_dtype: kv.dtype.name().to_owned(),
            kv_dtype_why: kv.why,
            placements: model.placements().iter().map(placed).collect(),
            usable_bytes,
            residency: model.residency().to_string(),
            self_test,
            hang_timeout: model.device().hang_timeout(),
            npu,
        }
    }
}

/// Where the device is in the machine.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Place {
    /// Whether the device is a discrete GPU, whose energy the processor's counters do not include.
    pub discrete: bool,
    /// The PCI address, if the driver reports one.
    pub pci: Option<String>,
}

impl Place {
    pub fn of(device: &DeviceInfo) -> Self {
        Self { discrete: device.kind == DeviceKind::Discrete, pci: device.pci.clone() }
    }
}

/// What the self-test of the last start found right, and the seconds that it took.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct SelfTested {
    /// Kernels that computed what is stored of them.
    pub kernels: usize,
    /// Layers that computed what the checkpoint holds of them; null if it holds nothing for these weights.
    #[schema(required)]
    pub layers: Option<usize>,
    pub seconds: f64,
}

/// Buffers of one class in one heap.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Placed {
    pub class: String,
    pub heap: String,
    pub buffers: usize,
    pub bytes: u64,
}

/// What the device and its process report at one moment, with totals since the process started.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DeviceState {
    /// The process's id.
    pub process: u32,
    pub heaps: Vec<HeapReport>,
    /// Bytes of device memory of the process, as its driver reports them.
    pub vram: Option<u64>,
    pub gtt: Option<u64>,
    /// Bytes of host memory of the process.
    pub resident: Option<u64>,
    /// Processor time of the process.
    pub processor: Duration,
    pub dispatches: u64,
    pub copies: u64,
    pub barriers: u64,
    /// Calls for which the driver had no memory at first, and which succeeded later.
    pub memory_shortages: u64,
    /// Time in which the device computed steps, by its own clock; `None` if its queue has no clock.
    pub busy: Option<Duration>,
    /// How long submits were delayed for `engine.courtesy`.
    pub rested: Duration,
    /// Bytes that commands declared as read or written, by class.
    pub declared: Vec<(String, u64)>,
    /// The kernels' times since the last reading; empty if kernels are not measured.
    pub kernels: Vec<KernelTime>,
    /// `None` if `npu.mode` is off.
    pub npu: Option<NpuReport>,
}

impl DeviceState {
    /// Reads the state. This resets the kernels' times.
    pub(super) fn read(device: &Device, npu: Option<NpuReport>) -> Self {
        let used = device.memory_use();
        let Counts { dispatches, copies, barriers, declared } = device.counts();
        let heaps = device.machine().heaps.into_iter();
        let heap = |heap: crate::gpu::placement::Heap| HeapReport {
            heap: heap.name,
            size_bytes: heap.size,
            free_bytes: heap.free,
            read_bytes_per_s: heap.read.map(|read| read.bytes_per_s),
        };
        Self {
            process: std::process::id(),
            heaps: heaps.map(heap).collect(),
            vram: used.map(|used| used.vram),
            gtt: used.map(|used| used.gtt),
            resident: resident_bytes().0,
            processor: processor_time(),
            dispatches,
            copies,
            barriers,
            memory_shortages: device.memory_shortages(),
            busy: device.busy(),
            rested: device.rested(),
            declared: Class::ALL.map(|class| (class.name().to_owned(), declared[class as usize])).into(),
            kernels: kernel_times(device),
            npu,
        }
    }
}

/// A heap of the device's memory. `free_bytes` is how much of it this process may still allocate by the driver's
/// budget.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HeapReport {
    /// The heap's name, as in `placed`.
    pub heap: String,
    pub size_bytes: u64,
    pub free_bytes: u64,
    /// How fast the device read weights from the heap when this was measured; null if it was not measured.
    #[schema(required)]
    pub read_bytes_per_s: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelTime {
    pub kernel: String,
    pub dispatches: u64,
    pub time: Duration,
}

/// The kernels' times since the last call, the longest first; empty if the device does not measure them.
pub fn kernel_times(device: &Device) -> Vec<KernelTime> {
    let each = device.take_profile().kernels.into_iter();
    let time = |(kernel, (dispatches, ns))| KernelTime { kernel, dispatches, time: Duration::from_nanos(ns) };
    let mut kernels: Vec<_> = each.map(time).collect();
    kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.time));
    kernels
}

/// A metric of `/metrics`, with its samples. Each sample has at most one label, a name and a value.
#[derive(Debug, Clone)]
pub struct Metric {
    pub name: &'static str,
    pub kind: &'static str,
    pub help: &'static str,
    pub samples: Vec<(Option<(&'static str, String)>, f64)>,
}

/// What the NPU does, and did since the server started.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// The numbers of KV heads that there are kernels for. Only the process that opened the NPU knows them.
    #[serde(skip)]
    #[schema(ignore)]
    pub choices: Vec<usize>,
}
