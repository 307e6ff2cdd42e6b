//! Words, fields that must be off, unions of a text with a list or an object, and streams of events.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer, StrDeserializer};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::json;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::schema::{AnyOfBuilder, ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::api::wire::{JsonObject, short};

/// Defines enums whose values are words. `or Other` accepts other words too, where the field's reader refuses them with
/// a better message; the document does not list them.
macro_rules! words {
    ($($(#[$about:meta])* $name:ident { $($variant:ident = $word:literal),+ } $(or $other:ident)?;)*) => { $(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(in crate::api) enum $name {
            $($variant,)+
            $($other(String),)?
        }

        impl $name {
            pub(in crate::api) const WORDS: &[&str] = &[$($word),+];
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = String::deserialize(deserializer)?;
                match word.as_str() {
                    $($word => Ok(Self::$variant),)+
                    $(_ => Ok(Self::$other(word)),)?
                    #[allow(unreachable_patterns, reason = "where other words are read")]
                    other => Err(serde::de::Error::custom($crate::api::wire::union::expected(Self::WORDS, other))),
                }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(match self {
                    $(Self::$variant => $word,)+
                    $(Self::$other(word) => word,)?
                })
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                let word = utoipa::openapi::schema::ObjectBuilder::new();
                let word = word.schema_type(utoipa::openapi::schema::Type::String);
                utoipa::openapi::RefOr::T(word.enum_values(Some(Self::WORDS.iter().copied())).build().into())
            }
        }

        impl utoipa::ToSchema for $name {}
    )* };
}
pub(in crate::api) use words;

/// The error text for a word that is none of `words`.
pub(in crate::api) fn expected(words: &[&str], got: &str) -> String {
    let words: Vec<&str> =
        words.iter().map(|word| if word.is_empty() { "an empty text" } else { word }).collect();
    let (last, others) = words.split_last().expect("words");
    match others {
        [] => format!("expected {last}, got {:?}", short(got)),
        others => format!("expected {} or {last}, got {:?}", others.join(", "), short(got)),
    }
}

/// A field that this server does not support. Absent, null and false are accepted; its reader refuses anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::api) enum Refused {
    #[default]
    Off,
    Asked,
}

impl Refused {
    pub fn is_asked(this: Option<Self>) -> bool {
        this == Some(Self::Asked)
    }
}

impl<'de> Deserialize<'de> for Refused {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        Ok(if value == false { Self::Off } else { Self::Asked })
    }
}

impl PartialSchema for Refused {
    fn schema() -> RefOr<Schema> {
        let off = ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([false]));
        RefOr::T(off.build().into())
    }
}

impl ToSchema for Refused {}

/// A value of any type, which is ignored.
#[derive(Debug, Clone, PartialEq, Default)]
pub(in crate::api) struct Anything;

impl<'de> Deserialize<'de> for Anything {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

impl PartialSchema for Anything {
    fn schema() -> RefOr<Schema> {
        RefOr::T(ObjectBuilder::new().schema_type(SchemaType::AnyValue).build().into())
    }
}

impl ToSchema for Anything {}

impl PartialSchema for JsonObject {
    fn schema() -> RefOr<Schema> {
        RefOr::T(ObjectBuilder::new().schema_type(Type::Object).build().into())
    }
}

impl ToSchema for JsonObject {}

/// A text, or else a list or an object `T`.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::api) enum TextOr<T, S = String> {
    Text(S),
    Other(T),
}

/// A type that a field accepts instead of a text.
pub(in crate::api) trait BesideText {
    /// What errors call the type.
    const NAME: &str;
    const IS_LIST: bool;
}

/// The items of a list that a field accepts instead of a text.
pub(in crate::api) trait ListedBesideText {
    const NAME: &str;
}

impl ListedBesideText for String {
    const NAME: &str = "a list of strings";
}

impl<T: ListedBesideText> BesideText for Vec<T> {
    const NAME: &str = T::NAME;
    const IS_LIST: bool = true;
}

impl BesideText for JsonObject {
    const NAME: &str = "an object";
    const IS_LIST: bool = false;
}

impl<'de, T, S> Deserialize<'de> for TextOr<T, S>
where
    T: Deserialize<'de> + BesideText,
    S: Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T, S>(PhantomData<(T, S)>);

        impl<'de, T: Deserialize<'de> + BesideText, S: Deserialize<'de>> Visitor<'de> for Read<T, S> {
            type Value = TextOr<T, S>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a string or {}", T::NAME)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                S::deserialize(StrDeserializer::new(text)).map(TextOr::Text)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
                if !T::IS_LIST {
                    return Err(de::Error::invalid_type(de::Unexpected::Seq, &self));
                }
                T::deserialize(SeqAccessDeserializer::new(items)).map(TextOr::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Self::Value, A::Error> {
                if T::IS_LIST {
                    return Err(de::Error::invalid_type(de::Unexpected::Map, &self));
                }
                T::deserialize(MapAccessDeserializer::new(fields)).map(TextOr::Other)
            }
        }

        deserializer.deserialize_any(Read(PhantomData))
    }
}

impl<T: ToSchema, S: ToSchema> PartialSchema for TextOr<T, S> {
    fn schema() -> RefOr<Schema> {
        RefOr::T(AnyOfBuilder::new().item(S::schema()).item(T::schema()).build().into())
    }
}

impl<T: ToSchema, S: ToSchema> ToSchema for TextOr<T, S> {
    fn name() -> std::borrow::Cow<'static, str> {
        format!("{}Or{}", S::name(), T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        S::schemas(schemas);
        T::schemas(schemas);
    }
}

/// The schema of a type where another schema refers to it.
pub(in crate::api) fn reference<T: ToSchema>() -> RefOr<Schema> {
    match T::schema() {
        // A plain type has no name in the document.
        RefOr::T(Schema::Object(object)) if object.properties.is_empty() && object.enum_values.is_none() => {
            RefOr::T(Schema::Object(object))
        }
        _ => Ref::from_schema_name(T::name()).into(),
    }
}

/// Adds the schemas that [`reference`] refers to.
pub(in crate::api) fn with_reference<T: ToSchema>(schemas: &mut Vec<(String, RefOr<Schema>)>) {
    if let RefOr::Ref(_) = reference::<T>() {
        schemas.push((T::name().into(), T::schema()));
    }
    T::schemas(schemas);
}

/// A stream of events, each with a `T` as its data. OpenAPI 3.1 cannot describe such a stream: some readers apply the
/// schema to the whole text, and others to each event. So the schema allows anything.
pub(in crate::api) struct Events<T>(PhantomData<T>);

impl<T: ToSchema> PartialSchema for Events<T> {
    fn schema() -> RefOr<Schema> {
        let name = T::name();
        let about = format!(
            "Server-sent events. The data of each event is a `{name}`. Comments between events keep the connection alive. An \
             error after the first event comes as an event."
        );
        let data = json!({"$ref": format!("#/components/schemas/{name}")});
        let events = ObjectBuilder::new().schema_type(SchemaType::AnyValue).description(Some(about));
        let data = Extensions::builder().add("x-event-data", data).build();
        RefOr::T(events.extensions(Some(data)).build().into())
    }
}

/// JSON objects `T`, one in each line. The schema allows anything, for the same reason.
pub(in crate::api) struct Lines<T>(PhantomData<T>);

impl<T: ToSchema> PartialSchema for Lines<T> {
    fn schema() -> RefOr<Schema> {
        let name = T::name();
        let about = format!("One `{name}` in each line. An error after the first line comes as a line.");
        let data = json!({"$ref": format!("#/components/schemas/{name}")});
        let lines = ObjectBuilder::new().schema_type(SchemaType::AnyValue).description(Some(about));
        let data = Extensions::builder().add("x-line-data", data).build();
        RefOr::T(lines.extensions(Some(data)).build().into())
    }
}

impl<T: ToSchema> ToSchema for Lines<T> {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_reference::<T>(schemas);
    }
}

impl<T: ToSchema> ToSchema for Events<T> {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_reference::<T>(schemas);
    }
}
