//! Where a model's files come from: a folder, or the binary itself.
//!
//! A model is addressed by plain file names; nothing here reads outside the folder on the word of a file
//! inside it. Refuses what is not a regular file (a pipe would hang, a device never end).

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use super::CheckpointError;

/// Largest file that is read into memory; Gemma-3's tokenizer.json, the largest in use, has 33 MB.
pub const MAX_READ_BYTES: u64 = 64 << 20;

/// The files of one model, by name.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    name: String,
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    Folder(PathBuf),
    Embedded(&'static [(&'static str, &'static [u8])]),
}

impl ModelFiles {
    /// The files of a folder in Hugging Face layout. The model is called after the folder.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let fail = |problem: String| CheckpointError::file(folder.display(), problem);
        let canonical = match fs::canonicalize(folder) {
            Ok(path) => path,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(fail(
                    "no such folder; a model is a folder with config.json, tokenizer.json and \
                                 model.safetensors"
                        .into(),
                ));
            }
            Err(e) => return Err(fail(format!("cannot be opened: {e}"))),
        };
        if !canonical.is_dir() {
            return Err(fail("is a file; give the folder that holds it".into()));
        }
        let name = canonical.file_name().unwrap_or(canonical.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { name, source: Source::Folder(folder.to_path_buf()) })
    }

    /// Files embedded in the binary, as (file name, contents).
    pub fn embedded(name: impl Into<String>, files: &'static [(&'static str, &'static [u8])]) -> Self {
        Self { name: name.into(), source: Source::Embedded(files) }
    }

    /// What the model is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the files lie, for people.
    pub fn location(&self) -> String {
        match &self.source {
            Source::Folder(folder) => folder.display().to_string(),
            Source::Embedded(_) => format!("{} (embedded)", self.name),
        }
    }

    /// How messages call the file `name` of this model.
    pub fn display(&self, name: &str) -> String {
        match &self.source {
            Source::Folder(folder) => folder.join(name).display().to_string(),
            Source::Embedded(_) => format!("{} (embedded)/{name}", self.name),
        }
    }

    /// The whole file, at most [`MAX_READ_BYTES`]; `None` if the model has no such file.
    pub fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        match &self.source {
            Source::Embedded(_) => Ok(self.embedded_file(name).map(Cow::Borrowed)),
            Source::Folder(folder) => {
                let fail = |problem: String| CheckpointError::file(self.display(name), problem);
                let Some((file, len)) = open_regular(&folder.join(name)).map_err(fail)? else {
                    return Ok(None);
                };
                if len > MAX_READ_BYTES {
                    return Err(fail(format!("has {len} bytes; expected at most {MAX_READ_BYTES}")));
                }
                let mut bytes = Vec::with_capacity(len as usize);
                // The file may grow while it is read: the bound holds all the same.
                file.take(MAX_READ_BYTES)
                    .read_to_end(&mut bytes)
                    .map_err(|e| fail(format!("cannot be read: {e}")))?;
                Ok(Some(Cow::Owned(bytes)))
            }
        }
    }

    /// The file mapped into memory; `None` if the model has no such file.
    pub(super) fn map(&self, name: &str) -> Result<Option<FileBytes>, CheckpointError> {
        match &self.source {
            Source::Embedded(_) => Ok(self.embedded_file(name).map(FileBytes::Static)),
            Source::Folder(folder) => {
                let fail = |problem: String| CheckpointError::file(self.display(name), problem);
                let Some((file, len)) = open_regular(&folder.join(name)).map_err(fail)? else {
                    return Ok(None);
                };
                if len == 0 {
                    return Ok(Some(FileBytes::Static(&[]))); // an empty mapping is an error on some systems
                }
                // SAFETY: the mapping is read-only, and lives as long as the bytes lent from
                // it. Another process may still write to or truncate the file; that is as fatal here as it
                // is for every program that maps its input, and weights are not edited while they are served.
                let map = unsafe { memmap2::Mmap::map(&file) };
                map.map(|map| Some(FileBytes::Mapped(map)))
                    .map_err(|e| fail(format!("cannot be mapped into memory: {e}")))
            }
        }
    }

    /// Maps a file whose name was read from another file of the model, and so is not to be trusted: it
    /// must be a plain name, and must not be a link to somewhere else. The links of Hugging Face's
    /// cache, from `snapshots/REVISION/` into its `blobs/`, are inside.
    pub(super) fn map_listed(&self, name: &str) -> Result<Option<FileBytes>, String> {
        if !is_plain_name(name) {
            return Err(format!("names {name:?}; expected a file of the same folder"));
        }
        if let Source::Folder(folder) = &self.source {
            let (Ok(folder), Ok(target)) = (fs::canonicalize(folder), fs::canonicalize(folder.join(name)))
            else {
                return Ok(None);
            };
            let blobs = match folder.parent() {
                Some(parent) if parent.ends_with("snapshots") => {
                    parent.parent().map(|root| root.join("blobs"))
                }
                _ => None,
            };
            if !target.starts_with(&folder) && !blobs.is_some_and(|blobs| target.starts_with(blobs)) {
                return Err(format!(
                    "names {name:?}, a link to {}; expected a file of the same folder",
                    target.display()
                ));
            }
        }
        self.map(name).map_err(|e| format!("names {name:?}, which cannot be used: {e}"))
    }

    fn embedded_file(&self, name: &str) -> Option<&'static [u8]> {
        let Source::Embedded(files) = self.source else { return None };
        files.iter().find(|(n, _)| *n == name).map(|(_, bytes)| *bytes)
    }
}

/// Bytes of a file, borrowed from the binary or from a mapping.
#[derive(Debug)]
pub(super) enum FileBytes {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
}

impl Deref for FileBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(map) => map,
            FileBytes::Static(bytes) => bytes,
        }
    }
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// `None` if there is no such file. Looks before it opens: opening a pipe waits for a writer.
fn open_regular(path: &Path) -> Result<Option<(File, u64)>, String> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("cannot be opened: {e}")),
    };
    if !metadata.is_file() {
        return Err("is not a regular file".into());
    }
    let file = File::open(path).map_err(|e| format!("cannot be opened: {e}"))?;
    let len = file.metadata().map_err(|e| format!("cannot be opened: {e}"))?.len();
    Ok(Some((file, len)))
}
