//! What paths are answered besides the documented ones, and what is said at a path that is none.

use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use unicorn::api::{AccessPolicy, Keys};

use crate::api::{app_behind, app_that_says, send_json};

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
    let request = Request::get("/v1/model").body(Body::empty()).expect("sound");
    let (status, _, answer) = send_json(&app.router, request).await;
    assert_eq!(status, 401);
    assert!(!answer.to_string().contains("/v1/models"), "{answer}");
}
