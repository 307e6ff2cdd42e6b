//! Draws token ids from logits, with penalties, biases, masks and log probabilities.

use super::Kernels;
use super::arrays::{Activations, StepArrays, words};
use super::shaders;
use crate::gpu::{Buffer, Pipeline, Recorder};

/// The id that the sampler writes if the logits are not finite.
pub const NO_TOKEN: u32 = u32::MAX;
/// Number of ids of a row that one workgroup reads (a chunk), when it samples or computes log probabilities.
pub(crate) const DRAW_CHUNK: usize = 4096;
/// Number of bins of a row of logits. Each bin has a count and a mass of 64 bits (`shaders/sample.comp`).
pub(crate) const DRAW_BINS: usize = 1024;
/// The most undecided ids of a row that are listed (`LIST` in `shaders/sample.comp`).
const DRAW_LIST: usize = 4096;
/// Number of words of a row's tallies (`TALLIES` in `shaders/sample.comp`).
const DRAW_TALLIES: usize = 8;
/// Number of words of a chunk's log probabilities (`shaders/logprobs.comp`).
const LOGPROB_PART: usize = 2 + 2 * MAX_LOGPROBS;
const MOST_CHUNKS: usize = 256;
/// The most alternatives whose log probabilities are reported with an id.
pub const MAX_LOGPROBS: usize = 20;
/// Number of words of a row's log probabilities: one for the drawn id, and a pair for each alternative.
pub const LOGPROB_WORDS: usize = 1 + 2 * MAX_LOGPROBS;

/// Rows of logits, and their changes by penalties and biases.
#[derive(Clone)]
pub struct Logits {
    pub raw: Activations,
    /// The changed logits: u32 of the same shape (`shaders/common/draws.glsl`).
    pub adjusted: Activations,
    /// Intermediate results of the kernels of a draw: u32 `[rows][draw_words(width)]`, see [`draw_words`].
    pub scratch: Activations,
    /// Number of ids that can be drawn; the remaining columns are padding.
    pub vocab: usize,
}

/// Words of scratch memory that a draw needs for each row of `vocab` logits.
pub const fn draw_words(vocab: usize) -> usize {
    let chunks = vocab.div_ceil(DRAW_CHUNK);
    (4 + 4 + LOGPROB_PART) * chunks + 3 * DRAW_LIST + DRAW_TALLIES + 3 * DRAW_BINS
}

/// The layout of [`Logits::scratch`] for a draw from `rows` rows (`shaders/sample.comp`, `shaders/logprobs.comp`).
#[doc(hidden)]
pub struct DrawScratch {
    pub maxima: Buffer,
    pub found: Buffer,
    /// Index of the first tally in `found`.
    tallies: u32,
    /// The bins of each row: `[rows][3][DRAW_BINS]`.
    pub bins: Buffer,
    /// The tallies and the bins together. All of it must be 0 before a draw.
    cleared: Buffer,
    parts: Buffer,
    chunks: u32,
}

impl DrawScratch {
    pub fn of(logits: &Logits, rows: usize) -> DrawScratch {
        let Logits { raw, scratch, vocab, .. } = logits;
        assert!(*vocab > 0 && *vocab <= raw.width, "draws from {vocab} ids");
        let chunks = vocab.div_ceil(DRAW_CHUNK);
        assert!(
            chunks <= MOST_CHUNKS,
            "draws from {vocab} ids, but at most {} are supported",
            MOST_CHUNKS * DRAW_CHUNK
        );
        let all = scratch.used(rows, draw_words(raw.width), "draws: scratch");
        let lists = 4 * chunks + 3 * DRAW_LIST;
        let mut offset = 0;
        let sizes = [4 * chunks, lists, DRAW_TALLIES, 3 * DRAW_BINS, LOGPROB_PART * chunks];
        let [maxima, found, tallies, bins, parts] = sizes.map(|words| {
            let bytes = 4 * (rows * words) as u64;
            offset += bytes;
            all.slice(offset - bytes, bytes)
        });
        // The two buffers are adjacent.
        let both = |a: &Buffer, b: &Buffer| all.slice(a.address() - all.address(), a.size() + b.size());
        DrawScratch {
            cleared: both(&tallies, &bins),
            found: both(&found, &tallies),
            tallies: (rows * lists) as u32,
            maxima,
            bins,
            parts,
            chunks: chunks as u32,
        }
    }
}

/// Sampling parameters of one row, in the layout of the shaders (`shaders/common/draws.glsl`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct SampleRequest {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub seed_low: u32,
    pub seed_high: u32,
    pub position: u32,
    pub slot: u32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// The request's row of the history.
    pub history_slot: u32,
    /// Number of ids of the history that penalties apply to; 0 turns penalties off.
    pub history_len: u32,
    /// How many of these ids belong to the prompt. They come first.
    pub prompt_len: u32,
    /// Index of the request's first pair in [`DrawArrays::bias`].
    pub first_bias: u32,
    /// Number of the request's pairs. No id may occur twice.
    pub biases: u32,
    /// The row of [`DrawArrays::masks`], plus 1. 0 allows every id.
    pub mask: u32,
    /// The number of reported alternatives (at most [`MAX_LOGPROBS`]), plus 1. 0 reports no log probabilities.
    pub logprobs: u32,
}

impl SampleRequest {
    /// An upper bound for the invocations that `adjust` needs: one for each id of the history or each bias.
    fn changes(&self) -> u32 {
        self.history_len.max(self.biases)
    }

    /// Whether the draw is random, not greedy.
    fn draws(&self) -> bool {
        self.temperature > 0.0
    }

    fn filters(&self, vocab: usize) -> bool {
        self.draws() && ((self.top_k > 0 && (self.top_k as usize) < vocab) || self.top_p < 1.0)
    }
}

/// A bias that is added to the logit of an id. Negative infinity forbids the id.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Bias {
    pub id: u32,
    pub bias: f32,
}

/// Arguments and results of a step's draws.
#[derive(Clone)]
pub struct DrawArrays {
    /// [`SampleRequest`] of each row.
    pub requests: Buffer,
    /// The [`Bias`]es of all requests.
    pub bias: Buffer,
    /// The masks: u32 `[masks][mask_words(vocab)]`, see [`mask_words`]. The bit of each allowed id is set.
    pub masks: Buffer,
    /// The drawn ids: u32 `[rows]`.
    pub ids: Buffer,
    /// The log probabilities, `[rows][LOGPROB_WORDS]`: f32 of the drawn id, then pairs of u32 id and f32.
    pub logprobs: Buffer,
}

impl DrawArrays {
    fn requests_of(&self, rows: usize) -> Buffer {
        let bytes = (rows * size_of::<SampleRequest>()) as u64;
        assert!(self.requests.size() >= bytes, "{rows} requests do not fit");
        self.requests.slice(0, bytes)
    }
}

/// The ids of each slot's sequence, by position: u32 `[slots][slot_len]`.
#[derive(Clone)]
pub struct History {
    pub ids: Buffer,
    pub slot_len: usize,
}

/// The number of words of a mask of `vocab` ids.
pub const fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

impl Kernels {
    /// Writes the ids of `tokens` tokens into the histories of their sequences. `slots` has the history slot (u32) of
    /// each sequence in [`StepArrays::sequence_of`].
    pub fn history(
        &self,
        recorder: &mut Recorder<'_>,
        step: &StepArrays,
        slots: &Buffer,
        sampled: &Buffer,
        history: &History,
        tokens: usize,
    ) {
        let arguments = shaders::History {
            ids: &words(&step.ids, tokens, "history: ids"),
            sampled,
            positions: &words(&step.positions, tokens, "history: positions"),
            sequence_of: &words(&step.sequence_of, tokens, "history: sequence_of"),
            slots,
            history: &history.ids,
            tokens: tokens as u32,
            slot_len: history.slot_len as u32,
        };
        recorder.dispatch(&self.history, &arguments, [(tokens as u32).div_ceil(64), 1, 1]);
    }

    /// Writes the logits that penalties and biases change to [`Logits::adjusted`]. All its words must be 0 before;
    /// [`Kernels::clear_adjusted`] clears them again. `requests` must be equal to [`DrawArrays::requests`]. Records
    /// nothing if no request changes a logit.
    pub fn adjust(
        &self,
        recorder: &mut Recorder<'_>,
        logits: &Logits,
        draws: &DrawArrays,
        history: &History,
        requests: &[SampleRequest],
    ) {
        let [count, penalize, bias] = &self.adjust;
        if requests.iter().any(|request| request.history_len > 0) {
            self.adjust_by(recorder, count, logits, draws, history, requests);
            self.adjust_by(recorder, penalize, logits, draws, history, requests);
        }
        if requests.iter().any(|request| request.biases > 0) {
            self.adjust_by(recorder, bias, logits, draws, history, requests);
        }
    }

    /// Clears the words that [`Kernels::adjust`] wrote.
    pub fn clear_adjusted(
        &self,
        recorder: &mut Recorder<'_>,
        logits: &Logits,
        draws: &DrawArrays,
        history: &History,
        requests: &[SampleRequest],
    ) {
        if requests.iter().any(|request| request.changes() > 0) {
            self.adjust_by(recorder, &self.adjust_clear, logits, draws, history, requests);
        }
    }

    fn adjust_by(
        &self,
        recorder: &mut Recorder<'_>,
        pipeline: &Pipeline,
        logits: &Logits,
        draws: &DrawArrays,
        history: &History,
        requests: &[SampleRequest],
    ) {
        let (rows, Logits { raw, adjusted, .. }) = (requests.len(), logits);
        for request in requests {
            let bytes = (request.first_bias + request.biases) as usize * size_of::<Bias>();
            assert!(draws.bias.size() >= bytes as u64, "adjust: bias");
            assert!(request.history_len as usize <= history.slot_len, "adjust: history");
        }
        let arguments = shaders::Adjust {
            logits: Some(&raw.used(rows, adjusted.width, "adjust: logits")),
            adjusted: &adjusted.used(rows, raw.width, "adjust: adjusted"),
            requests: &draws.requests_of(rows),
            history: Some(&history.ids),
            bias: Some(&draws.bias),
            stride: raw.stride as u32,
            slot_len: history.slot_len as u32,
        };
        let most = requests.iter().map(SampleRequest::changes).max().unwrap_or(0);
        recorder.dispatch(pipeline, &arguments, [most.div_ceil(256).clamp(1, 64), rows as u32, 1]);
    }

    /// Draws an id for each row of the logits that [`Kernels::adjust`] changed, and writes it to `ids[row]` and
    /// `sampled[slot]`. `requests` must be equal to [`DrawArrays::requests`]. Records only the kernels that the
    /// requests need: one pass over the logits if all requests are greedy, two passes if none has top_k or top_p,
    /// otherwise three.
    pub fn sample(
        &self,
        recorder: &mut Recorder<'_>,
        logits: &Logits,
        draws: &DrawArrays,
        sampled: &Buffer,
        requests: &[SampleRequest],
    ) {
        let (rows, Logits { raw, adjusted, vocab, .. }) = (requests.len(), logits);
        let DrawScratch { maxima, found, tallies, bins, cleared, chunks, .. } = DrawScratch::of(logits, rows);
        let arguments = shaders::Sample {
            logits: Some(&raw.used(rows, raw.width, "sample: logits")),
            adjusted: Some(&adjusted.used(rows, raw.width, "sample: adjusted")),
            masks: Some(&draws.masks),
            requests: &draws.requests_of(rows),
            maxima: &maxima,
            bins: Some(&bins),
            found: Some(&found),
            ids: Some(&words(&draws.ids, rows, "sample: ids")),
            sampled: Some(sampled),
            vocab: *vocab as u32,
            logits_stride: raw.stride as u32,
            mask_words: mask_words(raw.width) as u32,
            tallies,
        };
        let (of_chunks, of_rows) = ([chunks, rows as u32, 1], [rows as u32, 1, 1]);
        let filters = requests.iter().any(|request| request.filters(*vocab));
        if filters {
            // No barrier is needed: the fill runs at the same time as the first kernel, which does not use these words.
            recorder.fill(&cleared, 0);
        }
        recorder.dispatch(&self.sample.maxima, &arguments, of_chunks);
        if !requests.iter().any(SampleRequest::draws) {
            recorder.dispatch(&self.sample.greedy, &arguments, of_rows);
            return;
        }
        if filters {
            recorder.dispatch(&self.sample.masses, &arguments, of_chunks);
        }
        recorder.dispatch(&self.sample.draw, &arguments, of_chunks);
        recorder.dispatch(&self.sample.choice, &arguments, of_rows);
    }

    /// Computes log probabilities from the raw logits, for the drawn ids and the most likely ids, in the rows whose
    /// requests report them.
    pub fn logprobs(&self, recorder: &mut Recorder<'_>, logits: &Logits, draws: &DrawArrays, rows: usize) {
        let Logits { raw, vocab, .. } = logits;
        let DrawScratch { parts, chunks, .. } = DrawScratch::of(logits, rows);
        let arguments = shaders::Logprobs {
            logits: &raw.used(rows, raw.width, "logprobs: logits"),
            requests: &draws.requests_of(rows),
            ids: Some(&words(&draws.ids, rows, "logprobs: ids")),
            parts: &parts,
            result: Some(&words(&draws.logprobs, rows * LOGPROB_WORDS, "logprobs: result")),
            vocab: *vocab as u32,
            logits_stride: raw.stride as u32,
            out_stride: LOGPROB_WORDS as u32,
        };
        let [of_chunks, merge] = &self.logprobs;
        recorder.dispatch(of_chunks, &arguments, [chunks, rows as u32, 1]);
        recorder.dispatch(merge, &arguments, [rows as u32, 1, 1]);
    }
}
