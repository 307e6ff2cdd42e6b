//! `/health`, for programs that restart the server.
//!
//! Health is proven, not assumed: the device finished something within the last seconds, or it answers a probe. No
//! probe is sent while a step is in progress; the step may take [`Options::device_timeout`](crate::api::Options). Of several
//! models, no idle one is probed while another one is loaded: that load ends if it makes no progress.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::http::failures::Why;
use crate::api::server::Server;
use crate::api::wire::reply::replies;
use crate::engine::{DeviceTask, EngineError, EngineHandle, EngineState};
use crate::library::Model;

/// How long a proof that the device works stays valid.
const FRESH: Duration = Duration::from_secs(5);
/// The time that a probe may take. A probe is microseconds of work.
const PROBE: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const RECOVERING: &str = "the GPU was lost, or the NPU failed: the model is loaded again, and then the answers in progress continue";

/// The states of the server that `/health` reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Ok,
    /// The model is loaded again when a request comes.
    Unloaded,
    /// What the load does, if that is known.
    Loading(Option<String>),
    Recovering,
    Draining,
    Lost(String),
    Failed(String),
    Unresponsive(String),
}

impl Health {
    /// The state, which the device proves now. A model of several whose device was lost for good does not count, because the
    /// next request starts it anew.
    pub async fn proven(server: &Server) -> Self {
        let models = server.library().models();
        if !server.library().is_shared() {
            let (_, model) = &models[0];
            return match model.engine() {
                Some(engine) => proof(server, model, &engine).await,
                None => Health::Loading(model.loading()),
            };
        }
        let engines: Vec<_> = models.iter().filter_map(|(_, model)| Some((model, model.engine()?))).collect();
        // The models share the device, so any of them proves it. An idle engine is not probed while another one computes, or
        // while a load may measure the device: its probe would wait for that.
        let is_busy = |engine: &EngineHandle| matches!(engine.signs().work, Some((DeviceTask::Step, _)));
        let is_proven =
            engines.iter().any(|(_, engine)| engine.signs().last.is_some_and(|at| at.elapsed() < FRESH));
        let any_busy = server.library().is_swapping() || engines.iter().any(|(_, engine)| is_busy(engine));
        let mut all = Vec::new();
        for (model, engine) in engines {
            all.push(match is_busy(&engine) || !is_proven && !any_busy {
                true => proof(server, model, &engine).await,
                false => Self::of_engine(model, &engine),
            });
        }
        Self::of_all(server, all)
    }

    pub(in crate::api) fn of(server: &Server) -> Self {
        let models = server.library().models();
        let of = |(_, model): &(usize, Arc<Model>)| Some(Self::of_engine(model, &model.engine()?));
        match server.library().is_shared() {
            false => of(&models[0]).unwrap_or_else(|| Health::Loading(models[0].1.loading())),
            true => Self::of_all(server, models.iter().filter_map(of).collect()),
        }
    }

    /// The state of a server with several models, whose engines have these states. A request waits for the load of its
    /// model, so loads do not count.
    fn of_all(server: &Server, engines: Vec<Health>) -> Self {
        if !server.library().takes_requests() {
            return Health::Draining;
        }
        let find = |is_wanted: fn(&Health) -> bool| engines.iter().find(|health| is_wanted(health)).cloned();
        find(|health| matches!(health, Health::Unresponsive(_)))
            .or_else(|| find(|health| matches!(health, Health::Recovering)))
            .or_else(|| find(|health| matches!(health, Health::Ok)))
            .unwrap_or(Health::Unloaded)
    }

    fn of_engine(model: &Model, engine: &EngineHandle) -> Self {
        match (engine.health(), engine.state()) {
            (Err(EngineError::ShuttingDown), _) => Health::Draining,
            (Err(bug @ EngineError::Bug(_)), _) => Health::Failed(bug.to_string()),
            (Err(lost), _) => Health::Lost(lost.to_string()),
            (Ok(()), EngineState::Recovering) => Health::Recovering,
            (Ok(()), EngineState::Loading) => Health::Loading(model.loading()),
            (Ok(()), EngineState::Unloaded) => Health::Unloaded,
            (Ok(()), EngineState::Ready | EngineState::Lost) => Health::Ok,
        }
    }

    /// Why requests are not answered, for the log. `None` if they are.
    fn why(&self) -> Option<String> {
        match self {
            Health::Ok | Health::Unloaded => None,
            Health::Loading(doing) => {
                let doing = doing.as_ref().map(|doing| format!(" ({doing})"));
                Some(format!("the model is still loading{}", doing.unwrap_or_default()))
            }
            Health::Recovering => Some(RECOVERING.to_owned()),
            Health::Draining => Some(EngineError::ShuttingDown.to_string()),
            Health::Lost(message) | Health::Failed(message) | Health::Unresponsive(message) => {
                Some(message.clone())
            }
        }
    }

    /// The name of the state, and its message, if it has one.
    pub(in crate::api) fn report(self) -> (HealthName, Option<String>) {
        match self {
            Health::Ok => (HealthName::Ok, None),
            Health::Unloaded => (HealthName::Unloaded, None),
            Health::Loading(doing) => (HealthName::Loading, doing),
            Health::Recovering => (HealthName::Recovering, Some(RECOVERING.to_owned())),
            Health::Draining => (HealthName::Draining, None),
            Health::Lost(message) => (HealthName::Lost, Some(message)),
            Health::Failed(message) => (HealthName::Failed, Some(message)),
            Health::Unresponsive(message) => (HealthName::Unresponsive, Some(message)),
        }
    }
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum HealthName {
    Ok,
    /// The model was idle, so it was unloaded. The next request loads it again.
    Unloaded,
    Loading,
    /// The device was lost, or an NPU set to `require` failed. The model is loaded again, and then the answers in
    /// progress continue.
    Recovering,
    Draining,
    /// The device is lost, or its driver failed.
    Lost,
    /// Internal error.
    Failed,
    /// The device does not finish its work.
    Unresponsive,
}

replies! {
    #[schema(as = Health)]
    pub(in crate::api) struct HealthReport {
        status: HealthName,
        /// Present if the state is recovering, lost, failed or unresponsive; while loading, what the load does.
        message?: String,
    }
}

/// Whether the server answers, as the device proves.
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
pub(in crate::api) async fn health(State(server): State<Arc<Server>>) -> Response {
    let health = Health::proven(&server).await;
    let why = health.why().map(|words| Why { words, is_expected: matches!(health, Health::Loading(_)) });
    let (name, message) = health.report();
    let report = Json(HealthReport { status: name, message });
    match why {
        None => report.into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, Extension(why), report).into_response(),
    }
}

/// Reports that the process answers, in any state of its device. For programs that restart a process that does not answer.
#[utoipa::path(
    get,
    path = "/live",
    operation_id = "getLive",
    tag = "server",
    security(()),
    responses((status = 200, description = "The process answers.", body = LiveReport)),
)]
pub(in crate::api) async fn live() -> Json<LiveReport> {
    Json(LiveReport { status: Live::Alive })
}

#[derive(Serialize, ToSchema)]
#[schema(as = Live)]
pub(in crate::api) struct LiveReport {
    status: Live,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LiveStatus)]
#[serde(rename_all = "lowercase")]
enum Live {
    Alive,
}

/// Waits for a sign of the device, no longer than a probe may take.
async fn proof(server: &Server, model: &Model, engine: &EngineHandle) -> Health {
    let patience = server.options.device_timeout;
    let (asked, probe) = (Instant::now(), PROBE.min(patience));
    // A step with gaps between its submits takes longer by as much.
    let patience = patience.div_f64(engine.courtesy().share());
    loop {
        let health = Health::of_engine(model, engine);
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
            Some((DeviceTask::Step, since)) if since.elapsed() > patience => return silent("a step", since),
            Some((DeviceTask::Step, _)) => return Health::Ok,
            Some((DeviceTask::Probe, since)) if since.elapsed() > probe => return silent("a probe", since),
            Some((DeviceTask::Probe, _)) => {}
            None if asked.elapsed() > probe => return silent("what it was asked", asked),
            None => engine.probe(),
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}
