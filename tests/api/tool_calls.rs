//! Tool calls over HTTP and the scripted runner: the prompt that describes tools, the texts that the model may
//! generate, and the calls that they become.

use axum::body::Body;
use axum::http::Request;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use unicorn::api::Options;
use unicorn::model::Limits;
use unicorn::text::{AnswerPiece, CallPiece, CallReader, whole_parameters};

use crate::support::app::{App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, app_with, shows_its_prompt};
use crate::support::fake_runner::{Script, says};
use crate::support::http::{
    assert_all_free, chat, complete, content, parse, post_to, send, send_json, stream,
};
use crate::support::json::{replace_somewhere, with};
use crate::support::lists::values;
use crate::support::tokenizers::tokenizer;
use crate::support::tools::{ROME, app, app_that_says, babbling, limits, now, roll, weather};

fn names() -> Vec<String> {
    vec!["get_weather".into(), "add \"it\"".into()]
}

/// The text and the calls of an answer that arrives in `pieces`, and whether the answer has the finish reason of calls.
fn read<'a>(pieces: impl Iterator<Item = &'a str>) -> (String, Vec<(String, String)>, bool) {
    let mut reader = CallReader::new(names());
    let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
    let mut said: Vec<AnswerPiece> = pieces.flat_map(|piece| reader.push(piece)).collect();
    said.extend(reader.finish());
    for said in said {
        match said {
            AnswerPiece::Text(more) => text.push_str(&more),
            AnswerPiece::Call(CallPiece::Name { index, name }) => {
                assert_eq!(index, calls.len());
                calls.push((name, String::new()));
            }
            AnswerPiece::Call(CallPiece::Parameters { index, json }) => {
                assert!(index + 1 == calls.len() && !json.is_empty());
                calls[index].1.push_str(&json);
            }
        }
    }
    (text, calls, reader.called())
}

#[test]
fn calls_are_distinguished_from_text_for_every_split() {
    let seed = 0xca11;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let call = |name: &str, json: &str| (name.to_owned(), json.to_owned());
    let weather = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"R}o\\\"{m\", \"a\": [{}]}}";
    let args = "{\"city\": \"R}o\\\"{m\", \"a\": [{}]}";
    let spaced = "\n [ {\n\t\"name\" :\"add \\\"it\\\"\",\"parameters\":{ } } ,\r\n{\"name\":\"get_weather\",\"parameters\":{\"½\":1}}]";
    let cut = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"R";
    for (text, calls, called) in [
        (weather, vec![call("get_weather", args)], true),
        (&format!("[{weather}]"), vec![call("get_weather", args)], true),
        (spaced, vec![call("add \"it\"", "{ }"), call("get_weather", "{\"½\":1}")], true),
        (cut, vec![call("get_weather", "{\"city\": \"R")], false),
        ("{\"name\": \"get_wea", vec![], false),
        ("{\"name\": \"unknown\", \"parameters\": {}}", vec![], false),
        ("{\"parameters\": {}, \"name\": \"get_weather\"}", vec![], false),
        ("{\"name\": \"get_weather\", \"parameters\": 3}", vec![], false),
        ("{\"name\": \"Ada\", \"age\": 3}", vec![], false),
        ("{}", vec![], false),
        ("[1, 2]", vec![], false),
        (" \n Hello {\"name\": \"get_weather\", \"parameters\": {}}", vec![], false),
        ("  ", vec![], false),
        ("", vec![], false),
        ("½ {", vec![], false),
    ] {
        let expected = (if calls.is_empty() { text.to_owned() } else { String::new() }, calls, called);
        assert_eq!(read([text].into_iter()), expected, "{text}");
        for _ in 0..20 {
            let mut at: Vec<usize> =
                text.char_indices().map(|(at, _)| at).filter(|_| rng.random_bool(0.4)).collect();
            at.push(text.len());
            let mut from = 0;
            let pieces: Vec<&str> =
                at.iter().map(|to| &text[std::mem::replace(&mut from, *to)..*to]).collect();
            assert_eq!(read(pieces.iter().copied()), expected, "{pieces:?}");
        }
    }
}

#[test]
fn text_without_calls_is_returned_unchanged() {
    let seed = 0x7e47;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (name, begun) = ("get_weather", "\"name\": \"get_weather\", ");
    let pieces =
        ["{", "}", "[", "]", "\"", "name", "parameters", ":", ",", " ", "\\", name, "½", "\n", begun];
    for _ in 0..20_000 {
        let pieces: Vec<&str> =
            (0..rng.random_range(0..12)).map(|_| *pieces.choose(&mut rng).unwrap()).collect();
        let (text, calls, _) = read(pieces.iter().copied());
        if calls.is_empty() {
            assert_eq!(text, pieces.concat());
        } else {
            assert!(
                text.is_empty() && pieces.concat().contains(&calls[0].1),
                "{pieces:?}: {calls:?}, {text:?}"
            );
        }
    }
}

#[test]
fn truncated_parameters_keep_their_complete_values() {
    for (cut, whole) in [
        ("{", "{}"),
        ("{\"a", "{}"),
        ("{\"a\"", "{}"),
        ("{\"a\": ", "{}"),
        ("{\"a\": \"x", "{}"),
        ("{\"a\": \"x\\\"", "{}"),
        ("{\"a\": \"}]\"", "{\"a\": \"}]\"}"),
        ("{\"a\": 12", "{}"),
        ("{\"a\": 12,", "{\"a\": 12}"),
        ("{\"a\": 12, \"b\": tru", "{\"a\": 12}"),
        ("{\"a\": [1, {\"½\": [], \"d\"", "{\"a\": [1, {\"½\": []}]}"),
        ("{\"a\": {\"b\": {}}, \"c\": [[\"x\"", "{\"a\": {\"b\": {}}, \"c\": [[\"x\"]]}"),
        ("{\"a\": []}", "{\"a\": []}"),
    ] {
        assert_eq!(whole_parameters(cut), whole, "{cut}");
    }
    // For every truncation, the result is a JSON object without invented values.
    let json = "{\"a\": [1.5e3, -2, \"x\\\\\", [], {\"½\": null}], \"b\": {\"c\": true, \"d\": \"\\u00bd}\"}, \"e\": 0}";
    let object: Value = serde_json::from_str(json).unwrap();
    for at in (1..=json.len()).filter(|at| json.is_char_boundary(*at)) {
        let whole = whole_parameters(&json[..at]);
        let part: Value = serde_json::from_str(&whole).unwrap_or_else(|e| panic!("{e}: {whole}"));
        assert!(is_part(&part, &object), "{whole}");
    }
    assert_eq!(whole_parameters(json), json);
}

/// Whether `whole` contains all of `part`. Lists and objects of `part` may be shorter.
fn is_part(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => {
            part.iter().all(|(name, value)| whole.get(name).is_some_and(|other| is_part(value, other)))
        }
        (Value::Array(part), Value::Array(whole)) => {
            part.len() <= whole.len() && part.iter().zip(whole).all(|(value, other)| is_part(value, other))
        }
        _ => part == whole,
    }
}

fn ask(more: Value) -> Value {
    with(
        with(chat("Is it warm in Rome?"), json!({"tools": [weather(), roll(), now()], "max_tokens": 1200})),
        more,
    )
}

/// The name and arguments of each call, as text and as JSON, and the finish reason.
fn calls_of(body: &Value) -> (Vec<(String, Value)>, String) {
    let choice = &body["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{body}"));
    assert_eq!(choice["message"]["content"], Value::Null, "{body}");
    let call = |call: &Value| {
        assert!(
            call["id"].as_str().is_some_and(|id| id.starts_with("call_")) && call["type"] == "function",
            "{call}"
        );
        assert!(call.get("index").is_none(), "{call}");
        let function = &call["function"];
        let arguments = function["arguments"].as_str().unwrap_or_else(|| panic!("{body}"));
        let arguments = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
        (function["name"].as_str().unwrap().to_owned(), arguments)
    };
    (calls.iter().map(call).collect(), choice["finish_reason"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_call_has_the_openai_format_with_and_without_streaming() {
    let rome = ("get_weather".to_owned(), json!({"city": "Rome", "unit": "c"}));
    let three = ("roll".to_owned(), json!({"count": 3}));
    let both = format!(
        "[{ROME},\n  {{ \"name\":\"roll\", \"parameters\": {{\"count\": 3}}}}, {{\"name\": \"now\", \"parameters\": {{}}}}]"
    );
    for (text, expected) in [
        (ROME.to_owned(), vec![rome.clone()]),
        (format!(" \n{ROME}"), vec![rome.clone()]),
        (both, vec![rome, three, ("now".to_owned(), json!({}))]),
    ] {
        let app = app_that_says(&text);
        for choice in [json!("auto"), json!("required"), Value::Null] {
            if choice == "required" && text.starts_with(' ') {
                continue; // a required call has no white space before it
            }
            let body = ask(json!({"tool_choice": choice}));
            let (status, whole) = complete(&app, body.clone()).await;
            assert_eq!(status, 200, "{whole}");
            assert_eq!(calls_of(&whole), (expected.clone(), "tool_calls".into()), "{text}");

            let (lines, _) = stream(&app, with(body, json!({"stream": true}))).await;
            let chunks = parse(&lines);
            let (mut calls, mut ids, mut fragments) = (Vec::<(String, String)>::new(), Vec::new(), 0);
            for delta in chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]) {
                assert!(delta["content"].as_str().unwrap_or_default().is_empty(), "{delta}");
                for call in delta["tool_calls"].as_array().into_iter().flatten() {
                    let index = call["index"].as_u64().unwrap() as usize;
                    let arguments = call["function"]["arguments"].as_str().unwrap();
                    if index == calls.len() {
                        assert!(call["type"] == "function" && arguments.is_empty(), "{call}");
                        ids.push(call["id"].as_str().unwrap().to_owned());
                        calls.push((call["function"]["name"].as_str().unwrap().to_owned(), String::new()));
                    } else {
                        assert!(call.get("id").is_none() && call["function"].get("name").is_none(), "{call}");
                        fragments += 1;
                    }
                    calls[index].1.push_str(arguments);
                }
            }
            let calls: Vec<(String, Value)> =
                calls.into_iter().map(|(name, json)| (name, serde_json::from_str(&json).unwrap())).collect();
            assert_eq!(calls, expected);
            assert!(fragments > calls.len(), "arguments must arrive in several chunks");
            ids.sort();
            ids.dedup();
            assert_eq!(ids.len(), calls.len(), "the ids of calls must differ");
            let last = chunks.last().unwrap();
            assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
        }
        assert_all_free(&app.engine).await;
    }
}

/// Several clients read only the first entry of `tool_calls` in a chunk, and ignore the rest of a chunk with a finish
/// reason: `openai` before 3.0, LlamaIndex, Home Assistant.
#[tokio::test]
async fn a_chunk_has_a_part_of_one_call_or_only_the_finish_reason() {
    let args = ["{\"city\": \"Rome\", \"unit\": \"c\"}", "{\"count\": 3}"];
    let both = format!("[{ROME}, {{\"name\": \"roll\", \"parameters\": {}}}]", args[1]);
    let limits = Limits { max_sequences: 2, max_draws: 2, ..limits() };
    // The second request has a stop string that matches all of the text after the beginning of the first call, except
    // its end. So this text is held back until the answer ends.
    let held_back = format!("{}?", &both[both.find("Rome").expect("a city")..]);
    for fields in [json!({}), json!({"stop": held_back}), json!({"logprobs": true, "return_token_ids": true})]
    {
        let script = says(&tokenizer().encode(&both, false).unwrap(), END_OF_TURN);
        let mut scripts = [script, says(&tokenizer().encode("It is.", false).unwrap(), END_OF_TURN)];
        let script: Script = Box::new(move |tokens, draw| scripts[draw.seed as usize - 7](tokens, draw));
        let app = app_with(limits.clone(), OPTIONS, DEFAULTS, script);
        let body = ask(with(fields, json!({"stream": true, "n": 2, "seed": 7})));
        let (lines, _) = stream(&app, body.clone()).await;
        let (mut calls, mut text, mut ends) = (Vec::<(u64, Value, String)>::new(), String::new(), Vec::new());
        let (mut ids, mut scored) = (0, 0);
        for chunk in parse(&lines) {
            let [choice] = chunk["choices"].as_array().expect("a list").as_slice() else { panic!("{chunk}") };
            let delta = &choice["delta"];
            ids += choice["token_ids"].as_array().map_or(0, Vec::len);
            scored += choice["logprobs"]["content"].as_array().map_or(0, Vec::len);
            if !choice["finish_reason"].is_null() {
                assert_eq!(delta, &json!({}), "{chunk}");
                ends.push((choice["index"].clone(), choice["finish_reason"].clone()));
                continue;
            }
            text.push_str(delta["content"].as_str().unwrap_or_default());
            let Some(entries) = delta["tool_calls"].as_array() else { continue };
            assert!(entries.len() == 1 && choice["index"] == 0, "{chunk}");
            let (entry, function) = (&entries[0], &entries[0]["function"]);
            let (index, more) = (entry["index"].as_u64().unwrap(), function["arguments"].as_str().unwrap());
            match calls.last_mut() {
                Some((last, _, arguments)) if *last == index => arguments.push_str(more),
                _ => calls.push((index, function["name"].clone(), more.to_owned())),
            }
        }
        let call = |index: u64, name: &str| (index, json!(name), args[index as usize].to_owned());
        assert_eq!(calls, [call(0, "get_weather"), call(1, "roll")], "{body}");
        ends.sort_by_key(|(index, _)| index.as_u64());
        let wanted = [(json!(0), json!("tool_calls")), (json!(1), json!("stop"))];
        assert_eq!((text.as_str(), ends.as_slice()), ("It is.", wanted.as_slice()), "{body}");
        if body["logprobs"] == true {
            let (_, whole) = complete(&app, with(body, json!({"stream": false}))).await;
            let count = |name: &str| {
                whole["choices"].as_array().unwrap().iter().map(|c| c[name].clone()).collect::<Vec<_>>()
            };
            let told: usize = count("token_ids").iter().map(|ids| ids.as_array().unwrap().len()).sum();
            let judged: usize =
                count("logprobs").iter().map(|found| found["content"].as_array().unwrap().len()).sum();
            assert_eq!((ids, scored), (told, judged), "each token must be reported once");
        }
    }
}

#[tokio::test]
async fn text_without_a_call_stays_text_and_is_unconstrained() {
    for text in ["Yes, it is { warm }.", " \n\nWarm", "It is.", "½", "\"quoted\""] {
        let app = app_that_says(text);
        let (_, body) = complete(&app, ask(json!({}))).await;
        let choice = &body["choices"][0];
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(text), &json!("stop")),
            "{body}"
        );
        assert!(choice["message"].get("tool_calls").is_none(), "{body}");
        let (lines, _) = stream(&app, ask(json!({"stream": true}))).await;
        assert_eq!(content(&parse(&lines)), text);
    }
    // With the choice `none`, a call is text too.
    let app = app_that_says(ROME);
    let (_, body) = complete(&app, ask(json!({"tool_choice": "none"}))).await;
    assert_eq!(body["choices"][0]["message"]["content"], ROME);
    // An answer that begins like a call is forced to be one.
    let app = app_that_says("{warm}");
    let (_, body) = complete(&app, ask(json!({"max_tokens": 300}))).await;
    assert!(["get_weather", "roll", "now"].contains(&calls_of(&body).0[0].0.as_str()), "{body}");
}

#[tokio::test]
async fn a_required_call_is_made_and_matches_its_schema() {
    let app = babbling();
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let (_, body) =
        complete(&app, ask(json!({"tool_choice": named("roll"), "parallel_tool_calls": false}))).await;
    let (calls, reason) = calls_of(&body);
    assert!(calls.len() == 1 && calls[0].0 == "roll" && reason == "tool_calls", "{body}");
    assert!(calls[0].1["count"].as_u64().is_some_and(|n| (1..=9).contains(&n)), "{body}");
    // A function without parameters gets an empty object.
    let (_, body) =
        complete(&app, ask(json!({"tool_choice": named("now"), "parallel_tool_calls": false}))).await;
    assert_eq!(calls_of(&body).0, [("now".to_owned(), json!({}))]);

    let app = babbling();
    let (_, body) = complete(&app, ask(json!({"tool_choice": "required", "max_tokens": 1200}))).await;
    assert!(!calls_of(&body).0.is_empty(), "{body}");
    // Exactly one call is made if parallel calls are disabled.
    let app = app_that_says(&format!("[{ROME}]"));
    let one = json!({"tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 1200});
    let (_, body) = complete(&app, ask(one)).await;
    assert_eq!(calls_of(&body).0.len(), 1, "{body}");
}

#[tokio::test]
async fn each_of_n_answers_calls_or_talks_independently() {
    let limits = Limits { max_sequences: 2, max_draws: 2, ..limits() };
    let mut scripts =
        [ROME, "It is."].map(|text| says(&tokenizer().encode(text, false).unwrap(), END_OF_TURN));
    let script: Script = Box::new(move |tokens, draw| scripts[draw.seed as usize - 7](tokens, draw));
    let app = app_with(limits, OPTIONS, DEFAULTS, script);
    let (status, body) = complete(&app, ask(json!({"n": 2, "seed": 7}))).await;
    assert_eq!(status, 200, "{body}");
    let reasons = [0, 1].map(|i| body["choices"][i]["finish_reason"].clone());
    assert_eq!(reasons, [json!("tool_calls"), json!("stop")], "{body}");
    assert_eq!(body["choices"][1]["message"]["content"], "It is.");
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_truncated_call_reports_why_it_was_cut() {
    let app = app_that_says(ROME);
    let whole = tokenizer().encode(ROME, false).unwrap().len();
    let (_, body) = complete(&app, ask(json!({"max_tokens": whole - 6}))).await;
    let choice = &body["choices"][0];
    let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert_eq!(choice["finish_reason"], "length");
    assert!(arguments.starts_with("{\"city\"") && !arguments.ends_with('}'), "{body}");
    // A call begins only after its name, so before that the answer is text.
    let (_, body) = complete(&app, ask(json!({"max_tokens": 3}))).await;
    let choice = &body["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(choice["finish_reason"] == "length" && ROME.starts_with(text) && !text.is_empty(), "{body}");
    // A stop string ends calls as it ends text.
    let (_, body) = complete(&app, ask(json!({"stop": "Rom"}))).await;
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"");
    // The log probabilities include all generated tokens.
    let (_, body) = complete(&app, ask(json!({"logprobs": true}))).await;
    assert_eq!(body["choices"][0]["logprobs"]["content"].as_array().map(Vec::len), Some(whole));
    calls_of(&body);
}

#[tokio::test]
async fn an_answer_schema_works_together_with_tools() {
    let answer = json!({"type": "object", "properties": {"warm": {"$ref": "#/$defs/b"}}, "required": ["warm"], "additionalProperties": false, "$defs": {"b": {"type": "boolean"}}});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": answer}}});
    for (text, called) in [(ROME, true), ("{\"warm\": true}", false)] {
        let (_, body) = complete(&app_that_says(text), ask(format.clone())).await;
        if called {
            assert_eq!(calls_of(&body).0[0].0, "get_weather");
        } else {
            let text = body["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{body}"));
            let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
            assert!(value["warm"].is_boolean(), "{value}");
        }
    }
    let (_, body) = complete(&babbling(), ask(with(format, json!({"tool_choice": "required"})))).await;
    assert!(!calls_of(&body).0.is_empty(), "{body}");
    let (status, body) = complete(&babbling(), ask(json!({"guided_regex": "a"}))).await;
    assert_eq!((status.as_u16(), &body["error"]["param"]), (400, &json!("guided_regex")), "{body}");
    let (status, _) = complete(&babbling(), ask(json!({"guided_regex": "a", "tool_choice": "none"}))).await;
    assert_eq!(status, 200);
}

/// The prompt that the model gets.
async fn prompt_of(body: Value) -> String {
    prompt_at("/v1/chat/completions", body).await
}

async fn prompt_at(path: &str, body: Value) -> String {
    let (script, seen) = shows_its_prompt("");
    let (status, _, body) = send_json(&app(script).router, post_to(path, body.to_string())).await;
    assert_eq!(status, 200, "{body}");
    tokenizer().decode(&seen.lock().unwrap(), false)
}

/// The prompt of a conversation with a system message, one tool, and two turns of calls.
const TOLD: &str = concat!(
    "<bos><start_of_turn>user\nBe brief.\n\nYou can call these tools:\n",
    "- {\"name\":\"now\",\"parameters\":{\"type\":\"object\",\"properties\":{}}}\n",
    "If a tool is needed, reply only with JSON: {\"name\": NAME, \"parameters\": {...}}, or an array of such objects for several calls. ",
    "Otherwise answer normally.\n\nHi<end_of_turn>\n",
    "<start_of_turn>model\n[{\"name\": \"now\", \"parameters\": {}}, {\"name\": \"roll\", \"parameters\": {\"count\":2}}]<end_of_turn>\n",
    "<start_of_turn>user\nResult of now: 10:00\nResult of roll: 7<end_of_turn>\n",
    "<start_of_turn>model\nSeven.\n\n{\"name\": \"roll\", \"parameters\": {\"count\":1}}<end_of_turn>\n",
    "<start_of_turn>user\nResult of roll:\n\nAnd?<end_of_turn>\n<start_of_turn>model\n",
);

#[tokio::test]
async fn every_wire_format_gives_the_same_prompt() {
    let function = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let chat = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null, "tool_calls": [function("a", "now", "{}"), function("b", "roll", "{\"count\":2}")]},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "7"}]},
        {"role": "tool", "tool_call_id": "a", "content": "10:00"},
        {"role": "assistant", "content": "Seven.", "tool_calls": [function("a", "roll", "{\"count\":1}")]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": "And?"},
    ]);
    let use_of = |id: &str, name: &str, input: Value| json!({"type": "tool_use", "id": id, "name": name, "input": input});
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use_of("a", "now", json!({})), use_of("b", "roll", json!({"count": 2}))]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "7"}]},
            {"type": "tool_result", "tool_use_id": "a", "content": "10:00"},
        ]},
        {"role": "assistant", "content": [{"type": "text", "text": "Seven."}, use_of("a", "roll", json!({"count": 1}))]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}, {"type": "text", "text": "And?"}]},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments});
    let output =
        |id: &str, output: Value| json!({"type": "function_call_output", "call_id": id, "output": output});
    let input = json!([
        {"role": "user", "content": "Hi"},
        call("a", "now", "{}"),
        call("b", "roll", "{\"count\":2}"),
        output("b", json!([{"type": "input_text", "text": "7"}])),
        output("a", json!("10:00")),
        {"role": "assistant", "content": "Seven."},
        call("a", "roll", "{\"count\":1}"),
        output("a", json!("")),
        {"role": "user", "content": "And?"},
    ]);
    let chat = json!({"model": MODEL, "messages": chat, "tools": [now()]});
    let schema = json!({"type": "object", "properties": {}});
    let tools = json!([{"name": "now", "input_schema": schema}]);
    let messages =
        json!({"model": MODEL, "max_tokens": 9, "system": "Be brief.", "messages": messages, "tools": tools});
    let flat = json!([{"type": "function", "name": "now"}]);
    let responses = json!({"model": MODEL, "instructions": "Be brief.", "input": input, "tools": flat});
    for (path, body, alone) in [
        ("/v1/chat/completions", chat, json!({"parallel_tool_calls": false})),
        (
            "/v1/messages",
            messages,
            json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
        ),
        ("/v1/responses", responses, json!({"parallel_tool_calls": false})),
    ] {
        assert_eq!(prompt_at(path, body.clone()).await, TOLD, "{path}");
        let one = TOLD.replace(", or an array of such objects for several calls", "");
        assert_eq!(prompt_at(path, with(body, alone)).await, one, "{path}");
    }
}

#[tokio::test]
async fn results_of_calls_with_the_same_id_are_paired_in_order() {
    let function =
        |name: &str| json!({"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}});
    let result = |text: &str| json!({"role": "tool", "tool_call_id": "a", "content": text});
    let turn = |names: &[&str]| {
        let calls: Vec<Value> = names.iter().map(|name| function(name)).collect();
        json!({"role": "assistant", "tool_calls": calls})
    };
    let user = json!({"role": "user", "content": "Hi"});
    // The same id occurs again in a later turn, where the last call has two results.
    let chat = json!({"model": MODEL, "messages": [user, turn(&["now", "roll"]), result("10:00"), result("7"),
        turn(&["now", "get_weather"]), result("11:00"), result("warm"), result("dry")]});
    let blocks = |role: &str, blocks: Vec<Value>| json!({"role": role, "content": blocks});
    let used = |name: &str| json!({"type": "tool_use", "id": "a", "name": name, "input": {}});
    let gave = |text: &str| json!({"type": "tool_result", "tool_use_id": "a", "content": text});
    let messages = json!({"model": MODEL, "max_tokens": 9, "messages": [user,
        blocks("assistant", vec![used("now"), used("roll")]), blocks("user", vec![gave("10:00"), gave("7")]),
        blocks("assistant", vec![used("now"), used("get_weather")]),
        blocks("user", vec![gave("11:00"), gave("warm"), gave("dry")])]});
    let call = |name: &str| json!({"type": "function_call", "call_id": "a", "name": name, "arguments": "{}"});
    let output = |text: &str| json!({"type": "function_call_output", "call_id": "a", "output": text});
    let responses = json!({"model": MODEL, "input": [user, call("now"), call("roll"), output("10:00"), output("7"),
        call("now"), call("get_weather"), output("11:00"), output("warm"), output("dry")]});
    for (path, body) in
        [("/v1/chat/completions", chat), ("/v1/messages", messages), ("/v1/responses", responses)]
    {
        let told = prompt_at(path, body).await;
        for results in [
            "user\nResult of now: 10:00\nResult of roll: 7<",
            "user\nResult of now: 11:00\nResult of get_weather: warm\nResult of get_weather: dry<",
        ] {
            assert!(told.contains(results), "{path}: {results:?} is not in {told:?}");
        }
    }
}

/// Some clients send no ids, or ids in calls only.
#[tokio::test]
async fn results_without_ids_are_paired_with_the_calls_in_order() {
    let user = json!({"role": "user", "content": "Hi"});
    let result = |text: &str| json!({"role": "tool", "content": text});
    for ids in [[Value::Null, Value::Null], [json!("b"), json!("a")]] {
        let turn = |names: [&str; 2]| {
            let called = |(name, id): (&str, &Value)| {
                with(json!({"function": {"name": name, "arguments": {"n": 1}}}), json!({"id": id}))
            };
            let calls: Vec<Value> = names.into_iter().zip(&ids).map(called).collect();
            json!({"role": "assistant", "content": null, "tool_calls": calls})
        };
        // The last call of the first turn has no result, and none of the later results belongs to it.
        let chat = json!({"model": MODEL, "messages": [user, turn(["now", "roll"]), result("10:00"),
            turn(["get_weather", "now"]), result("warm"), result("11:00")]});
        let told = prompt_at("/v1/chat/completions", chat).await;
        for results in
            ["user\nResult of now: 10:00<", "user\nResult of get_weather: warm\nResult of now: 11:00<"]
        {
            assert!(told.contains(results), "{ids:?}: {results:?} is not in {told:?}");
        }
    }
}

/// Ollama's clients name the tool of a result. They leave out the result of a call that failed, or that they do not know.
#[tokio::test]
async fn results_without_ids_belong_to_the_calls_of_the_tool_that_they_name() {
    let turn = |names: &[&str]| {
        let called = |name: &&str| json!({"function": {"name": name, "arguments": {}}});
        json!({"role": "assistant", "tool_calls": names.iter().map(called).collect::<Vec<_>>()})
    };
    let result = |tool: &str, text: &str| json!({"role": "tool", "content": text, "tool_name": tool});
    let chat = json!({"model": MODEL, "stream": false, "messages": [
        {"role": "user", "content": "Hi"},
        turn(&["now", "roll"]), result("roll", "7"),
        turn(&["now", "roll", "now", "get_weather"]),
        // No call has the name "clock", so its result is that of the first call without one.
        result("roll", "8"), result("now", "10:00"), result("clock", "11:00"), result("get_weather", "warm"),
    ]});
    let told = prompt_at("/api/chat", chat).await;
    for results in [
        "user\nResult of roll: 7<",
        "user\nResult of now: 10:00\nResult of roll: 8\nResult of now: 11:00\nResult of get_weather: warm<",
    ] {
        assert!(told.contains(results), "{results:?} is not in {told:?}");
    }
}

#[tokio::test]
async fn the_prompt_describes_tools_calls_and_results() {
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null, "tool_calls": [call("a", "now", "{}"), call("b", "roll", "{\"count\": 2}")]},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "7"}]},
        {"role": "tool", "tool_call_id": "a", "content": "10:00"},
        {"role": "assistant", "content": "Seven.", "tool_calls": [call("a", "roll", "oops")]},
        {"role": "tool", "tool_call_id": "a", "content": null},
        {"role": "user", "content": "And?"},
    ]);
    let body = json!({"model": MODEL, "messages": messages, "tools": [now()], "max_tokens": 1});
    let told = TOLD.replace("{\"count\":2}", "{\"count\": 2}").replace("{\"count\":1}", "\"oops\"");
    assert_eq!(prompt_of(body.clone()).await, told);
    assert_eq!(
        prompt_of(with(body.clone(), json!({"tool_choice": "required"}))).await,
        told,
        "the prompt must not change, so that it stays cached"
    );
    let alone = prompt_of(with(body.clone(), json!({"parallel_tool_calls": false}))).await;
    assert_eq!(alone, told.replace(", or an array of such objects for several calls", ""));
    let none = prompt_of(with(body, json!({"tool_choice": "none"}))).await;
    assert!(
        none.starts_with("<bos><start_of_turn>user\nBe brief.\n\nHi<end") && none.contains("Result of now"),
        "{none}"
    );
}

#[tokio::test]
async fn allowed_tools_limit_which_tools_are_called() {
    let allowed = |mode: &str, names: &[&str]| {
        let tools: Vec<Value> =
            names.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect();
        json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}})
    };
    assert_eq!(
        prompt_of(ask(allowed("auto", &["roll"]))).await,
        prompt_of(ask(json!({}))).await,
        "the prompt must not change, so that it stays cached"
    );
    let app = app_that_says(ROME);
    let (_, body) = complete(&app, ask(allowed("auto", &["get_weather", "now"]))).await;
    assert_eq!(calls_of(&body).0[0].0, "get_weather");
    for mode in ["auto", "required"] {
        let (_, body) = complete(&app, ask(allowed(mode, &["roll", "now"]))).await;
        assert!(calls_of(&body).0.iter().all(|(name, _)| name != "get_weather"), "{body}");
    }
    let (_, body) = complete(&app_that_says("It is."), ask(allowed("auto", &["roll"]))).await;
    assert_eq!(body["choices"][0]["message"]["content"], "It is.");
}

#[tokio::test]
async fn invalid_tools_are_refused_with_the_field() {
    let app = app_that_says("ok");
    let tools = |tools: Value| json!({"tools": tools});
    let function =
        |function: Value| json!({"tools": [weather(), {"type": "function", "function": function}]});
    let messages = |more: Value| {
        let mut all = vec![json!({"role": "user", "content": "Hi"})];
        all.extend(more.as_array().unwrap().iter().cloned());
        json!({"messages": all})
    };
    let call = json!({"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}});
    let allowed = |tools: Value| json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": tools}});
    let assistant =
        |calls: Value| messages(json!([{"role": "assistant", "content": null, "tool_calls": calls}]));
    for (fields, param, named) in [
        (tools(json!("x")), "tools", "a list"),
        (tools(json!([1])), "tools[0]", "an object"),
        (tools(json!([{"type": "code_interpreter"}])), "tools[0].type", "code_interpreter"),
        (tools(json!([{"type": "function"}])), "tools[0].function", "required"),
        (tools(json!(vec![now(); 129])), "tools", "128"),
        (tools(json!([now(), now()])), "tools[1].function.name", "another tool"),
        (function(json!({})), "tools[1].function.name", "required"),
        (function(json!({"name": ""})), "tools[1].function.name", "1 to 128"),
        (function(json!({"name": "a\nb"})), "tools[1].function.name", "control"),
        (function(json!({"name": "f", "parameters": 1})), "tools[1].function.parameters", "an object"),
        (
            function(json!({"name": "f", "parameters": {"type": "array"}})),
            "tools[1].function.parameters.type",
            "object",
        ),
        (function(json!({"name": "f", "description": 1})), "tools[1].function.description", "a string"),
        (
            function(json!({"name": "f", "strict": true, "parameters": {"type": "object", "not": {}}})),
            "tools[1].function.parameters",
            "\"not\"",
        ),
        (
            function(
                json!({"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}}),
            ),
            "tools[1].function.parameters",
            "\"$ref\" of properties.a: \"#/$defs/x\" is not found",
        ),
        (json!({"tool_choice": "maybe"}), "tool_choice", "maybe"),
        (json!({"tool_choice": 1}), "tool_choice", "an object"),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice.function", "required"),
        (json!({"tool_choice": {"type": "custom"}}), "tool_choice.type", "custom"),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice.function.name",
            "\"x\"",
        ),
        (json!({"tool_choice": "required", "tools": []}), "tool_choice", "no tools"),
        (json!({"tool_choice": {"type": "allowed_tools"}}), "tool_choice.allowed_tools", "required"),
        (allowed(json!({})), "tool_choice.allowed_tools.mode", "required"),
        (allowed(json!({"mode": "none", "tools": []})), "tool_choice.allowed_tools.mode", "auto or required"),
        (allowed(json!({"mode": "auto"})), "tool_choice.allowed_tools.tools", "required"),
        (allowed(json!({"mode": "auto", "tools": []})), "tool_choice.allowed_tools.tools", "1 to 128"),
        (
            allowed(json!({"mode": "auto", "tools": [{"function": {"name": "x"}}]})),
            "tool_choice.allowed_tools.tools[0].function.name",
            "\"x\"",
        ),
        (json!({"parallel_tool_calls": "yes"}), "parallel_tool_calls", "true or false"),
        (json!({"functions": [{"name": "f"}]}), "functions", "tools"),
        (json!({"function_call": {"name": "f"}}), "function_call", "tool_choice"),
        (messages(json!([{"role": "tool", "content": "1"}])), "messages[1].tool_call_id", "has a result"),
        (
            messages(json!([{"role": "tool", "content": "1", "tool_call_id": "a"}])),
            "messages[1].tool_call_id",
            "\"a\"",
        ),
        (
            messages(json!([{"role": "user", "content": "x", "tool_calls": [call]}])),
            "messages[1].tool_calls",
            "assistant",
        ),
        (assistant(json!("x")), "messages[1].tool_calls", "a list"),
        (assistant(json!([1])), "messages[1].tool_calls[0]", "an object"),
        (assistant(json!([{"type": "function"}])), "messages[1].tool_calls[0].function", "required"),
        (assistant(json!([{"id": "a"}])), "messages[1].tool_calls[0].function", "required"),
        (
            assistant(json!([{"id": "a", "function": {}}])),
            "messages[1].tool_calls[0].function.name",
            "required",
        ),
        (
            assistant(json!([{"id": "a", "function": {"name": "f", "arguments": 1}}])),
            "messages[1].tool_calls[0].function.arguments",
            "a string",
        ),
        (
            messages(json!([{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}])),
            "messages[1].function_call",
            "tool_calls",
        ),
    ] {
        let (status, body) = complete(&app, ask(fields.clone())).await;
        let error = &body["error"];
        assert_eq!((status.as_u16(), error["param"].as_str()), (400, Some(param)), "{fields}: {body}");
        assert!(
            error["message"].as_str().is_some_and(|m| m.contains(named) && m.len() < 300),
            "{fields}: {body}"
        );
    }
    // The tool is not strict, so the unenforceable keyword is left to the model.
    let loose =
        json!({"name": "f", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": true}}}});
    assert_eq!(complete(&app, ask(function(loose))).await.0, 200);
}

#[tokio::test]
async fn mutated_tools_and_schemas_never_panic_hang_or_fail_the_server() {
    let seed = 0x7001;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let app = babbling();
    let call = json!({"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}});
    let full = json!({
        "model": MODEL, "max_tokens": 8, "tools": [weather(), roll(), now()], "parallel_tool_calls": true,
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": {
            "type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer", "minimum": 3}}}, "required": ["a"],
        }}},
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "10:00"},
        ],
    });
    let junk = values(json!([
        null, true, -1, 1e308, "", "auto", "required", "none", [], {}, [[]], {"type": "object"},
        "<end_of_turn>", "#", {"$ref": "#"}, "½".repeat(70), "string", {"type": "json_object"},
        [{"type": "function", "function": {"name": "f"}}], call
    ]));
    let parts = [
        "/tools/0/function/parameters",
        "/tools/1/function/parameters",
        "/tools/1/function",
        "/response_format/json_schema/schema",
        "/messages/1/tool_calls/0",
        "/tools",
        "/tool_choice",
    ];
    let mut accepted = 0;
    for i in 0..1500 {
        let mut body = full.clone();
        for _ in 0..rng.random_range(1..3) {
            // An earlier mutation may have removed the field.
            if let Some(part) = body.pointer_mut(parts.choose(&mut rng).unwrap()) {
                replace_somewhere(part, junk.choose(&mut rng).unwrap(), &mut rng);
            }
        }
        let (status, reply) = complete(&app, body.clone()).await;
        assert!(status.as_u16() < 500, "{i}: {status} for {body}: {reply}");
        if status == 200 {
            accepted += 1;
            let message = &reply["choices"][0]["message"];
            assert!(message["content"].is_string() != message["tool_calls"].is_array(), "{body}: {reply}");
        } else {
            assert!(reply["error"]["message"].as_str().is_some_and(|m| !m.contains('\n')), "{body}: {reply}");
        }
    }
    assert!(accepted > 200, "only {accepted} of 1500 were accepted: the mutations are too destructive");
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_call_has_no_text_also_with_one_token_in_each_chunk() {
    let text = "[{\"name\": \"now\", \"parameters\": {}}]";
    let app = app_that_says(text);
    let fields = json!({"tools": [now()], "logprobs": true, "stream": true});
    let (lines, _) = stream(&app, with(chat("Hi"), fields)).await;
    let chunks = parse(&lines);
    let (first, rest) = chunks.split_first().expect("chunks");
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    assert!(rest.iter().all(|chunk| chunk["choices"][0]["delta"].get("content").is_none()), "{rest:?}");
    let tokens = rest.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(tokens.map(Vec::len).sum::<usize>(), tokenizer().encode(text, false).unwrap().len());
}

/// A server that accepts large bodies.
fn app_for_many_tools(text: &str) -> App {
    let script = says(&tokenizer().encode(text, false).unwrap(), END_OF_TURN);
    app_with(limits(), Options { max_body_bytes: 1 << 20, ..OPTIONS }, DEFAULTS, script)
}

/// The number of grammars that a server has compiled.
async fn compiled(app: &App) -> u64 {
    let get = Request::get("/metrics").body(Body::empty()).expect("a valid request");
    let (_, _, text) = send(&app.router, get).await;
    let text = String::from_utf8(text).expect("UTF-8");
    let line = text.lines().find(|line| line.starts_with("unicorn_grammars_compiled_total")).expect(&text);
    line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect(line)
}

/// A function with this many properties, all of them required.
fn wide(name: &str, properties: usize) -> Value {
    let names: Vec<String> = (0..properties).map(|n| format!("property_{n}_of_{name}")).collect();
    let properties: Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!({"type": "string", "description": "x"}))).collect();
    let parameters = json!({"type": "object", "properties": properties, "required": names});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

#[tokio::test]
async fn tools_that_are_too_large_compile_nothing_and_evict_nothing() {
    let app = app_for_many_tools("{\"name\": \"small\", \"parameters\": {}}");
    let small = with(chat("Hi"), json!({"tools": [wide("small", 0)], "tool_choice": "required"}));
    assert_eq!(complete(&app, small.clone()).await.0, 200);
    let before = compiled(&app).await;
    assert_eq!(before, 1);

    // Each of these tools would be accepted alone.
    let many: Vec<Value> = (0..128).map(|n| wide(&format!("tool_{n}"), 30)).collect();
    let body = with(chat("Hi"), json!({"tools": many, "tool_choice": "required"}));
    let (status, error) = complete(&app, body).await;
    assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!("tools")), "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("bytes long"), "{error}");
    assert_eq!(compiled(&app).await, before);

    // A tool that is too large alone is named, and no grammar is compiled for it.
    let mut tools: Vec<Value> = (0..5).map(|n| wide(&format!("tool_{n}"), 3)).collect();
    tools[3] = wide("tool_3", 3500);
    let body = with(chat("Hi"), json!({"tools": tools, "tool_choice": "required"}));
    let (status, error) = complete(&app, body).await;
    assert_eq!(
        (status.as_u16(), &error["error"]["param"]),
        (400, &json!("tools[3].function.parameters")),
        "{error}"
    );
    assert_eq!(compiled(&app).await, before);
    assert_eq!(complete(&app, small).await.0, 200);
    assert_eq!(compiled(&app).await, before, "the small grammar was evicted");
}

#[tokio::test]
async fn an_uncompilable_tool_among_many_is_named_and_no_grammar_is_kept() {
    let app = app_for_many_tools("{\"name\": \"tool_0\", \"parameters\": {}}");
    let mut tools: Vec<Value> = (0..40).map(|n| wide(&format!("tool_{n}"), 1)).collect();
    tools[7]["function"]["parameters"]["properties"]["when"] = json!({"type": "string", "pattern": "("});
    let body = |tools: &[Value]| with(chat("Hi"), json!({"tools": tools, "tool_choice": "required"}));
    let (status, error) = complete(&app, body(&tools)).await;
    assert_eq!(
        (status.as_u16(), &error["error"]["param"]),
        (400, &json!("tools[7].function.parameters")),
        "{error}"
    );
    let after = compiled(&app).await;
    assert_eq!(complete(&app, body(&tools[..1])).await.0, 200);
    assert_eq!(compiled(&app).await, after + 1, "a grammar of the failed request was cached");
}
