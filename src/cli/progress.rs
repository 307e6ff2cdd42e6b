//! Progress bars for work that takes longer than a second. Nothing is shown if standard error is not a terminal.
//!
//! A bar shows only what is known: no rate before some work is done, no remaining time before there is a rate, and no
//! total before it is known. The work of an earlier run of the command counts as done, but not for the rate.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::log;

/// Shorter work shows no bar.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// How often a bar is redrawn, so that it moves during long steps too.
const TICK: Duration = Duration::from_millis(100);
/// No rate is shown for a shorter time, because it would fluctuate.
const MIN_TIME: Duration = Duration::from_secs(1);

/// The present bars and spinners, which Ctrl-C must erase; `None` if Ctrl-C is not handled here.
static SHOWN: Mutex<Option<Vec<ProgressBar>>> = Mutex::new(None);

/// While this value exists, Ctrl-C erases the bars and then ends the process as usual. `chat` drops it after its model
/// is loaded, because then Ctrl-C stops an answer.
pub struct EraseOnInterrupt(());

impl EraseOnInterrupt {
    /// `advice` is printed after the bar is erased: what the user can do now.
    pub fn watch(advice: Option<&'static str>) -> Self {
        *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        // Without the handler, Ctrl-C still ends the process.
        if let Ok(mut signals) = Signals::new([SIGINT]) {
            std::thread::spawn(move || {
                for signal in &mut signals {
                    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
                    let Some(bars) = &*shown else { continue };
                    bars.iter().for_each(ProgressBar::finish_and_clear);
                    if let Some(advice) = advice {
                        log::say(advice);
                    }
                    let _ = emulate_default_handler(signal);
                }
            });
        }
        Self(())
    }
}

impl Drop for EraseOnInterrupt {
    fn drop(&mut self) {
        *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Registers a bar, so that an interrupt erases it.
fn show(bar: &ProgressBar) {
    if let Some(bars) = &mut *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) {
        bars.retain(|bar| !bar.is_finished());
        bars.push(bar.clone());
    }
}

/// The unit of a bar's work.
#[derive(Debug, Clone, Copy)]
enum Unit {
    Bytes,
    /// Items with this name.
    Each(&'static str),
}

impl Unit {
    fn of_total(self, done: u64, total: u64) -> String {
        match self {
            Unit::Bytes => format!("{}/{}", HumanBytes(done), HumanBytes(total)),
            Unit::Each(name) => format!("{done}/{total} {name}"),
        }
    }

    fn rate(self, per_s: f64) -> String {
        match self {
            Unit::Bytes => format!("{}/s", HumanBytes(per_s as u64)),
            Unit::Each(_) => format!("{per_s:.1}/s"),
        }
    }
}

/// The work that this run has done, for its rate.
struct Pace {
    /// When this run began to work.
    since: Instant,
    /// Work that counts as done, but that this run did not do.
    skipped: u64,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { since: now, skipped: 0 }
    }

    /// Work per second; `None` if there is not enough work or time yet.
    fn per_s(&self, done: u64, now: Instant) -> Option<f64> {
        let (worked, time) = (done.saturating_sub(self.skipped), now.saturating_duration_since(self.since));
        (worked > 0 && time >= MIN_TIME).then(|| worked as f64 / time.as_secs_f64())
    }

    /// The text of a bar.
    fn describe(&self, unit: Unit, done: u64, total: u64, now: Instant) -> String {
        let mut text = unit.of_total(done, total);
        if let Some(per_s) = self.per_s(done, now) {
            let left = Duration::from_secs_f64((total.saturating_sub(done) as f64 / per_s).min(1e9));
            let _ = write!(text, ", {}, {:#} left", unit.rate(per_s), HumanDuration(left));
        }
        text
    }
}

/// A progress bar, which erases itself when dropped.
pub struct Bar {
    bar: ProgressBar,
    unit: Unit,
    pace: Arc<Mutex<Pace>>,
    /// The thread that shows the bar after [`PATIENCE`], even without any progress; `None` if standard error is not a
    /// terminal.
    display: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Bar {
    /// A bar whose total is set later by [`Bar::set_total`]. Until then it shows only `what`.
    pub fn bytes(what: impl Into<String>) -> Self {
        Self::new(what, Unit::Bytes)
    }

    /// A bar of `total` items, such as `tokens`.
    pub fn of(items: &'static str, what: impl Into<String>, total: u64) -> Self {
        let bar = Self::new(what, Unit::Each(items));
        bar.set_total(total);
        bar
    }

    fn new(what: impl Into<String>, unit: Unit) -> Self {
        let waiting = ProgressStyle::with_template("{spinner} {msg}").expect("the template is valid");
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let bar = bar.with_style(waiting).with_message(what.into());
        let pace = Arc::new(Mutex::new(Pace::new(Instant::now())));
        let display = std::io::stderr().is_terminal().then_some(()).and_then(|()| {
            let (ended, end) = mpsc::channel::<()>();
            let bar = bar.clone();
            let show = move || {
                if end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    bar.enable_steady_tick(TICK);
                    show(&bar);
                }
            };
            // If the thread cannot be started, no bar is shown.
            let display = std::thread::Builder::new().name("bar".into()).spawn(show);
            Some((ended, display.ok()?))
        });
        Self { bar, unit, pace, display }
    }

    fn style(&self) -> ProgressStyle {
        let (unit, pace) = (self.unit, Arc::clone(&self.pace));
        let describe = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let pace = pace.lock().unwrap_or_else(PoisonError::into_inner);
            let text = pace.describe(unit, state.pos(), state.len().unwrap_or(0), Instant::now());
            let _ = out.write_str(&text);
        };
        let style = ProgressStyle::with_template("{spinner} {msg} [{bar:30}] {work}");
        style.expect("the template is valid").with_key("work", describe)
    }

    /// Counts work as done that this run did not have to do. It does not count for the rate.
    pub fn skip(&self, work: u64) {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).skipped += work;
        self.bar.inc(work);
    }

    /// Sets the text before the bar.
    pub fn say(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// Sets the amount of work that is done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Counts more work as done.
    pub fn advance(&self, work: u64) {
        self.bar.inc(work);
    }

    /// Sets the total. For a bar without a total, the time until now does not count for the rate.
    pub fn set_total(&self, total: u64) {
        if self.bar.length().is_none() {
            self.pace.lock().unwrap_or_else(PoisonError::into_inner).since = Instant::now();
            self.bar.set_style(self.style());
        }
        self.bar.set_length(total);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some((ended, display)) = self.display.take() {
            drop(ended);
            // A panic of the thread is ignored: only the bar was affected.
            let _ = display.join();
        }
        self.bar.finish_and_clear();
    }
}

/// A sign that work of unknown length is in progress; erases itself when dropped.
pub struct Spinner(ProgressBar);

impl Spinner {
    pub fn start(what: String) -> Self {
        // indicatif hides the bar if standard error is not a terminal.
        let bar = ProgressBar::new_spinner().with_message(what);
        bar.enable_steady_tick(TICK);
        show(&bar);
        Self(bar)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(pace: &Pace, unit: Unit, done: u64, total: u64, after_s: u64) -> String {
        pace.describe(unit, done, total, pace.since + Duration::from_secs(after_s))
    }

    #[test]
    fn a_bar_shows_a_rate_only_after_some_work_and_time() {
        let pace = Pace::new(Instant::now());
        assert_eq!(drawn(&pace, Unit::Each("tokens"), 0, 64, 60), "0/64 tokens");
        assert_eq!(drawn(&pace, Unit::Bytes, 1 << 20, 4 << 20, 0), "1.00 MiB/4.00 MiB");
        assert_eq!(drawn(&pace, Unit::Each("tokens"), 16, 64, 8), "16/64 tokens, 2.0/s, 24s left");
    }

    /// A conversion or a pull that continues where an earlier one stopped.
    #[test]
    fn skipped_work_counts_as_done_and_not_for_the_rate() {
        let bar = Bar::bytes("quantizing");
        bar.set_total(100 << 20);
        bar.skip(60 << 20);
        let shown = |done| drawn(&bar.pace.lock().expect("sound"), Unit::Bytes, done, 100 << 20, 10);
        assert_eq!(shown(bar.bar.position()), "60.00 MiB/100.00 MiB");
        bar.set(80 << 20);
        assert_eq!(shown(bar.bar.position()), "80.00 MiB/100.00 MiB, 2.00 MiB/s, 10s left");
    }

    #[test]
    fn a_bar_without_a_total_draws_none() {
        let bar = Bar::bytes("pulling");
        assert_eq!(bar.bar.length(), None);
        bar.set_total(0);
        assert_eq!(bar.bar.length(), Some(0));
    }
}
