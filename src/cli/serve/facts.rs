//! The facts about the loaded model that `/status` and `/metrics` report, with callbacks for the values that change.

use super::device::Observer;
use crate::api::{Facts, HeapNow, KernelTime, MemoryNow, Placed, SelfTested, Submitted};
use crate::cli::device_process::{DeviceFacts, Observed};
use crate::cli::process::resident_bytes;
use crate::config::Config;

pub fn collect(layers: usize, device: DeviceFacts, observer: &Observer, config: &Config) -> Facts {
    let placed = |p: crate::cli::device_process::Placed| Placed {
        class: p.class,
        heap: p.heap,
        buffers: p.buffers,
        bytes: p.bytes,
    };
    let (memory_now, counted, timed) = (observer.clone(), observer.clone(), observer.clone());
    let memory = move || {
        let now = memory_now.observe(false);
        let own = resident_bytes().0;
        // The sum of both processes.
        let resident = now.as_ref().map_or(own, |now| Some(own? + now.resident?));
        let (vram, gtt) = now.as_ref().map_or((None, None), |now| (now.vram, now.gtt));
        let heap = |(heap, size_bytes, free_bytes)| HeapNow { heap, size_bytes, free_bytes };
        MemoryNow {
            heaps: now.into_iter().flat_map(|now| now.heaps).map(heap).collect(),
            vram,
            gtt,
            resident,
        }
    };
    let submitted = move || {
        let now = counted.observe(false)?;
        let Observed { dispatches, copies, barriers, memory_shortages, declared, .. } = now;
        Some(Submitted { dispatches, copies, barriers, memory_shortages, declared })
    };
    let kernels = move || {
        let each = timed.observe(true).into_iter().flat_map(|now| now.kernels);
        each.map(|(kernel, dispatches, time)| KernelTime { kernel, dispatches, time }).collect()
    };
    Facts {
        layers,
        draft_layers: device.draft_layers,
        weights: config.model.quantize.to_string(),
        device: device.device,
        driver: device.driver,
        placements: device.placements.into_iter().map(placed).collect(),
        residency: device.residency,
        self_test: SelfTested {
            kernels: device.self_test.kernels,
            layers: device.self_test.layers,
            seconds: device.self_test.seconds,
        },
        memory: Box::new(memory),
        submitted: Box::new(submitted),
        kernels: Box::new(kernels),
    }
}
