//! What a client that takes this server for llama.cpp's asks of its models, at the root: a list, and to load or unload one.
//!
//! One model is loaded at the start and stays: loading it again is done already, and unloading it is refused.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Server;
use super::error::ApiError;
use super::exchange::{Client, work};
use super::openapi::{AtTheDoor, NamedModel, OfABody};
use super::request::{Fields, model, object};
use super::status::ModelList;

/// The model is loaded.
#[derive(Serialize, ToSchema)]
pub(super) struct Done {
    success: bool,
}

/// The models that are served, as `/v1/models` lists them.
#[utoipa::path(
    get,
    path = "/models",
    operation_id = "listModelsAtTheRoot",
    tag = "llama.cpp",
    responses((status = 200, description = "The list.", body = ModelList), AtTheDoor),
)]
pub(super) async fn models(State(server): State<Arc<Server>>) -> Json<ModelList> {
    Json(ModelList::of(&server))
}

/// Loads the model, which is done already.
#[utoipa::path(
    post,
    path = "/models/load",
    operation_id = "loadModel",
    tag = "llama.cpp",
    request_body = NamedModel,
    responses((status = 200, description = "It is there.", body = Done), OfABody),
)]
pub(super) async fn load(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    named(&server, &client, body).await?;
    Ok(Json(Done { success: true }))
}

/// Would unload the model, which stays: refused.
#[utoipa::path(
    post,
    path = "/models/unload",
    operation_id = "unloadModel",
    tag = "llama.cpp",
    request_body = NamedModel,
    responses(OfABody),
)]
pub(super) async fn unload(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Infallible, ApiError> {
    named(&server, &client, body).await?;
    let problem = "this server has one model as long as it runs; stop the server to free its memory";
    Err(ApiError::unsupported("model", problem))
}

/// Whether the body names no other model than the one that is served.
async fn named(server: &Arc<Server>, client: &Client, body: Body) -> Result<(), ApiError> {
    let read = work(server, client, body, |server, body| {
        let body = object(body)?;
        server.serves(model(&Fields(&body))?.as_deref())
    });
    read.await.map(|_| ())
}
