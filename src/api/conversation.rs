//! A conversation as OpenAI's chat writes it: messages, calls of tools and what these gave, and the tools that there are.

use serde_json::Value;

use super::error::ApiError;
use super::request::{Fields, missing, nested, short, wrong_type};
use super::tools::{Call, MAX_TOOLS, Tool, ToolChoice, Tools, written_calls, written_results};
use crate::text::{Content, Message};

/// Calls of tools become the JSON that the model wrote, and what they gave a turn of the user's.
pub(super) fn messages(items: &[Value]) -> Result<Vec<Message>, ApiError> {
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "expected at least one message, got an empty list"));
    }
    let mut messages = Vec::new();
    // Calls so far, by id; and what those of the last turn gave that is not written yet.
    let (mut calls, mut results) = (Vec::new(), Vec::new());
    let write = |messages: &mut Vec<Message>, results: &mut Vec<_>| {
        if !results.is_empty() {
            messages.push(Message::new("user", &written_results(std::mem::take(results))));
        }
    };
    for (i, item) in items.iter().enumerate() {
        let at = format!("messages[{i}]");
        let Value::Object(item) = item else { return Err(wrong_type(at, "an object", item)) };
        let item = Item { at, fields: Fields(item) };
        let (role, text) = item.role_and_text()?;
        if role == "tool" {
            results.push(item.result(&calls, text)?);
            continue;
        }
        write(&mut messages, &mut results);
        let called = item.calls(role)?;
        let written: Vec<Call> = called.iter().map(|(_, call)| call.clone()).collect();
        calls.extend(called.into_iter().map(|(id, call)| (id, call.name)));
        let text = if written.is_empty() { text } else { written_calls(&text, &written) };
        messages.push(Message { role: role.to_owned(), content: Content::Text(text) });
    }
    write(&mut messages, &mut results);
    Ok(messages)
}

/// One of `messages`, and its name in errors.
struct Item<'a> {
    at: String,
    fields: Fields<'a>,
}

impl<'a> Item<'a> {
    fn param(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    fn string(&self, name: &str) -> Result<&'a str, ApiError> {
        let text = self.fields.string(name).map_err(|error| nested(&self.at, error))?;
        text.ok_or_else(|| missing(self.param(name)))
    }

    fn role_and_text(&self) -> Result<(&'a str, String), ApiError> {
        let role = self.string("role")?;
        match role {
            "system" | "developer" | "user" | "assistant" | "tool" => {}
            "function" => {
                let problem = "the role \"function\" was replaced by \"tool\" with a tool_call_id";
                return Err(ApiError::unsupported(self.param("role"), problem));
            }
            _ => {
                let expected = "expected system, developer, user, assistant or tool";
                let problem = format!("{expected}, got {:?}", short(role));
                return Err(ApiError::invalid(self.param("role"), problem));
            }
        }
        let text = match self.fields.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => content_parts(&self.param("content"), parts)?,
            // An assistant's turn may have no text, and a tool may give nothing.
            None if matches!(role, "assistant" | "tool") => String::new(),
            None => return Err(missing(self.param("content"))),
            Some(other) => {
                return Err(wrong_type(self.param("content"), "a string or a list of parts", other));
            }
        };
        Ok((role, text))
    }

    /// What a tool gave: the place of its call among `calls`, the tool's name, and the text.
    fn result(&self, calls: &[(String, String)], text: String) -> Result<(usize, String, String), ApiError> {
        let id = self.string("tool_call_id")?;
        // An id may come again in a later turn: the last one is meant.
        let Some(place) = calls.iter().rposition(|(other, _)| other == id) else {
            let problem = format!("no tool call before it has the id {:?}", short(id));
            return Err(ApiError::invalid(self.param("tool_call_id"), problem));
        };
        Ok((place, calls[place].1.clone(), text))
    }

    /// The calls that an assistant's turn made, by id.
    fn calls(&self, role: &str) -> Result<Vec<(String, Call)>, ApiError> {
        if self.fields.get("function_call").is_some() {
            let problem = "was replaced by tool_calls, which this server reads";
            return Err(ApiError::unsupported(self.param("function_call"), problem));
        }
        let Some(items) = self.fields.array("tool_calls").map_err(|error| nested(&self.at, error))? else {
            return Ok(Vec::new());
        };
        if role != "assistant" && !items.is_empty() {
            return Err(ApiError::invalid(self.param("tool_calls"), "only an assistant's message has them"));
        }
        if items.len() > MAX_TOOLS {
            let problem = format!("expected at most {MAX_TOOLS} calls, got {}", items.len());
            return Err(ApiError::invalid(self.param("tool_calls"), problem));
        }
        let read = |(i, item): (usize, &Value)| {
            let at = format!("{}[{i}]", self.param("tool_calls"));
            let Value::Object(item) = item else { return Err(wrong_type(at, "an object", item)) };
            let item = Item { at, fields: Fields(item) };
            item.function_type()?;
            let id = item.string("id")?.to_owned();
            let function = item.function()?;
            let name = function.string("name")?.to_owned();
            let arguments = match function.fields.get("arguments") {
                None => String::new(),
                Some(Value::String(text)) => text.clone(),
                // Some clients send what they parsed.
                Some(object @ Value::Object(_)) => object.to_string(),
                Some(other) => {
                    return Err(wrong_type(function.param("arguments"), "a string of JSON", other));
                }
            };
            Ok((id, Call { name, arguments }))
        };
        items.iter().enumerate().map(read).collect()
    }

    /// Of tools and their calls, functions are the one kind.
    fn function_type(&self) -> Result<(), ApiError> {
        match self.fields.string("type").map_err(|error| nested(&self.at, error))? {
            None | Some("function") => Ok(()),
            Some(other) => {
                let problem = format!("this server has \"function\" alone, not {:?}", short(other));
                Err(ApiError::unsupported(self.param("type"), problem))
            }
        }
    }

    fn function(&self) -> Result<Item<'a>, ApiError> {
        let function = self.fields.object("function").map_err(|error| nested(&self.at, error))?;
        let function = function.ok_or_else(|| missing(self.param("function")))?;
        Ok(Item { at: self.param("function"), fields: Fields(function) })
    }
}

/// The text of a list of parts, joined as OpenAI's own templates do: without a separator.
fn content_parts(at: &str, parts: &[Value]) -> Result<String, ApiError> {
    let mut joined = String::new();
    for (i, part) in parts.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let Value::Object(part) = part else { return Err(wrong_type(at, "an object", part)) };
        let fields = Fields(part);
        match fields.string("type").map_err(|e| nested(&at, e))? {
            Some("text") => {
                let text = fields.string("text").map_err(|e| nested(&at, e))?;
                joined.push_str(text.ok_or_else(|| missing(format!("{at}.text")))?);
            }
            Some(kind @ ("image_url" | "input_image" | "input_audio" | "file" | "video_url")) => {
                let problem = format!("this server reads text only, not {kind:?}");
                return Err(ApiError::unsupported(format!("{at}.type"), problem));
            }
            Some(kind) => {
                let problem = format!("expected \"text\", got {:?}", short(kind));
                return Err(ApiError::invalid(format!("{at}.type"), problem));
            }
            None => return Err(missing(format!("{at}.type"))),
        }
    }
    Ok(joined)
}

/// `tools`, `tool_choice` and `parallel_tool_calls`.
pub(super) fn tools(fields: &Fields) -> Result<Tools, ApiError> {
    refuse_functions(fields)?;
    let items = fields.array("tools")?.map_or(&[][..], Vec::as_slice);
    if items.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("expected at most {MAX_TOOLS}, got {}", items.len())));
    }
    let mut list: Vec<Tool> = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        let at = format!("tools[{i}]");
        let Value::Object(item) = item else { return Err(wrong_type(at, "an object", item)) };
        let tool = tool(&Item { at: at.clone(), fields: Fields(item) })?;
        if list.iter().any(|other| other.name == tool.name) {
            let problem = format!("another tool has the name {:?}", short(&tool.name));
            return Err(ApiError::invalid(format!("{at}.function.name"), problem));
        }
        list.push(tool);
    }
    let choice = tool_choice(fields, &list)?;
    Ok(Tools { list, choice, parallel: fields.bool("parallel_tool_calls")?.unwrap_or(true) })
}

fn tool(item: &Item) -> Result<Tool, ApiError> {
    const MAX_NAME_BYTES: usize = 128;
    item.function_type()?;
    let function = item.function()?;
    let name = function.string("name")?;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        let problem = format!("expected 1 to {MAX_NAME_BYTES} bytes without control characters");
        return Err(ApiError::invalid(function.param("name"), problem));
    }
    let within = |error| nested(&function.at, error);
    let parameters = match function.fields.object("parameters").map_err(within)? {
        None => serde_json::json!({"type": "object", "properties": {}}),
        Some(schema) if schema.get("type").is_some_and(|kind| kind != "object") => {
            return Err(ApiError::invalid(function.param("parameters.type"), "expected \"object\""));
        }
        Some(schema) => Value::Object(schema.clone()),
    };
    Ok(Tool {
        name: name.to_owned(),
        description: function.fields.string("description").map_err(within)?.map(str::to_owned),
        parameters,
        strict: function.fields.bool("strict").map_err(within)?.unwrap_or(false),
    })
}

fn tool_choice(fields: &Fields, list: &[Tool]) -> Result<ToolChoice, ApiError> {
    const AT: &str = "tool_choice";
    let choice = match fields.get(AT) {
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => return Ok(ToolChoice::None),
            "auto" => return Ok(ToolChoice::Auto),
            "required" => ToolChoice::Required,
            other => {
                let problem = format!("expected none, auto, required or an object, got {:?}", short(other));
                return Err(ApiError::invalid(AT, problem));
            }
        },
        Some(Value::Object(choice)) => {
            let choice = Item { at: AT.into(), fields: Fields(choice) };
            choice.function_type()?;
            let function = choice.function()?;
            let name = function.string("name")?;
            if !list.iter().any(|tool| tool.name == name) {
                let problem = format!("there is no tool of the name {:?}", short(name));
                return Err(ApiError::invalid(function.param("name"), problem));
            }
            ToolChoice::Named(name.to_owned())
        }
        Some(other) => return Err(wrong_type(AT, "a string or an object", other)),
    };
    if list.is_empty() {
        return Err(ApiError::invalid(AT, "there are no tools to choose from"));
    }
    Ok(choice)
}

/// The fields that `tools` and `tool_choice` have replaced.
fn refuse_functions(fields: &Fields) -> Result<(), ApiError> {
    let off = |choice: &Value| choice == "none";
    if fields.get("function_call").is_some_and(|choice| !off(choice) && choice != "auto") {
        return Err(ApiError::unsupported(
            "function_call",
            "was replaced by tool_choice, which this server has",
        ));
    }
    let functions = fields.array("functions")?.is_some_and(|functions| !functions.is_empty());
    if functions && !fields.get("function_call").is_some_and(off) {
        return Err(ApiError::unsupported("functions", "was replaced by tools, which this server has"));
    }
    Ok(())
}
