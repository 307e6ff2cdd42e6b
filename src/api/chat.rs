//! `POST /v1/chat/completions`: OpenAI's chat, from the body to JSON or SSE.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde_json::{Value, json};

use super::answer::Reason;
use super::error::ApiError;
use super::exchange::{self, Answers, Caller, Exchange, Piece, Reply, finish_reason, timings_json, usage};
use super::request::ChatRequest;
use super::tools::Calling;
use super::{Server, new_id};
use crate::text::CallPiece;

/// How the answer is wanted.
struct Form {
    stream: bool,
    include_usage: bool,
}

/// The handler.
pub(super) async fn completions(
    State(server): State<Arc<Server>>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let parse = |body: &[u8]| {
        let request = ChatRequest::parse(body)?;
        let form = Form { stream: request.stream, include_usage: request.include_usage };
        Ok((request, form))
    };
    let asked =
        exchange::ask(&server, caller, body, "chatcmpl-", "messages", parse, |service, request, _| {
            Ok(vec![service.prepare(request)?])
        });
    let Exchange { wire: form, reply, answers } = asked.await?;
    if form.stream {
        Ok(exchange::stream(&server, stream_chunks(reply, answers, form.include_usage)))
    } else {
        collect(reply, answers).await.map(|body| Json(body).into_response())
    }
}

/// One chunk of a stream. Where usage was asked for, every chunk has the field.
fn chunk(reply: &Reply, index: usize, delta: Value, finish_reason: Option<&str>, usage: bool) -> Value {
    let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
    let mut chunk = reply.object("chat.completion.chunk", json!([choice]));
    if usage {
        chunk["usage"] = Value::Null;
    }
    chunk
}

/// OpenAI's delta of one call: its name with its id first, and then its arguments piece by piece.
fn call_delta(call: CallPiece) -> Value {
    match call {
        CallPiece::Name { index, name } => {
            let function = json!({"name": name, "arguments": ""});
            json!({"index": index, "id": new_id("call_"), "type": "function", "function": function})
        }
        CallPiece::Parameters { index, json } => json!({"index": index, "function": {"arguments": json}}),
    }
}

fn logprobs_content(tokens: Vec<Value>) -> Value {
    json!({"content": tokens, "refusal": null})
}

async fn collect(reply: Reply, mut answers: Answers) -> Result<Value, ApiError> {
    let n = answers.count();
    let (mut texts, mut logprobs) = (vec![String::new(); n], vec![Vec::new(); n]);
    let mut calls = vec![Vec::<Calling>::new(); n];
    let mut last = Reason::Stop;
    while let Some(piece) = answers.next().await {
        let piece = piece?;
        texts[piece.choice].push_str(&piece.text);
        for call in piece.calls {
            Calling::gather(&mut calls[piece.choice], call);
        }
        let token = piece.logprobs.map(|(id, logprobs)| answers.service.logprobs_json(id, &logprobs));
        logprobs[piece.choice].extend(token);
        last = piece.end.unwrap_or(last);
    }
    let timings = answers.timings();
    reply.log(last, &timings);
    let choices = answers.ends().zip(texts).zip(calls).zip(logprobs).enumerate();
    let choices = choices.map(|(index, (((reason, text), calls), tokens))| {
        let mut message = json!({"role": "assistant", "content": text, "refusal": null});
        if !calls.is_empty() {
            let call = |Calling { id, name, arguments }: &Calling| {
                let function = json!({"name": name, "arguments": arguments});
                json!({"id": format!("call_{id}"), "type": "function", "function": function})
            };
            message["content"] = Value::Null;
            message["tool_calls"] = calls.iter().map(call).collect();
        }
        let logprobs = if tokens.is_empty() { Value::Null } else { logprobs_content(tokens) };
        let reason = finish_reason(reason);
        json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    });
    let mut body = reply.object("chat.completion", choices.collect());
    body["usage"] = usage(&timings);
    body["timings"] = timings_json(&timings);
    Ok(body)
}

/// Of each answer the role first, then content or calls, then the finish reason; then usage if asked; `[DONE]` last. An error that
/// comes after the headers is a line of the stream.
fn stream_chunks(
    reply: Reply,
    mut answers: Answers,
    include_usage: bool,
) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    let line = |value: Value| Ok(sse::Event::default().data(value.to_string()));
    async_stream::stream! {
        for choice in 0..answers.count() {
            let role = json!({"role": "assistant", "content": ""});
            yield line(chunk(&reply, choice, role, None, include_usage));
        }
        while let Some(piece) = answers.next().await {
            let Piece { choice, text, calls, logprobs, end, .. } = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    yield line(error.body());
                    break;
                }
            };
            if !text.is_empty() || !calls.is_empty() || logprobs.is_some() {
                let delta = match (calls.is_empty(), text.is_empty()) {
                    (false, _) => json!({"tool_calls": calls.into_iter().map(call_delta).collect::<Vec<_>>()}),
                    (true, false) => json!({"content": text}),
                    // A token that said nothing yet, or stands between calls.
                    (true, true) => json!({}),
                };
                let mut chunk = chunk(&reply, choice, delta, None, include_usage);
                if let Some((id, logprobs)) = logprobs {
                    let token = answers.service.logprobs_json(id, &logprobs);
                    chunk["choices"][0]["logprobs"] = logprobs_content(vec![token]);
                }
                yield line(chunk);
            }
            let Some(reason) = end else { continue };
            let mut last = chunk(&reply, choice, json!({}), Some(finish_reason(reason)), include_usage);
            if answers.is_done() {
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
