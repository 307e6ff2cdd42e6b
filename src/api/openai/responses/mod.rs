//! `/v1/responses`: OpenAI's second wire format, JSON or a stream of numbered events, and stored responses.
//!
//! A response's output is one message of one text, or function calls. Stored responses are in memory ([`store`]), until
//! the server ends.

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
use axum::response::{IntoResponse, Response, sse};
use futures::stream;
use serde_json::Value;
use utoipa::IntoParams;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::exchange::{self, Client, Format, Head, Parsed, Prompts, Reply, json_text, named_event};
use crate::api::ids::unix_time_s;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::responses::items::PageQuery;
use crate::api::openai::responses::object::{
    DeletedResponse, ErrorCode, IncompleteDetails, IncompleteReason, ItemList, ItemStatus, NumberedEvent,
    ObjectName, OutputItem, OutputPart, RepeatedRequest, ResponseError, ResponseEvent, ResponseObject,
    ResponseStatus, ResponsesUsage, item_id as item_id_of,
};
use crate::api::openai::responses::request::{Form, ResponsesRequest};
use crate::api::openai::responses::store::Stored;
use crate::api::openapi::{BodyErrors, StoredErrors, post_route};
use crate::api::server::Server;
use crate::api::tools::PartialCall;
use crate::api::wire::reply::Assistant;
use crate::api::wire::short;
use crate::api::wire::union::Events;
use crate::engine::{ClientId, Timings};
use crate::session::{Delta, GenerateRequest, Reason, Service};
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

post_route! {
    /// Answers an input, or continues an earlier response.
    "/v1/responses", "createResponse", "OpenAI",
    ResponsesRequest => ResponseObject | ResponseEvents, BodyErrors,
    create by ResponseFormat
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
        (status = 400, description = "The id is not valid UTF-8, or a stream is requested.", body = ErrorBody),
        StoredErrors,
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
            let problem = "this server stores responses, and not their events; omit it";
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
        StoredErrors,
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

/// Refuses to cancel a response, because no response is made in the background.
#[utoipa::path(
    post,
    path = "/v1/responses/{id}/cancel",
    operation_id = "cancelResponse",
    tag = "OpenAI",
    params(("id" = String, Path)),
    responses(
        (status = 400, description = "The response is not made in the background.", body = ErrorBody),
        StoredErrors,
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
        (status = 503, description = "The server is too busy to read the items.", body = ErrorBody),
        StoredErrors,
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
    // A stored conversation may be as large as a body, so reading it needs the same permits.
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

/// The parts of a response object that do not depend on its answer.
#[derive(Clone)]
struct ResponseBase {
    head: Head,
    repeated: RepeatedRequest,
}

impl ResponseBase {
    fn object(self, status: ResponseStatus, output: Vec<OutputItem>) -> ResponseObject {
        ResponseObject {
            id: self.head.id,
            object: ObjectName::Response,
            created_at: self.head.created,
            completed_at: None,
            status,
            error: None,
            incomplete_details: None,
            model: self.head.model,
            output,
            usage: None,
            request: self.repeated,
        }
    }

    /// The last event of a stream that an error ended.
    fn failed(self, error: &ApiError) -> ResponseEvent {
        let mut response = self.object(ResponseStatus::Failed, Vec::new());
        response.error = Some(ResponseError { code: ErrorCode::ServerError, message: error.to_string() });
        response.request.store = false;
        ResponseEvent::Failed { response }
    }
}

/// Writes a response. A stream has the response as it begins, its message or its calls piece by piece and then complete,
/// and the response as it ended.
struct ResponseFormat {
    form: Form,
    /// The text and the calls until now; one of them stays empty.
    text: String,
    calls: Vec<PartialCall>,
    logprobs: Vec<TokenLogprob>,
    /// Whether the message has begun, and how many of its log probabilities were sent. If tools may be called, some
    /// tokens come before it is known whether they are text or a call.
    begun: bool,
    sent: usize,
}

impl ResponseFormat {
    fn base(&self, reply: &Reply) -> ResponseBase {
        ResponseBase { head: reply.head.clone(), repeated: self.form.repeated.clone() }
    }

    fn message(&self, reply: &Reply, status: ItemStatus, content: Vec<OutputPart>) -> OutputItem {
        OutputItem::Message { id: message_id(reply), status, role: Assistant::Assistant, content }
    }

    fn part(&self) -> OutputPart {
        OutputPart::text(&self.text, &self.logprobs)
    }

    /// The message at its end.
    fn whole_message(&self, reply: &Reply, reason: Reason) -> OutputItem {
        let status = match reason {
            Reason::Stop | Reason::Called => ItemStatus::Completed,
            Reason::Length => ItemStatus::Incomplete,
        };
        self.message(reply, status, vec![self.part()])
    }

    /// The response at its end. From here on it is stored, if the request asks for that. Its output is calls, which have no
    /// field for log probabilities, or a message.
    fn finish(&mut self, reply: &Reply, reason: Reason, timings: &Timings) -> ResponseObject {
        let output = match self.calls.is_empty() {
            true => vec![self.whole_message(reply, reason)],
            false => self.calls.iter().map(OutputItem::from_call).collect(),
        };
        let mut object = self.base(reply).object(ResponseStatus::Completed, output);
        match reason {
            Reason::Stop | Reason::Called => object.completed_at = Some(unix_time_s()),
            Reason::Length => {
                object.status = ResponseStatus::Incomplete;
                let reason = IncompleteReason::MaxOutputTokens;
                object.incomplete_details = Some(IncompleteDetails { reason });
            }
        }
        object.usage = Some(ResponsesUsage::new(timings));
        if self.form.store {
            let input = Value::Array(std::mem::take(&mut self.form.items)).to_string().into();
            let stored = Stored { owner: self.form.owner, body: json_text(&object).into(), input };
            if !self.form.server.responses.insert(object.id.clone(), stored) {
                tracing::debug!("a response was not stored: it exceeds its owner's share of the store");
                object.request.store = false;
            }
        }
        object
    }

    /// Adds the log probabilities of a delta.
    fn add_logprobs(&mut self, reply: &Reply, delta: &Delta) {
        let token = |(id, logprobs): &(u32, _)| TokenLogprob::new(&reply.service, *id, logprobs);
        self.logprobs.extend(delta.logprobs.iter().map(token));
    }
}

fn message_id(reply: &Reply) -> String {
    reply.head.id.replacen(ID_PREFIX, "msg_", 1)
}

impl Format for ResponseFormat {
    const ID_PREFIX: &'static str = ID_PREFIX;
    const PROMPT: &'static str = "input";
    type Form = Form;
    type Whole = ResponseObject;
    type Event = ResponseEvent;

    fn parse(server: &Arc<Server>, owner: ClientId, body: &[u8]) -> Result<Parsed<Form>, ApiError> {
        request::parse(server, owner, body)
    }

    fn prepare(
        mut form: Form,
        service: &Service,
        request: &GenerateRequest,
    ) -> Result<(Prompts, Self), ApiError> {
        let prepared = service.prepare(request)?;
        form.repeated.use_sampling(&prepared.0.sampling);
        form.store &= form.server.responses.is_open();
        form.repeated.store = form.store;
        let (text, calls, logprobs) = (String::new(), Vec::new(), Vec::new());
        Ok((vec![prepared], Self { form, text, calls, logprobs, begun: false, sent: 0 }))
    }

    fn whole(
        mut self,
        reply: &Reply,
        answers: Vec<Delta>,
        timings: &Timings,
    ) -> Result<ResponseObject, ApiError> {
        for answer in answers {
            self.add_logprobs(reply, &answer);
            (self.text, self.calls) = (answer.text, PartialCall::all(answer.calls));
            if let Some(reason) = answer.end {
                return Ok(self.finish(reply, reason, timings));
            }
        }
        Err(ApiError::Bug("an answer had no end".into()))
    }

    fn begin(&mut self, reply: &Reply) -> Vec<ResponseEvent> {
        let response = self.base(reply).object(ResponseStatus::InProgress, Vec::new());
        vec![ResponseEvent::Created { response: response.clone() }, ResponseEvent::InProgress { response }]
    }

    fn add(
        &mut self,
        reply: &Reply,
        delta: Delta,
        all: Option<&Timings>,
    ) -> Result<Vec<ResponseEvent>, ApiError> {
        let mut events = Vec::new();
        self.add_logprobs(reply, &delta);
        self.text.push_str(&delta.text);
        for call in delta.calls {
            let (output_index, more) = match &call {
                CallPiece::Name { index, .. } => (*index, None),
                CallPiece::Parameters { index, json } => (*index, Some(json.clone())),
            };
            if more.is_none()
                && let Some(before) = self.calls.last()
            {
                events.extend(call_done(output_index - 1, before));
            }
            PartialCall::push(&mut self.calls, call);
            let call = &self.calls[output_index];
            events.push(match more {
                None => ResponseEvent::ItemAdded { output_index, item: OutputItem::from_begun_call(call) },
                Some(delta) => {
                    ResponseEvent::ArgumentsDelta { item_id: item_id_of(call), output_index, delta }
                }
            });
        }
        let (item_id, output_index, content_index) = (message_id(reply), 0, 0);
        if !self.begun && (!delta.text.is_empty() || (delta.end.is_some() && self.calls.is_empty())) {
            self.begun = true;
            let item = self.message(reply, ItemStatus::InProgress, Vec::new());
            events.push(ResponseEvent::ItemAdded { output_index, item });
            let (item_id, part) = (item_id.clone(), OutputPart::text("", &[]));
            events.push(ResponseEvent::PartAdded { item_id, output_index, content_index, part });
        }
        if self.begun && (!delta.text.is_empty() || self.sent < self.logprobs.len()) {
            let (item_id, delta) = (item_id.clone(), delta.text);
            let logprobs = self.logprobs[self.sent..].to_vec();
            self.sent = self.logprobs.len();
            events.push(ResponseEvent::TextDelta { item_id, output_index, content_index, delta, logprobs });
        }
        let (Some(reason), Some(timings)) = (delta.end, all) else { return Ok(events) };
        if self.begun {
            let (text, logprobs) = (self.text.clone(), self.logprobs.clone());
            events.push(ResponseEvent::TextDone {
                item_id: item_id.clone(),
                output_index,
                content_index,
                text,
                logprobs,
            });
            events.push(ResponseEvent::PartDone { item_id, output_index, content_index, part: self.part() });
            events.push(ResponseEvent::ItemDone { output_index, item: self.whole_message(reply, reason) });
        }
        if let Some(last) = self.calls.last() {
            events.extend(call_done(self.calls.len() - 1, last));
        }
        let response = self.finish(reply, reason, timings);
        events.push(ResponseEvent::ended(reason, response));
        Ok(events)
    }

    fn on_error(&self, reply: &Reply) -> impl FnOnce(&ApiError) -> Vec<ResponseEvent> + Send + 'static {
        let base = self.base(reply);
        |error: &ApiError| vec![base.failed(error)]
    }

    fn sent(event: ResponseEvent, number: u64) -> sse::Event {
        named_event(&NumberedEvent { event, sequence_number: number })
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
