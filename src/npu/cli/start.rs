//! Opens the NPU before a model is loaded, because a required NPU that fails must prevent the load. After the load,
//! chooses how many KV heads the NPU computes.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::error::Error;
use crate::config::{Config, NpuMode, NpuPreference, NpuSharing};
use crate::device::NpuReport;
use crate::model::load::LoadError;
use crate::model::model_runner::ModelRunner;
use crate::model::offload::{LEAST_TOKENS, MOST_TOKENS, OffloadError, OffloadLimits};
use crate::model::spec::ModelSpec;
use crate::model::{Runner, RunnerError};
use crate::npu::attention::{Offload, OffloadPolicy, OffloadWatch, not_shared};
use crate::npu::error::{NpuCode, NpuError};
use crate::npu::process::{HeadShape, NpuProcess, Start};
use crate::npu::shim::Shim;
use crate::npu::store::standard_folder;

/// Number of tokens before the tokens with which shares are measured.
const TRIAL_DEPTH: usize = 1024;
/// Layers of the measured steps: a full layer and the sliding layers before it.
const TRIAL_LAYERS: usize = 6;
/// Measured steps for each number of KV heads. The median is used.
const TRIALS: usize = 3;
/// How long a load after the first one waits for the NPU's columns. The process that had them may still be ending.
const COLUMNS: Duration = Duration::from_secs(10);

/// The folder of compiled kernels.
pub fn kernels_folder(config: &Config) -> Option<PathBuf> {
    let standard = || standard_folder(|name| std::env::var_os(name));
    config.npu.kernels.as_ref().map(PathBuf::from).or_else(standard)
}

/// The library that calls XRT.
pub fn shim(config: &Config) -> PathBuf {
    let installed = || Shim::path(&std::env::current_exe().unwrap_or_default());
    config.npu.shim.as_ref().map_or_else(installed, PathBuf::from)
}

fn limits_of(config: &Config, model: &ModelSpec) -> OffloadLimits {
    let most = model.heads().num_key_value_heads;
    OffloadLimits {
        kv_heads: config.npu.kv_heads.unwrap_or(most).min(most),
        keys: config.npu.keys,
        shared: config.npu.sharing == NpuSharing::DmaBuf,
    }
}

/// The buffers that a load of this model would reserve.
pub fn planned(config: &Config, model: &ModelSpec) -> Option<OffloadLimits> {
    (config.npu.mode != NpuMode::Off).then(|| limits_of(config, model))
}

/// The NPU of a load, or the reason why it is not used.
pub struct Npu {
    start: NpuReport,
    process: Option<NpuProcess>,
    limits: OffloadLimits,
    /// The KV heads that the first load of this model fixed.
    fixed: Option<usize>,
}

impl Npu {
    /// Opens and tests the NPU, if `npu.mode` is not off. A required NPU that cannot compute is an error. `before` is
    /// the state of the NPU at the first load of this model. An NPU that was not used then is not used now either, so
    /// that answers keep the same bits.
    pub fn open(
        model: &ModelSpec,
        config: &Config,
        before: Option<&NpuReport>,
    ) -> Result<Option<Npu>, Error> {
        if config.npu.mode == NpuMode::Off {
            return Ok(None);
        }
        let most = model.heads().num_key_value_heads;
        if let Some(wanted) = config.npu.kv_heads.filter(|wanted| *wanted > most) {
            let problem =
                format!("npu.kv_heads is {wanted}, and the model has {most} KV heads: set {most} or less");
            return Err(Error::Argument(problem));
        }
        let limits = limits_of(config, model);
        let mode = config.npu.mode.name().to_owned();
        let mut start = NpuReport { mode, in_use: true, ..NpuReport::default() };
        if let Some(before) = before.filter(|before| before.kv_heads == 0) {
            let start = before.clone();
            return Ok(Some(Npu { start, process: None, limits, fixed: None }));
        }
        let process = match process_with_columns(model, config, before.is_some()) {
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
        Ok(Some(Npu { start, process, limits, fixed: before.map(|before| before.kv_heads) }))
    }

    /// Drops the NPU if it must share memory with the GPU but the GPU does not support that.
    pub fn meet(&mut self, gpu_can_share: bool, config: &Config) -> Result<(), Error> {
        if !self.limits.shared || gpu_can_share {
            return Ok(());
        }
        self.limits.shared = false;
        if self.process.take().is_none() {
            return Ok(());
        }
        let lacks = "the GPU's driver makes no dma-bufs of its memory (VK_EXT_external_memory_dma_buf, \
                     VK_KHR_external_memory_fd and VK_EXT_queue_family_foreign)";
        refuse(config, &mut self.start, not_shared(lacks))
    }

    /// The buffers that a load reserves for the NPU, even if the NPU is not used: a load after a loss must reserve what
    /// the first load reserved.
    pub fn limits(&self) -> Option<OffloadLimits> {
        Some(self.limits)
    }

    /// Attaches the NPU to the model: it computes the configured number of KV heads, or the fastest number, which is
    /// measured.
    pub fn attach(self, model: &mut ModelRunner, config: &Config) -> Result<NpuReport, Error> {
        let Npu { mut start, process, limits, fixed } = self;
        let Some(process) = process else { return Ok(start) };
        let policy = match config.npu.mode {
            NpuMode::Require => OffloadPolicy::Require,
            NpuMode::Auto | NpuMode::Off => OffloadPolicy::Auto,
        };
        let unit = Box::new(process);
        match model.attach_offload(Offload { unit, kv_heads: limits.kv_heads, policy }) {
            Ok(()) => {}
            Err(LoadError::Offload(error)) => {
                refuse(config, &mut start, error)?;
                return Ok(start);
            }
            Err(error) => return Err(error.into()),
        }
        match choose(model, config, &start.choices, fixed) {
            Ok(kv_heads) => {
                model.set_offload_heads(kv_heads);
                // The measurements are not client requests, so they are not counted.
                model.forget_offload_counts();
                start.kv_heads = kv_heads;
                tracing::info!(
                    "npu      computes {kv_heads} of {} KV heads of prompts{}",
                    model.config().heads().num_key_value_heads,
                    if fixed.is_some() { ", as before" } else { "" }
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

/// Reads the current state of the NPU whose state after the load was `start`.
pub fn reader(start: NpuReport, model: &ModelRunner) -> Box<dyn Fn() -> NpuReport + Send> {
    let watch = model.offload_watch();
    Box::new(move || {
        let counts = watch.as_ref().map(OffloadWatch::counts).unwrap_or_default();
        let reason = counts.quarantined.or_else(|| start.reason.clone());
        NpuReport {
            in_use: reason.is_none(),
            reason,
            completed: counts.dispatches,
            tokens: counts.tokens,
            fallbacks: counts.fallbacks.into_iter().collect(),
            waited_s: counts.seconds,
            ..start.clone()
        }
    })
}

/// Stores why the NPU is not used. If it is required, that is an error.
fn refuse(config: &Config, start: &mut NpuReport, error: OffloadError) -> Result<(), Error> {
    if config.npu.mode == NpuMode::Require {
        return Err(Error::Npu { code: error.code, message: error.message });
    }
    tracing::warn!("npu      not used, the GPU computes all of the attention: {error}");
    (start.reason, start.in_use) = (Some(error.to_string()), false);
    Ok(())
}

/// Like [`process`]. If `again`, waits until the NPU's columns are free.
fn process_with_columns(model: &ModelSpec, config: &Config, again: bool) -> Result<NpuProcess, NpuError> {
    let since = Instant::now();
    loop {
        match process(model, config) {
            Err(error) if error.code == NpuCode::NoColumns && again && since.elapsed() < COLUMNS => {
                thread::sleep(Duration::from_millis(500));
            }
            result => return result,
        }
    }
}

/// Starts the NPU's process, and runs the self-test.
fn process(model: &ModelSpec, config: &Config) -> Result<NpuProcess, NpuError> {
    let Some(kernels) = kernels_folder(config) else {
        let problem = "there is no folder of kernels: neither HOME nor UNICORN_CACHE_DIR is set";
        return Err(NpuError::new(NpuCode::KernelMissing, problem));
    };
    if model.distinct_heads().len() > 1 {
        let problem =
            "the layers of this model have heads of different sizes; the NPU computes models with one size";
        return Err(NpuError::new(NpuCode::KernelMissing, problem));
    }
    let start = Start { shim: shim(config), kernels };
    let heads = HeadShape { head_dim: model.heads().head_dim, heads_per_group: model.heads().group() };
    // `/proc/self/exe` instead of the program's path: a package upgrade may have replaced the file.
    let mut command = Command::new("/proc/self/exe");
    command.arg("npu-process");
    // XRT writes lines to the standard output, which is reserved for this program's results.
    command.stdout(io::stderr().as_fd().try_clone_to_owned().map_or_else(|_| Stdio::null(), Stdio::from));
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

/// An error of the NPU from its text, `code: message`.
fn said(words: &str) -> OffloadError {
    let (code, message) = words.split_once(": ").unwrap_or((NpuCode::Process.name(), words));
    OffloadError { code: code.into(), message: message.into() }
}

/// The number of KV heads that the NPU computes: the number of the first load, or the configured number, or the number
/// with which prompts are computed fastest.
fn choose(
    model: &mut ModelRunner,
    config: &Config,
    candidates: &[usize],
    fixed: Option<usize>,
) -> Result<usize, Failure> {
    let limits = model.limits();
    let tokens = MOST_TOKENS.min(limits.max_batch_tokens).min(config.npu.keys / 2);
    let depth = TRIAL_DEPTH.min(limits.max_context.saturating_sub(tokens)).min(config.npu.keys - tokens);
    let mut time = |kv_heads: usize, trials: usize| -> Result<Tried, Failure> {
        if tokens < LEAST_TOKENS {
            return Ok(Tried::DoesNotFit);
        }
        time(model, kv_heads, (depth, tokens), trials)
    };
    let no_kernel = |which: String| {
        let message = format!(
            "no kernel computes {which} of a prompt's chunks of {tokens} tokens: `unicorn npu build-kernels` builds \
             some, and engine.prefill_chunk and npu.keys decide which are needed"
        );
        Failure::from(NpuError::new(NpuCode::KernelMissing, message))
    };
    if let Some(wanted) = fixed.or(config.npu.kv_heads) {
        if !candidates.contains(&wanted) {
            let message = format!("no kernel computes {wanted} KV heads; {candidates:?} can be computed");
            return Err(NpuError::new(NpuCode::KernelMissing, message).into());
        }
        // A number that is not measured is tried once, because there may be no kernel for it.
        return match time(wanted, 0)? {
            Tried::Unused => Err(no_kernel(format!("{wanted} KV heads"))),
            Tried::DoesNotFit | Tried::Took(_) => Ok(wanted),
        };
    }
    let Tried::Took(alone) = time(0, TRIALS)? else {
        let message =
            "the context, or engine.prefill_chunk, is too short to measure its share: set npu.kv_heads";
        return Err(OffloadError { code: "npu-unmeasured".into(), message: message.into() }.into());
    };
    let mut best: Option<(Duration, usize)> = None;
    for &kv_heads in candidates {
        let Tried::Took(took) = time(kv_heads, TRIALS)? else { continue };
        tracing::debug!("npu      {kv_heads} KV heads: {took:.2?} for a trial; the GPU alone: {alone:.2?}");
        if best.is_none_or(|(least, _)| took < least) {
            best = Some((took, kv_heads));
        }
    }
    let Some((took, kv_heads)) = best else { return Err(no_kernel("any KV head".into())) };
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

/// The result of a trial.
enum Tried {
    /// The chunk exceeds the model's limits.
    DoesNotFit,
    /// The NPU has no kernel for it.
    Unused,
    /// The median of the trials.
    Took(Duration),
}

/// Tries a chunk with `kv_heads` KV heads on the NPU: once, and then `trials` times to measure the time.
fn time(
    model: &mut ModelRunner,
    kv_heads: usize,
    (depth, tokens): (usize, usize),
    trials: usize,
) -> Result<Tried, Failure> {
    model.set_offload_heads(kv_heads);
    let completed = |model: &ModelRunner| model.offload_counts().unwrap_or_default();
    let (before, mut times) = (completed(model).dispatches, Vec::new());
    // The first step compiles and records.
    for _ in 0..=trials {
        let since = Instant::now();
        let fits = model.trial(depth, tokens, TRIAL_LAYERS).map_err(|error| match error {
            RunnerError::Coprocessor(words) => Failure::Npu(said(&words)),
            error => Failure::Gpu(error),
        })?;
        if !fits {
            return Ok(Tried::DoesNotFit);
        }
        times.push(since.elapsed());
    }
    let after = completed(model);
    if let Some(failure) = after.quarantined {
        return Err(Failure::Npu(said(&failure)));
    }
    if kv_heads > 0 && after.dispatches == before {
        return Ok(Tried::Unused);
    }
    let measured = &mut times[trials.min(1)..];
    measured.sort();
    Ok(Tried::Took(measured[measured.len() / 2]))
}
