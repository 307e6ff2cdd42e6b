//! The child's end of its channel, and its signs of life, which the parent watches. A thread writes each of them.

use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, getppid, kill_process};

use super::channel::{Channel, Sign};

/// How often a sign of life is written.
const EVERY: Duration = Duration::from_millis(50);

impl Channel {
    /// The child's end, which is its standard input. From then on the child writes a heartbeat, and ends when its
    /// parent ends.
    pub fn from_stdin() -> io::Result<Self> {
        let channel = Self::from_socket(io::stdin().as_fd().try_clone_to_owned()?)?;
        channel.beat()?;
        Ok(channel)
    }

    /// Writes a heartbeat, and ends this process when its parent has ended. The other threads may not notice that,
    /// because a call of the driver may never return. (The parent-death signal of Linux is not suitable: Linux sends it
    /// when the thread that started the child ends.)
    fn beat(&self) -> io::Result<()> {
        let (counter, parent) = (self.counter(Sign::Beat)?, getppid());
        thread::Builder::new().name("heartbeat".into()).spawn(move || {
            let mut beats = 0;
            while getppid() == parent && counter.write(beats).is_ok() {
                thread::sleep(EVERY);
                beats += 1;
            }
            let _ = kill_process(getpid(), Signal::KILL);
        })?;
        Ok(())
    }

    /// Writes `progress`, a number that grows while the device makes progress or is idle on purpose.
    pub fn show_progress(&self, progress: impl Fn() -> u64 + Send + 'static) -> io::Result<()> {
        let counter = self.counter(Sign::Progress)?;
        thread::Builder::new().name("progress".into()).spawn(move || {
            while counter.write(progress()).is_ok() {
                thread::sleep(EVERY);
            }
        })?;
        Ok(())
    }
}
