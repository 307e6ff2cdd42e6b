//! The encodings of bodies: a byte order mark is skipped, and a compressed body is refused.

use axum::http::{HeaderValue, header};
use serde_json::{Value, json};

use crate::support::app::{MODEL, app_that_says};
use crate::support::http::{chat, post_to, send_json};

/// A sound body for each of the routes that have one.
fn bodies() -> [(&'static str, Value); 5] {
    [
        ("/v1/chat/completions", chat("Hi")),
        ("/v1/completions", json!({"model": MODEL, "prompt": "Hi"})),
        ("/v1/responses", json!({"model": MODEL, "input": "Hi"})),
        ("/v1/messages", json!({"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]})),
        ("/tokenize", json!({"content": "Hi"})),
    ]
}

#[tokio::test]
async fn a_byte_order_mark_may_stand_before_a_body() {
    let app = app_that_says("Hello");
    for (path, body) in bodies() {
        let (status, _, answer) = send_json(&app.router, post_to(path, format!("\u{feff}{body}"))).await;
        assert_eq!(status, 200, "{path}: {answer}");
        for broken in [format!("\u{feff}\u{feff}{body}"), format!(" \u{feff}{body}"), "\u{feff}".to_owned()] {
            let (status, _, answer) = send_json(&app.router, post_to(path, broken)).await;
            assert_eq!(status, 400, "{path}: {answer}");
        }
    }
}

#[tokio::test]
async fn a_compressed_body_is_refused_by_the_name_of_its_encoding() {
    let app = app_that_says("Hello");
    for (path, body) in bodies() {
        for encoding in ["gzip", "br, gzip", "x-\u{fc}"] {
            let mut request = post_to(path, body.to_string());
            let value = HeaderValue::from_bytes(encoding.as_bytes()).expect("a header");
            request.headers_mut().insert(header::CONTENT_ENCODING, value);
            let (status, headers, answer) = send_json(&app.router, request).await;
            assert_eq!(
                (status.as_u16(), &headers["accept-encoding"]),
                (415, &HeaderValue::from_static("identity"))
            );
            let message =
                format!("the body is encoded as {encoding:?}: send it as it is, without Content-Encoding");
            let kind = "invalid_request_error";
            if path == "/v1/messages" {
                assert_eq!(answer["error"], json!({"type": kind, "message": message}), "{answer}");
                assert!(answer["request_id"].is_string(), "{answer}");
            } else {
                let error = json!({"message": message, "type": kind, "param": null, "code": "body_encoded"});
                assert_eq!(answer, json!({"error": error}), "{path}");
            }
        }
        for encoding in ["identity", "Identity", ""] {
            let mut request = post_to(path, body.to_string());
            request.headers_mut().insert(header::CONTENT_ENCODING, encoding.parse().expect("a header"));
            let (status, _, answer) = send_json(&app.router, request).await;
            assert_eq!(status, 200, "{path}: {answer}");
        }
    }
}
