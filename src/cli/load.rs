//! Loads a model onto a device: files, tokenizer, device, weights, engine. All commands load their models here.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::Error;
use super::progress::Bar;
use super::terminal::bytes;
use crate::checkpoint::ModelFiles;
use crate::config::{self, Config, FfnHeap};
use crate::device::{Loading, NpuReport, OnProgress, resident_bytes};
use crate::engine::{EnergyCounter, Engine, EngineConfig, EngineHandle, SchedulerConfig};
use crate::gpu::placement::{FfnChoice, FfnReason, Limits, Machine, Placement};
use crate::gpu::{self, Device, DeviceKind, DevicePolicy};
use crate::model::arch;
use crate::model::config::GenerationConfig;
use crate::model::draft::{self, Draft, Drafted};
pub use crate::model::load::Source;
use crate::model::load::{LoadError, LoadOptions, Progress};
use crate::model::memory::{ChosenKv, Schemes};
use crate::model::model_runner::{Loaded, ModelRunner};
use crate::model::spec::ModelSpec;
use crate::model::tune::{self, Trial};
use crate::model::{self, ImageBudget, Runner, SamplingOptions, heaps};
use crate::npu::cli::Npu;
use crate::session::Service;
use crate::tensor::{KvDtype, Precision};
use crate::text::{CallFormat, ChatFiles, ChatTemplate, Tokenizer};

/// Longest wait until the engine releases the device.
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
            let misplaced = [
                ("config", &model.config),
                ("tokenizer", &model.tokenizer),
                ("chat_template", &model.chat_template),
            ];
            if let Some((name, Some(path))) = misplaced.into_iter().find(|(_, path)| path.is_some()) {
                return Err(Error::Argument(format!(
                    "model.{name} is {path}, but no model is named; name one with --model (model.path)"
                )));
            }
            tracing::warn!(
                "no model is configured: using the small demo model in the binary (name a model with --model)"
            );
            Ok(demo_files())
        }
    }
}

/// The files of the model at `path`. `model` may name other paths for config.json, tokenizer.json
/// and the chat template.
pub fn files_at(path: &Path, model: &config::Model) -> Result<ModelFiles, Error> {
    let mut files = arch::open_files(path)?;
    if let Some(path) = &model.config {
        files = files.with_config(path.as_ref())?;
    }
    if let Some(path) = &model.tokenizer {
        files = files.with_tokenizer(path.as_ref())?;
    }
    if let Some(path) = &model.chat_template {
        files = files.with_chat_template(path.as_ref())?;
    }
    Ok(files)
}

/// The id that the model with these files has in the API.
pub fn model_id(files: &ModelFiles, config: &Config) -> String {
    config.model.name.clone().unwrap_or_else(|| files.name().to_owned())
}

/// The files of the demo model.
pub fn demo_files() -> ModelFiles {
    ModelFiles::embedded(DEMO_NAME, DEMO)
}

/// The contents of a model's small files: everything that a server needs except the weights.
pub struct Texts {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    /// How the model calls tools.
    calls: CallFormat,
    defaults: SamplingOptions,
    stop_token_ids: Vec<u32>,
    suppress_tokens: Vec<u32>,
}

/// A loaded model with its small files.
pub struct Model {
    pub runner: ModelRunner,
    pub draft: Option<Draft>,
    /// The state of the NPU; `None` if `npu.mode` is off.
    pub npu: Option<NpuReport>,
    pub texts: Texts,
}

/// What a loaded model measures while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    Nothing,
    /// The time of every kernel.
    Kernels,
    /// The inputs of every matrix, for calibration.
    Activations,
}

/// The tokenizer and the chat template of a checkpoint. `None` = it has no tokenizer.
pub fn tokenizer_and_template(files: &ModelFiles) -> Result<Option<(Tokenizer, ChatTemplate)>, Error> {
    let read = |name: &str| files.read(name);
    let Some(tokenizer_json) = read("tokenizer.json")? else { return Ok(None) };
    let tokenizer = Tokenizer::from_bytes(&tokenizer_json, &files.display("tokenizer.json"))?;
    let (tokenizer_config, jinja) = (read("tokenizer_config.json")?, read("chat_template.jinja")?);
    let chat_files =
        ChatFiles { tokenizer_config: tokenizer_config.as_deref(), chat_template_jinja: jinja.as_deref() };
    let template = ChatTemplate::from_checkpoint(chat_files, &tokenizer)?;
    Ok(Some((tokenizer, template)))
}

/// Reads the small files. Most errors of a model are found here, before the large files are read.
pub fn texts(
    files: &ModelFiles,
    config: ModelSpec,
    generation: &GenerationConfig,
    tool_call_parser: Option<&str>,
) -> Result<Texts, Error> {
    let Some((tokenizer, template)) = tokenizer_and_template(files)? else {
        let problem = "holds no tokenizer.json; give the original model's tokenizer.json with --tokenizer";
        return Err(Error::Argument(format!("{}: {problem}", files.location())));
    };
    tokenizer.fits(config.vocab_size)?;
    let calls = match tool_call_parser {
        None => CallFormat::of(&template, &tokenizer),
        Some(name) => CallFormat::named(name, &tokenizer)
            .map_err(|problem| Error::Argument(format!("model.tool_call_parser: {problem}")))?,
    };
    tracing::info!("template {}; tool calls: {}", template.origin(), calls.syntax.name);

    let mut stop_token_ids = config.eos_token_ids.clone();
    // Some configs do not name the token with which the model ends its turns.
    let end_of_turn = tokenizer.end_of_turn();
    stop_token_ids.extend(end_of_turn.filter(|id| !config.eos_token_ids.contains(id)));
    let (defaults, suppress_tokens) = (generation.sampling_defaults(), config.suppress_tokens);
    Ok(Texts { tokenizer, template, calls, defaults, stop_token_ids, suppress_tokens })
}

/// Loads `files`.
pub fn model(files: &ModelFiles, config: &Config, watch: Watch) -> Result<Model, Error> {
    let (spec, generation) = arch::load(files)?;
    let texts = texts(files, spec.clone(), &generation, config.model.tool_call_parser.as_deref())?;
    let source = Source::with_config(files, spec, generation)?;
    let draft_files = draft_files(config)?;
    let draft = draft_files.as_ref().map(Source::open).transpose()?;
    if let Some(draft) = &draft {
        check_draft_tokenizer(files, &texts.tokenizer, draft.files, &draft.config)?;
    }
    let sample_below = Some(texts.tokenizer.vocab_size());
    let OnDevice { runner, draft, npu, .. } =
        on_device(&source, draft.as_ref(), sample_below, config, watch, None, &mut |_, _| {})?;
    Ok(Model { runner, draft, npu, texts })
}

/// Loads only the model, without tokenizer and draft, for callers that have token ids and need logits.
pub fn runner(files: &ModelFiles, config: &Config) -> Result<ModelRunner, Error> {
    let source = Source::open(files)?;
    Ok(on_device(&source, None, None, config, Watch::Nothing, None, &mut |_, _| {})?.runner)
}

/// How many tokens an image may have.
pub fn image_budget(model: &config::Model) -> ImageBudget {
    ImageBudget { usual: model.image_tokens, most: model.max_image_tokens }
}

/// The longest time of one submit: the configured time, limited by the driver's timeout.
fn max_submit(config: &Config) -> Duration {
    let wanted = Duration::from_millis(config.gpu.max_submit_ms);
    match gpu::longest_submit() {
        Some(longest) if longest < wanted => {
            tracing::warn!(
                "gpu.max_submit_ms is {}, but {} is used: amdgpu resets the GPU after its lockup_timeout, and a \
                 submit must take less than a quarter of that",
                wanted.as_millis(),
                longest.as_millis()
            );
            longest
        }
        _ => wanted,
    }
}

/// The longest submit if amdgpu's parameter `lockup_timeout` has this value; `None` if the value means no limit.
pub fn longest_submit(parameter: &str) -> Option<Duration> {
    gpu::quarter_of_timeout(parameter)
}

/// A model on its device.
pub struct OnDevice {
    pub runner: ModelRunner,
    pub draft: Option<Draft>,
    pub npu: Option<NpuReport>,
    /// The type of keys and values of the model and of its draft.
    pub kv: ChosenKv,
    /// How many bytes of the device the load was allowed to use.
    pub usable_bytes: u64,
}

/// The type of keys and values that a load takes for a model and its draft, if there is one, whose maximum of tokens
/// is `longest`. `sequences` is the number of conversations at the same time.
pub fn kv(
    config: &Config,
    spec: &ModelSpec,
    schemes: &Schemes,
    longest: usize,
    sequences: usize,
    is_software: bool,
) -> ChosenKv {
    let f16 = |why: &str| ChosenKv { dtype: KvDtype::F16, why: Some(why.into()) };
    match (config.kv.dtype.fixed(), config.model.precision) {
        (Some(dtype), _) => ChosenKv { dtype, why: None },
        (None, Precision::F32) => f16("model.precision is f32"),
        (None, Precision::Fast) if is_software => f16("the device is software"),
        (None, Precision::Fast) => {
            let context = config.engine.context.map_or(longest, |context| context.min(longest));
            ChosenKv::auto(spec, schemes, context, sequences)
        }
    }
}

/// Loads a model and its draft.
/// - `sample_below`: the number of token ids of the tokenizer. Only smaller ids are sampled, because further rows of
///   the embedding are padding without text.
/// - `first_npu`: the state of the NPU at the first load of this model; `None` at the first load.
/// - `report` is called with the present step of the load, and with the device once it is open.
pub fn on_device(
    source: &Source<'_>,
    draft_source: Option<&Source<'_>>,
    sample_below: Option<usize>,
    config: &Config,
    watch: Watch,
    first_npu: Option<&NpuReport>,
    report: OnProgress<'_>,
) -> Result<OnDevice, Error> {
    let files = source.files;
    if let Some(synthetic) = source.checkpoint.synthetic() {
        let shape = &synthetic.shape;
        tracing::warn!(
            "{}: random weights in the shape of {shape}: its answers have no meaning",
            files.location()
        );
    }
    report(Loading::Device, None);
    // If a required NPU is missing, the load fails here, and not after a minute of loading.
    let mut npu =
        if watch == Watch::Activations { None } else { Npu::open(&source.config, config, first_npu)? };
    let policy = policy(config, watch == Watch::Kernels);
    let mut device = Device::open(&policy)?;
    npu.as_mut().map_or(Ok(()), |npu| npu.meet(device.can_share(), config))?;
    let schemes = source
        .weights()
        .map_err(LoadError::from)
        .and_then(|weights| Schemes::of(&weights, config.model.quantize).map_err(LoadError::from))?;
    let mut tiles = None;
    // Matrix products in f32 have no alternative kernels.
    if config.gpu.tune && config.model.precision == Precision::Fast {
        report(Loading::Tuning, Some(&device));
        let trial = Trial::of(device.info(), &source.config, &schemes);
        let tuned = tune::tuned(device, &policy, &trial)?;
        (device, tiles) = (tuned.0, Some(tuned.1));
    }
    if config.gpu.tune && heaps::is_due(&device) {
        report(Loading::Tuning, Some(&device));
        heaps::measure_for_load(&device)?;
    }
    let longest = [Some(source), draft_source].into_iter().flatten();
    let longest = longest.map(|source| source.config.max_position_embeddings).min().expect("a model");
    let is_software = device.info().kind == DeviceKind::Cpu;
    let kv = kv(config, &source.config, &schemes, longest, config.engine.sequences, is_software);
    let options = LoadOptions {
        quantize: config.model.quantize,
        max_context: config.engine.context,
        sequences: config.engine.sequences,
        whole_contexts: config.kv.whole_contexts,
        kv: kv.dtype,
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
        vision: config.model.vision,
        image_budget: image_budget(&config.model),
        ..LoadOptions::default()
    };
    let (machine, usable) = (device.machine(), device.machine().usable(&options.memory));
    let usable_bytes = machine.weight_heaps().into_iter().map(|heap| usable[heap]).sum();
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
        None => ModelRunner::load(&device, source, &options, &mut progress).map(|model| (model, None)),
        Some(draft) => draft::load(&device, source, draft, &options, &mut progress)
            .map(|(model, draft)| (model, Some(draft))),
    };
    drop(bar);
    let (mut runner, draft) = loaded.inspect_err(|error| {
        if let LoadError::DoesNotFit(error) = error {
            error.refusal.table().iter().for_each(|row| tracing::warn!("memory   {row}"));
        }
    })?;
    log(
        files,
        draft_source.map(|draft| draft.files),
        &runner,
        draft.as_ref(),
        &kv,
        since.elapsed().as_secs_f64(),
    );
    let ffn_choice = device.machine().ffn_choice(config.memory.ffn_heap);
    let untuned = match ffn_choice.reason {
        FfnReason::NotMeasured if !config.gpu.tune => " (gpu.tune is false)",
        _ => "",
    };
    tracing::info!("memory   FFN weights: {ffn_choice}{untuned}");
    let npu = npu.map(|npu| npu.attach(&mut runner, config)).transpose()?;
    Ok(OnDevice { runner, draft, npu, kv, usable_bytes })
}

/// The files of the draft model, if one is configured.
pub fn draft_files(config: &Config) -> Result<Option<ModelFiles>, Error> {
    Ok(config.model.draft.as_ref().map(|path| arch::open_files(path.as_ref())).transpose()?)
}

/// Checks that a draft model has the tokenizer of the model whose files are `files`.
pub fn check_draft_tokenizer(
    files: &ModelFiles,
    tokenizer: &Tokenizer,
    draft: &ModelFiles,
    draft_config: &ModelSpec,
) -> Result<(), Error> {
    let vocab_size = draft_config.vocab_size;
    let Some(json) = draft.read("tokenizer.json")? else {
        // A draft without a tokenizer is assumed to have the model's tokenizer, if its embedding has enough rows.
        return Ok(tokenizer.fits(vocab_size)?);
    };
    let name = draft.display("tokenizer.json");
    let own = Tokenizer::from_bytes(&json, &name)?;
    own.fits(vocab_size)?;
    if let Some((id, tokens)) = tokenizer.first_difference(&own) {
        let [here, there] = tokens.map(|token| token.map_or("nothing".into(), |token| format!("{token:?}")));
        return Err(Error::Argument(format!(
            "{name}: id {id} is {there}, but {here} in {}: a draft model must have the model's tokenizer",
            files.display("tokenizer.json")
        )));
    }
    Ok(())
}

impl Model {
    pub fn vocab_size(&self) -> usize {
        self.runner.limits().vocab_size
    }

    /// Maximum number of tokens of a prompt and its answer together.
    pub fn max_context(&self) -> usize {
        self.runner.limits().max_context
    }
}

/// Where a load has read the weights, in words.
fn read_from(loaded: Loaded) -> String {
    match loaded.cached_bytes as f64 / loaded.bytes.max(1) as f64 {
        0.95.. => "from memory".into(),
        0.05.. => format!("{:.2} GB of it from memory", loaded.cached_bytes as f64 / 1e9),
        _ => "from the disk".into(),
    }
}

/// The device memory of `runner`: a description of each kind of data and its heap, with its bytes.
pub fn placement(runner: &ModelRunner) -> Vec<(String, u64)> {
    let row = |p: &Placement| (format!("{} in {} ({} buffers)", p.class.name(), p.heap, p.buffers), p.bytes);
    runner.placements().iter().map(row).collect()
}

fn log(
    files: &ModelFiles,
    draft_files: Option<&ModelFiles>,
    runner: &ModelRunner,
    draft: Option<&Draft>,
    kv: &ChosenKv,
    seconds: f64,
) {
    let (context, layers) = (runner.limits().max_context, runner.config().layers.len());
    let (schemes, precision) = (runner.schemes(), runner.precision());
    tracing::info!("model    {}: {layers} layers; {schemes}; precision {precision}", files.location());
    if let (Some(draft), Some(files)) = (draft, draft_files) {
        let (layers, weights) = (draft.config().layers.len(), bytes(draft.weight_bytes()));
        tracing::info!("draft    {}: {layers} layers, {weights} of weights", files.location());
    }
    let device = runner.device().info();
    tracing::info!("device   {}, {}", device.name, device.driver);
    let are_tiled = schemes.distinct().into_iter().any(|scheme| precision.quantizes(scheme));
    let products = if are_tiled { format!("products {}; ", runner.tiles()) } else { String::new() };
    tracing::info!("kernels  {products}attention by {}", runner.attention_by());
    let draft_loaded = draft.map(Draft::loaded);
    let sum = |field: fn(&Loaded) -> u64| field(&runner.loaded()) + draft_loaded.as_ref().map_or(0, field);
    let loaded = Loaded {
        bytes: sum(|l| l.bytes),
        cached_bytes: sum(|l| l.cached_bytes),
        resident_bytes: sum(|l| l.resident_bytes),
    };
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let (resident, peak) = resident_bytes();
    tracing::info!(
        "loaded   {:.2} GB in {seconds:.2} s, {:.2} GB/s, {}; {:.2} GB on the device, {:.2} GB resident, at most {:.2} \
         GB; {:.2} GB of its files in memory",
        gb(loaded.bytes),
        gb(loaded.bytes) / seconds.max(f64::MIN_POSITIVE),
        read_from(loaded),
        gb(placement(runner).iter().map(|(_, bytes)| bytes).sum()),
        gb(resident.unwrap_or(0)),
        gb(peak.unwrap_or(0)),
        gb(loaded.resident_bytes),
    );
    // The draft limits the context if its maximum is shorter than the model's.
    let longest = |config: &ModelSpec| config.max_position_embeddings;
    let short = draft.map(|draft| longest(draft.config()));
    let why = match short {
        Some(short) if short == context && short < longest(runner.config()) => ", the draft's maximum",
        _ => "",
    };
    tracing::info!("context  {context} tokens, prompt and answer together{why}; keys and values {kv}");
    for (what, n) in placement(runner) {
        tracing::info!("memory   {} {what}", bytes(n));
    }
    tracing::info!("memory   {}", runner.residency());
}

/// Checks that a load would find a device, for commands that load a model only after long work.
pub fn find_device(config: &Config) -> Result<(), Error> {
    gpu::chosen_device(&policy(config, false))?;
    Ok(())
}

/// The memory to plan for, and the limits on its use.
pub struct Room {
    pub machine: Machine,
    pub limits: Limits,
    /// Whether the device is software Vulkan.
    pub is_software: bool,
}

impl Room {
    pub fn ffn_choice(&self) -> FfnChoice {
        self.machine.ffn_choice(self.limits.ffn_heap)
    }

    /// Both speeds in words, if the memory that FFN weights are in was read clearly slower than the other memory.
    pub fn slow_ffn_heap(&self, is_in_vram: bool) -> Option<String> {
        let FfnReason::Measured { vram, gtt } = self.machine.ffn_choice(FfnHeap::Auto).reason else {
            return None;
        };
        let all = [("VRAM", vram), ("GTT", gtt)];
        let [(name, own), (other_name, other)] = if is_in_vram { all } else { [all[1], all[0]] };
        other.is_clearly_above(own).then(|| {
            let (own, other) = (own.gb_per_s(), other.gb_per_s());
            format!(
                "FFN weights are in {name}, read at {own:.1} GB/s; {other_name} is read at {other:.1} GB/s"
            )
        })
    }
}

/// The memory to plan for. `described` is a machine with these bytes of VRAM and GTT, all of which may be used. If it
/// is `None`, the plan is for the device that a load would choose.
pub fn room(config: &Config, described: Option<(u64, u64)>) -> Result<Room, Error> {
    match described {
        Some((vram, gtt)) => {
            let config::Memory { reserve, ffn_heap, .. } = config.memory;
            let limits = Limits { reserve: Some(reserve.unwrap_or(0)), ffn_heap, ..Limits::default() };
            Ok(Room { machine: Machine::on_paper(vram, gtt), limits, is_software: false })
        }
        None => {
            let device = gpu::chosen_device(&policy(config, false)).map_err(Error::NoMachine)?;
            let is_software = device.kind == DeviceKind::Cpu;
            Ok(Room { machine: Machine::of_device(&device), limits: limits(&config.memory), is_software })
        }
    }
}

/// `budget` bytes of memory, all of which a load may use, on a device that is not known. Its load may take a smaller type
/// of keys and values, so a plan is not too small.
pub fn room_within(budget: u64, config: &Config) -> Room {
    let limits = Limits { reserve: Some(0), ffn_heap: config.memory.ffn_heap, ..Limits::default() };
    Room { machine: Machine::on_paper(0, budget), limits, is_software: true }
}

/// Opens the device that a load would choose, without a model.
pub fn device(config: &Config) -> Result<Arc<Device>, Error> {
    Ok(Device::open(&policy(config, false))?)
}

/// How a load chooses its device.
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

/// The runner of a loaded model and its draft, if there is one.
pub fn runner_of(model: ModelRunner, draft: Option<Draft>) -> Box<dyn Runner> {
    match draft {
        None => Box::new(model),
        Some(draft) => Box::new(Drafted::new(model, draft)),
    }
}

/// The engine's options for a runner with these limits.
pub fn engine_config(limits: &model::Limits, config: &Config, queue: usize) -> EngineConfig {
    let gap = Duration::from_millis(config.engine.token_gap_ms);
    let sliding = || limits.kv.pools.iter().enumerate().filter(|(_, pool)| pool.window.is_some());
    let block_bytes: u64 = sliding().filter_map(|(pool, _)| limits.block_bytes.get(pool)).sum();
    let turn_blocks = match (config.kv.snapshot_bytes, block_bytes) {
        (Some(bytes), block @ 1..) => (bytes / block) as usize,
        _ => sliding().map(|(_, pool)| pool.blocks / 2).min().unwrap_or(0),
    };
    let speculation_tokens = config.engine.speculation_tokens;
    // Vulkan validation and the engine's own checks are both for tests and debugging, so one option turns on both.
    let checks = config.hardware.validation;
    let scheduler =
        SchedulerConfig { gap, turn_blocks, speculation_tokens, checks, ..SchedulerConfig::default() };
    EngineConfig { queue, scheduler, ..EngineConfig::default() }
}

/// Starts the engine on a model and its draft, if there is one. `energy` is the source of the energy that answers
/// report.
pub fn engine(
    model: ModelRunner,
    draft: Option<Draft>,
    config: &Config,
    queue: usize,
    energy: Option<Arc<dyn EnergyCounter>>,
) -> EngineHandle {
    let config = EngineConfig { energy, ..engine_config(model.limits(), config, queue) };
    Engine::start(runner_of(model, draft), config)
}

/// Loads `files` and starts the engine on it.
pub fn service(files: &ModelFiles, config: &Config) -> Result<Service, Error> {
    let Model { runner, draft, texts, .. } = model(files, config, Watch::Nothing)?;
    Ok(texts.service(engine(runner, draft, config, config.server.queue, None), config))
}

impl Texts {
    /// Sets sampling options for requests that do not set them, in place of the checkpoint's own.
    pub fn set_defaults(&mut self, options: SamplingOptions) {
        self.defaults = options.over(self.defaults);
    }

    /// The service of a model with a running engine.
    pub fn service(self, engine: EngineHandle, config: &Config) -> Service {
        let Self { tokenizer, template, calls, defaults, stop_token_ids, suppress_tokens } = self;
        Service::new(engine, tokenizer, template, calls, defaults, stop_token_ids)
            .with_suppressed(suppress_tokens)
            .with_special_in_content(config.tokenizer.special_in_content)
    }
}

/// Ends the engine when dropped, and waits until the engine has released the device. A process that exits while another
/// thread is inside the driver may crash there.
pub struct EndEngine(pub EngineHandle);

impl Drop for EndEngine {
    fn drop(&mut self) {
        self.0.abort();
        if !self.0.join(ENGINE_END) {
            tracing::warn!("the engine did not end within {} s", ENGINE_END.as_secs());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{KvLimits, KvPool, Limits};

    #[test]
    fn ends_of_turns_take_blocks_of_the_pools_with_a_window() {
        let pools = [None, Some(8), Some(4)].map(|window| KvPool { window, blocks: 30 });
        let limits = Limits {
            max_batch_tokens: 8,
            max_sequences: 1,
            max_draws: 1,
            max_in_flight: 1,
            kv: KvLimits { block_size: 4, pools: pools.into() },
            block_bytes: vec![1000, 30, 20],
            max_context: 64,
            vocab_size: 8,
            hidden_size: 8,
            step_bytes: Vec::new(),
            images: None,
        };
        let turn_blocks = |limits: &Limits, snapshot_bytes| {
            let mut config = Config::from_layers(&[]).expect("the defaults");
            config.kv.snapshot_bytes = snapshot_bytes;
            engine_config(limits, &config, 1).scheduler.turn_blocks
        };
        assert_eq!(turn_blocks(&limits, Some(500)), 10);
        assert_eq!(turn_blocks(&limits, None), 15);
        // A runner that does not read and write blocks does not say their size.
        assert_eq!(turn_blocks(&Limits { block_bytes: Vec::new(), ..limits }, Some(500)), 15);
    }
}
