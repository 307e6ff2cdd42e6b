//! Server errors (500 and above): the answers to clients, the connections that stay open, and the one log line for each
//! error.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::ServiceExt;
use tracing::Dispatch;
use tracing::dispatcher::DefaultGuard;
use unicorn::api::{self, AccessPolicy, Server};
use unicorn::engine::EVENTS;
use unicorn::library::ModelReport;
use unicorn::model::Limits;

use crate::support::app::{
    App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, app, app_that_says, app_with, limits, loaded,
};
use crate::support::fake_runner::{HANG, Script, kv_with, says};
use crate::support::http::{assert_all_free, chat, get, post_to, send, status};
use crate::support::json::with;
use crate::support::server::{CONNECTIONS, report};
use crate::support::tokenizers::tokenizer;
use crate::support::waits::until;

/// A word in every prompt of these tests. It must be in no log line.
const ASKED: &str = "xyzzy";
/// The routes that stream, each with a body.
const ROUTES: [(&str, &str); 4] = [
    ("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "xyzzy"}]}"#),
    ("/v1/completions", r#"{"prompt": "xyzzy", "max_tokens": 5000}"#),
    ("/v1/responses", r#"{"input": "xyzzy"}"#),
    ("/v1/messages", r#"{"messages": [{"role": "user", "content": "xyzzy"}], "max_tokens": 5000}"#),
];

/// The log of this thread, and of the threads that join it.
struct Log {
    text: Arc<Mutex<Vec<u8>>>,
    dispatch: Dispatch,
}

struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("nothing panics under this lock").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Captures the log lines of this thread until the guard is dropped.
    fn of_this_thread() -> (Self, DefaultGuard) {
        let text: Arc<Mutex<Vec<u8>>> = Arc::default();
        let sink = Arc::clone(&text);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .without_time()
            .with_writer(move || Sink(Arc::clone(&sink)));
        let dispatch = Dispatch::new(subscriber.finish());
        let guard = tracing::dispatcher::set_default(&dispatch);
        (Self { text, dispatch }, guard)
    }

    /// A script that makes the engine's thread log here too, at its first call.
    fn joined_by(&self, mut script: Script) -> Script {
        let (dispatch, mut joined) = (self.dispatch.clone(), false);
        Box::new(move |tokens, draw| {
            if !std::mem::replace(&mut joined, true) {
                // The subscriber stays until the thread ends.
                std::mem::forget(tracing::dispatcher::set_default(&dispatch));
            }
            script(tokens, draw)
        })
    }

    /// The lines since the last call. Checks that none of them contains a prompt.
    fn take(&self) -> Vec<String> {
        let text = std::mem::take(&mut *self.text.lock().expect("nothing panics under this lock"));
        let text = String::from_utf8(text).expect("UTF-8");
        assert!(!text.contains(ASKED), "{text}");
        text.lines().map(str::to_owned).collect()
    }

    /// The warnings and errors among these lines.
    fn complaints(&self) -> Vec<String> {
        let is_one =
            |line: &String| ["WARN", "ERROR"].contains(&line.split_whitespace().next().unwrap_or(""));
        self.take().into_iter().filter(is_one).collect()
    }
}

/// Checks that there is exactly one warning or error, with this level and all of these parts.
#[track_caller]
fn assert_one(complaints: &[String], level: &str, parts: &[&str]) {
    let [line] = complaints else { panic!("expected one line, got {complaints:#?}") };
    assert!(line.trim_start().starts_with(level), "{level}: {line}");
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line}");
    }
}

fn named(mut request: Request<Body>, id: &str) -> Request<Body> {
    request.headers_mut().insert("x-request-id", id.parse().expect("a header"));
    request
}

/// The body of one of [`ROUTES`] with more fields. `max_tokens` is renamed to the field of the route.
fn ask((path, body): (&str, &str), more: Value) -> Request<Body> {
    let mut body = with(serde_json::from_str(body).expect("JSON"), more);
    if path == "/v1/responses" {
        let fields = body.as_object_mut().expect("an object");
        let most = fields.remove("max_tokens");
        fields.extend(most.map(|most| ("max_output_tokens".to_owned(), most)));
    }
    post_to(path, body.to_string())
}

/// Status, headers and body of the answer to a request with this id.
async fn answer(router: &Router, id: &str, request: Request<Body>) -> (u16, HeaderMap, String) {
    let (status, headers, body) = send(router, named(request, id)).await;
    assert_eq!(headers["x-request-id"], id);
    (status.as_u16(), headers, String::from_utf8(body).expect("UTF-8"))
}

/// A server whose `/status` and `/metrics` panic, as a faulty driver report could cause.
fn app_that_panics(door: AccessPolicy) -> App {
    let ok = tokenizer().encode("ok", false).expect("encodes");
    let app = loaded(Server::new(MODEL, OPTIONS, door), limits(), DEFAULTS, says(&ok, END_OF_TURN));
    let broken = || panic!("the gauge broke:\nin two");
    app.server.library().first().1.set_report(ModelReport { live: Box::new(broken), ..report() });
    app
}

#[tokio::test]
async fn a_handler_that_panics_answers_500_and_keeps_its_connection() {
    let (log, _here) = Log::of_this_thread();
    let app = app_that_panics(AccessPolicy::default());
    let (_, _, document) = answer(&app.router, "a-0", get("/openapi.json")).await;
    let document: Value = serde_json::from_str(&document).expect("JSON");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = async {
        drop(stopped.await);
        Duration::ZERO
    };
    let serving = tokio::spawn(api::serve(vec![listener], Arc::clone(&app.server), CONNECTIONS, shutdown));

    let mut client = tokio::net::TcpStream::connect(address).await.expect("connects");
    for (path, id, status) in [("/status", "a-1", 500), ("/metrics", "a-2", 500), ("/health", "a-3", 200)] {
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {id}\r\n\r\n");
        client.write_all(head.as_bytes()).await.expect("the connection is open");
        let (head, body) = tokio::time::timeout(HANG, read_response(&mut client)).await.expect("an answer");
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {head}");
        assert!(head.contains(&format!("x-request-id: {id}\r\n")), "{head}");
        if status == 500 {
            let documented = &document["paths"][path]["get"]["responses"]["500"];
            assert!(documented.is_object(), "{path}: {document}");
            assert_eq!(body["error"]["code"], "internal_error", "{body}");
            assert_eq!(body["error"]["type"], "server_error", "{body}");
            assert!(!body.to_string().contains("gauge"), "{body}");
            let id = format!("id=\"{id}\"");
            let route = format!("route=\"{path}\"");
            assert_one(&log.complaints(), "ERROR", &[&id, &route, "status=500", "the gauge broke:"]);
        }
    }
    assert_eq!(log.complaints(), [""; 0]);
    stop.send(()).expect("it serves");
    tokio::time::timeout(HANG, serving).await.expect("it ends").expect("cleanly");
}

/// The head and the JSON of one response with a content length.
async fn read_response(client: &mut tokio::net::TcpStream) -> (String, Value) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.split_once("content-length: ").expect("a length").1;
            let length: usize = length.lines().next().expect("a line").trim().parse().expect("a number");
            if body.len() >= length {
                let (head, body) = bytes.split_at(head.len() + 4);
                return (
                    String::from_utf8_lossy(head).into_owned(),
                    serde_json::from_slice(body).expect("JSON"),
                );
            }
        }
        assert_ne!(client.read_buf(&mut bytes).await.expect("reads"), 0, "closed after {text:?}");
    }
}

#[tokio::test]
async fn an_allowed_origin_can_read_the_error_of_a_panic() {
    let origin = "http://localhost:3000";
    let app = app_that_panics(AccessPolicy { cors_origins: vec![origin.into()], ..AccessPolicy::default() });
    let mut request = get("/status");
    request.headers_mut().insert("origin", origin.parse().expect("a header"));
    let (status, headers, _) = answer(&app.router, "a", request).await;
    assert_eq!((status, &headers["access-control-allow-origin"]), (500, &origin.parse().expect("a header")));
}

#[tokio::test]
async fn exactly_the_responses_of_500_and_above_are_one_log_line_each() {
    let (log, _here) = Log::of_this_thread();
    let loading = api::router(Server::new(MODEL, OPTIONS, AccessPolicy::default()));
    let draining = app_that_says("ok");
    draining.engine.drain();
    let lost = app_that_says("ok");
    lost.control.fail_wait_at(0);
    let ready = app_that_says("ok");
    // The lost server gets two requests for each route: its first errors, and later ones.
    for (router, retries) in
        [(&loading, true), (&draining.router, true), (&lost.router, false), (&lost.router, false)]
    {
        for (i, route) in ROUTES.into_iter().enumerate() {
            let id = format!("b-{i}");
            let (status, headers, body) = answer(router, &id, ask(route, json!({"max_tokens": 5}))).await;
            assert_eq!((status, headers.contains_key(header::RETRY_AFTER)), (503, retries), "{body}");
            let (id, path) = (format!("id=\"{id}\""), format!("route=\"{}\"", route.0));
            let error: Value = serde_json::from_str(&body).expect("JSON");
            let message = error["error"]["message"].as_str().expect("words");
            assert_one(&log.complaints(), "WARN", &[&id, &path, "status=503", message]);
        }
    }
    // A load is not an error, and clients may poll for it often.
    assert_eq!(answer(&loading, "c", get("/health")).await.0, 503);
    assert_eq!(log.complaints(), [""; 0]);
    for (router, words) in [(&draining.router, "shutting down"), (&lost.router, "ring timeout")] {
        assert_eq!(answer(router, "c", get("/health")).await.0, 503);
        let parts = ["id=\"c\"", "route=\"/health\"", "status=503", words];
        assert_one(&log.complaints(), "WARN", &parts);
    }
    for (request, status) in [
        (get("/health"), 200),
        (get("/nothing"), 404),
        (get("/v1/chat/completions"), 405),
        (post_to("/v1/chat/completions", "{"), 400),
        (ask(ROUTES[0], json!({"model": "other"})), 404),
        (ask(ROUTES[0], json!({"max_tokens": 5})), 200),
        (ask(ROUTES[3], json!({"max_tokens": 5, "stream": true})), 200),
    ] {
        assert_eq!(answer(&ready.router, "d", request).await.0, status);
        assert_eq!(log.complaints(), [""; 0], "{status}");
    }
}

#[tokio::test]
async fn non_finite_logits_are_logged_once() {
    let (log, _here) = Log::of_this_thread();
    let ok = tokenizer().encode("One, two, three", false).expect("encodes");
    for stream in [false, true] {
        for route in ROUTES {
            let app = app(log.joined_by(says(&ok, END_OF_TURN)));
            app.control.not_finite_at(2);
            let body = json!({"stream": stream, "max_tokens": 9});
            let (status, _, body) = answer(&app.router, "e", ask(route, body)).await;
            assert_eq!(status, if stream { 200 } else { 500 }, "{body}");
            assert!(body.contains("not finite"), "{body}");
            assert_all_free(&app.engine).await;
            let path = format!("route=\"{}\"", route.0);
            let complaints = log.complaints();
            assert_one(&complaints, "ERROR", &["id=\"e\"", &path, "status=500", "the model's logits"]);
            assert_eq!(complaints[0].contains("within a stream"), stream);
        }
    }
}

#[tokio::test]
async fn a_full_queue_answered_with_529_is_529_in_the_log_and_metrics() {
    let (log, _here) = Log::of_this_thread();
    let app = app_that_says("ok");
    app.control.allow(0);
    let mut waiting = Vec::new();
    for n in 0..3 {
        let router = app.router.clone();
        waiting.push(tokio::spawn(async move { send(&router, ask(ROUTES[3], json!({}))).await.0 }));
        until("it is taken", || app.engine.stats().waiting >= n && !app.control.batches().is_empty()).await;
    }
    let (status, _, body) = answer(&app.router, "f", ask(ROUTES[3], json!({}))).await;
    assert_eq!(status, 529, "{body}");
    assert_one(&log.complaints(), "WARN", &["id=\"f\"", "route=\"/v1/messages\"", "status=529", "busy"]);
    assert_eq!(answer(&app.router, "g", ask(ROUTES[0], json!({}))).await.0, 429);
    assert_eq!(log.complaints(), [""; 0], "on other routes, 429 is a client error");
    let (_, _, metrics) = answer(&app.router, "h", get("/metrics")).await;
    let counted = format!("{{model_name=\"{MODEL}\",endpoint=\"/v1/messages\",status=\"529\"}} 1\n");
    assert!(metrics.contains(&counted), "{metrics}");
    app.control.release();
    for request in waiting {
        assert_eq!(request.await.expect("answered"), 200);
    }
}

#[tokio::test]
async fn a_failed_stream_ends_with_an_error_and_is_logged_once() {
    let (log, _here) = Log::of_this_thread();
    for (route, last) in
        ROUTES.into_iter().zip(["data: [DONE]", "data: [DONE]", "response.failed", "event: error"])
    {
        let app = app_that_says("One, two, three");
        app.control.fail_wait_at(4);
        let body = json!({"stream": true, "max_tokens": 9});
        let (status, _, body) = answer(&app.router, "i", ask(route, body)).await;
        assert_eq!(status, 200, "{body}");
        assert!(body.contains("ring timeout"), "{body}");
        let events: Vec<&str> = body.split("\n\n").filter(|event| !event.is_empty()).collect();
        assert!(events.last().is_some_and(|event| event.contains(last)), "{body}");
        let path = format!("route=\"{}\"", route.0);
        let parts = ["id=\"i\"", &path, "status=503", "within a stream", "ring timeout"];
        assert_one(&log.complaints(), "WARN", &parts);
    }
}

/// Sends a request and reads no response until the engine has finished, which writes more events than the queue holds.
async fn read_late(app: &App, request: Request<Body>) -> (u16, HeaderMap, String) {
    app.control.allow(app.control.batches().len());
    let before = app.control.batches().len();
    let mut asked = Box::pin(app.router.clone().oneshot(named(request, "j")));
    let since = Instant::now();
    let mut begun = None;
    while app.control.batches().len() == before || app.engine.stats().running == 0 {
        assert!(since.elapsed() < HANG, "the request never runs");
        if begun.is_none()
            && let std::task::Poll::Ready(response) = futures::poll!(&mut asked)
        {
            begun = Some(response.expect("handlers do not fail"));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    app.control.release();
    until("the engine is done", || app.engine.stats().running == 0).await;
    let response = match begun {
        Some(response) => response,
        None => asked.await.expect("handlers do not fail"),
    };
    let (parts, body) = response.into_parts();
    let body = body.collect().await.expect("a whole body").to_bytes();
    (parts.status.as_u16(), parts.headers, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn an_answer_that_the_server_collects_too_slowly_is_a_server_error() {
    let (log, _here) = Log::of_this_thread();
    let tokens = 4 * EVENTS;
    let kv = kv_with(tokens, 32);
    let limits = Limits { kv, max_context: tokens, ..limits() };
    let app = app_with(limits, OPTIONS, DEFAULTS, log.joined_by(says(&[], 300)));
    let long = json!({"max_tokens": 3 * EVENTS});
    for route in ROUTES {
        log.take();
        let (status, headers, body) = read_late(&app, ask(route, long.clone())).await;
        assert_eq!((status, headers.contains_key(header::RETRY_AFTER)), (503, true), "{body}");
        assert!(body.contains("the server is too busy") && !body.contains("client"), "{body}");
        let path = format!("route=\"{}\"", route.0);
        assert_one(&log.complaints(), "WARN", &["id=\"j\"", &path, "status=503", "too busy"]);

        // A streaming client that does not read gets the error when it reads again. This is not an error of the server.
        let body = with(long.clone(), json!({"stream": true}));
        let (status, _, body) = read_late(&app, ask(route, body)).await;
        assert!(status == 200 && body.contains("was not read"), "{status}");
        let lines = log.take();
        let told =
            lines.iter().filter(|line| line.contains("broken off: not_read") && line.contains("id=\"j\""));
        assert_eq!(told.count(), 1, "{lines:#?}");
        assert!(!lines.iter().any(|line| line.contains("WARN") || line.contains("ERROR")), "{lines:#?}");
    }
    assert_all_free(&app.engine).await;
    assert_eq!(
        status(&app.router).await["last_error"],
        Value::Null,
        "a slow reader is not an error of the server"
    );
}

#[tokio::test]
async fn no_log_line_contains_a_prompt() {
    let (log, _here) = Log::of_this_thread();
    let app = app_that_says("ok");
    for route in ROUTES {
        for stream in [false, true] {
            let request = ask(route, json!({"stream": stream, "max_tokens": 5}));
            let (status, _, body) = answer(&app.router, "k", request).await;
            assert_eq!(status, 200, "{body}");
        }
    }
    let (status, _, _) = answer(&app.router, "l", post_to(ROUTES[0].0, chat(ASKED).to_string())).await;
    assert_eq!(status, 200);
    assert!(log.take().iter().any(|line| line.contains("answered: stop") && line.contains("id=\"l\"")));
}
