//! The part of the hub's HTTP API that pulling needs: list a repository, describe a file, read a file from an offset.
//!
//! This module follows redirects itself instead of the HTTP library, because each hop matters. The token is sent to the
//! endpoint's own origin only. The checksum is a header of the hub's redirect; the `ETag` of the CDN that it redirects
//! to looks similar but has another value.
//!
//! The number of redirects, the bytes read into memory, and every wait ([`Patience`](super::Patience)) are bounded.

use std::fmt;
use std::io::{self, Read};
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{HeaderMap, Method, Request, Response, StatusCode};
use ureq::tls::TlsConfig;
use ureq::{Agent, Body};

use super::HubError;
use super::name::{ModelName, RepoId, is_commit};
use super::settings::Settings;
use super::url::{Url, encode, encode_path};

const MAX_REDIRECTS: usize = 5;
/// Largest listing; a repository of 50,000 files fits.
const MAX_LISTING_BYTES: u64 = 16 << 20;
/// Longest excerpt of a server's error message, in characters.
const MAX_MESSAGE: usize = 200;
/// The longest `Retry-After` pause that is accepted.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// The expected hash of a file, in lower-case hexadecimal. It is also used as a file name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Checksum {
    /// SHA-256 of the bytes, for files in large-file storage (LFS).
    Sha256(String),
    /// Hash of the git object, for files in the repository itself.
    Git(String),
}

impl Checksum {
    /// Parses a checksum of the listing, or an `ETag`.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix("W/").unwrap_or(text).trim_matches('"').to_ascii_lowercase();
        let hex = text.bytes().all(|b| b.is_ascii_hexdigit());
        match text.len() {
            64 if hex => Some(Self::Sha256(text)),
            40 if hex => Some(Self::Git(text)),
            _ => None,
        }
    }

    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }
}

/// Writes the checksum as `ALGORITHM:HEX`.
impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = match self {
            Self::Sha256(_) => "sha256",
            Self::Git(_) => "git",
        };
        write!(f, "{algorithm}:{}", self.hex())
    }
}

#[derive(Debug)]
pub(super) struct Listing {
    /// The commit that the revision refers to now.
    pub commit: String,
    pub files: Vec<Listed>,
}

#[derive(Debug)]
pub(super) struct Listed {
    /// The path as the server sent it, not checked yet.
    pub path: String,
    pub size: Option<u64>,
    pub checksum: Option<Checksum>,
}

/// A file's bytes from `start` to the end.
pub(super) struct Content {
    /// The requested offset, or 0 if the server does not support ranges.
    pub start: u64,
    pub body: Box<dyn Read>,
}

/// An error, and whether to retry.
#[derive(Debug)]
pub(super) enum Failure {
    Permanent(HubError),
    /// A retry may succeed, after at least this long.
    Transient(HubError, Duration),
}

impl Failure {
    pub fn transient(error: HubError) -> Self {
        Self::Transient(error, Duration::ZERO)
    }
}

pub(super) struct Client<'a> {
    settings: &'a Settings,
    agent: Agent,
    /// The agent for addresses on this machine, which uses no proxy.
    direct: Agent,
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a Settings) -> Self {
        let patience = &settings.patience;
        let tls = TlsConfig::builder().root_certs(settings.authorities.clone()).build();
        let config = || {
            Agent::config_builder()
                .user_agent(concat!("unicorn/", env!("CARGO_PKG_VERSION")))
                .tls_config(tls.clone())
                .http_status_as_error(false)
                .max_redirects(0)
                .timeout_resolve(Some(patience.connect))
                .timeout_connect(Some(patience.connect))
                .timeout_recv_response(Some(patience.stall))
                .timeout_per_read(Some(patience.stall))
                .timeout_per_write(Some(patience.stall))
        };
        let direct = config().proxy(None).build().new_agent();
        Self { settings, agent: config().build().new_agent(), direct }
    }

    /// Lists the files of a revision.
    pub fn list(&self, name: &ModelName) -> Result<Listing, HubError> {
        let (repo, revision) = (&name.repo, name.revision());
        let path =
            format!("api/models/{}/revision/{}?blobs=true", encode_path(repo.as_str()), encode(revision));
        let url = self.settings.endpoint.join(&path);
        let text = self.with_retries(|| {
            let (response, _) = self.send(&Method::GET, &url, None, |_| false)?;
            let response = self.expect_success(response, true, name, "")?;
            let mut text = Vec::new();
            let mut body = response.into_body().into_reader().take(MAX_LISTING_BYTES + 1);
            body.read_to_end(&mut text).map_err(|e| Failure::transient(self.unreachable(&e.to_string())))?;
            Ok(text)
        })?;
        let fail = |problem: String| HubError::Answer { what: format!("{}: {name}", url.shown()), problem };
        if text.len() as u64 > MAX_LISTING_BYTES {
            return Err(fail(format!("the listing has more than {MAX_LISTING_BYTES} bytes")));
        }
        parse_listing(&text).map_err(fail)
    }

    /// Requests the size and checksum of a file, if the listing does not give them.
    pub fn describe(&self, name: &ModelName, commit: &str, file: &str) -> Result<(u64, Checksum), HubError> {
        let url = self.file_url(&name.repo, commit, file);
        self.with_retries(|| {
            // The hub's answer describes the file, and is usually a redirect. The target of the redirect is the CDN.
            let described = |headers: &HeaderMap| headers.contains_key("x-linked-etag");
            let (response, at) = self.send(&Method::HEAD, &url, None, described)?;
            let headers = response.headers();
            let linked = described(headers);
            let trusted =
                linked || at.same_origin(&self.settings.endpoint) || headers.contains_key("x-repo-commit");
            let (etag, size) =
                if linked { ("x-linked-etag", "x-linked-size") } else { ("etag", "content-length") };
            let checksum = text(headers, etag).and_then(Checksum::parse).filter(|_| trusted);
            let size = text(headers, size).and_then(|s| s.parse().ok());
            if !response.status().is_redirection() {
                self.expect_success(response, at.same_origin(&self.settings.endpoint), name, file)?;
            }
            let fail = |problem: &str| {
                let what = format!("{}: {file}", at.shown());
                Failure::Permanent(HubError::Answer { what, problem: problem.into() })
            };
            let checksum = checksum.ok_or_else(|| {
                fail("the server gives no SHA-256 or git checksum, and files without a checksum are refused")
            })?;
            Ok((size.ok_or_else(|| fail("the server does not give its size"))?, checksum))
        })
    }

    /// Requests the file's bytes from `offset` to the end. `size` is the file's size.
    pub fn open(
        &self,
        name: &ModelName,
        commit: &str,
        file: &str,
        offset: u64,
        size: u64,
    ) -> Result<Content, Failure> {
        let url = self.file_url(&name.repo, commit, file);
        let range = (offset > 0).then_some(offset);
        let (response, at) = self.send(&Method::GET, &url, range, |_| false)?;
        let response = self.expect_success(response, at.same_origin(&self.settings.endpoint), name, file)?;
        let fail = |problem: String| {
            Failure::Permanent(HubError::Answer { what: format!("{}: {file}", at.shown()), problem })
        };
        let headers = response.headers();
        let (start, total) = if response.status() == StatusCode::PARTIAL_CONTENT {
            let range = text(headers, "content-range").unwrap_or_default();
            let Some((start, total)) = content_range(range) else {
                return Err(fail(format!(
                    "the server sends a part of the file with the invalid range {range:?}"
                )));
            };
            if start != offset {
                return Err(fail(format!("the server sends the file from byte {start}, expected {offset}")));
            }
            (start, total)
        } else {
            (0, text(headers, "content-length").and_then(|s| s.parse().ok()))
        };
        if let Some(total) = total.filter(|total| *total != size) {
            return Err(fail(format!("the server sends a file of {total} bytes, but the hub lists {size}")));
        }
        Ok(Content { start, body: Box::new(response.into_body().into_reader().take(size - start)) })
    }

    /// Runs `attempt`, and retries it after a [`Failure::Transient`] while attempts are left.
    fn with_retries<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, HubError> {
        let mut tries = 1;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(Failure::Permanent(error)) => return Err(error),
                Err(Failure::Transient(error, _)) if tries >= self.settings.patience.attempts => {
                    return Err(error);
                }
                Err(Failure::Transient(error, at_least)) => {
                    self.pause(tries, at_least, &error);
                    tries += 1;
                }
            }
        }
    }

    /// Waits before attempt `tries + 1`.
    pub fn pause(&self, tries: u32, at_least: Duration, error: &HubError) {
        let backoff = self.settings.patience.backoff * 2u32.pow((tries - 1).min(5));
        let pause = backoff.max(at_least);
        tracing::debug!("{error}: trying again in {} ms", pause.as_millis());
        std::thread::sleep(pause);
    }

    fn file_url(&self, repo: &RepoId, commit: &str, file: &str) -> Url {
        let path = format!("{}/resolve/{}/{}", encode_path(repo.as_str()), encode(commit), encode_path(file));
        self.settings.endpoint.join(&path)
    }

    /// Sends a request and follows redirects. Returns the first answer that is not a redirect or that `enough` accepts,
    /// and its URL.
    fn send(
        &self,
        method: &Method,
        url: &Url,
        offset: Option<u64>,
        enough: impl Fn(&HeaderMap) -> bool,
    ) -> Result<(Response<Body>, Url), Failure> {
        let mut url = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let agent = if url.is_local() { &self.direct } else { &self.agent };
            // No compression: an offset counts bytes of the file itself.
            let mut request =
                Request::builder().method(method).uri(url.full()).header("accept-encoding", "identity");
            if let Some(token) = &self.settings.token
                && url.same_origin(&self.settings.endpoint)
            {
                request = request.header("authorization", format!("Bearer {}", token.value));
            }
            if let Some(offset) = offset {
                request = request.header("range", format!("bytes={offset}-"));
            }
            let response = request.body(()).map_err(ureq::Error::from).and_then(|request| agent.run(request));
            let response = response.map_err(|e| self.transport(&e, &url))?;
            let headers = response.headers();
            let location = text(headers, "location").filter(|_| response.status().is_redirection());
            let Some(location) = location.filter(|_| !enough(headers)) else { return Ok((response, url)) };
            url = url.redirected(location).map_err(|problem| {
                let problem = format!("the server redirects to a URL that is not followed: {problem}");
                Failure::Permanent(HubError::Answer { what: url.shown(), problem })
            })?;
        }
        let problem = format!("the server redirects more than {MAX_REDIRECTS} times");
        Err(Failure::Permanent(HubError::Answer { what: url.shown(), problem }))
    }

    /// Turns a status other than success into an error. `by_hub` says that the endpoint itself answered, not the target
    /// of a redirect.
    fn expect_success(
        &self,
        response: Response<Body>,
        by_hub: bool,
        name: &ModelName,
        file: &str,
    ) -> Result<Response<Body>, Failure> {
        let status = response.status();
        if matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
            return Ok(response);
        }
        let error = self.status_error(status, response.headers(), by_hub, name, file);
        let transient = status.is_server_error()
            || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
            // The local part does not belong to this file, so the caller downloads the file from the start.
            || status == StatusCode::RANGE_NOT_SATISFIABLE
            // A signed URL has expired; the hub gives a new one.
            || (!by_hub && status == StatusCode::FORBIDDEN);
        if !transient {
            return Err(Failure::Permanent(error));
        }
        let seconds = text(response.headers(), "retry-after").and_then(|s| s.parse().ok()).unwrap_or(0);
        Err(Failure::Transient(error, Duration::from_secs(seconds).min(MAX_RETRY_AFTER)))
    }

    fn status_error(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        by_hub: bool,
        name: &ModelName,
        file: &str,
    ) -> HubError {
        let repo = name.repo.clone();
        let endpoint = self.settings.endpoint.full();
        let code = text(headers, "x-error-code").unwrap_or_default();
        let message = shown(text(headers, "x-error-message").unwrap_or_default());
        let token = self.settings.token.as_ref();
        let bad_token = message.contains("Invalid credentials");
        match (status.as_u16(), code, token) {
            (401, _, Some(token)) if by_hub && (bad_token || code.is_empty()) => {
                HubError::WrongToken { endpoint, origin: token.origin.clone() }
            }
            (401 | 403, "GatedRepo", token) => {
                let then = match token {
                    None => {
                        "then give a token of that account: `HF_TOKEN=hf_... unicorn pull` or `hf auth login`"
                            .into()
                    }
                    Some(token) => format!("with the account that owns the token from {}", token.origin),
                };
                let url = self.settings.endpoint.join(repo.as_str()).full();
                HubError::Gated { repo, url, then }
            }
            (_, "RevisionNotFound", _) => HubError::NoRevision { repo, revision: name.revision().to_owned() },
            (_, "EntryNotFound", _) => HubError::NoFile { repo, file: file.to_owned() },
            (401, _, None) | (404, "RepoNotFound", _) | (401, "RepoNotFound", _) if by_hub => {
                let hint =
                    if token.is_none() { ", and give a token if it is private (HF_TOKEN)" } else { "" };
                HubError::NoRepository { repo, endpoint, hint }
            }
            (403, ..) if by_hub => HubError::Forbidden { repo, endpoint, message },
            (status, ..) => {
                let what = if file.is_empty() { name.to_string() } else { format!("{repo}: {file}") };
                let message = if message.is_empty() { message } else { format!(": {message}") };
                HubError::Status { what, status, message }
            }
        }
    }

    fn transport(&self, error: &ureq::Error, url: &Url) -> Failure {
        let problem = match error {
            ureq::Error::HostNotFound => format!("there is no host {}", url.origin()),
            ureq::Error::Timeout(_) => format!("{} does not answer in time", url.origin()),
            other => shown(&other.to_string()),
        };
        let unreachable = self.unreachable(&problem);
        let transient = match error {
            ureq::Error::Timeout(_) | ureq::Error::Protocol(_) => true,
            ureq::Error::Io(e) => {
                use io::ErrorKind::{
                    BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof,
                };
                matches!(
                    e.kind(),
                    BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof
                )
            }
            // Retries do not help with an unknown host name, a closed port or an invalid certificate.
            _ => false,
        };
        if transient { Failure::transient(unreachable) } else { Failure::Permanent(unreachable) }
    }

    pub fn unreachable(&self, problem: &str) -> HubError {
        HubError::Unreachable { endpoint: self.settings.endpoint.full(), problem: problem.to_owned() }
    }
}

fn parse_listing(text: &[u8]) -> Result<Listing, String> {
    #[derive(Deserialize)]
    struct Model {
        sha: String,
        #[serde(default)]
        siblings: Vec<Sibling>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Sibling {
        rfilename: String,
        size: Option<u64>,
        blob_id: Option<String>,
        lfs: Option<Lfs>,
    }
    #[derive(Deserialize)]
    struct Lfs {
        sha256: Option<String>,
        size: Option<u64>,
    }
    let model: Model = serde_json::from_slice(text)
        .map_err(|e| format!("the answer is not a model listing of the hub: {e}"))?;
    if !is_commit(&model.sha) {
        return Err(format!(
            "the listing is of commit {:?}; expected 40 hexadecimal digits",
            shown(&model.sha)
        ));
    }
    let files = model.siblings.into_iter().map(|s| {
        let (checksum, size) = match s.lfs {
            // For a file in large-file storage, the git blob is only a pointer to the file.
            Some(lfs) => (lfs.sha256, lfs.size.or(s.size)),
            None => (s.blob_id, s.size),
        };
        Listed { path: s.rfilename, size, checksum: checksum.as_deref().and_then(Checksum::parse) }
    });
    Ok(Listing { commit: model.sha, files: files.collect() })
}

/// Parses a `Content-Range`: `bytes 10-19/20` is (10, 20).
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some((start.trim().parse().ok()?, total))
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// A server's message without control characters, cut to [`MAX_MESSAGE`] characters.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE).collect()
}
