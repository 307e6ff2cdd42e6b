//! `unicorn-lab synth`: writes native checkpoints of published shapes with random weights, for use without real ones.
//!
//! Integers are uniform. Each matrix has one scale, chosen so that inputs of unit variance give products of unit
//! variance, and all factors of norms are 1. So activations stay finite through any number of layers: the output of every
//! sublayer is normed, or added to a sum that grows with the square root of their number.
//! Tokenizer and template are the demo model's. The manifest says that the weights are random, and a load warns of it.

use half::{bf16, f16};
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::json;

use super::args;
use crate::checkpoint::{FileWriter, Form, NativeWriter, NewTensor, Synthetic};
use crate::cli::args::{Class, Schemes, Target};
use crate::cli::error::Error;
use crate::cli::load;
use crate::cli::progress::Bar;
use crate::cli::terminal::{bytes, print};
use crate::model::spec::{ModelSpec, NormWeight};
use crate::model::tensors::{Role, TensorSpec};
use crate::tensor::{Bits, DType, Scheme, TILE_ROWS};

/// Tiles of a piece that one core fills, and pieces made at once.
const PIECE_TILES: usize = 16;
const PIECES: usize = 16;

pub fn synth(args: &args::Synth) -> Result<(), Error> {
    let shape = args.shape;
    let config = shape.spec();
    let synthetic = Synthetic { shape: shape.name.to_string(), seed: args.seed };
    let job = json!({
        "synthetic": synthetic,
        "schemes": Class::ALL.map(|class| args.schemes.of(class).to_string()),
    });
    let mut writer = NativeWriter::open(&args.destination, &job)?;
    let config_json = shape.config_json();
    writer.copy("config.json", config_json.as_bytes())?;
    let demo = load::demo_files();
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let bytes = demo.read(name)?.expect("a file of the demo model");
        writer.copy(name, &bytes)?;
    }

    let files = files(&config, &args.schemes);
    let bar = Bar::bytes("writing");
    bar.set_total(files.iter().flat_map(|(_, tensors)| tensors).map(|(tensor, _)| tensor.bytes()).sum());
    let (mut done, mut index) = (0, 0u64);
    for (name, tensors) in files {
        let finished = writer.finished(&name).is_some();
        let described = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let mut file = if finished { None } else { Some(writer.create(&name, described)?) };
        for (tensor, element) in &tensors {
            if let Some(file) = &mut file {
                // The random numbers of a tensor depend on the seed and its index, so a resumed run writes the same
                // bytes.
                put(file, tensor, *element, args.seed, index, &mut |n| bar.set(done + n))?;
            }
            index += 1;
            done += tensor.bytes();
            match finished {
                true => bar.skip(tensor.bytes()),
                false => bar.set(done),
            }
        }
        if let Some(file) = file {
            writer.finish_file(file, json!(null))?;
        }
    }
    drop(bar);
    let json = serde_json::from_str(&config_json).expect("the config is JSON");
    let written =
        writer.finish(format!("random weights, seed {}", args.seed), Some(synthetic), false, json)?;
    print(&format!(
        "{}: {} of random weights in the shape of {}\n",
        args.destination.display(),
        bytes(written),
        shape.name
    ))
}

/// The files of a checkpoint, each with its tensors, and the elements of those that are not random: norms and biases.
fn files(config: &ModelSpec, schemes: &Schemes) -> Vec<(String, Vec<(NewTensor, f32)>)> {
    let tensor = |spec: &TensorSpec| {
        let form = match Class::of(spec).map(|class| schemes.of(class)) {
            None if spec.role == Role::KeptMatrix => Form::Packed(Scheme::Bf16),
            None => Form::Plain(DType::F32),
            Some(Target(scheme)) => Form::Packed(scheme.unwrap_or(Scheme::Bf16)),
        };
        let is_factor = match spec.role {
            Role::Norm => config.norm_weight == NormWeight::AsStored,
            role => role == Role::Factors,
        };
        let element = if is_factor { 1.0 } else { 0.0 };
        (NewTensor { name: spec.full_name(), shape: spec.shape.clone(), form }, element)
    };
    let files = config.tensors.files().into_iter();
    files.map(|(name, specs)| (name, specs.into_iter().map(tensor).collect())).collect()
}

fn put(
    file: &mut FileWriter,
    tensor: &NewTensor,
    element: f32,
    seed: u64,
    index: u64,
    each: &mut dyn FnMut(u64),
) -> Result<(), Error> {
    let (Form::Packed(scheme), &[rows, cols]) = (tensor.form, &tensor.shape[..]) else {
        let count = tensor.bytes() as usize / size_of::<f32>();
        return Ok(file.put(&element.to_le_bytes().repeat(count))?);
    };
    let (tiles, tile_bytes) = (rows.div_ceil(TILE_ROWS), scheme.tile_bytes(cols));
    let deviation = 1.0 / (cols as f32).sqrt();
    let mut done = 0;
    let mut pieces = vec![Vec::new(); PIECES];
    for first in (0..tiles).step_by(PIECE_TILES * PIECES) {
        pieces.par_iter_mut().enumerate().for_each(|(i, piece)| {
            let first = (first + i * PIECE_TILES).min(tiles);
            let count = PIECE_TILES.min(tiles - first);
            piece.resize(count * tile_bytes, 0);
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(index << 32 | first as u64);
            draw(scheme, deviation, &mut rng, piece);
        });
        for piece in &pieces {
            file.put(piece)?;
            done += piece.len() as u64;
        }
        each(done);
    }
    let scale = match scheme {
        Scheme::Int { bits: Bits::Four, .. } => deviation / INT4_DEVIATION,
        _ => deviation / INT8_DEVIATION,
    };
    let scales = f16::from_f32(scale).to_le_bytes().repeat(scheme.scale_bytes(rows, cols) as usize / 2);
    Ok(file.put(&scales)?)
}

/// Standard deviations of uniform integers from -8 to 7, and from -128 to 127: sqrt((n^2 - 1) / 12).
const INT4_DEVIATION: f32 = 4.609_772;
const INT8_DEVIATION: f32 = 73.9;

/// Fills blocks with weights of the given standard deviation.
fn draw(scheme: Scheme, deviation: f32, rng: &mut ChaCha8Rng, blocks: &mut [u8]) {
    // Uniform values of standard deviation d reach d * sqrt(3).
    let reach = deviation * 3f32.sqrt();
    match scheme {
        // Any byte is a valid pair of nibbles, and a valid int8.
        Scheme::Int8Row | Scheme::Int { .. } => rng.fill_bytes(blocks),
        Scheme::Bf16 => blocks.chunks_exact_mut(2).for_each(|b| {
            b.copy_from_slice(&bf16::from_f32(rng.random_range(-reach..reach)).to_le_bytes());
        }),
        Scheme::F16 => blocks.chunks_exact_mut(2).for_each(|b| {
            b.copy_from_slice(&f16::from_f32(rng.random_range(-reach..reach)).to_le_bytes());
        }),
        Scheme::F32 => blocks.chunks_exact_mut(4).for_each(|b| {
            b.copy_from_slice(&rng.random_range(-reach..reach).to_le_bytes());
        }),
    }
}
