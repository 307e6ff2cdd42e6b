//! `unicorn serve` from the outside: its log, its signals, its exit codes.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde_json::Value;

use crate::support::checkpoints::tiny_model;
use crate::support::daemon::{Daemon, number_of};
use crate::support::device_is_software;
use crate::support::energy::{WATTS, constant_power, no_power};
use crate::support::fake_runner::HANG;
use crate::support::program::{assert_error, binary, output, unicorn, unicorn_on_software};
use crate::support::waits::wait_until;

#[test]
fn serve_loads_answers_and_stops_on_sigterm() {
    let mut server = Daemon::start(&[]);
    for part in ["a/b", "device", "context", "weights in heap", "KV cache in heap"] {
        assert!(server.log.iter().any(|l| l.contains(part)), "{part}: {:#?}", server.log);
    }
    // The weights keep the schemes of their files, because --quantize was not given.
    let schemes = "attention bf16, feed-forward bf16, embedding bf16";
    assert!(server.log.iter().any(|line| line.contains(schemes)), "{:#?}", server.log);
    let (_, status) = server.exchange("GET", "/status", &[], "");
    let status: Value = serde_json::from_str(&status).expect(&status);
    assert_eq!(status["model"]["weights"], schemes, "{status}");
    // By default, the load chooses the type of keys and values, and says why.
    let kv = ["kv_dtype", "kv_dtype_why"].map(|field| status["model"][field].as_str().expect("a text"));
    if device_is_software() {
        assert_eq!(kv, ["f16", "the device is software"]);
    }
    let said = format!("keys and values {} (auto: {})", kv[0], kv[1]);
    assert!(server.log.iter().any(|line| line.contains(&said)), "{said}: {:#?}", server.log);
    // The log says what the kernel reports of the memory, or that it cannot be verified.
    let verdict = |l: &&String| l.contains("the kernel sees") || l.contains("cannot be verified here");
    assert_eq!(server.log.iter().filter(verdict).count(), 1, "{:#?}", server.log);

    let (status, body) = server.ask(&[], false);
    assert_eq!(status, 200, "{body}");
    let content = |body: &str| -> Value {
        serde_json::from_str::<Value>(body).expect(body)["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(content(&body), content(&server.ask(&[], false).1), "the same seed must give the same answer");
    let (status, stream) = server.ask(&[], true);
    assert!(status == 200 && stream.contains("data: [DONE]"), "{stream}");
    assert_eq!(server.exchange("GET", "/health", &[], "").0, 200);

    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    let rest = server.rest_of_log();
    assert!(!rest.contains("ERROR") && rest.trim_end().ends_with("stopped"), "{rest}");
}

#[test]
fn serve_with_a_draft_model_answers_as_without_it() {
    const ACCEPTED: &str =
        "unicorn_spec_decode_num_accepted_tokens_total{model_name=\"a/b\",guesser=\"draft_model\"}";
    let content = |server: &Daemon| -> Value {
        let (status, body) = server.ask(&[], false);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<Value>(&body).expect("JSON")["choices"][0]["message"]["content"].clone()
    };
    let model = tiny_model();
    let alone = content(&Daemon::start_model(model.path(), &[], |_| {}));
    let draft = model.path().to_str().expect("UTF-8");
    let mut server = Daemon::start_model(model.path(), &["--draft", draft], |_| {});
    server.line("draft    ");
    assert_eq!(content(&server), alone);
    assert!(server.metric(ACCEPTED) > 0.0, "a model must accept its own draft tokens");
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0), "{:#?}", server.log);
}

#[test]
fn a_load_reports_its_progress_and_ends_cleanly_at_sigterm() {
    let model = tiny_model();
    let mut server = Daemon::begin(model.path(), &[], |_| {});
    // A stopped device process makes the load slow.
    server.signal_device("STOP");
    let line = server.wait_for_line("loading  ");
    assert!(line.contains("INFO") && line.contains(" for "), "{line}");
    for _ in 0..3 {
        let (status, body) = server.exchange("GET", "/health", &[], "");
        let health: Value = serde_json::from_str(&body).expect(&body);
        assert_eq!((status, &health["status"]), (503, &"loading".into()), "{body}");
        assert!(line.contains(health["message"].as_str().expect("what it does")), "{body}: {line}");
    }
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0), "{:#?}", server.log);
    let log = server.log.join("\n") + &server.rest_of_log();
    assert!(log.trim_end().ends_with("stopped"), "{log}");
    for part in ["WARN status", "ERROR", "error", "channel"] {
        assert!(!log.contains(part), "{part}: {log}");
    }
}

#[test]
fn answers_and_metrics_report_energy_if_the_machine_measures_it() {
    const COUNTER: &str = "unicorn_energy_joules_total{model_name=\"a/b\",source=\"amdgpu\"}";
    let machine = constant_power();
    let mut server = Daemon::start(&["--root", machine.path().to_str().expect("UTF-8")]);
    assert!(server.log.iter().any(|line| line.contains("energy   from amdgpu")), "{:#?}", server.log);
    let counted = number_of(COUNTER, &server.scrape_with(COUNTER));
    let since = Instant::now();
    let (status, body) = server.ask(&[], false);
    let most = WATTS * since.elapsed().as_secs_f64();
    assert_eq!(status, 200, "{body}");
    let timings = &serde_json::from_str::<Value>(&body).expect("JSON")["timings"];
    let number = |name: &str| timings[name].as_f64().unwrap_or_else(|| panic!("{name}: {body}"));
    assert_eq!(timings["energy_source"], "amdgpu", "{body}");
    let joules = number("prompt_joules") + number("predicted_joules");
    assert!(number("prompt_joules") > 0.0 && number("predicted_joules") > 0.0, "{body}");
    assert!(joules <= most, "{joules} J, but the machine used only {most} J");
    assert!((number("joules_per_token") * number("predicted_n") - joules).abs() < 1e-9, "{body}");
    let (_, stream) = server.ask(&[], true);
    assert_eq!(stream.matches("\"prompt_joules\":").count(), 1, "expected in the last chunk only: {stream}");
    while number_of(COUNTER, &server.scrape_with(COUNTER)) == counted {
        assert!(since.elapsed() < HANG, "the energy counter does not grow");
    }
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));

    let machine = no_power();
    let mut server = Daemon::start(&["--root", machine.path().to_str().expect("UTF-8")]);
    let line = "energy   unknown: /sys/class/powercap has no RAPL package";
    assert!(server.log.iter().any(|logged| logged.contains(line)), "{:#?}", server.log);
    let (status, body) = server.ask(&[], false);
    assert!(status == 200 && body.contains("timings") && !body.contains("joules"), "{body}");
    let (status, metrics) = server.exchange("GET", "/metrics", &[], "");
    assert!(status == 200 && !metrics.contains("energy"), "{metrics}");
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_closed_log_pipe_does_not_break_answers() {
    let mut server = Daemon::start(&["-v"]);
    server.close_log();
    for _ in 0..5 {
        let (status, body) = server.ask(&[], false);
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(server.exchange("GET", "/health", &[], "").0, 200);
    assert!(server.metric("unicorn_log_lines_lost_total") > 0.0, "lost lines are not counted");
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_full_log_pipe_does_not_block_the_server() {
    let mut server = Daemon::start(&["-vv"]);
    // A pipe holds 64 KiB, and each of these requests logs a line with its id.
    let id = "x".repeat(128);
    for _ in 0..400 {
        let (status, body) = server.exchange("GET", "/v1/models", &[("x-request-id", &id)], "");
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(server.ask(&[], false).0, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    let rest = server.rest_of_log();
    // Each of the pipe's 16 pages may end with free space, and the last page may be nearly empty.
    assert!(rest.len() > 50_000, "the pipe was not full: {} bytes", rest.len());
}

#[test]
fn lost_log_lines_are_reported_when_the_log_is_read_again() {
    let mut server = Daemon::start(&["-vv"]);
    let id = "x".repeat(128);
    // More lines than the pipe and the queue of the log thread can hold.
    wait_until("lines are lost", || {
        for _ in 0..500 {
            server.exchange("GET", "/nothing", &[("x-request-id", &id)], "");
        }
        server.metric("unicorn_log_lines_lost_total") > 0.0
    });
    let note = server.wait_for_line("of the log were lost");
    assert!(note.contains("WARN"), "{note}");
}

#[test]
fn a_too_long_context_is_refused_and_a_too_large_chunk_is_logged() {
    const WANTED: &str = "99999999";
    let model = tiny_model();
    let path = model.path().to_str().expect("UTF-8");
    let serve = &["serve", "--port", "0"][..];
    for command in [serve, &["config", "check"], &["generate", "--prompt", "Hello"]] {
        let (serves, more) =
            (command[0] != "generate", ["--model", path, "--allow-software-vulkan", "--context", WANTED]);
        let parts = [WANTED, "engine.context, --context", "the model was made for 4096 at most"];
        assert_error(unicorn_on_software(&[command, &more].concat()), if serves { 78 } else { 1 }, &parts);
    }
    // A prompt is processed in chunks that are not longer than the context.
    let mut server = Daemon::start_model(model.path(), &["--context", "64"], |_| {});
    server.line(
        "prompts are read 64 tokens at once, and engine.prefill_chunk is 256: the context is no longer",
    );
}

/// The start fails at different places for different memory limits. Every error must name memory, and no exit code may
/// tell a supervisor not to start the server again.
#[test]
fn a_server_without_enough_memory_says_so_and_may_be_restarted() {
    let model = tiny_model();
    let (path, program) = (model.path().to_str().expect("UTF-8"), binary());
    // The weights are as long as a large model's, and take no space on the disk.
    let large = tiny_model();
    let weights = large.path().join("model.safetensors");
    let weights = std::fs::OpenOptions::new().write(true).open(weights).expect("weights");
    weights.set_len(64 << 30).expect("a longer file");
    for (path, mib) in [(path, 400), (path, 700), (large.path().to_str().expect("UTF-8"), 4000)] {
        let mut command = Command::new("sh");
        // Arguments after the script become $0, $1 and so on.
        let script = format!(
            "ulimit -v {}; exec \"$0\" serve --port 0 --allow-software-vulkan --model \"$1\"",
            mib << 10
        );
        command.arg("-c").arg(script).arg(&program).arg(path).env("UNICORN_CONFIG_DIR", "/proc/nonexistent");
        let (code, _, stderr) = output(command);
        let error = stderr.lines().last().expect("a line");
        assert!(error.starts_with("error: ") && error.contains("memory"), "{mib} MiB: {stderr}");
        assert!([1, 75].contains(&code), "{mib} MiB: exit code {code}: {stderr}");
        assert!(!stderr.contains("overflow"), "{mib} MiB: {stderr}");
    }
}

fn configuration(folder: &Path, text: &str) -> String {
    let path = folder.join("unicorn.toml");
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn sighup_reloads_the_configuration_and_never_ends_the_server() {
    let mut plain = Daemon::start(&[]);
    plain.signal("HUP");
    plain.wait_for_line("read the configuration again");
    assert_eq!(plain.ask(&[], false).0, 200);
    drop(plain);

    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys");
    let (old, new) = ("sk-the-old-key-0123456789", "sk-the-new-key-0123456789");
    std::fs::write(&keys, old).expect("written");
    let written = |level: &str, more: &str| {
        let keys = keys.to_str().expect("UTF-8");
        configuration(
            folder.path(),
            &format!("[log]\nlevel = {level:?}\n[server]\napi_key_file = {keys:?}\n{more}"),
        )
    };
    let path = written("info", "");
    let mut server = Daemon::start(&["--config", &path]);
    let with = |server: &Daemon, key: &str| {
        server.exchange("GET", "/v1/models", &[("authorization", &format!("Bearer {key}"))], "").0
    };
    assert_eq!((with(&server, old), with(&server, new)), (200, 401));

    std::fs::write(&keys, new).expect("written");
    written("debug", "queue = 7\nconnections = 7\n");
    server.signal("HUP");
    server
        .wait_for_line("server.connections has changed; the change takes effect after a restart of unicorn");
    server.wait_for_line("read the configuration again");
    assert_eq!((with(&server, old), with(&server, new)), (401, 200));
    server.wait_for_line("DEBUG");

    // A bad configuration changes nothing.
    for (text, problem) in [
        (None, "no key"),
        (Some("[server]\nprt = 1"), "server.prt"),
        (Some("[log]\nlevel = \"loud\""), "log.level"),
    ] {
        match text {
            None => std::fs::write(&keys, "# none").expect("written"),
            Some(text) => drop(configuration(folder.path(), text)),
        }
        server.signal("HUP");
        let line = server.wait_for_line("stays unchanged");
        assert!(line.contains(problem), "{line}");
        assert_eq!((with(&server, old), with(&server, new)), (401, 200));
    }
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

/// Opening a pipe blocks until there is a writer, and reading a device may never end. The server must do neither,
/// whichever of its files is replaced.
#[test]
fn a_file_that_became_a_pipe_is_refused_at_sighup_and_later_reloads_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path().join("keys");
    let (old, new) = ("sk-the-old-key-0123456789", "sk-the-new-key-0123456789");
    std::fs::write(&keys, old).expect("written");
    let text = format!("[server]\napi_key_file = {:?}", keys.to_str().expect("UTF-8"));
    let path = configuration(folder.path(), &text);
    let mut server = Daemon::start(&["--config", &path]);
    let with = |server: &Daemon, key: &str| {
        server.exchange("GET", "/v1/models", &[("authorization", &format!("Bearer {key}"))], "").0
    };
    let refused = |server: &mut Daemon, part: &str| {
        server.signal("HUP");
        let line = server.wait_for_line("stays unchanged");
        assert!(line.contains(part), "{line}");
        assert_eq!(with(server, old), 200, "the old key must still be valid");
    };
    std::fs::remove_file(&keys).expect("removed");
    pipe(&keys);
    refused(&mut server, "keys: is not a regular file, but a pipe");
    std::fs::remove_file(&path).expect("removed");
    std::os::unix::fs::symlink("/dev/zero", &path).expect("linked");
    refused(&mut server, "unicorn.toml: is not a regular file, but a device");

    // The old key is revoked when the files are correct again.
    std::fs::remove_file(&keys).expect("removed");
    std::fs::write(&keys, new).expect("written");
    std::fs::remove_file(&path).expect("removed");
    configuration(folder.path(), &text);
    server.signal("HUP");
    server.wait_for_line("read the configuration again");
    assert_eq!((with(&server, old), with(&server, new)), (401, 200));
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

/// A start reads the same files, and a cache folder that may hold anything.
#[test]
fn a_start_does_not_block_on_pipes() {
    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("pipe");
    pipe(&fifo);
    let fifo = fifo.to_str().expect("UTF-8");
    let zero = "/dev/zero: is not a regular file, but a device";
    assert_error(unicorn(&["config", "check", "--config", "/dev/zero"]), 78, &[zero]);
    let written = |option: &str| configuration(folder.path(), &format!("[server]\n{option}"));
    for options in [format!("api_key_file = {fifo:?}"), format!("tls_cert = {fifo:?}\ntls_key = {fifo:?}")] {
        let path = written(&options);
        assert_error(unicorn(&["config", "check", "--config", &path]), 78, &["pipe: is not a regular file"]);
    }
    for option in ["--model-config", "--tokenizer"] {
        let model = tiny_model();
        let model = model.path().to_str().expect("UTF-8");
        let command = unicorn(&["serve", "--port", "0", "--model", model, option, fifo]);
        assert_error(command, 78, &["pipe: is not a file or folder"]);
    }

    // A first start writes cache files. The test replaces them with pipes before the second start.
    let cache = tempfile::tempdir().expect("a folder");
    let serve = || {
        Daemon::start_as(&[], |command| {
            command.env("UNICORN_CACHE_DIR", cache.path());
        })
    };
    drop(serve());
    let kept: Vec<_> =
        std::fs::read_dir(cache.path()).expect("there").map(|file| file.expect("read").path()).collect();
    assert!(!kept.is_empty(), "a start must write its pipeline cache");
    for file in &kept {
        std::fs::remove_file(file).expect("removed");
        pipe(file);
    }
    let mut server = serve();
    assert_eq!(server.ask(&[], false).0, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    assert!(kept.iter().any(|file| file.is_file()), "the pipeline cache was not written again");
}

fn pipe(path: &Path) {
    rustix::fs::mkfifoat(rustix::fs::CWD, path, 0o600.into()).expect("a pipe");
}

#[test]
fn exit_codes_say_whether_a_restart_can_help() {
    const CONFIGURATION: i32 = 78;
    let folder = tempfile::tempdir().expect("a folder");
    let path = configuration(folder.path(), "[server]\nport = \"x\"");
    assert_error(unicorn(&["serve", "--config", &path]), CONFIGURATION, &["server.port"]);
    assert_error(unicorn(&["serve", "--model", "/proc/nonexistent"]), CONFIGURATION, &["/proc/nonexistent"]);
    let missing = ["serve", "--port", "0", "--api-key-file", "/proc/nonexistent"];
    assert_error(unicorn(&missing), CONFIGURATION, &["/proc/nonexistent"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    assert_error(unicorn(&["serve", "--port", &port]), CONFIGURATION, &["taken"]);
    assert_error(unicorn(&["serve", "--port", "0"]), 75, &["Vulkan"]);
    assert_error(unicorn(&["serve", "--port", "many"]), 2, &["--port"]);
    // Other commands have one exit code for all failures.
    assert_error(
        unicorn(&["generate", "--prompt", "x", "--model", "/proc/nonexistent"]),
        1,
        &["/proc/nonexistent"],
    );
}
