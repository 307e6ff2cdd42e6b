//! Converts the metadata of a GGUF file to the files of a Hugging Face checkpoint (`config.json`,
//! `generation_config.json`, `tokenizer_config.json`), and the names of its tensors to Hugging Face names.
//!
//! Reads the keys of llama.cpp's converter, and the different keys of other converters: of Ollama (nested rope keys,
//! vision tower in the same file, no epsilon), and of Google for the QAT files (no sampling, no `add_space_prefix`).
//! No converter writes the values that llama.cpp derives from the architecture, so they are derived here in the same
//! way: the layer pattern and the scale of attention. Only for the 27B (62 layers) does that scale come from the hidden
//! size and the number of heads.
//!
//! Refuses every architecture except `gemma3`, and keys with values that would change the result and are not supported.
//! The error names the key. The reader of `config.json` checks the rest.

use serde_json::{Map, Value as Json, json};

use super::header::{HeaderError, Metadata, TensorInfo, Value};
use crate::checkpoint::error::short;

const ARCHITECTURE: &str = "general.architecture";
/// Maximum number of blocks. No model has so many.
const MAX_BLOCKS: u64 = 1024;
/// Layers of Gemma-3 27B. llama.cpp recognizes the 27B by this number.
const BLOCKS_27B: u64 = 62;
/// Layers of Gemma-3 1B.
const BLOCKS_1B: u64 = 26;
/// Longest context without RoPE scaling. Models with a longer context divide positions by 8.
const UNSCALED_CONTEXT: u64 = 32_768;
/// The name of a sliding layer in `layer_types`.
const SLIDING: &str = "sliding_attention";

/// Generates `config.json`.
pub(super) fn config(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<Json, HeaderError> {
    let keys = Keys(metadata);
    keys.check_architecture()?;

    let blocks = keys.required("block_count")?;
    if !(1..=MAX_BLOCKS).contains(&blocks) {
        return Err(keys.error("block_count", format!("is {blocks}; expected 1 to {MAX_BLOCKS}")));
    }
    let hidden = keys.required("embedding_length")?;
    let heads =
        keys.uniform("attention.head_count", blocks)?.ok_or_else(|| keys.missing("attention.head_count"))?;
    if heads == 0 {
        return Err(keys.error("attention.head_count", "is 0; expected at least 1"));
    }
    let head_dim = keys.whole("attention.key_length")?.unwrap_or(hidden / heads);
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = keys.whole(name)?.filter(|other| *other != head_dim) {
            let problem = format!("is {other}; expected the length of the keys ({head_dim})");
            return Err(keys.error(name, problem));
        }
    }
    if keys.0.flag(&keys.full("attention.causal"))? == Some(false) {
        return Err(keys.error("attention.causal", "is false; expected a model that generates text"));
    }
    let context = keys.whole("context_length")?.unwrap_or(131_072);

    let layer_types = layer_types(&keys, blocks)?;
    let window = match keys.whole("attention.sliding_window")? {
        None if layer_types.contains(&SLIDING) => return Err(keys.missing("attention.sliding_window")),
        window => window,
    };

    let mut config = json!({
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": vocab_size(tensors)?,
        "hidden_size": hidden,
        "intermediate_size":
            keys.uniform("feed_forward_length", blocks)?.ok_or_else(|| keys.missing("feed_forward_length"))?,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.uniform("attention.head_count_kv", blocks)?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number(&["attention.layer_norm_rms_epsilon"])?.unwrap_or(1e-6),
        "query_pre_attn_scalar": if blocks == BLOCKS_27B { hidden / heads } else { head_dim },
        "sliding_window": window,
        "layer_types": layer_types,
        "rope_theta": keys.number(&["rope.freq_base", "rope.global.freq_base"])?.unwrap_or(1e6),
        "rope_local_base_freq":
            keys.number(&["rope.freq_base_swa", "rope.local.freq_base", "rope.local_freq_base"])?.unwrap_or(1e4),
        "tie_word_embeddings": true,
    });
    if let Some(factor) = rope_factor(&keys, context)? {
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
    let special = special_ids(metadata)?;
    config["bos_token_id"] = json!(special.bos);
    config["pad_token_id"] = json!(special.pad);
    config["eos_token_id"] = json!(special.eos);
    Ok(config)
}

/// Generates `generation_config.json`; `None` if the file has no sampling parameters.
pub(super) fn generation_config(metadata: &Metadata) -> Result<Option<Json>, HeaderError> {
    let mut config = Map::new();
    for (key, field) in [
        ("general.sampling.temp", "temperature"),
        ("general.sampling.top_p", "top_p"),
        ("general.sampling.min_p", "min_p"),
        ("general.sampling.penalty_repeat", "repetition_penalty"),
    ] {
        if let Some(number) = metadata.number(key)? {
            config.insert(field.into(), json!(number));
        }
    }
    if let Some(top_k) = metadata.whole("general.sampling.top_k")? {
        config.insert("top_k".into(), json!(top_k));
    }
    if config.is_empty() {
        return Ok(None);
    }
    config.insert("do_sample".into(), json!(true));
    Ok(Some(config.into()))
}

/// Generates `tokenizer_config.json`: the texts of the special tokens, and the chat template if the file has one.
pub(super) fn tokenizer_config(metadata: &Metadata) -> Result<Json, HeaderError> {
    let mut config = Map::new();
    let special = special_ids(metadata)?;
    let eos = metadata.whole("tokenizer.ggml.eos_token_id")?;
    for (field, id) in [("bos_token", Some(special.bos)), ("eos_token", eos)] {
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

struct SpecialIds {
    bos: u64,
    pad: u64,
    /// Every id that ends an answer.
    eos: Vec<u64>,
}

/// The special ids of the file, or Gemma's ids if they are missing. Both `<eos>` and `<end_of_turn>` end an answer:
/// models use both, but converters write only the one of `tokenizer_config.json`.
fn special_ids(metadata: &Metadata) -> Result<SpecialIds, HeaderError> {
    let id = |name: &str| metadata.whole(&format!("tokenizer.ggml.{name}"));
    let mut eos = Vec::new();
    for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        eos.extend(id(name)?);
    }
    let more = "tokenizer.ggml.eos_token_ids";
    for value in metadata.elements(more)?.into_iter().flatten() {
        match value? {
            Value::Whole(id) if u32::try_from(id).is_ok() => eos.push(id as u64),
            other => return Err(HeaderError::key(more, format!("holds {other}; expected token ids"))),
        }
    }
    for (id, token) in metadata.elements("tokenizer.ggml.tokens")?.into_iter().flatten().enumerate() {
        if matches!(token?, Value::Text("<eos>" | "<end_of_turn>")) {
            eos.push(id as u64);
        }
    }
    eos.sort_unstable();
    eos.dedup();
    Ok(SpecialIds { bos: id("bos_token_id")?.unwrap_or(2), pad: id("padding_token_id")?.unwrap_or(0), eos })
}

/// The text of a token; `None` if the id is not in the vocabulary.
fn token<'a>(metadata: &Metadata<'a>, id: u64) -> Result<Option<&'a str>, HeaderError> {
    let tokens = metadata.elements("tokenizer.ggml.tokens")?;
    match tokens.into_iter().flatten().nth(usize::try_from(id).unwrap_or(usize::MAX)).transpose()? {
        Some(Value::Text(text)) => Ok(Some(text)),
        _ => Ok(None),
    }
}

/// The vocabulary size, which is the number of rows of the embedding. The tokenizer may have fewer ids.
fn vocab_size(tensors: &[TensorInfo]) -> Result<usize, HeaderError> {
    const NAME: &str = "token_embd.weight";
    match tensors.iter().find(|t| t.name == NAME) {
        Some(tensor) if tensor.shape.len() == 2 => Ok(tensor.shape[0]),
        Some(tensor) => {
            Err(HeaderError::tensor(NAME, format!("has the shape {:?}; expected a matrix", tensor.shape)))
        }
        None => Err(HeaderError::tensor(NAME, "is missing; expected the embedding of the tokens")),
    }
}

/// The attention type of each layer. The file has a period, or a list with true for sliding layers. Without both, every
/// sixth layer is a full one.
fn layer_types(keys: &Keys, blocks: u64) -> Result<Vec<&'static str>, HeaderError> {
    const NAME: &str = "attention.sliding_window_pattern";
    let name_of = |slides: bool| if slides { SLIDING } else { "full_attention" };
    let key = keys.full(NAME);
    if keys.0.is_array(&key)
        && let Some(elements) = keys.0.elements(&key)?
    {
        if elements.len() as u64 != blocks {
            let problem = format!("has {} elements; expected one per layer ({blocks})", elements.len());
            return Err(keys.error(NAME, problem));
        }
        return elements
            .map(|value| match value? {
                Value::Flag(slides) => Ok(name_of(slides)),
                Value::Whole(n @ 0..=1) => Ok(name_of(n == 1)),
                other => Err(keys.error(
                    NAME,
                    format!("contains {other}; expected true or false, true for a sliding layer"),
                )),
            })
            .collect();
    }
    let period = match keys.whole(NAME)? {
        Some(period @ 1..=MAX_BLOCKS) => period,
        Some(period) => {
            return Err(keys.error(NAME, format!("is {period}; expected 1 to {MAX_BLOCKS}, or a list")));
        }
        None => 6,
    };
    Ok((1..=blocks).map(|layer| name_of(!layer.is_multiple_of(period))).collect())
}

/// The factor by which full layers divide positions; `None` = no scaling.
fn rope_factor(keys: &Keys, context: u64) -> Result<Option<f64>, HeaderError> {
    let factor = keys.number(&["rope.scaling.factor", "rope.scale_linear"])?;
    let kind = keys.0.text(&keys.full("rope.scaling.type"))?;
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

/// Reads metadata keys by their names without the architecture's prefix.
struct Keys<'a, 'm>(&'m Metadata<'a>);

impl Keys<'_, '_> {
    fn check_architecture(&self) -> Result<(), HeaderError> {
        const EXPECTED: &str = "expected \"gemma3\"";
        let problem = match self.0.text(ARCHITECTURE)? {
            Some("gemma3") => return Ok(()),
            Some("clip") => {
                format!(
                    "is \"clip\": this is a vision tower (mmproj); {EXPECTED}, the file of the language model"
                )
            }
            Some(other) => format!("{:?} is not supported; {EXPECTED}", short(other)),
            None => format!("is missing; {EXPECTED}"),
        };
        Err(HeaderError::key(ARCHITECTURE, problem))
    }

    fn full(&self, name: &str) -> String {
        format!("gemma3.{name}")
    }

    fn has(&self, name: &str) -> bool {
        self.0.has(&self.full(name))
    }

    fn error(&self, name: &str, problem: impl Into<String>) -> HeaderError {
        HeaderError::key(&self.full(name), problem)
    }

    fn missing(&self, name: &str) -> HeaderError {
        self.error(name, "is missing; expected a number")
    }

    fn whole(&self, name: &str) -> Result<Option<u64>, HeaderError> {
        self.0.whole(&self.full(name))
    }

    fn required(&self, name: &str) -> Result<u64, HeaderError> {
        self.whole(name)?.ok_or_else(|| self.missing(name))
    }

    /// The value of the first of `names` that the file has.
    fn number(&self, names: &[&str]) -> Result<Option<f64>, HeaderError> {
        match names.iter().find(|name| self.has(name)) {
            Some(name) => self.0.number(&self.full(name)),
            None => Ok(None),
        }
    }

    /// A whole number. Some files have a list of it, with one equal element per layer.
    fn uniform(&self, name: &str, blocks: u64) -> Result<Option<u64>, HeaderError> {
        let key = self.full(name);
        if !self.0.is_array(&key) {
            return self.whole(name);
        }
        let wrong = || self.error(name, format!("is a list; expected one number, or {blocks} equal ones"));
        let mut elements = self.0.elements(&key)?.into_iter().flatten();
        let first = match elements.next().transpose()? {
            Some(Value::Whole(first)) => u64::try_from(first).map_err(|_| wrong())?,
            _ => return Err(wrong()),
        };
        let mut count = 1;
        for value in elements {
            count += 1;
            if value? != Value::Whole(first.into()) || count > blocks {
                return Err(wrong());
            }
        }
        if count == blocks { Ok(Some(first)) } else { Err(wrong()) }
    }
}

/// The Hugging Face name of a tensor. Ollama and older tools put the vision tower into the same file; its tensors get
/// the prefixes of Hugging Face. Unknown tensors keep their names.
pub(super) fn tensor_name(name: &str) -> Result<String, HeaderError> {
    const PER_LAYER: [(&str, &str); 13] = [
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    match name {
        "token_embd.weight" => return Ok("model.embed_tokens.weight".into()),
        "output_norm.weight" => return Ok("model.norm.weight".into()),
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
        let (layer, part) = name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
        let layer: u32 = layer.parse().ok().filter(|n: &u32| n.to_string() == layer)?;
        let (_, part) = PER_LAYER.iter().find(|(gguf, _)| *gguf == part)?;
        Some(format!("model.layers.{layer}.{part}.weight"))
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
