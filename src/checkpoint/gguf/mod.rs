//! GGUF, the file format of llama.cpp: one file with the whole model, including tokenizer and configuration.
//!
//! The metadata is converted to the files of a Hugging Face checkpoint, and tensors get Hugging Face names, so the rest
//! of the program does not know GGUF. The weights differ in two ways: norms are stored as `1 + w`, and quantized
//! tensors keep their integers and scales ([`GgmlTensor`]).

mod arch;
pub(super) mod blocks;
mod generated;
mod header;
mod tokenizer;

pub use arch::{GgufArch, GgufTokens, Keys, vocab_size};
pub use blocks::{GgmlTensor, GgmlType};
pub use generated::special_ids;
pub use header::{Element, HeaderError, Metadata, TensorInfo, Value};

use super::error::CheckpointError;
use header::{Header, read_header};

/// The tensors of part `index` of a file of `count` parts with their Hugging Face names, in the order of their bytes.
/// Messages call the part `display`. Without an architecture, tensors of layers keep their names.
pub(super) fn tensors<'a>(
    bytes: &'a [u8],
    display: &str,
    (index, count): (usize, usize),
    arch: Option<&GgufArch>,
) -> Result<Vec<(String, TensorInfo<'a>)>, CheckpointError> {
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
        let named = header.tensors.into_iter();
        named.map(|tensor| Ok((generated::tensor_name(arch, tensor.name)?, tensor))).collect()
    };
    read().map_err(|e| error(display, e))
}

/// The architecture of a file, of those in `archs`, by its first part.
pub(super) fn arch_of(bytes: &[u8], archs: &[&'static GgufArch]) -> Option<&'static GgufArch> {
    arch::find_or_first(archs, &read_header(bytes).ok()?.metadata).ok()
}

/// Generates the file `name` of a Hugging Face checkpoint from the metadata; `None` if the metadata does not contain
/// it. `parts` are the file or its parts in order, as (name in messages, bytes).
pub(super) fn generated(
    parts: &[(&str, &[u8])],
    name: &str,
    archs: &[&'static GgufArch],
) -> Result<Option<Vec<u8>>, CheckpointError> {
    let [(display, first), rest @ ..] = parts else { return Ok(None) };
    let about_first = |e| error(display, e);
    let Header { metadata, mut tensors } = read_header(first).map_err(about_first)?;
    for (display, part) in rest {
        tensors.extend(read_header(part).map_err(|e| error(display, e))?.tensors);
    }
    let make = || {
        let tokens = || arch::find_or_first(archs, &metadata).map(|arch| &arch.tokens);
        let json = match name {
            "config.json" => {
                let arch = arch::find(archs, &metadata)?;
                (arch.config)(&Keys::new(arch, &metadata), &tensors)?
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
