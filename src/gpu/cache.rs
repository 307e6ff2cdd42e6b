//! Files that are kept between runs for a device: one set for each driver version and each version of the shaders.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::config::UserFolder;

/// A file that is being written has this extension, followed by the id of the process that writes it.
const PARTIAL: &str = "tmp";
/// The largest file that is read, in bytes. A driver's pipeline cache takes a few megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// The files of one device.
pub(super) struct Cache {
    /// The folder of the files; `None` if the user has no cache directory.
    dir: Option<PathBuf>,
    /// Vendor and device id, driver version, and the driver's pipeline cache UUID. It is a part of each file's name.
    driver: String,
}

impl Cache {
    pub fn new(driver: String) -> Cache {
        Cache::of_folder(UserFolder::Cache.path(|name| std::env::var_os(name)), driver)
    }

    pub fn of_folder(dir: Option<PathBuf>, driver: String) -> Cache {
        dir.iter().for_each(|dir| remove_partial(dir));
        Cache { dir, driver }
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(format!("{name}-{}-{}.bin", self.driver, env!("SHADER_HASH"))))
    }

    /// The contents of a file. `None`: the file does not exist, or it is damaged.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        read_whole(&self.file(name)?)
    }

    /// A failed write is logged and ignored: the next start only takes longer.
    pub fn write(&self, name: &str, data: &[u8]) {
        let Some(file) = self.file(name) else { return };
        if let Err(e) = write_whole(&file, data) {
            tracing::warn!("cannot write the cache file {}: {e}", file.display());
        }
    }
}

/// The contents of a file, without the SHA-256 of them that the file begins with. `None` if the hash does not match, or
/// if the path is not a regular file; the next write replaces it.
fn read_whole(file: &Path) -> Option<Vec<u8>> {
    let bytes = crate::file::read(file, MAX_BYTES).ok()?;
    let (hash, data) = bytes.split_at_checked(32)?;
    (Sha256::digest(data).as_slice() == hash).then(|| data.to_vec())
}

/// Removes the partial files of processes that were killed while they wrote. A failure only wastes disk space, so it is
/// ignored.
fn remove_partial(dir: &Path) {
    for file in fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let extension = file.extension().and_then(|extension| extension.to_str());
        let writer: Option<u32> = extension.and_then(|it| it.strip_prefix(PARTIAL)?.parse().ok());
        if writer.is_some_and(|id| !Path::new(&format!("/proc/{id}")).exists()) {
            let _ = fs::remove_file(&file);
        }
    }
}

fn write_whole(file: &Path, data: &[u8]) -> std::io::Result<()> {
    let dir = file.parent().expect("a cache file is in a directory");
    fs::create_dir_all(dir)?;
    let partial = file.with_extension(format!("{PARTIAL}{}", std::process::id()));
    fs::write(&partial, [Sha256::digest(data).as_slice(), data].concat())
        .and_then(|()| fs::rename(&partial, file))
        .inspect_err(|_| drop(fs::remove_file(&partial)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sub/kept.bin");
        assert_eq!(read_whole(&file), None);
        write_whole(&file, b"kept").unwrap();
        assert_eq!(read_whole(&file).as_deref(), Some(&b"kept"[..]));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read_whole(&file), None);
        fs::write(&file, b"short").unwrap();
        assert_eq!(read_whole(&file), None);
    }

    #[test]
    fn only_partial_files_of_dead_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own = format!("being-written.{PARTIAL}{}", std::process::id());
        let kept = ["kept.bin", "other.tmpl", "other.tmp", own.as_str()];
        // No process has this id: it is larger than Linux's maximum.
        for name in kept.iter().chain(&["left.tmp4194305"]) {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        remove_partial(dir.path());
        let mut left: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let mut expected = kept.map(str::to_owned);
        expected.sort();
        assert_eq!(left, expected);
    }
}
