//! Lists the physical devices of the Vulkan loader, and reads their properties.

use ash::{ext, khr, vk};

use super::GpuError;
use super::cache::Cache;
use super::caps::Caps;
use super::external_memory::Handles;
use super::heaps::heap_infos;
use super::info::{DeviceInfo, DeviceKind, QueueKind};
use super::instance::Instance;
use super::read_speeds;

/// The Vulkan version that introduced `VK_KHR_cooperative_matrix`.
const COOPERATIVE_MATRIX_SINCE: u32 = vk::make_api_version(0, 1, 3, 255);

/// A queue family that supports compute.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueFamily {
    pub kind: QueueKind,
    pub index: u32,
    /// Number of valid bits of a timestamp; 0 if the queues do not support timestamps.
    pub timestamp_bits: u32,
}

/// All Vulkan devices of the loader, usable or not.
pub fn list_devices() -> Result<Vec<DeviceInfo>, GpuError> {
    let instance = Instance::new(false)?;
    Ok(enumerate(&instance)?.into_iter().map(|c| c.info).collect())
}

pub(super) struct Candidate {
    pub raw: vk::PhysicalDevice,
    /// The first family of each kind. A family without graphics comes first, because the desktop does not use its
    /// queue.
    pub queues: Vec<QueueFamily>,
    pub memory_budget: bool,
    /// How memory is shared with a device outside Vulkan. `None`: it cannot be shared.
    pub handles: Option<Handles>,
    /// Whether a rehearsal may give buffers guard pages ([`super::guard`]).
    pub imports_host_memory: bool,
    /// Files that are kept between runs.
    pub cache: Cache,
    pub timestamp_period_ns: f32,
    pub info: DeviceInfo,
}

pub(super) fn enumerate(instance: &Instance) -> Result<Vec<Candidate>, GpuError> {
    // SAFETY: the instance is alive.
    let raws = unsafe { instance.raw.enumerate_physical_devices() }
        .map_err(GpuError::of("vkEnumeratePhysicalDevices"))?;
    Ok(raws.into_iter().enumerate().map(|(index, raw)| inspect(instance, index, raw)).collect())
}

fn inspect(instance: &Instance, index: usize, raw: vk::PhysicalDevice) -> Candidate {
    let vk_instance = &instance.raw;
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut limits3 = vk::PhysicalDeviceMaintenance3Properties::default();
    let mut limits4 = vk::PhysicalDeviceMaintenance4Properties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut driver)
        .push_next(&mut limits3)
        .push_next(&mut limits4);
    // SAFETY: `raw` comes from this instance; the chains are local and well formed. Devices with a Vulkan version below
    // 1.3 ignore structures that they do not know.
    let (families, extensions) = unsafe {
        vk_instance.get_physical_device_properties2(raw, &mut properties);
        (
            vk_instance.get_physical_device_queue_family_properties(raw),
            vk_instance.enumerate_device_extension_properties(raw).unwrap_or_default(),
        )
    };
    let properties = properties.properties;
    let has = |name: &std::ffi::CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
    let memory_budget = has(ext::memory_budget::NAME);
    let pci = has(ext::pci_bus_info::NAME).then(|| {
        let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut pci);
        // SAFETY: as above; the device has the extension of the chained structure.
        unsafe { vk_instance.get_physical_device_properties2(raw, &mut properties) };
        let (domain, bus, slot, function) = (pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function);
        format!("{domain:04x}:{bus:02x}:{slot:02x}.{function}")
    });
    let handles = Handles::of(vk_instance, raw, properties.device_type, &has);
    let cache = Cache::new(format!(
        "{:04x}-{:04x}-{:08x}-{}",
        properties.vendor_id,
        properties.device_id,
        properties.driver_version,
        properties.pipeline_cache_uuid.iter().map(|b| format!("{b:02x}")).collect::<String>()
    ));
    let mut heaps = heap_infos(vk_instance, raw, memory_budget);
    let reads = read_speeds::stored(&cache, &heaps);
    heaps.iter_mut().zip(reads).for_each(|(heap, read)| heap.read = read);
    let mut queues: Vec<QueueFamily> = Vec::new();
    for (index, family) in families.iter().enumerate() {
        let has = |flags| family.queue_flags.contains(flags);
        let kind = if has(vk::QueueFlags::GRAPHICS) { QueueKind::Graphics } else { QueueKind::Compute };
        if has(vk::QueueFlags::COMPUTE) && !queues.iter().any(|q| q.kind == kind) {
            queues.push(QueueFamily {
                kind,
                index: index as u32,
                timestamp_bits: family.timestamp_valid_bits,
            });
        }
    }
    queues.sort_by_key(|q| q.kind == QueueKind::Graphics);

    // A validation layer reports extensions that are newer than the layer as errors.
    let may_have = |name: &std::ffi::CStr| {
        let since = if name == khr::cooperative_matrix::NAME { COOPERATIVE_MATRIX_SINCE } else { 0 };
        has(name) && instance.layer_version >= since
    };
    let caps = Caps::read(&instance.entry, vk_instance, raw, &may_have);
    let mut missing = caps.missing_to_run();
    missing.extend(queues.is_empty().then(|| "a compute queue".to_string()));
    missing.extend(heaps.iter().all(|h| h.size_bytes == 0).then(|| "a memory heap".to_string()));

    let text = |s: Result<&std::ffi::CStr, _>| {
        s.map_or(String::new(), |s: &std::ffi::CStr| s.to_string_lossy().into_owned())
    };
    Candidate {
        raw,
        memory_budget,
        handles,
        imports_host_memory: properties.device_type == vk::PhysicalDeviceType::CPU
            && has(ext::external_memory_host::NAME),
        cache,
        timestamp_period_ns: properties.limits.timestamp_period,
        info: DeviceInfo {
            index,
            name: text(properties.device_name_as_c_str()),
            kind: match properties.device_type {
                vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::Discrete,
                vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::Integrated,
                vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Virtual,
                vk::PhysicalDeviceType::CPU => DeviceKind::Cpu,
                _ => DeviceKind::Other,
            },
            driver: format!(
                "{} {}",
                text(driver.driver_name_as_c_str()),
                text(driver.driver_info_as_c_str())
            ),
            vendor_id: properties.vendor_id,
            queues: queues.iter().map(|queue| queue.kind).collect(),
            heaps,
            caps,
            max_allocation_bytes: limits3.max_memory_allocation_size.min(limits4.max_buffer_size),
            max_storage_buffer_bytes: properties.limits.max_storage_buffer_range.into(),
            pci,
            missing,
        },
        queues,
    }
}
