//! Reads the files of a model from a folder, a GGUF file, or the binary.
//!
//! Files are requested by plain names. No file of the folder can make this module read outside the folder. A GGUF file
//! contains config and tokenizer as metadata; they are presented as separate files. The user may give other paths for
//! configs and tokenizer. Only regular files are read: reading a pipe could block, and a device may never end.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::direct::DirectFile;
use super::error::{CheckpointError, one_line};
use super::gguf::{self, GgufArch};
use super::held::Held;
use crate::file;

/// Largest file that is read into memory, in bytes. The largest tokenizer.json in use has 33 MB.
pub const MAX_READ_BYTES: u64 = 64 << 20;

const CONFIG_FILE: &str = "config.json";
const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";
/// Configs have a few KB. The limit is low because a parsed JSON value takes up to 32 times the bytes of its text.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// Each shard is a mapping, and Linux allows a process 65,530 of them by default. Models in use have up to 12 shards.
pub(super) const MAX_SHARDS: usize = 4096;

/// Maximum number of folder entries that are read.
const MAX_NAMES: usize = 1 << 16;

/// The files of one model.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    name: String,
    source: Source,
    /// The files by name, if they are not on disk.
    contents: Arc<BTreeMap<String, Cow<'static, [u8]>>>,
    /// Files that the user placed elsewhere, as (name, path). There may be no file at the path.
    overrides: Vec<(String, PathBuf)>,
    /// The open files after [`ModelFiles::hold`]. Then no other files are read.
    held: Option<Arc<Held>>,
    /// [`ModelFiles::cached`]
    is_cached: bool,
    /// The architectures of which GGUF files can be read.
    archs: &'static [&'static GgufArch],
    /// The parsed `config.json`, set by the first call of [`ModelFiles::config`].
    config: Arc<OnceLock<Option<Arc<Value>>>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Source {
    Folder(PathBuf),
    /// One GGUF file, or its parts in order, and the file of its vision tower.
    Gguf {
        parts: Vec<PathBuf>,
        tower: Option<PathBuf>,
    },
    /// Files in the binary.
    Embedded,
    Memory,
}

/// The names and paths of held files, to send to another process.
#[derive(Debug, Serialize, Deserialize)]
pub struct HeldNames {
    name: String,
    is_cached: bool,
    source: Source,
    overrides: Vec<(String, PathBuf)>,
    paths: Vec<PathBuf>,
    links_out: BTreeMap<PathBuf, PathBuf>,
}

impl HeldNames {
    /// The number of open files that belong to these names.
    pub fn num_files(&self) -> usize {
        self.paths.len()
    }
}

impl ModelFiles {
    /// Opens a folder in Hugging Face layout, a GGUF file, or a folder with a GGUF file. The model gets the name of the
    /// folder or the file. A GGUF file must have one of the architectures `archs`; a vision tower in the same folder
    /// belongs to it.
    pub fn open(folder: &Path, archs: &'static [&'static GgufArch]) -> Result<Self, CheckpointError> {
        let fail = |problem: String| CheckpointError::file(folder.display(), problem);
        let canonical = match fs::canonicalize(folder) {
            Ok(path) => path,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(fail(
                    "no such file or folder; a model is a folder with config.json, tokenizer.json and \
                     model.safetensors, a GGUF file, or the name of a model that `unicorn pull` fetched"
                        .into(),
                ));
            }
            Err(e) => return Err(fail(format!("cannot be opened: {e}"))),
        };
        if !canonical.is_dir() {
            return match is_gguf(folder).map_err(fail)? {
                true => Self::open_gguf(folder, archs),
                false => {
                    Err(fail("is not a GGUF file; for other formats, give the folder of the model".into()))
                }
            };
        }
        if let Some(file) = only_gguf(folder).map_err(fail)? {
            return Self::open_gguf(&file, archs);
        }
        let name = canonical.file_name().unwrap_or(canonical.as_os_str()).to_string_lossy().into_owned();
        Ok(Self::new(name, Source::Folder(folder.to_path_buf())))
    }

    fn new(name: String, source: Source) -> Self {
        let (contents, config) = (Arc::default(), Arc::default());
        Self {
            name,
            source,
            contents,
            overrides: Vec::new(),
            held: None,
            is_cached: false,
            archs: &[],
            config,
        }
    }

    fn open_gguf(file: &Path, archs: &'static [&'static GgufArch]) -> Result<Self, CheckpointError> {
        let parts = gguf_parts(file).map_err(|problem| CheckpointError::file(file.display(), problem))?;
        let stem = file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy();
        // The name of a split file ends in the part number, which is not part of the model's name.
        let name = split_number(&stem).map_or(&*stem, |(name, ..)| name).to_owned();
        let tower = tower_beside(&parts[0]);
        Ok(Self { archs, ..Self::new(name, Source::Gguf { parts, tower }) })
    }

    /// Files in memory, as (name, contents). A single file whose name ends in `.gguf` is a whole model, of one of the
    /// architectures `archs`.
    pub fn in_memory(
        name: impl Into<String>,
        files: impl IntoIterator<Item = (String, Vec<u8>)>,
        archs: &'static [&'static GgufArch],
    ) -> Self {
        let files = files.into_iter().map(|(name, bytes)| (name, Cow::Owned(bytes))).collect();
        Self { archs, contents: Arc::new(files), ..Self::new(name.into(), Source::Memory) }
    }

    /// Files embedded in the binary, as (file name, contents).
    pub fn embedded(name: impl Into<String>, files: &'static [(&'static str, &'static [u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), Cow::Borrowed(*bytes))).collect();
        Self { contents: Arc::new(files), ..Self::new(name.into(), Source::Embedded) }
    }

    /// Takes `config.json` from another path: a file, or a folder, of which `generation_config.json` is taken too.
    pub fn with_config(self, path: &Path) -> Result<Self, CheckpointError> {
        self.with(CONFIG_FILE, &["generation_config.json"], path)
    }

    /// Takes `tokenizer.json` from another path: a file, or a folder, of which the chat template is taken too.
    pub fn with_tokenizer(self, path: &Path) -> Result<Self, CheckpointError> {
        self.with("tokenizer.json", &["tokenizer_config.json", CHAT_TEMPLATE_FILE], path)
    }

    /// Takes the chat template from another file.
    pub fn with_chat_template(mut self, path: &Path) -> Result<Self, CheckpointError> {
        if !path.is_file() {
            let problem = "is not a file; expected a chat template in Jinja";
            return Err(CheckpointError::file(path.display(), problem));
        }
        // It has precedence over the template of the tokenizer's folder.
        self.overrides.insert(0, (CHAT_TEMPLATE_FILE.to_owned(), path.to_path_buf()));
        Ok(self)
    }

    fn with(mut self, name: &str, companions: &[&str], path: &Path) -> Result<Self, CheckpointError> {
        let fail = |problem: String| {
            let problem = format!("{problem}; expected a {name}, or a folder that holds one");
            Err(CheckpointError::file(path.display(), problem))
        };
        if path.is_dir() {
            if !path.join(name).is_file() {
                return fail(format!("holds no {name}"));
            }
            // Missing companions are overridden too: files of two folders must not be mixed.
            let all = [name].into_iter().chain(companions.iter().copied());
            self.overrides.extend(all.map(|name| (name.to_owned(), path.join(name))));
        } else if path.is_file() {
            self.overrides.push((name.to_owned(), path.to_path_buf()));
        } else {
            return fail("is not a file or folder".into());
        }
        // The config of the folder may be parsed already, because clones share the cell.
        self.config = Arc::default();
        Ok(self)
    }

    fn override_path(&self, name: &str) -> Option<&Path> {
        self.overrides.iter().find(|(other, _)| other == name).map(|(_, path)| path.as_path())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn archs(&self) -> &'static [&'static GgufArch] {
        self.archs
    }

    /// The path or kind of the files, for messages.
    pub fn location(&self) -> String {
        match &self.source {
            Source::Folder(folder) => folder.display().to_string(),
            Source::Gguf { parts, .. } => parts[0].display().to_string(),
            Source::Embedded => format!("{} (embedded)", self.name),
            Source::Memory => format!("{} (in memory)", self.name),
        }
    }

    /// The name that messages use for the file `name` of this model.
    pub fn display(&self, name: &str) -> String {
        if let Some(path) = self.override_path(name) {
            return path.display().to_string();
        }
        match &self.source {
            Source::Folder(folder) => folder.join(name).display().to_string(),
            Source::Gguf { .. } => format!("{}: {name} of its metadata", self.location()),
            Source::Embedded | Source::Memory => format!("{}/{name}", self.location()),
        }
    }

    /// The whole file, at most [`MAX_READ_BYTES`]; `None` if the model has no such file.
    pub fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        let fail = |problem: String| CheckpointError::file(self.display(name), problem);
        if let Some(path) = self.override_path(name) {
            return read_file(&self.place(path)).map_err(fail);
        }
        if let Some(parts) = self.map_gguf()? {
            let parts: Vec<_> = parts.iter().map(|(display, bytes)| (display.as_str(), &**bytes)).collect();
            // Without a usable tower, the config describes none, and the model reads text only.
            let mapped = self.map_tower().filter(|_| name == CONFIG_FILE).and_then(Result::ok);
            let read = |(file, bytes)| gguf::tower(bytes, file, parts[0].1, self.archs).ok();
            let tower = mapped.as_ref().and_then(|(file, bytes)| read((file, bytes)));
            return Ok(gguf::generated(&parts, name, self.archs, tower.as_ref())?.map(Cow::Owned));
        }
        match &self.source {
            Source::Folder(folder) => read_file(&self.place(&folder.join(name))).map_err(fail),
            Source::Gguf { .. } | Source::Embedded | Source::Memory => Ok(self.contents.get(name).cloned()),
        }
    }

    /// The parsed `config.json`; `None` if the model has no such file. The first call parses it.
    pub fn config(&self) -> Result<Option<Arc<Value>>, CheckpointError> {
        if let Some(config) = self.config.get() {
            return Ok(config.clone());
        }
        let config = match self.read(CONFIG_FILE)? {
            Some(bytes) => Some(Arc::new(parse_config(&bytes, &self.display(CONFIG_FILE))?)),
            None => None,
        };
        Ok(self.config.get_or_init(|| config).clone())
    }

    /// The names of the folder's files, at most [`MAX_NAMES`].
    pub(super) fn names(&self) -> Result<Vec<String>, CheckpointError> {
        match &self.source {
            Source::Gguf { .. } | Source::Embedded | Source::Memory => {
                Ok(self.contents.keys().cloned().collect())
            }
            Source::Folder(folder) => {
                if let Some(held) = &self.held {
                    return Ok(held.names_in(folder));
                }
                let fail = |e| CheckpointError::file(folder.display(), format!("cannot be listed: {e}"));
                let entries = fs::read_dir(folder).map_err(fail)?.take(MAX_NAMES);
                let names = entries.filter_map(|entry| match entry {
                    // No file of a model has a name that is not UTF-8.
                    Ok(entry) => entry.file_name().into_string().ok().map(Ok),
                    Err(e) => Some(Err(fail(e))),
                });
                names.collect()
            }
        }
    }

    /// The file mapped into memory; `None` if the model has no such file.
    pub(super) fn map(&self, name: &str) -> Result<Option<FileBytes>, CheckpointError> {
        match &self.source {
            Source::Folder(folder) => {
                map_file(&self.place(&folder.join(name)), self.is_cached, &self.display(name))
            }
            Source::Gguf { .. } | Source::Embedded | Source::Memory => {
                Ok(self.contents.get(name).cloned().map(FileBytes::Memory))
            }
        }
    }

    /// The mapped parts of a GGUF file, with their names for messages; `None` if the model is not a GGUF file.
    pub(super) fn map_gguf(&self) -> Result<Option<Vec<(String, FileBytes)>>, CheckpointError> {
        match &self.source {
            Source::Folder(_) => Ok(None),
            Source::Embedded | Source::Memory => Ok(match self.contents.first_key_value() {
                Some((name, bytes)) if self.contents.len() == 1 && has_gguf_ending(name.as_ref()) => {
                    Some(vec![(self.display(name), FileBytes::Memory(bytes.clone()))])
                }
                _ => None,
            }),
            Source::Gguf { parts, .. } => {
                parts.iter().map(|part| self.map_part(part)).collect::<Result<_, _>>().map(Some)
            }
        }
    }

    /// The mapped file of the vision tower beside a GGUF file, with its name for messages; `None` if there is none.
    pub(super) fn map_tower(&self) -> Option<Result<(String, FileBytes), CheckpointError>> {
        match &self.source {
            Source::Gguf { tower: Some(tower), .. } => Some(self.map_part(tower)),
            _ => None,
        }
    }

    /// The path of the file in which the vision tower of a GGUF file is.
    pub fn tower(&self) -> Option<&Path> {
        match &self.source {
            Source::Gguf { tower, .. } => tower.as_deref(),
            _ => None,
        }
    }

    /// Why the vision tower beside a GGUF file cannot be used; `None` if it can, or if there is none. Text needs no
    /// tower, so the model can be used without it.
    pub fn tower_problem(&self) -> Result<Option<CheckpointError>, CheckpointError> {
        let Some(tower) = self.map_tower() else { return Ok(None) };
        let Some(parts) = self.map_gguf()? else { return Ok(None) };
        let (file, bytes) = match tower {
            Ok(tower) => tower,
            Err(problem) => return Ok(Some(problem)),
        };
        Ok(gguf::tower(&bytes, &file, &parts[0].1, self.archs).err())
    }

    fn map_part(&self, part: &Path) -> Result<(String, FileBytes), CheckpointError> {
        let display = part.display().to_string();
        match map_file(&self.place(part), self.is_cached, &display)? {
            Some(bytes) => Ok((display, bytes)),
            None => Err(CheckpointError::file(display, "no such file")),
        }
    }

    /// Maps a file whose name comes from another file of the model. The name is not trusted: it must be a plain name,
    /// and must not be a link out of the folder. Links in a Hugging Face cache from `snapshots/REVISION/` to `blobs/`
    /// count as inside. `fail` makes an error about the file that lists the name.
    pub(super) fn map_listed(
        &self,
        name: &str,
        fail: impl Fn(String) -> CheckpointError,
    ) -> Result<Option<FileBytes>, CheckpointError> {
        if !is_plain_name(name) {
            return Err(fail(format!("names {name:?}; expected a file of the same folder")));
        }
        if let Source::Folder(folder) = &self.source {
            let outside = match &self.held {
                Some(held) => held.links_out.get(&folder.join(name)).cloned(),
                None => link_out(folder, name),
            };
            if let Some(target) = outside {
                return Err(fail(format!(
                    "names {name:?}, a link to {}; expected a file of the same folder",
                    target.display()
                )));
            }
        }
        self.map(name).map_err(|error| match error {
            CheckpointError::NoMemory { .. } => error,
            error => fail(format!("names {name:?}, which cannot be used: {error}")),
        })
    }

    /// Sets whether the files are read with the page cache and stay in it, so that the next load is fast.
    #[must_use]
    pub fn cached(self, is_cached: bool) -> Self {
        Self { is_cached, ..self }
    }

    /// Opens these files and keeps them open. They can then be read even if they are deleted or replaced on disk.
    /// [`ModelFiles::to_parts`] passes them to another process.
    pub fn hold(&self) -> Result<Self, CheckpointError> {
        let mut paths: Vec<PathBuf> = self.overrides.iter().map(|(_, path)| path.clone()).collect();
        let mut links_out = BTreeMap::new();
        match &self.source {
            Source::Embedded | Source::Memory => {}
            Source::Gguf { parts, tower } => paths.extend(parts.iter().chain(tower).cloned()),
            Source::Folder(folder) => {
                for name in self.names()? {
                    links_out.extend(link_out(folder, &name).map(|target| (folder.join(&name), target)));
                    paths.push(folder.join(name));
                }
            }
        }
        let held = Held::open(paths, links_out)
            .map_err(|problem| CheckpointError::file(self.location(), problem))?;
        Ok(Self { held: Some(Arc::new(held)), ..self.clone() })
    }

    /// A SHA-256 of what identifies held files: their lengths, times of change, and samples of their bytes, with the beginning,
    /// where the headers are. Files in memory count whole. Files of many GB are not read whole. `None` if a file cannot be
    /// read, or if the files are neither held nor in memory.
    pub fn sampled_digest(&self) -> Option<[u8; 32]> {
        const SAMPLES: u64 = 64;
        const SAMPLE_BYTES: u64 = 16 << 10;
        let mut hasher = Sha256::new();
        for (name, contents) in &*self.contents {
            hasher.update(Sha256::digest(name));
            hasher.update(Sha256::digest(contents));
        }
        match &self.held {
            None if matches!(self.source, Source::Embedded | Source::Memory) => {}
            None => return None,
            Some(held) => {
                for file in held.to_parts().2 {
                    let metadata = file.metadata().ok()?;
                    let (bytes, modified) = (metadata.len(), metadata.modified().ok()?);
                    hasher.update(bytes.to_le_bytes());
                    let since = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                    hasher.update(since.as_nanos().to_le_bytes());
                    let last = bytes.saturating_sub(SAMPLE_BYTES);
                    for i in 0..SAMPLES {
                        let mut sample = vec![0; SAMPLE_BYTES.min(bytes) as usize];
                        file.read_exact_at(&mut sample, last / (SAMPLES - 1) * i).ok()?;
                        hasher.update(&sample);
                    }
                }
            }
        }
        Some(hasher.finalize().into())
    }

    /// The names of the held files and the open files, to send to another process of this binary. `None` if the files
    /// are in memory, or not held.
    pub fn to_parts(&self) -> Option<(HeldNames, Vec<Arc<File>>)> {
        if let Source::Memory = self.source {
            return None;
        }
        let (paths, links_out, files) = self.held.as_ref()?.to_parts();
        let (name, source, overrides) = (self.name.clone(), self.source.clone(), self.overrides.clone());
        let is_cached = self.is_cached;
        Some((HeldNames { name, is_cached, source, overrides, paths, links_out }, files))
    }

    /// Restores the files that another process held. `files` are those of [`ModelFiles::to_parts`], in the same order,
    /// `embedded` are the files of the embedded model, and `archs` as in [`ModelFiles::open`].
    pub fn from_parts(
        names: HeldNames,
        files: Vec<File>,
        embedded: &'static [(&'static str, &'static [u8])],
        archs: &'static [&'static GgufArch],
    ) -> Self {
        let HeldNames { name, is_cached, source, overrides, paths, links_out } = names;
        assert_eq!(files.len(), paths.len(), "the files of {name}");
        let held = Some(Arc::new(Held::from_parts(paths, links_out, files)));
        match source {
            Source::Embedded => Self { overrides, archs, held, is_cached, ..Self::embedded(name, embedded) },
            source => Self { overrides, archs, held, is_cached, ..Self::new(name, source) },
        }
    }

    /// The path at which to open a file: the path of the held file if the files are held, otherwise `path`.
    fn place(&self, path: &Path) -> PathBuf {
        self.held.as_ref().map_or_else(|| path.to_path_buf(), |held| held.place(path))
    }
}

/// The target of the file `name` of a folder if it is a link out of the folder. The `blobs` of a Hugging Face cache
/// count as part of its snapshots.
fn link_out(folder: &Path, name: &str) -> Option<PathBuf> {
    let (folder, target) = (fs::canonicalize(folder).ok()?, fs::canonicalize(folder.join(name)).ok()?);
    let blobs = match folder.parent() {
        Some(parent) if parent.ends_with("snapshots") => parent.parent().map(|root| root.join("blobs")),
        _ => None,
    };
    let is_inside = target.starts_with(&folder) || blobs.is_some_and(|blobs| target.starts_with(blobs));
    (!is_inside).then_some(target)
}

/// Bytes of a file.
#[derive(Debug)]
pub(super) enum FileBytes {
    Mapped(memmap2::Mmap, DirectFile),
    Memory(Cow<'static, [u8]>),
}

impl Deref for FileBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(map, _) => map,
            FileBytes::Memory(bytes) => bytes,
        }
    }
}

impl FileBytes {
    pub fn slice(&self, range: Range<usize>) -> FileSlice<'_> {
        let file = match self {
            FileBytes::Mapped(_, file) => Some((file, range.start as u64)),
            FileBytes::Memory(_) => None,
        };
        FileSlice { bytes: &self[range], file }
    }

    /// Asks the kernel to drop the pages of some bytes of a mapped file. A later access reads them from the disk again.
    /// The kernel may keep pages that other processes use. Pages of a file that stays cached only leave the mapping.
    pub fn release(&self, range: Range<usize>) {
        let FileBytes::Mapped(map, file) = self else { return };
        if range.is_empty() {
            return;
        }
        // SAFETY: the mapping is read-only and backed by a file, so dropping its pages does not change its bytes.
        let dropped = unsafe {
            map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
        };
        let length = std::num::NonZeroU64::new(range.len() as u64);
        let forgotten = match file.is_cached() {
            true => Ok(()),
            false => {
                rustix::fs::fadvise(file.buffered(), range.start as u64, length, rustix::fs::Advice::DontNeed)
            }
        };
        if let (Err(error), _) | (_, Err(error)) = (dropped, forgotten.map_err(std::io::Error::from)) {
            tracing::debug!(%error, "cannot release the pages of a file");
        }
    }

    /// Turns read-ahead of a mapped file on or off.
    pub fn read_ahead(&self, ahead: bool) {
        let FileBytes::Mapped(map, _) = self else { return };
        let advice = if ahead { memmap2::Advice::Normal } else { memmap2::Advice::Random };
        if let Err(error) = map.advise(advice) {
            tracing::debug!(%error, "cannot set the read-ahead of a file");
        }
    }

    /// Time of the last modification, if it is known.
    pub fn modified(&self) -> Option<SystemTime> {
        let FileBytes::Mapped(_, file) = self else { return None };
        file.buffered().metadata().and_then(|metadata| metadata.modified()).ok()
    }

    /// Bytes of the file that are in the page cache now.
    pub fn resident_bytes(&self) -> u64 {
        let FileBytes::Mapped(map, _) = self else { return 0 };
        let page = rustix::param::page_size();
        let mut pages = vec![0u8; map.len().div_ceil(page)];
        // SAFETY: the range is the mapping, which begins at a page, and `pages` has one byte for each of its pages.
        let result = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
        if result != 0 {
            return 0;
        }
        pages.iter().filter(|page| **page & 1 != 0).count() as u64 * page as u64
    }
}

/// A range of a file's bytes.
#[derive(Debug, Clone, Copy)]
pub struct FileSlice<'a> {
    /// The bytes in the mapping. Reading them pages them in.
    pub bytes: &'a [u8],
    /// The file and the offset of the first byte. `None` = the bytes are in memory.
    file: Option<(&'a DirectFile, u64)>,
}

impl<'a> From<&'a [u8]> for FileSlice<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        FileSlice { bytes, file: None }
    }
}

impl PartialEq for FileSlice<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl FileSlice<'_> {
    /// Reads `into.len()` bytes from byte `offset` of the slice, without the mapping and the page cache. The error
    /// names the bytes of the file. Panics if they are beyond the slice.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        let from = &self.bytes[offset as usize..][..into.len()];
        match self.file {
            Some((file, start)) => file.read_exact_at(into, start + offset).map_err(|e| {
                let at = start + offset;
                format!("bytes {at} to {} of the file cannot be read: {e}", at + into.len() as u64)
            }),
            None => {
                into.copy_from_slice(from);
                Ok(())
            }
        }
    }
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// The file mapped into memory; `None` if there is none. Messages call it `display`.
fn map_file(path: &Path, is_cached: bool, display: &str) -> Result<Option<FileBytes>, CheckpointError> {
    let fail = |problem: String| CheckpointError::file(display, problem);
    let Some((file, len)) = open_regular(path).map_err(fail)? else {
        return Ok(None);
    };
    if len == 0 {
        return Ok(Some(FileBytes::Memory(Cow::Borrowed(&[])))); // an empty mapping is an error on some systems
    }
    // SAFETY: the mapping is read-only, and lives as long as the bytes that are borrowed from it. Another process could
    // still write to the file or truncate it. No program that maps its input can prevent that, and weights are not
    // edited while they are served.
    let map = unsafe { memmap2::Mmap::map(&file) };
    match map {
        Ok(map) => {
            let file = if is_cached { DirectFile::cached(file) } else { DirectFile::new(file, path) };
            Ok(Some(FileBytes::Mapped(map, file)))
        }
        Err(error) if error.kind() == ErrorKind::OutOfMemory => {
            Err(CheckpointError::no_memory(display, len, error))
        }
        Err(error) => Err(fail(format!("cannot be mapped into memory: {error}"))),
    }
}

/// Whether a file is GGUF, by its first bytes, because Ollama's files have no extension. A file with the extension
/// `.gguf` counts as GGUF in any case, so that the GGUF reader reports what is wrong with it.
fn is_gguf(path: &Path) -> Result<bool, String> {
    let Some((file, _)) = open_regular(path)? else {
        return Ok(false);
    };
    let mut magic = Vec::new();
    file.take(4).read_to_end(&mut magic).map_err(|e| format!("cannot be read: {e}"))?;
    Ok(magic == b"GGUF" || has_gguf_ending(path))
}

fn has_gguf_ending(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

/// The GGUF file of a folder without other weights. A config in the folder, which some downloads have, is not needed.
fn only_gguf(folder: &Path) -> Result<Option<PathBuf>, String> {
    let unreadable = |e: std::io::Error| format!("cannot be read: {e}");
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            return Ok(None);
        }
        // Vision towers, and all parts of a split file but the first, are not separate models.
        let later =
            path.file_stem().and_then(|stem| split_number(stem.to_str()?)).is_some_and(|(_, n, _)| n > 1);
        if has_gguf_ending(&path) && !later && !file::is_tower(&name) {
            found.push(name);
        }
    }
    found.sort();
    match &found[..] {
        [] => Ok(None),
        [name] => Ok(Some(folder.join(name))),
        [first, ..] => Err(format!("holds {} GGUF files; give one of them ({first})", found.len())),
    }
}

/// The vision tower in the folder of a GGUF file. As the model itself, it may be a link to a blob of the Hugging Face
/// cache or to another folder, but only to the one in which the model's file is.
fn tower_beside(model: &Path) -> Option<PathBuf> {
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = fs::read_dir(folder).ok()?.take(MAX_NAMES);
    let mut towers: Vec<String> = names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|n| file::is_tower(n))
        .collect();
    towers.sort();
    let name = file::tower_of(model.file_name()?.to_str()?, towers.iter().map(String::as_str))?;
    let tower = folder.join(name);
    let target = |path: &Path| fs::canonicalize(path).ok();
    let (place, of_model) = (target(&tower)?, target(model)?);
    let is_inside = place.starts_with(target(folder)?) || place.parent() == of_model.parent();
    if !is_inside {
        tracing::warn!("{}: is not read, because it is a link out of the folder", tower.display());
        return None;
    }
    if towers.len() > 1 {
        tracing::info!(
            "of {} vision towers in {}, {name} is that of the model",
            towers.len(),
            folder.display()
        );
    }
    Some(tower)
}

/// `name-00001-of-00003` as (name, 1, 3).
fn split_number(stem: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let parse = |digits: &str| {
        let all = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        if all { digits.parse().ok() } else { None }
    };
    Some((name, parse(number)?, parse(count)?))
}

/// The parts of a GGUF file in order: the file alone, or all parts if its name has a part number.
fn gguf_parts(file: &Path) -> Result<Vec<PathBuf>, String> {
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let Some((name, number, count)) = split_number(stem) else {
        return Ok(vec![file.to_path_buf()]);
    };
    let part = |n: u32| file.with_file_name(format!("{name}-{n:05}-of-{count:05}.gguf"));
    if number != 1 {
        return Err(format!("is part {number} of {count}; give the first, {}", part(1).display()));
    }
    if count as usize > MAX_SHARDS {
        return Err(format!("is one of {count} parts; expected at most {}", MAX_SHARDS));
    }
    let parts: Vec<_> = (1..=count).map(part).collect();
    match parts.iter().find(|part| !part.exists()) {
        None => Ok(parts),
        Some(missing) => Err(format!("is one of {count} parts, of which {} is missing", missing.display())),
    }
}

/// The whole file, at most [`MAX_READ_BYTES`]; `None` if there is no such file.
fn read_file(path: &Path) -> Result<Option<Cow<'static, [u8]>>, String> {
    let Some((file, len)) = open_regular(path)? else { return Ok(None) };
    if len > MAX_READ_BYTES {
        return Err(format!("has {len} bytes; expected at most {MAX_READ_BYTES}"));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    // The file may grow while it is read, so the limit is applied again.
    file.take(MAX_READ_BYTES).read_to_end(&mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
    Ok(Some(Cow::Owned(bytes)))
}

/// Parses the JSON of a config of any model. Messages call it `file_name`.
pub(crate) fn parse_config(bytes: &[u8], file_name: &str) -> Result<Value, CheckpointError> {
    let fail = |problem: String| CheckpointError::file(file_name, problem);
    if bytes.len() > MAX_CONFIG_BYTES {
        return Err(fail(format!("has {} bytes; expected at most {MAX_CONFIG_BYTES}", bytes.len())));
    }
    serde_json::from_slice(bytes).map_err(|e| fail(format!("is not valid JSON: {}", one_line(&e))))
}

/// The file and its length; `None` if there is no such file.
fn open_regular(path: &Path) -> Result<Option<(File, u64)>, String> {
    match file::open(path) {
        Ok((file, metadata)) => Ok(Some((file, metadata.len()))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) if e.kind() == ErrorKind::InvalidInput => Err(e.to_string()),
        Err(e) => Err(format!("cannot be opened: {e}")),
    }
}
