//! The lists of models, and what is known of each: `/api/version`, `/api/status`, `/api/tags`, `/api/ps` and `/api/show`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange;
use crate::api::ids::date_after;
use crate::api::names::{named_by, tagged};
use crate::api::ollama::store::kept_because;
use crate::api::openapi::{OllamaAuthErrors, OllamaErrors, post_route};
use crate::api::server::Server;
use crate::api::wire;
use crate::api::wire::reply::replies;
use crate::engine::EngineState;
use crate::library::{Model, ModelCard, Stage};

/// The version of Ollama whose API these routes have. Clients read it as three numbers, and refuse old versions.
const VERSION: &str = "0.30.0";
/// Until when a model is kept that is never unloaded. Ollama reports a time in the far future too.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

replies! {
    pub(in crate::api) struct OllamaVersion {
        /// The version of Ollama whose API this server has.
        version: &'static str,
    }

    pub(in crate::api) struct OllamaStatus {
        cloud: OllamaCloud,
    }

    /// Ollama's own service for models that no machine of the user runs.
    struct OllamaCloud {
        /// Always true.
        disabled: bool,
        /// What disables it. Always `config`.
        source: &'static str,
    }

    pub(in crate::api) struct OllamaModels {
        models: Vec<OllamaModel>,
    }

    /// A model that can be requested.
    struct OllamaModel {
        name: String,
        model: String,
        /// When its newest file was changed, in RFC 3339.
        modified_at: String,
        /// Bytes of its files.
        size: u64,
        /// 64 hexadecimal digits that change when a file changes.
        digest: String,
        details: OllamaDetails,
        capabilities: Vec<&'static str>,
    }

    struct OllamaDetails {
        /// Always empty.
        parent_model: &'static str,
        format: String,
        family: String,
        families: [String; 1],
        /// Such as `27.4B`.
        parameter_size: String,
        /// How most weights are stored.
        quantization_level: String,
        /// The most tokens of prompt and answer together.
        context_length: usize,
        /// The length of an embedding.
        embedding_length: usize,
    }

    pub(in crate::api) struct OllamaRunning {
        models: Vec<OllamaRunningModel>,
    }

    /// A model that is loaded.
    struct OllamaRunningModel {
        name: String,
        model: String,
        size: u64,
        digest: String,
        details: OllamaDetails,
        /// When the model is unloaded if no request comes, in RFC 3339; in a hundred years if it is never unloaded.
        expires_at: String,
        /// Bytes of device memory.
        size_vram: u64,
        context_length: usize,
    }

    pub(in crate::api) struct OllamaShown {
        /// Always empty: the server has no model files.
        modelfile: &'static str,
        /// The defaults of `options`, one in each line.
        parameters: String,
        /// The chat template, in Jinja.
        template: String,
        details: OllamaDetails,
        /// Values by the names of GGUF's keys.
        #[schema(value_type = HashMap<String, Value>)]
        model_info: BTreeMap<String, Value>,
        capabilities: Vec<&'static str>,
        modified_at: String,
        /// Why `/api/delete` does not delete the model; absent if it does, and if no model has the name asked for.
        kept_because?: String,
    }
}

/// The body of `/api/show`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaShowRequest {
    /// A name that `/api/tags` lists; if absent or empty, the served model.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
}

/// Returns the version of Ollama's API.
#[utoipa::path(
    get,
    path = "/api/version",
    operation_id = "ollamaVersion",
    tag = "Ollama",
    responses((status = 200, description = "The version.", body = OllamaVersion), OllamaAuthErrors),
)]
pub(in crate::api) async fn version() -> Json<OllamaVersion> {
    Json(OllamaVersion { version: VERSION })
}

/// Says that the server has no models of Ollama's cloud.
#[utoipa::path(
    get,
    path = "/api/status",
    operation_id = "ollamaStatus",
    tag = "Ollama",
    responses((status = 200, description = "The status.", body = OllamaStatus), OllamaAuthErrors),
)]
pub(in crate::api) async fn status() -> Json<OllamaStatus> {
    Json(OllamaStatus { cloud: OllamaCloud { disabled: true, source: "config" } })
}

/// Lists the models, in Ollama's format.
#[utoipa::path(
    get,
    path = "/api/tags",
    operation_id = "ollamaTags",
    tag = "Ollama",
    responses((status = 200, description = "The list.", body = OllamaModels), OllamaAuthErrors),
)]
pub(in crate::api) async fn tags(State(server): State<Arc<Server>>) -> Result<Json<OllamaModels>, ApiError> {
    let models = server.library().models();
    let listed = models.iter().filter_map(|(_, model)| Some((model, model.card()?)));
    let named = listed.flat_map(|(model, card)| {
        model.names().map(move |name| OllamaModel {
            name: tagged(name),
            model: tagged(name),
            modified_at: modified(card),
            size: card.bytes,
            digest: card.digest.clone(),
            details: details(model, card),
            capabilities: capabilities(model, card),
        })
    });
    let models: Vec<_> = named.collect();
    if models.is_empty() { Err(ApiError::Loading) } else { Ok(Json(OllamaModels { models })) }
}

/// Lists the loaded models, in Ollama's format.
#[utoipa::path(
    get,
    path = "/api/ps",
    operation_id = "ollamaRunning",
    tag = "Ollama",
    responses((status = 200, description = "The list.", body = OllamaRunning), OllamaAuthErrors),
)]
pub(in crate::api) async fn running(State(server): State<Arc<Server>>) -> Json<OllamaRunning> {
    let library = server.library();
    let running = library.models().into_iter().filter_map(|(index, model)| {
        let (card, engine) = (model.card()?, model.engine()?);
        let is_loaded = library.stage(index) == Stage::Loaded && engine.state() == EngineState::Ready;
        is_loaded.then(|| OllamaRunningModel {
            name: tagged(model.id()),
            model: tagged(model.id()),
            size: card.bytes,
            digest: card.digest.clone(),
            details: details(&model, card),
            expires_at: date_after(engine.kept_for().unwrap_or(FOREVER)),
            size_vram: model.report().map_or(0, |report| report.bytes()),
            context_length: engine.limits().max_context,
        })
    });
    Json(OllamaRunning { models: running.collect() })
}

post_route! {
    /// Describes a model, in Ollama's format.
    "/api/show", "ollamaShow", "Ollama",
    OllamaShowRequest => (description = "The model.", body = OllamaShown), OllamaErrors,
    show(server, client: Client, body) -> Json<OllamaShown> {
        let read = exchange::process_body(&server, &client, body, |server, body| {
            let OllamaShowRequest { model, name } = wire::body(body)?;
            let name = named_by(model, name);
            let is_listed = name.as_deref().is_none_or(|name| server.listed(name).is_some());
            Ok((server.served(name.as_deref())?, is_listed))
        });
        let (_, (index, is_listed)) = read.await?;
        let model = &server.library().model(index);
        let card = model.card().ok_or(ApiError::Loading)?;
        let details = details(model, card);
        let arch = &card.architecture;
        let kept = kept_because(&server, &client, index);
        let of_arch = |key: &str, value: usize| (format!("{arch}.{key}"), json!(value));
        let model_info = BTreeMap::from([
            ("general.architecture".to_owned(), json!(arch)),
            ("general.basename".to_owned(), json!(model.id())),
            ("general.parameter_count".to_owned(), json!(card.parameters)),
            of_arch("context_length", details.context_length),
            of_arch("embedding_length", card.hidden_size),
            of_arch("block_count", card.layers),
            of_arch("vocab_size", card.vocab_size),
        ]);
        Ok(Json(OllamaShown {
            modelfile: "",
            parameters: parameters(model, details.context_length),
            template: card.template.clone(),
            details,
            model_info,
            capabilities: capabilities(model, card),
            modified_at: modified(card),
            // No model is deleted by a name that it does not have.
            kept_because: kept.filter(|_| is_listed).map(|error| error.to_string()),
        }))
    }
}

/// The defaults of `options`.
fn parameters(model: &Model, context: usize) -> String {
    let mut lines = vec![format!("num_ctx  {context}")];
    if let Some(service) = model.service() {
        let params = service.sampling_params(&Default::default());
        lines.push(format!("temperature  {}", params.temperature));
        lines.push(format!("top_k  {}", params.top_k));
        lines.push(format!("top_p  {}", params.top_p));
        lines.push(format!("min_p  {}", params.min_p));
        lines.push(format!("repeat_penalty  {}", params.repetition_penalty));
    }
    lines.join("\n")
}

fn details(model: &Model, card: &ModelCard) -> OllamaDetails {
    OllamaDetails {
        parent_model: "",
        format: card.format.clone(),
        family: card.architecture.clone(),
        families: [card.architecture.clone()],
        parameter_size: parameter_size(card.parameters),
        quantization_level: card.quantization.clone(),
        // A model that was not loaded yet may get a smaller context.
        context_length: model.engine().map_or(card.context, |engine| engine.limits().max_context),
        embedding_length: card.hidden_size,
    }
}

/// Such as `135M` and `27.4B`.
fn parameter_size(parameters: u64) -> String {
    match parameters as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n => format!("{:.1}M", n / 1e6),
    }
}

fn capabilities(model: &Model, card: &ModelCard) -> Vec<&'static str> {
    let thinking = card.can_think.then_some("thinking");
    let vision = model.takes_images().then_some("vision");
    ["completion", "tools"].into_iter().chain(vision).chain(thinking).collect()
}

fn modified(card: &ModelCard) -> String {
    let modified = card.modified.unwrap_or(SystemTime::UNIX_EPOCH);
    jiff::Timestamp::try_from(modified).unwrap_or_default().to_string()
}
