//! The wire formats of OpenAI, Anthropic, Ollama and llama.cpp over HTTP. This module reads requests, and writes the answers of the
//! session.
//!
//! The server answers before the model is loaded: `/v1/models` from the start and with the same id, `/health` with 503
//! until the model is loaded, if there is one. A request that it cannot answer as requested gets a typed error (`error`).
//! Between requests it keeps only stored responses (`openai::responses`), which are limited in number and bytes, and which
//! only their client can use. Prompts, answers and keys are not logged.
//!
//! | folder or file | what it is | it must never |
//! |---|---|---|
//! | `server` | the state that all handlers share | name a handler |
//! | `http` | connections, TLS, authentication, admission, health, metrics | know a wire format's bodies |
//! | `exchange` | the path of one request from its body to its answers | know a wire format |
//! | `wire` | bodies: what fields may be, and errors that name them | know a route |
//! | `openai`, `anthropic`, `llamacpp`, `ollama` | the wire formats: bodies in, answers out | name each other's handlers |
//! | `openapi` | the API as a document | answer other requests |
//! | `page` | the page at `/` | use another server |
//! | `paths` | routes without `/v1`, and what to request instead of an unknown path | know a handler |
//!
//! The [`AccessPolicy`] decides which requests are accepted. It can be replaced while the server runs
//! ([`Server::set_access`]).
//!
//! The limits are: connections and their timeouts ([`Connections`]); requests of one client
//! ([`AccessPolicy::requests_per_client`]); the size of a body ([`Options::max_body_bytes`]), its time, and how many are
//! read at the same time, a quarter of them for one client; prompts that are tokenized at the same time (one per
//! processor); the time that a request waits for either, with places that are shared fairly between clients
//! (`http::fair_semaphore`); waiting requests (the engine's queue); the text of one answer (the context). The error of a
//! request that exceeds a limit says which one.

mod anthropic;
mod embedding;
mod error;
mod exchange;
mod http;
mod ids;
mod kv_disk;
mod llamacpp;
mod names;
mod ollama;
mod openai;
mod openapi;
mod page;
mod paths;
mod server;
mod cache_salt;
mod tasks;
mod thinking;
mod tools;
mod wire;

pub use error::{ApiError, BodyGap};
pub use http::auth::AccessPolicy;
pub use http::health::Health;
pub use http::keys::{Keys, KeysError};
pub use http::listen::{Connections, FILES_PER_CONNECTION};
pub use http::tls::{Tls, TlsError};
#[doc(hidden)] // for benches/
pub use openai::chat::text_chunks;
pub use openai::models::SUPPORTED_PARAMETERS;
pub use server::{Options, Server};

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{MatchedPath, State};
use axum::http::{Method, Uri};
use axum::middleware;
use axum::routing::post;
use tokio::net::TcpListener;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::http::middleware::{authenticate, cors, identify, refuse_bodies};
use self::http::{failures, health, metrics, status};
use self::openai::{chat, completions, embeddings, input_tokens, models, responses};
use crate::engine::EngineHandle;

/// All routes, and the page. The answer to an unknown path is a JSON error.
pub fn router(server: Arc<Server>) -> Router {
    let (routes, document) = routes().split_for_parts();
    server.set_document(document);
    around(routes.merge(without_v1()).merge(page::routes()), server)
}

/// Wraps routes in the steps that every request goes through.
fn around(routes: Router<Arc<Server>>, server: Arc<Server>) -> Router {
    routes
        .route_layer(middleware::from_fn_with_state(Arc::clone(&server), refuse_bodies))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(Arc::clone(&server))
        .layer(middleware::from_fn_with_state(Arc::clone(&server), authenticate))
        .layer(middleware::from_fn(failures::catch))
        // CORS is outside authentication, because a preflight has no key, and the page must be able to read a refusal.
        .layer(middleware::from_fn_with_state(Arc::clone(&server), cors))
        .layer(middleware::from_fn(anthropic::rewrite_errors))
        .layer(middleware::from_fn(ollama::rewrite_errors))
        // Identification is outside all other steps, so that it counts and logs what is sent.
        .layer(middleware::from_fn_with_state(server, identify))
}

/// The error for an unknown path, with what to request instead.
async fn no_route(State(server): State<Arc<Server>>, uri: Uri) -> ApiError {
    if let Some(why) = paths::not_implemented(uri.path()) {
        return ApiError::NotImplemented { path: uri.path().to_owned(), why };
    }
    let instead = paths::instead(uri.path(), server.documented_paths().chain(paths::WITHOUT_V1));
    ApiError::NoRoute { path: uri.path().to_owned(), instead: instead.into_owned() }
}

/// The error for a method that a route does not have. The router adds the header `Allow`.
async fn no_method(
    State(server): State<Arc<Server>>,
    route: MatchedPath,
    method: Method,
    uri: Uri,
) -> ApiError {
    let allowed = server.methods_at(&paths::documented(route.as_str())).join(" or ");
    ApiError::Method { method: method.to_string(), path: uri.path().to_owned(), allowed }
}

/// The routes of the API, with their entries for [`openapi`].
fn routes() -> OpenApiRouter<Arc<Server>> {
    OpenApiRouter::with_openapi(openapi::head())
        .routes(routes!(chat::completions))
        .routes(routes!(input_tokens::of_chat))
        .routes(routes!(completions::completions))
        .routes(routes!(embeddings::embeddings))
        .routes(routes!(responses::create))
        .routes(routes!(input_tokens::of_response))
        .routes(routes!(responses::retrieve, responses::delete))
        .routes(routes!(responses::cancel))
        .routes(routes!(responses::input_items))
        .routes(routes!(models::models))
        .routes(routes!(models::model))
        .routes(routes!(anthropic::create))
        .routes(routes!(anthropic::count_tokens))
        .routes(routes!(llamacpp::tokenize))
        .routes(routes!(llamacpp::detokenize))
        .routes(routes!(llamacpp::models))
        .routes(routes!(llamacpp::load))
        .routes(routes!(llamacpp::unload))
        .routes(routes!(ollama::chat::chat))
        .routes(routes!(ollama::generate::generate))
        .routes(routes!(ollama::embed::embed))
        .routes(routes!(ollama::embed::embeddings))
        .routes(routes!(ollama::models::version))
        .routes(routes!(ollama::models::status))
        .routes(routes!(ollama::models::tags))
        .routes(routes!(ollama::models::running))
        .routes(routes!(ollama::models::show))
        .routes(routes!(ollama::store::pull))
        .routes(routes!(ollama::store::delete))
        .routes(routes!(health::health))
        .routes(routes!(health::live))
        .routes(routes!(status::status))
        .routes(routes!(kv_disk::clear))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::document))
}

/// The routes of [`paths::WITHOUT_V1`]. They have the handlers of the routes with `/v1`.
fn without_v1() -> Router<Arc<Server>> {
    Router::new()
        .route("/chat/completions", post(chat::completions))
        .route("/chat/completions/input_tokens", post(input_tokens::of_chat))
        .route("/completions", post(completions::completions))
        .route("/responses", post(responses::create))
        .route("/responses/input_tokens", post(input_tokens::of_response))
        .route("/messages", post(anthropic::create))
        .route("/embeddings", post(embeddings::embeddings))
}

/// Serves until `shutdown` resolves, and then refuses new requests. Requests in progress have the time that it resolved to.
/// After that time, unfinished requests fail, and the call returns within a few seconds.
pub async fn serve(
    listeners: Vec<TcpListener>,
    server: Arc<Server>,
    connections: Connections,
    shutdown: impl Future<Output = Duration> + Send + 'static,
) {
    /// The time in which failed requests can send their errors.
    const LAST_WORDS: Duration = Duration::from_secs(1);

    let (begin, begun) = tokio::sync::oneshot::channel();
    let stopping = Arc::clone(&server);
    let stop = async move {
        let grace = shutdown.await;
        stopping.library().drain();
        let _ = begin.send(grace);
    };
    let serving =
        http::listen::listen(listeners, router(Arc::clone(&server)), connections, &server.connections, stop);
    let bound = async {
        let Ok(grace) = begun.await else {
            return std::future::pending().await; // serving itself ended
        };
        tokio::time::sleep(grace).await;
        // An engine that has ended has failed the requests already.
        let mut engines = server.library().engines();
        engines.retain(|engine| engine.ended().is_none());
        if !engines.is_empty() {
            tracing::warn!("requests are still in progress after {} s: they fail", grace.as_secs());
            engines.iter().for_each(EngineHandle::abort);
        }
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        () = serving => {}
        () = bound => {}
    }
}
