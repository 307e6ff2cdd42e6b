//! Files that a person, a package or another program names: opened without a wait, and read up to a bound.
//!
//! Opening a pipe waits for a program that writes to it, and `/dev/zero` never ends. Neither is a configuration, a key, a
//! checkpoint or a cache, so [`open`] refuses everything but regular files. A network mount that does not answer can still
//! hold a call for ever, and nothing in a process ends that: a caller that must go on reads in a thread of its own, and
//! gives that thread up.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file to read it; returns the file and its metadata.
///
/// # Errors
/// `NotFound` if there is no such file; `InvalidInput` if it is of another type, which the message names.
pub fn open(path: &Path) -> io::Result<(File, Metadata)> {
    // Before the open, because opening a device can have an effect: a tape rewinds.
    check_regular(&fs::metadata(path)?)?;
    // A pipe that has just taken the file's place is opened without a wait, too, and then refused.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    Ok((file, metadata))
}

fn check_regular(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let named = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("is not a regular file, but {named}")))
}

/// The bytes of a regular file of at most `max_bytes`.
///
/// # Errors
/// Those of [`open`]; `InvalidData` if the file is larger.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_to_end(open(path)?.0, max_bytes)
}

/// The text of a regular file of at most `max_bytes`, in UTF-8.
///
/// # Errors
/// Those of [`read`]; `InvalidData` if the file is not UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read(path, max_bytes)?)
}

/// The text of a file of any type, of at most `max_bytes`. For what a person gives a command that reads it once: that may
/// be a pipe (`--text <(zcat FILE)`), and Ctrl-C ends the wait.
///
/// # Errors
/// `InvalidData` if the file is larger, or not UTF-8.
pub fn read_input(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read_to_end(File::open(path)?, max_bytes)?)
}

/// Reads up to the bound whatever the metadata said: a file may grow meanwhile, and those of `/proc` have no length.
pub fn read_to_end(file: File, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("larger than {max_bytes} bytes: is it the right file?");
        return Err(io::Error::new(ErrorKind::InvalidData, problem));
    }
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| io::Error::new(ErrorKind::InvalidData, "expected text in UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(path: &str) -> String {
        open(Path::new(path)).expect_err(path).to_string()
    }

    #[test]
    fn what_is_no_regular_file_is_refused_by_its_type_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(problem(pipe.to_str().unwrap()), "is not a regular file, but a pipe");
        assert_eq!(problem(socket.to_str().unwrap()), "is not a regular file, but a socket");
        assert_eq!(problem(folder.path().to_str().unwrap()), "is not a regular file, but a folder");
        assert_eq!(problem("/dev/zero"), "is not a regular file, but a device");
        let none = open(&folder.path().join("none")).unwrap_err();
        assert_eq!(none.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_bound_is_the_last_length_that_is_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "nine bits").unwrap();
        assert_eq!(read_text(file.path(), 9).unwrap(), "nine bits");
        assert!(read(file.path(), 8).unwrap_err().to_string().contains("larger than 8 bytes"));
        std::fs::write(&file, b"\xff").unwrap();
        assert_eq!(read(file.path(), 8).unwrap(), b"\xff");
        assert!(read_text(file.path(), 8).unwrap_err().to_string().contains("UTF-8"));
        // A file of /proc says that it has no bytes.
        assert!(!read(Path::new("/proc/self/status"), 1 << 20).unwrap().is_empty());
        assert!(read_input(Path::new("/dev/zero"), 100).unwrap_err().to_string().contains("larger than 100"));
    }
}
