//! Golden files, and the models and logits that are compared with them.

use std::path::Path;
use std::sync::Arc;

use unicorn::checkpoint::ModelFiles;
use unicorn::gpu::Device;
use unicorn::model::arch::open_files;
use unicorn::model::draft::{self, Drafted};
use unicorn::model::load::{LoadError, LoadOptions, Source};
use unicorn::model::model_runner::ModelRunner;

use super::driver::greedy;
use super::{data, device};

/// A golden file: tensors by name.
pub struct Goldens(Vec<u8>);

impl Goldens {
    pub fn open(folder: &Path) -> Goldens {
        Goldens::read(&folder.join("goldens.safetensors"))
    }

    pub fn read(file: &Path) -> Goldens {
        Goldens(std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display())))
    }

    pub fn view<T: bytemuck::AnyBitPattern>(&self, name: &str) -> Vec<T> {
        let file = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        tensor.data().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        let file = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).shape().to_vec()
    }

    pub fn has(&self, name: &str) -> bool {
        safetensors::SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }

    pub fn tokens(&self, name: &str) -> Vec<u32> {
        self.view::<i32>(name).into_iter().map(|t| t as u32).collect()
    }
}

/// The model in a folder, loaded on the tests' device.
pub fn load(folder: &Path, options: &LoadOptions) -> ModelRunner {
    load_on(&device(), folder, options)
}

/// The model in a folder, loaded on this device.
pub fn load_on(device: &Arc<Device>, folder: &Path, options: &LoadOptions) -> ModelRunner {
    let files = open_files(folder).unwrap();
    ModelRunner::load(device, &Source::open(&files).unwrap(), options, &mut |_| {}).unwrap()
}

/// tiny-a, with tiny-b as its draft model.
pub fn drafted(device: &Arc<Device>, options: &LoadOptions) -> Drafted {
    let [files, draft_model] =
        ["gemma3/tiny-a", "gemma3/tiny-b"].map(|folder| open_files(&data(folder)).unwrap());
    let [model, draft_model] = [&files, &draft_model].map(|files| Source::open(files).unwrap());
    let (model, draft_model) = draft::load(device, &model, &draft_model, options, &mut |_| {}).unwrap();
    Drafted::new(model, draft_model)
}

/// The model in these files, loaded on the tests' device.
pub fn load_files(files: &ModelFiles, options: &LoadOptions) -> Result<ModelRunner, LoadError> {
    ModelRunner::load(&device(), &Source::open(files).unwrap(), options, &mut |_| {})
}

/// The logits at every position, row after row: `[tokens, vocab]`.
pub fn all_logits(model: &mut ModelRunner, tokens: &[u32]) -> Vec<f32> {
    let vocab = model.config().vocab_size;
    let mut all = Vec::new();
    model
        .logits(tokens, &mut |first, rows| {
            assert_eq!(first * vocab, all.len(), "rows must come in order without gaps");
            all.extend_from_slice(rows);
        })
        .unwrap();
    assert_eq!(all.len(), tokens.len() * vocab);
    all
}

/// Checks the logits for three prompts, and the greedy tokens up to the first step whose margin is within twice the
/// bound. `of` is the prefix of the names of the golden results, `at` that of the positions of the two longer prompts.
#[track_caller]
pub fn check_prompts(model: &mut ModelRunner, goldens: &Goldens, of: &str, at: &str, bound: f32, what: &str) {
    let vocab = model.config().vocab_size;
    for prompt in ["short", "mid", "long"] {
        let tokens = goldens.tokens(&format!("tokens.{prompt}"));
        let rows: Vec<u32> = match prompt {
            "short" => (0..tokens.len() as u32).collect(),
            _ => goldens.tokens(&format!("{at}positions.{prompt}")),
        };
        let got = rows_at(&all_logits(model, &tokens), &rows, vocab);
        let difference = max_difference(&got, &goldens.view(&format!("{of}logits.{prompt}")));
        println!("{what} {prompt}: max |difference| {difference:.2e}");
        assert!(difference <= bound, "{what} {prompt}: {difference}");

        // The prompts were not chosen for large margins.
        let expected = goldens.tokens(&format!("{of}greedy.{prompt}.tokens"));
        let margins = goldens.view::<f32>(&format!("{of}greedy.{prompt}.margin"));
        let sure = margins.iter().position(|m| *m < 2.0 * bound).unwrap_or(expected.len());
        assert!(sure > 0, "{what} {prompt}: no step has a clear margin");
        assert_eq!(greedy(model, &tokens, sure, 256, &[]), expected[..sure], "{what} {prompt}");
    }
}

/// The rows of logits at these positions.
pub fn rows_at(all: &[f32], positions: &[u32], vocab: usize) -> Vec<f32> {
    positions.iter().flat_map(|&p| all[p as usize * vocab..][..vocab].to_vec()).collect()
}

/// The largest difference. A NaN counts as infinite.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let difference = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}
