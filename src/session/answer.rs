//! Turns the engine's events into the text of an answer.

use std::sync::Arc;

use super::error::SessionError;
use super::images::HeldImages;
use super::mask::Failure;
use crate::engine::{Event, FinishReason, Timings};
use crate::model::Logprobs;
use crate::text::{
    AnswerPiece, AnswerReader, CallFormat, CallPiece, CallReader, Detokenizer, StopMatcher, ThoughtStart,
    ThoughtTokens,
};

/// Turns token events into text. The text never ends in the middle of a character, and never has any byte of a stop
/// string.
#[derive(Clone)]
pub struct AnswerText {
    reader: AnswerReader,
    /// The number of tokens of thoughts until now.
    thought_n: usize,
    /// Finds stop strings in the text. Thoughts and marked calls may have them.
    stops: StopMatcher,
    /// Extracts tool calls without control tokens from the text. `None` if the model makes none.
    calls: Option<CallReader>,
    /// Set if the answer cannot follow its grammar any longer.
    failure: Option<Failure>,
    /// The room of the prompt's images, which are held until the last answer has ended.
    _images: Option<Arc<HeldImages>>,
}

/// What one event adds to an answer, or the sum of several events ([`Delta::append`]).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Delta {
    /// The index of the answer among the answers to the request.
    pub choice: usize,
    /// More of a thought, which comes before the text.
    pub thought: String,
    /// New text, which may be empty.
    pub text: String,
    /// New pieces of tool calls, after the text.
    pub calls: Vec<CallPiece>,
    /// Token ids: tokens of the answer, or the stop id that ended it.
    pub ids: Vec<u32>,
    /// The tokens of the text with their log probabilities, if requested. A token's text may be in a later delta.
    pub logprobs: Vec<(u32, Logprobs)>,
    /// The stop id that ended the answer with its log probabilities, if requested. It is not part of the answer.
    pub stop: Option<(u32, Logprobs)>,
    /// Log probabilities of all ids of the prompt except the first, if requested. They are in the prompt's first delta.
    pub prompt: Option<Vec<Logprobs>>,
    /// Why the answer ended; set in its last delta. The caller may then stop this answer in the engine.
    pub end: Option<Reason>,
    /// The index of the stop string that ended the answer, if one did.
    pub stopped_by: Option<usize>,
    /// The timings up to this delta.
    pub timings: Timings,
}

impl Delta {
    /// Adds the next delta of the same answer.
    pub fn append(&mut self, next: Self) {
        self.thought.push_str(&next.thought);
        self.text.push_str(&next.text);
        for piece in next.calls {
            match (self.calls.last_mut(), piece) {
                (
                    Some(CallPiece::Parameters { index, json }),
                    CallPiece::Parameters { index: same, json: more },
                ) if *index == same => json.push_str(&more),
                (_, piece) => self.calls.push(piece),
            }
        }
        self.ids.extend(next.ids);
        self.logprobs.extend(next.logprobs);
        self.stop = self.stop.take().or(next.stop);
        self.prompt = self.prompt.take().or(next.prompt);
        (self.choice, self.end, self.stopped_by, self.timings) =
            (next.choice, next.end, next.stopped_by, next.timings);
    }
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

impl AnswerText {
    pub fn new(detokenizer: Detokenizer, stops: StopMatcher) -> Self {
        let reader = AnswerReader::new(detokenizer);
        Self { reader, thought_n: 0, stops, calls: None, failure: None, _images: None }
    }

    /// Holds the room of the prompt's images as long as this value or a copy of it lives.
    #[must_use]
    pub(super) fn with_images(self, images: Option<HeldImages>) -> Self {
        Self { _images: images.map(Arc::new), ..self }
    }

    /// The answer is a text of its own. Otherwise it continues the prompt's text.
    pub(super) fn at_start(self) -> Self {
        Self { reader: self.reader.at_start(), ..self }
    }

    /// The answer may have thoughts, and begins there.
    pub(super) fn with_thoughts(self, tokens: ThoughtTokens, start: ThoughtStart) -> Self {
        Self { reader: self.reader.with_thoughts(tokens, start), ..self }
    }

    /// Extracts calls of these tools, which are between control tokens.
    pub(super) fn with_marked_calls<'a>(
        self,
        format: &CallFormat,
        tools: impl IntoIterator<Item = (&'a str, &'a serde_json::Value)>,
    ) -> Self {
        Self { reader: self.reader.with_calls(format, tools), ..self }
    }

    /// Extracts tool calls from the text.
    pub(super) fn with_calls(self, calls: CallReader) -> Self {
        Self { calls: Some(calls), ..self }
    }

    /// If `failure` is set, the answer ends with that error.
    pub(super) fn with_failure(self, failure: Failure) -> Self {
        Self { failure: Some(failure), ..self }
    }

    /// Adds an event of the answer. An error ends the answer.
    pub fn push(&mut self, event: Event) -> Result<Delta, SessionError> {
        let choice = event.choice().unwrap_or(0);
        Ok(match event {
            Event::Prompt { logprobs } => Delta { choice, prompt: Some(logprobs), ..Delta::default() },
            Event::Token { id, logprobs, mut timings, .. } => {
                let spoken = self.reader.push(id);
                self.thought_n += usize::from(spoken.is_thought);
                let mut stopped = self.stops.push(&spoken.text);
                if spoken.is_call && stopped.stop.is_none() {
                    // No stop string continues after the token that opens a call.
                    stopped.text.push_str(&self.stops.pause());
                }
                let (text, mut calls) = self.read(stopped.text, stopped.stop.is_some());
                if stopped.stop.is_none() {
                    calls.extend(spoken.calls);
                }
                let end = stopped.stop.map(|_| self.end(Reason::Stop)).transpose()?;
                let is_text = !spoken.is_thought && !spoken.is_call;
                let logprobs = logprobs.filter(|_| is_text).map(|logprobs| (id, logprobs));
                let stopped_by = self.stops.found();
                timings.thought_n = self.thought_n;
                Delta {
                    choice,
                    thought: spoken.thought,
                    text,
                    calls,
                    ids: vec![id],
                    logprobs: logprobs.into_iter().collect(),
                    end,
                    stopped_by,
                    timings,
                    ..Delta::default()
                }
            }
            Event::Finished { reason, stop, mut timings, .. } => {
                timings.thought_n = self.thought_n;
                let ids = match reason {
                    FinishReason::Stop(id) => vec![id],
                    FinishReason::Length => Vec::new(),
                };
                let mut reason = Reason::from(reason);
                let spoken = self.reader.finish();
                let stopped = self.stops.push(&spoken.text);
                let mut text = stopped.text;
                match stopped.stop {
                    Some(_) => reason = Reason::Stop,
                    None => text.push_str(&self.stops.finish()),
                }
                let (text, mut calls) = self.read(text, true);
                calls.extend(spoken.calls);
                let (end, stopped_by) = (Some(self.end(reason)?), self.stops.found());
                Delta {
                    choice,
                    thought: spoken.thought,
                    text,
                    calls,
                    ids,
                    stop,
                    end,
                    stopped_by,
                    timings,
                    ..Delta::default()
                }
            }
            Event::Pooled { .. } => Delta { choice, ..Delta::default() },
            Event::Failed(error) => return Err(error.into()),
        })
    }

    /// Splits new text into plain text and pieces of tool calls. `last`: whether the answer ends with this text.
    fn read(&mut self, text: String, last: bool) -> (String, Vec<CallPiece>) {
        let Some(reader) = &mut self.calls else { return (text, Vec::new()) };
        let mut pieces = reader.push(&text);
        if last {
            pieces.extend(reader.finish());
        }
        AnswerPiece::divide(pieces)
    }

    fn end(&self, reason: Reason) -> Result<Reason, SessionError> {
        if let Some(problem) = self.failure.as_ref().and_then(|failure| failure.get()) {
            return Err(SessionError::Grammar(problem.clone()));
        }
        let called = self.reader.called() || self.calls.as_ref().is_some_and(CallReader::called);
        Ok(if reason == Reason::Stop && called { Reason::Called } else { reason })
    }
}
