//! The engine against the oracle: logits of every reference checkpoint at every position, greedy tokens, and the
//! dequantized goldens of every quantization mode.
//!
//! Goldens come from transformers in float32 (see `tests/data/gemma3/README.md`). Logits may differ by at most 1e-3:
//! the smallest likely mistakes (erf instead of tanh in GELU, the scale of the embedding rounded to bf16) change them
//! by 2e-3 and more.

use std::time::Duration;

use unicorn::gpu::Device;
use unicorn::model::load::LoadOptions;
use unicorn::model::weights::Weights;
use unicorn::model::{Runner, SamplingParams};
use unicorn::tensor::QuantizeMode;

use crate::support::checkpoints::opened;
use crate::support::driver::{Driver, greedy, plain_sequence};
use crate::support::goldens::{Goldens, all_logits, check_prompts, load, load_on, max_difference, rows_at};
use crate::support::{data, policy};

const BOUND: f32 = 1e-3;
const VARIANTS: [&str; 3] = ["tiny-a", "tiny-b", "tiny-27b-ratio"];

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
        assert_eq!(greedy(&mut model, &tokens, expected.len(), 64, &[]), expected, "{variant} {prompt}");
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
            let of = format!("q.{name}.");
            let what = format!("{variant} {mode}");
            check_prompts(&mut load(&folder, &options), &goldens, &of, "q.", BOUND, &what);
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
        let got = rows_at(&all, &goldens.tokens(&format!("positions.{prompt}")), vocab);
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
    // The prompt is computed in other chunks, so products have other tiles. Every matrix is split into shards of one
    // tile, and every layer into submits of 8 tokens.
    let (long, none) = (LoadOptions::default().max_submit, Duration::ZERO);
    for (max_batch_tokens, max_shard_bytes, max_submit) in
        [(1, None, long), (7, None, none), (256, Some(1), long), (256, None, none), (100, None, none)]
    {
        let options = LoadOptions { max_batch_tokens, max_shard_bytes, max_submit, ..LoadOptions::default() };
        let got = all_logits(&mut load(&folder, &options), &tokens);
        assert!(
            got == expected,
            "chunks of {max_batch_tokens}, shards of {max_shard_bytes:?}, submits of {max_submit:?}"
        );
    }
    let one = greedy(&mut whole, &tokens, 16, 256, &[]);
    let other = greedy(&mut whole, &tokens, 16, 13, &[]);
    assert_eq!(one, other);
}

/// Steps with more different token counts than the cache of recordings holds, increasing and decreasing.
#[test]
fn commands_that_are_recorded_again_give_the_same_tokens() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.mid");
    let mut model = load(&folder, &LoadOptions::default());
    let expected = greedy(&mut model, &tokens, 4, 256, &[]);
    for chunk in (1..=24).chain((1..=256).rev().step_by(9)) {
        assert_eq!(greedy(&mut model, &tokens, 4, chunk, &[]), expected, "chunks of {chunk}");
    }
}

/// Logits are linear in the hidden state, so the logits of the mean state are the mean of the logits.
#[test]
fn pooled_states_give_the_mean_of_the_oracles_logits() {
    for variant in VARIANTS {
        let folder = data("gemma3").join(variant);
        let goldens = Goldens::open(&folder);
        let mut model = load(&folder, &LoadOptions::default());
        let (vocab, hidden) = (model.config().vocab_size, model.config().hidden_size);
        let checkpoint = opened(&folder);
        let embedding = Weights::collect(&checkpoint, model.config()).unwrap().tensors.embed_tokens;
        let embedding = checkpoint.read_f32(&embedding).unwrap();
        let prompts = ["short", "mid", "long"].map(|prompt| goldens.tokens(&format!("tokens.{prompt}")));
        let sequences = || {
            (0..).zip(&prompts).map(|(id, tokens)| {
                let mut sequence = plain_sequence(id, tokens.clone(), SamplingParams::GREEDY, 1);
                sequence.request.pooling = true;
                sequence
            })
        };
        let mut limits = model.limits().clone();
        let together = Driver::new(&mut model, limits.clone()).run(sequences().collect()).pooled;
        for (id, prompt) in (0..).zip(["short", "mid", "long"]) {
            let logits = goldens.view::<f32>(&format!("logits.{prompt}"));
            let positions = prompts[id as usize].len();
            for (row, weights) in embedding.chunks_exact(hidden).enumerate().take(vocab) {
                let products = together[&id].iter().zip(weights).map(|(a, b)| f64::from(*a) * f64::from(*b));
                let column = logits.iter().skip(row).step_by(vocab).map(|logit| f64::from(*logit));
                let (got, expected) = (products.sum::<f64>(), column.sum::<f64>() / positions as f64);
                assert!(
                    (got - expected).abs() <= f64::from(BOUND),
                    "{variant} {prompt} {row}: {got} {expected}"
                );
            }
        }
        // The sums have the same bits if the input is pooled alone and in other pieces.
        limits.max_batch_tokens = 7;
        for sequence in sequences() {
            let id = sequence.id;
            let alone = Driver::new(&mut model, limits.clone()).run(vec![sequence]).pooled;
            assert_eq!(alone[&id], together[&id], "{variant}");
        }
    }
}

#[test]
fn nothing_is_allocated_after_loading() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.mid");
    // The test opens its own device, because other tests allocate on the shared one at the same time.
    let device = Device::open(&policy()).unwrap();
    let mut model = load_on(&device, &folder, &LoadOptions::default());
    let placed: u64 = model.placements().iter().map(|p| p.bytes).sum();
    assert!(placed > model.weight_bytes() && model.weight_bytes() > 0);
    let before = device.allocations();
    assert!(before > 0);
    greedy(&mut model, &tokens, 24, 17, &[]);
    all_logits(&mut model, &tokens);
    assert_eq!(device.allocations(), before);
}

#[test]
fn the_same_seed_draws_the_same_tokens_and_another_seed_different_ones() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.short");
    let mut model = load(&folder, &LoadOptions::default());
    let limits = model.limits().clone();
    let mut driver = Driver::new(&mut model, limits);
    let mut draw = |seed: u64| {
        let params = SamplingParams { temperature: 1.0, top_k: 64, top_p: 0.95, ..SamplingParams::GREEDY };
        let mut sequence = plain_sequence(0, tokens.clone(), params, 32);
        sequence.request.seed = seed;
        driver.run(vec![sequence]).answers[&0].clone()
    };
    let first = draw(7);
    assert_eq!(first, draw(7));
    assert_ne!(first, draw(8));
    assert_ne!(first, draw(7 | 1 << 40));
}
