//! The log: lines to standard error, written by a separate thread.
//!
//! A thread that logs never waits for the reader of standard error, and nothing here panics. If the reader is gone or
//! does not read, lines are lost and counted. When it reads again, the log reports their number. [`say`] prints
//! messages outside the log, in the log's format.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::io::{self, Stderr, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use tracing::{Event, Subscriber};
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, layer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer as _, Registry};

use super::terminal::{dim, has_colors};
use crate::config::LogFormat;
use crate::text::{is_unseen, panic_message, visible};

/// Maximum number of lines that wait for the thread; further lines are lost. A line has some hundred bytes, so this is
/// about a MiB.
const WAITING_LINES: usize = 4096;
/// Bytes that a writable pipe accepts without blocking (POSIX: `PIPE_BUF`, at least 512; 4096 on Linux).
const CHUNK_BYTES: usize = 4096;
/// How often the thread checks whether the process ends, while the reader does not read.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Longest time for writing the waiting lines at the end of the process, if the reader does not read.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Set when the log starts.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();
/// Counter of the lines that did not fit into the queue; set when the log starts.
static QUEUE: OnceLock<ErrorCounter> = OnceLock::new();
/// Number of lines that could not be written.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);
/// Deadline at the end of the process: after it, lines that cannot be written without blocking are lost.
static DEADLINE: OnceLock<Instant> = OnceLock::new();

/// Number of lines lost since the start.
pub fn lost_lines() -> u64 {
    let queue = QUEUE.get().map_or(0, ErrorCounter::dropped_lines);
    queue as u64 + UNWRITTEN.load(Ordering::Relaxed)
}

/// The log of the process. Dropping it writes the waiting lines, for [`FLUSH_TIMEOUT`] at most.
pub struct Log {
    pub level: Level,
    writer: Option<WorkerGuard>,
}

impl Log {
    /// Starts the log, once in a process. Panics are logged too. The text format has times if `with_time`. The journal
    /// adds its own times, and JSON always has times.
    pub fn start(filter: EnvFilter, format: Option<LogFormat>, with_time: bool) -> Self {
        // systemd sets the variable if it has connected standard error to the journal.
        let is_journal = std::env::var_os("JOURNAL_STREAM").is_some();
        let default = if is_journal { LogFormat::Journal } else { LogFormat::Text };
        let format = *FORMAT.get_or_init(|| format.unwrap_or(default));
        let queue = NonBlockingBuilder::default().buffered_lines_limit(WAITING_LINES).lossy(true);
        let (lines, writer) = queue.thread_name("log").finish(LogWriter { reported: 0 });
        let _ = QUEUE.set(lines.error_counter());
        let (filter, handle) = reload::Layer::new(filter);
        let text = layer()
            .with_target(false)
            .with_ansi(format == LogFormat::Text && has_colors(&io::stderr()))
            .with_writer(lines)
            // The subscriber would print them to standard error, to which the log could not be written.
            .log_internal_errors(false);
        let written = match format {
            LogFormat::Text if with_time => text.boxed(),
            LogFormat::Text => text.without_time().boxed(),
            LogFormat::Journal => text.without_time().map_event_format(Prioritized).boxed(),
            LogFormat::Json => text.json().flatten_event(true).with_current_span(false).boxed(),
        };
        tracing_subscriber::registry().with(filter).with(written).init();
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
        // This fails only after the end of the log.
        let _ = self.0.reload(filter);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let end = *DEADLINE.get_or_init(|| Instant::now() + FLUSH_TIMEOUT);
        if !is_writable(&io::stderr(), &Timespec::default()) {
            // The guard prints to standard output if the queue is full. After this pause the queue is empty.
            thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        drop(self.writer.take());
    }
}

/// Writes the priority before an event, as systemd expects it (sd-daemon(3)).
struct Prioritized<F>(F);

impl<S, N, F> FormatEvent<S, N> for Prioritized<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        to.write_str(priority(*event.metadata().level()))?;
        self.0.format_event(context, to, event)
    }
}

const fn priority(level: tracing::Level) -> &'static str {
    match level {
        tracing::Level::ERROR => "<3>",
        tracing::Level::WARN => "<4>",
        tracing::Level::INFO => "<6>",
        tracing::Level::DEBUG | tracing::Level::TRACE => "<7>",
    }
}

/// Writes a line to standard error, outside the log. The line is lost if the reader of standard error is gone, or does
/// not read while the process ends.
pub fn say(line: impl Display) {
    let line = line.to_string();
    let _ = write_whole(formatted(tracing::Level::ERROR, &visible(&line)).as_bytes());
}

/// Writes additional information to standard error as [`say`] does, dimmed to distinguish it from an answer.
pub fn note(lines: impl Display) {
    let lines = lines.to_string();
    let colors = FORMAT.get() == Some(&LogFormat::Text) && has_colors(&io::stderr());
    // `visible` has escaped all control characters, so the text cannot end the dimming.
    let _ = write_whole(formatted(tracing::Level::INFO, &dim(&visible(&lines), colors)).as_bytes());
}

/// A line outside the log, in its format.
fn formatted(level: tracing::Level, line: &str) -> String {
    match FORMAT.get() {
        Some(LogFormat::Json) => format!("{}\n", json!({ "level": level.as_str(), "message": line })),
        Some(LogFormat::Journal) => format!("{}{line}\n", priority(level)),
        Some(LogFormat::Text) | None => format!("{line}\n"),
    }
}

/// Standard error for the log's thread: a write waits for the reader or for the end of the process, and never fails.
struct LogWriter {
    /// The number of lost lines that the log has reported already.
    reported: u64,
}

impl Write for LogWriter {
    /// Writes one whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = lost_lines();
        if lost > self.reported && write_whole(lost_note(lost - self.reported).as_bytes()).is_ok() {
            self.reported = lost;
        }
        if write_whole(&readable(line, FORMAT.get() == Some(&LogFormat::Json))).is_err() {
            UNWRITTEN.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line of the log with invisible characters escaped, in the syntax of JSON or Rust. A line may quote names from
/// requests and files. The formatter escapes control characters; it also writes some itself, so they are not escaped
/// here.
fn readable(line: &[u8], is_json: bool) -> Cow<'_, [u8]> {
    let Ok(text) = std::str::from_utf8(line) else { return line.into() };
    if text.is_ascii() || !text.contains(is_unseen) {
        return line.into();
    }
    let mut shown = String::with_capacity(2 * text.len());
    for c in text.chars() {
        match (is_unseen(c), is_json) {
            (false, _) => shown.push(c),
            (true, false) => shown.extend(c.escape_unicode()),
            (true, true) => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| shown += &format!("\\u{unit:04x}"));
            }
        }
    }
    shown.into_bytes().into()
}

fn lost_note(lines: u64) -> String {
    let note = format!("{lines} lines of the log were lost here: they were not read in time");
    match FORMAT.get() {
        Some(LogFormat::Json | LogFormat::Journal) => formatted(tracing::Level::WARN, &note),
        Some(LogFormat::Text) | None => format!(" WARN {note}\n"),
    }
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

/// Waits until some bytes can be written without blocking; fails if the process ends first.
fn wait_for(error: &Stderr) -> io::Result<()> {
    while !is_writable(error, &POLL_INTERVAL) {
        if DEADLINE.get().is_some_and(|end| *end <= Instant::now()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Waits at most `patience` until a write would not block. If the reader is gone, a write fails without blocking.
fn is_writable(error: &Stderr, patience: &Timespec) -> bool {
    let mut polled = [PollFd::new(error, PollFlags::OUT)];
    // If polling itself fails, the write is attempted.
    !matches!(poll(&mut polled, Some(patience)), Ok(0) | Err(rustix::io::Errno::INTR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_invisible_characters_as_escapes() {
        let line = " WARN \u{1b}[2mmodel\u{1b}[0m a\u{202e}b\u{e0041} ü\n".as_bytes();
        let text = " WARN \u{1b}[2mmodel\u{1b}[0m a\\u{202e}b\\u{e0041} ü\n";
        assert_eq!(readable(line, false), text.as_bytes());
        let json = json!({"message": "a\u{202e}b\u{e0041} ü"}).to_string();
        let shown = readable(json.as_bytes(), true);
        assert_eq!(shown, r#"{"message":"a\u202eb\udb40\udc41 ü"}"#.as_bytes());
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&shown).expect("JSON").to_string(), json);
        assert!(matches!(readable("ü\n".as_bytes(), false), Cow::Borrowed(_)));
    }
}
