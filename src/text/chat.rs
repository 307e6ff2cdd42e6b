//! Messages as clients send them, and their conversion into the order that templates with alternating turns accept.
//!
//! The text of a message may contain names of control tokens (`<start_of_turn>`), because documents and tool results
//! are not trusted. The text is passed to the template unchanged. `provenance.rs` prevents it from becoming control
//! tokens.

use serde::{Deserialize, Serialize};

use super::family::FAMILY;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: Content,
}

/// A message's content: nothing, a text, or a list of parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    Null,
    Text(String),
    Parts(Vec<ContentPart>),
}

/// One part of a message's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    Text {
        text: String,
    },
    /// The place of an image; rendered as the image token of the family.
    Image,
}

impl Message {
    pub fn new(role: &str, text: &str) -> Self {
        Self { role: role.to_owned(), content: Content::Text(text.to_owned()) }
    }

    /// The message with each of its texts changed by `change`.
    pub(super) fn map_texts(&self, change: impl Fn(&str) -> String) -> Self {
        let content = match &self.content {
            Content::Null => Content::Null,
            Content::Text(text) => Content::Text(change(text)),
            Content::Parts(parts) => {
                let part = |part: &ContentPart| match part {
                    ContentPart::Text { text } => ContentPart::Text { text: change(text) },
                    ContentPart::Image => ContentPart::Image,
                };
                Content::Parts(parts.iter().map(part).collect())
            }
        };
        Self { role: self.role.clone(), content }
    }

    /// Bytes of the message's text, plus an estimate of the memory that the message and each of its parts take in a
    /// template.
    pub(super) fn bytes(&self) -> usize {
        const OVERHEAD_BYTES: usize = 512;
        let content = match &self.content {
            Content::Null => 0,
            Content::Text(text) => text.len(),
            Content::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    ContentPart::Text { text } => text.len() + OVERHEAD_BYTES,
                    ContentPart::Image => OVERHEAD_BYTES,
                })
                .sum(),
        };
        self.role.len() + content + OVERHEAD_BYTES
    }
}

impl Content {
    /// The text of a turn: parts are trimmed and joined without a separator, as in the family's template.
    pub(super) fn turn_text(&self) -> String {
        match self {
            Content::Null => String::new(),
            Content::Text(text) => python_trim(text).to_owned(),
            Content::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    ContentPart::Text { text } => python_trim(text),
                    ContentPart::Image => FAMILY.image,
                })
                .collect(),
        }
    }

    /// The text of a system message, untrimmed as in the family's template. Of a list of parts, the template uses only the
    /// first; this function joins all of them.
    fn system_text(&self) -> String {
        match self {
            Content::Null => String::new(),
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    ContentPart::Text { text } => text.as_str(),
                    ContentPart::Image => FAMILY.image,
                })
                .collect(),
        }
    }
}

/// Converts any conversation into the order that the family's template accepts: at most one `system` message, which is the
/// first message, and then `user` and `assistant` alternately. It never fails, and no text is lost.
///
/// If the template accepts the original conversation, both render to the same bytes. There are two exceptions, which
/// are quirks of the template: it drops a system message without a user message after it, and it drops all but the
/// first part of a system message.
///
/// - `developer` becomes `system`, `model` becomes `assistant`, and every other role (`tool`, `function`) becomes
///   `user`.
/// - System messages at the start become one, joined by an empty line. The template adds it to the first user turn. If
///   no user turn follows, the system text becomes a user turn.
/// - A later system message becomes user text at the same position, because the model has no system turn. The turns
///   before it render to the same text, so a cached prefix stays valid.
/// - Consecutive turns of one role become one, joined by an empty line.
/// - A conversation that begins with the assistant (a greeting) gets an empty user turn before it. The model was
///   trained only on conversations that begin with the user, and dropping the greeting would lose text of the conversation.
pub fn normalize(messages: &[Message]) -> Vec<Message> {
    let mut system: Option<String> = None;
    let mut turns: Vec<(&str, String)> = Vec::new();
    for message in messages {
        match message.role.as_str() {
            "system" | "developer" if turns.is_empty() => {
                let text = message.content.system_text();
                system = Some(match system {
                    Some(before) => join_paragraphs(before, &text),
                    None => text,
                });
            }
            "assistant" | "model" => push_turn(&mut turns, "assistant", message.content.turn_text()),
            _ => push_turn(&mut turns, "user", message.content.turn_text()),
        }
    }

    let mut normal = Vec::with_capacity(turns.len() + 2);
    let user_first = turns.first().is_some_and(|(role, _)| *role == "user");
    match system {
        Some(text) if user_first => normal.push(Message::new("system", &text)),
        Some(text) => normal.push(Message::new("user", python_trim(&text))),
        None if !user_first && !turns.is_empty() => normal.push(Message::new("user", "")),
        None => {}
    }
    normal.extend(turns.into_iter().map(|(role, text)| Message::new(role, &text)));
    normal
}

fn push_turn<'a>(turns: &mut Vec<(&'a str, String)>, role: &'a str, text: String) {
    match turns.last_mut() {
        Some((last, before)) if *last == role => {
            let joined = join_paragraphs(std::mem::take(before), &text);
            *before = joined;
        }
        _ => turns.push((role, text)),
    }
}

fn join_paragraphs(mut before: String, text: &str) -> String {
    if !before.is_empty() && !text.is_empty() {
        before.push_str("\n\n");
    }
    before.push_str(text);
    before
}

/// Python's `str.strip()`. It removes Unicode's whitespace and the four separators U+001C..U+001F.
pub(super) fn python_trim(text: &str) -> &str {
    text.trim_matches(is_python_space)
}

pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
