//! Clients that disconnect over TCP, at every stage of a request and in every format. `/status` shows that nothing of
//! the request remains.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use serde_json::{Value, json};
use unicorn::api::Connections;

use crate::support::app::{MODEL, endless};
use crate::support::fake_runner::HANG;
use crate::support::http::{assert_at_rest, get, is_at_rest, send, status, until};
use crate::support::json::with;
use crate::support::server::{CONNECTIONS, Serving, blocking};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
/// The number of tokens of an answer. An answer without a client must end long before.
const TOKENS: usize = 3000;
/// The number of steps within which the engine must notice the disconnect.
const STEPS: usize = 300;

/// A prompt of several steps, in the format of a route. `begin` differs, so that no part of it is in the prefix cache.
fn body(path: &str, begin: &str, more: Value) -> Value {
    let text = format!("{begin} in {path}{}", " long".repeat(30));
    let turns = json!([{"role": "user", "content": text}]);
    let body = match path {
        CHAT => json!({"messages": turns, "max_tokens": TOKENS}),
        COMPLETIONS => json!({"prompt": text, "max_tokens": TOKENS}),
        MESSAGES => json!({"messages": turns, "max_tokens": TOKENS}),
        _ => json!({"input": text, "max_output_tokens": TOKENS}),
    };
    with(with(body, json!({"model": MODEL})), more)
}

fn request(path: &str, body: &Value) -> String {
    let body = body.to_string();
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// When a client disconnects.
#[derive(Debug, Clone, Copy)]
enum When {
    /// When the server counts the client in this figure of `/status`.
    Counted(&'static str),
    /// When this many steps of the request have ended, and another is in progress.
    Steps(usize),
    /// When the client has read this text. This many steps are allowed for it.
    Read(usize, &'static str),
    /// When the request waits, because another request has all places.
    Waiting,
}

struct Stage {
    name: &'static str,
    path: &'static str,
    sent: String,
    when: When,
}

fn stages() -> Vec<Stage> {
    let whole = request(CHAT, &body(CHAT, "nothing", json!({})));
    let head = whole.find("\r\n\r\n").expect("a head") + 4;
    let names: Vec<String> = (0..1200).map(|i| format!("p{i}")).collect();
    let properties: Value = names.iter().map(|name| (name.clone(), json!({"type": "integer"}))).collect();
    let schema = json!({"type": "object", "properties": properties, "required": names});
    let large = request(CHAT, &body(CHAT, "JSON", json!({"guided_json": schema})));
    let stage = |name, path, sent: &str, when| Stage { name, path, sent: sent.to_owned(), when };
    let mut stages = vec![
        stage("before the head", CHAT, "", When::Counted("/connections")),
        stage("in the head", CHAT, &whole[..head / 2], When::Counted("/connections")),
        stage("after the head", CHAT, &whole[..head], When::Counted("/requests/arriving")),
        stage("in the body", CHAT, &whole[..whole.len() - 9], When::Counted("/requests/arriving")),
        stage(
            "after the body, whose grammar takes long to compile",
            CHAT,
            &large,
            When::Counted("/requests/open"),
        ),
    ];
    let (stream, two, both) = (json!({"stream": true}), json!({"n": 2}), json!({"n": 2, "stream": true}));
    let mut add = |name, path, more: &Value, when| {
        stages.push(Stage { name, path, sent: request(path, &body(path, name, more.clone())), when });
    };
    for path in [CHAT, COMPLETIONS, MESSAGES, RESPONSES] {
        add("in the queue", path, &json!({}), When::Waiting);
        add("in the queue, for a stream", path, &stream, When::Waiting);
        add("in its prompt", path, &json!({}), When::Steps(1));
        add("in its prompt, after a comment", path, &stream, When::Read(1, ":\n\n"));
        add("in a whole answer", path, &json!({}), When::Steps(12));
        add("in a stream", path, &stream, When::Read(12, ":\"a\""));
    }
    for path in [CHAT, COMPLETIONS] {
        add("in two whole answers", path, &two, When::Steps(12));
        add("in a stream of two answers", path, &both, When::Read(12, ":\"a\""));
    }
    let prompts = json!({"prompt": ["One", "Two"], "stream": true});
    add("in answers to two prompts", COMPLETIONS, &prompts, When::Read(12, ":\"a\""));
    stages
}

/// Reads until the received bytes contain `mark`.
fn read_to(client: &mut TcpStream, mark: &str, what: &str) {
    let (mut all, mut more) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&all).contains(mark) {
        let n = client.read(&mut more).unwrap_or(0);
        assert!(n > 0, "{what}: no {mark:?} in {:?}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&more[..n]);
    }
}

/// How a client disconnects.
#[derive(Debug, Clone, Copy)]
enum How {
    Closes,
    /// Closes its side for sending, and continues to read.
    HalfCloses,
}

/// One client that connects and disconnects.
async fn connect_and_disconnect(serving: &Serving, stage: &Stage, how: How) {
    let Stage { name, path, sent, when } = stage;
    let (app, control) = (&serving.app, &serving.app.control);
    let what = format!("{path}, {name}, {how:?}");
    let steps = control.batches().len();
    let mut allowed = steps
        + match when {
            When::Counted(_) | When::Waiting => 0,
            When::Steps(n) | When::Read(n, _) => *n,
        };
    control.allow(allowed);
    let mut other = None;
    if let When::Waiting = when {
        let mut all = serving.connect();
        all.write_all(request(CHAT, &body(CHAT, "other", json!({"n": 2}))).as_bytes()).expect("sent");
        until(app, &what, |seen| seen["requests"]["running"] != 0, || {}).await;
        other = Some(all);
    }
    let mut client = serving.connect();
    client.write_all(sent.as_bytes()).expect("sent");
    match *when {
        When::Counted(figure) => {
            until(app, &what, |seen| seen.pointer(figure) == Some(&json!(1)), || {}).await
        }
        When::Waiting => until(app, &what, |seen| seen["requests"]["waiting"] == 1, || {}).await,
        When::Steps(n) => {
            let control = control.clone();
            blocking(move || control.submitted(steps + n + 1)).await;
        }
        When::Read(_, mark) => {
            let what = what.clone();
            client = blocking(move || {
                read_to(&mut client, mark, &what);
                client
            })
            .await;
        }
    }
    let mut kept = None;
    match how {
        How::Closes => drop(client),
        How::HalfCloses => {
            client.shutdown(Shutdown::Write).expect("shut");
            kept = Some(client);
        }
    }
    // The steps run one by one, so an answer that continues without its client does not reach an end.
    let most = allowed + STEPS;
    let mut step = || {
        allowed = most.min(allowed + 1);
        control.allow(allowed);
    };
    if let Some(other) = other {
        let one = |seen: &Value| seen["requests"]["waiting"] == 0 && seen["connections"] == 1;
        until(app, &what, one, &mut step).await;
        assert_eq!(
            status(&app.router).await["requests"]["open"],
            1,
            "{what}: the other client must be served"
        );
        drop(other);
    }
    until(app, &what, is_at_rest, &mut step).await;
    drop(kept);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_client_leaves_no_request_and_no_connection() {
    let patient = Connections { head_timeout: 4 * HANG, idle_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(endless(), patient).await;
    let stages = stages();
    for stage in &stages {
        connect_and_disconnect(&serving, stage, How::Closes).await;
        connect_and_disconnect(&serving, stage, How::HalfCloses).await;
    }
    println!("{} stages", stages.len());
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_while_it_waits_is_removed_immediately() {
    let patient = Connections { head_timeout: 4 * HANG, idle_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(endless(), patient).await;
    let count =
        |n: usize| move |seen: &Value| seen["requests"]["arriving"] == n && seen["requests"]["open"] == n;
    let whole = request(CHAT, &body(CHAT, "nothing", json!({})));
    // These requests take all places of one client, and none of their bodies ends.
    let half = || {
        let mut client = serving.connect();
        client.write_all(&whole.as_bytes()[..whole.len() - 9]).expect("sent");
        client
    };
    let stalled: Vec<TcpStream> = (0..16).map(|_| half()).collect();
    until(&serving.app, "all places", count(16), || {}).await;
    let long = request(CHAT, &body(CHAT, &"long ".repeat(12_000), json!({})));
    let head = whole.find("\r\n\r\n").expect("a head") + 4;
    for (name, sent) in [
        ("after its head", &whole[..head]),
        ("with a part of its body", &whole[..whole.len() - 9]),
        ("with all of its body", &whole),
        ("with a long body", &long),
    ] {
        let mut waiting = serving.connect();
        waiting.write_all(sent.as_bytes()).expect("sent");
        until(&serving.app, name, count(17), || {}).await;
        drop(waiting);
        until(&serving.app, name, count(16), || {}).await;
    }
    drop(stalled);
    until(&serving.app, "at the end", is_at_rest, || {}).await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_a_client_that_stops_reading_are_aborted() {
    let serving = Serving::start(endless(), CONNECTIONS).await;
    // The answer is larger than what the system and the server buffer for a client that does not read.
    let large = json!({"logprobs": true, "top_logprobs": 20, "stream": true});
    let long = |path: &str| json!({if path == RESPONSES { "max_output_tokens" } else { "max_tokens" }: 3800});
    let finished =
        async |reason: &str| status(&serving.app.router).await["finished"][reason].as_u64().unwrap_or(0);
    for (path, more, answers) in [(CHAT, json!({}), 1), (CHAT, json!({"n": 2}), 2), (RESPONSES, json!({}), 1)]
    {
        let before = finished("abort").await;
        let mut client = serving.connect_with_small_buffer();
        let asked = body(path, "unread", with(with(large.clone(), long(path)), more));
        client.write_all(request(path, &asked).as_bytes()).expect("sent");
        client = blocking(move || {
            read_to(&mut client, "HTTP/1.1 200", path);
            client
        })
        .await;
        assert_at_rest(&serving.app.router).await;
        drop(client);
        assert_eq!(finished("abort").await - before, answers, "{path}: the answers were not aborted");
    }
    assert_eq!(finished("length").await, 0);
    let (_, _, metrics) = send(&serving.app.router, get("/metrics")).await;
    let metrics = String::from_utf8(metrics).expect("text");
    let slow_readers =
        metrics.lines().find(|line| line.starts_with("unicorn_slow_readers_total{")).expect("a count");
    assert!(slow_readers.ends_with("} 3"), "{slow_readers}");
    serving.end().await;
}
