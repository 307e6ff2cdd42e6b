//! The shipped binary with several models and memory for some of them: models are loaded and unloaded while clients ask,
//! device processes are killed, and every answer equals that of a server with one model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::support::checkpoints::{pulled, tiny_model};
use crate::support::daemon::{Daemon, number_of, signal_process};
use crate::support::fake_runner::HANG;
use crate::support::program::{assert_error, printed, unicorn, unicorn_on_software};
use crate::support::waits::wait_until;
use crate::support::{data, root};

/// A model of the tests and its options in the configuration.
struct Served<'a> {
    name: &'a str,
    path: PathBuf,
    more: &'a str,
}

/// A configuration with these models, whose context is short, so that they take little memory.
fn configuration(folder: &Path, models: &[Served<'_>], more: &str) -> PathBuf {
    let mut text = format!("[engine]\ncontext = 256\nsequences = 2\n{more}\n");
    for Served { name, path, more } in models {
        text += &format!("[[models.serve]]\nname = {name:?}\npath = {path:?}\n{more}\n");
    }
    let path = folder.join("config.toml");
    std::fs::write(&path, text).expect("written");
    path
}

fn family(name: &str) -> PathBuf {
    data("families").join(name)
}

fn ask(server: &Daemon, model: &str) -> (u16, Value) {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body =
        json!({"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": true});
    let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
    (status, serde_json::from_str(&answer).expect(&answer))
}

/// The model that answered, and the text of each token.
fn words(server: &Daemon, model: &str) -> Vec<String> {
    let (status, answer) = ask(server, model);
    assert_eq!((status, answer["model"].as_str()), (200, Some(model)), "{answer}");
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().expect("tokens").iter();
    tokens.map(|token| token["token"].as_str().expect("a text").to_owned()).collect()
}

/// The device memory that the server reports for each model, and in all.
fn held(server: &Daemon) -> (BTreeMap<String, u64>, u64) {
    let (_, status) = server.exchange("GET", "/status", &[], "");
    let status: Value = serde_json::from_str(&status).expect(&status);
    let of = |model: &Value| {
        (model["id"].as_str().expect("a name").to_owned(), model["bytes"].as_u64().expect("bytes"))
    };
    let held: BTreeMap<_, _> = status["models"].as_array().expect("models").iter().map(of).collect();
    let all = held.values().sum();
    (held, all)
}

/// Options of an entry, with an effect on the model that it is for and on no other.
#[test]
fn each_of_several_models_has_its_own_options() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let first = "aliases = [\"gpt-4o\"]\ncontext = 96\nkv = \"f16\"\npin = true\npreload = true\nttl_s = 3000\nsequences = 1\n";
    let second = "tool_call_parser = \"json\"\nprecision = \"f32\"\nquantize = \"int8-row\"\n";
    let models = [
        Served { name: "gemma", path: gemma.path().into(), more: first },
        Served { name: "llama", path: family("tiny-llama"), more: second },
    ];
    let config = configuration(folder.path(), &models, "");
    let checked = printed(unicorn(&["config", "check", "--config", config.to_str().expect("UTF-8")]));
    assert!(checked.contains("gemma, llama"), "{checked}");
    let mut server = Daemon::start_configured(&config, &[]);
    let list = |server: &Daemon| -> Value {
        let (_, list) = server.exchange("GET", "/v1/models", &[], "");
        serde_json::from_str(&list).expect(&list)
    };
    let state = |list: &Value| -> Vec<(String, String, Option<u64>)> {
        let models = list["data"].as_array().expect("models").iter();
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        models.map(|m| (text(&m["id"]), text(&m["status"]["value"]), m["max_model_len"].as_u64())).collect()
    };
    let of = |id: &str, stage: &str, context| (id.to_owned(), stage.to_owned(), context);
    let gemma_row = [of("gemma", "loaded", Some(96)), of("gpt-4o", "loaded", Some(96))];
    assert_eq!(
        state(&list(&server)),
        [&gemma_row[..], &[of("llama", "unloaded", None)]].concat(),
        "preload loads the first"
    );
    let (status, answer) = ask(&server, "gpt-4o");
    assert_eq!((status, answer["model"].as_str()), (200, Some("gemma")), "{answer}");
    words(&server, "llama");
    let loaded = list(&server);
    assert_eq!(state(&loaded), [&gemma_row[..], &[of("llama", "loaded", Some(256))]].concat());
    assert_eq!(loaded["data"][2]["tool_call_parser"], "json");
    for part in ["attention int8-row", "precision f32", "keys and values f16\n"] {
        let is_logged = |line: &String| format!("{line}\n").contains(part);
        while !server.log.iter().any(is_logged) {
            server.wait_for_line("");
        }
    }
    let (_, running) = server.exchange("GET", "/api/ps", &[], "");
    let running: Value = serde_json::from_str(&running).expect(&running);
    let until = |i: usize| running["models"][i]["expires_at"].as_str().expect("a time").to_owned();
    assert!(until(0) < until(1), "only the first model is unloaded when it is idle: {running}");
    assert_eq!(server.device_processes().len(), 2, "each model has its own device process");
    let metrics = server.scrape_with("unicorn_steps_total");
    for name in ["gemma", "llama"] {
        for metric in ["unicorn_steps_total", "unicorn_e2e_request_latency_seconds_count"] {
            assert!(number_of(&format!("{metric}{{model_name=\"{name}\"}}"), &metrics) > 0.0, "{metrics}");
        }
    }
}

#[test]
fn a_model_named_on_the_command_line_is_served_alone() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let models = [Served { name: "llama", path: family("tiny-llama"), more: "" }];
    let config = configuration(folder.path(), &models, "");
    let server = Daemon::start_model(gemma.path(), &["--config", config.to_str().expect("UTF-8")], |_| {});
    let (_, list) = server.exchange("GET", "/v1/models", &[], "");
    assert!(list.contains("\"a/b\"") && !list.contains("llama"), "{list}");
}

#[test]
fn pulled_models_are_served_without_an_entry() {
    let gemma = tiny_model();
    let read = |name: &str| std::fs::read(gemma.path().join(name)).expect("a file");
    let names = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    let files: Vec<_> = names.into_iter().map(|name| (name, read(name))).collect();
    let files: Vec<_> = files.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    let cache = pulled(&files);
    let folder = tempfile::tempdir().expect("a folder");
    let models = [Served { name: "llama", path: family("tiny-llama"), more: "" }];
    let more = format!("[models]\npulled = true\ndir = {:?}\n", cache.path());
    let config = configuration(folder.path(), &models, &more);
    let server = Daemon::start_configured(&config, &[]);
    let (_, list) = server.exchange("GET", "/v1/models", &[], "");
    let list: Value = serde_json::from_str(&list).expect(&list);
    let ids: Vec<_> = list["data"].as_array().expect("models").iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["llama", "org/tiny"]);
    words(&server, "org/tiny");
    drop(server);

    // A pulled model of an unknown architecture is left out.
    let config_file = "models--org--tiny/snapshots/0123456789abcdef0123456789abcdef01234567/config.json";
    std::fs::write(cache.path().join(config_file), "{\"model_type\": \"mamba\"}").expect("written");
    let server = Daemon::start_configured(&config, &[]);
    let (_, list) = server.exchange("GET", "/v1/models", &[], "");
    assert!(list.contains("llama") && !list.contains("org/tiny"), "{list}");
    let why = server.log.iter().find(|line| line.contains("the pulled model org/tiny is not served"));
    assert!(why.is_some_and(|line| line.contains("mamba")), "{:?}", server.log);
}

#[test]
fn mistakes_in_a_list_of_models_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let llama = family("tiny-llama");
    for (name, more, part) in [
        ("x", "context = \"long\"", "models.serve"),
        ("x", "context = 9999999", "models.serve, \"x\": a context of 9999999 tokens was asked for"),
        ("x", "colour = 3", "unknown field `colour`"),
        ("x", "quantize = \"int3\"", "models.serve, number 2: model.quantize"),
        (
            "x",
            "image_tokens = 100",
            "number 2: model.image_tokens: expected one of [70, 140, 280, 560, 1120], got 100",
        ),
        (
            "x",
            "max_image_tokens = 70",
            "number 2: model.image_tokens: expected at most model.max_image_tokens",
        ),
        ("x", "sequences = 65", "models.serve, number 2: engine.sequences: expected 1 to 64, got 65"),
        ("twin", "", "two models have the name \"twin\""),
        ("x", "aliases = [\"twin\"]", "two models have the name \"twin\""),
        ("x", "draft = \"/nowhere\"", "/nowhere"),
    ] {
        let models = [
            Served { name: "twin", path: llama.clone(), more: "" },
            Served { name, path: llama.clone(), more },
        ];
        let config = configuration(folder.path(), &models, "");
        let check = unicorn(&["serve", "--port", "0", "--config", config.to_str().expect("UTF-8")]);
        assert_error(check, 78, &[part]);
    }
}

/// Clients with shuffled models, on memory for two of four. Device processes are killed, and the configuration is read
/// again. `UNICORN_TEST_SWAPS` is the minutes of a long run; then SmolLM2 is a fifth model, if it is there.
#[test]
fn models_swap_under_load_and_no_answer_is_wrong() {
    let minutes: Option<u64> =
        std::env::var("UNICORN_TEST_SWAPS").ok().map(|text| text.parse().expect("minutes"));
    let gemma = tiny_model();
    let qwen_tokenizer = format!("tokenizer = {:?}", family("qwen-tokenizer"));
    let mut models = vec![
        Served { name: "gemma", path: gemma.path().into(), more: "" },
        Served { name: "llama", path: family("tiny-llama"), more: "" },
        Served { name: "qwen", path: family("tiny-qwen3"), more: &qwen_tokenizer },
        Served { name: "demo", path: root().join("models/demo"), more: "" },
    ];
    let smollm2 = std::env::var_os("UNICORN_TEST_SMOLLM2").map(PathBuf::from);
    models.extend(smollm2.filter(|_| minutes.is_some()).map(|path| Served {
        name: "smollm2",
        path,
        more: "",
    }));
    let folder = tempfile::tempdir().expect("a folder");

    // The answers, and the memory, of each model alone.
    let mut alone = BTreeMap::new();
    for model in &models {
        let config = configuration(folder.path(), std::slice::from_ref(model), "");
        let server = Daemon::start_configured(&config, &[]);
        let answer = words(&server, model.name);
        assert!(alone.values().all(|(other, _)| *other != answer), "answers tell models apart");
        alone.insert(model.name, (answer, held(&server).1));
    }
    let mut largest: Vec<u64> = alone.values().map(|(_, bytes)| *bytes).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    let budget = largest[0] + largest[1];
    let config =
        configuration(folder.path(), &models, &format!("[memory]\nvram = \"{budget}\"\nreserve = \"0\"\n"));
    let server = Daemon::start_configured(&config, &[]);

    let (answered, failed, is_over) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let clients = if minutes.is_some() { 16 } else { 4 };
    let until = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut round = 0;
            while !is_over.load(Ordering::Acquire) {
                let (by_model, all) = held(&server);
                assert!(all <= budget, "{by_model:?} of {budget}");
                round += 1;
                if round % 40 == 20 {
                    server.signal("HUP");
                }
                // An engine whose device is lost twice within a minute ends, so this is done less often.
                if round % 900 == 450 && minutes.is_some() {
                    server.device_processes().first().into_iter().for_each(|pid| signal_process("KILL", pid));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let clients = (0..clients).map(|client| {
            let (server, alone, models, answered, failed) = (&server, &alone, &models, &answered, &failed);
            scope.spawn(move || {
                let mut rng = ChaCha8Rng::seed_from_u64(client);
                let mut left = if minutes.is_some() { usize::MAX } else { 6 };
                while left > 0 && until.is_none_or(|until| Instant::now() < until) {
                    left -= 1;
                    let name = models[rng.random_range(0..models.len())].name;
                    let began = Instant::now();
                    let (status, answer) = ask(server, name);
                    assert!(began.elapsed() < HANG, "{name} waited for {:?}", began.elapsed());
                    if status != 200 {
                        // A process that is killed while it loads fails that load, and all who wait for it.
                        assert!(
                            minutes.is_some() && answer["error"]["code"] == "load_failed",
                            "{name}: {status} {answer}"
                        );
                        std::thread::sleep(Duration::from_secs(1));
                        failed.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    assert_eq!(answer["model"], name);
                    let tokens =
                        answer["choices"][0]["logprobs"]["content"].as_array().expect("tokens").iter();
                    let tokens: Vec<_> =
                        tokens.map(|token| token["token"].as_str().expect("a text")).collect();
                    assert_eq!(tokens, alone[name].0, "{name}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let clients: Vec<_> = clients.collect();
        let ends: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        is_over.store(true, Ordering::Release);
        watcher.join().expect("the memory was within the plan");
        ends.into_iter().for_each(|end| end.expect("a client got every answer"));
    });
    let (answered, failed) = (answered.into_inner(), failed.into_inner());
    assert!(answered >= 24 && failed <= answered / 20, "{answered} answers, {failed} failures");

    // One process is killed between two answers. The model is loaded again, and answers as before.
    let name = models[0].name;
    assert_eq!(words(&server, name), alone[name].0);
    server.device_processes().iter().for_each(|pid| signal_process("KILL", pid));
    assert_eq!(words(&server, name), alone[name].0);
    // All memory is freed if every model is unloaded.
    for model in &models {
        let body = json!({"model": model.name}).to_string();
        assert_eq!(server.exchange("POST", "/models/unload", &[], &body).0, 200);
    }
    wait_until("all memory is free", || server.device_processes().is_empty() && held(&server).1 == 0);
    if minutes.is_some() {
        println!("{answered} answers, {failed} failed loads, memory for {budget} bytes");
    }
}

/// The defaults of an entry are for requests that do not set these options.
#[test]
fn an_entry_sets_the_defaults_of_sampling_and_of_the_template() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let template = folder.path().join("template.jinja");
    std::fs::write(&template, "{{ bos_token }}{{ mood | default('calm') }} {{ messages[0].content }}")
        .expect("written");
    let entry = |more: &'static str| Served { name: "gemma", path: gemma.path().into(), more };
    let prompt_of = |server: &Daemon, body: Value| -> (String, u64) {
        let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
        let answer: Value = serde_json::from_str(&answer).expect(&answer);
        assert_eq!(status, 200, "{answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
        (text, answer["usage"]["prompt_tokens"].as_u64().expect("a number"))
    };
    let ask = |more: Value| {
        let mut body =
            json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 3});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let more = format!(
        "chat_template = {template:?}\ntemperature = 2\ntop_k = 1\ntemplate_kwargs = {{ mood = \"very very cheerful indeed\" }}\n"
    );
    let models = [Served { name: "gemma", path: gemma.path().into(), more: &more }];
    let config = configuration(folder.path(), &models, "");
    let server = Daemon::start_configured(&config, &[]);
    let (defaults, long) = prompt_of(&server, ask(json!({})));
    let (greedy, _) = prompt_of(&server, ask(json!({"temperature": 0})));
    assert_eq!(defaults, greedy, "the entry draws from one candidate");
    let (free, _) = prompt_of(&server, ask(json!({"top_k": 0})));
    assert_ne!(free, greedy, "with the temperature of the entry");
    let (_, short) = prompt_of(&server, ask(json!({"chat_template_kwargs": {"mood": "sad"}})));
    assert!(short < long, "{short} and {long} tokens");
    let (_, shown) = server.exchange("POST", "/api/show", &[], "{}");
    assert!(shown.contains("top_k  1"), "{shown}");
    drop(server);

    for (more, part) in [
        ("temperature = 3", "temperature: expected 0 to 2, got 3"),
        ("template_kwargs = { messages = 1 }", "the server itself sets \"messages\""),
    ] {
        let config = configuration(folder.path(), &[entry(more)], "");
        let serve = unicorn(&["serve", "--port", "0", "--config", config.to_str().expect("UTF-8")]);
        assert_error(serve, 78, &[part]);
    }
}

#[test]
fn a_second_port_has_the_same_api() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = port.expect("a free port").port();
    let models = [Served { name: "gemma", path: gemma.path().into(), more: "" }];
    let config = configuration(folder.path(), &models, &format!("[server]\nollama_port = {port}\n"));
    let mut server = Daemon::start_configured(&config, &[]);
    let answer = words(&server, "gemma");
    server.at_port(port);
    assert_eq!(server.exchange("GET", "/", &[], ""), (200, "Ollama is running".into()));
    assert_eq!(words(&server, "gemma"), answer);
}

/// SIGHUP reads the list again: models join and leave, and those whose entries did not change stay loaded.
#[test]
fn the_list_of_models_is_read_again_on_a_signal() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let entry = |name, path: PathBuf, more| Served { name, path, more };
    let gemma = || entry("gemma", gemma.path().into(), "");
    let config = configuration(folder.path(), &[gemma(), entry("llama", family("tiny-llama"), "")], "");
    let mut server = Daemon::start_configured(&config, &[]);
    let answer = words(&server, "gemma");
    words(&server, "llama");
    let gemmas_process = server.device_processes();

    let read_again = |server: &mut Daemon, models: &[Served<'_>], line: &str| {
        configuration(folder.path(), models, "");
        server.signal("HUP");
        server.wait_for_line(line);
    };
    let tokenizer = format!("tokenizer = {:?}", family("qwen-tokenizer"));
    let qwen = entry("qwen", family("tiny-qwen3"), &tokenizer);
    read_again(&mut server, &[qwen, gemma()], "read the configuration again");
    let list = |server: &Daemon| server.exchange("GET", "/v1/models", &[], "").1;
    let ids = |server: &Daemon| -> Vec<String> {
        let list: Value = serde_json::from_str(&list(server)).expect("JSON");
        let models = list["data"].as_array().expect("models").iter();
        models.map(|model| model["id"].as_str().expect("an id").to_owned()).collect()
    };
    assert_eq!(ids(&server), ["qwen", "gemma"]);
    assert_eq!(ask(&server, "llama").0, 404);
    wait_until("one device process is left", || server.device_processes().len() == 1);
    assert!(gemmas_process.contains(&server.device_processes()[0]), "gemma stayed loaded");
    assert_eq!(words(&server, "gemma"), answer);
    words(&server, "qwen");

    // A changed option has an effect, and a mistake has none.
    let shorter = entry("gemma", family("tiny-gemma"), "context = 96");
    let shorter = Served { path: gemma().path, ..shorter };
    read_again(&mut server, &[shorter], "read the configuration again");
    assert_eq!(words(&server, "gemma"), answer);
    assert!(list(&server).contains("\"max_model_len\":96"), "{}", list(&server));
    let wrong = entry("wrong", "/nowhere".into(), "");
    read_again(&mut server, &[wrong, gemma()], "the configuration stays unchanged");
    assert_eq!(ids(&server), ["gemma"]);
}

#[test]
fn other_commands_ignore_the_list_of_models() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let config = configuration(folder.path(), &[Served { name: "x", path: "/nowhere".into(), more: "" }], "");
    let (config, model) = (config.to_str().expect("UTF-8"), gemma.path().to_str().expect("UTF-8"));
    printed(unicorn_on_software(&["plan", model, "--config", config, "--vram", "1G"]));
    let prompt = ["--prompt", "Hello", "--max-tokens", "2", "--allow-software-vulkan"];
    printed(unicorn_on_software(
        &[&["generate", "--model", model, "--config", config][..], &prompt].concat(),
    ));
}

#[test]
fn a_plan_says_whether_the_next_load_reads_memory() {
    let gemma = tiny_model();
    let plan = |more: &[&str]| {
        let model = gemma.path().to_str().expect("UTF-8");
        printed(unicorn_on_software(&[&["plan", model, "--allow-software-vulkan"], more].concat()))
    };
    let is_said = |plan: &str| plan.lines().any(|line| line.starts_with("load again       from memory: "));
    assert!(is_said(&plan(&[])), "{}", plan(&[]));
    assert!(plan(&["--json"]).contains("\"load_again_from_memory\":true"));
    // Nothing is known of the memory of another machine.
    assert!(!plan(&["--vram", "1G"]).contains("load again"));
}

/// The files of one of several models stay in the page cache, where there is memory for both copies.
#[test]
fn a_model_that_is_loaded_again_is_read_from_memory() {
    let (folder, gemma) = (tempfile::tempdir().expect("a folder"), tiny_model());
    let models = [Served { name: "gemma", path: gemma.path().into(), more: "" }];
    let config = configuration(folder.path(), &models, "");
    let mut server = Daemon::start_configured(&config, &["-v"]);
    let answer = words(&server, "gemma");
    server.line("\"gemma\": later loads read memory; both copies need 2.");
    // The kernels of a model are measured under the lease of the device.
    server.line("had the device alone for");
    server.line("loaded   ");
    let body = json!({"model": "gemma"}).to_string();
    assert_eq!(server.exchange("POST", "/models/unload", &[], &body).0, 200);
    wait_until("the model is unloaded", || server.device_processes().is_empty());
    assert_eq!(words(&server, "gemma"), answer);
    let line = server.wait_for_line("loaded   ");
    assert!(line.contains(", from memory; "), "{line}");
}
