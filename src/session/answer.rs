//! Turns the engine's events into the text of an answer.

use super::mask::Failure;
use crate::engine::{EngineError, Event, FinishReason, Timings};
use crate::model::Logprobs;
use crate::text::{AnswerPiece, CallPiece, CallReader, Detokenizer, StopMatcher};

/// Turns token events into text. The text never ends in the middle of a character, and never has any byte of a stop
/// string.
#[derive(Clone)]
pub struct AnswerText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Extracts tool calls from the text. `None` if the model may not call tools.
    calls: Option<CallReader>,
    /// Set if the answer cannot follow its grammar any longer.
    failure: Option<Failure>,
}

/// What one event adds to the answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// New text, which may be empty.
    pub text: String,
    /// New pieces of tool calls; empty if there is text.
    pub calls: Vec<CallPiece>,
    /// The event's token id: a token of the answer, or the stop id that ended it.
    pub id: Option<u32>,
    /// The event's token with its log probabilities, if requested. The token's text may be in a later delta.
    pub logprobs: Option<(u32, Logprobs)>,
    /// The stop id that ended the answer with its log probabilities, if requested. It is not part of the answer.
    pub stop: Option<(u32, Logprobs)>,
    /// Log probabilities of all ids of the prompt except the first, if requested. They are in the first delta.
    pub prompt: Option<Vec<Logprobs>>,
    /// How the answer ended; set in its last delta. The caller may then stop this answer in the engine.
    pub end: Option<End>,
}

/// Why an answer is complete. All code above the engine uses this type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The model ended the answer, or a stop string was found.
    Stop,
    /// The maximum number of tokens or the end of the context was reached.
    Length,
    /// The answer calls tools, which the client must run now.
    Called,
}

impl From<FinishReason> for Reason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop(_) => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }
}

impl Reason {
    /// OpenAI's `finish_reason`. Metrics and the log use the same names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Called => "tool_calls",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum End {
    Finished {
        reason: Reason,
        timings: Timings,
    },
    Failed(EngineError),
    /// The answer could not follow its grammar any longer. The text is the reason.
    OffGrammar(String),
}

impl AnswerText {
    pub fn new(detokenizer: Detokenizer, stops: StopMatcher) -> Self {
        Self { detokenizer, stops, calls: None, failure: None }
    }

    /// Extracts tool calls from the text.
    pub(super) fn with_calls(self, calls: CallReader) -> Self {
        Self { calls: Some(calls), ..self }
    }

    /// If `failure` is set, the answer ends with that error.
    pub(super) fn with_failure(self, failure: Failure) -> Self {
        Self { failure: Some(failure), ..self }
    }

    /// The index of the stop string that ended the answer, if one did.
    pub fn stopped_by(&self) -> Option<usize> {
        self.stops.found()
    }

    pub fn push(&mut self, event: Event) -> Delta {
        let nothing = Delta {
            text: String::new(),
            calls: Vec::new(),
            id: None,
            logprobs: None,
            stop: None,
            prompt: None,
            end: None,
        };
        match event {
            Event::Prompt { logprobs } => Delta { prompt: Some(logprobs), ..nothing },
            Event::Token { id, logprobs, timings, .. } => {
                let stopped = self.stops.push(self.detokenizer.push(id));
                let (text, calls) = self.read(stopped.text, stopped.stop.is_some());
                let end = stopped.stop.map(|_| self.end(Reason::Stop, timings));
                let logprobs = logprobs.map(|logprobs| (id, logprobs));
                Delta { text, calls, id: Some(id), logprobs, end, ..nothing }
            }
            Event::Finished { reason, stop, timings, .. } => {
                let id = match reason {
                    FinishReason::Stop(id) => Some(id),
                    FinishReason::Length => None,
                };
                let mut reason = Reason::from(reason);
                let stopped = self.stops.push(self.detokenizer.finish());
                let mut text = stopped.text;
                match stopped.stop {
                    Some(_) => reason = Reason::Stop,
                    None => text.push_str(&self.stops.finish()),
                }
                let (text, calls) = self.read(text, true);
                Delta { text, calls, id, stop, end: Some(self.end(reason, timings)), ..nothing }
            }
            Event::Pooled { .. } => nothing,
            Event::Failed(error) => Delta { end: Some(End::Failed(error)), ..nothing },
        }
    }

    /// Splits new text into plain text and pieces of tool calls. `last`: whether the answer ends with this text.
    fn read(&mut self, text: String, last: bool) -> (String, Vec<CallPiece>) {
        let Some(reader) = &mut self.calls else { return (text, Vec::new()) };
        let mut pieces = reader.push(&text);
        if last {
            pieces.extend(reader.finish());
        }
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                AnswerPiece::Text(more) => text.push_str(&more),
                AnswerPiece::Call(call) => calls.push(call),
            }
        }
        (text, calls)
    }

    fn end(&self, reason: Reason, timings: Timings) -> End {
        if let Some(problem) = self.failure.as_ref().and_then(|failure| failure.get()) {
            return End::OffGrammar(problem.clone());
        }
        let called = self.calls.as_ref().is_some_and(CallReader::called);
        let reason = if reason == Reason::Stop && called { Reason::Called } else { reason };
        End::Finished { reason, timings }
    }
}
