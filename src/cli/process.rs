//! Resources that this process uses.

/// Resident memory in bytes: now, and at its peak.
pub fn resident_bytes() -> (Option<u64>, Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (field("VmRSS"), field("VmHWM"))
}
