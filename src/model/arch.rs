//! The architectures: each is a folder of this module that describes its models as data ([`ModelSpec`]).
//!
//! To add one, write its folder and list it in [`ARCHS`].

use std::path::Path;

use serde_json::{Map, Value};

use super::config::{ConfigError, GenerationConfig, Level, union};
use super::spec::{Arch, ModelSpec, Shape};
use super::vision::VisionSpec;
use super::{gemma3, gemma3n, gemma4, llama, qwen2, qwen3, qwen3_moe};
use crate::checkpoint::gguf::GgufArch;
use crate::checkpoint::{CheckpointError, ModelFiles, parse_config, short};

const CONFIG_FILE: &str = "config.json";
const GENERATION_CONFIG_FILE: &str = "generation_config.json";
const PREPROCESSOR_CONFIG_FILE: &str = "preprocessor_config.json";
const PROCESSOR_CONFIG_FILE: &str = "processor_config.json";

/// All architectures.
static ARCHS: [&Arch; 7] = [
    &gemma3::ARCH,
    &gemma3n::ARCH,
    &gemma4::ARCH,
    &llama::ARCH,
    &qwen2::ARCH,
    &qwen3::ARCH,
    &qwen3_moe::ARCH,
];
/// How GGUF files of each architecture are read.
static GGUF_ARCHS: [&GgufArch; ARCHS.len()] = {
    let mut all = [ARCHS[0].gguf; ARCHS.len()];
    let mut i = 1;
    while i < all.len() {
        all[i] = ARCHS[i].gguf;
        i += 1;
    }
    all
};

/// Opens the files of a model, as [`ModelFiles::open`].
pub fn open_files(path: &Path) -> Result<ModelFiles, CheckpointError> {
    ModelFiles::open(path, &GGUF_ARCHS)
}

/// The architectures of GGUF files.
pub fn gguf_archs() -> &'static [&'static GgufArch] {
    &GGUF_ARCHS
}

/// Reads `config.json` and, if there is one, `generation_config.json`. The end tokens of both end an answer.
pub fn load(files: &ModelFiles) -> Result<(ModelSpec, GenerationConfig), ConfigError> {
    let Some(config) = files.config()? else {
        let problem =
            format!("holds no {CONFIG_FILE}; give the original model's {CONFIG_FILE} with --model-config");
        return Err(ConfigError::File { file: files.location(), problem });
    };
    let mut spec = read(&config, &files.display(CONFIG_FILE))?;
    spec.vision = match (files.tower_problem()?, files.tower(), spec.vision) {
        (Some(problem), ..) => Err(problem.to_string()),
        (None, Some(file), Err(problem)) => Err(format!("{}: {problem}", file.display())),
        (.., vision) => vision,
    };
    if let Ok(Some(tower)) = &spec.vision
        && let Err(problem) = check_processor(files, tower)
    {
        spec.vision = Err(problem.to_string());
    }
    let mut generation = GenerationConfig::default();
    if let Some(bytes) = files.read(GENERATION_CONFIG_FILE)? {
        let file = files.display(GENERATION_CONFIG_FILE);
        generation = GenerationConfig::from_json(&bytes, &file)?;
        let level = Level { file: &file, prefix: String::new(), object: &Map::new() };
        level.check_ids("eos_token_id", &generation.eos_token_ids, spec.vocab_size)?;
        level.check_ids("suppress_tokens", &generation.suppress_tokens, spec.vocab_size)?;
        spec.eos_token_ids = union([spec.eos_token_ids, generation.eos_token_ids.clone()]);
        spec.suppress_tokens = union([spec.suppress_tokens, generation.suppress_tokens.clone()]);
    }
    Ok((spec, generation))
}

/// Checks what the checkpoint says about the images that its tower gets. transformers 5 writes it to the file of all
/// processors.
fn check_processor(files: &ModelFiles, tower: &VisionSpec) -> Result<(), ConfigError> {
    for name in [PREPROCESSOR_CONFIG_FILE, PROCESSOR_CONFIG_FILE] {
        let Some(bytes) = files.read(name)? else { continue };
        let file = files.display(name);
        let config = parse_config(&bytes, &file)?;
        let root = Level::root(&config, &file)?;
        match name {
            PROCESSOR_CONFIG_FILE => {
                root.object("image_processor")?.map_or(Ok(()), |own| tower.check_processor(&own))?;
            }
            _ => tower.check_processor(&root)?,
        }
    }
    Ok(())
}

/// Reads a `config.json` of any architecture; messages call it `file_name`.
pub fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    let root = Level::root(config, file_name)?;
    let names: Vec<String> =
        ARCHS.iter().flat_map(|arch| arch.model_types).map(|name| format!("{name:?}")).collect();
    let expected = format!("expected {}", names.join(" or "));
    let Some(model_type) = root.text("model_type")? else {
        return Err(root.error("model_type", format!("is missing; {expected}")));
    };
    match ARCHS.iter().find(|arch| arch.model_types.contains(&model_type)) {
        Some(arch) => (arch.read)(config, file_name),
        None => {
            Err(root.error("model_type", format!("{:?} is not supported; {expected}", short(model_type))))
        }
    }
}

/// The names of the sizes that benchmarks measure by default, separated by commas.
pub fn measured_shapes() -> &'static str {
    ARCHS[0].measured
}

/// The name of a published model on the hub, for messages.
pub fn hub_example() -> &'static str {
    ARCHS[0].hub_example
}

/// Each short name, and the model of the hub that it means.
pub fn short_names() -> impl Iterator<Item = (&'static str, &'static str)> {
    ARCHS.iter().flat_map(|arch| arch.short_names.iter().copied())
}

/// The published sizes of all architectures.
pub fn shapes() -> impl Iterator<Item = Shape> {
    ARCHS.iter().flat_map(|arch| arch.shapes.iter().copied())
}

/// The published size with that name. The error lists all names.
pub fn shape(name: &str) -> Result<Shape, String> {
    shapes()
        .find(|shape| shape.name == name)
        .ok_or_else(|| format!("unknown shape {name:?}; expected one of {}", shape_names(", ")))
}

/// The names of the published sizes.
pub fn shape_names(separator: &str) -> String {
    shapes().map(|shape| shape.name).collect::<Vec<_>>().join(separator)
}
