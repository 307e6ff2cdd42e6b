//! Matrix products and their operands.
//!
//! With the precision `fast`, quantized matrices are multiplied with int8 activations. Its contract
//! (`shaders/common/fast.glsl`) fixes the order of every sum, so that all kernels give the same bits. With `f32`, all
//! matrices are multiplied with f32 activations.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use strum::Display;

use super::arrays::{Activations, Experts, HiddenAct, LayerKind, MATRICES, words};
use super::attention_kernels::AttentionBy;
use super::shaders::{self, shader_named, shader_of, shaders_of};
use super::weights::{Matrix, Shard};
use crate::gpu::{Arguments, Buffer, Device, DeviceInfo, DeviceKind, GpuError, Pipeline, Recorder, Shader};
use crate::tensor::{Precision, Scheme, TILE_ROWS};

/// Number of columns that share a scale (`shaders/common/fast.glsl`).
pub(crate) const BLOCK_COLS: usize = 32;
/// Bytes of a block's 32 integers.
const BLOCK_BYTES: usize = BLOCK_COLS;
/// Bytes of a block's scale and sums.
const SCALE_BYTES: usize = 8;
/// The most int8 digits of an activation.
const DIGITS: u64 = 2;

/// The schemes of a model's matrices, and the choices of the other kernels.
#[derive(Debug, Clone, Default)]
pub struct Matrices {
    pub layers: LayerKind,
    /// Schemes of the matrices, in any order, with repetitions.
    pub products: Vec<Scheme>,
    /// Schemes of the gate and up matrices, whose products are combined.
    pub gated: Vec<Scheme>,
    /// Schemes of the matrices of experts.
    pub experts: Vec<Scheme>,
    /// The schemes of embeddings, in any order.
    pub embeddings: Vec<Scheme>,
    /// The scheme of the matrix that computes the logits.
    pub head: Option<Scheme>,
    /// How products are divided over invocations. `None`: the device's default.
    pub tiles: Option<Tiles>,
    /// How attention is computed. `None`: the device's default.
    pub attention: Option<AttentionBy>,
}

/// int8 activations `[rows, width]` in blocks of 32 columns. Each block has a scale. A block with an outlier has a
/// second int8 digit for each value (`shaders/common/fast.glsl`).
#[derive(Clone)]
pub struct Quantized {
    pub buffer: Buffer,
    pub width: usize,
}

/// The memory of a step's rows in [`Quantized`].
pub(super) struct Planes {
    pub blocks: Buffer,
    pub scales: Buffer,
    /// The padded number of rows: the distance between consecutive blocks of a row.
    pub stride: u32,
}

/// `rows`, rounded up to the number of rows that a kernel reads at the same time.
const fn padded(rows: usize) -> usize {
    if rows <= LANE_COLUMNS as usize { rows.next_power_of_two() } else { rows.next_multiple_of(MOST_COLUMNS) }
}

impl Quantized {
    /// Bytes of an operand of at most `rows` rows.
    pub const fn bytes(rows: usize, width: usize) -> u64 {
        DIGITS * Self::bytes_of_digit(rows, width)
    }

    /// Bytes of the first digits. Most blocks have no second digits.
    pub(crate) const fn bytes_of_digit(rows: usize, width: usize) -> u64 {
        (padded(rows) * width.div_ceil(BLOCK_COLS) * (BLOCK_BYTES + SCALE_BYTES)) as u64
    }

    pub fn new(buffer: Buffer, width: usize) -> Quantized {
        Quantized { buffer, width }
    }

    /// Dequantizes the first [`Quantized::bytes`] bytes of an operand: f32 `[rows, width]`.
    pub fn values(bytes: &[u8], rows: usize, width: usize) -> Vec<f32> {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let count = padded(rows) * width.div_ceil(BLOCK_COLS);
        let mut values = Vec::with_capacity(rows * width);
        for (row, col) in (0..rows).flat_map(|row| (0..width).map(move |col| (row, col))) {
            let at = Quantized::scale_at(rows, width, row, col);
            let block = col / BLOCK_COLS * padded(rows) + row;
            let digit = |n: usize| {
                let q = bytes[(n * count + block) * BLOCK_BYTES + col % BLOCK_COLS] as i8;
                f32::from(q) * f32::from_le_bytes(word(at + n * count * SCALE_BYTES)).abs()
            };
            // A negative first scale means that the block has second digits.
            let has_second = f32::from_le_bytes(word(at)) < 0.0;
            values.push(if has_second { digit(0) + digit(1) } else { digit(0) });
        }
        values
    }

    /// The byte offset of the first scale of an element's block.
    pub fn scale_at(rows: usize, width: usize, row: usize, col: usize) -> usize {
        let count = padded(rows) * width.div_ceil(BLOCK_COLS);
        DIGITS as usize * count * BLOCK_BYTES + (col / BLOCK_COLS * padded(rows) + row) * SCALE_BYTES
    }

    /// The memory of `rows` rows. Panics if the buffer is too small, or if the width is not `width`.
    pub(super) fn planes(&self, rows: usize, width: usize, what: &str) -> Planes {
        assert_eq!(self.width, width, "{what}: width");
        assert!(self.buffer.size() >= Quantized::bytes(rows, width), "{what}: {rows} rows do not fit");
        // Kernels add offsets of 32 bits to the address (`shaders/common/memory.glsl`).
        assert!(Quantized::bytes(rows, width) <= u64::from(u32::MAX), "{what}: {rows} rows exceed 4 GiB");
        let count = padded(rows) * width.div_ceil(BLOCK_COLS);
        let [blocks, scales] = [BLOCK_BYTES, SCALE_BYTES].map(|bytes| DIGITS * (count * bytes) as u64);
        Planes {
            blocks: self.buffer.slice(0, blocks),
            scales: self.buffer.slice(blocks, scales),
            stride: padded(rows) as u32,
        }
    }
}

/// The forms (f32, int8) in which an operand is needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wants {
    pub floats: bool,
    pub blocks: bool,
}

impl std::ops::BitOr for Wants {
    type Output = Wants;
    fn bitor(self, other: Wants) -> Wants {
        Wants { floats: self.floats || other.floats, blocks: self.blocks || other.blocks }
    }
}

/// An operand of products, in f32, in int8, or in both, as the matrices need it.
#[derive(Clone)]
pub struct Operand {
    pub floats: Option<Activations>,
    pub blocks: Option<Quantized>,
}

impl Operand {
    /// An operand with the forms in `wants`.
    pub fn new(wants: Wants, floats: &Activations, blocks: &Quantized) -> Operand {
        Operand { floats: wants.floats.then(|| floats.clone()), blocks: wants.blocks.then(|| blocks.clone()) }
    }

    pub fn floats(activations: &Activations) -> Operand {
        Operand { floats: Some(activations.clone()), blocks: None }
    }

    pub fn blocks(quantized: &Quantized) -> Operand {
        Operand { floats: None, blocks: Some(quantized.clone()) }
    }
}

/// AMD's PCI vendor id.
const AMD: u32 = 0x1002;

/// How kernels divide their work over invocations. The choice never changes the bits of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
// A load has a few of these, and a copy of 360 bytes costs it nothing.
#[allow(clippy::large_enum_variant)]
pub enum Tiles {
    Gpu(GpuTiles),
    /// The shader variants for a CPU (`shaders/common/lanes.glsl`).
    Cpu,
}

/// What a product with int8 activations computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
#[strum(serialize_all = "lowercase")]
pub enum ProductKind {
    /// Products of up to three matrices.
    Plain,
    /// The products of gate and up, and their gated product.
    Gated,
    /// The logits: the product of the output embedding.
    Head,
}

impl ProductKind {
    pub const ALL: [ProductKind; 3] = [ProductKind::Plain, ProductKind::Gated, ProductKind::Head];
}

/// The most tokens of each class of widths of a product.
pub const WIDTH_CLASSES: [usize; 5] = [1, 8, 32, 64, usize::MAX];

/// How a GPU divides int8 products: a way for each kind of product and each of [`WIDTH_CLASSES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuTiles {
    /// For each of [`ProductKind::ALL`].
    ways: [[Way; WIDTH_CLASSES.len()]; ProductKind::ALL.len()],
}

/// A way to compute int8 products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Each lane computes a row.
    Lanes {
        /// The most tokens of one pass, one of [`GpuTiles::widths`].
        columns: u32,
        activations: ActivationsFrom,
    },
    /// Subgroups multiply tiles. A gated product takes a second dispatch, which combines gate and up.
    Subgroups(SubgroupTile),
}

/// Where lanes that each compute a row read the activations from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationsFrom {
    /// One load serves all lanes.
    ScalarRegisters,
    SharedMemory,
}

impl Way {
    /// The best way for a Radeon 780M by instruction counts; it was not measured.
    pub const COUNTED: Way =
        Way::Lanes { columns: LANE_COLUMNS, activations: ActivationsFrom::ScalarRegisters };

    /// The tiles of this way, in ascending order.
    pub(super) fn tiles(self) -> &'static [Tile] {
        match self {
            Way::Lanes { columns, .. } => {
                &GPU_TILES[..GPU_TILES.partition_point(|tile| tile.columns <= columns)]
            }
            Way::Subgroups(_) => WITH_SUBGROUPS.split_at(LANE_TILES).1,
        }
    }

    /// Refuses tiles that the device does not multiply. Vulkan does not define what a driver does with them.
    fn check(self, device: &DeviceInfo) -> Result<(), GpuError> {
        let Way::Subgroups(SubgroupTile { m, n, k, is_emulated: false, .. }) = self else { return Ok(()) };
        let mut shapes = device.caps.cooperative_matrices.iter().filter(|shape| shape.multiplies_int8());
        if shapes.any(|shape| (shape.m, shape.n, shape.k) == (m, n, k)) {
            return Ok(());
        }
        Err(GpuError::Unusable(format!("{} has no cooperative matrices of int8 in {m}x{n}x{k}", device.name)))
    }

    /// The shader and the constants for int8 products with `tile`; with `gated`, for two products that this activation
    /// combines, which only lanes compute in one dispatch. `shader` is the variant for lanes, and `grouped` the value of
    /// GROUPED.
    pub(crate) fn pipeline_of(
        self,
        shader: &'static Shader,
        scale_blocks: u32,
        tile: Tile,
        gated: Option<HiddenAct>,
        grouped: u32,
    ) -> (&'static Shader, Vec<u32>) {
        match self {
            Way::Lanes { activations, .. } => {
                let is_shared = activations == ActivationsFrom::SharedMemory;
                let (is_gated, activation) = (gated.is_some(), gated.map_or(0, |act| act as u32));
                let [is_gated, is_shared] = [is_gated, is_shared].map(u32::from);
                (shader, vec![tile.columns, is_gated, scale_blocks, is_shared, activation, grouped])
            }
            Way::Subgroups(subgroups) => subgroups.pipeline_of(shader, scale_blocks, tile, grouped),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Lanes { columns, activations } => {
                let from = match activations {
                    ActivationsFrom::ScalarRegisters => "",
                    ActivationsFrom::SharedMemory => " from shared memory",
                };
                write!(f, "lanes of {columns}{from}")
            }
            Way::Subgroups(SubgroupTile { m, n, k, .. }) => write!(f, "subgroups of {m}x{n}x{k}"),
        }
    }
}

impl GpuTiles {
    /// The best choice for a Radeon 780M by instruction counts; it was not measured.
    pub const COUNTED: GpuTiles = GpuTiles::all(Way::COUNTED);

    /// One way for all products.
    pub const fn all(way: Way) -> GpuTiles {
        GpuTiles { ways: [[way; WIDTH_CLASSES.len()]; ProductKind::ALL.len()] }
    }

    /// The choice by count, except that subgroups multiply more tokens than lanes compute in one pass.
    pub fn multiplied_by(tile: SubgroupTile) -> GpuTiles {
        let mut tiles = GpuTiles::COUNTED;
        for ways in &mut tiles.ways {
            for (way, most) in ways.iter_mut().zip(WIDTH_CLASSES) {
                if most > LANE_COLUMNS as usize {
                    *way = Way::Subgroups(tile);
                }
            }
        }
        tiles
    }

    /// The way of products of this kind in a class of widths, an index of [`WIDTH_CLASSES`].
    pub fn way(&self, kind: ProductKind, class: usize) -> Way {
        self.ways[kind as usize][class]
    }

    /// These tiles with another way for products of this kind in a class of widths.
    pub fn with(mut self, kind: ProductKind, class: usize, way: Way) -> GpuTiles {
        self.ways[kind as usize][class] = way;
        self
    }

    /// The numbers of tokens that lanes can compute in one pass.
    pub fn widths() -> [u32; LANE_TILES] {
        std::array::from_fn(|i| GPU_TILES[i].columns)
    }

    /// Whether subgroups multiply in some of the ways.
    pub fn has_subgroups(&self) -> bool {
        self.ways.iter().flatten().any(|way| matches!(way, Way::Subgroups(_)))
    }

    /// These tiles with lanes instead of subgroups.
    fn without_subgroups(mut self) -> GpuTiles {
        let by_subgroups = self.ways.iter_mut().flatten().filter(|way| matches!(way, Way::Subgroups(_)));
        by_subgroups.for_each(|way| *way = Way::COUNTED);
        self
    }

    /// Whether kernels exist for all ways, and whether the device says that it multiplies tiles of these subgroups.
    pub fn fit(&self, device: &DeviceInfo) -> bool {
        self.ways.iter().flatten().all(|way| match way {
            Way::Lanes { columns, .. } => GpuTiles::widths().contains(columns),
            Way::Subgroups(tile) => SubgroupTile::of(device) == Some(*tile),
        })
    }

    /// For products of this kind, in ascending order: the most tokens of a tile, the tile, and its way.
    fn steps(&self, kind: ProductKind) -> impl Iterator<Item = (usize, Tile, Way)> {
        let above = std::iter::once(0).chain(WIDTH_CLASSES);
        let classes = self.ways[kind as usize].into_iter().zip(above.zip(WIDTH_CLASSES));
        classes.flat_map(|(way, (above, most))| {
            steps(way.tiles(), above, most).map(move |(most, tile)| (most, tile, way))
        })
    }

    /// The tile of products of `tokens` tokens, and its way.
    pub(crate) fn taking(&self, kind: ProductKind, tokens: usize) -> (Tile, Way) {
        let (_, tile, way) =
            self.steps(kind).find(|(most, ..)| *most >= tokens).expect("the last class has no bound");
        (tile, way)
    }
}

/// The ways of each kind of product, such as `plain lanes of 32; gated up to 32 tokens lanes of 32, more subgroups of
/// 16x16x16; head lanes of 32`.
impl fmt::Display for GpuTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (ways, kind)) in self.ways.iter().zip(ProductKind::ALL).enumerate() {
            write!(f, "{}{kind} ", if i == 0 { "" } else { "; " })?;
            let mut classes = ways.iter().zip(WIDTH_CLASSES).peekable();
            while let Some((way, most)) = classes.next() {
                match classes.peek() {
                    Some((next, _)) if *next == way => {}
                    Some(_) => write!(f, "up to {most} tokens {way}, ")?,
                    None if *way == ways[0] && ways.iter().all(|other| other == way) => write!(f, "{way}")?,
                    None => write!(f, "more {way}")?,
                }
            }
        }
        Ok(())
    }
}

/// The shape of the integer products that a subgroup computes, `[m, k]` by `[k, n]` (`shaders/common/tile.glsl`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubgroupTile {
    m: u32,
    n: u32,
    k: u32,
    /// The workgroup's numbers of subgroups along the rows and along the tokens.
    subgroups: [u32; 2],
    is_emulated: bool,
}

impl SubgroupTile {
    /// The tile of RDNA 3.
    pub(super) const RDNA3: SubgroupTile =
        SubgroupTile { m: 16, n: 16, k: 16, subgroups: [4, 2], is_emulated: false };

    /// The largest tile of the device that divides the work of a workgroup evenly; among equal sizes, the one with the
    /// largest `k`. `None`: the device has no such tile.
    pub fn of(device: &DeviceInfo) -> Option<SubgroupTile> {
        let caps = &device.caps;
        let lanes = caps.required_subgroup_size(shaders::FAST_MATMUL_INT4_IN_TILES.workgroup)?;
        let all = caps.cooperative_matrices.iter().filter(|shape| shape.multiplies_int8());
        let whole = all.filter_map(|shape| SubgroupTile::new([shape.m, shape.n, shape.k], lanes, false));
        let widest = WITH_SUBGROUPS[WITH_SUBGROUPS.len() - 1];
        let fits = |tile: &SubgroupTile| {
            // This scheme needs the most shared memory.
            let (shader, constants) = tile.pipeline_of(&shaders::FAST_MATMUL_INT8_AFFINE, 1, widest, 0);
            caps.missing(shader, &constants).is_empty()
        };
        whole.filter(fits).max_by_key(|tile| (tile.m * tile.n * tile.k, tile.k))
    }

    /// A tile that 32 invocations compute element by element, for devices without cooperative matrices. The results
    /// have the same bits.
    pub fn emulated(shape: [u32; 3]) -> Option<SubgroupTile> {
        SubgroupTile::new(shape, 32, true)
    }

    fn new([m, n, k]: [u32; 3], lanes: u32, is_emulated: bool) -> Option<SubgroupTile> {
        // The subgroups form a near-square grid, so that each subgroup reuses loaded values as often as possible.
        let all: u32 = shaders::FAST_MATMUL_INT4_IN_TILES.workgroup.iter().product::<u32>() / lanes;
        let along_rows = 1 << all.ilog2().div_ceil(2);
        let subgroups = [along_rows, all / along_rows];
        let rows = SUBGROUP_ROW_TILES * TILE_ROWS as u32;
        let mut wide = WITH_SUBGROUPS.iter().filter(|tile| tile.columns > LANE_COLUMNS);
        // A subgroup belongs to one tile of rows, whose rows two invocations each unpack. The results of all subgroups fit
        // into the shared memory of the weights.
        let is_whole = lanes as usize <= 2 * TILE_ROWS
            && m * n * all <= RESULTS
            && rows.is_multiple_of(m * subgroups[0])
            && wide.all(|tile| tile.columns.is_multiple_of(n * subgroups[1]))
            && [8, 16, 32].contains(&k)
            && (m * n).is_multiple_of(lanes);
        is_whole.then_some(SubgroupTile { m, n, k, subgroups, is_emulated })
    }

    /// The variant of `shader` that computes products in these tiles, and its constants. `scale_blocks` is the number
    /// of blocks that share a scale, and `grouped` the value of GROUPED.
    pub(crate) fn pipeline_of(
        self,
        shader: &Shader,
        scale_blocks: u32,
        tile: Tile,
        grouped: u32,
    ) -> (&'static Shader, Vec<u32>) {
        let way = if self.is_emulated { "in_emulated_tiles" } else { "in_tiles" };
        // Each half of a block (16 weights) may have its own scale.
        let has_halves =
            !shader.name.contains("_int4") && !shader.name.ends_with("_row") && scale_blocks % 2 == 1;
        let halves = 1 + u32::from(has_halves);
        let [along_rows, along_tokens] = self.subgroups;
        let constants = vec![
            tile.columns,
            halves,
            scale_blocks,
            self.m,
            self.n,
            self.k,
            along_rows,
            along_tokens,
            grouped,
        ];
        (shader_named(&format!("{}_{way}", shader.name)), constants)
    }
}

/// The part of a product that one workgroup computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Number of tokens.
    pub columns: u32,
    /// Number of tiles of 32 rows.
    pub row_tiles: u32,
}

impl Tile {
    /// The number of workgroups for `rows` rows of a matrix.
    pub fn parts(self, rows: usize) -> u32 {
        (rows as u32).div_ceil(TILE_ROWS as u32 * self.row_tiles)
    }
}

const fn tile(columns: u32, row_tiles: u32) -> Tile {
    Tile { columns, row_tiles }
}

/// The tiles for lanes that each compute a row.
pub(super) const GPU_TILES: &[Tile] = WITH_SUBGROUPS.split_at(LANE_TILES).0;
/// The tiles for lanes, followed by wider tiles for subgroups (`shaders/common/fast_in_tiles.glsl`).
const WITH_SUBGROUPS: &[Tile] = &[
    tile(1, 1),
    tile(2, 1),
    tile(4, 1),
    tile(8, 1),
    tile(16, 1),
    tile(32, 1),
    tile(64, SUBGROUP_ROW_TILES),
    tile(128, SUBGROUP_ROW_TILES),
];
/// The most results that the subgroups of a workgroup store at a time (`shaders/common/fast_in_tiles.glsl`).
const RESULTS: u32 = 2048;
/// The number of these tiles that are for lanes.
pub(super) const LANE_TILES: usize = 6;
pub(crate) const SUBGROUP_ROW_TILES: u32 = 4;
/// The tiles for a CPU. More columns than registers do not help there, and take long to compile.
const CPU_TILES: &[Tile] = &[tile(1, 1), tile(4, 1), tile(8, 1)];
/// Suffix of the kernels that a CPU device runs.
pub(super) const ON_CPU: &str = "_on_cpu";
/// The most tokens that lanes compute in one pass.
pub(super) const LANE_COLUMNS: u32 = GPU_TILES[LANE_TILES - 1].columns;
/// The most tokens that any kernel computes in one pass.
const MOST_COLUMNS: usize = WITH_SUBGROUPS[WITH_SUBGROUPS.len() - 1].columns as usize;

impl Tiles {
    /// The choice by instruction counts, for devices that were not measured.
    pub const COUNTED: Tiles = Tiles::Gpu(GpuTiles::COUNTED);

    /// The best choice without a measurement. AMD's GPUs compute dot products of four bytes as fast as cooperative
    /// matrices of int8 (`unicorn-lab isa`); other GPUs have separate units for cooperative matrices.
    pub fn of(device: &Device) -> Tiles {
        let info = device.info();
        match info.kind {
            DeviceKind::Cpu => Tiles::Cpu,
            _ if info.vendor_id == AMD => Tiles::COUNTED,
            _ => SubgroupTile::of(info)
                .map_or(Tiles::COUNTED, |tile| Tiles::Gpu(GpuTiles::multiplied_by(tile))),
        }
    }

    /// The variant of a kernel that the device runs (`shaders/common/lanes.glsl`).
    pub(super) fn body_of(self, shader: &'static Shader) -> &'static Shader {
        match self {
            Tiles::Gpu(_) => shader,
            Tiles::Cpu => shader_named(&format!("{}{ON_CPU}", shader.name)),
        }
    }

    /// The tiles of f32 products.
    pub(crate) fn floats(self) -> &'static [Tile] {
        match self {
            Tiles::Gpu(_) => GPU_TILES,
            Tiles::Cpu => CPU_TILES,
        }
    }
}

impl fmt::Display for Tiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tiles::Gpu(gpu) => gpu.fmt(f),
            Tiles::Cpu => f.write_str("kernels for a CPU"),
        }
    }
}

/// The tiles of more than `above` and up to `most` tokens, each with the most tokens that it takes. The first tile of
/// `tiles` with enough columns for all tokens is used. If none has enough, the last one is used in several passes.
fn steps(tiles: &'static [Tile], above: usize, most: usize) -> impl Iterator<Item = (usize, Tile)> {
    let last = tiles.iter().position(|tile| tile.columns as usize >= most).unwrap_or(tiles.len() - 1);
    let whole = tiles[..last].iter().map(|tile| (tile.columns as usize, *tile));
    whole.filter(move |(columns, _)| *columns > above).chain([(most, tiles[last])])
}

/// The tile of f32 products of `tokens` tokens.
pub(crate) fn taking(tiles: &'static [Tile], tokens: usize) -> Tile {
    let mut steps = steps(tiles, 0, usize::MAX);
    steps.find(|(most, _)| *most >= tokens).expect("the last tile has no bound").1
}

/// The tiles of the products of experts, in ascending order. Subgroups multiply more pairs than lanes compute in one pass,
/// if they do so in plain products of as many tokens. All matrices of experts have the same tiles, so `are_int8` is false if
/// one of them is multiplied with f32 activations.
fn expert_tiles(tiles: Tiles, are_int8: bool) -> Vec<Tile> {
    match tiles {
        Tiles::Gpu(gpu) if are_int8 => {
            let is_used =
                |tile: &&Tile| tile.columns <= LANE_COLUMNS || expert_way(gpu, **tile) != Way::COUNTED;
            WITH_SUBGROUPS.iter().filter(is_used).copied().collect()
        }
        _ => tiles.floats().to_vec(),
    }
}

/// The way of the products of experts with this tile: that of plain products, if it has such tiles.
fn expert_way(gpu: GpuTiles, tile: Tile) -> Way {
    let (_, way) = gpu.taking(ProductKind::Plain, tile.columns as usize);
    match (way, tile.columns <= LANE_COLUMNS) {
        (Way::Lanes { .. }, true) | (Way::Subgroups(_), false) => way,
        _ => Way::COUNTED,
    }
}

/// The one of `tiles` for the products of experts in a step of `tokens` tokens: the smallest one that holds the pairs of an
/// expert, if all experts in use had as many. If that is more than twice as wide, because lanes compute plain products of
/// as many tokens, it is the one before.
pub(crate) fn expert_tile(tiles: &[Tile], experts: &Experts, tokens: usize) -> Tile {
    let pairs = experts.pairs(tokens) as f64 / experts.expected(tokens);
    let holds = |tile: &Tile| f64::from(tile.columns) >= pairs;
    let index = tiles.iter().position(holds).unwrap_or(tiles.len() - 1);
    let is_too_wide = f64::from(tiles[index].columns) >= 2.0 * pairs && index > 0;
    tiles[index - usize::from(is_too_wide)]
}

/// A kernel of products.
struct Kernel {
    /// The most tokens for which it is used.
    most: usize,
    tile: Tile,
    /// Whether it computes two products and combines them.
    is_fused: bool,
    pipeline: Arc<Pipeline>,
}

/// The kernels of one scheme, for each of [`ProductKind::ALL`] in ascending order. A kind without kernels uses those of
/// plain products.
struct OfScheme([Vec<Kernel>; ProductKind::ALL.len()]);

impl OfScheme {
    /// The kernel of this kind for `tokens` tokens.
    fn find(&self, kind: ProductKind, tokens: usize) -> Option<&Kernel> {
        self.0[kind as usize].iter().find(|kernel| kernel.most >= tokens)
    }

    /// The kernel for `tokens` tokens that computes products only.
    fn apart(&self, kind: ProductKind, tokens: usize) -> &Kernel {
        let own = self.find(kind, tokens).filter(|kernel| !kernel.is_fused);
        own.or_else(|| self.find(ProductKind::Plain, tokens)).expect("every scheme has plain products")
    }
}

/// The pipelines of the products of all schemes of a model.
pub(super) struct Products {
    precision: Precision,
    /// How products are divided in fact.
    pub tiles: Tiles,
    by_scheme: Vec<(Scheme, OfScheme)>,
    /// [`expert_tiles`]
    expert_tiles: Vec<Tile>,
    /// The kernels of products of experts, for each of these tiles.
    experts: Vec<(Scheme, Vec<ExpertKernel>)>,
}

/// The kernels of products of experts with one tile.
struct ExpertKernel {
    gathered: Arc<Pipeline>,
    in_order: Arc<Pipeline>,
    /// Computes the products of gate and up, and combines them.
    gated: Option<Arc<Pipeline>>,
}

impl Products {
    /// If the device refuses the products of subgroups, lanes compute them: a driver may list a shape of cooperative
    /// matrices and refuse a kernel that uses it, for example because of the subgroups' size.
    pub fn new(
        device: &Device,
        matrices: &Matrices,
        tiles: Tiles,
        precision: Precision,
    ) -> Result<Products, GpuError> {
        match (Products::of(device, matrices, tiles, precision), tiles) {
            (Err(why), Tiles::Gpu(gpu)) if why.is_refusal() && gpu.has_subgroups() => {
                let name = &device.info().name;
                tracing::warn!(
                    "{name}: subgroups cannot multiply tiles, so lanes compute these products: {why}"
                );
                Products::of(device, matrices, Tiles::Gpu(gpu.without_subgroups()), precision)
            }
            (made, _) => made,
        }
    }

    fn of(
        device: &Device,
        matrices: &Matrices,
        tiles: Tiles,
        precision: Precision,
    ) -> Result<Products, GpuError> {
        let expert_tiles =
            expert_tiles(tiles, matrices.experts.iter().all(|scheme| precision.quantizes(*scheme)));
        let mut products =
            Products { precision, tiles, by_scheme: Vec::new(), expert_tiles, experts: Vec::new() };
        for scheme in matrices.products.iter().chain(&matrices.head) {
            if products.find(*scheme).is_some() {
                continue;
            }
            let quantizes = precision.quantizes(*scheme);
            let is_used = |kind| match kind {
                ProductKind::Plain => true,
                ProductKind::Gated => matrices.gated.iter().any(|other| products.is_same(*other, *scheme)),
                ProductKind::Head => matrices.head.is_some_and(|other| products.is_same(other, *scheme)),
            };
            let kernel = |most, tile, is_fused, (shader, constants): (&'static Shader, Vec<u32>)| {
                Ok(Kernel { most, tile, is_fused, pipeline: device.pipeline(shader, &constants)? })
            };
            let kernels = |kind| -> Result<Vec<Kernel>, GpuError> {
                match (kind, tiles) {
                    (kind, Tiles::Gpu(gpu)) if quantizes && is_used(kind) => {
                        let (shader, group) = fast_shader_of(*scheme);
                        let one = |(most, tile, way): (usize, Tile, Way)| {
                            way.check(device.info())?;
                            let is_fused = kind == ProductKind::Gated && matches!(way, Way::Lanes { .. });
                            let gated = is_fused.then_some(matrices.layers.activation);
                            kernel(most, tile, is_fused, way.pipeline_of(shader, group, tile, gated, 0))
                        };
                        gpu.steps(kind).map(one).collect()
                    }
                    (ProductKind::Plain, Tiles::Cpu) if quantizes => {
                        let (shader, group) = fast_shader_of(*scheme);
                        let one = |(most, tile): (usize, Tile)| {
                            kernel(most, tile, false, (tiles.body_of(shader), vec![tile.columns, group, 0]))
                        };
                        steps(CPU_TILES, 0, usize::MAX).map(one).collect()
                    }
                    (ProductKind::Plain, _) => {
                        let shader = tiles.body_of(shaders_of(*scheme).0);
                        let one = |(most, tile): (usize, Tile)| {
                            kernel(most, tile, false, (shader, vec![tile.columns, 0]))
                        };
                        steps(tiles.floats(), 0, usize::MAX).map(one).collect()
                    }
                    _ => Ok(Vec::new()),
                }
            };
            let [plain, gated, head] = ProductKind::ALL.map(kernels);
            let made = OfScheme([plain?, gated?, head?]);
            products.by_scheme.push((*scheme, made));
        }
        for scheme in &matrices.experts {
            if products.experts.iter().any(|(other, _)| products.is_same(*other, *scheme)) {
                continue;
            }
            let activation = matrices.layers.activation;
            let of_tile =
                |tile: &Tile| ExpertKernel::new(device, *scheme, tiles, precision, *tile, activation);
            let kernels = products.expert_tiles.iter().map(of_tile).collect::<Result<_, _>>()?;
            products.experts.push((*scheme, kernels));
        }
        Ok(products)
    }

    pub fn expert_tile(&self, experts: &Experts, tokens: usize) -> Tile {
        expert_tile(&self.expert_tiles, experts, tokens)
    }

    fn expert_kernel(&self, scheme: Scheme, tile: Tile) -> &ExpertKernel {
        let found = self.experts.iter().find(|(other, _)| self.is_same(*other, scheme));
        let (_, kernels) = found.unwrap_or_else(|| panic!("no kernels of experts were made for {scheme}"));
        let index = self.expert_tiles.iter().position(|other| *other == tile);
        &kernels[index.expect("a tile of experts")]
    }

    /// Records the products of experts with one of their matrices: `y[p] = W[expert of p] x[row of p]` for each pair `p`.
    pub fn experts(
        &self,
        recorder: &mut Recorder<'_>,
        matrix: &Matrix,
        x: &Operand,
        y: &Activations,
        grouped: &Grouped<'_>,
    ) {
        let tile = self.expert_tile(grouped.experts, grouped.tokens);
        let kernel = self.expert_kernel(matrix.scheme, tile);
        let pipeline = if grouped.list.is_some() { &kernel.gathered } else { &kernel.in_order };
        let pairs = grouped.pairs();
        let shard = grouped.shard(matrix);
        let output = y.used(pairs, shard.rows, "experts: y");
        let (items, list) = grouped.lists();
        let grid = [pairs as u32, tile.parts(shard.rows), 1];
        if self.precision.quantizes(matrix.scheme) {
            let from = x.blocks.as_ref().expect("experts: x in int8");
            let from = from.planes(grouped.operand_rows(), matrix.cols, "experts: x");
            let strides = [y.stride as u32, 0, 0];
            let of_one = int8_arguments(
                [Some(&shard), None, None],
                [Some(&output), None, None],
                strides,
                &from,
                matrix.cols,
                pairs,
            );
            let arguments = shaders::FastMatmul {
                blocks2_or_none: Some(&items),
                scales2_or_none: list.as_ref(),
                ..of_one
            };
            grouped.dispatch(recorder, pipeline, &arguments, grid);
            return;
        }
        let from = x.floats.as_ref().expect("experts: x in f32");
        let rows_of_x = if list.is_some() { grouped.tokens } else { pairs };
        let arguments = shaders::Matmul {
            blocks: &shard.blocks,
            scales: shard.scales.as_ref(),
            x: &from.used(rows_of_x, matrix.cols, "experts: x"),
            y: &output,
            rows: shard.rows as u32,
            cols: matrix.cols as u32,
            tokens: pairs as u32,
            x_stride: from.stride as u32,
            y_stride: y.stride as u32,
            blocks_per_scale: matrix.scheme.blocks_per_scale() as u32,
            items_or_none: Some(&items),
            list_or_none: list.as_ref(),
        };
        grouped.dispatch(recorder, pipeline, &arguments, grid);
    }

    /// Records both products of experts and their gated product in one dispatch. Records nothing and returns false if no
    /// kernel can do that.
    pub fn gated_experts(
        &self,
        recorder: &mut Recorder<'_>,
        [gate, up]: [&Matrix; 2],
        x: &Operand,
        y: &Operand,
        grouped: &Grouped<'_>,
    ) -> bool {
        let (Some(x), Some(to), None) = (&x.blocks, &y.blocks, &y.floats) else { return false };
        let quantizes = |matrix: &Matrix| self.precision.quantizes(matrix.scheme);
        if !quantizes(gate) || !quantizes(up) || !share_pipeline(gate.scheme, up.scheme) {
            return false;
        }
        let tile = self.expert_tile(grouped.experts, grouped.tokens);
        let Some(pipeline) = &self.expert_kernel(gate.scheme, tile).gated else { return false };
        let (gate_shard, up_shard) = (grouped.shard(gate), grouped.shard(up));
        let rows = gate_shard.rows;
        let from = x.planes(grouped.operand_rows(), gate.cols, "experts: x");
        let to = to.planes(grouped.experts.pair_rows(grouped.tokens), rows, "experts: y");
        let (items, list) = grouped.lists();
        let shards = [Some(&gate_shard), Some(&up_shard), None];
        let outputs = [Some(&to.blocks), Some(&to.scales), None];
        let strides = [to.stride, 0, 0];
        let of_two = int8_arguments(shards, outputs, strides, &from, gate.cols, grouped.pairs());
        let arguments =
            shaders::FastMatmul { blocks2_or_none: Some(&items), scales2_or_none: list.as_ref(), ..of_two };
        grouped.dispatch(recorder, pipeline, &arguments, [grouped.pairs() as u32, tile.parts(rows), 1]);
        true
    }

    /// The kernels for a scheme. Schemes that need the same pipelines share them.
    fn find(&self, scheme: Scheme) -> Option<&OfScheme> {
        self.by_scheme.iter().find(|(other, _)| self.is_same(*other, scheme)).map(|(_, made)| made)
    }

    /// Whether matrices of both schemes need the same pipelines.
    fn is_same(&self, a: Scheme, b: Scheme) -> bool {
        let quantizes = self.precision.quantizes(a);
        self.precision.quantizes(b) == quantizes
            && if quantizes { share_pipeline(a, b) } else { a.shares_variant(b) }
    }

    fn kernels_of(&self, scheme: Scheme) -> &OfScheme {
        self.find(scheme).unwrap_or_else(|| panic!("no kernels were made for {scheme}"))
    }

    /// A number of tokens, a power of two, for each kernel that computes products of this kind with matrices of
    /// `scheme`, in ascending order. Kernels of the head that plain products have, too, are left out.
    pub fn tokens(&self, kind: ProductKind, scheme: Scheme) -> Vec<usize> {
        let OfScheme(kernels) = self.kernels_of(scheme);
        let [plain, gated, head] = kernels;
        let (own, mut known) = match kind {
            ProductKind::Gated if !gated.is_empty() => (gated, Vec::new()),
            ProductKind::Plain | ProductKind::Gated => (plain, Vec::new()),
            ProductKind::Head => (head, plain.iter().collect()),
        };
        let (mut all, mut above) = (Vec::new(), 0_usize);
        for kernel in own {
            if !known.iter().any(|other: &&Kernel| Arc::ptr_eq(&other.pipeline, &kernel.pipeline)) {
                all.push((above + 1).next_power_of_two().max(kernel.tile.columns as usize).min(kernel.most));
                known.push(kernel);
            }
            above = kernel.most;
        }
        all
    }

    pub fn record(
        &self,
        recorder: &mut Recorder<'_>,
        kind: ProductKind,
        products: &[(&Matrix, &Activations)],
        x: &Operand,
        tokens: usize,
    ) {
        let mut rest = products;
        while let Some(((matrix, y), others)) = rest.split_first() {
            if !self.precision.quantizes(matrix.scheme) {
                let floats = x.floats.as_ref().expect("matmul: x in f32");
                self.record_floats(recorder, matrix, floats, y, tokens);
                rest = others;
                continue;
            }
            let blocks = x.blocks.as_ref().expect("matmul: x in int8");
            // A matrix with several shards gets its own dispatches, one for each shard.
            let alike = |(other, _): &(&Matrix, &Activations)| {
                self.precision.quantizes(other.scheme)
                    && share_pipeline(other.scheme, matrix.scheme)
                    && other.cols == matrix.cols
                    && other.shards.len() == 1
            };
            let count = match matrix.shards.len() {
                1 => rest.iter().take(MATRICES).take_while(|product| alike(product)).count(),
                _ => 1,
            };
            let (now, later) = rest.split_at(count);
            self.record_blocks(recorder, kind, now, blocks, tokens);
            rest = later;
        }
    }

    fn record_floats(
        &self,
        recorder: &mut Recorder<'_>,
        matrix: &Matrix,
        x: &Activations,
        y: &Activations,
        tokens: usize,
    ) {
        let input = x.used(tokens, matrix.cols, "matmul: x");
        let output = y.used(tokens, matrix.rows, "matmul: y");
        let kernel = self.kernels_of(matrix.scheme).apart(ProductKind::Plain, tokens);
        let tile = kernel.tile;
        for shard in &matrix.shards {
            // A shard writes some columns of y, so its elements interleave with the elements of other shards. The
            // dispatch declares all of y from the shard's first column, so barriers order the shards.
            let first = 4 * shard.first_row as u64;
            let arguments = shaders::Matmul {
                blocks: &shard.blocks,
                scales: shard.scales.as_ref(),
                x: &input,
                y: &output.slice(first, output.size() - first),
                rows: shard.rows as u32,
                cols: matrix.cols as u32,
                tokens: tokens as u32,
                x_stride: x.stride as u32,
                y_stride: y.stride as u32,
                blocks_per_scale: matrix.scheme.blocks_per_scale() as u32,
                items_or_none: None,
                list_or_none: None,
            };
            let parts = tile.parts(shard.rows);
            let passes = Passes::of_f32(matrix.scheme, parts, matrix.cols, tokens, tile);
            recorder.dispatch(&kernel.pipeline, &arguments, passes.grid(parts));
        }
    }

    /// Records the products of several matrices with one shard each, or of one matrix with any number of shards.
    fn record_blocks(
        &self,
        recorder: &mut Recorder<'_>,
        kind: ProductKind,
        products: &[(&Matrix, &Activations)],
        x: &Quantized,
        tokens: usize,
    ) {
        let (matrix, _) = products[0];
        let kernel = self.kernels_of(matrix.scheme).apart(kind, tokens);
        let tile = kernel.tile;
        let from = x.planes(tokens, matrix.cols, "matmul: x");
        for piece in 0..matrix.shards.len() {
            let shard = |i: usize| products.get(i).map(|(matrix, _)| &matrix.shards[piece]);
            let output = |i: usize| {
                let (matrix, y) = products.get(i)?;
                let (output, first) = (y.used(tokens, matrix.rows, "matmul: y"), shard(i)?.first_row);
                Some(output.slice(4 * first as u64, output.size() - 4 * first as u64))
            };
            let (shards, outputs) = ([0, 1, 2].map(shard), [0, 1, 2].map(output));
            let outputs = outputs.each_ref().map(Option::as_ref);
            let strides = [0, 1, 2].map(|i| products.get(i).map_or(0, |(_, y)| y.stride as u32));
            let arguments = int8_arguments(shards, outputs, strides, &from, matrix.cols, tokens);
            let parts = shards.into_iter().flatten().map(|shard| tile.parts(shard.rows)).sum();
            let passes = Passes::of_int8(matrix.scheme, 1, parts, matrix.cols, tokens, tile);
            recorder.dispatch(&kernel.pipeline, &arguments, passes.grid(parts));
        }
    }

    /// Records both products and their gated product in one dispatch. Records nothing and returns false if no kernel can do
    /// that.
    pub fn gated(
        &self,
        recorder: &mut Recorder<'_>,
        [gate, up]: [&Matrix; 2],
        x: &Operand,
        y: &Operand,
        tokens: usize,
    ) -> bool {
        let (Some(x), Some(to)) = (&x.blocks, &y.blocks) else { return false };
        let quantizes = |matrix: &Matrix| self.precision.quantizes(matrix.scheme);
        let is_pair = quantizes(gate)
            && quantizes(up)
            && share_pipeline(gate.scheme, up.scheme)
            && (gate.rows, gate.cols) == (up.rows, up.cols)
            && gate.shards.len() == 1
            && up.shards.len() == 1;
        if !is_pair || y.floats.is_some() {
            return false;
        }
        let kernel = self.kernels_of(gate.scheme).find(ProductKind::Gated, tokens);
        let Some(Kernel { tile, pipeline, .. }) = kernel.filter(|kernel| kernel.is_fused) else {
            return false;
        };
        let from = x.planes(tokens, gate.cols, "gated: x");
        let to = to.planes(tokens, gate.rows, "gated: y");
        let shards = [Some(&gate.shards[0]), Some(&up.shards[0]), None];
        let outputs = [Some(&to.blocks), Some(&to.scales), None];
        let arguments = int8_arguments(shards, outputs, [to.stride, 0, 0], &from, gate.cols, tokens);
        let parts = tile.parts(gate.rows);
        let passes = Passes::of_int8(gate.scheme, 2, parts, gate.cols, tokens, *tile);
        recorder.dispatch(pipeline, &arguments, passes.grid(parts));
        true
    }
}

/// The pairs of a product of experts.
pub(super) struct Grouped<'a> {
    pub experts: &'a Experts,
    pub items: &'a Buffer,
    /// The row of the operand for each pair; `None`: its own.
    pub list: Option<&'a Buffer>,
    /// The workgroup counts on the device; `None`: an item for each pair.
    pub groups: Option<Buffer>,
    pub tokens: usize,
}

impl Grouped<'_> {
    pub fn pairs(&self) -> usize {
        self.experts.pairs(self.tokens)
    }

    /// The rows that an operand in int8 has room for.
    pub fn operand_rows(&self) -> usize {
        if self.list.is_some() { self.tokens } else { self.experts.pair_rows(self.tokens) }
    }

    /// The items, and the list of rows.
    pub fn lists(&self) -> (Buffer, Option<Buffer>) {
        let pairs = self.pairs();
        let list = self.list.map(|list| words(list, pairs, "experts: list"));
        (words(self.items, 4 * pairs, "experts: items"), list)
    }

    /// The matrix of all experts, with the rows of one. The step reads the matrices of the experts in use.
    pub fn shard(&self, matrix: &Matrix) -> Shard {
        let [Shard { blocks, scales, .. }] = &matrix.shards[..] else {
            panic!("experts: a matrix in several parts")
        };
        let share = self.experts.expected(self.tokens) / self.experts.count as f64;
        let used = |buffer: &Buffer| buffer.accessing((buffer.size() as f64 * share) as u64);
        let rows = matrix.rows / self.experts.count;
        assert!(rows.is_multiple_of(TILE_ROWS), "experts: matrices of {rows} rows");
        Shard { first_row: 0, rows, blocks: used(blocks), scales: scales.as_ref().map(used) }
    }

    /// Records a dispatch with the workgroup counts of the device, or with `grid`.
    pub fn dispatch<A: Arguments>(
        &self,
        recorder: &mut Recorder<'_>,
        pipeline: &Pipeline,
        arguments: &A,
        grid: [u32; 3],
    ) {
        match &self.groups {
            Some(groups) => recorder.dispatch_indirect(pipeline, arguments, groups),
            None => recorder.dispatch(pipeline, arguments, grid),
        }
    }
}

/// The values of the constant GROUPED (`shaders/fast_matmul.comp`).
pub(crate) const IN_ORDER: u32 = 1;
pub(crate) const GATHERED: u32 = 2;

impl ExpertKernel {
    fn new(
        device: &Device,
        scheme: Scheme,
        tiles: Tiles,
        precision: Precision,
        tile: Tile,
        activation: HiddenAct,
    ) -> Result<ExpertKernel, GpuError> {
        let one = |grouped: u32, gated: Option<HiddenAct>| {
            let (shader, constants) = match (precision.quantizes(scheme), tiles) {
                (false, _) => (tiles.body_of(shaders_of(scheme).0), vec![tile.columns, grouped]),
                (true, Tiles::Cpu) => {
                    let (shader, group) = fast_shader_of(scheme);
                    (tiles.body_of(shader), vec![tile.columns, group, grouped])
                }
                (true, Tiles::Gpu(gpu)) => {
                    let (shader, group) = fast_shader_of(scheme);
                    expert_way(gpu, tile).pipeline_of(shader, group, tile, gated, grouped)
                }
            };
            device.pipeline(shader, &constants)
        };
        let is_fused = match tiles {
            Tiles::Gpu(gpu) if precision.quantizes(scheme) => {
                matches!(expert_way(gpu, tile), Way::Lanes { .. })
            }
            _ => false,
        };
        Ok(ExpertKernel {
            gathered: one(GATHERED, None)?,
            in_order: one(IN_ORDER, None)?,
            gated: is_fused.then(|| one(GATHERED, Some(activation))).transpose()?,
        })
    }
}

/// The arguments of int8 products of up to three matrices with the same activations.
fn int8_arguments<'a>(
    shards: [Option<&'a Shard>; MATRICES],
    [y0, y1, y2]: [Option<&'a Buffer>; MATRICES],
    [y0_stride, y1_stride, y2_stride]: [u32; MATRICES],
    x: &'a Planes,
    cols: usize,
    tokens: usize,
) -> shaders::FastMatmul<'a> {
    let [blocks0, blocks1, blocks2] = shards.map(|shard| shard.map(|shard| &shard.blocks));
    let [scales0, scales1, scales2] = shards.map(|shard| shard.and_then(|shard| shard.scales.as_ref()));
    let [rows0, rows1, rows2] = shards.map(|shard| shard.map_or(0, |shard| shard.rows as u32));
    shaders::FastMatmul {
        blocks0: blocks0.expect("there is at least one product"),
        blocks1_or_none: blocks1,
        blocks2_or_none: blocks2,
        scales0: scales0.expect("integers have scales"),
        scales1_or_none: scales1,
        scales2_or_none: scales2,
        y0: y0.expect("there is at least one product"),
        y1_or_none: y1,
        y2_or_none: y2,
        x: &x.blocks,
        x_scales: &x.scales,
        rows0,
        rows1,
        rows2,
        y0_stride,
        y1_stride,
        y2_stride,
        cols: cols as u32,
        tokens: tokens as u32,
        x_stride: x.stride,
        // The shader only uses addresses from its push constants.
        followed: &[],
    }
}

/// Bytes of activations that are assumed to stay in the L2 cache while weights are read through it, too. A Radeon 780M
/// has 2 MiB of L2.
const CACHED_BYTES: u64 = 1 << 20;
/// The smallest number of workgroups that run at the same time. A Radeon 780M has 24 SIMDs. Each SIMD holds 8 waves of
/// the widest kernel, and a workgroup has 8 waves.
const CONCURRENT_WORKGROUPS: u32 = 24;

/// How the passes over the tokens are arranged in the grid. Passes that run together share one read of the weights from
/// memory.
pub(crate) struct Passes {
    /// The number of passes that run together.
    pub together: u32,
    /// How many times all weights are read from memory.
    pub weight_reads: u32,
    /// How many times all activations are read from memory.
    pub activation_reads: u32,
}

impl Passes {
    /// The choice that reads the fewest bytes from memory. If more passes run together, the weights are read fewer
    /// times. But activations that do not fit into the cache are read again for every round of workgroups.
    ///
    /// `part_bytes` is the size of the weights that a workgroup reads, `parts` the number of workgroups of a pass, and
    /// `pass_bytes` the size of the activations of a pass.
    fn new(part_bytes: u64, parts: u32, pass_bytes: u64, tokens: usize, tile: Tile) -> Passes {
        let passes = (tokens as u32).div_ceil(tile.columns);
        let shared = |together: u32| Passes {
            together,
            weight_reads: passes.div_ceil(together),
            activation_reads: match u64::from(together) * pass_bytes <= CACHED_BYTES {
                true => 1,
                false => (parts * together).div_ceil(CONCURRENT_WORKGROUPS),
            },
        };
        let bytes = |shared: &Passes| {
            u64::from(shared.weight_reads) * u64::from(parts) * part_bytes
                + u64::from(shared.activation_reads) * u64::from(passes) * pass_bytes
        };
        (1..=passes).map(shared).min_by_key(bytes).expect("there is at least one pass")
    }

    /// Passes of int8 products, with `matrices` matrices per workgroup and `parts` workgroups per pass.
    pub fn of_int8(
        scheme: Scheme,
        matrices: u32,
        parts: u32,
        cols: usize,
        tokens: usize,
        tile: Tile,
    ) -> Passes {
        let pass_bytes = Quantized::bytes_of_digit(tile.columns as usize, cols);
        let part_bytes = weights_of(scheme, cols, matrices * tile.row_tiles);
        Passes::new(part_bytes, parts, pass_bytes, tokens, tile)
    }

    /// Passes of f32 products.
    pub fn of_f32(scheme: Scheme, parts: u32, cols: usize, tokens: usize, tile: Tile) -> Passes {
        let pass_bytes = Activations::bytes(tile.columns as usize, cols);
        Passes::new(weights_of(scheme, cols, tile.row_tiles), parts, pass_bytes, tokens, tile)
    }

    /// The workgroup counts of a dispatch: passes that run together, parts of the matrix, groups of passes.
    fn grid(&self, parts: u32) -> [u32; 3] {
        [self.together, parts, self.weight_reads]
    }
}

const fn weights_of(scheme: Scheme, cols: usize, tiles: u32) -> u64 {
    tiles as u64 * (scheme.tile_bytes(cols) + scheme.tile_scale_bytes(cols)) as u64
}

/// The shader for int8 products of a scheme, and its number of blocks per scale.
pub(crate) fn fast_shader_of(scheme: Scheme) -> (&'static Shader, u32) {
    (shader_of("fast_matmul", scheme), scheme.blocks_per_scale() as u32)
}

/// Whether one pipeline multiplies matrices of both integer schemes. It runs in every step, so it compares no names.
fn share_pipeline(a: Scheme, b: Scheme) -> bool {
    a.shares_variant(b) && a.blocks_per_scale() == b.blocks_per_scale()
}
