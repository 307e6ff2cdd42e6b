//! Messages as clients send them, and their conversion into an order that a template accepts.
//!
//! The text of a message may contain names of control tokens (`<start_of_turn>`), because documents and tool results
//! are not trusted. The text is passed to the template unchanged. `provenance.rs` prevents it from becoming control
//! tokens.

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::content::Content;
use super::kwargs::{self, Keys};

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Message {
    pub role: String,
    pub content: Content,
    /// What the assistant thought before this message. The template decides whether the model sees it.
    #[serde(alias = "reasoning_content")]
    pub reasoning: Option<String>,
    /// The tools that the assistant called after this message's text.
    pub tool_calls: Vec<ToolCall>,
    /// For the result of a call: the id of the call.
    pub tool_call_id: Option<String>,
    /// For the result of a call: the tool.
    pub name: Option<String>,
}

/// A call in a message of the assistant.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ToolCall {
    #[serde(default)]
    pub id: String,
    pub function: CalledFunction,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalledFunction {
    pub name: String,
    /// An object, or a text that is not the JSON of an object.
    pub arguments: Value,
    /// The arguments as the model wrote them, unless a client changed them.
    #[serde(skip)]
    pub written: String,
}

/// A message as templates read it: without fields that have no value, and with a thought under either of its names.
impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        fields.serialize_entry("role", &self.role)?;
        fields.serialize_entry("content", &self.content)?;
        if let Some(thought) = &self.reasoning {
            fields.serialize_entry("reasoning_content", thought)?;
            fields.serialize_entry("reasoning", thought)?;
        }
        if !self.tool_calls.is_empty() {
            fields.serialize_entry("tool_calls", &self.tool_calls)?;
        }
        for (name, value) in [("tool_call_id", &self.tool_call_id), ("name", &self.name)] {
            if let Some(value) = value {
                fields.serialize_entry(name, value)?;
            }
        }
        fields.end()
    }
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(Some(3))?;
        fields.serialize_entry("type", "function")?;
        fields.serialize_entry("id", &self.id)?;
        fields.serialize_entry("function", &self.function)?;
        fields.end()
    }
}

impl Message {
    pub fn new(role: &str, content: impl Into<Content>) -> Self {
        Self { role: role.to_owned(), content: content.into(), ..Self::default() }
    }

    /// The message after this thought.
    #[must_use]
    pub fn after(self, thought: Option<String>) -> Self {
        Self { reasoning: thought, ..self }
    }

    /// The result of a call: its content, the call's id and its tool.
    pub fn result(content: impl Into<Content>, id: &str, tool: &str) -> Self {
        let (tool_call_id, name) = (Some(id.to_owned()), Some(tool.to_owned()));
        Self { tool_call_id, name, ..Self::new("tool", content) }
    }

    /// Whether the message calls tools, or is the result of a call.
    pub fn is_of_a_call(&self) -> bool {
        !self.tool_calls.is_empty() || self.tool_call_id.is_some()
    }

    /// The message with this content, and with the result of `change` for every other text in it except its role and its
    /// ids.
    pub(super) fn with_texts(&self, content: Content, change: &dyn Fn(&str) -> String) -> Message {
        let call = |call: &ToolCall| {
            let CalledFunction { name, arguments, .. } = &call.function;
            let arguments = kwargs::changed(arguments, Keys::Changed, change);
            let function = CalledFunction { name: change(name), arguments, written: String::new() };
            ToolCall { id: call.id.clone(), function }
        };
        Message {
            role: self.role.clone(),
            content,
            reasoning: self.reasoning.as_deref().map(change),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: self.tool_call_id.clone(),
            name: self.name.as_deref().map(change),
        }
    }

    /// Bytes of the message's text, plus an estimate of the memory that the message takes in a template.
    pub(super) fn bytes(&self) -> usize {
        const OVERHEAD_BYTES: usize = 512;
        let thought = self.reasoning.as_ref().map_or(0, String::len);
        let call = |call: &ToolCall| {
            OVERHEAD_BYTES + call.function.name.len() + kwargs::bytes(&call.function.arguments)
        };
        let calls: usize = self.tool_calls.iter().map(call).sum();
        let name = self.name.as_ref().map_or(0, String::len);
        self.role.len() + self.content.bytes() + 2 * thought + calls + name + OVERHEAD_BYTES
    }
}

impl ToolCall {
    /// A call whose arguments are JSON text, or not: a client may have changed what the model wrote.
    pub fn new(id: String, name: String, arguments: &str) -> Self {
        let written = arguments.trim();
        let arguments = match serde_json::from_str::<Map<String, Value>>(written) {
            Ok(object) => Value::Object(object),
            Err(_) if written.is_empty() => json!({}),
            Err(_) => json!(arguments),
        };
        Self { id, function: CalledFunction { name, arguments, written: written.to_owned() } }
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
    /// `assistant`, and every other role becomes `user`. Calls and their results stay messages of their own.
    pub fn arrange(self, messages: &[Message]) -> Vec<Message> {
        match self {
            Order::Any => {
                let arranged = |message: &Message| Message { role: role(message).into(), ..message.clone() };
                messages.iter().map(arranged).collect()
            }
            Order::Alternating => normalize(messages),
            Order::AlternatingWithoutSystem => {
                let mut turns = normalize(messages);
                if turns.len() > 1 && turns[0].role == "system" {
                    let system = turns.remove(0);
                    let content = std::mem::replace(&mut turns[0].content, system.content);
                    turns[0].content.push_paragraph(&content);
                }
                turns
            }
        }
    }
}

fn role(message: &Message) -> &'static str {
    match message.role.as_str() {
        "system" | "developer" => "system",
        "assistant" | "model" => "assistant",
        _ if message.tool_call_id.is_some() => "tool",
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
///   before it render to the same text, so a cached prefix stays valid. So does one with images, of which templates
///   read only the text.
/// - Consecutive turns of one role become one, joined by an empty line. So do their thoughts.
/// - A conversation that begins with the assistant (a greeting) gets an empty user turn before it. The model was
///   trained only on conversations that begin with the user, and dropping the greeting would lose text of the conversation.
fn normalize(messages: &[Message]) -> Vec<Message> {
    let mut system: Option<Content> = None;
    let mut turns: Vec<Message> = Vec::new();
    for message in messages {
        match role(message) {
            "system" if turns.is_empty() && message.content.images().next().is_none() => {
                system.get_or_insert_default().push_paragraph(&message.content);
            }
            role @ ("assistant" | "tool") => {
                let content = message.content.trimmed();
                push_turn(&mut turns, Message { role: role.into(), content, ..message.clone() });
            }
            _ => push_turn(&mut turns, Message::new("user", message.content.trimmed())),
        }
    }

    let mut normal = Vec::with_capacity(turns.len() + 2);
    let user_first = turns.first().is_some_and(|turn| turn.role == "user");
    match system {
        Some(text) if user_first => normal.push(Message::new("system", text)),
        Some(text) => normal.push(Message::new("user", text.trimmed())),
        None if !user_first && !turns.is_empty() => normal.push(Message::new("user", "")),
        None => {}
    }
    normal.extend(turns);
    normal
}

fn push_turn(turns: &mut Vec<Message>, turn: Message) {
    match turns.last_mut() {
        Some(last) if last.role == turn.role && !last.is_of_a_call() && !turn.is_of_a_call() => {
            last.content.push_paragraph(&turn.content);
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
