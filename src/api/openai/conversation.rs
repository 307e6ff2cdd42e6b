//! A conversation in the form of OpenAI's chat: messages, tool calls, and the results of the calls.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::openai::tools::{FunctionType, check_type};
use crate::api::tools::add_result;
use crate::api::wire::bounded::{ImageTokens, List};
use crate::api::wire::union::{BesideText, ListedBesideText, Refused, TextOr, expected, words};
use crate::api::wire::{JsonObject, field, required};
use crate::session::{AskedImageTokens, Call, Conversation, Detail, Image, MAX_TOOLS};
use crate::text::{Content, Message, PromptEnding, TemplateKwargs};

words! {
    ChatRole {
        System = "system", Developer = "developer", User = "user", Assistant = "assistant", Tool = "tool"
    } or Other;
    ChatPartType { Text = "text", ImageUrl = "image_url" } or Other;
    /// How closely a model looks at an image, if it lets a request choose. `original` means `high`.
    ImageDetail { Low = "low", Auto = "auto", High = "high", Original = "original" };
}

impl ImageDetail {
    /// The detail of an image with this field.
    pub fn of(field: Option<Self>) -> Detail {
        match field {
            Some(Self::Low) => Detail::Low,
            None | Some(Self::Auto) => Detail::Usual,
            Some(Self::High | Self::Original) => Detail::High,
        }
    }
}

/// The messages of a conversation.
pub(in crate::api) type ChatMessages = List<ChatMessage, 1, { usize::MAX }>;

/// The content of a message.
type ChatContent = TextOr<Vec<ChatPart>>;

/// The calls of one answer.
type MadeCalls = List<MadeCall, 0, MAX_TOOLS>;

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatMessage {
    role: ChatRole,
    /// The text of the message, or its parts, which are joined without a separator. An assistant's or a tool's message may
    /// have none.
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

/// An image, or its `url` alone.
type ImageFile = TextOr<ImageUrl>;

/// A part of a message: a text, or an image for a model that takes images.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatPart {
    r#type: ChatPartType,
    /// For `text`: the text.
    text: Option<String>,
    /// For `image_url`: the image, or its `url` alone.
    #[schema(inline)]
    image_url: Option<ImageFile>,
}

impl ListedBesideText for ChatPart {
    const NAME: &str = "a list of parts";
}

/// An image.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ImageUrl {
    /// The file, as `data:image/png;base64,...` or as base64 alone. Nothing is loaded from an address.
    url: String,
    /// How many tokens the image may have, if the model lets a request choose: 70 (`low`), as the server's options say
    /// (`auto`), or as many as the server allows (`high`, `original`).
    detail: Option<ImageDetail>,
}

impl BesideText for ImageUrl {
    const NAME: &str = "an object";
    const IS_LIST: bool = false;
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

/// How many tokens the images of a request may have.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ImageFields {
    /// The most tokens of each image, whatever its `detail`. A model that lets a request choose has 70, 140, 280, 560 and 1120,
    /// of which the server's options may allow fewer. Every other model has one number.
    image_tokens: Option<ImageTokens>,
    /// In vLLM's form; `image_tokens` takes precedence.
    mm_processor_kwargs: Option<ProcessorFields>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct ProcessorFields {
    /// The same as `image_tokens`.
    max_soft_tokens: Option<ImageTokens>,
}

impl ImageFields {
    /// The number that the request asks for.
    pub fn tokens(&self) -> Option<AskedImageTokens> {
        let of_processor = || {
            let tokens = self.mm_processor_kwargs.as_ref()?.max_soft_tokens?;
            Some(tokens.asked("mm_processor_kwargs.max_soft_tokens"))
        };
        self.image_tokens.map(|tokens| tokens.asked("image_tokens")).or_else(of_processor)
    }
}

/// The messages for the template, and their images. The roles are system, developer, user, assistant or tool.
pub(in crate::api) fn messages(items: ChatMessages) -> Result<(Vec<Message>, Vec<Image>), ApiError> {
    let mut conversation = Conversation::default();
    for (i, item) in items.0.into_iter().enumerate() {
        let at = format!("messages[{i}]");
        let content = content(&mut conversation, &at, item.content, &item.role)?;
        let role = match item.role {
            ChatRole::System => "system",
            ChatRole::Developer => "developer",
            ChatRole::User => "user",
            ChatRole::Assistant => "assistant",
            ChatRole::Tool => {
                match item.tool_call_id {
                    Some(id) => add_result(&mut conversation, &field(&at, "tool_call_id"), &id, content)?,
                    None if conversation.next_result(None, content) => {}
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
        if calls.is_empty() || !content.is_empty() {
            conversation.say(role, content);
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

/// The content of a message. Parts are joined without a separator.
fn content(
    conversation: &mut Conversation,
    at: &str,
    content: Option<ChatContent>,
    role: &ChatRole,
) -> Result<Content, ApiError> {
    let parts = match content {
        Some(TextOr::Text(text)) => return Ok(text.into()),
        Some(TextOr::Other(parts)) => parts,
        // An assistant's turn may have no text, and a tool's result may be empty.
        None if matches!(role, ChatRole::Assistant | ChatRole::Tool) => return Ok(Content::default()),
        None if matches!(role, ChatRole::Other(_)) => return Ok(Content::default()),
        None => return required(None, at, "content"),
    };
    let mut joined = Content::default();
    for (i, part) in parts.into_iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        match part.r#type {
            ChatPartType::Text => joined.push_text(&required(part.text, &at, "text")?),
            ChatPartType::ImageUrl => {
                let (name, file, detail) = match required(part.image_url, &at, "image_url")? {
                    TextOr::Text(url) => ("image_url", url, None),
                    TextOr::Other(ImageUrl { url, detail }) => ("image_url.url", url, detail),
                };
                let image = Image {
                    param: field(&at, name),
                    kind_param: field(&at, "type"),
                    file: file.into(),
                    detail: ImageDetail::of(detail),
                };
                joined.push_image(conversation.image(image));
            }
            ChatPartType::Other(kind) => return Err(unknown_part(&at, &kind, ChatPartType::WORDS)),
        }
    }
    Ok(joined)
}

/// Refuses a part of an unknown type; `known` are the types that may be there.
pub(in crate::api) fn unknown_part(at: &str, kind: &str, known: &[&str]) -> ApiError {
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
        return ApiError::unsupported(at, format!("{}, which is not read here", expected(known, kind)));
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
