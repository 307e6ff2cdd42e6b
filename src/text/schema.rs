//! Prepares JSON schemas of clients for llguidance, and compiles them.
//!
//! [`compile`] checks the schemas and resolves each `$ref`. A keyword with an invalid value is an error that names the
//! position in the schema. A keyword that cannot be enforced is an error in a strict schema. In any other schema it is
//! left out, so it does not constrain the answer.
//!
//! Only llguidance itself knows whether it accepts a regular expression, a bound, or a combination of keywords. So
//! first the whole schema is compiled. If that fails, its parts are compiled, from the outside to the inside, to find
//! the keyword that is not accepted.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Instant;

use serde_json::{Map, Number, Value, json};

use super::refusal::{Kind, Refusal};

/// Most optional properties of one object. Each adds four items to a row of the parser. With more, the answer would
/// exceed the parser's limit of items in a row after its first optional property.
const MAX_OPTIONAL: usize = 480;
/// Most compilations of parts of a schema to find the keywords that cannot be enforced.
const MAX_TRIALS: usize = 2000;
/// Longest path, and longest value, in an error.
const MAX_PATH_CHARS: usize = 80;
const MAX_VALUE_CHARS: usize = 40;
/// No answer has a text of this length, or a list with this many items.
const BEYOND_ANSWERS: u64 = 1 << 31;
/// An f64 represents every whole number up to this one exactly.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];
/// The formats that llguidance enforces.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
/// Keywords that contain a schema and are not supported.
const SCHEMAS_UNSUPPORTED: [&str; 8] =
    ["not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"];
const A_SCHEMA: &str = "a schema: an object, true or false";
/// Keywords that contain one schema, a list of schemas, or schemas by name.
const ONE: [&str; 2] = ["additionalProperties", "items"];
const LIST: [&str; 4] = ["prefixItems", "anyOf", "oneOf", "allOf"];
const NAMED: [&str; 2] = ["properties", "patternProperties"];
/// The order in which the keywords of a schema are tried. If two cannot be combined, the first one is kept.
const TRIED: [&str; 26] = [
    "$ref",
    "type",
    "const",
    "enum",
    "properties",
    "additionalProperties",
    "required",
    "prefixItems",
    "items",
    "anyOf",
    "oneOf",
    "allOf",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "patternProperties",
];
/// The number of keywords at the start of [`TRIED`] that are never left out, except in a schema with a `$ref`.
const NEEDED: usize = 11;

/// A schema of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct SchemaPart {
    pub schema: Value,
    /// Whether a keyword that cannot be enforced is an error.
    pub strict: bool,
}

impl SchemaPart {
    /// A schema that refers to the part with this index.
    pub fn reference(index: usize) -> Value {
        json!({"$ref": format!("#/$defs/{index}")})
    }
}

/// An error in the schemas of a request.
#[derive(Debug)]
pub(super) struct Problem {
    /// The index of the invalid part; `None` = the combination of all parts is invalid.
    pub part: Option<usize>,
    pub text: String,
}

/// The schema of a part, or the target of a `$ref`.
struct Definition {
    place: Place,
    /// The schema that llguidance gets. Its references are "#/$defs/" with the index of a definition.
    schema: Value,
}

/// Compiles the schema `form`. It refers to the first of `parts` as "#/$defs/0", and so on. `run` compiles one schema. Each run
/// is short, but there may be thousands: none begins after `until` to find a keyword that cannot be enforced.
pub(super) fn compile<T>(
    form: &Value,
    parts: &[SchemaPart],
    until: Instant,
    run: impl Fn(Value) -> Result<T, Refusal>,
) -> Result<T, Problem> {
    let mut reader = Reader { parts, definitions: Vec::new(), known: HashMap::new(), names: HashMap::new() };
    reader.read()?;
    let definitions = reader.definitions;
    refuse_endless(&definitions)?;
    let mut schemas = Schemas { parts, definitions, run, until, trials: 0, relaxed: HashSet::new() };
    if let Ok(compiled) = (schemas.run)(schemas.with_definitions(form)) {
        return Ok(compiled);
    }
    for part in 0..parts.len() {
        schemas.relax_definition(part)?;
    }
    (schemas.run)(schemas.with_definitions(form)).map_err(|refusal| schemas.located(refusal))
}

/// A position in a part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    part: usize,
    /// A JSON pointer.
    pointer: String,
}

impl Place {
    fn at(&self, name: &str) -> Self {
        Self { part: self.part, pointer: joined(&self.pointer, name) }
    }

    /// A problem with a keyword of the schema at this place. An empty keyword means the schema itself.
    fn problem(&self, keyword: &str, text: &str) -> Problem {
        let path = path(&self.pointer);
        let subject = match (keyword, path.as_str()) {
            ("", "") => "the schema".to_owned(),
            ("", _) => path,
            (_, "") => format!("{keyword:?}"),
            _ => format!("{keyword:?} of {path}"),
        };
        Problem { part: Some(self.part), text: format!("{subject}: {text}") }
    }

    fn wrong(&self, keyword: &str, expected: &str, got: &Value) -> Problem {
        self.problem(keyword, &format!("expected {expected}, got {}", shown(got)))
    }
}

fn joined(pointer: &str, name: &str) -> String {
    format!("{pointer}/{}", name.replace('~', "~0").replace('/', "~1"))
}

/// A JSON pointer as a path with dots. The beginning of a long path is cut.
fn path(pointer: &str) -> String {
    let mut path = String::new();
    for step in pointer.split('/').skip(1) {
        let name = step.replace("~1", "/").replace("~0", "~");
        if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()) {
            path.push_str(&format!("[{name}]"));
        } else if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-$".contains(c)) {
            path.push_str(if path.is_empty() { "" } else { "." });
            path.push_str(&name);
        } else {
            path.push_str(&format!("[{name:?}]"));
        }
    }
    match path.char_indices().nth_back(MAX_PATH_CHARS) {
        Some((cut, _)) => format!("...{}", &path[cut..]),
        None => path,
    }
}

/// A value as text for an error.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) => format!("{:?}", text.chars().take(MAX_VALUE_CHARS).collect::<String>()),
        other => other.to_string().chars().take(MAX_VALUE_CHARS).collect(),
    }
}

/// The index of the definition that a read schema refers to.
fn target(schema: &Value) -> Option<usize> {
    schema.get("$ref")?.as_str()?.rsplit('/').next()?.parse().ok()
}

/// The schemas directly in a read schema, each with its pointer relative to that schema.
fn inner(schema: &Value) -> Vec<(String, &Value)> {
    let mut inner = Vec::new();
    for (keyword, value) in schema.as_object().into_iter().flatten() {
        let at = joined("", keyword);
        match value {
            Value::Object(named) if NAMED.contains(&keyword.as_str()) => {
                inner.extend(named.iter().map(|(name, schema)| (joined(&at, name), schema)));
            }
            Value::Array(list) if LIST.contains(&keyword.as_str()) => {
                inner.extend(list.iter().enumerate().map(|(i, schema)| (format!("{at}/{i}"), schema)));
            }
            schema if ONE.contains(&keyword.as_str()) => inner.push((at, schema)),
            _ => {}
        }
    }
    inner
}

/// Reads parts into definitions.
struct Reader<'a> {
    parts: &'a [SchemaPart],
    definitions: Vec<Definition>,
    /// The index of each place's definition.
    known: HashMap<Place, usize>,
    /// For each part that was searched for names: the pointers of its `$id`s and `$anchor`s.
    names: HashMap<usize, HashMap<String, String>>,
}

impl Reader<'_> {
    fn read(&mut self) -> Result<(), Problem> {
        for part in 0..self.parts.len() {
            self.define(Place { part, pointer: String::new() });
        }
        let mut next = 0;
        while next < self.definitions.len() {
            let place = self.definitions[next].place.clone();
            let parts = self.parts;
            let schema = parts[place.part].schema.pointer(&place.pointer).expect("references are resolved");
            self.definitions[next].schema = self.schema(schema, &place)?;
            next += 1;
        }
        Ok(())
    }

    /// The index of the definition of a place. A new definition is read later.
    fn define(&mut self, place: Place) -> usize {
        let new = self.definitions.len();
        let index = *self.known.entry(place.clone()).or_insert(new);
        if index == new {
            self.definitions.push(Definition { place, schema: Value::Null });
        }
        index
    }

    fn schema(&mut self, schema: &Value, place: &Place) -> Result<Value, Problem> {
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            other => return Err(place.wrong("", A_SCHEMA, other)),
        };
        let strict = self.parts[place.part].strict;
        let types = types(map, place)?;
        let mut read = Map::new();
        // Further schemas for keywords that occur twice after the conversion (`anyOf` and `oneOf`). They go to `allOf`.
        let mut repeated = Vec::new();
        for (keyword, value) in map {
            let at = place.at(keyword);
            let (keyword, value) = match keyword.as_str() {
                "type" => ("type", json!(types)),
                "properties" => ("properties", self.named(value, place, keyword)?),
                "patternProperties" => ("patternProperties", self.named(value, place, keyword)?),
                "additionalProperties" => ("additionalProperties", self.schema(value, &at)?),
                // Drafts before 2020-12: a list in `items` is for the first items, `additionalItems` for the rest.
                "items" if value.is_array() => ("prefixItems", self.list(value, place, keyword, 0)?),
                "prefixItems" if map.get("items").is_some_and(Value::is_array) => continue,
                "additionalItems" if !map.get("items").is_some_and(Value::is_array) => continue,
                "items" | "additionalItems" => ("items", self.schema(value, &at)?),
                "prefixItems" => ("prefixItems", self.list(value, place, keyword, 0)?),
                "allOf" => ("allOf", self.list(value, place, keyword, 1)?),
                "anyOf" => ("anyOf", self.list(value, place, keyword, 1)?),
                "oneOf" if strict => ("oneOf", self.list(value, place, keyword, 1)?),
                "oneOf" => ("anyOf", self.list(value, place, keyword, 1)?),
                "$ref" => {
                    let target = self.resolve(value, place)?;
                    ("$ref", json!(format!("#/$defs/{}", self.define(target))))
                }
                name => match leaf(name, value, types.as_deref(), place)? {
                    Leaf::Enforced(value) => (name, value),
                    Leaf::Ignored => continue,
                    Leaf::Unenforced { why, .. } if strict => return Err(unenforced(place, name, &why)),
                    Leaf::Unenforced { instead: None, .. } => continue,
                    Leaf::Unenforced { instead: Some(options), .. } => ("anyOf", options),
                },
            };
            match read.contains_key(keyword) {
                true => repeated.push(json!({keyword: value})),
                false => drop(read.insert(keyword.to_owned(), value)),
            }
        }
        let bounds = bounds(map, types.as_deref(), place, strict)?;
        read.extend(bounds.into_iter().map(|(keyword, bound)| (keyword.to_owned(), bound)));
        if !repeated.is_empty() {
            let all = read.entry("allOf").or_insert_with(|| json!([]));
            all.as_array_mut().expect("a list of schemas").append(&mut repeated);
        }
        check_optional(&read, place)?;
        Ok(Value::Object(read))
    }

    fn named(&mut self, named: &Value, place: &Place, keyword: &str) -> Result<Value, Problem> {
        let Value::Object(named) = named else {
            return Err(place.wrong(keyword, "an object of schemas", named));
        };
        let at = place.at(keyword);
        let read = |(name, schema): (&String, &Value)| Ok((name.clone(), self.schema(schema, &at.at(name))?));
        Ok(Value::Object(named.iter().map(read).collect::<Result<_, Problem>>()?))
    }

    fn list(&mut self, list: &Value, place: &Place, keyword: &str, least: usize) -> Result<Value, Problem> {
        let schemas = list.as_array().filter(|schemas| schemas.len() >= least);
        let schemas = schemas.ok_or_else(|| place.wrong(keyword, "a list of one or more schemas", list))?;
        let at = place.at(keyword);
        let read = |(i, schema): (usize, &Value)| self.schema(schema, &at.at(&i.to_string()));
        Ok(Value::Array(schemas.iter().enumerate().map(read).collect::<Result<_, _>>()?))
    }

    /// The target of a `$ref`.
    fn resolve(&mut self, reference: &Value, place: &Place) -> Result<Place, Problem> {
        let text = reference.as_str().ok_or_else(|| place.wrong("$ref", "a text", reference))?;
        let (name, fragment) = text.split_once('#').unwrap_or((text, ""));
        let problem = |why: &str| place.problem("$ref", &format!("{} {why}", shown(reference)));
        let fragment =
            decoded(fragment).ok_or_else(|| problem("has a % without two hexadecimal digits after it"))?;
        let document = &self.parts[place.part].schema;
        let names = self.names.entry(place.part).or_insert_with(|| names(document));
        let root = match name {
            "" => base(document, &place.pointer),
            name => names.get(name).cloned().ok_or_else(|| {
                problem("is outside the schema, and this server does not fetch schemas; put it in \"$defs\"")
            })?,
        };
        let found = match fragment.as_str() {
            "" => Some(root),
            // Many schemas have an `$id`, but their pointers still begin at the root of the document. Try both.
            pointer if pointer.starts_with('/') => [format!("{root}{pointer}"), pointer.to_owned()]
                .into_iter()
                .find(|pointer| document.pointer(pointer).is_some())
                .or((pointer == "/").then_some(root)),
            anchor => names.get(&format!("#{anchor}")).cloned(),
        };
        let pointer = found.ok_or_else(|| problem("is not found in the schema"))?;
        Ok(Place { part: place.part, pointer })
    }
}

/// A reference's fragment with its percent-encoding decoded; `None` if the encoding is invalid.
fn decoded(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        bytes.push((digit(0)? * 16 + digit(1)?) as u8);
        rest = &after[2..];
    }
    String::from_utf8(bytes).ok()
}

/// The `$id` of a schema, without an empty fragment.
fn id(schema: &Value) -> Option<&str> {
    let id = schema.get("$id").or_else(|| schema.get("id"))?.as_str()?;
    Some(id.strip_suffix('#').unwrap_or(id)).filter(|id| !id.is_empty())
}

/// The pointer of the innermost schema around `pointer` that has an `$id`. References resolve relative to that schema.
fn base(document: &Value, pointer: &str) -> String {
    let mut ends = pointer.match_indices('/').map(|(end, _)| end).chain([pointer.len()]);
    let has_id = |end: &usize| {
        let schema = document.pointer(&pointer[..*end]);
        schema.and_then(id).is_some_and(|id| !id.starts_with('#'))
    };
    pointer[..ends.rfind(has_id).unwrap_or(0)].to_owned()
}

/// The `$id`s and anchors in a document, with the pointers of their schemas. An anchor's name begins with "#".
fn names(document: &Value) -> HashMap<String, String> {
    let mut names = HashMap::new();
    let mut left = vec![(String::new(), document)];
    while let Some((pointer, value)) = left.pop() {
        if let Some(id) = id(value) {
            names.entry(id.to_owned()).or_insert_with(|| pointer.clone());
        }
        for keyword in ["$anchor", "$dynamicAnchor"] {
            if let Some(anchor) = value.get(keyword).and_then(Value::as_str) {
                names.entry(format!("#{anchor}")).or_insert_with(|| pointer.clone());
            }
        }
        match value {
            Value::Object(map) => {
                let schemas = map.iter().filter(|(keyword, _)| {
                    // The values of these keywords are data, not schemas, even if they look like schemas.
                    !["const", "enum", "default", "examples"].contains(&keyword.as_str())
                });
                left.extend(schemas.map(|(keyword, value)| (joined(&pointer, keyword), value)));
            }
            Value::Array(list) => {
                left.extend(list.iter().enumerate().map(|(i, value)| (format!("{pointer}/{i}"), value)));
            }
            _ => {}
        }
    }
    names
}

/// The result for a keyword that contains no supported schemas.
enum Leaf {
    /// The value that llguidance gets.
    Enforced(Value),
    /// The keyword has no effect on what matches.
    Ignored,
    /// It cannot be enforced. If the schema is not strict, the alternatives in `instead` replace it.
    Unenforced { why: String, instead: Option<Value> },
}

fn leaf(keyword: &str, value: &Value, types: Option<&[String]>, place: &Place) -> Result<Leaf, Problem> {
    let wrong = |expected: &str| Err(place.wrong(keyword, expected, value));
    let unenforced = |why: String| Ok(Leaf::Unenforced { why, instead: None });
    let fits = match keyword {
        "const" | "enum" => {
            let values = match value {
                Value::Array(values) if keyword == "enum" => values.as_slice(),
                _ if keyword == "enum" => return wrong("a list of values"),
                one => std::slice::from_ref(one),
            };
            if values.is_empty() {
                return Err(place.problem(keyword, "the list is empty, so nothing matches it"));
            }
            let Some(rounded) = values.iter().find(|value| !is_exact(value)) else {
                return Ok(Leaf::Enforced(value.clone()));
            };
            let why = format!("{} is or has a number too large to be enforced exactly", shown(rounded));
            let instead = Some(values.iter().map(loosened).collect());
            return Ok(Leaf::Unenforced { why, instead });
        }
        "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
            return match count(value) {
                None => wrong("a whole number of at least 0"),
                Some(n) if n < BEYOND_ANSWERS => Ok(Leaf::Enforced(json!(n))),
                Some(_) if keyword.starts_with("max") => Ok(Leaf::Ignored),
                Some(_) => unenforced("no answer is that long".to_owned()),
            };
        }
        "format" => {
            let Some(format) = value.as_str() else { return wrong("a name") };
            let format: String = format.escape_debug().take(MAX_VALUE_CHARS).collect();
            let of_text = types.is_none_or(|types| types.iter().any(|kind| kind == "string"));
            return match FORMATS.contains(&format.as_str()) {
                true => Ok(Leaf::Enforced(value.clone())),
                false if of_text => unenforced(format!("unknown format: {format}")),
                false => Ok(Leaf::Ignored),
            };
        }
        "required" => match value.as_array().is_some_and(|names| names.iter().all(Value::is_string)) {
            true => return Ok(Leaf::Enforced(value.clone())),
            false => return wrong("a list of names"),
        },
        "pattern" if value.is_string() => return Ok(Leaf::Enforced(value.clone())),
        "pattern" => return wrong("a regular expression"),
        "multipleOf" if value.as_f64().is_some_and(|number| number > 0.0) => {
            return Ok(Leaf::Enforced(value.clone()));
        }
        "multipleOf" => return wrong("a number above 0"),
        // These are not supported.
        "uniqueItems" if value == false => return Ok(Leaf::Ignored),
        "uniqueItems" => (value.is_boolean(), "true or false"),
        "minContains" | "maxContains" => (count(value).is_some(), "a whole number of at least 0"),
        "dependencies" | "dependentRequired" | "dependentSchemas" => (value.is_object(), "an object"),
        "$dynamicRef" | "$recursiveRef" => (value.is_string(), "a text"),
        _ if SCHEMAS_UNSUPPORTED.contains(&keyword) => (value.is_object() || value.is_boolean(), A_SCHEMA),
        _ => return Ok(Leaf::Ignored),
    };
    match fits {
        (true, _) => unenforced("it is not supported".to_owned()),
        (false, expected) => wrong(expected),
    }
}

fn unenforced(place: &Place, keyword: &str, why: &str) -> Problem {
    place.problem(keyword, &format!("it cannot be enforced ({why}); leave it out, or set strict to false"))
}

/// The value of `type` as a list.
fn types(map: &Map<String, Value>, place: &Place) -> Result<Option<Vec<String>>, Problem> {
    let Some(value) = map.get("type") else { return Ok(None) };
    let list = match value {
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut types: Vec<String> = Vec::new();
    for name in list {
        match name.as_str().filter(|name| TYPES.contains(name)) {
            Some(name) if types.iter().any(|other| other == name) => {}
            Some(name) => types.push(name.to_owned()),
            None => return Err(place.wrong("type", &format!("one of {}", TYPES.join(", ")), name)),
        }
    }
    if types.is_empty() {
        return Err(place.problem("type", "the list is empty, so nothing matches it"));
    }
    Ok(Some(types))
}

/// The value of a keyword that is a length or a number of items; `None` if it is not a whole number of at least 0.
fn count(value: &Value) -> Option<u64> {
    let whole = |float: f64| (float >= 0.0 && float.fract() == 0.0).then_some(float as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

/// Whether llguidance enforces exactly this value. It computes with f64, so large numbers are rounded.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(integer), _) => integer != i64::MIN && (integer as f64) as i128 == integer.into(),
            (None, float) => float.is_some_and(is_within_64_bits),
        },
        Value::Array(list) => list.iter().all(is_exact),
        Value::Object(map) => map.values().all(is_exact),
        _ => true,
    }
}

/// Whether llguidance can use a number as an integer. A larger number would become the largest 64-bit integer.
fn is_within_64_bits(float: f64) -> bool {
    float.abs() < i64::MAX as f64
}

/// A schema for exactly this value, or for its type if the value cannot be enforced.
fn loosened(value: &Value) -> Value {
    match value {
        exact if is_exact(exact) => json!({"const": exact}),
        Value::Number(number) if number.is_f64() => json!({"type": "number"}),
        Value::Number(_) => json!({"type": "integer"}),
        Value::Array(_) => json!({"type": "array"}),
        _ => json!({"type": "object"}),
    }
}

/// The bounds of numbers. If the type allows only integers, the bounds are whole and inclusive.
fn bounds(
    map: &Map<String, Value>,
    types: Option<&[String]>,
    place: &Place,
    strict: bool,
) -> Result<Vec<(&'static str, Value)>, Problem> {
    let has = |name: &str| types.is_some_and(|types| types.iter().any(|kind| kind == name));
    let integers = has("integer") && !has("number");
    let mut bounds = Vec::new();
    for (inclusive, exclusive, step) in
        [("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)]
    {
        let mut whole: Option<i128> = None;
        for keyword in [inclusive, exclusive] {
            let number = match map.get(keyword) {
                None => continue,
                // Draft 4: the boolean says whether the other bound is exclusive.
                Some(Value::Bool(excluded)) => match map.get(inclusive) {
                    Some(Value::Number(number)) if keyword == exclusive && *excluded => number,
                    Some(Value::Number(_)) if keyword == exclusive => continue,
                    _ => return Err(place.wrong(keyword, "a number", &json!(excluded))),
                },
                Some(Value::Number(number)) => number,
                Some(other) => return Err(place.wrong(keyword, "a number", other)),
            };
            let enforced = if integers {
                whole_bound(number, step, keyword == exclusive).map(|bound| {
                    let tighter = |other: i128| if step > 0 { bound.max(other) } else { bound.min(other) };
                    whole = Some(whole.map_or(bound, tighter));
                })
            } else {
                is_exact_bound(number, keyword == exclusive)
                    .then(|| bounds.push((keyword, Value::Number(number.clone()))))
            };
            if enforced.is_none() && strict {
                return Err(unenforced(
                    place,
                    keyword,
                    &format!("{number} is too large to be enforced exactly"),
                ));
            }
        }
        bounds.extend(whole.map(|bound| (inclusive, json!(bound as i64))));
    }
    if strict && let Some((keyword, why)) = loose_bound(&bounds) {
        return Err(unenforced(place, keyword, &why));
    }
    Ok(bounds)
}

/// The integer closest to a bound that the bound allows; `None` if llguidance would round it. `step` points into the
/// allowed range: 1 for a minimum, -1 for a maximum.
fn whole_bound(number: &Number, step: i128, excluded: bool) -> Option<i128> {
    let integer = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
    let bound = match (integer, number.as_f64()?) {
        (Some(integer), _) => integer + if excluded { step } else { 0 },
        (None, float) if float.fract() != 0.0 => {
            (if step > 0 { float.ceil() } else { float.floor() }) as i128
        }
        (None, float) if is_within_64_bits(float) => float as i128 + if excluded { step } else { 0 },
        (None, _) => return None,
    };
    (i128::from((bound as f64) as i64) == bound).then_some(bound)
}

/// Whether llguidance enforces exactly this bound.
fn is_exact_bound(number: &Number, excluded: bool) -> bool {
    // Another schema may restrict the type to integers. Then llguidance adds 1 to an exclusive bound.
    let is_next_exact = number.as_f64().is_some_and(|float| float.abs() < MAX_EXACT);
    is_exact(&Value::Number(number.clone())) && (!excluded || is_next_exact)
}

/// The first bound that llguidance does not enforce: it accepts a number that the bound excludes. That happens if an
/// exclusive bound is a whole number, and the bound on the other side has the same integer part.
fn loose_bound(bounds: &[(&'static str, Value)]) -> Option<(&'static str, String)> {
    let bound = |name: &str| bounds.iter().find(|(keyword, _)| *keyword == name)?.1.as_f64();
    for (excluded, others) in [
        ("exclusiveMinimum", ["maximum", "exclusiveMaximum"]),
        ("exclusiveMaximum", ["minimum", "exclusiveMinimum"]),
    ] {
        let Some(whole) = bound(excluded).filter(|bound| bound.fract() == 0.0) else { continue };
        let near = |name: &&str| bound(name).is_some_and(|other| other.trunc() == whole);
        if let Some(other) = others.into_iter().find(near) {
            return Some((excluded, format!("{excluded} {whole} is combined with a {other} within 1 of it")));
        }
    }
    None
}

fn check_optional(schema: &Map<String, Value>, place: &Place) -> Result<(), Problem> {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return Ok(()) };
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
    let optional = properties.keys().filter(|name| !required.contains(name.as_str())).count();
    if optional <= MAX_OPTIONAL {
        return Ok(());
    }
    let problem = format!("{optional} of one object are optional, but at most {MAX_OPTIONAL} are supported");
    Err(place.problem("properties", &format!("{problem}; make some of them required")))
}

/// Refuses references that refer back to themselves without an end, because no JSON of finite length matches them.
fn refuse_endless(definitions: &[Definition]) -> Result<(), Problem> {
    let mut ends = vec![false; definitions.len()];
    let mut more = true;
    while more {
        more = false;
        // In reverse, because a schema usually comes after the schemas that refer to it.
        for (index, definition) in definitions.iter().enumerate().rev() {
            if !ends[index] && endless_in(&definition.schema, &ends).is_none() {
                ends[index] = true;
                more = true;
            }
        }
    }
    let Some(first) = ends.iter().position(|ends| !ends) else { return Ok(()) };
    let mut chain = vec![first];
    let again = loop {
        let next = endless_in(&definitions[chain[chain.len() - 1]].schema, &ends).expect("it has no end");
        match chain.iter().position(|index| *index == next) {
            Some(again) => break again,
            None => chain.push(next),
        }
    };
    chain.push(chain[again]);
    let names =
        chain[again..].iter().map(|index| format!("#{}", definitions[*index].place.pointer.escape_debug()));
    let names: Vec<String> = names.collect();
    let shown = match names.len() {
        0..=6 => names.join(" -> "),
        n => format!("{} -> ... {} more ... -> {}", names[..3].join(" -> "), n - 4, names[n - 1]),
    };
    let shown: String = shown.chars().take(2 * MAX_PATH_CHARS).collect();
    let text = format!("the references {shown} never end, so no JSON matches; make one of them optional");
    Err(definitions[chain[again]].place.problem("$ref", &text))
}

/// A definition without an end that every JSON of this schema must contain.
fn endless_in(schema: &Value, ends: &[bool]) -> Option<usize> {
    if let Some(endless) = target(schema).filter(|index| !ends[*index]) {
        return Some(endless);
    }
    let list =
        |keyword: &str| schema.get(keyword).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if let Some(endless) = list("allOf").iter().find_map(|schema| endless_in(schema, ends)) {
        return Some(endless);
    }
    for options in ["anyOf", "oneOf"].map(list).into_iter().filter(|options| !options.is_empty()) {
        let endless: Vec<usize> = options.iter().map_while(|schema| endless_in(schema, ends)).collect();
        if endless.len() == options.len() {
            return Some(endless[0]);
        }
    }
    // Only if no other type is allowed: values of other types have no items and no properties.
    let of_type = |kind: &str| match list("type") {
        [] => false,
        types => types.iter().all(|other| other == kind),
    };
    if of_type("object") {
        return list("required").iter().filter_map(Value::as_str).find_map(|name| {
            let named = schema.get("properties").and_then(|properties| properties.get(name));
            endless_in(named.or_else(|| schema.get("additionalProperties"))?, ends)
        });
    }
    if of_type("array") {
        let least = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
        let first = list("prefixItems");
        let others = schema.get("items").filter(|_| least > first.len());
        return first.iter().take(least).chain(others).find_map(|schema| endless_in(schema, ends));
    }
    None
}

/// Removes keywords that cannot be enforced from read schemas.
struct Schemas<'a, F> {
    parts: &'a [SchemaPart],
    definitions: Vec<Definition>,
    run: F,
    until: Instant,
    trials: usize,
    /// The definitions whose unenforceable keywords were removed, or are being removed now.
    relaxed: HashSet<usize>,
}

impl<T, F: Fn(Value) -> Result<T, Refusal>> Schemas<'_, F> {
    /// The schema with the definitions that it needs.
    fn with_definitions(&self, schema: &Value) -> Value {
        let mut needed = BTreeSet::new();
        let mut left = vec![schema];
        while let Some(schema) = left.pop() {
            if let Some(index) = target(schema).filter(|index| needed.insert(*index)) {
                left.push(&self.definitions[index].schema);
            }
            left.extend(inner(schema).into_iter().map(|(_, schema)| schema));
        }
        let mut whole = schema.clone();
        if !needed.is_empty() {
            let named =
                needed.into_iter().map(|index| (index.to_string(), self.definitions[index].schema.clone()));
            whole["$defs"] = Value::Object(named.collect());
        }
        whole
    }

    /// Compiles a schema alone. Returns the refusal if it cannot be compiled. A schema that nothing can match is not a
    /// refusal here, because llguidance understood its keywords.
    fn trial(&mut self, schema: &Value, place: &Place) -> Result<Option<Refusal>, Problem> {
        if schema.is_boolean() {
            return Ok(None);
        }
        self.trials += 1;
        if self.trials > MAX_TRIALS {
            return Err(place.problem("", "too much of it cannot be enforced; make it simpler"));
        }
        if self.is_late() {
            let problem = "it takes too long to find what of it cannot be enforced; make it simpler";
            return Err(place.problem("", problem));
        }
        let refusal = (self.run)(self.with_definitions(schema)).err();
        Ok(refusal.filter(|refusal| refusal.kind != Kind::Contradiction))
    }

    fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    fn relax_definition(&mut self, index: usize) -> Result<(), Problem> {
        if self.relaxed.insert(index) { self.relax(index, "") } else { Ok(()) }
    }

    /// Removes the keywords that cannot be enforced from the schema at `pointer` of a definition.
    fn relax(&mut self, index: usize, pointer: &str) -> Result<(), Problem> {
        let schema = self.read_at(index, pointer).clone();
        let place = self.place(index, pointer);
        if self.trial(&schema, &place)?.is_none() {
            return Ok(());
        }
        for (inner, _) in inner(&schema) {
            self.relax(index, &format!("{pointer}{inner}"))?;
        }
        if let Some(index) = target(&schema) {
            self.relax_definition(index)?;
        }
        let schema = self.read_at(index, pointer).clone();
        if self.trial(&schema, &place)?.is_some() {
            let enforceable = self.enforceable(&schema, &place)?;
            *self.definitions[index].schema.pointer_mut(pointer).expect("it was read there") = enforceable;
        }
        Ok(())
    }

    fn read_at(&self, index: usize, pointer: &str) -> &Value {
        self.definitions[index].schema.pointer(pointer).expect("it was read there")
    }

    fn place(&self, index: usize, pointer: &str) -> Place {
        let Place { part, pointer: origin } = &self.definitions[index].place;
        Place { part: *part, pointer: format!("{origin}{pointer}") }
    }

    /// The schema with only the keywords that can be enforced together. Each schema in it must compile alone.
    fn enforceable(&mut self, schema: &Value, place: &Place) -> Result<Value, Problem> {
        let all = schema.as_object().expect("true and false always compile");
        let strict = self.parts[place.part].strict;
        let mut kept = Map::new();
        for (rank, keyword) in TRIED.into_iter().enumerate() {
            let Some(value) = all.get(keyword) else { continue };
            for piece in pieces(keyword, value) {
                let with = with_piece(all, &kept, keyword, &piece);
                let Some(refusal) = self.trial(&Value::Object(with.clone()), place)? else {
                    kept = with;
                    continue;
                };
                if refusal.kind == Kind::Syntax {
                    return Err(place.problem(keyword, &refusal.text));
                }
                if strict {
                    return Err(unenforced(place, keyword, &refusal.text));
                }
                if rank < NEEDED && !all.contains_key("$ref") {
                    return Err(place.problem(keyword, &refusal.text));
                }
                if keyword == "patternProperties" {
                    allow_by_value(&mut kept, &piece);
                }
            }
        }
        Ok(Value::Object(kept))
    }

    /// The problem for a refusal of all parts together. If no JSON can match, it names the innermost schema that causes
    /// it.
    fn located(&mut self, refusal: Refusal) -> Problem {
        if refusal.kind == Kind::Contradiction {
            for index in 0..self.parts.len() {
                if let Some(problem) = self.contradiction(index, "", &mut HashSet::new()) {
                    return problem;
                }
            }
        }
        Problem { part: None, text: refusal.text }
    }

    fn contradiction(&mut self, index: usize, pointer: &str, seen: &mut HashSet<usize>) -> Option<Problem> {
        let schema = self.read_at(index, pointer).clone();
        self.trials += 1;
        if self.trials > MAX_TRIALS || self.is_late() || schema == true {
            return None;
        }
        let contradiction = match schema == false {
            true => "the schema is false".to_owned(),
            false => {
                let refusal = (self.run)(self.with_definitions(&schema)).err()?;
                (refusal.kind == Kind::Contradiction).then_some(refusal.text)?
            }
        };
        let inner: Vec<String> = inner(&schema).into_iter().map(|(pointer, _)| pointer).collect();
        let inside =
            inner.into_iter().find_map(|inner| self.contradiction(index, &format!("{pointer}{inner}"), seen));
        let mut problem = inside;
        if let Some(index) = target(&schema).filter(|index| problem.is_none() && seen.insert(*index)) {
            problem = self.contradiction(index, "", seen);
        }
        problem.or_else(|| {
            let text = format!("nothing can match it: {contradiction}");
            Some(self.place(index, pointer).problem("", &text))
        })
    }
}

/// The pieces of a keyword's value that can be left out separately.
fn pieces(keyword: &str, value: &Value) -> Vec<Value> {
    match (keyword, value) {
        ("allOf", Value::Array(list)) => list.clone(),
        ("patternProperties", Value::Object(named)) => {
            named.iter().map(|(name, schema)| json!({name: schema})).collect()
        }
        (_, value) => vec![value.clone()],
    }
}

/// The kept keywords and one more piece, in the order of the whole schema.
fn with_piece(
    all: &Map<String, Value>,
    kept: &Map<String, Value>,
    keyword: &str,
    piece: &Value,
) -> Map<String, Value> {
    let value = match (kept.get(keyword), piece) {
        (Some(Value::Array(list)), piece) => [list.as_slice(), std::slice::from_ref(piece)].concat().into(),
        (Some(Value::Object(named)), Value::Object(more)) => Value::Object(
            named.iter().chain(more).map(|(name, schema)| (name.clone(), schema.clone())).collect(),
        ),
        _ if keyword == "allOf" => json!([piece]),
        (_, piece) => piece.clone(),
    };
    let value_of = |name: &String| if name == keyword { Some(&value) } else { kept.get(name) };
    all.keys().filter_map(|name| Some((name.clone(), value_of(name)?.clone()))).collect()
}

/// After a pattern of `patternProperties` was left out: allows its values for every property that the schema does not
/// name, because the name may match the pattern.
fn allow_by_value(kept: &mut Map<String, Value>, left_out: &Value) {
    let Some(others) = kept.get_mut("additionalProperties") else { return };
    let mut options: Vec<Value> = left_out.as_object().into_iter().flat_map(Map::values).cloned().collect();
    if *others != false {
        options.push(others.take());
    }
    *others = json!({"anyOf": options});
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_part_is_compiled_alone_after_the_deadline() {
        let runs = |time: Duration| {
            let runs = Cell::new(0);
            let schema = json!({"type": "object", "properties": {"a": {"pattern": "x"}}});
            let parts = [SchemaPart { schema, strict: false }];
            let compiled = compile(&SchemaPart::reference(0), &parts, Instant::now() + time, |_| {
                runs.set(runs.get() + 1);
                Err::<(), _>(Refusal::new("unsupported"))
            });
            (runs.get(), compiled.expect_err("each run is refused").text)
        };
        let (late, problem) = runs(Duration::ZERO);
        assert!(late == 1 && problem.contains("takes too long"), "{late} runs: {problem}");
        let (in_time, problem) = runs(Duration::from_secs(3600));
        assert!(in_time > 2 && !problem.contains("takes too long"), "{in_time} runs: {problem}");
    }
}
