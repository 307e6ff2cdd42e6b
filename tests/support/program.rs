//! Runs of the program with and without a Vulkan device, checks of its output and errors, and the examples that tests
//! build.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::{policy, root};

/// A command that runs for longer hangs. It may build an example, or compile the kernels of a model.
const PATIENCE: Duration = Duration::from_secs(900);

/// The program without any Vulkan device, for commands that must fail before they need one.
pub fn unicorn(args: &[&str]) -> Command {
    without_devices(unicorn_on_software(args))
}

fn without_devices(mut command: Command) -> Command {
    command
        .env("VK_DRIVER_FILES", "/proc/nonexistent.json")
        .env("VK_ICD_FILENAMES", "/proc/nonexistent.json");
    command
}

/// `unicorn-lab` without any Vulkan device.
pub fn lab(args: &[&str]) -> Command {
    without_devices(lab_on_software(args))
}

/// `unicorn-lab` with the devices of the machine.
pub fn lab_on_software(args: &[&str]) -> Command {
    program(&lab_binary(), args)
}

/// The program with the devices of the machine. Commands that compute also need `--allow-software-vulkan`. Any message
/// of the validation layer fails the command.
pub fn unicorn_on_software(args: &[&str]) -> Command {
    program(&binary(), args)
}

fn program(binary: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(binary);
    command.args(args);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("UNICORN_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    // The service, with a configuration, may be installed on this machine.
    command.env("UNICORN_CONFIG_DIR", "/proc/nonexistent");
    command.env("UNICORN_HARDWARE_VALIDATION", policy().validation.to_string());
    command
}

/// A command that is run by a shell, after `setting`.
pub fn in_shell(setting: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{setting} exec \"$@\"")).arg("sh").arg(command.get_program());
    shell.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

/// Exit code, stdout and stderr. Panics if the command runs for longer than [`PATIENCE`].
#[track_caller]
pub fn output(mut command: Command) -> (i32, String, String) {
    let (shown, (sender, ended)) = (format!("{command:?}"), mpsc::channel());
    std::thread::spawn(move || sender.send(command.output()));
    let ended = ended.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{shown} runs for {PATIENCE:?}"));
    let Output { status, stdout, stderr } = ended.expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("an exit code, not a signal"), text(stdout), text(stderr))
}

/// What a command prints, which must succeed.
#[track_caller]
pub fn printed(command: Command) -> String {
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, 0, "{stderr}");
    stdout
}

/// The JSON that a command prints, which must succeed.
#[track_caller]
pub fn printed_json(command: Command) -> Value {
    serde_json::from_str(&printed(command)).expect("one JSON object")
}

/// Checks that a command fails with one `error:` line that contains all of `parts`. Warnings may come before it.
#[track_caller]
pub fn assert_error(command: Command, code: i32, parts: &[&str]) {
    let shown = format!("{command:?}");
    let (got, stdout, stderr) = output(command);
    assert_eq!((got, stdout.as_str()), (code, ""), "{shown}: {stderr}");
    let errors: Vec<&str> = stderr.lines().skip_while(|l| !l.starts_with("error: ")).collect();
    assert!(!errors.is_empty(), "{shown}: no error line in {stderr:?}");
    assert!(code == 2 || errors.len() == 1, "{shown}: more than a line: {stderr}");
    for part in parts {
        assert!(errors[0].contains(part), "{shown}: {part:?} is not in {:?}", errors[0]);
    }
}

/// The path of the program: cargo's, or the copy in `UNICORN_TEST_ROOT`.
pub fn binary() -> PathBuf {
    match std::env::var_os("UNICORN_TEST_ROOT") {
        Some(root) => Path::new(&root).join("unicorn"),
        None => env!("CARGO_BIN_EXE_unicorn").into(),
    }
}

fn lab_binary() -> PathBuf {
    env!("CARGO_BIN_EXE_unicorn-lab").into()
}

/// Builds an example of `Cargo.toml` with the profile of this test, and returns the path of its library or program.
/// `cargo test --test suite` builds no examples, and an older build would test old code.
pub fn example(name: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    built.entry(name.to_owned()).or_insert_with(|| build_example(name)).clone()
}

fn build_example(name: &str) -> PathBuf {
    // The path of the suite is TARGET/PROFILE/deps/suite-HASH.
    let own = std::env::current_exe().expect("a path");
    let folder = own.ancestors().nth(2).and_then(Path::file_name).expect("the folder of a profile");
    let profile = if folder == "debug" { "dev".as_ref() } else { folder };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root()).args(["build", "--locked", "--offline", "--example", name]);
    cargo.args(["--message-format", "json", "--profile"]).arg(profile);
    // With the variables that cargo sets for a test, dependencies' build scripts would run again.
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") || text == "OUT_DIR" {
            cargo.env_remove(&variable);
        }
    }
    let (code, messages, stderr) = output(cargo);
    assert_eq!(code, 0, "`cargo build --example {name}`: {stderr}");
    let built = messages.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
    let path = built
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| Some(PathBuf::from(message["filenames"][0].as_str()?)));
    path.unwrap_or_else(|| panic!("cargo names no file: {messages}"))
}
