//! The body of `POST /v1/messages` and of `/v1/messages/count_tokens`: Anthropic's JSON in, a [`GenerateRequest`] out.
//!
//! Unknown fields are ignored, and so are those that bill, trace, or ask for thoughts, which this model has none of
//! (`metadata`, `cache_control`, `thinking`); what would change the answer and cannot be had is refused.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::fields::{
    Fields, Item, PROBABILITY, TOKENS, missing, model, nested, object, short, wrong_type,
};
use crate::api::sharing::cache_salt;
use crate::api::tools::{add_result, place_of, tool_list};
use crate::model::SamplingOptions;
use crate::session::{Call, Conversation, GenerateRequest, PromptEnding, ResponseGrammar, ToolChoice, Tools};
use crate::text::{GrammarSource, MAX_STOP_BYTES, MAX_STOPS};

// What fields may be that are narrower here than at OpenAI.
pub(in crate::api) const TEMPERATURE: RangeInclusive<f64> = 0.0..=1.0;
pub(in crate::api) const TOP_K: RangeInclusive<i64> = 0..=u32::MAX as i64;

/// How the answer is wanted.
#[derive(Debug)]
pub(in crate::api) struct Form {
    pub stream: bool,
    pub stops: Vec<String>,
    pub max_tokens: usize,
}

pub(in crate::api) fn parse(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
    let body = object(body)?;
    let fields = Fields(&body);
    let (model, conversation) = conversation(&fields)?;
    let max_tokens = fields.integer("max_tokens", TOKENS)?;
    let max_tokens = max_tokens.ok_or_else(|| missing("max_tokens"))? as usize;
    let stops = stop_sequences(&fields)?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let request = GenerateRequest {
        max_tokens: Some(max_tokens),
        sampling: SamplingOptions {
            temperature: fields.number("temperature", TEMPERATURE)?.map(|t| t as f32),
            top_p: fields.number("top_p", PROBABILITY)?.map(|p| p as f32),
            top_k: fields.integer("top_k", TOP_K)?.map(|k| k as u32),
            ..SamplingOptions::default()
        },
        stop: stops.clone(),
        ..conversation
    };
    let cache_salt = cache_salt(&fields)?;
    Ok(Parsed { model, request, stream, cache_salt, wire: Form { stream, stops, max_tokens } })
}

/// The model, and what a count of tokens depends on.
pub(in crate::api) fn parse_to_count(body: &[u8]) -> Result<(Option<String>, GenerateRequest), ApiError> {
    conversation(&Fields(&object(body)?))
}

fn conversation(fields: &Fields) -> Result<(Option<String>, GenerateRequest), ApiError> {
    let model = model(fields)?;
    refuse_unsupported(fields)?;
    let items = fields.array("messages")?.ok_or_else(|| missing("messages"))?;
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "expected at least one message, got an empty list"));
    }
    let mut conversation = Conversation::default();
    if let Some(system) = fields.get("system") {
        conversation.say("system", &text("system", "system", system)?);
    }
    for (i, item) in items.iter().enumerate() {
        message(&Item::new(format!("messages[{i}]"), item)?, &mut conversation)?;
    }
    if conversation.ends_with_calls() {
        let problem =
            "expected a tool_result for each tool_use of the last message, in a message of the user's";
        return Err(ApiError::invalid("messages", problem));
    }
    let messages = conversation.finish();
    // A last turn of the assistant's is the beginning of the answer.
    let continued = messages.last().is_some_and(|last| last.role == "assistant");
    let ending = if continued { PromptEnding::Continued } else { PromptEnding::Answer };
    let (tools, grammar) = (tools(fields)?, output_format(fields)?);
    Ok((model, GenerateRequest { messages, ending, tools, grammar, ..GenerateRequest::default() }))
}

fn message(item: &Item, conversation: &mut Conversation) -> Result<(), ApiError> {
    let role = match item.string("role")? {
        role @ ("user" | "assistant" | "system") => role,
        other => {
            let problem = format!("expected user, assistant or system, got {:?}", short(other));
            return Err(ApiError::invalid(item.param("role"), problem));
        }
    };
    let at = item.param("content");
    let content = item.fields.get("content").ok_or_else(|| missing(&at))?;
    let Value::Array(blocks) = content else {
        conversation.say(role, &text(&at, role, content)?);
        return Ok(());
    };
    let (mut paragraphs, mut only_text) = (Vec::new(), true);
    let say = |paragraphs: &mut Vec<&str>, conversation: &mut Conversation| {
        if !paragraphs.is_empty() {
            conversation.say(role, &std::mem::take(paragraphs).join("\n\n"));
        }
    };
    for (i, value) in blocks.iter().enumerate() {
        let block = Item::new(format!("{at}[{i}]"), value)?;
        match (block.string("type")?, role) {
            ("tool_use", "assistant") => {
                say(&mut paragraphs, conversation);
                let arguments = Value::Object(block.object("input")?.fields.0.clone()).to_string();
                let call = Call { name: block.string("name")?.to_owned(), arguments };
                conversation.call(block.string("id")?, call);
                only_text = false;
            }
            ("tool_result", "user") => {
                say(&mut paragraphs, conversation);
                add_result(conversation, &block, "tool_use_id", tool_result(&block)?)?;
                only_text = false;
            }
            _ => paragraphs.extend(text_block(&block, role)?),
        }
    }
    // A message that says nothing is a turn too.
    if only_text && paragraphs.is_empty() {
        conversation.say(role, "");
    }
    say(&mut paragraphs, conversation);
    Ok(())
}

/// What a tool gave, which may be nothing.
fn tool_result(block: &Item) -> Result<String, ApiError> {
    let text = match block.fields.get("content") {
        None => String::new(),
        Some(content) => text(&block.param("content"), "user", content)?,
    };
    let failed = block.within(block.fields.bool("is_error"))?.unwrap_or(false);
    Ok(if failed { format!("Error: {text}") } else { text })
}

/// A string, or a list of blocks of text, which are paragraphs of their own.
fn text(at: &str, role: &str, value: &Value) -> Result<String, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(blocks) => blocks,
        other => return Err(wrong_type(at, "a string or a list of blocks", other)),
    };
    let mut paragraphs = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.iter().enumerate() {
        paragraphs.extend(text_block(&Item::new(format!("{at}[{i}]"), block)?, role)?);
    }
    Ok(paragraphs.join("\n\n"))
}

/// None for what stands in a conversation without being said in it.
fn text_block<'a>(block: &Item<'a>, role: &str) -> Result<Option<&'a str>, ApiError> {
    match block.string("type")? {
        "text" => Ok(Some(block.string("text")?).filter(|text| !text.is_empty())),
        "thinking" | "redacted_thinking" if role == "assistant" => Ok(None),
        kind @ ("image" | "document" | "search_result" | "container_upload") => {
            let problem = format!("this server reads text only, not {kind:?}");
            Err(ApiError::unsupported(block.param("type"), problem))
        }
        kind @ ("tool_use" | "tool_result") => {
            let problem =
                "a tool_use stands in a message of the assistant's, a tool_result in one of the user's";
            Err(ApiError::invalid(block.param("type"), format!("got {kind:?} here: {problem}")))
        }
        kind => {
            let expected = "expected \"text\", \"tool_use\" or \"tool_result\"";
            Err(ApiError::invalid(block.param("type"), format!("{expected}, got {:?}", short(kind))))
        }
    }
}

fn tools(fields: &Fields) -> Result<Tools, ApiError> {
    const AT: &str = "tool_choice";
    let list = tool_list(fields, "input_schema", |item| {
        match item.within(item.fields.string("type"))? {
            None | Some("custom") => {}
            Some(other) => {
                let problem = format!("this server runs no tools itself, so not {:?}", short(other));
                return Err(ApiError::unsupported(item.param("type"), problem));
            }
        }
        item.object("input_schema")?;
        Ok(item)
    })?;
    let Some(choice) = fields.object(AT)? else {
        return Ok(Tools { list, parallel: true, ..Tools::default() });
    };
    let item = Item { at: AT.into(), fields: Fields(choice) };
    let alone = item.within(item.fields.bool("disable_parallel_tool_use"))?.unwrap_or(false);
    let (choice, only) = match item.string("type")? {
        "auto" => (ToolChoice::Auto, None),
        "none" => (ToolChoice::None, None),
        "any" if list.is_empty() => {
            return Err(ApiError::invalid(AT, "there are no tools to choose from"));
        }
        "any" => (ToolChoice::Required, None),
        "tool" => (ToolChoice::Required, Some(vec![place_of(&list, &item)?])),
        other => {
            let problem = format!("expected auto, any, tool or none, got {:?}", short(other));
            return Err(ApiError::invalid(item.param("type"), problem));
        }
    };
    Ok(Tools { list, choice, only, parallel: !alone })
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if fields.get("thread").is_some() {
        return Err(ApiError::Thread);
    }
    if fields.get("container").is_some() {
        return Err(ApiError::unsupported("container", "this server runs no code"));
    }
    if fields.array("mcp_servers")?.is_some_and(|servers| !servers.is_empty()) {
        return Err(ApiError::unsupported("mcp_servers", "this server asks no others for tools"));
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
