//! Fields of vLLM and llama.cpp that chats and completions support: allowed and banned tokens, stop tokens, prompt
//! truncation, and token information in answers.

use serde_json::{Value, json};
use unicorn::model::Limits;

use crate::support::app::{
    App, DEFAULTS, END_OF_TURN, OPTIONS, app, app_that_says, app_that_shows_its_prompt, app_with, limits,
};
use crate::support::fake_runner::says;
use crate::support::http::{
    answer, assert_all_free, chat, complete, content, parse, post_to, send_json, stream,
};
use crate::support::json::with;
use crate::support::tokenizers::tokenizer;

fn encoded(text: &str) -> Vec<u32> {
    tokenizer().encode(text, false).expect("encodes")
}

async fn completion(app: &App, fields: Value) -> (u16, Value) {
    let body = with(json!({"prompt": "Hi", "max_tokens": 40}), fields);
    let (status, _, answer) = send_json(&app.router, post_to("/v1/completions", body.to_string())).await;
    (status.as_u16(), answer)
}

/// The error message for a chat with these fields.
async fn refusal(app: &App, fields: Value) -> String {
    let (status, body) = complete(app, with(chat("Hi"), fields)).await;
    assert_eq!(status, 400, "{body}");
    body["error"]["message"].as_str().expect("a message").to_owned()
}

#[tokio::test]
async fn a_stop_token_ends_an_answer_and_is_not_in_its_text() {
    let text = "One, two, three";
    let ids = encoded(text);
    let app = app_that_says(text);
    let before = tokenizer().decode(&ids[..2], false);
    let stop = json!({"stop_token_ids": [ids[2]]});
    assert_eq!(answer(&app, with(chat("Count"), stop.clone())).await, (before, "stop".to_owned()));
    // `ignore_eos` bans only the model's own end tokens.
    let both = with(stop, json!({"ignore_eos": true, "max_tokens": 20}));
    let (_, body) = complete(&app, with(chat("Count"), both)).await;
    assert_eq!(
        (&body["choices"][0]["finish_reason"], &body["usage"]["completion_tokens"]),
        (&json!("stop"), &json!(3))
    );
    // Before min_tokens, the stop token is banned, so the model must generate another token.
    let later =
        json!({"stop_token_ids": [ids[2]], "min_tokens": 4, "max_tokens": 8, "return_token_ids": true});
    let (_, body) = complete(&app, with(chat("Count"), later)).await;
    let said: Vec<u64> = serde_json::from_value(body["choices"][0]["token_ids"].clone()).unwrap();
    assert!(said.len() >= 4 && !said[..4].contains(&u64::from(ids[2])), "{said:?}");
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn an_answer_has_only_allowed_tokens() {
    let text = "One, two";
    let ids = encoded(text);
    let app = app_that_says(text);
    let allowed: Vec<u32> = vec![ids[0], ids[1]];
    let fields = json!({"allowed_token_ids": allowed, "max_tokens": 12, "return_token_ids": true});
    let (_, body) = complete(&app, with(chat("Count"), fields)).await;
    let choice = &body["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], choice["token_ids"].as_array().unwrap().len()),
        (&json!("length"), 12)
    );
    assert!(
        choice["token_ids"].as_array().unwrap().iter().all(|id| allowed.iter().any(|may| id == may)),
        "{choice}"
    );
    // Both constraints hold together with a grammar. If no token is left, the error says so.
    let none = json!({"allowed_token_ids": [ids[0]], "guided_choice": ["\u{1f984}"]});
    let problem = refusal(&app, none).await;
    assert!(
        problem.ends_with("grammar, allowed_token_ids and bad_words together leave no token"),
        "{problem}"
    );
}

#[tokio::test]
async fn a_bad_word_is_never_generated() {
    let text = "One, two, three";
    let app = app_that_says(text);
    for word in ["two", "two, three", "O", "One", "e", ", t", "three"] {
        let fields = json!({"bad_words": [word], "max_tokens": 30});
        let (said, _) = answer(&app, with(chat("Count"), fields)).await;
        assert!(!said.contains(word), "{word:?} is in {said:?}");
    }
    let (said, _) = answer(&app, with(chat("Count"), json!({"bad_words": ["four"], "max_tokens": 30}))).await;
    assert_eq!(said, text, "a word that does not occur has no effect");
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_prompt_is_truncated_at_its_beginning() {
    let (app, seen) = app_that_shows_its_prompt("Yes");
    let (_, whole) = completion(&app, json!({"prompt": "One, two, three", "return_token_ids": true})).await;
    let whole: Vec<u32> = serde_json::from_value(whole["choices"][0]["prompt_token_ids"].clone()).unwrap();
    assert_eq!(*seen.lock().unwrap(), whole);
    let tail = whole[whole.len() - 3..].to_vec();
    for prompt in [json!("One, two, three"), json!(whole)] {
        let cut = json!({"prompt": prompt, "truncate_prompt_tokens": 3});
        let (status, _) = completion(&app, cut).await;
        assert_eq!((status, &*seen.lock().unwrap()), (200, &tail));
    }
    let (status, _) =
        complete(&app, with(chat("One, two, three"), json!({"truncate_prompt_tokens": 2}))).await;
    assert_eq!((status.as_u16(), seen.lock().unwrap().len()), (200, 2));
    // -1 = what the context holds in addition to the answer. Without it, this prompt is refused.
    let long = "One, two, three. ".repeat(400);
    assert_eq!(completion(&app, json!({"prompt": long})).await.0, 400);
    let (status, body) = completion(&app, json!({"prompt": long, "truncate_prompt_tokens": -1})).await;
    assert_eq!((status, seen.lock().unwrap().len()), (200, limits().max_context - 40), "{body}");
    assert_eq!(
        refusal(&app, json!({"truncate_prompt_tokens": 0})).await,
        "truncate_prompt_tokens: expected an integer from 1 to 4294967295, got 0"
    );
    let embedded = json!({"input": [long, "Hi"], "truncate_prompt_tokens": -1});
    let (status, _, body) = send_json(&app.router, post_to("/v1/embeddings", embedded.to_string())).await;
    assert_eq!((status.as_u16(), body["data"].as_array().map(Vec::len)), (200, Some(2)), "{body}");
}

#[tokio::test]
async fn token_ids_are_returned_with_and_without_streaming() {
    // Letters outside the vocabulary are several byte tokens.
    let text = "Größe: ½";
    let ids: Vec<u32> = encoded(text).into_iter().chain([END_OF_TURN]).collect();
    let app = app_that_says(text);
    let body = with(chat("Hi"), json!({"return_token_ids": true}));
    let (_, whole) = complete(&app, body.clone()).await;
    assert_eq!(whole["choices"][0]["token_ids"], json!(ids));
    let prompt = whole["prompt_token_ids"].as_array().expect("the prompt").len();
    assert_eq!(json!(prompt), whole["usage"]["prompt_tokens"]);
    let (lines, _) = stream(&app, with(body, json!({"stream": true}))).await;
    let chunks = parse(&lines);
    assert_eq!(chunks[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    let told = |chunks: &[Value]| -> Vec<Value> {
        chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array().cloned())
            .flatten()
            .collect()
    };
    assert_eq!(
        (told(&chunks), content(&chunks)),
        (ids.iter().map(|id| json!(id)).collect(), text.to_owned())
    );

    let (_, whole) = completion(&app, json!({"return_token_ids": true})).await;
    assert_eq!(whole["choices"][0]["token_ids"], json!(ids));
    let (_, none) = completion(&app, json!({})).await;
    assert!(
        none["choices"][0].get("token_ids").is_none() && none["choices"][0].get("prompt_token_ids").is_none()
    );
}

#[tokio::test]
async fn each_chunk_has_usage_and_timings_if_requested() {
    let app = app_that_says("One, two, three");
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let fields = json!({"stream": true, "stream_options": options, "timings_per_token": true});
    let (lines, _) = stream(&app, with(chat("Count"), fields)).await;
    let chunks = parse(&lines);
    let (first, last) = (&chunks[0]["usage"], &chunks.last().unwrap()["usage"]);
    assert_eq!((&first["prompt_tokens"], &first["completion_tokens"]), (&last["prompt_tokens"], &json!(0)));
    let texts: Vec<&Value> =
        chunks.iter().filter(|c| c["choices"][0]["delta"]["content"].is_string()).collect();
    assert!(texts.len() > 2, "{chunks:?}");
    let mut last = 0;
    for chunk in texts {
        let so_far = chunk["usage"]["completion_tokens"].as_u64().expect("a number");
        assert!(so_far > last, "{chunk}");
        assert_eq!(chunk["timings"]["predicted_n"], so_far);
        last = so_far;
    }
    let (lines, _) = stream(&app, with(chat("Count"), json!({"stream": true}))).await;
    let chunks = parse(&lines);
    assert_eq!(
        chunks.iter().filter(|chunk| chunk.get("timings").is_some()).count(),
        1,
        "only the last chunk"
    );
}

#[tokio::test]
async fn a_limit_of_minus_one_means_the_rest_of_the_context() {
    let small = Limits { max_context: 100, ..limits() };
    let app = app_with(small, OPTIONS, DEFAULTS, says(&[], 300));
    for fields in [
        json!({"max_tokens": -1}),
        json!({"n_predict": -1}),
        json!({"max_completion_tokens": -1, "max_tokens": 3}),
    ] {
        let (_, body) = complete(&app, with(chat("Hi"), fields.clone())).await;
        assert_eq!(
            (&body["usage"]["total_tokens"], &body["choices"][0]["finish_reason"]),
            (&json!(100), &json!("length")),
            "{fields}"
        );
    }
    let (_, body) = completion(&app, json!({"max_tokens": -1})).await;
    assert_eq!(body["usage"]["total_tokens"], 100);
    for (fields, n) in [(json!({"n_predict": 5}), 5), (json!({"n_predict": 5, "max_tokens": 7}), 7)] {
        let (_, body) = complete(&app, with(chat("Hi"), fields.clone())).await;
        assert_eq!(body["usage"]["completion_tokens"], n, "{fields}");
    }
    let (_, body) = completion(&app, json!({"max_tokens": null, "n_predict": 5})).await;
    assert_eq!(body["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn the_llama_cpp_fields_grammar_and_json_schema_constrain_an_answer() {
    let app = app(says(&[], END_OF_TURN));
    let gbnf = json!({"grammar": "root ::= \"yes\" | \"no\""});
    for body in [complete(&app, with(chat("Well?"), gbnf.clone())).await.1, completion(&app, gbnf).await.1] {
        let choice = &body["choices"][0];
        let said = choice["message"]["content"].as_str().or(choice["text"].as_str()).expect("a text");
        assert!(["yes", "no"].contains(&said), "{said}");
    }
    let schema = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false});
    let (said, _) = answer(&app, with(chat("Well?"), json!({"json_schema": schema}))).await;
    assert_eq!(serde_json::from_str::<Value>(&said).expect("JSON"), json!({"a": 1}));
    assert_eq!(
        complete(&app, with(chat("Hi"), json!({"grammar": ""}))).await.0,
        200,
        "an empty grammar is no grammar"
    );
    let problem = refusal(&app, json!({"grammar": "root ::= \"yes"})).await;
    assert!(problem.starts_with("grammar: ") && problem.contains("line 1"), "{problem}");
}

#[tokio::test]
async fn tokens_of_a_chat_and_of_a_responses_input_are_counted() {
    let app = app_that_says("Hello");
    let count = async |route: &str, body: Value| {
        let (status, _, answer) = send_json(&app.router, post_to(route, body.to_string())).await;
        (status.as_u16(), answer)
    };
    let tool = json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}});
    for fields in [json!({}), json!({"tools": [tool]})] {
        let body = with(chat("How many tokens?"), fields);
        let (_, answered) = complete(&app, body.clone()).await;
        let expected =
            json!({"object": "response.input_tokens", "input_tokens": answered["usage"]["prompt_tokens"]});
        for route in ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"] {
            assert_eq!(count(route, body.clone()).await, (200, expected.clone()));
        }
    }
    let first = json!({"input": "How many tokens?", "instructions": "Count."});
    let (_, answered) = count("/v1/responses", first.clone()).await;
    let counted = count("/v1/responses/input_tokens", first).await;
    assert_eq!(counted.1["input_tokens"], answered["usage"]["input_tokens"]);
    let next = json!({"input": "And now?", "previous_response_id": answered["id"]});
    let (_, after) = count("/responses/input_tokens", next.clone()).await;
    let (_, answered) = count("/v1/responses", next).await;
    assert_eq!(after["input_tokens"], answered["usage"]["input_tokens"]);
    let (status, error) = count("/v1/responses/input_tokens", json!({})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("input")));
}

#[tokio::test]
async fn invalid_values_are_refused_with_the_field_and_what_is_expected() {
    let app = app_that_says("ok");
    let usage = json!({"stream_options": {"include_usage": true}});
    for (fields, problem) in [
        (json!({"stop_token_ids": [3, 512]}), "stop_token_ids[1]: expected a token id below 512, got 512"),
        (
            json!({"allowed_token_ids": []}),
            "allowed_token_ids: expected at least one item, got an empty list",
        ),
        (json!({"allowed_token_ids": [512]}), "allowed_token_ids[0]: expected a token id below 512, got 512"),
        (json!({"bad_words": ["a", ""]}), "bad_words[1]: expected 1 to 1024 bytes, got 0"),
        (json!({"n_predict": 0}), "n_predict: expected an integer from 1 to 4294967295, got 0"),
        (json!({"n_predict": -2}), "n_predict: expected an integer from 1 to 4294967295, got -2"),
        (
            json!({"grammar": "root ::= \"yes\"", "json_schema": {}}),
            "json_schema: cannot be used together with grammar",
        ),
        (usage.clone(), "stream_options: expected stream to be true as well"),
        (with(usage, json!({"stream": false})), "stream_options: expected stream to be true as well"),
    ] {
        assert_eq!(refusal(&app, fields.clone()).await, problem, "{fields}");
    }
}
