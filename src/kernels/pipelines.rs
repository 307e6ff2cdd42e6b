//! Lists all pipelines that a GPU may run: every shader with its possible specialization constants.

use super::arrays::{Heads, HiddenAct, LayerKind};
use super::attention_kernels::{AttentionBy, AttentionTile, attention_constants};
use super::expert_kernels::route_constants;
use super::operand::{
    ActivationsFrom, GATHERED, GPU_TILES, IN_ORDER, LANE_COLUMNS, LANE_TILES, ON_CPU, SubgroupTile, Tile, Way,
};
use super::shaders::{self, shader_named};
use crate::gpu::Shader;
use crate::tensor::{KvDtype, Precision};

/// The possible numbers of blocks that share a scale, for the group sizes (16, 32 and 128 columns) of the shader's
/// schemes.
fn scale_blocks(shader: &str) -> &'static [u32] {
    match shader {
        "fast_matmul_int8_row" => &[1],
        name if name.contains("_int8") => &[1, 2],
        // Weights with five and six bits come only from GGUF. Its Q2_K has groups of 16 columns, and Q5_K of 32.
        name if name.contains("_int6") => &[1],
        name if name.ends_with("_int5_super") => &[1, 2],
        name if name.contains("_int5") => &[2],
        name if name.ends_with("_affine16") => &[1],
        _ => &[1, 4],
    }
}

/// The constants of an int8 product's shader, for each of `tiles` and each activation of gated products, with these
/// values of GROUPED.
fn of_int8(
    shader: &'static Shader,
    way: Way,
    tiles: &[Tile],
    kinds: &[(Option<HiddenAct>, u32)],
) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for tile in tiles {
        for group in scale_blocks(shader.name) {
            all.extend(
                kinds
                    .iter()
                    .map(|(gated, grouped)| way.pipeline_of(shader, *group, *tile, *gated, *grouped).1),
            );
        }
    }
    all
}

/// Every pipeline that a GPU may run, with its constants, for such layers, and attention with `group` query heads per KV
/// head.
#[doc(hidden)]
pub fn all_pipelines(layers: LayerKind, group: u32, head_dim: u32) -> Vec<(&'static Shader, Vec<u32>)> {
    let ([activation, post_norms], of_qkv) = layers.constants();
    let of_experts: &[Tile] = if layers.experts.is_some() { GPU_TILES } else { &[] };
    let constants = |shader: &'static Shader| -> Vec<Vec<u32>> {
        match shader.constants.iter().map(|(_, name)| *name).collect::<Vec<_>>()[..] {
            [] if layers.experts.is_none() && shader.kernel == "group_pairs" => vec![],
            [] if !layers.has_streams && ["altup", "cutoff", "streams"].contains(&shader.kernel) => vec![],
            [] => vec![vec![]],
            ["COLUMNS", "GROUPED"] => {
                let plain = GPU_TILES.iter().map(|tile| vec![tile.columns, 0]);
                let grouped = |tile: &Tile| [IN_ORDER, GATHERED].map(|grouped| vec![tile.columns, grouped]);
                plain.chain(of_experts.iter().flat_map(grouped)).collect()
            }
            ["EXPERTS", "PER_TOKEN", "RENORMALIZED"] => {
                layers.experts.map(|experts| route_constants(experts).to_vec()).into_iter().collect()
            }
            ["RESIDUAL" | "STANDARDIZE" | "ADD"] => vec![vec![0], vec![1]],
            ["NORMED"] => layers.experts.iter().flat_map(|_| [vec![0], vec![1]]).collect(),
            ["SILU"] => vec![vec![activation]],
            ["POST_NORM"] => vec![vec![post_norms]],
            ["POST_NORM", "TWICE"] => {
                (0..=u32::from(layers.has_expert_norm)).map(|twice| vec![post_norms, twice]).collect()
            }
            ["QK_NORM", "BIAS", "VALUE_NORM"] => vec![of_qkv.to_vec()],
            ["COLUMNS", "GATED", "SCALE_BLOCKS", ..] => {
                let gated = Some(layers.activation);
                let kinds = [(None, 0), (gated, 0)];
                let mut all = of_int8(shader, Way::COUNTED, GPU_TILES, &kinds);
                // The widest tile with activations in shared memory uses the most shared memory.
                let shared = Way::Lanes { columns: LANE_COLUMNS, activations: ActivationsFrom::SharedMemory };
                let widest = &GPU_TILES[LANE_TILES - 1..];
                all.extend(of_int8(shader, shared, widest, &kinds));
                let kinds = [(None, IN_ORDER), (None, GATHERED), (gated, GATHERED)];
                all.extend(of_int8(shader, Way::COUNTED, of_experts, &kinds));
                all
            }
            ["COLUMNS", "HALVES", "SCALE_BLOCKS", ..] => {
                let Some(lanes) = shader.name.strip_suffix("_in_tiles") else { return vec![] };
                let way = Way::Subgroups(SubgroupTile::RDNA3);
                let grouped: &[_] =
                    if of_experts.is_empty() { &[] } else { &[(None, IN_ORDER), (None, GATHERED)] };
                let mut all = of_int8(shader_named(lanes), way, way.tiles(), &[(None, 0)]);
                all.extend(of_int8(shader_named(lanes), way, way.tiles(), grouped));
                all
            }
            ["GROUP", "HEAD_DIM", "ROWS"] => {
                vec![attention_constants(shader, group as usize, head_dim as usize)]
            }
            ["GROUP", "HEAD_DIM", "ROWS", ..] if shader.name.contains("_emulated_") => vec![],
            ["GROUP", "HEAD_DIM", "ROWS", ..] => {
                let kv = KvDtype::ALL.into_iter().find(|kv| shader.name.ends_with(&format!("_{kv}")));
                let heads = Heads {
                    group: group as usize,
                    head_dim: head_dim as usize,
                    kv: kv.expect("a type of KV"),
                };
                let way = AttentionBy::Subgroups(AttentionTile::RDNA3);
                match way.suits(&heads, Precision::Fast) {
                    true => way.pipelines(&heads).map(|(_, constants)| constants).into(),
                    false => vec![],
                }
            }
            ref others => panic!("{}: add values for the constants {others:?} to all_pipelines", shader.name),
        }
    };
    let of_gpus = shaders::ALL.iter().filter(|shader| !shader.name.ends_with(ON_CPU));
    of_gpus.flat_map(|shader| constants(shader).into_iter().map(move |c| (*shader, c))).collect()
}
