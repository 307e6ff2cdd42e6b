//! Tool calls in a stream of text: `{"name": NAME, "parameters": {...}}`, or an array of such objects. Some models call the
//! parameters `arguments`.
//!
//! An answer consists of calls only, or it is text. The reader decides this when it has seen the name of a tool and the
//! opening brace of its parameters. Until then it holds everything back. If the answer turns out to be text, the reader
//! returns what it held back as text. White space is allowed wherever JSON allows it. The JSON of parameters is
//! returned unchanged.

use super::pieces::{AnswerPiece, CallPiece};

/// Separates calls from text in a stream, in O(1) per byte.
#[derive(Debug, Clone)]
pub struct CallReader {
    names: Vec<String>,
    /// The key of the parameters.
    parameters: &'static str,
    state: State,
    /// Text held back because it may be the start of a call.
    pending: String,
    /// The tool of the call that is being read.
    name: String,
    /// Number of calls that have begun.
    calls: usize,
}

#[derive(Debug, Clone, PartialEq)]
enum State {
    /// Only white space has arrived.
    Start,
    /// The answer is text, and so is everything that follows.
    Text,
    /// Before a call, between two calls, or after the last call.
    Outside,
    BeforeKey,
    /// Inside a string. `json` is the read part of the string with its opening quote. `key`: it is a key, not a value.
    Quoted {
        json: String,
        escaped: bool,
        key: bool,
    },
    Colon {
        key: String,
    },
    Value {
        key: String,
    },
    Parameters(Nesting),
    AfterValue,
}

/// A position in JSON.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Nesting {
    /// The number of open objects and arrays.
    depth: usize,
    is_quoted: bool,
    is_escaped: bool,
}

impl Nesting {
    /// Takes the next character. Returns whether it closes the outermost object or array.
    pub fn closes(&mut self, c: char) -> bool {
        match c {
            _ if self.is_escaped => self.is_escaped = false,
            '\\' if self.is_quoted => self.is_escaped = true,
            '"' => self.is_quoted = !self.is_quoted,
            '{' | '[' if !self.is_quoted => self.depth += 1,
            '}' | ']' if !self.is_quoted => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

impl CallReader {
    /// A reader for answers that may call the tools with these names.
    pub fn new(names: Vec<String>) -> Self {
        Self::with(names, "parameters")
    }

    /// Like [`Self::new`], with another key of the parameters.
    pub(super) fn with(names: Vec<String>, parameters: &'static str) -> Self {
        Self { names, parameters, state: State::Start, pending: String::new(), name: String::new(), calls: 0 }
    }

    /// Whether the answer contained calls, and all of them are complete.
    pub fn called(&self) -> bool {
        self.calls > 0 && self.state == State::Outside
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        let mut pieces = Vec::new();
        for (at, c) in text.char_indices() {
            if self.state == State::Text {
                pieces.push(AnswerPiece::Text(text[at..].to_owned()));
                break;
            }
            if self.calls == 0 {
                self.pending.push(c);
            }
            match self.step(c, &mut pieces) {
                Some(next) => self.state = next,
                // After the first call, the grammar allows only more calls.
                None if self.calls > 0 => self.state = State::Outside,
                None => {
                    self.state = State::Text;
                    pieces.push(AnswerPiece::Text(std::mem::take(&mut self.pending)));
                }
            }
        }
        pieces
    }

    /// Ends the answer. Returns the text that was held back and did not become a call.
    pub fn finish(&mut self) -> Option<AnswerPiece> {
        let pending = std::mem::take(&mut self.pending);
        (!pending.is_empty()).then_some(AnswerPiece::Text(pending))
    }

    /// The state after `c`, or `None` if no call can continue with `c`.
    fn step(&mut self, c: char, pieces: &mut Vec<AnswerPiece>) -> Option<State> {
        let blank = matches!(c, ' ' | '\n' | '\r' | '\t');
        match std::mem::replace(&mut self.state, State::Outside) {
            State::Text => Some(State::Text),
            State::Start => match c {
                '[' => Some(State::Outside),
                '{' => Some(State::BeforeKey),
                _ => blank.then_some(State::Start),
            },
            State::Outside => match c {
                '{' => Some(State::BeforeKey),
                _ => (blank || matches!(c, ',' | ']')).then_some(State::Outside),
            },
            State::BeforeKey if blank => Some(State::BeforeKey),
            State::BeforeKey => {
                (c == '"').then(|| State::Quoted { json: c.into(), escaped: false, key: true })
            }
            State::Quoted { mut json, escaped, key } => {
                json.push(c);
                if escaped || c != '"' {
                    return Some(State::Quoted { json, escaped: !escaped && c == '\\', key });
                }
                let text: String = serde_json::from_str(&json).ok()?;
                if key {
                    return Some(State::Colon { key: text });
                }
                self.name = text;
                self.names.contains(&self.name).then_some(State::AfterValue)
            }
            State::Colon { key } if blank => Some(State::Colon { key }),
            State::Colon { key } => (c == ':').then_some(State::Value { key }),
            State::Value { key } if blank => Some(State::Value { key }),
            State::Value { key } => match (key.as_str(), c) {
                ("name", '"') => Some(State::Quoted { json: c.into(), escaped: false, key: false }),
                (key, '{') if key == self.parameters && !self.name.is_empty() => {
                    let index = self.calls;
                    let name = std::mem::take(&mut self.name);
                    pieces.push(AnswerPiece::Call(CallPiece::Name { index, name }));
                    self.calls += 1;
                    self.pending.clear();
                    self.parameter(c, pieces);
                    let mut nesting = Nesting::default();
                    nesting.closes(c);
                    Some(State::Parameters(nesting))
                }
                _ => None,
            },
            State::Parameters(mut nesting) => {
                self.parameter(c, pieces);
                Some(if nesting.closes(c) { State::AfterValue } else { State::Parameters(nesting) })
            }
            State::AfterValue => match c {
                ',' => Some(State::BeforeKey),
                '}' if self.calls > 0 => Some(State::Outside),
                _ => blank.then_some(State::AfterValue),
            },
        }
    }

    fn parameter(&mut self, c: char, pieces: &mut Vec<AnswerPiece>) {
        if let Some(AnswerPiece::Call(CallPiece::Parameters { json, .. })) = pieces.last_mut() {
            return json.push(c);
        }
        pieces.push(AnswerPiece::Call(CallPiece::Parameters { index: self.calls - 1, json: c.into() }));
    }
}

/// Completes the JSON of parameters that were cut off. Members without a value and values that may be incomplete are
/// dropped. Open objects and arrays are closed. Without any JSON, there are no parameters.
pub fn whole_parameters(json: &str) -> String {
    if json.trim().is_empty() {
        return "{}".to_owned();
    }
    // `end` is the byte after the last complete value, or after the opening bracket if no value follows it.
    let mut end = 0;
    let mut open = Vec::new();
    let (mut quoted, mut escaped, mut member_name) = (false, false, false);
    for (at, c) in json.char_indices() {
        if quoted {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    quoted = false;
                    if !member_name {
                        end = at + 1;
                    }
                }
                _ => {}
            }
            continue;
        }
        match c {
            '"' => quoted = true,
            ':' => member_name = false,
            ',' => {
                end = at;
                member_name = open.last() == Some(&'}');
            }
            '{' | '[' => {
                open.push(if c == '{' { '}' } else { ']' });
                end = at + 1;
                member_name = c == '{';
            }
            '}' | ']' => {
                open.pop();
                end = at + 1;
            }
            _ => {}
        }
    }
    json[..end].chars().chain(open.into_iter().rev()).collect()
}
