//! Records what a model with several residual streams computes in addition to other models: AltUp
//! (<https://arxiv.org/abs/2301.13310>) and Laurel (<https://arxiv.org/abs/2411.07501>).
//!
//! Layers compute the first stream, which is `hidden` in [`Scratch`], and begin with a prediction and end with a correction
//! of all streams. So a layer leaves nothing in `delta` that the next one has to add.

use std::ops::Range;

use super::layers::{DeviceLayer, Scratch, StreamScratch};
use super::model_runner::ModelRunner;
use super::tensors::{KeptMatrices, StreamProjections};
use crate::gpu::Recorder;
use crate::kernels::{Activations, AltUp, Matrix, Operand, STREAMS};

/// The factor of the residual stream after attention and the learned residual were added to it.
pub(super) const ATTENTION_SCALE: f32 = std::f32::consts::FRAC_1_SQRT_2;

impl Scratch {
    pub(super) fn of_streams(&self) -> &StreamScratch {
        self.streams.as_ref().expect("scratch of residual streams")
    }
}

impl ModelRunner {
    /// Makes the other streams from the embeddings in the first one.
    pub(super) fn record_spread(&self, recorder: &mut Recorder<'_>, tokens: usize) {
        let Some(StreamProjections { altup_projections, .. }) = &self.streams else { return };
        let Scratch { hidden, .. } = &self.scratch;
        let streams = self.scratch.of_streams();
        self.record_stream_products(
            recorder,
            altup_projections,
            [hidden; STREAMS - 1],
            streams.others.each_ref(),
            tokens,
        );
        recorder.label("streams");
        self.kernels.streams().spread(recorder, streams.all(hidden), tokens);
    }

    /// Brings all streams of these rows together in the first one, after the last layer.
    pub(super) fn record_merge(&self, recorder: &mut Recorder<'_>, rows: &Range<usize>) {
        let Some(StreamProjections { altup_unembed_projections, .. }) = &self.streams else { return };
        let Scratch { hidden, normed, delta, .. } = &self.scratch;
        let StreamScratch { others, predicted, .. } = self.scratch.of_streams();
        let others = others.each_ref().map(|stream| stream.rows(rows));
        // These are not in use after the last layer.
        let products = [delta, normed, predicted].map(|product| product.rows(rows));
        self.record_stream_products(
            recorder,
            altup_unembed_projections,
            others.each_ref(),
            products.each_ref(),
            rows.len(),
        );
        let [second, third, fourth] = &products;
        recorder.label("streams");
        self.kernels.streams().merge(recorder, [&hidden.rows(rows), second, third, fourth], rows.len());
    }

    /// The products of the matrices of the other streams with an input each.
    fn record_stream_products(
        &self,
        recorder: &mut Recorder<'_>,
        matrices: &[Matrix; STREAMS - 1],
        inputs: [&Activations; STREAMS - 1],
        products: [&Activations; STREAMS - 1],
        tokens: usize,
    ) {
        for ((matrix, input), product) in matrices.iter().zip(inputs).zip(products) {
            let input = self.quantized_input(recorder, matrix, input, &self.scratch.normed_blocks, tokens);
            recorder.label("stream projection");
            self.kernels.matmul(recorder, &[(matrix, product)], &input, tokens);
        }
    }

    /// Predicts the streams after a layer, and norms the first one as the input of attention.
    pub(super) fn record_prediction(
        &self,
        recorder: &mut Recorder<'_>,
        (layer, altup): (&DeviceLayer, &AltUp),
        scratch: &Scratch,
        normed: &Operand,
        tokens: usize,
    ) {
        let (kernels, hidden, streams) = (&self.kernels, &scratch.hidden, scratch.of_streams());
        recorder.label("prediction");
        kernels.streams().predict(recorder, altup, streams.all(hidden), &streams.predicted, tokens);
        recorder.label("input norm");
        kernels.rms_norm(recorder, hidden, &layer.norms.input_layernorm, normed, tokens);
    }

    /// Adds the learned residual to the first stream: the input of attention, and its normed product with two matrices.
    pub(super) fn record_laurel(
        &self,
        recorder: &mut Recorder<'_>,
        layer: &DeviceLayer,
        scratch: &Scratch,
        normed: &Operand,
        tokens: usize,
    ) {
        let KeptMatrices { linear_left: Some(left), linear_right: Some(right), .. } = &layer.kept else {
            return;
        };
        let (kernels, Scratch { hidden, delta, .. }) = (&self.kernels, scratch);
        let StreamScratch { predicted, laurel, laurel_blocks, .. } = scratch.of_streams();
        recorder.label("laurel");
        kernels.matmul(recorder, &[(left, laurel)], normed, tokens);
        let input = self.quantized_input(recorder, right, laurel, laurel_blocks, tokens);
        recorder.label("laurel");
        kernels.matmul(recorder, &[(right, delta)], &input, tokens);
        // The input of attention is the norm of `predicted`.
        let own = Some(&layer.norms.input_layernorm);
        kernels.rms_norm_add(recorder, predicted, (own, 1.0), hidden, tokens);
        kernels.rms_norm_add(recorder, delta, (layer.norms.post_laurel_norm.as_ref(), 1.0), hidden, tokens);
    }

    /// Corrects the streams by what the layer computed in the first one. Returns the activations that the layer's per-layer
    /// embedding is gated by.
    pub(super) fn record_correction<'a>(
        &self,
        recorder: &mut Recorder<'_>,
        altup: &AltUp,
        scratch: &'a Scratch,
        tokens: usize,
    ) -> &'a Activations {
        let (first, streams) = (&scratch.normed, scratch.of_streams());
        recorder.label("correction");
        let all = streams.all(&scratch.hidden);
        self.kernels.streams().correct(recorder, altup, all, &streams.predicted, first, tokens);
        first
    }

    /// Adds what the layer's per-layer embedding contributes, in `delta`, to all streams but the first one.
    pub(super) fn record_stream_adds(
        &self,
        recorder: &mut Recorder<'_>,
        layer: &DeviceLayer,
        scratch: &Scratch,
        tokens: usize,
    ) {
        let norm = layer.norms.post_per_layer_input_norm.as_ref();
        recorder.label("per-layer add");
        for stream in &scratch.of_streams().others {
            self.kernels.rms_norm_add(recorder, &scratch.delta, (norm, 1.0), stream, tokens);
        }
    }
}
