//! Short ways to write lists of words and of JSON values.

use serde_json::{Value, json};

/// The words of a text, for example of a command line.
pub fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// The values of a JSON list.
pub fn values(list: Value) -> Vec<Value> {
    list.as_array().expect("a list").clone()
}

/// For each field of `values`, its name and a body with only this field, once for every value in its list.
pub fn each_value(values: &Value) -> impl Iterator<Item = (&str, Value)> {
    values.as_object().expect("fields").iter().flat_map(|(name, values)| {
        values.as_array().expect("values").iter().map(move |value| (name.as_str(), json!({name: value})))
    })
}
