//! Device memory: arenas and buffers.
//!
//! An [`Arena`] allocates memory in chunks and hands out sub-ranges of them as buffers. A model's arena follows a
//! [`Plan`] and allocates all chunks of the plan when it is created. An arena without a plan (staging of a load, tests)
//! allocates chunks when they are needed. Shaders use 64-bit device addresses instead of descriptors: a weight may be
//! larger than `maxStorageBufferRange` (128 MiB on lavapipe), and no descriptor sets are needed. A buffer that exceeds
//! the largest allocation is refused, so the caller must split large matrices into row shards.
//!
//! Invariants: no buffer is moved, and a chunk is freed only after the last buffer in it was dropped.

use std::collections::VecDeque;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ash::{khr, vk};

use super::GpuError;
use super::device::Device;
use super::external_memory::{Handles, USAGE};
use super::guard::{self, GuardedMemory, Imported};
use super::placement::{self, ALIGNMENT, CHUNK_BYTES, Class, MemoryKind, Placement, Plan, heap_name};

/// One `VkDeviceMemory` with the one `VkBuffer` that covers it.
pub(super) struct Chunk {
    device: Arc<Device>,
    memory: vk::DeviceMemory,
    pub raw: vk::Buffer,
    address: u64,
    size: u64,
    /// Bytes that the allocation takes from its heap.
    allocated: u64,
    heap: usize,
    pub class: Class,
    /// Whether the memory can be exported to a device outside Vulkan.
    pub(super) is_shared: bool,
    /// The persistent mapping of a host-visible chunk; null for other chunks.
    mapped: *mut u8,
    /// The memory, if it has a guard page. It must be dropped after the driver's handle of it.
    guarded: Option<GuardedMemory>,
}

// SAFETY: the mapping is accessed only through methods of Buffer. Callers order accesses of the host and the device
// with the timeline semaphore. Two writers of one range are impossible, because a writer holds `&mut` to the model or
// test that owns the buffer.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Allocates in the heap with the driver's index `heap`, or in the best heap for `kind`.
    fn new(
        device: &Arc<Device>,
        kind: MemoryKind,
        class: Class,
        heap: Option<usize>,
        size: u64,
        name: &str,
    ) -> Result<Chunk, GpuError> {
        let limit = device.info().max_allocation_bytes;
        if size > limit {
            return Err(GpuError::NoRoom(format!(
                "{name}: needs one allocation of {size} bytes, but the device allows at most {limit} bytes per allocation"
            )));
        }
        let shared = if kind == MemoryKind::Shared { Some(shared_handles(device, name)?) } else { None };
        let is_guarded = device.rehearsed().guard_pages && shared.is_none();
        let mut guarded = if is_guarded { Some(GuardedMemory::new(size)?) } else { None };
        let mut external = vk::ExternalMemoryBufferCreateInfo::default();
        let size = guarded.as_ref().map_or(size, |guarded| guarded.size);
        let mut info = vk::BufferCreateInfo::default().size(size).usage(USAGE);
        let handle_types = shared.map(Handles::flags).or(is_guarded.then_some(guard::HANDLES));
        if let Some(handle_types) = handle_types {
            external = external.handle_types(handle_types);
            info = info.push_next(&mut external);
        }
        let imported = guarded.as_mut().map(|guarded| guarded.import(device)).transpose()?;
        // SAFETY: the device is alive; the handle is destroyed below or in Drop.
        let raw = unsafe { device.raw.create_buffer(&info, None) }.map_err(GpuError::of("vkCreateBuffer"))?;
        // SAFETY: the buffer was just created.
        let needs = unsafe { device.raw.get_buffer_memory_requirements(raw) };
        let exported = shared.map(|handles| (handles, raw));
        let (memory, memory_type) = match allocate(device, kind, heap, &needs, (exported, imported), name) {
            Ok(memory) => memory,
            Err(e) => {
                // SAFETY: nothing uses the buffer yet.
                unsafe { device.raw.destroy_buffer(raw, None) };
                return Err(e);
            }
        };
        let memory_type = device.heaps.memory_type(memory_type);
        let mut chunk = Chunk {
            device: device.clone(),
            memory,
            raw,
            address: 0,
            size,
            allocated: needs.size,
            heap: memory_type.heap,
            class,
            is_shared: shared.is_some(),
            mapped: std::ptr::null_mut(),
            guarded,
        };
        // SAFETY: buffer and memory are new, belong to this device, and fit each other; host-visible memory is mapped
        // once and stays mapped.
        unsafe {
            device.raw.bind_buffer_memory(raw, memory, 0).map_err(GpuError::of("vkBindBufferMemory"))?;
            if memory_type.is_mapped() {
                let pointer = device
                    .raw
                    .map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty())
                    .map_err(GpuError::of("vkMapMemory"))?;
                chunk.mapped = pointer.cast();
            }
            chunk.address =
                device.raw.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(raw));
        }
        // Mesa's software driver does not check whether its mmap failed, and returns MAP_FAILED as an address.
        let addresses = [Some(chunk.address), memory_type.is_mapped().then_some(chunk.mapped as u64)];
        for at in addresses.into_iter().flatten() {
            if at == 0 || at.checked_add(size).is_none() {
                return Err(GpuError::NoRoom(format!(
                    "{name}: the driver had no memory for {size} bytes, but returned the invalid address {at:#x} instead \
                     of an error; this process has too little memory (`ulimit -v`, MemoryMax=)"
                )));
            }
        }
        device.name(raw, name);
        Ok(chunk)
    }

    /// The offset of the first byte that buffers may use.
    fn start(&self) -> u64 {
        self.guarded.as_ref().map_or(0, |guarded| guarded.start)
    }

    /// The buffer of `size` bytes from byte `offset` of those that buffers may use.
    fn buffer(self: &Arc<Chunk>, offset: u64, size: u64) -> Buffer {
        Buffer { chunk: self.clone(), offset: self.start() + offset, size, accessed: size }
    }
}

/// The kind of handles for shared memory. Fails if the device cannot share memory.
fn shared_handles(device: &Device, name: &str) -> Result<Handles, GpuError> {
    device.handles.ok_or_else(|| {
        GpuError::NoDevice(format!("{name}: {} cannot share memory with other devices", device.info().name))
    })
}

/// Allocates from the first suitable memory type whose heap has room in the driver's budget. Without the check, a
/// driver may over-commit, and a submit would fail long after the model was loaded. `exported` is the buffer that the
/// memory is for, if the memory is to be shared. `imported` is host memory to use.
fn allocate(
    device: &Device,
    kind: MemoryKind,
    wanted: Option<usize>,
    needs: &vk::MemoryRequirements,
    (exported, imported): (Option<(Handles, vk::Buffer)>, Option<Imported>),
    name: &str,
) -> Result<(vk::DeviceMemory, u32), GpuError> {
    let mut full: Option<GpuError> = None;
    let table = &device.heaps.table;
    let memory_types = needs.memory_type_bits & imported.map_or(!0, |imported| imported.memory_types);
    for memory_type in table.suitable(device.info().kind, kind, wanted, memory_types) {
        let heap = device.heaps.memory_type(memory_type).heap;
        let (free, total) = device.free_bytes(heap);
        let (_, local) = table.heaps[heap];
        let refusal = || {
            let (asked, heap) = (needs.size, heap_name(heap, local));
            GpuError::NoRoom(format!(
                "{name}: needs {asked} bytes in {heap}, but only {free} of {total} bytes are free; choose a smaller \
                 --quantize mode or --context, or free GPU memory"
            ))
        };
        if needs.size > free {
            full.get_or_insert_with(refusal);
            continue;
        }
        let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let (mut export, mut dedicated) =
            (vk::ExportMemoryAllocateInfo::default(), vk::MemoryDedicatedAllocateInfo::default());
        let mut info = vk::MemoryAllocateInfo::default()
            .allocation_size(needs.size)
            .memory_type_index(memory_type)
            .push_next(&mut flags);
        if let Some((handles, buffer)) = exported {
            export = export.handle_types(handles.flags());
            // Some drivers export only dedicated allocations.
            dedicated = dedicated.buffer(buffer);
            info = info.push_next(&mut export).push_next(&mut dedicated);
        }
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(guard::HANDLES);
        if let Some(imported) = imported {
            import.p_host_pointer = imported.pointer;
            info = info.push_next(&mut import);
        }
        // SAFETY: the device reported the size and the type; imported memory has that size, and outlives its import.
        match unsafe { device.raw.allocate_memory(&info, None) } {
            Ok(memory) => {
                device.heaps.allocated[heap].fetch_add(needs.size, Ordering::Relaxed);
                device.heaps.allocations.fetch_add(1, Ordering::Relaxed);
                return Ok((memory, memory_type));
            }
            Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY) => {
                full.get_or_insert_with(refusal);
            }
            Err(e) => return Err(GpuError::of("vkAllocateMemory")(e)),
        }
    }
    Err(full.unwrap_or_else(|| {
        GpuError::NoDevice(format!("{name}: the device has no memory type for {kind:?} buffers"))
    }))
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if self.device.is_lost() {
            // The lost device may still use the chunk, so both are leaked until the process ends.
            std::mem::forget((self.device.clone(), self.guarded.take()));
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

/// A range of device memory. A clone is the same range.
#[derive(Clone)]
pub struct Buffer {
    pub(super) chunk: Arc<Chunk>,
    pub(super) offset: u64,
    size: u64,
    /// The bytes that a command with this buffer counts as read or written.
    pub(super) accessed: u64,
}

impl Buffer {
    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Device address of the first byte.
    pub fn address(&self) -> u64 {
        self.chunk.address + self.offset
    }

    /// The sub-range of `size` bytes from `offset`.
    pub fn slice(&self, offset: u64, size: u64) -> Buffer {
        assert!(offset.checked_add(size).is_some_and(|end| end <= self.size), "slice beyond the buffer");
        Buffer { chunk: self.chunk.clone(), offset: self.offset + offset, size, accessed: size }
    }

    /// The same range, of which a command accesses only `bytes` bytes. Only [`Counts`](super::Counts) use this number;
    /// barriers order the whole range.
    pub fn accessing(&self, bytes: u64) -> Buffer {
        Buffer { accessed: bytes.min(self.size), ..self.clone() }
    }

    /// Copies `data` to byte `offset`. The device must not be using the range. Panics if the memory is not mapped.
    pub fn write<T: bytemuck::NoUninit>(&self, offset: u64, data: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let to = self.host_range(offset, bytes.len() as u64);
        // SAFETY: the range is inside the mapping (checked), which lives as long as the chunk.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies the bytes from byte `offset` to `into`. The device must have finished writing them. Panics if the memory
    /// is not mapped. Memory other than readback memory is slow to read.
    pub fn read<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, offset: u64, into: &mut [T]) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
        let from = self.host_range(offset, bytes.len() as u64);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Exports the buffer's memory as a file descriptor, which keeps the memory alive. Panics if the memory is not
    /// [`MemoryKind::Shared`].
    pub fn export(&self) -> Result<OwnedFd, GpuError> {
        let Chunk { device, memory, is_shared, .. } = &*self.chunk;
        let (Some(handles), true, 0) = (device.handles, *is_shared, self.offset) else {
            panic!("exporting a buffer whose memory is not shared");
        };
        let functions = khr::external_memory_fd::Device::new(&device.instance.raw, &device.raw);
        let info = vk::MemoryGetFdInfoKHR::default().memory(*memory).handle_type(handles.flags());
        // SAFETY: the device has the extension, and the memory was allocated for handles of this type.
        let descriptor =
            unsafe { functions.get_memory_fd(&info) }.map_err(GpuError::of("vkGetMemoryFdKHR"))?;
        // SAFETY: the driver has just created the descriptor, and the caller owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The host's mapping of the buffer. The host must only write it: the memory may be write-combined, and reading it
    /// is slow. `None`: the memory is not mapped. The device must not be using the buffer.
    pub(super) fn mapped(&mut self) -> Option<&mut [u8]> {
        if !self.is_mapped() {
            return None;
        }
        let start = self.host_range(0, self.size);
        // SAFETY: the range is inside the mapping (checked), which lives as long as the chunk that the buffer holds.
        // Other buffers of this range access it only through raw copies, and a load does not copy a range before it has
        // filled it; a load refuses two reads into one range.
        Some(unsafe { std::slice::from_raw_parts_mut(start, self.size as usize) })
    }

    /// Whether the memory is mapped, so that the host can access it.
    pub(super) fn is_mapped(&self) -> bool {
        !self.chunk.mapped.is_null()
    }

    fn host_range(&self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(self.is_mapped(), "the buffer is not host-visible");
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.size), "access beyond the buffer");
        // SAFETY: in bounds of the chunk's mapping by the check above.
        unsafe { self.chunk.mapped.add((self.offset + offset) as usize) }
    }
}

/// Allocates buffers. Buffers may outlive the arena.
pub struct Arena {
    device: Arc<Device>,
    /// The plan and its chunks; `None` for an arena without a plan.
    planned: Option<Planned>,
    open: Vec<OpenChunk>,
    placements: Vec<Placement>,
    allocated: u64,
}

/// A plan with its chunks allocated.
struct Planned {
    plan: Plan,
    chunks: Vec<Arc<Chunk>>,
    /// Indices of the requests that were not handed out yet, by class, in the plan's order.
    left: Vec<VecDeque<usize>>,
}

/// A chunk with room for more small buffers of its kind and class.
struct OpenChunk {
    kind: MemoryKind,
    class: Class,
    chunk: Arc<Chunk>,
    used: u64,
}

impl Arena {
    pub fn new(device: &Arc<Device>) -> Arena {
        Arena {
            device: device.clone(),
            planned: None,
            open: Vec::new(),
            placements: Vec::new(),
            allocated: 0,
        }
    }

    /// Allocates all chunks of `plan`, which must have been made for [`Device::machine`]. The buffers of each class
    /// must be requested in the plan's order.
    pub fn with_plan(device: &Arc<Device>, plan: Plan) -> Result<Arena, GpuError> {
        let is_separate = device.rehearsed().has_separate_buffers();
        let plan = if is_separate { plan.one_chunk_each() } else { plan };
        let take = |chunk: &placement::Chunk| {
            let heap = plan.heaps[chunk.heap].heap.index;
            let bytes = if is_separate { chunk.used } else { chunk.bytes() };
            Chunk::new(device, chunk.kind, chunk.class, Some(heap), bytes, &chunk.name).map(Arc::new)
        };
        let chunks = plan.chunks.iter().map(take).collect::<Result<Vec<_>, _>>()?;
        let mut left = vec![VecDeque::new(); Class::ALL.len()];
        for (i, request) in plan.requests.iter().enumerate() {
            left[request.class as usize].push_back(i);
        }
        let placements = plan.placements();
        let allocated = chunks.iter().map(|chunk| chunk.allocated).sum();
        let planned = Some(Planned { plan, chunks, left });
        Ok(Arena { device: device.clone(), planned, open: Vec::new(), placements, allocated })
    }

    /// A buffer of `size` bytes with undefined content. `name` is for errors and debuggers. Panics if `kind` or `size`
    /// differ from the plan's next request of the class.
    pub fn alloc(
        &mut self,
        kind: MemoryKind,
        class: Class,
        size: u64,
        name: &str,
    ) -> Result<Buffer, GpuError> {
        assert!(size > 0, "{name}: empty buffer");
        if let Some(planned) = &mut self.planned {
            return Ok(planned.hand_out(kind, class, size, name));
        }
        let is_exact = kind == MemoryKind::Shared || self.device.rehearsed().has_separate_buffers();
        let rounded = if is_exact { size } else { size.next_multiple_of(ALIGNMENT) };
        if is_exact || rounded > CHUNK_BYTES / 2 {
            let chunk = Arc::new(Chunk::new(&self.device, kind, class, None, rounded, name)?);
            self.note(class, &chunk, rounded, chunk.allocated);
            return Ok(chunk.buffer(0, size));
        }
        let fits =
            |o: &&mut OpenChunk| o.kind == kind && o.class == class && o.used + rounded <= o.chunk.size;
        let mut new_chunk = 0;
        let open = match self.open.iter_mut().find(fits) {
            Some(open) => open,
            None => {
                let shared = format!("{} ({kind:?}, shared)", class.name());
                let chunk = Arc::new(Chunk::new(&self.device, kind, class, None, CHUNK_BYTES, &shared)?);
                new_chunk = chunk.allocated;
                self.open.retain(|o| o.kind != kind || o.class != class);
                self.open.push(OpenChunk { kind, class, chunk, used: 0 });
                self.open.last_mut().expect("just pushed")
            }
        };
        let buffer = open.chunk.buffer(open.used, size);
        open.used += rounded;
        let chunk = buffer.chunk.clone();
        self.note(class, &chunk, rounded, new_chunk);
        Ok(buffer)
    }

    /// The placement table: one row per class and heap.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Bytes that the arena has allocated from the heaps.
    pub fn allocated(&self) -> u64 {
        self.allocated
    }

    /// All chunks of the plan, each as one buffer with its class. Empty without a plan.
    pub fn chunks(&self) -> Vec<(Class, Buffer)> {
        let Some(Planned { plan, chunks, .. }) = &self.planned else { return Vec::new() };
        let whole = |chunk: &Arc<Chunk>| chunk.buffer(0, chunk.size - chunk.start());
        plan.chunks.iter().zip(chunks).map(|(planned, chunk)| (planned.class, whole(chunk))).collect()
    }

    /// Whether every request of the plan has been handed out.
    pub fn is_exhausted(&self) -> bool {
        self.planned.as_ref().is_none_or(|planned| planned.left.iter().all(VecDeque::is_empty))
    }

    fn note(&mut self, class: Class, chunk: &Chunk, bytes: u64, allocated: u64) {
        let (_, local) = self.device.heaps.table.heaps[chunk.heap];
        let heap = heap_name(chunk.heap, local);
        let found = self.placements.binary_search_by(|row| (row.class, &row.heap).cmp(&(class, &heap)));
        let at = found.unwrap_or_else(|at| {
            self.placements.insert(at, Placement { class, heap, buffers: 0, bytes: 0, allocated: 0 });
            at
        });
        let row = &mut self.placements[at];
        row.buffers += 1;
        row.bytes += bytes;
        row.allocated += allocated;
        self.allocated += allocated;
    }
}

impl Planned {
    fn hand_out(&mut self, kind: MemoryKind, class: Class, size: u64, name: &str) -> Buffer {
        let next = self.left[class as usize].pop_front();
        let next =
            next.unwrap_or_else(|| panic!("{name}: {size} bytes of {} were not planned", class.name()));
        let request = &self.plan.requests[next];
        assert!(
            (request.kind, request.bytes) == (kind, size),
            "{name}: {size} bytes of {kind:?} memory, but {} bytes of {:?} memory were planned for {}",
            request.bytes,
            request.kind,
            request.name
        );
        let slot = self.plan.slots[next];
        self.chunks[slot.chunk].buffer(slot.offset, size)
    }
}
