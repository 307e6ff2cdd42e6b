//! The items of a conversation, in the form of OpenAI's responses: messages, function calls, and the results of the
//! calls. Items are read into a [`Conversation`]. They are stored, and returned, as the JSON in which they came.

use std::ops::RangeInclusive;

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use utoipa::{IntoParams, ToSchema};

use crate::api::error::ApiError;
use crate::api::ids::new_id;
use crate::api::openai::conversation::{CallArguments, ImageDetail, call, unknown_part};
use crate::api::tools::add_result;
use crate::api::wire;
use crate::api::wire::bounded::List;
use crate::api::wire::union::{ListedBesideText, Refused, TextOr, expected, words};
use crate::api::wire::{field, required, short};
use crate::session::{Conversation, Image};
use crate::text::Content;

/// The content of an item.
type InputContent = TextOr<Vec<InputPart>>;

/// The field `input`.
pub(in crate::api) type Input = TextOr<List<InputItem, 1, { usize::MAX }>>;

words! {
    ItemType {
        Message = "message", FunctionCall = "function_call", FunctionCallOutput = "function_call_output",
        Reasoning = "reasoning"
    } or Other;
    ItemRole { User = "user", Assistant = "assistant", System = "system", Developer = "developer" };
    InputPartType { InputText = "input_text", OutputText = "output_text", Text = "text", Refusal = "refusal",
        ReasoningText = "reasoning_text", InputImage = "input_image" } or Other;
}

/// An item of a conversation: a message (the default), a function call, the output of a call, or what the model thought
/// before the next item, which the model's template keeps or drops.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct InputItem {
    r#type: Option<ItemType>,
    /// For `message`: who says it.
    role: Option<ItemRole>,
    /// For `message` and `reasoning`: its text, or its parts, which are joined without a separator. Messages may have images.
    #[schema(inline)]
    content: Option<InputContent>,
    /// For `function_call`: the id of the call. For `function_call_output`: the id of an earlier call.
    call_id: Option<String>,
    /// For `function_call`: the name of the function.
    name: Option<String>,
    /// For `function_call`: the arguments as JSON text, or as an object.
    #[schema(inline)]
    arguments: Option<CallArguments>,
    /// For `function_call_output`: the result of the call, which may have images.
    #[schema(inline)]
    output: Option<InputContent>,
}

impl ListedBesideText for InputItem {
    const NAME: &str = "a list of items";
}

/// A part of a message.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct InputPart {
    r#type: InputPartType,
    text: Option<String>,
    /// For `refusal`: its text.
    refusal: Option<String>,
    /// For `input_image`: the file, as `data:image/png;base64,...` or as base64 alone. Nothing is loaded from an address.
    image_url: Option<String>,
    /// For `input_image`: how many tokens the image may have, as in a chat.
    detail: Option<ImageDetail>,
    /// Not supported: this server stores no files.
    file_id: Option<Refused>,
}

impl ListedBesideText for InputPart {
    const NAME: &str = "a list of parts";
}

const INPUT: &str = "input";

impl Input {
    /// Adds the input to a conversation.
    pub fn read(self, conversation: &mut Conversation) -> Result<(), ApiError> {
        match self {
            TextOr::Text(text) => conversation.say("user", text),
            TextOr::Other(items) => {
                for (i, item) in items.0.into_iter().enumerate() {
                    item.read(&format!("{INPUT}[{i}]"), conversation)?;
                }
            }
        }
        Ok(())
    }
}

/// The items of `input` in the form in which they are stored. The caller has read the input, so the items are valid.
pub(in crate::api) fn kept_input(input: &Value) -> Result<Vec<Value>, ApiError> {
    let text;
    let items = match input {
        Value::Array(items) => items.as_slice(),
        other => {
            text = [json!({"role": "user", "content": other})];
            &text
        }
    };
    let items = items.iter().filter_map(Value::as_object);
    let items = items.map(|item| (item.get("type").and_then(Value::as_str).unwrap_or("message"), item));
    let kept: Vec<Value> =
        items.filter(|(kind, _)| *kind != "reasoning").map(|(kind, item)| kept(item, kind)).collect();
    if kept.is_empty() {
        return Err(ApiError::invalid(INPUT, "expected at least one message, got none"));
    }
    Ok(kept)
}

/// Adds stored items to a conversation. They were valid when they were stored.
pub(in crate::api) fn conversation_of(
    items: &[Value],
    conversation: &mut Conversation,
) -> Result<(), ApiError> {
    const AT: &str = "previous_response_id";
    items.iter().try_for_each(|item| wire::read_at::<InputItem>(AT, item)?.read(AT, conversation))
}

impl InputItem {
    /// Adds the item to a conversation; `at` is the item's path.
    fn read(self, at: &str, conversation: &mut Conversation) -> Result<(), ApiError> {
        match self.r#type {
            None | Some(ItemType::Message) => {
                let role = match required(self.role, at, "role")? {
                    ItemRole::User => "user",
                    ItemRole::Assistant => "assistant",
                    ItemRole::System => "system",
                    ItemRole::Developer => "developer",
                };
                let content = content(conversation, at, "content", self.content)?;
                conversation.say(role, content);
            }
            Some(ItemType::FunctionCall) => {
                let id = required(self.call_id, at, "call_id")?;
                conversation.call(&id, call(required(self.name, at, "name")?, self.arguments));
            }
            Some(ItemType::FunctionCallOutput) => {
                let id = required(self.call_id, at, "call_id")?;
                let output = content(conversation, at, "output", self.output)?;
                add_result(conversation, &field(at, "call_id"), &id, output)?;
            }
            // A thought may have only a summary, or be encrypted.
            Some(ItemType::Reasoning) if self.content.is_none() => {}
            Some(ItemType::Reasoning) => {
                let thought = content(conversation, at, "content", self.content)?;
                if thought.images().next().is_some() {
                    return Err(ApiError::invalid(field(at, "content"), "expected a thought without images"));
                }
                conversation.think(thought.text());
            }
            Some(ItemType::Other(kind)) => return Err(unknown_item(&field(at, "type"), &kind)),
        }
        Ok(())
    }
}

fn unknown_item(at: &str, kind: &str) -> ApiError {
    match kind {
        "item_reference" => ApiError::unsupported(at, "items are not kept by themselves: send the item"),
        "custom_tool_call" | "custom_tool_call_output" => {
            let problem = format!("of tools this server has functions alone, not {kind:?}");
            ApiError::unsupported(at, problem)
        }
        kind => ApiError::invalid(at, expected(&["message", "function_call", "function_call_output"], kind)),
    }
}

/// A text, or parts, which are joined without a separator as in a chat.
fn content(
    conversation: &mut Conversation,
    at: &str,
    name: &str,
    content: Option<InputContent>,
) -> Result<Content, ApiError> {
    let parts = match required(content, at, name)? {
        TextOr::Text(text) => return Ok(text.into()),
        TextOr::Other(parts) => parts,
    };
    let mut joined = Content::default();
    for (i, part) in parts.into_iter().enumerate() {
        let at = format!("{at}.{name}[{i}]");
        // It is checked in every part, as the document says.
        if Refused::is_asked(part.file_id) && !matches!(part.r#type, InputPartType::Other(_)) {
            let problem = "this server stores no files: send the image itself in image_url, as \"data:image/png;base64,...\"";
            return Err(ApiError::unsupported(field(&at, "file_id"), problem));
        }
        match part.r#type {
            InputPartType::InputText
            | InputPartType::OutputText
            | InputPartType::Text
            | InputPartType::ReasoningText => joined.push_text(&required(part.text, &at, "text")?),
            InputPartType::Refusal => joined.push_text(&required(part.refusal, &at, "refusal")?),
            InputPartType::InputImage => {
                const IMAGE_URL: &str = "image_url";
                let file = required(part.image_url, &at, IMAGE_URL)?;
                let image = Image {
                    param: field(&at, IMAGE_URL),
                    kind_param: field(&at, "type"),
                    file: file.into(),
                    detail: ImageDetail::of(part.detail),
                };
                joined.push_image(conversation.image(image));
            }
            InputPartType::Other(kind) => {
                return Err(unknown_part(&at, &kind, &["input_text", "output_text", "input_image"]));
            }
        }
    }
    Ok(joined)
}

/// An item with defaults for what clients may leave out (type, id, status), its text as a list of parts, and its
/// arguments as text.
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

/// Parameters of a page of items.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code, reason = "parameters are read one by one: this describes them")]
pub(in crate::api) struct PageQuery {
    /// The most items of the page; 20 if absent.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<usize>,
    /// The order of the items; `desc`, the last item first, if absent.
    #[param(inline)]
    order: Option<Order>,
    /// The id of the item after which the page begins.
    after: Option<String>,
}

words! {
    Order { Ascending = "asc", Descending = "desc" };
}

/// The most items that one page may have.
pub(in crate::api) const PAGE: RangeInclusive<usize> = 1..=100;
/// The most items of a page whose query has no `limit`.
const PAGE_DEFAULT: usize = 20;

/// The page of stored items that the parameters of a query ask for, as JSON in pieces. Nearly all pieces are slices of
/// `kept`, since items may be large. Only the items' ids are parsed.
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
    // An empty page has empty ids.
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

/// The id of a stored item, as a JSON string.
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
