//! Reads weight matrices packed by GPTQ, AWQ or compressed-tensors (`pack-quantized`), without loss.
//!
//! These checkpoints store each projection in parts. Here the parts become one tensor `NAME.weight` `[out, in]`. A
//! weight is `s * (q - z)`. Each group of consecutive inputs of a row (one output) has a scale s and a zero point z:
//!
//! | | GPTQ | AWQ | compressed-tensors |
//! |---|---|---|---|
//! | q | `.qweight` `[in / n, out]`, along `in` | `.qweight` `[in, out / 8]`, along `out`, interleaved | `.weight_packed` `[out, in / n]`, along `in` |
//! | s | `.scales` `[groups, out]` | `.scales` `[groups, out]` | `.weight_scale` `[out, groups]` |
//! | z | `.qzeros` `[groups, out / n]` | `.qzeros` `[groups, out / 8]`, interleaved | `.weight_zero_point` `[out / n, groups]`; default: half the range |
//! | | `.g_idx` `[in]`: group of each input | | `.weight_shape` `[2]`: out, in |
//!
//! q and z are unsigned. A 32-bit word contains `n` of them, lowest bits first. GPTQ's first version
//! (`checkpoint_format` "gptq") stores z - 1. If z is 0, the subtraction changes the neighbouring zero points.
//! GPTQModel subtracts from a whole word, so adding restores all of them exactly. AutoGPTQ overwrites the neighbours,
//! so the row is refused.
//!
//! Refuses other methods and formats, bits other than 4 and 8, groups that are not a multiple of the device's block,
//! activation order (a `g_idx` other than the trivial one), quantized activations, and parts whose shapes contradict
//! each other or `quantization_config`. Older AutoGPTQ checkpoints have the fields of `quantization_config` in a file of
//! their own, `quantize_config.json`.

use std::collections::{BTreeMap, HashMap};

use super::error::CheckpointError;
use super::files::{ModelFiles, parse_config};
use super::format::Format;
use super::table::{Entry, Span, Stored, Table};

pub(super) mod matrix;
mod method;

pub use matrix::PackedMatrix;
pub use method::PACKING_FIELDS;

use matrix::Layout;
use method::{Method, PartKind, Parts, StoredPart};

/// The file in which AutoGPTQ described a checkpoint before config.json had `quantization_config`.
const QUANTIZE_CONFIG: &str = "quantize_config.json";

/// Joins the parts of each packed matrix into one tensor, with the method from config.json, or from quantize_config.json.
/// Reads all scales and zero points. Returns the format; `None` if nothing is packed.
pub(super) fn join(table: &mut Table, files: &ModelFiles) -> Result<Option<Format>, CheckpointError> {
    let method = match files.config()? {
        None => None,
        Some(config) => Method::read(&config)
            .map_err(|problem| CheckpointError::file(files.display("config.json"), problem))?,
    };
    let method = match method {
        None => undescribed(table, files)?,
        Some(method) => Some(method),
    };
    let Some(method) = &method else { return Ok(None) };
    // Sorted by name, so that messages are the same in every run.
    let mut matrices: BTreeMap<String, [Option<usize>; 5]> = BTreeMap::new();
    for (index, entry) in table.tensors.iter().enumerate() {
        if let Some((base, kind)) = method.part_of(&entry.name) {
            matrices.entry(base.to_owned()).or_default()[kind as usize] = Some(index);
        }
    }
    let mut joined = HashMap::new();
    for (base, indices) in &matrices {
        joined.insert(indices[PartKind::Weights as usize], join_parts(table, method, base, indices)?);
    }
    // Each matrix replaces the tensor of its integers.
    let entries = std::mem::take(&mut table.tensors).into_iter().enumerate();
    let keep = |(index, entry): (usize, Entry)| match method.part_of(&entry.name) {
        Some(_) => joined.remove(&Some(index)),
        None => Some(entry),
    };
    let tensors = entries.filter_map(keep).collect();
    table.replace(tensors, "is stored both unpacked and packed; expected one of them")?;
    Ok(Some(method.format()))
}

fn join_parts(
    table: &Table,
    method: &Method,
    base: &str,
    indices: &[Option<usize>; 5],
) -> Result<Entry, CheckpointError> {
    let first = indices.iter().flatten().next().expect("a matrix has a part");
    let entry = |kind: PartKind| indices[kind as usize].map(|index| &table.tensors[index]);
    let span = |kind| match entry(kind).map(|entry| &entry.stored) {
        Some(Stored::Plain { data, .. }) => Some(data.clone()),
        _ => None,
    };
    let mut parts = Parts::default();
    for kind in PartKind::ALL {
        if let Some(Entry { shape, stored: Stored::Plain { dtype, data }, .. }) = entry(kind) {
            let data = &table.files[data.file].bytes[data.range.clone()];
            parts.0[kind as usize] = Some(StoredPart { kind, dtype: *dtype, shape, data });
        }
    }
    let layout = method.layout(&parts).map_err(|(kind, problem)| {
        let file = entry(kind).unwrap_or(&table.tensors[*first]).file;
        let name = format!("{base}.{}", method.suffix(kind));
        CheckpointError::tensor(&table.files[file].display, &name, problem)
    })?;
    let [weights, scales, zeros] = [PartKind::Weights, PartKind::Scales, PartKind::Zeros].map(span);
    let (weights, scales) = (weights.expect("checked above"), scales.expect("checked above"));
    let bytes = |span: &Span| &table.files[span.file].bytes[span.range.clone()];
    let (integers, zero_bytes) = (bytes(&weights), zeros.as_ref().map_or(&[][..], bytes));
    let form = PackedMatrix::new(layout, integers, bytes(&scales), zero_bytes).find_form();
    Ok(Entry {
        name: format!("{base}.weight"),
        shape: vec![layout.rows, layout.cols],
        file: weights.file,
        stored: Stored::Packed { layout: Layout { form, ..layout }, weights, scales, zeros },
        interleaved: None,
    })
}

/// The method of a checkpoint whose config.json has none; `None` if nothing is packed. Only GPTQ checkpoints have a file
/// of their own for it.
fn undescribed(table: &Table, files: &ModelFiles) -> Result<Option<Method>, CheckpointError> {
    let is_packed =
        |entry: &&Entry| entry.name.ends_with(".qweight") || entry.name.ends_with(".weight_packed");
    let Some(packed) = table.tensors.iter().find(is_packed) else { return Ok(None) };
    let file = if packed.name.ends_with(".qweight") { files.read(QUANTIZE_CONFIG)? } else { None };
    let Some(bytes) = file else {
        let problem = "is a packed matrix, but config.json has no quantization_config";
        return Err(CheckpointError::tensor(&table.files[packed.file].display, &packed.name, problem));
    };
    let display = files.display(QUANTIZE_CONFIG);
    let method = Method::read_quantize_config(&parse_config(&bytes, &display)?);
    Ok(Some(method.map_err(|problem| CheckpointError::file(display, problem))?))
}
