//! Where a library's models come from: downloads and deletes them.

use super::Library;

/// Downloads and deletes models, and changes the library's list accordingly.
pub trait Store: Send + Sync {
    /// Whether models are downloaded and deleted now. The configuration may change it.
    fn is_on(&self) -> bool;

    /// Downloads a model, and serves it. `known` is the number of the model that has the name already. Blocks.
    fn pull(
        &self,
        library: &Library,
        name: &str,
        known: Option<usize>,
        report: &mut PullReport<'_>,
    ) -> Result<(), StoreError>;

    /// Checks that [`Store::delete`] would delete the model. Does not read the disk.
    fn check_delete(&self, index: usize) -> Result<(), StoreError>;

    /// Deletes the files of a model, and no longer serves it. Blocks.
    fn delete(&self, library: &Library, index: usize) -> Result<(), StoreError>;
}

/// Receives the steps of a pull. False = the pull stops, and keeps what it has downloaded.
pub type PullReport<'a> = dyn FnMut(PullStep<'_>) -> bool + 'a;

/// What a pull does.
#[derive(Debug, Clone, Copy)]
pub enum PullStep<'a> {
    /// It asks for the list of files.
    List,
    /// It downloads a file of `total` bytes, `completed` of which are there. `digest` is the file's checksum.
    File { path: &'a str, digest: &'a str, total: u64, completed: u64 },
    /// The hub cannot be reached. The known model stays as it is.
    Unreachable,
    /// All files are there, and their checksums are right. The model is added to the list.
    Add,
}

/// Why a model was not pulled or deleted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The request is wrong.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NotFound(String),
    /// The state of the server or of the disk forbids it.
    #[error("{0}")]
    Conflict(String),
    #[error("{0} models are being pulled already; try again when one of them is complete")]
    Busy(usize),
    /// The hub, or the way to it.
    #[error("{0}")]
    Hub(String),
    /// The disk or the configuration of the server.
    #[error("{0}")]
    Local(String),
}
