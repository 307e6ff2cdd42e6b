//! Greedy tokens do not depend on what else the engine does: alone or in a batch, whole or in chunks, computed or found in
//! the prefix cache, preempted or not, forked or not, they are the same to the last id, on the device, whatever the type of
//! the KV cache.

use unicorn::engine::{Fork, Sequence};
use unicorn::model::gemma3::{Gemma3, LoadOptions};
use unicorn::model::{KvLimits, Limits, Runner, SamplingParams};
use unicorn::tensor::KvDtype;

use crate::drive::{Driver, Run, greedy};
use crate::support::data;
use crate::{demo, golden};

/// Prompts, and what is answered to each alone.
struct Texts {
    prompts: Vec<Vec<u32>>,
    alone: Vec<Vec<u32>>,
}

impl Texts {
    fn new(model: &mut Gemma3, prompts: Vec<Vec<u32>>, tokens: usize) -> Texts {
        let alone = prompts.iter().map(|p| greedy(model, p, tokens, usize::MAX, &[])).collect();
        Texts { prompts, alone }
    }

    fn sequences(&self) -> Vec<Sequence> {
        let each = self.prompts.iter().zip(&self.alone).enumerate();
        each.map(|(i, (p, a))| Sequence::new(i as u64, p.clone(), SamplingParams::GREEDY, a.len())).collect()
    }

    #[track_caller]
    fn check(&self, run: &Run, what: &str) {
        assert_eq!(run.answers.len(), self.prompts.len());
        for (i, alone) in self.alone.iter().enumerate() {
            assert_eq!(run.answers[&(i as u64)], *alone, "{what}: prompt {i}");
        }
    }

    /// Everything that must change nothing.
    fn check_all(&self, model: &mut Gemma3) {
        let limits = model.limits();
        let mut driver = Driver::new(model, limits);
        let run = driver.run(self.sequences());
        assert!(run.widest == self.prompts.len().min(limits.max_sequences), "{} in a step", run.widest);
        self.check(&run, "in a batch");

        let again = driver.run_staggered(self.sequences(), |i| 2 * i);
        let long = self.prompts.iter().position(|p| p.len() > 40).expect("a long prompt") as u64;
        assert!(again.cached[&long] >= 32, "{:?} found in the cache", again.cached);
        self.check(&again, "one after the other, from the cache");

        // The next turn of each: prompt and answer as a prompt, which the cache has but for its end.
        let next = |i: usize| [&self.prompts[i][..], &self.alone[i], &[5, 6, 7]].concat();
        let turns = Texts { prompts: (0..self.prompts.len()).map(next).collect(), alone: Vec::new() };
        let turn = |i: usize| Sequence::new(i as u64, turns.prompts[i].clone(), SamplingParams::GREEDY, 12);
        let cached = driver.run((0..turns.prompts.len()).map(turn).collect());
        let whole = turns.prompts[long as usize].len();
        assert!(cached.cached[&long] + 32 > whole, "{} of {whole} tokens cached", cached.cached[&long]);
        let turns = Texts::new(model, turns.prompts, 12);
        turns.check(&cached, "the next turn");

        let limits = Limits { max_batch_tokens: 7, ..limits };
        self.check(&Driver::new(model, limits).run_staggered(self.sequences(), |i| i), "in chunks of 7");

        // Blocks for one whole sequence and a half.
        let longest =
            self.prompts.iter().zip(&self.alone).map(|(p, a)| p.len() + a.len()).max().expect("some");
        let kv = limits.kv;
        let blocks = longest.div_ceil(kv.block_size);
        let kv = KvLimits {
            full_blocks: blocks + blocks / 2,
            sliding_blocks: kv.window_blocks(2 * 16).min(blocks) + blocks / 2,
            ..kv
        };
        let tight = Limits { max_batch_tokens: 16, max_context: longest, kv, ..limits };
        let run = Driver::new(model, tight).run(self.sequences());
        assert!(run.preemptions > 0, "nobody was preempted");
        self.check(&run, "preempted");

        // Three answers to each prompt, which part behind it and are the same, being greedy.
        let mut forked = self.sequences();
        for sequence in &mut forked {
            sequence.forks = (1..3).map(|n| Fork { id: sequence.id + 1000 * n, seed: n }).collect();
        }
        let run = Driver::new(model, model_limits(&limits)).run(forked);
        for (i, alone) in self.alone.iter().enumerate() {
            for n in 0..3 {
                assert_eq!(run.answers[&(i as u64 + 1000 * n)], *alone, "fork {n} of prompt {i}");
            }
        }
    }
}

fn model_limits(limits: &Limits) -> Limits {
    Limits { max_batch_tokens: 64, ..*limits }
}

#[test]
fn the_demo_model_answers_the_same_whatever_else_runs() {
    let options = LoadOptions { sequences: 16, max_context: Some(1024), ..LoadOptions::default() };
    let mut model = golden::load(&demo::folder(), &options);
    let prompts = demo::quick_prompts(300).step_by(5).map(<[u32]>::to_vec).take(14).collect();
    let texts = Texts::new(&mut model, prompts, 24);
    texts.check_all(&mut model);
}

#[test]
fn the_reference_model_answers_the_same_whatever_else_runs() {
    let folder = data("gemma3/tiny-a");
    let goldens = golden::Goldens::open(&folder);
    // As products have it: f16 loses something, and always the same.
    let options =
        LoadOptions { kv: KvDtype::F16, sequences: 16, max_context: Some(512), ..LoadOptions::default() };
    let mut model = golden::load(&folder, &options);
    let [short, mid, long] = ["short", "mid", "long"].map(|p| goldens.tokens(&format!("tokens.{p}")));
    let long = long[..long.len().min(200)].to_vec();
    let other = long[11..].to_vec();
    let prompts = vec![mid.clone(), short.clone(), long, other, short[1..].to_vec(), mid[..9].to_vec()];
    let texts = Texts::new(&mut model, prompts, 60);
    texts.check_all(&mut model);
}

/// Drawn with a seed, a token depends on nothing else either.
#[test]
fn a_seed_draws_the_same_in_any_batch() {
    let options =
        LoadOptions { kv: KvDtype::Int8, sequences: 8, max_context: Some(1024), ..LoadOptions::default() };
    let mut model = golden::load(&demo::folder(), &options);
    let prompts: Vec<Vec<u32>> = demo::quick_prompts(300).step_by(9).map(<[u32]>::to_vec).take(8).collect();
    let params = |i: usize| SamplingParams {
        temperature: 1.2,
        top_p: 0.98,
        seed: 77 + i as u64,
        ..SamplingParams::GREEDY
    };
    let sequence = |i: usize| Sequence::new(i as u64, prompts[i].clone(), params(i), 20);
    let limits = model.limits();
    let alone: Vec<Vec<u32>> = (0..prompts.len())
        .map(|i| Driver::new(&mut model, limits).run(vec![sequence(i)]).answers[&(i as u64)].clone())
        .collect();
    let together =
        Driver::new(&mut model, limits).run_staggered((0..prompts.len()).map(sequence).collect(), |i| 3 * i);
    for (i, alone) in alone.iter().enumerate() {
        assert_eq!(together.answers[&(i as u64)], *alone, "prompt {i}");
    }
}

/// Copies with a change, which repeat their prompt: guesses at what comes next come true, and the answer is the expected one.
#[test]
fn text_that_repeats_its_prompt_takes_less_than_half_the_passes() {
    let options = LoadOptions { max_context: Some(2048), ..LoadOptions::default() };
    let mut model = golden::load(&demo::folder(), &options);
    let limits = model.limits();
    let (mut tokens, mut passes, mut proposed, mut accepted) = (0, 0, 0, 0);
    for (prompt, answer) in demo::answered("copy") {
        let mut sequence = Sequence::new(0, prompt.to_vec(), SamplingParams::GREEDY, answer.len() + 16);
        sequence.stop_token_ids = demo::STOP.into();
        let run = Driver::new(&mut model, limits).run(vec![sequence]);
        assert_eq!(run.answers[&0], answer);
        tokens += answer.len() + 1;
        // The last chunk of the prompt draws the first id.
        passes += run.steps + 1 - prompt.len().div_ceil(limits.max_batch_tokens);
        proposed += run.drafts[&0].proposed;
        accepted += run.drafts[&0].accepted;
    }
    println!("{tokens} tokens in {passes} passes; {accepted} of {proposed} guesses came true");
    assert!(tokens >= 2 * passes, "{tokens} tokens in {passes} passes");
}
