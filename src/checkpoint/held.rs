//! Files that stay open, so that they can be read again after they were deleted.
//!
//! An open file has a path under `/proc/self/fd`. There it can be opened again, with a separate position and other
//! flags.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file;

/// Maximum number of held files of one model. By default, a process may open 1024 files.
const MAX_FILES: usize = 512;

#[derive(Debug)]
pub(super) struct Held {
    files: BTreeMap<PathBuf, Arc<File>>,
    /// Links that lead out of the model's folder, with their targets.
    pub(super) links_out: BTreeMap<PathBuf, PathBuf>,
}

impl Held {
    /// Opens the regular files among `paths`, and ignores missing files and files of other types.
    pub(super) fn open(paths: Vec<PathBuf>, links_out: BTreeMap<PathBuf, PathBuf>) -> Result<Self, String> {
        let mut files = BTreeMap::new();
        for path in paths {
            if !fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                continue;
            }
            if files.len() == MAX_FILES {
                return Err(format!("has more than {MAX_FILES} files; expected the files of one model only"));
            }
            let (file, _) = file::open(&path)
                .map_err(|error| format!("{}: cannot be opened: {error}", path.display()))?;
            files.insert(path, Arc::new(file));
        }
        Ok(Self { files, links_out })
    }

    /// The path at which a held file can be opened. For a file that is not held, a path that does not exist.
    pub(super) fn place(&self, path: &Path) -> PathBuf {
        match self.files.get(path) {
            Some(file) => PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())),
            None => PathBuf::from("/proc/self/fd/none"),
        }
    }

    /// The names of the files in a folder.
    pub(super) fn names_in(&self, folder: &Path) -> Vec<String> {
        let within = self.files.keys().filter(|path| path.parent() == Some(folder));
        within.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect()
    }

    #[allow(clippy::type_complexity)]
    pub(super) fn to_parts(&self) -> (Vec<PathBuf>, BTreeMap<PathBuf, PathBuf>, Vec<Arc<File>>) {
        (self.files.keys().cloned().collect(), self.links_out.clone(), self.files.values().cloned().collect())
    }

    pub(super) fn from_parts(
        paths: Vec<PathBuf>,
        links_out: BTreeMap<PathBuf, PathBuf>,
        files: Vec<File>,
    ) -> Self {
        Self { files: paths.into_iter().zip(files.into_iter().map(Arc::new)).collect(), links_out }
    }
}
