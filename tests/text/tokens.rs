//! Tokenizer, chat templates, detokenizer and stop strings, against the goldens in `tests/data/tokenizer-mini`
//! (a 512-piece tokenizer with the structure of Gemma's) and `tests/data/tokenizer` (the real one's cases; its
//! tokenizer.json is fetched), and against the `tokenizers` crate and naive oracles on seeded random input.

use std::fs;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use unicorn::model::arch::open_files;
use unicorn::text::{
    CallFormat, ChatFiles, ChatTemplate, MAX_STOP_BYTES, MAX_STOPS, MAX_TEXT_BYTES, Message, PromptEnding,
    StopMatcher, TemplateInput, TemplateKwargs, TextError, ThoughtStart, Tokenizer,
};

use crate::support::app::FamilyText;
use crate::support::tokenizers::{
    ByteLevelCase, DecodeCase, Rendered, TemplateGoldens, cases, gemma_template, gemma4_vocabulary,
    real_tokenizer_json, render, template, tokenizer,
};
use crate::support::{self, skip};

#[derive(Deserialize)]
struct EncodeCase {
    text: String,
    ids: Vec<u32>,
    decoded: String,
    decoded_skip_special: String,
}

#[derive(Deserialize)]
struct ChatCase {
    note: String,
    messages: serde_json::Value,
    add_generation_prompt: bool,
    rendered: Option<String>,
    ids: Option<Vec<u32>>,
    error: Option<String>,
    #[serde(default)]
    kwargs: serde_json::Map<String, serde_json::Value>,
    #[serde(default)]
    tools: Vec<serde_json::Value>,
    enable_thinking: Option<bool>,
}

fn bytes(path: &str) -> Vec<u8> {
    let path = support::data(path);
    fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The text of the bytes of `ids`. Each maximal part of an incomplete or invalid character becomes one U+FFFD, as
/// Unicode recommends and the standard library does.
fn text_of_bytes(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let shown = ids.iter().filter(|id| !(skip_special && tokenizer.is_special(**id)));
    let bytes: Vec<u8> = shown.filter_map(|id| tokenizer.token_bytes(*id)).flatten().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Checks the text of `ids` with and without special tokens. `golden` is the text of transformers. If the bytes are not
/// valid UTF-8, transformers writes one U+FFFD for each byte of the whole run of byte tokens, including complete
/// characters. In this case the text of the bytes is expected.
fn check_decoded(tokenizer: &Tokenizer, ids: &[u32], golden: [&String; 2], folder: &str) {
    for (skip_special, golden) in [false, true].into_iter().zip(golden) {
        let decoded = tokenizer.decode(ids, skip_special);
        let what = format!("{folder}: decode {ids:?}, skip {skip_special}");
        assert_eq!(decoded, text_of_bytes(tokenizer, ids, skip_special), "{what}");
        if !decoded.contains(char::REPLACEMENT_CHARACTER) {
            assert_eq!(&decoded, golden, "{what}");
        } else {
            assert!(
                golden.contains(char::REPLACEMENT_CHARACTER),
                "{what}: {decoded:?} instead of {golden:?}"
            );
        }
    }
}

/// Checks every golden case of one tokenizer exactly.
fn check_goldens(tokenizer: &Tokenizer, folder: &str) {
    for case in cases::<EncodeCase>(&format!("{folder}/encode_cases.json"), 30) {
        let text = &case.text;
        assert_eq!(tokenizer.encode(text, false).unwrap(), case.ids, "{folder}: encode {text:?}");
        let with_bos: Vec<u32> = [2].into_iter().chain(case.ids.iter().copied()).collect();
        assert_eq!(tokenizer.encode(text, true).unwrap(), with_bos, "{folder}: encode {text:?} with <bos>");
        check_decoded(tokenizer, &case.ids, [&case.decoded, &case.decoded_skip_special], folder);
    }
    for DecodeCase { ids, decoded, decoded_skip_special } in cases(&format!("{folder}/decode_cases.json"), 8)
    {
        check_decoded(tokenizer, &ids, [&decoded, &decoded_skip_special], folder);
    }

    let jinja = bytes(&format!("{folder}/chat_template.jinja"));
    let shipped = template(&jinja).unwrap();
    let chat: Vec<ChatCase> = cases(&format!("{folder}/chat_cases.json"), 10);
    // The server gives a template texts only. Two cases have other content: a list of parts, and null.
    let texts = |case: ChatCase| Some((Vec::<Message>::deserialize(&case.messages).ok()?, case));
    let chat: Vec<_> = chat.into_iter().filter_map(texts).collect();
    assert_eq!(chat.len(), 13, "{folder}: chat cases");
    for (messages, case) in &chat {
        for template in [&shipped, &gemma_template()] {
            let what = format!("{folder}, {}: {}", template.origin(), case.note);
            let rendered = template.render(messages, case.add_generation_prompt);
            match (&case.rendered, &case.error) {
                (Some(expected), None) => {
                    assert_eq!(rendered.as_ref(), Ok(expected), "{what}");
                    let ids = tokenizer.encode(expected, false).unwrap();
                    assert_eq!(Some(&ids), case.ids.as_ref(), "{what}");
                }
                (None, Some(error)) => match rendered.expect_err(&what) {
                    TextError::Raised(message) => assert_eq!(&format!("TemplateError: {message}"), error),
                    other => assert!(
                        other == TextError::NoMessages && messages.is_empty(),
                        "{what}: {other:?} instead of {error}"
                    ),
                },
                _ => panic!("{what}: a case has a text or an error"),
            }
        }
    }
}

#[test]
fn the_mini_tokenizer_matches_every_golden_case() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.vocab_size(), 512);
    check_goldens(&tokenizer, "tokenizer-mini");
}

/// All checks that need the 33 MB file are in this test, because reading the file takes seconds.
#[test]
fn the_real_tokenizer_matches_every_golden_case() {
    let Some(json) = real_tokenizer_json() else { return support::skip("real-tokenizer") };
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    check_goldens(&tokenizer, "tokenizer");

    assert_eq!(tokenizer.vocab_size(), 262_145);
    assert_eq!(tokenizer.token_id("<end_of_turn>"), Some(106));
    assert_eq!(tokenizer.token_id("<image_soft_token>"), Some(262_144));
    // The vocabulary sizes of multimodal checkpoints and of the 1B, and one that is a row too short.
    tokenizer.fits(262_208).unwrap();
    tokenizer.fits(262_144).unwrap();
    let error = tokenizer.fits(262_143).unwrap_err().to_string();
    assert!(error.contains("262143 rows") && error.contains("262143 (token"), "{error}");
    let ids = tokenizer.encode("a <image_soft_token>", false).unwrap();
    tokenizer.check_ids(&ids, 262_208).unwrap();
    let error = tokenizer.check_ids(&ids, 262_144).unwrap_err().to_string();
    assert!(error.contains("<image_soft_token>") && error.contains("262144"), "{error}");

    let crate_decode = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    compare_detokenizer(&tokenizer, &crate_decode, 7, 300, 0);
    for hostile in hostile_texts(200_000) {
        let ids = tokenizer.encode(&hostile, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), hostile.replace('▁', " "));
    }
}

#[test]
fn tokens_are_found_by_name_and_by_id() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.token_id("<bos>"), Some(2));
    assert_eq!(tokenizer.token_id("<end_of_turn>"), Some(106));
    assert_eq!(tokenizer.token_id("no such token"), None);
    assert!(tokenizer.is_special(2) && tokenizer.is_special(106));
    // Added tokens that are not special: newlines, and unused tokens.
    assert!(!tokenizer.is_special(107) && !tokenizer.is_special(6) && !tokenizer.is_special(369));
    assert!(!tokenizer.is_special(512) && !tokenizer.contains(512) && tokenizer.contains(511));
    let the = tokenizer.token_id("▁the").unwrap();
    assert_eq!(tokenizer.token(the).as_deref(), Some("▁the"));
    assert_eq!(tokenizer.decode(&[the], true), " the");
    assert_eq!(tokenizer.token_bytes(368).as_deref(), Some(&b" "[..]));
    let byte = tokenizer.token_id("<0xF0>").unwrap();
    assert_eq!(tokenizer.token_bytes(byte), Some(vec![0xf0]));
    assert_eq!(tokenizer.token_bytes(u32::MAX), None);
}

#[test]
fn a_tokenizer_needs_a_model_with_a_row_for_each_token() {
    let tokenizer = tokenizer();
    tokenizer.fits(512).unwrap();
    tokenizer.fits(1000).unwrap();
    let error = tokenizer.fits(511).unwrap_err();
    assert!(matches!(error, TextError::DoesNotFit { largest: 511, rows: 511, .. }), "{error}");
    let error = error.to_string();
    assert!(error.starts_with("tokenizer.json: ") && !error.contains('\n'), "{error}");

    // A special token at the end needs no row until a text contains it.
    let json = edited(|json| {
        let token = serde_json::json!({"id": 512, "content": "<image_soft_token>", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        json["added_tokens"].as_array_mut().unwrap().push(token);
    });
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    assert_eq!(tokenizer.vocab_size(), 513);
    tokenizer.fits(512).unwrap();
    assert!(tokenizer.fits(511).is_err());
    let ids = tokenizer.encode("hi<image_soft_token>", false).unwrap();
    assert_eq!(ids.last(), Some(&512));
    assert!(matches!(
        tokenizer.check_ids(&ids, 512),
        Err(TextError::OutsideModel { id: 512, rows: 512, .. })
    ));
    tokenizer.check_ids(&ids, 513).unwrap();
}

/// The mini tokenizer.json with one change.
fn edited(change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut json: serde_json::Value =
        serde_json::from_slice(&bytes("tokenizer-mini/tokenizer.json")).unwrap();
    change(&mut json);
    serde_json::to_vec(&json).unwrap()
}

#[test]
fn an_unsupported_tokenizer_is_refused_with_the_field() {
    use serde_json::{Value, json};
    type Change = fn(&mut Value);
    let refused: [(&str, Change); 16] = [
        ("model.type", |json| json["model"]["type"] = json!("WordPiece")),
        ("model.type is missing", |json| json["model"]["type"] = Value::Null),
        ("model.dropout", |json| json["model"]["dropout"] = json!(0.1)),
        ("model.continuing_subword_prefix", |json| json["model"]["continuing_subword_prefix"] = json!("##")),
        ("model.unk_token", |json| json["model"]["unk_token"] = json!("<nowhere>")),
        ("lose characters", |json| {
            json["model"]["unk_token"] = Value::Null;
            json["model"]["byte_fallback"] = json!(false);
        }),
        ("decoder is a WordPiece", |json| {
            json["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        }),
        ("decoder is ByteLevel, but no normalizer or pre_tokenizer is", |json| {
            json["decoder"] = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        }),
        ("decoder is missing", |json| json["decoder"] = Value::Null),
        ("decoder ends with ByteFallback, Strip", |json| {
            strip_start(json, 1, 0);
            strip_start(json, 1, 0);
            json["decoder"]["decoders"].as_array_mut().unwrap().remove(2);
        }),
        ("decoder step Strip is {\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":1}", |json| {
            strip_start(json, 1, 1)
        }),
        ("expected the content \" \", a start of 0 to 16 and the stop 0", |json| strip_start(json, 17, 0)),
        ("has the id 7", |json| json["added_tokens"][6]["id"] = json!(7)),
        ("id 4000000000", |json| json["model"]["vocab"]["zz"] = json!(4_000_000_000u32)),
        ("not a tokenizer.json", |json| *json = json!([1, 2])),
        ("has a form that this server cannot read", |json| json["model"]["merges"] = json!([1])),
    ];
    for (expected, change) in refused {
        let Err(error) = Tokenizer::from_bytes(&edited(change), "dir/tokenizer.json") else {
            panic!("{expected}: accepted");
        };
        let error = error.to_string();
        assert!(error.starts_with("dir/tokenizer.json: ") && error.contains(expected), "{expected}: {error}");
        assert!(!error.contains('\n') && !error.contains("enum"), "{error}");
    }
    // Settings in the file must never truncate or pad a prompt.
    let cutting = edited(|json| {
        json["truncation"] =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"});
    });
    let cutting = Tokenizer::from_bytes(&cutting, "tokenizer.json").unwrap();
    let text = "this is the vim help";
    assert_eq!(cutting.encode(text, true).unwrap(), tokenizer().encode(text, true).unwrap());
    assert_eq!(cutting.encode("a", false).unwrap().len(), 1);
}

/// Adds the step that strips spaces to the end of the decoder.
fn strip_start(json: &mut serde_json::Value, start: usize, stop: usize) {
    let strip = serde_json::json!({"type": "Strip", "content": " ", "start": start, "stop": stop});
    json["decoder"]["decoders"].as_array_mut().unwrap().push(strip);
}

/// A step that replaces each `pattern` by `content`.
fn replace(pattern: &str, content: &str) -> serde_json::Value {
    serde_json::json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

/// One step that runs these steps in sequence. `list` = the field name of the list.
fn in_sequence(list: &str, steps: &[serde_json::Value]) -> serde_json::Value {
    serde_json::json!({"type": "Sequence", list: steps})
}

#[test]
fn steps_that_lengthen_a_text_too_much_are_refused_with_the_field() {
    use serde_json::{Value, json};
    let tenfold = replace("h", "hhhhhhhhhh");
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let regex = |regex: &str, content: &str| json!({"type": "Replace", "pattern": {"Regex": regex}, "content": content});
    let normalizers = |steps: &[Value]| in_sequence("normalizers", steps);
    let a = json!({"Sequence": {"id": "A", "type_id": 0}});
    let bos = json!({"SpecialToken": {"id": "<bos>", "type_id": 0}});
    let template = |pieces: &[&Value], ids: Value| {
        json!({"type": "TemplateProcessing", "single": pieces, "pair": [a, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": ids, "tokens": vec!["<bos>"; ids.as_array().map_or(0, Vec::len)]}}})
    };
    let valid = template(&[&bos, &a], json!([2]));
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    for (field, steps, expected) in [
        // Nine of these steps would turn one letter into a gigabyte.
        (
            "normalizer",
            normalizers(&vec![tenfold.clone(); 9]),
            "normalizer.normalizers[1] (Replace), with the steps before it, makes a text up to 100.0 times as long; expected at most 16 times",
        ),
        (
            "normalizer",
            normalizers(&[normalizers(std::slice::from_ref(&tenfold)), tenfold.clone()]),
            "normalizer.normalizers[1] (Replace)",
        ),
        ("normalizer", replace("", "-"), "normalizer.pattern matches the empty text"),
        ("normalizer", regex("x*", "y"), "normalizer.pattern matches the empty text"),
        (
            "normalizer",
            regex("a(?=b)", ""),
            "normalizer.pattern.Regex is not a regular expression without look-around",
        ),
        ("normalizer", regex("(?:a++|aa|a)*c", ""), "normalizer.pattern.Regex has a possessive repetition"),
        ("normalizer", json!({"type": "Prepend", "prepend": "x".repeat(16)}), "normalizer (Prepend)"),
        (
            "normalizer",
            normalizers(&vec![json!({"type": "NFKC"}); 2]),
            "normalizers[1] (NFKC), with the steps before it, makes a text up to 121.0",
        ),
        (
            "normalizer",
            normalizers(&vec![json!({"type": "Strip", "strip_left": true, "strip_right": false}); 33]),
            "normalizer.normalizers[32] (Strip) is step 33 of a chain; expected at most 32",
        ),
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "normalizer is a \"Precompiled\", a kind of step",
        ),
        // The crate would guess the type from the fields.
        ("normalizer", json!({"prepend": "x".repeat(1000)}), "normalizer has no type"),
        ("normalizer", json!({"type": "Other", "prepend": "x".repeat(1000)}), "normalizer is a \"Other\""),
        (
            "pre_tokenizer",
            in_sequence("pretokenizers", &vec![metaspace.clone(); 2]),
            "pre_tokenizer.pretokenizers[0] (Metaspace), with the steps before it, makes a text up to 18.0",
        ),
        (
            "pre_tokenizer",
            in_sequence("pretokenizers", &vec![byte_level.clone(); 3]),
            "pre_tokenizer.pretokenizers[1] (ByteLevel), with the steps before it, makes a text up to 48.0",
        ),
        ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "pre_tokenizer.length is 0"),
        (
            "pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "(a)\\1"}, "behavior": "Isolated", "invert": false}),
            "pre_tokenizer.pattern.Regex",
        ),
        ("post_processor", template(&[&a, &a], json!([2])), "post_processor.single has the text 2 times"),
        ("post_processor", template(&[&bos], json!([2])), "post_processor.single has the text 0 times"),
        (
            "post_processor",
            template(&[&bos, &a], json!(vec![2; 65])),
            "post_processor.single adds 65 ids; expected at most 64",
        ),
        (
            "post_processor",
            template(&[&a, &json!({"Sequence": {"id": "B", "type_id": 0}})], json!([2])),
            "post_processor.single: expected special tokens and the sequence A",
        ),
        (
            "post_processor",
            template(&[&json!({"SpecialToken": {"id": "<none>", "type_id": 0}}), &a], json!([2])),
            "post_processor.special_tokens lacks \"<none>\"",
        ),
        (
            "post_processor",
            in_sequence("processors", &[valid.clone(), valid.clone()]),
            "post_processor has 2 steps that add ids",
        ),
        (
            "post_processor",
            json!({"type": "ByteLevel", "single": [a, a], "pair": [], "special_tokens": {}}),
            "post_processor (ByteLevel) has the field single",
        ),
        (
            "decoder",
            in_sequence(
                "decoders",
                &[replace("▁", &" ".repeat(49)), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})],
            ),
            "decoder.decoders[0] (Replace)",
        ),
    ] {
        let Err(error) =
            Tokenizer::from_bytes(&edited(|json| json[field] = steps.clone()), "dir/tokenizer.json")
        else {
            panic!("{steps}: accepted");
        };
        let error = error.to_string();
        assert!(error.starts_with("dir/tokenizer.json: ") && error.contains(expected), "{expected}: {error}");
        assert!(!error.contains('\n') && error.len() < 2000, "{error}");
    }

    // If a field occurs twice, this program and the crate could read different values.
    let text = String::from_utf8(bytes("tokenizer-mini/tokenizer.json")).unwrap();
    let twice = r#""normalizer":{"type":"NFC","type":"Prepend","prepend":"xxxxxxxxxxxxxxxxxxxxxxxxx","#;
    let at = text.find("\"normalizer\"").expect("a normalizer");
    let open = text[at..].find('{').expect("an object") + at;
    let twice = format!("{}{twice}{}", &text[..at], &text[open + 1..]);
    let error = Tokenizer::from_bytes(twice.as_bytes(), "t").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("duplicate field `type`"), "{error}");

    // The length of each token is limited.
    let long = edited(|json| json["model"]["vocab"]["x".repeat(300)] = json!(512));
    let error = Tokenizer::from_bytes(&long, "t").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("token 512 has 300 bytes; expected at most 256"), "{error}");
}

#[test]
fn accepted_steps_never_lengthen_a_text_beyond_the_limit() {
    use serde_json::json;
    const SEED: u64 = 0x6704;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let regex = |regex: &str, content: &str| json!({"type": "Replace", "pattern": {"Regex": regex}, "content": content});
    let normalizers = [
        replace(" ", "▁"),
        replace("ab", "aabb"),
        regex("x+", "yy"),
        regex("[ab]{2,}", "é"),
        json!({"type": "Prepend", "prepend": "▁"}),
        json!({"type": "NFC"}),
        json!({"type": "NFD"}),
        json!({"type": "NFKC"}),
        json!({"type": "NFKD"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "StripAccents"}),
        json!({"type": "Nmt"}),
        json!({"type": "ByteLevel"}),
    ];
    let split =
        json!({"type": "Split", "pattern": {"Regex": "[a-z]"}, "behavior": "Isolated", "invert": false});
    let pre_tokenizers = [
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        split,
        json!({"type": "Digits", "individual_digits": true}),
        json!({"type": "Punctuation", "behavior": "Isolated"}),
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "WhitespaceSplit"}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "FixedLength", "length": 1}),
    ];
    let pick = |rng: &mut ChaCha8Rng, list: &str, of: &[serde_json::Value]| {
        let steps: Vec<_> =
            (0..rng.random_range(0..4)).map(|_| of[rng.random_range(0..of.len())].clone()).collect();
        in_sequence(list, &steps)
    };
    // Characters that grow most under each kind of step, pieces of one character, and a text that matches no piece.
    let texts =
        ["\u{fdfa}", "\u{390}\u{1d160}", "\u{130}\u{23a}", "a\nb\n \n\u{fdfa}\n", " ", "xababx", "🦄<bos>é½"];
    let (mut accepted, mut most) = (0, 0.0f64);
    for round in 0..200 {
        let normalizer = pick(&mut rng, "normalizers", &normalizers);
        let pre_tokenizer = pick(&mut rng, "pretokenizers", &pre_tokenizers);
        let what = format!("round {round}: {normalizer}, {pre_tokenizer}");
        let json = edited(|json| (json["normalizer"], json["pre_tokenizer"]) = (normalizer, pre_tokenizer));
        let Ok(tokenizer) = Tokenizer::from_bytes(&json, "t") else { continue };
        accepted += 1;
        for text in texts.iter().map(|text| text.repeat(20)) {
            let ids = tokenizer.encode(&text, true).unwrap_or_else(|error| panic!("{what}: {error}"));
            // Each id represents at least one byte.
            let factor = (ids.len() - 1) as f64 / text.len() as f64;
            most = most.max(factor);
            assert!(factor <= 16.0, "{what}: {factor} ids for each byte of {text:?}");
        }
    }
    println!("{accepted} accepted, at most {most:.1} ids for each byte");
    assert!(accepted > 100 && most > 3.0, "{accepted} accepted, {most}");

    // If a byte may become more bytes, the text limit is lower. Gemma's steps do not change the limit.
    let prefixed = edited(|json| {
        let steps = [json!({"type": "Prepend", "prepend": "▁"}), replace(" ", "▁")];
        json["normalizer"] = in_sequence("normalizers", &steps);
    });
    let prefixed = Tokenizer::from_bytes(&prefixed, "t").unwrap();
    assert_eq!((prefixed.max_text_bytes(), tokenizer().max_text_bytes()), ((8 << 20) / 12, MAX_TEXT_BYTES));
    let bytes = prefixed.max_text_bytes() + 1;
    let error = prefixed.encode(&"a".repeat(bytes), false).unwrap_err();
    assert_eq!(error, TextError::TooLong { bytes, limit: bytes - 1 });
}

#[test]
fn mutated_tokenizer_files_load_or_are_refused() {
    const SEED: u64 = 0x70c3;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let original = bytes("tokenizer-mini/tokenizer.json");
    let mut refused = 0;
    for _ in 0..400 {
        let mutated = mutate(&mut rng, &original);
        match Tokenizer::from_bytes(&mutated, "tokenizer.json") {
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().contains('\n'), "{error}");
            }
            Ok(tokenizer) => {
                if let Ok(ids) = tokenizer.encode("Hello the vim 🦄\n\n<end_of_turn>", true) {
                    tokenizer.decode(&ids, false);
                }
            }
        }
    }
    assert!(refused > 100, "only {refused} of 400 mutations were refused: do they reach the file?");
}

/// Truncates, flips, repeats or overwrites a part of `original`.
fn mutate(rng: &mut ChaCha8Rng, original: &[u8]) -> Vec<u8> {
    const NUMBER: &[u8] = b"9999999999";
    const TOKENS: [&[u8]; 16] = [
        b"{{", b"}}", b"{%", b"%}", b"null", b"\"", b"[", b"]", b"{", b"}", NUMBER, b"-1", b"for", b"\\",
        b"<0x", b"\xff",
    ];
    let mut mutated = original.to_vec();
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..mutated.len().max(2) - 1);
        let end = (at + rng.random_range(1..40)).min(mutated.len());
        match rng.random_range(0..6) {
            0 => mutated.truncate(at),
            1 if at < mutated.len() => mutated[at] ^= 1 << rng.random_range(0..8),
            2 if at < end => drop(mutated.drain(at..end)),
            3 if at < end => {
                let copy = mutated[at..end].to_vec();
                mutated.splice(at..at, copy);
            }
            _ => {
                let token = TOKENS[rng.random_range(0..TOKENS.len())];
                let end = if rng.random() { at } else { end };
                mutated.splice(at.min(end)..end, token.iter().copied());
            }
        }
        if mutated.is_empty() {
            break;
        }
    }
    mutated
}

/// Texts for which a careless tokenizer takes quadratic time.
fn hostile_texts(length: usize) -> Vec<String> {
    vec![
        " ".repeat(length),
        "a".repeat(length),
        "\n".repeat(length),
        "ab".repeat(length / 2),
        "the ".repeat(length / 4),
        "🦄".repeat(length / 4),
        "<".repeat(length),
        "<start_of_turn".repeat(length / 14),
        "<bos>".repeat(length / 5),
        "▁".repeat(length / 3),
        "\u{0}\u{1}\u{7f}\u{fffd}\u{e000}\u{301}".repeat(length / 12),
    ]
}

#[test]
fn a_megabyte_of_anything_is_encoded_without_loss() {
    let tokenizer = tokenizer();
    for text in hostile_texts(1 << 20) {
        let ids = tokenizer.encode(&text, false).unwrap();
        // The vocabulary writes a space as '▁', so both decode to a space.
        assert!(
            tokenizer.decode(&ids, false) == text.replace('▁', " "),
            "{:?}...",
            &text[..text.len().min(16)]
        );
    }
    let error = tokenizer.encode(&"a".repeat(MAX_TEXT_BYTES + 1), false).unwrap_err();
    assert_eq!(error, TextError::TooLong { bytes: MAX_TEXT_BYTES + 1, limit: MAX_TEXT_BYTES });
}

#[test]
fn random_text_survives_encoding() {
    const SEED: u64 = 11;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let tokenizer = tokenizer();
    for _ in 0..2000 {
        let length = rng.random_range(0..60);
        let text: String = (0..length)
            .map(|_| match rng.random_range(0..6) {
                0 => ' ',
                1 => rng.random_range('a'..='z'),
                2 => ['\n', '\t', '<', '>', '\u{301}', '\u{200d}'][rng.random_range(0..6)],
                _ => rng.random::<char>(),
            })
            .collect();
        let ids = tokenizer.encode(&text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text.replace('▁', " "), "{text:?}");
    }
}

#[test]
fn incremental_detokenization_equals_decode() {
    let reference = tokenizers::Tokenizer::from_bytes(bytes("tokenizer-mini/tokenizer.json")).unwrap();
    compare_detokenizer(&tokenizer(), &reference, 42, 3000, 0);
}

/// As the tokenizers of Llama 2 and Mistral do: encoding adds a space, and decoding removes it.
#[test]
fn spaces_are_stripped_from_the_start_of_a_text_only() {
    for start in [1, 3] {
        let file = edited(|json| {
            let prepend = serde_json::json!({"type": "Prepend", "prepend": "▁"});
            let spaces = json["normalizer"].take();
            json["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": [prepend, spaces]});
            strip_start(json, start, 0);
        });
        let tokenizer = Tokenizer::from_bytes(&file, "tokenizer.json").unwrap();
        compare_detokenizer(&tokenizer, &tokenizers::Tokenizer::from_bytes(&file).unwrap(), 43, 2000, start);
        let ids = tokenizer.encode(" help  me", false).unwrap();
        let expected = if start == 1 { " help  me" } else { "help  me" };
        assert_eq!(tokenizer.decode(&ids, true), expected);
        let mut continued = tokenizer.detokenizer(true);
        assert_eq!(ids.iter().map(|id| continued.push(*id).to_owned()).collect::<String>(), "  help  me");
    }
}

/// Compares the detokenizer with the text of the tokens' bytes without up to `stripped` spaces at the start, and if the
/// bytes are valid UTF-8, also with the crate. Many of the random ids are byte tokens.
fn compare_detokenizer(
    tokenizer: &Tokenizer,
    reference: &tokenizers::Tokenizer,
    seed: u64,
    rounds: usize,
    stripped: usize,
) {
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let vocab = tokenizer.vocab_size() as u32;
    let byte = |byte: u8| tokenizer.token_id(&format!("<{byte:#04X}>")).unwrap();
    for id in 0..vocab.min(20_000) {
        let decoded = tokenizer.decode(&[id], false);
        assert_eq!(decoded, reference.decode(&[id], false).unwrap(), "id {id}");
    }
    for round in 0..rounds {
        let mut ids: Vec<u32> = Vec::new();
        for _ in 0..rng.random_range(0..24) {
            match rng.random_range(0..8) {
                0 => ids.push(rng.random_range(0..vocab)),
                1 => ids.push([0, 2, 106, 107, vocab, u32::MAX][rng.random_range(0..6)]),
                2 => ids.push(byte(rng.random())),
                3..=5 => {
                    // The bytes of a character: complete, cut short, or with a control token or an unknown id between
                    // them.
                    let c = rng.random_range('\u{80}'..char::MAX);
                    let encoded: Vec<u32> = c.to_string().bytes().map(byte).collect();
                    let cut = if rng.random_range(0..4) == 0 { 1 } else { 0 };
                    ids.extend(&encoded[..encoded.len() - cut]);
                    if rng.random_range(0..4) == 0 {
                        let at = rng.random_range(0..=ids.len());
                        ids.insert(at, [2, vocab][rng.random_range(0..2)]);
                    }
                }
                _ => ids.extend([rng.random_range(0..vocab), rng.random_range(0..vocab)]),
            }
        }
        for skip_special in [false, true] {
            let mut detokenizer = tokenizer.detokenizer(skip_special).at_start();
            let mut text = String::new();
            for &id in &ids {
                text.push_str(detokenizer.push(id));
            }
            text.push_str(detokenizer.finish());
            let expected = text_of_bytes(tokenizer, &ids, skip_special);
            let spaces = expected.len() - expected.trim_start_matches(' ').len();
            let expected = expected[spaces.min(stripped)..].to_owned();
            let golden = reference.decode(&ids, skip_special).unwrap();
            let cut = golden.contains(char::REPLACEMENT_CHARACTER);
            assert!(
                cut || golden == expected,
                "seed {seed}, round {round}, {ids:?}: the crate says {golden:?}"
            );
            assert_eq!(text, expected, "seed {seed}, round {round}, skip {skip_special}, {ids:?}");
            assert_eq!(tokenizer.decode(&ids, skip_special), expected);
            // A finished detokenizer is empty, so it can be used again.
            assert_eq!(detokenizer.finish(), "");
        }
    }
}

#[test]
fn text_is_emitted_as_soon_as_it_is_complete() {
    let tokenizer = tokenizer();
    let byte = |byte: u8| tokenizer.token_id(&format!("<{byte:#04X}>")).unwrap();
    let mut detokenizer = tokenizer.detokenizer(true);
    let mut push =
        |ids: &[u32]| -> String { ids.iter().map(|id| detokenizer.push(*id).to_owned()).collect() };
    let bytes = |bytes: &[u8]| -> Vec<u32> { bytes.iter().map(|b| byte(*b)).collect() };
    assert_eq!(push(&[369]), "a");
    let unicorn = bytes("🦄".as_bytes());
    assert_eq!(push(&unicorn[..3]), "");
    assert_eq!(push(&[106]), "", "a skipped token does not end a character");
    assert_eq!(push(&unicorn[3..]), "🦄", "a character is emitted with its last byte");
    assert_eq!(push(&bytes(b"A")), "A", "a byte may be a character");
    assert_eq!(push(&unicorn[..3]), "");
    assert_eq!(push(&[370]), "\u{fffd}b", "one U+FFFD for a character that text interrupts");
    assert_eq!(push(&bytes(&[0xe2, 0x82])), "");
    assert_eq!(push(&bytes(&[0xc3])), "\u{fffd}", "interrupted by the next character");
    assert_eq!(push(&bytes(&[0xa9])), "é");
    assert_eq!(push(&bytes(&[0xff])), "\u{fffd}", "a byte that is never valid");
    assert_eq!(push(&bytes(&[0xe0, 0x80])), "\u{fffd}\u{fffd}", "a byte that must not follow");
    assert_eq!(push(&bytes(&[0xf0, 0x9f])), "");
    assert_eq!(detokenizer.finish(), "\u{fffd}", "one U+FFFD for a character that the end interrupts");
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn stop_strings_match_a_naive_search_for_every_split_of_the_text() {
    const SEED: u64 = 2024;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let alphabet = ['a', 'b', 'é', '🦄'];
    let word = |rng: &mut ChaCha8Rng, lengths: std::ops::Range<usize>| -> String {
        let length = rng.random_range(lengths);
        (0..length).map(|_| alphabet[rng.random_range(0..alphabet.len())]).collect()
    };
    let mut found = 0;
    for round in 0..5000 {
        let stops: Vec<String> = (0..rng.random_range(0..5)).map(|_| word(&mut rng, 1..6)).collect();
        let text = word(&mut rng, 0..40);
        let (expected, expected_stop) = naive_stop(&text, &stops);

        let mut matcher = StopMatcher::new(&stops).unwrap();
        let (mut out, mut stop) = (String::new(), None);
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let cut = rest.char_indices().map(|(at, c)| at + c.len_utf8()).nth(rng.random_range(0..4));
            let (piece, after) = rest.split_at(cut.unwrap_or(rest.len()));
            rest = after;
            let step = matcher.push(piece);
            out.push_str(&step.text);
            assert!(expected.starts_with(&out), "round {round}: {out:?} leaks, {stops:?} in {text:?}");
            stop = stop.or(step.stop);
        }
        out.push_str(&matcher.finish());
        assert_eq!((out.as_str(), stop), (expected, expected_stop), "round {round}: {stops:?} in {text:?}");
        found += usize::from(stop.is_some());
    }
    assert!((1000..4900).contains(&found), "{found} of 5000 rounds stopped: the test needs both");
}

/// The text before the stop string that is complete first. If several end at the same byte, the longest one counts.
fn naive_stop<'a>(text: &'a str, stops: &[String]) -> (&'a str, Option<usize>) {
    for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let mut best: Option<usize> = None;
        for (index, stop) in stops.iter().enumerate() {
            if text[..end].ends_with(stop.as_str()) && best.is_none_or(|best| stop.len() > stops[best].len())
            {
                best = Some(index);
            }
        }
        if let Some(index) = best {
            return (&text[..end - stops[index].len()], Some(index));
        }
    }
    (text, None)
}

#[test]
fn unusable_stop_strings_are_refused() {
    for stops in [
        vec![String::new()],
        vec!["a".to_owned(), String::new()],
        vec!["x".repeat(MAX_STOP_BYTES + 1)],
        vec!["x".to_owned(); MAX_STOPS + 1],
    ] {
        assert!(matches!(StopMatcher::new(&stops), Err(TextError::Stop(_))), "{} strings", stops.len());
    }
    let mut none = StopMatcher::new::<&str>(&[]).unwrap();
    assert_eq!(none.push("anything").text, "anything");
    // The longest allowed stop string, repeated almost to its end: the held back text is returned completely.
    let long = "x".repeat(MAX_STOP_BYTES);
    let mut matcher = StopMatcher::new(&[&long]).unwrap();
    assert_eq!(matcher.push(&long[1..]).text, "");
    assert_eq!(matcher.push("y").text, format!("{}y", &long[1..]));
    assert_eq!(matcher.push(&long).stop, Some(0));
    assert_eq!(matcher.push("after"), Default::default());
    assert_eq!(matcher.finish(), "");
}

#[test]
fn the_template_is_read_from_each_place_in_a_checkpoint() {
    let config = bytes("tokenizer-mini/tokenizer_config.json");
    let jinja = bytes("tokenizer-mini/chat_template.jinja");
    let hello = [Message::new("user", "Hello")];
    let expected = "<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n";
    let render = |config: Option<&[u8]>, jinja: Option<&[u8]>| {
        let files = ChatFiles { tokenizer_config: config, chat_template_jinja: jinja };
        let template = ChatTemplate::from_checkpoint(files, &tokenizer())?;
        Ok::<_, TextError>((template.origin().to_owned(), template.render(&hello, true)?))
    };
    for (config, jinja, origin) in [
        (None, None, "built-in Gemma template"),
        (Some(&config), None, "tokenizer_config.json: chat_template"),
        (Some(&config), Some(&jinja), "chat_template.jinja"),
    ] {
        let rendered = render(config.map(Vec::as_slice), jinja.map(Vec::as_slice)).unwrap();
        assert_eq!(rendered, (origin.to_owned(), expected.to_owned()));
    }

    let config = |json: serde_json::Value| serde_json::to_vec(&json).unwrap();
    for (json, expected) in [
        (serde_json::json!({"chat_template": "{{ bos_token }}|{{ eos_token }}"}), "<bos>|<end_of_turn>"),
        (serde_json::json!({"bos_token": "[B]", "chat_template": "{{ bos_token }}"}), "[B]"),
        (serde_json::json!({"bos_token": {"content": "[B]"}, "chat_template": "{{ bos_token }}"}), "[B]"),
        (serde_json::json!({"bos_token": null, "chat_template": "({{ bos_token }})"}), "()"),
        (
            serde_json::json!({"chat_template": [{"name": "tool_use", "template": "no"},
            {"name": "default", "template": "yes"}]}),
            "yes",
        ),
        (serde_json::json!({"chat_template": [{"name": "rag", "template": "only"}]}), "only"),
        (
            serde_json::json!({"chat_template": null, "bos_token": "[B]"}),
            "[B]<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n",
        ),
    ] {
        assert_eq!(render(Some(&config(json)), None).unwrap().1, expected);
    }
    for (json, expected) in [
        (serde_json::json!({"chat_template": 3}), "chat_template is neither"),
        (serde_json::json!({"chat_template": [{"name": "a"}]}), "without a name or a template"),
        (
            serde_json::json!({"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}),
            "[a, b]",
        ),
        (serde_json::json!({"bos_token": 7}), "bos_token is neither"),
        (serde_json::json!({"chat_template": "{% if %}"}), "syntax error"),
        (serde_json::json!({"chat_template": "{{ 1 +"}), "line 1"),
        (serde_json::json!([]), "tokenizer_config.json"),
    ] {
        let error = render(Some(&config(json)), None).unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.starts_with("tokenizer_config.json"),
            "{expected}: {error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
    assert!(
        render(None, Some(b"\xff")).unwrap_err().to_string().starts_with("chat_template.jinja: not UTF-8")
    );
}

#[test]
fn templates_have_the_environment_of_transformers() {
    let render = |source: &str| {
        template(source)
            .and_then(|template| template.render(&[Message::new("user", " \u{1c}hi\u{a0} ")], true))
    };
    for (source, expected) in [
        ("{{ messages[0]['content'].strip() }}|{{ messages[0].content | trim }}", "hi|hi"),
        ("{{ 'xhix'.strip('x') }}{{ ' a '.lstrip() }}{{ ' a '.rstrip() }}|", "hia  a|"),
        (
            "{{ 'a,b'.split(',')[1] }}{{ 'ab'.startswith('a') }}{{ messages[-1]['role'].upper() }}",
            "bTrueUSER",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}never{% endfor %}!", "!"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        ("{% if tools is not none %}tools{% endif %}{% if documents %}docs{% endif %}none", "none"),
        ("{{ add_generation_prompt }}{{ undefined_thing }}{{ none }}", "TrueNone"),
        ("{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{{ turn(messages[0]) }}", "<user>"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
    }
    let year = render("{{ strftime_now('%Y') }}").unwrap();
    assert!(year.len() == 4 && year.as_str() >= "2025", "{year}");
    assert_eq!(render("{{ raise_exception('no\nway') }}"), Err(TextError::Raised("no\nway".to_owned())));
    let error = render("\n{{ messages[0].a.b }}").unwrap_err().to_string();
    assert!(error.starts_with("chat_template.jinja: undefined value") && error.contains("line 2"), "{error}");
}

#[test]
fn hostile_templates_end_in_a_result_or_an_error() {
    let loops = "{% for a in range(9999) %}".repeat(4) + &"{% endfor %}".repeat(4);
    let nested = "{{ ".to_owned() + &"(".repeat(100_000) + "1" + &")".repeat(100_000) + " }}";
    let lists = "{{ ".to_owned() + &"[".repeat(140) + &"]".repeat(140) + " }}";
    let ifs = "{% if true %}".repeat(2000) + &"{% endif %}".repeat(2000);
    let flood = "{% for a in range(99999) %}".to_owned() + &"x".repeat(1000) + "{% endfor %}";
    for (source, expected) in [
        (loops.as_str(), Some("did not end within")),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", Some("recursion")),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", Some("recursion")),
        ("{% include 'chat' %}", Some("recursion")),
        ("{% extends 'chat' %}", Some("")),
        ("{{ [0] * 1000000000000 | length }}", Some("operator *")),
        ("{{ 'a' * 100000000 }}", Some("operator *")),
        ("{{ 9 ** 999999 }}", Some("operator *")),
        ("{{ range(1000000000000) | list }}", Some("range")),
        ("{{ 'a'|indent(1000000000000) }}", Some("unknown filter")),
        ("{{ '{:>1000000000000}'.format(1) }}", Some("unknown method")),
        ("{% for a in messages %}{{ loop.cycle() }}{% endfor %}", Some("template engine failed")),
        (&flood, Some("too long")),
        (&nested, Some("")),
        (&ifs, Some("")),
        (&lists, Some("recursion")),
        (&"x".repeat(300 << 10), Some("at most")),
        (
            "{{ 9223372036854775807 + 9223372036854775807 }}{{ -9223372036854775808 // -1 }}{{ 1 % 0 }}",
            Some(""),
        ),
    ] {
        let what = &source[..source.len().min(60)];
        match (render(source), expected) {
            (Err(error), Some(expected)) => {
                let error = error.to_string();
                assert!(error.contains(expected), "{what}: {error}");
                assert!(!error.contains('\n'), "{what}: {error}");
            }
            (Ok(_), None) => {}
            (other, _) => panic!("{what}: {other:?}"),
        }
    }
}

/// Edge values for filters, methods and slices. Each case ends in a text or an error.
#[test]
fn edge_values_in_templates_end_in_a_result_or_an_error() {
    for source in [
        "{{ 'abc'[5:2] }}{{ 'aé🦄'[::-1] }}{{ 'é'[1:] }}{{ [1, 2][:99999999999] }}",
        "{{ [1, 2][::0] }}",
        "{{ 'abc'[-9223372036854775808:9223372036854775807] }}",
        "{{ [1]|batch(0)|list }}",
        "{{ [1]|slice(0)|list }}",
        "{{ [1]|batch(9223372036854775807)|list }}",
        "{{ [1]|slice(9223372036854775807)|list }}",
        "{{ 1 // 0 }}",
        "{{ 1 / 0 }}",
        "{{ (-9223372036854775807 - 1) // -1 }}",
        "{{ (-9223372036854775807 - 1)|abs }}",
        "{{ 1.5|round(99999999999) }}",
        "{{ 1e999|int }}",
        "{{ 'a'|indent(9223372036854775807) }}",
        "{{ '%d %s %99s'|format(1) }}",
        "{{ '%-9223372036854775807d'|format(1) }}",
        "{{ '%018446744073709551615d' % 1 }}",
        "{{ '{:018446744073709551615}'.format(1) }}",
        "{{ '{:>9223372036854775807}'.format(1) }}",
        "{{ '{:.18446744073709551615f}'.format(1.5) }}",
        "{{ '{0.__class__}{99999999999999999999}'.format(1) }}",
        "{{ 'aaa'.replace('', 'b', -9) }}{{ 'a'.split('') }}",
        "{{ 'a'.split('a', 9223372036854775807) }}{{ 'é'.find('é', 1) }}",
        "{{ range(0, 10, 0) }}",
        "{{ range(-9223372036854775807, 9223372036854775807)|length }}",
        "{{ range(1, 2, -9223372036854775808) }}",
        "{% for a in messages %}{{ loop.cycle() }}{% endfor %}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% for a, b in messages %}{% endfor %}",
        "{{ super() }}",
        "{{ self.nothing() }}",
        "{{ loop.index }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}{{ f() }}",
        "{{ debug() }}",
        "{{ messages|tojson }}",
        "{{ messages|sort(attribute='role')|map(attribute='content')|join(',')|reverse|upper }}",
        "{{ messages|groupby('role')|list }}{{ {'a': 1}|dictsort }}{{ [1, 'a', none]|unique|list }}",
        "{{ [3, 'a', none, 1.5, true]|sort }}{{ [1, none]|max }}{{ []|min }}{{ []|first }}{{ 7|last }}",
        "{{ 'a' ~ messages ~ none ~ 1 }}{{ messages + 1 }}",
        "{{ namespace(1) }}",
        "{{ raise_exception() }}",
        "{{ strftime_now('%') }}{{ strftime_now('%-') }}{{ strftime_now(3) }}",
    ] {
        match render(source) {
            Ok(text) => assert!(text.len() < 1_000_000, "{source}: {} bytes", text.len()),
            Err(error) => assert!(!error.to_string().contains('\n'), "{source}: {error}"),
        }
    }
}

#[test]
fn mutated_templates_end_in_a_result_or_an_error() {
    const SEED: u64 = 0xc0ffee;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let config = bytes("tokenizer-mini/tokenizer_config.json");
    let jinja = bytes("tokenizer-mini/chat_template.jinja");
    let messages = [Message::new("system", "s"), Message::new("user", "u"), Message::new("assistant", "a")];
    let (mut outcomes, tokenizer) = ([0; 3], tokenizer());
    for round in 0..3000 {
        let mutated = mutate(&mut rng, if round % 2 == 0 { &config } else { &jinja });
        let files = if round % 2 == 0 {
            ChatFiles { tokenizer_config: Some(&mutated), ..Default::default() }
        } else {
            ChatFiles { chat_template_jinja: Some(&mutated), ..Default::default() }
        };
        let template = ChatTemplate::from_checkpoint(files, &tokenizer);
        match template.map(|template| template.render(&messages, true)) {
            Err(error) => {
                outcomes[0] += 1;
                assert!(!error.to_string().contains('\n'), "round {round}: {error}");
            }
            Ok(Err(_)) => outcomes[1] += 1,
            Ok(Ok(_)) => outcomes[2] += 1,
        }
    }
    assert!(outcomes.iter().all(|&n| n > 50), "compile errors, render errors, results: {outcomes:?}");
}

#[test]
fn conversations_of_clients_are_normalized_for_the_template() {
    fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
        turns.iter().map(|(role, text)| Message::new(role, *text)).collect()
    }
    type Turns<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Turns<'_>, Turns<'_>); 13] = [
        (&[("user", "a")], &[("user", "a")]),
        (&[("system", " s "), ("user", " a ")], &[("system", " s "), ("user", "a")]),
        (&[("developer", "s"), ("user", "a")], &[("system", "s"), ("user", "a")]),
        (&[("system", "s"), ("developer", "t"), ("user", "a")], &[("system", "s\n\nt"), ("user", "a")]),
        // Two user messages in a row: Open WebUI sends a file and a question in this way.
        (&[("system", "s"), ("user", "a"), ("user", "b")], &[("system", "s"), ("user", "a\n\nb")]),
        (&[("user", "a"), ("assistant", "b"), ("assistant", "c")], &[("user", "a"), ("assistant", "b\n\nc")]),
        (&[("user", "a"), ("user", "  "), ("user", "b")], &[("user", "a\n\nb")]),
        // The conversation begins with a greeting.
        (&[("assistant", "hi"), ("user", "a")], &[("user", ""), ("assistant", "hi"), ("user", "a")]),
        (&[("system", "s"), ("assistant", "hi")], &[("user", "s"), ("assistant", "hi")]),
        (&[("system", "s")], &[("user", "s")]),
        // A later system message becomes a user turn at its position.
        (
            &[("user", "a"), ("assistant", "b"), ("system", "late"), ("user", "c")],
            &[("user", "a"), ("assistant", "b"), ("user", "late\n\nc")],
        ),
        (
            &[("user", "a"), ("model", "b"), ("tool", "r")],
            &[("user", "a"), ("assistant", "b"), ("user", "r")],
        ),
        (&[], &[]),
    ];
    let gemma = gemma_template();
    for (given, expected) in cases {
        assert_eq!(gemma.arrange(&messages(given)), messages(expected), "{given:?}");
    }
}

#[test]
fn a_normalized_conversation_renders_and_a_valid_one_is_unchanged() {
    const SEED: u64 = 99;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let gemma = gemma_template();
    let jinja = bytes("tokenizer-mini/chat_template.jinja");
    let shipped = template(&jinja).unwrap();
    let roles = ["system", "developer", "user", "assistant", "tool", "model", "banana"];
    let words = ["", " ", "one", " two\n", "\u{1c}three", "{{ 4 }}", "<end_of_turn>"];
    let mut already_good = 0;
    for round in 0..3000 {
        let length = rng.random_range(1..7);
        let messages: Vec<Message> = (0..length)
            .map(|_| {
                let text = words[rng.random_range(0..words.len())];
                Message::new(roles[rng.random_range(0..roles.len())], text)
            })
            .collect();
        let normal = gemma.arrange(&messages);
        let rendered = gemma.render(&normal, true).unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert_eq!(shipped.render(&normal, true).as_ref(), Ok(&rendered), "round {round}: {messages:?}");
        assert_eq!(gemma.arrange(&normal), normal, "round {round}: {messages:?}");

        // Conversations that the template accepts as they are must render the same, except for its quirks (lost text,
        // odd roles).
        let known = |m: &Message| matches!(m.role.as_str(), "user" | "assistant");
        let good = match messages[0].role.as_str() {
            "system" => messages.len() > 1 && messages[1..].iter().all(known),
            _ => messages.iter().all(known),
        };
        if let (true, Ok(before)) = (good, shipped.render(&messages, true)) {
            assert_eq!(before, rendered, "round {round}: {messages:?}");
            already_good += 1;
        }
    }
    assert!(already_good > 50, "{already_good} conversations were valid without normalization");
}

// --- other families -----------------------------------------------------------------------------------------

fn tokenizer_at(path: &str) -> Tokenizer {
    Tokenizer::from_bytes(&bytes(path), path).expect("a sound tokenizer")
}

#[test]
fn byte_level_tokenizers_match_the_goldens() {
    for (folder, bos, encode, decode) in
        [("families/tiny-llama", Some(502), 38, 0), ("families/qwen-tokenizer", None, 106, 21)]
    {
        let tokenizer = tokenizer_at(&format!("{folder}/tokenizer.json"));
        assert_eq!(tokenizer.bos(), bos);
        for case in cases::<ByteLevelCase>(&format!("{folder}/encode_cases.json"), encode) {
            let text = &case.text;
            assert_eq!(tokenizer.encode(text, false).unwrap(), case.ids, "{folder}: encode {text:?}");
            let with_bos: Vec<u32> = bos.into_iter().chain(case.ids.iter().copied()).collect();
            assert_eq!(tokenizer.encode(text, true).unwrap(), with_bos, "{folder}: encode {text:?}");
            if let Some(plain) = &case.ids_no_special {
                assert_eq!(&tokenizer.encode_text(text, false).unwrap(), plain, "{folder}: {text:?} as text");
            }
            for (skip_special, decoded) in [(false, &case.decoded), (true, &case.decoded_skip_special)] {
                assert_eq!(&tokenizer.decode(&case.ids, skip_special), decoded, "{folder}: decode {text:?}");
            }
        }
        if decode > 0 {
            for case in cases::<DecodeCase>(&format!("{folder}/decode_cases.json"), decode) {
                assert_eq!(tokenizer.decode(&case.ids, false), case.decoded, "{folder}: {:?}", case.ids);
                assert_eq!(
                    tokenizer.decode(&case.ids, true),
                    case.decoded_skip_special,
                    "{folder}: {:?}",
                    case.ids
                );
            }
        }
    }
}

/// A case of Gemma 4's tokenizer: a text with the names of control tokens, or ids with both of their texts.
#[derive(Deserialize)]
struct TextCase {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct IdsCase {
    ids: Vec<u32>,
    with_special: String,
    without_special: String,
}

#[derive(Deserialize)]
struct RenderedCase {
    rendered: String,
    ids: Vec<u32>,
}

#[test]
fn gemma_4_texts_match_the_goldens() {
    let mini = tokenizer_at("families/gemma4-tokenizer/tokenizer.json");
    assert_eq!((mini.bos(), mini.end_of_turn()), (None, Some(106)));
    for TextCase { text, ids } in cases("families/gemma4-tokenizer/encode_cases.json", 5) {
        assert_eq!(mini.encode(&text, false).unwrap(), ids, "{text:?}");
    }
}

/// The vocabulary in llama.cpp's file, which was converted from the real model.
#[test]
fn the_real_gemma_4_vocabulary_gives_the_goldens_ids() {
    let Some(path) = gemma4_vocabulary() else { return skip("llama-cpp-files") };
    let files = open_files(&path).unwrap();
    let json = files.read("tokenizer.json").unwrap().expect("a tokenizer");
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    assert_eq!(
        (tokenizer.vocab_size(), tokenizer.bos(), tokenizer.end_of_turn()),
        (262_144, Some(2), Some(106))
    );
    let folder = "families/gemma4-tokenizer/real";
    for TextCase { text, ids } in cases(&format!("{folder}/encode_cases.json"), 92) {
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{text:?}");
    }
    for IdsCase { ids, with_special, without_special } in cases(&format!("{folder}/decode_cases.json"), 7) {
        check_decoded(&tokenizer, &ids, [&with_special, &without_special], folder);
    }
    for RenderedCase { rendered, ids } in cases(&format!("{folder}/chat_cases.json"), 16) {
        assert_eq!(tokenizer.encode(&rendered, false).unwrap(), ids, "{rendered:?}");
    }
}

/// One id at a time, text is complete characters only, and its sum is the text of all ids.
#[test]
fn byte_level_texts_arrive_in_whole_characters() {
    const SEED: u64 = 41;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let tokenizer = tokenizer_at("families/qwen-tokenizer/tokenizer.json");
    let words =
        ["Grüße ", "🦄🦄", "日本語", " naïve", "\r\n", "e\u{301}", "<think>", "  12 ½", "한국", "\u{200d}"];
    for round in 0..300 {
        let text: String =
            (0..rng.random_range(1..12)).map(|_| words[rng.random_range(0..words.len())]).collect();
        let mut ids = tokenizer.encode(&text, false).unwrap();
        let mut detokenizer = tokenizer.detokenizer(false);
        let mut arrived = String::new();
        for id in &ids {
            let piece = detokenizer.push(*id);
            assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "round {round}: {text:?}");
            arrived.push_str(piece);
        }
        arrived.push_str(detokenizer.finish());
        // The tokenizer composes characters (NFC).
        assert_eq!(arrived, text.replace("e\u{301}", "é"), "round {round}");
        // Any ids decode to the text of their bytes.
        ids.iter_mut().for_each(|id| *id = rng.random_range(0..384));
        assert_eq!(
            tokenizer.decode(&ids, false),
            text_of_bytes(&tokenizer, &ids, false),
            "round {round}: {ids:?}"
        );
    }
}

#[test]
fn templates_of_other_families_match_the_goldens() {
    let jinja = bytes("families/qwen-tokenizer/chat_template.jinja");
    let gemma4 = bytes("families/gemma4-tokenizer/chat_template.jinja");
    let source = |path: &str| {
        let file: serde_json::Value = serde_json::from_slice(&bytes(path)).unwrap();
        file["chat_template"].as_str().unwrap().as_bytes().to_vec()
    };
    for (folder, template, bos, least) in [
        ("families/qwen-tokenizer", jinja, None, 21),
        ("families/gemma4-tokenizer", gemma4, Some("<bos>"), 13),
        ("families/qwen35-template", bytes("families/qwen35-template/chat_template.jinja"), None, 21),
        ("families/tiny-llama", source("families/tiny-llama/chat_cases.json"), Some("<|begin_of_text|>"), 3),
        ("smollm2", source("smollm2/chat_cases.json"), None, 10),
    ] {
        let is_borrowed = ["smollm2", "families/qwen35-template"].contains(&folder);
        let tokenizer = match is_borrowed {
            // These have the control tokens of another tokenizer, which is in the tree.
            true => tokenizer_at("families/qwen-tokenizer/tokenizer.json"),
            false => tokenizer_at(&format!("{folder}/tokenizer.json")),
        };
        let files = ChatFiles { chat_template_jinja: Some(&template), ..ChatFiles::default() };
        let template = ChatTemplate::from_checkpoint(files, &tokenizer).unwrap();
        let mut checked = 0;
        for case in cases::<ChatCase>(&format!("{folder}/chat_cases.json"), least) {
            // The server gives a template texts as content, and results as messages of their own. Clients may leave the
            // content out.
            let mut case = case;
            for message in case.messages.as_array_mut().unwrap() {
                if message.get("content").is_none_or(|content| content.is_null()) {
                    message["content"] = "".into();
                }
            }
            let Ok(messages) = Vec::<Message>::deserialize(&case.messages) else { continue };
            let Some(expected) = &case.rendered else { continue };
            if messages.is_empty() || case.messages.to_string().contains("tool_responses") {
                continue;
            }
            let what = format!("{folder}: {}", case.note);
            let thinking =
                case.enable_thinking.map(|thinking| ("enable_thinking".to_owned(), thinking.into()));
            let kwargs = TemplateKwargs::new(case.kwargs.into_iter().chain(thinking).collect()).unwrap();
            let ending = match case.add_generation_prompt {
                true => PromptEnding::Answer,
                false => PromptEnding::Closed,
            };
            let input =
                TemplateInput { tools: &case.tools, ..TemplateInput::new(&messages, ending, &kwargs) };
            assert_eq!(&template.text(&input).unwrap(), expected, "{what}");
            let has_forged = messages.iter().any(|message| message.content.text().contains("<|"));
            let prompt = template.prompt(&tokenizer, &input);
            // A template that reads the text of messages is not asked for messages with names of control tokens.
            let is_unclear = matches!(prompt, Err(TextError::Unclear { .. }));
            assert!(!is_unclear || has_forged && folder.contains("gemma4"), "{what}");
            if let (Some(ids), false, false) = (&case.ids, has_forged, is_borrowed) {
                assert_eq!(&prompt.unwrap().ids(&tokenizer).unwrap(), ids, "{what}");
                assert!(bos.is_none_or(|bos| expected.starts_with(bos)), "{what}");
            }
            checked += 1;
        }
        println!("{folder}: {checked} cases");
        assert!(checked >= least, "{folder}: {checked} cases");
    }
}

/// The date in UTC, as `2026-11-28`.
fn today() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d").to_string()
}

/// Llama 3, Mistral, Hermes and Qwen: conversations with tools, and what transformers makes of them.
#[test]
fn templates_of_llama_cpp_match_transformers() {
    let TemplateGoldens { variables, cases, templates } = TemplateGoldens::read();
    let kwargs = TemplateKwargs::new(variables).unwrap();
    let mut compared = 0;
    for golden in &templates {
        let Some(family) = FamilyText::of_llama_cpp(golden) else { return skip("llama-cpp-files") };
        let template = family.template();
        let written = CallFormat::of(&template, &family.tokenizer).syntax.name;
        assert_eq!(written, golden.syntax, "{}", golden.name);
        for (case, result) in cases.iter().zip(&golden.results) {
            let ending = if case.add_generation_prompt { PromptEnding::Answer } else { PromptEnding::Closed };
            let input =
                TemplateInput { tools: &case.tools, ..TemplateInput::new(&case.messages, ending, &kwargs) };
            let what = format!("{}: {}", golden.name, case.note);
            match result {
                Some(Rendered::Rendered(expected)) => {
                    // The goldens have a mark where a template writes the date of the day.
                    let dated = |day: &str| expected.replace("{today}", day);
                    let (before, text) = (today(), template.text(&input).unwrap());
                    assert!(text == dated(&before) || text == dated(&today()), "{what}: {text}");
                }
                Some(Rendered::Error(words)) => {
                    let error = template.text(&input).unwrap_err().to_string();
                    assert!(error.contains(words), "{what}: {error}");
                }
                None => continue,
            }
            compared += 1;
        }
    }
    println!("{compared} conversations");
    assert!(compared >= 10 * templates.len() && templates.len() >= 8, "{compared} conversations");
}

/// Ministral's system text has an example of a thought, which is not one of the model's own.
#[test]
fn a_thought_in_the_system_text_is_not_the_answers() {
    let TemplateGoldens { variables, cases, templates } = TemplateGoldens::read();
    let kwargs = TemplateKwargs::new(variables).unwrap();
    let golden = templates.iter().find(|golden| golden.name.contains("Reasoning")).expect("Ministral");
    let Some(family) = FamilyText::of_llama_cpp(golden) else { return skip("llama-cpp-files") };
    let tokens = family.tokenizer.thought_tokens().expect("a family that thinks");
    let case = cases.iter().find(|case| case.note.contains("no system message")).expect("a first turn");
    let input = TemplateInput::new(&case.messages, PromptEnding::Answer, &kwargs);
    let prompt = family.template().prompt(&family.tokenizer, &input).unwrap();
    let mut ids = prompt.ids(&family.tokenizer).unwrap();
    assert!(ids.contains(&tokens.close), "the system text has a thought");
    assert_eq!(tokens.start_after(&ids), ThoughtStart::Before);
    ids.push(tokens.open);
    assert_eq!(tokens.start_after(&ids), ThoughtStart::Inside);
}

#[test]
fn a_conversation_is_arranged_for_its_template() {
    let say = |list: &[(&str, &str)]| -> Vec<Message> {
        list.iter().map(|(role, text)| Message::new(role, *text)).collect()
    };
    let conversation = say(&[
        ("developer", " s "),
        ("user", " a "),
        ("tool", "r"),
        ("model", " b "),
        ("system", "late"),
        ("user", "c"),
    ]);
    let chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let alternating = "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}{{ messages[0].content }}{% else %}\
                       {% set turns = messages %}{% endif %}{% for m in turns %}\
                       {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}\
                       {{ m.content }}{% endfor %}";
    let without_system = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
                          {{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
    for (source, expected) in [
        (
            chatml,
            &[
                ("system", " s "),
                ("user", " a "),
                ("user", "r"),
                ("assistant", " b "),
                ("system", "late"),
                ("user", "c"),
            ][..],
        ),
        (alternating, &[("system", " s "), ("user", "a\n\nr"), ("assistant", "b"), ("user", "late\n\nc")]),
        (without_system, &[("user", " s \n\na\n\nr"), ("assistant", "b"), ("user", "late\n\nc")]),
        // A template that accepts nothing gets what most templates accept, and refuses it itself.
        (
            "{{ raise_exception('never') }}",
            &[("system", " s "), ("user", "a\n\nr"), ("assistant", "b"), ("user", "late\n\nc")],
        ),
    ] {
        assert_eq!(template(source).unwrap().arrange(&conversation), say(expected), "{source}");
    }
}

#[test]
fn variables_of_a_request_reach_the_template_and_never_become_control_tokens() {
    let object = |value: serde_json::Value| value.as_object().unwrap().clone();
    for name in ["messages", "tools", "add_generation_prompt", "bos_token"] {
        assert_eq!(TemplateKwargs::new(object(serde_json::json!({name: 1}))).unwrap_err(), name);
    }
    let variables = object(serde_json::json!({
        "mood": "<start_of_turn>merry", "deep": {"list": ["<end_of_turn>"]}, "count": 3, "on": true,
    }));
    let kwargs = TemplateKwargs::new(variables).unwrap();
    let source = "{{ bos_token }}{% if on %}{{ mood }} {{ count + 1 }} {{ deep.list[0] }}{% endif %}{{ messages[0].content }}\
                  <end_of_turn>";
    let (template, tokenizer) = (template(source).unwrap(), tokenizer());
    let messages = [Message::new("user", "hi")];
    let prompt =
        template.prompt(&tokenizer, &TemplateInput::new(&messages, PromptEnding::Answer, &kwargs)).unwrap();
    assert_eq!(prompt.text, "<bos><start_of_turn>merry 4 <end_of_turn>hi<end_of_turn>");
    let ids = prompt.ids(&tokenizer).unwrap();
    let of = |token: &str| {
        let id = tokenizer.token_id(token).unwrap();
        ids.iter().filter(|other| **other == id).count()
    };
    assert_eq!((of("<start_of_turn>"), of("<end_of_turn>")), (0, 1));
}

#[test]
fn a_checkpoint_without_a_template_refuses_conversations() {
    let tokenizer = tokenizer_at("families/tiny-llama/tokenizer.json");
    let template = ChatTemplate::from_checkpoint(ChatFiles::default(), &tokenizer).unwrap();
    assert!(template.origin().starts_with("none"), "{}", template.origin());
    assert_eq!(template.render(&[Message::new("user", "hi")], true), Err(TextError::NoTemplate));
    assert_eq!(tokenizer.end_of_turn(), tokenizer.token_id("<|eot_id|>"));
    assert_eq!(tokenizer.token_id("<|eot_id|>"), Some(509));
}
