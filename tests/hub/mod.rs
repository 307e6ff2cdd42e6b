//! The hub and the cache of pulled models.

mod pull;
mod service;
