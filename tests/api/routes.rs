//! Paths outside the documented routes, and the error for an unknown path.

use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use unicorn::api::{AccessPolicy, Keys};

use crate::support::app::{MODEL, app_that_says, app_with_policy};
use crate::support::http::{chat, get, post_to, send, send_json};

#[tokio::test]
async fn an_unknown_path_names_the_nearest_route() {
    let app = app_that_says("Hello");
    let near = |route: &str| format!("the nearest route is {route}");
    for (path, instead) in [
        ("/v1/v1/chat/completions", near("/v1/chat/completions: the client's base URL has one /v1 too many")),
        ("/v1//models", near("/v1/models: the client's base URL has one / too many")),
        (
            "/v1/chat/completions/chat/completions",
            near("/chat/completions: the client's base URL has a route at its end, and should end with /v1"),
        ),
        (
            "/v1/chat/completions/models",
            near("/models: the client's base URL has a route at its end, and should end with /v1"),
        ),
        ("/v1/chat/completion", near("/v1/chat/completions")),
        ("/v1/embeding", near("/v1/embeddings")),
        ("/v1/models/", near("/v1/models")),
        ("/openai/v1/responses", near("/v1/responses")),
        ("/healthz", near("/health")),
        ("/v1/messages/count_token", near("/v1/messages/count_tokens")),
        ("/api/chat/completions", near("/chat/completions")),
        ("/v1/nothing", "GET /openapi.json lists the routes".to_owned()),
    ] {
        for method in ["GET", "POST"] {
            let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("valid");
            let (status, _, answer) = send_json(&app.router, request).await;
            assert_eq!(status, 404, "{path}: {answer}");
            let message = format!("there is nothing at {path}; {instead}");
            let error =
                if path.starts_with("/api/") { &answer["error"] } else { &answer["error"]["message"] };
            assert_eq!(*error, json!(message));
        }
    }
}

/// Paths of other servers, and what the error refers to: a route, an option or a command.
const ELSEWHERE: [(&str, &str); 34] = [
    ("/v1", "GET /v1/models"),
    ("/v1/", "GET /v1/models"),
    ("/props", "GET /v1/models"),
    ("/slots", "GET /status"),
    ("/slots/0", "GET /status"),
    ("/completion", "POST /v1/completions"),
    ("/infill", "POST /v1/completions"),
    ("/apply-template", "POST /tokenize"),
    ("/embedding", "POST /v1/embeddings"),
    ("/rerank", "POST /v1/embeddings"),
    ("/v1/rerank", "POST /v1/embeddings"),
    ("/v2/rerank", "POST /v1/embeddings"),
    ("/v1/score", "POST /v1/embeddings"),
    ("/lora-adapters", "adapter"),
    ("/v1/load_lora_adapter", "adapter"),
    ("/version", "GET /status"),
    ("/ping", "GET /health"),
    ("/sleep", "POST /models/unload"),
    ("/reset_prefix_cache", "cache_salt"),
    ("/v1/audio/transcriptions", "POST /v1/chat/completions"),
    ("/v1/images/generations", "POST /v1/chat/completions"),
    ("/v1/realtime", "POST /v1/chat/completions"),
    ("/v1/moderations", "POST /v1/chat/completions"),
    ("/v1/assistants", "POST /v1/responses"),
    ("/v1/threads/t/runs", "POST /v1/responses"),
    ("/v1/files", "POST /v1/chat/completions"),
    ("/v1/vector_stores/v/search", "POST /v1/chat/completions"),
    ("/v1/batches", "X-Unicorn-Priority"),
    ("/v1/messages/batches", "X-Unicorn-Priority"),
    ("/v1/fine_tuning/jobs", "`unicorn serve --model`"),
    ("/v1/evals", "`unicorn serve --model`"),
    ("/v1/engines", "GET /v1/models"),
    ("/v1/edits", "POST /v1/chat/completions"),
    ("/v1/complete", "POST /v1/messages"),
];

#[tokio::test]
async fn paths_of_other_servers_name_what_this_server_has_instead() {
    let app = app_that_says("Hello");
    let (_, _, document) = send_json(&app.router, get("/openapi.json")).await;
    for (path, told) in ELSEWHERE {
        let (status, _, answer) = send_json(&app.router, get(path)).await;
        // Paths of Ollama's API have its errors.
        let error = if path.starts_with("/api/") { &answer["error"] } else { &answer["error"]["message"] };
        let message = error.as_str().unwrap_or_default();
        assert!(status == 404 && message.contains(told) && message.len() < 250, "{path}: {answer}");
        // Every route that the message names exists.
        for (named, [method, route]) in
            message.split(' ').zip(message.split(' ').skip(1)).filter_map(|(a, b)| {
                let route = b.trim_end_matches([',', ':', ';']);
                ["GET", "POST"].contains(&a).then(|| (b, [a.to_lowercase(), route.to_owned()]))
            })
        {
            assert!(document["paths"][&route][&method].is_object(), "{path}: {named} in {message}");
        }
    }
}

#[tokio::test]
async fn an_unsupported_method_is_refused_with_the_supported_ones() {
    let app = app_that_says("Hello");
    for (method, path, told, allow) in [
        ("GET", "/v1/completions", "send POST", "POST"),
        ("GET", "/v1/chat/completions", "send POST", "POST"),
        ("GET", "/completions", "send POST", "POST"),
        ("POST", "/v1/models", "send GET", "GET,HEAD"),
        ("DELETE", "/v1/models/makers/tiny-gemma", "send GET", "GET,HEAD"),
        ("PUT", "/v1/responses/resp_1", "send GET or DELETE", "GET,HEAD,DELETE"),
        ("POST", "/", "send GET", "GET,HEAD"),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("valid");
        let (status, headers, answer) = send_json(&app.router, request).await;
        let message = format!("{method} is not allowed at {path}: {told}");
        assert_eq!((status.as_u16(), &answer["error"]["message"]), (405, &json!(message)));
        assert_eq!(headers["allow"], allow, "{path}");
    }
}

#[tokio::test]
async fn routes_are_named_to_authorized_clients_only() {
    let keys = Keys::from_variable("test", &"k".repeat(32)).expect("a key");
    let app = app_with_policy(AccessPolicy { keys, ..AccessPolicy::default() }, "Hello");
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
            "only the Anthropic path has Anthropic's error format"
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
async fn routes_without_v1_require_a_key_too() {
    let keys = Keys::from_variable("test", &"k".repeat(32)).expect("a key");
    let app = app_with_policy(AccessPolicy { keys, ..AccessPolicy::default() }, "Hello");
    for path in ["/chat/completions", "/completions", "/responses", "/messages", "/embeddings"] {
        let (status, _, answer) = send_json(&app.router, post_to(path, chat("Hi").to_string())).await;
        assert_eq!(status, 401, "{path}: {answer}");
    }
}
