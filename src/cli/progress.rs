//! A bar on the terminal for what takes longer than a second; nothing where nobody watches.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Nothing is shown for what takes no longer.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Erases itself when dropped.
pub struct Bar {
    bar: ProgressBar,
    since: Instant,
    template: &'static str,
    what: String,
    shown: bool,
    quiet: bool,
}

impl Bar {
    pub fn bytes(what: impl Into<String>) -> Self {
        Self::new(what, "{msg} [{bar:30}] {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left")
    }

    pub fn tokens(what: impl Into<String>) -> Self {
        Self::new(what, "{msg} [{bar:30}] {pos}/{len} tokens, {per_sec}, {eta} left")
    }

    fn new(what: impl Into<String>, template: &'static str) -> Self {
        let quiet = !std::io::stderr().is_terminal();
        let (bar, since, what) = (ProgressBar::hidden(), Instant::now(), what.into());
        Self { bar, since, template, what, shown: false, quiet }
    }

    /// What is done now, of what there is to do.
    pub fn set(&mut self, done: u64, total: u64) {
        if self.quiet {
            return;
        }
        if !self.shown && self.since.elapsed() > PATIENCE {
            let style =
                ProgressStyle::with_template(self.template).expect("the templates of this file are valid");
            let bar = ProgressBar::new(total).with_style(style).with_message(self.what.clone());
            self.bar = bar.with_elapsed(self.since.elapsed());
            self.shown = true;
        }
        if self.shown {
            self.bar.set_length(total);
            self.bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Says that something of unknown length is under way; erases itself when dropped.
pub struct Spinner(ProgressBar);

impl Spinner {
    pub fn start(what: String) -> Self {
        // Hidden by itself where standard error is no terminal.
        let bar = ProgressBar::new_spinner().with_message(what);
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
