//! The fields that `/api/chat` and `/api/generate` share.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use serde_json::Value;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AnyOfBuilder, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::api::error::ApiError;
use crate::api::openai::logprobs;
use crate::api::openai::other_fields::{self, OtherFields};
use crate::api::wire::bounded::{
    ImageTokens, List, MaxTokensOrNone, Penalty, Probability, RepetitionPenalty, Seed, StopText, Temperature,
    TopK, TopLogprobs, numbers,
};
use crate::api::wire::union::{TextOr, words};
use crate::api::wire::{self, JsonObject};
use crate::engine::KeepAlive;
use crate::model::SamplingOptions;
use crate::session::{GenerateRequest, ResponseGrammar};
use crate::text::{GrammarSource, MAX_STOPS};

type FormatParam = TextOr<JsonObject, FormatWord>;
type Stops = List<StopText, 0, MAX_STOPS>;

numbers! {
    /// The most tokens of an answer. Numbers below 1 mean as many as the context holds.
    NumPredict: i64 = -2..=u32::MAX as i64;
}

words! {
    /// `json`: the answer is any JSON object. An empty text: it is any text.
    FormatWord { Text = "", Json = "json" };
    /// How much to think. The model thinks at each of them.
    ThinkLevel { Low = "low", Medium = "medium", High = "high", Max = "max" };
}

/// The fields of both routes.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaAnswerFields {
    /// A name that `/api/tags` lists; if absent or empty, the served model.
    model: Option<String>,
    /// Whether the answer comes piece by piece, one object in each line; true by default.
    stream: Option<bool>,
    /// What the answer must be: `json`, or a JSON schema. What cannot be enforced of the schema is left to the model.
    #[schema(inline)]
    format: Option<FormatParam>,
    #[schema(inline)]
    keep_alive: Option<KeepAliveParam>,
    #[schema(value_type = Option<OllamaOptions>)]
    options: Option<JsonObject>,
    /// Whether the model thinks before it answers. A model that can think does so by default.
    #[schema(inline)]
    think: Option<Think>,
    /// Return log probabilities of the answer's tokens.
    logprobs: Option<bool>,
    /// The number of alternatives to each token; above 0 only if `logprobs` is true.
    top_logprobs: Option<TopLogprobs>,
}

wire::composed! {
    /// The field `options`.
    OllamaOptions {
        known: OllamaKnownOptions,
        other: OtherFields<other_fields::OllamaOptions>,
    }
}

#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaKnownOptions {
    /// The most tokens of prompt and answer together. 0, and more than the model's context, mean the model's context. The
    /// model is not reloaded.
    num_ctx: Option<MaxTokensOrNone>,
    num_predict: Option<NumPredict>,
    /// Temperature; 0 is greedy decoding.
    temperature: Option<Temperature>,
    top_k: Option<TopK>,
    top_p: Option<Probability>,
    min_p: Option<Probability>,
    repeat_penalty: Option<RepetitionPenalty>,
    presence_penalty: Option<Penalty>,
    frequency_penalty: Option<Penalty>,
    /// The seed of the draws: the same request with the same seed gets the same answer. -1 draws one.
    seed: Option<Seed>,
    /// The answer ends before the first of these texts.
    #[schema(inline)]
    stop: Option<Stops>,
    /// The most tokens of each image. A model that lets a request choose has 70, 140, 280, 560 and 1120, of which the server's
    /// options may allow fewer. Every other model has one number.
    image_tokens: Option<ImageTokens>,
}

/// Whether to think: a boolean, or how much.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Think(bool);

impl<'de> Deserialize<'de> for Think {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        impl Visitor<'_> for Read {
            type Value = Think;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("true, false, low, medium, high or max")
            }

            fn visit_bool<E>(self, thinks: bool) -> Result<Think, E> {
                Ok(Think(thinks))
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Think, E> {
                ThinkLevel::deserialize(de::value::StrDeserializer::new(word)).map(|_| Think(true))
            }
        }

        deserializer.deserialize_any(Read)
    }
}

impl PartialSchema for Think {
    fn schema() -> RefOr<Schema> {
        RefOr::T(AnyOfBuilder::new().item(bool::schema()).item(ThinkLevel::schema()).build().into())
    }
}

impl ToSchema for Think {}

/// A number of seconds, or a duration as Go writes it (`5m`, `1h30m`). A negative one means forever, and 0 unloads the model
/// after the request.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct KeepAliveParam(pub KeepAlive);

impl<'de> Deserialize<'de> for KeepAliveParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        /// A time that exceeds the range of durations is as good as forever.
        fn seconds(n: f64) -> KeepAliveParam {
            let time = Duration::try_from_secs_f64(n).map_or(KeepAlive::Forever, KeepAlive::For);
            KeepAliveParam(time)
        }

        impl Visitor<'_> for Read {
            type Value = KeepAliveParam;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number of seconds, or a duration such as \"5m\"")
            }

            fn visit_i64<E>(self, n: i64) -> Result<KeepAliveParam, E> {
                Ok(seconds(n as f64))
            }

            fn visit_u64<E>(self, n: u64) -> Result<KeepAliveParam, E> {
                Ok(seconds(n as f64))
            }

            fn visit_f64<E>(self, n: f64) -> Result<KeepAliveParam, E> {
                Ok(seconds(n))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<KeepAliveParam, E> {
                if let Ok(n) = text.parse::<f64>() {
                    return Ok(seconds(n));
                }
                let time: Result<jiff::SignedDuration, _> = text.parse();
                let unreadable = || E::invalid_value(de::Unexpected::Str(text), &self);
                Ok(seconds(time.map_err(|_| unreadable())?.as_secs_f64()))
            }
        }

        deserializer.deserialize_any(Read)
    }
}

impl PartialSchema for KeepAliveParam {
    fn schema() -> RefOr<Schema> {
        let number = ObjectBuilder::new().schema_type(Type::Number);
        RefOr::T(AnyOfBuilder::new().item(number).item(String::schema()).build().into())
    }
}

impl ToSchema for KeepAliveParam {}

/// The fields of both routes, read.
pub(in crate::api) struct AnswerForm {
    /// The model's name as the request has it, which the answer repeats.
    pub model: Option<String>,
    pub stream: bool,
    pub keep_alive: KeepAlive,
    /// The most tokens of prompt and answer together. `None` = the model's context.
    pub num_ctx: Option<usize>,
    pub think: Option<bool>,
}

impl OllamaAnswerFields {
    /// The form, and the request without its prompt.
    pub fn read(self) -> Result<(AnswerForm, GenerateRequest), ApiError> {
        let options = Value::from(self.options.unwrap_or_default());
        let options = OllamaOptions::read_at("options", &options)?.known;
        let logprobs = logprobs::asked(self.logprobs, self.top_logprobs)?;
        let source = match self.format {
            None | Some(TextOr::Text(FormatWord::Text)) => None,
            Some(TextOr::Text(FormatWord::Json)) => Some(GrammarSource::json_object()),
            Some(TextOr::Other(schema)) => {
                Some(GrammarSource::JsonSchema { schema: schema.into(), strict: false })
            }
        };
        let request = GenerateRequest {
            max_tokens: options.num_predict.and_then(|n| usize::try_from(n.0).ok()).filter(|n| *n > 0),
            sampling: SamplingOptions {
                temperature: options.temperature.map(|t| t.0 as f32),
                top_p: options.top_p.map(|p| p.0 as f32),
                top_k: options.top_k.map(|k| u32::try_from(k.0).unwrap_or(0)),
                min_p: options.min_p.map(|p| p.0 as f32),
                presence_penalty: options.presence_penalty.map(|p| p.0 as f32),
                frequency_penalty: options.frequency_penalty.map(|p| p.0 as f32),
                repetition_penalty: options.repeat_penalty.map(|p| p.0 as f32),
            },
            seed: options.seed.and_then(Seed::get),
            stop: options.stop.unwrap_or_default().0.into_iter().map(|stop| stop.0).collect(),
            image_tokens: options.image_tokens.map(|tokens| tokens.asked("options.image_tokens")),
            logprobs,
            grammar: source.map(|source| ResponseGrammar { source, param: "format".into() }),
            ..GenerateRequest::default()
        };
        let form = AnswerForm {
            model: wire::named(self.model),
            stream: self.stream.unwrap_or(true),
            keep_alive: self.keep_alive.map_or(KeepAlive::Configured, |keep_alive| keep_alive.0),
            num_ctx: options.num_ctx.map(|n| n.0 as usize).filter(|n| *n > 0),
            think: self.think.map(|think| think.0),
        };
        Ok((form, request))
    }
}
