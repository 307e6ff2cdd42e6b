//! The parts of a model that `unicorn eval` and calibration need: the logits of every token, and statistics of the
//! inputs of its matrices.

use super::memory::READBACK_ROWS;
use super::model_runner::ModelRunner;
use super::step::StepOutputs;
use super::tensors::Inputs;
use super::{Batch, BatchSequence, BlockList, ImageSpan, Input, KvPool, RunnerError, first_seen};
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
        self.logits_with_images(tokens, &[], each)
    }

    /// [`ModelRunner::logits`] of tokens with images, whose spans count from the first token.
    pub fn logits_with_images(
        &mut self,
        tokens: &[u32],
        images: &[ImageSpan],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), RunnerError> {
        assert!(self.in_flight.is_empty(), "logits while a step is in flight");
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let chunk = self.limits.max_batch_tokens.min(READBACK_ROWS);
        let (vocab, stride) = (self.config.vocab_size, self.scratch.logits.raw.stride);
        let mut padded = vec![0f32; chunk * stride];
        let mut rows = vec![0f32; chunk * vocab];
        let mut start = 0;
        while start < tokens.len() {
            // A step has whole images.
            let wanted = (start + chunk).min(tokens.len());
            let around = |image: &&ImageSpan| image.start < wanted && wanted < image.start + image.tokens;
            let end = images.iter().find(around).map_or(wanted, |image| image.start + image.tokens);
            let mut batch = self.alone(start, &tokens[start..end]);
            let inside = images.iter().filter(|image| (start..end).contains(&image.start));
            let inside = inside.map(|image| ImageSpan { start: image.start - start, ..*image });
            batch.sequences[0].images = inside.collect();
            // Logits are read back a few rows at a time. The step is computed again for each of these.
            for first in (0..end - start).step_by(chunk) {
                let n = chunk.min(end - start - first);
                let some = (first as u32..(first + n) as u32).collect();
                self.run(0, &batch, StepOutputs { rows: some, ..StepOutputs::default() })?;
                self.wait_for(0)?;
                self.logits_readback.read(0, &mut padded[..n * stride]);
                for (to, from) in rows.chunks_exact_mut(vocab).zip(padded.chunks_exact(stride)).take(n) {
                    to.copy_from_slice(&from[..vocab]);
                }
                each(start + first, &rows[..n * vocab]);
            }
            start = end;
        }
        Ok(())
    }

    /// The embeddings of the image in a slot, `[tokens, hidden_size]`. Panics if the model was loaded without its tower.
    #[doc(hidden)]
    pub fn image_embeddings(&mut self, slot: u32) -> Result<Vec<f32>, RunnerError> {
        assert!(self.in_flight.is_empty(), "reading while a step is in flight");
        let embeddings = self.vision.as_ref().expect("a tower").embeddings_of(slot);
        let mut commands = CommandBuffer::new(&self.device, "embeddings")?;
        let mut values = Vec::new();
        for row in 0..embeddings.buffer.size() as usize / 4 / embeddings.stride {
            let mut recorder = commands.begin()?;
            let row = embeddings.rows(&(row..row + 1));
            recorder.copy(&row.buffer, &self.logits_readback, row.buffer.size());
            recorder.submit_alone("reading embeddings")?;
            commands.wait()?;
            let mut of_row = vec![0f32; row.width];
            self.logits_readback.read(0, &mut of_row);
            values.extend(of_row);
        }
        Ok(values)
    }
}
