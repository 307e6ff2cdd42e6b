//! Messages as clients send them, and their conversion into an order that a template accepts.
//!
//! The text of a message may contain names of control tokens (`<start_of_turn>`), because documents and tool results
//! are not trusted. The text is passed to the template unchanged. `provenance.rs` prevents it from becoming control
//! tokens.

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};

/// One message of a conversation. The wire formats refuse content other than text.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Message {
    pub role: String,
    pub content: String,
    /// What the assistant thought before this message. The template decides whether the model sees it.
    #[serde(default, alias = "reasoning_content")]
    pub reasoning: Option<String>,
}

/// Templates read a thought under one of two names.
impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let count = if self.reasoning.is_some() { 4 } else { 2 };
        let mut fields = serializer.serialize_struct("Message", count)?;
        fields.serialize_field("role", &self.role)?;
        fields.serialize_field("content", &self.content)?;
        if let Some(thought) = &self.reasoning {
            fields.serialize_field("reasoning_content", thought)?;
            fields.serialize_field("reasoning", thought)?;
        }
        fields.end()
    }
}

impl Message {
    pub fn new(role: &str, text: &str) -> Self {
        Self { role: role.to_owned(), content: text.to_owned(), reasoning: None }
    }

    /// The message after this thought.
    #[must_use]
    pub fn after(self, thought: Option<String>) -> Self {
        Self { reasoning: thought, ..self }
    }

    /// Bytes of the message's text, plus an estimate of the memory that the message takes in a template.
    pub(super) fn bytes(&self) -> usize {
        const OVERHEAD_BYTES: usize = 512;
        let thought = self.reasoning.as_ref().map_or(0, String::len);
        self.role.len() + self.content.len() + 2 * thought + OVERHEAD_BYTES
    }
}

/// Which conversations a template accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Messages of the roles system, user and assistant in any order.
    Any,
    /// At most one system message, which is the first message, and then users and assistants alternately.
    Alternating,
    /// As [`Order::Alternating`], without a system message.
    AlternatingWithoutSystem,
}

impl Order {
    /// The order of a template. `accepts` says whether it renders the text of all of these messages, in order.
    pub fn find(mut accepts: impl FnMut(&[Message]) -> bool) -> Order {
        let say = |role: &str, text: &str| Message::new(role, text);
        let any = [
            say("system", "first"),
            say("user", "second"),
            say("user", "third"),
            say("assistant", "fourth"),
            say("system", "fifth"),
            say("user", "sixth"),
        ];
        let alternating =
            [say("system", "first"), say("user", "second"), say("assistant", "third"), say("user", "last")];
        // A template that accepts none of these gets what most templates accept, and says itself what it expects.
        match (accepts(&any), accepts(&alternating), accepts(&alternating[1..])) {
            (true, ..) => Order::Any,
            (_, false, true) => Order::AlternatingWithoutSystem,
            _ => Order::Alternating,
        }
    }

    /// The conversation in this order. It never fails, and no text is lost. `developer` becomes `system`, `model` becomes
    /// `assistant`, and every other role (`tool`, `function`) becomes `user`.
    pub fn arrange(self, messages: &[Message]) -> Vec<Message> {
        match self {
            Order::Any => {
                let arranged = |message: &Message| {
                    Message::new(role(&message.role), &message.content).after(message.reasoning.clone())
                };
                messages.iter().map(arranged).collect()
            }
            Order::Alternating => normalize(messages),
            Order::AlternatingWithoutSystem => {
                let mut turns = normalize(messages);
                if turns.len() > 1 && turns[0].role == "system" {
                    let system = turns.remove(0);
                    turns[0].content = join_paragraphs(system.content, &turns[0].content);
                }
                turns
            }
        }
    }
}

fn role(role: &str) -> &'static str {
    match role {
        "system" | "developer" => "system",
        "assistant" | "model" => "assistant",
        _ => "user",
    }
}

/// Converts any conversation into the order that templates with alternating turns accept: at most one `system` message,
/// which is the first message, and then `user` and `assistant` alternately.
///
/// If the template accepts the original conversation, both render to the same bytes. There is one exception, a quirk of
/// some templates: they drop a system message without a user message after it.
///
/// - System messages at the start become one, joined by an empty line. The template adds it to the first user turn. If
///   no user turn follows, the system text becomes a user turn.
/// - A later system message becomes user text at the same position, because the model has no system turn. The turns
///   before it render to the same text, so a cached prefix stays valid.
/// - Consecutive turns of one role become one, joined by an empty line. So do their thoughts.
/// - A conversation that begins with the assistant (a greeting) gets an empty user turn before it. The model was
///   trained only on conversations that begin with the user, and dropping the greeting would lose text of the conversation.
fn normalize(messages: &[Message]) -> Vec<Message> {
    let mut system: Option<String> = None;
    let mut turns: Vec<Message> = Vec::new();
    for message in messages {
        match role(&message.role) {
            "system" if turns.is_empty() => {
                let before = system.unwrap_or_default();
                system = Some(join_paragraphs(before, &message.content));
            }
            "assistant" => {
                let turn = Message::new("assistant", python_trim(&message.content));
                push_turn(&mut turns, turn.after(message.reasoning.clone()));
            }
            _ => push_turn(&mut turns, Message::new("user", python_trim(&message.content))),
        }
    }

    let mut normal = Vec::with_capacity(turns.len() + 2);
    let user_first = turns.first().is_some_and(|turn| turn.role == "user");
    match system {
        Some(text) if user_first => normal.push(Message::new("system", &text)),
        Some(text) => normal.push(Message::new("user", python_trim(&text))),
        None if !user_first && !turns.is_empty() => normal.push(Message::new("user", "")),
        None => {}
    }
    normal.extend(turns);
    normal
}

fn push_turn(turns: &mut Vec<Message>, turn: Message) {
    match turns.last_mut() {
        Some(last) if last.role == turn.role => {
            last.content = join_paragraphs(std::mem::take(&mut last.content), &turn.content);
            last.reasoning = match (last.reasoning.take(), turn.reasoning) {
                (Some(before), Some(more)) => Some(join_paragraphs(before, &more)),
                (before, more) => before.or(more),
            };
        }
        _ => turns.push(turn),
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
