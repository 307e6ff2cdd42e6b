//! API keys: where they come from, and the check of a key that a request sent.
//!
//! The server keeps a key as its SHA-256 digest, and compares it with all digests in constant time. It never shows a
//! key: not in the log, not in an error, not by `Debug`. Keys come from a file or the environment, never from the
//! command line, which every user of the machine can read. A warning names the position of a key that is too short: all
//! short keys can be tried.

use std::fmt;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use sha2::Digest as _;
use sha2::Sha256;
use subtle::{Choice, ConstantTimeEq};

use crate::file;

/// The most bytes of a file of keys, of certificates, or of one private key.
pub(in crate::api) const MAX_FILE_BYTES: u64 = 1 << 20;
const MAX_KEYS: usize = 1024;
/// The minimum number of characters of a key without a warning: 16 hexadecimal digits are 64 bits, which cannot all be
/// tried over a network.
const LONG_ENOUGH: usize = 16;
/// The maximum number of positions of short keys in a warning.
const MAX_NAMED: usize = 8;

/// The keys that a server accepts. A server without keys requires none.
#[derive(Clone, Default)]
pub struct Keys(Vec<Digest>);

/// A key's SHA-256, which identifies the key.
pub(in crate::api) type Digest = [u8; 32];

#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{source_name}: {problem}")]
    Key { source_name: String, problem: String },
}

impl Keys {
    /// Reads a file with one key per line. A file without a key is an error: a server that was told to ask for a key
    /// must not ask for none.
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let keys = Self::read_any(path)?;
        if keys.is_empty() {
            let problem = "holds no key: expected one per line".into();
            return Err(KeysError::Key { source_name: path.display().to_string(), problem });
        }
        Ok(keys)
    }

    /// Reads a file with one key per line, or none. Empty lines and lines that begin with `#` are no keys.
    pub fn read_any(path: &Path) -> Result<Self, KeysError> {
        let bytes = read_secret(path).map_err(|error| KeysError::File { path: path.to_owned(), error })?;
        let source_name = path.display().to_string();
        let problem = |problem: String| KeysError::Key { source_name: source_name.clone(), problem };
        let text = std::str::from_utf8(&bytes).map_err(|_| problem("expected text in UTF-8".into()))?;
        let (mut keys, mut short) = (Self::default(), Vec::new());
        for (n, line) in text.lines().map(str::trim).enumerate() {
            if !line.is_empty() && !line.starts_with('#') {
                keys.add(line).map_err(|why| problem(format!("line {}: {why}", n + 1)))?;
                short.extend((line.len() < LONG_ENOUGH).then_some(n + 1));
            }
        }
        warn_of_short(&source_name, "line", &short);
        Ok(keys)
    }

    /// The keys in the text of the variable `name`, with commas or blanks between them. An empty text has none.
    pub fn from_variable(name: &str, text: &str) -> Result<Self, KeysError> {
        let (mut keys, mut short) = (Self::default(), Vec::new());
        let each = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|key| !key.is_empty());
        for (n, key) in each.enumerate() {
            keys.add(key).map_err(|why| KeysError::Key {
                source_name: name.to_owned(),
                problem: format!("key {}: {why}", n + 1),
            })?;
            short.extend((key.len() < LONG_ENOUGH).then_some(n + 1));
        }
        warn_of_short(name, "key", &short);
        Ok(keys)
    }

    fn add(&mut self, key: &str) -> Result<(), String> {
        if !key.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("a key is letters, digits and signs of ASCII, without blanks".into());
        }
        if self.0.len() == MAX_KEYS {
            return Err(format!("more than {MAX_KEYS} keys"));
        }
        self.0.push(digest(key.as_bytes()));
        Ok(())
    }

    /// The keys of both.
    pub fn and(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The digest of the key that was sent, if it is one of these. The time does not depend on which key it is, nor on
    /// whether it is any.
    pub(in crate::api) fn find(&self, sent: &[u8]) -> Option<Digest> {
        let sent = digest(sent);
        let found = self.0.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(&sent));
        bool::from(found).then_some(sent)
    }
}

/// Warns of short keys. `at` are their places in their source, counted in `unit`s, so the log shows no key.
fn warn_of_short(source_name: &str, unit: &str, at: &[usize]) {
    let (named, further) = at.split_at(at.len().min(MAX_NAMED));
    let mut named: Vec<String> = named.iter().map(usize::to_string).collect();
    if !further.is_empty() {
        named.push(format!("{} more", further.len()));
    }
    let Some(last) = named.pop() else { return };
    let places = match named.is_empty() {
        true => format!("{unit} {last}"),
        false => format!("{unit}s {} and {last}", named.join(", ")),
    };
    tracing::warn!(
        "{source_name}: {places}: a key of fewer than {LONG_ENOUGH} characters can be guessed; `openssl rand -hex 24` \
         makes one that cannot"
    );
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

fn digest(key: &[u8]) -> Digest {
    Sha256::digest(key).into()
}

/// Reads a file that other users should not be able to read, and warns if they can.
pub(in crate::api) fn read_secret(path: &Path) -> io::Result<Vec<u8>> {
    let (file, metadata) = file::open(path)?;
    let bytes = file::read_to_end(file, MAX_FILE_BYTES)?;
    if metadata.permissions().mode() & 0o007 != 0 {
        let path = path.display();
        tracing::warn!("{path}: every user of this machine can open it: `chmod o= {path}`");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole_and_never_shown() {
        let keys = Keys::from_variable("V", " alpha,beta\tgamma,, ").unwrap();
        let found = ["alpha", "beta", "gamma"].map(|key| keys.find(key.as_bytes()).expect("one of them"));
        assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2]);
        let alone = Keys::from_variable("W", "beta").unwrap();
        assert_eq!(alone.find(b"beta"), Some(found[1]), "the same together with others");
        for no in ["", "alph", "alphaa", "ALPHA", "alpha,beta", "V"] {
            assert_eq!(keys.find(no.as_bytes()), None, "{no:?}");
        }
        assert_eq!(format!("{keys:?}"), "Keys(3)");
        assert!(Keys::from_variable("V", " , ").unwrap().is_empty());
        let error = Keys::from_variable("V", "fine,sécret").unwrap_err().to_string();
        assert!(error.contains("V: key 2") && !error.contains("cret"), "{error}");
    }

    #[test]
    fn a_file_of_keys_is_lines_and_never_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "# who: alice\nalpha\n\n  beta  \r\n#gamma\n").unwrap();
        let keys = Keys::read(file.path()).unwrap();
        assert_eq!(format!("{keys:?}"), "Keys(2)");
        assert!(keys.find(b"alpha").is_some() && keys.find(b"beta").is_some());
        assert_eq!(keys.find(b"gamma"), None);
        for (text, part) in [
            (&b"# none\n"[..], "no key"),
            (b"", "no key"),
            (b"alpha\nbe ta", "line 2"),
            (b"\xff", "UTF-8"),
            (&[b'a'; 2 << 20], "larger"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = Keys::read(file.path()).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(file.path().to_str().unwrap()), "{error}");
            assert!(!error.contains("be ta"), "{error}");
        }
    }
}
