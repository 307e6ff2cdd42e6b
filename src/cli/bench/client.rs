//! A client of any server with the OpenAI API: sends one request, and notes when each part of the answer arrives.
//!
//! It uses only the standard's fields, so that every server is measured in the same way. Each request has its own
//! connection, as with independent clients, and blocks its thread. It ends with an answer or with an error of one line,
//! after [`Options::timeout`] at the latest. The client does not repeat requests, follow redirects or use a proxy.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use ureq::http::request::Builder;
use ureq::http::{Method, Request, Response, StatusCode};
use ureq::tls::TlsConfig;
use ureq::{Agent, AsSendBody, Body};

const CONNECT: Duration = Duration::from_secs(10);
/// Longest body that is not a stream.
const MAX_BODY_BYTES: u64 = 1 << 20;
/// Longest stream, and longest event in it.
pub const MAX_STREAM_BYTES: u64 = 1 << 28;
pub const MAX_EVENT_BYTES: usize = 1 << 20;
/// Longest excerpt of a server's error message.
const MAX_SHOWN_CHARS: usize = 200;

/// The reason why there is no complete answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    #[error("cannot connect: {0}; is a server running there?")]
    Connect(String),
    #[error("no whole answer within {} s; --timeout-s allows more", .0.as_secs())]
    Timeout(Duration),
    #[error("{}{message}", status_text(*.status))]
    Status { status: u16, message: String },
    #[error(
        "answered with {0} where a stream of events (text/event-stream) was asked for; it does not speak SSE"
    )]
    NoStream(String),
    #[error("the stream broke off after {pieces} pieces of the answer{why}")]
    BrokeOff { pieces: usize, why: String },
    #[error("the answer ended in an error: {0}")]
    InStream(String),
    #[error("no answer of the OpenAI API: {0}")]
    Foreign(String),
    #[error("{0}")]
    Transport(String),
}

fn status_text(status: u16) -> String {
    let reason = StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or_default();
    format!("answered with {status} {reason}: ")
}

/// Options that all requests share.
pub struct Options {
    /// Base URL, without a trailing slash.
    pub url: String,
    pub api_key: Option<String>,
    pub temperature: f32,
    pub ignore_eos: bool,
    /// Longest time for one request.
    pub timeout: Duration,
    pub tls: TlsConfig,
}

pub struct Client {
    agent: Agent,
    options: Options,
    /// Whether requests ask for usage. Some servers refuse `stream_options`.
    pub include_usage: bool,
}

/// Token counts from the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: Option<u64>,
}

/// A complete answer.
#[derive(Debug)]
pub struct Answer {
    pub sent: Instant,
    /// The time at which each piece of text arrived.
    pub pieces: Vec<Instant>,
    pub text: String,
    pub ended: Instant,
    /// `None` if the server sent no usage.
    pub usage: Option<Usage>,
}

impl Answer {
    /// Time from the request to the first text; `None` without any text.
    pub fn first(&self) -> Option<Duration> {
        self.pieces.first().map(|at| *at - self.sent)
    }

    pub fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.pieces.windows(2).map(|pair| pair[1] - pair[0])
    }

    /// Number of tokens as the server counts them, or of pieces of text if it does not.
    pub fn tokens(&self) -> u64 {
        self.usage.map_or(self.pieces.len() as u64, |usage| usage.completion_tokens)
    }
}

impl Client {
    /// Whether every answer has the maximum length.
    pub fn ignores_eos(&self) -> bool {
        self.options.ignore_eos
    }

    pub fn new(options: Options) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections(0)
            .proxy(None)
            .tls_config(options.tls.clone())
            .user_agent(concat!("unicorn-bench/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(options.timeout));
        Self { agent: config.build().into(), options, include_usage: true }
    }

    pub fn url(&self) -> &str {
        &self.options.url
    }

    /// The ids of the models that the server lists.
    pub fn models(&self) -> Result<Vec<String>, AskError> {
        let mut response = self.run(self.request(&Method::GET, &format!("{}/models", self.url())), ())?;
        if !response.status().is_success() {
            return Err(self.refusal(&mut response));
        }
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_vec();
        let body = body.map_err(|error| self.before_answer(&error))?;
        let list: Value = serde_json::from_slice(&body)
            .map_err(|_| AskError::Foreign(format!("/models holds no JSON, but {}", shown(&body))))?;
        let cards =
            list["data"].as_array().ok_or_else(|| AskError::Foreign("/models has no list `data`".into()))?;
        Ok(cards.iter().filter_map(|card| card["id"].as_str().map(str::to_owned)).collect())
    }

    /// Sends a request, and reads the answer to its end.
    pub fn ask(&self, model: &str, messages: &Value, max_tokens: u32) -> Result<Answer, AskError> {
        let mut body = json!({
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": self.options.temperature,
            "stream": true,
        });
        if self.options.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        if self.include_usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        let request = self.request(&Method::POST, &format!("{}/chat/completions", self.url()));
        let request = request.header(CONTENT_TYPE, "application/json").header(ACCEPT, "text/event-stream");
        let body = body.to_string();
        let sent = Instant::now();
        let mut response = self.run(request, body)?;
        if !response.status().is_success() {
            return Err(self.refusal(&mut response));
        }
        let kind = response.body().mime_type().unwrap_or("no content type");
        if kind != "text/event-stream" {
            return Err(AskError::NoStream(shown(kind.as_bytes())));
        }
        let stream = response.into_body().into_with_config().limit(MAX_STREAM_BYTES).reader();
        self.read(Events::new(stream), sent)
    }

    fn read(&self, mut events: Events<impl Read>, sent: Instant) -> Result<Answer, AskError> {
        let mut answer = Answer { sent, pieces: Vec::new(), text: String::new(), ended: sent, usage: None };
        let mut finished = false;
        loop {
            let broke_off = |why: String| AskError::BrokeOff { pieces: answer.pieces.len(), why };
            let event = match events.next() {
                Ok(Some(event)) => event,
                // `[DONE]` is OpenAI's. A server may leave it out once it has sent the finish reason.
                Ok(None) if finished => break,
                Ok(None) => return Err(broke_off(String::new())),
                Err(EventError::TooLong) => {
                    return Err(AskError::Foreign(format!("an event of more than {MAX_EVENT_BYTES} bytes")));
                }
                Err(EventError::Io(error)) => match ureq::Error::from(error) {
                    ureq::Error::Timeout(_) => return Err(AskError::Timeout(self.options.timeout)),
                    error => return Err(broke_off(format!(": {}", shown(error.to_string().as_bytes())))),
                },
            };
            let now = Instant::now();
            if event.trim() == "[DONE]" {
                break;
            }
            let chunk: Value = serde_json::from_str(&event).map_err(|_| {
                AskError::Foreign(format!("an event is no JSON, but {}", shown(event.as_bytes())))
            })?;
            if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
                return Err(AskError::InStream(message_of(error)));
            }
            answer.usage = usage(&chunk["usage"]).or(answer.usage);
            let choice = &chunk["choices"][0];
            // A thought takes the model's time as text does, and is no part of the answer.
            let [thought, text] = ["reasoning_content", "content"]
                .map(|field| choice["delta"][field].as_str().unwrap_or_default());
            if !(thought.is_empty() && text.is_empty()) {
                answer.pieces.push(now);
                answer.text.push_str(text);
            }
            finished |= choice["finish_reason"].is_string();
            answer.ended = now;
        }
        Ok(answer)
    }

    pub fn request(&self, method: &Method, url: &str) -> Builder {
        let request = Request::builder().method(method).uri(url);
        match &self.options.api_key {
            None => request,
            Some(key) => request.header(AUTHORIZATION, format!("Bearer {key}")),
        }
    }

    pub fn run(&self, request: Builder, body: impl AsSendBody) -> Result<Response<Body>, AskError> {
        let request = request.body(body).map_err(|error| AskError::Transport(error.to_string()))?;
        self.agent.run(request).map_err(|error| self.before_answer(&error))
    }

    /// The error for a response whose status is not a success.
    pub fn refusal(&self, response: &mut Response<Body>) -> AskError {
        // If the body cannot be read, the status is the message.
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_vec().unwrap_or_default();
        let message = match serde_json::from_slice::<Value>(&body) {
            Ok(value) => message_of(value.get("error").unwrap_or(&value)),
            Err(_) => shown(&body),
        };
        AskError::Status { status: response.status().as_u16(), message }
    }

    /// The error for a request that failed before the stream began.
    pub fn before_answer(&self, error: &ureq::Error) -> AskError {
        use std::io::ErrorKind;
        match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                AskError::Connect(format!("nothing there answers within {} s", CONNECT.as_secs()))
            }
            ureq::Error::Timeout(_) => AskError::Timeout(self.options.timeout),
            ureq::Error::HostNotFound => AskError::Connect("there is no such host".into()),
            ureq::Error::ConnectionFailed => AskError::Connect(error.to_string()),
            ureq::Error::Io(io)
                if matches!(
                    io.kind(),
                    ErrorKind::ConnectionRefused | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable
                ) =>
            {
                AskError::Connect(io.to_string())
            }
            ureq::Error::Protocol(error) => {
                AskError::Foreign(format!("no HTTP/1.1: {}", shown(error.to_string().as_bytes())))
            }
            error => AskError::Transport(shown(error.to_string().as_bytes())),
        }
    }
}

fn usage(usage: &Value) -> Option<Usage> {
    Some(Usage {
        prompt_tokens: usage["prompt_tokens"].as_u64()?,
        completion_tokens: usage["completion_tokens"].as_u64()?,
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
    })
}

/// The message of an error object, or of the value in its place.
fn message_of(error: &Value) -> String {
    let message = error["message"].as_str().or(error.as_str()).map(str::to_owned);
    shown(message.unwrap_or_else(|| error.to_string()).as_bytes())
}

/// The beginning of a server's message, on one line.
pub fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let line = line.trim();
    match line.char_indices().nth(MAX_SHOWN_CHARS) {
        _ if line.is_empty() => "nothing".into(),
        None => line.to_owned(),
        Some((at, _)) => format!("{}...", &line[..at]),
    }
}

pub enum EventError {
    Io(std::io::Error),
    TooLong,
}

/// Reads the data of server-sent events, and ignores their other fields.
pub struct Events<R>(BufReader<R>);

impl<R: Read> Events<R> {
    pub fn new(stream: R) -> Self {
        Self(BufReader::new(stream))
    }

    /// The data of the next event. `None` at the end, where an unfinished event is dropped.
    pub fn next(&mut self) -> Result<Option<String>, EventError> {
        let mut data: Option<String> = None;
        let mut line = Vec::new();
        loop {
            line.clear();
            let most = MAX_EVENT_BYTES - data.as_ref().map_or(0, String::len);
            let mut bounded = (&mut self.0).take(most as u64);
            if bounded.read_until(b'\n', &mut line).map_err(EventError::Io)? == 0 {
                return if most == 0 { Err(EventError::TooLong) } else { Ok(None) };
            }
            let Some(text) = line.strip_suffix(b"\n") else {
                return if line.len() == most { Err(EventError::TooLong) } else { Ok(None) };
            };
            let text = String::from_utf8_lossy(text.strip_suffix(b"\r").unwrap_or(text));
            if text.is_empty() {
                if data.is_some() {
                    return Ok(data);
                }
            } else if let Some(more) = text.strip_prefix("data:") {
                let more = more.strip_prefix(' ').unwrap_or(more);
                match &mut data {
                    None => data = Some(more.to_owned()),
                    Some(data) => data.extend(["\n", more]),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_the_standard_has_them() {
        let mut events = Events::new(
            &b": hello\r\n\r\ndata: {\"a\": 1}\r\n\r\nevent: x\ndata:two\ndata:  lines\nid: 3\n\n\ndata: cut"
                [..],
        );
        let mut next = || events.next().ok().expect("no error");
        assert_eq!(next().as_deref(), Some("{\"a\": 1}"));
        assert_eq!(next().as_deref(), Some("two\n lines"));
        assert_eq!(next(), None);
        assert_eq!(next(), None);
    }

    #[test]
    fn an_event_without_an_end_is_given_up() {
        let long = [b"data: ".to_vec(), vec![b'x'; MAX_EVENT_BYTES]].concat();
        assert!(matches!(Events::new(&long[..]).next(), Err(EventError::TooLong)));
        let lines = b"data: xxxxxxxxxxxxxxxxxxxxxxxx\n".repeat(MAX_EVENT_BYTES / 20);
        assert!(matches!(Events::new(&lines[..]).next(), Err(EventError::TooLong)));
    }

    #[test]
    fn what_a_server_says_is_shown_on_one_line() {
        assert_eq!(shown(b"a\nb\x1b[0m "), "a b [0m");
        assert_eq!(shown(b" \n"), "nothing");
        assert_eq!(shown("ä".repeat(300).as_bytes()), format!("{}...", "ä".repeat(200)));
        assert_eq!(message_of(&json!({"message": "busy"})), "busy");
        assert_eq!(message_of(&json!("busy")), "busy");
        assert_eq!(message_of(&json!({"detail": 1})), r#"{"detail":1}"#);
    }
}
