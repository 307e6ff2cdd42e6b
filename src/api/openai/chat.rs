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
use crate::api::openai::other_fields::{self, OtherFields};
use crate::api::openai::tools::ChatToolFields;
use crate::api::openapi::BodyErrors;
use crate::api::server::Server;
use crate::api::tools::PartialCall;
use crate::api::wire;
use crate::api::wire::bounded::{TokenLimit, TopLogprobs};
use crate::api::wire::union::Events;
use crate::api::wire::union::words;
use crate::engine::Timings;
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
        exchange::ask(&server, caller, body, "chatcmpl-", "messages", parse, |service, request, form| {
            let prepared = service.prepare(request)?;
            form.prompt_n = prepared.0.prompt.len();
            form.prompt_token_ids = form.options.return_token_ids.then(|| prepared.0.prompt.clone());
            Ok(vec![prepared])
        });
    let Exchange { wire: form, reply, answers } = exchange.await?;
    if form.options.stream {
        Ok(exchange::stream_lines(&server, stream_chunks(reply, answers, form)))
    } else {
        collect(reply, answers, form).await.map(|body| Json(body).into_response())
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
        other: OtherFields<other_fields::Chat>,
    }
}

/// What the reply needs to know of the request.
pub(in crate::api) struct ChatForm {
    options: Form,
    /// The number of the prompt's tokens.
    prompt_n: usize,
    /// The prompt's token ids, if the request asks for them.
    prompt_token_ids: Option<Vec<u32>>,
}

/// The fields of a chat that are neither tools nor options of the answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatFields {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    #[schema(inline)]
    messages: ChatMessages,
    /// The most tokens of an answer; if absent or -1, as many as the context holds.
    #[schema(inline)]
    max_completion_tokens: Option<TokenLimit>,
    /// The older name of `max_completion_tokens`, which takes precedence.
    #[schema(inline)]
    max_tokens: Option<TokenLimit>,
    /// Return log probabilities of the answer's tokens.
    logprobs: Option<bool>,
    /// The number of alternatives to each token; above 0 only if `logprobs` is true.
    top_logprobs: Option<TopLogprobs>,
    modalities: Option<Vec<Modality>>,
}

words! {
    Modality { Text = "text" } or Other;
}

/// Parses a body.
pub(in crate::api) fn parse(body: &[u8]) -> Result<Parsed<ChatForm>, ApiError> {
    let request = ChatCompletionRequest::read(&wire::object(body)?)?;
    let ChatCompletionRequest { chat, tools, ending, options, grammar, .. } = request;
    let messages = messages(chat.messages)?;
    if chat.modalities.is_some_and(|modalities| modalities.iter().any(|m| *m != Modality::Text)) {
        return Err(ApiError::unsupported("modalities", "this server answers with text only"));
    }
    let tools = tools.tools()?;
    let limit = chat.max_completion_tokens.or(chat.max_tokens).or(options.n_predict());
    let max_tokens = limit.and_then(TokenLimit::get);
    let ending = ending.ending(&messages)?;
    let logprobs = logprobs(chat.logprobs, chat.top_logprobs)?;
    let parsed = options.parsed(wire::named(chat.model), max_tokens, grammar)?;
    let Parsed { model, request, stream, cache_salt, wire: options } = parsed;
    let request = GenerateRequest { messages, tools, ending, logprobs, ..request };
    let form = ChatForm { options, prompt_n: 0, prompt_token_ids: None };
    Ok(Parsed { model, request, stream, cache_salt, wire: form })
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
    /// Present if the request has `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_token_ids: Option<Vec<u32>>,
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
    /// Present if the request has `return_token_ids`. The id that ended the answer is the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
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
    object: ChunkObject,
    /// Empty in the chunk that brings `usage`.
    choices: Vec<ChatChunkChoice>,
    /// Present if `stream_options` asks for it; null in every chunk but the last, except with `continuous_usage_stats`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>, required = false)]
    usage: Option<Option<Usage>>,
    /// Present in the last chunk, and with `timings_per_token` in each that adds to an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    timings: Option<TimingsReport>,
    /// Present in the first chunk, if the request has `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Serialize, ToSchema)]
enum ChunkObject {
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
    /// The ids of the chunk's tokens, if the request has `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
}

/// What a chunk adds: first the role, with `content` null; then text or a piece of one tool call. A chunk with a finish
/// reason adds nothing, and so does a token that is no whole character yet.
#[derive(Default, Serialize, ToSchema)]
struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    role: Option<Assistant>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, required = false)]
    content: Option<Option<String>>,
    /// One piece at most: some clients read only the first entry of a chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    tool_calls: Option<[ToolCallDelta; 1]>,
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

impl ChatDelta {
    /// The first delta of an answer.
    fn role() -> Self {
        Self { role: Some(Assistant::Assistant), content: Some(None), ..Self::default() }
    }

    fn text(text: String) -> Self {
        Self { content: Some(Some(text)), ..Self::default() }
    }

    fn call(call: CallPiece) -> Self {
        Self { tool_calls: Some([call.into()]), ..Self::default() }
    }
}

impl ChatChunkChoice {
    fn new(index: usize, delta: ChatDelta) -> Self {
        Self { index, delta, logprobs: None, finish_reason: None, token_ids: None }
    }
}

impl ChatCompletionChunk {
    /// A chunk with these choices. If the request asks for usage, every chunk has the field.
    fn new(reply: &Reply, choices: Vec<ChatChunkChoice>, form: Form) -> Self {
        Self {
            head: reply.head(),
            object: ChunkObject::ChatCompletionChunk,
            choices,
            usage: form.include_usage.then_some(None),
            timings: None,
            prompt_token_ids: None,
        }
    }
}

/// Returns a function that wraps a text in a chunk of a stream, as JSON.
pub fn text_chunks(model: &str) -> impl Fn(&str) -> String {
    let reply = Reply::unasked(model);
    move |text| {
        let choice = ChatChunkChoice::new(0, ChatDelta::text(text.to_owned()));
        json_text(&ChatCompletionChunk::new(&reply, vec![choice], Form::default()))
    }
}

/// One answer as its pieces come.
#[derive(Default, Clone)]
struct PartialAnswer {
    text: String,
    calls: Vec<PartialCall>,
    logprobs: Vec<TokenLogprob>,
    token_ids: Vec<u32>,
}

async fn collect(reply: Reply, mut answers: Answers, form: ChatForm) -> Result<ChatCompletion, ApiError> {
    let mut partial = vec![PartialAnswer::default(); answers.count()];
    let mut last = Reason::Stop;
    while let Some(piece) = answers.next().await {
        let piece = piece.map_err(ApiError::while_collecting)?;
        let answer = &mut partial[piece.choice];
        answer.text.push_str(&piece.text);
        for call in piece.calls {
            PartialCall::push(&mut answer.calls, call);
        }
        let token = piece.logprobs.map(|(id, logprobs)| TokenLogprob::new(&answers.service, id, &logprobs));
        answer.logprobs.extend(token);
        answer.token_ids.extend(piece.id);
        last = piece.end.unwrap_or(last);
    }
    let timings = answers.timings();
    reply.log(last, &timings);
    let choices = answers.ends().zip(partial).enumerate().map(|(index, (reason, answer))| {
        let PartialAnswer { text, calls, logprobs, token_ids } = answer;
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
        let logprobs = (!logprobs.is_empty()).then(|| ChatLogprobs::new(logprobs));
        let token_ids = form.options.return_token_ids.then_some(token_ids);
        ChatChoice { index, message, logprobs, finish_reason: reason.into(), token_ids }
    });
    Ok(ChatCompletion {
        head: reply.head(),
        object: Whole::ChatCompletion,
        choices: choices.collect(),
        usage: Usage::new(&timings),
        timings: TimingsReport::new(&timings),
        prompt_token_ids: form.prompt_token_ids,
    })
}

/// The chunks of a chat. Each answer has its role, then content or calls, then its finish reason. Usage comes after all
/// answers, if the request asks for it.
fn stream_chunks(
    reply: Reply,
    mut answers: Answers,
    ChatForm { options: form, prompt_n, mut prompt_token_ids }: ChatForm,
) -> impl Stream<Item = Result<String, ApiError>> {
    let chunk = move |reply: &Reply, choice| ChatCompletionChunk::new(reply, vec![choice], form);
    async_stream::try_stream! {
        for index in 0..answers.count() {
            let mut role = chunk(&reply, ChatChunkChoice::new(index, ChatDelta::role()));
            role.prompt_token_ids = prompt_token_ids.take();
            if form.continuous_usage_stats {
                role.usage = Some(Some(Usage::new(&Timings { prompt_n, ..Timings::default() })));
            }
            yield json_text(&role);
        }
        while let Some(piece) = answers.next().await {
            let Piece { choice: index, text, calls, id, logprobs, end, timings, .. } = piece?;
            let mut token_ids = form.return_token_ids.then(|| Vec::from_iter(id));
            let has_id = token_ids.as_ref().is_some_and(|ids| !ids.is_empty()) && end.is_none();
            let mut deltas: Vec<ChatDelta> = calls.into_iter().map(ChatDelta::call).collect();
            if !text.is_empty() {
                deltas.push(ChatDelta::text(text));
            } else if deltas.is_empty() && (logprobs.is_some() || has_id) {
                // A token may add neither text nor calls. Its log probabilities or its id come all the same.
                deltas.push(ChatDelta::default());
            }
            let token = logprobs.map(|(id, logprobs)| TokenLogprob::new(&answers.service, id, &logprobs));
            let mut token = token.map(|token| ChatLogprobs::new(vec![token]));
            for delta in deltas {
                let mut choice = ChatChunkChoice::new(index, delta);
                choice.logprobs = token.take();
                choice.token_ids = token_ids.as_mut().map(std::mem::take);
                let mut next = chunk(&reply, choice);
                (next.usage, next.timings) = form.progress(&timings);
                yield json_text(&next);
            }
            let Some(reason) = end else { continue };
            let mut choice = ChatChunkChoice::new(index, ChatDelta::default());
            choice.finish_reason = Some(reason.into());
            choice.token_ids = token_ids;
            let mut last = chunk(&reply, choice);
            (last.usage, last.timings) = form.progress(&timings);
            if answers.is_done() {
                let timings = answers.timings();
                reply.log(reason, &timings);
                if form.include_usage {
                    yield json_text(&last);
                    last = ChatCompletionChunk::new(&reply, Vec::new(), form);
                    last.usage = Some(Some(Usage::new(&timings)));
                }
                last.timings = Some(TimingsReport::new(&timings));
            }
            yield json_text(&last);
        }
    }
}
