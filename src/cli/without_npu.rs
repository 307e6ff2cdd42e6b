//! What stands in the place of `offload.rs` in a program without the feature `npu`, whose configuration refuses every
//! `npu.mode` but `off`.

use super::error::Error;
use crate::config::{Config, NpuMode};
use crate::device::NpuReport;
use crate::model::config::ModelConfig;
use crate::model::model_runner::ModelRunner;
use crate::model::offload::OffloadLimits;

pub fn planned(_: &Config, _: &ModelConfig) -> Option<OffloadLimits> {
    None
}

/// No NPU.
pub enum Npu {}

impl Npu {
    /// `unicorn bench npu` requires the NPU, whatever is configured.
    pub fn open(_: &ModelConfig, config: &Config, _: Option<&NpuReport>) -> Result<Option<Npu>, Error> {
        match config.npu.mode {
            NpuMode::Off => Ok(None),
            _ => Err(Error::Argument("this program was built without the feature npu".into())),
        }
    }

    pub fn meet(&mut self, _: bool, _: &Config) -> Result<(), Error> {
        match *self {}
    }

    pub fn limits(&self) -> Option<OffloadLimits> {
        match *self {}
    }

    pub fn attach(self, _: &mut ModelRunner, _: &Config) -> Result<NpuReport, Error> {
        match self {}
    }
}

/// Reads the present state of the NPU, which a process without the feature never opens.
pub fn reader(start: NpuReport, _: &ModelRunner) -> Box<dyn Fn() -> NpuReport + Send> {
    Box::new(move || start.clone())
}
