//! The options of an answer that chats and completions share.

use std::collections::BTreeMap;

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{Parsed, TimingsReport, Usage};
use crate::api::openai::grammar::GrammarFields;
use crate::api::wire::bounded::{
    AnswerCount, BadWord, List, LogitBias, MaxTokensOrNone, Penalty, Probability, RepetitionPenalty, Salt,
    Seed, StopText, Temperature, TokenId, TokenLimit, TopK,
};
use crate::api::wire::union::{ListedBesideText, TextOr};
use crate::api::wire::{field, short};
use crate::engine::Timings;
use crate::model::SamplingOptions;
use crate::session::{GenerateRequest, Truncation};

/// The maximum number of stop strings, which is OpenAI's.
const MAX_STOPS: usize = 4;

/// The maximum number of stop ids.
const MAX_STOP_IDS: usize = 1024;
/// The maximum number of texts that an answer may not have. Each is compared with every token of the vocabulary.
const MAX_BAD_WORDS: usize = 128;

type StopIds = List<TokenId, 0, MAX_STOP_IDS>;
type BadWords = List<BadWord, 0, MAX_BAD_WORDS>;
type AllowedIds = List<TokenId, 1, { usize::MAX }>;
type Stops = TextOr<List<StopText, 0, MAX_STOPS>, StopText>;

/// Options of an answer that chats and completions share.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct AnswerOptions {
    /// Whether the answer comes as server-sent events.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Temperature; 0 is greedy decoding.
    temperature: Option<Temperature>,
    top_p: Option<Probability>,
    /// Draw from the `top_k` likeliest tokens; 0 and -1 turn this off.
    top_k: Option<TopK>,
    min_p: Option<Probability>,
    presence_penalty: Option<Penalty>,
    frequency_penalty: Option<Penalty>,
    /// vLLM's repetition penalty.
    repetition_penalty: Option<RepetitionPenalty>,
    /// llama.cpp's name for `repetition_penalty`.
    repeat_penalty: Option<RepetitionPenalty>,
    /// What to add to the logits of tokens, by token id.
    logit_bias: Option<BTreeMap<String, LogitBias>>,
    /// The seed of the draws: the same request with the same seed gets the same answer. -1 draws one, as no seed does.
    seed: Option<Seed>,
    /// The answer ends before the first of these texts.
    #[schema(inline)]
    stop: Option<Stops>,
    /// Further token ids that end an answer. The id is no part of the answer's text.
    #[schema(inline)]
    stop_token_ids: Option<StopIds>,
    /// Texts that an answer may not have. No token is drawn that would end one of them.
    #[schema(inline)]
    bad_words: Option<BadWords>,
    /// The only token ids that an answer may have.
    #[schema(inline)]
    allowed_token_ids: Option<AllowedIds>,
    /// llama.cpp's name for `max_tokens`, which takes precedence.
    #[schema(inline)]
    n_predict: Option<TokenLimit>,
    /// Keep so many tokens of the prompt, the last ones; -1 keeps as many as the context holds in addition to the answer.
    #[schema(inline)]
    truncate_prompt_tokens: Option<TokenLimit>,
    /// Return the token ids of the prompt and of each answer.
    return_token_ids: Option<bool>,
    /// Return the current times with each event of a stream.
    timings_per_token: Option<bool>,
    /// The least number of tokens of an answer, at most the request's token limit.
    min_tokens: Option<MaxTokensOrNone>,
    /// Generate up to the token limit: ids that end an answer are never drawn.
    ignore_eos: Option<bool>,
    /// Requests share the prefix cache only with requests of the same salt.
    cache_salt: Option<Salt>,
    /// The number of answers, at most as many as the server runs at the same time.
    n: Option<AnswerCount>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
struct StreamOptions {
    /// Send `usage` in a separate last event.
    include_usage: Option<bool>,
    /// With `include_usage`: send the current usage of an answer in each of its events.
    continuous_usage_stats: Option<bool>,
}

impl ListedBesideText for StopText {
    const NAME: &str = "a list of strings";
}

/// What the reply needs of the request for a chat or a completion.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::api) struct Form {
    pub include_usage: bool,
    pub continuous_usage_stats: bool,
    pub timings_per_token: bool,
    pub return_token_ids: bool,
}

impl Form {
    /// The fields `usage` and `timings` of an event that is not the last of its stream.
    pub fn progress(&self, timings: &Timings) -> (Option<Option<Usage>>, Option<TimingsReport>) {
        // The event that brings a prompt's log probabilities comes before the first token, and has no times.
        let begun = timings.predicted_n > 0;
        let usage = (begun && self.continuous_usage_stats).then(|| Usage::new(timings));
        let times = (begun && self.timings_per_token).then(|| TimingsReport::new(timings));
        (self.include_usage.then_some(usage), times)
    }
}

impl AnswerOptions {
    pub fn n(&self) -> i64 {
        self.n.map_or(1, |n| n.0)
    }

    pub fn n_predict(&self) -> Option<TokenLimit> {
        self.n_predict
    }

    /// The request without its prompt and its log probabilities. `max_tokens` limits each answer.
    pub fn parsed(
        self,
        model: Option<String>,
        max_tokens: Option<usize>,
        grammar: GrammarFields,
    ) -> Result<Parsed<Form>, ApiError> {
        if let (Some(most), Some(MaxTokensOrNone(least))) = (max_tokens, self.min_tokens)
            && least as usize > most
        {
            let problem = format!("expected an integer from 0 to {most}, got {least}");
            return Err(ApiError::invalid("min_tokens", problem));
        }
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::invalid("stream_options", "expected stream to be true as well"));
        }
        let StreamOptions { include_usage, continuous_usage_stats } = self.stream_options.unwrap_or_default();
        let include_usage = include_usage.unwrap_or(false);
        let form = Form {
            include_usage,
            continuous_usage_stats: include_usage && continuous_usage_stats.unwrap_or(false),
            timings_per_token: self.timings_per_token.unwrap_or(false),
            return_token_ids: self.return_token_ids.unwrap_or(false),
        };
        let stop = match self.stop {
            None => Vec::new(),
            Some(TextOr::Text(stop)) => vec![stop.0],
            Some(TextOr::Other(stops)) => stops.0.into_iter().map(|stop| stop.0).collect(),
        };
        let request = GenerateRequest {
            max_tokens,
            sampling: SamplingOptions {
                temperature: self.temperature.map(|t| t.0 as f32),
                top_p: self.top_p.map(|p| p.0 as f32),
                top_k: self.top_k.map(|k| u32::try_from(k.0).unwrap_or(0)),
                min_p: self.min_p.map(|p| p.0 as f32),
                presence_penalty: self.presence_penalty.map(|p| p.0 as f32),
                frequency_penalty: self.frequency_penalty.map(|p| p.0 as f32),
                repetition_penalty: self.repetition_penalty.or(self.repeat_penalty).map(|p| p.0 as f32),
            },
            logit_bias: biases(self.logit_bias.unwrap_or_default())?,
            seed: self.seed.and_then(Seed::get),
            stop,
            min_tokens: self.min_tokens.map(|n| n.0 as usize),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            stop_token_ids: self.stop_token_ids.map(ids).unwrap_or_default(),
            allowed_token_ids: self.allowed_token_ids.map(ids),
            bad_words: self.bad_words.unwrap_or_default().0.into_iter().map(|word| word.0).collect(),
            truncate: self.truncate_prompt_tokens.map(|limit| match limit.get() {
                None => Truncation::ToContext,
                Some(most) => Truncation::Last(most),
            }),
            n: self.n.map(|n| n.0 as usize),
            grammar: grammar.grammar()?,
            ..GenerateRequest::default()
        };
        let cache_salt = self.cache_salt.map(|salt| salt.0);
        Ok(Parsed { model, request, stream, cache_salt, form })
    }
}

fn ids<const LEAST: usize, const MOST: usize>(ids: List<TokenId, LEAST, MOST>) -> Vec<u32> {
    ids.0.into_iter().map(|id| id.0).collect()
}

/// Biases of logits by token id. A bias of 0 changes nothing, and is left out.
fn biases(named: BTreeMap<String, LogitBias>) -> Result<Vec<(u32, f32)>, ApiError> {
    let mut biases = BTreeMap::new();
    for (name, LogitBias(bias)) in named {
        let at = || field("logit_bias", &short(&name));
        let id: u32 = name.parse().map_err(|_| ApiError::invalid(at(), "expected a token id as the name"))?;
        if biases.insert(id, bias as f32).is_some() {
            return Err(ApiError::invalid(at(), "names a token that another entry names"));
        }
    }
    Ok(biases.into_iter().filter(|(_, bias)| *bias != 0.0).collect())
}
