//! The log: lines to standard error, written by a thread of their own.
//!
//! Nobody who logs waits for who reads, and nothing here panics: where the reader is gone, or takes nothing, lines are lost
//! and counted, and the log says how many as soon as somebody reads again. [`say`] is for what a command tells beside it.

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

/// Lines that may wait for the thread; more are lost. A line has some hundred bytes, so these are about a MiB.
const WAITING_LINES: usize = 4096;
/// A pipe that says that it can be written to takes so much at once (POSIX: `PIPE_BUF`, of at least 512; Linux has 4096).
const CHUNK_BYTES: usize = 4096;
/// How often the thread looks whether the process ends while nobody reads.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// For what waits when the process ends, if nobody reads.
const LAST_LINES: Duration = Duration::from_millis(500);

/// Lines that did not fit into the queue; set when the log starts.
static QUEUE: OnceLock<ErrorCounter> = OnceLock::new();
/// Lines that could not be written.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);
/// When the process ends: from then on, what cannot be written at once is lost.
static END: OnceLock<Instant> = OnceLock::new();

/// Lines that were lost since the start.
pub fn lost_lines() -> u64 {
    let queue = QUEUE.get().map_or(0, ErrorCounter::dropped_lines);
    queue as u64 + UNWRITTEN.load(Ordering::Relaxed)
}

/// The process's log. Dropped, it writes what waits, for [`LAST_LINES`] at most.
pub struct Log {
    pub level: Level,
    writer: Option<WorkerGuard>,
}

impl Log {
    /// Starts it; once in a process. A panic is a line of it too.
    pub fn start(filter: EnvFilter, with_time: bool) -> Self {
        let queue = NonBlockingBuilder::default().buffered_lines_limit(WAITING_LINES).lossy(true);
        let (lines, writer) = queue.thread_name("log").finish(Patient { told: 0 });
        let _ = QUEUE.set(lines.error_counter());
        let (filter, handle) = reload::Layer::new(filter);
        let format = fmt::layer()
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .with_writer(lines)
            // It would print them to where the log could not be written.
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

/// What decides what a [`Log`] has in it. Clones are one.
#[derive(Clone)]
pub struct Level(Handle<EnvFilter, Registry>);

impl Level {
    /// From now on, what `filter` lets through.
    pub fn set(&self, filter: EnvFilter) {
        // It fails where the log is gone, and then there is nobody to tell.
        let _ = self.0.reload(filter);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let end = *END.get_or_init(|| Instant::now() + LAST_LINES);
        if !is_writable(&io::stderr(), &Timespec::default()) {
            // The guard prints to standard output where it finds the queue full; it is empty soon after this.
            thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        drop(self.writer.take());
    }
}

/// Writes a line to standard error, beside the log. Where that is gone, the line is lost; where nobody reads while the
/// process ends, too.
pub fn say(line: impl Display) {
    let _ = write_whole(format!("{line}\n").as_bytes());
}

/// Standard error as the log's thread writes to it: it waits until somebody reads, or the process ends, and never fails.
struct Patient {
    /// Lost lines that the log has told of.
    told: u64,
}

impl Write for Patient {
    /// Takes one line, whole.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = lost_lines();
        if lost > self.told && write_whole(lost_note(lost - self.told).as_bytes()).is_ok() {
            self.told = lost;
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

/// Waits until some bytes can be written at once; fails where the process ends before.
fn wait_for(error: &Stderr) -> io::Result<()> {
    while !is_writable(error, &LOOK_AGAIN) {
        if END.get().is_some_and(|end| *end <= Instant::now()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Whether a write would not wait, within `patience`. It would fail where the reader is gone, and that is no waiting.
fn is_writable(error: &Stderr, patience: &Timespec) -> bool {
    let mut polled = [PollFd::new(error, PollFlags::OUT)];
    // What cannot be asked is written to.
    !matches!(poll(&mut polled, Some(patience)), Ok(0) | Err(rustix::io::Errno::INTR))
}
