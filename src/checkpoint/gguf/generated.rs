//! Converts the metadata of a GGUF file to the files of a Hugging Face checkpoint (`generation_config.json`,
//! `tokenizer_config.json`), and the names of its tensors to Hugging Face names.
//!
//! Reads the keys of llama.cpp's converter, and the different keys of other converters, such as Ollama and Google. The
//! file's architecture ([`GgufArch`]) generates `config.json`.

use serde_json::{Map, Value as Json, json};

use super::arch::{GgufArch, GgufTokens};
use super::header::{HeaderError, Metadata, Value};

/// Generates `generation_config.json`; `None` if the file has no sampling parameters.
pub(super) fn generation_config(metadata: &Metadata) -> Result<Option<Json>, HeaderError> {
    let mut config = Map::new();
    for (key, field) in [
        ("general.sampling.temp", "temperature"),
        ("general.sampling.top_k", "top_k"),
        ("general.sampling.top_p", "top_p"),
        ("general.sampling.min_p", "min_p"),
        ("general.sampling.penalty_repeat", "repetition_penalty"),
    ] {
        if let Some(number) = metadata.number(key)? {
            config.insert(field.into(), json!(number));
        }
    }
    if config.is_empty() {
        return Ok(None);
    }
    config.insert("do_sample".into(), json!(true));
    Ok(Some(config.into()))
}

/// Generates `tokenizer_config.json`: the texts of the special tokens, and the chat template if the file has one.
pub(super) fn tokenizer_config(tokens: &GgufTokens, metadata: &Metadata) -> Result<Json, HeaderError> {
    let mut config = Map::new();
    let special = special_ids(tokens, metadata)?;
    let eos = metadata.whole("tokenizer.ggml.eos_token_id")?;
    for (field, id) in [("bos_token", special.bos), ("eos_token", eos)] {
        let text = match id {
            Some(id) => token(metadata, id)?,
            None => None,
        };
        if let Some(text) = text {
            config.insert(field.into(), json!(text));
        }
    }
    if let Some(template) = metadata.text("tokenizer.chat_template")? {
        config.insert("chat_template".into(), json!(template));
    }
    Ok(config.into())
}

/// Token ids with a meaning of their own.
pub struct SpecialIds {
    pub bos: Option<u64>,
    pub pad: u64,
    /// Every id that ends an answer.
    pub eos: Vec<u64>,
}

/// The special ids of the file, or the architecture's ids if they are missing. Converters write only the end token of
/// `tokenizer_config.json`, and models also end answers with others, so the ids of all of the architecture's end tokens
/// are added.
pub fn special_ids(tokens: &GgufTokens, metadata: &Metadata) -> Result<SpecialIds, HeaderError> {
    let id = |name: &str| metadata.whole(&format!("tokenizer.ggml.{name}"));
    let mut eos = Vec::new();
    for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        eos.extend(id(name)?);
    }
    eos.extend(token_ids(metadata, "eos_token_ids")?.into_iter().map(u64::from));
    for (id, token) in metadata.elements("tokenizer.ggml.tokens")?.into_iter().flatten().enumerate() {
        if let Value::Text(text) = token?
            && tokens.end.contains(&text)
        {
            eos.push(id as u64);
        }
    }
    eos.sort_unstable();
    eos.dedup();
    let (bos, pad) = (id("bos_token_id")?, id("padding_token_id")?);
    Ok(SpecialIds { bos: bos.or(tokens.bos), pad: pad.unwrap_or(tokens.pad), eos })
}

/// The token ids in a list of the tokenizer's metadata; empty if the file has none.
pub fn token_ids(metadata: &Metadata, name: &str) -> Result<Vec<u32>, HeaderError> {
    let key = format!("tokenizer.ggml.{name}");
    let id = |value| match value {
        Value::Whole(id) if u32::try_from(id).is_ok() => Ok(id as u32),
        other => Err(HeaderError::key(&key, format!("holds {other}; expected token ids"))),
    };
    metadata.elements(&key)?.into_iter().flatten().map(|value| id(value?)).collect()
}

/// The text of a token; `None` if the id is not in the vocabulary.
fn token<'a>(metadata: &Metadata<'a>, id: u64) -> Result<Option<&'a str>, HeaderError> {
    let tokens = metadata.elements("tokenizer.ggml.tokens")?;
    match tokens.into_iter().flatten().nth(usize::try_from(id).unwrap_or(usize::MAX)).transpose()? {
        Some(Value::Text(text)) => Ok(Some(text)),
        _ => Ok(None),
    }
}

/// The parts of the name of a layer's tensor: 3, `attn_q` and `weight` of `blk.3.attn_q.weight`.
pub(super) fn layer_part(name: &str) -> Option<(u32, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, what) =
        rest.rsplit_once('.').filter(|(_, what)| ["weight", "bias", "scale"].contains(what))?;
    let layer = layer.parse().ok().filter(|n: &u32| n.to_string() == layer)?;
    Some((layer, part, what))
}

/// The Hugging Face name of a tensor. Ollama and older tools put the vision tower into the same file; its tensors get
/// the prefixes of Hugging Face. Unknown tensors keep their names.
pub(super) fn tensor_name(arch: Option<&GgufArch>, name: &str) -> Result<String, HeaderError> {
    match name {
        "token_embd.weight" => return Ok("model.embed_tokens.weight".into()),
        "output_norm.weight" => return Ok("model.norm.weight".into()),
        "per_layer_token_embd.weight" => return Ok("model.embed_tokens_per_layer.weight".into()),
        "per_layer_model_proj.weight" => return Ok("model.per_layer_model_projection.weight".into()),
        "per_layer_proj_norm.weight" => return Ok("model.per_layer_projection_norm.weight".into()),
        "altup_proj.weight" => return Ok("model.altup_projections.weight".into()),
        "altup_unembd_proj.weight" => return Ok("model.altup_unembed_projections.weight".into()),
        "output.weight" => return Ok("lm_head.weight".into()),
        _ => {}
    }
    if let Some(rest) = name.strip_prefix("v.") {
        return Ok(format!("vision_tower.{rest}"));
    }
    if let Some(rest) = name.strip_prefix("mm.") {
        return Ok(format!("multi_modal_projector.{rest}"));
    }
    let in_layer = || {
        let (layer, part, what) = layer_part(name)?;
        let name = (arch?.layer_tensor)(part, what)?;
        Some(format!("model.layers.{layer}.{name}"))
    };
    match in_layer() {
        Some(name) => Ok(name),
        // A file with Hugging Face names may store norms as `w`, but they would be read as `1 + w`.
        None if ["model.", "language_model.", "lm_head."].iter().any(|p| name.starts_with(p)) => {
            Err(HeaderError::tensor(
                name,
                "has a Hugging Face name; expected a name of llama.cpp (blk.0.attn_q.weight)",
            ))
        }
        None => Ok(name.into()),
    }
}
