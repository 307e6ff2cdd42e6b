//! The shipped binary when Vulkan calls fail. The layer in `tests/fault_layer`, between the loader and the driver,
//! makes them fail.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::checkpoints::tiny_model;
use crate::support::daemon::Daemon;
use crate::support::program::{example, lab_on_software, output, unicorn_on_software};
use crate::support::root;
use crate::support::systemd::Systemd;
use crate::support::waits::wait_until;

/// Inserts the fault layer between a command and its driver.
fn with_layer(command: &mut Command) {
    command.env("VK_INSTANCE_LAYERS", "VK_LAYER_UNICORN_fault");
    command.env("VK_ADD_LAYER_PATH", root().join("tests/fault_layer"));
    command.env("LD_LIBRARY_PATH", example("fault_layer").parent().expect("a folder"));
}

/// A server whose Vulkan calls can be made to fail.
struct Faulty {
    folder: tempfile::TempDir,
    server: Daemon,
}

impl Faulty {
    fn start() -> Faulty {
        Self::start_as(|command| {
            command.env("UNICORN_HARDWARE_HANG_TIMEOUT_S", "5");
        })
    }

    fn start_as(with: impl FnOnce(&mut Command)) -> Faulty {
        let folder = tempfile::tempdir().expect("a folder");
        let faults = folder.path().join("faults");
        let server = Daemon::start_as(&[], |command| {
            with_layer(command);
            command.env("FAULT_LAYER_FILE", faults);
            with(command);
        });
        Faulty { folder, server }
    }

    /// Makes calls fail from now on. The numbers of the calls in `faults` count from here.
    fn arm(&self, faults: &str) {
        let partial = self.folder.path().join("partial");
        fs::write(&partial, faults).expect("written");
        fs::rename(partial, self.folder.path().join("faults")).expect("renamed");
    }

    /// A chat with at most twelve tokens.
    fn ask(&self, more: Value) -> (u16, String) {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let mut body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
        for (name, value) in more.as_object().expect("fields") {
            body[name] = value.clone();
        }
        self.server.exchange("POST", "/v1/chat/completions", &[], &body.to_string())
    }

    fn answer(&self, more: Value) -> String {
        let (status, body) = self.ask(more);
        assert_eq!(status, 200, "{body}");
        let body: Value = serde_json::from_str(&body).expect(&body);
        body["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
    }

    fn streamed(&self, mut fields: Value) -> String {
        fields["stream"] = true.into();
        let (status, body) = self.ask(fields);
        assert_eq!(status, 200, "{body}");
        let chunks = body.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|d| *d != "[DONE]");
        let chunks = chunks.map(|chunk| serde_json::from_str::<Value>(chunk).expect(chunk));
        chunks
            .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()))
            .collect()
    }

    fn health(&self) -> (u16, Value) {
        let (status, body) = self.server.exchange("GET", "/health", &[], "");
        (status, serde_json::from_str(&body).expect(&body))
    }
}

#[test]
fn calls_that_lack_memory_for_a_moment_are_retried_without_errors() {
    let mut faulty = Faulty::start();
    // Before the first step, `/health` sends a probe, and all of its calls fail once.
    let probed = "begin:1=OUT_OF_DEVICE_MEMORY, end:1=OUT_OF_HOST_MEMORY, submit:1=OUT_OF_DEVICE_MEMORY";
    faulty.arm(&format!("{probed}, wait:1=OUT_OF_HOST_MEMORY"));
    assert_eq!(faulty.health(), (200, json!({"status": "ok"})));
    for call in ["begin", "end", "submit", "wait"] {
        faulty.server.wait_for_line(&format!("fault_layer: {call}:1="));
    }

    let choice = || json!({"guided_choice": ["bread and butter", "salt and water"]});
    faulty.arm("");
    let (free, chosen) = (faulty.answer(json!({})), faulty.answer(choice()));
    assert!(free.trim().len() > 1 && chosen.len() > 1, "{free:?}, {chosen:?}");
    // Every second recording fails, so that each part of a step fails at some time.
    let every_other = (0..200).map(|n| format!("end:{}=OUT_OF_DEVICE_MEMORY", 2 * n + 1)).collect::<Vec<_>>();
    for faults in [
        "submit:4=OUT_OF_DEVICE_MEMORY",
        "submit:4-6=OUT_OF_HOST_MEMORY",
        "wait:4=OUT_OF_DEVICE_MEMORY",
        "begin:4-5=OUT_OF_HOST_MEMORY",
        &every_other.join(","),
    ] {
        let struck = format!("fault_layer: {}", faults.split(',').next().expect("one"));
        faulty.arm(faults);
        assert_eq!(faulty.answer(json!({})), free, "{faults}");
        faulty.server.wait_for_line(&struck);
        faulty.arm(&format!(" {faults}"));
        assert_eq!(faulty.answer(choice()), chosen, "{faults}");
        faulty.server.wait_for_line(&struck);
    }
    assert_eq!(faulty.health().0, 200);
    faulty.server.signal("TERM");
    assert_eq!(faulty.server.exit_code(), Some(0), "{:#?}", faulty.server.log);
    let log = faulty.server.log.join("\n") + &faulty.server.rest_of_log();
    assert!(!log.contains("ERROR"), "{log}");
    // The log reports the shortage, but not each time.
    let said = log.lines().filter(|l| l.contains("WARN") && l.contains("had no memory")).count();
    assert!((1..12).contains(&said), "{said} times: {log}");
}

#[test]
fn a_driver_without_memory_for_long_ends_the_command_with_an_error() {
    let folder = tiny_model();
    let model = folder.path().to_str().expect("UTF-8");
    let generate = ["generate", "--model", model, "--prompt", "Hello", "--allow-software-vulkan"];
    let mut command = unicorn_on_software(&generate);
    with_layer(&mut command);
    command.env("FAULT_LAYER", "submit:1+=OUT_OF_DEVICE_MEMORY");
    let (code, stdout, stderr) = output(command);
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    let error = stderr.lines().last().expect("a line");
    for part in ["error: ", "the driver had no memory", "memory.reserve"] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

#[test]
fn an_invalid_buffer_address_is_reported_as_a_driver_without_memory() {
    const DEVICE: i32 = 75;
    let folder = tiny_model();
    let model = folder.path().to_str().expect("UTF-8");
    for nth in [1, 5] {
        let mut command =
            unicorn_on_software(&["serve", "--model", model, "--port", "0", "--allow-software-vulkan"]);
        with_layer(&mut command);
        command.env("FAULT_LAYER", format!("address:{nth}=OUT_OF_HOST_MEMORY"));
        let (code, _, stderr) = output(command);
        let error = stderr.lines().last().expect("a line");
        assert!(error.starts_with("error: ") && error.contains("the driver had no memory for "), "{stderr}");
        assert_eq!(code, DEVICE, "{stderr}");
    }
}

#[test]
fn a_device_lost_during_answers_is_recovered_and_the_answers_continue() {
    const STREAMS: u32 = 8;

    for (faults, why) in [
        ("submit:12=DEVICE_LOST", "the GPU was lost"),
        ("wait:6=DEVICE_LOST", "the GPU was lost"),
        ("submit:12=UNKNOWN", "unknown error"),
        ("submit:12=SEGV", "was ended by SIGSEGV"),
        ("submit:12=HANG", "the GPU hangs"),
    ] {
        let mut faulty = Faulty::start();
        // Half of the answers are streamed, and half are sampled at a temperature of 1.
        let all = || -> Vec<String> {
            let ask = |n: u32| {
                let messages = json!([{"role": "user", "content": format!("Tell me about the number {n}.")}]);
                let temperature = f64::from(n % 2);
                let fields =
                    json!({"messages": messages, "temperature": temperature, "seed": n, "max_tokens": 20});
                if n < STREAMS / 2 { faulty.answer(fields) } else { faulty.streamed(fields) }
            };
            std::thread::scope(|scope| {
                let asked: Vec<_> = (0..STREAMS).map(|n| scope.spawn(move || ask(n))).collect();
                asked.into_iter().map(|answer| answer.join().expect("answered")).collect()
            })
        };
        let expected = all();
        faulty.arm(faults);
        assert_eq!(all(), expected, "{faults}");
        faulty.server.wait_for_line(why);
        faulty.server.wait_for_line("the GPU works again");
        assert_eq!(faulty.health(), (200, json!({"status": "ok"})), "{faults}");
        faulty.server.signal("TERM");
        assert_eq!(faulty.server.exit_code(), Some(0), "{faults}: {:#?}", faulty.server.log);
    }
}

#[test]
fn a_soak_that_loses_the_device_finds_equal_answers_and_no_leak() {
    let mut faulty = Faulty::start();
    let (url, pid) = (faulty.server.url(), faulty.server.pid().to_string());
    let faults = faulty.folder.path().join("faults");
    let soak = ["soak", "1r", "--url", &url, "--concurrency", "1", "--pid", &pid, "--json"];
    let faults = ["--fault-file", faults.to_str().expect("UTF-8")];
    let (code, stdout, stderr) = output(lab_on_software(&[&soak[..], &faults].concat()));
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    assert_eq!((code, &report["failures"]), (0, &json!([])), "{report:#}{stderr}");
    let said = |what: &str| {
        let checks = report["checks"].as_array().expect("checks").iter();
        checks.clone().find(|check| check["check"] == what).expect(what)["said"].as_str().expect("words")
    };
    assert!(
        said("losses").starts_with("1 faults, 1 of which lost the device; the server counts 1"),
        "{report:#}"
    );
    assert!(!said("answers").contains(" 0 streams left midway"), "{report:#}");
    assert!(said("memory of the device process at the soak's end").contains("MiB"), "{report:#}");
    faulty.server.wait_for_line("the GPU works again");
    faulty.server.signal("TERM");
    assert_eq!(faulty.server.exit_code(), Some(0), "{:#?}", faulty.server.log);
}

#[test]
fn the_binary_fails_only_a_prompt_that_loses_the_device_twice() {
    let mut faulty = Faulty::start();
    let expected = faulty.answer(json!({"max_tokens": 60}));
    let poison = json!([{"role": "user", "content": "Zebras quiz xylophones"}]);
    let ids = |messages: &Value| -> Vec<u64> {
        let body = json!({"messages": messages}).to_string();
        let (status, answer) = faulty.server.exchange("POST", "/tokenize", &[], &body);
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        answer["tokens"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id")).collect()
    };
    let others = ids(&json!([{"role": "user", "content": "Hello"}]));
    let own: Vec<String> =
        ids(&poison).iter().skip_while(|id| others.contains(id)).take(4).map(u64::to_string).collect();
    assert_eq!(own.len(), 4);
    faulty.arm(&format!("submit:words:{}=DEVICE_LOST", own.join(".")));
    std::thread::scope(|scope| {
        let innocent = scope.spawn(|| faulty.answer(json!({"max_tokens": 60})));
        let (status, body) = faulty.ask(json!({"messages": poison, "max_tokens": 60}));
        let error: Value = serde_json::from_str(&body).expect(&body);
        assert_eq!((status, &error["error"]["code"]), (500, &json!("lost_twice")), "{body}");
        assert_eq!(innocent.join().expect("answered"), expected);
    });
    assert_eq!(faulty.answer(json!({"max_tokens": 60})), expected);
    assert_eq!(faulty.health().0, 200);
    faulty.server.signal("TERM");
    assert_eq!(faulty.server.exit_code(), Some(0), "{:#?}", faulty.server.log);
}

/// The self-test fills its results with this word first, also on the host.
const POISON: u32 = 0x7fc0_5e1f;

#[test]
fn a_server_on_a_device_that_computes_nothing_does_not_start() {
    const WRONG: i32 = 76;
    let folder = tiny_model();
    let model = folder.path().to_str().expect("UTF-8");
    let mut command =
        unicorn_on_software(&["serve", "--model", model, "--port", "0", "--allow-software-vulkan"]);
    with_layer(&mut command);
    let word = POISON.to_string();
    command.env("FAULT_LAYER", format!("submit:words:{}=DROPPED", [&word[..]; 4].join(".")));
    let (code, _, stderr) = output(command);
    assert_eq!(code, WRONG, "{stderr}");
    assert!(!stderr.contains("ready:"), "{stderr}");
    let error = stderr.lines().last().expect("a line");
    for part in ["error: the GPU computes wrong: kernel quantize: x[1] is NaN", "it should be", "--device"] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

#[test]
fn a_probe_finds_wrong_results_and_the_device_is_recovered() {
    let mut faulty = Faulty::start();
    let started = faulty.server.line("self-test ");
    assert!(started.contains(" kernels in ") && started.contains("no layer values"), "{started}");
    // There was no step yet, so `/health` sends a probe.
    faulty.arm("submit:1=DROPPED");
    let (status, health) = faulty.health();
    assert_eq!((status, &health["status"]), (503, &json!("recovering")), "{health}");
    faulty.server.wait_for_line("the GPU computes wrong: kernel ");
    faulty.server.wait_for_line("the GPU works again");
    assert_eq!(faulty.health(), (200, json!({"status": "ok"})));
    assert!(!faulty.answer(json!({})).is_empty());
    faulty.server.signal("TERM");
    assert_eq!(faulty.server.exit_code(), Some(0), "{:#?}", faulty.server.log);
}

#[test]
fn a_device_that_stays_wrong_after_recovery_ends_the_server() {
    const DEVICE: i32 = 75;
    let mut faulty = Faulty::start();
    faulty.arm("submit:1+=DROPPED");
    assert_eq!(faulty.health().0, 503);
    faulty.server.wait_for_line("the GPU computes wrong: kernel ");
    assert_eq!(faulty.server.exit_code(), Some(DEVICE), "{:#?}", faulty.server.log);
    let log = faulty.server.rest_of_log();
    let error = log.lines().last().expect("a line");
    assert!(error.starts_with("error: ") && error.contains("computes wrong: kernel "), "{log}");
}

#[test]
fn a_device_that_cannot_be_recovered_ends_all_answers_and_the_server() {
    const DEVICE: i32 = 75;
    for (i, (faults, why)) in [
        ("submit:6+=DEVICE_LOST", "the GPU was lost"),
        ("wait:6+=DEVICE_LOST", "the GPU was lost"),
        ("submit:6+=OUT_OF_HOST_MEMORY", "the driver had no memory"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut faulty = Faulty::start();
        assert!(!faulty.answer(json!({})).is_empty());
        faulty.arm(faults);
        let stream = i % 2 == 0;
        let (status, body) = faulty.ask(json!({"stream": stream}));
        let last = body.lines().filter_map(|line| line.strip_prefix("data: ")).rfind(|d| *d != "[DONE]");
        let last: Value = serde_json::from_str(last.unwrap_or(&body)).expect(&body);
        let expected = if stream { 200 } else { 503 };
        assert_eq!((status, &last["error"]["code"]), (expected, &json!("engine_lost")), "{faults}: {body}");
        let message = last["error"]["message"].as_str().expect("why");
        assert!(message.contains(why), "{faults}: {message}");

        // In one case the server gets SIGTERM as well. Its exit code must still report the failure.
        if i % 3 == 0 {
            faulty.server.signal("TERM");
        }
        assert_eq!(faulty.server.exit_code(), Some(DEVICE), "{faults}: {:#?}", faulty.server.log);
        let log = faulty.server.rest_of_log();
        assert!(!log.contains("did not end"), "{faults}: {log}");
        let error = log.lines().last().expect("a line");
        assert!(error.starts_with("error: ") && error.contains(why), "{faults}: {log}");
    }
}

#[test]
fn a_server_whose_device_hangs_sends_no_watchdog_signals_to_systemd() {
    let (systemd, watchdog) = (Systemd::new(), Duration::from_secs(3));
    let faulty = Faulty::start_as(|command| {
        systemd.supervise(command, watchdog);
        command.env("UNICORN_HARDWARE_HANG_TIMEOUT_S", "600");
    });
    systemd.wait_for("READY=1");
    systemd.wait_for("WATCHDOG=1");
    faulty.arm("submit:1+=HANG");
    // `/health` reports `unresponsive` five seconds after the last step.
    wait_until("it is unresponsive", || faulty.health().1["status"] == "unresponsive");
    while systemd.next_message(Duration::from_millis(1)).is_some() {}
    // One more signal may already be on its way: systemd gets three within the watchdog time.
    systemd.next_message(watchdog / 2);
    assert_eq!(systemd.next_message(2 * watchdog), None);
}
