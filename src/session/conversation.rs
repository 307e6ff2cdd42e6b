//! Builds a conversation message by message. A turn that called tools is written as the JSON that the model wrote. The
//! results of the calls are written as a turn of the user: a line `Result of NAME: TEXT` for each, in the order of the
//! calls.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::json;

use crate::text::Message;

/// A call that an earlier answer made.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    /// The JSON that the model wrote, which a client may have changed.
    pub arguments: String,
}

/// The messages so far. Consecutive calls become one turn of the assistant, and consecutive results one turn of the
/// user.
#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<Message>,
    /// The calls of each id. Where an id comes again in a later turn, the calls of that turn count.
    by_id: HashMap<String, Calls>,
    /// The number of calls so far.
    calls: usize,
    /// Calls that are no message yet. At most one of `called` and `results` has entries.
    called: Vec<Call>,
    results: Vec<(usize, String, String)>,
}

/// Calls of one turn that have the same id.
#[derive(Debug)]
struct Calls {
    /// The calls' places among all calls, and their tools; at least one.
    list: Vec<(usize, String)>,
    results: usize,
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
        let begin = self.calls - self.called.len();
        let same = self.by_id.entry(id.to_owned()).or_insert(Calls { list: Vec::new(), results: 0 });
        if same.list.iter().any(|(place, _)| *place < begin) {
            *same = Calls { list: Vec::new(), results: 0 };
        }
        same.list.push((self.calls, call.name.clone()));
        self.calls += 1;
        self.called.push(call);
    }

    /// Adds the result of the call with the id `id`; false if no call before has that id. Where several calls of one
    /// turn have it, their results come in the order of the calls; what comes after these is the last call's, too.
    #[must_use]
    pub fn result(&mut self, id: &str, text: String) -> bool {
        let Some(Calls { list, results }) = self.by_id.get_mut(id) else { return false };
        let (place, name) = list[(*results).min(list.len() - 1)].clone();
        *results += 1;
        if !self.called.is_empty() {
            self.write();
        }
        self.results.push((place, name, text));
        true
    }

    /// Whether the conversation so far ends with calls that have no results.
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
        // Arguments that are not valid JSON are shown as a JSON string.
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
