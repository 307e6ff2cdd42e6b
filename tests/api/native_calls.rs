//! Tool calls in the syntax of each family: the prompt, the calls of an answer in every wire format, and that no syntax
//! leaks into the text.

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::engine::{Event, FinishReason, Restriction, Timings};
use unicorn::session::{Delta, GenerateRequest, Prepared, Reason, Service, Tool, ToolChoice, Tools};
use unicorn::text::{
    AnswerPiece, AnswerReader, CallFormat, CallPiece, CallReader, CallSyntax, Message, PromptEnding,
    TemplateInput, ThoughtStart, ThoughtTokens,
};

use crate::support::app::{App, FamilyText, recorded};
use crate::support::fake_runner::{Script, says};
use crate::support::http::{chat, complete, content, events_of, parse, post_to, send_json, stream};
use crate::support::json::with;
use crate::support::skip;
use crate::support::tokenizers::{Rendered, TemplateGoldens, cases};
use crate::support::tools::{now, roll, weather};

/// The families whose files are in the tree, and the names of their syntaxes.
const FAMILIES: [(&str, &str); 3] = [("qwen", "hermes"), ("qwen35", "qwen3_coder"), ("gemma4", "gemma4")];

/// The families whose calls have control tokens, by the names of their syntaxes.
fn families() -> Vec<(String, FamilyText)> {
    let own = FAMILIES.map(|(name, syntax)| (syntax.to_owned(), FamilyText::new(name)));
    own.into_iter().chain(mistrals()).collect()
}

/// Mistral's two syntaxes, with templates of llama.cpp's tree.
fn mistrals() -> Vec<(String, FamilyText)> {
    let names = ["mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"];
    let goldens = TemplateGoldens::read();
    let wanted = goldens.templates.iter().filter(|golden| names.contains(&golden.name.as_str()));
    let found: Vec<(String, FamilyText)> = wanted
        .filter_map(|golden| Some((golden.syntax.clone(), FamilyText::of_llama_cpp(golden)?)))
        .collect();
    if found.len() < names.len() {
        skip("llama-cpp-files");
    }
    found
}

/// A tool that gets a text, a number, a list and a truth value.
fn note() -> Value {
    json!({"type": "function", "function": {"name": "note", "description": "Keep a note", "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}}, "is_new": {"type": "boolean"},
        },
        "required": ["text"],
    }}})
}

/// The format of a family's calls.
fn format(family: &FamilyText) -> CallFormat {
    CallFormat::of(&family.template(), &family.tokenizer)
}

/// A call of `note` with a text and a number, as a model of the family writes it.
fn call(family: &FamilyText, text: &str, count: u32) -> Vec<u32> {
    call_of(family, "note", json!({"text": text, "count": count}))
}

/// A call as a model of the family writes it, with its control tokens. The arguments are texts and numbers.
fn call_of(family: &FamilyText, name: &str, arguments: Value) -> Vec<u32> {
    let id = |token: &str| vec![family.tokenizer.token_id(token).expect("a token of the family")];
    let plain = |text: &str| family.plain(text);
    let members = arguments.as_object().expect("an object");
    match format(family).syntax.name {
        "hermes" => {
            let body = format!("\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n");
            [id("<tool_call>"), plain(&body), id("</tool_call>")].concat()
        }
        "qwen3_coder" => {
            let tag = |(key, value): (&String, &Value)| {
                let value = value.as_str().map_or(value.to_string(), str::to_owned);
                format!("<parameter={key}>\n{value}\n</parameter>\n")
            };
            let tags: String = members.iter().map(tag).collect();
            let body = format!("\n<function={name}>\n{tags}</function>\n");
            [id("<tool_call>"), plain(&body), id("</tool_call>")].concat()
        }
        "gemma4" => {
            let mut keys: Vec<&String> = members.keys().collect();
            keys.sort();
            let mut ids = [id("<|tool_call>"), plain(&format!("call:{name}{{"))].concat();
            for (i, key) in keys.into_iter().enumerate() {
                ids.extend(plain(&format!("{}{key}:", if i > 0 { "," } else { "" })));
                match members[key].as_str() {
                    Some(text) => ids.extend([id("<|\"|>"), plain(text), id("<|\"|>")].concat()),
                    None => ids.extend(plain(&members[key].to_string())),
                }
            }
            [ids, plain("}"), id("<tool_call|>")].concat()
        }
        "mistral" => {
            let body = format!("[{{\"name\": \"{name}\", \"arguments\": {arguments}}}]");
            [id("[TOOL_CALLS]"), plain(&body)].concat()
        }
        "mistral_args" => {
            let arguments = plain(&arguments.to_string());
            let call_id = [id("[CALL_ID]"), plain("a1B2c3D4e")].concat();
            [id("[TOOL_CALLS]"), plain(name), call_id, id("[ARGS]"), arguments].concat()
        }
        other => panic!("no calls of {other}"),
    }
}

/// A chat that offers tools.
fn ask(more: Value) -> Value {
    let tools = json!([note(), now(), weather(), roll()]);
    with(with(chat("Hi"), json!({"tools": tools, "max_tokens": 900, "reasoning_effort": "none"})), more)
}

/// The name and the arguments of each call of a message.
fn calls_of(message: &Value) -> Vec<(String, Value)> {
    let call = |call: &Value| {
        let arguments = call["function"]["arguments"].as_str().expect("a text");
        let arguments = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
        (call["function"]["name"].as_str().expect("a name").to_owned(), arguments)
    };
    message["tool_calls"].as_array().unwrap_or_else(|| panic!("{message}")).iter().map(call).collect()
}

/// Texts that look like syntax, and are not.
const TRICKY: &str = "½ \"}\n</parameter> <tool_call|> {\\ </tool_call>";

#[tokio::test]
async fn calls_of_each_syntax_arrive_in_every_wire_format() {
    for (name, family) in families() {
        // In a syntax of tags, a text cannot have the tag that ends it on a line of its own.
        let text = if name == "qwen3_coder" { TRICKY.replace('\n', " ") } else { TRICKY.to_owned() };
        let said = family.plain("I <tool_call> look.\n");
        // Where a call has a token at its end, white space may follow.
        let has_end = format(&family).tokens.is_some_and(|tokens| tokens.close.is_some());
        let between = if has_end { family.plain("\n") } else { Vec::new() };
        let ids = [said, call(&family, &text, 7), between, call(&family, "b", 12)].concat();
        let app = family.app(says(&ids, family.end()));
        let expected = [
            ("note".to_owned(), json!({"text": text, "count": 7})),
            ("note".to_owned(), json!({"text": "b", "count": 12})),
        ];
        let (status, whole) = complete(&app, ask(json!({}))).await;
        assert_eq!(status, 200, "{whole}");
        let choice = &whole["choices"][0];
        assert_eq!(calls_of(&choice["message"]), expected, "{name}");
        assert_eq!(choice["message"]["content"], "I <tool_call> look.", "{name}");
        assert_eq!(choice["finish_reason"], "tool_calls", "{name}");

        let (lines, _) = stream(&app, ask(json!({"stream": true}))).await;
        let chunks = parse(&lines);
        assert_eq!(content(&chunks), "I <tool_call> look.", "{name}");
        let (mut calls, mut pieces) = (Vec::<(String, String)>::new(), 0);
        for entry in chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()) {
            let [entry] = entry.as_slice() else { panic!("{entry:?}") };
            let (index, function) = (entry["index"].as_u64().expect("an index") as usize, &entry["function"]);
            if index == calls.len() {
                calls.push((function["name"].as_str().expect("a name first").to_owned(), String::new()));
            }
            calls[index].1.push_str(function["arguments"].as_str().expect("a text"));
            pieces += 1;
        }
        assert!(pieces > 8, "{name}: arguments come in {pieces} pieces");
        let calls: Vec<(String, Value)> = calls
            .into_iter()
            .map(|(name, json)| (name, serde_json::from_str(&json).expect("JSON")))
            .collect();
        assert_eq!(calls, expected, "{name}");

        let function = note()["function"].clone();
        let tool =
            json!({"name": "note", "input_schema": function["parameters"], "description": "Keep a note"});
        let asked = json!({
            "model": "", "max_tokens": 900, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool],
            "thinking": {"type": "disabled"},
        });
        let (_, _, message) = send_json(&app.router, post_to("/v1/messages", asked.to_string())).await;
        let blocks = message["content"].as_array().unwrap_or_else(|| panic!("{message}"));
        assert_eq!(blocks[0]["text"], "I <tool_call> look.", "{name}");
        assert_eq!(blocks[1]["input"], expected[0].1, "{name}");
        assert_eq!((&message["stop_reason"], blocks.len()), (&json!("tool_use"), 3), "{name}");

        let tool = with(function, json!({"type": "function"}));
        let asked = json!({
            "model": "", "input": "Hi", "tools": [tool], "stream": true, "max_output_tokens": 900,
            "reasoning": {"effort": "none"},
        });
        let events = events_of(&app, "/v1/responses", asked).await;
        let output = &events.last().expect("an end")["response"]["output"];
        assert_eq!(output[0]["content"][0]["text"], "I <tool_call> look.", "{name}: {output}");
        let arguments = output[1]["arguments"].as_str().expect("a text");
        assert_eq!(serde_json::from_str::<Value>(arguments).expect("JSON"), expected[0].1, "{name}");
    }
}

#[tokio::test]
async fn the_template_writes_the_tools_and_the_calls_of_a_history() {
    for (name, family) in families() {
        let (script, seen) = recorded(says(&family.plain("Yes."), family.end()));
        let app = family.app(script);
        let made = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "note", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": null, "tool_calls": [
                made("x1", json!("{\"text\": \"a <tool_call> b\"}")), made("x2", json!({"text": "c", "count": 3})),
            ]},
            {"role": "tool", "tool_call_id": "x2", "content": "second"},
            {"role": "tool", "tool_call_id": "x1", "content": [{"type": "text", "text": "first"}]},
        ]);
        let (status, body) = complete(&app, with(ask(json!({})), json!({"messages": messages}))).await;
        assert_eq!(
            (status.as_u16(), &body["choices"][0]["message"]["content"]),
            (200, &json!("Yes.")),
            "{body}"
        );
        let ids = seen.lock().expect("no panic").clone();
        let prompt = family.tokenizer.decode(&ids, false);
        let parts: &[&str] = match name.as_str() {
            "hermes" => &[
                "<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"note\", \"description\": \"Keep a note\"",
                "<tool_call>\n{\"name\": \"note\", \"arguments\": {\"text\": \"a <tool_call> b\"}}\n</tool_call>",
                "{\"text\": \"c\", \"count\": 3}",
                "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>",
            ],
            "qwen3_coder" => &[
                "<tools>\n{\"type\": \"function\"",
                "<parameter=text>\na <tool_call> b\n</parameter>",
                "<parameter=count>\n3\n</parameter>",
                "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>",
            ],
            "mistral" => &[
                "[AVAILABLE_TOOLS][{\"type\": \"function\", \"function\": {\"name\": \"note\"",
                "[TOOL_CALLS][{\"name\": \"note\", \"arguments\": {\"text\": \"a <tool_call> b\"}",
                "{\"name\": \"note\", \"arguments\": {\"text\": \"c\", \"count\": 3}",
                "[TOOL_RESULTS]{\"content\": first",
                "[TOOL_RESULTS]{\"content\": second",
            ],
            "mistral_args" => &[
                "[AVAILABLE_TOOLS][{\"type\": \"function\", \"function\": {\"name\": \"note\"",
                "[TOOL_CALLS]note[CALL_ID]",
                "[ARGS]{\"text\": \"a <tool_call> b\"}[TOOL_CALLS]note[CALL_ID]",
                "[ARGS]{\"text\": \"c\", \"count\": 3}</s>",
                "[TOOL_CONTENT]first[/TOOL_RESULTS]",
                "[TOOL_CONTENT]second[/TOOL_RESULTS]",
            ],
            _ => &[
                "<|tool>declaration:note{description:<|\"|>Keep a note<|\"|>",
                "<|tool_call>call:note{text:<|\"|>a <tool_call> b<|\"|>}<tool_call|>",
                "{count:3,text:<|\"|>c<|\"|>}",
                "{value:<|\"|>first<|\"|>}<tool_response|><|tool_response>response:note{value:<|\"|>second<|\"|>}",
            ],
        };
        let mut rest = prompt.as_str();
        for part in parts {
            let at = rest.find(part).unwrap_or_else(|| panic!("{name}: {part:?} is not in {rest:?}"));
            rest = &rest[at + part.len()..];
        }
        // Of the names of control tokens, only those that the template wrote are control tokens.
        let open = format(&family).tokens.expect("a syntax with tokens").open;
        let opened = ids.iter().filter(|id| **id == open).count();
        // Qwen's instructions name the tokens.
        let named = prompt.split_once("</tools>").map_or(0, |(_, text)| {
            text.split("<|im_end|>").next().unwrap_or_default().matches("<tool_call>").count()
        });
        // Mistral's older models have both calls in one list.
        assert_eq!(opened, if name == "mistral" { 1 } else { 2 } + named, "{name}: {prompt}");
    }
}

#[tokio::test]
async fn choices_hold_for_calls_between_control_tokens() {
    for (name, family) in families() {
        let mut rng = ChaCha8Rng::seed_from_u64(0xbab);
        let rows = family.tokenizer.vocab_size() as u32;
        let (open, end) = (format(&family).tokens.expect("tokens").open, family.end());
        // The model wants to call in every second answer.
        let app = family.app(Box::new(move |_, _| match rng.random_range(0..6) {
            0 => open,
            1 => end,
            _ => rng.random_range(0..rows),
        }));
        let named = json!({"type": "function", "function": {"name": "now"}});
        for round in 0..6 {
            let asked = json!({"tool_choice": named, "parallel_tool_calls": false, "max_tokens": 200});
            let (_, body) = complete(&app, ask(asked)).await;
            let choice = &body["choices"][0];
            assert_eq!(
                calls_of(&choice["message"]),
                [("now".to_owned(), json!({}))],
                "{name} {round}: {body}"
            );
            assert_eq!(choice["finish_reason"], "tool_calls");
            assert!(choice["message"]["content"].is_null(), "{body}");
            let (_, body) = complete(&app, ask(json!({"tool_choice": "none", "max_tokens": 60}))).await;
            assert!(body["choices"][0]["message"].get("tool_calls").is_none(), "{name}: {body}");
            let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
            let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": true}});
            let (_, body) = complete(&app, ask(json!({"response_format": format, "max_tokens": 300}))).await;
            let message = &body["choices"][0]["message"];
            match message["content"].as_str() {
                _ if body["choices"][0]["finish_reason"] == "length" => {}
                Some(text) => {
                    let value: Value =
                        serde_json::from_str(text).unwrap_or_else(|e| panic!("{name}: {e}: {text}"));
                    assert!(value["a"].is_boolean(), "{name}: {text}");
                }
                None => assert!(!calls_of(message).is_empty(), "{name}: {body}"),
            }
        }
    }
}

fn tools(choice: ToolChoice, parallel: bool) -> Tools {
    let tool = |definition: &Value| Tool {
        name: definition["function"]["name"].as_str().expect("a name").to_owned(),
        description: None,
        parameters: definition["function"]
            .get("parameters")
            .cloned()
            .unwrap_or(json!({"type": "object", "properties": {}})),
        strict: false,
        param: "tools".to_owned(),
    };
    Tools { list: [note(), now()].iter().map(tool).collect(), choice, only: None, parallel }
}

/// An answer, and what the reader made of it.
struct Babble {
    ids: Vec<u32>,
    deltas: Vec<Delta>,
    reason: Reason,
}

/// An answer of random ids, many of which are control tokens. The ids obey the masks of the request, as in the engine.
fn babble(
    service: &Service,
    request: &GenerateRequest,
    special: &[u32],
    calls: &[Vec<u32>],
    rng: &mut ChaCha8Rng,
) -> Babble {
    let (engine, mut answer) = service.prepare(request).and_then(Prepared::decoded).expect("a sound request");
    let mut mask = engine.mask;
    let rows = service.engine().limits().vocab_size as u32;
    let stops = &engine.sampling.stop_token_ids;
    let is_biased =
        |id: u32| engine.sampling.logit_bias.iter().any(|(other, bias)| *other == id && *bias < -1e30);
    let (mut ids, mut deltas, mut planned) = (Vec::new(), Vec::new(), Vec::<u32>::new());
    let most = rng.random_range(1..120);
    loop {
        if ids.len() == most {
            let event = Event::Finished {
                choice: 0,
                reason: FinishReason::Length,
                stop: None,
                timings: Timings::default(),
            };
            deltas.push(answer.push(event).expect("no failure"));
            break;
        }
        let words = match mask.as_mut().map(|mask| mask.restriction(&ids)) {
            Some(Restriction::Binding) => mask.as_mut().map(|mask| mask.mask(&ids)),
            _ => None,
        };
        let allowed = |id: u32| {
            id < rows
                && !is_biased(id)
                && words.as_ref().is_none_or(|words| words[id as usize / 32] >> (id % 32) & 1 == 1)
        };
        if planned.is_empty() && rng.random_bool(0.05) {
            planned = calls.choose(rng).expect("a call").iter().rev().copied().collect();
        }
        let wish = planned.pop().filter(|id| allowed(*id)).or_else(|| {
            planned.clear();
            special.choose(rng).copied().filter(|id| allowed(*id) && rng.random_bool(0.4))
        });
        let id = wish.unwrap_or_else(|| {
            let from = rng.random_range(0..rows);
            (from..rows).chain(0..from).find(|id| allowed(*id)).expect("an id is allowed")
        });
        ids.push(id);
        if stops.contains(&id) {
            let event = Event::Finished {
                choice: 0,
                reason: FinishReason::Stop(id),
                stop: None,
                timings: Timings::default(),
            };
            deltas.push(answer.push(event).expect("no failure"));
            break;
        }
        let event = Event::Token { choice: 0, id, logprobs: None, timings: Timings::default() };
        deltas.push(answer.push(event).expect("no failure"));
    }
    let reason = deltas.last().and_then(|delta| delta.end).expect("an end");
    Babble { ids, deltas, reason }
}

/// The thoughts and the text of an answer, found in another way: the ids are cut at the control tokens.
fn cut(family: &FamilyText, format: &CallFormat, ids: &[u32], is_inside: bool) -> (String, String) {
    let thought = family.tokenizer.thought_tokens();
    let is_token = |id: u32, name: fn(&ThoughtTokens) -> u32| thought.as_ref().is_some_and(|t| name(t) == id);
    let tokens = format.tokens.as_ref().expect("a syntax with tokens");
    let control: Vec<u32> = CONTROL.iter().filter_map(|name| family.tokenizer.token_id(name)).collect();
    let (mut thoughts, mut text, mut run) = (String::new(), String::new(), Vec::new());
    let (mut in_thought, mut in_call) = (is_inside, false);
    let header = if format.syntax.name == "gemma4" { "thought\n" } else { "" };
    let mut add = |run: &mut Vec<u32>, in_thought: bool, in_call: bool| {
        let decoded = family.tokenizer.decode(&std::mem::take(run), true);
        match (in_call, in_thought) {
            (true, _) => {}
            // The header of a thought is syntax, and so is its beginning.
            (false, true) if header.starts_with(&decoded) => {}
            (false, true) => thoughts.push_str(decoded.strip_prefix(header).unwrap_or(&decoded)),
            (false, false) => text.push_str(&decoded),
        }
    };
    for id in ids.iter().copied() {
        if !control.contains(&id) {
            run.push(id);
            continue;
        }
        // A control token in the wrong place does not interrupt the characters around it.
        let (opens, closes) = (id == tokens.open && !in_call, in_call && Some(id) == tokens.close);
        let begins = !in_call && !in_thought && is_token(id, |tokens| tokens.open);
        let ends = !in_call && in_thought && is_token(id, |tokens| tokens.close);
        if opens || closes || begins || ends {
            add(&mut run, in_thought, in_call);
            (in_thought, in_call) = (begins, opens);
        }
    }
    add(&mut run, in_thought, in_call);
    (thoughts, text)
}

/// All control tokens of the families' thoughts and calls.
const CONTROL: [&str; 21] = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<|tool>",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
];

fn dense(text: &str) -> String {
    text.split_whitespace().collect()
}

#[test]
fn no_syntax_leaks_and_no_byte_is_lost() {
    let seed = 0x1eaf;
    println!("seed {seed}");
    for (name, family) in families() {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (service, format) = (family.service(says(&[], family.end())), format(&family));
        let special: Vec<u32> = CONTROL
            .iter()
            .filter_map(|token| family.tokenizer.token_id(token))
            .chain([family.end()])
            .collect();
        let calls = [call(&family, TRICKY, 3), call(&family, "b", 4)];
        let (mut complete, mut cut_off, mut mixed) = (0, 0, 0);
        for round in 0..2000 {
            let choice = *[ToolChoice::Auto, ToolChoice::Auto, ToolChoice::Required, ToolChoice::None]
                .choose(&mut rng)
                .expect("a choice");
            let mut request = GenerateRequest {
                messages: vec![Message::new("user", "Hi")],
                tools: tools(choice, rng.random()),
                ..GenerateRequest::default()
            };
            request.thinking.enabled = [None, Some(true), Some(false)].choose(&mut rng).copied().flatten();
            request.thinking.budget = rng.random_bool(0.2).then_some(5);
            let prompt = service.conversation(&request).expect("a prompt");
            let start = family.tokenizer.thought_tokens().map(|tokens| tokens.start_after(&prompt));
            let is_inside = start == Some(ThoughtStart::Inside);
            let Babble { ids, deltas, reason } = babble(&service, &request, &special, &calls, &mut rng);
            let what = format!("{name} {round}: {choice:?}, {:?}", family.tokenizer.decode(&ids, false));

            let mut sum = Delta::default();
            deltas.into_iter().for_each(|delta| sum.append(delta));
            let spoken: Vec<u32> = ids.iter().copied().filter(|id| *id != family.end()).collect();
            let (thought, text) = cut(&family, &format, &spoken, is_inside);
            let read = dense(&sum.thought);
            assert_eq!(read, dense(&thought), "{what}");
            assert_eq!(dense(&sum.text), dense(&text), "{what}");

            let mut arguments = Vec::<(String, String)>::new();
            for piece in sum.calls {
                match piece {
                    CallPiece::Name { index, name } => {
                        assert_eq!(index, arguments.len(), "{what}");
                        arguments.push((name, String::new()));
                    }
                    CallPiece::Parameters { index, json } => {
                        assert!(index + 1 == arguments.len() && !json.is_empty(), "{what}");
                        arguments[index].1.push_str(&json);
                    }
                }
            }
            let count = arguments.len();
            for (i, (called, json)) in arguments.into_iter().enumerate() {
                assert!(["note", "now"].contains(&called.as_str()), "{what}");
                match serde_json::from_str::<Value>(&json) {
                    Ok(value) => {
                        assert!(value.is_object(), "{what}: {json}");
                        complete += 1;
                    }
                    Err(error) => {
                        assert!(i + 1 == count && reason == Reason::Length, "{what}: {json}: {error}");
                        cut_off += 1;
                    }
                }
            }
            match choice {
                ToolChoice::None => assert_eq!(count, 0, "{what}"),
                _ if reason == Reason::Called => assert!(count > 0, "{what}"),
                ToolChoice::Required => assert_eq!(reason, Reason::Length, "{what}"),
                ToolChoice::Auto => assert!(count == 0 || reason == Reason::Length, "{what}: {reason:?}"),
            }
            mixed += usize::from(count > 0 && !read.is_empty());
        }
        println!(
            "{name}: {complete} complete calls, {cut_off} cut off, {mixed} answers with thoughts and calls"
        );
        let thinks = family.tokenizer.thought_tokens().is_some();
        assert!(complete > 300 && cut_off > 100, "{name}: {complete}, {cut_off}");
        assert!(mixed > 50 || !thinks, "{name}: {mixed}");
    }
}

/// A script that says the same ids after the same text, half of which are control tokens.
fn hashed(family: &FamilyText) -> Script {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let special: Vec<u32> = CONTROL.iter().filter_map(|token| family.tokenizer.token_id(token)).collect();
    let (rows, end) = (family.tokenizer.vocab_size() as u64, family.end());
    Box::new(move |tokens, _| {
        let mut hasher = DefaultHasher::new();
        tokens.hash(&mut hasher);
        let hash = hasher.finish();
        match hash % 16 {
            0..6 => special[(hash / 16) as usize % special.len()],
            6 => end,
            _ => (hash / 16 % rows) as u32,
        }
    })
}

/// A message without the ids of its calls.
fn without_ids(message: &Value) -> (Value, Value, Vec<Value>) {
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let functions = calls.iter().map(|call| call["function"].clone()).collect();
    (message["content"].clone(), message["reasoning"].clone(), functions)
}

async fn streamed(app: &App, body: Value) -> (Value, Value, Vec<Value>) {
    let (lines, _) = stream(app, with(body, json!({"stream": true}))).await;
    let (mut content, mut reasoning, mut functions) = (String::new(), String::new(), Vec::<Value>::new());
    for chunk in parse(&lines) {
        let delta = &chunk["choices"][0]["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning"].as_str().unwrap_or_default());
        for entry in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = entry["index"].as_u64().expect("an index") as usize;
            if index == functions.len() {
                functions.push(json!({"name": entry["function"]["name"], "arguments": ""}));
            }
            let more = entry["function"]["arguments"].as_str().expect("a text");
            let arguments = functions[index]["arguments"].as_str().expect("a text").to_owned() + more;
            functions[index]["arguments"] = arguments.into();
        }
    }
    let or_null = |text: String| if text.is_empty() { Value::Null } else { text.into() };
    (or_null(content), or_null(reasoning), functions)
}

#[tokio::test]
async fn streams_have_the_bytes_of_whole_answers() {
    for (name, family) in families() {
        let app = family.app(hashed(&family));
        for round in 0..60 {
            let choice = ["auto", "required"][round % 2];
            let more = json!({"tool_choice": choice, "max_tokens": 10 + 2 * round, "tools": [note(), now()]});
            let body = with(chat(&format!("Round {round}")), more);
            let (status, whole) = complete(&app, body.clone()).await;
            assert_eq!(status, 200, "{whole}");
            let (mut content, reasoning, functions) = without_ids(&whole["choices"][0]["message"]);
            if content == "" {
                content = Value::Null;
            }
            assert_eq!(
                streamed(&app, body).await,
                (content, reasoning, functions),
                "{name} {round}: {whole}"
            );
        }
    }
}

/// Checks that the calls of a message are read from what the template writes for them.
fn read_back(family: &FamilyText, tools: &[Value], message: &Message, what: &str) {
    let (template, format, kwargs) = (family.template(), format(family), Default::default());
    let conversation = [Message::new("user", "Hi"), message.clone()];
    let input = TemplateInput { tools, ..TemplateInput::new(&conversation, PromptEnding::Closed, &kwargs) };
    let prompt = template.prompt(&family.tokenizer, &input).unwrap_or_else(|e| panic!("{what}: {e}"));
    let ids = prompt.ids(&family.tokenizer).expect("ids");
    let schema = |name: &str| {
        let tool = tools.iter().find(|tool| tool["function"]["name"] == name);
        tool.map_or(json!({"type": "object"}), |tool| tool["function"]["parameters"].clone())
    };
    let names = message.tool_calls.iter().map(|call| call.function.name.clone());
    let schemas: Vec<(String, Value)> = names.map(|name| (name.clone(), schema(&name))).collect();
    let pieces: Vec<CallPiece> = match &format.tokens {
        Some(tokens) => {
            // Before the calls, the template writes the names of tokens in its instructions.
            let user = family.plain("Hi");
            let turn = ids.windows(user.len()).rposition(|window| window == user).expect("the user's text");
            let first = turn + ids[turn..].iter().position(|id| *id == tokens.open).expect("a call");
            let mut reader = AnswerReader::new(family.tokenizer.detokenizer(true))
                .with_calls(&format, schemas.iter().map(|(name, schema)| (name.as_str(), schema)));
            let rest = ids[first..].iter().take_while(|id| **id != family.end());
            let mut pieces: Vec<CallPiece> = rest.flat_map(|id| reader.push(*id).calls).collect();
            pieces.extend(reader.finish().calls);
            assert!(reader.called(), "{what}");
            pieces
        }
        None => {
            // The answer is the last turn, and consists of the call.
            let header = family.tokenizer.token_id("<|end_header_id|>").expect("Llama's vocabulary");
            let turn = ids.iter().rposition(|id| *id == header).expect("a turn") + 1;
            let text = family.tokenizer.decode(&ids[turn..], true);
            let mut reader = CallReader::new(schemas.iter().map(|(name, _)| name.clone()).collect());
            let (text, pieces) = AnswerPiece::divide(reader.push(&text));
            assert!(reader.called() && text.is_empty(), "{what}: {text}");
            pieces
        }
    };
    let mut read = Vec::<(String, String)>::new();
    for piece in pieces {
        match piece {
            CallPiece::Name { name, .. } => read.push((name, String::new())),
            CallPiece::Parameters { index, json } => read[index].1.push_str(&json),
        }
    }
    let parsed = |json: &str| serde_json::from_str(json).unwrap_or_else(|e| panic!("{what}: {e}: {json}"));
    let read: Vec<(String, Value)> = read.into_iter().map(|(name, json)| (name, parsed(&json))).collect();
    let calls = message.tool_calls.iter().map(|call| call.function.clone());
    let written: Vec<(String, Value)> = calls.map(|function| (function.name, function.arguments)).collect();
    assert_eq!(read, written, "{what}");
}

#[test]
fn calls_that_a_template_writes_are_read_back() {
    #[derive(serde::Deserialize)]
    struct Case {
        note: String,
        messages: Value,
        #[serde(default)]
        tools: Vec<Value>,
    }
    for (name, folder) in
        [("qwen", "qwen-tokenizer"), ("qwen35", "qwen35-template"), ("gemma4", "gemma4-tokenizer")]
    {
        let family = FamilyText::new(name);
        let mut calls = 0;
        for case in cases::<Case>(&format!("families/{folder}/chat_cases.json"), 10) {
            let messages: Vec<Value> = case.messages.as_array().expect("a list").clone();
            let filled = messages.into_iter().map(|message| {
                let is_null = message.get("content").is_none_or(Value::is_null);
                if is_null { with(message, json!({"content": ""})) } else { message }
            });
            let Ok(messages) = serde_json::from_value::<Vec<Message>>(filled.collect()) else { continue };
            for message in messages.iter().filter(|message| !message.tool_calls.is_empty()) {
                // A text in place of the arguments is not a call that a model writes.
                if message.tool_calls.iter().any(|call| !call.function.arguments.is_object()) {
                    continue;
                }
                read_back(&family, &case.tools, message, &format!("{name}: {}", case.note));
                calls += message.tool_calls.len();
            }
        }
        println!("{name}: {calls} calls");
        assert!(calls >= 4, "{name}: {calls} calls");
    }
}

#[test]
fn calls_that_templates_of_llama_cpp_write_are_read_back() {
    let TemplateGoldens { cases, templates, .. } = TemplateGoldens::read();
    for golden in &templates {
        let Some(family) = FamilyText::of_llama_cpp(golden) else { return skip("llama-cpp-files") };
        let mut calls = 0;
        for (case, result) in cases.iter().zip(&golden.results) {
            if !matches!(result, Some(Rendered::Rendered(_))) || case.tools.is_empty() {
                continue;
            }
            for message in case.messages.iter().filter(|message| !message.tool_calls.is_empty()) {
                read_back(&family, &case.tools, message, &format!("{}: {}", golden.name, case.note));
                calls += message.tool_calls.len();
            }
        }
        println!("{}: {calls} calls", golden.name);
        assert!(calls >= 7, "{}: {calls} calls", golden.name);
    }
}

/// Llama 3 may write `<|python_tag|>` before a call. The call is held to the schema nevertheless.
#[tokio::test]
async fn a_control_token_before_a_call_without_its_own_does_not_free_it() {
    let goldens = TemplateGoldens::read();
    let golden = goldens.templates.iter().find(|golden| golden.syntax == "llama3_json").expect("Llama 3");
    let Some(family) = FamilyText::of_llama_cpp(golden) else { return skip("llama-cpp-files") };
    let tag = family.tokenizer.token_id("<|python_tag|>").expect("a token of Llama 3");
    let wrong = "{\"name\": \"get_weather\", \"parameters\": {\"city\": 7, \"other\": 1}}";
    for before in [vec![tag], Vec::new(), [vec![tag], family.plain("\n")].concat()] {
        let ids = [before.clone(), family.plain(wrong)].concat();
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let (rows, end) = (family.tokenizer.vocab_size() as u32, family.end());
        let mut said = 0;
        // After the beginning of the call, the model says anything, so that the masks decide.
        let app = family.app(Box::new(move |_, _| {
            said += 1;
            match ids.get(said - 1) {
                Some(id) if said < ids.len() - 12 => *id,
                _ if rng.random_bool(0.1) => end,
                _ => rng.random_range(0..rows),
            }
        }));
        let (status, body) = complete(&app, ask(json!({"max_tokens": 700}))).await;
        assert_eq!(status, 200, "{body}");
        let choice = &body["choices"][0];
        let call = &choice["message"]["tool_calls"][0]["function"];
        // The schema bounds the arguments, so the call ends.
        assert_eq!((&call["name"], &choice["finish_reason"]), (&json!("get_weather"), &json!("tool_calls")));
        let arguments = call["arguments"].as_str().expect("a text");
        let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{arguments}: {e}"));
        assert!(arguments["city"].is_string() && arguments.get("other").is_none(), "{before:?}: {body}");
    }
}

#[tokio::test]
async fn an_error_of_a_template_names_the_message() {
    let goldens = TemplateGoldens::read();
    let golden = goldens.templates.iter().find(|golden| golden.syntax == "llama3_json").expect("Llama 3");
    let Some(family) = FamilyText::of_llama_cpp(golden) else { return skip("llama-cpp-files") };
    let app = family.app(says(&family.plain("Yes."), family.end()));
    let made =
        |id: &str| json!({"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}});
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    for _ in 0..3 {
        messages.push(json!({"role": "user", "content": "Hi"}));
        messages.push(json!({"role": "assistant", "content": "Hello."}));
    }
    messages.push(json!({"role": "user", "content": "When?"}));
    messages.push(json!({"role": "assistant", "content": null, "tool_calls": [made("a"), made("b")]}));
    for id in ["a", "b"] {
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": "noon"}));
    }
    let (status, body) = complete(&app, with(ask(json!({})), json!({"messages": messages}))).await;
    let error = &body["error"];
    assert_eq!((status.as_u16(), &error["param"]), (400, &json!("messages")), "{body}");
    let said = error["message"].as_str().expect("a text");
    assert!(
        said.contains(
            "message 9 of the prompt's 11, of the role assistant: This model only supports single tool-calls"
        ),
        "{said}"
    );
}

#[tokio::test]
async fn without_parallel_calls_a_list_has_one_call() {
    for (name, family) in mistrals() {
        let calls = |text: &str| json!({"name": "note", "arguments": {"text": text}}).to_string();
        let ids = match name.as_str() {
            "mistral" => {
                let list = family.plain(&format!("[{}, {}]", calls("a"), calls("b")));
                [vec![format(&family).tokens.expect("tokens").open], list].concat()
            }
            _ => [call(&family, "a", 1), call(&family, "b", 2)].concat(),
        };
        for (parallel, count) in [(true, 2), (false, 1)] {
            let app = family.app(says(&ids, family.end()));
            let (_, body) = complete(&app, ask(json!({"parallel_tool_calls": parallel}))).await;
            let made = calls_of(&body["choices"][0]["message"]);
            assert_eq!(made.len(), count, "{name}: {body}");
            assert_eq!(made[0].1["text"], "a", "{name}: {body}");
        }
    }
}

#[test]
fn a_format_follows_the_template_and_needs_its_tokens() {
    for (name, syntax) in FAMILIES {
        let family = FamilyText::new(name);
        assert_eq!(format(&family).syntax.name, syntax);
        for other in CallSyntax::names() {
            let named = CallFormat::named(other, &family.tokenizer);
            let is_close = other == syntax || ["json", "llama3_json"].contains(&other);
            let is_sibling = name != "gemma4" && ["hermes", "qwen3_coder"].contains(&other);
            match named {
                Ok(format) => {
                    assert!(format.syntax.name == other && (is_close || is_sibling), "{name}: {other}")
                }
                Err(error) => assert!(
                    !is_close && !is_sibling && error.contains("needs the token")
                        || error.contains("need the token"),
                    "{error}"
                ),
            }
        }
        let error = CallFormat::named("nothing", &family.tokenizer).unwrap_err();
        assert!(error.starts_with("expected one of") && error.contains("hermes"), "{error}");
    }
    // A template that knows no tools.
    let tokenizer = crate::support::tokenizers::tokenizer();
    assert_eq!(
        CallFormat::of(&crate::support::tokenizers::gemma_template(), &tokenizer),
        CallFormat::plain()
    );
}

/// Home Assistant's exchange: 27 tools, names with two underscores, a call in each of three rounds, and messages as it
/// sends them.
#[tokio::test]
async fn a_home_with_many_tools_is_served_in_three_rounds() {
    let tool = |i: usize| {
        json!({"type": "function", "function": {"name": format!("light__Turn{i}"), "parameters": {
            "type": "object", "properties": {"name": {"type": "string"}, "brightness": {"type": "integer", "minimum": 0, "maximum": 100}},
        }}})
    };
    let tools: Vec<Value> = (0..27).map(tool).collect();
    for (name, family) in families() {
        let called = |round: usize| {
            let arguments = json!({"name": "Küche", "brightness": round});
            call_of(&family, &format!("light__Turn{round}"), arguments)
        };
        let mut scripts: Vec<Script> = (0..3).map(|round| says(&called(round), family.end())).collect();
        scripts.push(says(&family.plain("Done."), family.end()));
        let app = family.app(Box::new(move |tokens, draw| scripts[draw.seed as usize](tokens, draw)));
        let mut messages = vec![
            json!({"role": "system", "content": "You are a voice assistant."}),
            json!({"role": "user", "content": "Light!"}),
        ];
        for round in 0..3 {
            let body = json!({
                "model": "", "messages": messages, "tools": tools, "stream": true, "seed": round, "max_tokens": 200,
                "reasoning_effort": "none", "user": "conversation", "stream_options": {"include_usage": true},
            });
            let (_, _, functions) = streamed(&app, body).await;
            let [function] = functions.as_slice() else { panic!("{name}: {functions:?}") };
            assert_eq!(function["name"], format!("light__Turn{round}"), "{name}");
            let arguments: Value =
                serde_json::from_str(function["arguments"].as_str().expect("a text")).expect("JSON");
            assert_eq!(arguments, json!({"name": "Küche", "brightness": round}), "{name}");
            let id = format!("01J{round}");
            messages.push(json!({
                "role": "assistant", "content": null,
                "tool_calls": [{"type": "function", "id": id, "function": function}],
            }));
            messages.push(json!({
                "role": "tool", "tool_call_id": id, "content": "{\"success\": true, \"areas\": [\"Küche\"]}",
            }));
        }
        let asked = json!({
            "model": "", "messages": messages, "tools": tools, "seed": 3, "max_tokens": 200, "reasoning_effort": "none",
        });
        let (status, answer) = complete(&app, asked).await;
        assert_eq!(
            (status.as_u16(), &answer["choices"][0]["message"]["content"]),
            (200, &json!("Done.")),
            "{answer}"
        );
        let number = |at: &str| answer.pointer(at).and_then(Value::as_u64).expect("a number");
        let (prompt, cached) =
            (number("/usage/prompt_tokens"), number("/usage/prompt_tokens_details/cached_tokens"));
        assert!(cached * 10 > prompt * 8, "{name}: the rounds share a prefix: {cached} of {prompt} tokens");
    }
}
