//! Reads a file past the page cache. Weights are read once and kept on the device, so they need no place in the page
//! cache, and several threads that read large pieces get a disk's full speed.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Alignment of offsets, lengths and addresses: the largest block size of disks in use.
const BLOCK: usize = 4096;

thread_local! {
    /// Buffer that the disk writes to: a disk can write to ordinary memory, but not to every device's memory.
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A file that is read past the page cache where its file system supports that, and through the page cache elsewhere.
#[derive(Debug)]
pub(super) struct DirectFile {
    buffered: File,
    direct: Option<File>,
}

impl DirectFile {
    /// Opens `path` a second time for direct reads; `buffered` was opened at `path`.
    pub fn new(buffered: File, path: &Path) -> DirectFile {
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        // A file that replaced the first one in between has other bytes than the mapping.
        let same = |file: &File| matches!((identity(file), identity(&buffered)), (Ok(a), Ok(b)) if a == b);
        let direct = OpenOptions::new().read(true).custom_flags(flags).open(path).ok().filter(same);
        if direct.is_none() {
            tracing::debug!(path = %path.display(), "is read through the page cache");
        }
        DirectFile { buffered, direct }
    }

    /// The file for reads through the page cache.
    pub fn buffered(&self) -> &File {
        &self.buffered
    }

    /// Fills `into` with the bytes from `offset`.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let direct = self.direct.as_ref();
        let done = direct
            .is_some_and(|file| BOUNCE.with_borrow_mut(|bounce| read_blocks(file, bounce, into, offset)));
        // Where the direct read failed, an ordinary read succeeds or reports the reason: the end of the file, a larger
        // block size, a file system that opens files for direct reads and then refuses to read.
        if done { Ok(()) } else { self.buffered.read_exact_at(into, offset) }
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Reads the blocks that hold the bytes of `into` with one call, and copies the bytes if all of them were read.
fn read_blocks(file: &File, bounce: &mut Vec<u8>, into: &mut [u8], offset: u64) -> bool {
    let skip = offset as usize % BLOCK;
    let wanted = skip..skip + into.len();
    let room = wanted.end.next_multiple_of(BLOCK);
    if bounce.len() < room + BLOCK {
        bounce.resize(room + BLOCK, 0);
    }
    let start = bounce.as_ptr().align_offset(BLOCK);
    let blocks = &mut bounce[start..start + room];
    let came = file.read_at(blocks, offset - skip as u64).is_ok_and(|n| n >= wanted.end);
    if came {
        into.copy_from_slice(&blocks[wanted]);
    }
    came
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn reads_what_an_ordinary_read_reads() {
        // On a disk if the sources are: file systems in memory may not read so.
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
