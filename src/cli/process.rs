//! What the kernel says of processes, of this one above all.

/// The number of a line of `/proc/PID/status`, in KiB where it is one of memory.
pub fn status_field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Resident memory of this process in bytes: now, and at its peak.
pub fn resident_bytes() -> (Option<u64>, Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| status_field(&status, name).map(|kib| kib * 1024);
    (bytes("VmRSS"), bytes("VmHWM"))
}
