//! Reads the layer files of this project's predecessor, the original project (`quantized_models/*-layer-by-layer`).
//!
//! The folder has files `STEM_layer_N.safetensors` and `STEM_shared.safetensors`, with one STEM for each shard of the
//! source. The tensors of a layer from all shards are merged. A vision layer is in the same files as the language layer
//! with the same number. A tensor T has its scales in the tensor `T_scale`, and its scheme in the file's metadata:
//!
//! | scheme | T | `T_scale` | value |
//! |---|---|---|---|
//! | `int8_symmetric` | I8 | one, in the source's element type | `q * s` |
//! | `int4_grouped` | I8, -7 to 7 in a byte each | one per 128 values of the flattened tensor | `q * s` |
//! | `int8_asymmetric` | U8 | F32 `[s, z]` | `(q - z) * s` |
//!
//! The writer of these files had two defects. They cannot be repaired, because the lost values are not in the files: a
//! tensor whose range does not include zero was clipped at one end of the 8 bits, and a constant tensor became zero.
//! [`LegacyTensor::defect`] finds both.
//!
//! Refuses tensors without a scheme or scales, types and shapes that do not match the scheme, and tensors whose name
//! has another layer number than the file.

use std::collections::HashMap;

use super::error::{CheckpointError, short};
use super::files::{FileBytes, MAX_SHARDS, ModelFiles};
use super::safetensors::{TensorInfo, header};
use super::table::{CheckpointFile, Entry, Span, Stored, Table};

pub(super) mod tensor;

pub use tensor::LegacyTensor;

use tensor::Layout;

/// The layer files among `names` as (layer, name), sorted by layer. The layer of a shared file is `None`, which sorts
/// first.
fn layer_files(names: &[String]) -> Vec<(Option<u32>, &str)> {
    let mut files: Vec<_> = names.iter().filter_map(|name| layer_file(name)).collect();
    files.sort_unstable();
    files
}

fn layer_file(name: &str) -> Option<(Option<u32>, &str)> {
    let stem = name.strip_suffix(".safetensors")?;
    if stem.strip_suffix("_shared").is_some_and(|stem| !stem.is_empty()) {
        return Some((None, name));
    }
    let (stem, number) = stem.rsplit_once("_layer_")?;
    let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    if stem.is_empty() || !digits {
        return None;
    }
    Some((Some(number.parse().ok()?), name))
}

/// N of a name with `layers.N.`, found in the same way as by the writer of these files.
fn layer_of(name: &str) -> Option<&str> {
    name.split_once("layers.").map(|(_, rest)| rest.split('.').next().unwrap_or(rest))
}

/// Maps the layer files and checks every tensor with its scales. Returns false if the model has no layer files.
pub(super) fn add_layer_files(table: &mut Table, files: &ModelFiles) -> Result<bool, CheckpointError> {
    let names = files.names()?;
    let names = layer_files(&names);
    if names.is_empty() {
        return Ok(false);
    }
    let fail = |problem: String| Err(CheckpointError::file(files.location(), problem));
    if names.len() > MAX_SHARDS {
        return fail(format!("has {} layer files; expected at most {MAX_SHARDS}", names.len()));
    }
    if !names.iter().any(|(layer, _)| layer.is_none()) {
        return fail("has layer files, but no *_shared.safetensors with the embedding".into());
    }
    for (layer, name) in names {
        let display = files.display(name);
        let Some(bytes) = files.map(name)? else {
            return Err(CheckpointError::file(display, "was removed while the model was opened"));
        };
        add_layer_file(table, display, bytes, layer)?;
    }
    Ok(true)
}

fn add_layer_file(
    table: &mut Table,
    display: String,
    bytes: FileBytes,
    layer: Option<u32>,
) -> Result<(), CheckpointError> {
    let header = header(&display, &bytes)?;
    let about = |tensor: &str, problem: String| CheckpointError::tensor(&display, tensor, problem);
    let by_name: HashMap<&str, &TensorInfo> =
        header.tensors.iter().map(|info| (info.name.as_str(), info)).collect();
    // Other writers add the key `format`.
    let missing =
        header.metadata.keys().filter(|name| !by_name.contains_key(name.as_str()) && *name != "format");
    if let Some(name) = missing.min() {
        return Err(about(name, "has a scheme in the file's metadata, but is not in the file".into()));
    }
    let file = table.files.len();
    for info in &header.tensors {
        let name = &info.name;
        let Some(scheme) = header.metadata.get(name) else {
            match name.strip_suffix("_scale") {
                Some(of) if header.metadata.contains_key(of) => continue,
                _ => {
                    let problem = "has no scheme in the file's metadata; expected one, as in layer files of the \
                                   original project";
                    return Err(about(name, problem.into()));
                }
            }
        };
        let number = layer_of(name);
        if number.map(|number| number.parse::<u32>().ok()) != layer.map(Some) {
            let problem = match layer {
                Some(layer) => {
                    format!("is in a file of layer {layer}; expected layers.{layer} in its name")
                }
                None => "is in a file of shared tensors; expected no layers.N in its name".into(),
            };
            return Err(about(name, problem));
        }
        let scale_name = format!("{name}_scale");
        let Some(&scale) = by_name.get(scale_name.as_str()) else {
            return Err(about(&scale_name, format!("is missing; expected the scales of {}", short(name))));
        };
        let (q, scales) = (&bytes[info.range.clone()], &bytes[scale.range.clone()]);
        let layout = Layout::check(scheme, info, q, scale, scales)
            .map_err(|(wrong, problem)| about(&wrong.name, problem))?;
        let span = |info: &TensorInfo| Span { file, range: info.range.clone() };
        let stored = Stored::Legacy { layout, q: span(info), scales: span(scale) };
        let (name, shape) = (name.clone(), info.shape.clone());
        table.add(Entry { name, shape, file, stored, interleaved: None }, &display)?;
    }
    table.files.push(CheckpointFile { display, bytes });
    Ok(())
}
