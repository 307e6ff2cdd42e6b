//! The tensors of a checkpoint, found by name and checked against the table of the model ([`super::tensors`]).
//!
//! Names come with one of three prefixes: `model.` (text only), `language_model.model.` (the published multimodal
//! checkpoints), `model.language_model.` (transformers 5's internal names). The tensors of images and sound are skipped
//! by rule and counted; saved RoPE frequencies are skipped, because the config has them; a saved copy of a tied head is
//! compared and dropped; in a GPTQ checkpoint, biases of zeros are dropped, because AutoGPTQ writes one for every matrix.
//! Any other tensor is refused: an unknown tensor means an unknown model.

use std::collections::{BTreeMap, HashMap};

use super::spec::ModelSpec;
use super::tensors::{ModelTensors, Role, TensorSpec};
use super::vision::{VisionSpec, VisionTensor};
use crate::checkpoint::{Checkpoint, CheckpointError, Format, Tensor, short};
use crate::tensor::QuantizeMode;

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
    #[error("{file}: tensor {tensor} is another name of the same weight as {other}; expected one of them")]
    Twice { file: String, tensor: String, other: String },
    #[error(
        "{file}: tensor {tensor} is not equal to the embedding; expected the copy of it that a tied head is"
    )]
    Untied { file: String, tensor: String },
    #[error(
        "{file}: tensor {tensor}{} no part of a {arch} language model; expected its weights, vision_tower, \
         multi_modal_projector and a tied lm_head only",
        and(*.more, "is", "are")
    )]
    Unexpected { file: String, tensor: String, more: usize, arch: &'static str },
}

fn and(more: usize, one: &str, many: &str) -> String {
    if more == 0 { format!(" {one}") } else { format!(" and {more} more {many}") }
}

/// The weights of a language model.
#[derive(Debug, Clone)]
pub struct Weights<'a> {
    pub tensors: ModelTensors<Tensor<'a>>,
    /// The tensors of the tower that reads images and of its projector, by [`VisionTensor::name`].
    tower: HashMap<String, Tensor<'a>>,
    /// Number of the tensors that compute images and sound, and their bytes.
    pub skipped_vision: usize,
    pub skipped_bytes: u64,
}

impl<'a> Weights<'a> {
    /// Finds every weight that `spec` requires, and refuses any other tensor.
    pub fn collect(checkpoint: &'a Checkpoint, spec: &ModelSpec) -> Result<Self, WeightsError> {
        let mut found = Found::default();
        for tensor in checkpoint.iter() {
            found.add(tensor)?;
        }
        found.check(checkpoint, spec)?;
        // The check found a tensor for each name.
        let tensors = spec.tensors.as_ref().map(|spec| found.by_name[&spec.stored_name()]);
        let Found { tower, skipped_vision, skipped_bytes, .. } = found;
        Ok(Self { tensors, tower, skipped_vision, skipped_bytes })
    }

    /// The weights of a language model alone.
    pub(crate) fn of_text(tensors: ModelTensors<Tensor<'a>>) -> Self {
        Self { tensors, tower: HashMap::new(), skipped_vision: 0, skipped_bytes: 0 }
    }

    /// The same weights, and those of a tower.
    pub(crate) fn with_tower(self, tower: impl Iterator<Item = Tensor<'a>>) -> Self {
        Self { tower: tower.map(|tensor| (tensor.name.to_owned(), tensor)).collect(), ..self }
    }

    /// The tensors of a tower, in the order of [`VisionSpec::tensors`]. `None` if the checkpoint has none of them: some
    /// hold the language model only.
    pub fn vision(
        &self,
        checkpoint: &Checkpoint,
        spec: &VisionSpec,
    ) -> Result<Option<Vec<Tensor<'a>>>, WeightsError> {
        if self.tower.is_empty() {
            return Ok(None);
        }
        // Messages about what is missing name the tower's file, if it has one of its own.
        let mut files = self.tower.values().map(|tensor| tensor.file);
        let first = files.next().filter(|first| files.all(|file| file == *first));
        let location = first.unwrap_or(checkpoint.location());
        let find = |wanted: VisionTensor| {
            let (shape, meaning) = wanted.stored_shape(checkpoint.has_gguf_layout());
            let Some(tensor) = self.tower.get(&wanted.name) else {
                return Err(WeightsError::Missing {
                    location: location.into(),
                    expected: shape.to_vec(),
                    first: wanted.name,
                    more: 0,
                });
            };
            if tensor.shape != shape {
                return Err(WeightsError::Shape {
                    file: tensor.file.to_string(),
                    tensor: tensor.name.to_string(),
                    found: tensor.shape.to_vec(),
                    expected: shape.to_vec(),
                    meaning,
                });
            }
            tensor.scheme()?;
            Ok(*tensor)
        };
        spec.tensors().into_iter().map(find).collect::<Result<_, _>>().map(Some)
    }

    /// The matrix that computes the logits.
    pub fn head(&self) -> &Tensor<'a> {
        self.tensors.lm_head.as_ref().unwrap_or(&self.tensors.embed_tokens)
    }

    /// Defects of the language model by tensor: values that the checkpoint's writer lost, as far as the stored data
    /// shows the loss.
    pub fn defects(&self) -> Vec<String> {
        let of = |tensor: &Tensor| Some(format!("{}: {}", short(tensor.name), tensor.defect()?));
        self.tensors.iter().filter_map(of).collect()
    }

    /// Logs one line about the defects of a checkpoint that is going to be used.
    pub fn warn_of_defects(&self, checkpoint: &Checkpoint) {
        if let Some(warning) = defects_warning(checkpoint.location(), &self.defects()) {
            tracing::warn!("{warning}");
        }
    }

    /// One line about the matrices of a GGUF file that a load in `mode` stores in clearly more bytes than the file does,
    /// because no scheme is as small as their type. `None` if there are none.
    pub fn growth(&self, mode: QuantizeMode) -> Option<String> {
        let ModelTensors { embed_tokens, lm_head, per_layer, layers, .. } = &self.tensors;
        let table = per_layer.iter().map(|per_layer| &per_layer.embed_tokens_per_layer);
        let of_vocabulary = [embed_tokens].into_iter().chain(lm_head).chain(table);
        let of_vocabulary = of_vocabulary.filter(|_| mode.embedding().is_none());
        let rounded_in_mode = layers.iter().flat_map(|layer| layer.projections.iter());
        let rounded_in_mode = rounded_in_mode.filter(|_| mode.projections().is_none());
        let kept = layers.iter().flat_map(|layer| layer.kept.iter());

        // The number of matrices of each type, and its growth.
        let mut types = BTreeMap::new();
        let (mut in_file, mut on_device) = (0, 0);
        for tensor in of_vocabulary.chain(rounded_in_mode).chain(kept) {
            let Some(kind) = tensor.ggml_type().filter(|kind| kind.growth() > MOST_GROWTH) else { continue };
            types.entry(kind.name()).or_insert((0, kind.growth())).0 += 1;
            in_file += tensor.stored_bytes();
            on_device += kind.scheme().bytes(tensor.rows(), tensor.cols());
        }
        let each = types.iter().map(|(name, (count, growth))| format!("{count} of {name} {growth:.1} times"));
        let each = each.collect::<Vec<_>>().join(", ");
        let [in_file, on_device] = [in_file, on_device].map(|bytes| bytes as f64 / 1e9);
        // A mode that rounds the projections leaves the embedding as it is.
        let or_rounded = match mode.projections() {
            None => ", and so is `--quantize int4-g32`, which rounds the weights again",
            Some(_) => "",
        };
        (!types.is_empty()).then(|| {
            format!(
                "matrices take more bytes on the device than in the file ({each}; together {on_device:.2} GB instead of \
                 {in_file:.2} GB), so decoding is slower than the size of the file suggests: a file of the model in Q4_0 \
                 or Q4_K_M is faster{or_rounded}"
            )
        })
    }

    /// Bytes of all tensors in the checkpoint.
    pub fn stored_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.stored_bytes()).sum()
    }
}

/// The most bytes on the device that count as no more than those of the file, relative to them.
const MOST_GROWTH: f64 = 1.05;

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

/// Parts of the names of tensors that compute images and sound.
const TOWERS: [&str; 6] = [
    "vision_tower",
    "multi_modal_projector",
    "embed_vision",
    "vision_embedder",
    "audio_tower",
    "embed_audio",
];

/// A checkpoint's tensors by their role.
#[derive(Default)]
struct Found<'a> {
    /// The tensors of the language model, by name without prefix.
    by_name: HashMap<String, Tensor<'a>>,
    /// The prefix in use, which messages about missing tensors need.
    prefix: Option<&'static str>,
    heads: Vec<Tensor<'a>>,
    /// The tensors of [`Weights::tower`].
    tower: HashMap<String, Tensor<'a>>,
    skipped_vision: usize,
    skipped_bytes: u64,
    unexpected: Vec<Tensor<'a>>,
}

impl<'a> Found<'a> {
    fn add(&mut self, tensor: Tensor<'a>) -> Result<(), WeightsError> {
        // Towers are recognized before the prefixes: its names contain `model.` and `layers.N.mlp` too.
        if tensor.name.split('.').any(|part| TOWERS.contains(&part)) {
            self.skipped_vision += 1;
            self.skipped_bytes += tensor.stored_bytes();
            self.tower.insert(name_in_tower(tensor.name), tensor);
            return Ok(());
        }
        if matches!(tensor.name, "lm_head.weight" | "language_model.lm_head.weight") {
            self.heads.push(tensor);
            return Ok(());
        }
        // Llama-2's checkpoints have the first, in each layer, and GGUF files of Llama 3 the second.
        if tensor.name.ends_with(".rotary_emb.inv_freq") || tensor.name == "rope_freqs.weight" {
            return Ok(());
        }
        let prefixes = ["language_model.model.", "model.language_model.", "model."];
        let stripped = prefixes.iter().find_map(|p| tensor.name.strip_prefix(p).map(|name| (*p, name)));
        let Some((prefix, name)) = stripped else {
            self.unexpected.push(tensor);
            return Ok(());
        };
        self.prefix.get_or_insert(prefix);
        self.insert(name, tensor)
    }

    fn insert(&mut self, name: &str, tensor: Tensor<'a>) -> Result<(), WeightsError> {
        match self.by_name.insert(name.into(), tensor) {
            None => Ok(()),
            Some(other) => Err(WeightsError::Twice {
                file: tensor.file.into(),
                tensor: short(tensor.name),
                other: short(other.name),
            }),
        }
    }

    fn check(
        &mut self,
        checkpoint: &Checkpoint,
        ModelSpec { arch, tensors: specs, unused_tensors, .. }: &ModelSpec,
    ) -> Result<(), WeightsError> {
        if let Some(spec) = &specs.lm_head {
            for head in std::mem::take(&mut self.heads) {
                self.insert(&spec.stored_name(), head)?;
            }
        }
        let known: HashMap<String, &TensorSpec> =
            specs.iter().map(|spec| (spec.stored_name(), spec)).collect();
        let mut missing = specs.iter().filter(|spec| !self.by_name.contains_key(&spec.stored_name()));
        if let Some(first) = missing.next() {
            let prefix = if first.role == Role::Head { "" } else { self.prefix.unwrap_or("model.") };
            return Err(WeightsError::Missing {
                location: checkpoint.location().into(),
                first: format!("{prefix}{}", first.stored_name()),
                more: missing.count(),
                expected: first.shape.clone(),
            });
        }
        for spec in specs.iter() {
            let tensor = &self.by_name[&spec.stored_name()];
            if tensor.shape != spec.shape {
                return Err(WeightsError::Shape {
                    file: tensor.file.to_string(),
                    tensor: tensor.name.to_string(),
                    found: tensor.shape.to_vec(),
                    expected: spec.shape.clone(),
                    meaning: spec.shape_in_config,
                });
            }
            tensor.scheme()?;
        }

        let unknown = self.by_name.iter().filter(|(name, tensor)| {
            let is_known = known.contains_key(*name) || unused_tensors.contains(*name);
            !is_known && !is_zero_bias(checkpoint, &known, name, tensor)
        });
        self.unexpected.extend(unknown.map(|(_, tensor)| *tensor));
        // The list is sorted, so that messages do not depend on the map's order.
        self.unexpected.sort_by_key(|t| (t.file, t.name));
        if let Some(tensor) = self.unexpected.first() {
            let (file, name, more) = (tensor.file.into(), short(tensor.name), self.unexpected.len() - 1);
            let num_hidden_layers = specs.layers.len();
            return Err(match layer_of(tensor.name) {
                Some(layer) if layer >= num_hidden_layers => {
                    WeightsError::Layer { file, tensor: name, more, num_hidden_layers }
                }
                _ => WeightsError::Unexpected { file, tensor: name, more, arch: arch.name },
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

/// Whether a tensor of a GPTQ checkpoint is a bias of zeros for the product of a matrix.
fn is_zero_bias(
    checkpoint: &Checkpoint,
    known: &HashMap<String, &TensorSpec>,
    name: &str,
    tensor: &Tensor<'_>,
) -> bool {
    let matrix = name.strip_suffix(".bias").and_then(|name| known.get(&format!("{name}.weight")));
    let has_its_shape =
        |spec: &&TensorSpec| matches!(spec.role, Role::Projection(_)) && tensor.shape == &spec.shape[..1];
    checkpoint.format() == Format::Gptq
        && matrix.is_some_and(has_its_shape)
        && checkpoint.read_f32(tensor).is_ok_and(|values| values.iter().all(|value| *value == 0.0))
}

/// The name of a tower's tensor in the first checkpoints, without `vision_model.`. Later ones begin with `model.`, and the
/// latest have no `vision_model.`.
fn name_in_tower(name: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    name.replacen("vision_tower.vision_model.", "vision_tower.", 1)
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
