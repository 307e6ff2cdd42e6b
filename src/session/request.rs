//! A request to generate, the same for every wire format.

use super::grammar::ResponseGrammar;
use super::tools::Tools;
use crate::model::SamplingOptions;
use crate::text::Message;

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
    pub ignore_eos: bool,
    /// The number of alternatives whose log probabilities come with each token; none asks for no log probabilities.
    pub logprobs: Option<usize>,
    /// The number of answers, at least 1; none is 1.
    pub n: Option<usize>,
    /// The grammar of each answer that calls no tool.
    pub grammar: Option<ResponseGrammar>,
    pub tools: Tools,
    pub ending: PromptEnding,
}

/// How the prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromptEnding {
    /// With the beginning of a new turn of the assistant.
    #[default]
    Answer,
    /// Within the last message, which is the assistant's: the answer continues it.
    Continued,
    /// With the last message, and no new turn.
    Closed,
}
