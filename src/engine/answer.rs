//! The events that a client gets for its answers, and the engine's end of the channel that carries them.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::mpsc as events;

use super::energy::Joules;
use super::error::EngineError;
use super::shared::Permit;
use super::speculation::Drafts;
use crate::model::Logprobs;

/// The reason for which an answer is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model yielded this stop id. The id is counted, and not handed out.
    Stop(u32),
    /// The answer has all that was wanted: `max_tokens` ids, or the mean of a prompt's hidden states.
    Length,
}

/// How an answer ended: whole, or with an error that is this answer's alone.
pub type Ended = Result<FinishReason, EngineError>;

/// The times of a request's stages, up to the event that carries them.
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
    /// Number of tokens of the prompt that the prefix cache had.
    pub cached_n: usize,
    /// Number of ids sampled so far, a stop id included.
    pub predicted_n: usize,
    /// How many of those came from the step that sampled the first one: their time is that of the prompt.
    pub first_n: usize,
    /// Number of steps since then that sampled an id.
    pub decode_steps: usize,
    /// How many draft tokens were proposed for the answer, and how many were accepted.
    pub drafts: Drafts,
    /// The answer's share of the machine's energy; none if a part of it was not counted.
    pub energy: Option<Joules>,
}

/// The least steps after the first id over which a rate is told. The host may hear of a step as late as the end of the
/// next one, which the device computes meanwhile. So the time of these steps may be that of one step less, and their rate
/// a third too high at most.
const LEAST_RATED_STEPS: usize = 4;

impl Timings {
    /// Ids per second after the step that sampled the first one; none where there are too few steps to tell.
    pub fn predicted_per_second(&self) -> Option<f64> {
        let ids = self.predicted_n.saturating_sub(self.first_n);
        (self.decode_steps >= LEAST_RATED_STEPS).then(|| per_second(ids, self.decode)).flatten()
    }

    /// Tokens of the prompt per second, without those of the prefix cache; none where none was computed.
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
    /// Log probabilities of the prompt's ids but the first. If the request asked for them, this event comes before all
    /// others.
    Prompt { logprobs: Vec<Logprobs> },
    /// The answer to a request with [`Request::pooling`](super::Request::pooling): the mean over its tokens of the
    /// hidden states behind the final norm, `[hidden_size]`.
    Pooled { state: Vec<f32> },
    Token {
        choice: usize,
        id: u32,
        /// Present if the request asked for log probabilities.
        logprobs: Option<Logprobs>,
        timings: Timings,
    },
    /// The last event of an answer.
    Finished {
        choice: usize,
        reason: FinishReason,
        /// The stop id that ended the answer and its log probabilities, if the request asked for those. The stop id is
        /// no token of the answer.
        stop: Option<(u32, Logprobs)>,
        timings: Timings,
    },
    /// The last event of a request that ended without all its answers.
    Failed(EngineError),
}

impl Event {
    /// The answer that the event belongs to; `None` if it belongs to all answers.
    pub fn choice(&self) -> Option<usize> {
        match self {
            Event::Token { choice, .. } | Event::Finished { choice, .. } => Some(*choice),
            Event::Prompt { .. } | Event::Pooled { .. } | Event::Failed(_) => None,
        }
    }
}

/// One answer's reader, as the engine thread knows it.
pub(super) struct Answer {
    pub(super) choice: usize,
    pub(super) events: events::Sender<Event>,
    /// Whether the reader stopped each answer with [`TokenStream::stop`](super::TokenStream::stop).
    pub(super) stopped: Arc<[AtomicBool]>,
    pub(super) failure: Arc<OnceLock<EngineError>>,
    /// The request's place in the queue, which the first answer holds while the request waits.
    pub(super) permit: Option<Permit>,
    pub(super) clock: Clock,
}

impl Answer {
    /// Sends an event; false if the channel is full, because the reader is too far behind.
    #[must_use]
    pub(super) fn send(&self, event: Event) -> bool {
        match self.events.try_send(event) {
            // A closed channel means that the reader left. The step loop removes the request before the next step.
            Ok(()) | Err(events::error::TrySendError::Closed(_)) => true,
            Err(events::error::TrySendError::Full(_)) => false,
        }
    }

    /// Ends the answer with an error. If the channel has no room for the event, the reader finds the error in `failure`
    /// once it has read the other events.
    pub(super) fn fail(mut self, error: EngineError) {
        // Whoever is told does not wait any longer.
        self.permit = None;
        let _ = self.failure.set(error.clone());
        let _ = self.send(Event::Failed(error));
    }
}

/// The times at which the stages of a request began, and what it has had so far.
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

    /// Notes that the answer's first step begins, with the energy that it has had: nothing, or none if nothing counts it.
    pub(super) fn start(&mut self, energy: impl FnOnce() -> Option<Joules>) {
        if self.started.is_none() {
            self.started = Some(Instant::now());
            self.energy = energy();
        }
    }

    /// Adds the energy of a step. Energy that is not known makes the sum unknown.
    pub(super) fn charge(&mut self, joules: Option<f64>) {
        let is_prompt = self.sampled.is_none();
        self.energy = self.energy.zip(joules).map(|(mut energy, joules)| {
            *(if is_prompt { &mut energy.prompt } else { &mut energy.predicted }) += joules;
            energy
        });
    }

    /// Counts `ids` as sampled by the step that ended `at`, and returns the times so far. A step may sample several ids:
    /// all of them have its time.
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
            first_n: self.first_n,
            decode_steps: self.decode_steps,
            drafts: self.drafts,
            energy: self.energy,
        }
    }
}
