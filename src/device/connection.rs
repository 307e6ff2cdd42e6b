//! The parent's end of a child process: it bounds every wait, and ends the child when it is dropped.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::channel::{Channel, Sign};

/// How often a wait looks at the child's signs of life, and whether it is cancelled.
const SLICE: Duration = Duration::from_millis(100);
/// How long the heartbeat of a child may stay the same. It changes twenty times a second.
const STOPPED: Duration = Duration::from_secs(10);
/// How long a child may take to end after its channel was closed. Then it is killed.
const END: Duration = Duration::from_secs(3);
/// Longest wait for the end of a child that was killed or that died. A child that is stuck in its driver cannot even be
/// killed.
const KILLED: Duration = Duration::from_secs(10);

/// Why the child process cannot be used. In the texts, "it" is the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionError {
    #[error("the wait for it was cancelled because the server ends")]
    Cancelled,
    #[error("it has finished nothing for {seconds} s")]
    Hung { seconds: u64 },
    #[error(
        "the process that drives it has not run for {seconds} s: a signal has stopped it, or the machine is overloaded"
    )]
    Stopped { seconds: u64 },
    /// How the process ended.
    #[error("the process that drives it {0}")]
    Ended(String),
    #[error("the channel to the process that drives it failed: {0}")]
    Broken(String),
}

/// A child process and the channel to it. Dropping it ends the child, which frees its memory on the device.
pub struct Connection {
    child: Child,
    channel: Channel,
    /// The name of the device that the child drives.
    device: &'static str,
    cancelled: Arc<AtomicBool>,
    /// Longest wait for the end of a child that closed its channel, to report how it ended.
    last_wait: Duration,
    /// Whether the child cannot be used any more.
    failed: bool,
}

impl Connection {
    /// Starts `command`, whose standard input is its end of the channel ([`Channel::from_stdin`]). It drives `device`.
    /// When `cancelled` is set, every wait for the child ends soon.
    pub fn spawn(
        mut command: Command,
        device: &'static str,
        cancelled: &Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let (channel, other) = Channel::new()?;
        // Ctrl-C must not interrupt the child, which ends when this process ends.
        let child = command.stdin(other).process_group(0).spawn()?;
        Ok(Self {
            child,
            channel,
            device,
            cancelled: Arc::clone(cancelled),
            last_wait: KILLED,
            failed: false,
        })
    }

    /// Sets the longest wait for the end of a child that closed its channel.
    pub fn with_last_wait(mut self, last_wait: Duration) -> Self {
        self.last_wait = last_wait;
        self
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Marks the child as unusable, so that it is killed without a wait when this is dropped.
    pub fn give_up(&mut self) {
        self.failed = true;
    }

    pub fn send(&mut self, message: &impl Serialize) -> Result<(), ConnectionError> {
        let sent = self.channel.send(message);
        self.checked(sent)
    }

    pub fn send_files(&mut self, files: &[impl AsFd]) -> Result<(), ConnectionError> {
        let sent = self.channel.send_files(files);
        self.checked(sent)
    }

    fn checked(&mut self, sent: io::Result<()>) -> Result<(), ConnectionError> {
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => self.ended(),
            _ => self.broken(&error),
        })
    }

    /// The child's next message. It is an error if the device makes no progress for `patience` during the wait, or if
    /// the process does not run.
    pub fn receive<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T, ConnectionError> {
        self.receive_meanwhile(patience, || {})
    }

    /// Like [`Connection::receive`]. `meanwhile` is called several times a second.
    pub fn receive_meanwhile<T: DeserializeOwned>(
        &mut self,
        patience: Duration,
        mut meanwhile: impl FnMut(),
    ) -> Result<T, ConnectionError> {
        let [mut progress, mut beats] = [Still::default(), Still::default()];
        while !self.channel.poll(SLICE).map_err(|error| self.broken(&error))? {
            meanwhile();
            progress.look(self.channel.read(Sign::Progress));
            beats.look(self.channel.read(Sign::Beat));
            let failed = if self.cancelled.load(Ordering::Acquire) {
                ConnectionError::Cancelled
            } else if beats.last.is_some() && beats.since >= STOPPED {
                ConnectionError::Stopped { seconds: STOPPED.as_secs() }
            } else if progress.since >= patience {
                ConnectionError::Hung { seconds: patience.as_secs() }
            } else {
                continue;
            };
            self.failed = true;
            return Err(failed);
        }
        match self.channel.receive() {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.ended()),
            Err(error) => Err(self.broken(&error)),
        }
    }

    /// The next message that a child sent before it ended, if it was not received yet. Does not wait: the child may live
    /// on after a message could not be sent to it.
    pub fn last_words<T: DeserializeOwned>(&mut self) -> Option<T> {
        let has_message = self.channel.poll(Duration::ZERO).unwrap_or(false);
        has_message.then(|| self.channel.receive().ok().flatten()).flatten()
    }

    /// The child has closed its end of the channel, so it has ended or is ending.
    fn ended(&mut self) -> ConnectionError {
        self.failed = true;
        let how = reap(&mut self.child, self.last_wait).map_or("closed its channel".to_owned(), describe);
        ConnectionError::Ended(how)
    }

    fn broken(&mut self, error: &io::Error) -> ConnectionError {
        self.failed = true;
        ConnectionError::Broken(error.to_string())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let ends = !self.failed && self.channel.end().is_ok() && reap(&mut self.child, END).is_some();
        if ends {
            return;
        }
        let _ = self.child.kill();
        // A server that ends does not wait long: the system ends the child.
        let patience = if self.cancelled.load(Ordering::Acquire) { END } else { KILLED };
        if reap(&mut self.child, patience).is_none() {
            tracing::error!(
                "process {}, which drove the {}, is not gone {} s after it was killed: its driver hangs, or the machine is \
                 overloaded; its memory is not free yet",
                self.child.id(),
                self.device,
                patience.as_secs()
            );
            // Reaps the child whenever it ends, so that no zombie is left.
            let id = Pid::from_child(&self.child);
            let wait = move || waitpid(Some(id), WaitOptions::empty()).is_ok();
            drop(thread::Builder::new().name("reaper".into()).spawn(wait));
        }
    }
}

/// How long a sign has not changed. This counts slices instead of time, because the server itself may have been stopped
/// during the wait.
#[derive(Default)]
struct Still {
    last: Option<u64>,
    since: Duration,
}

impl Still {
    /// Takes the value of the sign one slice later.
    fn look(&mut self, now: Option<u64>) {
        self.since = if now == self.last { self.since + SLICE } else { Duration::ZERO };
        self.last = now;
    }
}

/// Waits at least `patience` for a child's end.
fn reap(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    const PAUSE: Duration = Duration::from_millis(2);
    for _ in 0..=patience.div_duration_f32(PAUSE) as u32 {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) => thread::sleep(PAUSE),
            Err(_) => return None,
        }
    }
    None
}

/// How a process ended, as a phrase that follows "the process".
fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was ended by {}", name_of(signal)),
        (None, Some(code)) => format!("ended with exit status {code}"),
        (None, None) => format!("ended: {status}"),
    }
}

fn name_of(signal: i32) -> String {
    let names = [
        (Signal::SEGV, "SIGSEGV"),
        (Signal::BUS, "SIGBUS"),
        (Signal::ABORT, "SIGABRT, which is also how a program ends that gets no memory"),
        (Signal::ILL, "SIGILL"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL, which is also how Linux ends a process where memory is short"),
    ];
    let named = names.iter().find(|(known, _)| known.as_raw() == signal);
    named.map_or_else(|| format!("signal {signal}"), |(_, name)| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child that sends no message and writes no sign of life.
    fn silent(cancelled: &Arc<AtomicBool>) -> Connection {
        let mut command = Command::new("sleep");
        command.arg("600");
        Connection::spawn(command, "GPU", cancelled).unwrap()
    }

    #[test]
    fn a_wait_for_a_silent_child_is_bounded() {
        let mut child = silent(&Arc::default());
        let mut looks = 0;
        let patience = 3 * SLICE;
        let error = child.receive_meanwhile::<u8>(patience, || looks += 1).unwrap_err();
        assert_eq!((error, looks), (ConnectionError::Hung { seconds: 0 }, 3));
        assert_eq!(silent(&Arc::default()).last_words::<u8>(), None);
        let cancelled = Arc::new(AtomicBool::new(true));
        assert_eq!(silent(&cancelled).receive::<u8>(KILLED), Err(ConnectionError::Cancelled));
    }

    #[test]
    fn the_time_of_a_sign_grows_until_its_value_changes() {
        let mut still = Still::default();
        let mut since = |sign| {
            still.look(sign);
            still.since / SLICE.as_millis() as u32
        };
        let said = [None, None, Some(5), Some(5), Some(5), Some(6), None].map(&mut since);
        assert_eq!(said, [1, 2, 0, 1, 2, 0, 0].map(Duration::from_millis));
    }
}
