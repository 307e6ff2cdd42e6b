//! What a GGUF file of an architecture must have: the interface between this reader and the architectures' folders.

use serde_json::Value as Json;

use super::header::{HeaderError, Metadata, TensorInfo, Value};
use crate::checkpoint::error::short;

const ARCHITECTURE: &str = "general.architecture";

/// How files of one architecture become a Hugging Face checkpoint.
#[derive(Debug)]
pub struct GgufArch {
    /// The value of `general.architecture`, which is also the prefix of the architecture's keys.
    pub name: &'static str,
    /// Generates `config.json`.
    pub config: fn(&Keys, &[TensorInfo]) -> Result<Json, HeaderError>,
    /// The Hugging Face name of a tensor within its layer, such as `self_attn.q_proj` for `attn_q`; `None` if unknown.
    pub layer_tensor: fn(&str) -> Option<&'static str>,
    pub tokens: GgufTokens,
}

/// Special tokens of an architecture, for files that omit them.
#[derive(Debug)]
pub struct GgufTokens {
    pub bos: u64,
    pub eos: u64,
    pub pad: u64,
    /// The texts of all tokens that end an answer.
    pub end: &'static [&'static str],
    /// The texts of control tokens. The file's type is ignored for them, because some converters list them as normal
    /// pieces, and these would be split into letters.
    pub control: &'static [&'static str],
}

/// The architecture of a file, of those in `archs`.
pub(super) fn find(
    archs: &[&'static GgufArch],
    metadata: &Metadata,
) -> Result<&'static GgufArch, HeaderError> {
    let names: Vec<String> = archs.iter().map(|arch| format!("{:?}", arch.name)).collect();
    let expected = format!("expected {}", names.join(" or "));
    let name = metadata.text(ARCHITECTURE)?;
    if let Some(arch) = archs.iter().find(|arch| name == Some(arch.name)) {
        return Ok(arch);
    }
    let problem = match name {
        Some("clip") => {
            format!(
                "is \"clip\": this is a vision tower (mmproj); {expected}, the file of the language model"
            )
        }
        Some(other) => format!("{:?} is not supported; {expected}", short(other)),
        None => format!("is missing; {expected}"),
    };
    Err(HeaderError::key(ARCHITECTURE, problem))
}

/// As [`find`]; a file of another architecture counts as the first one. Its tensors and tokenizer can be used with a
/// config from another place.
pub(super) fn find_or_first(
    archs: &[&'static GgufArch],
    metadata: &Metadata,
) -> Result<&'static GgufArch, HeaderError> {
    find(archs, metadata).or_else(|error| archs.first().copied().ok_or(error))
}

/// The vocabulary size, which is the number of rows of the embedding. The tokenizer may have fewer ids.
pub fn vocab_size(tensors: &[TensorInfo]) -> Result<usize, HeaderError> {
    const NAME: &str = "token_embd.weight";
    match tensors.iter().find(|t| t.name == NAME) {
        Some(tensor) if tensor.shape.len() == 2 => Ok(tensor.shape[0]),
        Some(tensor) => {
            Err(HeaderError::tensor(NAME, format!("has the shape {:?}; expected a matrix", tensor.shape)))
        }
        None => Err(HeaderError::tensor(NAME, "is missing; expected the embedding of the tokens")),
    }
}

/// Reads metadata keys by their names without the architecture's prefix.
pub struct Keys<'a, 'm> {
    pub metadata: &'m Metadata<'a>,
    arch: &'static GgufArch,
}

impl<'a, 'm> Keys<'a, 'm> {
    /// The keys of a file with the architecture `arch`.
    pub fn new(arch: &'static GgufArch, metadata: &'m Metadata<'a>) -> Self {
        Keys { metadata, arch }
    }

    pub fn full(&self, name: &str) -> String {
        format!("{}.{name}", self.arch.name)
    }

    pub fn has(&self, name: &str) -> bool {
        self.metadata.has(&self.full(name))
    }

    pub fn error(&self, name: &str, problem: impl Into<String>) -> HeaderError {
        HeaderError::key(&self.full(name), problem)
    }

    pub fn missing(&self, name: &str) -> HeaderError {
        self.error(name, "is missing; expected a number")
    }

    pub fn whole(&self, name: &str) -> Result<Option<u64>, HeaderError> {
        self.metadata.whole(&self.full(name))
    }

    pub fn required(&self, name: &str) -> Result<u64, HeaderError> {
        self.whole(name)?.ok_or_else(|| self.missing(name))
    }

    /// The value of the first of `names` that the file has.
    pub fn number(&self, names: &[&str]) -> Result<Option<f64>, HeaderError> {
        match names.iter().find(|name| self.has(name)) {
            Some(name) => self.metadata.number(&self.full(name)),
            None => Ok(None),
        }
    }

    /// A whole number. Some files have a list of it, with one equal element per layer.
    pub fn uniform(&self, name: &str, blocks: u64) -> Result<Option<u64>, HeaderError> {
        let key = self.full(name);
        if !self.metadata.is_array(&key) {
            return self.whole(name);
        }
        let wrong = || self.error(name, format!("is a list; expected one number, or {blocks} equal ones"));
        let mut elements = self.metadata.elements(&key)?.into_iter().flatten();
        let first = match elements.next().transpose()? {
            Some(Value::Whole(first)) => u64::try_from(first).map_err(|_| wrong())?,
            _ => return Err(wrong()),
        };
        let mut count = 1;
        for value in elements {
            count += 1;
            if value? != Value::Whole(first.into()) || count > blocks {
                return Err(wrong());
            }
        }
        if count == blocks { Ok(Some(first)) } else { Err(wrong()) }
    }
}
