//! The state that all handlers share: options, access, the model's service, counters, and stored responses.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::{Duration, Instant};

use utoipa::openapi::OpenApi;

use crate::api::error::ApiError;
use crate::api::http::auth::{AccessPolicy, Identities, Places};
use crate::api::http::counters::Metrics;
use crate::api::http::fair_semaphore::FairSemaphore;
use crate::api::http::listen::Open as OpenConnections;
use crate::api::http::wrong_keys::WrongKeys;
use crate::api::ids::unix_time_s;
use crate::api::names::{tagged, untagged};
use crate::api::openai::responses::store::Responses as StoredResponses;
use crate::api::report::{ModelCard, ModelReport};
use crate::api::wire::short;
use crate::config::SharePrefixes;
use crate::engine::EngineHandle;
use crate::session::Service;

/// The maximum number of requests between their headers and the engine's queue. With the largest bodies they take half a
/// GiB by default.
const MAX_ARRIVING: usize = 64;
/// The maximum number of such requests of one client, so that at least three other clients get as many.
const MAX_ARRIVING_OF_ONE: usize = MAX_ARRIVING / 4;

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub max_body_bytes: usize,
    /// A body times out, and loses its place, if nothing of it comes for this time.
    pub body_stall: Duration,
    /// A body that takes longer than this must reach a minimum rate. Small bodies are complete by then.
    pub body_grace: Duration,
    /// The maximum wait of a request for a place to be read, and again for a processor. It exceeds the maximum time of a
    /// body, so a request that waits for the slowest bodies gets a place.
    pub permit_timeout: Duration,
    /// The maximum delay of the refusal of a wrong key after others from the same address; zero = no delay.
    pub wrong_key_pause: Duration,
    /// The maximum number of responses that are stored for later requests, and about how many bytes of memory they may
    /// take; 0 = none are stored.
    pub stored_responses: usize,
    pub stored_response_bytes: usize,
    /// Which requests share the prefix cache. `None` = by key if there are several keys.
    pub share_prefixes: Option<SharePrefixes>,
    /// How often a stream without events sends a comment, so that no proxy closes it.
    pub keep_alive: Duration,
    /// How often a stream without events sends an event that says nothing new, in formats that have one.
    pub event_interval: Duration,
    /// If a step takes longer, `/health` reports that the device hangs.
    pub device_timeout: Duration,
    /// The current number of lost lines of the log, for `/metrics`.
    pub lost_log_lines: fn() -> u64,
}

/// The names by which requests may call the model.
#[derive(Debug, Clone, Default)]
pub struct ModelNames {
    /// The model's id, which is in every answer, also if the request has another name.
    pub id: String,
    /// Additional names of the model, which are also in lists of models.
    pub aliases: Vec<String>,
    /// Whether requests may use any other name as well.
    pub any: bool,
}

impl From<&str> for ModelNames {
    fn from(id: &str) -> Self {
        Self { id: id.to_owned(), ..Self::default() }
    }
}

/// The state of a server, from before the model is loaded until its end.
pub struct Server {
    pub(in crate::api) model_id: String,
    model_aliases: Vec<String>,
    any_model_name: bool,
    /// When the server started: Unix time, in seconds.
    pub(in crate::api) created: u64,
    pub(in crate::api) started: Instant,
    pub(in crate::api) options: Options,
    /// The access policy. [`Server::set_access`] replaces it as a whole.
    pub(in crate::api) access: RwLock<Arc<AccessPolicy>>,
    pub(in crate::api) identities: Identities,
    pub(in crate::api) wrong_keys: WrongKeys,
    pub(in crate::api) places: Places,
    pub(in crate::api) connections: OpenConnections,
    /// The maximum number of requests in the engine's queue; 0 = the engine's own limit.
    pub(in crate::api) queue: AtomicUsize,
    pub(in crate::api) service: OnceLock<Arc<Service>>,
    pub(in crate::api) report: OnceLock<ModelReport>,
    card: OnceLock<ModelCard>,
    /// What a load in progress does, in words.
    load: OnceLock<Box<dyn Fn() -> Option<String> + Send + Sync>>,
    pub(in crate::api) metrics: Arc<Metrics>,
    /// Permits to have a body read and to wait for a processor, held until the request is in the engine's queue.
    pub(in crate::api) arriving: FairSemaphore,
    /// Permits for a processor, charged by microseconds of work.
    pub(in crate::api) tokenizing: FairSemaphore,
    pub(in crate::api) responses: StoredResponses,
    /// The OpenAPI document of the router's routes.
    document: OnceLock<OpenApi>,
    /// The JSON of `/openapi.json` without and with keys, after the first request for it.
    documents: [OnceLock<String>; 2],
}

impl Server {
    pub fn new(names: impl Into<ModelNames>, options: Options, access: AccessPolicy) -> Arc<Self> {
        let ModelNames { id, aliases, any } = names.into();
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        Arc::new(Self {
            model_id: id,
            model_aliases: aliases,
            any_model_name: any,
            created: unix_time_s(),
            started: Instant::now(),
            options,
            access: RwLock::new(Arc::new(access)),
            identities: Identities::new(),
            wrong_keys: WrongKeys::new(options.wrong_key_pause),
            places: Places::default(),
            connections: OpenConnections::default(),
            queue: AtomicUsize::new(0),
            service: OnceLock::new(),
            report: OnceLock::new(),
            card: OnceLock::new(),
            load: OnceLock::new(),
            metrics: Arc::default(),
            arriving: FairSemaphore::new(MAX_ARRIVING, MAX_ARRIVING_OF_ONE),
            tokenizing: FairSemaphore::new(processors, processors),
            responses: StoredResponses::new(
                options.stored_responses,
                options.stored_response_bytes,
                options.max_body_bytes,
            ),
            document: OnceLock::new(),
            documents: Default::default(),
        })
    }

    /// Replaces the policy for new requests: keys, names, pages and limits. Requests in progress continue, and stored
    /// responses still belong to the same keys.
    pub fn set_access(&self, access: AccessPolicy) {
        *self.access.write().expect("nothing panics under this lock") = Arc::new(access);
    }

    pub(in crate::api) fn access(&self) -> Arc<AccessPolicy> {
        Arc::clone(&self.access.read().expect("nothing panics under this lock"))
    }

    /// Sets the source of what `/health` and `/status` report about a load. Panics at a second call.
    pub fn set_load(&self, doing: impl Fn() -> Option<String> + Send + Sync + 'static) {
        assert!(self.load.set(Box::new(doing)).is_ok(), "set_load is called once");
    }

    pub(in crate::api) fn loading(&self) -> Option<String> {
        self.load.get().and_then(|doing| doing())
    }

    /// Lets the server answer with the loaded model, and returns its service. Panics at a second call.
    pub fn set_ready(&self, service: Service) -> Arc<Service> {
        let service = Arc::new(service);
        assert!(self.service.set(Arc::clone(&service)).is_ok(), "the model was loaded twice");
        self.fit_queue();
        service
    }

    /// Gives `/status` and `/metrics` the report of the loaded model. Panics at a second call.
    pub fn set_report(&self, report: ModelReport) {
        assert!(self.report.set(report).is_ok(), "the model was loaded twice");
    }

    /// Sets what lists of models say about the files of the model. Panics at a second call.
    pub fn set_card(&self, card: ModelCard) {
        assert!(self.card.set(card).is_ok(), "the model was opened twice");
    }

    /// What is known of the model's files, once they are read.
    pub(in crate::api) fn card(&self) -> Result<&ModelCard, ApiError> {
        self.card.get().ok_or(ApiError::Loading)
    }

    /// Sets the length of the engine's queue, now or when the engine exists.
    pub fn set_queue(&self, queue: usize) {
        self.queue.store(queue, Ordering::Relaxed);
        self.fit_queue();
    }

    /// Keeps the routes' OpenAPI document for [`Self::document`].
    pub(in crate::api) fn set_document(&self, document: OpenApi) {
        // All routers of one server have the same document.
        let _ = self.document.set(document);
    }

    /// The OpenAPI document as JSON. `write` makes it at the first call; `keyed` is whether the server requires a key.
    pub(in crate::api) fn document(&self, keyed: bool, write: impl FnOnce(OpenApi) -> String) -> String {
        let write = || write(self.document.get().cloned().unwrap_or_default());
        self.documents[usize::from(keyed)].get_or_init(write).clone()
    }

    /// Paths of the routes in the document, except those with a parameter.
    pub(in crate::api) fn documented_paths(&self) -> impl Iterator<Item = &str> {
        let paths = self.document.get().into_iter().flat_map(|document| document.paths.paths.keys());
        paths.map(String::as_str).filter(|path| !path.contains('{'))
    }

    /// The methods of a route. The page's files, which are not in the document, have GET.
    pub(in crate::api) fn methods_at(&self, path: &str) -> Vec<&'static str> {
        let Some(route) = self.document.get().and_then(|document| document.paths.paths.get(path)) else {
            return vec!["GET"];
        };
        let has = [("GET", &route.get), ("POST", &route.post), ("DELETE", &route.delete)];
        has.into_iter().filter(|(_, operation)| operation.is_some()).map(|(method, _)| method).collect()
    }

    fn fit_queue(&self) {
        let queue = self.queue.load(Ordering::Relaxed);
        if let Some(engine) = self.engine().filter(|_| queue > 0) {
            engine.set_queue(queue);
        }
    }

    pub(in crate::api) fn report(&self) -> Option<&ModelReport> {
        self.report.get()
    }

    /// The names in lists of models: the id, and the aliases.
    pub(in crate::api) fn model_names(&self) -> impl Iterator<Item = &str> {
        let aliases = self.model_aliases.iter().filter(|alias| **alias != self.model_id);
        std::iter::once(&self.model_id).chain(aliases).map(String::as_str)
    }

    /// The name of Ollama's lists that answers to a request with this name repeat.
    pub(in crate::api) fn tagged_name(&self, asked: Option<&str>) -> String {
        let is_listed =
            |asked: &&str| self.model_names().any(|name| name == *asked || name == untagged(asked));
        asked.filter(is_listed).map_or_else(|| tagged(&self.model_id), str::to_owned)
    }

    /// Refuses a `model` that is not served. `None` is always accepted.
    pub(in crate::api) fn serves(&self, model: Option<&str>) -> Result<(), ApiError> {
        let named = |asked: &str| self.model_names().any(|name| name == asked || name == untagged(asked));
        let is_served = |asked: &str| self.any_model_name || named(asked);
        match model.filter(|asked| !is_served(asked)) {
            None => Ok(()),
            Some(asked) => Err(ApiError::UnknownModel { asked: short(asked), served: self.model_id.clone() }),
        }
    }

    /// The service of `model`, or of the served model if the request names none.
    pub(in crate::api) fn service_for(&self, model: Option<&str>) -> Result<Arc<Service>, ApiError> {
        self.serves(model)?;
        let service = self.service.get().cloned().ok_or(ApiError::Loading)?;
        service.engine().health()?;
        Ok(service)
    }

    /// The name of the syntax in which the loaded model calls tools.
    pub(in crate::api) fn call_syntax(&self) -> Option<&'static str> {
        self.service.get().map(|service| service.call_format().syntax.name)
    }

    pub(in crate::api) fn engine(&self) -> Option<&EngineHandle> {
        self.service.get().map(|s| s.engine())
    }
}
