//! From a validated request to ids for the engine, with one loaded model's tokenizer, template and defaults.
//!
//! Shared by the server and the terminal commands, so that both answer alike.

use super::answer::AnswerText;
use super::error::ApiError;
use super::random_u64;
use super::request::ChatRequest;
use crate::engine::{EngineHandle, Request};
use crate::model::SamplingParams;
use crate::text::{ChatTemplate, Message, StopMatcher, TextError, Tokenizer, normalize};

/// A temperature below this is greedy, whoever gave it: dividing logits by it would leave the range of f32.
const MIN_TEMPERATURE: f32 = 1e-5;

/// What requests need of a loaded model.
pub struct Service {
    engine: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    defaults: SamplingDefaults,
    stop_token_ids: Vec<u32>,
    /// Bytes of text that one token stands for at most.
    longest_token_bytes: usize,
}

/// Sampling where a request says nothing: the checkpoint's generation_config.json. Units as in
/// [`SamplingParams`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
}

impl Service {
    /// `stop_token_ids` end an answer (`<end_of_turn>`, `<eos>`).
    pub fn new(
        engine: EngineHandle,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: SamplingDefaults,
        stop_token_ids: Vec<u32>,
    ) -> Self {
        // An added token may be written longer in the text than it decodes to.
        let bytes = |id| {
            let written = tokenizer.token(id).map_or(0, |t| t.len());
            written.max(tokenizer.token_bytes(id).map_or(0, |t| t.len()))
        };
        let longest = (0..tokenizer.vocab_size() as u32).map(bytes).max();
        let longest_token_bytes = longest.unwrap_or(1).max(1);
        Self { engine, tokenizer, template, defaults, stop_token_ids, longest_token_bytes }
    }

    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Renders and tokenizes; what remains is [`EngineHandle::submit`], and to push its events into the answer.
    /// Takes a processor for seconds where the conversation is long.
    pub fn prepare(&self, request: &ChatRequest) -> Result<(Request, AnswerText), ApiError> {
        let stops = StopMatcher::new(&request.stop).map_err(|e| match e {
            TextError::Stop(problem) => ApiError::invalid("stop", problem),
            other => ApiError::Text(other.to_string()),
        })?;
        let prompt = self.prompt(&request.messages)?;
        let engine = Request {
            sampling: self.sampling(request),
            max_tokens: request.max_tokens,
            stop_token_ids: self.stop_token_ids.clone(),
            ..Request::new(prompt)
        };
        Ok((engine, AnswerText::new(self.tokenizer.detokenizer(true), stops)))
    }

    fn prompt(&self, messages: &[Message]) -> Result<Vec<u32>, ApiError> {
        let limits = self.engine.limits();
        let refuse = |error: TextError| match error {
            TextError::TooLong { bytes, .. } if self.least_tokens(bytes) >= limits.max_context => {
                self.overflow(bytes)
            }
            TextError::TooLong { .. } => ApiError::Context(error.to_string()),
            error => ApiError::Text(error.to_string()),
        };
        let text = self.template.render(&normalize(messages), true).map_err(refuse)?;
        // Text that is too long whatever its tokens are is not tokenized at all.
        if self.least_tokens(text.len()) >= limits.max_context {
            return Err(self.overflow(text.len()));
        }
        let ids = self.tokenizer.encode(&text, false).map_err(refuse)?;
        self.tokenizer.check_ids(&ids, limits.vocab_size).map_err(refuse)?;
        Ok(ids)
    }

    fn least_tokens(&self, bytes: usize) -> usize {
        bytes / self.longest_token_bytes
    }

    fn overflow(&self, bytes: usize) -> ApiError {
        let (context, least) = (self.engine.limits().max_context, self.least_tokens(bytes));
        ApiError::Context(format!(
            "the context holds {context} tokens, the prompt has {bytes} bytes and so at least {least} tokens"
        ))
    }

    fn sampling(&self, request: &ChatRequest) -> SamplingParams {
        let defaults = &self.defaults;
        let top_p = request.top_p.unwrap_or(defaults.top_p);
        let mut top_k = request.top_k.unwrap_or(defaults.top_k);
        if top_p == 0.0 {
            top_k = 1; // the smallest set of tokens whose probability is at least 0, and not none
        }
        let temperature = request.temperature.unwrap_or(defaults.temperature);
        SamplingParams {
            temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature },
            top_k,
            top_p,
            min_p: request.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: request.seed.unwrap_or_else(random_u64),
        }
    }
}
