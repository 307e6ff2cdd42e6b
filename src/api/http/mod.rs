//! HTTP beneath the wire formats: connections, TLS, authentication, admission, and the state of the server.

pub(in crate::api) mod fair_semaphore;
pub(in crate::api) mod auth;
pub(in crate::api) mod counters;
pub(in crate::api) mod failures;
pub(in crate::api) mod guarded;
pub(in crate::api) mod health;
pub(in crate::api) mod keys;
pub(in crate::api) mod listen;
pub(in crate::api) mod metrics;
pub(in crate::api) mod middleware;
pub(in crate::api) mod patient;
pub(in crate::api) mod status;
pub(in crate::api) mod tls;
pub(in crate::api) mod wrong_keys;
