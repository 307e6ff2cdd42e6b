//! The facts about the loaded model that `/status` and `/metrics` report, with callbacks for the values that change.

use std::sync::Arc;

use super::super::load::{Model, Profiler};
use super::super::process::resident_bytes;
use crate::api::{Facts, HeapNow, KernelTime, MemoryNow, Placed, Submitted};
use crate::config::Config;
use crate::gpu::Counts;
use crate::gpu::placement::{Class, Heap, Placement};

pub fn collect(model: &Model, config: &Config) -> Facts {
    let placed = |p: &Placement| Placed {
        class: p.class.name().to_owned(),
        heap: p.heap.clone(),
        buffers: p.buffers,
        bytes: p.bytes,
    };
    // Weak references, so that these callbacks do not keep the device alive when the engine ends.
    let (device, timed) = (Arc::downgrade(model.runner.device()), Arc::downgrade(model.runner.device()));
    let memory_device = device.clone();
    let memory = move || {
        let device = memory_device.upgrade();
        let used = device.as_ref().and_then(|device| device.memory_use());
        let (vram, gtt) = (used.map(|used| used.vram), used.map(|used| used.gtt));
        let heap = |heap: Heap| HeapNow { heap: heap.name, size_bytes: heap.size, free_bytes: heap.free };
        let heaps = device.into_iter().flat_map(|device| device.machine().heaps).map(heap).collect();
        MemoryNow { heaps, vram, gtt, resident: resident_bytes().0 }
    };
    let counted = device.clone();
    let submitted = move || {
        let counts = counted.upgrade()?.counts();
        let declared = Class::ALL.map(|class| (class.name().to_owned(), counts.declared[class as usize]));
        let Counts { dispatches, copies, barriers, .. } = counts;
        Some(Submitted { dispatches, copies, barriers, declared: declared.into() })
    };
    let kernels = move || {
        let each = timed.upgrade().map(|device| Profiler(device).take()).into_iter().flatten();
        each.map(|(kernel, dispatches, time)| KernelTime { kernel, dispatches, time }).collect()
    };
    Facts {
        layers: model.runner.config().num_hidden_layers,
        draft_layers: model.draft.as_ref().map(|draft| draft.config().num_hidden_layers),
        weights: config.model.quantize.to_string(),
        device: model.device.name.clone(),
        driver: model.device.driver.clone(),
        placements: model.runner.placements().iter().map(placed).collect(),
        residency: model.runner.residency().to_string(),
        memory: Box::new(memory),
        submitted: Box::new(submitted),
        kernels: Box::new(kernels),
    }
}
