//! `POST /api/embed` and the older `/api/embeddings`.

use std::time::Instant;

use axum::Json;
use serde::Deserialize;
use utoipa::ToSchema;

use super::answer::nanoseconds;
use super::fields::KeepAliveParam;
use crate::api::embedding::{Texts, check_dimensions, embed_texts};
use crate::api::error::ApiError;
use crate::api::exchange;
use crate::api::openapi::{OllamaErrors, post_route};
use crate::api::wire;
use crate::api::wire::JsonObject;
use crate::api::wire::bounded::numbers;
use crate::api::wire::reply::replies;
use crate::api::wire::union::TextOr;
use crate::engine::KeepAlive;
use crate::session::Service;

/// The maximum number of texts of one request, which is that of `/v1/embeddings`.
const MAX_INPUTS: usize = 2048;

type OllamaInputs = TextOr<wire::bounded::List<String, 0, MAX_INPUTS>>;

numbers! {
    OllamaDimensions: i64 = 0..=u32::MAX as i64;
}

/// The body of `/api/embed`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaEmbedRequest {
    /// A name that `/api/tags` lists; if absent or empty, the served model.
    model: Option<String>,
    /// The text to embed, or several texts.
    #[schema(inline)]
    input: Option<OllamaInputs>,
    /// Cut texts that are longer than the context; true by default.
    truncate: Option<bool>,
    /// Must equal the model's own number, or be 0: embeddings cannot be shortened.
    dimensions: Option<OllamaDimensions>,
    #[schema(inline)]
    keep_alive: Option<KeepAliveParam>,
    /// Ignored: options are for answers.
    #[allow(dead_code, reason = "its type is checked, and it changes nothing")]
    options: Option<JsonObject>,
}

/// The body of `/api/embeddings`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaEmbeddingsRequest {
    /// A name that `/api/tags` lists; if absent or empty, the served model.
    model: Option<String>,
    /// The text to embed. It is cut if it is longer than the context. Without one, the embedding is empty.
    prompt: Option<String>,
    #[schema(inline)]
    keep_alive: Option<KeepAliveParam>,
    /// Ignored: options are for answers.
    #[allow(dead_code, reason = "its type is checked, and it changes nothing")]
    options: Option<JsonObject>,
}

replies! {
    pub(in crate::api) struct OllamaEmbedded {
        /// The model's name as the request has it.
        model: String,
        /// One for each text, of length 1.
        embeddings: Vec<Vec<f32>>,
        /// In nanoseconds.
        total_duration: u64,
        /// Always 0: a load counts in `total_duration`.
        load_duration: u64,
        prompt_eval_count: usize,
    }

    pub(in crate::api) struct OllamaEmbedding {
        /// Empty if the request has no text.
        embedding: Vec<f32>,
    }
}

post_route! {
    /// Embeds texts, in Ollama's format.
    "/api/embed", "ollamaEmbed", "Ollama",
    OllamaEmbedRequest => (description = "The answer.", body = OllamaEmbedded), OllamaErrors,
    embed(server, caller: Caller, body) -> Json<OllamaEmbedded> {
        let began = Instant::now();
        let prepared = exchange::process_body(&server, &caller.client, body, |server, body| {
            let OllamaEmbedRequest { model, input, truncate, dimensions, keep_alive, .. } = wire::body(body)?;
            // As in Ollama, an empty text is no text.
            let inputs = match input {
                None => Vec::new(),
                Some(TextOr::Text(text)) => Some(text).filter(|text| !text.is_empty()).into_iter().collect(),
                Some(TextOr::Other(texts)) => texts.0,
            };
            let model = wire::named(model);
            let service = server.service_for(model.as_deref())?;
            check_dimensions(&service, dimensions.map(|n| n.0).filter(|n| *n != 0))?;
            let texts = texts(&service, "input", &inputs, truncate.unwrap_or(true), keep_alive)?;
            Ok((texts, service, server.tagged_name(model.as_deref())))
        });
        let (arriving, (texts, service, model)) = prepared.await?;
        let embedded = embed_texts(&server, &caller, &service, arriving, texts).await?;
        let prompt_eval_count = embedded.iter().map(|(_, timings)| timings.prompt_n).sum();
        tracing::info!(inputs = embedded.len(), prompt_n = prompt_eval_count, "embedded");
        Ok(Json(OllamaEmbedded {
            model,
            embeddings: embedded.into_iter().map(|(state, _)| state).collect(),
            total_duration: nanoseconds(began.elapsed()),
            load_duration: 0,
            prompt_eval_count,
        }))
    }
}

post_route! {
    /// Embeds a text, in Ollama's older format.
    "/api/embeddings", "ollamaEmbeddings", "Ollama",
    OllamaEmbeddingsRequest => (description = "The answer.", body = OllamaEmbedding), OllamaErrors,
    embeddings(server, caller: Caller, body) -> Json<OllamaEmbedding> {
        let prepared = exchange::process_body(&server, &caller.client, body, |server, body| {
            let OllamaEmbeddingsRequest { model, prompt, keep_alive, .. } = wire::body(body)?;
            let service = server.service_for(wire::named(model).as_deref())?;
            let prompt = prompt.filter(|prompt| !prompt.is_empty());
            Ok((texts(&service, "prompt", prompt.as_slice(), true, keep_alive)?, service))
        });
        let (arriving, (texts, service)) = prepared.await?;
        let mut embedded = embed_texts(&server, &caller, &service, arriving, texts).await?;
        let embedding = embedded.pop().map(|(state, _)| state).unwrap_or_default();
        Ok(Json(OllamaEmbedding { embedding }))
    }
}

/// The texts of the field `at`. With `truncate`, they are cut at their end as the context requires.
fn texts(
    service: &Service,
    at: &'static str,
    texts: &[String],
    truncate: bool,
    keep_alive: Option<KeepAliveParam>,
) -> Result<Texts, ApiError> {
    // One token of the context is the answer's.
    let most = service.engine().limits().max_context - 1;
    let each = texts.iter().enumerate().map(|(i, text)| {
        let at = if texts.len() > 1 { format!("{at}[{i}]") } else { at.to_owned() };
        if text.is_empty() {
            return Err(ApiError::invalid(at, "expected a text, got an empty string"));
        }
        let mut ids = service.encode_text(text, truncate.then_some(usize::MAX))?;
        if truncate {
            ids.truncate(most);
        }
        Ok(ids)
    });
    let ids = each.collect::<Result<Vec<_>, ApiError>>().map_err(|error| error.in_prompt(at))?;
    Texts::new(service, at, ids, keep_alive.map_or(KeepAlive::Configured, |keep_alive| keep_alive.0))
}
