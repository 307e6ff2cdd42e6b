//! The interface between the engine, which owns sequences and blocks, and the model, which owns the device.
//!
//! The engine passes plain arrays: a batch holds no callback. Masks, which take time to make, are pushed after the
//! batch. Sampling happens on the device, and a sampled id feeds the next step there, so the engine can prepare and
//! submit a step before it has seen the last step's ids. Two types implement [`Runner`]:
//! [`crate::model::model_runner::ModelRunner`], and the scripted fake of the engine's tests.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::sampling::SamplingParams;
use crate::config::{Courtesy, IMAGE_TOKENS};
pub use crate::kernels::MAX_LOGPROBS;

/// The most biases of one draw.
pub const MAX_BIASES: usize = 1024;

/// The size of a runner's KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLimits {
    /// Tokens per block, in every pool.
    pub block_size: usize,
    /// A pool of blocks for each group of layers. The first one has no window, even if no layer is in it.
    pub pools: Vec<KvPool>,
}

/// A pool of KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvPool {
    /// Number of keys that a token sees in the pool's layers, its own included; `None` = all.
    pub window: Option<usize>,
    /// Number of blocks; their ids are `0..blocks`.
    pub blocks: usize,
}

impl KvLimits {
    /// The most blocks of each pool that a sequence of `tokens` tokens holds: all, or those of a window and of
    /// `in_flight` tokens after it, whose steps are in flight.
    pub fn most_blocks(&self, tokens: usize, in_flight: usize) -> Vec<usize> {
        let all = tokens.div_ceil(self.block_size);
        let of_window = |window: usize| (window + in_flight).div_ceil(self.block_size) + 1;
        let most = |pool: &KvPool| pool.window.map_or(all, |window| all.min(of_window(window)));
        self.pools.iter().map(most).collect()
    }
}

/// The first position that the token at `position` sees.
pub fn first_seen(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// The bounds of a runner, fixed when the model is loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The most tokens of a step, over all its sequences.
    pub max_batch_tokens: usize,
    /// The most sequences of a step. Each has a slot for its sampled id.
    pub max_sequences: usize,
    /// The most ids that a step draws; no fewer than `max_sequences`.
    pub max_draws: usize,
    /// The most steps that are submitted and not yet waited for.
    pub max_in_flight: usize,
    pub kv: KvLimits,
    /// Bytes of a block of each pool in all layers together, a draft model's included. Empty if the runner does not read
    /// and write blocks ([`Runner::read_blocks`]).
    pub block_bytes: Vec<u64>,
    /// The longest sequence, prompt and answer together: the model's maximum, or less if the KV pools hold less.
    pub max_context: usize,
    /// Number of ids: ids in prompts and sampled ids are `0..vocab_size`.
    pub vocab_size: usize,
    /// Number of elements of a hidden state.
    pub hidden_size: usize,
    /// The bytes of weights that steps of 1, 2, ... tokens are expected to read, of a mixture of experts: more tokens use
    /// more experts. Empty if all steps read the same weights.
    pub step_bytes: Vec<u64>,
    /// How the model takes images; `None` = it takes none.
    pub images: Option<ImageLimits>,
}

/// How a model takes images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLimits {
    pub sizes: ImageSizes,
    /// The most tokens of an image, at most [`Limits::max_batch_tokens`].
    pub tokens: usize,
    /// The most tokens of an image whose request does not ask for more or fewer; at most `tokens`.
    pub usual_tokens: usize,
    /// Number of slots that keep the embeddings of an image.
    pub slots: usize,
}

/// The sizes of the images that a model takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageSizes {
    /// Every image is made a square of `side` pixels, and has [`ImageLimits::tokens`] tokens.
    Fixed { side: usize },
    /// An image nearly keeps its aspect. Both sides are multiples of `unit` pixels, at most `longest` of them, and each square
    /// of `unit` pixels is a token.
    ByTokens { unit: usize, longest: usize },
}

/// How many tokens an image may have, in a model that lets a request choose. One of [`ImageBudget::ALL`] each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageBudget {
    /// Without a choice.
    pub usual: usize,
    /// At most.
    pub most: usize,
}

impl ImageBudget {
    /// The numbers of tokens that models are trained with, from the least to the most.
    pub const ALL: [usize; 5] = IMAGE_TOKENS;
}

impl Default for ImageBudget {
    fn default() -> Self {
        ImageBudget { usual: 280, most: 1120 }
    }
}

impl ImageLimits {
    /// The width and height in the model of an image of `[width, height]` pixels, with at most `budget` tokens. Both sides
    /// must be positive.
    ///
    /// The formula is that of transformers' `get_aspect_ratio_preserving_size`, in the same order of operations.
    pub fn fit(&self, [width, height]: [usize; 2], budget: usize) -> [usize; 2] {
        let (unit, longest) = match self.sizes {
            ImageSizes::Fixed { side } => return [side; 2],
            ImageSizes::ByTokens { unit, longest } => (unit, longest),
        };
        let budget = budget.min(self.tokens);
        let target = (budget * unit * unit) as f64;
        let factor = (target / (width * height) as f64).sqrt();
        let units = |side: usize| (factor * side as f64 / unit as f64).floor() as usize;
        let (across, down) = match (units(width), units(height)) {
            // A very long image is one unit high.
            (_, 0) => ((width / height).min(budget), 1),
            (0, _) => (1, (height / width).min(budget)),
            both => both,
        };
        [unit * across.min(longest), unit * down.min(longest)]
    }

    /// Bytes of the pixels of an image with that many tokens, 3 for each pixel.
    pub fn pixel_bytes(&self, tokens: usize) -> usize {
        match self.sizes {
            ImageSizes::Fixed { side } => 3 * side * side,
            ImageSizes::ByTokens { unit, .. } => 3 * unit * unit * tokens,
        }
    }

    /// The tokens of an image of that width and height. `None` if the model takes no such image.
    pub fn tokens_of(&self, [width, height]: [usize; 2]) -> Option<usize> {
        let tokens = match self.sizes {
            ImageSizes::Fixed { side } => (width == side && height == side).then_some(self.tokens)?,
            ImageSizes::ByTokens { unit, longest } => {
                let sides = [width, height];
                let is_taken = sides.iter().all(|side| side.is_multiple_of(unit) && side / unit <= longest);
                is_taken.then_some((width / unit) * (height / unit))?
            }
        };
        (1..=self.tokens).contains(&tokens).then_some(tokens)
    }
}

impl Limits {
    /// The expected cost of a step of `tokens` tokens relative to others, if memory bounds it: by the weights that it reads.
    pub fn step_cost(&self, tokens: usize) -> f64 {
        let last = self.step_bytes.len().saturating_sub(1);
        self.step_bytes.get(tokens.saturating_sub(1).min(last)).map_or(1.0, |bytes| *bytes as f64)
    }
}

/// A copy of a block's contents to another block, made before a step's tokens are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCopy {
    /// Index in [`KvLimits::pools`].
    pub pool: usize,
    pub from: u32,
    pub to: u32,
}

/// A KV block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PoolBlock {
    /// Index in [`KvLimits::pools`].
    pub pool: usize,
    pub block: u32,
}

/// The tokens of one sequence in one step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// Known ids: a prompt, or a chunk of one. Never empty.
    Ids(#[serde(with = "words")] Vec<u32>),
    /// The id last sampled for this sequence's slot; the host need not know it yet.
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSequence {
    /// The sequence's device slot, one of `max_sequences`; it stays the same while the sequence runs.
    pub slot: u32,
    /// Number of tokens that are in the KV cache already.
    pub start: usize,
    pub input: Input,
    /// The blocks of each pool: all blocks that the input's positions see. There may be more of them.
    pub blocks: Vec<BlockList>,
    /// The input's tokens of images, in ascending order.
    pub images: Vec<ImageSpan>,
    /// The ids at `0..start`, if the sequence's penalties count ids and this slot did not compute them. All histories
    /// of one step together have at most `max_context` ids.
    pub history: Option<Vec<u32>>,
}

/// Tokens of one image in an input. They see each other in both directions. So an input never ends within an image. It
/// begins within one only if the KV cache has the tokens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpan {
    /// The index of the first token in the input, and the number of tokens.
    pub start: usize,
    pub tokens: usize,
    /// The slot that has the image's embeddings ([`Runner::encode_image`]), and the row of the first token there.
    pub slot: u32,
    pub row: usize,
}

/// The blocks of a sequence in one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockList {
    /// The index of the first of these blocks; block `i` of a sequence has its positions from `i * block_size` on.
    pub first: usize,
    #[serde(with = "words")]
    pub ids: Vec<u32>,
}

impl BlockList {
    /// The block with index `index`, if it is in the list.
    pub fn get(&self, index: usize) -> Option<u32> {
        index.checked_sub(self.first).and_then(|i| self.ids.get(i)).copied()
    }

    /// The index after the last block.
    pub fn end(&self) -> usize {
        self.first + self.ids.len()
    }
}

/// A copy of the first `tokens` ids of one slot's history to another slot, made when a step's tokens are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryCopy {
    pub from: u32,
    pub to: u32,
    pub tokens: usize,
}

/// One step. A batch has no phase: prefill chunks and decodes differ only in their length.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    pub sequences: Vec<BatchSequence>,
    /// Copies of blocks, which are made before anything is computed.
    pub copies: Vec<BlockCopy>,
    pub history_copies: Vec<HistoryCopy>,
}

impl Batch {
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.input.len()).sum()
    }
}

/// A request to draw the id that follows a token of a batch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Draw {
    /// Index into `Batch::sequences`.
    pub sequence: usize,
    /// The index of the token in that sequence's input. The drawn id follows this token.
    pub token: usize,
    /// The slot that gets the id: the sequence's own, or the slot of a fork of the sequence.
    pub slot: u32,
    /// The sampling parameters, which all draws of a request share. [`SamplingParams::biases`] are at most
    /// [`MAX_BIASES`].
    #[serde(with = "shared")]
    pub params: Arc<SamplingParams>,
    /// The seed of the random numbers. A draw depends on (seed, position) and the logits, and on nothing else.
    pub seed: u64,
    /// Number of tokens of the sequence's prompt; the tokens after it are the answer.
    pub prompt_len: usize,
    /// Whether a mask limits which ids are allowed ([`Runner::masks`]). Without a mask, all ids are allowed.
    pub masked: bool,
    /// As [`SamplingParams::logprobs`], at most [`MAX_LOGPROBS`]. `None` for a draft token, because its log
    /// probabilities are not reported.
    pub logprobs: Option<usize>,
}

impl Draw {
    /// The biases for the id after the first `tokens` tokens of the sequence.
    pub fn biases(&self, tokens: usize) -> Cow<'_, [(u32, f32)]> {
        self.params.biases(tokens.saturating_sub(self.prompt_len))
    }
}

/// Serializes words as one byte string. Thousands of numbers, written and read one by one, would take longer than the
/// rest of a message.
pub(crate) mod words {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(words: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(words))
    }

    pub fn deserialize<'de, D: Deserializer<'de>, W: FromIterator<u32>>(
        deserializer: D,
    ) -> Result<W, D::Error> {
        let (words, rest) = <&[u8]>::deserialize(deserializer)?.as_chunks();
        if !rest.is_empty() {
            return Err(D::Error::custom("bytes that are no words"));
        }
        Ok(words.iter().map(|&word| u32::from_ne_bytes(word)).collect())
    }
}

/// Serializes parameters with one draw for another process. There, draws do not share them.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::model::SamplingParams;

    pub fn serialize<S: Serializer>(params: &Arc<SamplingParams>, serializer: S) -> Result<S::Ok, S::Error> {
        params.as_ref().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<SamplingParams>, D::Error> {
        SamplingParams::deserialize(deserializer).map(Arc::new)
    }
}

/// A request for the sum of a sequence's final hidden states. The states of this step's tokens are added to the sum of
/// the earlier steps. At position 0, the sum starts from zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pooling {
    /// Index into `Batch::sequences`.
    pub sequence: usize,
    /// Whether the sequence's last token is in this step. The runner returns the sum with that step.
    pub last: bool,
}

/// The results that the caller wants from a step.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Sampling {
    /// Draws in ascending order of (sequence, token).
    pub draws: Vec<Draw>,
    /// Requests for sums in ascending order of sequences, at most one for each.
    pub pooling: Vec<Pooling>,
}

/// A sequence that the draft model is to draft tokens for. The sequence has no step in flight.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DraftRequest {
    /// The one token of the sequence that is known and not computed. The blocks suffice for it and all draft tokens but
    /// the last.
    pub sequence: BatchSequence,
    /// The draw of each draft token, the same as a step's draw. It has neither a mask nor log probabilities.
    pub draw: Draw,
    /// How many tokens to draft, one after the other; at least one.
    pub num_draft_tokens: usize,
}

/// The handle of a submitted step. The caller waits for tickets in the order in which it got them.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// The results of one step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// One id for each entry of [`Sampling::draws`], in that order. `None` if the logits were not finite. This is a
    /// fault of the sequence only: other sequences may continue.
    pub ids: Vec<Option<u32>>,
    /// Log probabilities of each id, if they were requested.
    pub logprobs: Vec<Option<Logprobs>>,
    /// For each entry of [`Sampling::pooling`] that was the last of its sequence: the sums of the hidden states after
    /// the final norm, `[hidden_size]`.
    pub pooled: Vec<Vec<f32>>,
    /// The number of different experts that a layer used, added up over the layers. 0 without experts, and if an NPU
    /// computed a part of the step.
    pub used_experts: u32,
}

/// Natural logarithms of the model's own probabilities, before penalties, temperature and all other options apply.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// The log probability of the drawn id.
    pub drawn: f32,
    /// The most likely ids, the likeliest first, ties to the lowest id.
    pub top: Vec<(u32, f32)>,
}

/// The device, or a required coprocessor, failed. This runner cannot be used again. The engine never falls back to
/// another device; a [`RunnerFactory`] may start another runner on the same device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RunnerError {
    /// The driver lacked memory for longer than the runner waits for memory.
    #[error("the GPU's driver is out of memory: {0}")]
    Busy(String),
    /// The device is lost, or its driver or the process that drives it has failed.
    #[error("the GPU was lost: {0}")]
    Lost(String),
    #[error("the GPU hangs: it has finished nothing for {seconds} s")]
    Hung { seconds: u64 },
    /// The device computed a wrong result.
    #[error("the GPU computes wrong: {0}")]
    Wrong(String),
    /// A required coprocessor has failed; the text begins with the failure's code.
    #[error("{0}")]
    Coprocessor(String),
}

/// Runs steps on a device. Steps execute in submission order.
pub trait Runner: Send {
    fn limits(&self) -> &Limits;

    /// Submits one step to the device and returns immediately. If courtesy is bound, or if a coprocessor computes a
    /// part of the step's attention, it returns with the step's last submit. Panics if the batch breaks [`Limits`],
    /// which is a bug of the caller.
    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError>;

    /// Gives the step that was submitted last the masks of its masked draws, in their order. A step with masked draws
    /// gets its masks once, before anything else is submitted or waited for. Until then, the device computes the step's
    /// layers. If bit `id % 32` of word `id / 32` is set, the id is allowed. A mask covers the whole vocabulary.
    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError>;

    /// Bounds the share of the device's time that this runner takes from its next submit on: submits get shorter, and
    /// gaps come between them. Results do not depend on it. A new runner has [`Courtesy::NONE`].
    fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<(), RunnerError>;

    /// Blocks until the step is done; bounded in time.
    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError>;

    /// The processors that compute attention: 0 is the device alone. The results of different paths are equal within a
    /// tolerance, but not bit by bit. The path changes if the runner loses its coprocessor.
    fn attention_path(&self) -> u32 {
        0
    }

    /// Computes the embeddings of an image, and keeps them in a slot of [`ImageLimits::slots`] until another image takes
    /// it. `pixels` are red, green and blue of `[height, width]`, rows from top to bottom. Blocks until they are computed;
    /// bounded in time. Steps in flight still read the slot's old embeddings. Panics if [`Limits::images`] is `None` or does
    /// not have this size.
    fn encode_image(
        &mut self,
        slot: u32,
        [width, height]: [usize; 2],
        _pixels: &[u8],
    ) -> Result<(), RunnerError> {
        panic!("an image of {width} * {height} pixels for slot {slot} of a model that takes none")
    }

    /// The contents of blocks, one after the other, each of as many bytes as [`Limits::block_bytes`] says. Another runner
    /// of the same model on the same device and driver may write them to its blocks. Waits for all steps that were
    /// submitted before; bounded in time.
    fn read_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, RunnerError> {
        panic!("this runner does not read blocks: {blocks:?}")
    }

    /// Writes the contents of blocks, as [`Runner::read_blocks`] returned them. No step that was submitted before may use
    /// the blocks. Blocks until they are written; bounded in time. Panics if `bytes` are more or fewer than the blocks have.
    fn write_blocks(&mut self, blocks: &[PoolBlock], _bytes: &[u8]) -> Result<(), RunnerError> {
        panic!("this runner does not write blocks: {blocks:?}")
    }

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

    /// Runs a very small computation with a known result on the device, with no step in flight; bounded in time. The
    /// probe changes nothing that sequences need.
    fn probe(&mut self) -> Result<(), RunnerError>;
}

/// Starts a runner again, after the device was lost or the model was unloaded.
pub trait RunnerFactory: Send {
    /// Starts a runner of the same model with the same limits and an empty KV cache. The previous runner is dropped.
    /// Blocks while the model is loaded, and fails soon after `cancelled` is set.
    fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<Box<dyn Runner>, RunnerError>;
}
