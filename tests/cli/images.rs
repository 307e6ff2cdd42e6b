//! The shipped server with a model that reads images: the tokens of transformers through every API, cached pictures, and
//! models without a tower.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use unicorn::model::arch::open_files;
use unicorn::text::Tokenizer;

use crate::support::checkpoints::tiny_model;
use crate::support::daemon::Daemon;
use crate::support::data;
use crate::support::goldens::Goldens;
use crate::support::program::{output, printed, unicorn_on_software};

/// Options with which the results are those of the goldens.
const EXACT: [&str; 4] = ["--precision", "f32", "--kv", "f32"];

fn file(image: &str) -> String {
    STANDARD.encode(std::fs::read(data(format!("images/{image}.png"))).expect("a picture"))
}

fn part(image: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", file(image))}})
}

/// The facts about a prompt of a golden file.
fn golden_prompt(model: &str, prompt: &str) -> Value {
    let facts = std::fs::read(folder_of(model).join("goldens.json")).expect("facts");
    let mut facts: Value = serde_json::from_slice(&facts).expect("JSON");
    facts["prompts"][prompt].take()
}

/// A request with a prompt of a golden file. `detail` bounds the tokens of its images, if the model lets a request do that.
fn golden_request(model: &str, prompt: &str, detail: &str, tokens: usize) -> Value {
    let mut messages = golden_prompt(model, prompt)["messages"].take();
    for message in messages.as_array_mut().expect("messages") {
        for content in message["content"].as_array_mut().expect("parts") {
            if content["type"] == "image" {
                let mut image = part(content["image"].as_str().expect("a name"));
                image["image_url"]["detail"] = detail.into();
                *content = image;
            }
        }
    }
    json!({"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

fn post(server: &Daemon, path: &str, body: &Value) -> (u16, Value) {
    let (status, answer) = server.exchange("POST", path, &[], &body.to_string());
    (status, serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

/// The folder of a model by its name.
fn folder_of(model: &str) -> PathBuf {
    let family = if model.starts_with("vis4") { "gemma4" } else { "gemma3" };
    data(format!("{family}-vision/{model}"))
}

/// What transformers answers to a prompt of a golden file: the text of all ids before the first one that the tokenizer lacks,
/// and their number.
fn golden_answer(model: &str, prompt: &str) -> (String, usize) {
    golden_text(model, prompt, &folder_of(model))
}

/// As [`golden_answer`], with the tokenizer of this folder or file. A GGUF file lists more of its tokens as control tokens, which
/// no text shows.
fn golden_text(model: &str, prompt: &str, of_tokenizer: &Path) -> (String, usize) {
    let files = open_files(of_tokenizer).expect("a model");
    let tokenizer = files.read("tokenizer.json").expect("valid").expect("a tokenizer");
    let tokenizer = Tokenizer::from_bytes(&tokenizer, "tokenizer.json").expect("a tokenizer");
    let ids = Goldens::open(&folder_of(model)).tokens(&format!("greedy.{prompt}.tokens"));
    let known = ids.iter().position(|id| tokenizer.token(*id).is_none()).unwrap_or(ids.len());
    (tokenizer.decode(&ids[..known], true), known)
}

#[test]
fn a_server_answers_about_pictures_as_transformers_does() {
    let (expected, tokens) = golden_answer("vis-a", "adjacent");
    assert_eq!(tokens, 24);
    let server = Daemon::start_model(&data("gemma3-vision/vis-a"), &EXACT, |_| {});
    let text = "next last command type move";
    let ask = |images: [&str; 2]| {
        let content = json!([part(images[0]), part(images[1]), {"type": "text", "text": text}]);
        let body = json!({
            "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, "ignore_eos": true
        });
        let (status, answer) = post(&server, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        (
            answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned(),
            answer["usage"].clone(),
        )
    };
    let (answer, usage) = ask(["exact", "checker"]);
    assert_eq!(answer, expected, "chat");
    // Two images of 16 tokens each are in it.
    assert_eq!(usage["prompt_tokens"], 64, "{usage}");
    let encoded =
        || server.metric("unicorn_mm_cache_queries_total") - server.metric("unicorn_mm_cache_hits_total");
    assert_eq!(encoded(), 2.0, "both pictures");
    assert!(server.metric("unicorn_image_encoding_seconds_total") > 0.0);

    // The same question finds its prompt, and others about the same pictures find their embeddings.
    let (again, usage) = ask(["exact", "checker"]);
    assert_eq!(again, expected, "cached");
    assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64() >= Some(32), "{usage}");
    let (swapped, usage) = ask(["checker", "exact"]);
    assert_ne!(swapped, expected, "the pictures in another order");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "{usage}");
    assert_eq!(ask(["checker", "exact"]).0, swapped);
    assert_eq!(encoded(), 2.0, "no picture is encoded again");

    let [exact, checker] = ["exact", "checker"].map(file);
    let source = |data: &str| json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
    let messages = json!({
        "model": "a/b", "max_tokens": tokens, "temperature": 0,
        "messages": [{"role": "user", "content": [source(&exact), source(&checker), {"type": "text", "text": text}]}]
    });
    let (status, answer) = post(&server, "/v1/messages", &messages);
    assert_eq!((status, &answer["content"][0]["text"]), (200, &json!(expected)), "messages: {answer}");
    let input =
        |data: &str| json!({"type": "input_image", "image_url": format!("data:image/png;base64,{data}")});
    let responses = json!({
        "max_output_tokens": tokens, "temperature": 0, "store": false,
        "input": [{"role": "user", "content": [input(&exact), input(&checker), {"type": "input_text", "text": text}]}]
    });
    let (status, answer) = post(&server, "/v1/responses", &responses);
    assert_eq!(
        (status, &answer["output"][0]["content"][0]["text"]),
        (200, &json!(expected)),
        "responses: {answer}"
    );
    let ollama = json!({
        "model": "a/b", "stream": false, "options": {"temperature": 0, "num_predict": tokens},
        "messages": [{"role": "user", "content": text, "images": [exact, checker]}]
    });
    let (status, answer) = post(&server, "/api/chat", &ollama);
    assert_eq!((status, &answer["message"]["content"]), (200, &json!(expected)), "Ollama: {answer}");
    let (_, shown) = post(&server, "/api/show", &json!({"model": "a/b"}));
    assert!(shown["capabilities"].as_array().expect("a list").contains(&json!("vision")), "{shown}");
}

#[test]
fn a_checkpoint_of_transformers_5_answers_as_transformers_does() {
    let (expected, tokens) = golden_answer("vis-b", "one");
    let server = Daemon::start_model(&data("gemma3-vision/vis-b"), &EXACT, |_| {});
    let words = "file mark search normal put when name";
    let body = json!({
        "messages": [{"role": "user", "content": [part("rgb"), {"type": "text", "text": words}]}],
        "max_tokens": tokens, "temperature": 0, "ignore_eos": true
    });
    let (status, answer) = post(&server, "/v1/chat/completions", &body);
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!(expected)), "{answer}");
}

/// A tower with dense layers and one with experts after it, and a model without a tower; in safetensors, and in GGUF with the
/// tower in a file of its own. Pictures of different sizes have different numbers of tokens, which the request bounds.
#[test]
fn gemma_4_answers_about_pictures_as_transformers_does() {
    let in_gguf = |model: &str| folder_of(model).join(format!("gguf/{model}-text-BF16.gguf"));
    let safetensors = ["vis4-a", "vis4-b", "vis4-c"].map(|model| (model, folder_of(model)));
    let gguf = ["vis4-a", "vis4-c"].map(|model| (model, in_gguf(model)));
    for (model, path) in safetensors.into_iter().chain(gguf) {
        let (expected, tokens) = golden_text(model, "adjacent", &path);
        let prompt = golden_prompt(model, "adjacent");
        assert_eq!(prompt["images"], json!(["wide", "tall"]));
        let options = [&EXACT[..], &["--max-image-tokens", "280"]].concat();
        let server = Daemon::start_model(&path, &options, |_| {});
        let name = path.display();
        let ask = |detail: &str, more: Value| {
            let mut body = golden_request(model, "adjacent", detail, tokens);
            body.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
            let (status, answer) = post(&server, "/v1/chat/completions", &body);
            assert_eq!(status, 200, "{name}: {answer}");
            let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().expect("a number") as usize;
            (answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned(), prompt_tokens)
        };
        let of_golden = (expected, prompt["tokens"].as_array().expect("ids").len());
        assert_eq!(ask("low", json!({})), of_golden, "{name}");
        assert_eq!(ask("high", json!({"image_tokens": 70})), of_golden, "{name}");
        // 256 tokens instead of 64, and 276 at most instead of 44.
        let (_, longer) = ask("high", json!({}));
        assert!((of_golden.1 + 300..of_golden.1 + 430).contains(&longer), "{name}: {longer} tokens");
        assert_eq!(ask("low", json!({})), of_golden, "{name}, cached");
    }
}

/// `unicorn run --image` asks the server that runs, and says what to do without one.
#[test]
fn a_picture_of_the_command_line_is_sent_to_the_server() {
    let (expected, tokens) = golden_answer("vis-a", "adjacent");
    let server = Daemon::start_model(&data("gemma3-vision/vis-a"), &EXACT, |_| {});
    let url = server.url().replace("/v1", "");
    let files = ["exact", "checker"].map(|image| data(format!("images/{image}.png")).display().to_string());
    let run = |more: &[&str]| {
        let tokens = tokens.to_string();
        let words =
            ["run", "a/b", "next last command type move", "--temperature", "0", "--max-tokens", &tokens];
        output(unicorn_on_software(&[&words[..], more].concat()))
    };
    let (code, said, stderr) = run(&["--url", &url, "--image", &files[0], "--image", &files[1]]);
    assert!(code == 0 && said.trim_end() == expected.trim_end(), "{said:?} {expected:?} {stderr}");
    let (code, _, stderr) = run(&["--url", &url, "--image", "/proc/nonexistent/a.png"]);
    assert!(code != 0 && stderr.contains("/proc/nonexistent/a.png"), "{stderr}");
    let (code, _, stderr) = run(&["--url", &url, "--image", "/dev/zero"]);
    assert!(code == 1 && stderr.contains("/dev/zero: larger than"), "{stderr}");
    let (code, _, stderr) = run(&["--here", "--image", &files[0]]);
    assert!(code != 0 && stderr.contains("--image needs a running server"), "{stderr}");
}

/// The server opens both files, and its device process reads them.
#[test]
fn a_gguf_file_with_its_tower_answers_about_pictures() {
    let folder = data("gemma3-vision/gguf");
    let model = folder.join("vis-a-text-BF16.gguf");
    let (expected, tokens) = golden_text("vis-a", "adjacent", &model);
    assert_eq!(tokens, 24);
    let body = golden_request("vis-a", "adjacent", "low", tokens);
    let server = Daemon::start_model(&model, &EXACT, |_| {});
    let (status, answer) = post(&server, "/v1/chat/completions", &body);
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!(expected)), "{answer}");
    let (_, shown) = post(&server, "/api/show", &json!({"model": "a/b"}));
    assert!(shown["capabilities"].as_array().expect("a list").contains(&json!("vision")), "{shown}");

    // Without the second file, the model reads text only.
    let alone = tempfile::tempdir().expect("a folder");
    let model = alone.path().join("model.gguf");
    std::fs::copy(folder.join("vis-a-text-BF16.gguf"), &model).expect("a copy");
    let server = Daemon::start_model(&model, &EXACT, |_| {});
    let (status, answer) = post(&server, "/v1/chat/completions", &body);
    let message = answer["error"]["message"].as_str().expect("a text");
    assert!(status == 400 && message.contains("reads text only"), "{answer}");
}

/// The conversion keeps the tower and the values, so the answer is that of transformers.
#[test]
fn a_native_checkpoint_answers_about_pictures_as_its_source() {
    for model in ["vis-a", "vis4-a"] {
        let (expected, tokens) = golden_answer(model, "adjacent");
        let folder = tempfile::tempdir().expect("a folder");
        let native = folder.path().join("native");
        let [source, destination] =
            [&folder_of(model), &native].map(|path| path.to_str().expect("UTF-8").to_owned());
        let report = printed(unicorn_on_software(&["quantize", &source, &destination, "--scheme", "keep"]));
        assert!(report.contains("vision tower"), "{report}");
        let plans = [&source, &destination].map(|model| {
            let plan = printed(unicorn_on_software(&["plan", model, "--allow-software-vulkan"]));
            plan.lines().find(|line| line.starts_with("vision weights")).map(str::to_owned)
        });
        assert!(plans[0].is_some() && plans[0] == plans[1], "{model}: {plans:?}");
        let body = golden_request(model, "adjacent", "low", tokens);
        let server = Daemon::start_model(&native, &EXACT, |_| {});
        let (status, answer) = post(&server, "/v1/chat/completions", &body);
        let text = &answer["choices"][0]["message"]["content"];
        assert_eq!((status, text), (200, &json!(expected)), "{model}: {answer}");
        drop(server);
        let server = Daemon::start_model(&native, &["--vision", "off"], |_| {});
        let (status, answer) = post(&server, "/v1/chat/completions", &body);
        let message = answer["error"]["message"].as_str().expect("a text");
        assert!(status == 400 && message.contains("reads text only"), "{model}: {answer}");
    }
}

/// Int8 activations and an int8 tower: the default.
#[test]
fn a_server_with_the_default_precision_tells_pictures_apart() {
    let server = Daemon::start_model(&data("gemma3-vision/vis-a"), &[], |_| {});
    let ask = |image: &str| {
        let body = json!({
            "messages": [{"role": "user", "content": [part(image), {"type": "text", "text": "word"}]}],
            "max_tokens": 8, "temperature": 0, "ignore_eos": true
        });
        let (status, answer) = post(&server, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].clone()
    };
    let first = ask("rgb");
    assert_ne!(ask("checker"), first);
    assert_eq!(ask("rgb"), first);
}

#[test]
fn numbers_of_image_tokens_that_no_model_has_are_refused_at_the_start() {
    let model = data("gemma3-vision/vis-a");
    let model = model.to_str().expect("UTF-8");
    let serve = ["serve", "--port", "0", "--allow-software-vulkan", "--model", model];
    let plan = ["plan", model, "--allow-software-vulkan"];
    for command in [&serve[..], &plan] {
        for (options, problem) in [
            (
                &["--image-tokens", "71"][..],
                "model.image_tokens: expected one of [70, 140, 280, 560, 1120], got 71",
            ),
            (
                &["--max-image-tokens", "2240"],
                "model.max_image_tokens: expected one of [70, 140, 280, 560, 1120]",
            ),
            (
                &["--image-tokens", "560", "--max-image-tokens", "140"],
                "model.image_tokens: expected at most model.max_image_tokens, which is 140, got 560",
            ),
            (&["--image-tokens", "many"], "invalid value 'many'"),
        ] {
            let (code, _, stderr) = output(unicorn_on_software(&[command, options].concat()));
            assert!(code != 0 && stderr.contains(problem), "{command:?} {options:?}: {stderr}");
        }
    }
}

#[test]
fn models_without_their_tower_refuse_pictures_and_take_no_memory_for_one() {
    let model = data("gemma3-vision/vis-a");
    let with = Daemon::start_model(&model, &[], |_| {});
    let without = Daemon::start_model(&model, &["--vision", "off"], |_| {});
    let body = json!({"messages": [{"role": "user", "content": [part("one")]}], "max_tokens": 1});
    let (status, answer) = post(&without, "/v1/chat/completions", &body);
    let message = answer["error"]["message"].as_str().expect("a text");
    assert!(status == 400 && message.contains("reads text only"), "{answer}");
    assert_eq!(answer["error"]["param"], "messages[0].content[0].type", "{answer}");
    let tower = |server: &Daemon| {
        let scrape = server.scrape_with("unicorn_gpu_memory_bytes");
        let mut placed = scrape.lines().filter(|line| line.starts_with("unicorn_gpu_memory_bytes"));
        placed.any(|line| line.contains("class=\"vision weights\""))
    };
    assert_eq!([tower(&with), tower(&without)], [true, false]);

    let refused = |model: &str, more: &[&str]| {
        let words = ["serve", "--port", "0", "--allow-software-vulkan", "--model", model, "--vision", "on"];
        let (code, _, stderr) = output(unicorn_on_software(&[&words[..], more].concat()));
        assert_ne!(code, 0, "{stderr}");
        stderr
    };
    let text = tiny_model();
    let said = refused(text.path().to_str().expect("UTF-8"), &[]);
    assert!(said.contains("the model reads text only, and --vision on asks for its vision tower"), "{said}");
    let model = model.to_str().expect("UTF-8");
    let said = refused(model, &["--context", "12"]);
    assert!(said.contains("an image has 16 tokens, and the context 12"), "{said}");

    let planned = |mode: &str| {
        let plan =
            printed(unicorn_on_software(&["plan", model, "--allow-software-vulkan", "--vision", mode]));
        plan.lines().any(|line| line.starts_with("vision weights"))
    };
    assert_eq!(["auto", "on", "off"].map(planned), [true, true, false]);
}
