//! The pieces of an answer with calls, and the tools that it may call.

use serde_json::Value;

use super::values::Types;

/// A piece of an answer: text, or a piece of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPiece {
    Text(String),
    Call(CallPiece),
}

impl AnswerPiece {
    /// The text of all pieces, and the pieces of calls.
    pub fn divide(pieces: Vec<Self>) -> (String, Vec<CallPiece>) {
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Self::Text(more) => text.push_str(&more),
                Self::Call(call) => calls.push(call),
            }
        }
        (text, calls)
    }
}

/// A piece of a call. `index` counts calls from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallPiece {
    /// The next call has begun.
    Name { index: usize, name: String },
    /// More of the JSON of its parameters; never empty.
    Parameters { index: usize, json: String },
}

/// A tool as the reader knows it: its name, and the types of its arguments.
#[derive(Debug, Clone)]
pub(super) struct KnownTool {
    pub name: String,
    parameters: Value,
}

impl KnownTool {
    pub fn new(name: &str, parameters: &Value) -> Self {
        Self { name: name.to_owned(), parameters: parameters.clone() }
    }

    /// The types that the argument `key` may have.
    pub fn types(&self, key: &str) -> Types {
        let named = self.parameters.get("properties").and_then(|properties| properties.get(key));
        named.map_or(Types::ANY, |schema| Types::of(schema, &self.parameters))
    }
}

/// What was read and is not yet returned.
#[derive(Debug, Clone, Default)]
pub(super) struct Pieces {
    list: Vec<AnswerPiece>,
    /// The number of calls that have begun.
    calls: usize,
}

impl Pieces {
    /// The number of calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// What was read since the last call of this function.
    pub fn take(&mut self) -> Vec<AnswerPiece> {
        std::mem::take(&mut self.list)
    }

    pub fn call(&mut self, name: &str) {
        self.list.push(AnswerPiece::Call(CallPiece::Name { index: self.calls, name: name.to_owned() }));
        self.calls += 1;
    }

    /// More of the arguments of the last call.
    pub fn json(&mut self, more: &str) {
        match self.list.last_mut() {
            _ if more.is_empty() => {}
            Some(AnswerPiece::Call(CallPiece::Parameters { json, .. })) => json.push_str(more),
            _ => {
                let piece = CallPiece::Parameters { index: self.calls - 1, json: more.to_owned() };
                self.list.push(AnswerPiece::Call(piece));
            }
        }
    }

    /// More of a text within the arguments of the last call.
    pub fn quoted(&mut self, text: &str) {
        let json = Value::from(text).to_string();
        self.json(&json[1..json.len() - 1]);
    }

    pub fn text(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPiece::Text(before)) => before.push_str(text),
            _ => self.list.push(AnswerPiece::Text(text.to_owned())),
        }
    }
}
