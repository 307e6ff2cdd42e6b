//! Compares what the layers of a loaded model compute with the values that its checkpoint stores for them.
//!
//! The prompt runs like any other step, with the kernels and weights that serve requests, before the first request.
//! Later steps write its keys, values and ids again before they read them.

use std::ops::Range;

use super::RunnerError;
use super::model_runner::ModelRunner;
use super::step::StepOutputs;
use crate::checkpoint::{Deviation, Expected, LayerValues};
use crate::gpu::{Buffer, Recorder};
use crate::kernels::Activations;

impl ModelRunner {
    /// Runs the prompt of `values`, and compares the logits, and the residual stream after the embedding and after each
    /// layer. Returns the number of layers, or an error that names the first wrong layer. No step may be in flight.
    /// Panics if the prompt does not fit the context.
    pub(super) fn check_layers(&mut self, values: &LayerValues) -> Result<usize, RunnerError> {
        let tokens = &values.tokens;
        assert!(tokens.len() <= self.limits.max_context, "{} tokens", tokens.len());
        let all = values.residual.len();
        // The host reads rows of logits, whose buffer also holds these rows.
        let row_bytes = Activations::bytes(1, self.config.hidden_size);
        let logits_bytes = Activations::bytes(1, self.config.vocab_size);
        let at_once = ((self.logits_readback.size() - logits_bytes) / row_bytes) as usize;
        let mut row = vec![0f32; self.config.hidden_size];
        for first in (0..all).step_by(at_once) {
            let kept = first..all.min(first + at_once);
            let place = |n: usize| {
                let offset = logits_bytes + (n - kept.start) as u64 * row_bytes;
                self.logits_readback.slice(offset, row_bytes)
            };
            let places: Vec<(usize, Buffer)> = kept.clone().map(|n| (n, place(n))).collect();
            let poison = vec![f32::NAN; self.logits_readback.size() as usize / 4];
            self.logits_readback.write(0, &poison);
            let chunks = tokens.chunks(self.limits.max_batch_tokens);
            let last = chunks.len() - 1;
            for (i, ids) in chunks.enumerate() {
                let start = i * self.limits.max_batch_tokens;
                self.run_layers(start, ids, if i == last { &places } else { &[] })?;
            }
            for (n, place) in &places {
                place.read(0, &mut row);
                let what = match n {
                    0 => "the embedding".to_owned(),
                    n => format!("layer {}", n - 1),
                };
                self.compare_layer(&what, &row, &values.residual[*n])?;
            }
        }
        let mut logits = vec![0f32; self.config.vocab_size];
        self.logits_readback.read(0, &mut logits);
        let ids = LayerValues::logit_ids(values.logits.values.len(), logits.len());
        let sampled: Vec<f32> = ids.map(|id| logits[id]).collect();
        self.compare_layer("the output head", &sampled, &values.logits)?;
        Ok(all - 1)
    }

    fn compare_layer(&self, what: &str, got: &[f32], expected: &Expected) -> Result<(), RunnerError> {
        let off = Deviation::of(got, &expected.values);
        if expected.tolerance.allows(&off) {
            return Ok(());
        }
        let (most, info) = (expected.tolerance, self.device.info());
        Err(RunnerError::Wrong(format!(
            "{what} is off by {:.1e} of its values' size, and {:.1e} at one of them; {:.1e} and {:.1e} were expected at most. \
             The kernels by themselves are right, on {}, {}: its weights have changed in the file (`unicorn inspect --verify`), on \
             the way to the device, or in its memory; another start does not help",
            off.relative, off.largest, most.relative, most.largest, info.name, info.driver
        )))
    }

    /// Runs tokens at positions `start..`, each layer separately. The numbers in `places` say after which layers the
    /// residual stream of the last token is copied to the host: 0 is the embedding, 1 is the first layer. If `places`
    /// is not empty, the logits of that token are copied too.
    fn run_layers(
        &mut self,
        start: usize,
        ids: &[u32],
        places: &[(usize, Buffer)],
    ) -> Result<(), RunnerError> {
        let (batch, last) = (self.alone(start, ids), ids.len() - 1);
        let mut wanted = StepOutputs::default();
        if !places.is_empty() {
            wanted.rows.push(last as u32);
        }
        let keep = |model: &ModelRunner, recorder: &mut Recorder<'_>, after: usize, rows: &Range<usize>| {
            let Some((_, place)) = places.iter().find(|(n, _)| *n == after && rows.contains(&last)) else {
                return;
            };
            let [hidden, delta] =
                [&model.scratch.hidden, &model.scratch.delta].map(|all| all.rows(&(last..last + 1)));
            let before = after.checked_sub(1).filter(|_| after < model.layers.len());
            let Some(last) = before.and_then(|before| model.layers[before].last_add()) else {
                return recorder.copy(&hidden.buffer, place, place.size());
            };
            // The next layer adds this layer's last result to the residual stream, so it is still missing here.
            // `normed` is not in use until then.
            let sum = model.scratch.normed.rows(&(0..1));
            recorder.copy(&hidden.buffer, &sum.buffer, place.size());
            model.kernels.rms_norm_add(recorder, &delta, last, &sum, 1);
            recorder.copy(&sum.buffer, place, place.size());
        };
        self.run_keeping(0, &batch, wanted, Some(&keep))?;
        Ok(self.wait_for(0)?)
    }
}
