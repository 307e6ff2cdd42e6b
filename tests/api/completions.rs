//! `/v1/completions`, `/tokenize` and `/detokenize` with the scripted runner and the mini tokenizer.

use axum::http::{Request, StatusCode, header};
use axum::{Router, body::Body};
use serde_json::{Value, json};

use crate::support::app::{END_OF_TURN, MODEL, app, router_that_says};
use crate::support::fake_runner::says;
use crate::support::http::{send, send_json};
use crate::support::json::with;
use crate::support::tokenizers::tokenizer;

const SAYS: &str = "and so on";

fn post(path: &str, body: &Value) -> Request<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    request.body(body.to_string().into()).expect("a sound request")
}

async fn complete(router: &Router, fields: Value) -> (StatusCode, Value) {
    let body = with(json!({"model": MODEL, "prompt": "once upon a time"}), fields);
    let (status, _, value) = send_json(router, post("/v1/completions", &body)).await;
    (status, value)
}

/// The events of a stream, without the final `[DONE]`.
async fn stream(router: &Router, fields: Value) -> Vec<Value> {
    let body = with(json!({"model": MODEL, "prompt": "once upon a time", "stream": true}), fields);
    let (status, headers, bytes) = send(router, post("/v1/completions", &body)).await;
    assert_eq!(status, 200);
    assert_eq!(headers[header::CONTENT_TYPE], "text/event-stream");
    let text = String::from_utf8(bytes).expect("UTF-8");
    let mut lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"));
    lines.into_iter().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[tokio::test]
async fn a_completion_continues_its_prompt_without_a_template() {
    let (router, tokens) = router_that_says(SAYS);
    let (status, body) = complete(&router, json!({"max_tokens": 100})).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["object"], "text_completion");
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("cmpl-")), "{body}");
    let choice = json!({"index": 0, "text": SAYS, "logprobs": null, "finish_reason": "stop"});
    assert_eq!(body["choices"], json!([choice]));
    let prompt = tokenizer().encode("once upon a time", true).expect("encodes");
    assert_eq!(body["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(body["usage"]["completion_tokens"], tokens);
    assert!(body["timings"]["prompt_ms"].is_number());

    let (_, body) = complete(&router, json!({"max_tokens": 2, "echo": true})).await;
    let two = tokenizer().decode(&tokenizer().encode(SAYS, false).expect("encodes")[..2], true);
    assert_eq!(body["choices"][0]["text"], format!("once upon a time{two}"));
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    // Without max_tokens an answer has at most 16 tokens, as in OpenAI's API.
    let (router, _) = router_that_says(&"on and on ".repeat(20));
    let (_, body) = complete(&router, json!({})).await;
    assert_eq!(body["usage"]["completion_tokens"], 16);
}

/// The byte tokens of a text, as a model writes characters that its vocabulary lacks.
fn byte_tokens(text: &str) -> Vec<u32> {
    let id = |byte: u8| tokenizer().token_id(&format!("<{byte:#04X}>")).expect("a byte token");
    text.bytes().map(id).collect()
}

/// The routes of a model that answers with `ids`.
fn router_that_answers_with(ids: &[u32]) -> Router {
    app(says(ids, END_OF_TURN)).router
}

#[tokio::test]
async fn an_answer_that_ends_within_a_character_keeps_those_before_it() {
    let ids = byte_tokens("春眠不覺曉處處聞啼鳥");
    let router = router_that_answers_with(&ids);
    let fields = json!({"max_tokens": 28});
    let (_, body) = complete(&router, fields.clone()).await;
    let text = "春眠不覺曉處處聞啼\u{fffd}";
    assert_eq!(body["choices"][0]["text"], text);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    // A stream sends each character when its last byte token is sampled.
    let chunks = stream(&router, fields).await;
    let texts = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str());
    let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).collect();
    assert_eq!(texts, text.split("").filter(|c| !c.is_empty()).collect::<Vec<_>>());
    let asked = post("/detokenize", &json!({"tokens": ids[..28]}));
    assert_eq!(send_json(&router, asked).await.2["content"], text);

    // A stop string can end an answer between two byte tokens.
    let (_, body) = complete(&router, json!({"max_tokens": 28, "stop": ["不覺"]})).await;
    assert_eq!(
        (&body["choices"][0]["text"], &body["choices"][0]["finish_reason"]),
        (&json!("春眠"), &json!("stop"))
    );
}

#[tokio::test]
async fn prompts_are_scored_with_echo_and_logprobs() {
    let (router, _) = router_that_says(SAYS);
    let ids = tokenizer().encode("once upon a time", true).expect("encodes");
    let fields = json!({"prompt": ids, "echo": true, "logprobs": 2, "max_tokens": 1, "temperature": 0});
    let (status, body) = complete(&router, fields.clone()).await;
    assert_eq!(status, 200, "{body}");
    let scores = &body["choices"][0]["logprobs"];
    let list = |name: &str| scores[name].as_array().unwrap_or_else(|| panic!("{name}: {body}")).clone();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(name).len(), ids.len() + 1, "{name}");
    }
    assert_eq!((&list("token_logprobs")[0], &list("top_logprobs")[0]), (&Value::Null, &Value::Null));
    assert!(list("token_logprobs")[1..].iter().all(|n| *n == -0.5), "{scores}");
    assert_eq!(list("top_logprobs")[1].as_object().expect("by text").len(), 2);
    let pieces: String = list("tokens")[..ids.len()].iter().map(|t| t.as_str().expect("text")).collect();
    let text = body["choices"][0]["text"].as_str().expect("text");
    assert!(text.starts_with(&pieces), "{text:?}, {pieces:?}");

    // With `max_tokens` 0 only the prompt is scored.
    let (_, alone) = complete(&router, with(fields.clone(), json!({"max_tokens": 0}))).await;
    let choice = &alone["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(pieces), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!(list("tokens")[..ids.len()]));
    assert_eq!(alone["usage"]["completion_tokens"], 0);

    // The token that ends an answer is listed like others, although it has no text. lm-eval expects one token in
    // addition to the prompt.
    let (ends, _) = router_that_says("");
    let (_, ended) = complete(&ends, fields.clone()).await;
    let choice = &ended["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(pieces), &json!("stop")), "{ended}");
    let tokens = choice["logprobs"]["tokens"].as_array().expect("tokens");
    let (last, prompt) = tokens.split_last().expect("tokens");
    assert_eq!((last, prompt), (&json!("<end_of_turn>"), &list("tokens")[..ids.len()]));
    assert_eq!(choice["logprobs"]["token_logprobs"][ids.len()], -0.5);
    assert_eq!(choice["logprobs"]["text_offset"][ids.len()], pieces.chars().count());

    // The chunks of a stream add up to the same lists.
    let fields = with(fields, json!({"max_tokens": 100}));
    let (_, body) = complete(&router, fields.clone()).await;
    let scores = &body["choices"][0]["logprobs"];
    let list = |name: &str| scores[name].as_array().unwrap_or_else(|| panic!("{name}: {body}")).clone();
    let text = body["choices"][0]["text"].as_str().expect("text");
    assert_eq!(list("tokens").last(), Some(&json!("<end_of_turn>")));
    let chunks = stream(&router, fields).await;
    let choices = || chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices"));
    let joined: String = choices().map(|c| c["text"].as_str().expect("text")).collect();
    assert_eq!(joined, text);
    let all = |name: &str| -> Vec<Value> {
        choices().filter_map(|c| c["logprobs"][name].as_array().cloned()).flatten().collect()
    };
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(all(name), list(name), "{name}");
    }
}

#[tokio::test]
async fn offsets_index_the_returned_text() {
    let says = [byte_tokens("é🦄"), tokenizer().encode(" b c", false).expect("encodes")].concat();
    let router = router_that_answers_with(&says);
    let text = "a 🦄 <start_of_turn>b";
    let ids = tokenizer().encode(text, true).expect("encodes");
    for (fields, begin) in [
        (json!({}), ""),
        (json!({"prompt": text, "echo": true}), text),
        (json!({"prompt": "", "echo": true}), ""),
        (json!({"prompt": ids, "echo": true}), &*format!("<bos>{text}")),
        (json!({"prompt": ids[1..], "echo": true}), text),
        // The text is truncated without its control tokens.
        (json!({"prompt": text, "echo": true, "truncate_prompt_tokens": ids.len() - 1}), "a 🦄 b"),
    ] {
        let fields = with(json!({"logprobs": 0, "max_tokens": 100}), fields);
        let (status, body) = complete(&router, fields.clone()).await;
        assert_eq!(status, 200, "{body}");
        let choice = &body["choices"][0];
        let whole = choice["text"].as_str().expect("text");
        assert_eq!(whole, format!("{begin}é🦄 b c"), "{fields}");
        let whole: Vec<char> = whole.chars().collect();
        let logprobs = &choice["logprobs"];
        let tokens: Vec<&str> =
            logprobs["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_str).collect();
        let offsets: Vec<usize> = logprobs["text_offset"]
            .as_array()
            .expect("offsets")
            .iter()
            .filter_map(|n| Some(n.as_u64()? as usize))
            .collect();
        assert!(offsets.is_sorted() && offsets.len() == tokens.len(), "{fields}: {logprobs}");
        assert_eq!((tokens.last(), offsets.last()), (Some(&"<end_of_turn>"), Some(&whole.len())), "{fields}");
        // Each token is at its offset in the text, except byte tokens, and control tokens that the text omits.
        let mut found = 0;
        for (token, offset) in tokens.iter().zip(&offsets) {
            let length = token.chars().count();
            let there: String = whole[*offset..].iter().take(length).collect();
            let is_absent = token.starts_with('<') && there != *token;
            assert!(
                there == *token || *token == "\u{fffd}" || is_absent,
                "{fields}: {token:?} at {offset} is {there:?}"
            );
            found += if there == *token { length } else { 0 };
        }
        let is_byte = |c: &&char| !c.is_ascii();
        assert_eq!(found, whole.len() - whole.iter().filter(is_byte).count(), "{fields}: {logprobs}");
        // All byte tokens of a character have the character's offset.
        let base = begin.chars().count();
        let answer: Vec<usize> = offsets.iter().filter(|at| **at >= base).copied().collect();
        let answer = &answer[answer.len() - says.len() - 1..];
        assert_eq!(
            answer[..7].iter().map(|at| at - base).collect::<Vec<_>>(),
            [0, 0, 1, 1, 1, 1, 2],
            "{fields}"
        );
    }
}

#[tokio::test]
async fn several_prompts_have_n_answers_each() {
    let (router, tokens) = router_that_says(SAYS);
    let prompts = json!(["once", "twice upon"]);
    let fields = json!({"prompt": prompts, "n": 2, "echo": true, "max_tokens": 100, "temperature": 1.5});
    let (status, body) = complete(&router, fields.clone()).await;
    assert_eq!(status, 200, "{body}");
    let texts: Vec<&str> =
        body["choices"].as_array().expect("choices").iter().filter_map(|c| c["text"].as_str()).collect();
    assert_eq!(texts, ["onceand so on", "onceand so on", "twice uponand so on", "twice uponand so on"]);
    assert_eq!(body["usage"]["completion_tokens"], 4 * tokens);
    let lengths = ["once", "twice upon"].map(|t| tokenizer().encode(t, true).expect("encodes").len());
    assert_eq!(body["usage"]["prompt_tokens"], lengths.iter().sum::<usize>());

    let chunks = stream(&router, with(fields, json!({"stream_options": {"include_usage": true}}))).await;
    let (last, rest) = chunks.split_last().expect("chunks");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"], body["usage"]["total_tokens"]);
    let mut streamed = vec![String::new(); 4];
    let mut ends = 0;
    for chunk in rest {
        assert_eq!(chunk["usage"], Value::Null);
        let choice = &chunk["choices"][0];
        streamed[choice["index"].as_u64().expect("index") as usize] += choice["text"].as_str().expect("text");
        ends += usize::from(choice["finish_reason"] == "stop");
    }
    assert_eq!((streamed.iter().map(String::as_str).collect::<Vec<_>>(), ends), (texts, 4));
}

#[tokio::test]
async fn bad_completion_requests_are_refused_with_the_name_of_the_field() {
    let (router, _) = router_that_says(SAYS);
    for (fields, param) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": {}}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": ["a", 1]}), "prompt[1]"),
        (json!({"prompt": [1, "a"]}), "prompt[1]"),
        (json!({"prompt": [1, -2]}), "prompt[1]"),
        (json!({"prompt": [[1], []]}), "prompt[1]"),
        (json!({"prompt": [4_000_000]}), "prompt[0]"),
        (json!({"prompt": vec!["a"; 129]}), "prompt"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"suffix": "the end"}), "suffix"),
        (json!({"best_of": 3}), "best_of"),
        (json!({"echo": 1}), "echo"),
        (json!({"temperature": 3}), "temperature"),
    ] {
        let (status, body) = complete(&router, fields.clone()).await;
        assert_eq!(
            (status, &body["error"]["param"]),
            (StatusCode::BAD_REQUEST, &json!(param)),
            "{fields}: {body}"
        );
    }
    let (status, body) = complete(&router, json!({"model": "other"})).await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
}

#[tokio::test]
async fn texts_are_tokenized_and_tokens_detokenized() {
    let (router, _) = router_that_says(SAYS);
    let ask = async |path: &str, body: Value| {
        let (status, _, value) = send_json(&router, post(path, &body)).await;
        (status.as_u16(), value)
    };
    let text = "Ünïcode 🦄 twice";
    let (bare, full) =
        (tokenizer().encode(text, false).expect("encodes"), tokenizer().encode(text, true).expect("encodes"));
    assert_ne!(bare, full);
    let (status, vllm) = ask("/tokenize", json!({"model": MODEL, "prompt": text})).await;
    assert_eq!((status, &vllm["tokens"], &vllm["count"]), (200, &json!(full), &json!(full.len())), "{vllm}");
    assert_eq!(vllm["max_model_len"], 600);
    let without = json!({"prompt": text, "add_special_tokens": false, "return_token_strs": true});
    let (_, vllm) = ask("/tokenize", without).await;
    assert_eq!(vllm["tokens"], json!(bare));
    assert_eq!(vllm["token_strs"].as_array().map(Vec::len), Some(bare.len()));
    let (_, llama) = ask("/tokenize", json!({"content": text})).await;
    assert_eq!(llama, json!({"tokens": bare}));
    let (_, pieces) =
        ask("/tokenize", json!({"content": "twice upon", "add_special": true, "with_pieces": true})).await;
    let pieces = pieces["tokens"].as_array().expect("pieces").clone();
    assert_eq!(pieces[0]["id"], full[0]);
    let joined: String = pieces[1..].iter().map(|p| p["piece"].as_str().expect("text")).collect();
    assert_eq!(joined, "twice upon");
    // A piece that is not valid UTF-8 is a list of bytes, as in llama.cpp's server.
    let (_, parts) = ask("/tokenize", json!({"content": "é", "with_pieces": true})).await;
    let parts: Vec<&Value> =
        parts["tokens"].as_array().expect("pieces").iter().map(|p| &p["piece"]).collect();
    assert_eq!(parts, [&json!([0xc3]), &json!([0xa9])]);
    let (_, chat) = ask("/tokenize", json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    assert!(chat["count"].as_u64() > Some(5), "{chat}");

    let (status, back) = ask("/detokenize", json!({"model": MODEL, "tokens": bare})).await;
    assert_eq!((status, back), (200, json!({"prompt": text, "content": text})));
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 1}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens[0]"),
        ("/detokenize", json!({"tokens": [1, 4_000_000]}), "tokens[1]"),
    ] {
        let (status, value) = ask(path, body.clone()).await;
        assert_eq!((status, &value["error"]["param"]), (400, &json!(param)), "{body}: {value}");
    }
}

#[tokio::test]
async fn a_stream_sends_the_finish_reason_in_its_own_chunk() {
    let (router, _) = router_that_says(SAYS);
    // All of the text is held back until the end, because it may be the beginning of the stop string.
    let fields = json!({"max_tokens": 100, "stop": format!("{SAYS}!"), "logprobs": 1});
    let chunks = stream(&router, fields).await;
    let choice = |i: usize| (&chunks[i]["choices"][0]["text"], &chunks[i]["choices"][0]["finish_reason"]);
    let (last, n) = (chunks.len() - 1, chunks.len());
    assert_eq!(choice(last), (&json!(""), &json!("stop")));
    let before: String = chunks[..last].iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    assert!(before == SAYS && (0..n - 1).all(|i| choice(i).1.is_null()), "{chunks:?}");
}
