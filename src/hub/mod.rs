//! Models from the Hugging Face hub: names them, gets them, and finds, lists and removes those that are here.
//!
//! Knows files and checksums, and nothing of what a model computes. The network is used by [`pull`] alone: what was
//! pulled is found and served without it. Refuses what it cannot check, what lies outside the repository, and to run
//! anything that it downloads.
//!
//! Invariants: a file under its final name is whole and hashed; the token goes to the endpoint and to no host that it
//! redirects to; every wait, redirect, listing and retry is bounded.

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
