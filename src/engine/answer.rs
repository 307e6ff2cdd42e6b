//! The events that a client gets for its answers, and the sending side of their channel.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::mpsc as events;

use super::energy::Joules;
use super::error::EngineError;
use super::shared::Permit;
use super::speculation::Drafts;
use crate::model::Logprobs;

/// Why an answer is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model drew this stop id. The id counts as generated, but the client does not get it.
    Stop(u32),
    /// The answer has everything that was requested: `max_tokens` ids, or the mean of the prompt's hidden states.
    Length,
}

/// How an answer ended: complete, or with an error that concerns this answer only.
pub type Ended = Result<FinishReason, EngineError>;

/// Durations of a request's stages and its counts, up to the event that carries them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    /// Time from submission to the first step.
    pub queue: Duration,
    /// Time from the first step to the first id.
    pub prefill: Duration,
    /// Time from the first id to this one.
    pub decode: Duration,
    /// Number of tokens of the prompt.
    pub prompt_n: usize,
    /// Number of tokens of the prompt that the prefix cache had, so that they were not computed.
    pub cached_n: usize,
    /// Number of ids sampled until now, including a stop id.
    pub predicted_n: usize,
    /// How many of those ids belong to thoughts. What decodes the answer counts them; the engine leaves this at 0.
    pub thought_n: usize,
    /// How many of those ids came from the step that sampled the first one. Their time counts as prefill.
    pub first_n: usize,
    /// Number of later steps that sampled an id.
    pub decode_steps: usize,
    /// How many draft tokens were proposed for the answer, and how many were accepted.
    pub drafts: Drafts,
    /// The answer's share of the machine's energy. `None` if a part of it was not measured.
    pub energy: Option<Joules>,
}

/// Minimum number of steps after the first id before a rate is reported. Steps overlap, so the host may notice the end
/// of the first step only at the end of the next one. Then the measured time is one step too short. With 4 steps, the
/// rate is at most a third too high.
const MIN_STEPS_FOR_RATE: usize = 4;

impl Timings {
    /// Ids per second after the step that sampled the first one. `None` if there are too few steps for a rate.
    pub fn predicted_per_second(&self) -> Option<f64> {
        let ids = self.predicted_n.saturating_sub(self.first_n);
        (self.decode_steps >= MIN_STEPS_FOR_RATE).then(|| per_second(ids, self.decode)).flatten()
    }

    /// Computed tokens of the prompt per second. Tokens from the prefix cache do not count. `None` if none was
    /// computed.
    pub fn prompt_per_second(&self) -> Option<f64> {
        per_second(self.prompt_n - self.cached_n, self.prefill)
    }
}

fn per_second(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// An event of a request. `choice` is the index of an answer: 0, and one for each of
/// [`Request::more_seeds`](super::Request::more_seeds).
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Log probabilities of all ids of the prompt except the first. If they were requested, this is the first event.
    Prompt { logprobs: Vec<Logprobs> },
    /// The answer to a request with [`Request::pooling`](super::Request::pooling): the hidden states after the final
    /// norm, averaged over the prompt's tokens, `[hidden_size]`.
    Pooled { state: Vec<f32> },
    Token {
        choice: usize,
        id: u32,
        /// Set if log probabilities were requested.
        logprobs: Option<Logprobs>,
        timings: Timings,
    },
    /// The last event of an answer.
    Finished {
        choice: usize,
        reason: FinishReason,
        /// The stop id that ended the answer with its log probabilities, if these were requested. The stop id is not
        /// part of the answer.
        stop: Option<(u32, Logprobs)>,
        timings: Timings,
    },
    /// The last event of a request that ended before all its answers were complete.
    Failed(EngineError),
}

impl Event {
    /// The index of the answer that the event belongs to. `None` if it belongs to all answers of the request.
    pub fn choice(&self) -> Option<usize> {
        match self {
            Event::Token { choice, .. } | Event::Finished { choice, .. } => Some(*choice),
            Event::Prompt { .. } | Event::Pooled { .. } | Event::Failed(_) => None,
        }
    }
}

/// One answer, as the engine thread knows it.
pub(super) struct Answer {
    pub(super) choice: usize,
    pub(super) events: events::Sender<Event>,
    /// Whether the reader stopped each answer with [`TokenStream::stop`](super::TokenStream::stop).
    pub(super) stopped: Arc<[AtomicBool]>,
    pub(super) failure: Arc<OnceLock<EngineError>>,
    /// The request's place in the queue. The first answer has it while the request waits.
    pub(super) permit: Option<Permit>,
    pub(super) clock: Clock,
}

impl Answer {
    /// Sends an event. Returns false if the channel is full, because the reader is too slow.
    #[must_use]
    pub(super) fn send(&self, event: Event) -> bool {
        match self.events.try_send(event) {
            // A closed channel means that the client left. The step loop removes the request before the next step.
            Ok(()) | Err(events::error::TrySendError::Closed(_)) => true,
            Err(events::error::TrySendError::Full(_)) => false,
        }
    }

    /// Ends the answer with an error. If the channel has no room for the event, the reader finds the error in `failure`
    /// once it has read the other events.
    pub(super) fn fail(mut self, error: EngineError) {
        // A client that gets the error must not find the request in the queue any longer.
        self.permit = None;
        let _ = self.failure.set(error.clone());
        let _ = self.send(Event::Failed(error));
    }
}

/// The times at which the stages of an answer began, and its counts until now.
pub(super) struct Clock {
    pub(super) submitted: Instant,
    pub(super) started: Option<Instant>,
    /// The ends of the first step that sampled an id, and of the last one.
    pub(super) sampled: Option<(Instant, Instant)>,
    pub(super) prompt_n: usize,
    pub(super) cached_n: usize,
    pub(super) drafts: Drafts,
    pub(super) predicted_n: usize,
    pub(super) first_n: usize,
    pub(super) decode_steps: usize,
    pub(super) energy: Option<Joules>,
}

impl Clock {
    pub(super) fn new(prompt_n: usize) -> Self {
        Self {
            submitted: Instant::now(),
            started: None,
            sampled: None,
            prompt_n,
            cached_n: 0,
            drafts: Drafts::default(),
            predicted_n: 0,
            first_n: 0,
            decode_steps: 0,
            energy: None,
        }
    }

    /// Records that the answer's first step begins. `energy` returns the initial energy: zero, or `None` if the energy
    /// is not measured.
    pub(super) fn start(&mut self, energy: impl FnOnce() -> Option<Joules>) {
        if self.started.is_none() {
            self.started = Some(Instant::now());
            self.energy = energy();
        }
    }

    /// Adds the energy of a step. Unknown energy makes the sum unknown.
    pub(super) fn charge(&mut self, joules: Option<f64>) {
        let is_prompt = self.sampled.is_none();
        self.energy = self.energy.zip(joules).map(|(mut energy, joules)| {
            *(if is_prompt { &mut energy.prompt } else { &mut energy.predicted }) += joules;
            energy
        });
    }

    /// Counts `ids` ids as sampled by the step that ended at `at`, and returns the timings until then. A step may
    /// sample several ids; all of them get the time of the step's end.
    pub(super) fn tick(&mut self, ids: usize, at: Instant) -> Timings {
        let started = self.started.unwrap_or(at);
        let (first, last) = self.sampled.unwrap_or((at, at));
        self.sampled = Some((first, at));
        self.predicted_n += ids;
        if at == first {
            self.first_n += ids;
        }
        self.decode_steps += usize::from(at != last);
        Timings {
            queue: started - self.submitted,
            prefill: first - started,
            decode: at - first,
            prompt_n: self.prompt_n,
            cached_n: self.cached_n,
            predicted_n: self.predicted_n,
            thought_n: 0,
            first_n: self.first_n,
            decode_steps: self.decode_steps,
            drafts: self.drafts,
            energy: self.energy,
        }
    }
}
