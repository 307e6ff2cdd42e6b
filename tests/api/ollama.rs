//! Ollama's API over the scripted runner: answers and lists as its clients read them.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use crate::support::app::{
    App, FamilyText, MODEL, OPTIONS, app_that_says, app_that_shows_its_prompt, prompt_ids, recorded,
};
use crate::support::fake_runner::says;
use crate::support::http::{get, post_to, send, send_json};
use crate::support::json::with;
use crate::support::tokenizers::tokenizer;

/// The name under which Ollama's clients know the model.
const NAME: &str = "makers/tiny-gemma:latest";

/// The lines of a streamed reply.
async fn lines(app: &App, path: &str, body: Value) -> Vec<Value> {
    let (status, headers, bytes) = send(&app.router, post_to(path, body.to_string())).await;
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    assert_eq!(status, 200, "{text}");
    assert_eq!(headers["content-type"], "application/x-ndjson");
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

async fn whole(app: &App, path: &str, body: Value) -> Value {
    let body = with(body, json!({"stream": false}));
    let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

async fn refusal(app: &App, path: &str, body: Value) -> (u16, String) {
    let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
    let object = answer.as_object().unwrap_or_else(|| panic!("{answer}"));
    assert_eq!(object.len(), 1, "{answer}");
    (status.as_u16(), object["error"].as_str().expect("a text").to_owned())
}

fn chat(text: &str) -> Value {
    json!({"model": NAME, "messages": [{"role": "user", "content": text}]})
}

fn joined(lines: &[Value], pointer: &str) -> String {
    lines.iter().filter_map(|line| line.pointer(pointer)?.as_str()).collect()
}

#[tokio::test]
async fn a_chat_is_streamed_in_lines_unless_it_says_otherwise() {
    let app = app_that_says("Paris, of course.");
    let answer = whole(&app, "/api/chat", chat("Where?")).await;
    assert_eq!(answer["message"], json!({"role": "assistant", "content": "Paris, of course."}));
    let all = lines(&app, "/api/chat", chat("Where?")).await;
    assert!(all.len() > 2, "{all:?}");
    assert_eq!(joined(&all, "/message/content"), "Paris, of course.");
    let (last, others) = all.split_last().expect("lines");
    for line in others {
        // Zed requires the role, and Open WebUI `done`, in every line.
        assert_eq!((&line["model"], &line["done"]), (&json!(NAME), &json!(false)), "{line}");
        assert_eq!(line["message"]["role"], "assistant", "{line}");
        let at: jiff::Timestamp = line["created_at"].as_str().expect("a time").parse().expect("RFC 3339");
        assert!(at.as_second() > 1_700_000_000, "{line}");
    }
    for end in [last, &answer] {
        assert_eq!((&end["done"], &end["done_reason"]), (&json!(true), &json!("stop")), "{end}");
        let n = tokenizer().encode("Paris, of course.", false).expect("encodes").len();
        assert_eq!(end["eval_count"], n + 1, "{end}");
        for field in
            ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count"]
        {
            assert!(end[field].is_u64(), "{field}: {end}");
        }
    }
}

#[tokio::test]
async fn options_limit_and_end_an_answer() {
    let app = app_that_says("one two three four five six");
    let of = |options: Value| with(chat("Count."), json!({"options": options}));
    let cut = whole(&app, "/api/chat", of(json!({"num_predict": 2}))).await;
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(2)), "{cut}");
    for endless in [-2, -1, 0] {
        let all = whole(&app, "/api/chat", of(json!({"num_predict": endless}))).await;
        assert_eq!(all["done_reason"], "stop", "{endless}: {all}");
    }
    let stopped =
        whole(&app, "/api/chat", of(json!({"stop": ["three"], "num_gpu": 99, "mirostat": 1}))).await;
    assert_eq!(stopped["message"]["content"], "one two ", "{stopped}");
    let mut stops: Vec<String> = (0..31).map(|i| format!("no such text {i}")).collect();
    stops.push("four".into());
    let stopped = whole(&app, "/api/chat", of(json!({"stop": stops}))).await;
    assert_eq!(stopped["message"]["content"], "one two three ", "as many as the document allows: {stopped}");
    // The context ends in the middle of the answer.
    let prompt_n = cut["prompt_eval_count"].as_u64().expect("a number");
    let bounded = whole(&app, "/api/chat", of(json!({"num_ctx": prompt_n + 3}))).await;
    assert_eq!((&bounded["done_reason"], &bounded["eval_count"]), (&json!("length"), &json!(3)), "{bounded}");
    let (status, error) = refusal(&app, "/api/chat", of(json!({"num_ctx": prompt_n}))).await;
    assert!(status == 400 && error.contains("num_ctx"), "{status} {error}");
    for (options, field) in [
        (json!({"temperature": -1}), "options.temperature"),
        (json!({"stop": [""]}), "options.stop[0]"),
        (json!({"num_ctx": "8k"}), "options.num_ctx"),
        // The nearest float of -2^63 - 1 is -2^63.
        (json!({"seed": -9_223_372_036_854_775_809f64}), "options.seed"),
    ] {
        let (status, error) = refusal(&app, "/api/chat", of(options)).await;
        assert!(status == 400 && error.starts_with(field), "{status} {error}");
    }
}

/// The oldest turns are left out, and the system's text stays.
#[tokio::test]
async fn a_long_conversation_loses_its_first_turns() {
    let (app, seen) = app_that_shows_its_prompt("Yes.");
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    for turn in 0..20 {
        messages.push(json!({"role": "user", "content": format!("Question number {turn} of many?")}));
        messages.push(json!({"role": "assistant", "content": format!("Answer number {turn}.")}));
    }
    messages.push(json!({"role": "user", "content": "The last?"}));
    let body = json!({"model": NAME, "messages": messages, "options": {"num_ctx": 200, "num_predict": 1}});
    let answer = whole(&app, "/api/chat", body.clone()).await;
    let n = answer["prompt_eval_count"].as_u64().expect("a number");
    assert!((140..200).contains(&n), "{n} tokens: as many turns as fit");
    let prompt = tokenizer().decode(&seen.lock().unwrap(), false);
    assert!(prompt.contains("Be brief.") && prompt.contains("The last?"), "{prompt}");
    assert!(!prompt.contains("number 0 ") && prompt.contains("Answer number 19."), "{prompt}");
    let first = prompt.find("Question number").expect("a question");
    assert!(!prompt[..first].contains("Answer number"), "a turn begins with its question: {prompt}");
    let (status, error) = refusal(&app, "/api/chat", with(body, json!({"truncate": false}))).await;
    assert!(status == 400 && error.starts_with("the prompt is too long"), "{error}");
}

#[tokio::test]
async fn formats_hold_the_answer() {
    let app = app_that_says("{\"a\": 1}");
    for format in [
        json!("json"),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ] {
        let answer = whole(&app, "/api/chat", with(chat("JSON?"), json!({"format": format}))).await;
        let content = answer["message"]["content"].as_str().expect("a text");
        assert!(serde_json::from_str::<Value>(content).expect("JSON").is_object(), "{content}");
    }
    let (status, error) = refusal(&app, "/api/chat", with(chat("JSON?"), json!({"format": "xml"}))).await;
    assert_eq!((status, &error[..]), (400, "format: expected an empty text or json, got \"xml\""));
}

#[tokio::test]
async fn thoughts_are_on_unless_the_request_turns_them_off() {
    let family = FamilyText::new("qwen");
    let tokens = family.tokenizer.thought_tokens().expect("a family that thinks");
    let ids =
        [&[tokens.open][..], &family.plain("\nHm.\n"), &[tokens.close], &family.plain("\n\nYes.")].concat();
    let (script, seen) = recorded(says(&ids, family.end()));
    let app = family.app(script);
    let prompt = || family.tokenizer.decode(&seen.lock().unwrap(), false);
    for think in [json!(null), json!(true), json!("low")] {
        let body = with(chat("Hi"), json!({"think": think, "options": {"num_predict": 300}}));
        let answer = whole(&app, "/api/chat", body.clone()).await;
        let expected = json!({"role": "assistant", "content": "Yes.", "thinking": "Hm."});
        assert_eq!(answer["message"], expected, "{think}");
        let all = lines(&app, "/api/chat", body).await;
        assert_eq!(joined(&all, "/message/thinking"), "Hm.", "{think}");
        assert_eq!(joined(&all, "/message/content"), "Yes.", "{think}");
        assert!(!prompt().contains("</think>"), "{}", prompt());
    }
    whole(&app, "/api/chat", with(chat("Hi"), json!({"think": false, "options": {"num_predict": 300}})))
        .await;
    assert!(prompt().contains("</think>"), "the template turns thoughts off: {}", prompt());
    let generated = json!({"model": NAME, "prompt": "Hi", "options": {"num_predict": 300}});
    let all = lines(&app, "/api/generate", generated).await;
    assert_eq!((joined(&all, "/thinking"), joined(&all, "/response")), ("Hm.".into(), "Yes.".into()));

    let app = app_that_says("Yes.");
    let (status, error) = refusal(&app, "/api/chat", with(chat("Hi"), json!({"think": true}))).await;
    assert!(status == 400 && error.ends_with("does not support thinking"), "{error}");
    whole(&app, "/api/chat", with(chat("Hi"), json!({"think": false}))).await;
}

fn tool() -> Value {
    let place = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!({"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": place}})
}

/// A model may write line ends between the tokens of its arguments, and be cut within a call.
#[tokio::test]
async fn a_call_is_one_line_also_if_it_is_written_in_several_or_cut() {
    let family = FamilyText::new("qwen");
    let id = |name: &str| family.tokenizer.token_id(name).expect("a control token");
    let call = "\n{\"name\": \"weather\", \"arguments\": {\n  \"city\":\n \"Paris\"\n}}\n";
    let ids = [&[id("<tool_call>")][..], &family.plain(call), &[id("</tool_call>")]].concat();
    let app = family.app(says(&ids, family.end()));
    let ask = |most: usize| {
        let more = json!({"tools": [tool()], "think": false, "options": {"num_predict": most}});
        with(chat("Weather?"), more)
    };
    for most in 1..=ids.len() {
        let all = lines(&app, "/api/chat", ask(most)).await;
        let found: Vec<&Value> =
            all.iter().filter_map(|line| line.pointer("/message/tool_calls/0")).collect();
        assert!(found.iter().all(|call| call["function"]["arguments"].is_object()), "{most}: {all:?}");
        if most == ids.len() {
            assert_eq!(found[0]["function"]["arguments"], json!({"city": "Paris"}), "{all:?}");
        }
    }
}

/// An empty message at the end is no beginning of an answer.
#[tokio::test]
async fn the_assistants_last_message_is_continued_unless_it_is_empty() {
    let (app, seen) = app_that_shows_its_prompt("Yes.");
    for (last, expected) in [("", "<start_of_turn>model\n"), ("Well", "<start_of_turn>model\nWell")] {
        let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": last}]);
        whole(&app, "/api/chat", json!({"model": NAME, "messages": messages})).await;
        let prompt = tokenizer().decode(&seen.lock().unwrap(), false);
        assert!(prompt.ends_with(expected), "{prompt:?}");
    }
}

/// Before the files are read, a list must not invent anything.
#[tokio::test]
async fn lists_wait_for_the_files_of_the_model() {
    let loading = unicorn::api::router(unicorn::api::Server::new(MODEL, OPTIONS, Default::default()));
    for request in [get("/api/tags"), post_to("/api/show", "{}")] {
        let (status, _, answer) = send_json(&loading, request).await;
        assert!(status == 503 && answer["error"].is_string(), "{answer}");
    }
    let (_, _, running) = send_json(&loading, get("/api/ps")).await;
    assert_eq!(running, json!({"models": []}));
}

/// Home Assistant reads a whole call from one line, and sends results without names and ids.
#[tokio::test]
async fn calls_are_whole_objects_and_their_results_need_no_id() {
    let family = FamilyText::new("qwen");
    let call = |city: &str| format!("\n{{\"name\": \"weather\", \"arguments\": {{\"city\": \"{city}\"}}}}\n");
    let id = |name: &str| family.tokenizer.token_id(name).expect("a control token");
    let mark = |text: &str| [&[id("<tool_call>")][..], &family.plain(text), &[id("</tool_call>")]].concat();
    let ids = [mark(&call("Paris")), mark(&call("Rome"))].concat();
    let (script, seen) = recorded(says(&ids, family.end()));
    let app = family.app(script);
    let body = with(chat("Weather?"), json!({"tools": [tool()], "think": false, "keep_alive": -1}));
    let all = lines(&app, "/api/chat", body.clone()).await;
    let calls: Vec<&Value> =
        all.iter().filter_map(|line| line["message"]["tool_calls"].as_array()).flatten().collect();
    let function =
        |index: usize, city: &str| json!({"index": index, "name": "weather", "arguments": {"city": city}});
    assert_eq!(calls.len(), 2, "{all:?}");
    for (i, city) in ["Paris", "Rome"].into_iter().enumerate() {
        assert_eq!(calls[i]["function"], function(i, city));
    }
    assert_eq!(all.last().expect("a line")["done_reason"], "stop");
    let answer = whole(&app, "/api/chat", body.clone()).await;
    assert_eq!(answer["message"]["tool_calls"][1]["function"], function(1, "Rome"));

    let history = json!([
        {"role": "User", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "weather", "arguments": {"city": "Paris"}}},
            {"function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}},
        ]},
        {"role": "tool", "content": "Sun in Paris"},
        {"role": "TOOL", "content": "Rain in Rome", "tool_name": "weather"},
    ]);
    whole(&app, "/api/chat", with(body, json!({"messages": history}))).await;
    let prompt = family.tokenizer.decode(&seen.lock().unwrap(), false);
    let order = ["Paris", "Rome", "Sun in Paris", "Rain in Rome"]
        .map(|text| prompt.find(text).expect("in the prompt"));
    assert!(order.is_sorted(), "{prompt}");
    // Home Assistant cuts old messages off, here the call of a result.
    let cut = json!([
        {"role": "tool", "content": "Snow"}, {"role": "user", "content": "And?"},
        {"role": "tool", "content": "Hail", "tool_call_id": "gone"}, {"role": "user", "content": "So?"},
    ]);
    whole(&app, "/api/chat", with(chat(""), json!({"messages": cut, "think": false}))).await;
    let prompt = family.tokenizer.decode(&seen.lock().unwrap(), false);
    assert!(prompt.contains("And?") && !prompt.contains("Snow") && !prompt.contains("Hail"), "{prompt}");
    for (message, field) in [
        (json!({"role": "robot", "content": "Snow"}), "messages[1].role"),
        (json!({"role": "user", "content": "Look", "images": ["AAAA"]}), "messages[1].images"),
    ] {
        let messages = json!([{"role": "user", "content": "Hi"}, message]);
        let (status, error) = refusal(&app, "/api/chat", json!({"model": NAME, "messages": messages})).await;
        assert!(status == 400 && error.starts_with(field), "{status} {error}");
    }
}

#[tokio::test]
async fn generate_answers_continues_and_keeps_a_context() {
    let (app, seen) = app_that_shows_its_prompt("Four.");
    let ask = |more: Value| with(json!({"model": NAME, "prompt": "Two and two?"}), more);
    let answer = whole(&app, "/api/generate", ask(json!({"system": "Be brief."}))).await;
    assert_eq!(answer["response"], "Four.");
    let prompt = "<start_of_turn>user\nBe brief.\n\nTwo and two?<end_of_turn>\n<start_of_turn>model\n";
    assert_eq!(*seen.lock().unwrap(), prompt_ids(prompt));
    let context: Vec<u32> = serde_json::from_value(answer["context"].clone()).expect("ids");
    assert_eq!(context[..prompt_ids(prompt).len()], prompt_ids(prompt));

    let all = lines(&app, "/api/generate", ask(json!({"context": context}))).await;
    assert_eq!(joined(&all, "/response"), "Four.");
    let again = prompt_ids("<start_of_turn>user\nTwo and two?<end_of_turn>\n<start_of_turn>model\n");
    assert_eq!(*seen.lock().unwrap(), [&context[..], &again[1..]].concat(), "one text, which begins once");
    assert!(all.last().expect("a line")["context"].as_array().expect("ids").len() > context.len());

    let raw = whole(&app, "/api/generate", ask(json!({"raw": true, "system": "Be brief."}))).await;
    assert!(raw.get("context").is_none(), "{raw}");
    assert_eq!(*seen.lock().unwrap(), prompt_ids("Two and two?"));
    for (field, value) in [("suffix", "end"), ("template", "{{ .Prompt }}")] {
        let (status, error) = refusal(&app, "/api/generate", ask(json!({field: value}))).await;
        assert!(status == 400 && error.starts_with(field), "{status} {error}");
    }
    let (status, error) = refusal(&app, "/api/generate", ask(json!({"context": [9_999_999]}))).await;
    assert!(status == 400 && error.starts_with("context[0]"), "{error}");
}

#[tokio::test]
async fn a_request_without_a_prompt_loads_or_unloads_the_model() {
    let app = app_that_says("Hello");
    for (path, body) in [
        ("/api/chat", json!({"model": NAME})),
        ("/api/chat", json!({"model": NAME, "messages": [], "stream": false})),
        ("/api/generate", json!({"model": NAME, "prompt": ""})),
    ] {
        for (keep_alive, reason) in
            [(json!("5m"), "load"), (json!(-1), "load"), (json!(0), "unload"), (json!("0s"), "unload")]
        {
            let body = with(body.clone(), json!({"keep_alive": keep_alive}));
            let all = match body["stream"] == false {
                true => vec![whole(&app, path, body).await],
                false => lines(&app, path, body).await,
            };
            assert_eq!(all.len(), 1, "{all:?}");
            assert_eq!((&all[0]["done"], &all[0]["done_reason"]), (&json!(true), &json!(reason)), "{all:?}");
        }
    }
    for wrong in [json!("soon"), json!([5]), json!(true)] {
        let (status, error) =
            refusal(&app, "/api/chat", with(chat("Hi"), json!({"keep_alive": wrong}))).await;
        assert!(status == 400 && error.starts_with("keep_alive"), "{error}");
    }
}

#[tokio::test]
async fn embeddings_are_those_of_the_other_route() {
    let app = app_that_says("Hello");
    let one = whole(&app, "/api/embed", json!({"model": NAME, "input": "Some text"})).await;
    let body = json!({"input": "Some text"}).to_string();
    let (_, _, openai) = send_json(&app.router, post_to("/v1/embeddings", body)).await;
    assert_eq!(one["embeddings"], json!([openai["data"][0]["embedding"]]));
    assert_eq!(one["prompt_eval_count"], openai["usage"]["prompt_tokens"]);
    let older = whole(&app, "/api/embeddings", json!({"model": NAME, "prompt": "Some text"})).await;
    assert_eq!(older["embedding"], one["embeddings"][0]);
    for none in [json!(""), json!(null)] {
        let none = whole(&app, "/api/embeddings", json!({"model": NAME, "prompt": none})).await;
        assert_eq!(none["embedding"], json!([]));
    }
    let two =
        whole(&app, "/api/embed", json!({"model": NAME, "input": ["Some text", "a ".repeat(900)]})).await;
    assert_eq!(two["embeddings"].as_array().expect("a list").len(), 2, "the long text is cut");
    assert_eq!(two["embeddings"][0], one["embeddings"][0]);
    for input in [json!([]), json!(""), json!(null)] {
        let none = whole(&app, "/api/embed", json!({"model": NAME, "input": input})).await;
        assert_eq!(none["embeddings"], json!([]), "{input}");
    }
    let (status, error) = refusal(&app, "/api/embed", json!({"model": NAME, "input": ["a", ""]})).await;
    assert!(status == 400 && error.starts_with("input[1]"), "{error}");
    let long = json!({"model": NAME, "input": "a ".repeat(900), "truncate": false});
    assert_eq!(refusal(&app, "/api/embed", long).await.0, 400);
    let (status, error) =
        refusal(&app, "/api/embed", json!({"model": NAME, "input": "a", "dimensions": 4})).await;
    assert!(status == 400 && error.starts_with("dimensions"), "{error}");
}

#[tokio::test]
async fn lists_have_what_clients_read() {
    let app = app_that_says("Hello");
    let list = async |path: &str| {
        let (status, _, answer) = send_json(&app.router, get(path)).await;
        assert_eq!(status, 200, "{answer}");
        answer
    };
    // VS Code's Copilot compares three numbers.
    let version = list("/api/version").await["version"].as_str().expect("a text").to_owned();
    let numbers: Vec<u32> = version.split('.').map(|part| part.parse().expect("a number")).collect();
    assert!(numbers.len() == 3 && numbers > vec![0, 6, 4], "{version}");
    let tags = list("/api/tags").await;
    let model = &tags["models"][0];
    let expected = json!({
        "name": NAME, "model": NAME, "modified_at": "2027-01-15T08:00:00Z", "size": 14_000_000_000u64,
        "digest": "0123456789abcdef".repeat(4), "capabilities": ["completion", "tools"],
        "details": {
            "parent_model": "", "format": "safetensors", "family": "gemma3", "families": ["gemma3"],
            "parameter_size": "27.4B", "quantization_level": "int4-g128", "context_length": 600, "embedding_length": 3,
        },
    });
    assert_eq!(*model, expected);
    let running = list("/api/ps").await;
    let ends: jiff::Timestamp =
        running["models"][0]["expires_at"].as_str().expect("a time").parse().expect("RFC 3339");
    assert!(ends > jiff::Timestamp::now(), "{running}");
    assert_eq!(running["models"][0]["context_length"], 600, "{running}");

    for body in [json!({"model": NAME}), json!({"name": MODEL}), json!({})] {
        let shown = whole(&app, "/api/show", body).await;
        let capabilities = shown["capabilities"].as_array().expect("a list");
        assert!(
            capabilities.contains(&json!("completion")) && capabilities.contains(&json!("tools")),
            "{shown}"
        );
        let info = shown["model_info"].as_object().expect("never null");
        assert_eq!(
            (&info["general.architecture"], &info["gemma3.context_length"]),
            (&json!("gemma3"), &json!(600))
        );
        assert!(
            shown["template"].as_str().is_some_and(|template| template.contains("start_of_turn")),
            "{shown}"
        );
        let parameters = shown["parameters"].as_str().expect("a text");
        assert!(
            parameters.lines().any(|line| line.split_whitespace().eq(["num_ctx", "600"])),
            "{parameters}"
        );
        assert!(parameters.lines().any(|line| line.split_whitespace().eq(["top_k", "64"])), "{parameters}");
    }
}

#[tokio::test]
async fn a_served_model_needs_no_pull_and_models_are_changed_elsewhere() {
    let app = app_that_says("Hello");
    for body in [json!({"model": NAME}), json!({"name": MODEL}), json!({})] {
        let pulled = [json!({"status": "pulling manifest"}), json!({"status": "success"})];
        assert_eq!(lines(&app, "/api/pull", body.clone()).await, pulled);
        assert_eq!(whole(&app, "/api/pull", body).await, json!({"status": "success"}));
    }
    let (status, error) = refusal(&app, "/api/pull", json!({"model": "llama3"})).await;
    assert!(
        status == 404 && error.contains("unicorn pull") && error.contains("models.pulled"),
        "{status} {error}"
    );
    // Clients in Go send the newer and the older field of the name, and one of them is empty.
    for path in ["/api/pull", "/api/show"] {
        let (status, error) = refusal(&app, path, json!({"model": "", "name": "llama3"})).await;
        assert!(status == 404 && error.contains("llama3"), "{path}: {status} {error}");
    }
    let request = Request::builder().method("DELETE").uri("/api/delete");
    let request = request.body(Body::from(json!({"model": NAME}).to_string())).expect("sound");
    let (status, _, answer) = send_json(&app.router, request).await;
    let error = answer["error"].as_str().expect("a text");
    assert!(status == 409 && error.contains("unicorn models rm"), "{status} {error}");
    for (method, path, what) in [
        ("POST", "/api/create", "unicorn quantize"),
        ("POST", "/api/push", "the tools of the hub"),
        ("POST", "/api/copy", "aliases"),
        ("HEAD", "/api/blobs/sha256:0", ""),
        ("POST", "/api/blobs/sha256:0", "read from files"),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("sound");
        let (status, _, bytes) = send(&app.router, request).await;
        let text = String::from_utf8(bytes).expect("UTF-8");
        assert!(status == 501 && text.contains(what), "{path}: {status} {text}");
        if method != "HEAD" {
            let answer: Value = serde_json::from_str(&text).expect("JSON");
            assert!(answer["error"].is_string(), "{answer}");
        }
    }
}

#[tokio::test]
async fn errors_are_in_ollamas_form_and_names_may_have_a_tag() {
    let app = app_that_says("Hello");
    for path in ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"] {
        let body = json!({"model": "llama3", "input": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]});
        assert_eq!(refusal(&app, path, body).await, (404, "model 'llama3' not found".to_owned()), "{path}");
        let (status, _, answer) = send_json(&app.router, post_to(path, "{")).await;
        assert!(status == 400 && answer["error"].is_string(), "{path}: {answer}");
    }
    let request = Request::builder().method("DELETE").uri("/api/chat").body(Body::empty()).expect("sound");
    let (status, _, answer) = send_json(&app.router, request).await;
    assert!(
        status == 405 && answer["error"].as_str().is_some_and(|error| error.contains("send POST")),
        "{answer}"
    );
    let (status, _, answer) = send_json(&app.router, get("/api/nothing")).await;
    assert!(status == 404 && answer["error"].is_string(), "{answer}");
    // Clients of Ollama send the names of its lists to OpenAI's routes as well.
    for model in [MODEL, NAME] {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "a"}]}).to_string();
        let (status, _, answer) = send_json(&app.router, post_to("/v1/chat/completions", body)).await;
        assert_eq!((status.as_u16(), &answer["model"]), (200, &json!(MODEL)), "{answer}");
    }
}
