//! How the server is: `/health` for who restarts it, `/status` for who looks at it, and what `/v1/models` says of the model.
//!
//! No prompt, answer, client or key is in any of it, nor a path of the machine.
//!
//! Health is a proof, not a flag: the device finished something within the last seconds, or a probe that it is sent
//! does. While a step is under way no probe is sent; the step is given [`Options::device_timeout`](super::Options).

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use super::{MAX_ARRIVING, Server, unix_time_s};
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
    /// Takes the kernels' times since the last call; none where they are not measured.
    pub kernels: Box<dyn Fn() -> Vec<KernelTime> + Send + Sync>,
}

/// Buffers of one class in one heap.
#[derive(Debug, Clone, Serialize)]
pub struct Placed {
    pub class: String,
    pub heap: String,
    pub buffers: usize,
    pub bytes: u64,
}

/// A heap of the device's memory, and what this process may still take of it by the driver's budget. Bytes.
#[derive(Debug, Clone, Serialize)]
pub struct HeapNow {
    /// As in [`Placed::heap`].
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
    Unresponsive(String),
}

impl Health {
    fn of(engine: Option<&EngineHandle>) -> Self {
        match engine.map(EngineHandle::health) {
            None => Health::Loading,
            Some(Ok(())) => Health::Ok,
            Some(Err(EngineError::ShuttingDown)) => Health::Draining,
            Some(Err(lost)) => Health::Lost(lost.to_string()),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Health::Ok => "ok",
            Health::Loading => "loading",
            Health::Draining => "draining",
            Health::Lost(_) => "lost",
            Health::Unresponsive(_) => "unresponsive",
        }
    }
}

pub(super) async fn health(State(server): State<Arc<Server>>) -> Response {
    let health = match server.engine() {
        Some(engine) => proof(engine, server.options.device_timeout).await,
        None => Health::Loading,
    };
    let status = match health {
        Health::Ok => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut body = json!({"status": health.name()});
    if let Health::Lost(message) | Health::Unresponsive(message) = health {
        body["message"] = message.into();
    }
    (status, Json(body)).into_response()
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

pub(super) async fn status(State(server): State<Arc<Server>>) -> Json<Value> {
    let m = &server.metrics;
    let [prompt, cached, generated] = m.tokens();
    let error = m.last_error().map(|(at, message)| json!({"at": at, "message": message}));
    let health = Health::of(server.engine());
    let mut body = json!({
        "status": health.name(),
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": unix_time_s().saturating_sub(server.created),
        "model": {"id": server.model_id},
        "connections": server.connections.count(),
        // Each from its head to the end of its answer; of them, those whose bodies and prompts are being read.
        "requests": {"open": server.places.taken(), "arriving": MAX_ARRIVING - server.arriving.available_permits()},
        "tokens": {"prompt": prompt, "cached": cached, "generated": generated},
        "finished": m.finished(),
        "last_error": error,
    });
    if let Health::Lost(message) = health {
        body["message"] = message.into();
    }
    if let Some(engine) = server.engine() {
        let (stats, limits) = (engine.stats(), engine.limits());
        let guesses = |drafts: Drafts| json!({"proposed": drafts.proposed, "accepted": drafts.accepted});
        body["guesses"] =
            json!({"lookup": guesses(stats.guesses.lookup), "draft_model": guesses(stats.guesses.model)});
        let pool = |PoolUse { free, cached, held }| json!({"held": held, "cached": cached, "free": free});
        body["requests"]["waiting"] = stats.waiting.into();
        body["requests"]["running"] = stats.running.into();
        body["kv"] = json!({
            "block_size": limits.kv.block_size,
            "full": pool(stats.full),
            "sliding": pool(stats.sliding),
        });
        body["engine"] = json!({
            "max_sequences": limits.max_sequences,
            "steps": stats.steps,
            "step_tokens": stats.step_tokens,
            "preemptions": stats.preemptions,
            "host_s": stats.host_ns as f64 / 1e9,
        });
        body["model"]["context"] = limits.max_context.into();
        body["model"]["vocab_size"] = limits.vocab_size.into();
    }
    if let Some(facts) = server.facts() {
        body["model"]["layers"] = facts.layers.into();
        body["model"]["draft_layers"] = facts.draft_layers.into();
        body["model"]["weights"] = facts.weights.as_str().into();
        body["device"] = json!({"name": facts.device, "driver": facts.driver});
        let now = (facts.memory)();
        body["memory"] = json!({
            "heaps": now.heaps,
            "placed": facts.placements,
            "residency": facts.residency,
            "vram_bytes": now.vram,
            "gtt_bytes": now.gtt,
            "resident_bytes": now.resident,
        });
        let kernels = m.kernels((facts.kernels)()).into_iter().map(|KernelTime { kernel, dispatches, time }| {
            json!({"kernel": kernel, "dispatches": dispatches, "seconds": time.as_secs_f64()})
        });
        body["kernels"] = kernels.collect();
    }
    Json(body)
}

/// The model, as a list of models names it; what only the loaded one knows is missing before.
pub(super) fn card(server: &Server) -> Value {
    let mut card = json!({
        "id": server.model_id,
        "object": "model",
        "created": server.created,
        "owned_by": env!("CARGO_PKG_NAME"),
        // llama.cpp's, of a server with several models.
        "status": {"value": if server.engine().is_some() { "loaded" } else { "loading" }},
        // OpenRouter's words.
        "architecture": {"modality": "text->text", "input_modalities": ["text"], "output_modalities": ["text"]},
        "supported_parameters": SUPPORTED_PARAMETERS,
    });
    if let Some(engine) = server.engine() {
        let limits = engine.limits();
        // vLLM's, OpenRouter's, and llama.cpp's words for one thing.
        card["max_model_len"] = limits.max_context.into();
        card["context_length"] = limits.max_context.into();
        card["meta"] =
            json!({"n_ctx": limits.max_context, "n_vocab": limits.vocab_size, "n_embd": limits.hidden_size});
    }
    card
}
