//! The engine's thread: it receives requests, submits one step after another to the runner, and sends the events.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc as events;

use super::answer::{Answer, Event, FinishReason};
use super::disk::{Disk, DiskConfig};
use super::energy::{EnergyCounter, Ledger};
use super::error::EngineError;
use super::lease::{Lease, Turn, Working};
use super::pace::Pace;
use super::request::KeepAlive;
use super::scheduler::{Output, Scheduler, SchedulerConfig, SequenceShare, Step};
use super::sequence::{Sequence, SequenceId};
use super::shared::{DeviceTask, EngineState, Shared, Stats, Unload};
use super::supervised::SupervisedRunner;
use crate::model::{Runner, RunnerError, Ticket};

pub(super) struct Submitted {
    pub(super) sequence: Sequence,
    pub(super) answers: Vec<Answer>,
}

pub(super) enum Message {
    Submit(Box<Submitted>),
    /// Loads the model if it is unloaded, and sends a message when it is loaded.
    Load(KeepAlive, events::Sender<()>),
    /// Makes the thread read the flags of [`Shared`].
    Wake,
}

/// How long the last turns may take to be stored before the model is unloaded, or the engine ends.
const LAST_SAVES: Duration = Duration::from_secs(5);
/// How long contents of blocks that were read are written to the device between two steps.
const DISK_BUDGET: Duration = Duration::from_millis(20);
/// How long the engine waits for the disk before it looks at its messages again.
const READ_PATIENCE: Duration = Duration::from_millis(20);
/// How long the wait for the store keeps an idle model loaded that is not needed any longer.
const LONGEST_SAVE: Duration = Duration::from_secs(60);
/// How long an idle engine waits until the store has a place again.
const STORE_PAUSE: Duration = Duration::from_millis(20);

/// Why an idle engine has no message.
enum Quiet {
    /// There are turns to store.
    ToSave,
    /// The model is not needed any longer.
    Unneeded,
    /// There is no handle.
    Disconnected,
}

/// A step that was submitted to the device.
struct InFlight {
    ticket: Ticket,
    step: Step,
    submitted: Instant,
}

/// A failure of the device or the coprocessor.
struct Failure {
    error: RunnerError,
    /// The sequences of the steps that were submitted.
    sequences: Vec<SequenceId>,
    /// The sequences whose prompt the coprocessor failed to compute. Only they are affected by a failure of the coprocessor.
    failed_prompts: Vec<SequenceId>,
    /// Whether the steps had sequences that have ended, or whose clients have left. They may be the reason, and cannot be
    /// computed alone.
    has_abandoned: bool,
}

impl Failure {
    /// A failure while no step was in flight.
    fn without_step(error: RunnerError, sequences: Vec<SequenceId>) -> Self {
        Self { error, sequences, failed_prompts: Vec::new(), has_abandoned: false }
    }
}

/// The engine thread's state.
pub(super) struct StepLoop {
    runner: SupervisedRunner,
    scheduler: Scheduler,
    pace: Pace,
    ledger: Ledger,
    /// The steps in flight, the oldest first.
    in_flight: VecDeque<InFlight>,
    /// A scheduled step that is submitted as soon as no other step is in flight.
    held: Option<Step>,
    /// The device that other engines use too; `None` = there are no others.
    lease: Option<Arc<Lease>>,
    /// Held while steps are in flight.
    turn: Option<Turn>,
    /// Held from the first step until the engine is idle.
    working: Option<Working>,
    /// The time at which the last step ended. The device has worked on the next step since then.
    last_done: Instant,
    answers: HashMap<SequenceId, Answer>,
    messages: Receiver<Message>,
    /// The conversations on disk; `None` = they are not kept.
    disk: Option<Disk>,
    /// Clients that wait until the model is loaded.
    loads: Vec<events::Sender<()>>,
    pub(super) shared: Arc<Shared>,
    stats: Stats,
}

impl StepLoop {
    pub(super) fn new(
        runner: SupervisedRunner,
        config: SchedulerConfig,
        energy: Option<Arc<dyn EnergyCounter>>,
        lease: Option<Arc<Lease>>,
        disk: Option<DiskConfig>,
        messages: Receiver<Message>,
        shared: Arc<Shared>,
    ) -> Self {
        let stores_turns = disk.is_some();
        let config = SchedulerConfig { draft_model: runner.has_draft(), stores_turns, ..config };
        let disk = disk.map(|disk| Disk::new(disk, runner.limits()));
        let new = Self {
            scheduler: Scheduler::new(runner.limits().clone(), config),
            runner,
            pace: Pace::new(),
            ledger: Ledger::new(energy),
            in_flight: VecDeque::new(),
            held: None,
            lease,
            turn: None,
            working: None,
            last_done: Instant::now(),
            answers: HashMap::new(),
            messages,
            disk,
            loads: Vec::new(),
            shared,
            stats: Stats::default(),
        };
        new.publish();
        new
    }

    /// Runs until the engine must end.
    pub(super) fn run(&mut self) {
        loop {
            if !self.drain_inbox() {
                return;
            }
            self.remove_ended();
            if !self.runner.is_loaded() {
                self.loads.retain(|load| !load.is_closed());
                if self.scheduler.is_idle() && self.loads.is_empty() {
                    continue; // the client has left
                }
                self.shared.set_state(EngineState::Loading);
                tracing::info!("a request arrived: loading the model again");
                if !self.load() {
                    return;
                }
            }
            for load in self.loads.drain(..) {
                let _ = load.try_send(()); // the client may have left
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

    fn end_lost(&self, error: &RunnerError) {
        tracing::error!("{error}; the engine ends");
        self.shared.end_for(EngineError::Lost(error.to_string()));
    }

    /// Starts another runner, if that is allowed. Returns false if the engine must end.
    fn recover(&mut self, failure: &Failure) -> bool {
        let Failure { error, sequences, failed_prompts, has_abandoned } = failure;
        if self.shared.aborted.load(Ordering::Acquire) {
            return false; // the error is a result of the abort
        }
        self.in_flight.clear();
        (self.turn, self.working) = (None, None);
        self.held = None;
        self.disk.iter_mut().for_each(Disk::clear);
        let is_coprocessor = matches!(error, RunnerError::Coprocessor(_));
        self.stats.losses += u64::from(!is_coprocessor);
        self.stats.coprocessor_failures += u64::from(is_coprocessor);
        let at_fault = match is_coprocessor {
            true => self.scheduler.restart_without(failed_prompts),
            false => self.scheduler.restart(sequences),
        };
        // A client that gets the error must find the failure in the counts.
        self.publish();
        let is_explained = match is_coprocessor {
            // Also if the client of the prompt has left.
            true => !at_fault.is_empty() || !sequences.is_empty(),
            false => !at_fault.is_empty() || *has_abandoned,
        };
        if !is_coprocessor && !at_fault.is_empty() {
            // A sequence that loses the device alone is the reason for the loss before, too.
            self.runner.explain_last_loss();
        }
        if !self.runner.may_recover(is_explained) {
            self.end_lost(error);
            return false;
        }
        let began = Instant::now();
        self.shared.set_state(EngineState::Recovering);
        for id in at_fault {
            let answer = self.answers.remove(&id).expect("every sequence has an answer");
            answer.fail(match error {
                RunnerError::Coprocessor(words) => EngineError::Coprocessor(words.clone()),
                lost => EngineError::LostTwice(lost.to_string()),
            });
        }
        // If one answer of a request failed, its other answers end too. They may be separate sequences by now.
        let has_failed = |answer: &Answer| answer.failure.get().is_some();
        let siblings: Vec<_> =
            self.answers.iter().filter(|(_, a)| has_failed(a)).map(|(id, _)| *id).collect();
        for id in siblings {
            self.remove(id);
        }
        let prefix = if is_coprocessor { "a coprocessor failed: " } else { "" };
        let suffix = if is_coprocessor { "" } else { ", those of the failed steps one at a time" };
        tracing::error!(
            "{prefix}{error}; loading the model again, then {} answers continue{suffix}",
            self.answers.len()
        );
        self.stats.replays += self.answers.len() as u64;
        self.publish();
        let is_back = self.load();
        self.stats.recovery_ns += began.elapsed().as_nanos() as u64;
        if is_back {
            let seconds = began.elapsed().as_secs_f64();
            match is_coprocessor {
                true => tracing::info!("the model and its coprocessor work again after {seconds:.1} s"),
                false => tracing::info!("the GPU works again after {seconds:.1} s"),
            }
        }
        is_back
    }

    /// Starts a runner. Returns false if the engine must end.
    fn load(&mut self) -> bool {
        self.shared.set_idle();
        self.ledger.end_span();
        match self.runner.start(&self.shared.aborted) {
            Ok(()) => {
                self.last_done = Instant::now();
                self.publish_unload();
                self.shared.set_state(EngineState::Ready);
                self.shared.set_finished();
                true
            }
            Err(_) if self.shared.aborted.load(Ordering::Acquire) => false,
            Err(error) => {
                self.end_lost(&error);
                false
            }
        }
    }

    /// Unloads the model until the next request, which frees its memory on the device.
    fn unload(&mut self) {
        tracing::info!("unloading the idle model until the next request");
        self.save_all();
        self.disk.iter_mut().for_each(Disk::clear);
        self.scheduler.restart(&[]);
        self.runner.unload();
        self.shared.set_idle();
        self.shared.set_state(EngineState::Unloaded);
        self.publish();
    }

    fn set_keep_alive(&mut self, keep_alive: KeepAlive) {
        self.runner.set_keep_alive(keep_alive);
        self.publish_unload();
    }

    /// Publishes when the model is unloaded, while the engine works or is about to.
    fn publish_unload(&self) {
        self.shared.set_unload(self.runner.idle_unload().map_or(Unload::Never, Unload::After));
    }

    /// Carries out a request to unload the model, after the messages that came before it.
    fn take_unload(&mut self) {
        if self.shared.unload_now.swap(false, Ordering::AcqRel) {
            self.set_keep_alive(KeepAlive::For(Duration::ZERO));
        }
    }

    /// Stores the turns that ended, before the blocks are lost. Takes a bounded time. A failure of the device does not matter
    /// then.
    fn save_all(&mut self) {
        if !self.in_flight.is_empty() || self.held.is_some() || !self.runner.is_loaded() {
            return;
        }
        if let Some(disk) = &mut self.disk
            && let Err(error) = disk.save_all(&mut self.scheduler, self.runner.loaded(), LAST_SAVES)
        {
            tracing::warn!("the last turns were not stored: {error}");
        }
    }

    /// Stores a part of the turns that ended, and reads a part of what the next sequence needs, between two steps.
    fn use_disk(&mut self) -> Result<(), RunnerError> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        // This reserves blocks. A sequence that was not looked up does not start, also while others decode without a pause.
        disk.look_up(&mut self.scheduler, &self.pace);
        if !self.in_flight.is_empty() || self.held.is_some() {
            return Ok(());
        }
        let runner = self.runner.loaded();
        disk.write_next(&mut self.scheduler, runner, DISK_BUDGET, Duration::ZERO)?;
        if !disk.is_reading() {
            disk.save_some(&self.scheduler, runner)?;
        }
        Ok(())
    }

    /// How long an idle engine waits before it stores turns, or looks again whether the store has a place for them. `None` =
    /// there are none, or they may keep the model loaded no longer.
    fn save_patience(&self) -> Option<Duration> {
        // An unload saves for a bounded time.
        let until = |time: Duration| time.saturating_add(LONGEST_SAVE);
        let idle_unload = self.runner.idle_unload();
        let is_overdue = idle_unload.is_some_and(|time| self.last_done.elapsed() > until(time));
        let is_wanted = !is_overdue && !self.shared.unload_now.load(Ordering::Acquire);
        let disk = self.disk.as_ref().filter(|disk| is_wanted && disk.has_pending())?;
        Some(if disk.can_save() { Duration::ZERO } else { STORE_PAUSE })
    }

    fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_empty() && self.held.is_none()
    }

    /// Handles the messages that arrived. Waits for a message if there is nothing else to do. Returns false if the
    /// engine must end.
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
                // If a request waits already, the span of energy continues.
                let message = self.messages.try_recv().or_else(|_| {
                    if let Some(patience) = self.save_patience() {
                        if !patience.is_zero() {
                            // Other engines need not share the device with one that waits for the disk.
                            self.ledger.end_span();
                            self.working = None;
                        }
                        let message = self.messages.recv_timeout(patience);
                        return message.map_err(|error| match error {
                            RecvTimeoutError::Timeout => Quiet::ToSave,
                            RecvTimeoutError::Disconnected => Quiet::Disconnected,
                        });
                    }
                    self.ledger.end_span();
                    self.working = None;
                    self.take_unload();
                    let idle_unload = self.runner.idle_unload();
                    let at = idle_unload.and_then(|time| self.last_done.checked_add(time));
                    self.shared.set_unload(at.map_or(Unload::Never, Unload::At));
                    match idle_unload {
                        None => self.messages.recv().map_err(|_| Quiet::Disconnected),
                        Some(most) => {
                            let left = most.saturating_sub(self.last_done.elapsed());
                            self.messages.recv_timeout(left).map_err(|error| match error {
                                RecvTimeoutError::Timeout => Quiet::Unneeded,
                                RecvTimeoutError::Disconnected => Quiet::Disconnected,
                            })
                        }
                    }
                });
                match message {
                    Ok(message) => message,
                    Err(Quiet::ToSave) if self.disk.as_ref().is_some_and(Disk::can_save) => return true,
                    Err(Quiet::ToSave) => continue,
                    Err(Quiet::Unneeded) => {
                        self.unload();
                        continue;
                    }
                    Err(Quiet::Disconnected) => return false, // there is no handle and no work
                }
            } else {
                match self.messages.try_recv() {
                    Ok(message) => message,
                    Err(_) => {
                        self.take_unload();
                        return !self.is_idle();
                    }
                }
            };
            match message {
                Message::Submit(submitted) => {
                    let Submitted { sequence, answers } = *submitted;
                    self.set_keep_alive(sequence.request.keep_alive);
                    self.answers.extend((sequence.id..).zip(answers));
                    self.scheduler.add(sequence);
                }
                Message::Load(keep_alive, loaded) => {
                    self.set_keep_alive(keep_alive);
                    self.loads.push(loaded);
                    // The time until an unload counts from here.
                    self.last_done = Instant::now();
                    if self.is_idle() {
                        return true;
                    }
                }
                Message::Wake => {}
            }
        }
    }

    /// Checks that an idle device computes. Returns false if the engine must end.
    fn probe(&mut self) -> bool {
        if !self.runner.is_loaded() {
            return true;
        }
        self.shared.set_working(DeviceTask::Probe);
        match self.runner.loaded().probe() {
            Ok(()) => {
                self.shared.set_finished();
                true
            }
            Err(error) => self.recover(&Failure::without_step(error, Vec::new())),
        }
    }

    /// Removes the answers whose client left or stopped them.
    fn remove_ended(&mut self) {
        let left = |answer: &Answer| {
            answer.events.is_closed() || answer.stopped[answer.choice].load(Ordering::Acquire)
        };
        let ids: Vec<SequenceId> = self.answers.iter().filter(|(_, a)| left(a)).map(|(id, _)| *id).collect();
        for id in ids {
            let answer = self.remove(id);
            tracing::debug!(generated = answer.clock.predicted_n, "cancelled: the client disconnected");
        }
    }

    fn remove(&mut self, id: SequenceId) -> Answer {
        if self.scheduler.is_suspect(id) {
            // It may be the reason for the loss, and is not computed alone any longer.
            self.runner.explain_last_loss();
        }
        self.scheduler.remove(id);
        self.answers.remove(&id).expect("every sequence has an answer")
    }

    /// A failure with the sequences of the steps in flight and of `step`.
    fn failure(&self, error: RunnerError, step: Option<&Step>) -> Failure {
        let steps = || self.in_flight.iter().map(|in_flight| &in_flight.step).chain(step);
        let sequences = self.scheduler.sequences_in(steps());
        // At most one step in flight has a prompt that the coprocessor computes.
        let on_coprocessor =
            steps().filter(|_| matches!(error, RunnerError::Coprocessor(_))).find_map(Step::shared_prompt);
        let failed_prompts = self.scheduler.sequences_of(on_coprocessor);
        let mut shares = steps().flat_map(|step| &step.shares);
        let has_abandoned = shares.any(|share| !self.scheduler.knows(share.id));
        Failure { error, sequences, failed_prompts, has_abandoned }
    }

    /// Submits as many steps as may be in flight, waits for the oldest one, and commits it. Returns the time that it
    /// waited for the device.
    fn step(&mut self) -> Result<Duration, Failure> {
        // The time that the device drafts and encodes before steps are submitted.
        let mut preparing = Duration::ZERO;
        let waited = self.take_turn();
        if self.lease.is_some() && self.turn.is_none() {
            return Ok(waited); // the engine must end
        }
        self.shared.set_working(DeviceTask::Step);
        let courtesy = self.shared.courtesy();
        match self.runner.set_courtesy(courtesy) {
            Ok(false) => {}
            // The steps' durations change now, so what was learnt about them is wrong.
            Ok(true) => self.pace = Pace::new(),
            Err(error) => return Err(self.failure(error, None)),
        }
        let others = self.working.as_ref().map_or(0, Working::others);
        // A load has no work of its own, and waits for its turn.
        let is_wanted = others > 0 || self.turn.as_ref().is_some_and(Turn::is_wanted);
        // A client of this engine may wait for a step of each other engine between two tokens, and the other way round.
        self.scheduler.set_engines(1 + others);
        self.scheduler.set_attention_path(self.runner.loaded().attention_path());
        self.use_disk().map_err(|error| self.failure(error, None))?;
        // Blocks are copied while no step is in flight.
        let copies = self.disk.as_ref().is_some_and(Disk::is_busy);
        // With a bound, the submission of a second step would wait for its time slots and delay the results of the
        // first.
        let is_alone = courtesy.is_bound() || is_wanted || copies;
        let most = if is_alone { 1 } else { self.shared.limits.max_in_flight };
        self.ledger.begin_span();
        while self.in_flight.len() < most {
            let step = match self.held.take() {
                Some(step) => step,
                None => {
                    let Some((step, took)) = self.schedule()? else { break };
                    preparing += took;
                    step
                }
            };
            // While the runner submits such a step, it waits for the coprocessor, or until an image is encoded. The
            // results of a step in flight would be delayed by that wait, and its measured time and energy would include
            // those of this step.
            let has_coprocessor = self.runner.loaded().attention_path() != 0;
            let waits = has_coprocessor && step.shared_prompt().is_some() || !step.encodings.is_empty();
            if waits && !self.in_flight.is_empty() {
                self.held = Some(step);
                break;
            }
            // Requests are published as running before their permits end, so that they are never missing in both
            // counts.
            self.publish();
            for share in &step.shares {
                // The client may have left while the step was held back.
                let Some(answer) = self.answers.get_mut(&share.id) else { continue };
                answer.permit = None;
                answer.clock.start(|| self.ledger.zero());
            }
            preparing += self.encode_images(&step)?;
            let ticket = match step.submit_encoded(self.runner.loaded()) {
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
            if let Some(disk) = self.disk.as_mut().filter(|disk| disk.is_reading()) {
                // The only sequences that can start wait for the disk.
                let began = Instant::now();
                let runner = self.runner.loaded();
                let written = disk.write_next(&mut self.scheduler, runner, DISK_BUDGET, READ_PATIENCE);
                written.map_err(|error| self.failure(error, None))?;
                // Other engines may compute meanwhile.
                self.turn = None;
                return Ok(waited + preparing + began.elapsed());
            }
            if let Some(disk) = self.disk.as_mut().filter(|_| self.scheduler.wants_lookup()) {
                // They have a place since others were preempted.
                disk.look_up(&mut self.scheduler, &self.pace);
                if self.scheduler.wants_lookup() && !disk.is_reading() {
                    // Whatever keeps sequences from being looked up must not keep them from being answered.
                    self.scheduler.settle_all();
                }
                return Ok(waited + preparing);
            }
            self.scheduler.expect_idle();
            self.shared.set_idle();
            self.ledger.end_span();
            self.turn = None;
            return Ok(waited + preparing);
        };
        let before = Instant::now();
        let sampled = self.runner.loaded().wait(ticket).map_err(|error| self.failure(error, Some(&step)))?;
        self.shared.set_finished();
        if self.in_flight.is_empty() {
            self.turn = None;
        }
        let done = Instant::now();
        self.pace.observe(step.load, done - submitted.max(self.last_done));
        self.last_done = done;
        self.charge(&step);
        self.stats.used_experts += u64::from(sampled.used_experts);
        let outputs = self.scheduler.commit(&step, &sampled);
        if let Some(disk) = &mut self.disk {
            disk.take_turns(&mut self.scheduler);
        }
        // A client that gets the end of its answer must not find the answer among those that run.
        self.publish();
        outputs.into_iter().for_each(|output| self.send_output(output, done));
        Ok(waited + (done - before) + preparing)
    }

    /// Encodes the images of a step before it is submitted. Returns the time that they took.
    fn encode_images(&mut self, step: &Step) -> Result<Duration, Failure> {
        let before = Instant::now();
        step.encode_images(self.runner.loaded()).map_err(|error| self.failure(error, Some(step)))?;
        let took = if step.encodings.is_empty() { Duration::ZERO } else { before.elapsed() };
        self.stats.images_encoded += step.encodings.len() as u64;
        self.stats.image_encoding_ns += took.as_nanos() as u64;
        self.stats.image_hits += step.image_hits() as u64;
        Ok(took)
    }

    /// Waits until no other engine computes. Returns the time of the wait.
    fn take_turn(&mut self) -> Duration {
        let Some(lease) = self.lease.as_ref().filter(|_| self.turn.is_none()) else { return Duration::ZERO };
        let began = Instant::now();
        self.working.get_or_insert_with(|| lease.begin());
        if lease.is_taken() {
            // The energy until then is another engine's.
            self.ledger.end_span();
        }
        // An engine that must end does so before its next step.
        self.turn = lease.take(|| self.shared.aborted.load(Ordering::Acquire));
        began.elapsed()
    }

    /// The next step, and the time that its draft tokens took. `None` if no sequence can get tokens before a step in
    /// flight is committed.
    fn schedule(&mut self) -> Result<Option<(Step, Duration)>, Failure> {
        let took = match draft(&mut self.scheduler, self.runner.loaded(), self.in_flight.len()) {
            Ok(Some(took)) => took,
            Ok(None) => return Ok(None),
            Err(error) => {
                let sequences = self.scheduler.draft_requests().into_iter().map(|(id, _)| id).collect();
                return Err(Failure::without_step(error, sequences));
            }
        };
        self.scheduler.set_attention_path(self.runner.loaded().attention_path());
        Ok(self.scheduler.schedule(&self.pace).map(|step| (step, took)))
    }

    /// Shares the energy of a step among its answers, in proportion to their tokens in the step. Answers that ended
    /// while the step ran get nothing. If all of them ended, the energy counts for the next step.
    fn charge(&mut self, step: &Step) {
        let is_there = |share: &&SequenceShare| self.answers.contains_key(&share.id);
        let tokens: usize = step.shares.iter().filter(is_there).map(|share| share.tokens).sum();
        if tokens == 0 {
            return;
        }
        let joules = self.ledger.take_step();
        for share in &step.shares {
            if let Some(answer) = self.answers.get_mut(&share.id) {
                answer.clock.charge(joules.map(|joules| joules * share.tokens as f64 / tokens as f64));
            }
        }
    }

    /// Sends the events of one output of a step that ended at `at`.
    fn send_output(&mut self, output: Output, at: Instant) {
        let Output { id: sequence, token, mut logprobs, prompt, pooled, end, cached_tokens, drafts } = output;
        // A step may yield several ids. The answer may have been removed at the first one, because its reader was too
        // slow.
        let Some(answer) = self.answers.get_mut(&sequence) else { return };
        answer.clock.drafts = drafts;
        answer.clock.cached_n = cached_tokens;
        let (choice, timings) = (answer.choice, answer.clock.tick(usize::from(pooled.is_none()), at));
        let mut sent = prompt.is_none_or(|logprobs| answer.send(Event::Prompt { logprobs }));
        sent &= pooled.is_none_or(|state| answer.send(Event::Pooled { state }));
        if let Some(id) = token {
            sent &= answer.send(Event::Token { choice, id, logprobs: logprobs.take(), timings });
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
            sent &= answer.send(Event::Finished { choice, reason, stop, timings });
            if sent {
                self.answers.remove(&sequence);
                return;
            }
        }
        if !sent {
            let answer = self.remove(sequence);
            self.publish();
            answer.fail(EngineError::SlowReader);
        }
    }

    /// Fails all requests that run, wait, or are in the inbox. The runner is dropped last, because its destructor may
    /// take long, or never return if the device hangs, and clients must not wait for it.
    pub(super) fn end(mut self) {
        self.shared.draining.store(true, Ordering::Release);
        let error = self.shared.why_ended();
        // After a panic, the scheduler's state may be inconsistent.
        if !matches!(error, EngineError::Bug(_)) {
            self.answers.keys().for_each(|id| self.scheduler.remove(*id));
        }
        self.publish();
        self.answers.drain().for_each(|(_, answer)| answer.fail(error.clone()));
        self.loads.clear();
        if matches!(error, EngineError::ShuttingDown) {
            self.save_all();
        }
        while let Ok(message) = self.messages.try_recv() {
            if let Message::Submit(submitted) = message {
                submitted.answers.into_iter().for_each(|answer| answer.fail(error.clone()));
            }
        }
        let Self { runner, messages, turn, working, .. } = self;
        // The other engines do not wait for the end of the runner.
        drop((turn, working));
        // Dropping the inbox fails the requests that arrived after the loop above, and refuses later ones, with the
        // same error.
        drop(messages);
        drop(runner);
    }

    fn publish(&self) {
        let stats = Stats {
            disk: self.disk.as_ref().map(|disk| disk.stats(&self.scheduler)).unwrap_or_default(),
            running: self.scheduler.num_running(),
            full: self.scheduler.usage(false),
            sliding: self.scheduler.usage(true),
            preemptions: self.scheduler.preemptions(),
            drafts: self.scheduler.drafts(),
            ..self.stats
        };
        *self.shared.stats.lock().expect("nothing panics under this lock") = stats;
    }
}

/// Gets tokens of the runner's draft model for the next step, before that step is scheduled. `in_flight` is the number
/// of steps in flight. Returns the time that drafting took, or `None` if the steps in flight must be committed first.
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
    assert_eq!(draft_tokens.len(), ids.len(), "the runner must answer each draft request");
    scheduler.take_draft_tokens(ids.into_iter().zip(draft_tokens), took);
    Ok(Some(took))
}

/// Wakes [`EngineHandle::join`](super::EngineHandle::join) when the engine's thread ends, also after a panic.
pub(super) struct EndGuard(pub(super) Arc<Shared>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if let Ok(mut ended) = self.0.ended.lock() {
            *ended = true;
        }
        self.0.end.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{SyncSender, sync_channel};
    use std::thread;

    use super::*;
    use crate::engine::disk::tests::{IdleRunner, disk_of_a_full_store, limits};
    use crate::model::RunnerFactory;

    const IDLE_UNLOAD: Duration = Duration::from_secs(1000);
    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(600);

    /// The model can be unloaded, and the tests do not load it again.
    struct Unused;

    impl RunnerFactory for Unused {
        fn start(&mut self, _: &Arc<AtomicBool>) -> Result<Box<dyn Runner>, RunnerError> {
            panic!("the model is loaded again")
        }
    }

    /// An idle engine with turns to store. The store has no place for them while `gate` is locked.
    fn waiting_engine(
        folder: &Path,
        gate: &Arc<Mutex<()>>,
        lease: Option<Arc<Lease>>,
    ) -> (StepLoop, SyncSender<Message>) {
        let runner =
            SupervisedRunner::new(Box::new(IdleRunner(limits())), Some(Box::new(Unused)), Some(IDLE_UNLOAD));
        let (inbox, messages) = sync_channel(1);
        let shared = Arc::new(Shared::new(limits(), 1, Arc::default()));
        let mut engine =
            StepLoop::new(runner, SchedulerConfig::default(), None, lease, None, messages, shared);
        engine.disk = Some(disk_of_a_full_store(folder, gate));
        (engine, inbox)
    }

    fn ago(time: Duration) -> Instant {
        Instant::now().checked_sub(time).expect("a time of the system's clock")
    }

    #[test]
    fn a_store_without_a_place_keeps_an_idle_model_loaded_for_a_bounded_time() {
        let (folder, gate) = (tempfile::tempdir().unwrap(), Arc::default());
        let closed = Mutex::lock(&gate).unwrap();
        let (mut engine, _inbox) = waiting_engine(folder.path(), &gate, None);
        assert_eq!(engine.save_patience(), Some(STORE_PAUSE));
        engine.last_done = ago(IDLE_UNLOAD);
        assert_eq!(engine.save_patience(), Some(STORE_PAUSE), "it would be unloaded without turns to store");
        engine.last_done = ago(IDLE_UNLOAD + LONGEST_SAVE);
        assert_eq!(engine.save_patience(), None);
        engine.set_keep_alive(KeepAlive::Forever);
        assert_eq!(engine.save_patience(), Some(STORE_PAUSE), "the model need not be unloaded");
        engine.shared.unload_now.store(true, Ordering::Release);
        assert_eq!(engine.save_patience(), None, "a client wants the model to be unloaded");
        drop(closed);
    }

    /// Otherwise each step of the others would be shorter, as if they shared the device.
    #[test]
    fn an_engine_that_only_waits_for_the_store_does_not_count_as_working() {
        let (folder, gate, lease) = (tempfile::tempdir().unwrap(), Arc::default(), Arc::default());
        let closed = Mutex::lock(&gate).unwrap();
        let (mut engine, inbox) = waiting_engine(folder.path(), &gate, Some(Arc::clone(&lease)));
        engine.working = Some(lease.begin());
        let own = lease.begin();
        assert_eq!(own.others(), 1);
        let shared = Arc::clone(&engine.shared);
        let is_idle = thread::scope(|scope| {
            let waiting = scope.spawn(|| engine.drain_inbox());
            let since = Instant::now();
            while own.others() > 0 && since.elapsed() < LONG {
                thread::yield_now();
            }
            let is_idle = own.others() == 0;
            shared.aborted.store(true, Ordering::Release);
            inbox.send(Message::Wake).unwrap();
            assert!(!waiting.join().unwrap(), "the engine ends");
            is_idle
        });
        assert!(is_idle);
        drop(closed);
    }
}
