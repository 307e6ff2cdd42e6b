//! Prompts that are no conversation: a text, a list of texts, token ids, or a list of lists of token ids.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AnyOfBuilder, ArrayBuilder, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::api::error::ApiError;
use crate::api::wire::bounded::TokenId;
use crate::api::wire::union::{ListedBesideText, TextOr};
use crate::session::{Service, SessionError, truncate};

/// A text, or the token ids that a client has made of one.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(from = "TextOr<Vec<TokenId>>")]
pub(in crate::api) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// The token ids of a prompt, whose control tokens are control tokens: at least one id; with `keep`, only the last so
    /// many. A text gets the ids that begin a text. `at` is the prompt's field.
    pub fn ids(&self, service: &Service, at: &str, keep: Option<usize>) -> Result<Vec<u32>, ApiError> {
        self.ids_by(service, at, keep, |text| service.encode(text, true, keep))
    }

    /// The token ids of a prompt that is data, and in which control tokens are text; otherwise as [`Self::ids`].
    pub fn text_ids(&self, service: &Service, at: &str, keep: Option<usize>) -> Result<Vec<u32>, ApiError> {
        self.ids_by(service, at, keep, |text| service.encode_text(text, keep))
    }

    fn ids_by(
        &self,
        service: &Service,
        at: &str,
        keep: Option<usize>,
        encode: impl FnOnce(&str) -> Result<Vec<u32>, SessionError>,
    ) -> Result<Vec<u32>, ApiError> {
        let ids = match self {
            Prompt::Text(text) => encode(text)?,
            Prompt::Ids(ids) => {
                service.check_ids(at, ids)?;
                let mut ids = ids.clone();
                truncate(&mut ids, keep);
                ids
            }
        };
        if ids.is_empty() { Err(ApiError::invalid(at, "expected at least one token")) } else { Ok(ids) }
    }
}

impl From<TextOr<Vec<TokenId>>> for Prompt {
    fn from(prompt: TextOr<Vec<TokenId>>) -> Self {
        match prompt {
            TextOr::Text(text) => Self::Text(text),
            TextOr::Other(ids) => Self::Ids(ids.into_iter().map(|id| id.0).collect()),
        }
    }
}

impl ListedBesideText for TokenId {
    const NAME: &str = "a list of token ids";
}

/// The prompts in one field: 1 to `MOST`.
#[derive(Debug, PartialEq)]
pub(in crate::api) enum Prompts<const MOST: usize> {
    /// The field itself is the prompt.
    One(Prompt),
    /// The field is a list of prompts.
    List(Vec<Prompt>),
}

impl<const MOST: usize> Prompts<MOST> {
    /// Each prompt with its place in the body; `at` is the field's name.
    pub fn in_field(self, at: &str) -> Vec<(String, Prompt)> {
        match self {
            Self::One(prompt) => vec![(at.to_owned(), prompt)],
            Self::List(prompts) => {
                let place = |(i, prompt)| (format!("{at}[{i}]"), prompt);
                prompts.into_iter().enumerate().map(place).collect()
            }
        }
    }
}

impl<'de, const MOST: usize> Deserialize<'de> for Prompts<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<const MOST: usize>;

        impl<'de, const MOST: usize> Visitor<'de> for Read<MOST> {
            type Value = Prompts<MOST>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string, a list of them, or token ids")
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Prompts::One(Prompt::Text(text.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut prompts = Vec::new();
                match items.next_element()? {
                    None => {}
                    // The first item says whether the list has ids or prompts.
                    Some(PromptOrId::Id(first)) => {
                        let mut ids = vec![first];
                        while let Some(TokenId(id)) = items.next_element()? {
                            ids.push(id);
                        }
                        return Ok(Prompts::One(Prompt::Ids(ids)));
                    }
                    Some(PromptOrId::Prompt(first)) => prompts.push(first),
                }
                while let Some(prompt) = items.next_element()? {
                    prompts.push(prompt);
                }
                if !(1..=MOST).contains(&prompts.len()) {
                    let problem = format!("expected 1 to {MOST} prompts, got {}", prompts.len());
                    return Err(de::Error::custom(problem));
                }
                Ok(Prompts::List(prompts))
            }
        }

        deserializer.deserialize_any(Read::<MOST>)
    }
}

/// The first item of the list.
enum PromptOrId {
    Prompt(Prompt),
    Id(u32),
}

impl<'de> Deserialize<'de> for PromptOrId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        impl<'de> Visitor<'de> for Read {
            type Value = PromptOrId;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string, a list of token ids, or a token id")
            }

            fn visit_str<E>(self, text: &str) -> Result<PromptOrId, E> {
                Ok(PromptOrId::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, ids: A) -> Result<PromptOrId, A::Error> {
                Prompt::deserialize(SeqAccessDeserializer::new(ids)).map(PromptOrId::Prompt)
            }

            fn visit_u64<E: de::Error>(self, n: u64) -> Result<PromptOrId, E> {
                let TokenId(id) = TokenId::deserialize(de::value::U64Deserializer::new(n))?;
                Ok(PromptOrId::Id(id))
            }

            fn visit_i64<E: de::Error>(self, n: i64) -> Result<PromptOrId, E> {
                TokenId::deserialize(de::value::I64Deserializer::new(n)).map(|id| PromptOrId::Id(id.0))
            }

            fn visit_f64<E: de::Error>(self, n: f64) -> Result<PromptOrId, E> {
                TokenId::deserialize(de::value::F64Deserializer::new(n)).map(|id| PromptOrId::Id(id.0))
            }
        }

        deserializer.deserialize_any(Read)
    }
}

impl<const MOST: usize> PartialSchema for Prompts<MOST> {
    fn schema() -> RefOr<Schema> {
        let ids = || ArrayBuilder::new().items(TokenId::schema()).min_items(Some(1));
        let each = AnyOfBuilder::new().item(String::schema()).item(ids()).build();
        let list =
            ArrayBuilder::new().items(RefOr::T(Schema::from(each))).min_items(Some(1)).max_items(Some(MOST));
        RefOr::T(AnyOfBuilder::new().item(String::schema()).item(ids()).item(list).build().into())
    }
}

impl<const MOST: usize> ToSchema for Prompts<MOST> {}
