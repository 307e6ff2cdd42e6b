//! Prompts that are no conversation: a text, a list of texts, token ids, or a list of lists of those.

use serde_json::Value;

use super::error::ApiError;
use super::request::{kind, token_ids};
use super::tokens;
use crate::session::Service;

/// A text, or what a client has already made of one.
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// Its tokens, at least one, with those that begin a text; `at` is the field it came in.
    pub fn ids(&self, service: &Service, at: &str) -> Result<Vec<u32>, ApiError> {
        let ids = match self {
            Prompt::Text(text) => service.encode(text, true)?,
            Prompt::Ids(ids) => {
                tokens::check(service, at, ids)?;
                ids.clone()
            }
        };
        if ids.is_empty() { Err(ApiError::invalid(at, "expected at least one token")) } else { Ok(ids) }
    }
}

/// Those of a field named `at`: 1 to `most`, each with the name of its own place there.
pub(super) fn prompts(at: &str, value: &Value, most: usize) -> Result<Vec<(String, Prompt)>, ApiError> {
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
