//! The features and limits of a device, for devices that run shaders and for those that only compile them.
//!
//! `build.rs` reads the features that a shader needs from its SPIR-V. A logical device is created with every feature of
//! [`Need`] that the physical device has. A shader variant that the device cannot run is refused before its pipeline is
//! created, and the error names the missing features.

use std::fmt;

use ash::{khr, vk};

use super::GpuError;
use super::need::{Need, SUBGROUP_LANES};
use super::shader::Shader;

/// VK_COMPONENT_TYPE_BFLOAT16_KHR, whose name `ash` does not know.
const BFLOAT16: vk::ComponentTypeKHR = vk::ComponentTypeKHR::from_raw(1_000_141_000);

/// A cooperative matrix shape: a subgroup multiplies a tile `[m, k]` by `[k, n]` and adds the product to `[m, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CooperativeMatrix {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    /// Element type of both factors.
    pub factors: vk::ComponentTypeKHR,
    /// Element type of the addend and of the result.
    pub sum: vk::ComponentTypeKHR,
}

impl CooperativeMatrix {
    pub fn multiplies_int8(&self) -> bool {
        (self.factors, self.sum) == (vk::ComponentTypeKHR::SINT8, vk::ComponentTypeKHR::SINT32)
    }

    pub fn multiplies_f16(&self) -> bool {
        (self.factors, self.sum) == (vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32)
    }
}

impl fmt::Display for CooperativeMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CooperativeMatrix { m, n, k, factors, sum } = self;
        let [factors, sum] = [factors, sum].map(|of| match *of {
            BFLOAT16 => "BFLOAT16".to_string(),
            other => format!("{other:?}"),
        });
        write!(f, "{m}x{n}x{k}, {factors} to {sum}")
    }
}

/// Vulkan's structures with the features of [`Need`].
#[derive(Default)]
struct Features {
    core: vk::PhysicalDeviceFeatures,
    vulkan11: vk::PhysicalDeviceVulkan11Features<'static>,
    vulkan12: vk::PhysicalDeviceVulkan12Features<'static>,
    vulkan13: vk::PhysicalDeviceVulkan13Features<'static>,
}

impl Features {
    /// The fields that report a feature, and enable it.
    fn fields(&mut self) -> [(Need, &mut vk::Bool32); 13] {
        let Features { core, vulkan11, vulkan12, vulkan13 } = self;
        [
            (Need::BufferDeviceAddress, &mut vulkan12.buffer_device_address),
            (Need::TimelineSemaphore, &mut vulkan12.timeline_semaphore),
            (Need::HostQueryReset, &mut vulkan12.host_query_reset),
            (Need::Synchronization2, &mut vulkan13.synchronization2),
            (Need::Maintenance4, &mut vulkan13.maintenance4),
            (Need::SubgroupSizeControl, &mut vulkan13.subgroup_size_control),
            (Need::FullSubgroups, &mut vulkan13.compute_full_subgroups),
            (Need::Float16, &mut vulkan12.shader_float16),
            (Need::Int8, &mut vulkan12.shader_int8),
            (Need::Int16, &mut core.shader_int16),
            (Need::Storage8, &mut vulkan12.storage_buffer8_bit_access),
            (Need::Storage16, &mut vulkan11.storage_buffer16_bit_access),
            (Need::IntegerDotProduct, &mut vulkan13.shader_integer_dot_product),
        ]
    }
}

/// The features and limits of a device.
#[derive(Debug, Clone, Default)]
pub struct Caps {
    pub api_version: (u32, u32),
    features: Vec<Need>,
    /// The subgroup size of a pipeline that requires none.
    pub subgroup_size: u32,
    /// The smallest and the largest subgroup size that a pipeline may require.
    pub subgroup_sizes: (u32, u32),
    /// The most subgroups per workgroup in a pipeline that requires a subgroup size.
    pub max_workgroup_subgroups: u32,
    pub max_workgroup_invocations: u32,
    pub max_shared_bytes: u32,
    /// Whether a dot product of four packed signed bytes is faster than separate multiplications and additions.
    pub integer_dot_accelerated: bool,
    /// The shapes that a subgroup computes without saturation.
    pub cooperative_matrices: Vec<CooperativeMatrix>,
}

impl Caps {
    pub(super) fn read(
        entry: &ash::Entry,
        instance: &ash::Instance,
        raw: vk::PhysicalDevice,
        has_extension: &dyn Fn(&std::ffi::CStr) -> bool,
    ) -> Caps {
        let mut subgroup = vk::PhysicalDeviceSubgroupProperties::default();
        let mut properties13 = vk::PhysicalDeviceVulkan13Properties::default();
        let mut properties =
            vk::PhysicalDeviceProperties2::default().push_next(&mut subgroup).push_next(&mut properties13);
        let mut own = Features::default();
        let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
        let mut features = vk::PhysicalDeviceFeatures2::default()
            .push_next(&mut own.vulkan11)
            .push_next(&mut own.vulkan12)
            .push_next(&mut own.vulkan13);
        let has_matrix = has_extension(khr::cooperative_matrix::NAME);
        if has_matrix {
            features = features.push_next(&mut matrix);
        }
        // SAFETY: `raw` comes from this instance; the chains are local and well formed. Devices with a Vulkan version
        // below 1.3 ignore structures that they do not know.
        unsafe {
            instance.get_physical_device_properties2(raw, &mut properties);
            instance.get_physical_device_features2(raw, &mut features);
        }
        let kind = properties.properties.device_type;
        let (limits, api) = (properties.properties.limits, properties.properties.api_version);
        own.core = features.features;
        let in_compute = subgroup.supported_stages.contains(vk::ShaderStageFlags::COMPUTE);
        let operations = |flags| in_compute && subgroup.supported_operations.contains(flags);
        let may_require = properties13.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE);
        let is = |feature: vk::Bool32| feature == vk::TRUE;
        let sizes = match (is(own.vulkan13.subgroup_size_control), may_require) {
            (true, true) => (properties13.min_subgroup_size, properties13.max_subgroup_size),
            _ => (subgroup.subgroup_size, subgroup.subgroup_size),
        };
        // lavapipe reports cooperative matrices for every subgroup size, but the process crashes if it is not 8.
        let may_multiply = kind != vk::PhysicalDeviceType::CPU || subgroup.subgroup_size == 8;
        let features12 = &own.vulkan12;
        let has_model = is(features12.vulkan_memory_model) && is(features12.vulkan_memory_model_device_scope);
        let has_matrix = has_matrix && may_multiply && has_model && is(matrix.cooperative_matrix);
        let more = [
            (Need::SubgroupArithmetic, operations(vk::SubgroupFeatureFlags::ARITHMETIC)),
            (Need::SubgroupBallot, operations(vk::SubgroupFeatureFlags::BALLOT)),
            (Need::SubgroupShuffle, operations(vk::SubgroupFeatureFlags::SHUFFLE)),
            (Need::SubgroupsOf32, sizes.0 <= SUBGROUP_LANES),
            (Need::CooperativeMatrix, has_matrix),
        ];
        let reported = own.fields().map(|(need, field)| match need {
            Need::SubgroupSizeControl => (need, is(*field) && may_require),
            _ => (need, is(*field)),
        });
        let all = reported.into_iter().chain(more);
        let mut caps = Caps {
            api_version: (vk::api_version_major(api), vk::api_version_minor(api)),
            features: all.filter(|(_, has)| *has).map(|(need, _)| need).collect(),
            subgroup_size: subgroup.subgroup_size,
            subgroup_sizes: sizes,
            max_workgroup_subgroups: properties13.max_compute_workgroup_subgroups,
            max_workgroup_invocations: limits.max_compute_work_group_invocations,
            max_shared_bytes: limits.max_compute_shared_memory_size,
            integer_dot_accelerated: is(properties13.integer_dot_product4x8_bit_packed_signed_accelerated),
            cooperative_matrices: Vec::new(),
        };
        if has_matrix {
            let extension = khr::cooperative_matrix::Instance::new(entry, instance);
            // SAFETY: the device has the call's extension. A failed call leaves the list empty.
            let shapes = unsafe { extension.get_physical_device_cooperative_matrix_properties(raw) };
            let plain = |s: &vk::CooperativeMatrixPropertiesKHR<'_>| {
                s.scope == vk::ScopeKHR::SUBGROUP
                    && s.a_type == s.b_type
                    && s.c_type == s.result_type
                    && s.saturating_accumulation == vk::FALSE
            };
            caps.cooperative_matrices = shapes
                .unwrap_or_default()
                .iter()
                .filter(|s| plain(s))
                .map(|s| CooperativeMatrix {
                    m: s.m_size,
                    n: s.n_size,
                    k: s.k_size,
                    factors: s.a_type,
                    sum: s.c_type,
                })
                .collect();
        }
        caps
    }

    pub fn has(&self, need: Need) -> bool {
        self.features.contains(&need)
    }

    /// Names of the features and limits that every step requires and the device lacks.
    pub(super) fn missing_to_run(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if self.api_version < (1, 3) {
            missing.push("Vulkan 1.3 (on Debian 12, Mesa from bookworm-backports)".to_string());
        }
        missing.extend(Need::RUN.iter().filter(|need| !self.has(**need)).map(Need::to_string));
        missing.extend(self.too_small(256, 32 << 10));
        missing
    }

    /// Names of the features and limits that a pipeline of `shader` with `constants` needs and the device lacks.
    pub fn missing(&self, shader: &Shader, constants: &[u32]) -> Vec<String> {
        let needs = shader.needs.iter().filter(|need| !self.has(**need));
        let mut missing: Vec<String> = needs.map(Need::to_string).collect();
        missing.extend(self.too_small(shader.workgroup.iter().product(), (shader.shared_bytes)(constants)));
        missing
    }

    fn too_small(&self, invocations: u32, shared_bytes: u32) -> impl Iterator<Item = String> {
        let limits = [
            ("maxComputeWorkGroupInvocations", invocations, self.max_workgroup_invocations),
            ("maxComputeSharedMemorySize", shared_bytes, self.max_shared_bytes),
        ];
        let too_small = limits.into_iter().filter(|(_, needs, has)| needs > has);
        too_small.map(|(what, needs, has)| format!("{what} of {needs} (it has {has})"))
    }

    /// The subgroup size that a pipeline with this workgroup requires: `SUBGROUP_LANES`, or the device's largest size
    /// below that; all sizes are powers of two. `None`: the pipeline requires no size, because the device has only
    /// larger sizes, lacks `subgroupSizeControl`, or would need too many subgroups per workgroup.
    pub fn required_subgroup_size(&self, workgroup: [u32; 3]) -> Option<u32> {
        let (least, most) = self.subgroup_sizes;
        let size = SUBGROUP_LANES.min(most);
        let invocations: u32 = workgroup.iter().product();
        let is_allowed = size >= least && invocations <= size.saturating_mul(self.max_workgroup_subgroups);
        (self.has(Need::SubgroupSizeControl) && is_allowed).then_some(size)
    }

    /// Whether a pipeline with this workgroup may require full subgroups.
    pub(super) fn has_full_subgroups(&self, workgroup: [u32; 3]) -> bool {
        let size = self.required_subgroup_size(workgroup).unwrap_or(self.subgroup_sizes.1);
        self.has(Need::FullSubgroups) && size > 0 && workgroup[0].is_multiple_of(size)
    }

    /// Creates a logical device with one queue and every feature of [`Need`] that the physical device has.
    pub(super) fn create_device(
        &self,
        instance: &ash::Instance,
        raw: vk::PhysicalDevice,
        queue_family: u32,
        extensions: &[&std::ffi::CStr],
        executable_info: bool,
    ) -> Result<ash::Device, GpuError> {
        let has = |need| self.has(need);
        let mut extensions: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
        let queues =
            [vk::DeviceQueueCreateInfo::default().queue_family_index(queue_family).queue_priorities(&[1.0])];
        let mut features = Features::default();
        features.fields().into_iter().for_each(|(need, field)| *field = has(need).into());
        // SPIR-V with cooperative matrices declares the Vulkan memory model. If that feature is enabled, atomics in all
        // shaders need the device scope.
        features.vulkan12.vulkan_memory_model = has(Need::CooperativeMatrix).into();
        features.vulkan12.vulkan_memory_model_device_scope = has(Need::CooperativeMatrix).into();
        let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut statistics = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
            .pipeline_executable_info(true);
        if has(Need::CooperativeMatrix) {
            extensions.push(khr::cooperative_matrix::NAME.as_ptr());
        }
        if executable_info {
            extensions.push(khr::pipeline_executable_properties::NAME.as_ptr());
        }
        let mut info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .enabled_features(&features.core)
            .push_next(&mut features.vulkan11)
            .push_next(&mut features.vulkan12)
            .push_next(&mut features.vulkan13);
        if has(Need::CooperativeMatrix) {
            info = info.push_next(&mut matrix);
        }
        if executable_info {
            info = info.push_next(&mut statistics);
        }
        // SAFETY: the physical device belongs to this instance and has the features.
        unsafe { instance.create_device(raw, &info, None) }.map_err(GpuError::of("vkCreateDevice"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps(features: &[Need], sizes: (u32, u32)) -> Caps {
        Caps {
            api_version: (1, 3),
            features: features.to_vec(),
            subgroup_size: sizes.1,
            subgroup_sizes: sizes,
            max_workgroup_subgroups: 32,
            max_workgroup_invocations: 256,
            max_shared_bytes: 32 << 10,
            ..Caps::default()
        }
    }

    fn shader(needs: &'static [Need]) -> Shader {
        Shader {
            name: "product_int8",
            kernel: "product",
            constants: &[(0, "COLUMNS")],
            pointers: &[],
            follows: false,
            needs,
            workgroup: [32, 4, 1],
            shared_bytes: |c| 512 * c[0],
            spirv: &[],
        }
    }

    #[test]
    fn features_that_a_pipeline_needs_and_the_device_lacks_are_named() {
        let some = caps(&[Need::Int8, Need::IntegerDotProduct], (8, 8));
        assert_eq!(some.missing(&shader(&[Need::Int8, Need::IntegerDotProduct]), &[64]), [""; 0]);
        let lacks = some.missing(&shader(&[Need::Int8, Need::Float16, Need::CooperativeMatrix]), &[65]);
        assert_eq!(
            lacks,
            [
                "shaderFloat16",
                "cooperativeMatrix (VK_KHR_cooperative_matrix)",
                "maxComputeSharedMemorySize of 33280 (it has 32768)"
            ]
        );
        let small = Caps { max_workgroup_invocations: 64, ..some };
        assert_eq!(small.missing(&shader(&[]), &[1]), ["maxComputeWorkGroupInvocations of 128 (it has 64)"]);
        assert!(!caps(&[], (8, 8)).missing_to_run().is_empty());
        assert!(caps(&Need::RUN, (8, 8)).missing_to_run().is_empty());
        let old = Caps { api_version: (1, 2), ..caps(&Need::RUN, (8, 8)) };
        assert!(old.missing_to_run()[0].contains("Vulkan 1.3"));
    }

    #[test]
    fn pipelines_require_32_lanes_or_a_size_that_divides_32() {
        // Each case has the device's sizes, the size that a pipeline requires, and whether workgroups of 32 and of 48
        // invocations have full subgroups.
        let cases = [
            ((32, 64), Some(32), [true, false]), // RDNA
            ((32, 32), Some(32), [true, false]), // NVIDIA
            ((8, 32), Some(32), [true, false]),  // Intel
            ((8, 8), Some(8), [true, true]),     // lavapipe
            ((4, 4), Some(4), [true, true]),     // SwiftShader
            ((64, 64), None, [false, false]),    // GCN
        ];
        for (sizes, required, full) in cases {
            let device = caps(&[Need::SubgroupSizeControl, Need::FullSubgroups], sizes);
            assert_eq!(device.required_subgroup_size([32, 4, 1]), required, "{sizes:?}");
            assert_eq!([32, 48].map(|x| device.has_full_subgroups([x, 4, 1])), full, "{sizes:?}");
        }
        assert_eq!(caps(&[], (8, 8)).required_subgroup_size([32, 4, 1]), None, "no subgroupSizeControl");
        let narrow = caps(&[Need::SubgroupSizeControl], (4, 4));
        assert_eq!(narrow.required_subgroup_size([256, 1, 1]), None, "64 subgroups, but 32 are allowed");
    }
}
