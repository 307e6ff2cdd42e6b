//! What the files of a model say about it, for lists of models.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::checkpoint::ModelFiles;
use crate::cli::error::Error;
use crate::cli::load::{Source, Texts};
use crate::config::Config;
use crate::library::ModelCard;

pub fn card(files: &ModelFiles, texts: &Texts, config: &Config) -> Result<ModelCard, Error> {
    let source = Source::open(files)?;
    let options = &config.model;
    let tower = source.tower_scheme(options.vision, options.precision, options.draft.is_some())?;
    let (weights, config) = (source.weights()?, &source.config);
    let mut by_scheme: BTreeMap<String, u64> = BTreeMap::new();
    for tensor in weights.tensors.iter() {
        *by_scheme.entry(tensor.scheme()?.to_string()).or_default() += tensor.num_elements() as u64;
    }
    let fingerprint = source.checkpoint.fingerprint();
    let digest = Sha256::digest(format!("{fingerprint:?}"));
    Ok(ModelCard {
        format: source.checkpoint.format().to_string().to_lowercase(),
        architecture: config.arch.name.to_owned(),
        parameters: by_scheme.values().sum(),
        quantization: by_scheme
            .into_iter()
            .max_by_key(|(_, weights)| *weights)
            .map_or(String::new(), |(scheme, _)| scheme),
        bytes: source.checkpoint.total_bytes(),
        modified: fingerprint.iter().filter_map(|(.., modified)| *modified).max(),
        digest: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        context: config.max_position_embeddings,
        hidden_size: config.hidden_size,
        layers: config.layers.len(),
        vocab_size: config.vocab_size,
        template: texts.template.source().to_owned(),
        can_think: texts.tokenizer.thought_tokens().is_some(),
        takes_images: tower.is_some() && texts.tokenizer.image_tokens().is_some(),
    })
}
