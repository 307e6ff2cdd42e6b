//! A request to generate, the same for every wire format.

use super::grammar::ResponseGrammar;
use super::tools::Tools;
use crate::model::SamplingOptions;
use crate::text::{Message, PromptEnding};

/// A conversation and how to answer it. Absent options take the model's defaults. For a prompt that is no conversation,
/// `messages` is empty and the prompt is given beside the request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerateRequest {
    /// Roles are system, developer, user or assistant. Tool calls and their results are text in the messages.
    pub messages: Vec<Message>,
    pub max_tokens: Option<usize>,
    pub sampling: SamplingOptions,
    /// Token ids with what is added to their logits. No id comes twice, and no bias is 0.
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    /// The least number of tokens of an answer; at most `max_tokens`, if that is set.
    pub min_tokens: Option<usize>,
    /// Never ends an answer with an id that ends the model's answers; `stop_token_ids` still end it.
    pub ignore_eos: bool,
    /// Further ids that end an answer, and are no part of it.
    pub stop_token_ids: Vec<u32>,
    /// The ids that an answer may have; none allows all.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Texts that an answer may not have, none of them empty. Preparing a request takes some milliseconds for each.
    pub bad_words: Vec<String>,
    /// How much of a prompt is kept; none keeps all of it.
    pub truncate: Option<Truncation>,
    /// The number of alternatives whose log probabilities come with each token; none asks for no log probabilities.
    pub logprobs: Option<usize>,
    /// The number of answers, at least 1; none is 1.
    pub n: Option<usize>,
    /// The grammar of each answer that calls no tool.
    pub grammar: Option<ResponseGrammar>,
    pub tools: Tools,
    pub ending: PromptEnding,
}

/// How much of a prompt is kept: the last ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truncation {
    /// So many, at least 1.
    Last(usize),
    /// As many as the context holds before `max_tokens`.
    ToContext,
}
