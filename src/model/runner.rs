//! The seam between the engine (which owns sequences and blocks) and the model (which owns the device).
//!
//! The engine speaks in plain arrays: a batch holds no callback, and masks, which take time to make, are pushed after
//! it. Sampling happens on the device, and a sampled id feeds the next step there, so that the engine can
//! prepare and submit a step before it has seen the last one's ids. Implementations: [`crate::model::gemma3::Gemma3`],
//! and the scripted fake of the engine's tests.

use std::borrow::Cow;
use std::sync::Arc;

use super::sampling::SamplingParams;
pub use crate::kernels::MAX_LOGPROBS;

/// Most biases of one draw.
pub const MAX_BIASES: usize = 1024;

/// The KV cache of a runner: two pools of blocks, since Gemma-3 has two kinds of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLimits {
    /// Tokens per block, in both pools.
    pub block_size: usize,
    /// Blocks of the layers that see every token; ids are `0..full_blocks`.
    pub full_blocks: usize,
    /// Blocks of the layers that see a window of tokens; ids are `0..sliding_blocks`.
    pub sliding_blocks: usize,
    /// Keys that a token sees in sliding layers, its own included; none if the model has no such layer.
    pub sliding_window: Option<usize>,
}

impl KvLimits {
    /// Most blocks of sliding layers that one sequence holds: a window, and the tokens of one step behind it.
    pub fn window_blocks(&self, max_batch_tokens: usize) -> usize {
        self.sliding_window.map_or(0, |window| (window + max_batch_tokens).div_ceil(self.block_size) + 1)
    }
}

/// The bounds of a runner, fixed when the model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens one step may process, over all its sequences.
    pub max_batch_tokens: usize,
    /// Sequences one step may contain. Each has a slot for its sampled id.
    pub max_sequences: usize,
    /// Ids one step may draw; no fewer than `max_sequences`.
    pub max_draws: usize,
    /// Steps that may be submitted and not yet waited for.
    pub max_in_flight: usize,
    pub kv: KvLimits,
    /// Longest sequence, prompt and answer together: min(model's maximum, what the KV pools hold).
    pub max_context: usize,
    /// Ids in prompts and sampled ids are `0..vocab_size`.
    pub vocab_size: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
}

/// One of the two pools of [`KvLimits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockPool {
    Full,
    Sliding,
}

/// A block that gets the contents of another before a step's tokens are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    pub pool: BlockPool,
    pub from: u32,
    pub to: u32,
}

/// Tokens of one sequence in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Known ids: a prompt, or a chunk of one. Never empty.
    Ids(Vec<u32>),
    /// The one id last sampled for this sequence's slot; the host need not know it yet.
    LastSampled,
}

impl Input {
    pub fn len(&self) -> usize {
        match self {
            Input::Ids(ids) => ids.len(),
            Input::LastSampled => 1,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One sequence's share of a step: `input.len()` tokens at positions `start..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchSequence {
    /// Which of the `max_sequences` device slots is this sequence's; stable while it runs.
    pub slot: u32,
    /// Tokens already in the KV cache.
    pub start: usize,
    pub input: Input,
    /// Blocks of full layers that hold positions `0..start + input.len()`, in order, and maybe more.
    pub full_blocks: Vec<u32>,
    /// Blocks of sliding layers, from the block with index `sliding_first` on: all blocks that the positions see.
    pub sliding_blocks: Vec<u32>,
    pub sliding_first: usize,
    /// The ids at `0..start`, if the sequence's penalties count ids and this slot did not compute them. The histories
    /// of one step have at most `max_context` ids together.
    pub history: Option<Vec<u32>>,
}

/// A copy of the first ids of one slot's history to another slot, made when a step's tokens are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryCopy {
    pub from: u32,
    pub to: u32,
    pub tokens: usize,
}

/// One step. A batch has no phase: prefill chunks and decodes are the same thing of different length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    pub sequences: Vec<BatchSequence>,
    /// Copies of blocks, made before anything is computed.
    pub copies: Vec<BlockCopy>,
    pub history_copies: Vec<HistoryCopy>,
}

impl Batch {
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.input.len()).sum()
    }
}

/// One id to draw behind a token of a batch.
#[derive(Debug, Clone)]
pub struct Draw {
    /// Index into `Batch::sequences`.
    pub sequence: usize,
    /// The token of that sequence's input behind which the id comes.
    pub token: usize,
    /// The slot that gets the id: the sequence's own, or the slot of a fork of the sequence.
    pub slot: u32,
    /// All draws of a request share these. [`SamplingParams::biases`] are at most [`MAX_BIASES`].
    pub params: Arc<SamplingParams>,
    /// The draw at a position depends on (seed, position) and the logits, on nothing else.
    pub seed: u64,
    /// Tokens of the sequence's prompt; the tokens behind it are the answer.
    pub prompt_len: usize,
    /// Whether a mask says which ids may come ([`Runner::masks`]); else all may.
    pub masked: bool,
    /// As [`SamplingParams::logprobs`], at most [`MAX_LOGPROBS`]; none for a draft token, which has no reader.
    pub logprobs: Option<usize>,
}

impl Draw {
    /// The biases of the id behind the first `tokens` of the sequence.
    pub fn biases(&self, tokens: usize) -> Cow<'_, [(u32, f32)]> {
        self.params.biases(tokens.saturating_sub(self.prompt_len))
    }
}

/// A sequence whose final hidden states are added up. The states of this step's tokens are added to the sum of the
/// steps before; a sum begins anew at position 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pooling {
    /// Index into `Batch::sequences`.
    pub sequence: usize,
    /// Whether the sequence's last token is in this step. The sum comes back then.
    pub last: bool,
}

/// The results that a step is asked for.
#[derive(Debug, Clone, Default)]
pub struct Sampling {
    /// Draws in ascending order of (sequence, token).
    pub draws: Vec<Draw>,
    /// Sums in ascending order of sequences, one for each at most.
    pub pooling: Vec<Pooling>,
}

/// A sequence that the draft model is to draft tokens for. The sequence has no step in flight.
#[derive(Debug, Clone)]
pub struct DraftRequest {
    /// The one token of the sequence that is known and not computed. The blocks suffice for it and all draft tokens but
    /// the last.
    pub sequence: BatchSequence,
    /// The draw of each draft token, the same as a step's draw. It has neither a mask nor log probabilities.
    pub draw: Draw,
    /// How many tokens to draft, one behind the other; at least one.
    pub num_draft_tokens: usize,
}

/// A submitted step. Tickets are waited for in the order in which they were given.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// The results of one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampled {
    /// One id for each entry of [`Sampling::draws`], in that order; none if the logits were not finite. That is the
    /// sequence's fault and not the device's: other sequences may go on.
    pub ids: Vec<Option<u32>>,
    /// Log probabilities of each id, if they were wanted.
    pub logprobs: Vec<Option<Logprobs>>,
    /// For each entry of [`Sampling::pooling`] that was the last of its sequence: the sums of the hidden states behind
    /// the final norm, `[hidden_size]`.
    pub pooled: Vec<Vec<f32>>,
}

/// Natural logarithms of the model's own probabilities, before penalties, temperature and all other options.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logprobs {
    /// The log probability of the drawn id.
    pub drawn: f32,
    /// The most likely ids, the likeliest first, ties to the lowest id.
    pub top: Vec<(u32, f32)>,
}

/// A failure of the device. The engine never computes elsewhere instead.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    #[error("the GPU was lost: {0}")]
    DeviceLost(String),
    #[error("the GPU did not finish a step within {seconds} s")]
    Timeout { seconds: u64 },
    /// The driver lacked memory for longer than the runner waits for it.
    #[error("the GPU reported: {0}")]
    OutOfMemory(String),
    /// Any other failure: the driver's words, or a wrong result.
    #[error("the GPU reported: {0}")]
    Device(String),
}

/// Runs steps on a device. Steps execute in submission order.
pub trait Runner: Send {
    fn limits(&self) -> Limits;

    /// Hands one step to the device and returns at once. Panics if the batch breaks [`Limits`], which is a bug of the
    /// caller.
    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError>;

    /// Gives the step that was submitted last the masks of its masked draws, in their order. A step with masked draws
    /// gets them once, before anything else is submitted or waited for; the device computes its layers meanwhile. Bit `id %
    /// 32` of word `id / 32` is set where an id may come, for the whole vocabulary.
    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError>;

    /// Blocks until the step is done; bounded in time.
    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError>;

    /// Whether there is a draft model, which drafts what this model will draw.
    fn has_draft(&self) -> bool {
        false
    }

    /// The tokens that the draft model draws for each of several sequences, at most `max_sequences`: as many as wanted,
    /// or fewer if its logits were not finite. Blocks until they are drawn; bounded in time. No step may be in flight.
    /// The call overwrites the last sampled ids of the slots, so the next input of these slots must be known ids.
    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        Ok(vec![Vec::new(); requests.len()])
    }

    /// Has the device compute a tiny dispatch and compares its result, with no step in flight; bounded in time. Changes
    /// nothing that sequences need.
    fn probe(&mut self) -> Result<(), RunnerError>;
}
