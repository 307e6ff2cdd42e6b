//! What a client that takes this server for llama.cpp's asks of its models, at the root: a list, and to load or unload one.
//!
//! One model is loaded at the start and stays: loading it again is done already, and unloading it is refused.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::{Value, json};

use super::Server;
use super::error::ApiError;
use super::exchange::work;
use super::request::{Fields, missing, object};

pub(super) async fn load(State(server): State<Arc<Server>>, body: Body) -> Result<Json<Value>, ApiError> {
    named(&server, body).await?;
    Ok(Json(json!({"success": true})))
}

pub(super) async fn unload(State(server): State<Arc<Server>>, body: Body) -> Result<Json<Value>, ApiError> {
    named(&server, body).await?;
    let problem = "this server has one model as long as it runs; stop the server to free its memory";
    Err(ApiError::unsupported("model", problem))
}

/// Whether the body names the model that is served.
async fn named(server: &Arc<Server>, body: Body) -> Result<(), ApiError> {
    let read = work(server, body, |server, body| {
        let body = object(body)?;
        let asked = Fields(&body).string("model")?.ok_or_else(|| missing("model"))?.to_owned();
        if asked == server.model_id {
            return Ok(());
        }
        Err(ApiError::UnknownModel { asked, served: server.model_id.clone() })
    });
    read.await.map(|_| ())
}
