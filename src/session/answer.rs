//! Turns the engine's events into the text of an answer.

use super::mask::Failure;
use crate::engine::{EngineError, Event, FinishReason, Timings};
use crate::model::Logprobs;
use crate::text::{AnswerPiece, CallPiece, CallReader, Detokenizer, StopMatcher};

/// Turns token events into text that never holds half a character, nor any byte of a stop string.
#[derive(Clone)]
pub struct AnswerText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Parses tool calls out of the text; none if the request has no tools that the model may call.
    calls: Option<CallReader>,
    /// Set once the answer could not be held to its grammar any further.
    failure: Option<Failure>,
}

/// What one event adds to the answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// New text, which may be empty.
    pub text: String,
    /// New pieces of tool calls; empty if there is text.
    pub calls: Vec<CallPiece>,
    /// The event's token id, of the answer or the one that ended it.
    pub id: Option<u32>,
    /// The event's token with its log probabilities, if the request asks for them. The token's text may come with a
    /// later delta.
    pub logprobs: Option<(u32, Logprobs)>,
    /// The token that ended the answer and is no part of it, with its log probabilities, if the request asks for them.
    pub stop: Option<(u32, Logprobs)>,
    /// Log probabilities of all the prompt's ids but the first, if the request asks for them. They come before anything
    /// else.
    pub prompt: Option<Vec<Logprobs>>,
    /// Why the answer ended; set in its last delta. The engine may stop this answer then.
    pub end: Option<End>,
}

/// Why an answer is complete. Above the engine, no other type says this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The model ended the answer, or a stop string was found.
    Stop,
    /// The limit of tokens or the context was reached.
    Length,
    /// The answer calls tools, which the client is to run now.
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
    /// OpenAI's `finish_reason`, which metrics and the log use too.
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
    /// The answer could not be held to its grammar any further; the text says why.
    OffGrammar(String),
}

impl AnswerText {
    pub fn new(detokenizer: Detokenizer, stops: StopMatcher) -> Self {
        Self { detokenizer, stops, calls: None, failure: None }
    }

    /// Parses tool calls out of the text.
    pub(super) fn with_calls(self, calls: CallReader) -> Self {
        Self { calls: Some(calls), ..self }
    }

    /// Ends the answer with an error once `failure` is set.
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

    /// Splits new text into plain text and pieces of tool calls. `last` is whether the answer ends with this text.
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
