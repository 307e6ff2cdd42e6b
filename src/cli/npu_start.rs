//! What became of the NPU at a load, for `/status` and for the loads that follow.

use serde::{Deserialize, Serialize};

/// What became of the NPU at a load. A load that follows on one, after a loss or after idle time, keeps to it: the share is
/// fixed when the server starts. So answers keep their bits, as long as the NPU neither fails nor stays away.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NpuStart {
    /// `npu.mode`.
    pub mode: String,
    /// The device, as XRT names it, and XRT's version, if the NPU was opened.
    pub device: Option<String>,
    pub xrt: Option<String>,
    /// Whether the tests' double answers, and no NPU.
    pub is_double: bool,
    /// KV heads of each layer that the NPU computes.
    pub kv_heads: usize,
    /// The numbers of KV heads that there are kernels for.
    pub choices: Vec<usize>,
    /// Why the NPU is not used: the doctor's code and a sentence.
    pub reason: Option<String>,
}
