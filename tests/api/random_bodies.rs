//! Sends 10,000 random request bodies to every route that takes one: valid bodies, made by a generator for each wire
//! format, and mutated bodies. A valid body must be answered completely in its format. A mutated one must be answered
//! in the same way, or refused with the format's error.

use std::collections::BTreeMap;

use axum::Router;
use axum::http::header;
use futures::StreamExt;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::api::{self, AccessPolicy, Options, Server};
use unicorn::engine::{Engine, EngineConfig, EngineHandle};
use unicorn::model::load::LoadOptions;
use unicorn::model::{Limits, Runner};
use unicorn::session::Service;
use unicorn::text::CallFormat;

use crate::support::app::{DEFAULTS, END_OF_TURN, MODEL, OPTIONS};
use crate::support::fake_runner::{FakeRunner, HANG, Script, fake_limits, kv_with, mixed};
use crate::support::http::{assert_at_rest, named_events, post_to, send, send_json};
use crate::support::json::replace_somewhere;
use crate::support::lists::values;
use crate::support::tokenizers::{gemma_template, tokenizer};
use crate::support::{data, goldens};

const BODIES: usize = 10_000;
/// The share of bodies that are not mutated.
const VALID_SHARE: f64 = 0.42;
/// The number of bodies in flight. It exceeds the number of answers that the engine computes together.
const AT_ONCE: usize = 24;
const VOCABULARY: u32 = 512;
/// The most problems that a failure prints.
const PROBLEMS: usize = 10;
/// The most answers to one prompt.
const MOST_ANSWERS: u32 = 3;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const RESPONSES: &str = "/v1/responses";
const TOKENIZE: &str = "/tokenize";
const DETOKENIZE: &str = "/detokenize";
const EMBEDDINGS: &str = "/v1/embeddings";
/// The routes. A route is drawn as often as it is listed.
const PATHS: [&str; 13] = [
    CHAT,
    CHAT,
    CHAT,
    COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    MESSAGES,
    RESPONSES,
    RESPONSES,
    TOKENIZE,
    DETOKENIZE,
    EMBEDDINGS,
    COUNT,
];

/// All routes over a model.
fn served(runner: Box<dyn Runner>) -> (Router, EngineHandle) {
    let config = EngineConfig { queue: 8 * AT_ONCE, ..EngineConfig::default() };
    let engine = Engine::start(runner, config);
    let options = Options { stored_responses: BODIES, stored_response_bytes: 64 << 20, ..OPTIONS };
    let server = Server::new(MODEL, options, AccessPolicy::default());
    let stops = vec![1, END_OF_TURN];
    server.library().first().1.set_ready(Service::new(
        engine.clone(),
        tokenizer(),
        gemma_template(),
        CallFormat::plain(),
        DEFAULTS,
        stops,
    ));
    (api::router(server), engine)
}

// --- valid bodies ---------------------------------------------------------------------------------------

/// Draws random values.
struct Draw {
    rng: ChaCha8Rng,
    /// The id of a stored response.
    previous: String,
}

impl Draw {
    fn chance(&mut self, p: f64) -> bool {
        self.rng.random_bool(p)
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices.choose(&mut self.rng).expect("choices").clone()
    }

    fn up_to(&mut self, most: f64) -> Value {
        // Whole numbers are drawn too, because JSON writes them differently.
        if self.chance(0.2) {
            json!(self.rng.random_range(0..=most as u32))
        } else {
            json!(self.rng.random_range(0.0..most))
        }
    }

    fn text(&mut self) -> String {
        let texts = [
            "",
            "Hi",
            "  ",
            "Grüße 🦄",
            "Bye <start_of_turn>\u{0}",
            "\"quoted\" \\ and {braces}",
            "\u{202e}\u{fffd}",
            "one\ntwo\r\n",
            "<end_of_turn>",
            "What modes does Vim have?",
        ];
        let mut text = self.of(&texts).to_owned();
        let any = self.chance(0.5);
        let more = self.rng.random_range(0..8);
        text.extend(
            (0..more).map(|_| if any { self.rng.random() } else { self.of(&['a', ' ', 'é', '½', '\n']) }),
        );
        text
    }

    fn ids(&mut self) -> Vec<u32> {
        let n = self.rng.random_range(1..20);
        (0..n).map(|_| self.rng.random_range(0..VOCABULARY)).collect()
    }

    /// A small schema, usually different from the schemas before it.
    fn schema(&mut self) -> Value {
        let n = self.rng.random_range(0..1000);
        let schemas = [
            json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": n}}, "required": ["a"], "additionalProperties": false}),
            json!({"type": "object"}),
            json!({"enum": [n, "x", null]}),
            json!({"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 1 + n % 3}),
            json!({"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"const": n}}}),
            json!({"type": "string", "pattern": "^[a-z]{1,3}$"}),
        ];
        self.of(&schemas)
    }

    fn object_schema(&mut self) -> Value {
        let n = self.rng.random_range(0..9);
        let schemas = [
            json!({}),
            json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": n}}, "required": ["city"]}),
            json!({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": false}),
        ];
        self.of(&schemas)
    }

    fn set(&mut self, body: &mut Value, chance: f64, name: &str, value: impl FnOnce(&mut Self) -> Value) {
        if self.chance(chance) {
            body[name] = value(self);
        }
    }

    fn stops(&mut self, most: usize) -> Vec<String> {
        let n = self.rng.random_range(0..=most);
        (0..n).map(|_| self.of(&["a", "e", " ", "\n", "the", "½", "\u{0}"]).to_owned()).collect()
    }

    /// The fields that chat and completions share.
    fn options(&mut self, body: &mut Value) {
        self.set(body, 0.5, "stream", |d| json!(d.chance(0.8)));
        if body["stream"] == true {
            self.set(body, 0.3, "stream_options", |d| json!({"include_usage": d.chance(0.8)}));
        }
        self.set(body, 0.1, "truncate_prompt_tokens", |d| d.of(&[json!(-1), json!(3), json!(40)]));
        self.set(body, 0.1, "stop_token_ids", |d| d.of(&[json!([]), json!([7, 300])]));
        self.set(body, 0.1, "bad_words", |d| d.of(&[json!([]), json!(["the", "½ é"])]));
        self.set(body, 0.1, "timings_per_token", |d| json!(d.chance(0.8)));
        self.set(body, 0.3, "temperature", |d| d.up_to(2.0));
        self.set(body, 0.3, "top_p", |d| d.up_to(1.0));
        self.set(body, 0.3, "top_k", |d| d.of(&[json!(-1), json!(0), json!(5), json!(40.0)]));
        self.set(body, 0.2, "min_p", |d| d.up_to(1.0));
        self.set(body, 0.2, "presence_penalty", |d| json!(d.rng.random_range(-2.0..2.0)));
        self.set(body, 0.2, "frequency_penalty", |d| json!(d.rng.random_range(-2.0..2.0)));
        self.set(body, 0.2, "repetition_penalty", |d| json!(d.rng.random_range(0.5..2.0)));
        self.set(body, 0.3, "seed", |d| d.of(&[json!(42), json!(-1), json!(u64::MAX), Value::Null]));
        self.set(body, 0.2, "n", |d| json!(d.rng.random_range(1..=MOST_ANSWERS)));
        self.set(body, 0.3, "stop", |d| if d.chance(0.5) { json!(d.stops(4)) } else { json!("e") });
        self.set(body, 0.2, "logit_bias", |d| {
            let each =
                (0..d.rng.random_range(0..5)).map(|_| d.rng.random_range(0..VOCABULARY)).collect::<Vec<_>>();
            each.iter().map(|id| (id.to_string(), json!(d.rng.random_range(-100..=100)))).collect()
        });
        self.set(body, 0.1, "ignore_eos", |d| json!(d.chance(0.5)));
        self.set(body, 0.1, "min_tokens", |_| json!(1));
        self.set(body, 0.1, "user", |d| json!(d.text()));
        self.set(body, 0.1, "unknown", |_| json!({"deep": [1, {"er": null}]}));
    }

    /// The format of the answer. Together with tools, it is JSON or text.
    fn grammar(&mut self, body: &mut Value, with_tools: bool) {
        let schema = self.schema();
        let strict = self.chance(0.5);
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}});
        let (name, value) = match self.rng.random_range(0..if with_tools { 3 } else { 8 }) {
            0 => ("response_format", json!({"type": "text"})),
            1 => ("response_format", json!({"type": "json_object"})),
            2 => ("response_format", format),
            3 => ("guided_json", schema),
            4 => ("guided_regex", json!(self.of(&["[0-9]{1,3}", "yes|no", "(?s).*", "[^a]+b?"]))),
            5 => ("guided_choice", json!(["yes", "no", "½"])),
            6 => ("guided_grammar", json!("start: \"{\" /[^}]+/ \"}\"")),
            _ => ("structured_outputs", json!({"json": schema})),
        };
        body[name] = value;
    }

    fn chat_messages(&mut self, body: &mut Value) {
        let mut messages = Vec::new();
        if self.chance(0.4) {
            messages.push(json!({"role": self.of(&["system", "developer"]), "content": self.text()}));
        }
        for _ in 0..self.rng.random_range(1..4) {
            let role = self.of(&["user", "user", "assistant"]);
            let content = match self.rng.random_range(0..4) {
                0 => json!([{"type": "text", "text": self.text()}, {"type": "text", "text": self.text()}]),
                1 if role == "assistant" => Value::Null,
                _ => json!(self.text()),
            };
            messages.push(json!({"role": role, "content": content}));
            if role == "assistant" && self.chance(0.4) {
                let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
                let calls = json!([call("a", json!("{\"x\": 1}")), call("b", json!({"x": 2}))]);
                messages.last_mut().expect("pushed")["tool_calls"] = calls;
                messages.push(json!({"role": "tool", "tool_call_id": "b", "content": self.text()}));
                messages.push(json!({"role": "tool", "tool_call_id": "a", "content": self.text()}));
            }
        }
        let continued = messages.last().is_some_and(|last| last["role"] == "assistant") && self.chance(0.5);
        body["messages"] = messages.into();
        match continued {
            true => body["continue_final_message"] = json!(true),
            false => self.set(body, 0.1, "add_generation_prompt", |d| json!(d.chance(0.5))),
        }
        self.set(
            body,
            0.1,
            "chat_template_kwargs",
            |d| json!({"mood": d.text(), "deep": {"list": [d.text(), 3]}}),
        );
    }

    fn chat_tools(&mut self, body: &mut Value) {
        let names = ["get_weather", "add \"it\""];
        let each = names.map(|name| {
            let (parameters, strict) = (self.object_schema(), self.chance(0.2));
            let description = self.text();
            json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters, "strict": strict}})
        });
        let n = self.rng.random_range(1..=2);
        body["tools"] = json!(each[..n]);
        let named = json!({"type": "function", "function": {"name": names[0]}});
        self.set(body, 0.7, "tool_choice", |d| {
            d.of(&[json!("auto"), json!("none"), json!("required"), named])
        });
        self.set(body, 0.3, "parallel_tool_calls", |d| json!(d.chance(0.5)));
    }

    fn max_tokens(&mut self) -> Value {
        // Some of these are long enough for a call.
        let most = if self.chance(0.1) { 40 } else { 4 };
        json!(self.rng.random_range(1..=most))
    }

    fn chat(&mut self) -> Value {
        let mut body = json!({"model": MODEL});
        self.chat_messages(&mut body);
        let name = self.of(&["max_tokens", "max_completion_tokens"]);
        body[name] = self.max_tokens();
        self.options(&mut body);
        self.set(&mut body, 0.2, "logprobs", |d| json!(d.chance(0.7)));
        if body["logprobs"] == true {
            self.set(&mut body, 0.7, "top_logprobs", |d| json!(d.rng.random_range(0..=20)));
        }
        let tools = self.chance(0.25);
        if tools {
            self.chat_tools(&mut body);
        }
        // A grammar that is not JSON is refused together with tools.
        if self.chance(0.25) {
            self.grammar(&mut body, tools);
        }
        body
    }

    fn completions(&mut self) -> Value {
        let prompt = match self.rng.random_range(0..4) {
            0 => json!([self.text(), self.text()]),
            1 => json!(self.ids()),
            2 => json!([self.ids(), self.ids(), self.ids()]),
            _ => json!(self.text()),
        };
        let mut body = json!({"model": MODEL, "prompt": prompt, "max_tokens": self.max_tokens()});
        self.options(&mut body);
        self.set(&mut body, 0.3, "echo", |d| json!(d.chance(0.8)));
        if body["echo"] == true && self.chance(0.3) && body.get("min_tokens").is_none() {
            body["max_tokens"] = json!(0);
        }
        self.set(&mut body, 0.3, "logprobs", |d| json!(d.rng.random_range(0..=5)));
        if self.chance(0.1) {
            body["best_of"] = body.get("n").cloned().unwrap_or(json!(1));
        }
        self.set(&mut body, 0.1, "suffix", |_| json!(""));
        if self.chance(0.15) {
            self.grammar(&mut body, false);
        }
        body
    }

    /// Turns of users and assistants, whose content parts have these types.
    fn turns(&mut self, user_part: &str, assistant_part: &str) -> Value {
        let turn = |d: &mut Self| {
            let role = d.of(&["user", "user", "assistant"]);
            let part = if role == "user" { user_part } else { assistant_part };
            let content = match d.chance(0.5) {
                true => json!([{"type": part, "text": d.text()}, {"type": part, "text": d.text()}]),
                false => json!(d.text()),
            };
            json!({"role": role, "content": content})
        };
        (0..self.rng.random_range(1..4)).map(|_| turn(self)).collect()
    }

    fn count(&mut self) -> Value {
        let mut turns = self.turns("text", "text");
        if self.chance(0.2) {
            let call =
                |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "f", "input": input});
            let result = |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
            let calls = json!([{"type": "text", "text": "Let me see."}, call("a", json!({"x": 1})), call("b", json!({}))]);
            let failed =
                json!({"type": "tool_result", "tool_use_id": "a", "content": self.text(), "is_error": true});
            let found = result("b", json!([{"type": "text", "text": self.text()}]));
            let turns = turns.as_array_mut().expect("a list");
            turns.push(json!({"role": "assistant", "content": calls}));
            turns.push(json!({"role": "user", "content": [found, failed, {"type": "text", "text": "x"}]}));
        }
        let mut body = json!({"model": MODEL, "messages": turns});
        self.set(
            &mut body,
            0.4,
            "system",
            |d| json!([{"type": "text", "text": d.text(), "cache_control": {"type": "ephemeral"}}]),
        );
        self.set(&mut body, 0.2, "system", |d| json!(d.text()));
        self.set(&mut body, 0.2, "thinking", |_| json!({"type": "disabled"}));
        if self.chance(0.2) {
            body["tools"] =
                json!([{"name": "f", "description": self.text(), "input_schema": {"type": "object"}}]);
            let alone = self.chance(0.5);
            let choices = [
                json!({"type": "auto", "disable_parallel_tool_use": alone}),
                json!({"type": "none"}),
                json!({"type": "any", "disable_parallel_tool_use": alone}),
                json!({"type": "tool", "name": "f"}),
            ];
            self.set(&mut body, 0.8, "tool_choice", |d| d.of(&choices));
        }
        body
    }

    fn messages(&mut self) -> Value {
        let mut body = self.count();
        body["max_tokens"] = self.max_tokens();
        self.set(&mut body, 0.5, "stream", |d| json!(d.chance(0.8)));
        self.set(&mut body, 0.3, "temperature", |d| d.up_to(1.0));
        self.set(&mut body, 0.3, "top_p", |d| d.up_to(1.0));
        self.set(&mut body, 0.3, "top_k", |d| json!(d.rng.random_range(0..50)));
        self.set(&mut body, 0.3, "stop_sequences", |d| json!(d.stops(4)));
        self.set(&mut body, 0.2, "metadata", |_| json!({"user_id": "u"}));
        if body.get("tools").is_none() {
            self.set(
                &mut body,
                0.2,
                "output_config",
                |d| json!({"format": {"type": "json_schema", "schema": {"enum": [d.text(), 7]}}}),
            );
        }
        body
    }

    fn responses(&mut self) -> Value {
        let mut input =
            if self.chance(0.5) { json!(self.text()) } else { self.turns("input_text", "output_text") };
        if let Some(items) = input.as_array_mut().filter(|_| self.chance(0.3)) {
            items.push(
                json!({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"x\": 1}"}),
            );
            items.push(json!({"type": "function_call_output", "call_id": "a", "output": self.text()}));
        }
        let mut body = json!({"model": MODEL, "input": input, "max_output_tokens": self.max_tokens()});
        self.set(&mut body, 0.5, "stream", |d| json!(d.chance(0.8)));
        self.set(&mut body, 0.3, "instructions", |d| json!(d.text()));
        self.set(&mut body, 0.3, "temperature", |d| d.up_to(2.0));
        self.set(&mut body, 0.3, "top_p", |d| d.up_to(1.0));
        self.set(&mut body, 0.3, "store", |d| json!(d.chance(0.5)));
        self.set(&mut body, 0.2, "previous_response_id", |d| json!(d.previous));
        self.set(&mut body, 0.2, "metadata", |_| json!({"a": "b"}));
        self.set(&mut body, 0.2, "include", |_| json!(["message.output_text.logprobs"]));
        self.set(&mut body, 0.2, "top_logprobs", |d| json!(d.rng.random_range(0..=20)));
        let tools = self.chance(0.2);
        if tools {
            body["tools"] = json!([{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]);
            let named = json!({"type": "function", "name": "f"});
            let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [named]});
            let choices = [json!("auto"), json!("none"), json!("required"), named, allowed];
            self.set(&mut body, 0.8, "tool_choice", |d| d.of(&choices));
            self.set(&mut body, 0.3, "parallel_tool_calls", |d| json!(d.chance(0.5)));
        } else {
            self.set(&mut body, 0.3, "text", |d| {
                let schema = json!({"type": "json_schema", "name": "x", "schema": d.schema(), "strict": d.chance(0.5)});
                json!({"format": d.of(&[json!({"type": "text"}), json!({"type": "json_object"}), schema])})
            });
        }
        body
    }

    fn tokenize(&mut self) -> Value {
        let mut body = match self.rng.random_range(0..3) {
            0 => {
                json!({"content": self.text(), "add_special": self.chance(0.5), "parse_special": self.chance(0.5), "with_pieces": self.chance(0.5)})
            }
            1 => json!({"prompt": self.text(), "add_special_tokens": self.chance(0.5)}),
            _ => {
                let mut body = json!({});
                self.chat_messages(&mut body);
                body
            }
        };
        self.set(&mut body, 0.5, "model", |_| json!(MODEL));
        self.set(&mut body, 0.5, "return_token_strs", |d| json!(d.chance(0.5)));
        body
    }

    fn embeddings(&mut self) -> Value {
        // Each text has at least one character.
        let input = match self.rng.random_range(0..4) {
            0 => json!(
                (0..self.rng.random_range(1..30)).map(|_| format!("x{}", self.text())).collect::<Vec<_>>()
            ),
            1 => json!(self.ids()),
            2 => json!([self.ids(), self.ids(), self.ids()]),
            _ => json!(format!("x{}", self.text())),
        };
        let mut body = json!({"model": MODEL, "input": input});
        self.set(&mut body, 0.5, "encoding_format", |d| json!(d.of(&["float", "base64"])));
        self.set(&mut body, 0.2, "user", |d| json!(d.text()));
        body
    }

    fn valid(&mut self, path: &str) -> Value {
        let mut body = self.named(path);
        if [CHAT, COMPLETIONS, MESSAGES, RESPONSES].contains(&path) {
            self.set(&mut body, 0.1, "cache_salt", |d| d.of(&[json!("team"), json!("½ \u{0}"), Value::Null]));
        }
        self.set(&mut body, 0.1, "model", |d| d.of(&[Value::Null, json!("")]));
        if body["model"].is_null() && self.chance(0.5) {
            body.as_object_mut().expect("an object").remove("model");
        }
        body
    }

    /// A body that usually names the model.
    fn named(&mut self, path: &str) -> Value {
        match path {
            CHAT => self.chat(),
            COMPLETIONS => self.completions(),
            MESSAGES => self.messages(),
            COUNT => self.count(),
            RESPONSES => self.responses(),
            TOKENIZE => self.tokenize(),
            EMBEDDINGS => self.embeddings(),
            _ => json!({"model": MODEL, "tokens": self.ids()}),
        }
    }
}

// --- mutated bodies -------------------------------------------------------------------------------------

/// The mutation number `i` of a body. Every other one is still JSON.
fn mutated(full: &Value, i: usize, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let junk = values(json!([
        null, true, -1, 0, 1e308, 18446744073709551615u64, "", "assistant", [], {}, [[[]]],
        {"type": "text"}, "\u{fffd}\u{202e}", "<end_of_turn>", 0.1, "x".repeat(3000)
    ]));
    if i.is_multiple_of(2) {
        let mut value = full.clone();
        for _ in 0..rng.random_range(1..4) {
            replace_somewhere(&mut value, junk.choose(rng).unwrap(), rng);
        }
        return value.to_string().into_bytes();
    }
    let mut bytes = full.to_string().into_bytes();
    for _ in 0..rng.random_range(1..6) {
        let at = rng.random_range(0..bytes.len());
        match rng.random_range(0..4) {
            0 => bytes[at] = rng.random(),
            1 if bytes.len() > 1 => drop(bytes.remove(at)),
            2 => bytes.insert(at, *b"\"{}[],:\\0e-u".choose(rng).unwrap()),
            _ => bytes.truncate(at.max(1)),
        }
    }
    bytes
}

// --- checks of answers ----------------------------------------------------------------------------------

type Checked = Result<(), String>;

macro_rules! ensure {
    ($($what:expr),+ $(,)?) => {{
        $(if !$what {
            return Err(format!("not true: {}", stringify!($what)));
        })+
    }};
}

fn is_count(value: &Value) -> bool {
    value.is_u64()
}

fn list<'a>(value: &'a Value, what: &str) -> Result<&'a [Value], String> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| format!("{what} is not a list: {value}"))
}

fn whole(asked: &Value, names: &[&str]) -> Option<u64> {
    let number = names.iter().find_map(|name| asked[*name].as_f64());
    number.filter(|n| *n >= 0.0).map(|n| n as u64)
}

/// The chunks of an OpenAI stream, which ends with `[DONE]`.
fn chunks(bytes: &[u8]) -> Result<Vec<Value>, String> {
    let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
    let mut lines: Vec<&str> =
        text.lines().filter(|line| !line.is_empty() && !line.starts_with(':')).collect();
    ensure!(lines.pop() == Some("data: [DONE]"));
    let parse = |line: &str| {
        let data = line.strip_prefix("data: ").ok_or_else(|| format!("not data: {line:?}"))?;
        serde_json::from_str(data).map_err(|error| format!("{error}: {data}"))
    };
    lines.into_iter().map(parse).collect()
}

/// Builds the object of a whole answer from the chunks of one kind. `join` adds the choice of a chunk to the whole
/// choice.
fn joined(
    asked: &Value,
    chunks: &[Value],
    kinds: [&str; 2],
    join: impl Fn(&mut Value, &Value) -> Checked,
) -> Result<Value, String> {
    let with_usage = asked["stream_options"]["include_usage"] == true;
    let first = chunks.first().ok_or("no chunk")?;
    let mut whole =
        json!({"id": first["id"], "object": kinds[1], "created": first["created"], "model": first["model"]});
    let mut choices = BTreeMap::<u64, Value>::new();
    for (i, chunk) in chunks.iter().enumerate() {
        ensure!(
            chunk["object"] == kinds[0],
            chunk["id"] == first["id"],
            chunk["created"] == first["created"]
        );
        let last = i + 1 == chunks.len();
        match (with_usage, last) {
            (true, true) => ensure!(chunk["choices"] == json!([]), chunk["usage"].is_object()),
            (true, false) => ensure!(chunk.get("usage") == Some(&Value::Null)),
            (false, _) => ensure!(chunk.get("usage").is_none()),
        }
        ensure!(chunk["timings"].is_object() == last || asked["timings_per_token"] == true);
        for choice in list(&chunk["choices"], "choices")? {
            let index = choice["index"].as_u64().ok_or("no index")?;
            let so_far =
                choices.entry(index).or_insert_with(|| json!({"index": index, "finish_reason": null}));
            ensure!(so_far["finish_reason"].is_null());
            join(so_far, choice)?;
            so_far["finish_reason"] = choice["finish_reason"].clone();
        }
        whole["usage"] = chunk["usage"].clone();
        whole["timings"] = chunk["timings"].clone();
    }
    whole["choices"] = choices.into_values().collect();
    Ok(whole)
}

fn append(to: &mut Value, text: &Value) -> Checked {
    let text = text.as_str().ok_or_else(|| format!("no text: {text}"))?;
    *to = json!(format!("{}{text}", to.as_str().unwrap_or_default()));
    Ok(())
}

/// Appends the lists of a log probabilities object to the lists before.
fn append_lists(to: &mut Value, more: &Value) {
    for (name, value) in more.as_object().into_iter().flatten() {
        match value.as_array() {
            Some(items) => {
                let mut all = to[name].as_array().cloned().unwrap_or_default();
                all.extend_from_slice(items);
                to[name] = all.into();
            }
            None => to[name] = value.clone(),
        }
    }
}

fn join_chat(whole: &mut Value, choice: &Value) -> Checked {
    let delta = &choice["delta"];
    if whole.get("message").is_none() {
        ensure!(delta["role"] == "assistant", delta["content"].is_null());
        whole["message"] = json!({"role": "assistant", "content": "", "refusal": null});
        whole["logprobs"] = Value::Null;
        return Ok(());
    }
    append_lists(&mut whole["logprobs"], &choice["logprobs"]);
    if let Some(text) = delta.get("content") {
        append(&mut whole["message"]["content"], text)?;
    }
    for call in delta["tool_calls"].as_array().into_iter().flatten() {
        let index = call["index"].as_u64().ok_or("no index of a call")? as usize;
        let mut calls = whole["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        match call.get("id") {
            Some(_) => {
                ensure!(index == calls.len());
                calls.push(call.clone());
            }
            None => {
                ensure!(index + 1 == calls.len());
                append(&mut calls[index]["function"]["arguments"], &call["function"]["arguments"])?;
            }
        }
        whole["message"]["tool_calls"] = calls.into();
        whole["message"]["content"] = Value::Null;
    }
    if choice["finish_reason"].is_string() {
        ensure!(delta == &json!({}));
    }
    Ok(())
}

fn check_usage(usage: &Value) -> Checked {
    let [prompt, answer, total] = ["prompt_tokens", "completion_tokens", "total_tokens"]
        .map(|name| usage[name].as_u64().unwrap_or(u64::MAX));
    ensure!(prompt.checked_add(answer) == Some(total));
    ensure!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().is_some_and(|cached| cached <= prompt));
    Ok(())
}

/// Checks the object of a whole answer in one of OpenAI's two older formats.
fn check_choices(asked: &Value, reply: &Value, prefix: &str, prompts: u64, streamed: bool) -> Checked {
    ensure!(reply["id"].as_str().is_some_and(|id| id.starts_with(prefix)), reply["model"] == MODEL);
    ensure!(reply["created"].is_u64(), reply["timings"].is_object());
    let choices = list(&reply["choices"], "choices")?;
    ensure!(choices.len() as u64 == whole(asked, &["n"]).unwrap_or(1) * prompts);
    for (i, choice) in choices.iter().enumerate() {
        ensure!(choice["index"] == i);
        ensure!(
            ["stop", "length", "tool_calls"].contains(&choice["finish_reason"].as_str().unwrap_or("none"))
        );
    }
    if !streamed || asked["stream_options"]["include_usage"] == true {
        check_usage(&reply["usage"])?;
        let most = whole(asked, &["max_completion_tokens", "max_tokens"]);
        let drawn = reply["usage"]["completion_tokens"].as_u64().unwrap_or(0);
        ensure!(most.is_none_or(|most| drawn <= most * choices.len() as u64));
    }
    Ok(())
}

fn check_chat(asked: &Value, reply: &Value, streamed: bool) -> Checked {
    ensure!(reply["object"] == "chat.completion");
    check_choices(asked, reply, "chatcmpl-", 1, streamed)?;
    for choice in list(&reply["choices"], "choices")? {
        let message = &choice["message"];
        ensure!(message["role"] == "assistant", message.get("refusal") == Some(&Value::Null));
        match message.get("tool_calls") {
            None => ensure!(message["content"].is_string(), choice["finish_reason"] != "tool_calls"),
            Some(calls) => {
                ensure!(message["content"].is_null(), asked["tools"].is_array());
                for call in list(calls, "tool_calls")? {
                    ensure!(
                        call["type"] == "function",
                        call["id"].is_string(),
                        call["function"]["name"].is_string()
                    );
                    let arguments = call["function"]["arguments"].as_str().ok_or("no arguments")?;
                    let is_json = serde_json::from_str::<Value>(arguments).is_ok();
                    ensure!(is_json || choice["finish_reason"] == "length" || asked.get("stop").is_some());
                }
            }
        }
        if asked["logprobs"] == true {
            let scored = choice["logprobs"]["content"].as_array().is_some_and(|all| !all.is_empty());
            ensure!(scored || message["content"].as_str().is_none_or(str::is_empty));
            for token in choice["logprobs"]["content"].as_array().into_iter().flatten() {
                ensure!(token["token"].is_string(), token["logprob"].as_f64().is_some_and(|l| l <= 0.0));
                ensure!(list(&token["bytes"], "bytes")?.iter().all(Value::is_u64));
                let top = list(&token["top_logprobs"], "top_logprobs")?.len() as u64;
                ensure!(top == whole(asked, &["top_logprobs"]).unwrap_or(0));
            }
        } else {
            ensure!(choice["logprobs"].is_null());
        }
        // The text must be complete in the requested format, unless it was truncated.
        let format = &asked["response_format"];
        let text = message["content"].as_str().filter(|_| choice["finish_reason"] == "stop");
        if let (Some(text), "json_object" | "json_schema") = (text, format["type"].as_str().unwrap_or("")) {
            ensure!(asked.get("stop").is_some() || serde_json::from_str::<Value>(text).is_ok());
        }
    }
    Ok(())
}

fn check_completion(asked: &Value, reply: &Value, streamed: bool) -> Checked {
    ensure!(reply["object"] == "text_completion");
    let prompts = match asked["prompt"].as_array() {
        Some(items) if !items[0].is_number() => items.len() as u64,
        _ => 1,
    };
    check_choices(asked, reply, "cmpl-", prompts, streamed)?;
    for choice in list(&reply["choices"], "choices")? {
        let text = choice["text"].as_str().ok_or("no text")?;
        let is_cut = asked["truncate_prompt_tokens"].as_i64().is_some_and(|most| most > 0);
        if let (Some(prompt), true, false) = (asked["prompt"].as_str(), asked["echo"] == true, is_cut) {
            ensure!(text.starts_with(prompt));
        }
        let scores = &choice["logprobs"];
        ensure!(scores.is_object() == asked["logprobs"].is_number());
        if scores.is_object() {
            let names = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
            let mut lengths = Vec::new();
            for name in names {
                lengths.push(list(&scores[name], name)?.len());
            }
            ensure!(lengths.iter().all(|length| *length == lengths[0]));
        }
    }
    Ok(())
}

fn join_completion(whole: &mut Value, choice: &Value) -> Checked {
    append(&mut whole["text"], &choice["text"])?;
    append_lists(&mut whole["logprobs"], &choice["logprobs"]);
    Ok(())
}

fn check_message(asked: &Value, reply: &Value) -> Checked {
    ensure!(reply["type"] == "message", reply["role"] == "assistant", reply["model"] == MODEL);
    ensure!(reply["id"].as_str().is_some_and(|id| id.starts_with("msg_")));
    for block in list(&reply["content"], "content")? {
        match block["type"].as_str() {
            Some("text") => ensure!(block["text"].as_str().is_some_and(|text| !text.is_empty())),
            Some("tool_use") => {
                ensure!(block["input"].is_object(), block["name"].is_string(), asked["tools"].is_array())
            }
            _ => return Err(format!("a block of another type: {block}")),
        }
    }
    let reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"];
    ensure!(reasons.contains(&reply["stop_reason"].as_str().unwrap_or("none")));
    ensure!((reply["stop_reason"] == "stop_sequence") == reply["stop_sequence"].is_string());
    for name in ["input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"] {
        ensure!(is_count(&reply["usage"][name]));
    }
    ensure!(reply["usage"]["output_tokens"].as_u64() <= whole(asked, &["max_tokens"]));
    Ok(())
}

/// Builds the message from the events of an Anthropic stream.
fn joined_message(events: &[Value]) -> Result<Value, String> {
    let pings = events.iter().take_while(|event| *event == &json!({"type": "ping"})).count();
    ensure!(pings > 0);
    let events = &events[pings..];
    let [first, .., last] = events else { return Err("hardly an event".into()) };
    ensure!(first["type"] == "message_start", last == &json!({"type": "message_stop"}));
    let mut message = first["message"].clone();
    ensure!(message["content"] == json!([]), message["stop_reason"].is_null());
    let mut blocks = Vec::new();
    let (mut open, mut json, mut cut) = (false, String::new(), false);
    for event in &events[1..events.len() - 1] {
        ensure!(message["stop_reason"].is_null());
        match event["type"].as_str().unwrap_or("") {
            "ping" => {}
            "content_block_start" => {
                ensure!(!open, event["index"] == blocks.len());
                open = true;
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                ensure!(open, event["index"] == blocks.len() - 1);
                let (delta, block) = (&event["delta"], blocks.last_mut().ok_or("no block")?);
                match delta["type"].as_str() {
                    Some("text_delta") => append(&mut block["text"], &delta["text"])?,
                    Some("input_json_delta") => json += delta["partial_json"].as_str().ok_or("no JSON")?,
                    _ => return Err(format!("a delta of another type: {delta}")),
                }
            }
            "content_block_stop" => {
                ensure!(open, event["index"] == blocks.len() - 1);
                open = false;
                if !json.is_empty() {
                    let input = serde_json::from_str(&std::mem::take(&mut json));
                    ensure!(!cut);
                    cut = input.is_err();
                    blocks.last_mut().ok_or("no block")?["input"] = input.unwrap_or(json!({}));
                }
            }
            "message_delta" => {
                ensure!(!open);
                for (name, value) in event["delta"].as_object().ok_or("no delta")? {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            _ => return Err(format!("an event of another type: {event}")),
        }
    }
    // The input of a truncated call is not a JSON object, so only its presence is checked.
    ensure!(!cut || message["stop_reason"] != "tool_use");
    message["content"] = blocks.into();
    Ok(message)
}

fn check_response(asked: &Value, reply: &Value) -> Checked {
    ensure!(reply["object"] == "response", reply["error"].is_null(), reply["model"] == MODEL);
    ensure!(reply["id"].as_str().is_some_and(|id| id.starts_with("resp_")));
    let status = reply["status"].as_str().unwrap_or("none");
    ensure!(["completed", "incomplete"].contains(&status));
    ensure!((status == "incomplete") == reply["incomplete_details"].is_object());
    for item in list(&reply["output"], "output")? {
        match item["type"].as_str() {
            Some("message") => {
                ensure!(item["role"] == "assistant", item["status"] == status);
                for part in list(&item["content"], "content")? {
                    ensure!(
                        part["type"] == "output_text",
                        part["text"].is_string(),
                        part["annotations"].is_array()
                    );
                    ensure!(part["logprobs"].is_array());
                }
            }
            Some("function_call") => {
                ensure!(item["name"].is_string(), item["arguments"].is_string(), asked["tools"].is_array())
            }
            _ => return Err(format!("an item of another type: {item}")),
        }
    }
    let [input, output, total] = ["input_tokens", "output_tokens", "total_tokens"]
        .map(|name| reply["usage"][name].as_u64().unwrap_or(u64::MAX));
    ensure!(input.checked_add(output) == Some(total));
    ensure!(whole(asked, &["max_output_tokens"]).is_none_or(|most| output <= most));
    Ok(())
}

/// The response in the last event. The events before must contain the same items.
fn joined_response(events: &[Value]) -> Result<Value, String> {
    let [first, .., last] = events else { return Err("hardly an event".into()) };
    ensure!(first["type"] == "response.created", first["response"]["status"] == "in_progress");
    let whole = &last["response"];
    ensure!(last["type"] == format!("response.{}", whole["status"].as_str().unwrap_or("none")));
    ensure!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let told: String = of("response.output_text.delta").iter().filter_map(|e| e["delta"].as_str()).collect();
    let parts = whole["output"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|item| item["content"].as_array())
        .flatten();
    let text: String = parts.filter_map(|part| part["text"].as_str()).collect();
    ensure!(told == text);
    let items: Vec<Value> =
        of("response.output_item.done").iter().map(|event| event["item"].clone()).collect();
    ensure!(whole["output"] == json!(items), of("response.output_item.added").len() == items.len());
    Ok(whole.clone())
}

fn check_tokens(asked: &Value, reply: &Value) -> Checked {
    let tokens = list(&reply["tokens"], "tokens")?;
    if asked["content"].is_string() {
        let pieces = asked["with_pieces"] == true;
        let is_token = |token: &Value| {
            if pieces {
                let piece = &token["piece"];
                is_count(&token["id"])
                    && (piece.is_string() || piece.as_array().is_some_and(|bytes| bytes.iter().all(is_count)))
            } else {
                is_count(token)
            }
        };
        ensure!(tokens.iter().all(is_token));
        return Ok(());
    }
    ensure!(tokens.iter().all(is_count), reply["count"] == tokens.len(), is_count(&reply["max_model_len"]));
    ensure!(reply["token_strs"].is_array() == (asked["return_token_strs"] == true));
    Ok(())
}

/// Checks that an answer has the format of its route.
fn check(path: &str, asked: &Value, streamed: bool, bytes: &[u8]) -> Checked {
    let whole = || serde_json::from_slice::<Value>(bytes).map_err(|error| error.to_string());
    let can_stream = [CHAT, COMPLETIONS, MESSAGES, RESPONSES].contains(&path);
    ensure!(streamed == (can_stream && asked["stream"] == true));
    match (path, streamed) {
        (CHAT, true) => {
            let reply =
                joined(asked, &chunks(bytes)?, ["chat.completion.chunk", "chat.completion"], join_chat)?;
            check_chat(asked, &reply, true)
        }
        (COMPLETIONS, true) => {
            let reply = joined(asked, &chunks(bytes)?, ["text_completion"; 2], join_completion)?;
            check_completion(asked, &reply, true)
        }
        (MESSAGES, true) => check_message(asked, &joined_message(&named_events(bytes))?),
        (RESPONSES, true) => check_response(asked, &joined_response(&named_events(bytes))?),
        (CHAT, false) => check_chat(asked, &whole()?, false),
        (COMPLETIONS, false) => check_completion(asked, &whole()?, false),
        (MESSAGES, false) => check_message(asked, &whole()?),
        (RESPONSES, false) => check_response(asked, &whole()?),
        (TOKENIZE, false) => check_tokens(asked, &whole()?),
        (EMBEDDINGS, false) => {
            let reply = whole()?;
            let data = list(&reply["data"], "data")?;
            ensure!(
                reply["object"] == "list",
                reply["model"] == MODEL,
                is_count(&reply["usage"]["total_tokens"])
            );
            let inputs = asked["input"].as_array().filter(|items| !items[0].is_number());
            ensure!(data.len() == inputs.map_or(1, Vec::len));
            for (i, entry) in data.iter().enumerate() {
                let is_vector = match asked["encoding_format"] == "base64" {
                    true => entry["embedding"]
                        .as_str()
                        .is_some_and(|text| text.len() % 4 == 0 && !text.is_empty()),
                    false => {
                        entry["embedding"].as_array().is_some_and(|all| all.iter().all(Value::is_number))
                    }
                };
                ensure!(entry["object"] == "embedding", entry["index"] == i, is_vector);
            }
            Ok(())
        }
        (DETOKENIZE, false) => {
            let reply = whole()?;
            ensure!(reply["prompt"].is_string(), reply["prompt"] == reply["content"]);
            Ok(())
        }
        (COUNT, false) => {
            ensure!(whole()?["input_tokens"].as_u64().is_some_and(|n| n > 0));
            Ok(())
        }
        _ => Err("a stream from a route without streaming".into()),
    }
}

/// Checks that a refusal is an error in its format. Only 400 and 404 are expected: the test never exceeds limits of
/// rate or time.
fn check_refusal(path: &str, status: u16, bytes: &[u8]) -> Checked {
    ensure!(status == 400 || status == 404);
    let reply: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let error = &reply["error"];
    ensure!(error["message"].as_str().is_some_and(|message| !message.is_empty() && !message.contains('\n')));
    if path == MESSAGES || path == COUNT {
        let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
        ensure!(reply["type"] == "error", error["type"] == kind, reply["request_id"].is_string());
    } else {
        ensure!(error["type"] == "invalid_request_error", error["code"].is_string());
        ensure!(error["param"].is_string() || error["param"].is_null());
    }
    Ok(())
}

#[derive(Default)]
struct Counts {
    sent: usize,
    whole: usize,
    streamed: usize,
    refused: usize,
}

/// Sends `n` bodies to a model and checks each answer.
async fn send_bodies(n: usize, seed: u64, runner: Box<dyn Runner>) {
    println!("seed {seed}");
    let (router, engine) = served(runner);
    let kept = post_to(RESPONSES, json!({"model": MODEL, "input": "Hi", "max_output_tokens": 2}).to_string());
    let (status, _, first) = send_json(&router, kept).await;
    assert_eq!(status, 200, "{first}");
    let mut draw =
        Draw { rng: ChaCha8Rng::seed_from_u64(seed), previous: first["id"].as_str().expect("an id").into() };
    let bodies: Vec<(&str, bool, Vec<u8>)> = (0..n)
        .map(|i| {
            let path = draw.of(&PATHS);
            let body = draw.valid(path);
            match draw.chance(VALID_SHARE) {
                true => (path, true, body.to_string().into_bytes()),
                false => (path, false, mutated(&body, i, &mut draw.rng)),
            }
        })
        .collect();
    let exchanges = bodies.into_iter().map(async |(path, valid, body)| {
        let (status, headers, reply) = send(&router, post_to(path, body.clone())).await;
        let streamed = headers[header::CONTENT_TYPE] == "text/event-stream";
        let checked = match status.as_u16() {
            200 => {
                let asked = serde_json::from_slice(&body).expect("only valid JSON may be answered");
                check(path, &asked, streamed, &reply)
            }
            _ if valid => Err("a valid body was refused".into()),
            status => check_refusal(path, status, &reply),
        };
        let problem = checked.err().map(|problem| {
            let [body, reply] = [body, reply].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            format!("{path}: {status}: {problem}\nasked: {body}\nanswered: {reply}\n")
        });
        (path, status == 200, streamed, problem)
    });
    let (mut counts, mut problems) = (BTreeMap::<&str, Counts>::new(), Vec::new());
    let mut exchanges = futures::stream::iter(exchanges).buffer_unordered(AT_ONCE);
    while let Some((path, answered, streamed, problem)) = exchanges.next().await {
        let counts = counts.entry(path).or_default();
        counts.sent += 1;
        match (answered, streamed) {
            (true, false) => counts.whole += 1,
            (true, true) => counts.streamed += 1,
            (false, _) => counts.refused += 1,
        }
        problems.extend(problem);
    }
    let shown: String = problems.iter().take(PROBLEMS).map(String::as_str).collect();
    assert!(problems.is_empty(), "{} went wrong, the first of them:\n{shown}", problems.len());
    println!("{:<28}{:>7}{:>10}{:>12}{:>9}", "route", "sent", "answered", "of them SSE", "refused");
    let mut all = 0;
    for (path, Counts { sent, whole, streamed, refused }) in &counts {
        println!("{path:<28}{sent:>7}{:>10}{streamed:>12}{refused:>9}", whole + streamed);
        assert!(
            50 * whole > *sent && 50 * refused > *sent,
            "{path}: too few bodies were answered or refused"
        );
        all += whole + streamed;
    }
    println!("{all} of {n} answered with 200");
    assert!(10 * all >= 3 * n, "only {all} of {n} were answered");
    assert_at_rest(&router).await;
    engine.drain();
    assert!(
        tokio::task::spawn_blocking(move || engine.join(HANG)).await.expect("no panic"),
        "the engine did not stop"
    );
}

/// The runner checks every batch and generates unpredictable ids.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_bodies_are_answered_or_refused() {
    let kv = kv_with(3000, 500);
    let limits = Limits {
        max_batch_tokens: 64,
        max_sequences: 8,
        max_draws: 64,
        max_in_flight: 2,
        kv,
        max_context: 1024,
        vocab_size: VOCABULARY as usize,
        ..fake_limits()
    };
    let mut mixed = mixed(VOCABULARY as usize);
    let ends_soon: Script = Box::new(move |tokens, draw| match mixed(tokens, draw) {
        id if id % 16 == 0 => END_OF_TURN,
        id => id,
    });
    send_bodies(BODIES, 0x10_000, FakeRunner::new(limits, ends_soon).0).await;
}

/// Sends a few bodies to a model whose sampling (biases, penalties, masks, log probabilities) runs on the device.
#[tokio::test(flavor = "multi_thread")]
async fn random_bodies_are_answered_or_refused_by_a_model_on_a_device() {
    let options =
        LoadOptions { max_context: Some(768), sequences: 8, max_batch_tokens: 128, ..LoadOptions::default() };
    send_bodies(150, 0xde71ce, Box::new(goldens::load(&data("gemma3/tiny-a"), &options))).await;
}
