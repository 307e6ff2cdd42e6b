//! The page at `/`: a chat and the server's status, for a browser. Its files are part of the binary, and it requests
//! nothing from any other server.
//!
//! The page's files are public, so they need no key; the page's requests to the API do. A content security policy
//! allows scripts and styles from the page's own files only, and images from these or from `data:` URIs, which are the
//! pictures of the user's messages. It forbids every other origin, frames around the page, and
//! turning text into markup: what a model writes cannot become script.

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

/// What a program gets instead of the page. Clients of Ollama compare the words.
const RUNNING: &str = "Ollama is running";

/// Each file's name below `/page/`, its content type, and its content.
const FILES: [(&str, &str, &str); 17] = [
    ("style.css", STYLE, include_str!("style.css")),
    ("icon.svg", SVG, include_str!("icon.svg")),
    ("app.js", SCRIPT, include_str!("app.js")),
    ("api.js", SCRIPT, include_str!("api.js")),
    ("chat.js", SCRIPT, include_str!("chat.js")),
    ("conversations.js", SCRIPT, include_str!("conversations.js")),
    ("export.js", SCRIPT, include_str!("export.js")),
    ("list.js", SCRIPT, include_str!("list.js")),
    ("markdown.js", SCRIPT, include_str!("markdown.js")),
    ("math.js", SCRIPT, include_str!("math.js")),
    ("notice.js", SCRIPT, include_str!("notice.js")),
    ("pictures.js", SCRIPT, include_str!("pictures.js")),
    ("status.js", SCRIPT, include_str!("status.js")),
    ("store.js", SCRIPT, include_str!("store.js")),
    ("libraries.js", SCRIPT, include_str!("libraries/libraries.js")),
    ("libraries.css", STYLE, include_str!("libraries/libraries.css")),
    ("licences.txt", TEXT, include_str!("libraries/licences.txt")),
];

/// Trusted types, where a browser supports them, make every way from text to markup an error.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
);

pub(in crate::api) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let index = async |headers: HeaderMap| {
        let accepts = |value: &HeaderValue| value.to_str().is_ok_and(|kinds| kinds.contains("text/html"));
        let mut response = match headers.get_all(header::ACCEPT).iter().any(accepts) {
            true => file(&headers, HTML, include_str!("index.html")),
            false => RUNNING.into_response(),
        };
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
        response
    };
    FILES.iter().fold(Router::new().route("/", get(index)), |router, &(name, kind, content)| {
        let handler = async move |headers: HeaderMap| file(&headers, kind, content);
        router.route(&format!("/page/{name}"), get(handler))
    })
}

/// Whether a path is the page or one of its files.
pub(in crate::api) fn has(path: &str) -> bool {
    path == "/" || path.strip_prefix("/page/").is_some_and(|name| FILES.iter().any(|file| file.0 == name))
}

/// The file, or 304 if the browser has it. The browser asks each time, since another binary may serve next.
fn file(headers: &HeaderMap, kind: &'static str, content: &'static str) -> Response {
    let hash = Sha256::digest(content);
    let etag: String = hash[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let etag = format!("\"{etag}\"");
    let known = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    // A proxy that compresses makes the tag a weak one.
    let is_known =
        known.flat_map(|list| list.split(',')).any(|tag| tag.trim().trim_start_matches("W/") == etag);
    let mut response =
        if is_known { StatusCode::NOT_MODIFIED.into_response() } else { content.into_response() };
    let fields = response.headers_mut();
    fields.insert(header::ETAG, HeaderValue::from_str(&etag).expect("hexadecimal digits are a header value"));
    fields.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    fields.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    fields.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    fields.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    if is_known {
        fields.remove(header::CONTENT_TYPE);
    } else {
        fields.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    }
    response
}
