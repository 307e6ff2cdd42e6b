//! A strict reader of the header of a GGUF file: metadata, and types and byte ranges of tensors.
//!
//! Layout, little endian: `GGUF`, version, number of tensors, number of keys; each key with its type and value; each
//! tensor with its name, dimensions (fastest first), type and offset; padding to the alignment; the tensors' bytes.
//! The only difference of version 3 from version 2 is that version 3 may be big endian.
//!
//! The file is not trusted. Every length is compared with the remaining bytes before it is used, and values are read
//! from the file only on request, so the size of the file limits all allocations. Refuses version 1, big endian,
//! duplicate keys and tensors, arrays of arrays, unsupported element types, and tensors that overlap or exceed the
//! file. The error names the key or the tensor.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;

use strum::VariantArray;

use super::blocks::{GgmlType, TYPE_NAMES};
use crate::checkpoint::error::short;
use crate::tensor::DType;

const MAGIC: &[u8; 4] = b"GGUF";
/// A file of a 27B has 41 keys and 808 tensors.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 16;
/// Longest name of a tensor, in bytes. ggml allows 64, some builds 128.
const MAX_TENSOR_NAME: u64 = 256;
/// Longest key that the format allows, in bytes.
const MAX_KEY: u64 = u16::MAX as u64;
/// Maximum number of dimensions of a tensor in ggml.
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Why a file was refused.
#[derive(Debug)]
pub struct HeaderError {
    /// The wrong tensor, if the problem is about one.
    pub(super) tensor: Option<String>,
    pub(super) problem: String,
}

impl HeaderError {
    fn file(problem: impl Into<String>) -> Self {
        Self { tensor: None, problem: problem.into() }
    }

    pub fn key(key: &str, problem: impl Into<String>) -> Self {
        Self::file(format!("key {}: {}", short(key), problem.into()))
    }

    pub fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self { tensor: Some(name.to_owned()), problem: problem.into() }
    }
}

#[derive(Debug)]
pub(super) struct Header<'a> {
    pub metadata: Metadata<'a>,
    /// Tensors in the order of their bytes.
    pub tensors: Vec<TensorInfo<'a>>,
}

#[derive(Debug, Clone)]
pub struct TensorInfo<'a> {
    pub name: &'a str,
    pub element: Element,
    /// The slowest dimension is first, as everywhere except in GGUF files.
    pub shape: Vec<usize>,
    /// Byte range in the file.
    pub range: Range<usize>,
}

/// How a tensor's elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    Plain(DType),
    Blocks(GgmlType),
}

/// Reads and checks the header. `bytes` is the whole file.
pub(super) fn read_header(bytes: &[u8]) -> Result<Header<'_>, HeaderError> {
    let mut reader = Reader { bytes, at: 0 };
    let magic = reader.take(4, "the magic").map_err(HeaderError::file)?;
    if magic != MAGIC {
        let hint = match magic {
            b"FUGG" => "it is big endian; convert it to little endian (gguf_convert_endian.py)",
            b"lmgg" | b"fmgg" | b"tjgg" | b"algg" => "it has an older ggml format; convert the model again",
            _ => "expected the bytes GGUF at its start",
        };
        return Err(HeaderError::file(format!("is not a GGUF file: {hint}")));
    }
    let version = reader.u32("the version").map_err(HeaderError::file)?;
    match version {
        2 | 3 => {}
        _ if version & 0xffff == 0 => {
            return Err(HeaderError::file(
                "is big endian; expected little endian (gguf_convert_endian.py converts it)",
            ));
        }
        _ => {
            return Err(HeaderError::file(format!(
                "is GGUF version {version}; expected 2 or 3 (llama.cpp's converters write 3)"
            )));
        }
    }
    let num_tensors = reader.count("tensors", MAX_TENSORS)?;
    let num_keys = reader.count("keys", MAX_KEYS)?;

    let mut metadata = Metadata { bytes, values: HashMap::new() };
    for index in 0..num_keys {
        let key = reader
            .text(MAX_KEY, "its name")
            .map_err(|problem| HeaderError::file(format!("key {index} of {num_keys}: {problem}")))?;
        let value = reader.value().map_err(|problem| HeaderError::key(key, problem))?;
        if metadata.values.insert(key, value).is_some() {
            return Err(HeaderError::key(key, "occurs twice"));
        }
    }

    let alignment = metadata.alignment()?;
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    for index in 0..num_tensors {
        let name = reader
            .text(MAX_TENSOR_NAME, "its name")
            .map_err(|problem| HeaderError::file(format!("tensor {index} of {num_tensors}: {problem}")))?;
        let entry = reader.tensor(alignment).map_err(|problem| HeaderError::tensor(name, problem))?;
        if !names.insert(name) {
            return Err(HeaderError::tensor(name, "occurs twice"));
        }
        entries.push((name, entry));
    }

    // The padding may be missing if no tensor follows it.
    let start = (reader.at as u64).next_multiple_of(alignment);
    let len = (bytes.len() as u64).saturating_sub(start);
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let end = entry.offset.checked_add(entry.bytes).filter(|end| *end <= len).ok_or_else(|| {
            let problem = format!(
                "its {} bytes at offset {} exceed the {len} bytes of tensor data: the file is truncated or corrupt",
                entry.bytes, entry.offset
            );
            HeaderError::tensor(name, problem)
        })?;
        let range = (start + entry.offset) as usize..(start + end) as usize;
        tensors.push(TensorInfo { name, element: entry.element, shape: entry.shape, range });
    }
    tensors.sort_by_key(|t| t.range.start);
    for pair in tensors.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let problem = format!("overlaps tensor {}", short(pair[0].name));
            return Err(HeaderError::tensor(pair[1].name, problem));
        }
    }
    Ok(Header { metadata, tensors })
}

/// A tensor's entry in the header. Its range is not yet compared with the file's size.
struct TensorEntry {
    element: Element,
    shape: Vec<usize>,
    /// Offset from the start of the tensor data.
    offset: u64,
    bytes: u64,
}

impl Element {
    fn parse(id: u32) -> Result<Self, String> {
        Ok(match id {
            0 => Self::Plain(DType::F32),
            1 => Self::Plain(DType::F16),
            30 => Self::Plain(DType::BF16),
            _ => Self::Blocks(GgmlType::from_repr(id).ok_or_else(|| {
                let name = match TYPE_NAMES.get(id as usize) {
                    None | Some(&"") => format!("of the unknown type {id}"),
                    Some(name) => name.to_string(),
                };
                let read: Vec<&str> = GgmlType::VARIANTS.iter().map(|kind| kind.name()).collect();
                format!(
                    "is {name}, which is not supported; expected F32, F16, BF16, {} (take another file of the model, such as \
                     Q4_K_M or Q4_0)",
                    read.join(", ")
                )
            })?),
        })
    }

    const fn block_values(self) -> u64 {
        match self {
            Self::Plain(_) => 1,
            Self::Blocks(kind) => kind.block_values() as u64,
        }
    }

    const fn block_bytes(self) -> u64 {
        match self {
            Self::Plain(dtype) => dtype.size() as u64,
            Self::Blocks(kind) => kind.block_bytes() as u64,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Plain(_) => "a plain type",
            Self::Blocks(kind) => kind.name(),
        }
    }
}

/// The key-value pairs of a file. Values are read from the file's bytes on request.
#[derive(Debug)]
pub struct Metadata<'a> {
    bytes: &'a [u8],
    values: HashMap<&'a str, RawValue>,
}

/// The type and position of a value. It is checked that the value ends within the file.
#[derive(Debug, Clone, Copy)]
enum RawValue {
    Scalar { kind: Kind, at: usize },
    Array { kind: Kind, len: usize, at: usize },
}

/// The type of a value, with its id in the file. Id 9 means an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u32)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    U64 = 10,
    I64,
    F64,
}

impl Kind {
    fn parse(id: u32) -> Result<Kind, String> {
        Kind::from_repr(id).ok_or_else(|| format!("has the unknown value type {id}"))
    }

    /// Bytes of a value; for a text, bytes of its length field.
    const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Text => 8,
        }
    }
}

/// A value of the metadata.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    Whole(i128),
    Number(f64),
    Flag(bool),
    Text(&'a str),
}

impl fmt::Display for Value<'_> {
    /// For messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(n) => write!(f, "{n}"),
            Self::Number(n) => write!(f, "{n}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Text(text) => write!(f, "{:?}", short(text)),
        }
    }
}

impl<'a> Metadata<'a> {
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// A value that is not an array; `None` if the file has no such key.
    pub fn scalar(&self, key: &str) -> Result<Option<Value<'a>>, HeaderError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(RawValue::Scalar { kind, at }) => {
                self.read(*kind, *at).map(Some).map_err(|problem| HeaderError::key(key, problem))
            }
            Some(RawValue::Array { .. }) => Err(HeaderError::key(key, "is an array; expected one value")),
        }
    }

    pub fn is_array(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some(RawValue::Array { .. }))
    }

    /// The elements of an array; `None` if the file has no such key.
    pub fn elements<'m>(&'m self, key: &'m str) -> Result<Option<Elements<'a, 'm>>, HeaderError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(RawValue::Scalar { .. }) => Err(HeaderError::key(key, "is one value; expected an array")),
            Some(&RawValue::Array { kind, len, at }) => {
                Ok(Some(Elements { metadata: self, key, kind, len, index: 0, at }))
            }
        }
    }

    /// A value that `get` accepts; `None` if the file has no such key.
    fn value<T>(
        &self,
        key: &str,
        expected: &str,
        get: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, HeaderError> {
        let Some(value) = self.scalar(key)? else { return Ok(None) };
        let wrong = || HeaderError::key(key, format!("is {value}; expected {expected}"));
        get(value).map(Some).ok_or_else(wrong)
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, HeaderError> {
        self.value(key, "a text", |value| if let Value::Text(text) = value { Some(text) } else { None })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, HeaderError> {
        self.value(
            key,
            "true or false",
            |value| if let Value::Flag(flag) = value { Some(flag) } else { None },
        )
    }

    /// A non-negative whole number of any integer type.
    pub fn whole(&self, key: &str) -> Result<Option<u64>, HeaderError> {
        self.value(key, "a whole number", |value| match value {
            Value::Whole(n) => u64::try_from(n).ok(),
            _ => None,
        })
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, HeaderError> {
        self.value(key, "a number", |value| match value {
            Value::Number(n) => Some(n).filter(|n| n.is_finite()),
            Value::Whole(n) => Some(n as f64),
            _ => None,
        })
    }

    fn alignment(&self) -> Result<u64, HeaderError> {
        const KEY: &str = "general.alignment";
        match self.whole(KEY)? {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(n) if n.is_power_of_two() && n <= MAX_ALIGNMENT => Ok(n),
            Some(n) => {
                let problem = format!("is {n}; expected a power of two, at most {MAX_ALIGNMENT}");
                Err(HeaderError::key(KEY, problem))
            }
        }
    }

    /// Reads the value at `at`. Panics if it does not end within the file.
    fn read(&self, kind: Kind, at: usize) -> Result<Value<'a>, String> {
        let bytes = &self.bytes[at..self.end(kind, at)];
        Ok(match kind {
            Kind::Text => match std::str::from_utf8(&bytes[8..]) {
                Ok(text) => Value::Text(text),
                Err(_) => return Err("is not valid UTF-8".into()),
            },
            Kind::U8 => Value::Whole(bytes[0].into()),
            Kind::I8 => Value::Whole((bytes[0] as i8).into()),
            Kind::U16 => Value::Whole(u16::from_le_bytes(array(bytes)).into()),
            Kind::I16 => Value::Whole(i16::from_le_bytes(array(bytes)).into()),
            Kind::U32 => Value::Whole(u32::from_le_bytes(array(bytes)).into()),
            Kind::I32 => Value::Whole(i32::from_le_bytes(array(bytes)).into()),
            Kind::U64 => Value::Whole(u64::from_le_bytes(array(bytes)).into()),
            Kind::I64 => Value::Whole(i64::from_le_bytes(array(bytes)).into()),
            Kind::F32 => Value::Number(f32::from_le_bytes(array(bytes)).into()),
            Kind::F64 => Value::Number(f64::from_le_bytes(array(bytes))),
            Kind::Bool => match bytes[0] {
                0 => Value::Flag(false),
                1 => Value::Flag(true),
                other => return Err(format!("is a flag with byte {other}; expected 0 or 1")),
            },
        })
    }

    /// The end of the value at `at`.
    fn end(&self, kind: Kind, at: usize) -> usize {
        let head = at + kind.size();
        match kind {
            Kind::Text => head + u64::from_le_bytes(array(&self.bytes[at..head])) as usize,
            _ => head,
        }
    }
}

/// Iterates over the elements of an array.
pub struct Elements<'a, 'm> {
    metadata: &'m Metadata<'a>,
    key: &'m str,
    kind: Kind,
    len: usize,
    index: usize,
    at: usize,
}

impl<'a> Iterator for Elements<'a, '_> {
    type Item = Result<Value<'a>, HeaderError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.index == self.len {
            return None;
        }
        let (index, at) = (self.index, self.at);
        self.index += 1;
        self.at = self.metadata.end(self.kind, at);
        let value = self.metadata.read(self.kind, at);
        Some(value.map_err(|problem| HeaderError::key(self.key, format!("element {index} {problem}"))))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.len - self.index, Some(self.len - self.index))
    }
}

impl ExactSizeIterator for Elements<'_, '_> {}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("as many bytes as the type has")
}

/// Reads the header from a position. Every length is compared with the remaining bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], String> {
        let left = &self.bytes[self.at..];
        if len > left.len() as u64 {
            return Err(format!(
                "{what} takes {len} bytes, but {} are left: the file is truncated or corrupt",
                left.len()
            ));
        }
        self.at += len as usize;
        Ok(&left[..len as usize])
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(array(self.take(4, what)?)))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(array(self.take(8, what)?)))
    }

    fn count(&mut self, what: &str, max: u64) -> Result<u64, HeaderError> {
        let count = self.u64(&format!("the number of {what}")).map_err(HeaderError::file)?;
        if count > max {
            return Err(HeaderError::file(format!("claims {count} {what}; expected at most {max}")));
        }
        Ok(count)
    }

    fn text(&mut self, max: u64, what: &str) -> Result<&'a str, String> {
        let len = self.u64(&format!("the length of {what}"))?;
        if len == 0 || len > max {
            return Err(format!("{what} has {len} bytes; expected 1 to {max}"));
        }
        std::str::from_utf8(self.take(len, what)?).map_err(|_| format!("{what} is not valid UTF-8"))
    }

    /// Checks that a value ends within the file, and moves to its end.
    fn value(&mut self) -> Result<RawValue, String> {
        const ARRAY: u32 = 9;
        let kind = self.u32("its type")?;
        if kind != ARRAY {
            let kind = Kind::parse(kind)?;
            let at = self.at;
            self.skip(kind, "its value")?;
            return Ok(RawValue::Scalar { kind, at });
        }
        let kind = self.u32("its element type")?;
        if kind == ARRAY {
            return Err("is an array of arrays; expected plain elements".into());
        }
        let kind = Kind::parse(kind)?;
        let len = self.u64("its length")?;
        let at = self.at;
        // Every element takes at least the size of its type.
        let least = len.checked_mul(kind.size() as u64).filter(|n| *n <= (self.bytes.len() - at) as u64);
        if least.is_none() {
            let left = self.bytes.len() - at;
            return Err(format!(
                "claims {len} elements, but {left} bytes are left: the file is truncated or corrupt"
            ));
        }
        if kind == Kind::Text {
            for index in 0..len {
                self.skip(kind, "the text").map_err(|problem| format!("element {index}: {problem}"))?;
            }
        } else {
            self.take(len * kind.size() as u64, "its value")?;
        }
        Ok(RawValue::Array { kind, len: len as usize, at })
    }

    fn skip(&mut self, kind: Kind, what: &str) -> Result<(), String> {
        let len = match kind {
            Kind::Text => self.u64(what)?,
            _ => kind.size() as u64,
        };
        self.take(len, what).map(drop)
    }

    fn tensor(&mut self, alignment: u64) -> Result<TensorEntry, String> {
        let dimensions = self.u32("the number of its dimensions")?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(format!("has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}"));
        }
        let mut shape = (0..dimensions).map(|_| self.u64("a dimension")).collect::<Result<Vec<_>, _>>()?;
        let element = Element::parse(self.u32("its type")?)?;
        let offset = self.u64("its offset")?;

        if shape.contains(&0) {
            return Err(format!("has the dimensions {shape:?}; expected at least 1 each"));
        }
        if !shape[0].is_multiple_of(element.block_values()) {
            return Err(format!(
                "has rows of {} values; {} stores them in blocks of {}",
                shape[0],
                element.name(),
                element.block_values()
            ));
        }
        let bytes = shape[1..]
            .iter()
            .try_fold(shape[0] / element.block_values(), |n, dim| n.checked_mul(*dim))
            .and_then(|blocks| blocks.checked_mul(element.block_bytes()))
            .ok_or_else(|| format!("has the dimensions {shape:?}, larger than any file"))?;
        if !offset.is_multiple_of(alignment) {
            return Err(format!("has the offset {offset}; expected a multiple of {alignment}"));
        }
        shape.reverse();
        // The caller checks that the product of the dimensions is at most the bytes of the file.
        let shape = shape.into_iter().map(|dim| usize::try_from(dim).map_err(|e| e.to_string()));
        Ok(TensorEntry { element, shape: shape.collect::<Result<_, _>>()?, offset, bytes })
    }
}
