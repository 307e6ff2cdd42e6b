//! Notifications to systemd (sd_notify(3)), and listening sockets from systemd.
//!
//! The server sends `READY=1` when the model is loaded and has passed the self-test. During the load it extends the
//! start timeout, up to [`LONGEST_LOAD`]. Then it sends `WATCHDOG=1` as long as the device computes, which is checked
//! like `/health`: with a probe if the device is idle. If the device hangs, or if a recovery takes longer than
//! [`LONGEST_LOAD`], the server does not send it, and systemd restarts the process.
//!
//! Without systemd the server sends nothing.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use listenfd::ListenFd;
use sd_notify::NotifyState;

use crate::api::{Health, Server};

/// How often the start timeout is extended, and by how much each time.
const EXTEND_EVERY: Duration = Duration::from_secs(5);
const EXTENSION: Duration = Duration::from_secs(30);
/// The longest time that a load, or a recovery, may take. A 27B from a slow disk takes minutes.
const LONGEST_LOAD: Duration = Duration::from_secs(30 * 60);
/// Number of watchdog messages within systemd's watchdog timeout.
const MESSAGES_PER_TIMEOUT: u32 = 3;

/// The socket of a socket-activated service; `None` without socket activation.
pub fn socket() -> std::io::Result<Option<TcpListener>> {
    let mut sockets = ListenFd::from_env();
    if sockets.len() > 1 {
        return Err(std::io::Error::other(
            "systemd passed several sockets; expected a socket unit with one ListenStream=",
        ));
    }
    let socket = sockets.take_tcp_listener(0)?;
    if let Some(socket) = &socket {
        socket.set_nonblocking(true)?;
    }
    Ok(socket)
}

fn notify(state: NotifyState, status: &str) {
    send(&[state, NotifyState::Status(status)]);
}

fn send(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("cannot notify systemd: {error}");
    }
}

/// Extends the start timeout while the model is loaded. The future never ends; the caller drops it after the load.
pub async fn loading(model: &str, doing: impl Fn() -> Option<String>) {
    let since = Instant::now();
    while since.elapsed() < LONGEST_LOAD {
        let extension = NotifyState::ExtendTimeoutUsec(EXTENSION.as_micros() as u32);
        let doing = doing().map(|doing| format!(": {doing}")).unwrap_or_default();
        notify(extension, &format!("loading {model} for {} s{doing}", since.elapsed().as_secs()));
        tokio::time::sleep(EXTEND_EVERY).await;
    }
    std::future::pending().await
}

pub fn ready(model: &str, base: &str) {
    notify(NotifyState::Ready, &format!("{model} at {base}"));
}

pub fn stopping() {
    notify(NotifyState::Stopping, "stopping: finishing the answers in progress");
}

/// Sends watchdog messages while the server is alive, if systemd expects them.
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
        tokio::time::sleep(within / MESSAGES_PER_TIMEOUT).await;
    }
}
