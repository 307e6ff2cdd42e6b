//! Chooses the memory type for a buffer by the type's properties, not by its position in the driver's list.
//!
//! [`super::placement`] chooses the heap. A heap has several memory types, which differ in how the host accesses them.
//! This table gives the order of preference. The driver's index decides only between types with equal properties:
//!
//! | memory | requires | prefers, most important first |
//! |---|---|---|
//! | device, unified memory | - | device-local; mapped, to read weights from disk directly into it; write-combined |
//! | device, discrete GPU | device-local | not mapped: the mappable part of VRAM may be small; write-combined |
//! | upload | mapped | host heap; write-combined: the host never reads it, and the GPU need not snoop CPU caches |
//! | readback | mapped | cached, because the host reads uncached memory word by word; host heap |
//! | shared | mapped | as upload: the other device can access the host heap, but not VRAM |
//!
//! Types with unknown properties are not used: device-coherent types are uncached on the GPU and slow; protected and
//! lazily allocated types need features that are not enabled.

use ash::vk::MemoryPropertyFlags as Flags;

use super::info::{DeviceKind, HeapInfo};
use super::placement::MemoryKind;

/// Properties of memory that the host can access without flushing.
const HOST: Flags = Flags::from_raw(Flags::HOST_VISIBLE.as_raw() | Flags::HOST_COHERENT.as_raw());
const KNOWN: Flags =
    Flags::from_raw(Flags::DEVICE_LOCAL.as_raw() | HOST.as_raw() | Flags::HOST_CACHED.as_raw());

/// A memory type as the driver lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryType {
    /// The driver's index of the type's heap.
    pub heap: usize,
    /// The type's `VkMemoryPropertyFlags`.
    pub flags: u32,
}

impl MemoryType {
    fn has(self, flags: Flags) -> bool {
        Flags::from_raw(self.flags).contains(flags)
    }

    fn is_known(self) -> bool {
        KNOWN.contains(Flags::from_raw(self.flags))
    }

    /// Whether the host can access the memory without flushing. Such memory is always mapped.
    pub fn is_mapped(self) -> bool {
        self.has(HOST)
    }
}

/// The memory of a device as its driver lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryTable {
    /// Each heap's size in bytes, and whether it is device-local.
    pub heaps: Vec<(u64, bool)>,
    pub types: Vec<MemoryType>,
}

impl MemoryTable {
    /// The heaps, with the properties of their known memory types. All bytes count as free.
    pub fn heap_infos(&self) -> Vec<HeapInfo> {
        let info = |(heap, &(size_bytes, device_local)): (usize, &(u64, bool))| {
            let types = || self.types.iter().filter(move |t| t.heap == heap && t.is_known());
            HeapInfo {
                usable: types().next().is_some(),
                host_visible: types().any(|t| t.is_mapped()),
                device_local,
                size_bytes,
                free_bytes: size_bytes,
                read: None,
            }
        };
        self.heaps.iter().enumerate().map(info).collect()
    }

    /// Indices of the memory types for buffers of `kind`, best first; only types of `heap` if it is given. `allowed`
    /// has a bit for each type that the buffer may use.
    pub fn suitable(
        &self,
        device: DeviceKind,
        kind: MemoryKind,
        heap: Option<usize>,
        allowed: u32,
    ) -> Vec<u32> {
        let unified = device.is_unified();
        // A smaller rank is better. `None`: the type cannot be used.
        let rank = |t: MemoryType| -> Option<[bool; 3]> {
            let (local, mapped, cached) =
                (t.has(Flags::DEVICE_LOCAL), t.is_mapped(), t.has(Flags::HOST_CACHED));
            match kind {
                MemoryKind::Device if unified => Some([!local, !mapped, cached]),
                MemoryKind::Device => local.then_some([mapped, cached, false]),
                MemoryKind::Upload | MemoryKind::Shared => mapped.then_some([local, cached, false]),
                MemoryKind::Readback => mapped.then_some([!cached, local, false]),
            }
        };
        let mut ranked: Vec<([bool; 3], u32)> = (0..)
            .zip(&self.types)
            .filter(|(i, t)| {
                allowed & (1 << i) != 0 && t.is_known() && heap.is_none_or(|heap| heap == t.heap)
            })
            .filter_map(|(i, t)| Some((rank(*t)?, i)))
            .collect();
        ranked.sort();
        ranked.into_iter().map(|(_, i)| i).collect()
    }
}
