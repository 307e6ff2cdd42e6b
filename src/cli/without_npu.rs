//! What stands in the place of `offload.rs` in a program without the feature `npu`, whose configuration refuses every
//! `npu.mode` but `off`.

use serde::{Deserialize, Serialize};

use super::error::Error;
use crate::checkpoint::ModelFiles;
use crate::config::Config;
use crate::model::config::Gemma3Config;
use crate::model::gemma3::Gemma3;
use crate::model::offload::OffloadLimits;

/// What became of the NPU at a load. There is no such load.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NpuStart {
    pub mode: String,
    pub device: Option<String>,
    pub xrt: Option<String>,
    pub is_double: bool,
    pub kv_heads: usize,
    pub choices: Vec<usize>,
    pub reason: Option<String>,
}

pub fn planned(_: &Config, _: &Gemma3Config) -> Option<OffloadLimits> {
    None
}

/// No NPU.
pub enum Npu {}

impl Npu {
    pub fn open(_: &ModelFiles, _: &Config) -> Result<Option<Npu>, Error> {
        Ok(None)
    }

    pub fn limits(&self) -> Option<OffloadLimits> {
        match *self {}
    }

    pub fn attach(self, _: &mut Gemma3, _: &Config) -> Result<NpuStart, Error> {
        match self {}
    }
}
