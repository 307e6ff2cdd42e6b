//! Errors of downloads and of the cache. Each is one line that says what to do.

use std::io;
use std::path::PathBuf;

use super::name::{ModelName, NameError, RepoId};

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("{0}")]
    Settings(String),
    #[error("{name}: HF_HUB_OFFLINE is set, so the hub is not contacted; unset it to pull")]
    Offline { name: ModelName },
    #[error(
        "cannot reach {endpoint}: {problem}; check the network and HTTPS_PROXY (and SSL_CERT_FILE if a \
         proxy intercepts TLS), or set HF_ENDPOINT to a mirror. \
         Models that are already pulled can be served without a network"
    )]
    Unreachable { endpoint: String, problem: String },
    #[error(
        "{file}: the download was interrupted and could not be resumed: {problem}; pull again to continue it"
    )]
    Interrupted { file: String, problem: String },
    #[error("{name}: the download was stopped; pull again to continue it")]
    Stopped { name: ModelName },
    #[error("{repo} is gated: accept its licence at {url}, {then}")]
    Gated { repo: RepoId, url: String, then: String },
    #[error("{repo}: {endpoint} has no such model, or the model is private; check the name{hint}")]
    NoRepository { repo: RepoId, endpoint: String, hint: &'static str },
    #[error("{repo} has no revision {revision:?}; expected a branch, a tag or a commit")]
    NoRevision { repo: RepoId, revision: String },
    #[error("{repo} has no file {file:?}")]
    NoFile { repo: RepoId, file: String },
    #[error(
        "{endpoint} rejects the token from {origin}: it is wrong or expired; create a new one at \
         {endpoint}/settings/tokens"
    )]
    WrongToken { endpoint: String, origin: String },
    #[error(
        "{repo}: {endpoint} denies access: {message}; the token needs permission to read this repository"
    )]
    Forbidden { repo: RepoId, endpoint: String, message: String },
    #[error("{what}: the server answered HTTP {status}{message}")]
    Status { what: String, status: u16, message: String },
    /// The server's answer is invalid.
    #[error("{what}: {problem}")]
    Answer { what: String, problem: String },
    /// `files` holds (name, bytes) of the files to choose from, at least one.
    #[error("{name} {problem}; choose one of {} GGUF files, for example {}", files.len(), name.with_file(&files[0].0))]
    Choose { name: ModelName, problem: &'static str, files: Box<[(String, Option<u64>)]> },
    #[error(
        "{name} has no files that can be served: {found}; expected *.safetensors with config.json, or a *.gguf file"
    )]
    NothingToServe { name: ModelName, found: String },
    #[error("{repo} lists {name:?}, which {problem}; nothing was written")]
    HostileName { repo: RepoId, name: String, problem: &'static str },
    #[error(
        "{}: {} MB are free, but the download needs {} MB; free some space, or pull to another disk with --models-dir",
        folder.display(), free / 1_000_000, needed.div_ceil(1_000_000)
    )]
    Space { folder: PathBuf, needed: u64, free: u64 },
    #[error(
        "{file}: another process is pulling it and holds the lock {}; wait until that process ends, or stop it, \
         and try again",
        lock.display()
    )]
    Busy { file: String, lock: PathBuf },
    #[error(
        "{file}: the {algorithm} of the downloaded file is {got}, but the hub lists {expected}; the file was deleted. \
         Pull again; if this repeats, something between this machine and the hub changes the file"
    )]
    Corrupt { file: String, algorithm: &'static str, got: String, expected: String },
    #[error("cannot {action} {}: {error}{}", path.display(), advice(error))]
    File { action: &'static str, path: PathBuf, error: io::Error },
    #[error("{name} is only partly downloaded; `unicorn pull {name}` continues the download")]
    Partial { name: ModelName },
    #[error(
        "{name}: there is no such folder, and no such model in {}; `unicorn pull {name}` downloads it",
        folders(roots)
    )]
    NotPulled { name: ModelName, roots: Vec<PathBuf> },
    #[error("{name}: several revisions are pulled, but not `main`; choose one: {}", names.join(", "))]
    WhichRevision { name: ModelName, names: Vec<String> },
}

/// What to do about an error of the file system; empty if there is no specific advice.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space and pull again, which continues the download"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; run the command as a user with write permission there, or choose another folder with --models-dir"
        }
        _ => "",
    }
}

fn folders(roots: &[PathBuf]) -> String {
    roots.iter().map(|r| r.display().to_string()).collect::<Vec<_>>().join(" or ")
}
