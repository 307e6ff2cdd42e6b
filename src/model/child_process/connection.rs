//! The parent's end of a child process.

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

use super::Channel;
use super::channel::Sign;

/// How often a wait looks at the child's signs of life, and whether it is cancelled.
const SLICE: Duration = Duration::from_millis(100);
/// How long a child that runs may show no sign of that. It shows twenty in a second.
const STOPPED: Duration = Duration::from_secs(10);
/// How long a child that was told to end may take, until it is killed.
const END: Duration = Duration::from_secs(3);
/// How long a child that was killed, or that died, may take to be gone. One that is stuck in its driver cannot even be
/// killed.
const KILLED: Duration = Duration::from_secs(10);

/// Why a child is of no more use. The device is "it".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionError {
    #[error("it was waited for no longer, since the server ends")]
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
    #[error("no word from the process that drives it: {0}")]
    Broken(String),
}

/// A child process and the channel to it. Dropping it ends the child, and so gives back what the device has of it.
pub struct Connection {
    child: Child,
    channel: Channel,
    /// What the child drives, in words.
    device: &'static str,
    cancelled: Arc<AtomicBool>,
    /// How long the end of a child that closed its channel is waited for, to say how it ended.
    last_wait: Duration,
    /// Whether the child is of no more use.
    failed: bool,
}

impl Connection {
    /// Starts `command`, whose standard input is its end of the channel ([`Channel::from_stdin`]). It drives `device`.
    /// Every wait for it ends soon once `cancelled` is set.
    pub fn spawn(
        mut command: Command,
        device: &'static str,
        cancelled: &Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let (channel, other) = Channel::new()?;
        // The keys that interrupt this process are not for the child, which ends when this process does.
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

    /// Waits no longer than this for the end of a child that closed its channel.
    pub fn with_last_wait(mut self, last_wait: Duration) -> Self {
        self.last_wait = last_wait;
        self
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Says that the child is of no more use, so that its end is not waited for.
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

    /// The child's next message. Its device must get on meanwhile, and may not finish anything for `patience` at most; the
    /// process itself must run.
    pub fn receive<T: DeserializeOwned>(&mut self, patience: Duration) -> Result<T, ConnectionError> {
        self.receive_meanwhile(patience, || {})
    }

    /// As [`Connection::receive`]. `meanwhile` is called several times in a second.
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

    /// What a child that has ended said last, if it said anything that was not received yet.
    pub fn last_words<T: DeserializeOwned>(&mut self) -> Option<T> {
        self.channel.receive().ok().flatten()
    }

    /// The child has closed its end, which only its end does.
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
        // A server that ends leaves the child to the system.
        let patience = if self.cancelled.load(Ordering::Acquire) { END } else { KILLED };
        if reap(&mut self.child, patience).is_none() {
            tracing::error!(
                "process {}, which drove the {}, is not gone {} s after it was killed: its driver hangs, or the machine is \
                 overloaded; its memory is not free yet",
                self.child.id(),
                self.device,
                patience.as_secs()
            );
            // Whenever it ends, nothing of it is to stay.
            let id = Pid::from_child(&self.child);
            let wait = move || waitpid(Some(id), WaitOptions::empty()).is_ok();
            drop(thread::Builder::new().name("reaper".into()).spawn(wait));
        }
    }
}

/// For how long a sign has stood still. Slices are counted instead of time, so that a server that was stopped meanwhile does
/// not blame the child.
#[derive(Default)]
struct Still {
    last: Option<u64>,
    since: Duration,
}

impl Still {
    /// Takes what the sign says a slice later.
    fn look(&mut self, now: Option<u64>) {
        self.since = if now == self.last { self.since + SLICE } else { Duration::ZERO };
        self.last = now;
    }
}

/// Waits for a child's end, for `patience` at least.
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

/// How a process ended, as the end of a sentence about it.
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

    /// A child that says nothing, and shows no sign of life.
    fn silent(cancelled: &Arc<AtomicBool>) -> Connection {
        let mut command = Command::new("sleep");
        command.arg("600");
        Connection::spawn(command, "GPU", cancelled).unwrap()
    }

    #[test]
    fn a_child_that_says_nothing_is_waited_for_no_longer_than_it_may_take() {
        let mut child = silent(&Arc::default());
        let mut looks = 0;
        let patience = 3 * SLICE;
        let error = child.receive_meanwhile::<u8>(patience, || looks += 1).unwrap_err();
        assert_eq!((error, looks), (ConnectionError::Hung { seconds: 0 }, 3));
        let cancelled = Arc::new(AtomicBool::new(true));
        assert_eq!(silent(&cancelled).receive::<u8>(KILLED), Err(ConnectionError::Cancelled));
    }

    #[test]
    fn a_sign_stands_still_for_as_long_as_it_says_the_same() {
        let mut still = Still::default();
        let mut since = |sign| {
            still.look(sign);
            still.since / SLICE.as_millis() as u32
        };
        let said = [None, None, Some(5), Some(5), Some(5), Some(6), None].map(&mut since);
        assert_eq!(said, [1, 2, 0, 1, 2, 0, 0].map(Duration::from_millis));
    }
}
