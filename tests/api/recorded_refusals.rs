//! Exact error answers to invalid bodies. For each case, `tests/data/api/refusals.json` has the path, the body as sent,
//! the status and the answer.
//!
//! To change a text, run with `UNICORN_TEST_RECORD=1`, which rewrites the file, and review the diff.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::support::app::app_that_says;
use crate::support::data;
use crate::support::http::{assert_at_rest, post_to, send_json};

#[derive(Serialize, Deserialize)]
struct Refusal {
    path: String,
    body: String,
    status: u16,
    answer: Value,
}

#[tokio::test]
async fn invalid_bodies_are_refused_with_the_recorded_answers() {
    let file = data("api/refusals.json");
    let text = std::fs::read_to_string(&file).expect("tests/data/api/refusals.json");
    let recorded: Vec<Refusal> = serde_json::from_str(&text).expect("refusals");
    assert!(recorded.len() >= 200, "{} bodies", recorded.len());
    let app = app_that_says("Hello");
    let (mut now, mut others) = (Vec::new(), Vec::new());
    for Refusal { path, body, status, answer } in recorded {
        let (got_status, _, mut got) = send_json(&app.router, post_to(&path, body.clone())).await;
        if let Some(id) = got.get_mut("request_id") {
            *id = "an id".into(); // Anthropic's errors have a random id
        }
        if (got_status.as_u16(), &got) != (status, &answer) {
            others.push(format!("{path} {body}\n  {got_status} {got}\n  recorded: {status} {answer}\n"));
        }
        assert!(got_status.is_client_error(), "{path} {body}: {got_status} {got}");
        now.push(Refusal { path, body, status: got_status.as_u16(), answer: got });
    }
    assert_at_rest(&app.router).await;
    if std::env::var_os("UNICORN_TEST_RECORD").is_some() {
        let text = serde_json::to_string_pretty(&now).expect("texts") + "\n";
        return std::fs::write(&file, text).expect("tests/data/api/refusals.json");
    }
    assert!(others.is_empty(), "{} are answered otherwise:\n{}", others.len(), others.concat());
}
