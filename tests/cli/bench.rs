//! `bench serve` (the load generator), against scripted servers that answer well or badly and against this project's
//! own server, then `unicorn-lab model` and `unicorn-lab kernels`. Slow servers wait for events and not for a time, and no test
//! compares times.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

/// What a scripted server answers to request n, counted from 0. Request 0 warms up.
enum Reply {
    /// These pieces of text as a stream, with usage.
    Say(&'static [&'static str]),
    /// These pieces of text as a stream, without usage and without `[DONE]`.
    SayWithoutUsage(&'static [&'static str]),
    Refuse(u16, &'static str),
    /// These bytes, and nothing more.
    Raw(&'static str),
    /// An event stream of these lines that ends correctly at the level of HTTP.
    Events(&'static [&'static str]),
}

use Reply::{Events, Raw, Refuse, Say, SayWithoutUsage};

use crate::support::app::{router_for_many, router_that_says};
use crate::support::fake_runner::HANG;
use crate::support::lists::words;
use crate::support::program::{assert_error, lab, lab_on_software, output, printed, printed_json, unicorn};
use crate::support::root;

/// An HTTP server with a thread for each connection. It runs until the test ends.
struct Scripted {
    url: String,
    seen: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Scripted {
    fn start(script: impl Fn(usize, &Value) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
        let seen: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
        let (log, script) = (Arc::clone(&seen), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, script) = (Arc::clone(&log), Arc::clone(&script));
                // The client may disconnect early, so I/O errors are ignored.
                std::thread::spawn(move || drop(answer(stream.expect("connects"), &log, &*script)));
            }
        });
        Self { url, seen }
    }

    /// The bodies of the requests until now, in the order of their arrival.
    fn questions(&self) -> Vec<Value> {
        self.seen.lock().expect("no panic").iter().map(|(_, body)| body.clone()).collect()
    }

    fn command(&self, args: &[&str]) -> Command {
        unicorn(&[&["bench", "serve", "--url", &self.url][..], args].concat())
    }

    /// The report of a run that succeeds.
    #[track_caller]
    fn report(&self, args: &[&str]) -> Value {
        let (code, stdout, stderr) = output(self.command(&[args, &["--json"]].concat()));
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}"))
    }
}

fn answer(
    mut stream: TcpStream,
    log: &Mutex<Vec<(String, Value)>>,
    script: &dyn Fn(usize, &Value) -> Reply,
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(HANG))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if let Some((_, n)) = line.to_ascii_lowercase().split_once("content-length:") {
            length = n.trim().parse().expect("a length");
        }
        if line.trim().is_empty() {
            break;
        }
        head.push_str(&line);
    }
    if head.starts_with("GET /v1/models ") {
        let list = json!({"object": "list", "data": [{"id": "a/b"}]}).to_string();
        return stream.write_all(http("200 OK", "application/json", &list).as_bytes());
    }
    assert!(head.starts_with("POST /v1/chat/completions "), "{head}");
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let n = {
        let mut log = log.lock().expect("no panic");
        log.push((head, body.clone()));
        log.len() - 1
    };
    match script(n, &body) {
        Raw(bytes) => stream.write_all(bytes.as_bytes())?,
        Refuse(status, message) => {
            let error = json!({"error": {"message": message, "type": "server_error"}}).to_string();
            stream.write_all(http(&format!("{status} Refused"), "application/json", &error).as_bytes())?;
        }
        Events(lines) => send_events(&mut stream, lines.iter().map(|l| (*l).to_owned()))?,
        Say(pieces) => {
            let usage = json!({
                "prompt_tokens": 40,
                // Two tokens for each piece, so that the test can distinguish the server's count from the client's.
                "completion_tokens": 2 * pieces.len(),
                "prompt_tokens_details": {"cached_tokens": 7},
            });
            let end = [json!({"choices": [], "usage": usage}).to_string(), "[DONE]".into()];
            send_events(&mut stream, chunks(pieces).chain(end))?;
        }
        SayWithoutUsage(pieces) => send_events(&mut stream, chunks(pieces))?,
    }
    stream.shutdown(Shutdown::Both)
}

fn http(status: &str, kind: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n{body}")
}

/// The stream's lines: a role, the pieces, and the reason for the end.
fn chunks(pieces: &'static [&'static str]) -> impl Iterator<Item = String> {
    let chunk = |delta: Value, reason: Value| {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": null}).to_string()
    };
    let role = chunk(json!({"role": "assistant", "content": ""}), Value::Null);
    let said = pieces.iter().map(move |text| chunk(json!({"content": text}), Value::Null));
    let end = chunk(json!({}), "length".into());
    std::iter::once(role).chain(said).chain([end])
}

/// Sends a comment and then the events, each in its own HTTP chunk.
fn send_events(stream: &mut TcpStream, events: impl Iterator<Item = String>) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    for line in [": waiting\n\n".to_owned()].into_iter().chain(events.map(|e| format!("data: {e}\n\n"))) {
        stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes())?;
    }
    stream.write_all(b"0\r\n\r\n")
}

#[test]
fn a_closed_loop_counts_its_requests_and_their_tokens() {
    let server = Scripted::start(|_, _| Say(&["one ", "two ", "three"]));
    let args = words(
        "--concurrency 1,3 --requests 2 --max-tokens 9 --ignore-eos --temperature 0.5 --api-key secret",
    );
    let report = server.report(&args);
    assert_eq!((&report["model"], &report["scenario"]), (&json!("a/b"), &json!("closed")), "{report}");
    assert_eq!(report["tokens_counted_by"], "usage");
    let levels = report["levels"].as_array().expect("levels");
    assert_eq!(levels.len(), 2);
    for (level, streams) in levels.iter().zip([1, 3]) {
        assert_eq!(level["streams"], streams, "{level}");
        assert_eq!(level["requests"], 2 * streams, "{level}");
        assert_eq!((&level["failures"], &level["first_failure"]), (&json!(0), &Value::Null), "{level}");
        assert_eq!(level["tokens"], 2 * streams * 6, "{level}");
        assert_eq!(level["mean_prompt_tokens"], 40.0, "{level}");
        for figure in ["tokens_per_s", "ratio_to_one", "time_s"] {
            assert!(level[figure].as_f64().is_some_and(|n| n > 0.0), "{figure}: {level}");
        }
        for times in ["ttft_ms", "inter_token_ms"] {
            let figure =
                |name: &str| level[times][name].as_f64().unwrap_or_else(|| panic!("{times}: {level}"));
            assert!(figure("p50") <= figure("p99") && figure("p99") <= figure("max"), "{times}: {level}");
        }
    }
    assert_eq!(levels[0]["ratio_to_one"], 1.0);

    // One request warms up, and no two prompts are alike.
    let questions = server.questions();
    assert_eq!(questions.len(), 1 + 2 + 6);
    let text = |question: &Value| question["messages"][0]["content"].as_str().expect("text").to_owned();
    let mut texts: Vec<String> = questions.iter().map(text).collect();
    // This server counts 40 tokens for 96 words. From then on, the prompts have as many words as make 128 tokens.
    assert_eq!(texts[0].split(' ').count(), 96);
    assert_eq!(texts[1].split(' ').count(), 307);
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), questions.len());
    for question in &questions {
        for (name, expected) in [
            ("model", json!("a/b")),
            ("stream", json!(true)),
            ("max_tokens", json!(9)),
            ("temperature", json!(0.5)),
            ("ignore_eos", json!(true)),
            ("stream_options", json!({"include_usage": true})),
        ] {
            assert_eq!(question[name], expected, "{name}");
        }
    }
    let heads = server.seen.lock().expect("no panic");
    assert!(heads.iter().all(|(head, _)| head.to_ascii_lowercase().contains("authorization: bearer secret")));
}

#[test]
fn streams_send_at_the_same_time_and_a_seed_repeats_the_prompts() {
    // The server answers only when all five requests have arrived. With fewer requests at the same time the test would
    // hang.
    let arrived: Arc<(Mutex<usize>, Condvar)> = Arc::default();
    let server = Scripted::start(move |n, _| {
        if n > 0 {
            let (count, all) = &*arrived;
            let mut count = count.lock().expect("no panic");
            *count += 1;
            all.notify_all();
            let wait = all.wait_timeout_while(count, HANG, |count| *count < 5).expect("no panic");
            assert!(!wait.1.timed_out(), "the others never came");
        }
        Say(&["yes"])
    });
    let args = ["--concurrency", "5", "--requests", "1", "--seed", "11"];
    let report = server.report(&args);
    assert_eq!((&report["levels"][0]["failures"], &report["seed"]), (&json!(0), &json!(11)), "{report}");
    // There is no level of one stream to compare with.
    assert_eq!(report["levels"][0]["ratio_to_one"], Value::Null);
    server.report(&args);
    let mut texts: Vec<String> = server.questions().iter().map(|q| q["messages"].to_string()).collect();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 6);
}

#[test]
fn without_usage_the_content_deltas_are_counted() {
    let server = Scripted::start(|_, body| match body.get("stream_options") {
        Some(_) => Refuse(400, "stream_options is not known here"),
        None => SayWithoutUsage(&["a", "b", "c", "d", "e"]),
    });
    let report = server.report(&["--concurrency", "1", "--requests", "3", "--model", "other"]);
    assert_eq!(report["tokens_counted_by"], "content deltas");
    assert_eq!(report["levels"][0]["tokens"], 15, "{report}");
    assert_eq!(report["levels"][0]["mean_prompt_tokens"], Value::Null);
    let questions = server.questions();
    assert!(questions.iter().all(|q| q["model"] == "other"));
    assert_eq!(questions.len(), 1 + 1 + 3);
}

#[test]
fn failures_are_counted_and_the_first_is_reported() {
    for (bad, parts) in [
        (|| Refuse(429, "busy:\n32 wait"), &["429 Too Many Requests", "busy: 32 wait"][..]),
        (|| Raw("HTTP/1.1 503 Oh\r\nContent-Length: 9\r\n\r\n<p>no</p>"), &["503", "<p>no</p>"]),
        (|| Raw("HTTP/1.1 302 Away\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"), &["302"]),
        (
            || Raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"),
            &["application/json", "SSE"],
        ),
        (|| Raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), &["no content type", "SSE"]),
        (|| Raw("220 mail.example ESMTP\r\n"), &["HTTP"]),
        (|| Raw(""), &["disconnected"]),
        (
            || Events(&["{\"choices\": [{\"delta\": {\"content\": \"half\"}}]}"]),
            &["broke off after 1 pieces"],
        ),
        (|| Events(&[]), &["broke off after 0 pieces"]),
        (
            || Events(&["{\"error\": {\"message\": \"the device is lost\"}}", "[DONE]"]),
            &["the device is lost"],
        ),
        (|| Events(&["{\"choices\": [", "[DONE]"]), &["no JSON"]),
        (
            || {
                Raw(
                    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n39\r\n",
                )
            },
            &["broke off after 0 pieces", ":"],
        ),
    ] as [(fn() -> Reply, &[&str]); 12]
    {
        // Every second request after the warm-up fails.
        let every_second = || Scripted::start(move |n, _| if n % 2 == 1 { bad() } else { Say(&["well"]) });
        let server = every_second();
        let report = server.report(&["--concurrency", "1", "--requests", "4"]);
        let level = &report["levels"][0];
        assert_eq!((&level["requests"], &level["failures"]), (&json!(4), &json!(2)), "{level}");
        assert_eq!(level["tokens"], 4, "only whole answers are counted: {level}");
        let first = level["first_failure"].as_str().expect("a first failure");
        assert!(
            parts.iter().all(|part| first.contains(part)) && !first.contains('\n'),
            "{parts:?}: {first:?}"
        );

        // The table reports the failures too.
        let (code, stdout, stderr) =
            output(every_second().command(&["--concurrency", "1,2", "--requests", "4"]));
        assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
        assert!(stdout.contains("1 at once: 2 of 4 requests failed, first: "), "{stdout}");
        assert!(stdout.contains(first), "{stdout}");

        // A run in which every request fails is an error.
        let server = Scripted::start(move |n, _| if n > 0 { bad() } else { Say(&["well"]) });
        let args = ["--concurrency", "1,2", "--requests", "2"];
        assert_error(
            server.command(&args),
            1,
            &[&[&server.url, "no request was answered"][..], parts].concat(),
        );
        let server = Scripted::start(move |_, _| bad());
        assert_error(server.command(&[]), 1, &[&[server.url.as_str()][..], parts].concat());
    }
}

#[test]
fn a_server_that_hangs_is_abandoned_after_the_timeout() {
    let hanging = Arc::new(AtomicUsize::new(0));
    let hung = Arc::clone(&hanging);
    let server = Scripted::start(move |n, _| {
        if n == 0 {
            return Say(&["well"]);
        }
        hung.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(HANG);
        Say(&["late"])
    });
    let args = ["--concurrency", "1", "--requests", "1", "--timeout-s", "5"];
    assert_error(server.command(&args), 1, &["no whole answer within 5 s", "--timeout-s"]);
    assert_eq!(hanging.load(Ordering::Relaxed), 1, "the request is not repeated");
}

#[test]
fn unreachable_servers_and_bad_options_are_errors_of_one_line() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let closed_url = format!("http://{}/v1", free.local_addr().expect("bound"));
    drop(free);
    for model in [&[][..], &["--model", "m"]] {
        let command = unicorn(&[&["bench", "serve", "--url", &closed_url][..], model].concat());
        assert_error(command, 1, &[&closed_url, "cannot connect", "refused", "is a server running there?"]);
    }
    for url in ["", "127.0.0.1:8010", "ftp://a/v1", "http:///v1", "http://a b/", "http://a/v1?x=1"] {
        assert_error(unicorn(&["bench", "serve", "--url", url]), 1, &["--url", "http://127.0.0.1:8010/v1"]);
    }
    assert_error(unicorn(&["bench", "serve", "--api-key", "a\nb"]), 1, &["--api-key"]);
    for (option, scenario, other) in [
        ("--chats", "closed", "mixed"),
        ("--long-tokens", "second-turn", "mixed"),
        ("--long-requests", "closed", "mixed"),
        ("--history-tokens", "mixed", "second-turn"),
        ("--prompt-tokens", "second-turn", "closed or mixed"),
        ("--concurrency", "mixed", "closed"),
    ] {
        let args = ["bench", "serve", "--scenario", scenario, option, "4"];
        assert_error(unicorn(&args), 1, &[option, &format!("--scenario {other}")]);
    }
    // `bench serve` does not read the configured model.
    let mut command = unicorn(&["bench", "serve", "--url", &closed_url]);
    command.env("UNICORN_MODEL_PATH", "no/such-model");
    assert_error(command, 1, &["cannot connect"]);
}

#[test]
fn the_mixed_scenario_sends_long_prompts_while_chats_run() {
    // The chats continue until every long prompt is answered. The server answers the long prompts when ten chat
    // requests have come.
    let chatted: Arc<(Mutex<usize>, Condvar)> = Arc::default();
    let server = Scripted::start(move |n, body| {
        let (count, more) = &*chatted;
        let mut count = count.lock().expect("no panic");
        if body["max_tokens"] == 1 && n > 1 {
            let wait = more.wait_timeout_while(count, HANG, |count| *count < 10).expect("no panic");
            assert!(!wait.1.timed_out(), "the chats ended before the long prompts");
            return Say(&["x"]);
        }
        *count += 1;
        more.notify_all();
        Say(&["a", "b"])
    });
    let args = ["--scenario", "mixed", "--chats", "2", "--requests", "2", "--long-tokens", "500"];
    let report = server.report(&[&args[..], &["--long-requests", "3"]].concat());
    assert_eq!(report["long"]["requests"], 3, "{report}");
    assert_eq!(
        report["long"]["tokens_per_s"],
        Value::Null,
        "the time of all long prompts is not measured: {report}"
    );
    for name in ["prefill_tokens_per_s", "long_interval_s"] {
        assert!(report[name].as_f64().is_some_and(|n| n > 0.0), "{name}: {report}");
    }
    assert_eq!((&report["without_long"]["requests"], &report["chats"]), (&json!(4), &json!(2)), "{report}");
    assert!(report["with_long"]["requests"].as_u64() >= Some(4), "{report}");
    for name in ["without_long", "with_long"] {
        assert!(
            report[name]["inter_token_ms"]["p99"].as_f64() <= report[name]["inter_token_ms"]["max"].as_f64()
        );
        assert_eq!(report[name]["failures"], 0, "{report}");
    }
    let long = |q: &&Value| q["max_tokens"] == 1;
    let questions = server.questions();
    assert_eq!(questions.iter().filter(long).count(), 1 + 3);
    let words = |q: &Value| q["messages"][0]["content"].as_str().expect("text").split(' ').count();
    assert!(questions.iter().filter(long).all(|q| words(q) > 1000), "some 2.4 words are a token here");

    let (code, stdout, stderr) = output(server.command(&[&args[..], &["--long-requests", "1"]].concat()));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(["alone", "with long", "long prompts"].iter().all(|row| stdout.contains(row)), "{stdout}");
}

#[test]
fn a_second_turn_contains_the_first_turn_and_its_answer() {
    let server = Scripted::start(|_, _| Say(&["Once ", "upon"]));
    let args = ["--scenario", "second-turn", "--requests", "3", "--history-tokens", "60"];
    let report = server.report(&args);
    for turn in ["first_turn", "second_turn"] {
        assert_eq!(
            (&report[turn]["requests"], &report[turn]["failures"]),
            (&json!(3), &json!(0)),
            "{report}"
        );
        assert!(report[turn]["ttft_ms"].as_f64().is_some_and(|n| n > 0.0), "{report}");
        assert_eq!(report[turn]["mean_cached_tokens"], 7.0, "{report}");
    }
    assert!(report["second_of_first"].as_f64().is_some_and(|n| n > 0.0), "{report}");
    let questions = server.questions();
    assert_eq!(questions.len(), 1 + 6);
    for turns in questions[1..].chunks(2) {
        let (first, second) = (&turns[0]["messages"], &turns[1]["messages"]);
        assert_eq!((first.as_array().map(Vec::len), second.as_array().map(Vec::len)), (Some(1), Some(3)));
        assert_eq!(first[0], second[0]);
        assert_eq!(second[1], json!({"role": "assistant", "content": "Once upon"}));
        assert_eq!(second[2]["role"], "user");
    }
    let (code, stdout, stderr) = output(server.command(&args));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.contains("of the first's time"), "{stdout}");

    // A chat whose first turn fails has no second turn.
    let server = Scripted::start(|n, _| if n == 1 { Refuse(500, "no") } else { Say(&["well"]) });
    let report = server.report(&args);
    assert_eq!(
        (&report["first_turn"]["failures"], &report["second_turn"]["requests"]),
        (&json!(1), &json!(2))
    );
}

/// This project's server, with a model that answers every request with the same text.
#[test]
fn this_projects_own_server_can_be_measured() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let (router, said) = router_that_says("The answer is no.");
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a free port");
    let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
    runtime.spawn(async move { axum::serve(listener, router).await });
    let run = |args: &[&str]| {
        let fixed = ["bench", "serve", "--url", &url, "--max-tokens", "20", "--json"];
        let (code, stdout, stderr) = output(unicorn(&[&fixed[..], args].concat()));
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        serde_json::from_str::<Value>(&stdout).expect("JSON")
    };
    let report = run(&["--concurrency", "1,2", "--requests", "2", "--prompt-tokens", "40"]);
    assert_eq!(report["tokens_counted_by"], "usage", "{report}");
    for level in report["levels"].as_array().expect("levels") {
        assert_eq!(level["failures"], 0, "{report}");
        assert_eq!(level["tokens"].as_u64(), level["requests"].as_u64().map(|n| n * said as u64), "{report}");
    }
    let report = run(&["--scenario", "second-turn", "--requests", "1", "--history-tokens", "60"]);
    assert!(report["second_turn"]["mean_cached_tokens"].as_f64().is_some_and(|n| n > 0.0), "{report}");
    runtime.shutdown_timeout(Duration::from_secs(5));
}

/// Runs a soak of one round against this router. Returns the exit code, stdout and stderr.
fn soak_of(router: Router, args: &[&str]) -> (i32, String, String) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a free port");
    let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
    runtime.spawn(async move { axum::serve(listener, router).await });
    let fixed = ["soak", "1r", "--url", &url, "--concurrency", "1"];
    let result = output(lab(&[&fixed[..], args].concat()));
    runtime.shutdown_timeout(Duration::from_secs(5));
    result
}

#[test]
fn a_soak_needs_a_request_for_every_documented_route() {
    let models = || get(async || Json(json!({"data": [{"id": "a/b"}]})));
    let (code, _, stderr) = soak_of(Router::new().route("/v1/models", models()), &[]);
    assert!(code == 1 && stderr.contains("/openapi.json is no description"), "{stderr}");

    let document = json!({"paths": {"/v1/models": {"get": {}}, "/v1/new": {"get": {}, "put": {}}}});
    let documented = get(async || Json(document));
    let router = Router::new().route("/v1/models", models()).route("/openapi.json", documented);
    let (code, _, stderr) = soak_of(router, &[]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("no request for GET /v1/new, PUT /v1/new; add one to"), "{stderr}");
}

#[test]
fn a_soak_reports_an_answer_that_changes() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let changed = move |request: Request, next: Next| {
        let (count, is_it) = (Arc::clone(&count), request.uri().path() == "/detokenize");
        async move {
            let response = next.run(request).await;
            // The soak compares later answers with the first one, so the first is left unchanged.
            if is_it && response.status() == 200 && count.fetch_add(1, Ordering::Relaxed) > 0 {
                return Json(json!({"prompt": "another", "content": "another"})).into_response();
            }
            response
        }
    };
    let _runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = _runtime.enter();
    let router = router_for_many("The answer is no.").layer(from_fn(changed));
    let (code, stdout, stderr) = soak_of(router, &["--json"]);
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    assert!(code == 1 && stderr.contains("1 of "), "{report:#}{stderr}");
    let failures = report["failures"].as_array().expect("failures");
    assert_eq!(failures.len(), asked.load(Ordering::Relaxed) - 1, "{report:#}");
    for failure in failures {
        let failure = failure.as_str().expect("a line");
        assert!(failure.starts_with("POST /detokenize (a text of tokens, "), "{failure}");
        assert!(failure.contains(".prompt was \"") && failure.ends_with("and is \"another\""), "{failure}");
    }
    let wrong: Vec<&Value> =
        report["checks"].as_array().expect("checks").iter().filter(|check| check["holds"] == false).collect();
    assert!(matches!(wrong[..], [check] if check["check"] == "answers"), "{report:#}");
}

#[test]
fn bad_soak_options_are_errors_of_one_line() {
    for (args, problem) in [
        (&["30"][..], "LENGTH"),
        (&["0m"], "LENGTH"),
        (&["25h"], "LENGTH"),
        (&["3d"], "LENGTH"),
        (&["1r", "--scenario", "mixed"], "--scenario"),
        (&["1r", "--requests", "3"], "--requests"),
        (&["1r", "--concurrency", "1,2"], "--concurrency"),
    ] {
        assert_error(lab(&[&["soak"], args].concat()), 2, &[problem]);
    }
    assert_error(lab(&["soak", "1r", "--pid", "1000000000"]), 1, &["--pid 1000000000", "/proc"]);
}

/// The expected bytes that the demo model's steps read are computed by hand: 6 layers with 2 heads of 64, of which 4
/// layers see a window of 64, in f16.
#[test]
fn the_steps_of_a_model_are_measured_and_compared() {
    let command = |args: &[&str]| {
        let fixed = ["model", "--allow-software-vulkan", "--runs", "1", "--steps", "2", "--vram", "64MiB"];
        lab_on_software(&[&fixed[..], args].concat())
    };
    let sizes = ["--prefill", "100,8,9000", "--depth", "128,8192", "--batch", "1,3"];
    let report = printed_json(command(&[&sizes[..], &["--json"]].concat()));
    let names = |list: &str| -> Vec<&str> {
        let cases = report[list].as_array().expect("a list").iter();
        cases.map(|case| case["case"].as_str().expect("a name")).collect()
    };
    assert_eq!(names("cases"), ["prefill 8", "prefill 100", "decode 1 at 128", "decode 3 at 128"]);
    assert_eq!(names("left_out"), ["prefill 9000", "decode 1 at 8192", "decode 3 at 8192"]);
    let why = report["left_out"][0]["why"].as_str().expect("a reason");
    assert!(why.contains("a context of 9000 tokens, but the context has 8192"), "{why}");
    let case = |name: &str| report["cases"].as_array().unwrap().iter().find(|c| c["case"] == name).unwrap();
    let weights = report["weight_bytes"].as_u64().expect("a number");
    let position = 2 * 2 * 64 * 2; // bytes of a position in a layer: keys and values, heads, elements, bytes
    // One step warms up, so the timed steps have the tokens at positions 129 and 130.
    let seen = (2 * 130 + 4 * 64 + 2 * 131 + 4 * 64) / 2 * position;
    assert_eq!(case("decode 1 at 128")["least_bytes_per_step"], json!(weights + seen));
    assert_eq!(case("decode 3 at 128")["least_bytes_per_step"], json!(weights + 3 * seen));
    assert_eq!(case("prefill 8")["least_bytes_per_step"], json!(weights + 6 * 8 * position));
    for measured in report["cases"].as_array().unwrap() {
        let figure = |name: &str| measured[name].as_f64().expect("a number");
        let moved = figure("least_bytes_per_step") * figure("steps") / figure("seconds") / 1e9;
        assert!((figure("gb_per_s") / moved - 1.0).abs() < 1e-3, "{measured}");
    }

    // A layer has 13 dispatches, because its matrices are bf16, and 10 barriers. One more dispatch adds the last
    // layer's result. Sampling has 6: lookup, history, norm, logits, and two of the sampler. Each of the four command
    // buffers may begin with a barrier.
    let step = &case("decode 1 at 128")["per_step"];
    assert_eq!((&step["dispatches"], &step["copies"]), (&json!(6 * 13 + 7), &json!(0)), "{step}");
    let barriers = step["barriers"].as_u64().expect("a number");
    assert!((6 * 10 + 1..=6 * 10 + 10).contains(&barriers), "{step}");
    // Each weight is read once, and a row of the embedding, 256 bf16, is read for the token. The keys and values that the token
    // sees are read, and its own are written. These counts include the step that warms up, so the average is of 130
    // positions.
    assert_eq!(step["declared_weight_bytes"], json!(weights + 2 * 256), "{step}");
    assert_eq!(step["declared_kv_bytes"], json!((2 * 130 + 4 * 64 + 6) * position), "{step}");
    // The time budget is 0, so no case is run.
    let none = printed_json(command(&words("--prefill 8 --depth 0 --batch 1 --budget-s 0 --json")));
    assert_eq!((&none["cases"], &none["left_out"][1]["case"]), (&json!([]), &json!("decode 1 at 0")));
    assert!(none.to_string().contains("the 0 s of --budget-s are over"), "{none}");

    // The report is compared with itself and with the report of another device.
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, report: &Value| {
        let path = folder.path().join(name);
        std::fs::write(&path, report.to_string()).expect("writes");
        path.to_str().expect("UTF-8").to_owned()
    };
    let mut other = report.clone();
    (other["device"], other["driver"]) = (json!("another GPU"), report["driver"].clone());
    let (same, other) = (file("same.json", &report), file("other.json", &other));
    let few = ["--prefill", "8", "--depth", "128", "--batch", "1"];
    let (code, stdout, stderr) = output(command(&[&few[..], &["--json", "--compare", &same]].concat()));
    assert_eq!(code, 0, "{stderr}");
    assert!(!stderr.contains("NOT THE SAME"), "{stderr}");
    let compared: Value = serde_json::from_str(&stdout).expect("one JSON object");
    let speedup = compared["compared"]["speedups"]["prefill 8"].as_f64().expect("a ratio");
    let before = case("prefill 8")["seconds"].as_f64().unwrap();
    assert!((speedup * compared["cases"][0]["seconds"].as_f64().unwrap() / before - 1.0).abs() < 1e-9);
    let (code, stdout, stderr) = output(command(&[&few[..], &["--compare", &other]].concat()));
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("NOT THE SAME") && stderr.contains("device was another GPU"), "{stderr}");
    for part in ["prefill 8", "decode 1 at 128", "times as fast as"] {
        assert!(stdout.contains(part), "{part:?} is not in {stdout}");
    }
    let nothing = file("nothing.json", &json!({}));
    let refused = ["model", "--allow-software-vulkan", "--prefill", "8", "--runs", "1", "--vram", "64MiB"];
    let few = ["--depth", "0", "--batch", "1", "--steps", "1", "--compare", &nothing];
    assert_error(lab_on_software(&[&refused[..], &few].concat()), 1, &["nothing.json", "`model`"]);
}

/// Measures a kernel of the smallest shape and compares a second run with the report of the first.
#[test]
fn kernels_are_compared_with_the_peak_rates_of_the_device() {
    let command = |args: &[&str]| {
        let fixed = ["kernels", "--allow-software-vulkan", "--shape", "gemma-3-270m", "--runs", "1"];
        lab_on_software(&[&fixed[..], args].concat())
    };
    let few = ["--tokens", "2", "--depth", "32", "--scheme", "int4-g128", "--only", "k_proj"];
    let report = printed_json(command(&[&few[..], &["--json"]].concat()));
    let [case] = &report["cases"].as_array().expect("a list")[..] else { panic!("{report}") };
    assert_eq!(case["case"], "gemma-3-270m matmul k_proj int4-g128 x 2, fast");
    // The matrix has 256 rows of 640 weights, with half a byte for each weight and 2 bytes for each group of 128. Each
    // of the 2 inputs has 40 bytes for 32 columns, and the results are f32.
    assert_eq!(case["bytes"], json!(256 * 640 / 2 + 256 * 640 / 64 + 2 * (640 / 32 * 40 + 4 * 256)));
    assert_eq!(case["ops"], json!(2 * 2 * 256 * 640));
    let (copy, peak) = (&report["copy"]["gb_per_s"], &report["peak"]["gops_per_s"]);
    for (figure, of, share) in [("gb_per_s", copy, "share_of_copy"), ("gops_per_s", peak, "share_of_peak")] {
        let number = |value: &Value| value.as_f64().expect("a number");
        let expected = number(&case[figure]) / number(of);
        assert!((number(&case[share]) / expected - 1.0).abs() < 1e-6, "{share}: {report}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("before.json");
    std::fs::write(&file, report.to_string()).expect("writes");
    let file = file.to_str().expect("UTF-8");
    let stdout = printed(command(&[&few[..], &["--compare", file]].concat()));
    for part in ["k_proj int4-g128 x 2", "times as fast as", "plain multiply-adds", "of copy"] {
        assert!(stdout.contains(part), "{part:?} is not in {stdout}");
    }
    let none = printed_json(command(&[&few[..], &["--budget-s", "0", "--json"]].concat()));
    let left_out = json!([{"case": case["case"], "why": "the 0 s of --budget-s are over"}]);
    assert_eq!((&none["cases"], &none["left_out"]), (&json!([]), &left_out));
    let none = ["kernels", "--allow-software-vulkan", "--only", "no such kernel"];
    assert_error(lab_on_software(&none), 1, &["--only", "no such kernel"]);
}

/// `make bench-serve`, with a script in place of the binary. The script serves nothing and records its arguments.
#[test]
fn make_bench_serve_stops_its_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let binary = folder.path().join("unicorn");
    let script = "#!/bin/sh\n\
        case \"$1\" in\n\
        devices) echo '   usable       yes' ;;\n\
        serve) echo $$ >\"$0.pid\"; echo \"$@\" >\"$0.args\"; [ -e \"$0.bad\" ] && { echo 'error: no memory' >&2; exit 1; }\n\
        echo 'INFO ready: http://127.0.0.1:5/v1, context 1 tokens' >&2; exec sleep 60 ;;\n\
        *) echo \"$@\"; [ ! -e \"$0.failing\" ] ;;\n\
        esac\n";
    std::fs::write(&binary, script).expect("written");
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let command = || {
        let mut command = Command::new(root().join("tools/bench_serve.sh"));
        command.arg(&binary).args(["--requests", "2"]).env("SERVE_ARGS", "--model m");
        command
    };
    let left = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect(name).trim().to_owned();
    let (code, stdout, stderr) = output(command());
    assert_eq!(
        (code, stdout.as_str()),
        (0, "bench serve --url http://127.0.0.1:5/v1 --requests 2\n"),
        "{stderr}"
    );
    assert_eq!(left("unicorn.args"), "serve --port 0 --model m");
    let runs = || Command::new("sh").args(["-c", &format!("kill -0 {} 2>&1", left("unicorn.pid"))]).output();
    assert!(!runs().expect("sh runs").status.success(), "the server still runs");

    std::fs::write(folder.path().join("unicorn.failing"), "").expect("written");
    assert_eq!(output(command()).0, 1);
    assert!(!runs().expect("sh runs").status.success(), "the server still runs");

    std::fs::write(folder.path().join("unicorn.bad"), "").expect("written");
    let (code, stdout, stderr) = output(command());
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    assert!(stderr.contains("error: no memory"), "{stderr}");
}
