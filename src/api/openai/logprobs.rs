//! OpenAI's object for the log probability of a token.

use serde::Serialize;
use utoipa::ToSchema;

use crate::model::Logprobs;
use crate::session::Service;

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

impl TokenLogprob {
    pub fn new(service: &Service, id: u32, logprobs: &Logprobs) -> Self {
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
