//! The path of one request through the server, the same for every wire format: a body becomes a prompt, the engine gets
//! it, and the answers come piece by piece. The callers write what goes over the wire.

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
use tokio::time::{Instant, timeout, timeout_at};
use utoipa::ToSchema;

use crate::api::cache_salt::salt_of;
use crate::api::error::{ApiError, BodyGap};
use crate::api::http::counters::Followed;
use crate::api::http::failures::{log_in_stream, panicked};
use crate::api::http::fair_semaphore::{FairPermit, FairSemaphore};
use crate::api::http::listen::Connection;
use crate::api::ids::{new_id, unix_time_s};
use crate::api::server::{Options, Server};
use crate::api::tasks::{Purpose, PurposeHeaders};
use crate::engine::{ClientId, Event, Joules, Request, Timings, TokenStream};
use crate::model::Logprobs;
use crate::session::{AnswerText, Delta, End, GenerateRequest, Reason, Service};
use crate::text::CallPiece;

/// The longest time for a whole body, however steadily it comes: for 8 MiB that is 70 KB/s, which an uplink of 0.6
/// Mbit/s reaches. Many clients at once may hold their places for so long, so a wait for a place may be longer than
/// that ([`Options::permit_timeout`]).
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes per second that a body must reach on the average, once [`Options::body_grace`] is over: the rate of a
/// telephone modem. A client that holds a place for as long as it can must send half a megabyte, and not forty bytes.
const BODY_RATE: u32 = 4 << 10;
/// The last line of OpenAI's streams.
const DONE: &str = "[DONE]";

/// The client that sent a request. Authentication adds it to every request.
#[derive(Debug, Clone)]
pub(in crate::api) struct Client {
    /// The client's number: fair shares are counted by it, and stored responses belong to it.
    pub id: ClientId,
    /// The connection that the request came on.
    pub connection: Option<Connection>,
    /// When the request's head had come.
    pub arrived: std::time::Instant,
}

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let client: Option<&Self> = parts.extensions.get();
        client.cloned().ok_or_else(|| ApiError::Bug("a request was not authenticated".into()))
    }
}

/// The client, and what the request's headers say of its purpose.
#[derive(Debug, Clone)]
pub(in crate::api) struct Caller {
    pub client: Client,
    headers: PurposeHeaders,
}

impl Caller {
    pub fn id(&self) -> ClientId {
        self.client.id
    }

    /// The purpose of a request that has no conversation.
    pub fn purpose(&self) -> Purpose {
        self.headers.purpose(&[], false)
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let client = Client::from_request_parts(parts, state).await?;
        Ok(Self { client, headers: PurposeHeaders::read(&parts.headers)? })
    }
}

/// A request as its body states it.
pub(in crate::api) struct Parsed<T> {
    /// The id of the model; none is the one that is served.
    pub model: Option<String>,
    pub request: GenerateRequest,
    pub stream: bool,
    /// The request's `cache_salt`, if it has one.
    pub cache_salt: Option<String>,
    /// What the wire format keeps of the request for its reply.
    pub wire: T,
}

impl<T> Parsed<T> {
    /// The model's name, and what is asked of it.
    pub fn asked(self) -> (Option<String>, GenerateRequest) {
        (self.model, self.request)
    }
}

/// A request that was submitted to the engine.
pub(in crate::api) struct Exchange<T> {
    pub wire: T,
    pub reply: Reply,
    pub answers: Answers,
}

/// Reads a body, makes prompts of it, and submits them to the engine. Errors come in the order of what finding them
/// needs: the body alone, then the model's name, then the loaded model. A client that disconnects drops the result, and
/// with it the engine's streams, which cancels the request. `prefix` begins the reply's id. `prompt` is the field that
/// holds the prompt.
pub(in crate::api) async fn ask<T: Send + 'static>(
    server: &Arc<Server>,
    caller: Caller,
    body: Body,
    prefix: &str,
    prompt: &'static str,
    parse: impl FnOnce(&[u8]) -> Result<Parsed<T>, ApiError> + Send + 'static,
    prepare: impl FnOnce(&Service, &GenerateRequest, &mut T) -> Result<Vec<(Request, AnswerText)>, ApiError>
    + Send
    + 'static,
) -> Result<Exchange<T>, ApiError> {
    let Caller { client, headers } = caller;
    let prepared = process_body(server, &client, body, move |server, body| {
        let Parsed { model, request, stream, cache_salt, mut wire } = parse(body)?;
        let service = server.service_for(model.as_deref())?;
        let prepared = prepare(&service, &request, &mut wire).map_err(|error| error.in_prompt(prompt))?;
        Ok((service, prepared, wire, headers.purpose(&request.messages, stream), cache_salt))
    });
    let (arriving, (service, prepared, wire, purpose, cache_salt)) = prepared.await?;
    tracing::debug!(class = purpose.class(), task = purpose.task, "prepared");
    let seed = prepared.first().map_or(0, |(engine, _)| engine.seed);
    let salt = salt_of(server, client.id, cache_salt.as_deref());
    let mut answers = Answers::new(Arc::clone(&service));
    for (mut engine, text) in prepared {
        engine.cache_salt = salt.clone();
        (engine.client, engine.priority) = (client.id, purpose.priority);
        let n = 1 + engine.more_seeds.len();
        let tokens =
            service.engine().submit(engine).map_err(|error| ApiError::from(error).in_prompt(prompt))?;
        answers.add(tokens, &text, n, server.metrics.follow(n, client.arrived));
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

/// Reads a body, and counts the tokens of its conversation. `parse` returns the model's name and the conversation, and
/// `prompt` is the field that holds it.
pub(in crate::api) async fn count_tokens(
    server: &Arc<Server>,
    client: &Client,
    body: Body,
    prompt: &'static str,
    parse: impl FnOnce(&[u8]) -> Result<(Option<String>, GenerateRequest), ApiError> + Send + 'static,
) -> Result<usize, ApiError> {
    let counted = process_body(server, client, body, move |server, body| {
        let (model, request) = parse(body)?;
        let service = server.service_for(model.as_deref())?;
        let ids = service.conversation(&request).map_err(|error| ApiError::from(error).in_prompt(prompt))?;
        Ok(ids.len())
    });
    counted.await.map(|(_, n)| n)
}

/// Reads a body, and runs `work` on it in a blocking task. The result comes with the request's turn among the arriving
/// requests. Until it has that turn, the request waits in its client's line, and nothing of the body is read.
pub(in crate::api) async fn process_body<T: Send + 'static>(
    server: &Arc<Server>,
    client: &Client,
    body: Body,
    work: impl FnOnce(&Server, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(FairPermit, T), ApiError> {
    let arriving = tokio::select! {
        biased;
        turn = permit(server, &server.arriving, client.id, "reading") => turn?,
        // The client has gone, so nobody reads this error.
        () = Connection::left(client.connection.as_ref()) => return Err(ApiError::BodyBroken),
    };
    let body = read_body(body, &server.options).await?;

    let worker = Arc::clone(server);
    let worked = on_worker(server, client.id, "preparing a prompt", move || work(&worker, &body)).await?;
    Ok((arriving, worked))
}

/// Waits for a client's turn, up to `permit_timeout`. `doing` says, for the error, what other requests have their turns
/// for.
async fn permit(
    server: &Server,
    turns: &FairSemaphore,
    client: ClientId,
    doing: &'static str,
) -> Result<FairPermit, ApiError> {
    let waited = server.options.permit_timeout;
    timeout(waited, turns.take(client)).await.map_err(|_| ApiError::NoTurn { doing, waited })
}

/// Runs work that takes a processor for seconds, as rendering and tokenizing a long conversation or compiling a grammar
/// does. The work runs outside the threads that answer other clients, and on no more threads than there are processors.
/// Permits go to the client that has used the least processor time. `what` names the work if it panics.
pub(in crate::api) async fn on_worker<T: Send + 'static>(
    server: &Server,
    client: ClientId,
    what: &str,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    /// Charges the client for the time until the drop, be it the drop of a panic.
    struct Timed(FairPermit, Instant);

    impl Drop for Timed {
        fn drop(&mut self) {
            self.0.charge(self.1.elapsed().as_micros() as u64);
        }
    }

    let turn = permit(server, &server.tokenizing, client, "preparing").await?;
    let worked = tokio::task::spawn_blocking(move || {
        let _timed = Timed(turn, Instant::now());
        work()
    });
    worked.await.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => Err(panicked(what, &*panic)),
        Err(cancelled) => Err(ApiError::Bug(format!("{what}: {cancelled}"))),
    })
}

async fn read_body(body: Body, options: &Options) -> Result<Vec<u8>, ApiError> {
    let limit = options.max_body_bytes;
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    let began = Instant::now();
    loop {
        let (until, gap) = body_deadline(options, began.elapsed(), bytes.len());
        let next = timeout_at(began + until, chunks.next()).await.map_err(|_| ApiError::BodyTimeout(gap))?;
        let Some(chunk) = next else { return Ok(bytes) };
        let chunk = chunk.map_err(|_| ApiError::BodyBroken)?;
        if bytes.len() + chunk.len() > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        bytes.extend_from_slice(&chunk);
    }
}

/// How long after its beginning a body is given up if no more of it comes, and why. `came` bytes have come so far, the
/// last of them `elapsed` after the beginning.
fn body_deadline(options: &Options, elapsed: Duration, came: usize) -> (Duration, BodyGap) {
    let (stall, grace) = (options.body_stall, options.body_grace);
    let earned = Duration::from_secs_f64(came as f64 / f64::from(BODY_RATE));
    [
        (elapsed + stall, BodyGap::Nothing { within: stall }),
        (grace + earned, BodyGap::TooLittle { bytes_per_s: BODY_RATE, grace }),
        (BODY_TIMEOUT, BodyGap::NotAll { within: BODY_TIMEOUT }),
    ]
    .into_iter()
    .min_by_key(|(until, _)| *until)
    .expect("three of them")
}

/// A reply as a stream of server-sent events, with comments while nothing comes. An error after the headers, a panic
/// included, is logged, and ends the stream with what `failed` makes of it.
pub(in crate::api) fn stream<T: Send + 'static>(
    server: &Server,
    pieces: impl Stream<Item = Result<T, ApiError>> + Send + 'static,
    failed: impl FnOnce(&ApiError) -> Vec<T> + Send + 'static,
    mut write: impl FnMut(T) -> sse::Event + Send + 'static,
) -> Response {
    // A stream outlives the handler and the handler's span.
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
        // The generation ends now, and not when the client has read this.
        drop(pieces);
        span.in_scope(|| log_in_stream(&error));
        for piece in failed(&error) {
            yield Ok(write(piece));
        }
    };
    let keep_alive = KeepAlive::new().interval(server.options.keep_alive);
    Sse::new(events).keep_alive(keep_alive).into_response()
}

/// OpenAI's form of a stream: lines of data, the last of which may be an error, then `[DONE]`.
pub(in crate::api) fn stream_lines(
    server: &Server,
    lines: impl Stream<Item = Result<String, ApiError>> + Send + 'static,
) -> Response {
    let done = || DONE.to_owned();
    let lines = lines.chain(futures::stream::once(async move { Ok(done()) }));
    let failed = move |error: &ApiError| vec![json_text(&error.body()), done()];
    stream(server, lines, failed, |line| sse::Event::default().data(line))
}

/// An object of a reply as JSON.
pub(in crate::api) fn json_text(object: &impl Serialize) -> String {
    serde_json::to_string(object).expect("an object of a reply has strings for names, and no infinity")
}

/// An event of a stream, named by the field `type` of its data.
pub(in crate::api) fn named_event(event: &impl Serialize) -> sse::Event {
    let data = serde_json::to_value(event).expect("an event has strings for names, and no infinity");
    let name = data["type"].as_str().unwrap_or_default();
    sse::Event::default().event(name).data(data.to_string())
}

/// What all parts of one reply have in common.
pub(in crate::api) struct Reply {
    pub id: String,
    pub created: u64,
    pub model: String,
    seed: u64,
    /// The request's span: a stream outlives the handler.
    span: tracing::Span,
}

impl Reply {
    /// A reply to no request, for benchmarks.
    pub fn unasked(model: &str) -> Self {
        let (id, model) = (new_id("chatcmpl-"), model.to_owned());
        Self { id, created: 0, model, seed: 0, span: tracing::Span::none() }
    }

    /// The fields that all of OpenAI's reply objects begin with.
    pub fn head(&self) -> Head {
        Head {
            id: self.id.clone(),
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: concat!("unicorn-", env!("CARGO_PKG_VERSION")),
        }
    }

    pub fn log(&self, reason: Reason, timings: &Timings) {
        let Timings { queue, prefill, decode, prompt_n, cached_n, predicted_n, drafts, .. } = timings;
        let (seed, reason) = (self.seed, reason.name());
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

/// The fields that all of OpenAI's reply objects begin with.
#[derive(Serialize, ToSchema)]
#[schema(as = ReplyHead)]
pub(in crate::api) struct Head {
    id: String,
    /// When the reply began: Unix time, in seconds.
    created: u64,
    model: String,
    /// The server's version: answers may differ between versions.
    system_fingerprint: &'static str,
}

/// The answers to one request as they come. They are numbered prompt by prompt.
pub(in crate::api) struct Answers {
    streams: Vec<PromptAnswers>,
    /// The index of the stream to poll first.
    next: usize,
    pub service: Arc<Service>,
}

/// The answers to one prompt.
struct PromptAnswers {
    tokens: TokenStream,
    texts: Vec<AnswerText>,
    /// For each answer that ended: the reason, and its timings.
    ends: Vec<Option<(Reason, Timings)>>,
    /// The number of the first of these answers among all answers to the request.
    first: usize,
    followed: Followed,
}

/// What one event adds to an answer.
pub(in crate::api) struct Piece {
    pub choice: usize,
    pub text: String,
    /// New pieces of tool calls; empty if there is text.
    pub calls: Vec<CallPiece>,
    /// The event's token id, of the answer or the one that ended it.
    pub id: Option<u32>,
    /// The event's token with its log probabilities, if the request asks for them. The token's text may come with a
    /// later piece.
    pub logprobs: Option<(u32, Logprobs)>,
    /// The token that ended the answer and is no part of it, with its log probabilities, if the request asks for them.
    pub stop: Option<(u32, Logprobs)>,
    /// Log probabilities of all the prompt's ids but the first, if the request asks for them. They come before anything
    /// else of that prompt's answers.
    pub prompt: Option<Vec<Logprobs>>,
    pub end: Option<Reason>,
    /// The index of the stop string that ended the answer, if one did.
    pub stopped_by: Option<usize>,
    /// The timings up to this piece.
    pub timings: Timings,
}

impl PromptAnswers {
    fn is_done(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    /// The piece that an event adds. The event is none if the stream ended before its answers did.
    fn take(&mut self, event: Option<Event>) -> Result<Piece, ApiError> {
        let Some(event) = event else { return Err(ApiError::Bug("an answer had no end".into())) };
        self.followed.event(&event);
        // A failure has no choice, and ends all answers.
        let choice = event.choice().unwrap_or(0);
        let timings = match &event {
            Event::Token { timings, .. } | Event::Finished { timings, .. } => *timings,
            Event::Prompt { .. } | Event::Pooled { .. } | Event::Failed(_) => Timings::default(),
        };
        let Delta { text, calls, id, logprobs, stop, prompt, end } = self.texts[choice].push(event);
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
                // The engine does not see stop strings, so it must be told that the answer ended.
                self.tokens.stop(choice);
                Some(reason)
            }
        };
        let stopped_by = self.texts[choice].stopped_by();
        let choice = self.first + choice;
        Ok(Piece { choice, text, calls, id, logprobs, stop, prompt, end, stopped_by, timings })
    }
}

impl Answers {
    fn new(service: Arc<Service>) -> Self {
        Self { streams: Vec::new(), next: 0, service }
    }

    /// Adds the `n` answers to one more prompt.
    fn add(&mut self, tokens: TokenStream, text: &AnswerText, n: usize, followed: Followed) {
        let first = self.count();
        let (texts, ends) = (vec![text.clone(); n], vec![None; n]);
        self.streams.push(PromptAnswers { tokens, texts, ends, first, followed });
    }

    /// The number of answers to all prompts.
    pub fn count(&self) -> usize {
        self.streams.last().map_or(0, |stream| stream.first + stream.ends.len())
    }

    pub fn is_done(&self) -> bool {
        self.streams.iter().all(PromptAnswers::is_done)
    }

    /// The next piece of any answer; none after the last answer's end.
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

    /// Why each answer ended, for the answers that did.
    pub fn ends(&self) -> impl Iterator<Item = Reason> {
        self.streams.iter().flat_map(|stream| &stream.ends).flatten().map(|(reason, _)| *reason)
    }

    /// Timings of all answers together. Answers to one prompt share the prompt's time and tokens, which count once.
    pub fn timings(&self) -> Timings {
        let every = || self.streams.iter().flat_map(|stream| stream.ends.iter().flatten());
        let mut all =
            Timings { energy: energy_of(every().map(|(_, timings)| timings)), ..Timings::default() };
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
                all.decode_steps = all.decode_steps.max(timings.decode_steps);
                all.predicted_n += timings.predicted_n;
                all.first_n += timings.first_n;
                all.drafts.proposed += timings.drafts.proposed;
                all.drafts.accepted += timings.drafts.accepted;
            }
        }
        all
    }
}

/// The energy of several answers; none if that of one is not known.
fn energy_of<'a>(answers: impl Iterator<Item = &'a Timings>) -> Option<Joules> {
    let add = |a: Joules, b: Joules| Joules {
        source: a.source,
        prompt: a.prompt + b.prompt,
        predicted: a.predicted + b.predicted,
    };
    answers.map(|timings| timings.energy).reduce(|a, b| Some(add(a?, b?)))?
}

/// Why an answer ended, in OpenAI's words.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum FinishReason {
    /// The model ended the answer, or a stop string was found.
    Stop,
    /// The limit of tokens, or the context, was reached.
    Length,
    /// The answer calls tools.
    ToolCalls,
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
pub(in crate::api) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Serialize, ToSchema)]
struct PromptTokensDetails {
    /// Tokens of the prompt that the prefix cache had.
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

/// Times of all answers together, as llama.cpp's server reports them. A rate is null where there is too little to tell it
/// from. Energy is absent where the machine does not tell it.
#[derive(Serialize, ToSchema)]
#[schema(as = Timings)]
pub(in crate::api) struct TimingsReport {
    /// Tokens of the prompt that were computed.
    prompt_n: usize,
    /// Tokens of the prompt that the prefix cache had.
    cache_n: usize,
    prompt_ms: f64,
    #[schema(required)]
    prompt_per_second: Option<f64>,
    predicted_n: usize,
    predicted_ms: f64,
    /// The rate of the tokens after those that came with the first, whose time is part of `prompt_ms`. Null in an answer
    /// of fewer than five steps: the time of so few is not known well.
    #[schema(required)]
    predicted_per_second: Option<f64>,
    /// Tokens that prompt lookup or the draft model proposed.
    draft_n: usize,
    draft_n_accepted: usize,
    /// What counted the energy: `rapl` or `amdgpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    energy_source: Option<&'static str>,
    /// Energy up to the first token: the answers' share of what the machine used meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_joules: Option<f64>,
    /// Energy from the first token on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    predicted_joules: Option<f64>,
    /// All of that energy, divided by `predicted_n`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    joules_per_token: Option<f64>,
}

impl TimingsReport {
    pub fn new(timings: &Timings) -> Self {
        let Timings {
            prefill, decode, prompt_n: whole_prompt, cached_n, predicted_n, drafts, energy, ..
        } = *timings;
        Self {
            prompt_n: whole_prompt - cached_n,
            cache_n: cached_n,
            prompt_ms: prefill.as_secs_f64() * 1e3,
            prompt_per_second: timings.prompt_per_second(),
            predicted_n,
            predicted_ms: decode.as_secs_f64() * 1e3,
            predicted_per_second: timings.predicted_per_second(),
            draft_n: drafts.proposed,
            draft_n_accepted: drafts.accepted,
            energy_source: energy.map(|energy| energy.source),
            prompt_joules: energy.map(|energy| energy.prompt),
            predicted_joules: energy.map(|energy| energy.predicted),
            joules_per_token: energy
                .filter(|_| predicted_n > 0)
                .map(|energy| (energy.prompt + energy.predicted) / predicted_n as f64),
        }
    }
}

#[cfg(test)]
pub(in crate::api) mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::api::http::auth::AccessPolicy;

    pub const OPTIONS: Options = Options {
        max_body_bytes: 8 << 20,
        body_stall: Duration::from_secs(5),
        body_grace: Duration::from_secs(10),
        permit_timeout: Duration::from_secs(150),
        wrong_key_pause: Duration::ZERO,
        stored_responses: 0,
        stored_response_bytes: 0,
        share_prefixes: None,
        keep_alive: Duration::from_secs(5),
        device_timeout: Duration::from_secs(60),
        lost_log_lines: || 0,
    };

    /// When and why a body of `whole` bytes is given up that comes in pieces of `piece` bytes, one each `every`; none
    /// if all of it comes.
    fn given_up(whole: usize, piece: usize, every: Duration) -> Option<(Duration, BodyGap)> {
        let (mut at, mut came) = (Duration::ZERO, 0);
        while came < whole {
            let (until, gap) = body_deadline(&OPTIONS, at, came);
            if until < at + every {
                return Some((until, gap));
            }
            at += every;
            came += piece.min(whole - came);
        }
        None
    }

    #[test]
    fn a_body_that_dribbles_is_given_up_and_one_that_is_only_slow_is_not() {
        let seconds = Duration::from_secs;
        // A byte every three seconds, and a little more often.
        for every in [Duration::from_secs(3), Duration::from_millis(10)] {
            let (at, gap) = given_up(1 << 20, 1, every).expect("given up");
            assert_eq!(gap, BodyGap::TooLittle { bytes_per_s: BODY_RATE, grace: seconds(10) });
            assert!((seconds(10)..seconds(11)).contains(&at), "{at:?}");
        }
        let (at, gap) = given_up(100, 1, seconds(6)).expect("given up");
        assert_eq!((at, gap), (seconds(5), BodyGap::Nothing { within: seconds(5) }));
        // A small body on a bad line: a packet each four seconds, two of them lost.
        assert_eq!(given_up(2000, 1000, seconds(4)), None);
        // A long conversation by modem, packet by packet; the largest body by a slow DSL line.
        assert_eq!(given_up(400 << 10, 1460, Duration::from_millis(350)), None);
        assert_eq!(given_up(8 << 20, 1460, Duration::from_millis(20)), None);
        let (at, gap) = given_up(8 << 20, 1460, Duration::from_millis(30)).expect("given up");
        assert_eq!((at, gap), (BODY_TIMEOUT, BodyGap::NotAll { within: BODY_TIMEOUT }));
    }

    #[tokio::test]
    async fn processors_go_to_whoever_took_the_least_of_their_time() {
        let server = Server::new("m", OPTIONS, AccessPolicy::default());
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        // One processor is left for all others.
        let mut taken = Vec::new();
        for _ in 0..processors {
            taken.push(server.tokenizing.take(0).await);
        }
        let order: Arc<Mutex<Vec<ClientId>>> = Arc::default();
        let mut line: Vec<_> = [1, 1, 2, 2]
            .map(|client| {
                let order = Arc::clone(&order);
                let work = move || {
                    order.lock().unwrap().push(client);
                    std::thread::sleep(Duration::from_millis(if client == 1 { 500 } else { 0 }));
                    if client == 1 { panic!("which costs what it took") } else { Ok(()) }
                };
                Box::pin(on_worker(&server, client, "working", work))
            })
            .into();
        for waiting in &mut line {
            assert!(futures::poll!(waiting).is_pending());
        }
        drop(taken.pop());
        let done = futures::future::join_all(line).await;
        assert_eq!(*order.lock().unwrap(), [1, 2, 2, 1]);
        let bugs = done.iter().filter(|done| matches!(done, Err(ApiError::Panic(_)))).count();
        assert_eq!((bugs, server.tokenizing.count()), (2, taken.len()));
    }
}
