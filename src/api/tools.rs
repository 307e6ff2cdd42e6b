//! What the wire formats share for tools: the list of tools, the choice among them, and the calls of an answer.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::api::error::ApiError;
use crate::api::ids::new_id;
use crate::api::wire::bounded::ToolName;
use crate::api::wire::{field, required, short};
use crate::session::{Conversation, Tool, ToolChoice, Tools};
use crate::text::{CallPiece, Content, whole_parameters};

/// The JSON schema of a tool's parameters, which are an object.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(transparent)]
pub(in crate::api) struct ParametersSchema(pub Map<String, Value>);

impl PartialSchema for ParametersSchema {
    fn schema() -> RefOr<Schema> {
        let kind = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["object"]));
        let object = ObjectBuilder::new().schema_type(Type::Object).property("type", kind.build());
        RefOr::T(object.description(Some("A JSON schema of an object.")).build().into())
    }
}

impl ToSchema for ParametersSchema {}

/// A tool as a request defines it.
pub(in crate::api) struct Definition {
    /// The path of the object that has `name`, `description`, `strict` and the schema.
    pub at: String,
    pub name: Option<ToolName>,
    pub description: Option<String>,
    pub parameters: Option<ParametersSchema>,
    pub strict: Option<bool>,
}

/// The tools of a request; `schema` is the name of the schema's field in the wire format.
pub(in crate::api) fn tool_list(
    definitions: impl IntoIterator<Item = Result<Definition, ApiError>>,
    schema: &str,
) -> Result<Vec<Tool>, ApiError> {
    let mut list: Vec<Tool> = Vec::new();
    for definition in definitions {
        let Definition { at, name, description, parameters, strict } = definition?;
        let ToolName(name) = required(name, &at, "name")?;
        let param = field(&at, schema);
        let parameters = match parameters {
            None => json!({"type": "object", "properties": {}}),
            Some(schema) if schema.0.get("type").is_some_and(|kind| kind != "object") => {
                return Err(ApiError::invalid(field(&param, "type"), "expected \"object\""));
            }
            Some(schema) => Value::Object(schema.0),
        };
        if list.iter().any(|other| other.name == name) {
            let problem = format!("another tool has the name {:?}", short(&name));
            return Err(ApiError::invalid(field(&at, "name"), problem));
        }
        list.push(Tool { name, description, parameters, strict: strict.unwrap_or(false), param });
    }
    Ok(list)
}

/// The choice among the tools of a request, as its field `tool_choice` says.
pub(in crate::api) enum Choice {
    None,
    Auto,
    /// Any of the tools must be called.
    Required,
    /// The tool `name` must be called; `at` is the field that has the name.
    One {
        at: String,
        name: String,
    },
    /// Only these tools may be called; each is given as the field that has its name, and the name.
    Allowed {
        must_call: bool,
        tools: Vec<(String, String)>,
    },
}

/// The name of the field with the choice, in every wire format.
pub(in crate::api) const TOOL_CHOICE: &str = "tool_choice";

/// The tools of a request with its choice among them. `parallel` is whether one answer may make several calls.
pub(in crate::api) fn chosen(list: Vec<Tool>, choice: Choice, parallel: bool) -> Result<Tools, ApiError> {
    let place = |at: String, name: &str| {
        list.iter().position(|tool| tool.name == name).ok_or_else(|| {
            let problem = format!("there is no tool with the name {:?}", short(name));
            ApiError::invalid(at, problem)
        })
    };
    let (choice, only) = match choice {
        Choice::None => (ToolChoice::None, None),
        Choice::Auto => (ToolChoice::Auto, None),
        Choice::Required if list.is_empty() => {
            return Err(ApiError::invalid(TOOL_CHOICE, "there are no tools to choose from"));
        }
        Choice::Required => (ToolChoice::Required, None),
        Choice::One { at, name } => (ToolChoice::Required, Some(vec![place(at, &name)?])),
        Choice::Allowed { must_call, tools } => {
            let choice = if must_call { ToolChoice::Required } else { ToolChoice::Auto };
            let places = tools.into_iter().map(|(at, name)| place(at, &name));
            (choice, Some(places.collect::<Result<_, _>>()?))
        }
    };
    Ok(Tools { list, choice, only, parallel })
}

/// Adds the result of the call with the id `id` to a conversation; `at` is the field that has the id.
pub(in crate::api) fn add_result(
    conversation: &mut Conversation,
    at: &str,
    id: &str,
    content: Content,
) -> Result<(), ApiError> {
    if conversation.result(id, content) {
        return Ok(());
    }
    let problem = format!("no call before it has the id {:?}", short(id));
    Err(ApiError::invalid(at, problem))
}

/// A tool call of an answer, up to its latest piece.
#[derive(Debug, Clone)]
pub(in crate::api) struct PartialCall {
    /// An id that no other call has. Each wire format adds its own prefix.
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl PartialCall {
    /// A call that begins.
    pub(in crate::api) fn new(name: String) -> Self {
        Self { id: new_id(""), name, arguments: String::new() }
    }

    /// Adds a piece to an answer's calls.
    pub(in crate::api) fn push(calls: &mut Vec<Self>, piece: CallPiece) {
        match piece {
            CallPiece::Name { name, .. } => calls.push(Self::new(name)),
            CallPiece::Parameters { index, json } => calls[index].arguments.push_str(&json),
        }
    }

    /// The calls of a complete answer.
    pub(in crate::api) fn all(pieces: Vec<CallPiece>) -> Vec<Self> {
        pieces.into_iter().fold(Vec::new(), |mut calls, piece| {
            Self::push(&mut calls, piece);
            calls
        })
    }

    /// The arguments as JSON in one line. A call that was cut has the complete part of them.
    pub(in crate::api) fn whole_arguments(&self) -> Result<Box<RawValue>, ApiError> {
        let json = match self.is_complete() {
            true => self.arguments.clone(),
            false => whole_parameters(&self.arguments),
        };
        // JSON has line ends only between its tokens. Clients that read one object from each line need one line.
        let json = json.replace(['\n', '\r'], " ");
        RawValue::from_string(json).map_err(|e| ApiError::Bug(format!("the arguments of a call: {e}")))
    }

    /// Whether the arguments are complete, and not cut by the end of the answer.
    pub(in crate::api) fn is_complete(&self) -> bool {
        serde_json::from_str::<IgnoredAny>(&self.arguments).is_ok()
    }
}
