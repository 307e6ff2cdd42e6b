//! The NPU's kernels on disk: their parsers on damaged files, and `unicorn npu`, which builds and lists them, with
//! stand-ins for the toolchain (tests/npu/toolchain).

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tempfile::TempDir;

use crate::support::fuzz_bodies::{npu_container, npu_transaction};
use crate::support::npu::{with_toolchain, with_tools_in_path};
use crate::support::program::{assert_error, output, unicorn};
use crate::support::{data, root};

/// Values that a wrong offset, size or count may have.
const NUMBERS: [u32; 12] = [0, 1, 2, 3, 5, 7, 16, 0xff, 0xffff, 1 << 31, u32::MAX - 3, u32::MAX];

/// The file with a few words, bytes or bits changed, cut short, or with a piece copied to another place.
fn damaged(file: &[u8], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..bytes.len());
        match rng.random_range(0..10) {
            0 => bytes.truncate(at.max(1)),
            1 => bytes[at] ^= 1 << rng.random_range(0..8),
            2 => bytes[at] = rng.random(),
            3 => {
                let end = rng.random_range(at..bytes.len());
                let to = rng.random_range(0..bytes.len());
                let piece = bytes[at..end].to_vec();
                bytes.splice(to..to, piece);
            }
            // Most faults change a whole word, because the file's numbers are words.
            which => {
                let at = at / 4 * 4;
                let number = match which {
                    4 => rng.random_range(0..bytes.len() as u32 + 8),
                    _ => NUMBERS[rng.random_range(0..NUMBERS.len())],
                };
                if let Some(word) = bytes.get_mut(at..at + 4) {
                    word.copy_from_slice(&number.to_le_bytes());
                }
            }
        }
    }
    bytes
}

#[test]
fn damaged_files_are_refused_in_a_line_or_are_sound() {
    let seed = 0x6e70;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for (name, body) in
        [("placeholder.xclbin", npu_container as fn(Vec<u8>) -> bool), ("placeholder.bin", npu_transaction)]
    {
        let file = std::fs::read(data("npu/xclbin").join(name)).unwrap();
        assert!(body(file.clone()), "{name}");
        let (mut accepted, mut refused) = (0, 0);
        for _ in 0..20_000 {
            if body(damaged(&file, &mut rng)) { accepted += 1 } else { refused += 1 }
        }
        println!("{name}: {accepted} accepted, {refused} refused");
        assert!(accepted > 200 && refused > 2000, "{name}: {accepted} accepted, {refused} refused");
    }
}

/// A machine with the stand-ins for mlir-aie, Peano and XRT, and a folder of kernels.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Machine {
        Machine { folder: tempfile::tempdir().unwrap() }
    }

    fn kernels(&self) -> PathBuf {
        self.folder.path().join("kernels")
    }

    /// `unicorn npu build-kernels` for the demo model, with more options.
    fn build(&self, options: &[&str]) -> Command {
        let model = root().join("models/demo");
        let mut what = vec!["--model", model.to_str().unwrap()];
        if !options.contains(&"--groups") {
            what.extend(["--groups", "2"]);
        }
        if !options.contains(&"--rows") {
            what.extend(["--rows", "256,512"]);
        }
        self.build_for(&what, options)
    }

    fn build_for(&self, model: &[&str], options: &[&str]) -> Command {
        let mut command = unicorn(&["npu", "build-kernels"]);
        command.args(model).args(options).arg("--kernels").arg(self.kernels());
        with_toolchain(&mut command);
        command.env("STAND_IN_LOG", self.log()).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("runs")
    }

    /// The runs of the tools since the last call: name and options.
    fn runs(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let _ = std::fs::remove_file(self.log());
        text.lines().map(str::to_owned).collect()
    }

    /// The lines of `unicorn npu list`.
    fn list(&self) -> Vec<String> {
        let mut command = unicorn(&["npu", "list", "--kernels"]);
        command.arg(self.kernels());
        let (code, stdout, stderr) = output(command);
        assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
        stdout.lines().map(str::to_owned).collect()
    }

    /// The names in the folder of kernels, sorted.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.kernels()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[track_caller]
fn built(command: Command) -> (String, String) {
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, 0, "{stderr}");
    (stdout, stderr)
}

/// The kernels of the demo model: 2 KV heads, a window of 64.
const DEMO: [&str; 4] = [
    "attention-d64-h2-w0-r256-k2048-g2",
    "attention-d64-h2-w0-r512-k2048-g2",
    "attention-d64-h2-w64-r256-k512-g2",
    "attention-d64-h2-w64-r512-k1024-g2",
];

#[test]
fn kernels_of_a_model_are_built_once() {
    let machine = Machine::new();
    assert_eq!(machine.list().len(), 1);
    assert!(machine.list()[0].ends_with("no kernels; `unicorn npu build-kernels` builds them"));
    let (stdout, stderr) = built(machine.build(&[]));
    assert!(stdout.ends_with(": 4 kernels built, 0 were there\n"), "{stdout}");
    for part in ["mlir-aie    1.1.0, ", "Peano       clang version 20.0.0", "xclbinutil  2.25.00, "] {
        assert!(stderr.contains(part), "{stderr}");
    }
    assert!(stderr.contains(&format!("[1/4] {}: building\n", DEMO[0])), "{stderr}");

    let runs = machine.runs();
    assert_eq!(runs.len(), 16, "{runs:#?}");
    let windowed: Vec<&String> = runs.iter().filter(|run| run.contains("--window 64")).collect();
    assert_eq!(
        windowed[0],
        "attention.py attention.py --head-dim 64 --heads-per-group 2 --rows 256 --keys 512 --groups 2 --window 64"
    );
    let clang = runs.iter().find(|run| run.contains("WALK_STEP=2")).unwrap();
    for part in
        ["--target=aie2-none-unknown-elf", "-DHEAD_DIM=64", "-DTILE=32", "-DPASS_ROWS=64", "/include "]
    {
        assert!(clang.contains(part), "{clang}");
    }
    let aiecc = runs.iter().find(|run| run.starts_with("aiecc.py")).unwrap();
    for part in ["--aie-generate-xclbin", "--aie-generate-npu-insts", "--peano=", "--no-xchesscc"] {
        assert!(aiecc.contains(part), "{aiecc}");
    }

    let listed = machine.list();
    assert_eq!(listed.len(), 4, "{listed:#?}");
    for (line, stem) in listed.iter().zip(DEMO) {
        assert!(
            line.starts_with(&format!("{stem}  valid, built with mlir-aie 1.1.0, Peano clang")),
            "{line}"
        );
    }
    let files: usize = machine.names().iter().filter(|name| name.starts_with("attention")).count();
    assert_eq!((files, machine.names().len()), (12, 13), "{:?}", machine.names());

    // A second run builds nothing. A run with another number of rows or groups builds only the kernels for it.
    let (stdout, stderr) = built(machine.build(&[]));
    assert!(stdout.ends_with(": 0 kernels built, 4 were there\n"), "{stdout}");
    assert!(stderr.contains(&format!("[2/4] {}: built before\n", DEMO[2])), "{stderr}");
    assert!(machine.runs().is_empty());
    let (stdout, _) = built(machine.build(&["--groups", "1,2", "--rows", "256"]));
    assert!(stdout.ends_with(": 2 kernels built, 2 were there\n"), "{stdout}");
    let (stdout, _) = built(machine.build(&["--force", "--rows", "512"]));
    assert!(stdout.ends_with(": 2 kernels built, 0 were there\n"), "{stdout}");
}

#[test]
fn what_changed_is_built_again() {
    let machine = Machine::new();
    let options = ["--rows", "256"];
    built(machine.build(&options));
    // Another tool version, and a record of another source.
    let again = |command: Command, expected: &str| {
        let (stdout, _) = built(command);
        assert!(stdout.contains(expected), "{stdout}");
    };
    let mut newer = machine.build(&options);
    newer.env("STAND_IN_XRT", "2.26.00");
    again(newer, ": 2 kernels built");
    again(machine.build(&options), ": 2 kernels built");
    again(machine.build(&options), ": 0 kernels built");
    let record = machine.kernels().join(format!("{}.json", DEMO[0]));
    let text = std::fs::read_to_string(&record).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["key"] = "that of another source".into();
    std::fs::write(&record, json.to_string()).unwrap();
    again(machine.build(&options), ": 1 kernels built, 1 were there");
    // A damaged file is listed as damaged, and built again.
    let bin = machine.kernels().join(format!("{}.bin", DEMO[0]));
    let mut bytes = std::fs::read(&bin).unwrap();
    bytes.pop();
    std::fs::write(&bin, bytes).unwrap();
    let listed = machine.list();
    let expected = format!("{}  not valid: ", DEMO[0]);
    assert!(
        listed.iter().any(|line| line.starts_with(&expected) && line.contains("build it again")),
        "{listed:#?}"
    );
    again(machine.build(&options), ": 1 kernels built, 1 were there");
    assert!(machine.list().iter().all(|line| line.contains("  valid, ")), "{:#?}", machine.list());
}

#[test]
fn a_failing_tool_is_shown_with_its_last_lines() {
    let machine = Machine::new();
    for tool in ["attention.py", "tables.py", "clang++", "aiecc.py"] {
        let mut command = machine.build(&["--rows", "256"]);
        command.env("STAND_IN_FAIL", tool);
        let (code, stdout, stderr) = output(command);
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        let error = stderr.lines().last().unwrap();
        let log = machine.kernels().join(format!("{}.log", DEMO[0]));
        let expected = format!(
            "error: {tool}: failed with exit status 3, while it built {}; all of the output is in {}",
            DEMO[0],
            log.display()
        );
        assert_eq!(error, expected);
        assert!(stderr.contains(&format!("  {tool}: no such register\n")), "{stderr:?}");
        // attention.py and tables.py write their file to the standard output.
        if !tool.ends_with(".py") || tool == "aiecc.py" {
            assert!(stderr.contains("line 99\n") && !stderr.contains("line 50\n"), "{stderr}");
            assert!(std::fs::read_to_string(&log).unwrap().contains("line 50\n"));
        }
        let names = machine.names();
        let left: Vec<_> = names.iter().filter(|name| *name != ".lock" && !name.ends_with(".log")).collect();
        assert!(left.is_empty(), "{names:?}");
    }
    // The next build does not need the log.
    built(machine.build(&["--rows", "256"]));
    assert!(machine.names().iter().all(|name| !name.ends_with(".log")));
}

#[test]
fn what_a_tool_writes_wrong_is_refused_and_the_old_kernel_stays() {
    let machine = Machine::new();
    built(machine.build(&["--rows", "256"]));
    let before = machine.names();
    for (bad, part) in [
        (
            "xclbin",
            "what is no kernel of this program: byte 856 of the container: a partition of 5 columns; 1 to 4",
        ),
        (
            "bin",
            "what is no kernel of this program: word 3 of the instructions: a size of 384 bytes; the file's 40",
        ),
    ] {
        let mut command = machine.build(&["--rows", "256", "--force"]);
        command.env("STAND_IN_BAD", bad);
        let (code, _, stderr) = output(command);
        assert_eq!(code, 1);
        let error = stderr.lines().last().unwrap();
        let beginning = format!("error: aiecc.py: wrote for {} ", DEMO[0]);
        assert!(error.starts_with(&beginning) && error.contains(part), "{error}");
        assert!(machine.list().iter().all(|line| line.contains("  valid, ")), "{:#?}", machine.list());
    }
    let after: Vec<String> = machine.names().into_iter().filter(|name| !name.ends_with(".log")).collect();
    assert_eq!(after, before);
}

/// Waits until the process that the hanging stand-in started has ended.
#[track_caller]
fn assert_child_ended(machine: &Machine) {
    let child = std::fs::read_to_string(machine.log().with_extension("child")).unwrap();
    // A killed child may be a zombie until its new parent waits for it.
    let state = || std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
    let ended = until(|| state().is_empty() || state().contains(") Z "));
    assert!(ended, "{}", state());
}

/// Waits until the condition is true, or until the time is over.
fn until(so: impl Fn() -> bool) -> bool {
    (0..3000).any(|_| {
        let is_so = so();
        if !is_so {
            std::thread::sleep(Duration::from_millis(10));
        }
        is_so
    })
}

#[test]
fn a_tool_that_hangs_is_ended_with_what_it_started() {
    let machine = Machine::new();
    let mut command = machine.build(&["--rows", "256", "--tool-limit-s", "15"]);
    command.env("STAND_IN_HANG", "aiecc.py");
    let (code, _, stderr) = output(command);
    assert_eq!(code, 1);
    let error = stderr.lines().last().unwrap();
    assert!(error.starts_with("error: aiecc.py: not done after 15 s, and ended; --tool-limit-s"), "{error}");
    assert_child_ended(&machine);
}

#[test]
fn an_interrupted_build_leaves_no_tool_behind() {
    let machine = Machine::new();
    // The remains of a killed build.
    std::fs::create_dir_all(machine.kernels().join(".build-left")).unwrap();
    let mut command = machine.build(&["--rows", "256"]);
    command.env("STAND_IN_HANG", "aiecc.py").stderr(Stdio::piped());
    let build = command.spawn().unwrap();
    assert!(until(|| machine.log().with_extension("child").exists()));
    assert!(!machine.kernels().join(".build-left").exists());
    // One build at a time.
    assert_error(
        machine.build(&["--rows", "256"]),
        1,
        &["another `unicorn npu build-kernels` builds into this folder"],
    );
    rustix::process::kill_process(rustix::process::Pid::from_child(&build), rustix::process::Signal::INT)
        .unwrap();
    let ended = build.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let stderr = String::from_utf8(ended.stderr).unwrap();
    assert!(stderr.contains("error: aiecc.py: ended, since this command was interrupted"), "{stderr}");
    assert_child_ended(&machine);
    let names = machine.names();
    assert!(names.iter().all(|name| !name.starts_with(".build-")), "{names:?}");
}

/// Tools run in separate folders, where a path relative to the user's folder is not valid.
#[test]
fn relative_paths_are_those_of_the_persons_folder() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root().join("tests/npu/toolchain"), folder.path().join("tools")).unwrap();
    let mut command = unicorn(&["npu", "build-kernels", "--head-dim", "64", "--heads-per-group", "2"]);
    command.args(["--groups", "1", "--rows", "256", "--kernels", "kernels"]);
    command.args(["--python", "tools/bin/python-with-mlir-aie", "--peano", "tools/llvm-aie"]);
    with_tools_in_path(&mut command);
    command.current_dir(&folder).env("PYTHONDONTWRITEBYTECODE", "1");
    built(command);
    assert!(folder.path().join("kernels/attention-d64-h2-w0-r256-k2048-g1.xclbin").exists());
}

#[test]
fn missing_and_old_tools_are_named_with_what_to_install() {
    let machine = Machine::new();
    let refused = |command: Command, lines: &[&str], error: &str| {
        let (code, _, stderr) = output(command);
        assert_eq!(code, 1, "{stderr}");
        for line in lines {
            assert!(stderr.lines().any(|l| l.contains(line)), "{line}: {stderr}");
        }
        let expected = format!("error: the NPU's toolchain: {error}; the lines above say what to install");
        assert_eq!(stderr.lines().last().unwrap(), expected);
    };
    let peano = "pip install llvm-aie -f https://github.com/Xilinx/llvm-aie/releases/";
    let mlir_aie = "pip install mlir_aie -f https://github.com/Xilinx/mlir-aie/releases/";

    let mut command = machine.build(&[]);
    command.env("STAND_IN_MISSING", "mlir-aie");
    refused(
        command,
        &[&format!("has no mlir-aie: `python3 -m {mlir_aie}"), "Peano       clang version"],
        "no mlir-aie that can be used",
    );

    let mut command = machine.build(&[]);
    command.env("PEANO_INSTALL_DIR", "/proc/nonexistent");
    refused(
        command,
        &["/proc/nonexistent/bin/clang++ cannot be run: No such file", peano],
        "no Peano that can be used",
    );

    let mut command = machine.build(&[]);
    command.env("STAND_IN_XRT", "2.13.466");
    refused(
        command,
        &["xclbinutil  2.13.466 is too old, 2.18 or newer is needed: install XRT for Ryzen AI"],
        "no xclbinutil that can be used",
    );

    let mut command = machine.build(&[]);
    command.args(["--python", "/proc/nonexistent/python3"]);
    // The option is given twice.
    assert_eq!(output(command).0, 2);
    let mut command = unicorn(&["npu", "build-kernels", "--head-dim", "128", "--heads-per-group", "2"]);
    command.args(["--python", "/proc/nonexistent/python3", "--kernels"]).arg(machine.kernels());
    command.env("PATH", "/proc/nonexistent").env_remove("PEANO_INSTALL_DIR");
    refused(
        command,
        &[
            "mlir-aie    not looked for: Python /proc/nonexistent/python3 cannot be run",
            "Peano       not found: `python3",
            "xclbinutil  not found: ",
        ],
        "no mlir-aie, no Peano, no xclbinutil that can be used",
    );
}

#[test]
fn shapes_are_checked_before_tools_are_looked_for() {
    let machine = Machine::new();
    let shape = ["--head-dim", "128", "--heads-per-group", "2", "--window", "1024"];
    let (stdout, _) = built(machine.build_for(&shape, &["--rows", "512", "--keys", "2048,8192"]));
    assert!(stdout.contains(": 6 kernels built"), "{stdout}");
    for groups in [2, 4] {
        let name = format!("attention-d128-h2-w1024-r512-k2048-g{groups}.xclbin");
        assert!(machine.names().contains(&name), "{name}");
    }
    for (model, part) in [
        (
            &["--head-dim", "96", "--heads-per-group", "2"][..],
            "head_dim 64, 128 or 256, and this model has 96",
        ),
        (&["--head-dim", "128", "--heads-per-group", "3"], "2 or 4 query heads"),
        (&["--head-dim", "128", "--heads-per-group", "2", "--window", "100"], "a window of 100 keys"),
        (&["--head-dim", "128", "--heads-per-group", "2", "--rows", "100"], "256 or 512 rows, not 100"),
        (&["--head-dim", "128", "--heads-per-group", "2", "--keys", "1000"], "a power of two of keys"),
        (&["--model", "/proc/nonexistent"], "/proc/nonexistent"),
        (
            &["--model", data("gemma3/tiny-a").to_str().unwrap()],
            "head_dim 64, 128 or 256, and this model has 32",
        ),
    ] {
        assert_error(machine.build_for(model, &[]), 1, &[part]);
    }
    for options in
        [&["--head-dim", "128"][..], &[], &["--heads-per-group", "2"], &["--model", "m", "--window", "64"]]
    {
        assert_error(machine.build_for(options, &[]), 2, &[]);
    }
}
