//! `/v1/responses`: OpenAI's second wire format, JSON or a stream of numbered events, and stored responses.
//!
//! A response's output is one message of one text, or function calls. Stored responses lie in memory ([`store`]), and
//! are gone when the server ends.

pub(in crate::api) mod items;
pub(in crate::api) mod object;
pub(in crate::api) mod request;
pub(in crate::api) mod store;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::{Stream, stream};
use serde_json::Value;
use utoipa::IntoParams;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::exchange::{self, Answers, Caller, Client, Exchange, Piece, Reply, json_text, named_event};
use crate::api::ids::unix_time_s;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::responses::items::PageQuery;
use crate::api::openai::responses::object::{
    Assistant, DeletedResponse, ErrorCode, IncompleteDetails, IncompleteReason, ItemList, ItemStatus,
    NumberedEvent, ObjectName, OutputItem, OutputPart, RepeatedRequest, ResponseError, ResponseEvent,
    ResponseObject, ResponseStatus, ResponsesUsage, item_id as item_id_of,
};
use crate::api::openai::responses::request::{Form, ResponsesRequest};
use crate::api::openai::responses::store::Stored;
use crate::api::openapi::{AuthErrors, BodyErrors};
use crate::api::server::Server;
use crate::api::tools::PartialCall;
use crate::api::wire::short;
use crate::api::wire::union::Events;
use crate::engine::{ClientId, Timings};
use crate::session::Reason;
use crate::text::CallPiece;

const ID_PREFIX: &str = "resp_";

type ResponseEvents = Events<NumberedEvent>;

/// Parameters of a request for a stored response.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "parameters are read one by one: this describes them")]
struct StreamQuery {
    /// Not supported.
    stream: Option<bool>,
}

/// Answers an input, or continues an earlier response.
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
    let owner = caller.id();
    let parse = request::parse_for(&server, owner);
    let exchange = exchange::ask(
        &server,
        caller,
        body,
        ID_PREFIX,
        "input",
        parse,
        |service, request, form: &mut Form| {
            let prepared = service.prepare(request)?;
            form.repeated.use_sampling(&prepared.0.sampling);
            Ok(vec![prepared])
        },
    );
    let Exchange { wire: form, reply, answers } = exchange.await?;
    let stream = form.stream;
    let builder = ResponseBuilder::new(Arc::clone(&server), owner, form, reply);
    if stream {
        let base = Arc::clone(&builder.base);
        let failed = move |error: &ApiError| vec![base.failed(error)];
        let mut number = 0;
        Ok(exchange::stream(&server, events(builder, answers), failed, move |event| {
            let numbered = NumberedEvent { event, sequence_number: number };
            number += 1;
            named_event(&numbered)
        }))
    } else {
        collect(builder, answers).await.map(|body| Json(body).into_response())
    }
}

/// Returns a stored response.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}",
    operation_id = "getResponse",
    tag = "OpenAI",
    params(("id" = String, Path), StreamQuery),
    responses(
        (status = 200, description = "The response.", body = ResponseObject),
        (status = 400, description = "The id is not valid UTF-8, or a stream is asked for.", body = ErrorBody),
        (status = 404, description = "No response with this id is stored for this client.", body = ErrorBody),
        (status = 429, description = "Too many requests of this client are under way.", body = ErrorBody),
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

/// Deletes a stored response.
#[utoipa::path(
    delete,
    path = "/v1/responses/{id}",
    operation_id = "deleteResponse",
    tag = "OpenAI",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "The response is deleted.", body = DeletedResponse),
        (status = 400, description = "The id is not valid UTF-8.", body = ErrorBody),
        (status = 404, description = "No response with this id is stored for this client.", body = ErrorBody),
        (status = 429, description = "Too many requests of this client are under way.", body = ErrorBody),
        AuthErrors,
    ),
)]
pub(in crate::api) async fn delete(
    State(server): State<Arc<Server>>,
    client: Client,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<DeletedResponse>, ApiError> {
    let id = response_id(id)?;
    if !server.responses.remove(&id, client.id) {
        return Err(ApiError::UnknownResponse(short(&id)));
    }
    Ok(Json(DeletedResponse { id, object: ObjectName::Response, deleted: true }))
}

/// Refuses to cancel a response: none is made in the background.
#[utoipa::path(
    post,
    path = "/v1/responses/{id}/cancel",
    operation_id = "cancelResponse",
    tag = "OpenAI",
    params(("id" = String, Path)),
    responses(
        (status = 400, description = "The response is not made in the background.", body = ErrorBody),
        (status = 404, description = "No response with this id is stored for this client.", body = ErrorBody),
        (status = 429, description = "Too many requests of this client are under way.", body = ErrorBody),
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

/// Lists what a response answered: all of the conversation before it.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}/input_items",
    operation_id = "listInputItems",
    tag = "OpenAI",
    params(("id" = String, Path), PageQuery),
    responses(
        (status = 200, description = "A page of the items.", body = ItemList),
        (status = 400, description = "The id is not valid UTF-8, or a parameter is invalid.", body = ErrorBody),
        (status = 404, description = "No response with this id is stored for this client.", body = ErrorBody),
        (status = 429, description = "Too many requests of this client are under way.", body = ErrorBody),
        (status = 503, description = "The server is too busy to read the items.", body = ErrorBody),
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
    // A stored conversation may be as large as a body, so reading it waits for the same turns.
    let listed = exchange::process_body(&server, &client, Body::empty(), move |_, _| {
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

/// The parameters of a query, in order.
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

/// The parts of a response object that are known before its answer, and do not depend on it.
struct ResponseBase {
    reply: Reply,
    repeated: RepeatedRequest,
}

impl ResponseBase {
    fn object(&self, status: ResponseStatus, output: Vec<OutputItem>) -> ResponseObject {
        ResponseObject {
            id: self.reply.id.clone(),
            object: ObjectName::Response,
            created_at: self.reply.created,
            completed_at: None,
            status,
            error: None,
            incomplete_details: None,
            model: self.reply.model.clone(),
            output,
            usage: None,
            request: self.repeated.clone(),
        }
    }

    /// The last event of a stream that an error ended.
    fn failed(&self, error: &ApiError) -> ResponseEvent {
        let mut response = self.object(ResponseStatus::Failed, Vec::new());
        response.error = Some(ResponseError { code: ErrorCode::ServerError, message: error.to_string() });
        response.request.store = false;
        ResponseEvent::Failed { response }
    }
}

/// Builds a response from the pieces of its answer.
struct ResponseBuilder {
    server: Arc<Server>,
    owner: ClientId,
    /// The items of the conversation before the answer. `store` is whether they and the answer are stored.
    items: Vec<Value>,
    store: bool,
    base: Arc<ResponseBase>,
    /// The text and the calls so far; one of them stays empty.
    text: String,
    calls: Vec<PartialCall>,
    logprobs: Vec<TokenLogprob>,
}

impl ResponseBuilder {
    fn new(server: Arc<Server>, owner: ClientId, form: Form, reply: Reply) -> Self {
        let Form { store, items, mut repeated, .. } = form;
        let store = store && server.responses.is_open();
        repeated.store = store;
        let base = Arc::new(ResponseBase { reply, repeated });
        let (text, calls, logprobs) = (String::new(), Vec::new(), Vec::new());
        Self { server, owner, items, store, base, text, calls, logprobs }
    }

    fn message_id(&self) -> String {
        self.base.reply.id.replacen(ID_PREFIX, "msg_", 1)
    }

    fn message(&self, status: ItemStatus, content: Vec<OutputPart>) -> OutputItem {
        OutputItem::Message { id: self.message_id(), status, role: Assistant::Assistant, content }
    }

    fn part(&self) -> OutputPart {
        OutputPart::text(&self.text, &self.logprobs)
    }

    /// The message at its end.
    fn whole_message(&self, reason: Reason) -> OutputItem {
        let status = match reason {
            Reason::Stop | Reason::Called => ItemStatus::Completed,
            Reason::Length => ItemStatus::Incomplete,
        };
        self.message(status, vec![self.part()])
    }

    /// The output at its end: calls, which have no field for log probabilities, or a message.
    fn output(&self, reason: Reason) -> Vec<OutputItem> {
        if self.calls.is_empty() {
            return vec![self.whole_message(reason)];
        }
        self.calls.iter().map(OutputItem::from_call).collect()
    }

    /// The response at its end. It is stored from here on if the request asks for that.
    fn finish(&mut self, reason: Reason, timings: &Timings) -> ResponseObject {
        self.base.reply.log(reason, timings);
        let status = match reason {
            Reason::Stop | Reason::Called => ResponseStatus::Completed,
            Reason::Length => ResponseStatus::Incomplete,
        };
        let mut object = self.base.object(status, self.output(reason));
        match reason {
            Reason::Stop | Reason::Called => object.completed_at = Some(unix_time_s()),
            Reason::Length => {
                let reason = IncompleteReason::MaxOutputTokens;
                object.incomplete_details = Some(IncompleteDetails { reason });
            }
        }
        object.usage = Some(ResponsesUsage::new(timings));
        if self.store {
            let input = Value::Array(std::mem::take(&mut self.items)).to_string().into();
            let stored = Stored { owner: self.owner, body: json_text(&object).into(), input };
            if !self.server.responses.insert(self.base.reply.id.clone(), stored) {
                tracing::debug!("a response was not kept: it is larger than its owner's share of the room");
                object.request.store = false;
            }
        }
        object
    }
}

async fn collect(mut builder: ResponseBuilder, mut answers: Answers) -> Result<ResponseObject, ApiError> {
    while let Some(piece) = answers.next().await {
        let piece = piece.map_err(ApiError::while_collecting)?;
        builder.text.push_str(&piece.text);
        builder.logprobs.extend(logprob(&answers, &piece));
        for call in piece.calls {
            PartialCall::push(&mut builder.calls, call);
        }
        if let Some(reason) = piece.end {
            return Ok(builder.finish(reason, &piece.timings));
        }
    }
    Err(ApiError::Bug("an answer had no end".into()))
}

fn logprob(answers: &Answers, piece: &Piece) -> Option<TokenLogprob> {
    piece.logprobs.as_ref().map(|(id, logprobs)| TokenLogprob::new(&answers.service, *id, logprobs))
}

/// The events of a stream: the response as it begins, its message or its calls piece by piece and then whole, and the
/// response as it ended.
fn events(
    mut builder: ResponseBuilder,
    mut answers: Answers,
) -> impl Stream<Item = Result<ResponseEvent, ApiError>> {
    async_stream::try_stream! {
        let item_id = builder.message_id();
        let response = builder.base.object(ResponseStatus::InProgress, Vec::new());
        yield ResponseEvent::Created { response: response.clone() };
        yield ResponseEvent::InProgress { response };
        // Whether the message has begun, and how many of its log probabilities were sent. Where tools may be called,
        // some tokens come before it is known whether they are text or a call.
        let (mut begun, mut sent) = (false, 0);
        while let Some(piece) = answers.next().await {
            let mut piece = piece?;
            builder.text.push_str(&piece.text);
            builder.logprobs.extend(logprob(&answers, &piece));
            for call in std::mem::take(&mut piece.calls) {
                let (output_index, more) = match &call {
                    CallPiece::Name { index, .. } => (*index, None),
                    CallPiece::Parameters { index, json } => (*index, Some(json.clone())),
                };
                if more.is_none()
                    && let Some(before) = builder.calls.last()
                {
                    for event in call_done(output_index - 1, before) {
                        yield event;
                    }
                }
                PartialCall::push(&mut builder.calls, call);
                let call = &builder.calls[output_index];
                yield match more {
                    None => ResponseEvent::ItemAdded { output_index, item: OutputItem::from_begun_call(call) },
                    Some(delta) => {
                        ResponseEvent::ArgumentsDelta { item_id: item_id_of(call), output_index, delta }
                    }
                };
            }
            if !begun && (!piece.text.is_empty() || (piece.end.is_some() && builder.calls.is_empty())) {
                begun = true;
                let item = builder.message(ItemStatus::InProgress, Vec::new());
                yield ResponseEvent::ItemAdded { output_index: 0, item };
                let (item_id, part) = (item_id.clone(), OutputPart::text("", &[]));
                yield ResponseEvent::PartAdded { item_id, output_index: 0, content_index: 0, part };
            }
            if begun && (!piece.text.is_empty() || sent < builder.logprobs.len()) {
                let (item_id, delta) = (item_id.clone(), piece.text);
                let logprobs = builder.logprobs[sent..].to_vec();
                sent = builder.logprobs.len();
                yield ResponseEvent::TextDelta { item_id, output_index: 0, content_index: 0, delta, logprobs };
            }
            let Some(reason) = piece.end else { continue };
            if begun {
                let (text, logprobs) = (builder.text.clone(), builder.logprobs.clone());
                let (output_index, content_index) = (0, 0);
                yield ResponseEvent::TextDone {
                    item_id: item_id.clone(), output_index, content_index, text, logprobs,
                };
                let (item_id, part) = (item_id.clone(), builder.part());
                yield ResponseEvent::PartDone { item_id, output_index, content_index, part };
                yield ResponseEvent::ItemDone { output_index, item: builder.whole_message(reason) };
            }
            if let Some(last) = builder.calls.last() {
                for event in call_done(builder.calls.len() - 1, last) {
                    yield event;
                }
            }
            let response = builder.finish(reason, &piece.timings);
            yield ResponseEvent::ended(reason, response);
        }
    }
}

/// The events after the last piece of a call.
fn call_done(output_index: usize, call: &PartialCall) -> [ResponseEvent; 2] {
    let (name, arguments) = (call.name.clone(), call.arguments.clone());
    [
        ResponseEvent::ArgumentsDone { item_id: item_id_of(call), output_index, name, arguments },
        ResponseEvent::ItemDone { output_index, item: OutputItem::from_call(call) },
    ]
}
