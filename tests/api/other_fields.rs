//! The table of fields of other servers in `/openapi.json` (`x-other-fields`) must describe how the server treats each
//! field. `tests/house/docs.rs` compares docs/api.md with the same table.

use serde_json::{Value, json};

use crate::support::app::{App, app_that_says};
use crate::support::http::{get, post_to, send_json};
use crate::support::json::with;

const ANSWER: &str = "Hello there";

/// The routes whose bodies have a table, each with a valid body.
fn bodies() -> [(&'static str, Value); 4] {
    [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})),
        ("/v1/completions", json!({"prompt": "Hi", "max_tokens": 40})),
        ("/v1/responses", json!({"input": "Hi", "store": false})),
        ("/v1/messages", json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40})),
    ]
}

async fn document(app: &App) -> Value {
    send_json(&app.router, get("/openapi.json")).await.2
}

/// The schema of a route's body.
fn body_schema<'a>(document: &'a Value, route: &str) -> &'a Value {
    let schema = &document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"];
    let reference = schema["$ref"].as_str().expect("a named schema");
    document.pointer(&reference[1..]).expect(reference)
}

fn other_fields<'a>(document: &'a Value, route: &str) -> &'a Vec<Value> {
    body_schema(document, route)["x-other-fields"].as_array().expect("a table")
}

/// The content of an answer, without the fields that differ between any two answers.
fn said(route: &str, answer: &Value) -> Value {
    match route {
        "/v1/responses" => answer["output"][0]["content"].clone(),
        "/v1/messages" => answer["content"].clone(),
        _ => answer["choices"].clone(),
    }
}

#[tokio::test]
async fn the_server_treats_each_field_as_documented() {
    let app = app_that_says(ANSWER);
    let document = document(&app).await;
    let (mut refused, mut ignored) = (0, 0);
    for (route, body) in bodies() {
        let plain = send_json(&app.router, post_to(route, body.to_string())).await.2;
        let ask = async |name: &str, value: &Value| {
            let body = with(body.clone(), json!({name: value}));
            let (status, _, answer) = send_json(&app.router, post_to(route, body.to_string())).await;
            (status, answer)
        };
        let is_answered = async |name: &str, value: &Value| {
            let (status, answer) = ask(name, value).await;
            assert_eq!(status, 200, "{route}: {name} {value}: {answer}");
            assert_eq!(said(route, &answer), said(route, &plain), "{route}: {name} {value}");
        };
        for field in other_fields(&document, route) {
            let name = field["name"].as_str().expect("a name");
            is_answered(name, &Value::Null).await;
            let strange = [json!(17), json!("strange"), json!(["strange"]), json!({"strange": true})];
            if field["treatment"] == "ignored" {
                ignored += 1;
                for value in &strange {
                    is_answered(name, value).await;
                }
                continue;
            }
            refused += 1;
            for value in field["off"].as_array().expect("values") {
                is_answered(name, value).await;
            }
            for value in &strange {
                let (status, answer) = ask(name, value).await;
                let error = &answer["error"];
                assert_eq!(status, 400, "{name}: {answer}");
                if route == "/v1/messages" {
                    assert_eq!(error["type"], "invalid_request_error", "{name}: {answer}");
                } else {
                    assert_eq!(error["code"], "unsupported_value", "{name}: {answer}");
                    assert_eq!(error["param"], *name);
                }
                let (message, about) = (error["message"].as_str().unwrap(), field["about"].as_str().unwrap());
                assert!(message.starts_with(name) && message.ends_with(about), "{message}");
            }
        }
    }
    assert!(refused > 60 && ignored > 60, "{refused} refused, {ignored} ignored");
}

#[tokio::test]
async fn no_field_is_listed_twice_or_also_supported() {
    let app = app_that_says(ANSWER);
    let document = document(&app).await;
    for (route, _) in bodies() {
        let honoured = body_schema(&document, route)["properties"].as_object().expect("fields");
        let mut names: Vec<&str> = other_fields(&document, route)
            .iter()
            .map(|field| field["name"].as_str().expect("a name"))
            .collect();
        for name in &names {
            assert!(!honoured.contains_key(*name), "{route} reads {name}");
        }
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "{route}");
    }
}
