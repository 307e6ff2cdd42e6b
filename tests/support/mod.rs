//! What test files share, a file for each kind. This file has the places of the test data, and [`skip`].
//!
//! [`skip`] is the only way to skip a test, because `tidy` refuses `#[ignore]`. It panics unless the given name stands
//! in `tests/skips.toml`, with the reason and the condition under which the test is skipped.
//!
//! Test files import from here and never from each other; `tidy` checks that.

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
pub mod json;
pub mod kernel_bench;
pub mod legacy_files;
#[cfg(feature = "npu")]
pub mod npu;
pub mod packed_files;
pub mod program;
pub mod reference;
pub mod server;
pub mod systemd;
pub mod texts;
pub mod tokenizers;
pub mod tools;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;

pub use allocation::{PARSER_BYTES, bounded_allocation, peak_allocation};
pub use device::{device, policy};

/// Names the file to which each skip appends a line `name<TAB>test`; `tools/test.py` counts those lines, so
/// that a skipped test is not reported as a passed one.
const SKIP_LOG: &str = "UNICORN_SKIP_LOG";

/// One entry of `tests/skips.toml`.
#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
pub struct Skip {
    /// Why the test cannot always run, for the reader of the report.
    pub reason: String,
    /// The condition, in words, under which it is skipped.
    pub when: String,
}

/// The repository root; a suite that was carried to another machine finds what it needs of it in `UNICORN_TEST_ROOT`.
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

/// Reports that the calling test cannot run here; the test returns right after, once and with nothing checked:
///
/// ```text
/// let Some(file) = real_tokenizer() else { return support::skip("real-tokenizer") };
/// ```
///
/// Panics where `name` is not listed in `tests/skips.toml`: a skip nobody agreed to is a failure.
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
        // One write of one short line: with O_APPEND, parallel tests do not mix theirs.
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .unwrap_or_else(|e| panic!("cannot append to {SKIP_LOG} {log:?}: {e}"));
    }
}

/// The list, checked: every entry gives a reason and a condition.
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
    fn data_lies_beside_the_suites() {
        assert!(super::data("a/b").ends_with("tests/data/a/b"));
    }

    #[test]
    fn the_committed_list_is_complete() {
        let text = std::fs::read_to_string(super::root().join("tests/skips.toml")).unwrap();
        assert!(super::parse_skips(&text).unwrap().contains_key("real-tokenizer"));
        assert!(super::parse_skips("[x]\nreason = \"\"\nwhen = \"never\"").is_err());
        assert!(super::parse_skips("[x]\nreason = \"r\"").is_err());
    }
}
