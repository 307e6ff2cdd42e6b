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

/// What a mean becomes: `(mean * factor - bias) * scale`, with f32 `[width]` biases and scales.
#[derive(Clone)]
pub struct Standardize {
    pub factor: f32,
    pub bias: Buffer,
    pub scale: Buffer,
}

/// A vector for each column and one for each row of a grid, `[at least the larger side, width]` each.
#[derive(Clone)]
pub struct GridTables {
    pub of_columns: Activations,
    pub of_rows: Activations,
}

/// The compiled pipelines of a tower.
pub struct VisionKernels {
    patches: Arc<Pipeline>,
    /// Without a residual stream, and with one.
    layer_norm: [OutputVariants; 2],
    activate: OutputVariants,
    /// Without numbers that standardize, and with them.
    average_pool: [Arc<Pipeline>; 2],
    /// The sums alone, and added to what is there.
    grid: [Arc<Pipeline>; 2],
}

impl VisionKernels {
    /// The kernels of a tower with this activation. `tiles` are those of its products ([`super::Kernels::tiles`]).
    pub fn new(device: &Device, tiles: Tiles, activation: HiddenAct) -> Result<VisionKernels, GpuError> {
        let layer_norm = |residual| OutputVariants::new(device, tiles, "layer_norm", &[residual]);
        let one = |shader, constant| device.pipeline(shader, &[constant]);
        Ok(VisionKernels {
            patches: device.pipeline(&shaders::PATCHES, &[])?,
            layer_norm: [layer_norm(0)?, layer_norm(1)?],
            activate: OutputVariants::new(device, tiles, "activate", &[activation as u32])?,
            average_pool: [one(&shaders::AVERAGE_POOL, 0)?, one(&shaders::AVERAGE_POOL, 1)?],
            grid: [one(&shaders::GRID, 0)?, one(&shaders::GRID, 1)?],
        })
    }

    /// Writes the numbers of each patch of an image of `[width, height]` pixels as a row, channel by channel. `pixels` are
    /// bytes `[height, width, 3]`.
    pub fn patches(
        &self,
        recorder: &mut Recorder<'_>,
        (pixels, [width, height]): (&Buffer, [usize; 2]),
        patch_size: usize,
        scale: &PixelScale,
        out: &Activations,
    ) {
        let is_whole = width.is_multiple_of(patch_size) && height.is_multiple_of(patch_size);
        assert!(is_whole, "patches: {width} * {height} pixels of {patch_size} each");
        let rows = (width / patch_size) * (height / patch_size);
        let PixelScale { factors, shifts } = *scale;
        let arguments = shaders::Patches {
            pixels: &words(pixels, (3 * width * height).div_ceil(4), "patches: pixels"),
            patches: &out.used(rows, 3 * patch_size * patch_size, "patches: out"),
            width: width as u32,
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
        self.layer_norm(recorder, (Some(x), bias), (hidden, norm), y, rows);
    }

    /// Computes `x[t] = x[t] + bias`, and then `y[t] = norm(x[t])`. `bias` is f32 `[width]`.
    pub fn norm(
        &self,
        recorder: &mut Recorder<'_>,
        (x, bias): (&Activations, &Buffer),
        norm: &LayerNorm,
        y: &Operand,
        rows: usize,
    ) {
        self.layer_norm(recorder, (None, bias), (x, norm), y, rows);
    }

    fn layer_norm(
        &self,
        recorder: &mut Recorder<'_>,
        (x, bias): (Option<&Activations>, &Buffer),
        (hidden, norm): (&Activations, &LayerNorm),
        y: &Operand,
        rows: usize,
    ) {
        let width = hidden.width;
        let of_columns = |buffer: &Buffer| words(buffer, width, "layer_norm: a number of each column");
        let floats = y.floats.as_ref().map(|y| y.used(rows, width, "layer_norm: y"));
        let planes = y.blocks.as_ref().map(|y| y.planes(rows, width, "layer_norm: y"));
        let added = x.map(|x| x.used(rows, width, "layer_norm: x"));
        let arguments = shaders::LayerNorm {
            x_or_none: added.as_ref(),
            bias: &of_columns(bias),
            hidden: &hidden.used(rows, width, "layer_norm: hidden"),
            weight: &of_columns(&norm.weight),
            shift: &of_columns(&norm.bias),
            y: floats.as_ref(),
            blocks: planes.as_ref().map(|to| &to.blocks),
            scales: planes.as_ref().map(|to| &to.scales),
            dim: width as u32,
            stride: hidden.stride as u32,
            padded: planes.as_ref().map_or(0, |to| to.stride),
            eps: norm.eps,
        };
        let pipelines = &self.layer_norm[usize::from(x.is_some())];
        recorder.dispatch(pipelines.pipeline(y), &arguments, [rows as u32, 1, 1]);
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

    /// Computes the means of squares of `pool` * `pool` tokens in a grid of `[across, down]` tokens, row by row.
    pub fn average_pool(
        &self,
        recorder: &mut Recorder<'_>,
        (x, [across, down]): (&Activations, [usize; 2]),
        pool: usize,
        standardize: Option<&Standardize>,
        y: &Activations,
    ) {
        let is_whole = across.is_multiple_of(pool) && down.is_multiple_of(pool);
        assert!(is_whole, "average_pool: {across} * {down} tokens in squares of {pool}");
        let rows = (across / pool) * (down / pool);
        let of_columns = |buffer: &Buffer| words(buffer, x.width, "average_pool: a number of each column");
        let [bias, scale] =
            [standardize.map(|by| of_columns(&by.bias)), standardize.map(|by| of_columns(&by.scale))];
        let arguments = shaders::AveragePool {
            x: &x.used(across * down, y.width, "average_pool: x"),
            y: &y.used(rows, x.width, "average_pool: y"),
            bias_or_none: bias.as_ref(),
            scale_or_none: scale.as_ref(),
            across: across as u32,
            pool: pool as u32,
            width: x.width as u32,
            stride: x.stride as u32,
            factor: standardize.map_or(1.0, |by| by.factor),
        };
        let pipeline = &self.average_pool[usize::from(standardize.is_some())];
        recorder.dispatch(pipeline, &arguments, [(x.width as u32).div_ceil(64), rows as u32, 1]);
    }

    /// Computes the sum of a column's vector and a row's for each position of a grid of `[across, down]` positions, row by
    /// row.
    pub fn grid(&self, recorder: &mut Recorder<'_>, tables: &GridTables, grid: [usize; 2], y: &Activations) {
        self.sums_of_grid(recorder, tables, grid, (y, false));
    }

    /// [`VisionKernels::grid`], added to what `y` has.
    pub fn add_grid(
        &self,
        recorder: &mut Recorder<'_>,
        tables: &GridTables,
        grid: [usize; 2],
        y: &Activations,
    ) {
        self.sums_of_grid(recorder, tables, grid, (y, true));
    }

    fn sums_of_grid(
        &self,
        recorder: &mut Recorder<'_>,
        GridTables { of_columns, of_rows }: &GridTables,
        [across, down]: [usize; 2],
        (y, adds): (&Activations, bool),
    ) {
        let arguments = shaders::Grid {
            of_columns: &of_columns.used(across, y.width, "grid: columns"),
            of_rows: &of_rows.used(down, y.width, "grid: rows"),
            y: &y.used(across * down, of_rows.width, "grid: y"),
            across: across as u32,
            width: y.width as u32,
            stride: y.stride as u32,
        };
        let groups = [(y.width as u32).div_ceil(64), (across * down) as u32, 1];
        recorder.dispatch(&self.grid[usize::from(adds)], &arguments, groups);
    }
}
