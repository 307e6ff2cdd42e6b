//! Records the forward pass. [`Gemma3::record_layer`] reads like the architecture; `docs/architecture.md` says what it
//! computes, `shaders/` how. The residual stream is f32.

use std::ops::Range;

use super::config::LayerType;
use super::gemma3::Gemma3;
use super::memory::{self};
use super::step::{Frame, PoolRequest, Wanted};
use super::{Batch, BlockCopy, BlockPool};
use crate::gpu::Recorder;
use crate::kernels::{Activations, KvCache, Operand, SampleRequest, StepArrays};

impl Gemma3 {
    /// Records block copies, the embeddings that begin the residual stream, and the ids for later draws.
    pub(super) fn record_opening(&self, r: &mut Recorder<'_>, frame: &Frame, batch: &Batch, tokens: usize) {
        for copy in &batch.copies {
            self.record_copy(r, copy);
        }
        let (ids, hidden) = (&frame.full.ids, &self.scratch.hidden);
        self.kernels.embed(r, &self.embedding, ids, &self.sampled, hidden, tokens);
        self.record_history(r, frame, batch);
    }

    /// Records the sums of hidden states that are wanted; the logits, and the draws from them or their copy to the
    /// host.
    pub(super) fn record_closing(&self, r: &mut Recorder<'_>, frame: &Frame, wanted: &Wanted, tokens: usize) {
        let (k, s, rows) = (&self.kernels, &self.scratch, wanted.rows.len());
        if !wanted.pooling.is_empty() {
            k.rms_norm(r, &s.hidden, &self.norm, &Operand::floats(&s.normed), tokens);
            let mut to = 0;
            for PoolRequest { rows, slot, fresh, last } in &wanted.pooling {
                let slot = *slot as usize;
                let sums = s.pooled.rows(&(slot..slot + 1));
                k.pool(r, &s.normed.rows(rows), &sums, *fresh, rows.len());
                if *last {
                    r.copy(&sums.buffer, &frame.pooled.rows(&(to..to + 1)).buffer, sums.buffer.size());
                    to += 1;
                }
            }
        }
        if rows == 0 {
            return;
        }
        let head = self.embedding.matrix();
        let final_rows = Operand::new(k.wants([head]), &s.final_rows, &s.final_blocks);
        k.rms_norm_gather(r, &s.hidden, &frame.logit_rows, &self.norm, &final_rows, rows);
        k.matmul(r, &[(head, &s.logits.raw)], &final_rows, rows);
        if wanted.requests.is_empty() {
            let bytes = Activations::bytes(rows, self.config.vocab_size);
            r.copy(&s.logits.raw.buffer, &self.logits_readback, bytes);
        } else {
            self.record_draws(r, frame, &wanted.requests);
        }
    }

    /// Copies a block to another, in every layer of its pool.
    pub(super) fn record_copy(&self, r: &mut Recorder<'_>, copy: &BlockCopy) {
        let kind = match copy.pool {
            BlockPool::Full => LayerType::FullAttention,
            BlockPool::Sliding => LayerType::SlidingAttention,
        };
        let bytes = memory::kv_block_bytes(&self.config, self.kv, self.limits.kv.block_size);
        for layer in self.layers.iter().filter(|layer| layer.kind == kind) {
            let KvCache { keys, values } = &layer.attention.cache;
            for half in [keys, values] {
                let block = |id: u32| half.slice(u64::from(id) * bytes, bytes);
                r.copy(&block(copy.from), &block(copy.to), bytes);
            }
        }
    }

    /// Writes the ids of the step's tokens to the history, and earlier ids that the host or another slot has.
    pub(super) fn record_history(&self, r: &mut Recorder<'_>, frame: &Frame, batch: &Batch) {
        let ids = |slot: u32, tokens: usize| {
            let bytes = 4 * tokens as u64;
            self.history.ids.slice(4 * u64::from(slot) * self.history.slot_len as u64, bytes)
        };
        let mut offset = 0;
        for (sequence, known) in batch.sequences.iter().filter_map(|s| Some((s, s.history.as_ref()?))) {
            let bytes = 4 * known.len() as u64;
            r.copy(&frame.history.slice(offset, bytes), &ids(sequence.slot, known.len()), bytes);
            offset += bytes;
        }
        let tokens = batch.num_tokens();
        self.kernels.history(r, &frame.full, &frame.slots, &self.sampled, &self.history, tokens);
        for copy in &batch.history_copies {
            let (from, to) = (ids(copy.from, copy.tokens), ids(copy.to, copy.tokens));
            r.copy(&from, &to, 4 * copy.tokens as u64);
        }
    }

    /// Draws an id from each row of logits.
    pub(super) fn record_draws(&self, r: &mut Recorder<'_>, frame: &Frame, requests: &[SampleRequest]) {
        let (k, draws, logits, n) = (&self.kernels, &frame.draws, &self.scratch.logits, requests.len());
        k.adjust(r, logits, draws, &self.history, requests);
        k.sample(r, logits, draws, &self.sampled, requests);
        k.clear_adjusted(r, logits, draws, &self.history, requests);
        if requests.iter().any(|request| request.logprobs > 0) {
            k.logprobs(r, logits, draws, n);
        }
    }

    /// One decoder layer, for some of a step's tokens: attention and feed-forward, each between two norms, added to the
    /// residual stream. The next layer adds the feed-forward's output, in one kernel with its first norm.
    pub(super) fn record_layer(
        &self,
        r: &mut Recorder<'_>,
        index: usize,
        step: &StepArrays,
        rows: Range<usize>,
    ) {
        let layer = &self.layers[index];
        let (k, s, attention, n) = (&self.kernels, self.scratch.rows(&rows), &layer.attention, rows.len());
        let watch = |r: &mut Recorder<'_>, which: usize, x: &Activations| {
            if let Some(moments) = &layer.moments {
                k.moments(r, x, &moments[which], n);
            }
        };
        let [qkv, o, gate_up, down] = layer.wants;
        let normed = |wants| Operand::new(wants, &s.normed, &s.normed_blocks);
        let attended = Operand::new(o, &s.attended, &s.attended_blocks);
        let gated = Operand::new(down, &s.gate, &s.gated_blocks);

        match index.checked_sub(1).map(|before| &self.layers[before].post_feedforward_layernorm) {
            None => k.rms_norm(r, &s.hidden, &layer.input_layernorm, &normed(qkv), n),
            Some(norm) => {
                k.residual(r, &s.delta, norm, (&s.hidden, &layer.input_layernorm), &normed(qkv), n);
            }
        }
        watch(r, 0, &s.normed);
        let products = [(&layer.q_proj, &s.q), (&layer.k_proj, &s.k), (&layer.v_proj, &s.v)];
        k.matmul(r, &products, &normed(qkv), n);
        k.qkv_store(r, attention, [&s.q, &s.k, &s.v], step, n);
        k.attention(r, attention, (&self.scratch.q, &s.partials), step, &attended, n);
        watch(r, 1, &s.attended);
        k.matmul(r, &[(&layer.o_proj, &s.delta)], &attended, n);

        let next = (&s.hidden, &layer.pre_feedforward_layernorm);
        k.residual(r, &s.delta, &layer.post_attention_layernorm, next, &normed(gate_up), n);
        watch(r, 2, &s.normed);
        k.gated(r, [&layer.gate_proj, &layer.up_proj], &normed(gate_up), [&s.gate, &s.up], &gated, n);
        watch(r, 3, &s.gate);
        k.matmul(r, &[(&layer.down_proj, &s.delta)], &gated, n);
        if index + 1 == self.layers.len() {
            k.rms_norm_add(r, &s.delta, &layer.post_feedforward_layernorm, &s.hidden, n);
        }
    }
}
