//! The binary: its exit code and its one-line error for bad input, and each command with a small checkpoint.

use std::fs::Permissions;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use unicorn::text::Tokenizer;

use crate::support::checkpoints::{pulled, tiny_model};
use crate::support::daemon::Daemon;
use crate::support::energy::{constant_power, no_power};
use crate::support::program::{assert_error, in_shell, lab, output, printed, unicorn, unicorn_on_software};
use crate::support::{data, root};

#[test]
fn a_bad_command_line_ends_with_exit_code_2() {
    let model = ["--model", "m"];
    assert_error(lab(&["model", "--batch", "65"]), 2, &["batch"]);
    assert_error(lab(&["model", "--draft", "x"]), 2, &["draft"]);
    for (args, part) in [
        (&["generate"][..], "--prompt"),
        (&["generate", "--prompt", "x", "--temperature", "hot"], "temperature"),
        (&["generate", "--prompt", "x", "--temperature", "3"], "temperature"),
        (&["generate", "--prompt", "x", "--max-tokens", "0"], "max-tokens"),
        (&["generate", "--prompt", "x", "--quantize", "int3"], "int3"),
        (&["serve", "--port", "70000"], "port"),
        (&["serve", "a"], "cannot be used with"),
        (&["eval", "logits", "m", "--output", "o"], "--tokens"),
        (&["eval", "logits", "m", "--output", "o", "--tokens", "2,x"], "--tokens"),
        (&["bench", "--generate-tokens", "1"], "generate-tokens"),
        (&["bench", "engine", "--streams", "65"], "streams"),
        (&["bench", "engine", "--courtesy", "0.5,0.05"], "from 0.1 to 1, got 0.05"),
        (&["bench", "--runs", "2", "serve"], "serve"),
        (&["bench", "serve", "--concurrency", "1,0"], "concurrency"),
        (&["bench", "serve", "--scenario", "open"], "second-turn"),
        (&["plan"], "<MODEL|--shape <SHAPE>>"),
        (&["plan", "m", "--shape", "gemma-3-1b", "--scheme", "bf16"], "--shape"),
        (&["plan", "--shape", "gemma-3-2b", "--scheme", "bf16"], "gemma-3-27b"),
        (&["plan", "--shape", "gemma-3-1b", "--scheme", "int3"], "int3"),
        (&["plan", "--shape", "gemma-3-1b", "--scheme", "bf16", "--quantize", "int8-row"], "--quantize"),
        (&["plan", "m", "--scheme", "bf16"], "--scheme"),
        (&["plan", "m", "--vram", "16GB"], "16GiB (or 16G, which is the same)"),
        (&["plan", "m", "--sequences", "0"], "sequences"),
        (&["serve", "--gtt", "much"], "gtt"),
        (&["fly"], "fly"),
    ] {
        let mut command = unicorn(args);
        if args[0] == "serve" {
            command.args(model);
        }
        // clap adds a usage line, and an error about missing arguments may have several lines before it.
        let (code, stdout, stderr) = output(command);
        assert_eq!((code, stdout.as_str()), (2, ""), "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(part), "{args:?}: {stderr}");
    }
    let stops = ["--stop", "a"].repeat(33);
    for command in [&["generate", "--prompt", "x"][..], &["chat"]] {
        assert_error(unicorn(&[command, &stops[..]].concat()), 1, &["stop", "at most 32"]);
    }
    assert_eq!(output(unicorn(&[])).0, 2);
    let (code, short, _) = output(unicorn(&["-V"]));
    assert_eq!((code, short.trim_end()), (0, concat!("unicorn ", env!("CARGO_PKG_VERSION"))));
    let (code, version, _) = output(unicorn(&["--version"]));
    assert!(code == 0 && version.starts_with(&short), "{version}");
    for part in ["commit", "features", "kernels", "driver    "] {
        assert!(version.contains(part), "{part}: {version}");
    }
}

#[test]
fn configuration_files_are_read_in_order_checked_and_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let system = |args: &[&str]| {
        let mut command = unicorn(args);
        command.env("UNICORN_CONFIG_DIR", folder.path());
        command
    };
    let stdout = printed(system(&["config", "check"]));
    assert!(
        stdout.contains("good") && stdout.contains("files   none") && stdout.contains("unicorn-demo"),
        "{stdout}"
    );

    let main = write("config.toml", "[server]\nport = 1\nqueue = 1\nconnections = 10\nhead_timeout_s = 1");
    write("conf.d/10.toml", "[server]\nqueue = 2\nconnections = 20");
    let last = write("conf.d/20.toml", "[server]\nconnections = 30");
    for ignored in ["conf.d/30.toml.orig", "conf.d/.40.toml", "conf.d/README"] {
        write(ignored, "no TOML");
    }
    let shown = |mut command: Command| {
        command.env("UNICORN_SERVER_HEAD_TIMEOUT_S", "9").env("UNICORN_API_KEYS", "sk-0123456789abcdef");
        let (code, stdout, stderr) = output(command);
        assert_eq!(code, 0, "{stderr}");
        assert!(!stdout.contains("sk-0123") && !stderr.contains("sk-0123"), "a key is shown");
        stdout
    };
    let whole = shown(system(&["config", "show"]));
    for (option, source) in [
        ("port = 1", main.as_str()),
        ("queue = 2", "10.toml"),
        ("connections = 30", &last),
        ("head_timeout_s = 9", "environment"),
    ] {
        assert!(
            whole.lines().any(|line| line.starts_with(option) && line.ends_with(source)),
            "{option}: {whole}"
        );
    }
    let other = write("other.toml", "[server]\nport = 5");
    let alone = shown(system(&["config", "show", "--config", &other]));
    assert!(alone.contains("port = 5") && alone.contains("queue = 256"), "{alone}");

    let stdout = printed(system(&["config", "check"]));
    assert!(stdout.contains(&format!("{main}, ")) && stdout.contains(&last), "{stdout}");
    for (text, parts) in [
        ("[server]\nprt = 1", &["did you mean server.port?"][..]),
        ("[server]\nhost = \"0.0.0.0\"", &["other machines", "API key"]),
        ("[server]\napi_key_file = \"/proc/nonexistent/keys\"", &["/proc/nonexistent/keys", "No such file"]),
        (
            "[server]\ntls_cert = \"/proc/nonexistent/cert\"\ntls_key = \"/proc/nonexistent/key\"",
            &["/proc/nonexistent/cert"],
        ),
        ("[model]\npath = \"/proc/nonexistent/model\"", &["/proc/nonexistent/model"]),
        (
            "[kv.disk]\npath = \"/proc/version/kv\"",
            &["kv.disk.path: cannot open /proc/version/kv", "choose a folder"],
        ),
    ] {
        write("conf.d/20.toml", text);
        assert_error(system(&["config", "check"]), 78, parts);
    }
    std::fs::remove_file(&last).expect("removed");
    std::fs::create_dir(&last).expect("made");
    assert_error(system(&["config", "show"]), 78, &[&last, "not a regular file, but a folder"]);
}

/// Lines of the server, of its device process, and the final error.
#[test]
fn every_line_of_a_log_has_the_configured_format() {
    let logged = |format: &str| {
        let mut command = unicorn(&["serve", "--port", "0"]);
        command.env("UNICORN_LOG_FORMAT", format);
        let (code, _, stderr) = output(command);
        assert_eq!(code, 75, "without a driver: {stderr}");
        stderr
    };
    let json = logged("json");
    let lines: Vec<Value> = json
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
        .collect();
    let has = |level: &str, part: &str| {
        let is_it = |line: &Value| {
            line["level"] == level && line["message"].as_str().is_some_and(|m| m.contains(part))
        };
        assert!(lines.iter().any(is_it), "{level} {part}: {json}");
    };
    has("INFO", "listening on");
    has("WARN", "demo model");
    has("ERROR", "error: ");
    let journal = logged("journal");
    for (priority, part) in [("<6>", "listening on"), ("<4>", "demo model"), ("<3>", "error: ")] {
        let is_it = |line: &str| line.starts_with(priority) && line.contains(part);
        assert!(journal.lines().any(is_it), "{priority} {part}: {journal}");
    }
    assert!(journal.lines().all(|line| line.starts_with('<') && !line.contains("T2")), "times: {journal}");
}

#[test]
fn configuration_errors_name_the_option_and_its_source() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("unicorn.toml");
    let path = file.to_str().expect("UTF-8");
    assert_error(unicorn(&["serve", "--config", path]), 78, &[path, "No such file"]);
    for (text, part) in
        [("[server]\nprt = 1", "server.prt"), ("[server]\nport = \"x\"", "server.port"), ("[server", "TOML")]
    {
        std::fs::write(&file, text).expect("written");
        assert_error(unicorn(&["serve", "--config", path]), 78, &[path, part]);
    }
    let mut command = unicorn(&["serve"]);
    command.env("UNICORN_SERVER_PORT", "http");
    assert_error(command, 78, &["UNICORN_SERVER_PORT", "integer"]);
}

#[test]
fn the_error_of_a_port_in_use_names_it_and_suggests_another() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    assert_error(unicorn(&["serve", "--port", &port]), 78, &[&port, "taken", "--port"]);
    assert_error(unicorn(&["serve", "--host", "203.0.113.1"]), 78, &["203.0.113.1", "8010"]);
    let with_second = |args: &[&str]| {
        let mut command = unicorn(args);
        command.env("UNICORN_SERVER_OLLAMA_PORT", &port);
        command
    };
    let of_second = format!(
        "port {port} of 127.0.0.1 is taken by another program: stop it, or choose another port with \
                             server.ollama_port"
    );
    assert_error(with_second(&["serve", "--port", "0"]), 78, &[&of_second]);
    for command in [&["serve"][..], &["config", "check"]] {
        let both = with_second(&[command, &["--port", &port]].concat());
        assert_error(both, 78, &["server.ollama_port and server.port are both"]);
    }
}

#[test]
fn the_error_of_a_bad_model_names_its_path_and_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |p: &Path| p.to_str().expect("UTF-8").to_owned();
    let missing = path(&folder.path().join("nothing"));
    let empty = path(folder.path());
    let file = path(&folder.path().join("file"));
    std::fs::write(&file, "x").expect("written");
    let no_tokenizer = folder.path().join("half");
    std::fs::create_dir(&no_tokenizer).expect("made");
    std::fs::copy(data("gemma3/tiny-a/config.json"), no_tokenizer.join("config.json")).expect("copied");
    let no_tokenizer = path(&no_tokenizer);

    for (model, part) in [
        (&missing, "no such file or folder"),
        (&file, "is not a GGUF file"),
        (&empty, "config.json"),
        (&no_tokenizer, "tokenizer.json"),
    ] {
        assert_error(unicorn(&["generate", "--prompt", "x", "--model", model]), 1, &[model, part]);
        assert_error(unicorn(&["serve", "--port", "0", "--model", model]), 78, &[model, part]);
        let eval = ["eval", "logits", model, "--tokens", "2", "--output", "/dev/null"];
        // `eval logits` takes ids, so it needs no tokenizer and fails only because there are no weights.
        let parts = if *model == no_tokenizer { &["model.safetensors"][..] } else { &[model, part] };
        assert_error(unicorn(&eval), 1, parts);
    }
    // A character that changes the direction of the text is shown escaped.
    assert_error(unicorn(&["inspect", "a\u{202e}b"]), 1, &[r"a\u{202e}b", "no such file or folder"]);
    // A name without an organization, as other programs use. The error says how to pull a model, and lists pulled
    // models.
    let cache = pulled(&[("config.json", b"{}"), ("model.safetensors", b"")]);
    let (no_cache, cache) = (tempfile::tempdir().expect("a folder"), path(cache.path()));
    for (dir, part) in [(path(no_cache.path()), "no model was pulled"), (cache, "pulled models are org/tiny")]
    {
        for name in ["gemma3", "gemma3:5b"] {
            let mut serve = unicorn(&["serve", "--port", "0", "--model", name, "--models-dir", &dir]);
            serve.env("HF_HUB_CACHE", "/proc/nonexistent");
            assert_error(serve, 78, &[name, part, "`unicorn pull ORG/NAME`"]);
        }
        // A short name stands for a name on the hub.
        let mut serve = unicorn(&["serve", "--port", "0", "--model", "gemma3:4b", "--models-dir", &dir]);
        serve.env("HF_HUB_CACHE", "/proc/nonexistent");
        assert_error(serve, 78, &[&dir, "`unicorn pull google/gemma-3-4b-it-qat-q4_0-gguf` downloads it"]);
    }
    let text = unicorn(&["eval", "perplexity", &no_tokenizer, "--text", &missing]);
    assert_error(text, 1, &[&missing, "No such file"]);
}

/// As in `vllm serve MODEL` and `ollama run MODEL`.
#[test]
fn a_model_may_be_named_without_its_option() {
    const MISSING: &str = "/proc/nonexistent/a";
    for (words, code) in [
        (&["serve"][..], 78),
        (&["config", "check"], 78),
        (&["chat"], 1),
        (&["generate", "--prompt", "x"], 1),
    ] {
        let command = unicorn(&[words, &[MISSING]].concat());
        assert_error(command, code, &[MISSING, "no such file or folder"]);
    }
    let shown = printed(unicorn(&["config", "show", MISSING]));
    let is_it = |line: &str| line.starts_with("path = ") && line.contains(MISSING);
    let line = shown.lines().find(|line| is_it(line)).expect(&shown);
    assert!(line.ends_with("# command line"), "{line}");
}

/// The wrapper script of `make serve`, with a script in place of the binary that reports these devices.
#[test]
fn make_serve_allows_software_only_without_a_usable_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let binary = folder.path().join("unicorn");
    let script = "#!/bin/sh\nif [ \"$1\" = devices ]; then cat \"$0.devices\"; else echo \"$@\"; fi\n";
    std::fs::write(&binary, script).expect("written");
    std::fs::set_permissions(&binary, Permissions::from_mode(0o755)).expect("executable");
    let device = |usable| format!("0: Old Card\n   kind         discrete GPU\n   usable       {usable}\n");
    for (devices, software) in [
        (device("yes"), false),
        (device("no: it lacks maintenance4") + &device("yes"), false),
        (device("no: it lacks maintenance4"), true),
        (device("with --allow-software-vulkan: it is software on the CPU, and slow"), true),
        ("no Vulkan device was found\n".into(), true),
    ] {
        std::fs::write(folder.path().join("unicorn.devices"), &devices).expect("written");
        let mut command = Command::new(root().join("tools/with_device.sh"));
        command.arg(&binary).args(["serve", "--port", "1"]);
        let (code, stdout, stderr) = output(command);
        let expected = if software { "serve --allow-software-vulkan --port 1\n" } else { "serve --port 1\n" };
        assert_eq!((code, stdout.as_str()), (0, expected), "{devices}");
        assert_eq!(stderr.contains("NO USABLE GPU"), software, "{stderr}");
    }
}

#[test]
fn a_machine_without_a_device_is_an_error_without_a_fallback() {
    for args in [
        &["generate", "--prompt", "x"][..],
        &["generate", "--prompt", "x", "--allow-software-vulkan"],
        &["serve", "--port", "0", "--allow-software-vulkan"],
        &["bench"],
        &["bench", "engine"],
    ] {
        assert_error(unicorn(args), if args[0] == "serve" { 75 } else { 1 }, &["Vulkan"]);
    }
}

#[test]
fn every_command_has_a_manual_page_and_shell_completion() {
    // Building a package must not fail because of a bad configuration.
    let with_bad_config = |args: &[&str]| {
        let mut command = unicorn(args);
        command.env("UNICORN_CONFIG", "/proc/nonexistent/config.toml");
        let (code, stdout, stderr) = output(command);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        stdout
    };
    let help = succeed(&["--help"]);
    let commands = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let commands: Vec<&str> = commands
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(commands.contains(&"serve") && !commands.contains(&"device-process"), "{commands:?}");

    let folder = tempfile::tempdir().unwrap();
    with_bad_config(&["man-pages", folder.path().to_str().unwrap()]);
    let page = |name: &str| {
        std::fs::read_to_string(folder.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    for command in &commands {
        assert!(page("unicorn.1").contains(&format!("unicorn\\-{command}(1)")), "{command}");
        page(&format!("unicorn-{command}.1"));
    }
    assert!(page("unicorn-serve.1").contains("api\\-key\\-file"));
    assert!(page("unicorn-models-rm.1").contains("unicorn models rm"));
    assert!(!folder.path().join("unicorn-device-process.1").exists());

    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = with_bad_config(&["completions", shell]);
        for word in commands.iter().copied().chain(["allow-software-vulkan"]) {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
    assert_error(unicorn(&["man-pages", "/proc/none"]), 1, &["/proc/none"]);
}

fn succeed(args: &[&str]) -> String {
    let mut command = unicorn_on_software(args);
    command.arg("--allow-software-vulkan");
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    // Validation messages that come while the device is destroyed fail no wait, so they show only here.
    assert!(!stderr.contains("ERROR"), "{args:?}: {stderr}");
    stdout
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

#[test]
fn eval_perplexity_agrees_with_eval_logits() {
    let folder = tiny_model();
    let model = folder.path().to_str().expect("UTF-8");
    let file = folder.path().join("logits.safetensors");
    let file_path = file.to_str().expect("UTF-8");
    let goldens = std::fs::read(data("gemma3/tiny-a/goldens.safetensors")).expect("goldens");
    let goldens = safetensors::SafeTensors::deserialize(&goldens).expect("goldens");
    let tokens: Vec<i32> = goldens
        .tensor("tokens.mid")
        .unwrap()
        .data()
        .chunks_exact(4)
        .map(bytemuck::pod_read_unaligned)
        .collect();
    let list = tokens.iter().map(i32::to_string).collect::<Vec<_>>().join(",");

    succeed(&["eval", "logits", model, "--tokens", &list, "--output", file_path]);
    let written = std::fs::read(&file).expect("written");
    let written = safetensors::SafeTensors::deserialize(&written).expect("a sound file");
    let logits = written.tensor("logits").expect("the tensor");
    assert_eq!(logits.shape(), [tokens.len(), 512]);
    let (logits, expected) = (floats(logits.data()), floats(goldens.tensor("logits.mid").unwrap().data()));
    let worst = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst < 1e-3, "{worst} from the golden");

    for (tokens, part) in [("2,512", "512"), ("", "--tokens")] {
        let mut bad =
            unicorn_on_software(&["eval", "logits", model, "--tokens", tokens, "--output", file_path]);
        bad.arg("--allow-software-vulkan");
        assert_error(bad, if tokens.is_empty() { 2 } else { 1 }, &[part]);
    }

    // The text fills two windows of 64 tokens, each with `<bos>` in front. The perplexity must follow from the logits.
    let text_file = folder.path().join("text");
    let text_path = text_file.to_str().expect("UTF-8");
    let text = "Vim has two modes. ".repeat(8);
    std::fs::write(&text_file, &text).expect("written");
    let tokenizer = std::fs::read(data("tokenizer-mini/tokenizer.json")).expect("the tokenizer");
    let tokenizer = Tokenizer::from_bytes(&tokenizer, "tokenizer.json").expect("a sound tokenizer");
    let ids = tokenizer.encode(&text, false).expect("encodes");
    assert!((64..=126).contains(&ids.len()), "{} tokens are not two windows", ids.len());
    let mut nll = 0.0;
    for window in ids.chunks(63) {
        let tokens: Vec<u32> = [2].iter().chain(window).copied().collect();
        let list = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        succeed(&["eval", "logits", model, "--tokens", &list, "--output", file_path]);
        let written = std::fs::read(&file).expect("written");
        let written = safetensors::SafeTensors::deserialize(&written).expect("a sound file");
        let logits = floats(written.tensor("logits").expect("the tensor").data());
        for (row, target) in logits.chunks_exact(512).zip(&tokens[1..]) {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            nll += sum.ln() - f64::from(row[*target as usize]);
        }
    }
    let report = succeed(&["eval", "perplexity", model, "--text", text_path, "--context", "64"]);
    let perplexity: f64 = report.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect(&report);
    let expected = (nll / ids.len() as f64).exp();
    assert!((perplexity / expected - 1.0).abs() < 1e-5, "{report}: expected {expected}");

    let mut short =
        unicorn_on_software(&["eval", "perplexity", model, "--text", text_path, "--context", "1"]);
    short.arg("--allow-software-vulkan");
    assert_error(short, 1, &["--context", "at least 2"]);
}

/// Block tables, the memory plan and the report must not assume that a model has both kinds of layers.
#[test]
fn models_with_only_one_kind_of_layer_run_with_every_command() {
    for (kind, says) in [
        ("full_attention", "8, all with full attention"),
        ("sliding_attention", "8 (0 with full attention, the others with a sliding window of 16 tokens)"),
    ] {
        let folder = tiny_model();
        let at = |name: &str| folder.path().join(name);
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let config = std::fs::read(at("config.json")).expect("the config");
        let mut config: Value = serde_json::from_slice(&config).expect("JSON");
        config["layer_types"] = vec![kind; 8].into();
        if kind == "full_attention" {
            config["sliding_window"] = Value::Null;
        }
        std::fs::write(at("config.json"), config.to_string()).expect("written");
        let model = text(folder.path());

        let (code, inspected, stderr) = output(unicorn(&["inspect", &model]));
        assert!(code == 0 && inspected.contains(says), "{inspected}{stderr}");
        let (code, planned, stderr) = output(unicorn(&["plan", &model, "--vram", "1GiB"]));
        assert!(code == 0 && planned.contains("KV cache"), "{planned}{stderr}");

        // 100 tokens take several steps and exceed the sliding window.
        let tokens = (0..100).map(|i| (4 + i * 7 % 500).to_string()).collect::<Vec<_>>().join(",");
        let file = text(&at("logits"));
        succeed(&["eval", "logits", &model, "--tokens", &tokens, "--output", &file]);
        let written = std::fs::read(&file).expect("written");
        let written = safetensors::SafeTensors::deserialize(&written).expect("a sound file");
        let logits = floats(written.tensor("logits").expect("the tensor").data());
        assert!(logits.len() == 100 * 512 && logits.iter().all(|logit| logit.is_finite()), "{kind}");

        // A native checkpoint stores values of each layer. The server compares the device's layers with them.
        let (native, words) = (at("native"), at("words"));
        std::fs::write(&words, "Vim has two modes. ".repeat(20)).expect("written");
        succeed(&["quantize", &model, &text(&native), "--calibrate", &text(&words)]);
        let mut server = Daemon::start_model(&native, &["--context", "128"], |_| {});
        assert!(server.line("self-test ").contains("and 8 layers in"), "{:#?}", server.log);
        let (status, answer) = server.ask(&[], false);
        assert_eq!(status, 200, "{kind}: {answer}");
        assert!(server.metric("unicorn_generation_tokens_total") > 1.0, "{answer}");
    }
}

#[test]
fn eval_logits_needs_no_tokenizer() {
    let (whole, bare) = (tiny_model(), tempfile::tempdir().expect("a folder"));
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(whole.path().join(file), bare.path().join(file)).expect("copied");
    }
    let broken = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(whole.path().join(file), broken.path().join(file)).expect("copied");
    }
    std::fs::write(broken.path().join("tokenizer.json"), "{").expect("written");
    let [logits, without, with_broken] = [&whole, &bare, &broken].map(|folder| {
        let file = folder.path().join("logits.safetensors");
        let [model, output] = [folder.path(), &file].map(|path| path.to_str().expect("UTF-8"));
        succeed(&["eval", "logits", model, "--tokens", "2,17,42", "--output", output]);
        std::fs::read(&file).expect("written")
    });
    assert!(logits.len() > 3 * 512 * size_of::<f32>());
    assert!(logits == without && logits == with_broken, "the logits of the same ids differ");
}

#[test]
fn generate_chat_and_bench_run_on_a_small_model() {
    let folder = tiny_model();
    let model = folder.path().to_str().expect("UTF-8");
    let generate = ["generate", "--model", model, "--prompt", "Hello", "--max-tokens", "12", "--seed", "5"];
    let answer = succeed(&generate);
    assert_eq!(answer, succeed(&generate), "the same seed gives the same answer");
    assert!(answer.trim().len() > 1, "{answer:?}");

    // Dividing logits by such a small temperature leaves the range of f32, so it counts as greedy, from every source.
    let at = |temperature| succeed(&[&generate[..], &["--temperature", temperature]].concat());
    let greedy = at("0");
    assert_eq!(at("1e-39"), greedy);
    let generation = folder.path().join("generation_config.json");
    std::fs::write(&generation, r#"{"do_sample": true, "temperature": 1e-39}"#).expect("written");
    assert_eq!(succeed(&generate), greedy);

    let mut chat =
        unicorn_on_software(&["chat", "--model", model, "--max-tokens", "8", "--temperature", "0"]);
    chat.arg("--allow-software-vulkan").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut chat = chat.spawn().expect("runs");
    chat.stdin
        .take()
        .expect("piped")
        .write_all(b"Hello\n\n/nwe\n/new\n\"\"\"Hello\n\"\"\"\n")
        .expect("typed");
    let Output { status, stdout, stderr } = chat.wait_with_output().expect("ends");
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success() && !stderr.contains("ERROR"), "{stderr}");
    assert!(stderr.contains("unknown command \"/nwe\"") && !stderr.contains('\u{1b}'), "{stderr}");
    let answers = String::from_utf8(stdout).expect("UTF-8");
    let (first, second) = answers.split_at(answers.len() / 2);
    assert_eq!(first, second, "/new did not start a new conversation");
    assert!(first.trim().len() > 1 && first.ends_with('\n'), "{first:?}");
    // A line that cannot be answered changes the exit status, and the next line is answered.
    let words = "Hello ".repeat(200);
    let chat = ["chat", "--model", model, "--max-tokens", "8", "--context", "64", "--allow-software-vulkan"];
    let input = format!("printf '{words}\\nHello\\n' |");
    let (code, answers, stderr) = output(in_shell(&input, &unicorn_on_software(&chat)));
    assert_eq!((code, answers.trim().is_empty()), (1, false), "{answers:?} {stderr}");
    assert!(stderr.contains("error: 1 of 2 messages were not answered"), "{stderr}");
    // An answer that cannot be printed ends the chat.
    let chat =
        unicorn_on_software(&["chat", "--model", model, "--max-tokens", "8", "--allow-software-vulkan"]);
    let mut chat = in_shell("printf 'Hello\\nHello\\n' |", &chat);
    chat.stdout(std::fs::File::options().write(true).open("/dev/full").expect("opened"));
    let (code, _, stderr) = output(chat);
    assert_eq!((code, stderr.matches("cannot write to standard output").count()), (1, 1), "{stderr}");

    let machine = constant_power();
    let bench = |machine: &TempDir, more: &[&str]| {
        let root = machine.path().to_str().expect("UTF-8");
        let short = ["--prompt-tokens", "20", "--generate-tokens", "4", "--runs", "1", "--root", root];
        succeed(&[&["bench", "--model", model], &short[..], more].concat())
    };
    let line = bench(&machine, &["--streams", "1,3", "--courtesy", "1,0.5", "--json"]);
    let report: Value = serde_json::from_str(&line).expect(&line);
    for name in ["load_s", "prefill_tokens_per_s", "decode_tokens_per_s", "rss_bytes", "peak_rss_bytes"] {
        assert!(report[name].as_f64().is_some_and(|n| n > 0.0), "{name}: {line}");
    }
    let streams = report["streams"].as_array().expect(&line);
    assert_eq!(
        streams.iter().map(|s| s["streams"].as_u64()).collect::<Vec<_>>(),
        [Some(1), Some(3)],
        "{line}"
    );
    for streams in streams {
        for name in [
            "decode_tokens_per_s",
            "steps",
            "host_us_per_step",
            "host_us_per_sequence_step",
            "joules_per_token",
        ] {
            assert!(streams[name].as_f64().is_some_and(|n| n > 0.0), "{name}: {line}");
        }
    }
    let courtesy = report["courtesy"].as_array().expect(&line);
    assert_eq!(courtesy.iter().map(|c| c["courtesy"].as_f64()).collect::<Vec<_>>(), [Some(1.0), Some(0.5)]);
    for shares in courtesy {
        for name in ["busy", "prefill_tokens_per_s", "decode_tokens_per_s"] {
            assert!(shares[name].as_f64().is_some_and(|n| n > 0.0), "{name}: {line}");
        }
    }
    for name in ["device", "driver", "commit"] {
        assert!(report[name].as_str().is_some_and(|s| !s.is_empty()), "{name}: {line}");
    }
    assert_eq!(
        (&report["energy_source"], &report["no_energy_because"]),
        (&"amdgpu".into(), &Value::Null),
        "{line}"
    );
    for stage in ["prefill", "decode"] {
        let number = |name: &str| report[format!("{stage}_{name}")].as_f64().expect(&line);
        assert!(number("joules_per_token") > 0.0, "{stage}: {line}");
    }
    let line = bench(&machine, &["--profile", "--json"]);
    let report: Value = serde_json::from_str(&line).expect(&line);
    let kernels = report["kernels"].as_array().expect(&line).iter();
    let embed = kernels.filter(|k| k["kernel"].as_str().is_some_and(|name| name.starts_with("embed")));
    let dispatches: Vec<_> = embed.map(|kernel| kernel["dispatches"].as_u64()).collect();
    assert_eq!(dispatches, [Some(4)], "one step computes the prompt, and three steps the next ids: {line}");
    let text = bench(&machine, &[]);
    assert!(
        text.contains(" J a token of prefill, ") && text.contains("(by amdgpu: of the whole machine"),
        "{text}"
    );

    // For a machine without energy counters no energy is reported, and the reason is given once.
    let machine = no_power();
    let line = bench(&machine, &["--streams", "1", "--json"]);
    let report: Value = serde_json::from_str(&line).expect(&line);
    for name in ["energy_source", "prefill_joules_per_token", "decode_joules_per_token"] {
        assert_eq!(report[name], Value::Null, "{line}");
    }
    assert_eq!(report["streams"][0]["joules_per_token"], Value::Null, "{line}");
    let why = report["no_energy_because"].as_str().expect(&line);
    assert!(why.contains("/sys/class/powercap has no RAPL package; amdgpu"), "{line}");
    assert_eq!(bench(&machine, &[]).matches(why).count(), 1);
}
