//! A conversation, made message by message. A turn that called tools is written as the JSON that the model wrote, and what the
//! tools gave as a turn of the user's: a line `Result of NAME: TEXT` each, in the order of the calls.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::json;

use crate::text::Message;

/// A call that an earlier answer made.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    /// JSON as the model wrote it, and as others may have changed it.
    pub arguments: String,
}

/// A conversation while it is read. Calls of tools become the JSON that the model wrote, and what they gave a turn of the
/// user's; those that come one behind the other are one turn.
#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<Message>,
    /// Place and tool of each call, by its id. An id may come again in a later turn: the last one is meant.
    by_id: HashMap<String, (usize, String)>,
    /// Calls so far.
    calls: usize,
    /// What is not written yet: calls, or what calls gave (place, tool and text each). Never both.
    called: Vec<Call>,
    results: Vec<(usize, String, String)>,
}

impl Conversation {
    pub fn say(&mut self, role: &str, text: &str) {
        self.write();
        self.messages.push(Message::new(role, text));
    }

    pub fn call(&mut self, id: &str, call: Call) {
        if !self.results.is_empty() {
            self.write();
        }
        self.by_id.insert(id.to_owned(), (self.calls, call.name.clone()));
        self.calls += 1;
        self.called.push(call);
    }

    /// What the call of that id gave; false where no call before it has that id.
    #[must_use]
    pub fn result(&mut self, id: &str, text: String) -> bool {
        let Some((place, name)) = self.by_id.get(id).cloned() else { return false };
        if !self.called.is_empty() {
            self.write();
        }
        self.results.push((place, name, text));
        true
    }

    /// Whether the last that was said are calls.
    pub fn ends_with_calls(&self) -> bool {
        !self.called.is_empty()
    }

    pub fn finish(mut self) -> Vec<Message> {
        self.write();
        self.messages
    }

    fn write(&mut self) {
        if !self.called.is_empty() {
            self.messages.push(Message::new("assistant", &written_calls(&self.called)));
            self.called.clear();
        }
        if !self.results.is_empty() {
            self.results.sort_by_key(|(place, ..)| *place);
            let line = |(_, name, text): &(usize, String, String)| format!("Result of {name}: {text}");
            let lines: Vec<String> = self.results.iter().map(line).collect();
            self.messages.push(Message::new("user", &lines.join("\n")));
            self.results.clear();
        }
    }
}

/// Calls as the model writes them.
fn written_calls(calls: &[Call]) -> String {
    let call = |Call { name, arguments }: &Call| {
        // What is no JSON is shown as the text that it is.
        let parameters = match serde_json::from_str::<IgnoredAny>(arguments) {
            Ok(_) => arguments.trim().to_owned(),
            Err(_) if arguments.trim().is_empty() => "{}".to_owned(),
            Err(_) => json!(arguments).to_string(),
        };
        format!("{{\"name\": {}, \"parameters\": {parameters}}}", json!(name))
    };
    match calls {
        [only] => call(only),
        several => format!("[{}]", several.iter().map(call).collect::<Vec<_>>().join(", ")),
    }
}
