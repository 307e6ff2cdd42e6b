//! The page at `/` over HTTP: content types, the security policy, and caching. tests/page tests the behaviour of the
//! page.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use tower::ServiceExt;

use crate::support::app::router_that_says;
use crate::support::http::send;

async fn ask(router: &Router, method: Method, path: &str, known: &str) -> (StatusCode, HeaderMap, String) {
    let request = Request::builder().method(method).uri(path).header(header::IF_NONE_MATCH, known);
    let request = request.header(header::ACCEPT, "text/html,application/xhtml+xml,*/*;q=0.8");
    let request = request.body(Body::empty()).expect("a valid request");
    let (parts, body) = router.clone().oneshot(request).await.expect("handlers do not fail").into_parts();
    let bytes = body.collect().await.expect("a whole body").to_bytes().to_vec();
    (parts.status, parts.headers, String::from_utf8(bytes).expect("UTF-8"))
}

/// The files that tools/page_libraries builds.
const LIBRARIES: [&str; 3] = ["/page/libraries.js", "/page/libraries.css", "/page/licences.txt"];

/// The addresses in a file, as absolute paths.
fn addresses(text: &str) -> Vec<String> {
    let in_markup = ["src=\"", "href=\""].iter().flat_map(|mark| text.split(mark).skip(1));
    let in_scripts = text.split("from \"./").skip(1).map(|rest| ("/page/", rest));
    let all = in_markup.map(|rest| ("/", rest)).chain(in_scripts);
    all.map(|(folder, rest)| format!("{folder}{}", rest.split('"').next().unwrap_or(""))).collect()
}

#[tokio::test]
async fn every_page_file_is_served_with_its_type_and_the_security_policy() {
    let (router, _) = router_that_says("Hi");
    let mut paths = vec!["/".to_owned()];
    let (mut bytes, mut library_bytes) = (0, 0);
    let mut next = 0;
    while let Some(path) = paths.get(next).cloned() {
        let (status, headers, text) = ask(&router, Method::GET, &path, "").await;
        assert_eq!(status, 200, "{path}");
        let kind = match path.rsplit('.').next() {
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            Some("txt") => "text/plain; charset=utf-8",
            _ => "text/html; charset=utf-8",
        };
        assert_eq!(headers[header::CONTENT_TYPE], kind, "{path}");
        assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff", "{path}");
        assert_eq!(headers[header::CACHE_CONTROL], "no-cache", "{path}");
        let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        for part in
            ["default-src 'none'", "script-src 'self';", "img-src 'self' data:;", "frame-ancestors 'none'"]
        {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{path}: {policy}");
        // The libraries send no requests and evaluate no text as code. Their licences and parsers contain addresses.
        if LIBRARIES.contains(&path.as_str()) {
            for call in ["XMLHttpRequest", "WebSocket", "import(", "new Function", "eval(", "@import", "url("]
            {
                assert!(!text.contains(call), "{path} has {call}");
            }
            library_bytes += text.len();
        } else {
            // No inline scripts or styles, and nothing from another host.
            assert!(!text.contains("style=\"") && !text.contains(" onclick"), "{path}");
            let namespaces = ["http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"];
            let own = namespaces.iter().fold(text.clone(), |text, name| text.replace(name, ""));
            assert!(!own.contains("://"), "{path} names another host");
            for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "srcdoc"] {
                assert!(!text.contains(sink), "{path} makes markup of text");
            }
            bytes += text.len();
        }
        for address in addresses(&text) {
            if !paths.contains(&address) {
                paths.push(address);
            }
        }
        next += 1;
    }
    assert_eq!(paths.len(), 18, "{paths:?}");
    assert!(bytes < 112 << 10, "the page has {bytes} bytes");
    assert!(library_bytes < 480 << 10, "the page's libraries have {library_bytes} bytes");
}

#[tokio::test]
async fn a_file_in_the_browser_cache_is_not_sent_again() {
    let (router, _) = router_that_says("Hi");
    let (_, headers, _) = ask(&router, Method::GET, "/page/app.js", "").await;
    let etag = headers[header::ETAG].to_str().unwrap().to_owned();
    assert!(etag.starts_with('"') && etag.ends_with('"') && etag.len() > 10, "{etag}");
    for known in [etag.clone(), format!("W/{etag}"), format!("\"x\", {etag}")] {
        let (status, headers, text) = ask(&router, Method::GET, "/page/app.js", &known).await;
        assert_eq!((status, text.as_str()), (StatusCode::NOT_MODIFIED, ""), "{known}");
        assert_eq!(headers[header::ETAG], etag.as_str());
        assert!(!headers.contains_key(header::CONTENT_TYPE));
    }
    let (_, other, _) = ask(&router, Method::GET, "/page/chat.js", "").await;
    assert_ne!(other[header::ETAG], etag.as_str());
    assert_eq!(ask(&router, Method::GET, "/page/chat.js", &etag).await.0, 200);
}

/// Clients of Ollama request `/` to see whether a server is there.
#[tokio::test]
async fn a_program_gets_a_line_of_text_instead_of_the_page() {
    let (router, _) = router_that_says("Hi");
    for accept in ["*/*", "application/json"] {
        let request = Request::get("/").header(header::ACCEPT, accept).body(Body::empty()).unwrap();
        let (status, headers, text) = send(&router, request).await;
        assert_eq!((status.as_u16(), &text[..]), (200, &b"Ollama is running"[..]), "{accept}");
        assert_eq!(
            (&headers[header::VARY], &headers[header::CONTENT_TYPE]),
            (&"accept".parse().unwrap(), &"text/plain; charset=utf-8".parse().unwrap())
        );
    }
}

#[tokio::test]
async fn the_page_is_read_only_and_has_no_other_files() {
    let (router, _) = router_that_says("Hi");
    let (status, headers, text) = ask(&router, Method::HEAD, "/", "").await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, ""));
    assert_eq!(headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
    let (status, _, text) = ask(&router, Method::POST, "/", "").await;
    assert_eq!(status, 405);
    assert!(text.contains("method_not_allowed"), "{text}");
    let rebound = Request::get("/").header(header::HOST, "strange.example").body(Body::empty()).unwrap();
    assert_eq!(
        router.clone().oneshot(rebound).await.unwrap().status(),
        403,
        "an unknown host name could be a DNS rebinding attack"
    );
    for path in ["/page", "/page/", "/page/index.html", "/page/../page.rs", "/page/app.js/x", "/index.html"] {
        let (status, _, text) = ask(&router, Method::GET, path, "").await;
        assert_eq!(status, 404, "{path}");
        assert!(text.contains("not_found"), "{path}: {text}");
    }
}
