//! Builds a conversation message by message. A turn that called tools becomes the JSON that the model wrote. The
//! results of the calls become one turn of the user, with a line `Result of NAME: TEXT` for each, in the order of the
//! calls.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::json;

use crate::text::Message;

/// A tool call of an earlier answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    /// The JSON that the model wrote. A client may have changed it.
    pub arguments: String,
}

/// The messages until now. Successive calls become one turn of the assistant, and successive results one turn of the
/// user.
#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<Message>,
    /// The calls of each id. If a later turn uses an id again, its calls replace the earlier ones.
    by_id: HashMap<String, Calls>,
    /// The number of calls until now, and of those before the last turn that called.
    calls: usize,
    calls_before: usize,
    /// Calls that are not yet a message. At most one of `called` and `results` has entries.
    called: Vec<Call>,
    /// What the assistant thought before its next message.
    thought: Option<String>,
    /// Results that are not yet a message: the index of the call among all calls, the tool and the text.
    results: Vec<(usize, String, String)>,
}

/// Calls of one turn that have the same id.
#[derive(Debug)]
struct Calls {
    /// The index of each call among all calls, and its tool; at least one.
    list: Vec<(usize, String)>,
    /// The number of results that have arrived.
    results: usize,
}

impl Conversation {
    pub fn say(&mut self, role: &str, text: &str) {
        self.write();
        let thought = self.thought.take().filter(|_| role == "assistant");
        self.messages.push(Message::new(role, text).after(thought));
    }

    /// Adds to what the assistant thought before its next message or calls. Empty thoughts are nothing.
    pub fn think(&mut self, thought: &str) {
        self.write();
        if !thought.is_empty() {
            let before = self.thought.take().map_or(String::new(), |before| before + "\n\n");
            self.thought = Some(before + thought);
        }
    }

    pub fn call(&mut self, id: &str, call: Call) {
        if !self.results.is_empty() {
            self.write();
        }
        let begin = self.calls - self.called.len();
        self.calls_before = begin;
        let same = self.by_id.entry(id.to_owned()).or_insert(Calls { list: Vec::new(), results: 0 });
        if same.list.iter().any(|(place, _)| *place < begin) {
            *same = Calls { list: Vec::new(), results: 0 };
        }
        same.list.push((self.calls, call.name.clone()));
        self.calls += 1;
        self.called.push(call);
    }

    /// Adds the result of the call with the id `id`. Returns false if no earlier call has that id. If several calls of
    /// a turn have the id, their results must come in the order of the calls. Surplus results belong to the last of
    /// these calls.
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

    /// Adds the result of the first call of the last turn that has none. Returns false if all calls have one.
    #[must_use]
    pub fn next_result(&mut self, text: String) -> bool {
        let first = |(id, calls): (&String, &Calls)| {
            let (place, _) = calls.list.get(calls.results)?;
            (*place >= self.calls_before).then(|| (*place, id.clone()))
        };
        let next = self.by_id.iter().filter_map(first).min();
        next.is_some_and(|(_, id)| self.result(&id, text))
    }

    /// Whether the conversation ends with calls without results.
    pub fn ends_with_calls(&self) -> bool {
        !self.called.is_empty()
    }

    pub fn finish(mut self) -> Vec<Message> {
        self.write();
        self.messages
    }

    fn write(&mut self) {
        if !self.called.is_empty() {
            let calls = Message::new("assistant", &written_calls(&self.called));
            self.messages.push(calls.after(self.thought.take()));
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

/// Calls in the form in which the model writes them.
fn written_calls(calls: &[Call]) -> String {
    let call = |Call { name, arguments }: &Call| {
        // Arguments that are not valid JSON become a JSON string.
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
