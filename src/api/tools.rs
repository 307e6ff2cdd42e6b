//! What the wire formats share of tools: reading a list of them, and gathering the calls of an answer.

use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::api::error::ApiError;
use crate::api::fields::{Fields, Item, short};
use crate::api::ids::new_id;
use crate::session::{Conversation, MAX_TOOLS, Tool};
use crate::text::CallPiece;

/// Bytes of a tool's name.
pub(in crate::api) const MAX_NAME_BYTES: usize = 128;

/// The field `tools`. `description` gives that part of an item that describes the tool, whose field `schema` has the schema of
/// its parameters.
pub(in crate::api) fn tool_list<'a>(
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
        let tool = read_tool(&item, schema)?;
        if list.iter().any(|other| other.name == tool.name) {
            let problem = format!("another tool has the name {:?}", short(&tool.name));
            return Err(ApiError::invalid(item.param("name"), problem));
        }
        list.push(tool);
    }
    Ok(list)
}

/// The place in `list` of the tool that `item` names.
pub(in crate::api) fn place_of(list: &[Tool], item: &Item) -> Result<usize, ApiError> {
    let name = item.string("name")?;
    list.iter().position(|tool| tool.name == name).ok_or_else(|| {
        let problem = format!("there is no tool of the name {:?}", short(name));
        ApiError::invalid(item.param("name"), problem)
    })
}

fn read_tool(item: &Item, schema: &str) -> Result<Tool, ApiError> {
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
    Ok(Tool {
        name: name.to_owned(),
        description: item.within(item.fields.string("description"))?.map(str::to_owned),
        parameters,
        strict: item.within(item.fields.bool("strict"))?.unwrap_or(false),
        param,
    })
}

/// Adds to a conversation what a call gave: `field` of `item` has the call's id.
pub(in crate::api) fn add_result(
    conversation: &mut Conversation,
    item: &Item,
    field: &str,
    text: String,
) -> Result<(), ApiError> {
    let id = item.string(field)?;
    if conversation.result(id, text) {
        return Ok(());
    }
    let problem = format!("no call before it has the id {:?}", short(id));
    Err(ApiError::invalid(item.param(field), problem))
}

/// A call that an answer makes, as far as it is written.
#[derive(Debug, Clone)]
pub(in crate::api) struct Calling {
    /// No other call has it; each wire format puts a prefix of its own before it.
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl Calling {
    /// Adds a piece to the calls that an answer makes.
    pub(in crate::api) fn gather(calls: &mut Vec<Self>, piece: CallPiece) {
        match piece {
            CallPiece::Name { name, .. } => {
                calls.push(Self { id: new_id(""), name, arguments: String::new() })
            }
            CallPiece::Parameters { index, json } => calls[index].arguments.push_str(&json),
        }
    }

    /// Whether nothing of its arguments was cut.
    pub(in crate::api) fn is_whole(&self) -> bool {
        serde_json::from_str::<IgnoredAny>(&self.arguments).is_ok()
    }
}
