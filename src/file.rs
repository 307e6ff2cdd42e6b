//! Opens files of a user, a package or another program without waiting, and reads them up to a maximum size.
//!
//! Opening a pipe waits for a program that writes to it, and `/dev/zero` never ends. So [`open`] refuses everything but
//! regular files. On a network mount that does not answer, a call can still block forever, and the process cannot
//! interrupt it. A caller that must not block reads in a separate thread, and abandons that thread after a timeout.
//!
//! [`tower_of`] tells by their names which files belong together. The hub and the checkpoints ask it.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file to read it; returns the file and its metadata.
///
/// # Errors
/// `NotFound` if there is no such file; `InvalidInput` if it is not a regular file. The message names its type.
pub fn open(path: &Path) -> io::Result<(File, Metadata)> {
    // Before the open, because opening a device can have an effect: a tape rewinds.
    check_regular(&fs::metadata(path)?)?;
    // A pipe could have replaced the file since the check: this opens it without waiting, and then refuses it.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    Ok((file, metadata))
}

fn check_regular(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let type_name = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("is not a regular file, but {type_name}")))
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

/// The text of a file of any type, of at most `max_bytes`. For input that a command reads once: it may be a pipe
/// (`--text <(zcat FILE)`), and Ctrl-C ends the wait.
///
/// # Errors
/// `InvalidData` if the file is larger, or not UTF-8.
pub fn read_input(path: &Path, max_bytes: u64) -> io::Result<String> {
    text(read_to_end(File::open(path)?, max_bytes)?)
}

/// Reads a file of at most `max_bytes`. Does not rely on the length in the metadata, because a file may grow while it
/// is read, and files of `/proc` have length 0.
///
/// # Errors
/// `InvalidData` if the file is larger.
pub fn read_to_end(file: File, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let problem = format!("larger than {max_bytes} bytes; check that it is the right file");
        return Err(io::Error::new(ErrorKind::InvalidData, problem));
    }
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| io::Error::new(ErrorKind::InvalidData, "expected text in UTF-8"))
}

/// How the name of a GGUF file tells its type, best first: towers are small, so f16 costs little and loses nothing.
const TOWER_TYPES: [&[&str]; 4] = [&["f16", "fp16"], &["bf16"], &["f32", "fp32"], &["q8"]];

/// Whether a file is the vision tower of a model in GGUF, by its name: `mmproj-model-f16.gguf`, or `mmproj` elsewhere
/// in it.
pub fn is_tower(name: &str) -> bool {
    let mut words = words_of(name);
    words.clone().next_back().as_deref() == Some("gguf") && words.any(|word| word == "mmproj")
}

/// The vision tower of the GGUF file `model`, of the names of the files in its folder. `None` if no name is that of a
/// tower. Of several, it is the one with the most words of the model's name, and of these the one in f16, bf16, f32 or
/// q8, in this order.
pub fn tower_of<'a>(model: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A type says nothing about which model a file belongs to, nor does a version such as the 3 of all its sizes.
    let is_of_type = |word: &str| {
        let quantized =
            word.strip_prefix('q').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        quantized || word.len() == 1 || TOWER_TYPES.iter().any(|names| names.contains(&word))
    };
    let of_model: Vec<String> = words_of(model).filter(|word| !is_of_type(word)).collect();
    let rank = |name: &str| {
        let words: Vec<String> = words_of(name).collect();
        let shared = of_model.iter().filter(|word| words.contains(word)).count();
        let in_words = |names: &&[&str]| names.iter().any(|name| words.iter().any(|word| word == name));
        let by_type = TOWER_TYPES.iter().position(in_words).unwrap_or(TOWER_TYPES.len());
        (std::cmp::Reverse(shared), by_type)
    };
    names.into_iter().filter(|name| is_tower(name) && *name != model).min_by_key(|name| (rank(name), *name))
}

/// The words of a file name in lower case, with its ending.
fn words_of(name: &str) -> impl DoubleEndedIterator<Item = String> + Clone {
    name.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(path: &str) -> String {
        open(Path::new(path)).expect_err(path).to_string()
    }

    #[test]
    fn a_file_of_another_type_is_refused_with_its_type_and_without_waiting() {
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
    fn a_file_is_read_up_to_its_maximum_size() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "nine bits").unwrap();
        assert_eq!(read_text(file.path(), 9).unwrap(), "nine bits");
        assert!(read(file.path(), 8).unwrap_err().to_string().contains("larger than 8 bytes"));
        std::fs::write(&file, b"\xff").unwrap();
        assert_eq!(read(file.path(), 8).unwrap(), b"\xff");
        assert!(read_text(file.path(), 8).unwrap_err().to_string().contains("UTF-8"));
        // The metadata of a file of /proc says that its length is 0.
        assert!(!read(Path::new("/proc/self/status"), 1 << 20).unwrap().is_empty());
        assert!(read_input(Path::new("/dev/zero"), 100).unwrap_err().to_string().contains("larger than 100"));
    }

    #[test]
    fn a_tower_belongs_to_the_model_with_the_most_words_of_its_name() {
        for name in ["mmproj-model-f16.gguf", "mmproj.gguf", "x.mmproj-Q8_0.gguf", "MMPROJ-F16.GGUF"] {
            assert!(is_tower(name), "{name}");
        }
        for name in ["x-f16.gguf", "mmproj-f16.bin", "mmprojx-f16.gguf"] {
            assert!(!is_tower(name), "{name}");
        }
        let of = |model: &str, names: &[&'static str]| tower_of(model, names.iter().copied());
        let types = ["mmproj-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "x.gguf"];
        for model in ["gemma-3-4b-it-Q8_0.gguf", "gemma-3-4b-it-BF16.gguf"] {
            assert_eq!(of(model, &types), Some("mmproj-F16.gguf"), "{model}");
        }
        assert_eq!(of("x.gguf", &types[..3]), Some("mmproj-BF16.gguf"));
        assert_eq!(of("x.gguf", &types[..2]), Some("mmproj-F32.gguf"));
        assert_eq!(of("x.gguf", &["x.gguf", "y.gguf"]), None);
        let sizes = ["mmproj-gemma-3-27b-it-f16.gguf", "mmproj-gemma-3-4b-it-bf16.gguf"];
        assert_eq!(of("gemma-3-4b-it-Q4_K_M.gguf", &sizes), Some(sizes[1]));
        assert_eq!(of("google_gemma-3-27b-it-qat-Q4_0.gguf", &sizes), Some(sizes[0]));
    }
}
