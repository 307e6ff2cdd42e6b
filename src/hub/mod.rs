//! Models from the Hugging Face hub: parses their names, pulls them, and finds, lists and removes pulled models.
//!
//! This module knows files and checksums, and nothing of what a model computes. Only [`pull()`] uses the network:
//! pulled models are found and served without it. Files that cannot be checked, and paths outside the repository, are
//! refused. Downloaded files are never executed.
//!
//! Invariants: a file under its final name is complete and hashed; the token goes to the endpoint and to no host that
//! the endpoint redirects to; every wait, redirect, listing and retry is bounded.

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
pub use name::{ModelName, RepoId};
pub use pull::{Progress, pull};
pub use settings::{Patience, Settings, standard_cache};
