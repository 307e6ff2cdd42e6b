//! The child's end of its channel, and the signs of life that the parent watches. Each comes from a thread of its own.

use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, getppid, kill_process};

use super::channel::{Channel, Sign};

/// How often a sign of life is written.
const EVERY: Duration = Duration::from_millis(50);

impl Channel {
    /// The child's end, which it has as its standard input. From then on the parent sees that the child runs, and the child
    /// ends with its parent.
    pub fn from_stdin() -> io::Result<Self> {
        let channel = Self::from_socket(io::stdin().as_fd().try_clone_to_owned()?)?;
        channel.beat()?;
        Ok(channel)
    }

    /// Shows the parent that this process runs, whatever its other threads do, and ends the process when its parent has
    /// ended: a call of the driver, which may not return, would keep the other threads from noticing. (The kernel's own
    /// signal at a parent's death comes at the end of the thread that started the child.)
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

    /// Shows the parent `progress`, a number that grows while the device gets on, or is left idle on purpose.
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
