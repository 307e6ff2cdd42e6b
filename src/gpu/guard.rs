//! Host memory with a guard page, for tests: a device that is a CPU accesses it directly, so an access beyond a buffer
//! ends the process instead of reading the neighbouring memory. A GPU that is given an address out of bounds is lost.

use ash::{ext, vk};
use memmap2::{MmapMut, MmapOptions};

use super::GpuError;
use super::device::Device;

/// Accesses of shaders are aligned to this many bytes, so a buffer ends up to 15 bytes before the guard page.
const ALIGNMENT: u64 = 16;

/// The memory of a buffer, followed by a page that no one may access.
pub(super) struct GuardedMemory {
    mapping: MmapMut,
    /// Bytes before the guard page.
    pub size: u64,
    /// Offset of the buffer's first byte.
    pub start: u64,
}

impl GuardedMemory {
    pub fn new(bytes: u64) -> Result<GuardedMemory, GpuError> {
        let page = rustix::param::page_size() as u64;
        let size = bytes.next_multiple_of(page);
        let failed = |e: std::io::Error| GpuError::NoRoom(format!("{bytes} bytes with a guard page: {e}"));
        let mut mapping = MmapOptions::new().len((size + page) as usize).map_anon().map_err(failed)?;
        // SAFETY: the page is inside the mapping, and nothing refers to it.
        let result = unsafe {
            let guard = mapping.as_mut_ptr().add(size as usize);
            libc::mprotect(guard.cast(), page as usize, libc::PROT_NONE)
        };
        if result != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        Ok(GuardedMemory { mapping, size, start: (size - bytes) / ALIGNMENT * ALIGNMENT })
    }

    /// The memory's address, and the memory types that can import it.
    pub fn import(&mut self, device: &Device) -> Result<Imported, GpuError> {
        if !device.imports_host_memory {
            let name = &device.info().name;
            return Err(GpuError::NoDevice(format!("{name} cannot use memory with guard pages")));
        }
        let pointer = self.mapping.as_mut_ptr().cast();
        let functions = ext::external_memory_host::Device::new(&device.instance.raw, &device.raw);
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        // SAFETY: the device has the extension, and the memory is mapped.
        let got = unsafe {
            let get = functions.fp().get_memory_host_pointer_properties_ext;
            get(device.raw.handle(), HANDLES, pointer, &mut properties)
        };
        got.result().map_err(GpuError::of("vkGetMemoryHostPointerPropertiesEXT"))?;
        Ok(Imported { pointer, memory_types: properties.memory_type_bits })
    }
}

/// The handle type of imported memory.
pub(super) const HANDLES: vk::ExternalMemoryHandleTypeFlags =
    vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// Host memory that becomes device memory.
#[derive(Clone, Copy)]
pub(super) struct Imported {
    pub pointer: *mut std::ffi::c_void,
    pub memory_types: u32,
}
