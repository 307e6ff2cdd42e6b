//! A tower on the device, and the computation of an image.
//!
//! The patches of an image are rows, as tokens are in the language model. Attention over all of them uses the kernels of
//! the language model: the patches are the tokens of one image in a KV cache of their own. All work of an image but the
//! last part is recorded once for images of the same size.

use std::ops::Range;
use std::sync::Arc;

use super::request::{attention_parts, network_parts};
use super::spec::VisionSpec;
use crate::gpu::{Buffer, CommandBuffer, Device, GpuError, Recorder, Submission};
use crate::kernels::{
    Activations, Attention, GridTables, Kernels, LayerNorm, Matrix, Operand, PartItems, Partials, Quantized,
    RmsNorm, Room, Run, Shares, Standardize, StepArrays, VisionKernels,
};
use crate::model::ImageLimits;

/// What a tower computes between the patches and the projection.
pub(super) enum DeviceEncoder {
    LayerNorms {
        layers: DeviceTransformer,
        patch_bias: Buffer,
        /// A vector for each patch.
        positions: Buffer,
        post_layernorm: LayerNorm,
    },
    RmsNorms {
        layers: DeviceTransformer,
        positions: GridTables,
        rotations: GridTables,
        /// The rotations of each patch.
        rope: Activations,
        standardize: Option<Standardize>,
    },
    Linear {
        patch_norm: LayerNorm,
        normed_patches: Activations,
        bias: Buffer,
        dense_norm: LayerNorm,
        positions: GridTables,
        position_norm: LayerNorm,
        zeros: Buffer,
    },
}

/// The layers of a transformer, and what they share.
pub(super) struct DeviceTransformer {
    pub layers: Vec<DeviceLayer>,
    pub scratch: LayerScratch,
    pub step: StepArrays,
}

pub(super) struct DeviceLayer {
    pub qkv: [Matrix; 3],
    pub attention: Attention,
    pub out: Matrix,
    pub network: Network,
}

/// The norms of a layer, and its feed-forward network.
pub(super) enum Network {
    /// Norms before attention and before the network.
    Plain { norms: [LayerNorm; 2], out_bias: Buffer, fc1: (Matrix, Buffer), fc2: (Matrix, Buffer) },
    /// Norms before and after attention, and before and after the network.
    Gated { norms: [RmsNorm; 4], gate: Matrix, up: Matrix, down: Matrix },
}

/// Activations of the patches of one image, and of its tokens.
pub(super) struct Scratch {
    pub patches: Activations,
    pub patch_blocks: Quantized,
    pub hidden: Activations,
    pub normed: Activations,
    pub normed_blocks: Quantized,
    pub pooled: Activations,
    pub pooled_normed: Activations,
    pub pooled_blocks: Quantized,
}

/// Activations of layers.
pub(super) struct LayerScratch {
    /// The result of the last sublayer, which is not yet added to the residual stream.
    pub delta: Activations,
    pub qkv: [Activations; 3],
    pub attended: Activations,
    pub attended_blocks: Quantized,
    /// Of the patches of a part of the network.
    pub network: Activations,
    /// Of the same, in gated networks.
    pub up: Option<Activations>,
    pub network_blocks: Quantized,
    pub partials: Partials,
}

/// A tower on the device, with slots for the embeddings of images.
pub struct Tower {
    pub(super) device: Arc<Device>,
    pub(super) spec: VisionSpec,
    pub(super) kernels: Kernels,
    pub(super) own_kernels: VisionKernels,
    pub(super) patch_embedding: Matrix,
    pub(super) encoder: DeviceEncoder,
    /// The norm before the projection.
    pub(super) norm: RmsNorm,
    pub(super) projection: Matrix,
    pub(super) scratch: Scratch,
    pub(super) pixels: Buffer,
    /// `[slots * tokens, text_hidden_size]`, where `tokens` are the most of an image.
    pub(super) embeddings: Activations,
    pub(super) limits: ImageLimits,
    /// The width and height of the images for which the work is recorded.
    pub(super) recorded_for: Option<[usize; 2]>,
    /// The opening and the layers, and the closing, which is recorded for each image.
    pub(super) recorded: Vec<CommandBuffer>,
    /// `None` only while it is recorded.
    pub(super) closing: Option<CommandBuffer>,
    pub(super) submissions: Vec<Submission>,
}

/// A part of an image's work, which is submitted separately, so that none blocks the device for long.
enum Part<'a> {
    Opening,
    Projections { layer: usize },
    Attention { layer: usize, index: usize, part: &'a PartItems },
    Network { layer: usize, rows: Range<usize> },
}

impl DeviceEncoder {
    fn transformer(&self) -> Option<&DeviceTransformer> {
        match self {
            DeviceEncoder::LayerNorms { layers, .. } | DeviceEncoder::RmsNorms { layers, .. } => Some(layers),
            DeviceEncoder::Linear { .. } => None,
        }
    }
}

impl DeviceTransformer {
    /// Shares out the attention of so many patches, each of which sees all of them, and returns its parts.
    fn share_out(&self, patches: usize) -> Vec<PartItems> {
        let run = Run { row: 0, start: 0, tokens: patches, sequence: 0, sees_to: Some(patches - 1) };
        let shape = &self.layers.first().expect("a layer at least").attention.shape;
        let room = Room { single: 0, tiles: patches };
        let shares = Shares::in_parts(shape, &[run], &attention_parts(patches), room);
        let arrays = &self.step.shares;
        arrays.tiles.as_ref().expect("all items are tiles").write(0, &shares.tiles);
        arrays.groups.write(0, &shares.groups(shape.num_kv_heads));
        arrays.merges.write(0, &shares.merges);
        shares.parts
    }
}

impl Tower {
    /// Records everything but the closing for images of that width and height. No image may be in flight.
    pub(super) fn prepare(&mut self, size: [usize; 2]) -> Result<(), GpuError> {
        if self.recorded_for == Some(size) {
            return Ok(());
        }
        self.recorded_for = None;
        let grid = self.spec.grid(size);
        let patches = grid[0] * grid[1];
        let mut parts = vec![Part::Opening];
        let shared = self.encoder.transformer().map(|transformer| transformer.share_out(patches));
        let layers = self.encoder.transformer().map_or(0, |transformer| transformer.layers.len());
        for layer in 0..layers {
            parts.push(Part::Projections { layer });
            let of_attention = shared.iter().flatten().enumerate();
            parts.extend(of_attention.map(|(index, part)| Part::Attention { layer, index, part }));
            parts.extend(network_parts(patches).into_iter().map(|rows| Part::Network { layer, rows }));
        }
        let mut recorded = std::mem::take(&mut self.recorded);
        while recorded.len() < parts.len() {
            recorded.push(CommandBuffer::new(&self.device, &format!("vision {}", recorded.len()))?);
        }
        recorded.truncate(parts.len());
        for (commands, part) in recorded.iter_mut().zip(&parts) {
            commands.record_for_many_submits(&mut |r| self.record(r, part, size))?;
        }
        while self.submissions.len() <= parts.len() {
            self.submissions.push(Submission::new(&self.device)?);
        }
        self.recorded = recorded;
        self.recorded_for = Some(size);
        Ok(())
    }

    fn record(&self, r: &mut Recorder<'_>, part: &Part<'_>, size: [usize; 2]) {
        let grid = self.spec.grid(size);
        match part {
            Part::Opening => self.record_opening(r, size),
            Part::Projections { layer } => self.record_projections(r, *layer, grid[0] * grid[1]),
            Part::Attention { layer, index, part } => self.record_attention(r, *layer, *index, part),
            Part::Network { layer, rows } => self.record_network(r, *layer, rows),
        }
    }

    /// What comes before the layers.
    fn record_opening(&self, r: &mut Recorder<'_>, size: [usize; 2]) {
        let Scratch { patches, patch_blocks, hidden, normed, .. } = &self.scratch;
        let (own, grid) = (&self.own_kernels, self.spec.grid(size));
        let rows = grid[0] * grid[1];
        r.label("patch_embedding");
        own.patches(r, (&self.pixels, size), self.spec.patch_size, &self.spec.pixels, patches);
        let matrix = &self.patch_embedding;
        let wants = self.kernels.wants([matrix]);
        let input = Operand::new(wants, patches, patch_blocks);
        let product = |r: &mut Recorder<'_>, to: &Activations| {
            if input.blocks.is_some() {
                self.kernels.quantize(r, patches, patch_blocks, rows);
            }
            self.kernels.matmul(r, &[(matrix, to)], &input, rows);
        };
        match &self.encoder {
            DeviceEncoder::LayerNorms { layers, positions, .. } => {
                product(r, &layers.scratch.delta);
                r.copy(positions, &hidden.buffer, positions.size());
            }
            DeviceEncoder::RmsNorms { positions, rotations, rope, .. } => {
                product(r, hidden);
                own.add_grid(r, positions, grid, hidden);
                own.grid(r, rotations, grid, rope);
            }
            DeviceEncoder::Linear {
                patch_norm,
                normed_patches,
                bias,
                dense_norm,
                positions,
                position_norm,
                zeros,
            } => {
                let input = Operand::new(wants, normed_patches, patch_blocks);
                own.norm(r, (patches, zeros), patch_norm, &input, rows);
                self.kernels.matmul(r, &[(matrix, hidden)], &input, rows);
                own.norm(r, (hidden, bias), dense_norm, &Operand::floats(normed), rows);
                own.add_grid(r, positions, grid, normed);
                own.norm(r, (normed, zeros), position_norm, &Operand::floats(hidden), rows);
            }
        }
    }

    fn transformer(&self) -> &DeviceTransformer {
        self.encoder.transformer().expect("a tower with layers")
    }

    /// The bias of the product that comes before layer `index`: of the last layer, or of the patches.
    fn bias_before(&self, index: usize) -> &Buffer {
        let DeviceEncoder::LayerNorms { layers, patch_bias, .. } = &self.encoder else {
            panic!("a tower without biases")
        };
        match index.checked_sub(1).map(|before| &layers.layers[before].network) {
            None => patch_bias,
            Some(Network::Plain { fc2, .. }) => &fc2.1,
            Some(Network::Gated { .. }) => panic!("a network without biases"),
        }
    }

    /// What a layer computes before attention. For all but the first, it adds the last result in `delta`.
    fn record_projections(&self, r: &mut Recorder<'_>, index: usize, rows: usize) {
        let Scratch { hidden, normed, normed_blocks, .. } = &self.scratch;
        let DeviceTransformer { layers, scratch, step } = self.transformer();
        let LayerScratch { delta, qkv, .. } = scratch;
        let (kernels, own) = (&self.kernels, &self.own_kernels);
        let DeviceLayer { qkv: matrices, attention, network, .. } = &layers[index];
        r.label("norm");
        let input = Operand::new(kernels.wants(matrices), normed, normed_blocks);
        match network {
            Network::Plain { norms, .. } => {
                own.add_and_norm(r, (delta, self.bias_before(index)), (hidden, &norms[0]), &input, rows);
            }
            Network::Gated { norms: [norm, ..], .. } => {
                match index.checked_sub(1).map(|i| &layers[i].network) {
                    Some(Network::Gated { norms: [.., last], .. }) => {
                        kernels.residual(r, delta, (Some(last), 1.0), (hidden, norm), &input, rows);
                    }
                    _ => kernels.rms_norm(r, hidden, norm, &input, rows),
                }
            }
        }
        let products: Vec<_> = matrices.iter().zip(qkv).collect();
        r.label("qkv");
        kernels.matmul(r, &products, &input, rows);
        kernels.qkv_store(r, attention, qkv.each_ref(), step, rows);
    }

    /// The attention of some patches to all, and its product with the output matrix in `delta`.
    fn record_attention(&self, r: &mut Recorder<'_>, layer: usize, index: usize, part: &PartItems) {
        let DeviceTransformer { layers, scratch, step } = self.transformer();
        let LayerScratch { delta, qkv, attended, attended_blocks, partials, .. } = scratch;
        let DeviceLayer { attention, out, .. } = &layers[layer];
        let (kernels, rows, step) = (&self.kernels, &part.rows, step.part(part, index));
        r.label("out_proj");
        let input = Operand::new(kernels.wants([out]), &attended.rows(rows), attended_blocks);
        // The items of attention count rows from the first patch, so the queries are not cut.
        kernels.attention(r, attention, (&qkv[0], partials), &step, &input, rows.len());
        kernels.matmul(r, &[(out, &delta.rows(rows))], &input, rows.len());
    }

    /// What a layer computes for some patches after attention. It leaves a product in `delta`, without its bias.
    fn record_network(&self, r: &mut Recorder<'_>, layer: usize, rows: &Range<usize>) {
        let Scratch { hidden, normed, normed_blocks, .. } = &self.scratch;
        let DeviceTransformer { layers, scratch, .. } = self.transformer();
        let LayerScratch { delta, network: inner, up: inner_up, network_blocks, .. } = scratch;
        let (kernels, own, count) = (&self.kernels, &self.own_kernels, rows.len());
        let [hidden, normed, delta] = [hidden, normed, delta].map(|all| all.rows(rows));
        match &layers[layer].network {
            Network::Plain { norms, out_bias, fc1, fc2 } => {
                let input = Operand::new(kernels.wants([&fc1.0]), &normed, normed_blocks);
                own.add_and_norm(r, (&delta, out_bias), (&hidden, &norms[1]), &input, count);
                r.label("fc1");
                kernels.matmul(r, &[(&fc1.0, inner)], &input, count);
                let input = Operand::new(kernels.wants([&fc2.0]), inner, network_blocks);
                own.activate(r, (inner, &fc1.1), &input, count);
                r.label("fc2");
                kernels.matmul(r, &[(&fc2.0, &delta)], &input, count);
            }
            Network::Gated { norms: [_, post_attention, pre_feedforward, _], gate, up, down } => {
                r.label("norm");
                let input = Operand::new(kernels.wants([gate, up]), &normed, normed_blocks);
                let added = (Some(post_attention), 1.0);
                kernels.residual(r, &delta, added, (&hidden, pre_feedforward), &input, count);
                let inner_up = inner_up.as_ref().expect("a gated network");
                let gated = Operand::new(kernels.wants([down]), inner, network_blocks);
                r.label("gate, up");
                kernels.gated(r, [gate, up], &input, [inner, inner_up], &gated, count);
                r.label("down_proj");
                kernels.matmul(r, &[(down, &delta)], &gated, count);
            }
        }
    }

    /// What comes after the layers, for an image of that width and height. The embeddings go into a slot.
    fn record_closing(&self, r: &mut Recorder<'_>, slot: u32, size: [usize; 2]) {
        let Scratch { hidden, normed, pooled, pooled_normed, pooled_blocks, .. } = &self.scratch;
        let (kernels, own, grid) = (&self.kernels, &self.own_kernels, self.spec.grid(size));
        let rows = grid[0] * grid[1];
        r.label("norm");
        let means = match &self.encoder {
            DeviceEncoder::LayerNorms { layers, post_layernorm, .. } => {
                let added = (&layers.scratch.delta, self.bias_before(layers.layers.len()));
                let norm = (hidden, post_layernorm);
                own.add_and_norm(r, added, norm, &Operand::floats(normed), rows);
                own.average_pool(r, (normed, grid), self.spec.pool, None, pooled);
                pooled
            }
            DeviceEncoder::RmsNorms { layers, standardize, .. } => {
                if let Some(Network::Gated { norms: [.., last], .. }) =
                    layers.layers.last().map(|layer| &layer.network)
                {
                    kernels.rms_norm_add(r, &layers.scratch.delta, (Some(last), 1.0), hidden, rows);
                }
                own.average_pool(r, (hidden, grid), self.spec.pool, standardize.as_ref(), pooled);
                pooled
            }
            DeviceEncoder::Linear { .. } => hidden,
        };
        let input = Operand::new(kernels.wants([&self.projection]), pooled_normed, pooled_blocks);
        let tokens = rows / self.spec.patches_per_token();
        kernels.rms_norm(r, means, &self.norm, &input, tokens);
        r.label("projection");
        kernels.matmul(r, &[(&self.projection, &self.embeddings_of(slot))], &input, tokens);
    }

    /// Whether the tokens of an image see each other in both directions in a layer of the language model with this window.
    pub(in crate::model) fn is_seen_whole(&self, window: Option<usize>) -> bool {
        self.spec.attention.is_in(window)
    }

    /// The embeddings of the image in a slot, `[tokens, text_hidden_size]`, with room for the most tokens of an image.
    pub(in crate::model) fn embeddings_of(&self, slot: u32) -> Activations {
        let ImageLimits { tokens, slots, .. } = self.limits;
        let slot = slot as usize;
        assert!(slot < slots, "slot {slot} of {slots}");
        self.embeddings.rows(&(slot * tokens..(slot + 1) * tokens))
    }

    /// Computes the embeddings of an image of `[width, height]` pixels into a slot. `pixels` are `[height, width, 3]`.
    pub(in crate::model) fn encode(
        &mut self,
        slot: u32,
        size: [usize; 2],
        pixels: &[u8],
    ) -> Result<(), GpuError> {
        let [width, height] = size;
        assert!(self.limits.tokens_of(size).is_some(), "an image of {width} * {height} pixels");
        assert_eq!(pixels.len(), 3 * width * height, "the pixels of an image");
        // The last image was waited for, so the device no longer reads its pixels.
        self.prepare(size)?;
        self.pixels.write(0, pixels);
        let mut closing = self.closing.take().expect("it is not being recorded");
        let recorded = closing.record_for_one_submit(&mut |r| self.record_closing(r, slot, size));
        let closing = self.closing.insert(closing);
        recorded?;
        let all = self.recorded.iter_mut().chain([closing]);
        let mut used = 0;
        for (commands, submission) in all.zip(&mut self.submissions) {
            submission.submit(&mut [commands], "an image")?;
            used += 1;
        }
        self.submissions[..used].iter_mut().try_for_each(Submission::wait)
    }
}
