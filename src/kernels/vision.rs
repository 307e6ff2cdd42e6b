//! The kernels that only the tower of a vision model needs. Its products and its attention are those of a language model.

use std::sync::Arc;

use super::arrays::{Activations, HiddenAct, words};
use super::operand::{Operand, Tiles};
use super::{OutputVariants, fours, shaders};
use crate::gpu::{Buffer, Device, GpuError, Pipeline, Recorder};

/// A LayerNorm: its epsilon, and f32 `[width]` by which the normed elements are multiplied and which are then added.
#[derive(Clone)]
pub struct LayerNorm {
    pub weight: Buffer,
    pub bias: Buffer,
    pub eps: f32,
}

/// How the levels 0 to 255 of red, green and blue become numbers: each is multiplied by its factor, and its shift is
/// added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PixelScale {
    pub factors: [f32; 3],
    pub shifts: [f32; 3],
}

/// The compiled pipelines of a tower.
pub struct VisionKernels {
    patches: Arc<Pipeline>,
    layer_norm: OutputVariants,
    activate: OutputVariants,
    average_pool: Arc<Pipeline>,
}

impl VisionKernels {
    /// The kernels of a tower with this activation. `tiles` are those of its products ([`super::Kernels::tiles`]).
    pub fn new(device: &Device, tiles: Tiles, activation: HiddenAct) -> Result<VisionKernels, GpuError> {
        Ok(VisionKernels {
            patches: device.pipeline(&shaders::PATCHES, &[])?,
            layer_norm: OutputVariants::new(device, tiles, "layer_norm", &[])?,
            activate: OutputVariants::new(device, tiles, "activate", &[activation as u32])?,
            average_pool: device.pipeline(&shaders::AVERAGE_POOL, &[])?,
        })
    }

    /// Writes the numbers of each patch of an image of `side` * `side` pixels as a row, channel by channel. `pixels` are
    /// bytes `[side, side, 3]`.
    pub fn patches(
        &self,
        recorder: &mut Recorder<'_>,
        pixels: &Buffer,
        [side, patch_size]: [usize; 2],
        scale: &PixelScale,
        out: &Activations,
    ) {
        assert!(side.is_multiple_of(patch_size), "patches: {side} pixels of {patch_size} each");
        let rows = (side / patch_size).pow(2);
        let PixelScale { factors, shifts } = *scale;
        let arguments = shaders::Patches {
            pixels: &words(pixels, (3 * side * side).div_ceil(4), "patches: pixels"),
            patches: &out.used(rows, 3 * patch_size * patch_size, "patches: out"),
            side: side as u32,
            patch_size: patch_size as u32,
            stride: out.stride as u32,
            red_factor: factors[0],
            green_factor: factors[1],
            blue_factor: factors[2],
            red_shift: shifts[0],
            green_shift: shifts[1],
            blue_shift: shifts[2],
        };
        recorder.dispatch(&self.patches, &arguments, [(out.stride as u32).div_ceil(64), rows as u32, 1]);
    }

    /// Computes `hidden[t] = hidden[t] + x[t] + bias`, and then `y[t] = norm(hidden[t])`. `bias` is f32 `[width]`.
    pub fn add_and_norm(
        &self,
        recorder: &mut Recorder<'_>,
        (x, bias): (&Activations, &Buffer),
        (hidden, norm): (&Activations, &LayerNorm),
        y: &Operand,
        rows: usize,
    ) {
        let width = x.width;
        let of_columns = |buffer: &Buffer| words(buffer, width, "layer_norm: a number of each column");
        let floats = y.floats.as_ref().map(|y| y.used(rows, width, "layer_norm: y"));
        let planes = y.blocks.as_ref().map(|y| y.planes(rows, width, "layer_norm: y"));
        let arguments = shaders::LayerNorm {
            x: &x.used(rows, width, "layer_norm: x"),
            bias: &of_columns(bias),
            hidden: &hidden.used(rows, width, "layer_norm: hidden"),
            weight: &of_columns(&norm.weight),
            shift: &of_columns(&norm.bias),
            y: floats.as_ref(),
            blocks: planes.as_ref().map(|to| &to.blocks),
            scales: planes.as_ref().map(|to| &to.scales),
            dim: width as u32,
            stride: x.stride as u32,
            padded: planes.as_ref().map_or(0, |to| to.stride),
            eps: norm.eps,
        };
        recorder.dispatch(self.layer_norm.pipeline(y), &arguments, [rows as u32, 1, 1]);
    }

    /// Computes `y = activation(x + bias)`. An f32 result must be in place: `y.floats` is `x`.
    pub fn activate(
        &self,
        recorder: &mut Recorder<'_>,
        (x, bias): (&Activations, &Buffer),
        y: &Operand,
        rows: usize,
    ) {
        if let Some(floats) = &y.floats {
            assert_eq!(floats.buffer.address(), x.buffer.address(), "activate: in place");
        }
        let planes = y.blocks.as_ref().map(|y| y.planes(rows, x.width, "activate: y"));
        let arguments = shaders::Activate {
            x: &x.used(rows, x.width, "activate: x"),
            bias: &words(bias, x.width, "activate: bias"),
            blocks: planes.as_ref().map(|to| &to.blocks),
            scales: planes.as_ref().map(|to| &to.scales),
            width: x.width as u32,
            stride: x.stride as u32,
            padded: planes.as_ref().map_or(0, |to| to.stride),
        };
        recorder.dispatch(self.activate.pipeline(y), &arguments, [fours(x.width), rows as u32, 1]);
    }

    /// Computes the means of squares of `pool` * `pool` tokens in a grid of `side` * `side` tokens, row by row.
    pub fn average_pool(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        [side, pool]: [usize; 2],
        y: &Activations,
    ) {
        assert!(side.is_multiple_of(pool), "average_pool: {side} tokens in squares of {pool}");
        let rows = (side / pool).pow(2);
        let arguments = shaders::AveragePool {
            x: &x.used(side * side, y.width, "average_pool: x"),
            y: &y.used(rows, x.width, "average_pool: y"),
            side: side as u32,
            pool: pool as u32,
            width: x.width as u32,
            stride: x.stride as u32,
        };
        recorder.dispatch(&self.average_pool, &arguments, [(x.width as u32).div_ceil(64), rows as u32, 1]);
    }
}
