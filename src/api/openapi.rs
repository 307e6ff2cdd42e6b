//! `/openapi.json`: the API as a document, in OpenAPI 3.1.
//!
//! The routes are the router's by construction: a handler's attribute has path, method and answers, and both the route and
//! its description are made of it. The types that are read and written describe bodies and answers. A body that is invalid
//! by the document is refused. A body that is valid by it is answered, or refused for a reason that no schema can express.
//! The page's files are not part of the document.
//!
//! If the server requires a key, the document requires it too, so only allowed clients learn what the server can do.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{
    Components, ComponentsBuilder, ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr,
};
use utoipa::{IntoResponses, ToSchema};

use crate::api::error::{AnthropicError, ErrorBody, OllamaError};
use crate::api::server::Server;

/// The document before its routes are added.
pub(in crate::api) fn head() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Unicorn Execution Engine")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(env!("CARGO_PKG_DESCRIPTION")));
    let mut components = ComponentsBuilder::new();
    let errors = [schemas_of::<ErrorBody>(), schemas_of::<AnthropicError>(), schemas_of::<OllamaError>()];
    for (name, schema) in errors.into_iter().flatten() {
        components = components.schema(name, schema);
    }
    OpenApiBuilder::new().info(info.build()).components(Some(components.build())).build()
}

/// The document as JSON. `document` has the routes; `keyed` is whether the server asks for a key.
fn written(keyed: bool, mut document: OpenApi) -> String {
    // OpenAPI writes a parameter that takes the rest of a path like any other.
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
    let mut document = serde_json::to_value(&document).expect("a document has strings for names");
    join_descriptions(&mut document);
    format!("{document:#}")
}

/// Moves a description into the schema that it describes. Where utoipa inlines a field's schema, it writes the field's
/// description as a second schema, which would require the value to be an object.
fn join_descriptions(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(join_descriptions);
            let Some(Value::Array(parts)) = map.get("allOf") else { return };
            let [Value::Object(schema), about] = parts.as_slice() else { return };
            let only_describes = about["type"] == "object" && about.as_object().is_some_and(|o| o.len() == 2);
            if let (true, description @ Value::String(_)) = (only_describes, &about["description"]) {
                let mut schema = schema.clone();
                schema.insert("description".into(), description.clone());
                *map = schema;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(join_descriptions),
        _ => {}
    }
}

/// Returns this document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "getDocument",
    tag = "server",
    responses((status = 200, description = "An OpenAPI document.", body = inline(Document)), AuthErrors),
)]
pub(in crate::api) async fn document(State(server): State<Arc<Server>>) -> Response {
    let keyed = !server.access().keys.is_empty();
    let text = server.document(keyed, |document| written(keyed, document));
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// An OpenAPI document, described by its one fixed field.
#[derive(ToSchema)]
#[allow(dead_code, reason = "the document is written by utoipa")]
struct Document {
    /// The version of OpenAPI: 3.1.0.
    openapi: String,
}

/// Declares the handler of a `POST` route with a JSON body, and its description. The parts are the path, the operation's id
/// and tag, the body's type, the description of the answer, the errors, and the handler.
macro_rules! post_route {
    (
        $(#[$about:meta])*
        $path:literal, $id:literal, $tag:literal, $request:ident => ($($answer:tt)*), $errors:ident,
        $handler:ident($server:ident, $caller:ident: $Caller:ident, $body:ident) -> $returned:ty $work:block
    ) => {
        $(#[$about])*
        #[utoipa::path(
            post,
            path = $path,
            operation_id = $id,
            tag = $tag,
            request_body = $request,
            responses((status = 200, $($answer)*), $errors),
        )]
        pub(in crate::api) async fn $handler(
            axum::extract::State($server): axum::extract::State<std::sync::Arc<$crate::api::server::Server>>,
            $caller: $crate::api::exchange::$Caller,
            $body: axum::body::Body,
        ) -> Result<$returned, $crate::api::error::ApiError> $work
    };
    // The route of an answer, which may be streamed.
    (
        $(#[$about:meta])*
        $path:literal, $id:literal, $tag:literal, $request:ident => $whole:ident | $events:ident, $errors:ident,
        $handler:ident by $format:ident
    ) => {
        $crate::api::openapi::post_route! {
            $(#[$about])*
            $path, $id, $tag, $request => $whole | $events as "text/event-stream", $errors, $handler by $format
        }
    };
    (
        $(#[$about:meta])*
        $path:literal, $id:literal, $tag:literal, $request:ident => $whole:ident | $events:ident as $kind:literal,
        $errors:ident, $handler:ident by $format:ident
    ) => {
        $crate::api::openapi::post_route! {
            $(#[$about])*
            $path, $id, $tag, $request => (
                description = "The answer, or with `stream` its pieces.",
                content(($whole = "application/json"), (inline($events) = $kind)),
            ), $errors,
            $handler(server, caller: Caller, body) -> axum::response::Response {
                $crate::api::exchange::answer::<$format>(&server, caller, body).await
            }
        }
    };
}
pub(in crate::api) use post_route;

/// The schema of a type, and the schemas that it refers to, by name.
fn schemas_of<T: ToSchema>() -> Vec<(String, RefOr<Schema>)> {
    let mut schemas = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut schemas);
    schemas
}

type Refusals = BTreeMap<String, RefOr<utoipa::openapi::Response>>;

/// Responses with these statuses and descriptions, each with an `E` as its body.
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

/// The errors of all routes except `/health` and `/live`: the client is not allowed, or an internal error.
pub(in crate::api) enum AuthErrors {}

impl IntoResponses for AuthErrors {
    fn responses() -> Refusals {
        auth_errors::<ErrorBody>()
    }
}

fn auth_errors<E: ToSchema>() -> Refusals {
    refusals::<E, _>([
        (401, "The server requires an API key, and the request has no valid one."),
        (403, "The server does not accept this `Host`, or this `Origin`."),
        (500, "The server failed."),
    ])
}

/// The errors of routes of a stored response.
pub(in crate::api) enum StoredErrors {}

impl IntoResponses for StoredErrors {
    fn responses() -> Refusals {
        let mut all = auth_errors::<ErrorBody>();
        all.extend(refusals::<ErrorBody, _>([
            (404, "No response with this id is stored for this client."),
            (429, "Too many requests of this client are in progress."),
        ]));
        all
    }
}

/// The errors of requests with a body, in OpenAI's form.
pub(in crate::api) enum BodyErrors {}

impl IntoResponses for BodyErrors {
    fn responses() -> Refusals {
        body_errors::<ErrorBody>()
    }
}

/// The errors of requests with a body, in Anthropic's form.
pub(in crate::api) enum AnthropicErrors {}

impl IntoResponses for AnthropicErrors {
    fn responses() -> Refusals {
        let mut all = body_errors::<AnthropicError>();
        all.extend(refusals::<AnthropicError, _>([
            (429, "Too many requests of this client are in progress."),
            (529, "The queue is full."),
        ]));
        all
    }
}

/// The errors of requests with a body, in Ollama's form.
pub(in crate::api) enum OllamaErrors {}

impl IntoResponses for OllamaErrors {
    fn responses() -> Refusals {
        body_errors::<OllamaError>()
    }
}

/// The errors of Ollama's routes that change the list of models.
pub(in crate::api) enum OllamaStoreErrors {}

impl IntoResponses for OllamaStoreErrors {
    fn responses() -> Refusals {
        let mut all = body_errors::<OllamaError>();
        all.extend(refusals::<OllamaError, _>([
            (409, "The model cannot be pulled or deleted now."),
            (502, "The hub refuses the download, or cannot be reached."),
        ]));
        all
    }
}

/// The errors of Ollama's routes without a body.
pub(in crate::api) enum OllamaAuthErrors {}

impl IntoResponses for OllamaAuthErrors {
    fn responses() -> Refusals {
        let mut all = auth_errors::<OllamaError>();
        all.extend(refusals::<OllamaError, _>([(503, "The model's files are not read yet.")]));
        all
    }
}

fn body_errors<E: ToSchema>() -> Refusals {
    let mut all = auth_errors::<E>();
    all.extend(refusals::<E, _>([
        (400, "The body is invalid, or does not fit the context; `param` names the field."),
        (404, "The model is not served."),
        (408, "The body did not arrive in time."),
        (413, "The body is too large."),
        (415, "The body is compressed."),
        (429, "The queue is full, or too many requests of this client are in progress."),
        (503, "The model is loading, the server is too busy or shutting down, or its device is lost."),
    ]));
    all
}
