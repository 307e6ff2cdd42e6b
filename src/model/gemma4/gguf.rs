//! `config.json` of a Gemma 4 in a GGUF file.
//!
//! The keys without `_swa` describe the layers that see all positions. No key says that their values are their keys:
//! these layers have no `attn_v`. Norms are stored as they are.

use serde_json::{Value as Json, json};

use super::{mmproj, tensors};
use crate::checkpoint::gguf::{self, Geometry, GgufArch, GgufTensors, GgufTokens, HeaderError, Keys};
use crate::model::config::LayerType;

pub(super) static GGUF: GgufArch = GgufArch {
    name: "gemma4",
    config,
    layer_tensor: tensors::of_gguf,
    interleaved: &[],
    towers: mmproj::TOWERS,
    tokens: GgufTokens {
        bos: Some(2),
        eos: 1,
        pad: 0,
        own_model: Some("gemma4"),
        add_space_prefix: false,
        end: &["<eos>", "<turn|>", "<|tool_response>"],
        // llama.cpp's converter lists those of calls and thoughts as pieces that users see.
        control: &[
            "<pad>",
            "<eos>",
            "<bos>",
            "<unk>",
            "<mask>",
            "<|tool>",
            "<tool|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            "<|\"|>",
            "<|think|>",
            "<|channel>",
            "<channel|>",
            "<|turn>",
            "<turn|>",
            "<|image>",
            "<|audio>",
            "<|image|>",
            "<|audio|>",
            "<image|>",
            "<audio|>",
            "<|video|>",
        ],
    },
};

/// Divisors of the frequencies of layers that see all positions.
const DIVISORS: &str = "rope_freqs.weight";

/// Generates `config.json`.
fn config(keys: &Keys, tensors: &GgufTensors) -> Result<Json, HeaderError> {
    let blocks = keys.blocks()?;
    let shared = keys.whole("attention.shared_kv_layers")?.unwrap_or(0);
    const WIDTHS: &str = "feed_forward_length";
    let widths = keys.per_layer(WIDTHS, blocks)?.ok_or_else(|| keys.missing(WIDTHS))?;
    let is_double_wide = widths.last() == Some(&(2 * widths[0]));
    // The layers that share keys and values may be twice as wide as the others.
    let own = blocks.saturating_sub(shared) as usize;
    let expected = |layer: usize| if is_double_wide && layer >= own { 2 * widths[0] } else { widths[0] };
    if let Some(layer) = (0..widths.len()).find(|layer| widths[*layer] != expected(*layer)) {
        let problem = format!("is {} for layer {layer}; expected {}", widths[layer], expected(layer));
        return Err(keys.error(WIDTHS, problem));
    }
    const WINDOWS: &str = "attention.sliding_window_pattern";
    let Some(windows) = keys.windows(blocks)? else {
        return Err(keys.error(WINDOWS, "is missing; expected a list with true for each sliding layer"));
    };
    const KV_HEADS: &str = "attention.head_count_kv";
    let kv_heads = keys.per_layer(KV_HEADS, blocks)?.ok_or_else(|| keys.missing(KV_HEADS))?;
    // The number of all layers with a window, or of all others; that of the first layer if there are none.
    let of_kind = |slides: bool| -> Result<u64, HeaderError> {
        let mut all = kv_heads.iter().zip(&windows).filter(|(_, window)| **window == slides);
        let first = all.next().map_or(kv_heads[0], |(heads, _)| *heads);
        match all.find(|(heads, _)| **heads != first) {
            None => Ok(first),
            Some((other, _)) => {
                Err(keys.error(KV_HEADS, format!("has {first} and {other} for layers of one type")))
            }
        }
    };
    let (sliding_kv_heads, full_kv_heads) = (of_kind(true)?, of_kind(false)?);
    let Geometry { hidden, intermediate, heads, head_dim: full_dim, context, norm_eps, .. } =
        keys.geometry_with(Some(full_kv_heads), Some(widths[0]))?;
    let sliding_dim = keys.whole("attention.key_length_swa")?.unwrap_or(full_dim);
    for name in ["attention.value_length_swa", "rope.dimension_count_swa"] {
        if let Some(other) = keys.whole(name)?.filter(|other| *other != sliding_dim) {
            let problem = format!("is {other}; expected the length of the keys ({sliding_dim})");
            return Err(keys.error(name, problem));
        }
    }
    let mut full_layers = windows.iter().enumerate().filter(|(_, window)| !**window);
    let has_values = |layer: usize| tensors.has(&format!("blk.{layer}.attn_v.weight"));
    let has_values_of_keys = full_layers.next().is_some_and(|(layer, _)| !has_values(layer));
    let full = match tensors.floats(DIVISORS)? {
        Some(divisors) => json!({"rope_type": "divisors", "divisors": divisors}),
        None => json!({"rope_type": "default"}),
    };
    let window = keys.required("attention.sliding_window")?;
    let kind = |slides: &bool| LayerType::of(*slides).name();
    let mut config = json!({
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": tensors.vocab_size()?,
        "hidden_size": hidden,
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input")?.unwrap_or(0),
        "vocab_size_per_layer_input": tensors.vocab_size()?,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_double_wide,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": sliding_kv_heads,
        "num_global_key_value_heads": full_kv_heads,
        "head_dim": sliding_dim,
        "global_head_dim": full_dim,
        "attention_k_eq_v": has_values_of_keys,
        "max_position_embeddings": context.ok_or_else(|| keys.missing("context_length"))?,
        "rms_norm_eps": norm_eps,
        "sliding_window": window,
        "layer_types": windows.iter().map(kind).collect::<Vec<_>>(),
        "final_logit_softcapping": keys.number(&["final_logit_softcapping"])?.filter(|cap| *cap != 0.0),
        "tie_word_embeddings": true,
    });
    if let Some(experts) = keys.whole("expert_count")?.filter(|experts| *experts > 0) {
        config["enable_moe_block"] = json!(true);
        config["num_experts"] = json!(experts);
        config["top_k_experts"] = json!(keys.required("expert_used_count")?);
        config["moe_intermediate_size"] = json!(keys.required("expert_feed_forward_length")?);
    }
    config["rope_parameters"] =
        json!({"full_attention": full, "sliding_attention": {"rope_type": "default"}});
    for (key, kind) in [("rope.freq_base", "full_attention"), ("rope.freq_base_swa", "sliding_attention")] {
        if let Some(theta) = keys.number(&[key])? {
            config["rope_parameters"][kind]["rope_theta"] = json!(theta);
        }
    }
    config["suppress_tokens"] = json!(gguf::token_ids(keys.metadata, "suppress_tokens")?);
    let special = gguf::special_ids(&GGUF.tokens, keys.metadata)?;
    config["bos_token_id"] = json!(special.bos);
    config["pad_token_id"] = json!(special.pad);
    config["eos_token_id"] = json!(special.eos);
    Ok(config)
}
