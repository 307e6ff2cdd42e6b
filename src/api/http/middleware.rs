//! The steps of every request before its handler: an id, CORS, authentication, and checks of the body's headers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::HttpBody;
use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use tokio::time::timeout;
use tower::{Layer, ServiceExt};
use tracing::Instrument;

use crate::api::error::ApiError;
use crate::api::exchange::Client;
use crate::api::http::auth::changes;
use crate::api::http::failures;
use crate::api::http::guarded::hold;
use crate::api::http::listen::Connection;
use crate::api::ids::{REQUEST_ID, request_id};
use crate::api::openai::responses::store::is_kept;
use crate::api::paths::documented;
use crate::api::server::Server;
use crate::api::wire::short;

/// The paths that need no key and no host name, because monitoring programs have neither.
const OPEN: [&str; 2] = ["/health", "/live"];
/// How long the rest of a refused body is read.
const REST_OF_BODY: Duration = Duration::from_secs(1);

/// Gives every request an id, in the log and in the response: the client's own id if it sent a valid one. Counts the
/// response, and logs it if it is a failure.
pub(in crate::api) async fn identify(
    State(server): State<Arc<Server>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = request_id(request.headers());
    // Handlers that repeat the id in the body read it from the headers.
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str);
    let route = documented(route).into_owned();
    // The span has the highest level, so that no filter shows a line without the request that it belongs to.
    let span = tracing::error_span!("request", id = id.to_str().unwrap_or_default(), route);
    async move {
        let mut response = next.run(request).await;
        tracing::debug!("{method} {path}: {}", response.status());
        server.metrics.responded(&route, response.status().as_u16());
        if let Some(error) = response.extensions().get::<ApiError>() {
            server.metrics.refused(error.code());
        }
        if response.status().is_server_error() {
            failures::log_response(&response);
        }
        response.headers_mut().insert(REQUEST_ID, id);
        response
    }
    .instrument(span)
    .await
}

/// Adds the CORS headers of the current policy.
pub(in crate::api) async fn cors(
    State(server): State<Arc<Server>>,
    request: Request,
    next: Next,
) -> Response {
    match server.access().cors(request.headers().get(header::ORIGIN)) {
        None => next.run(request).await,
        Some(cors) => match cors.layer(next).oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        },
    }
}

/// Refuses a body that is compressed, or whose `Content-Length` exceeds the limit. The limit applies to the bytes that
/// arrive, so the unpacked size of a compressed body would have no limit.
///
/// A client that waits for `100 Continue` gets the refusal instead, and sends no body. If a client sends its body anyway,
/// a part of it is read: closing the connection with unread bytes would reset it, and the client would lose the answer.
pub(in crate::api) async fn refuse_bodies(
    State(server): State<Arc<Server>>,
    request: Request,
    next: Next,
) -> Response {
    let encodings = request.headers().get_all(header::CONTENT_ENCODING);
    let identity = |value: &&HeaderValue| {
        let encoding = value.as_bytes().trim_ascii();
        encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity")
    };
    if let Some(encoding) = encodings.iter().find(|value| !identity(value)) {
        return ApiError::BodyEncoded(short(&String::from_utf8_lossy(encoding.as_bytes()))).into_response();
    }
    let limit = server.options.max_body_bytes;
    if request.body().size_hint().lower() > limit as u64 {
        if !request.headers().contains_key(header::EXPECT) {
            let mut rest = request.into_body().into_data_stream();
            tokio::spawn(timeout(REST_OF_BODY, async move { while let Some(Ok(_)) = rest.next().await {} }));
        }
        return ApiError::BodyTooLarge { limit }.into_response();
    }
    next.run(request).await
}

/// Fields of requests that web pages send, and of those that proxies forward.
const OF_OTHERS: [&str; 7] =
    ["origin", "sec-fetch-site", "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"];

/// Authenticates a request, or answers why it is refused.
pub(in crate::api) async fn authenticate(
    State(server): State<Arc<Server>>,
    peer: Option<Extension<ConnectInfo<SocketAddr>>>,
    connection: Option<Extension<Connection>>,
    mut request: Request,
    next: Next,
) -> Response {
    if OPEN.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let (arrived, policy) = (Instant::now(), server.access());
    let peer = peer.map(|Extension(ConnectInfo(address))| address.ip());
    let connection = connection.map(|Extension(connection)| connection);
    let (id, is_trusted) = match policy.check(request.method(), request.uri(), request.headers()) {
        Ok(Some(key)) => (server.identities.of_key(&key), true),
        Ok(None) => {
            let is_here = peer.is_some_and(|address| address.to_canonical().is_loopback());
            let is_of_another = OF_OTHERS.iter().any(|name| request.headers().contains_key(*name));
            (server.identities.of_address(peer), is_here && !is_of_another)
        }
        Err(error) => {
            if error == ApiError::WrongKey {
                let address = server.identities.of_address(peer);
                let pause = server.wrong_keys.pause(address, Instant::now());
                // The request keeps only its connection during the pause. The pause ends early if another client needs
                // a connection.
                let crowd = Connection::crowded(connection.as_ref());
                if !pause.is_zero() {
                    drop(timeout(pause, crowd).await);
                }
            }
            return error.into_response();
        }
    };
    let takes_a_place = changes(request.method()) || is_kept(request.uri().path());
    request.extensions_mut().insert(Client { id, connection, arrived, is_trusted });
    if !takes_a_place {
        return next.run(request).await;
    }
    let most = policy.requests_per_client;
    drop(policy);
    let Some(place) = server.places.take(id, most) else {
        return ApiError::ClientFull { limit: most }.into_response();
    };
    hold(next.run(request).await, place)
}
