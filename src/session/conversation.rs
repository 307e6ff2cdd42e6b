//! Builds a conversation message by message. The results of calls follow them in the order of the calls.
//!
//! Some models have a syntax for calls, which their template writes. For the others, [`as_text`] turns the calls of a
//! message into the JSON that the model wrote, and their results into one turn of the user, with a line
//! `Result of NAME: TEXT` for each.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::json;

use super::images::Image;
use super::tools::MAX_TOOLS;
use crate::text::{CalledFunction, Content, Message, ToolCall};

/// A tool call of an earlier answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    /// The JSON that the model wrote. A client may have changed it.
    pub arguments: String,
}

/// The messages until now. Calls belong to the assistant's message before them.
#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<Message>,
    /// The images of the messages, which refer to them by their index.
    images: Vec<Image>,
    /// All calls until now.
    calls: Vec<EarlierCall>,
    /// The number of calls before the last turn that called, and before the first call of that turn without a result.
    calls_before: usize,
    answered: usize,
    /// The calls of each id. If a later turn uses an id again, its calls replace the earlier ones.
    by_id: HashMap<String, SameId>,
    /// What the assistant thought before its next message.
    thought: Option<String>,
    /// Results that are not yet messages: the index of the call among all calls, the tool and the content.
    results: Vec<(usize, String, Content)>,
}

/// A call, and whether its result has arrived.
#[derive(Debug)]
struct EarlierCall {
    tool: String,
    has_result: bool,
}

/// Calls of one turn that have the same id.
#[derive(Debug, Default)]
struct SameId {
    /// The index of each call among all calls; at least one.
    list: Vec<usize>,
    /// The calls before this one in the list have results.
    answered: usize,
}

impl Conversation {
    pub fn say(&mut self, role: &str, content: impl Into<Content>) {
        self.write_results();
        let thought = self.thought.take().filter(|_| role == "assistant");
        self.messages.push(Message::new(role, content).after(thought));
    }

    /// Takes an image, and returns its number, for [`Content::push_image`].
    pub fn image(&mut self, image: Image) -> usize {
        self.images.push(image);
        self.images.len() - 1
    }

    /// Adds to what the assistant thought before its next message or calls. Empty thoughts are nothing.
    pub fn think(&mut self, thought: &str) {
        self.write_results();
        if !thought.is_empty() {
            let before = self.thought.take().map_or(String::new(), |before| before + "\n\n");
            self.thought = Some(before + thought);
        }
    }

    pub fn call(&mut self, id: &str, call: Call) {
        self.write_results();
        let continues =
            self.thought.is_none() && self.messages.last().is_some_and(|last| last.role == "assistant");
        if !continues {
            self.say("assistant", "");
        }
        let message = self.messages.last_mut().expect("a message of the assistant");
        if message.tool_calls.is_empty() {
            (self.calls_before, self.answered) = (self.calls.len(), self.calls.len());
        }
        let place = self.calls.len();
        let same = self.by_id.entry(id.to_owned()).or_default();
        if same.list.first().is_some_and(|first| *first < self.calls_before) {
            *same = SameId::default();
        }
        same.list.push(place);
        message.tool_calls.push(ToolCall::new(id_of(place), call.name.clone(), &call.arguments));
        self.calls.push(EarlierCall { tool: call.name, has_result: false });
    }

    /// Adds the result of the call with the id `id`. Returns false if no earlier call has that id. If several calls of
    /// a turn have the id, their results must come in the order of the calls. Surplus results belong to the last of
    /// these calls.
    #[must_use]
    pub fn result(&mut self, id: &str, content: impl Into<Content>) -> bool {
        let Some(SameId { list, answered }) = self.by_id.get_mut(id) else { return false };
        let open = list[*answered..].iter().take_while(|place| self.calls[**place].has_result).count();
        *answered = (*answered + open).min(list.len() - 1);
        let place = list[*answered];
        self.add_result(place, content.into());
        true
    }

    /// Adds the result of a call that has none, in the last turn that called: of the first one of the tool `tool`, or else
    /// of the first one of any tool. Returns false if all calls have one.
    #[must_use]
    pub fn next_result(&mut self, tool: Option<&str>, content: impl Into<Content>) -> bool {
        let answered = self.calls[self.answered..].iter().take_while(|call| call.has_result).count();
        self.answered += answered;
        // No answer has more calls, so this also bounds the work for a result.
        let mut open = self.calls[self.answered..].iter().take(MAX_TOOLS);
        let of_tool = |tool: &str| open.position(|call| !call.has_result && call.tool == tool);
        let place = self.answered + tool.and_then(of_tool).unwrap_or(0);
        if place == self.calls.len() {
            return false;
        }
        self.add_result(place, content.into());
        true
    }

    fn add_result(&mut self, place: usize, content: Content) {
        let call = &mut self.calls[place];
        call.has_result = true;
        self.results.push((place, call.tool.clone(), content));
    }

    /// Whether the conversation ends with calls without results.
    pub fn ends_with_calls(&self) -> bool {
        let last = self.messages.last().is_some_and(|last| !last.tool_calls.is_empty());
        last && self.results.is_empty()
    }

    /// The messages, and the images that they refer to.
    pub fn finish(mut self) -> (Vec<Message>, Vec<Image>) {
        self.write_results();
        (self.messages, self.images)
    }

    fn write_results(&mut self) {
        self.results.sort_by_key(|(place, ..)| *place);
        let results = self.results.drain(..);
        let message =
            |(place, name, content): (_, String, Content)| Message::result(content, &id_of(place), &name);
        self.messages.extend(results.map(message));
    }
}

/// The id of a call in the prompt. Clients' ids are not used: they differ each time, and some templates accept only ids
/// of nine letters or digits.
fn id_of(place: usize) -> String {
    format!("call{:05}", place % 100_000)
}

/// The messages with calls and results as text.
pub(super) fn as_text(messages: &[Message]) -> Vec<Message> {
    let mut texts: Vec<Message> = Vec::with_capacity(messages.len());
    // Whether the last text is of results, which successive results share.
    let mut has_results = false;
    for message in messages {
        if message.tool_call_id.is_some() {
            let mut line =
                Content::from(format!("Result of {}: ", message.name.as_deref().unwrap_or_default()));
            line.push(&message.content);
            match texts.last_mut().filter(|_| has_results) {
                Some(last) => {
                    last.content.push_text("\n");
                    last.content.push(&line);
                }
                None => texts.push(Message::new("user", line)),
            }
            has_results = true;
            continue;
        }
        has_results = false;
        let mut thought = message.reasoning.clone();
        if message.tool_calls.is_empty() || !message.content.is_empty() {
            texts.push(Message::new(&message.role, message.content.clone()).after(thought.take()));
        }
        if !message.tool_calls.is_empty() {
            texts.push(Message::new("assistant", written_calls(&message.tool_calls)).after(thought));
        }
    }
    texts
}

/// Calls in the form in which the model writes them.
fn written_calls(calls: &[ToolCall]) -> String {
    let call = |ToolCall { function: CalledFunction { name, written, .. }, .. }: &ToolCall| {
        // Arguments that are not valid JSON become a JSON string.
        let parameters = match serde_json::from_str::<IgnoredAny>(written) {
            Ok(_) => written.clone(),
            Err(_) if written.is_empty() => "{}".to_owned(),
            Err(_) => json!(written).to_string(),
        };
        format!("{{\"name\": {}, \"parameters\": {parameters}}}", json!(name))
    };
    match calls {
        [only] => call(only),
        several => format!("[{}]", several.iter().map(call).collect::<Vec<_>>().join(", ")),
    }
}
