//! `/v1/responses`: OpenAI's second wire format, JSON or a stream of numbered events, and responses that are kept.
//!
//! What a response puts out is one message of one text, or calls of functions. What is kept lies in memory ([`store`]): it is
//! gone when the server ends.

pub(in crate::api) mod items;
mod request;
pub(in crate::api) mod store;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, header};
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use futures::{Stream, stream};
use serde_json::{Map, Value, json};

use crate::api::error::{ApiError, ErrorBody};
use crate::api::exchange::{self, Answers, Caller, Client, Exchange, Piece, Reply};
use crate::api::fields::short;
use crate::api::ids::unix_time_s;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::responses::request::Form;
use crate::api::openai::responses::store::Stored;
use crate::api::openapi::schema::{described, events as described_events};
use crate::api::openapi::{
    AuthErrors, BodyErrors, DeletedResponse, ItemList, PageQuery, ResponseEvent, ResponseObject,
    ResponsesRequest, StreamQuery,
};
use crate::api::server::Server;
use crate::api::tools::Calling;
use crate::engine::{ClientId, Timings};
use crate::session::Reason;
use crate::text::CallPiece;

const ID_PREFIX: &str = "resp_";

described! {
    ResponseEvents [ResponseEvent] => described_events::<ResponseEvent>();
}

/// Answers an input, or goes on with an earlier response.
#[utoipa::path(
    post,
    path = "/v1/responses",
    operation_id = "createResponse",
    tag = "OpenAI",
    request_body = ResponsesRequest,
    responses(
        (
            status = 200,
            description = "The answer, or with `stream` its events.",
            content((ResponseObject = "application/json"), (inline(ResponseEvents) = "text/event-stream")),
        ),
        BodyErrors,
    ),
)]
pub(in crate::api) async fn create(
    State(server): State<Arc<Server>>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let (keeper, owner) = (Arc::clone(&server), caller.id());
    let parse = move |body: &[u8]| {
        request::parse(body, |id| keeper.responses.get(id, owner).map(|stored| stored.items()))
    };
    let asked = exchange::ask(&server, caller, body, ID_PREFIX, "input", parse, |service, request, _| {
        Ok(vec![service.prepare(request)?])
    });
    let Exchange { wire: form, reply, answers } = asked.await?;
    let stream = form.stream;
    let making = Making::new(Arc::clone(&server), owner, form, reply);
    if stream {
        let fixed = Arc::clone(&making.fixed);
        let failed = move |error: &ApiError| vec![fixed.failed(error)];
        let mut number = 0;
        Ok(exchange::stream(&server, events(making, answers), failed, move |(name, fields)| {
            let mut data = json!({"type": name, "sequence_number": number});
            number += 1;
            if let (Value::Object(data), Value::Object(fields)) = (&mut data, fields) {
                data.extend(fields);
            }
            sse::Event::default().event(name).data(data.to_string())
        }))
    } else {
        collect(making, answers).await.map(|body| Json(body).into_response())
    }
}

/// A response that was kept.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}",
    operation_id = "getResponse",
    tag = "OpenAI",
    params(("id" = String, Path), StreamQuery),
    responses(
        (status = 200, description = "The response.", body = ResponseObject),
        (status = 400, description = "The id is no UTF-8, or a stream is asked for.", body = ErrorBody),
        (status = 404, description = "It is not kept for who asks.", body = ErrorBody),
        (status = 429, description = "Too much of this client is under way.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn retrieve(
    State(server): State<Arc<Server>>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<Parameters>, QueryRejection>,
) -> Result<Response, ApiError> {
    let stored = kept(&server, client.id, id)?;
    match parameter(&parameters(query)?, "stream") {
        None | Some("false") => {}
        Some("true") => {
            let problem = "this server keeps responses, and not the events that they came as; leave it out";
            return Err(ApiError::unsupported("stream", problem));
        }
        Some(other) => {
            let problem = format!("expected true or false, got {:?}", short(other));
            return Err(ApiError::invalid("stream", problem));
        }
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], stored.body.clone()).into_response())
}

/// Forgets a response.
#[utoipa::path(
    delete,
    path = "/v1/responses/{id}",
    operation_id = "deleteResponse",
    tag = "OpenAI",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "It is forgotten.", body = DeletedResponse),
        (status = 400, description = "The id is no UTF-8.", body = ErrorBody),
        (status = 404, description = "It is not kept for who asks.", body = ErrorBody),
        (status = 429, description = "Too much of this client is under way.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn delete(
    State(server): State<Arc<Server>>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let id = response_id(id)?;
    if !server.responses.remove(&id, client.id) {
        return Err(ApiError::UnknownResponse(short(&id)));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

/// Would end a response that is made while nobody waits for it: here there are none.
#[utoipa::path(
    post,
    path = "/v1/responses/{id}/cancel",
    operation_id = "cancelResponse",
    tag = "OpenAI",
    params(("id" = String, Path)),
    responses(
        (status = 400, description = "It is not made in the background.", body = ErrorBody),
        (status = 404, description = "It is not kept for who asks.", body = ErrorBody),
        (status = 429, description = "Too much of this client is under way.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn cancel(
    State(server): State<Arc<Server>>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    kept(&server, client.id, id)?;
    Err(ApiError::SynchronousResponse)
}

/// What a response answered: all of the conversation before it.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}/input_items",
    operation_id = "listInputItems",
    tag = "OpenAI",
    params(("id" = String, Path), PageQuery),
    responses(
        (status = 200, description = "A page of the items.", body = ItemList),
        (status = 400, description = "The id is no UTF-8, or a parameter is not what it has to be.", body = ErrorBody),
        (status = 404, description = "It is not kept for who asks.", body = ErrorBody),
        (status = 429, description = "Too much of this client is under way.", body = ErrorBody),
        (status = 503, description = "The server is too busy to look for them.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn input_items(
    State(server): State<Arc<Server>>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<Parameters>, QueryRejection>,
) -> Result<Response, ApiError> {
    let stored = kept(&server, client.id, id)?;
    let parameters = parameters(query)?;
    // What is read is what is kept, in the turns of a body.
    let listed = exchange::work(&server, &client, Body::empty(), move |_, _| {
        items::list(&stored.input, |name| parameter(&parameters, name))
    });
    let (_, page) = listed.await?;
    let bytes: usize = page.iter().map(Bytes::len).sum();
    let head = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CONTENT_LENGTH, HeaderValue::from(bytes)),
    ];
    let body = Body::from_stream(stream::iter(page.into_iter().map(Ok::<_, Infallible>)));
    Ok((head, body).into_response())
}

/// A query's, as they came.
type Parameters = Vec<(String, String)>;

fn parameters(query: Result<Query<Parameters>, QueryRejection>) -> Result<Parameters, ApiError> {
    let Query(parameters) =
        query.map_err(|_| ApiError::invalid("query", "expected names and values in UTF-8"))?;
    Ok(parameters)
}

fn parameter<'a>(parameters: &'a Parameters, name: &str) -> Option<&'a str> {
    parameters.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
}

fn kept(
    server: &Server,
    owner: ClientId,
    id: Result<Path<String>, PathRejection>,
) -> Result<Arc<Stored>, ApiError> {
    let id = response_id(id)?;
    server.responses.get(&id, owner).ok_or_else(|| ApiError::UnknownResponse(short(&id)))
}

fn response_id(id: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::invalid("response_id", "expected an id in UTF-8"))?;
    Ok(id)
}

/// An event of a stream: its name, and its fields but that and its number.
type Told = (&'static str, Value);

/// What a response says from its beginning to its end, whatever becomes of its answer.
struct Fixed {
    reply: Reply,
    /// What its object repeats of the request.
    echo: Map<String, Value>,
}

impl Fixed {
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
        object.extend(self.echo.clone());
        object
    }

    /// The last event of a stream that an error ended.
    fn failed(&self, error: &ApiError) -> Told {
        let mut response = self.object("failed", json!([]));
        response["error"] = json!({"code": "server_error", "message": error.to_string()});
        response["store"] = json!(false);
        ("response.failed", json!({"response": response}))
    }
}

/// A response while its answer comes.
struct Making {
    server: Arc<Server>,
    owner: ClientId,
    /// The items of the conversation before the answer, and whether both are kept.
    items: Vec<Value>,
    store: bool,
    fixed: Arc<Fixed>,
    /// So far; there are calls or there is text.
    text: String,
    calls: Vec<Calling>,
    logprobs: Vec<TokenLogprob>,
}

impl Making {
    fn new(server: Arc<Server>, owner: ClientId, form: Form, reply: Reply) -> Self {
        let Form { store, items, mut echo, .. } = form;
        let store = store && server.responses.is_open();
        echo["store"] = json!(store);
        let fixed = Arc::new(Fixed { reply, echo });
        let (text, calls, logprobs) = (String::new(), Vec::new(), Vec::new());
        Self { server, owner, items, store, fixed, text, calls, logprobs }
    }

    fn message_id(&self) -> String {
        self.fixed.reply.id.replacen(ID_PREFIX, "msg_", 1)
    }

    fn message(&self, status: &str, content: Value) -> Value {
        json!({"id": self.message_id(), "type": "message", "status": status, "role": "assistant", "content": content})
    }

    fn part(&self) -> Value {
        part(&self.text, &self.logprobs)
    }

    /// What it puts out: calls, which have no place for log probabilities, or a message.
    fn output(&self, reason: Reason) -> Vec<Value> {
        if self.calls.is_empty() {
            return vec![self.message(status_of(reason), json!([self.part()]))];
        }
        self.calls.iter().map(|call| function_call(call, call.status(), &call.arguments)).collect()
    }

    /// The response at its end, which is kept from here on where that was wanted.
    fn finish(&mut self, reason: Reason, timings: &Timings) -> Value {
        self.fixed.reply.log(reason, timings);
        let mut object = self.fixed.object(status_of(reason), json!(self.output(reason)));
        match reason {
            Reason::Stop | Reason::Called => object["completed_at"] = json!(unix_time_s()),
            Reason::Length => object["incomplete_details"] = json!({"reason": "max_output_tokens"}),
        }
        object["usage"] = usage(timings);
        let mut object = Value::Object(object);
        if self.store {
            let input = Value::Array(std::mem::take(&mut self.items)).to_string().into();
            let stored = Stored { owner: self.owner, body: object.to_string().into(), input };
            if !self.server.responses.insert(self.fixed.reply.id.clone(), stored) {
                tracing::debug!("a response was not kept: it is larger than its owner's share of the room");
                object["store"] = json!(false);
            }
        }
        object
    }
}

impl Calling {
    fn item_id(&self) -> String {
        format!("fc_{}", self.id)
    }

    fn status(&self) -> &'static str {
        if self.is_whole() { "completed" } else { "incomplete" }
    }
}

fn function_call(call: &Calling, status: &str, arguments: &str) -> Value {
    let call_id = format!("call_{}", call.id);
    json!({
        "id": call.item_id(), "type": "function_call", "status": status, "call_id": call_id, "name": call.name,
        "arguments": arguments,
    })
}

fn part(text: &str, logprobs: &[TokenLogprob]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

fn status_of(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop | Reason::Called => "completed",
        Reason::Length => "incomplete",
    }
}

/// The last event of a stream that came to its end.
fn ended_as(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop | Reason::Called => "response.completed",
        Reason::Length => "response.incomplete",
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
        let piece = piece.map_err(ApiError::of_a_whole_answer)?;
        making.text.push_str(&piece.text);
        making.logprobs.extend(logprob(&answers, &piece));
        for call in piece.calls {
            Calling::gather(&mut making.calls, call);
        }
        if let Some(reason) = piece.end {
            return Ok(making.finish(reason, &piece.timings));
        }
    }
    Err(ApiError::Bug("an answer had no end".into()))
}

fn logprob(answers: &Answers, piece: &Piece) -> Option<TokenLogprob> {
    piece.logprobs.as_ref().map(|(id, logprobs)| TokenLogprob::new(&answers.service, *id, logprobs))
}

/// The response as it begins; its message, or its calls one after the other, piece by piece and each of them whole; and the
/// response as it ended.
fn events(mut making: Making, mut answers: Answers) -> impl Stream<Item = Result<Told, ApiError>> {
    async_stream::try_stream! {
        let id = making.message_id();
        let response = making.fixed.object("in_progress", json!([]));
        yield ("response.created", json!({"response": response}));
        yield ("response.in_progress", json!({"response": response}));
        // Whether there is a message, and of how many of its log probabilities it has told. Where tools may be called, some
        // tokens come before it is known what they are.
        let (mut begun, mut told) = (false, 0);
        while let Some(piece) = answers.next().await {
            let mut piece = piece?;
            making.text.push_str(&piece.text);
            making.logprobs.extend(logprob(&answers, &piece));
            for call in std::mem::take(&mut piece.calls) {
                let (at, more) = match &call {
                    CallPiece::Name { index, .. } => (*index, None),
                    CallPiece::Parameters { index, json } => (*index, Some(json.clone())),
                };
                if more.is_none()
                    && let Some(before) = making.calls.last()
                {
                    for event in call_done(at - 1, before) {
                        yield event;
                    }
                }
                Calling::gather(&mut making.calls, call);
                let call = &making.calls[at];
                match more {
                    None => {
                        let item = function_call(call, "in_progress", "");
                        yield ("response.output_item.added", json!({"output_index": at, "item": item}));
                    }
                    Some(json) => {
                        let delta = json!({"item_id": call.item_id(), "output_index": at, "delta": json});
                        yield ("response.function_call_arguments.delta", delta);
                    }
                }
            }
            if !begun && (!piece.text.is_empty() || (piece.end.is_some() && making.calls.is_empty())) {
                begun = true;
                let item = making.message("in_progress", json!([]));
                yield ("response.output_item.added", json!({"output_index": 0, "item": item}));
                let at = json!({"item_id": id, "output_index": 0, "content_index": 0, "part": part("", &[])});
                yield ("response.content_part.added", at);
            }
            if begun && (!piece.text.is_empty() || told < making.logprobs.len()) {
                let delta = json!({
                    "item_id": id, "output_index": 0, "content_index": 0, "delta": piece.text,
                    "logprobs": making.logprobs[told..],
                });
                told = making.logprobs.len();
                yield ("response.output_text.delta", delta);
            }
            let Some(reason) = piece.end else { continue };
            if begun {
                let text = json!({
                    "item_id": id, "output_index": 0, "content_index": 0, "text": making.text, "logprobs": making.logprobs,
                });
                yield ("response.output_text.done", text);
                let at = json!({"item_id": id, "output_index": 0, "content_index": 0, "part": making.part()});
                yield ("response.content_part.done", at);
                let item = &making.output(reason)[0];
                yield ("response.output_item.done", json!({"output_index": 0, "item": item}));
            }
            if let Some(last) = making.calls.last() {
                for event in call_done(making.calls.len() - 1, last) {
                    yield event;
                }
            }
            let response = making.finish(reason, &piece.timings);
            yield (ended_as(reason), json!({"response": response}));
        }
    }
}

/// The events behind the last piece of a call.
fn call_done(at: usize, call: &Calling) -> [Told; 2] {
    let Calling { name, arguments, .. } = call;
    let item = function_call(call, call.status(), arguments);
    [
        (
            "response.function_call_arguments.done",
            json!({"item_id": call.item_id(), "output_index": at, "name": name, "arguments": arguments}),
        ),
        ("response.output_item.done", json!({"output_index": at, "item": item})),
    ]
}
