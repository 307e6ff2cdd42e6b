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

    pub(super) fn value(&self) -> minijinja::Value {
        minijinja::Value::from_serialize(&self.0)
    }

    /// An estimate of the memory that the variables take in a template.
    pub(super) fn bytes(&self) -> usize {
        fn of(value: &Value) -> usize {
            const EACH: usize = 64;
            EACH + match value {
                Value::String(text) => text.len(),
                Value::Array(list) => list.iter().map(of).sum(),
                Value::Object(object) => object.iter().map(|(name, value)| name.len() + of(value)).sum(),
                _ => 0,
            }
        }
        self.0.iter().map(|(name, value)| name.len() + of(value)).sum()
    }

    /// These variables, with the result of `change` for every text in them.
    pub(super) fn with_texts(&self, change: &dyn Fn(&str) -> String) -> TemplateKwargs {
        fn changed(value: &Value, change: &dyn Fn(&str) -> String) -> Value {
            match value {
                Value::String(text) => Value::String(change(text)),
                Value::Array(list) => list.iter().map(|value| changed(value, change)).collect(),
                Value::Object(object) => Value::Object(
                    object.iter().map(|(name, value)| (name.clone(), changed(value, change))).collect(),
                ),
                other => other.clone(),
            }
        }
        TemplateKwargs(self.0.iter().map(|(name, value)| (name.clone(), changed(value, change))).collect())
    }
}
