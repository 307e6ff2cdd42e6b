//! `POST /v1/chat/completions/input_tokens` and `/v1/responses/input_tokens`: how many tokens a body's prompt has. OpenAI's
//! API has the second route, and llama.cpp's server has both.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{self, Client, Parsed};
use crate::api::openai::chat::{self, ChatCompletionRequest};
use crate::api::openai::responses::request::{self, ResponsesRequest};
use crate::api::openapi::BodyErrors;
use crate::api::server::Server;

/// The number of tokens of a prompt.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct InputTokens {
    #[schema(inline)]
    object: CountedObject,
    input_tokens: usize,
}

#[derive(Serialize, ToSchema)]
enum CountedObject {
    #[serde(rename = "response.input_tokens")]
    InputTokens,
}

impl InputTokens {
    fn new(input_tokens: usize) -> Json<Self> {
        Json(Self { object: CountedObject::InputTokens, input_tokens })
    }
}

/// Counts the tokens of a chat, with its tools and the template.
#[utoipa::path(
    post,
    path = "/v1/chat/completions/input_tokens",
    operation_id = "countChatTokens",
    tag = "OpenAI",
    request_body = ChatCompletionRequest,
    responses((status = 200, description = "The number.", body = InputTokens), BodyErrors),
)]
pub(in crate::api) async fn of_chat(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<InputTokens>, ApiError> {
    let parse = |_: &_, body: &[u8]| chat::parse(body).map(Parsed::asked);
    exchange::count_tokens(&server, &client, body, "messages", parse).await.map(InputTokens::new)
}

/// Counts the tokens of a response's input, with the conversation before it, its tools and the template.
#[utoipa::path(
    post,
    path = "/v1/responses/input_tokens",
    operation_id = "countResponseTokens",
    tag = "OpenAI",
    request_body = ResponsesRequest,
    responses((status = 200, description = "The number.", body = InputTokens), BodyErrors),
)]
pub(in crate::api) async fn of_response(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<InputTokens>, ApiError> {
    let owner = client.id;
    let parse = move |server: &_, body: &[u8]| request::parse(server, owner, body).map(Parsed::asked);
    exchange::count_tokens(&server, &client, body, "input", parse).await.map(InputTokens::new)
}
