//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and the lists of models. Answers are JSON objects, one in each
//! line, and streamed unless the request says otherwise.
//!
//! A model's name may end with `:latest`, which Ollama adds to a name without a tag. `num_ctx` limits the request alone, and
//! reloads nothing. `keep_alive` says how long the server keeps the model after the request if it is idle then, in place of
//! `engine.idle_unload_s`.

pub(in crate::api) mod answer;
pub(in crate::api) mod chat;
pub(in crate::api) mod embed;
pub(in crate::api) mod fields;
pub(in crate::api) mod generate;
pub(in crate::api) mod models;
pub(in crate::api) mod store;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;

use crate::api::error::ApiError;
use crate::api::exchange::json_text;

/// Rewrites the errors of these routes, wherever they arose, in Ollama's form.
pub(in crate::api) async fn rewrite_errors(request: Request, next: Next) -> Response {
    let is_ours = request.uri().path().starts_with("/api/");
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>().filter(|_| is_ours) {
        let (status, body) = error.ollama();
        *response.status_mut() = status;
        *response.body_mut() = Body::from(json_text(&body));
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response
}
