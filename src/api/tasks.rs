//! Distinguishes requests that a user waits for from requests that a chat program sends in addition to a chat: for a
//! title, for tags, for follow-up questions. The latter run in the engine's background class.
//!
//! The first of these that is present decides a request's class, and the first of the last two decides its task:
//!
//! 1. The header `X-Unicorn-Priority`, `background` or `interactive`. Any program may send it.
//! 2. The header `X-Unicorn-Task`: the name of the task, empty for a chat. An administrator of Open WebUI configures it
//!    as `{{TASK}}`.
//! 3. The prompt, if it is Open WebUI's default prompt for a task. All these prompts begin the same way, and name the
//!    JSON field that they request. If an administrator changed the prompts, the header is needed.
//!
//! A task on which a chat's answer depends (search queries, a choice of tools) is interactive. So is an unknown task.

use axum::http::{HeaderMap, HeaderName};

use crate::api::error::ApiError;
use crate::api::wire::short;
use crate::engine::Priority;
use crate::text::Message;

const PRIORITY: HeaderName = HeaderName::from_static("x-unicorn-priority");
const TASK: HeaderName = HeaderName::from_static("x-unicorn-task");

/// Open WebUI's tasks, and the form of its default prompts for them.
struct OpenWebUi {
    /// The version whose tasks and prompts these are.
    #[cfg_attr(not(test), allow(dead_code, reason = "a test compares it with the version that is tested"))]
    version: &'static str,
    /// The beginning of every prompt.
    opening: &'static str,
    /// The marker of the chat history in a prompt. The history may contain any text, so it is not searched for tasks.
    history: &'static str,
    tasks: [Task; 11],
}

/// A task that Open WebUI gives to a model in addition to a chat.
struct Task {
    /// Open WebUI's name, which it sends as `{{TASK}}`.
    name: &'static str,
    priority: Priority,
    /// A field of the JSON that Open WebUI's prompt requests, by which the prompt is recognized. `None` = only the name
    /// identifies the task.
    field: Option<&'static str>,
}

static OPEN_WEBUI: OpenWebUi = OpenWebUi {
    version: "0.12",
    opening: "### Task:",
    history: "<chat_history>",
    tasks: [
        background("title_generation", Some("\"title\":")),
        background("tags_generation", Some("\"tags\":")),
        background("follow_up_generation", Some("\"follow_ups\":")),
        background("autocomplete_generation", Some("\"text\":")),
        background("emoji_generation", None),
        background("memory_review", None),
        interactive("query_generation", Some("\"queries\":")),
        interactive("image_prompt_generation", Some("\"prompt\":")),
        interactive("function_calling", None),
        interactive("moa_response_generation", None),
        interactive("context_compaction", None),
    ],
};

const fn background(name: &'static str, field: Option<&'static str>) -> Task {
    Task { name, priority: Priority::Background, field }
}

/// A task on whose result a chat's answer depends.
const fn interactive(name: &'static str, field: Option<&'static str>) -> Task {
    Task { name, priority: Priority::Interactive, field }
}

/// What the headers of a request say about its purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::api) struct PurposeHeaders {
    priority: Option<Priority>,
    /// `None` = the headers name no task.
    task: Option<Purpose>,
}

/// What a request is for, and the class it runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::api) struct Purpose {
    pub priority: Priority,
    /// A name out of [`OPEN_WEBUI`], `other` for an unknown name, or `none`.
    pub task: &'static str,
}

impl Purpose {
    const CHAT: Purpose = Purpose { priority: Priority::Interactive, task: "none" };

    fn from_task(task: &Task) -> Self {
        Self { priority: task.priority, task: task.name }
    }

    fn named(name: &str) -> Self {
        if name.is_empty() {
            return Self::CHAT;
        }
        let known = OPEN_WEBUI.tasks.iter().find(|task| task.name.eq_ignore_ascii_case(name));
        known.map_or(Self { task: "other", ..Self::CHAT }, Self::from_task)
    }

    /// The name of the class.
    pub fn class(self) -> &'static str {
        match self.priority {
            Priority::Interactive => "interactive",
            Priority::Background => "background",
        }
    }
}

impl PurposeHeaders {
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
        // A version of Open WebUI without this variable sends its name unreplaced.
        let task = read(&TASK).filter(|name| !name.contains("{{"));
        Ok(Self { priority, task: task.map(|name| Purpose::named(&name)) })
    }

    /// The purpose of a request with these headers. Open WebUI streams the answers of chats, and never the answers of
    /// tasks.
    pub fn purpose(self, messages: &[Message], stream: bool) -> Purpose {
        let by_prompt = || by_prompt(messages).filter(|_| !stream);
        let purpose = self.task.or_else(by_prompt).unwrap_or(Purpose::CHAT);
        Purpose { priority: self.priority.unwrap_or(purpose.priority), ..purpose }
    }
}

/// The purpose of Open WebUI's prompts for tasks: a single message after the system text.
fn by_prompt(messages: &[Message]) -> Option<Purpose> {
    let in_chat = |role: &str| !matches!(role, "system" | "developer");
    let mut messages = messages.iter().filter(|message| in_chat(&message.role));
    let (Some(only), None) = (messages.next(), messages.next()) else { return None };
    let text = only.content.text();
    if only.role != "user" || !text.starts_with(OPEN_WEBUI.opening) {
        return None;
    }
    let (instructions, _) = text.split_once(OPEN_WEBUI.history)?;
    let wants = |task: &&Task| task.field.is_some_and(|field| instructions.contains(field));
    OPEN_WEBUI.tasks.iter().find(wants).map(Purpose::from_task)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(fields: &[(&'static str, &'static str)]) -> Result<PurposeHeaders, ApiError> {
        let name = |name| HeaderName::from_static(name);
        PurposeHeaders::read(&fields.iter().map(|(n, value)| (name(n), value.parse().unwrap())).collect())
    }

    fn user(text: &str) -> Vec<Message> {
        vec![Message::new("user", text)]
    }

    fn task_of(headers: PurposeHeaders, messages: &[Message]) -> (&'static str, &'static str) {
        let purpose = headers.purpose(messages, false);
        (purpose.class(), purpose.task)
    }

    /// The beginnings and ends of Open WebUI's prompts, which are all that is examined.
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
        let silent = PurposeHeaders::default();
        for (text, task, class) in prompts() {
            let mut request = user(&text);
            assert_eq!(task_of(silent, &request), (class, task), "{text}");
            request.insert(0, Message::new("system", "Be brief."));
            assert_eq!(task_of(silent, &request), (class, task), "after a system text");
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
    fn the_version_is_the_one_that_is_tested() {
        let packages = include_str!("../../tests/openwebui/requirements.txt");
        let pinned = packages.lines().find_map(|line| line.strip_prefix("open-webui=="));
        let pinned = pinned.expect("Open WebUI is pinned");
        assert!(pinned.starts_with(&format!("{}.", OPEN_WEBUI.version)), "{pinned} is tested");
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
            let headers = head(fields).expect("sound");
            assert_eq!(task_of(headers, &user(&title)), (class, task), "{fields:?}");
        }
        let refused = head(&[("x-unicorn-priority", "urgent")]).unwrap_err().to_string();
        assert_eq!(refused, "X-Unicorn-Priority: expected background or interactive, got \"urgent\"");
    }
}
