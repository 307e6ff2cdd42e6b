//! Separates the thoughts and the tool calls of an answer from its text, by token ids.
//!
//! A text that only spells the name of a control token stays text. The control tokens themselves are never part of a
//! thought, of the text or of a call. White space before a call, and around further calls, is part of the syntax.

use super::calls::{AnswerPiece, CallFormat, CallPiece, CallsReader};
use super::detokenizer::Detokenizer;
use super::thoughts::{ThoughtStart, ThoughtTokens, Thoughts};

/// The most white space that is held back because a call may follow.
const MAX_WHITE_BYTES: usize = 16;

/// What a token adds to an answer. The text comes before the calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spoken {
    pub thought: String,
    pub text: String,
    pub calls: Vec<CallPiece>,
    /// Whether the token belongs to a thought. The tokens around it do.
    pub is_thought: bool,
    /// Whether the token belongs to a call. The tokens around it do.
    pub is_call: bool,
}

/// Decodes an answer, and separates its thoughts and its calls from its text.
#[derive(Clone)]
pub struct AnswerReader {
    detokenizer: Detokenizer,
    thoughts: Option<Thoughts>,
    calls: Option<Calls>,
}

/// The calls of an answer.
#[derive(Clone)]
struct Calls {
    reader: CallsReader,
    /// The white space at the end of the text, which a call may follow. Always empty if there are no tools.
    white: String,
    /// Whether text came after a call. A grammar never allows it.
    has_text_after: bool,
}

impl AnswerReader {
    /// A reader of answers that are text only.
    pub fn new(detokenizer: Detokenizer) -> Self {
        Self { detokenizer, thoughts: None, calls: None }
    }

    /// The answer may have thoughts, and begins there.
    #[must_use]
    pub fn with_thoughts(self, tokens: ThoughtTokens, start: ThoughtStart) -> Self {
        Self { thoughts: Some(Thoughts::new(tokens, start)), ..self }
    }

    /// The answer may call tools with these names and parameters. Without effect for a format without control tokens:
    /// [`CallReader`](super::CallReader) reads such calls.
    #[must_use]
    pub fn with_calls<'a>(
        self,
        format: &CallFormat,
        tools: impl IntoIterator<Item = (&'a str, &'a serde_json::Value)>,
    ) -> Self {
        let calls = CallsReader::new(format, tools).map(|reader| Calls {
            reader,
            white: String::new(),
            has_text_after: false,
        });
        Self { calls, ..self }
    }

    /// The answer is a text of its own. Otherwise it continues the prompt's text.
    #[must_use]
    pub fn at_start(self) -> Self {
        Self { detokenizer: self.detokenizer.at_start(), ..self }
    }

    /// Whether the answer has calls, and the last one is complete.
    pub fn called(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| calls.reader.called())
    }

    /// Takes the next token.
    pub fn push(&mut self, id: u32) -> Spoken {
        match &self.calls {
            Some(calls) if calls.reader.tokens.open == id => return self.open_call(),
            Some(calls) if calls.reader.is_open() => return self.in_call(id),
            Some(calls) if calls.reader.tokens.all.contains(&id) => {
                // A control token in the wrong place is syntax too.
                return Spoken { is_thought: self.is_in_thought(), ..Spoken::default() };
            }
            _ => {}
        }
        let Some(thoughts) = &mut self.thoughts else {
            let text = self.detokenizer.push(id).to_owned();
            return self.said(text);
        };
        match id {
            _ if id == thoughts.tokens.open && !thoughts.is_inside => {
                let text = thoughts.text(self.detokenizer.finish());
                thoughts.open();
                Spoken { is_thought: true, ..self.said(text) }
            }
            _ if id == thoughts.tokens.close && thoughts.is_inside => {
                let thought = thoughts.close(self.detokenizer.finish());
                Spoken { thought, is_thought: true, ..Spoken::default() }
            }
            _ if [thoughts.tokens.open, thoughts.tokens.close].contains(&id) => {
                Spoken { is_thought: thoughts.is_inside, ..Spoken::default() }
            }
            _ if thoughts.is_inside => {
                let thought = thoughts.thought(self.detokenizer.push(id));
                Spoken { thought, is_thought: true, ..Spoken::default() }
            }
            _ => {
                let text = thoughts.text(self.detokenizer.push(id));
                self.said(text)
            }
        }
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Spoken {
        let rest = self.detokenizer.finish().to_owned();
        if let Some(calls) = self.calls.as_mut().filter(|calls| calls.reader.is_open()) {
            calls.reader.push(&rest);
            calls.reader.close(true);
            return calls.spoken();
        }
        let mut spoken = match &mut self.thoughts {
            Some(thoughts) if thoughts.is_inside => {
                Spoken { thought: thoughts.last_of_thought(&rest), is_thought: true, ..Spoken::default() }
            }
            Some(thoughts) => {
                let text = thoughts.text(&rest);
                self.said(text)
            }
            None => self.said(rest),
        };
        if let Some(calls) = self.calls.as_mut().filter(|calls| !calls.reader.has_calls()) {
            spoken.text.push_str(&std::mem::take(&mut calls.white));
        }
        spoken
    }

    fn is_in_thought(&self) -> bool {
        self.thoughts.as_ref().is_some_and(|thoughts| thoughts.is_inside)
    }

    /// Begins a call. It ends a thought, and a call that has no token at its end.
    fn open_call(&mut self) -> Spoken {
        let rest = self.detokenizer.finish().to_owned();
        let calls = self.calls.as_mut().expect("the answer may call");
        if calls.reader.is_open() {
            calls.reader.push(&rest);
            calls.reader.close(false);
            calls.reader.open();
            return calls.spoken();
        }
        let mut before = match &mut self.thoughts {
            Some(thoughts) if thoughts.is_inside => {
                Spoken { thought: thoughts.close(&rest), ..Spoken::default() }
            }
            Some(thoughts) => {
                let text = thoughts.text(&rest);
                self.said(text)
            }
            None => self.said(rest),
        };
        let calls = self.calls.as_mut().expect("the answer may call");
        calls.white.clear();
        calls.reader.open();
        before.is_call = true;
        before
    }

    /// Takes a token within a call.
    fn in_call(&mut self, id: u32) -> Spoken {
        let calls = self.calls.as_mut().expect("a call is open");
        let tokens = &calls.reader.tokens;
        if tokens.close == Some(id) {
            calls.reader.push(self.detokenizer.finish());
            calls.reader.close(false);
        } else if tokens.mark == Some(id) {
            calls.reader.push(self.detokenizer.finish());
            calls.reader.mark();
        } else if tokens.call_id == Some(id) {
            calls.reader.push(self.detokenizer.finish());
            calls.reader.call_id();
        } else if !tokens.all.contains(&id) {
            calls.reader.push(self.detokenizer.push(id));
        }
        calls.spoken()
    }

    /// More text, without the white space that may come before a call.
    fn said(&mut self, text: String) -> Spoken {
        let Some(calls) = &mut self.calls else { return Spoken { text, ..Spoken::default() } };
        if calls.reader.has_calls() {
            let text = if calls.has_text_after { text } else { text.trim_start().to_owned() };
            calls.has_text_after |= !text.is_empty();
            return Spoken { text, ..Spoken::default() };
        }
        if !calls.reader.has_tools() {
            return Spoken { text, ..Spoken::default() };
        }
        calls.white.push_str(&text);
        let mut white = calls.white.split_off(calls.white.trim_end().len());
        if white.len() > MAX_WHITE_BYTES {
            calls.white.push_str(&std::mem::take(&mut white));
        }
        Spoken { text: std::mem::replace(&mut calls.white, white), ..Spoken::default() }
    }
}

impl Calls {
    /// What the reader of calls has read.
    fn spoken(&mut self) -> Spoken {
        let (text, calls) = AnswerPiece::divide(self.reader.take());
        Spoken { text, calls, is_call: true, ..Spoken::default() }
    }
}
