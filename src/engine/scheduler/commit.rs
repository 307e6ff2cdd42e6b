//! Commit: the sequences get the results of a step, and the prefix cache gets the computed blocks.

use super::Scheduler;
use super::step::{Output, SequenceShare, Step, Yields};
use crate::engine::answer::Ended;
use crate::engine::sequence::Sequence;
use crate::model::Sampled;

impl Scheduler {
    /// Applies the results of a step. `sampled` has one result for each entry of `step.sampling`.
    pub fn commit(&mut self, step: &Step, sampled: &Sampled) -> Vec<Output> {
        assert_eq!(
            sampled.ids.len(),
            step.sampling.draws.len(),
            "the runner must return one id for each draw"
        );
        let mut outputs = Vec::with_capacity(step.shares.len());
        for share in &step.shares {
            let Some(index) = self.running.iter().position(|s| share.belongs_to(s)) else { continue };
            let sequence = &mut self.running[index];
            let was_prefill = sequence.computed < sequence.prompt_len;
            sequence.computed = share.end;
            let first = outputs.len();
            apply_share(sequence, share, sampled, &mut outputs);
            if !share.draft.ids.is_empty() {
                self.count_accepted(index, share, outputs.len() - first - 1);
            }
            let drafts = self.running[index].drafts;
            outputs[first..].iter_mut().for_each(|output| output.drafts = drafts);
            let end = outputs[first..].last().and_then(|output| output.end.as_ref());
            self.commit_blocks(index, was_prefill, end);
            self.clear_suspect(index);
            self.count_restored(index);
            let sequence = &mut self.running[index];
            self.served.add_mask_time(sequence.request.client, sequence.take_mask_time());
            if end.is_some() {
                self.end(index);
            }
        }
        if self.config.checks {
            self.check();
        }
        outputs
    }

    /// Counts the accepted draft tokens. The next step overwrites the positions of the rejected ones.
    fn count_accepted(&mut self, index: usize, share: &SequenceShare, accepted: usize) {
        let sequence = &mut self.running[index];
        sequence.drafts.accepted += accepted;
        self.drafts.of(share.draft.by).accepted += accepted;
        let total = sequence.tokens.len();
        sequence.adaptive(share.draft.by).judge(share.draft.ids.len(), accepted, total);
        sequence.submitted = sequence.computed;
        sequence.speculating = false;
    }

    /// Registers the computed blocks of a sequence with the prefix cache. If the sequence failed, removes its text from
    /// the cache instead.
    fn commit_blocks(&mut self, index: usize, was_prefill: bool, end: Option<&Ended>) {
        let sequence = &mut self.running[index];
        let computed = sequence.computed;
        if matches!(end, Some(Err(_))) {
            let table = std::mem::take(&mut sequence.table);
            self.push_forgotten(index, table.salt().clone());
            let running = self.running.iter_mut().map(|s| &mut s.table);
            self.blocks.forget(table, running.chain(self.stored.tables_mut()));
        } else if sequence.request.pooling {
            self.blocks.leave_windows(&mut sequence.table, computed);
        } else {
            // A share never ends within an image (`Scheduler::without_split_images`). So `computed` is within one only
            // until the first share after a cached prefix that ends there is committed. A sequence that ends or is
            // preempted before that has registered nothing.
            let images = &sequence.request.images;
            self.blocks.commit(&mut sequence.table, &sequence.tokens[..computed], images);
            if (was_prefill && computed >= sequence.prompt_len) || end.is_some() {
                self.blocks.end_turn(&sequence.table);
                self.push_turn(index);
            }
        }
    }
}

/// Applies the results of one share to its sequence, and appends its outputs.
fn apply_share(sequence: &mut Sequence, share: &SequenceShare, sampled: &Sampled, outputs: &mut Vec<Output>) {
    let id = sequence.id;
    match &share.yields {
        Yields::Nothing => {}
        Yields::Scores(draws) => {
            for (position, draw) in (share.end + 1 - draws.len()..).zip(draws.clone()) {
                let logprobs = sampled.logprobs[draw].as_ref();
                if let Err(error) = sequence.take_score(position, sampled.ids[draw], logprobs) {
                    outputs.push(Output { id, end: Some(Err(error)), ..Output::default() });
                    return;
                }
            }
        }
        Yields::Ids(first) => {
            sequence.drawn -= 1;
            let was_masked = sequence.is_masked();
            for (i, draw) in (*first..=first + share.draft.ids.len()).enumerate() {
                let (token, end) = sequence.take(sampled.ids[draw]);
                // The ids that were drawn after this one did not obey a mask that is binding now.
                let is_bound = !was_masked && sequence.is_masked();
                // The next draw follows a draft token. It is valid only if that token is the id that was drawn here.
                let is_expected = share.draft.ids.get(i) == sampled.ids[draw].as_ref();
                let continues = end.is_none() && !is_bound && is_expected;
                outputs.push(Output {
                    id,
                    token,
                    logprobs: sampled.logprobs[draw].clone(),
                    prompt: sequence.take_scores(),
                    end,
                    cached_tokens: sequence.cached.unwrap_or(0),
                    ..Output::default()
                });
                if !continues {
                    if is_bound && sequence.drawn > 0 {
                        sequence.draw_again();
                    }
                    return;
                }
                sequence.computed += 1;
            }
        }
        Yields::Pooled(at) => {
            let (pooled, end) = sequence.take_pooled(&sampled.pooled[*at]);
            outputs.push(Output { id, pooled, end: Some(end), ..Output::default() });
        }
    }
}
