//! The matrices of a layer's experts, as one tensor `[experts, out, in]` for each of gate, up and down.
//!
//! Checkpoints store them in three ways: a tensor for each expert (`experts.7.gate_proj.weight`), one tensor for all
//! experts (`experts.down_proj`), or one tensor for all experts with the rows of gate before those of up
//! (`experts.gate_up_proj`). Here they all become `experts.gate_proj.weight`, `experts.up_proj.weight` and
//! `experts.down_proj.weight`.
//!
//! Refuses experts that are missing, and experts of different shapes or types.

use std::collections::BTreeMap;

use super::error::CheckpointError;
use super::table::{Entry, Span, Stored, Table};
use super::view::Tensor;

/// The most experts of a tensor. Every known model has far fewer.
const MAX_EXPERTS: usize = 4096;
/// The name of the module that has the experts.
const EXPERTS: &str = ".experts.";

/// Stacks the matrices of experts.
pub(super) fn join(table: &mut Table) -> Result<(), CheckpointError> {
    if !table.tensors.iter().any(|entry| entry.name.contains(EXPERTS)) {
        return Ok(());
    }
    let mut entries = Vec::new();
    // By the name of the whole: its place among the entries, and the matrices of experts by number.
    let mut stacks: BTreeMap<String, (usize, BTreeMap<usize, Entry>)> = BTreeMap::new();
    for entry in std::mem::take(&mut table.tensors) {
        match part_of(&entry.name) {
            Some(Part::One { whole, expert }) => {
                let (_, parts) = stacks.entry(whole.clone()).or_insert((entries.len(), BTreeMap::new()));
                if parts.is_empty() {
                    entries.push(None);
                }
                parts.insert(expert, entry);
            }
            Some(Part::All { base }) if entry.shape.len() == 3 => {
                let rows = entry.shape[1];
                entries.push(Some(rows_of_each(
                    table,
                    &entry,
                    &format!("{base}.down_proj.weight"),
                    0..rows,
                )?));
            }
            Some(Part::GateAndUp { base }) if entry.shape.len() == 3 && entry.shape[1].is_multiple_of(2) => {
                let rows = entry.shape[1] / 2;
                for (name, rows) in [("gate_proj", 0..rows), ("up_proj", rows..2 * rows)] {
                    entries.push(Some(rows_of_each(table, &entry, &format!("{base}.{name}.weight"), rows)?));
                }
            }
            _ => entries.push(Some(entry)),
        }
    }
    for (whole, (place, parts)) in stacks {
        entries[place] = Some(stacked(table, whole, parts)?);
    }
    let twice = "is stored for single experts and for all of them; expected it once";
    table.replace(entries.into_iter().flatten().collect(), twice)
}

/// How a tensor holds matrices of experts.
enum Part {
    One { whole: String, expert: usize },
    All { base: String },
    GateAndUp { base: String },
}

fn part_of(name: &str) -> Option<Part> {
    let at = name.find(EXPERTS)? + EXPERTS.len();
    let (base, rest) = (name[..at - 1].to_owned(), &name[at..]);
    if let Some((number, rest)) = rest.split_once('.')
        && let Some(expert) = number.parse().ok().filter(|n: &usize| n.to_string() == number)
    {
        return Some(Part::One { whole: format!("{base}.{rest}"), expert });
    }
    match rest.strip_suffix(".weight").unwrap_or(rest) {
        "gate_up_proj" => Some(Part::GateAndUp { base }),
        "down_proj" if !rest.ends_with(".weight") => Some(Part::All { base }),
        _ => None,
    }
}

/// The matrices of the experts `0..`.
fn stacked(table: &Table, whole: String, parts: BTreeMap<usize, Entry>) -> Result<Entry, CheckpointError> {
    let count = parts.len();
    if let Some((missing, (found, entry))) =
        (0..).zip(&parts).find(|(expected, (found, _))| expected != *found)
    {
        let problem = format!("is the tensor of expert {found}, and that of expert {missing} is missing");
        return Err(CheckpointError::tensor(&table.files[entry.file].display, &entry.name, problem));
    }
    let parts: Vec<Entry> = parts.into_values().collect();
    let (first, file) = (&parts[0], parts[0].file);
    let scheme = Tensor::of(table, first).scheme()?;
    for part in &parts[1..] {
        let (found, expected) = ((&part.shape, Tensor::of(table, part).scheme()?), (&first.shape, scheme));
        if found != expected {
            let problem = format!(
                "has shape {:?} in {}, and the same tensor of expert 0 {:?} in {}; expected the same for all experts",
                found.0, found.1, expected.0, expected.1
            );
            return Err(CheckpointError::tensor(&table.files[part.file].display, &part.name, problem));
        }
    }
    let &[rows, cols] = &first.shape[..] else {
        let problem = format!("has shape {:?}; expected a matrix of an expert", first.shape);
        return Err(CheckpointError::tensor(&table.files[file].display, &first.name, problem));
    };
    Ok(Entry {
        name: whole,
        shape: vec![count, rows, cols],
        file,
        stored: Stored::Stacked(parts),
        interleaved: None,
    })
}

/// Some rows of each expert, of a tensor with the matrices of all experts.
fn rows_of_each(
    table: &Table,
    all: &Entry,
    name: &str,
    rows: std::ops::Range<usize>,
) -> Result<Entry, CheckpointError> {
    let &[experts, _, cols] = &all.shape[..] else { panic!("{name}: not of all experts") };
    if experts > MAX_EXPERTS {
        let problem = format!("is of {experts} experts; expected at most {MAX_EXPERTS}");
        return Err(CheckpointError::tensor(&table.files[all.file].display, &all.name, problem));
    }
    Ok(Entry {
        name: name.to_owned(),
        shape: vec![experts, rows.len(), cols],
        file: all.file,
        stored: Stored::Stacked(matrices_of(table, all, rows)?),
        interleaved: None,
    })
}

/// Some rows of each matrix of a tensor `[matrices, rows, cols]`.
pub(super) fn matrices_of(
    table: &Table,
    all: &Entry,
    rows: std::ops::Range<usize>,
) -> Result<Vec<Entry>, CheckpointError> {
    let &[matrices, of_each, cols] = &all.shape[..] else { panic!("{}: not of several matrices", all.name) };
    if all.shape.contains(&0) {
        let problem = format!("has shape {:?}; expected at least one of each", all.shape);
        return Err(CheckpointError::tensor(&table.files[all.file].display, &all.name, problem));
    }
    let cut = |matrix: usize, data: &Span| {
        let row_bytes = data.range.len() / (matrices * of_each);
        let at = |row: usize| data.range.start + (matrix * of_each + row) * row_bytes;
        Span { file: data.file, range: at(rows.start)..at(rows.end) }
    };
    let part = |matrix: usize| {
        let stored = match &all.stored {
            Stored::Plain { dtype, data } => Stored::Plain { dtype: *dtype, data: cut(matrix, data) },
            Stored::Ggml { kind, data } => Stored::Ggml { kind: *kind, data: cut(matrix, data) },
            _ => {
                let problem = "is packed for all matrices together; expected each matrix packed by itself";
                return Err(CheckpointError::tensor(&table.files[all.file].display, &all.name, problem));
            }
        };
        let shape = vec![rows.len(), cols];
        Ok(Entry { name: all.name.clone(), shape, file: all.file, stored, interleaved: None })
    };
    (0..matrices).map(part).collect()
}
