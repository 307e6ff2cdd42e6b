//! `engine.courtesy`: the share of the GPU's time that a server takes while a user session is active on its machine.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use unicorn::config::Courtesy;
use unicorn::engine::{Engine, EngineConfig};
use unicorn::gpu::Device;
use unicorn::model::arch::open_files;
use unicorn::model::load::{LoadOptions, Source};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::{Limits, Runner as _};

use crate::support::daemon::Daemon;
use crate::support::driver::greedy;
use crate::support::engine::{END, collect, request};
use crate::support::fake_runner::{FakeFactory, FakeRunner, HANG, fake_limits, mixed, mixed_answer};
use crate::support::goldens::{Goldens, all_logits};
use crate::support::{data, policy};

fn share(share: f64) -> Courtesy {
    share.try_into().expect("a share")
}

#[test]
fn shorter_submits_and_gaps_between_them_leave_logits_bit_identical() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.mid");
    // Courtesy is set for the whole device, so this test does not use the device that tests share.
    let device = Device::open(&policy()).unwrap();
    // Without a limit, a step is one submit, however long a busy machine takes for it.
    let options = LoadOptions {
        max_submit: Duration::from_secs(3600),
        max_courteous_submit: Duration::ZERO,
        ..LoadOptions::default()
    };
    let files = open_files(&folder).unwrap();
    let mut model =
        ModelRunner::load(&device, &Source::open(&files).unwrap(), &options, &mut |_| {}).unwrap();
    let mut run = |courtesy| {
        model.set_courtesy(courtesy).unwrap();
        let (progress, rested) = (device.progress(), device.rested());
        let answer = (all_logits(&mut model, &tokens), greedy(&mut model, &tokens, 12, 100, &[]));
        (answer, device.progress() - progress, device.rested() - rested)
    };
    let (expected, submits, rested) = run(Courtesy::NONE);
    assert_eq!(rested, Duration::ZERO, "submits are not delayed");
    for courtesy in [share(0.5), share(0.1)] {
        let (answer, progress, rested) = run(courtesy);
        assert!(answer == expected, "{courtesy:?}: {:?} and {:?}", answer.1, expected.1);
        // Parts of layers are submitted alone, and each gap counts as progress for the detection of hangs.
        assert!(progress > 2 * submits && rested > Duration::ZERO, "{courtesy:?}: {progress} and {submits}");
    }
    let (answer, again, rested) = run(Courtesy::NONE);
    assert!(answer == expected);
    assert_eq!((again, rested), (submits, Duration::ZERO), "the same as before the limit");
}

#[test]
fn limited_steps_run_one_at_a_time_and_new_runners_get_the_limit() {
    const IDS: usize = 500;
    let limits = Limits { max_in_flight: 2, ..fake_limits() };
    let make = move || FakeRunner::new(limits.clone(), mixed(IDS));
    let (runner, control) = make();
    let factory = FakeFactory::new(&control, move || make().0);
    let engine = Engine::start_recoverable(runner, factory, Arc::default(), EngineConfig::default());
    let prompt: Vec<u32> = (0..40).collect();
    let ask = || {
        let (ids, _) = collect(&mut engine.submit(request(&prompt, 9)).expect("accepted"));
        assert_eq!(ids, mixed_answer(&prompt, 9, 0, IDS, END));
    };
    ask();
    assert_eq!(control.courtesies(), [], "courtesy is set only when it changes");
    // The fake runner refuses a second step in flight while courtesy is below 1.
    engine.set_courtesy(share(0.5));
    ask();
    ask();
    let settings: Vec<Courtesy> = control.courtesies().into_iter().map(|(_, courtesy)| courtesy).collect();
    assert_eq!(settings, [share(0.5)]);
    // The next runner begins without a limit, and gets it before its first step.
    let steps = control.batches().len();
    control.fail_submit_at(steps + 1);
    ask();
    assert_eq!(control.starts(), 1);
    assert_eq!(control.courtesies()[1..], [(steps + 1, share(0.5))]);
    engine.set_courtesy(Courtesy::NONE);
    ask();
    assert_eq!(control.courtesies()[2].1, Courtesy::NONE);
}

/// A folder in place of `/run`.
struct Run(TempDir);

impl Run {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    /// Writes the file of a session as systemd-logind does.
    fn session(&self, state: &str) {
        let folder = self.0.path().join("systemd/sessions");
        fs::create_dir_all(&folder).expect("a folder");
        let text =
            format!("UID=1000\nACTIVE=1\nSTATE={state}\nREMOTE=0\nTYPE=wayland\nCLASS=user\nSEAT=seat0\n");
        fs::write(folder.join("new"), text).expect("written");
        fs::rename(folder.join("new"), folder.join("2")).expect("renamed");
    }

    fn daemon(&self, args: &[&str], more: &[(&str, &str)]) -> Daemon {
        Daemon::start_as(args, |command| {
            command.env("UNICORN_RUN_DIR", self.0.path()).envs(more.iter().copied());
        })
    }
}

fn courtesy(server: &Daemon) -> Value {
    let (status, body) = server.exchange("GET", "/status", &[], "");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str::<Value>(&body).expect("JSON")["courtesy"].clone()
}

fn becomes(server: &Daemon, expected: &Value) {
    let since = Instant::now();
    while courtesy(server) != *expected {
        assert!(since.elapsed() < HANG, "{} never became {expected}", courtesy(server));
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text(server: &Daemon) -> Value {
    let (status, body) = server.ask(&[], false);
    assert_eq!(status, 200, "{body}");
    serde_json::from_str::<Value>(&body).expect("JSON")["choices"][0]["message"].clone()
}

#[test]
fn a_server_limits_its_gpu_share_while_a_session_is_active() {
    let run = Run::new();
    run.session("online");
    let config = run.0.path().join("unicorn.toml");
    let configure =
        |share: &str| fs::write(&config, format!("[engine]\ncourtesy = {share}\n")).expect("written");
    configure("0.5");
    let mut server = run.daemon(&["--config", config.to_str().expect("UTF-8")], &[]);
    let status = |share: f64, holds: bool| json!({"share": share, "holds": holds, "sessions_known": true});
    becomes(&server, &status(0.5, false));
    let expected = text(&server);
    assert_eq!(server.metric("unicorn_courtesy_share"), 1.0);
    assert_eq!(server.metric_of_device("unicorn_courtesy_held_seconds_total"), 0.0);
    assert!(server.metric_of_device("unicorn_gpu_busy_seconds_total") > 0.0);

    run.session("active");
    server.wait_for_line("a user works at this machine: using at most 0.5 of the GPU's time");
    becomes(&server, &status(0.5, true));
    assert_eq!(server.metric("unicorn_courtesy_share"), 0.5);
    assert_eq!(text(&server), expected, "the same answer");
    let held = server.metric_of_device("unicorn_courtesy_held_seconds_total");
    assert!(held > 0.0);
    assert_eq!(server.exchange("GET", "/health", &[], "").0, 200);

    // SIGHUP reads the configuration again and applies another share.
    configure("0.25");
    server.signal("HUP");
    becomes(&server, &status(0.25, true));

    run.session("closing");
    server.wait_for_line("no user works at this machine");
    becomes(&server, &status(0.25, false));
    let held = server.metric_of_device("unicorn_courtesy_held_seconds_total");
    assert_eq!(text(&server), expected, "the same answer");
    assert_eq!(
        server.metric_of_device("unicorn_courtesy_held_seconds_total"),
        held,
        "a submit was delayed without an active session"
    );

    // Without a limit, `/status` does not report courtesy.
    configure("1");
    server.signal("HUP");
    becomes(&server, &Value::Null);
}

#[test]
fn a_machine_without_known_sessions_is_reported_at_the_start() {
    let run = Run::new();
    let server = run.daemon(&[], &[("UNICORN_ENGINE_COURTESY", "0.5")]);
    let warning = "engine.courtesy has no effect, because the login sessions cannot be read";
    let warnings = server.log.iter().filter(|line| line.contains(warning));
    assert_eq!(warnings.count(), 1, "{:#?}", server.log);
    assert_eq!(courtesy(&server), json!({"share": 0.5, "holds": false, "sessions_known": false}));
    // Without the option, the missing sessions are not reported.
    let server = run.daemon(&[], &[]);
    assert!(!server.log.iter().any(|line| line.contains("engine.courtesy")), "{:#?}", server.log);
    assert_eq!(courtesy(&server), Value::Null);
}
