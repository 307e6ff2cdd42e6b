//! The engine: scheduling, batches, drafts, images, courtesy, conversations on disk, and recovery from lost
//! devices.

mod batching;
mod courtesy;
mod disk;
mod disk_models;
mod draft;
mod images;
mod recovery;
mod scripted;
