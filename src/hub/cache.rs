//! The cache of pulled models. It has the layout of the hub's own tools, so that all of them can share one cache:
//!
//! ```text
//! ROOT/models--ORG--NAME/blobs/CHECKSUM               a file's bytes, named by their hash
//!                       /blobs/CHECKSUM.incomplete    the part of a file that is downloaded
//!                       /snapshots/COMMIT/PATH        a relative link to the blob
//!                       /refs/REVISION                the commit of a branch or tag at the time of the pull
//!     /.locks/models--ORG--NAME/CHECKSUM.lock         locked (`flock`) by the process that writes the blob
//! ```
//!
//! A blob under its checksum is complete: it is written to another file, checked, and renamed. A reference is written
//! after everything that it refers to, so an interrupted pull leaves the previous revision in use. Folder walks are
//! bounded. Deleting never follows a link.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock, statvfs};

use super::HubError;
use super::name::{ModelName, RepoId, is_commit};
use super::select::{self, is_weights, part_of};
use crate::file;

/// Deepest nesting of folders in a repository, and most files of one snapshot. No model has more.
const MAX_DEPTH: usize = 8;
const MAX_FILES: usize = 100_000;
const MAX_REF_BYTES: u64 = 256;
/// Longest wait while another process writes a link or a reference.
const SMALL_WRITE_WAIT: Duration = Duration::from_secs(5);

/// Permissions of a shared cache: all users may read, because a service may run as its own user.
const SHARED_FOLDER: u32 = 0o755;
const SHARED_FILE: u32 = 0o644;

/// One folder of models.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
    /// Whether all users may read the files that are written. If not, the umask decides.
    shared: bool,
}

/// A model in a cache: a snapshot, or one GGUF file of it.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// The name that `--model` takes.
    pub name: ModelName,
    pub format: Format,
    /// Bytes of its files. A vision tower counts for each GGUF file that it belongs to.
    pub bytes: u64,
    /// The folder of the snapshot, or the GGUF file.
    pub path: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Format {
    Safetensors,
    Gguf,
    /// A pull was started and did not finish.
    Partial,
    /// No format that can be served.
    Other,
}

/// The paths that [`Cache::removal`] found to delete.
#[derive(Debug)]
pub struct Removal {
    pub bytes: u64,
    folder: PathBuf,
    locks: PathBuf,
    whole: bool,
    /// References and links. They are deleted before the blobs, so that no link points to a deleted blob.
    links: Vec<PathBuf>,
    blobs: Vec<PathBuf>,
}

/// The lock on a blob, released when dropped.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Lock {
    /// Locks `file`; `None` if another process holds the lock.
    fn take(file: File) -> Result<Option<Lock>, std::io::Error> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock(file))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file is not enough: a child process that another thread starts now may have inherited the file,
        // which keeps the lock.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// A file of a snapshot: its path, the link, the link's target, and its bytes.
struct Entry {
    path: String,
    link: PathBuf,
    target: Option<PathBuf>,
    bytes: u64,
}

impl Cache {
    /// A cache that all users of this machine may read.
    pub fn system(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), shared: true }
    }

    /// The current user's cache.
    pub fn of_user(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), shared: false }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of the snapshot that `name` means, or the GGUF file. `None` if the cache has no part of the
    /// repository.
    ///
    /// # Errors
    /// Fails if the cache has only a part of the model, or if `name` is ambiguous.
    pub fn find(&self, name: &ModelName) -> Result<Option<PathBuf>, HubError> {
        let Some(commit) = self.commit(name)? else {
            let begun = !names_in(&self.repository(&name.repo).join("blobs"))?.is_empty();
            return if begun && name.revision.is_none() {
                Err(HubError::Partial { name: name.clone() })
            } else {
                Ok(None)
            };
        };
        let snapshot = self.snapshot(&name.repo, &commit);
        let entries = entries(&snapshot)?;
        let files = present(&entries);
        if let Some(file) = &name.file
            && !file.ends_with(".gguf")
            && files.iter().any(|(path, _)| path == file)
        {
            return Ok(Some(snapshot.join(file)));
        }
        if name.file.is_none() && state(&entries) == Format::Safetensors {
            return Ok(Some(snapshot));
        }
        match select::gguf(name, &files) {
            Ok(gguf) => Ok(Some(snapshot.join(gguf.path))),
            // The cache has only other files of the repository.
            Err(error) if is_absent(&error) => Ok(None),
            Err(HubError::NothingToServe { .. }) => Err(HubError::Partial { name: name.clone() }),
            Err(error) => Err(error),
        }
    }

    /// Every model in the cache, sorted by name.
    pub fn list(&self) -> Result<Vec<Pulled>, HubError> {
        let mut all = Vec::new();
        for folder in names_in(&self.root)? {
            let Some(repo) = RepoId::from_folder(&folder) else { continue };
            let references = self.references(&repo)?;
            // All interrupted pulls of a repository together make one row.
            let (mut begun, mut begun_bytes) = (false, self.incomplete_bytes(&repo)?);
            let snapshots = names_in(&self.repository(&repo).join("snapshots"))?;
            for commit in &snapshots {
                let snapshot = self.snapshot(&repo, commit);
                let entries = entries(&snapshot)?;
                let named: Vec<&String> =
                    references.iter().filter(|(_, c)| *c == commit).map(|(r, _)| r).collect();
                let revision = match named.iter().any(|r| *r == super::name::MAIN) {
                    true => None,
                    false => Some(named.first().map_or(commit.clone(), |r| (*r).clone())),
                };
                let name = ModelName { repo: repo.clone(), revision, file: None };
                let files = present(&entries);
                let ggufs: Vec<_> = select::ggufs(&files)
                    .into_iter()
                    .map(|gguf| (select::tower(&gguf.path, &files), gguf))
                    .collect();
                let towers: BTreeSet<usize> = ggufs.iter().filter_map(|(tower, _)| *tower).collect();
                let size = |file: usize| files[file].1.unwrap_or(0);
                let of_ggufs = ggufs.iter().flat_map(|(_, gguf)| &gguf.parts).chain(&towers);
                let all_bytes = entries.iter().map(|e| e.bytes).sum::<u64>();
                let other_bytes = all_bytes - of_ggufs.map(|file| size(*file)).sum::<u64>();
                let format = state(&entries);
                if format == Format::Safetensors || format == Format::Other && !named.is_empty() {
                    let (name, path) = (name.clone(), snapshot.clone());
                    all.push(Pulled { name, format, bytes: other_bytes, path });
                } else if format != Format::Gguf {
                    begun = true;
                    begun_bytes += other_bytes;
                }
                all.extend(ggufs.into_iter().map(|(tower, gguf)| Pulled {
                    name: name.with_file(&gguf.path),
                    format: Format::Gguf,
                    bytes: gguf.parts.iter().chain(&tower).map(|file| size(*file)).sum(),
                    path: snapshot.join(gguf.path),
                }));
            }
            if begun || begun_bytes > 0 {
                let name = ModelName { repo: repo.clone(), revision: None, file: None };
                all.push(Pulled {
                    name,
                    format: Format::Partial,
                    bytes: begun_bytes,
                    path: self.repository(&repo),
                });
            }
        }
        Ok(all)
    }

    /// The paths to delete for `name`, which is a whole repository, one revision, or one file. Blobs that other
    /// revisions or files use are not included. `None` if the cache has no such model.
    pub fn removal(&self, name: &ModelName) -> Result<Option<Removal>, HubError> {
        let folder = self.repository(&name.repo);
        let locks = self.root.join(".locks").join(name.repo.folder());
        if !folder.is_dir() {
            return Ok(None);
        }
        let blobs_folder = folder.join("blobs");
        let whole = name.revision.is_none() && name.file.is_none();
        if whole {
            let mut bytes = 0;
            for blob in names_in(&blobs_folder)? {
                bytes += size(&blobs_folder.join(blob));
            }
            return Ok(Some(Removal { bytes, folder, locks, whole, links: vec![], blobs: vec![] }));
        }
        let Some(commit) = self.commit(name)? else { return Ok(None) };
        let (mut links, mut removed, mut kept) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for other in names_in(&folder.join("snapshots"))? {
            let entries = entries(&self.snapshot(&name.repo, &other))?;
            let files: Vec<select::Entry> = entries.iter().map(|e| (e.path.clone(), None)).collect();
            let meant: Vec<usize> = match &name.file {
                _ if other != commit => Vec::new(),
                None => (0..files.len()).collect(),
                Some(_) => match select::removed(name, &files) {
                    Ok(files) => files,
                    Err(error) if is_absent(&error) => Vec::new(),
                    Err(error) => return Err(error),
                },
            };
            for (i, entry) in entries.into_iter().enumerate() {
                if meant.contains(&i) {
                    links.push(entry.link);
                    removed.extend(entry.target);
                } else {
                    kept.extend(entry.target);
                }
            }
        }
        if links.is_empty() {
            return Ok(None);
        }
        if name.file.is_none() {
            for (reference, of) in self.references(&name.repo)? {
                if of == commit {
                    links.insert(0, folder.join("refs").join(reference));
                }
            }
            links.push(self.snapshot(&name.repo, &commit));
        }
        // A link may point to any path, so only blobs inside this folder are deleted.
        let inside = fs::canonicalize(&blobs_folder).unwrap_or(blobs_folder);
        let blobs: Vec<PathBuf> =
            removed.difference(&kept).filter(|b| b.parent() == Some(inside.as_path())).cloned().collect();
        let bytes = blobs.iter().map(|b| size(b)).sum();
        Ok(Some(Removal { bytes, folder, locks, whole, links, blobs }))
    }

    // --- pulling ----------------------------------------------------------------------------------------------

    fn repository(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }

    pub(super) fn snapshot(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.repository(repo).join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, repo: &RepoId, checksum: &str) -> PathBuf {
        self.repository(repo).join("blobs").join(checksum)
    }

    pub(super) fn incomplete(&self, repo: &RepoId, checksum: &str) -> PathBuf {
        self.repository(repo).join("blobs").join(format!("{checksum}.incomplete"))
    }

    /// Creates the folders of a repository, and the root if it does not exist.
    pub(super) fn prepare(&self, repo: &RepoId) -> Result<(), HubError> {
        let folder = self.repository(repo);
        let locks = self.root.join(".locks").join(repo.folder());
        for folder in [folder.join("blobs"), folder.join("refs"), folder.join("snapshots"), locks] {
            self.make_folder(&folder)?;
        }
        Ok(())
    }

    /// Free bytes of the file system that holds the root.
    pub(super) fn free_bytes(&self) -> Result<u64, HubError> {
        let space = statvfs(&self.root).map_err(|e| failed("get the free space of", &self.root, e.into()))?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// Takes the lock for writing a blob. Does not wait for another process, because a download may take hours.
    pub(super) fn lock(&self, repo: &RepoId, checksum: &str, file: &str) -> Result<Lock, HubError> {
        let lock = self.root.join(".locks").join(repo.folder()).join(format!("{checksum}.lock"));
        let handle = self.create(&lock, OpenOptions::new().write(true))?;
        match Lock::take(handle).map_err(|error| failed("lock", &lock, error))? {
            Some(lock) => Ok(lock),
            None => Err(HubError::Busy { file: file.to_owned(), lock }),
        }
    }

    /// Takes the lock for writing a repository's links and references. All writers use the same temporary file, so the
    /// file of a writer that was killed is replaced by the next one.
    fn lock_small_writes(&self, repo: &RepoId) -> Result<Lock, HubError> {
        let since = Instant::now();
        loop {
            match self.lock(repo, "links", "a link") {
                Err(HubError::Busy { .. }) if since.elapsed() < SMALL_WRITE_WAIT => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                result => return result,
            }
        }
    }

    /// Opens or creates a file of the cache. In a shared cache all users may read it.
    pub(super) fn create(&self, path: &Path, options: &mut OpenOptions) -> Result<File, HubError> {
        let mut create = || {
            // `O_NONBLOCK`: if the path is a pipe, opening it must not wait for its other end.
            let file = options.create(true).custom_flags(libc::O_NONBLOCK).open(path)?;
            // The umask may have removed permissions when the file was created.
            if self.shared && file.metadata()?.permissions().mode() & 0o777 != SHARED_FILE {
                file.set_permissions(Permissions::from_mode(SHARED_FILE))?;
            }
            Ok(file)
        };
        create().map_err(|error| failed("write", path, error))
    }

    /// Makes `snapshots/COMMIT/FILE` a link to the blob.
    pub(super) fn link(
        &self,
        repo: &RepoId,
        commit: &str,
        file: &str,
        checksum: &str,
    ) -> Result<(), HubError> {
        let link = self.snapshot(repo, commit).join(file);
        self.make_folder(link.parent().expect("a file is in a folder"))?;
        let up = "../".repeat(file.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{checksum}"));
        if fs::read_link(&link).is_ok_and(|there| there == target) {
            return Ok(());
        }
        let _lock = self.lock_small_writes(repo)?;
        let temporary = self.repository(repo).join("blobs").join("link.part");
        let make = || {
            let _ = fs::remove_file(&temporary);
            symlink(&target, &temporary)?;
            fs::rename(&temporary, &link)
        };
        make().map_err(|error| {
            failed("create a symbolic link, which the layout of the hub's cache needs, at", &link, error)
        })
    }

    /// Writes the reference from `revision` to `commit`.
    pub(super) fn write_reference(
        &self,
        repo: &RepoId,
        revision: &str,
        commit: &str,
    ) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.repository(repo).join("refs").join(revision);
        if file::read(&path, MAX_REF_BYTES).is_ok_and(|there| there == commit.as_bytes()) {
            return Ok(());
        }
        self.make_folder(path.parent().expect("a reference is in a folder"))?;
        let _lock = self.lock_small_writes(repo)?;
        let temporary = self.repository(repo).join("blobs").join("ref.part");
        let mut file = self.create(&temporary, OpenOptions::new().write(true).truncate(true))?;
        let mut write = || {
            file.write_all(commit.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| failed("write", &path, error))
    }

    fn make_folder(&self, folder: &Path) -> Result<(), HubError> {
        let mut missing = Vec::new();
        let mut at = folder;
        while !at.is_dir() {
            missing.push(at);
            match at.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => at = parent,
                _ => break,
            }
        }
        for folder in missing.into_iter().rev() {
            let mode = if self.shared { SHARED_FOLDER } else { 0o777 };
            let make = || {
                match DirBuilder::new().mode(mode).create(folder) {
                    Err(e) if e.kind() == ErrorKind::AlreadyExists && folder.is_dir() => return Ok(()),
                    result => result?,
                }
                if self.shared { fs::set_permissions(folder, Permissions::from_mode(mode)) } else { Ok(()) }
            };
            make().map_err(|error| failed("create the folder", folder, error))?;
        }
        Ok(())
    }

    // --- local models -----------------------------------------------------------------------------------------

    /// The commit that `name` means, if this cache has its snapshot.
    fn commit(&self, name: &ModelName) -> Result<Option<String>, HubError> {
        let references = self.references(&name.repo)?;
        let snapshots = names_in(&self.repository(&name.repo).join("snapshots"))?;
        let here = |commit: &String| snapshots.contains(commit);
        if let Some(revision) = &name.revision {
            let commit = references.get(revision).unwrap_or(revision);
            return Ok(Some(commit.clone()).filter(here));
        }
        if let Some(commit) = references.get(super::name::MAIN).filter(|c| here(c)) {
            return Ok(Some(commit.clone()));
        }
        let mut known: Vec<&String> = references.iter().filter(|(_, c)| here(c)).map(|(r, _)| r).collect();
        if known.is_empty() {
            known = snapshots.iter().collect();
        }
        match known[..] {
            [] => Ok(None),
            [one] => Ok(Some(references.get(one).unwrap_or(one).clone())),
            _ => Err(HubError::WhichRevision {
                name: name.clone(),
                names: known.iter().map(|r| format!("{}@{r}", name.repo)).collect(),
            }),
        }
    }

    /// All references: revision to commit.
    fn references(&self, repo: &RepoId) -> Result<BTreeMap<String, String>, HubError> {
        let folder = self.repository(repo).join("refs");
        let mut all = BTreeMap::new();
        for entry in entries(&folder)? {
            let Some(path) = &entry.target else { continue };
            if let Ok(commit) = file::read_text(path, MAX_REF_BYTES)
                && is_commit(commit.trim())
            {
                all.insert(entry.path, commit.trim().to_owned());
            }
        }
        Ok(all)
    }

    fn incomplete_bytes(&self, repo: &RepoId) -> Result<u64, HubError> {
        let blobs = self.repository(repo).join("blobs");
        let incomplete = names_in(&blobs)?.into_iter().filter(|name| name.ends_with(".incomplete"));
        Ok(incomplete.map(|name| size(&blobs.join(name))).sum())
    }
}

impl Removal {
    /// Deletes the paths.
    ///
    /// # Errors
    /// Fails if another process pulls the model, or if the file system reports an error. Paths deleted before the error
    /// stay deleted.
    pub fn apply(self) -> Result<(), HubError> {
        let mut held_locks = Vec::new();
        for name in names_in(&self.locks)? {
            let lock = self.locks.join(name);
            let Ok((handle, _)) = file::open(&lock) else { continue };
            match Lock::take(handle).map_err(|error| failed("lock", &lock, error))? {
                Some(lock) => held_locks.push(lock),
                None => return Err(HubError::Busy { file: self.folder.display().to_string(), lock }),
            }
        }
        let delete = |path: &Path| {
            // `symlink_metadata` reads the link, not its target.
            let remove = match fs::symlink_metadata(path) {
                Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
                Ok(_) => fs::remove_file(path),
                Err(error) => Err(error),
            };
            match remove {
                Err(e) if e.kind() != ErrorKind::NotFound => Err(failed("remove", path, e)),
                _ => Ok(()),
            }
        };
        for path in self.links.iter().chain(&self.blobs) {
            delete(path)?;
        }
        if self.whole {
            // In this order, an interruption never leaves something that looks like a complete model.
            for part in ["refs", "snapshots", "blobs"] {
                delete(&self.folder.join(part))?;
            }
            delete(&self.folder)?;
            delete(&self.locks)?;
        }
        Ok(())
    }
}

pub(super) fn failed(action: &'static str, path: &Path, error: io::Error) -> HubError {
    HubError::File { action, path: path.to_path_buf(), error }
}

/// Size of the file at a path, links followed; 0 if there is none.
fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |m| m.len())
}

/// Names of the entries of a folder, sorted; empty if there is no such folder.
fn names_in(folder: &Path) -> Result<Vec<String>, HubError> {
    let listing = match fs::read_dir(folder) {
        Ok(listing) => listing,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(e) => return Err(failed("list", folder, e)),
    };
    let mut names: Vec<String> =
        listing.take(MAX_FILES).filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    Ok(names)
}

/// The files below `folder`, sorted by path. Folders that are links are not entered.
fn entries(folder: &Path) -> Result<Vec<Entry>, HubError> {
    fn walk(folder: &Path, before: &str, depth: usize, all: &mut Vec<Entry>) -> Result<(), HubError> {
        for name in names_in(folder)? {
            let link = folder.join(&name);
            let path = format!("{before}{name}");
            let is_folder = fs::symlink_metadata(&link).is_ok_and(|m| m.is_dir());
            if is_folder && depth < MAX_DEPTH {
                walk(&link, &format!("{path}/"), depth + 1, all)?;
            } else if !is_folder && all.len() < MAX_FILES {
                let target = fs::canonicalize(&link).ok().filter(|t| t.is_file());
                let bytes = target.as_deref().map_or(0, size);
                all.push(Entry { path, link, target, bytes });
            }
        }
        Ok(())
    }
    let mut all = Vec::new();
    walk(folder, "", 0, &mut all)?;
    Ok(all)
}

/// The format of a snapshot, or [`Format::Partial`] if files are missing.
fn state(entries: &[Entry]) -> Format {
    let here: BTreeSet<&str> =
        entries.iter().filter(|e| e.target.is_some()).map(|e| e.path.as_str()).collect();
    let weights: Vec<&str> = here.iter().copied().filter(|path| is_weights(path)).collect();
    let whole = |path: &str| {
        let stem = path.strip_suffix(".safetensors").unwrap_or(path);
        let Some((name, total)) = part_of(stem) else { return true };
        weights.iter().filter(|other| sibling_of(other, name, total)).count() == total
    };
    if !weights.is_empty() && here.contains("config.json") {
        return if weights.iter().all(|w| whole(w)) { Format::Safetensors } else { Format::Partial };
    }
    if !select::ggufs(&present(entries)).is_empty() {
        return Format::Gguf;
    }
    let begun = here.iter().any(|path| path.ends_with(".safetensors.index.json") || path.ends_with(".gguf"));
    if begun { Format::Partial } else { Format::Other }
}

/// Whether `path` is one of the `total` shards of `name`.
fn sibling_of(path: &str, name: &str, total: usize) -> bool {
    path.strip_suffix(".safetensors").and_then(part_of) == Some((name, total))
}

/// The files that exist, in the form that [`select`] takes.
fn present(entries: &[Entry]) -> Vec<select::Entry> {
    entries.iter().filter(|e| e.target.is_some()).map(|e| (e.path.clone(), Some(e.bytes))).collect()
}

/// Whether the error says that the named file does not exist (and not that the name is ambiguous).
fn is_absent(error: &HubError) -> bool {
    matches!(error, HubError::NoFile { .. } | HubError::Choose { problem: select::NO_SUCH_FILE, .. })
}
