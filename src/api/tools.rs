//! Tools for a model that has no tokens for them.
//!
//! The tools stand in the first user turn, behind the system text, with how to call them: a reply that calls is JSON alone,
//! one object `{"name": NAME, "parameters": {...}}` or an array of them. A grammar holds a call to the parameters' schema: from
//! the first token where a call is demanded, and otherwise from a first token that opens an object or an array, for then it is
//! to be one; every other answer is text. A turn that called is written back as that JSON, and what the tools gave as a line
//! `Result of NAME: TEXT` each, in the order of the calls.
//!
//! This is what every wire format shares. What OpenAI's two share is read in [`super::conversation`].

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::grammar::ResponseGrammar;
use super::new_id;
use super::request::{Fields, Item, short};
use crate::text::{CallPiece, GrammarSource, Message};

/// Most tools of one request, as at OpenAI; and most calls in one answer.
pub const MAX_TOOLS: usize = 128;
/// Of a tool.
pub(super) const MAX_NAME_BYTES: usize = 128;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// A JSON schema of an object.
    pub parameters: Value,
    /// Every keyword of the schema is enforced, or it is an error.
    pub strict: bool,
    /// The field that has the schema, which errors name.
    pub param: String,
}

/// Whether an answer calls tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// It does not, and the model is told of none.
    None,
    #[default]
    Auto,
    Required,
}

/// The tools of a request. Names differ; where a call is required, there are tools.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tools {
    pub list: Vec<Tool>,
    pub choice: ToolChoice,
    /// The places of those that may be called; none stands for all.
    pub only: Option<Vec<usize>>,
    /// Whether one answer may make several calls.
    pub parallel: bool,
}

/// A call that an earlier answer made.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    /// JSON as the model wrote it, and as others may have changed it.
    pub arguments: String,
}

/// The field `tools`. `description` gives that part of an item that describes the tool, whose field `schema` has the schema of
/// its parameters.
pub(super) fn tool_list<'a>(
    fields: &Fields<'a>,
    schema: &str,
    description: impl Fn(Item<'a>) -> Result<Item<'a>, ApiError>,
) -> Result<Vec<Tool>, ApiError> {
    let items = fields.array("tools")?.map_or(&[][..], Vec::as_slice);
    if items.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("expected at most {MAX_TOOLS}, got {}", items.len())));
    }
    let mut list: Vec<Tool> = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        let item = description(Item::new(format!("tools[{i}]"), item)?)?;
        let tool = Tool::read(&item, schema)?;
        if list.iter().any(|other| other.name == tool.name) {
            let problem = format!("another tool has the name {:?}", short(&tool.name));
            return Err(ApiError::invalid(item.param("name"), problem));
        }
        list.push(tool);
    }
    Ok(list)
}

/// The place in `list` of the tool that `item` names.
pub(super) fn place_of(list: &[Tool], item: &Item) -> Result<usize, ApiError> {
    let name = item.string("name")?;
    list.iter().position(|tool| tool.name == name).ok_or_else(|| {
        let problem = format!("there is no tool of the name {:?}", short(name));
        ApiError::invalid(item.param("name"), problem)
    })
}

impl Tool {
    fn read(item: &Item, schema: &str) -> Result<Self, ApiError> {
        let name = item.string("name")?;
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
            let problem = format!("expected 1 to {MAX_NAME_BYTES} bytes without control characters");
            return Err(ApiError::invalid(item.param("name"), problem));
        }
        let param = item.param(schema);
        let parameters = match item.within(item.fields.object(schema))? {
            None => json!({"type": "object", "properties": {}}),
            Some(schema) if schema.get("type").is_some_and(|kind| kind != "object") => {
                return Err(ApiError::invalid(format!("{param}.type"), "expected \"object\""));
            }
            Some(schema) => Value::Object(schema.clone()),
        };
        Ok(Self {
            name: name.to_owned(),
            description: item.within(item.fields.string("description"))?.map(str::to_owned),
            parameters,
            strict: item.within(item.fields.bool("strict"))?.unwrap_or(false),
            param,
        })
    }
}

impl Tools {
    /// Those that the model is told of.
    pub(super) fn offered(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.list }
    }

    /// Those of them that it may call, by their places.
    pub(super) fn callable(&self) -> impl Iterator<Item = (usize, &Tool)> {
        let may = |place: &usize| self.only.as_ref().is_none_or(|only| only.contains(place));
        self.offered().iter().enumerate().filter(move |(place, _)| may(place))
    }

    /// Tells the model of the tools. The words are the same whatever the choice, so that a prefix of them stays cached.
    pub(super) fn tell(&self, messages: &[Message]) -> Vec<Message> {
        let mut told = messages.to_vec();
        if self.offered().is_empty() {
            return told;
        }
        let mut text = "You can call these tools:\n".to_owned();
        for Tool { name, description, parameters, .. } in &self.list {
            let mut tool = json!({"name": name});
            if let Some(description) = description {
                tool["description"] = json!(description);
            }
            tool["parameters"] = parameters.clone();
            text.push_str(&format!("- {tool}\n"));
        }
        let several = if self.parallel { ", or an array of such objects for several calls" } else { "" };
        text.push_str("If a tool is needed, reply only with JSON: {\"name\": NAME, \"parameters\": {...}}");
        text.push_str(&format!("{several}. Otherwise answer normally."));
        let system = |message: &Message| matches!(message.role.as_str(), "system" | "developer");
        let behind = told.iter().position(|message| !system(message)).unwrap_or(told.len());
        told.insert(behind, Message::new("system", &text));
        told
    }

    /// The grammar of an answer that may or must call, where there are tools to call; and whether it holds from the first
    /// token. `response` is what an answer must be that does not call.
    pub(super) fn grammar(
        &self,
        response: Option<&ResponseGrammar>,
    ) -> Result<Option<(ResponseGrammar, bool)>, ApiError> {
        if self.offered().is_empty() {
            return Ok(response.map(|response| (response.clone(), true)));
        }
        let mut strict = self.callable().any(|(_, tool)| tool.strict);
        let mut definitions = Map::new();
        let mut options = Vec::new();
        for (place, tool) in self.callable() {
            let at = format!("t{place}");
            options.push(json!({
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": {"$ref": format!("#/$defs/{at}")}},
                "required": ["name", "parameters"],
                "additionalProperties": false,
            }));
            let mut parameters = closed(&tool.parameters);
            move_references(&mut parameters, &at);
            definitions.insert(at, parameters);
        }
        if self.parallel {
            let several =
                json!({"type": "array", "items": {"anyOf": options}, "minItems": 1, "maxItems": MAX_TOOLS});
            options.push(several);
        }
        let mut param = "tools".to_owned();
        let mut from_the_start = self.choice != ToolChoice::Auto;
        if let (ToolChoice::Auto, Some(response)) = (&self.choice, response) {
            let GrammarSource::JsonSchema { schema, strict: both } = &response.source else {
                let problem = "beside tools, only a JSON schema can be had; set tool_choice to \"none\"";
                return Err(ApiError::invalid(&response.param, problem));
            };
            let mut schema = schema.clone();
            move_references(&mut schema, "answer");
            definitions.insert("answer".into(), schema);
            options.push(json!({"$ref": "#/$defs/answer"}));
            strict |= both;
            param.clone_from(&response.param);
            from_the_start = true;
        }
        let schema = json!({"anyOf": options, "$defs": definitions});
        let source = GrammarSource::JsonSchema { schema, strict };
        Ok(Some((ResponseGrammar { source, param }, from_the_start)))
    }

    /// The parameters of each tool that may be called, alone, and the field that has them.
    pub(super) fn sources(&self) -> impl Iterator<Item = (&str, GrammarSource)> {
        let strict = self.callable().any(|(_, tool)| tool.strict);
        self.callable().map(move |(_, tool)| {
            let source = GrammarSource::JsonSchema { schema: closed(&tool.parameters), strict };
            (tool.param.as_str(), source)
        })
    }
}

/// A schema that names the properties of its object means those, where it says nothing of others: a function that is called
/// with an argument it does not know fails.
fn closed(parameters: &Value) -> Value {
    let mut parameters = parameters.clone();
    if let Value::Object(schema) = &mut parameters {
        schema.entry("type").or_insert_with(|| json!("object"));
        let others = ["additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"];
        if schema.contains_key("properties") && !others.iter().any(|name| schema.contains_key(*name)) {
            schema.insert("additionalProperties".into(), json!(false));
        }
    }
    parameters
}

/// Makes the references of a schema those of one that has it as its definition `at`.
fn move_references(schema: &mut Value, at: &str) {
    match schema {
        Value::Object(map) => {
            for (name, value) in map {
                match (name.as_str(), value) {
                    // By names that are a schema's own.
                    ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                        named.values_mut().for_each(|schema| move_references(schema, at));
                    }
                    ("const" | "enum" | "default" | "examples", _) => {}
                    ("$ref", Value::String(reference)) if reference.starts_with('#') => {
                        let rest = reference.trim_start_matches('#').trim_end_matches('/');
                        *reference = format!("#/$defs/{at}{rest}");
                    }
                    (_, value) => move_references(value, at),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| move_references(item, at)),
        _ => {}
    }
}

/// A call that an answer makes, as far as it is written.
#[derive(Debug, Clone)]
pub(super) struct Calling {
    /// No other call has it; each wire format puts a prefix of its own before it.
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl Calling {
    /// Adds a piece to the calls that an answer makes.
    pub(super) fn gather(calls: &mut Vec<Self>, piece: CallPiece) {
        match piece {
            CallPiece::Name { name, .. } => {
                calls.push(Self { id: new_id(""), name, arguments: String::new() })
            }
            CallPiece::Parameters { index, json } => calls[index].arguments.push_str(&json),
        }
    }

    /// Whether nothing of its arguments was cut.
    pub(super) fn is_whole(&self) -> bool {
        serde_json::from_str::<IgnoredAny>(&self.arguments).is_ok()
    }
}

/// A conversation while it is read. Calls of tools become the JSON that the model wrote, and what they gave a turn of the
/// user's; those that come one behind the other are one turn.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    messages: Vec<Message>,
    /// Place and tool of each call, by its id. An id may come again in a later turn: the last one is meant.
    by_id: HashMap<String, (usize, String)>,
    /// Calls so far.
    calls: usize,
    /// What is not written yet: calls, or what calls gave (place, tool and text each). Never both.
    called: Vec<Call>,
    results: Vec<(usize, String, String)>,
}

impl Conversation {
    pub(super) fn say(&mut self, role: &str, text: &str) {
        self.write();
        self.messages.push(Message::new(role, text));
    }

    pub(super) fn call(&mut self, id: &str, call: Call) {
        if !self.results.is_empty() {
            self.write();
        }
        self.by_id.insert(id.to_owned(), (self.calls, call.name.clone()));
        self.calls += 1;
        self.called.push(call);
    }

    /// What the call of that id gave. `item` is what says so, `field` the one that has the id.
    pub(super) fn result(&mut self, item: &Item, field: &str, text: String) -> Result<(), ApiError> {
        let id = item.string(field)?;
        let Some((place, name)) = self.by_id.get(id).cloned() else {
            let problem = format!("no call before it has the id {:?}", short(id));
            return Err(ApiError::invalid(item.param(field), problem));
        };
        if !self.called.is_empty() {
            self.write();
        }
        self.results.push((place, name, text));
        Ok(())
    }

    /// Whether the last that was said are calls.
    pub(super) fn ends_with_calls(&self) -> bool {
        !self.called.is_empty()
    }

    pub(super) fn finish(mut self) -> Vec<Message> {
        self.write();
        self.messages
    }

    fn write(&mut self) {
        if !self.called.is_empty() {
            self.messages.push(Message::new("assistant", &written_calls(&self.called)));
            self.called.clear();
        }
        if !self.results.is_empty() {
            self.results.sort_by_key(|(place, ..)| *place);
            let line = |(_, name, text): &(usize, String, String)| format!("Result of {name}: {text}");
            let lines: Vec<String> = self.results.iter().map(line).collect();
            self.messages.push(Message::new("user", &lines.join("\n")));
            self.results.clear();
        }
    }
}

/// Calls as the model writes them.
fn written_calls(calls: &[Call]) -> String {
    let call = |Call { name, arguments }: &Call| {
        // What is no JSON is shown as the text that it is.
        let parameters = match serde_json::from_str::<IgnoredAny>(arguments) {
            Ok(_) => arguments.trim().to_owned(),
            Err(_) if arguments.trim().is_empty() => "{}".to_owned(),
            Err(_) => json!(arguments).to_string(),
        };
        format!("{{\"name\": {}, \"parameters\": {parameters}}}", json!(name))
    };
    match calls {
        [only] => call(only),
        several => format!("[{}]", several.iter().map(call).collect::<Vec<_>>().join(", ")),
    }
}
