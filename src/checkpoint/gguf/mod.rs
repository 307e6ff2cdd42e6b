//! GGUF, the file format of llama.cpp: one file with the whole model, including tokenizer and configuration.
//!
//! The metadata is converted to the files of a Hugging Face checkpoint, and tensors get Hugging Face names, so the rest
//! of the program does not know GGUF. The weights differ in two ways: norms are stored as `1 + w`, and quantized
//! tensors keep their integers and scales ([`GgmlTensor`]).

mod arch;
pub(super) mod blocks;
mod byte_level;
mod generated;
mod header;
mod tokenizer;
mod tower;

pub(super) use arch::NamedTensor;
pub use arch::{Geometry, GgufArch, GgufTensors, GgufTokens, GgufTower, Keys, Pixels, TowerKeys};
pub use blocks::{GgmlTensor, GgmlType};
pub use generated::{special_ids, token_ids};
pub use header::{Element, HeaderError, Metadata, TensorInfo, Value};
pub(super) use tower::TowerFile;
pub use tower::tower_layer_part;

use super::error::CheckpointError;
use header::{Header, read_header};

/// The tensors of part `index` of a file of `count` parts with their Hugging Face names, in the order of their bytes.
/// Messages call the part `display`. Without an architecture, tensors of layers keep their names.
pub(super) fn tensors<'a>(
    bytes: &'a [u8],
    display: &str,
    (index, count): (usize, usize),
    layout: Option<&Layout>,
) -> Result<Vec<NamedTensor<'a>>, CheckpointError> {
    let read = || {
        let header = read_header(bytes)?;
        for (key, expected) in [("split.no", index as u64), ("split.count", count as u64)] {
            // A file that is not split may have a `split.count` of 0.
            if let Some(found) = header.metadata.whole(key)?.filter(|found| *found != expected)
                && !(count == 1 && found == 0)
            {
                let problem =
                    format!("is {found}; expected {expected}: the file was renamed, or parts are missing");
                return Err(HeaderError::key(key, problem));
            }
        }
        let named = |info: TensorInfo<'a>| {
            let name = generated::tensor_name(layout.map(|layout| layout.arch), info.name)?;
            let interleaved = layout.and_then(|layout| layout.interleaved(&info));
            Ok(NamedTensor { name, info, interleaved })
        };
        header.tensors.into_iter().map(named).collect()
    };
    read().map_err(|e| error(display, e))
}

/// Reads the tower in `bytes`, which messages call `display`, of the model whose first part is `model`.
pub(super) fn tower<'a>(
    bytes: &'a [u8],
    display: &str,
    model: &[u8],
    archs: &[&'static GgufArch],
) -> Result<TowerFile<'a>, CheckpointError> {
    TowerFile::read(bytes, model, archs).map_err(|e| error(display, e))
}

/// How the tensors of a file are stored.
pub(super) struct Layout {
    arch: &'static GgufArch,
    /// Dimension of a head, if the file says it.
    head_dim: Option<usize>,
}

impl Layout {
    /// The layout of a file of one of these architectures, by its first part.
    pub fn of(bytes: &[u8], archs: &[&'static GgufArch]) -> Option<Layout> {
        let metadata = read_header(bytes).ok()?.metadata;
        let arch = arch::find_or_first(archs, &metadata).ok()?;
        Some(Layout { arch, head_dim: Keys::new(arch, &metadata).head_dim().ok().map(|dim| dim as usize) })
    }

    /// The dimension of a head, if the tensor's rows are interleaved and whole heads.
    fn interleaved(&self, tensor: &TensorInfo) -> Option<usize> {
        let (_, part, _) = generated::layer_part(tensor.name)?;
        let is_whole =
            |dim: &usize| dim.is_multiple_of(2) && *dim > 0 && tensor.shape[0].is_multiple_of(*dim);
        self.head_dim.filter(is_whole).filter(|_| self.arch.interleaved.contains(&part))
    }
}

/// Generates the file `name` of a Hugging Face checkpoint from the metadata; `None` if the metadata does not contain
/// it. `parts` are the file or its parts in order, as (name in messages, bytes). The fields of `tower` become part of
/// `config.json`.
pub(super) fn generated(
    parts: &[(&str, &[u8])],
    name: &str,
    archs: &[&'static GgufArch],
    tower: Option<&TowerFile>,
) -> Result<Option<Vec<u8>>, CheckpointError> {
    let [(display, first), rest @ ..] = parts else { return Ok(None) };
    let about_first = |e| error(display, e);
    let Header { metadata, tensors } = read_header(first).map_err(about_first)?;
    let mut tensors: Vec<_> = tensors.into_iter().map(|tensor| (*first, tensor)).collect();
    for (display, part) in rest {
        let of_part = read_header(part).map_err(|e| error(display, e))?.tensors;
        tensors.extend(of_part.into_iter().map(|tensor| (*part, tensor)));
    }
    let tensors = GgufTensors::new(tensors);
    let make = || {
        let tokens = || arch::find_or_first(archs, &metadata).map(|arch| &arch.tokens);
        let json = match name {
            "config.json" => {
                let arch = arch::find(archs, &metadata)?;
                let mut config = (arch.config)(&Keys::new(arch, &metadata), &tensors)?;
                for (field, value) in tower.and_then(|tower| tower.fields.as_object()).into_iter().flatten() {
                    config[field] = value.clone();
                }
                config
            }
            "generation_config.json" => match generated::generation_config(&metadata)? {
                Some(config) => config,
                None => return Ok(None),
            },
            "tokenizer_config.json" => generated::tokenizer_config(tokens()?, &metadata)?,
            "tokenizer.json" => return tokenizer::tokenizer_json(tokens()?, &metadata),
            _ => return Ok(None),
        };
        Ok(Some(json.to_string().into_bytes()))
    };
    make().map_err(about_first)
}

fn error(display: &str, HeaderError { tensor, problem }: HeaderError) -> CheckpointError {
    match tensor {
        Some(tensor) => CheckpointError::tensor(display, &tensor, problem),
        None => CheckpointError::file(display, problem),
    }
}
