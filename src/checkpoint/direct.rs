//! Reading a file past the page cache: what is read once and kept elsewhere need not go through the system's memory too,
//! and a disk that is asked for large pieces by several threads gives all that it has.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What offsets, lengths and addresses are multiples of: the largest block that disks in use ask for.
const BLOCK: usize = 4096;

thread_local! {
    /// Where the disk writes to: it can reach ordinary memory, but not every device's.
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A file that is read past the page cache, where its file system can do that, and through it elsewhere.
#[derive(Debug)]
pub(super) struct DirectFile {
    buffered: File,
    direct: Option<File>,
}

impl DirectFile {
    /// `buffered`, which was opened at `path`.
    pub fn new(buffered: File, path: &Path) -> DirectFile {
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        // A file that was replaced in between is another one, and its bytes do not go with the mapping.
        let same = |file: &File| matches!((identity(file), identity(&buffered)), (Ok(a), Ok(b)) if a == b);
        let direct = OpenOptions::new().read(true).custom_flags(flags).open(path).ok().filter(same);
        if direct.is_none() {
            tracing::debug!(path = %path.display(), "is read through the page cache");
        }
        DirectFile { buffered, direct }
    }

    /// The file as it is usually read.
    pub fn buffered(&self) -> &File {
        &self.buffered
    }

    /// Fills `into` with the bytes from `offset`.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let direct = self.direct.as_ref();
        let done = direct
            .is_some_and(|file| BOUNCE.with_borrow_mut(|bounce| read_blocks(file, bounce, into, offset)));
        // Whatever kept the blocks from being read, an ordinary read overcomes it or can tell what it is: the end of the
        // file, blocks larger than these, a file system that opens files so and then does not read them.
        if done { Ok(()) } else { self.buffered.read_exact_at(into, offset) }
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Reads the blocks that `into` lies in with one call, and copies what was asked for if all of it came.
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
