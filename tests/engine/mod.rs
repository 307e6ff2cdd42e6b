//! The engine: scheduling, batches, drafts, images, courtesy, and recovery from lost devices.

mod batching;
mod courtesy;
mod draft;
mod images;
mod recovery;
mod scripted;
