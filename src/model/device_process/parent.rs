//! The parent's end: a [`Runner`] that another process runs.

use std::borrow::Cow::Borrowed;
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

use super::channel::Channel;
use super::message::{Answer, Call, Ready, Words};
use crate::config::Courtesy;
use crate::model::{Batch, DraftRequest, Limits, Runner, RunnerError, Sampled, Sampling, Ticket};

/// How often a wait looks at the device's progress, and whether it is cancelled.
const SLICE: Duration = Duration::from_millis(100);
/// How long a child that was told to end may take, until it is killed.
const END: Duration = Duration::from_secs(3);
/// How long a child that was killed, or that died, may take to be gone. One that is stuck in its driver cannot even be
/// killed.
const KILLED: Duration = Duration::from_secs(10);

/// A child process and the channel to it. Dropping it ends the child, and so gives back what the device has of it.
pub struct Connection {
    child: Child,
    channel: Channel,
    cancelled: Arc<AtomicBool>,
    /// Whether the child is of no more use.
    failed: bool,
}

impl Connection {
    /// Starts `command`, whose standard input is its end of the channel ([`Channel::from_stdin`]). Every wait for it ends
    /// soon once `cancelled` is set.
    pub fn spawn(mut command: Command, cancelled: &Arc<AtomicBool>) -> io::Result<Self> {
        let (channel, other) = Channel::new()?;
        // The keys that interrupt this process are not for the child, which ends when this process does.
        let child = command.stdin(other).process_group(0).spawn()?;
        Ok(Self { child, channel, cancelled: Arc::clone(cancelled), failed: false })
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn send(&mut self, message: &impl Serialize) -> Result<(), RunnerError> {
        match self.channel.send(message) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(self.ended()),
            Err(error) => Err(self.broken(&error)),
        }
    }

    pub fn send_files(&mut self, files: &[impl AsFd]) -> Result<(), RunnerError> {
        self.channel.send_files(files).map_err(|error| self.broken(&error))
    }

    /// The child's next message. With `patience`, the device must get on meanwhile.
    pub fn receive<T: DeserializeOwned>(&mut self, patience: Option<Duration>) -> Result<T, RunnerError> {
        // Slices are counted instead of time, so that a server that was stopped meanwhile does not blame the device.
        let (mut progress, mut still) = (None, Duration::ZERO);
        while !self.channel.poll(SLICE).map_err(|error| self.broken(&error))? {
            let now = self.channel.read_progress().ok();
            still = if now == progress { still + SLICE } else { Duration::ZERO };
            progress = now;
            if self.cancelled.load(Ordering::Acquire) {
                self.failed = true;
                return Err(RunnerError::Lost("it was waited for no longer, since the server ends".into()));
            }
            if let Some(patience) = patience.filter(|patience| still >= *patience) {
                self.failed = true;
                return Err(RunnerError::Hung { seconds: patience.as_secs() });
            }
        }
        match self.channel.receive() {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.ended()),
            Err(error) => Err(self.broken(&error)),
        }
    }

    /// The runner that the child has, once it has loaded it. A device that finishes nothing for `patience` while a step is
    /// under way hangs.
    pub fn into_runner(mut self, patience: Duration) -> Result<DeviceProcess, RunnerError> {
        let Ready { limits, has_draft } = self.receive(None)?;
        Ok(DeviceProcess { connection: self, limits, has_draft, next_ticket: 0, patience })
    }

    /// The child has closed its end, which only its end does.
    fn ended(&mut self) -> RunnerError {
        self.failed = true;
        let how = reap(&mut self.child, KILLED).map_or("closed its channel".to_owned(), describe);
        RunnerError::Lost(format!("the process that drives it {how}"))
    }

    fn broken(&mut self, error: &io::Error) -> RunnerError {
        self.failed = true;
        RunnerError::Lost(format!("no word from the process that drives it: {error}"))
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
                "process {}, which drove the GPU, is not gone {} s after it was killed: its driver hangs, or the machine is \
                 overloaded; its memory is not free yet",
                self.child.id(),
                patience.as_secs()
            );
            // Whenever it ends, nothing of it is to stay.
            let id = Pid::from_child(&self.child);
            let wait = move || waitpid(Some(id), WaitOptions::empty()).is_ok();
            drop(thread::Builder::new().name("reaper".into()).spawn(wait));
        }
    }
}

/// A runner in a child process.
pub struct DeviceProcess {
    connection: Connection,
    limits: Limits,
    has_draft: bool,
    next_ticket: u64,
    patience: Duration,
}

impl DeviceProcess {
    fn answer(&mut self) -> Result<Answer, RunnerError> {
        match self.connection.receive(Some(self.patience))? {
            Answer::Failed(error) => {
                self.connection.failed = true;
                Err(error)
            }
            answer => Ok(answer),
        }
    }

    /// Sends a call. What a child that is gone said last is the reason, if it said anything.
    fn call(&mut self, call: &Call) -> Result<(), RunnerError> {
        self.connection.send(call).map_err(|gone| match self.connection.channel.receive() {
            Ok(Some(Answer::Failed(error))) => error,
            _ => gone,
        })
    }

    fn unexpected(&mut self) -> RunnerError {
        self.connection.failed = true;
        RunnerError::Lost("the process that drives it answered another question".into())
    }
}

impl Runner for DeviceProcess {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        self.call(&Call::Submit(Borrowed(batch), Borrowed(sampling)))?;
        self.next_ticket += 1;
        Ok(Ticket(self.next_ticket))
    }

    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError> {
        assert_eq!(ticket.0, self.next_ticket, "masks of another step than the last one");
        self.call(&Call::Masks(words.iter().map(|words| Words(Arc::clone(words))).collect()))
    }

    fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<(), RunnerError> {
        self.call(&Call::Courtesy(courtesy))
    }

    fn wait(&mut self, _: Ticket) -> Result<Sampled, RunnerError> {
        self.call(&Call::Wait)?;
        match self.answer()? {
            Answer::Sampled(sampled) => Ok(sampled),
            _ => Err(self.unexpected()),
        }
    }

    fn has_draft(&self) -> bool {
        self.has_draft
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        self.call(&Call::Draft(Borrowed(requests)))?;
        match self.answer()? {
            Answer::Drafted(tokens) => Ok(tokens),
            _ => Err(self.unexpected()),
        }
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        self.call(&Call::Probe)?;
        match self.answer()? {
            Answer::Probed => Ok(()),
            _ => Err(self.unexpected()),
        }
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
        (Signal::ABORT, "SIGABRT"),
        (Signal::ILL, "SIGILL"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL, which is also how Linux ends a process where memory is short"),
    ];
    let named = names.iter().find(|(known, _)| known.as_raw() == signal);
    named.map_or_else(|| format!("signal {signal}"), |(_, name)| (*name).to_owned())
}
