//! `POST /v1/chat/completions`: from the body to a prompt, and from the engine's events to JSON or SSE.

use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::{Stream, StreamExt};
use serde_json::{Value, json};

use super::answer::{AnswerText, Delta, End};
use super::error::ApiError;
use super::request::ChatRequest;
use super::service::Service;
use super::{MAX_ARRIVING, Options, Server, random_u64};
use crate::engine::{self, ClientId, FinishReason, Timings, TokenStream};

/// For a whole body, however steadily it comes.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// The handler. A client that disconnects drops what this returns, and with it the engine's stream: that cancels.
pub(super) async fn completions(
    State(server): State<Arc<Server>>,
    peer: Option<Extension<ConnectInfo<SocketAddr>>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let full = ApiError::QueueFull { waiting: MAX_ARRIVING };
    let arriving = server.arriving.try_acquire().map_err(|_| full)?;
    let body = read_body(body, &server.options).await?;

    // Rendering and tokenizing a long conversation takes a processor for seconds: not on the threads that answer
    // other clients, and not on more threads than there are processors.
    let turn = Arc::clone(&server.tokenizing).acquire_owned().await;
    let turn = turn.map_err(|_| ApiError::Bug("the tokenizing semaphore was closed".into()))?;
    let preparing = Arc::clone(&server);
    let prepared = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        prepare(&preparing, &body)
    });
    let Prepared { request, answer, service, mut engine } =
        prepared.await.map_err(|e| ApiError::Bug(format!("preparing a prompt: {e}")))??;
    engine.client = client_of(&headers, peer.map(|Extension(ConnectInfo(address))| address.ip()));

    let (seed, n) = (engine.sampling.seed, 1 + engine.more_seeds.len());
    let tokens = service.engine().submit(engine)?;
    drop(arriving); // from here on the engine's queue is the bound
    let reply = Reply {
        id: format!("chatcmpl-{:016x}{:016x}", random_u64(), random_u64()),
        created: unix_time_s(),
        model: server.model_id.clone(),
        seed,
        span: tracing::Span::current(),
    };
    if request.stream {
        let keep_alive = KeepAlive::new().interval(server.options.keep_alive);
        let answers = Answers::new(tokens, answer, n, service);
        let chunks = stream_chunks(reply, answers, request.include_usage);
        Ok(Sse::new(chunks).keep_alive(keep_alive).into_response())
    } else {
        collect(reply, Answers::new(tokens, answer, n, service)).await.map(|body| Json(body).into_response())
    }
}

/// Whose request it is, as far as fairness between clients goes: the API key's, or without one the address's.
fn client_of(headers: &HeaderMap, peer: Option<IpAddr>) -> ClientId {
    let mut hasher = DefaultHasher::new();
    match headers.get(header::AUTHORIZATION) {
        Some(key) => key.as_bytes().hash(&mut hasher),
        None => peer.hash(&mut hasher),
    }
    hasher.finish()
}

async fn read_body(body: Body, options: &Options) -> Result<Vec<u8>, ApiError> {
    let &Options { max_body_bytes: limit, body_stall: stall, .. } = options;
    let timeout = || ApiError::BodyTimeout { stall, whole: BODY_TIMEOUT };
    let mut chunks = body.into_data_stream();
    let read = async {
        let mut bytes = Vec::new();
        while let Some(chunk) = tokio::time::timeout(stall, chunks.next()).await.map_err(|_| timeout())? {
            let chunk = chunk.map_err(|_| ApiError::BodyBroken)?;
            if bytes.len() + chunk.len() > limit {
                return Err(ApiError::BodyTooLarge { limit });
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    };
    tokio::time::timeout(BODY_TIMEOUT, read).await.map_err(|_| timeout())?
}

/// A request that only needs the engine.
struct Prepared {
    request: ChatRequest,
    answer: AnswerText,
    service: Arc<Service>,
    engine: engine::Request,
}

/// Errors in the order of what they need: the body alone, then the model's name, then the loaded model.
fn prepare(server: &Server, body: &[u8]) -> Result<Prepared, ApiError> {
    let request = ChatRequest::parse(body)?;
    if request.model != server.model_id {
        return Err(ApiError::UnknownModel { asked: request.model, served: server.model_id.clone() });
    }
    let service = server.service()?;
    service.engine().health()?;
    let (engine, answer) = service.prepare(&request)?;
    Ok(Prepared { request, answer, service, engine })
}

/// What all parts of one reply share.
struct Reply {
    id: String,
    created: u64,
    model: String,
    seed: u64,
    /// The request's: a stream outlives the handler.
    span: tracing::Span,
}

impl Reply {
    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("unicorn-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }

    /// One chunk of a stream. Where usage was asked for, every chunk has the field.
    fn chunk(&self, index: usize, delta: Value, finish_reason: Option<&str>, usage: bool) -> Value {
        let choice =
            json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
        let mut chunk = self.object("chat.completion.chunk", json!([choice]));
        if usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn log(&self, reason: FinishReason, timings: &Timings) {
        let Timings { queue, prefill, decode, prompt_n, cached_n, predicted_n, drafts } = timings;
        let (seed, reason) = (self.seed, finish_reason(reason));
        self.span.in_scope(|| {
            tracing::info!(
                seed,
                prompt_n,
                cached_n,
                predicted_n,
                draft_n = drafts.proposed,
                draft_n_accepted = drafts.accepted,
                queue_ms = queue.as_millis(),
                prompt_ms = prefill.as_millis(),
                predicted_ms = decode.as_millis(),
                "answered: {reason}"
            );
        });
    }
}

/// The answers to one request, as they come.
struct Answers {
    tokens: TokenStream,
    texts: Vec<AnswerText>,
    /// Why and when each ended.
    ends: Vec<Option<(FinishReason, Timings)>>,
    service: Arc<Service>,
}

/// What one event adds to an answer.
struct Piece {
    choice: usize,
    text: String,
    /// OpenAI's object for the token that it brought.
    logprobs: Option<Value>,
    end: Option<FinishReason>,
}

impl Answers {
    fn new(tokens: TokenStream, text: AnswerText, n: usize, service: Arc<Service>) -> Self {
        Self { tokens, texts: vec![text; n], ends: vec![None; n], service }
    }

    /// None behind the end of the last answer.
    async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        if self.ends.iter().all(Option::is_some) {
            return None;
        }
        let Some(event) = self.tokens.next().await else {
            return Some(Err(ApiError::Bug("an answer had no end".into())));
        };
        // A failure is that of all answers.
        let choice = event.choice().unwrap_or(0);
        let Delta { text, logprobs, end } = self.texts[choice].push(event);
        let end = match end {
            None => None,
            Some(End::Failed(error)) => return Some(Err(error.into())),
            Some(End::Finished { reason, timings }) => {
                self.ends[choice] = Some((reason, timings));
                // A stop string ends it here and not in the engine.
                self.tokens.stop(choice);
                Some(reason)
            }
        };
        let logprobs = logprobs.map(|(id, logprobs)| self.service.logprobs_json(id, &logprobs));
        Some(Ok(Piece { choice, text, logprobs, end }))
    }

    /// Of all answers together, which share their prompt.
    fn timings(&self) -> Timings {
        let ends = || self.ends.iter().flatten().map(|(_, timings)| *timings);
        let decode = ends().map(|timings| timings.decode).max().unwrap_or_default();
        let predicted_n = ends().map(|timings| timings.predicted_n).sum();
        Timings { decode, predicted_n, ..ends().next().unwrap_or_default() }
    }
}

fn logprobs_content(tokens: Vec<Value>) -> Value {
    json!({"content": tokens, "refusal": null})
}

async fn collect(reply: Reply, mut answers: Answers) -> Result<Value, ApiError> {
    let n = answers.ends.len();
    let (mut texts, mut logprobs) = (vec![String::new(); n], vec![Vec::new(); n]);
    let mut last = FinishReason::Stop;
    while let Some(piece) = answers.next().await {
        let piece = piece?;
        texts[piece.choice].push_str(&piece.text);
        logprobs[piece.choice].extend(piece.logprobs);
        last = piece.end.unwrap_or(last);
    }
    let timings = answers.timings();
    reply.log(last, &timings);
    let choices = answers.ends.iter().flatten().zip(texts).zip(logprobs).enumerate();
    let choices = choices.map(|(index, (((reason, _), text), tokens))| {
        let message = json!({"role": "assistant", "content": text, "refusal": null});
        let logprobs = if tokens.is_empty() { Value::Null } else { logprobs_content(tokens) };
        let reason = finish_reason(*reason);
        json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    });
    let mut body = reply.object("chat.completion", choices.collect());
    body["usage"] = usage(&timings);
    body["timings"] = timings_json(&timings);
    Ok(body)
}

/// Of each answer the role first, then content, then the finish reason; then usage if asked; `[DONE]` last. An error that
/// comes after the headers is a line of the stream.
fn stream_chunks(
    reply: Reply,
    mut answers: Answers,
    include_usage: bool,
) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    let line = |value: Value| Ok(sse::Event::default().data(value.to_string()));
    async_stream::stream! {
        for choice in 0..answers.ends.len() {
            let role = json!({"role": "assistant", "content": ""});
            yield line(reply.chunk(choice, role, None, include_usage));
        }
        while let Some(piece) = answers.next().await {
            let Piece { choice, text, logprobs, end } = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    yield line(error.body());
                    break;
                }
            };
            if !text.is_empty() || logprobs.is_some() {
                let mut chunk = reply.chunk(choice, json!({"content": text}), None, include_usage);
                if let Some(token) = logprobs {
                    chunk["choices"][0]["logprobs"] = logprobs_content(vec![token]);
                }
                yield line(chunk);
            }
            let Some(reason) = end else { continue };
            let mut last = reply.chunk(choice, json!({}), Some(finish_reason(reason)), include_usage);
            if answers.ends.iter().all(Option::is_some) {
                let timings = answers.timings();
                reply.log(reason, &timings);
                if include_usage {
                    yield line(last);
                    last = reply.object("chat.completion.chunk", json!([]));
                    last["usage"] = usage(&timings);
                }
                last["timings"] = timings_json(&timings);
            }
            yield line(last);
        }
        yield Ok(sse::Event::default().data("[DONE]"));
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn usage(timings: &Timings) -> Value {
    let Timings { prompt_n, cached_n, predicted_n, .. } = *timings;
    json!({
        "prompt_tokens": prompt_n,
        "completion_tokens": predicted_n,
        "total_tokens": prompt_n + predicted_n,
        "prompt_tokens_details": {"cached_tokens": cached_n},
    })
}

/// As llama.cpp's server reports them; a rate over no time, or of no tokens, is null.
fn timings_json(timings: &Timings) -> Value {
    let Timings { prefill, decode, prompt_n: whole_prompt, cached_n, predicted_n, drafts, .. } = *timings;
    // As there: of the prompt, what was computed, and what needed not be.
    let prompt_n = whole_prompt - cached_n;
    let rate = |n: usize, time: Duration| (n > 0 && !time.is_zero()).then(|| n as f64 / time.as_secs_f64());
    json!({
        "prompt_n": prompt_n,
        "cache_n": cached_n,
        "prompt_ms": prefill.as_secs_f64() * 1e3,
        "prompt_per_second": rate(prompt_n, prefill),
        "predicted_n": predicted_n,
        "predicted_ms": decode.as_secs_f64() * 1e3,
        // The first token came with the prompt.
        "predicted_per_second": rate(predicted_n.saturating_sub(1), decode),
        "draft_n": drafts.proposed,
        "draft_n_accepted": drafts.accepted,
    })
}

fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_told_apart_by_key_and_then_by_address() {
        let with = |key: Option<&'static str>, address: [u8; 4]| {
            let mut headers = HeaderMap::new();
            if let Some(key) = key {
                headers.insert(header::AUTHORIZATION, header::HeaderValue::from_static(key));
            }
            client_of(&headers, Some(IpAddr::from(address)))
        };
        assert_eq!(with(None, [10, 0, 0, 1]), with(None, [10, 0, 0, 1]));
        assert_ne!(with(None, [10, 0, 0, 1]), with(None, [10, 0, 0, 2]));
        assert_eq!(with(Some("Bearer a"), [10, 0, 0, 1]), with(Some("Bearer a"), [10, 0, 0, 2]));
        assert_ne!(with(Some("Bearer a"), [10, 0, 0, 1]), with(Some("Bearer b"), [10, 0, 0, 1]));
    }
}
