//! Prompts whose answers must not depend on other work of the engine.

use unicorn::engine::{Fork, Sequence};
use unicorn::model::{Limits, Runner, SamplingParams};

use super::data;
use super::driver::{Driver, Run, plain_sequence};
use super::goldens::Goldens;

/// Prompts, with the answer to each one alone, for given parameters and a seed.
pub struct Texts {
    params: SamplingParams,
    seed: u64,
    pub prompts: Vec<Vec<u32>>,
    pub alone: Vec<Vec<u32>>,
}

/// Greedy sampling with all three penalties.
pub fn penalties() -> SamplingParams {
    SamplingParams {
        repetition_penalty: 1.3,
        presence_penalty: 0.7,
        frequency_penalty: 0.2,
        ..SamplingParams::GREEDY
    }
}

/// Prompts of different lengths, two of which are parts of others.
pub fn prompts_of_tiny_a() -> Vec<Vec<u32>> {
    let goldens = Goldens::open(&data("gemma3/tiny-a"));
    let [short, mid, long] = ["short", "mid", "long"].map(|p| goldens.tokens(&format!("tokens.{p}")));
    let long = long[..long.len().min(150)].to_vec();
    vec![mid.clone(), short, long.clone(), long[11..].to_vec(), mid[..9].to_vec()]
}

/// The answer to one prompt by a new scheduler.
pub fn answer(
    model: &mut dyn Runner,
    prompt: &[u32],
    (params, seed): (&SamplingParams, u64),
    tokens: usize,
) -> Vec<u32> {
    let limits = model.limits().clone();
    let mut sequence = plain_sequence(0, prompt.to_vec(), params.clone(), tokens);
    sequence.request.seed = seed;
    Driver::new(model, limits).run(vec![sequence]).answers.remove(&0).expect("an answer")
}

impl Texts {
    pub fn new(
        model: &mut dyn Runner,
        (params, seed): (SamplingParams, u64),
        prompts: Vec<Vec<u32>>,
        tokens: usize,
    ) -> Texts {
        let alone = prompts.iter().map(|p| answer(model, p, (&params, seed), tokens)).collect();
        Texts { params, seed, prompts, alone }
    }

    pub fn sequences(&self) -> Vec<Sequence> {
        let each = self.prompts.iter().zip(&self.alone).enumerate();
        each.map(|(i, (p, a))| self.sequence(i, p, a.len())).collect()
    }

    fn sequence(&self, i: usize, prompt: &[u32], tokens: usize) -> Sequence {
        let mut sequence = plain_sequence(i as u64, prompt.to_vec(), self.params.clone(), tokens);
        sequence.request.seed = self.seed;
        sequence
    }

    #[track_caller]
    pub fn check(&self, run: &Run, what: &str) {
        assert_eq!(run.answers.len(), self.prompts.len());
        for (i, alone) in self.alone.iter().enumerate() {
            assert_eq!(run.answers[&(i as u64)], *alone, "{what}: prompt {i}");
        }
    }

    /// Checks that `model` gives the same answers under all conditions that must not change them. `model` may be
    /// another one than the model that gave the answers.
    pub fn check_all(&self, model: &mut dyn Runner) {
        let limits = model.limits().clone();
        let mut driver = Driver::new(model, limits.clone());
        let run = driver.run(self.sequences());
        assert!(run.widest == self.prompts.len().min(limits.max_sequences), "{} in a step", run.widest);
        self.check(&run, "in a batch");

        let again = driver.run_staggered(self.sequences(), |i| 2 * i);
        let long = self.prompts.iter().position(|p| p.len() > 40).expect("a long prompt") as u64;
        assert!(again.cached[&long] >= 32, "{:?} found in the cache", again.cached);
        self.check(&again, "one after the other, from the cache");

        // The next turn of each conversation. The prefix cache holds its prompt and answer, except their end.
        let next = |i: usize| [&self.prompts[i][..], &self.alone[i], &[5, 6, 7]].concat();
        let prompts: Vec<Vec<u32>> = (0..self.prompts.len()).map(next).collect();
        let turn = |i: usize| self.sequence(i, &prompts[i], 12);
        let cached = driver.run((0..prompts.len()).map(turn).collect());
        let whole = prompts[long as usize].len();
        assert!(cached.cached[&long] + 32 > whole, "{} of {whole} tokens cached", cached.cached[&long]);
        let drafts = driver.drafts();
        let turns = Texts::new(model, (self.params.clone(), self.seed), prompts, 12);
        turns.check(&cached, "the next turn");
        assert_eq!(drafts.model.proposed > 0, model.has_draft(), "{drafts:?}");

        let limits = Limits { max_batch_tokens: 7, ..limits.clone() };
        let run = Driver::new(model, limits.clone()).run_staggered(self.sequences(), |i| i);
        self.check(&run, "in chunks of 7");

        // Blocks for one and a half sequences.
        let longest =
            self.prompts.iter().zip(&self.alone).map(|(p, a)| p.len() + a.len()).max().expect("some");
        let mut kv = limits.kv.clone();
        let half = longest.div_ceil(kv.block_size) / 2;
        let one = kv.most_blocks(longest, 2 * 16);
        kv.pools.iter_mut().zip(one).for_each(|(pool, one)| pool.blocks = one + half);
        let tight = Limits { max_batch_tokens: 16, max_context: longest, kv, ..limits.clone() };
        let run = Driver::new(model, tight).run(self.sequences());
        assert!(run.preemptions > 0, "no sequence was preempted");
        self.check(&run, "preempted");

        // Three answers to each prompt. They share its blocks, and are equal if sampling is greedy.
        let mut forked = self.sequences();
        let mut expected = |i: usize, n: u64| match self.params.temperature {
            0.0 => self.alone[i].clone(),
            _ => answer(model, &self.prompts[i], (&self.params, n), self.alone[i].len()),
        };
        let forks: Vec<[Vec<u32>; 3]> =
            (0..forked.len()).map(|i| [self.alone[i].clone(), expected(i, 1), expected(i, 2)]).collect();
        for sequence in &mut forked {
            sequence.forks = (1..3).map(|n| Fork { id: sequence.id + 1000 * n, seed: n }).collect();
        }
        let run = Driver::new(model, Limits { max_batch_tokens: 64, ..limits }).run(forked);
        for (i, answers) in forks.iter().enumerate() {
            for (n, answer) in (0..).zip(answers) {
                assert_eq!(run.answers[&(i as u64 + 1000 * n)], *answer, "fork {n} of prompt {i}");
            }
        }
    }
}
