//! What a client that takes this server for llama.cpp's asks at the root: models, and tokens.
//!
//! One model is loaded at the start and stays: loading it again is done already, and unloading it is refused.
//!
//! `/tokenize` and `/detokenize` speak the words of vLLM and of llama.cpp's server: a text comes as `prompt` (vLLM:
//! `add_special_tokens` is on unless said otherwise) or as `content` (llama.cpp: `add_special` is off), a conversation as
//! `messages` (vLLM). The reply has the fields of whichever was asked.

use crate::api::error::ApiError;
use crate::api::exchange::{self, Client};
use crate::api::fields::{Fields, missing, model, object, token_ids};
use crate::api::openai::conversation::{messages, tools};
use crate::api::openai::models::ModelList;
use crate::api::openai::prompts::check_ids;
use crate::api::openai::request::prompt_ending;
use crate::api::openapi::schema::{any_of, described, named};
use crate::api::openapi::{AuthErrors, BodyErrors, DetokenizeRequest, NamedModel, TokenizeRequest};
use crate::api::server::Server;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::Serialize;
use std::convert::Infallible;
use std::sync::Arc;
use utoipa::ToSchema;

/// The model is loaded.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Done {
    success: bool,
}

/// The models that are served, as `/v1/models` lists them.
#[utoipa::path(
    get,
    path = "/models",
    operation_id = "listModelsAtTheRoot",
    tag = "llama.cpp",
    responses((status = 200, description = "The list.", body = ModelList), AuthErrors),
)]
pub(in crate::api) async fn models(State(server): State<Arc<Server>>) -> Json<ModelList> {
    Json(ModelList::of(&server))
}

/// Loads the model, which is done already.
#[utoipa::path(
    post,
    path = "/models/load",
    operation_id = "loadModel",
    tag = "llama.cpp",
    request_body = NamedModel,
    responses((status = 200, description = "It is there.", body = Done), BodyErrors),
)]
pub(in crate::api) async fn load(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Done>, ApiError> {
    check_model(&server, &client, body).await?;
    Ok(Json(Done { success: true }))
}

/// Would unload the model, which stays: refused.
#[utoipa::path(
    post,
    path = "/models/unload",
    operation_id = "unloadModel",
    tag = "llama.cpp",
    request_body = NamedModel,
    responses(BodyErrors),
)]
pub(in crate::api) async fn unload(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Infallible, ApiError> {
    check_model(&server, &client, body).await?;
    let problem = "this server has one model as long as it runs; stop the server to free its memory";
    Err(ApiError::unsupported("model", problem))
}

/// Whether the body names no other model than the one that is served.
async fn check_model(server: &Arc<Server>, client: &Client, body: Body) -> Result<(), ApiError> {
    let read = exchange::work(server, client, body, |server, body| {
        let body = object(body)?;
        server.serves(model(&Fields(&body))?.as_deref())
    });
    read.await.map(|_| ())
}

/// In the words of whichever was asked.
#[derive(Serialize)]
#[serde(untagged)]
pub(in crate::api) enum Tokenized {
    Ids(TokenIds),
    Pieces(TokenPieces),
    Prompt(PromptTokens),
}

/// llama.cpp's words.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenIds {
    tokens: Vec<u32>,
}

/// llama.cpp's words, `with_pieces`.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenPieces {
    tokens: Vec<TokenPiece>,
}

/// vLLM's words.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct PromptTokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    /// With `return_token_strs`.
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenPiece {
    id: u32,
    piece: String,
}

/// vLLM's name for the text, and llama.cpp's.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Detokenized {
    prompt: String,
    content: String,
}

described! {
    // With no tokens, two of them are the same.
    Tokens [TokenIds, TokenPieces, PromptTokens] =>
        any_of([named::<TokenIds>(), named::<TokenPieces>(), named::<PromptTokens>()], "");
}

/// The ids of a text or of a conversation.
#[utoipa::path(
    post,
    path = "/tokenize",
    operation_id = "tokenize",
    tag = "tokens",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The answer.", body = Tokens),
        BodyErrors,
    ),
)]
pub(in crate::api) async fn tokenize(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Tokenized>, ApiError> {
    let work = exchange::work(&server, &client, body, |server, body| {
        let body = object(body)?;
        let fields = Fields(&body);
        let (content, prompt) = (fields.string("content")?, fields.string("prompt")?);
        let conversation = match fields.array("messages")? {
            Some(items) => Some(tools(&fields)?.tell(&messages(items)?)),
            None => None,
        };
        let special = [fields.bool("add_special")?, fields.bool("add_special_tokens")?];
        let with_pieces = fields.bool("with_pieces")?.unwrap_or(false);
        let strings = fields.bool("return_token_strs")?.unwrap_or(false);
        let service = server.service_for(model(&fields)?.as_deref())?;
        match (content, prompt, conversation) {
            (Some(text), ..) => {
                let ids = service.encode(text, special[0].unwrap_or(false));
                let ids = ids.map_err(|error| ApiError::from(error).in_prompt("content"))?;
                Ok(match with_pieces {
                    false => Tokenized::Ids(TokenIds { tokens: ids }),
                    true => {
                        let piece = |id: u32| TokenPiece { id, piece: service.piece(id) };
                        Tokenized::Pieces(TokenPieces { tokens: ids.into_iter().map(piece).collect() })
                    }
                })
            }
            (None, text, conversation) => {
                let ids = match (text, conversation) {
                    (Some(text), _) => service
                        .encode(text, special[1].unwrap_or(true))
                        .map_err(|error| ApiError::from(error).in_prompt("prompt"))?,
                    (None, Some(messages)) => {
                        service.prompt(&messages, prompt_ending(&fields, &messages)?)?
                    }
                    (None, None) => return Err(missing("prompt")),
                };
                Ok(Tokenized::Prompt(PromptTokens {
                    count: ids.len(),
                    max_model_len: service.engine().limits().max_context,
                    token_strs: strings.then(|| ids.iter().map(|id| service.piece(*id)).collect()),
                    tokens: ids,
                }))
            }
        }
    });
    work.await.map(|(_, reply)| Json(reply))
}

/// The text of ids.
#[utoipa::path(
    post,
    path = "/detokenize",
    operation_id = "detokenize",
    tag = "tokens",
    request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The answer.", body = Detokenized),
        BodyErrors,
    ),
)]
pub(in crate::api) async fn detokenize(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Detokenized>, ApiError> {
    let work = exchange::work(&server, &client, body, |server, body| {
        let body = object(body)?;
        let fields = Fields(&body);
        let ids = token_ids("tokens", fields.array("tokens")?.ok_or_else(|| missing("tokens"))?)?;
        let service = server.service_for(model(&fields)?.as_deref())?;
        check_ids(&service, "tokens", &ids)?;
        let text = service.tokenizer().decode(&ids, false);
        Ok(Detokenized { prompt: text.clone(), content: text })
    });
    work.await.map(|(_, reply)| Json(reply))
}
