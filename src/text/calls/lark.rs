//! Grammars of calls in a model's own syntax, in llguidance's dialect of Lark.
//!
//! A grammar matches what is between the control tokens of one call. Where the syntax is JSON, llguidance compiles the
//! schema. Elsewhere this file translates the schema, after `schema.rs` has prepared it. The translation may be
//! narrower than the schema (arguments come in a fixed order), and never allows a value of another type. A keyword that
//! it cannot translate is an error in a strict schema, and is left out otherwise.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::format::CallFormat;
use super::tagged::END_OF_VALUE;
use super::values::Types;
use crate::text::family::CallBody;
use crate::text::schema::SchemaPart;

/// A tool whose calls a grammar matches.
#[derive(Debug, Clone, PartialEq)]
pub struct CallTool {
    pub name: String,
    pub parameters: SchemaPart,
}

/// An error: the index of the tool, and the problem with its schema.
type Problem = (usize, String);

/// The schema to prepare for the grammar of calls of these tools. It refers to the parameters as "#/$defs/0" and so on.
/// A list has at most `most` calls.
pub(in crate::text) fn form(format: &CallFormat, tools: &[CallTool], most: usize) -> Value {
    let CallBody::Json { arguments, is_list, .. } = format.syntax.body else {
        return json!({"anyOf": (0..tools.len()).map(SchemaPart::reference).collect::<Vec<_>>()});
    };
    let call = |(i, tool): (usize, &CallTool)| call_schema(&tool.name, arguments, i);
    let calls: Vec<Value> = tools.iter().enumerate().map(call).collect();
    if is_list {
        json!({"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": most})
    } else {
        json!({"anyOf": calls})
    }
}

/// The schema of a call in JSON, whose arguments have the key `arguments` and match the part with this index.
pub fn call_schema(name: &str, arguments: &str, part: usize) -> Value {
    json!({
        "type": "object",
        "properties": {"name": {"const": name}, arguments: SchemaPart::reference(part)},
        "required": ["name", arguments],
        "additionalProperties": false,
    })
}

/// The grammar of one call, or of a list of calls. `prepared` is the prepared [`form`], and `json` adds the options of JSON to a schema.
pub(in crate::text) fn lark(
    format: &CallFormat,
    tools: &[CallTool],
    prepared: &Value,
    json: &dyn Fn(Value) -> Value,
) -> Result<String, Problem> {
    if let CallBody::Json { before, after, .. } = format.syntax.body {
        let around = |text: &str| if text.is_empty() { String::new() } else { literal(text) };
        let value = json(prepared.clone());
        return Ok(format!("start: {} %json {value} {}", around(before), around(after)));
    }
    let none = Map::new();
    let definitions = prepared.get("$defs").and_then(Value::as_object).unwrap_or(&none);
    let token = |id: Option<u32>| id.map_or(String::new(), |id| format!("<[{id}]>"));
    let mark = token(format.tokens.as_ref().and_then(|tokens| tokens.mark));
    let call_id = match format.tokens.as_ref().and_then(|tokens| tokens.call_id) {
        Some(id) => format!("({} {CALL_ID})?", token(Some(id))),
        None => String::new(),
    };
    let mut grammar = Translation {
        definitions,
        json,
        quote: mark.clone(),
        is_strict: false,
        rules: BTreeMap::new(),
        known: HashMap::new(),
    };
    let mut starts = Vec::with_capacity(tools.len());
    for (i, tool) in tools.iter().enumerate() {
        grammar.is_strict = tool.parameters.strict;
        let schema = &definitions[&i.to_string()];
        let call = match format.syntax.body {
            CallBody::Named { .. } => {
                Ok(format!("{} {call_id} {mark} {}", literal(&tool.name), grammar.embedded(schema)))
            }
            CallBody::Bare { .. } => {
                let arguments = grammar.value(schema);
                arguments.map(|arguments| format!("{} {arguments}", literal(&format!("call:{}", tool.name))))
            }
            CallBody::Tagged => grammar.tagged(&tool.name, schema, &tool.parameters.schema),
            CallBody::Json { .. } => unreachable!("returned above"),
        };
        starts.push(call.map_err(|problem| (i, problem))?);
    }
    let mut text = format!("start: {}\n", starts.join(" | "));
    for (name, rule) in &grammar.rules {
        let _ = writeln!(text, "{name}: {rule}");
    }
    Ok(text)
}

/// A text as a literal of Lark, which writes texts as JSON does.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Most rules of a grammar. Nested alternatives are written out, so their number can grow quickly.
const MAX_RULES: usize = 10_000;
/// Keywords that only describe a schema.
const ANNOTATIONS: [&str; 9] =
    ["title", "description", "default", "examples", "$defs", "definitions", "$id", "$schema", "nullable"];

const NUMBER: &str = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/";
const INTEGER: &str = r"/-?(0|[1-9][0-9]{0,17})/";
/// An id of a call, which the model makes up.
const CALL_ID: &str = "/[A-Za-z0-9]{1,32}/";
/// A key that no schema names.
const KEY: &str = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/";
/// Any text that is not empty.
const TEXT: &str = "/(?s:.+)/";

/// The regular expression of a format. `None` = it cannot be enforced here.
fn format_pattern(format: &str) -> Option<&'static str> {
    Some(match format {
        "date" => r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
        "time" => {
            r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
        }
        "date-time" => {
            r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
        }
        "uuid" => r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        "ipv4" => {
            r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
        }
        "email" => r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,8}",
        _ => return None,
    })
}

/// Translates schemas to rules.
struct Translation<'a> {
    definitions: &'a Map<String, Value>,
    json: &'a dyn Fn(Value) -> Value,
    /// What is written on both sides of a text.
    quote: String,
    is_strict: bool,
    rules: BTreeMap<String, String>,
    /// The rule of each translated schema.
    known: HashMap<String, String>,
}

impl Translation<'_> {
    /// The rule of a value with bare keys.
    fn value(&mut self, schema: &Value) -> Result<String, String> {
        let key = format!("{} {schema}", self.is_strict);
        if let Some(rule) = self.known.get(&key) {
            return Ok(rule.clone());
        }
        if self.known.len() + self.rules.len() > MAX_RULES {
            return Err("it is too large for this model's calls; make it simpler".to_owned());
        }
        // The rule is known before it is complete, because a schema may refer to itself.
        let name = format!("v{}", self.known.len());
        self.known.insert(key, name.clone());
        let options = self.options(schema)?;
        self.rules.insert(name.clone(), options.join(" | "));
        Ok(name)
    }

    /// The alternatives of a value.
    fn options(&mut self, schema: &Value) -> Result<Vec<String>, String> {
        if schema == &json!(false) {
            return Err("a schema is false, so nothing matches it".to_owned());
        }
        let Some(schema) = schema.as_object().filter(|schema| !is_any(schema)) else {
            return Ok(vec![self.any()]);
        };
        let mut schema = self.resolved(schema.clone())?;
        if let Some(value) = schema.get("const") {
            return Ok(vec![self.constant(value)]);
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            return Ok(self.listed(values));
        }
        for keyword in ["anyOf", "oneOf"] {
            let Some(Value::Array(list)) = schema.get(keyword).cloned() else { continue };
            schema.remove(keyword);
            let mut options = Vec::new();
            for option in list {
                let merged = self.merged(schema.clone(), &option)?;
                options.push(self.value(&Value::Object(merged))?);
            }
            return Ok(options);
        }
        let types: Vec<&str> = match schema.get("type") {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
            Some(Value::String(one)) => vec![one.as_str()],
            _ if schema.contains_key("properties") => vec!["object"],
            _ => vec!["string", "number", "boolean", "null", "array", "object"],
        };
        types.into_iter().map(|kind| self.of_type(kind, &schema)).collect()
    }

    /// The alternatives of a value that is one of these. All texts are one terminal, and so are all numbers and words.
    fn listed(&mut self, values: &[Value]) -> Vec<String> {
        let (mut texts, mut words, mut options) = (Vec::new(), Vec::new(), Vec::new());
        for value in values {
            match value {
                Value::String(text) if !text.is_empty() => texts.push(literal(text)),
                Value::Number(_) | Value::Bool(_) | Value::Null => words.push(literal(&value.to_string())),
                // An empty text has nothing between its quotes. The others have parts.
                _ => options.push(self.constant(value)),
            }
        }
        if !texts.is_empty() {
            let text = self.terminal(&texts.join(" | "));
            options.push(format!("{quote} {text} {quote}", quote = self.quote));
        }
        if !words.is_empty() {
            options.push(self.terminal(&words.join(" | ")));
        }
        options
    }

    /// A terminal for many values. As alternatives of a rule, each value would be an item of the parser, which has room for
    /// fewer than a schema may list.
    fn terminal(&mut self, regex: &str) -> String {
        let name = format!("E{}", self.rules.len());
        self.rules.insert(name.clone(), regex.to_owned());
        name
    }

    /// Any value.
    fn any(&mut self) -> String {
        let quote = &self.quote;
        let any = format!(
            "{quote} {TEXT} {quote} | {quote} {quote} | {NUMBER} | \"true\" | \"false\" | \"null\" | any_list | any_object"
        );
        for (name, rule) in [
            ("any", any.as_str()),
            ("any_list", "\"[\" (any (\",\" any)*)? \"]\""),
            ("any_object", "\"{\" (any_member (\",\" any_member)*)? \"}\""),
            ("any_member", &format!("{KEY} \":\" any")),
        ] {
            self.rules.insert(name.to_owned(), rule.to_owned());
        }
        "any".to_owned()
    }

    /// Exactly this value.
    fn constant(&self, value: &Value) -> String {
        let quote = &self.quote;
        match value {
            Value::String(text) if text.is_empty() => format!("{quote} {quote}"),
            Value::String(text) => format!("{quote} {} {quote}", literal(text)),
            Value::Array(list) => {
                let items: Vec<String> = list.iter().map(|item| self.constant(item)).collect();
                format!("\"[\" {} \"]\"", items.join(" \",\" "))
            }
            Value::Object(object) => {
                let member = |(key, value): (&String, &Value)| {
                    format!("{} {}", literal(&format!("{key}:")), self.constant(value))
                };
                let members: Vec<String> = object.iter().map(member).collect();
                format!("\"{{\" {} \"}}\"", members.join(" \",\" "))
            }
            other => literal(&other.to_string()),
        }
    }

    fn of_type(&mut self, kind: &str, schema: &Map<String, Value>) -> Result<String, String> {
        Ok(match kind {
            "string" => {
                let quote = self.quote.clone();
                match self.text(schema)? {
                    TextPattern { regex, may_be_empty: true } => format!("{quote} ({regex})? {quote}"),
                    TextPattern { regex, .. } => format!("{quote} {regex} {quote}"),
                }
            }
            "boolean" => "(\"true\" | \"false\")".to_owned(),
            "null" => "\"null\"".to_owned(),
            "integer" | "number" => {
                let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
                let bounds =
                    bounds.iter().filter_map(|name| Some((name.to_string(), schema.get(*name)?.clone())));
                let mut number: Map<String, Value> = bounds.collect();
                match number.is_empty() {
                    true if kind == "integer" => INTEGER.to_owned(),
                    true => NUMBER.to_owned(),
                    false => {
                        number.insert("type".into(), json!(kind));
                        self.embedded(&Value::Object(number))
                    }
                }
            }
            "array" => self.array(schema)?,
            _ => self.object(schema)?,
        })
    }

    fn array(&mut self, schema: &Map<String, Value>) -> Result<String, String> {
        let count = |name: &str| schema.get(name).and_then(Value::as_u64).map(|count| count as usize);
        let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
        let items = schema.get("items").unwrap_or(&Value::Bool(true));
        let first = schema.get("prefixItems").and_then(Value::as_array).cloned().unwrap_or_default();
        let mut places = Vec::new();
        for item in first.iter().take(most.unwrap_or(usize::MAX)) {
            places.push(self.value(item)?);
        }
        let has_more = items != &json!(false) && most.is_none_or(|most| most > places.len());
        if !has_more {
            return Ok(format!("\"[\" {} \"]\"", places.join(" \",\" ")));
        }
        let item = self.value(items)?;
        // The first item has no comma before it, so it is a place of its own.
        let is_optional = places.is_empty() && least == 0;
        if places.is_empty() {
            places.push(item.clone());
        }
        let rest = least.saturating_sub(places.len());
        let rest = match most {
            None if rest == 0 => format!("(\",\" {item})*"),
            None => format!("(\",\" {item}){{{rest},}}"),
            Some(most) if most == places.len() => String::new(),
            Some(most) => format!("(\",\" {item}){{{rest},{}}}", most - places.len()),
        };
        let list = format!("{} {rest}", places.join(" \",\" "));
        Ok(if is_optional { format!("\"[\" ({list})? \"]\"") } else { format!("\"[\" {list} \"]\"") })
    }

    fn object(&mut self, schema: &Map<String, Value>) -> Result<String, String> {
        self.refuse(schema, &["patternProperties", "minProperties", "maxProperties"])?;
        let mut members = members(schema);
        // Templates write keys in this order, so models have seen no other.
        members.sort_by_key(|(key, ..)| key.to_lowercase());
        if members.is_empty() {
            let value = match schema.get("additionalProperties") {
                Some(Value::Bool(false)) => return Ok("\"{\" \"}\"".to_owned()),
                Some(schema) => self.value(&schema.clone())?,
                None => self.any(),
            };
            let member = format!("{KEY} \":\" {value}");
            return Ok(format!("\"{{\" ({member} (\",\" {member})*)? \"}}\""));
        }
        let mut written = Vec::with_capacity(members.len());
        for (key, value, is_required) in members {
            let is_bare =
                !key.is_empty() && key.trim() == key && !key.contains([':', ',', '{', '}', '[', ']']);
            if !is_bare {
                let problem = format!("the property {key:?} cannot be written in this model's calls");
                if is_required || self.is_strict { return Err(problem) } else { continue }
            }
            let value = self.value(&value)?;
            written.push((format!("{} {value}", literal(&format!("{key}:"))), is_required));
        }
        // `after` matches the members from a place on, after another member; `first`, without one before.
        let (mut first, mut after) = (None::<String>, String::new());
        for (member, is_required) in written.into_iter().rev() {
            let name = format!("m{}", self.rules.len());
            let rest = after.clone();
            let (begun, skipped) = (format!("{member} {rest}"), first.take());
            self.rules.insert(
                name.clone(),
                match (is_required, skipped) {
                    (true, _) => begun,
                    (false, Some(skipped)) => format!("{begun} | {skipped}"),
                    (false, None) => format!("({begun})?"),
                },
            );
            let next = format!("n{}", self.rules.len());
            let with_comma = format!("\",\" {member}");
            let step = if is_required { with_comma } else { format!("({with_comma})?") };
            self.rules.insert(next.clone(), format!("{step} {rest}"));
            (first, after) = (Some(name), next);
        }
        Ok(format!("\"{{\" {} \"}}\"", first.unwrap_or_default()))
    }

    /// A text that the schema allows.
    fn text(&self, schema: &Map<String, Value>) -> Result<TextPattern, String> {
        let count = |name: &str| schema.get(name).and_then(Value::as_u64);
        let (least, most) = (count("minLength").unwrap_or(0), count("maxLength"));
        let pattern = match (
            schema.get("pattern").and_then(Value::as_str),
            schema.get("format").and_then(Value::as_str),
        ) {
            (Some(pattern), _) => Some((unanchored(pattern), "pattern")),
            (None, Some(format)) => Some((format_pattern(format).map(str::to_owned), "format")),
            (None, None) => None,
        };
        let has_length = least > 0 || most.is_some();
        match pattern {
            Some((Some(regex), _)) if !has_length || !self.is_strict => {
                let may_be_empty = least_length(&regex) == Some(0);
                Ok(TextPattern { regex: format!("/{}/", in_slashes(&regex)), may_be_empty })
            }
            Some((_, keyword)) if self.is_strict => {
                Err(format!("{keyword:?} of a text cannot be enforced in this model's calls"))
            }
            _ if most == Some(0) => Ok(TextPattern { regex: "\"\"".to_owned(), may_be_empty: true }),
            _ if !has_length => Ok(TextPattern { regex: TEXT.to_owned(), may_be_empty: true }),
            _ => {
                let most = most.map_or(String::new(), |most| most.to_string());
                let regex = format!("/(?s:.{{{},{most}}})/", least.max(1));
                Ok(TextPattern { regex, may_be_empty: least == 0 })
            }
        }
    }

    /// JSON of a schema, which may refer to definitions.
    fn embedded(&self, schema: &Value) -> String {
        let mut schema = schema.clone();
        if schema.to_string().contains("\"$ref\"") {
            schema["$defs"] = Value::Object(self.definitions.clone());
        }
        format!("%json {}", (self.json)(schema))
    }

    /// A call with tags. `parameters` is the schema as the reader of the call knows it.
    fn tagged(&mut self, name: &str, schema: &Value, parameters: &Value) -> Result<String, String> {
        let schema = self.resolved(schema.as_object().cloned().unwrap_or_default())?;
        self.refuse(&schema, &["patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf"])?;
        let members = members(&schema);
        let mut call = literal(&format!("\n<function={name}>\n"));
        if members.is_empty() && schema.get("additionalProperties") != Some(&json!(false)) {
            let value = self.tagged_text(TEXT_OR_NOTHING);
            let _ = write!(call, " (\"<parameter=\" {KEY} \">\\n\" {value})*");
        }
        for (key, value, is_required) in members {
            if key.contains(['>', '\n']) {
                return Err(format!("the property {key:?} cannot be written in this model's calls"));
            }
            let named = parameters.get("properties").and_then(|properties| properties.get(&key));
            let types = named.map_or(Types::ANY, |schema| Types::of(schema, parameters));
            let value = self.tagged_value(&value, types)?;
            let member = format!("{} {value}", literal(&format!("<parameter={key}>\n")));
            let _ = if is_required { write!(call, " {member}") } else { write!(call, " ({member})?") };
        }
        let _ = write!(call, " \"</function>\\n\"");
        Ok(call)
    }

    /// A value of these types, and the end of its tag.
    fn tagged_value(&mut self, schema: &Value, types: Types) -> Result<String, String> {
        let end = literal(&format!("{END_OF_VALUE}\n"));
        if !types.has_text() {
            let mut options = vec![self.embedded(schema)];
            options.extend(types.has_boolean().then(|| "\"True\" | \"False\"".to_owned()));
            options.extend(types.has_null().then(|| "\"None\"".to_owned()));
            let name = format!("j{}", self.rules.len());
            self.rules.insert(name.clone(), options.join(" | "));
            return Ok(format!("{name} {end}"));
        }
        let map = self.resolved(schema.as_object().cloned().unwrap_or_default())?;
        let values = match (map.get("const"), map.get("enum")) {
            (Some(value), _) => vec![value.clone()],
            (None, Some(Value::Array(values))) => values.clone(),
            _ => Vec::new(),
        };
        if !values.is_empty() {
            let plain = |value: &Value| match value {
                Value::String(text) => literal(text),
                other => literal(&other.to_string()),
            };
            let values: Vec<String> = values.iter().map(plain).collect();
            return Ok(self.terminal(&format!("({}) {end}", values.join(" | "))));
        }
        if !types.is_text() {
            if self.is_strict && !is_any_of(&map, &["string", "null", "boolean"]) {
                return Err("texts next to other types cannot be enforced in this model's calls".to_owned());
            }
            return Ok(self.tagged_text(TEXT_OR_NOTHING));
        }
        let TextPattern { regex, may_be_empty } = self.text(&map)?;
        Ok(match (regex.as_str(), may_be_empty) {
            (TEXT, _) => self.tagged_text(TEXT_OR_NOTHING),
            (_, true) => format!("({} | {end})", self.tagged_text(&regex)),
            (_, false) => self.tagged_text(&regex),
        })
    }

    /// A rule for a text that ends with the end of its tag.
    fn tagged_text(&mut self, regex: &str) -> String {
        let key = format!("tagged {regex}");
        if let Some(rule) = self.known.get(&key) {
            return rule.clone();
        }
        let name = format!("t{}", self.known.len());
        let end = literal(&format!("{END_OF_VALUE}\n"));
        // A text that must match may not go on past the end of its tag until it does.
        let mut text = regex.to_owned();
        if regex != TEXT_OR_NOTHING {
            text = format!("P{}", self.known.len());
            self.rules.insert(text.clone(), format!(r"{regex} & ~/(?s:.*\n<\/parameter>.*)/"));
        }
        self.rules.insert(format!("{name}[suffix={end}]"), text);
        self.known.insert(key, name.clone());
        name
    }

    /// The schema without `$ref` and `allOf`, with what these say in their place.
    fn resolved(&self, schema: Map<String, Value>) -> Result<Map<String, Value>, String> {
        ["$ref", "allOf"].into_iter().try_fold(schema, |schema, keyword| self.without(schema, keyword))
    }

    /// The schema without one of these keywords.
    fn without(&self, mut schema: Map<String, Value>, keyword: &str) -> Result<Map<String, Value>, String> {
        let Some(value) = schema.remove(keyword) else { return Ok(schema) };
        let parts = match value {
            Value::Array(parts) => parts,
            reference => vec![json!({"$ref": reference})],
        };
        // A keyword in two schemas must satisfy both. Only the last one is kept.
        if self.is_strict && parts.len() + usize::from(!is_any(&schema)) > 1 {
            return Err(format!(
                "{keyword:?} next to other keywords cannot be enforced in this model's calls"
            ));
        }
        parts.iter().try_fold(schema, |schema, part| self.merged(schema, part))
    }

    /// The keywords of `schema` and of `other`, which may be a reference. Properties are united.
    fn merged(&self, mut schema: Map<String, Value>, other: &Value) -> Result<Map<String, Value>, String> {
        let mut other = other;
        for _ in 0..=self.definitions.len() {
            let Some(target) = other.get("$ref").and_then(Value::as_str) else { break };
            let index = target.rsplit('/').next().unwrap_or_default();
            other = self.definitions.get(index).ok_or_else(|| format!("{target} refers to nothing"))?;
        }
        for (keyword, value) in other.as_object().into_iter().flatten() {
            match (schema.get_mut(keyword), value) {
                (Some(Value::Object(before)), Value::Object(more)) if keyword == "properties" => {
                    before.extend(more.clone());
                }
                (Some(Value::Array(before)), Value::Array(more)) if keyword == "required" => {
                    before.extend(more.iter().cloned());
                }
                _ => drop(schema.insert(keyword.clone(), value.clone())),
            }
        }
        Ok(schema)
    }

    /// Refuses keywords of a strict schema.
    fn refuse(&self, schema: &Map<String, Value>, keywords: &[&str]) -> Result<(), String> {
        match keywords.iter().find(|keyword| self.is_strict && schema.contains_key(**keyword)) {
            Some(keyword) => Err(format!("{keyword:?} cannot be enforced in this model's calls")),
            None => Ok(()),
        }
    }
}

/// Any text, for rules with an end of their own.
const TEXT_OR_NOTHING: &str = "/(?s:.*)/";

/// The regular expression of a text, and whether the text may be empty instead.
struct TextPattern {
    regex: String,
    may_be_empty: bool,
}

/// Whether a schema allows every value.
fn is_any(schema: &Map<String, Value>) -> bool {
    schema.keys().all(|keyword| ANNOTATIONS.contains(&keyword.as_str()))
}

/// Whether every value of these types matches the schema, which allows no others, or every value at all.
fn is_any_of(schema: &Map<String, Value>, types: &[&str]) -> bool {
    let mut keywords = schema.iter().filter(|(keyword, _)| !ANNOTATIONS.contains(&keyword.as_str()));
    let is_listed = |name: &Value| name.as_str().is_some_and(|name| types.contains(&name));
    keywords.all(|(keyword, value)| match (keyword.as_str(), value) {
        ("type", Value::Array(names)) => names.iter().all(is_listed),
        ("type", name) => is_listed(name),
        ("anyOf" | "oneOf", Value::Array(options)) => {
            options.iter().all(|option| option.as_object().is_some_and(|option| is_any_of(option, types)))
        }
        _ => false,
    })
}

/// The properties of an object's schema with their schemas, and whether each is required.
fn members(schema: &Map<String, Value>) -> Vec<(String, Value, bool)> {
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let named = properties.iter().filter(|(_, schema)| *schema != &json!(false));
    let mut members: Vec<(String, Value, bool)> =
        named.map(|(key, schema)| (key.clone(), schema.clone(), required.contains(&key.as_str()))).collect();
    for key in required {
        if !members.iter().any(|(other, ..)| other == key) {
            members.push((key.to_owned(), json!({}), true));
        }
    }
    members
}

/// A pattern as a regular expression of the whole text. `None` = it has anchors in other places than its ends.
fn unanchored(pattern: &str) -> Option<String> {
    let (begins, rest) = pattern.strip_prefix('^').map_or((false, pattern), |rest| (true, rest));
    let is_escaped = rest.ends_with("\\$");
    let (ends, core) =
        rest.strip_suffix('$').filter(|_| !is_escaped).map_or((false, rest), |core| (true, core));
    let parsed = regex_syntax::parse(core).ok()?;
    // `^a|b$` has each anchor in one alternative.
    let is_simple = !(begins || ends)
        || !core.contains('|')
        || regex_syntax::parse(pattern)
            .is_ok_and(|whole| !matches!(whole.kind(), regex_syntax::hir::HirKind::Alternation(_)));
    if !parsed.properties().look_set().is_empty() || !is_simple {
        return None;
    }
    let before = if begins { "" } else { "(?s:.*)" };
    let after = if ends { "" } else { "(?s:.*)" };
    Some(format!("{before}(?:{core}){after}"))
}

/// The length of the shortest match.
fn least_length(regex: &str) -> Option<usize> {
    regex_syntax::parse(regex).ok()?.properties().minimum_len()
}

/// A regular expression between slashes.
fn in_slashes(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len());
    let mut is_escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !is_escaped => out.push_str("\\/"),
            '\n' => out.push_str(if is_escaped { "n" } else { "\\n" }),
            c => out.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    out
}
