//! The side of systemd in sd_notify(3) and in socket activation.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::fake_runner::HANG;
use super::program::in_shell;

/// A socket to which a service reports its state.
pub struct Systemd {
    folder: TempDir,
    socket: UnixDatagram,
}

impl Systemd {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = UnixDatagram::bind(folder.path().join("notify")).expect("bound");
        Self { folder, socket }
    }

    /// Gives a command the socket, and requests a watchdog signal within `watchdog`.
    pub fn supervise(&self, command: &mut Command, watchdog: Duration) {
        command.env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
    }

    /// The next message, if one comes within `patience`.
    pub fn next_message(&self, patience: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(patience)).expect("set");
        let mut message = vec![0; 4096];
        let bytes = self.socket.recv(&mut message).ok()?;
        message.truncate(bytes);
        Some(String::from_utf8(message).expect("UTF-8"))
    }

    /// Receives messages until one has this line, and returns all of them.
    #[track_caller]
    pub fn wait_for(&self, line: &str) -> Vec<String> {
        let mut heard = Vec::new();
        loop {
            let Some(message) = self.next_message(HANG) else { panic!("{line} never came: {heard:#?}") };
            let is_it = message.lines().any(|received| received == line);
            heard.push(message);
            if is_it {
                return heard;
            }
        }
    }
}

/// Makes a command inherit a listening socket as systemd passes it: as file descriptor 3, with LISTEN_PID and
/// LISTEN_FDS.
pub fn hand_over(listener: TcpListener, command: &mut Command) {
    let mut shell = in_shell("exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1", command);
    shell.stdin(Stdio::from(OwnedFd::from(listener)));
    *command = shell;
}
