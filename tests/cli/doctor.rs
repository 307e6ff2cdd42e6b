//! `unicorn doctor` on test machines: the file trees in `tests/data/machines`, which `tests/data/machines/README.md`
//! describes, and random changes of them. `docs/doctor.md` has a table of all their findings.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::checkpoints::copy_of;
use crate::support::program::{output, unicorn, unicorn_on_software};
use crate::support::{data, root};

const PAGE: &str = "docs/doctor.md";
/// The machine with only good findings.
const HEALTHY: &str = "healthy-8945hs";
/// The page's table leaves out what was found, if it is longer and the cause explains it.
const MAX_FOUND_BYTES: usize = 48;

/// A file of `tests/data/machines`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// The machine whose tree is the base of this one.
    base: Option<String>,
    #[serde(default)]
    args: Vec<String>,
    /// Files, links and folders of the base that this machine does not have.
    #[serde(default)]
    remove: Vec<String>,
    /// All findings that are not good, in the order of the checks, as `severity code`.
    expected: Vec<String>,
    exit_status: i32,
    #[serde(default)]
    files: BTreeMap<String, String>,
    #[serde(default)]
    links: BTreeMap<String, String>,
}

fn case(name: &str) -> (Case, String) {
    let path = data("machines").join(format!("{name}.toml"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())), text)
}

fn names() -> Vec<String> {
    let entries = fs::read_dir(data("machines")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter_map(|name| name.strip_suffix(".toml").map(str::to_owned)).collect();
    names.sort_by_key(|name| (name != HEALTHY, name.clone()));
    names
}

/// Creates a machine's file tree, after that of its base.
fn make(case: &Case, tree: &Path) {
    if let Some(base) = &case.base {
        make(&self::case(base).0, tree);
    }
    for path in &case.remove {
        let path = tree.join(path);
        match path.symlink_metadata().unwrap_or_else(|error| panic!("{}: {error}", path.display())).is_dir() {
            true => fs::remove_dir_all(&path).unwrap(),
            false => fs::remove_file(&path).unwrap(),
        }
    }
    for (path, text) in &case.files {
        let path = tree.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    for (path, target) in &case.links {
        let path = tree.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, &path).unwrap();
    }
}

fn tree(case: &Case) -> TempDir {
    let tree = TempDir::new().unwrap();
    make(case, tree.path());
    tree
}

/// Exit code, stdout and stderr of the doctor on a tree.
fn doctor(tree: &Path, args: &[&str]) -> (i32, String, String) {
    let root = tree.to_str().unwrap();
    output(unicorn(&[&["doctor", "--root", root], args].concat()))
}

/// Exit code, report and stderr of the doctor on a tree.
fn report(tree: &Path, args: &[&str]) -> (i32, Value, String) {
    let (status, json, stderr) = doctor(tree, &[args, &["--json"]].concat());
    (status, serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}{stderr}")), stderr)
}

fn args<'a>(case: &'a Case, more: &[&'a str]) -> Vec<&'a str> {
    case.args.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}"))
}

#[test]
fn each_machine_has_its_expected_findings() {
    let mut codes = BTreeSet::new();
    for name in names() {
        let (case, source) = case(&name);
        assert!(source.starts_with("# "), "{name}: the head of the file names no source");
        let tree = tree(&case);
        let (status, report, stderr) = report(tree.path(), &args(&case, &[]));
        let findings = report["findings"].as_array().unwrap();
        let bad = findings.iter().filter(|finding| finding["severity"] != "ok");
        let got: Vec<String> =
            bad.clone().map(|f| format!("{} {}", text(f, "severity"), text(f, "code"))).collect();
        assert_eq!(got, case.expected, "{name}: {report}");
        assert_eq!(
            (status, &report["exit_status"]),
            (case.exit_status, &Value::from(case.exit_status)),
            "{name}"
        );
        assert_eq!(stderr.starts_with("error: "), status == 1, "{name}: {stderr}");
        for finding in bad {
            codes.insert(text(finding, "code").to_owned());
            // Every bad finding has a cause and a remedy, except for the kinds that need none.
            let severity = text(finding, "severity");
            let has_remedy = !finding["remedies"].as_array().unwrap().is_empty();
            let is_explained = finding["cause"].is_string()
                || severity == "problem"
                || text(finding, "code").ends_with("unread");
            assert!(is_explained, "{name}: no cause in {finding}");
            assert!(has_remedy || severity == "note", "{name}: no remedy in {finding}");
        }

        // `--fix` prints the lines of all remedies, and nothing else.
        let remedies = findings.iter().flat_map(|finding| finding["remedies"].as_array().unwrap());
        let lines: Vec<&str> = remedies.map(|remedy| text(remedy, "line")).collect();
        let (fix_status, script, _) = doctor(tree.path(), &args(&case, &["--fix"]));
        assert_eq!((fix_status, script.lines().collect::<Vec<_>>()), (case.exit_status, lines), "{name}");
    }
    // The page explains every code that a machine shows.
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let absent: Vec<&String> = codes.iter().filter(|code| !page.contains(&format!("`{code}`"))).collect();
    assert!(absent.is_empty(), "{PAGE} does not explain {absent:?}");
}

#[test]
fn remedies_are_the_expected_commands() {
    for (name, code, line) in [
        ("no-render-group", "render-group", "sudo usermod -aG render \"$USER\""),
        (
            "gtt-default-27b",
            "does-not-fit",
            "# kernel parameter to add: ttm.pages_limit=5767168 (docs/doctor.md says how)",
        ),
        (
            "gttsize-set",
            "gttsize-set",
            "# kernel parameter to add: ttm.pages_limit=16777216 (docs/doctor.md says how)",
        ),
        ("nomodeset", "nomodeset", "# kernel parameter to remove: nomodeset (docs/doctor.md says how)"),
        ("debian-12-mesa", "mesa-old", "sudo apt install -t bookworm-backports mesa-vulkan-drivers"),
        ("llvmpipe-only", "no-radv", "sudo pacman -S vulkan-radeon"),
        (
            "blacklisted",
            "no-amdgpu",
            "sudo sed -i '/^ *blacklist  *amdgpu/d' /etc/modprobe.d/vfio.conf && sudo modprobe amdgpu",
        ),
    ] {
        let (case, _) = case(name);
        let tree = tree(&case);
        let (_, report, _) = report(tree.path(), &args(&case, &[]));
        let finding = report["findings"].as_array().unwrap().iter().find(|f| f["code"] == code).unwrap();
        let lines: Vec<&str> =
            finding["remedies"].as_array().unwrap().iter().map(|remedy| text(remedy, "line")).collect();
        assert!(lines.contains(&line), "{name}: {lines:?}");
    }
    // Fedora has a command for kernel parameters.
    let (mut case, _) = case("nomodeset");
    case.files.insert("etc/os-release".into(), "ID=fedora\n".into());
    let (_, script, _) = doctor(tree(&case).path(), &["--fix"]);
    assert!(script.contains("sudo grubby --update-kernel=ALL --remove-args=\"nomodeset\"\n"), "{script}");
}

#[test]
fn the_users_environment_and_options_are_considered() {
    let (case, _) = case("port-taken");
    let tree = tree(&case);
    let root = tree.path().to_str().unwrap();
    let run = |variable: (&str, &str)| {
        let mut command = unicorn(&["doctor", "--root", root]);
        command.env(variable.0, variable.1);
        output(command)
    };
    // The listener on [::] has the port on every address. Port 8011 is free.
    assert_eq!(run(("UNICORN_SERVER_PORT", "8011")).0, 0);
    let (status, _, stderr) = run(("UNICORN_SERVER_HOST", "0.0.0.0"));
    assert_eq!(status, 1);
    assert!(stderr.contains("1 problem of this machine prevents `unicorn serve` from running"), "{stderr}");
    let mut command = unicorn(&["doctor", "--root", root]);
    command.env("UNICORN_SERVER_PORT", "8011").env("UNICORN_SERVER_OLLAMA_PORT", "8010");
    let (status, text, _) = output(command);
    assert!(status == 1 && text.contains("server.ollama_port selects another port"), "{text}");

    // With --allow-software-vulkan a software device is a warning.
    let tree = self::tree(&self::case("no-render-group").0);
    let (status, text, _) = doctor(tree.path(), &["--allow-software-vulkan"]);
    assert_eq!(status, 0, "{text}");
    assert!(text.contains("warning  software-device") && text.contains("warning  render-group"), "{text}");
}

/// Writes a file of a tree.
fn write(tree: &Path, path: &str, text: &str) {
    let path = tree.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn the_configuration_is_read_below_the_root() {
    const MAIN: &str = "etc/unicorn/config.toml";
    let tree = tree(&case("port-taken").0);
    let tree = tree.path();
    let status = |args: &[&str]| {
        let mut command = unicorn(&[&["doctor", "--root", tree.to_str().unwrap()], args].concat());
        // The configuration of the real machine, which must be ignored.
        command.env("UNICORN_CONFIG_DIR", tree.join("other"));
        let (status, text, stderr) = output(command);
        assert!(text.contains("port 80"), "{text}{stderr}");
        status
    };
    write(tree, "other/config.toml", "[server]\nport = 8011\n");
    assert_eq!(status(&[]), 1, "port 8010 is taken");
    write(tree, MAIN, "[server]\nport = 8011\n");
    assert_eq!(status(&[]), 0);
    write(tree, "etc/unicorn/conf.d/10-port.toml", "[server]\nport = 8010\n");
    assert_eq!(status(&[]), 1);
    let other = tree.join("other/config.toml");
    assert_eq!(status(&["--config", other.to_str().unwrap()]), 0, "the file is named with --config");
    write(tree, MAIN, "[server]\nport = \"x\"\n");
    let (status, _, stderr) = doctor(tree, &[]);
    assert!(status == 1 && stderr.contains(MAIN) && stderr.contains("server.port"), "{stderr}");
}

#[test]
fn a_missing_model_is_a_finding_in_a_complete_report() {
    const MAIN: &str = "etc/unicorn/config.toml";
    let tree = tree(&case(HEALTHY).0);
    let tree = tree.path();
    let found = |args: &[&str], expected: i32| {
        let (status, report, _) = report(tree, args);
        assert_eq!((status, &report["exit_status"]), (expected, &Value::from(expected)), "{report}");
        let findings = report["findings"].as_array().unwrap().clone();
        // The report continues after this finding.
        assert!(
            ["device", "port", "npu"].iter().all(|code| findings.iter().any(|f| f["code"] == *code)),
            "{report}"
        );
        let bad: Vec<Value> = findings.into_iter().filter(|f| f["severity"] != "ok").collect();
        assert!(bad.len() <= 1, "{report}");
        bad.into_iter().next().unwrap_or_default()
    };
    let configure = |model: &str, dir: &str| {
        write(tree, MAIN, &format!("[model]\npath = {model:?}\n[models]\ndir = {dir:?}\n"));
    };
    let lines = |finding: &Value| -> Vec<String> {
        let remedies = finding["remedies"].as_array().unwrap();
        remedies.iter().map(|remedy| text(remedy, "line").to_owned()).collect()
    };

    configure("google/gemma-3-1b-it", "/srv/models");
    let finding = found(&[], 1);
    assert_eq!((text(&finding, "severity"), text(&finding, "code")), ("problem", "model-not-pulled"));
    assert!(text(&finding, "found").contains("google/gemma-3-1b-it"), "{finding}");
    let root = tree.join("srv/models").display().to_string();
    assert_eq!(text(&finding, "cause"), format!("it is not in {root}"));
    assert_eq!(lines(&finding), ["unicorn pull google/gemma-3-1b-it"]);
    assert_eq!(found(&["--disk"], 1)["code"], "model-not-pulled", "nothing is measured");
    let (status, script, _) = doctor(tree, &["--fix"]);
    assert_eq!((status, script.as_str()), (1, "unicorn pull google/gemma-3-1b-it\n"));
    let (_, plain, stderr) = doctor(tree, &[]);
    assert!(plain.contains("problem  model-not-pulled") && plain.contains("1 problem, "), "{plain}");
    assert!(stderr.starts_with("error: 1 problem of this machine"), "{stderr}");
    // With a published shape the doctor needs no model.
    assert_eq!(found(&["--shape", "gemma-3-1b", "--scheme", "int4-g128"], 0), Value::Null);

    // In the remedy, the file's name is quoted for the shell.
    configure("a/b:it's one.gguf", "/srv/models");
    assert_eq!(lines(&found(&[], 1)), [r"unicorn pull 'a/b:it'\''s one.gguf'"]);
    fs::create_dir_all(tree.join("srv/models/models--google--gemma-3-1b-it/blobs")).unwrap();
    write(tree, "srv/models/models--google--gemma-3-1b-it/blobs/0123.incomplete", "some");
    configure("google/gemma-3-1b-it", "/srv/models");
    let finding = found(&[], 1);
    assert_eq!(text(&finding, "code"), "model-partial");
    assert_eq!(lines(&finding), ["unicorn pull google/gemma-3-1b-it"]);

    // Without a models folder, it is not known which user's cache a server on that machine would use.
    configure("google/gemma-3-1b-it", "");
    let finding = found(&[], 0);
    assert_eq!((text(&finding, "severity"), text(&finding, "code")), ("note", "fit-unknown"));

    // A configured path is below the root of that machine.
    fs::create_dir_all(tree.join("opt")).unwrap();
    symlink(self::root().join("models/demo"), tree.join("opt/demo")).unwrap();
    configure("/opt/demo", "");
    assert_eq!(found(&[], 0), Value::Null);
    configure("/opt/nothing", "");
    assert_eq!(found(&[], 1)["code"], "model-unreadable");

    // Without --root, the doctor looks into the caches of this user.
    let mut command = unicorn(&["doctor", "--json", "--model", "google/gemma-3-1b-it"]);
    command.env("HF_HUB_CACHE", tree.join("srv/nothing"));
    let (status, json, stderr) = output(command);
    let report: Value = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    let mut findings = report["findings"].as_array().unwrap().iter();
    let finding = findings.find(|f| f["code"] == "model-not-pulled").unwrap_or_else(|| panic!("{json}"));
    assert_eq!((status, lines(finding)), (1, vec!["unicorn pull google/gemma-3-1b-it".to_owned()]));
}

#[test]
fn a_models_memory_is_planned_and_its_disk_measured() {
    let tree = tree(&case(HEALTHY).0);
    let folder = copy_of(&root().join("models/demo"));
    let measured = || {
        let model = folder.path().to_str().unwrap();
        let (status, text, stderr) = doctor(tree.path(), &["--model", model, "--disk"]);
        assert_eq!(status, 0, "{text}{stderr}");
        assert!(text.contains("ok       fit ") && text.contains(" tokens\n"), "{text}");
        let line = text.lines().find(|line| line.contains(" disk"));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let line = measured();
    assert!(line.contains("not enough data to measure the speed of the disk"), "{line}");
    std::fs::File::create(folder.path().join("more")).unwrap().set_len(64 << 20).unwrap();
    let line = measured();
    let words: Vec<&str> = line.split_whitespace().collect();
    let rate: f64 = words[words.iter().position(|word| *word == "GB/s,").unwrap() - 1].parse().unwrap();
    assert!(rate > 0.0, "{line}");

    let (status, _, stderr) = doctor(tree.path(), &["--model", "/proc/nonexistent"]);
    assert_eq!(status, 1);
    assert!(stderr.starts_with("error: "), "{stderr}");
    let (_, text, _) = doctor(tree.path(), &["--disk"]);
    assert!(text.contains("disk-unread            not measured"), "{text}");
}

#[test]
fn this_machine_has_findings() {
    let (_, json, stderr) = output(unicorn_on_software(&["doctor", "--json", "--allow-software-vulkan"]));
    let report: Value = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    let codes: Vec<&str> =
        report["findings"].as_array().unwrap().iter().map(|finding| text(finding, "code")).collect();
    assert!(codes.contains(&"machine") && codes.contains(&"memory"), "{codes:?}");
    // The device that the tests use, which may be software.
    assert!(codes.contains(&"device") || codes.contains(&"software-device"), "{json}");

    let (status, _, stderr) = output(unicorn(&["doctor"]));
    assert_eq!(status, 1, "without a Vulkan device: {stderr}");
    let folder = TempDir::new().unwrap();
    let kept = |path: &Path, args: &[&str]| {
        let mut command = unicorn(&[&["doctor"], args].concat());
        command.env("UNICORN_KV_DISK_PATH", path);
        output(command).1
    };
    let (new, tree) = (folder.path().join("kv"), tree(&case(HEALTHY).0));
    let text = kept(&new, &[]);
    assert!(text.contains("ok       kv-disk ") && !new.exists(), "{text}");
    let text = kept(&new, &["--root", tree.path().to_str().unwrap()]);
    assert!(text.contains("note     kv-disk-unread "), "{text}");
    let text = kept(Path::new("/proc/version"), &[]);
    assert!(
        text.contains("problem  kv-disk-unusable ") && text.contains("kv.disk.path: cannot open"),
        "{text}"
    );
    let keys = folder.path().join("keys");
    let missing = folder.path().join("nothing");
    fs::write(&keys, "sk-0123456789abcdef\n").unwrap();
    let with = |variables: &[(&str, &Path)], args: &[&str]| {
        let mut command = unicorn(&[&["doctor"], args].concat());
        command.envs(variables.iter().map(|(name, file)| (format!("UNICORN_SERVER_{name}"), *file)));
        output(command).1
    };
    let text = with(&[("API_KEY_FILE", &keys)], &[]);
    assert!(text.contains("ok       server-options ") && !text.contains("sk-0123"), "{text}");
    let text = with(&[("API_KEY_FILE", &keys)], &["--root", tree.path().to_str().unwrap()]);
    assert!(text.contains("note     server-options-unread "), "{text}");
    for unusable in [&[("API_KEY_FILE", &*missing)][..], &[("TLS_CERT", &missing), ("TLS_KEY", &keys)]] {
        let text = with(unusable, &[]);
        let problem = "problem  server-options-unusable ";
        assert!(text.contains(problem) && text.contains(missing.to_str().unwrap()), "{text}");
    }
    let list = folder.path().join("list.toml");
    for (path, code) in [("org/nothing", "model-not-pulled"), ("/proc/version", "model-unreadable")] {
        fs::write(&list, format!("[[models.serve]]\npath = {path:?}\n")).unwrap();
        let mut command = unicorn(&["doctor", "--config", list.to_str().unwrap()]);
        command.env("HF_HUB_CACHE", "/proc/nonexistent");
        let text = output(command).1;
        assert!(text.contains(&format!("problem  {code} ")) && text.contains(path), "{text}");
    }
    let (status, _, stderr) = output(unicorn(&["doctor", "--root", "/proc/nonexistent"]));
    assert_eq!((status, stderr.contains("there is no such folder")), (1, true), "{stderr}");
}

#[test]
fn the_doctor_reads_the_output_of_unicorn_devices() {
    let (status, json, stderr) = output(unicorn_on_software(&["devices", "--json"]));
    assert_eq!(status, 0, "{stderr}");
    let (mut case, _) = case("no-render-group");
    case.files.insert("vulkan.json".into(), json);
    let (_, text, _) = doctor(tree(&case).path(), &[]);
    assert!(!text.contains("vulkan-unread"), "{text}");
}

/// Changes a tree at random: files are truncated, changed, filled with garbage or far too long, removed, or replaced by
/// folders.
fn mutate(tree: &Path, paths: &[String], random: &mut StdRng) {
    for _ in 0..random.random_range(1..8) {
        let path = tree.join(paths.choose(random).unwrap());
        let bytes = fs::read(&path).unwrap_or_default();
        let garbage = |random: &mut StdRng, n| (0..n).map(|_| random.random()).collect::<Vec<u8>>();
        let new: Vec<u8> = match random.random_range(0..7) {
            0 => bytes[..random.random_range(0..=bytes.len())].to_vec(),
            1 => garbage(random, 100),
            2 => b"9".repeat(random.random_range(1..2 << 20)),
            3 => {
                let mut bytes = bytes;
                for _ in 0..4 {
                    if let Some(at) = bytes.len().checked_sub(1).map(|last| random.random_range(0..=last)) {
                        bytes[at] = random.random();
                    }
                }
                bytes
            }
            // Repeats each digit, so that numbers reach the limit of 64 bits and exceed it.
            4 => {
                let n = random.random_range(1..20);
                let text = String::from_utf8_lossy(&bytes);
                text.chars()
                    .flat_map(|c| std::iter::repeat_n(c, if c.is_ascii_digit() { n } else { 1 }))
                    .collect::<String>()
                    .into()
            }
            kind => {
                let _ = fs::remove_file(&path);
                if kind == 5 {
                    let _ = fs::create_dir_all(&path);
                }
                continue;
            }
        };
        // A folder that an earlier change created stays.
        let _ = fs::write(&path, new);
    }
}

#[test]
fn random_changes_of_a_machine_never_cause_an_internal_error() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let names = names();
    for _ in 0..150 {
        let name = names.choose(&mut random).unwrap();
        let (case, _) = case(name);
        let tree = tree(&case);
        let mut paths: Vec<String> = case.files.keys().chain(case.links.keys()).cloned().collect();
        paths.extend(self::case(HEALTHY).0.files.into_keys());
        // With an unreadable configuration every command fails with one line and no report, so these files are kept.
        paths.retain(|path| !path.starts_with("etc/unicorn/"));
        mutate(tree.path(), &paths, &mut random);
        let args = ["--shape", "gemma-3-4b", "--scheme", "int4-g128", "--json"];
        let (status, json, stderr) = doctor(tree.path(), &args);
        assert!(matches!(status, 0 | 1), "seed {seed}, {name}: {status}: {stderr}");
        assert!(
            !stderr.contains("panicked") && !stderr.contains("internal error"),
            "seed {seed}, {name}: {stderr}"
        );
        let report: Value =
            serde_json::from_str(&json).unwrap_or_else(|error| panic!("seed {seed}, {name}: {error}"));
        assert_eq!(report["exit_status"], status, "seed {seed}, {name}");
    }
}

/// A cell of a Markdown table.
fn cell(text: &str) -> String {
    if text.is_empty() { " |".into() } else { format!(" {} |", text.replace('|', "\\|")) }
}

/// A remedy as a cell of the table of findings names it.
fn remedy(remedy: &Value) -> String {
    let line = text(remedy, "text");
    match text(remedy, "kind") {
        "command" => format!("`{line}`"),
        "kernel-parameter" => format!("add the kernel parameter `{line}`"),
        "kernel-parameter-removed" => format!("remove the kernel parameter `{line}`"),
        "firmware" => format!("in the firmware: {line}"),
        _ => line.to_owned(),
    }
}

/// The rows of the page's table of findings. There is one row for each code and cause that a machine shows; the first
/// machine gives the numbers and names in it. The page explains the codes of unread files once.
fn rows() -> Vec<String> {
    let mut rows = BTreeMap::new();
    for name in names() {
        let (case, _) = case(&name);
        let (_, report, _) = report(tree(&case).path(), &args(&case, &[]));
        let findings = report["findings"].as_array().unwrap();
        for finding in findings.iter().filter(|finding| finding["severity"] != "ok") {
            let (code, found) = (text(finding, "code"), text(finding, "found"));
            if code.ends_with("-unread") {
                continue;
            }
            let meaning = match finding["cause"].as_str() {
                None => found.to_owned(),
                Some(cause) if found.len() > MAX_FOUND_BYTES => cause.to_owned(),
                Some(cause) => format!("{found}: {cause}"),
            };
            let key = (code.to_owned(), finding["cause"].as_str().unwrap_or(found).to_owned());
            let remedies: Vec<String> = finding["remedies"].as_array().unwrap().iter().map(remedy).collect();
            let cells: [&str; 3] = [&format!("`{code}`"), &meaning, &remedies.join("; ")];
            let row = cells.iter().fold("|".to_owned(), |row, text| row + &cell(text));
            rows.entry(key).or_insert(row);
        }
    }
    rows.into_values().collect()
}

/// The doctor's report about a machine, without the good findings.
fn example(name: &str) -> String {
    let (case, _) = case(name);
    let (status, report, _) = doctor(tree(&case).path(), &args(&case, &[]));
    let lines: Vec<&str> = report.lines().filter(|line| !line.starts_with("ok ")).collect();
    let report = lines.join("\n");
    format!("```text\n$ unicorn doctor\n{}\n```\n\nExit status {status}.\n", report.trim_start_matches('\n'))
}

#[test]
fn the_page_has_each_finding_and_an_example() {
    const TABLE: &str =
        "<!-- findings: written by the test `doctor::the_page_has_each_finding_and_an_example` -->\n";
    const EXAMPLE: &str = "<!-- example: written by the same test -->\n";
    const END: &str = "<!-- end of what the test writes -->\n";
    let path = root().join(PAGE);
    let page = fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(TABLE).expect("the mark of the findings");
    let (_, tail) = rest.split_once(END).expect("the mark of the end");
    let table = format!("| code | what it means | what to do |\n|---|---|---|\n{}\n", rows().join("\n"));
    let wanted = format!("{head}{TABLE}\n{table}\n{EXAMPLE}\n{}\n{END}{tail}", example("no-render-group"));
    if std::env::var_os("UNICORN_TEST_RECORD").is_some() {
        fs::write(&path, wanted).unwrap();
    } else {
        let hint = "UNICORN_TEST_RECORD=1 cargo test --test suite doctor:: writes it again";
        assert_eq!(page, wanted, "{PAGE} is not what the doctor says; {hint}");
    }
}
