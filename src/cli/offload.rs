//! The NPU's part in the attention of prompts: opens the NPU before a model is loaded, since that may refuse the start,
//! and gives the model its share behind the load.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::Error;
use crate::checkpoint::ModelFiles;
use crate::config::{Config, NpuMode, NpuPreference};
use crate::model::config::Gemma3Config;
use crate::model::gemma3::Gemma3;
use crate::model::npu_process::{HeadShape, NpuProcess, Start};
use crate::model::offload::{LEAST_TOKENS, Offload, OffloadError, OffloadLimits, OffloadPolicy};
use crate::model::{Runner, RunnerError};
use crate::npu::error::{NpuCode, NpuError};
use crate::npu::shim::Shim;
use crate::npu::store::standard_folder;

/// Tokens of the prompt that shares are measured with, and the tokens before them.
const TRIAL_TOKENS: usize = 256;
const TRIAL_DEPTH: usize = 1024;
/// Layers of the measured steps: a full layer and the sliding layers before it.
const TRIAL_LAYERS: usize = 6;
/// Measured steps for each number of KV heads. The median counts.
const TRIALS: usize = 3;

/// What became of the NPU at a load.
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

/// The folder of compiled kernels.
pub fn kernels_folder(config: &Config) -> Option<PathBuf> {
    let standard = || standard_folder(|name| std::env::var_os(name));
    config.npu.kernels.as_ref().map(PathBuf::from).or_else(standard)
}

/// The library that calls XRT.
pub fn shim(config: &Config) -> PathBuf {
    let beside = || Shim::path(&std::env::current_exe().unwrap_or_default());
    config.npu.shim.as_ref().map_or_else(beside, PathBuf::from)
}

fn limits_of(config: &Config, model: &Gemma3Config) -> OffloadLimits {
    let most = model.num_key_value_heads;
    OffloadLimits { kv_heads: config.npu.kv_heads.unwrap_or(most).min(most), keys: config.npu.keys }
}

/// The buffers that a load of this model would reserve.
pub fn planned(config: &Config, model: &Gemma3Config) -> Option<OffloadLimits> {
    (config.npu.mode != NpuMode::Off).then(|| limits_of(config, model))
}

/// A load's NPU, which is open or gave a reason.
pub struct Npu {
    start: NpuStart,
    process: Option<NpuProcess>,
    limits: OffloadLimits,
}

impl Npu {
    /// Opens the NPU and tests it, if one is wanted. An NPU that is required and cannot compute is an error.
    pub fn open(files: &ModelFiles, config: &Config) -> Result<Option<Npu>, Error> {
        if config.npu.mode == NpuMode::Off {
            return Ok(None);
        }
        let (model, _) = Gemma3Config::load(files)?;
        let limits = limits_of(config, &model);
        let mut start = NpuStart {
            mode: config.npu.mode.name().to_owned(),
            device: None,
            xrt: None,
            is_double: false,
            kv_heads: 0,
            choices: Vec::new(),
            reason: None,
        };
        let process = match process(&model, config) {
            Ok(process) => Some(process),
            Err(error) => {
                refuse(config, &mut start, error.into())?;
                None
            }
        };
        if let Some(process) = &process {
            let facts = process.facts();
            (start.device, start.xrt) = (Some(facts.device.clone()), Some(facts.xrt.clone()));
            (start.is_double, start.choices) = (facts.is_double, process.kv_head_counts(limits.kv_heads));
            if facts.is_double {
                tracing::warn!("npu      the tests' double stands in for an NPU: it computes on the CPU");
            }
        }
        Ok(Some(Npu { start, process, limits }))
    }

    /// The buffers that a load reserves for the NPU, whether it is there or not: a load after a loss must find the room
    /// that the first one had, even if the NPU comes or goes.
    pub fn limits(&self) -> Option<OffloadLimits> {
        Some(self.limits)
    }

    /// Gives the model's prompts to the NPU: as many KV heads as configured, or as a measurement finds best.
    pub fn attach(self, model: &mut Gemma3, config: &Config) -> Result<NpuStart, Error> {
        let Npu { mut start, process, limits } = self;
        let Some(process) = process else { return Ok(start) };
        let policy = match config.npu.mode {
            NpuMode::Require => OffloadPolicy::Require,
            NpuMode::Auto | NpuMode::Off => OffloadPolicy::Auto,
        };
        model.attach_offload(Offload { unit: Box::new(process), kv_heads: limits.kv_heads, policy })?;
        match choose(model, config, &start.choices) {
            Ok(kv_heads) => {
                model.set_offload_heads(kv_heads);
                start.kv_heads = kv_heads;
                tracing::info!(
                    "npu      computes {kv_heads} of {} KV heads of prompts",
                    model.config().num_key_value_heads
                );
            }
            Err(Failure::Npu(error)) => {
                model.detach_offload();
                refuse(config, &mut start, error)?;
            }
            Err(Failure::Gpu(error)) => return Err(error.into()),
        }
        Ok(start)
    }
}

/// Notes why the NPU is not used. Where it is required, that is an error.
fn refuse(config: &Config, start: &mut NpuStart, error: OffloadError) -> Result<(), Error> {
    if config.npu.mode == NpuMode::Require {
        return Err(Error::Npu { code: error.code, message: error.message });
    }
    tracing::warn!("npu      not used, the GPU computes all of the attention: {error}");
    start.reason = Some(error.to_string());
    Ok(())
}

/// Starts the NPU's process, and has it pass the self-test.
fn process(model: &Gemma3Config, config: &Config) -> Result<NpuProcess, NpuError> {
    let Some(kernels) = kernels_folder(config) else {
        let problem = "there is no folder of kernels: neither HOME nor UNICORN_CACHE_DIR is set";
        return Err(NpuError::new(NpuCode::KernelMissing, problem));
    };
    let start = Start { shim: shim(config), kernels };
    let heads = HeadShape {
        head_dim: model.head_dim,
        heads_per_group: model.num_attention_heads / model.num_key_value_heads,
    };
    // A package that was upgraded meanwhile has put another program at this one's path.
    let mut command = Command::new("/proc/self/exe");
    command.arg("npu-process");
    if let Some(format) = config.log.format {
        command.env("UNICORN_LOG_FORMAT", format.name());
    }
    let deadline = Duration::from_millis(config.npu.deadline_ms);
    let since = Instant::now();
    let mut process = NpuProcess::start(command, &start, heads, config.npu.keys, deadline, &Arc::default())?;
    let kernels = process.self_test()?;
    let facts = process.facts();
    tracing::info!(
        "npu      {}, XRT {}: self-test {kernels} kernels in {:.2} s",
        facts.device,
        facts.xrt,
        since.elapsed().as_secs_f64()
    );
    Ok(process)
}

/// Why a share was not measured.
enum Failure {
    Npu(OffloadError),
    Gpu(RunnerError),
}

impl<E: Into<OffloadError>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Npu(error.into())
    }
}

/// An error of the NPU from its words, `code: message`.
fn said(words: &str) -> OffloadError {
    let (code, message) = words.split_once(": ").unwrap_or((NpuCode::Process.name(), words));
    OffloadError { code: code.into(), message: message.into() }
}

/// The number of KV heads that the NPU gets: that with which prompts are computed fastest.
fn choose(model: &mut Gemma3, config: &Config, candidates: &[usize]) -> Result<usize, Failure> {
    if let Some(wanted) = config.npu.kv_heads {
        let wanted = wanted.min(model.config().num_key_value_heads);
        if candidates.contains(&wanted) {
            return Ok(wanted);
        }
        let message =
            format!("no kernel computes npu.kv_heads = {wanted} KV heads; {candidates:?} can be computed");
        return Err(NpuError::new(NpuCode::KernelMissing, message).into());
    }
    let limits = model.limits();
    let tokens = TRIAL_TOKENS.min(limits.max_batch_tokens).min(config.npu.keys / 2);
    let depth = TRIAL_DEPTH.min(limits.max_context.saturating_sub(tokens)).min(config.npu.keys - tokens);
    let alone = if tokens < LEAST_TOKENS { None } else { time(model, 0, depth, tokens)? };
    let Some(alone) = alone else {
        let message =
            "the context, or engine.prefill_chunk, is too short to measure its share: set npu.kv_heads";
        return Err(OffloadError { code: "npu-unmeasured".into(), message: message.into() }.into());
    };
    let mut best: Option<(Duration, usize)> = None;
    for &kv_heads in candidates {
        let Some(took) = time(model, kv_heads, depth, tokens)? else { continue };
        tracing::debug!("npu      {kv_heads} KV heads: {took:.2?} for a trial; the GPU alone: {alone:.2?}");
        if best.is_none_or(|(least, _)| took < least) {
            best = Some((took, kv_heads));
        }
    }
    let Some((took, kv_heads)) = best else {
        return Err(NpuError::new(NpuCode::KernelMissing, "no kernel computes a prompt of this model").into());
    };
    let must = config.npu.mode == NpuMode::Require || config.npu.prefer == NpuPreference::Energy;
    if took > alone && !must {
        return Err(Failure::Npu(OffloadError {
            code: "npu-slower".into(),
            message: format!(
                "prompts are slower with it: {took:.2?} for a trial with {kv_heads} KV heads on the NPU, {alone:.2?} \
                 without (npu.prefer = \"energy\" uses it nevertheless)"
            ),
        }));
    }
    Ok(kv_heads)
}

/// The time of a chunk with so many KV heads on the NPU; none if it does not fit, or the NPU has no kernel for it.
fn time(
    model: &mut Gemma3,
    kv_heads: usize,
    depth: usize,
    tokens: usize,
) -> Result<Option<Duration>, Failure> {
    model.set_offload_heads(kv_heads);
    let completed = |model: &Gemma3| model.offload_counts().unwrap_or_default();
    let (before, mut times) = (completed(model).dispatches, Vec::new());
    // The first step compiles and records.
    for _ in 0..=TRIALS {
        let since = Instant::now();
        let fits = model.trial(depth, tokens, TRIAL_LAYERS).map_err(|error| match error {
            RunnerError::Offload(words) => Failure::Npu(said(&words)),
            error => Failure::Gpu(error),
        })?;
        if !fits {
            return Ok(None);
        }
        times.push(since.elapsed());
    }
    let after = completed(model);
    if let Some(failure) = after.quarantined {
        return Err(Failure::Npu(said(&failure)));
    }
    if kv_heads > 0 && after.dispatches == before {
        return Ok(None);
    }
    times.remove(0);
    times.sort();
    Ok(Some(times[TRIALS / 2]))
}
