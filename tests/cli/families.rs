//! Checkpoints of other families than the demo model's: what the program does with their tokenizers and templates.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use tempfile::TempDir;

use unicorn::checkpoint::Checkpoint;

use crate::support::checkpoints::{ByName as _, StoredTensor, copy_of, opened, safetensors_file};
use crate::support::daemon::Daemon;
use crate::support::data;
use crate::support::goldens::Goldens;
use crate::support::program::{output, printed, printed_json, unicorn, unicorn_on_software};

/// A copy of a set. `change` changes its `tokenizer_config.json`.
fn copy(set: &str, change: impl Fn(&mut Value)) -> TempDir {
    let to = copy_of(&data("families").join(set));
    let path = to.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    change(&mut config);
    std::fs::write(path, config.to_string()).expect("written");
    to
}

/// A Llama without a chat template.
fn without_template() -> TempDir {
    copy("tiny-llama", |config| {
        config.as_object_mut().expect("an object").remove("chat_template");
    })
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A template file that shows in the ids of a prompt that it was used.
fn template_in(folder: &Path) -> String {
    let path = folder.join("turns.jinja");
    let source = "{% for m in messages %}[{{ m.role }}|{{ mood or 'calm' }}] {{ m.content }}\n{% endfor %}";
    std::fs::write(&path, source).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_checkpoint_without_a_template_completes_texts_and_chats_with_a_given_one() {
    let folder = without_template();
    let model = folder.path().to_str().expect("UTF-8");
    let template = template_in(folder.path());
    let generate = |more: &[&str]| {
        let words =
            ["generate", "--model", model, "--prompt", "Hello", "--max-tokens", "4", "--temperature", "0"];
        output(unicorn_on_software(&[&words[..], &["--allow-software-vulkan"], more].concat()))
    };
    let (code, _, stderr) = generate(&[]);
    let expected =
        "this model has no chat template, so it cannot answer conversations: give one with --chat-template";
    assert!(code == 1 && stderr.contains(expected), "{stderr}");
    let (code, answer, stderr) = generate(&["--chat-template", &template]);
    assert!(code == 0 && !answer.trim().is_empty(), "{stderr}");

    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0});
    let post = |server: &Daemon, path: &str, body: &Value| {
        let (status, answer) = server.exchange("POST", path, &[], &body.to_string());
        (status, serde_json::from_str::<Value>(&answer).expect(&answer))
    };
    let server = Daemon::start_model(folder.path(), &[], |_| {});
    let (status, answer) = post(&server, "/v1/completions", &json!({"prompt": "Hello", "max_tokens": 4}));
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = post(&server, "/v1/chat/completions", &chat);
    assert!(
        status == 400 && answer["error"]["message"].as_str().expect("a text").contains("no chat template"),
        "{answer}"
    );
    drop(server);

    let server = Daemon::start_model(folder.path(), &["--chat-template", &template], |_| {});
    let (status, answer) = post(&server, "/v1/chat/completions", &chat);
    assert_eq!(status, 200, "{answer}");
    let tokens = |body: Value| post(&server, "/tokenize", &body).1["tokens"].clone();
    let messages = &chat["messages"];
    let calm = tokens(json!({"messages": messages}));
    let text = tokens(json!({"content": "[user|calm] Hello\n"}));
    assert_eq!(calm, text, "the template wrote the turn");
    let merry = tokens(json!({"messages": messages, "chat_template_kwargs": {"mood": "merry"}}));
    assert_eq!(merry, tokens(json!({"content": "[user|merry] Hello\n"})));
}

#[test]
fn the_terminal_chat_takes_a_template() {
    let folder = without_template();
    let model = folder.path().to_str().expect("UTF-8");
    let template = template_in(folder.path());
    let chat = |more: &[&str]| {
        let words =
            ["chat", "--model", model, "--max-tokens", "4", "--no-history", "--allow-software-vulkan"];
        let mut command = unicorn_on_software(&[&words[..], more].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program runs");
        child.stdin.take().expect("a pipe").write_all(b"Hello\n").expect("written");
        let done = child.wait_with_output().expect("it ends");
        format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
    };
    assert!(chat(&[]).contains("no chat template"));
    let answered = chat(&["--chat-template", &template]);
    assert!(!answered.contains("no chat template"), "{answered}");
}

#[test]
fn a_vocabulary_smaller_than_the_tokenizer_is_refused() {
    let folder = copy("tiny-llama", |_| {});
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) = (json!(400), json!(1), json!(2));
    std::fs::write(&path, config.to_string()).expect("written");
    std::fs::remove_file(folder.path().join("generation_config.json")).expect("removed");
    let model = folder.path().to_str().expect("UTF-8");
    let (code, _, stderr) = output(unicorn_on_software(&["generate", "--model", model, "--prompt", "x"]));
    let expected = "its ids go up to 501";
    assert!(stderr.contains("but the model's vocabulary has 400 rows"), "{stderr}");
    assert!(code == 1 && stderr.contains(expected), "{stderr}");
}

/// Mistral is computed as a Llama. The config of a GGUF file comes from its keys.
#[test]
fn inspect_names_the_architecture_of_a_checkpoint() {
    for (model, architecture) in [
        ("gemma3/tiny-a", "Gemma-3"),
        ("families/tiny-gemma3n", "Gemma 3n"),
        ("families/tiny-mistral-window", "Llama"),
        ("families/tiny-llama/gguf/tiny-llama-Q8_0.gguf", "Llama"),
        ("families/tiny-qwen2", "Qwen 2"),
        ("families/tiny-qwen3", "Qwen 3"),
    ] {
        let model = data(model);
        let words = ["inspect", model.to_str().expect("UTF-8")];
        let shown = printed(unicorn(&words));
        assert!(shown.contains(&format!("architecture {architecture}\n")), "{shown}");
        let json = printed_json(unicorn(&[&words[..], &["--json"]].concat()));
        assert_eq!(json["architecture"], architecture);
    }
}

/// A tiny Gemma 4 with its tokenizer and these fields in `generation_config.json`.
fn gemma4(set: &str, generation: &Value) -> TempDir {
    with_tokenizer(set, "gemma4-tokenizer", generation)
}

/// A copy of a set with this tokenizer and template, and this `generation_config.json`.
fn with_tokenizer(set: &str, tokenizer: &str, generation: &Value) -> TempDir {
    let to = copy_of(&data("families").join(set));
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(data("families").join(tokenizer).join(file), to.path().join(file)).expect("copied");
    }
    std::fs::write(to.path().join("generation_config.json"), generation.to_string()).expect("written");
    to
}

#[test]
fn a_gemma_4_answers_and_draws_no_suppressed_token() {
    let ask = |suppressed: &[u64], bias: Value| -> Vec<u64> {
        let fields = json!({"eos_token_id": [1, 106, 50], "suppress_tokens": suppressed});
        let folder = gemma4("tiny-gemma4-31b", &fields);
        let server = Daemon::start_model(folder.path(), &[], |_| {});
        let body = json!({
            "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true, "logit_bias": bias,
        });
        let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        let prompt = &answer["prompt_token_ids"];
        // The template ends the prompt with an empty thought.
        assert_eq!(prompt.as_array().and_then(|ids| ids.last()), Some(&json!(101)), "{answer}");
        let ids = answer["choices"][0]["token_ids"].as_array().expect("ids");
        ids.iter().map(|id| id.as_u64().expect("an id")).collect()
    };
    let free = ask(&[], json!({}));
    let wanted = free[0];
    let kept = ask(&[wanted], json!({}));
    assert!(!kept.contains(&wanted) && kept.len() == 8, "{free:?} {kept:?}");
    // A client's bias does not bring it back.
    assert_eq!(ask(&[wanted], json!({wanted.to_string(): 100})), kept);
}

/// The answer is that of transformers. A picture is refused, because the tower of such a model cannot be computed, and the
/// plan shows the table that is gathered by rows.
#[test]
fn a_gemma_4_e2b_answers_texts_and_refuses_pictures() {
    let folder = gemma4("tiny-gemma4-e2b", &json!({"eos_token_id": [1, 106, 50]}));
    let path = folder.path().to_str().expect("UTF-8");
    let plan = printed(unicorn(&["plan", path, "--vram", "1GiB", "--gtt", "1GiB"]));
    let row = plan.lines().find(|line| line.starts_with("per-layer embedding")).expect("a row of the plan");
    assert_eq!(row.split_whitespace().nth(2), Some("-"), "{row}: it is in host memory");

    let goldens = Goldens::open(&data("families/tiny-gemma4-e2b"));
    let server = Daemon::start_model(folder.path(), &["--precision", "f32"], |_| {});
    let expected = goldens.tokens("greedy.short.tokens");
    let body = json!({
        "prompt": goldens.tokens("tokens.short"), "max_tokens": expected.len(), "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    });
    let (status, answer) = server.exchange("POST", "/v1/completions", &[], &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["choices"][0]["token_ids"], json!(expected));

    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let body = json!({"messages": [{"role": "user", "content": [picture]}]});
    let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
    assert!(status == 400 && answer.contains("image"), "{status}: {answer}");
}

#[test]
fn a_mixture_answers_and_counts_the_experts_that_it_used() {
    let folder = gemma4("tiny-gemma4-26b", &json!({"eos_token_id": [1, 106, 50]}));
    let config: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("config.json")).expect("read"))
            .expect("JSON");
    let number = |field: &str| config["text_config"][field].as_f64().unwrap_or_else(|| panic!("{field}"));
    let server = Daemon::start_model(folder.path(), &[], |_| {});
    let body = json!({
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0,
        "ignore_eos": true,
    });
    let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let [used, steps] = ["unicorn_used_experts_total", "unicorn_steps_total"].map(|name| server.metric(name));
    let layers = number("num_hidden_layers") * steps;
    let [least, most] = ["top_k_experts", "num_experts"].map(|field| number(field) * layers);
    assert!(used > least && used <= most, "{used} experts in {steps} steps, {least} to {most} expected");
}

/// The tiny Qwen 3 mixture with so many experts, copies of its eight, of which a token has eight.
fn mixture_of(experts: usize) -> TempDir {
    let folder = with_tokenizer("tiny-qwen3-moe", "qwen-tokenizer", &json!({"eos_token_id": [360]}));
    let path = |name: &str| folder.path().join(name);
    let mut tensors: Vec<(String, String, Vec<usize>, Vec<u8>)> = Vec::new();
    for part in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let bytes = std::fs::read(path(part)).expect("read");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint");
        for (name, tensor) in file.iter() {
            let mut add = |name: String, shape: &[usize], bytes: Vec<u8>| {
                tensors.push((name, tensor.dtype().to_string(), shape.to_vec(), bytes));
            };
            let copies = experts / 8;
            if let Some((layer, rest)) = name.split_once(".experts.") {
                let (number, matrix) = rest.split_once('.').expect("a number");
                let number: usize = number.parse().expect("a number");
                for copy in 0..copies {
                    let name = format!("{layer}.experts.{}.{matrix}", number + 8 * copy);
                    add(name, tensor.shape(), tensor.data().to_vec());
                }
            } else if name.ends_with(".mlp.gate.weight") {
                add(name.into(), &[experts, tensor.shape()[1]], tensor.data().repeat(copies));
            } else {
                add(name.into(), tensor.shape(), tensor.data().to_vec());
            }
        }
        std::fs::remove_file(path(part)).expect("removed");
    }
    std::fs::remove_file(path("model.safetensors.index.json")).expect("removed");
    let stored: Vec<StoredTensor<'_>> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), dtype.as_str(), &shape[..], &bytes[..]))
        .collect();
    std::fs::write(path("model.safetensors"), safetensors_file(&stored)).expect("written");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(path("config.json")).expect("read")).expect("JSON");
    config["num_experts"] = experts.into();
    config["num_experts_per_tok"] = 8.into();
    std::fs::write(path("config.json"), config.to_string()).expect("written");
    folder
}

/// Each further token of a step reads further experts, so that a first draft is short.
#[test]
fn drafts_of_a_mixture_are_shorter_than_those_of_a_dense_model() {
    let dense = with_tokenizer("tiny-qwen3", "qwen-tokenizer", &json!({"eos_token_id": [360]}));
    let mixture = mixture_of(64);
    // All ids are equal, so every draft is right.
    let body = json!({
        "prompt": vec![300; 8], "max_tokens": 6, "temperature": 0, "logit_bias": {"300": 100}, "ignore_eos": true,
    });
    let drafts = |folder: &TempDir| {
        let server = Daemon::start_model(folder.path(), &[], |_| {});
        let (status, answer) = server.exchange("POST", "/v1/completions", &[], &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let of_lookup = |name: &str| {
            server.metric(&format!(
                "unicorn_spec_decode_num_{name}_tokens_total{{model_name=\"a/b\",guesser=\"lookup\"}}"
            ))
        };
        let [drafted, accepted] = ["draft", "accepted"].map(of_lookup);
        assert_eq!(drafted, accepted);
        (drafted, server.metric("unicorn_steps_total"))
    };
    assert_eq!(drafts(&dense), (4.0, 2.0), "the prompt, and one step of a draft of four");
    let (drafted, steps) = drafts(&mixture);
    assert!(drafted > 0.0 && drafted < 4.0 && steps > 2.0, "{drafted} in {steps} steps");
}

/// The prompt opens the thought, because a model with random weights opens none.
#[test]
fn a_thought_is_in_its_own_field_and_ends_at_its_budget() {
    let folder = with_tokenizer("tiny-qwen3", "qwen-tokenizer", &json!({"eos_token_id": [360]}));
    let server = Daemon::start_model(folder.path(), &[], |_| {});
    let ask = |fields: Value| -> Value {
        let mut body = json!({
            "messages": [
                {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well <think>\n"},
            ],
            "continue_final_message": true, "max_tokens": 24, "temperature": 0, "ignore_eos": true,
            "return_token_ids": true, "logit_bias": {"382": -100, "383": -100},
        });
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).expect("JSON")
    };
    let text = |answer: &Value, field: &str| {
        answer["choices"][0]["message"][field].as_str().unwrap_or_default().to_owned()
    };
    let endless = ask(json!({}));
    assert!(
        !text(&endless, "reasoning_content").is_empty() && text(&endless, "content").is_empty(),
        "{endless}"
    );
    let limited = ask(json!({"thinking_token_budget": 5}));
    let ids = limited["choices"][0]["token_ids"].as_array().expect("ids");
    assert_eq!(ids.iter().position(|id| *id == 383), Some(5), "</think> follows five ids: {limited}");
    assert!(!text(&limited, "content").is_empty(), "{limited}");
    assert_eq!(limited["usage"]["completion_tokens_details"]["reasoning_tokens"], 6, "{limited}");
}

/// The template drops the thought of an earlier turn, and ends a prompt otherwise than a history. So the conversation that
/// both have in common must be in the prefix cache, also in layers with a window that the answer has left.
#[test]
fn a_second_turn_costs_its_new_tokens_and_the_last_answer() {
    let folder = gemma4("tiny-gemma4-31b", &json!({"eos_token_id": [1, 106, 50]}));
    let server = Daemon::start_model(folder.path(), &[], |_| {});
    let ask = |messages: &Value| -> (u64, u64) {
        let body = json!({
            "messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": true,
            "reasoning_effort": "high",
        });
        let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        let number = |at: &str| answer.pointer(at).and_then(Value::as_u64).expect("a number");
        (number("/usage/prompt_tokens"), number("/usage/prompt_tokens_details/cached_tokens"))
    };
    let question: String = (0..60).map(|i| format!("word{i} ")).collect();
    let mut messages = json!([{"role": "user", "content": question}]);
    let (mut before, _) = ask(&messages);
    for turn in 0..3 {
        let said =
            json!({"role": "assistant", "content": format!("Answer {turn}"), "reasoning": "Not kept."});
        let asked = json!({"role": "user", "content": "And then?"});
        messages.as_array_mut().expect("a list").extend([said, asked]);
        let (prompt, cached) = ask(&messages);
        // A block has 16 tokens, and the generation prompt some more.
        assert!(cached + 2 * 16 >= before && cached < prompt, "turn {turn}: {cached} of {before} tokens");
        before = prompt;
    }
}

/// Experts that the calibration text does not reach are rounded to nearest, and the report counts them.
#[test]
fn calibration_weighs_the_errors_of_the_experts_that_the_text_reaches() {
    let model = gemma4("tiny-gemma4-26b", &json!({}));
    let folder = tempfile::tempdir().expect("a folder");
    let quantize = |name: &str, options: &[&str]| {
        let result = folder.path().join(name);
        let command = ["quantize", text(model.path()), text(&result), "--allow-software-vulkan"];
        (printed(unicorn_on_software(&[&command[..], options].concat())), opened(&result))
    };
    let calibrated = |name: &str, words: &str| {
        let file = folder.path().join(format!("{name}.txt"));
        std::fs::write(&file, words).expect("written");
        quantize(name, &["--calibrate", text(&file)])
    };
    let (_, nearest) = quantize("nearest", &["--rounding", "nearest"]);
    const EXPERTS: usize = 8;
    const LAYERS: usize = 6;
    let rounded_to_nearest = |result: &Checkpoint| -> usize {
        let experts = |checkpoint: &Checkpoint, layer: usize| -> Vec<Vec<f32>> {
            let matrices = ["gate_proj", "up_proj", "down_proj"].map(|matrix| {
                let name = format!("model.layers.{layer}.experts.{matrix}.weight");
                checkpoint.get(&name).expect("a tensor").to_f32().expect("numbers")
            });
            let of_expert = |expert: usize| {
                let each = matrices.iter().map(|m| &m[expert * m.len() / EXPERTS..][..m.len() / EXPERTS]);
                each.collect::<Vec<_>>().concat()
            };
            (0..EXPERTS).map(of_expert).collect()
        };
        let same = |layer: usize| {
            let both = experts(result, layer).into_iter().zip(experts(&nearest, layer));
            both.filter(|(a, b)| a == b).count()
        };
        (0..LAYERS).map(same).sum()
    };
    let (report, result) = calibrated("a word", "Hello");
    let without = rounded_to_nearest(&result);
    assert!((1..EXPERTS * LAYERS).contains(&without), "{without}");
    let line = format!("experts       the text has no token of {without} of {}: rounded", EXPERTS * LAYERS);
    assert!(report.contains(&line), "{without}: {report}");
    let sentences: String = (0..300).map(|n| format!("{n} is followed by {}. ", n + 1)).collect();
    let (report, result) = calibrated("sentences", &sentences);
    let fewer = rounded_to_nearest(&result);
    assert!(fewer < without, "{fewer} instead of {without}");
    let line = match fewer {
        0 => format!("the text has tokens of all {}", EXPERTS * LAYERS),
        _ => format!("no token of {fewer} of"),
    };
    assert!(report.contains(&line), "{fewer}: {report}");
}

#[test]
fn inspect_lists_the_heads_of_layers_that_differ() {
    let folder = gemma4("tiny-gemma4-31b", &json!({}));
    let model = folder.path().to_str().expect("UTF-8");
    let text = printed(unicorn(&["inspect", model]));
    assert!(text.contains("8 heads and 4 KV heads of 16 or 8 heads and 2 KV heads of 32"), "{text}");
    let heads = &printed_json(unicorn(&["inspect", "--json", model]))["heads"];
    assert_eq!(
        heads[1],
        json!({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "layers": 2})
    );
}

/// The syntax of calls, seen from outside: `inspect`, `/v1/models`, the prompt, the answer, and the option.
#[test]
fn tools_are_called_in_the_syntax_of_the_model_or_of_the_option() {
    let folder = with_tokenizer("tiny-qwen3", "qwen-tokenizer", &json!({"eos_token_id": [360]}));
    let shown = printed(unicorn(&["inspect", text(folder.path())]));
    assert!(shown.lines().any(|line| line.split_whitespace().eq(["tool", "calls", "hermes"])), "{shown}");
    let tool = json!({"type": "function", "function": {"name": "light", "parameters": {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
    }}});
    let ask = |server: &Daemon, fields: Value| -> Value {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Light in the hall, please."}], "tools": [tool],
            "max_tokens": 200, "temperature": 0, "reasoning_effort": "none",
        });
        body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).expect("JSON")
    };
    for (options, syntax, tag) in [
        (&[][..], "hermes", "<tools>"),
        (&["--tool-call-parser", "json"], "json", "You can call these tools"),
        (&["--tool-call-parser", "qwen3_coder"], "qwen3_coder", "<tools>"),
    ] {
        let server = Daemon::start_model(folder.path(), options, |_| {});
        let (_, models) = server.exchange("GET", "/v1/models", &[], "");
        let models: Value = serde_json::from_str(&models).expect("JSON");
        assert_eq!(models["data"][0]["tool_call_parser"], syntax, "{models}");
        assert_eq!(models["data"][0]["context_window"], models["data"][0]["max_model_len"], "{models}");
        let prompt = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "return_token_strs": true});
        let (_, prompt) = server.exchange("POST", "/tokenize", &[], &prompt.to_string());
        let prompt: Value = serde_json::from_str(&prompt).expect("JSON");
        let words: String =
            prompt["token_strs"].as_array().expect("words").iter().filter_map(Value::as_str).collect();
        assert!(words.contains(tag), "{syntax}: {words}");
        // The model's weights are random. Its calls match the schema all the same.
        let answer = ask(&server, json!({"tool_choice": "required", "parallel_tool_calls": false}));
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{syntax}: {answer}");
        let function = &choice["message"]["tool_calls"][0]["function"];
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().expect("a text")).expect("JSON");
        assert!(arguments["on"].is_boolean() && arguments["room"].is_string(), "{syntax}: {function}");
        if syntax == "json" {
            continue;
        }
        // A bias makes the model begin a call although it need not. The steps in flight drew without a mask.
        let open = prompt_id(&server, "<tool_call>");
        let biased = json!({"logit_bias": {open.to_string(): 100}, "parallel_tool_calls": false});
        let answer = ask(&server, biased);
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{syntax}: {answer}");
        let silent = ask(
            &server,
            json!({"logit_bias": {open.to_string(): 100}, "tool_choice": "none", "max_tokens": 20}),
        );
        assert!(silent["choices"][0]["message"].get("tool_calls").is_none(), "{syntax}: {silent}");
    }
    let (code, _, stderr) = output(unicorn_on_software(&[
        "serve",
        "--model",
        text(folder.path()),
        "--tool-call-parser",
        "gemma4",
    ]));
    let problem = "model.tool_call_parser: calls in the syntax \"gemma4\" need the token";
    assert!(code == 78 && stderr.contains(problem), "{code}: {stderr}");
}

/// The id of a control token of the served model.
fn prompt_id(server: &Daemon, token: &str) -> u64 {
    let (_, ids) = server.exchange("POST", "/tokenize", &[], &json!({"content": token}).to_string());
    let ids: Value = serde_json::from_str(&ids).expect("JSON");
    assert_eq!(ids["tokens"].as_array().map(Vec::len), Some(1), "{ids}");
    ids["tokens"][0].as_u64().expect("an id")
}
