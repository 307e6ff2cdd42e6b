//! Runs of the program: with and without a Vulkan device, its output, and the one line of its errors.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::policy;

/// The program without any Vulkan device, for what must fail before it needs one.
pub fn unicorn(args: &[&str]) -> Command {
    let mut command = unicorn_on_software(args);
    command.env("VK_DRIVER_FILES", "/nonexistent.json").env("VK_ICD_FILENAMES", "/nonexistent.json");
    command
}

/// The program with the devices of the machine; commands that compute are given `--allow-software-vulkan`. A single
/// message of the validation layer fails the command.
pub fn unicorn_on_software(args: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(args);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("UNICORN_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    // A machine may have the service installed.
    command.env("UNICORN_CONFIG_DIR", "/nonexistent");
    command.env("UNICORN_HARDWARE_VALIDATION", policy().validation.to_string());
    command
}

/// Exit code, stdout and stderr.
pub fn output(mut command: Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("an exit code, not a signal"), text(stdout), text(stderr))
}

/// Holds a failing command to one `error:` line with every one of `parts`; warnings may stand before it.
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

/// The program: cargo's, or the one that was carried along.
pub fn binary() -> PathBuf {
    match std::env::var_os("UNICORN_TEST_ROOT") {
        Some(root) => Path::new(&root).join("unicorn"),
        None => env!("CARGO_BIN_EXE_unicorn").into(),
    }
}
