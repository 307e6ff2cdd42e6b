//! Health, status, metrics and the model card of a server. `/health` reflects whether the device works.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use futures::StreamExt as _;
use serde_json::{Value, json};
use unicorn::api::{self, AccessPolicy, Keys, SUPPORTED_PARAMETERS, Server};

use crate::support::app::{App, MODEL, OPTIONS, app_with_policy};
use crate::support::fake_runner::HANG;
use crate::support::http::{assert_all_free, chat, get, post, send, send_json};
use crate::support::json::with;
use crate::support::server::report;

async fn ask(app: &App, more: Value) -> (u16, Value) {
    let (status, _, bytes) = send(&app.router, post(with(chat("Hi"), more).to_string())).await;
    (status.as_u16(), serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

async fn health(app: &App) -> (u16, String) {
    let (status, _, body) = send_json(&app.router, get("/health")).await;
    (status.as_u16(), body["status"].as_str().expect("a word").to_owned())
}

async fn status(app: &App) -> Value {
    let (code, _, body) = send_json(&app.router, get("/status")).await;
    assert_eq!(code, 200);
    body
}

fn app() -> App {
    app_with_policy(AccessPolicy::default(), "One, two, three")
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_ok_after_a_recent_step_or_a_successful_probe() {
    let app = app();
    assert_eq!((health(&app).await, app.control.probes()), ((200, "ok".into()), 1));
    assert_eq!(
        (health(&app).await, app.control.probes()),
        ((200, "ok".into()), 1),
        "the last probe is recent"
    );
    let app = self::app();
    assert_eq!(ask(&app, json!({})).await.0, 200);
    assert_all_free(&app.engine).await;
    assert_eq!(
        (health(&app).await, app.control.probes()),
        ((200, "ok".into()), 0),
        "a recent step replaces the probe"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_does_not_answer_is_unresponsive_until_it_answers() {
    let app = app();
    app.control.hold_probes(true);
    for _ in 0..2 {
        assert_eq!(health(&app).await, (503, "unresponsive".into()));
    }
    app.control.hold_probes(false);
    // The late result of the probe counts.
    let since = Instant::now();
    while health(&app).await.0 != 200 {
        assert!(since.elapsed() < HANG, "never healthy again");
    }
    assert_eq!(app.control.probes(), 1, "no second probe");

    // A step may take long, and no probe is sent while it runs.
    let app = self::app();
    app.control.allow(0);
    let (router, control) = (app.router.clone(), app.control.clone());
    let asked = tokio::spawn(async move { send(&router, post(chat("Hi").to_string())).await.0 });
    tokio::task::spawn_blocking(move || control.submitted(1)).await.expect("a step comes");
    assert_eq!(health(&app).await, (200, "ok".into()));
    tokio::time::sleep(OPTIONS.device_timeout + Duration::from_millis(50)).await;
    assert_eq!(health(&app).await, (503, "unresponsive".into()));
    assert_eq!(status(&app).await["requests"], json!({"open": 1, "arriving": 0, "waiting": 0, "running": 1}));
    app.control.release();
    assert_eq!(asked.await.expect("no panic"), 200);
    assert_eq!((health(&app).await, app.control.probes()), ((200, "ok".into()), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_with_a_wrong_probe_result_is_lost() {
    let app = app();
    app.control.fail_probes();
    let (code, _, body) = send_json(&app.router, get("/health")).await;
    assert_eq!((code.as_u16(), &body["status"]), (503, &json!("lost")));
    assert!(body["message"].as_str().expect("why").contains("came back wrong"), "{body}");
    assert_eq!(ask(&app, json!({})).await.0, 503);
    assert_eq!(status(&app).await["status"], "lost");
    assert!(app.engine.join(HANG));
}

/// The samples of the text, by name and labels. Panics if the text is not in Prometheus format.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let (mut samples, mut kinds) = (BTreeMap::new(), BTreeMap::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a name and a kind");
            assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
            continue;
        }
        if line.starts_with("# HELP ") {
            continue;
        }
        let (name, value) = line.rsplit_once(' ').expect(line);
        let family = name.split('{').next().expect("a name");
        let stem = ["_bucket", "_sum", "_count"].iter().find_map(|end| family.strip_suffix(end));
        let kind =
            kinds.get(family).or_else(|| kinds.get(stem?)).unwrap_or_else(|| panic!("{line}: no TYPE"));
        assert_eq!(kind == "counter", family.ends_with("_total"), "{line}");
        assert!(name.contains(&format!("{{model_name=\"{MODEL}\"")), "{line}");
        let name = name.replace(&format!("model_name=\"{MODEL}\""), "").replace("{,", "{").replace("{}", "");
        assert!(samples.insert(name, value.parse().expect(line)).is_none(), "{line} twice");
    }
    samples
}

async fn metrics(app: &App) -> BTreeMap<String, f64> {
    let (code, headers, bytes) = send(&app.router, get("/metrics")).await;
    assert_eq!(code, 200);
    assert!(headers["content-type"].to_str().expect("text").starts_with("text/plain; version=0.0.4"));
    parse(&String::from_utf8(bytes).expect("UTF-8"))
}

#[tokio::test]
async fn metrics_add_up_to_the_requests_that_were_sent() {
    let app = app();
    let before = metrics(&app).await;
    assert_eq!(before["unicorn_ready"], 1.0);
    assert_eq!(before["unicorn_generation_tokens_total"], 0.0);
    assert!(!before.keys().any(|name| name.starts_with("unicorn_gpu_memory")), "no facts are known yet");

    let mut usage = [0.0; 3];
    for more in [json!({}), json!({"max_tokens": 3, "n": 2}), json!({"stop": "two"})] {
        let (code, body) = ask(&app, more).await;
        assert_eq!(code, 200, "{body}");
        let of = |name: &str| body["usage"][name].as_f64().expect("a number");
        usage[0] += of("prompt_tokens");
        usage[1] += of("completion_tokens");
        usage[2] += body["usage"]["prompt_tokens_details"]["cached_tokens"].as_f64().expect("a number");
    }
    assert_eq!(ask(&app, json!({"temperature": "hot"})).await.0, 400);
    send(&app.router, get("/made/up/by/somebody")).await;
    app.server.library().first().1.set_report(report());
    let m = metrics(&app).await;
    for (name, value) in [
        ("unicorn_prompt_tokens_total", usage[0]),
        ("unicorn_prefix_cache_queries_total", usage[0]),
        ("unicorn_prefix_cache_hits_total", usage[2]),
        ("unicorn_generation_tokens_total", usage[1]),
        ("unicorn_request_success_total{finished_reason=\"stop\"}", 2.0),
        ("unicorn_request_success_total{finished_reason=\"length\"}", 2.0),
        ("unicorn_http_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"}", 3.0),
        ("unicorn_http_requests_total{endpoint=\"/v1/chat/completions\",status=\"400\"}", 1.0),
        ("unicorn_http_requests_total{endpoint=\"other\",status=\"404\"}", 1.0),
        ("unicorn_http_requests_total{endpoint=\"/metrics\",status=\"200\"}", 1.0),
        ("unicorn_time_to_first_token_seconds_count", 3.0),
        ("unicorn_time_to_first_token_seconds_bucket{le=\"+Inf\"}", 3.0),
        ("unicorn_request_queue_time_seconds_count", 3.0),
        ("unicorn_request_prefill_time_seconds_count", 3.0),
        // Each answer counts once.
        ("unicorn_e2e_request_latency_seconds_count", 4.0),
        ("unicorn_request_decode_time_seconds_count", 4.0),
        ("unicorn_num_requests_waiting", 0.0),
        ("unicorn_num_preemptions_total", 0.0),
        ("unicorn_gpu_memory_bytes{class=\"KV cache\",heap=\"heap 0\"}", 7.0),
        ("unicorn_gpu_memory_bytes{class=\"norms\",heap=\"heap \\\"1\\\"\"}", 9.0),
        ("unicorn_gpu_heap_read_bytes_per_second{heap=\"heap 0\"}", 70e9),
        ("unicorn_gpu_memory_driver_bytes{kind=\"vram\"}", 11.0),
        ("unicorn_request_refusals_total{reason=\"invalid_value\"}", 1.0),
        ("unicorn_request_refusals_total{reason=\"not_found\"}", 1.0),
        ("unicorn_slow_readers_total", 0.0),
        ("unicorn_num_replays_total", 0.0),
        ("process_resident_memory_bytes", 13.0),
        ("process_cpu_seconds_total", 1.5),
        ("unicorn_device_process_cpu_seconds_total", 2.5),
        ("process_open_fds", 31.0),
        ("unicorn_energy_joules_total{source=\"rapl\"}", 37.5),
        ("unicorn_kernel_seconds_total{kernel=\"matmul\"}", 0.5),
        ("unicorn_gpu_dispatches_total", 3.0),
        ("unicorn_gpu_memory_shortages_total", 6.0),
        ("unicorn_gpu_copies_total", 5.0),
        ("unicorn_gpu_barriers_total", 4.0),
        ("unicorn_gpu_busy_seconds_total", 0.75),
        ("unicorn_courtesy_share", 0.5),
        ("unicorn_npu_kv_heads", 2.0),
        ("unicorn_npu_completed_total", 12.0),
        ("unicorn_npu_fallback_total{reason=\"npu-timeout\"}", 1.0),
        ("unicorn_npu_fallback_total{reason=\"npu-process\"}", 0.0),
        ("unicorn_npu_waited_seconds_total", 0.5),
        ("unicorn_courtesy_held_seconds_total", 0.25),
        ("unicorn_gpu_declared_bytes_total{class=\"norms\"}", 17.0),
        ("unicorn_kernel_dispatches_total{kernel=\"matmul\"}", 2.0),
    ] {
        assert_eq!(m.get(name), Some(&value), "{name}: {m:#?}");
    }
    // All tokens count except the first one of each answer. Tokens after a stop string were never sent.
    assert!(m["unicorn_inter_token_latency_seconds_count"] > 0.0);
    assert!(m["unicorn_steps_total"] > 0.0 && m["unicorn_step_tokens_total"] >= usage[1]);
    let buckets: Vec<f64> = m
        .iter()
        .filter(|(name, _)| name.starts_with("unicorn_time_to_first_token_seconds_bucket"))
        .map(|(_, n)| *n)
        .collect();
    assert!(buckets.len() > 5 && buckets.iter().all(|n| *n <= 3.0));
    let pool = |state: &str| m[&format!("unicorn_kv_cache_blocks{{pool=\"full\",state=\"{state}\"}}")];
    assert_eq!(pool("held") + pool("cached") + pool("free"), 150.0);
    // Counters only grow. A second scrape adds the new measurements.
    assert_eq!(metrics(&app).await["unicorn_kernel_seconds_total{kernel=\"matmul\"}"], 1.0);
}

#[tokio::test]
async fn time_to_first_token_starts_when_a_request_arrives() {
    const PAUSE: Duration = Duration::from_millis(50);
    let app = app();
    let text = chat("Hi").to_string();
    let (first, rest) = text.split_at(5);
    let pieces = [(Duration::ZERO, first.to_owned()), (PAUSE, rest.to_owned())];
    let body = futures::stream::iter(pieces).then(async |(pause, piece)| {
        tokio::time::sleep(pause).await;
        Ok::<_, std::io::Error>(piece)
    });
    assert_eq!(send(&app.router, post(Body::from_stream(body))).await.0, 200);
    let m = metrics(&app).await;
    for name in ["unicorn_time_to_first_token_seconds_sum", "unicorn_e2e_request_latency_seconds_sum"] {
        assert!(m[name] >= PAUSE.as_secs_f64(), "{name}: {}", m[name]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_answers_are_counted_by_their_outcome() {
    let app = app();
    app.control.allow(2);
    let request = post(with(chat("Hi"), json!({"stream": true})).to_string());
    drop(tower::ServiceExt::oneshot(app.router.clone(), request).await.expect("begins"));
    app.control.release();
    assert_all_free(&app.engine).await;
    assert_eq!(metrics(&app).await["unicorn_request_success_total{finished_reason=\"abort\"}"], 1.0);
    assert_eq!(status(&app).await["last_error"], Value::Null, "the client left, which is not an error");

    let steps = app.control.batches().len();
    app.control.fail_wait_at(steps + 1);
    assert_eq!(ask(&app, json!({})).await.0, 503);
    let m = metrics(&app).await;
    assert_eq!(m["unicorn_request_success_total{finished_reason=\"error\"}"], 1.0);
    assert_eq!(m["unicorn_ready"], 0.0);
    let error = status(&app).await["last_error"].clone();
    assert!(error["message"].as_str().expect("why").contains("ring timeout"), "{error}");
    assert!(error["at"].as_u64() > Some(1_700_000_000));
}

#[tokio::test]
async fn status_reports_model_device_and_memory_but_no_prompt() {
    let loading = api::router(Server::new(MODEL, OPTIONS, AccessPolicy::default()));
    let (_, _, early) = send_json(&loading, get("/status")).await;
    assert_eq!((&early["status"], &early["model"]), (&json!("loading"), &json!({"id": MODEL})));
    assert!(
        !String::from_utf8(send(&loading, get("/metrics")).await.2).expect("UTF-8").contains("num_requests")
    );

    let app = app();
    app.server.library().first().1.set_report(report());
    ask(&app, json!({"messages": [{"role": "user", "content": "a canary"}], "user": "somebody"})).await;
    assert_all_free(&app.engine).await;
    let body = status(&app).await;
    for (pointer, value) in [
        ("/status", json!("ok")),
        ("/version", json!(env!("CARGO_PKG_VERSION"))),
        ("/model/id", json!(MODEL)),
        ("/model/context", json!(600)),
        ("/model/layers", json!(6)),
        ("/model/draft_layers", json!(2)),
        ("/device/name", json!("a \"device\"")),
        ("/device/driver", json!("a driver")),
        ("/device/self_test", json!({"kernels": 21, "layers": 6, "seconds": 0.5})),
        ("/courtesy", json!({"share": 0.5, "holds": true, "sessions_known": true})),
        ("/memory/placed/0", json!({"class": "KV cache", "heap": "heap 0", "buffers": 1, "bytes": 7})),
        (
            "/memory/heaps/0",
            json!({"heap": "heap 0", "size_bytes": 23, "free_bytes": 9, "read_bytes_per_s": 70_000_000_000_u64}),
        ),
        ("/memory/vram_bytes", json!(11)),
        ("/memory/gtt_bytes", Value::Null),
        ("/memory/resident_bytes", json!(13)),
        ("/requests", json!({"open": 0, "arriving": 0, "waiting": 0, "running": 0})),
        ("/kernels/0", json!({"kernel": "matmul", "dispatches": 2, "seconds": 0.5})),
        ("/finished", json!({"stop": 1})),
        ("/guesses/draft_model", json!({"proposed": 0, "accepted": 0})),
        ("/last_error", Value::Null),
    ] {
        assert_eq!(body.pointer(pointer), Some(&value), "{pointer}: {body:#}");
    }
    assert!(body["uptime_s"].is_u64() && body["tokens"]["generated"].as_u64() > Some(0));
    let blocks = ["held", "cached", "free"].map(|name| body["kv"]["full"][name].as_u64().unwrap());
    assert_eq!(blocks.iter().sum::<u64>(), 150);
    let all = body.to_string() + &format!("{:?}", metrics(&app).await);
    assert!(!all.contains("canary") && !all.contains("somebody"));
}

#[tokio::test]
async fn status_metrics_and_models_require_a_key_if_one_is_configured() {
    let door = AccessPolicy {
        keys: Keys::from_variable("test", "a-key").expect("valid"),
        ..AccessPolicy::default()
    };
    let app = app_with_policy(door, "ok");
    for path in ["/status", "/metrics", "/v1/models"] {
        assert_eq!(send(&app.router, get(path)).await.0, 401, "{path}");
        let request =
            Request::get(path).header("authorization", "Bearer a-key").body(Body::empty()).expect("valid");
        assert_eq!(send(&app.router, request).await.0, 200, "{path}");
    }
    assert_eq!(send(&app.router, get("/health")).await.0, 200);
}

#[tokio::test]
async fn the_model_card_lists_the_context_and_the_request_fields() {
    let loading = api::router(Server::new(MODEL, OPTIONS, AccessPolicy::default()));
    let app = app();
    let card = |body: Value| body["data"][0].clone();
    let early = card(send_json(&loading, get("/v1/models")).await.2);
    assert!(early.get("max_model_len").is_none(), "unknown before the load");
    let card = card(send_json(&app.router, get("/v1/models")).await.2);
    assert_eq!((&card["max_model_len"], &card["context_length"]), (&json!(600), &json!(600)));
    assert_eq!(card["meta"]["n_ctx"], 600);
    assert_eq!(card["architecture"]["input_modalities"], json!(["text"]));
    assert_eq!(card["supported_parameters"], early["supported_parameters"]);
    // Each listed field must be read: this object is not a valid value of any of them.
    for name in SUPPORTED_PARAMETERS {
        let (code, body) = ask(&app, json!({"logprobs": true, name: {"effort": "no such thing"}})).await;
        let param = body["error"]["param"].as_str().unwrap_or_default();
        assert!(code == 400 && param.starts_with(name), "{name}: {code} {body}");
    }
}
