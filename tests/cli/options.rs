//! The options of the command line and of the configuration file. A command accepts only options that have an effect on
//! it. For each option, a run of the program shows its effect.
//!
//! `tests/options.md` is the table of these runs. This suite fails if the table lacks an option. Several options may
//! share a run.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use unicorn::cli::command_line;
use unicorn::config::DEFAULT_TOML;

use crate::support::checkpoints::{pulled, tiny_model};
use crate::support::daemon::Daemon;
use crate::support::lists::words;
use crate::support::program::{
    assert_error, lab, lab_on_software, output, printed, printed_json, unicorn, unicorn_on_software,
};
use crate::support::{data, demo, device, device_is_software, root};

const TABLE: &str = "tests/options.md";
/// The second binary. Its commands have this word before them in the table and in command lines here.
const LAB: &str = "unicorn-lab";

/// A run of either binary, without any Vulkan device.
fn program(words: &[&str]) -> Command {
    match words.strip_prefix(&[LAB]) {
        Some(words) => lab(words),
        None => unicorn(words),
    }
}

/// A run of either binary, with the devices of the machine.
fn program_on_software(words: &[&str]) -> Command {
    match words.strip_prefix(&[LAB]) {
        Some(words) => lab_on_software(words),
        None => unicorn_on_software(words),
    }
}

// --- the table -------------------------------------------------------------------------------------------

/// Every option of every command, as `serve --port`, and every positional argument, as `inspect MODEL`. The options of
/// `bench` alone are left out, because they are the options of `bench engine`.
fn options_of_commands() -> BTreeSet<String> {
    fn walk(command: &clap::Command, path: &str, all: &mut BTreeSet<String>) {
        for argument in command.get_arguments().filter(|_| path != "bench") {
            match argument.get_long() {
                Some("help" | "version") => {}
                Some(long) => drop(all.insert(format!("{path} --{long}"))),
                None => drop(all.insert(format!("{path} {}", argument.get_id().as_str().to_uppercase()))),
            }
        }
        for command in command.get_subcommands() {
            walk(command, format!("{path} {}", command.get_name()).trim_start(), all);
        }
    }
    let mut all = BTreeSet::new();
    walk(&command_line(), "", &mut all);
    walk(&unicorn::lab::command_line(), LAB, &mut all);
    all
}

/// Every option of the configuration, as `server.port`.
fn options_of_configuration() -> BTreeSet<String> {
    let defaults: toml::Table = DEFAULT_TOML.parse().expect("TOML");
    fn of(section: &str, options: &toml::Value, all: &mut BTreeSet<String>) {
        for (option, value) in options.as_table().expect("a section") {
            let path = format!("{section}.{option}");
            match value {
                toml::Value::Table(_) => of(&path, value, all),
                _ => drop(all.insert(path)),
            }
        }
    }
    let mut all = BTreeSet::new();
    defaults.iter().for_each(|(section, options)| of(section, options, &mut all));
    all
}

/// The rows of the table: the options (with the command, if any), the run, and the effect that the run shows.
fn rows() -> Vec<(Vec<String>, String, String)> {
    let text = std::fs::read_to_string(root().join(TABLE)).expect("readable");
    let names =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let lines = text.lines().filter(|line| line.starts_with("| `"));
    lines
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [options, commands, run, sees] = cells[..] else { panic!("expected four cells: {line}") };
            let (options, commands) = (names(options), names(commands));
            let all = match commands.is_empty() {
                true => options,
                false => commands
                    .iter()
                    .flat_map(|command| options.iter().map(move |option| format!("{command} {option}")))
                    .collect(),
            };
            (all, run.trim_matches('`').to_owned(), sees.to_owned())
        })
        .collect()
}

#[test]
fn every_option_has_a_test_of_its_effect_or_a_reason() {
    let mut without: BTreeSet<String> = &options_of_commands() | &options_of_configuration();
    let mut complaints = Vec::new();
    for (options, run, sees) in rows() {
        assert!(!sees.is_empty(), "{options:?}: the table does not describe the effect");
        for option in &options {
            let is_built = cfg!(feature = "npu") || !option.starts_with("npu ");
            if is_built && !without.remove(option) {
                complaints.push(format!("{option}: is not an option, or has two rows"));
            }
        }
        // An option whose effect no run can show has a reason instead of a run.
        if run == "none" {
            continue;
        }
        let (file, function, place) = match run.rsplit_once("::") {
            Some((suite, test)) if suite.ends_with(".py") => {
                (format!("tests/clients/{suite}"), format!("def {test}("), "a test")
            }
            Some((suite, test)) => {
                (format!("tests/{}.rs", suite.replace("::", "/")), format!("fn {test}("), "a test")
            }
            None => ("tools/edges.py".to_owned(), format!("def {run}("), "an edge"),
        };
        let text = std::fs::read_to_string(root().join(&file)).unwrap_or_default();
        if !text.contains(&function) {
            complaints.push(format!("{run}: is not {place} in {file}"));
        }
        for option in &options {
            let name = option.rsplit(' ').next().expect("a name");
            // An environment variable, a line of a file, or a command line option.
            let spelled = match name.rsplit_once('.') {
                Some((_, key)) => {
                    vec![name.replace('.', "_").to_uppercase(), format!("{key} ="), key.to_uppercase()]
                }
                None if name.starts_with('-') => vec![name.to_owned()],
                None => vec![],
            };
            if !spelled.is_empty() && !spelled.iter().any(|name| text.contains(name)) {
                complaints.push(format!("{run}: {file} does not name {name}"));
            }
        }
    }
    complaints.extend(without.iter().map(|option| format!("{option}: has no row in {TABLE}")));
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

// --- options that a command refuses ----------------------------------------------------------------------

#[test]
fn an_option_without_effect_on_a_command_is_refused() {
    for (command, option) in [
        (&["devices"][..], &["--device", "9"][..]),
        (&["devices"], &["--allow-software-vulkan"]),
        (&["completions", "bash"], &["--quantize", "int8-row"]),
        (&["completions", "bash"], &["-v"]),
        (&["man-pages", "pages"], &["--config", "file"]),
        (&["inspect", "model"], &["--npu", "auto"]),
        (&["inspect", "model"], &["--tokenizer", "file"]),
        (&["bench", "engine"], &["--chat-template", "file"]),
        (&[LAB, "synth", "--shape", "gemma-3-270m", "folder"], &["--kv", "int8"]),
        (&["quantize", "model", "folder"], &["--quantize", "int8-row"]),
        (&["eval", "logits", "model", "--tokens", "2", "--output", "file"], &["--tokenizer", "file"]),
        (&["plan", "model"], &["--precision", "f32"]),
        (&["plan", "--shape", "gemma-3-1b", "--scheme", "bf16"], &["--model-config", "file"]),
        (&["doctor"], &["--no-tune"]),
        (&["pull", "a/b"], &["--context", "5"]),
        (&["models", "list"], &["--model-config", "file"]),
        (&["bench", "npu"], &["--npu", "off"]),
        (&[LAB, "kernels"], &["--context", "5"]),
        (&[LAB, "isa"], &["--allow-software-vulkan"]),
        (&["bench", "serve"], &["--precision", "f32"]),
    ] {
        assert_error(program(&[command, option].concat()), 2, &[option[0], "argument"]);
    }
}

// --- every command ---------------------------------------------------------------------------------------

/// For each command, a command line that the parser accepts. The command itself may fail.
fn accepted(folder: &Path) -> BTreeMap<&'static str, Vec<String>> {
    let at = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    let nothing = at("nothing");
    BTreeMap::from([
        ("serve", owned(&["serve", "--model", &nothing])),
        ("generate", owned(&["generate", "--prompt", "x", "--model", &nothing])),
        ("chat", owned(&["chat", "--model", &nothing])),
        ("devices", owned(&["devices"])),
        ("doctor", owned(&["doctor", "--root", &nothing])),
        ("eval logits", owned(&["eval", "logits", &nothing, "--tokens", "2", "--output", &nothing])),
        ("eval perplexity", owned(&["eval", "perplexity", &nothing, "--text", &nothing])),
        ("quantize", owned(&["quantize", &nothing, &nothing])),
        ("inspect", owned(&["inspect", &nothing])),
        ("unicorn-lab synth", owned(&[LAB, "synth", "--shape", "gemma-3-270m", "/dev/null/x"])),
        ("plan", owned(&["plan", &nothing])),
        ("bench engine", owned(&["bench", "engine", "--model", &nothing])),
        ("unicorn-lab model", owned(&[LAB, "model", "--model", &nothing])),
        ("bench npu", owned(&["bench", "npu", "--model", &nothing])),
        ("unicorn-lab kernels", owned(&[LAB, "kernels", "--only", "nothing"])),
        ("bench serve", owned(&["bench", "serve", "--url", "http://127.0.0.1:9/v1"])),
        ("unicorn-lab isa", owned(&[LAB, "isa", "--device", "nothing"])),
        ("unicorn-lab soak", owned(&[LAB, "soak", "1r", "--url", "http://127.0.0.1:9/v1"])),
        ("pull", owned(&["pull", "org/nothing", "--user"])),
        ("run", owned(&["run", "org/nothing", "Hello", "--url", "http://127.0.0.1:9"])),
        ("list", owned(&["list", "--url", "http://127.0.0.1:9"])),
        ("ps", owned(&["ps", "--url", "http://127.0.0.1:9"])),
        ("show", owned(&["show", "org/nothing", "--url", "http://127.0.0.1:9"])),
        ("stop", owned(&["stop", "org/nothing", "--url", "http://127.0.0.1:9"])),
        ("rm", owned(&["rm", "org/nothing", "--url", "http://127.0.0.1:9"])),
        ("kv clear", owned(&["kv", "clear"])),
        ("models list", owned(&["models", "list", "--models-dir", &nothing])),
        ("models rm", owned(&["models", "rm", "org/nothing", "--models-dir", &nothing])),
        ("npu build-kernels", owned(&["npu", "build-kernels", "--model", &nothing])),
        ("npu list", owned(&["npu", "list", "--kernels", &nothing])),
        ("config check", owned(&["config", "check", "--model", &nothing])),
        ("config show", owned(&["config", "show"])),
    ])
}

#[test]
fn every_command_follows_config_and_verbose() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("a.toml");
    std::fs::write(&file, "[log]\nlevel = \"debug\"\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let mut accepted = accepted(folder.path());
    accepted.retain(|command, _| cfg!(feature = "npu") || !command.starts_with("npu "));
    let said = |words: &[String], more: &[&str]| {
        let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let mut command = program(&words);
        command.env("HF_HUB_OFFLINE", "1").env("HF_HUB_CACHE", "/proc/nonexistent");
        output(command).2
    };
    let mut tried = BTreeSet::new();
    for option in options_of_commands() {
        let Some(command) = option.strip_suffix(" --config") else { continue };
        let words = accepted.get(command).unwrap_or_else(|| panic!("{command}: has no command line here"));
        let stderr = said(words, &["--config", file]);
        assert!(stderr.contains(&format!("configuration files: {file}")), "{command}: {stderr}");
        let stderr = said(words, &["--verbose"]);
        assert!(stderr.contains("configuration files: none"), "{command}: {stderr}");
        assert!(!said(words, &[]).contains("configuration files"), "{command}");
        tried.insert(command.to_owned());
    }
    assert_eq!(tried.len(), accepted.len(), "{tried:?}");
}

#[test]
fn config_show_shows_every_option_of_the_command_line() {
    let given = [
        ("--model", "m", "path = \"m\""),
        ("--quantize", "int8-row", "quantize = \"int8-row\""),
        ("--tokenizer", "t", "tokenizer = \"t\""),
        ("--chat-template", "j", "chat_template = \"j\""),
        ("--tool-call-parser", "hermes", "tool_call_parser = \"hermes\""),
        ("--device", "d", "device = \"d\""),
        ("--models-dir", "f", "dir = \"f\""),
        ("--model-config", "c", "config = \"c\""),
        ("--context", "77", "context = 77"),
        ("--sequences", "3", "sequences = 3"),
        ("--kv", "int8", "dtype = \"int8\""),
        ("--precision", "f32", "precision = \"f32\""),
        ("--vision", "on", "vision = \"on\""),
        ("--image-tokens", "140", "image_tokens = 140"),
        ("--max-image-tokens", "560", "max_image_tokens = 560"),
        ("--vram", "1G", "vram = \"1073741824\""),
        ("--gtt", "2M", "gtt = \"2097152\""),
        ("--reserve", "3K", "reserve = \"3072\""),
        ("--ffn-heap", "vram", "ffn_heap = \"vram\""),
        ("--draft", "g", "draft = \"g\""),
        ("--npu", "auto", "mode = \"auto\""),
        ("--name", "n", "name = \"n\""),
        ("--host", "::1", "host = \"::1\""),
        ("--port", "9", "port = 9"),
        ("--api-key-file", "k", "api_key_file = \"k\""),
        ("--allow-software-vulkan", "", "allow_software_vulkan = true"),
        ("--no-tune", "", "tune = false"),
    ];
    let words = given.iter().flat_map(|(option, value, _)| [*option, *value]).filter(|word| !word.is_empty());
    let shown = printed(unicorn(&["config", "show"].into_iter().chain(words).collect::<Vec<_>>()));
    for (option, _, line) in given {
        let is_it = |shown: &str| shown.starts_with(line) && shown.ends_with("# command line");
        assert!(shown.lines().any(is_it), "{option}: {shown}");
    }
    let shown = given.map(|(option, ..)| option);
    for option in options_of_commands() {
        let Some(option) = option.strip_prefix("config show ") else { continue };
        assert!(shown.contains(&option) || ["--config", "--verbose", "MODEL"].contains(&option), "{option}");
    }
    // The names of llama.cpp's server and of vLLM.
    for (name, value, line) in [
        ("--ctx-size", "77", "context = 77"),
        ("--max-model-len", "77", "context = 77"),
        ("--parallel", "3", "sequences = 3"),
        ("--max-num-seqs", "3", "sequences = 3"),
        ("--alias", "n", "name = \"n\""),
        ("--served-model-name", "n", "name = \"n\""),
        ("--model-draft", "g", "draft = \"g\""),
        ("--chat-template-file", "j", "chat_template = \"j\""),
    ] {
        let shown = printed(unicorn(&["config", "show", name, value]));
        let is_it = |shown: &str| shown.starts_with(line) && shown.ends_with("# command line");
        assert!(shown.lines().any(is_it), "{name}: {shown}");
    }
    // `config check` merges the same options, and checks the files that some of them name.
    let check = |words: &[&str]| {
        let mut command = unicorn(&[&["config", "check"], words].concat());
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
        output(command)
    };
    let (code, good, stderr) = check(&["--host", "127.0.0.3", "--port", "9"]);
    assert!(code == 0 && good.contains("127.0.0.3, port 9"), "{good}{stderr}");
    for (option, part) in [
        ("--model", "/proc/nonexistent/a"),
        ("--draft", "org/nonexistent"),
        ("--model-config", "/proc/nonexistent/b"),
        ("--tokenizer", "/proc/nonexistent/c"),
        ("--chat-template", "/proc/nonexistent/t"),
        ("--api-key-file", "/proc/nonexistent/d"),
    ] {
        // The demo model in the binary has its own config and tokenizer.
        let model = demo::folder();
        let model = ["--model", model.to_str().expect("UTF-8")];
        let words =
            if option == "--model" { vec![option, part] } else { [&model[..], &[option, part]].concat() };
        let (code, _, stderr) = check(&words);
        assert!(code == 78 && stderr.contains(part), "{option}: {stderr}");
    }
    for option in ["--model-config", "--tokenizer", "--chat-template"] {
        let (code, _, stderr) = check(&[option, "/proc/nonexistent"]);
        assert!(code == 78 && stderr.contains("no model is named"), "{option}: {stderr}");
    }
    assert_eq!(check(&["--host", "0.0.0.0"]).0, 78, "a server without keys on all addresses");
}

// --- loading a model -------------------------------------------------------------------------------------

/// A pulled model with an empty config and without a tokenizer. Only --models-dir, --model-config and --tokenizer
/// together make it complete.
struct Scattered {
    cache: TempDir,
    whole: TempDir,
    text: String,
}

impl Scattered {
    fn new() -> Self {
        let whole = tiny_model();
        let weights = std::fs::read(whole.path().join("model.safetensors")).expect("weights");
        let cache = pulled(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
        let text = whole.path().join("text");
        std::fs::write(&text, "Vim has two modes. Vim has two modes.").expect("written");
        let text = text.to_str().expect("UTF-8").to_owned();
        Self { cache, whole, text }
    }

    fn whole(&self) -> String {
        self.whole.path().to_str().expect("UTF-8").to_owned()
    }

    fn files(&self) -> Vec<String> {
        let cache = self.cache.path().to_str().expect("UTF-8");
        ["--models-dir", cache, "--model-config", &self.whole()].map(str::to_owned).into()
    }

    fn device(&self) -> Vec<String> {
        ["--device", &device().info().name, "--allow-software-vulkan"].map(str::to_owned).into()
    }

    /// The commands that load a model, with their arguments. The flags say whether a command reads a tokenizer, whether
    /// it can quantize during the load, and whether it computes in f32 by default.
    fn commands(&self) -> Vec<(&'static str, Vec<String>, [bool; 3])> {
        let output = self.whole.path().join("logits").to_str().expect("UTF-8").to_owned();
        let folder = self.whole.path().join("native").to_str().expect("UTF-8").to_owned();
        let model = ["--model", "org/tiny"];
        let generate = [&["generate", "--prompt", "Hello", "--max-tokens", "2"][..], &model].concat();
        let chat = [&["chat", "--max-tokens", "2"][..], &model].concat();
        let sizes = ["--prompt-tokens", "8", "--generate-tokens", "2", "--runs", "1"];
        let engine = [&["bench", "engine"][..], &model, &sizes].concat();
        let sizes = ["--prefill", "8", "--depth", "0", "--batch", "1", "--steps", "1", "--runs", "1"];
        let steps = [&[LAB, "model"][..], &model, &sizes].concat();
        let logits = ["eval", "logits", "org/tiny", "--tokens", "2,5", "--output", &output];
        let perplexity = ["eval", "perplexity", "org/tiny", "--text", &self.text];
        let quantize = ["quantize", "org/tiny", &folder, "--scheme", "keep", "--eval", &self.text];
        vec![
            ("generate", owned(&generate), [true, true, false]),
            ("chat", owned(&chat), [true, true, false]),
            ("bench engine", owned(&engine), [true, true, false]),
            ("unicorn-lab model", owned(&steps), [true, true, false]),
            ("eval logits", owned(&logits), [false, true, true]),
            ("eval perplexity", owned(&perplexity), [true, true, true]),
            ("quantize", owned(&quantize), [true, false, true]),
        ]
    }

    /// Runs a command. `chat` gets one question as input.
    fn run(&self, words: &[String]) -> (i32, String, String) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = program_on_software(&words);
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
        let input = self.whole.path().join("question");
        std::fs::write(&input, "Hello\n").expect("written");
        command.stdin(Stdio::from(std::fs::File::open(input).expect("opened")));
        output(command)
    }
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn every_command_that_loads_a_model_follows_its_load_options() {
    let scattered = Scattered::new();
    let whole = scattered.whole();
    for (name, command, [texts, quantizes, is_exact]) in scattered.commands() {
        let precision = if is_exact { "fast" } else { "f32" };
        let mut words = [command, scattered.files(), scattered.device()].concat();
        words.extend(owned(&["-v", "--context", "70", "--kv", "int8", "--npu", "off"]));
        words.extend(owned(&["--precision", precision]));
        if texts {
            words.extend(owned(&["--tokenizer", &whole]));
        }
        if quantizes {
            words.extend(owned(&["--quantize", "int8-row"]));
        }
        if ["generate", "chat", "bench engine"].contains(&name) {
            words.extend(owned(&["--draft", &whole]));
        }
        let (code, _, stderr) = scattered.run(&words);
        assert_eq!(code, 0, "{name}: {stderr}");
        let scheme = if quantizes { "int8-row" } else { "bf16" };
        let device = format!("device   {}", device().info().name);
        let (schemes, precision) = (format!("attention {scheme}, "), format!("; precision {precision}"));
        let mut parts = vec!["context  70 tokens", "keys and values int8", &schemes, &precision, &device];
        let draft = format!("draft    {whole}: 8 layers");
        if words.contains(&"--draft".to_owned()) {
            parts.push(&draft);
        }
        for part in parts {
            assert!(stderr.contains(part), "{name}: {part:?} is not in {stderr}");
        }
    }
}

/// Each option is omitted or has a wrong value, and the command must fail because of it.
#[test]
fn a_command_fails_without_a_load_option_that_it_needs() {
    let scattered = Scattered::new();
    let whole = scattered.whole();
    let empty = tempfile::tempdir().expect("a folder");
    let empty = empty.path().to_str().expect("UTF-8");
    let mut commands = scattered.commands();
    commands.push(("serve", owned(&["serve", "--port", "0", "--model", "org/tiny"]), [true, true, false]));
    let checked = |command: &[String], others: &[&[String]], option: &[&str], parts: &[&str]| {
        let words = [command, &others.concat(), &owned(option)].concat();
        let (code, _, stderr) = scattered.run(&words);
        let error = stderr.lines().find(|line| line.contains("error: ")).unwrap_or_default();
        assert!(code != 0 && parts.iter().all(|part| error.contains(part)), "{words:?}: {parts:?}: {stderr}");
    };
    for (name, command, [texts, ..]) in commands {
        let (files, device) = (scattered.files(), scattered.device());
        let tokenizer = if texts { owned(&["--tokenizer", &whole]) } else { vec![] };
        let [dir, config] = [files[..2].to_vec(), files[2..].to_vec()];
        checked(&command, &[&config, &device, &tokenizer], &["--models-dir", empty], &["org/tiny"]);
        checked(&command, &[&dir, &device, &tokenizer], &[], &["config.json"]);
        if texts {
            checked(&command, &[&files, &device], &[], &["tokenizer.json", "--tokenizer"]);
        }
        let software = "--allow-software-vulkan";
        checked(&command, &[&files, &tokenizer], &["--device", "no such", software], &["no such"]);
        if device_is_software() {
            checked(&command, &[&files, &tokenizer], &[], &["allow"]);
        }
        if cfg!(feature = "npu") {
            checked(&command, &[&files, &device, &tokenizer], &["--npu", "require"], &["NPU"]);
        }
        if ["generate", "chat", "bench engine", "unicorn-lab model", "serve"].contains(&name) {
            for limit in [&["--vram", "64K"][..], &["--reserve", "1000T"]] {
                checked(&command, &[&files, &device, &tokenizer], limit, &["does not fit"]);
            }
        }
    }
}

// --- plan, inspect and doctor ----------------------------------------------------------------------------

#[test]
fn plan_inspect_and_doctor_follow_their_options() {
    let demo = demo::folder();
    let folder = demo.to_str().expect("UTF-8");
    let weights = std::fs::read(demo.join("model.safetensors")).expect("weights");
    let cache = pulled(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
    let cache = cache.path().to_str().expect("UTF-8");
    let run = |words: &[&str]| {
        let mut command = unicorn_on_software(words);
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
        output(command)
    };
    let files = ["--models-dir", cache, "--model-config", folder];
    let json = |words: &[&str]| -> Value {
        let (_, stdout, stderr) = run(&[words, &files, &["--json"]].concat());
        serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{words:?}: {stderr}"))
    };
    // Without the options, the model is not found, or its config is invalid.
    for command in [&["inspect", "org/tiny"][..], &["plan", "org/tiny", "--vram", "1G"]] {
        assert_ne!(run(&[command, &files[2..]].concat()).0, 0, "{command:?}");
        assert_ne!(run(&[command, &files[..2]].concat()).0, 0, "{command:?}");
    }
    assert_eq!(json(&["inspect", "org/tiny"])["num_hidden_layers"], json!(6));
    if cfg!(feature = "npu") {
        let build = ["npu", "build-kernels", "--model", "org/tiny", "--python", "/proc/nonexistent"];
        for (files, part) in [(&files[2..], "org/tiny"), (&files[..2], "config.json"), (&files[..], "python")]
        {
            let (code, _, stderr) = run(&[&build, files].concat());
            assert!(code != 0 && stderr.contains(part), "{part}: {stderr}");
        }
    }

    let name = device().info().name.clone();
    let on_device = ["plan", "org/tiny", "--device", &name, "--allow-software-vulkan"];
    let on_paper = ["plan", "org/tiny", "--vram", "1G"];
    assert_eq!(json(&on_device)["fits"], json!(true));
    let nowhere = ["plan", "org/tiny", "--device", "no such", "--allow-software-vulkan"];
    assert!(run(&[&nowhere[..], &files].concat()).2.contains("no such"));
    if device_is_software() {
        assert_ne!(
            run(&[&["plan", "org/tiny"][..], &files].concat()).0,
            0,
            "software rendering is not allowed"
        );
    }
    let planned = |more: &[&str], field: &str| json(&[&on_paper[..], more].concat())[field].clone();
    let number = |more: &[&str], field: &str| planned(more, field).as_u64().expect("a number");
    assert_eq!(planned(&["--context", "96"], "context"), json!(96));
    assert!(number(&["--kv", "int8"], "kv_bytes_per_token") < number(&["--kv", "f16"], "kv_bytes_per_token"));
    assert!(planned(&["--kv", "auto"], "kv_dtype_why").is_string());
    assert!(number(&["--quantize", "int8-row"], "weight_bytes") < number(&[], "weight_bytes"));
    assert_eq!(planned(&["--sequences", "3"], "sequences"), json!(3));
    assert_eq!(planned(&["--draft", folder], "draft")["model"], json!(folder));
    let usable = |more: &[&str]| planned(more, "heaps")[0]["usable_bytes"].as_u64().expect("a number");
    assert_eq!(usable(&[]) - usable(&["--reserve", "512M"]), 512 << 20);
    let shape =
        ["plan", "--shape", "gemma-3-270m", "--scheme", "bf16", "--attention", "int8-row", "--vram", "2G"];
    let (_, shape, stderr) = run(&shape);
    assert!(shape.contains("attention int8-row, feed-forward bf16"), "{shape}{stderr}");
    if cfg!(feature = "npu") {
        assert!(number(&["--npu", "auto"], "asked_bytes") > number(&["--npu", "off"], "asked_bytes"));
    }

    // The machine that `doctor` examines is a folder, so only the option can change the report.
    let machine = tempfile::tempdir().expect("a folder");
    std::fs::write(machine.path().join("vulkan.json"), run(&["devices", "--json"]).1).expect("written");
    let root = machine.path().to_str().expect("UTF-8");
    let report =
        |words: &[&str]| run(&[&["doctor", "--json", "--root", root, "--model", "org/tiny"], words].concat());
    let software = "--allow-software-vulkan";
    let plain = report(&[&files[..], &[software]].concat()).1;
    assert!(plain.contains("the model takes"), "{plain}");
    for other in [
        &[&files[2..], &[software]].concat()[..],
        &[&files[..2], &[software]].concat(),
        &[&files[..], &[software, "--device", "no such"]].concat(),
        &[&files[..], &[software, "--context", "96"]].concat(),
        &[&files[..], &[software, "--kv", "int8"]].concat(),
        &[&files[..], &[software, "--quantize", "int8-row"]].concat(),
        &[&files[..], &[software, "--npu", "require"]].concat(),
    ] {
        assert_ne!(report(other).1, plain, "{other:?}");
    }
    if device_is_software() {
        assert_ne!(report(&files).1, plain, "software rendering is not allowed");
    }
}

#[test]
fn models_commands_and_inspect_follow_their_options() {
    let weights = std::fs::read(data("gemma3/tiny-a/model.safetensors")).expect("weights");
    let config = std::fs::read(data("gemma3/tiny-a/config.json")).expect("a config");
    let cache = pulled(&[("config.json", &config), ("model.safetensors", &weights)]);
    let cache = cache.path().to_str().expect("UTF-8");
    let run = |words: &[&str]| {
        let mut command = unicorn(words);
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
        let (code, stdout, stderr) = output(command);
        assert_eq!(code, 0, "{words:?}: {stderr}");
        stdout
    };
    let (few, all) =
        (&["inspect", "org/tiny", "--models-dir", cache][..], "model.layers.7.mlp.up_proj.weight");
    assert!(!run(few).contains(all) && run(&[few, &["--tensors"]].concat()).contains(all));
    assert!(run(&["models", "list", "--models-dir", cache]).contains("org/tiny"));
    for command in [&["inspect"][..], &["plan"], &["models", "rm", "--yes"], &["generate", "-p", "x", "-m"]] {
        let mut short = unicorn(&[command, &["gemma3:1b", "--models-dir", cache]].concat());
        short.env("HF_HUB_CACHE", "/proc/nonexistent");
        assert_error(short, 1, &["google/gemma-3-1b-it-qat-q4_0-gguf: "]);
    }
    run(&["models", "rm", "org/tiny", "--yes", "--models-dir", cache]);
    assert!(!run(&["models", "list", "--models-dir", cache]).contains("org/tiny"));
}

/// Each class of matrices gets the scheme that its option names.
#[test]
fn each_class_of_matrices_gets_the_requested_scheme() {
    let (model, folder) = (tiny_model(), tempfile::tempdir().expect("a folder"));
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let schemes =
        ["--scheme", "bf16", "--attention", "int8-row", "--feed-forward", "int4-g32", "--embedding", "bf16"];
    let (quantized, made) = (at("quantized"), at("made"));
    let source = model.path().to_str().expect("UTF-8");
    let quantize = ["quantize", source, &quantized];
    let synth = [LAB, "synth", "--shape", "gemma-3-270m", &made];
    for (command, folder) in [(&quantize[..], &quantized), (&synth, &made)] {
        printed(program(&[command, &schemes].concat()));
        let shown = printed_json(unicorn(&["inspect", folder, "--tensors", "--json"]));
        let scheme = |part: &str| {
            let tensors = shown["tensors"].as_array().expect("tensors").iter();
            let of = tensors.filter(|tensor| tensor["name"].as_str().expect("a name").contains(part));
            of.map(|tensor| tensor["scheme"].as_str().expect("a scheme").to_owned()).collect::<BTreeSet<_>>()
        };
        let one = |scheme: &str| BTreeSet::from([scheme.to_owned()]);
        assert_eq!(scheme("_proj.weight"), &one("int8-row") | &one("int4-g32"), "{command:?}");
        assert_eq!((scheme("q_proj"), scheme("up_proj")), (one("int8-row"), one("int4-g32")), "{command:?}");
        assert_eq!(scheme("embed_tokens"), one("bf16"), "{command:?}");
    }
}

/// With options that leave only the most likely token, a sampled answer equals the greedy one.
#[test]
fn answers_follow_the_sampling_options() {
    let model = tiny_model();
    let model = model.path().to_str().expect("UTF-8");
    let question = model.to_owned() + "/question";
    std::fs::write(&question, "Hello\n").expect("written");
    for command in [&["generate", "--prompt", "Hello"][..], &["chat"]] {
        let answer = |more: &[&str]| {
            let fixed = ["--model", model, "--allow-software-vulkan"];
            let more = if more.contains(&"--max-tokens") {
                more.to_vec()
            } else {
                [more, &["--max-tokens", "12"]].concat()
            };
            let mut run = unicorn_on_software(&[command, &fixed, &more].concat());
            run.stdin(Stdio::from(std::fs::File::open(&question).expect("opened")));
            let (code, stdout, stderr) = output(run);
            assert_eq!(code, 0, "{command:?} {more:?}: {stderr}");
            stdout
        };
        let greedy = answer(&["--temperature", "0"]);
        let hot = ["--temperature", "2", "--seed", "5"];
        let sampled = answer(&hot);
        assert_ne!(sampled, greedy);
        assert_eq!(answer(&hot), sampled, "the same seed gives the same answer");
        assert_ne!(
            answer(&["--temperature", "2", "--seed", "6"]),
            sampled,
            "another seed gives another answer"
        );
        for alone in [["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]] {
            assert_eq!(answer(&[&hot[..], &alone].concat()), greedy, "{alone:?}");
        }
        assert_ne!(answer(&["--temperature", "0", "--system", "Vim has two modes."]), greedy);
        let end: String =
            greedy.trim_end().chars().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect();
        let stopped = answer(&["--temperature", "0", "--stop", &end]);
        assert!(
            stopped.len() < greedy.len() && greedy.starts_with(stopped.trim_end()),
            "{stopped:?}, {greedy:?}"
        );
        assert!(answer(&["--temperature", "0", "--max-tokens", "3"]).len() < greedy.len());
    }
}

#[test]
fn kernels_follows_its_options() {
    let name = device().info().name.clone();
    let cases = |more: &[&str]| {
        let sizes = words("--shape gemma-3-270m --scheme int8-row --tokens 1 --depth 64 --runs 1");
        let fixed = ["kernels", "--json", "--allow-software-vulkan", "--device", &name];
        let report = printed_json(lab_on_software(&[&fixed[..], &sizes, more].concat()));
        let bytes = |case: &Value| (case["case"].to_string(), case["bytes"].as_u64().expect("a number"));
        report["cases"].as_array().expect("cases").iter().map(bytes).collect::<BTreeMap<_, _>>()
    };
    let attention = |kv| cases(&["--only", "atten", "--kv", kv]).into_values().sum::<u64>();
    assert!(attention("int8") < attention("f16"));
    let products = |precision| cases(&["--only", "k_proj", "--precision", precision]);
    assert_ne!(products("fast"), products("f32"));
    let embedding = cases(&["--only", "embed", "--embedding", "bf16"]);
    assert!(embedding.keys().all(|name| name.contains("embed bf16")), "{embedding:?}");
    let none = ["kernels", "--only", "k_proj", "--allow-software-vulkan", "--device", "no such"];
    assert_error(lab_on_software(&none), 1, &["no such"]);
}

#[cfg(feature = "npu")]
#[test]
fn bench_npu_follows_its_load_options() {
    use crate::support::npu::{demo_kernels, double};
    let demo = demo::folder();
    let folder = demo.to_str().expect("UTF-8");
    let weights = std::fs::read(demo.join("model.safetensors")).expect("weights");
    let cache = pulled(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
    let machine = crate::support::energy::constant_power();
    let bench = |more: &[&str]| {
        let sizes = ["--prompt-tokens", "64", "--runs", "1", "-v"];
        let mut command =
            unicorn_on_software(&[&["bench", "npu", "--model", "org/tiny"][..], &sizes, more].concat());
        command.env("UNICORN_NPU_SHIM", double()).env("UNICORN_NPU_KERNELS", demo_kernels());
        command.env("UNICORN_NPU_KEYS", "512").env("UNICORN_NPU_DEADLINE_MS", "5000");
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
        output(command)
    };
    let cache = cache.path().to_str().expect("UTF-8");
    let files = ["--models-dir", cache, "--model-config", folder, "--tokenizer", folder];
    let name = device().info().name.clone();
    let on = ["--device", &name, "--allow-software-vulkan"];
    let types = ["--quantize", "int8-row", "--precision", "f32", "--kv", "int8", "--context", "200"];
    let energy = ["--root", machine.path().to_str().expect("UTF-8")];
    let (code, stdout, stderr) = bench(&[&files[..], &on, &types, &energy, &["--json"]].concat());
    assert_eq!(code, 0, "{stderr}");
    for part in ["attention int8-row", "; precision f32", "keys and values int8", "context  200 tokens"] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    let report: Value = serde_json::from_str(&stdout).expect(&stdout);
    assert_eq!(report["energy_source"], json!("amdgpu"), "{report}");
    for (without, part) in [
        ([&files[2..], &on].concat(), "org/tiny"),
        ([&files[..2], &files[4..], &on].concat(), "config.json"),
        ([&files[..4], &on].concat(), "tokenizer.json"),
        ([&files[..], &["--device", "no such", "--allow-software-vulkan"]].concat(), "no such"),
        ([&files[..], &on, &["--vram", "64K"]].concat(), "does not fit"),
        ([&files[..], &on, &["--reserve", "1000T"]].concat(), "does not fit"),
    ] {
        let (code, _, stderr) = bench(&without);
        assert!(code == 1 && stderr.contains(part), "{part}: {stderr}");
    }
    if device_is_software() {
        assert_eq!(bench(&files).0, 1, "software rendering is not allowed");
    }
}

// --- the server ------------------------------------------------------------------------------------------

fn json_of(server: &Daemon, path: &str) -> Value {
    let (status, body) = server.exchange("GET", path, &[], "");
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).expect(&body)
}

/// The options of the command line.
#[test]
fn a_server_follows_its_command_line() {
    let scattered = Scattered::new();
    let whole = scattered.whole();
    let keys = scattered.whole.path().join("keys");
    std::fs::write(&keys, KEY).expect("written");
    // The helper that starts the server adds --allow-software-vulkan.
    let files = [scattered.files(), scattered.device()[..2].to_vec()].concat();
    let mut words: Vec<&str> = files.iter().map(String::as_str).collect();
    words.extend(["--tokenizer", &whole, "--draft", &whole, "--quantize", "int8-row", "--precision", "f32"]);
    words.extend(["--context", "70", "--sequences", "2", "--kv", "int8", "--host", "127.0.0.2", "-v"]);
    words.extend(["--api-key-file", keys.to_str().expect("UTF-8")]);
    let mut server = Daemon::start_model(Path::new("org/tiny"), &words, |command| {
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
    });
    assert!(server.url().starts_with("http://127.0.0.2:"), "{}", server.url());
    let draft = format!("draft    {whole}: 8 layers");
    for part in
        ["attention int8-row", "; precision f32", "context  70 tokens", "keys and values int8", &draft]
    {
        server.line(part);
    }
    assert_eq!(server.exchange("GET", "/status", &[], "").0, 401);
    let key = [("authorization", format!("Bearer {KEY}"))];
    let key = key.each_ref().map(|(name, value)| (*name, value.as_str()));
    let (status, body) = server.exchange("GET", "/status", &key, "");
    let body: Value = serde_json::from_str(&body).expect(&body);
    let model = &body["model"];
    assert_eq!((status, &model["id"], &model["context"]), (200, &json!("a/b"), &json!(70)), "{body}");
    assert_eq!(model["draft_layers"], json!(8), "{body}");
    assert!(model["weights"].as_str().expect("a text").contains("attention int8-row"), "{body}");
    assert_eq!((&model["kv_dtype"], &model["kv_dtype_why"]), (&json!("int8"), &Value::Null), "{body}");
    // Two whole contexts of 70 tokens, in blocks of 16.
    assert_eq!(body["kv"]["full"], json!({"held": 0, "cached": 0, "free": 2 * 5}), "{body}");
    assert_eq!(server.ask(&key, false).0, 200);
    let (_, body) = server.exchange("GET", "/status", &key, "");
    let body: Value = serde_json::from_str(&body).expect(&body);
    assert!(body["guesses"]["draft_model"]["proposed"].as_u64() > Some(0), "{body}");
}

const KEY: &str = "sk-0123456789abcdef";
const OTHER_KEY: &str = "sk-fedcba9876543210";

fn server_with(options: &[(&str, &str)]) -> Daemon {
    let variables = options.iter().map(|(option, value)| (format!("UNICORN_{option}"), *value));
    Daemon::start_as(&["--context", "400"], |command: &mut Command| {
        command.envs(variables);
    })
}

/// The number of steps for a prompt of about 300 tokens, and the number of speculated tokens of a repetitive answer.
fn steps_and_guesses(server: &Daemon) -> (u64, u64) {
    let ask = |text: String, max_tokens: u32| {
        let messages = json!([{"role": "user", "content": text}]);
        let body = json!({"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "model": "a/b"});
        let (status, body) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
        assert_eq!(status, 200, "{body}");
    };
    let steps = || json_of(server, "/status")["engine"]["steps"].as_u64().expect("a number");
    let before = steps();
    ask("Vim has two modes. ".repeat(20), 1);
    let taken = steps() - before;
    ask("Vim has two modes. ".repeat(8), 100);
    let guessed = json_of(server, "/status")["guesses"]["lookup"]["proposed"].as_u64().expect("a number");
    (taken, guessed)
}

/// The options of the configuration: two servers, one with most options at their defaults.
#[test]
fn a_server_follows_its_configuration() {
    let bounded = server_with(&[
        ("SERVER_MAX_BODY_BYTES", "2048"),
        ("SERVER_STORED_RESPONSES", "0"),
        ("SERVER_MODEL_ALIASES", "alias"),
        ("SERVER_ALLOWED_HOSTS", "box.lan"),
        ("SERVER_CORS_ORIGINS", "http://page.test"),
        ("SERVER_CONNECTIONS", "2"),
        ("ENGINE_SEQUENCES", "1"),
        ("ENGINE_PREFILL_CHUNK", "16"),
        ("ENGINE_SPECULATION_TOKENS", "0"),
        ("KV_BLOCK_SIZE", "8"),
        ("GPU_PROFILE", "true"),
    ]);
    let other = server_with(&[("SERVER_ANY_MODEL_NAME", "true"), ("SERVER_STORED_RESPONSE_BYTES", "100")]);

    let ask = |server: &Daemon, model: &str, field: (&str, &str), padding: usize| {
        let body = json!({"model": model, "prompt": "Hello", "max_tokens": 1}).to_string();
        server.exchange("POST", "/v1/completions", &[field], &(body + &" ".repeat(padding))).0
    };
    let plain = ("accept", "*/*");
    let sized = |server: &Daemon, bytes: usize| ask(server, "a/b", plain, bytes);
    assert_eq!((sized(&bounded, 3000), sized(&other, 3000)), (413, 200));
    let named = |server: &Daemon, model: &str| ask(server, model, plain, 0);
    assert_eq!((named(&bounded, "alias"), named(&bounded, "unknown")), (200, 404));
    assert_eq!(named(&other, "unknown"), 200);
    for server in [&bounded, &other] {
        let body = json!({"model": "a/b", "input": "Hello", "max_output_tokens": 16}).to_string();
        let (status, body) = server.exchange("POST", "/v1/responses", &[], &body);
        assert_eq!(status, 200, "{body}");
        let id = serde_json::from_str::<Value>(&body).expect(&body)["id"].as_str().expect("an id").to_owned();
        // Neither server stores the response: one stores no responses, the other has too few bytes.
        assert_eq!(server.exchange("GET", &format!("/v1/responses/{id}"), &[], "").0, 404);
    }
    let from = |server: &Daemon, field: (&str, &str)| ask(server, "a/b", field, 0);
    assert_eq!((from(&bounded, ("host", "box.lan")), from(&other, ("host", "box.lan"))), (200, 403));
    let page = ("origin", "http://page.test");
    assert_eq!((from(&bounded, page), from(&other, page)), (200, 403));

    let status = [&bounded, &other].map(|server| json_of(server, "/status"));
    assert_eq!(status.each_ref().map(|status| status["kv"]["block_size"].as_u64()), [Some(8), Some(16)]);
    let [few, many] = status.each_ref().map(|status| {
        let pool = &status["kv"]["sliding"];
        let blocks: u64 =
            ["held", "cached", "free"].map(|name| pool[name].as_u64().expect("a number")).iter().sum();
        blocks * status["kv"]["block_size"].as_u64().expect("a number")
    });
    assert!(few < many, "sliding windows: {few} tokens for 1 sequence, {many} for 16");
    let (steps, guesses) = steps_and_guesses(&bounded);
    let (steps_of_other, guesses_of_other) = steps_and_guesses(&other);
    assert!(steps > steps_of_other, "{steps} steps in small chunks, {steps_of_other} in one");
    assert!(guesses == 0 && guesses_of_other > 0, "{guesses}, {guesses_of_other}");
    let kernels = |server: &Daemon| json_of(server, "/status")["kernels"].as_array().expect("a list").len();
    assert!(kernels(&bounded) > 0 && kernels(&other) == 0);

    // A third connection waits until another one is closed.
    let connect = || {
        let address = bounded.url().trim_start_matches("http://").trim_end_matches("/v1").to_owned();
        TcpStream::connect(address).expect("connects")
    };
    let held = [connect(), connect()];
    std::thread::sleep(Duration::from_millis(300));
    let mut third = connect();
    third.write_all(b"GET /live HTTP/1.0\r\n\r\n").expect("sent");
    third.set_read_timeout(Some(Duration::from_millis(500))).expect("set");
    assert!(third.read(&mut [0]).is_err(), "a third connection is answered");
    drop(held);
    third.set_read_timeout(Some(crate::support::fake_runner::HANG)).expect("set");
    assert_eq!(third.read(&mut [0]).expect("answered"), 1);
}

#[test]
fn a_server_shares_prefixes_and_unloads_as_configured() {
    let keys = format!("{KEY},{OTHER_KEY}");
    let cached = |share: &str| {
        let server = server_with(&[("KV_SHARE_PREFIXES", share), ("API_KEYS", &keys)]);
        let ask = |key: &str| {
            let messages = json!([{"role": "user", "content": "Vim has two modes. ".repeat(8)}]);
            let body = json!({"model": "a/b", "messages": messages, "max_tokens": 1}).to_string();
            let key = format!("Bearer {key}");
            let (status, body) =
                server.exchange("POST", "/v1/chat/completions", &[("authorization", &key)], &body);
            assert_eq!(status, 200, "{body}");
            let body: Value = serde_json::from_str(&body).expect(&body);
            body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
        };
        ask(KEY);
        ask(OTHER_KEY)
    };
    assert_eq!(cached("key"), 0);
    assert!(cached("all") > 0);

    let mut server = server_with(&[("ENGINE_IDLE_UNLOAD_S", "1")]);
    server.line("unloading the idle model until the next request");
    assert_eq!(server.ask(&[], false).0, 200);
}

/// If validation is enabled, a missing layer is an error.
#[test]
fn validation_without_its_layer_is_an_error() {
    let generate = ["generate", "--prompt", "x", "--max-tokens", "1", "--allow-software-vulkan"];
    let run = |wanted: &str| {
        let mut command = unicorn_on_software(&generate);
        command.env("UNICORN_HARDWARE_VALIDATION", wanted).env("VK_LAYER_PATH", data("gemma3"));
        command.env("VK_ADD_LAYER_PATH", data("gemma3"));
        output(command)
    };
    let (code, _, stderr) = run("true");
    assert!(code == 1 && stderr.contains("validation"), "{stderr}");
    assert_eq!(run("false").0, 0);
}

#[test]
fn a_load_that_needs_whole_contexts_is_refused_without_room() {
    let model = tiny_model();
    let model = model.path().to_str().expect("UTF-8");
    let run = |vram: &str, whole: bool| {
        let words = ["generate", "--model", model, "--prompt", "Hello", "--max-tokens", "2"];
        let mut command = unicorn_on_software(
            &[&words[..], &["--allow-software-vulkan", "--reserve", "0", "--vram", vram]].concat(),
        );
        command.env("UNICORN_KV_WHOLE_CONTEXTS", whole.to_string()).env("UNICORN_ENGINE_SEQUENCES", "64");
        output(command)
    };
    // The smallest memory in which the model fits has no room for 64 contexts.
    let sizes = ["4M", "6M", "9M", "13M", "19M", "28M", "40M"];
    let fits = sizes.into_iter().find(|size| run(size, false).0 == 0).expect("it fits");
    let (code, _, stderr) = run(fits, true);
    assert!(code == 1 && stderr.contains("does not fit with"), "{fits}: {stderr}");
}
