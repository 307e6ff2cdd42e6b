//! The counts of requests, for `/metrics` and `/status`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::api::ids::unix_time_s;
use crate::api::tasks::Purpose;
use crate::device::KernelTime;
use crate::engine::{EngineError, Event, Timings};
use crate::session::Reason;

/// Upper bounds of the buckets for waits and whole answers, in seconds.
const WAITS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// Upper bounds of the buckets for gaps between tokens, in seconds. They are close to each other around a fifth to a
/// quarter of a second, where a 27B decodes on an integrated GPU. The longest gap allowed is half a second by default.
const GAPS: &[f64] =
    &[0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.225, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

/// The counts since the server's start.
#[derive(Default)]
pub(in crate::api) struct Metrics {
    pub(in crate::api) responses: Mutex<BTreeMap<(String, u16), u64>>,
    /// Refused requests by the error's code.
    pub(in crate::api) refused: Mutex<BTreeMap<&'static str, u64>>,
    pub(in crate::api) slow_readers: AtomicU64,
    pub(in crate::api) kernels: Mutex<BTreeMap<String, (u64, Duration)>>,
    /// The last error that was the server's fault: its Unix time in seconds, and its message.
    pub(in crate::api) last_error: Mutex<Option<(u64, String)>>,
    /// By the id of each model that had a request. A model that leaves the list, and comes back, continues its counts.
    models: Mutex<BTreeMap<String, Arc<ModelMetrics>>>,
}

/// The counts of the requests for one model.
pub(in crate::api) struct ModelMetrics {
    pub(in crate::api) taken: Mutex<BTreeMap<Purpose, u64>>,
    pub(in crate::api) finished: Mutex<BTreeMap<&'static str, u64>>,
    pub(in crate::api) prompt_tokens: AtomicU64,
    pub(in crate::api) cached_tokens: AtomicU64,
    pub(in crate::api) generated_tokens: AtomicU64,
    pub(in crate::api) to_first_token: Histogram,
    pub(in crate::api) between_tokens: Histogram,
    pub(in crate::api) queued: Histogram,
    pub(in crate::api) prefilled: Histogram,
    pub(in crate::api) decoded: Histogram,
    pub(in crate::api) answered: Histogram,
}

impl Default for ModelMetrics {
    fn default() -> Self {
        let [to_first_token, queued, prefilled, decoded, answered] = [(); 5].map(|()| Histogram::new(WAITS));
        Self {
            taken: Mutex::default(),
            finished: Mutex::default(),
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            to_first_token,
            between_tokens: Histogram::new(GAPS),
            queued,
            prefilled,
            decoded,
            answered,
        }
    }
}

pub(in crate::api) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nothing panics under this lock")
}

fn count(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Metrics {
    /// Counts a response. `route` is one of the router's routes, and no path that a client made up.
    pub fn responded(&self, route: &str, status: u16) {
        *locked(&self.responses).entry((route.to_owned(), status)).or_default() += 1;
    }

    pub fn refused(&self, code: &'static str) {
        *locked(&self.refused).entry(code).or_default() += 1;
    }

    /// The counts of the model with this id.
    pub fn of_model(&self, id: &str) -> Arc<ModelMetrics> {
        Arc::clone(locked(&self.models).entry(id.to_owned()).or_default())
    }

    /// The counts of the model with this id. `None` = it never had a request.
    pub fn of_used_model(&self, id: &str) -> Option<Arc<ModelMetrics>> {
        locked(&self.models).get(id).cloned()
    }

    /// Counts a request that the engine of the model `id` has taken, with all its prompts.
    pub fn taken(&self, id: &str, purpose: Purpose) {
        *locked(&self.of_model(id).taken).entry(purpose).or_default() += 1;
    }

    /// Follows a request with so many answers that the engine of the model `id` has just taken, and that had arrived then.
    pub fn follow(self: &Arc<Self>, id: &str, answers: usize, arrived: Instant) -> Followed {
        Followed {
            metrics: Arc::clone(self),
            of_model: self.of_model(id),
            answers: vec![Progress::default(); answers],
            before: arrived.elapsed(),
            begun: false,
        }
    }

    /// The number of answers of all models that ended, by reason.
    pub fn finished(&self) -> BTreeMap<&'static str, u64> {
        let mut all = BTreeMap::new();
        for model in locked(&self.models).values() {
            for (reason, n) in &*locked(&model.finished) {
                *all.entry(*reason).or_default() += n;
            }
        }
        all
    }

    /// The sums of [`ModelMetrics::tokens`] over all models.
    pub fn tokens(&self) -> [u64; 3] {
        let models = locked(&self.models);
        models.values().fold([0; 3], |sums, model| std::array::from_fn(|i| sums[i] + model.tokens()[i]))
    }

    pub fn last_error(&self) -> Option<(u64, String)> {
        locked(&self.last_error).clone()
    }

    /// Adds the kernels' times since the last call. Returns the times of all kernels so far, the longest first.
    pub fn kernels(&self, more: Vec<KernelTime>) -> Vec<KernelTime> {
        let mut all = locked(&self.kernels);
        for KernelTime { kernel, dispatches, time } in more {
            let sum = all.entry(kernel).or_default();
            *sum = (sum.0 + dispatches, sum.1 + time);
        }
        let each = all.iter().map(|(kernel, &(dispatches, time))| KernelTime {
            kernel: kernel.clone(),
            dispatches,
            time,
        });
        let mut each: Vec<_> = each.collect();
        each.sort_by_key(|kernel| std::cmp::Reverse(kernel.time));
        each
    }
}

impl ModelMetrics {
    /// The numbers of prompt tokens, of prompt tokens that the prefix cache had, and of generated tokens.
    pub fn tokens(&self) -> [u64; 3] {
        [&self.prompt_tokens, &self.cached_tokens, &self.generated_tokens].map(|n| n.load(Ordering::Relaxed))
    }
}

/// The progress of one answer, up to its last event.
#[derive(Clone, Copy, Default)]
struct Progress {
    predicted: usize,
    decode: Duration,
    ended: bool,
}

/// A request that the engine has taken, up to its end. If it is dropped before its end, its client has left.
pub(in crate::api) struct Followed {
    metrics: Arc<Metrics>,
    of_model: Arc<ModelMetrics>,
    answers: Vec<Progress>,
    /// From the request's arrival to its submission.
    before: Duration,
    begun: bool,
}

impl Followed {
    pub fn event(&mut self, event: &Event) {
        let m = Arc::clone(&self.of_model);
        let (choice, timings) = match event {
            Event::Prompt { .. } | Event::Pooled { .. } => return,
            Event::Token { choice, timings, .. } | Event::Finished { choice, timings, .. } => {
                (*choice, timings)
            }
            Event::Failed(error) => {
                match error {
                    EngineError::SlowReader => {
                        count(&self.metrics.slow_readers, 1);
                        self.end_all("abort");
                    }
                    EngineError::Lost(_)
                    | EngineError::Bug(_)
                    | EngineError::NotFinite
                    | EngineError::LostTwice(_)
                    | EngineError::Coprocessor(_)
                    | EngineError::ShuttingDown => {
                        *locked(&self.metrics.last_error) = Some((unix_time_s(), error.to_string()));
                        self.end_all("error");
                    }
                }
                return;
            }
        };
        if !self.begun {
            // Answers to one prompt share its time and its tokens.
            self.begun = true;
            count(&m.prompt_tokens, timings.prompt_n);
            count(&m.cached_tokens, timings.cached_n);
            m.queued.observe(timings.queue);
            m.prefilled.observe(timings.prefill);
            if timings.predicted_n > 0 {
                m.to_first_token.observe(self.before + timings.queue + timings.prefill);
            }
        }
        let answer = &mut self.answers[choice];
        let more = timings.predicted_n.saturating_sub(answer.predicted);
        if answer.predicted > 0 && more > 0 {
            m.between_tokens.observe(timings.decode.saturating_sub(answer.decode));
        }
        count(&m.generated_tokens, more);
        (answer.predicted, answer.decode) = (timings.predicted_n, timings.decode);
    }

    pub fn ended(&mut self, choice: usize, reason: Reason, timings: &Timings) {
        let m = &self.of_model;
        self.answers[choice].ended = true;
        *locked(&m.finished).entry(reason.name()).or_default() += 1;
        if timings.predicted_n > 0 {
            m.decoded.observe(timings.decode);
        }
        m.answered.observe(self.before + timings.queue + timings.prefill + timings.decode);
    }

    /// Ends all answers that are still open.
    pub fn end_all(&mut self, reason: &'static str) {
        for answer in self.answers.iter_mut().filter(|answer| !answer.ended) {
            answer.ended = true;
            *locked(&self.of_model.finished).entry(reason).or_default() += 1;
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.end_all("abort");
    }
}

/// A histogram of times in seconds. A time counts in the bucket of the least bound that is not below it.
pub(in crate::api) struct Histogram {
    pub(in crate::api) bounds: &'static [f64],
    /// The count of each bucket. The last bucket has the times beyond all bounds.
    pub(in crate::api) counts: Vec<AtomicU64>,
    pub(in crate::api) sum_ns: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum_ns: AtomicU64::new(0) }
    }

    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}
