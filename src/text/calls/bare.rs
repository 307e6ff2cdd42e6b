//! The body of a call with bare keys: `call:NAME{key:value,...}`. Texts are between control tokens and have no escapes.
//! Numbers, `true`, `false`, `null`, objects and lists are as in JSON, but the keys of objects have no quotes.
//!
//! The arguments become JSON as they arrive. A call that ends early with its control token is completed: an open text,
//! object or list is closed, and a missing value is null.

use serde_json::Value;

use super::pieces::{KnownTool, Pieces};

/// Reads one call.
#[derive(Debug, Clone, Default)]
pub(super) struct BareBody {
    at: At,
    /// The beginning of the call, of a key, or of a value without quotes.
    held: String,
    open: Vec<Open>,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum At {
    /// Before the brace that opens the arguments.
    #[default]
    Name,
    Key,
    Value,
    Text,
    /// In a value without quotes.
    Word,
    AfterValue,
    End,
}

/// An open object or list.
#[derive(Debug, Clone, Copy)]
struct Open {
    is_object: bool,
    has_members: bool,
}

impl BareBody {
    /// Takes text. Returns the text of the call if it is not a call of a known tool.
    pub fn push(&mut self, text: &str, tools: &[KnownTool], pieces: &mut Pieces) -> Option<String> {
        if self.at == At::Text {
            pieces.quoted(text);
            return None;
        }
        for (at, c) in text.char_indices() {
            if self.at != At::Name {
                self.take(c, pieces);
                continue;
            }
            if c != '{' {
                self.held.push(c);
                continue;
            }
            let name = self.held.trim().strip_prefix("call:").map(str::trim).unwrap_or_default();
            if !tools.iter().any(|tool| tool.name == name) {
                return Some(std::mem::take(&mut self.held) + &text[at..]);
            }
            pieces.call(name);
            self.held.clear();
            self.begin(true, pieces);
        }
        None
    }

    /// Takes the control token around texts.
    pub fn quote(&mut self, pieces: &mut Pieces) {
        match self.at {
            At::Value => {
                self.separate(pieces);
                pieces.json("\"");
                self.at = At::Text;
            }
            At::Text => {
                pieces.json("\"");
                self.at = At::AfterValue;
            }
            At::Name | At::Key | At::Word | At::AfterValue | At::End => {}
        }
    }

    /// What has arrived of a call whose tool is not known yet. `None` = the tool is known.
    pub fn unnamed(&mut self) -> Option<String> {
        (self.at == At::Name).then(|| std::mem::take(&mut self.held))
    }

    /// Ends the call. Returns whether its arguments are complete.
    pub fn close(mut self, cut: bool, pieces: &mut Pieces) -> bool {
        match self.at {
            At::Name => return false,
            At::End => return true,
            _ if cut => return false,
            At::Text => pieces.json("\""),
            At::Word => self.end_word(pieces),
            At::Value if self.open.last().is_some_and(|open| open.is_object) => pieces.json("null"),
            At::Key | At::Value | At::AfterValue => {}
        }
        while let Some(open) = self.open.pop() {
            pieces.json(if open.is_object { "}" } else { "]" });
        }
        true
    }

    fn take(&mut self, c: char, pieces: &mut Pieces) {
        match self.at {
            At::Key => match c {
                ':' => {
                    self.separate(pieces);
                    let key = std::mem::take(&mut self.held);
                    pieces.json(&Value::from(key.trim()).to_string());
                    pieces.json(":");
                    self.at = At::Value;
                }
                '}' => self.end(pieces),
                ',' => self.held.clear(),
                _ => self.held.push(c),
            },
            At::Value => match c {
                '{' | '[' => {
                    self.separate(pieces);
                    self.begin(c == '{', pieces);
                }
                ']' | '}' | ',' => {
                    if self.open.last().is_some_and(|open| open.is_object) {
                        pieces.json("null");
                    }
                    self.after_value(c, pieces);
                }
                _ if c.is_whitespace() => {}
                _ => {
                    self.separate(pieces);
                    self.held.push(c);
                    self.at = At::Word;
                }
            },
            At::Word => match c {
                ',' | '}' | ']' => {
                    self.end_word(pieces);
                    self.after_value(c, pieces);
                }
                _ => self.held.push(c),
            },
            At::AfterValue => self.after_value(c, pieces),
            At::Text => pieces.quoted(c.encode_utf8(&mut [0; 4])),
            At::Name | At::End => {}
        }
    }

    fn after_value(&mut self, c: char, pieces: &mut Pieces) {
        self.at = At::AfterValue;
        match c {
            ',' => {
                self.at =
                    if self.open.last().is_some_and(|open| open.is_object) { At::Key } else { At::Value }
            }
            '}' | ']' => self.end(pieces),
            _ => {}
        }
    }

    fn begin(&mut self, is_object: bool, pieces: &mut Pieces) {
        pieces.json(if is_object { "{" } else { "[" });
        self.open.push(Open { is_object, has_members: false });
        self.at = if is_object { At::Key } else { At::Value };
    }

    fn end(&mut self, pieces: &mut Pieces) {
        self.held.clear();
        if let Some(open) = self.open.pop() {
            pieces.json(if open.is_object { "}" } else { "]" });
        }
        self.at = if self.open.is_empty() { At::End } else { At::AfterValue };
    }

    /// Writes a comma before the next key, or before the next value of a list, unless it is the first.
    fn separate(&mut self, pieces: &mut Pieces) {
        let is_key = self.at == At::Key;
        if let Some(open) = self.open.last_mut().filter(|open| open.is_object == is_key) {
            if open.has_members {
                pieces.json(",");
            }
            open.has_members = true;
        }
    }

    /// Ends a value without quotes. What is no JSON becomes a text.
    fn end_word(&mut self, pieces: &mut Pieces) {
        let word = std::mem::take(&mut self.held);
        pieces.json(&scalar(word.trim()).unwrap_or_else(|| Value::from(word.trim()).to_string()));
    }
}

/// The JSON of a value without quotes. Templates write some values as Python does.
pub(super) fn scalar(word: &str) -> Option<String> {
    let json = match word {
        "None" => "null",
        "True" => "true",
        "False" => "false",
        other => other,
    };
    serde_json::from_str::<Value>(json).ok().map(|_| json.to_owned())
}
