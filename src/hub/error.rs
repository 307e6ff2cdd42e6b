//! Errors between the hub and the disk. Each is one line that says what to do.

use std::io;
use std::path::PathBuf;

use super::name::{ModelName, NameError, RepoId};

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("{0}")]
    Settings(String),
    #[error("{name}: HF_HUB_OFFLINE is set, so nothing is asked of the hub: unset it to pull")]
    Offline { name: ModelName },
    #[error(
        "cannot reach {endpoint}: {problem}; check the network and HTTPS_PROXY (SSL_CERT_FILE where a \
         proxy signs for everyone), or name a mirror in HF_ENDPOINT. \
         Models that were pulled are served without a network"
    )]
    Unreachable { endpoint: String, problem: String },
    #[error(
        "{file}: the transfer broke off and could not be taken up again: {problem}; pull again to go on from there"
    )]
    Interrupted { file: String, problem: String },
    #[error("{repo} is gated: accept its licence at {url}, {then}")]
    Gated { repo: RepoId, url: String, then: String },
    #[error("{repo}: {endpoint} knows no such model, or it is private; check the name{hint}")]
    NoRepository { repo: RepoId, endpoint: String, hint: &'static str },
    #[error("{repo} has no revision {revision:?}; expected a branch, a tag or a commit")]
    NoRevision { repo: RepoId, revision: String },
    #[error("{repo} has no file {file:?}")]
    NoFile { repo: RepoId, file: String },
    #[error(
        "{endpoint} refuses the token of {origin}: it is wrong or expired; make a new one at {endpoint}/settings/tokens"
    )]
    WrongToken { endpoint: String, origin: String },
    #[error(
        "{repo}: {endpoint} forbids the access: {message}; the token needs the right to read this repository"
    )]
    Forbidden { repo: RepoId, endpoint: String, message: String },
    #[error("{what}: the server answers {status}{message}")]
    Status { what: String, status: u16, message: String },
    /// The server's answer does not make sense.
    #[error("{what}: {problem}")]
    Answer { what: String, problem: String },
    /// `files` holds (name, bytes) of the files to choose from, at least one.
    #[error("{name} {problem}; name one of {} GGUF files, as in {}", files.len(), name.with_file(&files[0].0))]
    Choose { name: ModelName, problem: &'static str, files: Box<[(String, Option<u64>)]> },
    #[error(
        "{name} holds nothing that can be served: {found}; expected *.safetensors with config.json, or a *.gguf file"
    )]
    NothingToServe { name: ModelName, found: String },
    #[error("{repo} lists {name:?}, which {problem}; nothing of it was written")]
    HostileName { repo: RepoId, name: String, problem: &'static str },
    #[error(
        "{}: {} MB are free and {} MB more are needed; free some space, or pull to another disk with --models-dir",
        folder.display(), free / 1_000_000, needed.div_ceil(1_000_000)
    )]
    Space { folder: PathBuf, needed: u64, free: u64 },
    #[error(
        "{file}: another program is pulling it (it holds the lock {}); wait for it, or stop it and pull again",
        lock.display()
    )]
    Busy { file: String, lock: PathBuf },
    #[error(
        "{file}: the {algorithm} of what arrived is {got}, the hub names {expected}: deleted; pull again, and if that \
         repeats, something between here and the hub changes the file"
    )]
    Corrupt { file: String, algorithm: &'static str, got: String, expected: String },
    #[error("cannot {action} {}: {error}{}", path.display(), advice(error))]
    File { action: &'static str, path: PathBuf, error: io::Error },
    #[error("{name} is here only in part; `unicorn pull {name}` goes on where it stopped")]
    Partial { name: ModelName },
    #[error(
        "{name} is no folder here, and not pulled: nothing of it lies in {}; `unicorn pull {name}` gets it",
        folders(roots)
    )]
    NotPulled { name: ModelName, roots: Vec<PathBuf> },
    #[error("{name}: several revisions are here and none is the main one; name one: {}", names.join(", "))]
    WhichRevision { name: ModelName, names: Vec<String> },
}

/// Advice for errors whose text from the file system does not say what to do.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space and pull again, which goes on from there"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; do it as a user who may write there, or name another folder with --models-dir"
        }
        _ => "",
    }
}

fn folders(roots: &[PathBuf]) -> String {
    roots.iter().map(|r| r.display().to_string()).collect::<Vec<_>>().join(" or ")
}
