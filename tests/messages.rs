//! Anthropic's wire format over the scripted runner: every event of a stream, every field, every error.

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use unicorn::api::{self, Door, Keys, Server};

use crate::api::{
    App, MODEL, OPTIONS, app, app_behind, app_that_says, app_that_shows_its_prompt, assert_all_free,
    events_of, post_to, prompt_ids, send, send_json, tokenizer, with,
};
use crate::fake_runner::says;

const PATH: &str = "/v1/messages";

fn ask(text: &str) -> Value {
    json!({"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": text}]})
}

async fn create(app: &App, body: &Value) -> (StatusCode, HeaderMap, Value) {
    send_json(&app.router, post_to(PATH, body.to_string())).await
}

async fn events(app: &App, body: Value) -> Vec<Value> {
    events_of(app, PATH, body).await
}

fn ids(text: &str) -> usize {
    tokenizer().encode(text, false).unwrap().len()
}

#[tokio::test]
async fn an_answer_has_anthropics_shape() {
    let text = "Größe: ½, 🦄!";
    let app = app_that_says(text);
    let (status, headers, mut body) = create(&app, &ask("Hi")).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(headers["request-id"], headers["x-request-id"]);
    assert!(body["id"].take().as_str().is_some_and(|id| id.starts_with("msg_")));
    let prompt = prompt_ids("<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n").len();
    let expected = json!({
        "id": null, "type": "message", "role": "assistant", "model": MODEL,
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {
            "input_tokens": prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": ids(text) + 1,
        },
    });
    assert_eq!(body, expected);

    // What the cache had is told apart.
    let (_, _, body) = create(&app, &ask("Hi")).await;
    let (input, cached) = (&body["usage"]["input_tokens"], &body["usage"]["cache_read_input_tokens"]);
    assert!(cached.as_u64() > Some(0), "{body}");
    assert_eq!(input.as_u64().unwrap() + cached.as_u64().unwrap(), prompt as u64);
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_stream_is_these_events_in_this_order() {
    let text = "Vim: ½ or two?";
    let app = app_that_says(text);
    for (fields, expected, reason, sequence) in [
        (json!({}), text, "end_turn", json!(null)),
        (json!({"stop_sequences": ["x", " or"]}), "Vim: ½", "stop_sequence", json!(" or")),
        (json!({"stop_sequences": ["Vim"]}), "", "stop_sequence", json!("Vim")),
        (json!({"max_tokens": 1}), "V", "max_tokens", json!(null)),
    ] {
        let whole = create(&app, &with(ask("Hi"), fields.clone())).await.2;
        let mut events = events(&app, with(ask("Hi"), fields.clone())).await;
        let take = |events: &mut Vec<Value>| if events.is_empty() { json!(null) } else { events.remove(0) };

        let start = take(&mut events);
        let message = &start["message"];
        assert_eq!((&start["type"], &message["type"]), (&json!("message_start"), &json!("message")));
        assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &json!(null)));
        assert_eq!((&message["role"], &message["model"]), (&json!("assistant"), &json!(MODEL)));
        assert!(message["usage"]["input_tokens"].is_u64(), "{start}");
        if !expected.is_empty() {
            let block = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
            assert_eq!(take(&mut events), block, "{fields}");
            assert_eq!(take(&mut events), json!({"type": "ping"}));
            let mut said = String::new();
            while events[0]["type"] == "content_block_delta" {
                let delta = take(&mut events);
                assert_eq!((&delta["index"], &delta["delta"]["type"]), (&json!(0), &json!("text_delta")));
                let text = delta["delta"]["text"].as_str().expect("text");
                assert!(!text.is_empty() && !text.contains('\u{fffd}'), "{delta}");
                said.push_str(text);
            }
            if reason == "max_tokens" {
                assert!(text.starts_with(&said), "{said}");
            } else {
                assert_eq!(said, expected);
            }
            assert_eq!(take(&mut events), json!({"type": "content_block_stop", "index": 0}));
            assert_eq!(whole["content"], json!([{"type": "text", "text": said}]));
        } else {
            assert_eq!(whole["content"], json!([]));
        }
        let delta = take(&mut events);
        assert_eq!(delta["type"], "message_delta");
        assert_eq!(delta["delta"], json!({"stop_reason": reason, "stop_sequence": sequence}), "{fields}");
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence));
        assert_eq!(delta["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        assert_eq!(take(&mut events), json!({"type": "message_stop"}));
        assert_eq!(events, Vec::<Value>::new(), "nothing follows");
        assert_all_free(&app.engine).await;
    }
}

#[tokio::test]
async fn a_conversation_is_the_prompt_that_its_count_counts() {
    let (app, seen) = app_that_shows_its_prompt("ok");
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    let user = |content: Value| json!({"role": "user", "content": content});
    let model = |content: Value| json!({"role": "assistant", "content": content});
    let thought = json!({"type": "thinking", "thinking": "hm", "signature": "x"});
    let open = "<end_of_turn>\n<start_of_turn>model\n";
    for (fields, expected) in [
        (json!({"messages": [user(json!("Hi"))]}), format!("<start_of_turn>user\nHi{open}")),
        (
            json!({"system": "Be brief.", "messages": [user(json!([text("Hi"), text(""), text("there")]))]}),
            format!("<start_of_turn>user\nBe brief.\n\nHi\n\nthere{open}"),
        ),
        (
            json!({"system": [text("A"), text("B")], "messages": [user(json!("Hi"))]}),
            format!("<start_of_turn>user\nA\n\nB\n\nHi{open}"),
        ),
        (
            json!({"messages": [user(json!("a")), model(json!([thought, text("b")])), user(json!("c"))]}),
            format!("<start_of_turn>user\na{open}b<end_of_turn>\n<start_of_turn>user\nc{open}"),
        ),
        // The beginning of the answer, as the client has it.
        (
            json!({"messages": [user(json!("2+2?")), model(json!("It is ("))]}),
            format!("<start_of_turn>user\n2+2?{open}It is ("),
        ),
        (
            json!({"messages": [user(json!("2+2?")), model(json!([]))]}),
            format!("<start_of_turn>user\n2+2?{open}"),
        ),
    ] {
        let body = with(ask(""), fields.clone());
        let (status, _, reply) = create(&app, &body).await;
        assert_eq!((status.as_u16(), &reply["content"][0]["text"]), (200, &json!("ok")), "{fields}: {reply}");
        assert_eq!(*seen.lock().unwrap(), prompt_ids(&expected), "{fields}");

        let steps = app.control.batches().len();
        let mut counted = body.clone();
        counted.as_object_mut().unwrap().remove("max_tokens");
        let count = post_to("/v1/messages/count_tokens", counted.to_string());
        let (status, _, count) = send_json(&app.router, count).await;
        assert_eq!((status.as_u16(), count), (200, json!({"input_tokens": prompt_ids(&expected).len()})));
        assert_eq!(app.control.batches().len(), steps, "counting asks no engine");
    }
}

#[tokio::test]
async fn what_clients_send_beside_is_accepted() {
    let app = app_that_says("ok");
    let tool = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    for fields in [
        json!({"metadata": {"user_id": "u"}, "service_tier": "auto", "custom": {"deep": [1]}, "system": null}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 2000}, "cache_control": {"type": "ephemeral"}}),
        json!({"tools": tool, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
        json!({"tools": [], "tool_choice": {"type": "none"}, "mcp_servers": [], "container": null}),
        json!({"temperature": 1, "top_p": 0.5, "top_k": 0, "stop_sequences": [], "stream": false}),
        json!({"stop_sequences": (0..16).map(|i| format!("never {i}")).collect::<Vec<_>>()}),
        json!({"output_config": {"effort": "low"}}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}),
    ] {
        let (status, _, body) = create(&app, &with(ask("Hi"), fields.clone())).await;
        assert_eq!((status.as_u16(), &body["content"][0]["text"]), (200, &json!("ok")), "{fields}: {body}");
    }
}

#[tokio::test]
async fn an_answer_is_held_to_a_schema() {
    let app = app_that_says("{\"yes\": true}");
    let schema = json!({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": false});
    let format =
        |schema: Value| json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let (status, _, body) = create(&app, &with(ask("Hi"), format(schema))).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["content"][0]["text"], "{\"yes\": true}");

    let (status, _, body) =
        create(&app, &with(ask("Hi"), format(json!({"type": "array", "uniqueItems": true})))).await;
    assert_eq!(status, 400);
    let message = body["error"]["message"].as_str().expect("a message");
    assert!(message.starts_with("output_config.format: ") && message.contains("uniqueItems"), "{message}");
}

/// Their clients ask for as much as any model could say.
#[tokio::test]
async fn an_answer_may_be_bounded_by_the_context() {
    let app = app(says(&[], 300));
    let (status, _, body) = create(&app, &with(ask("Hi"), json!({"max_tokens": 64_000}))).await;
    assert_eq!(
        (status.as_u16(), &body["stop_reason"]),
        (200, &json!("model_context_window_exceeded")),
        "{body}"
    );
    let usage = &body["usage"];
    assert_eq!(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap(), 600);
    let (_, _, body) = create(&app, &with(ask("Hi"), json!({"max_tokens": 3}))).await;
    assert_eq!((&body["stop_reason"], &body["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(3)));
    let (status, _, body) = create(&app, &ask(&"q ".repeat(700))).await;
    assert_eq!((status.as_u16(), &body["error"]["type"]), (400, &json!("invalid_request_error")), "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("600 tokens"), "{body}");
}

#[tokio::test]
async fn bad_bodies_are_refused_by_field() {
    let app = app_that_says("ok");
    let body = |fields: Value| with(ask("Hi"), fields);
    let content = |block: Value| body(json!({"messages": [{"role": "user", "content": [block]}]}));
    let without = |name: &str| {
        let mut body = ask("Hi");
        body.as_object_mut().unwrap().remove(name);
        body
    };
    for (body, field) in [
        (json!([1]), "the body"),
        (without("model"), "model is"),
        (without("max_tokens"), "max_tokens is"),
        (without("messages"), "messages is"),
        (body(json!({"model": 3})), "model:"),
        (body(json!({"max_tokens": 0})), "max_tokens:"),
        (body(json!({"max_tokens": "9"})), "max_tokens:"),
        (body(json!({"messages": []})), "messages:"),
        (body(json!({"messages": "Hi"})), "messages:"),
        (body(json!({"messages": ["Hi"]})), "messages[0]:"),
        (body(json!({"messages": [{"content": "a"}]})), "messages[0].role is"),
        (body(json!({"messages": [{"role": 1, "content": "a"}]})), "messages[0].role:"),
        (body(json!({"messages": [{"role": "tool", "content": "a"}]})), "messages[0].role:"),
        (body(json!({"messages": [{"role": "user"}]})), "messages[0].content is"),
        (body(json!({"messages": [{"role": "user", "content": 5}]})), "messages[0].content:"),
        (content(json!("Hi")), "messages[0].content[0]:"),
        (content(json!({"text": "Hi"})), "messages[0].content[0].type is"),
        (content(json!({"type": 1})), "messages[0].content[0].type:"),
        (content(json!({"type": "text"})), "messages[0].content[0].text is"),
        (content(json!({"type": "text", "text": {}})), "messages[0].content[0].text:"),
        (content(json!({"type": "image", "source": {}})), "messages[0].content[0].type:"),
        (content(json!({"type": "document", "source": {}})), "messages[0].content[0].type:"),
        (content(json!({"type": "tool_result", "tool_use_id": "x"})), "messages[0].content[0].type:"),
        (content(json!({"type": "thinking", "thinking": "x"})), "messages[0].content[0].type:"),
        (body(json!({"system": 5})), "system:"),
        (body(json!({"system": [{"type": "image"}]})), "system[0].type:"),
        (body(json!({"temperature": 1.5})), "temperature:"),
        (body(json!({"temperature": "hot"})), "temperature:"),
        (body(json!({"top_p": -0.1})), "top_p:"),
        (body(json!({"top_k": -1})), "top_k:"),
        (body(json!({"stream": "yes"})), "stream:"),
        (body(json!({"stop_sequences": "a"})), "stop_sequences:"),
        (body(json!({"stop_sequences": [1]})), "stop_sequences[0]:"),
        (body(json!({"stop_sequences": ["a", ""]})), "stop_sequences[1]:"),
        (body(json!({"stop_sequences": ["a".repeat(1025)]})), "stop_sequences[0]:"),
        (body(json!({"stop_sequences": vec!["a"; 17]})), "stop_sequences:"),
        (body(json!({"tools": {}})), "tools:"),
        (body(json!({"tool_choice": "any"})), "tool_choice:"),
        (body(json!({"tool_choice": {}})), "tool_choice.type is"),
        (body(json!({"tool_choice": {"type": "any"}})), "tool_choice:"),
        (body(json!({"tool_choice": {"type": "maybe"}})), "tool_choice.type:"),
        (body(json!({"container": "c"})), "container:"),
        (body(json!({"mcp_servers": [{}]})), "mcp_servers:"),
        (body(json!({"output_config": []})), "output_config:"),
        (body(json!({"output_config": {"format": 1}})), "output_config.format:"),
        (body(json!({"output_config": {"format": {}}})), "output_config.format.type is"),
        (body(json!({"output_config": {"format": {"type": "xml"}}})), "output_config.format.type:"),
        (
            body(json!({"output_config": {"format": {"type": "json_schema"}}})),
            "output_config.format.schema is",
        ),
    ] {
        let (status, headers, reply) = create(&app, &body).await;
        assert_eq!((status.as_u16(), &reply["type"]), (400, &json!("error")), "{body}: {reply}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
        assert!(reply["error"]["message"].as_str().is_some_and(|m| m.starts_with(field)), "{field} {reply}");
        assert_eq!(reply["request_id"].as_str().map(str::as_bytes), Some(headers["request-id"].as_bytes()));
    }
    assert_eq!(app.control.batches().len(), 0, "none of them reached the engine");
}

#[tokio::test]
async fn every_error_of_these_routes_is_said_as_their_clients_expect() {
    let app = app_that_says("ok");
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let model = with(ask("Hi"), json!({"model": "claude"})).to_string();
    for (request, status, kind) in [
        (post_to(PATH, model.clone()), 404, "not_found_error"),
        (post_to("/v1/messages/count_tokens", model), 404, "not_found_error"),
        (get(PATH), 405, "invalid_request_error"),
        (get("/v1/messages/batches"), 404, "not_found_error"),
        (post_to(PATH, vec![b' '; OPTIONS.max_body_bytes + 1]), 413, "request_too_large"),
        (post_to(PATH, vec![0xff; 3]), 400, "invalid_request_error"),
    ] {
        let uri = request.uri().clone();
        let (got, headers, body) = send_json(&app.router, request).await;
        assert_eq!((got.as_u16(), body["error"]["type"].as_str()), (status, Some(kind)), "{uri}: {body}");
        assert!(headers.contains_key("request-id") && headers["content-type"] == "application/json");
        let keys: Vec<&String> = body.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["type", "error", "request_id"], "{body}");
    }

    let loading = api::router(Server::new(MODEL, OPTIONS, Door::default()));
    for path in [PATH, "/v1/messages/count_tokens"] {
        let (status, headers, body) = send_json(&loading, post_to(path, ask("Hi").to_string())).await;
        assert_eq!((status.as_u16(), &body["error"]["type"]), (503, &json!("overloaded_error")));
        assert!(headers.contains_key("retry-after"));
    }
    // The door too.
    let keys = Keys::from_variable("test", "secret-key-1").expect("a sound key");
    let app = app_behind(Door { keys, ..Door::default() }, "ok");
    let (status, headers, body) = create(&app, &ask("Hi")).await;
    assert_eq!((status.as_u16(), &body["error"]["type"]), (401, &json!("authentication_error")));
    assert!(headers.contains_key("www-authenticate"));
    let mut request = post_to(PATH, ask("Hi").to_string());
    request.headers_mut().insert("x-api-key", "secret-key-1".parse().unwrap());
    assert_eq!(send(&app.router, request).await.0, 200);

    // Others keep their words.
    let (_, headers, body) =
        send_json(&loading, post_to("/v1/chat/completions", ask("Hi").to_string())).await;
    assert!(!headers.contains_key("request-id") && body["error"]["code"] == "model_loading", "{body}");
}

#[tokio::test]
async fn a_full_queue_is_an_overloaded_server() {
    let app = app_that_says("ok");
    app.control.allow(0);
    // One runs, and the queue holds two.
    let mut refused = None;
    let mut waiting = Vec::new();
    for _ in 0..200 {
        let router = app.router.clone();
        let mut request =
            tokio::spawn(async move { send_json(&router, post_to(PATH, ask("Hi").to_string())).await });
        match tokio::time::timeout(std::time::Duration::from_millis(50), &mut request).await {
            Ok(answer) => {
                refused = Some(answer.unwrap());
                break;
            }
            Err(_) => waiting.push(request),
        }
    }
    let (status, headers, body) = refused.expect("the queue is bounded");
    assert_eq!((status.as_u16(), &body["error"]["type"]), (529, &json!("overloaded_error")), "{body}");
    assert!(headers.contains_key("retry-after"));
    app.control.release();
    for request in waiting {
        assert_eq!(request.await.unwrap().0, 200);
    }
}

#[tokio::test]
async fn a_lost_device_is_the_last_event_of_a_stream() {
    let app = app_that_says("One, two, three");
    app.control.fail_wait_at(4);
    let events = events(&app, ask("Hi")).await;
    assert_eq!(events[0]["type"], "message_start");
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(last["error"]["message"].as_str().unwrap().contains("ring timeout"), "{last}");
    let (status, _, body) = create(&app, &ask("Hi")).await;
    assert_eq!((status.as_u16(), &body["error"]["type"]), (503, &json!("api_error")));
}
