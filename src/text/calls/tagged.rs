//! The body of a call with tags:
//!
//! ```text
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! ```
//!
//! A value is the text between the line ends, without quotes or escapes. Only the tool's schema says whether `12` is a
//! number or a text. A text becomes JSON as it arrives. If the schema allows texts and other types, the value is read as
//! JSON if that gives an allowed type, and as a text otherwise.

use serde_json::Value;

use super::bare::scalar;
use super::pieces::{KnownTool, Pieces};
use super::values::Types;

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const END_OF_FUNCTION: &str = "</function>";
pub(super) const END_OF_VALUE: &str = "\n</parameter>";

/// Reads one call.
#[derive(Debug, Clone, Default)]
pub(super) struct TaggedBody {
    at: At,
    held: String,
    /// The index of the tool.
    tool: usize,
    has_arguments: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum At {
    #[default]
    Name,
    /// Between arguments.
    Between,
    /// After the tag of an argument, before its line end.
    BeforeValue(Types),
    Value(Types),
    End,
}

impl TaggedBody {
    /// Takes text. Returns the text of the call if it is not a call of a known tool.
    pub fn push(&mut self, text: &str, tools: &[KnownTool], pieces: &mut Pieces) -> Option<String> {
        self.held.push_str(text);
        loop {
            match self.at {
                At::Name => {
                    let tag = tag(&self.held)?;
                    let name = tag.strip_prefix(FUNCTION).unwrap_or_default();
                    let Some(tool) = tools.iter().position(|tool| tool.name == name) else {
                        return Some(std::mem::take(&mut self.held));
                    };
                    self.tool = tool;
                    pieces.call(name);
                    pieces.json("{");
                    self.skip_tag();
                    self.at = At::Between;
                }
                At::Between => {
                    let tag = tag(&self.held)?;
                    if tag.len() + 1 == END_OF_FUNCTION.len() && END_OF_FUNCTION.starts_with(tag) {
                        pieces.json("}");
                        self.at = At::End;
                    } else if let Some(key) = tag.strip_prefix(PARAMETER) {
                        let key = Value::from(key);
                        let types = tools[self.tool].types(key.as_str().unwrap_or_default());
                        pieces.json(if self.has_arguments { "," } else { "" });
                        pieces.json(&format!("{key}:"));
                        self.has_arguments = true;
                        self.at = At::BeforeValue(types);
                    }
                    self.skip_tag();
                }
                At::BeforeValue(types) => {
                    let first = self.held.chars().next()?;
                    if first == '\n' {
                        self.held.remove(0);
                    }
                    pieces.json(if types.is_text() { "\"" } else { "" });
                    self.at = At::Value(types);
                }
                At::Value(types) => {
                    let Some(end) = self.held.find(END_OF_VALUE) else {
                        if types.is_text() {
                            self.write_text(pieces);
                        }
                        return None;
                    };
                    let value = self.held[..end].to_owned();
                    self.held.drain(..end + END_OF_VALUE.len());
                    end_value(&value, types, pieces);
                    self.at = At::Between;
                }
                At::End => {
                    self.held.clear();
                    return None;
                }
            }
        }
    }

    /// What has arrived of a call whose tool is not known yet. `None` = the tool is known.
    pub fn unnamed(&mut self) -> Option<String> {
        (self.at == At::Name).then(|| std::mem::take(&mut self.held))
    }

    /// Ends the call. Returns whether its arguments are complete.
    pub fn close(self, cut: bool, pieces: &mut Pieces) -> bool {
        match self.at {
            At::Name => return false,
            At::End => return true,
            At::Value(types) if cut && types.is_text() => {
                pieces.quoted(&self.held);
                return false;
            }
            _ if cut => return false,
            At::BeforeValue(types) => {
                pieces.json(if types.is_text() { "\"" } else { "" });
                end_value("", types, pieces);
            }
            At::Value(types) => end_value(&self.held, types, pieces),
            At::Between => {}
        }
        pieces.json("}");
        true
    }

    fn skip_tag(&mut self) {
        let end = self.held.find('>').map_or(self.held.len(), |end| end + 1);
        self.held.drain(..end);
    }

    /// Writes the text that cannot be the beginning of the value's end.
    fn write_text(&mut self, pieces: &mut Pieces) {
        let may_end = |at: &usize| END_OF_VALUE.starts_with(&self.held[*at..]);
        let from = self.held.len().saturating_sub(END_OF_VALUE.len());
        let kept = (from..self.held.len()).filter(|at| self.held.is_char_boundary(*at)).find(may_end);
        let rest = self.held.split_off(kept.unwrap_or(self.held.len()));
        pieces.quoted(&std::mem::replace(&mut self.held, rest));
    }
}

/// The tag at the start of a text, after white space and without its `>`. `None` = it has not arrived.
fn tag(text: &str) -> Option<&str> {
    text.find('>').map(|end| text[..end].trim_start())
}

/// Writes a value. Of a value that can only be a text, this is the rest.
fn end_value(value: &str, types: Types, pieces: &mut Pieces) {
    if types.is_text() {
        pieces.quoted(value);
        pieces.json("\"");
        return;
    }
    let json = scalar(value.trim());
    let is_allowed = |json: &String| serde_json::from_str(json).is_ok_and(|value| types.allow(&value));
    match json.filter(|json| !types.has_text() || is_allowed(json)) {
        Some(json) => pieces.json(&json),
        None => pieces.json(&Value::from(value).to_string()),
    }
}
