//! All errors of requests, each with its status and its error object in OpenAI's or Anthropic's form. One exhaustive
//! match maps all of them.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::engine::{EngineError, SubmitError};
use crate::library::{LibraryError, StoreError};
use crate::session::SessionError;
use crate::text::visible;

/// Seconds after which a refused client should ask again.
const RETRY_LOADING_S: u32 = 5;
const RETRY_QUEUE_S: u32 = 2;
/// The header by which OpenAI's and Anthropic's SDKs learn whether to send a request again.
pub(super) const SHOULD_RETRY: &str = "x-should-retry";
const PROMPT_OF_A_CHAT: &str = "messages";
/// Anthropic's status for a server that has too much to do.
const OVERLOADED: u16 = 529;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    #[error("the body is not valid JSON: {0}")]
    Json(String),
    #[error("the body must be a JSON object, not {0}")]
    NotAnObject(&'static str),
    #[error("{param} is required")]
    Missing { param: String },
    #[error("{param}: {problem}")]
    Invalid { param: String, problem: String },
    /// A value that this server understands and does not support. Ignoring it would answer a different request.
    #[error("{param}: {problem}")]
    Unsupported { param: String, problem: String },
    /// Anthropic's `thread`. Anthropic's SDK recognizes this refusal, and sends the whole conversation instead.
    #[error(
        "thread: this server does not store conversations of messages: send all messages, without thread"
    )]
    Thread,
    /// The prompt and its answer are longer than the context; `param` is the field that holds the prompt. `tokens` are those
    /// of the prompt and of the context, if the prompt alone is too long.
    #[error("{problem}")]
    Context { param: &'static str, problem: String, tokens: Option<(usize, usize)> },
    /// A text of the prompt cannot be tokenized.
    #[error("{problem}")]
    Text { param: &'static str, problem: String },
    /// The answer left its grammar while it was written.
    #[error("the answer could not follow its grammar: {0}")]
    Grammar(String),
    #[error(
        "the model {asked:?} does not exist; this server serves {served:?}: ask for that, or allow yours with \
         server.model_aliases or server.any_model_name"
    )]
    UnknownModel { asked: String, served: String },
    // The next three messages are OpenAI's.
    #[error("Response with id '{0}' not found.")]
    UnknownResponse(String),
    #[error("Previous response with id '{0}' not found.")]
    UnknownPreviousResponse(String),
    #[error("Cannot cancel a synchronous response.")]
    SynchronousResponse,
    #[error("the body is larger than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error(
        "the body has too many JSON values: a value counts as one, an object and each of its members as four more, and at most \
         {limit} are read; send them in several requests"
    )]
    TooManyParts { limit: usize },
    #[error("the body did not arrive: {0}")]
    BodyTimeout(BodyGap),
    #[error("the body ended early")]
    BodyBroken,
    #[error("the body is encoded as {0:?}: send it uncompressed, without Content-Encoding")]
    BodyEncoded(String),
    #[error(
        "{asked:?} is not served, and this server downloads no models: `unicorn pull ORG/NAME` does, and with \
         models.pulled = true in the configuration the server downloads and serves models itself"
    )]
    NotPulled { asked: String },
    /// Models are pulled and deleted only for clients that may do so.
    #[error(
        "models are pulled and deleted only with an API key, or by a program on the server's machine that is not a web page \
         or a proxy"
    )]
    NotTrusted,
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A route of another server whose work this server leaves to others. `why` also says what does it.
    #[error("{path} is not implemented: {why}")]
    NotImplemented { path: String, why: &'static str },
    /// `instead` is what the client should do.
    #[error("there is nothing at {path}; {instead}")]
    NoRoute { path: String, instead: String },
    /// `allowed` names the methods that the route has.
    #[error("{method} is not allowed at {path}: send {allowed}")]
    Method { method: String, path: String, allowed: String },
    #[error("this server requires an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")]
    NoKey,
    #[error("unknown API key")]
    WrongKey,
    #[error(
        "this server does not accept the host name {0:?}: use localhost or its address, add the name to \
         server.allowed_hosts, or set an API key"
    )]
    ForeignHost(String),
    #[error(
        "web pages of {0:?} may not use this server: add that origin to server.cors_origins, or set an API key"
    )]
    ForeignOrigin(String),
    #[error("{limit} of your requests are already in progress; try again when one of them has ended")]
    ClientFull { limit: usize },
    #[error("the server is busy: {waiting} requests are waiting; try again in a few seconds")]
    QueueFull { waiting: usize },
    /// `doing` is what the server does with the earlier requests.
    #[error(
        "the server is busy {doing} earlier requests, and did not get to this one within {} s; try again in a few seconds",
        waited.as_secs_f64()
    )]
    NoTurn { doing: &'static str, waited: Duration },
    #[error("the model is still loading; try again in a few seconds")]
    Loading,
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The server did not read the events of an answer in time that it collects before it replies.
    #[error("the server is too busy: it could not keep up with this answer; try again in a few seconds")]
    Behind,
    /// The system gave the server too few threads, or too little memory.
    #[error("{0}; try again in a few seconds")]
    Shortage(String),
    #[error("internal error: {0}")]
    Bug(String),
    /// A panic. Only the log has its message.
    #[error("internal error; the server's log has the cause, with the id of this request")]
    Panic(String),
}

/// Why a body timed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyGap {
    #[error("nothing came for {} s", within.as_secs_f64())]
    Nothing { within: Duration },
    #[error(
        "it came too slowly; after {} s, at least {bytes_per_s} bytes per second on average are expected",
        grace.as_secs_f64()
    )]
    TooLittle { bytes_per_s: u32, grace: Duration },
    #[error("it was not complete after {} s", within.as_secs_f64())]
    NotAll { within: Duration },
}

/// The parts of an error in a response, except the message.
struct Wire<'a> {
    status: u16,
    code: &'static str,
    /// The field of the request that is wrong.
    param: Option<&'a str>,
    retry_after_s: Option<u32>,
}

/// An error in OpenAI's form.
#[derive(Serialize, ToSchema)]
#[schema(as = Error)]
pub(in crate::api) struct ErrorBody {
    error: ErrorObject,
}

#[derive(Serialize, ToSchema)]
struct ErrorObject {
    /// What went wrong, for a person to read.
    message: String,
    r#type: &'static str,
    /// The field of the request that is wrong, if one is.
    #[schema(required)]
    param: Option<String>,
    /// The kind of error, for programs.
    #[schema(required)]
    code: Option<&'static str>,
}

/// What went wrong, in Anthropic's form.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct AnthropicErrorObject {
    r#type: &'static str,
    /// What went wrong, for a person to read.
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    details: Option<ErrorDetails>,
}

#[derive(Serialize, ToSchema)]
struct ErrorDetails {
    /// The kind of error, for programs.
    error_code: &'static str,
}

/// An error in Anthropic's form.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct AnthropicError {
    #[schema(inline)]
    r#type: ErrorType,
    error: AnthropicErrorObject,
    request_id: String,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ErrorType {
    Error,
}

/// An error in Ollama's form.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct OllamaError {
    error: String,
}

impl AnthropicError {
    pub fn new(error: AnthropicErrorObject, request_id: String) -> Self {
        Self { r#type: ErrorType::Error, error, request_id }
    }
}

impl ApiError {
    pub fn invalid(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), problem: problem.into() }
    }

    pub fn unsupported(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Unsupported { param: param.into(), problem: problem.into() }
    }

    /// A prompt that is too long. The field is a chat's, unless [`Self::in_prompt`] sets another one.
    pub(in crate::api) fn context(problem: impl ToString) -> Self {
        Self::Context { param: PROMPT_OF_A_CHAT, problem: problem.to_string(), tokens: None }
    }

    pub(in crate::api) fn text(problem: impl ToString) -> Self {
        Self::Text { param: PROMPT_OF_A_CHAT, problem: problem.to_string() }
    }

    /// Names `param` as the field that holds the prompt.
    pub(in crate::api) fn in_prompt(self, param: &'static str) -> Self {
        match self {
            Self::Context { problem, tokens, .. } => Self::Context { param, problem, tokens },
            Self::Text { problem, .. } => Self::Text { param, problem },
            other => other,
        }
    }

    pub fn status(&self) -> StatusCode {
        status_code(self.wire().status)
    }

    /// Replaces the error of a slow reader while the server collects an answer, because the reader is the server.
    pub(in crate::api) fn while_collecting(self) -> Self {
        match self {
            Self::Engine(EngineError::SlowReader) => Self::Behind,
            other => other,
        }
    }

    /// The log's text for a failure of the server.
    pub(in crate::api) fn logged(&self) -> String {
        match self {
            Self::Panic(message) => format!("a panic: {message}"),
            other => other.to_string(),
        }
    }

    /// The text for the client. It may quote names that the client chose.
    fn message(&self) -> String {
        visible(&self.to_string()).into_owned()
    }

    /// Whether the server, and not the client, has too many requests.
    fn is_queue_full(&self) -> bool {
        matches!(self, Self::QueueFull { .. } | Self::Library(LibraryError::QueueFull { .. }))
    }

    /// The error's name, for programs.
    pub(in crate::api) fn code(&self) -> &'static str {
        self.wire().code
    }

    /// The body of a response, or a line of a stream that had begun.
    pub(in crate::api) fn body(&self) -> ErrorBody {
        let Wire { status, param, code, .. } = self.wire();
        let kind = match status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let param = param.map(|param| visible(param).into_owned());
        ErrorBody { error: ErrorObject { message: self.message(), r#type: kind, param, code: Some(code) } }
    }

    /// The status and the error in Anthropic's form.
    pub(in crate::api) fn anthropic(&self) -> (StatusCode, AnthropicErrorObject) {
        let wire = self.wire();
        let (status, kind) = match wire.status {
            // Anthropic's clients retry after these two errors.
            429 if self.is_queue_full() => (OVERLOADED, "overloaded_error"),
            503 if wire.retry_after_s.is_some() => (503, "overloaded_error"),
            401 => (401, "authentication_error"),
            403 => (403, "permission_error"),
            404 => (404, "not_found_error"),
            413 => (413, "request_too_large"),
            429 => (429, "rate_limit_error"),
            status @ 400..500 => (status, "invalid_request_error"),
            status => (status, "api_error"),
        };
        let error_code = "thread_unsupported_request";
        let details = (*self == Self::Thread).then_some(ErrorDetails { error_code });
        // Claude Code reads both numbers, and shortens the conversation.
        let message = match self {
            Self::Context { tokens: Some((prompt, context)), .. } => {
                format!("prompt is too long: {prompt} tokens > {context} maximum")
            }
            _ => self.message(),
        };
        (status_code(status), AnthropicErrorObject { r#type: kind, message, details })
    }

    /// The status and the error in Ollama's form. Clients compare the words of these messages.
    pub(in crate::api) fn ollama(&self) -> (StatusCode, OllamaError) {
        let (status, error) = match self {
            Self::UnknownModel { asked, .. } => (404, format!("model '{}' not found", visible(asked))),
            full if full.is_queue_full() => {
                (503, "server busy, please try again.  maximum pending requests exceeded".to_owned())
            }
            other => (other.wire().status, other.message()),
        };
        (status_code(status), OllamaError { error })
    }

    /// Whether the request itself made the model or a device fail. OpenAI's and Anthropic's SDKs send a request again after
    /// any other 500, and each time the device would be lost for all clients.
    pub(in crate::api) fn would_fail_again(&self) -> bool {
        use EngineError::{Coprocessor, LostTwice, NotFinite};
        matches!(self, Self::Engine(NotFinite | LostTwice(_) | Coprocessor(_)))
    }

    fn wire<'a>(&'a self) -> Wire<'a> {
        let error = |status, code| Wire { status, code, param: None, retry_after_s: None };
        let field = |param: &'a str, code| Wire { param: Some(param), ..error(400, code) };
        let retry = |status, code, seconds| Wire { retry_after_s: Some(seconds), ..error(status, code) };
        match self {
            Self::Json(_) | Self::NotAnObject(_) => error(400, "invalid_json"),
            Self::Missing { param } => field(param, "missing_required_parameter"),
            Self::Invalid { param, .. } => field(param, "invalid_value"),
            Self::Unsupported { param, .. } => field(param, "unsupported_value"),
            Self::Thread => field("thread", "unsupported_value"),
            Self::Context { param, .. } => field(param, "context_length_exceeded"),
            Self::Text { param, .. } => field(param, "invalid_value"),
            Self::Grammar(_) => error(400, "grammar_failed"),
            Self::UnknownModel { .. } => Wire { status: 404, ..field("model", "model_not_found") },
            Self::UnknownResponse(_) => Wire { status: 404, ..field("response_id", "not_found") },
            Self::UnknownPreviousResponse(_) => field("previous_response_id", "previous_response_not_found"),
            Self::SynchronousResponse => field("response_id", "unsupported_value"),
            Self::BodyTooLarge { .. } | Self::TooManyParts { .. } => error(413, "body_too_large"),
            Self::BodyTimeout(_) => error(408, "body_timeout"),
            Self::BodyBroken => error(400, "body_incomplete"),
            Self::BodyEncoded(_) => error(415, "body_encoded"),
            Self::NoRoute { .. } => error(404, "not_found"),
            Self::NotPulled { .. } => Wire { status: 404, ..field("model", "model_not_found") },
            Self::NotTrusted => error(403, "not_trusted"),
            Self::Store(StoreError::Invalid(_)) => field("model", "invalid_value"),
            Self::Store(StoreError::NotFound(_)) => Wire { status: 404, ..field("model", "model_not_found") },
            Self::Store(StoreError::Conflict(_)) => error(409, "conflict"),
            Self::Store(StoreError::Busy(_)) => retry(503, "pulls_full", RETRY_LOADING_S),
            Self::Store(StoreError::Hub(_)) => error(502, "pull_failed"),
            Self::Store(StoreError::Local(_)) => error(500, "store_failed"),
            Self::NotImplemented { .. } => error(501, "not_implemented"),
            Self::Method { .. } => error(405, "method_not_allowed"),
            Self::NoKey | Self::WrongKey => error(401, "invalid_api_key"),
            Self::ForeignHost(_) => error(403, "host_not_allowed"),
            Self::ForeignOrigin(_) => error(403, "origin_not_allowed"),
            Self::ClientFull { .. } => retry(429, "client_full", RETRY_QUEUE_S),
            Self::QueueFull { .. } => retry(429, "queue_full", RETRY_QUEUE_S),
            Self::NoTurn { .. } => retry(503, "no_turn", RETRY_QUEUE_S),
            Self::Loading => retry(503, "model_loading", RETRY_LOADING_S),
            Self::Engine(EngineError::Lost(_)) => error(503, "engine_lost"),
            Self::Engine(EngineError::Bug(_)) => error(503, "engine_failed"),
            Self::Engine(EngineError::ShuttingDown) => retry(503, "shutting_down", RETRY_LOADING_S),
            Self::Engine(EngineError::NotFinite) => error(500, "logits_not_finite"),
            Self::Engine(EngineError::LostTwice(_)) => error(500, "lost_twice"),
            Self::Engine(EngineError::Coprocessor(_)) => error(500, "npu_failed"),
            Self::Engine(EngineError::SlowReader) => error(408, "not_read"),
            Self::Library(LibraryError::NoRoom { .. }) => retry(503, "no_room", RETRY_LOADING_S),
            Self::Library(LibraryError::Failed { .. }) => error(503, "load_failed"),
            Self::Library(LibraryError::Gone(_)) => Wire { status: 404, ..field("model", "model_not_found") },
            Self::Library(LibraryError::QueueFull { .. }) => retry(429, "queue_full", RETRY_QUEUE_S),
            Self::Library(LibraryError::Unloaded(_)) => retry(503, "model_loading", RETRY_LOADING_S),
            Self::Library(LibraryError::ShuttingDown) => retry(503, "shutting_down", RETRY_LOADING_S),
            Self::Shortage(_) => retry(503, "no_memory", RETRY_QUEUE_S),
            Self::Behind => retry(503, "behind", RETRY_QUEUE_S),
            Self::Bug(_) | Self::Panic(_) => error(500, "internal_error"),
        }
    }
}

fn status_code(status: u16) -> StatusCode {
    StatusCode::from_u16(status).expect("a status of three digits")
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::QueueFull { waiting } => Self::QueueFull { waiting },
            SubmitError::ContextExceeded { prompt, max_tokens, context } => Self::Context {
                param: PROMPT_OF_A_CHAT,
                problem: error.to_string(),
                tokens: max_tokens.is_none().then_some((prompt, context)),
            },
            SubmitError::TokenOutOfRange { .. } => Self::text(error),
            SubmitError::NoTokens => Self::invalid("max_tokens", "expected at least 1"),
            SubmitError::TooManyBiases { .. } => Self::invalid("logit_bias", error.to_string()),
            SubmitError::TooManyLogprobs { .. } => Self::invalid("top_logprobs", error.to_string()),
            SubmitError::TooManyAnswers { .. } => Self::invalid("n", error.to_string()),
            SubmitError::NoImages | SubmitError::ImagesScored | SubmitError::ImagesPooled => {
                Self::text(error)
            }
            SubmitError::Engine(error) => Self::Engine(error),
            // A rendered conversation is never empty.
            SubmitError::EmptyPrompt => Self::Bug(error.to_string()),
        }
    }
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Invalid { param, problem } => Self::Invalid { param, problem },
            SessionError::Unsupported { param, problem } => Self::Unsupported { param, problem },
            SessionError::Context { problem, tokens } => {
                Self::Context { param: PROMPT_OF_A_CHAT, problem, tokens }
            }
            SessionError::Text(problem) => Self::text(problem),
            SessionError::Shortage(problem) => Self::Shortage(problem),
            SessionError::Grammar(problem) => Self::Grammar(problem),
            SessionError::Engine(error) => Self::Engine(error),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let wire = self.wire();
        let mut response = (status_code(wire.status), Json(self.body())).into_response();
        if let Some(seconds) = wire.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.would_fail_again() {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if matches!(self, Self::BodyEncoded(_)) {
            // RFC 7694: what the client may send instead.
            response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        if wire.status == 401 {
            let how = HeaderValue::from_static("Bearer realm=\"unicorn\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, how);
        }
        // Anthropic's routes rewrite the error in their own form.
        response.extensions_mut().insert(self);
        response
    }
}
