//! What a request says its answer must be: OpenAI's `response_format`, and vLLM's fields for the same: `structured_outputs`,
//! and the older `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`. At most one of them counts, so more are
//! refused.

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, missing, nested, short, wrong_type};
use crate::session::ResponseGrammar;
use crate::text::GrammarSource;

/// None where the answer may be any text.
pub(in crate::api) fn response_grammar(fields: &Fields) -> Result<Option<ResponseGrammar>, ApiError> {
    let mut found = Vec::new();
    found.extend(response_format(fields)?.map(|source| ("response_format".to_owned(), source)));
    for name in ["json", "regex", "choice", "grammar"] {
        let param = format!("guided_{name}");
        found.extend(guided(fields, &param, name)?.map(|source| (param, source)));
    }
    found.extend(structured_outputs(fields)?);
    if let [(first, _), (second, _), ..] = found.as_slice() {
        return Err(ApiError::invalid(second, format!("cannot be had together with {first}")));
    }
    Ok(found.pop().map(|(param, source)| ResponseGrammar { source, param }))
}

fn response_format(fields: &Fields) -> Result<Option<GrammarSource>, ApiError> {
    const AT: &str = "response_format";
    let Some(format) = fields.object(AT)?.map(Fields) else { return Ok(None) };
    let within = |error| nested(AT, error);
    match format.string("type").map_err(within)?.ok_or_else(|| missing("response_format.type"))? {
        "text" => Ok(None),
        // The schema is not OpenAI's, but llama.cpp's and others'.
        "json_object" => Ok(Some(match format.object("schema").map_err(within)? {
            None => GrammarSource::json_object(),
            Some(schema) => {
                GrammarSource::JsonSchema { schema: Value::Object(schema.clone()), strict: false }
            }
        })),
        "json_schema" => {
            let at = "response_format.json_schema";
            let format = format.object("json_schema").map_err(within)?.ok_or_else(|| missing(at))?;
            json_schema(at, &Fields(format)).map(Some)
        }
        other => {
            let problem = format!("expected text, json_object or json_schema, got {:?}", short(other));
            Err(ApiError::invalid("response_format.type", problem))
        }
    }
}

/// OpenAI's schema with its name, and whether it is strict, as the fields of `at`.
pub(in crate::api) fn json_schema(at: &str, fields: &Fields) -> Result<GrammarSource, ApiError> {
    let within = |error| nested(at, error);
    fields.string("name").map_err(within)?;
    let strict = fields.bool("strict").map_err(within)?.unwrap_or(false);
    let schema = fields.object("schema").map_err(within)?;
    let schema = schema.ok_or_else(|| missing(format!("{at}.schema")))?.clone();
    Ok(GrammarSource::JsonSchema { schema: Value::Object(schema), strict })
}

/// One of vLLM's kinds: `kind` is the name of the field without its prefix, `param` that with it.
fn guided(fields: &Fields, param: &str, kind: &str) -> Result<Option<GrammarSource>, ApiError> {
    let Some(value) = fields.get(param) else { return Ok(None) };
    let text = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(wrong_type(param, "a string", other)),
    };
    Ok(Some(match kind {
        "json" => GrammarSource::JsonSchema { schema: schema(param, value)?, strict: true },
        "regex" => GrammarSource::Regex(text(value)?),
        "grammar" => GrammarSource::Lark(text(value)?),
        _ => {
            let choices = value.as_array().ok_or_else(|| wrong_type(param, "a list of strings", value))?;
            GrammarSource::Choice(choices.iter().map(text).collect::<Result<_, _>>()?)
        }
    }))
}

/// An object, or the text of one.
fn schema(param: &str, value: &Value) -> Result<Value, ApiError> {
    let parsed = match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| ApiError::invalid(param, format!("the text is not valid JSON: {error}")))?,
        other => other.clone(),
    };
    if parsed.is_object() { Ok(parsed) } else { Err(wrong_type(param, "a JSON schema", &parsed)) }
}

fn structured_outputs(fields: &Fields) -> Result<Vec<(String, GrammarSource)>, ApiError> {
    const AT: &str = "structured_outputs";
    let Some(outputs) = fields.object(AT)?.map(Fields) else { return Ok(Vec::new()) };
    let within = |error| nested(AT, error);
    for name in
        ["structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"]
    {
        if outputs.get(name).is_some_and(|value| *value != Value::Bool(false)) {
            let problem = "this server does not have it; leave it out";
            return Err(ApiError::unsupported(format!("{AT}.{name}"), problem));
        }
    }
    let mut found = Vec::new();
    for name in ["json", "regex", "choice", "grammar"] {
        let source = guided(&outputs, name, name).map_err(within)?;
        found.extend(source.map(|source| (format!("{AT}.{name}"), source)));
    }
    if outputs.bool("json_object").map_err(within)? == Some(true) {
        found.push((format!("{AT}.json_object"), GrammarSource::json_object()));
    }
    Ok(found)
}
