//! Small checkpoints, helpers to read checkpoints, and damage to their files.

use std::path::Path;

use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use unicorn::checkpoint::{Checkpoint, Encoding, Tensor};
use unicorn::model::arch::open_files;
use unicorn::tensor::{Bits, DType, QuantizedRow, Scheme};

use super::data;

/// A folder with tiny-a and the mini tokenizer, which fits it.
pub fn tiny_model() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(data("gemma3/tiny-a").join(file), folder.path().join(file)).expect("copied");
    }
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(data("tokenizer-mini").join(file), folder.path().join(file)).expect("copied");
    }
    folder
}

/// A copy of the files of a folder, without its subfolders.
pub fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(folder).expect("a folder") {
        let from = file.expect("a file").path();
        if from.is_file() {
            std::fs::copy(&from, copy.path().join(from.file_name().expect("a name"))).expect("copied");
        }
    }
    copy
}

/// A folder of pulled models that holds `org/tiny` with these files.
pub fn pulled(files: &[(&str, &[u8])]) -> TempDir {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let folder = tempfile::tempdir().expect("a folder");
    let repository = folder.path().join("models--org--tiny");
    let snapshot = repository.join("snapshots").join(commit);
    std::fs::create_dir_all(&snapshot).expect("a folder");
    std::fs::create_dir_all(repository.join("refs")).expect("a folder");
    std::fs::write(repository.join("refs/main"), commit).expect("written");
    for (name, bytes) in files {
        std::fs::write(snapshot.join(name), bytes).expect("written");
    }
    folder
}

/// Little-endian bytes.
pub fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The values of a tensor, read directly and through the integers and scales that the device gets.
pub fn values_both_ways(tensor: &Tensor) -> (Vec<f32>, Vec<f32>) {
    let values = tensor.to_f32().unwrap();
    let (scheme, cols) = (tensor.scheme().unwrap(), tensor.cols());
    if scheme.grouping(cols).is_none() {
        return (values.clone(), values);
    }
    let mut row = QuantizedRow::new(scheme, cols);
    let mut again = vec![0.0; values.len()];
    for (index, out) in again.chunks_exact_mut(cols).enumerate() {
        tensor.quantized_row_into(index, &mut row).unwrap();
        row.dequantize_into(scheme, out);
    }
    (values, again)
}

/// A safetensors file with this header and data.
pub fn with_header(header: &str, bytes: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes].concat()
}

/// A tensor of a safetensors file: name, element type, shape, bytes.
pub type StoredTensor<'a> = (&'a str, &'a str, &'a [usize], &'a [u8]);

/// A well-formed safetensors file of these tensors.
pub fn safetensors_file(tensors: &[StoredTensor]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// A folder with these files.
pub fn folder_of(files: &[(&str, Vec<u8>)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// The checkpoint of a folder, which must be sound.
pub fn opened(folder: &Path) -> Checkpoint {
    Checkpoint::open(&open_files(folder).unwrap()).unwrap_or_else(|e| panic!("{e}"))
}

/// The error for a folder with a bad checkpoint: one line, without the path of the folder.
pub fn refusal(folder: &Path) -> String {
    let error = Checkpoint::open(&open_files(folder).unwrap()).expect_err("a bad checkpoint").to_string();
    assert!(!error.contains('\n'), "{error}");
    error.replace(&format!("{}/", folder.display()), "").replace(&folder.display().to_string(), "DIR")
}

/// Reads as much as possible of a checkpoint that may be damaged.
pub fn read_all(folder: &Path) -> Result<usize, String> {
    let checkpoint = Checkpoint::open(&open_files(folder).unwrap()).map_err(|e| e.to_string())?;
    for tensor in checkpoint.iter() {
        tensor.defect();
        let mut row = vec![0.0; tensor.cols()];
        if let Ok(scheme) = tensor.scheme() {
            let mut quantized = QuantizedRow::new(scheme, tensor.cols());
            for index in 0..tensor.rows().min(8) {
                let values = tensor.rows_f32_into(index..index + 1, &mut row);
                if scheme.grouping(tensor.cols()).is_some() {
                    let as_stored = tensor.quantized_row_into(index, &mut quantized);
                    assert!(as_stored.is_ok() || values.is_err(), "{}: {as_stored:?}", tensor.name);
                }
            }
        }
    }
    Ok(checkpoint.iter().len())
}

/// Changes a safetensors file: a byte of its data, or a value of its header, which usually stays valid JSON.
pub fn mutate(file: &[u8], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (header, data) = (&file[8..8 + length], &file[8 + length..]);
    let mut data = data.to_vec();
    let mut header: Value = serde_json::from_slice(header).unwrap();
    for _ in 0..rng.random_range(1..3) {
        let names: Vec<String> = header.as_object().unwrap().keys().cloned().collect();
        let (name, other) = (names.choose(rng).unwrap().clone(), names.choose(rng).unwrap().clone());
        let number = [0i64, 1, -1, 2, 3, 31, 32, 64, 1 << 31, i64::MAX].choose(rng).copied().unwrap();
        let entries = header.as_object_mut().unwrap();
        match rng.random_range(0..40) {
            0 => {
                let dtypes = ["F32", "F16", "BF16", "I8", "U8", "I32", "I64"];
                entries[&name]["dtype"] = json!(dtypes.choose(rng));
            }
            1 => {
                if let Some(shape) = entries[&name].get_mut("shape").and_then(Value::as_array_mut) {
                    match rng.random_range(0..4) {
                        0 => shape.push(json!(number)),
                        1 => drop(shape.pop()),
                        2 => shape.reverse(),
                        _ => shape.iter_mut().for_each(|dim| *dim = json!(number)),
                    }
                }
            }
            2 => drop(entries.remove(&name)),
            3 => {
                let value = entries[&name].clone();
                entries.insert(other, value);
            }
            4 => {
                let value = entries.remove(&name).unwrap();
                let suffixes =
                    [".weight", ".qweight", ".scales", ".qzeros", ".weight_packed", "_scale", "_layers.1."];
                entries.insert(format!("{other}{}", suffixes.choose(rng).unwrap()), value);
            }
            5 => {
                if let Some(metadata) = entries.get_mut("__metadata__").and_then(Value::as_object_mut) {
                    let schemes = ["int8_symmetric", "int4_grouped", "int8_asymmetric", ""];
                    metadata.insert(name, json!(schemes.choose(rng)));
                }
            }
            6 => {
                let part = rng.random_range(0..2);
                if let Some(offset) = entries[&name].get_mut("data_offsets").and_then(|o| o.get_mut(part)) {
                    *offset = json!(number);
                }
            }
            // Most damage is of this kind, because it passes the header.
            _ if !data.is_empty() => {
                let at = rng.random_range(0..data.len());
                data[at] ^= 1 << rng.random_range(0..8);
            }
            _ => {}
        }
    }
    if rng.random_ratio(1, 40) {
        data.truncate(data.len() / 2);
    }
    with_header(&header.to_string(), &data)
}

/// Lookup of tensors by name. The product does not need it, because it reads all tensors.
pub trait ByName {
    fn get(&self, name: &str) -> Option<Tensor<'_>>;
}

impl ByName for Checkpoint {
    fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.iter().find(|tensor| tensor.name == name)
    }
}

/// Element type and bytes of a tensor that is not quantized.
pub fn plain<'a>(tensor: &Tensor<'a>) -> Option<(DType, &'a [u8])> {
    match tensor.encoding {
        Encoding::Plain { dtype, data } => Some((dtype, data)),
        _ => None,
    }
}

/// The smallest and the largest integer that a scheme stores. `None` for floating-point weights.
pub fn integers(scheme: Scheme) -> Option<(i8, i8)> {
    match scheme {
        Scheme::F32 | Scheme::F16 | Scheme::Bf16 => None,
        Scheme::Int8Row | Scheme::Int { bits: Bits::Eight, .. } => Some((-128, 127)),
        Scheme::Int { bits, scales, .. } => {
            let all = 1 << bits.count();
            let least = if scales.is_symmetric() { -all / 2 } else { 0 };
            Some((least, least + (all - 1)))
        }
    }
}
