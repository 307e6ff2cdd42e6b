//! The body of `POST /v1/responses`: OpenAI's JSON in, a [`GenerateRequest`] out.
//!
//! Unknown fields are ignored, and so are those that bill or trace; what would change the answer and cannot be had is
//! refused by name.

use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::openai::responses::items::{Input, conversation_of, kept_input};
use crate::api::openai::responses::object::{
    Reasoning, RepeatedRequest, RepeatedTool, ServiceTier, TextFormat, Truncation,
};
use crate::api::openai::tools::ResponseToolFields;
use crate::api::wire;
use crate::api::wire::bounded::{MaxTokens, Probability, Salt, Temperature, TopLogprobs};
use crate::api::wire::union::{Refused, words};
use crate::api::wire::{JsonObject, required, short};
use crate::model::SamplingOptions;
use crate::session::{Conversation, GenerateRequest, ResponseGrammar};
use crate::text::{GrammarSource, Message};

/// The value of `include` that asks for log probabilities.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

words! {
    ResponseFormatType { Text = "text", JsonObject = "json_object", JsonSchema = "json_schema" };
    /// A conversation that is too long is an error with either.
    TruncationAsked { Auto = "auto", Disabled = "disabled" };
}

wire::composed! {
    /// The body of a request for a response.
    ResponsesRequest {
        response: ResponseFields,
        tools: ResponseToolFields,
    }
}

/// What a request for a response says beside its tools.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ResponseFields {
    /// The id that `/v1/models` names; absent or empty is the model that is served.
    model: Option<String>,
    /// A user's text, or items, one of them a message at least.
    #[schema(inline)]
    input: Input,
    /// The system text of this response alone.
    instructions: Option<String>,
    /// A response that is kept for who asks; the conversation goes on from there.
    previous_response_id: Option<String>,
    /// Whether the response is kept; absent is true.
    store: Option<bool>,
    /// Server-sent events.
    stream: Option<bool>,
    /// Absent is as many as the context holds.
    max_output_tokens: Option<MaxTokens>,
    /// 0 is greedy.
    temperature: Option<Temperature>,
    top_p: Option<Probability>,
    /// Log probabilities of the answer's tokens, and of so many alternatives.
    top_logprobs: Option<TopLogprobs>,
    /// `message.output_text.logprobs` counts, others are ignored.
    include: Option<Vec<String>>,
    text: Option<ResponseText>,
    /// Requests with the same salt share the prefix cache, and no others do.
    cache_salt: Option<Salt>,
    /// Repeated.
    metadata: Option<JsonObject>,
    /// Repeated.
    prompt_cache_key: Option<String>,
    /// Repeated.
    safety_identifier: Option<String>,
    /// Repeated.
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

/// What the answer must be.
#[derive(Debug, Deserialize, ToSchema)]
struct ResponseTextFormat {
    r#type: ResponseFormatType,
    /// With `json_schema`, where it must be there.
    name: Option<String>,
    /// Every keyword is enforced, or it is an error.
    strict: Option<bool>,
    /// With `json_schema`, where it must be there.
    schema: Option<JsonObject>,
}

/// How the response is wanted, and what its object repeats of the request.
#[derive(Debug)]
pub(in crate::api) struct Form {
    pub stream: bool,
    pub store: bool,
    /// The items of the conversation before the answer.
    pub items: Vec<Value>,
    pub repeated: RepeatedRequest,
}

/// `before` gives the items up to a response that was kept, and those of its answer.
pub(in crate::api) fn parse(
    body: &[u8],
    before: impl FnOnce(&str) -> Option<Vec<Value>>,
) -> Result<Parsed<Form>, ApiError> {
    let body = wire::object(body)?;
    let ResponsesRequest { response: asked, tools } = ResponsesRequest::read(&body)?;
    asked.refuse_unsupported()?;
    let tools = tools.tools()?;
    let (grammar, format) = asked.text_format(&body)?;

    let mut items = match &asked.previous_response_id {
        None => Vec::new(),
        Some(id) => before(id).ok_or_else(|| ApiError::UnknownPreviousResponse(short(id)))?,
    };
    let mut conversation = Conversation::default();
    conversation_of(&items, &mut conversation)?;
    asked.input.read(&mut conversation)?;
    items.extend(kept_input(&body["input"])?);

    let top_logprobs = asked.top_logprobs.map_or(0, |top| top.0);
    let included = asked.include.iter().flatten().any(|name| name == INCLUDE_LOGPROBS);
    let logprobs = included || top_logprobs > 0;
    let (stream, store) = (asked.stream.unwrap_or(false), asked.store.unwrap_or(true));
    let system = asked.instructions.as_ref().map(|text| Message::new("system", text));
    let messages = system.into_iter().chain(conversation.finish()).collect();
    let max_tokens = asked.max_output_tokens.map(MaxTokens::get);
    let repeated = RepeatedRequest {
        background: false,
        instructions: asked.instructions,
        max_output_tokens: max_tokens,
        max_tool_calls: None,
        metadata: asked.metadata.unwrap_or_default().0,
        parallel_tool_calls: tools.parallel,
        previous_response_id: asked.previous_response_id,
        prompt_cache_key: asked.prompt_cache_key,
        reasoning: Reasoning::default(),
        safety_identifier: asked.safety_identifier,
        service_tier: ServiceTier::Default,
        store,
        temperature: asked.temperature.map(|t| t.0),
        text: TextFormat { format },
        tool_choice: Some(body["tool_choice"].clone()).filter(|v| !v.is_null()).unwrap_or(json!("auto")),
        tools: RepeatedTool::all(&tools),
        top_logprobs,
        top_p: asked.top_p.map(|p| p.0),
        truncation: Truncation::Disabled,
        user: asked.user,
    };
    let request = GenerateRequest {
        messages,
        max_tokens,
        sampling: SamplingOptions {
            temperature: asked.temperature.map(|t| t.0 as f32),
            top_p: asked.top_p.map(|p| p.0 as f32),
            ..SamplingOptions::default()
        },
        logprobs: logprobs.then_some(top_logprobs as usize),
        grammar,
        tools,
        ..GenerateRequest::default()
    };
    let (model, cache_salt) = (wire::named(asked.model), asked.cache_salt.map(|salt| salt.0));
    Ok(Parsed { model, request, stream, cache_salt, wire: Form { stream, store, items, repeated } })
}

impl ResponseFields {
    /// What the answer must be, and the field as the response repeats it.
    fn text_format(&self, body: &Value) -> Result<(Option<ResponseGrammar>, Value), ApiError> {
        const AT: &str = "text.format";
        let Some(format) = self.text.as_ref().and_then(|text| text.format.as_ref()) else {
            return Ok((None, json!({"type": "text"})));
        };
        let source = match format.r#type {
            ResponseFormatType::Text => None,
            ResponseFormatType::JsonObject => Some(GrammarSource::json_object()),
            ResponseFormatType::JsonSchema => {
                required(format.name.as_ref(), AT, "name")?;
                let schema = required(format.schema.clone(), AT, "schema")?.into();
                Some(GrammarSource::JsonSchema { schema, strict: format.strict.unwrap_or(false) })
            }
        };
        let grammar = source.map(|source| ResponseGrammar { source, param: AT.into() });
        Ok((grammar, body["text"]["format"].clone()))
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        for (name, value, problem) in [
            (
                "background",
                self.background,
                "this server answers while its client waits; leave it out, or stream",
            ),
            (
                "conversation",
                self.conversation,
                "this server keeps responses and no conversations; use previous_response_id",
            ),
            ("prompt", self.prompt, "this server keeps no prompts; send instructions and input"),
        ] {
            if Refused::is_asked(value) {
                return Err(ApiError::unsupported(name, problem));
            }
        }
        Ok(())
    }
}
