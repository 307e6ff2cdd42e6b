//! The heaps and memory types of a device, and the bytes that this process has allocated in each heap.

use std::sync::atomic::AtomicU64;

use ash::vk;

use super::info::HeapInfo;
use super::memory_types::{MemoryTable, MemoryType};

/// The memory of an open device.
pub(super) struct Heaps {
    pub table: MemoryTable,
    /// Bytes that this process has allocated in each heap, for drivers without a budget extension.
    pub allocated: [AtomicU64; vk::MAX_MEMORY_HEAPS],
    /// Number of `vkAllocateMemory` calls.
    pub allocations: AtomicU64,
}

impl Heaps {
    pub fn new(instance: &ash::Instance, physical: vk::PhysicalDevice) -> Heaps {
        // SAFETY: the physical device belongs to this instance.
        let properties = unsafe { instance.get_physical_device_memory_properties(physical) };
        Heaps { table: table(&properties), allocated: Default::default(), allocations: AtomicU64::new(0) }
    }

    pub fn memory_type(&self, index: u32) -> MemoryType {
        self.table.types[index as usize]
    }
}

fn table(properties: &vk::PhysicalDeviceMemoryProperties) -> MemoryTable {
    let local = |heap: &vk::MemoryHeap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let heaps = properties.memory_heaps_as_slice().iter();
    let types = properties.memory_types_as_slice().iter();
    MemoryTable {
        heaps: heaps.map(|heap| (heap.size, local(heap))).collect(),
        types: types
            .map(|t| MemoryType { heap: t.heap_index as usize, flags: t.property_flags.as_raw() })
            .collect(),
    }
}

/// The heaps of a device, with the bytes that are free in them now.
pub(super) fn heap_infos(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    has_budget: bool,
) -> Vec<HeapInfo> {
    // SAFETY: the physical device belongs to this instance.
    let has_heaps = unsafe { instance.get_physical_device_memory_properties(physical) }.memory_heap_count > 0;
    // RADV's null device (RADV_FORCE_FAMILY without a GPU) has no heaps, and crashes if its budget is queried.
    let has_budget = has_budget && has_heaps;
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceMemoryProperties2::default();
    if has_budget {
        properties = properties.push_next(&mut budget);
    }
    // SAFETY: the physical device belongs to this instance; the budget structure is chained only where supported.
    unsafe { instance.get_physical_device_memory_properties2(physical, &mut properties) };
    let mut heaps = table(&properties.memory_properties).heap_infos();
    if has_budget {
        for ((info, free), used) in heaps.iter_mut().zip(budget.heap_budget).zip(budget.heap_usage) {
            info.free_bytes = free.min(info.size_bytes).saturating_sub(used);
        }
    }
    heaps
}
