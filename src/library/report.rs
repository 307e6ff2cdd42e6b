//! What `/status` and `/metrics` report about a loaded model and its device. The code that loads the model provides it.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use utoipa::ToSchema;

use crate::device::{DeviceReport, DeviceState, Metric, NpuReport};

/// A loaded model and its device, apart from what the engine reports.
pub struct ModelReport {
    pub device: DeviceReport,
    /// Reads the values that change.
    pub live: Box<dyn Fn() -> LiveReport + Send + Sync>,
}

impl ModelReport {
    /// The device memory of the model.
    pub fn bytes(&self) -> u64 {
        self.device.placements.iter().map(|placed| placed.bytes).sum()
    }
}

/// What the files of a model say about it, for lists of models.
#[derive(Debug, Clone, Default)]
pub struct ModelCard {
    /// `safetensors`, `gguf` or `native`.
    pub format: String,
    pub architecture: String,
    pub parameters: u64,
    /// How most weights are stored.
    pub quantization: String,
    pub bytes: u64,
    /// When the newest file was changed.
    pub modified: Option<SystemTime>,
    /// 64 hexadecimal digits that change when a file changes.
    pub digest: String,
    /// The most tokens that the model was trained for.
    pub context: usize,
    pub hidden_size: usize,
    pub layers: usize,
    pub vocab_size: usize,
    /// The chat template's text.
    pub template: String,
    /// Whether the model can think before it answers.
    pub can_think: bool,
    /// Whether the model takes images.
    pub takes_images: bool,
}

/// What the server, its device and the machine report at one moment; `None` = the system does not report it.
#[derive(Debug, Clone, Default)]
pub struct LiveReport {
    /// `None` if the device process does not answer.
    pub device: Option<DeviceState>,
    /// Bytes of host memory of the server and its device process together.
    pub resident: Option<u64>,
    /// Processor time of the server.
    pub processor: Duration,
    /// Files that the server has open, and the limit of their number.
    pub open_files: Option<u64>,
    pub most_files: Option<u64>,
    /// `None` if no bound is configured.
    pub courtesy: Option<CourtesyReport>,
    /// The machine's energy since the model was loaded.
    pub energy: Option<EnergyReport>,
    /// The section `npu` of `/status`; `None` if `npu.mode` is off, and until a device process has answered.
    pub npu: Option<NpuReport>,
    /// More metrics, which only `/metrics` shows.
    pub metrics: Vec<Metric>,
}

/// The bound on the share of the device's time while a user is active at the machine.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[schema(as = Courtesy)]
pub struct CourtesyReport {
    /// The share of the device's time that steps take at most while the bound holds.
    pub share: f64,
    /// Whether the bound holds now, because a user is active at the machine.
    pub holds: bool,
    /// Whether the active sessions of this machine can be read. If not, the bound never holds.
    pub sessions_known: bool,
}

/// A reading of the machine's energy.
#[derive(Debug, Clone, Copy)]
pub struct EnergyReport {
    /// What counted it: `rapl` or `amdgpu`.
    pub source: &'static str,
    pub joules: f64,
}
