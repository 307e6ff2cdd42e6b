//! From the engine's events to the text of an answer.

use crate::engine::{EngineError, Event, FinishReason, Timings};
use crate::text::{Detokenizer, StopMatcher};

/// Turns token events into text that never holds half a character, nor any byte of a stop string.
pub struct AnswerText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
}

/// What one event adds to the answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// May be empty.
    pub text: String,
    /// Set where this is the last of it; the engine's stream should be dropped then.
    pub end: Option<End>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum End {
    Finished { reason: FinishReason, timings: Timings },
    Failed(EngineError),
}

impl AnswerText {
    pub fn new(detokenizer: Detokenizer, stops: StopMatcher) -> Self {
        Self { detokenizer, stops }
    }

    pub fn push(&mut self, event: Event) -> Delta {
        match event {
            Event::Token { id, timings, .. } => {
                let stopped = self.stops.push(self.detokenizer.push(id));
                let reason = FinishReason::Stop;
                Delta { text: stopped.text, end: stopped.stop.map(|_| End::Finished { reason, timings }) }
            }
            Event::Finished { mut reason, timings, .. } => {
                let stopped = self.stops.push(self.detokenizer.finish());
                let mut text = stopped.text;
                match stopped.stop {
                    Some(_) => reason = FinishReason::Stop,
                    None => text.push_str(&self.stops.finish()),
                }
                Delta { text, end: Some(End::Finished { reason, timings }) }
            }
            Event::Failed(error) => Delta { text: String::new(), end: Some(End::Failed(error)) },
        }
    }
}
