//! HTTP/2: what a connection of HTTP/1.1 promises holds for connections of HTTP/2, and for each of their streams alone.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{Request, header};
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{self, pki_types::ServerName};
use unicorn::api::{self, AccessPolicy, Connections, Options, Server, Tls};

use crate::support::app::{App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, app_behind, endless, limits, loaded};
use crate::support::fake_runner::{HANG, says};
use crate::support::http::{assert_at_rest, chat, until};
use crate::support::json::with;
use crate::support::server::{CONNECTIONS, Serving, blocking, certificate};
use crate::support::tokenizers::tokenizer;

const CHAT: &str = "/v1/chat/completions";
/// No timeout ends anything.
const PATIENT: Connections = Connections {
    head_timeout: Duration::from_secs(120),
    idle_timeout: Duration::from_secs(120),
    write_timeout: Duration::from_secs(120),
    ..CONNECTIONS
};
/// Streams that the server lets one connection have open.
const MOST_STREAMS: usize = 100;
/// Bodies of one client that the server reads at once.
const MOST_BODIES: usize = 16;

// --- a client of the crate h2 ---------------------------------------------------------------------------

/// A client on one connection.
struct Client {
    streams: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

/// The crate's own bound on small frames that wait to be read would meet a test that reads late.
fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.data_frame_budget(1 << 30);
    builder
}

impl Client {
    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, builder: &Builder) -> Self {
        let (streams, connection) = builder.handshake(stream).await.expect("HTTP/2");
        Self { streams, connection: tokio::spawn(connection) }
    }

    /// By prior knowledge.
    async fn connect(serving: &Serving) -> Self {
        Self::over(socket(serving), &builder()).await
    }

    async fn send(&mut self, request: Request<()>, is_whole: bool) -> (ResponseFuture, SendStream<Bytes>) {
        self.streams = in_time(self.streams.clone().ready()).await.expect("room for a stream");
        self.streams.send_request(request, is_whole).expect("sent")
    }

    /// A request whose body is still to come.
    async fn begin(&mut self, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
        self.send(Request::post(format!("http://localhost{path}")).body(()).expect("sound"), false).await
    }

    async fn post(&mut self, path: &str, body: &Value) -> ResponseFuture {
        let (response, mut stream) = self.begin(path).await;
        stream.send_data(body.to_string().into(), true).expect("sent");
        response
    }

    async fn get(&mut self, path: &str) -> (u16, String) {
        let request = Request::get(format!("http://localhost{path}")).body(()).expect("sound");
        let (response, _) = self.send(request, true).await;
        read(response).await.expect("an answer")
    }
}

fn socket(serving: &Serving) -> tokio::net::TcpStream {
    let stream = serving.connect();
    stream.set_nonblocking(true).expect("set");
    tokio::net::TcpStream::from_std(stream).expect("a runtime")
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG, future).await.expect("in time")
}

/// Reads on until what came holds `mark`, or to the end where `mark` is none.
async fn read_to(body: &mut RecvStream, mark: Option<&str>) -> Result<String, h2::Error> {
    let mut all = Vec::new();
    while let Some(piece) = in_time(body.data()).await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        all.extend_from_slice(&piece);
        if mark.is_some_and(|mark| String::from_utf8_lossy(&all).contains(mark)) {
            break;
        }
    }
    Ok(String::from_utf8(all).expect("text"))
}

async fn read(response: ResponseFuture) -> Result<(u16, String), h2::Error> {
    let (head, mut body) = in_time(response).await?.into_parts();
    Ok((head.status.as_u16(), read_to(&mut body, None).await?))
}

fn long_stream(text: &str, tokens: usize) -> Value {
    with(chat(text), json!({"stream": true, "max_tokens": tokens}))
}

/// Whether no request is left, whatever the connections do.
fn is_done(status: &Value) -> bool {
    let requests = ["open", "arriving", "waiting", "running"].map(|name| &status["requests"][name]);
    let held = [&status["kv"]["full"]["held"], &status["kv"]["sliding"]["held"]];
    requests.into_iter().chain(held).all(|n| *n == 0)
}

fn counted(figure: &'static str, n: usize) -> impl Fn(&Value) -> bool {
    move |status| status["requests"][figure] == n
}

// --- a client that writes frames by hand ----------------------------------------------------------------

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a small frame").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// What a client begins with.
fn hello() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(SETTINGS, 0, 0, &[]).as_slice()].concat()
}

/// `GET /` or `POST path` to localhost in HPACK: indices of its static table, and texts.
fn head(flags: u8, stream: u32, post: Option<&str>) -> Vec<u8> {
    let text = |index: u8, text: &str| [&[index, text.len() as u8], text.as_bytes()].concat();
    let (method, path) = match post {
        None => (0x82, vec![0x84]),
        Some(path) => (0x83, text(0x04, path)),
    };
    frame(HEADERS, flags, stream, &[&[method, 0x86], path.as_slice(), &text(0x01, "localhost")].concat())
}

/// Kinds and payloads of all frames that come until the server closes; panics where it does not.
fn frames_to_the_end(socket: &mut TcpStream) -> Vec<(u8, Vec<u8>)> {
    let mut all = Vec::new();
    match socket.read_to_end(&mut all) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("not closed: {error}"),
    }
    let (mut frames, mut rest) = (Vec::new(), all.as_slice());
    while let Some((head, behind)) = rest.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((payload, behind)) = behind.split_at_checked(length) else { break };
        frames.push((head[3], payload.to_vec()));
        rest = behind;
    }
    frames
}

/// Kind, flags and payload of the next frame.
fn read_frame(socket: &mut TcpStream) -> (u8, u8, Vec<u8>) {
    let mut head = [0; 9];
    socket.read_exact(&mut head).expect("a frame");
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    socket.read_exact(&mut payload).expect("its payload");
    (head[3], head[4], payload)
}

/// Waits until an answer has ended; panics where a stream is reset.
fn wait_for_answer(socket: &mut TcpStream) {
    loop {
        let (kind, flags, payload) = read_frame(socket);
        assert_ne!(kind, RST_STREAM, "{payload:?}");
        if matches!(kind, HEADERS | DATA) && flags & END_STREAM != 0 {
            return;
        }
    }
}

// --- requests and answers -------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn answers_and_streams_come_over_one_connection() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "One, two, three"), PATIENT).await;
    let mut client = Client::connect(&serving).await;
    let (status, models) = client.get("/v1/models").await;
    assert!(status == 200 && models.contains(MODEL), "{models}");
    let (whole, stream) =
        (client.post(CHAT, &chat("Hi")).await, client.post(CHAT, &long_stream("Hi", 9)).await);
    let (whole, stream) = tokio::join!(read(whole), read(stream));
    let (status, answer) = whole.expect("an answer");
    assert!(status == 200 && answer.contains("One, two, three"), "{answer}");
    let (status, events) = stream.expect("a stream");
    assert!(status == 200 && events.ends_with("data: [DONE]\n\n"), "{events}");
    // An answer of many pieces is the same as over HTTP/1.1, and says its length.
    let request = Request::get("http://localhost/openapi.json").body(()).expect("sound");
    let (head, mut body) = in_time(client.send(request, true).await.0).await.expect("a head").into_parts();
    let document = read_to(&mut body, None).await.expect("a whole answer");
    assert_eq!(head.headers[header::CONTENT_LENGTH], document.len().to_string().as_str());
    let (_, _, expected) =
        crate::support::http::send(&serving.app.router, crate::support::http::get("/openapi.json")).await;
    assert!(document.as_bytes() == expected && expected.len() > 64 << 10, "{} bytes", expected.len());
    let compressed =
        Request::post(format!("http://localhost{CHAT}")).header(header::CONTENT_ENCODING, "gzip");
    let (response, _) = client.send(compressed.body(()).expect("sound"), true).await;
    assert_eq!(read(response).await.expect("a refusal").0, 415);
    assert_eq!(client.get("/nothing").await.0, 404);
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_pages_are_judged_as_over_http_1() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), PATIENT).await;
    let mut client = Client::connect(&serving).await;
    for (authority, origin, status) in [
        ("localhost:8010", None, 200),
        ("localhost:8010", Some("http://localhost:8010"), 200),
        ("localhost:8010", Some("http://localhost:3000"), 403),
        ("localhost:8010", Some("http://evil.example"), 403),
        ("evil.example", None, 403),
        ("evil.example", Some("http://evil.example"), 403),
    ] {
        let mut request = Request::post(format!("http://{authority}{CHAT}"));
        if let Some(origin) = origin {
            request = request.header(header::ORIGIN, origin);
        }
        let (response, mut stream) = client.send(request.body(()).expect("sound"), false).await;
        // A refusal may come before the body has gone.
        let _ = stream.send_data(chat("Hi").to_string().into(), true);
        let (got, answer) = read(response).await.expect("an answer");
        assert_eq!(got, status, "{authority} {origin:?}: {answer}");
    }
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_offers_http_2_to_whoever_knows_it() {
    let (folder, cert) = certificate();
    let tls = Tls::read(&folder.path().join("cert.pem"), &folder.path().join("key.pem")).expect("sound");
    let app = app_behind(AccessPolicy::default(), "One, two, three");
    let serving = Serving::start(app, Connections { tls: Some(tls), ..PATIENT }).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cert).expect("sound");
    for versions in [&[&rustls::version::TLS12][..], &[&rustls::version::TLS13]] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .expect("known")
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec(), b"h2".to_vec()];
        let name = ServerName::try_from("localhost").expect("a name");
        let connector = TlsConnector::from(Arc::new(config));
        let stream = in_time(connector.connect(name, socket(&serving))).await.expect("TLS");
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let mut client = Client::over(stream, &builder()).await;
        let (status, answer) = read(client.post(CHAT, &chat("Hi")).await).await.expect("an answer");
        assert!(status == 200 && answer.contains("One, two, three"), "{answer}");
    }
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_stream_is_reset_only_where_its_body_does_not_end() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), PATIENT).await;
    let (mut ends, mut stays) = (serving.connect(), serving.connect());
    blocking(move || {
        for socket in [&mut ends, &mut stays] {
            let begun = [hello(), head(END_HEADERS, 1, Some("/nothing")), frame(DATA, 0, 1, b"{")];
            socket.write_all(&begun.concat()).expect("sent");
            wait_for_answer(socket);
        }
        ends.write_all(&frame(DATA, END_STREAM, 1, b"}")).expect("sent");
        ends.write_all(&head(END_HEADERS | END_STREAM, 3, None)).expect("sent");
        wait_for_answer(&mut ends);
        let reset = loop {
            let (kind, _, payload) = read_frame(&mut stays);
            if kind == RST_STREAM {
                break payload;
            }
        };
        assert_eq!(reset, u32::from(Reason::NO_ERROR).to_be_bytes());
    })
    .await;
    serving.end().await;
}

// --- bounds ---------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_are_open_at_once_up_to_the_bound() {
    let options = Options { body_stall: 4 * HANG, ..OPTIONS };
    let a = tokenizer().encode("a", false).expect("encodes");
    let server = Server::new(MODEL, options, AccessPolicy::default());
    let serving = Serving::start(loaded(server, limits(), DEFAULTS, says(&a, END_OF_TURN)), PATIENT).await;
    let mut client = Client::connect(&serving).await;
    assert_eq!(client.get("/health").await.0, 200);
    assert_eq!(client.streams.current_max_send_streams(), MOST_STREAMS);
    let mut open = Vec::new();
    for _ in 0..MOST_STREAMS {
        open.push(client.begin(CHAT).await);
    }
    until(&serving.app, "all streams", counted("arriving", MOST_STREAMS), || {}).await;
    // As much of each body as fits, first of those that nobody reads yet, which keep out none of those that are read.
    let filler = Bytes::from(" ".repeat(16 << 10));
    for (_, stream) in open.iter_mut().rev() {
        stream.send_data(filler.clone(), false).expect("sent");
    }
    for (_, stream) in &mut open {
        stream.send_data("{}".into(), true).expect("sent");
    }
    for (response, _) in open {
        let (status, answer) = read(response).await.expect("an answer");
        assert!(status == 400 && answer.contains("messages is required"), "{answer}");
    }
    assert_eq!(client.get("/health").await.0, 200);
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_one_connection_are_requests_of_one_client() {
    let server = Server::new(
        MODEL,
        Options { body_stall: 4 * HANG, ..OPTIONS },
        AccessPolicy { requests_per_client: 2, ..AccessPolicy::default() },
    );
    let serving = Serving::start(loaded(server, limits(), DEFAULTS, says(&[], END_OF_TURN)), PATIENT).await;
    let mut client = Client::connect(&serving).await;
    let _open = [client.begin(CHAT).await, client.begin(CHAT).await];
    until(&serving.app, "two requests", counted("open", 2), || {}).await;
    let (status, answer) = read(client.post(CHAT, &chat("Hi")).await).await.expect("an answer");
    assert!(status == 429 && answer.contains("2"), "{answer}");
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_beyond_all_measure_are_refused() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), PATIENT).await;
    for (bytes, is_answered) in [(60 << 10, true), (70 << 10, false), (500 << 10, false)] {
        let mut client = Client::connect(&serving).await;
        let request = Request::get("http://localhost/health").header("x-long", "a".repeat(bytes));
        let (response, _) = client.send(request.body(()).expect("sound"), true).await;
        match read(response).await {
            Ok((status, answer)) => assert_eq!(status, if is_answered { 200 } else { 431 }, "{answer}"),
            Err(error) => assert!(!is_answered, "{error}"),
        }
    }
    assert_eq!(Client::connect(&serving).await.get("/health").await.0, 200);
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_requests_that_are_reset_at_once_end_their_connection_alone() {
    let serving = Serving::start(app_behind(AccessPolicy::default(), "One, two, three"), PATIENT).await;
    let mut honest = Client::connect(&serving).await;
    assert_eq!(honest.get("/health").await.0, 200);
    let mut rapid = serving.connect();
    let frames = blocking(move || {
        let reset = |i: u32| {
            let stream = 2 * i + 1;
            let cancel = u32::from(Reason::CANCEL).to_be_bytes();
            [head(END_HEADERS | END_STREAM, stream, None), frame(RST_STREAM, 0, stream, &cancel)].concat()
        };
        rapid.write_all(&[hello(), head(END_HEADERS | END_STREAM, 1, None)].concat()).expect("sent");
        wait_for_answer(&mut rapid);
        // The server may close before it has read all.
        let _ = rapid.write_all(&(1..=1000).flat_map(reset).collect::<Vec<u8>>());
        frames_to_the_end(&mut rapid)
    })
    .await;
    let calm = u32::from(Reason::ENHANCE_YOUR_CALM).to_be_bytes();
    let told = |(kind, payload): &(u8, Vec<u8>)| *kind == GOAWAY && payload[4..8] == calm;
    assert!(frames.iter().any(told), "{frames:?}");
    let (status, answer) = read(honest.post(CHAT, &chat("Hi")).await).await.expect("an answer");
    assert!(status == 200 && answer.contains("One, two, three"), "{answer}");
    until(&serving.app, "the honest one alone", |seen| is_done(seen) && seen["connections"] == 1, || {})
        .await;
    serving.end().await;
}

// --- silence --------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn whoever_keeps_a_connection_waiting_loses_it() {
    // No ping of the server ends anything.
    let connections = Connections { write_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), connections).await;
    let whole = |stream| head(END_HEADERS | END_STREAM, stream, None);
    let half = |stream| head(END_STREAM, stream, None);
    for (name, first, then) in [
        ("nothing behind the preface", hello(), vec![]),
        ("a part of the preface", hello()[..9].to_vec(), vec![]),
        ("a head that does not end", [hello(), half(1)].concat(), vec![]),
        ("no second request", [hello(), whole(1)].concat(), vec![]),
        ("a second head that does not end", [hello(), whole(1)].concat(), half(3)),
    ] {
        let (mut socket, is_answered) = (serving.connect(), first.ends_with(&whole(1)));
        let frames = blocking(move || {
            socket.write_all(&first).expect("sent");
            if is_answered {
                wait_for_answer(&mut socket);
                socket.write_all(&then).expect("sent");
            }
            frames_to_the_end(&mut socket)
        })
        .await;
        let refused = frames.iter().any(|(kind, _)| *kind == RST_STREAM);
        assert!(!refused, "{name}: the frames are sound");
    }
    assert_at_rest(&serving.app.router).await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pings_keep_no_connection_from_being_idle() {
    let connections = Connections { write_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), connections).await;
    for first in [hello(), [hello(), head(END_HEADERS | END_STREAM, 1, None)].concat()] {
        // Now and then, and without any pause.
        for pause in [Duration::from_millis(20), Duration::ZERO] {
            let mut socket = serving.connect();
            let first = first.clone();
            blocking(move || {
                socket.write_all(&first).expect("sent");
                let mut reader = socket.try_clone().expect("a second descriptor");
                let reading = std::thread::spawn(move || frames_to_the_end(&mut reader));
                let (ping, since) = (
                    frame(PING, 0, 0, &[0; 8]).repeat(if pause.is_zero() { 100 } else { 1 }),
                    Instant::now(),
                );
                while socket.write_all(&ping).is_ok() {
                    assert!(since.elapsed() < HANG, "{pause:?}: pings keep the connection");
                    std::thread::sleep(pause);
                }
                let frames = reading.join().expect("closed");
                assert!(frames.iter().any(|(kind, _)| *kind == PING), "a ping was answered");
            })
            .await;
        }
    }
    assert_at_rest(&serving.app.router).await;
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_take_longer_than_silence_may() {
    let connections = Connections { write_timeout: 4 * HANG, ..CONNECTIONS };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "One, two, three"), connections).await;
    serving.app.control.allow(2);
    let mut client = Client::connect(&serving).await;
    let (whole, stream) =
        (client.post(CHAT, &chat("Hi")).await, client.post(CHAT, &long_stream("Hi", 9)).await);
    tokio::time::sleep(2 * CONNECTIONS.idle_timeout).await;
    serving.app.control.release();
    let (whole, stream) = tokio::join!(read(whole), read(stream));
    assert!(whole.expect("an answer").1.contains("One, two, three"));
    assert!(stream.expect("a stream").1.ends_with("data: [DONE]\n\n"));
    // And is idle from then on.
    let _ended = in_time(client.connection).await.expect("no panic");
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_makes_idle_connections_give_way() {
    let connections = Connections { most: 2, ..PATIENT };
    let serving = Serving::start(app_behind(AccessPolicy::default(), "ok"), connections).await;
    let _silent = Client::connect(&serving).await;
    let mut idle = Client::connect(&serving).await;
    assert_eq!(idle.get("/health").await.0, 200);
    let mut asking = Client::connect(&serving).await;
    assert_eq!(asking.get("/health").await.0, 200);
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_answers_no_ping_loses_its_connection_and_its_answer() {
    let connections = Connections { write_timeout: Duration::from_secs(3), ..PATIENT };
    let serving = Serving::start(endless(), connections).await;
    serving.app.control.allow(12);
    let mut honest = Client::connect(&serving).await;
    assert_eq!(honest.get("/health").await.0, 200);
    let mut deaf = serving.connect();
    let frames = blocking(move || {
        let body = long_stream("Hi", 3000).to_string();
        let request = [head(END_HEADERS, 1, Some(CHAT)), frame(DATA, END_STREAM, 1, body.as_bytes())];
        deaf.write_all(&[hello(), request.concat()].concat()).expect("sent");
        frames_to_the_end(&mut deaf)
    })
    .await;
    for kind in [DATA, PING, GOAWAY] {
        assert!(frames.iter().any(|(other, _)| *other == kind), "{kind}");
    }
    // Step by step, so that an answer for nobody would show.
    let mut allowed = 12;
    let step = || {
        allowed = 312.min(allowed + 1);
        serving.app.control.allow(allowed);
    };
    until(&serving.app, "given up", |seen| is_done(seen) && seen["connections"] == 1, step).await;
    assert_eq!(honest.get("/health").await.0, 200, "who answers pings stays");
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_not_read_is_given_up_alone() {
    let connections = Connections { write_timeout: Duration::from_secs(2), ..PATIENT };
    let serving = Serving::start(endless(), connections).await;
    // A stream's window has room for a few events, and for no whole document.
    let mut client = Client::over(socket(&serving), builder().initial_window_size(600)).await;
    let unread = client.post(CHAT, &long_stream("Unread", 3000)).await;
    let document = Request::get("http://localhost/openapi.json").body(()).expect("sound");
    let document = client.send(document, true).await.0;
    let mut bodies = Vec::new();
    for response in [unread, document] {
        bodies.push(in_time(response).await.expect("begun").into_body());
    }
    let (status, answer) = read(client.post(CHAT, &long_stream("Read", 500)).await).await.expect("a stream");
    assert!(status == 200 && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    until(&serving.app, "given up", is_done, || {}).await;
    for mut body in bodies {
        // What is read gives the stream no room: nothing more is asked for.
        let end = loop {
            match in_time(body.data()).await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break error.reason(),
                None => panic!("a whole answer"),
            }
        };
        assert_eq!(end, Some(Reason::CANCEL));
    }
    assert_eq!(client.get("/health").await.0, 200, "the connection lives");
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_read_slowly_is_not_given_up() {
    let connections = Connections { write_timeout: Duration::from_secs(2), ..PATIENT };
    let serving = Serving::start(endless(), connections).await;
    let mut client = Client::over(socket(&serving), builder().initial_window_size(600)).await;
    let response = in_time(client.post(CHAT, &long_stream("Hi", 40)).await).await.expect("begun");
    let mut body = response.into_body();
    let (mut all, since) = (Vec::new(), Instant::now());
    while let Some(piece) = in_time(body.data()).await {
        let piece = piece.expect("not given up");
        all.extend_from_slice(&piece);
        tokio::time::sleep(Duration::from_millis(20)).await;
        body.flow_control().release_capacity(piece.len()).expect("released");
    }
    assert!(String::from_utf8(all).expect("text").ends_with("data: [DONE]\n\n"));
    println!("read for {:?}", since.elapsed());
    serving.end().await;
}

// --- clients that leave ---------------------------------------------------------------------------------

/// How a client leaves a request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Leaves {
    ByReset,
    WithItsConnection,
}

/// Where its request is then.
#[derive(Debug, Clone, Copy)]
enum Stage {
    /// Within its body, which is being read.
    Body,
    /// In its client's line, with a part of its body there that nobody reads.
    Line,
    /// In the engine's queue, behind another request.
    Queue,
    /// While its answer is written, which it gets as a whole.
    Whole,
    /// While it reads its answer.
    Stream,
}

async fn comes_and_leaves(serving: &Serving, stage: Stage, leaves: Leaves) {
    let what = format!("{stage:?}, {leaves:?}");
    let (app, control) = (&serving.app, &serving.app.control);
    let steps = control.batches().len();
    let mut allowed = steps + if matches!(stage, Stage::Whole | Stage::Stream) { 12 } else { 0 };
    control.allow(allowed);
    // Others, on a connection of their own, which stay.
    let mut other = Client::connect(serving).await;
    let mut others = Vec::new();
    match stage {
        Stage::Line => {
            for _ in 0..MOST_BODIES {
                others.push(other.begin(CHAT).await);
            }
            until(app, &what, counted("arriving", MOST_BODIES), || {}).await;
        }
        Stage::Queue => {
            let (response, mut body) = other.begin(CHAT).await;
            let two = with(chat(&what), json!({"n": 2, "max_tokens": 3000}));
            body.send_data(two.to_string().into(), true).expect("sent");
            others.push((response, body));
            until(app, &what, |seen| seen["requests"]["running"] != 0, || {}).await;
        }
        Stage::Body | Stage::Whole | Stage::Stream => {}
    }
    let mut client = Client::connect(serving).await;
    let (mut response, mut body) = client.begin(CHAT).await;
    let asked = with(
        chat(&format!("{what}{}", " long".repeat(30))),
        json!({"stream": matches!(stage, Stage::Stream), "max_tokens": 3000}),
    )
    .to_string();
    match stage {
        Stage::Body | Stage::Line => body.send_data(asked[..9].to_owned().into(), false),
        Stage::Queue | Stage::Whole | Stage::Stream => body.send_data(asked.into(), true),
    }
    .expect("sent");
    let mut answer = None;
    match stage {
        Stage::Body => until(app, &what, counted("arriving", 1), || {}).await,
        Stage::Line => until(app, &what, counted("arriving", MOST_BODIES + 1), || {}).await,
        Stage::Queue => until(app, &what, counted("waiting", 1), || {}).await,
        Stage::Whole => {
            let control = control.clone();
            blocking(move || control.submitted(steps + 13)).await;
        }
        Stage::Stream => {
            let mut stream = in_time(&mut response).await.expect("begun").into_body();
            read_to(&mut stream, Some(":\"a\"")).await.expect("text");
            answer = Some(stream);
        }
    }
    match leaves {
        Leaves::ByReset => {
            body.send_reset(Reason::CANCEL);
            drop((response, answer));
        }
        Leaves::WithItsConnection => {
            client.connection.abort();
            drop((response, answer));
        }
    }
    // Step by step, so that an answer for nobody would show.
    let most = allowed + 300;
    let mut step = || {
        allowed = most.min(allowed + 1);
        control.allow(allowed);
    };
    let left = others.len();
    let gone = |seen: &Value| {
        let connections = if leaves == Leaves::ByReset { 2 } else { 1 };
        seen["requests"]["open"] == left
            && seen["requests"]["waiting"] == 0
            && seen["connections"] == connections
    };
    until(app, &what, gone, &mut step).await;
    other.connection.abort();
    drop((client, others));
    until(app, &what, is_done, &mut step).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_leaves_a_stream_leaves_nothing_behind() {
    let serving = Serving::start(endless(), PATIENT).await;
    for stage in [Stage::Body, Stage::Line, Stage::Queue, Stage::Whole, Stage::Stream] {
        for leaves in [Leaves::ByReset, Leaves::WithItsConnection] {
            comes_and_leaves(&serving, stage, leaves).await;
        }
    }
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_reset_is_cancelled_alone() {
    let serving = Serving::start(endless(), PATIENT).await;
    let (app, control) = (&serving.app, &serving.app.control);
    control.allow(0);
    let mut allowed = 0;
    let mut step = || {
        allowed += 1;
        control.allow(allowed);
    };
    let mut client = Client::connect(&serving).await;
    let (one, other) = (
        client.post(CHAT, &long_stream("One", 3000)).await,
        client.post(CHAT, &long_stream("Other", 900)).await,
    );
    until(app, "both run", |seen| seen["requests"]["running"] == 2, &mut step).await;
    (0..12).for_each(|_| step());
    let (mut one, mut other) =
        (in_time(one).await.expect("begun").into_body(), in_time(other).await.expect("begun").into_body());
    let mark = Some(":\"a\"");
    let (begun, too) = tokio::join!(read_to(&mut one, mark), read_to(&mut other, mark));
    drop((begun.expect("text"), too.expect("text")));
    drop(one);
    until(app, "one is reset", |seen| seen["requests"]["open"] == 1, || {}).await;
    until(app, "one is left", |seen| seen["requests"]["running"] == 1, &mut step).await;
    control.release();
    let rest = read_to(&mut other, None).await.expect("the other goes on");
    assert!(rest.ends_with("data: [DONE]\n\n") && !rest.contains("error"), "{rest}");
    until(app, "the end", is_done, || {}).await;
    serving.end().await;
}

// --- the server's end -----------------------------------------------------------------------------------

/// A server that stops when told to, and lets requests take as long as they like then.
async fn stoppable(app: &App) -> (std::net::SocketAddr, tokio::sync::oneshot::Sender<()>, JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = async {
        drop(stopped.await);
        4 * HANG
    };
    let serving = tokio::spawn(api::serve(listener, Arc::clone(&app.server), PATIENT, shutdown));
    (address, stop, serving)
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_under_way_end_before_the_server_does() {
    let app = endless();
    app.control.allow(12);
    let (address, stop, serving) = stoppable(&app).await;
    let socket = tokio::net::TcpStream::connect(address).await.expect("connects");
    let mut client = Client::over(socket, &builder()).await;
    let response = client.post(CHAT, &long_stream("Hi", 200)).await;
    let mut body = in_time(response).await.expect("begun").into_body();
    read_to(&mut body, Some(":\"a\"")).await.expect("text");
    stop.send(()).expect("it runs");
    let told = async {
        while client.streams.clone().ready().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    in_time(told).await;
    app.control.release();
    let rest = read_to(&mut body, None).await.expect("a whole stream");
    assert!(rest.ends_with("data: [DONE]\n\n") && !rest.contains("error"), "{rest}");
    in_time(serving).await.expect("no panic");
    in_time(client.connection).await.expect("no panic").expect("ended in order");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_connects_while_the_server_ends_hears_why() {
    let app = endless();
    app.control.allow(12);
    let (address, stop, serving) = stoppable(&app).await;
    let socket = tokio::net::TcpStream::connect(address).await.expect("connects");
    let mut client = Client::over(socket, &builder()).await;
    let response = client.post(CHAT, &long_stream("Hi", 200)).await;
    let mut body = in_time(response).await.expect("begun").into_body();
    read_to(&mut body, Some(":\"a\"")).await.expect("text");
    let ask = move |method: &'static str, path: &'static str, body: String| {
        blocking(move || {
            let mut late = crate::support::server::connect(address);
            let length = body.len();
            let head =
                format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
            late.write_all([head, body].concat().as_bytes()).expect("sent");
            let mut reply = String::new();
            // To the connection's end, which the server makes.
            late.read_to_string(&mut reply).expect("read");
            reply.to_ascii_lowercase()
        })
    };
    stop.send(()).expect("it runs");
    while !ask("GET", "/health", String::new()).await.contains("connection: close") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let health = ask("GET", "/health", String::new()).await;
    assert!(health.starts_with("http/1.1 503") && health.contains("draining"), "{health}");
    let live = ask("GET", "/live", String::new()).await;
    assert!(live.starts_with("http/1.1 200") && live.contains("connection: close"), "{live}");
    let refused = ask("POST", CHAT, chat("Hi").to_string()).await;
    for part in ["http/1.1 503", "retry-after: ", "connection: close", "shutting_down"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    app.control.release();
    let rest = read_to(&mut body, None).await.expect("a whole stream");
    assert!(rest.ends_with("data: [DONE]\n\n") && !rest.contains("error"), "{rest}");
    in_time(serving).await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_ignores_the_servers_end_does_not_delay_it() {
    let app = app_behind(AccessPolicy::default(), "ok");
    let (address, stop, serving) = stoppable(&app).await;
    let mut idle = crate::support::server::connect(address);
    let idle = blocking(move || {
        idle.write_all(&[hello(), head(END_HEADERS | END_STREAM, 1, None)].concat()).expect("sent");
        wait_for_answer(&mut idle);
        idle
    })
    .await;
    until(&app, "idle", is_done, || {}).await;
    stop.send(()).expect("it runs");
    in_time(serving).await.expect("no panic");
    drop(idle);
}
