//! The body of `POST /v1/responses`: OpenAI's JSON in, a [`ChatRequest`] out.
//!
//! Unknown fields are ignored, and so are those that bill or trace; what would change the answer and cannot be had is
//! refused by name.

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::grammar::{ResponseGrammar, json_schema};
use super::super::request::{ChatRequest, Fields, missing, nested, object, short, wrong_type};
use crate::model::MAX_LOGPROBS;
use crate::text::{GrammarSource, Message};

/// How the response is wanted, and what its object repeats of the request.
#[derive(Debug)]
pub(super) struct Form {
    pub stream: bool,
    pub store: bool,
    /// What was said before, and now.
    pub turns: Vec<Message>,
    /// Fields of the response's object.
    pub echo: Map<String, Value>,
}

/// `before` gives the turns up to a response that was kept.
pub(super) fn parse(
    body: &[u8],
    before: impl FnOnce(&str) -> Option<Vec<Message>>,
) -> Result<(ChatRequest, Form), ApiError> {
    let body = object(body)?;
    let fields = Fields(&body);
    let model = fields.string("model")?.ok_or_else(|| missing("model"))?.to_owned();
    let new = input(&fields)?;
    let instructions = fields.string("instructions")?;
    refuse_unsupported(&fields)?;
    check_tools(&fields)?;

    let temperature = fields.number("temperature", 0.0, 2.0)?;
    let top_p = fields.number("top_p", 0.0, 1.0)?;
    let max_output_tokens = fields.integer("max_output_tokens", 1, i64::from(u32::MAX))?;
    let (grammar, text) = text(&fields)?;
    let top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS as i64)?.unwrap_or(0);
    let logprobs = includes_logprobs(&fields)? || top_logprobs > 0;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let store = fields.bool("store")?.unwrap_or(true);
    let metadata = fields.object("metadata")?.cloned().unwrap_or_default();
    let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);

    let previous = fields.string("previous_response_id")?;
    let mut turns = match previous {
        None => Vec::new(),
        Some(id) => before(id).ok_or_else(|| ApiError::UnknownPreviousResponse(short(id)))?,
    };
    turns.extend(new);
    let mut messages: Vec<Message> =
        instructions.map(|text| Message::new("system", text)).into_iter().collect();
    messages.extend_from_slice(&turns);

    let echo = json!({
        "background": false,
        "instructions": instructions,
        "max_output_tokens": max_output_tokens,
        "max_tool_calls": null,
        "metadata": metadata,
        "parallel_tool_calls": parallel,
        "previous_response_id": previous,
        "prompt_cache_key": fields.string("prompt_cache_key")?,
        "reasoning": {"effort": null, "summary": null},
        "safety_identifier": fields.string("safety_identifier")?,
        "service_tier": "default",
        "store": store,
        "temperature": temperature,
        "text": text,
        "tool_choice": "none",
        "tools": [],
        "top_logprobs": top_logprobs,
        "top_p": top_p,
        "truncation": "disabled",
        "user": fields.string("user")?,
    });
    let Value::Object(echo) = echo else { return Err(ApiError::Bug("an object is none".into())) };
    let request = ChatRequest {
        model,
        messages,
        stream,
        max_tokens: max_output_tokens.map(|n| n as usize),
        temperature: temperature.map(|t| t as f32),
        top_p: top_p.map(|p| p as f32),
        logprobs: logprobs.then_some(top_logprobs as usize),
        grammar,
        ..ChatRequest::default()
    };
    Ok((request, Form { stream, store, turns, echo }))
}

fn input(fields: &Fields) -> Result<Vec<Message>, ApiError> {
    const AT: &str = "input";
    match fields.get(AT) {
        None => Err(missing(AT)),
        Some(Value::String(text)) => Ok(vec![Message::new("user", text)]),
        Some(Value::Array(items)) => {
            let mut turns = Vec::with_capacity(items.len());
            for (i, value) in items.iter().enumerate() {
                let at = format!("{AT}[{i}]");
                let Value::Object(item) = value else { return Err(wrong_type(at, "an object", value)) };
                turns.extend(turn(&at, &Fields(item))?);
            }
            if turns.is_empty() {
                return Err(ApiError::invalid(AT, "expected at least one message, got none"));
            }
            Ok(turns)
        }
        Some(other) => Err(wrong_type(AT, "a string or a list of items", other)),
    }
}

/// None for an item that says nothing: thoughts of another model.
fn turn(at: &str, fields: &Fields) -> Result<Option<Message>, ApiError> {
    let at_type = || format!("{at}.type");
    match fields.string("type").map_err(|e| nested(at, e))? {
        None | Some("message") => {}
        Some("reasoning") => return Ok(None),
        Some("function_call" | "function_call_output" | "custom_tool_call" | "custom_tool_call_output") => {
            return Err(ApiError::unsupported(at_type(), "this server does not call tools"));
        }
        Some("item_reference") => {
            return Err(ApiError::unsupported(at_type(), "items are not kept by themselves: send the item"));
        }
        Some(kind) => {
            let problem = format!("expected \"message\", got {:?}", short(kind));
            return Err(ApiError::invalid(at_type(), problem));
        }
    }
    let role = fields.string("role").map_err(|e| nested(at, e))?;
    let role = role.ok_or_else(|| missing(format!("{at}.role")))?;
    if !matches!(role, "user" | "assistant" | "system" | "developer") {
        let problem = format!("expected user, assistant, system or developer, got {:?}", short(role));
        return Err(ApiError::invalid(format!("{at}.role"), problem));
    }
    let at = format!("{at}.content");
    let text = match fields.get("content") {
        None => return Err(missing(at)),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => content(&at, parts)?,
        Some(other) => return Err(wrong_type(at, "a string or a list of parts", other)),
    };
    Ok(Some(Message::new(role, &text)))
}

/// Joined without a separator, as chat's parts are.
fn content(at: &str, parts: &[Value]) -> Result<String, ApiError> {
    let mut joined = String::new();
    for (i, part) in parts.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let Value::Object(part) = part else { return Err(wrong_type(at, "an object", part)) };
        let fields = Fields(part);
        let name = match fields.string("type").map_err(|e| nested(&at, e))? {
            Some("input_text" | "output_text" | "text") => "text",
            Some("refusal") => "refusal",
            Some(kind @ ("input_image" | "input_file" | "input_audio")) => {
                let problem = format!("this server reads text only, not {kind:?}");
                return Err(ApiError::unsupported(format!("{at}.type"), problem));
            }
            Some(kind) => {
                let problem = format!("expected \"input_text\" or \"output_text\", got {:?}", short(kind));
                return Err(ApiError::invalid(format!("{at}.type"), problem));
            }
            None => return Err(missing(format!("{at}.type"))),
        };
        let text = fields.string(name).map_err(|e| nested(&at, e))?;
        joined.push_str(text.ok_or_else(|| missing(format!("{at}.{name}")))?);
    }
    Ok(joined)
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

/// As for chat: a choice that allows an answer without a call is given one.
fn check_tools(fields: &Fields) -> Result<(), ApiError> {
    const AT: &str = "tool_choice";
    fields.array("tools")?;
    match fields.get(AT) {
        None => Ok(()),
        Some(Value::String(choice)) if choice == "auto" || choice == "none" => Ok(()),
        Some(Value::String(choice)) if choice != "required" => {
            let problem = format!("expected none, auto, required or an object, got {:?}", short(choice));
            Err(ApiError::invalid(AT, problem))
        }
        Some(Value::String(_) | Value::Object(_)) => {
            Err(ApiError::unsupported(AT, "this server does not call tools; use \"auto\" or \"none\""))
        }
        Some(other) => Err(wrong_type(AT, "a string or an object", other)),
    }
}
