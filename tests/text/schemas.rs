//! JSON schemas as clients write them: unenforceable keywords, unusual values, references, and the tools of well-known
//! clients, in every field that takes a schema.

use serde_json::{Value, json};
use unicorn::session::{Tool, ToolChoice, Tools};
use unicorn::text::{Grammar, GrammarSource, Grammars, TextError};

use crate::support::app::{App, MODEL};
use crate::support::data;
use crate::support::grammars::{accepts, assert_language, grammars, languages};
use crate::support::http::{post_to, send_json};
use crate::support::lists::{values, words};
use crate::support::tools::{app_that_says, now};

/// zod's pattern of an e-mail address.
const ZOD_EMAIL: &str =
    "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$";

/// Properties whose schemas have one unenforceable keyword, with the name of the keyword.
fn unenforceable() -> Vec<(&'static str, Value)> {
    vec![
        ("pattern", json!({"type": "string", "pattern": ZOD_EMAIL})),
        ("pattern", json!({"type": "string", "pattern": "\\bword\\b"})),
        ("pattern", json!({"type": "string", "pattern": "(?<=a)b"})),
        ("pattern", json!({"type": "string", "pattern": "(a)\\1"})),
        (
            "patternProperties",
            json!({"type": "object", "patternProperties": {"^(?!x)": {"type": "integer"}}}),
        ),
        ("patternProperties", json!({"type": "object", "patternProperties": {"a": {}, "b": {}}})),
        ("minimum", json!({"type": "number", "minimum": 5e-324})),
        ("minimum", json!({"type": "number", "minimum": -1e20})),
        ("maximum", json!({"type": "number", "maximum": 1e20})),
        ("maximum", json!({"type": "integer", "maximum": u64::MAX})),
        ("minimum", json!({"type": "integer", "minimum": i64::MIN})),
        ("minimum", json!({"type": "integer", "minimum": 9_007_199_254_740_993_i64})),
        ("const", json!({"const": 9_007_199_254_740_993_i64})),
        ("enum", json!({"enum": ["a", 18_446_744_073_709_551_615_u64]})),
        ("multipleOf", json!({"type": "number", "multipleOf": 1e300})),
        ("multipleOf", json!({"type": "integer", "multipleOf": 1e-300})),
        ("minLength", json!({"type": "string", "minLength": u64::MAX})),
        ("uniqueItems", json!({"type": "array", "uniqueItems": true})),
        ("not", json!({"not": {"type": "string"}})),
        ("format", json!({"type": "string", "format": "iri"})),
        ("minProperties", json!({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2})),
    ]
}

/// The parameters of a tool, with `property` as the schema of the property `value`.
fn parameters(property: &Value) -> Value {
    json!({"type": "object", "properties": {"value": property, "n": {"type": "integer"}}, "required": ["n"]})
}

/// For each wire format: a path, a body with two tools, the second of which has these parameters, and the path of the
/// parameters in the body.
fn offers(parameters: &Value, strict: bool) -> [(&'static str, Value, &'static str); 3] {
    let function = json!({"name": "send_mail", "parameters": parameters, "strict": strict});
    let chat = json!({"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Hi"}],
        "tools": [now(), {"type": "function", "function": function}]});
    let mut flat = function.clone();
    flat["type"] = json!("function");
    let responses = json!({"model": MODEL, "input": "Hi", "max_output_tokens": 40,
        "tools": [{"type": "function", "name": "now", "parameters": {"type": "object"}}, flat]});
    let messages = json!({"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Hi"}], "tools": [
        {"name": "now", "input_schema": {"type": "object"}},
        {"name": "send_mail", "input_schema": parameters, "strict": strict},
    ]});
    [
        ("/v1/chat/completions", chat, "tools[1].function.parameters"),
        ("/v1/responses", responses, "tools[1].parameters"),
        ("/v1/messages", messages, "tools[1].input_schema"),
    ]
}

async fn ask(app: &App, path: &str, body: &Value) -> (u16, Value) {
    let (status, _, value) = send_json(&app.router, post_to(path, body.to_string())).await;
    (status.as_u16(), value)
}

/// Words that no error may contain, because they describe internal state of a library.
const LIBRARY_WORDS: &str =
    "llguidance NoExtension Some( None Unimplemented bug panic Unsatisfiable overflow";

/// Checks that an error is one short line without such words.
fn assert_is_readable(message: &str, what: &str) {
    assert!(message.len() < 300 && !message.contains('\n'), "{what}: {message}");
    for word in words(LIBRARY_WORDS) {
        assert!(!message.contains(word), "{what}: {message}");
    }
}

/// The error message of a response with status 400.
fn refused((status, body): (u16, Value), what: &str) -> String {
    assert_eq!(status, 400, "{what}: {body}");
    let message = body["error"]["message"].as_str().unwrap_or_else(|| panic!("{what}: {body}")).to_owned();
    assert_is_readable(&message, what);
    message
}

#[tokio::test]
async fn an_unenforceable_schema_of_one_tool_is_refused_only_if_strict() {
    let app = app_that_says("{\"name\": \"now\", \"parameters\": {}}");
    for (keyword, property) in unenforceable() {
        for (path, body, _) in offers(&parameters(&property), false) {
            let (status, reply) = ask(&app, path, &body).await;
            assert_eq!(status, 200, "{path}: {property}: {reply}");
        }
        for (path, body, param) in offers(&parameters(&property), true) {
            let reply = ask(&app, path, &body).await;
            if path != "/v1/messages" {
                assert_eq!(reply.1["error"]["param"], param, "{property}: {reply:?}");
            }
            let message = refused(reply, &format!("{path}: {property}"));
            for named in [param, "\"send_mail\"", keyword, "properties.value"] {
                assert!(message.contains(named), "{path}: {property}: {named}: {message}");
            }
        }
    }
}

#[tokio::test]
async fn unenforceable_parts_of_an_answer_schema_are_ignored_or_refused() {
    let app = app_that_says("{\"n\": 1}");
    let chat = "/v1/chat/completions";
    for (keyword, property) in unenforceable() {
        let schema = parameters(&property);
        let format = |strict: bool| {
            let named = json!({"name": "x", "schema": schema, "strict": strict});
            json!({"type": "json_schema", "json_schema": named})
        };
        let text = |strict: bool| json!({"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": strict}});
        for (path, field, value, is_strict) in [
            (chat, "response_format", format(false), false),
            (chat, "response_format", json!({"type": "json_object", "schema": schema}), false),
            (chat, "json_schema", schema.clone(), false),
            ("/v1/responses", "text", text(false), false),
            (chat, "response_format", format(true), true),
            (chat, "structured_outputs", json!({"json": schema}), true),
            ("/v1/responses", "text", text(true), true),
            (
                "/v1/messages",
                "output_config",
                json!({"format": {"type": "json_schema", "schema": schema}}),
                true,
            ),
        ] {
            let mut body = match path {
                "/v1/responses" => json!({"model": MODEL, "input": "Hi", "max_output_tokens": 40}),
                _ => {
                    json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40})
                }
            };
            body[field] = value;
            let reply = ask(&app, path, &body).await;
            if is_strict {
                let message = refused(reply, &format!("{path}: {field}: {property}"));
                assert!(message.contains(keyword) && message.contains("properties.value"), "{message}");
            } else {
                assert_eq!(reply.0, 200, "{path}: {field}: {property}: {}", reply.1);
            }
        }
    }
}

#[tokio::test]
async fn references_are_decoded_and_endless_ones_refused_before_the_answer() {
    let app = app_that_says("{\"name\": \"now\", \"parameters\": {}}");
    let defs = json!({"a/b": {"type": "integer"}, "c~d": {"type": "integer"}, "e f%": {"type": "integer"}, "ü": {"type": "integer"}});
    for reference in
        ["#/$defs/a~1b", "#/$defs/c~0d", "#/$defs/e%20f%25", "#/$defs/%C3%BC", "#/$defs/ü", "#/%24defs/a~1b"]
    {
        let schema = json!({"type": "object", "properties": {"value": {"$ref": reference}}, "$defs": defs});
        for (path, body, _) in offers(&schema, true) {
            let (status, reply) = ask(&app, path, &body).await;
            assert_eq!(status, 200, "{path}: {reference}: {reply}");
        }
    }
    for (schema, named) in [
        (
            json!({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}),
            "#/properties/a -> #/properties/a",
        ),
        (
            json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            "#/$defs/a -> #/$defs/b -> #/$defs/a",
        ),
        (json!({"$ref": "#"}), "# -> #"),
        (json!({"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]}), "# -> #"),
    ] {
        for strict in [true, false] {
            for (path, body, param) in offers(&schema, strict) {
                let mut body = body;
                body["stream"] = json!(true);
                let message = refused(ask(&app, path, &body).await, &format!("{path}: {schema}"));
                assert!(message.contains(named) && message.contains(param), "{schema}: {message}");
            }
        }
    }
}

/// The grammar of a schema, or the error message.
fn read(grammars: &Grammars, schema: &Value, strict: bool) -> Result<Grammar, String> {
    let source = GrammarSource::JsonSchema { schema: schema.clone(), strict };
    grammars.compile(&source).map_err(|error| {
        let TextError::Grammar(problem) = error else { panic!("{schema}: {error:?}") };
        assert_is_readable(&problem, &schema.to_string());
        problem
    })
}

/// Whether a schema is valid in any draft that defines the keyword. Other drafts accept any value for it.
fn is_valid_schema(keyword: &str, schema: &Value) -> bool {
    let drafts = [
        jsonschema::draft4::meta::is_valid,
        jsonschema::draft6::meta::is_valid,
        jsonschema::draft7::meta::is_valid,
        jsonschema::draft201909::meta::is_valid,
        jsonschema::draft202012::meta::is_valid,
    ];
    let first = match keyword {
        "const" | "contains" | "propertyNames" | "$ref" => 1,
        "if" | "then" | "else" => 2,
        "minContains"
        | "maxContains"
        | "dependentRequired"
        | "dependentSchemas"
        | "unevaluatedItems"
        | "unevaluatedProperties"
        | "$recursiveRef" => 3,
        "prefixItems" | "$dynamicRef" => 4,
        _ => 0,
    };
    drafts[first..].iter().any(|is_valid| is_valid(schema))
}

#[test]
fn every_keyword_accepts_valid_values_and_names_errors_in_others() {
    let grammars = grammars();
    let enforced = words(
        "type enum const minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength \
        pattern format items prefixItems minItems maxItems properties patternProperties \
        additionalProperties required minProperties maxProperties allOf anyOf oneOf $ref",
    );
    let unsupported = words(
        "not if then else contains minContains maxContains uniqueItems propertyNames dependencies \
        dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties $dynamicRef \
        $recursiveRef",
    );
    let others = words(
        "additionalItems nullable $defs definitions $id id $schema $anchor $comment title description \
        default examples example deprecated readOnly discriminator contentEncoding $vocabulary \
        x-guidance",
    );
    let all = values(json!([
        null, true, false, 0, -1, 1.0, 0.5, 3, 1e20, -1e300, 5e-324, u64::MAX, i64::MIN,
        9_007_199_254_740_993_u64, "", "x", "string", "(", "(?=a)b", "\\bx", "#", "#/$defs/none",
        "https://example.org/x.json", "½".repeat(200), "\u{202e}x", [], ["a"], [1, 1], ["string", "null"],
        [{"type": "integer"}], [[], 1e20], {}, {"a": 1}, {"a": {"type": "integer"}}, {"a": ["b"]},
        {"type": "integer"}, {"(?!a)": {"type": "integer"}}, {"$ref": "#"}, {"const": {"$ref": "#/none"}},
        {"$ref": {"$ref": 1}}
    ]));
    let (mut accepted, mut wrong) = (0, 0);
    for &keyword in enforced.iter().chain(&unsupported).chain(&others) {
        for value in &all {
            let schema = json!({"type": "object", "properties": {"p": {keyword: value}}});
            let loose = read(&grammars, &schema, false);
            let valid = is_valid_schema(keyword, &schema);
            match &loose {
                Ok(_) => {
                    accepted += 1;
                    // Annotations may have any value. Schemas in an ignored keyword are not read.
                    let is_read = !value.is_object() && unsupported.contains(&keyword);
                    let kept = enforced.contains(&keyword) || is_read;
                    // The drafts require at least one schema. zod writes an empty list for an empty tuple.
                    let valid = valid || keyword.ends_with("tems") && *value == json!([]);
                    assert!(valid || !kept, "{schema} was accepted");
                }
                Err(problem) => {
                    wrong += 1;
                    assert!(
                        problem.contains(&format!("{keyword:?}")) || problem.contains("properties.p"),
                        "{schema}: {problem}"
                    );
                    let matched_by_nothing = ["nothing can match", "nothing matches", "never end"];
                    let without_a_target =
                        ["is not found", "outside the schema", "without two hexadecimal", "\"$ref\" of"];
                    let known = matched_by_nothing.iter().chain(&without_a_target).chain(&["unclosed group"]);
                    assert!(
                        !valid || known.into_iter().any(|words| problem.contains(words)),
                        "{schema}: {problem}"
                    );
                }
            }
            match read(&grammars, &schema, true) {
                Ok(_) => assert!(loose.is_ok(), "{schema} is accepted only if it is strict"),
                Err(problem) if loose.is_ok() => {
                    assert!(
                        problem.contains("cannot be enforced") && problem.contains("properties.p"),
                        "{schema}: {problem}"
                    );
                }
                Err(problem) => assert_eq!(Err(problem), loose.map(drop), "{schema}"),
            }
        }
    }
    assert!(accepted > 500 && wrong > 500, "{accepted} accepted, {wrong} refused");
}

/// Schemas with an unenforceable part, with texts that they allow and texts that they forbid nevertheless.
const PARTLY_ENFORCEABLE: &str = r##"
// Only the pattern is left to the model.
{"type": "string", "pattern": ZOD_EMAIL, "format": "email", "maxLength": 8}
    => "!@b.de" | "a@b.de" => "ab" | "long@long.de" | 1
{"type": "object", "properties": {"a": {"pattern": "\\bx", "type": "string"}, "b": {"maximum": 9, "minimum": 1e300, "type": "number"}}, "required": ["a", "b"], "additionalProperties": false}
    => {"a": "y", "b": 9} => {"a": 1, "b": 9} | {"a": "y", "b": 10} | {"a": "y"} | {"a": "", "b": 1, "c": 1}
// Names that the unenforceable pattern could match may have its value, or a value of the other schemas.
{"type": "object", "patternProperties": {"^(?!x)": {"type": "integer"}, "^n": {"type": "null"}}, "additionalProperties": false}
    => {"y": 1} | {"x": 1} | {"n": null} => {"y": null} | {"n": 1}
{"type": "object", "patternProperties": {"(?!x)": {"type": "integer"}}, "additionalProperties": {"type": "null"}}
    => {"y": 1} | {"y": null} => {"y": ""}
// Only one of several values is unenforceable.
{"enum": ["a", 9007199254740993, [1e20]]} => "a" | 9007199254740993 | [] => "b" | 1.5 | {}
{"const": {"id": 9007199254740993}} => {} | {"id": 9007199254740993} => 1
{"oneOf": [{"const": 9007199254740993}, {"type": "null"}], "anyOf": [{"type": "integer"}, {"type": "string"}]}
    => 7 => null | "" | 1.5
// Only the combination of the keywords is unenforceable.
{"allOf": [{"type": "object", "patternProperties": {"a": {"type": "integer"}}}, {"patternProperties": {"b": {"type": "null"}}}, {"maxProperties": 1}]}
    => {"a": 1} | {"b": 1} => {"a": null} | {"a": 1, "c": 2} | 1
{"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "additionalProperties": false}
    => {"a": 1} | {"a": 1, "c": 2} => {"d": 1} | 1
// An unenforceable keyword in a recursive definition.
{"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"name": {"type": "string", "pattern": "(?!x)"}, "next": {"$ref": "#/$defs/node"}}, "required": ["name"], "additionalProperties": false}}}
    => {"name": "", "next": {"name": "y"}} => {"name": "", "next": {}} | {"name": 1}
// A recursive reference with other keywords next to it.
{"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n", "minProperties": 1, "type": "object"}}, "additionalProperties": false}}}
    => {} | {"next": {"next": {}}} => {"next": 1} | {"other": {}}
// The syntax of drafts 4 to 2019-09.
{"type": "array", "items": [{"type": "integer", "minimum": 3, "exclusiveMinimum": true}], "additionalItems": {"type": "null"}}
    => [] | [4, null] => [3] | [4, 4]
"##;

#[test]
fn everything_except_an_unenforceable_keyword_is_enforced() {
    let grammars = grammars();
    let email = json!(ZOD_EMAIL).to_string();
    for (schema, good, bad) in languages(&PARTLY_ENFORCEABLE.replace("ZOD_EMAIL", &email)) {
        assert_language(&grammars, &GrammarSource::JsonSchema { schema, strict: false }, &good, &bad);
    }
}

#[test]
fn strict_integer_bounds_are_exact_or_refused() {
    let grammars = grammars();
    let edges: [i128; 12] = [
        3,
        1 << 53,
        (1 << 53) - 1,
        (1 << 53) + 1,
        (1 << 53) + 2,
        10_i128.pow(18) - 1,
        10_i128.pow(18),
        (1 << 62) + 1,
        (1 << 63) - 1025,
        i64::MAX.into(),
        1 << 63,
        u64::MAX.into(),
    ];
    let mut enforced = 0;
    for edge in edges.into_iter().chain(edges.map(|edge| -edge)).filter(|edge| *edge >= i64::MIN.into()) {
        let number: Value = serde_json::from_str(&edge.to_string()).unwrap();
        for (keyword, first, last) in [
            ("const", Some(edge), Some(edge)),
            ("minimum", Some(edge), None),
            ("exclusiveMinimum", Some(edge + 1), None),
            ("maximum", None, Some(edge)),
            ("exclusiveMaximum", None, Some(edge - 1)),
        ] {
            let schema = json!({"type": "integer", keyword: number});
            let Ok(_) = read(&grammars, &schema, true) else {
                assert!(edge.abs() >= 1 << 53, "{schema}");
                continue;
            };
            enforced += 1;
            let source = GrammarSource::JsonSchema { schema: schema.clone(), strict: true };
            for near in edge - 3..=edge + 3 {
                let allowed = first.is_none_or(|first| near >= first) && last.is_none_or(|last| near <= last);
                assert_eq!(accepts(&grammars, &source, &near.to_string()), allowed, "{schema}: {near}");
            }
        }
    }
    assert!(enforced > 40, "{enforced} bounds were enforced");
}

#[test]
fn references_resolve_as_the_drafts_specify() {
    let grammars = grammars();
    let integer = json!({"type": "integer"});
    for schema in [
        json!({"$ref": "#/definitions/i", "definitions": {"i": integer}}),
        json!({"$ref": "#i", "$defs": {"x": {"$anchor": "i", "type": "integer"}}}),
        json!({"$ref": "#i", "definitions": {"x": {"$id": "#i", "type": "integer"}}}),
        json!({"$ref": "https://a.de/i", "$defs": {"x": {"$id": "https://a.de/i", "type": "integer"}}}),
        json!({"$id": "https://a.de/root", "$ref": "https://a.de/root#/$defs/i", "$defs": {"i": integer}}),
        json!({"$ref": "#/$defs/outer", "$defs": {"outer": {"$id": "o", "$ref": "#/$defs/i", "$defs": {"i": integer}}, "i": {"type": "null"}}}),
        json!({"$ref": "#/$defs/outer", "$defs": {"outer": {"$id": "o", "$ref": "#/$defs/i"}, "i": integer}}),
        json!({"$ref": "#/$defs/list/0", "$defs": {"list": [integer]}}),
        json!({"$ref": "#/$defs/i", "description": "d", "default": 1, "$defs": {"i": integer, "broken": {"type": 3}}}),
        json!({"$ref": "#/$defs/number", "type": "integer", "$defs": {"number": {"type": "number"}}}),
        json!({"anyOf": [{"$ref": "#"}, integer]}),
    ] {
        let source = GrammarSource::JsonSchema { schema, strict: true };
        assert_language(&grammars, &source, &["12"], &["null", "1.5"]);
    }
    // Recursive trees and lists that can end are accepted.
    let tree = json!({"type": "object", "properties": {"v": {"type": "integer"}, "sons": {"type": "array", "items": {"$ref": "#"}}}, "required": ["v", "sons"], "additionalProperties": false});
    let list = json!({"$ref": "#/$defs/l", "$defs": {"l": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#/$defs/l"}}, "required": ["next"], "additionalProperties": false}]}}});
    for (schema, text) in
        [(tree, "{\"v\": 1, \"sons\": [{\"v\": 2, \"sons\": []}]}"), (list, "{\"next\": {\"next\": null}}")]
    {
        let source = GrammarSource::JsonSchema { schema, strict: true };
        assert!(accepts(&grammars, &source, text), "{text}");
    }
    for (schema, named) in [
        (json!({"allOf": [{"$ref": "#"}]}), "# -> #"),
        (json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}), "# -> #"),
        (json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "# -> #"),
        (
            json!({"type": "array", "items": {"properties": {"x": {"$ref": "#/$defs/a"}}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "#/$defs/a -> #/$defs/a",
        ),
        (json!({"$ref": "#/$defs/missing"}), "\"#/$defs/missing\" is not found"),
        (json!({"$ref": "#missing"}), "\"#missing\" is not found"),
        (json!({"$ref": "#/%zz"}), "hexadecimal"),
        (json!({"$ref": "#/$defs/a~1b", "$defs": {"a": {"b": {}}}}), "is not found"),
        (json!({"$ref": "other.json#/x"}), "outside the schema"),
        (json!({"$ref": "#/$defs/x", "$defs": {"x": 3}}), "expected a schema"),
        (json!({"items": {"$ref": 3}}), "\"$ref\" of items: expected a text, got 3"),
    ] {
        for strict in [true, false] {
            let problem = read(&grammars, &schema, strict).map(drop).expect_err(&schema.to_string());
            assert!(problem.contains(named), "{schema}: {problem}");
        }
    }
}

#[test]
fn the_tools_of_well_known_clients_are_accepted() {
    let grammars = grammars();
    let tools: Value = {
        let text = std::fs::read(data("tool-schemas.json")).unwrap();
        serde_json::from_slice(&text).expect("JSON")
    };
    let tools = tools.as_array().expect("a list");
    assert!(tools.len() > 20);
    let named = |tool: &Value, name: &str| tool[name].as_str().unwrap_or_else(|| panic!("{tool}")).to_owned();
    let list = tools.iter().map(|tool| Tool {
        name: named(tool, "name"),
        description: None,
        parameters: tool["parameters"].clone(),
        strict: false,
        param: String::new(),
    });
    let list: Vec<Tool> = list.collect();
    let all = Tools { list, choice: ToolChoice::Required, only: None, parallel: true };
    let (all, _) = all.grammar(None, true).unwrap().expect("a grammar");
    for tool in tools {
        let call = |parameters: &Value| json!({"name": tool["name"], "parameters": parameters}).to_string();
        assert!(accepts(&grammars, &all.source, &call(&tool["good"])), "{tool}");
        assert!(!accepts(&grammars, &all.source, &call(&tool["bad"])), "{tool}");
    }
}
