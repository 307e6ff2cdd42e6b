//! A folder on disk that keeps pieces of the KV cache across restarts, each under its content address.
//!
//! [`KvStore`] is the folder. The caller computes an [`Address`] from all that determines a piece, so equal
//! addresses mean equal bytes. The store is a cache: an entry may be gone at any time, and then its piece is
//! computed again. A failing disk makes entries unavailable, and never makes an answer wrong.
//!
//! ```text
//! DIR/lock              locked (`flock`) by the process that uses the folder
//!    /secret            32 random bytes, which stay when the entries are removed
//!    /ab/cdef….kv       an entry: 2 and 62 hexadecimal digits of its address
//!    /ab/cdef….kv.tmp   an entry that is being written
//! ```
//!
//! Only this user may enter the folder, because a piece reveals parts of a conversation.
//!
//! A file is a header and the payload. Numbers are little-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 8 | magic |
//! | 4 | version of the format |
//! | 4 | length of the header in bytes |
//! | 32 | address |
//! | 8 | length of the payload in bytes |
//! | 4 for every MiB of the payload | CRC-32 of that MiB; the last one may be shorter |
//! | 4 | CRC-32 of all of the header before this field |
//!
//! The time of a file is that of the last use of its entry. The entries with the earliest times are evicted first.
//!
//! A file is not synced to the disk before it gets its name. So after a power failure a file may be torn, and
//! then a length or a checksum in it is wrong.

mod store;

use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use store::{KvStore, check_folder, clear_folder};

const MAGIC: [u8; 8] = *b"KVPIECE\n";
const VERSION: u32 = 1;
/// Bytes of the payload that one checksum covers.
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes of the header's fields before the checksums.
const FIXED_BYTES: usize = 8 + 4 + 4 + 32 + 8;
/// Largest file, with its header.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The content address of a piece: a cryptographic hash of all that determines its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address([u8; 32]);

impl Address {
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Parses 64 lower-case hexadecimal digits.
    fn parse(text: &str) -> Option<Self> {
        let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(bytes))
    }
}

/// The value of a lower-case hexadecimal digit.
fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => Some(character - b'0'),
        b'a'..=b'f' => Some(character - b'a' + 10),
        _ => None,
    }
}

/// Writes 64 lower-case hexadecimal digits.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// When an entry was used: nanoseconds since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UseTime(u64);

impl UseTime {
    /// The time of a file cannot be later, so that there are times after each of them.
    const LATEST: u64 = u64::MAX / 2;
    /// Shortest time between two uses.
    const STEP: Duration = Duration::from_millis(1);

    /// The present time, or a time after `before`.
    fn after(before: Self) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(nanoseconds(now).max(before.0 + nanoseconds(Self::STEP)))
    }

    fn of_file(seconds: i64, nanoseconds: u64) -> Self {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        Self(seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds).min(Self::LATEST))
    }

    /// A time that is earlier by this number of microseconds, for an entry that is worth less than others of the same use.
    #[must_use]
    pub fn less(self, microseconds: usize) -> Self {
        Self(self.0.saturating_sub(nanoseconds(Duration::from_micros(microseconds as u64))))
    }
}

impl From<UseTime> for SystemTime {
    fn from(UseTime(nanoseconds): UseTime) -> Self {
        UNIX_EPOCH + Duration::from_nanos(nanoseconds)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What [`KvStore::clear`] removed from the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cleared {
    pub entries: u64,
    /// Bytes of the files, with their headers.
    pub bytes: u64,
}

/// The state of a store, and what it did since it was opened. Bytes are those of files, with their headers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvStoreStats {
    /// Entries in the folder.
    pub entries: u64,
    pub bytes: u64,
    pub max_bytes: u64,
    /// Bytes that wait to be written, with the entry that is written now.
    pub queued_bytes: u64,
    pub written_entries: u64,
    pub written_bytes: u64,
    pub read_entries: u64,
    pub read_bytes: u64,
    /// Entries that were refused, or removed from the queue before they were written.
    pub dropped_entries: u64,
    /// Entries that were removed to make room.
    pub evicted_entries: u64,
    /// Entries that were removed because their file was not what was written.
    pub damaged_entries: u64,
    pub write_errors: u64,
    pub read_errors: u64,
    /// The last error of a write, or else of a read. A later write or read that succeeds removes it.
    pub error: Option<String>,
    /// Nanoseconds of all reads that succeeded.
    pub read_ns: u64,
    /// Nanoseconds of all writes that succeeded, with the evictions before them.
    pub write_ns: u64,
}

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvStoreError {
    #[error("{}: another server uses it; stop that server, or choose another folder", folder.display())]
    Busy { folder: PathBuf },
    #[error(
        "{} belongs to the user with id {owner}, and this program runs as the user with id {user}; run it as the \
         owner (`sudo -u`), choose another folder, or run `chown {user} {}`",
        folder.display(), folder.display()
    )]
    Owner { folder: PathBuf, owner: u32, user: u32 },
    #[error(
        "{} has the permissions {mode:o}, so other users could read or replace parts of conversations; run \
         `chmod 700 {}`",
        folder.display(), folder.display()
    )]
    Permissions { folder: PathBuf, mode: u32 },
    #[error("cannot {action} {}: {error}; {}", folder.display(), advice(error))]
    Io { action: &'static str, folder: PathBuf, error: io::Error },
}

/// What to do about an error of the file system.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free some space, or choose another folder",
        ErrorKind::PermissionDenied => {
            "run the server as a user with write permission there, or choose another folder"
        }
        ErrorKind::ReadOnlyFilesystem => {
            "choose another folder, or name it in ReadWritePaths= of the unit if systemd starts the server"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "choose a folder, or a path that does not exist"
        }
        ErrorKind::NotFound => "the folder is gone; restart the server, which makes it again",
        _ => "check the disk, or choose another folder",
    }
}

/// Why a file is not the entry that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error("it is not a regular file")]
    NotAFile,
    #[error("it does not begin as an entry does")]
    Magic,
    #[error("it has version {0} of the format, not version {VERSION}")]
    Version(u32),
    #[error("it holds another entry")]
    Address,
    #[error("it has another length")]
    Length,
    #[error("the checksum of its header is wrong")]
    Header,
    #[error("the checksum of MiB {0} is wrong")]
    Block(usize),
}

/// Why [`decode`] returns no payload.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    #[error(transparent)]
    Damage(#[from] Damage),
    #[error(transparent)]
    Io(io::Error),
}

/// A file that ends too early is damaged. Every other error says nothing about the file's bytes.
impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => Self::Damage(Damage::Length),
            _ => Self::Io(error),
        }
    }
}

/// Reads a whole file and returns its payload, if it is the entry of `address` with `bytes` bytes of payload.
/// Trusts no byte of the file. Allocates at most the header and `bytes`.
///
/// # Errors
/// `Damage` if the file is anything else; `Io` if it cannot be read.
#[doc(hidden)]
pub fn decode(mut file: impl Read, address: &Address, bytes: usize) -> Result<Vec<u8>, Unreadable> {
    let checksums = decode_header(&mut file, address, bytes)?;
    let mut payload = vec![0; bytes];
    for (block, (part, expected)) in payload.chunks_mut(BLOCK_BYTES).zip(checksums).enumerate() {
        file.read_exact(part)?;
        if crc32fast::hash(part) != expected {
            return Err(Damage::Block(block).into());
        }
    }
    match file.read_exact(&mut [0]) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(payload),
        Err(error) => Err(error.into()),
        Ok(()) => Err(Damage::Length.into()),
    }
}

/// Reads and checks the header; returns the checksums of the payload's blocks.
fn decode_header(file: &mut impl Read, address: &Address, bytes: usize) -> Result<Vec<u32>, Unreadable> {
    let mut header = vec![0; FIXED_BYTES];
    file.read_exact(&mut header)?;
    let version = u32::from_le_bytes(array(&header[8..]));
    let expected = fixed_fields(version, address, bytes);
    let is_expected = |from: usize, to: usize| header[from..to] == expected[from..to];
    if !is_expected(0, 8) {
        return Err(Damage::Magic.into());
    }
    if version != VERSION {
        return Err(Damage::Version(version).into());
    }
    if !is_expected(16, 48) {
        return Err(Damage::Address.into());
    }
    // The lengths of the header and of the payload. After this check the length of the allocations is the
    // caller's.
    if !is_expected(0, FIXED_BYTES) || file_bytes(bytes) > MAX_FILE_BYTES {
        return Err(Damage::Length.into());
    }
    header.resize(header_bytes(bytes), 0);
    file.read_exact(&mut header[FIXED_BYTES..])?;
    let (checked, checksum) = header.split_at(header.len() - 4);
    if crc32fast::hash(checked) != u32::from_le_bytes(array(checksum)) {
        return Err(Damage::Header.into());
    }
    Ok(checked[FIXED_BYTES..].chunks_exact(4).map(|checksum| u32::from_le_bytes(array(checksum))).collect())
}

/// The header of the file of a payload. The payload follows it.
fn encode_header(address: &Address, payload: &[u8]) -> Vec<u8> {
    let mut header = fixed_fields(VERSION, address, payload.len());
    for block in payload.chunks(BLOCK_BYTES) {
        header.extend(crc32fast::hash(block).to_le_bytes());
    }
    header.extend(crc32fast::hash(&header).to_le_bytes());
    header
}

/// The fields of the header before the checksums.
fn fixed_fields(version: u32, address: &Address, bytes: usize) -> Vec<u8> {
    let mut fields = MAGIC.to_vec();
    fields.extend(version.to_le_bytes());
    // A payload whose header is longer than this field can say is far above the largest file.
    fields.extend((header_bytes(bytes) as u32).to_le_bytes());
    fields.extend(address.as_bytes());
    fields.extend((bytes as u64).to_le_bytes());
    fields
}

/// Bytes of the header of a payload of `bytes` bytes.
fn header_bytes(bytes: usize) -> usize {
    FIXED_BYTES + 4 * bytes.div_ceil(BLOCK_BYTES) + 4
}

/// Bytes of the file of a payload of `bytes` bytes.
fn file_bytes(bytes: usize) -> u64 {
    (bytes as u64).saturating_add(header_bytes(bytes) as u64)
}

/// The first bytes of a slice that is long enough.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes[..N].try_into().expect("the slice has N bytes")
}
