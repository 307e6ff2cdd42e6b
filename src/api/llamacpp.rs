//! What a client that takes this server for llama.cpp's asks at the root: models, and tokens.
//!
//! One model is loaded at the start and stays: loading it again is done already, and unloading it is refused.
//!
//! `/tokenize` and `/detokenize` speak the words of vLLM and of llama.cpp's server: a text comes as `prompt` (vLLM:
//! `add_special_tokens` is on unless said otherwise) or as `content` (llama.cpp: `add_special` is off), a conversation as
//! `messages` (vLLM). The reply has the fields of whichever was asked.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AnyOfBuilder, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::api::error::ApiError;
use crate::api::exchange::{self, Client};
use crate::api::openai::conversation::{ChatMessages, EndingFields, messages};
use crate::api::openai::models::ModelList;
use crate::api::openai::prompts::check_ids;
use crate::api::openai::tools::ChatToolFields;
use crate::api::openapi::{AuthErrors, BodyErrors};
use crate::api::server::Server;
use crate::api::wire;
use crate::api::wire::bounded::TokenId;
use crate::api::wire::union::{reference, with_reference};

/// The model that is meant.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct NamedModel {
    /// The id that `/v1/models` names; absent or empty is the model that is served.
    model: Option<String>,
}

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
        let NamedModel { model } = wire::body(body)?;
        server.serves(wire::named(model).as_deref())
    });
    read.await.map(|_| ())
}

wire::composed! {
    /// The body of `/tokenize`.
    TokenizeRequest {
        text: TokenizeFields,
        tools: ChatToolFields,
        ending: EndingFields,
    }
}

/// What is to be tokenized: `content` (llama.cpp), `prompt` or `messages` (vLLM); the first of them that is there.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct TokenizeFields {
    /// The id that `/v1/models` names; absent or empty is the model that is served.
    model: Option<String>,
    content: Option<String>,
    prompt: Option<String>,
    #[schema(inline)]
    messages: Option<ChatMessages>,
    /// With `content`: the ids that begin a text; absent is false.
    add_special: Option<bool>,
    /// With `prompt`: the ids that begin a text; absent is true.
    add_special_tokens: Option<bool>,
    /// With `content`: each id with its text.
    with_pieces: Option<bool>,
    /// With `prompt` or `messages`: the text of each id.
    return_token_strs: Option<bool>,
}

/// The body of `/detokenize`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct DetokenizeRequest {
    /// The id that `/v1/models` names; absent or empty is the model that is served.
    model: Option<String>,
    /// Ids of tokens that the model has.
    tokens: Vec<TokenId>,
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

/// A list of no tokens has two of the forms, so the document cannot say `oneOf`, which is what is derived of such an enum.
impl PartialSchema for Tokenized {
    fn schema() -> RefOr<Schema> {
        let forms = AnyOfBuilder::new().item(reference::<TokenIds>()).item(reference::<TokenPieces>());
        RefOr::T(forms.item(reference::<PromptTokens>()).build().into())
    }
}

impl ToSchema for Tokenized {
    fn name() -> Cow<'static, str> {
        "Tokens".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_reference::<TokenIds>(schemas);
        with_reference::<TokenPieces>(schemas);
        with_reference::<PromptTokens>(schemas);
    }
}

/// The ids of a text or of a conversation.
#[utoipa::path(
    post,
    path = "/tokenize",
    operation_id = "tokenize",
    tag = "tokens",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The answer.", body = Tokenized),
        BodyErrors,
    ),
)]
pub(in crate::api) async fn tokenize(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Tokenized>, ApiError> {
    let work = exchange::work(&server, &client, body, |server, body| {
        let request = TokenizeRequest::read(&wire::object(body)?)?;
        let TokenizeRequest { text, tools, ending } = request;
        let conversation = match text.messages {
            Some(items) => Some(tools.tools()?.describe_in(&messages(items)?)),
            None => None,
        };
        let strings = text.return_token_strs.unwrap_or(false);
        let service = server.service_for(wire::named(text.model).as_deref())?;
        match (text.content, text.prompt, conversation) {
            (Some(content), ..) => {
                let ids = service.encode(&content, text.add_special.unwrap_or(false));
                let ids = ids.map_err(|error| ApiError::from(error).in_prompt("content"))?;
                Ok(match text.with_pieces {
                    None | Some(false) => Tokenized::Ids(TokenIds { tokens: ids }),
                    Some(true) => {
                        let piece = |id: u32| TokenPiece { id, piece: service.piece(id) };
                        Tokenized::Pieces(TokenPieces { tokens: ids.into_iter().map(piece).collect() })
                    }
                })
            }
            (None, prompt, conversation) => {
                let ids = match (prompt, conversation) {
                    (Some(prompt), _) => service
                        .encode(&prompt, text.add_special_tokens.unwrap_or(true))
                        .map_err(|error| ApiError::from(error).in_prompt("prompt"))?,
                    (None, Some(messages)) => service.prompt(&messages, ending.ending(&messages)?)?,
                    (None, None) => return Err(wire::missing("prompt")),
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
        let DetokenizeRequest { model, tokens } = wire::body(body)?;
        let ids: Vec<u32> = tokens.into_iter().map(|id| id.0).collect();
        let service = server.service_for(wire::named(model).as_deref())?;
        check_ids(&service, "tokens", &ids)?;
        let text = service.tokenizer().decode(&ids, false);
        Ok(Detokenized { prompt: text.clone(), content: text })
    });
    work.await.map(|(_, reply)| Json(reply))
}
