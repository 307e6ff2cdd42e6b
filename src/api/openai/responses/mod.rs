//! `/v1/responses`: OpenAI's second wire format, JSON or a stream of numbered events, and stored responses.
//!
//! A response's output is what the model thought, if it did, and one message of one text, or function calls. Stored responses are in memory ([`store`]), until
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
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use utoipa::IntoParams;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::exchange::{
    self, Client, Failed, Format, Head, Parsed, Prompts, Reply, json_text, named_event,
};
use crate::api::ids::unix_time_s;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::responses::items::PageQuery;
use crate::api::openai::responses::object::{
    DeletedResponse, IncompleteDetails, IncompleteReason, ItemList, ItemStatus, NumberedEvent, ObjectName,
    OutputItem, OutputPart, ReasoningPart, RepeatedRequest, ResponseError, ResponseEvent, ResponseObject,
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
        response.error = Some(ResponseError::new(error));
        response.request.store = false;
        ResponseEvent::Failed { response }
    }
}

/// Writes a response. A stream has the response as it begins, its items piece by piece and then complete, and the response
/// as it ended.
struct ResponseFormat {
    form: Form,
    /// The items of the output until now. The last one is open.
    items: Vec<Item>,
    /// Log probabilities of tokens whose text has not come: if tools may be called, some tokens come before it is known
    /// whether they are text or a call.
    logprobs: Vec<TokenLogprob>,
}

/// An item of the output.
enum Item {
    Thought { id: String, text: String },
    Message { id: String, text: String, logprobs: Vec<TokenLogprob> },
    Call(PartialCall),
}

impl Item {
    /// The item with this status, which calls have themselves.
    fn output(&self, status: ItemStatus) -> OutputItem {
        match self {
            Self::Thought { id, text } => {
                let content = vec![ReasoningPart::ReasoningText { text: text.clone() }];
                OutputItem::Reasoning { id: id.clone(), status, summary: Vec::new(), content }
            }
            Self::Message { id, text, logprobs } => {
                let content = vec![OutputPart::text(text, logprobs)];
                OutputItem::Message { id: id.clone(), status, role: Assistant::Assistant, content }
            }
            Self::Call(call) => OutputItem::from_call(call),
        }
    }

    /// The events that begin the item.
    fn begun(&self, output_index: usize) -> Vec<ResponseEvent> {
        let status = ItemStatus::InProgress;
        let added = |item| ResponseEvent::ItemAdded { output_index, item };
        match self {
            Self::Thought { id, .. } => {
                let (summary, content) = (Vec::new(), Vec::new());
                vec![added(OutputItem::Reasoning { id: id.clone(), status, summary, content })]
            }
            Self::Message { id, .. } => {
                let (item_id, part) = (id.clone(), OutputPart::text("", &[]));
                let (role, content) = (Assistant::Assistant, Vec::new());
                vec![
                    added(OutputItem::Message { id: id.clone(), status, role, content }),
                    ResponseEvent::PartAdded { item_id, output_index, content_index: 0, part },
                ]
            }
            Self::Call(call) => vec![added(OutputItem::from_begun_call(call))],
        }
    }

    /// The events after the last piece of the item.
    fn done(&self, output_index: usize, status: ItemStatus) -> Vec<ResponseEvent> {
        let content_index = 0;
        let mut events = match self {
            Self::Thought { id, text } => {
                let (item_id, text) = (id.clone(), text.clone());
                vec![ResponseEvent::ReasoningDone { item_id, output_index, content_index, text }]
            }
            Self::Message { id, text, logprobs } => {
                let (item_id, part) = (id.clone(), OutputPart::text(text, logprobs));
                let (text, logprobs) = (text.clone(), logprobs.clone());
                vec![
                    ResponseEvent::TextDone {
                        item_id: item_id.clone(),
                        output_index,
                        content_index,
                        text,
                        logprobs,
                    },
                    ResponseEvent::PartDone { item_id, output_index, content_index, part },
                ]
            }
            Self::Call(call) => {
                let (name, arguments) = (call.name.clone(), call.arguments.clone());
                vec![ResponseEvent::ArgumentsDone {
                    item_id: item_id_of(call),
                    output_index,
                    name,
                    arguments,
                }]
            }
        };
        events.push(ResponseEvent::ItemDone { output_index, item: self.output(status) });
        events
    }
}

/// The status of the last item of an answer that ended.
fn last_status(reason: Reason) -> ItemStatus {
    match reason {
        Reason::Stop | Reason::Called => ItemStatus::Completed,
        Reason::Length => ItemStatus::Incomplete,
    }
}

impl ResponseFormat {
    fn base(&self, reply: &Reply) -> ResponseBase {
        ResponseBase { head: reply.head.clone(), repeated: self.form.repeated.clone() }
    }

    /// The id of the item that comes next. An answer has rarely more than one item of a kind.
    fn next_id(&self, reply: &Reply, prefix: &str, is_same: fn(&Item) -> bool) -> String {
        let id = reply.head.id.replacen(ID_PREFIX, prefix, 1);
        match self.items.iter().filter(|item| is_same(item)).count() {
            0 => id,
            n => format!("{id}{n}"),
        }
    }

    /// Begins an item, after the end of the one before.
    fn begin_item(&mut self, item: Item) -> Vec<ResponseEvent> {
        let index = self.items.len();
        let mut events = match self.items.last() {
            Some(before) => before.done(index - 1, ItemStatus::Completed),
            None => Vec::new(),
        };
        events.extend(item.begun(index));
        self.items.push(item);
        events
    }

    /// Adds a piece of a thought.
    fn think(&mut self, reply: &Reply, delta: String) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if !matches!(self.items.last(), Some(Item::Thought { .. })) {
            let id = self.next_id(reply, "rs_", |item| matches!(item, Item::Thought { .. }));
            events = self.begin_item(Item::Thought { id, text: String::new() });
        }
        let output_index = self.items.len() - 1;
        if let Some(Item::Thought { id, text }) = self.items.last_mut() {
            text.push_str(&delta);
            let item_id = id.clone();
            events.push(ResponseEvent::ReasoningDelta { item_id, output_index, content_index: 0, delta });
        }
        events
    }

    /// Adds a piece of text, which may be empty, with the log probabilities that have come.
    fn say(&mut self, reply: &Reply, delta: String) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if !matches!(self.items.last(), Some(Item::Message { .. })) {
            let id = self.next_id(reply, "msg_", |item| matches!(item, Item::Message { .. }));
            events = self.begin_item(Item::Message { id, text: String::new(), logprobs: Vec::new() });
        }
        let (output_index, new) = (self.items.len() - 1, std::mem::take(&mut self.logprobs));
        if let Some(Item::Message { id, text, logprobs }) = self.items.last_mut()
            && !(delta.is_empty() && new.is_empty())
        {
            text.push_str(&delta);
            logprobs.extend(new.iter().cloned());
            let (item_id, content_index) = (id.clone(), 0);
            events.push(ResponseEvent::TextDelta {
                item_id,
                output_index,
                content_index,
                delta,
                logprobs: new,
            });
        }
        events
    }

    /// Adds a piece of a call.
    fn call(&mut self, piece: CallPiece) -> Vec<ResponseEvent> {
        match piece {
            CallPiece::Name { name, .. } => self.begin_item(Item::Call(PartialCall::new(name))),
            CallPiece::Parameters { json, .. } => {
                let output_index = self.items.len() - 1;
                let Some(Item::Call(call)) = self.items.last_mut() else { return Vec::new() };
                call.arguments.push_str(&json);
                let item_id = item_id_of(call);
                vec![ResponseEvent::ArgumentsDelta { item_id, output_index, delta: json }]
            }
        }
    }

    /// Adds what a delta brings. An answer that ends without text and calls has an empty message.
    fn take(&mut self, reply: &Reply, delta: &mut Delta) -> Vec<ResponseEvent> {
        self.logprobs.extend(TokenLogprob::of(delta, &reply.service));
        let mut events = Vec::new();
        if !delta.thought.is_empty() {
            events.extend(self.think(reply, std::mem::take(&mut delta.thought)));
        }
        if !delta.text.is_empty() {
            events.extend(self.say(reply, std::mem::take(&mut delta.text)));
        }
        for piece in std::mem::take(&mut delta.calls) {
            events.extend(self.call(piece));
        }
        let lacks_message = match (self.items.last(), delta.end) {
            (Some(Item::Message { .. }), _) => !self.logprobs.is_empty(),
            (Some(Item::Call(_)), _) | (_, None) => false,
            // The limit of tokens ended the answer within its thought.
            (Some(Item::Thought { .. }), Some(Reason::Length)) => false,
            (Some(Item::Thought { .. }) | None, Some(_)) => true,
        };
        if lacks_message {
            events.extend(self.say(reply, String::new()));
        }
        events
    }

    /// The response at its end. From here on it is stored, if the request asks for that.
    fn finish(&mut self, reply: &Reply, reason: Reason, timings: &Timings) -> ResponseObject {
        let last = self.items.len() - 1;
        let status = |i: usize| if i == last { last_status(reason) } else { ItemStatus::Completed };
        let output = self.items.iter().enumerate().map(|(i, item)| item.output(status(i))).collect();
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
            let (owner, input) = (self.form.owner, std::mem::take(&mut self.form.input));
            let stored = Stored { owner, body: json_text(&object).into(), input };
            if !self.form.server.responses.insert(object.id.clone(), stored) {
                tracing::debug!("a response was not stored: it exceeds its owner's share of the store");
                object.request.store = false;
            }
        }
        object
    }
}

impl Format for ResponseFormat {
    const ID_PREFIX: &'static str = ID_PREFIX;
    const PROMPT: &'static str = "input";
    const HAS_COMMENTS: bool = true;
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
        form.repeated.use_sampling(&prepared.engine.sampling);
        Ok((vec![prepared], Self { form, items: Vec::new(), logprobs: Vec::new() }))
    }

    fn whole(
        mut self,
        reply: &Reply,
        answers: Vec<Delta>,
        timings: &Timings,
    ) -> Result<ResponseObject, ApiError> {
        for mut answer in answers {
            self.take(reply, &mut answer);
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
        let mut delta = delta;
        let mut events = self.take(reply, &mut delta);
        let (Some(reason), Some(timings)) = (delta.end, all) else { return Ok(events) };
        if let Some(last) = self.items.last() {
            events.extend(last.done(self.items.len() - 1, last_status(reason)));
        }
        let response = self.finish(reply, reason, timings);
        events.push(ResponseEvent::ended(reason, response));
        Ok(events)
    }

    /// OpenAI sends an event `keepalive`, which several clients do not know.
    fn waiting(&self, reply: &Reply) -> Option<ResponseEvent> {
        let response = self.base(reply).object(ResponseStatus::InProgress, Vec::new());
        Some(ResponseEvent::InProgress { response })
    }

    fn on_error(form: &Form, head: Head) -> Failed<Self> {
        let base = ResponseBase { head, repeated: form.repeated.clone() };
        Box::new(|error: &ApiError| vec![base.failed(error)])
    }

    fn send(
        server: &Server,
        comments: impl Stream<Item = String> + Send + 'static,
        events: impl Stream<Item = ResponseEvent> + Send + 'static,
    ) -> Response {
        let numbered =
            |(number, event)| named_event(&NumberedEvent { event, sequence_number: number as u64 });
        exchange::server_sent(server, comments, events.enumerate().map(numbered))
    }
}
