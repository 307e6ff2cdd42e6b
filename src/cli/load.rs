//! Loads a model onto a device: files, tokenizer, device, weights, engine. No other file of the commands does.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::loading::Loading;
use super::npu_start::NpuStart;
use super::offload::Npu;
use super::process::resident_bytes;
use super::progress::Bar;
use super::terminal::bytes;
use crate::checkpoint::ModelFiles;
use crate::config::{self, Config};
use crate::engine::{EnergyCounter, Engine, EngineConfig, EngineHandle, SchedulerConfig};
use crate::gpu::placement::{Limits, Machine, Placement};
use crate::gpu::{self, Device, DeviceInfo, DeviceKind, DevicePolicy};
use crate::model::config::{Gemma3Config, GenerationConfig};
use crate::model::draft::{self, Draft, Drafted};
use crate::model::gemma3::{Gemma3, Loaded};
pub use crate::model::load::Source;
use crate::model::load::{LoadError, LoadOptions, Progress};
use crate::model::{self, Runner, SamplingOptions, tune};
use crate::session::Service;
use crate::tensor::Precision;
use crate::text::{ChatFiles, ChatTemplate, Tokenizer};

/// Longest wait for the engine to give the device back.
const ENGINE_END: Duration = Duration::from_secs(10);
const DEMO_NAME: &str = "unicorn-demo";

/// The small model inside the binary.
pub const DEMO: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../../models/demo/config.json")),
    ("generation_config.json", include_bytes!("../../models/demo/generation_config.json")),
    ("model.safetensors", include_bytes!("../../models/demo/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../models/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../models/demo/tokenizer_config.json")),
];

/// The files of the configured model, or of the demo model if none is configured.
pub fn files(model: &config::Model) -> Result<ModelFiles, Error> {
    match &model.path {
        Some(path) => files_at(path.as_ref(), model),
        None => {
            let misplaced = [("config", &model.config), ("tokenizer", &model.tokenizer)];
            if let Some((name, Some(path))) = misplaced.into_iter().find(|(_, path)| path.is_some()) {
                return Err(Error::Argument(format!(
                    "model.{name} is {path}, and no model is named that it belongs to; give one with --model (model.path)"
                )));
            }
            tracing::warn!(
                "no model was given: this is the small demo model in the binary (give one with --model)"
            );
            Ok(demo_files())
        }
    }
}

/// The files of the model at `path`. `model` may name other places for the config and the tokenizer.
pub fn files_at(path: &Path, model: &config::Model) -> Result<ModelFiles, Error> {
    let mut files = ModelFiles::open(path)?;
    if let Some(path) = &model.config {
        files = files.with_config(path.as_ref())?;
    }
    if let Some(path) = &model.tokenizer {
        files = files.with_tokenizer(path.as_ref())?;
    }
    Ok(files)
}

/// The files of the demo model.
pub fn demo_files() -> ModelFiles {
    ModelFiles::embedded(DEMO_NAME, DEMO)
}

/// What the small files of a model hold: everything that a server needs but the weights.
pub struct Texts {
    pub tokenizer: Tokenizer,
    pub config: Gemma3Config,
    template: ChatTemplate,
    defaults: SamplingOptions,
    stop_token_ids: Vec<u32>,
}

/// A loaded model with its small files.
pub struct Model {
    pub runner: Gemma3,
    pub draft: Option<Draft>,
    /// What became of the NPU; none where none is wanted.
    pub npu: Option<NpuStart>,
    pub device: DeviceInfo,
    pub texts: Texts,
}

/// The measurements that a loaded model takes while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    Nothing,
    /// The time of every kernel, for [`Profiler`].
    Kernels,
    /// The inputs of every matrix, for calibration.
    Activations,
}

/// Reads the small files. Most errors of a model are found here, before the large files are read.
pub fn texts(
    files: &ModelFiles,
    config: Gemma3Config,
    generation: &GenerationConfig,
) -> Result<Texts, Error> {
    let read = |name: &str| files.read(name);
    let Some(tokenizer_json) = read("tokenizer.json")? else {
        let problem = "holds no tokenizer.json; give that of the original model with --tokenizer";
        return Err(Error::Argument(format!("{}: {problem}", files.location())));
    };
    let tokenizer = Tokenizer::from_bytes(&tokenizer_json, &files.display("tokenizer.json"))?;
    tokenizer.fits(config.vocab_size)?;
    let (tokenizer_config, jinja) = (read("tokenizer_config.json")?, read("chat_template.jinja")?);
    let chat_files =
        ChatFiles { tokenizer_config: tokenizer_config.as_deref(), chat_template_jinja: jinja.as_deref() };
    let template = ChatTemplate::from_checkpoint(chat_files)?;
    tracing::info!("template {}", template.origin());

    let mut stop_token_ids = config.eos_token_ids.clone();
    // Configs that name only `<eos>` exist, but the model still ends its turns with `<end_of_turn>`.
    let end_of_turn = tokenizer.token_id("<end_of_turn>");
    stop_token_ids.extend(end_of_turn.filter(|id| !config.eos_token_ids.contains(id)));
    Ok(Texts { tokenizer, template, defaults: generation.sampling_defaults(), stop_token_ids, config })
}

/// Loads `files`.
pub fn model(files: &ModelFiles, config: &Config, watch: Watch) -> Result<Model, Error> {
    let source = Source::open(files)?;
    let texts = texts(files, source.config.clone(), &source.generation)?;
    let draft_files = draft_files(config)?;
    let draft = draft_files.as_ref().map(Source::open).transpose()?;
    if let Some(draft) = &draft {
        check_draft_tokenizer(files, &texts.tokenizer, draft.files, &draft.config)?;
    }
    let sample_below = Some(texts.tokenizer.vocab_size());
    let OnDevice { runner, draft, npu } =
        on_device(&source, draft.as_ref(), sample_below, config, watch, None, &mut |_, _| {})?;
    Ok(Model { device: runner.device().info().clone(), runner, draft, npu, texts })
}

/// Loads only the model, for callers that have ids and want logits: no tokenizer, no draft.
pub fn runner(files: &ModelFiles, config: &Config) -> Result<Gemma3, Error> {
    let source = Source::open(files)?;
    Ok(on_device(&source, None, None, config, Watch::Nothing, None, &mut |_, _| {})?.runner)
}

/// The longest time of one submit: the configured time, limited by the driver's timeout.
fn max_submit(config: &Config) -> Duration {
    let wanted = Duration::from_millis(config.gpu.max_submit_ms);
    match gpu::longest_submit() {
        Some(longest) if longest < wanted => {
            tracing::warn!(
                "gpu.max_submit_ms is {}, and {} is taken: amdgpu resets the GPU after its lockup_timeout, and a submit stays \
                 under a quarter of that",
                wanted.as_millis(),
                longest.as_millis()
            );
            longest
        }
        _ => wanted,
    }
}

/// The longest submit where amdgpu's `lockup_timeout` is `parameter`; `None` if that is no limit.
pub fn longest_submit(parameter: &str) -> Option<Duration> {
    gpu::quarter_of_timeout(parameter)
}

/// A model on its device.
pub struct OnDevice {
    pub runner: Gemma3,
    pub draft: Option<Draft>,
    pub npu: Option<NpuStart>,
}

/// Loads a model and its draft. No id is sampled from `sample_below` on, where it is the number of the tokenizer's ids:
/// further rows of the embedding are padding without text. `before` is what became of the NPU at the first load of this
/// model, where this is another one. `report` is told what the load does, and with which device.
pub fn on_device(
    source: &Source<'_>,
    draft_source: Option<&Source<'_>>,
    sample_below: Option<usize>,
    config: &Config,
    watch: Watch,
    before: Option<&NpuStart>,
    report: &mut dyn FnMut(Loading, Option<&Arc<Device>>),
) -> Result<OnDevice, Error> {
    let files = source.files;
    if let Some(synthetic) = source.checkpoint.synthetic() {
        let shape = &synthetic.shape;
        tracing::warn!(
            "{}: random weights in the shape of {shape}: what it answers means nothing",
            files.location()
        );
    }
    report(Loading::Device, None);
    // An NPU that is required and missing refuses the start at once, and not behind a minute of loading.
    let mut npu = if watch == Watch::Activations { None } else { Npu::open(&source.config, config, before)? };
    let policy = policy(config, watch == Watch::Kernels);
    let mut device = Device::open(&policy)?;
    npu.as_mut().map_or(Ok(()), |npu| npu.meet(device.can_share(), config))?;
    let mut tiles = None;
    // Products in f32 have no kernels to choose from.
    if config.gpu.tune && config.model.precision == Precision::Fast {
        report(Loading::Tuning, Some(&device));
        let tuned = tune::tuned(device, &policy)?;
        (device, tiles) = (tuned.0, Some(tuned.1));
    }
    let options = LoadOptions {
        quantize: config.model.quantize,
        max_context: config.engine.context,
        sequences: config.engine.sequences,
        kv: config.kv.dtype,
        precision: config.model.precision,
        tiles,
        block_size: config.kv.block_size,
        max_submit: max_submit(config),
        memory: limits(&config.memory),
        strict: config.hardware.strict,
        moments: watch == Watch::Activations,
        max_batch_tokens: config.engine.prefill_chunk,
        sample_below,
        offload: npu.as_ref().and_then(Npu::limits),
        ..LoadOptions::default()
    };
    let since = Instant::now();
    let bar = Bar::bytes("loading");
    let mut progress = |progress: Progress| match progress {
        Progress::Kernels => report(Loading::Kernels, Some(&device)),
        Progress::Weights { done, total } => {
            bar.set_total(total);
            bar.set(done);
            report(Loading::Weights { done, total }, Some(&device));
        }
    };
    let loaded = match draft_source {
        None => Gemma3::load(&device, source, &options, &mut progress).map(|model| (model, None)),
        Some(draft) => draft::load(&device, source, draft, &options, &mut progress)
            .map(|(model, draft)| (model, Some(draft))),
    };
    drop(bar);
    let (mut runner, draft) = loaded.inspect_err(|error| {
        if let LoadError::DoesNotFit(error) = error {
            error.refusal.table().iter().for_each(|row| tracing::warn!("memory   {row}"));
        }
    })?;
    log(files, draft_source.map(|draft| draft.files), &runner, draft.as_ref(), since.elapsed().as_secs_f64());
    let npu = npu.map(|npu| npu.attach(&mut runner, config)).transpose()?;
    Ok(OnDevice { runner, draft, npu })
}

/// The files of the draft model, if one is configured.
pub fn draft_files(config: &Config) -> Result<Option<ModelFiles>, Error> {
    Ok(config.model.draft.as_ref().map(|path| ModelFiles::open(path.as_ref())).transpose()?)
}

/// Checks that a draft model has the tokenizer of the model whose files are `files`.
pub fn check_draft_tokenizer(
    files: &ModelFiles,
    tokenizer: &Tokenizer,
    draft: &ModelFiles,
    draft_config: &Gemma3Config,
) -> Result<(), Error> {
    let vocab_size = draft_config.vocab_size;
    let Some(json) = draft.read("tokenizer.json")? else {
        // A draft without a tokenizer is assumed to have the model's, if it has rows for the model's tokens.
        return Ok(tokenizer.fits(vocab_size)?);
    };
    let name = draft.display("tokenizer.json");
    let own = Tokenizer::from_bytes(&json, &name)?;
    own.fits(vocab_size)?;
    if let Some((id, tokens)) = tokenizer.first_difference(&own) {
        let [here, there] = tokens.map(|token| token.map_or("nothing".into(), |token| format!("{token:?}")));
        return Err(Error::Argument(format!(
            "{name}: id {id} is {there}, and {here} in {}: a draft model must have the model's tokenizer",
            files.display("tokenizer.json")
        )));
    }
    Ok(())
}

impl Model {
    pub fn vocab_size(&self) -> usize {
        self.runner.limits().vocab_size
    }

    /// Most tokens of a prompt and its answer together.
    pub fn max_context(&self) -> usize {
        self.runner.limits().max_context
    }

    pub fn profiler(&self) -> Profiler {
        Profiler(Arc::clone(self.runner.device()))
    }

    /// The device memory of the model: a description of each kind of data and its heap, with its bytes.
    pub fn placement(&self) -> Vec<(String, u64)> {
        placement(&self.runner)
    }
}

/// The device memory of `runner`: a description of each kind of data and its heap, with its bytes.
fn placement(runner: &Gemma3) -> Vec<(String, u64)> {
    let row = |p: &Placement| (format!("{} in {} ({} buffers)", p.class.name(), p.heap, p.buffers), p.bytes);
    runner.placements().iter().map(row).collect()
}

fn log(
    files: &ModelFiles,
    draft_files: Option<&ModelFiles>,
    runner: &Gemma3,
    draft: Option<&Draft>,
    seconds: f64,
) {
    let (context, layers) = (runner.limits().max_context, runner.config().num_hidden_layers);
    let (schemes, precision) = (runner.schemes(), runner.precision());
    tracing::info!("model    {}: {layers} layers; {schemes}; precision {precision}", files.location());
    if let (Some(draft), Some(files)) = (draft, draft_files) {
        let (layers, weights) = (draft.config().num_hidden_layers, bytes(draft.weight_bytes()));
        tracing::info!("draft    {}: {layers} layers, {weights} of weights", files.location());
    }
    let device = runner.device().info();
    tracing::info!("device   {}, {}", device.name, device.driver);
    let draft_loaded = draft.map(Draft::loaded);
    let sum = |field: fn(&Loaded) -> u64| field(&runner.loaded()) + draft_loaded.as_ref().map_or(0, field);
    let loaded = Loaded { bytes: sum(|l| l.bytes), resident_bytes: sum(|l| l.resident_bytes) };
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let (resident, peak) = resident_bytes();
    tracing::info!(
        "loaded   {:.2} GB in {seconds:.2} s, {:.2} GB/s; {:.2} GB on the device, {:.2} GB resident, at most {:.2} GB; \
         {:.2} GB of its files in memory",
        gb(loaded.bytes),
        gb(loaded.bytes) / seconds.max(f64::MIN_POSITIVE),
        gb(placement(runner).iter().map(|(_, bytes)| bytes).sum()),
        gb(resident.unwrap_or(0)),
        gb(peak.unwrap_or(0)),
        gb(loaded.resident_bytes),
    );
    // The context is limited by the draft, if the draft's maximum is shorter.
    let longest = |config: &Gemma3Config| config.max_position_embeddings;
    let short = draft.map(|draft| longest(draft.config()));
    let why = match short {
        Some(short) if short == context && short < longest(runner.config()) => ", the draft's maximum",
        _ => "",
    };
    let kv = runner.kv_dtype();
    tracing::info!("context  {context} tokens, prompt and answer together{why}; keys and values {kv}");
    for (what, n) in placement(runner) {
        tracing::info!("memory   {} {what}", bytes(n));
    }
    tracing::info!("memory   {}", runner.residency());
}

/// Reads the kernels' times from a device that the engine is using.
pub struct Profiler(pub Arc<Device>);

impl Profiler {
    /// (kernel, dispatches, GPU time) since the last call, longest first; empty unless the model was loaded to profile.
    pub fn take(&self) -> Vec<(String, u64, Duration)> {
        let each = self.0.take_profile().kernels.into_iter();
        let mut kernels: Vec<_> = each.map(|(name, (n, ns))| (name, n, Duration::from_nanos(ns))).collect();
        kernels.sort_by_key(|(_, _, time)| std::cmp::Reverse(*time));
        kernels
    }
}

/// Checks that a load would find a device, for commands that load after long work.
pub fn find_device(config: &Config) -> Result<(), Error> {
    gpu::chosen_device(&policy(config, false))?;
    Ok(())
}

/// The memory to plan for, and the limits on its use.
pub struct Room {
    pub machine: Machine,
    pub limits: Limits,
}

/// The room of a device. `paper` describes a machine by its VRAM and GTT, all of which may be used. Without it, the
/// machine is the device that a load would choose.
pub fn room(config: &Config, paper: Option<(u64, u64)>) -> Result<Room, Error> {
    match paper {
        Some((vram, gtt)) => {
            let config::Memory { reserve, ffn_heap, .. } = config.memory;
            let limits = Limits { reserve: Some(reserve.unwrap_or(0)), ffn_heap, ..Limits::default() };
            Ok(Room { machine: Machine::on_paper(vram, gtt), limits })
        }
        None => {
            let device = gpu::chosen_device(&policy(config, false)).map_err(Error::NoMachine)?;
            Ok(Room { machine: Machine::of_device(&device), limits: limits(&config.memory) })
        }
    }
}

/// Opens the device that a load would choose, without a model.
pub fn device(config: &Config) -> Result<Arc<Device>, Error> {
    Ok(Device::open(&policy(config, false))?)
}

/// The policy by which a load chooses its device.
pub fn policy(config: &Config, profile: bool) -> DevicePolicy {
    DevicePolicy {
        device: config.hardware.device.clone(),
        allow_software: config.hardware.allow_software_vulkan,
        validation: config.hardware.validation,
        profile,
        queue: None,
        hang_timeout: config.hardware.hang_timeout_s.map(|seconds| Duration::from_secs(seconds as u64)),
    }
}

/// The limits that the user set on a device's memory.
pub fn limits(memory: &config::Memory) -> Limits {
    let config::Memory { vram, gtt, reserve, ffn_heap } = *memory;
    Limits { vram, gtt, reserve, ffn_heap }
}

/// The runner of a loaded model, with its draft where it has one.
pub fn runner_of(model: Gemma3, draft: Option<Draft>) -> Box<dyn Runner> {
    match draft {
        None => Box::new(model),
        Some(draft) => Box::new(Drafted::new(model, draft)),
    }
}

/// Bytes of one sliding block of a model and its draft together.
pub fn sliding_block_bytes(model: &Gemma3, draft: Option<&Draft>) -> u64 {
    model.sliding_block_bytes() + draft.map_or(0, Draft::sliding_block_bytes)
}

/// The engine's options for a runner with these limits, whose sliding blocks have `block_bytes`.
pub fn engine_config(limits: model::Limits, block_bytes: u64, config: &Config, queue: usize) -> EngineConfig {
    let gap = Duration::from_millis(config.engine.token_gap_ms);
    let turn_blocks = match (config.kv.snapshot_bytes, block_bytes) {
        (Some(bytes), block @ 1..) => (bytes / block) as usize,
        _ => limits.kv.sliding_blocks / 2,
    };
    let speculation_tokens = config.engine.speculation_tokens;
    // Who has the driver's calls checked has the engine's blocks checked too: the tests, and whoever looks for a fault.
    let checks = config.hardware.validation;
    let scheduler =
        SchedulerConfig { gap, turn_blocks, speculation_tokens, checks, ..SchedulerConfig::default() };
    EngineConfig { queue, scheduler, ..EngineConfig::default() }
}

/// The place of the device that computes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Place {
    /// Whether the device is a GPU of its own, which the processor's counters do not see.
    pub discrete: bool,
    /// The PCI address, if the driver reports one.
    pub pci: Option<String>,
}

/// The place of a device, by which its energy is found.
pub fn place(device: &DeviceInfo) -> Place {
    Place { discrete: device.kind == DeviceKind::Discrete, pci: device.pci.clone() }
}

/// Starts the engine on a model, with its draft where it has one. `energy` is the counter that answers are told of.
pub fn engine(
    model: Gemma3,
    draft: Option<Draft>,
    config: &Config,
    queue: usize,
    energy: Option<Arc<dyn EnergyCounter>>,
) -> EngineHandle {
    let block_bytes = sliding_block_bytes(&model, draft.as_ref());
    let config = EngineConfig { energy, ..engine_config(model.limits(), block_bytes, config, queue) };
    Engine::start(runner_of(model, draft), config)
}

/// Loads `files` and starts the engine on it.
pub fn service(files: &ModelFiles, config: &Config) -> Result<Service, Error> {
    let Model { runner, draft, texts, .. } = model(files, config, Watch::Nothing)?;
    Ok(texts.service(engine(runner, draft, config, config.server.queue, None), config))
}

impl Texts {
    /// The service of a model whose engine runs.
    pub fn service(self, engine: EngineHandle, config: &Config) -> Service {
        let service = Service::new(engine, self.tokenizer, self.template, self.defaults, self.stop_token_ids);
        service.with_special_in_content(config.tokenizer.special_in_content)
    }
}

/// Ends the engine when dropped, and waits until the engine has given the device back. A process that exits while
/// another thread is inside the driver may crash there.
pub struct EndEngine(pub EngineHandle);

impl Drop for EndEngine {
    fn drop(&mut self) {
        self.0.abort();
        if !self.0.join(ENGINE_END) {
            tracing::warn!("the engine did not end within {} s", ENGINE_END.as_secs());
        }
    }
}
