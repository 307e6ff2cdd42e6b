//! `POST /v1/chat/completions`: OpenAI's chat, from the body to JSON or SSE.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{
    self, Answers, Caller, Exchange, FinishReason, Head, Parsed, Piece, Reply, TimingsReport, Usage,
    json_text,
};
use crate::api::ids::new_id;
use crate::api::openai::conversation::{ChatMessages, EndingFields, messages};
use crate::api::openai::grammar::GrammarFields;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::options::{AnswerOptions, Form};
use crate::api::openai::tools::ChatToolFields;
use crate::api::openapi::BodyErrors;
use crate::api::server::Server;
use crate::api::tools::PartialCall;
use crate::api::wire;
use crate::api::wire::bounded::{MaxTokens, TopLogprobs};
use crate::api::wire::union::Events;
use crate::api::wire::union::words;
use crate::session::{GenerateRequest, Reason};
use crate::text::CallPiece;

const CALL_ID_PREFIX: &str = "call_";

type ChatEvents = Events<ChatCompletionChunk>;

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    operation_id = "createChatCompletion",
    tag = "OpenAI",
    request_body = ChatCompletionRequest,
    responses(
        (
            status = 200,
            description = "The answer, or with `stream` its events.",
            content((ChatCompletion = "application/json"), (inline(ChatEvents) = "text/event-stream")),
        ),
        BodyErrors,
    ),
)]
pub(in crate::api) async fn completions(
    State(server): State<Arc<Server>>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let exchange =
        exchange::ask(&server, caller, body, "chatcmpl-", "messages", parse, |service, request, _| {
            Ok(vec![service.prepare(request)?])
        });
    let Exchange { wire: form, reply, answers } = exchange.await?;
    if form.stream {
        Ok(exchange::stream_lines(&server, stream_chunks(reply, answers, form.include_usage)))
    } else {
        collect(reply, answers).await.map(|body| Json(body).into_response())
    }
}

wire::composed! {
    /// The body of a chat.
    ChatCompletionRequest {
        chat: ChatFields,
        tools: ChatToolFields,
        ending: EndingFields,
        options: AnswerOptions,
        grammar: GrammarFields,
    }
}

/// The fields of a chat that are neither tools nor options of the answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatFields {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    #[schema(inline)]
    messages: ChatMessages,
    /// The most tokens of an answer; if absent, as many as the context holds.
    max_completion_tokens: Option<MaxTokens>,
    /// The older name of `max_completion_tokens`, which takes precedence.
    max_tokens: Option<MaxTokens>,
    /// Return log probabilities of the answer's tokens.
    logprobs: Option<bool>,
    /// The number of alternatives to each token; above 0 only if `logprobs` is true.
    top_logprobs: Option<TopLogprobs>,
    modalities: Option<Vec<Modality>>,
}

words! {
    Modality { Text = "text" } or Other;
}

fn parse(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
    let request = ChatCompletionRequest::read(&wire::object(body)?)?;
    let ChatCompletionRequest { chat, tools, ending, options, grammar } = request;
    let messages = messages(chat.messages)?;
    if chat.modalities.is_some_and(|modalities| modalities.iter().any(|m| *m != Modality::Text)) {
        return Err(ApiError::unsupported("modalities", "this server answers with text only"));
    }
    let tools = tools.tools()?;
    let max_tokens = chat.max_completion_tokens.or(chat.max_tokens).map(MaxTokens::get);
    let ending = ending.ending(&messages)?;
    let logprobs = logprobs(chat.logprobs, chat.top_logprobs)?;
    let parsed = options.parsed(wire::named(chat.model), max_tokens, grammar)?;
    Ok(Parsed { request: GenerateRequest { messages, tools, ending, logprobs, ..parsed.request }, ..parsed })
}

fn logprobs(wanted: Option<bool>, top: Option<TopLogprobs>) -> Result<Option<usize>, ApiError> {
    let (wanted, top) = (wanted.unwrap_or(false), top.map_or(0, |top| top.0));
    if top > 0 && !wanted {
        return Err(ApiError::invalid("top_logprobs", "expected logprobs to be true beside it"));
    }
    Ok(wanted.then_some(top as usize))
}

/// A chat completion that is not streamed.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ChatCompletion {
    #[serde(flatten)]
    head: Head,
    #[schema(inline)]
    object: Whole,
    choices: Vec<ChatChoice>,
    usage: Usage,
    timings: TimingsReport,
}

#[derive(Serialize, ToSchema)]
enum Whole {
    #[serde(rename = "chat.completion")]
    ChatCompletion,
}

#[derive(Serialize, ToSchema)]
struct ChatChoice {
    index: usize,
    message: ChatAnswer,
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    finish_reason: FinishReason,
}

#[derive(Serialize, ToSchema)]
struct ChatAnswer {
    #[schema(inline)]
    role: Assistant,
    /// The text of the answer; null if the answer calls tools.
    #[schema(required)]
    content: Option<String>,
    /// Always null: OpenAI's models put refusals here.
    #[schema(required)]
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Assistant {
    Assistant,
}

#[derive(Serialize, ToSchema)]
struct ToolCall {
    id: String,
    #[schema(inline)]
    r#type: Function,
    function: CalledFunction,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Function {
    Function,
}

#[derive(Serialize, ToSchema)]
struct CalledFunction {
    name: String,
    /// The arguments as JSON, which is incomplete if the end of the answer cut it.
    arguments: String,
}

#[derive(Serialize, ToSchema)]
struct ChatLogprobs {
    content: Vec<TokenLogprob>,
    /// Always null.
    #[schema(required)]
    refusal: Option<Vec<TokenLogprob>>,
}

impl ChatLogprobs {
    fn new(content: Vec<TokenLogprob>) -> Self {
        Self { content, refusal: None }
    }
}

/// One event of a stream.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ChatCompletionChunk {
    #[serde(flatten)]
    head: Head,
    #[schema(inline)]
    object: Part,
    /// Empty in the chunk that brings `usage`.
    choices: Vec<ChatChunkChoice>,
    /// Present if `stream_options` asks for it; null in every chunk but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>, required = false)]
    usage: Option<Option<Usage>>,
    /// Present in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    timings: Option<TimingsReport>,
}

#[derive(Serialize, ToSchema)]
enum Part {
    #[serde(rename = "chat.completion.chunk")]
    ChatCompletionChunk,
}

#[derive(Serialize, ToSchema)]
struct ChatChunkChoice {
    index: usize,
    delta: ChatDelta,
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    #[schema(required)]
    finish_reason: Option<FinishReason>,
}

/// What a chunk adds: first the role, then text or pieces of tool calls. A chunk with a finish reason adds nothing, and
/// so does a token that is no whole character yet.
#[derive(Default, Serialize, ToSchema)]
struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    role: Option<Assistant>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallDelta>,
}

/// A piece of one tool call: first its id and name, then its arguments piece by piece.
#[derive(Serialize, ToSchema)]
struct ToolCallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    r#type: Option<Function>,
    function: FunctionDelta,
}

#[derive(Serialize, ToSchema)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    name: Option<String>,
    arguments: String,
}

impl From<CallPiece> for ToolCallDelta {
    fn from(call: CallPiece) -> Self {
        match call {
            CallPiece::Name { index, name } => Self {
                index,
                id: Some(new_id(CALL_ID_PREFIX)),
                r#type: Some(Function::Function),
                function: FunctionDelta { name: Some(name), arguments: String::new() },
            },
            CallPiece::Parameters { index, json } => Self {
                index,
                id: None,
                r#type: None,
                function: FunctionDelta { name: None, arguments: json },
            },
        }
    }
}

impl ChatCompletionChunk {
    /// A chunk with these choices. If the request asks for usage, every chunk has the field.
    fn new(reply: &Reply, choices: Vec<ChatChunkChoice>, usage: bool) -> Self {
        Self {
            head: reply.head(),
            object: Part::ChatCompletionChunk,
            choices,
            usage: usage.then_some(None),
            timings: None,
        }
    }
}

/// Returns a function that wraps a text in a chunk of a stream, as JSON.
pub fn text_chunks(model: &str) -> impl Fn(&str) -> String {
    let reply = Reply::unasked(model);
    move |text| {
        let delta = ChatDelta { content: Some(text.to_owned()), ..ChatDelta::default() };
        let choice = ChatChunkChoice { index: 0, delta, logprobs: None, finish_reason: None };
        json_text(&ChatCompletionChunk::new(&reply, vec![choice], false))
    }
}

async fn collect(reply: Reply, mut answers: Answers) -> Result<ChatCompletion, ApiError> {
    let n = answers.count();
    let mut logprobs: Vec<_> = (0..n).map(|_| Vec::new()).collect();
    let (mut texts, mut calls) = (vec![String::new(); n], vec![Vec::<PartialCall>::new(); n]);
    let mut last = Reason::Stop;
    while let Some(piece) = answers.next().await {
        let piece = piece.map_err(ApiError::while_collecting)?;
        texts[piece.choice].push_str(&piece.text);
        for call in piece.calls {
            PartialCall::push(&mut calls[piece.choice], call);
        }
        let token = piece.logprobs.map(|(id, logprobs)| TokenLogprob::new(&answers.service, id, &logprobs));
        logprobs[piece.choice].extend(token);
        last = piece.end.unwrap_or(last);
    }
    let timings = answers.timings();
    reply.log(last, &timings);
    let choices = answers.ends().zip(texts).zip(calls).zip(logprobs).enumerate();
    let choices = choices.map(|(index, (((reason, text), calls), tokens))| {
        let call = |PartialCall { id, name, arguments }| ToolCall {
            id: format!("{CALL_ID_PREFIX}{id}"),
            r#type: Function::Function,
            function: CalledFunction { name, arguments },
        };
        let message = ChatAnswer {
            role: Assistant::Assistant,
            content: calls.is_empty().then_some(text),
            refusal: None,
            tool_calls: calls.into_iter().map(call).collect(),
        };
        let logprobs = (!tokens.is_empty()).then(|| ChatLogprobs::new(tokens));
        ChatChoice { index, message, logprobs, finish_reason: reason.into() }
    });
    Ok(ChatCompletion {
        head: reply.head(),
        object: Whole::ChatCompletion,
        choices: choices.collect(),
        usage: Usage::new(&timings),
        timings: TimingsReport::new(&timings),
    })
}

/// The chunks of a chat. Each answer has its role, then content or calls, then its finish reason. Usage comes after all
/// answers, if the request asks for it.
fn stream_chunks(
    reply: Reply,
    mut answers: Answers,
    include_usage: bool,
) -> impl Stream<Item = Result<String, ApiError>> {
    let chunk = move |reply: &Reply, index, delta, logprobs, reason: Option<Reason>| {
        let finish_reason = reason.map(FinishReason::from);
        let choice = ChatChunkChoice { index, delta, logprobs, finish_reason };
        ChatCompletionChunk::new(reply, vec![choice], include_usage)
    };
    async_stream::try_stream! {
        for choice in 0..answers.count() {
            let role =
                ChatDelta { role: Some(Assistant::Assistant), content: Some(String::new()), ..ChatDelta::default() };
            yield json_text(&chunk(&reply, choice, role, None, None));
        }
        while let Some(piece) = answers.next().await {
            let Piece { choice, text, calls, logprobs, end, .. } = piece?;
            if !text.is_empty() || !calls.is_empty() || logprobs.is_some() {
                // A token with log probabilities may add neither text nor calls.
                let delta = ChatDelta {
                    content: (calls.is_empty() && !text.is_empty()).then_some(text),
                    tool_calls: calls.into_iter().map(ToolCallDelta::from).collect(),
                    ..ChatDelta::default()
                };
                let token = logprobs.map(|(id, logprobs)| TokenLogprob::new(&answers.service, id, &logprobs));
                let logprobs = token.map(|token| ChatLogprobs::new(vec![token]));
                yield json_text(&chunk(&reply, choice, delta, logprobs, None));
            }
            let Some(reason) = end else { continue };
            let mut last = chunk(&reply, choice, ChatDelta::default(), None, Some(reason));
            if answers.is_done() {
                let timings = answers.timings();
                reply.log(reason, &timings);
                if include_usage {
                    yield json_text(&last);
                    last = ChatCompletionChunk::new(&reply, Vec::new(), true);
                    last.usage = Some(Some(Usage::new(&timings)));
                }
                last.timings = Some(TimingsReport::new(&timings));
            }
            yield json_text(&last);
        }
    }
}
