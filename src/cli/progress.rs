//! A bar on the terminal for what takes longer than a second; nothing where nobody watches.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Nothing is shown for what takes no longer.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// A bar that turns says that the program does not hang, also where a step takes long.
const TICK: Duration = Duration::from_millis(100);

/// Erases itself when dropped.
pub struct Bar {
    bar: ProgressBar,
    /// Shows the bar when it is due, also while nothing is reported; none where nobody watches.
    shower: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    pub fn bytes(what: impl Into<String>) -> Self {
        Self::new(what, 0, "{spinner} {msg} [{bar:30}] {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left")
    }

    /// `total`: tokens there are to do.
    pub fn tokens(what: impl Into<String>, total: u64) -> Self {
        Self::new(what, total, "{spinner} {msg} [{bar:30}] {pos}/{len} tokens, {per_sec}, {eta} left")
    }

    /// `total`: requests there are to send.
    pub fn requests(what: impl Into<String>, total: u64) -> Self {
        Self::new(what, total, "{spinner} {msg} [{bar:30}] {pos}/{len} requests, {eta} left")
    }

    fn new(what: impl Into<String>, total: u64, template: &str) -> Self {
        let style = ProgressStyle::with_template(template).expect("the templates of this file are valid");
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        let bar = bar.with_style(style).with_message(what.into());
        let shower = std::io::stderr().is_terminal().then(|| {
            let (ended, end) = mpsc::channel::<()>();
            let bar = bar.clone();
            let show = move || {
                if end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    bar.enable_steady_tick(TICK);
                }
            };
            (ended, std::thread::spawn(show))
        });
        Self { bar, shower }
    }

    /// What was done before the clock began to run: it is no part of the rate.
    pub fn begin_at(&self, done: u64) {
        self.bar.set_position(done);
        self.bar.reset_eta();
    }

    /// What the bar is at.
    pub fn say(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// What is done now.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// What there is to do, where that was not known at first.
    pub fn set_total(&self, total: u64) {
        self.bar.set_length(total);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some((ended, shower)) = self.shower.take() {
            drop(ended);
            // A bar that could not be shown is no reason to fail.
            let _ = shower.join();
        }
        self.bar.finish_and_clear();
    }
}

/// Says that something of unknown length is under way; erases itself when dropped.
pub struct Spinner(ProgressBar);

impl Spinner {
    pub fn start(what: String) -> Self {
        // Hidden by itself where standard error is no terminal.
        let bar = ProgressBar::new_spinner().with_message(what);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
