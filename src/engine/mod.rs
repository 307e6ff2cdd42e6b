//! The engine: one thread that owns every sequence and every KV block, and drives a [`Runner`] step by step.
//!
//! ```text
//! submit -> bounded inbox -> | drain inbox -> schedule -> Batch -> submit/wait -> commit | -> events per request
//! ```
//!
//! It speaks token ids and refuses to know text, HTTP, the device or a layer. It never waits for a reader: the
//! event channel of a request holds its whole answer, so a slow reader costs memory (bounded by `max_tokens`)
//! and no time. Dropping a [`TokenStream`] cancels its request before the next step, and frees its blocks.
//!
//! A failing device ends the engine: the running request and all that wait get [`EngineError::Lost`], and so does
//! every later [`EngineHandle::submit`]. Nothing is retried and nothing computed elsewhere. A request whose logits are
//! no numbers fails alone.

mod block_manager;
mod scheduler;
mod sequence;

pub use block_manager::{Block, BlockManager};
pub use scheduler::{Output, Scheduler, Step};
pub use sequence::{FinishReason, Sequence, SequenceId};

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc as events;

use crate::model::{Limits, Runner, RunnerError, SamplingParams};

#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Requests that may wait beyond the running one; at least 1.
    pub queue: usize,
}

/// One prompt and how to answer it. Ids are `0..limits.vocab_size`.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    /// Ids to generate at most; none is what the context leaves after the prompt.
    pub max_tokens: Option<usize>,
    /// Ids that end the answer and are not part of it.
    pub stop_token_ids: Vec<u32>,
}

/// Where a request's time went, up to the event that carries it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    /// From submission to the first step.
    pub queue: Duration,
    /// From the first step to the first id.
    pub prefill: Duration,
    /// From the first id to this one.
    pub decode: Duration,
    /// Prompt tokens processed.
    pub prompt_n: usize,
    /// Ids sampled so far, a stop id included.
    pub predicted_n: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Token {
        id: u32,
        timings: Timings,
    },
    /// Last event of an answer.
    Finished {
        reason: FinishReason,
        timings: Timings,
    },
    /// Last event of a request that ended without one.
    Failed(EngineError),
}

/// Why a request was refused; nothing of it was kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("{waiting} requests are waiting already")]
    QueueFull { waiting: usize },
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("max_tokens is 0")]
    NoTokens,
    /// `max_tokens` is none where the prompt alone is too long.
    #[error("{}", overflow(*prompt, *max_tokens, *context))]
    ContextExceeded { prompt: usize, max_tokens: Option<usize>, context: usize },
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange { id: u32, vocab_size: usize },
    #[error(transparent)]
    Engine(#[from] EngineError),
}

fn overflow(prompt: usize, max_tokens: Option<usize>, context: usize) -> String {
    match max_tokens {
        None => format!(
            "the context holds {context} tokens, the prompt has {prompt} and leaves no room for an answer"
        ),
        Some(n) => {
            format!("the context holds {context} tokens, the prompt has {prompt} and {n} more were asked for")
        }
    }
}

/// Why a request got no whole answer. After all but `NotFinite`, the engine answers no more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("{0}; restart unicorn")]
    Lost(String),
    #[error("the model's logits are not finite numbers: no answer can be sampled from them")]
    NotFinite,
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// Counts at the last step's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Submitted and not yet running.
    pub waiting: usize,
    pub running: usize,
    pub free_blocks: usize,
    pub total_blocks: usize,
}

pub struct Engine;

impl Engine {
    /// Starts the engine thread, which owns the runner until it ends. It ends once every handle is dropped and
    /// all work is done, after [`EngineHandle::drain`] or [`EngineHandle::abort`], or when the device fails.
    pub fn start(runner: Box<dyn Runner>, config: EngineConfig) -> EngineHandle {
        assert!(config.queue > 0, "an engine without a queue takes no request");
        let limits = runner.limits();
        // One place more than requests that may wait: the wake-up of `drain` and `abort` always fits.
        let (inbox, messages) = sync_channel(config.queue + 1);
        let shared = Arc::new(Shared {
            limits,
            queue: config.queue,
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            free_blocks: AtomicUsize::new(limits.num_blocks),
            next_id: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            lost: OnceLock::new(),
            ended: Mutex::new(false),
            end: Condvar::new(),
        });
        let engine = StepLoop {
            runner,
            scheduler: Scheduler::new(limits),
            clients: HashMap::new(),
            messages,
            shared: Arc::clone(&shared),
        };
        let handle = EngineHandle { inbox, shared: Arc::clone(&shared) };
        thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                // Outside of `run`: dropped after the runner, or `join` would return while its destructor runs.
                let _end = EndGuard(shared);
                engine.run();
            })
            .expect("spawn the engine thread");
        handle
    }
}

/// Cheap to clone; every method may be called from any thread, and none but [`EngineHandle::join`] blocks.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: SyncSender<Message>,
    shared: Arc<Shared>,
}

impl EngineHandle {
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// Puts a request on the queue, or says at once why not.
    pub fn submit(&self, request: Request) -> Result<TokenStream, SubmitError> {
        self.health()?;
        let max_tokens = self.admissible(&request)?;
        let permit = Permit::take(&self.shared)?;

        // Room for the whole answer and its last event: the engine never finds the channel full.
        let (sender, receiver) = events::channel(max_tokens + 1);
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let prompt_n = request.prompt.len();
        let sequence = Sequence {
            id,
            prompt: request.prompt,
            sampling: request.sampling,
            max_tokens,
            stop_token_ids: request.stop_token_ids,
            computed: 0,
            generated: 0,
            blocks: Vec::new(),
        };
        let client = Client { events: sender, permit: Some(permit), clock: Clock::new(prompt_n) };
        match self.inbox.try_send(Message::Submit(Box::new(sequence), client)) {
            Ok(()) => Ok(TokenStream { events: receiver, shared: Arc::clone(&self.shared), done: false }),
            Err(TrySendError::Full(_)) => Err(SubmitError::QueueFull { waiting: self.shared.queue }),
            Err(TrySendError::Disconnected(_)) => Err(self.shared.why_ended().into()),
        }
    }

    /// Ids that `request` may generate.
    fn admissible(&self, request: &Request) -> Result<usize, SubmitError> {
        let Limits { max_context: context, vocab_size, .. } = self.shared.limits;
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if request.max_tokens == Some(0) {
            return Err(SubmitError::NoTokens);
        }
        if prompt >= context {
            return Err(SubmitError::ContextExceeded { prompt, max_tokens: None, context });
        }
        if let Some(id) = request.prompt.iter().copied().find(|id| *id as usize >= vocab_size) {
            return Err(SubmitError::TokenOutOfRange { id, vocab_size });
        }
        let left = context - prompt;
        match request.max_tokens {
            Some(n) if n > left => Err(SubmitError::ContextExceeded { prompt, max_tokens: Some(n), context }),
            n => Ok(n.unwrap_or(left)),
        }
    }

    /// Ok while requests are taken.
    pub fn health(&self) -> Result<(), EngineError> {
        let shared = &self.shared;
        let ending = shared.draining.load(Ordering::Acquire) || shared.lost.get().is_some();
        if ending { Err(shared.why_ended()) } else { Ok(()) }
    }

    pub fn stats(&self) -> Stats {
        Stats {
            waiting: self.shared.waiting.load(Ordering::Acquire),
            running: self.shared.running.load(Ordering::Acquire),
            free_blocks: self.shared.free_blocks.load(Ordering::Acquire),
            total_blocks: self.shared.limits.num_blocks,
        }
    }

    /// Refuses new requests; the engine ends when those it has are answered.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
        // A full inbox means that the engine is awake anyway.
        let _ = self.inbox.try_send(Message::Wake);
    }

    /// Refuses new requests and fails those under way before the next step.
    pub fn abort(&self) {
        self.shared.aborted.store(true, Ordering::Release);
        self.drain();
    }

    /// Waits until the engine has ended and its runner is dropped; false after `timeout`.
    pub fn join(&self, timeout: Duration) -> bool {
        let ended = self.shared.ended.lock().expect("nothing panics under this lock");
        let (ended, _) = self
            .shared
            .end
            .wait_timeout_while(ended, timeout, |e| !*e)
            .expect("nothing panics under this lock");
        *ended
    }
}

/// The events of one request, the last of them [`Event::Finished`] or [`Event::Failed`]; then none. Dropping it
/// cancels the request.
pub struct TokenStream {
    events: events::Receiver<Event>,
    shared: Arc<Shared>,
    done: bool,
}

impl TokenStream {
    /// The next event; not for use inside an async runtime, where this is a [`futures::Stream`].
    pub fn blocking_next(&mut self) -> Option<Event> {
        if self.done {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.deliver(event))
    }

    /// A channel that closed before a last event belonged to an engine that ended before it could send one.
    fn deliver(&mut self, event: Option<Event>) -> Event {
        let event = event.unwrap_or_else(|| Event::Failed(self.shared.why_ended()));
        self.done = !matches!(event, Event::Token { .. });
        event
    }
}

impl futures::Stream for TokenStream {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.done {
            return Poll::Ready(None);
        }
        self.events.poll_recv(cx).map(|event| Some(self.deliver(event)))
    }
}

enum Message {
    Submit(Box<Sequence>, Client),
    /// Look at the flags.
    Wake,
}

/// What the handles and the engine thread share; nothing of it is on the path of a step but five counters.
struct Shared {
    limits: Limits,
    queue: usize,
    waiting: AtomicUsize,
    running: AtomicUsize,
    free_blocks: AtomicUsize,
    next_id: AtomicU64,
    draining: AtomicBool,
    aborted: AtomicBool,
    lost: OnceLock<String>,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Shared {
    fn why_ended(&self) -> EngineError {
        match self.lost.get() {
            Some(why) => EngineError::Lost(why.clone()),
            None => EngineError::ShuttingDown,
        }
    }
}

/// A place in the queue, free again when dropped.
struct Permit(Arc<Shared>);

impl Permit {
    fn take(shared: &Arc<Shared>) -> Result<Self, SubmitError> {
        let more = |n| (n < shared.queue).then_some(n + 1);
        match shared.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(Self(Arc::clone(shared))),
            Err(waiting) => Err(SubmitError::QueueFull { waiting }),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Who asked, as the engine thread knows them.
struct Client {
    events: events::Sender<Event>,
    /// Held while the request waits.
    permit: Option<Permit>,
    clock: Clock,
}

impl Client {
    fn send(&self, event: Event) {
        match self.events.try_send(event) {
            // A reader that left: the request is removed before the next step.
            Ok(()) | Err(events::error::TrySendError::Closed(_)) => {}
            Err(events::error::TrySendError::Full(_)) => unreachable!("the channel holds a whole answer"),
        }
    }
}

/// When the stages of a request began.
struct Clock {
    submitted: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
    prompt_n: usize,
    predicted_n: usize,
}

impl Clock {
    fn new(prompt_n: usize) -> Self {
        Self { submitted: Instant::now(), started: None, first: None, prompt_n, predicted_n: 0 }
    }

    /// Notes that an id was sampled, and says where the time went.
    fn tick(&mut self) -> Timings {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let first = *self.first.get_or_insert(now);
        self.predicted_n += 1;
        Timings {
            queue: started - self.submitted,
            prefill: first - started,
            decode: now - first,
            prompt_n: self.prompt_n,
            predicted_n: self.predicted_n,
        }
    }
}

/// The engine thread's state.
struct StepLoop {
    runner: Box<dyn Runner>,
    scheduler: Scheduler,
    clients: HashMap<SequenceId, Client>,
    messages: Receiver<Message>,
    shared: Arc<Shared>,
}

impl StepLoop {
    fn run(mut self) {
        let _cause = PanicGuard(Arc::clone(&self.shared));
        loop {
            if !self.drain_inbox() {
                return;
            }
            self.remove_cancelled();
            if let Err(error) = self.step() {
                tracing::error!("{error}: the engine stops");
                // The first cause stays; it is what health and every later refusal name.
                let _ = self.shared.lost.set(error.to_string());
                self.fail_all();
                return;
            }
            self.publish();
        }
    }

    /// Takes in what arrived, waiting for it where there is nothing else to do; false where the engine is to end.
    fn drain_inbox(&mut self) -> bool {
        loop {
            let draining = self.shared.draining.load(Ordering::Acquire);
            if self.shared.aborted.load(Ordering::Acquire) {
                self.fail_all();
                return false;
            }
            let message = if self.scheduler.is_idle() && !draining {
                match self.messages.recv() {
                    Ok(message) => message,
                    Err(_) => return false, // no handle is left, and no work
                }
            } else {
                match self.messages.try_recv() {
                    Ok(message) => message,
                    Err(_) => return !self.scheduler.is_idle(),
                }
            };
            if let Message::Submit(sequence, client) = message {
                self.clients.insert(sequence.id, client);
                self.scheduler.add(*sequence);
            }
        }
    }

    fn remove_cancelled(&mut self) {
        self.clients.retain(|id, client| {
            let keep = !client.events.is_closed();
            if !keep {
                tracing::debug!(generated = client.clock.predicted_n, "cancelled: its reader left");
                self.scheduler.remove(*id);
            }
            keep
        });
        self.publish();
    }

    fn step(&mut self) -> Result<(), RunnerError> {
        let Some(step) = self.scheduler.schedule() else { return Ok(()) };
        for id in &step.ids {
            let client = self.clients.get_mut(id).expect("a scheduled sequence has a client");
            client.permit = None;
            client.clock.started.get_or_insert_with(Instant::now);
        }
        self.publish();

        let ticket = self.runner.submit(&step.batch, &step.sampling)?;
        let sampled = match self.runner.wait(ticket) {
            Err(error @ RunnerError::NotFinite) => {
                tracing::error!("{error}");
                for id in step.ids {
                    self.scheduler.remove(id);
                    let client = self.clients.remove(&id).expect("a scheduled sequence has a client");
                    client.send(Event::Failed(EngineError::NotFinite));
                }
                return Ok(());
            }
            result => result?,
        };
        for Output { id, token, finish } in self.scheduler.commit(&step, &sampled) {
            let client = self.clients.get_mut(&id).expect("a scheduled sequence has a client");
            let timings = client.clock.tick();
            if let Some(id) = token {
                client.send(Event::Token { id, timings });
            }
            if let Some(reason) = finish {
                client.send(Event::Finished { reason, timings });
                self.clients.remove(&id);
            }
        }
        Ok(())
    }

    /// Fails all that run or wait, those still in the inbox too.
    fn fail_all(&mut self) {
        self.shared.draining.store(true, Ordering::Release);
        let error = self.shared.why_ended();
        for (id, client) in self.clients.drain() {
            self.scheduler.remove(id);
            client.send(Event::Failed(error.clone()));
        }
        // What arrives after this finds the channel closed, and says the same.
        while let Ok(message) = self.messages.try_recv() {
            if let Message::Submit(_, client) = message {
                client.send(Event::Failed(error.clone()));
            }
        }
        self.publish();
    }

    fn publish(&self) {
        self.shared.running.store(self.scheduler.num_running(), Ordering::Release);
        self.shared.free_blocks.store(self.scheduler.free_blocks(), Ordering::Release);
    }
}

/// Names a panic as the cause before the clients' channels close, so that they hear of it.
struct PanicGuard(Arc<Shared>);

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.lost.set("the engine met a bug (see the log)".into());
        }
        self.0.draining.store(true, Ordering::Release);
    }
}

/// Says that the engine thread is done with everything, also when it panicked.
struct EndGuard(Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if let Ok(mut ended) = self.0.ended.lock() {
            *ended = true;
        }
        self.0.end.notify_all();
    }
}
