//! The engine's thread: it takes in requests, submits step after step to the runner, and sends the events that follow.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::answer::{Answer, Event, FinishReason};
use super::error::EngineError;
use super::pace::Pace;
use super::scheduler::{Output, Scheduler, SchedulerConfig, Step};
use super::sequence::{Sequence, SequenceId};
use super::shared::{Shared, Stats, Work};
use crate::model::{BlockPool, Runner, RunnerError, Ticket};

pub(super) struct Submitted {
    pub(super) sequence: Sequence,
    pub(super) answers: Vec<Answer>,
}

pub(super) enum Message {
    Submit(Box<Submitted>),
    /// Makes the thread look at the flags of [`Shared`].
    Wake,
}

/// A step on the device.
struct InFlight {
    ticket: Ticket,
    step: Step,
    submitted: Instant,
}

/// The engine thread's state.
pub(super) struct StepLoop {
    runner: Box<dyn Runner>,
    scheduler: Scheduler,
    pace: Pace,
    /// The steps in flight, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// The time at which the last step ended. The next step had the device from then on.
    last_done: Instant,
    answers: HashMap<SequenceId, Answer>,
    messages: Receiver<Message>,
    pub(super) shared: Arc<Shared>,
    stats: Stats,
}

impl StepLoop {
    pub(super) fn new(
        runner: Box<dyn Runner>,
        config: SchedulerConfig,
        messages: Receiver<Message>,
        shared: Arc<Shared>,
    ) -> Self {
        let new = Self {
            scheduler: Scheduler::new(runner.limits(), config),
            runner,
            pace: Pace::new(),
            in_flight: VecDeque::new(),
            last_done: Instant::now(),
            answers: HashMap::new(),
            messages,
            shared,
            stats: Stats::default(),
        };
        new.publish();
        new
    }

    /// Runs until the engine is to end.
    pub(super) fn run(&mut self) {
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

    /// Takes in the messages that arrived, and waits for one if there is nothing else to do. False if the engine is to
    /// end.
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

    /// Removes the answers whose reader left or stopped them.
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

    /// Submits as many steps as may be in flight, waits for the oldest one, and commits it. Returns how long it waited.
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
            let ticket = step.submit(&mut *self.runner)?;
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

    /// Sends the events of one output.
    fn tell(&mut self, output: Output) {
        let Output { id: sequence, token, mut logprobs, prompt, pooled, end, cached_tokens, drafts } = output;
        // A step may yield several ids, and the answer may have been removed at the first of them, because its reader
        // was too far behind.
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
            Some(Err(error)) => {
                let answer = self.answers.remove(&sequence).expect("just seen");
                answer.fail(error);
                return;
            }
            Some(Ok(reason)) => Some(reason),
            None => None,
        };
        if let Some(reason) = finished {
            let stop = match reason {
                FinishReason::Stop(id) => logprobs.map(|logprobs| (id, logprobs)),
                FinishReason::Length => None,
            };
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

    /// Fails all requests that run, wait, or are in the inbox. The runner is dropped last: its destructor may take
    /// long, or never end if the device hangs, and no client is to wait for it.
    pub(super) fn end(mut self) {
        self.shared.draining.store(true, Ordering::Release);
        let error = self.shared.why_ended();
        for (id, answer) in self.answers.drain() {
            answer.fail(error.clone());
            // After a panic the scheduler may be in the middle of a change.
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
        // Dropping the inbox fails the requests that arrived since then, and refuses later ones, with the same error.
        drop(messages);
        drop(runner);
    }

    fn publish(&self) {
        let stats = Stats {
            running: self.scheduler.num_running(),
            full: self.scheduler.usage(BlockPool::Full),
            sliding: self.scheduler.usage(BlockPool::Sliding),
            preemptions: self.scheduler.preemptions(),
            drafts: self.scheduler.drafts(),
            ..self.stats
        };
        *self.shared.stats.lock().expect("nothing panics under this lock") = stats;
    }
}

/// Has the runner's draft model draft tokens for the next step, before that step is scheduled and with `in_flight`
/// steps under way. Returns the time that drafting took. `None` if the steps in flight must be committed first.
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
    let (ids, requests): (Vec<_>, Vec<_>) = scheduler.draft_requests().into_iter().unzip();
    if requests.is_empty() {
        return Ok(Some(Duration::ZERO));
    }
    let before = Instant::now();
    let draft_tokens = runner.draft(&requests)?;
    let took = before.elapsed();
    assert_eq!(draft_tokens.len(), ids.len(), "the runner drafted for others than asked");
    scheduler.take_draft_tokens(ids.into_iter().zip(draft_tokens), took);
    Ok(Some(took))
}

/// Tells [`EngineHandle::join`](super::EngineHandle::join) that the engine's thread has ended, after a panic too.
pub(super) struct EndGuard(pub(super) Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if let Ok(mut ended) = self.0.ended.lock() {
            *ended = true;
        }
        self.0.end.notify_all();
    }
}
