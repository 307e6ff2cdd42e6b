//! The parts of a model that `unicorn eval` and calibration need: the logits of every token, and statistics of the
//! inputs of its matrices.

use super::memory::READBACK_ROWS;
use super::model_runner::ModelRunner;
use super::step::StepOutputs;
use super::tensors::Inputs;
use super::{Batch, BatchSequence, BlockList, Input, KvPool, RunnerError, first_seen};
use crate::gpu::{Buffer, CommandBuffer, GpuError};

impl ModelRunner {
    /// Runs `tokens` through the layers to sum up the squares of the matrices' inputs. `each` is called with the number
    /// of tokens done. Panics if the tokens do not fit the context.
    pub fn observe(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize)) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "observing while a step is in flight");
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let chunk = self.limits.max_batch_tokens;
        for (i, ids) in tokens.chunks(chunk).enumerate() {
            self.run(0, &self.alone(i * chunk, ids), StepOutputs::default())?;
            self.wait_for(0)?;
            each(i * chunk + ids.len());
        }
        Ok(())
    }

    /// The sums of squares of the matrices' inputs over all tokens that ran, for each layer, by column; of experts, by
    /// expert and column. Panics if the model was loaded without `moments`.
    pub fn take_moments(&mut self) -> Result<Vec<Inputs<Vec<f32>>>, RunnerError> {
        assert!(self.in_flight.is_empty(), "reading while a step is in flight");
        let mut commands = CommandBuffer::new(&self.device, "moments")?;
        let readback = &self.logits_readback;
        let mut read = |sums: &Buffer| {
            let mut values = vec![0f32; sums.size() as usize / 4];
            // The sums of all experts may be larger than the buffer.
            for (i, values) in values.chunks_mut(readback.size() as usize / 4).enumerate() {
                let bytes = 4 * values.len() as u64;
                let mut recorder = commands.begin()?;
                recorder.copy(&sums.slice(i as u64 * readback.size(), bytes), readback, bytes);
                recorder.submit_alone("reading moments")?;
                commands.wait()?;
                readback.read(0, values);
            }
            Ok::<_, GpuError>(values)
        };
        let mut all = Vec::new();
        for layer in &self.layers {
            let moments = layer.moments.as_ref().expect("a model loaded with moments");
            all.push(moments.as_ref().try_map(&mut read)?);
        }
        Ok(all)
    }

    /// A batch of one sequence, which may use all KV blocks.
    pub(super) fn alone(&self, start: usize, ids: &[u32]) -> Batch {
        let kv = &self.limits.kv;
        let blocks = (start + ids.len()).div_ceil(kv.block_size) as u32;
        // A pool's blocks form a ring: when a block is written again, its old tokens are outside the window.
        let list = |pool: &KvPool| {
            let first = first_seen(pool.window, start) / kv.block_size;
            BlockList { first, ids: (first as u32..blocks).map(|block| block % pool.blocks as u32).collect() }
        };
        Batch {
            sequences: vec![BatchSequence {
                slot: 0,
                start,
                input: Input::Ids(ids.to_vec()),
                blocks: kv.pools.iter().map(list).collect(),
                images: Vec::new(),
                history: None,
            }],
            ..Batch::default()
        }
    }

    /// Computes the logits at every position of `tokens`, without the prefix cache, and with nothing else in flight.
    /// `each(first, rows)` gets rows of `vocab_size` f32 for positions `first..`, in order. Panics if the tokens do not
    /// fit the context.
    pub fn logits(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "logits while a step is in flight");
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let chunk = self.limits.max_batch_tokens.min(READBACK_ROWS);
        let (vocab, stride) = (self.config.vocab_size, self.scratch.logits.raw.stride);
        let mut padded = vec![0f32; chunk * stride];
        let mut rows = vec![0f32; chunk * vocab];
        for (i, ids) in tokens.chunks(chunk).enumerate() {
            let start = i * chunk;
            let batch = self.alone(start, ids);
            let all = StepOutputs { rows: (0..ids.len() as u32).collect(), ..StepOutputs::default() };
            self.run(0, &batch, all)?;
            self.wait_for(0)?;
            let n = ids.len();
            self.logits_readback.read(0, &mut padded[..n * stride]);
            for (to, from) in rows.chunks_exact_mut(vocab).zip(padded.chunks_exact(stride)).take(n) {
                to.copy_from_slice(&from[..vocab]);
            }
            each(start, &rows[..n * vocab]);
        }
        Ok(())
    }
}
