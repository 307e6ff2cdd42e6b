//! The answers of paths besides the documented ones, and the error of a path that is no route.

use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use unicorn::api::{AccessPolicy, Keys};

use crate::support::app::{MODEL, app_behind, app_that_says};
use crate::support::http::{chat, get, post_to, send, send_json};

#[tokio::test]
async fn an_unknown_path_names_the_route_that_is_near() {
    let app = app_that_says("Hello");
    for (path, near) in [
        ("/v1/v1/chat/completions", "; the nearest route is /v1/chat/completions"),
        ("/v1/chat/completion", "; the nearest route is /v1/chat/completions"),
        ("/v1/embeding", "; the nearest route is /v1/embeddings"),
        ("/v1/models/", "; the nearest route is /v1/models"),
        ("/openai/v1/responses", "; the nearest route is /v1/responses"),
        ("/healthz", "; the nearest route is /health"),
        ("/v1/messages/count_token", "; the nearest route is /v1/messages/count_tokens"),
        ("/api/chat/completions", "; the nearest route is /chat/completions"),
        ("/v1/nothing", ""),
        ("/v1", ""),
    ] {
        for method in ["GET", "POST"] {
            let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("sound");
            let (status, _, answer) = send_json(&app.router, request).await;
            assert_eq!(status, 404, "{path}: {answer}");
            let message = format!("there is nothing at {path}{near}");
            assert_eq!(answer["error"]["message"], json!(message));
        }
    }
}

#[tokio::test]
async fn routes_are_named_to_those_alone_who_may_ask() {
    let keys = Keys::from_variable("test", &"k".repeat(32)).expect("a key");
    let app = app_behind(AccessPolicy { keys, ..AccessPolicy::default() }, "Hello");
    let (status, _, answer) = send_json(&app.router, get("/v1/model")).await;
    assert_eq!(status, 401);
    assert!(!answer.to_string().contains("/v1/models"), "{answer}");
}

#[tokio::test]
async fn routes_answer_without_v1_and_are_counted_with_it() {
    let app = app_that_says("Hello");
    let bodies = [
        ("/chat/completions", chat("Hi")),
        ("/completions", json!({"prompt": "Hi"})),
        ("/responses", json!({"input": "Hi"})),
        ("/messages", json!({"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]})),
        ("/embeddings", json!({"input": "Hi"})),
    ];
    let (_, _, document) = send_json(&app.router, get("/openapi.json")).await;
    for (path, body) in bodies {
        for path in [path.to_owned(), format!("/v1{path}")] {
            let (status, _, answer) = send_json(&app.router, post_to(&path, body.to_string())).await;
            assert_eq!(status, 200, "{path}: {answer}");
        }
        let (status, headers, answer) = send_json(&app.router, post_to(path, "[]")).await;
        let (with_status, with_headers, with_v1) =
            send_json(&app.router, post_to(&format!("/v1{path}"), "[]")).await;
        assert_eq!((status.as_u16(), with_status.as_u16()), (400, 400), "{path}: {answer}");
        let error = &answer["error"];
        assert_eq!(error, &with_v1["error"], "{path}");
        assert_eq!(
            error.get("code").is_none(),
            path == "/messages",
            "Anthropic's words are for Anthropic's path"
        );
        assert_eq!(headers.contains_key("request-id"), with_headers.contains_key("request-id"), "{path}");
        assert_eq!(send_json(&app.router, get(path)).await.0, 405, "{path}");
        assert!(document["paths"].get(path).is_none(), "{path} is in the document");
        assert!(document["paths"].get(format!("/v1{path}")).is_some(), "{path}");
    }
    let (status, _, models) = send_json(&app.router, get("/models")).await;
    assert_eq!((status.as_u16(), &models["data"][0]["id"]), (200, &json!(MODEL)));
    let (_, _, metrics) = send(&app.router, get("/metrics")).await;
    let metrics = String::from_utf8(metrics).expect("text");
    for path in ["/chat/completions", "/completions", "/responses", "/messages", "/embeddings"] {
        let line = format!(
            "unicorn_http_requests_total{{model_name=\"{MODEL}\",endpoint=\"/v1{path}\",status=\"200\"}} 2\n"
        );
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
        assert!(!metrics.contains(&format!("endpoint=\"{path}\"")), "{metrics}");
    }
}

#[tokio::test]
async fn routes_without_v1_ask_for_a_key_too() {
    let keys = Keys::from_variable("test", &"k".repeat(32)).expect("a key");
    let app = app_behind(AccessPolicy { keys, ..AccessPolicy::default() }, "Hello");
    for path in ["/chat/completions", "/completions", "/responses", "/messages", "/embeddings"] {
        let (status, _, answer) = send_json(&app.router, post_to(path, chat("Hi").to_string())).await;
        assert_eq!(status, 401, "{path}: {answer}");
    }
}
