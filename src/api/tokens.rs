//! `POST /tokenize` and `POST /detokenize`, in the words of vLLM and of llama.cpp's server.
//!
//! A text comes as `prompt` (vLLM: `add_special_tokens` is on unless said otherwise) or as `content` (llama.cpp:
//! `add_special` is off), a conversation as `messages` (vLLM). The reply has the fields of whichever was asked.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Server;
use super::conversation::{messages, tools};
use super::error::ApiError;
use super::exchange::{self, Client};
use super::openapi::{DetokenizeRequest, OfABody, TokenizeRequest, Tokens};
use super::request::{Fields, missing, model, object, prompt_ending, token_ids};
use crate::session::Service;

/// In the words of whichever was asked.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Tokenized {
    Ids(TokenIds),
    Pieces(TokenPieces),
    Prompt(PromptTokens),
}

/// llama.cpp's words.
#[derive(Serialize, ToSchema)]
pub(super) struct TokenIds {
    tokens: Vec<u32>,
}

/// llama.cpp's words, `with_pieces`.
#[derive(Serialize, ToSchema)]
pub(super) struct TokenPieces {
    tokens: Vec<TokenPiece>,
}

/// vLLM's words.
#[derive(Serialize, ToSchema)]
pub(super) struct PromptTokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    /// With `return_token_strs`.
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct TokenPiece {
    id: u32,
    piece: String,
}

/// vLLM's name for the text, and llama.cpp's.
#[derive(Serialize, ToSchema)]
pub(super) struct Detokenized {
    prompt: String,
    content: String,
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
        OfABody,
    ),
)]
pub(super) async fn tokenize(
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
        OfABody,
    ),
)]
pub(super) async fn detokenize(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Detokenized>, ApiError> {
    let work = exchange::work(&server, &client, body, |server, body| {
        let body = object(body)?;
        let fields = Fields(&body);
        let ids = token_ids("tokens", fields.array("tokens")?.ok_or_else(|| missing("tokens"))?)?;
        let service = server.service_for(model(&fields)?.as_deref())?;
        check(&service, "tokens", &ids)?;
        let text = service.tokenizer().decode(&ids, false);
        Ok(Detokenized { prompt: text.clone(), content: text })
    });
    work.await.map(|(_, reply)| Json(reply))
}

/// Whether the model knows the ids of a field.
pub(super) fn check(service: &Service, param: &str, ids: &[u32]) -> Result<(), ApiError> {
    let vocab_size = service.engine().limits().vocab_size;
    match ids.iter().position(|id| *id as usize >= vocab_size) {
        None => Ok(()),
        Some(at) => {
            let problem = format!("expected a token id below {vocab_size}, got {}", ids[at]);
            Err(ApiError::invalid(format!("{param}[{at}]"), problem))
        }
    }
}
