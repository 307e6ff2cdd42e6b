//! How fast a device reads its heaps: the measurement, its file, and what shows it.

use serde_json::{Value, json};
use unicorn::gpu::{Device, DeviceKind};
use unicorn::model::heaps::{NotMeasured, ReadTest, is_due, measure_for_load, measured};

use crate::support::checkpoints::tiny_model;
use crate::support::daemon::Daemon;
use crate::support::device;
use crate::support::program::{output, printed, printed_json, unicorn_on_software};

const SMALL: ReadTest = ReadTest { shape: [512, 1024], most_bytes: 1 << 20, least_bytes: 1 << 18 };

#[test]
fn each_heap_for_weights_is_read() {
    let device = device();
    let speeds = measured(&device, &SMALL).expect("it measures").expect("a clock, and room");
    println!("{speeds:?}");
    let machine = device.machine();
    let of_weights: Vec<usize> = machine.weight_heaps().iter().map(|&i| machine.heaps[i].index).collect();
    for (heap, speed) in speeds.iter().enumerate() {
        assert_eq!(speed.is_some(), of_weights.contains(&heap), "heap {heap}: {speeds:?}");
        assert!(*speed != Some(0));
    }
}

#[test]
fn a_heap_without_room_and_a_device_without_a_clock_have_no_speed() {
    let machine = device().machine();
    // No matrix fits into so few bytes.
    let test = ReadTest { most_bytes: 1000, ..SMALL };
    let name = machine.heaps[machine.weight_heaps()[0]].name.clone();
    assert_eq!(measured(&device(), &test).expect("nothing is read"), Err(NotMeasured::NoRoom(name)));
    // A heap that is smaller than the test is left out.
    let test = ReadTest { least_bytes: 1 << 62, ..SMALL };
    let speeds = measured(&device(), &test).expect("nothing is read").expect("no error");
    assert!(speeds.iter().all(Option::is_none), "{speeds:?}");

    let null = Device::open_null().expect("a device");
    assert_eq!(measured(&null, &SMALL).expect("nothing is read"), Err(NotMeasured::NoClock));
    // The load continues without a speed, and the next load measures again.
    measure_for_load(&null).expect("a load without a speed");
    assert!(is_due(&null));
}

#[test]
fn a_load_measures_no_device_that_is_a_cpu() {
    let is_cpu = device().info().kind == DeviceKind::Cpu;
    assert!(!is_cpu || !is_due(&device()));
}

#[test]
fn measured_speeds_are_those_of_plan_load_and_status() {
    let cache = tempfile::tempdir().expect("a folder");
    let run = |words: &[&str]| {
        let mut command = unicorn_on_software(words);
        command.env("UNICORN_CACHE_DIR", cache.path());
        command
    };
    let report = |words: &[&str]| -> Value {
        let (_, json, stderr) =
            output(run(&[&["doctor", "--json", "--allow-software-vulkan"], words].concat()));
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {stderr}"))
    };
    let found = |report: &Value, code: &str| -> Option<String> {
        let mut findings = report["findings"].as_array().expect("a list").iter();
        Some(findings.find(|finding| finding["code"] == code)?["found"].as_str().expect("a text").to_owned())
    };
    let model = tiny_model();
    let model = model.path().to_str().expect("UTF-8");
    let plan = || printed_json(run(&["plan", model, "--json", "--allow-software-vulkan"]));
    let of_weights = || {
        let listed = printed_json(run(&["devices", "--json"]));
        let name = device().info().name.clone();
        let device = listed["devices"].as_array().expect("a list").iter().find(|one| one["name"] == *name);
        let heaps = device.expect("the device")["heaps"].as_array().expect("a list").clone();
        heaps.iter().position(|heap| heap["device_local"] == true).map(|i| heaps[i]["read"].clone())
    };

    // Nothing was measured yet.
    assert_eq!(of_weights(), Some(Value::Null));
    assert!(!found(&report(&[]), "heaps").expect("the heaps").contains("read at"));
    let heap = |plan: &Value| {
        let mut heaps = plan["heaps"].as_array().expect("a list").iter();
        heaps.find(|heap| heap["device_local"] == true).expect("a heap")["read_bytes_per_s"].clone()
    };
    assert_eq!(heap(&plan()), Value::Null);

    let measured = report(&["--heaps"]);
    assert_eq!(found(&measured, "heaps-unread"), None, "{measured}");
    let line = found(&measured, "heaps").expect("the heaps");
    assert!(line.contains(" device-local, read at ") && line.contains("was measured at 2"), "{line}");
    let read = of_weights().expect("a heap");
    let speed = read["bytes_per_s"].as_u64().unwrap_or_else(|| panic!("{read}"));
    assert!(speed > 0 && read["measured_at"].as_u64() > Some(1_700_000_000), "{read}");

    // Later commands measure nothing, and know the speed.
    assert_eq!(found(&report(&[]), "heaps"), Some(line));
    assert!(printed(run(&["devices"])).contains(&format!(", read at {:.1} GB/s", speed as f64 / 1e9)));
    let planned = plan();
    assert_eq!(heap(&planned), json!(speed), "{planned}");
    let mut server = Daemon::start_as(&[], |command| {
        command.env("UNICORN_CACHE_DIR", cache.path());
    });
    let chosen = server.line("FFN weights: ");
    assert!(chosen.contains(planned["ffn_heap"]["why"].as_str().expect("a text")), "{chosen}");
    let status: Value = serde_json::from_str(&server.exchange("GET", "/status", &[], "").1).expect("JSON");
    assert!(heaps_read(&status).contains(&json!(speed)), "{status}");
    let metrics = server.exchange("GET", "/metrics", &[], "").1;
    assert!(metrics.contains("unicorn_gpu_heap_read_bytes_per_second{"), "{metrics}");
}

fn heaps_read(status: &Value) -> Vec<Value> {
    let heaps = status["memory"]["heaps"].as_array().expect("a list").iter();
    heaps.map(|heap| heap["read_bytes_per_s"].clone()).collect()
}
