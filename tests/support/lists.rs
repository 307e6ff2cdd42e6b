//! Short ways to write lists of words and of JSON values.

use serde_json::Value;

/// The words of a text, for example of a command line.
pub fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// The values of a JSON list.
pub fn values(list: Value) -> Vec<Value> {
    list.as_array().expect("a list").clone()
}
