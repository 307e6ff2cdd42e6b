//! `/v1/responses`: OpenAI's second wire format, JSON or a stream of numbered events, and responses that are kept.
//!
//! A response is one message of one text. What is kept lies in memory ([`store`]): it is gone when the server ends.

mod request;
mod store;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde_json::{Map, Value, json};

use self::request::Form;
pub(super) use self::store::Responses;
use self::store::Stored;
use super::answer::Reason;
use super::error::ApiError;
use super::exchange::{self, Answers, Caller, Exchange, Reply};
use super::request::short;
use super::{Server, unix_time_s};
use crate::engine::Timings;
use crate::text::Message;

const ID_PREFIX: &str = "resp_";

/// The handler that answers.
pub(super) async fn create(
    State(server): State<Arc<Server>>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let keeper = Arc::clone(&server);
    let parse = move |body: &[u8]| {
        request::parse(body, |id| keeper.responses.get(id, caller.id()).map(|stored| stored.turns.clone()))
    };
    let asked = exchange::ask(&server, caller, body, ID_PREFIX, "input", parse, |service, request, _| {
        Ok(vec![service.prepare(request)?])
    });
    let Exchange { wire: form, reply, answers } = asked.await?;
    let stream = form.stream;
    let making =
        Making { server: Arc::clone(&server), caller, form, reply, text: String::new(), logprobs: vec![] };
    if stream {
        Ok(exchange::stream(&server, events(making, answers)))
    } else {
        collect(making, answers).await.map(|body| Json(body).into_response())
    }
}

/// The handler that gives a response that was kept.
pub(super) async fn retrieve(
    State(server): State<Arc<Server>>,
    caller: Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = response_id(id)?;
    let stored =
        server.responses.get(&id, caller.id()).ok_or_else(|| ApiError::UnknownResponse(short(&id)))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], stored.body.clone()).into_response())
}

/// The handler that forgets one.
pub(super) async fn delete(
    State(server): State<Arc<Server>>,
    caller: Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let id = response_id(id)?;
    if !server.responses.remove(&id, caller.id()) {
        return Err(ApiError::UnknownResponse(short(&id)));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

fn response_id(id: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::invalid("response_id", "expected an id in UTF-8"))?;
    Ok(id)
}

/// A response while its answer comes.
struct Making {
    server: Arc<Server>,
    caller: Caller,
    form: Form,
    reply: Reply,
    /// So far.
    text: String,
    logprobs: Vec<Value>,
}

impl Making {
    /// Takes a piece of the answer; what was new in it.
    fn push(&mut self, answers: &Answers, piece: &exchange::Piece) -> Vec<Value> {
        self.text.push_str(&piece.text);
        let token =
            piece.logprobs.as_ref().map(|(id, logprobs)| answers.service.logprobs_json(*id, logprobs));
        let new: Vec<Value> = token.into_iter().collect();
        self.logprobs.extend_from_slice(&new);
        new
    }

    fn item_id(&self) -> String {
        self.reply.id.replacen(ID_PREFIX, "msg_", 1)
    }

    fn part(&self) -> Value {
        json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs})
    }

    fn item(&self, status: &str, content: Value) -> Value {
        json!({"id": self.item_id(), "type": "message", "status": status, "role": "assistant", "content": content})
    }

    fn object(&self, status: &str, output: Value) -> Map<String, Value> {
        let fields = [
            ("id", json!(self.reply.id)),
            ("object", json!("response")),
            ("created_at", json!(self.reply.created)),
            ("completed_at", Value::Null),
            ("status", json!(status)),
            ("error", Value::Null),
            ("incomplete_details", Value::Null),
            ("model", json!(self.reply.model)),
            ("output", output),
            ("usage", Value::Null),
        ];
        let mut object: Map<String, Value> =
            fields.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
        object.extend(self.form.echo.clone());
        object
    }

    /// The response at its end, which is kept from here on where that was wanted; `item` is its output.
    fn finish(&mut self, reason: Reason, item: Value, timings: &Timings) -> Value {
        self.reply.log(reason, timings);
        let mut object = self.object(status_of(reason), json!([item]));
        match reason {
            Reason::Stop | Reason::Called => object["completed_at"] = json!(unix_time_s()),
            Reason::Length => object["incomplete_details"] = json!({"reason": "max_output_tokens"}),
        }
        object["usage"] = usage(timings);
        let object = Value::Object(object);
        if self.form.store {
            let mut turns = std::mem::take(&mut self.form.turns);
            turns.push(Message::new("assistant", &self.text));
            let stored = Stored { owner: self.caller.id(), body: object.to_string(), turns };
            if !self.server.responses.insert(self.reply.id.clone(), stored) {
                tracing::debug!("a response was not kept: it is larger than the room for all of them");
            }
        }
        object
    }
}

fn status_of(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop | Reason::Called => "completed",
        Reason::Length => "incomplete",
    }
}

fn usage(timings: &Timings) -> Value {
    let Timings { prompt_n, cached_n, predicted_n, .. } = *timings;
    json!({
        "input_tokens": prompt_n,
        "input_tokens_details": {"cached_tokens": cached_n, "cache_write_tokens": 0},
        "output_tokens": predicted_n,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_n + predicted_n,
    })
}

async fn collect(mut making: Making, mut answers: Answers) -> Result<Value, ApiError> {
    while let Some(piece) = answers.next().await {
        let piece = piece?;
        making.push(&answers, &piece);
        if let Some(reason) = piece.end {
            let item = making.item(status_of(reason), json!([making.part()]));
            return Ok(making.finish(reason, item, &piece.timings));
        }
    }
    Err(ApiError::Bug("an answer had no end".into()))
}

/// The response as it begins, its item and the text in that piece by piece, each of them whole, and the response as it
/// ended. An error that comes after the headers ends a response that failed.
fn events(mut making: Making, mut answers: Answers) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    let mut number = 0;
    let mut event = move |name: &str, fields: Value| {
        let mut data = json!({"type": name, "sequence_number": number});
        number += 1;
        if let (Value::Object(data), Value::Object(fields)) = (&mut data, fields) {
            data.extend(fields);
        }
        Ok(sse::Event::default().event(name).data(data.to_string()))
    };
    async_stream::stream! {
        let id = making.item_id();
        let response = making.object("in_progress", json!([]));
        yield event("response.created", json!({"response": response}));
        yield event("response.in_progress", json!({"response": response}));
        let mut begun = false;
        while let Some(piece) = answers.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    let mut response = making.object("failed", json!([]));
                    response["error"] = json!({"code": "server_error", "message": error.to_string()});
                    yield event("response.failed", json!({"response": response}));
                    break;
                }
            };
            if !begun {
                begun = true;
                let item = making.item("in_progress", json!([]));
                yield event("response.output_item.added", json!({"output_index": 0, "item": item}));
                let at = json!({"item_id": id, "output_index": 0, "content_index": 0, "part": making.part()});
                yield event("response.content_part.added", at);
            }
            let logprobs = making.push(&answers, &piece);
            if !piece.text.is_empty() || !logprobs.is_empty() {
                let delta = json!({
                    "item_id": id, "output_index": 0, "content_index": 0, "delta": piece.text, "logprobs": logprobs,
                });
                yield event("response.output_text.delta", delta);
            }
            let Some(reason) = piece.end else { continue };
            let part = making.part();
            let text = json!({
                "item_id": id, "output_index": 0, "content_index": 0, "text": making.text, "logprobs": making.logprobs,
            });
            yield event("response.output_text.done", text);
            let at = json!({"item_id": id, "output_index": 0, "content_index": 0, "part": part});
            yield event("response.content_part.done", at);
            let item = making.item(status_of(reason), json!([part]));
            yield event("response.output_item.done", json!({"output_index": 0, "item": item}));
            let response = making.finish(reason, item, &piece.timings);
            yield event(&format!("response.{}", status_of(reason)), json!({"response": response}));
        }
    }
}
