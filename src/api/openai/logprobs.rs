//! OpenAI's object for the log probability of a token, which Ollama's answers have too.

use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::wire::bounded::TopLogprobs;
use crate::model::Logprobs;
use crate::session::{Delta, Service};

/// The log probability of one token of an answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(in crate::api) struct TokenLogprob {
    #[serde(flatten)]
    token: TopLogprob,
    /// The likeliest tokens at this place, the likeliest first; as many as the request asks for.
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
struct TopLogprob {
    /// The token's text. A part of a character is U+FFFD.
    token: String,
    /// The log probability in the model's own distribution, before temperature, penalties and masks.
    logprob: f64,
    /// The bytes of the token's text; null for a token that has no text.
    #[schema(required)]
    bytes: Option<Vec<u8>>,
}

/// The number of alternatives to each token that the fields `logprobs` and `top_logprobs` ask for. `None` = no log
/// probabilities.
pub(in crate::api) fn asked(
    logprobs: Option<bool>,
    top: Option<TopLogprobs>,
) -> Result<Option<usize>, ApiError> {
    let (is_asked, top) = (logprobs.unwrap_or(false), top.map_or(0, |top| top.0));
    if top > 0 && !is_asked {
        return Err(ApiError::invalid("top_logprobs", "expected logprobs to be true as well"));
    }
    Ok(is_asked.then_some(top as usize))
}

impl TokenLogprob {
    /// The log probabilities of a delta's tokens. Empty if the request asks for no log probabilities.
    pub fn of(delta: &Delta, service: &Service) -> Vec<Self> {
        delta.logprobs.iter().map(|(id, logprobs)| Self::new(service, *id, logprobs)).collect()
    }

    fn new(service: &Service, id: u32, logprobs: &Logprobs) -> Self {
        let token = |id: u32, logprob: f32| {
            let bytes = service.tokenizer().token_bytes(id);
            let token = bytes.as_deref().map(String::from_utf8_lossy).unwrap_or_default().into_owned();
            TopLogprob { token, logprob: finite(logprob), bytes }
        };
        let top_logprobs = logprobs.top.iter().map(|(id, logprob)| token(*id, *logprob)).collect();
        Self { token: token(id, logprobs.drawn), top_logprobs }
    }
}

/// Limits a log probability to -9999: JSON has no infinity, and OpenAI writes this number for the next to impossible.
pub(in crate::api) fn finite(logprob: f32) -> f64 {
    logprob.max(-9999.0).into()
}
