//! `POST /v1/chat/completions/input_tokens` and `/v1/responses/input_tokens`: how many tokens a body's prompt has. OpenAI's
//! API has the second route, and llama.cpp's server has both.

use axum::Json;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::exchange::{self, Parsed};
use crate::api::openai::chat::{self, ChatCompletionRequest};
use crate::api::openai::responses::request::{self, ResponsesRequest};
use crate::api::openapi::{BodyErrors, post_route};
use crate::api::wire::union::words;

/// The number of tokens of a prompt.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct InputTokens {
    #[schema(inline)]
    object: CountedObject,
    input_tokens: usize,
}

words! {
    CountedObject { InputTokens = "response.input_tokens" };
}

impl InputTokens {
    fn new(input_tokens: usize) -> Json<Self> {
        Json(Self { object: CountedObject::InputTokens, input_tokens })
    }
}

post_route! {
    /// Counts the tokens of a chat, with its tools and the template.
    "/v1/chat/completions/input_tokens", "countChatTokens", "OpenAI",
    ChatCompletionRequest => (description = "The number.", body = InputTokens), BodyErrors,
    of_chat(server, client: Client, body) -> Json<InputTokens> {
        let parse = |_: &_, body: &[u8]| chat::parse(body).map(Parsed::asked);
        exchange::count_tokens(&server, &client, body, "messages", parse).await.map(InputTokens::new)
    }
}

post_route! {
    /// Counts the tokens of a response's input, with the conversation before it, its tools and the template.
    "/v1/responses/input_tokens", "countResponseTokens", "OpenAI",
    ResponsesRequest => (description = "The number.", body = InputTokens), BodyErrors,
    of_response(server, client: Client, body) -> Json<InputTokens> {
        let owner = client.id;
        let parse = move |server: &_, body: &[u8]| request::parse(server, owner, body).map(Parsed::asked);
        exchange::count_tokens(&server, &client, body, "input", parse).await.map(InputTokens::new)
    }
}
