//! Pulling: selects the files, checks that they fit on the disk, downloads them, and verifies their checksums.
//!
//! An interrupted transfer is resumed, in this run or the next: the bytes that are downloaded stay in
//! `CHECKSUM.incomplete`. A server that does not support ranges sends the file from the start. A file is renamed to its
//! final name only if its hash is the one that the hub lists. That is SHA-256 for files in large-file storage, and
//! git's object hash for the small files.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use super::HubError;
use super::cache::{Cache, failed};
use super::client::{Checksum, Client, Content, Failure};
use super::name::{ModelName, check_file};
use super::select::select;
use super::settings::Settings;

/// Fewest bytes of an interrupted transfer that count as progress.
const PROGRESS_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: usize = 256 << 10;
const RANGE_NOT_SATISFIABLE: u16 = 416;

/// The state of a pull, for progress reports.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// The total bytes of the model, and how many of them were downloaded before this pull.
    Start { total: u64, here: u64 },
    /// The next file. Its checksum is written as `ALGORITHM:HEX`.
    File { path: &'a str, digest: &'a str, size: u64 },
    /// Bytes of all files that are downloaded now, and of the present one.
    Done { bytes: u64, of_file: u64 },
}

/// Receives the progress of a pull. False = the pull stops, and keeps what it has downloaded.
pub type Report<'a> = dyn FnMut(Progress<'_>) -> bool + 'a;

/// A file to pull.
struct Task {
    path: String,
    size: u64,
    checksum: Checksum,
}

/// Pulls the files that serving `name` needs into `cache`. Returns the folder, or the GGUF file.
///
/// # Errors
/// After an error, the downloaded bytes are kept and the next pull resumes from them.
pub fn pull(
    settings: &Settings,
    cache: &Cache,
    name: &ModelName,
    report: &mut Report<'_>,
) -> Result<PathBuf, HubError> {
    let report = &mut |progress: Progress<'_>| {
        report(progress).then_some(()).ok_or_else(|| HubError::Stopped { name: name.clone() })
    };
    if settings.offline {
        return Err(HubError::Offline { name: name.clone() });
    }
    let client = Client::new(settings);
    let listing = client.list(name)?;
    let entries: Vec<_> = listing.files.iter().map(|f| (f.path.clone(), f.size)).collect();
    let chosen = select(name, &entries)?;
    for i in &chosen.files {
        let path = &listing.files[*i].path;
        check_file(path).map_err(|problem| HubError::HostileName {
            repo: name.repo.clone(),
            name: path.clone(),
            problem,
        })?;
    }
    let commit = &listing.commit;
    let mut tasks = Vec::new();
    for i in &chosen.files {
        let file = &listing.files[*i];
        let (size, checksum) = match (file.size, &file.checksum) {
            (Some(size), Some(checksum)) => (size, checksum.clone()),
            _ => client.describe(name, commit, &file.path)?,
        };
        tasks.push(Task { path: file.path.clone(), size, checksum });
    }

    cache.prepare(&name.repo)?;
    let puller = Puller { client, cache, name, commit, patience: settings.patience.attempts };
    let here: Vec<u64> = tasks.iter().map(|t| puller.bytes_on_disk(t)).collect();
    // The sizes come from the server and may be any numbers, so the sum saturates.
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
    let (total, mut rest) = (sum(&mut tasks.iter().map(|t| t.size)), sum(&mut here.iter().copied()));
    let (needed, free) = (total.saturating_sub(rest), cache.free_bytes()?);
    if needed > free {
        return Err(HubError::Space { folder: cache.root().to_path_buf(), needed, free });
    }
    report(Progress::Start { total, here: rest })?;
    let mut before = 0;
    for (task, here) in tasks.iter().zip(here) {
        let digest = task.checksum.to_string();
        report(Progress::File { path: &task.path, digest: &digest, size: task.size })?;
        rest -= here; // now the bytes on disk of the files after this one
        puller
            .get(task, &mut |of_file| report(Progress::Done { bytes: before + of_file + rest, of_file }))?;
        cache.link(&name.repo, commit, &task.path, task.checksum.hex())?;
        before += task.size;
    }
    cache.write_reference(&name.repo, name.revision(), commit)?;
    let snapshot = cache.snapshot(&name.repo, commit);
    Ok(match chosen.model {
        Some(i) => snapshot.join(&listing.files[i].path),
        None => snapshot,
    })
}

/// Receives the bytes of a file that are downloaded. An error stops the pull.
type OfFile<'a> = dyn FnMut(u64) -> Result<(), HubError> + 'a;

struct Puller<'a> {
    client: Client<'a>,
    cache: &'a Cache,
    name: &'a ModelName,
    commit: &'a str,
    /// How many attempts without progress are allowed.
    patience: u32,
}

impl Puller<'_> {
    /// Bytes of this file on the disk, complete or not.
    fn bytes_on_disk(&self, task: &Task) -> u64 {
        let (repo, checksum) = (&self.name.repo, task.checksum.hex());
        let bytes = |path| fs::metadata(path).map_or(0, |m| m.len());
        let whole = bytes(self.cache.blob(repo, checksum));
        if whole == task.size { whole } else { bytes(self.cache.incomplete(repo, checksum)).min(task.size) }
    }

    /// Downloads the blob of `task`, if it is missing.
    fn get(&self, task: &Task, report: &mut OfFile<'_>) -> Result<(), HubError> {
        let (repo, checksum) = (&self.name.repo, task.checksum.hex());
        let blob = self.cache.blob(repo, checksum);
        // A blob was verified before it got its name. If its size is wrong, it was damaged later.
        let is_here = || fs::metadata(&blob).is_ok_and(|m| m.is_file() && m.len() == task.size);
        if is_here() {
            return Ok(());
        }
        let _lock = self.cache.lock(repo, checksum, &task.path)?;
        if is_here() {
            return Ok(());
        }
        let mut partial = Partial::open(self.cache, self.cache.incomplete(repo, checksum), task)?;
        match self.fill(&mut partial, report) {
            Ok(()) => partial.finish(&blob),
            Err(error) => {
                partial.leave();
                Err(error)
            }
        }
    }

    /// Downloads until `partial` has every byte.
    fn fill(&self, partial: &mut Partial, report: &mut OfFile<'_>) -> Result<(), HubError> {
        let task = partial.task;
        let (mut tries, mut reached) = (1, partial.len);
        while partial.len < task.size {
            let (error, pause) = match self.transfer(partial, report) {
                Ok(()) => continue,
                // The server answered when the files were listed, so a retry may help.
                Err(
                    Failure::Permanent(HubError::Unreachable { problem, .. })
                    | Failure::Transient(HubError::Unreachable { problem, .. }, _),
                ) => (HubError::Interrupted { file: task.path.clone(), problem }, Duration::ZERO),
                Err(Failure::Permanent(error)) => return Err(error),
                Err(Failure::Transient(error, pause)) => (error, pause),
            };
            if matches!(error, HubError::Status { status: RANGE_NOT_SATISFIABLE, .. }) {
                partial.restart()?;
            }
            // Progress counts from the farthest byte until now: a server that always starts over makes no progress.
            if partial.len >= reached + PROGRESS_BYTES {
                tries = 1;
            } else if tries >= self.patience {
                return Err(error);
            }
            reached = reached.max(partial.len);
            self.client.pause(tries, pause, &error);
            tries += 1;
        }
        Ok(())
    }

    /// Sends one request and appends the bytes of its answer; fails if the answer ends too early.
    fn transfer(&self, partial: &mut Partial, report: &mut OfFile<'_>) -> Result<(), Failure> {
        let task = partial.task;
        let Content { start, mut body } =
            self.client.open(self.name, self.commit, &task.path, partial.len, task.size)?;
        if start != partial.len {
            partial.restart().map_err(Failure::Permanent)?;
        }
        let broken =
            |problem: String| Failure::transient(HubError::Interrupted { file: task.path.clone(), problem });
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            report(partial.len).map_err(Failure::Permanent)?;
            match body.read(&mut buffer) {
                Ok(0) if partial.len == task.size => return Ok(()),
                Ok(0) => {
                    return Err(broken(format!(
                        "the answer ended after {} of {} bytes",
                        partial.len, task.size
                    )));
                }
                Ok(n) => partial.append(&buffer[..n]).map_err(Failure::Permanent)?,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(e.to_string())),
            }
        }
    }
}

/// The incomplete file next to the blob, and the hash of the bytes in it.
struct Partial<'a> {
    task: &'a Task,
    path: PathBuf,
    file: File,
    len: u64,
    hash: Hash,
}

impl<'a> Partial<'a> {
    /// Opens the incomplete file, and hashes the bytes that an earlier pull left in it.
    fn open(cache: &Cache, path: PathBuf, task: &'a Task) -> Result<Self, HubError> {
        let file = cache.create(&path, OpenOptions::new().read(true).write(true))?;
        let mut partial = Self { task, path, file, len: 0, hash: Hash::new(task) };
        let mut buffer = vec![0; BUFFER_BYTES];
        let read = |partial: &mut Self, buffer: &mut [u8]| {
            partial.file.read(buffer).map_err(|e| failed("read", &partial.path, e))
        };
        loop {
            let n = read(&mut partial, &mut buffer)?;
            if n == 0 {
                return Ok(partial);
            }
            partial.hash.update(&buffer[..n]);
            partial.len += n as u64;
            if partial.len > task.size {
                // It is larger than the whole file, so it is not a part of the file.
                partial.restart()?;
                return Ok(partial);
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(|e| failed("write", &self.path, e))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), HubError> {
        let empty = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        empty.map_err(|e| failed("write", &self.path, e))?;
        (self.len, self.hash) = (0, Hash::new(self.task));
        Ok(())
    }

    /// Keeps the incomplete file for the next pull, or removes it if it is empty.
    fn leave(self) {
        // Not `self.len`: a failed write may have written a part.
        if self.file.metadata().is_ok_and(|m| m.len() == 0) {
            // If this fails, an empty file stays, which is harmless.
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Checks the hash, and renames the file to the blob.
    fn finish(self, blob: &Path) -> Result<(), HubError> {
        let (task, algorithm) = (self.task, self.hash.algorithm());
        let got = self.hash.hex();
        if got != task.checksum.hex() {
            fs::remove_file(&self.path).map_err(|e| failed("remove", &self.path, e))?;
            let expected = task.checksum.hex().to_owned();
            return Err(HubError::Corrupt { file: task.path.clone(), algorithm, got, expected });
        }
        self.file.sync_all().map_err(|e| failed("write", &self.path, e))?;
        fs::rename(&self.path, blob).map_err(|e| failed("rename", &self.path, e))
    }
}

enum Hash {
    Sha256(Sha256),
    /// SHA-1 over `blob SIZE\0` and the bytes.
    Git(Sha1),
}

impl Hash {
    fn new(task: &Task) -> Self {
        match task.checksum {
            Checksum::Sha256(_) => Self::Sha256(Sha256::new()),
            Checksum::Git(_) => Self::Git(Sha1::new_with_prefix(format!("blob {}\0", task.size))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::Git(hash) => hash.update(bytes),
        }
    }

    fn hex(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self {
            Self::Sha256(hash) => hex(&hash.clone().finalize()),
            Self::Git(hash) => hex(&hash.clone().finalize()),
        }
    }

    fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::Git(_) => "git checksum",
        }
    }
}
