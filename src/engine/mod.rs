//! The engine: one thread that owns every sequence and every KV block, and drives a [`Runner`](crate::model::Runner)
//! step by step.
//!
//! ```text
//! submit -> bounded inbox -> | drain inbox -> schedule -> submit step N+1 -> wait for step N -> commit | -> events
//! ```
//!
//! While the device runs one step, the next one is already submitted: an id that is drawn feeds the next step on the
//! device. The host checks stop ids and limits, and sends events, while the device computes.
//!
//! While [`EngineHandle::set_courtesy`] bounds the share of the device's time, steps do not overlap.
//!
//! Where a unit beside the device computes some of the attention of prompts, a step with such a prompt is submitted when no
//! other is in flight: the runner waits for the unit while it takes that step, and nobody else is to wait for that.
//!
//! With a draft model, steps do not overlap while a sequence wants draft tokens. The draft model drafts the ids behind
//! the last known one, and one step of the model verifies all of them.
//!
//! The engine speaks token ids, and refuses to know text, HTTP, the device or a layer. It never waits for a reader: a
//! request whose reader falls [`EVENTS`] events behind, for each of its answers, is cancelled, and no other. Dropping a
//! [`TokenStream`] cancels its request before the next step is scheduled, and frees its blocks.
//!
//! After a failure of the device, the engine goes on with another runner if it has a
//! [`RunnerFactory`](crate::model::RunnerFactory): every sequence is computed again, and its ids are those that it would
//! have had. The sequences of the failed steps are computed alone at first; one that loses the device a second time then
//! gets [`EngineError::LostTwice`], and the others go on. Two losses within a minute that are no sequence's fault end the
//! engine, and so does the first one where there is no factory: all requests that run or wait get [`EngineError::Lost`],
//! and so does every later [`EngineHandle::submit`]. Nothing is computed elsewhere. A unit that must be used and fails is no
//! loss of the device: the request with the prompt that it failed at gets [`EngineError::Offload`] at once, and the others
//! go on with another runner.
//!
//! A panic of the engine's thread ends the engine with [`EngineError::Bug`]; the scheduler panics if a request waits and
//! nothing can be scheduled for it. Clients get either error before the runner is dropped, and [`EngineHandle::ended`]
//! says which one it was. A request whose logits are not finite fails alone, and the prefix cache forgets its text.

mod answer;
mod block_manager;
mod energy;
mod error;
mod handle;
mod mask;
mod pace;
mod request;
mod scheduler;
mod sequence;
mod shared;
mod speculation;
mod step_loop;
mod supervised;
mod trial;

pub use answer::{Ended, Event, FinishReason, Timings};
pub use block_manager::{BlockManager, BlockTable, NoRoom, PoolUse};
pub use energy::{Energy, EnergyCounter, Joules};
pub use error::{EngineError, SubmitError};
pub use handle::{Engine, EngineConfig, EngineHandle, TokenStream};
pub use mask::{SharedMask, TokenMask};
pub use pace::{Load, Pace};
pub use request::{CacheSalt, ClientId, EVENTS, MAX_QUEUE, Priority, Request};
pub use scheduler::{Output, Scheduler, SchedulerConfig, SequenceShare, Step};
pub use sequence::{Fork, Sequence, SequenceId};
pub use shared::{DeviceTask, EngineState, Signs, Stats};
pub use speculation::{DraftTotals, Drafts};
pub use step_loop::draft;
pub use trial::{Trial, TrialStep};
