//! Numbers, texts and lists with bounds. Each type has one range, which both the reader and the document use.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AnyOfBuilder, ArrayBuilder, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::api::wire::union::{BesideText, ListedBesideText, reference, with_reference};
use crate::model::MAX_LOGPROBS;
use crate::session::AskedImageTokens;
use crate::text::MAX_STOP_BYTES;

/// A number as JSON has it.
#[derive(Clone, Copy)]
pub(in crate::api) enum Read {
    Integer(i128),
    Float(f64),
}

impl Read {
    /// The integer, which may be written as a whole float of 64 bits. A float of -2^63 may be a smaller integer that was
    /// rounded.
    fn whole(self) -> Option<i128> {
        match self {
            Self::Integer(n) => Some(n),
            Self::Float(n) => {
                let in_range = n > -(2f64.powi(63)) && n < 2f64.powi(64);
                (n.fract() == 0.0 && in_range).then_some(n as i128)
            }
        }
    }
}

/// The type of a bounded number.
pub(in crate::api) trait Number: Copy + PartialOrd + fmt::Display {
    const NAME: &str;

    fn from_read(read: Read) -> Option<Self>;
    fn schema(range: RangeInclusive<Self>) -> ObjectBuilder;
}

impl Number for f64 {
    const NAME: &str = "a number";

    fn from_read(read: Read) -> Option<Self> {
        match read {
            Read::Integer(n) => Some(n as f64),
            Read::Float(n) => Some(n),
        }
    }

    fn schema(range: RangeInclusive<Self>) -> ObjectBuilder {
        let (least, most) = range.into_inner();
        ObjectBuilder::new().schema_type(Type::Number).minimum(Some(least)).maximum(Some(most))
    }
}

impl Number for i64 {
    const NAME: &str = "an integer";

    fn from_read(read: Read) -> Option<Self> {
        read.whole()?.try_into().ok()
    }

    fn schema(range: RangeInclusive<Self>) -> ObjectBuilder {
        let bound = |n: i64| isize::try_from(n).expect("64 bits");
        let (least, most) = range.into_inner();
        let integer = ObjectBuilder::new().schema_type(Type::Integer);
        integer.minimum(Some(bound(least))).maximum(Some(bound(most)))
    }
}

/// Reads a number. `make` converts it, if it is valid. `expected` is what errors call it.
fn read<'de, T, D: Deserializer<'de>>(
    deserializer: D,
    expected: &'static str,
    make: fn(Read) -> Option<T>,
) -> Result<T, D::Error> {
    struct Reader<T>(&'static str, fn(Read) -> Option<T>);

    impl<T> Visitor<'_> for Reader<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_i64<E: de::Error>(self, n: i64) -> Result<T, E> {
            self.1(Read::Integer(n.into())).ok_or_else(|| E::invalid_type(de::Unexpected::Signed(n), &self))
        }

        fn visit_u64<E: de::Error>(self, n: u64) -> Result<T, E> {
            self.1(Read::Integer(n.into())).ok_or_else(|| E::invalid_type(de::Unexpected::Unsigned(n), &self))
        }

        fn visit_f64<E: de::Error>(self, n: f64) -> Result<T, E> {
            self.1(Read::Float(n)).ok_or_else(|| E::invalid_type(de::Unexpected::Float(n), &self))
        }
    }

    deserializer.deserialize_any(Reader(expected, make))
}

/// Reads a number that must be in `range`.
pub(in crate::api) fn read_number<'de, N: Number, D: Deserializer<'de>>(
    deserializer: D,
    range: &RangeInclusive<N>,
) -> Result<N, D::Error> {
    in_range(read(deserializer, N::NAME, N::from_read)?, range)
}

fn in_range<N: Number, E: de::Error>(n: N, range: &RangeInclusive<N>) -> Result<N, E> {
    if range.contains(&n) {
        return Ok(n);
    }
    let (least, most) = (range.start(), range.end());
    Err(E::custom(format!("expected {} from {least} to {most}, got {n}", N::NAME)))
}

/// The schema of a number in `range`.
pub(in crate::api) fn number_schema<N: Number>(range: RangeInclusive<N>) -> RefOr<Schema> {
    RefOr::T(N::schema(range).build().into())
}

/// Defines bounded numbers, one type each.
macro_rules! numbers {
    ($($(#[$about:meta])* $name:ident: $number:ty = $range:expr;)*) => { $(
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub(in crate::api) struct $name(pub $number);

        impl $name {
            pub(in crate::api) const RANGE: std::ops::RangeInclusive<$number> = $range;
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::api::wire::bounded::read_number(deserializer, &Self::RANGE).map(Self)
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                $crate::api::wire::bounded::number_schema(Self::RANGE)
            }
        }

        impl utoipa::ToSchema for $name {}
    )* };
}
pub(in crate::api) use numbers;

/// The largest count that a request may ask for.
const MOST: i64 = u32::MAX as i64;

numbers! {
    Temperature: f64 = 0.0..=2.0;
    Probability: f64 = 0.0..=1.0;
    /// A presence or frequency penalty.
    Penalty: f64 = -2.0..=2.0;
    RepetitionPenalty: f64 = 1e-3..=1e3;
    LogitBias: f64 = -100.0..=100.0;
    /// The number of tokens of an answer.
    MaxTokens: i64 = 1..=MOST;
    MaxTokensOrNone: i64 = 0..=MOST;
    /// The number of tokens of an image. The model says which of them it has.
    ImageTokens: i64 = 1..=MOST;
    /// A completion's limit of tokens; -1 is what the context holds.
    MaxTokensOrAll: i64 = -1..=MOST;
    /// vLLM's clients write -1 for "off".
    TopK: i64 = -1..=MOST;
    TopLogprobs: i64 = 0..=MAX_LOGPROBS as i64;
    /// The number of answers to one prompt.
    AnswerCount: i64 = 1..=128;
}

impl ImageTokens {
    /// The number, from the field `param`.
    pub fn asked(self, param: &'static str) -> AskedImageTokens {
        AskedImageTokens { param, tokens: self.0 as usize }
    }
}

impl MaxTokens {
    pub fn get(self) -> usize {
        self.0 as usize
    }
}

/// How many tokens: at least 1, or -1 for as many as the context holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::api) enum TokenLimit {
    Context,
    Most(MaxTokens),
}

impl TokenLimit {
    /// The number; none if the context is the limit.
    pub fn get(self) -> Option<usize> {
        match self {
            Self::Context => None,
            Self::Most(most) => Some(most.get()),
        }
    }
}

impl<'de> Deserialize<'de> for TokenLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The error for another negative number is that of the numbers from 1 on.
        let limit = read_number(deserializer, &(i64::MIN..=i64::MAX))?;
        match limit {
            -1 => Ok(Self::Context),
            limit => in_range(limit, &MaxTokens::RANGE).map(|limit| Self::Most(MaxTokens(limit))),
        }
    }
}

impl PartialSchema for TokenLimit {
    fn schema() -> RefOr<Schema> {
        let context = ObjectBuilder::new().schema_type(Type::Integer).enum_values(Some([-1]));
        RefOr::T(AnyOfBuilder::new().item(context).item(MaxTokens::schema()).build().into())
    }
}

impl ToSchema for TokenLimit {}

/// A seed: any integer of 64 bits, signed or not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::api) struct Seed(pub u64);

impl Seed {
    /// What -1 is read as. In llama.cpp, vLLM and Ollama it requests a random seed.
    const DRAWN: Self = Self(u64::MAX);

    /// The seed. `None` = a random one.
    pub fn get(self) -> Option<u64> {
        (self != Self::DRAWN).then_some(self.0)
    }
}

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let of = |n: Read| {
            let n = n.whole()?;
            n.try_into().ok().or_else(|| i64::try_from(n).ok().map(i64::cast_unsigned))
        };
        read(deserializer, "an integer of 64 bits", of).map(Self)
    }
}

impl PartialSchema for Seed {
    fn schema() -> RefOr<Schema> {
        let integer = ObjectBuilder::new().schema_type(Type::Integer);
        RefOr::T(integer.minimum(Some(isize::MIN)).maximum(Some(usize::MAX)).build().into())
    }
}

impl ToSchema for Seed {}

/// A token id, which is read before the vocabulary's size is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::api) struct TokenId(pub u32);

impl<'de> Deserialize<'de> for TokenId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer, "a token id", |n| n.whole()?.try_into().ok()).map(Self)
    }
}

impl PartialSchema for TokenId {
    fn schema() -> RefOr<Schema> {
        number_schema(0..=MOST)
    }
}

impl ToSchema for TokenId {}

/// Defines bounded texts, one type each: the range of bytes, the document's pattern, and a function that says what is
/// wrong with a text, if anything.
macro_rules! texts {
    ($($(#[$about:meta])* $name:ident: $bytes:expr, $pattern:expr, $problem:expr;)*) => { $(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(in crate::api) struct $name(pub String);

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                let problem: Option<String> = $problem(&text);
                problem.map_or(Ok(Self(text)), |problem| Err(serde::de::Error::custom(problem)))
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                $crate::api::wire::bounded::text_schema($bytes, $pattern)
            }
        }

        impl utoipa::ToSchema for $name {}
    )* };
}
pub(in crate::api) use texts;

/// The schema of a text. The document counts characters, and a text has no more characters than bytes.
pub(in crate::api) fn text_schema(bytes: RangeInclusive<usize>, pattern: Option<&str>) -> RefOr<Schema> {
    let (least, most) = bytes.into_inner();
    let text = ObjectBuilder::new().schema_type(Type::String).min_length(Some(least)).max_length(Some(most));
    RefOr::T(text.pattern(pattern).build().into())
}

const NO_PATTERN: Option<&str> = None;
/// The bytes of a stop string.
const STOP_BYTES: RangeInclusive<usize> = 1..=MAX_STOP_BYTES;
/// The bytes of a tool's name.
const NAME_BYTES: RangeInclusive<usize> = 1..=128;
/// The bytes of a cache salt.
const SALT_BYTES: RangeInclusive<usize> = 1..=256;

/// What is wrong with the length of a text, if anything.
pub(in crate::api) fn wrong_length(text: &str, bytes: RangeInclusive<usize>) -> Option<String> {
    let (least, most) = (bytes.start(), bytes.end());
    (!bytes.contains(&text.len())).then(|| format!("expected {least} to {most} bytes, got {}", text.len()))
}

texts! {
    /// A stop string.
    StopText: STOP_BYTES, NO_PATTERN, |text: &str| match text {
        "" => Some("an empty string would stop every answer; leave it out".to_owned()),
        text => wrong_length(text, STOP_BYTES),
    };
    /// A text that an answer may not have.
    BadWord: STOP_BYTES, NO_PATTERN, |text: &str| wrong_length(text, STOP_BYTES);
    /// A `cache_salt`, as vLLM calls it: requests with the same salt share the prefix cache.
    Salt: SALT_BYTES, NO_PATTERN, |text: &str| wrong_length(text, SALT_BYTES);
    /// The name of a tool.
    ToolName: NAME_BYTES, Some(r"^[^\u0000-\u001f\u007f-\u009f]*$"), |text: &str| {
        let sound = NAME_BYTES.contains(&text.len()) && !text.chars().any(char::is_control);
        let most = NAME_BYTES.end();
        (!sound).then(|| format!("expected 1 to {most} bytes without control characters"))
    };
}

/// A list of `LEAST` to `MOST` items.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::api) struct List<T, const LEAST: usize, const MOST: usize>(pub Vec<T>);

impl<T, const LEAST: usize, const MOST: usize> Default for List<T, LEAST, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const LEAST: usize, const MOST: usize> Deserialize<'de>
    for List<T, LEAST, MOST>
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list = Vec::deserialize(deserializer)?;
        let got = list.len();
        if (LEAST..=MOST).contains(&got) {
            return Ok(Self(list));
        }
        Err(de::Error::custom(match (LEAST, MOST) {
            (1, usize::MAX) => "expected at least one item, got an empty list".to_owned(),
            (least, usize::MAX) => format!("expected at least {least} items, got {got}"),
            (0, most) => format!("expected at most {most} items, got {got}"),
            (least, most) => format!("expected {least} to {most} items, got {got}"),
        }))
    }
}

impl<T: ListedBesideText, const LEAST: usize, const MOST: usize> BesideText for List<T, LEAST, MOST> {
    const NAME: &str = T::NAME;
    const IS_LIST: bool = true;
}

impl<T: ToSchema, const LEAST: usize, const MOST: usize> PartialSchema for List<T, LEAST, MOST> {
    fn schema() -> RefOr<Schema> {
        let list = ArrayBuilder::new().items(reference::<T>());
        let list = list.min_items((LEAST > 0).then_some(LEAST));
        RefOr::T(list.max_items((MOST < usize::MAX).then_some(MOST)).build().into())
    }
}

impl<T: ToSchema, const LEAST: usize, const MOST: usize> ToSchema for List<T, LEAST, MOST> {
    fn name() -> std::borrow::Cow<'static, str> {
        format!("{}List{LEAST}To{MOST}", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_reference::<T>(schemas);
    }
}
