//! Records the forward pass: [`ModelRunner::record_layer`] calls the kernels of a layer in the order of the model's
//! mathematics. `docs/architecture.md` has that mathematics, and `shaders/` says how a kernel computes it. The residual
//! stream is f32.

use std::ops::Range;

use super::layers::{DeviceLayer, DevicePerLayer, ExpertScratch, PerLayerScratch, Scratch};
use super::model_runner::ModelRunner;
use super::step::{Frame, PoolRequest, StepOutputs};
use super::tensors::{InputGroup, KeptMatrices, Norms, Projections};
use super::{Batch, BlockCopy, ImageSpan, PoolBlock};
use crate::gpu::{Buffer, Recorder};
use crate::kernels::{
    Activations, ExpertMatrices, Matrix, Operand, PairActivations, Quantized, Router, Routing, RowsOf,
    SampleRequest, StepArrays,
};

/// The most rows of a dispatch with a workgroup for each: the least limit of devices is 65,535.
const MOST_ROWS: usize = 1 << 15;

impl ModelRunner {
    /// Records what comes before the layers: block copies, the embeddings that begin the residual stream, and the ids
    /// that later draws penalize.
    pub(super) fn record_opening(
        &self,
        recorder: &mut Recorder<'_>,
        frame: &Frame,
        batch: &Batch,
        tokens: usize,
    ) {
        for copy in &batch.copies {
            self.record_copy(recorder, copy);
        }
        let (ids, hidden) = (&frame.whole(0).ids, &self.scratch.hidden);
        recorder.label("embed");
        self.kernels.embed(recorder, &self.embedding, ids, &self.sampled, hidden, tokens);
        self.record_per_layer_embeddings(recorder, ids, tokens);
        self.record_images(recorder, batch);
        self.record_spread(recorder, tokens);
        self.record_history(recorder, frame, batch);
        if let Some(experts) = &self.scratch.experts {
            recorder.fill(&experts.used(), 0);
        }
    }

    /// Computes the per-layer embeddings of the step's tokens.
    fn record_per_layer_embeddings(&self, recorder: &mut Recorder<'_>, ids: &Buffer, tokens: usize) {
        let (Some(per_layer), Some(scratch)) = (&self.per_layer, &self.scratch.per_layer) else { return };
        let DevicePerLayer { embedding, projection, norm, inputs } = per_layer;
        let (kernels, PerLayerScratch { inputs: all, products, .. }) = (&self.kernels, scratch);
        let Scratch { hidden, normed_blocks, .. } = &self.scratch;
        recorder.label("per-layer embed");
        kernels.embed(recorder, embedding, ids, &self.sampled, all, tokens);
        let input = self.quantized_input(recorder, projection, hidden, normed_blocks, tokens);
        recorder.label("per-layer model projection");
        kernels.matmul(recorder, &[(projection, products)], &input, tokens);
        // Each layer's part of a token's embeddings is a row.
        let [all, products] = [all, products].map(|all| Activations::new(all.buffer.clone(), inputs.width));
        let rows = tokens * self.layers.len();
        recorder.label("per-layer sum");
        for first in (0..rows).step_by(MOST_ROWS) {
            let part = first..rows.min(first + MOST_ROWS);
            let added = (Some(norm), inputs.sum_scale);
            kernels.rms_norm_add(recorder, &products.rows(&part), added, &all.rows(&part), part.len());
        }
    }

    /// Activations as the input of a matrix. `blocks` are for their int8 form.
    pub(super) fn quantized_input(
        &self,
        recorder: &mut Recorder<'_>,
        matrix: &Matrix,
        x: &Activations,
        blocks: &Quantized,
        tokens: usize,
    ) -> Operand {
        let input = Operand::new(self.kernels.wants([matrix]), x, blocks);
        if input.blocks.is_some() {
            recorder.label("quantize");
            self.kernels.quantize(recorder, x, blocks, tokens);
        }
        input
    }

    /// Replaces the embeddings of the ids at an image's positions with those of the image.
    fn record_images(&self, recorder: &mut Recorder<'_>, batch: &Batch) {
        let mut first = 0;
        for sequence in &batch.sequences {
            for &ImageSpan { start, tokens, slot, row } in &sequence.images {
                let tower = self.vision.as_ref().expect("an image for a model that takes some");
                let from = tower.embeddings_of(slot).rows(&(row..row + tokens));
                let to = self.scratch.hidden.rows(&(first + start..first + start + tokens));
                recorder.copy(&from.buffer, &to.buffer, to.buffer.size());
            }
            first += sequence.input.len();
        }
    }

    /// Copies the number of experts that the layers so far used to the host, after the last layer.
    pub(super) fn record_used_experts(&self, recorder: &mut Recorder<'_>, frame: &Frame, layer: usize) {
        if let Some(experts) = self.scratch.experts.as_ref().filter(|_| layer + 1 == self.layers.len()) {
            recorder.copy(&experts.used(), &frame.used_experts, 4);
        }
    }

    /// Records what comes after the layers: the requested sums of hidden states, the logits, and the draws from the
    /// logits or their copy to the host.
    pub(super) fn record_closing(&self, recorder: &mut Recorder<'_>, frame: &Frame, wanted: &StepOutputs) {
        let (kernels, scratch, rows) = (&self.kernels, &self.scratch, wanted.rows.len());
        let read = wanted.rows_read();
        if !read.is_empty() {
            self.record_merge(recorder, &read);
        }
        if !wanted.pooling.is_empty() {
            let normed = Operand::floats(&scratch.normed.rows(&read));
            kernels.rms_norm(recorder, &scratch.hidden.rows(&read), &self.norm, &normed, read.len());
            let mut to = 0;
            for PoolRequest { rows, slot, fresh, last } in &wanted.pooling {
                let slot = *slot as usize;
                let sums = scratch.pooled.rows(&(slot..slot + 1));
                kernels.pool(recorder, &scratch.normed.rows(rows), &sums, *fresh, rows.len());
                if *last {
                    recorder.copy(&sums.buffer, &frame.pooled.rows(&(to..to + 1)).buffer, sums.buffer.size());
                    to += 1;
                }
            }
        }
        if rows == 0 {
            return;
        }
        let head = self.head();
        recorder.label("final norm");
        let final_rows = Operand::new(kernels.wants([head]), &scratch.final_rows, &scratch.final_blocks);
        kernels.rms_norm_gather(recorder, &scratch.hidden, &frame.logit_rows, &self.norm, &final_rows, rows);
        recorder.label("lm_head");
        kernels.head(recorder, head, &scratch.logits.raw, &final_rows, rows);
        if let Some(cap) = self.config.final_logit_softcap {
            recorder.label("soft cap");
            kernels.softcap(recorder, &scratch.logits.raw, cap, rows);
        }
        recorder.label("sample");
        if wanted.requests.is_empty() {
            let bytes = Activations::bytes(rows, self.config.vocab_size);
            recorder.copy(&scratch.logits.raw.buffer, &self.logits_readback, bytes);
        } else {
            self.record_draws(recorder, frame, &wanted.requests);
        }
    }

    /// Copies a block to another one, in every layer of its pool.
    pub(super) fn record_copy(&self, recorder: &mut Recorder<'_>, copy: &BlockCopy) {
        let [from, to] =
            [copy.from, copy.to].map(|block| self.block_memory(PoolBlock { pool: copy.pool, block }));
        from.zip(to).for_each(|(from, to)| recorder.copy(&from, &to, from.size()));
    }

    /// Writes the ids of the step's tokens to the history, and earlier ids from the host or from another slot.
    pub(super) fn record_history(&self, recorder: &mut Recorder<'_>, frame: &Frame, batch: &Batch) {
        let ids = |slot: u32, tokens: usize| {
            let bytes = 4 * tokens as u64;
            self.history.ids.slice(4 * u64::from(slot) * self.history.slot_len as u64, bytes)
        };
        let mut offset = 0;
        for sequence in &batch.sequences {
            let Some(known) = &sequence.history else { continue };
            let bytes = 4 * known.len() as u64;
            recorder.copy(&frame.history.slice(offset, bytes), &ids(sequence.slot, known.len()), bytes);
            offset += bytes;
        }
        let tokens = batch.num_tokens();
        self.kernels.history(recorder, frame.whole(0), &frame.slots, &self.sampled, &self.history, tokens);
        for copy in &batch.history_copies {
            let (from, to) = (ids(copy.from, copy.tokens), ids(copy.to, copy.tokens));
            recorder.copy(&from, &to, 4 * copy.tokens as u64);
        }
    }

    /// Draws an id from each row of logits. The kernels of penalties and biases write to a copy of the logits, which is
    /// cleared after the draws.
    pub(super) fn record_draws(
        &self,
        recorder: &mut Recorder<'_>,
        frame: &Frame,
        requests: &[SampleRequest],
    ) {
        let (kernels, draws, logits, count) =
            (&self.kernels, &frame.draws, &self.scratch.logits, requests.len());
        kernels.adjust(recorder, logits, draws, &self.history, requests);
        kernels.sample(recorder, logits, draws, &self.sampled, requests);
        kernels.clear_adjusted(recorder, logits, draws, &self.history, requests);
        if requests.iter().any(|request| request.logprobs > 0) {
            kernels.logprobs(recorder, logits, draws, count);
        }
    }

    /// One decoder layer for the step's tokens `rows`: attention and the feed-forward network, each after a norm, and
    /// before a second one in some architectures, added to the residual stream, which some architectures then multiply
    /// by a number. A layer leaves the feed-forward result in `delta`. The next layer adds it, in one kernel with its
    /// first norm. After the last layer, a separate kernel adds it. Layers with several residual streams add it themselves.
    pub(super) fn record_layer(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        step: &StepArrays,
        rows: Range<usize>,
    ) {
        self.record_projections(recorder, index, step, rows.clone());
        self.record_attention(recorder, index, step, &rows);
        self.record_rest(recorder, index, rows);
    }

    /// The attention of a layer.
    pub(super) fn record_attention(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        step: &StepArrays,
        rows: &Range<usize>,
    ) {
        let attention = &self.layers[index].attention;
        // The items of attention count rows from the step's first token, so the queries are not cut to `rows`.
        let Scratch { q: all_queries, partials, .. } = &self.layers[index].scratch;
        let attended = self.attended(index, rows);
        recorder.label(if attention.shape.window.is_some() { "sliding" } else { "full" });
        self.kernels.attention(recorder, attention, (all_queries, partials), step, &attended, rows.len());
    }

    /// The result of a layer's attention for some rows, in the form that the output projection takes.
    pub(crate) fn attended(&self, index: usize, rows: &Range<usize>) -> Operand {
        let Scratch { attended, attended_blocks, .. } = &self.layers[index].scratch;
        Operand::new(self.layers[index].wants.output, &attended.rows(rows), attended_blocks)
    }

    /// Adds the squares of a matrix's input to the sums of a layer, if the model was loaded with `moments`.
    fn add_squares(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        group: InputGroup,
        input: &Activations,
        rows: usize,
    ) {
        if let Some(moments) = &self.layers[index].moments {
            self.kernels.moments(recorder, input, &moments[group], rows);
        }
    }

    /// What a layer computes before attention: queries, keys and values.
    pub(crate) fn record_projections(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        step: &StepArrays,
        rows: Range<usize>,
    ) {
        let layer = &self.layers[index];
        let (kernels, tokens) = (&self.kernels, rows.len());
        let scratch = &layer.scratch.rows(&rows);
        let Scratch { hidden, normed, delta, q, k, v, normed_blocks, .. } = scratch;
        let normed_in = Operand::new(layer.wants.qkv, normed, normed_blocks);
        let first_norm = &layer.norms.input_layernorm;
        recorder.label("input norm");
        let before = index.checked_sub(1).and_then(|before| self.layers[before].last_add());
        match (&layer.altup, before) {
            (Some(altup), _) => self.record_prediction(recorder, (layer, altup), scratch, &normed_in, tokens),
            (None, None) => kernels.rms_norm(recorder, hidden, first_norm, &normed_in, tokens),
            (None, Some(last)) => {
                kernels.residual(recorder, delta, last, (hidden, first_norm), &normed_in, tokens);
            }
        }
        self.add_squares(recorder, index, InputGroup::Qkv, normed, tokens);
        let Projections { q_proj, k_proj, v_proj, .. } = &layer.projections;
        let of_keys = k_proj.as_ref().map(|k_proj| (k_proj, k));
        let of_values = v_proj.as_ref().map(|v_proj| (v_proj, v));
        let products: Vec<_> = [(q_proj, q)].into_iter().chain(of_keys).chain(of_values).collect();
        recorder.label("qkv");
        kernels.matmul(recorder, &products, &normed_in, tokens);
        let values = if v_proj.is_some() { v } else { k };
        kernels.qkv_store(recorder, &layer.attention, [q, k, values], step, tokens);
        self.record_laurel(recorder, layer, scratch, &normed_in, tokens);
    }

    /// What a layer computes after attention.
    pub(crate) fn record_rest(&self, recorder: &mut Recorder<'_>, index: usize, rows: Range<usize>) {
        let layer = &self.layers[index];
        let (kernels, tokens) = (&self.kernels, rows.len());
        let scratch = layer.scratch.rows(&rows);
        let Scratch { hidden, normed, delta, attended, .. } = &scratch;
        let Projections { o_proj, gate_proj, up_proj, down_proj, .. } = &layer.projections;
        let next_wants = layer.wants.feed_forward().next().expect("a network or experts");
        let normed_in = Operand::new(next_wants, normed, &scratch.normed_blocks);
        self.add_squares(recorder, index, InputGroup::Output, attended, tokens);
        recorder.label("o_proj");
        kernels.matmul(recorder, &[(o_proj, delta)], &self.attended(index, &rows), tokens);

        let Norms { post_attention_layernorm, pre_feedforward_layernorm, .. } = &layer.norms;
        let norm = post_attention_layernorm.as_ref();
        recorder.label("feed-forward norm");
        let experts_in = match (&layer.norms.pre_feedforward_layernorm_2, &scratch.experts) {
            (Some(second), Some(of_pairs)) => {
                let input = Operand::new(next_wants, &of_pairs.normed, &of_pairs.normed_blocks);
                let results = [(pre_feedforward_layernorm, &normed_in), (second, &input)];
                kernels.residual_twice(recorder, delta, norm, hidden, results, tokens);
                input
            }
            _ => {
                let next = (hidden, pre_feedforward_layernorm);
                let added = (norm, layer.attention_scale);
                kernels.residual(recorder, delta, added, next, &normed_in, tokens);
                normed_in.clone()
            }
        };
        let mlp = match (gate_proj, up_proj, down_proj) {
            (Some(gate_proj), Some(up_proj), Some(down_proj)) => Some(([gate_proj, up_proj], down_proj)),
            _ => None,
        };
        let mixture = layer.router.as_ref().map(|router| {
            recorder.label("router");
            self.record_routing(recorder, layer, router, &scratch, experts_in, tokens)
        });
        if let Some((gate_and_up, down_proj)) = mlp {
            let Scratch { gate, up, gated_blocks, .. } = &scratch;
            let gated_in = Operand::new(layer.wants.down.expect("of down_proj"), gate, gated_blocks);
            self.add_squares(recorder, index, InputGroup::GateUp, normed, tokens);
            recorder.label("gate, up");
            let products = [gate, up];
            match layer.gate_cutoff {
                None => kernels.gated(recorder, gate_and_up, &normed_in, products, &gated_in, tokens),
                Some(deviations) => {
                    let pair = [(gate_and_up[0], gate), (gate_and_up[1], up)];
                    kernels.matmul(recorder, &pair, &normed_in, tokens);
                    recorder.label("cutoff");
                    kernels.streams().cutoff(recorder, gate, deviations, tokens);
                    kernels.glu(recorder, gate, up, &gated_in, tokens);
                }
            }
            self.add_squares(recorder, index, InputGroup::Down, gate, tokens);
            recorder.label("down_proj");
            kernels.matmul(recorder, &[(down_proj, delta)], &gated_in, tokens);
        }
        if let Some(mixture) = &mixture {
            self.record_experts(recorder, layer, mixture, &scratch, tokens);
        }
        self.record_per_layer_input(recorder, index, &scratch, tokens);
        if let Some(last) = layer.last_add().filter(|_| index + 1 == self.layers.len()) {
            recorder.label("last add");
            kernels.rms_norm_add(recorder, delta, last, hidden, tokens);
        }
    }

    /// Adds the feed-forward result to the residual stream, and leaves in `delta` what the layer's per-layer embeddings
    /// contribute, in a model that has some. With several residual streams, adds that too.
    fn record_per_layer_input(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        scratch: &Scratch,
        tokens: usize,
    ) {
        let layer = &self.layers[index];
        let KeptMatrices { per_layer_input_gate: Some(gate), per_layer_projection: Some(projection), .. } =
            &layer.kept
        else {
            return;
        };
        let (kernels, Scratch { hidden, delta, .. }) = (&self.kernels, scratch);
        let of_layers = scratch.per_layer.as_ref().expect("scratch of per-layer embeddings");
        let PerLayerScratch { inputs, gate: gated, gated_blocks, .. } = of_layers;
        recorder.label("feed-forward add");
        let norm = layer.norms.post_feedforward_layernorm.as_ref();
        kernels.rms_norm_add(recorder, delta, (norm, 1.0), hidden, tokens);
        let stream = match &layer.altup {
            Some(altup) => self.record_correction(recorder, altup, scratch, tokens),
            None => hidden,
        };
        let input = self.quantized_input(recorder, gate, stream, &scratch.normed_blocks, tokens);
        recorder.label("per-layer gate");
        kernels.matmul(recorder, &[(gate, gated)], &input, tokens);
        let input = Operand::new(kernels.wants([projection]), gated, gated_blocks);
        let own = inputs.columns(&(index * gated.width..(index + 1) * gated.width));
        recorder.label("per-layer input");
        kernels.glu(recorder, gated, &own, &input, tokens);
        recorder.label("per-layer projection");
        kernels.matmul(recorder, &[(projection, delta)], &input, tokens);
        if layer.altup.is_some() {
            self.record_stream_adds(recorder, layer, scratch, tokens);
        }
    }

    /// Chooses the experts of the tokens in `hidden`, whose inputs are in `input`.
    fn record_routing<'a>(
        &self,
        recorder: &mut Recorder<'_>,
        layer: &'a DeviceLayer,
        router: &Router,
        scratch: &Scratch,
        input: Operand,
        tokens: usize,
    ) -> RoutedExperts<'a> {
        let (kernels, of_pairs) = (&self.kernels, scratch.experts.as_ref().expect("scratch of experts"));
        let Projections { expert_gate_proj, expert_up_proj, expert_down_proj, .. } = &layer.projections;
        let matrix = |matrix: &'a Option<Matrix>| matrix.as_ref().expect("a matrix of experts");
        let matrices = ExpertMatrices {
            gate: matrix(expert_gate_proj),
            up: matrix(expert_up_proj),
            down: matrix(expert_down_proj),
        };
        let pairs = self.config.mixture.expect("a mixture").experts.pairs(tokens);
        let routing = Routing::new(&of_pairs.routing, pairs);
        kernels.route(recorder, &scratch.hidden, router, &routing, tokens);
        kernels.group_pairs(recorder, matrices, &routing, tokens);
        let wants = layer.wants.expert_down.expect("experts");
        let gated = Operand::new(wants, &of_pairs.gate, &of_pairs.gated_blocks);
        RoutedExperts { matrices, routing, input, gated }
    }

    /// Computes the experts' results, and adds them up in `delta`: alone, or to the dense network's result.
    fn record_experts(
        &self,
        recorder: &mut Recorder<'_>,
        layer: &DeviceLayer,
        RoutedExperts { matrices, routing, input, gated }: &RoutedExperts<'_>,
        scratch: &Scratch,
        tokens: usize,
    ) {
        let ExpertScratch { gate, up, out, .. } = scratch.experts.as_ref().expect("scratch of experts");
        let of_pairs = PairActivations { gate, up, gated, out };
        self.kernels.expert_products(recorder, *matrices, input, &of_pairs, routing, tokens);
        if let Some(moments) = &layer.moments {
            let mut add = |group, x: &Operand, rows| {
                let x = x.floats.as_ref().expect("calibration is computed in f32");
                self.kernels.expert_moments(recorder, x, rows, routing, &moments[group], tokens);
            };
            add(InputGroup::ExpertGateUp, input, RowsOf::Tokens);
            add(InputGroup::ExpertDown, gated, RowsOf::Pairs);
        }
        let Norms { post_feedforward_layernorm_1: own, post_feedforward_layernorm_2: of_sum, .. } =
            &layer.norms;
        let norms = own.as_ref().zip(of_sum.as_ref()).map(Into::into);
        recorder.label("experts' sum");
        self.kernels.combine(recorder, out, routing, norms, &scratch.delta, tokens);
    }
}

/// The experts of a layer for a step's tokens.
struct RoutedExperts<'a> {
    matrices: ExpertMatrices<'a>,
    routing: Routing,
    input: Operand,
    gated: Operand,
}
