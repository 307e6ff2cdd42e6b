//! What there is to tell of a loaded model and its device: whoever loads the model says it.

use std::time::Duration;

use serde::Serialize;
use utoipa::ToSchema;

/// What there is to tell of a loaded model and its device beside what the engine tells.
pub struct Facts {
    pub layers: usize,
    /// Layers of the model that guesses, where there is one.
    pub draft_layers: Option<usize>,
    /// How its weights are stored.
    pub weights: String,
    pub device: String,
    pub driver: String,
    pub placements: Vec<Placed>,
    /// What the kernel said of them.
    pub residency: String,
    /// Reads what is held now.
    pub memory: Box<dyn Fn() -> MemoryNow + Send + Sync>,
    /// Reads what was submitted so far; none once the device was given back.
    pub submitted: Box<dyn Fn() -> Option<Submitted> + Send + Sync>,
    /// Takes the kernels' times since the last call; none where they are not measured.
    pub kernels: Box<dyn Fn() -> Vec<KernelTime> + Send + Sync>,
}

/// What the device was given to do.
#[derive(Debug, Clone, Default)]
pub struct Submitted {
    pub dispatches: u64,
    pub copies: u64,
    pub barriers: u64,
    /// By class, bytes that commands declared to read or write.
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

/// A heap of the device's memory, and what this process may still take of it by the driver's budget. Bytes.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct HeapNow {
    /// Its name, as in `placed`.
    pub heap: String,
    pub size_bytes: u64,
    pub free_bytes: u64,
}

/// Bytes; none where nobody tells.
#[derive(Debug, Clone, Default)]
pub struct MemoryNow {
    pub heaps: Vec<HeapNow>,
    /// What the process holds of the device's memory, as its driver says.
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
