//! The items of a conversation, as OpenAI's responses write them: messages, calls of functions, and what these gave. They are
//! read into a [`Conversation`], and kept, and shown again, as the JSON that they came as.

use std::ops::RangeInclusive;

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::api::error::ApiError;
use crate::api::fields::{Fields, Item, missing, short, wrong_type};
use crate::api::ids::new_id;
use crate::api::openai::conversation::function_call;
use crate::api::tools::add_result;
use crate::session::Conversation;

/// The field `input`: what it says goes into `conversation`, its items are returned as they are kept.
pub(in crate::api) fn input(
    fields: &Fields,
    conversation: &mut Conversation,
) -> Result<Vec<Value>, ApiError> {
    const AT: &str = "input";
    match fields.get(AT) {
        None => Err(missing(AT)),
        Some(Value::String(text)) => {
            conversation.say("user", text);
            let item = json!({"role": "user", "content": text});
            Ok(item.as_object().map(|item| kept(item, "message")).into_iter().collect())
        }
        Some(Value::Array(items)) => {
            let mut read_items = Vec::with_capacity(items.len());
            for (i, item) in items.iter().enumerate() {
                let item = Item::new(format!("{AT}[{i}]"), item)?;
                let kind = read(&item, conversation)?;
                read_items.extend(kind.map(|kind| kept(item.fields.0, kind)));
            }
            if read_items.is_empty() {
                return Err(ApiError::invalid(AT, "expected at least one message, got none"));
            }
            Ok(read_items)
        }
        Some(other) => Err(wrong_type(AT, "a string or a list of items", other)),
    }
}

/// Adds an item to a conversation; its type. None for one that says nothing: thoughts of another model.
pub(in crate::api) fn read<'a>(
    item: &Item<'a>,
    conversation: &mut Conversation,
) -> Result<Option<&'a str>, ApiError> {
    let kind = item.within(item.fields.string("type"))?.unwrap_or("message");
    match kind {
        "message" => {
            let role = item.string("role")?;
            if !matches!(role, "user" | "assistant" | "system" | "developer") {
                let problem = format!("expected user, assistant, system or developer, got {:?}", short(role));
                return Err(ApiError::invalid(item.param("role"), problem));
            }
            conversation.say(role, &text(item, "content")?);
        }
        "function_call" => conversation.call(item.string("call_id")?, function_call(item)?),
        "function_call_output" => add_result(conversation, item, "call_id", text(item, "output")?)?,
        "reasoning" => return Ok(None),
        "item_reference" => {
            let problem = "items are not kept by themselves: send the item";
            return Err(ApiError::unsupported(item.param("type"), problem));
        }
        "custom_tool_call" | "custom_tool_call_output" => {
            let problem = format!("of tools this server has functions alone, not {kind:?}");
            return Err(ApiError::unsupported(item.param("type"), problem));
        }
        kind => {
            let expected = "expected \"message\", \"function_call\" or \"function_call_output\"";
            let problem = format!("{expected}, got {:?}", short(kind));
            return Err(ApiError::invalid(item.param("type"), problem));
        }
    }
    Ok(Some(kind))
}

/// A string, or a list of parts, joined without a separator as chat's parts are.
fn text(item: &Item, field: &str) -> Result<String, ApiError> {
    let at = item.param(field);
    let parts = match item.fields.get(field) {
        None => return Err(missing(at)),
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong_type(at, "a string or a list of parts", other)),
    };
    let mut joined = String::new();
    for (i, part) in parts.iter().enumerate() {
        let part = Item::new(format!("{at}[{i}]"), part)?;
        let name = match part.string("type")? {
            "input_text" | "output_text" | "text" => "text",
            "refusal" => "refusal",
            kind @ ("input_image" | "input_file" | "input_audio") => {
                let problem = format!("this server reads text only, not {kind:?}");
                return Err(ApiError::unsupported(part.param("type"), problem));
            }
            kind => {
                let problem = format!("expected \"input_text\" or \"output_text\", got {:?}", short(kind));
                return Err(ApiError::invalid(part.param("type"), problem));
            }
        };
        joined.push_str(part.string(name)?);
    }
    Ok(joined)
}

/// An item with what clients may leave out: its type, an id, a status; its text as a list of parts, and arguments as text.
fn kept(item: &Map<String, Value>, kind: &str) -> Value {
    let mut item = item.clone();
    let absent = |value: Option<&Value>| value.is_none_or(Value::is_null);
    item.insert("type".into(), json!(kind));
    if !item.get("id").is_some_and(Value::is_string) {
        let prefix = match kind {
            "message" => "msg_",
            "function_call" => "fc_",
            _ => "fco_",
        };
        item.insert("id".into(), json!(new_id(prefix)));
    }
    if absent(item.get("status")) {
        item.insert("status".into(), json!("completed"));
    }
    if kind == "function_call" && !item.get("arguments").is_some_and(Value::is_string) {
        let object = item.get("arguments").filter(|value| value.is_object());
        item.insert("arguments".into(), json!(object.map_or(String::new(), Value::to_string)));
    }
    if let Some(Value::String(text)) = item.get("content") {
        let part = match item.get("role").and_then(Value::as_str) {
            Some("assistant") => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
            _ => json!({"type": "input_text", "text": text}),
        };
        item.insert("content".into(), json!([part]));
    }
    Value::Object(item)
}

/// Items of one page.
pub(in crate::api) const PAGE: RangeInclusive<usize> = 1..=100;
/// And where nobody says how many.
const PAGE_DEFAULT: usize = 20;

/// A page of kept items, as the parameters of a query ask for it: JSON in pieces, all but a few of them pieces of `kept`,
/// which may be large. Neither is anything but ids read of the items.
pub(in crate::api) fn list<'a>(
    kept: &Bytes,
    parameter: impl Fn(&str) -> Option<&'a str>,
) -> Result<Vec<Bytes>, ApiError> {
    let limit = match parameter("limit").map(str::parse) {
        None => PAGE_DEFAULT,
        Some(Ok(limit)) if PAGE.contains(&limit) => limit,
        Some(_) => {
            let problem = format!("expected an integer from {} to {}", PAGE.start(), PAGE.end());
            return Err(ApiError::invalid("limit", problem));
        }
    };
    let mut items: Vec<&RawValue> = serde_json::from_slice(kept).expect("a list was kept");
    match parameter("order") {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => {
            let problem = format!("expected asc or desc, got {:?}", short(other));
            return Err(ApiError::invalid("order", problem));
        }
    }
    if let Some(after) = parameter("after") {
        let is_it =
            |item: &&RawValue| serde_json::from_str::<String>(id(item).get()).is_ok_and(|id| id == after);
        let at = items.iter().position(is_it).ok_or_else(|| {
            let problem = format!("no item of this response has the id {:?}", short(after));
            ApiError::invalid("after", problem)
        })?;
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let piece = |raw: &RawValue| kept.slice_ref(raw.get().as_bytes());
    // Where there are no items, their ids are no id.
    let id_of = |item: Option<&&RawValue>| item.map_or(Bytes::from_static(b"\"\""), |item| piece(id(item)));
    let mut page = vec![Bytes::from_static(b"{\"object\":\"list\",\"data\":[")];
    for (i, item) in items.iter().enumerate() {
        page.extend((i > 0).then_some(Bytes::from_static(b",")));
        page.push(piece(item));
    }
    page.extend([Bytes::from_static(b"],\"first_id\":"), id_of(items.first())]);
    page.extend([Bytes::from_static(b",\"last_id\":"), id_of(items.last())]);
    page.push(Bytes::from(format!(",\"has_more\":{has_more}}}")));
    Ok(page)
}

/// The id of a kept item, as a string in JSON.
fn id(item: &RawValue) -> &RawValue {
    #[derive(Deserialize)]
    struct Item<'a> {
        #[serde(borrow)]
        id: &'a RawValue,
    }

    let Item { id } = serde_json::from_str(item.get()).expect("an item is kept with its id");
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_pieces_of_what_is_kept() {
        let item = |i: usize| json!({"id": format!("i\u{301}{i}"), "text": "x".repeat(100_000), "deep": [{"id": 1}]});
        let kept = Bytes::from(json!([item(0), item(1), item(2), item(3)]).to_string());
        let query = [("limit", "2"), ("after", "i\u{301}3")];
        let asked = |name: &str| query.iter().find(|(other, _)| *other == name).map(|(_, value)| *value);
        let page = list(&kept, asked).expect("a page");
        let all: Value = serde_json::from_slice(&page.concat()).expect("JSON");
        let expected = json!({
            "object": "list", "data": [item(2), item(1)], "first_id": "i\u{301}2", "last_id": "i\u{301}1", "has_more": true,
        });
        assert_eq!(all, expected);
        let own = |piece: &&Bytes| !kept.as_ptr_range().contains(&piece.as_ptr());
        let own: usize = page.iter().filter(own).map(Bytes::len).sum();
        assert!(own < 100, "{own} bytes are copied");
    }
}
