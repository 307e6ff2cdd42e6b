//! Chooses the memory type of a heap for a buffer: by the type's properties, never by its place in the driver's list.
//!
//! [`super::placement`] chooses the heap; a heap has several types, which differ in how the host reaches them. Each
//! driver lists types in its own order, so this table states one; the driver's index decides only between types with
//! equal properties:
//!
//! | memory | needs | prefers, one after the other |
//! |---|---|---|
//! | device, where all memory is one | - | the GPU's own heap; mapped, so that weights are read from the disk right into it; write-combined |
//! | device, elsewhere | the GPU's own heap | not mapped, since that window may be small, and others want it; write-combined |
//! | upload | mapped | the host's heap; write-combined: the host never reads it, and the GPU need not snoop the CPU's caches |
//! | readback | mapped | cached: the host reads other memory word by word; the host's heap |
//! | shared | mapped | as upload: the other device reaches the host's heap, and not a window of the GPU's own |
//!
//! This module refuses types with properties that it does not know: device-coherent types are uncached on the GPU and
//! slow; protected and lazily allocated types need features that are off.

use ash::vk::MemoryPropertyFlags as Flags;

use super::info::{DeviceKind, HeapInfo};
use super::placement::MemoryKind;

/// Properties of memory that the host writes and reads without flushing.
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

    /// Whether the host writes and reads the memory without flushing.
    pub fn is_mapped(self) -> bool {
        self.has(HOST)
    }
}

/// The memory of a device as its driver lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryTable {
    /// Size in bytes, and whether the heap is device-local.
    pub heaps: Vec<(u64, bool)>,
    pub types: Vec<MemoryType>,
}

impl MemoryTable {
    /// The heaps and their properties by the known memory types; all bytes count as free.
    pub fn heap_infos(&self) -> Vec<HeapInfo> {
        let info = |(heap, &(size_bytes, device_local)): (usize, &(u64, bool))| {
            let types = || self.types.iter().filter(move |t| t.heap == heap && t.is_known());
            HeapInfo {
                usable: types().next().is_some(),
                host_visible: types().any(|t| t.is_mapped()),
                device_local,
                size_bytes,
                free_bytes: size_bytes,
            }
        };
        self.heaps.iter().enumerate().map(info).collect()
    }

    /// Indices of the memory types that suit `kind`, best first, restricted to `heap` if it is given. `allowed` has a
    /// bit for each type that the buffer may use.
    pub fn suitable(
        &self,
        device: DeviceKind,
        kind: MemoryKind,
        heap: Option<usize>,
        allowed: u32,
    ) -> Vec<u32> {
        let unified = device.is_unified();
        // Smaller is better; `None` does not suit.
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
