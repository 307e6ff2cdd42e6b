//! The body of `POST /v1/responses`: OpenAI's JSON in, a [`GenerateRequest`] out.
//!
//! Unknown fields are ignored, and so are those that bill or trace; what would change the answer and cannot be had is
//! refused by name.

use serde_json::{Map, Value, json};

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::fields::{
    Fields, Item, PROBABILITY, TEMPERATURE, TOKENS, TOP_LOGPROBS, missing, model, nested, object, short,
    wrong_type,
};
use crate::api::openai::conversation::{Shape, openai_tools};
use crate::api::openai::grammar::json_schema;
use crate::api::openai::responses::items::{input, read};
use crate::api::sharing::cache_salt;
use crate::model::SamplingOptions;
use crate::session::{Conversation, GenerateRequest, ResponseGrammar, Tool, Tools};
use crate::text::{GrammarSource, Message};

/// How the response is wanted, and what its object repeats of the request.
#[derive(Debug)]
pub(in crate::api) struct Form {
    pub stream: bool,
    pub store: bool,
    /// The items of the conversation before the answer.
    pub items: Vec<Value>,
    /// Fields of the response's object.
    pub echo: Map<String, Value>,
}

/// `before` gives the items up to a response that was kept, and those of its answer.
pub(in crate::api) fn parse(
    body: &[u8],
    before: impl FnOnce(&str) -> Option<Vec<Value>>,
) -> Result<Parsed<Form>, ApiError> {
    let body = object(body)?;
    let fields = Fields(&body);
    let model = model(&fields)?;
    let instructions = fields.string("instructions")?;
    let previous = fields.string("previous_response_id")?;
    refuse_unsupported(&fields)?;
    let tools = openai_tools(&fields, Shape::Flat)?;

    let mut items = match previous {
        None => Vec::new(),
        Some(id) => before(id).ok_or_else(|| ApiError::UnknownPreviousResponse(short(id)))?,
    };
    let mut conversation = Conversation::default();
    // They were read before, so nothing is wrong with them.
    for item in &items {
        read(&Item::new("previous_response_id", item)?, &mut conversation)?;
    }
    items.extend(input(&fields, &mut conversation)?);

    let temperature = fields.number("temperature", TEMPERATURE)?;
    let top_p = fields.number("top_p", PROBABILITY)?;
    let max_output_tokens = fields.integer("max_output_tokens", TOKENS)?;
    let (grammar, text) = text(&fields)?;
    let top_logprobs = fields.integer("top_logprobs", TOP_LOGPROBS)?.unwrap_or(0);
    let logprobs = includes_logprobs(&fields)? || top_logprobs > 0;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let store = fields.bool("store")?.unwrap_or(true);
    let metadata = fields.object("metadata")?.cloned().unwrap_or_default();
    let mut messages: Vec<Message> =
        instructions.map(|text| Message::new("system", text)).into_iter().collect();
    messages.extend(conversation.finish());

    let echo = json!({
        "background": false,
        "instructions": instructions,
        "max_output_tokens": max_output_tokens,
        "max_tool_calls": null,
        "metadata": metadata,
        "parallel_tool_calls": tools.parallel,
        "previous_response_id": previous,
        "prompt_cache_key": fields.string("prompt_cache_key")?,
        "reasoning": {"effort": null, "summary": null},
        "safety_identifier": fields.string("safety_identifier")?,
        "service_tier": "default",
        "store": store,
        "temperature": temperature,
        "text": text,
        "tool_choice": fields.get("tool_choice").unwrap_or(&json!("auto")),
        "tools": repeated(&tools),
        "top_logprobs": top_logprobs,
        "top_p": top_p,
        "truncation": "disabled",
        "user": fields.string("user")?,
    });
    let Value::Object(echo) = echo else { return Err(ApiError::Bug("an object is none".into())) };
    let request = GenerateRequest {
        messages,
        max_tokens: max_output_tokens.map(|n| n as usize),
        sampling: SamplingOptions {
            temperature: temperature.map(|t| t as f32),
            top_p: top_p.map(|p| p as f32),
            ..SamplingOptions::default()
        },
        logprobs: logprobs.then_some(top_logprobs as usize),
        grammar,
        tools,
        ..GenerateRequest::default()
    };
    let cache_salt = cache_salt(&fields)?;
    Ok(Parsed { model, request, stream, cache_salt, wire: Form { stream, store, items, echo } })
}

/// What the answer must be, and the field as the response repeats it.
fn text(fields: &Fields) -> Result<(Option<ResponseGrammar>, Value), ApiError> {
    const AT: &str = "text.format";
    let any = || json!({"format": {"type": "text"}});
    let Some(text) = fields.object("text")?.map(Fields) else { return Ok((None, any())) };
    let Some(asked) = text.object("format").map_err(|e| nested("text", e))? else { return Ok((None, any())) };
    let format = Fields(asked);
    let within = |error| nested(AT, error);
    let source = match format.string("type").map_err(within)?.ok_or_else(|| missing("text.format.type"))? {
        "text" => None,
        "json_object" => Some(GrammarSource::json_object()),
        "json_schema" => {
            format.get("name").ok_or_else(|| missing("text.format.name"))?;
            Some(json_schema(AT, &format)?)
        }
        other => {
            let problem = format!("expected text, json_object or json_schema, got {:?}", short(other));
            return Err(ApiError::invalid("text.format.type", problem));
        }
    };
    let grammar = source.map(|source| ResponseGrammar { source, param: AT.into() });
    Ok((grammar, json!({"format": asked})))
}

fn includes_logprobs(fields: &Fields) -> Result<bool, ApiError> {
    const AT: &str = "include";
    let mut found = false;
    for (i, item) in fields.array(AT)?.map_or(&[][..], Vec::as_slice).iter().enumerate() {
        match item {
            Value::String(name) => found |= name == "message.output_text.logprobs",
            other => return Err(wrong_type(format!("{AT}[{i}]"), "a string", other)),
        }
    }
    Ok(found)
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if fields.bool("background")? == Some(true) {
        let problem = "this server answers while its client waits; leave it out, or stream";
        return Err(ApiError::unsupported("background", problem));
    }
    for (name, problem) in [
        ("conversation", "this server keeps responses and no conversations; use previous_response_id"),
        ("prompt", "this server keeps no prompts; send instructions and input"),
    ] {
        if fields.get(name).is_some() {
            return Err(ApiError::unsupported(name, problem));
        }
    }
    // What is too long is an error with either.
    match fields.string("truncation")? {
        None | Some("auto" | "disabled") => Ok(()),
        Some(other) => {
            let problem = format!("expected auto or disabled, got {:?}", short(other));
            Err(ApiError::invalid("truncation", problem))
        }
    }
}

/// The tools as a response repeats them, with what was not said of them.
fn repeated(tools: &Tools) -> Value {
    let tool = |tool: &Tool| {
        json!({
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        })
    };
    tools.list.iter().map(tool).collect()
}
