//! The tokens of a request do not depend on other work of the engine, on the device and for every type of KV cache.
//! Greedy tokens are equal to the last id: alone or in a batch, prefilled whole or in chunks, computed or found in the
//! prefix cache, preempted or not, forked or not. This also holds for tokens with penalties, seeds and masks.

use std::collections::BTreeMap;
use std::sync::Arc;

use unicorn::engine::{Fork, PromptImage, Request, Restriction, Sequence, SharedMask, TokenMask};
use unicorn::image::Rgb;
use unicorn::model::load::LoadOptions;
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::{ImageLimits, Limits, Runner, SamplingParams};
use unicorn::tensor::{KvDtype, Precision, VisionMode};

use crate::support::driver::{Driver, Run, plain_sequence};
use crate::support::texts::{Texts, answer, penalties};
use crate::support::{data, demo, goldens, reference, wants_all};

#[test]
fn the_demo_model_answers_the_same_whatever_else_runs() {
    let options = LoadOptions { sequences: 16, max_context: Some(1024), ..LoadOptions::default() };
    let mut model = goldens::load(&demo::folder(), &options);
    let prompts = demo::quick_prompts(300).step_by(5).map(<[u32]>::to_vec).take(14).collect();
    let texts = Texts::new(&mut model, (SamplingParams::GREEDY, 0), prompts, 24);
    if wants_all("UNICORN_TEST_KERNELS") {
        texts.check_all(&mut model);
    }
    let penalized = Texts::new(&mut model, (penalties(), 0), texts.prompts.clone(), 24);
    assert_ne!(penalized.alone, texts.alone, "penalties change nothing");
    penalized.check_all(&mut model);
}

#[test]
fn the_reference_model_answers_the_same_whatever_else_runs() {
    let folder = data("gemma3/tiny-a");
    let goldens = goldens::Goldens::open(&folder);
    // A KV cache in f16 rounds keys and values, always in the same way.
    let options =
        LoadOptions { kv: KvDtype::F16, sequences: 16, max_context: Some(512), ..LoadOptions::default() };
    let mut model = goldens::load(&folder, &options);
    let [short, mid, long] = ["short", "mid", "long"].map(|p| goldens.tokens(&format!("tokens.{p}")));
    let long = long[..long.len().min(200)].to_vec();
    let other = long[11..].to_vec();
    let prompts = vec![mid.clone(), short.clone(), long, other, short[1..].to_vec(), mid[..9].to_vec()];
    let texts = Texts::new(&mut model, (SamplingParams::GREEDY, 0), prompts, 60);
    texts.check_all(&mut model);
}

/// Answers do not depend on the number of tokens in a block of the KV cache.
#[test]
fn the_block_size_of_the_kv_cache_changes_no_answer() {
    let folder = data("gemma3/tiny-a");
    let goldens = goldens::Goldens::open(&folder);
    let [short, mid, long] = ["short", "mid", "long"].map(|p| goldens.tokens(&format!("tokens.{p}")));
    let prompts = vec![short, long[..150].to_vec(), mid, long[7..90].to_vec()];
    let mut expected: Option<Vec<Vec<u32>>> = None;
    for block_size in [16, 1, 5, 48] {
        let options =
            LoadOptions { block_size, sequences: 8, max_context: Some(256), ..LoadOptions::default() };
        let mut model = goldens::load(&folder, &options);
        let limits = model.limits().clone();
        assert_eq!(limits.kv.block_size, block_size);
        let texts = Texts::new(&mut model, (SamplingParams::GREEDY, 0), prompts.clone(), 40);
        assert_eq!(
            *expected.get_or_insert_with(|| texts.alone.clone()),
            texts.alone,
            "blocks of {block_size}"
        );
        let mut driver = Driver::new(&mut model, limits);
        texts.check(&driver.run(texts.sequences()), "in a batch");
        let again = driver.run(texts.sequences());
        texts.check(&again, "from the cache");
        assert_eq!(again.cached[&1], 149 / block_size * block_size, "cached in blocks of {block_size}");
    }
}

/// Sequences of a model that reads images: prompts with two, one and no images, of which two have the same ids and different
/// images.
fn sequences_with_images(model: &ModelRunner) -> Vec<Sequence> {
    let folder = data("gemma3-vision/vis-a");
    let goldens = goldens::Goldens::open(&folder);
    let pixels = goldens::Goldens::read(&folder.join("images.safetensors"));
    let tokens = model.limits().images.expect("a tower").tokens;
    let prompts = [
        ("two", &["rgb", "photo420"][..]),
        ("two", &["photo420", "rgb"]),
        ("one", &["photo420"]),
        ("one", &["wide"]),
        ("after", &["rgb"]),
        ("text", &[]),
        ("last", &["one"]),
        ("turns", &["gray", "exif6"]),
    ];
    let sequence = |(id, (prompt, images)): (u64, (&str, &[&str]))| {
        let ids = goldens.tokens(&format!("tokens.{prompt}"));
        let types = goldens.tokens(&format!("token_type_ids.{prompt}"));
        let starts = (0..ids.len()).filter(|i| types[*i] == 1 && (*i == 0 || types[*i - 1] == 0));
        let image = |(start, name): (usize, &&str)| {
            let pixels: Vec<u8> = pixels.view(&format!("u8.{name}"));
            let hash = Rgb::new(112, 112, pixels.clone()).sha256();
            PromptImage { positions: start..start + tokens, hash, size: [112; 2], pixels: pixels.into() }
        };
        let images: Vec<_> = starts.zip(images).map(image).collect();
        let params = SamplingParams { logprobs: Some(2), ..SamplingParams::GREEDY };
        let request = Request { images, sampling: params.into(), ..Request::new(ids) };
        Sequence::new(id, request, 16)
    };
    (0..).zip(prompts).map(sequence).collect()
}

/// The answers of a run with the bits of their log probabilities.
fn bits_of(run: &Run) -> BTreeMap<u64, (Vec<u32>, Vec<u32>)> {
    let bits = |id: &u64| {
        let all = run.logprobs[id]
            .iter()
            .flat_map(|of| [of.drawn].into_iter().chain(of.top.iter().map(|top| top.1)));
        all.map(f32::to_bits).collect()
    };
    run.answers.iter().map(|(id, answer)| (*id, (answer.clone(), bits(id)))).collect()
}

#[test]
fn answers_about_images_have_the_same_bits_whatever_else_runs() {
    let folder = data("gemma3-vision/vis-a");
    for (precision, kv) in [(Precision::F32, KvDtype::F32), (Precision::Fast, KvDtype::Int8)] {
        let vision = VisionMode::On;
        let options = LoadOptions {
            precision,
            kv,
            vision,
            sequences: 8,
            max_context: Some(256),
            ..LoadOptions::default()
        };
        let mut model = goldens::load(&folder, &options);
        let limits = model.limits().clone();
        let alone = |model: &mut ModelRunner, sequence: Sequence| {
            let run = Driver::new(model, limits.clone()).run(vec![sequence]);
            bits_of(&run).into_iter().next().expect("an answer")
        };
        let expected: BTreeMap<_, _> =
            sequences_with_images(&model).into_iter().map(|sequence| alone(&mut model, sequence)).collect();
        assert_ne!(expected[&0], expected[&1], "the images in another order");
        assert_ne!(expected[&2], expected[&3], "another image");
        let check = |found: &Run, what: &str| assert_eq!(bits_of(found), expected, "{what}, {precision}");
        let all = sequences_with_images(&model);
        let mut driver = Driver::new(&mut model, limits.clone());
        check(&driver.run(all.iter().map(again).collect()), "in a batch");
        let cached = driver.run(all.iter().map(again).collect());
        check(&cached, "from the cache");
        assert!(cached.cached[&0] >= 48 && cached.cached[&2] >= 16, "{:?}", cached.cached);
        for chunk in [16, 23, 40] {
            let small = Limits { max_batch_tokens: chunk, ..limits.clone() };
            let run =
                Driver::new(&mut model, small).run_staggered(all.iter().map(again).collect(), |i| 2 * i);
            check(&run, &format!("in chunks of {chunk}"));
        }
        let images = limits.images.map(|images| ImageLimits { slots: 2, ..images });
        let two_slots = Limits { images, ..limits.clone() };
        check(&Driver::new(&mut model, two_slots).run(all.iter().map(again).collect()), "with two slots");
        let mut few = limits.clone();
        let least = few.kv.most_blocks(few.max_context, few.max_batch_tokens);
        few.kv.pools.iter_mut().zip(least).for_each(|(pool, least)| pool.blocks = pool.blocks.min(least));
        let run = Driver::new(&mut model, few).run(all.iter().map(again).collect());
        check(&run, "with few blocks");
    }
}

fn again(sequence: &Sequence) -> Sequence {
    let prompt = sequence.tokens.clone();
    Sequence::new(sequence.id, Request { prompt, ..sequence.request.clone() }, sequence.max_tokens)
}

/// Penalties, biases, masks and log probabilities are computed from the model's logits at each position.
#[test]
fn sampled_tokens_and_log_probabilities_follow_from_the_logits() {
    let options = LoadOptions { sequences: 4, max_context: Some(512), ..LoadOptions::default() };
    let mut model = goldens::load(&demo::folder(), &options);
    let (limits, vocab) = (model.limits().clone(), model.limits().vocab_size);
    let prompts: Vec<Vec<u32>> = demo::quick_prompts(300).step_by(17).map(<[u32]>::to_vec).take(4).collect();
    let favourite = 300u32;
    let mut sequences = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let plain = answer(&mut model, prompt, (&SamplingParams::GREEDY, 0), 20);
        let params = SamplingParams {
            logit_bias: vec![(favourite, 3.0), (plain[0], -2.5)],
            // The third id would end the answer if `min_tokens` did not forbid it.
            stop_token_ids: vec![plain[2]],
            min_tokens: 10,
            logprobs: Some(i),
            ..penalties()
        };
        let mut sequence = plain_sequence(i as u64, prompt.clone(), params, 20);
        sequence.request.prompt_logprobs = Some(i);
        sequences.push(sequence);
    }
    let stops: Vec<u32> = sequences.iter().map(|s| s.request.sampling.stop_token_ids[0]).collect();
    let biases: Vec<Vec<(u32, f32)>> =
        sequences.iter().map(|s| s.request.sampling.logit_bias.clone()).collect();
    let run = Driver::new(&mut model, limits).run(sequences);
    let penalties = reference::Penalties { repetition: 1.3, presence: 0.7, frequency: 0.2 };
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, logprobs) = (&run.answers[&(i as u64)], &run.logprobs[&(i as u64)]);
        assert!(answer.len() >= 10 && logprobs.len() == answer.len(), "prompt {i}: {answer:?}");
        let tokens = [&prompt[..], answer].concat();
        let mut rows = Vec::new();
        model.logits(&tokens, &mut |_, more| rows.extend_from_slice(more)).unwrap();
        let scores = &run.scores[&(i as u64)];
        assert_eq!(scores.len(), prompt.len() - 1);
        for (n, (id, score)) in prompt[1..].iter().zip(scores).enumerate() {
            let expected = reference::log_softmax(&rows[n * vocab..][..vocab]);
            let near = |id: u32, got: f32| (expected[id as usize] - f64::from(got)).abs() < 1e-3;
            assert!(near(*id, score.drawn), "prompt {i}, its id {n}: {score:?}");
            assert!(score.top.len() == i && score.top.iter().all(|(id, got)| near(*id, *got)));
        }
        for (n, (id, logprobs)) in answer.iter().zip(logprobs).enumerate() {
            let raw = &rows[(prompt.len() + n - 1) * vocab..][..vocab];
            let mut adjusted = reference::adjusted(raw, prompt, &answer[..n], &penalties, &biases[i], None);
            if n < 10 {
                adjusted[stops[i] as usize] = f32::NEG_INFINITY;
            }
            let best = adjusted.iter().cloned().fold(f32::NEG_INFINITY, f32::max);
            assert!(adjusted[*id as usize] >= best - 1e-3, "prompt {i}, id {n}: {id}");
            let expected = reference::log_softmax(raw);
            let near = |id: u32, got: f32| (expected[id as usize] - f64::from(got)).abs() < 1e-3;
            assert!(near(*id, logprobs.drawn), "prompt {i}, id {n}: {logprobs:?}");
            assert!(logprobs.top.iter().all(|(id, got)| near(*id, *got)), "prompt {i}: {logprobs:?}");
            assert!(logprobs.top.len() == i && logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
        }
    }
}

/// A mask that allows twice the last id, modulo 500, and a second id, which depends on the position.
#[derive(Clone)]
struct Doubling(usize);

impl TokenMask for Doubling {
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]> {
        let mut words = vec![0u32; self.0.div_ceil(32)];
        // Two ids, so that the model has a choice.
        for id in [answer.last().map_or(7, |last| last * 2 % 500), answer.len() as u32 + 30] {
            words[id as usize / 32] |= 1 << (id % 32);
        }
        words.into()
    }

    fn restriction(&mut self, _: &[u32]) -> Restriction {
        Restriction::Binding
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}

#[test]
fn a_mask_binds_its_sequence_in_a_batch_with_unmasked_ones() {
    let options = LoadOptions { sequences: 8, max_context: Some(512), ..LoadOptions::default() };
    let mut model = goldens::load(&demo::folder(), &options);
    let limits = model.limits().clone();
    let prompts: Vec<Vec<u32>> = demo::quick_prompts(300).step_by(23).map(<[u32]>::to_vec).take(6).collect();
    let free: Vec<Vec<u32>> =
        prompts.iter().map(|p| answer(&mut model, p, (&SamplingParams::GREEDY, 0), 20)).collect();
    let sequence = |i: usize| {
        let mut sequence = plain_sequence(i as u64, prompts[i].clone(), SamplingParams::GREEDY, 20);
        if i % 2 == 1 {
            sequence.mask = Some(SharedMask::new(Box::new(Doubling(limits.vocab_size))));
            sequence.forks = vec![Fork { id: 100 + i as u64, seed: 0 }];
        }
        sequence
    };
    let run = Driver::new(&mut model, limits.clone()).run((0..prompts.len()).map(sequence).collect());
    for (i, free) in free.iter().enumerate() {
        let got = &run.answers[&(i as u64)];
        if i % 2 == 0 {
            assert_eq!(got, free, "prompt {i}");
            continue;
        }
        assert_eq!(run.answers[&(100 + i as u64)], *got, "the fork of prompt {i}");
        for (n, id) in got.iter().enumerate() {
            let doubled = n.checked_sub(1).map_or(7, |last| got[last] * 2 % 500);
            assert!(*id == doubled || *id == n as u32 + 30, "prompt {i}: {got:?}");
        }
    }
}

/// Sampled tokens depend on the seed, and not on the batch.
#[test]
fn a_seed_yields_the_same_tokens_in_any_batch() {
    let options =
        LoadOptions { kv: KvDtype::Int8, sequences: 8, max_context: Some(1024), ..LoadOptions::default() };
    let mut model = goldens::load(&demo::folder(), &options);
    let prompts: Vec<Vec<u32>> = demo::quick_prompts(300).step_by(9).map(<[u32]>::to_vec).take(8).collect();
    let sequence = |i: usize| {
        let params = SamplingParams { temperature: 1.2, top_p: 0.98, ..SamplingParams::GREEDY };
        let mut sequence = plain_sequence(i as u64, prompts[i].clone(), params, 20);
        sequence.request.seed = 77 + i as u64;
        sequence
    };
    let limits = model.limits().clone();
    let alone: Vec<Vec<u32>> = (0..prompts.len())
        .map(|i| Driver::new(&mut model, limits.clone()).run(vec![sequence(i)]).answers[&(i as u64)].clone())
        .collect();
    let together =
        Driver::new(&mut model, limits).run_staggered((0..prompts.len()).map(sequence).collect(), |i| 3 * i);
    for (i, alone) in alone.iter().enumerate() {
        assert_eq!(together.answers[&(i as u64)], *alone, "prompt {i}");
    }
}

/// The prompts ask for copies with a change. Prompt lookup proposes draft tokens from the prompt, many are accepted,
/// and the answer is the expected one.
#[test]
fn text_that_repeats_its_prompt_takes_less_than_half_the_passes() {
    let options = LoadOptions { max_context: Some(2048), ..LoadOptions::default() };
    let mut model = goldens::load(&demo::folder(), &options);
    let limits = model.limits().clone();
    let (mut tokens, mut passes, mut proposed, mut accepted) = (0, 0, 0, 0);
    for (prompt, answer) in demo::answered("copy") {
        let params = SamplingParams { stop_token_ids: demo::STOP.into(), ..SamplingParams::GREEDY };
        let sequence = plain_sequence(0, prompt.to_vec(), params, answer.len() + 16);
        let run = Driver::new(&mut model, limits.clone()).run(vec![sequence]);
        assert_eq!(run.answers[&0], answer);
        tokens += answer.len() + 1;
        // The last chunk of the prompt already yields the first id.
        passes += run.steps + 1 - prompt.len().div_ceil(limits.max_batch_tokens);
        proposed += run.drafts[&0].proposed;
        accepted += run.drafts[&0].accepted;
    }
    println!("{tokens} tokens in {passes} passes; {accepted} of {proposed} draft tokens were accepted");
    assert!(tokens >= 2 * passes, "more than half of the passes: {tokens} tokens in {passes} passes");
}
