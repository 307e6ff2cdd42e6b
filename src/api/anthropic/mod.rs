//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's wire format, JSON or a stream of named events.
//!
//! An answer is one block of text, or one for each call of a tool; one that says nothing has none. What comes with an answer
//! before that (how long the prompt was, and how much of it the cache had) is known with its first token, so a stream begins
//! with it.

pub(in crate::api) mod request;

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::api::anthropic::request::Form;
use crate::api::error::ApiError;
use crate::api::exchange::{self, Answers, Caller, Client, Exchange, Reply};
use crate::api::ids::{REQUEST_ID, new_id};
use crate::api::openapi::schema::{described, events as described_events};
use crate::api::openapi::{
    AnthropicErrors, CountTokensRequest, Message, MessageEvent, MessagesRequest, TokenCount,
};
use crate::api::server::Server;
use crate::api::tools::Calling;
use crate::engine::Timings;
use crate::session::Reason;
use crate::text::{CallPiece, whole_parameters};

/// By which name Anthropic's clients know a request's id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const TOOL_ID_PREFIX: &str = "toolu_";

described! {
    MessageEvents [MessageEvent] => described_events::<MessageEvent>();
}

/// Answers a conversation, in Anthropic's words.
#[utoipa::path(
    post,
    path = "/v1/messages",
    operation_id = "createMessage",
    tag = "Anthropic",
    request_body = MessagesRequest,
    responses(
        (
            status = 200,
            description = "The answer, or with `stream` its events.",
            content((Message = "application/json"), (inline(MessageEvents) = "text/event-stream")),
        ),
        AnthropicErrors,
    ),
)]
pub(in crate::api) async fn create(
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
        let failed = |error: &ApiError| vec![error.anthropic().1];
        Ok(exchange::stream(&server, events(reply, answers, form), failed, |event| {
            let name = event["type"].as_str().unwrap_or_default();
            sse::Event::default().event(name).data(event.to_string())
        }))
    } else {
        collect(reply, answers, &form).await
    }
}

/// Counts the tokens of a conversation, as an answer would.
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    operation_id = "countMessageTokens",
    tag = "Anthropic",
    request_body = CountTokensRequest,
    responses(
        (status = 200, description = "The answer.", body = TokenCount),
        AnthropicErrors,
    ),
)]
pub(in crate::api) async fn count_tokens(
    State(server): State<Arc<Server>>,
    client: Client,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let counted = exchange::work(&server, &client, body, |server, body| {
        let (model, request) = request::parse_to_count(body)?;
        let service = server.service_for(model.as_deref())?;
        Ok(service.conversation(&request)?.len())
    });
    let (_, n) = counted.await?;
    Ok(Json(json!({"input_tokens": n})))
}

/// Says errors of these routes in Anthropic's words, wherever they came from, and the request's id under its name.
pub(in crate::api) async fn rewrite_errors(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if path != "/v1/messages" && !path.starts_with("/v1/messages/") {
        return next.run(request).await;
    }
    let id = request.headers().get(REQUEST_ID).cloned().unwrap_or(HeaderValue::from_static(""));
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
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

/// What the cache had of the prompt does not count as input. Nothing is paid for what goes into the cache.
fn usage(timings: &Timings) -> Value {
    json!({
        "input_tokens": timings.prompt_n - timings.cached_n,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": timings.cached_n,
        "output_tokens": timings.predicted_n,
    })
}

/// A message, as far as it goes.
#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: &'a [Block],
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Value,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        /// An object, as it was written: numbers of any size.
        input: Box<RawValue>,
    },
}

fn message<'a>(
    reply: &'a Reply,
    content: &'a [Block],
    stop: Option<&Stop<'a>>,
    timings: &Timings,
) -> Answer<'a> {
    Answer {
        id: &reply.id,
        r#type: "message",
        role: "assistant",
        model: &reply.model,
        content,
        stop_reason: stop.map(|stop| stop.reason),
        stop_sequence: stop.and_then(|stop| stop.sequence),
        usage: usage(timings),
    }
}

/// The block of a call; of one that was cut, what is whole of its input.
fn tool_use(call: Calling) -> Result<Block, ApiError> {
    let json = if call.is_whole() { call.arguments } else { whole_parameters(&call.arguments) };
    let input =
        RawValue::from_string(json).map_err(|e| ApiError::Bug(format!("the input of a tool: {e}")))?;
    Ok(Block::ToolUse { id: format!("{TOOL_ID_PREFIX}{}", call.id), name: call.name, input })
}

async fn collect(reply: Reply, mut answers: Answers, form: &Form) -> Result<Response, ApiError> {
    let (mut text, mut calls) = (String::new(), Vec::new());
    while let Some(piece) = answers.next().await {
        let piece = piece.map_err(ApiError::of_a_whole_answer)?;
        text.push_str(&piece.text);
        for call in piece.calls {
            Calling::gather(&mut calls, call);
        }
        if let Some(reason) = piece.end {
            reply.log(reason, &piece.timings);
            let stop = Stop::new(form, reason, piece.stopped_by, &piece.timings);
            let mut content = calls.into_iter().map(tool_use).collect::<Result<Vec<Block>, _>>()?;
            if !text.is_empty() {
                content.push(Block::Text { text });
            }
            return Ok(Json(message(&reply, &content, Some(&stop), &piece.timings)).into_response());
        }
    }
    Err(ApiError::Bug("an answer had no end".into()))
}

/// The message without content, its blocks piece by piece, why it ended with what it took, and the end.
fn events(reply: Reply, mut answers: Answers, form: Form) -> impl Stream<Item = Result<Value, ApiError>> {
    async_stream::try_stream! {
        let mut begun = false;
        // The block that is open.
        let mut open = None;
        while let Some(piece) = answers.next().await {
            let piece = piece?;
            if !begun {
                begun = true;
                let message = message(&reply, &[], None, &piece.timings);
                yield json!({"type": "message_start", "message": message});
            }
            if !piece.text.is_empty() {
                if open.is_none() {
                    open = Some(0);
                    let block = json!({"type": "text", "text": ""});
                    yield json!({"type": "content_block_start", "index": 0, "content_block": block});
                    yield json!({"type": "ping"});
                }
                let delta = json!({"type": "text_delta", "text": piece.text});
                yield json!({"type": "content_block_delta", "index": 0, "delta": delta});
            }
            for call in piece.calls {
                match call {
                    CallPiece::Name { index, name } => {
                        if let Some(before) = open.replace(index) {
                            yield json!({"type": "content_block_stop", "index": before});
                        }
                        let id = new_id(TOOL_ID_PREFIX);
                        let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                        yield json!({"type": "content_block_start", "index": index, "content_block": block});
                        if index == 0 {
                            yield json!({"type": "ping"});
                        }
                    }
                    CallPiece::Parameters { index, json } => {
                        let delta = json!({"type": "input_json_delta", "partial_json": json});
                        yield json!({"type": "content_block_delta", "index": index, "delta": delta});
                    }
                }
            }
            let Some(reason) = piece.end else { continue };
            reply.log(reason, &piece.timings);
            if let Some(index) = open {
                yield json!({"type": "content_block_stop", "index": index});
            }
            let stop = Stop::new(&form, reason, piece.stopped_by, &piece.timings);
            let delta = json!({"stop_reason": stop.reason, "stop_sequence": stop.sequence});
            let usage = usage(&piece.timings);
            yield json!({"type": "message_delta", "delta": delta, "usage": usage});
            yield json!({"type": "message_stop"});
        }
    }
}
