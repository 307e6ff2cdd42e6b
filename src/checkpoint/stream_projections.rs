//! The matrices between residual streams. GGUF files store those of all streams as one tensor `[streams, out, in]`; here
//! each becomes a tensor of its own, as in Hugging Face's checkpoints.

use super::error::CheckpointError;
use super::experts::matrices_of;
use super::table::{Entry, Table};

const STACKED: [&str; 2] = ["altup_projections.weight", "altup_unembed_projections.weight"];
/// The most matrices of a tensor. Every known model has three.
const MAX_MATRICES: usize = 64;

/// Splits the tensors that hold several matrices.
pub(super) fn split(table: &mut Table) -> Result<(), CheckpointError> {
    let base = |entry: &Entry| {
        let is_stacked = STACKED.iter().any(|name| entry.name.ends_with(name));
        let is_split = is_stacked && entry.shape.len() == 3 && entry.shape[0] <= MAX_MATRICES;
        entry.name.strip_suffix(".weight").filter(|_| is_split).map(str::to_owned)
    };
    if !table.tensors.iter().any(|entry| base(entry).is_some()) {
        return Ok(());
    }
    let mut entries = Vec::new();
    for entry in std::mem::take(&mut table.tensors) {
        let Some(base) = base(&entry) else {
            entries.push(entry);
            continue;
        };
        let matrices = matrices_of(table, &entry, 0..entry.shape[1])?;
        let named =
            (0..).zip(matrices).map(|(i, matrix)| Entry { name: format!("{base}.{i}.weight"), ..matrix });
        entries.extend(named);
    }
    table.replace(entries, "is stored for single streams and for all of them; expected it once")
}
