//! The requests of a soak test, for every route. Each of them has the same answer every time.
//!
//! Answers are greedy, or drawn with a seed. Requests that need the id of a stored response follow the request that
//! creates the response, in a chain, and contain [`ID`] instead of the id. [`missing`] compares the requests with the
//! server's OpenAPI document. Each chain deletes the responses that it has stored, so that the server stores as many at
//! the end as at the beginning. Token ids are below 200, because every vocabulary has these ids.

use serde_json::{Value, json};
use ureq::http::Method;

/// Placeholder for the id of the response that the chain created.
pub const ID: &str = "{id}";

/// How an answer is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// Status and body are equal to the first ones, except for ids and times.
    Same,
    /// As `Same`, but a model may be loading after a loss of the device.
    Model,
    /// A health report: the device works, or it was lost a moment ago.
    Health,
    /// Only the status is compared, because the figures in the body vary.
    Success,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Ask {
    pub name: &'static str,
    pub method: Method,
    /// The path in the OpenAPI document. `None`: a file of the page, or a path that is not a route.
    pub route: Option<&'static str>,
    /// The path of the request.
    pub path: String,
    pub body: Option<String>,
    pub status: u16,
    /// Another status that is right, by the server's options.
    pub other_status: Option<u16>,
    pub compare: Compare,
    /// Whether later requests of the chain name the response that this one creates.
    pub gives_id: bool,
}

impl Ask {
    fn new(method: Method, route: &'static str, name: &'static str, body: Option<String>) -> Self {
        let (path, compare) = (route.to_owned(), Compare::Same);
        Self {
            name,
            method,
            route: Some(route),
            path,
            body,
            status: 200,
            other_status: None,
            compare,
            gives_id: false,
        }
    }

    fn post(route: &'static str, name: &'static str, body: Value) -> Self {
        Self::new(Method::POST, route, name, Some(body.to_string()))
    }

    fn get(route: &'static str, name: &'static str) -> Self {
        Self::new(Method::GET, route, name, None)
    }

    fn at(self, path: impl Into<String>) -> Self {
        Self { path: path.into(), ..self }
    }

    fn refused(self, status: u16) -> Self {
        Self { status, ..self }
    }

    fn or_refused(self, status: u16) -> Self {
        Self { other_status: Some(status), ..self }
    }

    /// Whether an answer to this request may have that status.
    pub fn allows(&self, status: u16) -> bool {
        status == self.status || Some(status) == self.other_status
    }

    fn compared(self, compare: Compare) -> Self {
        Self { compare, ..self }
    }

    fn no_route(self) -> Self {
        Self { route: None, ..self }
    }
}

/// The chains of requests. `model` is the id that the server lists.
pub fn chains(model: &str) -> Vec<Vec<Ask>> {
    let mut chains: Vec<Vec<Ask>> = Vec::new();
    chains.extend(chats().map(|ask| vec![ask]));
    chains.extend(completions().map(|ask| vec![ask]));
    chains.extend(responses());
    chains.extend(messages().map(|ask| vec![ask]));
    chains.extend(tokens_and_embeddings().map(|ask| vec![ask]));
    chains.extend(ollama().map(|ask| vec![ask]));
    chains.extend(facts(model).map(|ask| vec![ask]));
    chains.extend(refusals().map(|ask| vec![ask]));
    chains
}

/// Streams that clients leave before their end. The answers are long, so that they are still in progress then.
pub fn left_midway() -> [(&'static str, Value); 4] {
    let asked = user("Tell me a story about a dragon.");
    [
        (
            "/v1/chat/completions",
            json!({"messages": asked, "max_tokens": 200, "ignore_eos": true, "stream": true}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": true, "n": 2, "stream": true}),
        ),
        (
            "/v1/responses",
            json!({"input": "Tell me a story.", "max_output_tokens": 200, "store": false, "stream": true}),
        ),
        ("/v1/messages", json!({"messages": asked, "max_tokens": 200, "stream": true})),
    ]
}

/// Operations of the server's OpenAPI document without a request, such as `POST /v1/new`.
pub fn missing(document: &Value, chains: &[Vec<Ask>]) -> Vec<String> {
    const METHODS: [&str; 7] = ["get", "put", "post", "delete", "patch", "head", "options"];
    let paths = document["paths"].as_object().into_iter().flatten();
    let operations = paths.flat_map(|(path, item)| {
        let methods = METHODS.into_iter().filter(|method| !item[*method].is_null());
        methods.map(move |method| (method.to_uppercase(), path))
    });
    let is_asked = |method: &str, path: &str| {
        chains.iter().flatten().any(|ask| ask.route == Some(path) && ask.method.as_str() == method)
    };
    operations
        .filter(|(method, path)| !is_asked(method, path))
        .map(|(method, path)| format!("{method} {path}"))
        .collect()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome", "Berlin"]},
            "million": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city", "million"],
        "additionalProperties": false,
    })
}

fn weather() -> Value {
    let city = json!({"type": "string", "enum": ["Paris", "Rome"]});
    let parameters = json!({"type": "object", "properties": {"city": city}, "required": ["city"]});
    json!([{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": parameters}}])
}

fn chats() -> impl Iterator<Item = Ask> {
    const CHAT: &str = "/v1/chat/completions";
    let chat = |name, mut body: Value, more: Value| {
        for (field, value) in more.as_object().into_iter().flatten() {
            body[field] = value.clone();
        }
        Ask::post(CHAT, name, body)
    };
    let capital =
        || json!({"messages": user("What is the capital of France?"), "max_tokens": 24, "temperature": 0});
    let drawn = || json!({"messages": user("Tell me about a river."), "max_tokens": 20, "temperature": 1.1, "seed": 7});
    let turns = json!([
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]);
    let called = json!([
        {"role": "user", "content": "How is the weather in Rome?"},
        {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 24 degrees."},
    ]);
    // Several chunks of a prompt, and blocks that later rounds find in the prefix cache.
    let long = "The old captain carries a narrow bridge towards 17 green ships. ".repeat(24);
    let with_usage = json!({"stream": true, "stream_options": {"include_usage": true}});
    [
        chat("a greedy chat", capital(), json!({})),
        chat("a stream", capital(), with_usage.clone()).at("/chat/completions"),
        chat(
            "two drawn answers with log probabilities",
            drawn(),
            json!({"n": 2, "top_p": 0.9, "top_k": 40, "logprobs": true, "top_logprobs": 3}),
        ),
        chat(
            "a stream of two drawn answers",
            drawn(),
            json!({"n": 2, "min_p": 0.02, "logprobs": true, "stream": true, "return_token_ids": true}),
        ),
        chat(
            "a JSON schema",
            capital(),
            json!({"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}}}),
        ),
        chat("a regex", drawn(), json!({"structured_outputs": {"regex": "[A-Z][a-z]{3,12} [0-9]{2}"}, "stream": true})),
        chat("a choice", capital(), json!({"guided_choice": ["salt and water", "bread and butter", "Paris"]})),
        chat("a GBNF", capital(), json!({"grammar": "root ::= \"yes\" | \"no\" [.!]"})),
        chat("a call", capital(), json!({"tools": weather(), "tool_choice": "required", "max_tokens": 48})),
        chat(
            "a stream of a call",
            capital(),
            json!({"tools": weather(), "tool_choice": "required", "max_tokens": 48, "stream": true}),
        ),
        chat("a tool's result", capital(), json!({"messages": called, "tools": weather()})),
        chat(
            "penalties, biases and bad words",
            drawn(),
            json!({
                "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": 8,
                "logit_bias": {"100": 2, "101": -5}, "bad_words": ["the"], "stop": ["\n\n"],
            }),
        ),
        chat("a second turn", capital(), json!({"messages": turns})),
        chat("a second turn of a stream", capital(), json!({"messages": turns, "stream": true, "cache_salt": "soak"})),
        chat("a long prompt", capital(), json!({"messages": user(&long), "max_tokens": 12})),
        chat("a long answer", capital(), json!({"max_tokens": 120, "ignore_eos": true, "stream": true})),
        Ask::post("/v1/chat/completions/input_tokens", "tokens of a chat", capital()),
    ]
    .into_iter()
}

fn completions() -> impl Iterator<Item = Ask> {
    const COMPLETIONS: &str = "/v1/completions";
    [
        Ask::post(
            COMPLETIONS,
            "a completion",
            json!({"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0.8, "seed": 3, "logprobs": 2}),
        ),
        Ask::post(
            COMPLETIONS,
            "a scored prompt",
            json!({"prompt": "The capital of France is Paris.", "max_tokens": 0, "echo": true, "logprobs": 1}),
        ),
        Ask::post(
            COMPLETIONS,
            "a stream of two prompts",
            json!({"prompt": ["One, two,", "Red, green,"], "max_tokens": 16, "temperature": 0, "stream": true}),
        )
        .at("/completions"),
        Ask::post(
            COMPLETIONS,
            "a prompt of ids",
            json!({"prompt": [2, 100, 101, 102, 103], "max_tokens": 20, "temperature": 0, "ignore_eos": true}),
        ),
    ]
    .into_iter()
}

fn responses() -> impl Iterator<Item = Vec<Ask>> {
    const RESPONSES: &str = "/v1/responses";
    const RESPONSE: &str = "/v1/responses/{id}";
    let asked = json!({"input": "What is the capital of France?", "max_output_tokens": 20, "temperature": 0});
    let with = |more: Value| {
        let mut body = asked.clone();
        for (field, value) in more.as_object().into_iter().flatten() {
            body[field] = value.clone();
        }
        body
    };
    let format = json!({"format": {"type": "json_schema", "name": "x", "schema": schema()}});
    let kept = vec![
        Ask {
            gives_id: true,
            ..Ask::post(RESPONSES, "a response that is kept", with(json!({"top_logprobs": 2})))
        },
        Ask::get(RESPONSE, "the response that was kept"),
        Ask::get("/v1/responses/{id}/input_items", "what it answered"),
        Ask::post(
            RESPONSES,
            "a response to a response",
            with(json!({"input": "And of Italy?", "previous_response_id": ID, "store": false})),
        ),
        Ask::post("/v1/responses/{id}/cancel", "a response that cannot be cancelled", json!({})).refused(400),
        Ask::new(Method::DELETE, RESPONSE, "a response that is forgotten", None),
        Ask::get(RESPONSE, "a response that was forgotten").refused(404),
    ];
    [
        kept,
        vec![Ask::post(RESPONSES, "a response's stream", with(json!({"store": false, "stream": true})))],
        vec![
            Ask::post(RESPONSES, "a response of a schema", with(json!({"store": false, "text": format})))
                .at("/responses"),
        ],
        vec![Ask::post("/v1/responses/input_tokens", "tokens of an input", asked.clone())],
    ]
    .into_iter()
}

fn messages() -> impl Iterator<Item = Ask> {
    const MESSAGES: &str = "/v1/messages";
    let asked = |more: Value| {
        let mut body =
            json!({"messages": user("What is the capital of France?"), "max_tokens": 20, "temperature": 0});
        for (field, value) in more.as_object().into_iter().flatten() {
            body[field] = value.clone();
        }
        body
    };
    let city =
        json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]});
    let tools = json!([{"name": "weather", "input_schema": city}]);
    let counted = json!({"messages": user("What is the capital of France?"), "system": "Be brief."});
    [
        Ask::post(MESSAGES, "a message", asked(json!({"system": "Be brief.", "stop_sequences": ["Rome"]}))),
        Ask::post(MESSAGES, "a message's stream", asked(json!({"stream": true}))),
        Ask::post(
            MESSAGES,
            "a message that calls",
            asked(json!({"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 48, "stream": true})),
        )
        .at("/messages"),
        Ask::post("/v1/messages/count_tokens", "tokens of a message", counted),
    ]
    .into_iter()
}

fn tokens_and_embeddings() -> impl Iterator<Item = Ask> {
    const EMBEDDINGS: &str = "/v1/embeddings";
    [
        Ask::post(
            EMBEDDINGS,
            "two embeddings",
            json!({"input": ["A river.", "A garden behind the old station."]}),
        ),
        Ask::post(
            EMBEDDINGS,
            "an embedding in base64",
            json!({"input": "A river.", "encoding_format": "base64"}),
        )
        .at("/embeddings"),
        Ask::post(
            "/tokenize",
            "a text's tokens",
            json!({"content": "A quiet harbour.", "with_pieces": true}),
        ),
        Ask::post(
            "/tokenize",
            "a conversation's tokens",
            json!({"messages": user("Hello"), "return_token_strs": true}),
        ),
        Ask::post("/detokenize", "a text of tokens", json!({"tokens": [100, 101, 102, 103, 104]})),
    ]
    .into_iter()
}

fn ollama() -> impl Iterator<Item = Ask> {
    let options = json!({"temperature": 0.9, "seed": 7, "num_predict": 24});
    let chat = json!({"messages": user("Name a river."), "options": options});
    let whole =
        json!({"messages": user("Name a city."), "options": options, "format": schema(), "stream": false});
    let text = json!({"prompt": "Name a garden.", "options": options});
    let unknown = json!({"model": "no-such-model"});
    [
        Ask::post("/api/chat", "Ollama's chat in lines", chat),
        Ask::post("/api/chat", "Ollama's chat by a schema", whole),
        Ask::post("/api/generate", "Ollama's answer to a text", text),
        Ask::post("/api/generate", "Ollama's request to load", json!({"stream": false})),
        Ask::post("/api/embed", "Ollama's embeddings", json!({"input": ["A river.", "A garden."]}))
            .compared(Compare::Success),
        Ask::post("/api/embeddings", "Ollama's embedding", json!({"prompt": "A river."})),
        Ask::post("/api/show", "Ollama's description", json!({})),
        Ask::post("/api/pull", "Ollama's pull of the served model", json!({})),
        Ask::get("/api/tags", "Ollama's list"),
        Ask::get("/api/ps", "Ollama's list of loaded models").compared(Compare::Success),
        Ask::get("/api/version", "Ollama's version"),
        Ask::get("/api/status", "Ollama's status"),
        Ask::new(Method::DELETE, "/api/delete", "a model that cannot be deleted", Some(unknown.to_string()))
            .refused(409),
    ]
    .into_iter()
}

fn facts(model: &str) -> impl Iterator<Item = Ask> {
    let page = |path: &'static str| Ask::get(path, "the page").no_route();
    [
        Ask::get("/v1/models", "the models").compared(Compare::Model),
        Ask::get("/v1/models/{id}", "the model").at(format!("/v1/models/{model}")).compared(Compare::Model),
        Ask::get("/models", "the models at the root").compared(Compare::Model),
        Ask::post("/models/load", "a load", json!({"model": model})),
        Ask::post("/models/unload", "an unload", json!({"model": "another"})).refused(404),
        // Refused without kv.disk.path.
        Ask::new(Method::POST, "/kv/clear", "no conversations on disk", None)
            .or_refused(409)
            .compared(Compare::Success),
        Ask::get("/health", "health").compared(Compare::Health),
        Ask::get("/live", "liveness"),
        Ask::get("/status", "status").compared(Compare::Success),
        Ask::get("/metrics", "metrics").compared(Compare::Success),
        Ask::get("/openapi.json", "the document"),
        page("/"),
        page("/page/app.js"),
        page("/page/style.css"),
    ]
    .into_iter()
}

/// Requests that the server must refuse without any other effect.
fn refusals() -> impl Iterator<Item = Ask> {
    const CHAT: &str = "/v1/chat/completions";
    let raw = |route, name, body: &str| Ask::new(Method::POST, route, name, Some(body.to_owned()));
    let deep = "[".repeat(20_000);
    [
        raw(CHAT, "a body that is cut", "{\"messages\": [{\"role\": \"user\", \"cont").refused(400),
        raw(CHAT, "a body that is no object", "[1, 2, 3]").refused(400),
        raw(CHAT, "an empty body", "").refused(400),
        raw("/v1/completions", "a body that is nested deeply", &deep).refused(400),
        Ask::post(CHAT, "a chat without messages", json!({"max_tokens": 4})).refused(400),
        Ask::post(CHAT, "a temperature out of bounds", json!({"messages": user("Hi"), "temperature": 9}))
            .refused(400),
        Ask::post(CHAT, "a model that is not there", json!({"model": "none/such", "messages": user("Hi")}))
            .refused(404),
        Ask::post(
            CHAT,
            "a schema that is none",
            json!({"messages": user("Hi"), "structured_outputs": {"json": {"type": "nothing"}}}),
        )
        .refused(400),
        Ask::post(
            "/v1/responses",
            "a response to nothing",
            json!({"input": "Hi", "previous_response_id": "resp_0"}),
        )
        .refused(400),
        Ask::post("/v1/messages", "a message without a bound", json!({"messages": user("Hi")})).refused(400),
        Ask::post("/v1/embeddings", "an embedding of nothing", json!({"input": []})).refused(400),
        Ask::post("/detokenize", "ids that are none", json!({"tokens": [4_000_000_000_u32]})).refused(400),
        Ask::get("/v1/nothing", "no route").no_route().refused(404),
        Ask::get(CHAT, "another method").no_route().refused(405),
    ]
    .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_of_the_document_without_a_request_is_named() {
        let chains = chains("a/b");
        let document = json!({"paths": {
            "/v1/models": {"get": {}, "parameters": []},
            "/v1/responses/{id}": {"get": {}, "delete": {}, "put": {}},
            "/v1/new": {"post": {}},
        }});
        assert_eq!(missing(&document, &chains), ["PUT /v1/responses/{id}", "POST /v1/new"]);
    }

    #[test]
    fn requests_are_told_apart_by_their_names() {
        let chains = chains("a/b");
        let mut names: Vec<_> = chains.iter().flatten().map(|ask| (ask.name, &ask.path)).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
