//! Requests to an app, readers of its answers and streams, and checks that it is idle afterwards.

use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use unicorn::engine::EngineHandle;

use super::app::{App, MODEL};
use super::fake_runner::HANG;
use super::json::with;
use super::{engine, waits};

/// A chat of one turn.
pub fn chat(text: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text}]})
}

/// Status, headers and bytes of the answer.
pub async fn send(router: &Router, request: Request<Body>) -> (StatusCode, HeaderMap, Vec<u8>) {
    let exchange = async {
        let response = router.clone().oneshot(request).await.expect("handlers do not fail");
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("a whole body").to_bytes().to_vec();
        (parts.status, parts.headers, bytes)
    };
    tokio::time::timeout(HANG, exchange).await.expect("no request hangs")
}

/// Status, headers and JSON of the answer.
pub async fn send_json(router: &Router, request: Request<Body>) -> (StatusCode, HeaderMap, Value) {
    let (status, headers, bytes) = send(router, request).await;
    let text = String::from_utf8_lossy(&bytes);
    let value = serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{status}: {e}: {text}"));
    (status, headers, value)
}

/// A request to `/v1/chat/completions`.
pub fn post(body: impl Into<Body>) -> Request<Body> {
    post_to("/v1/chat/completions", body)
}

/// A GET without a body.
pub fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).expect("a sound request")
}

/// Sends a chat. Returns the status and the JSON of the answer.
pub async fn complete(app: &App, body: Value) -> (StatusCode, Value) {
    let (status, _, value) = send_json(&app.router, post(body.to_string())).await;
    (status, value)
}

/// Sends a chat. Returns the text and the finish reason of the answer.
pub async fn answer(app: &App, body: Value) -> (String, String) {
    let (status, value) = complete(app, body).await;
    assert_eq!(status, 200, "{value}");
    let choice = &value["choices"][0];
    let text = |v: &Value| v.as_str().unwrap_or_else(|| panic!("not text: {value}")).to_owned();
    (text(&choice["message"]["content"]), text(&choice["finish_reason"]))
}

/// Sends a streamed chat. Returns the `data:` lines of the stream and the number of comments.
pub async fn stream(app: &App, body: Value) -> (Vec<String>, usize) {
    let (status, headers, bytes) = send(&app.router, post(body.to_string())).await;
    let text = String::from_utf8(bytes).expect("UTF-8");
    assert_eq!(status, 200, "{text}");
    assert_eq!(headers[header::CONTENT_TYPE], "text/event-stream");
    let mut comments = 0;
    let mut lines = Vec::new();
    for line in text.lines().filter(|l| !l.is_empty()) {
        match line.strip_prefix("data: ") {
            Some(data) => lines.push(data.to_owned()),
            None => {
                assert!(line.starts_with(':'), "{line:?}");
                comments += 1;
            }
        }
    }
    (lines, comments)
}

/// The JSON chunks of a stream. The stream must end with `[DONE]`.
pub fn parse(lines: &[String]) -> Vec<Value> {
    assert_eq!(lines.last().map(String::as_str), Some("[DONE]"));
    lines[..lines.len() - 1].iter().map(|l| serde_json::from_str(l).expect("a JSON chunk")).collect()
}

/// The text of all chunks of a stream.
pub fn content(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect()
}

/// Waits until no request runs or waits and no block is held.
pub async fn assert_all_free(engine: &EngineHandle) {
    waits::until("no request, and no held block", || engine::is_at_rest(engine)).await;
}

/// The JSON of `/status`.
pub async fn status(router: &Router) -> Value {
    let (code, _, status) = send_json(router, get("/status")).await;
    assert_eq!((code.as_u16(), &status["status"]), (200, &json!("ok")), "{status}");
    status
}

/// Whether no client is connected, no request runs or waits, and no block is held.
pub fn is_at_rest(status: &Value) -> bool {
    let requests = ["open", "arriving", "waiting", "running"].map(|name| &status["requests"][name]);
    let held = [&status["connections"], &status["kv"]["full"]["held"], &status["kv"]["sliding"]["held"]];
    requests.into_iter().chain(held).all(|n| *n == 0)
}

/// Waits until [`is_at_rest`]. Panics after [`HANG`].
pub async fn assert_at_rest(router: &Router) {
    until_status(router, "never came to rest", is_at_rest, || ()).await;
}

/// Waits until `ready` accepts the JSON of `/status`. Calls `step` after each check that fails.
pub async fn until(app: &App, what: &str, ready: impl Fn(&Value) -> bool, step: impl FnMut()) {
    until_status(&app.router, what, ready, step).await;
}

async fn until_status(router: &Router, what: &str, ready: impl Fn(&Value) -> bool, mut step: impl FnMut()) {
    let since = Instant::now();
    loop {
        let seen = status(router).await;
        if ready(&seen) {
            return;
        }
        assert!(since.elapsed() < HANG, "{what}: {seen}");
        step();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The events of a stream with event names. Each name must equal the `type` in its data.
pub fn named_events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let lines = |event: &'_ str| event.lines().filter(|l| !l.starts_with(':')).map(str::to_owned).collect();
    let events = text.split("\n\n").map(lines).filter(|lines: &Vec<String>| !lines.is_empty());
    let parse = |lines: Vec<String>| {
        let [name, data] = &lines[..] else { panic!("{lines:?}") };
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{data}");
        data
    };
    events.map(parse).collect()
}

/// The events that `path` streams for `body`.
pub async fn events_of(app: &App, path: &str, body: Value) -> Vec<Value> {
    let body = with(body, json!({"stream": true}));
    let (status, headers, bytes) = send(&app.router, post_to(path, body.to_string())).await;
    assert_eq!((status.as_u16(), &headers["content-type"]), (200, &"text/event-stream".parse().unwrap()));
    named_events(&bytes)
}

/// A POST of JSON.
pub fn post_to(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header(header::CONTENT_TYPE, "application/json").body(body.into()).expect("sound")
}
