//! What the kernel says of processes, of this one above all.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::error::Error;

/// Has the signals by which a service's manager ends its processes do nothing: the parent decides when this one ends.
/// They have no effect for good, and the runtime is for what else it may do.
pub fn outlive_signals() -> Result<Runtime, Error> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)?;
    {
        let _within = runtime.enter();
        for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
            drop(signal(kind).map_err(Error::Runtime)?);
        }
    }
    Ok(runtime)
}

/// The number of a line of `/proc/PID/status`, in KiB where it is one of memory.
pub fn status_field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Processor time of this process.
pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The number of files that this process has open.
pub fn open_files() -> Option<u64> {
    // One of them is the folder that is read.
    std::fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as u64 - 1)
}

/// Resident memory of this process in bytes: now, and at its peak.
pub fn resident_bytes() -> (Option<u64>, Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| status_field(&status, name).map(|kib| kib * 1024);
    (bytes("VmRSS"), bytes("VmHWM"))
}
