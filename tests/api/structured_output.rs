//! Structured output over HTTP and the scripted runner: answers that follow a schema, a regex, a grammar or a choice.

use serde_json::{Value, json};
use unicorn::model::Limits;

use crate::support::app::{App, DEFAULTS, END_OF_TURN, OPTIONS, app, app_that_says, app_with, limits};
use crate::support::fake_runner::{Script, says};
use crate::support::http::{answer, assert_all_free, chat, complete, content, parse, stream};
use crate::support::json::with;
use crate::support::tokenizers::tokenizer;

/// A model that would end every answer immediately.
fn app_that_says_nothing() -> App {
    app(Box::new(|_, _| END_OF_TURN))
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

fn format_of(schema: Value, strict: bool) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}})
}

fn content_of(body: &Value) -> Value {
    let text = body["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{body}"));
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"))
}

#[tokio::test]
async fn a_valid_answer_is_unchanged_with_and_without_streaming() {
    let text = "{\"name\": \"Größe\",\n  \"age\": 7}";
    let app = app_that_says(text);
    for fields in [
        format_of(person(), true),
        format_of(person(), false),
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_object", "schema": person()}}),
        json!({"guided_json": person()}),
        json!({"guided_json": person().to_string()}),
        json!({"structured_outputs": {"json": person()}}),
        json!({"structured_outputs": {"json_object": true, "disable_any_whitespace": false}}),
        json!({"guided_choice": ["other", text]}),
        json!({"structured_outputs": {"regex": "(?s)[{].*[}]"}}),
        json!({"guided_grammar": "start: \"{\" /[^}]+/ \"}\""}),
    ] {
        let body = with(chat("Who?"), fields.clone());
        assert_eq!(answer(&app, body.clone()).await, (text.to_owned(), "stop".to_owned()), "{fields}");
        let (lines, _) = stream(&app, with(body, json!({"stream": true}))).await;
        assert_eq!(content(&parse(&lines)), text, "{fields}");
    }
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_model_that_says_something_else_must_follow_the_format() {
    let app = app_that_says("Sure! Here is what you asked for: nothing.");
    let one_of = json!({"enum": [{"a": [1, "x"]}, {"b": null}]});
    let (status, body) = complete(&app, with(chat("Hi"), format_of(one_of, true))).await;
    assert_eq!((status.as_u16(), &body["choices"][0]["finish_reason"]), (200, &json!("stop")), "{body}");
    assert!([json!({"a": [1, "x"]}), json!({"b": null})].contains(&content_of(&body)), "{body}");

    let silent = app_that_says_nothing();
    for fields in [
        json!({"guided_choice": ["yes", "no"]}),
        json!({"guided_regex": "yes|no"}),
        // The end of the grammar ends the answer, even if the answer should be longer.
        json!({"guided_choice": ["yes", "no"], "min_tokens": 200}),
        json!({"guided_choice": ["yes", "no"], "ignore_eos": true}),
    ] {
        let (text, reason) = answer(&silent, with(chat("Is it?"), fields.clone())).await;
        assert!(["yes", "no"].contains(&text.as_str()) && reason == "stop", "{fields}: {text:?}, {reason}");
    }
}

#[tokio::test]
async fn min_tokens_makes_an_answer_longer_if_its_grammar_allows_it() {
    let silent = app_that_says_nothing();
    let ask = async |fields: Value| {
        let (status, body) =
            complete(&silent, with(chat("Count"), with(json!({"guided_regex": "[0-9]*"}), fields))).await;
        assert_eq!(status, 200, "{body}");
        let reason = body["choices"][0]["finish_reason"].as_str().unwrap().to_owned();
        (body["choices"][0]["message"]["content"].as_str().unwrap().len(), reason)
    };
    assert_eq!(ask(json!({})).await, (0, "stop".into()));
    assert_eq!(ask(json!({"min_tokens": 5})).await, (5, "stop".into()));
    assert_eq!(ask(json!({"min_tokens": 5, "max_tokens": 5})).await, (5, "length".into()));
    assert_eq!(ask(json!({"ignore_eos": true, "max_tokens": 9})).await, (9, "length".into()));
}

#[tokio::test]
async fn max_tokens_and_stop_strings_truncate_json_like_text() {
    let text = "{\"name\": \"Ada, Lady\", \"age\": 36}";
    let app = app_that_says(text);
    let body = with(chat("Who?"), format_of(json!({"type": "object"}), true));
    let (cut, reason) = answer(&app, with(body.clone(), json!({"max_tokens": 6}))).await;
    assert!(reason == "length" && text.starts_with(&cut) && cut.len() < text.len(), "{cut:?}, {reason}");
    let stopped = ("{\"name\": \"Ada".to_owned(), "stop".to_owned());
    assert_eq!(answer(&app, with(body, json!({"stop": ", Lady"}))).await, stopped);
}

#[tokio::test]
async fn each_of_n_answers_has_its_own_grammar_state() {
    let limits = Limits { max_sequences: 3, max_draws: 3, ..limits() };
    let texts = ["{\"name\": \"A\", \"age\": 1}", "{ \"name\": \"\",\n\"age\": 150}", "not JSON"];
    let mut scripts = texts.map(|text| says(&tokenizer().encode(text, false).unwrap(), END_OF_TURN));
    let script: Script = Box::new(move |tokens, draw| scripts[draw.seed as usize - 7](tokens, draw));
    let app = app_with(limits, OPTIONS, DEFAULTS, script);
    let fields = with(json!({"n": 3, "seed": 7, "max_tokens": 60}), format_of(person(), true));
    let (status, body) = complete(&app, with(chat("Who?"), fields)).await;
    assert_eq!(status, 200, "{body}");
    for (choice, text) in body["choices"].as_array().unwrap().iter().zip(&texts[..2]) {
        assert_eq!(choice["message"]["content"], *text);
    }
    let third = body["choices"][2]["message"]["content"].as_str().unwrap();
    assert!(third.starts_with('{'), "{third}");
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn a_grammar_that_becomes_too_complex_during_an_answer_is_an_error() {
    let a = tokenizer().encode("a", false).unwrap()[0];
    let app = app(Box::new(move |_, _| a));
    // This text can be parsed in a very large number of ways.
    let ways: Vec<String> = (2..12).map(|n| vec!["s"; n].join(" ")).collect();
    let grammar = format!("start: s\ns: {} | \"a\"", ways.join(" | "));
    let fields = json!({"guided_grammar": grammar, "ignore_eos": true});
    let body = with(chat("Hi"), fields);
    let (status, answered) = complete(&app, body.clone()).await;
    let error = &answered["error"];
    assert_eq!((status.as_u16(), &error["code"]), (400, &json!("grammar_failed")), "{answered}");
    assert!(error["message"].as_str().is_some_and(|m| m.len() < 300 && !m.contains('\n')), "{error}");
    let (lines, _) = stream(&app, with(body, json!({"stream": true}))).await;
    assert_eq!(parse(&lines).last().unwrap()["error"]["code"], "grammar_failed");
    assert_all_free(&app.engine).await;
}

#[tokio::test]
async fn unsupported_formats_are_refused_with_the_field() {
    let app = app_that_says("ok");
    let format = |schema: Value| format_of(schema, true);
    for (fields, param, named) in [
        (json!({"response_format": {}}), "response_format.type", "required"),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type", "yaml"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema", "required"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "response_format.json_schema.schema",
            "required",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}}),
            "response_format.json_schema.strict",
            "true or false",
        ),
        (format(json!({"not": {}})), "response_format", "\"not\""),
        (format(json!({"properties": {"a": {"uniqueItems": true}}})), "response_format", "uniqueItems"),
        (format(json!({"$ref": "other.json"})), "response_format", "$ref"),
        (format(json!({"const": "x".repeat(100)})), "", ""),
        (json!({"guided_json": {"not": {}}}), "guided_json", "\"not\""),
        (json!({"guided_json": "{"}), "guided_json", "not valid JSON"),
        (json!({"guided_json": 3}), "guided_json", "schema"),
        (json!({"guided_regex": "("}), "guided_regex", "unclosed"),
        (json!({"guided_regex": 3}), "guided_regex", "a string"),
        (json!({"guided_choice": []}), "guided_choice", "nothing"),
        (json!({"guided_choice": "yes"}), "guided_choice", "list"),
        (json!({"guided_choice": [1]}), "guided_choice[0]", "a string"),
        (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar", "::="),
        (json!({"structured_outputs": {"regex": "["}}), "structured_outputs.regex", "unclosed"),
        (json!({"structured_outputs": {"choice": 1}}), "structured_outputs.choice", "list"),
        (
            json!({"structured_outputs": {"structural_tag": "x"}}),
            "structured_outputs.structural_tag",
            "not have",
        ),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice", "guided_regex"),
        (with(json!({"guided_regex": "a"}), format(person())), "guided_regex", "response_format"),
    ] {
        let (status, body) =
            complete(&app, with(with(chat("Hi"), json!({"max_tokens": 3})), fields.clone())).await;
        if param.is_empty() {
            assert_eq!(status, 200, "{body}");
            continue;
        }
        let error = &body["error"];
        assert_eq!((status.as_u16(), error["param"].as_str()), (400, Some(param)), "{fields}: {body}");
        assert!(
            error["message"].as_str().is_some_and(|m| m.contains(named) && m.len() < 300),
            "{fields}: {body}"
        );
    }
}
