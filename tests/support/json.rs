//! JSON of files, and changes to JSON bodies: given fields, or one random value.

use std::path::Path;

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The JSON in a file.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> T {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `base` with the fields of `more` set.
pub fn with(mut base: Value, more: Value) -> Value {
    for (name, value) in more.as_object().expect("fields") {
        base[name] = value.clone();
    }
    base
}

/// Replaces or removes one value inside `value` at a random depth.
pub fn replace_somewhere(value: &mut Value, by: &Value, rng: &mut ChaCha8Rng) {
    let deeper = rng.random_bool(0.6);
    match value {
        Value::Object(map) if !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).unwrap().clone();
            if deeper && (map[&key].is_object() || map[&key].is_array()) {
                replace_somewhere(&mut map[&key], by, rng);
            } else if rng.random_bool(0.2) {
                map.remove(&key);
            } else {
                map[&key] = by.clone();
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let index = rng.random_range(0..items.len());
            if deeper {
                replace_somewhere(&mut items[index], by, rng);
            } else {
                items[index] = by.clone();
            }
        }
        _ => *value = by.clone(),
    }
}
