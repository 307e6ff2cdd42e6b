//! Model names in requests: the model's id, its aliases, and any name if the configuration allows it.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use unicorn::api::{AccessPolicy, Server};
use unicorn::config::{Config, Layer};
use unicorn::library::ModelNames;

use crate::support::app::{App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, limits, loaded};
use crate::support::fake_runner::says;
use crate::support::http::{get, post_to, send_json};
use crate::support::tokenizers::tokenizer;

fn app_called(aliases: &[&str], any: bool) -> App {
    let aliases = aliases.iter().map(|alias| (*alias).to_owned()).collect();
    let server = Server::new(ModelNames { id: MODEL.into(), aliases, any }, OPTIONS, AccessPolicy::default());
    let ids = tokenizer().encode("Hello", false).expect("encodes");
    loaded(server, limits(), DEFAULTS, says(&ids, END_OF_TURN))
}

async fn ask(app: &App, path: &str) -> (u16, Value) {
    let (status, _, answer) = send_json(&app.router, get(path)).await;
    (status.as_u16(), answer)
}

/// Request bodies that name a model, with their paths.
fn bodies(model: &str) -> [(&'static str, Value); 6] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    [
        ("/v1/chat/completions", json!({"model": model, "messages": messages})),
        ("/v1/completions", json!({"model": model, "prompt": "Hi"})),
        ("/v1/responses", json!({"model": model, "input": "Hi"})),
        ("/v1/messages", json!({"model": model, "messages": messages, "max_tokens": 4})),
        ("/v1/embeddings", json!({"model": model, "input": "Hi"})),
        ("/models/load", json!({"model": model})),
    ]
}

#[tokio::test]
async fn a_request_by_alias_is_answered_with_the_id_of_the_model() {
    let app = app_called(&["gpt-4o", "claude-sonnet", MODEL], false);
    for name in ["gpt-4o", "claude-sonnet", MODEL] {
        for (path, body) in bodies(name) {
            let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
            assert_eq!(status, 200, "{path} {name}: {answer}");
            assert!(answer.get("model").is_none_or(|model| model == MODEL), "{path} {name}: {answer}");
        }
        let (status, model) = ask(&app, &format!("/v1/models/{name}")).await;
        assert_eq!((status, &model["id"]), (200, &json!(name)));
    }
    for path in ["/v1/models", "/models"] {
        let (_, list) = ask(&app, path).await;
        let entries = list["data"].as_array().expect("a list");
        let ids: Vec<&Value> = entries.iter().map(|entry| &entry["id"]).collect();
        assert_eq!(ids, [MODEL, "gpt-4o", "claude-sonnet"], "each name is listed once");
        for entry in entries {
            let mut same = entry.clone();
            same["id"] = json!(MODEL);
            assert_eq!(same, entries[0], "entries differ only in their ids");
        }
    }
    for (path, body) in bodies("gpt-4") {
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        assert_eq!(status, 404, "{path}: {answer}");
        let message = format!(
            "the model \"gpt-4\" does not exist; this server serves {MODEL:?}: ask for that, or allow yours with \
             server.model_aliases or server.any_model_name"
        );
        assert_eq!(answer["error"]["message"], json!(message), "{path}");
    }
    assert_eq!(ask(&app, "/v1/models/gpt-4").await.0, 404);
}

#[tokio::test]
async fn any_model_name_is_accepted_if_configured() {
    let app = app_called(&["gpt-4o"], true);
    for (path, body) in bodies("whatever") {
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        assert_eq!(status, 200, "{path}: {answer}");
        assert!(answer.get("model").is_none_or(|model| model == MODEL), "{path}: {answer}");
    }
    let (_, list) = ask(&app, "/v1/models").await;
    assert_eq!(list["data"].as_array().map(Vec::len), Some(2), "{list}");
    for (asked, id) in [("whatever", MODEL), ("gpt-4o", "gpt-4o")] {
        let (status, model) = ask(&app, &format!("/v1/models/{asked}")).await;
        assert_eq!((status, &model["id"]), (200, &json!(id)));
    }
    // `unicorn rm` looks elsewhere for a name that no model has, and must not be told about another model.
    for (asked, is_told) in [("whatever", false), (MODEL, true), ("gpt-4o", true)] {
        let body = json!({"model": asked}).to_string();
        let (_, _, shown) = send_json(&app.router, post_to("/api/show", body)).await;
        assert_eq!(shown["kept_because"].is_string(), is_told, "{asked}: {shown}");
    }
}

#[tokio::test]
async fn the_model_list_and_its_errors_have_the_anthropic_fields() {
    let app = app_called(&["claude-sonnet"], false);
    let ask = async |path: &str| {
        let request =
            Request::get(path).header("anthropic-version", "2023-06-01").header("x-request-id", "abc");
        let (status, headers, answer) = send_json(&app.router, request.body(Body::empty()).unwrap()).await;
        assert_eq!(headers["request-id"], "abc", "{path}");
        (status.as_u16(), answer)
    };
    let (status, list) = ask("/v1/models?limit=1").await;
    assert_eq!(status, 200, "{list}");
    let page = ["has_more", "first_id", "last_id"].map(|name| &list[name]);
    assert_eq!(page, [&json!(false), &json!(MODEL), &json!("claude-sonnet")]);
    let (_, one) = ask("/v1/models/claude-sonnet").await;
    assert_eq!(one, list["data"][1]);
    let fixed =
        ["type", "display_name", "lifecycle", "max_input_tokens", "max_tokens"].map(|name| &one[name]);
    let context = json!(limits().max_context);
    assert_eq!(fixed, [&json!("model"), &json!(MODEL), &json!("active"), &context, &context]);
    let time: jiff::Timestamp = one["created_at"].as_str().expect("text").parse().expect("RFC 3339");
    assert_eq!(json!(time.as_second()), one["created"]);
    for (path, status) in [("/v1/models/claude-opus", 404), ("/v1/files", 404), ("/v1/messages", 405)] {
        let (got, answer) = ask(path).await;
        let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
        let told = (got, &answer["type"], &answer["error"]["type"], &answer["request_id"]);
        assert_eq!(told, (status, &json!("error"), &json!(kind), &json!("abc")), "{path}: {answer}");
    }
    let (_, answer) = ask("/v1/models/claude-opus").await;
    assert!(
        answer["error"]["message"].as_str().is_some_and(|m| m.contains("server.model_aliases")),
        "{answer}"
    );
}

#[test]
fn model_aliases_are_configured_and_an_empty_one_is_refused() {
    let config = |text: &str| Config::from_layers(&[Layer::file("unicorn.toml", text).expect("TOML")]);
    let defaults = config("").expect("valid").server;
    assert_eq!((defaults.model_aliases, defaults.any_model_name), (vec![], false));
    let named =
        config("[server]\nmodel_aliases = [\"gpt-4o\", \"b\"]\nany_model_name = true").expect("valid");
    assert_eq!(named.server.model_aliases, ["gpt-4o", "b"]);
    assert!(named.server.any_model_name);
    let error = config("[server]\nmodel_aliases = [\"a\", \"\"]").expect_err("an empty name").to_string();
    assert_eq!(error, "unicorn.toml: server.model_aliases: expected names, got an empty one");

    let variable = ("UNICORN_SERVER_MODEL_ALIASES".to_owned(), "gpt-4o,b".to_owned());
    let (layer, _) = Layer::environment([variable]).expect("an option");
    let config = Config::from_layers(&[layer]).expect("valid");
    assert_eq!(config.server.model_aliases, ["gpt-4o", "b"]);
}
