//! A hub of models for tests, which can simulate faults. It uses no network outside this machine.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use futures::StreamExt;
use serde_json::{Value, json};
use sha1::{Digest, Sha1};
use unicorn::hub::{Cache, HubError, Settings, pull};

use crate::support::checkpoints::{hex, sha256};
use crate::support::data;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The fault of the next response that sends bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// The connection closes after this many bytes.
    Cut(usize),
    /// The server sends nothing after this many bytes, and keeps the connection open.
    Stall(usize),
    IgnoreRange,
    Flip,
    Status(u16),
    /// The response claims this content length.
    Length(usize),
}

#[derive(Debug, Clone)]
pub struct Hosted {
    pub path: String,
    pub bytes: Bytes,
    pub lfs: bool,
}

/// A request as the server received it.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
}

/// The contents and the behaviour of the hub.
#[derive(Debug, Default)]
pub struct Behaviour {
    pub repo: String,
    pub commit: String,
    pub files: Vec<Hosted>,
    /// Faults of the responses that send file bytes, in order. The last fault repeats.
    pub faults: VecDeque<Fault>,
    pub gated: bool,
    /// The listing has neither sizes nor checksums.
    pub bare: bool,
    /// Replaces the listing.
    pub listing: Option<String>,
    /// The one valid token. `None` = no token is required.
    pub token: Option<String>,
    /// The hub's redirect has no checksum.
    pub unlinked: bool,
    /// Every file redirects to itself.
    pub circular: bool,
    /// The repository's name before it was renamed.
    pub old_name: String,
    pub seen: Vec<Seen>,
    pub seen_by_cdn: Vec<Seen>,
}

pub type Shared = Arc<Mutex<Behaviour>>;

/// The hub, and the CDN host to which it redirects downloads.
pub struct Hub {
    pub behaviour: Shared,
    pub url: String,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Hub {
    /// A hub with the repository `org/tiny`.
    pub fn start(files: &[(&str, &[u8], bool)]) -> Self {
        let files = files.iter().map(|(path, bytes, lfs)| Hosted {
            path: (*path).to_owned(),
            bytes: Bytes::copy_from_slice(bytes),
            lfs: *lfs,
        });
        let behaviour = Behaviour {
            repo: "org/tiny".into(),
            commit: COMMIT.into(),
            files: files.collect(),
            old_name: "org/old".into(),
            ..Behaviour::default()
        };
        let behaviour = Arc::new(Mutex::new(behaviour));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let cdn = Router::new().fallback(cdn).with_state(Arc::clone(&behaviour));
        let cdn = serve(&runtime, cdn);
        let hub = Router::new().fallback(hub).with_state((Arc::clone(&behaviour), cdn));
        let url = serve(&runtime, hub);
        Self { behaviour, url, runtime: Some(runtime) }
    }

    pub fn set<T>(&self, change: impl FnOnce(&mut Behaviour) -> T) -> T {
        change(&mut self.behaviour.lock().expect("not poisoned"))
    }

    pub fn fault(&self, faults: &[Fault]) {
        self.set(|b| b.faults = faults.iter().copied().collect());
    }

    /// The requests to the CDN since the last call.
    pub fn cdn_requests(&self) -> Vec<Seen> {
        self.set(|b| std::mem::take(&mut b.seen_by_cdn))
    }

    pub fn hub_requests(&self) -> Vec<Seen> {
        self.set(|b| std::mem::take(&mut b.seen))
    }

    /// The settings for this hub with more variables of the environment.
    pub fn settings(&self, variables: &[(&str, &str)]) -> Settings {
        let variable = |name: &str| -> Option<OsString> {
            let own = [("HF_ENDPOINT", self.url.as_str())];
            variables.iter().chain(&own).find(|(n, _)| *n == name).map(|(_, v)| v.into())
        };
        let mut settings = Settings::from_environment(variable).expect("valid settings");
        settings.patience.backoff = Duration::from_millis(1);
        settings.patience.attempts = 3;
        settings
    }

    /// The address of a TLS proxy for this hub, and the certificate that clients must trust.
    pub fn with_tls(&self) -> (String, String) {
        let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der());
        let config =
            rustls::ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_no_client_auth()
                .with_single_cert(vec![signed.cert.der().clone()], key.into())
                .map(Arc::new)
                .expect("a valid configuration");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("https://{}", listener.local_addr().expect("bound"));
        let plain = self.url.trim_start_matches("http://").to_owned();
        // The thread runs until the process ends. No client connects after the test.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let session = rustls::ServerConnection::new(Arc::clone(&config)).expect("a session");
                // A client that does not trust the certificate closes the connection.
                let _ = forward(rustls::StreamOwned::new(session, stream.expect("a connection")), &plain);
            }
        });
        (url, signed.cert.pem())
    }

    pub fn pull(&self, cache: &Cache, name: &str) -> Result<PathBuf, HubError> {
        pull_with(&self.settings(&[]), cache, name)
    }

    /// Pulls the one file of this hub, and checks its bytes.
    #[track_caller]
    pub fn pull_file(&self, cache: &Cache, bytes: &[u8]) {
        let path = self.pull(cache, "org/tiny").expect("pulled");
        assert_eq!(fs::read(path).unwrap(), bytes);
    }
}

pub fn pull_with(settings: &Settings, cache: &Cache, text: &str) -> Result<PathBuf, HubError> {
    pull(settings, cache, &text.parse().expect(text), &mut |_| true)
}

impl Drop for Hub {
    fn drop(&mut self) {
        // Do not wait for a connection that stalls on purpose.
        self.runtime.take().expect("there until now").shutdown_background();
    }
}

/// Forwards one request to the server at `plain`, and its response to the client.
fn forward(mut client: impl Read + Write, plain: &str) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    head.truncate(head.len() - 2);
    let mut server = TcpStream::connect(plain)?;
    server.write_all(&head)?;
    server.write_all(b"connection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer)?;
    client.write_all(&answer)?;
    client.flush()
}

fn serve(runtime: &tokio::runtime::Runtime, router: Router) -> String {
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    runtime.spawn(async move { axum::serve(listener, router).await });
    url
}

pub fn git_sha1(bytes: &[u8]) -> String {
    hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

fn seen(request: &Request) -> Seen {
    let header = |name: &str| request.headers().get(name).map(|v| v.to_str().expect("text").to_owned());
    Seen {
        method: request.method().to_string(),
        path: request.uri().to_string(),
        authorization: header("authorization"),
        range: header("range"),
    }
}

fn answer(status: u16, headers: &[(&str, &str)], body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    response.body(body.into()).expect("a response")
}

async fn hub(State((behaviour, cdn)): State<(Shared, String)>, request: Request) -> Response<Body> {
    let mut b = behaviour.lock().expect("not poisoned");
    let asked = seen(&request);
    b.seen.push(asked.clone());
    let path = request.uri().path();
    if b.token.is_some() && asked.authorization != b.token.as_ref().map(|t| format!("Bearer {t}")) {
        let message = "Invalid credentials in Authorization header";
        return answer(401, &[("x-error-message", message)], "{}");
    }
    if path.contains(&b.old_name) {
        return answer(307, &[("location", &asked.path.replace(&b.old_name, &b.repo))], "");
    }
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{}/revision/", b.repo)) {
        if let Some(listing) = &b.listing {
            return answer(200, &[], listing.clone());
        }
        if ![&b.commit, "main", "v1"].contains(&revision) {
            return answer(404, &[("x-error-code", "RevisionNotFound")], "{}");
        }
        return answer(200, &[], listing(&b).to_string());
    }
    let resolve = format!("/{}/resolve/{}/", b.repo, b.commit);
    let Some(file) = path.strip_prefix(&resolve) else {
        let code = if path.starts_with("/api/") { "RepoNotFound" } else { "EntryNotFound" };
        return answer(if path.starts_with("/api/") { 401 } else { 404 }, &[("x-error-code", code)], "{}");
    };
    if b.circular {
        return answer(302, &[("location", path)], "");
    }
    if b.gated {
        let status = if asked.authorization.is_some() { 403 } else { 401 };
        return answer(
            status,
            &[("x-error-code", "GatedRepo"), ("x-error-message", "Access is restricted.")],
            "",
        );
    }
    let Some(hosted) = b.files.iter().find(|f| f.path == file).cloned() else {
        return answer(404, &[("x-error-code", "EntryNotFound")], "{}");
    };
    if !hosted.lfs {
        let etag = format!("\"{}\"", git_sha1(&hosted.bytes));
        return content(&mut b, &hosted, request.headers(), &etag);
    }
    let (etag, size) = (format!("\"{}\"", sha256(&hosted.bytes)), hosted.bytes.len().to_string());
    let location = format!("{cdn}/signed/{file}?Signature=secret");
    let mut headers = vec![("location", location.as_str())];
    if !b.unlinked {
        headers.extend([
            ("x-linked-etag", etag.as_str()),
            ("x-linked-size", &size),
            ("x-repo-commit", &b.commit),
        ]);
    }
    answer(302, &headers, "")
}

async fn cdn(State(behaviour): State<Shared>, request: Request) -> Response<Body> {
    let mut b = behaviour.lock().expect("not poisoned");
    b.seen_by_cdn.push(seen(&request));
    let file = request.uri().path().trim_start_matches("/signed/");
    let hosted = b.files.iter().find(|f| f.path == file).cloned().expect("the hub knows what it links to");
    // The CDN's etag looks like a checksum, but is not the checksum of the file.
    let etag = format!("\"{}\"", sha256(b"the CDN's own"));
    content(&mut b, &hosted, request.headers(), &etag)
}

/// The bytes of a file, with the next fault.
fn content(b: &mut Behaviour, hosted: &Hosted, headers: &HeaderMap, etag: &str) -> Response<Body> {
    let fault = if b.faults.len() > 1 { b.faults.pop_front() } else { b.faults.front().copied() };
    if let Some(Fault::Status(status)) = fault {
        return answer(status, &[], "broken");
    }
    let mut bytes = hosted.bytes.to_vec();
    if fault == Some(Fault::Flip) {
        *bytes.last_mut().expect("some bytes") ^= 1;
    }
    let total = bytes.len();
    let range = headers.get("range").filter(|_| fault != Some(Fault::IgnoreRange));
    let start: usize = range.map_or(0, |range| {
        let range = range.to_str().expect("text").trim_start_matches("bytes=").trim_end_matches('-');
        range.parse().expect("an offset")
    });
    if start >= total && start > 0 {
        return answer(416, &[], "");
    }
    let rest = Bytes::from(bytes.split_off(start));
    let length = match fault {
        Some(Fault::Length(length)) => length,
        _ => rest.len(),
    };
    let mut response = Response::builder().header("etag", etag).header("content-length", length);
    if range.is_some() {
        let range = format!("bytes {start}-{}/{total}", total - 1);
        response = response.status(StatusCode::PARTIAL_CONTENT).header("content-range", range);
    }
    let body = match fault {
        Some(Fault::Cut(after)) if after < rest.len() => {
            let part = rest.slice(..after);
            // The pause lets the server send the bytes before the error.
            let end = futures::stream::once(async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Err(io::Error::from(io::ErrorKind::ConnectionReset))
            });
            Body::from_stream(futures::stream::iter([Ok(part)]).chain(end))
        }
        Some(Fault::Stall(after)) => {
            let part: Result<Bytes, io::Error> = Ok(rest.slice(..after.min(rest.len())));
            Body::from_stream(futures::stream::iter([part]).chain(futures::stream::pending()))
        }
        Some(Fault::Length(length)) => Body::from(rest.slice(..length.min(rest.len()))),
        _ => Body::from(rest),
    };
    response.body(body).expect("a response")
}

fn listing(b: &Behaviour) -> Value {
    let siblings = b.files.iter().map(|f| {
        if b.bare {
            return json!({"rfilename": f.path});
        }
        let lfs =
            f.lfs.then(|| json!({"sha256": sha256(&f.bytes), "size": f.bytes.len(), "pointerSize": 130}));
        // The Git checksum of a file in large-file storage is the checksum of its pointer file.
        let blob = git_sha1(if f.lfs { b"version https://git-lfs" } else { &f.bytes });
        json!({"rfilename": f.path, "size": f.bytes.len(), "blobId": blob, "lfs": lfs})
    });
    json!({"id": b.repo, "sha": b.commit, "gated": b.gated, "siblings": siblings.collect::<Vec<_>>()})
}

/// The files of a tiny Gemma, as a repository has them.
pub fn tiny_gemma() -> Hub {
    let read = |path: &str| fs::read(data(path)).expect(path);
    Hub::start(&[
        ("config.json", &read("gemma3/tiny-a/config.json"), false),
        ("generation_config.json", &read("gemma3/tiny-a/generation_config.json"), false),
        ("tokenizer_config.json", &read("tokenizer-mini/tokenizer_config.json"), false),
        ("tokenizer.json", &read("tokenizer-mini/tokenizer.json"), true),
        ("model.safetensors", &read("gemma3/tiny-a/model.safetensors"), true),
    ])
}

/// Gives a command its own home folder, and this hub. No server listens where it looks for one.
pub fn at_home(command: &mut Command, home: &Path, hub: &Hub) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        let of_others = ["HF_", "HUGGING", "TRANSFORMERS_", "XDG_CACHE"];
        if of_others.iter().any(|o| name.starts_with(o)) || name.to_ascii_uppercase().ends_with("_PROXY") {
            command.env_remove(&*name);
        }
    }
    command.env("HOME", home).env("HF_ENDPOINT", &hub.url).env("UNICORN_SERVER_PORT", "9");
}
