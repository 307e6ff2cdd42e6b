//! Models from the Hugging Face hub: parses their names, pulls them, and finds, lists and removes pulled models.
//!
//! This module handles files and checksums; it does not interpret models. Only [`pull()`] uses the network: pulled
//! models are found and served offline. Files without a checksum and paths outside the repository are refused.
//! Downloaded files are never executed.
//!
//! Invariants: a file under its final name is complete, and its hash was verified. The token is sent to the endpoint
//! only, never to a host that the endpoint redirects to. Every wait, redirect, listing and retry is bounded.

mod cache;
mod client;
mod error;
mod name;
mod pull;
mod select;
mod settings;
mod url;

pub use cache::{Cache, Format, Pulled, Removal};
pub use error::HubError;
pub use name::{ModelName, NameError, RepoId};
pub use pull::{Progress, Report, pull};
pub use select::is_meant;
pub use settings::{Patience, Settings, standard_cache, tls};
