//! How the server is: `/health` for who restarts it, `/status` for who looks at it, and what `/v1/models` says of the model.
//!
//! No prompt, answer, client or key is in any of it, nor a path of the machine.
//!
//! Health is a proof, not a flag: the device finished something within the last seconds, or a probe that it is sent
//! does. While a step is under way no probe is sent; the step is given [`Options::device_timeout`](super::Options).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Serialize;
use utoipa::ToSchema;

use super::Server;
use super::error::ApiError;
use super::failures::Why;
use super::openapi::AtTheDoor;
use crate::engine::{Drafts, EngineError, EngineHandle, PoolUse, Work};

/// A sign of life is good for so long.
const FRESH: Duration = Duration::from_secs(5);
/// For a probe, which is microseconds of work.
const PROBE: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What chat completions take besides the messages, as OpenRouter's list of models names it.
pub const SUPPORTED_PARAMETERS: [&str; 20] = [
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "seed",
    "stop",
    "n",
    "stream",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
];

/// What there is to tell of a loaded model and its device beside what the engine tells.
pub struct Facts {
    pub layers: usize,
    /// Of the model that guesses, where there is one.
    pub draft_layers: Option<usize>,
    /// How its weights are stored.
    pub weights: String,
    pub device: String,
    pub driver: String,
    pub placements: Vec<Placed>,
    /// What the kernel said of them.
    pub residency: String,
    /// Reads what is held now.
    pub memory: Box<dyn Fn() -> MemoryNow + Send + Sync>,
    /// Reads what was submitted so far; none once the device was given back.
    pub submitted: Box<dyn Fn() -> Option<Submitted> + Send + Sync>,
    /// Takes the kernels' times since the last call; none where they are not measured.
    pub kernels: Box<dyn Fn() -> Vec<KernelTime> + Send + Sync>,
}

/// What the device was given to do.
#[derive(Debug, Clone, Default)]
pub struct Submitted {
    pub dispatches: u64,
    pub copies: u64,
    pub barriers: u64,
    /// By class, bytes that commands declared to read or write.
    pub declared: Vec<(String, u64)>,
}

/// Buffers of one class in one heap.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Placed {
    pub class: String,
    pub heap: String,
    pub buffers: usize,
    pub bytes: u64,
}

/// A heap of the device's memory, and what this process may still take of it by the driver's budget. Bytes.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct HeapNow {
    /// Its name, as in `placed`.
    pub heap: String,
    pub size_bytes: u64,
    pub free_bytes: u64,
}

/// Bytes; none where nobody tells.
#[derive(Debug, Clone, Default)]
pub struct MemoryNow {
    pub heaps: Vec<HeapNow>,
    /// Of the device, as its driver says.
    pub vram: Option<u64>,
    pub gtt: Option<u64>,
    /// Of the process.
    pub resident: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    pub kernel: String,
    pub dispatches: u64,
    pub time: Duration,
}

/// What a server can say of itself when it is asked for its health.
enum Health {
    Ok,
    Loading,
    Draining,
    Lost(String),
    Failed(String),
    Unresponsive(String),
}

impl Health {
    fn of(engine: Option<&EngineHandle>) -> Self {
        match engine.map(EngineHandle::health) {
            None => Health::Loading,
            Some(Ok(())) => Health::Ok,
            Some(Err(EngineError::ShuttingDown)) => Health::Draining,
            Some(Err(bug @ EngineError::Bug(_))) => Health::Failed(bug.to_string()),
            Some(Err(lost)) => Health::Lost(lost.to_string()),
        }
    }

    /// Why it is none, for the log.
    fn why(&self) -> Option<String> {
        match self {
            Health::Ok => None,
            Health::Loading => Some(ApiError::Loading.to_string()),
            Health::Draining => Some(EngineError::ShuttingDown.to_string()),
            Health::Lost(message) | Health::Failed(message) | Health::Unresponsive(message) => {
                Some(message.clone())
            }
        }
    }

    /// Its name, and what there is to say of it.
    fn told(self) -> (HealthName, Option<String>) {
        match self {
            Health::Ok => (HealthName::Ok, None),
            Health::Loading => (HealthName::Loading, None),
            Health::Draining => (HealthName::Draining, None),
            Health::Lost(message) => (HealthName::Lost, Some(message)),
            Health::Failed(message) => (HealthName::Failed, Some(message)),
            Health::Unresponsive(message) => (HealthName::Unresponsive, Some(message)),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum HealthName {
    Ok,
    Loading,
    Draining,
    /// The device is, or its driver failed.
    Lost,
    /// The server met a bug.
    Failed,
    /// The device does not finish what it was asked.
    Unresponsive,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Health)]
pub(super) struct HealthReport {
    status: HealthName,
    /// Where it is lost, failed or unresponsive.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    message: Option<String>,
}

/// Whether the server answers: the device proves it.
#[utoipa::path(
    get,
    path = "/health",
    operation_id = "getHealth",
    tag = "server",
    security(()),
    responses(
        (status = 200, description = "Requests are answered.", body = HealthReport),
        (status = 503, description = "They are not, and why.", body = HealthReport),
    ),
)]
pub(super) async fn health(State(server): State<Arc<Server>>) -> Response {
    let health = match server.engine() {
        Some(engine) => proof(engine, server.options.device_timeout).await,
        None => Health::Loading,
    };
    let why = health.why();
    let (name, message) = health.told();
    let report = Json(HealthReport { status: name, message });
    match why {
        None => report.into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, Extension(Why(why)), report).into_response(),
    }
}

/// Waits for a sign of the device, no longer than for a probe.
async fn proof(engine: &EngineHandle, patience: Duration) -> Health {
    let (asked, probe) = (Instant::now(), PROBE.min(patience));
    loop {
        let health = Health::of(Some(engine));
        if !matches!(health, Health::Ok) {
            return health;
        }
        let signs = engine.signs();
        if signs.last.is_some_and(|at| at.elapsed() < FRESH) {
            return Health::Ok;
        }
        let silent = |what: &str, since: Instant| {
            let seconds = since.elapsed().as_secs_f64();
            Health::Unresponsive(format!("the device has not finished {what} in {seconds:.1} s"))
        };
        match signs.work {
            Some((Work::Step, since)) if since.elapsed() > patience => return silent("a step", since),
            Some((Work::Step, _)) => return Health::Ok,
            Some((Work::Probe, since)) if since.elapsed() > probe => return silent("a probe", since),
            Some((Work::Probe, _)) => {}
            None if asked.elapsed() > probe => return silent("what it was asked", asked),
            None => engine.probe(),
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// How the server is and what it does. What only the loaded model knows is missing before.
#[derive(Serialize, ToSchema)]
pub(super) struct Status {
    status: HealthName,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    message: Option<String>,
    version: &'static str,
    uptime_s: u64,
    model: StatusModel,
    connections: usize,
    requests: StatusRequests,
    tokens: StatusTokens,
    /// Answers that ended, by why.
    #[schema(value_type = HashMap<String, u64>)]
    finished: BTreeMap<&'static str, u64>,
    /// The last one that was the server's fault.
    #[schema(required)]
    last_error: Option<LastError>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    guesses: Option<StatusGuesses>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    kv: Option<StatusKv>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    engine: Option<StatusEngine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    device: Option<StatusDevice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    memory: Option<StatusMemory>,
    /// The longest first; empty where they are not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    kernels: Option<Vec<StatusKernel>>,
}

#[derive(Serialize, ToSchema)]
struct StatusModel {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    context: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    vocab_size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    layers: Option<usize>,
    /// Of the model that guesses; null where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<usize>, required = false)]
    draft_layers: Option<Option<usize>>,
    /// How they are stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    weights: Option<String>,
}

/// Since the start.
#[derive(Serialize, ToSchema)]
struct StatusTokens {
    prompt: u64,
    /// Of the prompts, what the prefix cache had.
    cached: u64,
    generated: u64,
}

#[derive(Serialize, ToSchema)]
struct LastError {
    /// Unix time, in seconds.
    at: u64,
    message: String,
}

/// Tokens guessed, by who guessed.
#[derive(Serialize, ToSchema)]
struct StatusGuesses {
    lookup: Guesses,
    draft_model: Guesses,
}

#[derive(Serialize, ToSchema)]
struct Guesses {
    proposed: usize,
    accepted: usize,
}

#[derive(Serialize, ToSchema)]
struct StatusRequests {
    /// Each from its head to the end of its answer.
    open: usize,
    /// Requests of them that have their bodies and prompts read, or wait for that.
    arriving: usize,
    /// In the engine's queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    waiting: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    running: Option<usize>,
}

/// Blocks of `block_size` tokens: those of layers that see all, and of those that see a window.
#[derive(Serialize, ToSchema)]
struct StatusKv {
    block_size: usize,
    full: Pool,
    sliding: Pool,
}

#[derive(Serialize, ToSchema)]
struct Pool {
    held: usize,
    cached: usize,
    free: usize,
}

#[derive(Serialize, ToSchema)]
struct StatusEngine {
    max_sequences: usize,
    steps: u64,
    /// Of all steps together.
    step_tokens: u64,
    preemptions: u64,
    host_s: f64,
}

#[derive(Serialize, ToSchema)]
struct StatusDevice {
    name: String,
    driver: String,
}

/// Null where nobody tells.
#[derive(Serialize, ToSchema)]
struct StatusMemory {
    heaps: Vec<HeapNow>,
    placed: Vec<Placed>,
    /// What the kernel said of it.
    residency: String,
    #[schema(required)]
    vram_bytes: Option<u64>,
    #[schema(required)]
    gtt_bytes: Option<u64>,
    /// Of the process.
    #[schema(required)]
    resident_bytes: Option<u64>,
}

#[derive(Serialize, ToSchema)]
struct StatusKernel {
    kernel: String,
    dispatches: u64,
    seconds: f64,
}

impl From<Drafts> for Guesses {
    fn from(drafts: Drafts) -> Self {
        Self { proposed: drafts.proposed, accepted: drafts.accepted }
    }
}

impl From<PoolUse> for Pool {
    fn from(PoolUse { free, cached, held }: PoolUse) -> Self {
        Self { held, cached, free }
    }
}

/// What the server does, for who looks at it.
#[utoipa::path(
    get,
    path = "/status",
    operation_id = "getStatus",
    tag = "server",
    responses(
        (status = 200, description = "The answer.", body = Status),
        AtTheDoor,
    ),
)]
pub(super) async fn status(State(server): State<Arc<Server>>) -> Json<Status> {
    let m = &server.metrics;
    let [prompt, cached, generated] = m.tokens();
    let (name, message) = Health::of(server.engine()).told();
    let engine = server.engine().map(|engine| (engine.stats(), engine.limits()));
    let (stats, limits) =
        (engine.as_ref().map(|(stats, _)| stats), engine.as_ref().map(|(_, limits)| limits));
    let facts = server.facts();
    let kernel = |KernelTime { kernel, dispatches, time }| StatusKernel {
        kernel,
        dispatches,
        seconds: time.as_secs_f64(),
    };
    Json(Status {
        status: name,
        message,
        version: env!("CARGO_PKG_VERSION"),
        uptime_s: server.started.elapsed().as_secs(),
        model: StatusModel {
            id: server.model_id.clone(),
            context: limits.map(|limits| limits.max_context),
            vocab_size: limits.map(|limits| limits.vocab_size),
            layers: facts.map(|facts| facts.layers),
            draft_layers: facts.map(|facts| facts.draft_layers),
            weights: facts.map(|facts| facts.weights.clone()),
        },
        connections: server.connections.count(),
        requests: StatusRequests {
            open: server.places.taken(),
            arriving: server.arriving.count(),
            waiting: stats.map(|stats| stats.waiting),
            running: stats.map(|stats| stats.running),
        },
        tokens: StatusTokens { prompt, cached, generated },
        finished: m.finished(),
        last_error: m.last_error().map(|(at, message)| LastError { at, message }),
        guesses: stats.map(|stats| StatusGuesses {
            lookup: stats.guesses.lookup.into(),
            draft_model: stats.guesses.model.into(),
        }),
        kv: engine.as_ref().map(|(stats, limits)| StatusKv {
            block_size: limits.kv.block_size,
            full: stats.full.into(),
            sliding: stats.sliding.into(),
        }),
        engine: engine.as_ref().map(|(stats, limits)| StatusEngine {
            max_sequences: limits.max_sequences,
            steps: stats.steps,
            step_tokens: stats.step_tokens,
            preemptions: stats.preemptions,
            host_s: stats.host_ns as f64 / 1e9,
        }),
        device: facts.map(|facts| StatusDevice { name: facts.device.clone(), driver: facts.driver.clone() }),
        memory: facts.map(|facts| {
            let MemoryNow { heaps, vram, gtt, resident } = (facts.memory)();
            StatusMemory {
                heaps,
                placed: facts.placements.clone(),
                residency: facts.residency.clone(),
                vram_bytes: vram,
                gtt_bytes: gtt,
                resident_bytes: resident,
            }
        }),
        kernels: facts.map(|facts| m.kernels((facts.kernels)()).into_iter().map(kernel).collect()),
    })
}

/// All models that are served: one.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelList {
    #[schema(inline)]
    object: List,
    data: Vec<Model>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum List {
    List,
}

/// What only the loaded model knows is missing before.
#[derive(Serialize, ToSchema)]
pub(super) struct Model {
    id: String,
    #[schema(inline)]
    object: ModelObject,
    /// When the server started: Unix time, in seconds.
    created: u64,
    owned_by: &'static str,
    status: ModelStatus,
    architecture: Architecture,
    /// Of chat completions, as OpenRouter's list of models names them.
    supported_parameters: [&'static str; SUPPORTED_PARAMETERS.len()],
    /// Tokens of prompt and answer together: vLLM's word, OpenRouter's, and llama.cpp's in `meta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    max_model_len: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    context_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    meta: Option<ModelMeta>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ModelObject {
    Model,
}

/// llama.cpp's, of a server with several models.
#[derive(Serialize, ToSchema)]
struct ModelStatus {
    #[schema(inline)]
    value: Loaded,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Loaded {
    Loaded,
    Loading,
}

/// OpenRouter's words.
#[derive(Serialize, ToSchema)]
struct Architecture {
    modality: &'static str,
    input_modalities: [&'static str; 1],
    output_modalities: [&'static str; 1],
}

#[derive(Serialize, ToSchema)]
struct ModelMeta {
    n_ctx: usize,
    n_vocab: usize,
    /// Numbers of an embedding.
    n_embd: usize,
}

impl ModelList {
    pub fn of(server: &Server) -> Self {
        Self { object: List::List, data: vec![Model::of(server)] }
    }
}

impl Model {
    pub fn of(server: &Server) -> Self {
        let limits = server.engine().map(EngineHandle::limits);
        let context = limits.map(|limits| limits.max_context);
        Self {
            id: server.model_id.clone(),
            object: ModelObject::Model,
            created: server.created,
            owned_by: env!("CARGO_PKG_NAME"),
            status: ModelStatus { value: if limits.is_some() { Loaded::Loaded } else { Loaded::Loading } },
            architecture: Architecture {
                modality: "text->text",
                input_modalities: ["text"],
                output_modalities: ["text"],
            },
            supported_parameters: SUPPORTED_PARAMETERS,
            max_model_len: context,
            context_length: context,
            meta: limits.map(|limits| ModelMeta {
                n_ctx: limits.max_context,
                n_vocab: limits.vocab_size,
                n_embd: limits.hidden_size,
            }),
        }
    }
}
