//! Bounds the share of the GPU's time that the server takes while somebody works at this machine (`engine.courtesy`).
//!
//! systemd-logind tells who does, and elogind in the same files: `/run/systemd/sessions` has a file for each session, which
//! libsystemd reads as well (sd_session_get_state(3)). Somebody works here while the session of a user on a seat is active,
//! that is, in the foreground. Its type does not matter: a desktop that was started from a text console keeps the console's.
//! A login screen is no user's session, and neither a login over a network nor a service has a seat. Whether a screen is
//! locked stands in no file, and counts for nothing.
//!
//! The files are read by a thread of its own, which never holds the engine. `UNICORN_RUN_DIR` puts another folder in the
//! place of `/run`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::api::CourtesyReport;
use crate::config::Courtesy;
use crate::engine::EngineHandle;
use crate::file;

const RUN: &str = "/run";
const RUN_VARIABLE: &str = "UNICORN_RUN_DIR";
/// Below the folder of run-time data.
const SESSIONS: &str = "systemd/sessions";
/// How often the sessions are read, while there is something to bound.
const EVERY: Duration = Duration::from_secs(2);
/// The most files that are read, and the most bytes of each. A session's file has some 500.
const MOST_SESSIONS: usize = 1024;
const MOST_BYTES: u64 = 64 << 10;

/// What is known of the sessions of this machine.
#[derive(Debug, PartialEq, Eq)]
enum Sessions {
    Active,
    NoneActive,
    /// Nobody tells, for this reason.
    Unknown(String),
}

/// Watches the sessions, and tells the engine what share of the GPU's time it may take.
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

    /// Sets the configured share, and has the sessions read at once.
    pub fn set(&self, courtesy: Courtesy) {
        self.lock().courtesy = courtesy;
        self.0.changed.notify_all();
    }

    /// What is bounded now; `None` if nothing is configured.
    pub fn now(&self) -> Option<CourtesyReport> {
        let state = self.lock();
        state.courtesy.is_bound().then(|| CourtesyReport {
            share: state.courtesy.share(),
            holds: state.sessions == Some(Sessions::Active),
            sessions_known: matches!(state.sessions, Some(Sessions::Active | Sessions::NoneActive)),
        })
    }

    /// Reads the sessions, and starts the thread that reads them again and again.
    pub fn start(&self, engine: EngineHandle) {
        let watch = self.clone();
        let mut applied = watch.look(&engine);
        let looks = std::thread::Builder::new().name("courtesy".into()).spawn(move || {
            while engine.health().is_ok() {
                // Without a bound there is nothing to look for.
                let pause = if applied.is_bound() { EVERY } else { Duration::MAX };
                let is_applied = |state: &mut State| state.courtesy == applied;
                drop(watch.0.changed.wait_timeout_while(watch.lock(), pause, is_applied));
                applied = watch.look(&engine);
            }
        });
        if let Err(error) = looks {
            tracing::warn!("no thread that looks who works at this machine (engine.courtesy): {error}");
        }
    }

    /// Reads the sessions, and bounds the engine's share by them. Returns the configured share that this applied.
    fn look(&self, engine: &EngineHandle) -> Courtesy {
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
                "somebody works at this machine: at most {} of the GPU's time from now on (engine.courtesy)",
                courtesy.share()
            ),
            Sessions::NoneActive => {
                tracing::info!("nobody works at this machine: all of the GPU's time is used")
            }
            Sessions::Unknown(why) => tracing::warn!(
                "engine.courtesy bounds nothing, since no session is known ({why}): systemd-logind and elogind write there \
                 who works at a machine"
            ),
        }
        courtesy
    }
}

/// Whether a user's session on a seat is active, by the files of `folder`.
fn has_active_session(folder: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(folder)?.take(MOST_SESSIONS) {
        let entry = entry?;
        // Pipes lie between the files: `ID.ref` for each session.
        if !entry.file_type()?.is_file() {
            continue;
        }
        match file::read(&entry.path(), MOST_BYTES) {
            Ok(bytes) if is_active(&String::from_utf8_lossy(&bytes)) => return Ok(true),
            Ok(_) => {}
            // A session that ended just now.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Whether the file of a session is that of an active session of a user on a seat.
fn is_active(text: &str) -> bool {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    // Newer versions of systemd also have such as `user-early` and `user-light`.
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
    fn all_files_of_the_folder_are_sessions_and_pipes_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert!(!has_active_session(folder).unwrap());
        fs::write(folder.join("1"), DESKTOP.replace("STATE=active", "STATE=online")).unwrap();
        // To open this for reading would wait for a writer.
        rustix::fs::mkfifoat(rustix::fs::CWD, folder.join("2.ref"), 0o600.into()).unwrap();
        fs::create_dir(folder.join("3")).unwrap();
        assert!(!has_active_session(folder).unwrap());
        fs::write(folder.join("c4"), DESKTOP).unwrap();
        assert!(has_active_session(folder).unwrap());
        let absent = has_active_session(&folder.join("absent")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }
}
