//! The signals of child processes.

use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::error::Error;
use super::generate::runtime;

/// Makes this process ignore SIGTERM, SIGINT and SIGHUP, with which a service manager ends all processes of a service.
/// The parent decides when this process ends. The signals stay ignored after the returned runtime is dropped.
pub fn outlive_signals() -> Result<Runtime, Error> {
    let runtime = runtime()?;
    {
        let _within = runtime.enter();
        for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
            drop(signal(kind).map_err(Error::Runtime)?);
        }
    }
    Ok(runtime)
}
