//! `/openapi.json`: the API as a document, in OpenAPI 3.1.
//!
//! Its routes are those of the router, by construction ([`super::routes`]): a handler's attribute says path, method and what is
//! answered, and both are made of that. Answers are described by the types that are written, or, as bodies are, by hand in
//! `bodies`, `anthropic` and `responses`, with the constants that bodies are checked against. A body that the document calls invalid is refused. One that it
//! calls valid is answered, or refused for a reason that no schema can say. The page's files are no part of it.
//!
//! It needs a key where everything needs one: what a server can do is told to those who may ask it.

mod anthropic;
mod bodies;
mod responses;
mod schema;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{
    Components, ComponentsBuilder, ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr,
};
use utoipa::{IntoResponses, ToSchema};

pub(super) use self::anthropic::{
    AnthropicError, CountTokensRequest, Message, MessageEvent, MessagesRequest, TokenCount,
};
pub(super) use self::bodies::{
    ChatCompletionRequest, CompletionRequest, DetokenizeRequest, EmbeddingsRequest, NamedModel,
    TokenizeRequest,
};
pub(super) use self::responses::{
    DeletedResponse, ItemList, OfAKeptResponse, OfItems, ResponseEvent, ResponseObject, ResponsesRequest,
};
use self::schema::{any_of, described, named};
use super::Server;
use super::chat::ChatCompletionChunk;
use super::completions::Completion;
use super::error::ErrorBody;
use super::tokens::{PromptTokens, TokenIds, TokenPieces};

/// The document without its routes.
pub(super) fn head() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Unicorn Execution Engine")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(env!("CARGO_PKG_DESCRIPTION")));
    let mut components = ComponentsBuilder::new();
    for (name, schema) in schemas_of::<ErrorBody>().into_iter().chain(schemas_of::<AnthropicError>()) {
        components = components.schema(name, schema);
    }
    OpenApiBuilder::new().info(info.build()).components(Some(components.build())).build()
}

/// The document as JSON; `document` has the routes, and `keyed` is whether the server asks for a key.
fn written(keyed: bool, mut document: OpenApi) -> String {
    // A parameter that takes the rest of a path is one like any other here.
    let paths = std::mem::take(&mut document.paths.paths);
    document.paths.paths = paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
    if keyed {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let header = ApiKey::Header(ApiKeyValue::new("x-api-key"));
        let schemes =
            [("bearer", SecurityScheme::Http(bearer)), ("x-api-key", SecurityScheme::ApiKey(header))];
        let components = document.components.get_or_insert_with(Components::new);
        components.security_schemes =
            schemes.map(|(name, scheme)| (name.to_owned(), scheme.into())).into_iter().collect();
        let either = ["bearer", "x-api-key"].map(|name| SecurityRequirement::new(name, [""; 0]));
        document.security = Some(either.to_vec());
    }
    serde_json::to_string_pretty(&document).expect("a document has strings for names")
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "getDocument",
    tag = "server",
    responses((status = 200, description = "An OpenAPI document.", body = inline(Document)), AtTheDoor),
)]
pub(super) async fn document(State(server): State<Arc<Server>>) -> Response {
    let keyed = !server.door().keys.is_empty();
    let document = &server.documents[usize::from(keyed)];
    let text = document.get_or_init(|| written(keyed, super::routes().into_openapi()));
    ([(header::CONTENT_TYPE, "application/json")], text.clone()).into_response()
}

described! {
    Document [] => schema::Shape::new("").needs("openapi", schema::word(&["3.1.0"], "")).build();
    // With no tokens, two of them are the same.
    Tokens [TokenIds, TokenPieces, PromptTokens] =>
        any_of([named::<TokenIds>(), named::<TokenPieces>(), named::<PromptTokens>()], "");
    ChatEvents [ChatCompletionChunk] => events::<ChatCompletionChunk>();
    CompletionEvents [Completion] => events::<Completion>();
    MessageEvents [MessageEvent] => events::<MessageEvent>();
    ResponseEvents [ResponseEvent] => events::<ResponseEvent>();
}

/// A stream of events, each with a `T` as its data. OpenAPI 3.1 has no words for that: some take the schema for that of the
/// text, others for that of each event, so it says of neither what it is.
fn events<T: ToSchema>() -> Schema {
    let name = T::name();
    let about = format!(
        "Server-sent events. The data of each is a `{name}`; comments between them keep the connection. What goes wrong \
         after the first is an event with the error."
    );
    let data = json!({"$ref": format!("#/components/schemas/{name}")});
    let events = ObjectBuilder::new().schema_type(SchemaType::AnyValue).description(Some(about));
    events.extensions(Some(Extensions::builder().add("x-event-data", data).build())).build().into()
}

/// A type's schema, and those it refers to, by name.
fn schemas_of<T: ToSchema>() -> Vec<(String, RefOr<Schema>)> {
    let mut schemas = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut schemas);
    schemas
}

type Refusals = BTreeMap<String, RefOr<utoipa::openapi::Response>>;

/// Each with an `E` as its body.
fn refusals<E: ToSchema, const N: usize>(statuses: [(u16, &str); N]) -> Refusals {
    let refusal = |(status, about): (u16, &str)| {
        let body = ContentBuilder::new().schema(Some(Ref::from_schema_name(E::name()))).build();
        let mut response = ResponseBuilder::new().description(about).content("application/json", body);
        if matches!(status, 429 | 503 | 529) {
            let seconds =
                HeaderBuilder::new().schema(Some(ObjectBuilder::new().schema_type(Type::Integer))).build();
            response = response.header(header::RETRY_AFTER.as_str(), seconds);
        }
        (status.to_string(), response.build().into())
    };
    statuses.into_iter().map(refusal).collect()
}

/// What any route but `/health` may answer: that who asks may not, or that the server met a bug.
pub(super) enum AtTheDoor {}

impl IntoResponses for AtTheDoor {
    fn responses() -> Refusals {
        at_the_door::<ErrorBody>()
    }
}

fn at_the_door<E: ToSchema>() -> Refusals {
    refusals::<E, _>([
        (401, "An API key is asked for, and none of this server's came."),
        (403, "The server does not go by that name, or the page may not use it."),
        (500, "The server failed."),
    ])
}

/// What may go wrong with a request that has a body, in OpenAI's words.
pub(super) enum OfABody {}

impl IntoResponses for OfABody {
    fn responses() -> Refusals {
        of_a_body::<ErrorBody>()
    }
}

/// The same in Anthropic's words.
pub(super) enum OfAMessage {}

impl IntoResponses for OfAMessage {
    fn responses() -> Refusals {
        let mut all = of_a_body::<AnthropicError>();
        all.extend(refusals::<AnthropicError, _>([
            (429, "Too much of this client is under way."),
            (529, "The queue is full."),
        ]));
        all
    }
}

fn of_a_body<E: ToSchema>() -> Refusals {
    let mut all = at_the_door::<E>();
    all.extend(refusals::<E, _>([
        (400, "The body is not what it has to be, or more than there is room for; `param` names the field."),
        (404, "The model is not served."),
        (408, "The body did not come."),
        (413, "The body is too large."),
        (429, "The queue is full, or too much of this client is under way."),
        (503, "The model is loading, or the server is too busy to read it or to go on, or ends, or its device is lost."),
        (504, "The answer took longer than it may."),
    ]));
    all
}
