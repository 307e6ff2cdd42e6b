//! `/v1/models`: the served models, with the fields of OpenAI, Anthropic, OpenRouter, vLLM and llama.cpp.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::ids::rfc3339;
use crate::api::openapi::AuthErrors;
use crate::api::server::Server;
use crate::api::wire::reply::{ListName, replies};
use crate::api::wire::union::words;
use crate::engine::EngineHandle;
use crate::library::{self, Stage};

/// Parameters of chat completions besides the messages, as OpenRouter's list of models names them.
pub const SUPPORTED_PARAMETERS: [&str; 22] = [
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
    "reasoning",
    "reasoning_effort",
];

/// Lists the served model, once for each of its names: its id, and the aliases of `server.model_aliases`.
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

/// Returns the model with this id or alias.
#[utoipa::path(
    get,
    // Ids may contain slashes, as names on the hub do.
    path = "/v1/models/{*id}",
    operation_id = "retrieveModel",
    tag = "OpenAI",
    params(("id" = String, Path, description = "The model's id, whose slashes need no escape.")),
    responses(
        (status = 200, description = "The model.", body = Model),
        (status = 400, description = "The id is not valid UTF-8.", body = ErrorBody),
        (status = 404, description = "The model is not served.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn model(
    State(server): State<Arc<Server>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::invalid("model", "expected an id in UTF-8"))?;
    let index = server.served(Some(&id))?;
    // Any name may be allowed. A name that is in no list means the id.
    let model = server.library().model(index);
    let name = server.listed(&id).map_or(model.id(), |(_, name)| name);
    Ok(Json(Model::of(&server, index, &model, name)))
}

words! {
    ModelObject { Model = "model" };
}

replies! {
    /// The served model, under each of its names.
    pub(in crate::api) struct ModelList {
        #[schema(inline)]
        object: ListName,
        data: Vec<Model>,
        /// Codex reads its own descriptions of models here. Always empty, so that it uses its defaults.
        models: Vec<String>,
        /// Anthropic's pages: there is one, which has all names.
        has_more: bool,
        first_id: Option<String>,
        last_id: Option<String>,
    }

    /// A model. Fields that only the loaded model knows are absent before the model is loaded.
    pub(in crate::api) struct Model {
        id: String,
        #[schema(inline)]
        object: ModelObject,
        /// Anthropic's name for `object`.
        #[schema(inline)]
        r#type: ModelObject,
        /// The model's id, also where `id` is an alias.
        display_name: String,
        /// When the server started: Unix time, in seconds.
        created: u64,
        /// That time in RFC 3339, as Anthropic has it.
        created_at: String,
        #[schema(inline)]
        lifecycle: Lifecycle,
        owned_by: &'static str,
        status: ModelStatus,
        architecture: Architecture,
        /// Parameters of chat completions, as OpenRouter's list of models names them.
        supported_parameters: [&'static str; SUPPORTED_PARAMETERS.len()],
        /// The syntax in which the model calls tools. `json` = it has none of its own.
        tool_call_parser?: &'static str,
        /// The most tokens of prompt and answer together. The same number has several names: `max_model_len` (vLLM),
        /// `context_length` (OpenRouter), `max_context_length` (LM Studio), `context_window` (Groq),
        /// `max_input_tokens` and `max_tokens` (Anthropic), and `n_ctx` in `meta` (llama.cpp).
        max_model_len?: usize,
        context_length?: usize,
        max_context_length?: usize,
        context_window?: usize,
        max_input_tokens?: usize,
        max_tokens?: usize,
        meta?: ModelMeta,
    }
}

/// Whether a model will be served for long, as Anthropic's list says it.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Lifecycle {
    Active,
}

replies! {
    /// The status of a model, as llama.cpp's server reports it for several models.
    struct ModelStatus {
        #[schema(inline)]
        value: ModelStage,
    }
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum ModelStage {
    Loaded,
    /// It is loaded for the first time, or again after the device was lost, or for a request.
    Loading,
    /// The model was idle, or was not requested yet. The next request loads it.
    Unloaded,
}

impl From<Stage> for ModelStage {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Loaded => Self::Loaded,
            Stage::Loading => Self::Loading,
            Stage::Unloaded => Self::Unloaded,
        }
    }
}

replies! {
    /// What the model reads and writes, as OpenRouter reports it.
    struct Architecture {
        modality: &'static str,
        input_modalities: &'static [&'static str],
        output_modalities: [&'static str; 1],
    }

    struct ModelMeta {
        n_ctx: usize,
        n_vocab: usize,
        /// The length of an embedding.
        n_embd: usize,
    }
}

impl ModelList {
    pub fn of(server: &Server) -> Self {
        let models = server.library().models();
        let named = models
            .iter()
            .flat_map(|(index, model)| model.names().map(move |name| Model::of(server, *index, model, name)));
        let data: Vec<Model> = named.collect();
        let [first_id, last_id] = [data.first(), data.last()].map(|model| Some(model?.id.clone()));
        Self { object: ListName::List, data, models: Vec::new(), has_more: false, first_id, last_id }
    }
}

impl Model {
    fn of(server: &Server, index: usize, model: &library::Model, name: &str) -> Self {
        let engine = model.engine();
        let limits = engine.as_ref().map(EngineHandle::limits);
        let context = limits.map(|limits| limits.max_context);
        let takes_images = model.takes_images();
        Self {
            id: name.to_owned(),
            object: ModelObject::Model,
            r#type: ModelObject::Model,
            display_name: model.id().to_owned(),
            created: server.created,
            created_at: rfc3339(server.created),
            lifecycle: Lifecycle::Active,
            owned_by: env!("CARGO_PKG_NAME"),
            status: ModelStatus { value: server.library().stage(index).into() },
            architecture: Architecture {
                modality: if takes_images { "text+image->text" } else { "text->text" },
                input_modalities: if takes_images { &["text", "image"] } else { &["text"] },
                output_modalities: ["text"],
            },
            supported_parameters: SUPPORTED_PARAMETERS,
            tool_call_parser: model.call_syntax(),
            max_model_len: context,
            context_length: context,
            max_context_length: context,
            context_window: context,
            max_input_tokens: context,
            max_tokens: context,
            meta: limits.map(|limits| ModelMeta {
                n_ctx: limits.max_context,
                n_vocab: limits.vocab_size,
                n_embd: limits.hidden_size,
            }),
        }
    }
}
