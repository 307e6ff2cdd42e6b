//! `unicorn quantize`: converts any readable checkpoint to a native one.
//!
//! It converts layer by layer, with only a piece of one tensor in memory. After an interruption, the next run continues
//! where the first one stopped. A vision tower keeps its values: it is small, and a load makes of them what it computes
//! with.

use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;
use sha2::{Digest, Sha256};

use super::args::{self, Class, RoundingMethod, Target};
use super::error::Error;
use super::eval::{divergence, predict, read_text, text_ids, windows};
use super::load::{self, Watch};
use super::progress::Bar;
use super::terminal::{bytes, print};
use crate::checkpoint::{
    Checkpoint, CheckpointError, Form, Manifest, ModelFiles, NativeWriter, NewTensor, PACKING_FIELDS, Tensor,
};
use crate::config::Config;
use crate::device::resident_bytes;
use crate::model::arch;
use crate::model::tensors::{Inputs, Role, TensorSpec};
use crate::model::twin;
use crate::model::vision::VisionTensor;
use crate::quantize::{Importance, Loss, Rounding, write_tensor};
use crate::tensor::{Bits, DType, QuantizeMode, Scheme, VisionMode};

/// Maximum number of tokens of a text for `--eval`. With a vocabulary of 262,208, their logits take 2 GB of disk.
const EVAL_TOKENS: usize = 2048;
/// Maximum number of tokens of a text for `--calibrate`.
const CALIBRATION_TOKENS: usize = 16384;
/// The file with the vision tower.
const VISION_FILE: &str = "vision.safetensors";
/// Files that are copied if they exist.
const SMALL_FILES: [&str; 8] = [
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

pub fn quantize(config: &Config, args: &args::Quantize) -> Result<(), Error> {
    let since = Instant::now();
    let files = load::files_at(Path::new(&args.source), &config.model)?;
    let source = load::Source::open(&files)?;
    let (shape, checkpoint, weights) = (&source.config, &source.checkpoint, source.weights()?);
    if args.calibrate.is_none() && args.eval.is_none() {
        // With these options, the model is loaded, and the load warns about defects.
        weights.warn_of_defects(checkpoint);
    }
    // Missing texts or a missing device are reported before minutes of work.
    let text = |path: &Option<PathBuf>| {
        let Some(path) = path else { return Ok(None) };
        Ok::<_, Error>(Some((read_text(path)?, path.clone())))
    };
    let (calibration, eval) = (text(&args.calibrate)?, text(&args.eval)?);
    if calibration.is_some() || eval.is_some() {
        load::find_device(config)?;
    }
    let tower = source.tower(&weights).unwrap_or_else(|why| {
        tracing::warn!("the vision tower is left out, and the written model will refuse images: {why}");
        None
    });
    let mut job = json!({
        "source": files.location(),
        "files": checkpoint.fingerprint(),
        "schemes": Class::ALL.map(|class| args.schemes.of(class).to_string()),
        "rounding": format!("{:?}", args.rounding),
        "calibration": calibration.as_ref().map(|(text, _)| format!("{:x}", Sha256::digest(text))),
    });
    if tower.is_some() {
        // An earlier result without the tower is that of another job.
        job["tower"] = json!(VISION_FILE);
    }
    let evaluate = || match &eval {
        None => Ok(()),
        Some((text, path)) => {
            // Both models use the same context, because the longest context that fits could differ between them.
            let context = config.engine.context.unwrap_or(usize::MAX).min(EVAL_TOKENS + 1);
            let context = context.min(shape.max_position_embeddings);
            if let Some(wanted) = config.engine.context.filter(|wanted| *wanted > context) {
                tracing::warn!(
                    "--context is {wanted}, but the text is read in windows of at most {context} tokens"
                );
            }
            print(&compare(config, &files, &args.destination, context, text, path)?)
        }
    };
    // A repeated run does not convert again; it only does the steps that are missing.
    if NativeWriter::is_result(&args.destination, &job) {
        let lacks_values = lacks_layer_values(&args.destination)?;
        if eval.is_some() || lacks_values {
            print(&format!("{}: already converted by this command\n", args.destination.display()))?;
            if lacks_values {
                add_layer_values(&args.destination)?;
            }
            return evaluate();
        }
    }
    // Checks the folder before the source is read.
    let writer = NativeWriter::open(&args.destination, &job)?;
    let moments = match &calibration {
        Some((text, path)) => calibrate(config, &files, text, path)?,
        None => Vec::new(),
    };
    let language_model = shape.tensors.as_ref().zip(weights.tensors.as_ref());
    let mut contents = Vec::new();
    for (name, tensors) in language_model.files() {
        let sources = tensors.into_iter().map(|(spec, tensor)| {
            let importance = match (spec.role, spec.layer) {
                (Role::Projection(group), Some(layer)) => moments.get(layer).map(|inputs| Importance {
                    weights: &inputs[group],
                    rows: spec.rows() / spec.matrices(),
                }),
                _ => None,
            };
            Source::of_language_model(spec, tensor, &args.schemes, importance)
        });
        contents.push((name, sources.collect::<Result<Vec<_>, _>>()?));
    }
    let mut tower_bytes = 0;
    if let Some((spec, tensors)) = &tower {
        let specs = spec.tensors();
        let sources = specs.iter().zip(tensors).map(|(spec, tensor)| Source::of_tower(spec, tensor));
        let sources = sources.collect::<Result<Vec<_>, _>>()?;
        tower_bytes = sources.iter().map(|source| source.written().bytes()).sum();
        contents.push((VISION_FILE.to_owned(), sources));
    }
    let bar = Bar::bytes("quantizing");
    bar.set_total(contents.iter().flat_map(|(_, sources)| sources).map(|s| s.tensor.stored_bytes()).sum());
    let mut conversion = Conversion { writer, checkpoint, args, losses: Default::default(), done: 0, bar };
    let model_config = conversion.copy_small_files(&files)?;
    for (name, sources) in &contents {
        conversion.file(name, sources)?;
    }
    let Conversion { writer, losses, bar, .. } = conversion;
    drop(bar);
    let (location, synthetic) = (checkpoint.location().to_string(), checkpoint.synthetic().cloned());
    let written = writer.finish(location, synthetic, checkpoint.norms_hold_one(), model_config)?;

    add_layer_values(&args.destination)?;
    let parameters: usize = weights.tensors.iter().map(|t| t.num_elements()).sum();
    let seconds = since.elapsed().as_secs_f64();
    let mut text = format!(
        "{}: {}, {:.2} bits per weight, in {seconds:.1} s ({:.1} s per billion weights)\n",
        args.destination.display(),
        bytes(written),
        (written - tower_bytes) as f64 * 8.0 / parameters as f64,
        seconds / (parameters as f64 / 1e9),
    );
    for (class, loss) in Class::ALL.into_iter().zip(losses) {
        let scheme = args.schemes.of(class).to_string();
        let error = match loss.total > 0.0 {
            true => format!("relative error {:.5}", loss.relative()),
            false => "without loss".into(),
        };
        text.push_str(&format!("  {class:<13} {scheme:<10} {error}\n"));
    }
    if tower.is_some() {
        let (class, scheme) = ("vision tower", Target(None).to_string());
        text.push_str(&format!("  {class:<13} {scheme:<10} without loss, {}\n", bytes(tower_bytes)));
    }
    if let Some(mixture) = shape.mixture.filter(|_| calibration.is_some()) {
        let (without, all) = experts_without_samples(&moments, mixture.experts.count);
        text.push_str(&match without {
            0 => format!("  experts       the text has tokens of all {all}\n"),
            _ => format!("  experts       the text has no token of {without} of {all}: rounded to nearest\n"),
        });
    }
    if let (_, Some(peak)) = resident_bytes() {
        text.push_str(&format!("  memory        at most {} resident\n", bytes(peak)));
    }
    print(&text)?;
    evaluate()
}

fn lacks_layer_values(folder: &Path) -> Result<bool, Error> {
    let files = arch::open_files(folder)?;
    let manifest = Manifest::read(&files)?;
    Ok(manifest.is_some_and(|manifest| matches!(manifest.layer_values(&files), Ok(None))))
}

/// Adds reference outputs of the layers to a finished folder; a server tests its device with them. The weights are read
/// again, from the files that a server reads.
fn add_layer_values(folder: &Path) -> Result<(), Error> {
    let files = arch::open_files(folder)?;
    let source = load::Source::open(&files)?;
    let weights = source.weights()?;
    let bar = Bar::bytes("computing layers");
    let layers = weights.tensors.layers.iter();
    bar.set_total(layers.flat_map(|layer| layer.projections.iter()).map(|t| t.stored_bytes()).sum());
    let values =
        twin::layer_values(&source.checkpoint, &weights, &source.config, &mut |bytes| bar.advance(bytes))?;
    Ok(NativeWriter::add_layer_values(folder, &values)?)
}

/// Runs a text through the source model on the device. Returns, for each layer, the sums of squares of the inputs of
/// its matrices.
fn calibrate(
    config: &Config,
    source: &ModelFiles,
    text: &str,
    path: &Path,
) -> Result<Vec<Inputs<Vec<f32>>>, Error> {
    let mut model = load::model(source, &as_stored(config), Watch::Activations)?;
    let mut ids = text_ids(&model, text, path)?;
    ids.truncate(CALIBRATION_TOKENS);
    let windows = windows(&model, &ids)?;
    let bar = Bar::of("tokens", "calibrating", windows.iter().map(|window| window.len() as u64).sum());
    let mut done = 0;
    for tokens in windows {
        model.runner.observe(&tokens, &mut |n| bar.set((done + n) as u64))?;
        done += tokens.len();
    }
    Ok(model.runner.take_moments()?)
}

/// (The number of experts that no token chose, the number of all experts) of all layers. `count` is the number of a layer.
fn experts_without_samples(moments: &[Inputs<Vec<f32>>], count: usize) -> (usize, usize) {
    let layers = moments.iter().filter_map(|inputs| inputs.expert_gate_up.as_ref());
    let experts = layers.flat_map(|sums| sums.chunks_exact(sums.len() / count));
    experts.fold((0, 0), |(without, all), sums| {
        (without + usize::from(sums.iter().all(|sum| *sum == 0.0)), all + 1)
    })
}

/// A copy of the configuration that loads a checkpoint for texts, without quantizing it.
fn as_stored(config: &Config) -> Config {
    let mut config = config.clone();
    config.model.quantize = QuantizeMode::None;
    config.model.vision = VisionMode::Off;
    config
}

/// The loss of the conversion on a text: both perplexities, and the mean KL divergence from the source's distributions.
/// The two models are loaded one after the other, with the same context. The source's logits are kept in an unnamed
/// file until then.
fn compare(
    config: &Config,
    source: &ModelFiles,
    destination: &Path,
    context: usize,
    text: &str,
    path: &Path,
) -> Result<String, Error> {
    let mut as_stored = as_stored(config);
    as_stored.engine.context = Some(context);
    let failed = |error| Error::File { path: destination.into(), error };
    let mut rows = BufWriter::new(tempfile::tempfile_in(destination).map_err(failed)?);
    let mut model = load::model(source, &as_stored, Watch::Nothing)?;
    let mut ids = text_ids(&model, text, path)?;
    ids.truncate(EVAL_TOKENS);
    let windows = windows(&model, &ids)?;
    let tokens: usize = windows.iter().map(|window| window.len() - 1).sum();
    let vocab = model.vocab_size();
    let bar = Bar::of("tokens", "evaluating", 2 * tokens as u64);
    let mut written = Ok(());
    let nll_before = predict(&mut model, &windows, &bar, &mut |row| {
        if written.is_ok() {
            written = rows.write_all(bytemuck::cast_slice(row));
        }
    })?;
    drop(model);
    written.map_err(failed)?;
    let mut rows = rows.into_inner().map_err(|e| failed(e.into_error()))?;
    rows.rewind().map_err(failed)?;
    let mut rows = BufReader::new(rows);

    let files = arch::open_files(destination)?;
    let mut model = load::model(&files, &as_stored, Watch::Nothing)?;
    let (mut kl, mut read) = (0f64, Ok(()));
    let mut before = vec![0f32; vocab];
    let nll_after = predict(&mut model, &windows, &bar, &mut |row| {
        if read.is_ok() {
            read = rows.read_exact(bytemuck::cast_slice_mut(&mut before));
            kl += divergence(&before, row);
        }
    })?;
    read.map_err(failed)?;
    let n = tokens as f64;
    let [before, after] = [nll_before, nll_after].map(|nll| (nll / n).exp());
    Ok(format!(
        "  evaluation    perplexity {before:.4} -> {after:.4}, mean KL divergence {:.6} nats ({} tokens of {})\n",
        kl / n,
        tokens,
        path.display()
    ))
}

/// A tensor to convert.
struct Source<'a> {
    /// Its name in the written file.
    name: String,
    tensor: &'a Tensor<'a>,
    form: Form,
    /// The class of the matrices to which its loss is added.
    class: Option<Class>,
    /// `None` = the errors of all columns count the same.
    importance: Option<Importance<'a>>,
}

impl<'a> Source<'a> {
    fn of_language_model(
        spec: &TensorSpec,
        tensor: &'a Tensor<'a>,
        schemes: &args::Schemes,
        importance: Option<Importance<'a>>,
    ) -> Result<Source<'a>, CheckpointError> {
        let class = Class::of(spec);
        let form = match class.map(|class| schemes.of(class)) {
            None if spec.role != Role::KeptMatrix => Form::Plain(DType::F32),
            Some(Target(Some(scheme))) => Form::Packed(scheme),
            None | Some(Target(None)) => Form::Packed(tensor.scheme()?),
        };
        Ok(Source { name: spec.full_name(), tensor, form, class, importance })
    }

    /// A tensor of the vision tower, whose values are kept.
    fn of_tower(spec: &VisionTensor, tensor: &'a Tensor<'a>) -> Result<Source<'a>, CheckpointError> {
        let scheme = tensor.scheme()?;
        let form = match scheme.dtype() {
            Some(dtype) => Form::Plain(dtype),
            None if tensor.shape.len() > 1 => Form::Packed(scheme),
            None => Form::Plain(DType::F32),
        };
        Ok(Source { name: format!("model.{}", spec.name), tensor, form, class: None, importance: None })
    }

    /// The tensor in the written file.
    fn written(&self) -> NewTensor {
        NewTensor { name: self.name.clone(), shape: self.tensor.shape.to_vec(), form: self.form }
    }
}

struct Conversion<'a> {
    writer: NativeWriter,
    checkpoint: &'a Checkpoint,
    args: &'a args::Quantize,
    /// Losses by class, in the order of [`Class::ALL`].
    losses: [Loss; 3],
    /// Bytes of the source that are converted already.
    done: u64,
    bar: Bar,
}

impl Conversion<'_> {
    /// Copies configs, tokenizer and template; returns the config.
    fn copy_small_files(&mut self, files: &ModelFiles) -> Result<serde_json::Value, Error> {
        for name in SMALL_FILES {
            if let Some(bytes) = files.read(name)? {
                self.writer.copy(name, &bytes)?;
            }
        }
        let mut config = (*files.config()?.expect("a config that was loaded")).clone();
        // They describe the source, and not this checkpoint.
        for level in ["", "/text_config"] {
            if let Some(fields) = config.pointer_mut(level).and_then(serde_json::Value::as_object_mut) {
                for name in PACKING_FIELDS {
                    fields.shift_remove(name);
                }
            }
        }
        self.writer.copy("config.json", format!("{config:#}\n").as_bytes())?;
        Ok(config)
    }

    /// Writes one file, or keeps the file that an earlier run has finished.
    fn file(&mut self, name: &str, sources: &[Source]) -> Result<(), Error> {
        if let Some(note) = self.writer.finished(name) {
            let losses: [(f64, f64); 3] = serde_json::from_value(note.clone()).map_err(|e| {
                Error::Argument(format!("{name}: cannot read the notes of the earlier run: {e}"))
            })?;
            for (sum, (error, total)) in self.losses.iter_mut().zip(losses) {
                *sum = *sum + Loss { error, total };
            }
            let finished = sources.iter().map(|s| s.tensor.stored_bytes()).sum::<u64>();
            self.done += finished;
            self.bar.skip(finished);
            return Ok(());
        }
        let mut writer = self.writer.create(name, sources.iter().map(Source::written).collect())?;
        let mut losses = [Loss::default(); 3];
        for source in sources {
            let (done, row_bytes) = (self.done, source.tensor.stored_bytes() / source.tensor.rows() as u64);
            let rounding = match (self.args.rounding, source.form) {
                // Only int4 benefits from a search; int8 rows are rounded to nearest.
                (RoundingMethod::Search, Form::Packed(Scheme::Int { bits: Bits::Four, .. })) => {
                    Rounding::Search { importance: source.importance }
                }
                _ => Rounding::Nearest,
            };
            let loss = write_tensor(&mut writer, source.tensor, source.form, rounding, &mut |rows| {
                self.bar.set(done + rows as u64 * row_bytes);
            })?;
            if let Some(class) = source.class {
                losses[class as usize] = losses[class as usize] + loss;
            }
            self.done += source.tensor.stored_bytes();
            self.checkpoint.release(source.tensor);
        }
        let note = losses.map(|loss| (loss.error, loss.total));
        self.writer.finish_file(writer, json!(note))?;
        for (sum, loss) in self.losses.iter_mut().zip(losses) {
            *sum = *sum + loss;
        }
        Ok(())
    }
}
