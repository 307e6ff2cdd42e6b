//! The body of `POST /v1/messages` and of `/v1/messages/count_tokens`: Anthropic's JSON in, a [`ChatRequest`] out.
//!
//! Unknown fields are ignored, and so are those that bill, trace, or ask for thoughts, which this model has none of
//! (`metadata`, `cache_control`, `thinking`); what would change the answer and cannot be had is refused.

use serde_json::Value;

use super::super::error::ApiError;
use super::super::grammar::ResponseGrammar;
use super::super::request::{ChatRequest, Fields, PromptEnding, missing, nested, object, short, wrong_type};
use crate::text::{GrammarSource, MAX_STOP_BYTES, MAX_STOPS, Message};

/// How the answer is wanted.
#[derive(Debug)]
pub(super) struct Form {
    pub stream: bool,
    pub stops: Vec<String>,
    pub max_tokens: usize,
}

pub(super) fn parse(body: &[u8]) -> Result<(ChatRequest, Form), ApiError> {
    let body = object(body)?;
    let fields = Fields(&body);
    let conversation = conversation(&fields)?;
    let max_tokens = fields.integer("max_tokens", 1, i64::from(u32::MAX))?;
    let max_tokens = max_tokens.ok_or_else(|| missing("max_tokens"))? as usize;
    let stops = stop_sequences(&fields)?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let request = ChatRequest {
        stream,
        max_tokens: Some(max_tokens),
        temperature: fields.number("temperature", 0.0, 1.0)?.map(|t| t as f32),
        top_p: fields.number("top_p", 0.0, 1.0)?.map(|p| p as f32),
        top_k: fields.integer("top_k", 0, i64::from(u32::MAX))?.map(|k| k as u32),
        stop: stops.clone(),
        ..conversation
    };
    Ok((request, Form { stream, stops, max_tokens }))
}

/// What a count of tokens depends on.
pub(super) fn parse_to_count(body: &[u8]) -> Result<ChatRequest, ApiError> {
    conversation(&Fields(&object(body)?))
}

fn conversation(fields: &Fields) -> Result<ChatRequest, ApiError> {
    let model = fields.string("model")?.ok_or_else(|| missing("model"))?.to_owned();
    let items = fields.array("messages")?.ok_or_else(|| missing("messages"))?;
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "expected at least one message, got an empty list"));
    }
    let mut messages = Vec::with_capacity(items.len() + 1);
    if let Some(system) = fields.get("system") {
        messages.push(Message::new("system", &content("system", "system", system)?));
    }
    for (i, item) in items.iter().enumerate() {
        messages.push(message(&format!("messages[{i}]"), item)?);
    }
    check_tools(fields)?;
    refuse_unsupported(fields)?;
    // A last turn of the assistant's is the beginning of the answer.
    let continued = messages.last().is_some_and(|last| last.role == "assistant");
    let ending = if continued { PromptEnding::Continued } else { PromptEnding::Answer };
    Ok(ChatRequest { model, messages, ending, grammar: output_format(fields)?, ..ChatRequest::default() })
}

fn message(at: &str, item: &Value) -> Result<Message, ApiError> {
    let Value::Object(item) = item else { return Err(wrong_type(at, "an object", item)) };
    let fields = Fields(item);
    let role = fields.string("role").map_err(|e| nested(at, e))?;
    let role = match role.ok_or_else(|| missing(format!("{at}.role")))? {
        role @ ("user" | "assistant" | "system") => role,
        other => {
            let problem = format!("expected user, assistant or system, got {:?}", short(other));
            return Err(ApiError::invalid(format!("{at}.role"), problem));
        }
    };
    let at = format!("{at}.content");
    let value = fields.get("content").ok_or_else(|| missing(&at))?;
    Ok(Message::new(role, &content(&at, role, value)?))
}

/// The text of a string or of a list of blocks. Blocks are paragraphs of their own.
fn content(at: &str, role: &str, value: &Value) -> Result<String, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(blocks) => blocks,
        other => return Err(wrong_type(at, "a string or a list of blocks", other)),
    };
    let mut texts = Vec::with_capacity(blocks.len());
    for (i, value) in blocks.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let Value::Object(item) = value else { return Err(wrong_type(at, "an object", value)) };
        texts.extend(block(&at, role, &Fields(item))?.filter(|text| !text.is_empty()));
    }
    Ok(texts.join("\n\n"))
}

/// None for what stands in a conversation without being said in it.
fn block<'a>(at: &str, role: &str, fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    let at_type = || format!("{at}.type");
    match fields.string("type").map_err(|e| nested(at, e))?.ok_or_else(|| missing(at_type()))? {
        "text" => {
            let text = fields.string("text").map_err(|e| nested(at, e))?;
            text.map(Some).ok_or_else(|| missing(format!("{at}.text")))
        }
        "thinking" | "redacted_thinking" if role == "assistant" => Ok(None),
        "tool_use" | "tool_result" => {
            Err(ApiError::unsupported(at_type(), "this server does not call tools"))
        }
        kind @ ("image" | "document" | "search_result" | "container_upload") => {
            let problem = format!("this server reads text only, not {kind:?}");
            Err(ApiError::unsupported(at_type(), problem))
        }
        kind => {
            let problem = format!("expected \"text\", got {:?}", short(kind));
            Err(ApiError::invalid(at_type(), problem))
        }
    }
}

/// As for chat: a choice that allows an answer without a call is given one.
fn check_tools(fields: &Fields) -> Result<(), ApiError> {
    const AT: &str = "tool_choice";
    fields.array("tools")?;
    let Some(choice) = fields.object(AT)?.map(Fields) else { return Ok(()) };
    match choice.string("type").map_err(|e| nested(AT, e))? {
        None => Err(missing("tool_choice.type")),
        Some("auto" | "none") => Ok(()),
        Some("any" | "tool") => {
            Err(ApiError::unsupported(AT, "this server does not call tools; use \"auto\" or \"none\""))
        }
        Some(other) => {
            let problem = format!("expected auto, any, tool or none, got {:?}", short(other));
            Err(ApiError::invalid("tool_choice.type", problem))
        }
    }
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if fields.get("container").is_some() {
        return Err(ApiError::unsupported("container", "this server runs no code"));
    }
    if fields.array("mcp_servers")?.is_some_and(|servers| !servers.is_empty()) {
        return Err(ApiError::unsupported("mcp_servers", "this server does not call tools"));
    }
    Ok(())
}

/// What the answer must be: every keyword of the schema is enforced, or refused.
fn output_format(fields: &Fields) -> Result<Option<ResponseGrammar>, ApiError> {
    const AT: &str = "output_config";
    let Some(config) = fields.object(AT)?.map(Fields) else { return Ok(None) };
    let param = format!("{AT}.format");
    let Some(format) = config.object("format").map_err(|e| nested(AT, e))?.map(Fields) else {
        return Ok(None);
    };
    match format.string("type").map_err(|e| nested(&param, e))? {
        Some("json_schema") => {
            let schema = format.object("schema").map_err(|e| nested(&param, e))?;
            let schema = schema.ok_or_else(|| missing(format!("{param}.schema")))?.clone();
            let source = GrammarSource::JsonSchema { schema: Value::Object(schema), strict: true };
            Ok(Some(ResponseGrammar { source, param }))
        }
        Some(other) => {
            let problem = format!("expected \"json_schema\", got {:?}", short(other));
            Err(ApiError::invalid(format!("{param}.type"), problem))
        }
        None => Err(missing(format!("{param}.type"))),
    }
}

fn stop_sequences(fields: &Fields) -> Result<Vec<String>, ApiError> {
    const AT: &str = "stop_sequences";
    let items = fields.array(AT)?.map_or(&[][..], Vec::as_slice);
    if items.len() > MAX_STOPS {
        let problem = format!("expected at most {MAX_STOPS} strings, got {}", items.len());
        return Err(ApiError::invalid(AT, problem));
    }
    let item = |(i, item): (usize, &Value)| {
        let at = format!("{AT}[{i}]");
        match item {
            Value::String(stop) if (1..=MAX_STOP_BYTES).contains(&stop.len()) => Ok(stop.clone()),
            Value::String(stop) => {
                let problem = format!("expected 1 to {MAX_STOP_BYTES} bytes, got {}", stop.len());
                Err(ApiError::invalid(at, problem))
            }
            other => Err(wrong_type(at, "a string", other)),
        }
    };
    items.iter().enumerate().map(item).collect()
}
