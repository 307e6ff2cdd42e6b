//! Compares `/openapi.json` with the server in both directions. It documents exactly the routes of the router, and the
//! server refuses every body that the document calls invalid. Every answer has a documented status, type and schema,
//! and no undocumented field.

use std::collections::{BTreeMap, BTreeSet};

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, header};
use jsonschema::Validator;
use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::api::{AccessPolicy, Keys};

use crate::support::app::{MODEL, app_with_policy};
use crate::support::http::{send, send_json};
use crate::support::json::{replace_somewhere, with};
use crate::support::lists::values;
use crate::support::rounds;

const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];
const FILES_OF_THE_PAGE: &str = "/page/";

fn request(method: &str, path: &str, body: Option<&Value>) -> Request<Body> {
    let method = Method::from_bytes(method.to_ascii_uppercase().as_bytes()).expect("a method");
    let request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    request.body(body.map_or(Body::empty(), |body| Body::from(body.to_string()))).expect("a valid request")
}

/// A server and its document.
struct Described {
    router: Router,
    document: Value,
    /// The document, changed so that objects with named fields allow no other fields.
    closed: Value,
    validators: BTreeMap<String, Validator>,
}

impl Described {
    async fn new() -> Self {
        let router = app_with_policy(AccessPolicy::default(), "Hello there").router;
        let (status, headers, document) = send_json(&router, request("get", "/openapi.json", None)).await;
        assert_eq!(
            (status.as_u16(), &headers[header::CONTENT_TYPE]),
            (200, &"application/json".parse().unwrap())
        );
        let mut closed = document.clone();
        let mut parts = BTreeSet::new();
        parts_of_others(&document, &mut parts);
        close(&mut closed, &parts);
        Self { router, document, closed, validators: BTreeMap::new() }
    }

    fn operation(&self, method: &str, path: &str) -> &Value {
        let operation = &self.document["paths"][path][method];
        assert!(operation.is_object(), "{method} {path} is not in the document");
        operation
    }

    fn is_valid_body(&mut self, path: &str, body: &Value) -> bool {
        let schema = &self.operation("post", path)["requestBody"]["content"]["application/json"]["schema"];
        let root = within(&self.document, schema);
        self.validators.entry(format!("body of {path}")).or_insert_with(|| compiled(&root)).is_valid(body)
    }

    /// Why `value` does not match the schema at `place`. `None` = it matches.
    fn problem(&mut self, place: &str, value: &Value) -> Option<String> {
        let schema = self.closed.pointer(place).unwrap_or_else(|| panic!("nothing at {place}"));
        let root = within(&self.closed, schema);
        let validator = self.validators.entry(place.to_owned()).or_insert_with(|| compiled(&root));
        validator.iter_errors(value).next().map(|error| format!("{}: {error}", error.instance_path()))
    }

    /// Sends a request and checks the answer against the document. Returns the status.
    async fn ask(&mut self, method: &str, template: &str, path: &str, body: Option<&Value>) -> u16 {
        let (status, headers, bytes) = send(&self.router, request(method, path, body)).await;
        let shown =
            || format!("{method} {path} {}: {status}: {}", json!(body), String::from_utf8_lossy(&bytes));
        let responses = &self.operation(method, template)["responses"];
        let content = &responses[status.as_str()]["content"];
        assert!(content.is_object(), "not documented: {}", shown());
        let kind = headers[header::CONTENT_TYPE].to_str().expect("text").to_owned();
        assert!(content[&kind].is_object(), "{kind} is not documented: {}", shown());
        let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
        let at = format!(
            "/paths/{}/{method}/responses/{}/content/{}/schema",
            escaped(template),
            status.as_str(),
            escaped(&kind)
        );
        let text = std::str::from_utf8(&bytes).expect("UTF-8");
        let values = match kind.as_str() {
            "text/event-stream" => data_of(text),
            "application/x-ndjson" => {
                text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
            }
            "application/json" => vec![serde_json::from_str(text).expect("JSON")],
            _ => vec![json!(text)],
        };
        assert!(!values.is_empty(), "{}", shown());
        let at = match kind.as_str() {
            "text/event-stream" => format!("{at}/x-event-data"),
            "application/x-ndjson" => format!("{at}/x-line-data"),
            _ => at,
        };
        for value in values {
            if let Some(problem) = self.problem(&at, &value) {
                panic!("{problem}\n{value}\nin {}", shown());
            }
        }
        status.as_u16()
    }
}

/// The JSON of a stream's events, without the event that ends the stream.
fn data_of(stream: &str) -> Vec<Value> {
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

/// A schema of the document, with the components that it refers to.
fn within(document: &Value, schema: &Value) -> Value {
    json!({"allOf": [schema], "components": document["components"]})
}

fn compiled(root: &Value) -> Validator {
    jsonschema::draft202012::options().build(root).unwrap_or_else(|error| panic!("{error}: {root}"))
}

/// Collects the names of schemas that are parts of an `allOf`.
fn parts_of_others(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for part in map.get("allOf").and_then(Value::as_array).into_iter().flatten() {
                let name = part["$ref"].as_str().and_then(|name| name.rsplit('/').next());
                found.extend(name.map(str::to_owned));
            }
            map.values().for_each(|value| parts_of_others(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| parts_of_others(item, found)),
        _ => {}
    }
}

/// Forbids additional fields in objects that name their fields.
fn close(value: &mut Value, parts: &BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map.iter_mut().filter(|(name, _)| !parts.contains(*name)) {
                // Each part of an `allOf` has only some of the fields.
                if name != "allOf" {
                    close(value, parts);
                }
            }
            let names_fields = map.get("properties").is_some_and(Value::is_object)
                && map.get("type").is_some()
                && !map.contains_key("additionalProperties");
            if names_fields || map.get("allOf").is_some_and(Value::is_array) {
                map.insert("unevaluatedProperties".into(), json!(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| close(item, parts)),
        _ => {}
    }
}

/// For each route, a body that has every field.
fn bodies(previous: &str) -> Vec<(&'static str, Value)> {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let function = json!({"name": "look", "description": "Looks.", "parameters": schema, "strict": true});
    let options = json!({
        "model": MODEL, "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}, "max_tokens": 5, "temperature": 0.7,
        "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.1, "logit_bias": {"1": 3}, "seed": 42, "stop": ["a", "b"], "min_tokens": 1,
        "ignore_eos": false, "n": 2, "cache_salt": "team", "unknown": {"to": "us"}, "stop_token_ids": [7],
        "bad_words": ["bad"], "n_predict": -1, "truncate_prompt_tokens": 9,
        "return_token_ids": true, "timings_per_token": true,
    });
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Grüße 🦄"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
        {"role": "user", "content": "Bye"},
    ]);
    let formats =
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": false, "schema": schema}});
    vec![
        (
            "/v1/chat/completions",
            with(
                options.clone(),
                json!({
                    "messages": messages, "logprobs": true, "top_logprobs": 2, "tool_choice": "none", "modalities": ["text"],
                    "tools": [{"type": "function", "function": function}], "parallel_tool_calls": true,
                    "add_generation_prompt": true, "continue_final_message": false, "chat_template_kwargs": {"a": [1]},
                    "functions": [], "function_call": "auto",
                    "max_completion_tokens": 6, "structured_outputs": {"whitespace_pattern": false, "json": null},
                }),
            ),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": null, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "response_format": formats,
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "tool_choice": "required",
                "tools": [{"type": "function", "function": function}],
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": [{"role": "user", "content": "Hi"}], "n_predict": 3, "allowed_token_ids": [5, 6, 300],
            }),
        ),
        (
            "/v1/completions",
            with(
                options,
                json!({
                    "prompt": ["Once", [2, 3, 4]], "logprobs": 2, "echo": true, "suffix": "", "best_of": 2, "guided_choice": null,
                }),
            ),
        ),
        ("/v1/completions", json!({"prompt": "Once"})),
        ("/models/load", json!({"model": MODEL})),
        ("/models/load", json!({})),
        ("/v1/embeddings", json!({"model": "", "input": "Hi"})),
        (
            "/v1/embeddings",
            json!({"model": MODEL, "input": ["Hi", [2, 3]], "encoding_format": "base64", "dimensions": null}),
        ),
        ("/tokenize", json!({"model": MODEL, "content": "Hi", "add_special": true, "with_pieces": true})),
        (
            "/tokenize",
            json!({
                "messages": messages, "tools": [{"type": "function", "function": function}], "return_token_strs": true,
                "tool_choice": "auto", "parallel_tool_calls": false, "add_generation_prompt": true,
            }),
        ),
        ("/tokenize", json!({"prompt": "Hi", "add_special_tokens": false})),
        ("/detokenize", json!({"model": MODEL, "tokens": [2, 3, 4]})),
        (
            "/v1/messages",
            json!({
                "model": MODEL, "max_tokens": 5, "stream": false, "temperature": 0.7, "top_p": 0.9, "top_k": 40,
                "stop_sequences": ["a", "b"], "cache_salt": "team", "metadata": {"user_id": "u"}, "tools": [], "tool_choice": {"type": "auto"},
                "output_config": {"effort": "low"}, "mcp_servers": [], "container": null,
                "system": [{"type": "text", "text": "Be brief."}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Grüße 🦄"}]},
                    {"role": "assistant", "content": "Hello"},
                    {"role": "user", "content": "Bye"},
                ],
            }),
        ),
        (
            "/v1/messages",
            json!({
                "max_tokens": 9, "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
                "tools": [{"type": "custom", "name": "look", "description": "Looks.", "input_schema": schema, "strict": true}],
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sunny."}]},
                ],
            }),
        ),
        (
            "/v1/responses",
            json!({
                "max_output_tokens": 9, "tool_choice": "required", "parallel_tool_calls": false,
                "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": schema, "strict": true}],
                "input": [
                    {"role": "user", "content": "Hi"},
                    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
                ],
            }),
        ),
        ("/v1/messages/count_tokens", json!({"messages": [{"role": "user", "content": "Hi"}]})),
        (
            "/api/chat",
            json!({
                "model": MODEL, "stream": true, "format": "", "keep_alive": "5m", "think": false, "logprobs": true, "top_logprobs": 2,
                "truncate": true, "unknown": {"to": "us"}, "tools": [{"type": "function", "function": function}],
                "options": {
                    "num_ctx": 500, "num_predict": 5, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1,
                    "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 42, "stop": ["a", "b"], "num_thread": 8,
                },
                "messages": [
                    {"role": "user", "content": "Hi", "images": []},
                    {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [
                        {"function": {"name": "look", "arguments": {"city": "Paris"}}}
                    ]},
                    {"role": "tool", "content": "Sunny.", "tool_name": "look"},
                ],
            }),
        ),
        ("/api/chat", json!({"model": MODEL, "messages": [], "keep_alive": 0, "stream": false})),
        (
            "/api/generate",
            json!({"model": MODEL, "prompt": "Hi", "format": {"type": "object"}, "options": {"num_predict": 9}}),
        ),
        (
            "/api/generate",
            json!({
                "model": MODEL, "prompt": "Hi", "suffix": "", "system": "Be brief.", "template": "", "context": [2, 3], "raw": false,
                "images": [], "keep_alive": -1, "think": null, "options": {"num_predict": 3}, "stream": false,
            }),
        ),
        (
            "/api/embed",
            json!({"model": MODEL, "input": ["Hi", "you"], "truncate": true, "dimensions": 0, "options": {}}),
        ),
        ("/api/embeddings", json!({"prompt": "Hi", "keep_alive": 1.5})),
        ("/api/show", json!({"model": MODEL, "verbose": false})),
        ("/api/pull", json!({"model": MODEL, "insecure": false})),
        ("/api/pull", json!({"name": MODEL, "stream": false})),
        (
            "/v1/responses",
            json!({
                "model": MODEL, "instructions": "Be brief.", "max_output_tokens": 5, "stream": false, "store": true,
                "temperature": 0.7, "top_p": 0.9, "cache_salt": "team", "previous_response_id": previous, "metadata": {"a": "b"},
                "text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto", "top_logprobs": 1,
                "include": ["message.output_text.logprobs"], "truncation": "auto", "background": false, "prompt": null,
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Grüße 🦄"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
                    {"role": "user", "content": "Bye"},
                ],
            }),
        ),
    ]
}

#[tokio::test]
async fn documented_routes_are_the_routes_of_the_router() {
    let app = Described::new().await;
    assert_eq!(app.document["openapi"], json!("3.1.0"));
    // Only the debug output of a router lists its routes.
    let shown = format!("{:?}", app.router);
    let routes: BTreeSet<String> = shown
        .split('"')
        .filter(|word| word.starts_with('/') && !word.contains("__private"))
        .map(|route| route.replace("{*", "{"))
        .collect();
    let (page, routes): (BTreeSet<_>, BTreeSet<_>) =
        routes.into_iter().partition(|route| route == "/" || route.starts_with(FILES_OF_THE_PAGE));
    assert!(page.len() > 5, "{page:?}");
    let documented: BTreeSet<String> =
        app.document["paths"].as_object().expect("paths").keys().cloned().collect();
    // Routes that are also served without /v1 are documented with it.
    let with_v1 = |route: &String| documented.contains(&format!("/v1{route}"));
    let (again, routes): (BTreeSet<_>, BTreeSet<_>) =
        routes.into_iter().partition(|route| with_v1(route) && !documented.contains(route));
    assert_eq!(again.len(), 7, "{again:?}");
    assert_eq!(routes, documented);

    let mut ids = BTreeSet::new();
    for path in documented {
        for method in METHODS {
            let operation = &app.document["paths"][&path][method];
            let (status, _, body) =
                send(&app.router, request(method, &path.replace("{id}", "x"), None)).await;
            let body = String::from_utf8_lossy(&body);
            assert_eq!(status == 405, operation.is_null(), "{method} {path}: {status} {body}");
            assert!(!body.contains("there is nothing at"), "{method} {path}: {body}");
            if let Some(id) = operation["operationId"].as_str() {
                assert!(ids.insert(id.to_owned()), "two operations have the id {id}");
                assert!(operation["summary"].is_string(), "{method} {path} has no summary");
            }
        }
    }
}

#[tokio::test]
async fn every_schema_is_valid_and_every_reference_resolves() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
    let app = Described::new().await;
    let mut found = BTreeSet::new();
    references(&app.document, &mut found);
    assert!(found.len() > 30, "{found:?}");
    let schemas = app.document["components"]["schemas"].as_object().expect("schemas");
    for name in schemas.keys() {
        let reference = format!("#/components/schemas/{name}");
        assert!(found.contains(&reference), "nothing refers to {name}");
        compiled(&within(&app.document, &json!({"$ref": reference})));
    }
    for reference in found {
        assert!(app.document.pointer(&reference[1..]).is_some(), "{reference} does not resolve");
    }
}

#[tokio::test]
async fn the_document_says_whether_an_api_key_is_required() {
    let open = Described::new().await.document;
    assert!(open.get("security").is_none() && open["components"].get("securitySchemes").is_none(), "{open}");
    let keys = Keys::from_variable("test", &"k".repeat(32)).expect("a key");
    let router = app_with_policy(AccessPolicy { keys, ..AccessPolicy::default() }, "ok").router;
    let ask = |key: Option<&str>| {
        let mut request = request("get", "/openapi.json", None);
        if let Some(key) = key {
            request.headers_mut().insert("x-api-key", key.parse().expect("a header"));
        }
        request
    };
    assert_eq!(send(&router, ask(None)).await.0, 401);
    let (status, _, document) = send_json(&router, ask(Some(&"k".repeat(32)))).await;
    assert_eq!(status, 200, "{document}");
    assert_eq!(document["security"], json!([{"bearer": []}, {"x-api-key": []}]));
    let schemes = &document["components"]["securitySchemes"];
    assert_eq!(schemes["bearer"], json!({"type": "http", "scheme": "bearer"}));
    assert_eq!(schemes["x-api-key"], json!({"type": "apiKey", "name": "x-api-key", "in": "header"}));
    assert_eq!(document["paths"]["/health"]["get"]["security"], json!([{}]));
}

#[tokio::test]
async fn answers_match_the_documented_schemas() {
    let mut app = Described::new().await;
    let input = json!({"model": MODEL, "input": "Hi", "max_output_tokens": 4});
    let (_, _, kept) = send_json(&app.router, request("post", "/v1/responses", Some(&input))).await;
    let id = kept["id"].as_str().expect("an id").to_owned();
    for (path, body) in bodies(&id) {
        assert!(app.is_valid_body(path, &body), "{path}: {body}");
        assert_eq!(app.ask("post", path, path, Some(&body)).await, 200);
        let content = &app.operation("post", path)["responses"]["200"]["content"];
        if content.as_object().is_some_and(|kinds| kinds.len() > 1) {
            let other = match body["stream"] == true {
                true => with(body, json!({"stream": false, "stream_options": null})),
                false => with(body, json!({"stream": true})),
            };
            assert_eq!(app.ask("post", path, path, Some(&other)).await, 200);
        }
    }
    for path in [
        "/v1/models",
        "/models",
        "/health",
        "/live",
        "/status",
        "/metrics",
        "/api/version",
        "/api/tags",
        "/api/ps",
    ] {
        assert_eq!(app.ask("get", path, path, None).await, 200);
    }
    for (id, status) in [(MODEL, 200), ("none", 404), ("%ff", 400)] {
        assert_eq!(app.ask("get", "/v1/models/{id}", &format!("/v1/models/{id}"), None).await, status);
    }
    for (query, status) in [("", 200), ("?limit=1&order=asc", 200), ("?limit=0", 400), ("?after=none", 400)] {
        let path = format!("/v1/responses/{id}/input_items{query}");
        assert_eq!(app.ask("get", "/v1/responses/{id}/input_items", &path, None).await, status, "{path}");
    }
    let stream = format!("/v1/responses/{id}?stream=true");
    assert_eq!(app.ask("get", "/v1/responses/{id}", &stream, None).await, 400);
    let cancelled = format!("/v1/responses/{id}/cancel");
    assert_eq!(app.ask("post", "/v1/responses/{id}/cancel", &cancelled, None).await, 400);
    for (method, id, status) in [
        ("get", &*id, 200),
        ("delete", &id, 200),
        ("get", &id, 404),
        ("delete", &id, 404),
        ("get", "%ff", 400),
    ] {
        let path = format!("/v1/responses/{id}");
        assert_eq!(app.ask(method, "/v1/responses/{id}", &path, None).await, status);
    }
    let named = json!({"model": MODEL});
    assert_eq!(app.ask("post", "/models/unload", "/models/unload", Some(&named)).await, 200);
    let unknown = json!({"model": "none", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    for path in ["/v1/chat/completions", "/v1/messages"] {
        assert_eq!(app.ask("post", path, path, Some(&unknown)).await, 404);
    }

    // The check detects an answer that does not match.
    let place = "/components/schemas/Model";
    let (_, _, model) = send_json(&app.router, request("get", &format!("/v1/models/{MODEL}"), None)).await;
    assert_eq!(app.problem(place, &model), None);
    for broken in
        [with(model.clone(), json!({"more": 1})), with(model.clone(), json!({"created": "today"})), json!({})]
    {
        assert!(app.problem(place, &broken).is_some(), "{broken}");
    }
}

#[tokio::test]
async fn bodies_that_the_document_calls_invalid_are_refused() {
    let times = rounds(4000);
    let seed = 0x0a31;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut app = Described::new().await;
    let input = json!({"model": MODEL, "input": "Hi", "max_output_tokens": 4});
    let (_, _, kept) = send_json(&app.router, request("post", "/v1/responses", Some(&input))).await;
    let bodies = bodies(kept["id"].as_str().expect("an id"));
    let junk = values(json!([
        null, true, false, -1, 0, 1, 2, 2.5, 128, 129, 1e308, -1e-9, u32::MAX, 1u64 << 32, u64::MAX,
        i64::MIN, "", "none", "required", "text", "assistant", "tool", "user", "\u{0}", "x".repeat(1025),
        "x".repeat(129), [], {}, [[]], [1], ["", "a"], ["a", "b", "c", "d", "e"], {"type": "text"},
        {"1": 100.1}, {"x": 1}, {"type": "json_object"}, {"include_usage": 1}
    ]));
    let (mut answered, mut refused, mut refused_though_valid) = (0, 0, BTreeMap::<String, usize>::new());
    for _ in 0..times {
        let (path, mut body) = bodies.choose(&mut rng).expect("bodies").clone();
        replace_somewhere(&mut body, junk.choose(&mut rng).expect("junk"), &mut rng);
        let is_valid = app.is_valid_body(path, &body);
        let status = app.ask("post", path, path, Some(&body)).await;
        assert!(status < 500, "{status} for {path} {body}");
        match (is_valid, status) {
            (false, 200) => panic!("{path} answered what it calls invalid: {body}"),
            (false, _) => refused += 1,
            (true, 200) => answered += 1,
            (true, _) => *refused_though_valid.entry(format!("{status} {path}")).or_default() += 1,
        }
    }
    println!("answered {answered}, refused {refused}, refused though valid {refused_though_valid:?}");
    assert!(answered > times / 10 && refused > times / 5, "{answered} answered, {refused} refused");
    let valid: usize = refused_though_valid.values().sum();
    assert!(
        valid < times / 5,
        "the document allows too many bodies that the server refuses: {refused_though_valid:?}"
    );
}

/// One step of a path into a body.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(String),
    Item,
}

/// Adds each place where a schema has an integer, with an integer that the schema allows.
fn integers(
    document: &Value,
    schema: &Value,
    at: &mut Vec<Step>,
    open: &mut Vec<String>,
    found: &mut Vec<(Vec<Step>, i64)>,
) {
    if let Some(name) = schema["$ref"].as_str() {
        if open.iter().any(|other| other == name) {
            return;
        }
        open.push(name.to_owned());
        let target = document.pointer(name.trim_start_matches('#')).expect("a target");
        integers(document, target, at, open, found);
        open.pop();
        return;
    }
    let kind = &schema["type"];
    if kind == "integer" || kind.as_array().is_some_and(|kinds| kinds.contains(&json!("integer"))) {
        let one_of = schema["enum"][0].as_i64();
        let least = schema["minimum"].as_i64().unwrap_or(1);
        let place = (at.clone(), one_of.unwrap_or(least.max(1)));
        if !found.contains(&place) {
            found.push(place);
        }
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        at.push(Step::Field(name.clone()));
        integers(document, field, at, open, found);
        at.pop();
    }
    if schema["items"].is_object() {
        at.push(Step::Item);
        integers(document, &schema["items"], at, open, found);
        at.pop();
    }
    for union in ["allOf", "anyOf", "oneOf"] {
        for part in schema[union].as_array().into_iter().flatten() {
            integers(document, part, at, open, found);
        }
    }
}

/// Sets `value` at a place. Creates missing objects and lists.
fn put(body: &mut Value, place: &[Step], value: Value) {
    match place {
        [] => *body = value,
        [Step::Field(name), rest @ ..] => {
            if !body.is_object() {
                *body = json!({});
            }
            put(&mut body[name], rest, value);
        }
        [Step::Item, rest @ ..] => {
            let mut item = body.get(0).cloned().unwrap_or_default();
            put(&mut item, rest, value);
            *body = json!([item]);
        }
    }
}

#[tokio::test]
async fn a_float_without_fraction_is_accepted_for_every_documented_integer() {
    let app = Described::new().await;
    let valid_bodies = bodies("none");
    let mut places = BTreeSet::new();
    for (path, item) in app.document["paths"].as_object().expect("paths") {
        let schema = &item["post"]["requestBody"]["content"]["application/json"]["schema"];
        let (mut at, mut open, mut found) = (Vec::new(), Vec::new(), Vec::new());
        integers(&app.document, schema, &mut at, &mut open, &mut found);
        for (place, n) in found {
            // Use the sample body of the route with the longest matching path prefix: a route that counts tokens takes
            // the same body.
            let like =
                valid_bodies.iter().filter(|(of, _)| path.starts_with(of)).max_by_key(|(of, _)| of.len());
            let mut body = like.map_or(json!({}), |(_, body)| body.clone());
            if body.get("stream").is_some() {
                body = with(body, json!({"stream": false, "stream_options": null}));
            }
            if body.get("previous_response_id").is_some() {
                body["previous_response_id"] = json!(null);
            }
            put(&mut body, &place, json!("@here@"));
            let ask = async |spelling: &str| {
                let text = body.to_string().replace("\"@here@\"", spelling);
                let request = Request::post(path.as_str()).header(header::CONTENT_TYPE, "application/json");
                let sent = request.body(Body::from(text)).expect("a valid request");
                let (status, _, answer) = send_json(&app.router, sent).await;
                // Remove what differs between any two answers.
                (status.as_u16(), answer["error"].clone())
            };
            let what = format!("{path}, {place:?}");
            let whole = ask(&n.to_string()).await;
            for spelling in [format!("{n}.0"), format!("{n}e0"), format!("{n}.0E+0"), format!("{n}0e-1")] {
                assert_eq!(ask(&spelling).await, whole, "{what}: {spelling}");
            }
            // A number with a fraction must cause another answer. This proves that the server reads the field.
            let (status, error) = ask(&format!("{n}.5")).await;
            assert!(status == 400 && whole.1 != error, "{what}: {status} {error}, and for {n} {whole:?}");
            let steps = place.iter().map(|step| match step {
                Step::Field(name) => format!(".{name}"),
                Step::Item => "[]".to_owned(),
            });
            places.insert(format!("{path} {}", steps.collect::<String>()));
        }
    }
    println!("{} places: {places:?}", places.len());
    // The walk reaches lists, lists of lists, and unions of them.
    for place in [
        "/v1/chat/completions .seed",
        "/v1/chat/completions .stop_token_ids[]",
        "/v1/completions .allowed_token_ids[]",
        "/v1/completions .prompt[]",
        "/v1/completions .prompt[][]",
        "/v1/embeddings .input[][]",
        "/v1/messages .max_tokens",
        "/v1/responses .max_output_tokens",
        "/detokenize .tokens[]",
    ] {
        assert!(places.contains(place), "{place} is not among {places:?}");
    }
}
