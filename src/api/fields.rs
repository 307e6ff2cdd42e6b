//! The fields of a body that is JSON, read one by one, so that every error names its field and what was expected.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::api::error::ApiError;
use crate::model::MAX_LOGPROBS;

// What fields may be: for the checks, and for the document of the API.
pub(in crate::api) const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
pub(in crate::api) const PROBABILITY: RangeInclusive<f64> = 0.0..=1.0;
/// Bounds of the presence and the frequency penalty.
pub(in crate::api) const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
pub(in crate::api) const REPETITION_PENALTY: RangeInclusive<f64> = 1e-3..=1e3;
pub(in crate::api) const BIAS: RangeInclusive<f64> = -100.0..=100.0;
/// Tokens of an answer.
pub(in crate::api) const TOKENS: RangeInclusive<i64> = 1..=u32::MAX as i64;
/// -1 is how vLLM's clients say "off".
pub(in crate::api) const TOP_K: RangeInclusive<i64> = -1..=u32::MAX as i64;
pub(in crate::api) const TOP_LOGPROBS: RangeInclusive<i64> = 0..=MAX_LOGPROBS as i64;
/// Stop strings, as at OpenAI.
pub(in crate::api) const MAX_STOPS: usize = 4;
/// Answers to one prompt.
pub(in crate::api) const ANSWERS: RangeInclusive<i64> = 1..=128;

/// A body that is an object.
pub(in crate::api) fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body).map_err(|e| ApiError::Json(e.to_string()))? {
        Value::Object(fields) => Ok(fields),
        other => Err(ApiError::NotAnObject(kind(&other))),
    }
}

/// The fields of one object; a field that is null is absent.
pub(in crate::api) struct Fields<'a>(pub(in crate::api) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(in crate::api) fn get(&self, name: &str) -> Option<&'a Value> {
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

    pub(in crate::api) fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub(in crate::api) fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(in crate::api) fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, "a list", Value::as_array)
    }

    pub(in crate::api) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }

    pub(in crate::api) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let Some(n) = self.read(name, "a number", Value::as_f64)? else { return Ok(None) };
        if !range.contains(&n) {
            let (low, high) = range.into_inner();
            return Err(ApiError::invalid(name, format!("expected a number from {low} to {high}, got {n}")));
        }
        Ok(Some(n))
    }

    /// An integer; a whole float (`40.0`) is one.
    pub(in crate::api) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
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
pub(in crate::api) struct Item<'a> {
    pub at: String,
    pub fields: Fields<'a>,
}

impl<'a> Item<'a> {
    pub(in crate::api) fn new(at: impl Into<String>, value: &'a Value) -> Result<Self, ApiError> {
        let at = at.into();
        match value {
            Value::Object(item) => Ok(Self { at, fields: Fields(item) }),
            other => Err(wrong_type(at, "an object", other)),
        }
    }

    pub(in crate::api) fn param(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// Puts its own name before that of a field of its.
    pub(in crate::api) fn within<T>(&self, read: Result<T, ApiError>) -> Result<T, ApiError> {
        read.map_err(|error| nested(&self.at, error))
    }

    /// One that must be there.
    pub(in crate::api) fn string(&self, name: &str) -> Result<&'a str, ApiError> {
        self.within(self.fields.string(name))?.ok_or_else(|| missing(self.param(name)))
    }

    /// One that must be there.
    pub(in crate::api) fn object(&self, name: &str) -> Result<Item<'a>, ApiError> {
        let object = self.within(self.fields.object(name))?.ok_or_else(|| missing(self.param(name)))?;
        Ok(Item { at: self.param(name), fields: Fields(object) })
    }
}

pub(in crate::api) fn missing(param: impl Into<String>) -> ApiError {
    ApiError::Missing { param: param.into() }
}

pub(in crate::api) fn wrong_type(param: impl Into<String>, expected: &str, got: &Value) -> ApiError {
    ApiError::invalid(param, format!("expected {expected}, got {}", kind(got)))
}

/// Puts the outer field's name before that of an inner one.
pub(in crate::api) fn nested(at: &str, error: ApiError) -> ApiError {
    match error {
        ApiError::Invalid { param, problem } => ApiError::invalid(format!("{at}.{param}"), problem),
        other => other,
    }
}

pub(in crate::api) fn kind(value: &Value) -> &'static str {
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
pub(in crate::api) fn short(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    let mut short: String = text.chars().take(MAX_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// The model that a body names, if it names one. An empty name is none, as vLLM has it: clients send it whose user left
/// theirs empty.
pub(in crate::api) fn model(fields: &Fields) -> Result<Option<String>, ApiError> {
    Ok(fields.string("model")?.filter(|name| !name.is_empty()).map(str::to_owned))
}

/// Ids of a vocabulary that nobody knows yet.
pub(in crate::api) fn token_ids(at: &str, items: &[Value]) -> Result<Vec<u32>, ApiError> {
    let id = |(i, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong_type(format!("{at}[{i}]"), "a token id", item))
    };
    items.iter().enumerate().map(id).collect()
}
