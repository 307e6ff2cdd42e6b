//! The weights of a layer, and the activations of a step.

use std::ops::Range;

use super::memory;
use super::spec::{LayerSpec, ModelSpec, PerLayerInputs};
use super::tensors::{Inputs, KeptMatrices, Norms, Projections, StreamProjections};
use crate::gpu::placement::{Class, MemoryKind};
use crate::gpu::{Arena, Buffer, GpuError};
use crate::kernels::{
    Activations, AltUp, Attention, Embedding, Logits, Matrix, Partials, Quantized, RmsNorm, Router, Routing,
    STREAMS, Wants, partial_width,
};

/// The weights of one layer on the device, with its KV cache.
pub(crate) struct DeviceLayer {
    /// Index of the pool of its KV blocks.
    pub(crate) pool: usize,
    pub(crate) attention: Attention,
    pub(super) projections: Projections<Matrix>,
    pub(super) kept: KeptMatrices<Matrix>,
    pub(super) norms: Norms<RmsNorm>,
    /// The factors of the residual stream after attention, and after the layer.
    pub(super) attention_scale: f32,
    pub(super) scale: f32,
    /// The router of a layer with experts.
    pub(super) router: Option<Router>,
    /// How the layer updates several residual streams.
    pub(super) altup: Option<AltUp>,
    /// As [`LayerSpec::gate_cutoff`].
    pub(super) gate_cutoff: Option<f32>,
    /// The model's activations in the widths of the layer's heads.
    pub(super) scratch: Scratch,
    /// The form in which each group of matrices takes its input.
    pub(super) wants: Inputs<Wants>,
    /// For calibration: sums of the squares of each group's input, an f32 for each column; of experts, for each expert and
    /// column.
    pub(crate) moments: Option<Inputs<Buffer>>,
}

impl Inputs<Wants> {
    /// The forms of the norms before the feed-forward network and before experts.
    pub(super) fn feed_forward(&self) -> impl Iterator<Item = Wants> {
        self.gate_up.into_iter().chain(self.expert_gate_up)
    }
}

impl DeviceLayer {
    /// The norm of the layer's last result, in `delta`, before it is added to the residual stream, and the factor of the
    /// sum. `None` if the layer has added it.
    pub(super) fn last_add(&self) -> Option<(Option<&RmsNorm>, f32)> {
        let Norms { post_feedforward_layernorm, post_per_layer_input_norm, .. } = &self.norms;
        let norm = post_per_layer_input_norm.as_ref().or(post_feedforward_layernorm.as_ref());
        self.altup.is_none().then_some((norm, self.scale))
    }
}

/// What computes the per-layer embeddings of a token.
pub(super) struct DevicePerLayer {
    /// A row of each id, with the embeddings of all layers.
    pub embedding: Embedding,
    /// The matrix that multiplies the embedding that enters the first layer.
    pub projection: Matrix,
    /// The norm of its product, in each layer.
    pub norm: RmsNorm,
    pub inputs: PerLayerInputs,
}

/// What makes several residual streams from an embedding, and brings them together.
pub(super) type DeviceStreams = StreamProjections<Matrix>;

/// Activations of a step, `[max_batch_tokens, ..]` f32 each.
#[derive(Clone)]
pub(crate) struct Scratch {
    /// The residual stream, or the first of several ones, `[hidden_size]`.
    pub(super) hidden: Activations,
    /// A normed copy of the residual stream, `[hidden_size]`, and the output of the last sublayer, `[hidden_size]`.
    pub(super) normed: Activations,
    pub(super) delta: Activations,
    /// Queries, and the result of attention, `[num_attention_heads * head_dim]`, of the layers with the largest rows.
    pub(crate) q: Activations,
    pub(super) attended: Activations,
    /// Keys, and values, `[num_key_value_heads * head_dim]`.
    pub(super) k: Activations,
    pub(super) v: Activations,
    /// Partials of attention, which have slots and no row per token.
    pub(crate) partials: Partials,
    /// The gate's product, which becomes the gated product, and the up product, `[intermediate_size]`.
    pub(super) gate: Activations,
    pub(super) up: Activations,
    /// The normed rows whose logits are computed, `[LOGIT_ROWS, hidden_size]`, and the logits. `Logits::adjusted` is
    /// all 0 between steps.
    pub(super) final_rows: Activations,
    pub(super) logits: Logits,
    /// Sums of normed rows of the residual stream, `[hidden_size]` for each slot.
    pub(super) pooled: Activations,
    /// Int8 forms of the inputs of matrices, for the matrices that want int8.
    pub(super) normed_blocks: Quantized,
    pub(super) attended_blocks: Quantized,
    pub(super) gated_blocks: Quantized,
    pub(super) final_blocks: Quantized,
    /// The per-layer embeddings of the model or of its draft model.
    pub(super) per_layer: Option<PerLayerScratch>,
    /// The residual streams of the model or of its draft model, besides the first one.
    pub(super) streams: Option<StreamScratch>,
    /// What experts take and compute, of a mixture.
    pub(super) experts: Option<ExpertScratch>,
}

/// Activations of per-layer embeddings.
#[derive(Clone)]
pub(super) struct PerLayerScratch {
    /// The embeddings of each token, `[num_hidden_layers * width]`, and the products that become a part of them.
    pub inputs: Activations,
    pub products: Activations,
    /// The gate's product, which becomes the gated embedding of a layer, `[width]`.
    pub gate: Activations,
    pub gated_blocks: Quantized,
}

impl PerLayerScratch {
    fn of(config: &ModelSpec, [inputs, products, gate, gated_blocks]: [Buffer; 4]) -> PerLayerScratch {
        // A model without per-layer embeddings keeps the buffers for its draft model.
        let width = config.per_layer.map_or(0, |per_layer| per_layer.width);
        let all = config.layers.len() * width;
        PerLayerScratch {
            inputs: Activations::new(inputs, all),
            products: Activations::new(products, all),
            gate: Activations::new(gate, width),
            gated_blocks: Quantized::new(gated_blocks, width),
        }
    }

    fn buffers(&self) -> [&Buffer; 4] {
        let PerLayerScratch { inputs, products, gate, gated_blocks } = self;
        [&inputs.buffer, &products.buffer, &gate.buffer, &gated_blocks.buffer]
    }

    fn rows(&self, rows: &Range<usize>) -> PerLayerScratch {
        let PerLayerScratch { inputs, products, gate, .. } = self;
        PerLayerScratch {
            inputs: inputs.rows(rows),
            products: products.rows(rows),
            gate: gate.rows(rows),
            ..self.clone()
        }
    }
}

/// Activations of several residual streams.
#[derive(Clone)]
pub(super) struct StreamScratch {
    /// All streams but the first one, `[hidden_size]`.
    pub others: [Activations; STREAMS - 1],
    /// What was predicted for the first stream, `[hidden_size]`.
    pub predicted: Activations,
    /// The product with the first matrix of a learned residual, `[laurel_rank]`.
    pub laurel: Activations,
    pub laurel_blocks: Quantized,
}

impl StreamScratch {
    const BUFFERS: usize = 6;

    fn of(config: &ModelSpec, buffers: [Buffer; Self::BUFFERS]) -> StreamScratch {
        // A model with one residual stream keeps the buffers for its draft model.
        let rank = config.streams.map_or(0, |streams| streams.laurel_rank);
        let [second, third, fourth, predicted, laurel, laurel_blocks] = buffers;
        let stream = |buffer| Activations::new(buffer, config.hidden_size);
        StreamScratch {
            others: [second, third, fourth].map(stream),
            predicted: stream(predicted),
            laurel: Activations::new(laurel, rank),
            laurel_blocks: Quantized::new(laurel_blocks, rank),
        }
    }

    fn buffers(&self) -> [&Buffer; Self::BUFFERS] {
        let StreamScratch { others: [second, third, fourth], predicted, laurel, laurel_blocks } = self;
        [
            &second.buffer,
            &third.buffer,
            &fourth.buffer,
            &predicted.buffer,
            &laurel.buffer,
            &laurel_blocks.buffer,
        ]
    }

    fn rows(&self, rows: &Range<usize>) -> StreamScratch {
        let StreamScratch { others, predicted, laurel, .. } = self;
        StreamScratch {
            others: others.each_ref().map(|stream| stream.rows(rows)),
            predicted: predicted.rows(rows),
            laurel: laurel.rows(rows),
            ..self.clone()
        }
    }

    /// All streams, of which `hidden` is the first.
    pub fn all<'a>(&'a self, hidden: &'a Activations) -> [&'a Activations; STREAMS] {
        let [second, third, fourth] = &self.others;
        [hidden, second, third, fourth]
    }
}

/// Activations of the experts of some of a step's tokens, and of the pairs of a token and one of its experts.
#[derive(Clone)]
pub(super) struct ExpertScratch {
    /// The normed tokens, `[hidden_size]`, if a dense network takes others.
    pub normed: Activations,
    pub normed_blocks: Quantized,
    /// The products of gate and up of each pair, and the gated product, `[intermediate_size]`.
    pub gate: Activations,
    pub up: Activations,
    pub gated_blocks: Quantized,
    /// The result of each pair, `[hidden_size]`.
    pub out: Activations,
    /// The arrays of [`Routing`].
    pub routing: Buffer,
}

impl ExpertScratch {
    /// [`Routing::used`].
    pub fn used(&self) -> Buffer {
        Routing::new(&self.routing, 0).used
    }
}

impl Scratch {
    /// The activations of some of the step's tokens. Buffers without a row per token, like the logits, stay whole.
    pub(super) fn rows(&self, rows: &Range<usize>) -> Scratch {
        let Scratch { hidden, normed, delta, q, attended, k, v, gate, up, .. } = self;
        Scratch {
            hidden: hidden.rows(rows),
            normed: normed.rows(rows),
            delta: delta.rows(rows),
            q: q.rows(rows),
            attended: attended.rows(rows),
            k: k.rows(rows),
            v: v.rows(rows),
            gate: gate.rows(rows),
            up: up.rows(rows),
            per_layer: self.per_layer.as_ref().map(|per_layer| per_layer.rows(rows)),
            streams: self.streams.as_ref().map(|streams| streams.rows(rows)),
            ..self.clone()
        }
    }

    /// The activations in the widths of a layer.
    pub(super) fn of_layer(&self, LayerSpec { heads, intermediate_size: ffn, .. }: &LayerSpec) -> Scratch {
        let of = |all: &Activations, width: usize| Activations::new(all.buffer.clone(), width);
        let (q, kv) = (heads.q_width(), heads.kv_width());
        let partial = partial_width(heads.num_attention_heads, heads.head_dim);
        let Partials { single, tiles } = &self.partials;
        Scratch {
            q: of(&self.q, q),
            attended: of(&self.attended, q),
            k: of(&self.k, kv),
            v: of(&self.v, kv),
            partials: Partials { single: of(single, partial), tiles: of(tiles, partial) },
            attended_blocks: Quantized::new(self.attended_blocks.buffer.clone(), q),
            gate: of(&self.gate, *ffn),
            up: of(&self.up, *ffn),
            gated_blocks: Quantized::new(self.gated_blocks.buffer.clone(), *ffn),
            ..self.clone()
        }
    }

    /// Allocates buffers of these names and sizes, which suffice for `config` and `tokens`.
    pub(super) fn new(
        arena: &mut Arena,
        config: &ModelSpec,
        tokens: usize,
        sizes: Vec<(&str, u64)>,
    ) -> Result<Scratch, GpuError> {
        let has = |wanted: &str| sizes.iter().any(|(name, _)| *name == wanted);
        let optional =
            OptionalScratch { per_layer: has(memory::PER_LAYER_INPUTS), streams: has(memory::SECOND_STREAM) };
        let buffers = sizes.into_iter().map(|(name, bytes)| device_buffer(arena, bytes, name));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        Ok(Scratch::of(config, tokens, buffers, optional))
    }

    /// These buffers in the shapes of another model, whose steps run between those of this model.
    pub(super) fn shared_with(&self, config: &ModelSpec, tokens: usize) -> Scratch {
        let Scratch { hidden, normed, delta, q, attended, k, v, partials, gate, up, .. } = self;
        let Partials { single, tiles } = partials;
        let Scratch { final_rows, logits: Logits { raw, adjusted, scratch, .. }, pooled, .. } = self;
        let Scratch { normed_blocks, attended_blocks, gated_blocks, final_blocks, .. } = self;
        let in_layers = [hidden, normed, delta, q, attended, k, v, single, tiles, gate, up];
        let after_layers = [final_rows, raw, adjusted, scratch, pooled];
        let blocks = [normed_blocks, attended_blocks, gated_blocks, final_blocks];
        // A draft model has no experts.
        let floats = in_layers.into_iter().chain(after_layers).map(|activations| &activations.buffer);
        let per_layer = self.per_layer.iter().flat_map(PerLayerScratch::buffers);
        let streams = self.streams.iter().flat_map(StreamScratch::buffers);
        let all = floats.chain(blocks.map(|blocks| &blocks.buffer)).chain(per_layer).chain(streams);
        let optional =
            OptionalScratch { per_layer: self.per_layer.is_some(), streams: self.streams.is_some() };
        Scratch::of(config, tokens, all.cloned().collect(), optional)
    }

    /// The buffers are in the order of [`memory::MemoryRequest::activation_bytes`].
    fn of(config: &ModelSpec, tokens: usize, buffers: Vec<Buffer>, optional: OptionalScratch) -> Scratch {
        let mut buffers = buffers.into_iter();
        let mut each = memory::activations(config, tokens)
            .map(|(name, rows, width)| {
                let buffer = buffers.next().expect("one for each field");
                assert!(buffer.size() >= Activations::bytes(rows, width), "{name}: the buffer is too small");
                Activations::new(buffer, width)
            })
            .into_iter();
        let [normed_blocks, attended_blocks, gated_blocks, final_blocks] = memory::quantized(config, tokens)
            .map(|(name, rows, width)| {
                let buffer = buffers.next().expect("one for each field");
                assert!(buffer.size() >= Quantized::bytes(rows, width), "{name}: the buffer is too small");
                Quantized::new(buffer, width)
            });
        let per_layer = optional.per_layer.then(|| {
            let four = [(); 4].map(|()| buffers.next().expect("one for each field"));
            PerLayerScratch::of(config, four)
        });
        let streams = optional.streams.then(|| {
            let six = [(); StreamScratch::BUFFERS].map(|()| buffers.next().expect("one for each field"));
            StreamScratch::of(config, six)
        });
        let experts = config.mixture.map(|mixture| {
            let mut next = || buffers.next().expect("one for each field");
            let (hidden, width) = (config.hidden_size, mixture.intermediate_size);
            ExpertScratch {
                normed: Activations::new(next(), hidden),
                normed_blocks: Quantized::new(next(), hidden),
                gate: Activations::new(next(), width),
                up: Activations::new(next(), width),
                gated_blocks: Quantized::new(next(), width),
                out: Activations::new(next(), hidden),
                routing: next(),
            }
        });
        let mut next = || each.next().expect("one for each field");
        Scratch {
            hidden: next(),
            normed: next(),
            delta: next(),
            q: next(),
            attended: next(),
            k: next(),
            v: next(),
            partials: Partials { single: next(), tiles: next() },
            gate: next(),
            up: next(),
            final_rows: next(),
            logits: Logits { raw: next(), adjusted: next(), scratch: next(), vocab: config.vocab_size },
            pooled: next(),
            normed_blocks,
            attended_blocks,
            gated_blocks,
            final_blocks,
            per_layer,
            streams,
            experts,
        }
    }
}

/// The buffers that only some models have.
struct OptionalScratch {
    per_layer: bool,
    streams: bool,
}

pub(super) fn device_buffer(arena: &mut Arena, bytes: u64, name: &str) -> Result<Buffer, GpuError> {
    arena.alloc(MemoryKind::Device, Class::Activations, bytes, name)
}
