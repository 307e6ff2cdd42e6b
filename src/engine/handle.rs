//! The handle with which the rest of the program starts the engine, submits requests to it, and ends it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc as events;

use super::answer::{Answer, Clock, Event};
use super::disk::DiskConfig;
use super::energy::EnergyCounter;
use super::error::{EngineError, SubmitError};
use super::lease::Lease;
use super::request::{EVENTS, KeepAlive, MAX_QUEUE, PromptImage, Request};
use super::scheduler::SchedulerConfig;
use super::sequence::Sequence;
use super::shared::{EngineState, Permit, Shared, Signs, Stats, Unload};
use super::step_loop::{EndGuard, Message, StepLoop, Submitted};
use super::supervised::SupervisedRunner;
use crate::config::Courtesy;
use crate::model::{Limits, MAX_BIASES, MAX_LOGPROBS, Runner, RunnerFactory, SamplingParams};

#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Maximum number of waiting requests: 1 to [`MAX_QUEUE`]. Running requests do not count.
    pub queue: usize,
    pub scheduler: SchedulerConfig,
    /// How long the engine must be idle before it unloads the model. `None` = never. Needs a [`RunnerFactory`].
    pub idle_unload: Option<Duration>,
    /// Measures the energy that answers report.
    pub energy: Option<Arc<dyn EnergyCounter>>,
    /// Shared with the other engines of the device. `None` = there are none.
    pub lease: Option<Arc<Lease>>,
    /// Where conversations are kept. `None` = only in device memory.
    pub disk: Option<DiskConfig>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            queue: 256,
            scheduler: SchedulerConfig::default(),
            idle_unload: None,
            energy: None,
            lease: None,
            disk: None,
        }
    }
}

pub struct Engine;

impl Engine {
    /// Starts the engine thread, which owns the runner until it ends. The thread ends once every handle is dropped and
    /// all work is done, after [`EngineHandle::drain`] or [`EngineHandle::abort`], or when the device fails.
    pub fn start(runner: Box<dyn Runner>, config: EngineConfig) -> EngineHandle {
        Self::start_with(runner, None, Arc::default(), config)
    }

    /// Starts an engine that gets another runner from the factory when the device is lost. `cancelled` is the flag with
    /// which the runner was started; [`EngineHandle::abort`] sets it.
    pub fn start_recoverable(
        runner: Box<dyn Runner>,
        factory: Box<dyn RunnerFactory>,
        cancelled: Arc<AtomicBool>,
        config: EngineConfig,
    ) -> EngineHandle {
        Self::start_with(runner, Some(factory), cancelled, config)
    }

    fn start_with(
        runner: Box<dyn Runner>,
        factory: Option<Box<dyn RunnerFactory>>,
        aborted: Arc<AtomicBool>,
        config: EngineConfig,
    ) -> EngineHandle {
        assert!((1..=MAX_QUEUE).contains(&config.queue), "a queue of {} requests", config.queue);
        let limits = runner.limits().clone();
        // One place more than the longest queue, so that the wake-up of `drain` and `abort` always fits.
        let (inbox, messages) = sync_channel(MAX_QUEUE + 1);
        let shared = Arc::new(Shared::new(limits, config.queue, aborted));
        let runner = SupervisedRunner::new(runner, factory, config.idle_unload);
        let mut engine = StepLoop::new(
            runner,
            config.scheduler,
            config.energy,
            config.lease,
            config.disk,
            messages,
            Arc::clone(&shared),
        );
        let handle = EngineHandle { inbox, shared: Arc::clone(&shared) };
        let spawned = thread::Builder::new().name("engine".into()).spawn(move || {
            // The guard must be dropped after the runner. Otherwise `join` would return while the runner's destructor
            // still runs.
            let _end = EndGuard(shared);
            // The panic hook has logged the message and the source location.
            if catch_unwind(AssertUnwindSafe(|| engine.run())).is_err() {
                engine.shared.end_for(EngineError::Bug("internal error in the engine (see the log)".into()));
                tracing::error!("internal error: the engine thread panicked, and the engine ends");
            }
            engine.end();
        });
        if let Err(error) = spawned {
            let why = format!(
                "cannot start the engine's thread: {error}; the system is short of memory or of threads"
            );
            handle.shared.end_for(EngineError::Lost(why));
            drop(EndGuard(Arc::clone(&handle.shared)));
        }
        handle
    }
}

/// A handle of the engine. It is cheap to clone. Every method may be called from any thread. Only
/// [`EngineHandle::join`] blocks.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: SyncSender<Message>,
    shared: Arc<Shared>,
}

impl EngineHandle {
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// Puts a request on the queue, or returns the reason why it is refused.
    pub fn submit(&self, request: Request) -> Result<TokenStream, SubmitError> {
        self.health()?;
        let max_tokens = self.admissible(&request)?;
        let permit = Permit::take(&self.shared, request.priority)?;

        let choices = 1 + request.more_seeds.len();
        let (sender, receiver) = events::channel(EVENTS * choices);
        let id = self.shared.next_id.fetch_add(choices as u64, Ordering::Relaxed);
        let prompt_n = request.prompt.len();
        // Drops stop ids outside the vocabulary: the model can never draw them.
        let sampling = request.sampling.within(self.shared.limits.vocab_size);
        let sequence = Sequence::new(id, Request { sampling, ..request }, max_tokens);
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
        self.send(Message::Submit(Box::new(submitted)))?;
        Ok(TokenStream {
            events: receiver,
            shared: Arc::clone(&self.shared),
            failure,
            stopped,
            unfinished: vec![true; choices],
        })
    }

    /// The number of ids that `request` may generate, or the reason why it is refused.
    fn admissible(&self, request: &Request) -> Result<usize, SubmitError> {
        let Limits { max_context: context, vocab_size, .. } = self.shared.limits;
        assert!(!request.pooling || request.more_seeds.is_empty(), "a pooled request has exactly one answer");
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
        let SamplingParams { logit_bias, stop_token_ids, logprobs, .. } = &*request.sampling;
        let biased = logit_bias.iter().map(|(id, _)| id);
        let mut ids = request.prompt.iter().chain(biased).copied();
        if let Some(id) = ids.find(|id| *id as usize >= vocab_size) {
            return Err(SubmitError::TokenOutOfRange { id, vocab_size });
        }
        self.check_images(request)?;
        let n = logit_bias.len() + stop_token_ids.len();
        if n > MAX_BIASES {
            return Err(SubmitError::TooManyBiases { n });
        }
        let logprobs = (*logprobs).max(request.prompt_logprobs);
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

    /// Refuses images that cannot be computed. Panics if they do not have the model's form, which is the caller's work.
    fn check_images(&self, request: &Request) -> Result<(), SubmitError> {
        let Request { prompt, images, .. } = request;
        if images.is_empty() {
            return Ok(());
        }
        let Some(limits) = self.shared.limits.images else { return Err(SubmitError::NoImages) };
        if request.pooling {
            return Err(SubmitError::ImagesPooled);
        }
        if request.prompt_logprobs.is_some() {
            return Err(SubmitError::ImagesScored);
        }
        let mut free = 0;
        for PromptImage { positions, size, pixels, .. } in images {
            assert!(
                free <= positions.start && positions.end <= prompt.len(),
                "images overlap, are not in order, or exceed the {} tokens of the prompt: {images:?}",
                prompt.len()
            );
            assert_eq!(
                Some(positions.len()),
                limits.tokens_of(*size),
                "tokens of an image of {size:?} pixels"
            );
            assert_eq!(pixels.len(), 3 * size[0] * size[1], "bytes of an image's pixels");
            free = positions.end;
        }
        Ok(())
    }

    /// `Ok` while the engine accepts requests.
    pub fn health(&self) -> Result<(), EngineError> {
        let shared = &self.shared;
        let ending = shared.draining.load(Ordering::Acquire) || shared.cause.get().is_some();
        if ending { Err(shared.why_ended()) } else { Ok(()) }
    }

    /// The error that ended the engine: [`EngineError::Lost`] or [`EngineError::Bug`]. `None` while the engine runs,
    /// and if it ended because of [`EngineHandle::drain`] or [`EngineHandle::abort`]. The error is set before the first
    /// answer fails with it, and never changes. The runner may exist for a long time after that; [`EngineHandle::join`]
    /// waits for it.
    pub fn ended(&self) -> Option<EngineError> {
        self.shared.cause.get().cloned()
    }

    pub fn state(&self) -> EngineState {
        match self.ended() {
            Some(_) => EngineState::Lost,
            None => *self.shared.state.lock().expect("nothing panics under this lock"),
        }
    }

    pub fn stats(&self) -> Stats {
        // `waiting` is read first: a request is counted as running before it is no longer counted as waiting. So it is
        // never missing in both counts.
        let waiting = self.shared.waiting.load(Ordering::Acquire);
        let stats = *self.shared.stats.lock().expect("nothing panics under this lock");
        Stats { waiting, ..stats }
    }

    pub fn signs(&self) -> Signs {
        *self.shared.signs.lock().expect("nothing panics under this lock")
    }

    /// Makes the device run a tiny dispatch as soon as the engine is idle. [`EngineHandle::signs`] shows the result. If
    /// the probe fails, the device counts as lost.
    pub fn probe(&self) {
        // Only the first call sends a message, because the places of the inbox are for requests.
        if !self.shared.probe.swap(true, Ordering::AcqRel) {
            let _ = self.inbox.try_send(Message::Wake);
        }
    }

    /// Changes the length of the queue, 1 to [`MAX_QUEUE`]. Requests that already wait stay in the queue.
    pub fn set_queue(&self, queue: usize) {
        assert!((1..=MAX_QUEUE).contains(&queue), "a queue of {queue} requests");
        self.shared.queue.store(queue, Ordering::Relaxed);
    }

    /// Loads the model if it is unloaded, and keeps it for `keep_alive` if no request follows. A message arrives when
    /// the model is loaded; the channel closes without one if the engine ends before that.
    pub fn load(&self, keep_alive: KeepAlive) -> Result<events::Receiver<()>, SubmitError> {
        let (loaded, result) = events::channel(1);
        self.send(Message::Load(keep_alive, loaded)).map(|()| result)
    }

    /// Unloads the model as soon as the engine is idle, if the engine can load it again. The next request does that.
    pub fn unload(&self) -> Result<(), SubmitError> {
        self.health()?;
        // Only the first call sends a message, because the places of the inbox are for requests.
        if !self.shared.unload_now.swap(true, Ordering::AcqRel) {
            let _ = self.inbox.try_send(Message::Wake);
        }
        Ok(())
    }

    /// How long the model stays loaded if no request arrives. `None` = it is not unloaded.
    pub fn kept_for(&self) -> Option<Duration> {
        match *self.shared.unload.lock().expect("nothing panics under this lock") {
            Unload::Never => None,
            Unload::After(time) => Some(time),
            Unload::At(time) => Some(time.saturating_duration_since(Instant::now())),
        }
    }

    fn send(&self, message: Message) -> Result<(), SubmitError> {
        self.health()?;
        self.inbox.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => SubmitError::QueueFull { waiting: MAX_QUEUE },
            TrySendError::Disconnected(_) => self.shared.why_ended().into(),
        })
    }

    /// Limits the share of the device's time that steps take, from the next step on. Steps then take proportionally
    /// longer and do not overlap: the device must be idle between them anyway.
    pub fn set_courtesy(&self, courtesy: Courtesy) {
        *self.shared.courtesy.lock().expect("nothing panics under this lock") = courtesy;
    }

    pub fn courtesy(&self) -> Courtesy {
        self.shared.courtesy()
    }

    /// Refuses new requests. The engine ends when all accepted requests are answered.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
        // If the inbox is full, the engine does not sleep.
        let _ = self.inbox.try_send(Message::Wake);
    }

    /// Refuses new requests, and fails all other requests before the next step.
    pub fn abort(&self) {
        self.shared.aborted.store(true, Ordering::Release);
        self.drain();
    }

    /// Waits until the engine has ended and its runner is dropped. Returns false after `timeout`.
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

/// The events of one request. The last event is [`Event::Finished`] of the last unfinished answer, or
/// [`Event::Failed`]. Dropping the stream cancels the request.
pub struct TokenStream {
    events: events::Receiver<Event>,
    shared: Arc<Shared>,
    /// The error of a request whose channel had no room for the last event.
    failure: Arc<OnceLock<EngineError>>,
    /// For each answer, whether [`TokenStream::stop`] was called.
    stopped: Arc<[AtomicBool]>,
    /// For each answer, whether its last event has not arrived yet.
    unfinished: Vec<bool>,
}

impl TokenStream {
    /// Waits for the next event. Async code must use the [`futures::Stream`] instead.
    pub fn blocking_next(&mut self) -> Option<Event> {
        while self.is_open() {
            let event = self.events.blocking_recv();
            if let Some(event) = self.deliver(event) {
                return Some(event);
            }
        }
        None
    }

    /// Ends one of the answers before its next step. The stream has no further event of that answer.
    pub fn stop(&mut self, choice: usize) {
        self.unfinished[choice] = false;
        self.stopped[choice].store(true, Ordering::Release);
    }

    fn is_open(&self) -> bool {
        self.unfinished.contains(&true)
    }

    /// The event for the reader, or `None` if it belongs to an answer that was stopped. `event` is `None` if the
    /// channel closed before the last event: the reader was too slow, or the engine ended.
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
