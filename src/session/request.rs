//! A request to generate, the same for every wire format.

use super::grammar::ResponseGrammar;
use super::images::{AskedImageTokens, Image};
use super::tools::Tools;
use crate::model::SamplingOptions;
use crate::text::{Message, PromptEnding, TemplateKwargs};

/// A conversation and how to answer it. Absent options get the model's defaults. If the prompt is not a conversation,
/// `messages` is empty, and the prompt is passed separately.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerateRequest {
    /// The roles are system, developer, user, assistant, and tool for the results of calls.
    pub messages: Vec<Message>,
    /// The images, which the messages refer to by their index.
    pub images: Vec<Image>,
    /// The most tokens of each image, whatever its detail. `None` = as the image's detail says.
    pub image_tokens: Option<AskedImageTokens>,
    pub max_tokens: Option<usize>,
    pub sampling: SamplingOptions,
    /// Token ids, and the value to add to the logit of each. Ids are unique, and no value is 0.
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    /// Minimum number of tokens of an answer. Not greater than `max_tokens`, if that is set.
    pub min_tokens: Option<usize>,
    /// The model's own stop ids do not end an answer. `stop_token_ids` still do.
    pub ignore_eos: bool,
    /// Additional ids that end an answer. They are not part of it.
    pub stop_token_ids: Vec<u32>,
    /// The ids that an answer may have. `None` = all.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Texts that must not occur in an answer. None of them is empty. Each costs some milliseconds when a request is
    /// prepared.
    pub bad_words: Vec<String>,
    /// How much of the prompt is kept. `None` = all of it.
    pub truncate: Option<Truncation>,
    /// The number of alternatives whose log probabilities are reported with each token. `None` = no log probabilities.
    pub logprobs: Option<usize>,
    /// The number of answers, at least 1. `None` = 1.
    pub n: Option<usize>,
    /// The grammar of answers that do not call tools.
    pub grammar: Option<ResponseGrammar>,
    pub tools: Tools,
    pub ending: PromptEnding,
    pub thinking: Thinking,
    /// Variables of the chat template.
    pub template_kwargs: TemplateKwargs,
}

/// Whether the model thinks before it answers, if it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Thinking {
    /// `None` = as the chat template decides.
    pub enabled: Option<bool>,
    /// The most tokens of all thoughts of an answer. `None` = no limit.
    pub budget: Option<usize>,
}

/// How many ids of a prompt are kept: always the last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truncation {
    /// This number, at least 1.
    Last(usize),
    /// As many as fit into the context together with `max_tokens`.
    ToContext,
}
