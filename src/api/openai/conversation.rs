//! A conversation as OpenAI's chat writes it: messages, calls of tools and what these gave; and the tools that there are, as
//! both of OpenAI's formats write them.

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::fields::{Fields, Item, missing, short, wrong_type};
use crate::api::tools::{add_result, place_of, tool_list};
use crate::session::{Call, Conversation, MAX_TOOLS, Tool, ToolChoice, Tools};
use crate::text::Message;

/// Roles are system, developer, user or assistant.
pub(in crate::api) fn messages(items: &[Value]) -> Result<Vec<Message>, ApiError> {
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "expected at least one message, got an empty list"));
    }
    let mut conversation = Conversation::default();
    for (i, item) in items.iter().enumerate() {
        let item = Item::new(format!("messages[{i}]"), item)?;
        let (role, text) = role_and_text(&item)?;
        if role == "tool" {
            add_result(&mut conversation, &item, "tool_call_id", text)?;
            continue;
        }
        let calls = calls(&item, role)?;
        if calls.is_empty() || !text.is_empty() {
            conversation.say(role, &text);
        }
        for (id, call) in calls {
            conversation.call(id, call);
        }
    }
    Ok(conversation.finish())
}

fn role_and_text<'a>(item: &Item<'a>) -> Result<(&'a str, String), ApiError> {
    let role = item.string("role")?;
    match role {
        "system" | "developer" | "user" | "assistant" | "tool" => {}
        "function" => {
            let problem = "the role \"function\" was replaced by \"tool\" with a tool_call_id";
            return Err(ApiError::unsupported(item.param("role"), problem));
        }
        _ => {
            let expected = "expected system, developer, user, assistant or tool";
            let problem = format!("{expected}, got {:?}", short(role));
            return Err(ApiError::invalid(item.param("role"), problem));
        }
    }
    let text = match item.fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => content_parts(&item.param("content"), parts)?,
        // An assistant's turn may have no text, and a tool may give nothing.
        None if matches!(role, "assistant" | "tool") => String::new(),
        None => return Err(missing(item.param("content"))),
        Some(other) => {
            return Err(wrong_type(item.param("content"), "a string or a list of parts", other));
        }
    };
    Ok((role, text))
}

/// The calls that an assistant's turn made, by id.
fn calls<'a>(item: &Item<'a>, role: &str) -> Result<Vec<(&'a str, Call)>, ApiError> {
    if item.fields.get("function_call").is_some() {
        let problem = "was replaced by tool_calls, which this server reads";
        return Err(ApiError::unsupported(item.param("function_call"), problem));
    }
    let Some(items) = item.within(item.fields.array("tool_calls"))? else {
        return Ok(Vec::new());
    };
    if role != "assistant" && !items.is_empty() {
        return Err(ApiError::invalid(item.param("tool_calls"), "only an assistant's message has them"));
    }
    if items.len() > MAX_TOOLS {
        let problem = format!("expected at most {MAX_TOOLS} calls, got {}", items.len());
        return Err(ApiError::invalid(item.param("tool_calls"), problem));
    }
    let read = |(i, call): (usize, &'a Value)| {
        let item = Item::new(format!("{}[{i}]", item.param("tool_calls")), call)?;
        function_type(&item)?;
        let id = item.string("id")?;
        Ok((id, function_call(&item.object("function")?)?))
    };
    items.iter().enumerate().map(read).collect()
}

/// Name and arguments of a call.
pub(in crate::api) fn function_call(item: &Item) -> Result<Call, ApiError> {
    let name = item.string("name")?.to_owned();
    let arguments = match item.fields.get("arguments") {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        // Some clients send what they parsed.
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(other) => return Err(wrong_type(item.param("arguments"), "a string of JSON", other)),
    };
    Ok(Call { name, arguments })
}

/// Functions are the one kind of tools, and of calls.
fn function_type(item: &Item) -> Result<(), ApiError> {
    match item.within(item.fields.string("type"))? {
        None | Some("function") => Ok(()),
        Some(other) => {
            let problem = format!("this server has \"function\" alone, not {:?}", short(other));
            Err(ApiError::unsupported(item.param("type"), problem))
        }
    }
}

/// The text of a list of parts, joined as OpenAI's own templates do: without a separator.
fn content_parts(at: &str, parts: &[Value]) -> Result<String, ApiError> {
    let mut joined = String::new();
    for (i, part) in parts.iter().enumerate() {
        let part = Item::new(format!("{at}[{i}]"), part)?;
        match part.string("type")? {
            "text" => joined.push_str(part.string("text")?),
            kind @ ("image_url" | "input_image" | "input_audio" | "file" | "video_url") => {
                let problem = format!("this server reads text only, not {kind:?}");
                return Err(ApiError::unsupported(part.param("type"), problem));
            }
            kind => {
                let problem = format!("expected \"text\", got {:?}", short(kind));
                return Err(ApiError::invalid(part.param("type"), problem));
            }
        }
    }
    Ok(joined)
}

/// Where OpenAI's formats write what they say of a function, or of what else an object's `type` names.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) enum Shape {
    /// Chat: in an object of that name.
    Nested,
    /// Responses: beside `type`.
    Flat,
}

impl Shape {
    fn within<'a>(self, item: Item<'a>, kind: &str) -> Result<Item<'a>, ApiError> {
        match self {
            Self::Nested => item.object(kind),
            Self::Flat => Ok(item),
        }
    }
}

/// Chat's `tools`, `tool_choice` and `parallel_tool_calls`.
pub(in crate::api) fn tools(fields: &Fields) -> Result<Tools, ApiError> {
    refuse_functions(fields)?;
    openai_tools(fields, Shape::Nested)
}

pub(in crate::api) fn openai_tools(fields: &Fields, shape: Shape) -> Result<Tools, ApiError> {
    let list = tool_list(fields, "parameters", |item| {
        function_type(&item)?;
        shape.within(item, "function")
    })?;
    let (choice, only) = tool_choice(fields, &list, shape)?;
    Ok(Tools { list, choice, only, parallel: fields.bool("parallel_tool_calls")?.unwrap_or(true) })
}

/// And the places of those that may be called, where these are not all.
fn tool_choice(
    fields: &Fields,
    list: &[Tool],
    shape: Shape,
) -> Result<(ToolChoice, Option<Vec<usize>>), ApiError> {
    const AT: &str = "tool_choice";
    let choice = match fields.get(AT) {
        None => return Ok((ToolChoice::Auto, None)),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => return Ok((ToolChoice::None, None)),
            "auto" => return Ok((ToolChoice::Auto, None)),
            "required" if list.is_empty() => {
                return Err(ApiError::invalid(AT, "there are no tools to choose from"));
            }
            "required" => return Ok((ToolChoice::Required, None)),
            other => {
                let problem = format!("expected none, auto, required or an object, got {:?}", short(other));
                return Err(ApiError::invalid(AT, problem));
            }
        },
        Some(choice @ Value::Object(_)) => Item::new(AT, choice)?,
        Some(other) => return Err(wrong_type(AT, "a string or an object", other)),
    };
    if choice.within(choice.fields.string("type"))? != Some("allowed_tools") {
        function_type(&choice)?;
        let place = place_of(list, &shape.within(choice, "function")?)?;
        return Ok((ToolChoice::Required, Some(vec![place])));
    }
    let allowed = shape.within(choice, "allowed_tools")?;
    let choice = match allowed.string("mode")? {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        other => {
            let problem = format!("expected auto or required, got {:?}", short(other));
            return Err(ApiError::invalid(allowed.param("mode"), problem));
        }
    };
    let at = allowed.param("tools");
    let items = allowed.within(allowed.fields.array("tools"))?.ok_or_else(|| missing(&at))?;
    if items.is_empty() || items.len() > MAX_TOOLS {
        let problem = format!("expected 1 to {MAX_TOOLS} tools, got {}", items.len());
        return Err(ApiError::invalid(at, problem));
    }
    let place = |(i, item): (usize, &Value)| {
        let item = Item::new(format!("{at}[{i}]"), item)?;
        function_type(&item)?;
        place_of(list, &shape.within(item, "function")?)
    };
    Ok((choice, Some(items.iter().enumerate().map(place).collect::<Result<_, _>>()?)))
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
