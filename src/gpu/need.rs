//! The device features that shaders or steps may need, with Vulkan's names.

use strum::Display;

/// The subgroup size that shaders are written for: AMD (wave32) and NVIDIA have it. Sizes that divide it work too.
pub(super) const SUBGROUP_LANES: u32 = 32;

/// A feature of a device. It displays as Vulkan's name, or as a description if it has no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
#[strum(serialize_all = "camelCase")]
pub enum Need {
    BufferDeviceAddress,
    TimelineSemaphore,
    HostQueryReset,
    Synchronization2,
    Maintenance4,
    SubgroupSizeControl,
    #[strum(serialize = "computeFullSubgroups")]
    FullSubgroups,
    #[strum(serialize = "subgroup arithmetic in compute shaders")]
    SubgroupArithmetic,
    #[strum(serialize = "subgroup ballots in compute shaders")]
    SubgroupBallot,
    #[strum(serialize = "subgroup shuffles in compute shaders")]
    SubgroupShuffle,
    /// Subgroups whose size divides `SUBGROUP_LANES`.
    #[strum(serialize = "subgroups of 32 invocations, or of a size that divides it")]
    SubgroupsOf32,
    #[strum(serialize = "shaderFloat16")]
    Float16,
    #[strum(serialize = "shaderInt8")]
    Int8,
    #[strum(serialize = "shaderInt16")]
    Int16,
    #[strum(serialize = "storageBuffer8BitAccess")]
    Storage8,
    #[strum(serialize = "storageBuffer16BitAccess")]
    Storage16,
    #[strum(serialize = "shaderIntegerDotProduct")]
    IntegerDotProduct,
    #[strum(serialize = "cooperativeMatrix (VK_KHR_cooperative_matrix)")]
    CooperativeMatrix,
}

impl Need {
    /// Features that every step needs, in addition to the needs of its shaders.
    pub(super) const RUN: [Need; 6] = [
        Need::BufferDeviceAddress,
        Need::TimelineSemaphore,
        Need::HostQueryReset,
        Need::Synchronization2,
        Need::Maintenance4,
        Need::SubgroupArithmetic,
    ];
}
