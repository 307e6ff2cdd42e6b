//! Which JSON types the schema of an argument allows. A syntax without quotes needs this to tell a text from a number.

use serde_json::{Map, Value};

/// The types that a schema allows, as a set of bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Types(u8);

const STRING: u8 = 1;
const BOOLEAN: u8 = 2;
const NULL: u8 = 4;
/// Numbers, objects and arrays.
const OTHERS: u8 = 8;
const ALL: u8 = 15;

/// Deepest nesting of schemas that is followed. Deeper ones allow every type.
const MAX_DEPTH: usize = 16;

impl Types {
    pub const ANY: Self = Self(ALL);

    /// Only texts.
    pub fn is_text(self) -> bool {
        self.0 == STRING
    }

    /// Texts, among others.
    pub fn has_text(self) -> bool {
        self.0 & STRING != 0
    }

    pub fn has_boolean(self) -> bool {
        self.0 & BOOLEAN != 0
    }

    pub fn has_null(self) -> bool {
        self.0 & NULL != 0
    }

    /// Whether a value of this type is allowed.
    pub fn allow(self, value: &Value) -> bool {
        self.0 & bit(value) != 0
    }

    /// The types that the schema allows. References point into `document`.
    pub fn of(schema: &Value, document: &Value) -> Self {
        Self(of(schema, document, MAX_DEPTH))
    }
}

fn bit(value: &Value) -> u8 {
    match value {
        Value::String(_) => STRING,
        Value::Bool(_) => BOOLEAN,
        Value::Null => NULL,
        Value::Number(_) | Value::Array(_) | Value::Object(_) => OTHERS,
    }
}

fn of(schema: &Value, document: &Value, depth: usize) -> u8 {
    let Some(schema) = schema.as_object().filter(|_| depth > 0) else { return ALL };
    let each = |name: &str| schema.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let mut types = match schema.get("type") {
        Some(Value::String(name)) => of_name(name),
        Some(Value::Array(names)) => {
            names.iter().filter_map(Value::as_str).fold(0, |types, name| types | of_name(name))
        }
        _ => ALL,
    };
    if let Some(constant) = schema.get("const") {
        types &= bit(constant);
    }
    if !each("enum").is_empty() {
        types &= each("enum").iter().fold(0, |types, value| types | bit(value));
    }
    if let Some(target) = target(schema, document) {
        types &= of(target, document, depth - 1);
    }
    for options in [each("anyOf"), each("oneOf")].into_iter().filter(|options| !options.is_empty()) {
        types &= options.iter().fold(0, |types, option| types | of(option, document, depth - 1));
    }
    each("allOf").iter().fold(types, |types, part| types & of(part, document, depth - 1))
}

fn of_name(name: &str) -> u8 {
    match name {
        "string" => STRING,
        "boolean" => BOOLEAN,
        "null" => NULL,
        _ => OTHERS,
    }
}

/// The schema that a `$ref` refers to, if it is in the document.
fn target<'a>(schema: &Map<String, Value>, document: &'a Value) -> Option<&'a Value> {
    document.pointer(schema.get("$ref")?.as_str()?.strip_prefix('#')?)
}
