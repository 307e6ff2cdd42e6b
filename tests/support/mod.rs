//! What test files share, with a file for each subject. This file has the paths of the test data, and [`skip`].
//!
//! [`skip`] is the only way to skip a test, because `tidy` refuses `#[ignore]`. It panics unless the given name is in
//! `tests/skips.toml`, with the reason and the condition for skipping the test.
//!
//! Test files import from here and never from each other. `tidy` checks that.

mod allocation;
pub mod app;
pub mod checkpoints;
pub mod daemon;
pub mod damaged;
pub mod demo;
mod device;
pub mod driver;
pub mod energy;
pub mod engine;
pub mod fake_runner;
#[allow(dead_code)]
#[path = "../../fuzz/bodies.rs"]
pub mod fuzz_bodies;
pub mod goldens;
pub mod grammars;
pub mod http;
pub mod hub;
pub mod images;
pub mod json;
pub mod kernel_bench;
pub mod kv_entries;
pub mod legacy_files;
pub mod lists;
#[cfg(feature = "npu")]
pub mod npu;
pub mod packed_files;
pub mod program;
pub mod reference;
pub mod server;
pub mod systemd;
pub mod tables;
pub mod texts;
pub mod tokenizers;
pub mod tools;
pub mod waits;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;

pub use allocation::{PARSER_BYTES, bounded_allocation, peak_allocation};
pub use device::{device, device_is_software, policy};

/// Names the file to which each skip appends a line `name<TAB>test`. `tools/test.py` counts those lines, so that a
/// skipped test is not reported as passed.
const SKIP_LOG: &str = "UNICORN_SKIP_LOG";

/// One entry of `tests/skips.toml`.
#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
pub struct Skip {
    /// Why the test cannot always run.
    pub reason: String,
    /// The condition, in words, for skipping it.
    pub when: String,
}

/// The repository root. On another machine, `UNICORN_TEST_ROOT` is a folder with the needed files of it.
pub fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        std::env::var_os("UNICORN_TEST_ROOT").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
    })
}

/// A path below `tests/data`.
pub fn data(path: impl AsRef<Path>) -> PathBuf {
    root().join("tests/data").join(path)
}

/// Whether the environment asks for all inputs, `VARIABLE=all`, instead of a quick part: `UNICORN_TEST_REAL` (`make
/// test-real`), `UNICORN_TEST_DEMO` (`make test-demo`), `UNICORN_TEST_KERNELS` (`make test-kernels`) or
/// `UNICORN_TEST_RANDOM` (`make test-random`).
pub fn wants_all(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "all")
}

/// The choices of the input with the number `turn`: one of them, or with `UNICORN_TEST_KERNELS=all` all of them.
pub fn in_turn<T>(choices: &[T], turn: usize) -> &[T] {
    if wants_all("UNICORN_TEST_KERNELS") { choices } else { &choices[turn % choices.len()..][..1] }
}

/// How many random inputs a test tries: `all` in `make test-random`, otherwise a quarter.
pub fn rounds(all: usize) -> usize {
    if wants_all("UNICORN_TEST_RANDOM") { all } else { all / 4 }
}

/// Reports that the calling test cannot run here. The test must return immediately after, and check nothing:
///
/// ```text
/// let Some(file) = real_tokenizer() else { return support::skip("real-tokenizer") };
/// ```
///
/// Panics if `name` is not listed in `tests/skips.toml`.
#[track_caller]
pub fn skip(name: &str) {
    let path = root().join("tests/skips.toml");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let listed = parse_skips(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let Some(skip) = listed.get(name) else {
        panic!(
            "skip {name:?} is not listed in tests/skips.toml: run the test, or list it there with its reason"
        );
    };
    eprintln!("SKIP {name}: {}", skip.reason);
    if let Some(log) = std::env::var_os(SKIP_LOG) {
        let thread = std::thread::current();
        let line = format!("{name}\t{}\n", thread.name().unwrap_or("?"));
        // A short line in one write with O_APPEND is not mixed with the lines of parallel tests.
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .unwrap_or_else(|e| panic!("cannot append to {SKIP_LOG} {log:?}: {e}"));
    }
}

/// Parses the list of skips. Every entry must have a reason and a condition.
pub fn parse_skips(text: &str) -> Result<BTreeMap<String, Skip>, String> {
    let skips: BTreeMap<String, Skip> = toml::from_str(text).map_err(|e| e.to_string())?;
    for (name, skip) in &skips {
        if skip.reason.trim().is_empty() || skip.when.trim().is_empty() {
            return Err(format!("skip {name:?} needs a reason and a condition"));
        }
    }
    Ok(skips)
}

mod tests {
    #[test]
    #[should_panic(expected = "not listed in tests/skips.toml")]
    fn an_unlisted_skip_panics() {
        super::skip("no-such-skip");
    }

    #[test]
    fn every_committed_skip_has_a_reason_and_a_condition() {
        let text = std::fs::read_to_string(super::root().join("tests/skips.toml")).unwrap();
        assert!(super::parse_skips(&text).unwrap().contains_key("real-tokenizer"));
        assert!(super::parse_skips("[x]\nreason = \"\"\nwhen = \"never\"").is_err());
        assert!(super::parse_skips("[x]\nreason = \"r\"").is_err());
    }
}
