//! What this process uses: processor time, memory, open files.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The number in a line of `/proc/PID/status`; in KiB if it is a size of memory.
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
    // One of them is the folder itself, which is open while it is read.
    std::fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as u64 - 1)
}

/// Resident memory of this process in bytes: now, and at its peak.
pub fn resident_bytes() -> (Option<u64>, Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| status_field(&status, name).map(|kib| kib * 1024);
    (bytes("VmRSS"), bytes("VmHWM"))
}
