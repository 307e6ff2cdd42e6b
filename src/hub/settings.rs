//! Settings for the hub: endpoint, token, certificates and timeouts. The environment variables are the same as for the
//! hub's own tools.
//!
//! The token never appears in a message or in `Debug`; messages name the variable or file that it came from.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

use super::HubError;
use super::url::Url;
use crate::file;

const HUGGING_FACE: &str = "https://huggingface.co";
/// Largest token file; tokens have about 40 characters.
const MAX_TOKEN_BYTES: u64 = 4096;
/// Largest file of certificates; a distribution's bundle has 220 KB.
const MAX_CERTIFICATES_BYTES: u64 = 8 << 20;

#[derive(Debug, Clone)]
pub struct Settings {
    pub(super) endpoint: Url,
    pub(super) token: Option<Token>,
    pub(super) offline: bool,
    pub(super) authorities: RootCerts,
    pub patience: Patience,
}

/// Timeouts, and the number of attempts.
#[derive(Debug, Clone)]
pub struct Patience {
    pub connect: Duration,
    /// Longest time without data from the server.
    pub stall: Duration,
    /// Pause before the second attempt; doubled before each later one.
    pub backoff: Duration,
    /// Most attempts in a row that make no progress.
    pub attempts: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            backoff: Duration::from_secs(1),
            attempts: 5,
        }
    }
}

#[derive(Clone)]
pub(super) struct Token {
    pub value: String,
    /// The variable or file that holds the token, for messages.
    pub origin: String,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(from {})", self.origin)
    }
}

impl Settings {
    /// Reads the settings. `variable` looks up an environment variable. If no variable holds a token, the token file is
    /// read.
    ///
    /// # Errors
    /// Fails if `HF_ENDPOINT` is not a URL, if the token has invalid characters, or if `SSL_CERT_FILE` has no
    /// certificates.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let text = |name: &str| text(&variable, name);
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| HUGGING_FACE.into());
        let endpoint = Url::parse(endpoint.trim_end_matches('/'))
            .map_err(|problem| HubError::Settings(format!("HF_ENDPOINT: {problem}")))?;
        let yes = |name: &str| {
            text(name).is_some_and(|v| matches!(v.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
        };
        Ok(Self {
            endpoint,
            token: token(&variable)?,
            authorities: authorities(&variable)?,
            offline: yes("HF_HUB_OFFLINE") || yes("TRANSFORMERS_OFFLINE"),
            patience: Patience::default(),
        })
    }
}

/// The cache folder that tools of the hub share; `None` if the environment names neither that folder nor a home folder.
pub fn standard_cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let given = path(&variable, "HF_HUB_CACHE").or_else(|| path(&variable, "HUGGINGFACE_HUB_CACHE"));
    given.or_else(|| Some(hugging_face_home(&variable)?.join("hub")))
}

fn hugging_face_home(variable: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    path(variable, "HF_HOME").or_else(|| {
        let cache = path(variable, "XDG_CACHE_HOME").or_else(|| Some(path(variable, "HOME")?.join(".cache")));
        Some(cache?.join("huggingface"))
    })
}

/// The token from the first source that has one, in the same order as the hub's own tools.
fn token(variable: &impl Fn(&str) -> Option<OsString>) -> Result<Option<Token>, HubError> {
    let usable = |value: &str, origin: String| {
        let value = value.trim();
        if value.is_empty() {
            return Ok(None);
        }
        if !value.bytes().all(|b| b.is_ascii_graphic()) {
            let problem =
                "the token has characters that no token can have; copy it again from the hub's settings";
            return Err(HubError::Settings(format!("{origin}: {problem}")));
        }
        Ok(Some(Token { value: value.to_owned(), origin }))
    };
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        let value = text(variable, name).unwrap_or_default();
        if let Some(token) = usable(&value, name.to_owned())? {
            return Ok(Some(token));
        }
    }
    let file = path(variable, "HF_TOKEN_PATH").or_else(|| Some(hugging_face_home(variable)?.join("token")));
    let Some(file) = file else { return Ok(None) };
    match read_small(&file, MAX_TOKEN_BYTES) {
        Ok(None) => Ok(None),
        Ok(Some(value)) => usable(&value, file.display().to_string()),
        Err(error) => Err(HubError::File { action: "read the token in", path: file, error }),
    }
}

/// The trusted certificate authorities: those in `SSL_CERT_FILE`, for proxies that intercept TLS and for private servers,
/// or else Mozilla's list, which is in the binary.
fn authorities(variable: &impl Fn(&str) -> Option<OsString>) -> Result<RootCerts, HubError> {
    let Some(file) = path(variable, "SSL_CERT_FILE") else { return Ok(RootCerts::WebPki) };
    let fail = |problem: &str| HubError::Settings(format!("SSL_CERT_FILE, {}: {problem}", file.display()));
    let text = match read_small(&file, MAX_CERTIFICATES_BYTES) {
        Ok(Some(text)) => text,
        Ok(None) => return Err(fail("there is no such file")),
        Err(error) => return Err(fail(&error.to_string())),
    };
    let certificates: Vec<Certificate<'static>> = parse_pem(text.as_bytes())
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        Err(fail("it has no certificates in PEM format"))
    } else {
        Ok(RootCerts::from(certificates))
    }
}

/// The TLS of a client that sends to `url` alone. The authorities are read only if the URL needs them.
///
/// # Errors
/// Fails if `url` begins with `https:`, and `SSL_CERT_FILE` has no certificates.
pub fn tls(url: &str, variable: impl Fn(&str) -> Option<OsString>) -> Result<TlsConfig, HubError> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    match scheme.eq_ignore_ascii_case("https") {
        true => Ok(TlsConfig::builder().root_certs(authorities(&variable)?).build()),
        false => Ok(TlsConfig::default()),
    }
}

/// Reads a file of at most `max_bytes`; `None` if there is no such file.
fn read_small(path: &Path, max_bytes: u64) -> Result<Option<String>, std::io::Error> {
    use std::io::ErrorKind;
    match file::read_text(path, max_bytes) {
        Ok(text) => Ok(Some(text)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(e),
    }
}

fn text(variable: &impl Fn(&str) -> Option<OsString>, name: &str) -> Option<String> {
    variable(name)?.into_string().ok().map(|v| v.trim().to_owned()).filter(|v| !v.is_empty())
}

/// The path in a variable. A leading `~/` is replaced by the home folder, because service files and quoted shell
/// assignments do not expand it.
fn path(variable: &impl Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    let value = variable(name).filter(|v| !v.is_empty())?;
    match value.to_str().and_then(|v| v.strip_prefix("~/")) {
        Some(rest) => Some(PathBuf::from(variable("HOME")?).join(rest)),
        None => Some(value.into()),
    }
}
