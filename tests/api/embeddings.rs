//! `/v1/embeddings` with the scripted runner and the mini tokenizer.

use axum::http::{Request, StatusCode, header};
use axum::{Router, body::Body};
use serde_json::{Value, json};
use unicorn::model::Limits;

use crate::support::app::{App, DEFAULTS, MODEL, OPTIONS, app_with, limits};
use crate::support::fake_runner::{fake_pooled, says};
use crate::support::http::{send, send_json};
use crate::support::json::with;
use crate::support::tokenizers::tokenizer;

fn app() -> App {
    app_with(Limits { max_sequences: 2, ..limits() }, OPTIONS, DEFAULTS, says(&[], 1))
}

async fn embed(router: &Router, fields: Value) -> (StatusCode, Value) {
    let body = with(json!({"model": MODEL, "input": "once upon a time"}), fields);
    let request = Request::post("/v1/embeddings").header(header::CONTENT_TYPE, "application/json");
    let request = request.body(Body::from(body.to_string())).expect("a sound request");
    let (status, _, value) = send_json(router, request).await;
    (status, value)
}

/// The expected embedding of a text.
fn expected(text: &str) -> Vec<f32> {
    direction(&tokenizer().encode(text, true).expect("encodes"))
}

fn direction(ids: &[u32]) -> Vec<f32> {
    let state = fake_pooled(ids);
    let length = state.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    state.iter().map(|x| (f64::from(*x) / length) as f32).collect()
}

fn numbers(embedding: &Value) -> Vec<f32> {
    let numbers = embedding.as_array().unwrap_or_else(|| panic!("{embedding}"));
    numbers.iter().map(|x| x.as_f64().expect("a number") as f32).collect()
}

#[tokio::test]
async fn an_embedding_is_the_normalized_mean_state_of_its_text() {
    let app = app();
    let (status, body) = embed(&app.router, json!({"user": "someone", "dimensions": 3})).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!((&body["object"], &body["model"]), (&json!("list"), &json!(MODEL)));
    let entry = &body["data"][0];
    assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(0)));
    assert_eq!(numbers(&entry["embedding"]), expected("once upon a time"));
    let tokens = tokenizer().encode("once upon a time", true).expect("encodes").len();
    assert_eq!(body["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    // An embedding request generates no token, so it has no time to the first token.
    let (_, _, metrics) =
        send(&app.router, Request::get("/metrics").body(Body::empty()).expect("sound")).await;
    let metrics = String::from_utf8(metrics).expect("UTF-8");
    for (name, n) in [
        ("prompt_tokens_total", tokens),
        ("generation_tokens_total", 0),
        ("time_to_first_token_seconds_count", 0),
        ("request_queue_time_seconds_count", 1),
    ] {
        let line = format!("unicorn_{name}{{model_name=\"{MODEL}\"}} {n}\n");
        assert!(metrics.contains(&line), "{line} is not in {metrics}");
    }
}

#[tokio::test]
async fn background_inputs_are_embedded() {
    let app = app();
    let body = json!({"model": MODEL, "input": ["once upon a time", "a dragon"]}).to_string();
    let request = Request::post("/v1/embeddings").header("x-unicorn-priority", "background");
    let (status, _, body) = send_json(&app.router, request.body(Body::from(body)).expect("sound")).await;
    assert_eq!((status.as_u16(), body["data"].as_array().map(Vec::len)), (200, Some(2)), "{body}");
    let (_, _, metrics) =
        send(&app.router, Request::get("/metrics").body(Body::empty()).expect("sound")).await;
    let metrics = String::from_utf8(metrics).expect("UTF-8");
    let line =
        format!("unicorn_requests_total{{model_name=\"{MODEL}\",class=\"background\",task=\"none\"}} 1\n");
    assert!(metrics.contains(&line), "{line} is not in {metrics}");
}

#[tokio::test]
async fn more_inputs_than_the_queue_holds_are_embedded_in_their_order() {
    let app = app();
    // More inputs than can run and wait at the same time.
    let texts: Vec<String> = (0..30).map(|i| "so ".repeat(1 + i * 7 % 30)).collect();
    let (status, body) = embed(&app.router, json!({"input": texts})).await;
    assert_eq!(status, 200, "{body}");
    let data = body["data"].as_array().expect("a list");
    assert_eq!(data.len(), texts.len());
    for (i, (entry, text)) in data.iter().zip(&texts).enumerate() {
        assert_eq!(entry["index"], i);
        assert_eq!(numbers(&entry["embedding"]), expected(text), "{text}");
    }
    for (input, lists) in
        [(json!([5, 6, 7]), vec![vec![5, 6, 7]]), (json!([[5], [6, 7]]), vec![vec![5], vec![6, 7]])]
    {
        let (status, body) = embed(&app.router, json!({"input": input})).await;
        assert_eq!(status, 200, "{body}");
        let got: Vec<_> =
            body["data"].as_array().expect("a list").iter().map(|e| numbers(&e["embedding"])).collect();
        assert_eq!(got, lists.iter().map(|ids| direction(ids)).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn embeddings_are_sent_as_base64_on_request() {
    use base64::Engine as _;
    let app = app();
    let (_, body) = embed(&app.router, json!({"encoding_format": "base64"})).await;
    let text = body["data"][0]["embedding"].as_str().expect("a string");
    let bytes = base64::prelude::BASE64_STANDARD.decode(text).expect("base64");
    let got: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four"))).collect();
    assert_eq!(got, expected("once upon a time"));
}

#[tokio::test]
async fn bad_inputs_are_refused_with_the_name_of_the_field() {
    let app = app();
    for (fields, param, words) in [
        (json!({"input": null}), "input", "required"),
        (json!({"input": ""}), "input", "empty"),
        (json!({"input": ["a", ""]}), "input[1]", "empty"),
        (json!({"input": []}), "input", "1 to 2048"),
        (json!({"input": [[]]}), "input[0]", "at least one token"),
        (json!({"input": [7, 512]}), "input[1]", "below 512"),
        (json!({"input": {"text": "a"}}), "input", "an object"),
        (json!({"encoding_format": "int8"}), "encoding_format", "base64"),
        (json!({"dimensions": 2}), "dimensions", "have 3"),
    ] {
        let (status, body) = embed(&app.router, fields.clone()).await;
        assert_eq!(status, 400, "{fields}: {body}");
        assert_eq!(body["error"]["param"], param, "{fields}: {body}");
        assert!(body["error"]["message"].as_str().is_some_and(|m| m.contains(words)), "{fields}: {body}");
    }
    let (status, body) = embed(&app.router, json!({"input": "so ".repeat(700)})).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (400, &json!("context_length_exceeded")), "{body}");
    assert_eq!(body["error"]["param"], "input");
    let (status, _) = embed(&app.router, json!({"model": "another"})).await;
    assert_eq!(status, 404);
}
