//! Variables that a request gives to the chat template, such as `enable_thinking`.

use serde_json::{Map, Value};

/// The variables of a request, by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TemplateKwargs(Map<String, Value>);

impl TemplateKwargs {
    /// Names that the server itself gives to the template.
    const RESERVED: [&str; 7] = [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "chat_template",
    ];

    /// Refuses names that the server sets itself; the error is such a name.
    pub fn new(variables: Map<String, Value>) -> Result<Self, String> {
        match variables.keys().find(|name| Self::RESERVED.contains(&name.as_str())) {
            Some(name) => Err(name.clone()),
            None => Ok(TemplateKwargs(variables)),
        }
    }

    /// These variables, with one more unless it is set already.
    #[must_use]
    pub fn or(&self, name: &str, value: impl Into<Value>) -> Self {
        let mut variables = self.0.clone();
        variables.entry(name).or_insert_with(|| value.into());
        Self(variables)
    }

    /// These variables, with those of `defaults` that are not set.
    #[must_use]
    pub fn over(&self, defaults: &Self) -> Self {
        let mut variables = defaults.0.clone();
        variables.extend(self.0.clone());
        Self(variables)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn value(&self) -> minijinja::Value {
        minijinja::Value::from_serialize(&self.0)
    }

    /// An estimate of the memory that the variables take in a template.
    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| name.len() + bytes(value)).sum()
    }

    /// These variables, with the result of `change` for every text in them.
    pub(super) fn with_texts(&self, change: &dyn Fn(&str) -> String) -> TemplateKwargs {
        let changed = |(name, value): (&String, &Value)| (name.clone(), changed(value, Keys::Kept, change));
        TemplateKwargs(self.0.iter().map(changed).collect())
    }
}

/// An estimate of the memory that a value takes in a template.
pub(super) fn bytes(value: &Value) -> usize {
    const EACH: usize = 64;
    EACH + match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(bytes).sum(),
        Value::Object(object) => object.iter().map(|(name, value)| name.len() + bytes(value)).sum(),
        _ => 0,
    }
}

/// Whether [`changed`] changes the names in objects.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Keys {
    Kept,
    Changed,
}

/// A value with the result of `change` for every text in it.
pub(super) fn changed(value: &Value, keys: Keys, change: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(text)),
        Value::Array(list) => list.iter().map(|value| changed(value, keys, change)).collect(),
        Value::Object(object) => {
            let name = |name: &String| if keys == Keys::Changed { change(name) } else { name.clone() };
            let member = |(key, value): (&String, &Value)| (name(key), changed(value, keys, change));
            Value::Object(object.iter().map(member).collect())
        }
        other => other.clone(),
    }
}
