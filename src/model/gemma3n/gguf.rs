//! `config.json` of a Gemma 3n in a GGUF file.
//!
//! Norms are stored as they are. llama.cpp takes the base of the layers with a window and the soft cap from the architecture,
//! so they are derived here in the same way.

use serde_json::{Value as Json, json};

use super::config::share_below;
use super::tensors::NAMES;
use crate::checkpoint::gguf::{self, Geometry, GgufArch, GgufTensors, GgufTokens, HeaderError, Keys};
use crate::kernels::STREAMS;
use crate::model::config::LayerType;
use crate::model::gemma3;

pub(super) static GGUF: GgufArch = GgufArch {
    name: "gemma3n",
    config,
    layer_tensor: |name, what| NAMES.of_gguf(name, what),
    interleaved: &[],
    towers: &[],
    tokens: GgufTokens {
        control: &["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        ..gemma3::TOKENS
    },
};

/// Of so many layers, the last one sees all positions, in files that do not say which layers do.
const PERIOD: usize = 5;

/// Generates `config.json`.
fn config(keys: &Keys, tensors: &GgufTensors) -> Result<Json, HeaderError> {
    let blocks = keys.blocks()?;
    for (name, expected) in [("altup.num_inputs", STREAMS as u64), ("altup.active_idx", 0)] {
        if let Some(found) = keys.whole(name)?.filter(|found| *found != expected) {
            return Err(keys.error(name, format!("is {found}; expected {expected}")));
        }
    }
    const WIDTHS: &str = "feed_forward_length";
    let widths = keys.per_layer(WIDTHS, blocks)?.ok_or_else(|| keys.missing(WIDTHS))?;
    let kv_heads = keys.uniform("attention.head_count_kv", blocks)?;
    let Geometry { hidden, heads, kv_heads, head_dim, context, norm_eps, .. } =
        keys.geometry_with(kv_heads, Some(widths[0]))?;
    let windows = keys.windows(blocks)?;
    let windows =
        windows.unwrap_or_else(|| (1..=blocks as usize).map(|i| !i.is_multiple_of(PERIOD)).collect());
    // The file has the standard deviations; -inf = a layer without a cutoff.
    let deviations = keys.numbers("activation_sparsity_scale", blocks)?;
    let sparsity = deviations.map(|all| all.into_iter().map(share_below).collect::<Vec<_>>());
    let rows = |name: &str| match tensors.shape(name) {
        Some([rows, _]) => Ok(*rows),
        Some(shape) => Err(HeaderError::tensor(name, format!("has the shape {shape:?}; expected a matrix"))),
        None => Err(HeaderError::tensor(name, "is missing")),
    };
    let special = gguf::special_ids(&GGUF.tokens, keys.metadata)?;
    Ok(json!({
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "vocab_size": tensors.vocab_size()?,
        "vocab_size_per_layer_input": rows("per_layer_token_embd.weight")?,
        "hidden_size": hidden,
        "hidden_size_per_layer_input": keys.required("embedding_length_per_layer_input")?,
        "intermediate_size": widths,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_kv_shared_layers": keys.required("attention.shared_kv_layers")?,
        "head_dim": head_dim,
        "laurel_rank": rows("blk.0.laurel_l.weight")?,
        "activation_sparsity_pattern": sparsity,
        "max_position_embeddings": context.ok_or_else(|| keys.missing("context_length"))?,
        "rms_norm_eps": norm_eps,
        "sliding_window": keys.required("attention.sliding_window")?,
        "layer_types": windows.into_iter().map(|slides| LayerType::of(slides).name()).collect::<Vec<_>>(),
        "rope_theta": keys.number(&["rope.freq_base"])?.unwrap_or(1e6),
        "rope_local_base_freq": keys.number(&["rope.freq_base_swa"])?.unwrap_or(1e4),
        "final_logit_softcapping": keys.number(&["final_logit_softcapping"])?.unwrap_or(30.0),
        "tie_word_embeddings": true,
        "bos_token_id": special.bos,
        "pad_token_id": special.pad,
        "eos_token_id": special.eos,
    }))
}
