//! `POST /v1/embeddings`: the mean of the hidden states after the model's final norm, scaled to length 1. The mean is
//! over all tokens of a text, including the ids that begin it.
//!
//! The model was trained to continue texts and not to compare them. The mean shows roughly which texts are similar; a model
//! for embeddings is better. No text is cut: a text that is as long as the context, or longer, is refused. `dimensions`
//! other than the model's are refused too, because the model was not trained to work with fewer.

use axum::Json;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::embedding::{Texts, check_dimensions, embed_texts};
use crate::api::error::ApiError;
use crate::api::exchange;
use crate::api::openai::prompts::{Prompt, Prompts};
use crate::api::openapi::{BodyErrors, post_route};
use crate::api::wire;
use crate::api::wire::bounded::{TokenLimit, numbers};
use crate::api::wire::reply::ListName;
use crate::api::wire::union::words;
use crate::engine::KeepAlive;

/// The field with the texts.
const INPUT: &str = "input";
/// The maximum number of texts of one request, which is OpenAI's.
const MAX_INPUTS: usize = 2048;

type EmbeddingInputs = Prompts<MAX_INPUTS>;

words! {
    /// How the numbers are written. `base64` encodes them as f32, the least significant byte first.
    EncodingFormat { Float = "float", Base64 = "base64" };
    EmbeddingObject { Embedding = "embedding" };
}

numbers! {
    Dimensions: i64 = 1..=u32::MAX as i64;
}

/// The body of a request for embeddings.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct EmbeddingsRequest {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    /// The text to embed, several texts, or token ids. No text may be empty.
    #[schema(inline)]
    input: EmbeddingInputs,
    /// `float` if absent.
    encoding_format: Option<EncodingFormat>,
    /// Must equal the model's own number: embeddings cannot be shortened.
    dimensions: Option<Dimensions>,
    /// Embed only so many tokens of a text, the last ones; -1 embeds what the context holds.
    #[schema(inline)]
    truncate_prompt_tokens: Option<TokenLimit>,
}

impl EncodingFormat {
    fn write(&self, state: Vec<f32>) -> Numbers {
        match self {
            Self::Float => Numbers::Floats(state),
            Self::Base64 => {
                let bytes: Vec<u8> = state.iter().flat_map(|x| x.to_le_bytes()).collect();
                Numbers::Base64(BASE64_STANDARD.encode(bytes))
            }
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Embeddings {
    #[schema(inline)]
    object: ListName,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingsUsage,
}

/// The embedding of one input.
#[derive(Serialize, ToSchema)]
struct Embedding {
    #[schema(inline)]
    object: EmbeddingObject,
    index: usize,
    embedding: Numbers,
}

/// The numbers of an embedding, written as `encoding_format` says.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = EmbeddingNumbers)]
enum Numbers {
    Floats(Vec<f32>),
    /// Base64 of f32 numbers, the least significant byte first.
    Base64(String),
}

#[derive(Serialize, ToSchema)]
struct EmbeddingsUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

post_route! {
    /// Embeds texts.
    "/v1/embeddings", "createEmbedding", "OpenAI",
    EmbeddingsRequest => (description = "The answer.", body = Embeddings), BodyErrors,
    embeddings(server, caller: Caller, body) -> Json<Embeddings> {
        let prepared = exchange::process_body(&server, &caller.client, body, |server, body| {
            let EmbeddingsRequest { model, input, encoding_format, dimensions, truncate_prompt_tokens } =
                wire::body(body)?;
            let inputs = input.in_field(INPUT);
            if let Some((at, _)) = inputs.iter().find(|(_, text)| matches!(text, Prompt::Text(t) if t.is_empty()))
            {
                return Err(ApiError::invalid(at, "expected a text, got an empty string"));
            }
            let model = wire::named(model);
            let service = server.service_for(model.as_deref())?;
            check_dimensions(&service, dimensions.map(|n| n.0))?;
            // One token of the context is the answer's.
            let whole_context = service.engine().limits().max_context - 1;
            let keep = truncate_prompt_tokens.map(|limit| limit.get().unwrap_or(whole_context));
            let ids = inputs.iter().map(|(at, text)| text.text_ids(&service, at, keep));
            let ids = ids.collect::<Result<Vec<_>, _>>().map_err(|error| error.in_prompt(INPUT))?;
            let texts = Texts::new(&service, INPUT, ids, KeepAlive::Configured)?;
            Ok((texts, encoding_format.unwrap_or(EncodingFormat::Float), service))
        });
        let (arriving, (texts, encoding, service)) = prepared.await?;
        let embedded = embed_texts(&server, &caller, &service, arriving, texts).await?;
        let tokens: usize = embedded.iter().map(|(_, timings)| timings.prompt_n).sum();
        tracing::info!(inputs = embedded.len(), prompt_n = tokens, "embedded");
        let data = embedded.into_iter().enumerate().map(|(index, (state, _))| Embedding {
            object: EmbeddingObject::Embedding,
            index,
            embedding: encoding.write(state),
        });
        Ok(Json(Embeddings {
            object: ListName::List,
            data: data.collect(),
            model: service.model().id().to_owned(),
            usage: EmbeddingsUsage { prompt_tokens: tokens, total_tokens: tokens },
        }))
    }
}
