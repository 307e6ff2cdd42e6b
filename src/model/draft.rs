//! A model and its draft model on one device: the small model drafts tokens, and the large model verifies several of
//! them in one step.
//!
//! The draft model's KV cache mirrors the model's: it has as many blocks of the same size, and the tokens of every step
//! go through both models, at the same positions, in the same blocks, after the same block copies. So the engine's one
//! block manager, its prefix cache, forks and preemption serve both models, and the draft model is ready wherever a
//! sequence is. The draft model's part of a step goes to the queue first: it reads the ids last sampled, before the
//! model draws new ids into the same slots.
//!
//! Drafting is a chain of steps of the draft model alone. Each step of the chain has one token of every sequence that
//! wants more draft tokens. The draft model samples as the model will: with the same parameters, history, and noise at
//! each position. So a draft token is accepted wherever the two models agree, also at a temperature above 0.
//!
//! This module refuses a draft model that would have to look back further than the model's blocks reach. An id beyond
//! the draft model's embedding is read as its last row. This makes the next draft tokens worse, but does not change the
//! answer.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use super::load::{LoadError, LoadOptions, Progress, Source};
use super::model_runner::{Loaded, ModelRunner, SelfTested};
use super::spec::ModelSpec;
use super::{
    Batch, BatchSequence, DraftRequest, Draw, Input, Limits, PoolBlock, Runner, RunnerError, Sampled,
    Sampling, Ticket,
};
use crate::config::Courtesy;
use crate::gpu::Device;

/// Loads a model and its draft model into device memory, for a context that both support. The options for weights apply
/// to the model; the draft model's weights are stored as in its files.
pub fn load(
    device: &Arc<Device>,
    source: &Source<'_>,
    draft_source: &Source<'_>,
    options: &LoadOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<(ModelRunner, Draft), LoadError> {
    let (model, draft) = ModelRunner::load_with_draft(device, source, Some(draft_source), options, progress)?;
    Ok((model, Draft(draft.expect("one was asked for"))))
}

/// A draft model that was loaded together with its model.
pub struct Draft(ModelRunner);

impl Draft {
    pub fn config(&self) -> &ModelSpec {
        self.0.config()
    }

    pub fn loaded(&self) -> Loaded {
        self.0.loaded()
    }

    /// As [`ModelRunner::self_test`].
    pub fn self_test(&mut self) -> Result<SelfTested, RunnerError> {
        self.0.self_test()
    }

    /// Bytes of the draft model's weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.0.weight_bytes()
    }
}

/// A model that runs with its draft model.
pub struct Drafted {
    model: ModelRunner,
    draft: ModelRunner,
    /// Tickets of the draft model's part of each step in flight.
    mirrored: VecDeque<Ticket>,
}

impl Drafted {
    /// Joins a model and the draft model that was loaded with it, before any step.
    pub fn new(model: ModelRunner, Draft(draft): Draft) -> Drafted {
        Drafted { model, draft, mirrored: VecDeque::new() }
    }

    /// The batch as the draft model gets it: each id beyond its embedding is replaced by its last one.
    fn mirrored<'a>(&self, batch: &'a Batch) -> Cow<'a, Batch> {
        let rows = self.draft.limits().vocab_size as u32;
        let foreign = |s: &BatchSequence| match &s.input {
            Input::Ids(ids) => ids.iter().any(|id| *id >= rows),
            Input::LastSampled => false,
        };
        if !batch.sequences.iter().any(foreign) {
            return Cow::Borrowed(batch);
        }
        let mut batch = batch.clone();
        for sequence in &mut batch.sequences {
            if let Input::Ids(ids) = &mut sequence.input {
                ids.iter_mut().for_each(|id| *id = (*id).min(rows - 1));
            }
        }
        Cow::Owned(batch)
    }

    /// Step `ahead` of the chain, and the indices of the requests that want a token from it.
    fn link(&self, requests: &[DraftRequest], ahead: usize) -> (Batch, Sampling, Vec<usize>) {
        let (mut batch, mut sampling, mut request_indices) =
            (Batch::default(), Sampling::default(), Vec::new());
        let rows = self.draft.limits().vocab_size;
        for (i, DraftRequest { sequence, draw, num_draft_tokens }) in requests.iter().enumerate() {
            if ahead >= *num_draft_tokens {
                continue;
            }
            let params = Arc::clone(&draw.params).within(rows);
            let draw = Draw { sequence: request_indices.len(), token: 0, params, ..draw.clone() };
            let mut sequence = BatchSequence { start: sequence.start + ahead, ..sequence.clone() };
            if ahead > 0 {
                sequence.input = Input::LastSampled;
            }
            batch.sequences.push(sequence);
            sampling.draws.push(draw);
            request_indices.push(i);
        }
        (batch, sampling, request_indices)
    }
}

impl Runner for Drafted {
    fn limits(&self) -> &Limits {
        self.model.limits()
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        let mirrored = self.draft.submit(&self.mirrored(batch), &Sampling::default())?;
        self.mirrored.push_back(mirrored);
        self.model.submit(batch, sampling)
    }

    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError> {
        self.model.masks(ticket, words)
    }

    fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<(), RunnerError> {
        // Both models are on one device.
        self.model.set_courtesy(courtesy)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
        self.draft.wait(self.mirrored.pop_front().expect("a step in flight"))?;
        self.model.wait(ticket)
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        // Both models are on one device.
        self.model.probe()
    }

    fn attention_path(&self) -> u32 {
        self.model.attention_path()
    }

    /// Each block has the model's part, and then the draft model's.
    fn read_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, RunnerError> {
        let (of_model, of_draft) = (self.model.read_own_blocks(blocks)?, self.draft.read_own_blocks(blocks)?);
        let (mut of_model, mut of_draft) = (&of_model[..], &of_draft[..]);
        let mut bytes = Vec::with_capacity(of_model.len() + of_draft.len());
        for block in blocks {
            bytes.extend(of_model.split_off(..self.model.own_bytes(&[*block])).expect("the block's part"));
            bytes.extend(of_draft.split_off(..self.draft.own_bytes(&[*block])).expect("the block's part"));
        }
        Ok(bytes)
    }

    fn write_blocks(&mut self, blocks: &[PoolBlock], mut bytes: &[u8]) -> Result<(), RunnerError> {
        let (mut of_model, mut of_draft) = (Vec::new(), Vec::new());
        for block in blocks {
            let parts = [(&self.model, &mut of_model), (&self.draft, &mut of_draft)];
            for (model, part) in parts {
                part.extend(bytes.split_off(..model.own_bytes(&[*block])).expect("the block's part"));
            }
        }
        assert!(bytes.is_empty(), "{} bytes after the blocks", bytes.len());
        self.model.write_own_blocks(blocks, &of_model)?;
        Ok(self.draft.write_own_blocks(blocks, &of_draft)?)
    }

    fn has_draft(&self) -> bool {
        true
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        assert!(self.mirrored.is_empty(), "draft tokens are asked for while a step is in flight");
        let mut draft_tokens = vec![Vec::new(); requests.len()];
        let mut under_way = VecDeque::new();
        let mut take = |draft: &mut ModelRunner, (ticket, request_indices): (Ticket, Vec<usize>)| {
            let sampled = draft.wait(ticket)?;
            request_indices.into_iter().zip(sampled.ids).for_each(|(i, id)| draft_tokens[i].push(id));
            Ok::<_, RunnerError>(())
        };
        let longest = requests.iter().map(|request| request.num_draft_tokens).max().unwrap_or(0);
        for ahead in 0..longest {
            let (batch, sampling, request_indices) = self.link(requests, ahead);
            if under_way.len() == self.draft.limits().max_in_flight {
                take(&mut self.draft, under_way.pop_front().expect("just counted"))?;
            }
            let ticket = self.draft.submit(&self.mirrored(&batch), &sampling)?;
            under_way.push_back((ticket, request_indices));
        }
        under_way.into_iter().try_for_each(|link| take(&mut self.draft, link))?;
        // A draft ends before an id that could not be drawn.
        Ok(draft_tokens.into_iter().map(|ids| ids.into_iter().map_while(|id| id).collect()).collect())
    }
}
