//! Files that a device keeps from run to run: one set for each driver and each version of the shaders.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The files of one device.
pub(super) struct Cache {
    /// The folder of the files; `None` if the user has no cache directory.
    dir: Option<PathBuf>,
    /// Name of the device, version of the driver, and build of the driver.
    driver: String,
}

impl Cache {
    pub fn new(driver: String) -> Cache {
        Cache { dir: cache_dir(), driver }
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

/// The cache directory: `$UNICORN_CACHE_DIR`, or else the user's cache directory, if there is one.
fn cache_dir() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("UNICORN_CACHE_DIR")
        .or_else(|| Some(var("XDG_CACHE_HOME")?.join("unicorn")))
        .or_else(|| Some(var("HOME")?.join(".cache/unicorn")))
}

/// The contents of a file, if the file is whole. It begins with the SHA-256 of the rest.
fn read_whole(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (hash, data) = bytes.split_at_checked(32)?;
    (Sha256::digest(data).as_slice() == hash).then(|| data.to_vec())
}

fn write_whole(file: &Path, data: &[u8]) -> std::io::Result<()> {
    let dir = file.parent().expect("it is in a directory");
    fs::create_dir_all(dir)?;
    let partial = file.with_extension(format!("tmp{}", std::process::id()));
    fs::write(&partial, [Sha256::digest(data).as_slice(), data].concat())?;
    fs::rename(&partial, file)
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
}
