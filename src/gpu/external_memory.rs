//! Memory that is shared with a device outside Vulkan (the NPU), through a file descriptor.
//!
//! A GPU exports a dma-buf, which other Linux drivers can import. Software Vulkan may not support dma-bufs; it exports
//! opaque file descriptors of files in memory, which the tests use.
//!
//! A buffer with exclusive sharing belongs to one queue family at a time, and the device outside Vulkan counts as a
//! queue family. Commands must release the buffers that the other device reads (`Recorder::release`), and acquire the
//! buffers that it wrote (`Recorder::acquire`). A buffer that is overwritten completely needs neither.

use std::ffi::CStr;

use ash::{ext, khr, vk};

/// The usage flags of all buffers.
pub(super) const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::INDIRECT_BUFFER.as_raw()
        | vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS.as_raw(),
);

/// The kind of file descriptors that a device exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handles {
    DmaBuf,
    /// A file in memory (software Vulkan only).
    Opaque,
}

impl Handles {
    /// The kind that a device exports. `has` says whether the device has an extension. `None`: it exports no memory.
    pub fn of(
        instance: &ash::Instance,
        raw: vk::PhysicalDevice,
        kind: vk::PhysicalDeviceType,
        has: &dyn Fn(&CStr) -> bool,
    ) -> Option<Handles> {
        let is_software = kind == vk::PhysicalDeviceType::CPU;
        let all = [Some(Handles::DmaBuf), is_software.then_some(Handles::Opaque)];
        // Mesa's lavapipe reports the dma-buf extension even if Linux lacks /dev/udmabuf, with which lavapipe creates
        // dma-bufs. So the buffer's properties decide, not the extension alone.
        all.into_iter().flatten().find(|handles| {
            let info =
                vk::PhysicalDeviceExternalBufferInfo::default().usage(USAGE).handle_type(handles.flags());
            let mut properties = vk::ExternalBufferProperties::default();
            handles.extensions().iter().all(|name| has(name)) && {
                // SAFETY: the physical device belongs to this instance, and has the extensions of the handle type.
                unsafe {
                    instance.get_physical_device_external_buffer_properties(raw, &info, &mut properties)
                };
                let features = properties.external_memory_properties.external_memory_features;
                features.contains(vk::ExternalMemoryFeatureFlags::EXPORTABLE)
            }
        })
    }

    pub fn extensions(self) -> &'static [&'static CStr] {
        match self {
            Handles::DmaBuf => &[
                khr::external_memory_fd::NAME,
                ext::external_memory_dma_buf::NAME,
                ext::queue_family_foreign::NAME,
            ],
            Handles::Opaque => &[khr::external_memory_fd::NAME],
        }
    }

    pub fn flags(self) -> vk::ExternalMemoryHandleTypeFlags {
        match self {
            Handles::DmaBuf => vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT,
            Handles::Opaque => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
        }
    }

    /// The queue family that represents the device outside Vulkan.
    pub fn family(self) -> u32 {
        match self {
            Handles::DmaBuf => vk::QUEUE_FAMILY_FOREIGN_EXT,
            Handles::Opaque => vk::QUEUE_FAMILY_EXTERNAL,
        }
    }
}
