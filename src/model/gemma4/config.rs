//! The `config.json` of a Gemma 4.
//!
//! Reads the multimodal wrappers (`text_config`) and the text-only layout, and both ways to say what layers that see all
//! positions have of their own: `global_head_dim` and `num_global_key_value_heads` of the published files, and the
//! `per_layer_config` that transformers writes. The defaults are those of transformers' `Gemma4TextConfig` and
//! `Gemma4UnifiedTextConfig`.
//!
//! Refuses by name what would change the result and is not supported: biases, untied heads.

use serde_json::Value;

use super::tensors;
use crate::checkpoint::short;
use crate::kernels::{Experts, HiddenAct};
use crate::model::config::{
    ConfigError, LayerType, Level, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS,
    MAX_POSITIONS, MAX_VOCAB, TokenIds,
};
use crate::model::rope::{self, RopeScaling, RopeSpec, THETAS};
use crate::model::spec::{
    Arch, AttentionHeads, FeedForward, LayerSpec, Mixture, ModelSpec, NormWeight, PerLayerInputs,
};
use crate::model::tensors::{ModelTensors, Sizes, unused_tensors};
use crate::model::vision::{ImageAttention, VisionSpec};

const WRAPPED: [&str; 2] = ["gemma4", "gemma4_unified"];
const TEXT: [&str; 2] = ["gemma4_text", "gemma4_unified_text"];
const UNIFIED: [&str; 2] = ["gemma4_unified", "gemma4_unified_text"];
/// In configs without `layer_types`, every sixth layer sees all positions, and so does the last one.
const PERIOD: usize = 6;

/// Indices of the RoPE tables.
const SLIDING: usize = 0;
const FULL: usize = 1;

/// Reads a `config.json` of `arch`, which messages call `file_name`.
pub(super) fn read(arch: &'static Arch, config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    let root = Level::root(config, file_name)?;
    let text = root.language_model(&WRAPPED, &TEXT)?;
    let model_type = text.text("model_type")?.or(root.text("model_type")?);
    let is_unified = model_type.is_some_and(|name| UNIFIED.contains(&name));
    for level in [&root, &text] {
        refuse_unsupported(level)?;
    }

    let vocab_size = text.size("vocab_size", 262_144, 1..=MAX_VOCAB)?;
    let num_hidden_layers = text.size("num_hidden_layers", 30, 1..=MAX_LAYERS)?;
    let default_context = if is_unified { 262_144 } else { 131_072 };
    let context = text.size("max_position_embeddings", default_context, 1..=MAX_POSITIONS)?;
    let window = text.size("sliding_window", if is_unified { 1024 } else { 512 }, 1..=MAX_POSITIONS)?;
    let heads = LayerHeads::read(&text)?;
    let types = LayerType::read_all(&text, num_hidden_layers)?
        .unwrap_or_else(|| default_layer_types(num_hidden_layers));
    let has_values_of_keys = text.flag("attention_k_eq_v")?.unwrap_or(false);
    let hidden_size = text.size("hidden_size", 2304, 1..=MAX_HIDDEN)?;
    let mixture = mixture(&text, hidden_size)?;
    let feed_forward = if mixture.is_some() { FeedForward::DenseAndExperts } else { FeedForward::Dense };
    let intermediate_size = text.size("intermediate_size", 9216, 1..=MAX_INTERMEDIATE)?;
    let sources = LayerType::kv_sources(&text, &types, 0)?;
    let is_double_wide = text.flag("use_double_wide_mlp")?.unwrap_or(false);
    let layer = |(i, kind): (usize, &LayerType)| -> Result<LayerSpec, ConfigError> {
        let heads = heads.of_layer(i, *kind)?;
        let (window, rope, has_values_of_keys) = match kind {
            LayerType::SlidingAttention => (Some(window), SLIDING, false),
            LayerType::FullAttention => (None, FULL, has_values_of_keys),
        };
        let is_wide = is_double_wide && sources[i].is_some();
        Ok(LayerSpec {
            window,
            rope,
            heads,
            has_values_of_keys,
            kv_source: sources[i],
            intermediate_size: if is_wide { 2 * intermediate_size } else { intermediate_size },
            gate_cutoff: None,
            feed_forward,
        })
    };
    let layers = types.iter().enumerate().map(layer).collect::<Result<Vec<_>, _>>()?;
    let ropes = ropes(&text, &layers, context)?;

    let default = TokenIds { eos: vec![1], bos: Some(2) };
    let TokenIds { eos, bos } = TokenIds::read(&[&text, &root], default, vocab_size)?;
    let suppress_tokens = text.ids("suppress_tokens")?;
    text.check_ids("suppress_tokens", &suppress_tokens, vocab_size)?;
    let per_layer_width = per_layer_width(&text, is_unified, vocab_size)?;
    let sizes = Sizes {
        vocab_size,
        hidden_size,
        tie_word_embeddings: true,
        experts: mixture.map_or((0, 0), |mixture| (mixture.experts.count, mixture.intermediate_size)),
        per_layer: per_layer_width.map(|width| (width, vocab_size)),
        laurel_rank: None,
    };
    // A wrong tower is no reason to refuse texts.
    let vision = vision(&root, &text, is_unified, hidden_size).map_err(|error| error.to_string());
    let vision = match vision {
        Ok(Some(_)) if per_layer_width.is_some() => {
            Err("images cannot be computed by models with per-layer embeddings".into())
        }
        other => other,
    };
    let names = match per_layer_width {
        Some(_) => tensors::PER_LAYER,
        None if mixture.is_some() => tensors::WITH_EXPERTS,
        None => tensors::NAMES,
    };
    let per_layer = per_layer_width.map(|width| PerLayerInputs {
        width,
        embed_scale: (width as f64).sqrt() as f32,
        projection_scale: (hidden_size as f64).powf(-0.5) as f32,
        sum_scale: std::f32::consts::FRAC_1_SQRT_2,
    });
    let final_logit_softcap = match text.get("final_logit_softcapping") {
        Some(cap) => Some(text.number_of("final_logit_softcapping", cap, 1e-3..=1e6)? as f32),
        None => None,
    };
    Ok(ModelSpec {
        arch,
        vocab_size,
        hidden_size: sizes.hidden_size,
        intermediate_size: layers
            .iter()
            .map(|layer| layer.intermediate_size)
            .max()
            .unwrap_or(intermediate_size),
        per_layer,
        streams: None,
        unused_tensors: unused_tensors(&names, layers.iter().map(LayerSpec::sizes)),
        vision,
        mixture,
        score_scale: 1.0,
        has_value_norm: true,
        hidden_act: HiddenAct::GeluTanh,
        norm_eps: text.number("rms_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
        norm_weight: NormWeight::AsStored,
        embed_scale: (sizes.hidden_size as f64).sqrt() as f32,
        final_logit_softcap,
        max_position_embeddings: context,
        tensors: ModelTensors::of(&names, &sizes, layers.iter().map(LayerSpec::sizes)),
        layers,
        ropes,
        eos_token_ids: eos,
        suppress_tokens,
        bos_token_id: bos,
    })
}

/// The tower, if there is one. The config of a unified model has sizes of patches alone.
fn vision(
    root: &Level,
    text: &Level,
    is_unified: bool,
    hidden_size: usize,
) -> Result<Option<VisionSpec>, ConfigError> {
    let Some(tower) = root.object("vision_config")? else { return Ok(None) };
    // The published class of unified models has "vision" by default, and the other one null.
    let is_seen_whole = is_unified || text.text("use_bidirectional_attention")?.is_some();
    let attention = if is_seen_whole { ImageAttention::WithWindow } else { ImageAttention::None };
    let read = if is_unified { VisionSpec::read_linear } else { VisionSpec::read_axial };
    read(&tower, hidden_size, attention).map(Some)
}

/// The experts of every layer, in a config that has some. The router's input is the residual stream, normed with factors
/// of its own. The weights of a token's experts add up to 1 before the factors of the experts.
fn mixture(text: &Level, hidden_size: usize) -> Result<Option<Mixture>, ConfigError> {
    if text.flag("enable_moe_block")? != Some(true) {
        return Ok(None);
    }
    const NAMES: [&str; 3] = ["num_experts", "top_k_experts", "moe_intermediate_size"];
    let size = |name, most| match text.get(name) {
        Some(value) => Ok(text.whole(name, value, 1..=most)? as usize),
        None => Err(text.error(name, "is missing; expected a number, because enable_moe_block is true")),
    };
    let [count, per_token] = [size(NAMES[0], MAX_HIDDEN)?, size(NAMES[1], MAX_HIDDEN)?];
    let mixture = Mixture {
        experts: Experts { count, per_token, renormalizes: true },
        intermediate_size: size(NAMES[2], MAX_INTERMEDIATE)?,
        router_factor: (hidden_size as f64).powf(-0.5) as f32,
    };
    mixture.check(text, hidden_size, NAMES).map(Some)
}

fn default_layer_types(layers: usize) -> Vec<LayerType> {
    let kind = |layer: usize| match layer.is_multiple_of(PERIOD) || layer == layers {
        true => LayerType::FullAttention,
        false => LayerType::SlidingAttention,
    };
    (1..=layers).map(kind).collect()
}

/// The heads of the layers.
struct LayerHeads<'a> {
    text: Level<'a>,
    sliding: AttentionHeads,
    full: AttentionHeads,
    /// Heads of single layers, by the layer's number.
    per_layer: Option<Level<'a>>,
}

impl<'a> LayerHeads<'a> {
    fn read(text: &Level<'a>) -> Result<Self, ConfigError> {
        let sliding = AttentionHeads::read(text, 8, |_| 4, |_| 256)?;
        let per_layer = text.object("per_layer_config")?;
        // A config with the heads of single layers has no heads of all full layers.
        let full_dim = if per_layer.is_some() { sliding.head_dim } else { 512 };
        let head_dim = text.optional_size("global_head_dim", full_dim, 1..=MAX_HEAD_DIM)?;
        let mut kv_heads = sliding.num_key_value_heads;
        if text.flag("attention_k_eq_v")? == Some(true) {
            kv_heads = text.optional_size("num_global_key_value_heads", kv_heads, 1..=MAX_HEADS)?;
        }
        let full = sliding.with(text, kv_heads, ("global_head_dim", head_dim))?;
        Ok(LayerHeads { text: text.clone(), sliding, full, per_layer })
    }

    fn of_layer(&self, layer: usize, kind: LayerType) -> Result<AttentionHeads, ConfigError> {
        let heads = match kind {
            LayerType::SlidingAttention => self.sliding,
            LayerType::FullAttention => self.full,
        };
        let own = match &self.per_layer {
            Some(all) => all.object(&layer.to_string())?,
            None => None,
        };
        let Some(own) = own else { return Ok(heads) };
        let head_dim = own.optional_size("head_dim", heads.head_dim, 1..=MAX_HEAD_DIM)?;
        let kv_heads = own.optional_size("num_key_value_heads", heads.num_key_value_heads, 1..=MAX_HEADS)?;
        let name = format!("per_layer_config.{layer}.head_dim");
        heads.with(&self.text, kv_heads, (&name, head_dim))
    }
}

/// The tables of layers with a window and of those without.
fn ropes(text: &Level, layers: &[LayerSpec], context: usize) -> Result<Vec<RopeSpec>, ConfigError> {
    let by_type = text.object("rope_parameters")?;
    let table = |index, name, field: &str, theta, scaling| -> Result<RopeSpec, ConfigError> {
        let head_dim = layers.iter().find(|layer| layer.rope == index).map(|layer| layer.heads.head_dim);
        let own = match &by_type {
            Some(by_type) => by_type.object(field)?,
            None => None,
        };
        let (Some(own), Some(head_dim)) = (own, head_dim) else {
            return Ok(RopeSpec { name, theta, scaling });
        };
        let theta = own.number("rope_theta", theta, THETAS)?;
        Ok(RopeSpec { name, theta, scaling: rope::scaling(&own, head_dim, context)? })
    };
    let proportional = RopeScaling::Proportional { share: 0.25, factor: 1.0 };
    Ok(vec![
        table(SLIDING, "sliding layers", "sliding_attention", 1e4, RopeScaling::Unscaled)?,
        table(FULL, "full layers", "full_attention", 1e6, proportional)?,
    ])
}

/// The width of the per-layer embeddings in a layer. The published class has them by default, and that of unified models
/// has none.
fn per_layer_width(text: &Level, is_unified: bool, vocab_size: usize) -> Result<Option<usize>, ConfigError> {
    let default = if is_unified { 0 } else { 256 };
    let width = text.optional_size("hidden_size_per_layer_input", default, 0..=MAX_HIDDEN)?;
    if width == 0 {
        return Ok(None);
    }
    if !width.is_multiple_of(4) {
        let problem = format!("is {width}; expected a multiple of 4");
        return Err(text.error("hidden_size_per_layer_input", problem));
    }
    let rows = text.optional_size("vocab_size_per_layer_input", 262_144, 1..=MAX_VOCAB)?;
    if rows != vocab_size {
        let problem = format!("is {rows}; expected vocab_size ({vocab_size})");
        return Err(text.error("vocab_size_per_layer_input", problem));
    }
    Ok(Some(width))
}

/// Refuses fields that would change the result and are not supported.
fn refuse_unsupported(level: &Level) -> Result<(), ConfigError> {
    for (name, wanted) in [("attention_bias", false), ("tie_word_embeddings", true)] {
        level.check_flag(name, wanted)?;
    }
    // "vision" concerns the tokens of images alone.
    if let Some(Value::String(kind)) = level.get("use_bidirectional_attention")
        && kind != "vision"
    {
        let problem = format!("is {:?}; expected \"vision\" or null", short(kind));
        return Err(level.error("use_bidirectional_attention", problem));
    }
    level.check_text("hidden_activation", "gelu_pytorch_tanh")
}
