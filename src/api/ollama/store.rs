//! `/api/pull` and `/api/delete`: downloads and deletes models.
//!
//! Anyone may pull a model that is served, which changes nothing. Only trusted clients ([`Client::is_trusted`]) may download
//! and delete.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{self, Client, json_text};
use crate::api::names::named_by;
use crate::api::openapi::{OllamaStoreErrors, post_route};
use crate::api::server::Server;
use crate::api::wire::reply::replies;
use crate::api::wire::union::Lines;
use crate::api::wire::{self, short};
use crate::library::{PullStep, StoreError};

/// How often a pull reports its progress.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// Why a server without a store deletes no models.
const NO_STORE: &str = "this server serves the models of its configuration, and deletes none; `unicorn models rm` deletes a pulled model";
/// Lines of progress that a client has not read yet.
const MAX_LINES: usize = 64;

/// The body of `/api/pull`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaPullRequest {
    /// A model of the hub (`ORG/NAME:FILE`), a short name of one, or a name that `/api/tags` lists; if absent or empty, the
    /// first model.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
    /// Whether the progress is streamed; true by default.
    stream: Option<bool>,
}

/// The body of `/api/delete`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaDeleteRequest {
    /// A name that `/api/tags` lists.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
}

replies! {
    /// What a pull does now.
    pub(in crate::api) struct OllamaPull {
        /// `success` in the last line, and before it what the pull does.
        status: String,
        /// The checksum of the file that is downloaded, as `ALGORITHM:HEX`.
        digest?: String,
        /// The bytes of that file.
        total?: u64,
        /// The bytes of it that are downloaded.
        completed?: u64,
    }
}

impl OllamaPull {
    fn of(status: &str) -> Self {
        Self { status: status.to_owned(), digest: None, total: None, completed: None }
    }
}

impl From<PullStep<'_>> for OllamaPull {
    fn from(step: PullStep<'_>) -> Self {
        match step {
            PullStep::List => Self::of("pulling manifest"),
            PullStep::File { path, digest, total, completed } => Self {
                status: format!("pulling {path}"),
                digest: Some(digest.to_owned()),
                total: Some(total),
                completed: Some(completed),
            },
            PullStep::Unreachable => Self::of("the hub cannot be reached: keeping the files that are there"),
            PullStep::Add => Self::of("writing manifest"),
        }
    }
}

type OllamaPullLines = Lines<OllamaPull>;

post_route! {
    /// Downloads a model from the Hugging Face hub and serves it, with progress in Ollama's format. An interrupted download
    /// is continued by the next request. The download stops when the client disconnects. A model that is served already is
    /// brought up to date.
    "/api/pull", "ollamaPull", "Ollama",
    OllamaPullRequest => (
        description = "The model is served, or the lines of the download.",
        content((OllamaPull = "application/json"), (inline(OllamaPullLines) = "application/x-ndjson")),
    ), OllamaStoreErrors,
    pull(server, client: Client, body) -> Response {
        let read = exchange::process_body(&server, &client, body, |_, body| {
            let OllamaPullRequest { model, name, stream } = wire::body(body)?;
            Ok((named_by(model, name), stream.unwrap_or(true)))
        });
        let (arriving, (name, stream)) = read.await?;
        drop(arriving);
        // Not `served`, which may find a model by any name.
        let is_served = name.as_ref().is_none_or(|name| server.listed(name).is_some());
        let has_store = server.library().store().is_some();
        let pulled = OllamaPull::of("success");
        let name = match name {
            Some(name) if has_store && client.is_trusted => name,
            _ if is_served && stream => {
                let lines = [OllamaPull::from(PullStep::List), pulled];
                return Ok(exchange::lines(futures::stream::iter(lines).map(|line| json_text(&line))));
            }
            _ if is_served => return Ok(Json(pulled).into_response()),
            Some(_) if has_store => return Err(ApiError::NotTrusted),
            name => return Err(ApiError::NotPulled { asked: short(&name.unwrap_or_default()) }),
        };
        let (lines, mut progress) = mpsc::channel(MAX_LINES);
        let ended = start(&server, name, lines);
        if !stream {
            // Reads the lines, so that the download stops when the client is gone.
            while progress.recv().await.is_some() {}
            ended.await.map_err(|_| StoreError::Local("the download ended early (see the log)".into()))??;
            return Ok(Json(pulled).into_response());
        }
        Ok(exchange::lines(async_stream::stream! {
            while let Some(line) = progress.recv().await {
                yield json_text(&line);
            }
            yield match ended.await {
                Ok(Ok(())) => json_text(&pulled),
                Ok(Err(error)) => json_text(&ApiError::from(error).ollama().1),
                Err(error) => json_text(&ApiError::Bug(error.to_string()).ollama().1),
            };
        }))
    }
}

/// Starts a download. It ends soon after the receiver of its lines is dropped.
fn start(
    server: &Arc<Server>,
    name: String,
    lines: mpsc::Sender<OllamaPull>,
) -> tokio::task::JoinHandle<Result<(), StoreError>> {
    let server = Arc::clone(server);
    let known = server.listed(&name).map(|(index, _)| index);
    tokio::task::spawn_blocking(move || {
        let store = server.library().store().ok_or_else(no_store)?;
        // When the last line of a file was sent, and the file.
        let mut sent: Option<(Instant, String)> = None;
        store.pull(server.library(), &name, known, &mut |step| {
            if !server.library().takes_requests() {
                return false;
            }
            if let PullStep::File { digest, total, completed, .. } = step {
                let is_new = |(at, of): &(Instant, String)| of != digest || at.elapsed() >= REPORT_EVERY;
                if completed < total && !sent.as_ref().is_none_or(is_new) {
                    return !lines.is_closed();
                }
                sent = Some((Instant::now(), digest.to_owned()));
                // A client that reads slowly misses lines of progress, and does not delay the download.
                return !matches!(lines.try_send(step.into()), Err(mpsc::error::TrySendError::Closed(_)));
            }
            lines.blocking_send(step.into()).is_ok()
        })
    })
}

/// The error if nothing deletes models.
fn no_store() -> StoreError {
    StoreError::Conflict(NO_STORE.into())
}

/// Why [`delete`] refuses the client to delete a model. `None` = it deletes the model.
pub(super) fn kept_because(server: &Server, client: &Client, index: usize) -> Option<ApiError> {
    let Some(store) = server.library().store() else { return Some(no_store().into()) };
    match client.is_trusted {
        true => store.check_delete(index).err().map(ApiError::from),
        false => Some(ApiError::NotTrusted),
    }
}

/// Deletes the files of a pulled model, in Ollama's format. Requests that use the model are answered first.
#[utoipa::path(
    delete,
    path = "/api/delete",
    operation_id = "ollamaDelete",
    tag = "Ollama",
    request_body = OllamaDeleteRequest,
    responses((status = 200, description = "The model is deleted. The body is empty."), OllamaStoreErrors),
)]
pub(in crate::api) async fn delete(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<(), ApiError> {
    let read = exchange::process_body(&server, &client, body, |_, body| {
        let OllamaDeleteRequest { model, name } = wire::body(body)?;
        named_by(model, name).ok_or(ApiError::Missing { param: "model".into() })
    });
    let (arriving, name) = read.await?;
    drop(arriving);
    if server.library().store().is_none() {
        return Err(no_store().into());
    }
    // Not `served`, which may find a model by any name.
    let index = match server.listed(&name) {
        Some((index, _)) => index,
        None => return Err(server.unknown(&name)),
    };
    if let Some(error) = kept_because(&server, &client, index) {
        return Err(error);
    }
    let deleted = tokio::task::spawn_blocking(move || {
        let store = server.library().store().ok_or_else(no_store)?;
        store.delete(server.library(), index)
    });
    Ok(deleted.await.map_err(|error| ApiError::Bug(error.to_string()))??)
}
