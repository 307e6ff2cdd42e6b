//! A Vulkan driver inside this process that executes nothing: the laboratory records a model's steps on it, and reads
//! what was recorded ([`super::Note`]). It needs no GPU, no driver and no loader.
//!
//! Its device has every feature that shaders need, and heaps without a practical limit. Device memory has addresses and
//! no bytes; memory that the host maps has bytes. Every submit has finished when it returns. Functions that this
//! program does not call are missing, and ash panics at a call.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ash::vk::Handle;
use ash::{khr, vk};

/// The size of each heap, and of the largest allocation.
const HEAP_BYTES: u64 = 1 << 50;
/// Alignment of buffers, and distance between their addresses beyond their sizes.
const ALIGNMENT: u64 = 1 << 16;

/// The next handle or address.
static NEXT: AtomicU64 = AtomicU64::new(ALIGNMENT);
/// The sizes of buffers, by handle. A buffer's handle is its address.
static BUFFERS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
/// The sizes of allocations, and the bytes of those that are mapped, by handle.
static MEMORY: Mutex<BTreeMap<u64, (u64, Vec<u8>)>> = Mutex::new(BTreeMap::new());

/// The driver's loader.
pub(super) fn entry() -> ash::Entry {
    // SAFETY: the function returns functions with the signatures of their names.
    unsafe { ash::Entry::from_static_fn(ash::StaticFn { get_instance_proc_addr: instance_function }) }
}

type Pointer = *const c_void;
const SUCCESS: vk::Result = vk::Result::SUCCESS;

/// Defines functions of Vulkan, and `function`, which finds each by its names. Handles are passed as the words that
/// they consist of, and structures that a function does not read as untyped pointers: both have the ABI of the Vulkan
/// types.
macro_rules! functions {
    ($($($vulkan:literal)|+ => $name:ident($($argument:tt: $of:ty),*) $(-> $result:ty)? { $($body:tt)* })+) => {
        $(
            #[allow(unused_unsafe)] // some functions do nothing
            unsafe extern "system" fn $name($($argument: $of),*) $(-> $result)? {
                // SAFETY: Vulkan passes valid inputs, and room for each output; a null pointer is handled in the body.
                unsafe { $($body)* }
            }
        )+

        fn function(name: &CStr) -> Option<unsafe extern "system" fn()> {
            let function = match name.to_str().ok()? {
                $($($vulkan)|+ => $name as *const (),)+
                _ => return None,
            };
            // SAFETY: a pointer to a function, which ash calls with the signature of the name.
            Some(unsafe { std::mem::transmute::<*const (), unsafe extern "system" fn()>(function) })
        }
    };
}

functions! {
    "vkGetInstanceProcAddr" => instance_function(_: vk::Instance, name: *const c_char) -> vk::PFN_vkVoidFunction {
        function(CStr::from_ptr(name))
    }
    "vkGetDeviceProcAddr" => device_function(_: vk::Device, name: *const c_char) -> vk::PFN_vkVoidFunction {
        function(CStr::from_ptr(name))
    }

    "vkCreateInstance" => create_instance(_: Pointer, _: Pointer, made: *mut u64) -> vk::Result {
        made.write(unique(0));
        SUCCESS
    }
    "vkCreateDevice" | "vkCreatePipelineLayout" | "vkCreatePipelineCache" | "vkCreateShaderModule" | "vkCreateSemaphore"
    | "vkCreateCommandPool" => create(_: Pointer, _: Pointer, _: Pointer, made: *mut u64) -> vk::Result {
        made.write(unique(0));
        SUCCESS
    }
    "vkDestroyInstance" | "vkDestroyDevice" => destroy_owner(_: Pointer, _: Pointer) {}
    "vkDestroyPipelineLayout" | "vkDestroyPipelineCache" | "vkDestroyShaderModule" | "vkDestroyPipeline"
    | "vkDestroySemaphore" | "vkDestroyCommandPool" | "vkDestroyQueryPool"
        => destroy(_: Pointer, _: u64, _: Pointer) {}

    "vkEnumeratePhysicalDevices" => devices(_: Pointer, count: *mut u32, devices: *mut u64) -> vk::Result {
        count.write(1);
        if !devices.is_null() {
            devices.write(1);
        }
        SUCCESS
    }
    "vkEnumerateDeviceExtensionProperties" => extensions(
        _: Pointer, _: Pointer, count: *mut u32, to: *mut vk::ExtensionProperties
    ) -> vk::Result {
        count.write(1);
        if !to.is_null() {
            let mut one = vk::ExtensionProperties::default();
            for (to, from) in one.extension_name.iter_mut().zip(khr::cooperative_matrix::NAME.to_bytes()) {
                *to = *from as c_char;
            }
            to.write(one);
        }
        SUCCESS
    }
    // The shapes of RDNA 3 that kernels use.
    "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR" => cooperative_matrices(
        _: Pointer, count: *mut u32, to: *mut vk::CooperativeMatrixPropertiesKHR<'_>
    ) -> vk::Result {
        use vk::ComponentTypeKHR as T;
        let all = [(T::SINT8, T::SINT32), (T::FLOAT16, T::FLOAT32)].map(|(factors, sum)| {
            vk::CooperativeMatrixPropertiesKHR {
                m_size: 16,
                n_size: 16,
                k_size: 16,
                a_type: factors,
                b_type: factors,
                c_type: sum,
                result_type: sum,
                scope: vk::ScopeKHR::SUBGROUP,
                ..Default::default()
            }
        });
        count.write(all.len() as u32);
        if !to.is_null() {
            to.cast::<[vk::CooperativeMatrixPropertiesKHR<'_>; 2]>().write(all);
        }
        SUCCESS
    }
    "vkGetPhysicalDeviceProperties2" => properties(_: Pointer, to: *mut vk::PhysicalDeviceProperties2<'_>) {
        use vk::StructureType as S;
        let own = &mut (*to).properties;
        own.api_version = vk::API_VERSION_1_3;
        // So the host maps no memory of weights: a note would copy them.
        own.device_type = vk::PhysicalDeviceType::DISCRETE_GPU;
        own.limits.max_compute_work_group_invocations = 1024;
        own.limits.max_compute_shared_memory_size = 64 << 10;
        own.limits.max_storage_buffer_range = u32::MAX;
        for (to, from) in own.device_name.iter_mut().zip(b"a driver that executes nothing") {
            *to = *from as c_char;
        }
        chained((*to).p_next, |kind, to| match kind {
            S::PHYSICAL_DEVICE_SUBGROUP_PROPERTIES => {
                let to = &mut *to.cast::<vk::PhysicalDeviceSubgroupProperties<'_>>();
                to.subgroup_size = 64;
                to.supported_stages = vk::ShaderStageFlags::COMPUTE;
                to.supported_operations = vk::SubgroupFeatureFlags::from_raw(!0);
            }
            S::PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES => {
                let to = &mut *to.cast::<vk::PhysicalDeviceMaintenance3Properties<'_>>();
                to.max_memory_allocation_size = HEAP_BYTES;
            }
            S::PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES => {
                (*to.cast::<vk::PhysicalDeviceMaintenance4Properties<'_>>()).max_buffer_size = HEAP_BYTES;
            }
            S::PHYSICAL_DEVICE_VULKAN_1_3_PROPERTIES => {
                let to = &mut *to.cast::<vk::PhysicalDeviceVulkan13Properties<'_>>();
                (to.min_subgroup_size, to.max_subgroup_size) = (32, 64);
                to.max_compute_workgroup_subgroups = 1024;
                to.required_subgroup_size_stages = vk::ShaderStageFlags::COMPUTE;
            }
            _ => {}
        });
    }
    "vkGetPhysicalDeviceFeatures2" => features(_: Pointer, to: *mut vk::PhysicalDeviceFeatures2<'_>) {
        use vk::StructureType as S;
        (*to).features.shader_int16 = vk::TRUE;
        chained((*to).p_next, |kind, to| match kind {
            S::PHYSICAL_DEVICE_VULKAN_1_1_FEATURES => {
                let to = &mut *to.cast::<vk::PhysicalDeviceVulkan11Features<'_>>();
                to.storage_buffer16_bit_access = vk::TRUE;
            }
            S::PHYSICAL_DEVICE_VULKAN_1_2_FEATURES => {
                let to = &mut *to.cast::<vk::PhysicalDeviceVulkan12Features<'_>>();
                to.buffer_device_address = vk::TRUE;
                to.timeline_semaphore = vk::TRUE;
                to.host_query_reset = vk::TRUE;
                to.shader_float16 = vk::TRUE;
                to.shader_int8 = vk::TRUE;
                to.storage_buffer8_bit_access = vk::TRUE;
                to.vulkan_memory_model = vk::TRUE;
                to.vulkan_memory_model_device_scope = vk::TRUE;
            }
            S::PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR => {
                let to = &mut *to.cast::<vk::PhysicalDeviceCooperativeMatrixFeaturesKHR<'_>>();
                to.cooperative_matrix = vk::TRUE;
            }
            S::PHYSICAL_DEVICE_VULKAN_1_3_FEATURES => {
                let to = &mut *to.cast::<vk::PhysicalDeviceVulkan13Features<'_>>();
                to.synchronization2 = vk::TRUE;
                to.maintenance4 = vk::TRUE;
                to.subgroup_size_control = vk::TRUE;
                to.compute_full_subgroups = vk::TRUE;
                to.shader_integer_dot_product = vk::TRUE;
            }
            _ => {}
        });
    }
    "vkGetPhysicalDeviceQueueFamilyProperties"
        => queue_families(_: Pointer, count: *mut u32, families: *mut vk::QueueFamilyProperties) {
        count.write(1);
        if !families.is_null() {
            let queue_flags = vk::QueueFlags::COMPUTE;
            families.write(vk::QueueFamilyProperties { queue_flags, queue_count: 1, ..Default::default() });
        }
    }
    // One type of device memory, and one that the host maps, each with a heap.
    "vkGetPhysicalDeviceMemoryProperties" => memory(_: Pointer, to: *mut vk::PhysicalDeviceMemoryProperties) {
        use vk::MemoryPropertyFlags as Flags;
        let mut all = vk::PhysicalDeviceMemoryProperties {
            memory_heap_count: 2,
            memory_type_count: 2,
            ..Default::default()
        };
        let local = vk::MemoryHeapFlags::DEVICE_LOCAL;
        all.memory_heaps[0] = vk::MemoryHeap { size: HEAP_BYTES, flags: local };
        all.memory_heaps[1] = vk::MemoryHeap { size: HEAP_BYTES, ..Default::default() };
        all.memory_types[0] = vk::MemoryType { property_flags: Flags::DEVICE_LOCAL, heap_index: 0 };
        let mapped = Flags::HOST_VISIBLE | Flags::HOST_COHERENT | Flags::HOST_CACHED;
        all.memory_types[1] = vk::MemoryType { property_flags: mapped, heap_index: 1 };
        to.write(all)
    }
    "vkGetPhysicalDeviceMemoryProperties2"
        => memory2(device: Pointer, to: *mut vk::PhysicalDeviceMemoryProperties2<'_>) {
        memory(device, &raw mut (*to).memory_properties)
    }
    "vkGetDeviceQueue" => queue(_: Pointer, _: u32, _: u32, queue: *mut u64) { queue.write(1) }

    "vkCreateComputePipelines"
        => pipelines(_: Pointer, _: u64, count: u32, _: Pointer, _: Pointer, made: *mut u64) -> vk::Result {
        (0..count as usize).for_each(|i| made.add(i).write(unique(0)));
        SUCCESS
    }
    "vkGetPipelineCacheData" => no_cache_data(_: Pointer, _: u64, bytes: *mut usize, _: Pointer) -> vk::Result {
        bytes.write(0);
        SUCCESS
    }

    "vkCreateBuffer"
        => create_buffer(_: Pointer, info: *const vk::BufferCreateInfo<'_>, _: Pointer, made: *mut u64) -> vk::Result {
        let size = (*info).size;
        let handle = unique(size);
        BUFFERS.lock().unwrap().insert(handle, size);
        made.write(handle);
        SUCCESS
    }
    "vkDestroyBuffer" => destroy_buffer(_: Pointer, buffer: u64, _: Pointer) {
        BUFFERS.lock().unwrap().remove(&buffer);
    }
    "vkGetBufferMemoryRequirements" => requirements(_: Pointer, buffer: u64, to: *mut vk::MemoryRequirements) {
        let size = BUFFERS.lock().unwrap()[&buffer];
        to.write(vk::MemoryRequirements { size, alignment: ALIGNMENT, memory_type_bits: 3 })
    }
    "vkGetBufferDeviceAddress" => address(_: Pointer, info: *const vk::BufferDeviceAddressInfo<'_>) -> u64 {
        (*info).buffer.as_raw()
    }
    "vkAllocateMemory"
        => allocate(_: Pointer, info: *const vk::MemoryAllocateInfo<'_>, _: Pointer, made: *mut u64) -> vk::Result {
        let handle = unique(0);
        MEMORY.lock().unwrap().insert(handle, ((*info).allocation_size, Vec::new()));
        made.write(handle);
        SUCCESS
    }
    "vkFreeMemory" => free(_: Pointer, memory: u64, _: Pointer) {
        MEMORY.lock().unwrap().remove(&memory);
    }
    "vkBindBufferMemory" => bind(_: Pointer, _: u64, _: u64, _: u64) -> vk::Result { SUCCESS }
    "vkMapMemory" => map(_: Pointer, memory: u64, _: u64, _: u64, _: u32, mapped: *mut *mut u8) -> vk::Result {
        let mut all = MEMORY.lock().unwrap();
        let (size, bytes) = all.get_mut(&memory).expect("allocated memory");
        // Zeroed memory takes pages only where it is written.
        *bytes = vec![0; *size as usize];
        mapped.write(bytes.as_mut_ptr());
        SUCCESS
    }

    "vkAllocateCommandBuffers"
        => commands(_: Pointer, info: *const vk::CommandBufferAllocateInfo<'_>, made: *mut u64) -> vk::Result {
        (0..(*info).command_buffer_count as usize).for_each(|i| made.add(i).write(unique(0)));
        SUCCESS
    }
    "vkBeginCommandBuffer" => begin(_: Pointer, _: Pointer) -> vk::Result { SUCCESS }
    "vkEndCommandBuffer" | "vkDeviceWaitIdle" => succeed(_: Pointer) -> vk::Result { SUCCESS }
    "vkResetCommandPool" => reset_pool(_: Pointer, _: u64, _: u32) -> vk::Result { SUCCESS }
    "vkCmdBindPipeline" => bind_pipeline(_: Pointer, _: i32, _: u64) {}
    "vkCmdPushConstants" => push_constants(_: Pointer, _: u64, _: u32, _: u32, _: u32, _: Pointer) {}
    "vkCmdDispatch" => dispatch(_: Pointer, _: u32, _: u32, _: u32) {}
    "vkCmdDispatchIndirect" => dispatch_indirect(_: Pointer, _: u64, _: u64) {}
    "vkCmdCopyBuffer" => copy(_: Pointer, _: u64, _: u64, _: u32, _: Pointer) {}
    "vkCmdFillBuffer" => fill(_: Pointer, _: u64, _: u64, _: u64, _: u32) {}
    "vkCmdPipelineBarrier2" => barrier(_: Pointer, _info: *const vk::DependencyInfo<'_>) {
        #[cfg(test)]
        tests::note_barriers(&*_info);
    }

    "vkQueueSubmit2" => submit(_: Pointer, _: u32, _: Pointer, _: u64) -> vk::Result { SUCCESS }
    "vkWaitSemaphores" => wait(_: Pointer, _: Pointer, _: u64) -> vk::Result { SUCCESS }
    "vkGetSemaphoreCounterValue" => reached(_: Pointer, _: u64, value: *mut u64) -> vk::Result {
        value.write(u64::MAX);
        SUCCESS
    }
}

fn unique(bytes: u64) -> u64 {
    NEXT.fetch_add(bytes.next_multiple_of(ALIGNMENT) + ALIGNMENT, Ordering::Relaxed)
}

/// Calls `set` with each structure that is chained to `first`, and its type.
///
/// # Safety
///
/// The chain must be one of Vulkan's output structures.
unsafe fn chained(first: *mut c_void, mut set: impl FnMut(vk::StructureType, *mut c_void)) {
    let mut next: *mut vk::BaseOutStructure<'_> = first.cast();
    while !next.is_null() {
        // SAFETY: per this function's contract.
        unsafe {
            set((*next).s_type, next.cast());
            next = (*next).p_next;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        /// The memory barriers that this thread recorded: stages and accesses before and after.
        static BARRIERS: RefCell<Vec<Barrier>> = const { RefCell::new(Vec::new()) };
    }

    pub type Barrier = (vk::PipelineStageFlags2, vk::AccessFlags2, vk::PipelineStageFlags2, vk::AccessFlags2);

    pub fn note_barriers(info: &vk::DependencyInfo<'_>) {
        for i in 0..info.memory_barrier_count as usize {
            // SAFETY: Vulkan passes as many barriers as it says.
            let b = unsafe { &*info.p_memory_barriers.add(i) };
            let barrier = (b.src_stage_mask, b.src_access_mask, b.dst_stage_mask, b.dst_access_mask);
            BARRIERS.with_borrow_mut(|all| all.push(barrier));
        }
    }

    /// The barriers since the last call.
    pub fn take_barriers() -> Vec<Barrier> {
        BARRIERS.take()
    }
}
