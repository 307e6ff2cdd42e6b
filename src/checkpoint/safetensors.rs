//! A strict reader of the header of a safetensors file.
//!
//! Layout: 8 bytes header length (little endian), that many bytes of JSON (tensor name -> dtype, shape,
//! `data_offsets` relative to the end of the header), then the tensors' bytes without gap or overlap.
//!
//! The file is not trusted: every sum is checked, and every error names the tensor. The `safetensors` crate is not
//! used, because its errors name no tensor, it accepts duplicate names, and its sum of the lengths (0.7.0) overflows
//! with a malicious header.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::error::{CheckpointError, one_line, short};
use super::files::FileBytes;
use crate::tensor::DType;

/// Longest accepted header, in bytes. The 1,247 tensors of a 27B take 0.2 MB.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Maximum number of dimensions. No tensor of a language or vision model has so many.
const MAX_RANK: usize = 8;

/// One tensor of a file.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Header {
    /// Tensors in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    pub metadata: HashMap<String, String>,
}

fn read_header(display: &str, bytes: &[u8]) -> Result<Header, CheckpointError> {
    let file_error = |problem: String| CheckpointError::file(display, problem);
    let about = |tensor: &str, problem: String| CheckpointError::tensor(display, tensor, problem);
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(file_error(format!("truncated: {} bytes, too few for a safetensors file", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > rest.len() as u64 {
        return Err(file_error(format!(
            "truncated, or not a safetensors file: its first 8 bytes announce a header of {length} bytes, \
             but {} bytes follow",
            rest.len()
        )));
    }
    if length > MAX_HEADER_BYTES {
        return Err(file_error(format!(
            "its header has {length} bytes; expected at most {MAX_HEADER_BYTES}"
        )));
    }
    let (header, data) = rest.split_at(length as usize);
    let Entries::<HeaderEntry, true> { entries, metadata } = serde_json::from_slice(header)
        .map_err(|e| file_error(format!("its header is not a valid safetensors header: {}", one_line(&e))))?;

    let start = bytes.len() - data.len();
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let checked = check_entry(&entry, data.len());
        let (dtype, shape, offsets) = checked.map_err(|problem| about(&name, problem))?;
        let range = start + offsets.start..start + offsets.end;
        tensors.push(TensorInfo { name, dtype, shape, range });
    }

    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    let mut end = start;
    for tensor in &tensors {
        let Range { start: from, end: to } = tensor.range;
        if from != end {
            let what = if from < end { "overlaps the tensor before it" } else { "leaves a gap before it" };
            let problem = format!("{what}: its bytes begin at {}, expected {}", from - start, end - start);
            return Err(about(&tensor.name, problem));
        }
        end = to;
    }
    if end != bytes.len() {
        return Err(file_error(format!("{} bytes follow the last tensor; expected none", bytes.len() - end)));
    }
    Ok(Header { tensors, metadata })
}

/// Reads and checks the header of a safetensors file. Messages call the file `display`.
pub(super) fn header(display: &str, bytes: &FileBytes) -> Result<Header, CheckpointError> {
    // No read-ahead into the tensors: they are read later, perhaps without the page cache.
    bytes.read_ahead(false);
    let header = read_header(display, bytes);
    bytes.read_ahead(true);
    header
}

fn check_entry(entry: &HeaderEntry, data_len: usize) -> Result<(DType, Vec<usize>, Range<usize>), String> {
    let dtype: DType = entry.dtype.parse().map_err(|_| {
        let found = short(&entry.dtype);
        format!("element type {found:?} is not supported; expected F32, F16, BF16, I8, U8, I32 or I64")
    })?;
    if entry.shape.len() > MAX_RANK {
        return Err(format!("has {} dimensions; expected at most {MAX_RANK}", entry.shape.len()));
    }
    let size = entry.shape.iter().try_fold(dtype.size() as u64, |size, &dim| size.checked_mul(dim));
    let [start, end] = entry.data_offsets;
    if end < start {
        return Err(format!("its bytes end at {end}, before they begin at {start}"));
    }
    let shape = &entry.shape;
    match size {
        Some(size) if size == end - start => {}
        Some(size) => {
            return Err(format!(
                "{} {shape:?} takes {size} bytes, but its offsets span {}",
                entry.dtype,
                end - start
            ));
        }
        None => return Err(format!("{} {shape:?} is larger than any file", entry.dtype)),
    }
    if end > data_len as u64 {
        return Err(format!(
            "its bytes end at {end}, but the file's end at {data_len}: the file is truncated or corrupt"
        ));
    }
    // The size limits the dimensions, unless one of them is 0. Then another one may exceed a 32-bit usize.
    let shape = shape.iter().map(|&d| usize::try_from(d)).collect::<Result<_, _>>();
    Ok((dtype, shape.map_err(|e| e.to_string())?, start as usize..end as usize))
}

#[derive(serde::Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// A JSON object as (name, value) in file order. Refuses duplicate names. With `METADATA`, the entry `__metadata__` is
/// an object of strings and is returned separately.
pub(super) struct Entries<V, const METADATA: bool> {
    pub entries: Vec<(String, V)>,
    pub metadata: HashMap<String, String>,
}

impl<'de, V: Deserialize<'de>, const METADATA: bool> Deserialize<'de> for Entries<V, METADATA> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(std::marker::PhantomData))
    }
}

struct EntriesVisitor<V, const METADATA: bool>(std::marker::PhantomData<V>);

impl<'de, V: Deserialize<'de>, const METADATA: bool> Visitor<'de> for EntriesVisitor<V, METADATA> {
    type Value = Entries<V, METADATA>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut entries, mut metadata) = (Vec::new(), HashMap::new());
        let mut seen = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            let in_entry = |e: A::Error| A::Error::custom(format!("entry {}: {e}", short(&name)));
            if !seen.insert(name.clone()) {
                return Err(in_entry(A::Error::custom("occurs twice")));
            }
            if METADATA && name == "__metadata__" {
                metadata = map.next_value().map_err(in_entry)?;
            } else {
                let value = map.next_value().map_err(in_entry)?;
                entries.push((name, value));
            }
        }
        Ok(Entries { entries, metadata })
    }
}
