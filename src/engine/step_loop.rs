//! The engine's thread: it takes in requests, submits step after step to the runner, and sends the events that follow.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::answer::{Answer, Event, FinishReason};
use super::energy::{EnergyCounter, Ledger};
use super::error::EngineError;
use super::pace::Pace;
use super::scheduler::{Output, Scheduler, SchedulerConfig, SequenceShare, Step};
use super::sequence::{Sequence, SequenceId};
use super::shared::{DeviceTask, EngineState, Shared, Stats};
use super::supervised::SupervisedRunner;
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

/// A failure of the device or of a unit beside it, and the sequences of the steps that the device had.
struct Failure {
    error: RunnerError,
    sequences: Vec<SequenceId>,
    /// The sequences whose prompt a unit failed at: nobody else has to do with the failure.
    at_unit: Vec<SequenceId>,
}

/// The engine thread's state.
pub(super) struct StepLoop {
    runner: SupervisedRunner,
    scheduler: Scheduler,
    pace: Pace,
    ledger: Ledger,
    /// The steps in flight, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// A step that is scheduled, and submitted when no other is in flight.
    held: Option<Step>,
    /// The time at which the last step ended. The next step had the device from then on.
    last_done: Instant,
    answers: HashMap<SequenceId, Answer>,
    messages: Receiver<Message>,
    pub(super) shared: Arc<Shared>,
    stats: Stats,
}

impl StepLoop {
    pub(super) fn new(
        runner: SupervisedRunner,
        config: SchedulerConfig,
        energy: Option<Arc<dyn EnergyCounter>>,
        messages: Receiver<Message>,
        shared: Arc<Shared>,
    ) -> Self {
        let config = SchedulerConfig { draft_model: runner.has_draft(), ..config };
        let new = Self {
            scheduler: Scheduler::new(runner.limits(), config),
            runner,
            pace: Pace::new(),
            ledger: Ledger::new(energy),
            in_flight: VecDeque::new(),
            held: None,
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
            self.remove_ended();
            if !self.runner.is_loaded() {
                if self.scheduler.is_idle() {
                    continue; // whoever asked has left
                }
                self.shared.enter(EngineState::Loading);
                tracing::info!("a request has come: the model is loaded again");
                if !self.load() {
                    return;
                }
            }
            let began = Instant::now();
            let waited = match self.step() {
                Ok(waited) => waited,
                Err(failure) if self.recover(&failure) => began.elapsed(),
                Err(_) => return,
            };
            self.stats.host_ns += (began.elapsed() - waited).as_nanos() as u64;
            self.publish();
        }
    }

    fn lose(&self, error: &RunnerError) {
        tracing::error!("{error}: the engine stops");
        self.shared.end_for(EngineError::Lost(error.to_string()));
    }

    /// Goes on with another runner, if there may be one. False if the engine is to end.
    fn recover(&mut self, Failure { error, sequences, at_unit }: &Failure) -> bool {
        if self.shared.aborted.load(Ordering::Acquire) {
            return false; // the wait was cut short
        }
        self.in_flight.clear();
        self.held = None;
        let is_units = matches!(error, RunnerError::Offload(_));
        self.stats.losses += u64::from(!is_units);
        self.stats.unit_failures += u64::from(is_units);
        let at_fault = match is_units {
            true => self.scheduler.restart_without(at_unit),
            false => self.scheduler.restart(sequences),
        };
        // Whoever is told of the failure finds it counted.
        self.publish();
        // The reader of the prompt that a unit failed at may have left: that prompt is explained, and gone.
        if !self.runner.may_recover(!at_fault.is_empty() || is_units && !sequences.is_empty()) {
            self.lose(error);
            return false;
        }
        let began = Instant::now();
        self.shared.enter(EngineState::Recovering);
        for id in at_fault {
            let answer = self.answers.remove(&id).expect("every sequence has an answer");
            answer.fail(match error {
                RunnerError::Offload(words) => EngineError::Offload(words.clone()),
                lost => EngineError::LostTwice(lost.to_string()),
            });
        }
        // A request that has failed gets no more of its other answers, which may have parted since.
        let has_failed = |answer: &Answer| answer.failure.get().is_some();
        let parted: Vec<_> = self.answers.iter().filter(|(_, a)| has_failed(a)).map(|(id, _)| *id).collect();
        for id in parted {
            self.remove(id);
        }
        let who = if is_units { "the NPU failed: " } else { "" };
        let how = if is_units { "" } else { ", those that were computed just now one by one" };
        tracing::error!(
            "{who}{error}: the model is loaded again, and then {} answers go on{how}",
            self.answers.len()
        );
        self.stats.replays += self.answers.len() as u64;
        self.publish();
        let is_back = self.load();
        self.stats.recovery_ns += began.elapsed().as_nanos() as u64;
        if is_back {
            let seconds = began.elapsed().as_secs_f64();
            match is_units {
                true => tracing::info!("the model is there again with its NPU, {seconds:.1} s later"),
                false => tracing::info!("the GPU computes again, {seconds:.1} s later"),
            }
        }
        is_back
    }

    /// Starts the runner. False if the engine is to end.
    fn load(&mut self) -> bool {
        self.shared.begins_nothing();
        self.ledger.end_span();
        match self.runner.start(&self.shared.aborted) {
            Ok(()) => {
                self.last_done = Instant::now();
                self.shared.enter(EngineState::Ready);
                self.shared.finished();
                true
            }
            Err(_) if self.shared.aborted.load(Ordering::Acquire) => false,
            Err(error) => {
                self.lose(&error);
                false
            }
        }
    }

    /// Gives the device's memory back until the next request.
    fn unload(&mut self) {
        tracing::info!("nobody asked for long: the model is unloaded until the next request");
        self.scheduler.restart(&[]);
        self.runner.unload();
        self.shared.begins_nothing();
        self.shared.enter(EngineState::Unloaded);
        self.publish();
    }

    fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_empty() && self.held.is_none()
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
                if self.shared.probe.swap(false, Ordering::AcqRel) && !self.probe() {
                    return false;
                }
                // Where a request is there already, the span of energy goes on.
                let message = self.messages.try_recv().or_else(|_| {
                    self.ledger.end_span();
                    match self.runner.idle_unload() {
                        None => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                        Some(most) => {
                            self.messages.recv_timeout(most.saturating_sub(self.last_done.elapsed()))
                        }
                    }
                });
                match message {
                    Ok(message) => message,
                    Err(RecvTimeoutError::Timeout) => {
                        self.unload();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return false, // no handle is left, and no work
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

    /// Has an idle device prove that it computes. False if the engine is to end.
    fn probe(&mut self) -> bool {
        if !self.runner.is_loaded() {
            return true;
        }
        self.shared.begins(DeviceTask::Probe);
        match self.runner.loaded().probe() {
            Ok(()) => {
                self.shared.finished();
                true
            }
            Err(error) => self.recover(&Failure { error, sequences: Vec::new(), at_unit: Vec::new() }),
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

    /// A failure of the device, with the step that failed, if one did, and those in flight.
    fn failure(&self, error: RunnerError, step: Option<&Step>) -> Failure {
        let steps = || self.in_flight.iter().map(|in_flight| &in_flight.step).chain(step);
        let sequences = self.scheduler.sequences_in(steps());
        // No more than one of the steps has a prompt that is shared.
        let shared =
            steps().filter(|_| matches!(error, RunnerError::Offload(_))).find_map(Step::shared_prompt);
        let at_unit = self.scheduler.sequences_of(shared);
        Failure { error, sequences, at_unit }
    }

    /// Submits as many steps as may be in flight, waits for the oldest one, and commits it. Returns how long it waited.
    fn step(&mut self) -> Result<Duration, Failure> {
        let mut drafting = Duration::ZERO;
        self.shared.begins(DeviceTask::Step);
        let courtesy = self.shared.courtesy();
        match self.runner.set_courtesy(courtesy) {
            Ok(false) => {}
            // Steps take longer or shorter from now on than what was learnt.
            Ok(true) => self.pace = Pace::new(),
            Err(error) => return Err(self.failure(error, None)),
        }
        // A second step's submits would wait for gaps while the first one's results lie there.
        let most = if courtesy.is_bound() { 1 } else { self.shared.limits.max_in_flight };
        self.ledger.begin_span();
        while self.in_flight.len() < most {
            let step = match self.held.take() {
                Some(step) => step,
                None => {
                    let Some((step, took)) = self.schedule()? else { break };
                    drafting += took;
                    step
                }
            };
            // The runner waits for the unit while such a step is submitted: a step that is in flight would be told as late
            // as all of that, with the time and the energy of both.
            let has_unit = self.runner.loaded().attention_path() != 0;
            if has_unit && !self.in_flight.is_empty() && step.shared_prompt().is_some() {
                self.held = Some(step);
                break;
            }
            // It is published that they run before they no longer wait: a reader finds them in one of the two.
            self.publish();
            for share in &step.shares {
                // Readers may have left while the step was held back.
                let Some(answer) = self.answers.get_mut(&share.id) else { continue };
                answer.permit = None;
                answer.clock.start(|| self.ledger.nothing_yet());
            }
            let ticket = match step.submit(self.runner.loaded()) {
                Ok(ticket) => ticket,
                Err(error) => return Err(self.failure(error, Some(&step))),
            };
            self.stats.steps += 1;
            self.stats.step_tokens += step.load.tokens as u64;
            self.stats.step_shares += step.shares.len() as u64;
            self.in_flight.push_back(InFlight { ticket, step, submitted: Instant::now() });
            self.publish();
        }
        let Some(InFlight { ticket, step, submitted }) = self.in_flight.pop_front() else {
            self.scheduler.expect_idle();
            self.shared.begins_nothing();
            self.ledger.end_span();
            return Ok(drafting);
        };
        let before = Instant::now();
        let sampled = self.runner.loaded().wait(ticket).map_err(|error| self.failure(error, Some(&step)))?;
        self.shared.finished();
        let done = Instant::now();
        self.pace.observe(step.load, done - submitted.max(self.last_done));
        self.last_done = done;
        self.charge(&step);
        let outputs = self.scheduler.commit(&step, &sampled);
        // Whoever is told of the answer's end finds the answer no longer running.
        self.publish();
        outputs.into_iter().for_each(|output| self.tell(output, done));
        Ok(done - before + drafting)
    }

    /// The next step, and the time that its draft tokens took; none if nobody gets on before a step in flight is
    /// committed.
    fn schedule(&mut self) -> Result<Option<(Step, Duration)>, Failure> {
        let took = match draft(&mut self.scheduler, self.runner.loaded(), self.in_flight.len()) {
            Ok(Some(took)) => took,
            Ok(None) => return Ok(None),
            Err(error) => {
                let sequences = self.scheduler.draft_requests().into_iter().map(|(id, _)| id).collect();
                return Err(Failure { error, sequences, at_unit: Vec::new() });
            }
        };
        self.scheduler.set_attention_path(self.runner.loaded().attention_path());
        Ok(self.scheduler.schedule(&self.pace).map(|step| (step, took)))
    }

    /// Shares the energy of a step among its answers, by their tokens in it. An answer may have ended while the step was
    /// under way; if all have, the next step gets the energy.
    fn charge(&mut self, step: &Step) {
        let is_there = |share: &&SequenceShare| self.answers.contains_key(&share.id);
        let tokens: usize = step.shares.iter().filter(is_there).map(|share| share.tokens).sum();
        if tokens == 0 {
            return;
        }
        let joules = self.ledger.settle();
        for share in &step.shares {
            if let Some(answer) = self.answers.get_mut(&share.id) {
                answer.clock.charge(joules.map(|joules| joules * share.tokens as f64 / tokens as f64));
            }
        }
    }

    /// Sends the events of one output of a step that ended `at`.
    fn tell(&mut self, output: Output, at: Instant) {
        let Output { id: sequence, token, mut logprobs, prompt, pooled, end, cached_tokens, drafts } = output;
        // A step may yield several ids, and the answer may have been removed at the first of them, because its reader
        // was too far behind.
        let Some(answer) = self.answers.get_mut(&sequence) else { return };
        answer.clock.drafts = drafts;
        answer.clock.cached_n = cached_tokens;
        let (choice, timings) = (answer.choice, answer.clock.tick(usize::from(pooled.is_none()), at));
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
            let answer = self.remove(sequence);
            self.publish();
            answer.fail(EngineError::SlowReader);
        }
    }

    /// Fails all requests that run, wait, or are in the inbox. The runner is dropped last: its destructor may take
    /// long, or never end if the device hangs, and no client is to wait for it.
    pub(super) fn end(mut self) {
        self.shared.draining.store(true, Ordering::Release);
        let error = self.shared.why_ended();
        // After a panic the scheduler may be in the middle of a change.
        if !matches!(error, EngineError::Bug(_)) {
            self.answers.keys().for_each(|id| self.scheduler.remove(*id));
        }
        self.publish();
        self.answers.drain().for_each(|(_, answer)| answer.fail(error.clone()));
        while let Ok(message) = self.messages.try_recv() {
            if let Message::Submit(submitted) = message {
                submitted.answers.into_iter().for_each(|answer| answer.fail(error.clone()));
            }
        }
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
