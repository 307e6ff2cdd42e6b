//! What systemd is told (sd_notify(3)), and what it hands over: listening sockets.
//!
//! `READY=1` comes once the model is loaded and has passed the self-test. While it is loaded, the time for that is
//! extended, up to [`LONGEST_LOAD`]. `WATCHDOG=1` comes as long as the device proves that it computes: the proof is that of
//! `/health`, which sends an idle device a probe. A device that hangs sends none, and neither does a recovery that takes
//! longer than [`LONGEST_LOAD`], so that systemd ends the process and starts another.
//!
//! Without systemd nothing is told.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use listenfd::ListenFd;
use sd_notify::NotifyState;

use crate::api::{Health, Server};

/// How often the time for loading is extended, and by how much each time.
const EXTEND_EVERY: Duration = Duration::from_secs(5);
const EXTENSION: Duration = Duration::from_secs(30);
/// The longest time that a load, or a recovery, may take. A 27B from a slow disk takes minutes.
const LONGEST_LOAD: Duration = Duration::from_secs(30 * 60);
/// Signs of life within the time that systemd gives for one.
const SIGNS: u32 = 3;

/// The socket that systemd listens on for this process, if there is one.
pub fn socket() -> std::io::Result<Option<TcpListener>> {
    let mut sockets = ListenFd::from_env();
    if sockets.len() > 1 {
        return Err(std::io::Error::other("systemd hands over several sockets; expected one ListenStream="));
    }
    let socket = sockets.take_tcp_listener(0)?;
    if let Some(socket) = &socket {
        socket.set_nonblocking(true)?;
    }
    Ok(socket)
}

fn tell(state: NotifyState, status: &str) {
    send(&[state, NotifyState::Status(status)]);
}

fn send(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("systemd cannot be told: {error}");
    }
}

/// Asks for more time as long as the model is loaded. To be dropped when it is.
pub async fn loading(model: &str, doing: impl Fn() -> Option<String>) {
    let since = Instant::now();
    while since.elapsed() < LONGEST_LOAD {
        let extension = NotifyState::ExtendTimeoutUsec(EXTENSION.as_micros() as u32);
        let doing = doing().map(|doing| format!(": {doing}")).unwrap_or_default();
        tell(extension, &format!("loading {model} for {} s{doing}", since.elapsed().as_secs()));
        tokio::time::sleep(EXTEND_EVERY).await;
    }
    std::future::pending().await
}

pub fn ready(model: &str, base: &str) {
    tell(NotifyState::Ready, &format!("{model} at {base}"));
}

pub fn stopping() {
    tell(NotifyState::Stopping, "stopping: answers under way are finished first");
}

/// Sends signs of life, if systemd wants them, as long as there are any.
pub async fn watchdog(server: Arc<Server>) {
    let Some(within) = sd_notify::watchdog_enabled() else { return };
    let mut last_ready = Instant::now();
    loop {
        let health = Health::proven(&server).await;
        let is_alive = match health {
            Health::Ok | Health::Unloaded | Health::Draining => {
                last_ready = Instant::now();
                true
            }
            Health::Loading(_) | Health::Recovering => last_ready.elapsed() < LONGEST_LOAD,
            Health::Lost(_) | Health::Failed(_) | Health::Unresponsive(_) => false,
        };
        if is_alive {
            send(&[NotifyState::Watchdog]);
        }
        tokio::time::sleep(within / SIGNS).await;
    }
}
