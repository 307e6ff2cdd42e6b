//! Bodies of requests: JSON becomes the types of a wire format, and errors name the field by its path.
//!
//! Each wire type derives its reader and its description in the API's document. This module has what a derive cannot
//! express: numbers with bounds ([`bounded`]), words and unions ([`union`]). Three rules apply to every body:
//!
//! - A field that is null is absent.
//! - An unknown field is ignored.
//! - A whole number may be written with a fraction of zero (`40.0`).
//!
//! A type whose objects differ by a `type` or a `role` is one struct of optional fields, and its reader checks them.
//! serde's tagged enums would lose the path of an inner field.

pub(in crate::api) mod bounded;
pub(in crate::api) mod reply;
pub(in crate::api) mod union;

use std::fmt::Display;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::{Path, Segment};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

use crate::api::error::ApiError;

/// The most parts of a body's JSON, as [`parts`] counts them.
const MAX_PARTS: usize = 1 << 21;

/// An estimate of the memory that a body's values take, in units of some 64 bytes: a value is one part, and an object and
/// each of its members are four more. Without a bound, a body of many small values would take fifty times its own size.
fn parts(body: &[u8]) -> usize {
    let (mut parts, mut in_text, mut is_escaped) = (0, false, false);
    for byte in body {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b',' | b'[' => parts += 1,
            b'{' | b':' => parts += 4,
            _ => {}
        }
    }
    parts
}

/// Parses a body, which must be a JSON object. A byte order mark before it is ignored, as RFC 8259 allows: some clients
/// on Windows send it.
pub(in crate::api) fn object(body: &[u8]) -> Result<Value, ApiError> {
    const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    // No byte is more than four parts.
    if body.len() > MAX_PARTS / 4 && parts(body) > MAX_PARTS {
        return Err(ApiError::TooManyParts { limit: MAX_PARTS });
    }
    match serde_json::from_slice(body).map_err(|e| not_json(&e))? {
        fields @ Value::Object(_) => Ok(fields),
        other => Err(ApiError::NotAnObject(kind(&other))),
    }
}

/// Reads the fields that `T` knows from a value. Several types may each read some fields of one body.
pub(in crate::api) fn read<T: DeserializeOwned>(value: &Value) -> Result<T, ApiError> {
    read_at("", value)
}

/// Reads a value whose path in the body is `at`.
pub(in crate::api) fn read_at<T: DeserializeOwned>(at: &str, value: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| refusal(param(at, error.path()), &error.inner().to_string()))
}

/// Parses a body, and reads it as one type.
pub(in crate::api) fn body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    read(&object(body)?)
}

fn param(at: &str, path: &Path) -> String {
    path.iter().fold(at.to_owned(), |at, segment| match segment {
        Segment::Seq { index } => format!("{at}[{index}]"),
        Segment::Map { key } => field(&at, &short(key)),
        Segment::Enum { .. } | Segment::Unknown => at,
    })
}

/// JavaScript cuts a text between the two halves of a character, and then writes the half as `\ud83d`. serde_json's error
/// mentions only hex escapes.
fn not_json(error: &serde_json::Error) -> ApiError {
    const HALVES: [&str; 2] = ["unexpected end of hex escape", "lone leading surrogate in hex escape"];
    let text = error.to_string();
    let is_half = HALVES.iter().any(|half| text.starts_with(half));
    ApiError::Json(match is_half {
        true => format!(
            "a string has half of a character (\\ud800 to \\udfff without its other half), probably because a text was cut \
             inside a character, at line {} column {}",
            error.line(),
            error.column()
        ),
        false => text,
    })
}

/// The path of a field of the object at `at`.
pub(in crate::api) fn field(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") }
}

/// The beginning of an error of serde about a field that this server understands and does not support.
const UNSUPPORTED: &str = "unsupported: ";

/// An error of serde about a field that this server understands and does not support.
pub(in crate::api) fn unsupported<E: serde::de::Error>(problem: impl Display) -> E {
    E::custom(format_args!("{UNSUPPORTED}{problem}"))
}

/// Translates an error of serde, which is only a text.
fn refusal(param: String, problem: &str) -> ApiError {
    if let Some(problem) = problem.strip_prefix(UNSUPPORTED) {
        return ApiError::unsupported(param, problem);
    }
    let missing_field = problem.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`'));
    if let Some(name) = missing_field {
        return missing(field(&param, name));
    }
    let wrong_type = problem.strip_prefix("invalid type: ").and_then(|rest| rest.rsplit_once(", expected "));
    let Some((got, expected)) = wrong_type else { return ApiError::invalid(param, problem) };
    let got = match got.split([' ', ',']).next() {
        Some("null" | "unit") => return missing(param),
        Some("boolean") => "a boolean",
        Some("string") => "a string",
        Some("sequence") => "a list",
        Some("map") => "an object",
        _ => "a number",
    };
    let expected = match expected {
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        structure if structure.starts_with("struct ") => "an object",
        own => own,
    };
    ApiError::invalid(param, format!("expected {expected}, got {got}"))
}

pub(in crate::api) fn missing(param: impl Into<String>) -> ApiError {
    ApiError::Missing { param: param.into() }
}

/// The value of a field that the object at `at` must have.
pub(in crate::api) fn required<T>(value: Option<T>, at: &str, name: &str) -> Result<T, ApiError> {
    value.ok_or_else(|| missing(field(at, name)))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A client's text, shortened for an error message.
pub(in crate::api) fn short(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    let mut short: String = text.chars().take(MAX_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// A JSON object with any fields.
#[derive(Debug, Clone, PartialEq, Default, serde::Deserialize, serde::Serialize)]
#[serde(transparent)]
pub(in crate::api) struct JsonObject(pub Map<String, Value>);

impl From<JsonObject> for Value {
    fn from(object: JsonObject) -> Self {
        Value::Object(object.0)
    }
}

/// The name of a model. As in vLLM, an empty name counts as absent: clients send it if the user left the name empty.
pub(in crate::api) fn named(model: Option<String>) -> Option<String> {
    model.filter(|name| !name.is_empty())
}

/// Defines a body, or an object in one, of several parts. Each part reads its own fields of the one object, and the document shows one
/// object.
macro_rules! composed {
    ($(#[$about:meta])* $name:ident { $($part:ident: $type:ty),+ $(,)? }) => {
        $(#[$about])*
        pub(in crate::api) struct $name {
            $(#[allow(dead_code, reason = "some parts only check the body")] pub $part: $type,)+
        }

        impl $name {
            #[allow(dead_code, reason = "an object within a body is read at its path")]
            pub fn read(body: &serde_json::Value) -> Result<Self, $crate::api::error::ApiError> {
                Self::read_at("", body)
            }

            /// Reads the object at the path `at` of a body.
            pub fn read_at(at: &str, object: &serde_json::Value) -> Result<Self, $crate::api::error::ApiError> {
                Ok(Self { $($part: $crate::api::wire::read_at(at, object)?,)+ })
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                $crate::api::wire::merged([$(<$type as utoipa::PartialSchema>::schema()),+])
            }
        }

        impl utoipa::ToSchema for $name {
            fn schemas(
                schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::schema::Schema>)>,
            ) {
                $(<$type as utoipa::ToSchema>::schemas(schemas);)+
            }
        }
    };
}
pub(in crate::api) use composed;

/// The schema of one object with the fields of all `parts`.
pub(in crate::api) fn merged<const N: usize>(parts: [RefOr<Schema>; N]) -> RefOr<Schema> {
    let mut all = ObjectBuilder::new().schema_type(Type::Object).build();
    for part in parts {
        let RefOr::T(Schema::Object(part)) = part else { unreachable!("a body's part is an object") };
        all.properties.extend(part.properties);
        all.required.extend(part.required);
        all.extensions = all.extensions.or(part.extensions);
    }
    all.description = Some("Unknown fields are ignored.".to_owned());
    RefOr::T(all.into())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::bounded::{MaxTokens, Probability};
    use super::union::TextOr;
    use super::*;

    #[test]
    fn the_parts_of_a_body_are_bounded_and_texts_are_none() {
        let list = |n: usize| format!("{{\"a\": [{}0]}}", "0,".repeat(n));
        // The object, its member and the list.
        let most = MAX_PARTS - 9;
        assert!(object(list(most).as_bytes()).is_ok());
        assert_eq!(object(list(most + 1).as_bytes()), Err(ApiError::TooManyParts { limit: MAX_PARTS }));
        let text = format!("{{\"a\": \"{}\"}}", "\\\"[{,:".repeat(MAX_PARTS));
        assert!(object(text.as_bytes()).is_ok());
        assert_eq!(parts(br#"{"a\",": [{}, "b", {"c": 1}]}"#), 4 + 4 + 1 + 4 + 1 + 1 + 4 + 4);
    }

    #[derive(Debug, Deserialize)]
    struct Outer {
        inner: Vec<Inner>,
        on: Option<bool>,
        map: Option<BTreeMap<String, Probability>>,
    }

    #[derive(Debug, Deserialize)]
    struct Inner {
        text: TextOr<Vec<String>>,
        count: Option<MaxTokens>,
    }

    #[test]
    fn an_error_names_the_field_and_what_was_expected() {
        for (body, error) in [
            (json!({}), "inner is required"),
            (json!({"inner": null}), "inner is required"),
            (json!({"inner": 5}), "inner: expected a list, got a number"),
            (json!({"inner": [true]}), "inner[0]: expected an object, got a boolean"),
            (json!({"inner": [{}]}), "inner[0].text is required"),
            (
                json!({"inner": [{"text": {}}]}),
                "inner[0].text: expected a string or a list of strings, got an object",
            ),
            (json!({"inner": [{"text": ["a", []]}]}), "inner[0].text[1]: expected a string, got a list"),
            (
                json!({"inner": [{"text": "a", "count": 1.5}]}),
                "inner[0].count: expected an integer, got a number",
            ),
            (
                json!({"inner": [{"text": "a", "count": 0}]}),
                "inner[0].count: expected an integer from 1 to 4294967295, got 0",
            ),
            (json!({"inner": [], "on": "a, expected b"}), "on: expected true or false, got a string"),
            (json!({"inner": [], "map": {"a.b": 2}}), "map.a.b: expected a number from 0 to 1, got 2"),
        ] {
            assert_eq!(read::<Outer>(&body).unwrap_err().to_string(), error, "{body}");
        }
        let sound = json!({"inner": [{"text": "a", "count": 40.0, "more": 1}], "on": null, "map": null});
        let outer: Outer = read(&sound).expect("sound");
        assert_eq!(outer.inner[0].count, Some(MaxTokens(40)));
        assert!(matches!(&outer.inner[0].text, TextOr::Text(text) if text == "a"));
        assert!(outer.on.is_none() && outer.map.is_none());
    }
}
