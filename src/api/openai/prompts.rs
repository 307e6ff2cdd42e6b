//! Prompts that are no conversation: a text, a list of texts, token ids, or a list of lists of those.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::fields::{kind, token_ids};
use crate::session::Service;

/// Prompts of one completion.
pub(in crate::api) const MAX_PROMPTS: usize = 128;
/// Texts that one request embeds, as OpenAI has it.
pub(in crate::api) const MAX_INPUTS: usize = 2048;
/// What a request may say of an embedding's dimensions.
pub(in crate::api) const DIMENSIONS: RangeInclusive<i64> = 1..=u32::MAX as i64;

/// A text, or what a client has already made of one.
pub(in crate::api) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// Its tokens, at least one, with those that begin a text; `at` is the field it came in.
    pub fn ids(&self, service: &Service, at: &str) -> Result<Vec<u32>, ApiError> {
        let ids = match self {
            Prompt::Text(text) => service.encode(text, true)?,
            Prompt::Ids(ids) => {
                check_ids(service, at, ids)?;
                ids.clone()
            }
        };
        if ids.is_empty() { Err(ApiError::invalid(at, "expected at least one token")) } else { Ok(ids) }
    }
}

/// The prompts of a field named `at`: 1 to `most`, each with the name of its own place there.
pub(in crate::api) fn prompts(
    at: &str,
    value: &Value,
    most: usize,
) -> Result<Vec<(String, Prompt)>, ApiError> {
    let prompts = match value {
        Value::String(text) => vec![(at.to_owned(), Prompt::Text(text.clone()))],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            vec![(at.to_owned(), Prompt::Ids(token_ids(at, items)?))]
        }
        Value::Array(items) => {
            let each = items.iter().enumerate().map(|(i, item)| {
                let at = format!("{at}[{i}]");
                let prompt = match item {
                    Value::String(text) => Prompt::Text(text.clone()),
                    Value::Array(ids) => Prompt::Ids(token_ids(&at, ids)?),
                    other => {
                        let problem =
                            format!("expected a string or a list of token ids, got {}", kind(other));
                        return Err(ApiError::invalid(at, problem));
                    }
                };
                Ok((at, prompt))
            });
            each.collect::<Result<Vec<_>, _>>()?
        }
        other => {
            let problem = format!("expected a string, a list of them, or token ids, got {}", kind(other));
            return Err(ApiError::invalid(at, problem));
        }
    };
    if !(1..=most).contains(&prompts.len()) {
        let problem = format!("expected 1 to {most} prompts, got {}", prompts.len());
        return Err(ApiError::invalid(at, problem));
    }
    Ok(prompts)
}

/// Whether the model knows the ids of a field.
pub(in crate::api) fn check_ids(service: &Service, param: &str, ids: &[u32]) -> Result<(), ApiError> {
    let vocab_size = service.engine().limits().vocab_size;
    match ids.iter().position(|id| *id as usize >= vocab_size) {
        None => Ok(()),
        Some(at) => {
            let problem = format!("expected a token id below {vocab_size}, got {}", ids[at]);
            Err(ApiError::invalid(format!("{param}[{at}]"), problem))
        }
    }
}
