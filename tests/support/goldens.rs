//! Golden files, and the models and logits that are compared with them.

use std::path::Path;
use std::sync::Arc;

use unicorn::checkpoint::ModelFiles;
use unicorn::gpu::Device;
use unicorn::model::arch::open_files;
use unicorn::model::draft::{self, Drafted};
use unicorn::model::load::{LoadError, LoadOptions, Source};
use unicorn::model::model_runner::ModelRunner;

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

/// The largest difference. A NaN counts as infinite.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let difference = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}
