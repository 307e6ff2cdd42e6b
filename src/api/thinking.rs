//! The fields with which requests turn thoughts on and off, and limit them.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::wire::bounded::MaxTokensOrNone;
use crate::api::wire::union::words;
use crate::session::Thinking;

words! {
    /// How much to think. `none` turns thoughts off, every other value turns them on.
    Effort {
        None = "none", Minimal = "minimal", Low = "low", Medium = "medium", High = "high", Xhigh = "xhigh", Max = "max"
    };
    ThinkingType { Enabled = "enabled", Adaptive = "adaptive", Disabled = "disabled" };
}

impl Effort {
    fn thinks(&self) -> bool {
        *self != Effort::None
    }
}

/// What a chat says about thoughts.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatThinkingFields {
    /// `none` turns thoughts off, every other value turns them on, if the model's template can do that.
    #[schema(inline)]
    reasoning_effort: Option<Effort>,
    /// The same in OpenRouter's form.
    #[schema(inline)]
    reasoning: Option<ReasoningOptions>,
    /// The most tokens of all thoughts of an answer, in vLLM's field. After them the thought ends, and the answer follows.
    thinking_token_budget: Option<MaxTokensOrNone>,
}

/// What a chat or a response says about thoughts, in one object.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(in crate::api) struct ReasoningOptions {
    /// `none` turns thoughts off, every other value turns them on.
    #[schema(inline)]
    pub effort: Option<Effort>,
    /// Whether the model thinks.
    enabled: Option<bool>,
    /// The most tokens of all thoughts of an answer.
    max_tokens: Option<MaxTokensOrNone>,
}

/// Anthropic's field.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ThinkingParam {
    r#type: ThinkingType,
    /// The most tokens of all thoughts of an answer.
    budget_tokens: Option<MaxTokensOrNone>,
}

/// No budget at all turns thoughts off.
fn limited(enabled: Option<bool>, budget: Option<MaxTokensOrNone>) -> Thinking {
    match budget.map(|budget| budget.0 as usize) {
        Some(0) => Thinking { enabled: Some(false), budget: None },
        budget => Thinking { enabled, budget },
    }
}

impl ChatThinkingFields {
    /// The fields of `reasoning` win, but of two limits the smaller one holds.
    pub fn thinking(self) -> Thinking {
        let Self { reasoning_effort, reasoning, thinking_token_budget } = self;
        let effort = reasoning_effort.map(|effort| effort.thinks());
        let enabled = reasoning.as_ref().and_then(ReasoningOptions::enabled).or(effort);
        let budgets =
            reasoning.and_then(|reasoning| reasoning.max_tokens).into_iter().chain(thinking_token_budget);
        limited(enabled, budgets.min_by_key(|budget| budget.0))
    }
}

impl ReasoningOptions {
    pub fn thinking(self) -> Thinking {
        limited(self.enabled(), self.max_tokens)
    }

    fn enabled(&self) -> Option<bool> {
        self.enabled.or(self.effort.as_ref().map(Effort::thinks))
    }
}

impl ThinkingParam {
    pub fn thinking(self) -> Thinking {
        limited(Some(self.r#type != ThinkingType::Disabled), self.budget_tokens)
    }
}
