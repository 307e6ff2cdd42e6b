//! Replaces this module in a program without the feature `npu`. Its configuration refuses every `npu.mode` except
//! `off`.

use crate::cli::args;
use crate::cli::error::Error;
use crate::config::Config;
use crate::device::NpuReport;
use crate::model::model_runner::ModelRunner;
use crate::model::offload::OffloadLimits;
use crate::model::spec::ModelSpec;

pub fn planned(_: &Config, _: &ModelSpec) -> Option<OffloadLimits> {
    None
}

/// No NPU.
pub enum Npu {}

impl Npu {
    pub fn open(_: &ModelSpec, _: &Config, _: Option<&NpuReport>) -> Result<Option<Npu>, Error> {
        Ok(None)
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

pub fn bench(_: &Config, _: &args::BenchNpu) -> Result<(), Error> {
    Err(missing())
}

pub fn npu_process() -> Result<(), Error> {
    Err(missing())
}

fn missing() -> Error {
    Error::Argument("this program was built without the feature npu".into())
}
