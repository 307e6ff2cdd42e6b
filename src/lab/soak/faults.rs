//! The faults that a soak test injects through the server's fault layer, one after the other.
//!
//! A server ends after two losses within a minute that no request explains. So the next fault is armed only when more
//! time has passed since the last loss. Each fault has a different text, because the layer executes each text only
//! once, in whichever process reads it first.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time within which a second loss ends the engine, plus a margin for the detection of each loss.
pub const APART: Duration = Duration::from_secs(65);

/// The Vulkan call, the effect, and whether the device is lost.
const FAULTS: [(&str, &str, bool); 6] = [
    ("submit", "DEVICE_LOST", true),
    ("submit", "SEGV", true),
    ("wait", "DEVICE_LOST", true),
    ("submit", "OUT_OF_DEVICE_MEMORY", false),
    ("submit", "HANG", true),
    ("wait", "UNKNOWN", true),
];

/// Number of calls before the first fault, so that several requests share the failing step.
const FIRST_CALL: usize = 4;

pub struct Faults {
    file: PathBuf,
    /// Number of the next fault. The list of faults is repeated.
    next: usize,
    /// Number of faults until now, and the number of those that lost the device.
    pub armed: u64,
    pub losses: u64,
    /// When the last fault was over.
    last: Option<Instant>,
}

/// A fault that was armed.
pub struct Armed {
    /// The text for the layer.
    pub text: String,
    pub loses: bool,
    pub since: Instant,
}

impl Faults {
    pub fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), next: 0, armed: 0, losses: 0, last: None }
    }

    pub fn is_due(&self) -> bool {
        self.wait().is_zero()
    }

    /// Time until the next fault may be armed.
    pub fn wait(&self) -> Duration {
        self.last.map_or(Duration::ZERO, |last| APART.saturating_sub(last.elapsed()))
    }

    /// Notes that the last fault is over.
    pub fn over(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Arms the next fault of the list, or the next one that loses the device.
    pub fn arm(&mut self, must_lose: bool) -> std::io::Result<Armed> {
        let (call, effect, loses) = loop {
            let fault = FAULTS[self.next % FAULTS.len()];
            self.next += 1;
            if fault.2 || !must_lose {
                break fault;
            }
        };
        let text = format!("{call}:{}={effect}", FIRST_CALL + self.next);
        self.armed += 1;
        self.losses += u64::from(loses);
        // The layer may read the file at any time, and must not find an incomplete text.
        let folder = self.file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut partial = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
        partial.write_all(text.as_bytes())?;
        partial.persist(&self.file).map_err(|error| error.error)?;
        Ok(Armed { text, loses, since: Instant::now() })
    }

    /// Whether the layer reports that the fault has occurred. It writes a line that ends with the fault to a second
    /// file.
    pub fn has_struck(&self, armed: &Armed) -> bool {
        let struck = std::fs::read_to_string(self.file.with_extension("struck")).unwrap_or_default();
        struck.lines().any(|line| line.split(' ').next_back() == Some(&armed.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_faults_have_the_same_words_and_the_file_has_the_last() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("faults");
        let mut faults = Faults::new(&file);
        let texts: Vec<String> = (0..40).map(|_| faults.arm(false).expect("written").text).collect();
        let mut different = texts.clone();
        different.sort();
        different.dedup();
        assert_eq!(different.len(), 40);
        assert_eq!(std::fs::read_to_string(&file).expect("there").as_str(), texts[39]);
        assert_eq!((faults.armed, faults.losses), (40, 33));
        assert!((0..12).all(|_| faults.arm(true).expect("written").loses));
    }

    #[test]
    fn a_fault_waits_for_the_last_one_to_be_long_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut faults = Faults::new(&folder.path().join("faults"));
        let armed = faults.arm(false).expect("written");
        assert!(faults.is_due() && !faults.has_struck(&armed));
        faults.over();
        assert!(!faults.is_due());
        std::fs::write(folder.path().join("faults.struck"), format!("x\n0123 {}\n", armed.text))
            .expect("written");
        assert!(faults.has_struck(&armed));
    }
}
