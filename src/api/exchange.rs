//! The path of one request through the server, the same for every wire format: a body becomes prompts, the engine gets
//! them, and the answers come as deltas. A [`Format`] reads the body and writes the reply.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::header;
use axum::http::request::Parts;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde::Serialize;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;
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
use crate::api::wire::reply::replies;
use crate::engine::{ClientId, Event, Joules, Timings, TokenStream};
use crate::library::{InUse, LibraryError, Model, Stage};
use crate::session::{AnswerText, Delta, GenerateRequest, Prepared, Reason, Service, SessionError};

/// The maximum time for a whole body. For 32 MiB, with images, that is 280 KB/s, which an uplink of 2.3 Mbit/s reaches, and
/// for a long conversation of 8 MiB of text 70 KB/s. Many clients may hold their places for that long at the same time, so [`Options::permit_timeout`] is longer.
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes per second that a body must reach on average after [`Options::body_grace`]: the rate of a telephone modem. A
/// client that holds a place as long as possible must send half a megabyte, instead of forty bytes.
const BODY_RATE: u32 = 4 << 10;
/// The last line of OpenAI's streams.
const DONE: &str = "[DONE]";

/// The client that sent a request. Authentication adds it to every request.
#[derive(Debug, Clone)]
pub(in crate::api) struct Client {
    /// The number by which fair shares are counted, and to which stored responses belong.
    pub id: ClientId,
    /// The request's connection.
    pub connection: Option<Connection>,
    /// When the request's head was complete.
    pub arrived: std::time::Instant,
    /// Whether it may pull and delete models: it has a key, or it is a program on this machine and no web page.
    pub is_trusted: bool,
}

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let client: Option<&Self> = parts.extensions.get();
        client.cloned().ok_or_else(|| ApiError::Bug("a request was not authenticated".into()))
    }
}

/// The client, and what the request's headers say about its purpose.
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

/// A request body, parsed.
pub(in crate::api) struct Parsed<T> {
    /// The model's id. `None` = the served model.
    pub model: Option<String>,
    pub request: GenerateRequest,
    pub stream: bool,
    /// The request's `cache_salt`, if it has one.
    pub cache_salt: Option<String>,
    /// What the wire format needs of the body to make prompts and to write the reply.
    pub form: T,
}

impl<T> Parsed<T> {
    /// The model's id, and the request.
    pub fn asked(self) -> (Option<String>, GenerateRequest) {
        (self.model, self.request)
    }
}

/// The prompts of a request, each with the text of its answers.
pub(in crate::api) type Prompts = Vec<Prepared>;

/// A wire format of answers. The value writes one reply, as one object or as the events of a stream.
pub(in crate::api) trait Format: Sized + Send + 'static {
    /// The beginning of the reply's id.
    const ID_PREFIX: &'static str;
    /// The field of the body that holds the prompt.
    const PROMPT: &'static str;
    /// Whether a stream begins while its model is loaded, with comments that report the load.
    const HAS_COMMENTS: bool;
    /// What the format needs of the body.
    type Form: Send;
    /// A reply that is not streamed.
    type Whole: Serialize;
    /// An event of a stream.
    type Event: Send;

    /// Parses a body of the client `owner`.
    fn parse(server: &Arc<Server>, owner: ClientId, body: &[u8]) -> Result<Parsed<Self::Form>, ApiError>;

    /// Makes prompts of the request, and what writes the reply.
    fn prepare(
        form: Self::Form,
        service: &Service,
        request: &GenerateRequest,
    ) -> Result<(Prompts, Self), ApiError>;

    /// Whether the body only unloads the model, so that a model that is not loaded stays so.
    fn is_unload(_: &Self::Form) -> bool {
        false
    }

    /// Waits until the reply can begin.
    fn ready(&self, _: &Service) -> impl Future<Output = Result<(), ApiError>> + Send {
        async { Ok(()) }
    }

    /// Whether only the prompt is returned. The engine generates at least one token, which is then removed.
    fn is_prompt_only(&self) -> bool {
        false
    }

    /// The reply that is not streamed. `answers` has one delta for each answer, with all of it.
    fn whole(self, reply: &Reply, answers: Vec<Delta>, timings: &Timings) -> Result<Self::Whole, ApiError>;

    /// The events before the first delta.
    fn begin(&mut self, _: &Reply) -> Vec<Self::Event> {
        Vec::new()
    }

    /// The events of a delta. `all` has the timings of all answers if the delta ends the last answer.
    fn add(
        &mut self,
        reply: &Reply,
        delta: Delta,
        all: Option<&Timings>,
    ) -> Result<Vec<Self::Event>, ApiError>;

    /// An event that says nothing new. It is sent during a long silence, because some clients do not count comments.
    fn waiting(&self, _: &Reply) -> Option<Self::Event> {
        None
    }

    /// The events after the last delta.
    fn end(&mut self, _: &Reply) -> Vec<Self::Event> {
        Vec::new()
    }

    /// Returns what makes the last events of a stream that an error ends.
    fn on_error(form: &Self::Form, head: Head) -> Failed<Self>;

    /// Sends a stream: [`server_sent`] or [`lines`]. The comments come before the events.
    fn send(
        server: &Server,
        comments: impl Stream<Item = String> + Send + 'static,
        events: impl Stream<Item = Self::Event> + Send + 'static,
    ) -> Response;
}

/// Makes the last events of a stream that an error ends.
pub(in crate::api) type Failed<F> = Box<dyn FnOnce(&ApiError) -> Vec<<F as Format>::Event> + Send>;

/// Answers a request in a wire format: reads the body, makes prompts of it, submits them to the engine, and writes the
/// answers. Errors come in the order of what finding them needs: the body, then the model's name, then the loaded model.
/// If the client disconnects, the future is dropped, and with it the engine's streams, which cancels the request.
///
/// A stream whose model is being loaded begins at once, in a format with comments. Later errors are events of the stream.
pub(in crate::api) async fn answer<F: Format>(
    server: &Arc<Server>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let awaited = Arc::<Awaited<F>>::default();
    let span = tracing::Span::current();
    let mut started =
        Box::pin(start::<F>(Arc::clone(server), caller, body, Arc::clone(&awaited)).instrument(span));
    let loading = tokio::select! {
        biased;
        started = &mut started => {
            let Started { reply, answers, format, stream, failed } = started?;
            return Ok(match stream {
                true => {
                    let pieces = pieces(server.options.event_interval, reply, answers, format);
                    F::send(server, futures::stream::empty(), until_error(pieces, failed))
                }
                false => Json(collect(reply, answers, format).await?).into_response(),
            });
        }
        loading = awaited.stream_while_loading(server), if F::HAS_COMMENTS => loading,
    };
    let (send, begun) = oneshot::channel();
    let (model, failed) = loading;
    let interval = server.options.keep_alive;
    let comments = async_stream::stream! {
        loop {
            yield format!("loading {:?}: {}", model.id(), model.loading().unwrap_or_else(|| "waiting".into()));
            if let Ok(started) = timeout(interval, &mut started).await {
                drop(send.send(started));
                return;
            }
        }
    };
    let (interval, metrics) = (server.options.event_interval, Arc::clone(&server.metrics));
    let events = async_stream::try_stream! {
        let begun = begun.await.unwrap_or_else(|_| Err(ApiError::Bug("a stream lost its load".into())));
        let Started { reply, answers, format, .. } = begun.inspect_err(|error| metrics.refused(error.code()))?;
        let mut pieces = std::pin::pin!(pieces(interval, reply, answers, format));
        while let Some(piece) = pieces.next().await {
            yield piece?;
        }
    };
    Ok(F::send(server, comments, until_error(events, failed)))
}

/// The request that waits for its model, if it does.
struct Awaited<F: Format> {
    /// The number of the model, and what an error would become, if the request is streamed.
    stream: Mutex<Option<(usize, Failed<F>)>>,
    /// Woken when `stream` is set.
    begun: Notify,
}

impl<F: Format> Default for Awaited<F> {
    fn default() -> Self {
        Self { stream: Mutex::default(), begun: Notify::new() }
    }
}

impl<F: Format> Awaited<F> {
    /// Waits until a stream waits for a model that is being loaded, so that the server no longer refuses it for lack of
    /// memory.
    async fn stream_while_loading(&self, server: &Server) -> (Arc<Model>, Failed<F>) {
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        self.begun.notified().await;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let mut stream = self.stream.lock().expect("nothing panics under this lock");
            let is_loading =
                |&mut (index, _): &mut (usize, _)| server.library().stage(index) == Stage::Loading;
            if let Some((index, failed)) = stream.take_if(is_loading) {
                return (server.library().model(index), failed);
            }
        }
    }
}

/// A request that the engine has.
struct Started<F: Format> {
    reply: Reply,
    answers: Answers,
    format: F,
    stream: bool,
    failed: Failed<F>,
}

/// Prepares a request, and submits it to the engine.
async fn start<F: Format>(
    server: Arc<Server>,
    Caller { client, headers }: Caller,
    body: Body,
    awaited: Arc<Awaited<F>>,
) -> Result<Started<F>, ApiError> {
    let server = &server;
    let id = client.id;
    let (reply_id, created) = (new_id(F::ID_PREFIX), unix_time_s());
    let head = move |model: &Model| Head {
        id: reply_id.clone(),
        created,
        model: model.id().to_owned(),
        system_fingerprint: FINGERPRINT,
    };
    let prepared = process_body(server, &client, body, move |server, body| {
        let Parsed { model, request, stream, cache_salt, form } = F::parse(server, id, body)?;
        let service = match F::is_unload(&form) {
            true => server.known(model.as_deref()),
            false => server.service_for(model.as_deref()),
        };
        if let (Err(ApiError::Library(LibraryError::Unloaded(index))), true) = (&service, stream) {
            let failed = F::on_error(&form, head(&server.library().model(*index)));
            *awaited.stream.lock().expect("nothing panics under this lock") = Some((*index, failed));
            awaited.begun.notify_one();
        }
        let service = service?;
        let head = head(service.model());
        let failed = F::on_error(&form, head.clone());
        let (prompts, format) =
            F::prepare(form, &service, &request).map_err(|error| error.in_prompt(F::PROMPT))?;
        let purpose = headers.purpose(&request.messages, stream);
        Ok((service, head, prompts, format, stream, failed, purpose, cache_salt))
    });
    let (arriving, (service, head, prompts, format, stream, failed, purpose, cache_salt)) = prepared.await?;
    tracing::debug!(class = purpose.class(), task = purpose.task, "prepared");
    let seed = prompts.first().map_or(0, |prompt| prompt.engine.seed);
    let salt = salt_of(server, client.id, cache_salt.as_deref());
    let mut answers = Answers { prompt_only: format.is_prompt_only(), ..Answers::default() };
    for prompt in prompts {
        let has_images = prompt.has_images();
        let decoded = move || prompt.decoded().map_err(|error| ApiError::from(error).in_prompt(F::PROMPT));
        let (mut engine, text) = match has_images {
            true => on_decoder(server, client.id, decoded).await?,
            false => decoded()?,
        };
        engine.cache_salt = salt.clone();
        (engine.client, engine.priority) = (client.id, purpose.priority);
        let n = 1 + engine.more_seeds.len();
        let tokens =
            service.engine().submit(engine).map_err(|error| ApiError::from(error).in_prompt(F::PROMPT))?;
        answers.add(tokens, &text, n, server.metrics.follow(service.model().id(), n, client.arrived));
    }
    server.metrics.taken(service.model().id(), purpose);
    drop(arriving); // from here on, the engine's queue is the limit
    format.ready(&service).await?;
    let reply = Reply { head, count: answers.count(), service, seed, span: tracing::Span::current() };
    Ok(Started { reply, answers, format, stream, failed })
}

/// Collects all answers, and writes them as one object.
async fn collect<F: Format>(reply: Reply, mut answers: Answers, format: F) -> Result<F::Whole, ApiError> {
    let mut all = vec![Delta::default(); reply.count];
    let mut last = Reason::Stop;
    while let Some(delta) = answers.next().await {
        let delta = delta.map_err(ApiError::while_collecting)?;
        last = delta.end.unwrap_or(last);
        all[delta.choice].append(delta);
    }
    let timings = answers.timings();
    reply.log(last, &timings);
    format.whole(&reply, all, &timings)
}

/// The answers as events of a stream. During a silence, an event that says nothing new comes after each `interval`.
fn pieces<F: Format>(
    interval: Duration,
    reply: Reply,
    mut answers: Answers,
    mut format: F,
) -> impl Stream<Item = Result<F::Event, ApiError>> + Send + 'static {
    async_stream::try_stream! {
        for event in format.begin(&reply) {
            yield event;
        }
        // Not every delta makes an event.
        let mut sent = Instant::now();
        loop {
            let delta = match timeout_at(sent + interval, answers.next()).await {
                Ok(Some(delta)) => delta?,
                Ok(None) => break,
                Err(_) => {
                    if let Some(event) = format.waiting(&reply) {
                        yield event;
                    }
                    sent = Instant::now();
                    continue;
                }
            };
            let last = delta.end.filter(|_| answers.is_done());
            let all = last.map(|reason| {
                let timings = answers.timings();
                reply.log(reason, &timings);
                timings
            });
            for event in format.add(&reply, delta, all.as_ref())? {
                yield event;
                sent = Instant::now();
            }
        }
        for event in format.end(&reply) {
            yield event;
        }
    }
}

/// Reads a body, and counts the tokens of its conversation. `parse` returns the model's name and the conversation.
/// `prompt` is the field that holds the conversation.
pub(in crate::api) async fn count_tokens(
    server: &Arc<Server>,
    client: &Client,
    body: Body,
    prompt: &'static str,
    parse: impl Fn(&Arc<Server>, &[u8]) -> Result<(Option<String>, GenerateRequest), ApiError>
    + Send
    + Sync
    + 'static,
) -> Result<usize, ApiError> {
    let counted = process_body(server, client, body, move |server, body| {
        let (model, request) = parse(server, body)?;
        let service = server.service_for(model.as_deref())?;
        let ids = service.conversation(&request).map_err(|error| ApiError::from(error).in_prompt(prompt))?;
        Ok(ids.len())
    });
    counted.await.map(|(_, n)| n)
}

/// Waits for a permit to read a body, reads it, and runs `work` on it in a blocking task. The permit is returned with the
/// result. Requests of one client wait in order.
///
/// If `work` needs a model that is not loaded, this waits until it is, without a permit, and runs `work` again.
pub(in crate::api) async fn process_body<T: Send + 'static>(
    server: &Arc<Server>,
    client: &Client,
    body: Body,
    work: impl Fn(&Preparing<'_>, &[u8]) -> Result<T, ApiError> + Send + Sync + 'static,
) -> Result<(FairPermit, T), ApiError> {
    let mut arriving = tokio::select! {
        biased;
        turn = permit(server, &server.arriving, client.id, "reading") => turn?,
        // The client has disconnected, so this error is not sent.
        () = Connection::left(client.connection.as_ref()) => return Err(ApiError::BodyBroken),
    };
    let body = Arc::new(read_body(body, &server.options).await?);
    let work = Arc::new(work);
    let mut admitted = None;
    loop {
        let (worker, work, body) = (Arc::clone(server), Arc::clone(&work), Arc::clone(&body));
        let worked = on_worker(server, client.id, "preparing a prompt", move || {
            work(&Preparing { server: &worker, admitted: RefCell::new(admitted) }, &body)
        });
        match worked.await {
            Err(ApiError::Library(LibraryError::Unloaded(index))) => {
                drop(arriving);
                admitted = match server.library().admit(index, client.id).await {
                    // The list of models has changed. Another model may have the name now.
                    Err(LibraryError::Gone(_)) => None,
                    admitted => Some(admitted?),
                };
                arriving = permit(server, &server.arriving, client.id, "reading").await?;
            }
            worked => return Ok((arriving, worked?)),
        }
    }
}

/// The server, for the preparation of a request, which finds the service of its model here.
pub(in crate::api) struct Preparing<'a> {
    server: &'a Arc<Server>,
    /// The model that was loaded for the request.
    admitted: RefCell<Option<InUse>>,
}

impl Deref for Preparing<'_> {
    type Target = Arc<Server>;

    fn deref(&self) -> &Arc<Server> {
        self.server
    }
}

impl Preparing<'_> {
    /// The loaded service of `model`, or of the first model if the request names none. The error
    /// [`LibraryError::Unloaded`] makes [`process_body`] load the model and try again.
    pub fn service_for(&self, model: Option<&str>) -> Result<InUse, ApiError> {
        let library = self.server.library();
        let index = self.server.served(model)?;
        let is_asked = |in_use: &mut InUse| Arc::ptr_eq(in_use.model(), &library.model(index));
        let service = match self.admitted.borrow_mut().take_if(is_asked) {
            Some(admitted) => admitted,
            None => library.in_use(index).ok_or(ApiError::Loading)??,
        };
        service.engine().health()?;
        Ok(service)
    }

    /// Like [`Self::service_for`], but a model that was loaded once may be unloaded now.
    pub fn known(&self, model: Option<&str>) -> Result<InUse, ApiError> {
        let known = self.server.library().model(self.server.served(model)?).known();
        known.map_or_else(|| self.service_for(model), Ok)
    }
}

/// Waits for a permit, up to `permit_timeout`. `doing` is what the permits are for, for the error.
async fn permit(
    server: &Server,
    turns: &FairSemaphore,
    client: ClientId,
    doing: &'static str,
) -> Result<FairPermit, ApiError> {
    let waited = server.options.permit_timeout;
    timeout(waited, turns.take(client)).await.map_err(|_| ApiError::NoTurn { doing, waited })
}

/// Charges the client for the time until the drop, also if the work panics.
struct Timed(FairPermit, Instant);

impl Timed {
    fn new(permit: FairPermit) -> Self {
        Self(permit, Instant::now())
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.0.charge(self.1.elapsed().as_micros() as u64);
    }
}

/// Runs work that decodes images, in its turn. The turn is awaited without a permit for a processor, so that many images do not
/// delay requests without images.
async fn on_decoder<T: Send + 'static>(
    server: &Server,
    client: ClientId,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = permit(server, &server.decoding, client, "decoding the images of").await?;
    let work = move || {
        let _timed = Timed::new(turn);
        work()
    };
    on_worker(server, client, "decoding images", work).await
}

/// Runs work that may take a processor for seconds, such as tokenizing a long conversation or compiling a grammar. The
/// work runs on blocking threads, at most one for each processor. Permits go to the client that has used the least
/// processor time. `what` names the work if it panics.
pub(in crate::api) async fn on_worker<T: Send + 'static>(
    server: &Server,
    client: ClientId,
    what: &str,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = permit(server, &server.tokenizing, client, "preparing").await?;
    let worked = tokio::task::spawn_blocking(move || {
        let _timed = Timed::new(turn);
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

/// When a body times out if no more of it comes, counted from its beginning, and why. `came` bytes have come, the last of
/// them `elapsed` after the beginning.
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
    .expect("there are three")
}

/// The pieces of a stream up to an error. An error, also a panic, is logged, and ends the stream with the pieces of
/// `failed`.
pub(in crate::api) fn until_error<T: Send + 'static>(
    pieces: impl Stream<Item = Result<T, ApiError>> + Send + 'static,
    failed: impl FnOnce(&ApiError) -> Vec<T> + Send + 'static,
) -> impl Stream<Item = T> + Send + 'static {
    // A stream outlives the handler and the handler's span.
    let span = tracing::Span::current();
    async_stream::stream! {
        let mut pieces = Box::pin(AssertUnwindSafe(pieces).catch_unwind());
        let error = loop {
            match pieces.next().await {
                Some(Ok(Ok(piece))) => yield piece,
                Some(Ok(Err(error))) => break error,
                Some(Err(panic)) => break panicked("", &*panic),
                None => return,
            }
        };
        // End the generation now, and not after the client has read the error.
        drop(pieces);
        span.in_scope(|| log_in_stream(&error));
        for piece in failed(&error) {
            yield piece;
        }
    }
}

/// A reply of server-sent events after these comments, with empty comments while there is no event.
pub(in crate::api) fn server_sent(
    server: &Server,
    comments: impl Stream<Item = String> + Send + 'static,
    events: impl Stream<Item = sse::Event> + Send + 'static,
) -> Response {
    let keep_alive = KeepAlive::new().interval(server.options.keep_alive);
    let events = comments.map(|text| sse::Event::default().comment(text)).chain(events);
    Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(keep_alive).into_response()
}

/// A reply of JSON objects, one in each line.
pub(in crate::api) fn lines(lines: impl Stream<Item = String> + Send + 'static) -> Response {
    let lines = lines.map(|line| Ok::<_, Infallible>(line + "\n"));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// The last line of a stream of OpenAI's.
pub(in crate::api) fn done() -> Vec<String> {
    vec![DONE.to_owned()]
}

/// The last lines of a stream of OpenAI's that an error ends.
pub(in crate::api) fn failed_lines(error: &ApiError) -> Vec<String> {
    vec![json_text(&error.body()), DONE.to_owned()]
}

/// An event without a name.
pub(in crate::api) fn line(text: String) -> sse::Event {
    sse::Event::default().data(text)
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
    pub head: Head,
    /// The number of answers to all prompts.
    pub count: usize,
    pub service: InUse,
    seed: u64,
    /// The request's span: a stream outlives the handler.
    span: tracing::Span,
}

impl Reply {
    fn log(&self, reason: Reason, timings: &Timings) {
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

const FINGERPRINT: &str = concat!("unicorn-", env!("CARGO_PKG_VERSION"));

/// The fields that all of OpenAI's reply objects begin with.
#[derive(Clone, Serialize, ToSchema)]
#[schema(as = ReplyHead)]
pub(in crate::api) struct Head {
    pub id: String,
    /// When the reply began: Unix time, in seconds.
    pub created: u64,
    pub model: String,
    /// The server's version: answers may differ between versions.
    system_fingerprint: &'static str,
}

impl Head {
    /// The head of a reply without a request, for benchmarks.
    pub fn unasked(model: &str) -> Self {
        let (id, model) = (new_id("chatcmpl-"), model.to_owned());
        Self { id, created: 0, model, system_fingerprint: FINGERPRINT }
    }
}

/// The answers to one request. They are numbered prompt by prompt.
#[derive(Default)]
struct Answers {
    streams: Vec<PromptAnswers>,
    /// The index of the stream to poll first.
    next: usize,
    /// Whether the answers are removed, so that only the prompts are returned.
    prompt_only: bool,
}

/// The answers to one prompt.
struct PromptAnswers {
    tokens: TokenStream,
    texts: Vec<AnswerText>,
    /// The timings of each answer that ended.
    ends: Vec<Option<Timings>>,
    /// The number of the first of these answers among all answers to the request.
    first: usize,
    followed: Followed,
}

impl PromptAnswers {
    fn is_done(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    /// The delta of an event. `None` = the stream ended before its answers did.
    fn take(&mut self, event: Option<Event>) -> Result<Delta, ApiError> {
        let Some(event) = event else { return Err(ApiError::Bug("an answer had no end".into())) };
        self.followed.event(&event);
        // A failure has no choice, and ends all answers.
        let choice = event.choice().unwrap_or(0);
        let delta = self.texts[choice].push(event).inspect_err(|error| {
            if let SessionError::Grammar(_) = error {
                self.followed.end_all("error");
            }
        })?;
        if let Some(reason) = delta.end {
            self.ends[choice] = Some(delta.timings);
            self.followed.ended(choice, reason, &delta.timings);
            // The engine does not see stop strings, so it must learn that the answer ended.
            self.tokens.stop(choice);
        }
        Ok(Delta { choice: self.first + choice, ..delta })
    }
}

impl Answers {
    /// Adds the `n` answers to one more prompt.
    fn add(&mut self, tokens: TokenStream, text: &AnswerText, n: usize, followed: Followed) {
        let first = self.count();
        let (texts, ends) = (vec![text.clone(); n], vec![None; n]);
        self.streams.push(PromptAnswers { tokens, texts, ends, first, followed });
    }

    /// The number of answers to all prompts.
    fn count(&self) -> usize {
        self.streams.last().map_or(0, |stream| stream.first + stream.ends.len())
    }

    fn is_done(&self) -> bool {
        self.streams.iter().all(PromptAnswers::is_done)
    }

    /// The next delta of any answer. `None` = all answers have ended.
    async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        let delta = poll_fn(|context| {
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
        });
        let delta = delta.await?;
        Some(delta.map(|delta| match self.prompt_only {
            // `max_tokens` is 0: the answer is empty, and its finish reason is `length`.
            true => Delta {
                choice: delta.choice,
                prompt: delta.prompt,
                end: delta.end.map(|_| Reason::Length),
                timings: delta.timings,
                ..Delta::default()
            },
            false => delta,
        }))
    }

    /// Timings of all answers together. Answers to one prompt share the prompt's time and tokens, which count once.
    fn timings(&self) -> Timings {
        let every = || self.streams.iter().flat_map(|stream| stream.ends.iter().flatten());
        let mut all = Timings { energy: energy_of(every()), ..Timings::default() };
        for stream in &self.streams {
            let ends = || stream.ends.iter().flatten();
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
                all.thought_n += timings.thought_n;
                all.first_n += timings.first_n;
                all.drafts.proposed += timings.drafts.proposed;
                all.drafts.accepted += timings.drafts.accepted;
            }
        }
        if self.prompt_only {
            all.predicted_n = 0;
        }
        all
    }
}

/// The energy of several answers. `None` = the energy of one of them is unknown.
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

replies! {
    /// Tokens of all answers together.
    pub(in crate::api) struct Usage {
        prompt_tokens: usize,
        completion_tokens: usize,
        total_tokens: usize,
        prompt_tokens_details: PromptTokensDetails,
        completion_tokens_details: CompletionTokensDetails,
    }

    struct PromptTokensDetails {
        /// Tokens of the prompt that the prefix cache had.
        cached_tokens: usize,
    }

    struct CompletionTokensDetails {
        /// Tokens of thoughts, with those around a thought.
        reasoning_tokens: usize,
    }
}

impl Usage {
    pub fn new(timings: &Timings) -> Self {
        let Timings { prompt_n, cached_n, predicted_n, thought_n, .. } = *timings;
        Self {
            prompt_tokens: prompt_n,
            completion_tokens: predicted_n,
            total_tokens: prompt_n + predicted_n,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: cached_n },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens: thought_n },
        }
    }
}

replies! {
    /// Times of all answers together, as llama.cpp's server reports them. A rate is null if there are too few tokens to
    /// measure it. Energy is absent if the machine does not measure it.
    #[schema(as = Timings)]
    pub(in crate::api) struct TimingsReport {
        /// Tokens of the prompt that were computed.
        prompt_n: usize,
        /// Tokens of the prompt that the prefix cache had.
        cache_n: usize,
        prompt_ms: f64,
        prompt_per_second: Option<f64>,
        predicted_n: usize,
        predicted_ms: f64,
        /// The rate of the tokens after those that came with the first, whose time is part of `prompt_ms`. Null in an
        /// answer of fewer than five steps, whose time is not exact enough.
        predicted_per_second: Option<f64>,
        /// Tokens that prompt lookup or the draft model proposed.
        draft_n: usize,
        draft_n_accepted: usize,
        /// What counted the energy: `rapl` or `amdgpu`.
        energy_source?: &'static str,
        /// Energy up to the first token: the answers' share of what the machine used in that time.
        prompt_joules?: f64,
        /// Energy from the first token on.
        predicted_joules?: f64,
        /// All of that energy, divided by `predicted_n`.
        joules_per_token?: f64,
    }
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
    use futures::FutureExt as _;

    use super::*;
    use crate::api::http::auth::AccessPolicy;
    use crate::api::server::DECODED_AT_ONCE;

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
        event_interval: Duration::from_secs(60),
        device_timeout: Duration::from_secs(60),
        lost_log_lines: || 0,
    };

    /// When and why a body of `whole` bytes times out that comes in pieces of `piece` bytes, one each `every`. `None` =
    /// all of it comes in time.
    fn times_out(whole: usize, piece: usize, every: Duration) -> Option<(Duration, BodyGap)> {
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
    fn a_body_without_progress_times_out_and_a_slow_one_does_not() {
        let seconds = Duration::from_secs;
        // A byte every three seconds, and a little more often.
        for every in [Duration::from_secs(3), Duration::from_millis(10)] {
            let (at, gap) = times_out(1 << 20, 1, every).expect("times out");
            assert_eq!(gap, BodyGap::TooLittle { bytes_per_s: BODY_RATE, grace: seconds(10) });
            assert!((seconds(10)..seconds(11)).contains(&at), "{at:?}");
        }
        let (at, gap) = times_out(100, 1, seconds(6)).expect("times out");
        assert_eq!((at, gap), (seconds(5), BodyGap::Nothing { within: seconds(5) }));
        // A small body on a bad line: a packet each four seconds, two of them lost.
        assert_eq!(times_out(2000, 1000, seconds(4)), None);
        // A long conversation by modem, packet by packet; the largest body by a slow DSL line.
        assert_eq!(times_out(400 << 10, 1460, Duration::from_millis(350)), None);
        assert_eq!(times_out(8 << 20, 1460, Duration::from_millis(20)), None);
        let (at, gap) = times_out(8 << 20, 1460, Duration::from_millis(30)).expect("times out");
        assert_eq!((at, gap), (BODY_TIMEOUT, BodyGap::NotAll { within: BODY_TIMEOUT }));
    }

    #[tokio::test]
    async fn processors_go_to_the_client_that_used_the_least_processor_time() {
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

    #[tokio::test]
    async fn a_request_that_waits_for_a_decoder_holds_no_processor() {
        let server = Server::new("m", OPTIONS, AccessPolicy::default());
        let mut decoding = Vec::new();
        while let Some(turn) = server.decoding.take(1).now_or_never() {
            decoding.push(turn);
        }
        assert_eq!(decoding.len(), DECODED_AT_ONCE);
        // More than there are processors.
        let mut waiting: Vec<_> = (0..200).map(|i| Box::pin(on_decoder(&server, 1, move || Ok(i)))).collect();
        for waiting in &mut waiting {
            assert!(futures::poll!(waiting).is_pending());
        }
        assert_eq!(server.tokenizing.count(), 0);
        assert_eq!(on_worker(&server, 2, "working", || Ok("text")).await, Ok("text"));
        decoding.clear();
        let done = futures::future::join_all(waiting).await;
        assert_eq!(done.into_iter().collect::<Result<Vec<_>, _>>(), Ok((0..200).collect()));
        assert_eq!((server.decoding.count(), server.tokenizing.count()), (0, 0));
    }
}
