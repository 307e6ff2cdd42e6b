//! Reads `config.json` and `generation_config.json`: fields with types and bounds, and errors that name the field.
//!
//! The files' meaning for one architecture is in the folder of that architecture ([`super::arch`]).
//!
//! The bounds on the numbers of a config are far above every real model, so that sizes computed from them cannot
//! overflow. The type of positions bounds contexts and windows.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::SamplingOptions;
use crate::checkpoint::{CheckpointError, parse_config, short};
use crate::kernels;

pub(super) const MAX_VOCAB: u64 = 1 << 20;
pub(super) const MAX_HIDDEN: u64 = 1 << 16;
/// Bound of `intermediate_size` and of `num_attention_heads * head_dim`: a tile, 32 rows of f32 weights, must fit the
/// upload's staging buffer.
pub(super) const MAX_INTERMEDIATE: u64 = 1 << 17;
pub(super) const MAX_LAYERS: u64 = 1024;
pub(super) const MAX_HEADS: u64 = 1024;
pub(super) const MAX_HEAD_DIM: u64 = kernels::MAX_HEAD_DIM as u64;
pub(super) const MAX_POSITIONS: u64 = 1 << 24;

/// A config describes no model that can be computed. One line: file, field, problem.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{file}: {problem}")]
    File { file: String, problem: String },
    #[error("{file}: {field} {problem}")]
    Field { file: String, field: String, problem: String },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Sampling defaults of the model's author, from `generation_config.json`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// Whether requests are sampled by default; false or absent is greedy.
    pub do_sample: Option<bool>,
    pub sampling: SamplingOptions,
    pub eos_token_ids: Vec<u32>,
    /// Ids that are never drawn.
    pub suppress_tokens: Vec<u32>,
}

impl GenerationConfig {
    /// Reads a `generation_config.json`; messages call it `file_name`.
    pub fn from_json(bytes: &[u8], file_name: &str) -> Result<Self, ConfigError> {
        let config = parse_config(bytes, file_name)?;
        let level = Level::root(&config, file_name)?;
        let number = |name: &str, range: RangeInclusive<f64>| -> Result<Option<f32>, ConfigError> {
            level.get(name).map(|v| level.number_of(name, v, range).map(|n| n as f32)).transpose()
        };
        Ok(Self {
            do_sample: level.flag("do_sample")?,
            sampling: SamplingOptions {
                temperature: number("temperature", 0.0..=100.0)?,
                // Some files turn it off by -1, as requests may.
                top_k: match level.get("top_k") {
                    Some(v) if v.as_f64() == Some(-1.0) => Some(0),
                    Some(v) => Some(level.whole("top_k", v, 0..=u32::MAX.into())? as u32),
                    None => None,
                },
                top_p: number("top_p", 0.0..=1.0)?,
                min_p: number("min_p", 0.0..=1.0)?,
                repetition_penalty: number("repetition_penalty", 1e-3..=1e3)?,
                ..SamplingOptions::default()
            },
            eos_token_ids: union([level.ids("eos_token_id")?]),
            suppress_tokens: union([level.ids("suppress_tokens")?]),
        })
    }

    /// The default options of requests, as transformers reads the file: greedy unless the file sets `do_sample`.
    pub fn sampling_defaults(&self) -> SamplingOptions {
        let samples = self.do_sample == Some(true);
        let temperature = if samples { self.sampling.temperature.unwrap_or(1.0) } else { 0.0 };
        SamplingOptions { temperature: Some(temperature), ..self.sampling }
    }
}

pub(super) fn union<const N: usize>(ids: [Vec<u32>; N]) -> Vec<u32> {
    let mut ids = ids.concat();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The token ids of a config.
pub(super) struct TokenIds {
    /// Every id that ends an answer.
    pub eos: Vec<u32>,
    pub bos: Option<u32>,
}

impl TokenIds {
    /// The ids in any of `levels`; of two beginnings, that of the first level. `default` has those of a config without
    /// any. Messages name the first level's fields.
    pub fn read(levels: &[&Level], default: TokenIds, vocab_size: usize) -> Result<TokenIds, ConfigError> {
        let mut found = TokenIds { eos: Vec::new(), bos: None };
        for level in levels {
            found.eos.extend(level.ids("eos_token_id")?);
            found.bos = found.bos.or(level.ids("bos_token_id")?.first().copied());
        }
        let eos = if found.eos.is_empty() { default.eos } else { found.eos };
        let ids = TokenIds { eos: union([eos]), bos: found.bos.or(default.bos) };
        let named = levels[0];
        named.check_ids("eos_token_id", &ids.eos, vocab_size)?;
        named.check_ids("bos_token_id", ids.bos.as_slice(), vocab_size)?;
        Ok(ids)
    }
}

/// The positions that a layer's attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// The last `sliding_window` positions, the token's own included.
    SlidingAttention,
    /// All positions.
    FullAttention,
}

impl LayerType {
    /// The type of a layer with a window, or of one without.
    pub(super) fn of(has_window: bool) -> LayerType {
        if has_window { LayerType::SlidingAttention } else { LayerType::FullAttention }
    }

    /// The name in `layer_types`.
    pub(super) fn name(self) -> &'static str {
        match self {
            LayerType::SlidingAttention => "sliding_attention",
            LayerType::FullAttention => "full_attention",
        }
    }

    /// The list `layer_types`, with an entry for each layer; `None` if it is absent.
    pub(super) fn read_all(text: &Level, layers: usize) -> Result<Option<Vec<LayerType>>, ConfigError> {
        let Some(value) = text.get("layer_types") else { return Ok(None) };
        let Value::Array(types) = value else { return Err(text.mismatch("layer_types", value, "a list")) };
        if types.len() != layers {
            let problem = format!("has {} entries; expected num_hidden_layers ({layers})", types.len());
            return Err(text.error("layer_types", problem));
        }
        let kinds = [LayerType::SlidingAttention, LayerType::FullAttention];
        let read = |(i, value): (usize, &Value)| {
            kinds.into_iter().find(|kind| value.as_str() == Some(kind.name())).ok_or_else(|| {
                let [sliding, full] = kinds.map(LayerType::name);
                let problem = format!("is {}; expected {sliding:?} or {full:?}", show(value));
                text.error(&format!("layer_types[{i}]"), problem)
            })
        };
        types.iter().enumerate().map(read).collect::<Result<_, _>>().map(Some)
    }

    /// For each of the layers with these types, the layer whose keys and values it uses in place of its own. The last
    /// `num_kv_shared_layers` layers, by default `shared`, use those of the last layer of their type before them.
    pub(super) fn kv_sources(
        text: &Level,
        types: &[LayerType],
        shared: usize,
    ) -> Result<Vec<Option<usize>>, ConfigError> {
        const NAME: &str = "num_kv_shared_layers";
        let shared = text.optional_size(NAME, shared, 0..=MAX_LAYERS)?;
        let Some(own) = types.len().checked_sub(shared) else {
            return Err(text.error(NAME, format!("is {shared}; expected at most {} layers", types.len())));
        };
        let source = |(i, kind): (usize, &LayerType)| match i < own {
            true => Ok(None),
            false => match types[..own].iter().rposition(|other| other == kind) {
                Some(source) => Ok(Some(source)),
                None => {
                    let problem = format!(
                        "is {shared}; expected a layer of the type {} before these, for layer {i}",
                        kind.name()
                    );
                    Err(text.error(NAME, problem))
                }
            },
        };
        types.iter().enumerate().map(source).collect()
    }
}

/// A value as a message may quote it.
pub(super) fn show(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(_) => "a list".into(),
        other => short(&other.to_string()),
    }
}

/// One object of a config file. An optional field that is null counts as absent.
#[derive(Clone)]
pub(super) struct Level<'a> {
    pub file: &'a str,
    /// Prefix of a field's name in messages.
    pub prefix: String,
    pub object: &'a Map<String, Value>,
}

impl<'a> Level<'a> {
    /// The object that a file contains; messages call the file `file`.
    pub fn root(config: &'a Value, file: &'a str) -> Result<Self, ConfigError> {
        let object = config.as_object().ok_or_else(|| ConfigError::File {
            file: short(file),
            problem: format!("is {}; expected a JSON object", show(config)),
        })?;
        Ok(Level { file, prefix: String::new(), object })
    }

    /// The object that describes the language model: that in `text_config`, whose `model_type` is one of `text`, or the
    /// root. A root with a `model_type` of `wrapped` has the object.
    pub fn language_model(&self, wrapped: &[&str], text: &[&str]) -> Result<Level<'a>, ConfigError> {
        let is_wrapped = self.text("model_type")?.is_some_and(|own| wrapped.contains(&own));
        match self.get("text_config") {
            Some(Value::Object(object)) => {
                let level = Level { file: self.file, prefix: "text_config.".into(), object };
                match level.text("model_type")? {
                    Some(other) if !text.contains(&other) => {
                        let names: Vec<String> = text.iter().map(|name| format!("{name:?}")).collect();
                        let expected = names.join(" or ");
                        let problem = format!("{:?} is not supported; expected {expected}", short(other));
                        Err(level.error("model_type", problem))
                    }
                    _ => Ok(level),
                }
            }
            Some(other) => Err(self.mismatch("text_config", other, "an object")),
            None if is_wrapped && self.get("hidden_size").is_none() => {
                Err(self.error("text_config", "is missing; expected the language model's fields there"))
            }
            None => Ok(self.clone()),
        }
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|v| !v.is_null())
    }

    pub fn error(&self, name: &str, problem: impl Into<String>) -> ConfigError {
        let field = format!("{}{name}", self.prefix);
        ConfigError::Field { file: short(self.file), field, problem: problem.into() }
    }

    pub fn mismatch(&self, name: &str, value: &Value, expected: impl fmt::Display) -> ConfigError {
        self.error(name, format!("is {}; expected {expected}", show(value)))
    }

    /// A size. An absent field has the default; null is refused.
    pub fn size(&self, name: &str, default: usize, range: RangeInclusive<u64>) -> Result<usize, ConfigError> {
        match self.object.get(name) {
            Some(value) => Ok(self.whole(name, value, range)? as usize),
            None => Ok(default),
        }
    }

    /// Like [`Level::size`], where null counts as absent.
    pub fn optional_size(
        &self,
        name: &str,
        default: usize,
        range: RangeInclusive<u64>,
    ) -> Result<usize, ConfigError> {
        match self.get(name) {
            Some(value) => Ok(self.whole(name, value, range)? as usize),
            None => Ok(default),
        }
    }

    /// Refuses a flag with another value than `wanted`.
    pub fn check_flag(&self, name: &str, wanted: bool) -> Result<(), ConfigError> {
        match self.flag(name)? {
            Some(flag) if flag != wanted => {
                Err(self.error(name, format!("is {flag}; only checkpoints with {wanted} can be computed")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses another text than `wanted`.
    pub fn check_text(&self, name: &str, wanted: &str) -> Result<(), ConfigError> {
        match self.text(name)? {
            Some(text) if text != wanted => {
                Err(self.error(name, format!("{:?} is not supported; expected {wanted:?}", short(text))))
            }
            _ => Ok(()),
        }
    }

    pub fn number(&self, name: &str, default: f64, range: RangeInclusive<f64>) -> Result<f64, ConfigError> {
        match self.object.get(name) {
            Some(value) => self.number_of(name, value, range),
            None => Ok(default),
        }
    }

    pub fn whole(&self, name: &str, value: &Value, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        // Some tools write whole numbers as 256.0.
        let whole = value
            .as_u64()
            .or_else(|| value.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0).map(|f| f as u64));
        whole.filter(|n| range.contains(n)).ok_or_else(|| {
            self.mismatch(
                name,
                value,
                format_args!("a whole number from {} to {}", range.start(), range.end()),
            )
        })
    }

    pub fn number_of(
        &self,
        name: &str,
        value: &Value,
        range: RangeInclusive<f64>,
    ) -> Result<f64, ConfigError> {
        value.as_f64().filter(|n| range.contains(n)).ok_or_else(|| {
            self.mismatch(name, value, format_args!("a number from {} to {}", range.start(), range.end()))
        })
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.mismatch(name, other, "a string")),
        }
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.mismatch(name, other, "true or false")),
        }
    }

    pub fn object(&self, name: &str) -> Result<Option<Level<'a>>, ConfigError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(object)) => {
                Ok(Some(Level { file: self.file, prefix: format!("{}{name}.", self.prefix), object }))
            }
            Some(other) => Err(self.mismatch(name, other, "an object")),
        }
    }

    /// One id, or a list of ids; empty if absent.
    pub fn ids(&self, name: &str) -> Result<Vec<u32>, ConfigError> {
        let one = |value| Ok(self.whole(name, value, 0..=u32::MAX.into())? as u32);
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    pub fn check_ids(&self, name: &str, ids: &[u32], vocab_size: usize) -> Result<(), ConfigError> {
        match ids.iter().find(|&&id| id as usize >= vocab_size) {
            Some(id) => {
                Err(self.error(name, format!("is {id}; expected an id below vocab_size ({vocab_size})")))
            }
            None => Ok(()),
        }
    }
}
