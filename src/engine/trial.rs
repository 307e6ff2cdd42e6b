//! Measures the time of a runner's steps without requests and without the scheduler: a prompt of some length, or some
//! sequences that decode at some depth of their contexts.
//!
//! The cost of a step depends neither on its ids nor on the contents of the cache. So a decode at depth 8192 needs no
//! prompt of 8192 tokens: its blocks are allocated, and read without being written first. Every sequence has its own
//! blocks. Steps overlap like the engine's steps. [`Trial::obstacle`] explains why a trial does not fit the runner's
//! limits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::block_manager::{BlockManager, BlockTable};
use super::request::{CacheSalt, Priority};
use crate::model::{
    Batch, BatchSequence, Draw, Input, Limits, Runner, RunnerError, Sampling, SamplingParams,
};

/// The work whose time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trial {
    /// A prompt of `tokens` tokens, at least 1, in steps of at most [`Limits::max_batch_tokens`] tokens.
    Prefill { tokens: usize },
    /// `steps` steps that decode, at least 1. Each draws one id for each of `sequences` sequences, at least 1, from
    /// position `depth` on.
    Decode { sequences: usize, depth: usize, steps: usize },
}

/// One step of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrialStep {
    /// For each sequence, the number of positions before its tokens, and the number of its tokens.
    pub shares: Vec<(usize, usize)>,
    pub draws: bool,
}

impl Trial {
    /// The measured steps in their order. Before them, a decode submits one more step to warm up.
    pub fn steps(self, limits: &Limits) -> Vec<TrialStep> {
        match self {
            Trial::Prefill { tokens } => {
                let starts = (0..tokens).step_by(limits.max_batch_tokens);
                let len = |start: usize| limits.max_batch_tokens.min(tokens - start);
                starts
                    .map(|start| TrialStep {
                        shares: vec![(start, len(start))],
                        draws: start + len(start) == tokens,
                    })
                    .collect()
            }
            Trial::Decode { sequences, depth, steps } => {
                let step = |i| TrialStep { shares: vec![(depth + i, 1); sequences], draws: true };
                (1..=steps).map(step).collect()
            }
        }
    }

    /// The number of steps that [`Trial::run`] submits, including the warm-up step.
    pub fn submitted(self, limits: &Limits) -> usize {
        self.steps(limits).len() + usize::from(matches!(self, Trial::Decode { .. }))
    }

    /// The reason why a runner with these limits cannot run the trial. `None` if it can.
    pub fn obstacle(self, limits: &Limits) -> Option<String> {
        let (sequences, tokens) = match self {
            Trial::Prefill { tokens } => (1, tokens),
            Trial::Decode { sequences, depth, steps } => (sequences, depth + steps + 1),
        };
        let most = limits.max_sequences.min(limits.max_draws).min(limits.max_batch_tokens);
        if tokens > limits.max_context {
            return Some(format!(
                "it needs a context of {tokens} tokens, but the context has {}",
                limits.max_context
            ));
        }
        if sequences > most {
            return Some(format!("a step has at most {most} sequences"));
        }
        let most = limits.kv.most_blocks(tokens, limits.max_batch_tokens).into_iter();
        let wanted = most.map(|blocks| sequences * blocks);
        let (pool, wanted) =
            limits.kv.pools.iter().zip(wanted).find(|(pool, wanted)| *wanted > pool.blocks)?;
        let kind = if pool.window.is_some() { "sliding blocks" } else { "blocks" };
        Some(format!("it needs {wanted} {kind} of the KV cache, which has {}", pool.blocks))
    }

    /// Runs the trial, and returns the total time of its steps. Panics if there is an obstacle.
    pub fn run(self, runner: &mut dyn Runner) -> Result<Duration, RunnerError> {
        let limits = runner.limits().clone();
        if let Some(obstacle) = self.obstacle(&limits) {
            panic!("{self:?}: {obstacle}");
        }
        let mut blocks = BlockManager::new(&limits.kv, 0);
        let (sequences, depth) = match self {
            Trial::Prefill { .. } => (1, 0),
            Trial::Decode { sequences, depth, .. } => (sequences, depth),
        };
        let mut tables: Vec<BlockTable> =
            (0..sequences).map(|_| table_at(&mut blocks, depth, limits.max_batch_tokens)).collect();
        let params = Arc::new(SamplingParams::GREEDY);
        let mut submit = |runner: &mut dyn Runner, step: &TrialStep, known: bool| {
            let shares = step.shares.iter().zip(&mut tables).enumerate();
            let sequences = shares.map(|(slot, (&(start, tokens), table))| {
                // The ids do not matter, but each sequence has different ones.
                let id = |i: usize| ((start + i) * 7919 + slot * 31 + 5) % limits.vocab_size;
                let ids = (0..tokens).map(|i| id(i) as u32);
                let input = if known { Input::Ids(ids.collect()) } else { Input::LastSampled };
                extend(&mut blocks, table, start, tokens);
                batch_entry(table, slot as u32, start, input)
            });
            let batch = Batch { sequences: sequences.collect(), ..Batch::default() };
            let draws = if step.draws { step.shares.len() } else { 0 };
            let draws = (0..draws).map(|i| draw(&params, i, step.shares[i])).collect();
            runner.submit(&batch, &Sampling { draws, ..Sampling::default() })
        };
        let is_prefill = matches!(self, Trial::Prefill { .. });
        if !is_prefill {
            let first = TrialStep { shares: vec![(depth, 1); sequences], draws: true };
            let ticket = submit(runner, &first, true)?;
            runner.wait(ticket)?;
        }
        let mut in_flight = VecDeque::new();
        let since = Instant::now();
        for step in self.steps(&limits) {
            if in_flight.len() >= limits.max_in_flight {
                runner.wait(in_flight.pop_front().expect("a step is in flight"))?;
            }
            in_flight.push_back(submit(runner, &step, is_prefill)?);
        }
        for ticket in in_flight {
            runner.wait(ticket)?;
        }
        Ok(since.elapsed())
    }
}

/// The table of a sequence whose first `depth` positions were computed in chunks, like those of a prompt.
fn table_at(blocks: &mut BlockManager, depth: usize, chunk: usize) -> BlockTable {
    let (mut table, _) = blocks.admit(&[], &[], Priority::Interactive, &CacheSalt::default());
    for start in (0..depth).step_by(chunk) {
        extend(blocks, &mut table, start, chunk.min(depth - start));
    }
    table
}

/// Releases the blocks that positions from `start` on do not need, and grows the table by `tokens` positions.
fn extend(blocks: &mut BlockManager, table: &mut BlockTable, start: usize, tokens: usize) {
    blocks.leave_windows(table, start);
    blocks.grow(table, start + tokens).expect("the trial fits the limits");
}

fn batch_entry(table: &BlockTable, slot: u32, start: usize, input: Input) -> BatchSequence {
    let blocks = table.blocks().to_vec();
    BatchSequence { slot, start, input, blocks, images: Vec::new(), history: None }
}

fn draw(params: &Arc<SamplingParams>, sequence: usize, (start, tokens): (usize, usize)) -> Draw {
    Draw {
        sequence,
        token: tokens - 1,
        slot: sequence as u32,
        params: Arc::clone(params),
        seed: 0,
        prompt_len: start + tokens,
        masked: false,
        logprobs: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{KvLimits, KvPool};

    fn limits() -> Limits {
        let pool = |window, blocks| KvPool { window, blocks };
        Limits {
            max_batch_tokens: 16,
            max_sequences: 4,
            max_draws: 4,
            max_in_flight: 2,
            kv: KvLimits { block_size: 4, pools: vec![pool(None, 40), pool(Some(8), 24)] },
            max_context: 100,
            vocab_size: 50,
            hidden_size: 8,
            step_bytes: Vec::new(),
            block_bytes: Vec::new(),
            images: None,
        }
    }

    #[test]
    fn a_prompt_is_split_into_steps_and_only_the_last_one_draws() {
        let steps = Trial::Prefill { tokens: 35 }.steps(&limits());
        let shares: Vec<_> = steps.iter().map(|step| (step.shares[0], step.draws)).collect();
        assert_eq!(shares, [((0, 16), false), ((16, 16), false), ((32, 3), true)]);
    }

    #[test]
    fn a_decode_begins_after_its_depth_and_the_warm_up_step() {
        let trial = Trial::Decode { sequences: 3, depth: 20, steps: 2 };
        let steps = trial.steps(&limits());
        assert_eq!((steps.len(), trial.submitted(&limits())), (2, 3));
        assert_eq!(steps[1], TrialStep { shares: vec![(22, 1); 3], draws: true });
    }

    #[test]
    fn a_trial_that_fits_finds_its_blocks_and_others_name_the_obstacle() {
        let decode = |sequences, depth| Trial::Decode { sequences, depth, steps: 3 };
        for (trial, why) in [
            (Trial::Prefill { tokens: 101 }, Some("context of 101 tokens")),
            (Trial::Prefill { tokens: 100 }, None),
            (decode(5, 0), Some("at most 4 sequences")),
            (decode(4, 37), Some("needs 44 blocks of the KV cache, which has 40")),
            (decode(4, 36), Some("needs 28 sliding blocks of the KV cache, which has 24")),
            (decode(3, 36), None),
            (decode(4, 20), None),
        ] {
            let obstacle = trial.obstacle(&limits());
            match why {
                Some(why) => {
                    assert!(obstacle.as_ref().is_some_and(|o| o.contains(why)), "{trial:?}: {obstacle:?}")
                }
                None => assert_eq!(obstacle, None, "{trial:?}"),
            }
            let (sequences, depth) = match trial {
                Trial::Prefill { .. } => (1, 0),
                Trial::Decode { sequences, depth, .. } => (sequences, depth),
            };
            if why.is_none() {
                let mut blocks = BlockManager::new(&limits().kv, 0);
                let mut tables: Vec<_> = (0..sequences).map(|_| table_at(&mut blocks, depth, 16)).collect();
                for step in trial.steps(&limits()) {
                    for (table, (start, tokens)) in tables.iter_mut().zip(step.shares) {
                        extend(&mut blocks, table, start, tokens);
                    }
                }
                blocks.check(tables.iter());
            }
        }
    }
}
