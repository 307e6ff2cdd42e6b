//! Limits the server's share of the GPU's time while a user works at this machine (`engine.courtesy`).
//!
//! systemd-logind and elogind write a file for each login session to `/run/systemd/sessions`, which libsystemd reads
//! too (sd_session_get_state(3)). A user works at this machine if a user session on a seat is active, that is, in the
//! foreground. The type of the session does not matter, because a desktop that was started from a text console keeps
//! the type of the console. A login screen is not a user session. Logins over the network and services have no seat. No
//! file shows whether the screen is locked, so a locked screen counts as work.
//!
//! A separate thread reads the files, and never blocks the engine. `UNICORN_RUN_DIR` replaces `/run`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::config::Courtesy;
use crate::engine::EngineHandle;
use crate::file;
use crate::library::CourtesyReport;

const RUN: &str = "/run";
const RUN_VARIABLE: &str = "UNICORN_RUN_DIR";
/// Relative to the folder of run-time data (`/run`).
const SESSIONS: &str = "systemd/sessions";
/// How often a thread without a limit looks whether its engine has ended.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How often the sessions are read, if a limit is configured.
const READ_EVERY: Duration = Duration::from_secs(2);
/// Maximum number of files that are read, and maximum bytes of each. The file of a session has about 500 bytes.
const MAX_SESSIONS: usize = 1024;
const MAX_BYTES: u64 = 64 << 10;

/// What is known of the sessions of this machine.
#[derive(Debug, PartialEq, Eq)]
enum Sessions {
    Active,
    NoneActive,
    /// The sessions cannot be read, for this reason.
    Unknown(String),
}

/// Watches the sessions, and sets the engine's share of the GPU's time.
#[derive(Clone)]
pub struct CourtesyWatch(Arc<Watched>);

struct Watched {
    folder: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The configured share.
    courtesy: Courtesy,
    /// `None` before the sessions were read for the first time.
    sessions: Option<Sessions>,
}

impl CourtesyWatch {
    pub fn new(courtesy: Courtesy) -> Self {
        let run = std::env::var_os(RUN_VARIABLE).map_or_else(|| PathBuf::from(RUN), PathBuf::from);
        let state = Mutex::new(State { courtesy, sessions: None });
        Self(Arc::new(Watched { folder: run.join(SESSIONS), state, changed: Condvar::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("nothing panics under this lock")
    }

    /// Sets the configured share, and wakes the thread that reads the sessions.
    pub fn set(&self, courtesy: Courtesy) {
        self.lock().courtesy = courtesy;
        self.0.changed.notify_all();
    }

    /// The present limit for `/status` and `/metrics`; `None` if no limit is configured.
    pub fn now(&self) -> Option<CourtesyReport> {
        let state = self.lock();
        state.courtesy.is_bound().then(|| CourtesyReport {
            share: state.courtesy.share(),
            holds: state.sessions == Some(Sessions::Active),
            sessions_known: matches!(state.sessions, Some(Sessions::Active | Sessions::NoneActive)),
        })
    }

    /// Reads the sessions, and starts the thread that reads them repeatedly.
    pub fn start(&self, engine: EngineHandle) {
        let watch = self.clone();
        let mut applied = watch.update(&engine);
        let thread = std::thread::Builder::new().name("courtesy".into()).spawn(move || {
            while engine.health().is_ok() {
                // Without a limit, the thread only waits for a new configuration, and for the end of the engine.
                let pause = if applied.is_bound() { READ_EVERY } else { LOOK_EVERY };
                let is_applied = |state: &mut State| state.courtesy == applied;
                drop(watch.0.changed.wait_timeout_while(watch.lock(), pause, is_applied));
                applied = watch.update(&engine);
            }
        });
        if let Err(error) = thread {
            tracing::warn!(
                "engine.courtesy has no effect: cannot start the thread that reads the login sessions: {error}"
            );
        }
    }

    /// Reads the sessions, and sets the engine's share accordingly. Returns the configured share that was used.
    fn update(&self, engine: &EngineHandle) -> Courtesy {
        let courtesy = self.lock().courtesy;
        if !courtesy.is_bound() {
            self.lock().sessions = None;
            engine.set_courtesy(Courtesy::NONE);
            return courtesy;
        }
        let sessions = match has_active_session(&self.0.folder) {
            Ok(true) => Sessions::Active,
            Ok(false) => Sessions::NoneActive,
            Err(error) => Sessions::Unknown(format!("{}: {error}", self.0.folder.display())),
        };
        engine.set_courtesy(if sessions == Sessions::Active { courtesy } else { Courtesy::NONE });
        let mut state = self.lock();
        if state.sessions.as_ref() == Some(&sessions) {
            return courtesy;
        }
        match state.sessions.insert(sessions) {
            Sessions::Active => tracing::info!(
                "a user works at this machine: using at most {} of the GPU's time from now on (engine.courtesy)",
                courtesy.share()
            ),
            Sessions::NoneActive => {
                tracing::info!("no user works at this machine: using all of the GPU's time")
            }
            Sessions::Unknown(why) => tracing::warn!(
                "engine.courtesy has no effect, because the login sessions cannot be read ({why}): \
                 systemd-logind or elogind must write them there"
            ),
        }
        courtesy
    }
}

/// Whether a file in `folder` describes an active session of a user on a seat.
fn has_active_session(folder: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(folder)?.take(MAX_SESSIONS) {
        let entry = entry?;
        // The folder also has a pipe for each session, `ID.ref`.
        if !entry.file_type()?.is_file() {
            continue;
        }
        match file::read(&entry.path(), MAX_BYTES) {
            Ok(bytes) if is_active(&String::from_utf8_lossy(&bytes)) => return Ok(true),
            Ok(_) => {}
            // The session has just ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Whether the text of a session file describes an active session of a user on a seat.
fn is_active(text: &str) -> bool {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    // Newer versions of systemd also have classes such as `user-early` and `user-light`.
    let is_users = field("CLASS").is_some_and(|class| class == "user" || class.starts_with("user-"));
    is_users && field("STATE") == Some("active") && field("SEAT").is_some_and(|seat| !seat.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DESKTOP: &str = "# This is private data. Do not parse.\nUID=1000\nUSER=ada\nACTIVE=1\nIS_DISPLAY=1\nSTATE=active\n\
                           REMOTE=0\nLEADER_FD_SAVED=1\nTYPE=wayland\nORIGINAL_TYPE=wayland\nCLASS=user\nSCOPE=session-2.scope\n\
                           SEAT=seat0\nTTY=tty2\nSERVICE=gdm-password\nVTNR=2\nLEADER=1187\n";

    #[test]
    fn a_users_session_in_the_foreground_of_a_seat_is_active() {
        for (from, to, expected) in [
            ("", "", true),
            ("TYPE=wayland", "TYPE=x11", true),
            ("TYPE=wayland", "TYPE=tty", true), // a desktop that was started from a console
            ("CLASS=user\n", "CLASS=user-light\n", true),
            ("CLASS=user\n", "CLASS=greeter\n", false),
            ("CLASS=user\n", "CLASS=userland\n", false),
            ("CLASS=user\n", "", false),
            ("STATE=active", "STATE=online", false), // another console is in the foreground
            ("STATE=active", "STATE=closing", false),
            ("SEAT=seat0\n", "", false), // over a network
            ("SEAT=seat0\n", "SEAT=\n", false),
        ] {
            assert_eq!(is_active(&DESKTOP.replace(from, to)), expected, "{from:?} is {to:?}");
        }
        for text in ["", "=", "STATE", "STATE=active\nSEAT=seat0", "\0\n\u{fffd}"] {
            assert!(!is_active(text), "{text:?}");
        }
    }

    #[test]
    fn every_regular_file_of_the_folder_is_read_and_pipes_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert!(!has_active_session(folder).unwrap());
        fs::write(folder.join("1"), DESKTOP.replace("STATE=active", "STATE=online")).unwrap();
        // Opening this pipe for reading would block until a writer opens it.
        rustix::fs::mkfifoat(rustix::fs::CWD, folder.join("2.ref"), 0o600.into()).unwrap();
        fs::create_dir(folder.join("3")).unwrap();
        assert!(!has_active_session(folder).unwrap());
        fs::write(folder.join("c4"), DESKTOP).unwrap();
        assert!(has_active_session(folder).unwrap());
        let absent = has_active_session(&folder.join("absent")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }
}
