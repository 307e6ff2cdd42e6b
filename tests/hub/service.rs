//! A running server pulls, serves and deletes models for its clients, and needs no restart.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::daemon::Daemon;
use crate::support::hub::{Hub, at_home, tiny_gemma};
use crate::support::program::{assert_error, in_shell, output, printed, unicorn_on_software};
use crate::support::server::certificate;
use crate::support::waits::wait_until;

/// A server that serves what is pulled into `home`/models.
fn start(home: &Path, hub: &Hub) -> Daemon {
    let config = home.join("config.toml");
    let models = home.join("models");
    let text = format!("[engine]\ncontext = 256\nsequences = 2\n[models]\npulled = true\ndir = {models:?}\n");
    fs::write(&config, text).expect("written");
    Daemon::start_configured_as(&config, &[], |command| at_home(command, home, hub))
}

fn ids(server: &Daemon) -> Vec<String> {
    let (_, list) = server.exchange("GET", "/v1/models", &[], "");
    let list: Value = serde_json::from_str(&list).expect(&list);
    let ids = list["data"].as_array().expect("models").iter();
    ids.map(|model| model["id"].as_str().expect("an id").to_owned()).collect()
}

/// The model that answers a request for `name`.
fn ask(server: &Daemon, name: &str) -> (u16, Value) {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"model": name, "messages": messages, "max_tokens": 4}).to_string();
    let (status, answer) = server.exchange("POST", "/v1/chat/completions", &[], &body);
    (status, serde_json::from_str(&answer).expect(&answer))
}

/// The files of `org/tiny` that the server has open or mapped.
fn files_of_the_model(server: &Daemon) -> Vec<String> {
    let process = Path::new("/proc").join(server.pid().to_string());
    let open = fs::read_dir(process.join("fd")).expect("a process").flatten();
    let open = open.filter_map(|file| Some(fs::read_link(file.path()).ok()?.display().to_string()));
    let maps = fs::read_to_string(process.join("maps")).expect("a process");
    let all = open.chain(maps.lines().map(str::to_owned));
    all.filter(|line| line.contains("models--org--tiny")).collect()
}

fn pull(server: &Daemon, name: &str) -> Vec<Value> {
    let (status, lines) = server.exchange("POST", "/api/pull", &[], &json!({"model": name}).to_string());
    assert_eq!(status, 200, "{lines}");
    lines.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

#[test]
fn a_model_is_pulled_served_and_deleted_without_a_restart() {
    let (hub, home) = (tiny_gemma(), tempfile::tempdir().expect("a folder"));
    let server = start(home.path(), &hub);
    let demo = ids(&server);
    assert_eq!(demo.len(), 1, "the demo model, while no model is pulled: {demo:?}");

    let lines = pull(&server, "org/tiny");
    assert_eq!(lines[0], json!({"status": "pulling manifest"}));
    assert_eq!(lines.last(), Some(&json!({"status": "success"})));
    let is_whole =
        |line: &&Value| line["status"] == "pulling model.safetensors" && line["completed"] == line["total"];
    let whole = lines.iter().find(is_whole).expect("the file is reported");
    assert!(whole["digest"].as_str().expect("a digest").starts_with("sha256:"), "{whole}");
    assert_eq!(ids(&server), ["org/tiny"]);
    for name in ["org/tiny", "org/tiny:latest", "hf.co/org/tiny"] {
        let (status, answer) = ask(&server, name);
        assert_eq!((status, &answer["model"]), (200, &json!("org/tiny")), "{answer}");
    }
    assert_eq!(ask(&server, &demo[0]).0, 404);
    assert_eq!(pull(&server, "org/tiny").last(), Some(&json!({"status": "success"})), "it is up to date");
    for (name, part) in [("org/none", "no such model"), ("llama3", "is not the name of a model")] {
        let lines = pull(&server, name);
        let error = lines.last().expect("a line")["error"].as_str().expect("an error").to_owned();
        assert!(error.contains(part), "{error}");
    }

    // Without the hub, a model that is there stays.
    drop(hub);
    let lines = pull(&server, "org/tiny");
    assert!(lines[1]["status"].as_str().is_some_and(|text| text.contains("cannot be reached")), "{lines:?}");
    assert_eq!(lines.last(), Some(&json!({"status": "success"})));

    let origin = server.url().replace("/v1", "");
    let body = json!({"model": "org/tiny"}).to_string();
    // Pages may not delete, not even the server's own.
    let host = origin.trim_start_matches("http://");
    let fields = [("Origin", origin.as_str()), ("Host", host)];
    let (status, error) = server.exchange("DELETE", "/api/delete", &fields, &body);
    assert!(status == 403 && error.contains("not a web page"), "{status} {error}");
    assert_eq!(server.exchange("DELETE", "/api/delete", &[], &body), (200, String::new()));
    assert_eq!(ids(&server), demo);
    assert!(!home.path().join("models/models--org--tiny").exists(), "the files are gone");
    // No process keeps them open, so that the disk has its space back.
    wait_until("the files are closed, and the device process has ended", || {
        files_of_the_model(&server).is_empty() && server.device_processes().is_empty()
    });
    assert_eq!(ask(&server, "org/tiny").0, 404);
    assert_eq!(ask(&server, &demo[0]).0, 200);
}

/// A model that cannot be read is left out, and later pulls work.
#[test]
fn a_pulled_model_that_cannot_be_served_is_named_and_left_out() {
    let (hub, home) = (tiny_gemma(), tempfile::tempdir().expect("a folder"));
    let server = start(home.path(), &hub);
    let demo = ids(&server);
    let files = hub.set(|hub| {
        "org/bad".clone_into(&mut hub.repo);
        let files = hub.files.clone();
        hub.files.retain(|file| file.path != "tokenizer.json");
        files
    });
    let lines = pull(&server, "org/bad");
    let error = lines.last().expect("a line")["error"].as_str().expect("an error").to_owned();
    assert!(
        error.contains("org/bad was pulled, but it cannot be served") && error.contains("tokenizer"),
        "{error}"
    );
    assert_eq!(ids(&server), demo);
    hub.set(|hub| (hub.repo, hub.files) = ("org/tiny".into(), files));
    assert_eq!(pull(&server, "org/tiny").last(), Some(&json!({"status": "success"})));
    assert_eq!(ids(&server), ["org/tiny"]);
    assert_eq!(ask(&server, "org/tiny").0, 200);
}

/// A command of a person at this machine.
fn command(home: &Path, hub: &Hub, args: &[&str]) -> Command {
    let mut command = unicorn_on_software(args);
    at_home(&mut command, home, hub);
    command
}

#[test]
fn the_commands_ask_a_running_server() {
    let (hub, home) = (tiny_gemma(), tempfile::tempdir().expect("a folder"));
    let person = tempfile::tempdir().expect("a folder");
    let server = start(home.path(), &hub);
    let url = server.url();
    let asks = |args: &[&str]| command(person.path(), &hub, &[args, &["--url", &url]].concat());

    // No confirmation is asked for what the server does not do.
    let kept = asks(&["rm", &ids(&server)[0]]);
    assert_error(kept, 1, &["part of the program: only pulled models can be deleted"]);
    let (code, stdout, stderr) = output(asks(&["pull", "org/tiny"]));
    assert_eq!((code, stdout.as_str()), (0, ""), "{stderr}");
    assert!(stderr.contains("org/tiny is served at http://127.0.0.1:"), "{stderr}");
    let pulled = |folder: &Path| folder.join("models--org--tiny").is_dir();
    assert!(pulled(&home.path().join("models")) && !pulled(&person.path().join(".cache/huggingface/hub")));
    let table = printed(asks(&["list"]));
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((rows[0][0], rows[1][0], rows.len()), ("NAME", "org/tiny", 2), "{table}");
    assert!(!table.contains("loaded"), "{table}");
    let as_json = |words: &[&str]| -> Value {
        let text = printed(asks(&[words, &["--json"]].concat()));
        serde_json::from_str(&text).expect(&text)
    };
    assert_eq!(as_json(&["list"])[0]["model"], "org/tiny:latest");
    assert_eq!(as_json(&["ps"]), json!([]));
    assert!(as_json(&["show", "org/tiny"])["model_info"].is_object());
    let shown = printed(asks(&["show", "org/tiny"]));
    for (name, value) in [("architecture", "Gemma"), ("context", "tokens"), ("can", "completion, tools")] {
        let is_line = |line: &str| line.starts_with(name) && line.contains(value);
        assert!(shown.lines().any(is_line), "{name}: {shown}");
    }

    let run = ["run", "org/tiny", "Hello", "--max-tokens", "8", "--temperature", "0"];
    let answer = printed(asks(&run));
    let body = json!({"model": "org/tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0});
    let (_, same) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
    let same: Value = serde_json::from_str(&same).expect(&same);
    let content = same["choices"][0]["message"]["content"].as_str().expect("a text");
    assert_eq!(answer.strip_suffix('\n'), Some(content));
    let mut piped = run.to_vec();
    piped.remove(2);
    assert_eq!(printed(in_shell("echo Hello |", &asks(&piped))), answer, "the prompt comes from a pipe");
    assert!(printed(asks(&["list"])).contains("loaded"));
    let table = printed(asks(&["ps"]));
    assert!(table.lines().count() == 2 && table.contains("org/tiny") && table.contains("256"), "{table}");
    printed(asks(&["stop", "org/tiny"]));
    // It is unloaded as soon as no request uses it.
    wait_until("the model is unloaded", || printed(asks(&["ps"])).lines().count() == 1);
    let (code, _, stderr) = output(asks(&["stop", "org/tiny"]));
    assert!(code == 0 && stderr.contains("not loaded"), "{stderr}");

    assert_error(asks(&["rm", "org/tiny"]), 1, &["remove org/tiny from the server at", "--yes"]);
    printed(asks(&["rm", "org/tiny", "--yes"]));
    assert!(!pulled(&home.path().join("models")));
    assert_error(asks(&["show", "org/tiny"]), 1, &["model 'org/tiny' not found"]);
    assert_error(asks(&run), 1, &["org/tiny is not served at", "--yes"]);
    assert_error(asks(&["run", "llama3", "Hello"]), 1, &["\"llama3\" is not served", "ORG/NAME"]);
    assert_eq!(
        printed(asks(&[&run[..], &["--yes"]].concat())),
        answer,
        "it is pulled, and answers as before"
    );
    let without_scheme = url.strip_prefix("http://").expect("a URL");
    assert!(printed(command(person.path(), &hub, &["list", "--url", without_scheme])).contains("org/tiny"));
    let nowhere = command(person.path(), &hub, &["ps", "--url", "http://127.0.0.1:9"]);
    assert_error(nowhere, 1, &["the server at http://127.0.0.1:9"]);
    assert_error(command(person.path(), &hub, &["ps"]), 1, &["no server is running", "unicorn serve"]);
}

#[test]
fn a_command_trusts_the_authorities_that_a_variable_names() {
    let (folder, _) = certificate();
    let [cert, key] = ["cert.pem", "key.pem"].map(|name| folder.path().join(name));
    let server = Daemon::start_as(&["--context", "256"], |command| {
        command.env("UNICORN_SERVER_TLS_CERT", &cert).env("UNICORN_SERVER_TLS_KEY", &key);
    });
    let url = server.url().replace("http://127.0.0.1", "https://localhost");
    let list = || unicorn_on_software(&["list", "--url", &url]);
    let mut without = list();
    without.env_remove("SSL_CERT_FILE");
    assert_error(without, 1, &["certificate", "SSL_CERT_FILE names"]);
    let mut with = list();
    with.env("SSL_CERT_FILE", &cert);
    assert!(printed(with).contains("a/b"));
    let mut bench = unicorn_on_software(&["bench", "serve", "--url", &url, "--concurrency", "1"]);
    bench.args(["--requests", "1", "--prompt-tokens", "8", "--max-tokens", "2"]);
    bench.env("SSL_CERT_FILE", &cert);
    assert!(printed(bench).contains("a/b at https://localhost"));

    // A person who forgot the scheme.
    let address = url.trim_start_matches("https://").trim_end_matches("/v1");
    let right = format!("it speaks HTTPS: give its address as --url https://{address}");
    assert_error(unicorn_on_software(&["list", "--url", address]), 1, &[&right]);
}

#[test]
fn without_a_server_the_commands_work_with_the_users_models() {
    let (hub, person) = (tiny_gemma(), tempfile::tempdir().expect("a folder"));
    let does = |args: &[&str]| command(person.path(), &hub, args);
    let run =
        ["run", "org/tiny", "Hello", "--max-tokens", "8", "--temperature", "0", "--allow-software-vulkan"];
    assert_error(does(&run), 1, &["org/tiny was not pulled. Pull it?", "--yes"]);
    let answer = printed(does(&[&run[..], &["--yes"]].concat()));
    let path = person.path().join(".cache/huggingface/hub/models--org--tiny");
    assert!(path.is_dir(), "it was pulled into the user's folder");
    let generate = ["generate", "-m", "org/tiny", "-p", "Hello", "-c", "200", "--max-tokens", "8"];
    let generate = [&generate[..], &["--temperature", "0", "--allow-software-vulkan"]].concat();
    assert_eq!(printed(does(&generate)), answer);
    assert!(printed(does(&["list"])).contains("org/tiny"));
    let shown = printed(does(&["show", "org/tiny", "--json"]));
    assert!(shown.contains("models--org--tiny") && shown.contains("\"layers\""), "{shown}");
    assert_error(does(&["run", "org/tiny"]), 1, &["there is no prompt"]);
    let long = in_shell("head -c 17000000 /dev/zero |", &does(&["run", "org/tiny"]));
    assert_error(long, 1, &["standard input", "longer than 16 MiB"]);
    let several = does(&["rm", "org/tiny", "org/other", "--yes"]);
    assert_error(several, 1, &["org/other: no such model was pulled"]);
    assert!(!path.exists());
}

#[test]
fn the_options_of_run_have_an_effect() {
    let (hub, person) = (tiny_gemma(), tempfile::tempdir().expect("a folder"));
    let home = tempfile::tempdir().expect("a folder");
    let server = start(home.path(), &hub);
    pull(&server, "org/tiny");
    let url = server.url();
    let folder = person.path().join("models");
    let folder = folder.to_str().expect("UTF-8");
    let run = ["run", "org/tiny", "Hello", "--url", &url, "--max-tokens", "8"];
    let asks = |more: &[&str]| printed(command(person.path(), &hub, &[&run[..], more].concat()));

    let greedy = asks(&["--temperature", "0"]);
    let seeded = asks(&["--temperature", "2", "--seed", "7"]);
    assert_eq!(seeded, asks(&["--temperature", "2", "--seed", "7"]));
    assert_ne!(seeded, asks(&["--temperature", "2", "--seed", "8"]));
    for narrow in [["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]] {
        assert_eq!(
            asks(&[&["--temperature", "2", "--seed", "7"], &narrow[..]].concat()),
            greedy,
            "{narrow:?}"
        );
    }
    assert_ne!(asks(&["--temperature", "0", "--system", "Be brief."]), greedy);
    let middle: String = greedy.trim_end().chars().skip(2).take(1).collect();
    let stopped = asks(&["--temperature", "0", "--stop", &middle]);
    assert!(
        greedy.starts_with(stopped.trim_end()) && stopped.len() < greedy.len(),
        "{stopped:?} of {greedy:?}"
    );

    // In this command, with this user's models.
    let here = |more: &[&str]| {
        let words = ["run", "org/tiny", "Hello", "--max-tokens", "8", "--temperature", "0", "--no-history"];
        command(person.path(), &hub, &[&words[..], &["--here", "--url", &url], more].concat())
    };
    let software = "--allow-software-vulkan";
    assert_error(here(&[software]), 1, &["org/tiny was not pulled"]);
    let mut into_own_folder = command(person.path(), &hub, &["pull", "org/tiny", "--url", &url, "--user"]);
    into_own_folder.env("UNICORN_MODELS_DIR", person.path().join("of the service"));
    printed(into_own_folder);
    assert!(person.path().join(".cache/huggingface/hub/models--org--tiny").is_dir());
    assert_eq!(printed(here(&[software])), greedy);
    assert_error(here(&[]), 1, &["software"]);
    assert_error(here(&[software, "--device", "nothing"]), 1, &["nothing"]);
    assert_error(here(&[software, "--context", "2"]), 1, &["context"]);
    let removed = command(person.path(), &hub, &["rm", "org/tiny", "--yes"]);
    printed(removed);
    assert_error(here(&[software, "--models-dir", folder]), 1, &["was not pulled"]);
    assert_eq!(printed(here(&[software, "--models-dir", folder, "--yes"])), greedy);
    let local = |words: &[&str]| command(person.path(), &hub, &[words, &["--models-dir", folder]].concat());
    assert!(printed(local(&["list"])).contains(folder));
    assert!(printed(local(&["show", "org/tiny"])).contains(folder));
    printed(local(&["rm", "org/tiny", "--yes"]));
    assert!(!printed(local(&["list"])).contains("org/tiny"));
}
