//! The engine: one thread that owns every sequence and every KV block, and drives a [`Runner`](crate::model::Runner)
//! step by step.
//!
//! ```text
//! submit -> bounded inbox -> | drain inbox -> schedule -> submit step N+1 -> wait for step N -> commit | -> events
//! ```
//!
//! Steps overlap: while the device runs one step, the next one is already submitted. An id that one step draws feeds
//! the next step on the device. The host checks stop ids and limits, and sends events, while the device computes.
//!
//! Steps do not overlap in five cases:
//!
//! - [`EngineHandle::set_courtesy`] bounds the engine's share of the device's time.
//! - A coprocessor computes part of the attention of a prompt. The runner waits for the coprocessor while it submits such a step. So
//!   the engine submits the step only when no other step is in flight; otherwise the results of that other step would
//!   be late.
//! - An image must be encoded before a step. The engine waits until it is encoded, so it encodes only when no step is
//!   in flight.
//! - A sequence wants tokens of a draft model. The draft model drafts the ids after the last known id, and one step of
//!   the model verifies all of them.
//! - Blocks are copied from the device to the disk, or from the disk to the device. That is done while no step is in flight.
//!
//! The engine works with token ids. It knows nothing about text, HTTP, devices or layers. It never waits for the reader
//! of a stream: if [`EVENTS`] unread events for each answer of a request pile up, the engine cancels that request
//! alone. Dropping a [`TokenStream`] cancels its request before the next step is scheduled, and frees its blocks.
//!
//! After a failure of the device, the engine starts another runner if it has a
//! [`RunnerFactory`](crate::model::RunnerFactory). Every sequence is computed again, and gets the same ids as without
//! the failure. The sequences of the failed steps are first computed alone. If the device fails again while it computes
//! one of them alone, that sequence gets [`EngineError::LostTwice`], and the others continue. That sequence explains both
//! losses. A sequence whose client leaves before it was computed alone explains the loss too. The engine ends after two
//! losses within a minute that no sequence explains. Without a factory, it ends after the first loss. Then all requests
//! that run or wait get [`EngineError::Lost`], and so does every later [`EngineHandle::submit`].
//!
//! The failure of a required coprocessor is not a loss of the device. The request whose prompt the coprocessor failed to
//! compute gets [`EngineError::Coprocessor`] immediately. The others continue with another runner.
//!
//! A panic of the engine's thread ends the engine with [`EngineError::Bug`]. The scheduler panics if a request waits
//! and nothing can be scheduled for it. Clients get either error before the runner is dropped. [`EngineHandle::ended`]
//! returns the error. A request whose logits are not finite fails alone, and the prefix cache drops its text.

mod answer;
mod block_manager;
mod disk;
mod energy;
mod error;
mod handle;
mod image_slots;
mod lease;
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
pub use disk::{DiskConfig, ReadRule};
pub use energy::{Energy, EnergyCounter, Joules};
pub use error::{EngineError, SubmitError};
pub use handle::{Engine, EngineConfig, EngineHandle, TokenStream};
pub use lease::{Lease, Turn};
pub use mask::{Restriction, SharedMask, TokenMask};
pub use pace::{Load, Pace};
pub use request::{
    CacheSalt, ClientId, EVENTS, ImageHash, KeepAlive, MAX_QUEUE, Priority, PromptImage, Request,
};
pub use scheduler::{EndedTurn, Output, Scheduler, SchedulerConfig, SequenceShare, Step};
pub use sequence::{Fork, Sequence, SequenceId};
pub use shared::{DeviceTask, DiskStats, EngineState, Signs, Stats};
pub use speculation::{DraftTotals, Drafts};
pub use step_loop::draft;
pub use trial::{Trial, TrialStep};
