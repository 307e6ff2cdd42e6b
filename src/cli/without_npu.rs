//! What stands in the place of `offload.rs` in a program without the feature `npu`, whose configuration refuses every
//! `npu.mode` but `off`.

use super::error::Error;
use super::npu_start::NpuStart;
use crate::config::{Config, NpuMode};
use crate::model::model_runner::ModelRunner;
use crate::model::offload::OffloadLimits;
use crate::model::spec::ModelSpec;

pub fn planned(_: &Config, _: &ModelSpec) -> Option<OffloadLimits> {
    None
}

/// No NPU.
pub enum Npu {}

impl Npu {
    /// `unicorn bench npu` requires the NPU, whatever is configured.
    pub fn open(_: &ModelSpec, config: &Config, _: Option<&NpuStart>) -> Result<Option<Npu>, Error> {
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

    pub fn attach(self, _: &mut ModelRunner, _: &Config) -> Result<NpuStart, Error> {
        match self {}
    }
}
