//! OpenAI's object for how likely a token was.

use serde::Serialize;
use utoipa::ToSchema;

use crate::model::Logprobs;
use crate::session::Service;

/// How likely one token of an answer was.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(in crate::api) struct TokenLogprob {
    #[serde(flatten)]
    token: TopLogprob,
    /// The likeliest tokens at its place, the likeliest first; as many as were asked for.
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
struct TopLogprob {
    /// The token's text. A part of a character is U+FFFD.
    token: String,
    /// By the model's own distribution, before temperature, penalties and masks.
    logprob: f64,
    /// Null for a token that stands for no text.
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

/// JSON has no infinity; this is what OpenAI says for next to impossible.
pub(in crate::api) fn finite(logprob: f32) -> f64 {
    logprob.max(-9999.0).into()
}
