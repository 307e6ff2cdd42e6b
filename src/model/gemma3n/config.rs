//! The `config.json` of a Gemma 3n.
//!
//! Reads the multimodal wrapper (`text_config`) and the text-only layout. The defaults are those of transformers'
//! `Gemma3nTextConfig`.
//!
//! Refuses by name what would change the result and is not supported: other numbers of streams, biases, untied heads.

use serde_json::Value;

use super::tensors;
use crate::kernels::{HiddenAct, STREAMS};
use crate::model::config::{
    ConfigError, LayerType, Level, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB,
    TokenIds,
};
use crate::model::gemma3::{FULL, Rope, SLIDING};
use crate::model::spec::{
    Arch, AttentionHeads, FeedForward, LayerSpec, ModelSpec, NormWeight, PerLayerInputs, ResidualStreams,
};
use crate::model::tensors::{ModelTensors, Sizes, unused_tensors};

/// In configs without `layer_types`, every fifth layer sees all positions.
const PERIOD: usize = 5;
/// In configs without `activation_sparsity_pattern`, so many layers have this sparsity, if there are more layers.
const SPARSE_LAYERS: usize = 10;
const SPARSITY: f64 = 0.95;

/// Reads a `config.json` of `arch`, which messages call `file_name`.
pub(super) fn read(arch: &'static Arch, config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    let root = Level::root(config, file_name)?;
    let text = root.language_model(&["gemma3n"], &["gemma3n_text"])?;
    for level in [&root, &text] {
        refuse_unsupported(level)?;
    }

    let vocab_size = text.size("vocab_size", 262_400, 1..=MAX_VOCAB)?;
    let hidden_size = text.size("hidden_size", 2048, 1..=MAX_HIDDEN)?;
    let num_hidden_layers = text.size("num_hidden_layers", 35, 1..=MAX_LAYERS)?;
    let window = text.size("sliding_window", 512, 1..=MAX_POSITIONS)?;
    let heads = AttentionHeads::read(&text, 8, |_| 2, |_| 256)?;
    let types = LayerType::read_all(&text, num_hidden_layers)?.unwrap_or_else(|| {
        let kind = |layer: usize| LayerType::of(!layer.is_multiple_of(PERIOD));
        (1..=num_hidden_layers).map(kind).collect()
    });
    let sources = LayerType::kv_sources(&text, &types, 15)?;
    let widths = intermediate_sizes(&text, num_hidden_layers)?;
    let cutoffs = gate_cutoffs(&text, num_hidden_layers)?;
    let layer = |(i, kind): (usize, &LayerType)| {
        let (window, rope) = match kind {
            LayerType::SlidingAttention => (Some(window), SLIDING),
            LayerType::FullAttention => (None, FULL),
        };
        LayerSpec {
            window,
            rope,
            heads,
            has_values_of_keys: false,
            kv_source: sources[i],
            intermediate_size: widths[i],
            gate_cutoff: cutoffs[i],
            feed_forward: FeedForward::Dense,
        }
    };
    let layers: Vec<_> = types.iter().enumerate().map(layer).collect();

    let default = TokenIds { eos: vec![1], bos: Some(2) };
    let TokenIds { eos, bos } = TokenIds::read(&[&text, &root], default, vocab_size)?;
    let width = text.size("hidden_size_per_layer_input", 256, 1..=MAX_HIDDEN)?;
    if !width.is_multiple_of(4) {
        let problem = format!("is {width}; expected a multiple of 4");
        return Err(text.error("hidden_size_per_layer_input", problem));
    }
    let laurel_rank = text.size("laurel_rank", 64, 1..=MAX_HIDDEN)?;
    let sizes = Sizes {
        vocab_size,
        hidden_size,
        tie_word_embeddings: true,
        experts: (0, 0),
        per_layer: Some((width, text.size("vocab_size_per_layer_input", 262_144, 1..=MAX_VOCAB)?)),
        laurel_rank: Some(laurel_rank),
    };
    let has_tower = root.object("vision_config")?.is_some();
    let final_logit_softcapping = text.number("final_logit_softcapping", 30.0, 1e-3..=1e6)?;
    Ok(ModelSpec {
        arch,
        vocab_size,
        hidden_size,
        intermediate_size: widths.iter().copied().max().expect("a layer at least"),
        per_layer: Some(PerLayerInputs {
            width,
            embed_scale: (width as f64).sqrt() as f32,
            projection_scale: (hidden_size as f64).powf(-0.5) as f32,
            sum_scale: std::f32::consts::FRAC_1_SQRT_2,
        }),
        streams: Some(ResidualStreams { laurel_rank }),
        unused_tensors: unused_tensors(&tensors::NAMES, layers.iter().map(LayerSpec::sizes)),
        vision: match has_tower {
            true => Err("images cannot be computed by models with per-layer embeddings".into()),
            false => Ok(None),
        },
        mixture: None,
        score_scale: 1.0,
        has_value_norm: true,
        hidden_act: HiddenAct::GeluTanh,
        norm_eps: text.number("rms_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
        norm_weight: NormWeight::AsStored,
        embed_scale: (hidden_size as f64).sqrt() as f32,
        final_logit_softcap: Some(final_logit_softcapping as f32),
        max_position_embeddings: text.size("max_position_embeddings", 32_768, 1..=MAX_POSITIONS)?,
        tensors: ModelTensors::of(&tensors::NAMES, &sizes, layers.iter().map(LayerSpec::sizes)),
        layers,
        ropes: Rope::read(&text)?.tables(),
        eos_token_ids: eos,
        suppress_tokens: Vec::new(),
        bos_token_id: bos,
    })
}

/// The width of each layer's network: one for all, or a list.
fn intermediate_sizes(text: &Level, layers: usize) -> Result<Vec<usize>, ConfigError> {
    const NAME: &str = "intermediate_size";
    let Some(list) = list(text, NAME, layers)? else {
        return Ok(vec![text.size(NAME, 16_384, 1..=MAX_INTERMEDIATE)?; layers]);
    };
    list.iter().map(|width| Ok(text.whole(NAME, width, 1..=MAX_INTERMEDIATE)? as usize)).collect()
}

/// How many standard deviations the elements of each layer's gate must exceed their mean by, so that the share that
/// `activation_sparsity_pattern` has for the layer becomes 0 if they are normally distributed.
fn gate_cutoffs(text: &Level, layers: usize) -> Result<Vec<Option<f32>>, ConfigError> {
    const NAME: &str = "activation_sparsity_pattern";
    let Some(list) = list(text, NAME, layers)? else {
        if let Some(other) = text.get(NAME) {
            return Err(text.mismatch(NAME, other, "a list"));
        }
        let sparse = if layers > SPARSE_LAYERS { SPARSE_LAYERS } else { 0 };
        return Ok((0..layers).map(|layer| (layer < sparse).then(|| cutoff(SPARSITY))).collect());
    };
    let of_layer = |share: &Value| {
        let share = text.number_of(NAME, share, 0.0..=0.999_999)?;
        Ok((share > 0.0).then(|| cutoff(share)))
    };
    list.iter().map(of_layer).collect()
}

/// The probability that a standard normal variable is below a number.
pub(super) fn share_below(x: f64) -> f64 {
    0.5 * libm::erfc(-x / std::f64::consts::SQRT_2)
}

/// The number that a standard normal variable is below with this probability.
fn cutoff(probability: f64) -> f32 {
    let (mut low, mut high) = (-40.0, 40.0);
    // Each step halves the interval, and f64 has 53 bits.
    for _ in 0..64 {
        let middle = (low + high) / 2.0;
        if share_below(middle) < probability { low = middle } else { high = middle }
    }
    high as f32
}

/// A field that is a list with an element for each layer; `None` if it is absent or no list.
fn list<'a>(text: &Level<'a>, name: &str, layers: usize) -> Result<Option<&'a [Value]>, ConfigError> {
    match text.get(name) {
        Some(Value::Array(list)) if list.len() != layers => {
            let problem = format!("has {} entries; expected num_hidden_layers ({layers})", list.len());
            Err(text.error(name, problem))
        }
        Some(Value::Array(list)) => Ok(Some(list)),
        _ => Ok(None),
    }
}

/// Refuses fields that would change the result and are not supported.
fn refuse_unsupported(level: &Level) -> Result<(), ConfigError> {
    for (name, wanted) in
        [("attention_bias", false), ("tie_word_embeddings", true), ("altup_correct_scale", true)]
    {
        level.check_flag(name, wanted)?;
    }
    for (name, wanted) in [("altup_num_inputs", STREAMS), ("altup_active_idx", 0)] {
        let found = level.optional_size(name, wanted, 0..=u64::MAX)?;
        if found != wanted {
            return Err(level.error(name, format!("is {found}; expected {wanted}")));
        }
    }
    level.check_text("hidden_activation", "gelu_pytorch_tanh")
}

#[cfg(test)]
mod tests {
    use super::cutoff;

    #[test]
    fn a_cutoff_is_the_quantile_of_the_normal_distribution() {
        for (probability, expected) in
            [(0.95, 1.644_853_6), (0.5, 0.0), (0.975, 1.959_964), (0.001, -3.090_232)]
        {
            assert!((cutoff(probability) - expected).abs() < 1e-6, "{probability}: {}", cutoff(probability));
        }
    }
}
