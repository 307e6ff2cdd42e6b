//! `/v1/models`: the model that is served, in the words of OpenAI, and of OpenRouter, vLLM and llama.cpp beside them.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::openapi::AuthErrors;
use crate::api::server::Server;
use crate::engine::EngineHandle;

/// What chat completions take besides the messages, as OpenRouter's list of models names it.
pub const SUPPORTED_PARAMETERS: [&str; 20] = [
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "seed",
    "stop",
    "n",
    "stream",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
];

/// The model that is served, once for each of its names: its id, and the aliases of `server.model_aliases`.
#[utoipa::path(
    get,
    path = "/v1/models",
    operation_id = "listModels",
    tag = "OpenAI",
    responses(
        (status = 200, description = "The list.", body = ModelList),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn models(State(server): State<Arc<Server>>) -> Json<ModelList> {
    Json(ModelList::of(&server))
}

/// The model, by its id or an alias.
#[utoipa::path(
    get,
    // Ids may hold slashes, as names on the hub do.
    path = "/v1/models/{*id}",
    operation_id = "retrieveModel",
    tag = "OpenAI",
    params(("id" = String, Path, description = "Slashes in it may stand as they are.")),
    responses(
        (status = 200, description = "The model.", body = Model),
        (status = 400, description = "The id is no UTF-8.", body = ErrorBody),
        (status = 404, description = "It is not served.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn model(
    State(server): State<Arc<Server>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(asked) = id.map_err(|_| ApiError::invalid("model", "expected an id in UTF-8"))?;
    server.serves(Some(&asked))?;
    let name = server.model_names().find(|name| *name == asked);
    // Any name may be allowed; one that is in no list stands for the id.
    Ok(Json(Model::of(&server, name.unwrap_or(&server.model_id))))
}

/// The one model that is served, under each of its names.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ModelList {
    #[schema(inline)]
    object: List,
    data: Vec<Model>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum List {
    List,
}

/// What only the loaded model knows is missing before.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Model {
    id: String,
    #[schema(inline)]
    object: ModelObject,
    /// When the server started: Unix time, in seconds.
    created: u64,
    owned_by: &'static str,
    status: ModelStatus,
    architecture: Architecture,
    /// Parameters of chat completions, as OpenRouter's list of models names them.
    supported_parameters: [&'static str; SUPPORTED_PARAMETERS.len()],
    /// Tokens of prompt and answer together: vLLM's word, OpenRouter's, and llama.cpp's in `meta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    max_model_len: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    context_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    meta: Option<ModelMeta>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ModelObject {
    Model,
}

/// llama.cpp's, of a server with several models.
#[derive(Serialize, ToSchema)]
struct ModelStatus {
    #[schema(inline)]
    value: Loaded,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Loaded {
    Loaded,
    Loading,
}

/// OpenRouter's words.
#[derive(Serialize, ToSchema)]
struct Architecture {
    modality: &'static str,
    input_modalities: [&'static str; 1],
    output_modalities: [&'static str; 1],
}

#[derive(Serialize, ToSchema)]
struct ModelMeta {
    n_ctx: usize,
    n_vocab: usize,
    /// Numbers of an embedding.
    n_embd: usize,
}

impl ModelList {
    pub fn of(server: &Server) -> Self {
        let data = server.model_names().map(|name| Model::of(server, name)).collect();
        Self { object: List::List, data }
    }
}

impl Model {
    fn of(server: &Server, name: &str) -> Self {
        let limits = server.engine().map(EngineHandle::limits);
        let context = limits.map(|limits| limits.max_context);
        Self {
            id: name.to_owned(),
            object: ModelObject::Model,
            created: server.created,
            owned_by: env!("CARGO_PKG_NAME"),
            status: ModelStatus { value: if limits.is_some() { Loaded::Loaded } else { Loaded::Loading } },
            architecture: Architecture {
                modality: "text->text",
                input_modalities: ["text"],
                output_modalities: ["text"],
            },
            supported_parameters: SUPPORTED_PARAMETERS,
            max_model_len: context,
            context_length: context,
            meta: limits.map(|limits| ModelMeta {
                n_ctx: limits.max_context,
                n_vocab: limits.vocab_size,
                n_embd: limits.hidden_size,
            }),
        }
    }
}
