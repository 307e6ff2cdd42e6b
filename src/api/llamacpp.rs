//! Routes of llama.cpp's server outside `/v1`: models, and tokens.
//!
//! The server unloads a model if it is idle (`engine.idle_unload_s`) or if a request says so, and loads it again for the next
//! request that needs it.
//!
//! `/tokenize` and `/detokenize` have the fields of both vLLM and llama.cpp's server. A text comes as `prompt` (vLLM:
//! `add_special_tokens` is true by default) or as `content` (llama.cpp: `add_special` is false by default), and a
//! conversation as `messages` (vLLM). The reply has the fields of the server whose field was used.

use std::borrow::Cow;
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
use crate::api::openai::conversation::{ChatMessages, ImageFields, TemplateFields, messages};
use crate::api::openai::models::ModelList;
use crate::api::openai::tools::ChatToolFields;
use crate::api::openapi::{AuthErrors, BodyErrors, post_route};
use crate::api::server::Server;
use crate::api::wire;
use crate::api::wire::bounded::TokenId;
use crate::api::wire::union::{reference, with_reference};
use crate::engine::KeepAlive;
use crate::library::InUse;
use crate::session::{GenerateRequest, Service};

/// A body that names a model.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct NamedModel {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
}

/// The request is carried out.
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

post_route! {
    /// Loads the model if it is unloaded, and waits until it is loaded. The first load is not awaited.
    "/models/load", "loadModel", "llama.cpp",
    NamedModel => (description = "The model is loaded, or the first load is in progress.", body = Done), BodyErrors,
    load(server, client: Client, body) -> Json<Done> {
        match named_model(&server, &client, body).await {
            // The first load is in progress.
            Err(ApiError::Loading) => {}
            Err(error) => return Err(error),
            Ok(service) => {
                service.engine().load(KeepAlive::Configured)?.recv().await;
                service.engine().health()?;
            }
        }
        Ok(Json(Done { success: true }))
    }
}

post_route! {
    /// Unloads the model as soon as no request runs or waits. The next request loads it again.
    "/models/unload", "unloadModel", "llama.cpp",
    NamedModel => (description = "The model will be unloaded.", body = Done), BodyErrors,
    unload(server, client: Client, body) -> Json<Done> {
        let read = exchange::process_body(&server, &client, body, |server, body| {
            let NamedModel { model } = wire::body(body)?;
            server.served(wire::named(model).as_deref())
        });
        let (_, index) = read.await?;
        let service = server.library().model(index).service();
        match service {
            Some(service) => service.engine().unload()?,
            // A model of several that was never loaded is unloaded.
            None if server.library().is_shared() => {}
            None => return Err(ApiError::Loading),
        }
        Ok(Json(Done { success: true }))
    }
}

/// The model that a body names.
async fn named_model(server: &Arc<Server>, client: &Client, body: Body) -> Result<InUse, ApiError> {
    let read = exchange::process_body(server, client, body, |server, body| {
        let NamedModel { model } = wire::body(body)?;
        server.service_for(wire::named(model).as_deref())
    });
    read.await.map(|(_, service)| service)
}

wire::composed! {
    /// The body of `/tokenize`.
    TokenizeRequest {
        text: TokenizeFields,
        tools: ChatToolFields,
        template: TemplateFields,
        images: ImageFields,
    }
}

/// The text or conversation to tokenize: `content` (llama.cpp), `prompt` or `messages` (vLLM), whichever comes first in
/// this order.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct TokenizeFields {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    content: Option<String>,
    prompt: Option<String>,
    #[schema(inline)]
    messages: Option<ChatMessages>,
    /// With `content`: add the ids that begin a text; false by default.
    add_special: Option<bool>,
    /// With `content`: read control tokens that the text spells as control tokens; true by default.
    parse_special: Option<bool>,
    /// With `prompt`: add the ids that begin a text; true by default.
    add_special_tokens: Option<bool>,
    /// With `content`: return each id with its text, or with a list of its bytes if they are not whole characters.
    with_pieces: Option<bool>,
    /// With `prompt` or `messages`: return the text of each id as well.
    return_token_strs: Option<bool>,
}

/// The body of `/detokenize`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct DetokenizeRequest {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    /// Token ids of the model.
    tokens: Vec<TokenId>,
}

/// The ids, in the form of the server whose field was used.
#[derive(Serialize)]
#[serde(untagged)]
pub(in crate::api) enum Tokenized {
    Ids(TokenIds),
    Pieces(TokenPieces),
    Prompt(PromptTokens),
}

/// The ids in llama.cpp's form.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenIds {
    tokens: Vec<u32>,
}

/// The ids with their texts, in llama.cpp's form.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenPieces {
    tokens: Vec<TokenPiece>,
}

/// The ids in vLLM's form.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct PromptTokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    /// The text of each id, if `return_token_strs` is true.
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenPiece {
    id: u32,
    #[schema(inline)]
    piece: PieceText,
}

/// The text of a token, or its bytes if they are not whole characters.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum PieceText {
    Text(String),
    Bytes(Vec<u8>),
}

impl PieceText {
    fn of(service: &Service, id: u32) -> Self {
        let bytes = service.tokenizer().token_bytes(id).unwrap_or_default();
        String::from_utf8(bytes).map_or_else(|error| Self::Bytes(error.into_bytes()), Self::Text)
    }
}

/// The text, as `prompt` for vLLM's clients and as `content` for llama.cpp's.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Detokenized {
    prompt: String,
    content: String,
}

/// An empty list of tokens has two of the forms, so `anyOf` describes them. utoipa would derive `oneOf`.
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

post_route! {
    /// Tokenizes a text or a conversation.
    "/tokenize", "tokenize", "tokens",
    TokenizeRequest => (description = "The answer.", body = Tokenized), BodyErrors,
    tokenize(server, client: Client, body) -> Json<Tokenized> {
        let work = exchange::process_body(&server, &client, body, |server, body| {
            let request = TokenizeRequest::read(&wire::object(body)?)?;
            let TokenizeRequest { text, tools, template, images: of_images } = request;
            // Tools are always checked, as the document says.
            let tools = tools.tools()?;
            let conversation = text.messages.map(messages).transpose()?;
            let strings = text.return_token_strs.unwrap_or(false);
            let service = server.service_for(wire::named(text.model).as_deref())?;
            match (text.content, text.prompt, conversation) {
                (Some(content), ..) => {
                    let special = text.add_special.unwrap_or(false);
                    let ids = match text.parse_special.unwrap_or(true) {
                        true => service.encode(&content, special, None),
                        false => service.encode_plain(&content, special, None),
                    };
                    let ids = ids.map_err(|error| ApiError::from(error).in_prompt("content"))?;
                    Ok(match text.with_pieces {
                        None | Some(false) => Tokenized::Ids(TokenIds { tokens: ids }),
                        Some(true) => {
                            let piece = |id: u32| TokenPiece { id, piece: PieceText::of(&service, id) };
                            Tokenized::Pieces(TokenPieces { tokens: ids.into_iter().map(piece).collect() })
                        }
                    })
                }
                (None, prompt, conversation) => {
                    let ids = match (prompt, conversation) {
                        (Some(prompt), _) => service
                            .encode(&prompt, text.add_special_tokens.unwrap_or(true), None)
                            .map_err(|error| ApiError::from(error).in_prompt("prompt"))?,
                        (None, Some((messages, images))) => {
                            let (ending, template_kwargs) = (template.ending(&messages)?, template.kwargs()?);
                            let conversation = GenerateRequest {
                                messages,
                                images,
                                image_tokens: of_images.tokens(),
                                tools,
                                ending,
                                template_kwargs,
                                ..GenerateRequest::default()
                            };
                            service.conversation(&conversation)?
                        }
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
}

post_route! {
    /// Turns token ids into text.
    "/detokenize", "detokenize", "tokens",
    DetokenizeRequest => (description = "The answer.", body = Detokenized), BodyErrors,
    detokenize(server, client: Client, body) -> Json<Detokenized> {
        let work = exchange::process_body(&server, &client, body, |server, body| {
            let DetokenizeRequest { model, tokens } = wire::body(body)?;
            let ids: Vec<u32> = tokens.into_iter().map(|id| id.0).collect();
            let service = server.service_for(wire::named(model).as_deref())?;
            service.check_ids("tokens", &ids)?;
            let text = service.tokenizer().decode(&ids, false);
            Ok(Detokenized { prompt: text.clone(), content: text })
        });
        work.await.map(|(_, reply)| Json(reply))
    }
}
