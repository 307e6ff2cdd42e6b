//! Grammars as masks: every allowed answer is valid, every valid answer is allowed, and unsupported grammars are
//! refused with the unsupported part.
//!
//! Answers are random token sequences that the masks allow, with the 512 pieces of the mini tokenizer. The crate
//! `jsonschema` checks JSON answers.

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use unicorn::text::{
    AnswerReader, CallFormat, CallPiece, CallTool, Constraint, Grammar, GrammarSource, Grammars, MAX_CHOICES,
    MAX_GRAMMAR_BYTES, SchemaPart, TextError, Tokenizer,
};

use crate::support::app::FamilyText;
use crate::support::grammars::{
    ROWS, STOPS, accepts, allowed, assert_language, assert_refused, grammars, languages, refusal,
};
use crate::support::lists::{values, words};
use crate::support::tokenizers::{real_tokenizer_json, tokenizer};
use crate::support::{self, rounds};

fn strict(schema: Value) -> GrammarSource {
    GrammarSource::JsonSchema { schema, strict: true }
}

/// Generates one random answer as text. Long answers are led to their end.
fn walk(mut constraint: Constraint, tokenizer: &Tokenizer, rng: &mut ChaCha8Rng) -> String {
    const LONG: usize = 40;
    const MOST: usize = 2000;
    let mut ids = Vec::new();
    loop {
        let text = tokenizer.decode(&ids, true);
        let mask = constraint.mask(true).unwrap_or_else(|e| panic!("{e} after {text:?}"));
        let mut choices = allowed(&mask);
        let ends = choices.iter().any(|id| STOPS.contains(id));
        if ends && (ids.len() > LONG || rng.random_bool(0.3)) {
            return text;
        }
        choices.retain(|id| !STOPS.contains(id));
        assert!(choices.iter().all(|id| !tokenizer.is_special(*id)), "a special token after {text:?}");
        // JSON allows numbers that no f64 can hold. The other crate cannot read them, so exponents are avoided.
        let exponent = |id: &u32| tokenizer.decode(&[*id], true).starts_with(['e', 'E']);
        if text.ends_with(|c: char| c.is_ascii_digit()) && choices.iter().any(|id| !exponent(id)) {
            choices.retain(|id| !exponent(id));
        }
        if choices.is_empty() {
            return text;
        }
        let says = |id: u32, text: &str| tokenizer.decode(&[id], true) == text;
        let find = |text: &&str| choices.iter().find(|id| says(**id, text));
        let close = if ids.len() > LONG && rng.random_bool(0.8) {
            ["\"", "}", "]"].iter().find_map(find)
        } else {
            None
        };
        let id = *close.unwrap_or_else(|| choices.choose(rng).unwrap());
        constraint.push(id).unwrap_or_else(|e| panic!("{e}: {id} after {text:?}"));
        ids.push(id);
        assert!(ids.len() < MOST, "the answer does not end: {text:?}");
    }
}

/// For each keyword, schemas, with texts that they allow and texts that they forbid.
const KEYWORDS: &str = r##"
{"type": "null"} => null => 0 | nul
{"type": "boolean"} => true | false => True | "true"
{"type": "integer"} => 0 | -12 | 987 => 1.5 | 01 | +1
{"type": "number"} => 0 | -1.25 | 1e5 => .5 | 1. | 0x1
{"type": ["string", "null"]} => "a" | null => 1
{"enum": ["a", 2, null, [1], {"b": true}]} => "a" | 2 | null | [1] | {"b": true} => "b" | [] | {}
{"const": {"a": [1, "x"]}} => {"a": [1, "x"]} => {"a": [1]}
{"type": "integer", "minimum": 3, "maximum": 12} => 3 | 12 => 2 | 13 | -5
{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1} => 0.5 | 0.01 => 0 | 1 | 1.5
{"type": "integer", "multipleOf": 5} => 0 | 15 | -10 => 3 | 51
{"type": "string", "minLength": 2, "maxLength": 3} => "ab" | "½½½" => "a" | "abcd"
{"type": "string", "pattern": "^[a-c]+$"} => "abc" => "" | "abd"
{"type": "string", "pattern": "b"} => "abc" => "ac"
{"type": "array", "items": {"type": "integer"}} => [] | [1, 2] => ["a"] | [1,]
{"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2} => [1] | [1, 2] => [] | [1, 2, 3]
{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": false}
    => [1, null] => [null] | [1, null, 1]
{"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}} => [1, 2, 2] => [2]
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"], "additionalProperties": false}
    => {"a": 1} | {"a": 1, "b": [{}]} => {} | {"a": "x"} | {"a": 1, "c": 2}
{"type": "object", "additionalProperties": {"type": "integer"}} => {} | {"x": 1, "y": 2} => {"x": "y"}
{"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": false}
    => {"n_x": 1} => {"x": 1} | {"n_x": null}
{"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 1, "additionalProperties": false}
    => {"a": 1} | {"b": 1} => {} | {"a": 1, "b": 1}
{"anyOf": [{"type": "integer"}, {"type": "string"}]} => 1 | "a" => null
{"oneOf": [{"type": "integer"}, {"type": "null"}]} => 1 | null => "a"
{"allOf": [{"type": "integer"}, {"minimum": 5}]} => 5 => 4
{"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": false}}}
    => {} | {"next": {"next": {}}} => {"next": 1}
{"definitions": {"i": {"type": "integer"}}, "items": {"$ref": "#/definitions/i"}, "type": "array"} => [1] => ["a"]
{"type": "string", "format": "date"} => "2024-02-29" => "2024-13-01" | "today"
{"type": "string", "format": "time"} => "10:20:30Z" => "25:00:00Z"
{"type": "string", "format": "date-time"} => "2024-01-31T10:20:30.5+02:00" => "2024-01-31"
{"type": "string", "format": "duration"} => "P1DT2H" => "1D"
{"type": "string", "format": "email"} => "a.b@c.de" => "a.b"
{"type": "string", "format": "hostname"} => "a-b.de" => "-a"
{"type": "string", "format": "ipv4"} => "10.0.0.255" => "10.0.0.256"
{"type": "string", "format": "ipv6"} => "::1" => "1::2::3"
{"type": "string", "format": "uuid"} => "123e4567-e89b-12d3-a456-426614174000" => "123e4567"
{"type": "string", "format": "uri"} => "https://a.de/b?c#d" => "a b"
{"title": "t", "description": "d", "default": 1, "examples": [1], "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "i", "$comment": "c", "type": "null"}
    => null => 1
"##;

#[test]
fn every_keyword_is_enforced() {
    let grammars = grammars();
    for (schema, good, bad) in languages(KEYWORDS) {
        assert_language(&grammars, &strict(schema), &good, &bad);
    }
    assert_language(
        &grammars,
        &strict(json!({"type": "string"})),
        &["\"\"", "\"a\\n\\\"½\""],
        &["a", "\"a\nb\"", "\"\\x\""],
    );
    assert_language(&grammars, &strict(json!({})), &["1", "\"a\"", "[{}, null]"], &["a", ""]);
}

#[test]
fn unenforceable_schemas_are_refused_with_the_keyword() {
    let grammars = grammars();
    for (schema, named) in [
        (json!({"not": {"type": "string"}}), "\"not\""),
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}),
            "\"uniqueItems\"",
        ),
        (json!({"if": {}, "then": {}, "else": {}}), "\"if\""),
        (json!({"contains": {}}), "\"contains\""),
        (json!({"minContains": 1}), "\"minContains\""),
        (json!({"propertyNames": {}}), "\"propertyNames\""),
        (json!({"dependentRequired": {}}), "\"dependentRequired\""),
        (json!({"dependentSchemas": {}}), "\"dependentSchemas\""),
        (json!({"unevaluatedProperties": false}), "\"unevaluatedProperties\""),
        (json!({"unevaluatedItems": false}), "\"unevaluatedItems\""),
        (json!({"$dynamicRef": "#a"}), "\"$dynamicRef\""),
        (json!({"type": "string", "format": "phone"}), "format: phone"),
        (json!({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 1}, {"type": "integer", "maximum": 3}]}),
            "oneOf",
        ),
        (json!({"items": {"exclusiveMinimum": 19, "maximum": 19.5}}), "exclusiveMinimum 19"),
        (json!({"exclusiveMaximum": -3, "minimum": -3.25}), "exclusiveMaximum -3"),
        (
            json!({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}),
            "min/maxProperties",
        ),
    ] {
        assert_refused(&grammars, &strict(schema.clone()), named);
        // If the schema is not strict, only the unenforceable part is left to the model.
        let wish = GrammarSource::JsonSchema { schema: schema.clone(), strict: false };
        grammars.compile(&wish).unwrap_or_else(|e| panic!("{schema}: {e}"));
    }
    for (schema, named) in [
        (json!({"type": "strin"}), "strin"),
        (json!({"type": 3}), "type"),
        (json!({"$ref": "https://example.org/x.json"}), "$ref"),
        (json!({"$ref": "#/$defs/missing"}), "missing"),
        (json!({"type": "string", "pattern": "("}), "unclosed group"),
        (json!({"type": "string", "minLength": "x"}), "minLength"),
        (json!({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (json!({"anyOf": []}), "anyOf"),
        (json!({"enum": []}), "enum"),
        (json!({"properties": []}), "properties"),
        (json!(false), "false"),
        (json!([]), "object"),
    ] {
        for strict in [true, false] {
            let source = GrammarSource::JsonSchema { schema: schema.clone(), strict };
            assert_refused(&grammars, &source, named);
        }
    }
}

#[test]
fn regex_lark_and_choice_grammars_are_enforced_or_refused() {
    let grammars = grammars();
    let regex = |text: &str| GrammarSource::Regex(text.into());
    let lark = |text: &str| GrammarSource::Lark(text.into());
    let choice =
        |texts: &[&str]| GrammarSource::Choice(texts.iter().map(|text| (*text).to_owned()).collect());
    let quoted = ["yes", "no \"maybe\"\n\\", "1 | 2 /x/"];
    let numbered = GrammarSource::Choice((0..MAX_CHOICES).map(|i| format!("no {i}")).collect());
    let last = format!("no {}", MAX_CHOICES - 1);
    for (source, good, bad) in [
        (regex("[a-c]+-[0-9]{2}"), "abc-12", "abc-1"),
        (regex("a/b\\.c|½"), "½", "a/bxc"),
        (lark("start: \"a\" list\nlist: item | item \",\" list\nitem: /[0-9]+/"), "a1,22", "a,1"),
        (lark("start: pair\npair: \"(\" pair? \")\""), "((()))", "(()"),
        (lark("start: \"is \" json\njson: %json {\"type\": \"integer\"}"), "is 12", "is x"),
        (choice(&quoted), quoted[1], "no"),
        (choice(&quoted), quoted[2], "yes1 | 2 /x/"),
        (choice(&["a", "ab"]), "a", "abc"),
        (choice(&["a", "ab"]), "ab", "b"),
        (choice(&["", "a"]), "", "aa"),
        (numbered.clone(), "no 40", "no 4096"),
        (numbered, last.as_str(), "no "),
    ] {
        assert_language(&grammars, &source, &[good], &[bad]);
    }
    let many = vec!["x".to_owned(); MAX_CHOICES + 1];
    for (source, named) in [
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (lark("begin: \"a\""), "start"),
        (lark("start: other"), "other"),
        (lark("root ::= \"a\""), "::="),
        (lark(""), "start"),
        (choice(&[]), "nothing"),
        (GrammarSource::Choice(many), "4096"),
        (regex(&"a".repeat(MAX_GRAMMAR_BYTES)), "at most"),
    ] {
        assert_refused(&grammars, &source, named);
    }
}

#[test]
fn an_answer_ends_where_its_grammar_ends_without_padding() {
    let grammars = grammars();
    let object =
        strict(json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}));
    let good = ["{\"a\":1}", "{ \"a\" : 1 }", "{\n    \"a\": 1\n}", "{\r\n\t\"a\": 1\r\n}"];
    let long = format!("{{\n{}\"a\": 1}}", " ".repeat(41));
    let bad = [" {\"a\":1}", "{\"a\":1}\n", "{  \"a\":1}", "{\n\n\"a\":1}", long.as_str()];
    assert_language(&grammars, &object, &good, &bad);

    let digits = GrammarSource::Regex("[0-9]{1,2}".into());
    let mut constraint = grammars.compile(&digits).unwrap().start();
    let one = tokenizer().encode("1", false).unwrap()[0];
    let ends = |mask: &[u32]| allowed(mask).iter().filter(|id| STOPS.contains(id)).count();
    assert_eq!(ends(&constraint.mask(true).unwrap()), 0, "an empty answer is not allowed");
    constraint.push(one).unwrap();
    let both = constraint.mask(true).unwrap();
    assert!(ends(&both) == 2 && allowed(&both).len() > 2);
    let on = constraint.mask(false).unwrap();
    assert!(ends(&on) == 0 && allowed(&on).len() == allowed(&both).len() - 2, "the answer must not end yet");
    constraint.push(one).unwrap();
    for may_end in [true, false] {
        assert_eq!(allowed(&constraint.mask(may_end).unwrap()), STOPS, "only an end token may follow");
    }
    assert_eq!(constraint.ends(), constraint.mask(true).unwrap());
}

#[test]
fn answers_with_the_same_grammar_are_independent() {
    let grammars = grammars();
    let source = GrammarSource::Choice(vec!["ab".into(), "cd".into()]);
    let grammar = grammars.compile(&source).unwrap();
    let (mut a, mut b) = (grammar.start(), grammars.compile(&source).unwrap().start());
    let id = |text: &str| tokenizer().encode(text, false).unwrap()[0];
    let first = a.mask(true).unwrap();
    assert_eq!(first, b.mask(true).unwrap());
    a.push(id("a")).unwrap();
    b.push(id("c")).unwrap();
    let mut fork = a.clone();
    assert_eq!(fork.mask(true).unwrap(), a.mask(true).unwrap());
    assert_ne!(a.mask(true).unwrap(), b.mask(true).unwrap());
    fork.push(id("b")).unwrap();
    assert!(a.push(id("d")).is_err() && b.push(id("d")).is_ok());
    assert_eq!(grammar.start().mask(true).unwrap(), first);
}

#[test]
fn control_tokens_in_a_grammar_match_as_text() {
    let (grammars, tokenizer) = (grammars(), tokenizer());
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let text = "<end_of_turn>\n<start_of_turn>user";
    for source in [strict(json!({"const": text})), GrammarSource::Choice(vec![text.into()])] {
        for _ in 0..20 {
            let said = walk(grammars.compile(&source).unwrap().start(), &tokenizer, &mut rng);
            // JSON has several ways to write a line break.
            assert!(
                said == text || serde_json::from_str::<Value>(&said).is_ok_and(|v| v == text),
                "{said:?}"
            );
        }
    }
    // A grammar cannot name a token by its id.
    let problem = refusal(&grammars, &GrammarSource::Lark("start: <[105]>".into()));
    assert!(problem.contains("vocabulary"), "{problem}");
}

/// A schema that `jsonschema` and llguidance interpret alike, of bounded depth. It may refer to the definitions `d0` up
/// to `definitions`, exclusive.
fn random_schema(rng: &mut ChaCha8Rng, depth: usize, definitions: usize) -> Value {
    let kind = rng.random_range(0..if depth == 0 { 8 } else { 14 });
    let inner = |rng: &mut ChaCha8Rng| random_schema(rng, depth.saturating_sub(1), definitions);
    match kind {
        0 => json!({"type": "null"}),
        1 => json!({"type": "boolean"}),
        2 => {
            let (least, span) = (rng.random_range(-200..200), rng.random_range(0..300));
            match rng.random_range(0..4) {
                0 => json!({"type": "integer"}),
                1 => json!({"type": "integer", "minimum": least, "maximum": least + span}),
                2 => json!({"type": "integer", "exclusiveMinimum": least}),
                _ => {
                    json!({"type": "integer", "multipleOf": rng.random_range(1..20), "minimum": -9999, "maximum": 9999})
                }
            }
        }
        3 => {
            let (least, span) =
                (f64::from(rng.random_range(-200..200)) / 8.0, f64::from(rng.random_range(1..300)) / 8.0);
            match rng.random_range(0..3) {
                0 => json!({"type": "number"}),
                1 => json!({"type": "number", "minimum": least, "maximum": least + span}),
                // The bounds are not whole numbers, because a whole bound within 1 of the other one is refused.
                _ => {
                    json!({"type": "number", "exclusiveMinimum": least + 0.0625, "exclusiveMaximum": least + span})
                }
            }
        }
        4 => {
            let least = rng.random_range(0..5);
            json!({"type": "string", "minLength": least, "maxLength": least + rng.random_range(0..6)})
        }
        5 => {
            let patterns = ["^[a-z]{2,4}$", "^(yes|no)$", "[0-9]", "^\\\\$", "^\"?½*$", "^$|^\\\\d+$"];
            json!({"type": "string", "pattern": patterns.choose(rng).unwrap()})
        }
        6 => json!({"type": "string", "format": (["uuid", "ipv4"].choose(rng).unwrap())}),
        7 => {
            let all = [
                json!(1),
                json!("a\"b"),
                json!(null),
                json!([1, {"x": "½"}]),
                json!({"k": [true]}),
                json!(-2.5),
            ];
            let some: Vec<Value> = all.choose_multiple(rng, 3).cloned().collect();
            if rng.random() { json!({"enum": some}) } else { json!({"const": some[0]}) }
        }
        8 => {
            let least = rng.random_range(0..3);
            let mut schema =
                json!({"type": "array", "items": inner(rng), "maxItems": least + rng.random_range(0..3)});
            if rng.random() {
                schema["minItems"] = json!(least);
            }
            if rng.random_bool(0.3) {
                schema["prefixItems"] = json!([inner(rng)]);
            }
            schema
        }
        9 | 10 => {
            let names = ["a", "b c", "\"q\"", "ü", "list"];
            let names: Vec<&str> = names.choose_multiple(rng, 3).copied().collect();
            let properties: serde_json::Map<String, Value> =
                names.iter().map(|name| ((*name).to_owned(), inner(rng))).collect();
            let required: Vec<&str> = names.iter().copied().filter(|_| rng.random()).collect();
            let mut schema = json!({"type": "object", "properties": properties, "required": required});
            match rng.random_range(0..4) {
                0 => schema["additionalProperties"] = inner(rng),
                1 => schema["patternProperties"] = json!({"^x-": inner(rng)}),
                _ => {}
            }
            if rng.random() && schema.get("additionalProperties").is_none() {
                schema["additionalProperties"] = json!(false);
            }
            schema
        }
        11 => json!({"anyOf": [inner(rng), inner(rng)]}),
        12 => {
            json!({"oneOf": [{"type": "integer"}, {"type": "null"}, {"type": "array", "items": inner(rng), "maxItems": 2}]})
        }
        _ if definitions > 0 => json!({"$ref": format!("#/$defs/d{}", rng.random_range(0..definitions))}),
        _ => json!({"allOf": [{"type": "integer", "minimum": -9}, {"maximum": 99}]}),
    }
}

#[test]
fn random_answers_to_random_schemas_are_valid() {
    let seed = 0x1111;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (grammars, tokenizer) = (grammars(), tokenizer());
    let mut longest = 0;
    for i in 0..rounds(1000) {
        let mut schema = random_schema(&mut rng, 3, 2);
        // Definition d0 refers to itself, but the recursion is optional. Definition d1 does not refer to itself.
        schema["$defs"] = json!({
            "d0": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/d0"}}, "required": ["v"], "additionalProperties": false},
            "d1": random_schema(&mut rng, 1, 0),
        });
        let validator = jsonschema::draft202012::options().should_validate_formats(true).build(&schema);
        let validator = validator.unwrap_or_else(|e| panic!("{i}: {schema}: {e}"));
        let grammar = match grammars.compile(&strict(schema.clone())) {
            Ok(grammar) => grammar,
            Err(error) => panic!("{i}: {schema}: {error}"),
        };
        for _ in 0..3 {
            let text = walk(grammar.start(), &tokenizer, &mut rng);
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{i}: {schema} accepts {text:?}: {e}"));
            if let Err(error) = validator.validate(&value) {
                panic!("{i}: {schema} accepts {text}: {error}");
            }
            longest = longest.max(text.len());
        }
    }
    assert!(longest > 200, "the longest answer had {longest} bytes: the schemas are too simple");
}

/// A random call, as the ids between its control tokens. Texts of a schema end soon.
fn walk_call(
    mut constraint: Constraint,
    family: &FamilyText,
    mark: Option<u32>,
    rng: &mut ChaCha8Rng,
) -> Vec<u32> {
    let tokenizer = &family.tokenizer;
    let mut ids: Vec<u32> = Vec::new();
    // What ends a text between tags must be spelled.
    let mut spelled: Vec<u32> = Vec::new();
    loop {
        let text = tokenizer.decode(&ids, false);
        let mask = constraint.mask(true).unwrap_or_else(|e| panic!("{e} after {text:?}"));
        let choices = allowed(&mask);
        if choices.contains(&family.end()) {
            return ids;
        }
        let is_allowed = |id: &u32| choices.contains(id);
        let quotes = mark.filter(|id| is_allowed(id) && rng.random_bool(0.3));
        if spelled.is_empty() && mark.is_none() && rng.random_bool(0.2) {
            spelled = family.plain("\n</parameter>\n");
            spelled.reverse();
        }
        let is_long = ids.len() > 40 && rng.random_bool(0.8);
        let ends = ["\"", "}", "]"].iter().find_map(|end| {
            let id = family.plain(end)[0];
            (is_long && choices.contains(&id)).then_some(id)
        });
        let next = spelled.pop().filter(is_allowed);
        spelled = if next.is_some() { spelled } else { Vec::new() };
        let exponent = |id: &u32| tokenizer.decode(&[*id], true).starts_with(['e', 'E']);
        let digit = text.ends_with(|c: char| c.is_ascii_digit());
        let calm: Vec<u32> = choices.iter().copied().filter(|id| !digit || !exponent(id)).collect();
        let any =
            *if calm.is_empty() { &choices } else { &calm }.choose(rng).expect("the mask allows a token");
        let id = next.or(quotes).or(ends).unwrap_or(any);
        constraint.push(id).unwrap_or_else(|e| panic!("{e}: {id} after {text:?}"));
        ids.push(id);
        assert!(ids.len() < 2000, "the call does not end: {text:?}");
    }
}

#[test]
fn random_calls_in_the_syntax_of_each_family_match_the_schema() {
    let seed = 0xca11;
    println!("seed {seed}");
    for (name, syntax, least) in
        [("qwen", "hermes", 290), ("gemma4", "gemma4", 200), ("qwen35", "qwen3_coder", 150)]
    {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let family = FamilyText::new(name);
        let format = CallFormat::of(&family.template(), &family.tokenizer);
        assert_eq!(format.syntax.name, syntax, "{name}");
        let tokens = format.tokens.clone().expect("a syntax with control tokens");
        let rows = family.tokenizer.vocab_size();
        let grammars = Grammars::new(family.tokenizer.clone(), rows, &[family.end()]).with_calls(&format);
        let mark = family.tokenizer.token_id("<|\"|>");
        let mut checked = 0;
        for i in 0..300 {
            let mut schema = json!({
                "type": "object",
                "properties": {"first": random_schema(&mut rng, 3, 2), "Second": random_schema(&mut rng, 2, 2)},
                "required": if rng.random() { vec!["first"] } else { vec![] },
                "additionalProperties": false,
            });
            schema["$defs"] = json!({
                "d0": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/d0"}}, "required": ["v"], "additionalProperties": false},
                "d1": random_schema(&mut rng, 1, 0),
            });
            let tool = |name: &str, schema: &Value| CallTool {
                name: name.to_owned(),
                parameters: SchemaPart { schema: schema.clone(), strict: true },
            };
            let other = json!({"type": "object", "properties": {}, "additionalProperties": false});
            let tools = vec![tool("measure", &schema), tool("now", &other)];
            let source = GrammarSource::Call { format: format.clone(), tools, most: 1 };
            let grammar = match grammars.compile(&source) {
                Ok(grammar) => grammar,
                // A strict schema must be enforced completely.
                Err(TextError::Schema { part: 0, problem })
                    if problem.contains("this model's calls") || problem.contains("within 1") =>
                {
                    continue;
                }
                Err(error) => panic!("{name} {i}: {schema}: {error}"),
            };
            let validator = jsonschema::draft202012::options().should_validate_formats(true).build(&schema);
            let validator = validator.expect("a sound schema");
            for _ in 0..3 {
                let ids = walk_call(grammar.start(), &family, mark, &mut rng);
                let mut reader = AnswerReader::new(family.tokenizer.detokenizer(true))
                    .with_calls(&format, [("measure", &schema), ("now", &other)]);
                let (mut called, mut arguments) = (String::new(), String::new());
                for id in [&[tokens.open], &ids[..], &[tokens.close.expect("a closing token")]].concat() {
                    let spoken = reader.push(id);
                    assert_eq!(spoken.text, "", "{name} {i}: {:?}", family.tokenizer.decode(&ids, false));
                    for piece in spoken.calls {
                        match piece {
                            CallPiece::Name { name, .. } => called = name,
                            CallPiece::Parameters { json, .. } => arguments.push_str(&json),
                        }
                    }
                }
                let what = format!("{name} {i}: {schema} accepts {:?}", family.tokenizer.decode(&ids, false));
                assert!(reader.called(), "{what}");
                let value: Value =
                    serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{what}: {arguments}: {e}"));
                match called.as_str() {
                    "now" => assert_eq!(value, json!({}), "{what}"),
                    "measure" => {
                        if let Err(error) = validator.validate(&value) {
                            panic!("{what}: {arguments}: {error}");
                        }
                    }
                    other => panic!("{what}: {other:?}"),
                }
                checked += 1;
            }
        }
        println!("{name}: {checked} calls");
        assert!(checked / 3 > least, "{name}: {checked} calls");
    }
}

#[test]
fn a_call_may_have_one_of_thousands_of_listed_values() {
    let texts: Vec<Value> =
        (0..3000_u32).map(|i| json!(format!("{:x} {i}", i.wrapping_mul(2_654_435_761)))).collect();
    let numbers: Vec<Value> = (0..3000).map(|i| json!(7 * i)).collect();
    let both: Vec<Value> = [texts.as_slice(), &numbers, &[json!(""), json!(null), json!([1])]].concat();
    let schema = json!({
        "type": "object",
        "properties": {"a": {"enum": texts}, "b": {"enum": numbers}, "c": {"enum": both}},
        "required": ["a", "b", "c"],
        "additionalProperties": false,
    });
    for name in ["gemma4", "qwen35"] {
        let family = FamilyText::new(name);
        let format = CallFormat::of(&family.template(), &family.tokenizer);
        let rows = family.tokenizer.vocab_size();
        let grammars = Grammars::new(family.tokenizer.clone(), rows, &[family.end()]).with_calls(&format);
        let parameters = SchemaPart { schema: schema.clone(), strict: true };
        let tools = vec![CallTool { name: "pick".to_owned(), parameters }];
        let grammar = grammars.compile(&GrammarSource::Call { format, tools, most: 1 }).expect("a grammar");
        let mark = family.tokenizer.token_id("<|\"|>");
        // The ids of a call. A text of Gemma's is between two marks.
        let quoted = |value: &Value| match (value, mark) {
            (Value::String(text), Some(mark)) => [&[mark], &family.plain(text)[..], &[mark]].concat(),
            (Value::String(text), None) => family.plain(text),
            (other, _) => family.plain(&other.to_string()),
        };
        let call = |values: [&Value; 3]| match mark {
            Some(_) => {
                let [a, b, c] = values.map(quoted);
                let part = |text: &str| family.plain(text);
                [part("call:pick{a:"), a, part(",b:"), b, part(",c:"), c, part("}")].concat()
            }
            None => {
                let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let part =
                    |(key, of): (&str, &Value)| format!("<parameter={key}>\n{}\n</parameter>\n", value(of));
                let parts: String = ["a", "b", "c"].into_iter().zip(values).map(part).collect();
                family.plain(&format!("\n<function=pick>\n{parts}</function>\n"))
            }
        };
        let is_allowed = |ids: Vec<u32>| {
            let mut constraint = grammar.start();
            let follows = ids.iter().all(|id| {
                let mask = constraint.mask(true).expect("a mask");
                allowed(&mask).contains(id) && constraint.push(*id).is_ok()
            });
            follows && allowed(&constraint.mask(true).expect("a mask")).contains(&family.end())
        };
        let (text, number) = (&texts[2999], &numbers[2999]);
        for third in [&texts[1], number, &json!(null), &json!(""), &json!([1])] {
            assert!(is_allowed(call([text, number, third])), "{name}: {third}");
        }
        assert!(!is_allowed(call([&json!("0"), number, number])), "{name}");
        assert!(!is_allowed(call([text, &json!(8), number])), "{name}");
        assert!(!is_allowed(call([text, number, &json!("0 1")])), "{name}");
    }
}

#[test]
fn deep_large_and_circular_schemas_are_bounded() {
    let grammars = grammars();
    let nest = |depth: usize, wrap: fn(Value) -> Value| {
        (0..depth).fold(json!({"type": "null"}), |inner, _| wrap(inner))
    };
    let chain = |n: usize| {
        let mut defs: serde_json::Map<String, Value> =
            (0..n).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect();
        defs.insert(format!("d{n}"), json!({"type": "null"}));
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    };
    let half = |n: usize| -> Value {
        // Each level doubles the number of options.
        let level = |i: usize| json!({"anyOf": [{"minimum": i}, {"maximum": 100 + i}]});
        json!({"type": "integer", "allOf": (0..n).map(level).collect::<Vec<_>>()})
    };
    let wide: serde_json::Map<String, Value> =
        (0..3000).map(|i| (format!("p{i}"), json!({"type": "null"}))).collect();
    let schemas = [
        nest(120, |inner| json!({"type": "array", "items": inner})),
        nest(120, |inner| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]})),
        nest(120, |inner| json!({"anyOf": [inner, {"type": "integer"}]})),
        nest(120, |inner| json!({"allOf": [inner]})),
        chain(6000),
        half(10),
        half(40),
        json!({"type": "object", "properties": wide}),
        json!({"enum": (0..20_000).collect::<Vec<_>>()}),
        json!({"const": "ab".repeat(100_000)}),
        json!({"type": "string", "minLength": 100_000_000}),
        json!({"type": "string", "maxLength": u64::MAX}),
        json!({"type": "string", "pattern": "(((a{1,99}){1,99}){1,99}){1,99}"}),
        json!({"type": "string", "pattern": "^(a|b)*a(a|b){200}$"}),
        json!({"type": "array", "items": {}, "minItems": 1_000_000}),
        json!({"type": "integer", "multipleOf": 4_000_000_000u64}),
        json!({"const": i64::MIN}),
        json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
        json!({"type": "integer", "allOf": [{"multipleOf": 4_294_967_291u64}, {"multipleOf": 4_294_967_279u64}]}),
        json!({"$ref": "#"}),
        json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        json!({"$defs": {"a": {"$ref": "#/$defs/a", "type": "object"}}, "$ref": "#/$defs/a"}),
        json!({"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]}),
    ];
    let mut compiled = 0;
    for schema in schemas {
        match grammars.compile(&strict(schema.clone())) {
            Ok(grammar) => {
                compiled += 1;
                let mut constraint = grammar.start();
                for _ in 0..50 {
                    // The call returns for any bounds in the schema.
                    let Ok(mask) = constraint.mask(true) else { break };
                    let ids = allowed(&mask);
                    if STOPS.contains(&ids[0]) || constraint.push(ids[ids.len() / 2]).is_err() {
                        break;
                    }
                }
            }
            Err(TextError::Grammar(problem)) => {
                assert!(problem.len() < 200 && !problem.contains('\n'), "{problem}")
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(compiled > 10, "{compiled} were compiled");
}

#[test]
fn shared_tables_can_be_prepared_before_the_first_grammar() {
    let grammars = grammars();
    assert!(!grammars.is_prepared());
    grammars.prepare();
    assert!(grammars.is_prepared());
    assert!(accepts(&grammars, &GrammarSource::Choice(vec!["yes".into()]), "yes"));
    // An error of the vocabulary is reported by the first grammar.
    let endless = Grammars::new(tokenizer(), ROWS, &[]);
    endless.prepare();
    assert!(refusal(&endless, &GrammarSource::json_object()).contains("it has no stop token"));
}

/// An object schema with this many properties, all of them null. `others` = whether other properties are allowed.
fn object_of(optional: usize, required: usize, others: bool) -> Value {
    let names: Vec<String> = (0..optional + required).map(|i| format!("p{i}")).collect();
    let properties: serde_json::Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!({"type": "null"}))).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": names[optional..],
        "additionalProperties": others,
    })
}

/// Writes two properties of an object of [`object_of`].
fn write_two(grammar: &Grammar, tokenizer: &Tokenizer) -> Result<(), TextError> {
    let mut constraint = grammar.start();
    for id in tokenizer.encode("{\"p0\": null, \"p1\": null", false).unwrap() {
        constraint.mask(true)?;
        constraint.push(id)?;
    }
    constraint.mask(true).map(drop)
}

#[test]
fn objects_with_many_properties_are_accepted_up_to_a_limit() {
    let (grammars, tokenizer) = (grammars(), tokenizer());
    for (optional, required) in [(480, 0), (0, 3000), (480, 480)] {
        for others in [false, true] {
            let grammar = grammars.compile(&strict(object_of(optional, required, others))).unwrap();
            let answered = write_two(&grammar, &tokenizer);
            assert!(answered.is_ok(), "{optional} optional, {required} required: {answered:?}");
        }
    }
    // With more properties, the answer would end early without an error from the compiler.
    let large = object_of(481, 9, false);
    for schema in [
        large.clone(),
        json!({"type": "array", "items": large}),
        json!({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": large}}),
        json!({"type": "object", "properties": {"enum": large}, "required": ["enum"]}),
    ] {
        for strict in [true, false] {
            let problem = refusal(&grammars, &GrammarSource::JsonSchema { schema: schema.clone(), strict });
            assert!(problem.contains("481") && problem.contains("optional"), "{problem}");
        }
    }
    // Text that only looks like a schema is data.
    let data = json!({"enum": [1, {"properties": large["properties"]}]});
    assert!(accepts(&grammars, &strict(data), "1"));
}

#[test]
fn mutated_schemas_never_panic_or_hang() {
    let seed = 0x5c4e;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (grammars, tokenizer) = (grammars(), tokenizer());
    let junk = values(json!([
        null, true, false, -1, 0, 1e308, 5e-324, u64::MAX, i64::MIN, 0.1, "", "½".repeat(80), "#",
        "#/$defs/d0", "string", [], {}, ["integer", "integer"], "\\p{L}+(a|b)*", "(?i)x{0,1000}", [1, 1],
        {"$ref": "#"}
    ]));
    let keywords = words(
        "type enum const not minimum multipleOf pattern required items maxItems $ref allOf x-guidance \
        minLength format",
    );
    let (mut compiled, mut walked) = (0, 0);
    let all = rounds(2000);
    for _ in 0..all {
        let mut schema = random_schema(&mut rng, 3, 1);
        schema["$defs"] = json!({"d0": random_schema(&mut rng, 1, 1)});
        for _ in 0..rng.random_range(1..4) {
            mutate(&mut schema, &junk, &keywords, &mut rng);
        }
        let source = GrammarSource::JsonSchema { schema: schema.clone(), strict: rng.random() };
        let grammar = match grammars.compile(&source) {
            Ok(grammar) => grammar,
            Err(TextError::Grammar(problem)) => {
                assert!(problem.len() < 700 && !problem.contains('\n'), "{schema}: {problem}");
                continue;
            }
            Err(other) => panic!("{schema}: {other:?}"),
        };
        compiled += 1;
        let mut constraint = grammar.start();
        for _ in 0..30 {
            let Ok(mask) = constraint.mask(true) else { break };
            let ids = allowed(&mask);
            let id = *ids.choose(&mut rng).expect("the mask allows a token");
            if STOPS.contains(&id) {
                walked += 1;
                break;
            }
            assert!(!tokenizer.is_special(id), "{schema}");
            constraint.push(id).unwrap_or_else(|e| panic!("{schema}: {e}"));
        }
    }
    assert!(
        4 * compiled > all && 10 * walked > all,
        "{compiled} compiled, {walked} ended: too few mutated schemas are valid"
    );
}

/// Replaces, removes or adds something at a random depth.
fn mutate(value: &mut Value, junk: &[Value], keywords: &[&str], rng: &mut ChaCha8Rng) {
    let deeper = rng.random_bool(0.7);
    match value {
        Value::Object(map) if !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).unwrap().clone();
            if deeper && (map[&key].is_object() || map[&key].is_array()) {
                mutate(&mut map[&key], junk, keywords, rng);
            } else {
                let by = junk.choose(rng).unwrap().clone();
                match rng.random_range(0..4) {
                    0 => drop(map.remove(&key)),
                    1 => drop(map.insert((*keywords.choose(rng).unwrap()).to_owned(), by)),
                    _ => map[&key] = by,
                }
            }
        }
        Value::Array(items) if !items.is_empty() && deeper => {
            let index = rng.random_range(0..items.len());
            mutate(&mut items[index], junk, keywords, rng);
        }
        _ => *value = junk.choose(rng).unwrap().clone(),
    }
}

/// The vocabulary has 262144 tokens. Many of them match several terminals of the grammar.
#[test]
fn json_grammars_give_valid_answers_with_the_real_vocabulary() {
    let Some(json) = real_tokenizer_json() else { return support::skip("real-tokenizer") };
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    let grammars = Grammars::new(tokenizer.clone(), 262_208, &STOPS);
    let seed = 0x6e33a;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..10 {
        let schema = random_schema(&mut rng, 3, 0);
        let validator =
            jsonschema::draft202012::options().should_validate_formats(true).build(&schema).unwrap();
        let grammar = grammars.compile(&strict(schema.clone())).unwrap();
        let text = walk(grammar.start(), &tokenizer, &mut rng);
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{schema} accepts {text:?}: {e}"));
        assert!(validator.is_valid(&value), "{schema} accepts {text}");
    }
    // The schema has the largest number of optional properties, and one token may end a property and begin the next
    // one.
    for others in [false, true] {
        let grammar = grammars.compile(&strict(object_of(480, 0, others))).unwrap();
        write_two(&grammar, &tokenizer).unwrap();
    }
}
