//! `config.json` of a Gemma-3 in a GGUF file.
//!
//! No converter writes the values that llama.cpp derives from the architecture, so they are derived here in the same
//! way: the layer pattern and the scale of attention. Only for the 27B (62 layers) does that scale come from the hidden
//! size and the number of heads. Ollama's converter nests the rope keys and omits some others.
//!
//! Refuses keys with values that would change the result and are not supported. The error names the key. The reader of
//! `config.json` checks the rest.

use serde_json::{Value as Json, json};

use super::mmproj;
use super::tensors::NAMES;
use crate::checkpoint::gguf::{self, Geometry, GgufArch, GgufTensors, GgufTokens, HeaderError, Keys};
use crate::checkpoint::short;
use crate::model::config::LayerType;

pub(super) static GGUF: GgufArch = GgufArch {
    name: "gemma3",
    config,
    layer_tensor: |name, what| NAMES.of_gguf(name, what),
    interleaved: &[],
    towers: mmproj::TOWERS,
    tokens: TOKENS,
};

pub(in crate::model) const TOKENS: GgufTokens = GgufTokens {
    bos: Some(2),
    eos: 1,
    pad: 0,
    own_model: None,
    add_space_prefix: false,
    end: &["<eos>", "<end_of_turn>"],
    // Google's QAT files list some of them as normal pieces.
    control: &[
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ],
};

/// Maximum period of the layer types.
const MAX_PERIOD: u64 = 1024;
/// Layers of Gemma-3 27B. llama.cpp recognizes the 27B by this number.
const BLOCKS_27B: u64 = 62;
/// Layers of Gemma-3 1B.
const BLOCKS_1B: u64 = 26;
/// Longest context without RoPE scaling. Models with a longer context divide positions by 8.
const UNSCALED_CONTEXT: u64 = 32_768;

/// Generates `config.json`.
fn config(keys: &Keys, tensors: &GgufTensors) -> Result<Json, HeaderError> {
    let Geometry { blocks, hidden, intermediate, heads, kv_heads, head_dim, context, norm_eps } =
        keys.geometry()?;
    let context = context.unwrap_or(131_072);

    let layer_types = layer_types(keys, blocks)?;
    let window = match keys.whole("attention.sliding_window")? {
        None if layer_types.contains(&LayerType::SlidingAttention.name()) => {
            return Err(keys.missing("attention.sliding_window"));
        }
        window => window,
    };

    let mut config = json!({
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": tensors.vocab_size()?,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": norm_eps,
        "query_pre_attn_scalar": if blocks == BLOCKS_27B { hidden / heads } else { head_dim },
        "sliding_window": window,
        "layer_types": layer_types,
        "rope_theta": keys.number(&["rope.freq_base", "rope.global.freq_base"])?.unwrap_or(1e6),
        "rope_local_base_freq":
            keys.number(&["rope.freq_base_swa", "rope.local.freq_base", "rope.local_freq_base"])?.unwrap_or(1e4),
        "tie_word_embeddings": true,
    });
    if let Some(factor) = rope_factor(keys, context)? {
        config["rope_scaling"] = json!({"rope_type": "linear", "factor": factor});
    }
    for (name, field) in [
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        match keys.number(&[name])? {
            None | Some(0.0) => {}
            // Ollama's converter wrote a soft cap for the 1B, which has no soft capping. Ollama's engine ignores it.
            Some(cap) if name == "final_logit_softcapping" && blocks == BLOCKS_1B => {
                tracing::warn!("{} is {cap} and is ignored: Gemma-3 1B has no soft capping", keys.full(name));
            }
            // The reader of config.json refuses this field.
            Some(cap) => config[field] = json!(cap),
        }
    }
    let special = gguf::special_ids(&GGUF.tokens, keys.metadata)?;
    config["bos_token_id"] = json!(special.bos);
    config["pad_token_id"] = json!(special.pad);
    config["eos_token_id"] = json!(special.eos);
    Ok(config)
}

/// The attention type of each layer. The file has a period, or a list with true for sliding layers. Without both, every
/// sixth layer is a full one.
fn layer_types(keys: &Keys, blocks: u64) -> Result<Vec<&'static str>, HeaderError> {
    const NAME: &str = "attention.sliding_window_pattern";
    let name_of = |slides: bool| LayerType::of(slides).name();
    if let Some(windows) = keys.windows(blocks)? {
        return Ok(windows.into_iter().map(name_of).collect());
    }
    let period = match keys.whole(NAME)? {
        Some(period @ 1..=MAX_PERIOD) => period,
        Some(period) => {
            return Err(keys.error(NAME, format!("is {period}; expected 1 to {MAX_PERIOD}, or a list")));
        }
        None => 6,
    };
    Ok((1..=blocks).map(|layer| name_of(!layer.is_multiple_of(period))).collect())
}

/// The factor by which full layers divide positions; `None` = no scaling.
fn rope_factor(keys: &Keys, context: u64) -> Result<Option<f64>, HeaderError> {
    let factor = keys.number(&["rope.scaling.factor", "rope.scale_linear"])?;
    let kind = keys.metadata.text(&keys.full("rope.scaling.type"))?;
    match kind {
        Some("none") => return Ok(None),
        None | Some("linear") => {}
        Some(other) => {
            let problem = format!("is {:?}; expected \"linear\" or \"none\"", short(other));
            return Err(keys.error("rope.scaling.type", problem));
        }
    }
    // Some converters write 0, which means no scaling.
    match factor.filter(|factor| *factor != 0.0) {
        Some(factor) => Ok(Some(factor)),
        None if kind.is_some() => Err(keys.missing("rope.scaling.factor")),
        // Ollama's converter omits the factor, but every Gemma-3 with a vision tower needs it.
        None if context > UNSCALED_CONTEXT && keys.has("vision.block_count") => {
            tracing::warn!(
                "{} is missing in a model with a vision tower; using Gemma-3's factor, 8",
                keys.full("rope.scaling.factor")
            );
            Ok(Some(8.0))
        }
        None => Ok(None),
    }
}
