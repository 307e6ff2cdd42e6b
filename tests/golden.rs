//! The engine against the oracle: logits of every reference checkpoint at every position, greedy tokens, and the
//! dequantized goldens of every quantization mode.
//!
//! Goldens come from transformers in float32 (see `tests/data/gemma3/README.md`). The bound on logits is 1e-3:
//! the weakest plausible mistakes (erf instead of tanh in GELU, the embedding's scale rounded to bf16) move them by
//! 2e-3 and more.

use std::path::Path;
use std::sync::Arc;

use unicorn::checkpoint::ModelFiles;
use unicorn::gpu::Device;
use unicorn::model::gemma3::{Gemma3, LoadOptions};
use unicorn::model::{Batch, BatchSequence, Input, Runner, Sampling, SamplingParams};
use unicorn::tensor::QuantizeMode;

use crate::support::{data, device};

const BOUND: f32 = 1e-3;
const VARIANTS: [&str; 3] = ["tiny-a", "tiny-b", "tiny-27b-ratio"];

/// A golden set: tensors by name.
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

pub fn load(folder: &Path, options: &LoadOptions) -> Gemma3 {
    let device: Arc<Device> = device();
    Gemma3::load(&device, &ModelFiles::open(folder).unwrap(), options, &mut |_| {}).unwrap()
}

pub fn all_logits(model: &mut Gemma3, tokens: &[u32]) -> Vec<f32> {
    let vocab = model.config().vocab_size;
    let mut all = Vec::new();
    model
        .logits(tokens, &mut |first, rows| {
            assert_eq!(first * vocab, all.len(), "rows come in order, none left out");
            all.extend_from_slice(rows);
        })
        .unwrap();
    assert_eq!(all.len(), tokens.len() * vocab);
    all
}

/// Runs a prompt through the `Runner` seam in chunks of `chunk`, then decodes greedily, feeding sampled ids on the
/// device and submitting each step before the last one's id is known.
pub fn greedy(model: &mut Gemma3, prompt: &[u32], count: usize, chunk: usize, slot: u32) -> Vec<u32> {
    let limits = model.limits();
    // Blocks in descending order: a table that is not the identity.
    let blocks: Vec<u32> = (0..limits.num_blocks as u32).rev().collect();
    let table = |end: usize| blocks[..end.div_ceil(limits.block_size)].to_vec();
    let sample = Sampling { requests: vec![(0, SamplingParams::GREEDY)] };
    let mut start = 0;
    let mut in_flight = None;
    let mut ids = Vec::new();
    for piece in prompt.chunks(chunk) {
        let end = start + piece.len();
        let input = Input::Ids(piece.to_vec());
        let sequence = BatchSequence { slot, start, input, block_table: table(end) };
        let last = end == prompt.len();
        let sampling = if last { sample.clone() } else { Sampling::default() };
        let ticket = model.submit(&Batch { sequences: vec![sequence] }, &sampling).unwrap();
        match last {
            false => assert!(model.wait(ticket).unwrap().ids.is_empty()),
            true => in_flight = Some(ticket),
        }
        start = end;
    }
    while ids.len() < count {
        let next = (ids.len() + 1 < count).then(|| {
            let sequence =
                BatchSequence { slot, start, input: Input::LastSampled, block_table: table(start + 1) };
            model.submit(&Batch { sequences: vec![sequence] }, &sample).unwrap()
        });
        start += 1;
        ids.extend(model.wait(in_flight.take().unwrap()).unwrap().ids);
        in_flight = next;
    }
    ids
}

/// Largest difference; NaN counts as infinite.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let difference = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}

fn check_f32(variant: &str) {
    let folder = data("gemma3").join(variant);
    let goldens = Goldens::open(&folder);
    let mut model = load(&folder, &LoadOptions::default());
    for prompt in ["short", "mid", "long"] {
        let tokens = goldens.tokens(&format!("tokens.{prompt}"));
        let expected = goldens.view::<f32>(&format!("logits.{prompt}"));
        let difference = max_difference(&all_logits(&mut model, &tokens), &expected);
        println!("{variant} {prompt}: {} positions, max |difference| {difference:.2e}", tokens.len());
        assert!(difference <= BOUND, "{variant} {prompt}: {difference}");

        let expected = goldens.tokens(&format!("greedy.{prompt}.tokens"));
        assert_eq!(greedy(&mut model, &tokens, expected.len(), 64, 3), expected, "{variant} {prompt}");
    }
}

#[test]
fn tiny_a_matches_the_oracle() {
    check_f32("tiny-a");
}

#[test]
fn tiny_b_matches_the_oracle() {
    check_f32("tiny-b");
}

#[test]
fn tiny_27b_ratio_matches_the_oracle() {
    check_f32("tiny-27b-ratio");
}

#[test]
fn every_quantized_mode_matches_its_dequantized_golden() {
    for variant in VARIANTS {
        let folder = data("gemma3").join(variant);
        let goldens = Goldens::open(&folder);
        for mode in QuantizeMode::ALL.into_iter().filter(|m| m.projections().is_some()) {
            let name = mode.name().replace('-', "_");
            let options = LoadOptions { quantize: mode, ..LoadOptions::default() };
            let mut model = load(&folder, &options);
            let vocab = model.config().vocab_size;
            for prompt in ["short", "mid", "long"] {
                let tokens = goldens.tokens(&format!("tokens.{prompt}"));
                let expected = goldens.view::<f32>(&format!("q.{name}.logits.{prompt}"));
                let rows: Vec<usize> = match prompt {
                    "short" => (0..tokens.len()).collect(),
                    _ => {
                        goldens.tokens(&format!("q.positions.{prompt}")).iter().map(|&p| p as usize).collect()
                    }
                };
                let all = all_logits(&mut model, &tokens);
                let got: Vec<f32> =
                    rows.iter().flat_map(|&r| all[r * vocab..(r + 1) * vocab].to_vec()).collect();
                let difference = max_difference(&got, &expected);
                println!("{variant} {mode} {prompt}: max |difference| {difference:.2e}");
                assert!(difference <= BOUND, "{variant} {mode} {prompt}: {difference}");

                // These runs were not chosen for margin: equal up to the first step within the noise.
                let expected = goldens.tokens(&format!("q.{name}.greedy.{prompt}.tokens"));
                let margins = goldens.view::<f32>(&format!("q.{name}.greedy.{prompt}.margin"));
                let sure = margins.iter().position(|m| *m < 2.0 * BOUND).unwrap_or(expected.len());
                assert!(sure > 0, "{variant} {mode} {prompt}: no step is sure");
                let got = greedy(&mut model, &tokens, sure, 256, 0);
                assert_eq!(got, expected[..sure], "{variant} {mode} {prompt}");
            }
        }
    }
}

#[test]
fn transformers_5_configs_and_names_match_the_oracle() {
    let folder = data("transformers5/tiny-27b-l2");
    let goldens = Goldens::open(&folder);
    let mut model = load(&folder, &LoadOptions::default());
    let vocab = model.config().vocab_size;
    for prompt in ["short", "mid", "long"] {
        let tokens = goldens.tokens(&format!("tokens.{prompt}"));
        let all = all_logits(&mut model, &tokens);
        let positions = goldens.tokens(&format!("positions.{prompt}"));
        let got: Vec<f32> =
            positions.iter().flat_map(|&p| all[p as usize * vocab..][..vocab].to_vec()).collect();
        let difference = max_difference(&got, &goldens.view::<f32>(&format!("logits.{prompt}")));
        assert!(difference <= BOUND, "{prompt}: {difference}");
    }
}

#[test]
fn chunks_batches_and_shards_change_no_bit() {
    let folder = data("gemma3/tiny-a");
    let goldens = Goldens::open(&folder);
    let tokens = goldens.tokens("tokens.long");
    let mut whole = load(&folder, &LoadOptions::default());
    let expected = all_logits(&mut whole, &tokens);
    // Other chunks of the prompt, hence other tiles of the products; and every matrix cut into shards of one tile.
    for (max_batch_tokens, max_shard_bytes) in [(1, None), (7, None), (256, Some(1))] {
        let options = LoadOptions { max_batch_tokens, max_shard_bytes, ..LoadOptions::default() };
        let got = all_logits(&mut load(&folder, &options), &tokens);
        assert!(got == expected, "chunks of {max_batch_tokens}, shards of {max_shard_bytes:?}");
    }
    let one = greedy(&mut whole, &tokens, 16, 256, 0);
    let other = greedy(&mut whole, &tokens, 16, 13, 15);
    assert_eq!(one, other);
}

#[test]
fn two_sequences_in_a_batch_do_not_see_each_other() {
    let folder = data("gemma3/tiny-b");
    let goldens = Goldens::open(&folder);
    let options = LoadOptions { max_context: Some(512), ..LoadOptions::default() };
    let mut model = load(&folder, &options);
    let limits = model.limits();
    let prompts = ["mid", "short"].map(|p| goldens.tokens(&format!("tokens.{p}")));
    let expected = ["mid", "short"].map(|p| goldens.tokens(&format!("greedy.{p}.tokens")));
    // The first sequence has the even blocks, the second the odd ones.
    let table = |which: usize, end: usize| -> Vec<u32> {
        (0..end.div_ceil(limits.block_size)).map(|i| (2 * i + which) as u32).collect()
    };
    let mut got = [vec![], vec![]];
    let mut starts = [0, 0];
    for step in 0..20 {
        let sequences = [0, 1].map(|s| {
            let input = if step == 0 { Input::Ids(prompts[s].clone()) } else { Input::LastSampled };
            let end = starts[s] + input.len();
            let sequence =
                BatchSequence { slot: s as u32, start: starts[s], input, block_table: table(s, end) };
            starts[s] = end;
            sequence
        });
        let sampling = Sampling { requests: vec![(0, SamplingParams::GREEDY), (1, SamplingParams::GREEDY)] };
        let ticket = model.submit(&Batch { sequences: sequences.to_vec() }, &sampling).unwrap();
        let ids = model.wait(ticket).unwrap().ids;
        got[0].push(ids[0]);
        got[1].push(ids[1]);
    }
    assert_eq!(got[0], expected[0][..20]);
    assert_eq!(got[1], expected[1][..20]);
}

#[test]
fn nothing_is_allocated_after_loading() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.mid");
    // Its own device: other tests allocate on the shared one meanwhile.
    let device = Device::open(&crate::support::policy()).unwrap();
    let files = ModelFiles::open(&folder).unwrap();
    let mut model = Gemma3::load(&device, &files, &LoadOptions::default(), &mut |_| {}).unwrap();
    let placed: u64 = model.placements().iter().map(|p| p.bytes).sum();
    assert!(placed > model.weight_bytes() && model.weight_bytes() > 0);
    let before = device.allocations();
    assert!(before > 0);
    greedy(&mut model, &tokens, 24, 17, 1);
    all_logits(&mut model, &tokens);
    assert_eq!(device.allocations(), before);
}

#[test]
fn the_same_seed_draws_the_same_tokens_and_another_seed_others() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.short");
    let mut model = load(&folder, &LoadOptions::default());
    let mut draw = |seed: u64, slot: u32| {
        let params = SamplingParams { temperature: 1.0, top_k: 64, top_p: 0.95, min_p: 0.0, seed };
        let blocks: Vec<u32> = (0..8).collect();
        let mut ids = Vec::new();
        let mut start = 0;
        for step in 0..32 {
            let input = if step == 0 { Input::Ids(tokens.clone()) } else { Input::LastSampled };
            let sequence = BatchSequence { slot, start, block_table: blocks.clone(), input };
            start += sequence.input.len();
            let sampling = Sampling { requests: vec![(0, params)] };
            let ticket = model.submit(&Batch { sequences: vec![sequence] }, &sampling).unwrap();
            ids.extend(model.wait(ticket).unwrap().ids);
        }
        ids
    };
    let first = draw(7, 0);
    assert_eq!(first, draw(7, 5));
    assert_ne!(first, draw(8, 0));
    assert_ne!(first, draw(7 | 1 << 40, 0));
}
