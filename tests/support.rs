//! What every suite shares: where the test data lies, and the one way to skip a test.
//!
//! A skip is allowed only for a name that stands in `tests/skips.toml` with its reason and the condition under
//! which it applies; any other panics. `#[ignore]` is refused by `tidy`, so this is the only door.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use serde::Deserialize;
use unicorn::checkpoint::{Checkpoint, Encoding, Tensor};
use unicorn::gpu::{Device, DevicePolicy, Rehearsal};
use unicorn::tensor::{Bits, DType, Scheme};
use unicorn::text::{ChatFiles, ChatTemplate};

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

/// The program: cargo's, or the one that was carried along.
pub fn binary() -> PathBuf {
    match std::env::var_os("UNICORN_TEST_ROOT") {
        Some(root) => Path::new(&root).join("unicorn"),
        None => env!("CARGO_BIN_EXE_unicorn").into(),
    }
}

/// A path below `tests/data`.
pub fn data(path: impl AsRef<Path>) -> PathBuf {
    root().join("tests/data").join(path)
}

/// The device every test runs on: the one `UNICORN_TEST_DEVICE` names, else the best GPU, else software Vulkan;
/// with the validation layer, whose every message fails the test that waits next, unless `UNICORN_TEST_VALIDATION` is 0: for
/// machines that have no such layer.
pub fn policy() -> DevicePolicy {
    DevicePolicy {
        device: std::env::var("UNICORN_TEST_DEVICE").ok(),
        allow_software: true,
        validation: std::env::var("UNICORN_TEST_VALIDATION").map_or(true, |value| value != "0"),
        ..DevicePolicy::default()
    }
}

/// That device: one and the same for all of a test, which is a thread; opened once for many tests, and as often as tests
/// run side by side. A driver that computes on the CPU has one thread for each.
pub fn device() -> Arc<Device> {
    const MOST: usize = 4;
    static OPENED: [OnceLock<Arc<Device>>; MOST] = [const { OnceLock::new() }; MOST];
    /// How many tests have each.
    static USERS: Mutex<[usize; MOST]> = Mutex::new([0; MOST]);

    struct Mine(usize);
    impl Mine {
        fn new() -> Mine {
            let count = std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST));
            let mut users = USERS.lock().unwrap();
            let (at, fewest) = users[..count].iter_mut().enumerate().min_by_key(|(_, n)| **n).expect("one");
            *fewest += 1;
            Mine(at)
        }
    }
    impl Drop for Mine {
        fn drop(&mut self) {
            USERS.lock().unwrap()[self.0] -= 1;
        }
    }
    thread_local!(static MINE: Mine = Mine::new());

    let open = || {
        let device = Device::open(&policy()).unwrap_or_else(|e| panic!("{e}"));
        // For a layer that checks addresses.
        let separate_buffers = std::env::var_os("UNICORN_TEST_BUFFERS_APART").is_some();
        device.rehearse(Rehearsal { separate_buffers, ..Rehearsal::default() });
        device
    };
    MINE.with(|mine| OPENED[mine.0].get_or_init(open).clone())
}

/// Looks tensors up by name, which the product does not: it walks all of them.
pub trait ByName {
    fn get(&self, name: &str) -> Option<Tensor<'_>>;
}

impl ByName for Checkpoint {
    fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.iter().find(|tensor| tensor.name == name)
    }
}

/// Element type and bytes of a tensor that is not quantized.
pub fn plain<'a>(tensor: &Tensor<'a>) -> Option<(DType, &'a [u8])> {
    match tensor.encoding {
        Encoding::Plain { dtype, data } => Some((dtype, data)),
        _ => None,
    }
}

/// The least and the largest integer that a scheme stores; `None` for floating-point weights.
pub fn integers(scheme: Scheme) -> Option<(i8, i8)> {
    match scheme {
        Scheme::F32 | Scheme::F16 | Scheme::Bf16 => None,
        Scheme::Int8Row | Scheme::Int { bits: Bits::Eight, .. } => Some((-128, 127)),
        Scheme::Int { bits, scales, .. } => {
            let all = 1 << bits.count();
            let least = if scales.is_symmetric() { -all / 2 } else { 0 };
            Some((least, least + (all - 1)))
        }
    }
}

/// The built-in chat template, with Gemma's special tokens.
pub fn gemma_template() -> ChatTemplate {
    ChatTemplate::from_checkpoint(ChatFiles::default()).expect("the built-in template compiles")
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

/// The system's allocator, and how much of it each thread holds.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

impl Counting {
    fn add(bytes: isize) {
        // A thread that ends has no counter any more; nothing is measured there.
        let _ = HELD.try_with(|held| {
            held.set(held.get() + bytes);
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
        });
    }
}

// SAFETY: each call goes to the system's allocator as it came, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller's promises are those that `System` asks for.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller's promises are those that `System` asks for.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: the caller's promises are those that `System` asks for.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        Self::add(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    // SAFETY: the caller's promises are those that `System` asks for.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::add(size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `run` returns, and the most bytes that this thread held beyond those it held before.
pub fn peak_allocation<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let result = run();
    (result, (PEAK.get() - before).max(0) as usize)
}

/// What a parser may hold beyond its input's own size times 12, where a suite has no reason for more.
pub const PARSER_BYTES: usize = 64 << 10;

/// What `run` returns on damaged input of `len` bytes, and the most bytes that it held; panics where that is more than 12
/// times `len` and `fixed`. `what` names the input.
pub fn bounded_allocation<T>(
    len: usize,
    fixed: usize,
    what: impl std::fmt::Display,
    run: impl FnOnce() -> T,
) -> (T, usize) {
    let (result, peak) = peak_allocation(run);
    assert!(peak <= 12 * len + fixed, "{what}: {peak} bytes for {len}");
    (result, peak)
}

mod tests {
    #[test]
    fn allocations_of_a_thread_are_counted() {
        let (kept, peak) = super::peak_allocation(|| {
            drop(vec![1u8; 1 << 20]);
            vec![0u8; 1 << 10]
        });
        assert_eq!(kept.len(), 1 << 10);
        assert!((1 << 20..2 << 20).contains(&peak), "{peak}");
        assert!(super::peak_allocation(|| drop(kept)).1 < 1 << 10);
    }

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
