//! What a model thinks before it answers, in every wire format, over the scripted runner.

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::text::{AnswerReader, ThoughtStart, Tokenizer};

use crate::support::app::{FamilyText, recorded};
use crate::support::data;
use crate::support::fake_runner::{Script, says};
use crate::support::http::{chat, complete, events_of, parse, post_to, send_json, stream};
use crate::support::json::with;

/// The families whose models think, each with what its models write around a thought.
const FAMILIES: [(&str, &str, &str); 2] = [("qwen", "\n", "\n"), ("gemma4", "thought\n", "\n")];

const THOUGHT: &str = "I ½ think\n\n of <|channel> and {\"a\": 1}.";
const TEXT: &str = "A <think>\n½</think> text.";

/// The ids of an answer that thinks, and then says `text`.
fn thinks(family: &FamilyText, [before, after]: [&str; 2], thought: &str, text: &str) -> Vec<u32> {
    let tokens = family.tokenizer.thought_tokens().expect("a family that thinks");
    let thought = family.plain(&format!("{before}{thought}{after}"));
    let text = family.plain(text);
    [&[tokens.open][..], &thought, &[tokens.close], &text].concat()
}

/// A question to which the model may think.
fn question() -> Value {
    with(chat("Hi"), json!({"chat_template_kwargs": {"enable_thinking": true}, "max_tokens": 300}))
}

fn texts<'a>(list: impl Iterator<Item = &'a Value>) -> String {
    list.filter_map(Value::as_str).collect()
}

#[tokio::test]
async fn a_chat_has_thoughts_in_fields_of_their_own() {
    for (name, before, after) in FAMILIES {
        let family = FamilyText::new(name);
        let ids = thinks(&family, [before, after], THOUGHT, &format!("\n\n{TEXT}"));
        let app = family.app(says(&ids, family.end()));
        let (status, answer) = complete(&app, question()).await;
        assert_eq!(status, 200, "{answer}");
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], TEXT, "{name}");
        assert_eq!(
            (&message["reasoning_content"], &message["reasoning"]),
            (&json!(THOUGHT), &json!(THOUGHT))
        );
        let thought_n = ids.len() - family.plain(&format!("\n\n{TEXT}")).len();
        assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], thought_n, "{name}");

        let asked = json!({"stream": true, "stream_options": {"include_usage": true}});
        let (lines, _) = stream(&app, with(question(), asked)).await;
        let chunks = parse(&lines);
        let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
        for field in ["reasoning_content", "reasoning"] {
            assert_eq!(texts(deltas.iter().map(|delta| &delta[field])), THOUGHT, "{name}");
        }
        assert_eq!(texts(deltas.iter().map(|delta| &delta["content"])), TEXT, "{name}");
        let first_text = deltas.iter().position(|delta| delta["content"].is_string()).expect("a text");
        assert!(deltas[first_text..].iter().all(|delta| delta["reasoning"].is_null()), "{name}: {chunks:?}");
        let usage = &chunks.last().expect("the usage")["usage"];
        assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], thought_n, "{name}");
    }
}

#[tokio::test]
async fn a_message_has_a_block_for_its_thought() {
    for (name, before, after) in FAMILIES {
        let family = FamilyText::new(name);
        let app = family.app(says(&thinks(&family, [before, after], THOUGHT, TEXT), family.end()));
        let asked = json!({
            "model": "", "max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}],
            "thinking": {"type": "enabled", "budget_tokens": 200},
        });
        let (status, _, message) = send_json(&app.router, post_to("/v1/messages", asked.to_string())).await;
        assert_eq!(status, 200, "{message}");
        let blocks = json!([
            {"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "text", "text": TEXT},
        ]);
        assert_eq!(message["content"], blocks, "{name}");

        let events = events_of(&app, "/v1/messages", asked).await;
        let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
        let starts = of("content_block_start");
        let kinds: Vec<&Value> = starts.iter().map(|event| &event["content_block"]["type"]).collect();
        assert_eq!(kinds, ["thinking", "text"], "{name}");
        assert_eq!(of("content_block_stop").len(), 2, "{name}");
        let deltas = of("content_block_delta");
        for (index, field, expected) in [(0, "thinking", THOUGHT), (1, "text", TEXT)] {
            let own = deltas.iter().filter(|event| event["index"] == index);
            assert_eq!(texts(own.map(|event| &event["delta"][field])), expected, "{name}");
        }
    }
}

#[tokio::test]
async fn a_response_has_an_item_for_its_thought() {
    for (name, before, after) in FAMILIES {
        let family = FamilyText::new(name);
        let ids = thinks(&family, [before, after], THOUGHT, TEXT);
        let app = family.app(says(&ids, family.end()));
        let asked = json!({"input": "Hi", "reasoning": {"effort": "high"}});
        let (status, _, response) = send_json(&app.router, post_to("/v1/responses", asked.to_string())).await;
        assert_eq!(status, 200, "{response}");
        let is_whole = |response: &Value| {
            let [thought, message] = &response["output"].as_array().expect("items")[..] else {
                panic!("{response}")
            };
            assert_eq!(thought["type"], "reasoning");
            assert_eq!(thought["content"], json!([{"type": "reasoning_text", "text": THOUGHT}]), "{name}");
            assert_eq!(message["content"][0]["text"], TEXT, "{name}");
            assert_eq!(response["reasoning"]["effort"], "high");
            let details = &response["usage"]["output_tokens_details"];
            assert_eq!(details["reasoning_tokens"], ids.len() - family.plain(TEXT).len(), "{name}");
        };
        is_whole(&response);

        let events = events_of(&app, "/v1/responses", asked.clone()).await;
        is_whole(&events.last().expect("the end")["response"]);
        for (kind, index, expected) in
            [("response.reasoning_text.delta", 0, THOUGHT), ("response.output_text.delta", 1, TEXT)]
        {
            let own: Vec<&Value> = events.iter().filter(|event| event["type"] == kind).collect();
            assert!(own.iter().all(|event| event["output_index"] == index), "{name}");
            assert_eq!(texts(own.iter().map(|event| &event["delta"])), expected, "{name}");
        }
        let done = |event: &&Value| event["type"] == "response.output_item.done";
        let items: Vec<&Value> = events.iter().filter(done).map(|event| &event["item"]["type"]).collect();
        assert_eq!(items, ["reasoning", "message"], "{name}");

        // A later response continues a conversation with thoughts.
        let next = json!({"input": "More", "previous_response_id": response["id"]});
        let (status, _, next) = send_json(&app.router, post_to("/v1/responses", next.to_string())).await;
        assert_eq!(status, 200, "{next}");
    }
}

/// The prompt of a request as text.
async fn prompt(family: &FamilyText, path: &str, body: Value) -> String {
    let (script, seen) = recorded(says(&[], family.end()));
    let app = family.app(script);
    let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
    assert_eq!(status, 200, "{answer}");
    let ids = seen.lock().expect("no test panics with it").clone();
    family.tokenizer.decode(&ids, false)
}

#[tokio::test]
async fn thoughts_are_turned_on_and_off_in_every_format() {
    for (name, off) in [("qwen", "<think>\n\n</think>\n\n"), ("gemma4", "<|channel>thought\n<channel|>")] {
        let family = FamilyText::new(name);
        let message =
            |fields| with(json!({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}), fields);
        for (path, body, thinks) in [
            ("/v1/chat/completions", json!({"reasoning_effort": "none"}), false),
            ("/v1/chat/completions", json!({"reasoning_effort": "low"}), true),
            ("/v1/chat/completions", json!({"reasoning": {"enabled": false}}), false),
            ("/v1/chat/completions", json!({"reasoning": {"effort": "medium", "max_tokens": 5}}), true),
            ("/v1/chat/completions", json!({"reasoning_effort": "high", "thinking_token_budget": 0}), false),
            (
                "/v1/chat/completions",
                json!({"reasoning": {"enabled": true}, "thinking_token_budget": 0}),
                false,
            ),
            (
                "/v1/chat/completions",
                json!({"reasoning": {"max_tokens": 9}, "thinking_token_budget": 0}),
                false,
            ),
            (
                "/v1/chat/completions",
                json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}}),
                true,
            ),
            ("/v1/messages", json!({"thinking": {"type": "disabled"}}), false),
            ("/v1/messages", json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), true),
            ("/v1/messages", json!({"thinking": {"type": "adaptive"}}), true),
        ] {
            let prompt = prompt(&family, path, message(body.clone())).await;
            assert_eq!(prompt.ends_with(off), !thinks, "{name}, {body}: {prompt}");
        }
        for (effort, thinks) in [("none", false), ("minimal", true)] {
            let body = json!({"input": "Hi", "reasoning": {"effort": effort}});
            let prompt = prompt(&family, "/v1/responses", body).await;
            assert_eq!(prompt.ends_with(off), !thinks, "{name}, {effort}: {prompt}");
        }
    }
    let family = FamilyText::new("qwen");
    let app = family.app(says(&[], family.end()));
    let (status, answer) = complete(&app, with(chat("Hi"), json!({"reasoning_effort": "enormous"}))).await;
    assert!(status == 400 && answer.to_string().contains("xhigh"), "{answer}");
}

/// Qwen's template keeps the thought of the last turn. Here the turn is continued.
#[tokio::test]
async fn thoughts_that_clients_send_back_reach_the_template() {
    let family = FamilyText::new("qwen");
    let kept = "<think>\nI <|im_end|> mused\n</think>\n\nWell";
    let user = json!({"role": "user", "content": "Hi"});
    for field in ["reasoning", "reasoning_content"] {
        let said = json!({"role": "assistant", "content": "Well", field: "I <|im_end|> mused"});
        let body = json!({"messages": [user, said], "continue_final_message": true, "max_tokens": 9});
        let prompt = prompt(&family, "/v1/chat/completions", body).await;
        assert!(prompt.ends_with(kept), "{prompt}");
        let later = json!({"role": "user", "content": "And?"});
        let body = json!({"messages": [user, said, later], "max_tokens": 9});
        let prompt = self::prompt(&family, "/v1/chat/completions", body).await;
        assert!(!prompt.contains("mused"), "the template drops it after the next question: {prompt}");
    }
    let blocks = json!([
        {"type": "thinking", "thinking": "I <|im_end|> mused", "signature": "x"}, {"type": "text", "text": "Well"},
    ]);
    let said = json!({"role": "assistant", "content": blocks});
    let prompt = prompt(&family, "/v1/messages", json!({"messages": [user, said], "max_tokens": 9})).await;
    assert!(prompt.ends_with(kept), "{prompt}");
}

#[tokio::test]
async fn a_grammar_holds_after_the_thought_and_not_in_it() {
    for (name, before, after) in FAMILIES {
        let family = FamilyText::new(name);
        let object = "{\"a\": [1, 2]}";
        let ids = thinks(&family, [before, after], THOUGHT, object);
        let app = family.app(says(&ids, family.end()));
        let asked = with(question(), json!({"response_format": {"type": "json_object"}}));
        let (status, answer) = complete(&app, asked.clone()).await;
        assert_eq!(status, 200, "{answer}");
        let message = &answer["choices"][0]["message"];
        assert_eq!((&message["content"], &message["reasoning"]), (&json!(object), &json!(THOUGHT)), "{name}");

        // Without thoughts, none may begin: the scripted model gets another id instead, and stays in the grammar.
        let off = with(asked, json!({"chat_template_kwargs": {"enable_thinking": false}, "max_tokens": 40}));
        let (status, answer) = complete(&app, off).await;
        assert_eq!(status, 200, "{answer}");
        let message = &answer["choices"][0]["message"];
        assert!(message["reasoning"].is_null(), "{name}: {message}");
        assert!(
            message["content"].as_str().expect("a text").trim_start().starts_with('{'),
            "{name}: {message}"
        );
    }
}

/// A model that would think without end, and says "b" after a thought.
fn endless(family: &FamilyText) -> Script {
    let tokens = family.tokenizer.thought_tokens().expect("a family that thinks");
    let (a, b, end) = (family.plain("a")[0], family.plain("b")[0], family.end());
    Box::new(move |all, _| match all.last() {
        Some(id) if *id == tokens.close => b,
        Some(id) if *id == b => end,
        Some(id) if *id == tokens.open || *id == a => a,
        _ => tokens.open,
    })
}

#[tokio::test]
async fn a_budget_ends_a_thought_and_the_answer_follows() {
    let user = json!([{"role": "user", "content": "Hi"}]);
    let kwargs = json!({"enable_thinking": true});
    for (name, ..) in FAMILIES {
        let family = FamilyText::new(name);
        let app = family.app(endless(&family));
        for (path, body) in [
            (
                "/v1/chat/completions",
                json!({"messages": user, "chat_template_kwargs": kwargs, "thinking_token_budget": 7}),
            ),
            (
                "/v1/chat/completions",
                json!({"messages": user, "reasoning": {"max_tokens": 7, "enabled": true}}),
            ),
            (
                "/v1/messages",
                json!({"messages": user, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 7}}),
            ),
            ("/v1/responses", json!({"input": "Hi", "reasoning": {"effort": "low", "max_tokens": 7}})),
        ] {
            let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
            assert_eq!(status, 200, "{answer}");
            let (thought, text) = match path {
                "/v1/messages" => (&answer["content"][0]["thinking"], &answer["content"][1]["text"]),
                "/v1/responses" => {
                    let output = &answer["output"];
                    (&output[0]["content"][0]["text"], &output[1]["content"][0]["text"])
                }
                _ => {
                    let message = &answer["choices"][0]["message"];
                    (&message["reasoning"], &message["content"])
                }
            };
            assert_eq!((thought, text), (&json!("aaaaaaa"), &json!("b")), "{name}, {path}: {answer}");
        }
        // Without a budget, the limit of tokens ends the answer within the thought.
        let (_, answer) = complete(&app, with(question(), json!({"max_tokens": 9}))).await;
        let choice = &answer["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(""), &json!("length")));
        assert_eq!(choice["message"]["reasoning"], "aaaaaaaa", "{name}");
    }
}

#[tokio::test]
async fn stop_strings_end_the_text_and_not_a_thought() {
    let family = FamilyText::new("qwen");
    let app = family.app(says(&thinks(&family, ["\n", "\n"], "one two", "three two four"), family.end()));
    let (_, answer) = complete(&app, with(question(), json!({"stop": ["two"]}))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("one two"), &json!("three ")));
}

#[test]
fn any_vocabulary_with_the_tokens_of_thoughts_has_thoughts() {
    let bytes = std::fs::read(data("families/tiny-llama/tokenizer.json")).expect("a tokenizer");
    let mut json: Value = serde_json::from_slice(&bytes).expect("JSON");
    let read = |json: &Value| Tokenizer::from_bytes(json.to_string().as_bytes(), "llama").expect("sound");
    let plain = read(&json);
    assert_eq!(plain.thought_tokens(), None);
    let first = plain.vocab_size() as u32;
    for (id, content) in (first..).zip(["<think>", "</think>"]) {
        json["added_tokens"].as_array_mut().expect("a list").push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        }));
    }
    let tokens = read(&json).thought_tokens().expect("both tokens");
    assert_eq!((tokens.open, tokens.close), (first, first + 1));
}

/// Ids in any order: what comes between the tokens of thoughts is a thought, everything else is text, and no byte is lost
/// or doubled.
#[test]
fn no_syntax_of_thoughts_is_in_the_text_whatever_the_ids() {
    for (name, ..) in FAMILIES {
        let family = FamilyText::new(name);
        let tokens = family.tokenizer.thought_tokens().expect("a family that thinks");
        let words = ["thought\n", "\n", "½", " a", "\n\n", "<think>", "</think>", "<|channel>", "thou", "🦄"];
        let words: Vec<Vec<u32>> = words.iter().map(|word| family.plain(word)).collect();
        for seed in 0..2000 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let starts = [ThoughtStart::Inside, ThoughtStart::Before, ThoughtStart::After];
            let start = *starts.choose(&mut rng).unwrap();
            let reader = AnswerReader::new(family.tokenizer.detokenizer(true)).with_thoughts(tokens, start);
            let mut reader = reader.at_start();
            let mut ids: Vec<u32> = Vec::new();
            for _ in 0..rng.random_range(0..30) {
                match rng.random_range(0..8) {
                    0 => ids.push(tokens.open),
                    1 => ids.push(tokens.close),
                    // A part of a word may be a part of a character.
                    2 => ids.extend(words.choose(&mut rng).unwrap().first()),
                    _ => ids.extend(words.choose(&mut rng).unwrap()),
                }
            }
            let (mut thought, mut text, mut thought_n) = (String::new(), String::new(), 0);
            let mut spoken: Vec<_> = ids.iter().map(|id| reader.push(*id)).collect();
            spoken.push(reader.finish());
            for part in &spoken {
                assert!(part.thought.is_empty() || part.text.is_empty(), "seed {seed}: {part:?}");
                thought.push_str(&part.thought);
                text.push_str(&part.text);
                thought_n += usize::from(part.is_thought);
            }
            let (mut thoughts, mut texts) = (String::new(), String::new());
            let (mut is_inside, mut first) = (start == ThoughtStart::Inside, true);
            let mut segments = vec![(is_inside, Vec::new())];
            for id in &ids {
                match *id {
                    id if id == tokens.open && !is_inside => is_inside = true,
                    id if id == tokens.close && is_inside => is_inside = false,
                    id if [tokens.open, tokens.close].contains(&id) => continue,
                    id => {
                        segments.last_mut().unwrap().1.push(id);
                        continue;
                    }
                }
                segments.push((is_inside, Vec::new()));
            }
            for (is_thought, ids) in segments {
                let decoded = family.tokenizer.decode(&ids, true);
                if is_thought {
                    let header = if name == "qwen" { "\n" } else { "thought\n" };
                    let is_begun = !decoded.is_empty() && header.starts_with(&decoded) && decoded != header;
                    let body = decoded.strip_prefix(header).unwrap_or(if is_begun { "" } else { &decoded });
                    thoughts.push_str(body.trim_end());
                } else {
                    texts.push_str(if first { &decoded } else { decoded.trim_start_matches('\n') });
                }
                first = false;
            }
            assert_eq!((thought, text), (thoughts, texts), "{name}, seed {seed}: {ids:?}");
            let at_end = spoken.last().is_some_and(|part| part.is_thought);
            assert_eq!(at_end, is_inside, "{name}, seed {seed}");
            assert!(thought_n <= ids.len() + 1, "{name}, seed {seed}");
        }
    }
}
