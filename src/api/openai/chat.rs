//! `POST /v1/chat/completions`: OpenAI's chat, from the body to JSON or SSE.

use std::sync::Arc;

use axum::response::Response;
use futures::{Stream, StreamExt};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{
    self, Failed, FinishReason, Format, Head, Parsed, Prompts, Reply, TimingsReport, Usage, json_text,
};
use crate::api::ids::new_id;
use crate::api::openai::conversation::{ChatMessages, ImageFields, TemplateFields, messages};
use crate::api::openai::grammar::GrammarFields;
use crate::api::openai::logprobs::{self, TokenLogprob};
use crate::api::openai::options::{AnswerOptions, Form};
use crate::api::openai::other_fields::{self, OtherFields};
use crate::api::openai::tools::ChatToolFields;
use crate::api::openapi::{BodyErrors, post_route};
use crate::api::server::Server;
use crate::api::thinking::ChatThinkingFields;
use crate::api::tools::PartialCall;
use crate::api::wire;
use crate::api::wire::bounded::{TokenLimit, TopLogprobs};
use crate::api::wire::reply::{Assistant, Function, replies};
use crate::api::wire::union::{Events, words};
use crate::engine::{ClientId, Timings};
use crate::session::{Delta, GenerateRequest, Service};
use crate::text::CallPiece;

const CALL_ID_PREFIX: &str = "call_";

type ChatEvents = Events<ChatCompletionChunk>;

post_route! {
    /// Answers a conversation.
    "/v1/chat/completions", "createChatCompletion", "OpenAI",
    ChatCompletionRequest => ChatCompletion | ChatEvents, BodyErrors,
    completions by Chat
}

wire::composed! {
    /// The body of a chat.
    ChatCompletionRequest {
        chat: ChatFields,
        tools: ChatToolFields,
        thinking: ChatThinkingFields,
        template: TemplateFields,
        images: ImageFields,
        options: AnswerOptions,
        grammar: GrammarFields,
        other: OtherFields<other_fields::Chat>,
    }
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
    Whole { ChatCompletion = "chat.completion" };
    Chunk { ChatCompletionChunk = "chat.completion.chunk" };
}

/// Parses a body.
pub(in crate::api) fn parse(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
    let request = ChatCompletionRequest::read(&wire::object(body)?)?;
    let ChatCompletionRequest {
        chat, tools, thinking, template, images: of_images, options, grammar, ..
    } = request;
    let (messages, images) = messages(chat.messages)?;
    if chat.modalities.is_some_and(|modalities| modalities.iter().any(|m| *m != Modality::Text)) {
        return Err(ApiError::unsupported("modalities", "this server answers with text only"));
    }
    let tools = tools.tools()?;
    let limit = chat.max_completion_tokens.or(chat.max_tokens).or(options.n_predict());
    let max_tokens = limit.and_then(TokenLimit::get);
    let (ending, template_kwargs) = (template.ending(&messages)?, template.kwargs()?);
    let logprobs = logprobs::asked(chat.logprobs, chat.top_logprobs)?;
    let parsed = options.parsed(wire::named(chat.model), max_tokens, grammar)?;
    let thinking = thinking.thinking();
    let request = GenerateRequest {
        messages,
        images,
        image_tokens: of_images.tokens(),
        tools,
        ending,
        thinking,
        template_kwargs,
        logprobs,
        ..parsed.request
    };
    Ok(Parsed { request, ..parsed })
}

replies! {
    /// A chat completion that is not streamed.
    pub(in crate::api) struct ChatCompletion {
        #[serde(flatten)]
        head: Head,
        #[schema(inline)]
        object: Whole,
        choices: Vec<ChatChoice>,
        usage: Usage,
        timings: TimingsReport,
        /// Present if the request has `return_token_ids`.
        prompt_token_ids?: Vec<u32>,
    }

    struct ChatChoice {
        index: usize,
        message: ChatAnswer,
        logprobs: Option<ChatLogprobs>,
        finish_reason: FinishReason,
        /// Present if the request has `return_token_ids`. The id that ended the answer is the last.
        token_ids?: Vec<u32>,
    }

    struct ChatAnswer {
        #[schema(inline)]
        role: Assistant,
        /// The text of the answer; null if the answer calls tools.
        content: Option<String>,
        /// What the model thought before the answer, if it did, in the fields of llama.cpp and of vLLM.
        reasoning_content?: String,
        reasoning?: String,
        /// Always null: OpenAI's models put refusals here.
        refusal: Option<String>,
        tool_calls?: Vec<ToolCall>,
    }

    struct ToolCall {
        id: String,
        #[schema(inline)]
        r#type: Function,
        function: CalledFunction,
    }

    struct CalledFunction {
        name: String,
        /// The arguments as JSON, which is incomplete if the end of the answer cut it.
        arguments: String,
    }

    struct ChatLogprobs {
        content: Vec<TokenLogprob>,
        /// Always null.
        refusal: Option<Vec<TokenLogprob>>,
    }
}

impl ChatLogprobs {
    /// `None` = the request has no log probabilities.
    fn new(delta: &Delta, service: &Service) -> Option<Self> {
        let content = TokenLogprob::of(delta, service);
        (!content.is_empty()).then_some(Self { content, refusal: None })
    }
}

replies! {
    /// One event of a stream.
    pub(in crate::api) struct ChatCompletionChunk {
        #[serde(flatten)]
        head: Head,
        #[schema(inline)]
        object: Chunk,
        /// Empty in the chunk that brings `usage`.
        choices: Vec<ChatChunkChoice>,
        /// Present if `stream_options` asks for it; null in every chunk but the last, except with
        /// `continuous_usage_stats`.
        usage | null: Usage,
        /// Present in the last chunk, and with `timings_per_token` in each that adds to an answer.
        timings?: TimingsReport,
        /// Present in the first chunk, if the request has `return_token_ids`.
        prompt_token_ids?: Vec<u32>,
    }

    struct ChatChunkChoice {
        index: usize,
        delta: ChatDelta,
        logprobs: Option<ChatLogprobs>,
        finish_reason: Option<FinishReason>,
        /// The ids of the chunk's tokens, if the request has `return_token_ids`.
        token_ids?: Vec<u32>,
    }

    /// What a chunk adds: first the role, with `content` null; then pieces of a thought, of text or of one tool call. A
    /// chunk with a finish reason adds nothing, and so does a token that is no whole character yet.
    #[derive(Default)]
    struct ChatDelta {
        #[schema(inline)]
        role?: Assistant,
        content | null: String,
        /// A piece of a thought, in the fields of llama.cpp and of vLLM.
        reasoning_content?: String,
        reasoning?: String,
        /// One piece at most: some clients read only the first entry of a chunk.
        tool_calls?: [ToolCallDelta; 1],
    }

    /// A piece of one tool call: first its id and name, then its arguments piece by piece.
    struct ToolCallDelta {
        index: usize,
        id?: String,
        #[schema(inline)]
        r#type?: Function,
        function: FunctionDelta,
    }

    struct FunctionDelta {
        name?: String,
        arguments: String,
    }
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

    fn thought(thought: String) -> Self {
        Self { reasoning_content: Some(thought.clone()), reasoning: Some(thought), ..Self::default() }
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
    fn new(head: &Head, choices: Vec<ChatChunkChoice>, form: Form) -> Self {
        Self {
            head: head.clone(),
            object: Chunk::ChatCompletionChunk,
            choices,
            usage: form.include_usage.then_some(None),
            timings: None,
            prompt_token_ids: None,
        }
    }
}

/// Returns a function that wraps a text in a chunk of a stream, as JSON.
pub fn text_chunks(model: &str) -> impl Fn(&str) -> String {
    let head = Head::unasked(model);
    move |text| {
        let choice = ChatChunkChoice::new(0, ChatDelta::text(text.to_owned()));
        json_text(&ChatCompletionChunk::new(&head, vec![choice], Form::default()))
    }
}

/// Writes the reply to a chat. A stream has the role of each answer, then content or calls, then its finish reason. Usage
/// comes after all answers, if the request asks for it.
struct Chat {
    form: Form,
    /// The number of the prompt's tokens.
    prompt_n: usize,
    /// The prompt's token ids, if the request asks for them.
    prompt_token_ids: Option<Vec<u32>>,
}

impl Format for Chat {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const PROMPT: &'static str = "messages";
    const HAS_COMMENTS: bool = true;
    type Form = Form;
    type Whole = ChatCompletion;
    type Event = String;

    fn parse(_: &Arc<Server>, _: ClientId, body: &[u8]) -> Result<Parsed<Form>, ApiError> {
        parse(body)
    }

    fn prepare(
        form: Form,
        service: &Service,
        request: &GenerateRequest,
    ) -> Result<(Prompts, Self), ApiError> {
        let prepared = service.prepare(request)?;
        let prompt = &prepared.engine.prompt;
        let prompt_token_ids = form.return_token_ids.then(|| prompt.clone());
        let format = Self { form, prompt_n: prompt.len(), prompt_token_ids };
        Ok((vec![prepared], format))
    }

    fn whole(
        self,
        reply: &Reply,
        answers: Vec<Delta>,
        timings: &Timings,
    ) -> Result<ChatCompletion, ApiError> {
        let choice = |(index, answer): (usize, Delta)| {
            let logprobs = ChatLogprobs::new(&answer, &reply.service);
            let call = |PartialCall { id, name, arguments }| ToolCall {
                id: format!("{CALL_ID_PREFIX}{id}"),
                r#type: Function::Function,
                function: CalledFunction { name, arguments },
            };
            let tool_calls: Vec<_> = PartialCall::all(answer.calls).into_iter().map(call).collect();
            let tool_calls = Some(tool_calls).filter(|calls| !calls.is_empty());
            // Clients expect null next to calls, and a text otherwise, even an empty one.
            let content = Some(answer.text).filter(|text| !text.is_empty() || tool_calls.is_none());
            let thought = Some(answer.thought).filter(|thought| !thought.is_empty());
            let message = ChatAnswer {
                role: Assistant::Assistant,
                content,
                reasoning_content: thought.clone(),
                reasoning: thought,
                refusal: None,
                tool_calls,
            };
            let finish_reason = answer.end.expect("the answer has ended").into();
            let token_ids = self.form.return_token_ids.then_some(answer.ids);
            ChatChoice { index, message, logprobs, finish_reason, token_ids }
        };
        Ok(ChatCompletion {
            head: reply.head.clone(),
            object: Whole::ChatCompletion,
            choices: answers.into_iter().enumerate().map(choice).collect(),
            usage: Usage::new(timings),
            timings: TimingsReport::new(timings),
            prompt_token_ids: self.prompt_token_ids,
        })
    }

    fn begin(&mut self, reply: &Reply) -> Vec<String> {
        let mut role = |index| {
            let choice = ChatChunkChoice::new(index, ChatDelta::role());
            let mut chunk = ChatCompletionChunk::new(&reply.head, vec![choice], self.form);
            chunk.prompt_token_ids = self.prompt_token_ids.take();
            if self.form.continuous_usage_stats {
                let prompt = Timings { prompt_n: self.prompt_n, ..Timings::default() };
                chunk.usage = Some(Some(Usage::new(&prompt)));
            }
            json_text(&chunk)
        };
        (0..reply.count).map(&mut role).collect()
    }

    fn add(&mut self, reply: &Reply, delta: Delta, all: Option<&Timings>) -> Result<Vec<String>, ApiError> {
        let form = self.form;
        let mut logprobs = ChatLogprobs::new(&delta, &reply.service);
        let Delta { choice: index, thought, text, calls, ids, end, timings, .. } = delta;
        let has_id = form.return_token_ids && !ids.is_empty() && end.is_none();
        let mut token_ids = form.return_token_ids.then_some(ids);
        let mut deltas: Vec<ChatDelta> = Vec::new();
        if !thought.is_empty() {
            deltas.push(ChatDelta::thought(thought));
        }
        if !text.is_empty() {
            deltas.push(ChatDelta::text(text));
        }
        deltas.extend(calls.into_iter().map(ChatDelta::call));
        if deltas.is_empty() && (logprobs.is_some() || has_id) {
            // A token may add neither text nor calls. Its log probabilities or its id are sent anyway.
            deltas.push(ChatDelta::default());
        }
        let chunk = |choice| {
            let mut chunk = ChatCompletionChunk::new(&reply.head, vec![choice], form);
            (chunk.usage, chunk.timings) = form.progress(&timings);
            chunk
        };
        let mut lines = Vec::new();
        for delta in deltas {
            let mut choice = ChatChunkChoice::new(index, delta);
            choice.logprobs = logprobs.take();
            choice.token_ids = token_ids.as_mut().map(std::mem::take);
            lines.push(json_text(&chunk(choice)));
        }
        let Some(reason) = end else { return Ok(lines) };
        let mut choice = ChatChunkChoice::new(index, ChatDelta::default());
        choice.finish_reason = Some(reason.into());
        choice.token_ids = token_ids;
        let mut last = chunk(choice);
        if let Some(timings) = all {
            if form.include_usage {
                lines.push(json_text(&last));
                last = ChatCompletionChunk::new(&reply.head, Vec::new(), form);
                last.usage = Some(Some(Usage::new(timings)));
            }
            last.timings = Some(TimingsReport::new(timings));
        }
        lines.push(json_text(&last));
        Ok(lines)
    }

    fn end(&mut self, _: &Reply) -> Vec<String> {
        exchange::done()
    }

    fn on_error(_: &Self::Form, _: Head) -> Failed<Self> {
        Box::new(exchange::failed_lines)
    }

    fn send(
        server: &Server,
        comments: impl Stream<Item = String> + Send + 'static,
        lines: impl Stream<Item = String> + Send + 'static,
    ) -> Response {
        exchange::server_sent(server, comments, lines.map(exchange::line))
    }
}
