//! What a GGUF file of an architecture must have: the interface between this reader and the architectures' folders.

use serde_json::Value as Json;

use super::header::{Element, HeaderError, Metadata, TensorInfo, Value};
use crate::checkpoint::error::short;
use crate::tensor::DType;

pub(super) const ARCHITECTURE: &str = "general.architecture";

/// How files of one architecture become a Hugging Face checkpoint.
#[derive(Debug)]
pub struct GgufArch {
    /// The value of `general.architecture`, which is also the prefix of the architecture's keys.
    pub name: &'static str,
    /// Generates `config.json`.
    pub config: fn(&Keys, &GgufTensors) -> Result<Json, HeaderError>,
    /// The Hugging Face name of a tensor within its layer, such as `self_attn.q_proj.weight` for `attn_q` and `weight`;
    /// `None` if unknown.
    pub layer_tensor: fn(&str, &str) -> Option<String>,
    /// The matrices, such as `attn_q`, whose rows are stored so that each row of the first half of a head is followed by
    /// its counterpart in the second half. Hugging Face stores one half after the other.
    pub interleaved: &'static [&'static str],
    /// The kinds of vision towers in files of their own; empty if the architecture's models read text only, or if only that
    /// is computed.
    pub towers: &'static [GgufTower],
    pub tokens: GgufTokens,
}

/// How towers of one kind are stored in files of their own.
#[derive(Debug)]
pub struct GgufTower {
    /// The type of the projector, by which files tell the kind.
    pub projector: &'static str,
    pub pixels: Pixels,
    /// The fields of `config.json` that describe the tower, as an object.
    pub config: fn(&TowerKeys) -> Result<Json, HeaderError>,
    /// The Hugging Face name of a tensor of the file; `None` if unknown.
    pub tensor: fn(&str, &GgufTensors) -> Option<String>,
}

/// The levels of pixels, between 0 and 1, minus `mean` and divided by `std` are what a tower computes with.
#[derive(Debug, Clone, Copy)]
pub struct Pixels {
    pub mean: f64,
    pub std: f64,
}

/// Special tokens of an architecture, for files that omit them.
#[derive(Debug)]
pub struct GgufTokens {
    pub bos: Option<u64>,
    pub eos: u64,
    pub pad: u64,
    /// The value of `tokenizer.ggml.model` that only files of this architecture have. Such a tokenizer has the pieces and
    /// merges of texts.
    pub own_model: Option<&'static str>,
    /// Whether the first word of a text gets a space, as in SentencePiece.
    pub add_space_prefix: bool,
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

/// A tensor with its Hugging Face name.
pub(in crate::checkpoint) struct NamedTensor<'a> {
    pub name: String,
    pub info: TensorInfo<'a>,
    /// As [`Tensor::interleaved`](crate::checkpoint::Tensor::interleaved).
    pub interleaved: Option<usize>,
}

/// The tensors of a file's parts.
pub struct GgufTensors<'a> {
    /// Each with the bytes of its part.
    tensors: Vec<(&'a [u8], TensorInfo<'a>)>,
}

impl<'a> GgufTensors<'a> {
    pub(super) fn new(tensors: Vec<(&'a [u8], TensorInfo<'a>)>) -> Self {
        GgufTensors { tensors }
    }

    fn find(&self, name: &str) -> Option<&(&'a [u8], TensorInfo<'a>)> {
        self.tensors.iter().find(|(_, info)| info.name == name)
    }

    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(_, info)| info.name)
    }

    /// The shape of a tensor; `None` if there is none of that name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|(_, info)| info.shape.as_slice())
    }

    /// The vocabulary size, which is the number of rows of the embedding. The tokenizer may have fewer ids.
    pub fn vocab_size(&self) -> Result<usize, HeaderError> {
        const NAME: &str = "token_embd.weight";
        match self.find(NAME) {
            Some((_, tensor)) if tensor.shape.len() == 2 => Ok(tensor.shape[0]),
            Some((_, tensor)) => {
                Err(HeaderError::tensor(NAME, format!("has the shape {:?}; expected a matrix", tensor.shape)))
            }
            None => Err(HeaderError::tensor(NAME, "is missing; expected the embedding of the tokens")),
        }
    }

    /// The values of a small tensor of f32; `None` if the file has none of that name.
    pub fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, HeaderError> {
        let Some((bytes, tensor)) = self.find(name) else { return Ok(None) };
        if tensor.element != Element::Plain(DType::F32) {
            return Err(HeaderError::tensor(name, "is not F32, as expected"));
        }
        let words = bytes[tensor.range.clone()].as_chunks::<4>().0;
        Ok(Some(words.iter().map(|word| f32::from_le_bytes(*word)).collect()))
    }
}

/// The numbers that describe a model of any architecture.
pub struct Geometry {
    pub blocks: u64,
    pub hidden: u64,
    pub intermediate: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub context: Option<u64>,
    pub norm_eps: f64,
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

    /// Dimension of a head.
    pub fn head_dim(&self) -> Result<u64, HeaderError> {
        if let Some(length) = self.whole("attention.key_length")? {
            return Ok(length);
        }
        let blocks = self.required("block_count")?;
        Ok(self.required("embedding_length")? / self.heads(blocks)?)
    }

    fn heads(&self, blocks: u64) -> Result<u64, HeaderError> {
        const NAME: &str = "attention.head_count";
        match self.uniform(NAME, blocks)? {
            Some(0) => Err(self.error(NAME, "is 0; expected at least 1")),
            heads => heads.ok_or_else(|| self.missing(NAME)),
        }
    }

    /// The number of layers.
    pub fn blocks(&self) -> Result<u64, HeaderError> {
        /// Every known model has far fewer.
        const MAX_BLOCKS: u64 = 1024;
        let blocks = self.required("block_count")?;
        match (1..=MAX_BLOCKS).contains(&blocks) {
            true => Ok(blocks),
            false => Err(self.error("block_count", format!("is {blocks}; expected 1 to {MAX_BLOCKS}"))),
        }
    }

    /// Reads the numbers that describe a model. Refuses a model that generates no text.
    pub fn geometry(&self) -> Result<Geometry, HeaderError> {
        let kv_heads = self.uniform("attention.head_count_kv", self.blocks()?)?;
        self.geometry_with(kv_heads, None)
    }

    /// Like [`Keys::geometry`], for a model with these KV heads, or with as many as query heads. `intermediate` is the width of
    /// feed-forward networks if the layers differ in it.
    pub fn geometry_with(
        &self,
        kv_heads: Option<u64>,
        intermediate: Option<u64>,
    ) -> Result<Geometry, HeaderError> {
        let blocks = self.blocks()?;
        let hidden = self.required("embedding_length")?;
        let heads = self.heads(blocks)?;
        let head_dim = self.head_dim()?;
        for name in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = self.whole(name)?.filter(|other| *other != head_dim) {
                let problem = format!("is {other}; expected the length of the keys ({head_dim})");
                return Err(self.error(name, problem));
            }
        }
        if self.metadata.flag(&self.full("attention.causal"))? == Some(false) {
            return Err(self.error("attention.causal", "is false; expected a model that generates text"));
        }
        // llama.cpp's numbers of what models for embeddings and rerankers make from a text: 0 is nothing, and 1 the mean.
        if let Some(other) = self.whole("pooling_type")?.filter(|other| *other > 1) {
            return Err(
                self.error("pooling_type", format!("is {other}; expected a model that generates text"))
            );
        }
        Ok(Geometry {
            blocks,
            hidden,
            intermediate: match intermediate {
                Some(intermediate) => intermediate,
                None => self
                    .uniform("feed_forward_length", blocks)?
                    .ok_or_else(|| self.missing("feed_forward_length"))?,
            },
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim,
            context: self.whole("context_length")?,
            norm_eps: self.number(&["attention.layer_norm_rms_epsilon"])?.unwrap_or(1e-6),
        })
    }

    /// The value of the first of `names` that the file has.
    pub fn number(&self, names: &[&str]) -> Result<Option<f64>, HeaderError> {
        match names.iter().find(|name| self.has(name)) {
            Some(name) => self.metadata.number(&self.full(name)),
            None => Ok(None),
        }
    }

    /// The values of a list with one element per layer; `None` if the key is missing or no list.
    fn each_layer(&self, name: &str, blocks: u64) -> Result<Option<Vec<Value<'a>>>, HeaderError> {
        let key = self.full(name);
        if !self.metadata.is_array(&key) {
            return Ok(None);
        }
        let Some(elements) = self.metadata.elements(&key)? else { return Ok(None) };
        if elements.len() as u64 != blocks {
            let problem = format!("has {} elements; expected one per layer ({blocks})", elements.len());
            return Err(self.error(name, problem));
        }
        elements.collect::<Result<_, _>>().map(Some)
    }

    /// Whether each layer has a window, from a list with true for those that have one; `None` if the file has no list.
    pub fn windows(&self, blocks: u64) -> Result<Option<Vec<bool>>, HeaderError> {
        const NAME: &str = "attention.sliding_window_pattern";
        let has_window = |value| match value {
            Value::Flag(slides) => Ok(slides),
            Value::Whole(n @ 0..=1) => Ok(n == 1),
            other => Err(self
                .error(NAME, format!("contains {other}; expected true or false, true for a sliding layer"))),
        };
        let list = self.each_layer(NAME, blocks)?;
        list.map(|list| list.into_iter().map(has_window).collect()).transpose()
    }

    /// A whole number for each layer. Some files have one number for all.
    pub fn per_layer(&self, name: &str, blocks: u64) -> Result<Option<Vec<u64>>, HeaderError> {
        let Some(list) = self.each_layer(name, blocks)? else {
            return Ok(self.whole(name)?.map(|number| vec![number; blocks as usize]));
        };
        let whole = |value| match value {
            Value::Whole(number) if u64::try_from(number).is_ok() => Ok(number as u64),
            other => Err(self.error(name, format!("contains {other}; expected whole numbers"))),
        };
        list.into_iter().map(whole).collect::<Result<_, _>>().map(Some)
    }

    /// A number for each layer; `None` if the file has no list.
    pub fn numbers(&self, name: &str, blocks: u64) -> Result<Option<Vec<f64>>, HeaderError> {
        let number = |value| match value {
            Value::Number(number) => Ok(number),
            Value::Whole(number) => Ok(number as f64),
            other => Err(self.error(name, format!("contains {other}; expected numbers"))),
        };
        let list = self.each_layer(name, blocks)?;
        list.map(|list| list.into_iter().map(number).collect()).transpose()
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

/// What the file of a tower says about it. Keys are read by their names without the prefix `clip.vision.`.
pub struct TowerKeys<'a, 'm> {
    pub(super) metadata: &'m Metadata<'a>,
    pub tensors: &'m GgufTensors<'a>,
}

impl TowerKeys<'_, '_> {
    fn full(name: &str) -> String {
        format!("clip.vision.{name}")
    }

    pub fn error(&self, name: &str, problem: impl Into<String>) -> HeaderError {
        HeaderError::key(&Self::full(name), problem)
    }

    fn missing(&self, name: &str) -> HeaderError {
        self.error(name, "is missing; expected a number")
    }

    pub fn whole(&self, name: &str) -> Result<Option<u64>, HeaderError> {
        self.metadata.whole(&Self::full(name))
    }

    pub fn required(&self, name: &str) -> Result<u64, HeaderError> {
        self.whole(name)?.ok_or_else(|| self.missing(name))
    }

    /// The epsilon of the norms.
    pub fn epsilon(&self) -> Result<f64, HeaderError> {
        const NAME: &str = "attention.layer_norm_epsilon";
        self.metadata.number(&Self::full(NAME))?.ok_or_else(|| self.missing(NAME))
    }

    /// Patches along a side of the square that becomes one token. Converters write this number only if it is not the usual
    /// one.
    pub fn pool(&self, usual: u64) -> Result<u64, HeaderError> {
        const NAME: &str = "projector.scale_factor";
        match self.whole(NAME)?.unwrap_or(usual) {
            0 => Err(self.error(NAME, "is 0; expected at least 1")),
            pool => Ok(pool),
        }
    }

    /// Refuses what towers with these levels of pixels in `model` do not have.
    pub(super) fn check(&self, pixels: Pixels, model: &Keys) -> Result<(), HeaderError> {
        self.check_activation()?;
        self.check_pixels(pixels)?;
        self.check_width(model)
    }

    /// Refuses another activation than GELU.
    fn check_activation(&self) -> Result<(), HeaderError> {
        for (key, wanted) in [("clip.use_gelu", true), ("clip.use_silu", false)] {
            if self.metadata.flag(key)?.is_some_and(|found| found != wanted) {
                let problem = format!("is {}; expected {wanted}: such a tower has GELU", !wanted);
                return Err(HeaderError::key(key, problem));
            }
        }
        Ok(())
    }

    /// Refuses other levels of pixels. What is missing is as usual.
    fn check_pixels(&self, Pixels { mean, std }: Pixels) -> Result<(), HeaderError> {
        for (name, wanted) in [("image_mean", mean), ("image_std", std)] {
            let key = Self::full(name);
            for value in self.metadata.elements(&key)?.into_iter().flatten() {
                match value? {
                    Value::Number(found) if found == wanted => {}
                    other => {
                        return Err(HeaderError::key(&key, format!("contains {other}; expected {wanted}")));
                    }
                }
            }
        }
        Ok(())
    }

    /// Refuses the tower of a model with embeddings of another width.
    fn check_width(&self, model: &Keys) -> Result<(), HeaderError> {
        const NAME: &str = "projection_dim";
        const OF_MODEL: &str = "embedding_length";
        let hidden = model.required(OF_MODEL)?;
        match self.whole(NAME)?.filter(|found| *found != hidden) {
            None => Ok(()),
            Some(projected) => {
                let problem = format!(
                    "is {projected}; expected {hidden}, the {} of the model: the tower is that of another model",
                    model.full(OF_MODEL)
                );
                Err(self.error(NAME, problem))
            }
        }
    }
}
