//! Files that a device keeps from run to run: one set for each driver and each version of the shaders.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::config::UserFolder;

/// The extension of a file that is being written begins so, and ends with the id of the process that writes it.
const PARTIAL: &str = "tmp";
/// The most bytes of a file. A driver's pipelines take some megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// The files of one device.
pub(super) struct Cache {
    /// The folder of the files; `None` if the user has no cache directory.
    dir: Option<PathBuf>,
    /// Name of the device, version of the driver, and build of the driver.
    driver: String,
}

impl Cache {
    pub fn new(driver: String) -> Cache {
        let dir = UserFolder::Cache.path(|name| std::env::var_os(name));
        dir.iter().for_each(|dir| remove_partial(dir));
        Cache { dir, driver }
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(format!("{name}-{}-{}.bin", self.driver, env!("SHADER_HASH"))))
    }

    /// The contents of a file; `None` if no file of that name was written, or if the file is damaged.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        read_whole(&self.file(name)?)
    }

    /// A failed write is logged and ignored: it costs time at the next start, not answers.
    pub fn write(&self, name: &str, data: &[u8]) {
        let Some(file) = self.file(name) else { return };
        if let Err(e) = write_whole(&file, data) {
            tracing::warn!("{} not written: {e}", file.display());
        }
    }
}

/// The contents of a file, if the file is whole. Anything else at its path, a pipe for one, is what a write replaces. A file begins with the SHA-256 of the rest.
fn read_whole(file: &Path) -> Option<Vec<u8>> {
    let bytes = crate::file::read(file, MAX_BYTES).ok()?;
    let (hash, data) = bytes.split_at_checked(32)?;
    (Sha256::digest(data).as_slice() == hash).then(|| data.to_vec())
}

/// Removes what processes left that were killed while they wrote. A failure costs some disk, and is ignored.
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
    let dir = file.parent().expect("it is in a directory");
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
    fn what_a_killed_writer_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let own = format!("being-written.{PARTIAL}{}", std::process::id());
        let kept = ["kept.bin", "other.tmpl", "other.tmp", own.as_str()];
        // No process has that id: it is beyond Linux's greatest.
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
