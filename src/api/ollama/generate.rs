//! `POST /api/generate`: answers one text, or continues it without a chat template (`raw`).

use serde::Deserialize;
use utoipa::ToSchema;

use super::answer::{AnswerFormat, LineEnd, LineHead, Piece, Route};
use super::chat;
use super::fields::{AnswerForm, OllamaAnswerFields};
use crate::api::error::ApiError;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openapi::{OllamaErrors, post_route};
use crate::api::wire;
use crate::api::wire::bounded::TokenId;
use crate::api::wire::reply::replies;
use crate::api::wire::union::Lines;
use crate::session::{Conversation, GenerateRequest, Prepared, Service};

type OllamaGenerateLines = Lines<OllamaGenerate>;
type OllamaGenerateFormat = AnswerFormat<GenerateRoute>;

post_route! {
    /// Answers a text, in Ollama's format.
    "/api/generate", "ollamaGenerate", "Ollama",
    OllamaGenerateRequest => OllamaGenerate | OllamaGenerateLines as "application/x-ndjson", OllamaErrors,
    generate by OllamaGenerateFormat
}

wire::composed! {
    /// The body of `/api/generate`.
    OllamaGenerateRequest {
        generate: OllamaGenerateFields,
        answer: OllamaAnswerFields,
    }
}

#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaGenerateFields {
    /// The user's text. Without one, the request loads the model, or unloads it if `keep_alive` is 0.
    prompt: Option<String>,
    /// Not supported: the model was not trained to fill in between two texts.
    #[schema(max_length = 0)]
    suffix: Option<String>,
    /// The system's text.
    system: Option<String>,
    /// Not supported: the checkpoint's own template is used. `raw` takes a prompt of your own.
    #[schema(max_length = 0)]
    template: Option<String>,
    /// The field `context` of an earlier answer, which this one continues.
    #[schema(inline)]
    context: Option<Vec<TokenId>>,
    /// Whether the prompt is continued as it is, without a template.
    raw: Option<bool>,
    /// Images, which come before the text: each a file as base64. Only for models that take images, and not with `raw`.
    images: Option<Vec<String>>,
}

replies! {
    /// A piece of an answer, or all of it if the request says `stream: false`.
    pub(in crate::api) struct OllamaGenerate {
        #[serde(flatten)]
        head: LineHead,
        response: String,
        thinking?: String,
        /// The ids of prompt and answer, in the last line. The next request may have them as its `context`. Absent if the
        /// request has images, which ids cannot hold.
        context?: Vec<u32>,
        /// Log probabilities of the tokens that the line adds, if the request has `logprobs`.
        logprobs?: Vec<TokenLogprob>,
        #[serde(flatten)]
        end: LineEnd,
    }
}

pub(in crate::api) struct GeneratePrompt {
    text: String,
    is_raw: bool,
    has_images: bool,
    context: Vec<u32>,
}

pub(in crate::api) enum GenerateRoute {}

impl Route for GenerateRoute {
    const PROMPT: &'static str = "prompt";
    const HAS_IDS: bool = true;
    type Prompt = GeneratePrompt;
    type Line = OllamaGenerate;

    fn parse(body: &[u8]) -> Result<(AnswerForm, GenerateRequest, Option<GeneratePrompt>), ApiError> {
        let request = OllamaGenerateRequest::read(&wire::object(body)?)?;
        let OllamaGenerateFields { prompt, suffix, system, template, context, raw, images } =
            request.generate;
        if suffix.is_some_and(|suffix| !suffix.is_empty()) {
            let problem = "the model was not trained to fill in between two texts";
            return Err(ApiError::unsupported("suffix", problem));
        }
        if template.is_some_and(|template| !template.is_empty()) {
            let problem = "the checkpoint's own template is used: send raw and a prompt of your own";
            return Err(ApiError::unsupported("template", problem));
        }
        let (form, request) = request.answer.read()?;
        let is_raw = raw.unwrap_or(false);
        let has_images = images.as_ref().is_some_and(|images| !images.is_empty());
        if is_raw && has_images {
            let problem = "only the chat template says where they belong: leave out images or raw";
            return Err(ApiError::unsupported("images", problem));
        }
        let text = prompt.unwrap_or_default();
        if text.is_empty() && !has_images {
            return Ok((form, request, None));
        }
        let mut conversation = Conversation::default();
        if !is_raw {
            if let Some(system) = system.filter(|system| !system.is_empty()) {
                conversation.say("system", system);
            }
            let content = chat::content(&mut conversation, "images", images, &text);
            conversation.say("user", content);
        }
        let (messages, images) = conversation.finish();
        let request = GenerateRequest { messages, images, ..request };
        let context = context.unwrap_or_default().into_iter().map(|id| id.0).collect();
        Ok((form, request, Some(GeneratePrompt { text, is_raw, has_images, context })))
    }

    fn prepare(
        prompt: &GeneratePrompt,
        service: &Service,
        request: &GenerateRequest,
        _: usize,
    ) -> Result<Prepared, ApiError> {
        match prompt.is_raw {
            true => service.prepare_with(request, |keep| {
                service.check_ids("context", &prompt.context)?;
                let ids = service.encode(&prompt.text, prompt.context.is_empty(), keep)?;
                Ok([&prompt.context[..], &ids].concat())
            }),
            false => Ok(service.prepare_after(&prompt.context, request)?),
        }
    }

    fn line(prompt: Option<&GeneratePrompt>, head: LineHead, piece: Piece, end: LineEnd) -> OllamaGenerate {
        let Piece { thought, text, logprobs, ids, .. } = piece;
        let context = (!ids.is_empty() && prompt.is_some_and(|prompt| !prompt.is_raw && !prompt.has_images))
            .then_some(ids);
        OllamaGenerate { head, response: text, thinking: thought, context, logprobs, end }
    }
}
