//! The engine: one thread that owns every sequence and every KV block, and drives a [`Runner`] step by step.
//!
//! ```text
//! submit -> bounded inbox -> | drain inbox -> schedule -> submit step N+1 -> wait for step N -> commit | -> events
//! ```
//!
//! While the device runs one step the next is already submitted: what a step draws feeds the next one there, and what
//! the host does about an id (stop ids, limits, telling the reader) it does beside the device, not in its way.
//!
//! With a draft model the steps do not overlap while a sequence wants guesses: the second model guesses what follows the
//! last known id, and one step of the first checks all of it.
//!
//! It speaks token ids and refuses to know text, HTTP, the device or a layer. It never waits for a reader: one that
//! falls [`EVENTS`] events behind, for each of its answers, is cancelled, alone. Dropping a [`TokenStream`] cancels its
//! request before the next step is scheduled, and frees its blocks.
//!
//! A failing device ends the engine: the running requests and all that wait get [`EngineError::Lost`], and so does
//! every later [`EngineHandle::submit`]. Nothing is retried and nothing computed elsewhere. A panic of the engine's thread
//! ends it as well, with [`EngineError::Bug`]: a step for nobody while somebody waits is one. The clients hear of either
//! before the runner is dropped, and [`EngineHandle::ended`] says which it was. A request whose logits are no numbers fails
//! alone, and the prefix cache forgets its text.

mod block_manager;
mod pace;
mod request;
mod scheduler;
mod sequence;
mod speculation;
mod trial;

pub use block_manager::{BlockManager, BlockTable, NoRoom, PoolUse};
pub use pace::{Load, Pace};
pub use request::{CacheSalt, ClientId, Priority};
pub use scheduler::{Output, Scheduler, SchedulerConfig, Share, Step};
pub use sequence::{End, FinishReason, Fork, Sequence, SequenceId, SharedMask, TokenMask};
pub use speculation::{Drafts, Guesses};
pub use trial::{Trial, TrialStep};

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc as events;

use crate::model::{
    BlockPool, Limits, Logprobs, MAX_BIASES, MAX_LOGPROBS, Runner, RunnerError, SamplingParams, Ticket,
};

/// Events of each answer of a request that may wait for its reader: some seconds of an answer, or a reader's pause.
pub const EVENTS: usize = 1024;

/// The longest queue that an engine may have.
pub const MAX_QUEUE: usize = 4096;

#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Requests that may wait beyond those that run: 1 to [`MAX_QUEUE`].
    pub queue: usize,
    pub scheduler: SchedulerConfig,
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
    /// Ids to generate before one of those may come.
    pub min_tokens: usize,
    /// Added to the logits of these ids, none of them twice.
    pub bias: Vec<(u32, f32)>,
    /// Which ids may come next; each answer has its own.
    pub mask: Option<Box<dyn TokenMask>>,
    /// Log probabilities of the ids, and of so many of the most likely ones in their places.
    pub logprobs: Option<usize>,
    /// The same for the ids of the prompt but the first, which is computed afresh for it.
    pub prompt_logprobs: Option<usize>,
    /// The mean of the prompt's hidden states is wanted, and no answer: of what is above, the prompt alone counts.
    pub pooling: bool,
    /// Seeds of further answers to the same prompt, which is computed once.
    pub more_seeds: Vec<u64>,
    /// Whose request it is, for fairness between them.
    pub client: ClientId,
    /// With whom it shares the prefix cache.
    pub cache_salt: CacheSalt,
    pub priority: Priority,
}

impl Request {
    /// One greedy answer, as long as the context allows, of interactive priority, whose cached prefix is everybody's who
    /// gives no salt.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::GREEDY,
            max_tokens: None,
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            bias: Vec::new(),
            mask: None,
            logprobs: None,
            prompt_logprobs: None,
            pooling: false,
            more_seeds: Vec::new(),
            client: 0,
            cache_salt: CacheSalt::default(),
            priority: Priority::Interactive,
        }
    }
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
    /// Tokens of the prompt.
    pub prompt_n: usize,
    /// Of these, those that the prefix cache had.
    pub cached_n: usize,
    /// Ids sampled so far, a stop id included.
    pub predicted_n: usize,
    /// Of these, those guessed ahead, and the guesses that there were.
    pub drafts: Drafts,
}

/// `choice` counts the answers of a request: 0, and one for each of [`Request::more_seeds`].
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Before all others, where they were asked for: those of the prompt's ids but the first.
    Prompt { logprobs: Vec<Logprobs> },
    /// What a request with [`Request::pooling`] is for: the mean over its tokens of the hidden states behind the final norm,
    /// `[hidden_size]`.
    Pooled { state: Vec<f32> },
    Token {
        choice: usize,
        id: u32,
        /// Where they were asked for.
        logprobs: Option<Logprobs>,
        timings: Timings,
    },
    /// Last event of an answer.
    Finished {
        choice: usize,
        reason: FinishReason,
        /// The stop id that ended it, which is no token of the answer, where log probabilities were asked for.
        stop: Option<(u32, Logprobs)>,
        timings: Timings,
    },
    /// Last event of a request that ended without all its answers.
    Failed(EngineError),
}

impl Event {
    /// Whose it is; none where it is that of all answers.
    pub fn choice(&self) -> Option<usize> {
        match self {
            Event::Token { choice, .. } | Event::Finished { choice, .. } => Some(*choice),
            Event::Prompt { .. } | Event::Pooled { .. } | Event::Failed(_) => None,
        }
    }
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
    #[error("{n} biases of ids, stop ids before min_tokens included, are more than {MAX_BIASES}")]
    TooManyBiases { n: usize },
    #[error("{n} alternatives to an id are more than {MAX_LOGPROBS}")]
    TooManyLogprobs { n: usize },
    #[error("{n} answers were asked for, and {most} can run at once")]
    TooManyAnswers { n: usize, most: usize },
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Clients know an overflow by words: by "prompt is too long" langchain and Anthropic's, by "this model's maximum context
/// length is" litellm.
fn overflow(prompt: usize, max_tokens: Option<usize>, context: usize) -> String {
    let most = format!("this model's maximum context length is {context} tokens");
    match max_tokens {
        None => format!("the prompt is too long: {prompt} tokens, and {most}, the answer included"),
        Some(n) => format!("{most}: the prompt has {prompt} and {n} more were asked for"),
    }
}

/// Why a request got no whole answer. After `Lost`, `Bug` and `ShuttingDown`, the engine answers no more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The device is, or its driver failed.
    #[error("{0}; restart unicorn")]
    Lost(String),
    /// The engine's thread panicked.
    #[error("{0}; restart unicorn")]
    Bug(String),
    #[error("the model's logits are not finite numbers: no answer can be sampled from them")]
    NotFinite,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the answer was not read: {EVENTS} tokens for each answer of the request waited for the client")]
    SlowReader,
}

/// Counts at the last step's end; those of events since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Submitted and not yet running.
    pub waiting: usize,
    pub running: usize,
    /// Blocks of the two pools.
    pub full: PoolUse,
    pub sliding: PoolUse,
    pub preemptions: u64,
    /// Ids guessed ahead.
    pub guesses: Guesses,
    pub steps: u64,
    /// Tokens of sequences that those steps computed.
    pub step_tokens: u64,
    /// Shares of sequences in those steps.
    pub step_shares: u64,
    /// Time of the engine's thread beside waiting for the device and for work.
    pub host_ns: u64,
}

/// What the engine gives the device to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Step,
    Probe,
}

/// Signs of life of the device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Signs {
    /// When it last finished something.
    pub last: Option<Instant>,
    /// What it has to do now, and since when.
    pub work: Option<(Work, Instant)>,
}

pub struct Engine;

impl Engine {
    /// Starts the engine thread, which owns the runner until it ends. It ends once every handle is dropped and
    /// all work is done, after [`EngineHandle::drain`] or [`EngineHandle::abort`], or when the device fails.
    pub fn start(runner: Box<dyn Runner>, config: EngineConfig) -> EngineHandle {
        assert!((1..=MAX_QUEUE).contains(&config.queue), "a queue of {} requests", config.queue);
        let limits = runner.limits();
        // One place more than requests that may wait: the wake-up of `drain` and `abort` always fits.
        let (inbox, messages) = sync_channel(MAX_QUEUE + 1);
        let shared = Arc::new(Shared {
            limits,
            queue: AtomicUsize::new(config.queue),
            waiting: AtomicUsize::new(0),
            stats: Mutex::new(Stats::default()),
            signs: Mutex::new(Signs::default()),
            probe: AtomicBool::new(false),
            next_id: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            cause: OnceLock::new(),
            ended: Mutex::new(false),
            end: Condvar::new(),
        });
        let config = SchedulerConfig { draft_model: runner.has_draft(), ..config.scheduler };
        let mut engine = StepLoop {
            runner,
            scheduler: Scheduler::new(limits, config),
            pace: Pace::new(),
            in_flight: VecDeque::new(),
            last_done: Instant::now(),
            answers: HashMap::new(),
            messages,
            shared: Arc::clone(&shared),
            stats: Stats::default(),
        };
        engine.publish();
        let handle = EngineHandle { inbox, shared: Arc::clone(&shared) };
        thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                // Dropped after the runner, or `join` would return while its destructor runs.
                let _end = EndGuard(shared);
                // What it says and where is the panic hook's to tell.
                if catch_unwind(AssertUnwindSafe(|| engine.run())).is_err() {
                    engine.shared.end_for(EngineError::Bug("the engine met a bug (see the log)".into()));
                    tracing::error!("the engine met a bug and stops");
                }
                engine.end();
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
        let permit = Permit::take(&self.shared, request.priority)?;

        let choices = 1 + request.more_seeds.len();
        let (sender, receiver) = events::channel(EVENTS * choices);
        let id = self.shared.next_id.fetch_add(choices as u64, Ordering::Relaxed);
        let prompt_n = request.prompt.len();
        let mut sequence = Sequence::new(id, request.prompt, request.sampling, max_tokens);
        sequence.client = request.client;
        sequence.priority = request.priority;
        sequence.cache_salt = request.cache_salt;
        // What the model has no row for never comes.
        let vocab_size = self.shared.limits.vocab_size;
        sequence.stop_token_ids = request.stop_token_ids;
        sequence.stop_token_ids.retain(|id| (*id as usize) < vocab_size);
        sequence.min_tokens = request.min_tokens;
        sequence.bias = request.bias.into();
        sequence.mask = request.mask.map(SharedMask::new);
        sequence.logprobs = request.logprobs;
        sequence.prompt_logprobs = request.prompt_logprobs;
        sequence.pooling = request.pooling;
        sequence.forks = (id + 1..).zip(request.more_seeds).map(|(id, seed)| Fork { id, seed }).collect();
        let failure = Arc::new(OnceLock::new());
        let stopped: Arc<[AtomicBool]> = (0..choices).map(|_| AtomicBool::new(false)).collect();
        let answers = (0..choices)
            .map(|choice| Answer {
                choice,
                events: sender.clone(),
                stopped: Arc::clone(&stopped),
                failure: Arc::clone(&failure),
                permit: None,
                clock: Clock::new(prompt_n),
            })
            .collect::<Vec<_>>();
        let mut submitted = Submitted { sequence, answers };
        submitted.answers[0].permit = Some(permit);
        match self.inbox.try_send(Message::Submit(Box::new(submitted))) {
            Ok(()) => Ok(TokenStream {
                events: receiver,
                shared: Arc::clone(&self.shared),
                failure,
                stopped,
                unfinished: vec![true; choices],
            }),
            Err(TrySendError::Full(_)) => Err(SubmitError::QueueFull { waiting: MAX_QUEUE }),
            Err(TrySendError::Disconnected(_)) => Err(self.shared.why_ended().into()),
        }
    }

    /// Ids that `request` may generate.
    fn admissible(&self, request: &Request) -> Result<usize, SubmitError> {
        let Limits { max_context: context, vocab_size, .. } = self.shared.limits;
        assert!(!request.pooling || request.more_seeds.is_empty(), "several answers, and none");
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
        let biased = request.bias.iter().map(|(id, _)| id);
        let mut ids = request.prompt.iter().chain(biased).copied();
        if let Some(id) = ids.find(|id| *id as usize >= vocab_size) {
            return Err(SubmitError::TokenOutOfRange { id, vocab_size });
        }
        let n = request.bias.len() + request.stop_token_ids.len();
        if n > MAX_BIASES {
            return Err(SubmitError::TooManyBiases { n });
        }
        let logprobs = request.logprobs.max(request.prompt_logprobs);
        if let Some(n) = logprobs.filter(|n| *n > MAX_LOGPROBS) {
            return Err(SubmitError::TooManyLogprobs { n });
        }
        let (n, most) = (1 + request.more_seeds.len(), self.shared.limits.max_sequences);
        if n > most {
            return Err(SubmitError::TooManyAnswers { n, most });
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
        let ending = shared.draining.load(Ordering::Acquire) || shared.cause.get().is_some();
        if ending { Err(shared.why_ended()) } else { Ok(()) }
    }

    /// Why the engine ended by itself, [`EngineError::Lost`] or [`EngineError::Bug`]; none while it runs, and where it was
    /// asked to end. It is told before the first answer fails for it, and stays, whatever is asked of the engine then. The
    /// runner may be there for long after that: [`EngineHandle::join`] waits for it.
    pub fn ended(&self) -> Option<EngineError> {
        self.shared.cause.get().cloned()
    }

    pub fn stats(&self) -> Stats {
        let stats = *self.shared.stats.lock().expect("nothing panics under this lock");
        Stats { waiting: self.shared.waiting.load(Ordering::Acquire), ..stats }
    }

    pub fn signs(&self) -> Signs {
        *self.shared.signs.lock().expect("nothing panics under this lock")
    }

    /// Has the device do something tiny as soon as it has nothing else to do; [`EngineHandle::signs`] tells of it. One
    /// that fails it is lost.
    pub fn probe(&self) {
        // Asked once: the inbox's places are for requests.
        if !self.shared.probe.swap(true, Ordering::AcqRel) {
            let _ = self.inbox.try_send(Message::Wake);
        }
    }

    /// Lets so many requests wait from now on, 1 to [`MAX_QUEUE`]; those that wait already stay.
    pub fn set_queue(&self, queue: usize) {
        assert!((1..=MAX_QUEUE).contains(&queue), "a queue of {queue} requests");
        self.shared.queue.store(queue, Ordering::Relaxed);
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

/// The events of one request, the last of them [`Event::Finished`] of its last answer or [`Event::Failed`]; then none.
/// Dropping it cancels the request.
pub struct TokenStream {
    events: events::Receiver<Event>,
    shared: Arc<Shared>,
    /// Why the channel closed without a last event.
    failure: Arc<OnceLock<EngineError>>,
    /// By answer: whether its reader has enough of it.
    stopped: Arc<[AtomicBool]>,
    /// By answer: whether it is to come to an end.
    unfinished: Vec<bool>,
}

impl TokenStream {
    /// The next event; not for use inside an async runtime, where this is a [`futures::Stream`].
    pub fn blocking_next(&mut self) -> Option<Event> {
        while self.is_open() {
            let event = self.events.blocking_recv();
            if let Some(event) = self.deliver(event) {
                return Some(event);
            }
        }
        None
    }

    /// Ends one of the answers before its next step; no event of it comes any more.
    pub fn stop(&mut self, choice: usize) {
        self.unfinished[choice] = false;
        self.stopped[choice].store(true, Ordering::Release);
    }

    fn is_open(&self) -> bool {
        self.unfinished.contains(&true)
    }

    /// None for what a stopped answer had on the way. A channel that closed before a last event belonged to a reader that was too slow, or to an engine that ended.
    fn deliver(&mut self, event: Option<Event>) -> Option<Event> {
        let why = || self.failure.get().cloned().unwrap_or_else(|| self.shared.why_ended());
        let event = event.unwrap_or_else(|| Event::Failed(why()));
        if event.choice().is_some_and(|choice| !self.unfinished[choice]) {
            return None;
        }
        match event {
            Event::Prompt { .. } | Event::Pooled { .. } | Event::Token { .. } => {}
            Event::Finished { choice, .. } => self.unfinished[choice] = false,
            Event::Failed(_) => self.unfinished.fill(false),
        }
        Some(event)
    }
}

impl futures::Stream for TokenStream {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        while self.is_open() {
            let event = ready!(self.events.poll_recv(cx));
            if let Some(event) = self.deliver(event) {
                return Poll::Ready(Some(event));
            }
        }
        Poll::Ready(None)
    }
}

struct Submitted {
    sequence: Sequence,
    answers: Vec<Answer>,
}

enum Message {
    Submit(Box<Submitted>),
    /// Look at the flags.
    Wake,
}

/// What the handles and the engine thread share; on the path of a step is one lock that nobody holds for long.
struct Shared {
    limits: Limits,
    /// Requests that may wait.
    queue: AtomicUsize,
    waiting: AtomicUsize,
    stats: Mutex<Stats>,
    signs: Mutex<Signs>,
    /// A probe was asked for, and not yet begun.
    probe: AtomicBool,
    next_id: AtomicU64,
    draining: AtomicBool,
    aborted: AtomicBool,
    /// Why the engine ends, unless it was asked to.
    cause: OnceLock<EngineError>,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Shared {
    fn begins(&self, work: Work) {
        self.signs.lock().expect("nothing panics under this lock").work = Some((work, Instant::now()));
    }

    fn begins_nothing(&self) {
        self.signs.lock().expect("nothing panics under this lock").work = None;
    }

    fn finished(&self) {
        let signs = Signs { last: Some(Instant::now()), work: None };
        *self.signs.lock().expect("nothing panics under this lock") = signs;
    }

    /// The first cause stays; it is what health and every later refusal name.
    fn end_for(&self, cause: EngineError) {
        let _ = self.cause.set(cause);
    }

    fn why_ended(&self) -> EngineError {
        self.cause.get().cloned().unwrap_or(EngineError::ShuttingDown)
    }
}

/// A place in the queue, free again when dropped.
struct Permit(Arc<Shared>);

impl Permit {
    /// Half of the queue is for interactive requests alone.
    fn take(shared: &Arc<Shared>, priority: Priority) -> Result<Self, SubmitError> {
        let queue = shared.queue.load(Ordering::Relaxed);
        let places = match priority {
            Priority::Interactive => queue,
            Priority::Background => queue.div_ceil(2),
        };
        let more = |n| (n < places).then_some(n + 1);
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

/// Who asked, as the engine thread knows them: one for each answer.
struct Answer {
    choice: usize,
    events: events::Sender<Event>,
    /// As [`TokenStream::stop`] has it.
    stopped: Arc<[AtomicBool]>,
    failure: Arc<OnceLock<EngineError>>,
    /// Held by the first answer while the request waits.
    permit: Option<Permit>,
    clock: Clock,
}

impl Answer {
    /// False where the reader is too far behind to be told.
    #[must_use]
    fn send(&self, event: Event) -> bool {
        match self.events.try_send(event) {
            // A reader that left: the request is removed before the next step.
            Ok(()) | Err(events::error::TrySendError::Closed(_)) => true,
            Err(events::error::TrySendError::Full(_)) => false,
        }
    }

    /// The last event, where there is still room for one; else the reader finds it behind the others.
    fn fail(self, error: EngineError) {
        let _ = self.failure.set(error.clone());
        let _ = self.send(Event::Failed(error));
    }
}

/// When the stages of a request began.
struct Clock {
    submitted: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
    prompt_n: usize,
    cached_n: usize,
    drafts: Drafts,
    predicted_n: usize,
}

impl Clock {
    fn new(prompt_n: usize) -> Self {
        Self {
            submitted: Instant::now(),
            started: None,
            first: None,
            prompt_n,
            cached_n: 0,
            drafts: Drafts::default(),
            predicted_n: 0,
        }
    }

    /// Notes that so many ids were sampled, and says where the time went.
    fn tick(&mut self, ids: usize) -> Timings {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let first = *self.first.get_or_insert(now);
        self.predicted_n += ids;
        Timings {
            queue: started - self.submitted,
            prefill: first - started,
            decode: now - first,
            prompt_n: self.prompt_n,
            cached_n: self.cached_n,
            predicted_n: self.predicted_n,
            drafts: self.drafts,
        }
    }
}

/// A step on the device.
struct InFlight {
    ticket: Ticket,
    step: Step,
    submitted: Instant,
}

/// The engine thread's state.
struct StepLoop {
    runner: Box<dyn Runner>,
    scheduler: Scheduler,
    pace: Pace,
    /// Oldest first.
    in_flight: VecDeque<InFlight>,
    /// When the last step ended: the next one had the device from then on.
    last_done: Instant,
    answers: HashMap<SequenceId, Answer>,
    messages: Receiver<Message>,
    shared: Arc<Shared>,
    stats: Stats,
}

impl StepLoop {
    /// Returns when it is to end.
    fn run(&mut self) {
        loop {
            if !self.drain_inbox() {
                return;
            }
            let began = Instant::now();
            self.remove_ended();
            let waited = match self.step() {
                Ok(waited) => waited,
                Err(error) => return self.lose(&error),
            };
            self.stats.host_ns += (began.elapsed() - waited).as_nanos() as u64;
            self.publish();
        }
    }

    fn lose(&self, error: &RunnerError) {
        tracing::error!("{error}: the engine stops");
        self.shared.end_for(EngineError::Lost(error.to_string()));
    }

    fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_empty()
    }

    /// Takes in what arrived, waiting for it where there is nothing else to do; false where the engine is to end.
    fn drain_inbox(&mut self) -> bool {
        loop {
            let draining = self.shared.draining.load(Ordering::Acquire);
            if self.shared.aborted.load(Ordering::Acquire) {
                return false;
            }
            let message = if self.is_idle() && !draining {
                if self.shared.probe.swap(false, Ordering::AcqRel) {
                    self.shared.begins(Work::Probe);
                    if let Err(error) = self.runner.probe() {
                        self.lose(&error);
                        return false;
                    }
                    self.shared.finished();
                }
                match self.messages.recv() {
                    Ok(message) => message,
                    Err(_) => return false, // no handle is left, and no work
                }
            } else {
                match self.messages.try_recv() {
                    Ok(message) => message,
                    Err(_) => return !self.is_idle(),
                }
            };
            if let Message::Submit(submitted) = message {
                let Submitted { sequence, answers } = *submitted;
                self.answers.extend((sequence.id..).zip(answers));
                self.scheduler.add(sequence);
            }
        }
    }

    /// Removes those whose reader left or has enough.
    fn remove_ended(&mut self) {
        let left = |answer: &Answer| {
            answer.events.is_closed() || answer.stopped[answer.choice].load(Ordering::Acquire)
        };
        let ids: Vec<SequenceId> = self.answers.iter().filter(|(_, a)| left(a)).map(|(id, _)| *id).collect();
        for id in ids {
            let answer = self.remove(id);
            tracing::debug!(generated = answer.clock.predicted_n, "cancelled: its reader left");
        }
    }

    fn remove(&mut self, id: SequenceId) -> Answer {
        self.scheduler.remove(id);
        self.answers.remove(&id).expect("every sequence has an answer")
    }

    /// Submits what can be, waits for the oldest step, and takes in what it drew. Returns how long it waited.
    fn step(&mut self) -> Result<Duration, RunnerError> {
        let mut drafting = Duration::ZERO;
        self.shared.begins(Work::Step);
        while self.in_flight.len() < self.shared.limits.max_in_flight {
            match draft(&mut self.scheduler, &mut *self.runner, self.in_flight.len())? {
                Some(took) => drafting += took,
                None => break,
            }
            let Some(step) = self.scheduler.schedule(&self.pace) else { break };
            for share in &step.shares {
                let answer = self.answers.get_mut(&share.id).expect("a scheduled sequence has an answer");
                answer.permit = None;
                answer.clock.started.get_or_insert_with(Instant::now);
            }
            let ticket = self.runner.submit(&step.batch, &step.sampling)?;
            self.stats.steps += 1;
            self.stats.step_tokens += step.load.tokens as u64;
            self.stats.step_shares += step.shares.len() as u64;
            self.in_flight.push_back(InFlight { ticket, step, submitted: Instant::now() });
            self.publish();
        }
        let Some(InFlight { ticket, step, submitted }) = self.in_flight.pop_front() else {
            self.scheduler.expect_idle();
            self.shared.begins_nothing();
            return Ok(drafting);
        };
        let before = Instant::now();
        let sampled = self.runner.wait(ticket)?;
        self.shared.finished();
        let done = Instant::now();
        self.pace.observe(step.load, done - submitted.max(self.last_done));
        self.last_done = done;
        for output in self.scheduler.commit(&step, &sampled) {
            self.tell(output);
        }
        Ok(done - before + drafting)
    }

    /// Hands on what a step yielded for one sequence.
    fn tell(&mut self, output: Output) {
        let Output { id: sequence, token, mut logprobs, prompt, pooled, end, cached_tokens, drafts } = output;
        // Of several ids in one step, the first may have found its reader too far behind.
        let Some(answer) = self.answers.get_mut(&sequence) else { return };
        answer.clock.drafts = drafts;
        answer.clock.cached_n = cached_tokens;
        let (choice, timings) = (answer.choice, answer.clock.tick(usize::from(pooled.is_none())));
        let mut told = prompt.is_none_or(|logprobs| answer.send(Event::Prompt { logprobs }));
        told &= pooled.is_none_or(|state| answer.send(Event::Pooled { state }));
        if let Some(id) = token {
            told &= answer.send(Event::Token { choice, id, logprobs: logprobs.take(), timings });
        }
        let finished = match end {
            Some(End::NotFinite) => {
                let answer = self.answers.remove(&sequence).expect("just seen");
                answer.fail(EngineError::NotFinite);
                return;
            }
            Some(End::Stopped(id)) => Some((FinishReason::Stop, logprobs.map(|found| (id, found)))),
            Some(End::Full) => Some((FinishReason::Length, None)),
            None => None,
        };
        if let Some((reason, stop)) = finished {
            told &= answer.send(Event::Finished { choice, reason, stop, timings });
            if told {
                self.answers.remove(&sequence);
                return;
            }
        }
        if !told {
            self.remove(sequence).fail(EngineError::SlowReader);
        }
    }

    /// Fails all that run or wait, those still in the inbox too. The runner goes last: its destructor may take long, or
    /// never end where the device hangs, and no client is to wait for it.
    fn end(mut self) {
        self.shared.draining.store(true, Ordering::Release);
        let error = self.shared.why_ended();
        for (id, answer) in self.answers.drain() {
            answer.fail(error.clone());
            // One that panicked may be amid a change.
            if !matches!(error, EngineError::Bug(_)) {
                self.scheduler.remove(id);
            }
        }
        while let Ok(message) = self.messages.try_recv() {
            if let Message::Submit(submitted) = message {
                submitted.answers.into_iter().for_each(|answer| answer.fail(error.clone()));
            }
        }
        self.publish();
        let Self { runner, messages, .. } = self;
        // What arrived since then is failed by this, and what arrives later refused, in the same words.
        drop(messages);
        drop(runner);
    }

    fn publish(&self) {
        let stats = Stats {
            running: self.scheduler.num_running(),
            full: self.scheduler.usage(BlockPool::Full),
            sliding: self.scheduler.usage(BlockPool::Sliding),
            preemptions: self.scheduler.preemptions(),
            guesses: self.scheduler.guesses(),
            ..self.stats
        };
        *self.shared.stats.lock().expect("nothing panics under this lock") = stats;
    }
}

/// Lets the runner's draft model guess before the next step is scheduled, with `in_flight` steps under way: how long that
/// took, or none where these are to be committed first.
pub fn draft(
    scheduler: &mut Scheduler,
    runner: &mut dyn Runner,
    in_flight: usize,
) -> Result<Option<Duration>, RunnerError> {
    if !scheduler.wants_draft() {
        return Ok(Some(Duration::ZERO));
    }
    if in_flight > 0 {
        return Ok(None);
    }
    let (ids, requests): (Vec<_>, Vec<_>) = scheduler.wishes().into_iter().unzip();
    if requests.is_empty() {
        return Ok(Some(Duration::ZERO));
    }
    let before = Instant::now();
    let guesses = runner.draft(&requests)?;
    let took = before.elapsed();
    assert_eq!(guesses.len(), ids.len(), "the runner guessed for others than asked");
    scheduler.offer(ids.into_iter().zip(guesses), took);
    Ok(Some(took))
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
