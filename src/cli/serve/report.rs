//! The facts about the loaded model that `/status` and `/metrics` report, with callbacks for the values that change.

use std::sync::Arc;

use rustix::process::{Resource, getrlimit};

use super::courtesy::CourtesyWatch;
use super::device::Observer;
use crate::api::{
    EnergyReport, HeapReport, KernelTime, LiveReport, MemoryReport, ModelReport, NpuReport, Placed,
    ProcessReport, SelfTested, Submitted,
};
use crate::cli::device_process::{DeviceFacts, Observed};
use crate::cli::energy::Meter;
use crate::cli::npu_start::NpuStart;
use crate::cli::process::{open_files, processor_time, resident_bytes};
use crate::engine::EnergyCounter as _;
use crate::model::offload::OffloadCounts;

pub fn collect(
    layers: usize,
    device: DeviceFacts,
    observer: &Observer,
    courtesy: &CourtesyWatch,
    meter: Option<Arc<Meter>>,
) -> ModelReport {
    let placed = |p: crate::cli::device_process::Placed| Placed {
        class: p.class,
        heap: p.heap,
        buffers: p.buffers,
        bytes: p.bytes,
    };
    let (observer, courtesy) = (observer.clone(), courtesy.clone());
    let now = move || {
        let courtesy = courtesy.now();
        let device = observer.observe(true);
        let own = resident_bytes().0;
        // The sum of the server process and the device process.
        let resident = device.as_ref().map_or(own, |now| Some(own? + now.resident?));
        let device_processor = device.as_ref().map(|now| now.processor);
        let most_files = getrlimit(Resource::Nofile).current;
        let processor = Some(processor_time());
        let process = ProcessReport { processor, device_processor, open_files: open_files(), most_files };
        let read =
            |meter: &Arc<Meter>| Some(EnergyReport { source: meter.source(), joules: meter.counted()? });
        let energy = meter.as_ref().and_then(read);
        let npu = observer.npu().map(|(start, counts)| npu_now(start, counts, device.is_some()));
        let Some(device) = device else {
            let memory = MemoryReport { resident, ..MemoryReport::default() };
            return LiveReport { memory, process, courtesy, energy, npu, ..LiveReport::default() };
        };
        let heap = |(heap, size_bytes, free_bytes)| HeapReport { heap, size_bytes, free_bytes };
        let heaps = device.heaps.into_iter().map(heap).collect();
        let kernel = |(kernel, dispatches, time)| KernelTime { kernel, dispatches, time };
        let Observed { vram, gtt, .. } = device;
        let submitted = Submitted {
            dispatches: device.dispatches,
            copies: device.copies,
            barriers: device.barriers,
            memory_shortages: device.memory_shortages,
            declared: device.declared,
            busy: device.busy,
            rested: device.rested,
        };
        LiveReport {
            memory: MemoryReport { heaps, vram, gtt, resident },
            submitted: Some(submitted),
            kernels: device.kernels.into_iter().map(kernel).collect(),
            process,
            courtesy,
            energy,
            npu,
        }
    };
    ModelReport {
        layers,
        draft_layers: device.draft_layers,
        weights: device.schemes,
        device: device.device,
        driver: device.driver,
        placements: device.placements.into_iter().map(placed).collect(),
        residency: device.residency,
        self_test: SelfTested {
            kernels: device.self_test.kernels,
            layers: device.self_test.layers,
            seconds: device.self_test.seconds,
        },
        live: Box::new(now),
    }
}

/// The present state and the counts of the NPU. `answers`: whether the device process has just answered.
fn npu_now(start: NpuStart, counts: OffloadCounts, answers: bool) -> NpuReport {
    const SILENT: &str =
        "the process with the model is not running or does not answer: these are its last known counts";
    let NpuStart { mode, device, xrt, is_double, kv_heads, reason, .. } = start;
    let reason = if answers { counts.quarantined.or(reason) } else { Some(SILENT.into()) };
    NpuReport {
        mode,
        in_use: reason.is_none(),
        reason,
        device,
        xrt,
        is_double,
        kv_heads,
        completed: counts.dispatches,
        tokens: counts.tokens,
        fallbacks: counts.fallbacks.into_iter().collect(),
        waited_s: counts.seconds,
    }
}
