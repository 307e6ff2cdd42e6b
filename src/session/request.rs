//! What is asked of a model, whatever the wire format it came in.

use super::grammar::ResponseGrammar;
use super::tools::Tools;
use crate::model::SamplingOptions;
use crate::text::Message;

/// A conversation, or nothing where the prompt is none, and how to answer it; absent options are the model's defaults.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerateRequest {
    /// Roles are system, developer, user or assistant; calls of tools, and what these gave, are text in them. None where the
    /// prompt is no conversation.
    pub messages: Vec<Message>,
    pub max_tokens: Option<usize>,
    pub sampling: SamplingOptions,
    /// No id twice, no bias 0.
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    /// At most `max_tokens`, if that is there.
    pub min_tokens: Option<usize>,
    pub ignore_eos: bool,
    /// Log probabilities of each token, and of so many alternatives.
    pub logprobs: Option<usize>,
    /// Answers; at least 1.
    pub n: Option<usize>,
    /// What each answer must be that calls no tool.
    pub grammar: Option<ResponseGrammar>,
    pub tools: Tools,
    pub ending: PromptEnding,
}

/// What stands at the end of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromptEnding {
    /// The beginning of an answer.
    #[default]
    Answer,
    /// The last message, which is the assistant's, as far as it goes: the answer goes on from there.
    Continued,
    /// The last message.
    Closed,
}
