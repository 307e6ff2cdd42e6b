//! The engine: one thread that owns every sequence and every KV block, and drives a [`Runner`](crate::model::Runner) step by step.
//!
//! ```text
//! submit -> bounded inbox -> | drain inbox -> schedule -> submit step N+1 -> wait for step N -> commit | -> events
//! ```
//!
//! While the device runs one step the next is already submitted: what a step draws feeds the next one there, and what
//! the host does about an id (stop ids, limits, telling the reader) it does beside the device, not in its way.
//!
//! With a draft model the steps do not overlap while a sequence wants guesses: the second model guesses what follows the
//! last known id, and one step of the first checks all of it.
//!
//! It speaks token ids and refuses to know text, HTTP, the device or a layer. It never waits for a reader: one that
//! falls [`EVENTS`] events behind, for each of its answers, is cancelled, alone. Dropping a [`TokenStream`] cancels its
//! request before the next step is scheduled, and frees its blocks.
//!
//! A failing device ends the engine: the running requests and all that wait get [`EngineError::Lost`], and so does
//! every later [`EngineHandle::submit`]. Nothing is retried and nothing computed elsewhere. A panic of the engine's thread
//! ends it as well, with [`EngineError::Bug`]: a step for nobody while somebody waits is one. The clients hear of either
//! before the runner is dropped, and [`EngineHandle::ended`] says which it was. A request whose logits are no numbers fails
//! alone, and the prefix cache forgets its text.

mod answer;
mod block_manager;
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
mod trial;

pub use answer::{Ended, Event, FinishReason, Timings};
pub use block_manager::{BlockManager, BlockTable, NoRoom, PoolUse};
pub use error::{EngineError, SubmitError};
pub use handle::{Engine, EngineConfig, EngineHandle, TokenStream};
pub use mask::{SharedMask, TokenMask, submit};
pub use pace::{Load, Pace};
pub use request::{CacheSalt, ClientId, EVENTS, MAX_QUEUE, Priority, Request};
pub use scheduler::{Output, Scheduler, SchedulerConfig, Share, Step};
pub use sequence::{Fork, Sequence, SequenceId};
pub use shared::{Signs, Stats, Work};
pub use speculation::{Drafts, Guesses};
pub use step_loop::draft;
pub use trial::{Trial, TrialStep};
