//! The errors of requests that are refused, or that get no whole answer.

use super::request::EVENTS;
use crate::model::{MAX_BIASES, MAX_LOGPROBS};

/// The reason for which a request was refused. The engine kept nothing of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("{waiting} requests are waiting already")]
    QueueFull { waiting: usize },
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("max_tokens is 0")]
    NoTokens,
    /// `max_tokens` is `None` if the prompt alone is too long.
    #[error("{}", overflow(*prompt, *max_tokens, *context))]
    ContextExceeded { prompt: usize, max_tokens: Option<usize>, context: usize },
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange { id: u32, vocab_size: usize },
    #[error("{n} biases of ids, stop ids before min_tokens included, are more than {MAX_BIASES}")]
    TooManyBiases { n: usize },
    #[error("{n} alternatives to an id are more than {MAX_LOGPROBS}")]
    TooManyLogprobs { n: usize },
    #[error("{n} answers were asked for, and {most} can run at once")]
    TooManyAnswers { n: usize, most: usize },
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Clients recognize an overflow by the words of the message. langchain and Anthropic's SDK look for "prompt is too
/// long", litellm looks for "this model's maximum context length is".
fn overflow(prompt: usize, max_tokens: Option<usize>, context: usize) -> String {
    let most = format!("this model's maximum context length is {context} tokens");
    match max_tokens {
        None => format!("the prompt is too long: {prompt} tokens, and {most}, the answer included"),
        Some(n) => format!("{most}: the prompt has {prompt} and {n} more were asked for"),
    }
}

/// The reason for which a request got no whole answer. After `Lost`, `Bug` and `ShuttingDown`, the engine answers no
/// more requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The device was lost, or its driver failed.
    #[error("{0}; restart unicorn")]
    Lost(String),
    /// The engine's thread panicked.
    #[error("{0}; restart unicorn")]
    Bug(String),
    #[error("the model's logits are not finite numbers: no answer can be sampled from them")]
    NotFinite,
    /// The device was lost while it computed this request among others, and again while it computed this request alone.
    #[error("the GPU was lost twice while it computed this request, the second time alone: {0}")]
    LostTwice(String),
    /// A unit beside the device, which must compute some of the attention, failed at this request's prompt. The text begins
    /// with the failure's code.
    #[error("the NPU failed while it computed this request: {0}")]
    Offload(String),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the answer was not read: {EVENTS} tokens for each answer of the request waited for the client")]
    SlowReader,
}
