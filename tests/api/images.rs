//! Images in requests: every wire format's form of them, the prompts that they become, and what is refused.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use unicorn::image::{Filter, Limits as FileLimits, decode};
use unicorn::model::Limits;
use unicorn::session::{
    AskedImageTokens, Detail, GenerateRequest, Image, Prepared, Service, SessionError, Truncation,
};
use unicorn::text::{Content, Message, Part};

use crate::support::app::{
    App, FamilyText, IMAGE_SIDE, IMAGES, SIZED_IMAGES, app_that_says, app_that_takes_images, image_limits,
    recorded, service_with, shows_its_prompt, sized_image_limits,
};
use crate::support::fake_runner::{kv_with, says};
use crate::support::http::{assert_at_rest, get, post_to, send_json};
use crate::support::images::{picture_file, png};
use crate::support::json::with;
use crate::support::tokenizers::{image_tokenizer, tokenizer};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const OLLAMA_CHAT: &str = "/api/chat";
const OLLAMA_GENERATE: &str = "/api/generate";

/// The routes that only count tokens: whose body they take, and the field of their answer.
const COUNTS: [(&str, &str, &str); 4] = [
    (CHAT, "/v1/chat/completions/input_tokens", "input_tokens"),
    (CHAT, "/tokenize", "count"),
    (RESPONSES, "/v1/responses/input_tokens", "input_tokens"),
    (MESSAGES, "/v1/messages/count_tokens", "input_tokens"),
];

fn base64(name: &str) -> String {
    STANDARD.encode(picture_file(name))
}

fn data_uri(name: &str) -> String {
    format!("data:image/png;base64,{}", base64(name))
}

/// An image in OpenAI's chat.
fn image_url(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// The ids of this text as a user's message, with `\u{1}` for each image.
fn prompt_of(text: &str) -> Vec<u32> {
    let image =
        format!("\n\n<start_of_image>{}<end_of_image>\n\n", "<image_soft_token>".repeat(IMAGES.tokens));
    let text = text.replace('\u{1}', &image);
    let whole = format!("<bos><start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n");
    image_tokenizer().encode(&whole, false).expect("encodes")
}

/// A request of a user's message with these parts, of which images are the numbers of `images`.
fn request(parts: &[Part<'_>], images: &[Image]) -> GenerateRequest {
    let mut content = Content::default();
    for part in parts {
        match part {
            Part::Text(text) => content.push_text(text),
            Part::Image(image) => content.push_image(*image),
        }
    }
    let messages = vec![Message::new("user", content)];
    GenerateRequest { messages, images: images.to_vec(), ..GenerateRequest::default() }
}

fn refused(service: &Service, request: &GenerateRequest) -> SessionError {
    service.prepare(request).and_then(Prepared::decoded).err().expect("refused")
}

fn image(name: &str) -> Image {
    let file = data_uri(name).into();
    Image { param: "file".into(), kind_param: "kind".into(), file, detail: Detail::Usual }
}

#[test]
fn prepared_requests_have_the_resized_pixels_of_each_image() {
    let service = service_with(image_limits(), image_tokenizer());
    let images = ["photo420.jpg", "rgba.png", "one.png"].map(image);
    // The order is that of the messages. An image may come twice, and one that no message has is not decoded.
    let parts = [Part::Image(1), Part::Text("a"), Part::Image(0), Part::Image(1)];
    let (engine, _) =
        service.prepare(&request(&parts, &images)).and_then(Prepared::decoded).expect("prepared");
    assert_eq!(engine.prompt, prompt_of("\u{1}a\u{1}\u{1}"));
    let soft = image_tokenizer().token_id("<image_soft_token>").expect("a token");
    assert_eq!(engine.images.len(), 3);
    for (image, name) in engine.images.iter().zip(["rgba.png", "photo420.jpg", "rgba.png"]) {
        let picture = decode(&picture_file(name), &FileLimits::default()).expect("a picture");
        let picture = picture.resize(IMAGE_SIDE as u32, IMAGE_SIDE as u32, Filter::Bilinear);
        assert_eq!((&image.pixels[..], image.hash), (picture.pixels(), picture.sha256()), "{name}");
        assert_eq!(image.pixels.len(), IMAGES.pixel_bytes(IMAGES.tokens));
        assert!(engine.prompt[image.positions.clone()].iter().all(|id| *id == soft));
        assert_eq!(image.positions.len(), IMAGES.tokens);
    }
    let places: Vec<Range<usize>> = engine.images.iter().map(|image| image.positions.clone()).collect();
    assert!(places.is_sorted_by_key(|at| at.start));
    // Counting needs no pixels.
    let broken = Image { file: "?".into(), ..image("one.png") };
    let counted = service.conversation(&request(&[Part::Image(0)], std::slice::from_ref(&broken)));
    assert_eq!(counted, Ok(prompt_of("\u{1}")));
    let error = refused(&service, &request(&[Part::Image(0)], &[broken]));
    assert!(matches!(error, SessionError::Invalid { param, .. } if param == "file"));
}

#[test]
fn positions_follow_the_ids_of_an_earlier_answer() {
    let service = service_with(image_limits(), image_tokenizer());
    let request = request(&[Part::Text("a"), Part::Image(0)], &[image("one.png")]);
    let (alone, _) = service.prepare(&request).and_then(Prepared::decoded).expect("prepared");
    let earlier = prompt_of("hello");
    let (after, _) = service.prepare_after(&earlier, &request).and_then(Prepared::decoded).expect("prepared");
    assert_eq!(after.prompt, [&earlier, &alone.prompt[1..]].concat());
    let moved = earlier.len() - 1;
    let at = &alone.images[0].positions;
    assert_eq!(after.images[0].positions, at.start + moved..at.end + moved);
}

#[test]
fn a_model_without_a_row_for_the_token_gets_another_id() {
    let limits = Limits { vocab_size: 512, ..image_limits() };
    let service = service_with(limits, image_tokenizer());
    let (engine, _) = service
        .prepare(&request(&[Part::Image(0)], &[image("one.png")]))
        .and_then(Prepared::decoded)
        .expect("prepared");
    assert_eq!(engine.prompt[engine.images[0].positions.clone()], [0; IMAGES.tokens]);
    // Ids outside the vocabulary cannot be biased.
    assert!(engine.sampling.logit_bias.iter().all(|(id, _)| *id < 512));
    let error = service.encode("<image_soft_token>", false, None).expect_err("refused").to_string();
    assert!(error.contains("outside this model's vocabulary"), "{error}");
}

#[test]
fn tokens_of_images_are_never_drawn() {
    let drawn = |limits: Limits| {
        let service = service_with(limits, image_tokenizer());
        let (engine, _) =
            service.prepare(&request(&[Part::Text("a")], &[])).and_then(Prepared::decoded).expect("prepared");
        let never = |id: &u32| engine.sampling.logit_bias.contains(&(*id, f32::NEG_INFINITY));
        assert!([110, 111, 512].iter().all(never) || engine.sampling.logit_bias.is_empty());
        engine.sampling.logit_bias.len()
    };
    assert_eq!(drawn(image_limits()), 3);
    assert_eq!(drawn(Limits { images: None, ..image_limits() }), 0);
}

#[test]
fn a_truncated_prompt_never_has_a_part_of_an_image() {
    let service = service_with(image_limits(), image_tokenizer());
    let whole = GenerateRequest {
        messages: vec![
            request(&[Part::Text("a"), Part::Image(0), Part::Text("b")], &[]).messages.remove(0),
            Message::new("assistant", "c"),
            request(&[Part::Image(1), Part::Text("d")], &[]).messages.remove(0),
        ],
        // The first one cannot be decoded, so it is not, where it is cut off.
        images: vec![Image { file: "?".into(), ..image("one.png") }, image("checker.png")],
        ..GenerateRequest::default()
    };
    let all = service.conversation(&whole).expect("encodes");
    let [begin, end] =
        ["<start_of_image>", "<end_of_image>"].map(|t| image_tokenizer().token_id(t).expect("a token"));
    let begins: Vec<usize> = (0..all.len()).filter(|at| all[*at] == begin).collect();
    for keep in 1..=all.len() {
        let request = GenerateRequest { truncate: Some(Truncation::Last(keep)), ..whole.clone() };
        let ids = service.conversation(&request).expect("encodes");
        assert!(all.ends_with(&ids) && ids.len() <= keep && !ids.is_empty(), "{keep}: {ids:?}");
        let cut = all.len() - ids.len();
        // As much as possible is kept: what is cut off in addition is an image.
        assert!(ids.len() == keep || all[cut - 1] == end, "{keep}");
        let left = begins.iter().filter(|at| **at >= cut).count();
        assert_eq!(ids.iter().filter(|id| **id == begin).count(), left);
        assert_eq!(ids.iter().filter(|id| **id == 512).count(), left * IMAGES.tokens, "{keep}");
        match service.prepare(&request).and_then(Prepared::decoded) {
            Ok((engine, _)) => {
                assert_eq!((engine.images.len(), &engine.prompt), (left, &ids));
                let at = engine.images.iter().map(|image| &ids[image.positions.clone()]);
                assert!(at.into_iter().all(|ids| ids.iter().all(|id| *id == 512)));
            }
            Err(error) => assert!(left == 2 && error.to_string().starts_with("file: "), "{keep}: {error}"),
        }
    }
}

#[test]
fn images_are_decoded_only_if_the_prompt_fits() {
    let limits = Limits { kv: kv_with(30, 32), max_context: 100, ..image_limits() };
    let service = service_with(limits, image_tokenizer());
    let broken = Image { file: "?".into(), ..image("one.png") };
    for count in [5, 7, 2000] {
        let parts: Vec<Part<'_>> = (0..count).map(|_| Part::Image(0)).collect();
        let error = refused(&service, &request(&parts, std::slice::from_ref(&broken)));
        let SessionError::Context { problem, tokens: Some((prompt, 100)) } = error else {
            panic!("{error:?}")
        };
        assert!(prompt >= 100 && problem.contains("maximum context length is 100 tokens"), "{problem}");
    }
}

#[test]
fn names_in_content_are_refused_where_they_would_be_images() {
    let service = service_with(image_limits(), image_tokenizer()).with_special_in_content(true);
    let images = [image("one.png")];
    let with = |text: &str| {
        service.prepare(&request(&[Part::Text(text), Part::Image(0)], &images)).and_then(Prepared::decoded)
    };
    let (engine, _) = with("a<end_of_turn>b").expect("prepared");
    assert_eq!(engine.prompt, prompt_of("a<end_of_turn>b\u{1}"));
    for name in ["<start_of_image>", "<image_soft_token>"] {
        let error = with(name).err().expect("refused").to_string();
        assert!(error.contains(&format!("the token {name:?}")), "{error}");
    }
}

#[test]
fn a_model_whose_vocabulary_lacks_the_tokens_takes_no_images() {
    let service = service_with(image_limits(), tokenizer());
    assert!(!service.takes_images());
    let error = refused(&service, &request(&[Part::Image(0)], &[image("one.png")]));
    assert!(matches!(&error, SessionError::Unsupported { param, .. } if param == "kind"));
    assert!(error.to_string().contains("tokenizer has no tokens for images"), "{error}");
}

/// Requests by route with the image `one.png`, or two of them, and the text of their prompt, with `\u{1}` for each image.
fn requests() -> Vec<(&'static str, Value, &'static str)> {
    let (uri, bare) = (data_uri("one.png"), base64("one.png"));
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let text = |text: &str| json!({"type": "text", "text": text});
    let lines: String = bare
        .as_bytes()
        .chunks(20)
        .flat_map(|line| [std::str::from_utf8(line).expect("ASCII"), "\r\n"])
        .collect();
    let mut all = Vec::new();
    for url in [
        uri.clone(),
        bare.clone(),
        uri.replace("data:", "DATA:"),
        uri.replace("png;base64", "jpeg;charset=utf-8;base64"),
        uri.replace("image/png;base64", ""),
        format!("data:image/png;base64,{lines}"),
        uri.replace('+', "-").replace('/', "_").replace("image_png", "image/png"),
    ] {
        all.push((CHAT, user(json!([text("a"), image_url(&url), text("b")])), "a\u{1}b"));
    }
    let detail = json!({"type": "image_url", "image_url": {"url": uri, "detail": "high"}});
    let plain = json!({"type": "image_url", "image_url": uri});
    all.push((CHAT, user(json!([detail, plain])), "\u{1}\u{1}"));
    let asked = json!({"role": "user", "content": [image_url(&uri)]});
    let of_system = json!({"role": "system", "content": [text("a"), image_url(&uri)]});
    all.push((CHAT, json!({"messages": [of_system, asked]}), "a\u{1}\u{1}"));

    let input = json!({"type": "input_image", "image_url": uri, "detail": "auto"});
    let said = json!([{"role": "user", "content": [{"type": "input_text", "text": "a"}, input]}]);
    all.push((RESPONSES, json!({"input": said}), "a\u{1}"));
    let called = json!({"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "c", "output": [input]});
    let result = "a<end_of_turn>\n<start_of_turn>model\n{\"name\": \"look\", \"parameters\": {}}<end_of_turn>\n\
                  <start_of_turn>user\nResult of look:\u{1}";
    all.push((RESPONSES, json!({"input": [{"role": "user", "content": "a"}, called, output]}), result));

    let block =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": bare}});
    let messages = |messages: Value| json!({"max_tokens": 9, "messages": messages});
    let said = json!([{"role": "user", "content": [text("a"), block, text("b"), text("c")]}]);
    all.push((MESSAGES, messages(said), "a\u{1}b\n\nc"));
    let used = json!({"type": "tool_use", "id": "c", "name": "look", "input": {}});
    let given = json!({"type": "tool_result", "tool_use_id": "c", "content": [block]});
    let turns = json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": [used]}, {"role": "user", "content": [given]},
    ]);
    all.push((MESSAGES, messages(turns), result));

    let said = json!({"role": "user", "content": "a", "images": [bare, uri]});
    all.push((OLLAMA_CHAT, json!({"stream": false, "messages": [said]}), "\u{1}\u{1}a"));
    all.push((OLLAMA_GENERATE, json!({"stream": false, "prompt": "a", "images": [bare]}), "\u{1}a"));
    all.push((OLLAMA_GENERATE, json!({"stream": false, "images": [bare]}), "\u{1}"));
    all
}

/// The ids of the token that begins an image, and of the one in the places of its embeddings.
fn ids_of_tokens() -> (u32, u32) {
    let id = |token: &str| image_tokenizer().token_id(token).expect("it is in the vocabulary");
    (id("<start_of_image>"), id("<image_soft_token>"))
}

/// The prompt that the scripted model saw last. It sees other ids where an image is: the image's embeddings.
fn seen_prompt(seen: &Mutex<Vec<u32>>) -> Vec<u32> {
    let mut ids = seen.lock().expect("no test panics with it").clone();
    let (begin, soft) = ids_of_tokens();
    let mut at = 0;
    while at < ids.len() {
        if ids[at] == begin {
            ids[at + 1..][..IMAGES.tokens].fill(soft);
            at += IMAGES.tokens;
        }
        at += 1;
    }
    ids
}

#[tokio::test]
async fn every_form_of_an_image_becomes_the_same_prompt() {
    let (script, seen) = shows_its_prompt("Hi");
    let app = app_that_takes_images(script);
    for (path, body, prompt) in requests() {
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        assert_eq!(status, 200, "{path} {body}: {answer}");
        let expected = prompt_of(prompt);
        assert_eq!(seen_prompt(&seen), expected, "{path} {prompt:?}");
        // Usage counts the tokens of images.
        // Anthropic's format counts cached tokens elsewhere.
        let counts =
            ["prompt_tokens", "input_tokens", "cache_read_input_tokens"].map(|name| &answer["usage"][name]);
        let counts = counts.into_iter().chain([&answer["prompt_eval_count"]]);
        let counted: u64 = counts.filter_map(Value::as_u64).sum();
        assert_eq!(counted, expected.len() as u64, "{path}: {answer}");
        assert_eq!(answer.get("context"), None, "ids hold no images");
        // So do the routes that only count.
        for (of, count, name) in COUNTS {
            if of == path {
                let (status, _, counted) = send_json(&app.router, post_to(count, body.to_string())).await;
                assert_eq!(
                    (status.as_u16(), &counted[name]),
                    (200, &json!(expected.len())),
                    "{count}: {counted}"
                );
            }
        }
    }
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn a_model_that_reads_text_only_refuses_every_image() {
    let app = app_that_says("Hi");
    for (path, body, _) in requests() {
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        let text = answer.to_string();
        assert!(status == 400 && text.contains("this model reads text only"), "{path}: {status} {text}");
        if [CHAT, RESPONSES].contains(&path) {
            let error = &answer["error"];
            assert_eq!(error["code"], "unsupported_value", "{path}: {text}");
            assert!(error["param"].as_str().expect("a field").ends_with("].type"), "{path}: {text}");
        }
    }
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn files_that_cannot_be_read_are_refused_by_the_name_of_their_part() {
    let app = app_that_takes_images(shows_its_prompt("Hi").0);
    let bad =
        ["bad_crc.png", "bomb_100Mpx.png", "empty.png", "html.jpg", "svg.png", "text.png", "truncated.jpg"];
    let mut files: Vec<(String, &str)> =
        bad.iter().map(|name| (base64(&format!("bad/{name}")), "")).collect();
    files.extend([
        ("https://example.com/a.png".to_owned(), "loads nothing from addresses"),
        ("HTTP://10.0.0.1/a.png".to_owned(), "loads nothing from addresses"),
        ("file:///etc/passwd".to_owned(), "loads nothing from addresses"),
        ("data:image/png;base64".to_owned(), "without a comma"),
        ("???".to_owned(), "is not valid base64"),
        (String::new(), "holds no data"),
    ]);
    let text = json!({"type": "text", "text": "a"});
    let source = |file: &str| json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": file}});
    for (file, problem) in &files {
        let input = json!({"type": "input_image", "image_url": file});
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (path, body, param) in [
            (
                CHAT,
                json!({"messages": user(json!([text, image_url(file)]))}),
                "messages[0].content[1].image_url.url",
            ),
            (RESPONSES, json!({"input": user(json!([input]))}), "input[0].content[0].image_url"),
            (
                MESSAGES,
                json!({"max_tokens": 9, "messages": user(json!([source(file)]))}),
                "messages[0].content[0].source.data",
            ),
            (
                OLLAMA_CHAT,
                json!({"messages": [{"role": "user", "content": "a", "images": [file]}]}),
                "messages[0].images[0]",
            ),
            (OLLAMA_GENERATE, json!({"prompt": "a", "images": [file]}), "images[0]"),
        ] {
            let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
            let error = &answer["error"];
            let message = error["message"].as_str().or(error.as_str()).expect("a message");
            let named =
                message.strip_prefix(&format!("{param}: ")).unwrap_or_else(|| panic!("{param}: {message}"));
            assert!(status == 400 && named.contains(problem), "{path}: {status} {message}");
            if [CHAT, RESPONSES].contains(&path) {
                assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("invalid_value")));
            }
        }
    }
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn sources_that_this_server_does_not_have_are_refused() {
    let app = app_that_takes_images(shows_its_prompt("Hi").0);
    let file = base64("one.png");
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let source = |source: Value| json!({"max_tokens": 9, "messages": user(json!([{"type": "image", "source": source}]))});
    let input = |part: Value| json!({"input": user(json!([with(json!({"type": "input_image"}), part)]))});
    let thought = json!({"type": "reasoning", "content": [{"type": "input_image", "image_url": file}]});
    for (path, body, expected) in [
        (
            CHAT,
            json!({"messages": user(json!([{"type": "image_url"}]))}),
            "messages[0].content[0].image_url is required",
        ),
        (
            CHAT,
            json!({"messages": user(json!([{"type": "image_url", "image_url": {}}]))}),
            "messages[0].content[0].image_url.url",
        ),
        (
            CHAT,
            json!({"messages": user(json!([{"type": "input_audio"}]))}),
            "messages[0].content[0].type: expected text or image_url",
        ),
        (RESPONSES, input(json!({})), "input[0].content[0].image_url is required"),
        (
            RESPONSES,
            input(json!({"file_id": "file-1"})),
            "input[0].content[0].file_id: this server stores no files",
        ),
        (RESPONSES, json!({"input": [thought]}), "input[0].content: expected a thought without images"),
        (
            MESSAGES,
            source(json!({"type": "url", "url": "https://a"})),
            "messages[0].content[0].source.type: expected base64",
        ),
        (
            MESSAGES,
            source(json!({"type": "file", "file_id": "a"})),
            "messages[0].content[0].source.type: expected base64",
        ),
        (MESSAGES, source(json!({"type": "base64"})), "messages[0].content[0].source.data is required"),
        (
            OLLAMA_GENERATE,
            json!({"prompt": "a", "raw": true, "images": [file]}),
            "images: only the chat template",
        ),
        (OLLAMA_CHAT, json!({"messages": [{"role": "user", "images": [1]}]}), "messages[0].images[0]:"),
    ] {
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        let message = answer["error"]["message"].as_str().or(answer["error"].as_str()).expect("a message");
        assert!(status == 400 && message.starts_with(expected), "{path} {body}: {status} {message}");
    }
}

#[tokio::test]
async fn stored_responses_keep_the_images_of_earlier_turns() {
    let (script, seen) = shows_its_prompt("Hi");
    let app = app_that_takes_images(script);
    let respond = async |body: Value| {
        let (status, _, answer) = send_json(&app.router, post_to(RESPONSES, body.to_string())).await;
        assert_eq!(status, 200, "{answer}");
        answer["id"].as_str().expect("an id").to_owned()
    };
    let input = |name: &str, text: &str| {
        let parts = [
            json!({"type": "input_image", "image_url": data_uri(name)}),
            json!({"type": "input_text", "text": text}),
        ];
        json!([{"role": "user", "content": parts}])
    };
    let first = respond(json!({"input": input("one.png", "a")})).await;
    let second = respond(json!({"input": input("checker.png", "b"), "previous_response_id": first})).await;
    let turns = "\u{1}a<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n<start_of_turn>user\n\u{1}b";
    assert_eq!(seen_prompt(&seen), prompt_of(turns));
    respond(json!({"input": "c", "previous_response_id": second})).await;
    let more = format!("{turns}<end_of_turn>\n<start_of_turn>model\nHi<end_of_turn>\n<start_of_turn>user\nc");
    assert_eq!(seen_prompt(&seen), prompt_of(&more));
    let items = send_json(&app.router, get(&format!("/v1/responses/{first}/input_items"))).await.2;
    assert_eq!(items["data"][0]["content"][0]["image_url"], data_uri("one.png"));

    // The bytes of images count: the store has room for two of these, of which each takes more than 80 KB.
    let big = respond(json!({"input": input("rgba.png", "a")})).await;
    assert!(base64("rgba.png").len() > 70_000);
    respond(json!({"input": input("rgba.png", "b")})).await;
    respond(json!({"input": input("rgba.png", "c")})).await;
    let body = json!({"input": "d", "previous_response_id": big});
    let (status, _, answer) = send_json(&app.router, post_to(RESPONSES, body.to_string())).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("previous_response_not_found")));
}

#[tokio::test]
async fn a_chat_of_ollama_leaves_out_the_images_of_turns_that_do_not_fit() {
    let (script, seen) = recorded(Box::new(|_, _| 1));
    let app = app_that_takes_images(script);
    let turn = |text: &str| json!({"role": "user", "content": text, "images": [base64("one.png")]});
    let said = json!({"role": "assistant", "content": "c"});
    // An image that cannot be decoded is refused in a turn that stays, and is not read in one that is left out.
    let broken = |text: &str| json!({"role": "user", "content": text, "images": ["?"]});
    let chat = |messages: Value| json!({"stream": false, "messages": messages, "options": {"num_ctx": 70, "num_predict": 2}});
    let body = chat(json!([turn("a"), said, turn("b"), said, broken("d")]));
    let (status, _, answer) = send_json(&app.router, post_to(OLLAMA_CHAT, body.to_string())).await;
    assert_eq!(status, 400, "{answer}");
    let body = chat(json!([broken("a"), said, turn("b"), said, turn("d")]));
    let (status, _, answer) = send_json(&app.router, post_to(OLLAMA_CHAT, body.to_string())).await;
    assert_eq!(status, 200, "{answer}");
    let left = "\u{1}b<end_of_turn>\n<start_of_turn>model\nc<end_of_turn>\n<start_of_turn>user\n\u{1}d";
    assert_eq!(seen_prompt(&seen), prompt_of(left));
}

#[tokio::test]
async fn lists_of_models_say_whether_the_model_takes_images() {
    let apps = [app_that_takes_images(shows_its_prompt("Hi").0), app_that_says("Hi")];
    for (app, takes_images) in apps.iter().zip([true, false]) {
        let (_, _, shown) = send_json(&app.router, post_to("/api/show", "{}")).await;
        let capabilities = shown["capabilities"].as_array().expect("a list");
        assert_eq!(capabilities.contains(&json!("vision")), takes_images, "{shown}");
        let (_, _, list) = send_json(&app.router, get("/v1/models")).await;
        let inputs = if takes_images { json!(["text", "image"]) } else { json!(["text"]) };
        assert_eq!(list["data"][0]["architecture"]["input_modalities"], inputs);
    }
}

#[test]
fn pictures_that_are_decoded_at_the_same_time_all_arrive() {
    let service = Arc::new(service_with(image_limits(), image_tokenizer()));
    let threads = (0..6).map(|_| {
        let service = Arc::clone(&service);
        std::thread::spawn(move || {
            let images = ["photo420.jpg", "bad/truncated.jpg"].map(image);
            let prepared = service
                .prepare(&request(&[Part::Image(0)], &images))
                .and_then(Prepared::decoded)
                .expect("prepared");
            refused(&service, &request(&[Part::Image(1)], &images));
            prepared.0.images[0].hash
        })
    });
    let hashes: Vec<[u8; 32]> =
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("ends")).collect();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
}

/// A model whose images have as many tokens as their sizes give: at most 140 of usual images, and 280 of others.
fn sized_service() -> Service {
    let family = FamilyText::new("gemma4-images");
    family.service_with(sized_image_limits(), says(&[], family.end()))
}

fn sized_app() -> App {
    let family = FamilyText::new("gemma4-images");
    family.app_with(sized_image_limits(), says(&family.plain("Hi"), family.end()))
}

/// The ids of this text as a user's message to that model, with `\u{1}` for each image, which has so many tokens.
fn sized_prompt(text: &str, counts: &[usize]) -> Vec<u32> {
    let mut parts = text.split('\u{1}');
    let mut text = parts.next().expect("a part").to_owned();
    for (part, count) in parts.zip(counts) {
        text += &format!("<|image>{}<image|>{part}", "<|image|>".repeat(*count));
    }
    let whole = format!("<bos><|turn>user\n{text}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>");
    FamilyText::new("gemma4-images").tokenizer.encode(&whole, false).expect("encodes")
}

fn image_of(file: &[u8], detail: Detail) -> Image {
    let file = STANDARD.encode(file).into();
    Image { param: "file".into(), kind_param: "kind".into(), file, detail }
}

/// The width and height of pictures whose images have 63, 130 or 266 tokens of at most 70, 140 or 280.
const WIDE: (u32, u32) = (64, 48);

#[test]
fn each_image_has_as_many_tokens_as_its_size_and_detail_give() {
    let service = sized_service();
    let wide = png(WIDE.0, WIDE.1);
    // The last one lies on its side in the file.
    let images = [
        image_of(&wide, Detail::Usual),
        image_of(&wide, Detail::Low),
        image_of(&wide, Detail::High),
        image_of(&png(1, 1), Detail::Usual),
        image_of(&picture_file("exif6.jpg"), Detail::Low),
    ];
    let upright = decode(&picture_file("exif6.jpg"), &FileLimits::default()).expect("a picture");
    let upright = [upright.width() as usize, upright.height() as usize];
    let of_upright =
        |budget: usize| SIZED_IMAGES.tokens_of(SIZED_IMAGES.fit(upright, budget)).expect("it fits");
    assert_ne!(SIZED_IMAGES.fit(upright, 70), SIZED_IMAGES.fit([upright[1], upright[0]], 70));
    let parts: Vec<Part<'_>> =
        [0, 1, 2, 3, 4, 0].into_iter().flat_map(|n| [Part::Image(n), Part::Text("a")]).collect();
    let asked = |tokens: Option<usize>| GenerateRequest {
        image_tokens: tokens.map(|tokens| AskedImageTokens { param: "image_tokens", tokens }),
        ..request(&parts, &images)
    };
    for (tokens, counts) in [
        (None, [130, 63, 266, 121, of_upright(70), 130]),
        (Some(70), [63, 63, 63, 64, of_upright(70), 63]),
        (Some(280), [266, 266, 266, 256, of_upright(280), 266]),
    ] {
        let budgets = [140, 70, 280, 140, 70, 140].map(|usual| tokens.unwrap_or(usual));
        let (engine, _) = service.prepare(&asked(tokens)).and_then(Prepared::decoded).expect("prepared");
        assert_eq!(
            engine.prompt,
            sized_prompt("\u{1}a\u{1}a\u{1}a\u{1}a\u{1}a\u{1}a", &counts),
            "{tokens:?}"
        );
        assert_eq!(service.conversation(&asked(tokens)).as_ref(), Ok(&engine.prompt));
        assert_eq!(engine.images.len(), counts.len());
        let files = [&wide, &wide, &wide, &png(1, 1), &picture_file("exif6.jpg"), &wide];
        for (((image, count), file), budget) in engine.images.iter().zip(counts).zip(files).zip(budgets) {
            assert_eq!(image.positions.len(), count);
            let picture = decode(file, &FileLimits::default()).expect("a picture");
            let size = SIZED_IMAGES.fit([picture.width() as usize, picture.height() as usize], budget);
            let resized = picture.resize(size[0] as u32, size[1] as u32, Filter::Bicubic);
            assert_eq!((&image.pixels[..], image.hash), (resized.pixels(), resized.sha256()));
            assert_eq!((image.size, image.pixels.len()), (size, SIZED_IMAGES.pixel_bytes(count)));
        }
        // Caches tell the same file in different sizes apart.
        let hashes = [0, 1, 2, 5].map(|n: usize| engine.images[n].hash);
        assert_eq!(hashes[0], hashes[3]);
        assert_eq!(hashes[0] == hashes[1] && hashes[0] == hashes[2], tokens.is_some());
    }
}

#[test]
fn sized_images_are_read_only_as_far_as_needed() {
    let service = sized_service();
    let wide = png(WIDE.0, WIDE.1);
    let cut = image_of(&wide[..wide.len() / 2], Detail::High);
    let unreadable = Image { file: "?".into(), ..cut.clone() };
    let prepared = |count: usize, image: &Image| {
        let parts: Vec<Part<'_>> = (0..count).map(|_| Part::Image(0)).collect();
        let request = request(&parts, std::slice::from_ref(image));
        (service.conversation(&request), refused(&service, &request))
    };
    // The header suffices for a count, and not for an answer.
    let (counted, error) = prepared(1, &cut);
    assert_eq!(counted, Ok(sized_prompt("\u{1}", &[266])));
    assert!(error.to_string().starts_with("file: is a PNG image that ends too early"), "{error}");
    let (counted, error) = prepared(1, &unreadable);
    assert_eq!(counted, Err(error.clone()));
    assert!(error.to_string().starts_with("file: is not valid base64"), "{error}");
    // A prompt that is too long is refused without its pixels, or without its files if each image had one token.
    for (count, image) in [(8, &cut), (2000, &unreadable)] {
        let (_, error) = prepared(count, image);
        let SessionError::Context { tokens: Some((prompt, 2000)), .. } = error else { panic!("{error:?}") };
        assert!(prompt >= 2000, "{prompt}");
    }
}

#[tokio::test]
async fn detail_and_image_tokens_say_how_many_tokens_an_image_has() {
    let app = sized_app();
    let file = STANDARD.encode(png(WIDE.0, WIDE.1));
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let chat = |detail: Value, more: Value| {
        let part = json!({"type": "image_url", "image_url": {"url": file, "detail": detail}});
        with(json!({"messages": user(json!([part]))}), more)
    };
    let response = |detail: Value, more: Value| {
        let part = json!({"type": "input_image", "image_url": file, "detail": detail});
        with(json!({"input": user(json!([part]))}), more)
    };
    let message = |more: Value| {
        let source = json!({"type": "base64", "media_type": "image/png", "data": file});
        let part = json!({"type": "image", "source": source});
        with(json!({"max_tokens": 5, "messages": user(json!([part]))}), more)
    };
    let ollama = |options: Value| {
        let said = json!({"role": "user", "content": "", "images": [file]});
        json!({"stream": false, "think": false, "messages": [said], "options": options})
    };
    let soft = |tokens: u64| json!({"mm_processor_kwargs": {"max_soft_tokens": tokens, "other": 1}});
    let both = with(json!({"image_tokens": 140}), soft(70));
    let mut cases = vec![
        (MESSAGES, message(json!({})), 130),
        (MESSAGES, message(json!({"image_tokens": 280})), 266),
        (OLLAMA_CHAT, ollama(json!({})), 130),
        (OLLAMA_CHAT, ollama(json!({"image_tokens": 70})), 63),
        (
            OLLAMA_GENERATE,
            json!({"stream": false, "think": false, "images": [file], "options": {"image_tokens": 70}}),
            63,
        ),
    ];
    for (detail, tokens) in [
        (Value::Null, 130),
        (json!("auto"), 130),
        (json!("low"), 63),
        (json!("high"), 266),
        (json!("original"), 266),
    ] {
        for (more, tokens) in [
            (json!({}), tokens),
            (json!({"image_tokens": 70}), 63),
            (json!({"image_tokens": 280}), 266),
            (soft(280), 266),
            (both.clone(), 130),
        ] {
            cases.push((CHAT, chat(detail.clone(), more.clone()), tokens));
            cases.push((RESPONSES, response(detail.clone(), more), tokens));
        }
    }
    for (path, body, tokens) in cases {
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        assert_eq!(status, 200, "{path}, {tokens} tokens: {answer}");
        let counts =
            ["prompt_tokens", "input_tokens", "cache_read_input_tokens"].map(|name| &answer["usage"][name]);
        let counts = counts.into_iter().chain([&answer["prompt_eval_count"]]);
        let counted: u64 = counts.filter_map(Value::as_u64).sum();
        let expected = sized_prompt("\u{1}", &[tokens]).len();
        assert_eq!(counted, expected as u64, "{path}, {tokens} tokens: {answer}");
        for (of, count, name) in COUNTS {
            if of == path {
                let (_, _, counted) = send_json(&app.router, post_to(count, body.to_string())).await;
                assert_eq!(counted[name], json!(expected), "{count}, {tokens} tokens: {counted}");
            }
        }
    }

    for (path, body, param, problem) in [
        (
            CHAT,
            chat(json!("huge"), json!({})),
            "messages[0].content[0].image_url.detail",
            "expected low, auto, high or original",
        ),
        (
            RESPONSES,
            response(json!("huge"), json!({})),
            "input[0].content[0].detail",
            "expected low, auto, high or original",
        ),
        (
            CHAT,
            chat(Value::Null, json!({"image_tokens": 71})),
            "image_tokens",
            "expected one of [70, 140, 280, 560, 1120], got 71",
        ),
        (
            CHAT,
            chat(Value::Null, json!({"image_tokens": 560})),
            "image_tokens",
            "at most 280, which the server's option --max-image-tokens",
        ),
        (CHAT, chat(Value::Null, soft(71)), "mm_processor_kwargs.max_soft_tokens", "expected one of"),
        (CHAT, chat(Value::Null, json!({"image_tokens": 0})), "image_tokens", "expected an integer from 1"),
        (CHAT, json!({"messages": user(json!("a")), "image_tokens": 71}), "image_tokens", "expected one of"),
        (RESPONSES, response(Value::Null, json!({"image_tokens": 1120})), "image_tokens", "at most 280"),
        (MESSAGES, message(json!({"image_tokens": 1120})), "image_tokens", "at most 280"),
        (OLLAMA_CHAT, ollama(json!({"image_tokens": 1120})), "options.image_tokens", "at most 280"),
    ] {
        for path in COUNTS.into_iter().filter(|(of, ..)| *of == path).map(|(_, count, _)| count).chain([path])
        {
            let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
            let error = &answer["error"];
            let message = error["message"].as_str().or(error.as_str()).expect("a message");
            let named = message.strip_prefix(&format!("{param}: ")).unwrap_or_else(|| panic!("{message}"));
            assert!(status == 400 && named.contains(problem), "{path}: {status} {message}");
        }
    }
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_read_is_refused_where_its_tokens_are_counted() {
    let app = sized_app();
    let whole = png(WIDE.0, WIDE.1);
    for (file, answers_count) in [(&whole[..whole.len() / 2], 200), (&whole[..20], 400), (b"text", 400)] {
        let file = STANDARD.encode(file);
        let part = json!({"type": "input_image", "image_url": file});
        let source = json!({"type": "base64", "media_type": "image/png", "data": file});
        let block = json!({"type": "image", "source": source});
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (path, body, param) in [
            (
                CHAT,
                json!({"messages": user(json!([image_url(&file)]))}),
                "messages[0].content[0].image_url.url",
            ),
            (RESPONSES, json!({"input": user(json!([part]))}), "input[0].content[0].image_url"),
            (
                MESSAGES,
                json!({"max_tokens": 9, "messages": user(json!([block]))}),
                "messages[0].content[0].source.data",
            ),
        ] {
            let counts = COUNTS.into_iter().filter(|(of, ..)| *of == path);
            for (route, expected) in counts.map(|(_, count, _)| (count, answers_count)).chain([(path, 400)]) {
                let (status, _, answer) = send_json(&app.router, post_to(route, body.to_string())).await;
                assert_eq!(status, expected, "{route}: {answer}");
                let message = answer["error"]["message"].as_str().unwrap_or(param);
                assert!(message.starts_with(param), "{route}: {message}");
            }
        }
    }
    assert_at_rest(&app.router).await;
}

#[tokio::test]
async fn images_of_one_size_have_one_number_of_tokens() {
    let app = app_that_takes_images(shows_its_prompt("Hi").0);
    for (tokens, expected) in [(16, 200), (280, 400), (15, 400)] {
        let parts = json!([image_url(&data_uri("one.png"))]);
        let body = json!({"messages": [{"role": "user", "content": parts}], "image_tokens": tokens});
        let (status, _, answer) = send_json(&app.router, post_to(CHAT, body.to_string())).await;
        assert_eq!(status, expected, "{answer}");
        if expected == 400 {
            let message =
                format!("image_tokens: every image of this model has 16 tokens: expected 16, got {tokens}");
            assert_eq!(answer["error"]["message"], message);
        }
    }
    // A model that reads text only has no images for which the field could be wrong.
    let body = json!({"messages": [{"role": "user", "content": "a"}], "image_tokens": 71});
    let (status, _, answer) = send_json(&app_that_says("Hi").router, post_to(CHAT, body.to_string())).await;
    assert_eq!(status, 200, "{answer}");
}
