//! `unicorn serve` as a supervisor sees it: its log, its signals, its exit code.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Instant;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli::{assert_error, tiny_model, unicorn, unicorn_on_software};
use crate::fake_runner::HANG;

/// A server on the small model and a port of its own. It ends also where the test fails.
pub struct Daemon {
    child: Child,
    address: String,
    /// What it has said so far, and where the rest comes from.
    pub log: Vec<String>,
    stderr: Option<PipeReader>,
    _model: TempDir,
}

impl Daemon {
    pub fn start(args: &[&str]) -> Self {
        Self::start_as(args, |_| {})
    }

    /// Waits until it is ready. `with` may change how it is started.
    pub fn start_as(args: &[&str], with: impl FnOnce(&mut Command)) -> Self {
        let model = tiny_model();
        let path = model.path().to_str().expect("UTF-8");
        let all =
            [&["serve", "--model", path, "--name", "a/b", "--port", "0", "--allow-software-vulkan"], args];
        let mut command = unicorn_on_software(&all.concat());
        with(&mut command);
        let (reader, writer): (PipeReader, PipeWriter) = std::io::pipe().expect("a pipe");
        command.stderr(writer);
        let child = command.spawn().expect("runs");
        // The command has the pipe's other end, which is to close with the child.
        drop(command);
        let mut daemon =
            Self { child, address: String::new(), log: Vec::new(), stderr: Some(reader), _model: model };
        let ready = daemon.wait_for_line("ready: http");
        let (_, rest) = ready.split_once("://").expect("an address");
        daemon.address = rest.split('/').next().expect("an address").to_owned();
        daemon
    }

    /// The next line of the log with `part` in it.
    pub fn wait_for_line(&mut self, part: &str) -> String {
        let reader = self.stderr.as_mut().expect("the log is read");
        loop {
            // Byte by byte: what comes later stays in the pipe.
            let (mut line, mut byte) = (Vec::new(), [0]);
            while reader.read(&mut byte).expect("the log can be read") == 1 && byte[0] != b'\n' {
                line.push(byte[0]);
            }
            assert!(!(line.is_empty() && byte[0] != b'\n'), "never said {part:?}: {:#?}", self.log);
            let line = String::from_utf8_lossy(&line).into_owned();
            self.log.push(line.clone());
            if line.contains(part) {
                return line;
            }
        }
    }

    /// Nobody reads its log any more.
    pub fn close_log(&mut self) {
        self.stderr = None;
    }

    /// `SIGNAL` as `kill` has it.
    pub fn signal(&self, signal: &str) {
        // The shell's own: a program of that name is not on every machine.
        let kill = format!("kill -{signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("sh runs").success());
    }

    /// Its exit code, once it has ended.
    pub fn exit_code(&mut self) -> Option<i32> {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("waits") {
                return status.code();
            }
            assert!(since.elapsed() < HANG, "does not stop: {:#?}", self.log);
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// What it said that nobody has read, once it has ended.
    pub fn rest_of_log(&mut self) -> String {
        let mut rest = Vec::new();
        self.stderr.take().expect("the log is read").read_to_end(&mut rest).expect("read");
        String::from_utf8_lossy(&rest).into_owned()
    }

    /// One request over one connection: the status, and the body as it stands on the wire.
    pub fn exchange(&self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> (u16, String) {
        let mut client = TcpStream::connect(&self.address).expect("connects");
        client.set_read_timeout(Some(HANG)).expect("set");
        let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.0\r\n{fields}Content-Length: {length}\r\n\r\n{body}");
        client.write_all(head.as_bytes()).expect("sent");
        let mut reply = String::new();
        client.read_to_string(&mut reply).expect("answered");
        let (head, body) = reply.split_once("\r\n\r\n").expect("a head and a body");
        (head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect(head), body.to_owned())
    }

    /// An answer of a few tokens, always the same one; or its stream.
    pub fn ask(&self, fields: &[(&str, &str)], stream: bool) -> (u16, String) {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body =
            json!({"model": "a/b", "messages": messages, "max_tokens": 9, "seed": 3, "stream": stream});
        self.exchange("POST", "/v1/chat/completions", fields, &body.to_string())
    }

    /// A number that `/metrics` has.
    pub fn metric(&self, name: &str) -> f64 {
        let (status, text) = self.exchange("GET", "/metrics", &[], "");
        assert_eq!(status, 200, "{text}");
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect(line)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn serve_loads_answers_and_stops_on_sigterm() {
    let mut server = Daemon::start(&[]);
    for part in ["a/b", "device", "context", "weights in heap", "KV cache in heap"] {
        assert!(server.log.iter().any(|l| l.contains(part)), "{part}: {:#?}", server.log);
    }
    // What the kernel sees, or, where it tells nothing, that.
    let verdict = |l: &&String| l.contains("the kernel sees") || l.contains("cannot be verified here");
    assert_eq!(server.log.iter().filter(verdict).count(), 1, "{:#?}", server.log);

    let (status, body) = server.ask(&[], false);
    assert_eq!(status, 200, "{body}");
    let content = |body: &str| -> Value {
        serde_json::from_str::<Value>(body).expect(body)["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(content(&body), content(&server.ask(&[], false).1), "the same seed gives the same answer");
    let (status, stream) = server.ask(&[], true);
    assert!(status == 200 && stream.contains("data: [DONE]"), "{stream}");
    assert_eq!(server.exchange("GET", "/health", &[], "").0, 200);

    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    let rest = server.rest_of_log();
    assert!(!rest.contains("ERROR") && rest.trim_end().ends_with("stopped"), "{rest}");
}

#[test]
fn a_log_reader_that_is_gone_breaks_no_answer() {
    let mut server = Daemon::start(&["-v"]);
    server.close_log();
    for _ in 0..5 {
        let (status, body) = server.ask(&[], false);
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(server.exchange("GET", "/health", &[], "").0, 200);
    assert!(server.metric("unicorn_log_lines_lost_total") > 0.0, "what is lost is counted");
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_full_log_pipe_stops_nothing() {
    let mut server = Daemon::start(&["-vv"]);
    // A pipe holds 64 KiB, and each of these leaves a line of its id.
    let id = "x".repeat(128);
    for _ in 0..400 {
        let (status, body) = server.exchange("GET", "/v1/models", &[("x-request-id", &id)], "");
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(server.ask(&[], false).0, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    let rest = server.rest_of_log();
    // Each of the pipe's 16 pages has what is left of a line free, and the last may be nearly empty.
    assert!(rest.len() > 50_000, "the pipe was not full: {} bytes", rest.len());
}

#[test]
fn lines_that_nobody_read_in_time_are_told_of_when_somebody_does() {
    let mut server = Daemon::start(&["-vv"]);
    let id = "x".repeat(128);
    // More than a pipe and what waits for the log's thread hold.
    while server.metric("unicorn_log_lines_lost_total") == 0.0 {
        for _ in 0..500 {
            server.exchange("GET", "/nothing", &[("x-request-id", &id)], "");
        }
    }
    let note = server.wait_for_line("of the log were lost");
    assert!(note.contains("WARN"), "{note}");
}

fn configuration(folder: &Path, text: &str) -> String {
    let path = folder.join("unicorn.toml");
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn sighup_reads_the_configuration_again_and_never_ends_the_server() {
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
    server.wait_for_line("server.connections has changed, and takes effect when unicorn is started again");
    server.wait_for_line("read the configuration again");
    assert_eq!((with(&server, old), with(&server, new)), (401, 200));
    server.wait_for_line("DEBUG");

    // What is wrong changes nothing.
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
        let line = server.wait_for_line("stays what it was");
        assert!(line.contains(problem), "{line}");
        assert_eq!((with(&server, old), with(&server, new)), (401, 200));
    }
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn exit_codes_tell_whether_another_start_helps() {
    const CONFIGURATION: i32 = 78;
    let folder = tempfile::tempdir().expect("a folder");
    let path = configuration(folder.path(), "[server]\nport = \"x\"");
    assert_error(unicorn(&["serve", "--config", &path]), CONFIGURATION, &["server.port"]);
    assert_error(unicorn(&["serve", "--model", "/nonexistent"]), CONFIGURATION, &["/nonexistent"]);
    let missing = ["serve", "--port", "0", "--api-key-file", "/nonexistent"];
    assert_error(unicorn(&missing), CONFIGURATION, &["/nonexistent"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    assert_error(unicorn(&["serve", "--port", &port]), CONFIGURATION, &["taken"]);
    assert_error(unicorn(&["serve", "--port", "0"]), 75, &["Vulkan"]);
    assert_error(unicorn(&["serve", "--port", "many"]), 2, &["--port"]);
    // Whoever is no server has one code for all that fails.
    assert_error(unicorn(&["generate", "--prompt", "x", "--model", "/nonexistent"]), 1, &["/nonexistent"]);
}
