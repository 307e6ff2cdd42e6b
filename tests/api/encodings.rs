//! Encodings of bodies: a byte order mark is skipped, and a compressed body is refused. Invisible characters are
//! escaped when an error quotes them.

use axum::http::{HeaderValue, header};
use serde_json::{Value, json};

use crate::support::app::{MODEL, app_that_says};
use crate::support::http::{chat, get, post_to, send, send_json};

/// A valid body for each of the routes that have one.
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
async fn a_byte_order_mark_before_a_body_is_skipped() {
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
async fn a_compressed_body_is_refused_and_its_encoding_named() {
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
            let message = format!(
                "the body is encoded as {encoding:?}: send it uncompressed, without Content-Encoding"
            );
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

#[tokio::test]
async fn an_error_escapes_invisible_characters() {
    let app = app_that_says("Hello");
    // A direction override, a direction isolate, a zero-width space, a byte order mark, a line separator, a tag and a
    // control character.
    for hidden in ["\u{202e}", "\u{2066}", "\u{200b}", "\u{feff}", "\u{2028}", "\u{e0041}", "\u{1b}"] {
        let name = format!("a{hidden}b");
        let encoded: String = name.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let message = json!([{"role": "user", "content": "Hi"}]);
        let tool = json!({"type": "function", "function": {"name": "look", "parameters": {}}});
        let call = json!({"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}});
        let requests = [
            post_to("/v1/chat/completions", json!({"model": name, "messages": message}).to_string()),
            post_to("/v1/messages", json!({"model": name, "max_tokens": 1, "messages": message}).to_string()),
            post_to("/v1/chat/completions", json!({"messages": message, "logit_bias": {&*name: 1}}).to_string()),
            post_to("/v1/chat/completions", json!({"messages": [{"role": name, "content": ""}]}).to_string()),
            post_to(
                "/v1/chat/completions",
                json!({"messages": message, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": name}}}).to_string(),
            ),
            post_to(
                "/v1/chat/completions",
                json!({"messages": message, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": {"type": "object", "properties": {&*name: {"type": "none"}}}}}}).to_string(),
            ),
            post_to("/v1/chat/completions", json!({"messages": message, "guided_regex": format!("({name}")}).to_string()),
            post_to("/v1/completions", json!({"prompt": "Hi", "guided_grammar": format!("root ::= {name}")}).to_string()),
            post_to(
                "/v1/chat/completions",
                json!({"messages": [message[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": format!("{name}2"), "content": ""}]}).to_string(),
            ),
            post_to("/v1/responses", json!({"input": "Hi", "previous_response_id": name}).to_string()),
            post_to("/v1/responses", json!({"input": [{"type": name}]}).to_string()),
            get(&format!("/v1/responses/{encoded}")),
            get(&format!("/v1/models/{encoded}")),
            get(&format!("/v1/{encoded}")),
        ];
        let mut shown = 0;
        for request in requests {
            let what = format!("{} for {name:?}", request.uri());
            let (status, _, bytes) = send(&app.router, request).await;
            let answer: Value = serde_json::from_slice(&bytes).expect("JSON");
            assert!(status.is_client_error(), "{what}: {status} {answer}");
            let error = &answer["error"];
            let texts = [&error["message"], &error["param"]].map(|text| text.as_str().unwrap_or_default());
            assert!(!texts.iter().any(|text| text.contains(hidden)), "{what}: {texts:?}");
            let escaped: String = hidden.chars().flat_map(char::escape_unicode).collect();
            shown += usize::from(texts.iter().any(|text| text.contains(&escaped)));
        }
        assert!(shown >= 8, "{hidden:?} is shown in {shown} errors");
    }
}
