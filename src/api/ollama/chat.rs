//! `POST /api/chat`.

use serde::Deserialize;
use utoipa::ToSchema;

use super::answer::{AnswerFormat, LineEnd, LineHead, OllamaCall, Piece, Route};
use super::fields::{AnswerForm, OllamaAnswerFields};
use crate::api::error::ApiError;
use crate::api::openai::conversation::{CallArguments, call};
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::tools::ChatToolFields;
use crate::api::openapi::{OllamaErrors, post_route};
use crate::api::wire::bounded::List;
use crate::api::wire::reply::{Assistant, replies};
use crate::api::wire::union::Lines;
use crate::api::wire::{self, field, short};
use crate::session::{
    Conversation, Detail, GenerateRequest, Image, MAX_TOOLS, Prepared, Service, SessionError,
};
use crate::text::{Content, Message, PromptEnding};

type OllamaChatLines = Lines<OllamaChat>;
type OllamaChatFormat = AnswerFormat<ChatRoute>;
type OllamaMadeCalls = List<OllamaMadeCall, 0, MAX_TOOLS>;

post_route! {
    /// Answers a conversation, in Ollama's format.
    "/api/chat", "ollamaChat", "Ollama",
    OllamaChatRequest => OllamaChat | OllamaChatLines as "application/x-ndjson", OllamaErrors,
    chat by OllamaChatFormat
}

wire::composed! {
    /// The body of a chat in Ollama's format.
    OllamaChatRequest {
        chat: OllamaChatFields,
        tools: ChatToolFields,
        answer: OllamaAnswerFields,
    }
}

#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct OllamaChatFields {
    /// Without messages, the request loads the model, or unloads it if `keep_alive` is 0.
    messages: Option<Vec<OllamaMessage>>,
    /// If the conversation is too long, leave out its first turns; true by default.
    truncate: Option<bool>,
}

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
struct OllamaMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`, in any case.
    role: String,
    content: Option<String>,
    /// What the assistant thought before its message. The model's template decides whether it is in the prompt.
    thinking: Option<String>,
    /// Images, which come before the text: each a file as base64. Only for models that take images.
    images: Option<Vec<String>>,
    /// The tool calls that an assistant's message made.
    #[schema(inline)]
    tool_calls: Option<OllamaMadeCalls>,
    /// For a tool's message: the id of the call that it answers. Without an id, the message answers the first call of the
    /// last turn that has no result, and with `tool_name` the first one of that tool.
    tool_call_id: Option<String>,
    /// For a tool's message without an id: the tool whose result it is.
    tool_name: Option<String>,
}

/// A call that an earlier answer made.
#[derive(Debug, Deserialize, ToSchema)]
struct OllamaMadeCall {
    id: Option<String>,
    function: OllamaMadeFunctionCall,
}

#[derive(Debug, Deserialize, ToSchema)]
struct OllamaMadeFunctionCall {
    name: String,
    /// An object, or its text.
    #[schema(inline)]
    arguments: Option<CallArguments>,
}

replies! {
    /// A piece of an answer, or all of it if the request says `stream: false`.
    pub(in crate::api) struct OllamaChat {
        #[serde(flatten)]
        head: LineHead,
        message: OllamaAnswer,
        /// Log probabilities of the tokens that the line adds, if the request has `logprobs`.
        logprobs?: Vec<TokenLogprob>,
        #[serde(flatten)]
        end: LineEnd,
    }

    struct OllamaAnswer {
        #[schema(inline)]
        role: Assistant,
        content: String,
        thinking?: String,
        /// Complete calls.
        tool_calls?: Vec<OllamaCall>,
    }
}

/// How a conversation becomes a prompt. The messages are in the request.
pub(in crate::api) struct ChatPrompt {
    truncate: bool,
}

pub(in crate::api) enum ChatRoute {}

impl Route for ChatRoute {
    const PROMPT: &'static str = "messages";
    const HAS_IDS: bool = false;
    type Prompt = ChatPrompt;
    type Line = OllamaChat;

    fn parse(body: &[u8]) -> Result<(AnswerForm, GenerateRequest, Option<ChatPrompt>), ApiError> {
        let OllamaChatRequest { chat, tools, answer } = OllamaChatRequest::read(&wire::object(body)?)?;
        let (mut messages, images) = messages(chat.messages.unwrap_or_default())?;
        // Some clients end with an empty message that the answer shall fill.
        messages
            .pop_if(|last| last.role == "assistant" && last.content.is_empty() && last.tool_calls.is_empty());
        let (form, request) = answer.read()?;
        let continues =
            messages.last().is_some_and(|last| last.role == "assistant" && last.tool_calls.is_empty());
        let ending = if continues { PromptEnding::Continued } else { PromptEnding::Answer };
        let prompt = (!messages.is_empty()).then_some(ChatPrompt { truncate: chat.truncate.unwrap_or(true) });
        Ok((form, GenerateRequest { messages, images, tools: tools.tools()?, ending, ..request }, prompt))
    }

    /// Leaves out as few turns as possible if the conversation is too long.
    fn prepare(
        prompt: &ChatPrompt,
        service: &Service,
        request: &GenerateRequest,
        most: usize,
    ) -> Result<Prepared, ApiError> {
        let fits = |request: &GenerateRequest| match service.conversation(request) {
            Ok(ids) => Ok(ids.len() < most),
            Err(SessionError::Context { .. }) => Ok(false),
            Err(error) => Err(error),
        };
        match service.prepare(request) {
            Ok(whole) if !prompt.truncate || whole.engine.prompt.len() < most => return Ok(whole),
            Ok(_) => {}
            Err(SessionError::Context { .. }) if prompt.truncate => {}
            Err(error) => return Err(error.into()),
        }
        let users = request.messages.iter().enumerate().filter(|(_, message)| message.role == "user");
        let starts: Vec<usize> = users.map(|(i, _)| i).skip(1).collect();
        // The search has about as many steps as the number of turns has bits.
        let (mut low, mut high) = (0, starts.len());
        while low < high {
            let middle = (low + high) / 2;
            if fits(&from_turn(request, starts[middle]))? { high = middle } else { low = middle + 1 }
        }
        let Some(start) = starts.get(low).or(starts.last()) else { return Ok(service.prepare(request)?) };
        tracing::info!(
            "left out the first {start} messages of a conversation that is longer than {most} tokens"
        );
        Ok(service.prepare(&from_turn(request, *start))?)
    }

    fn line(_: Option<&ChatPrompt>, head: LineHead, piece: Piece, end: LineEnd) -> OllamaChat {
        let Piece { thought, text, calls, logprobs, .. } = piece;
        let message =
            OllamaAnswer { role: Assistant::Assistant, content: text, thinking: thought, tool_calls: calls };
        OllamaChat { head, message, logprobs, end }
    }
}

/// The request without the messages before `start`, except those of the system.
fn from_turn(request: &GenerateRequest, start: usize) -> GenerateRequest {
    let messages = request.messages.iter().enumerate();
    let of_system = |message: &Message| matches!(message.role.as_str(), "system" | "developer");
    let kept = messages.filter(|(i, message)| *i >= start || of_system(message));
    GenerateRequest { messages: kept.map(|(_, message)| message.clone()).collect(), ..request.clone() }
}

/// The images of `images` at the path `at`, and the text after them.
pub(super) fn content(
    conversation: &mut Conversation,
    at: &str,
    images: Option<Vec<String>>,
    text: &str,
) -> Content {
    let mut content = Content::default();
    for (i, file) in images.into_iter().flatten().enumerate() {
        let image = Image {
            param: format!("{at}[{i}]"),
            kind_param: at.to_owned(),
            file: file.into(),
            detail: Detail::Usual,
        };
        content.push_image(conversation.image(image));
    }
    content.push_text(text);
    content
}

fn messages(items: Vec<OllamaMessage>) -> Result<(Vec<Message>, Vec<Image>), ApiError> {
    let mut conversation = Conversation::default();
    for (i, item) in items.into_iter().enumerate() {
        let at = format!("messages[{i}]");
        let text = item.content.unwrap_or_default();
        let content = content(&mut conversation, &field(&at, "images"), item.images, &text);
        let calls = item.tool_calls.unwrap_or_default().0;
        let role = match item.role.to_lowercase().as_str() {
            "system" => "system",
            "developer" => "developer",
            "user" => "user",
            "assistant" => "assistant",
            "tool" => {
                let is_known = match item.tool_call_id.filter(|id| !id.is_empty()) {
                    Some(id) => conversation.result(&id, content),
                    None => conversation.next_result(item.tool_name.as_deref(), content),
                };
                if !is_known {
                    // Home Assistant cuts old messages off, and may leave the result of a call that it cut off.
                    tracing::debug!("{at}: left out the result of a call that the conversation lacks");
                }
                continue;
            }
            other => {
                let problem =
                    format!("expected system, developer, user, assistant or tool, got {:?}", short(other));
                return Err(ApiError::invalid(field(&at, "role"), problem));
            }
        };
        if role != "assistant" && !calls.is_empty() {
            let problem = "only a message of the assistant may have them";
            return Err(ApiError::invalid(field(&at, "tool_calls"), problem));
        }
        if let Some(thought) = item.thinking.filter(|_| role == "assistant") {
            conversation.think(&thought);
        }
        if calls.is_empty() || !content.is_empty() {
            conversation.say(role, content);
        }
        for OllamaMadeCall { id, function } in calls {
            conversation.call(&id.unwrap_or_default(), call(function.name, function.arguments));
        }
    }
    Ok(conversation.finish())
}
