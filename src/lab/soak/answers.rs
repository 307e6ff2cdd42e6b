//! Normalizes answers, so that two answers to the same request can be compared. The events of a stream are joined,
//! because the number of pieces of a text varies.
//!
//! Ids, times, counts of draft tokens, and the number of cached tokens are removed. Everything else is compared: texts,
//! token ids, all digits of log probabilities, finish reasons, usage, and error messages.

use serde_json::{Map, Value};

use super::client::{Exchanged, events};
use crate::cli::bench::client::shown;

/// Prefixes of the ids that the server generates.
const IDS: [&str; 8] = ["chatcmpl-", "cmpl-", "resp_", "msg_", "call_", "toolu_", "fc_", "req_"];
/// The smallest number of characters of an id after its prefix.
const SHORTEST_ID: usize = 8;
/// Fields whose values vary.
const OF_THE_MOMENT: [&str; 11] = [
    "created",
    "created_at",
    "completed_at",
    "timings",
    "cached_tokens",
    "sequence_number",
    "request_id",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
    "eval_duration",
];
/// Fields whose values a stream sends in pieces.
const IN_PIECES: [&str; 6] = ["content", "text", "arguments", "delta", "partial_json", "response"];

/// The normalized answer.
pub fn comparable(answer: &Exchanged) -> Result<Value, String> {
    match answer.kind.as_str() {
        "text/event-stream" => {
            let events = events(&answer.body).ok_or("an event is too long")?;
            stream(&events)
        }
        "application/x-ndjson" => {
            let lines: Vec<String> =
                String::from_utf8_lossy(&answer.body).lines().map(str::to_owned).collect();
            stream(&lines)
        }
        "application/json" => {
            let mut body = serde_json::from_slice(&answer.body)
                .map_err(|error| format!("no JSON ({error}): {}", shown(&answer.body)))?;
            settle(&mut body);
            Ok(body)
        }
        _ => Ok(String::from_utf8_lossy(&answer.body).into()),
    }
}

/// Joins the events of a stream, separately for each type.
fn stream(events: &[String]) -> Result<Value, String> {
    let mut whole = Map::new();
    for event in events {
        if event == "[DONE]" {
            whole.insert(event.clone(), Value::Bool(true));
            continue;
        }
        let mut event: Value = serde_json::from_str(event)
            .map_err(|error| format!("no JSON ({error}): {}", shown(event.as_bytes())))?;
        settle(&mut event);
        if event["type"] == "message_start" {
            // The number of tokens in the first piece varies; the last event has the sum.
            event["message"]["usage"] = Value::Null;
        }
        let part = |name: &str| event[name].as_u64().map_or(String::new(), |n| format!(" {n}"));
        let kind = event["type"].as_str().unwrap_or("chunks");
        let kind = [kind, &part("output_index"), &part("content_index")].concat();
        // Blocks of Anthropic's streams have an index as well.
        let kind = if event["type"].is_string() { kind + &part("index") } else { kind };
        merge(whole.entry(kind).or_insert(Value::Null), event);
    }
    Ok(Value::Object(whole))
}

/// Removes what varies.
fn settle(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(settle),
        Value::Object(fields) => {
            // Anthropic counts cached tokens separately from the rest of the prompt.
            if let Some(cached) = fields.shift_remove("cache_read_input_tokens").and_then(|n| n.as_u64())
                && let Some(rest) = fields.get("input_tokens").and_then(Value::as_u64)
            {
                fields.insert("input_tokens".into(), (rest + cached).into());
            }
            fields.retain(|name, _| !OF_THE_MOMENT.contains(&name.as_str()));
            fields.values_mut().for_each(settle);
        }
        Value::String(text) => *text = without_ids(text),
        _ => {}
    }
}

/// A text in which all generated ids are replaced with the same text. Errors name such ids.
fn without_ids(text: &str) -> String {
    let is_inside = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let is_id = |word: &&str| {
        let end = IDS.iter().find_map(|prefix| word.strip_prefix(prefix));
        end.is_some_and(|end| end.len() >= SHORTEST_ID)
    };
    let mut rest = text;
    let mut whole = String::new();
    while let Some(at) = rest.find(is_inside) {
        let (before, from) = rest.split_at(at);
        let (word, after) = from.split_at(from.find(|c| !is_inside(c)).unwrap_or(from.len()));
        whole.extend([before, if is_id(&word) { "ID" } else { word }]);
        rest = after;
    }
    whole + rest
}

/// Replaces the state "loading" with "loaded" in an answer that describes models.
pub fn count_as_loaded(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(count_as_loaded),
        Value::Object(fields) => {
            if let Some(state) = fields.get_mut("status").and_then(|status| status.get_mut("value"))
                && state == "loading"
            {
                *state = "loaded".into();
            }
            fields.values_mut().for_each(count_as_loaded);
        }
        _ => {}
    }
}

/// Adds an event to the previous ones: texts and lists are appended, other values are replaced.
fn merge(whole: &mut Value, more: Value) {
    match (whole, more) {
        (_, Value::Null) => {}
        (Value::Object(whole), Value::Object(more)) => {
            for (name, value) in more {
                match (whole.get_mut(&name), value) {
                    (Some(Value::String(text)), Value::String(piece)) if IN_PIECES.contains(&&*name) => {
                        text.push_str(&piece);
                    }
                    (Some(known), value) => merge(known, value),
                    (None, value) => {
                        let mut fresh = Value::Null;
                        merge(&mut fresh, value);
                        whole.insert(name, fresh);
                    }
                }
            }
        }
        (Value::Array(whole), Value::Array(more)) => {
            for item in more {
                let index = item.get("index").filter(|index| index.is_u64()).cloned();
                let known =
                    index.and_then(|index| whole.iter_mut().find(|known| known.get("index") == Some(&index)));
                match known {
                    Some(known) => merge(known, item),
                    None => whole.push(item),
                }
            }
            // The order of several answers varies.
            whole.sort_by_key(|item| item.get("index").and_then(Value::as_u64));
        }
        (whole, more) => *whole = more,
    }
}

/// One line about the first difference between two answers.
pub fn difference(expected: &Value, got: &Value) -> Option<String> {
    fn first(at: &str, expected: &Value, got: &Value) -> Option<String> {
        match (expected, got) {
            (one, other) if one == other => None,
            (Value::Object(one), Value::Object(other)) => {
                let names = one.keys().chain(other.keys().filter(|name| !one.contains_key(*name)));
                names
                    .into_iter()
                    .find_map(|name| {
                        first(
                            &format!("{at}.{name}"),
                            expected.get(name)?,
                            got.get(name).unwrap_or(&Value::Null),
                        )
                        .or_else(|| other.get(name).is_none().then(|| format!("{at}.{name} is missing")))
                    })
                    .or_else(|| {
                        other
                            .keys()
                            .find(|name| !one.contains_key(*name))
                            .map(|name| format!("{at}.{name} is new"))
                    })
            }
            (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
                let mut pairs = one.iter().zip(other).enumerate();
                pairs.find_map(|(i, (one, other))| first(&format!("{at}[{i}]"), one, other))
            }
            (one, other) => {
                let text = |value: &Value| shown(value.to_string().as_bytes());
                Some(format!("{at} was {}, and is {}", text(one), text(other)))
            }
        }
    }
    first("", expected, got)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(kind: &str, body: &str) -> Value {
        let exchanged = Exchanged { status: 200, kind: kind.into(), body: body.into() };
        comparable(&exchanged).expect("comparable")
    }

    fn streamed(events: &[Value]) -> Value {
        let lines: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        answer("text/event-stream", &format!(": waits\n\n{lines}data: [DONE]\n\n"))
    }

    fn chunk(index: usize, text: &str, end: Option<&str>) -> Value {
        let logprobs = json!({"content": [{"token": text, "logprob": -0.5}]});
        json!({"id": format!("chatcmpl-{index}0123456789"), "created": index, "choices": [
            {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": end},
        ]})
    }

    #[test]
    fn ids_times_and_what_was_cached_make_no_difference() {
        let body = |id: &str, created: u64, cached: u64| {
            let usage = json!({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}});
            let choice =
                json!({"message": {"content": "msg_ is a prefix", "tool_calls": [{"id": "call_abcdefgh"}]}});
            json!({"id": id, "created": created, "usage": usage, "choices": [choice], "timings": {"x": created}})
        };
        let one = answer("application/json", &body("chatcmpl-0123456789abcdef", 1, 0).to_string());
        assert_eq!(one, answer("application/json", &body("chatcmpl-fedcba9876543210", 2, 8).to_string()));
        assert_eq!(one["choices"][0]["message"]["content"], "msg_ is a prefix");
        assert_eq!(without_ids("ä resp_0 'resp_0123456789abcdef' not found."), "ä resp_0 'ID' not found.");

        let usage = |rest: u64, cached: u64| json!({"input_tokens": rest, "cache_read_input_tokens": cached});
        let anthropic = |usage: Value| answer("application/json", &usage.to_string());
        assert_eq!(anthropic(usage(9, 0)), anthropic(usage(1, 8)));
        assert_ne!(anthropic(usage(9, 0)), anthropic(usage(2, 8)));
    }

    #[test]
    fn a_stream_is_the_same_however_it_is_cut() {
        let whole =
            streamed(&[chunk(0, "ab", None), chunk(1, "x", Some("stop")), chunk(0, "", Some("length"))]);
        assert_eq!(whole["chunks"]["choices"][0]["delta"]["content"], "ab");
        assert_eq!(whole["chunks"]["choices"][0]["finish_reason"], "length");
        let texts = |value: &Value| {
            let choices = value["chunks"]["choices"].as_array().expect("choices").iter();
            choices.map(|c| c["delta"]["content"].clone()).collect::<Vec<_>>()
        };
        let other = streamed(&[
            chunk(1, "x", None),
            chunk(0, "a", None),
            chunk(1, "", Some("stop")),
            chunk(0, "b", Some("length")),
        ]);
        assert_eq!(texts(&whole), texts(&other));
        assert_eq!(texts(&whole), ["ab", "x"]);
        let logprobs = other["chunks"]["choices"][0]["logprobs"]["content"].as_array().expect("a list");
        assert_eq!(logprobs.len(), 2);

        let delta = |n: u64, text: &str| json!({"type": "response.output_text.delta", "output_index": 0, "delta": text, "sequence_number": n});
        assert_eq!(streamed(&[delta(1, "ab")]), streamed(&[delta(1, "a"), delta(2, "b")]));
        let block = |index: u64, text: &str| json!({"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}});
        let blocks = streamed(&[block(0, "a"), block(1, "b"), block(0, "c")]);
        assert_eq!(blocks["content_block_delta 0"]["delta"]["text"], "ac");
    }

    #[test]
    fn the_first_difference_is_told_with_its_place() {
        let one = json!({"a": {"b": [1, {"c": "yes"}]}});
        assert_eq!(difference(&one, &one), None);
        for (other, told) in [
            (json!({"a": {"b": [1, {"c": "no"}]}}), ".a.b[1].c was \"yes\", and is \"no\""),
            (json!({"a": {"b": [1]}}), ".a.b was [1,{\"c\":\"yes\"}], and is [1]"),
            (json!({"a": {}}), ".a.b was [1,{\"c\":\"yes\"}], and is null"),
            (json!({"a": {"b": [1, {"c": "yes"}]}, "d": 1}), ".d is new"),
        ] {
            assert_eq!(difference(&one, &other).as_deref(), Some(told));
        }
        assert_eq!(difference(&json!({"a": null}), &json!({})).as_deref(), Some(".a is missing"));
    }
}
