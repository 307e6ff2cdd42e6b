//! Schemas of what is read or written by hand, in a line each. A field that may be left out may be null: that is how all
//! bodies are read (`Fields`). Unknown fields are open everywhere, since they are ignored.

use std::ops::RangeInclusive;

use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::schema::{
    AdditionalProperties, AnyOfBuilder, ArrayBuilder, ObjectBuilder, Schema, SchemaType, Type,
};
use utoipa::openapi::{Ref, RefOr};

/// Types without values, for the schemas of what is read or written by hand: their names in the document, and the types that
/// each refers to.
macro_rules! described {
    ($($type:ident [$($part:ident),*] => $schema:expr;)*) => { $(
        pub(in crate::api) enum $type {}

        impl utoipa::PartialSchema for $type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::RefOr::T($schema)
            }
        }

        impl utoipa::ToSchema for $type {
            fn name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn schemas(
                _schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::schema::Schema>)>,
            ) {
                $(
                    _schemas.push((
                        <$part as utoipa::ToSchema>::name().into(),
                        <$part as utoipa::PartialSchema>::schema(),
                    ));
                    <$part as utoipa::ToSchema>::schemas(_schemas);
                )*
            }
        }
    )* };
}
pub(in crate::api) use described;

/// An object's fields, in order.
pub(in crate::api) struct Shape(ObjectBuilder);

impl Shape {
    pub fn new(about: &str) -> Self {
        Self(with_description(ObjectBuilder::new().schema_type(Type::Object), about))
    }

    /// A field that must be there.
    pub fn needs(self, name: &str, schema: impl Into<RefOr<Schema>>) -> Self {
        Self(self.0.property(name, schema).required(name))
    }

    /// A field that may be left out, or null.
    pub fn takes(self, name: &str, schema: impl Into<RefOr<Schema>>) -> Self {
        Self(self.0.property(name, or_null(schema.into())))
    }

    /// A field that may be left out, and not null.
    pub fn may(self, name: &str, schema: impl Into<RefOr<Schema>>) -> Self {
        Self(self.0.property(name, schema))
    }

    /// Whatever other fields there are belong to it.
    pub fn and_more(self) -> Self {
        Self(self.0.additional_properties(Some(AdditionalProperties::FreeForm(true))))
    }

    pub fn build(self) -> Schema {
        self.0.build().into()
    }
}

fn with_description(object: ObjectBuilder, about: &str) -> ObjectBuilder {
    object.description((!about.is_empty()).then_some(about))
}

/// Those of a length, where there are any.
fn bounds(length: RangeInclusive<usize>) -> (Option<usize>, Option<usize>) {
    let (least, most) = length.into_inner();
    ((least > 0).then_some(least), (most < usize::MAX).then_some(most))
}

pub(in crate::api) fn string(about: &str) -> Schema {
    with_description(ObjectBuilder::new().schema_type(Type::String), about).build().into()
}

/// A string of so many characters at least and at most, of which `pattern` holds.
pub(in crate::api) fn string_of(
    characters: RangeInclusive<usize>,
    pattern: Option<&str>,
    about: &str,
) -> Schema {
    let (least, most) = bounds(characters);
    let string = ObjectBuilder::new().schema_type(Type::String).min_length(least).max_length(most);
    with_description(string.pattern(pattern), about).build().into()
}

/// One of these strings.
pub(in crate::api) fn word(words: &[&str], about: &str) -> Schema {
    let word = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words.iter().copied()));
    with_description(word, about).build().into()
}

pub(in crate::api) fn flag(about: &str) -> Schema {
    with_description(ObjectBuilder::new().schema_type(Type::Boolean), about).build().into()
}

/// A field that has to be absent, null or false.
pub(in crate::api) fn not_true(about: &str) -> Schema {
    let off = ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([false]));
    with_description(off, about).build().into()
}

pub(in crate::api) fn number(range: RangeInclusive<f64>, about: &str) -> Schema {
    let (low, high) = range.into_inner();
    let number = ObjectBuilder::new().schema_type(Type::Number).minimum(Some(low)).maximum(Some(high));
    with_description(number, about).build().into()
}

pub(in crate::api) fn integer(range: RangeInclusive<i64>, about: &str) -> Schema {
    let bound = |n: i64| isize::try_from(n).expect("64 bits");
    let (low, high) = range.into_inner();
    let integer = ObjectBuilder::new().schema_type(Type::Integer);
    let integer = integer.minimum(Some(bound(low))).maximum(Some(bound(high)));
    with_description(integer, about).build().into()
}

/// Any integer of 64 bits, signed or not.
pub(in crate::api) fn integer_of_64_bits(about: &str) -> Schema {
    let integer = ObjectBuilder::new().schema_type(Type::Integer);
    with_description(integer.minimum(Some(isize::MIN)).maximum(Some(usize::MAX)), about).build().into()
}

pub(in crate::api) fn token_id() -> Schema {
    integer(0..=u32::MAX.into(), "")
}

/// So many items.
pub(in crate::api) fn list(
    items: impl Into<RefOr<Schema>>,
    count: RangeInclusive<usize>,
    about: &str,
) -> Schema {
    let (least, most) = bounds(count);
    let list = ArrayBuilder::new().items(items.into()).min_items(least).max_items(most);
    list.description((!about.is_empty()).then_some(about)).build().into()
}

/// Of any number of items.
pub(in crate::api) fn list_of(items: impl Into<RefOr<Schema>>) -> Schema {
    list(items, 0..=usize::MAX, "")
}

/// A string that an object says it is.
pub(in crate::api) fn kind(name: &str) -> Schema {
    word(&[name], "")
}

/// How many there are.
pub(in crate::api) fn count() -> Schema {
    with_description(ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0usize)), "").build().into()
}

/// Objects with whatever is in them.
pub(in crate::api) fn any_object(about: &str) -> Schema {
    Shape::new(about).build()
}

pub(in crate::api) fn anything(about: &str) -> Schema {
    with_description(ObjectBuilder::new().schema_type(SchemaType::AnyValue), about).build().into()
}

/// Names and values.
pub(in crate::api) fn map(names: Schema, values: Schema, about: &str) -> Schema {
    let values = AdditionalProperties::RefOr(RefOr::T(values));
    let map = ObjectBuilder::new().schema_type(Type::Object);
    with_description(map.property_names(Some(names)).additional_properties(Some(values)), about)
        .build()
        .into()
}

pub(in crate::api) fn any_of<const N: usize>(schemas: [RefOr<Schema>; N], about: &str) -> Schema {
    let any = schemas.into_iter().fold(AnyOfBuilder::new(), AnyOfBuilder::item);
    any.description((!about.is_empty()).then_some(about)).build().into()
}

/// A field that has to be absent, or null.
pub(in crate::api) fn nothing(about: &str) -> Schema {
    with_description(ObjectBuilder::new().schema_type(Type::Null), about).build().into()
}

/// The schema of a type, by its name.
pub(in crate::api) fn named<T: ToSchema>() -> RefOr<Schema> {
    Ref::from_schema_name(T::name()).into()
}

pub(in crate::api) fn or_null(schema: RefOr<Schema>) -> RefOr<Schema> {
    let widened = |kind: SchemaType| match kind {
        SchemaType::Type(Type::Null) => SchemaType::Type(Type::Null),
        SchemaType::Type(kind) => SchemaType::from_iter([kind, Type::Null]),
        // Any value may be null already.
        other => other,
    };
    RefOr::T(match schema {
        RefOr::T(Schema::Object(mut object)) => {
            object.schema_type = widened(object.schema_type);
            if let Some(values) = &mut object.enum_values {
                values.push(Value::Null);
            }
            Schema::Object(object)
        }
        RefOr::T(Schema::Array(mut array)) => {
            array.schema_type = widened(array.schema_type);
            Schema::Array(array)
        }
        RefOr::T(Schema::AnyOf(mut any)) => {
            any.items.push(nothing("").into());
            Schema::AnyOf(any)
        }
        other => any_of([other, nothing("").into()], ""),
    })
}

/// A stream of events, each with a `T` as its data. OpenAPI 3.1 has no words for that: some take the schema for that of the
/// text, others for that of each event, so it says of neither what it is.
pub(in crate::api) fn events<T: ToSchema>() -> Schema {
    let name = T::name();
    let about = format!(
        "Server-sent events. The data of each is a `{name}`; comments between them keep the connection. What goes wrong \
         after the first is an event with the error."
    );
    let data = json!({"$ref": format!("#/components/schemas/{name}")});
    let events = ObjectBuilder::new().schema_type(SchemaType::AnyValue).description(Some(about));
    events.extensions(Some(Extensions::builder().add("x-event-data", data).build())).build().into()
}
