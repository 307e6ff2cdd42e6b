//! The `config.json` of a Gemma-3 checkpoint.
//!
//! Reads the multimodal wrapper (`text_config`) and the text-only layout; configs with missing fields (the config of
//! the published 27B lacks ten); and both generations of names: `rope_theta`, `rope_local_base_freq` and
//! `rope_scaling`, and the `rope_parameters` by layer type of transformers 5. The defaults are those of transformers'
//! `Gemma3TextConfig`.
//!
//! Refuses by name what would change the result and is not supported: soft capping, biases, bidirectional attention,
//! untied heads, RoPE scalings other than linear. [`crate::checkpoint`] reads how the weights are quantized
//! (`quantization_config`). Invariant: a model with a valid [`Config`] can be computed.

use serde_json::Value;

use crate::checkpoint::{parse_config, short};
use crate::model::config::{
    ConfigError, LayerType, Level, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB,
    TokenIds,
};
use crate::model::rope::{RopeScaling, RopeSpec, THETAS, rope_type};
use crate::model::spec::AttentionHeads;
use crate::model::vision::VisionSpec;

/// The value that transformers uses for `sliding_window` if a config has none.
const DEFAULT_WINDOW: usize = 4096;
/// The most tokens of an image.
const MAX_IMAGE_TOKENS: u64 = 4096;

/// Hyperparameters of a Gemma-3 language model, by their Hugging Face names.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Number of rows of the embedding; the tokenizer may know fewer ids.
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    /// Number of query heads, a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    /// Dimension of a head, a multiple of 4 from 16 to 512; above 256, a multiple of 8.
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    pub max_position_embeddings: usize,
    /// Attention scores are scaled by the inverse square root of this number, which differs from `head_dim` in the 27B.
    pub query_pre_attn_scalar: f64,
    /// The number of positions that sliding layers see. A model without sliding layers has this value, too.
    pub sliding_window: usize,
    /// The kind of each layer.
    pub layer_types: Vec<LayerType>,
    /// RoPE base of full-attention layers.
    pub rope_theta: f64,
    /// RoPE base of sliding-attention layers.
    pub rope_local_base_freq: f64,
    /// Divisor of the frequencies of full-attention layers; 1 without scaling.
    pub rope_scaling_factor: f64,
    /// Ids that each end an answer; ascending, below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    /// The tower of the models from 4B up, or why it cannot be computed.
    pub vision: Result<Option<VisionSpec>, String>,
    /// Always true: the logits are computed with the embedding.
    pub tie_word_embeddings: bool,
}

impl Config {
    /// Reads a `config.json`; messages call it `file_name`.
    pub fn from_json(bytes: &[u8], file_name: &str) -> Result<Self, ConfigError> {
        Self::from_value(&parse_config(bytes, file_name)?, file_name)
    }

    pub(super) fn from_value(config: &Value, file_name: &str) -> Result<Self, ConfigError> {
        let root = Level::root(config, file_name)?;
        let text = root.language_model(&["gemma3"], &["gemma3_text"])?;
        for level in [&root, &text] {
            refuse_unsupported(level)?;
        }

        let vocab_size = text.size("vocab_size", 262_208, 1..=MAX_VOCAB)?;
        let num_hidden_layers = text.size("num_hidden_layers", 26, 1..=MAX_LAYERS)?;
        let AttentionHeads { num_attention_heads, num_key_value_heads, head_dim } =
            AttentionHeads::read(&text, 8, |_| 4, |_| 256)?;
        let rope = Rope::read(&text)?;

        let default = TokenIds { eos: vec![1], bos: Some(2) };
        let TokenIds { eos: eos_token_ids, bos: bos_token_id } =
            TokenIds::read(&[&text, &root], default, vocab_size)?;
        let layer_types = layer_types(&text, num_hidden_layers)?;
        // A config with only full layers may have `null` here, because no layer has a window.
        let sliding_window = match text.get("sliding_window") {
            None if !layer_types.contains(&LayerType::SlidingAttention) => DEFAULT_WINDOW,
            _ => text.size("sliding_window", DEFAULT_WINDOW, 1..=MAX_POSITIONS)?,
        };

        let hidden_size = text.size("hidden_size", 2304, 1..=MAX_HIDDEN)?;
        // A wrong tower is no reason to refuse texts.
        let vision = vision(&root, hidden_size).map_err(|error| error.to_string());
        Ok(Self {
            vocab_size,
            hidden_size,
            intermediate_size: text.size("intermediate_size", 9216, 1..=MAX_INTERMEDIATE)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: text.number("rms_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
            max_position_embeddings: text.size("max_position_embeddings", 131_072, 1..=MAX_POSITIONS)?,
            query_pre_attn_scalar: text.number("query_pre_attn_scalar", 256.0, 1e-3..=1e6)?,
            sliding_window,
            layer_types,
            rope_theta: rope.theta,
            rope_local_base_freq: rope.local_theta,
            rope_scaling_factor: rope.factor,
            eos_token_ids,
            bos_token_id,
            vision,
            tie_word_embeddings: true,
        })
    }
}

/// The tower, if there is one. `hidden_size` is that of the language model.
fn vision(root: &Level, hidden_size: usize) -> Result<Option<VisionSpec>, ConfigError> {
    let Some(tower) = root.object("vision_config")? else { return Ok(None) };
    let tokens = root.size("mm_tokens_per_image", 256, 1..=MAX_IMAGE_TOKENS)?;
    VisionSpec::read_siglip(&tower, tokens, hidden_size).map(Some)
}

fn layer_types(text: &Level, num_hidden_layers: usize) -> Result<Vec<LayerType>, ConfigError> {
    if let Some(types) = LayerType::read_all(text, num_hidden_layers)? {
        return Ok(types);
    }
    // transformers has written the second name since 4.53, always together with layer_types.
    let names = ["sliding_window_pattern", "_sliding_window_pattern"];
    let mut pattern = None;
    for name in names {
        if let Some(value) = text.get(name) {
            let period = text.whole(name, value, 1..=MAX_LAYERS)? as usize;
            if pattern.is_some_and(|other| other != period) {
                return Err(text.error(name, format!("is {period}, but {} is another number", names[0])));
            }
            pattern = Some(period);
        }
    }
    let pattern = pattern.unwrap_or(6);
    let kind = |i: usize| match (i + 1).is_multiple_of(pattern) {
        true => LayerType::FullAttention,
        false => LayerType::SlidingAttention,
    };
    Ok((0..num_hidden_layers).map(kind).collect())
}

/// The RoPE of layers that see all positions, and the base of layers with a window.
pub(in crate::model) struct Rope {
    pub theta: f64,
    pub local_theta: f64,
    pub factor: f64,
}

impl Rope {
    /// Reads the old fields, or those of transformers 5. If a config has both, they must agree.
    pub fn read(text: &Level) -> Result<Self, ConfigError> {
        let theta = text.number("rope_theta", 1e6, THETAS)?;
        let local_theta = text.number("rope_local_base_freq", 1e4, THETAS)?;
        let factor = match text.object("rope_scaling")? {
            Some(scaling) => Some(scaling_factor(&scaling, true)?),
            None => None,
        };
        let old = Self { theta, local_theta, factor: factor.unwrap_or(1.0) };
        let Some(by_type) = text.object("rope_parameters")? else {
            return Ok(old);
        };
        let of_type = |name: &str| {
            by_type.object(name)?.ok_or_else(|| {
                by_type.error(name, "is missing; expected the rope parameters of that layer type")
            })
        };
        let (full, sliding) = (of_type("full_attention")?, of_type("sliding_attention")?);
        if scaling_factor(&sliding, false)? != 1.0 {
            return Err(
                sliding.error("factor", "scales sliding layers; only full-attention layers may be scaled")
            );
        }
        let new = Self {
            theta: full.number("rope_theta", old.theta, THETAS)?,
            local_theta: sliding.number("rope_theta", old.local_theta, THETAS)?,
            factor: scaling_factor(&full, false)?,
        };
        let contradictions = [
            ("rope_theta", text.get("rope_theta").is_some() && old.theta != new.theta),
            (
                "rope_local_base_freq",
                text.get("rope_local_base_freq").is_some() && old.local_theta != new.local_theta,
            ),
            ("rope_scaling", factor.is_some_and(|factor| factor != new.factor)),
        ];
        match contradictions.iter().find(|(_, contradicts)| *contradicts) {
            Some((name, _)) => {
                Err(text.error(name, "contradicts rope_parameters; expected one of them, or both alike"))
            }
            None => Ok(new),
        }
    }

    /// The tables of layers with a window ([`SLIDING`]) and of those without ([`FULL`]).
    pub fn tables(&self) -> Vec<RopeSpec> {
        let table = |name, theta, factor| {
            let is_scaled = factor != 1.0;
            let scaling = if is_scaled { RopeScaling::Linear { factor } } else { RopeScaling::Unscaled };
            RopeSpec { name, theta, scaling }
        };
        vec![table("sliding layers", self.local_theta, 1.0), table("full layers", self.theta, self.factor)]
    }
}

/// Indices in [`Rope::tables`].
pub(in crate::model) const SLIDING: usize = 0;
pub(in crate::model) const FULL: usize = 1;

/// The factor of one set of rope parameters, 1 for the type "default".
fn scaling_factor(level: &Level, type_required: bool) -> Result<f64, ConfigError> {
    match rope_type(level)? {
        Some("linear") => match level.get("factor") {
            Some(factor) => level.number_of("factor", factor, 1.0..=1e4),
            None => Err(level.error("factor", "is missing; expected a number")),
        },
        Some("default") => Ok(1.0),
        None if !type_required => Ok(1.0),
        None => Err(level.error("rope_type", "is missing; expected \"linear\" or \"default\"")),
        Some(other) => {
            let problem = format!("{:?} is not supported; expected \"linear\" or \"default\"", short(other));
            Err(level.error("rope_type", problem))
        }
    }
}

/// Refuses fields that would change the result and are not supported.
fn refuse_unsupported(level: &Level) -> Result<(), ConfigError> {
    for (name, wanted) in
        [("attention_bias", false), ("use_bidirectional_attention", false), ("tie_word_embeddings", true)]
    {
        level.check_flag(name, wanted)?;
    }
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = level.get(name) {
            return Err(level.mismatch(name, value, "null: Gemma-3 has no soft capping"));
        }
    }
    level.check_text("hidden_activation", "gelu_pytorch_tanh")
}
