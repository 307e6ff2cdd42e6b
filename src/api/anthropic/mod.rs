//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's wire format, JSON or a stream of named events.
//!
//! An answer is a block of what the model thought, if it did, and one block of text or one for each tool call; an empty
//! answer has no block. A stream begins with the message, which reports the length of the prompt and how much of it the
//! prefix cache had. Both are known with the first token. Until then, the stream has only `ping`.

pub(in crate::api) mod request;

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use futures::{Stream, StreamExt};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::api::anthropic::request::{ConversationFields, Form, MessagesRequest};
use crate::api::error::{AnthropicError, AnthropicErrorObject, ApiError};
use crate::api::exchange::{self, Failed, Format, Head, Parsed, Prompts, Reply, json_text, named_event};
use crate::api::ids::{REQUEST_ID, new_id};
use crate::api::openapi::{AnthropicErrors, post_route};
use crate::api::paths::documented;
use crate::api::server::Server;
use crate::api::tools::PartialCall;
use crate::api::wire::reply::{Assistant, replies};
use crate::api::wire::union::{Events, words};
use crate::engine::{ClientId, Timings};
use crate::session::{Delta, GenerateRequest, Reason, Service};
use crate::text::CallPiece;

/// The header in which Anthropic's clients expect a request's id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The header that every request of Anthropic's clients has.
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const TOOL_ID_PREFIX: &str = "toolu_";

type MessageEvents = Events<MessageEvent>;

post_route! {
    /// Answers a conversation, in Anthropic's format.
    "/v1/messages", "createMessage", "Anthropic",
    MessagesRequest => Message | MessageEvents, AnthropicErrors,
    create by MessageFormat
}

post_route! {
    /// Counts the tokens of a conversation's prompt.
    "/v1/messages/count_tokens", "countMessageTokens", "Anthropic",
    ConversationFields => (description = "The answer.", body = TokenCount), AnthropicErrors,
    count_tokens(server, client: Client, body) -> Json<TokenCount> {
        let parse = |_: &_, body: &[u8]| request::parse_to_count(body);
        let counted = exchange::count_tokens(&server, &client, body, "messages", parse);
        Ok(Json(TokenCount { input_tokens: counted.await? }))
    }
}

/// Rewrites the errors of these routes, wherever they arose, in Anthropic's form, and adds the request's id in
/// Anthropic's header. Anthropic's clients, which send [`ANTHROPIC_VERSION`], have both on every route.
pub(in crate::api) async fn rewrite_errors(request: Request, next: Next) -> Response {
    let path = documented(request.uri().path());
    let is_ours = path == "/v1/messages" || path.starts_with("/v1/messages/");
    if !is_ours && !request.headers().contains_key(ANTHROPIC_VERSION) {
        return next.run(request).await;
    }
    let id = request.headers().get(REQUEST_ID).cloned().unwrap_or(HeaderValue::from_static(""));
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        let (status, error) = error.anthropic();
        let request_id = String::from_utf8_lossy(id.as_bytes()).into_owned();
        let body = AnthropicError::new(error, request_id);
        *response.status_mut() = status;
        *response.body_mut() = Body::from(json_text(&body));
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id);
    response
}

words! {
    MessageType { Message = "message" };
}

replies! {
    /// An answer; in a stream's first event, without content.
    pub(in crate::api) struct Message {
        id: String,
        #[schema(inline)]
        r#type: MessageType,
        #[schema(inline)]
        role: Assistant,
        model: String,
        content: Vec<Block>,
        stop_reason: Option<StopReason>,
        /// The stop sequence that ended the answer, if one did.
        stop_sequence: Option<String>,
        usage: MessageUsage,
    }
}

#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ContentBlock)]
pub(in crate::api) enum Block {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        /// Always empty: thoughts are not signed.
        signature: String,
    },
    ToolUse {
        id: String,
        name: String,
        /// The tool's input as the model wrote it: an object, whose numbers may have any size.
        #[schema(value_type = Object)]
        input: Box<RawValue>,
    },
}

/// Why an answer ended, by Anthropic's names.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum StopReason {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
    ModelContextWindowExceeded,
}

replies! {
    /// Tokens of the prompt that the prefix cache had count as `cache_read_input_tokens`, and not as `input_tokens`.
    /// Writing to the cache costs nothing, so `cache_creation_input_tokens` is 0.
    pub(in crate::api) struct MessageUsage {
        input_tokens: usize,
        cache_creation_input_tokens: usize,
        cache_read_input_tokens: usize,
        output_tokens: usize,
    }
}

/// One event of a stream.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::api) enum MessageEvent {
    MessageStart { message: Message },
    ContentBlockStart { index: usize, content_block: Block },
    Ping {},
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Stop, usage: MessageUsage },
    MessageStop {},
    Error { error: AnthropicErrorObject },
}

#[derive(Serialize, ToSchema)]
#[serde(tag = "type")]
pub(in crate::api) enum BlockDelta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

replies! {
    pub(in crate::api) struct TokenCount {
        input_tokens: usize,
    }

    /// How an answer ended.
    #[derive(Clone)]
    pub(in crate::api) struct Stop {
        #[serde(rename = "stop_reason")]
        reason: StopReason,
        #[serde(rename = "stop_sequence")]
        sequence: Option<String>,
    }
}

impl Stop {
    fn new(form: &Form, reason: Reason, stopped_by: Option<usize>, timings: &Timings) -> Self {
        let sequence = stopped_by.map(|i| form.stops[i].clone());
        let reason = match reason {
            _ if sequence.is_some() => StopReason::StopSequence,
            Reason::Stop => StopReason::EndTurn,
            Reason::Called => StopReason::ToolUse,
            Reason::Length if timings.predicted_n < form.max_tokens => StopReason::ModelContextWindowExceeded,
            Reason::Length => StopReason::MaxTokens,
        };
        Self { reason, sequence }
    }
}

impl MessageUsage {
    fn new(timings: &Timings) -> Self {
        Self {
            input_tokens: timings.prompt_n - timings.cached_n,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: timings.cached_n,
            output_tokens: timings.predicted_n,
        }
    }
}

impl Message {
    fn new(reply: &Reply, content: Vec<Block>, stop: Option<Stop>, timings: &Timings) -> Self {
        Self {
            id: reply.head.id.clone(),
            r#type: MessageType::Message,
            role: Assistant::Assistant,
            model: reply.head.model.clone(),
            content,
            stop_reason: stop.as_ref().map(|stop| stop.reason),
            stop_sequence: stop.and_then(|stop| stop.sequence),
            usage: MessageUsage::new(timings),
        }
    }
}

impl Block {
    fn thinking(thinking: String) -> Self {
        Self::Thinking { thinking, signature: String::new() }
    }

    fn tool_use(id: String, name: String, input: Box<RawValue>) -> Self {
        Self::ToolUse { id, name, input }
    }

    /// The block of a call in an answer that is not streamed.
    fn from_call(call: PartialCall) -> Result<Self, ApiError> {
        let input = call.whole_arguments()?;
        Ok(Self::tool_use(format!("{TOOL_ID_PREFIX}{}", call.id), call.name, input))
    }
}

/// Writes a message. A stream has the message without content, its blocks piece by piece, why it ended with the usage, and
/// the end.
struct MessageFormat {
    form: Form,
    /// Whether the message was sent.
    begun: bool,
    /// The number of blocks until now, and what the last one is; it is open.
    blocks: usize,
    open: BlockKind,
}

#[derive(Clone, Copy, PartialEq)]
enum BlockKind {
    Text,
    Thinking,
    ToolUse,
}

impl MessageFormat {
    /// The index of the open block.
    fn index(&self) -> usize {
        self.blocks - 1
    }

    /// The event that ends the open block.
    fn close(&self) -> Option<MessageEvent> {
        (self.blocks > 0).then(|| MessageEvent::ContentBlockStop { index: self.index() })
    }

    /// The events that begin a block, after the end of the one before.
    fn open(&mut self, kind: BlockKind, content_block: Block) -> Vec<MessageEvent> {
        let mut events: Vec<MessageEvent> = self.close().into_iter().collect();
        (self.blocks, self.open) = (self.blocks + 1, kind);
        events.push(MessageEvent::ContentBlockStart { index: self.index(), content_block });
        events
    }

    fn is_open(&self, kind: BlockKind) -> bool {
        self.blocks > 0 && self.open == kind
    }
}

impl Format for MessageFormat {
    const ID_PREFIX: &'static str = "msg_";
    const PROMPT: &'static str = "messages";
    const HAS_COMMENTS: bool = true;
    type Form = Form;
    type Whole = Message;
    type Event = MessageEvent;

    fn parse(_: &Arc<Server>, _: ClientId, body: &[u8]) -> Result<Parsed<Form>, ApiError> {
        request::parse(body)
    }

    fn prepare(
        form: Form,
        service: &Service,
        request: &GenerateRequest,
    ) -> Result<(Prompts, Self), ApiError> {
        let mut prepared = service.prepare(request)?;
        let engine = &mut prepared.engine;
        // Clients must send `max_tokens`, and send a value that suits any model. If it exceeds the room in the context,
        // the context is the limit.
        let room = service.engine().limits().max_context.saturating_sub(engine.prompt.len());
        engine.max_tokens = engine.max_tokens.filter(|n| *n <= room);
        Ok((vec![prepared], Self { form, begun: false, blocks: 0, open: BlockKind::Text }))
    }

    fn whole(self, reply: &Reply, answers: Vec<Delta>, timings: &Timings) -> Result<Message, ApiError> {
        let (mut content, mut stop) = (Vec::new(), None);
        for answer in answers {
            stop = answer.end.map(|reason| Stop::new(&self.form, reason, answer.stopped_by, timings));
            if !answer.thought.is_empty() {
                content.push(Block::thinking(answer.thought));
            }
            if !answer.text.is_empty() {
                content.push(Block::Text { text: answer.text });
            }
            for call in PartialCall::all(answer.calls) {
                content.push(Block::from_call(call)?);
            }
        }
        Ok(Message::new(reply, content, stop, timings))
    }

    fn begin(&mut self, _: &Reply) -> Vec<MessageEvent> {
        vec![MessageEvent::Ping {}]
    }

    fn waiting(&self, _: &Reply) -> Option<MessageEvent> {
        Some(MessageEvent::Ping {})
    }

    fn add(
        &mut self,
        reply: &Reply,
        delta: Delta,
        all: Option<&Timings>,
    ) -> Result<Vec<MessageEvent>, ApiError> {
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.begun, true) {
            let message = Message::new(reply, Vec::new(), None, &delta.timings);
            events.push(MessageEvent::MessageStart { message });
        }
        if !delta.thought.is_empty() {
            if !self.is_open(BlockKind::Thinking) {
                events.extend(self.open(BlockKind::Thinking, Block::thinking(String::new())));
            }
            let delta = BlockDelta::Thinking { thinking: delta.thought };
            events.push(MessageEvent::ContentBlockDelta { index: self.index(), delta });
        }
        if !delta.text.is_empty() {
            if !self.is_open(BlockKind::Text) {
                events.extend(self.open(BlockKind::Text, Block::Text { text: String::new() }));
            }
            let delta = BlockDelta::Text { text: delta.text };
            events.push(MessageEvent::ContentBlockDelta { index: self.index(), delta });
        }
        for call in delta.calls {
            match call {
                CallPiece::Name { name, .. } => {
                    let nothing = PartialCall::new(name.clone()).whole_arguments()?;
                    let block = Block::tool_use(new_id(TOOL_ID_PREFIX), name, nothing);
                    events.extend(self.open(BlockKind::ToolUse, block));
                }
                CallPiece::Parameters { json, .. } => {
                    let delta = BlockDelta::InputJson { partial_json: json };
                    events.push(MessageEvent::ContentBlockDelta { index: self.index(), delta });
                }
            }
        }
        if let (Some(reason), Some(timings)) = (delta.end, all) {
            events.extend(self.close());
            let stop = Stop::new(&self.form, reason, delta.stopped_by, timings);
            events.push(MessageEvent::MessageDelta { delta: stop, usage: MessageUsage::new(timings) });
            events.push(MessageEvent::MessageStop {});
        }
        Ok(events)
    }

    fn on_error(_: &Self::Form, _: Head) -> Failed<Self> {
        Box::new(|error: &ApiError| vec![MessageEvent::Error { error: error.anthropic().1 }])
    }

    fn send(
        server: &Server,
        comments: impl Stream<Item = String> + Send + 'static,
        events: impl Stream<Item = MessageEvent> + Send + 'static,
    ) -> Response {
        exchange::server_sent(server, comments, events.map(|event| named_event(&event)))
    }
}
