//! The state that all handlers share: options, access, the models, counters, and stored responses.

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
use crate::api::wire::short;
use crate::config::SharePrefixes;
use crate::kv_disk::KvStore;
use crate::library::Library;

/// The maximum number of requests between their headers and the engine's queue. With the largest bodies they take two
/// GiB by default.
const MAX_ARRIVING: usize = 64;
/// The maximum number of such requests of one client, so that at least three other clients get as many.
const MAX_ARRIVING_OF_ONE: usize = MAX_ARRIVING / 4;

/// The maximum number of requests whose images are decoded at the same time. A picture takes up to 1.5 GB for a few seconds.
pub(in crate::api) const DECODED_AT_ONCE: usize = 2;

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub max_body_bytes: usize,
    /// A body times out, and loses its place, if nothing of it comes for this time.
    pub body_stall: Duration,
    /// A body that takes longer than this must reach a minimum rate. Small bodies are complete by then.
    pub body_grace: Duration,
    /// The maximum wait of a request for a place to be read, again for a processor, and again for its images to be decoded. It
    /// exceeds the maximum time of a body, so a request that waits for the slowest bodies gets a place.
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

/// The state of a server, from before the model is loaded until its end.
pub struct Server {
    library: Library,
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
    pub(in crate::api) metrics: Arc<Metrics>,
    /// Permits to have a body read and to wait for a processor, held until the request is in the engine's queue.
    pub(in crate::api) arriving: FairSemaphore,
    /// Permits for a processor, charged by microseconds of work.
    pub(in crate::api) tokenizing: FairSemaphore,
    /// Permits to decode the images of a request, charged by microseconds of work.
    pub(in crate::api) decoding: FairSemaphore,
    pub(in crate::api) responses: StoredResponses,
    /// The OpenAPI document of the router's routes.
    document: OnceLock<OpenApi>,
    /// The JSON of `/openapi.json` without and with keys, after the first request for it.
    documents: [OnceLock<String>; 2],
}

impl Server {
    pub fn new(library: impl Into<Library>, options: Options, access: AccessPolicy) -> Arc<Self> {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let library: Library = library.into();
        let identities = Identities::new(library.kv_store().map(KvStore::secret));
        Arc::new(Self {
            library,
            created: unix_time_s(),
            started: Instant::now(),
            options,
            access: RwLock::new(Arc::new(access)),
            identities,
            wrong_keys: WrongKeys::new(options.wrong_key_pause),
            places: Places::default(),
            connections: OpenConnections::default(),
            metrics: Arc::default(),
            arriving: FairSemaphore::new(MAX_ARRIVING, MAX_ARRIVING_OF_ONE),
            tokenizing: FairSemaphore::new(processors, processors),
            decoding: FairSemaphore::new(DECODED_AT_ONCE, DECODED_AT_ONCE),
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

    pub fn library(&self) -> &Library {
        &self.library
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

    /// The number of the model that `asked` names, or of the first model if the request names none. Names may have the tag
    /// that Ollama's clients add.
    pub(in crate::api) fn served(&self, asked: Option<&str>) -> Result<usize, ApiError> {
        let first = || self.library.first().0;
        let Some(asked) = asked else { return Ok(first()) };
        let named = self.listed(asked).map(|(index, _)| index);
        named.or_else(|| self.library.has_any_name().then(first)).ok_or_else(|| self.unknown(asked))
    }

    /// The error for a name that no model has.
    pub(in crate::api) fn unknown(&self, asked: &str) -> ApiError {
        const SHOWN: usize = 8;
        let models = self.library.models();
        let more = if models.len() > SHOWN { " and more (GET /v1/models)" } else { "" };
        let shown: Vec<&str> = models.iter().take(SHOWN).map(|(_, model)| model.id()).collect();
        ApiError::UnknownModel { asked: short(asked), served: shown.join(", ") + more }
    }

    /// The number of the model that lists have under this name, and that name without the tag of Ollama's clients.
    pub(in crate::api) fn listed<'a>(&self, asked: &'a str) -> Option<(usize, &'a str)> {
        [asked, untagged(asked)].into_iter().find_map(|name| Some((self.library.find(name)?, name)))
    }

    /// The name of Ollama's lists that answers to a request with this name repeat.
    pub(in crate::api) fn tagged_name(&self, asked: Option<&str>) -> String {
        let is_listed = |asked: &&str| self.listed(asked).is_some();
        asked.filter(is_listed).map_or_else(|| tagged(self.library.first().1.id()), str::to_owned)
    }
}
