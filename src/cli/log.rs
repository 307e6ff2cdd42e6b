//! The log: lines to standard error, written by a separate thread.
//!
//! A thread that logs never waits for the reader, and nothing here panics. Where the reader is gone, or does not read,
//! lines are lost and counted, and the log reports their number once somebody reads again. [`say`] prints messages
//! outside the log.

use std::fmt::Display;
use std::io::{self, IsTerminal, Stderr, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt};

use crate::text::panic_message;

/// Most lines that wait for the thread; further lines are lost. A line has some hundred bytes, so these are about a
/// MiB.
const WAITING_LINES: usize = 4096;
/// Bytes that a writable pipe takes at once (POSIX: `PIPE_BUF`, at least 512; 4096 on Linux).
const CHUNK_BYTES: usize = 4096;
/// How often the thread checks whether the process ends while nobody reads.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Longest time for writing the waiting lines when the process ends and nobody reads.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Counter of the lines that did not fit into the queue; set when the log starts.
static QUEUE: OnceLock<ErrorCounter> = OnceLock::new();
/// Number of lines that could not be written.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);
/// Deadline when the process ends: from then on, lines that cannot be written at once are lost.
static END: OnceLock<Instant> = OnceLock::new();

/// Number of lines lost since the start.
pub fn lost_lines() -> u64 {
    let queue = QUEUE.get().map_or(0, ErrorCounter::dropped_lines);
    queue as u64 + UNWRITTEN.load(Ordering::Relaxed)
}

/// The log of the process. Dropping it writes the waiting lines, for [`LAST_LINES`] at most.
pub struct Log {
    pub level: Level,
    writer: Option<WorkerGuard>,
}

impl Log {
    /// Starts the log, once in a process. Panics are logged too.
    pub fn start(filter: EnvFilter, with_time: bool) -> Self {
        let queue = NonBlockingBuilder::default().buffered_lines_limit(WAITING_LINES).lossy(true);
        let (lines, writer) = queue.thread_name("log").finish(Patient { reported: 0 });
        let _ = QUEUE.set(lines.error_counter());
        let (filter, handle) = reload::Layer::new(filter);
        let format = fmt::layer()
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .with_writer(lines)
            // The subscriber would print them to standard error, where the log could not be written.
            .log_internal_errors(false);
        let log = tracing_subscriber::registry().with(filter);
        if with_time {
            log.with(format).init()
        } else {
            log.with(format.without_time()).init()
        }
        std::panic::set_hook(Box::new(|panic| {
            let thread = thread::current();
            let name = thread.name().unwrap_or("without a name");
            let place = panic.location().map_or("nowhere".into(), |place| place.to_string());
            tracing::error!("a panic in thread {name:?} at {place}: {}", panic_message(panic.payload()));
        }));
        Self { level: Level(handle), writer: Some(writer) }
    }
}

/// The filter of a [`Log`], which can be changed while it runs. Clones share one filter.
#[derive(Clone)]
pub struct Level(Handle<EnvFilter, Registry>);

impl Level {
    /// Replaces the filter.
    pub fn set(&self, filter: EnvFilter) {
        // It fails only where the log is gone.
        let _ = self.0.reload(filter);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let end = *END.get_or_init(|| Instant::now() + LAST_LINES);
        if !is_writable(&io::stderr(), &Timespec::default()) {
            // The guard prints to standard output where the queue is full; after this pause the queue is empty.
            thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        drop(self.writer.take());
    }
}

/// Writes a line to standard error, outside the log. The line is lost where standard error is gone, or where nobody
/// reads while the process ends.
pub fn say(line: impl Display) {
    let _ = write_whole(format!("{line}\n").as_bytes());
}

/// Standard error for the log's thread: a write waits until somebody reads, or until the process ends, and never fails.
struct Patient {
    /// Number of lost lines that the log has reported.
    reported: u64,
}

impl Write for Patient {
    /// Writes one whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = lost_lines();
        if lost > self.reported && write_whole(lost_note(lost - self.reported).as_bytes()).is_ok() {
            self.reported = lost;
        }
        if write_whole(line).is_err() {
            UNWRITTEN.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lost_note(lines: u64) -> String {
    format!(" WARN {lines} lines of the log were lost here: nobody read them in time\n")
}

fn write_whole(mut text: &[u8]) -> io::Result<()> {
    let error = io::stderr();
    while !text.is_empty() {
        wait_for(&error)?;
        let n = (&error).write(&text[..text.len().min(CHUNK_BYTES)])?;
        text = &text[n..];
    }
    Ok(())
}

/// Waits until some bytes can be written at once; fails where the process ends first.
fn wait_for(error: &Stderr) -> io::Result<()> {
    while !is_writable(error, &LOOK_AGAIN) {
        if END.get().is_some_and(|end| *end <= Instant::now()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Whether a write would not block, within `patience`. Where the reader is gone a write fails, which is no blocking
/// either.
fn is_writable(error: &Stderr, patience: &Timespec) -> bool {
    let mut polled = [PollFd::new(error, PollFlags::OUT)];
    // If polling itself fails, the write is attempted.
    !matches!(poll(&mut polled, Some(patience)), Ok(0) | Err(rustix::io::Errno::INTR))
}
