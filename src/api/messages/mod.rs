//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's wire format, JSON or a stream of named events.
//!
//! An answer is one block of text; one that says nothing has none. What comes with an answer before its text (how long
//! the prompt was, and how much of it the cache had) is known with its first token, so a stream begins with that.

mod request;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde_json::{Value, json};

use self::request::Form;
use super::answer::Reason;
use super::error::ApiError;
use super::exchange::{self, Answers, Caller, Exchange, Reply};
use super::{REQUEST_ID, Server};
use crate::engine::Timings;

/// By which name Anthropic's clients know a request's id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The handler.
pub(super) async fn create(
    State(server): State<Arc<Server>>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let asked =
        exchange::ask(&server, caller, body, "msg_", "messages", request::parse, |service, request, _| {
            let (mut engine, answer) = service.prepare(request)?;
            // Clients must name a bound, and name one that holds for any model: here the context may end before it.
            let room = service.engine().limits().max_context.saturating_sub(engine.prompt.len());
            engine.max_tokens = engine.max_tokens.filter(|n| *n <= room);
            Ok(vec![(engine, answer)])
        });
    let Exchange { wire: form, reply, answers } = asked.await?;
    if form.stream {
        Ok(exchange::stream(&server, events(reply, answers, form)))
    } else {
        collect(reply, answers, &form).await.map(|body| Json(body).into_response())
    }
}

/// The handler that counts, as an answer would.
pub(super) async fn count_tokens(
    State(server): State<Arc<Server>>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let counted = exchange::work(&server, body, |server, body| {
        let request = request::parse_to_count(body)?;
        let service = server.service_for(&request.model)?;
        Ok(service.prompt(&request.messages, request.ending)?.len())
    });
    let (_, n) = counted.await?;
    Ok(Json(json!({"input_tokens": n})))
}

/// Says errors of these routes in Anthropic's words, wherever they came from, and the request's id under its name.
pub(super) async fn in_its_words(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let ours = path == "/v1/messages" || path.starts_with("/v1/messages/");
    let mut response = next.run(request).await;
    if !ours {
        return response;
    }
    let id = response.headers().get(REQUEST_ID).cloned().unwrap_or(HeaderValue::from_static(""));
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let (status, mut body) = error.anthropic();
        body["request_id"] = json!(String::from_utf8_lossy(id.as_bytes()));
        *response.status_mut() = status;
        *response.body_mut() = Body::from(body.to_string());
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id);
    response
}

/// How it ended, in Anthropic's words.
struct Stop<'a> {
    reason: &'static str,
    sequence: Option<&'a str>,
}

impl<'a> Stop<'a> {
    fn new(form: &'a Form, reason: Reason, stopped_by: Option<usize>, timings: &Timings) -> Self {
        let sequence = stopped_by.map(|i| form.stops[i].as_str());
        let reason = match reason {
            _ if sequence.is_some() => "stop_sequence",
            Reason::Stop => "end_turn",
            Reason::Called => "tool_use",
            Reason::Length if timings.predicted_n < form.max_tokens => "model_context_window_exceeded",
            Reason::Length => "max_tokens",
        };
        Self { reason, sequence }
    }
}

/// Of the prompt, what the cache had does not count as input. Nothing is paid for what goes into the cache.
fn usage(timings: &Timings) -> Value {
    json!({
        "input_tokens": timings.prompt_n - timings.cached_n,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": timings.cached_n,
        "output_tokens": timings.predicted_n,
    })
}

fn message(reply: &Reply, content: Value, stop: Option<&Stop>, timings: &Timings) -> Value {
    json!({
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": stop.map(|stop| stop.reason),
        "stop_sequence": stop.and_then(|stop| stop.sequence),
        "usage": usage(timings),
    })
}

async fn collect(reply: Reply, mut answers: Answers, form: &Form) -> Result<Value, ApiError> {
    let mut text = String::new();
    while let Some(piece) = answers.next().await {
        let piece = piece?;
        text.push_str(&piece.text);
        if let Some(reason) = piece.end {
            reply.log(reason, &piece.timings);
            let stop = Stop::new(form, reason, piece.stopped_by, &piece.timings);
            let content = if text.is_empty() { json!([]) } else { json!([{"type": "text", "text": text}]) };
            return Ok(message(&reply, content, Some(&stop), &piece.timings));
        }
    }
    Err(ApiError::Bug("an answer had no end".into()))
}

/// The message without content, its block piece by piece, why it ended with what it took, and the end. An error that
/// comes after the headers is the last event.
fn events(
    reply: Reply,
    mut answers: Answers,
    form: Form,
) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    let event = |value: Value| {
        let name = value["type"].as_str().unwrap_or_default();
        Ok(sse::Event::default().event(name).data(value.to_string()))
    };
    async_stream::stream! {
        let (mut begun, mut block) = (false, false);
        while let Some(piece) = answers.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    yield event(error.anthropic().1);
                    break;
                }
            };
            if !begun {
                begun = true;
                let message = message(&reply, json!([]), None, &piece.timings);
                yield event(json!({"type": "message_start", "message": message}));
            }
            if !piece.text.is_empty() {
                if !block {
                    block = true;
                    let empty = json!({"type": "text", "text": ""});
                    yield event(json!({"type": "content_block_start", "index": 0, "content_block": empty}));
                    yield event(json!({"type": "ping"}));
                }
                let delta = json!({"type": "text_delta", "text": piece.text});
                yield event(json!({"type": "content_block_delta", "index": 0, "delta": delta}));
            }
            let Some(reason) = piece.end else { continue };
            reply.log(reason, &piece.timings);
            if block {
                yield event(json!({"type": "content_block_stop", "index": 0}));
            }
            let stop = Stop::new(&form, reason, piece.stopped_by, &piece.timings);
            let delta = json!({"stop_reason": stop.reason, "stop_sequence": stop.sequence});
            let usage = usage(&piece.timings);
            yield event(json!({"type": "message_delta", "delta": delta, "usage": usage}));
            yield event(json!({"type": "message_stop"}));
        }
    }
}
