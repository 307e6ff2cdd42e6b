//! Which kernels compute attention: lanes, or subgroups that multiply tiles of f16.

use std::fmt;

use super::arrays::{Heads, MAX_GROUP};
use super::attention::{TEAM_ROWS, TILE_ROWS, tile_rows};
use super::shaders::{self, shader_named};
use crate::gpu::{DeviceInfo, DeviceKind, Shader};
use crate::tensor::{KvDtype, Precision};

/// Keys that the kernel processes at a time, and dimensions of a chunk (`shaders/common/attention_in_tiles.glsl`).
const TILE_COLUMNS: u32 = 64;

/// How attention is computed. The two ways give different bits, so all tokens of a model use the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionBy {
    /// Each lane computes the score of a key: `shaders/common/attention_by_lanes.glsl`. Products are f32.
    #[default]
    Lanes,
    /// Subgroups multiply tiles of f16 with f32 sums: `shaders/common/attention_in_tiles.glsl`.
    Subgroups(AttentionTile),
}

impl AttentionBy {
    /// The fastest way by count: a GPU that multiplies tiles of f16 does so.
    pub fn of(device: &DeviceInfo) -> AttentionBy {
        let is_gpu = device.kind != DeviceKind::Cpu;
        let tile = if is_gpu { AttentionTile::of(device) } else { None };
        tile.map_or(AttentionBy::Lanes, AttentionBy::Subgroups)
    }

    /// Whether layers with these heads may be computed so. Only `fast` allows factors of f16.
    pub fn suits(self, heads: &Heads, precision: Precision) -> bool {
        // The cache is read in units of 16 bytes.
        let is_whole = heads.head_dim.is_multiple_of(16) && heads.kv != KvDtype::F32;
        self == AttentionBy::Lanes || is_whole && precision == Precision::Fast
    }

    /// The pipelines for items of single tokens and for tiles of tokens: shaders and their constants.
    pub(super) fn pipelines(self, heads: &Heads) -> [(&'static Shader, Vec<u32>); 2] {
        let Heads { group, head_dim, kv } = *heads;
        match self {
            AttentionBy::Lanes => {
                attention_of(kv).map(|shader| (shader, attention_constants(shader, group, head_dim)))
            }
            AttentionBy::Subgroups(tile) => [group.next_multiple_of(16), tile_rows(head_dim)]
                .map(|rows| tile.pipeline_of(heads, rows as u32)),
        }
    }
}

impl fmt::Display for AttentionBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttentionBy::Lanes => write!(f, "lanes"),
            AttentionBy::Subgroups(AttentionTile { m, n, k, .. }) => {
                write!(f, "subgroups of {m}x{n}x{k} in f16")
            }
        }
    }
}

/// The shape of the f16 products that a subgroup computes, `[m, k]` by `[k, n]` (`shaders/common/tile.glsl`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionTile {
    m: u32,
    n: u32,
    k: u32,
    /// Number of subgroups in a workgroup.
    subgroups: u32,
    is_emulated: bool,
}

impl AttentionTile {
    /// The tile of RDNA 3.
    pub(crate) const RDNA3: AttentionTile =
        AttentionTile { m: 16, n: 16, k: 16, subgroups: 4, is_emulated: false };

    /// The largest tile of f16 with f32 sums that the device has and the kernel can use.
    pub fn of(device: &DeviceInfo) -> Option<AttentionTile> {
        let lanes = device.caps.required_subgroup_size(shaders::ATTENTION_IN_TILES_F16.workgroup)?;
        let all = device.caps.cooperative_matrices.iter().filter(|shape| shape.multiplies_f16());
        let usable = all.filter_map(|shape| AttentionTile::new([shape.m, shape.n, shape.k], lanes, false));
        // Of heads of this size, these need the most shared memory. A device that has room for them may have none for
        // larger heads, and then refuses their kernels.
        let heads = Heads { group: MAX_GROUP, head_dim: 256, kv: KvDtype::Int8 };
        let has_room = |tile: &AttentionTile| {
            let both = AttentionBy::Subgroups(*tile).pipelines(&heads);
            both.iter().all(|(shader, constants)| device.caps.missing(shader, constants).is_empty())
        };
        usable.filter(has_room).max_by_key(|tile| (tile.m * tile.n * tile.k, tile.k))
    }

    /// A tile that 32 invocations compute element by element, for devices without cooperative matrices.
    pub fn emulated(shape: [u32; 3]) -> Option<AttentionTile> {
        AttentionTile::new(shape, 32, true)
    }

    fn new([m, n, k]: [u32; 3], lanes: u32, is_emulated: bool) -> Option<AttentionTile> {
        let subgroups = shaders::ATTENTION_IN_TILES_F16.workgroup.iter().product::<u32>() / lanes;
        let tile = AttentionTile { m, n, k, subgroups, is_emulated };
        let is_whole = [16, TILE_ROWS as u32].iter().all(|rows| tile.grid(*rows).is_some());
        (is_whole && [8, 16, 32].contains(&k) && (m * n).is_multiple_of(lanes)).then_some(tile)
    }

    /// The numbers of subgroups along the rows and along the keys, for a workgroup of `rows` rows: as near to a square
    /// as whole tiles allow.
    fn grid(self, rows: u32) -> Option<[u32; 2]> {
        let both = |log: u32| [1 << log, self.subgroups >> log];
        let mut grids = (0..=self.subgroups.ilog2() / 2).rev().map(both);
        grids.find(|[along_rows, along_keys]| {
            rows.is_multiple_of(self.m * along_rows) && TILE_COLUMNS.is_multiple_of(self.n * along_keys)
        })
    }

    pub(super) fn pipeline_of(self, heads: &Heads, rows: u32) -> (&'static Shader, Vec<u32>) {
        let Heads { group, head_dim, kv } = *heads;
        let way = if self.is_emulated { "in_emulated_tiles" } else { "in_tiles" };
        let [along_rows, along_keys] = self.grid(rows).expect("a multiple of 16 rows");
        let AttentionTile { m, n, k, .. } = self;
        let constants = vec![group as u32, head_dim as u32, rows, m, n, k, along_rows, along_keys];
        (shader_named(&format!("attention_{way}_{kv}")), constants)
    }
}

/// The shaders of attention by lanes for a KV cache of type `kv`: for single tokens, and for tiles.
pub(crate) fn attention_of(kv: KvDtype) -> [&'static Shader; 2] {
    ["attention", "attention_tile"].map(|kernel| shader_named(&format!("{kernel}_{kv}")))
}

/// The constants of a shader of attention by lanes. ROWS is the number of query heads that a team computes: all query
/// heads of one token for single tokens, and [`TEAM_ROWS`] of the query heads of several tokens for tiles.
pub(crate) fn attention_constants(shader: &Shader, group: usize, head_dim: usize) -> Vec<u32> {
    let rows = if shader.name.starts_with("attention_tile") { TEAM_ROWS } else { group };
    [group, head_dim, rows].map(|n| n as u32).to_vec()
}
