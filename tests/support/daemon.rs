//! `unicorn serve` as a process, with a small model on a free port.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use serde_json::json;
use tempfile::TempDir;

use super::checkpoints::tiny_model;
use super::fake_runner::HANG;
use super::program::unicorn_on_software;
use super::waits::wait_until;

/// A server that does not write an expected line of its log, or does not end an answer, for this long hangs. It may first
/// compile the kernels of a model.
const PATIENCE: Duration = Duration::from_secs(600);

/// A running server with a small model. It is killed on drop, also when the test fails.
pub struct Daemon {
    child: Child,
    address: String,
    /// The log lines read until now. The rest is in `stderr`.
    pub log: Vec<String>,
    stderr: Option<PipeReader>,
    _model: Option<TempDir>,
}

impl Daemon {
    pub fn start(args: &[&str]) -> Self {
        Self::start_as(args, |_| {})
    }

    /// Starts a server and waits until it is ready. `with` may change the command.
    pub fn start_as(args: &[&str], with: impl FnOnce(&mut Command)) -> Self {
        let model = tiny_model();
        let mut daemon = Self::start_model(model.path(), args, with);
        daemon._model = Some(model);
        daemon
    }

    /// Like [`Daemon::start_as`], with another model.
    pub fn start_model(model: &Path, args: &[&str], with: impl FnOnce(&mut Command)) -> Self {
        let mut daemon = Self::begin(model, args, with);
        daemon.wait_for_line("ready: http");
        daemon
    }

    /// Starts a server and waits until it listens. The model is not loaded yet.
    pub fn begin(model: &Path, args: &[&str], with: impl FnOnce(&mut Command)) -> Self {
        let path = model.to_str().expect("UTF-8");
        Self::listening(&[&["--model", path, "--name", "a/b"], args].concat(), with)
    }

    /// Starts a server with the models of a configuration, and waits until it is ready.
    pub fn start_configured(config: &Path, args: &[&str]) -> Self {
        Self::start_configured_as(config, args, |_| {})
    }

    /// Like [`Daemon::start_configured`]. `with` may change the command.
    pub fn start_configured_as(config: &Path, args: &[&str], with: impl FnOnce(&mut Command)) -> Self {
        let path = config.to_str().expect("UTF-8");
        let mut daemon = Self::listening(&[&["--config", path], args].concat(), with);
        daemon.wait_for_line("ready: http");
        daemon
    }

    fn listening(args: &[&str], with: impl FnOnce(&mut Command)) -> Self {
        let all = [&["serve", "--port", "0", "--allow-software-vulkan"], args];
        let mut command = unicorn_on_software(&all.concat());
        with(&mut command);
        let (reader, writer): (PipeReader, PipeWriter) = std::io::pipe().expect("a pipe");
        command.stderr(writer);
        let child = command.spawn().expect("runs");
        // The command holds the write end of the pipe, which must close when the child ends.
        drop(command);
        let mut daemon =
            Self { child, address: String::new(), log: Vec::new(), stderr: Some(reader), _model: None };
        let listening = daemon.wait_for_line("listening on http");
        let (_, rest) = listening.split_once("://").expect("an address");
        daemon.address = rest.split('/').next().expect("an address").to_owned();
        daemon
    }

    /// Reads the log up to the next line that contains `part`, and returns that line.
    #[track_caller]
    pub fn wait_for_line(&mut self, part: &str) -> String {
        let reader = self.stderr.as_mut().expect("the log is read");
        let since = Instant::now();
        loop {
            // Reads byte by byte, so that later lines stay in the pipe.
            let (mut line, mut byte) = (Vec::new(), [0]);
            loop {
                let left = PATIENCE.saturating_sub(since.elapsed());
                let has_bytes = is_readable(reader, left);
                assert!(has_bytes, "no log line contains {part:?} for {PATIENCE:?}: {:#?}", self.log);
                if reader.read(&mut byte).expect("the log can be read") == 0 || byte[0] == b'\n' {
                    break;
                }
                line.push(byte[0]);
            }
            assert!(!(line.is_empty() && byte[0] != b'\n'), "no log line contains {part:?}: {:#?}", self.log);
            let line = String::from_utf8_lossy(&line).into_owned();
            self.log.push(line.clone());
            if line.contains(part) {
                return line;
            }
        }
    }

    /// The first line of the log that contains `part`. It may already have been read, because the device process and
    /// the server write to one log in no fixed order.
    pub fn line(&mut self, part: &str) -> String {
        let found = self.log.iter().find(|line| line.contains(part)).cloned();
        found.unwrap_or_else(|| self.wait_for_line(part))
    }

    /// Sends further requests to another port.
    pub fn at_port(&mut self, port: u16) {
        self.address = format!("127.0.0.1:{port}");
    }

    /// The base URL of its API.
    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process id of a device process. Waits until one is started.
    pub fn device_process(&self) -> String {
        let mut found = None;
        wait_until("a device process", || {
            found = self.device_processes().into_iter().next();
            found.is_some()
        });
        found.expect("found")
    }

    /// The process ids of its device processes.
    pub fn device_processes(&self) -> Vec<String> {
        let is_device_process = |pid: &&str| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.contains("device-process")
        };
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("threads").flatten();
        let children = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")));
        let children = children.filter_map(Result::ok).collect::<Vec<_>>().join(" ");
        children.split_whitespace().filter(is_device_process).map(str::to_owned).collect()
    }

    /// Sends a signal, named as for `kill`, to its device process.
    pub fn signal_device(&self, signal: &str) {
        signal_process(signal, &self.device_process());
    }

    /// Closes the read end of the log's pipe.
    pub fn close_log(&mut self) {
        self.stderr = None;
    }

    /// Sends a signal, named as for `kill`.
    pub fn signal(&self, signal: &str) {
        signal_process(signal, &self.child.id().to_string());
    }

    /// Waits for its end. Returns its exit code.
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

    /// The part of the log that was not read yet. The server must have ended.
    pub fn rest_of_log(&mut self) -> String {
        let mut rest = Vec::new();
        self.stderr.take().expect("the log is read").read_to_end(&mut rest).expect("read");
        String::from_utf8_lossy(&rest).into_owned()
    }

    /// Sends one request over a new connection. Returns the status and the raw body.
    pub fn exchange(&self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> (u16, String) {
        let mut client = TcpStream::connect(&self.address).expect("connects");
        let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.0\r\n{fields}Content-Length: {length}\r\n\r\n{body}");
        client.write_all(head.as_bytes()).expect("sent");
        let (since, mut reply, mut piece) = (Instant::now(), Vec::new(), [0; 4096]);
        loop {
            // A stream may send comments for ever.
            let left = PATIENCE.saturating_sub(since.elapsed()).min(HANG).max(Duration::from_millis(1));
            client.set_read_timeout(Some(left)).expect("set");
            match client.read(&mut piece).expect("answered") {
                0 => break,
                length => reply.extend(&piece[..length]),
            }
        }
        let reply = String::from_utf8(reply).expect("UTF-8");
        let (head, body) = reply.split_once("\r\n\r\n").expect("a head and a body");
        (head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect(head), body.to_owned())
    }

    /// Requests a short chat, whole or streamed. The seed is fixed, so the answer is always the same.
    pub fn ask(&self, fields: &[(&str, &str)], stream: bool) -> (u16, String) {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body =
            json!({"model": "a/b", "messages": messages, "max_tokens": 9, "seed": 3, "stream": stream});
        self.exchange("POST", "/v1/chat/completions", fields, &body.to_string())
    }

    /// A value from `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        number_of(name, &self.scrape())
    }

    /// A value from `/metrics` that the device process reports, which may take time on a busy machine.
    pub fn metric_of_device(&self, name: &str) -> f64 {
        number_of(name, &self.scrape_with("unicorn_gpu_dispatches_total"))
    }

    /// The first scrape that contains this metric. Another process may still have to report it.
    pub fn scrape_with(&self, metric: &str) -> String {
        let since = Instant::now();
        loop {
            let text = self.scrape();
            if text.lines().any(|line| line.starts_with(metric)) {
                return text;
            }
            assert!(since.elapsed() < HANG, "never {metric}: {text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn scrape(&self) -> String {
        let (status, text) = self.exchange("GET", "/metrics", &[], "");
        assert_eq!(status, 200, "{text}");
        text
    }
}

/// Waits until a read of the pipe does not block. False = it would still block after `patience`.
fn is_readable(reader: &PipeReader, patience: Duration) -> bool {
    let mut pipes = [PollFd::new(reader, PollFlags::IN)];
    let patience = patience.try_into().expect("a time");
    loop {
        match rustix::event::poll(&mut pipes, Some(&patience)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.expect("polls") > 0,
        }
    }
}

pub fn signal_process(signal: &str, pid: &str) {
    // The shell's builtin, because not every machine has a `kill` program.
    let kill = format!("kill -{signal} {pid}");
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("sh runs").success());
}

/// The value of a metric in a scrape.
pub fn number_of(name: &str, scrape: &str) -> f64 {
    let line = scrape.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("{name}: {scrape}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect(line)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
