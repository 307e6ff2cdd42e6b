//! The engine: scheduling, batches, drafts, courtesy, and recovery from lost devices.

mod batching;
mod courtesy;
mod draft;
mod recovery;
mod scripted;
