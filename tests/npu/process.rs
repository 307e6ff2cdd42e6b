//! The NPU in its process, over the double of `tests/npu/double`: the demo model's prompts, failures of the NPU, and a
//! server with an NPU.
//!
//! The double computes like the kernel (`npu::tile`). No NPU is needed.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use unicorn::model::load::{LoadError, LoadOptions};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::offload::{LEAST_TOKENS, OffloadLimits};
use unicorn::model::{Runner, RunnerError};
use unicorn::npu::attention::{Offload, OffloadPolicy};
use unicorn::npu::error::{NpuCode, NpuError};
use unicorn::npu::process::{HeadShape, NpuProcess, Start};

use crate::support::daemon::Daemon;
use crate::support::demo;
use crate::support::fake_runner::HANG;
use crate::support::goldens::{all_logits, load, max_difference};
use crate::support::npu::{demo_kernels, demo_kernels_with, double};
use crate::support::program::{binary, output, unicorn_on_software};
use crate::support::waits::wait_until;

/// The demo model's heads, and the maximum number of keys of a job.
const HEADS: HeadShape = HeadShape { head_dim: 64, heads_per_group: 2 };
const KEYS: usize = 512;
/// Longer than a dispatch of the double takes on a busy machine.
const PATIENT: Duration = Duration::from_secs(60);
/// The deadline for tests in which the double hangs on purpose. They wait for it, so it is short.
const SHORT: Duration = Duration::from_millis(500);
/// Like [`SHORT`], but the self-test must also finish within the deadline.
const SHORT_OF_SHARING: Duration = Duration::from_secs(10);

/// The NPU's process over the double, with the double's faults.
fn start(faults: &str, deadline: Duration) -> Result<NpuProcess, NpuError> {
    start_with(&double(), demo_kernels(), faults, deadline)
}

fn start_with(shim: &Path, kernels: &Path, faults: &str, deadline: Duration) -> Result<NpuProcess, NpuError> {
    let mut command = Command::new(binary());
    command.arg("npu-process").env("NPU_DOUBLE", faults);
    let start = Start { shim: shim.to_owned(), kernels: kernels.to_owned() };
    NpuProcess::start(command, &start, HEADS, KEYS, deadline, &Arc::default())
}

/// Runs of the double in a self-test of the demo model's kernels: two for each kernel that walks over all keys, one for
/// each other kernel.
const SELF_TEST: usize = 6;
/// Runs of the double in the trial of a share at the start: one for each layer of the demo model.
const TRIAL: usize = 6;

fn options() -> LoadOptions {
    options_with(false)
}

fn options_with(shared: bool) -> LoadOptions {
    let offload = Some(OffloadLimits { kv_heads: 2, keys: KEYS, shared });
    LoadOptions { offload, max_context: Some(512), ..LoadOptions::default() }
}

fn attach(model: &mut ModelRunner, npu: NpuProcess, kv_heads: usize, policy: OffloadPolicy) {
    model.attach_offload(Offload { unit: Box::new(npu), kv_heads, policy }).expect("there is room");
}

/// The longest quick question of the demo model's set, and the number of jobs for the chunks that are long enough to be
/// shared.
fn question(model: &ModelRunner) -> (&'static [u32], u64) {
    let prompt = demo::quick_prompts(220).max_by_key(|prompt| prompt.len()).expect("a question");
    (prompt, (prompt.len() / LEAST_TOKENS * model.config().layers.len()) as u64)
}

/// The largest allowed error of logits with attention in bf16. `tests/npu/offload.rs` explains it: the rounding of the
/// inputs changes a layer's result by 2^-8 of its size. The kernel also rounds its weights to bf16, and looks
/// exponentials up in a table, which adds the same amount again (`npu::tile` explains both).
fn bound(model: &ModelRunner, logits: &[f32]) -> f32 {
    let largest = logits.iter().fold(0f32, |most, x| most.max(x.abs()));
    model.config().layers.len() as f32 * 2.0 * 2f32.powi(-8) * largest
}

#[test]
fn logits_of_the_demo_model_keep_to_the_bound_of_bf16_attention() {
    let mut model = load(&demo::folder(), &options());
    let (tokens, jobs) = question(&model);
    let plain = all_logits(&mut model, tokens);
    let (bound, vocab) = (bound(&model, &plain), model.config().vocab_size);
    for kv_heads in [1, 2] {
        let npu = start("", PATIENT).expect("the double is there");
        assert!(npu.facts().is_double && npu.facts().device.contains("double"), "{:?}", npu.facts());
        assert_eq!(npu.kv_head_counts(2), [1, 2]);
        attach(&mut model, npu, kv_heads, OffloadPolicy::Require);
        assert_eq!(model.attention_path(), kv_heads as u32);
        let got = all_logits(&mut model, tokens);
        let difference = max_difference(&got, &plain);
        println!("{} tokens, {kv_heads} of 2 KV heads: {difference:.1e} of {bound:.1e}", tokens.len());
        assert!(difference > 0.0 && difference <= bound, "{kv_heads} KV heads: {difference} of {bound}");
        let counts = model.offload_counts().expect("a unit");
        assert_eq!((counts.dispatches, counts.quarantined), (jobs, None));
        // The greedy token is the same if the likeliest id leads by more than twice the allowed error.
        let mut decided = 0;
        for (plain, got) in plain.chunks(vocab).zip(got.chunks(vocab)) {
            let [first, second] = top_two(plain);
            if first.1 - second.1 > 2.0 * bound {
                assert_eq!(top_two(got)[0].0, first.0);
                decided += 1;
            }
        }
        assert!(decided > tokens.len() / 4, "{decided} of {} positions say something", tokens.len());
    }
}

fn top_two(logits: &[f32]) -> [(usize, f32); 2] {
    let mut top = [(0, f32::MIN); 2];
    for (id, logit) in logits.iter().copied().enumerate() {
        if logit > top[0].1 {
            top = [(id, logit), top[0]];
        } else if logit > top[1].1 {
            top[1] = (id, logit);
        }
    }
    top
}

/// The NPU stops in the middle of the prompt: the deadline is reported or exceeded, the process exits, or the command
/// fails.
#[test]
fn an_npu_that_fails_amid_a_prompt_is_stepped_in_for() {
    let mut model = load(&demo::folder(), &options());
    let (tokens, _) = question(&model);
    let plain = all_logits(&mut model, tokens);
    let bound = bound(&model, &plain);
    for (fault, code) in [
        ("timeout", "npu-timeout"),
        ("hang", "npu-timeout"),
        ("exit", "npu-process"),
        ("state", "npu-command-state"),
        ("poison", "npu-no-output"),
    ] {
        let npu = start(&format!("run:9={fault}"), SHORT).expect("the double is there");
        let id = npu.id();
        attach(&mut model, npu, 1, OffloadPolicy::Auto);
        let difference = max_difference(&all_logits(&mut model, tokens), &plain);
        assert!(difference > 0.0 && difference <= bound, "{fault}: {difference} of {bound}");
        let counts = model.offload_counts().expect("a unit");
        assert_eq!((counts.dispatches, counts.fallbacks), (8, vec![(code.to_owned(), 1)]), "{fault}");
        assert!(counts.quarantined.expect("a reason").starts_with(code), "{fault}");
        assert_eq!(model.attention_path(), 0, "{fault}: prefixes are the GPU's own from now on");
        assert!(all_logits(&mut model, tokens) == plain, "{fault}: the GPU alone");
        wait_for_the_end_of(id);
    }
}

/// Waits until a process has ended. A failed process is ended immediately, not when the model ends.
fn wait_for_the_end_of(id: u32) {
    let process = format!("/proc/{id}");
    for _ in 0..600 {
        if !Path::new(&process).exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("process {id} is still there");
}

#[test]
fn an_npu_that_is_required_fails_the_step_with_its_code() {
    let mut model = load(&demo::folder(), &options());
    let (tokens, _) = question(&model);
    attach(&mut model, start("run:9=timeout", SHORT).expect("the double"), 1, OffloadPolicy::Require);
    let error = model.logits(tokens, &mut |_, _| {}).expect_err("the NPU is required");
    let RunnerError::Coprocessor(words) = &error else { panic!("{error:?}") };
    assert!(words.starts_with("npu-timeout: "), "{words}");
}

#[test]
fn the_self_test_finds_an_npu_that_computes_wrong() {
    let mut npu = start("", PATIENT).expect("the double");
    // With and without the window, for one and two KV heads.
    assert_eq!(npu.self_test(), Ok(4));
    for fault in ["run:1=wrong", "run:4=wrong", "run:6=wrong"] {
        let error = start(fault, PATIENT).expect("the double").self_test().expect_err(fault);
        assert_eq!(error.code, NpuCode::SelfTest, "{fault}: {error}");
        assert!(error.message.contains("computes wrong"), "{error}");
    }
    // The buffer still has the output of this kernel's first run.
    let error = start("run:4=poison", PATIENT).expect("the double").self_test().expect_err("no output");
    assert!(error.code == NpuCode::NoOutput && error.message.contains("32 of 32 blocks"), "{error}");
}

#[test]
fn what_keeps_the_npu_from_starting_has_a_code() {
    let empty = tempfile::tempdir().expect("a folder");
    let missing = empty.path().join("libunicorn_npu.so");
    for (shim, kernels, faults, code, part) in [
        (&*missing, demo_kernels(), "", NpuCode::ShimMissing, "make npu-shim"),
        (&*double(), demo_kernels(), "open:1=no-device", NpuCode::NoDevice, "NPU"),
        (&*double(), demo_kernels(), "open:1=memlock", NpuCode::MemlockLow, "LimitMEMLOCK"),
        (&*double(), demo_kernels(), "abi=7", NpuCode::ShimMismatch, "make npu-shim"),
        (&*double(), empty.path(), "", NpuCode::KernelMissing, "unicorn npu build-kernels"),
    ] {
        let error = start_with(shim, kernels, faults, PATIENT).err().expect(faults);
        assert_eq!(error.code, code, "{faults}: {error}");
        assert!(error.message.contains(part), "{part:?} is not in {error}");
    }
    // Other programs may take the columns between the start and the first dispatch.
    let error = start("load:1=enospc", PATIENT).expect("the double").self_test().expect_err("no columns");
    assert_eq!(error.code, NpuCode::NoColumns, "{error}");
}

/// If the NPU reads and writes the device's own buffers, an answer has the same bits as with copies.
#[test]
fn shared_memory_changes_no_bit() {
    let mut model = load(&demo::folder(), &options());
    let (tokens, jobs) = question(&model);
    let [copied, shared] = [false, true].map(|shared| {
        if shared {
            model = load(&demo::folder(), &options_with(true));
        }
        [1, 2].map(|kv_heads| {
            attach(&mut model, start("", PATIENT).expect("the double"), kv_heads, OffloadPolicy::Require);
            let logits = all_logits(&mut model, tokens);
            let counts = model.offload_counts().expect("a unit");
            assert_eq!((counts.dispatches, counts.quarantined), (jobs, None), "shared: {shared}");
            logits
        })
    });
    assert!(copied[0] != copied[1], "the NPU computes something");
    assert!(copied == shared);
}

/// If an NPU with shared memory fails, the device takes over, as with copies. An NPU that cannot share memory is
/// refused.
#[test]
fn an_npu_that_cannot_share_memory_or_fails_with_it_has_its_code() {
    let mut model = load(&demo::folder(), &options());
    let (tokens, _) = question(&model);
    let plain = all_logits(&mut model, tokens);
    let bound = bound(&model, &plain);
    let mut model = load(&demo::folder(), &options_with(true));
    let mut attached = |faults: &str| {
        let unit = Box::new(start(faults, SHORT_OF_SHARING).expect("the double"));
        let offload = Offload { unit, kv_heads: 1, policy: OffloadPolicy::Auto };
        let attached = model.attach_offload(offload).map_err(|error| match error {
            LoadError::Offload(error) => error.code,
            error => panic!("{faults}: {error}"),
        });
        attached.map(|()| {
            let difference = max_difference(&all_logits(&mut model, tokens), &plain);
            assert!(difference > 0.0 && difference <= bound, "{faults}: {difference} of {bound}");
            model.offload_counts().expect("a unit").fallbacks
        })
    };
    assert_eq!(attached("import:1=refused"), Err("npu-dma-buf".into()));
    // The self-test of the shared memory fails: no self-test ran before it.
    assert_eq!(attached("run:2=wrong"), Err("npu-self-test".into()));
    assert_eq!(attached("run:5=poison"), Err("npu-no-output".into()));
    for (fault, code) in [
        ("timeout", "npu-timeout"),
        ("exit", "npu-process"),
        ("state", "npu-command-state"),
        ("poison", "npu-no-output"),
    ] {
        let fallbacks = attached(&format!("run:{}={fault}", SELF_TEST + 9));
        assert_eq!(fallbacks, Ok(vec![(code.to_owned(), 1)]), "{fault}");
    }
}

/// Kernels for one KV head compute two KV heads in two dispatches, whose outputs are stored one after the other.
#[test]
fn each_dispatch_of_a_job_writes_its_output_or_the_job_fails() {
    let kernels = demo_kernels_with("-g1.");
    let mut models = [false, true].map(|shared| load(&demo::folder(), &options_with(shared)));
    let (tokens, jobs) = question(&models[0]);
    let in_one = {
        attach(&mut models[0], start("", PATIENT).expect("the double"), 2, OffloadPolicy::Require);
        all_logits(&mut models[0], tokens)
    };
    for model in &mut models {
        let mut counts = |faults: &str| {
            let npu = start_with(&double(), kernels.path(), faults, PATIENT).expect("the double");
            attach(model, npu, 2, OffloadPolicy::Auto);
            (all_logits(model, tokens) == in_one, model.offload_counts().expect("a unit"))
        };
        let (is_equal, sound) = counts("");
        assert!(is_equal && sound.dispatches == jobs, "{sound:?}");
        // The first or the second dispatch of a job. With shared memory, three runs of a self-test come first.
        for run in [6, 7] {
            let (_, failed) = counts(&format!("run:{run}=poison"));
            assert_eq!(failed.fallbacks, [("npu-no-output".to_owned(), 1)], "run {run}: {failed:?}");
        }
    }
}

/// A server of the demo model whose NPU is the double.
fn serve(mode: &str, faults: &str) -> Daemon {
    serve_with(mode, faults, &[("NPU_KV_HEADS", "1")])
}

/// Like [`serve`], with these options.
fn serve_with(mode: &str, faults: &str, options: &[(&str, &str)]) -> Daemon {
    Daemon::start_model(&demo::folder(), &["--npu", mode, "--context", "1024"], |command| {
        with_double(command);
        command.env("NPU_DOUBLE", faults);
        for (name, value) in options {
            command.env(format!("UNICORN_{name}"), value);
        }
    })
}

fn with_double(command: &mut Command) {
    command.env("UNICORN_NPU_SHIM", double()).env("UNICORN_NPU_KERNELS", demo_kernels());
    command.env("UNICORN_NPU_KEYS", "512").env("UNICORN_NPU_DEADLINE_MS", "5000");
}

/// Sends a prompt that is long enough to be shared. Each `n` gives another prompt.
fn ask(server: &Daemon, n: u32) -> (u16, Value) {
    let text = format!("Tell me about the number {n}. ") + &"What is the capital of France? ".repeat(12);
    let body = json!({"model": "a/b", "messages": [{"role": "user", "content": text}], "max_tokens": 5, "temperature": 0});
    let (status, body) = server.exchange("POST", "/v1/chat/completions", &[], &body.to_string());
    (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}")))
}

/// The server's report about its NPU, once the device process answers. On a busy machine, it may answer late.
fn status(server: &Daemon) -> Value {
    let since = Instant::now();
    loop {
        let npu = status_now(server);
        if !is_silent(&npu) {
            return npu;
        }
        assert!(since.elapsed() < HANG, "the device process never answers: {npu}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn status_now(server: &Daemon) -> Value {
    let (code, body) = server.exchange("GET", "/status", &[], "");
    assert_eq!(code, 200, "{body}");
    serde_json::from_str::<Value>(&body).expect("JSON")["npu"].clone()
}

/// Whether the process with the model is not running, or did not answer.
fn is_silent(npu: &Value) -> bool {
    npu["reason"].as_str().is_some_and(|reason| reason.contains("is not running or does not answer"))
}

#[test]
fn a_server_says_what_its_npu_does() {
    let server = serve("auto", "");
    let npu = status(&server);
    assert_eq!(
        (&npu["mode"], &npu["in_use"], &npu["kv_heads"]),
        (&json!("auto"), &json!(true), &json!(1)),
        "{npu}"
    );
    assert_eq!(
        (&npu["is_double"], &npu["reason"], &npu["completed"]),
        (&json!(true), &json!(null), &json!(0)),
        "{npu}"
    );
    let (code, answer) = ask(&server, 1);
    assert_eq!(code, 200, "{answer}");
    let npu = status(&server);
    let completed = npu["completed"].as_u64().expect("a number");
    assert!(completed >= 6 && npu["waited_s"].as_f64() > Some(0.0), "six layers at least: {npu}");
    assert_eq!(server.metric("unicorn_npu_completed_total"), completed as f64);
    assert_eq!(server.metric_of_device("unicorn_npu_kv_heads"), 1.0);
    assert_eq!(server.metric("unicorn_npu_fallback_total{model_name=\"a/b\",reason=\"npu-timeout\""), 0.0);
}

#[test]
fn a_server_answers_though_its_npu_hangs_amid_a_prompt() {
    let mut server = serve("auto", &format!("run:{}=hang", SELF_TEST + TRIAL + 3));
    let (code, answer) = ask(&server, 1);
    assert_eq!((code, &answer["choices"][0]["finish_reason"]), (200, &json!("length")), "{answer}");
    let npu = status(&server);
    assert_eq!((&npu["in_use"], &npu["fallbacks"]), (&json!(false), &json!({"npu-timeout": 1})), "{npu}");
    assert!(npu["reason"].as_str().expect("a reason").starts_with("npu-timeout"), "{npu}");
    assert_eq!(server.metric("unicorn_npu_fallback_total{model_name=\"a/b\",reason=\"npu-timeout\""), 1.0);
    assert_eq!(server.metric_of_device("unicorn_npu_kv_heads"), 0.0);
    assert_eq!(server.metric("unicorn_device_losses_total"), 0.0);
    assert_eq!(ask(&server, 2).0, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0), "{:#?}", server.log);
}

/// Unloading a model ends its processes. The counts do not decrease, neither then nor with the next processes.
#[test]
fn the_counts_of_an_npu_outlive_its_process() {
    const FALLBACKS: &str = "unicorn_npu_fallback_total{model_name=\"a/b\",reason=\"npu-command-state\"";
    let faults = format!("run:{}=state", SELF_TEST + TRIAL + 3);
    let server = serve_with("auto", &faults, &[("NPU_KV_HEADS", "1"), ("ENGINE_IDLE_UNLOAD_S", "4")]);
    let (mut completed, mut waited) = (0.0, 0.0);
    for n in 1..=2 {
        assert_eq!(ask(&server, n).0, 200);
        let npu = status(&server);
        assert_eq!((&npu["fallbacks"], &npu["in_use"]), (&json!({"npu-command-state": n}), &json!(false)));
        assert!(npu["reason"].as_str().expect("a reason").starts_with("npu-command-state"), "{npu}");
        let now =
            ["unicorn_npu_completed_total", "unicorn_npu_waited_seconds_total"].map(|n| server.metric(n));
        assert!(now[0] > completed && now[1] > waited, "{now:?} after {completed} and {waited}");
        [completed, waited] = now;
        wait_until("the model is unloaded", || {
            server.exchange("GET", "/health", &[], "").1.contains("unloaded")
        });
        assert_eq!((server.metric(FALLBACKS), server.metric("unicorn_npu_kv_heads")), (f64::from(n), 0.0));
        assert_eq!(server.metric("unicorn_npu_completed_total"), completed);
        assert_eq!(server.metric("unicorn_npu_waited_seconds_total"), waited);
        let npu = status_now(&server);
        assert_eq!((&npu["in_use"], &npu["kv_heads"]), (&json!(false), &json!(1)), "{npu}");
        assert!(is_silent(&npu), "{npu}");
    }
}

#[test]
fn a_server_that_requires_its_npu_fails_the_request_with_the_code() {
    // Each NPU process hangs at the second layer of a prompt, and a new one replaces it.
    let mut server = serve("require", &format!("run:{}=timeout", SELF_TEST + TRIAL + 2));
    for n in 1..=3 {
        let (code, answer) = ask(&server, n);
        assert_eq!((code, &answer["error"]["code"]), (500, &json!("npu_failed")), "{answer}");
        let message = answer["error"]["message"].as_str().expect("a message");
        assert!(message.contains("npu-timeout: ") && !message.contains("GPU"), "{answer}");
    }
    server.wait_for_line("a coprocessor failed: npu-timeout: ");
    assert_eq!(server.metric("unicorn_npu_failures_total"), 3.0);
    assert_eq!(server.metric("unicorn_device_losses_total"), 0.0);
    // Prompts that are too short for an NPU are answered.
    let short = json!({"model": "a/b", "prompt": "Hello", "max_tokens": 3}).to_string();
    let (code, answer) = server.exchange("POST", "/v1/completions", &[], &short);
    assert_eq!(code, 200, "{answer}");
    // The current NPU is in use, and the GPU never took over the share of an NPU.
    let npu = status(&server);
    assert_eq!((&npu["mode"], &npu["fallbacks"]), (&json!("require"), &json!({})), "{npu}");
    assert_eq!((&npu["in_use"], &npu["reason"]), (&json!(true), &json!(null)), "{npu}");
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0), "{:#?}", server.log);
}

#[test]
fn a_server_starts_without_its_npu_or_refuses_to_as_it_was_told() {
    let mut server = serve("auto", "open:1+=no-device");
    let npu = status(&server);
    assert_eq!((&npu["in_use"], &npu["device"]), (&json!(false), &json!(null)), "{npu}");
    assert!(npu["reason"].as_str().expect("a reason").starts_with("npu-no-device"), "{npu}");
    assert_eq!(ask(&server, 1).0, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    let folder = demo::folder();
    let model = ["--model", folder.to_str().expect("UTF-8"), "--allow-software-vulkan", "--npu", "require"];
    for (faults, code, exit) in [
        ("open:1+=no-device", "npu-no-device", 78),
        ("load:1+=enospc", "npu-no-columns", 75),
        ("import:1=refused", "npu-dma-buf", 78),
        ("run:1=wrong", "npu-self-test", 76),
        ("run:1=poison", "npu-no-output", 76),
    ] {
        for (what, exit) in [(&["serve", "--port", "0"][..], exit), (&["generate", "--prompt", "Hello"], 1)] {
            let mut command = unicorn_on_software(&[what, &model].concat());
            with_double(&mut command);
            command.env("NPU_DOUBLE", faults).env("UNICORN_NPU_SHARING", "dma-buf");
            let (got, stdout, stderr) = output(command);
            assert_eq!((got, stdout.as_str()), (exit, ""), "{faults}: {stderr}");
            let error = stderr.lines().last().expect("a line");
            assert!(
                error.starts_with("error: the NPU is required") && error.contains(code),
                "{faults}: {error}"
            );
        }
    }
}

/// The share is measured at the first start, and every load of that server keeps it, so answers keep the same bits.
#[test]
fn a_load_after_a_loss_keeps_the_share_of_the_first() {
    let mut server = serve_with("auto", "", &[("NPU_PREFER", "energy"), ("NPU_SHARING", "dma-buf")]);
    let first = status(&server);
    let kv_heads = first["kv_heads"].as_u64().expect("a number");
    assert!(kv_heads >= 1 && first["in_use"] == json!(true), "{first}");
    assert_eq!(first["completed"], json!(0), "the measured jobs are not counted: {first}");
    let (code, before) = ask(&server, 1);
    assert_eq!(code, 200, "{before}");
    server.signal_device("KILL");
    let (code, after) = ask(&server, 1);
    assert_eq!((code, &after["choices"]), (200, &before["choices"]), "{after}");
    server.wait_for_line(&format!("computes {kv_heads} of 2 KV heads of prompts, as before"));
    let again = status(&server);
    assert_eq!((&again["kv_heads"], &again["in_use"]), (&first["kv_heads"], &json!(true)), "{again}");
    // An NPU that was not used at the first start is not used by a later load.
    let server = serve_with("auto", "open:1=no-device", &[("NPU_KV_HEADS", "1")]);
    let reason = status(&server)["reason"].clone();
    assert!(reason.as_str().expect("a reason").starts_with("npu-no-device"), "{reason}");
    server.signal_device("KILL");
    assert_eq!(ask(&server, 2).0, 200);
    assert_eq!(status(&server)["reason"], reason);
}

/// If no kernel can compute a share, it is refused, whether it is configured or to be measured.
#[test]
fn a_share_that_is_never_computed_is_refused() {
    let folder = demo::folder();
    let model = ["--model", folder.to_str().expect("UTF-8"), "--allow-software-vulkan", "--npu", "require"];
    // Only the kernels that walk over all keys, at most 512. The chunks of the trial see more keys.
    let kernels = demo_kernels_with("-w0-");
    for kv_heads in ["0", "1"] {
        let mut command = unicorn_on_software(&[&["generate", "--prompt", "Hello"][..], &model].concat());
        with_double(&mut command);
        command.env("UNICORN_NPU_KERNELS", kernels.path());
        command.env("UNICORN_NPU_KV_HEADS", kv_heads).env("UNICORN_NPU_KEYS", "2048");
        let (code, _, stderr) = output(command);
        let error = stderr.lines().last().expect("a line");
        assert!(code == 1 && error.contains("npu-kernel-missing"), "{kv_heads}: {stderr}");
    }
}

#[test]
fn the_benchmark_of_the_npu_has_a_line_for_each_share() {
    let folder = demo::folder();
    let bench =
        ["bench", "npu", "--model", folder.to_str().expect("UTF-8"), "--allow-software-vulkan", "--json"];
    let mut command = unicorn_on_software(&[&bench[..], &["--prompt-tokens", "96", "--runs", "1"]].concat());
    with_double(&mut command);
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, 0, "{stderr}");
    let report: Value = serde_json::from_str(&stdout).expect(&stdout);
    let shares: Vec<u64> =
        report["shares"].as_array().expect("shares").iter().filter_map(|s| s["kv_heads"].as_u64()).collect();
    assert_eq!((shares, &report["is_double"]), (vec![0, 1, 2], &json!(true)), "{report}");
    assert!(report["shares"][1]["tokens_per_s"].as_f64() > Some(0.0), "{report}");
    let covered = [0, 1, 2].map(|share| report["shares"][share]["npu_part_of_tokens"].as_f64());
    assert_eq!(covered, [Some(0.0), Some(1.0), Some(1.0)], "{report}");
    // If the NPU does not compute, nothing else is measured instead.
    let mut command = unicorn_on_software(&bench);
    with_double(&mut command);
    command.env("NPU_DOUBLE", "open:1=no-device");
    let (code, stdout, stderr) = output(command);
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    assert!(stderr.contains("npu-no-device"), "{stderr}");
}
