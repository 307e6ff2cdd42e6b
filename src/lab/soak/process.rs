//! Memory, file descriptors and threads of a server and of its device process, from `/proc`. A process that has ended
//! has no figures.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::bench::statistics::median;
use crate::device::status_field;

/// Number of samples of a figure, and the time between two samples.
const SAMPLES: usize = 5;
const APART: Duration = Duration::from_millis(100);

/// The resources of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Held {
    pub resident_kib: u64,
    /// The part of it that no file backs. A leak increases it.
    pub anonymous_kib: u64,
    pub descriptors: u64,
    pub threads: u64,
}

impl Held {
    pub fn of(pid: u32) -> Option<Self> {
        let folder = format!("/proc/{pid}");
        let status = std::fs::read_to_string(Path::new(&folder).join("status")).ok()?;
        let field = |name: &str| status_field(&status, name);
        let descriptors = std::fs::read_dir(Path::new(&folder).join("fd")).ok()?.count() as u64;
        Some(Self {
            resident_kib: field("VmRSS")?,
            anonymous_kib: field("RssAnon")?,
            descriptors,
            threads: field("Threads")?,
        })
    }

    /// The median of several samples of each figure.
    pub fn settled(pid: u32) -> Option<Self> {
        let samples = (0..SAMPLES).map(|i| {
            if i > 0 {
                std::thread::sleep(APART);
            }
            Self::of(pid)
        });
        let samples: Vec<Self> = samples.collect::<Option<_>>()?;
        let of = |figure: fn(&Self) -> u64| median(samples.iter().map(|held| figure(held) as f64)) as u64;
        Some(Self {
            resident_kib: of(|held| held.resident_kib),
            anonymous_kib: of(|held| held.anonymous_kib),
            descriptors: of(|held| held.descriptors),
            threads: of(|held| held.threads),
        })
    }
}

/// All children of a server. A child that has ended is listed until the server has waited for it.
pub fn children(server: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        // The name of a program may contain blanks and brackets, so it ends at the last bracket.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        parent == Some(server)
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_child).collect()
}

/// The device process of a server; `None` while there is none.
pub fn device_process(server: u32) -> Option<u32> {
    // A process that has ended has no arguments.
    let has_device = |pid: &u32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|word| word == b"device-process")
    };
    children(server).into_iter().find(has_device)
}

/// Makes a server read its configuration again.
pub fn hang_up(server: u32) -> std::io::Result<()> {
    let pid = Pid::from_raw(server as i32).ok_or(std::io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, Signal::HUP)?)
}
