//! From the engine's events to the text of an answer.

use super::grammar::Failure;
use crate::engine::{EngineError, Event, FinishReason, Timings};
use crate::model::Logprobs;
use crate::text::{Detokenizer, StopMatcher};

/// Turns token events into text that never holds half a character, nor any byte of a stop string.
#[derive(Clone)]
pub struct AnswerText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Set where it ended because its grammar could not be followed.
    failure: Option<Failure>,
}

/// What one event adds to the answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// May be empty.
    pub text: String,
    /// The token that the event brought, where log probabilities were asked for; its text may come later.
    pub logprobs: Option<(u32, Logprobs)>,
    /// Those of the prompt's ids but the first, where they were asked for: before anything else.
    pub prompt: Option<Vec<Logprobs>>,
    /// Set where this is the last of it; the engine need not go on with this answer then.
    pub end: Option<End>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum End {
    Finished {
        reason: FinishReason,
        timings: Timings,
    },
    Failed(EngineError),
    /// Its grammar could not be followed any further, and why.
    OffGrammar(String),
}

impl AnswerText {
    pub fn new(detokenizer: Detokenizer, stops: StopMatcher) -> Self {
        Self { detokenizer, stops, failure: None }
    }

    /// Of an answer that is held to a grammar.
    pub(super) fn with_failure(self, failure: Failure) -> Self {
        Self { failure: Some(failure), ..self }
    }

    pub fn push(&mut self, event: Event) -> Delta {
        match event {
            Event::Prompt { logprobs } => {
                Delta { text: String::new(), logprobs: None, prompt: Some(logprobs), end: None }
            }
            Event::Token { id, logprobs, timings, .. } => {
                let stopped = self.stops.push(self.detokenizer.push(id));
                let reason = FinishReason::Stop;
                let end = stopped.stop.map(|_| End::Finished { reason, timings });
                Delta {
                    text: stopped.text,
                    logprobs: logprobs.map(|logprobs| (id, logprobs)),
                    prompt: None,
                    end,
                }
            }
            Event::Finished { mut reason, timings, .. } => {
                let stopped = self.stops.push(self.detokenizer.finish());
                let mut text = stopped.text;
                match stopped.stop {
                    Some(_) => reason = FinishReason::Stop,
                    None => text.push_str(&self.stops.finish()),
                }
                let failed = self.failure.as_ref().and_then(|failure| failure.get());
                let end = match failed {
                    Some(problem) => End::OffGrammar(problem.clone()),
                    None => End::Finished { reason, timings },
                };
                Delta { text, logprobs: None, prompt: None, end: Some(end) }
            }
            Event::Failed(error) => {
                Delta { text: String::new(), logprobs: None, prompt: None, end: Some(End::Failed(error)) }
            }
        }
    }
}
