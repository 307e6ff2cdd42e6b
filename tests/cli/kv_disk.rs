//! Conversations on disk from outside: the shipped binary resumes them after it was killed, and each client finds only its
//! own.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::kv_disk::KvStore;

use crate::support::checkpoints::tiny_model;
use crate::support::daemon::Daemon;
use crate::support::kv_entries::contents;
use crate::support::program::{example, output, printed, unicorn};
use crate::support::waits::wait_until;

fn start(model: &Path, folder: &Path, options: &[(&str, &str)]) -> Daemon {
    Daemon::start_model(model, &["--context", "400"], |command| {
        command.env("UNICORN_KV_DISK_PATH", folder);
        command.envs(options.iter().map(|(option, value)| (format!("UNICORN_{option}"), *value)));
    })
}

/// The answer to a conversation, and the number of tokens that were cached.
fn ask(server: &Daemon, text: &str, key: Option<&str>) -> (String, u64) {
    let messages = json!([{"role": "user", "content": text}]);
    let body =
        json!({"model": "a/b", "messages": messages, "max_tokens": 20, "temperature": 0, "ignore_eos": true});
    let key = key.map(|key| format!("Bearer {key}"));
    let fields: Vec<(&str, &str)> = key.iter().map(|key| ("authorization", key.as_str())).collect();
    let (status, answer) = server.exchange("POST", "/v1/chat/completions", &fields, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
    (text, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0))
}

/// The section about conversations on disk of `/status`.
fn disk(server: &Daemon, key: Option<&str>) -> Value {
    let key = key.map(|key| format!("Bearer {key}"));
    let fields: Vec<(&str, &str)> = key.iter().map(|key| ("authorization", key.as_str())).collect();
    let (status, text) = server.exchange("GET", "/status", &fields, "");
    assert_eq!(status, 200, "{text}");
    serde_json::from_str::<Value>(&text).expect("JSON")["kv_disk"].take()
}

/// Waits until the last turn is written.
fn wait_for_writes(server: &Daemon, key: Option<&str>) {
    let mut before = None;
    wait_until("all entries to be written", || {
        let now = disk(server, key);
        let is_still =
            now["queued_bytes"] == 0 && now["entries"].as_u64() > Some(0) && before.as_ref() == Some(&now);
        before = Some(now);
        std::thread::sleep(Duration::from_millis(50));
        is_still
    });
}

#[test]
fn a_conversation_on_disk_survives_the_end_of_the_server() {
    let (model, folder) = (tiny_model(), tempfile::tempdir().expect("a folder"));
    let kv = folder.path().join("kv");
    let text = "Vim has two modes. ".repeat(12);
    let first = start(model.path(), &kv, &[]);
    let (answer, cached) = ask(&first, &text, None);
    assert_eq!(cached, 0);
    wait_for_writes(&first, None);
    first.signal("KILL");
    drop(first);

    let second = start(model.path(), &kv, &[("KV_DISK_MAX_BYTES", "3MiB")]);
    let (again, cached) = ask(&second, &text, None);
    assert_eq!(again, answer);
    assert!(cached > 100, "{cached} tokens were cached");
    assert_eq!(second.metric("unicorn_kv_disk_hits_total"), 1.0);
    assert_eq!(second.metric("unicorn_kv_disk_hit_tokens_total"), cached as f64);
    let status = disk(&second, None);
    assert_eq!(
        (&status["hits"], &status["max_bytes"], &status["error"]),
        (&json!(1), &json!(3 << 20), &Value::Null)
    );

    // Only one server uses a folder, and only that server empties it.
    let clear = || {
        let mut command = unicorn(&["kv", "clear"]);
        command.env("UNICORN_KV_DISK_PATH", &kv);
        command
    };
    let (code, _, stderr) = output(clear());
    assert!(code == 1 && stderr.contains("POST /kv/clear"), "{stderr}");
    wait_for_writes(&second, None);
    let (status, cleared) = second.exchange("POST", "/kv/clear", &[], "");
    let cleared: Value = serde_json::from_str(&cleared).expect("JSON");
    assert!(status == 200 && cleared["entries"].as_u64() > Some(1), "{cleared}");
    assert_eq!(disk(&second, None)["entries"], 0);
    // The GPU's memory still has the conversation, whose end is stored again.
    ask(&second, &text, None);
    wait_for_writes(&second, None);
    drop(second);
    assert!(printed(clear()).starts_with("removed "), "entries are removed");
    let third = start(model.path(), &kv, &[]);
    assert_eq!(ask(&third, &text, None), (answer, 0));
}

#[test]
fn without_a_folder_nothing_is_kept_and_nothing_can_be_cleared() {
    let server = Daemon::start(&["--context", "400"]);
    assert_eq!(disk(&server, None), Value::Null);
    let (status, body) = server.exchange("POST", "/kv/clear", &[], "");
    assert!(status == 409 && body.contains("kv.disk.path is not set"), "{body}");
    let (status, body) = server.exchange("POST", "/slots/0?action=save", &[], "{}");
    assert!(status == 404 && body.contains("kv.disk.path"), "{body}");
    let (code, _, stderr) = output(unicorn(&["kv", "clear"]));
    assert!(code == 1 && stderr.contains("kv.disk.path is not set"), "{stderr}");
}

#[test]
fn a_client_finds_its_own_text_after_a_restart_and_no_other_does() {
    const KEYS: [&str; 2] = ["key-of-one-client", "key-of-another-one"];
    let (model, folder) = (tiny_model(), tempfile::tempdir().expect("a folder"));
    let kv = folder.path().join("kv");
    let both = KEYS.join(",");
    let text = "Vim has two modes. ".repeat(12);
    let first = start(model.path(), &kv, &[("API_KEYS", &both)]);
    let (answer, _) = ask(&first, &text, Some(KEYS[0]));
    wait_for_writes(&first, Some(KEYS[0]));
    drop(first);
    let second = start(model.path(), &kv, &[("API_KEYS", &both)]);
    assert_eq!(ask(&second, &text, Some(KEYS[1])), (answer.clone(), 0));
    let (again, cached) = ask(&second, &text, Some(KEYS[0]));
    assert_eq!(again, answer);
    assert!(cached > 100, "{cached} tokens were cached");
}

#[test]
fn a_folder_that_others_can_read_is_refused_at_the_start() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("set");
    let mut command = unicorn(&["serve", "--port", "0"]);
    command.env("UNICORN_KV_DISK_PATH", folder.path());
    let (code, _, stderr) = output(command);
    assert!(code == 78 && stderr.contains("chmod 700"), "{stderr}");
}

/// Kills a process that writes, at 50 random times. Every entry that is left is whole.
#[test]
fn a_store_whose_writer_is_killed_has_only_whole_entries() {
    let seed = 0x5119;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let folder = tempfile::tempdir().expect("a folder");
    let kv = folder.path().join("kv");
    let writer = example("kv_writer");
    let (mut found, mut left_over) = (0, 0);
    for run in 0..50 {
        let mut command = std::process::Command::new(&writer);
        let mut child = command.arg(&kv).arg(run.to_string()).stdout(Stdio::piped()).spawn().expect("runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line, "open\n");
        std::thread::sleep(Duration::from_millis(rng.random_range(0..60)));
        child.kill().expect("killed");
        child.wait().expect("ended");
        let is_temporary = |path: &Path| path.extension().is_some_and(|extension| extension == "tmp");
        let files = |path: &Path| {
            std::fs::read_dir(path).into_iter().flatten().map(|entry| entry.expect("a name").path())
        };
        left_over += files(&kv)
            .flat_map(|path| files(&path).collect::<Vec<_>>())
            .filter(|path| is_temporary(path))
            .count();
        let store = KvStore::open(&kv, 32 << 20).expect("opens");
        for n in 0..60 {
            let (address, bytes) = contents(n);
            if store.contains(&address) {
                assert_eq!(
                    store.read(&address, bytes.len(), store.now()).as_ref(),
                    Some(&bytes),
                    "entry {n} after run {run}"
                );
                found += 1;
            }
        }
        let stats = store.stats();
        assert_eq!((stats.damaged_entries, stats.read_errors), (0, 0), "{stats:?}");
        assert!(stats.bytes <= 32 << 20, "{stats:?}");
    }
    println!("{found} entries found, {left_over} writers were killed amid an entry");
    assert!(found > 100 && left_over > 5, "too few entries: {found}, {left_over}");
}
