//! The tensors of a Gemma-3 checkpoint by their role, checked against the config.
//!
//! Names come with one of three prefixes: `model.` (text only), `language_model.model.` (the published multimodal
//! checkpoints), `model.language_model.` (transformers 5's internal names). The tensors of the vision side are skipped
//! by rule and counted; a saved copy of the tied head is compared and dropped. Any other tensor is refused: an unknown
//! tensor means an unknown model.

use std::collections::{HashMap, HashSet};

use crate::checkpoint::{Checkpoint, CheckpointError, Tensor, short};

use super::config::Gemma3Config;

/// A checkpoint's tensors do not match its config. One line: file, tensor, what was expected.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{location}: tensor {first}{} missing; config.json asks for it with shape {expected:?}", and(*.more, "is", "are"))]
    Missing { location: String, first: String, more: usize, expected: Vec<usize> },
    #[error("{file}: tensor {tensor} has shape {found:?}; config.json asks for {expected:?} ({meaning})")]
    Shape { file: String, tensor: String, found: Vec<usize>, expected: Vec<usize>, meaning: &'static str },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "{file}: tensor {tensor}{} beyond the layers of config.json (num_hidden_layers {num_hidden_layers})",
        and(*.more, "is", "are")
    )]
    Layer { file: String, tensor: String, more: usize, num_hidden_layers: usize },
    #[error("{file}: tensor {tensor} stands for the same weight as {other}; expected one of them")]
    Twice { file: String, tensor: String, other: String },
    #[error(
        "{file}: tensor {tensor} is not equal to the embedding; expected the copy of it that a tied head is"
    )]
    Untied { file: String, tensor: String },
    #[error(
        "{file}: tensor {tensor}{} no part of a Gemma-3 language model; expected its weights, vision_tower, \
         multi_modal_projector and a tied lm_head only",
        and(*.more, "is", "are")
    )]
    Unexpected { file: String, tensor: String, more: usize },
}

fn and(more: usize, one: &str, many: &str) -> String {
    if more == 0 { format!(" {one}") } else { format!(" and {more} more {many}") }
}

/// The weights of a language model; shapes are `[out, in]`, norms `[n]`.
#[derive(Debug, Clone)]
pub struct Gemma3Weights<'a> {
    /// `[vocab_size, hidden_size]`; also the output projection.
    pub embed_tokens: Tensor<'a>,
    /// `[hidden_size]`
    pub norm: Tensor<'a>,
    pub layers: Vec<LayerWeights<'a>>,
    /// Number of tensors of the vision tower and its projector, which are not read.
    pub skipped_vision: usize,
    /// Bytes of the skipped tensors.
    pub skipped_bytes: u64,
}

/// The weights of one layer. With q = num_attention_heads * head_dim, kv = num_key_value_heads * head_dim:
#[derive(Debug, Clone)]
pub struct LayerWeights<'a> {
    /// The norm before attention, `[hidden_size]`; the three norms after it have the same shape.
    pub input_layernorm: Tensor<'a>,
    pub post_attention_layernorm: Tensor<'a>,
    pub pre_feedforward_layernorm: Tensor<'a>,
    pub post_feedforward_layernorm: Tensor<'a>,
    /// `[head_dim]`
    pub q_norm: Tensor<'a>,
    /// `[head_dim]`
    pub k_norm: Tensor<'a>,
    /// `[q, hidden_size]`
    pub q_proj: Tensor<'a>,
    /// `[kv, hidden_size]`
    pub k_proj: Tensor<'a>,
    /// `[kv, hidden_size]`
    pub v_proj: Tensor<'a>,
    /// `[hidden_size, q]`
    pub o_proj: Tensor<'a>,
    /// `[intermediate_size, hidden_size]`
    pub gate_proj: Tensor<'a>,
    /// `[intermediate_size, hidden_size]`
    pub up_proj: Tensor<'a>,
    /// `[hidden_size, intermediate_size]`
    pub down_proj: Tensor<'a>,
}

impl<'a> LayerWeights<'a> {
    /// The four matrices of attention, by their names in a layer.
    pub fn attention(&self) -> [(&'static str, Tensor<'a>); 4] {
        [
            ("self_attn.q_proj", self.q_proj),
            ("self_attn.k_proj", self.k_proj),
            ("self_attn.v_proj", self.v_proj),
            ("self_attn.o_proj", self.o_proj),
        ]
    }

    /// The three matrices of the feed-forward network.
    pub fn feed_forward(&self) -> [(&'static str, Tensor<'a>); 3] {
        [("mlp.gate_proj", self.gate_proj), ("mlp.up_proj", self.up_proj), ("mlp.down_proj", self.down_proj)]
    }

    /// The six norms.
    pub fn norms(&self) -> [(&'static str, Tensor<'a>); 6] {
        [
            ("input_layernorm", self.input_layernorm),
            ("post_attention_layernorm", self.post_attention_layernorm),
            ("pre_feedforward_layernorm", self.pre_feedforward_layernorm),
            ("post_feedforward_layernorm", self.post_feedforward_layernorm),
            ("self_attn.q_norm", self.q_norm),
            ("self_attn.k_norm", self.k_norm),
        ]
    }

    /// The seven matrices, which quantization modes apply to.
    pub fn projections(&self) -> impl Iterator<Item = Tensor<'a>> {
        self.attention().into_iter().chain(self.feed_forward()).map(|(_, tensor)| tensor)
    }
}

impl<'a> Gemma3Weights<'a> {
    /// Finds every weight that `config` asks for, and refuses any other tensor.
    pub fn collect(checkpoint: &'a Checkpoint, config: &Gemma3Config) -> Result<Self, WeightsError> {
        let mut found = Found::default();
        for tensor in checkpoint.iter() {
            found.add(tensor)?;
        }
        found.check(checkpoint, config)?;

        // Every name below was checked above, and is taken once.
        let Found { mut by_name, skipped_vision, skipped_bytes, .. } = found;
        let mut take = |name: String| by_name.remove(&name).expect("a checked weight");
        let embed_tokens = take("embed_tokens.weight".into());
        let norm = take("norm.weight".into());
        let layers = (0..config.num_hidden_layers).map(|layer| {
            let mut take = |name| take(format!("layers.{layer}.{name}.weight"));
            LayerWeights {
                input_layernorm: take("input_layernorm"),
                post_attention_layernorm: take("post_attention_layernorm"),
                pre_feedforward_layernorm: take("pre_feedforward_layernorm"),
                post_feedforward_layernorm: take("post_feedforward_layernorm"),
                q_norm: take("self_attn.q_norm"),
                k_norm: take("self_attn.k_norm"),
                q_proj: take("self_attn.q_proj"),
                k_proj: take("self_attn.k_proj"),
                v_proj: take("self_attn.v_proj"),
                o_proj: take("self_attn.o_proj"),
                gate_proj: take("mlp.gate_proj"),
                up_proj: take("mlp.up_proj"),
                down_proj: take("mlp.down_proj"),
            }
        });
        let layers = layers.collect();
        Ok(Self { embed_tokens, norm, layers, skipped_vision, skipped_bytes })
    }

    /// Defects of the language model by tensor: what the checkpoint's writer lost, as far as the stored data shows it.
    pub fn defects(&self) -> Vec<String> {
        let of = |tensor: Tensor| Some(format!("{}: {}", short(tensor.name), tensor.defect()?));
        self.iter().filter_map(of).collect()
    }

    /// Logs one line about the defects of a checkpoint that is going to be used.
    pub fn warn_of_defects(&self, checkpoint: &Checkpoint) {
        if let Some(warning) = defects_warning(checkpoint.location(), &self.defects()) {
            tracing::warn!("{warning}");
        }
    }

    /// Every tensor of the language model.
    pub fn iter(&self) -> impl Iterator<Item = Tensor<'a>> {
        let layers =
            self.layers.iter().flat_map(|l| l.projections().chain(l.norms().map(|(_, tensor)| tensor)));
        [self.embed_tokens, self.norm].into_iter().chain(layers)
    }
}

/// One line that names the first defect; `None` if there are none.
fn defects_warning(location: &str, defects: &[String]) -> Option<String> {
    const NAMED: usize = 4;
    let first = defects[..defects.len().min(NAMED)].join("; ");
    let more = match defects.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!("; and {more} more (`unicorn inspect` lists them)"),
    };
    (!defects.is_empty()).then(|| {
        format!(
            "{location}: the quantizer that wrote this checkpoint cut values off, or stored them with scale 0, and they are \
             read as they are: {first}{more}. To have what was lost, quantize the original model anew (`unicorn quantize`)"
        )
    })
}

/// A tensor's name without prefix, its shape, and the meaning of the shape in the config's words.
type Expected = (String, Vec<usize>, &'static str);

/// Every weight of a model with that config.
fn expected(config: &Gemma3Config) -> Vec<Expected> {
    let (hidden, ffn, head_dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
    let per_layer = [
        ("input_layernorm", vec![hidden], "hidden_size"),
        ("post_attention_layernorm", vec![hidden], "hidden_size"),
        ("pre_feedforward_layernorm", vec![hidden], "hidden_size"),
        ("post_feedforward_layernorm", vec![hidden], "hidden_size"),
        ("self_attn.q_norm", vec![head_dim], "head_dim"),
        ("self_attn.k_norm", vec![head_dim], "head_dim"),
        ("self_attn.q_proj", vec![q, hidden], "num_attention_heads * head_dim, hidden_size"),
        ("self_attn.k_proj", vec![kv, hidden], "num_key_value_heads * head_dim, hidden_size"),
        ("self_attn.v_proj", vec![kv, hidden], "num_key_value_heads * head_dim, hidden_size"),
        ("self_attn.o_proj", vec![hidden, q], "hidden_size, num_attention_heads * head_dim"),
        ("mlp.gate_proj", vec![ffn, hidden], "intermediate_size, hidden_size"),
        ("mlp.up_proj", vec![ffn, hidden], "intermediate_size, hidden_size"),
        ("mlp.down_proj", vec![hidden, ffn], "hidden_size, intermediate_size"),
    ];
    let mut all = vec![
        ("embed_tokens.weight".into(), vec![config.vocab_size, hidden], "vocab_size, hidden_size"),
        ("norm.weight".into(), vec![hidden], "hidden_size"),
    ];
    for layer in 0..config.num_hidden_layers {
        let of_layer = |(name, shape, meaning): &(&str, Vec<usize>, &'static str)| {
            (format!("layers.{layer}.{name}.weight"), shape.clone(), *meaning)
        };
        all.extend(per_layer.iter().map(of_layer));
    }
    all
}

/// A checkpoint's tensors by their role.
#[derive(Default)]
struct Found<'a> {
    /// The tensors of the language model, by name without prefix.
    by_name: HashMap<String, Tensor<'a>>,
    /// The prefix in use, which messages about missing tensors need.
    prefix: Option<&'static str>,
    heads: Vec<Tensor<'a>>,
    skipped_vision: usize,
    skipped_bytes: u64,
    unexpected: Vec<Tensor<'a>>,
}

impl<'a> Found<'a> {
    fn add(&mut self, tensor: Tensor<'a>) -> Result<(), WeightsError> {
        // The vision tower is recognized before the prefixes: its names contain `model.` and `layers.N.mlp` too.
        if tensor.name.split('.').any(|part| part == "vision_tower" || part == "multi_modal_projector") {
            self.skipped_vision += 1;
            self.skipped_bytes += tensor.stored_bytes();
            return Ok(());
        }
        if matches!(tensor.name, "lm_head.weight" | "language_model.lm_head.weight") {
            self.heads.push(tensor);
            return Ok(());
        }
        let prefixes = ["language_model.model.", "model.language_model.", "model."];
        let stripped = prefixes.iter().find_map(|p| tensor.name.strip_prefix(p).map(|name| (*p, name)));
        let Some((prefix, name)) = stripped else {
            self.unexpected.push(tensor);
            return Ok(());
        };
        self.prefix.get_or_insert(prefix);
        match self.by_name.insert(name.into(), tensor) {
            None => Ok(()),
            Some(other) => Err(WeightsError::Twice {
                file: tensor.file.into(),
                tensor: short(tensor.name),
                other: short(other.name),
            }),
        }
    }

    fn check(&mut self, checkpoint: &Checkpoint, config: &Gemma3Config) -> Result<(), WeightsError> {
        let expected = expected(config);
        let mut missing = expected.iter().filter(|(name, ..)| !self.by_name.contains_key(name));
        if let Some((first, shape, _)) = missing.next() {
            return Err(WeightsError::Missing {
                location: checkpoint.location().into(),
                first: format!("{}{first}", self.prefix.unwrap_or("model.")),
                more: missing.count(),
                expected: shape.clone(),
            });
        }
        for (name, shape, meaning) in &expected {
            let tensor = &self.by_name[name];
            let (file, name) = (tensor.file.to_string(), tensor.name.to_string());
            if tensor.shape != shape {
                let (found, expected) = (tensor.shape.to_vec(), shape.clone());
                return Err(WeightsError::Shape { file, tensor: name, found, expected, meaning });
            }
            tensor.scheme()?;
        }

        let known: HashSet<&str> = expected.iter().map(|(name, ..)| name.as_str()).collect();
        for (name, tensor) in &self.by_name {
            if !known.contains(name.as_str()) {
                self.unexpected.push(*tensor);
            }
        }
        // The list is sorted, so that messages do not depend on the map's order.
        self.unexpected.sort_by_key(|t| (t.file, t.name));
        if let Some(tensor) = self.unexpected.first() {
            let (file, name, more) = (tensor.file.into(), short(tensor.name), self.unexpected.len() - 1);
            let num_hidden_layers = config.num_hidden_layers;
            return Err(match layer_of(tensor.name) {
                Some(layer) if layer >= num_hidden_layers => {
                    WeightsError::Layer { file, tensor: name, more, num_hidden_layers }
                }
                _ => WeightsError::Unexpected { file, tensor: name, more },
            });
        }

        let embedding = &self.by_name["embed_tokens.weight"];
        for head in &self.heads {
            if (head.shape, head.encoding) != (embedding.shape, embedding.encoding) {
                return Err(WeightsError::Untied { file: head.file.into(), tensor: short(head.name) });
            }
        }
        Ok(())
    }
}

/// The number N in a name that contains `layers.N.`.
fn layer_of(name: &str) -> Option<usize> {
    name.split('.').skip_while(|part| *part != "layers").nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::defects_warning;

    #[test]
    fn a_warning_names_the_first_defects_and_counts_the_rest() {
        assert_eq!(defects_warning("m", &[]), None);
        let defects: Vec<String> = (0..5).map(|i| format!("t{i}: gone")).collect();
        let warning = defects_warning("m", &defects[..4]).unwrap();
        assert!(
            warning.contains("as they are: t0: gone; ") && warning.contains("; t3: gone. To"),
            "{warning}"
        );
        let warning = defects_warning("m", &defects).unwrap();
        assert!(warning.contains("; t3: gone; and 1 more (`unicorn inspect` lists them). "), "{warning}");
    }
}
