//! The pipelines of a mixture's layers, apart from products.

use std::sync::Arc;

use super::arrays::{Experts, LayerKind};
use super::operand::Tiles;
use super::shaders;
use crate::gpu::{Device, GpuError, Pipeline};

/// The kernels of a mixture's layers, apart from products.
pub(super) struct ExpertKernels {
    pub experts: Experts,
    pub route: Arc<Pipeline>,
    pub group_pairs: Arc<Pipeline>,
    /// Without norms, and with norms of the result and of a dense network's.
    pub combine: [Arc<Pipeline>; 2],
}

impl ExpertKernels {
    pub fn new(device: &Device, tiles: Tiles, layers: &LayerKind) -> Result<Option<ExpertKernels>, GpuError> {
        let Some(experts) = layers.experts else { return Ok(None) };
        let one = |shader, constants: &[u32]| device.pipeline(tiles.body_of(shader), constants);
        Ok(Some(ExpertKernels {
            experts,
            route: one(&shaders::ROUTE, &route_constants(experts))?,
            group_pairs: one(&shaders::GROUP_PAIRS, &[])?,
            combine: [one(&shaders::COMBINE, &[0])?, one(&shaders::COMBINE, &[1])?],
        }))
    }
}

/// The constants of `route.comp`.
pub(crate) fn route_constants(experts: Experts) -> [u32; 3] {
    [experts.count as u32, experts.per_token as u32, experts.renormalizes.into()]
}
