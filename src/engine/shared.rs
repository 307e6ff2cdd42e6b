//! EngineState that the handles share with the engine's thread.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Instant;

use super::block_manager::PoolUse;
use super::error::{EngineError, SubmitError};
use super::request::Priority;
use super::speculation::DraftTotals;
use crate::config::Courtesy;
use crate::model::Limits;

/// Counts at the end of the last step. Counts of events are counts since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of requests that are submitted and do not run yet.
    pub waiting: usize,
    pub running: usize,
    /// Blocks of full layers.
    pub full: PoolUse,
    /// Blocks of sliding layers.
    pub sliding: PoolUse,
    pub preemptions: u64,
    /// Counts of the draft tokens of all sequences.
    pub drafts: DraftTotals,
    pub steps: u64,
    /// Number of tokens that the steps computed.
    pub step_tokens: u64,
    /// Number of shares of sequences in the steps.
    pub step_shares: u64,
    /// Time that the engine's thread worked, and waited neither for the device nor for requests.
    pub host_ns: u64,
    /// How often the device was lost.
    pub losses: u64,
    /// How often a unit beside the device failed that must be used.
    pub unit_failures: u64,
    /// How many answers were computed again behind losses and behind failures of a unit beside the device, and the time
    /// from those until the device computed again.
    pub replays: u64,
    pub recovery_ns: u64,
}

/// What the engine does with requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineState {
    #[default]
    Ready,
    /// Nobody asked for long, so the device's memory is given back. The next request has the model loaded again.
    Unloaded,
    /// The model is loaded again, for a request that waits.
    Loading,
    /// The device was lost, or a unit that it must have beside it failed. The model is loaded again, and the answers under
    /// way go on then.
    Recovering,
    /// The engine has ended, for the reason that [`EngineHandle::ended`](super::EngineHandle::ended) says.
    Lost,
}

/// The kind of work that the engine gives the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceTask {
    Step,
    Probe,
}

/// Signs of life of the device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Signs {
    /// The time at which the device last finished something.
    pub last: Option<Instant>,
    /// The work that the device has now, and since when.
    pub work: Option<(DeviceTask, Instant)>,
}

/// EngineState that the handles share with the engine's thread. A step takes only locks that are held briefly.
pub(super) struct Shared {
    pub(super) limits: Limits,
    /// The most requests that may wait.
    pub(super) queue: AtomicUsize,
    pub(super) waiting: AtomicUsize,
    pub(super) stats: Mutex<Stats>,
    pub(super) signs: Mutex<Signs>,
    pub(super) state: Mutex<EngineState>,
    /// The share of the device's time that the next steps may take.
    pub(super) courtesy: Mutex<Courtesy>,
    /// Whether a probe was asked for and has not begun.
    pub(super) probe: AtomicBool,
    pub(super) next_id: AtomicU64,
    pub(super) draining: AtomicBool,
    pub(super) aborted: Arc<AtomicBool>,
    /// The reason for which the engine ends; empty if it was asked to end.
    pub(super) cause: OnceLock<EngineError>,
    pub(super) ended: Mutex<bool>,
    pub(super) end: Condvar,
}

impl Shared {
    pub(super) fn begins(&self, work: DeviceTask) {
        self.signs.lock().expect("nothing panics under this lock").work = Some((work, Instant::now()));
    }

    pub(super) fn begins_nothing(&self) {
        self.signs.lock().expect("nothing panics under this lock").work = None;
    }

    pub(super) fn finished(&self) {
        let signs = Signs { last: Some(Instant::now()), work: None };
        *self.signs.lock().expect("nothing panics under this lock") = signs;
    }

    pub(super) fn courtesy(&self) -> Courtesy {
        *self.courtesy.lock().expect("nothing panics under this lock")
    }

    pub(super) fn enter(&self, state: EngineState) {
        *self.state.lock().expect("nothing panics under this lock") = state;
    }

    /// Sets the reason for which the engine ends. The first reason stays, and every later refusal names it.
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
