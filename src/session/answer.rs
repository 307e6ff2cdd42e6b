//! From the engine's events to the text of an answer.

use super::grammar::Failure;
use crate::engine::{EngineError, Event, FinishReason, Timings};
use crate::model::Logprobs;
use crate::text::{CallPiece, CallReader, Detokenizer, Said, StopMatcher};

/// Turns token events into text that never holds half a character, nor any byte of a stop string.
#[derive(Clone)]
pub struct AnswerText {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Where it may call tools.
    calls: Option<CallReader>,
    /// Set where it ended because its grammar could not be followed.
    failure: Option<Failure>,
}

/// What one event adds to the answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// May be empty.
    pub text: String,
    /// Pieces of calls of tools; none where there is text.
    pub calls: Vec<CallPiece>,
    /// The token that the event brought, where log probabilities were asked for; its text may come later.
    pub logprobs: Option<(u32, Logprobs)>,
    /// The token that ended the answer and is none of it, likewise.
    pub stop: Option<(u32, Logprobs)>,
    /// Log probabilities of the prompt's ids but the first, where they were asked for. They come before anything else.
    pub prompt: Option<Vec<Logprobs>>,
    /// Set where this is the last of it; the engine need not go on with this answer then.
    pub end: Option<End>,
}

/// Why an answer is whole: the one type that says so above the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The model ended it, or a stop string did.
    Stop,
    /// No more tokens were wanted, or fit.
    Length,
    /// It calls tools, which are to be asked now.
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
    /// OpenAI's word for it, which metrics and the log use too.
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
    /// Its grammar could not be followed any further, and why.
    OffGrammar(String),
}

impl AnswerText {
    pub fn new(detokenizer: Detokenizer, stops: StopMatcher) -> Self {
        Self { detokenizer, stops, calls: None, failure: None }
    }

    /// Makes it the text of an answer that may call tools.
    pub(super) fn with_calls(self, calls: CallReader) -> Self {
        Self { calls: Some(calls), ..self }
    }

    /// Makes it the text of an answer that is held to a grammar.
    pub(super) fn with_failure(self, failure: Failure) -> Self {
        Self { failure: Some(failure), ..self }
    }

    /// Index of the stop string that ended it, if one did.
    pub fn stopped_by(&self) -> Option<usize> {
        self.stops.found()
    }

    pub fn push(&mut self, event: Event) -> Delta {
        let nothing = Delta {
            text: String::new(),
            calls: Vec::new(),
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
                Delta { text, calls, logprobs: logprobs.map(|logprobs| (id, logprobs)), end, ..nothing }
            }
            Event::Finished { reason, stop, timings, .. } => {
                let mut reason = Reason::from(reason);
                let stopped = self.stops.push(self.detokenizer.finish());
                let mut text = stopped.text;
                match stopped.stop {
                    Some(_) => reason = Reason::Stop,
                    None => text.push_str(&self.stops.finish()),
                }
                let (text, calls) = self.read(text, true);
                Delta { text, calls, stop, end: Some(self.end(reason, timings)), ..nothing }
            }
            Event::Pooled { .. } => nothing,
            Event::Failed(error) => Delta { end: Some(End::Failed(error)), ..nothing },
        }
    }

    /// Tells calls from text, where there may be calls.
    fn read(&mut self, text: String, last: bool) -> (String, Vec<CallPiece>) {
        let Some(reader) = &mut self.calls else { return (text, Vec::new()) };
        let mut said = reader.push(&text);
        if last {
            said.extend(reader.finish());
        }
        let (mut text, mut calls) = (String::new(), Vec::new());
        for said in said {
            match said {
                Said::Text(more) => text.push_str(&more),
                Said::Call(call) => calls.push(call),
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
