//! Errors of requests that are refused, or whose answer is not complete.

use super::request::EVENTS;
use crate::model::{MAX_BIASES, MAX_LOGPROBS};

/// Why a request was refused. The engine keeps nothing of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("the queue is full: {waiting} requests are waiting")]
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
    #[error("{n} biases of token ids exceed the limit of {MAX_BIASES}; stop ids before min_tokens count too")]
    TooManyBiases { n: usize },
    #[error("{n} alternatives for each token exceed the limit of {MAX_LOGPROBS}")]
    TooManyLogprobs { n: usize },
    #[error("{n} answers were requested, but at most {most} can run at the same time")]
    TooManyAnswers { n: usize, most: usize },
    #[error("the prompt has images, but this model takes none")]
    NoImages,
    /// Scores and pooled states are computed for texts only.
    #[error("log probabilities of the prompt are not computed for a prompt with images")]
    ImagesScored,
    #[error("the mean of the hidden states is not computed for a prompt with images")]
    ImagesPooled,
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Clients recognize this error by the words of its message. langchain and Anthropic's SDK look for "prompt is too
/// long", litellm looks for "this model's maximum context length is".
fn overflow(prompt: usize, max_tokens: Option<usize>, context: usize) -> String {
    let most = format!("this model's maximum context length is {context} tokens");
    match max_tokens {
        None => format!("the prompt is too long: {prompt} tokens, and {most}, the answer included"),
        Some(n) => format!("{most}: the prompt has {prompt} and {n} more were asked for"),
    }
}

/// Why a request got no complete answer. After `Lost`, `Bug` and `ShuttingDown`, the engine answers no further
/// requests.
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
    /// The device was lost while it computed this request together with others, and again while it computed this
    /// request alone.
    #[error(
        "the GPU was lost twice while it computed this request; the second time, it computed nothing else: {0}"
    )]
    LostTwice(String),
    /// A required coprocessor failed while it computed the attention of this request's prompt. The text begins with the code of
    /// the failure.
    #[error("a coprocessor failed while it computed this request: {0}")]
    Coprocessor(String),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the answer was not read fast enough: {EVENTS} tokens for each answer waited for the client")]
    SlowReader,
}
