//! `/v1/chat/completions` with the scripted runner and the mini tokenizer: every field, every error, and the events of
//! a stream. Also what all routes share: models, queues, request ids, and the end of the server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use unicorn::api::{self, AccessPolicy, Options, Server};
use unicorn::model::{KvLimits, Limits, SamplingOptions, SamplingParams};

use crate::support::app::{
    App, DEFAULTS, END_OF_TURN, MODEL, OPTIONS, app, app_that_says, app_that_shows_its_prompt, app_with,
    limits, loaded_with_queue, prompt_ids,
};
use crate::support::fake_runner::{HANG, Script, kv_with, says};
use crate::support::http::{
    answer, assert_all_free, assert_at_rest, chat, complete, content, get, parse, post, post_to, send,
    send_json, stream,
};
use crate::support::json::with;
use crate::support::lists::each_value;
use crate::support::server::CONNECTIONS;
use crate::support::tokenizers::tokenizer;
use crate::support::waits::until;

/// Waits for this number of submitted steps, on another thread, so that the runtime's thread is not blocked.
async fn submitted(app: &App, steps: usize) {
    let control = app.control.clone();
    tokio::task::spawn_blocking(move || control.submitted(steps)).await.expect("steps come");
}

#[tokio::test]
async fn an_aborted_request_costs_at_most_two_more_steps() {
    let app = app(says(&[], 300));
    for streaming in [false, true] {
        let steps = app.control.batches().len();
        app.control.allow(steps);
        let body = with(chat(&"long ".repeat(30)), json!({"stream": streaming}));
        let router = app.router.clone();
        let request = tokio::spawn(async move {
            let response = router.oneshot(post(body.to_string())).await.unwrap();
            response.into_body().collect().await.map(drop)
        });
        submitted(&app, steps + 1).await;
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        app.control.release();
        assert_at_rest(&app.router).await;
        assert!(app.control.batches().len() <= steps + 3, "the engine continued for a client that is gone");
    }
}

#[tokio::test]
async fn a_chat_completion_has_openais_fields() {
    let app = app_that_says("Vim has two modes.");
    let (status, body) = complete(&app, chat("What modes are there?")).await;
    assert_eq!(status, 200);
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!(MODEL)));
    assert!(body["created"].as_u64().is_some_and(|t| t > 1_700_000_000));
    assert!(body["system_fingerprint"].is_string());
    let message = json!({"role": "assistant", "content": "Vim has two modes.", "refusal": null});
    let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"});
    assert_eq!(body["choices"], json!([choice]));

    let usage = &body["usage"];
    let (prompt, answer) =
        (usage["prompt_tokens"].as_u64().unwrap(), usage["completion_tokens"].as_u64().unwrap());
    let expected = tokenizer().encode("Vim has two modes.", false).unwrap().len() as u64 + 1;
    assert_eq!(answer, expected, "the stop token counts");
    assert_eq!(usage["total_tokens"].as_u64(), Some(prompt + answer));
    assert_eq!(body["timings"]["prompt_n"].as_u64(), Some(prompt));
    assert_eq!(body["timings"]["predicted_n"].as_u64(), Some(answer));
    for name in ["cache_n", "prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"] {
        assert!(body["timings"][name].is_number(), "{name}: {body}");
    }
}

/// The host may see a step late, so the time of one or two steps is no measure: it once gave 10938 tokens/s.
#[tokio::test]
async fn a_decode_rate_is_reported_for_answers_of_five_tokens_or_more() {
    let app = app_that_says("Vim has two modes.");
    for (max_tokens, is_reported) in [(1, false), (2, false), (4, false), (5, true)] {
        let (_, body) = complete(&app, with(chat("Hi"), json!({"max_tokens": max_tokens}))).await;
        let timings = &body["timings"];
        assert_eq!(timings["predicted_n"], max_tokens, "{body}");
        let rate = &timings["predicted_per_second"];
        assert_eq!(
            (rate.is_number(), rate.is_null()),
            (is_reported, !is_reported),
            "{max_tokens} tokens: {timings}"
        );
        if is_reported {
            let ms = timings["predicted_ms"].as_f64().unwrap();
            assert!(
                (rate.as_f64().unwrap() * ms / 4e3 - 1.0).abs() < 1e-9,
                "5 tokens take 4 steps: {timings}"
            );
        }
        // All of the prompt except its end may come from the cache.
        assert!(timings["prompt_per_second"].as_f64().unwrap().is_finite(), "{timings}");
    }
}

#[tokio::test]
async fn a_stream_sends_role_content_finish_reason_usage_and_done() {
    // Letters outside the vocabulary are several byte tokens each.
    let text = "Größe: ½, 🦄!";
    let app = app_that_says(text);
    for usage in [true, false] {
        let options = json!({"stream": true, "stream_options": {"include_usage": usage}});
        let (lines, _) = stream(&app, with(chat("Hi"), options)).await;
        let mut chunks = parse(&lines);
        assert_eq!(content(&chunks), text);
        assert!(!lines.iter().any(|l| l.contains('\u{fffd}')), "half a character was sent");
        for chunk in &chunks {
            assert_eq!(chunk["object"], "chat.completion.chunk");
            assert_eq!((&chunk["id"], &chunk["created"]), (&chunks[0]["id"], &chunks[0]["created"]));
            assert_eq!(chunk.get("usage").is_some(), usage, "{chunk}");
        }
        let first = json!({"role": "assistant", "content": null});
        assert_eq!(chunks[0]["choices"][0]["delta"], first);
        assert!(chunks.last().unwrap()["timings"]["predicted_n"].is_number());
        if usage {
            let last = chunks.pop().unwrap();
            assert_eq!(last["choices"], json!([]));
            assert!(last["usage"]["total_tokens"].as_u64() > last["usage"]["prompt_tokens"].as_u64());
        }
        let reason = chunks.pop().unwrap();
        assert_eq!(reason["choices"][0]["delta"], json!({}));
        assert_eq!(reason["choices"][0]["finish_reason"], "stop");
        assert!(chunks.iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
    }
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn stop_strings_end_an_answer_and_are_never_sent() {
    let app = app_that_says("One, two, three, four");
    for (stop, expected, reason) in [
        (json!("three"), "One, two, ", "stop"),
        (json!(["xyz", " two, th"]), "One,", "stop"),
        (json!(["three, five"]), "One, two, three, four", "stop"),
        (json!("One"), "", "stop"),
        (json!([]), "One, two, three, four", "stop"),
    ] {
        let body = with(chat("Count"), json!({"stop": stop}));
        assert_eq!(answer(&app, body.clone()).await, (expected.to_owned(), reason.to_owned()), "{stop}");
        let (lines, _) = stream(&app, with(body, json!({"stream": true}))).await;
        assert_eq!(content(&parse(&lines)), expected, "{stop}");
        assert_all_free(&app.engine).await;
    }
}

#[tokio::test]
async fn log_probabilities_have_openais_fields() {
    // Letters outside the vocabulary are several tokens of one byte each.
    let text = "Vim: ½ or two?";
    let app = app_that_says(text);
    let ids = tokenizer().encode(text, false).unwrap();
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let (_, body) = complete(&app, with(chat("Hi"), fields.clone())).await;
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(logprobs["refusal"], Value::Null);
    let tokens = logprobs["content"].as_array().expect("a list").clone();
    assert_eq!(tokens.len(), ids.len(), "one entry for each token except the stop token");
    for (token, id) in tokens.iter().zip(&ids) {
        let bytes = tokenizer().token_bytes(*id).unwrap();
        assert_eq!((&token["bytes"], &token["logprob"]), (&json!(bytes), &json!(-0.5)), "{token}");
        assert_eq!(token["token"], json!(String::from_utf8_lossy(&bytes)));
        let top = token["top_logprobs"].as_array().expect("a list");
        assert_eq!((top.len(), &top[0]["bytes"], &top[1]["logprob"]), (2, &json!(bytes), &json!(-1.5)));
    }
    let (lines, _) = stream(&app, with(chat("Hi"), with(fields, json!({"stream": true})))).await;
    let chunks = parse(&lines);
    assert_eq!(content(&chunks), text);
    let of = |chunk: &Value| chunk["choices"][0]["logprobs"]["content"].as_array().cloned();
    assert_eq!(chunks.iter().filter_map(of).flatten().collect::<Vec<_>>(), tokens);

    let (_, body) = complete(&app, with(chat("Hi"), json!({"logprobs": true}))).await;
    assert_eq!(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn n_choices_have_different_seeds_and_end_independently() {
    let limits = Limits { max_sequences: 3, max_draws: 3, ..limits() };
    let answers = ["One.", "Two, and more", "Three"].map(|text| tokenizer().encode(text, false).unwrap());
    let mut scripts = answers.map(|ids| says(&ids, END_OF_TURN));
    let script: Script = Box::new(move |tokens, draw| scripts[draw.seed as usize - 7](tokens, draw));
    let app = app_with(limits, OPTIONS, DEFAULTS, script);
    let fields = json!({"n": 3, "seed": 7, "stop": ", and"});
    let (status, body) = complete(&app, with(chat("Count"), fields.clone())).await;
    assert_eq!(status, 200, "{body}");
    let expected = ["One.", "Two", "Three"];
    for (i, text) in expected.iter().enumerate() {
        let choice = &body["choices"][i];
        assert_eq!((&choice["index"], &choice["message"]["content"]), (&json!(i), &json!(text)));
        assert_eq!(choice["finish_reason"], "stop");
    }
    let usage = &body["usage"];
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    assert_all_free(&app.engine).await;

    let (lines, _) = stream(&app, with(chat("Count"), with(fields, json!({"stream": true})))).await;
    let chunks = parse(&lines);
    for (i, text) in expected.iter().enumerate() {
        let own: Vec<Value> = chunks.iter().filter(|c| c["choices"][0]["index"] == i).cloned().collect();
        assert_eq!(content(&own), *text);
        assert_eq!(own[0]["choices"][0]["delta"]["role"], "assistant");
        let reasons = own.iter().filter(|c| !c["choices"][0]["finish_reason"].is_null());
        assert_eq!(reasons.count(), 1);
    }
    assert!(chunks.last().unwrap()["timings"]["predicted_n"].is_number());
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn logit_bias_ignore_eos_and_min_tokens_reach_the_sampler() {
    let app = app_that_says("ok");
    let ids = tokenizer().encode("ok", false).unwrap();
    // If an id is forbidden, the fake runner takes the next id.
    let next = tokenizer().detokenizer(true).push(ids[0] + 1).to_owned();
    let bias = json!({"max_tokens": 1, "logit_bias": {ids[0].to_string(): -100}});
    assert_eq!(answer(&app, with(chat("Hi"), bias)).await, (next, "length".to_owned()));
    let on = json!({"ignore_eos": true, "max_tokens": 9});
    assert_eq!(answer(&app, with(chat("Hi"), on)).await.1, "length");
    let (_, body) = complete(&app, with(chat("Hi"), json!({"min_tokens": 7}))).await;
    assert!(body["usage"]["completion_tokens"].as_u64() > Some(7), "{body}");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_final_assistant_message_is_continued_closed_or_followed_by_an_answer() {
    let (app, seen) = app_that_shows_its_prompt("four.");
    let messages =
        json!([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": " It is \n"}]);
    let begin = "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\nIt is";
    for (fields, end) in [
        (json!({"continue_final_message": true}), ""),
        (json!({"continue_final_message": true, "add_generation_prompt": false}), ""),
        (json!({"add_generation_prompt": false}), "<end_of_turn>\n"),
        (json!({}), "<end_of_turn>\n<start_of_turn>model\n"),
    ] {
        let body = with(json!({"model": MODEL, "messages": messages}), fields.clone());
        assert_eq!(answer(&app, body).await.0, "four.", "{fields}");
        assert_eq!(*seen.lock().unwrap(), prompt_ids(&format!("{begin}{end}")), "{fields}");
    }
}

#[tokio::test]
async fn max_tokens_and_the_context_limit_an_answer() {
    let app = app(says(&[], 300));
    for name in ["max_tokens", "max_completion_tokens"] {
        let (status, body) = complete(&app, with(chat("Hi"), json!({name: 3}))).await;
        assert_eq!((status, &body["choices"][0]["finish_reason"]), (StatusCode::OK, &json!("length")));
        assert_eq!(body["usage"]["completion_tokens"], 3);
    }
    let (_, body) = complete(&app, chat("Hi")).await;
    assert_eq!(body["usage"]["total_tokens"], 600, "without max_tokens the answer fills the context");

    // The bodies exceed the context by the number of prompt tokens, by `max_tokens`, and by their bytes. The last body
    // is refused without tokenizing.
    for (body, words) in [
        (chat(&"q ".repeat(700)), "the prompt is too long: "),
        (with(chat("Hi"), json!({"max_tokens": 600})), "600 more"),
        (chat(&"q".repeat(60_000)), "the prompt is too long: 60"),
    ] {
        let (status, body) = complete(&app, body).await;
        assert_eq!(
            (status, &body["error"]["code"]),
            (StatusCode::BAD_REQUEST, &json!("context_length_exceeded"))
        );
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
        // litellm recognizes the error by these words. langchain and Anthropic's clients look for "prompt is too long".
        assert!(message.contains("this model's maximum context length is 600 tokens"), "{message}");
    }
}

#[tokio::test]
async fn the_error_of_a_too_long_prompt_names_the_field_that_holds_it() {
    let app = app_that_says("ok");
    // The first text exceeds the limit by its tokens, the second by its bytes.
    for text in ["q ".repeat(700), "q".repeat(60_000)] {
        let turns = json!([{"role": "user", "content": text}]);
        for (path, fields, param) in [
            ("/v1/chat/completions", json!({"messages": turns}), "messages"),
            ("/v1/completions", json!({"prompt": text}), "prompt"),
            ("/v1/completions", json!({"prompt": ["a", text]}), "prompt"),
            ("/v1/responses", json!({"input": text}), "input"),
        ] {
            let body = with(json!({"model": MODEL}), fields).to_string();
            let (status, _, reply) = send_json(&app.router, post_to(path, body)).await;
            let error = &reply["error"];
            assert_eq!(
                (status.as_u16(), &error["code"]),
                (400, &json!("context_length_exceeded")),
                "{reply}"
            );
            assert_eq!(error["param"], param, "{path}: {reply}");
        }
    }
    for param in ["content", "prompt"] {
        let body = json!({param: "q".repeat(60_000)}).to_string();
        let (_, _, reply) = send_json(&app.router, post_to("/tokenize", body)).await;
        assert_eq!(reply["error"]["param"], param, "{reply}");
    }
}

#[tokio::test]
async fn a_prompt_longer_than_any_context_is_too_long_and_not_invalid() {
    let kv = KvLimits { block_size: 1024, ..kv_with(128, 32) };
    let limits = Limits { kv, max_context: 131_072, ..limits() };
    let options = Options { max_body_bytes: 16 << 20, ..OPTIONS };
    let app = app_with(limits, options, DEFAULTS, says(&[], END_OF_TURN));
    // One body has more text than the server ever tokenizes, even if it were few tokens. The other has more turns than
    // a template can render within its instruction limit, so the text must be refused before the template runs.
    let roles = ["user", "assistant"].iter().cycle();
    let turns: Vec<Value> = roles.take(130_000).map(|role| json!({"role": role, "content": "a"})).collect();
    for body in [chat(&"q".repeat((2 << 20) + 1)), with(chat(""), json!({"messages": turns}))] {
        let (status, answer) = complete(&app, body).await;
        let code = &answer["error"]["code"];
        assert_eq!((status.as_u16(), code), (400, &json!("context_length_exceeded")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            message.starts_with("the prompt is too long: ") && message.contains(" is 131072 tokens"),
            "{message}"
        );
    }
}

#[tokio::test]
async fn a_temperature_near_zero_is_greedy_also_as_the_models_default() {
    for (fields, default) in [(json!({"temperature": 1e-39}), 0.9), (json!({}), 1e-39), (json!({}), 9e-6)] {
        let seen: Arc<Mutex<Vec<Arc<SamplingParams>>>> = Arc::default();
        let record = Arc::clone(&seen);
        let script: Script = Box::new(move |_, draw| {
            record.lock().unwrap().push(Arc::clone(&draw.params));
            END_OF_TURN
        });
        let app =
            app_with(limits(), OPTIONS, SamplingOptions { temperature: Some(default), ..DEFAULTS }, script);
        assert_eq!(complete(&app, with(chat("Hi"), fields)).await.0, 200);
        assert_eq!(seen.lock().unwrap()[0].temperature, 0.0, "default {default}");
    }
}

#[tokio::test]
async fn absent_sampling_fields_take_the_models_defaults_and_seeds_are_kept() {
    let seen: Arc<Mutex<Vec<(SamplingParams, u64)>>> = Arc::default();
    let record = Arc::clone(&seen);
    let app = app(Box::new(move |_, draw| {
        record.lock().unwrap().push(((*draw.params).clone(), draw.seed));
        END_OF_TURN
    }));
    for fields in [
        json!({}),
        json!({}),
        json!({"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 7}),
        json!({"temperature": null, "top_p": 0, "top_k": -1, "seed": -2}),
        json!({"temperature": 1e-30, "top_k": 5.0, "seed": 18446744073709551614u64}),
        json!({"seed": 8, "presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 0.5}),
        json!({"seed": 8, "repeat_penalty": 1}),
        json!({"seed": -1}),
        json!({"seed": -1}),
    ] {
        let (status, body) = complete(&app, with(chat("Hi"), fields)).await;
        assert_eq!(status, 200, "{body}");
    }
    let seen = seen.lock().unwrap();
    let default = || SamplingParams {
        temperature: 0.9,
        top_k: 64,
        top_p: 0.95,
        min_p: 0.0,
        repetition_penalty: 1.25,
        stop_token_ids: vec![1, END_OF_TURN],
        ..SamplingParams::GREEDY
    };
    assert_eq!(seen[0].0, default());
    assert_ne!(seen[0].1, seen[1].1, "without a seed each answer has its own");
    let asked = SamplingParams { temperature: 0.5, top_k: 3, top_p: 0.25, min_p: 0.125, ..default() };
    assert_eq!(seen[2], (asked, 7));
    assert_eq!(
        seen[3],
        (SamplingParams { top_k: 1, top_p: 0.0, ..default() }, u64::MAX - 1),
        "top_p 0 takes the likeliest token"
    );
    assert_eq!(seen[4], (SamplingParams { temperature: 0.0, top_k: 5, ..default() }, u64::MAX - 1));
    let asked = &seen[5].0;
    let penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty);
    assert_eq!(penalties, (-1.5, 2.0, 0.5));
    assert_eq!(seen[6], (SamplingParams { repetition_penalty: 1.0, ..default() }, 8), "a name of llama.cpp");
    assert_ne!(seen[7].1, seen[8].1, "-1 asks for a random seed, as in llama.cpp, vLLM and Ollama");
}

#[tokio::test]
async fn fields_that_clients_send_in_addition_are_accepted() {
    let app = app_that_says("ok");
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    for fields in [
        json!({"custom": {"deep": [1, 2]}, "user": "u", "store": false, "reasoning_effort": "low"}),
        json!({"tools": tool, "tool_choice": "auto", "parallel_tool_calls": true}),
        json!({"tools": [], "tool_choice": "none", "functions": null}),
        json!({"n": 1, "logprobs": false, "top_logprobs": 0, "logit_bias": {}, "response_format": {"type": "text"}}),
        json!({"presence_penalty": 0, "frequency_penalty": 0.0, "repeat_penalty": 1, "logit_bias": {"5": 0}}),
        json!({"stop": null, "stream": null, "stream_options": null, "max_tokens": null, "modalities": ["text"]}),
        json!({"stream": false, "stream_options": null, "continue_final_message": false}),
    ] {
        assert_eq!(answer(&app, with(chat("Hi"), fields.clone())).await.0, "ok", "{fields}");
    }
    let user = json!({"role": "user", "content": "a"});
    let assistant = json!({"role": "assistant", "content": "b"});
    for messages in [
        json!([{"role": "system", "content": "s"}, user, user]),
        json!([{"role": "developer", "content": [{"type": "text", "text": "s"}]}, user]),
        json!([assistant, user]),
        json!([user, {"role": "assistant", "content": null}, user]),
        json!([user, {"role": "assistant", "content": "b", "tool_calls": []}, user, assistant]),
        json!([{"role": "system", "content": "only"}]),
        json!([{"role": "user", "content": ""}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        json!([user, {"role": "system", "content": "late"}, {"role": "user", "content": "c", "name": "n"}]),
    ] {
        let body = json!({"model": MODEL, "messages": messages});
        assert_eq!(answer(&app, body).await.0, "ok", "{messages}");
    }
    // The server ignores the content type, and it may be absent.
    let bare = Request::post("/v1/chat/completions").body(Body::from(chat("Hi").to_string())).unwrap();
    assert_eq!(send_json(&app.router, bare).await.0, 200);
}

#[tokio::test]
async fn bad_bodies_are_refused_with_the_name_of_the_field() {
    let app = app_that_says("ok");
    let body = |fields: Value| with(chat("Hi"), fields).to_string();
    let messages = |m: Value| body(json!({"messages": m}));
    let part = |p: Value| messages(json!([{"role": "user", "content": [p]}]));
    let begun = json!([{"role": "assistant", "content": "a"}]);
    let continued = json!({"messages": begun, "continue_final_message": true, "add_generation_prompt": true});
    let cases = [
        (String::new(), "", "invalid_json"),
        ("{\"model\": ".into(), "", "invalid_json"),
        ("[1]".into(), "", "invalid_json"),
        (format!("{}1", "[".repeat(10_000)), "", "invalid_json"),
        ("{}".into(), "messages", "missing_required_parameter"),
        (json!({"model": MODEL}).to_string(), "messages", "missing_required_parameter"),
        (body(json!({"model": 3})), "model", "invalid_value"),
        (body(json!({"model": "gpt-4"})), "model", "model_not_found"),
        (messages(json!([])), "messages", "invalid_value"),
        (messages(json!("Hi")), "messages", "invalid_value"),
        (messages(json!(["Hi"])), "messages[0]", "invalid_value"),
        (messages(json!([{"content": "Hi"}])), "messages[0].role", "missing_required_parameter"),
        (messages(json!([{"role": "wizard", "content": "Hi"}])), "messages[0].role", "invalid_value"),
        (messages(json!([{"role": "function", "content": "1"}])), "messages[0].role", "unsupported_value"),
        (messages(json!([{"role": "user"}])), "messages[0].content", "missing_required_parameter"),
        (messages(json!([{"role": "user", "content": 5}])), "messages[0].content", "invalid_value"),
        (part(json!("Hi")), "messages[0].content[0]", "invalid_value"),
        (part(json!({"type": "text"})), "messages[0].content[0].text", "missing_required_parameter"),
        (part(json!({"type": "text", "text": 1})), "messages[0].content[0].text", "invalid_value"),
        (
            part(json!({"type": "image_url"})),
            "messages[0].content[0].image_url",
            "missing_required_parameter",
        ),
        (
            part(json!({"type": "image_url", "image_url": 1})),
            "messages[0].content[0].image_url",
            "invalid_value",
        ),
        (
            part(json!({"type": "image_url", "image_url": "AA=="})),
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        (part(json!({"type": "input_audio"})), "messages[0].content[0].type", "unsupported_value"),
        (part(json!({"type": "smell"})), "messages[0].content[0].type", "invalid_value"),
        (body(json!({"stop": ["a", 7]})), "stop[1]", "invalid_value"),
        (body(json!({"stop": [""]})), "stop[0]", "invalid_value"),
        (
            body(json!({"stream_options": {"include_usage": 1}})),
            "stream_options.include_usage",
            "invalid_value",
        ),
        (body(json!({"logprobs": true, "top_logprobs": 21})), "top_logprobs", "invalid_value"),
        (body(json!({"logit_bias": {"5": "x"}})), "logit_bias.5", "invalid_value"),
        (body(json!({"logit_bias": {"5": 101}})), "logit_bias.5", "invalid_value"),
        (body(json!({"logit_bias": {"5": 1, "05": 2}})), "logit_bias.5", "invalid_value"),
        (body(json!({"logit_bias": {"hello": 1}})), "logit_bias.hello", "invalid_value"),
        (body(json!({"logit_bias": {"512": 1}})), "logit_bias.512", "invalid_value"),
        (body(json!({"min_tokens": 6, "max_tokens": 5})), "min_tokens", "invalid_value"),
        (body(json!({"response_format": {"type": "xml"}})), "response_format.type", "invalid_value"),
        (body(json!({"response_format": {}})), "response_format.type", "missing_required_parameter"),
        (body(json!({"modalities": ["text", "audio"]})), "modalities", "unsupported_value"),
        (body(continued), "continue_final_message", "invalid_value"),
        (body(json!({"chat_template_kwargs": "x"})), "chat_template_kwargs", "invalid_value"),
        (body(json!({"chat_template_kwargs": {"tools": []}})), "chat_template_kwargs.tools", "invalid_value"),
    ];
    let invalid = json!({
        "stream": ["yes"], "stream_options": [[], {}], "max_tokens": [0, -2, 1.5, "9"], "max_completion_tokens": [1e30],
        "temperature": [-0.1, 2.5, "hot"], "top_p": [1.1], "top_k": [-2], "min_p": [-1], "seed": [1.5, "7"],
        "stop": [7, ["a", "b", "c", "d", "e"], "x".repeat(5000)], "logprobs": [3], "top_logprobs": [2],
        "n": [0, 2], // this engine has room for one sequence
        "presence_penalty": [2.5], "frequency_penalty": [-3], "repetition_penalty": [0], "repeat_penalty": [-1.1],
        "logit_bias": [[5]], "ignore_eos": [1], "response_format": ["text"], "tools": [{}],
        "tool_choice": ["required", "maybe"], "continue_final_message": [true],
    });
    let invalid = each_value(&invalid).map(|(name, fields)| (body(fields), name, "invalid_value"));
    for (body, param, code) in cases.into_iter().chain(invalid) {
        let shown: String = body.chars().take(200).collect();
        let (status, _, value) = send_json(&app.router, post(body)).await;
        let error = &value["error"];
        assert_eq!(status, if code == "model_not_found" { 404 } else { 400 }, "{shown}: {value}");
        assert_eq!(error["param"].as_str().unwrap_or(""), param, "{shown}: {value}");
        assert_eq!(error["code"].as_str(), Some(code), "{shown}: {value}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().is_some_and(|m| m.contains(param) && m.len() < 300), "{value}");
    }
    assert_eq!(app.control.batches().len(), 0, "a bad request reached the engine");
}

#[tokio::test]
async fn requests_without_a_model_are_answered_and_other_names_are_refused() {
    let app = app_that_says("ok");
    let turns = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, status) in [
        ("/v1/chat/completions", json!({"messages": turns}), 200),
        ("/v1/completions", json!({"prompt": "Hi"}), 200),
        ("/v1/embeddings", json!({"input": "Hi"}), 200),
        ("/v1/responses", json!({"input": "Hi"}), 200),
        ("/v1/messages", json!({"messages": turns, "max_tokens": 5}), 200),
        ("/v1/messages/count_tokens", json!({"messages": turns}), 200),
        ("/tokenize", json!({"content": "Hi"}), 200),
        ("/tokenize", json!({"messages": turns}), 200),
        ("/detokenize", json!({"tokens": [2, 3]}), 200),
        ("/models/load", json!({}), 200),
        ("/models/unload", json!({}), 200),
    ] {
        let ask = async |more: Value| {
            let body = with(body.clone(), more).to_string();
            let (status, _, reply) = send_json(&app.router, post_to(path, body)).await;
            (status.as_u16(), reply)
        };
        for unnamed in [json!({}), json!({"model": null}), json!({"model": ""})] {
            let (got, reply) = ask(unnamed.clone()).await;
            assert_eq!(got, status, "{path} {unnamed}: {reply}");
            assert!(reply["model"].is_null() || reply["model"] == MODEL, "{path}: {reply}");
            assert_ne!(reply["error"]["code"], "missing_required_parameter", "{path}: {reply}");
        }
        for other in ["gpt-4", " ", "MAKERS/TINY-GEMMA", &"x".repeat(5000)] {
            let (got, reply) = ask(json!({"model": other})).await;
            assert_eq!(got, 404, "{path} {other}: {reply}");
            let message = reply["error"]["message"].as_str().expect("words");
            assert!(message.contains("does not exist") && message.len() < 200, "{path}: {message}");
        }
        let (got, reply) = ask(json!({"model": 3})).await;
        assert_eq!(got, 400, "{path}: {reply}");
        assert!(reply["error"]["message"].as_str().is_some_and(|m| m.starts_with("model: ")), "{reply}");
    }
}

#[tokio::test]
async fn unknown_routes_methods_and_large_bodies_are_json_errors() {
    let app = app_that_says("ok");
    for (request, status, code) in [
        (get("/v1/nothing"), 404, "not_found"),
        (get("/page/nothing"), 404, "not_found"),
        (get("/v1/chat/completions"), 405, "method_not_allowed"),
        (Request::delete("/v1/models").body(Body::empty()).unwrap(), 405, "method_not_allowed"),
        (get("/v1/models/other"), 404, "model_not_found"),
        (get("/v1/models/%ff"), 400, "invalid_value"),
        (post(vec![b' '; OPTIONS.max_body_bytes + 1]), 413, "body_too_large"),
        (post(vec![0xff; 10]), 400, "invalid_json"),
    ] {
        let path = request.uri().clone();
        let (got, headers, body) = send_json(&app.router, request).await;
        assert_eq!((got.as_u16(), body["error"]["code"].as_str()), (status, Some(code)), "{path}: {body}");
        assert!(headers.contains_key("x-request-id"), "{path}");
    }
}

#[tokio::test]
async fn models_are_listed_by_the_same_id_before_and_after_loading() {
    let loading = api::router(Server::new(MODEL, OPTIONS, AccessPolicy::default()));
    let ready = app_that_says("ok").router;
    for (router, state) in [(&loading, "loading"), (&ready, "loaded")] {
        let (status, _, list) = send_json(router, get("/v1/models")).await;
        assert_eq!((status, &list["object"]), (StatusCode::OK, &json!("list")));
        assert_eq!(list["data"].as_array().map(Vec::len), Some(1));
        let (_, _, one) = send_json(router, get("/v1/models/makers/tiny-gemma")).await;
        assert_eq!(one, list["data"][0]);
        assert_eq!((&one["id"], &one["object"]), (&json!(MODEL), &json!("model")));
        assert!(one["created"].is_u64() && one["owned_by"].is_string());
        // llama.cpp's clients read this field.
        assert_eq!(one["status"]["value"], state);
        assert_eq!(send_json(router, get("/models")).await.2, list);
        let ask =
            |path, model| Request::post(path).body(Body::from(json!({"model": model}).to_string())).unwrap();
        let (status, _, body) = send_json(router, ask("/models/load", MODEL)).await;
        assert_eq!((status, body), (StatusCode::OK, json!({"success": true})), "nothing to load");
        let (status, _, body) = send_json(router, ask("/models/unload", MODEL)).await;
        let expected = if state == "loading" { (503, json!("model_loading")) } else { (200, json!(null)) };
        assert_eq!((status.as_u16(), body["error"]["code"].clone()), expected, "{body}");
        for path in ["/models/load", "/models/unload"] {
            let (got, _, body) = send_json(router, ask(path, "another")).await;
            assert_eq!(
                (got.as_u16(), &body["error"]["code"]),
                (404, &json!("model_not_found")),
                "{path}: {body}"
            );
        }
    }
}

#[tokio::test]
async fn background_requests_wait_until_no_interactive_request_waits() {
    let app = app_that_says("Paris.");
    app.control.allow(0);
    let ended = Arc::new(Mutex::new(Vec::new()));
    let begin = |name: &'static str, request| {
        let (router, ended) = (app.router.clone(), Arc::clone(&ended));
        tokio::spawn(async move {
            let (status, _, body) = send_json(&router, request).await;
            assert_eq!(status, StatusCode::OK, "{name}: {body}");
            ended.lock().unwrap().push(name);
        })
    };
    let one_runs_and_wait = async |n| {
        let is_so = || !app.control.batches().is_empty() && app.engine.stats().waiting >= n;
        until(&format!("one request runs, and {n} wait"), is_so).await;
    };
    let prompt = "### Task:\nName it.\nFormat: { \"title\": \"\" }\n<chat_history>\n</chat_history>";
    let mut tagged = post(chat("Sort these.").to_string());
    tagged.headers_mut().insert("x-unicorn-priority", "background".parse().unwrap());
    // The title's request runs in the only slot when the chat request arrives.
    let title = begin("title", post(chat(prompt).to_string()));
    one_runs_and_wait(0).await;
    let tagged = begin("tagged", tagged);
    one_runs_and_wait(1).await;
    let interactive = begin("chat", post(chat("What is the capital of France?").to_string()));
    one_runs_and_wait(2).await;
    app.control.release();
    for answer in [title, tagged, interactive] {
        answer.await.expect("answered");
    }
    assert_eq!(*ended.lock().unwrap(), ["chat", "title", "tagged"]);

    let (_, _, text) = send(&app.router, get("/metrics")).await;
    let text = String::from_utf8(text).expect("text");
    for (class, task) in [("interactive", "none"), ("background", "title_generation"), ("background", "none")]
    {
        let labels = format!("{{model_name=\"{MODEL}\",class=\"{class}\",task=\"{task}\"}}");
        assert!(text.contains(&format!("unicorn_requests_total{labels} 1\n")), "{class} {task}: {text}");
    }
    let mut wrong = post(chat("Hi").to_string());
    wrong.headers_mut().insert("x-unicorn-priority", "soon".parse().unwrap());
    let (status, _, body) = send_json(&app.router, wrong).await;
    assert_eq!((status.as_u16(), &body["error"]["param"]), (400, &json!("X-Unicorn-Priority")), "{body}");
}

#[tokio::test]
async fn health_and_chat_report_the_state_of_the_engine() {
    let loading = api::router(Server::new(MODEL, OPTIONS, AccessPolicy::default()));
    let (status, _, body) = send_json(&loading, get("/health")).await;
    assert_eq!((status.as_u16(), &body["status"]), (503, &json!("loading")));
    let (status, headers, body) = send_json(&loading, post(chat("Hi").to_string())).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (503, &json!("model_loading")));
    assert!(headers[header::RETRY_AFTER].to_str().unwrap().parse::<u32>().unwrap() > 0);

    let app = app_that_says("ok");
    assert_eq!(send_json(&app.router, get("/health")).await.0, 200);
    app.engine.drain();
    let (status, _, body) = send_json(&app.router, get("/health")).await;
    assert_eq!((status.as_u16(), &body["status"]), (503, &json!("draining")));
    let (status, body) = complete(&app, chat("Hi")).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (503, &json!("shutting_down")));
}

#[tokio::test]
async fn a_lost_device_is_503_and_an_error_event_in_a_stream_that_has_begun() {
    let app = app_that_says("One, two, three");
    app.control.fail_wait_at(4);
    let (lines, _) = stream(&app, with(chat("Hi"), json!({"stream": true}))).await;
    let chunks = parse(&lines);
    let error = &chunks.last().unwrap()["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!("engine_lost"), &json!("server_error")));
    assert!(error["message"].as_str().unwrap().contains("ring timeout"));

    let (status, body) = complete(&app, chat("Hi")).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (503, &json!("engine_lost")));
    let (status, _, body) = send_json(&app.router, get("/health")).await;
    assert_eq!((status.as_u16(), &body["status"]), (503, &json!("lost")));
}

#[tokio::test]
async fn an_internal_error_of_the_engine_is_503_and_not_a_lost_device() {
    let app = app(Box::new(|_, _| panic!("a bug, made for this test")));
    for _ in 0..2 {
        let (status, body) = complete(&app, chat("Hi")).await;
        assert_eq!((status.as_u16(), &body["error"]["code"]), (503, &json!("engine_failed")));
        assert_eq!(body["error"]["message"], "internal error in the engine (see the log); restart unicorn");
    }
    let (status, _, body) = send_json(&app.router, get("/health")).await;
    assert_eq!((status.as_u16(), &body["status"]), (503, &json!("failed")));
    let (_, _, body) = send_json(&app.router, get("/status")).await;
    assert_eq!((&body["status"], &body["finished"]["error"]), (&json!("failed"), &json!(1)));
}

#[tokio::test]
async fn logits_that_are_not_finite_are_500_for_their_request_only() {
    let app = app_that_says("ok");
    app.control.not_finite_at(0);
    let (status, headers, body) = send_json(&app.router, post(chat("Hi").to_string())).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (500, &json!("logits_not_finite")));
    assert_eq!(headers["x-should-retry"], "false", "SDKs send a request again after a 500");
    assert_eq!(answer(&app, chat("Hi")).await.0, "ok");
    assert_eq!(send_json(&app.router, get("/health")).await.0, 200);
}

#[tokio::test]
async fn a_full_queue_is_429_with_retry_after() {
    let app = app_that_says("ok");
    app.control.allow(0);
    let mut waiting: Vec<_> = Vec::new();
    for i in 0..3 {
        let router = app.router.clone();
        waiting.push(tokio::spawn(async move { send_json(&router, post(chat("Hi").to_string())).await }));
        if i == 0 {
            submitted(&app, 1).await;
        }
    }
    until("the queue is full", || app.engine.stats().waiting == 2).await;
    let (status, headers, body) = send_json(&app.router, post(chat("Hi").to_string())).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (429, &json!("queue_full")));
    assert!(headers.contains_key(header::RETRY_AFTER));
    assert_eq!(send_json(&app.router, get("/v1/models")).await.0, 200, "a busy engine delays no other route");
    app.control.release();
    for request in waiting {
        assert_eq!(request.await.unwrap().0, 200);
    }
}

#[tokio::test]
async fn all_requests_of_one_clients_burst_are_answered() {
    // As many requests as one client may have by default. The default queue has room for all of them.
    let policy = AccessPolicy::default();
    let n = policy.requests_per_client;
    let ids = tokenizer().encode("ok", false).expect("encodes");
    let server = Server::new(MODEL, OPTIONS, policy);
    let app = loaded_with_queue(256, server, limits(), DEFAULTS, says(&ids, END_OF_TURN));
    let burst = (0..n).map(|_| send_json(&app.router, post(chat("Hi").to_string())));
    for (status, _, body) in futures::future::join_all(burst).await {
        assert_eq!(status, 200, "{body}");
    }
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn the_number_of_bodies_that_never_end_is_limited() {
    let app = app_that_says("ok");
    let stalled = || Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let mut arriving: Vec<_> = Vec::new();
    let refused = loop {
        let mut request = Box::pin(app.router.clone().oneshot(post(stalled())));
        match futures::poll!(&mut request) {
            std::task::Poll::Pending => arriving.push(request),
            std::task::Poll::Ready(response) => break response.unwrap(),
        }
        assert!(arriving.len() < 1000, "the number of bodies that are read at the same time is not limited");
    };
    assert_eq!(refused.status(), 429);
    assert_eq!(send_json(&app.router, get("/health")).await.0, 200);
    drop(arriving);
    assert_eq!(answer(&app, chat("Hi")).await.0, "ok");

    // A body that makes no progress for the allowed time is refused.
    let (status, _, body) = send_json(&app.router, post(stalled())).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (408, &json!("body_timeout")));
}

#[tokio::test]
async fn a_body_that_arrives_too_slowly_is_refused() {
    let options = Options { body_stall: 4 * HANG, body_grace: Duration::from_millis(50), ..OPTIONS };
    let app = app_with(limits(), options, DEFAULTS, says(&[], END_OF_TURN));
    let byte = |()| async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        Some((Ok::<_, std::io::Error>(vec![b' ']), ()))
    };
    let dribble = post(Body::from_stream(futures::stream::unfold((), byte)));
    let (status, _, body) = send_json(&app.router, dribble).await;
    assert_eq!((status.as_u16(), &body["error"]["code"]), (408, &json!("body_timeout")));
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("too slowly") && message.contains("4096 bytes per second"), "{message}");
}

#[tokio::test]
async fn a_request_that_waits_too_long_to_be_read_is_503() {
    let options = Options { body_stall: 4 * HANG, permit_timeout: Duration::from_millis(50), ..OPTIONS };
    let app = app_with(limits(), options, DEFAULTS, says(&[], END_OF_TURN));
    let stalled = || Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>());
    let mut reading: Vec<_> =
        (0..16).map(|_| Box::pin(app.router.clone().oneshot(post(stalled())))).collect();
    for request in &mut reading {
        assert!(futures::poll!(request).is_pending());
    }
    for (path, status, word) in
        [("/v1/chat/completions", 503, "no_turn"), ("/v1/messages", 503, "overloaded_error")]
    {
        let waiting = post_to(path, chat("Hi").to_string());
        let (got, headers, body) = send_json(&app.router, waiting).await;
        assert_eq!(got.as_u16(), status, "{body}");
        assert!(headers[header::RETRY_AFTER].to_str().unwrap().parse::<u32>().unwrap() > 0);
        let error = &body["error"];
        assert!(error["code"] == word || error["type"] == word, "{body}");
        assert!(error["message"].as_str().unwrap().contains("busy reading earlier requests"), "{body}");
    }
    drop(reading);
    assert_eq!(complete(&app, chat("Hi")).await.0, 200);
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn a_silent_stream_carries_comments() {
    let app = app_that_says("ok");
    app.control.allow(0);
    let control = app.control.clone();
    let release = tokio::spawn(async move {
        tokio::time::sleep(OPTIONS.keep_alive * 10).await;
        control.release();
    });
    let (lines, comments) = stream(&app, with(chat("Hi"), json!({"stream": true}))).await;
    assert_eq!(content(&parse(&lines)), "ok");
    assert!(comments > 0, "nothing was sent while the prompt was processed");
    release.await.unwrap();
}

#[tokio::test]
async fn the_clients_request_id_is_used_if_it_is_valid() {
    let app = app_that_says("ok");
    let with_id = |id: &str| Request::get("/health").header("x-request-id", id).body(Body::empty()).unwrap();
    assert_eq!(send(&app.router, with_id("abc-1")).await.1["x-request-id"], "abc-1");
    for unsound in ["has space", &"x".repeat(200)] {
        let made = &send(&app.router, with_id(unsound)).await.1["x-request-id"];
        assert_eq!(made.len(), 16);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_ends_within_its_time_limit() {
    let app = app(says(&[], 300));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = async {
        drop(stopped.await);
        Duration::from_millis(50)
    };
    let serving = tokio::spawn(api::serve(vec![listener], Arc::clone(&app.server), CONNECTIONS, shutdown));

    let request = |body: Value| {
        let body = body.to_string();
        format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    // One request does not end before the shutdown, and one connection is idle.
    app.control.allow(app.control.batches().len() + 1);
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(request(with(chat("Hi"), json!({"stream": true}))).as_bytes()).unwrap();
    let _idle = TcpStream::connect(address).unwrap();
    let mut first = [0; 64];
    client.set_read_timeout(Some(HANG)).unwrap();
    client.read_exact(&mut first).unwrap();
    assert!(first.starts_with(b"HTTP/1.1 200"));
    stop.send(()).unwrap();
    tokio::time::timeout(HANG, serving).await.expect("shutdown is bounded").expect("and clean");
    app.control.release();
    assert!(app.engine.join(HANG));
}
