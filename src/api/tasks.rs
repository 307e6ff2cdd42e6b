//! Requests that nobody waits for, told apart from those that somebody does: a chat program's own, beside a chat, for its
//! title, its tags, or what to ask next. They run in the engine's background class.
//!
//! Who is believed, in this order:
//!
//! 1. `X-Unicorn-Priority`, `background` or `interactive`: any program's word for its own requests.
//! 2. `X-Unicorn-Task`: the name of the task, empty for a chat. An administrator of Open WebUI has it sent, as `{{TASK}}`.
//! 3. The prompt, where it is one of Open WebUI's own for such a task: those begin alike and name what they want. Where an
//!    administrator wrote other prompts, the header is needed.
//!
//! What a chat's answer waits for (search queries, a choice of tools) is a task, and interactive. So is what is not known.

use axum::http::{HeaderMap, HeaderName};

use crate::api::error::ApiError;
use crate::api::wire::short;
use crate::engine::Priority;
use crate::text::{Content, Message};

const PRIORITY: HeaderName = HeaderName::from_static("x-unicorn-priority");
const TASK: HeaderName = HeaderName::from_static("x-unicorn-task");

/// What Open WebUI's prompts begin with, and what stands in them before the words of a chat, which may say anything.
const OPENING: &str = "### Task:";
const HISTORY: &str = "<chat_history>";

struct Task {
    /// Open WebUI's.
    name: &'static str,
    priority: Priority,
    /// The field of the JSON that its prompt asks for, where that prompt has Open WebUI's form.
    field: Option<&'static str>,
}

const fn task(name: &'static str, priority: Priority, field: Option<&'static str>) -> Task {
    Task { name, priority, field }
}

/// As of Open WebUI 0.12.
const TASKS: [Task; 11] = [
    task("title_generation", Priority::Background, Some("\"title\":")),
    task("tags_generation", Priority::Background, Some("\"tags\":")),
    task("follow_up_generation", Priority::Background, Some("\"follow_ups\":")),
    task("autocomplete_generation", Priority::Background, Some("\"text\":")),
    task("emoji_generation", Priority::Background, None),
    task("memory_review", Priority::Background, None),
    task("query_generation", Priority::Interactive, Some("\"queries\":")),
    task("image_prompt_generation", Priority::Interactive, Some("\"prompt\":")),
    task("function_calling", Priority::Interactive, None),
    task("moa_response_generation", Priority::Interactive, None),
    task("context_compaction", Priority::Interactive, None),
];

/// What the head of a request says of its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::api) struct Asked {
    priority: Option<Priority>,
    /// None where it says nothing of tasks.
    task: Option<Purpose>,
}

/// What a request is for, and the class it runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::api) struct Purpose {
    pub priority: Priority,
    /// A name out of [`TASKS`], `other` for one that is not there, or `none`.
    pub task: &'static str,
}

impl Purpose {
    const CHAT: Purpose = Purpose { priority: Priority::Interactive, task: "none" };

    fn of(task: &Task) -> Self {
        Self { priority: task.priority, task: task.name }
    }

    fn named(name: &str) -> Self {
        if name.is_empty() {
            return Self::CHAT;
        }
        let known = TASKS.iter().find(|task| task.name.eq_ignore_ascii_case(name));
        known.map_or(Self { task: "other", ..Self::CHAT }, Self::of)
    }

    /// The class's name.
    pub fn class(self) -> &'static str {
        match self.priority {
            Priority::Interactive => "interactive",
            Priority::Background => "background",
        }
    }
}

impl Asked {
    pub fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let read = |name: &HeaderName| {
            Some(String::from_utf8_lossy(headers.get(name)?.as_bytes()).trim().to_owned())
        };
        let priority = match read(&PRIORITY).as_deref() {
            None | Some("") => None,
            Some(class) if class.eq_ignore_ascii_case("background") => Some(Priority::Background),
            Some(class) if class.eq_ignore_ascii_case("interactive") => Some(Priority::Interactive),
            Some(other) => {
                let problem = format!("expected background or interactive, got {:?}", short(other));
                return Err(ApiError::invalid("X-Unicorn-Priority", problem));
            }
        };
        // A version that does not know the variable sends it as it stands.
        let task = read(&TASK).filter(|name| !name.contains("{{"));
        Ok(Self { priority, task: task.map(|name| Purpose::named(&name)) })
    }

    /// The purpose of a request whose head says this. Answers to Open WebUI's own prompts are not streamed, as those of chats
    /// are.
    pub fn purpose(self, messages: &[Message], stream: bool) -> Purpose {
        let by_prompt = || by_prompt(messages).filter(|_| !stream);
        let purpose = self.task.or_else(by_prompt).unwrap_or(Purpose::CHAT);
        Purpose { priority: self.priority.unwrap_or(purpose.priority), ..purpose }
    }
}

/// What one of Open WebUI's own prompts is for. They are a single message behind the model's system text.
fn by_prompt(messages: &[Message]) -> Option<Purpose> {
    let said = |role: &str| !matches!(role, "system" | "developer");
    let mut messages = messages.iter().filter(|message| said(&message.role));
    let (Some(only), None) = (messages.next(), messages.next()) else { return None };
    let Content::Text(text) = &only.content else { return None };
    if only.role != "user" || !text.starts_with(OPENING) {
        return None;
    }
    let (instructions, _) = text.split_once(HISTORY)?;
    let wants = |task: &&Task| task.field.is_some_and(|field| instructions.contains(field));
    TASKS.iter().find(wants).map(Purpose::of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(fields: &[(&'static str, &'static str)]) -> Result<Asked, ApiError> {
        let name = |name| HeaderName::from_static(name);
        Asked::read(&fields.iter().map(|(n, value)| (name(n), value.parse().unwrap())).collect())
    }

    fn user(text: &str) -> Vec<Message> {
        vec![Message::new("user", text)]
    }

    fn task_of(asked: Asked, messages: &[Message]) -> (&'static str, &'static str) {
        let purpose = asked.purpose(messages, false);
        (purpose.class(), purpose.task)
    }

    /// The beginnings and ends of Open WebUI's prompts, which are what is looked at.
    fn prompts() -> [(String, &'static str, &'static str); 6] {
        let prompt = |wanted: &str, format: &str| {
            format!(
                "### Task:\n{wanted}\n### Output:\nJSON format: {format}\n### Chat History:\n<chat_history>\nUSER: Is \
                 \"title\": a field?\nASSISTANT: Yes, and \"queries\": too.\n</chat_history>"
            )
        };
        [
            (
                prompt("Generate a concise title.", r#"{ "title": "your title" }"#),
                "title_generation",
                "background",
            ),
            (prompt("Generate 1-3 tags.", r#"{ "tags": ["tag1"] }"#), "tags_generation", "background"),
            (
                prompt("Predict 3-5 messages.", r#"{ "follow_ups": ["1"] }"#),
                "follow_up_generation",
                "background",
            ),
            (prompt("Continue the text.", r#"`{ "text": "" }`"#), "autocomplete_generation", "background"),
            (
                prompt("Analyze the history.", "\n{\n  \"queries\": [\"q\"]\n}"),
                "query_generation",
                "interactive",
            ),
            (prompt("Describe.", "\n{\n    \"prompt\": \"…\"\n}"), "image_prompt_generation", "interactive"),
        ]
    }

    #[test]
    fn prompts_for_tasks_are_known_by_their_form() {
        let silent = Asked::default();
        for (text, task, class) in prompts() {
            let mut request = user(&text);
            assert_eq!(task_of(silent, &request), (class, task), "{text}");
            request.insert(0, Message::new("system", "Be brief."));
            assert_eq!(task_of(silent, &request), (class, task), "behind a system text");
            assert_eq!(silent.purpose(&request, true), Purpose::CHAT, "a stream");
            let chats = [
                [&request[..], &request[1..]].concat(),
                user(&format!("What does this do?\n{text}")),
                user(&text.replace("<chat_history>", "")),
            ];
            for chat in chats {
                assert_eq!(task_of(silent, &chat), ("interactive", "none"), "{chat:?}");
            }
        }
        for text in ["", "### Task:", "### Task: clean the house\n<chat_history>", "<chat_history>\"title\":"]
        {
            assert_eq!(task_of(silent, &user(text)), ("interactive", "none"), "{text}");
        }
        assert_eq!(silent.purpose(&[], false), Purpose::CHAT, "a prompt that is no conversation");
    }

    #[test]
    fn a_header_counts_more_than_the_prompt() {
        let [(title, ..), ..] = prompts();
        for (fields, class, task) in [
            (&[("x-unicorn-task", "")][..], "interactive", "none"),
            (&[("x-unicorn-task", "  ")], "interactive", "none"),
            (&[("x-unicorn-task", "tags_generation")], "background", "tags_generation"),
            (&[("x-unicorn-task", "Query_Generation")], "interactive", "query_generation"),
            (&[("x-unicorn-task", "something_new")], "interactive", "other"),
            (&[("x-unicorn-task", "{{TASK}}")], "background", "title_generation"),
            (&[("x-unicorn-priority", "interactive")], "interactive", "title_generation"),
            (&[("x-unicorn-priority", " Background")], "background", "title_generation"),
            (&[("x-unicorn-priority", ""), ("x-unicorn-task", "")], "interactive", "none"),
            (&[("x-unicorn-priority", "background"), ("x-unicorn-task", "")], "background", "none"),
        ] {
            let asked = head(fields).expect("sound");
            assert_eq!(task_of(asked, &user(&title)), (class, task), "{fields:?}");
        }
        let refused = head(&[("x-unicorn-priority", "urgent")]).unwrap_err().to_string();
        assert_eq!(refused, "X-Unicorn-Priority: expected background or interactive, got \"urgent\"");
    }
}
