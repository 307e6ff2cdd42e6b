//! The bodies of `POST /v1/messages` and of `/v1/messages/count_tokens`: Anthropic's JSON becomes a
//! [`GenerateRequest`].
//!
//! Unknown fields are ignored. So are fields for billing and tracing (`metadata`, `cache_control`). A field that would
//! change the answer and that this server does not support is refused.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::Parsed;
use crate::api::openai::conversation::unknown_part;
use crate::api::openai::other_fields::{self, OtherFields};
use crate::api::thinking::ThinkingParam;
use crate::api::tools::{Choice, Definition, ParametersSchema, TOOL_CHOICE, add_result, chosen, tool_list};
use crate::api::wire;
use crate::api::wire::bounded::{
    ImageTokens, List, MaxTokens, Probability, Salt, ToolName, numbers, texts, wrong_length,
};
use crate::api::wire::union::{Anything, ListedBesideText, Refused, TextOr, words};
use crate::api::wire::{JsonObject, field, required, short};
use crate::model::SamplingOptions;
use crate::session::{Call, Conversation, Detail, GenerateRequest, Image, MAX_TOOLS, ResponseGrammar, Tools};
use crate::text::{Content, GrammarSource, MAX_STOP_BYTES, MAX_STOPS, PromptEnding};

numbers! {
    /// Anthropic's range is narrower than OpenAI's.
    MessagesTemperature: f64 = 0.0..=1.0;
    MessagesTopK: i64 = 0..=u32::MAX as i64;
}

texts! {
    StopSequence: 1..=MAX_STOP_BYTES, None, |text: &str| wrong_length(text, 1..=MAX_STOP_BYTES);
}

words! {
    MessageRole { User = "user", Assistant = "assistant", System = "system" };
    BlockType {
        Text = "text", Image = "image", ToolUse = "tool_use", ToolResult = "tool_result", Thinking = "thinking",
        RedactedThinking = "redacted_thinking"
    } or Other;
    TextBlockType { Text = "text" } or Other;
    ResultBlockType { Text = "text", Image = "image" } or Other;
    ImageSourceType { Base64 = "base64" } or Other;
    CustomToolType { Custom = "custom" } or Other;
    MessagesChoiceType { Auto = "auto", Any = "any", Tool = "tool", None = "none" };
    OutputFormatType { JsonSchema = "json_schema" };
}

type MessageParams = List<MessageParam, 1, { usize::MAX }>;
type MessageContent = TextOr<Vec<ContentBlock>>;
type ResultContent = TextOr<Vec<ResultBlock>>;
type TextContent = TextOr<Vec<TextBlock>>;
type CustomTools = List<CustomTool, 0, MAX_TOOLS>;
type StopSequences = List<StopSequence, 0, MAX_STOPS>;

wire::composed! {
    /// The body of a message.
    MessagesRequest {
        conversation: ConversationFields,
        options: MessagesOptions,
        other: OtherFields<other_fields::Message>,
    }
}

/// The fields that the number of the prompt's tokens depends on.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = CountTokensRequest)]
pub(in crate::api) struct ConversationFields {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    /// The messages of the conversation. If the last is the assistant's, the answer continues it.
    #[schema(inline)]
    messages: MessageParams,
    /// The system text. Each block becomes a paragraph.
    #[schema(inline)]
    system: Option<TextContent>,
    /// The tools that the client runs. Their names must be unique.
    #[schema(inline)]
    tools: Option<CustomTools>,
    tool_choice: Option<MessagesToolChoice>,
    /// Whether the model thinks before it answers; if absent, as its chat template decides.
    #[schema(inline)]
    thinking: Option<ThinkingParam>,
    output_config: Option<OutputConfig>,
    /// The most tokens of each image. A model that lets a request choose has 70, 140, 280, 560 and 1120, of which the server's
    /// options may allow fewer. Every other model has one number.
    image_tokens: Option<ImageTokens>,
    /// Not supported.
    container: Option<Refused>,
    /// Not supported.
    thread: Option<Refused>,
    /// Not supported.
    #[schema(max_items = 0)]
    mcp_servers: Option<Vec<Anything>>,
}

/// The options of the answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct MessagesOptions {
    /// The most tokens of the answer. The end of the context may end the answer earlier.
    max_tokens: MaxTokens,
    /// The answer ends before the first of these texts.
    #[schema(inline)]
    stop_sequences: Option<StopSequences>,
    /// Whether the answer comes as server-sent events.
    stream: Option<bool>,
    /// Temperature; 0 is greedy decoding.
    temperature: Option<MessagesTemperature>,
    top_p: Option<Probability>,
    /// Draw from the `top_k` likeliest tokens; 0 turns this off.
    top_k: Option<MessagesTopK>,
    /// Requests share the prefix cache only with requests of the same salt.
    cache_salt: Option<Salt>,
}

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct MessageParam {
    role: MessageRole,
    /// The message's text or blocks. Each block of text becomes a paragraph.
    #[schema(inline)]
    content: MessageContent,
}

/// A block of a message. Only an assistant's message may have tool uses and thinking. Only a user's message may have tool
/// results.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ContentBlockParam)]
pub(in crate::api) struct ContentBlock {
    r#type: BlockType,
    /// For `text`: the text.
    text: Option<String>,
    /// For `image`: the image.
    source: Option<ImageSource>,
    /// For `thinking`: the thought. The model's template decides whether it is in the prompt.
    thinking: Option<String>,
    /// For `tool_use`: the id of the call.
    id: Option<String>,
    /// For `tool_use`: the name of the tool.
    name: Option<String>,
    /// For `tool_use`: the input of the tool.
    input: Option<JsonObject>,
    /// For `tool_result`: the id of a tool use in an earlier message.
    tool_use_id: Option<String>,
    /// For `tool_result`: the result, a text or blocks of text and images.
    #[schema(inline)]
    content: Option<ResultContent>,
    /// For `tool_result`: whether the tool failed.
    is_error: Option<bool>,
}

/// A block of text.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = TextBlockParam)]
pub(in crate::api) struct TextBlock {
    r#type: TextBlockType,
    /// With `text`, where it must be there.
    text: Option<String>,
}

/// A block of the result of a tool.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResultBlockParam)]
pub(in crate::api) struct ResultBlock {
    r#type: ResultBlockType,
    /// For `text`: the text.
    text: Option<String>,
    /// For `image`: the image.
    source: Option<ImageSource>,
}

/// An image in a request.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ImageSource {
    r#type: ImageSourceType,
    /// The file as base64.
    #[schema(required, nullable = false)]
    data: Option<String>,
    #[allow(dead_code, reason = "the file says itself what it is")]
    media_type: Option<String>,
}

impl ListedBesideText for ResultBlock {
    const NAME: &str = "a list of blocks";
}

impl ListedBesideText for TextBlock {
    const NAME: &str = "a list of blocks";
}

impl ListedBesideText for ContentBlock {
    const NAME: &str = "a list of blocks";
}

/// A tool that the client runs.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct CustomTool {
    r#type: Option<CustomToolType>,
    #[schema(required, nullable = false)]
    name: Option<ToolName>,
    description: Option<String>,
    #[schema(required, nullable = false)]
    input_schema: Option<ParametersSchema>,
    /// Enforce every keyword of the schema; a keyword that cannot be enforced is an error.
    strict: Option<bool>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct MessagesToolChoice {
    r#type: MessagesChoiceType,
    /// For `tool`: the name of one of `tools`.
    name: Option<String>,
    /// Allow at most one tool call in the answer.
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct OutputConfig {
    format: Option<OutputFormat>,
}

/// The format of the answer: every keyword of the schema is enforced, and one that cannot be is an error.
#[derive(Debug, Deserialize, ToSchema)]
struct OutputFormat {
    #[allow(dead_code, reason = "there is one type")]
    r#type: OutputFormatType,
    schema: JsonObject,
}

/// What the reply needs of the request.
#[derive(Debug)]
pub(in crate::api) struct Form {
    pub stops: Vec<String>,
    pub max_tokens: usize,
}

pub(in crate::api) fn parse(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
    let MessagesRequest { conversation, options, .. } = MessagesRequest::read(&wire::object(body)?)?;
    let (model, conversation) = conversation.request()?;
    let max_tokens = options.max_tokens.get();
    let stops: Vec<String> =
        options.stop_sequences.unwrap_or_default().0.into_iter().map(|stop| stop.0).collect();
    let stream = options.stream.unwrap_or(false);
    let request = GenerateRequest {
        max_tokens: Some(max_tokens),
        sampling: SamplingOptions {
            temperature: options.temperature.map(|t| t.0 as f32),
            top_p: options.top_p.map(|p| p.0 as f32),
            top_k: options.top_k.map(|k| k.0 as u32),
            ..SamplingOptions::default()
        },
        stop: stops.clone(),
        ..conversation
    };
    let cache_salt = options.cache_salt.map(|salt| salt.0);
    Ok(Parsed { model, request, stream, cache_salt, form: Form { stops, max_tokens } })
}

/// The model of a count request, and the conversation to count.
pub(in crate::api) fn parse_to_count(body: &[u8]) -> Result<(Option<String>, GenerateRequest), ApiError> {
    wire::body::<ConversationFields>(body)?.request()
}

impl ConversationFields {
    fn request(self) -> Result<(Option<String>, GenerateRequest), ApiError> {
        self.refuse_unsupported()?;
        let mut conversation = Conversation::default();
        if let Some(system) = self.system {
            conversation.say("system", text("system", without_billing(system))?);
        }
        for (i, message) in self.messages.0.into_iter().enumerate() {
            add_message(&mut conversation, &format!("messages[{i}]"), message)?;
        }
        if conversation.ends_with_calls() {
            let problem =
                "expected a tool_result for each tool_use of the last message, in a message of the user";
            return Err(ApiError::invalid("messages", problem));
        }
        let (messages, images) = conversation.finish();
        // If the last turn is the assistant's, the answer continues it.
        let continued = messages.last().is_some_and(|last| last.role == "assistant");
        let ending = if continued { PromptEnding::Continued } else { PromptEnding::Answer };
        let tools = tools(self.tools.unwrap_or_default().0, self.tool_choice)?;
        let grammar = self.output_config.and_then(|config| config.format).map(|format| ResponseGrammar {
            source: GrammarSource::JsonSchema { schema: format.schema.into(), strict: true },
            param: "output_config.format".into(),
        });
        let thinking = self.thinking.map(ThinkingParam::thinking).unwrap_or_default();
        let request = GenerateRequest {
            messages,
            images,
            image_tokens: self.image_tokens.map(|tokens| tokens.asked("image_tokens")),
            ending,
            tools,
            grammar,
            thinking,
            ..GenerateRequest::default()
        };
        Ok((wire::named(self.model), request))
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        if Refused::is_asked(self.thread) {
            return Err(ApiError::Thread);
        }
        if Refused::is_asked(self.container) {
            return Err(ApiError::unsupported("container", "this server runs no code"));
        }
        if self.mcp_servers.as_ref().is_some_and(|servers| !servers.is_empty()) {
            return Err(ApiError::unsupported("mcp_servers", "this server does not connect to MCP servers"));
        }
        Ok(())
    }
}

fn add_message(conversation: &mut Conversation, at: &str, message: MessageParam) -> Result<(), ApiError> {
    let MessageParam { role, content } = message;
    let speaker = match role {
        MessageRole::User => "user",
        MessageRole::Assistant => "assistant",
        MessageRole::System => "system",
    };
    let blocks = match content {
        TextOr::Text(text) => {
            conversation.say(speaker, text);
            return Ok(());
        }
        TextOr::Other(blocks) => blocks,
    };
    let (mut said, mut only_said) = (Content::default(), true);
    let say = |said: &mut Content, conversation: &mut Conversation| {
        if !said.is_empty() {
            conversation.say(speaker, std::mem::take(said));
        }
    };
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}.content[{i}]");
        if let BlockType::Other(kind) = &block.r#type {
            return Err(unknown_part(&at, kind, &["text", "image", "tool_use", "tool_result"]));
        }
        // The file of an image, and the result of a tool, which may be empty. They are checked in every block, as the
        // document says.
        let file = file_of(&at, block.source)?;
        let given =
            block.content.map(|content| result(conversation, &field(&at, "content"), content)).transpose()?;
        match (&block.r#type, &role) {
            (BlockType::ToolUse, MessageRole::Assistant) => {
                say(&mut said, conversation);
                let arguments = Value::from(required(block.input, &at, "input")?).to_string();
                let call = Call { name: required(block.name, &at, "name")?, arguments };
                conversation.call(&required(block.id, &at, "id")?, call);
                only_said = false;
            }
            (BlockType::ToolResult, MessageRole::User) => {
                say(&mut said, conversation);
                let failed = block.is_error.unwrap_or(false);
                let mut content = Content::from(if failed { "Error: " } else { "" });
                content.push(&given.unwrap_or_default());
                let id = required(block.tool_use_id, &at, "tool_use_id")?;
                add_result(conversation, &field(&at, "tool_use_id"), &id, content)?;
                only_said = false;
            }
            (BlockType::Thinking, MessageRole::Assistant) => {
                say(&mut said, conversation);
                conversation.think(&block.thinking.unwrap_or_default());
            }
            (BlockType::Image, _) => add_image(conversation, &mut said, &at, file)?,
            _ => said.push_paragraph(&paragraph(&at, &role, block.r#type, block.text)?.into()),
        }
    }
    // A message without text is a turn too.
    if only_said && said.is_empty() {
        conversation.say(speaker, "");
    }
    say(&mut said, conversation);
    Ok(())
}

/// Claude Code begins the system text with a line that differs in every request. Nothing of a prompt after it would be in
/// the prefix cache, so it is removed.
fn without_billing(system: TextContent) -> TextContent {
    const BILLING: &str = "x-anthropic-billing-header:";
    let rest = |text: String| match text.strip_prefix(BILLING) {
        None => text,
        Some(billing) => billing.split_once('\n').map_or("", |(_, rest)| rest.trim_start()).to_owned(),
    };
    match system {
        TextOr::Text(text) => TextOr::Text(rest(text)),
        TextOr::Other(blocks) => {
            let block = |block: TextBlock| TextBlock { text: block.text.map(rest), ..block };
            TextOr::Other(blocks.into_iter().map(block).collect())
        }
    }
}

/// A text, or blocks of text that become paragraphs.
fn text(at: &str, content: TextContent) -> Result<String, ApiError> {
    let blocks = match content {
        TextOr::Text(text) => return Ok(text),
        TextOr::Other(blocks) => blocks,
    };
    let mut paragraphs = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}[{i}]");
        match block.r#type {
            TextBlockType::Text => paragraphs.push(required(block.text, &at, "text")?),
            TextBlockType::Other(kind) => return Err(unknown_part(&at, &kind, TextBlockType::WORDS)),
        }
    }
    paragraphs.retain(|text| !text.is_empty());
    Ok(paragraphs.join("\n\n"))
}

/// The result of a tool: a text, or blocks, of which texts become paragraphs.
fn result(conversation: &mut Conversation, at: &str, content: ResultContent) -> Result<Content, ApiError> {
    let blocks = match content {
        TextOr::Text(text) => return Ok(text.into()),
        TextOr::Other(blocks) => blocks,
    };
    let mut joined = Content::default();
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}[{i}]");
        if let ResultBlockType::Other(kind) = &block.r#type {
            return Err(unknown_part(&at, kind, ResultBlockType::WORDS));
        }
        let file = file_of(&at, block.source)?;
        match block.r#type {
            ResultBlockType::Image => add_image(conversation, &mut joined, &at, file)?,
            _ => joined.push_paragraph(&required(block.text, &at, "text")?.into()),
        }
    }
    Ok(joined)
}

/// The file of the block at the path `at`, if it has one.
fn file_of(at: &str, source: Option<ImageSource>) -> Result<Option<String>, ApiError> {
    let Some(source) = source else { return Ok(None) };
    let at = field(at, "source");
    if let ImageSourceType::Other(kind) = source.r#type {
        let problem = format!(
            "expected base64, got {:?}: this server loads no addresses and stores no files, so send the image itself",
            short(&kind)
        );
        return Err(ApiError::unsupported(field(&at, "type"), problem));
    }
    required(source.data, &at, "data").map(Some)
}

/// Adds the image of the block at the path `at` to a content.
fn add_image(
    conversation: &mut Conversation,
    content: &mut Content,
    at: &str,
    file: Option<String>,
) -> Result<(), ApiError> {
    let file = required(file, at, "source")?;
    let param = field(&field(at, "source"), "data");
    let image = Image { param, kind_param: field(at, "type"), file: file.into(), detail: Detail::Usual };
    content.push_image(conversation.image(image));
    Ok(())
}

/// The text of a block. It is empty for a redacted thought, which the prompt omits.
fn paragraph(
    at: &str,
    role: &MessageRole,
    kind: BlockType,
    text: Option<String>,
) -> Result<String, ApiError> {
    match kind {
        BlockType::Text => required(text, at, "text"),
        BlockType::RedactedThinking if *role == MessageRole::Assistant => Ok(String::new()),
        BlockType::Image
        | BlockType::Other(_)
        | BlockType::ToolUse
        | BlockType::ToolResult
        | BlockType::Thinking
        | BlockType::RedactedThinking => {
            let problem = "tool_use and thinking are allowed only in a message of the assistant, and tool_result only in one of the user";
            Err(ApiError::invalid(field(at, "type"), problem))
        }
    }
}

fn tools(tools: Vec<CustomTool>, choice: Option<MessagesToolChoice>) -> Result<Tools, ApiError> {
    let definition = |(i, tool): (usize, CustomTool)| {
        let at = format!("tools[{i}]");
        if let Some(CustomToolType::Other(kind)) = tool.r#type {
            let problem = format!("this server runs no tools itself, so not {:?}", short(&kind));
            return Err(ApiError::unsupported(field(&at, "type"), problem));
        }
        let CustomTool { name, description, input_schema, strict, .. } = tool;
        let parameters = Some(required(input_schema, &at, "input_schema")?);
        Ok(Definition { at, name, description, parameters, strict })
    };
    let list = tool_list(tools.into_iter().enumerate().map(definition), "input_schema")?;
    let Some(MessagesToolChoice { r#type, name, disable_parallel_tool_use }) = choice else {
        return chosen(list, Choice::Auto, true);
    };
    let choice = match r#type {
        MessagesChoiceType::Auto => Choice::Auto,
        MessagesChoiceType::None => Choice::None,
        MessagesChoiceType::Any => Choice::Required,
        MessagesChoiceType::Tool => {
            let name = required(name, TOOL_CHOICE, "name")?;
            Choice::One { at: field(TOOL_CHOICE, "name"), name }
        }
    };
    chosen(list, choice, !disable_parallel_tool_use.unwrap_or(false))
}
