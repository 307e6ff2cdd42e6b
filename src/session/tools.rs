//! Tools for a model that has no tokens for them.
//!
//! The tools stand in the first user turn, behind the system text, with how to call them: a reply that calls is JSON alone,
//! one object `{"name": NAME, "parameters": {...}}` or an array of them. A grammar holds a call to the parameters' schema: from
//! the first token where a call is demanded, and otherwise from a first token that opens an object or an array, for then it is
//! to be one; every other answer is text.

use serde_json::{Map, Value, json};

use super::error::SessionError;
use super::grammar::ResponseGrammar;
use crate::text::{GrammarSource, Message};

/// Most tools of one request, as at OpenAI; and most calls in one answer.
pub const MAX_TOOLS: usize = 128;

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

impl Tools {
    /// Tools that the model is told of.
    pub fn offered(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.list }
    }

    /// Tools that it may call, with their places.
    pub fn callable(&self) -> impl Iterator<Item = (usize, &Tool)> {
        let may = |place: &usize| self.only.as_ref().is_none_or(|only| only.contains(place));
        self.offered().iter().enumerate().filter(move |(place, _)| may(place))
    }

    /// Tells the model of the tools. The words are the same whatever the choice, so that a prefix of them stays cached.
    pub fn tell(&self, messages: &[Message]) -> Vec<Message> {
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
    pub fn grammar(
        &self,
        response: Option<&ResponseGrammar>,
    ) -> Result<Option<(ResponseGrammar, bool)>, SessionError> {
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
                return Err(SessionError::invalid(&response.param, problem));
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
    pub fn sources(&self) -> impl Iterator<Item = (&str, GrammarSource)> {
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
