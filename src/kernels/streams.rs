//! The kernels that only models with several residual streams need.

use std::sync::Arc;

use super::arrays::{Activations, RmsNorm, words};
use super::operand::Tiles;
use super::shaders;
use crate::gpu::{Buffer, Device, GpuError, Pipeline, Recorder};

/// The residual streams of a model with AltUp. Layers compute the first one.
pub const STREAMS: usize = 4;

/// How a layer updates the streams that it does not compute: f32 each.
#[derive(Clone)]
pub struct AltUp {
    /// The norm of the router's input.
    pub router_norm: RmsNorm,
    /// `[STREAMS, width]`
    pub router: Buffer,
    /// The coefficients before the layer, `[STREAMS * STREAMS, STREAMS]`, and after it, `[STREAMS, STREAMS]`.
    pub prediction: Buffer,
    pub correction: Buffer,
    /// The factors of what the layer's per-layer embedding is gated by, `[width]`.
    pub output_scale: Buffer,
}

/// The compiled pipelines of streams.
pub struct StreamKernels {
    predict: Arc<Pipeline>,
    correct: Arc<Pipeline>,
    spread: Arc<Pipeline>,
    merge: Arc<Pipeline>,
    cutoff: Arc<Pipeline>,
}

impl StreamKernels {
    /// `tiles` are those of the model's products ([`super::Kernels::tiles`]).
    pub fn new(device: &Device, tiles: Tiles) -> Result<StreamKernels, GpuError> {
        let one = |shader| device.pipeline(tiles.body_of(shader), &[]);
        Ok(StreamKernels {
            predict: one(&shaders::ALTUP_PREDICT)?,
            correct: one(&shaders::ALTUP_CORRECT)?,
            spread: one(&shaders::STREAMS_SPREAD)?,
            merge: one(&shaders::STREAMS_MERGE)?,
            cutoff: one(&shaders::CUTOFF)?,
        })
    }

    /// Predicts what a layer does to all streams, in place, and copies the first one to `predicted`.
    pub fn predict(
        &self,
        recorder: &mut Recorder<'_>,
        altup: &AltUp,
        streams: [&Activations; STREAMS],
        predicted: &Activations,
        rows: usize,
    ) {
        let arguments = (&altup.prediction, STREAMS * STREAMS * STREAMS, None);
        altup.record(recorder, &self.predict, arguments, streams, predicted, rows);
    }

    /// Corrects the predicted streams by what the layer did to the first one, whose prediction is in `predicted`. Writes the
    /// new first stream, times `output_scale`, to `first`.
    pub fn correct(
        &self,
        recorder: &mut Recorder<'_>,
        altup: &AltUp,
        streams: [&Activations; STREAMS],
        predicted: &Activations,
        first: &Activations,
        rows: usize,
    ) {
        let arguments = (&altup.correction, STREAMS * STREAMS, Some(first));
        altup.record(recorder, &self.correct, arguments, streams, predicted, rows);
    }

    /// Brings each row of the other streams to the root mean square of the first stream's row.
    pub fn spread(&self, recorder: &mut Recorder<'_>, streams: [&Activations; STREAMS], rows: usize) {
        record_sizes(recorder, &self.spread, streams, rows);
    }

    /// Replaces the first stream by the mean of all, of which the others are brought to its root mean square.
    pub fn merge(&self, recorder: &mut Recorder<'_>, streams: [&Activations; STREAMS], rows: usize) {
        record_sizes(recorder, &self.merge, streams, rows);
    }

    /// Computes `x[t] = max(0, x[t] - cutoff)`, in place. The cutoff is `deviations` standard deviations above the mean of
    /// `x[t]`.
    pub fn cutoff(&self, recorder: &mut Recorder<'_>, x: &Activations, deviations: f32, rows: usize) {
        let arguments = shaders::Cutoff {
            x: &x.used(rows, x.width, "cutoff: x"),
            width: x.width as u32,
            stride: x.stride as u32,
            deviations,
        };
        recorder.dispatch(&self.cutoff, &arguments, [rows as u32, 1, 1]);
    }
}

impl AltUp {
    fn record(
        &self,
        recorder: &mut Recorder<'_>,
        pipeline: &Pipeline,
        (coefficients, count, first): (&Buffer, usize, Option<&Activations>),
        streams: [&Activations; STREAMS],
        predicted: &Activations,
        rows: usize,
    ) {
        let dim = predicted.width;
        let [hidden, second, third, fourth] = streams.map(|stream| stream.used(rows, dim, "altup: stream"));
        let first = first.map(|first| first.used(rows, dim, "altup: first"));
        let scale = first.is_some().then(|| words(&self.output_scale, dim, "altup: output_scale"));
        let arguments = shaders::Altup {
            hidden: &hidden,
            second: &second,
            third: &third,
            fourth: &fourth,
            predicted: &predicted.used(rows, dim, "altup: predicted"),
            first_or_none: first.as_ref(),
            router: &words(&self.router, STREAMS * dim, "altup: router"),
            norm_weight: &words(&self.router_norm.weight, dim, "altup: norm"),
            coefficients: &words(coefficients, count, "altup: coefficients"),
            output_scale_or_none: scale.as_ref(),
            dim: dim as u32,
            stride: predicted.stride as u32,
            eps: self.router_norm.eps,
        };
        recorder.dispatch(pipeline, &arguments, [rows as u32, 1, 1]);
    }
}

fn record_sizes(
    recorder: &mut Recorder<'_>,
    pipeline: &Pipeline,
    streams: [&Activations; STREAMS],
    rows: usize,
) {
    let (dim, stride) = (streams[0].width, streams[0].stride);
    let [hidden, second, third, fourth] = streams.map(|stream| stream.used(rows, dim, "streams"));
    let arguments = shaders::Streams {
        hidden: &hidden,
        second: &second,
        third: &third,
        fourth: &fourth,
        dim: dim as u32,
        stride: stride as u32,
    };
    recorder.dispatch(pipeline, &arguments, [rows as u32, 1, 1]);
}
