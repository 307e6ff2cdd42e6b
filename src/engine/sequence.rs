//! One prompt and its answer, as the scheduler sees it: lengths, blocks and limits, no ids of the answer.

use super::block_manager::Block;
use crate::model::SamplingParams;

/// Name of a request inside the engine; never reused.
pub type SequenceId = u64;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model yielded one of the request's stop ids (which is counted, and not handed out).
    Stop,
    /// `max_tokens` were generated.
    Length,
}

/// Two ordered lengths: `computed <= total`, where `total = prompt + generated`.
#[derive(Debug)]
pub struct Sequence {
    pub id: SequenceId,
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    pub max_tokens: usize,
    pub stop_token_ids: Vec<u32>,
    /// Tokens whose keys and values are in the cache once the submitted steps are done.
    pub computed: usize,
    /// Ids sampled so far, a stop id included.
    pub generated: usize,
    /// Blocks that hold positions `0..computed` and those of the step under way.
    pub blocks: Vec<Block>,
}

impl Sequence {
    pub fn total(&self) -> usize {
        self.prompt.len() + self.generated
    }

    /// Tokens that the next steps must process before the sequence yields an id.
    pub fn pending(&self) -> usize {
        self.total() - self.computed
    }
}
