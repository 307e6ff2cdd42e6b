//! The tools of a request, in the prompt and in the grammar of the answer.
//!
//! Some models have control tokens for calls ([`CallFormat`]). Their template describes the tools. A grammar restricts
//! each call to the schema of the parameters, from the token that opens the call to the one that closes it.
//!
//! For other models, the first user turn begins with the system text, followed by the tools and how to call them, unless
//! the template describes the tools. A reply that calls tools is only JSON: an object
//! `{"name": NAME, "parameters": {...}}`, or an array of such objects. If a call is required, the grammar applies from the
//! first token. Otherwise it applies only if the first token opens an object or an array; every other answer is free text.

use serde_json::{Value, json};

use super::error::SessionError;
use super::grammar::ResponseGrammar;
use crate::text::{CallFormat, CallTool, GrammarSource, Message, SchemaPart, call_schema};

/// Maximum number of tools in a request, and of calls in an answer, or in each list of an answer where a model writes lists.
/// OpenAI has the same limit for tools.
pub const MAX_TOOLS: usize = 128;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// A JSON schema of an object.
    pub parameters: Value,
    /// Whether every keyword of the schema must be enforced. A keyword that cannot be enforced is then an error.
    pub strict: bool,
    /// The request's field with the schema, for errors.
    pub param: String,
}

/// Whether an answer calls tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The answer calls no tool, and the prompt describes none.
    None,
    #[default]
    Auto,
    Required,
}

/// The tools of a request. Names are unique. If a call is required, `list` is not empty.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tools {
    pub list: Vec<Tool>,
    pub choice: ToolChoice,
    /// Indices into `list` of the tools that may be called. `None` = all.
    pub only: Option<Vec<usize>>,
    /// Whether one answer may make several calls.
    pub parallel: bool,
}

impl Tools {
    /// The tools that the prompt describes.
    pub fn offered(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.list }
    }

    /// The tools that may be called, with their indices in `list`.
    pub fn callable(&self) -> impl Iterator<Item = (usize, &Tool)> {
        let may = |place: &usize| self.only.as_ref().is_none_or(|only| only.contains(place));
        self.offered().iter().enumerate().filter(move |(place, _)| may(place))
    }

    /// The tools in the form in which templates read them, which is OpenAI's.
    pub fn for_template(&self) -> Vec<Value> {
        let function = |Tool { name, description, parameters, .. }: &Tool| {
            let mut function = json!({"name": name});
            if let Some(description) = description {
                function["description"] = json!(description);
            }
            function["parameters"] = parameters.clone();
            json!({"type": "function", "function": function})
        };
        self.offered().iter().map(function).collect()
    }

    /// The messages, with an additional system message that describes the tools. Its text does not depend on which
    /// tools may be called, so that requests with different choices share blocks of the prefix cache.
    pub fn describe_in(&self, messages: &[Message]) -> Vec<Message> {
        let mut described = messages.to_vec();
        if self.offered().is_empty() {
            return described;
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
        let after_system = described.iter().position(|message| !system(message)).unwrap_or(described.len());
        described.insert(after_system, Message::new("system", text));
        described
    }

    /// The grammar of one call, or of a list of calls, for a format with control tokens. `None` if no tool may be called.
    pub fn call_grammar(&self, format: &CallFormat) -> Option<ResponseGrammar> {
        let tool = |(_, Tool { name, parameters, strict, .. }): (usize, &Tool)| CallTool {
            name: name.clone(),
            parameters: SchemaPart { schema: closed(parameters), strict: *strict },
        };
        let tools: Vec<CallTool> = self.callable().map(tool).collect();
        (!tools.is_empty()).then(|| ResponseGrammar {
            source: GrammarSource::Call {
                format: format.clone(),
                tools,
                most: if self.parallel { MAX_TOOLS } else { 1 },
            },
            param: "tools".to_owned(),
        })
    }

    /// The grammar of an answer whose calls have no control tokens, and whether it applies from the first token. `None`
    /// if the answer may be any text. `response` is the grammar of an answer that does not call tools. `is_parallel` is
    /// whether the model can make several calls at once.
    pub fn grammar(
        &self,
        response: Option<&ResponseGrammar>,
        is_parallel: bool,
    ) -> Result<Option<(ResponseGrammar, bool)>, SessionError> {
        if self.offered().is_empty() {
            return Ok(response.map(|response| (response.clone(), true)));
        }
        let mut parts = Vec::new();
        let mut options = Vec::new();
        for (_, tool) in self.callable() {
            options.push(call_schema(&tool.name, "parameters", parts.len()));
            parts.push(SchemaPart { schema: closed(&tool.parameters), strict: tool.strict });
        }
        if self.parallel && is_parallel {
            let several =
                json!({"type": "array", "items": {"anyOf": options}, "minItems": 1, "maxItems": MAX_TOOLS});
            options.push(several);
        }
        let mut param = "tools".to_owned();
        let mut from_the_start = self.choice != ToolChoice::Auto;
        if let (ToolChoice::Auto, Some(response)) = (&self.choice, response) {
            let GrammarSource::JsonSchema { schema, strict } = &response.source else {
                let problem =
                    "together with tools, only a JSON schema is supported; set tool_choice to \"none\"";
                return Err(SessionError::invalid(&response.param, problem));
            };
            options.push(SchemaPart::reference(parts.len()));
            parts.push(SchemaPart { schema: schema.clone(), strict: *strict });
            param.clone_from(&response.param);
            from_the_start = true;
        }
        let source = GrammarSource::JsonParts { form: json!({"anyOf": options}), parts };
        Ok(Some((ResponseGrammar { source, param }, from_the_start)))
    }

    /// The tool whose parameters are this part of the grammar. `None` if the part is the schema of an answer without
    /// calls.
    pub fn tool_of_part(&self, part: usize) -> Option<&Tool> {
        self.callable().nth(part).map(|(_, tool)| tool)
    }
}

/// Forbids additional properties in a schema that has properties and no rule for others, because a function that gets
/// an unknown argument fails.
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
