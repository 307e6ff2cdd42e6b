//! `/metrics`: counts and times of requests, and values of the engine and the device, for Prometheus.
//!
//! `docs/metrics.md` lists the names. If vLLM has the metric, the name is vLLM's name with the prefix `unicorn_`
//! instead of `vllm:`, because Prometheus reserves colons for its recording rules. So vLLM's dashboards need only this
//! change.
//!
//! This module writes the text itself, without a Prometheus client library. Such libraries own the values of their
//! metrics. These values belong to the engine and the device, and are queried at each scrape. `prometheus-client` would
//! also write OpenMetrics, in which counters have different names. A test reads the text with Prometheus' own parser,
//! and compares the names with docs/metrics.md.
//!
//! Every label has few values, which are known beforehand: the value is `other` for a path that is not a route. No
//! value comes from a request's text, and no label names a client or a key.

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::api::http::counters::{Histogram, ModelMetrics, locked};
use crate::api::openapi::AuthErrors;
use crate::api::server::Server;
use crate::device::{DeviceState, HeapReport, Metric};
use crate::engine::{PoolUse, Stats};
use crate::library::{LiveReport, ModelReport, Stage};
use crate::session::Service;

/// The text that Prometheus reads, <https://prometheus.io/docs/instrumenting/exposition_formats/>. The samples of a model
/// have its name as a label. The samples of the server have it too if there is only one model.
struct Exposition<'a> {
    text: String,
    /// The only model.
    alone: Option<&'a str>,
    /// The model of the next samples.
    model: Option<&'a str>,
    name: &'static str,
}

impl<'a> Exposition<'a> {
    /// Begins a family. Samples up to the next call belong to it, and to the server, or to the model of a later call of
    /// [`Self::of`].
    fn family(&mut self, name: &'static str, kind: &str, help: &str) -> &mut Self {
        (self.name, self.model) = (name, self.alone);
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self
    }

    /// The next samples of the family are of this model.
    fn of(&mut self, model: &'a str) -> &mut Self {
        self.model = Some(model);
        self
    }

    fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        self.line("", labels, value)
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) -> &mut Self {
        let model = self.model.map(|model| ("model_name", model));
        let labels = model.iter().chain(labels).map(|(label, of)| format!("{label}=\"{}\"", escaped(of)));
        let labels = labels.collect::<Vec<_>>().join(",");
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        let _ = writeln!(self.text, "{}{suffix}{labels} {value}", self.name);
        self
    }

    /// The samples of a histogram, of the present family and model.
    fn histogram(&mut self, histogram: &Histogram) {
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

/// The counts and times of the server, for Prometheus.
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
        AuthErrors,
    ),
)]
pub(in crate::api) async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, exposition(&server)).into_response()
}

/// Writes families of one sample without labels, each with its kind, its name, the sample's value and the help.
macro_rules! families {
    ($out:ident: $($kind:ident $name:literal = $value:expr, $help:literal;)*) => {
        $($out.family($name, stringify!($kind), $help).sample(&[], $value);)*
    };
    // One sample of each model, whose name and value are a pair of the list.
    ($out:ident, $models:expr, $of:pat_param => $($kind:ident $name:literal = $value:expr, $help:literal;)*) => {
        $(
            $out.family($name, stringify!($kind), $help);
            for (model, $of) in $models {
                $out.of(model).sample(&[], $value);
            }
        )*
    };
}

fn exposition(server: &Server) -> String {
    let m = &server.metrics;
    let models = server.library().models();
    let alone = (!server.library().is_shared()).then(|| models[0].1.id());
    let mut out = Exposition { text: String::new(), alone, model: None, name: "" };
    out.family("unicorn_build_info", "gauge", "The version that runs; always 1.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    let is_ready = server.library().takes_requests();
    families! { out:
        gauge "process_start_time_seconds" = server.created, "When the server started, in Unix time.";
        gauge "unicorn_ready" = u8::from(is_ready),
            "1 while requests are taken: not while loading, draining, or after the device was lost.";
        counter "unicorn_log_lines_lost_total" = (server.options.lost_log_lines)(),
            "Lines of the log that were not read in time.";
    }
    out.family("unicorn_http_requests_total", "counter", "Responses begun, by route and status.");
    for ((route, status), n) in &*locked(&m.responses) {
        out.sample(&[("endpoint", route), ("status", &status.to_string())], n);
    }
    out.family(
        "unicorn_request_refusals_total",
        "counter",
        "Requests that were refused, by the error's code.",
    );
    for (code, n) in &*locked(&m.refused) {
        out.sample(&[("reason", code)], n);
    }
    families! { out:
        counter "unicorn_slow_readers_total" =
            m.slow_readers.load(Ordering::Relaxed) + server.connections.unread(),
            "Requests given up, since their clients did not read.";
    }
    if let Some(store) = server.library().kv_store() {
        let disk = store.stats();
        families! { out:
            gauge "unicorn_kv_disk_bytes" = disk.bytes, "Bytes of the conversations on disk.";
            gauge "unicorn_kv_disk_max_bytes" = disk.max_bytes, "Their bound, kv.disk.max_bytes.";
            gauge "unicorn_kv_disk_entries" = disk.entries, "Their files.";
            gauge "unicorn_kv_disk_queued_bytes" = disk.queued_bytes, "Bytes that wait to be written.";
            counter "unicorn_kv_disk_written_bytes_total" = disk.written_bytes, "Bytes of conversations written.";
            counter "unicorn_kv_disk_read_bytes_total" = disk.read_bytes, "Bytes of conversations read.";
            counter "unicorn_kv_disk_evicted_entries_total" = disk.evicted_entries, "Files removed to make room.";
            counter "unicorn_kv_disk_damaged_entries_total" = disk.damaged_entries,
                "Files removed because they were damaged.";
            counter "unicorn_kv_disk_errors_total" = disk.write_errors + disk.read_errors,
                "Reads and writes that the system refused.";
        }
    }
    // The only model of a server has samples before its first request.
    let of_model = |id| if alone.is_some() { Some(m.of_model(id)) } else { m.of_used_model(id) };
    let requests = models.iter().filter_map(|(_, model)| Some((model.id(), of_model(model.id())?)));
    of_requests(&mut out, &requests.collect::<Vec<_>>());
    let engines = models.iter().filter_map(|(index, model)| {
        let service = model.service()?;
        let mut stats = service.engine().stats();
        stats.waiting += server.library().waiting(*index);
        Some((model.id(), (service, stats)))
    });
    of_engines(&mut out, &engines.collect::<Vec<_>>());
    let reports = models.iter().filter_map(|(index, model)| {
        // A model that left for another one has no memory.
        let is_there = !server.library().is_shared() || server.library().stage(*index) != Stage::Unloaded;
        let report = model.report().filter(|_| is_there)?;
        let live = (report.live)();
        Some((model.id(), Measured { report, live }))
    });
    of_devices(&mut out, server, &reports.collect::<Vec<_>>());
    out.text
}

fn of_requests<'a>(out: &mut Exposition<'a>, models: &[(&'a str, Arc<ModelMetrics>)]) {
    if models.is_empty() {
        return;
    }
    out.family(
        "unicorn_requests_total",
        "counter",
        "Requests taken, by class and by task of a chat program.",
    );
    for (model, m) in models {
        for (purpose, n) in &*locked(&m.taken) {
            out.of(model).sample(&[("class", purpose.class()), ("task", purpose.task)], n);
        }
    }
    out.family("unicorn_request_success_total", "counter", "Answers that ended, by reason.");
    for (model, m) in models {
        for (reason, n) in &*locked(&m.finished) {
            out.of(model).sample(&[("finished_reason", reason)], n);
        }
    }
    let tokens: Vec<_> = models.iter().map(|(model, m)| (*model, m.tokens())).collect();
    families! { out, &tokens, tokens =>
        counter "unicorn_prompt_tokens_total" = tokens[0], "Tokens of prompts.";
        counter "unicorn_generation_tokens_total" = tokens[2], "Tokens generated.";
        counter "unicorn_prefix_cache_queries_total" = tokens[0], "Tokens looked for in the prefix cache.";
        counter "unicorn_prefix_cache_hits_total" = tokens[1], "Tokens found in the prefix cache.";
    }
    type Of = fn(&ModelMetrics) -> &Histogram;
    let histograms: [(_, _, Of); 6] = [
        ("unicorn_time_to_first_token_seconds", "From a request's arrival to the first token.", |m| {
            &m.to_first_token
        }),
        ("unicorn_inter_token_latency_seconds", "Between two tokens of an answer.", |m| &m.between_tokens),
        ("unicorn_request_queue_time_seconds", "From submission to the first step.", |m| &m.queued),
        ("unicorn_request_prefill_time_seconds", "From the first step to the first token.", |m| &m.prefilled),
        ("unicorn_request_decode_time_seconds", "From the first token to the last.", |m| &m.decoded),
        ("unicorn_e2e_request_latency_seconds", "From a request's arrival to the last token.", |m| {
            &m.answered
        }),
    ];
    for (name, help, histogram) in histograms {
        out.family(name, "histogram", help);
        for (model, m) in models {
            out.of(model).histogram(histogram(m));
        }
    }
}

fn of_engines<'a>(out: &mut Exposition<'a>, engines: &[(&'a str, (Arc<Service>, Stats))]) {
    if engines.is_empty() {
        return;
    }
    families! { out, engines, (service, _) =>
        counter "unicorn_grammars_compiled_total" = service.grammars_compiled(),
            "Grammars compiled, those that failed too.";
    }
    families! { out, engines, (_, stats) =>
        gauge "unicorn_num_requests_waiting" = stats.waiting, "Requests that wait for their first step.";
        gauge "unicorn_num_requests_running" = stats.running, "Answers that are being computed.";
    }
    let pools = |stats: &Stats| [("full", stats.full), ("sliding", stats.sliding)];
    out.family(
        "unicorn_kv_cache_usage_perc",
        "gauge",
        "Share of a pool's blocks that running answers hold, 0 to 1.",
    );
    for (model, (_, stats)) in engines {
        for (pool, PoolUse { free, cached, held }) in pools(stats) {
            let all = free + cached + held;
            out.of(model).sample(&[("pool", pool)], if all == 0 { 0.0 } else { held as f64 / all as f64 });
        }
    }
    out.family(
        "unicorn_kv_cache_blocks",
        "gauge",
        "Blocks of a pool: held by running answers, kept by the prefix cache alone, free.",
    );
    for (model, (_, stats)) in engines {
        for (pool, PoolUse { free, cached, held }) in pools(stats) {
            for (state, n) in [("held", held), ("cached", cached), ("free", free)] {
                out.of(model).sample(&[("pool", pool), ("state", state)], n);
            }
        }
    }
    let drafters = |stats: &Stats| [("lookup", stats.drafts.lookup), ("draft_model", stats.drafts.model)];
    out.family(
        "unicorn_spec_decode_num_draft_tokens_total",
        "counter",
        "Tokens guessed ahead, by who guessed.",
    );
    for (model, (_, stats)) in engines {
        for (drafter, drafts) in drafters(stats) {
            out.of(model).sample(&[("guesser", drafter)], drafts.proposed);
        }
    }
    out.family("unicorn_spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that were right.");
    for (model, (_, stats)) in engines {
        for (drafter, drafts) in drafters(stats) {
            out.of(model).sample(&[("guesser", drafter)], drafts.accepted);
        }
    }
    families! { out, engines, (_, stats) =>
        counter "unicorn_kv_disk_hits_total" = stats.disk.hits, "Answers that began with tokens from the disk.";
        counter "unicorn_kv_disk_hit_tokens_total" = stats.disk.hit_tokens, "These tokens.";
        counter "unicorn_kv_disk_failed_reads_total" = stats.disk.failed_reads,
            "Answers for which reading was given up.";
        counter "unicorn_kv_disk_slower_reads_total" = stats.disk.slower_reads,
            "Answers computed because reading was expected to take longer.";
        counter "unicorn_kv_disk_lost_entries_total" = stats.disk.lost_entries,
            "Parts of conversations that were not kept.";
        counter "unicorn_num_preemptions_total" = stats.preemptions, "Answers put off for want of blocks.";
        counter "unicorn_device_losses_total" = stats.losses, "Times that the device was lost.";
        counter "unicorn_npu_failures_total" = stats.coprocessor_failures,
            "Failures of an NPU that is required, each of which had the model loaded again.";
        counter "unicorn_num_replays_total" = stats.replays,
            "Answers computed again after losses of the device, and failures of its NPU.";
        counter "unicorn_steps_total" = stats.steps, "Steps given to the device.";
        counter "unicorn_step_tokens_total" = stats.step_tokens, "Tokens that those computed.";
        counter "unicorn_step_sequences_total" = stats.step_shares, "Answers that had a share in those.";
        counter "unicorn_used_experts_total" = stats.used_experts,
            "Experts that those used, each counted once for a layer and step.";
        counter "unicorn_mm_cache_queries_total" = stats.images_encoded + stats.image_hits,
            "Images that answers needed.";
        counter "unicorn_mm_cache_hits_total" = stats.image_hits, "Those whose embeddings were there.";
        counter "unicorn_image_encoding_seconds_total" = stats.image_encoding_ns as f64 / 1e9,
            "Time in which the others were encoded, and no answer went on.";
        counter "unicorn_recovery_seconds_total" = stats.recovery_ns as f64 / 1e9,
            "Time from losses of the device, and failures of its NPU, until it computed again.";
        counter "unicorn_host_seconds_total" = stats.host_ns as f64 / 1e9,
            "Time of the engine's thread, except waiting for the device and for work.";
    }
}

/// What a model's device reports.
struct Measured {
    report: Arc<ModelReport>,
    live: LiveReport,
}

fn of_devices<'a>(out: &mut Exposition<'a>, server: &Server, models: &[(&'a str, Measured)]) {
    let Some((_, Measured { live: first, .. })) = models.first() else { return };
    out.family("unicorn_gpu_memory_bytes", "gauge", "What was placed on the device, by class and heap.");
    for (model, Measured { report, .. }) in models {
        for placed in &report.device.placements {
            out.of(model).sample(&[("class", &placed.class), ("heap", &placed.heap)], placed.bytes);
        }
    }
    families! { out, models, Measured { live, .. } =>
        gauge "unicorn_courtesy_share" =
            live.courtesy.filter(|courtesy| courtesy.holds).map_or(1.0, |courtesy| courtesy.share),
            "Share of the device's time that steps may take now; 1 is no bound.";
    }
    let states = models.iter().filter_map(|(model, of)| Some((*model, of.live.device.as_ref()?)));
    let states: Vec<(&str, &DeviceState)> = states.collect();
    if states.iter().any(|(_, state)| !state.heaps.is_empty()) {
        out.family("unicorn_gpu_heap_size_bytes", "gauge", "Memory of the device, by heap.");
        of_heaps(out, &states, |heap| Some(heap.size_bytes as f64));
        out.family("unicorn_gpu_heap_free_bytes", "gauge", "What of it this process may still take.");
        of_heaps(out, &states, |heap| Some(heap.free_bytes as f64));
        let is_measured = |heap: &HeapReport| heap.read_bytes_per_s.is_some();
        if states.iter().any(|(_, state)| state.heaps.iter().any(is_measured)) {
            let help = "How fast the device read weights from the heap when this was measured.";
            out.family("unicorn_gpu_heap_read_bytes_per_second", "gauge", help);
            of_heaps(out, &states, |heap| heap.read_bytes_per_s.map(|bytes_per_s| bytes_per_s as f64));
        }
    }
    let of_driver = |state: &DeviceState| [("vram", state.vram), ("gtt", state.gtt)];
    if states.iter().any(|(_, state)| state.vram.or(state.gtt).is_some()) {
        let help = "What the driver says this process holds.";
        out.family("unicorn_gpu_memory_driver_bytes", "gauge", help);
        for (model, state) in &states {
            for (kind, bytes) in of_driver(state).iter().filter_map(|(kind, bytes)| Some((kind, (*bytes)?))) {
                out.of(model).sample(&[("kind", kind)], bytes);
            }
        }
    }
    if let Some(bytes) = resident(first, &states) {
        families! { out: gauge "process_resident_memory_bytes" = bytes, "Host memory of the process."; }
    }
    families! { out:
        counter "process_cpu_seconds_total" = first.processor.as_secs_f64(), "Processor time of the server's process.";
    }
    if !states.is_empty() {
        families! { out, &states, state =>
            counter "unicorn_device_process_cpu_seconds_total" = state.processor.as_secs_f64(),
                "Processor time of the process that drives the device.";
        }
    }
    for (name, help, files) in [
        ("process_open_fds", "Files that the server's process has open.", first.open_files),
        ("process_max_fds", "Files that it may have open.", first.most_files),
    ] {
        if let Some(files) = files {
            out.family(name, "gauge", help).sample(&[], files);
        }
    }
    // Each model counts from its first load. The longest count goes up for as long as that model is there.
    let counts = models.iter().filter_map(|(_, measured)| measured.live.energy.as_ref());
    if let Some(energy) = counts.max_by(|a, b| a.joules.total_cmp(&b.joules)) {
        out.family("unicorn_energy_joules_total", "counter", "Energy that the machine used, idle or not.")
            .sample(&[("source", energy.source)], energy.joules);
    }
    // All models have the same metrics.
    for (i, Metric { name, kind, help, .. }) in first.metrics.iter().enumerate() {
        out.family(name, kind, help);
        for (model, Measured { live, .. }) in models {
            for (label, value) in live.metrics.get(i).iter().flat_map(|metric| &metric.samples) {
                let label = label.as_ref().map(|(label, of)| (*label, &**of));
                out.of(model).sample(label.as_slice(), value);
            }
        }
    }
    if !states.is_empty() {
        families! { out, &states, state =>
            counter "unicorn_gpu_dispatches_total" = state.dispatches, "Dispatches given to the device.";
            counter "unicorn_gpu_copies_total" = state.copies, "Copies given to the device.";
            counter "unicorn_gpu_barriers_total" = state.barriers, "Barriers between them.";
            counter "unicorn_gpu_memory_shortages_total" = state.memory_shortages,
                "Calls that the driver had no memory for at first, and took later.";
        }
        let busy = states.iter().filter_map(|(model, state)| Some((*model, state.busy?)));
        let busy: Vec<_> = busy.collect();
        if !busy.is_empty() {
            families! { out, &busy, busy =>
                counter "unicorn_gpu_busy_seconds_total" = busy.as_secs_f64(),
                    "Time in which the device computed steps, by its own clock.";
            }
        }
        families! { out, &states, state =>
            counter "unicorn_courtesy_held_seconds_total" = state.rested.as_secs_f64(),
                "Time for which submits were held back, so that others have the device.";
        }
        let help = "Bytes that dispatches and copies read or wrote, by their arguments.";
        out.family("unicorn_gpu_declared_bytes_total", "counter", help);
        for (model, state) in &states {
            for (class, bytes) in &state.declared {
                out.of(model).sample(&[("class", class)], *bytes);
            }
        }
    }
    let kernels = states.iter().flat_map(|(_, state)| state.kernels.clone());
    let kernels = server.metrics.kernels(kernels.collect());
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

fn of_heaps<'a>(
    out: &mut Exposition<'a>,
    states: &[(&'a str, &DeviceState)],
    value: impl Fn(&HeapReport) -> Option<f64>,
) {
    for (model, state) in states {
        for heap in &state.heaps {
            if let Some(value) = value(heap) {
                out.of(model).sample(&[("heap", &heap.heap)], value);
            }
        }
    }
}

/// Host memory of the server's process and of all device processes. `first` is the report of one of them.
fn resident(first: &LiveReport, states: &[(&str, &DeviceState)]) -> Option<u64> {
    let of_first = first.device.as_ref().and_then(|state| state.resident);
    let own = first.resident?.saturating_sub(of_first.unwrap_or(0));
    Some(own + states.iter().filter_map(|(_, state)| state.resident).sum::<u64>())
}
