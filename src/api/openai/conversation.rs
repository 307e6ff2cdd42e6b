//! A conversation in the form of OpenAI's chat: messages, tool calls, and the results of the calls.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::openai::tools::{FunctionType, check_type};
use crate::api::tools::add_result;
use crate::api::wire::bounded::List;
use crate::api::wire::union::{ListedBesideText, Refused, TextOr, expected, words};
use crate::api::wire::{JsonObject, field, required};
use crate::session::{Call, Conversation, MAX_TOOLS};
use crate::text::{Message, PromptEnding, TemplateKwargs};

words! {
    ChatRole {
        System = "system", Developer = "developer", User = "user", Assistant = "assistant", Tool = "tool"
    } or Other;
    ChatPartType { Text = "text" } or Other;
}

/// The messages of a conversation.
pub(in crate::api) type ChatMessages = List<ChatMessage, 1, { usize::MAX }>;

/// The content of a message.
type ChatContent = TextOr<Vec<TextPart>>;

/// The calls of one answer.
type MadeCalls = List<MadeCall, 0, MAX_TOOLS>;

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatMessage {
    role: ChatRole,
    /// The text of the message. An assistant's or a tool's message may have none. Parts are joined without a separator.
    #[schema(inline)]
    content: Option<ChatContent>,
    /// What the assistant thought before its message. The model's template decides whether it is in the prompt.
    reasoning_content: Option<String>,
    /// The same, in vLLM's field.
    reasoning: Option<String>,
    /// The tool calls that an assistant's message made.
    #[schema(inline)]
    tool_calls: Option<MadeCalls>,
    /// For a tool's message: the id of the call that it answers, in an earlier message. Without an id, the message answers
    /// the first call of the last turn that has no result.
    tool_call_id: Option<String>,
    /// Not supported: use `tool_calls`.
    function_call: Option<Refused>,
}

/// A part of a message.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct TextPart {
    r#type: ChatPartType,
    #[schema(required, nullable = false)]
    text: Option<String>,
}

impl ListedBesideText for TextPart {
    const NAME: &str = "a list of parts";
}

/// A call that an earlier answer made.
#[derive(Debug, Deserialize, ToSchema)]
struct MadeCall {
    r#type: Option<FunctionType>,
    /// The name by which a tool's message refers to the call. Without ids, results come in the order of the calls.
    id: Option<String>,
    #[schema(required, nullable = false)]
    function: Option<MadeFunctionCall>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct MadeFunctionCall {
    name: String,
    #[schema(inline)]
    arguments: Option<CallArguments>,
}

/// The arguments as JSON text. Some clients send the object itself.
pub(in crate::api) type CallArguments = TextOr<JsonObject>;

/// A call with its arguments as JSON text.
pub(in crate::api) fn call(name: String, arguments: Option<CallArguments>) -> Call {
    let arguments = match arguments {
        None => String::new(),
        Some(TextOr::Text(text)) => text,
        Some(TextOr::Other(object)) => serde_json::Value::from(object).to_string(),
    };
    Call { name, arguments }
}

/// What the chat template gets besides the messages, in vLLM's fields.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct TemplateFields {
    /// Variables of the chat template, such as `enable_thinking`.
    chat_template_kwargs: Option<JsonObject>,
    /// Continue the last message, which must be the assistant's.
    continue_final_message: Option<bool>,
    /// Whether a new answer begins after the last message; true by default. Not together with `continue_final_message`.
    add_generation_prompt: Option<bool>,
}

/// The messages for the template. Their roles are system, developer, user or assistant.
pub(in crate::api) fn messages(items: ChatMessages) -> Result<Vec<Message>, ApiError> {
    let mut conversation = Conversation::default();
    for (i, item) in items.0.into_iter().enumerate() {
        let at = format!("messages[{i}]");
        let text = text(&at, item.content, &item.role)?;
        let role = match item.role {
            ChatRole::System => "system",
            ChatRole::Developer => "developer",
            ChatRole::User => "user",
            ChatRole::Assistant => "assistant",
            ChatRole::Tool => {
                match item.tool_call_id {
                    Some(id) => add_result(&mut conversation, &field(&at, "tool_call_id"), &id, text)?,
                    None if conversation.next_result(text) => {}
                    None => {
                        let problem = "every call before it has a result: tool_call_id must name a call";
                        return Err(ApiError::invalid(field(&at, "tool_call_id"), problem));
                    }
                }
                continue;
            }
            ChatRole::Other(role) => return Err(unknown_role(&at, &role)),
        };
        if let Some(thought) = item.reasoning_content.or(item.reasoning).filter(|_| role == "assistant") {
            conversation.think(&thought);
        }
        let calls = calls(&at, item.function_call, item.tool_calls.unwrap_or_default().0, role)?;
        if calls.is_empty() || !text.is_empty() {
            conversation.say(role, &text);
        }
        for (id, call) in calls {
            conversation.call(&id, call);
        }
    }
    Ok(conversation.finish())
}

fn unknown_role(at: &str, role: &str) -> ApiError {
    let at = field(at, "role");
    match role {
        "function" => {
            let problem = "the role \"function\" was replaced by \"tool\" with a tool_call_id";
            ApiError::unsupported(at, problem)
        }
        other => ApiError::invalid(at, expected(ChatRole::WORDS, other)),
    }
}

/// The text of a message. Parts are joined without a separator.
fn text(at: &str, content: Option<ChatContent>, role: &ChatRole) -> Result<String, ApiError> {
    let parts = match content {
        Some(TextOr::Text(text)) => return Ok(text),
        Some(TextOr::Other(parts)) => parts,
        // An assistant's turn may have no text, and a tool's result may be empty.
        None if matches!(role, ChatRole::Assistant | ChatRole::Tool) => return Ok(String::new()),
        None if matches!(role, ChatRole::Other(_)) => return Ok(String::new()),
        None => return required(None, at, "content"),
    };
    let mut joined = String::new();
    for (i, part) in parts.into_iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        match part.r#type {
            ChatPartType::Text => joined.push_str(&required(part.text, &at, "text")?),
            ChatPartType::Other(kind) => return Err(no_text(&at, &kind, ChatPartType::WORDS)),
        }
    }
    Ok(joined)
}

/// Refuses a part that is not text; `known` are the types of text parts.
pub(in crate::api) fn no_text(at: &str, kind: &str, known: &[&str]) -> ApiError {
    const MEDIA: [&str; 12] = [
        "image_url",
        "input_image",
        "input_audio",
        "file",
        "video_url",
        "input_file",
        "image",
        "document",
        "search_result",
        "container_upload",
        "audio_url",
        "input_video",
    ];
    let at = field(at, "type");
    if MEDIA.contains(&kind) {
        return ApiError::unsupported(at, format!("this server reads text only, not {kind:?}"));
    }
    ApiError::invalid(at, expected(known, kind))
}

/// The calls of an assistant's turn, each with its id.
fn calls(
    at: &str,
    function_call: Option<Refused>,
    calls: Vec<MadeCall>,
    role: &str,
) -> Result<Vec<(String, Call)>, ApiError> {
    if Refused::is_asked(function_call) {
        let problem = "was replaced by tool_calls, which this server reads";
        return Err(ApiError::unsupported(field(at, "function_call"), problem));
    }
    let at = field(at, "tool_calls");
    if role != "assistant" && !calls.is_empty() {
        return Err(ApiError::invalid(at, "only a message of the assistant may have them"));
    }
    let read = |(i, made): (usize, MadeCall)| {
        let at = format!("{at}[{i}]");
        check_type(&at, made.r#type.as_ref())?;
        let id = made.id.unwrap_or_default();
        let MadeFunctionCall { name, arguments } = required(made.function, &at, "function")?;
        Ok((id, call(name, arguments)))
    };
    calls.into_iter().enumerate().map(read).collect()
}

impl TemplateFields {
    /// The variables of the template.
    pub fn kwargs(&self) -> Result<TemplateKwargs, ApiError> {
        let JsonObject(variables) = self.chat_template_kwargs.clone().unwrap_or_default();
        TemplateKwargs::new(variables).map_err(|name| {
            let problem =
                "the server sets this variable itself; send it in the request's own field, if it has one";
            ApiError::invalid(field("chat_template_kwargs", &name), problem)
        })
    }

    pub fn ending(&self, messages: &[Message]) -> Result<PromptEnding, ApiError> {
        const AT: &str = "continue_final_message";
        let continued = self.continue_final_message.unwrap_or(false);
        let last = messages.last().map_or("", |message| message.role.as_str());
        match (continued, self.add_generation_prompt) {
            (true, Some(true)) => {
                Err(ApiError::invalid(AT, "cannot be used together with add_generation_prompt"))
            }
            (true, _) if last != "assistant" => {
                let problem =
                    format!("expected the last message to have the role \"assistant\", got {last:?}");
                Err(ApiError::invalid(AT, problem))
            }
            (true, _) => Ok(PromptEnding::Continued),
            (false, Some(false)) => Ok(PromptEnding::Closed),
            (false, _) => Ok(PromptEnding::Answer),
        }
    }
}
