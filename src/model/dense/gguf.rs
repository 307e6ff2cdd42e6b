//! `config.json` of a dense decoder in a GGUF file. The reader of `config.json` checks the values.

use serde_json::{Value as Json, json};

use crate::checkpoint::gguf::{self, Geometry, GgufTensors, GgufTokens, HeaderError, Keys};
use crate::checkpoint::short;

/// Divisors of the frequencies, which the converter computes from the RoPE scaling `llama3`.
const DIVISORS: &str = "rope_freqs.weight";

/// Generates a `config.json` with this `model_type`, of a model without experts.
pub(in crate::model) fn config(
    model_type: &str,
    tokens: &GgufTokens,
    keys: &Keys,
    tensors: &GgufTensors,
) -> Result<Json, HeaderError> {
    if let Some(experts) = keys.whole("expert_count")?.filter(|experts| *experts > 0) {
        let problem =
            format!("is {experts}; models of this architecture can be computed without experts only");
        return Err(keys.error("expert_count", problem));
    }
    config_without_experts(model_type, tokens, keys, tensors)
}

/// As [`config`], for a mixture, whose experts the caller describes.
pub(in crate::model) fn config_without_experts(
    model_type: &str,
    tokens: &GgufTokens,
    keys: &Keys,
    tensors: &GgufTensors,
) -> Result<Json, HeaderError> {
    let Geometry { blocks, hidden, intermediate, heads, kv_heads, head_dim, context, norm_eps } =
        keys.geometry()?;
    let Some(context) = context else { return Err(keys.missing("context_length")) };
    let mut config = json!({
        "model_type": model_type,
        "vocab_size": tensors.vocab_size()?,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": norm_eps,
        "rope_theta": keys.number(&["rope.freq_base"])?.unwrap_or(1e4),
        "tie_word_embeddings": !tensors.has("output.weight"),
        // No converter writes whether a window is in use.
        "sliding_window": null,
    });
    if let Some(scaling) = rope_scaling(keys, tensors)? {
        config["rope_scaling"] = scaling;
    }
    let special = gguf::special_ids(tokens, keys.metadata)?;
    if let Some(bos) = special.bos {
        config["bos_token_id"] = json!(bos);
    }
    config["eos_token_id"] = json!(special.eos);
    Ok(config)
}

fn rope_scaling(keys: &Keys, tensors: &GgufTensors) -> Result<Option<Json>, HeaderError> {
    const TYPE: &str = "rope.scaling.type";
    if let Some(divisors) = tensors.floats(DIVISORS)? {
        return Ok(Some(json!({"rope_type": "divisors", "divisors": divisors})));
    }
    let factor = || {
        let factor = keys.number(&["rope.scaling.factor"])?;
        factor.ok_or_else(|| keys.missing("rope.scaling.factor"))
    };
    match keys.metadata.text(&keys.full(TYPE))? {
        None | Some("none") => Ok(None),
        Some("linear") => Ok(Some(json!({"rope_type": "linear", "factor": factor()?}))),
        Some("yarn") => {
            let factor = factor()?;
            let mut scaling = json!({"rope_type": "yarn", "factor": factor});
            for (key, field) in [
                ("rope.scaling.original_context_length", "original_max_position_embeddings"),
                ("rope.scaling.yarn_beta_fast", "beta_fast"),
                ("rope.scaling.yarn_beta_slow", "beta_slow"),
            ] {
                if let Some(number) = keys.number(&[key])? {
                    scaling[field] = json!(number);
                }
            }
            // llama.cpp multiplies this with the factor that follows from YaRN.
            if let Some(more) = keys.number(&["rope.scaling.attn_factor"])? {
                scaling["attention_factor"] = json!(more * (0.1 * factor.ln() + 1.0));
            }
            Ok(Some(scaling))
        }
        Some(other) => {
            let problem = format!("is {:?}; expected \"linear\", \"yarn\" or \"none\"", short(other));
            Err(keys.error(TYPE, problem))
        }
    }
}
