//! Tools for chats, and apps whose context has room for them.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::model::Limits;

use super::app::{self, App, DEFAULTS, END_OF_TURN, OPTIONS, app_with};
use super::fake_runner::{Script, kv_with, says};
use super::tokenizers::tokenizer;

/// Limits with room for tools in the context.
pub fn limits() -> Limits {
    let limits = app::limits();
    Limits { kv: kv_with(500, 32), max_context: 2000, ..limits }
}

/// A model that answers as the script says.
pub fn app(script: Script) -> App {
    app_with(limits(), OPTIONS, DEFAULTS, script)
}

/// A model that answers everything with `text`.
pub fn app_that_says(text: &str) -> App {
    app(says(&tokenizer().encode(text, false).unwrap(), END_OF_TURN))
}

/// A tool with two parameters, one of them required.
pub fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
        },
    }})
}

/// A tool whose schema refers to a definition.
pub fn roll() -> Value {
    json!({"type": "function", "function": {"name": "roll", "parameters": {
        "type": "object",
        "properties": {"count": {"$ref": "#/$defs/n"}},
        "required": ["count"],
        "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    }}})
}

/// A tool without parameters.
pub fn now() -> Value {
    json!({"type": "function", "function": {"name": "now"}})
}

/// A call of [`weather`], as a model writes it.
pub const ROME: &str = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Rome\", \"unit\": \"c\"}}";

/// An app whose model samples random ids.
pub fn babbling() -> App {
    let mut rng = ChaCha8Rng::seed_from_u64(0xbab);
    app(Box::new(move |_, _| rng.random_range(0..512)))
}
