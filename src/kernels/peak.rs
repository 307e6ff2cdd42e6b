//! Measures a device's peak arithmetic rate, with multiply-adds that access no memory.

use std::sync::Arc;

use super::shaders;
use crate::gpu::{Buffer, Device, GpuError, Pipeline, Recorder};

const WORKGROUP: u32 = 256;
/// Multiply-adds of one invocation in one round.
const MACS: u64 = 4 * 8 * 4;

/// A kernel that only computes f32 multiply-adds.
pub struct Peak(Arc<Pipeline>);

impl Peak {
    pub fn new(device: &Device) -> Result<Peak, GpuError> {
        Ok(Peak(device.pipeline(&shaders::PEAK, &[])?))
    }

    /// Bytes that `workgroups` write.
    pub const fn bytes(workgroups: u32) -> u64 {
        4 * (workgroups * WORKGROUP) as u64
    }

    /// Operations of the dispatch; a multiply-add counts as two.
    pub const fn ops(workgroups: u32, rounds: u32) -> u64 {
        2 * MACS * (workgroups * WORKGROUP) as u64 * rounds as u64
    }

    /// Runs the kernel, which writes [`Peak::bytes`] to `result`. After 16 or more rounds, every word is 32.0.
    pub fn record(&self, recorder: &mut Recorder<'_>, result: &Buffer, workgroups: u32, rounds: u32) {
        let result = &result.slice(0, Peak::bytes(workgroups));
        let arguments = shaders::Peak { result, rounds, a: 0.5, b: 0.5 };
        recorder.dispatch(&self.0, &arguments, [workgroups, 1, 1]);
    }
}
