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

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::fields::{
    ANSWERS, BIAS, Fields, MAX_STOPS, PENALTY, PROBABILITY, REPETITION_PENALTY, TEMPERATURE, TOKENS, TOP_K,
    TOP_LOGPROBS, missing, model, nested, object, short, wrong_type,
};
use crate::api::openai::conversation::{messages, tools};
use crate::api::openai::grammar::response_grammar;
use crate::api::sharing::cache_salt;
use crate::model::SamplingOptions;
use crate::session::{GenerateRequest, PromptEnding, Tools};
use crate::text::Message;

/// How the answer to a chat or a completion is wanted, beside the prompt.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Form {
    pub stream: bool,
    pub include_usage: bool,
}

pub(in crate::api) fn chat(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
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
pub(in crate::api) fn options(
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
        sampling: SamplingOptions {
            temperature: temperature.map(|t| t as f32),
            top_p: fields.number("top_p", PROBABILITY)?.map(|p| p as f32),
            top_k: top_k.map(|k| u32::try_from(k).unwrap_or(0)),
            min_p: fields.number("min_p", PROBABILITY)?.map(|p| p as f32),
            presence_penalty: fields.number("presence_penalty", PENALTY)?.map(|p| p as f32),
            frequency_penalty: fields.number("frequency_penalty", PENALTY)?.map(|p| p as f32),
            repetition_penalty: repetition_penalty(fields)?,
        },
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
pub(in crate::api) fn prompt_ending(fields: &Fields, messages: &[Message]) -> Result<PromptEnding, ApiError> {
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
