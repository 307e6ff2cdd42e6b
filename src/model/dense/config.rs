//! Reads `config.json`, in the names of transformers 4 and of transformers 5.
//!
//! Refuses by name what would change the result and is not supported: biases of other matrices, other activations, RoPE
//! scalings that are not computed, windows in some layers only.

use serde_json::Value;

use crate::kernels::HiddenAct;
use crate::model::config::{
    ConfigError, LayerType, Level, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB,
    TokenIds,
};
use crate::model::rope::{self, RopeSpec};
use crate::model::spec::{Arch, AttentionHeads, FeedForward, LayerSpec, Mixture, ModelSpec, NormWeight};
use crate::model::tensors::{Layer, ModelTensors, Names, Sizes};

/// What distinguishes a class of models from the others.
pub(in crate::model) struct Dense {
    pub names: Layer<Names>,
    pub defaults: Defaults,
    /// The window of every layer, from the config.
    pub window: fn(&Level) -> Result<Option<usize>, ConfigError>,
    /// The experts, and what each layer has after attention, from the config, the hidden size and the number of layers;
    /// `None` = dense layers.
    pub mixture: Option<ReadMixture>,
}

pub(in crate::model) type ReadMixture =
    fn(&Level, usize, usize) -> Result<(Mixture, Vec<FeedForward>), ConfigError>;

/// The values of the published class for fields that a config omits.
pub(in crate::model) struct Defaults {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// `None` = as many as query heads.
    pub num_key_value_heads: Option<usize>,
    /// `None` = the part of the hidden size that each query head has.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
}

/// No layer has a window. Refuses a config that sets one, unless it is not in use.
pub(in crate::model) fn full_attention(config: &Level) -> Result<Option<usize>, ConfigError> {
    match config.flag("use_sliding_window")? {
        Some(true) => {
            Err(config
                .error("use_sliding_window", "is true; only checkpoints without windows can be computed"))
        }
        _ => Ok(None),
    }
}

/// Reads a `config.json`, which messages call `file_name`.
pub(in crate::model) fn read(
    arch: &'static Arch,
    dense: &Dense,
    config: &Value,
    file_name: &str,
) -> Result<ModelSpec, ConfigError> {
    let level = Level::root(config, file_name)?;
    let Dense { names, defaults, window, mixture } = dense;
    refuse_unsupported(&level)?;
    let vocab_size = level.size("vocab_size", defaults.vocab_size, 1..=MAX_VOCAB)?;
    let hidden_size = level.size("hidden_size", defaults.hidden_size, 1..=MAX_HIDDEN)?;
    let num_hidden_layers = level.size("num_hidden_layers", defaults.num_hidden_layers, 1..=MAX_LAYERS)?;
    let heads = AttentionHeads::read(
        &level,
        defaults.num_attention_heads,
        |heads| defaults.num_key_value_heads.unwrap_or(heads),
        |heads| defaults.head_dim.unwrap_or(hidden_size / heads),
    )?;
    let context =
        level.size("max_position_embeddings", defaults.max_position_embeddings, 1..=MAX_POSITIONS)?;
    let (theta, scaling) = rope::read(&level, 1e4, heads.head_dim, context)?;
    let window = window(&level)?;
    check_layer_types(&level, num_hidden_layers, window.is_some())?;
    let default = TokenIds {
        eos: defaults.eos_token_id.into_iter().filter(|id| (*id as usize) < vocab_size).collect(),
        bos: defaults.bos_token_id.filter(|id| (*id as usize) < vocab_size),
    };
    let TokenIds { eos, bos } = TokenIds::read(&[&level], default, vocab_size)?;
    let (mixture, of_layers) = match mixture {
        Some(read) => {
            let (mixture, of_layers) = read(&level, hidden_size, num_hidden_layers)?;
            (Some(mixture), of_layers)
        }
        None => (None, vec![FeedForward::Dense; num_hidden_layers]),
    };
    let intermediate_size =
        level.size("intermediate_size", defaults.intermediate_size, 1..=MAX_INTERMEDIATE)?;
    let sizes = Sizes {
        vocab_size,
        hidden_size,
        tie_word_embeddings: level.flag("tie_word_embeddings")?.unwrap_or(false),
        experts: mixture.map_or((0, 0), |mixture| (mixture.experts.count, mixture.intermediate_size)),
        per_layer: None,
        laurel_rank: None,
    };
    let layer = |feed_forward| LayerSpec {
        window,
        rope: 0,
        heads,
        has_values_of_keys: false,
        kv_source: None,
        intermediate_size,
        gate_cutoff: None,
        feed_forward,
    };
    let layers: Vec<_> = of_layers.into_iter().map(layer).collect();
    Ok(ModelSpec {
        arch,
        vocab_size,
        hidden_size,
        intermediate_size,
        per_layer: None,
        streams: None,
        unused_tensors: Vec::new(),
        vision: Ok(None),
        mixture,
        score_scale: (heads.head_dim as f64).powf(-0.5),
        has_value_norm: false,
        hidden_act: HiddenAct::Silu,
        norm_eps: level.number("rms_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
        norm_weight: NormWeight::AsStored,
        embed_scale: 1.0,
        final_logit_softcap: None,
        max_position_embeddings: scaling.positions(context),
        ropes: vec![RopeSpec { name: "all layers", theta, scaling }],
        tensors: ModelTensors::of(names, &sizes, layers.iter().map(LayerSpec::sizes)),
        layers,
        suppress_tokens: Vec::new(),
        eos_token_ids: eos,
        bos_token_id: bos,
    })
}

/// Checks the list that transformers 5 writes. All layers of these models are of one type.
fn check_layer_types(level: &Level, layers: usize, has_window: bool) -> Result<(), ConfigError> {
    let expected = LayerType::of(has_window);
    let types = LayerType::read_all(level, layers)?.unwrap_or_default();
    match types.iter().position(|kind| *kind != expected) {
        None => Ok(()),
        Some(i) => {
            let problem = format!("is {:?}; expected {:?}", types[i].name(), expected.name());
            Err(level.error(&format!("layer_types[{i}]"), problem))
        }
    }
}

/// Refuses fields that would change the result and are not supported.
fn refuse_unsupported(level: &Level) -> Result<(), ConfigError> {
    for name in ["attention_bias", "mlp_bias", "use_bidirectional_attention"] {
        level.check_flag(name, false)?;
    }
    level.check_text("hidden_act", "silu")
}
