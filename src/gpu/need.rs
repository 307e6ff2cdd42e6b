//! The device features that shaders or steps may need, with Vulkan's names.

/// The subgroup size that shaders are written for: AMD (wave32) and NVIDIA have it. Sizes that divide it work too.
pub(super) const SUBGROUP_LANES: u32 = 32;

/// A feature of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    BufferDeviceAddress,
    TimelineSemaphore,
    HostQueryReset,
    Synchronization2,
    Maintenance4,
    SubgroupSizeControl,
    FullSubgroups,
    SubgroupArithmetic,
    SubgroupBallot,
    SubgroupShuffle,
    /// Subgroups whose size divides `SUBGROUP_LANES`.
    SubgroupsOf32,
    Float16,
    Int8,
    Int16,
    Storage8,
    Storage16,
    IntegerDotProduct,
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

    /// Vulkan's name of the feature, or a description if it has no name.
    pub fn name(self) -> &'static str {
        match self {
            Need::BufferDeviceAddress => "bufferDeviceAddress",
            Need::TimelineSemaphore => "timelineSemaphore",
            Need::HostQueryReset => "hostQueryReset",
            Need::Synchronization2 => "synchronization2",
            Need::Maintenance4 => "maintenance4",
            Need::SubgroupSizeControl => "subgroupSizeControl",
            Need::FullSubgroups => "computeFullSubgroups",
            Need::SubgroupArithmetic => "subgroup arithmetic in compute shaders",
            Need::SubgroupBallot => "subgroup ballots in compute shaders",
            Need::SubgroupShuffle => "subgroup shuffles in compute shaders",
            Need::SubgroupsOf32 => "subgroups of 32 invocations, or of a size that divides it",
            Need::Float16 => "shaderFloat16",
            Need::Int8 => "shaderInt8",
            Need::Int16 => "shaderInt16",
            Need::Storage8 => "storageBuffer8BitAccess",
            Need::Storage16 => "storageBuffer16BitAccess",
            Need::IntegerDotProduct => "shaderIntegerDotProduct",
            Need::CooperativeMatrix => "cooperativeMatrix (VK_KHR_cooperative_matrix)",
        }
    }
}
