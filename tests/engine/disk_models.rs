//! Conversations on disk with models on the device: what another load resumes has the bits of a run without a disk.

use std::path::Path;

use unicorn::engine::{
    CacheSalt, DiskConfig, DiskStats, Engine, EngineConfig, Event, PromptImage, ReadRule, Request,
};
use unicorn::image::Rgb;
use unicorn::kv_disk::KvStore;
use unicorn::model::load::LoadOptions;
use unicorn::model::{Runner, SamplingParams};
use unicorn::tensor::VisionMode;

use crate::support::fake_runner::HANG;
use crate::support::goldens;
use crate::support::{data, device};

/// The ids of an answer, and the bits of the log probabilities of each and of the likeliest ids.
type Bits = (Vec<u32>, Vec<u32>);

/// Starts an engine on `runner`, gives it requests one after another, and ends it. Returns each answer with the number of
/// tokens that were cached.
fn answers(
    runner: Box<dyn Runner>,
    folder: &Path,
    requests: Vec<Request>,
) -> (Vec<(Bits, usize)>, DiskStats) {
    let store = KvStore::open(folder, 1 << 30).expect("opens");
    let disk = Some(DiskConfig { store: store.clone(), model: [1; 32], reads: ReadRule::Always });
    let engine = Engine::start(runner, EngineConfig { disk, ..EngineConfig::default() });
    let mut all = Vec::new();
    for request in requests {
        let mut stream = engine.submit(request).expect("accepted");
        let (mut ids, mut bits, mut cached) = (Vec::new(), Vec::new(), 0);
        while let Some(event) = stream.blocking_next() {
            match event {
                Event::Token { id, logprobs, timings, .. } => {
                    let logprobs = logprobs.expect("asked for");
                    let values = [logprobs.drawn].into_iter().chain(logprobs.top.iter().map(|top| top.1));
                    bits.extend(values.map(f32::to_bits));
                    ids.push(id);
                    cached = timings.cached_n;
                }
                Event::Finished { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        all.push(((ids, bits), cached));
    }
    let stats = engine.stats().disk;
    engine.drain();
    assert!(engine.join(HANG) && store.flush(HANG), "the engine ends, and everything is written");
    (all, stats)
}

fn request(ids: &[u32], images: &[PromptImage], salt: &str) -> Request {
    let sampling = SamplingParams { logprobs: Some(3), ..SamplingParams::GREEDY };
    let salt = CacheSalt::new(salt.as_bytes());
    let prompt = Request::new(ids.to_vec());
    Request {
        images: images.to_vec(),
        max_tokens: Some(12),
        sampling: sampling.into(),
        cache_salt: salt,
        ..prompt
    }
}

/// Computes a turn and the next one, in an engine of its own each. Under another salt, nothing is cached.
fn check(what: &str, load: impl Fn() -> Box<dyn Runner>, ids: Vec<u32>, images: &[PromptImage]) {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().join("kv");
    let vocab = load().limits().vocab_size as u32;
    let (first, _) = answers(load(), &folder, vec![request(&ids, images, "a")]);
    let ((answer, _), _) = &first[0];
    let mut next = [&ids[..], answer].concat();
    next.extend((0..30).map(|i| (i * 11 + 5) % vocab));
    let asked = ["b", "a"].map(|salt| request(&next, images, salt));
    let (both, stats) = answers(load(), &folder, asked.to_vec());
    let [(computed, nothing), (resumed, cached)] = &both[..] else { unreachable!("two answers") };
    assert_eq!((resumed, *nothing), (computed, 0), "{what}");
    // All whole blocks before the last id of the answer, which was drawn and not computed.
    assert_eq!(*cached, (ids.len() + answer.len() - 1) / 16 * 16, "{what}");
    assert_eq!((stats.hits, stats.failed_reads), (1, 0), "{what}: {stats:?}");
}

#[test]
fn a_resumed_text_has_the_bits_of_a_computed_one() {
    let options = LoadOptions { sequences: 2, max_context: Some(512), ..LoadOptions::default() };
    let models = [
        ("a model with windows", "gemma3/tiny-a"),
        ("a model with full attention", "families/tiny-llama"),
        ("a mixture", "families/tiny-qwen3-moe"),
        ("layers with the keys of others", "families/tiny-gemma3n"),
    ];
    for (what, name) in models {
        let load = || -> Box<dyn Runner> { Box::new(goldens::load(&data(name), &options)) };
        check(what, load, (0..203).map(|i| (i * 7 + 3) % 250).collect(), &[]);
    }
}

#[test]
fn a_resumed_text_of_a_model_with_a_draft_has_the_same_bits() {
    let options = LoadOptions { sequences: 2, max_context: Some(256), ..LoadOptions::default() };
    let load = || -> Box<dyn Runner> { Box::new(goldens::drafted(&device(), &options)) };
    check("a draft model", load, (0..150).map(|i| (i * 7 + 3) % 250).collect(), &[]);
}

#[test]
fn a_resumed_text_with_images_has_the_bits_of_a_computed_one() {
    let folder = data("gemma3-vision/vis-a");
    let goldens = goldens::Goldens::open(&folder);
    let pixels = goldens::Goldens::read(&folder.join("images.safetensors"));
    let options = LoadOptions {
        sequences: 2,
        max_context: Some(512),
        vision: VisionMode::On,
        ..LoadOptions::default()
    };
    let tokens = goldens::load(&folder, &options).limits().images.expect("a tower").tokens;
    let ids = goldens.tokens("tokens.two");
    let types = goldens.tokens("token_type_ids.two");
    let starts = (0..ids.len()).filter(|i| types[*i] == 1 && (*i == 0 || types[*i - 1] == 0));
    let images: Vec<PromptImage> = starts
        .zip(["rgb", "photo420"])
        .map(|(start, name)| {
            let pixels: Vec<u8> = pixels.view(&format!("u8.{name}"));
            let hash = Rgb::new(112, 112, pixels.clone()).sha256();
            PromptImage { positions: start..start + tokens, hash, size: [112; 2], pixels: pixels.into() }
        })
        .collect();
    let load = || -> Box<dyn Runner> { Box::new(goldens::load(&folder, &options)) };
    check("images", load, ids, &images);
}
