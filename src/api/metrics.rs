//! `/metrics`: counts and times of requests, and what the engine and the device say of themselves, for Prometheus.
//!
//! `docs/metrics.md` lists the names. They are vLLM's wherever it has one for the same thing, with `unicorn_` for its `vllm:`
//! (a colon is for rules that Prometheus itself evaluates), so that its dashboards need that one change.
//!
//! Every label's values are few and known beforehand: a path that is no route is `other`. Nothing here is of a request's
//! text, and no client or key is named.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::exchange::FinishReason;
use super::openapi::AtTheDoor;
use super::status::KernelTime;
use super::tasks::Purpose;
use super::{Server, unix_time_s};
use crate::engine::{EngineError, Event, PoolUse, Timings};
use crate::session::Reason;

/// Seconds: of waits, and of whole answers.
const WAITS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// Of gaps between tokens, the longest allowed of which is half a second by default.
const GAPS: &[f64] = &[0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5];

/// What was counted since the start.
pub(super) struct Metrics {
    responses: Mutex<BTreeMap<(String, u16), u64>>,
    taken: Mutex<BTreeMap<Purpose, u64>>,
    finished: Mutex<BTreeMap<&'static str, u64>>,
    kernels: Mutex<BTreeMap<String, (u64, Duration)>>,
    /// Unix time, and what it was.
    last_error: Mutex<Option<(u64, String)>>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    to_first_token: Histogram,
    between_tokens: Histogram,
    queued: Histogram,
    prefilled: Histogram,
    decoded: Histogram,
    answered: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let [to_first_token, queued, prefilled, decoded, answered] = [(); 5].map(|()| Histogram::new(WAITS));
        Self {
            responses: Mutex::default(),
            taken: Mutex::default(),
            finished: Mutex::default(),
            kernels: Mutex::default(),
            last_error: Mutex::default(),
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nothing panics under this lock")
}

fn count(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Metrics {
    /// `route` is one of the router's, not what a client made up.
    pub fn responded(&self, route: &str, status: u16) {
        *locked(&self.responses).entry((route.to_owned(), status)).or_default() += 1;
    }

    /// Counts a request that the engine has taken, with all its prompts.
    pub fn taken(&self, purpose: Purpose) {
        *locked(&self.taken).entry(purpose).or_default() += 1;
    }

    /// Follows a request with so many answers that the engine has taken.
    pub fn follow(self: &Arc<Self>, answers: usize) -> Followed {
        Followed { metrics: Arc::clone(self), answers: vec![Progress::default(); answers], begun: false }
    }

    /// How many answers ended, and why.
    pub fn finished(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.finished).clone()
    }

    /// Tokens of prompts, those of them that the prefix cache had, and tokens generated.
    pub fn tokens(&self) -> [u64; 3] {
        [&self.prompt_tokens, &self.cached_tokens, &self.generated_tokens].map(|n| n.load(Ordering::Relaxed))
    }

    pub fn last_error(&self) -> Option<(u64, String)> {
        locked(&self.last_error).clone()
    }

    /// Adds what was measured since the last call; all of it by kernel, the longest first.
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

/// One answer, up to its last event.
#[derive(Clone, Copy, Default)]
struct Progress {
    predicted: usize,
    decode: Duration,
    ended: bool,
}

/// One request, from the engine's taking it to its end. Dropped before that, its client has left.
pub(super) struct Followed {
    metrics: Arc<Metrics>,
    answers: Vec<Progress>,
    begun: bool,
}

impl Followed {
    pub fn event(&mut self, event: &Event) {
        let m = Arc::clone(&self.metrics);
        let (choice, timings) = match event {
            Event::Prompt { .. } | Event::Pooled { .. } => return,
            Event::Token { choice, timings, .. } | Event::Finished { choice, timings, .. } => {
                (*choice, timings)
            }
            Event::Failed(error) => {
                match error {
                    EngineError::SlowReader | EngineError::Deadline => self.end_all("abort"),
                    EngineError::Lost(_)
                    | EngineError::Bug(_)
                    | EngineError::NotFinite
                    | EngineError::ShuttingDown => {
                        *locked(&m.last_error) = Some((unix_time_s(), error.to_string()));
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
                m.to_first_token.observe(timings.queue + timings.prefill);
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
        let m = &self.metrics;
        self.answers[choice].ended = true;
        *locked(&m.finished).entry(FinishReason::from(reason).name()).or_default() += 1;
        if timings.predicted_n > 0 {
            m.decoded.observe(timings.decode);
        }
        m.answered.observe(timings.queue + timings.prefill + timings.decode);
    }

    /// Ends all answers that have not ended.
    pub fn end_all(&mut self, reason: &'static str) {
        for answer in self.answers.iter_mut().filter(|answer| !answer.ended) {
            answer.ended = true;
            *locked(&self.metrics.finished).entry(reason).or_default() += 1;
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.end_all("abort");
    }
}

/// Times, counted by the least bound that they are within; seconds.
struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: what is beyond all of them.
    counts: Vec<AtomicU64>,
    sum_ns: AtomicU64,
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

/// The text that Prometheus reads, <https://prometheus.io/docs/instrumenting/exposition_formats/>. Every sample has the model's name.
struct Exposition<'a> {
    text: String,
    model: &'a str,
    name: &'static str,
}

impl Exposition<'_> {
    /// Samples up to the next call are of this family.
    fn family(&mut self, name: &'static str, kind: &str, help: &str) -> &mut Self {
        self.name = name;
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self
    }

    fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        self.line("", labels, value)
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        let _ = write!(self.text, "{}{suffix}{{model_name=\"{}\"", self.name, escaped(self.model));
        for (label, of) in labels {
            let _ = write!(self.text, ",{label}=\"{}\"", escaped(of));
        }
        let _ = writeln!(self.text, "}} {value}");
        self
    }

    fn histogram(&mut self, name: &'static str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let mut sum = 0;
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".into()]);
        for (bound, n) in bounds.zip(&histogram.counts) {
            sum += n.load(Ordering::Relaxed);
            self.line("_bucket", &[("le", &bound)], sum);
        }
        self.line("_sum", &[], histogram.sum_ns.load(Ordering::Relaxed) as f64 / 1e9);
        self.line("_count", &[], sum);
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// What the server does, for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "getMetrics",
    tag = "server",
    responses(
        (
            status = 200,
            description = "Prometheus' text format.",
            body = String,
            content_type = "text/plain; version=0.0.4; charset=utf-8",
        ),
        AtTheDoor,
    ),
)]
pub(super) async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, exposition(&server)).into_response()
}

fn exposition(server: &Server) -> String {
    let m = &server.metrics;
    let mut out = Exposition { text: String::new(), model: &server.model_id, name: "" };
    out.family("unicorn_build_info", "gauge", "The version that runs; always 1.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    out.family("process_start_time_seconds", "gauge", "When the server started, in Unix time.")
        .sample(&[], server.created);
    out.family(
        "unicorn_ready",
        "gauge",
        "1 while requests are taken: not while loading, draining, or after the device was lost.",
    )
    .sample(&[], u8::from(server.engine().is_some_and(|engine| engine.health().is_ok())));
    out.family("unicorn_log_lines_lost_total", "counter", "Lines of the log that nobody read in time.")
        .sample(&[], (server.options.lost_log_lines)());
    out.family("unicorn_http_requests_total", "counter", "Responses begun, by route and status.");
    for ((route, status), n) in &*locked(&m.responses) {
        out.sample(&[("endpoint", route), ("status", &status.to_string())], n);
    }
    out.family(
        "unicorn_requests_total",
        "counter",
        "Requests taken, by class and by task of a chat program.",
    );
    for (purpose, n) in &*locked(&m.taken) {
        out.sample(&[("class", purpose.class()), ("task", purpose.task)], n);
    }
    out.family("unicorn_request_success_total", "counter", "Answers that ended, by reason.");
    for (reason, n) in &*locked(&m.finished) {
        out.sample(&[("finished_reason", reason)], n);
    }
    let [prompt, cached, generated] = m.tokens();
    out.family("unicorn_prompt_tokens_total", "counter", "Tokens of prompts.").sample(&[], prompt);
    out.family("unicorn_generation_tokens_total", "counter", "Tokens generated.").sample(&[], generated);
    out.family("unicorn_prefix_cache_queries_total", "counter", "Tokens looked for in the prefix cache.")
        .sample(&[], prompt);
    out.family("unicorn_prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.")
        .sample(&[], cached);
    for (name, help, histogram) in [
        ("unicorn_time_to_first_token_seconds", "From submission to the first token.", &m.to_first_token),
        ("unicorn_inter_token_latency_seconds", "Between two tokens of an answer.", &m.between_tokens),
        ("unicorn_request_queue_time_seconds", "From submission to the first step.", &m.queued),
        ("unicorn_request_prefill_time_seconds", "From the first step to the first token.", &m.prefilled),
        ("unicorn_request_decode_time_seconds", "From the first token to the last.", &m.decoded),
        ("unicorn_e2e_request_latency_seconds", "From submission to the last token.", &m.answered),
    ] {
        out.histogram(name, help, histogram);
    }
    if let Some(service) = server.service.get() {
        out.family("unicorn_grammars_compiled_total", "counter", "Grammars compiled, those that failed too.")
            .sample(&[], service.grammars_compiled());
    }
    of_engine(&mut out, server);
    of_device(&mut out, server);
    out.text
}

fn of_engine(out: &mut Exposition<'_>, server: &Server) {
    let Some(engine) = server.engine() else { return };
    let stats = engine.stats();
    out.family("unicorn_num_requests_waiting", "gauge", "Requests that wait for their first step.")
        .sample(&[], stats.waiting);
    out.family("unicorn_num_requests_running", "gauge", "Answers that are being computed.")
        .sample(&[], stats.running);
    let pools = [("full", stats.full), ("sliding", stats.sliding)];
    out.family(
        "unicorn_kv_cache_usage_perc",
        "gauge",
        "Share of a pool's blocks that running answers hold, 0 to 1.",
    );
    for (pool, PoolUse { free, cached, held }) in pools {
        let all = free + cached + held;
        out.sample(&[("pool", pool)], if all == 0 { 0.0 } else { held as f64 / all as f64 });
    }
    out.family(
        "unicorn_kv_cache_blocks",
        "gauge",
        "Blocks of a pool: held by running answers, kept by the prefix cache alone, free.",
    );
    for (pool, PoolUse { free, cached, held }) in pools {
        for (state, n) in [("held", held), ("cached", cached), ("free", free)] {
            out.sample(&[("pool", pool), ("state", state)], n);
        }
    }
    let guesses = [("lookup", stats.guesses.lookup), ("draft_model", stats.guesses.model)];
    out.family(
        "unicorn_spec_decode_num_draft_tokens_total",
        "counter",
        "Tokens guessed ahead, by who guessed.",
    );
    for (guesser, drafts) in guesses {
        out.sample(&[("guesser", guesser)], drafts.proposed);
    }
    out.family("unicorn_spec_decode_num_accepted_tokens_total", "counter", "Guesses that were right.");
    for (guesser, drafts) in guesses {
        out.sample(&[("guesser", guesser)], drafts.accepted);
    }
    for (name, help, n) in [
        ("unicorn_num_preemptions_total", "Answers put off for want of blocks.", stats.preemptions),
        ("unicorn_steps_total", "Steps given to the device.", stats.steps),
        ("unicorn_step_tokens_total", "Tokens that those computed.", stats.step_tokens),
        ("unicorn_step_sequences_total", "Answers that had a share in those.", stats.step_shares),
    ] {
        out.family(name, "counter", help).sample(&[], n);
    }
    out.family(
        "unicorn_host_seconds_total",
        "counter",
        "Time of the engine's thread beside waiting for the device and for work.",
    )
    .sample(&[], stats.host_ns as f64 / 1e9);
}

fn of_device(out: &mut Exposition<'_>, server: &Server) {
    let Some(facts) = server.facts() else { return };
    out.family("unicorn_gpu_memory_bytes", "gauge", "What was placed on the device, by class and heap.");
    for placed in &facts.placements {
        out.sample(&[("class", &placed.class), ("heap", &placed.heap)], placed.bytes);
    }
    let memory = (facts.memory)();
    if !memory.heaps.is_empty() {
        out.family("unicorn_gpu_heap_size_bytes", "gauge", "Memory of the device, by heap.");
        for heap in &memory.heaps {
            out.sample(&[("heap", &heap.heap)], heap.size_bytes);
        }
        out.family("unicorn_gpu_heap_free_bytes", "gauge", "What of it this process may still take.");
        for heap in &memory.heaps {
            out.sample(&[("heap", &heap.heap)], heap.free_bytes);
        }
    }
    let of_driver = [("vram", memory.vram), ("gtt", memory.gtt)];
    if of_driver.iter().any(|(_, bytes)| bytes.is_some()) {
        out.family("unicorn_gpu_memory_driver_bytes", "gauge", "What the driver says this process holds.");
        for (kind, bytes) in of_driver.iter().filter_map(|(kind, bytes)| Some((kind, (*bytes)?))) {
            out.sample(&[("kind", kind)], bytes);
        }
    }
    if let Some(bytes) = memory.resident {
        out.family("process_resident_memory_bytes", "gauge", "Host memory of the process.")
            .sample(&[], bytes);
    }
    if let Some(submitted) = (facts.submitted)() {
        let counters = [
            ("unicorn_gpu_dispatches_total", "Dispatches given to the device.", submitted.dispatches),
            ("unicorn_gpu_copies_total", "Copies given to the device.", submitted.copies),
            ("unicorn_gpu_barriers_total", "Barriers between them.", submitted.barriers),
        ];
        for (name, help, value) in counters {
            out.family(name, "counter", help).sample(&[], value);
        }
        let help = "Bytes that dispatches and copies declared to read or write, in whole ranges.";
        out.family("unicorn_gpu_declared_bytes_total", "counter", help);
        for (class, bytes) in &submitted.declared {
            out.sample(&[("class", class)], *bytes);
        }
    }
    let kernels = server.metrics.kernels((facts.kernels)());
    if !kernels.is_empty() {
        out.family(
            "unicorn_kernel_seconds_total",
            "counter",
            "Device time by kernel, while gpu.profile is on.",
        );
        for kernel in &kernels {
            out.sample(&[("kernel", &kernel.kernel)], kernel.time.as_secs_f64());
        }
        out.family(
            "unicorn_kernel_dispatches_total",
            "counter",
            "Dispatches by kernel, while gpu.profile is on.",
        );
        for kernel in &kernels {
            out.sample(&[("kernel", &kernel.kernel)], kernel.dispatches);
        }
    }
}
