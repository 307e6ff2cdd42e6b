//! OpenAI's Responses API over the scripted runner: every event of a stream, stored responses and their visibility,
//! every field and error.

use axum::body::Body;
use axum::http::{Method, Request};
use futures::StreamExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use unicorn::api::{AccessPolicy, Keys, Options, Server};

use crate::support::app::{
    App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, app, app_that_says, app_that_shows_its_prompt, app_with,
    app_with_policy, limits, loaded, prompt_ids, shows_its_prompt,
};
use crate::support::fake_runner::{HANG, says};
use crate::support::http::{assert_all_free, events_of, named_events, post_to, send_json};
use crate::support::json::with;
use crate::support::lists::each_value;
use crate::support::tokenizers::tokenizer;
use crate::support::tools::{self, ROME, babbling, now, roll, weather};

const PATH: &str = "/v1/responses";

fn ask(text: &str) -> Value {
    json!({"model": MODEL, "input": text})
}

async fn create(app: &App, body: Value) -> (u16, Value) {
    let (status, _, value) = send_json(&app.router, post_to(PATH, body.to_string())).await;
    (status.as_u16(), value)
}

async fn created(app: &App, body: Value) -> Value {
    let (status, value) = create(app, body).await;
    assert_eq!(status, 200, "{value}");
    value
}

/// Sends a request about a stored response, with a key.
async fn about(app: &App, method: Method, id: &Value, key: &str) -> (u16, Value) {
    let uri = format!("{PATH}/{}", id.as_str().expect("an id"));
    let request = Request::builder().method(method).uri(uri).header("authorization", format!("Bearer {key}"));
    let (status, _, value) = send_json(&app.router, request.body(Body::empty()).unwrap()).await;
    (status.as_u16(), value)
}

/// Access with the keys of two clients.
fn with_keys() -> AccessPolicy {
    AccessPolicy {
        keys: Keys::from_variable("test", "mine,other").expect("valid keys"),
        ..AccessPolicy::default()
    }
}

/// A request for a response, with a key.
fn asked(body: Value, key: &str) -> Request<Body> {
    let mut request = post_to(PATH, body.to_string());
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

/// An event of silence comes until the model may answer, in both formats that have one.
#[tokio::test]
async fn a_long_silence_has_events_that_say_nothing_new() {
    let message = json!({"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]});
    for (path, body, name, answer) in [
        (PATH, ask("Hi"), "response.in_progress", "response.output_item.added"),
        ("/v1/messages", message, "ping", "message_start"),
    ] {
        let ids = tokenizer().encode("ok", false).expect("encodes");
        let options = Options { event_interval: OPTIONS.keep_alive, ..OPTIONS };
        let app = app_with(limits(), options, DEFAULTS, says(&ids, END_OF_TURN));
        app.control.allow(0);
        let body = with(body, json!({"stream": true})).to_string();
        let response = app.router.clone().oneshot(post_to(path, body)).await.expect("handlers do not fail");
        let mut pieces = response.into_body().into_data_stream();
        let mut text = String::new();
        while let Some(piece) = tokio::time::timeout(HANG, pieces.next()).await.expect("no stream hangs") {
            text.push_str(std::str::from_utf8(&piece.expect("a sound body")).expect("UTF-8"));
            if text.matches(&format!("event: {name}\n")).count() == 4 {
                app.control.release();
            }
        }
        let events = named_events(text.as_bytes());
        let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().expect("a type")).collect();
        let first = names.iter().position(|other| *other == answer).expect("an answer");
        let waits = names[..first].iter().filter(|other| **other == name).count();
        assert!(waits >= 4, "{names:?}");
        let ended = ["response.completed", "message_stop"].contains(names.last().expect("an end"));
        assert!(ended, "{names:?}");
        let is_numbered = |(i, event): (usize, &Value)| event["sequence_number"] == i;
        assert!(path != PATH || events.iter().enumerate().all(is_numbered), "{names:?}");
    }
}

async fn events(app: &App, body: Value) -> Vec<Value> {
    let events = events_of(app, PATH, body).await;
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i, "{event}");
    }
    events
}

fn ids(text: &str) -> usize {
    tokenizer().encode(text, false).unwrap().len()
}

#[tokio::test]
async fn a_response_has_the_openai_format() {
    let text = "Größe: ½, 🦄!";
    let app = app_that_says(text);
    let fields = json!({"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 90, "top_p": 0.5, "user": "u"});
    let body = created(&app, with(ask("Hi"), fields)).await;
    let id = body["id"].as_str().and_then(|id| id.strip_prefix("resp_")).expect("an id");
    let prompt =
        prompt_ids("<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n").len();
    let answer = ids(text) + 1;
    let part = json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    for (name, expected) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!(MODEL)),
        ("error", json!(null)),
        ("incomplete_details", json!(null)),
        ("instructions", json!("Be brief.")),
        ("metadata", json!({"a": "b"})),
        ("max_output_tokens", json!(90)),
        ("top_p", json!(0.5)),
        ("temperature", json!(0.9)), // the model's default
        ("user", json!("u")),
        ("previous_response_id", json!(null)),
        ("store", json!(true)),
        ("background", json!(false)),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(true)),
        ("text", json!({"format": {"type": "text"}})),
        ("truncation", json!("disabled")),
        (
            "output",
            json!([{"id": format!("msg_{id}"), "type": "message", "status": "completed", "role": "assistant", "content": [part]}]),
        ),
        (
            "usage",
            json!({
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + answer,
            }),
        ),
    ] {
        assert_eq!(body[name], expected, "{name}: {body}");
    }
    assert!(body["completed_at"].as_u64() >= body["created_at"].as_u64() && body["created_at"].is_u64());
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_stream_sends_the_expected_events_in_order() {
    let text = "Vim: ½ or two?";
    for (app, fields, status) in [
        (app_that_says(text), json!({}), "completed"),
        (
            app_that_says(text),
            json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
            "completed",
        ),
        (app_that_says(""), json!({}), "completed"),
        (app_that_says(text), json!({"max_output_tokens": 2}), "incomplete"),
    ] {
        let events = events(&app, with(ask("Hi"), fields.clone())).await;
        let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let deltas = events.len() - 8;
        let mut expected = vec![
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ];
        expected.extend(vec!["response.output_text.delta"; deltas]);
        let last = format!("response.{status}");
        expected.extend([
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            &last,
        ]);
        assert_eq!(names, expected, "{fields}");

        let response = &events.last().unwrap()["response"];
        let item = &response["output"][0];
        let part = &item["content"][0];
        assert_eq!((&response["status"], &item["status"]), (&json!(status), &json!(status)));
        for event in &events[..2] {
            let begun = &event["response"];
            assert_eq!((&begun["id"], &begun["status"]), (&response["id"], &json!("in_progress")));
            assert_eq!((&begun["output"], &begun["usage"]), (&json!([]), &json!(null)));
        }
        assert_eq!(
            events[2]["item"],
            json!({"id": item["id"], "type": "message", "status": "in_progress", "role": "assistant", "content": []})
        );
        assert_eq!(
            events[3]["part"],
            json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        );
        let [text_done, part_done, item_done] = &events[4 + deltas..7 + deltas] else { panic!("{names:?}") };
        let (mut said, mut logprobs) = (String::new(), Vec::new());
        for event in &events[4..4 + deltas] {
            said.push_str(event["delta"].as_str().unwrap());
            logprobs.extend(event["logprobs"].as_array().unwrap().clone());
            assert_eq!(
                (&event["item_id"], &event["output_index"], &event["content_index"]),
                (&item["id"], &json!(0), &json!(0))
            );
        }
        assert_eq!((&text_done["text"], &part["text"]), (&json!(said), &json!(said)));
        assert_eq!((&text_done["logprobs"], &part["logprobs"]), (&json!(logprobs), &json!(logprobs)));
        assert_eq!((&part_done["part"], &item_done["item"]), (part, item));
        assert_eq!(text_done["item_id"], item["id"]);
        if fields["include"].is_array() {
            assert_eq!(
                (logprobs.len(), logprobs[0]["top_logprobs"].as_array().unwrap().len()),
                (ids(text), 1)
            );
        }

        let whole = created(&app, with(ask("Hi"), fields)).await;
        assert_eq!((&whole["output"][0]["content"], &whole["status"]), (&item["content"], &json!(status)));
        assert_eq!(whole["incomplete_details"], response["incomplete_details"]);
        if status == "incomplete" {
            assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
        }
        assert_eq!(
            about(&app, Method::GET, &response["id"], "").await,
            (200, response.clone()),
            "a streamed response must be stored"
        );
        assert_all_free(&app.engine).await;
    }
}

/// A tool in the format of this API.
fn tool(tool: &Value) -> Value {
    with(json!({"type": "function"}), tool["function"].clone())
}

fn ask_with_tools(more: Value) -> Value {
    with(
        with(ask("Is it warm in Rome?"), json!({"tools": [tool(&weather()), tool(&roll()), tool(&now())]})),
        more,
    )
}

/// The name, arguments and status of each call in a response.
fn calls_of(response: &Value) -> Value {
    let mut ids = Vec::new();
    let call = |item: &Value| {
        assert_eq!(item["type"], "function_call", "{response}");
        for (name, prefix) in [("id", "fc_"), ("call_id", "call_")] {
            let id = item[name].as_str().filter(|id| id.starts_with(prefix)).expect("an id").to_owned();
            assert!(!ids.contains(&id), "{response}");
            ids.push(id);
        }
        json!([item["name"], item["arguments"], item["status"]])
    };
    response["output"].as_array().expect("items").iter().map(call).collect()
}

/// The calls in the answer to `body`. Checks that they are the same with and without streaming, and that the events are
/// in order.
async fn calls_of_answer(app: &App, body: Value) -> (Value, Value) {
    let whole = created(app, body.clone()).await;
    let events = events(app, body).await;
    let response = &events.last().expect("events")["response"];
    assert_eq!((calls_of(&whole), &whole["status"]), (calls_of(response), &response["status"]));
    assert_eq!(about(app, Method::GET, &response["id"], "").await, (200, response.clone()));

    let mut rest = events[2..events.len() - 1].iter().peekable();
    for (at, item) in response["output"].as_array().expect("items").iter().enumerate() {
        let added = rest.next().expect("an item");
        let begun = with(item.clone(), json!({"status": "in_progress", "arguments": ""}));
        assert_eq!(
            (&added["type"], &added["output_index"]),
            (&json!("response.output_item.added"), &json!(at))
        );
        assert_eq!(added["item"], begun);
        let (mut written, mut deltas) = (String::new(), 0);
        while let Some(delta) = rest.next_if(|e| e["type"] == "response.function_call_arguments.delta") {
            assert_eq!((&delta["item_id"], &delta["output_index"]), (&item["id"], &json!(at)));
            written.push_str(delta["delta"].as_str().expect("text"));
            deltas += 1;
        }
        let (done, item_done) = (rest.next().expect("an end"), rest.next().expect("an item's end"));
        assert_eq!(done["type"], "response.function_call_arguments.done");
        assert_eq!((&done["item_id"], &done["output_index"]), (&item["id"], &json!(at)));
        assert_eq!((&done["arguments"], &item["arguments"]), (&json!(written), &json!(written)));
        assert!(deltas > 1 || written == "{}", "arguments must arrive in several deltas");
        assert_eq!(item_done["type"], "response.output_item.done");
        assert_eq!((&item_done["item"], &item_done["output_index"]), (item, &json!(at)));
    }
    assert_eq!(rest.next(), None);
    assert_all_free(&app.engine).await;
    (calls_of(&whole), whole)
}

#[tokio::test]
async fn a_call_is_an_output_item_with_and_without_streaming() {
    let rome = json!(["get_weather", "{\"city\": \"Rome\", \"unit\": \"c\"}", "completed"]);
    let three = json!(["roll", "{\"count\": 3}", "completed"]);
    let both = format!("[{ROME}, {{ \"name\":\"roll\", \"parameters\": {{\"count\": 3}}}}]");
    for (text, calls) in [(ROME.to_owned(), json!([rome])), (both, json!([rome, three]))] {
        let app = tools::app_that_says(&text);
        for choice in [json!("auto"), json!("required"), json!(null)] {
            let (called, response) =
                calls_of_answer(&app, ask_with_tools(json!({"tool_choice": choice}))).await;
            assert_eq!((called, &response["status"]), (calls.clone(), &json!("completed")));
        }
        // Tokens of a call have no log probabilities.
        let logprobs = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1});
        assert_eq!(calls_of_answer(&app, ask_with_tools(logprobs)).await.0, calls);
    }
    let app = tools::app_that_says(ROME);
    let whole = ids(ROME);
    let (called, response) =
        calls_of_answer(&app, ask_with_tools(json!({"max_output_tokens": whole - 6}))).await;
    assert!(called[0][1].as_str().is_some_and(|json| json.starts_with("{\"city\"") && !json.ends_with('}')));
    assert_eq!((&called[0][2], &response["status"]), (&json!("incomplete"), &json!("incomplete")));
}

#[tokio::test]
async fn text_stays_text_if_tools_are_offered() {
    let text_of = |response: &Value| response["output"][0]["content"][0].clone();
    for text in ["It is { warm }.", " \n\nWarm", "½", "{", ""] {
        let app = tools::app_that_says(text);
        // Log probabilities of text include the tokens that arrived before the text was known not to be a call.
        let fields =
            json!({"include": ["message.output_text.logprobs"], "max_output_tokens": ids(text).max(1)});
        for fields in [json!({}), fields] {
            if text == "{" && fields == json!({}) {
                continue; // an answer that begins like a call is forced to be one
            }
            let body = ask_with_tools(fields);
            let whole = created(&app, body.clone()).await;
            let events = events(&app, body).await;
            let part = text_of(&events.last().unwrap()["response"]);
            assert_eq!((&text_of(&whole), &part["text"]), (&part, &json!(text)));
            let deltas: Vec<&Value> =
                events.iter().filter(|e| e["type"] == "response.output_text.delta").collect();
            let said: String = deltas.iter().map(|delta| delta["delta"].as_str().unwrap()).collect();
            let told: Vec<Value> =
                deltas.iter().flat_map(|delta| delta["logprobs"].as_array().unwrap().clone()).collect();
            assert_eq!((json!(said), json!(told)), (part["text"].clone(), part["logprobs"].clone()));
        }
    }
    let app = tools::app_that_says(ROME);
    assert_eq!(text_of(&created(&app, ask_with_tools(json!({"tool_choice": "none"}))).await)["text"], ROME);
}

#[tokio::test]
async fn a_required_call_is_made_and_the_request_fields_are_repeated() {
    let allowed = |mode: &str| json!({"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]});
    for (choice, name) in
        [(json!({"type": "function", "name": "roll"}), "roll"), (allowed("required"), "now")]
    {
        let fields = json!({"tool_choice": choice, "parallel_tool_calls": false});
        for app in [tools::app_that_says(ROME), babbling()] {
            let response = created(&app, ask_with_tools(fields.clone())).await;
            assert_eq!(
                (&response["tool_choice"], &response["parallel_tool_calls"]),
                (&choice, &json!(false))
            );
            let calls = calls_of(&response);
            assert_eq!((calls.as_array().unwrap().len(), &calls[0][0]), (1, &json!(name)), "{response}");
        }
    }
    let app = tools::app_that_says("It is.");
    let response = created(&app, ask_with_tools(json!({"tool_choice": allowed("auto")}))).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "It is.");

    let app = tools::app_that_says(ROME);
    let response = created(&app, ask_with_tools(json!({"tool_choice": "required"}))).await;
    assert_eq!(response["tool_choice"], "required");
    let unsaid = json!({"description": null, "strict": false});
    assert_eq!(response["tools"][1], with(unsaid, tool(&roll())));
    let nothing = json!({"type": "object", "properties": {}});
    assert_eq!(response["tools"][2]["parameters"], nothing, "the parameters that the model got");
}

#[tokio::test]
async fn a_conversation_continues_after_calls() {
    let (script, seen) = shows_its_prompt(&format!("[{ROME}, {{\"name\": \"now\", \"parameters\": {{}}}}]"));
    let app = tools::app(script);
    let first = created(&app, ask_with_tools(json!({"instructions": "I"}))).await;
    let outputs = [1, 0].map(|i| {
        let id = &first["output"][i]["call_id"];
        json!({"type": "function_call_output", "call_id": id, "output": format!("result {i}")})
    });
    let next = json!({"previous_response_id": first["id"], "input": outputs, "instructions": "J"});
    let second = created(&app, ask_with_tools(next)).await;
    let prompt = tokenizer().decode(&seen.lock().unwrap(), false);
    let end = concat!(
        "Is it warm in Rome?<end_of_turn>\n<start_of_turn>model\n",
        "[{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Rome\", \"unit\": \"c\"}}, {\"name\": \"now\", \"parameters\": {}}]<end_of_turn>\n",
        "<start_of_turn>user\nResult of get_weather: result 0\nResult of now: result 1<end_of_turn>\n<start_of_turn>model\n",
    );
    assert!(
        prompt.starts_with("<bos><start_of_turn>user\nJ\n\nYou can") && prompt.ends_with(end),
        "{prompt}"
    );

    // A client that keeps the conversation itself sends the same input.
    let mut input = vec![json!({"role": "user", "content": "Is it warm in Rome?"})];
    input.extend(first["output"].as_array().unwrap().iter().cloned().chain(outputs.clone()));
    created(&app, ask_with_tools(json!({"instructions": "J", "input": input}))).await;
    assert_eq!(tokenizer().decode(&seen.lock().unwrap(), false), prompt);

    // A second turn of calls follows the first one.
    let output = json!({"type": "function_call_output", "call_id": second["output"][1]["call_id"], "output": [{"type": "input_text", "text": "10:00"}]});
    created(&app, ask_with_tools(json!({"previous_response_id": second["id"], "input": [output]}))).await;
    let prompt = tokenizer().decode(&seen.lock().unwrap(), false);
    assert!(
        prompt.ends_with("<start_of_turn>user\nResult of now: 10:00<end_of_turn>\n<start_of_turn>model\n"),
        "{prompt}"
    );
}

#[tokio::test]
async fn the_input_items_of_a_response_can_be_listed() {
    let app = tools::app_that_says(ROME);
    let first = created(&app, ask_with_tools(json!({}))).await;
    let call = &first["output"][0];
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "21"});
    let parsed = json!({"type": "function_call", "call_id": "a", "name": "roll", "arguments": {"count": 1}});
    let input = json!([output, {"role": "assistant", "content": "Yes."}, parsed, {"type": "reasoning", "summary": []}, {"role": "user", "id": "mine", "content": [{"type": "input_text", "text": "And?"}]}]);
    let second =
        created(&app, ask_with_tools(json!({"previous_response_id": first["id"], "input": input}))).await;

    let list = async |query: &str| {
        let at = json!(format!("{}/input_items{query}", second["id"].as_str().unwrap()));
        about(&app, Method::GET, &at, "").await
    };
    let (status, all) = list("?order=asc").await;
    assert_eq!((status, &all["object"], &all["has_more"]), (200, &json!("list"), &json!(false)), "{all}");
    let items = all["data"].as_array().unwrap().clone();
    assert_eq!((&all["first_id"], &all["last_id"]), (&items[0]["id"], &json!("mine")));
    let part = |kind: &str, text: &str| json!({"type": kind, "text": text});
    let question = json!([part("input_text", "Is it warm in Rome?")]);
    let answered = with(part("output_text", "Yes."), json!({"annotations": [], "logprobs": []}));
    for (item, expected) in items.iter().zip([
        json!({"role": "user", "content": question, "type": "message"}),
        call.clone(),
        output,
        json!({"role": "assistant", "content": [answered], "type": "message"}),
        with(parsed, json!({"arguments": "{\"count\":1}"})),
        json!({"role": "user", "content": [part("input_text", "And?")], "type": "message", "id": "mine"}),
    ]) {
        let unsaid = json!({"status": "completed", "id": item["id"]});
        assert_eq!(*item, with(unsaid, expected));
        assert!(item["id"].as_str().is_some_and(|id| !id.is_empty()));
    }
    assert_eq!(items.len(), 6, "reasoning items are not stored");

    // The items are listed in pages, the last item first.
    let (mut pages, mut after) = (Vec::new(), String::new());
    loop {
        let (_, page) = list(&format!("?limit=2{after}")).await;
        pages.extend(page["data"].as_array().unwrap().clone());
        after = format!("&after={}", page["last_id"].as_str().unwrap());
        if page["has_more"] == false {
            break;
        }
        assert!(pages.len() < items.len(), "{page}");
    }
    let reversed: Vec<Value> = items.iter().rev().cloned().collect();
    assert_eq!((&pages, &list("").await.1["data"]), (&reversed, &json!(reversed)));
    let none = json!({"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": false});
    assert_eq!(list("?order=asc&after=mine").await, (200, none));

    for (query, param) in [
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?limit=x", "limit"),
        ("?order=up", "order"),
        ("?after=x", "after"),
    ] {
        let (status, value) = list(query).await;
        assert_eq!((status, &value["error"]["param"]), (400, &json!(param)), "{value}");
    }
}

#[tokio::test]
async fn unsupported_requests_about_a_stored_response_are_refused() {
    let app = app_with_policy(with_keys(), "ok");
    let (_, _, body) = send_json(&app.router, asked(ask("Hi"), "mine")).await;
    let id = body["id"].as_str().unwrap().to_owned();
    let at = |path: &str| json!(format!("{id}{path}"));
    for (path, status, param) in [
        ("", 200, None),
        ("?stream=false&include=reasoning.encrypted_content", 200, None),
        ("?stream=true", 400, Some("stream")),
        ("?stream=maybe", 400, Some("stream")),
    ] {
        let (got, value) = about(&app, Method::GET, &at(path), "mine").await;
        assert_eq!((got, value["error"]["param"].as_str()), (status, param), "{path}: {value}");
    }
    let (status, value) = about(&app, Method::POST, &at("/cancel"), "mine").await;
    assert_eq!((status, &value["error"]["message"]), (400, &json!("Cannot cancel a synchronous response.")));
    // A client cannot see the responses of other clients.
    for (method, path) in
        [(Method::POST, "/cancel"), (Method::GET, "/input_items"), (Method::GET, "?stream=true")]
    {
        let (status, value) = about(&app, method, &at(path), "other").await;
        assert_eq!((status, &value["error"]["code"]), (404, &json!("not_found")), "{value}");
    }
}

#[tokio::test]
async fn a_conversation_continues_a_response_without_its_instructions() {
    let (app, seen) = app_that_shows_its_prompt("ok");
    let open = "<end_of_turn>\n<start_of_turn>model\n";
    let part = |kind: &str, text: &str| json!({"type": kind, "text": text});
    let input = json!([
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [part("input_text", "a"), part("input_text", "b")]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part("output_text", "c")]},
        {"role": "user", "content": "d"},
    ]);
    let fields = json!({"input": input, "instructions": "I"});
    let first = created(&app, with(ask(""), fields)).await;
    let turns = format!("ab{open}c<end_of_turn>\n<start_of_turn>user\nd{open}");
    assert_eq!(*seen.lock().unwrap(), prompt_ids(&format!("<start_of_turn>user\nI\n\nD\n\n{turns}")));

    let next = json!({"previous_response_id": first["id"], "instructions": "J"});
    let second = created(&app, with(ask("e"), next)).await;
    let turns = format!("{turns}ok<end_of_turn>\n<start_of_turn>user\ne{open}");
    assert_eq!(*seen.lock().unwrap(), prompt_ids(&format!("<start_of_turn>user\nJ\n\nD\n\n{turns}")));
    assert_eq!(second["previous_response_id"], first["id"]);

    // A response continues an earlier one even if the response between them was deleted, and two responses may continue
    // the same one.
    assert_eq!(about(&app, Method::DELETE, &first["id"], "").await.0, 200);
    for _ in 0..2 {
        created(&app, with(ask("f"), json!({"previous_response_id": second["id"], "store": false}))).await;
        let turns = format!("{turns}ok<end_of_turn>\n<start_of_turn>user\nf{open}");
        assert_eq!(*seen.lock().unwrap(), prompt_ids(&format!("<start_of_turn>user\nD\n\n{turns}")));
    }
}

#[tokio::test]
async fn a_stored_response_is_visible_to_its_own_client_only() {
    let app = app_with_policy(with_keys(), "ok");
    let (_, _, body) = send_json(&app.router, asked(ask("Hi"), "mine")).await;
    let id = &body["id"];
    assert_eq!(about(&app, Method::GET, id, "mine").await, (200, body.clone()));

    let not_found = |value: &Value| {
        let message = format!("Response with id '{}' not found.", id.as_str().unwrap());
        value["error"]["message"] == message && value["error"]["type"] == "invalid_request_error"
    };
    for method in [Method::GET, Method::DELETE] {
        let (status, value) = about(&app, method, id, "other").await;
        assert!(status == 404 && not_found(&value), "{value}");
    }
    let next = with(ask("more"), json!({"previous_response_id": id}));
    let (status, _, value) = send_json(&app.router, asked(next.clone(), "other")).await;
    assert_eq!(
        (status.as_u16(), &value["error"]["code"]),
        (400, &json!("previous_response_not_found")),
        "{value}"
    );
    assert_eq!(value["error"]["param"], "previous_response_id");
    let message = format!("Previous response with id '{}' not found.", id.as_str().unwrap());
    assert_eq!(value["error"]["message"], message);
    assert_eq!(send_json(&app.router, asked(next, "mine")).await.0, 200);

    let gone = json!({"id": id, "object": "response", "deleted": true});
    assert_eq!(about(&app, Method::DELETE, id, "mine").await, (200, gone));
    for method in [Method::GET, Method::DELETE] {
        let (status, value) = about(&app, method, id, "mine").await;
        assert!(status == 404 && not_found(&value), "{value}");
    }
}

#[tokio::test]
async fn responses_are_stored_only_if_requested_and_up_to_a_limit() {
    let ok = tokenizer().encode("ok", false).unwrap();
    let with_room = |entries, bytes| {
        let options = Options { stored_responses: entries, stored_response_bytes: bytes, ..OPTIONS };
        app_with(limits(), options, DEFAULTS, says(&ok, 106))
    };
    let app = with_room(2, 1 << 20);
    let mut kept = Vec::new();
    for i in 0..3 {
        kept.push(created(&app, ask(&format!("q{i}"))).await["id"].clone());
    }
    assert_eq!(about(&app, Method::GET, &kept[0], "").await.0, 404, "the oldest response must be evicted");
    assert_eq!(about(&app, Method::GET, &kept[2], "").await.0, 200);
    let body = created(&app, with(ask("x"), json!({"store": false}))).await;
    assert_eq!(body["store"], false);
    assert_eq!(about(&app, Method::GET, &body["id"], "").await.0, 404);

    for (app, known) in [(with_room(0, 1 << 20), true), (with_room(9, 100), false)] {
        let body = created(&app, ask("x")).await;
        assert_eq!(body["store"], false, "a response that is not stored must say so");
        let events = events(&app, ask("x")).await;
        assert_eq!(events[0]["response"]["store"], !known);
        assert_eq!(events.last().unwrap()["response"]["store"], false);
        assert_eq!(about(&app, Method::GET, &body["id"], "").await.0, 404);
    }
}

#[tokio::test]
async fn a_client_cannot_evict_the_stored_responses_of_others() {
    let ok = tokenizer().encode("ok", false).unwrap();
    let options = Options { stored_responses: 6, ..OPTIONS };
    let app = loaded(Server::new(MODEL, options, with_keys()), limits(), DEFAULTS, says(&ok, 106));
    let keep = async |key: &str| {
        let (status, _, body) = send_json(&app.router, asked(ask("Hi"), key)).await;
        assert_eq!((status.as_u16(), &body["store"]), (200, &json!(true)));
        body["id"].clone()
    };
    let mut mine = Vec::new();
    for _ in 0..3 {
        mine.push(keep("mine").await);
    }
    let mut others = Vec::new();
    for _ in 0..20 {
        others.push(keep("other").await);
    }
    for id in &mine {
        assert_eq!(
            about(&app, Method::GET, id, "mine").await.0,
            200,
            "half of the room is reserved for the first client"
        );
    }
    for (i, id) in others.iter().enumerate() {
        let kept = about(&app, Method::GET, id, "other").await.0 == 200;
        assert_eq!(kept, i >= 17, "only the second client's oldest responses may be evicted: {i}");
    }
}

#[tokio::test]
async fn an_answer_matches_the_requested_format() {
    let app = app_that_says("{\"yes\": true}");
    let schema = json!({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": false});
    for format in [
        json!({"type": "json_schema", "name": "v", "schema": schema, "strict": true}),
        json!({"type": "json_object"}),
    ] {
        let body = created(&app, with(ask("Hi"), json!({"text": {"format": format}}))).await;
        assert_eq!(body["output"][0]["content"][0]["text"], "{\"yes\": true}");
        assert_eq!(body["text"], json!({"format": format}), "repeated");
    }
    let format = json!({"type": "json_schema", "name": "v", "schema": {"type": "array", "uniqueItems": true}, "strict": true});
    let (status, body) = create(&app, with(ask("Hi"), json!({"text": {"format": format}}))).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("text.format")));
    assert!(body["error"]["message"].as_str().unwrap().contains("uniqueItems"), "{body}");
}

#[tokio::test]
async fn other_fields_that_clients_send_are_accepted() {
    let app = app_that_says("ok");
    let tool = json!([{"type": "function", "name": "f", "parameters": {}}]);
    for fields in [
        json!({"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "custom": {"deep": [1]}}),
        json!({"tools": tool, "tool_choice": "auto", "parallel_tool_calls": false, "max_tool_calls": 3}),
        json!({"background": false, "conversation": null, "truncation": "auto", "service_tier": "flex"}),
        json!({"stream_options": {"include_obfuscation": false}, "prompt_cache_key": "k", "safety_identifier": "s"}),
        json!({"text": {"verbosity": "low"}, "temperature": 0, "top_logprobs": 0, "metadata": {}}),
    ] {
        let body = created(&app, with(ask("Hi"), fields.clone())).await;
        assert_eq!(body["output"][0]["content"][0]["text"], "ok", "{fields}");
    }
}

#[tokio::test]
async fn invalid_bodies_are_refused_with_the_field() {
    let app = app_that_says("ok");
    let body = |fields: Value| with(ask("Hi"), fields);
    let item = |item: Value| body(json!({"input": [item]}));
    let part = |part: Value| item(json!({"role": "user", "content": [part]}));
    let call = |fields: Value| item(with(json!({"type": "function_call"}), fields));
    let output = |fields: Value| item(with(json!({"type": "function_call_output"}), fields));
    let tools = |tools: Value| body(json!({"tools": tools}));
    let choice = |choice: Value| body(json!({"tool_choice": choice}));
    let format = |format: Value| body(json!({"text": {"format": format}}));
    let image = json!({"type": "input_image", "image_url": "AA=="});
    let without_file = json!({"type": "input_image"});
    let strict = json!({"type": "function", "name": "f", "parameters": {"not": {}}, "strict": true});
    let schema = json!({"type": "json_schema"});
    let cases = [
        (json!({}), "input", "missing_required_parameter"),
        (json!({"model": MODEL}), "input", "missing_required_parameter"),
        (item(json!("Hi")), "input[0]", "invalid_value"),
        (item(json!({"content": "Hi"})), "input[0].role", "missing_required_parameter"),
        (item(json!({"role": "tool", "content": "Hi"})), "input[0].role", "invalid_value"),
        (item(json!({"role": "user"})), "input[0].content", "missing_required_parameter"),
        (item(json!({"role": "user", "content": 1})), "input[0].content", "invalid_value"),
        (item(json!({"type": 1})), "input[0].type", "invalid_value"),
        (item(json!({"type": "smell"})), "input[0].type", "invalid_value"),
        (item(json!({"type": "custom_tool_call"})), "input[0].type", "unsupported_value"),
        (call(json!({"name": "f"})), "input[0].call_id", "missing_required_parameter"),
        (call(json!({"call_id": 1, "name": "f"})), "input[0].call_id", "invalid_value"),
        (call(json!({"call_id": "a"})), "input[0].name", "missing_required_parameter"),
        (call(json!({"call_id": "a", "name": "f", "arguments": 1})), "input[0].arguments", "invalid_value"),
        (output(json!({"output": "x"})), "input[0].call_id", "missing_required_parameter"),
        (output(json!({"call_id": "a"})), "input[0].output", "missing_required_parameter"),
        (output(json!({"call_id": "a", "output": 1})), "input[0].output", "invalid_value"),
        (
            output(json!({"call_id": "a", "output": [without_file]})),
            "input[0].output[0].image_url",
            "missing_required_parameter",
        ),
        (output(json!({"call_id": "a", "output": "x"})), "input[0].call_id", "invalid_value"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type", "unsupported_value"),
        (part(json!("Hi")), "input[0].content[0]", "invalid_value"),
        (part(json!({"text": "Hi"})), "input[0].content[0].type", "missing_required_parameter"),
        (part(json!({"type": "input_text"})), "input[0].content[0].text", "missing_required_parameter"),
        (part(json!({"type": "input_text", "text": 1})), "input[0].content[0].text", "invalid_value"),
        (part(image.clone()), "input[0].content[0].type", "unsupported_value"),
        (
            part(with(image.clone(), json!({"file_id": "f"}))),
            "input[0].content[0].file_id",
            "unsupported_value",
        ),
        (
            part(json!({"type": "input_text", "text": "a", "file_id": 1})),
            "input[0].content[0].file_id",
            "unsupported_value",
        ),
        (part(json!({"type": "input_file"})), "input[0].content[0].type", "unsupported_value"),
        (part(json!({"type": "smell"})), "input[0].content[0].type", "invalid_value"),
        (body(json!({"include": [1]})), "include[0]", "invalid_value"),
        (
            body(json!({"previous_response_id": "resp_x"})),
            "previous_response_id",
            "previous_response_not_found",
        ),
        (body(json!({"background": true})), "background", "unsupported_value"),
        (body(json!({"conversation": "conv_1"})), "conversation", "unsupported_value"),
        (body(json!({"prompt": {"id": "p"}})), "prompt", "unsupported_value"),
        (tools(json!([{"type": "function"}])), "tools[0].name", "missing_required_parameter"),
        (tools(json!([tool(&now()), tool(&now())])), "tools[1].name", "invalid_value"),
        (tools(json!([strict])), "tools[0].parameters", "invalid_value"),
        (choice(json!({"type": "function"})), "tool_choice.name", "missing_required_parameter"),
        (choice(json!({"type": "function", "name": "f"})), "tool_choice.name", "invalid_value"),
        (choice(json!({"type": "web_search"})), "tool_choice.type", "unsupported_value"),
        (
            choice(json!({"type": "allowed_tools", "mode": "auto"})),
            "tool_choice.tools",
            "missing_required_parameter",
        ),
        (format(json!("text")), "text.format", "invalid_value"),
        (format(json!({})), "text.format.type", "missing_required_parameter"),
        (format(json!({"type": "xml"})), "text.format.type", "invalid_value"),
        (
            format(with(schema.clone(), json!({"schema": {}}))),
            "text.format.name",
            "missing_required_parameter",
        ),
        (format(with(schema, json!({"name": "x"}))), "text.format.schema", "missing_required_parameter"),
    ];
    let invalid = json!({
        "model": [3], "input": [3, []], "instructions": [["x"]], "max_output_tokens": [0], "temperature": [2.5],
        "top_p": ["1"], "top_logprobs": [21], "include": ["x"], "stream": [1], "store": ["no"], "metadata": [[]],
        "user": [1], "prompt_cache_key": [1], "safety_identifier": [1], "parallel_tool_calls": [1],
        "previous_response_id": [1], "truncation": ["some"], "tools": [{}], "tool_choice": ["required", "maybe"],
        "text": ["x"],
    });
    let invalid = each_value(&invalid).map(|(name, fields)| (body(fields), name, "invalid_value"));
    for (body, param, code) in cases.into_iter().chain(invalid) {
        let (status, reply) = create(&app, body.clone()).await;
        let error = &reply["error"];
        let found = (status, error["param"].as_str(), error["code"].as_str(), error["type"].as_str());
        let expected = (400, Some(param), Some(code), Some("invalid_request_error"));
        assert_eq!(found, expected, "{body}: {reply}");
    }
    assert_eq!(app.control.batches().len(), 0, "no invalid body may reach the engine");
    let (status, reply) = create(&app, body(json!({"model": "gpt-5"}))).await;
    assert_eq!((status, &reply["error"]["code"]), (404, &json!("model_not_found")));
}

#[tokio::test]
async fn a_lost_device_ends_a_response_as_failed() {
    let app = app_that_says("One, two, three");
    app.control.fail_wait_at(4);
    let events = events(&app, ask("Hi")).await;
    let last = events.last().unwrap();
    let response = &last["response"];
    assert_eq!((&last["type"], &response["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!((&response["error"]["code"], &response["store"]), (&json!("server_error"), &json!(false)));
    assert!(response["error"]["message"].as_str().unwrap().contains("ring timeout"), "{last}");
    assert_eq!(response["id"], events[0]["response"]["id"]);
    assert_eq!(
        about(&app, Method::GET, &response["id"], "").await.0,
        404,
        "a failed response must not be stored"
    );
    assert_eq!(create(&app, ask("Hi")).await.0, 503);
}

#[tokio::test]
async fn an_answer_ends_at_the_context_length() {
    let app = app(says(&[], 300));
    let body = created(&app, ask("Hi")).await;
    assert_eq!((&body["status"], &body["usage"]["total_tokens"]), (&json!("incomplete"), &json!(600)));
    let (status, body) = create(&app, ask(&"q ".repeat(700))).await;
    assert_eq!((status, &body["error"]["code"]), (400, &json!("context_length_exceeded")), "{body}");
}

/// Codex sends tools that are no functions with every request.
#[tokio::test]
async fn tools_that_are_no_functions_are_left_out_and_named() {
    let app = app_that_says("Yes.");
    let tools = json!([
        tool(&now()), {"type": "namespace", "name": "agents", "description": "Agents", "tools": [tool(&now())]},
        {"type": "web_search", "external_web_access": false}, {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
    ]);
    let asked = json!({"model": "", "input": "Hi", "tools": tools, "max_output_tokens": 8});
    let (status, _, response) = send_json(&app.router, post_to("/v1/responses", asked.to_string())).await;
    assert_eq!(status, 200, "{response}");
    assert_eq!(response["tools"].as_array().map(Vec::len), Some(1), "{response}");
    let warnings: Vec<&str> =
        response["warnings"].as_array().expect("warnings").iter().filter_map(Value::as_str).collect();
    let left_out = |i: usize, kind: &str| {
        format!("tools[{i}] is left out: this server has \"function\" alone, not \"{kind}\"")
    };
    assert_eq!(warnings, [left_out(1, "namespace"), left_out(2, "web_search"), left_out(3, "custom")]);
    let asked = with(asked, json!({"tools": [tool(&now())]}));
    let (_, _, response) = send_json(&app.router, post_to("/v1/responses", asked.to_string())).await;
    assert!(response.get("warnings").is_none(), "{response}");
}
