//! One request's way through the server, whatever its wire format: a body to a prompt, to the engine, to answers as they
//! come. What is on the wire is its callers' business.

use std::convert::Infallible;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde::Serialize;
use tokio::sync::SemaphorePermit;
use utoipa::ToSchema;

use super::answer::{AnswerText, Delta, End, Reason};
use super::error::ApiError;
use super::failures::{log_in_stream, panicked};
use super::metrics::Followed;
use super::request::ChatRequest;
use super::service::Service;
use super::sharing::salt_of;
use super::tasks::{Asked, Purpose};
use super::{MAX_ARRIVING, Options, Server, new_id, unix_time_s};
use crate::engine::{ClientId, Event, Request, Timings, TokenStream};
use crate::model::Logprobs;
use crate::text::CallPiece;

/// For a whole body, however steadily it comes.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Behind the last line of OpenAI's streams.
const DONE: &str = "[DONE]";

/// Whose request it is. The door says it of every one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Client(pub ClientId);

/// Who asks, and what they say that it is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    id: ClientId,
    asked: Asked,
}

impl Caller {
    /// Whose fair share it takes, and who may read what is kept of it.
    pub fn id(self) -> ClientId {
        self.id
    }

    /// What a request is for, of which the caller may have said something.
    pub fn purpose(self, request: &ChatRequest) -> Purpose {
        self.asked.purpose(request)
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let client: Option<&Client> = parts.extensions.get();
        let Client(id) = client.ok_or_else(|| ApiError::Bug("a request passed no door".into()))?;
        Ok(Self { id: *id, asked: Asked::read(&parts.headers)? })
    }
}

/// A request that the engine has.
pub(super) struct Exchange<T> {
    /// What the wire format wanted to remember of it.
    pub wire: T,
    pub reply: Reply,
    pub answers: Answers,
}

/// Reads a body, makes prompts of it, and asks the engine. Errors in the order of what they need: the body alone, then
/// the model's name, then the loaded model. A client that disconnects drops what this returns, and with it the engine's
/// streams: that cancels. `prefix` is that of the reply's id, `prompt` the field that holds the prompt.
pub(super) async fn ask<T: Send + 'static>(
    server: &Arc<Server>,
    caller: Caller,
    body: Body,
    prefix: &str,
    prompt: &'static str,
    parse: impl FnOnce(&[u8]) -> Result<(ChatRequest, T), ApiError> + Send + 'static,
    prepare: impl FnOnce(&Service, &ChatRequest, &mut T) -> Result<Vec<(Request, AnswerText)>, ApiError>
    + Send
    + 'static,
) -> Result<Exchange<T>, ApiError> {
    let prepared = work(server, body, move |server, body| {
        let (request, mut wire) = parse(body)?;
        let service = server.service_for(request.model.as_deref())?;
        let prepared = prepare(&service, &request, &mut wire).map_err(|error| error.in_prompt(prompt))?;
        Ok((service, prepared, wire, caller.purpose(&request), request.cache_salt))
    });
    let (arriving, (service, prepared, wire, purpose, cache_salt)) = prepared.await?;
    tracing::debug!(class = purpose.class(), task = purpose.task, "prepared");
    let seed = prepared.first().map_or(0, |(engine, _)| engine.sampling.seed);
    let salt = salt_of(server, caller.id, cache_salt.as_deref());
    let mut answers = Answers::new(Arc::clone(&service));
    for (mut engine, text) in prepared {
        engine.cache_salt = salt.clone();
        (engine.client, engine.priority) = (caller.id, purpose.priority);
        let n = 1 + engine.more_seeds.len();
        let tokens =
            service.engine().submit(engine).map_err(|error| ApiError::from(error).in_prompt(prompt))?;
        answers.add(tokens, &text, n, server.metrics.follow(n));
    }
    server.metrics.taken(purpose);
    drop(arriving); // from here on the engine's queue is the bound
    let reply = Reply {
        id: new_id(prefix),
        created: unix_time_s(),
        model: server.model_id.clone(),
        seed,
        span: tracing::Span::current(),
    };
    Ok(Exchange { wire, reply, answers })
}

/// Reads a body and does with it what takes a processor for long; beside the result comes the place among those that
/// arrive.
pub(super) async fn work<T: Send + 'static>(
    server: &Arc<Server>,
    body: Body,
    work: impl FnOnce(&Server, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(SemaphorePermit<'_>, T), ApiError> {
    let full = ApiError::QueueFull { waiting: MAX_ARRIVING };
    let arriving = server.arriving.try_acquire().map_err(|_| full)?;
    let body = read_body(body, &server.options).await?;

    let worker = Arc::clone(server);
    let worked = apart(server, "preparing a prompt", move || work(&worker, &body)).await?;
    Ok((arriving, worked))
}

/// Does what takes a processor for long, as rendering and tokenizing a long conversation does for seconds: not on the
/// threads that answer other clients, and not on more threads than there are processors. `what` it is, where it panics.
pub(super) async fn apart<T: Send + 'static>(
    server: &Server,
    what: &str,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = Arc::clone(&server.tokenizing).acquire_owned().await;
    let turn = turn.map_err(|_| ApiError::Bug("the tokenizing semaphore was closed".into()))?;
    let worked = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    worked.await.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => Err(panicked(what, &*panic)),
        Err(cancelled) => Err(ApiError::Bug(format!("{what}: {cancelled}"))),
    })
}

async fn read_body(body: Body, options: &Options) -> Result<Vec<u8>, ApiError> {
    let &Options { max_body_bytes: limit, body_stall: stall, .. } = options;
    let timeout = || ApiError::BodyTimeout { stall, whole: BODY_TIMEOUT };
    let mut chunks = body.into_data_stream();
    let read = async {
        let mut bytes = Vec::new();
        while let Some(chunk) = tokio::time::timeout(stall, chunks.next()).await.map_err(|_| timeout())? {
            let chunk = chunk.map_err(|_| ApiError::BodyBroken)?;
            if bytes.len() + chunk.len() > limit {
                return Err(ApiError::BodyTooLarge { limit });
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    };
    tokio::time::timeout(BODY_TIMEOUT, read).await.map_err(|_| timeout())?
}

/// A reply that comes in pieces, with comments while nothing comes. What goes wrong after the headers, be it a panic, is
/// logged, and ends it with what `failed` makes of it.
pub(super) fn stream<T: Send + 'static>(
    server: &Server,
    pieces: impl Stream<Item = Result<T, ApiError>> + Send + 'static,
    failed: impl FnOnce(&ApiError) -> Vec<T> + Send + 'static,
    mut write: impl FnMut(T) -> sse::Event + Send + 'static,
) -> Response {
    // A stream outlives the handler, and with it the request's span.
    let span = tracing::Span::current();
    let events = async_stream::stream! {
        let mut pieces = Box::pin(AssertUnwindSafe(pieces).catch_unwind());
        let error = loop {
            match pieces.next().await {
                Some(Ok(Ok(piece))) => yield Ok::<_, Infallible>(write(piece)),
                Some(Ok(Err(error))) => break error,
                Some(Err(panic)) => break panicked("", &*panic),
                None => return,
            }
        };
        // Whatever still runs for it ends now, and not when its client has read this.
        drop(pieces);
        span.in_scope(|| log_in_stream(&error));
        for piece in failed(&error) {
            yield Ok(write(piece));
        }
    };
    let keep_alive = KeepAlive::new().interval(server.options.keep_alive);
    Sse::new(events).keep_alive(keep_alive).into_response()
}

/// The same as OpenAI has it: lines of data, and `[DONE]` behind the last, which may be an error.
pub(super) fn stream_lines(
    server: &Server,
    lines: impl Stream<Item = Result<String, ApiError>> + Send + 'static,
) -> Response {
    let done = || DONE.to_owned();
    let lines = lines.chain(futures::stream::once(async move { Ok(done()) }));
    let failed = move |error: &ApiError| vec![json_text(&error.body()), done()];
    stream(server, lines, failed, |line| sse::Event::default().data(line))
}

/// An object of a reply as it stands in a stream.
pub(super) fn json_text(object: &impl Serialize) -> String {
    serde_json::to_string(object).expect("an object of a reply has strings for names, and no infinity")
}

/// What all parts of one reply share.
pub(super) struct Reply {
    pub id: String,
    pub created: u64,
    pub model: String,
    seed: u64,
    /// The request's: a stream outlives the handler.
    span: tracing::Span,
}

impl Reply {
    /// What OpenAI's objects say beside the answers.
    pub fn head(&self) -> Head {
        Head {
            id: self.id.clone(),
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: concat!("unicorn-", env!("CARGO_PKG_VERSION")),
        }
    }

    pub fn log(&self, reason: Reason, timings: &Timings) {
        let Timings { queue, prefill, decode, prompt_n, cached_n, predicted_n, drafts } = timings;
        let (seed, reason) = (self.seed, FinishReason::from(reason).name());
        self.span.in_scope(|| {
            tracing::info!(
                seed,
                prompt_n,
                cached_n,
                predicted_n,
                draft_n = drafts.proposed,
                draft_n_accepted = drafts.accepted,
                queue_ms = queue.as_millis(),
                prompt_ms = prefill.as_millis(),
                predicted_ms = decode.as_millis(),
                "answered: {reason}"
            );
        });
    }
}

/// What all of OpenAI's objects begin with.
#[derive(Serialize, ToSchema)]
#[schema(as = ReplyHead)]
pub(super) struct Head {
    id: String,
    /// Unix time, in seconds.
    created: u64,
    model: String,
    /// Changes with what may change an answer: the server's version.
    system_fingerprint: &'static str,
}

/// The answers to one request, as they come: those to each of its prompts in turn.
pub(super) struct Answers {
    streams: Vec<Answering>,
    /// The stream that is looked at first.
    next: usize,
    pub service: Arc<Service>,
}

/// The answers to one prompt.
struct Answering {
    tokens: TokenStream,
    texts: Vec<AnswerText>,
    /// Why and when each ended.
    ends: Vec<Option<(Reason, Timings)>>,
    /// The number of the first of them.
    first: usize,
    followed: Followed,
}

/// What one event adds to an answer.
pub(super) struct Piece {
    pub choice: usize,
    pub text: String,
    /// Of calls of tools; none where there is text.
    pub calls: Vec<CallPiece>,
    /// The token that it brought, where they were asked for; its text may come later.
    pub logprobs: Option<(u32, Logprobs)>,
    /// The token that ended the answer and is none of it, likewise.
    pub stop: Option<(u32, Logprobs)>,
    /// Of the ids of its prompt but the first, where they were asked for: before anything else of that prompt's answers.
    pub prompt: Option<Vec<Logprobs>>,
    pub end: Option<Reason>,
    /// Where a stop string ended it: which.
    pub stopped_by: Option<usize>,
    /// Up to here.
    pub timings: Timings,
}

impl Answering {
    fn is_done(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    /// What an event adds; none stands for the stream's end, before that of its answers.
    fn take(&mut self, event: Option<Event>) -> Result<Piece, ApiError> {
        let Some(event) = event else { return Err(ApiError::Bug("an answer had no end".into())) };
        self.followed.event(&event);
        // A failure is that of all answers.
        let choice = event.choice().unwrap_or(0);
        let timings = match &event {
            Event::Token { timings, .. } | Event::Finished { timings, .. } => *timings,
            Event::Prompt { .. } | Event::Pooled { .. } | Event::Failed(_) => Timings::default(),
        };
        let Delta { text, calls, logprobs, stop, prompt, end } = self.texts[choice].push(event);
        let end = match end {
            None => None,
            Some(End::Failed(error)) => return Err(error.into()),
            Some(End::OffGrammar(problem)) => {
                self.followed.end_all("error");
                return Err(ApiError::Grammar(problem));
            }
            Some(End::Finished { reason, timings }) => {
                self.ends[choice] = Some((reason, timings));
                self.followed.ended(choice, reason, &timings);
                // A stop string ends it here and not in the engine.
                self.tokens.stop(choice);
                Some(reason)
            }
        };
        let stopped_by = self.texts[choice].stopped_by();
        let choice = self.first + choice;
        Ok(Piece { choice, text, calls, logprobs, stop, prompt, end, stopped_by, timings })
    }
}

impl Answers {
    fn new(service: Arc<Service>) -> Self {
        Self { streams: Vec::new(), next: 0, service }
    }

    /// The `n` answers to one more prompt.
    fn add(&mut self, tokens: TokenStream, text: &AnswerText, n: usize, followed: Followed) {
        let first = self.count();
        let (texts, ends) = (vec![text.clone(); n], vec![None; n]);
        self.streams.push(Answering { tokens, texts, ends, first, followed });
    }

    /// How many there are, of all prompts.
    pub fn count(&self) -> usize {
        self.streams.last().map_or(0, |stream| stream.first + stream.ends.len())
    }

    pub fn is_done(&self) -> bool {
        self.streams.iter().all(Answering::is_done)
    }

    /// The next piece of any of them; none behind the end of the last.
    pub async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        poll_fn(|context| {
            let n = self.streams.len();
            for at in (0..n).map(|i| (self.next + i) % n) {
                let stream = &mut self.streams[at];
                if !stream.is_done()
                    && let Poll::Ready(event) = stream.tokens.poll_next_unpin(context)
                {
                    self.next = at + 1;
                    return Poll::Ready(Some(stream.take(event)));
                }
            }
            if self.is_done() { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }

    /// Why each ended, those that did.
    pub fn ends(&self) -> impl Iterator<Item = Reason> {
        self.streams.iter().flat_map(|stream| &stream.ends).flatten().map(|(reason, _)| *reason)
    }

    /// Of all answers together; those to one prompt share it.
    pub fn timings(&self) -> Timings {
        let mut all = Timings::default();
        for stream in &self.streams {
            let ends = || stream.ends.iter().flatten().map(|(_, timings)| timings);
            if let Some(first) = ends().next() {
                all.queue = all.queue.max(first.queue);
                all.prefill = all.prefill.max(first.prefill);
                all.prompt_n += first.prompt_n;
                all.cached_n += first.cached_n;
            }
            for timings in ends() {
                all.decode = all.decode.max(timings.decode);
                all.predicted_n += timings.predicted_n;
                all.drafts.proposed += timings.drafts.proposed;
                all.drafts.accepted += timings.drafts.accepted;
            }
        }
        all
    }
}

/// Why an answer ended, in OpenAI's words.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum FinishReason {
    /// The model ended it, or a stop string did.
    Stop,
    /// No more tokens were wanted, or fit.
    Length,
    /// It calls tools.
    ToolCalls,
}

impl FinishReason {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

impl From<Reason> for FinishReason {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Stop => Self::Stop,
            Reason::Length => Self::Length,
            Reason::Called => Self::ToolCalls,
        }
    }
}

/// Tokens of all answers together.
#[derive(Serialize, ToSchema)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Serialize, ToSchema)]
struct PromptTokensDetails {
    /// What the prefix cache had of them.
    cached_tokens: usize,
}

impl Usage {
    pub fn new(timings: &Timings) -> Self {
        let Timings { prompt_n, cached_n, predicted_n, .. } = *timings;
        Self {
            prompt_tokens: prompt_n,
            completion_tokens: predicted_n,
            total_tokens: prompt_n + predicted_n,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: cached_n },
        }
    }
}

/// Times of all answers together, as llama.cpp's server reports them; a rate over no time, or of no tokens, is null.
#[derive(Serialize, ToSchema)]
#[schema(as = Timings)]
pub(super) struct TimingsReport {
    /// Of the prompt, what was computed.
    prompt_n: usize,
    /// Of the prompt, what needed not be.
    cache_n: usize,
    prompt_ms: f64,
    #[schema(required)]
    prompt_per_second: Option<f64>,
    predicted_n: usize,
    predicted_ms: f64,
    /// The first token came with the prompt, and does not count.
    #[schema(required)]
    predicted_per_second: Option<f64>,
    /// Guesses of prompt lookup and of a draft model.
    draft_n: usize,
    draft_n_accepted: usize,
}

impl TimingsReport {
    pub fn new(timings: &Timings) -> Self {
        let Timings { prefill, decode, prompt_n: whole_prompt, cached_n, predicted_n, drafts, .. } = *timings;
        let prompt_n = whole_prompt - cached_n;
        let rate =
            |n: usize, time: Duration| (n > 0 && !time.is_zero()).then(|| n as f64 / time.as_secs_f64());
        Self {
            prompt_n,
            cache_n: cached_n,
            prompt_ms: prefill.as_secs_f64() * 1e3,
            prompt_per_second: rate(prompt_n, prefill),
            predicted_n,
            predicted_ms: decode.as_secs_f64() * 1e3,
            predicted_per_second: rate(predicted_n.saturating_sub(1), decode),
            draft_n: drafts.proposed,
            draft_n_accepted: drafts.accepted,
        }
    }
}
