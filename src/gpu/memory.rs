//! Device memory: heaps, arenas, buffers.
//!
//! An [`Arena`] takes memory in chunks and hands out sub-ranges; whoever owns the arena decides when
//! allocation ends, by dropping it. Buffers are addressed by 64-bit device addresses, not descriptors:
//! a weight may be larger than `maxStorageBufferRange` (128 MiB on lavapipe), and 62 layers need no
//! descriptor sets. A buffer larger than one allocation may be is refused; matrices are cut into row shards
//! before they get here.
//!
//! Invariants: nothing is ever moved, padded to fit, or freed behind a buffer's back; a chunk lives as long
//! as the last buffer in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ash::vk;

use super::GpuError;
use super::device::{Device, DeviceKind, HeapInfo};

/// Chunks are at least this large, so that small buffers share one allocation (drivers allow some 4096).
const CHUNK_BYTES: u64 = 32 << 20;
/// Sub-allocations start at multiples of this: cache lines, and every `vec4`-aligned shader access.
const ALIGNMENT: u64 = 256;

/// Which memory a buffer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Read and written by shaders; the host reaches it through copies.
    Device,
    /// Written by the host, read by the device.
    Upload,
    /// Written by the device, read by the host.
    Readback,
}

/// What the bytes are for: the rows of the placement table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Weights,
    KvCache,
    Activations,
    Staging,
}

impl Class {
    pub const fn name(self) -> &'static str {
        match self {
            Class::Weights => "weights",
            Class::KvCache => "KV cache",
            Class::Activations => "activations",
            Class::Staging => "staging",
        }
    }
}

/// Bytes of one class in one heap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub class: Class,
    /// e.g. `heap 0 (device-local)`.
    pub heap: String,
    pub buffers: usize,
    /// What the buffers take.
    pub bytes: u64,
    /// What was allocated for them: small buffers share chunks.
    pub allocated: u64,
}

pub(super) struct Heaps {
    properties: vk::PhysicalDeviceMemoryProperties,
    /// Bytes this process has allocated per heap, for drivers without a budget extension.
    allocated: [AtomicU64; vk::MAX_MEMORY_HEAPS],
    /// `vkAllocateMemory` calls so far.
    allocations: AtomicU64,
}

impl Heaps {
    pub fn new(instance: &ash::Instance, physical: vk::PhysicalDevice) -> Heaps {
        Heaps {
            // SAFETY: the physical device is of this instance.
            properties: unsafe { instance.get_physical_device_memory_properties(physical) },
            allocated: Default::default(),
            allocations: AtomicU64::new(0),
        }
    }
}

/// The heaps of a device with what is free in them now.
pub(super) fn heap_infos(
    instance: &ash::Instance,
    physical: vk::PhysicalDevice,
    has_budget: bool,
) -> Vec<HeapInfo> {
    // SAFETY: the physical device is of this instance.
    let has_heaps = unsafe { instance.get_physical_device_memory_properties(physical) }.memory_heap_count > 0;
    // RADV's null device (RADV_FORCE_FAMILY without a GPU) has no heaps, and crashes when asked for their budget.
    let has_budget = has_budget && has_heaps;
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceMemoryProperties2::default();
    if has_budget {
        properties = properties.push_next(&mut budget);
    }
    // SAFETY: the physical device is of this instance; the budget structure is chained only where supported.
    unsafe { instance.get_physical_device_memory_properties2(physical, &mut properties) };
    let heaps = properties.memory_properties;
    heaps
        .memory_heaps_as_slice()
        .iter()
        .enumerate()
        .map(|(i, heap)| HeapInfo {
            device_local: heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
            size_bytes: heap.size,
            free_bytes: if has_budget {
                budget.heap_budget[i].min(heap.size).saturating_sub(budget.heap_usage[i])
            } else {
                heap.size
            },
        })
        .collect()
}

impl Device {
    /// `vkAllocateMemory` calls since the device was opened: constant once a model is loaded.
    pub fn allocations(&self) -> u64 {
        self.heaps.allocations.load(Ordering::Relaxed)
    }

    fn free_bytes(&self, heap: usize) -> (u64, u64) {
        let info = &heap_infos(&self.instance.raw, self.physical, self.memory_budget)[heap];
        let free = if self.memory_budget {
            info.free_bytes
        } else {
            info.size_bytes.saturating_sub(self.heaps.allocated[heap].load(Ordering::Relaxed))
        };
        (free, info.size_bytes)
    }

    /// Bytes free for [`MemoryKind::Device`] buffers, and in all, over the heaps that such buffers may lie in.
    pub fn device_bytes(&self) -> (u64, u64) {
        let mut heaps: Vec<usize> =
            self.memory_types(MemoryKind::Device, u32::MAX).into_iter().map(|t| self.heap_of(t)).collect();
        heaps.sort();
        heaps.dedup();
        heaps
            .into_iter()
            .map(|heap| self.free_bytes(heap))
            .fold((0, 0), |(f, t), (free, total)| (f + free, t + total))
    }

    fn heap_of(&self, memory_type: u32) -> usize {
        self.heaps.properties.memory_types[memory_type as usize].heap_index as usize
    }

    fn heap_name(&self, heap: usize) -> String {
        let local =
            self.heaps.properties.memory_heaps[heap].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
        format!("heap {heap} ({})", if local { "device-local" } else { "host" })
    }

    /// Memory types that suit `kind`, best first.
    fn memory_types(&self, kind: MemoryKind, allowed: u32) -> Vec<u32> {
        use vk::MemoryPropertyFlags as F;
        let host = F::HOST_VISIBLE | F::HOST_COHERENT;
        // An integrated GPU reaches all of its memory at one speed: GTT is as good as the carve-out. On a
        // discrete one, weights in host memory would crawl over PCIe: a silent substitute, so refused.
        let shared = matches!(self.info().kind, DeviceKind::Integrated | DeviceKind::Cpu);
        // Lower is better; None does not suit.
        let rank = |flags: F| match kind {
            MemoryKind::Device if flags.contains(F::DEVICE_LOCAL) => {
                Some(flags.contains(F::HOST_VISIBLE) as u32)
            }
            MemoryKind::Device => shared.then_some(2),
            MemoryKind::Upload => flags.contains(host).then(|| flags.contains(F::HOST_CACHED) as u32),
            MemoryKind::Readback => flags.contains(host).then(|| !flags.contains(F::HOST_CACHED) as u32),
        };
        // Device-coherent and protected types are slow or need features that are off.
        let plain = F::DEVICE_LOCAL | F::HOST_VISIBLE | F::HOST_COHERENT | F::HOST_CACHED;
        let mut types: Vec<(u32, u32)> = (0..self.heaps.properties.memory_type_count)
            .filter(|&t| allowed & (1 << t) != 0)
            .filter_map(|t| {
                let flags = self.heaps.properties.memory_types[t as usize].property_flags;
                if !plain.contains(flags) {
                    return None;
                }
                Some((rank(flags)?, t))
            })
            .collect();
        types.sort();
        types.into_iter().map(|(_, t)| t).collect()
    }
}

/// One `VkDeviceMemory` with the one `VkBuffer` that covers it.
pub(super) struct Chunk {
    device: Arc<Device>,
    memory: vk::DeviceMemory,
    pub raw: vk::Buffer,
    address: u64,
    size: u64,
    /// What the allocation takes from its heap.
    allocated: u64,
    heap: usize,
    /// Persistent mapping of host-visible chunks, null otherwise.
    mapped: *mut u8,
}

// SAFETY: the mapping is shared memory reached only through Buffer::write and Buffer::read; callers order
// host and device accesses through the timeline, and two writers of one range are excluded by `&mut`
// ownership of the model or test that holds the buffer.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(device: &Arc<Device>, kind: MemoryKind, size: u64, name: &str) -> Result<Chunk, GpuError> {
        let limit = device.info().max_allocation_bytes;
        if size > limit {
            return Err(GpuError::TooLarge { name: name.to_string(), asked: size, limit });
        }
        let info = vk::BufferCreateInfo::default().size(size).usage(
            vk::BufferUsageFlags::STORAGE_BUFFER
                | vk::BufferUsageFlags::TRANSFER_SRC
                | vk::BufferUsageFlags::TRANSFER_DST
                | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS,
        );
        // SAFETY: the device is alive; the handle is destroyed below or in Drop.
        let raw = unsafe { device.raw.create_buffer(&info, None) }.map_err(GpuError::of("vkCreateBuffer"))?;
        // SAFETY: the buffer was just made.
        let needs = unsafe { device.raw.get_buffer_memory_requirements(raw) };
        let (memory, heap) = match allocate(device, kind, &needs, name) {
            Ok(memory) => memory,
            Err(e) => {
                // SAFETY: nothing uses the buffer yet.
                unsafe { device.raw.destroy_buffer(raw, None) };
                return Err(e);
            }
        };
        let mut chunk = Chunk {
            device: device.clone(),
            memory,
            raw,
            address: 0,
            size,
            allocated: needs.size,
            heap,
            mapped: std::ptr::null_mut(),
        };
        // SAFETY: buffer and memory are fresh, of this device, and sized for each other; host-visible memory is
        // mapped once and stays so.
        unsafe {
            device.raw.bind_buffer_memory(raw, memory, 0).map_err(GpuError::of("vkBindBufferMemory"))?;
            if kind != MemoryKind::Device {
                let pointer = device
                    .raw
                    .map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty())
                    .map_err(GpuError::of("vkMapMemory"))?;
                chunk.mapped = pointer.cast();
            }
            chunk.address =
                device.raw.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(raw));
        }
        device.name(raw, name);
        Ok(chunk)
    }
}

/// Allocates from the first suitable memory type whose heap has room by the driver's own budget: drivers
/// over-commit, and a submit would then fail long after "loaded" was printed.
fn allocate(
    device: &Device,
    kind: MemoryKind,
    needs: &vk::MemoryRequirements,
    name: &str,
) -> Result<(vk::DeviceMemory, usize), GpuError> {
    let mut full: Option<GpuError> = None;
    for memory_type in device.memory_types(kind, needs.memory_type_bits) {
        let heap = device.heap_of(memory_type);
        let (free, total) = device.free_bytes(heap);
        let refusal = || GpuError::OutOfMemory {
            name: name.to_string(),
            heap: device.heap_name(heap),
            asked: needs.size,
            free,
            total,
        };
        if needs.size > free {
            full.get_or_insert_with(refusal);
            continue;
        }
        let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(needs.size)
            .memory_type_index(memory_type)
            .push_next(&mut flags);
        // SAFETY: size and type come from the device's own answers.
        match unsafe { device.raw.allocate_memory(&info, None) } {
            Ok(memory) => {
                device.heaps.allocated[heap].fetch_add(needs.size, Ordering::Relaxed);
                device.heaps.allocations.fetch_add(1, Ordering::Relaxed);
                return Ok((memory, heap));
            }
            Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY) => {
                full.get_or_insert_with(refusal);
            }
            Err(e) => return Err(GpuError::of("vkAllocateMemory")(e)),
        }
    }
    Err(full.unwrap_or_else(|| GpuError::NoDevice(format!("{name}: no memory type suits {kind:?} buffers"))))
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if self.device.is_lost() {
            // It may be in use for ever: this, and so the device, is left to the end of the process.
            std::mem::forget(self.device.clone());
            return;
        }
        self.device.heaps.allocated[self.heap].fetch_sub(self.allocated, Ordering::Relaxed);
        // SAFETY: the last buffer and the last recorder that used the chunk are gone.
        unsafe {
            self.device.raw.destroy_buffer(self.raw, None);
            self.device.raw.free_memory(self.memory, None);
        }
    }
}

/// A range of device memory. Cloning shares the range.
#[derive(Clone)]
pub struct Buffer {
    pub(super) chunk: Arc<Chunk>,
    pub(super) offset: u64,
    size: u64,
}

impl Buffer {
    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where shaders find the first byte.
    pub fn address(&self) -> u64 {
        self.chunk.address + self.offset
    }

    /// The sub-range of `size` bytes from `offset`.
    pub fn slice(&self, offset: u64, size: u64) -> Buffer {
        assert!(offset.checked_add(size).is_some_and(|end| end <= self.size), "slice beyond the buffer");
        Buffer { chunk: self.chunk.clone(), offset: self.offset + offset, size }
    }

    /// Copies `data` to byte `offset`. The device must not be using the range. Upload buffers only.
    pub fn write<T: bytemuck::NoUninit>(&self, offset: u64, data: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let to = self.host_range(offset, bytes.len() as u64);
        // SAFETY: the range lies in the mapping (checked), which lives as long as the chunk.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies out what starts at byte `offset`. The device must have finished writing it. Readback buffers only.
    pub fn read<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, offset: u64, into: &mut [T]) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
        let from = self.host_range(offset, bytes.len() as u64);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    fn host_range(&self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(!self.chunk.mapped.is_null(), "the buffer is not host-visible");
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.size), "access beyond the buffer");
        // SAFETY: in bounds of the chunk's mapping by the check above.
        unsafe { self.chunk.mapped.add((self.offset + offset) as usize) }
    }
}

/// Hands out buffers; when it is dropped, allocation is over, and the buffers stay.
pub struct Arena {
    device: Arc<Device>,
    open: Vec<OpenChunk>,
    placements: Vec<Placement>,
}

/// The chunk that small buffers of one kind and class are still cut from.
struct OpenChunk {
    kind: MemoryKind,
    class: Class,
    chunk: Arc<Chunk>,
    used: u64,
}

impl Arena {
    pub fn new(device: &Arc<Device>) -> Arena {
        Arena { device: device.clone(), open: Vec::new(), placements: Vec::new() }
    }

    /// A buffer of `size` bytes. Its content is undefined. `name` is for errors and debuggers.
    pub fn alloc(
        &mut self,
        kind: MemoryKind,
        class: Class,
        size: u64,
        name: &str,
    ) -> Result<Buffer, GpuError> {
        assert!(size > 0, "{name}: empty buffer");
        let rounded = size.next_multiple_of(ALIGNMENT);
        if rounded > CHUNK_BYTES / 2 {
            let chunk = Arc::new(Chunk::new(&self.device, kind, rounded, name)?);
            self.note(class, &chunk, rounded, chunk.allocated);
            return Ok(Buffer { chunk, offset: 0, size });
        }
        let fits =
            |o: &&mut OpenChunk| o.kind == kind && o.class == class && o.used + rounded <= o.chunk.size;
        let mut new_chunk = 0;
        let open = match self.open.iter_mut().find(fits) {
            Some(open) => open,
            None => {
                let shared = format!("{} ({kind:?}, shared)", class.name());
                let chunk = Arc::new(Chunk::new(&self.device, kind, CHUNK_BYTES, &shared)?);
                new_chunk = chunk.allocated;
                self.open.retain(|o| o.kind != kind || o.class != class);
                self.open.push(OpenChunk { kind, class, chunk, used: 0 });
                self.open.last_mut().expect("just pushed")
            }
        };
        let buffer = Buffer { chunk: open.chunk.clone(), offset: open.used, size };
        open.used += rounded;
        let chunk = buffer.chunk.clone();
        self.note(class, &chunk, rounded, new_chunk);
        Ok(buffer)
    }

    /// Where every byte lies: one row per class and heap.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    fn note(&mut self, class: Class, chunk: &Chunk, bytes: u64, allocated: u64) {
        let heap = self.device.heap_name(chunk.heap);
        let row = match self.placements.iter().position(|p| p.class == class && p.heap == heap) {
            Some(row) => row,
            None => {
                self.placements.push(Placement { class, heap, buffers: 0, bytes: 0, allocated: 0 });
                self.placements.sort_by(|a, b| (a.class, &a.heap).cmp(&(b.class, &b.heap)));
                return self.note(class, chunk, bytes, allocated);
            }
        };
        let row = &mut self.placements[row];
        row.buffers += 1;
        row.bytes += bytes;
        row.allocated += allocated;
    }
}
