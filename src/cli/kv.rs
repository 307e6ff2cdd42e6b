//! `unicorn kv clear`: removes the conversations that a server keeps on disk.

use crate::cli::error::Error;
use crate::cli::terminal::print;
use crate::config::KvDisk;
use crate::kv_disk::{KvStoreError, clear_folder};

pub fn clear(options: &KvDisk) -> Result<(), Error> {
    let Some(path) = &options.path else {
        return Err(Error::Argument("kv.disk.path is not set, so no conversations are kept on disk".into()));
    };
    let cleared = clear_folder(path.as_ref()).map_err(|error| match error {
        KvStoreError::Busy { .. } => {
            Error::Argument(format!("a server uses {path}: send it POST /kv/clear, or stop it first"))
        }
        error => error.into(),
    })?;
    print(&format!("removed {} entries, {} MiB, in {path}\n", cleared.entries, cleared.bytes >> 20))
}
