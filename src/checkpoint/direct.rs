//! Reads a file with `O_DIRECT`, without the page cache. Weights are read once and then kept on the device, so caching
//! them is useless, unless the model will be loaded again. Several threads that read large pieces reach the full speed of a
//! disk.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Alignment of offsets, lengths and addresses: the largest block size of common disks.
const BLOCK: usize = 4096;

thread_local! {
    /// Buffer that the disk writes to. Direct reads into the memory of some devices fail, so they go to host memory.
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A file that is read without the page cache if its file system supports that, and otherwise with it.
#[derive(Debug)]
pub(super) struct DirectFile {
    buffered: File,
    direct: Option<File>,
    is_cached: bool,
}

impl DirectFile {
    /// A file that is read with the page cache and stays in it.
    pub fn cached(buffered: File) -> DirectFile {
        DirectFile { buffered, direct: None, is_cached: true }
    }

    /// Opens `path` a second time for direct reads; `buffered` was opened at `path`.
    pub fn new(buffered: File, path: &Path) -> DirectFile {
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        // The path may have been replaced since: another file would have other bytes than the mapping.
        let same = |file: &File| matches!((identity(file), identity(&buffered)), (Ok(a), Ok(b)) if a == b);
        let direct = OpenOptions::new().read(true).custom_flags(flags).open(path).ok().filter(same);
        if direct.is_none() {
            tracing::debug!(path = %path.display(), "the file is read with the page cache");
        }
        DirectFile { buffered, direct, is_cached: false }
    }

    /// Whether its pages stay in the page cache.
    pub fn is_cached(&self) -> bool {
        self.is_cached
    }

    /// The file for reads with the page cache.
    pub fn buffered(&self) -> &File {
        &self.buffered
    }

    /// Fills `into` with the bytes from `offset`.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let direct = self.direct.as_ref();
        let done = direct
            .is_some_and(|file| BOUNCE.with_borrow_mut(|bounce| read_blocks(file, bounce, into, offset)));
        // If the direct read failed, a buffered read succeeds or reports the reason. Direct reads fail at the end of
        // the file, with a larger block size, and on file systems that accept O_DIRECT only when a file is opened.
        if done { Ok(()) } else { self.buffered.read_exact_at(into, offset) }
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Reads the blocks of the wanted bytes with one call, and copies the bytes into `into`. Returns false if not all of
/// them were read.
fn read_blocks(file: &File, bounce: &mut Vec<u8>, into: &mut [u8], offset: u64) -> bool {
    let skip = offset as usize % BLOCK;
    let wanted = skip..skip + into.len();
    let room = wanted.end.next_multiple_of(BLOCK);
    if bounce.len() < room + BLOCK {
        bounce.resize(room + BLOCK, 0);
    }
    let start = bounce.as_ptr().align_offset(BLOCK);
    let blocks = &mut bounce[start..start + room];
    let complete = file.read_at(blocks, offset - skip as u64).is_ok_and(|n| n >= wanted.end);
    if complete {
        into.copy_from_slice(&blocks[wanted]);
    }
    complete
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn a_direct_read_returns_the_bytes_of_a_buffered_read() {
        // In the source folder, which is usually on a disk: tmpfs may not support direct reads.
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
        std::fs::create_dir_all(&target).unwrap();
        let folder = tempfile::tempdir_in(target).unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..3 * BLOCK + 777).map(|i| (i * 31 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = DirectFile::new(File::open(&path).unwrap(), &path);
        for (offset, len) in [
            (0, 1),
            (0, BLOCK),
            (1, BLOCK),
            (4095, 2),
            (5000, 4000),
            (0, bytes.len()),
            (3 * BLOCK, 777),
            (9, 0),
        ] {
            let mut into = vec![0xAB; len];
            file.read_exact_at(&mut into, offset as u64).unwrap();
            assert_eq!(into, bytes[offset..offset + len], "{len} bytes from {offset}");
        }
        for (offset, len) in [(bytes.len(), 1), (bytes.len() - 1, 2), (0, bytes.len() + 1), (10 * BLOCK, 1)] {
            let error = file.read_exact_at(&mut vec![0; len], offset as u64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{len} bytes from {offset}");
        }
    }
}
