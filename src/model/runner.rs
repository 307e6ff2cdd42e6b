//! The seam between the engine (which owns sequences and blocks) and the model (which owns the device).
//!
//! The engine speaks in plain arrays: a batch holds no callback, and masks, which take a while to make, are pushed
//! behind it. Sampling happens on the device, and a sampled id feeds the next step there, so that the engine can
//! prepare and submit a step before it has seen the last one's ids. Implementations: [`crate::model::gemma3::Gemma3`],
//! and the scripted fake of the engine's tests.

use std::borrow::Cow;
use std::sync::Arc;

use super::sampling::SamplingParams;
pub use crate::kernels::MAX_LOGPROBS;

/// Biases that one draw takes at most.
pub const MAX_BIASES: usize = 1024;

/// The KV cache of a runner: two pools of blocks, for Gemma-3 has two kinds of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLimits {
    /// Tokens per block, in both pools.
    pub block_size: usize,
    /// Blocks of the layers that see every token; ids are `0..full_blocks`.
    pub full_blocks: usize,
    /// Blocks of the layers that see a window of tokens; ids are `0..sliding_blocks`.
    pub sliding_blocks: usize,
    /// Keys that a token sees in those, itself included; none where the model has no such layer.
    pub sliding_window: Option<usize>,
}

impl KvLimits {
    /// Blocks of sliding layers that one sequence holds at most: a window, and the tokens of one step behind it.
    pub fn window_blocks(&self, max_batch_tokens: usize) -> usize {
        self.sliding_window.map_or(0, |window| (window + max_batch_tokens).div_ceil(self.block_size) + 1)
    }
}

/// What a runner can hold; fixed when the model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens one step may process, over all its sequences.
    pub max_batch_tokens: usize,
    /// Sequences one step may contain, and slots for sampled ids.
    pub max_sequences: usize,
    /// Ids one step may draw; no fewer than `max_sequences`.
    pub max_draws: usize,
    /// Steps that may be submitted and not yet waited for.
    pub max_in_flight: usize,
    pub kv: KvLimits,
    /// Longest sequence, prompt and answer together: min(model's maximum, what the KV pools hold).
    pub max_context: usize,
    /// Ids a prompt may contain and sampling may yield are `0..vocab_size`.
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
    /// The same of sliding layers, from the block of index `sliding_first` on: all that the positions see.
    pub sliding_blocks: Vec<u32>,
    pub sliding_first: usize,
    /// The ids at `0..start`, where draws of the sequence count them and this slot did not compute them. All sequences
    /// of a step have at most `max_context` together.
    pub history: Option<Vec<u32>>,
}

/// A slot whose first ids are those of another, as they are when a step's tokens are computed.
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
    /// Made before anything is computed.
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
    /// Slot that the id goes to: the sequence's own, or that of one which is forked from it.
    pub slot: u32,
    /// Shared by all draws of a request. [`SamplingParams::biases`] are at most [`MAX_BIASES`].
    pub params: Arc<SamplingParams>,
    /// The draw at a position depends on (seed, position) and the logits, on nothing else.
    pub seed: u64,
    /// Tokens of the sequence that are its prompt; those behind them are its answer.
    pub prompt_len: usize,
    /// Whether a mask says which ids may come ([`Runner::masks`]); else all may.
    pub masked: bool,
    /// As [`SamplingParams::logprobs`], at most [`MAX_LOGPROBS`]; none for a guess, which no reader is told of.
    pub logprobs: Option<usize>,
}

impl Draw {
    /// The biases of the id behind the first `tokens` of the sequence.
    pub fn biases(&self, tokens: usize) -> Cow<'_, [(u32, f32)]> {
        self.params.biases(tokens.saturating_sub(self.prompt_len))
    }
}

/// A sequence whose final hidden states are added up, those of its tokens in this step to those of the steps before; a
/// sum begins anew at position 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pooling {
    /// Index into `Batch::sequences`.
    pub sequence: usize,
    /// Whether the sum comes back: its last token is in this step.
    pub last: bool,
}

/// What a step yields.
#[derive(Debug, Clone, Default)]
pub struct Sampling {
    /// In ascending order of (sequence, token).
    pub draws: Vec<Draw>,
    /// In ascending order, none twice.
    pub pooling: Vec<Pooling>,
}

/// A sequence whose next ids a draft model is to guess, none of whose steps is in flight.
#[derive(Debug, Clone)]
pub struct DraftRequest {
    /// Its one token that is known and not computed, and blocks for a token in front of each guess.
    pub sequence: BatchSequence,
    /// How each guess is drawn, which is how a step would draw it. It has neither a mask nor log probabilities.
    pub draw: Draw,
    /// How many ids to draw, one behind the other; at least one.
    pub guesses: usize,
}

/// A submitted step; wait for tickets in the order in which they were given.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// What one step yielded. The ids: one per entry of [`Sampling::draws`], in that order; none where the logits were no
/// finite numbers, which is the sequence's fault, not the device's: the others may go on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampled {
    pub ids: Vec<Option<u32>>,
    /// For each of them, where they were wanted.
    pub logprobs: Vec<Option<Logprobs>>,
    /// For each entry of [`Sampling::pooling`] that was the last of its sequence: the sums of the hidden states behind
    /// the final norm, `[hidden_size]`.
    pub pooled: Vec<Vec<f32>>,
}

/// Natural logarithms of what the model itself holds for likely, before penalties, temperature and the rest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logprobs {
    /// Of the id that was drawn.
    pub drawn: f32,
    /// The most likely ids, the likeliest first, ties to the lowest id.
    pub top: Vec<(u32, f32)>,
}

/// The device failed. None of these is answered by computing elsewhere.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    #[error("the GPU was lost: {0}")]
    DeviceLost(String),
    #[error("the GPU did not finish a step within {seconds} s")]
    Timeout { seconds: u64 },
    /// The driver lacked memory for so long that waiting for it was given up.
    #[error("the GPU reported: {0}")]
    OutOfMemory(String),
    /// Something else: what it said, or a result that is wrong.
    #[error("the GPU reported: {0}")]
    Device(String),
}

/// Runs steps on a device. Steps execute in submission order.
pub trait Runner: Send {
    fn limits(&self) -> Limits;

    /// Hands one step to the device and returns at once. A batch that breaks [`Limits`] is a bug of the
    /// caller and panics.
    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError>;

    /// Gives the step that was submitted last the masks of its masked draws, in their order. A step with such draws
    /// gets them once, before anything else is submitted or waited for; its layers are under way meanwhile. Bit `id %
    /// 32` of word `id / 32` is set where an id may come, for the whole vocabulary.
    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError>;

    /// Blocks until the step is done; bounded in time.
    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError>;

    /// Whether there is a second model that guesses what this one draws.
    fn has_draft(&self) -> bool {
        false
    }

    /// What that model draws for each of several sequences, at most `max_sequences`: as many ids as wanted, fewer where
    /// its logits were no finite numbers. Blocks until it has; bounded in time. Nothing may be in flight. What was last
    /// sampled for the slots is lost: their next input is known ids.
    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        Ok(vec![Vec::new(); requests.len()])
    }

    /// Has the device compute something tiny and compares what comes back, with no step in flight; bounded in time.
    /// Leaves what sequences need as it is.
    fn probe(&mut self) -> Result<(), RunnerError>;
}
