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
    /// How many draft tokens were proposed for the answer, and how many were accepted.
    pub drafts: Drafts,
    /// The answer's share of the machine's energy; none if a part of it was not counted.
    pub energy: Option<Joules>,
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
    pub(super) first: Option<Instant>,
    pub(super) prompt_n: usize,
    pub(super) cached_n: usize,
    pub(super) drafts: Drafts,
    pub(super) predicted_n: usize,
    pub(super) energy: Option<Joules>,
}

impl Clock {
    pub(super) fn new(prompt_n: usize) -> Self {
        Self {
            submitted: Instant::now(),
            started: None,
            first: None,
            prompt_n,
            cached_n: 0,
            drafts: Drafts::default(),
            predicted_n: 0,
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
        let is_prompt = self.first.is_none();
        self.energy = self.energy.zip(joules).map(|(mut energy, joules)| {
            *(if is_prompt { &mut energy.prompt } else { &mut energy.predicted }) += joules;
            energy
        });
    }

    /// Counts `ids` as sampled, and returns the times so far.
    pub(super) fn tick(&mut self, ids: usize) -> Timings {
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
            energy: self.energy,
        }
    }
}
