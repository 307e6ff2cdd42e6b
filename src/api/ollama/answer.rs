//! What the answers of `/api/chat` and `/api/generate` have in common: the prompt that fits, and the lines of the reply.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use futures::Stream;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::fields::AnswerForm;
use crate::api::error::ApiError;
use crate::api::exchange::{self, Failed, Format, Head, Parsed, Prompts, Reply, json_text};
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::server::Server;
use crate::api::tools::PartialCall;
use crate::api::wire::reply::{Function, replies};
use crate::engine::{ClientId, KeepAlive, SubmitError, Timings};
use crate::session::{Delta, GenerateRequest, Prepared, Reason, Service};

/// One of the two routes.
pub(in crate::api) trait Route: Sized + Send + 'static {
    const PROMPT: &'static str;
    /// Whether the last line has the ids of prompt and answer.
    const HAS_IDS: bool;
    /// What the route keeps of the body, apart from the shared fields.
    type Prompt: Send + Sync;
    /// An object of the reply.
    type Line: Serialize;

    /// The shared fields, the request, and what else the route needs. No prompt = the request loads or unloads the model.
    fn parse(body: &[u8]) -> Result<(AnswerForm, GenerateRequest, Option<Self::Prompt>), ApiError>;

    /// Makes the prompt. `most` is the number of tokens that prompt and answer may have together.
    fn prepare(
        prompt: &Self::Prompt,
        service: &Service,
        request: &GenerateRequest,
        most: usize,
    ) -> Result<Prepared, ApiError>;

    fn line(prompt: Option<&Self::Prompt>, head: LineHead, piece: Piece, end: LineEnd) -> Self::Line;
}

/// What a request wants.
pub(in crate::api) struct Wanted<P> {
    form: AnswerForm,
    prompt: Option<P>,
}

/// Writes a reply.
pub(in crate::api) struct AnswerFormat<R: Route> {
    model: String,
    keep_alive: KeepAlive,
    prompt: Option<R::Prompt>,
    /// The ids of the prompt and of the answer until now.
    ids: Vec<u32>,
    /// The calls until now, and the number of those that were sent.
    calls: Vec<PartialCall>,
    sent: usize,
    route: PhantomData<fn() -> R>,
}

/// What all lines of a reply begin with.
#[derive(Clone, Serialize, ToSchema)]
pub(in crate::api) struct LineHead {
    /// The model's name as the request has it, if a list has that name, too.
    model: String,
    /// When the line was written, in RFC 3339.
    created_at: String,
}

/// What a line adds to the answer.
#[derive(Default)]
pub(in crate::api) struct Piece {
    pub thought: Option<String>,
    pub text: String,
    pub calls: Option<Vec<OllamaCall>>,
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The ids of the prompt and the answer, in the last line.
    pub ids: Vec<u32>,
}

replies! {
    /// What the last line of a reply has. Durations are in nanoseconds.
    #[derive(Default)]
    pub(in crate::api) struct LineEnd {
        done: bool,
        done_reason?: DoneReason,
        total_duration?: u64,
        /// How long the request waited before its prompt was computed. If the model was unloaded, this includes the load.
        load_duration?: u64,
        /// Tokens of the prompt, with those that the prefix cache had.
        prompt_eval_count?: usize,
        prompt_eval_duration?: u64,
        eval_count?: usize,
        eval_duration?: u64,
    }

    pub(in crate::api) struct OllamaCall {
        id: String,
        #[schema(inline)]
        r#type: Function,
        function: OllamaCalledFunction,
    }

    struct OllamaCalledFunction {
        index: usize,
        name: String,
        /// The arguments as the model wrote them: an object, whose numbers may have any size.
        #[schema(value_type = Object)]
        arguments: Box<RawValue>,
    }
}

#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum DoneReason {
    /// The model ended the answer, or called tools, or a stop string was found.
    Stop,
    /// The limit of tokens, or the context, was reached.
    Length,
    /// The request had no prompt: the model is loaded.
    Load,
    /// The request had no prompt and the `keep_alive` 0: the model is unloaded when it is idle.
    Unload,
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

impl LineEnd {
    fn answered(reason: Reason, timings: &Timings) -> Self {
        let Timings { queue, prefill, decode, prompt_n, predicted_n, .. } = *timings;
        Self {
            done: true,
            done_reason: Some(match reason {
                Reason::Stop | Reason::Called => DoneReason::Stop,
                Reason::Length => DoneReason::Length,
            }),
            total_duration: Some(nanoseconds(queue + prefill + decode)),
            load_duration: Some(nanoseconds(queue)),
            prompt_eval_count: Some(prompt_n),
            prompt_eval_duration: Some(nanoseconds(prefill)),
            eval_count: Some(predicted_n),
            eval_duration: Some(nanoseconds(decode)),
        }
    }

    /// The end of a reply to a request without a prompt.
    fn of_command(keep_alive: KeepAlive) -> Self {
        let done_reason = if unloads(keep_alive) { DoneReason::Unload } else { DoneReason::Load };
        Self { done: true, done_reason: Some(done_reason), ..Self::default() }
    }
}

/// Whether the model is unloaded right after the request.
fn unloads(keep_alive: KeepAlive) -> bool {
    keep_alive == KeepAlive::For(Duration::ZERO)
}

impl OllamaCall {
    fn new(index: usize, call: &PartialCall) -> Result<Self, ApiError> {
        let arguments = call.whole_arguments()?;
        let function = OllamaCalledFunction { index, name: call.name.clone(), arguments };
        Ok(Self { id: format!("call_{}", call.id), r#type: Function::Function, function })
    }
}

impl<R: Route> AnswerFormat<R> {
    fn line(&self, piece: Piece, end: LineEnd) -> R::Line {
        let head = LineHead { model: self.model.clone(), created_at: jiff::Timestamp::now().to_string() };
        R::line(self.prompt.as_ref(), head, piece, end)
    }

    fn text_line(&self, piece: Piece, end: LineEnd) -> String {
        json_text(&self.line(piece, end))
    }

    fn add_ids(&mut self, ids: &[u32]) {
        if R::HAS_IDS {
            self.ids.extend(ids);
        }
    }

    /// The calls that are complete and were not sent. `all`: the answer has ended, and the last call is complete too.
    fn complete_calls(&mut self, all: bool) -> Result<Option<Vec<OllamaCall>>, ApiError> {
        let end = if all { self.calls.len() } else { self.calls.len().saturating_sub(1) };
        let calls = (self.sent..end).map(|i| OllamaCall::new(i, &self.calls[i]));
        let calls: Vec<_> = calls.collect::<Result<_, _>>()?;
        self.sent = self.sent.max(end);
        Ok((!calls.is_empty()).then_some(calls))
    }
}

/// Log probabilities of a delta's tokens. `None` = the request has none, or the delta has no token.
fn logprobs(delta: &Delta, service: &Service) -> Option<Vec<TokenLogprob>> {
    Some(TokenLogprob::of(delta, service)).filter(|all| !all.is_empty())
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl<R: Route> Format for AnswerFormat<R> {
    const ID_PREFIX: &'static str = "ollama-";
    const PROMPT: &'static str = R::PROMPT;
    /// Lines of JSON have no comments.
    const HAS_COMMENTS: bool = false;
    type Form = Wanted<R::Prompt>;
    type Whole = R::Line;
    type Event = String;

    fn parse(server: &Arc<Server>, _: ClientId, body: &[u8]) -> Result<Parsed<Self::Form>, ApiError> {
        let (mut form, request, prompt) = R::parse(body)?;
        let (model, stream) = (form.model.clone(), form.stream);
        form.model = Some(server.tagged_name(form.model.as_deref()));
        Ok(Parsed { model, request, stream, cache_salt: None, form: Wanted { form, prompt } })
    }

    fn prepare(
        Wanted { form, prompt }: Self::Form,
        service: &Service,
        request: &GenerateRequest,
    ) -> Result<(Prompts, Self), ApiError> {
        let mut format = Self {
            model: form.model.clone().unwrap_or_default(),
            keep_alive: form.keep_alive,
            prompt,
            ids: Vec::new(),
            calls: Vec::new(),
            sent: 0,
            route: PhantomData,
        };
        let Some(prompt) = &format.prompt else { return Ok((Vec::new(), format)) };
        let can_think = service.tokenizer().thought_tokens().is_some();
        if form.think == Some(true) && !can_think {
            let problem = format!("{:?} does not support thinking", format.model);
            return Err(ApiError::invalid("think", problem));
        }
        let mut request = request.clone();
        request.thinking.enabled = can_think.then(|| form.think.unwrap_or(true));
        let context = service.engine().limits().max_context;
        let most = form.num_ctx.map_or(context, |most| most.min(context));
        let mut prepared = R::prepare(prompt, service, &request, most)?;
        let engine = &mut prepared.engine;
        let prompt_n = engine.prompt.len();
        if prompt_n >= context {
            let error = SubmitError::ContextExceeded { prompt: prompt_n, max_tokens: None, context };
            return Err(error.into());
        }
        if prompt_n >= most {
            let problem = format!(
                "the prompt has {prompt_n} tokens, and options.num_ctx allows {most} for the prompt and its answer: send a \
                 larger num_ctx"
            );
            return Err(ApiError::context(problem));
        }
        let room = most - prompt_n;
        engine.max_tokens = Some(engine.max_tokens.map_or(room, |n| n.min(room)));
        engine.keep_alive = form.keep_alive;
        if R::HAS_IDS {
            format.ids = engine.prompt.clone();
        }
        Ok((vec![prepared], format))
    }

    fn is_unload(Wanted { form, prompt }: &Self::Form) -> bool {
        prompt.is_none() && unloads(form.keep_alive)
    }

    async fn ready(&self, service: &Service) -> Result<(), ApiError> {
        if self.prompt.is_some() {
            return Ok(());
        }
        let engine = service.engine();
        if unloads(self.keep_alive) {
            return Ok(engine.unload()?);
        }
        match engine.load(self.keep_alive)?.recv().await {
            Some(()) => Ok(()),
            // The engine has ended.
            None => Err(engine.health().err().map_or(ApiError::Loading, ApiError::Engine)),
        }
    }

    fn whole(mut self, reply: &Reply, answers: Vec<Delta>, timings: &Timings) -> Result<R::Line, ApiError> {
        let Some(answer) = answers.into_iter().next() else {
            return Ok(self.line(Piece::default(), LineEnd::of_command(self.keep_alive)));
        };
        let logprobs = logprobs(&answer, &reply.service);
        self.add_ids(&answer.ids);
        self.calls = PartialCall::all(answer.calls);
        let end = LineEnd::answered(answer.end.expect("the answer has ended"), timings);
        let calls = self.complete_calls(true)?;
        let ids = std::mem::take(&mut self.ids);
        let piece = Piece { thought: some(answer.thought), text: answer.text, calls, logprobs, ids };
        Ok(self.line(piece, end))
    }

    fn waiting(&self, _: &Reply) -> Option<String> {
        Some(self.text_line(Piece::default(), LineEnd::default()))
    }

    fn add(&mut self, reply: &Reply, delta: Delta, all: Option<&Timings>) -> Result<Vec<String>, ApiError> {
        let mut logprobs = logprobs(&delta, &reply.service);
        let Delta { thought, text, calls, ids, end, .. } = delta;
        self.add_ids(&ids);
        calls.into_iter().for_each(|piece| PartialCall::push(&mut self.calls, piece));
        let mut pieces = Vec::new();
        if let Some(thought) = some(thought) {
            pieces.push(Piece { thought: Some(thought), ..Piece::default() });
        }
        if !text.is_empty() {
            pieces.push(Piece { text, ..Piece::default() });
        }
        if let Some(calls) = self.complete_calls(end.is_some())? {
            pieces.push(Piece { calls: Some(calls), ..Piece::default() });
        }
        if pieces.is_empty() && logprobs.is_some() {
            pieces.push(Piece::default());
        }
        if let Some(first) = pieces.first_mut() {
            first.logprobs = logprobs.take();
        }
        let mut lines: Vec<String> =
            pieces.into_iter().map(|piece| self.text_line(piece, LineEnd::default())).collect();
        if let (Some(reason), Some(timings)) = (end, all) {
            let ids = std::mem::take(&mut self.ids);
            lines.push(self.text_line(Piece { ids, ..Piece::default() }, LineEnd::answered(reason, timings)));
        }
        Ok(lines)
    }

    fn end(&mut self, reply: &Reply) -> Vec<String> {
        // A request without a prompt has one line.
        let line = || self.text_line(Piece::default(), LineEnd::of_command(self.keep_alive));
        (reply.count == 0).then(line).into_iter().collect()
    }

    fn on_error(_: &Self::Form, _: Head) -> Failed<Self> {
        Box::new(|error: &ApiError| vec![json_text(&error.ollama().1)])
    }

    fn send(
        _: &Server,
        _: impl Stream<Item = String> + Send + 'static,
        lines: impl Stream<Item = String> + Send + 'static,
    ) -> Response {
        exchange::lines(lines)
    }
}
