//! The kernels that `unicorn npu build-kernels` built: a folder with two files for each shape and bucket, and a record
//! of what they were built from.
//!
//! ```text
//! attention-d128-h2-w1024-r512-k2048-g4.xclbin   container: container.rs
//! attention-d128-h2-w1024-r512-k2048-g4.bin      instructions: transaction.rs
//! attention-d128-h2-w1024-r512-k2048-g4.json     record
//! ```
//!
//! The name has head_dim, heads in a group, window (0 for a kernel that walks over all keys), rows, keys and groups. A
//! kernel is used only after both files passed their checks. A kernel that fails a check is listed with the reason. The
//! other kernels can still be used.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::container::{self, Container};
use super::contract::{Bucket, Layout, Shape};
use super::error::{NpuCode, NpuError};
use super::transaction;
use super::transport::KernelFiles;
use crate::config::UserFolder;
use crate::file;

/// Maximum number of kernels in a folder.
const MAX_KERNELS: usize = 256;
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// What a pair of files was built from, and the hashes of the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// A hash of the kernel's source, of the toolchain, and of the build's parameters.
    pub key: String,
    /// The tools and their versions, for people.
    pub toolchain: Vec<String>,
    /// SHA-256 of the container and of the instructions, in hexadecimal.
    pub xclbin: String,
    pub instructions: String,
}

impl Record {
    /// The record of two files.
    pub fn new(key: String, toolchain: Vec<String>, xclbin: &[u8], instructions: &[u8]) -> Record {
        Record { key, toolchain, xclbin: sha256(xclbin), instructions: sha256(instructions) }
    }
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// The name of a kernel's files, without an ending.
pub fn file_stem(shape: Shape, bucket: Bucket) -> String {
    format!(
        "attention-d{}-h{}-w{}-r{}-k{}-g{}",
        shape.head_dim(),
        shape.heads_per_group(),
        shape.window().unwrap_or(0),
        bucket.rows(),
        bucket.keys(),
        bucket.groups()
    )
}

/// The shape and bucket of a file name that [`file_stem`] made.
fn of_stem(stem: &str) -> Option<(Shape, Bucket)> {
    let mut rest = stem.strip_prefix("attention")?;
    let mut numbers = [0; 6];
    for (number, mark) in numbers.iter_mut().zip(["-d", "-h", "-w", "-r", "-k", "-g"]) {
        rest = rest.strip_prefix(mark)?;
        let end = rest.find('-').unwrap_or(rest.len());
        *number = rest[..end].parse().ok()?;
        rest = &rest[end..];
    }
    let [head_dim, heads, window, rows, keys, groups] = numbers;
    let shape = Shape::new(head_dim, heads, (window != 0).then_some(window)).ok()?;
    let bucket = Bucket::new(rows, keys, groups).ok()?;
    (shape.fits(bucket).is_ok() && file_stem(shape, bucket) == stem).then_some((shape, bucket))
}

/// Checks a container and its instructions against the shape and bucket. Returns the words of the instructions.
pub fn validate(
    shape: Shape,
    bucket: Bucket,
    xclbin: &[u8],
    instructions: &[u8],
) -> Result<Vec<u32>, NpuError> {
    let invalid = |error: &dyn std::fmt::Display| NpuError::new(NpuCode::KernelInvalid, error.to_string());
    let container = Container::parse(xclbin).map_err(|error| invalid(&error))?;
    if container.columns != bucket.groups() {
        return Err(NpuError::new(
            NpuCode::KernelInvalid,
            format!(
                "the container is for {} columns of the NPU; {}, one for each KV head, are expected",
                container.columns,
                bucket.groups()
            ),
        ));
    }
    let words = transaction::words(instructions).map_err(|error| invalid(&error))?;
    transaction::check(&words, container.columns, &Layout::of(shape, bucket))
        .map_err(|error| invalid(&error))?;
    Ok(words)
}

/// The kernels of a folder.
#[derive(Debug)]
pub struct Store {
    kernels: Vec<KernelFiles>,
    refused: Vec<(String, NpuError)>,
}

impl Store {
    /// Reads and checks all kernels of a folder. A missing folder has no kernels.
    pub fn open(dir: &Path) -> Result<Store, NpuError> {
        let unreadable = |error: std::io::Error| {
            NpuError::new(
                NpuCode::KernelMissing,
                format!("{}: the folder of the NPU's kernels cannot be read: {error}", dir.display()),
            )
        };
        let mut store = Store { kernels: Vec::new(), refused: Vec::new() };
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(store),
            entries => entries.map_err(unreadable)?,
        };
        let mut stems = Vec::new();
        for entry in entries {
            let path = entry.map_err(unreadable)?.path();
            if path.extension().is_some_and(|ending| ending == "xclbin")
                && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
            {
                stems.push(stem.to_owned());
            }
        }
        if stems.len() > MAX_KERNELS {
            return Err(NpuError::new(
                NpuCode::KernelInvalid,
                format!(
                    "{}: {} kernels; {MAX_KERNELS} at most are expected, remove those that are not needed",
                    dir.display(),
                    stems.len()
                ),
            ));
        }
        stems.sort();
        for stem in stems {
            match read(dir, &stem) {
                Ok(kernel) => store.kernels.push(kernel),
                Err(NpuError { code, message }) => {
                    let path = dir.join(format!("{stem}.xclbin"));
                    let message = format!("{}: {message}", path.display());
                    store.refused.push((stem, NpuError { code, message }));
                }
            }
        }
        Ok(store)
    }

    /// The kernels that passed every check, by name.
    pub fn kernels(&self) -> &[KernelFiles] {
        &self.kernels
    }

    /// The names of the rejected kernels, and the reasons.
    pub fn refused(&self) -> &[(String, NpuError)] {
        &self.refused
    }
}

/// The folder in the user's cache for kernels, from environment variables.
pub fn standard_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    Some(UserFolder::Cache.path(variable)?.join("npu"))
}

/// The record of a kernel; `None` if there is no record, or if another program wrote it.
pub fn record(dir: &Path, stem: &str) -> Option<Record> {
    let bytes = contents(&dir.join(format!("{stem}.json")), MAX_RECORD_BYTES).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Reads and checks one kernel.
pub fn read(dir: &Path, stem: &str) -> Result<KernelFiles, NpuError> {
    let Some((shape, bucket)) = of_stem(stem) else {
        return Err(NpuError::new(
            NpuCode::KernelInvalid,
            "the name is not that of a kernel; one such as attention-d128-h2-w1024-r512-k2048-g4 is expected",
        ));
    };
    let xclbin = dir.join(format!("{stem}.xclbin"));
    let container = contents(&xclbin, container::MAX_BYTES)?;
    let instructions = contents(&dir.join(format!("{stem}.bin")), transaction::MAX_BYTES)?;
    if let Some(record) = record(dir, stem) {
        let sums = [(&record.xclbin, &container, "xclbin"), (&record.instructions, &instructions, "bin")];
        for (expected, bytes, ending) in sums {
            if sha256(bytes) != *expected {
                return Err(NpuError::new(
                    NpuCode::KernelInvalid,
                    format!(
                        "the file .{ending} is not the one that was built; build it again with `unicorn npu \
                         build-kernels`"
                    ),
                ));
            }
        }
    }
    let words = validate(shape, bucket, &container, &instructions)?;
    Ok(KernelFiles { shape, bucket, xclbin, instructions: words })
}

/// A file's bytes. Fails if there are more than `most`.
fn contents(path: &Path, most: u64) -> Result<Vec<u8>, NpuError> {
    let name = || path.file_name().unwrap_or_default().display().to_string();
    let unreadable = |error: std::io::Error| {
        NpuError::new(NpuCode::KernelMissing, format!("{} cannot be read: {error}", name()))
    };
    file::read(path, most).map_err(|error| match error.kind() {
        ErrorKind::InvalidData => {
            let message = format!("{} is larger than {most} bytes, the most that a kernel has", name());
            NpuError::new(NpuCode::KernelInvalid, message)
        }
        _ => unreadable(error),
    })
}

/// The files of a kernel, for messages.
pub fn paths(dir: &Path, stem: &str) -> [PathBuf; 3] {
    ["xclbin", "bin", "json"].map(|ending| dir.join(format!("{stem}.{ending}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTAINER: &[u8] = include_bytes!("../../tests/data/npu/xclbin/placeholder.xclbin");
    const INSTRUCTIONS: &[u8] = include_bytes!("../../tests/data/npu/xclbin/placeholder.bin");

    /// A stored kernel that no NPU can run.
    fn put(dir: &Path, shape: Shape, bucket: Bucket) -> String {
        let stem = file_stem(shape, bucket);
        let [xclbin, bin, _] = paths(dir, &stem);
        std::fs::write(xclbin, container(bucket.groups())).unwrap();
        std::fs::write(bin, instructions(bucket.groups())).unwrap();
        stem
    }

    /// The placeholder for another number of columns.
    fn container(columns: u32) -> Vec<u8> {
        let mut bytes = CONTAINER.to_vec();
        let header = 456 + 40;
        let partition = u64::from_le_bytes(bytes[header + 24..][..8].try_into().unwrap()) as usize;
        bytes[partition + 32] = columns as u8;
        bytes
    }

    fn instructions(columns: u32) -> Vec<u8> {
        let mut bytes = INSTRUCTIONS.to_vec();
        bytes[4] = columns as u8;
        bytes
    }

    fn shape(window: Option<u32>) -> Shape {
        Shape::new(128, 2, window).unwrap()
    }

    fn bucket(rows: u32, keys: u32) -> Bucket {
        Bucket::new(rows, keys, 4).unwrap()
    }

    #[test]
    fn names_tell_shape_and_bucket() {
        let stem = file_stem(shape(Some(1024)), bucket(512, 2048));
        assert_eq!(stem, "attention-d128-h2-w1024-r512-k2048-g4");
        assert_eq!(of_stem(&stem), Some((shape(Some(1024)), bucket(512, 2048))));
        assert_eq!(of_stem("attention-d128-h2-w0-r256-k512-g4"), Some((shape(None), bucket(256, 512))));
        for other in [
            "attention-d128-h2-w1024-r512-k2048",
            "attention-d128-h2-w1024-r512-k2048-g4-x",
            "attention-d0128-h2-w1024-r512-k2048-g4",
            "attention-d128-h2-w-r512-k2048-g4",
            "attention-d96-h2-w0-r512-k2048-g4",
            "attention-d128-h2-w1000-r512-k2048-g4",
            "attention-d128-h2-w1024-r512-k1024-g4",
            "attention-d128-h2-w0-r512-k2048-g5",
            "attention",
            "",
        ] {
            assert_eq!(of_stem(other), None, "{other}");
        }
    }

    #[test]
    fn what_fails_a_check_is_kept_aside_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let good = put(dir.path(), shape(None), bucket(256, 512));
        let stem = put(dir.path(), shape(None), bucket(512, 2048));
        let [xclbin, bin, record] = paths(dir.path(), &stem);
        let reason = |code: NpuCode, part: &str| {
            let store = Store::open(dir.path()).unwrap();
            let kernels: Vec<String> = store.kernels().iter().map(|k| file_stem(k.shape, k.bucket)).collect();
            assert_eq!(kernels, [good.as_str()]);
            let [(name, error)] = store.refused() else { panic!("{:?}", store.refused()) };
            assert_eq!((name, error.code), (&stem, code));
            assert!(error.message.contains(&format!("{stem}.xclbin: ")), "{error}");
            assert!(error.message.contains(part) && !error.message.contains('\n'), "{error}");
        };
        std::fs::write(&xclbin, container(3)).unwrap();
        reason(NpuCode::KernelInvalid, "the container is for 3 columns of the NPU; 4, one for each KV head");
        std::fs::write(&xclbin, "no container").unwrap();
        reason(NpuCode::KernelInvalid, "byte 0 of the container");
        std::fs::write(&xclbin, container(4)).unwrap();
        std::fs::write(&bin, instructions(2)).unwrap();
        reason(NpuCode::KernelInvalid, "word 1 of the instructions");
        std::fs::remove_file(&bin).unwrap();
        reason(NpuCode::KernelMissing, ".bin cannot be read");
        std::fs::File::create(&bin).unwrap().set_len(transaction::MAX_BYTES + 1).unwrap();
        reason(NpuCode::KernelInvalid, ".bin is larger than 16777216 bytes");
        std::fs::write(&bin, instructions(4)).unwrap();
        assert_eq!(Store::open(dir.path()).unwrap().kernels().len(), 2);
        // Valid files that differ from the files that were built.
        let built = Record::new("key".into(), vec![], &container(4), b"others");
        std::fs::write(&record, serde_json::to_vec(&built).unwrap()).unwrap();
        reason(NpuCode::KernelInvalid, "the file .bin is not the one that was built");
        let built = Record::new("key".into(), vec![], &container(4), &instructions(4));
        std::fs::write(&record, serde_json::to_vec(&built).unwrap()).unwrap();
        assert_eq!(Store::open(dir.path()).unwrap().kernels().len(), 2);
    }

    #[test]
    fn the_standard_folder_is_in_the_users_cache() {
        let folder = |set: &[(&str, &str)]| {
            let set = set.to_vec();
            standard_folder(move |name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        assert_eq!(folder(&[("HOME", "/h")]), Some("/h/.cache/unicorn/npu".into()));
        assert_eq!(folder(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), Some("/c/unicorn/npu".into()));
        assert_eq!(folder(&[("XDG_CACHE_HOME", "")]), None);
    }

    #[test]
    fn a_folder_without_kernels_has_none() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("notes.txt"), "none").unwrap();
        for folder in [dir.path().to_owned(), dir.path().join("absent")] {
            let store = Store::open(&folder).unwrap();
            assert!(store.kernels().is_empty() && store.refused().is_empty());
        }
        let error = Store::open(&dir.path().join("notes.txt")).unwrap_err();
        assert_eq!(error.code, NpuCode::KernelMissing);
        std::fs::write(dir.path().join("other.xclbin"), "").unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert!(store.refused()[0].1.message.contains("the name is not that of a kernel"));
    }
}
