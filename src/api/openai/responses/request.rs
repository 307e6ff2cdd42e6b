//! The body of `POST /v1/responses`: OpenAI's JSON becomes a [`GenerateRequest`].
//!
//! Unknown fields are ignored, and so are fields for billing and tracing. A field that would change the answer and that this
//! server does not support is refused by name.

use std::sync::Arc;

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::openai::conversation::ImageFields;
use crate::api::openai::grammar::FormatType;
use crate::api::openai::other_fields::{OtherFields, Response};
use crate::api::openai::responses::items::{Input, conversation_of, kept_input};
use crate::api::openai::responses::object::{
    Reasoning, RepeatedRequest, RepeatedTool, ServiceTier, SharedJson, TextFormat, Truncation,
};
use crate::api::openai::tools::ResponseToolFields;
use crate::api::server::Server;
use crate::api::thinking::ReasoningOptions;
use crate::api::wire;
use crate::api::wire::bounded::{MaxTokens, Probability, Salt, Temperature, TopLogprobs};
use crate::api::wire::union::{Refused, words};
use crate::api::wire::{JsonObject, required, short};
use crate::engine::ClientId;
use crate::model::SamplingOptions;
use crate::session::{Conversation, GenerateRequest, ResponseGrammar};
use crate::text::{GrammarSource, Message};

/// The value of `include` that asks for log probabilities.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

words! {
    /// `auto` and `disabled` mean the same here: a conversation that is too long is an error.
    TruncationAsked { Auto = "auto", Disabled = "disabled" };
}

wire::composed! {
    /// The body of a request for a response.
    ResponsesRequest {
        response: ResponseFields,
        tools: ResponseToolFields,
        images: ImageFields,
        other: OtherFields<Response>,
    }
}

/// The fields of a request for a response, except its tools.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ResponseFields {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    /// A user's text, or a list of items with at least one message.
    #[schema(inline)]
    input: Input,
    /// The system text of this response; later responses do not inherit it.
    instructions: Option<String>,
    /// The id of a stored response of this client; its conversation is continued.
    previous_response_id: Option<String>,
    /// Whether the response is stored; true by default.
    store: Option<bool>,
    /// Whether the answer comes as server-sent events.
    stream: Option<bool>,
    /// The most tokens of the answer; if absent, as many as the context holds.
    max_output_tokens: Option<MaxTokens>,
    /// Temperature; 0 is greedy decoding.
    temperature: Option<Temperature>,
    top_p: Option<Probability>,
    /// Return log probabilities of the answer's tokens, and of this many alternatives to each.
    top_logprobs: Option<TopLogprobs>,
    /// `message.output_text.logprobs` asks for log probabilities; other values are ignored.
    include: Option<Vec<String>>,
    text: Option<ResponseText>,
    /// Whether the model thinks before it answers; if absent, as its chat template decides.
    #[schema(inline)]
    reasoning: Option<ReasoningOptions>,
    /// Requests share the prefix cache only with requests of the same salt.
    cache_salt: Option<Salt>,
    /// Repeated in the response, and not used.
    metadata: Option<JsonObject>,
    /// Repeated in the response, and not used.
    prompt_cache_key: Option<String>,
    /// Repeated in the response, and not used.
    safety_identifier: Option<String>,
    /// Repeated in the response, and not used.
    user: Option<String>,
    #[allow(dead_code, reason = "the values mean the same here")]
    truncation: Option<TruncationAsked>,
    /// Not supported.
    background: Option<Refused>,
    /// Not supported.
    conversation: Option<Refused>,
    /// Not supported.
    prompt: Option<Refused>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct ResponseText {
    format: Option<ResponseTextFormat>,
}

/// The format of the answer.
#[derive(Debug, Deserialize, ToSchema)]
struct ResponseTextFormat {
    r#type: FormatType,
    /// For `json_schema`, which requires it.
    name: Option<String>,
    /// Enforce every keyword of the schema; a keyword that cannot be enforced is an error.
    strict: Option<bool>,
    /// For `json_schema`, which requires it.
    schema: Option<JsonObject>,
}

/// What the reply needs of the request, and what the response repeats of it.
pub(in crate::api) struct Form {
    pub server: Arc<Server>,
    pub owner: ClientId,
    pub store: bool,
    /// The items of the conversation before the answer as a JSON list, if the response is stored. As text, because the
    /// memory of the values may be many times as large, and the request may wait for a long time.
    pub input: Bytes,
    pub repeated: RepeatedRequest,
}

/// Parses a body of `owner`, whose stored responses it may continue.
pub(in crate::api) fn parse(
    server: &Arc<Server>,
    owner: ClientId,
    body: &[u8],
) -> Result<Parsed<Form>, ApiError> {
    let before = |id: &str| server.responses.get(id, owner).map(|stored| stored.items());
    let body = wire::object(body)?;
    let ResponsesRequest { response: fields, tools, images: of_images, .. } = ResponsesRequest::read(&body)?;
    fields.refuse_unsupported()?;
    let (tools, warnings) = tools.tools()?;
    let (grammar, format) = fields.text_format(&body)?;

    let mut items = match &fields.previous_response_id {
        None => Vec::new(),
        Some(id) => before(id).ok_or_else(|| ApiError::UnknownPreviousResponse(short(id)))?,
    };
    let mut conversation = Conversation::default();
    conversation_of(&items, &mut conversation)?;
    fields.input.read(&mut conversation)?;
    items.extend(kept_input(&body["input"])?);

    let top_logprobs = fields.top_logprobs.map_or(0, |top| top.0);
    let included = fields.include.iter().flatten().any(|name| name == INCLUDE_LOGPROBS);
    let logprobs = included || top_logprobs > 0;
    let stream = fields.stream.unwrap_or(false);
    let store = fields.store.unwrap_or(true) && server.responses.is_open();
    let input = if store { Value::Array(items).to_string().into() } else { Bytes::new() };
    let system = fields.instructions.as_ref().map(|text| Message::new("system", text));
    let (messages, images) = conversation.finish();
    let messages = system.into_iter().chain(messages).collect();
    let max_tokens = fields.max_output_tokens.map(MaxTokens::get);
    let repeated = RepeatedRequest {
        background: false,
        instructions: fields.instructions,
        max_output_tokens: max_tokens,
        max_tool_calls: None,
        metadata: SharedJson::new(&fields.metadata.unwrap_or_default()),
        parallel_tool_calls: tools.parallel,
        previous_response_id: fields.previous_response_id,
        prompt_cache_key: fields.prompt_cache_key,
        reasoning: Reasoning::new(fields.reasoning.as_ref()),
        safety_identifier: fields.safety_identifier,
        service_tier: ServiceTier::Default,
        store,
        temperature: fields.temperature.map(|t| t.0),
        text: TextFormat { format },
        tool_choice: match &body["tool_choice"] {
            Value::Null => SharedJson::new(&"auto"),
            asked => SharedJson::new(asked),
        },
        tools: RepeatedTool::all(&tools),
        top_logprobs,
        top_p: fields.top_p.map(|p| p.0),
        truncation: Truncation::Disabled,
        user: fields.user,
        warnings: Some(warnings).filter(|warnings| !warnings.is_empty()),
    };
    let request = GenerateRequest {
        messages,
        images,
        image_tokens: of_images.tokens(),
        max_tokens,
        sampling: SamplingOptions {
            temperature: fields.temperature.map(|t| t.0 as f32),
            top_p: fields.top_p.map(|p| p.0 as f32),
            ..SamplingOptions::default()
        },
        logprobs: logprobs.then_some(top_logprobs as usize),
        grammar,
        tools,
        thinking: fields.reasoning.map(ReasoningOptions::thinking).unwrap_or_default(),
        ..GenerateRequest::default()
    };
    let (model, cache_salt) = (wire::named(fields.model), fields.cache_salt.map(|salt| salt.0));
    let form = Form { server: Arc::clone(server), owner, store, input, repeated };
    Ok(Parsed { model, request, stream, cache_salt, form })
}

impl ResponseFields {
    /// The grammar of the answer, and the field `text.format` as the response repeats it.
    fn text_format(&self, body: &Value) -> Result<(Option<ResponseGrammar>, SharedJson), ApiError> {
        const AT: &str = "text.format";
        let Some(format) = self.text.as_ref().and_then(|text| text.format.as_ref()) else {
            return Ok((None, SharedJson::new(&json!({"type": "text"}))));
        };
        let source = match format.r#type {
            FormatType::Text => None,
            FormatType::JsonObject => Some(GrammarSource::json_object()),
            FormatType::JsonSchema => {
                required(format.name.as_ref(), AT, "name")?;
                let schema = required(format.schema.clone(), AT, "schema")?.into();
                Some(GrammarSource::JsonSchema { schema, strict: format.strict.unwrap_or(false) })
            }
        };
        let grammar = source.map(|source| ResponseGrammar { source, param: AT.into() });
        Ok((grammar, SharedJson::new(&body["text"]["format"])))
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        for (name, value, problem) in [
            (
                "background",
                self.background,
                "this server does not answer in the background; omit it, or use stream",
            ),
            (
                "conversation",
                self.conversation,
                "this server stores responses and not conversations; use previous_response_id",
            ),
            ("prompt", self.prompt, "this server stores no prompts; send instructions and input"),
        ] {
            if Refused::is_asked(value) {
                return Err(ApiError::unsupported(name, problem));
            }
        }
        Ok(())
    }
}
