//! Anthropic's wire format over the scripted runner: every event of a stream, every field, every error.

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use unicorn::api::{self, AccessPolicy, Keys, Server};
use unicorn::text::whole_parameters;

use crate::support::app::{
    App, MODEL, OPTIONS, app, app_that_says, app_that_shows_its_prompt, app_with_policy, prompt_ids,
    shows_its_prompt,
};
use crate::support::fake_runner::says;
use crate::support::http::{assert_all_free, events_of, post_to, send, send_json, until};
use crate::support::json::with;
use crate::support::lists::each_value;
use crate::support::tokenizers::tokenizer;
use crate::support::tools::{self, ROME, babbling, now, roll, weather};

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
async fn an_answer_has_the_anthropic_format() {
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

    // Tokens from the prefix cache are counted separately.
    let (_, _, body) = create(&app, &ask("Hi")).await;
    let (input, cached) = (&body["usage"]["input_tokens"], &body["usage"]["cache_read_input_tokens"]);
    assert!(cached.as_u64() > Some(0), "{body}");
    assert_eq!(input.as_u64().unwrap() + cached.as_u64().unwrap(), prompt as u64);
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_stream_sends_the_expected_events_in_order() {
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

        assert_eq!(take(&mut events), json!({"type": "ping"}));
        let start = take(&mut events);
        let message = &start["message"];
        assert_eq!((&start["type"], &message["type"]), (&json!("message_start"), &json!("message")));
        assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &json!(null)));
        assert_eq!((&message["role"], &message["model"]), (&json!("assistant"), &json!(MODEL)));
        assert!(message["usage"]["input_tokens"].is_u64(), "{start}");
        if !expected.is_empty() {
            let block = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
            assert_eq!(take(&mut events), block, "{fields}");
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
        assert_eq!(events, Vec::<Value>::new(), "no event may follow");
        assert_all_free(&app.engine).await;
    }
}

#[tokio::test]
async fn count_tokens_counts_the_prompt_of_the_conversation() {
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
        // A last message of the assistant is the beginning of the answer.
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
        assert_eq!(app.control.batches().len(), steps, "counting must not use the engine");
    }
}

/// A tool in Anthropic's format.
fn tool(tool: &Value) -> Value {
    let function = &tool["function"];
    let none = json!({"type": "object", "properties": {}});
    let mut tool =
        json!({"name": function["name"], "input_schema": function.get("parameters").unwrap_or(&none)});
    if let Some(description) = function.get("description") {
        tool["description"] = description.clone();
    }
    tool
}

fn ask_with_tools(more: Value) -> Value {
    let tools = json!([tool(&weather()), tool(&roll()), tool(&now())]);
    with(with(ask("Is it warm in Rome?"), json!({"tools": tools, "max_tokens": 1200})), more)
}

/// Builds the message from the events of a stream, without its usage.
fn message_of_events(events: Vec<Value>) -> Value {
    let mut events = events.into_iter();
    assert_eq!(events.next(), Some(json!({"type": "ping"})));
    let mut message = events.next().expect("a second event")["message"].take();
    let (mut blocks, mut json, mut open) = (Vec::<Value>::new(), String::new(), false);
    for mut event in events {
        let kind = event["type"].as_str().expect("a type").to_owned();
        if kind.starts_with("content_block") {
            assert_eq!(open, kind != "content_block_start", "{event}");
            assert_eq!(event["index"], blocks.len() - usize::from(open), "{event}");
        }
        match (kind.as_str(), blocks.last_mut()) {
            ("ping", _) => {}
            ("content_block_start", _) => {
                open = true;
                json.clear();
                blocks.push(event["content_block"].take());
            }
            ("content_block_delta", Some(block)) => match event["delta"]["type"].as_str() {
                Some("text_delta") => {
                    let text = [block["text"].as_str(), event["delta"]["text"].as_str()];
                    block["text"] = json!(text.map(|text| text.expect("text")).concat());
                }
                Some("input_json_delta") => {
                    assert_eq!(block["input"], json!({}));
                    json.push_str(event["delta"]["partial_json"].as_str().expect("JSON"));
                }
                other => panic!("{other:?}"),
            },
            ("content_block_stop", Some(block)) => {
                open = false;
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&whole_parameters(&json)).expect("JSON");
                }
            }
            ("message_delta", _) => {
                assert!(!open);
                for name in ["stop_reason", "stop_sequence"] {
                    message[name] = event["delta"][name].take();
                }
            }
            ("message_stop", _) => {}
            other => panic!("{other:?}"),
        }
    }
    message["content"] = json!(blocks);
    message
}

/// The content, stop reason and stop sequence of a message. Checks the ids of calls and removes them.
fn said(message: &Value) -> Value {
    let mut said = json!([message["content"], message["stop_reason"], message["stop_sequence"]]);
    let mut ids = Vec::new();
    for block in said[0].as_array_mut().expect("blocks").iter_mut().filter(|b| b["type"] == "tool_use") {
        let id = block["id"].take();
        assert!(id.as_str().is_some_and(|id| id.starts_with("toolu_")) && !ids.contains(&id), "{message}");
        ids.push(id);
    }
    said
}

/// The content of the answer to `body`. Checks that it is the same with and without streaming.
async fn answer_content(app: &App, body: Value) -> Value {
    let (status, _, whole) = create(app, &body).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!(said(&message_of_events(events(app, body).await)), said(&whole));
    assert_all_free(&app.engine).await;
    said(&whole)
}

fn use_of(name: &str, input: Value) -> Value {
    json!({"type": "tool_use", "id": null, "name": name, "input": input})
}

#[tokio::test]
async fn a_call_is_a_content_block_with_and_without_streaming() {
    let rome = use_of("get_weather", json!({"city": "Rome", "unit": "c"}));
    let both = format!("[{ROME}, {{ \"name\":\"roll\", \"parameters\": {{\"count\": 3}}}}]");
    for (text, blocks) in
        [(ROME.to_owned(), json!([rome])), (both, json!([rome, use_of("roll", json!({"count": 3}))]))]
    {
        let app = tools::app_that_says(&text);
        for choice in [json!(null), json!({"type": "auto"}), json!({"type": "any"})] {
            let said = answer_content(&app, ask_with_tools(json!({"tool_choice": choice}))).await;
            assert_eq!(said, json!([blocks, "tool_use", null]), "{choice}");
        }
    }
    let named = json!({"type": "tool", "name": "get_weather", "disable_parallel_tool_use": true});
    let said =
        answer_content(&tools::app_that_says(ROME), ask_with_tools(json!({"tool_choice": named}))).await;
    assert_eq!(said, json!([[rome], "tool_use", null]));
}

#[tokio::test]
async fn text_stays_text_if_tools_are_offered() {
    for text in ["It is { warm }.", " \n\nWarm", "½", ""] {
        let blocks = if text.is_empty() { json!([]) } else { json!([{"type": "text", "text": text}]) };
        let said = answer_content(&tools::app_that_says(text), ask_with_tools(json!({}))).await;
        assert_eq!(said, json!([blocks, "end_turn", null]));
    }
    let app = tools::app_that_says(ROME);
    let said = answer_content(&app, ask_with_tools(json!({"tool_choice": {"type": "none"}}))).await;
    assert_eq!(said[0], json!([{"type": "text", "text": ROME}]));
}

#[tokio::test]
async fn a_required_call_is_made_and_matches_its_schema() {
    let body = |choice: Value| ask_with_tools(json!({"tool_choice": choice}));
    for name in ["roll", "now"] {
        let choice = json!({"type": "tool", "name": name, "disable_parallel_tool_use": true});
        let message = create(&babbling(), &body(choice)).await.2;
        let said = said(&message);
        let input = &said[0][0]["input"];
        assert_eq!(said, json!([[use_of(name, input.clone())], "tool_use", null]));
        match name {
            "roll" => assert!(input["count"].as_u64().is_some_and(|n| (1..=9).contains(&n)), "{message}"),
            _ => assert_eq!(input, &json!({})),
        }
    }
    // Exactly one call is made if parallel calls are disabled.
    let app = tools::app_that_says(&format!("[{ROME}, {ROME}]"));
    let one = json!({"type": "any", "disable_parallel_tool_use": true});
    assert_eq!(create(&app, &body(one)).await.2["content"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn a_truncated_call_reports_why_it_was_cut() {
    let app = tools::app_that_says(ROME);
    let whole = ids(ROME);
    let rome = json!({"city": "Rome"});
    for (fields, inputs, reason, sequence) in [
        (json!({"max_tokens": whole - 6}), vec![json!({}), rome.clone()], "max_tokens", json!(null)),
        (json!({"stop_sequences": ["unit"]}), vec![rome], "stop_sequence", json!("unit")),
        (json!({"stop_sequences": ["Rom"]}), vec![json!({})], "stop_sequence", json!("Rom")),
    ] {
        let said = answer_content(&app, ask_with_tools(fields.clone())).await;
        assert_eq!((&said[1], &said[2]), (&json!(reason), &sequence), "{fields}: {said}");
        assert!(inputs.contains(&said[0][0]["input"]), "{fields}: {said}");
    }
    // A call begins only after its name, so before that the answer is text.
    let said = answer_content(&app, ask_with_tools(json!({"max_tokens": 3}))).await;
    assert!(said[0][0]["text"].as_str().is_some_and(|text| ROME.starts_with(text)), "{said}");
}

/// JSON numbers may be larger than any number type of Rust.
#[tokio::test]
async fn numbers_in_a_tool_input_keep_their_digits() {
    let input = "{\"n\": 123456789012345678901234567890, \"x\": 1.50}";
    let app = tools::app_that_says(&format!("{{\"name\": \"f\", \"parameters\": {input}}}"));
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let body = with(ask("Hi"), json!({"tools": tools, "max_tokens": 200}));
    let (_, _, bytes) = send(&app.router, post_to(PATH, body.to_string())).await;
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.contains(&format!("\"input\":{input}}}")), "{text}");
}

#[tokio::test]
async fn tools_and_results_are_in_the_prompt_and_in_its_count() {
    let (script, seen) = shows_its_prompt("ok");
    let app = tools::app(script);
    let result = |more: Value| with(json!({"type": "tool_result", "tool_use_id": "a"}), more);
    let text = |text: &str| json!({"type": "text", "text": text});
    for (blocks, expected) in [
        (json!([result(json!({"content": "21"}))]), "Result of now: 21"),
        (json!([result(json!({"content": [text("21"), text("dry")]}))]), "Result of now: 21\n\ndry"),
        (json!([result(json!({"content": "no clock", "is_error": true}))]), "Result of now: Error: no clock"),
        (
            json!([result(json!({"content": "21", "is_error": false})), text("And?")]),
            "Result of now: 21\n\nAnd?",
        ),
        // A text may also come before the result.
        (json!([text("Here:"), result(json!({"content": "21"}))]), "Here:\n\nResult of now: 21"),
    ] {
        let messages = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]},
            {"role": "user", "content": blocks},
        ]);
        let body = ask_with_tools(json!({"messages": messages}));
        let (status, _, reply) = create(&app, &body).await;
        assert_eq!((status.as_u16(), &reply["content"][0]["text"]), (200, &json!("ok")), "{reply}");
        let prompt = tokenizer().decode(&seen.lock().unwrap(), false);
        let turns = "<start_of_turn>model\n{\"name\": \"now\", \"parameters\": {}}<end_of_turn>\n<start_of_turn>user\n";
        let end = format!("{turns}{expected}<end_of_turn>\n<start_of_turn>model\n");
        assert!(prompt.ends_with(&end) && prompt.contains("- {\"name\":\"roll\""), "{prompt}");

        let count = post_to("/v1/messages/count_tokens", body.to_string());
        let (_, _, count) = send_json(&app.router, count).await;
        assert_eq!(count["input_tokens"], seen.lock().unwrap().len(), "{count}");
    }
}

#[tokio::test]
async fn an_answer_schema_works_together_with_tools() {
    let schema = json!({"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"], "additionalProperties": false});
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    for (text, block) in [
        (ROME, use_of("get_weather", json!({"city": "Rome", "unit": "c"}))),
        ("{\"warm\": true}", json!({"type": "text", "text": "{\"warm\": true}"})),
    ] {
        let said = answer_content(&tools::app_that_says(text), ask_with_tools(format.clone())).await;
        assert_eq!(said[0], json!([block]));
    }
}

#[tokio::test]
async fn other_fields_that_clients_send_are_accepted() {
    let app = app_that_says("ok");
    let tool = json!([{"name": "f", "type": "custom", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]);
    for fields in [
        json!({"metadata": {"user_id": "u"}, "service_tier": "auto", "custom": {"deep": [1]}, "system": null}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 2000}, "cache_control": {"type": "ephemeral"}}),
        json!({"tools": tool, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
        json!({"tools": [], "tool_choice": {"type": "none"}, "mcp_servers": [], "container": null}),
        json!({"temperature": 1, "top_p": 0.5, "top_k": 0, "stop_sequences": [], "stream": false}),
        json!({"stop_sequences": (0..32).map(|i| format!("never {i}")).collect::<Vec<_>>()}),
        json!({"output_config": {"effort": "low"}}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}),
    ] {
        let (status, _, body) = create(&app, &with(ask("Hi"), fields.clone())).await;
        assert_eq!((status.as_u16(), &body["content"][0]["text"]), (200, &json!("ok")), "{fields}: {body}");
    }
}

#[tokio::test]
async fn an_answer_matches_the_requested_schema() {
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

/// Anthropic's clients request as many tokens as any model could generate.
#[tokio::test]
async fn an_answer_with_a_large_max_tokens_ends_at_the_context_length() {
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
    assert!(body["error"]["message"].as_str().unwrap().contains("> 600 maximum"), "{body}");
}

/// Claude Code finds out from these words how many tokens to give up.
#[tokio::test]
async fn a_prompt_that_is_too_long_is_refused_with_both_numbers() {
    let app = app_that_says("x");
    let text = "q ".repeat(400);
    let counted = send_json(&app.router, post_to("/v1/messages/count_tokens", ask(&text).to_string())).await;
    let tokens = counted.2["input_tokens"].as_u64().expect("a number");
    let (status, _, error) = create(&app, &ask(&text)).await;
    assert_eq!(status, 400, "{error}");
    assert_eq!(error["error"]["message"], format!("prompt is too long: {tokens} tokens > 600 maximum"));
}

/// The line that Claude Code begins its system text with differs in every request.
#[tokio::test]
async fn the_billing_header_of_claude_code_is_not_in_the_prompt() {
    let billing =
        |n: u32| format!("x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n};");
    let block = |text: String| json!({"type": "text", "text": text});
    let told = |system: Value| async move {
        let (app, seen) = app_that_shows_its_prompt("x");
        let (status, _, answer) = create(&app, &with(ask("Hi"), json!({"system": system}))).await;
        assert_eq!(status, 200, "{answer}");
        seen.lock().expect("no test panics with it").clone()
    };
    let plain = told(json!("Be brief.")).await;
    assert!(tokenizer().decode(&plain, false).contains("Be brief."));
    for system in [
        json!([block(billing(7)), block("Be brief.".into())]),
        json!(format!("{}\nBe brief.", billing(8))),
        json!([block(format!("{}\n\nBe brief.", billing(9)))]),
    ] {
        assert_eq!(told(system.clone()).await, plain, "{system}");
    }
    let spoken = told(json!(format!("Explain {}", billing(1)))).await;
    assert!(tokenizer().decode(&spoken, false).contains("cch=1;"), "a text that only has the name");
}

#[tokio::test]
async fn invalid_bodies_are_refused_with_the_field() {
    let app = app_that_says("ok");
    let body = |fields: Value| with(ask("Hi"), fields);
    let content = |block: Value| body(json!({"messages": [{"role": "user", "content": [block]}]}));
    let tools = |tools: Value| body(json!({"tools": tools}));
    let call = json!({"type": "tool_use", "id": "a", "name": "f", "input": {}});
    let source = json!({"type": "base64", "data": "AA=="});
    let image = json!({"type": "image", "source": source});
    let hi = json!({"role": "user", "content": "Hi"});
    let uses = |call: Value| json!({"role": "assistant", "content": [call]});
    let called = |call: Value, result: Value| {
        let call = uses(with(json!({"type": "tool_use"}), call));
        body(json!({"messages": [hi, call, {"role": "user", "content": result}]}))
    };
    let result = |more: Value| {
        let result = with(json!({"type": "tool_result", "tool_use_id": "a"}), more);
        called(call.clone(), json!([result]))
    };
    let without = |name: &str| {
        let mut body = ask("Hi");
        body.as_object_mut().unwrap().remove(name);
        body
    };
    let choice = |choice: Value| body(json!({"tool_choice": choice}));
    let format = |format: Value| body(json!({"output_config": {"format": format}}));
    let strict = json!({"name": "f", "strict": true, "input_schema": {"type": "object", "not": {}}});
    let cases = [
        (json!([1]), "the body"),
        (json!({}), "messages is"),
        (without("max_tokens"), "max_tokens is"),
        (without("messages"), "messages is"),
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
        (content(image.clone()), "messages[0].content[0].type:"),
        (content(json!({"type": "document", "source": source})), "messages[0].content[0].type:"),
        (content(json!({"type": "image"})), "messages[0].content[0].source is"),
        (content(json!({"type": "image", "source": {}})), "messages[0].content[0].source.type is"),
        (
            content(json!({"type": "text", "text": "a", "source": {"type": "base64"}})),
            "messages[0].content[0].source.data is",
        ),
        (content(json!({"type": "tool_result"})), "messages[0].content[0].tool_use_id is"),
        (content(json!({"type": "tool_result", "tool_use_id": "x"})), "messages[0].content[0].tool_use_id:"),
        (content(call.clone()), "messages[0].content[0].type:"),
        (content(json!({"type": "server_tool_use"})), "messages[0].content[0].type:"),
        (called(json!({"name": "f", "input": {}}), json!([])), "messages[1].content[0].id is"),
        (called(json!({"id": "a", "input": {}}), json!([])), "messages[1].content[0].name is"),
        (called(json!({"id": "a", "name": "f"}), json!([])), "messages[1].content[0].input is"),
        (called(json!({"id": "a", "name": "f", "input": "{}"}), json!([])), "messages[1].content[0].input:"),
        (result(json!({"tool_use_id": "b"})), "messages[2].content[0].tool_use_id:"),
        (result(json!({"content": 21})), "messages[2].content[0].content:"),
        (result(json!({"content": [image]})), "messages[2].content[0].content[0].type:"),
        (result(json!({"content": [{"type": "tool_result"}]})), "messages[2].content[0].content[0].type:"),
        (result(json!({"is_error": "yes"})), "messages[2].content[0].is_error:"),
        (body(json!({"messages": [hi, uses(call.clone())]})), "messages: expected a tool_result"),
        (content(json!({"type": "thinking", "thinking": "x"})), "messages[0].content[0].type:"),
        (body(json!({"system": [{"type": "image"}]})), "system[0].type:"),
        (body(json!({"stop_sequences": [1]})), "stop_sequences[0]:"),
        (body(json!({"stop_sequences": ["a", ""]})), "stop_sequences[1]:"),
        (body(json!({"stop_sequences": ["a".repeat(1025)]})), "stop_sequences[0]:"),
        (body(json!({"tools": ["f"]})), "tools[0]:"),
        (tools(json!([{"type": "bash_20250124", "name": "bash"}])), "tools[0].type:"),
        (tools(json!([{"input_schema": {}}])), "tools[0].name is"),
        (tools(json!([{"name": "f"}])), "tools[0].input_schema is"),
        (tools(json!([{"name": "f", "input_schema": {"type": "string"}}])), "tools[0].input_schema.type:"),
        (tools(json!([{"name": "f", "input_schema": {}, "description": []}])), "tools[0].description:"),
        (tools(json!([tool(&now()), tool(&now())])), "tools[1].name:"),
        (tools(json!([strict])), "tools[0].input_schema: "),
        (choice(json!({})), "tool_choice.type is"),
        (choice(json!({"type": "any"})), "tool_choice: there are no tools"),
        (
            choice(json!({"type": "auto", "disable_parallel_tool_use": 1})),
            "tool_choice.disable_parallel_tool_use:",
        ),
        (ask_with_tools(json!({"tool_choice": {"type": "tool"}})), "tool_choice.name is"),
        (ask_with_tools(json!({"tool_choice": {"type": "tool", "name": "x"}})), "tool_choice.name:"),
        (choice(json!({"type": "maybe"})), "tool_choice.type:"),
        (format(json!(1)), "output_config.format:"),
        (format(json!({})), "output_config.format.type is"),
        (format(json!({"type": "xml"})), "output_config.format.type:"),
        (format(json!({"type": "json_schema"})), "output_config.format.schema is"),
    ];
    let invalid = json!({
        "model": [3], "max_tokens": [0, "9"], "messages": [[], "Hi"], "system": [5], "temperature": [1.5, "hot"],
        "top_p": [-0.1], "top_k": [-1], "stream": ["yes"], "stop_sequences": ["a", vec!["a"; 33]], "tools": [{}],
        "tool_choice": ["any"], "container": ["c"], "thread": [{"type": "create"}], "mcp_servers": [[{}]],
        "output_config": [[]],
    });
    let invalid = each_value(&invalid).map(|(name, fields)| (body(fields), format!("{name}:")));
    for (body, field) in cases.map(|(body, field)| (body, field.to_owned())).into_iter().chain(invalid) {
        let (status, headers, reply) = create(&app, &body).await;
        assert_eq!((status.as_u16(), &reply["type"]), (400, &json!("error")), "{body}: {reply}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
        assert!(reply["error"]["message"].as_str().is_some_and(|m| m.starts_with(&field)), "{field} {reply}");
        assert_eq!(reply["request_id"].as_str().map(str::as_bytes), Some(headers["request-id"].as_bytes()));
    }
    assert_eq!(app.control.batches().len(), 0, "no invalid body may reach the engine");
}

#[tokio::test]
async fn every_error_of_the_anthropic_routes_has_the_anthropic_format() {
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

    let loading = api::router(Server::new(MODEL, OPTIONS, AccessPolicy::default()));
    for path in [PATH, "/v1/messages/count_tokens"] {
        let (status, headers, body) = send_json(&loading, post_to(path, ask("Hi").to_string())).await;
        assert_eq!((status.as_u16(), &body["error"]["type"]), (503, &json!("overloaded_error")));
        assert!(headers.contains_key("retry-after"));
    }
    // With these details, Anthropic's SDK continues without threads.
    let thread = with(ask("Hi"), json!({"thread": {"type": "continue", "previous_message_id": "msg_1"}}));
    let (_, _, body) = create(&app, &thread).await;
    assert_eq!(body["error"]["details"], json!({"error_code": "thread_unsupported_request"}), "{body}");
    // Authentication errors have this format too.
    let keys = Keys::from_variable("test", "secret-key-1").expect("a valid key");
    let app = app_with_policy(AccessPolicy { keys, ..AccessPolicy::default() }, "ok");
    let (status, headers, body) = create(&app, &ask("Hi")).await;
    assert_eq!((status.as_u16(), &body["error"]["type"]), (401, &json!("authentication_error")));
    assert!(headers.contains_key("www-authenticate"));
    let mut request = post_to(PATH, ask("Hi").to_string());
    request.headers_mut().insert("x-api-key", "secret-key-1".parse().unwrap());
    assert_eq!(send(&app.router, request).await.0, 200);

    // Errors of the other routes keep their own format.
    let (_, headers, body) =
        send_json(&loading, post_to("/v1/chat/completions", ask("Hi").to_string())).await;
    assert!(!headers.contains_key("request-id") && body["error"]["code"] == "model_loading", "{body}");
}

#[tokio::test]
async fn a_full_queue_is_an_overloaded_error() {
    let app = app_that_says("ok");
    app.control.allow(0);
    // One request runs, and the queue holds two.
    let mut waiting = Vec::new();
    for n in 0..3 {
        let router = app.router.clone();
        waiting.push(tokio::spawn(
            async move { send_json(&router, post_to(PATH, ask("Hi").to_string())).await },
        ));
        let is_taken = |seen: &Value| seen["requests"]["running"] == 1 && seen["requests"]["waiting"] == n;
        until(&app, "it is taken", is_taken, || {}).await;
    }
    let (status, headers, body) = send_json(&app.router, post_to(PATH, ask("Hi").to_string())).await;
    assert_eq!((status.as_u16(), &body["error"]["type"]), (529, &json!("overloaded_error")), "{body}");
    assert!(headers.contains_key("retry-after"));
    app.control.release();
    for request in waiting {
        assert_eq!(request.await.unwrap().0, 200);
    }
}

#[tokio::test]
async fn a_lost_device_ends_a_stream_with_an_error_event() {
    let app = app_that_says("One, two, three");
    app.control.fail_wait_at(4);
    let events = events(&app, ask("Hi")).await;
    assert_eq!(events[1]["type"], "message_start");
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(last["error"]["message"].as_str().unwrap().contains("ring timeout"), "{last}");
    let (status, _, body) = create(&app, &ask("Hi")).await;
    assert_eq!((status.as_u16(), &body["error"]["type"]), (503, &json!("api_error")));
}
