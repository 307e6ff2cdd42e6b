//! `/kv/clear`: empties the folder that keeps conversations (`kv.disk.path`).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::openapi::AuthErrors;
use crate::api::server::Server;
use crate::library::StoreError;

/// What was removed.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct KvCleared {
    entries: u64,
    /// Bytes of files.
    bytes: u64,
}

/// Removes everything that the server keeps of conversations on disk, of all clients and models. What the device holds stays.
#[utoipa::path(
    post,
    path = "/kv/clear",
    operation_id = "clearKvDisk",
    tag = "server",
    responses(
        (status = 200, description = "The files are removed.", body = KvCleared),
        (status = 500, description = "A file cannot be removed.", body = ErrorBody),
        (status = 409, description = "No conversations are kept on disk.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn clear(State(server): State<Arc<Server>>) -> Result<Json<KvCleared>, ApiError> {
    let Some(store) = server.library().kv_store().cloned() else {
        let why = "no conversations are kept on disk, because kv.disk.path is not set";
        return Err(StoreError::Conflict(why.into()).into());
    };
    // There may be many thousands of files.
    let cleared = tokio::task::spawn_blocking(move || store.clear()).await;
    let cleared = cleared.unwrap_or_else(|_| Err(std::io::Error::other("internal error")));
    let cleared =
        cleared.map_err(|error| StoreError::Local(format!("the folder of kv.disk.path: {error}")))?;
    tracing::info!("{} entries of conversations were removed from the disk", cleared.entries);
    Ok(Json(KvCleared { entries: cleared.entries, bytes: cleared.bytes }))
}
