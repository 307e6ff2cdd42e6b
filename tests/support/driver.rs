//! Runs sequences on a model step by step as the engine does, but without its thread and its clock.

use std::collections::{HashMap, VecDeque};

use unicorn::engine::{self, DraftTotals, Drafts, EngineError, Pace, Scheduler, SchedulerConfig, Sequence};
use unicorn::model::{Limits, Logprobs, Runner, SamplingParams};

/// The results of a run.
#[derive(Debug, Default)]
pub struct Run {
    /// By sequence, without stop ids.
    pub answers: HashMap<u64, Vec<u32>>,
    /// Log probabilities of the ids in `answers`, if requested.
    pub logprobs: HashMap<u64, Vec<Logprobs>>,
    /// Log probabilities of all ids of the prompts except the first, if requested.
    pub scores: HashMap<u64, Vec<Logprobs>>,
    /// Means of hidden states, if requested.
    pub pooled: HashMap<u64, Vec<f32>>,
    /// The number of prompt tokens found in the prefix cache, by sequence.
    pub cached: HashMap<u64, usize>,
    /// Every sampled id, with stop ids, in order. The order is useful only for one sequence without draft tokens.
    pub drawn: Vec<u32>,
    pub preemptions: u64,
    pub steps: usize,
    /// The largest number of sequences in a step.
    pub widest: usize,
    /// Proposed and accepted draft tokens, by sequence.
    pub drafts: HashMap<u64, Drafts>,
}

/// Runs sequences. `Driver::run` may be called several times, and the prefix cache is kept between the calls.
pub struct Driver<'a> {
    runner: &'a mut dyn Runner,
    limits: Limits,
    scheduler: Scheduler,
}

impl<'a> Driver<'a> {
    /// `limits` must not exceed the runner's.
    pub fn new(runner: &'a mut dyn Runner, limits: Limits) -> Self {
        Self::with(runner, limits, SchedulerConfig::default())
    }

    pub fn with(runner: &'a mut dyn Runner, limits: Limits, config: SchedulerConfig) -> Self {
        let config = SchedulerConfig { draft_model: runner.has_draft(), ..config };
        Self { runner, scheduler: Scheduler::new(limits.clone(), config), limits }
    }

    /// Adds sequence `i` before step `arrivals(i)`, and runs all sequences to their end. Up to `max_in_flight` steps
    /// are in flight.
    pub fn run_staggered(&mut self, sequences: Vec<Sequence>, arrivals: impl Fn(usize) -> usize) -> Run {
        let mut run = Run::default();
        let (pace, mut in_flight) = (Pace::new(), VecDeque::new());
        let mut waiting: VecDeque<(usize, Sequence)> =
            sequences.into_iter().enumerate().map(|(i, sequence)| (arrivals(i), sequence)).collect();
        let before = self.scheduler.preemptions();
        while !waiting.is_empty() || !self.scheduler.is_idle() || !in_flight.is_empty() {
            while waiting.front().is_some_and(|(step, _)| *step <= run.steps || self.scheduler.is_idle()) {
                self.scheduler.add(waiting.pop_front().expect("just seen").1);
            }
            while in_flight.len() < self.limits.max_in_flight {
                if engine::draft(&mut self.scheduler, self.runner, in_flight.len()).unwrap().is_none() {
                    break;
                }
                let Some(step) = self.scheduler.schedule(&pace) else { break };
                run.steps += 1;
                run.widest = run.widest.max(step.batch.sequences.len());
                in_flight.push_back((step.submit(self.runner).unwrap(), step));
            }
            let (ticket, step) = in_flight.pop_front().expect("a step in flight");
            let sampled = self.runner.wait(ticket).unwrap();
            for output in self.scheduler.commit(&step, &sampled) {
                run.drawn.extend(sampled.ids.iter().flatten());
                run.answers.entry(output.id).or_default().extend(output.token);
                if output.token.is_some() {
                    run.logprobs.entry(output.id).or_default().extend(output.logprobs);
                }
                run.pooled.extend(output.pooled.map(|state| (output.id, state)));
                run.scores.extend(output.prompt.map(|scores| (output.id, scores)));
                run.cached.insert(output.id, output.cached_tokens);
                run.drafts.insert(output.id, output.drafts);
                assert_ne!(output.end, Some(Err(EngineError::NotFinite)), "sequence {}", output.id);
            }
        }
        run.preemptions = self.scheduler.preemptions() - before;
        run
    }

    /// The counts of draft tokens over all runs.
    pub fn drafts(&self) -> DraftTotals {
        self.scheduler.drafts()
    }

    pub fn run(&mut self, sequences: Vec<Sequence>) -> Run {
        self.run_staggered(sequences, |_| 0)
    }
}

/// One answer of at most `max_tokens` ids to `prompt`, drawn with `params`.
pub fn plain_sequence(id: u64, prompt: Vec<u32>, params: SamplingParams, max_tokens: usize) -> Sequence {
    let request = engine::Request { sampling: params.into(), ..engine::Request::new(prompt) };
    Sequence::new(id, request, max_tokens)
}

/// The greedy answer to a prompt that is processed in chunks, with sampled ids kept on the device: `count` ids, or
/// fewer if an id in `stop` comes, which is then the last.
pub fn greedy(runner: &mut dyn Runner, prompt: &[u32], count: usize, chunk: usize, stop: &[u32]) -> Vec<u32> {
    let limits =
        Limits { max_batch_tokens: chunk.min(runner.limits().max_batch_tokens), ..runner.limits().clone() };
    let plain = SchedulerConfig { speculation_tokens: 0, ..SchedulerConfig::default() };
    let params = SamplingParams { stop_token_ids: stop.to_vec(), ..SamplingParams::GREEDY };
    let sequence = plain_sequence(0, prompt.to_vec(), params, count);
    Driver::with(runner, limits, plain).run(vec![sequence]).drawn
}
