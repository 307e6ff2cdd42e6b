//! The options of an answer that chats and completions share.

use std::collections::BTreeMap;

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::openai::grammar::GrammarFields;
use crate::api::wire::bounded::{
    AnswerCount, List, LogitBias, MaxTokensOrNone, Penalty, Probability, RepetitionPenalty, Salt, Seed,
    StopText, Temperature, TopK,
};
use crate::api::wire::union::{ListedBesideText, TextOr};
use crate::api::wire::{field, short};
use crate::model::SamplingOptions;
use crate::session::GenerateRequest;

/// The most stop strings, as OpenAI has it.
const MAX_STOPS: usize = 4;

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
    /// The seed of the draws: the same request with the same seed gets the same answer.
    seed: Option<Seed>,
    /// The answer ends before the first of these texts.
    #[schema(inline)]
    stop: Option<Stops>,
    /// The least number of tokens of an answer, at most the request's token limit.
    min_tokens: Option<MaxTokensOrNone>,
    /// Generate up to the token limit: ids that end an answer are never drawn.
    ignore_eos: Option<bool>,
    /// Requests share the prefix cache only with requests of the same salt.
    cache_salt: Option<Salt>,
    /// The number of answers, at most as many as the server runs at once.
    n: Option<AnswerCount>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct StreamOptions {
    /// Send `usage` in a last event of its own.
    include_usage: Option<bool>,
}

impl ListedBesideText for StopText {
    const NAME: &str = "a list of strings";
}

/// What the reply needs to know of a chat or a completion.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Form {
    pub stream: bool,
    pub include_usage: bool,
}

impl AnswerOptions {
    pub fn n(&self) -> i64 {
        self.n.map_or(1, |n| n.0)
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
        let usage = self.stream_options.and_then(|options| options.include_usage);
        let form = Form { stream, include_usage: usage.unwrap_or(false) };
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
            seed: self.seed.map(|seed| seed.0),
            stop,
            min_tokens: self.min_tokens.map(|n| n.0 as usize),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            n: self.n.map(|n| n.0 as usize),
            grammar: grammar.grammar()?,
            ..GenerateRequest::default()
        };
        let cache_salt = self.cache_salt.map(|salt| salt.0);
        Ok(Parsed { model, request, stream, cache_salt, wire: form })
    }
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
