//! A client of a running server. It uses Ollama's routes, so that it can ask other servers too.
//!
//! A request blocks its thread. Waits for a connection and the lengths of answers are bounded; the wait for an answer is not,
//! because a load may take minutes.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _};
use std::time::Duration;

use serde_json::Value;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE};
use ureq::http::{Method, Request, Response};
use ureq::{Agent, Body};

use crate::cli::error::Error;
use crate::cli::log::note;
use crate::config::Config;
use crate::hub::tls;

const CONNECT: Duration = Duration::from_secs(5);
/// Longest wait for the answer to the first question, which needs no model.
const PROBE: Duration = Duration::from_secs(20);
/// Longest answer that is not a stream, longest line of a stream, and longest stream.
const MAX_BODY_BYTES: u64 = 16 << 20;
const MAX_LINE_BYTES: u64 = 1 << 20;
const MAX_STREAM_BYTES: u64 = 1 << 30;
/// The variable with the key for the server.
pub const KEY_VARIABLE: &str = "UNICORN_API_KEY";

/// What a probe found instead of a server.
enum Probe {
    /// Nothing listens.
    Nothing(Error),
    Another(Error),
    Refused(Error),
}

/// A running server.
#[derive(Clone)]
pub struct Client {
    agent: Agent,
    /// Without a slash at its end.
    url: String,
    key: Option<String>,
}

impl Client {
    /// The server at `url`, or at the address of the configuration. `None` = no server listens there.
    ///
    /// # Errors
    /// Fails if no server listens at a given `url`, or if a program that is not such a server does.
    pub fn find(config: &Config, url: Option<&str>) -> Result<Option<Self>, Error> {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .user_agent(concat!("unicorn/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT));
        let given = url.map(|url| {
            let url = url.trim_end_matches('/').trim_end_matches("/v1");
            if url.contains("://") { url.to_owned() } else { format!("http://{url}") }
        });
        let url = given.clone().unwrap_or_else(|| configured(config));
        let agent = agent.tls_config(tls(&url, |name| std::env::var_os(name))?);
        let key = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
        let client = Self { agent: agent.build().into(), url, key };
        match client.probe() {
            Ok(()) => Ok(Some(client)),
            Err(Probe::Nothing(error)) => match given {
                Some(_) => Err(error),
                None => Ok(None),
            },
            Err(Probe::Another(error)) => match given {
                Some(_) => Err(error),
                None => {
                    note(format_args!("{error}: it is not asked"));
                    Ok(None)
                }
            },
            Err(Probe::Refused(error)) => Err(error),
        }
    }

    /// Asks whether a server with Ollama's API listens.
    fn probe(&self) -> Result<(), Probe> {
        let request = Request::builder().uri(format!("{}/api/version", self.url)).body(());
        let request =
            request.map_err(|error| Probe::Refused(Error::Argument(format!("{}: {error}", self.url))))?;
        let request = self.agent.configure_request(request).timeout_global(Some(PROBE)).build();
        let mut response = match self.agent.run(request) {
            Ok(response) => response,
            Err(ureq::Error::Io(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                return Err(Probe::Nothing(self.failed(error.to_string())));
            }
            Err(error) => {
                let mut problem = error.to_string();
                if problem.contains("certificate") {
                    problem += "; SSL_CERT_FILE names a file of the authorities to trust, and --url has the name in the certificate";
                }
                return Err(Probe::Refused(self.failed(problem)));
            }
        };
        let body = response.body_mut().with_config().limit(MAX_LINE_BYTES).read_to_vec().unwrap_or_default();
        let value: Option<Value> = serde_json::from_slice(&body).ok();
        match value {
            Some(value) if value["version"].is_string() || value["error"].is_string() => Ok(()),
            _ => Err(Probe::Another(self.failed(match self.url.strip_prefix("http://") {
                // This project's server and others name the protocol in their answer to a plain request.
                Some(address)
                    if response.status() == 400 && String::from_utf8_lossy(&body).contains("HTTPS") =>
                {
                    format!("it speaks HTTPS: give its address as --url https://{address}")
                }
                _ => "another program answers there".into(),
            }))),
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn get(&self, path: &str) -> Result<Value, Error> {
        self.whole(self.send(&Method::GET, path, None)?)
    }

    /// Sends a body, and reads an answer that is not a stream.
    pub fn ask(&self, method: &Method, path: &str, body: &Value) -> Result<Value, Error> {
        self.whole(self.send(method, path, Some(body))?)
    }

    /// Sends a body, and calls `on_line` for each line of the answer until it returns false.
    pub fn stream(
        &self,
        path: &str,
        body: &Value,
        mut on_line: impl FnMut(Value) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let response = self.send(&Method::POST, path, Some(body))?;
        let mut stream =
            BufReader::new(response.into_body().into_with_config().limit(MAX_STREAM_BYTES).reader());
        loop {
            let mut line = Vec::new();
            let read = (&mut stream).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
            read.map_err(|error| self.failed(format!("the answer broke off: {error}")))?;
            if line.is_empty() {
                return Ok(());
            }
            let value: Value = serde_json::from_slice(&line).map_err(|_| self.foreign(&line))?;
            if let Some(problem) = value["error"].as_str() {
                let (url, problem) = (self.url.clone(), problem.to_owned());
                return Err(Error::Remote { url, status: Some(200), problem });
            }
            if !on_line(value)? {
                return Ok(());
            }
        }
    }

    /// An error of the server, which has no status.
    pub fn failed(&self, problem: String) -> Error {
        Error::Remote { url: self.url.clone(), status: None, problem }
    }

    fn foreign(&self, bytes: &[u8]) -> Error {
        const SHOWN: usize = 80;
        let text = String::from_utf8_lossy(bytes);
        let shown: String = text.trim().chars().take(SHOWN).collect();
        let problem = format!("it does not answer in Ollama's format, but {shown:?}");
        Error::Remote { url: self.url.clone(), status: Some(200), problem }
    }

    /// Sends a request. A refusal is an error with the server's words.
    fn send(&self, method: &Method, path: &str, body: Option<&Value>) -> Result<Response<Body>, Error> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let wrong = |error: ureq::http::Error| Error::Argument(format!("--url {}: {error}", self.url));
        let sent = match body {
            Some(body) => {
                let request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
                self.agent.run(request.map_err(wrong)?)
            }
            None => self.agent.run(request.body(()).map_err(wrong)?),
        };
        let mut response = sent.map_err(|error| self.failed(error.to_string()))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_vec().unwrap_or_default();
        let words = serde_json::from_slice::<Value>(&body).ok();
        let words = words.as_ref().and_then(|body| {
            body["error"].as_str().or_else(|| body["error"]["message"].as_str()).map(str::to_owned)
        });
        let mut problem = words.unwrap_or_else(|| format!("it answered with {status}"));
        if status == 401 {
            problem += &format!(" (set {KEY_VARIABLE} to a key of the server)");
        }
        Err(Error::Remote { url: self.url.clone(), status: Some(status.as_u16()), problem })
    }

    fn whole(&self, mut response: Response<Body>) -> Result<Value, Error> {
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES).read_to_vec();
        let body = body.map_err(|error| self.failed(error.to_string()))?;
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).map_err(|_| self.foreign(&body))
    }
}

/// The address of the configured server.
fn configured(config: &Config) -> String {
    let scheme = if config.server.tls_cert.is_some() { "https" } else { "http" };
    let host = match config.server.host.as_str() {
        "0.0.0.0" => "127.0.0.1",
        "::" => "::1",
        host => host,
    };
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    format!("{scheme}://{host}:{}", config.server.port)
}
