//! State that the handles share with the engine's thread.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::block_manager::PoolUse;
use super::error::{EngineError, SubmitError};
use super::request::Priority;
use super::speculation::DraftTotals;
use crate::config::Courtesy;
use crate::model::Limits;

/// Counts after the last step. Events and durations are totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of submitted requests that do not run yet.
    pub waiting: usize,
    pub running: usize,
    /// Blocks of the pools without a window.
    pub full: PoolUse,
    /// Blocks of the pools with a window.
    pub sliding: PoolUse,
    pub preemptions: u64,
    /// Counts of the draft tokens of all sequences.
    pub drafts: DraftTotals,
    pub steps: u64,
    /// Number of tokens that the steps computed.
    pub step_tokens: u64,
    /// Number of [sequence shares](super::SequenceShare) in the steps.
    pub step_shares: u64,
    /// [`Sampled::used_experts`](crate::model::Sampled::used_experts) of the steps.
    pub used_experts: u64,
    /// Number of images that were encoded.
    pub images_encoded: u64,
    /// Time that the images took to be encoded.
    pub image_encoding_ns: u64,
    /// How often a sequence share has an image whose embeddings a slot had already.
    pub image_hits: u64,
    /// Time in which the engine's thread worked: it waited neither for the device nor for requests.
    pub host_ns: u64,
    /// How often the device was lost.
    pub losses: u64,
    /// How often a required coprocessor failed.
    pub coprocessor_failures: u64,
    /// How many answers were computed again after losses of the device and failures of the coprocessor.
    pub replays: u64,
    /// Time from these failures until the device worked again.
    pub recovery_ns: u64,
    /// Conversations on disk.
    pub disk: DiskStats,
}

/// Counts of conversations that were stored and resumed, as totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Sequences that began with tokens from the disk and computed a step, and the tokens.
    pub hits: u64,
    pub hit_tokens: u64,
    /// Reads that were given up: a file was missing or damaged, the device had no room, or they took too long.
    pub failed_reads: u64,
    /// Sequences that were computed because reading, with the reads before it, was predicted to take longer.
    pub slower_reads: u64,
    /// Ends of turns.
    pub turns: u64,
    /// Entries of turns whose blocks were taken by others before they were read from the device, or for which the store
    /// had no place.
    pub lost_entries: u64,
}

/// The state of the engine, and what happens to requests in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineState {
    #[default]
    Ready,
    /// The idle model was unloaded, and its device memory is free. The next request loads the model again.
    Unloaded,
    /// The model is being loaded again for a waiting request.
    Loading,
    /// The device was lost, or a required coprocessor failed. The model is being loaded again, and then the answers in
    /// progress continue.
    Recovering,
    /// The engine has ended. [`EngineHandle::ended`](super::EngineHandle::ended) returns the reason.
    Lost,
}

/// When the engine unloads the model if no request arrives.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Unload {
    #[default]
    Never,
    /// So long after the end of the requests that run now.
    After(Duration),
    At(Instant),
}

/// The kind of work that the engine gives the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceTask {
    Step,
    Probe,
}

/// What the device does, so that a watchdog can detect that it hangs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Signs {
    /// When the device last finished work.
    pub last: Option<Instant>,
    /// The work that the device does now, and when it began.
    pub work: Option<(DeviceTask, Instant)>,
}

/// State that the handles share with the engine's thread. All locks are held briefly, so they do not delay a step.
pub(super) struct Shared {
    pub(super) limits: Limits,
    /// Maximum number of waiting requests.
    pub(super) queue: AtomicUsize,
    pub(super) waiting: AtomicUsize,
    pub(super) stats: Mutex<Stats>,
    pub(super) signs: Mutex<Signs>,
    pub(super) state: Mutex<EngineState>,
    pub(super) unload: Mutex<Unload>,
    /// Whether an unload was requested.
    pub(super) unload_now: AtomicBool,
    /// The share of the device's time that the next steps may take.
    pub(super) courtesy: Mutex<Courtesy>,
    /// Whether a probe was requested and has not begun.
    pub(super) probe: AtomicBool,
    pub(super) next_id: AtomicU64,
    pub(super) draining: AtomicBool,
    pub(super) aborted: Arc<AtomicBool>,
    /// The error that ended the engine. Empty if the engine was told to end, or runs.
    pub(super) cause: OnceLock<EngineError>,
    pub(super) ended: Mutex<bool>,
    pub(super) end: Condvar,
}

impl Shared {
    /// `aborted` is the flag with which the runner was started.
    pub(super) fn new(limits: Limits, queue: usize, aborted: Arc<AtomicBool>) -> Self {
        Self {
            limits,
            queue: AtomicUsize::new(queue),
            waiting: AtomicUsize::new(0),
            stats: Mutex::default(),
            signs: Mutex::default(),
            state: Mutex::default(),
            unload: Mutex::default(),
            unload_now: AtomicBool::new(false),
            courtesy: Mutex::new(Courtesy::NONE),
            probe: AtomicBool::new(false),
            next_id: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            aborted,
            cause: OnceLock::new(),
            ended: Mutex::new(false),
            end: Condvar::new(),
        }
    }

    pub(super) fn set_working(&self, work: DeviceTask) {
        self.signs.lock().expect("nothing panics under this lock").work = Some((work, Instant::now()));
    }

    pub(super) fn set_idle(&self) {
        self.signs.lock().expect("nothing panics under this lock").work = None;
    }

    pub(super) fn set_finished(&self) {
        let signs = Signs { last: Some(Instant::now()), work: None };
        *self.signs.lock().expect("nothing panics under this lock") = signs;
    }

    pub(super) fn set_unload(&self, unload: Unload) {
        *self.unload.lock().expect("nothing panics under this lock") = unload;
    }

    pub(super) fn courtesy(&self) -> Courtesy {
        *self.courtesy.lock().expect("nothing panics under this lock")
    }

    pub(super) fn set_state(&self, state: EngineState) {
        *self.state.lock().expect("nothing panics under this lock") = state;
    }

    /// Sets the error that ends the engine. Only the first call has an effect. Every later refusal has this error.
    pub(super) fn end_for(&self, cause: EngineError) {
        let _ = self.cause.set(cause);
    }

    pub(super) fn why_ended(&self) -> EngineError {
        self.cause.get().cloned().unwrap_or(EngineError::ShuttingDown)
    }
}

/// A place in the queue. Dropping it frees the place.
pub(super) struct Permit(Arc<Shared>);

impl Permit {
    /// Takes a place. Half of the queue is reserved for interactive requests.
    pub(super) fn take(shared: &Arc<Shared>, priority: Priority) -> Result<Self, SubmitError> {
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
