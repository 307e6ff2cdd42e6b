//! The body of `POST /v1/chat/completions`: JSON in, a validated [`GenerateRequest`] out.
//!
//! Read by hand from a JSON value, and not derived, so that every error names its field and what was expected.
//! Three rules for fields beyond the messages:
//!
//! - **Unknown** fields are ignored: clients send their own.
//! - **Known but not had here** fields that would change the answer are refused, with code `unsupported_value`:
//!   an answer that silently lacks what was asked for is worse than none. Values that mean "off" pass.
//! - **`functions`** and `function_call`, which `tools` have replaced, are refused where they ask for a call.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::conversation::{messages, tools};
use super::error::ApiError;
use super::exchange::Parsed;
use super::grammar::response_grammar;
use super::sharing::cache_salt;
use crate::model::MAX_LOGPROBS;
use crate::session::{GenerateRequest, PromptEnding, Tools};
use crate::text::Message;

// What fields may be: for the checks, and for the document of the API.
pub(super) const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
pub(super) const PROBABILITY: RangeInclusive<f64> = 0.0..=1.0;
/// Of presence and frequency.
pub(super) const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
pub(super) const REPETITION_PENALTY: RangeInclusive<f64> = 1e-3..=1e3;
pub(super) const BIAS: RangeInclusive<f64> = -100.0..=100.0;
/// Tokens of an answer.
pub(super) const TOKENS: RangeInclusive<i64> = 1..=u32::MAX as i64;
/// -1 is how vLLM's clients say "off".
pub(super) const TOP_K: RangeInclusive<i64> = -1..=u32::MAX as i64;
pub(super) const TOP_LOGPROBS: RangeInclusive<i64> = 0..=MAX_LOGPROBS as i64;
/// Stop strings, as at OpenAI.
pub(super) const MAX_STOPS: usize = 4;
/// Answers to one prompt.
pub(super) const ANSWERS: RangeInclusive<i64> = 1..=128;

/// How the answer to a chat or a completion is wanted, beside the prompt.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    pub stream: bool,
    pub include_usage: bool,
}

pub(super) fn chat(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
    let body = object(body)?;
    let fields = Fields(&body);
    let model = model(&fields)?;
    let messages = messages(fields.array("messages")?.ok_or_else(|| missing("messages"))?)?;
    refuse_unsupported(&fields)?;
    let tools = tools(&fields)?;

    // `max_tokens` is the older name; OpenAI's own models take the newer one alone.
    let max_tokens = fields.integer("max_completion_tokens", TOKENS)?;
    let max_tokens = max_tokens.or(fields.integer("max_tokens", TOKENS)?);
    let ending = prompt_ending(&fields, &messages)?;
    let logprobs = logprobs(&fields)?;
    let parsed = options(&fields, model, max_tokens)?;
    Ok(Parsed { request: GenerateRequest { messages, tools, ending, logprobs, ..parsed.request }, ..parsed })
}

/// What stands beside the prompt, whatever that is; log probabilities, which differ, are left out.
pub(super) fn options(
    fields: &Fields,
    model: Option<String>,
    max_tokens: Option<i64>,
) -> Result<Parsed<Form>, ApiError> {
    let temperature = fields.number("temperature", TEMPERATURE)?;
    let min_tokens = fields.integer("min_tokens", 0..=max_tokens.unwrap_or(*TOKENS.end()))?;
    let n = fields.integer("n", ANSWERS)?;
    let top_k = fields.integer("top_k", TOP_K)?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let form = Form { stream, include_usage: include_usage(fields)? };
    let request = GenerateRequest {
        messages: Vec::new(),
        max_tokens: max_tokens.map(|n| n as usize),
        temperature: temperature.map(|t| t as f32),
        top_p: fields.number("top_p", PROBABILITY)?.map(|p| p as f32),
        top_k: top_k.map(|k| u32::try_from(k).unwrap_or(0)),
        min_p: fields.number("min_p", PROBABILITY)?.map(|p| p as f32),
        presence_penalty: fields.number("presence_penalty", PENALTY)?.map(|p| p as f32),
        frequency_penalty: fields.number("frequency_penalty", PENALTY)?.map(|p| p as f32),
        repetition_penalty: repetition_penalty(fields)?,
        logit_bias: logit_bias(fields)?,
        seed: seed(fields)?,
        stop: stop(fields)?,
        min_tokens: min_tokens.map(|n| n as usize),
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        logprobs: None,
        n: n.map(|n| n as usize),
        grammar: response_grammar(fields)?,
        tools: Tools::default(),
        ending: PromptEnding::Answer,
    };
    Ok(Parsed { model, request, stream, cache_salt: cache_salt(fields)?, wire: form })
}

/// The model that a body names, if it names one. An empty name is none, as vLLM has it: clients send it whose user left
/// theirs empty.
pub(super) fn model(fields: &Fields) -> Result<Option<String>, ApiError> {
    Ok(fields.string("model")?.filter(|name| !name.is_empty()).map(str::to_owned))
}

/// Ids of a vocabulary that nobody knows yet.
pub(super) fn token_ids(at: &str, items: &[Value]) -> Result<Vec<u32>, ApiError> {
    let id = |(i, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong_type(format!("{at}[{i}]"), "a token id", item))
    };
    items.iter().enumerate().map(id).collect()
}

fn include_usage(fields: &Fields) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    let include = Fields(options).bool("include_usage").map_err(|e| nested("stream_options", e))?;
    Ok(include.unwrap_or(false))
}

/// vLLM's name, or llama.cpp's.
fn repetition_penalty(fields: &Fields) -> Result<Option<f32>, ApiError> {
    let [ours, theirs] =
        ["repetition_penalty", "repeat_penalty"].map(|name| fields.number(name, REPETITION_PENALTY));
    Ok(ours?.or(theirs?).map(|p| p as f32))
}

/// Token id, written as a string, to what is added to its logit.
fn logit_bias(fields: &Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let mut biases = BTreeMap::new();
    for (token, bias) in map {
        let at = format!("logit_bias.{}", short(token));
        let id: u32 = token.parse().map_err(|_| ApiError::invalid(&at, "expected a token id as the name"))?;
        let bias = bias.as_f64().ok_or_else(|| wrong_type(&at, "a number", bias))?;
        if !BIAS.contains(&bias) {
            let (low, high) = BIAS.into_inner();
            return Err(ApiError::invalid(at, format!("expected a number from {low} to {high}, got {bias}")));
        }
        if biases.insert(id, bias as f32).is_some() {
            return Err(ApiError::invalid(at, "names a token that another entry names"));
        }
    }
    Ok(biases.into_iter().filter(|(_, bias)| *bias != 0.0).collect())
}

fn logprobs(fields: &Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", TOP_LOGPROBS)?.unwrap_or(0);
    if top > 0 && !wanted {
        return Err(ApiError::invalid("top_logprobs", "expected logprobs to be true beside it"));
    }
    Ok(wanted.then_some(top as usize))
}

/// Any integer of 64 bits, signed or not.
fn seed(fields: &Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.get("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| wrong_type("seed", "an integer of 64 bits", value))
}

fn stop(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let stops = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(items)) => {
            let item = |(i, v): (usize, &Value)| match v {
                Value::String(stop) => Ok(stop.clone()),
                other => Err(wrong_type(format!("stop[{i}]"), "a string", other)),
            };
            items.iter().enumerate().map(item).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_type("stop", "a string or a list of strings", other)),
    };
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid(
            "stop",
            format!("expected at most {MAX_STOPS} strings, got {}", stops.len()),
        ));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", "an empty string would stop every answer; leave it out"));
    }
    Ok(stops)
}

/// Fields that change the answer and that this version cannot honour.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if fields.array("modalities")?.is_some_and(|m| m.iter().any(|m| m != "text")) {
        return Err(ApiError::unsupported("modalities", "this server answers with text only"));
    }
    Ok(())
}

/// vLLM's two fields.
pub(super) fn prompt_ending(fields: &Fields, messages: &[Message]) -> Result<PromptEnding, ApiError> {
    const AT: &str = "continue_final_message";
    let continued = fields.bool(AT)?.unwrap_or(false);
    let last = messages.last().map_or("", |message| message.role.as_str());
    match (continued, fields.bool("add_generation_prompt")?) {
        (true, Some(true)) => Err(ApiError::invalid(AT, "cannot be had together with add_generation_prompt")),
        (true, _) if last != "assistant" => {
            let problem = format!("expected the last message to be an assistant's, it is that of {last:?}");
            Err(ApiError::invalid(AT, problem))
        }
        (true, _) => Ok(PromptEnding::Continued),
        (false, Some(false)) => Ok(PromptEnding::Closed),
        (false, _) => Ok(PromptEnding::Answer),
    }
}

/// A body that is an object.
pub(super) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body).map_err(|e| ApiError::Json(e.to_string()))? {
        Value::Object(fields) => Ok(fields),
        other => Err(ApiError::NotAnObject(kind(&other))),
    }
}

/// The fields of one object; a field that is null is absent.
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(name, expected, value))
    }

    pub(super) fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub(super) fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(super) fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }

    pub(super) fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(n) = self.read(name, "a number", Value::as_f64)? else { return Ok(None) };
        if !range.contains(&n) {
            let (low, high) = range.into_inner();
            return Err(ApiError::invalid(name, format!("expected a number from {low} to {high}, got {n}")));
        }
        Ok(Some(n))
    }

    /// An integer; a whole float (`40.0`) is one.
    pub(super) fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let whole = |f: f64| (f.fract() == 0.0 && f.abs() < 2f64.powi(53)).then_some(f as i64);
        let read = |v: &Value| v.as_i64().or_else(|| v.as_f64().and_then(whole));
        let Some(n) = self.read(name, "an integer", read)? else { return Ok(None) };
        if !range.contains(&n) {
            let (low, high) = range.into_inner();
            return Err(ApiError::invalid(
                name,
                format!("expected an integer from {low} to {high}, got {n}"),
            ));
        }
        Ok(Some(n))
    }
}

/// An object within a body, and its name in errors.
pub(super) struct Item<'a> {
    pub at: String,
    pub fields: Fields<'a>,
}

impl<'a> Item<'a> {
    pub(super) fn new(at: impl Into<String>, value: &'a Value) -> Result<Self, ApiError> {
        let at = at.into();
        match value {
            Value::Object(item) => Ok(Self { at, fields: Fields(item) }),
            other => Err(wrong_type(at, "an object", other)),
        }
    }

    pub(super) fn param(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// Puts its own name before that of a field of its.
    pub(super) fn within<T>(&self, read: Result<T, ApiError>) -> Result<T, ApiError> {
        read.map_err(|error| nested(&self.at, error))
    }

    /// One that must be there.
    pub(super) fn string(&self, name: &str) -> Result<&'a str, ApiError> {
        self.within(self.fields.string(name))?.ok_or_else(|| missing(self.param(name)))
    }

    /// One that must be there.
    pub(super) fn object(&self, name: &str) -> Result<Item<'a>, ApiError> {
        let object = self.within(self.fields.object(name))?.ok_or_else(|| missing(self.param(name)))?;
        Ok(Item { at: self.param(name), fields: Fields(object) })
    }
}

pub(super) fn missing(param: impl Into<String>) -> ApiError {
    ApiError::Missing { param: param.into() }
}

pub(super) fn wrong_type(param: impl Into<String>, expected: &str, got: &Value) -> ApiError {
    ApiError::invalid(param, format!("expected {expected}, got {}", kind(got)))
}

/// Puts the outer field's name before that of an inner one.
pub(super) fn nested(at: &str, error: ApiError) -> ApiError {
    match error {
        ApiError::Invalid { param, problem } => ApiError::invalid(format!("{at}.{param}"), problem),
        other => other,
    }
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A client's text as an error may repeat it.
pub(super) fn short(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    let mut short: String = text.chars().take(MAX_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
