//! Access control: API keys, host names, pages of other origins, the limits of one client, and configurations that
//! `serve` refuses at the start.

use std::convert::Infallible;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Request, Response, StatusCode};
use futures::StreamExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use unicorn::api::{AccessPolicy, Connections, Keys, Options, Server};

use crate::support::app::{App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, app_with_policy, limits, loaded};
use crate::support::fake_runner::{HANG, says};
use crate::support::http::{assert_all_free, chat, send, send_json};
use crate::support::program::{assert_error, output, unicorn};
use crate::support::server::{CONNECTIONS, Serving, blocking, certificate, read_answer};
use crate::support::tokenizers::tokenizer;

const KEY: &str = "sk-unicorn-1234567890";

fn with_keys() -> AccessPolicy {
    let keys = Keys::from_variable("test", &format!("first-key,{KEY}")).expect("sound keys");
    AccessPolicy { keys, ..AccessPolicy::default() }
}

fn with_cors(origins: &[&str]) -> AccessPolicy {
    AccessPolicy { cors_origins: origins.iter().map(|&o| o.into()).collect(), ..AccessPolicy::default() }
}

/// A request with these header fields. A POST has a body.
fn request(method: &str, path: &str, fields: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    let body = if method == "POST" { chat("Hi").to_string() } else { String::new() };
    request.body(Body::from(body)).expect("a sound request")
}

/// The status of the answer, and the error's code if it is an error.
async fn outcome(app: &App, request: Request<Body>) -> (u16, String) {
    let (status, _, body) = send_json(&app.router, request).await;
    (status.as_u16(), body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn with_keys_every_route_but_health_and_the_page_needs_a_key() {
    let app = app_with_policy(with_keys(), "ok");
    for (method, path) in [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/makers/tiny-gemma"),
        ("POST", CHAT),
        ("GET", "/page"),
        ("GET", "/page/"),
        ("GET", "/nothing"),
        ("DELETE", CHAT),
        ("GET", "/health/"),
        ("GET", "//health"),
    ] {
        for fields in [
            &[][..],
            &[("authorization", "")],
            &[("authorization", "Bearer")],
            &[("authorization", "Bearer ")],
            &[("authorization", "Bearer sk-unicorn-1234567891")],
            &[("authorization", "Bearer sk-unicorn-123456789")],
            &[("authorization", "Bearer first-key,sk-unicorn-1234567890")],
            &[("authorization", KEY)],
            &[("authorization", "Basic sk-unicorn-1234567890")],
            &[("x-api-key", "wrong")],
            &[("x-api-key", "Bearer sk-unicorn-1234567890")],
            &[("api-key", KEY)],
        ] {
            let (status, headers, body) = send_json(&app.router, request(method, path, fields)).await;
            let error = &body["error"];
            assert_eq!(
                (status.as_u16(), &error["code"]),
                (401, &json!("invalid_api_key")),
                "{path} {fields:?}"
            );
            assert_eq!((&error["type"], &error["param"]), (&json!("invalid_request_error"), &Value::Null));
            assert!(headers["www-authenticate"].to_str().unwrap().starts_with("Bearer"));
            assert!(headers.contains_key("x-request-id"));
            // No answer may contain a key, neither the server's nor the client's.
            for key in [KEY, "first-key", "1234567891"] {
                assert!(!body.to_string().contains(key), "{body}");
            }
        }
    }
    for (name, value) in [
        ("authorization", "Bearer sk-unicorn-1234567890"),
        ("authorization", "bearer first-key"),
        ("x-api-key", KEY),
        // A request with a key is accepted under any host name and from any origin, because a stranger's page has no
        // key.
        ("x-api-key", "first-key"),
    ] {
        let strange = [(name, value), ("host", "strange.example"), ("origin", "https://strange.example")];
        assert_eq!(outcome(&app, request("POST", CHAT, &strange)).await.0, 200, "{value}");
        assert_eq!(outcome(&app, request("GET", "/v1/models", &strange)).await.0, 200);
    }
    let both = [("authorization", "Bearer of-something-else"), ("x-api-key", KEY)];
    assert_eq!(outcome(&app, request("POST", CHAT, &both)).await.0, 200);
    let watcher = [("host", "strange.example")];
    assert_eq!(outcome(&app, request("GET", "/health", &watcher)).await.0, 200);
    for path in ["/", "/page/app.js"] {
        assert_eq!(send(&app.router, request("GET", path, &[])).await.0, 200, "{path}");
    }
}

#[tokio::test]
async fn without_keys_any_key_or_no_key_is_accepted() {
    let app = app_with_policy(AccessPolicy::default(), "ok");
    for fields in
        [&[][..], &[("authorization", "Bearer ")], &[("authorization", "Bearer x")], &[("x-api-key", "")]]
    {
        assert_eq!(outcome(&app, request("POST", CHAT, fields)).await, (200, String::new()), "{fields:?}");
    }
}

#[tokio::test]
async fn without_keys_foreign_hosts_and_origins_are_refused() {
    let app = app_with_policy(
        AccessPolicy { allowed_hosts: vec!["box.lan".into()], ..AccessPolicy::default() },
        "ok",
    );
    for host in ["evil.example:8010", "localhost.evil.example", "a@localhost", ""] {
        for (method, path) in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/nothing")] {
            let (status, headers, body) =
                send_json(&app.router, request(method, path, &[("host", host)])).await;
            assert_eq!(
                (status.as_u16(), &body["error"]["code"]),
                (403, &json!("host_not_allowed")),
                "{host:?}"
            );
            assert!(body["error"]["message"].as_str().unwrap().contains("server.allowed_hosts"));
            assert!(headers.contains_key("x-request-id"));
        }
    }
    // All names are checked: two `Host` fields, and a name in the request's target.
    let two = [("host", "localhost"), ("host", "evil.example")];
    assert_eq!(outcome(&app, request("POST", CHAT, &two)).await.0, 403);
    let target = request("POST", &format!("http://evil.example{CHAT}"), &[("host", "localhost")]);
    assert_eq!(outcome(&app, target).await.0, 403);
    for host in ["localhost:8010", "127.0.0.1", "[::1]:8010", "192.168.1.9:8010", "box.lan:8010"] {
        assert_eq!(outcome(&app, request("POST", CHAT, &[("host", host)])).await.0, 200, "{host}");
    }

    for origin in
        ["https://evil.example", "http://localhost:3000", "null", "http://127.0.0.1:8010", "localhost:8010"]
    {
        let page = [("host", "localhost:8010"), ("origin", origin), ("content-type", "text/plain")];
        let (status, _, body) = send_json(&app.router, request("POST", CHAT, &page)).await;
        assert_eq!(
            (status.as_u16(), &body["error"]["code"]),
            (403, &json!("origin_not_allowed")),
            "{origin}"
        );
        assert!(body["error"]["message"].as_str().unwrap().contains("server.cors_origins"));
        // The page must not read the answer to this request, so no header allows it.
        let (status, headers, _) = send(&app.router, request("GET", "/v1/models", &page)).await;
        assert!(status == 200 && !headers.contains_key("access-control-allow-origin"));
        // A preflight is refused as well.
        let (status, headers, _) = send(&app.router, request("OPTIONS", CHAT, &page)).await;
        assert!(status == 403 && !headers.contains_key("access-control-allow-origin"));
    }
    // These requests come from the server's own page.
    let own = [("host", "Box.lan:8010"), ("origin", "http://box.lan:8010")];
    assert_eq!(outcome(&app, request("POST", CHAT, &own)).await.0, 200);
    // A target in absolute form has the server's name, also without a Host field.
    for (origin, status) in [("http://box.lan:8010", 200), ("http://box.lan:3000", 403)] {
        let page = request("POST", &format!("http://Box.lan:8010{CHAT}"), &[("origin", origin)]);
        assert_eq!(outcome(&app, page).await.0, status, "{origin}");
    }
}

/// The preflight that Chrome and Firefox send before a POST of JSON with a key.
fn preflight(origin: &str) -> Request<Body> {
    request(
        "OPTIONS",
        CHAT,
        &[
            ("host", "127.0.0.1:8010"),
            ("accept", "*/*"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type,x-stainless-lang"),
            ("access-control-request-private-network", "true"),
            ("origin", origin),
            ("sec-fetch-mode", "cors"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-dest", "empty"),
        ],
    )
}

fn field<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().expect("text"))
}

/// Programs such as Obsidian are built of web pages, and their pages have an origin that no web page has.
#[tokio::test]
async fn pages_of_programs_are_admitted_as_ollama_does() {
    let app = app_with_policy(AccessPolicy::default(), "ok");
    for origin in
        ["app://obsidian.md", "tauri://localhost", "vscode-webview://1a2b", "vscode-file://vscode-app"]
    {
        let page = [("host", "localhost:8010"), ("origin", origin), ("content-type", "application/json")];
        for (request, expected) in [(request("POST", CHAT, &page), 200), (preflight(origin), 200)] {
            let (status, headers, _) = send(&app.router, request).await;
            assert_eq!(status, expected, "{origin}");
            assert_eq!(headers["access-control-allow-origin"], origin);
        }
    }
    for origin in ["app.example", "https://app://obsidian.md", "APP://x", "file://"] {
        let page = [("host", "localhost:8010"), ("origin", origin)];
        assert_eq!(outcome(&app, request("POST", CHAT, &page)).await.0, 403, "{origin}");
    }
}

#[tokio::test]
async fn pages_of_allowed_cors_origins_may_send_requests_and_read_answers() {
    let page = "http://localhost:3000";
    let named = with_cors(&["https://chat.example", page]);
    for policy in [named.clone(), with_cors(&["*"]), AccessPolicy { keys: with_keys().keys, ..named }] {
        let keyed = !policy.keys.is_empty();
        let all = policy.cors_origins == ["*"];
        let app = app_with_policy(policy, "ok");
        let (status, headers, _) = send(&app.router, preflight(page)).await;
        assert_eq!(status, 200, "{headers:?}");
        assert_eq!(field(&headers, "access-control-allow-origin"), Some(if all { "*" } else { page }));
        assert!(field(&headers, "access-control-allow-methods").unwrap().contains("POST"));
        let allowed = field(&headers, "access-control-allow-headers").unwrap();
        assert_eq!(allowed, "authorization,content-type,x-stainless-lang");
        assert_eq!(field(&headers, "access-control-allow-private-network"), Some("true"));
        assert!(field(&headers, "access-control-max-age").unwrap().parse::<u32>().unwrap() > 0);
        assert!(field(&headers, "access-control-allow-credentials").is_none());

        let fields = [("origin", page), ("host", "127.0.0.1:8010"), ("x-api-key", KEY)];
        let (status, headers, _) = send(&app.router, request("POST", CHAT, &fields)).await;
        assert_eq!(status, 200);
        assert_eq!(field(&headers, "access-control-allow-origin"), Some(if all { "*" } else { page }));
        assert!(field(&headers, "access-control-expose-headers").unwrap().contains("retry-after"));
        assert!(all || field(&headers, "vary").unwrap().to_lowercase().contains("origin"));
        // A page may read errors too: errors of authentication, and errors of a route.
        let wrong = [("origin", page), ("x-api-key", "wrong")];
        for request in [request("POST", CHAT, &wrong), request("GET", "/nothing", &fields)] {
            let (status, headers, _) = send(&app.router, request).await;
            assert!(!keyed || status == 401 || status == 404, "{status}");
            assert!(headers.contains_key("access-control-allow-origin"));
        }
        if !all {
            let (_, headers, _) = send(&app.router, preflight("https://evil.example")).await;
            assert_eq!(field(&headers, "access-control-allow-origin"), None);
            assert_eq!(field(&headers, "access-control-allow-private-network"), None);
            if !keyed {
                let evil = request("POST", CHAT, &[("origin", "https://evil.example")]);
                assert_eq!(outcome(&app, evil).await, (403, "origin_not_allowed".into()));
            }
        }
    }
}

/// Sends a request and reads no body.
async fn begin(app: &App, request: Request<Body>) -> Response<Body> {
    let response = tokio::time::timeout(HANG, app.router.clone().oneshot(request));
    response.await.expect("no request hangs").expect("handlers do not fail")
}

#[tokio::test]
async fn a_client_at_its_request_limit_is_refused_until_a_request_ends() {
    let app = app_with_policy(AccessPolicy { requests_per_client: 1, ..with_keys() }, "One, two, three");
    app.control.allow(2);
    let of = |key: &str, stream: bool| {
        let mut body = chat("Hi");
        body["stream"] = json!(stream);
        Request::post(CHAT).header("x-api-key", key).body(Body::from(body.to_string())).unwrap()
    };
    let mut answer = begin(&app, of(KEY, true)).await.into_body().into_data_stream();
    assert!(answer.next().await.expect("a first chunk").is_ok());
    // The engine has few places for requests that wait, so this request must be running.
    let control = app.control.clone();
    blocking(move || control.submitted(1)).await;
    let (status, headers, body) = send_json(&app.router, of(KEY, false)).await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::TOO_MANY_REQUESTS, &json!("client_full")));
    assert_eq!(body["error"]["type"], "rate_limit_error");
    assert!(field(&headers, "retry-after").unwrap().parse::<u32>().unwrap() > 0);
    // `/v1/models` takes no place, and another client's places are free.
    assert_eq!(outcome(&app, request("GET", "/v1/models", &[("x-api-key", KEY)])).await.0, 200);
    let other = begin(&app, of("first-key", true)).await;
    assert_eq!(other.status(), 200);
    drop(answer);
    // A request that is cancelled in the middle frees its place, and a refused request took none.
    assert_eq!(begin(&app, of(KEY, true)).await.status(), 200);
    app.control.release();
    drop(other);
    assert_all_free(&app.engine).await;
    assert_eq!(outcome(&app, of(KEY, false)).await.0, 200);
    assert_eq!(outcome(&app, of(KEY, false)).await.0, 200, "and again after a whole answer");
}

/// An app in which a body may stall for longer than a test lasts.
fn patient_app_with(policy: AccessPolicy) -> App {
    app_with_options(Options { body_stall: 4 * HANG, ..OPTIONS }, policy)
}

/// An app that delays the refusal of one wrong key too many for longer than a test lasts.
fn app_that_delays_refusals() -> App {
    app_with_options(Options { wrong_key_pause: 64 * HANG, ..OPTIONS }, with_keys())
}

fn app_with_options(options: Options, policy: AccessPolicy) -> App {
    let ids = tokenizer().encode("ok", false).expect("encodes");
    loaded(Server::new(MODEL, options, policy), limits(), DEFAULTS, says(&ids, END_OF_TURN))
}

/// The request, as if it came from that address.
fn from(peer: IpAddr, mut request: Request<Body>) -> Request<Body> {
    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(peer, 1)));
    request
}

/// A request in progress, or the status of the error that refused it.
type InProgress = Result<Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>>>>, u16>;

/// Sends a chat whose body never comes. `read` counts the bodies that the server began to read.
async fn stall(
    app: &App,
    fields: &[(&str, &str)],
    peer: Option<IpAddr>,
    read: &Arc<AtomicUsize>,
) -> InProgress {
    let (read, mut begun) = (Arc::clone(read), false);
    let body = futures::stream::poll_fn(move |_| {
        read.fetch_add(usize::from(!std::mem::replace(&mut begun, true)), Ordering::Relaxed);
        Poll::<Option<io::Result<Vec<u8>>>>::Pending
    });
    let mut request = request("POST", CHAT, fields).map(|_| Body::from_stream(body));
    if let Some(peer) = peer {
        request = from(peer, request);
    }
    let mut response = Box::pin(app.router.clone().oneshot(request));
    match futures::poll!(&mut response) {
        Poll::Pending => Ok(response),
        Poll::Ready(response) => Err(response.expect("handlers do not fail").status().as_u16()),
    }
}

#[tokio::test]
async fn a_client_whose_bodies_never_end_takes_a_quarter_of_the_places() {
    let app = patient_app_with(with_keys());
    let read = Arc::default();
    let mut stalled = Vec::new();
    for _ in 0..100 {
        stalled.push(stall(&app, &[("x-api-key", KEY)], None, &read).await.expect("it may wait"));
    }
    for _ in 0..20 {
        let honest = request("POST", CHAT, &[("x-api-key", "first-key")]);
        assert_eq!(outcome(&app, honest).await, (200, String::new()));
    }
    assert_eq!(read.load(Ordering::Relaxed), 16, "the other bodies wait unread");
}

#[tokio::test]
async fn a_wrong_key_next_to_the_valid_one_does_not_make_another_client() {
    let bogus: Vec<String> = (0..9).map(|i| format!("bogus-{i}")).collect();
    let bearers: Vec<String> = bogus.iter().map(|key| format!("Bearer {key}")).collect();
    let valid = format!("Bearer {KEY}");
    for rotating_first in [true, false] {
        let app = patient_app_with(AccessPolicy { requests_per_client: 2, ..with_keys() });
        let read = Arc::default();
        let mut in_progress = Vec::new();
        for (i, (key, bearer)) in bogus.iter().zip(&bearers).enumerate() {
            let fields = match rotating_first {
                true => [("authorization", bearer.as_str()), ("x-api-key", KEY)],
                false => [("authorization", valid.as_str()), ("x-api-key", key.as_str())],
            };
            let asked = stall(&app, &fields, None, &read).await;
            assert_eq!(asked.as_ref().err(), (i >= 2).then_some(&429), "request {i}");
            in_progress.extend(asked.ok());
        }
        let other = [("x-api-key", "first-key")];
        assert!(stall(&app, &other, None, &read).await.is_ok(), "another key is another client");
    }
}

#[tokio::test]
async fn without_keys_a_client_is_its_address_whatever_key_it_sends() {
    let address = |text: &str| text.parse::<IpAddr>().expect("an address");
    for (mine, also_mine, anothers) in [
        ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
        ("10.0.0.1", "::ffff:10.0.0.1", "::ffff:10.0.0.2"),
        // A client with an IPv6 address usually has a whole /64 network.
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:2::1"),
    ] {
        let app = patient_app_with(AccessPolicy { requests_per_client: 1, ..AccessPolicy::default() });
        let read = Arc::default();
        let keyed = |key: &'static str| [("authorization", key), ("x-api-key", key)];
        let first = stall(&app, &keyed("Bearer a"), Some(address(mine)), &read).await;
        assert!(first.is_ok());
        let second = stall(&app, &keyed("Bearer b"), Some(address(also_mine)), &read).await;
        assert_eq!(second.err(), Some(429), "{also_mine} is {mine}");
        assert!(stall(&app, &keyed("Bearer a"), Some(address(anothers)), &read).await.is_ok(), "{anothers}");
    }
}

#[tokio::test]
async fn reading_stored_responses_counts_against_the_clients_limit() {
    let app = patient_app_with(AccessPolicy { requests_per_client: 1, ..with_keys() });
    let read = Arc::default();
    let in_progress = stall(&app, &[("x-api-key", KEY)], None, &read).await;
    assert!(in_progress.is_ok());
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("DELETE", "/v1/responses/resp_1"),
    ] {
        let full = outcome(&app, request(method, path, &[("x-api-key", KEY)])).await;
        assert_eq!(full, (429, "client_full".into()), "{method} {path}");
        let other = outcome(&app, request(method, path, &[("x-api-key", "first-key")])).await;
        assert_eq!(other, (404, "not_found".into()), "{method} {path}");
    }
}

#[tokio::test]
async fn listing_input_items_waits_for_the_clients_turn() {
    let app = patient_app_with(with_keys());
    let keyed = |path: &str| request("GET", path, &[("x-api-key", KEY)]);
    let create = json!({"model": MODEL, "input": "Hi"}).to_string();
    let create = Request::post("/v1/responses").header("x-api-key", KEY).body(Body::from(create));
    let (_, _, response) = send_json(&app.router, create.expect("sound")).await;
    let list = format!("/v1/responses/{}/input_items", response["id"].as_str().expect("an id"));

    let read = Arc::default();
    let mut stalled = Vec::new();
    for _ in 0..16 {
        stalled.push(stall(&app, &[("x-api-key", KEY)], None, &read).await.expect("it may wait"));
    }
    let mut listing = Box::pin(app.router.clone().oneshot(keyed(&list)));
    assert!(futures::poll!(&mut listing).is_pending());
    let (_, _, status) = send_json(&app.router, keyed("/status")).await;
    assert_eq!((&status["requests"]["arriving"], &status["requests"]["open"]), (&json!(17), &json!(17)));
    drop(stalled);
    let listed = tokio::time::timeout(HANG, listing).await.expect("its turn comes").expect("infallible");
    assert_eq!(listed.status(), 200);
    let other = request("GET", &list, &[("x-api-key", "first-key")]);
    assert_eq!(outcome(&app, other).await, (404, "not_found".into()));
}

#[tokio::test]
async fn wrong_keys_are_refused_late_and_valid_keys_are_accepted_immediately() {
    let app = app_that_delays_refusals();
    let (here, there) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
    let ask = |peer, key| from(peer, request("POST", CHAT, &[("x-api-key", key)]));
    for i in 0..5 {
        assert_eq!(outcome(&app, ask(here, "wrong")).await.0, 401, "{i}");
    }
    let mut late = Vec::new();
    for i in 0..9 {
        let mut asked = Box::pin(app.router.clone().oneshot(ask(here, "wrong")));
        assert!(futures::poll!(&mut asked).is_pending(), "{i}");
        late.push(asked);
    }
    assert_eq!(outcome(&app, ask(here, KEY)).await.0, 200);
    assert_eq!(outcome(&app, from(here, request("GET", "/health", &[("x-api-key", "wrong")]))).await.0, 200);
    assert_eq!(
        outcome(&app, from(here, request("POST", CHAT, &[]))).await.0,
        401,
        "a missing key does not count as a wrong key"
    );
    assert_eq!(outcome(&app, ask(there, "wrong")).await.0, 401);
    let (_, _, status) =
        send_json(&app.router, from(here, request("GET", "/status", &[("x-api-key", KEY)]))).await;
    assert_eq!(status["requests"]["open"], 0, "a refused request is not open");
}

#[tokio::test]
async fn the_access_policy_can_be_replaced() {
    let page = "http://localhost:3000";
    let app = patient_app_with(with_keys());
    let with = |key: &'static str| request("POST", CHAT, &[("x-api-key", key), ("origin", page)]);
    let create = |key: &str| {
        let body = json!({"model": MODEL, "input": "Hi"}).to_string();
        Request::post("/v1/responses").header("x-api-key", key).body(Body::from(body)).expect("sound")
    };
    let document = async |key: &str| {
        let (_, _, document) =
            send_json(&app.router, request("GET", "/openapi.json", &[("x-api-key", key)])).await;
        document["security"].is_array()
    };
    assert_eq!((outcome(&app, with(KEY)).await.0, outcome(&app, with("third-key")).await.0), (200, 401));
    assert!(!send(&app.router, preflight(page)).await.1.contains_key("access-control-allow-origin"));
    assert!(document(KEY).await);
    let (_, _, kept) = send_json(&app.router, create(KEY)).await;
    let kept = format!("/v1/responses/{}", kept["id"].as_str().expect("an id"));
    app.control.allow(app.control.batches().len());
    let (router, in_progress) = (app.router.clone(), with(KEY));
    let in_progress = tokio::spawn(async move { send(&router, in_progress).await });
    let (control, steps) = (app.control.clone(), app.control.batches().len());
    blocking(move || control.submitted(steps + 1)).await;

    let keys = |text| Keys::from_variable("test", text).expect("sound keys");
    let other = AccessPolicy { keys: keys("third-key"), requests_per_client: 1, ..with_cors(&[page]) };
    app.server.set_access(other.clone());
    let (status, headers, _) = send(&app.router, preflight(page)).await;
    assert_eq!((status.as_u16(), field(&headers, "access-control-allow-origin")), (200, Some(page)));
    assert_eq!(outcome(&app, with(KEY)).await.0, 401, "a key that was removed");
    app.control.release();
    assert_eq!(in_progress.await.expect("no panic").0, 200, "a request in progress continues");
    assert_eq!(outcome(&app, with("third-key")).await.0, 200);
    let read = Arc::default();
    let third = [("x-api-key", "third-key")];
    let first = stall(&app, &third, None, &read).await;
    assert!(first.is_ok());
    assert_eq!(stall(&app, &third, None, &read).await.err(), Some(429), "the limit of the new policy");
    app.server.set_access(AccessPolicy { requests_per_client: 2, ..other });
    assert!(stall(&app, &third, None, &read).await.is_ok());

    app.server.set_access(AccessPolicy::default());
    assert!(!document("").await);
    assert_eq!(send(&app.router, preflight(page)).await.0, 403);
    assert_eq!(outcome(&app, request("POST", CHAT, &[])).await.0, 200);
    app.server.set_access(AccessPolicy {
        keys: keys("third-key,sk-unicorn-1234567890"),
        ..AccessPolicy::default()
    });
    assert_eq!(
        outcome(&app, request("GET", &kept, &[("x-api-key", KEY)])).await.0,
        200,
        "a client keeps its responses"
    );
    assert_eq!(outcome(&app, request("GET", &kept, &third)).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn delayed_refusals_end_when_their_connections_are_needed() {
    let connections = Connections { most: 4, head_timeout: 4 * HANG, idle_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(app_that_delays_refusals(), connections).await;
    let wrong = || request("GET", "/v1/models", &[("x-api-key", "wrong")]);
    for _ in 0..5 {
        assert_eq!(outcome(&serving.app, from(serving.address.ip(), wrong())).await.0, 401);
    }
    let head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: wrong\r\n\r\n";
    let mut late: Vec<TcpStream> = (0..4).map(|_| serving.connect()).collect();
    for client in &mut late {
        client.write_all(head.as_bytes()).expect("sent");
    }
    let mut honest = serving.connect();
    let head = head.replace("wrong", KEY);
    blocking(move || {
        honest.write_all(head.as_bytes()).expect("sent");
        assert!(read_answer(&mut honest).1.contains(MODEL));
        for mut client in late {
            assert!(read_answer(&mut client).0.starts_with("http/1.1 401"));
        }
    })
    .await;
    serving.end().await;
}

// --- the binary -----------------------------------------------------------------------------------------

#[test]
fn warnings_of_short_keys_name_the_file_and_line_and_not_the_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys");
    let path = keys.to_str().expect("UTF-8");
    let sixteen = "abcdefghijklmnop";
    std::fs::write(&keys, format!("# who: alice\n{KEY}\nswordfish\n\n{sixteen}\nopensesame12345\n"))
        .expect("written");
    let mut command = unicorn(&["serve", "--port", "0", "--api-key-file", path]);
    command.env("UNICORN_API_KEYS", format!("{KEY},mellon"));
    let (_, _, stderr) = output(command);
    let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains("16 characters")).collect();
    let [of_file, of_variable] = warnings[..] else { panic!("{stderr}") };
    assert!(of_file.contains(path) && of_file.contains("lines 3 and 6"), "{of_file}");
    assert!(of_variable.contains("UNICORN_API_KEYS") && of_variable.contains("key 2"), "{of_variable}");
    for key in ["swordfish", "opensesame", "mellon", sixteen] {
        assert!(!stderr.contains(key), "{stderr}");
    }
}

#[test]
fn a_server_that_is_open_by_mistake_is_refused_at_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys");
    let path = keys.to_str().expect("UTF-8");
    let serve = |more: &[&str]| unicorn(&[&["serve", "--port", "0"], more].concat());
    for host in ["0.0.0.0", "::"] {
        assert_error(serve(&["--host", host]), 78, &["API key", "--api-key-file", "server.allow_keyless"]);
    }
    let mut empty = serve(&["--host", "0.0.0.0"]);
    empty.env("UNICORN_API_KEYS", " , ");
    assert_error(empty, 78, &["API key"]);

    assert_error(serve(&["--api-key-file", path]), 78, &[path, "No such file"]);
    std::fs::write(&keys, "# no keys yet\n").expect("written");
    assert_error(serve(&["--api-key-file", path]), 78, &[path, "no key"]);
    std::fs::write(&keys, "good\nsecret with blanks\n").expect("written");
    let (code, _, stderr) = output(serve(&["--api-key-file", path]));
    assert!(code == 78 && stderr.contains("line 2") && !stderr.contains("secret"), "{stderr}");
    // The warning says that others may read the file, and not what is in it. The next error is that there is no device.
    std::fs::write(&keys, KEY).expect("written");
    for (mode, warned) in [("644", true), ("640", false), ("600", false)] {
        let chmod = std::process::Command::new("chmod").args([mode, path]).status().expect("runs");
        assert!(chmod.success());
        let (code, _, stderr) = output(serve(&["--api-key-file", path, "--host", "0.0.0.0"]));
        assert_eq!((code, stderr.contains("chmod o=")), (75, warned), "{mode}: {stderr}");
        assert!(stderr.contains("listening on http://0.0.0.0:"), "{stderr}");
        assert!(stderr.contains("cross the network") && !stderr.contains(KEY), "{stderr}");
    }
    let mut open = serve(&["--host", "0.0.0.0"]);
    open.env("UNICORN_SERVER_ALLOW_KEYLESS", "true");
    let (_, _, stderr) = output(open);
    assert!(stderr.contains("no API key is required") && stderr.contains("listening on"), "{stderr}");
    let mut variable = serve(&["--host", "0.0.0.0"]);
    variable.env("UNICORN_API_KEYS", KEY);
    let (_, _, stderr) = output(variable);
    assert!(!stderr.contains("no API key") && stderr.contains("listening on"), "{stderr}");

    // The server is configured for more connections than this process may have open files.
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -n 300; exec \"$0\" serve --port 0", env!("CARGO_BIN_EXE_unicorn")]);
    assert_error(limited, 78, &["server.connections = 512", "300", "ulimit -n"]);

    let (certificates, _) = certificate();
    let pem = |name: &str| certificates.path().join(name).to_str().expect("UTF-8").to_owned();
    let mut secure = serve(&[]);
    secure.env("UNICORN_SERVER_TLS_CERT", pem("cert.pem")).env("UNICORN_SERVER_TLS_KEY", pem("key.pem"));
    assert!(output(secure).2.contains("listening on https://127.0.0.1:"));
    let mut mixed = serve(&[]);
    mixed.env("UNICORN_SERVER_TLS_CERT", pem("key.pem")).env("UNICORN_SERVER_TLS_KEY", pem("cert.pem"));
    assert_error(mixed, 78, &["key.pem", "no certificate"]);
    for (variable, value, part) in [
        ("UNICORN_SERVER_TLS_CERT", "x", "expected both or neither"),
        ("UNICORN_SERVER_CORS_ORIGINS", "https://a.example/,http://b", "https://a.example/"),
        ("UNICORN_SERVER_CORS_ORIGINS", "a.example", "http://localhost:3000"),
        ("UNICORN_SERVER_ALLOWED_HOSTS", "a.lan,b.lan:80", "b.lan:80"),
        ("UNICORN_SERVER_CONNECTIONS", "0", "server.connections"),
    ] {
        let mut command = serve(&[]);
        command.env(variable, value);
        assert_error(command, 78, &[part]);
    }
}
