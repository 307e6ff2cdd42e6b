//! Progress bars for work that takes longer than a second. Nothing is shown where standard error is no terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work that ends sooner shows no bar.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// How often a bar is redrawn, so that it moves during long steps too.
const TICK: Duration = Duration::from_millis(100);

/// A progress bar, which erases itself when dropped.
pub struct Bar {
    bar: ProgressBar,
    /// The thread that shows the bar once it is due, even if nothing is reported; `None` where standard error is no
    /// terminal.
    shower: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    pub fn bytes(what: impl Into<String>) -> Self {
        Self::new(what, 0, "{spinner} {msg} [{bar:30}] {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left")
    }

    /// `total`: tokens of the whole work.
    pub fn tokens(what: impl Into<String>, total: u64) -> Self {
        Self::new(what, total, "{spinner} {msg} [{bar:30}] {pos}/{len} tokens, {per_sec}, {eta} left")
    }

    /// `total`: requests of the whole work.
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

    /// Sets the work that was done before the start, which does not count for the rate.
    pub fn begin_at(&self, done: u64) {
        self.bar.set_position(done);
        self.bar.reset_eta();
    }

    /// Sets the text in front of the bar.
    pub fn say(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// Sets the work that is done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Sets the total, where it was not known at first.
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

/// A sign that work of unknown length is under way; erases itself when dropped.
pub struct Spinner(ProgressBar);

impl Spinner {
    pub fn start(what: String) -> Self {
        // The bar is hidden where standard error is no terminal.
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
