//! Memory that a device outside Vulkan reads and writes, too: a file descriptor stands for it.
//!
//! On a GPU that is a dma-buf, which any driver of Linux imports. Software Vulkan may have none. It has descriptors of its
//! own, which are files in memory: what the tests share is shared through those.
//!
//! An exclusive buffer belongs to one queue family at a time, and a device outside is a family, too. So commands release
//! what the other device is to read (`Recorder::release`), and acquire what it wrote (`Recorder::acquire`). What is only
//! to be overwritten needs neither, since nothing of it is kept.

use std::ffi::CStr;

use ash::{ext, khr, vk};

/// How buffers are used wherever they are made.
pub(super) const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::INDIRECT_BUFFER.as_raw()
        | vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS.as_raw(),
);

/// What a device's descriptors are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handles {
    DmaBuf,
    /// Files in memory.
    Opaque,
}

impl Handles {
    /// What a device with the extensions that `has` says exports.
    pub fn of(
        instance: &ash::Instance,
        raw: vk::PhysicalDevice,
        kind: vk::PhysicalDeviceType,
        has: &dyn Fn(&CStr) -> bool,
    ) -> Option<Handles> {
        let is_software = kind == vk::PhysicalDeviceType::CPU;
        let all = [Some(Handles::DmaBuf), is_software.then_some(Handles::Opaque)];
        // Mesa's lavapipe has the extension of dma-bufs also where Linux has no /dev/udmabuf, which it makes them with.
        all.into_iter().flatten().find(|handles| {
            let info =
                vk::PhysicalDeviceExternalBufferInfo::default().usage(USAGE).handle_type(handles.flags());
            let mut properties = vk::ExternalBufferProperties::default();
            handles.extensions().iter().all(|name| has(name)) && {
                // SAFETY: the physical device is of this instance, and has the extension of the handle.
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

    /// The queue family of what is outside.
    pub fn family(self) -> u32 {
        match self {
            Handles::DmaBuf => vk::QUEUE_FAMILY_FOREIGN_EXT,
            Handles::Opaque => vk::QUEUE_FAMILY_EXTERNAL,
        }
    }
}
