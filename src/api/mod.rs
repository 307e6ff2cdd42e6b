//! The OpenAI API, and Anthropic's, over HTTP: validates, renders, tokenizes, and streams what the engine yields.
//!
//! The server answers before the model is loaded: `/v1/models` from the start and with the same id, `/health` with
//! 503 until [`Server::set_ready`]. It refuses what it cannot honour with a typed error ([`error`]), never answers
//! something else instead, and keeps nothing between requests but what
//! a client may name later (`responses`: for the client alone, and bounded). Prompts and answers are not logged, nor are keys.
//!
//! Who may ask is decided at the [`Door`], which can be replaced while the server runs ([`Server::set_door`]).
//!
//! Bounds: connections and their silence ([`Connections`]); requests of one client ([`Door::requests_per_client`]); bodies
//! ([`Options::max_body_bytes`]), how many are read at once, a quarter of them for one client, and the time they may take;
//! prompts tokenized at once (one per processor); the time that a request waits for either, in turns that are fair between
//! clients (`turns`); requests waiting (the engine's queue); the text of one answer (the context). What is too much is
//! refused by the client's bound, by the queue's, or because its turn did not come in time: each says which.

mod chat;
mod completions;
mod conversation;
mod door;
mod embeddings;
mod error;
mod exchange;
mod failures;
mod grammar;
mod held;
mod keys;
mod listen;
mod logprobs;
mod management;
mod messages;
mod metrics;
mod openapi;
mod page;
mod prompts;
mod request;
mod responses;
mod sharing;
mod status;
mod tasks;
mod tls;
mod tokens;
mod tools;
mod turns;
mod wrong_keys;

#[doc(hidden)] // for benches/
pub use chat::text_chunks;
pub use door::Door;
pub use error::{ApiError, BodyGap};
pub use keys::{Keys, KeysError};
pub use listen::{Connections, FILES_PER_CONNECTION};
pub use status::{Facts, HeapNow, KernelTime, MemoryNow, Placed, SUPPORTED_PARAMETERS, Submitted};
pub use tls::{Tls, TlsError};

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::rejection::PathRejection;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Json, Router};
use tokio::net::TcpListener;
use tracing::Instrument;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::error::ErrorBody;
use self::openapi::AtTheDoor;
use self::request::short;
use self::status::{Model, ModelList};
use self::turns::Turns;
use self::wrong_keys::WrongKeys;
use crate::config::SharePrefixes;
use crate::engine::EngineHandle;
use crate::session::{Service, random_u64};

const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID_BYTES: usize = 128;
/// Requests between their head and the engine's queue: with the largest bodies, half a GiB by default.
const MAX_ARRIVING: usize = 64;
/// For one client: whatever it does with them, three others find as many.
const MAX_ARRIVING_OF_ONE: usize = MAX_ARRIVING / 4;

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub max_body_bytes: usize,
    /// A body of which nothing comes for so long is given up, and its place with it.
    pub body_stall: Duration,
    /// A body that has taken so long has to come at a certain rate from then on. Small ones are whole by then.
    pub body_grace: Duration,
    /// A request waits so long for its turn to be read, and as long for its turn on a processor. Longer than a body may take:
    /// whoever waits for the slowest ones gets their places.
    pub turn_timeout: Duration,
    /// The longest that the refusal of a wrong key waits, after others from its address; zero never waits.
    pub wrong_key_pause: Duration,
    /// Responses that are kept for later requests, and about how many bytes of memory they may take; 0 keeps none.
    pub stored_responses: usize,
    pub stored_response_bytes: usize,
    /// Who finds whose prompts in the prefix cache; none is by key where there are several.
    pub share_prefixes: Option<SharePrefixes>,
    /// How often a silent stream carries a comment, so that nobody between takes it for dead.
    pub keep_alive: Duration,
    /// A step that takes longer is taken for a device that hangs, as far as `/health` goes.
    pub device_timeout: Duration,
    /// How many lines of the log were lost so far, for `/metrics`.
    pub lost_log_lines: fn() -> u64,
}

/// State of the server, from its start on.
pub struct Server {
    model_id: String,
    /// Unix time, in seconds.
    created: u64,
    started: Instant,
    options: Options,
    /// Replaced as a whole.
    door: RwLock<Arc<Door>>,
    identities: door::Identities,
    wrong_keys: WrongKeys,
    places: door::Places,
    connections: listen::Open,
    /// Requests that may wait in the engine's queue; 0 leaves it as it is.
    queue: AtomicUsize,
    service: OnceLock<Arc<Service>>,
    facts: OnceLock<Facts>,
    metrics: Arc<metrics::Metrics>,
    /// To have its body read and to wait for a processor, up to the engine's queue.
    arriving: Turns,
    /// By microseconds of work.
    tokenizing: Turns,
    responses: responses::Responses,
    /// `/openapi.json` without and with keys, once somebody asked for it.
    documents: [OnceLock<String>; 2],
}

impl Server {
    pub fn new(model_id: impl Into<String>, options: Options, door: Door) -> Arc<Self> {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        Arc::new(Self {
            model_id: model_id.into(),
            created: unix_time_s(),
            started: Instant::now(),
            options,
            door: RwLock::new(Arc::new(door)),
            identities: door::Identities::new(),
            wrong_keys: WrongKeys::new(options.wrong_key_pause),
            places: door::Places::default(),
            connections: listen::Open::default(),
            queue: AtomicUsize::new(0),
            service: OnceLock::new(),
            facts: OnceLock::new(),
            metrics: Arc::default(),
            arriving: Turns::new(MAX_ARRIVING, MAX_ARRIVING_OF_ONE),
            tokenizing: Turns::new(processors, processors),
            responses: responses::Responses::new(&options),
            documents: Default::default(),
        })
    }

    /// Another door for requests that come from now on: other keys, names, pages and bounds. What is under way goes on, and
    /// what was kept for a key stays its own.
    pub fn set_door(&self, door: Door) {
        *self.door.write().expect("nothing panics under this lock") = Arc::new(door);
    }

    fn door(&self) -> Arc<Door> {
        Arc::clone(&self.door.read().expect("nothing panics under this lock"))
    }

    /// Opens the chat; once. What is behind it comes back.
    pub fn set_ready(&self, service: Service) -> Arc<Service> {
        let service = Arc::new(service);
        assert!(self.service.set(Arc::clone(&service)).is_ok(), "the model was loaded twice");
        self.fit_queue();
        service
    }

    /// Tells `/status` and `/metrics` of the loaded model; once.
    pub fn set_facts(&self, facts: Facts) {
        assert!(self.facts.set(facts).is_ok(), "the model was loaded twice");
    }

    /// Lets so many requests wait in the engine's queue from now on, or from when it is there.
    pub fn set_queue(&self, queue: usize) {
        self.queue.store(queue, Ordering::Relaxed);
        self.fit_queue();
    }

    fn fit_queue(&self) {
        let queue = self.queue.load(Ordering::Relaxed);
        if let Some(engine) = self.engine().filter(|_| queue > 0) {
            engine.set_queue(queue);
        }
    }

    fn facts(&self) -> Option<&Facts> {
        self.facts.get()
    }

    /// Whether `model` is served; none is whichever is.
    fn serves(&self, model: Option<&str>) -> Result<(), ApiError> {
        match model.filter(|asked| *asked != self.model_id) {
            None => Ok(()),
            Some(asked) => Err(ApiError::UnknownModel { asked: short(asked), served: self.model_id.clone() }),
        }
    }

    /// What answers for `model`, or for whoever names none.
    fn service_for(&self, model: Option<&str>) -> Result<Arc<Service>, ApiError> {
        self.serves(model)?;
        let service = self.service.get().cloned().ok_or(ApiError::Loading)?;
        service.engine().health()?;
        Ok(service)
    }

    fn engine(&self) -> Option<&EngineHandle> {
        self.service.get().map(|s| s.engine())
    }
}

/// All routes, and the [`page`]; what is not one is a JSON error too.
pub fn router(server: Arc<Server>) -> Router {
    around(Router::from(routes()).merge(page::routes()), server)
}

/// What every request goes through, around some routes.
fn around(routes: Router<Arc<Server>>, server: Arc<Server>) -> Router {
    routes
        .fallback(async |uri: Uri| ApiError::NoRoute(uri.path().to_owned()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::Method(method.to_string(), uri.path().to_owned())
        })
        .with_state(Arc::clone(&server))
        .layer(middleware::from_fn_with_state(Arc::clone(&server), door::guard))
        .layer(middleware::from_fn(failures::catch))
        // Around the door: a preflight brings no key, and the page is to read a refusal too.
        .layer(middleware::from_fn_with_state(Arc::clone(&server), door::cors))
        .layer(middleware::from_fn(messages::in_its_words))
        // Around all: what is counted and logged is what is sent.
        .layer(middleware::from_fn_with_state(server, identify))
}

/// The routes of the API, with what [`openapi`] says of them.
fn routes() -> OpenApiRouter<Arc<Server>> {
    OpenApiRouter::with_openapi(openapi::head())
        .routes(routes!(chat::completions))
        .routes(routes!(completions::completions))
        .routes(routes!(embeddings::embeddings))
        .routes(routes!(responses::create))
        .routes(routes!(responses::retrieve, responses::delete))
        .routes(routes!(responses::cancel))
        .routes(routes!(responses::input_items))
        .routes(routes!(messages::create))
        .routes(routes!(messages::count_tokens))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(models))
        .routes(routes!(model))
        .routes(routes!(management::models))
        .routes(routes!(management::load))
        .routes(routes!(management::unload))
        .routes(routes!(status::health))
        .routes(routes!(status::status))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::document))
}

/// Serves until `shutdown` resolves; then takes no request, and gives those under way the time that it resolved to, to end in
/// before they are failed. Returns at most a few seconds after that.
pub async fn serve(
    listener: TcpListener,
    server: Arc<Server>,
    connections: Connections,
    shutdown: impl Future<Output = Duration> + Send + 'static,
) {
    /// For failed requests to tell their clients.
    const LAST_WORDS: Duration = Duration::from_secs(1);

    let (begin, begun) = tokio::sync::oneshot::channel();
    let stopping = Arc::clone(&server);
    let stop = async move {
        let grace = shutdown.await;
        if let Some(engine) = stopping.engine() {
            engine.drain();
        }
        let _ = begin.send(grace);
    };
    let serving =
        listen::listen(listener, router(Arc::clone(&server)), connections, &server.connections, stop);
    let bound = async {
        let Ok(grace) = begun.await else {
            return std::future::pending().await; // serving itself ended
        };
        tokio::time::sleep(grace).await;
        // One that has ended has failed them.
        if let Some(engine) = server.engine().filter(|engine| engine.ended().is_none()) {
            tracing::warn!("requests are still under way after {} s: they are failed", grace.as_secs());
            engine.abort();
        }
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        () = serving => {}
        () = bound => {}
    }
}

/// The models that are served: one.
#[utoipa::path(
    get,
    path = "/v1/models",
    operation_id = "listModels",
    tag = "OpenAI",
    responses(
        (status = 200, description = "The list.", body = ModelList),
        AtTheDoor,
    ),
)]
async fn models(State(server): State<Arc<Server>>) -> Json<ModelList> {
    Json(ModelList::of(&server))
}

/// The model, by its id.
#[utoipa::path(
    get,
    // Ids may hold slashes, as names on the hub do.
    path = "/v1/models/{*id}",
    operation_id = "retrieveModel",
    tag = "OpenAI",
    params(("id" = String, Path, description = "Slashes in it may stand as they are.")),
    responses(
        (status = 200, description = "The model.", body = Model),
        (status = 400, description = "The id is no UTF-8.", body = ErrorBody),
        (status = 404, description = "It is not served.", body = ErrorBody),
        AtTheDoor,
    ),
)]
async fn model(
    State(server): State<Arc<Server>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(asked) = id.map_err(|_| ApiError::invalid("model", "expected an id in UTF-8"))?;
    server.serves(Some(&asked))?;
    Ok(Json(Model::of(&server)))
}

/// Gives every request an id, the client's own where it sent a sound one, in the log and in the response; counts it, and
/// logs it where it fails.
async fn identify(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    // For whoever says it in the body too.
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    // The highest level: no filter leaves a line that does not say whose it is.
    let span = tracing::error_span!("request", id = id.to_str().unwrap_or_default(), route);
    async move {
        let mut response = next.run(request).await;
        tracing::debug!("{method} {path}: {}", response.status());
        server.metrics.responded(&route, response.status().as_u16());
        if response.status().is_server_error() {
            failures::log_response(&response);
        }
        response.headers_mut().insert(REQUEST_ID, id);
        response
    }
    .instrument(span)
    .await
}

fn request_id(headers: &HeaderMap) -> HeaderValue {
    let sound = |v: &&HeaderValue| {
        (1..=MAX_REQUEST_ID_BYTES).contains(&v.len()) && v.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(sound).cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&format!("{:016x}", random_u64()))
            .expect("hexadecimal digits are a header value")
    })
}

/// For dates that are told. It jumps when a clock is set: a duration is that of an [`Instant`].
fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// An id that no other reply has.
fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}
