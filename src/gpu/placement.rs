//! Plans in which heap each buffer of a model is allocated. A load and `unicorn plan` use the same plan. Planning is
//! only arithmetic: it calls no driver.
//!
//! Classes are placed in the order of [`Class`], each into the first heap of its list that has room:
//!
//! | class | heaps on unified memory (integrated GPU, software) | heaps on a discrete GPU |
//! |---|---|---|
//! | attention weights, embedding, norms, activations, KV cache | VRAM, then GTT | VRAM |
//! | FFN weights (most of the bytes) | GTT, then VRAM; or VRAM, then GTT ([`FfnChoice`]) | VRAM |
//! | staging | host-visible: GTT, then VRAM | the same |
//!
//! VRAM means the device-local heaps, GTT the other heaps; larger heaps come first. The placement table has one row per
//! class and heap, so a class that spills into a second heap has two rows. On a discrete GPU, weights are never placed
//! in host memory: the GPU would read them slowly over PCIe, and the user would not know why.
//!
//! Invariants: no heap is filled beyond its usable bytes; no allocation exceeds the device's limit; either every
//! request is placed, or all are refused with a table of the requested and the free bytes.

use std::collections::BTreeMap;
use std::fmt;

use strum::{IntoStaticStr, VariantArray};

use super::info::{DeviceInfo, DeviceKind, HeapInfo, ReadSpeed};
use crate::config::{FfnHeap, show_bytes};

/// The size limit of a chunk that small buffers share. Sharing reduces the number of allocations: drivers allow about
/// 4096.
pub(super) const CHUNK_BYTES: u64 = 32 << 20;
/// Every buffer starts at a multiple of this number of bytes, for cache lines and `vec4`-aligned shader access.
pub(super) const ALIGNMENT: u64 = 256;
/// Every chunk's size is a multiple of this number of bytes, the largest small-page size of common GPUs. So the driver
/// allocates as many bytes as were planned.
const GRAIN: u64 = 64 << 10;
/// The default reserve for other programs is this number of bytes, or a tenth of the memory if that is more.
const RESERVE_BYTES: u64 = 512 << 20;
/// The limit of one allocation that plans for machines on paper assume. It is RADV's limit.
const PAPER_MAX_ALLOCATION: u64 = 0xffff_fffc;

/// The memory that a buffer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Memory that shaders read and write. The host accesses it through copies.
    Device,
    /// Memory that the host writes and the device reads.
    Upload,
    /// Memory that the device writes and the host reads.
    Readback,
    /// Memory that a device outside Vulkan also reads and writes ([`Buffer::export`](super::Buffer::export)). Such a
    /// buffer has its own allocation, because exporting shares the whole allocation.
    Shared,
}

/// The purpose of a buffer. Buffers are placed in this order, and the placement table has its rows in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum Class {
    #[strum(serialize = "attention weights")]
    Attention,
    Embedding,
    /// The embeddings that every layer has of a token. A step reads a row of each of its tokens.
    #[strum(serialize = "per-layer embedding")]
    PerLayerEmbedding,
    Norms,
    Activations,
    Staging,
    #[strum(serialize = "KV cache")]
    KvCache,
    #[strum(serialize = "FFN weights")]
    Ffn,
    /// The weights of experts, of which a token uses a few.
    #[strum(serialize = "expert weights")]
    Experts,
    /// The weights of the tower that reads images.
    #[strum(serialize = "vision weights")]
    Vision,
}

impl Class {
    pub const ALL: [Class; 10] = *Self::VARIANTS.first_chunk().expect("all variants");

    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// Whether the buffer's bytes come from the checkpoint.
    pub const fn is_weights(self) -> bool {
        !matches!(self, Class::Activations | Class::Staging | Class::KvCache)
    }
}

/// A heap that buffers can be placed in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heap {
    /// The driver's index of the heap.
    pub index: usize,
    /// The name of the heap, e.g. `heap 0 (device-local)`.
    pub name: String,
    pub size: u64,
    /// Bytes that this process may still allocate, from the driver's budget; at most `size`.
    pub free: u64,
    pub device_local: bool,
    pub host_visible: bool,
    /// How fast weights were read from the heap. `None`: this was not measured.
    pub read: Option<ReadSpeed>,
}

/// The memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub heaps: Vec<Heap>,
    /// Whether all memory is equally near to the GPU, so that weights may be in any heap.
    pub unified: bool,
    /// The device's `maxMemoryAllocationSize`.
    pub max_allocation_bytes: u64,
}

impl Machine {
    /// The usable heaps of a device.
    pub fn of(heaps: &[HeapInfo], device: DeviceKind, max_allocation_bytes: u64) -> Machine {
        let usable = heaps.iter().enumerate().filter(|(_, info)| info.usable);
        let heaps = usable.map(|(index, info)| Heap {
            index,
            name: heap_name(index, info.device_local),
            size: info.size_bytes,
            free: info.free_bytes,
            device_local: info.device_local,
            host_visible: info.host_visible,
            read: info.read,
        });
        Machine { heaps: heaps.collect(), unified: device.is_unified(), max_allocation_bytes }
    }

    /// The memory of a device that is not open.
    pub fn of_device(info: &DeviceInfo) -> Machine {
        Machine::of(&info.heaps, info.kind, info.max_allocation_bytes)
    }

    /// A machine that need not be present: an integrated AMD GPU with these bytes of VRAM and GTT, or with one heap if
    /// `gtt` is 0.
    pub fn on_paper(vram: u64, gtt: u64) -> Machine {
        let heap = |index, name: &str, size, device_local| Heap {
            index,
            name: name.to_owned(),
            size,
            free: size,
            device_local,
            host_visible: true,
            read: None,
        };
        let heaps = [heap(0, "VRAM", vram, true), heap(1, "GTT", gtt, false)];
        Machine {
            heaps: heaps.into_iter().filter(|heap| heap.size > 0).collect(),
            unified: true,
            max_allocation_bytes: PAPER_MAX_ALLOCATION,
        }
    }

    /// Usable bytes of each heap: its free bytes minus its share of the reserve, at most the limit for VRAM or GTT.
    pub fn usable(&self, limits: &Limits) -> Vec<u64> {
        let counts = |heap: &Heap| self.unified || heap.device_local;
        let total: u64 = self.heaps.iter().filter(|heap| counts(heap)).map(|heap| heap.size).sum();
        let reserve = limits.reserve.unwrap_or(RESERVE_BYTES.max(total / 10)).min(total);
        let mut left = [limits.gtt.unwrap_or(u64::MAX), limits.vram.unwrap_or(u64::MAX)];
        // The larger heap uses up the limit first, because it gets buffers first.
        let mut usable = vec![0; self.heaps.len()];
        for device_local in [true, false] {
            for i in self.largest_first(device_local) {
                let heap = &self.heaps[i];
                let share = u128::from(reserve) * u128::from(heap.size) / u128::from(total.max(1));
                let share = if counts(heap) { share as u64 } else { 0 };
                let left = &mut left[usize::from(device_local)];
                usable[i] = heap.free.saturating_sub(share).min(*left);
                *left -= usable[i];
            }
        }
        usable
    }

    /// Indices of the heaps that are device-local or not, larger heaps first.
    fn largest_first(&self, device_local: bool) -> Vec<usize> {
        let mut heaps: Vec<usize> =
            (0..self.heaps.len()).filter(|&i| self.heaps[i].device_local == device_local).collect();
        heaps.sort_by_key(|&i| std::cmp::Reverse(self.heaps[i].size));
        heaps
    }

    /// Indices of the heaps for buffers of a class and kind, best first.
    fn preference(&self, class: Class, kind: MemoryKind, ffn_heap: FfnHeap) -> Vec<usize> {
        let (vram, gtt) = (self.largest_first(true), self.largest_first(false));
        match (kind, class) {
            (MemoryKind::Upload | MemoryKind::Readback | MemoryKind::Shared, _) => {
                [gtt, vram].concat().into_iter().filter(|&i| self.heaps[i].host_visible).collect()
            }
            (MemoryKind::Device, _) if !self.unified => vram,
            (MemoryKind::Device, Class::Ffn | Class::Experts) if !self.ffn_choice(ffn_heap).is_vram_first => {
                [gtt, vram].concat()
            }
            // Few bytes of it are read, so it leaves the memory that the firmware reserves to what is read whole.
            (MemoryKind::Device, Class::PerLayerEmbedding) => [gtt, vram].concat(),
            (MemoryKind::Device, _) => [vram, gtt].concat(),
        }
    }

    /// Indices of the heaps that weights may be in.
    pub fn weight_heaps(&self) -> Vec<usize> {
        self.preference(Class::Attention, MemoryKind::Device, FfnHeap::Gtt)
    }

    /// Decides which heap FFN weights are placed in first. The largest device-local heap and the largest other heap are
    /// compared.
    pub fn ffn_choice(&self, wanted: FfnHeap) -> FfnChoice {
        let largest = |local| self.largest_first(local).first().map(|&i| &self.heaps[i]);
        let (vram, gtt) = match (largest(true), largest(false)) {
            (Some(vram), Some(gtt)) if self.unified => (vram, gtt),
            (vram, _) => return FfnChoice { is_vram_first: vram.is_some(), reason: FfnReason::OneKind },
        };
        let (is_vram_first, reason) = match (wanted, vram.read, gtt.read) {
            (FfnHeap::Vram, ..) => (true, FfnReason::Configured),
            (FfnHeap::Gtt, ..) => (false, FfnReason::Configured),
            (FfnHeap::Auto, Some(vram), Some(gtt)) => {
                (vram.is_clearly_above(gtt), FfnReason::Measured { vram, gtt })
            }
            (FfnHeap::Auto, ..) => (false, FfnReason::NotMeasured),
        };
        FfnChoice { is_vram_first, reason }
    }
}

/// The heap that FFN weights are placed in first, and why. `Display` gives a part of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FfnChoice {
    pub is_vram_first: bool,
    pub reason: FfnReason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FfnReason {
    /// Weights can be only in VRAM, or only in GTT.
    OneKind,
    /// `memory.ffn_heap` names the heap.
    Configured,
    /// VRAM is first if it was read clearly faster.
    Measured {
        vram: ReadSpeed,
        gtt: ReadSpeed,
    },
    NotMeasured,
}

impl FfnChoice {
    /// Whether weights can be in VRAM and in GTT.
    pub fn has_alternative(self) -> bool {
        self.reason != FfnReason::OneKind
    }

    /// The value of `memory.ffn_heap` with the same effect.
    pub fn heap(self) -> FfnHeap {
        if self.is_vram_first { FfnHeap::Vram } else { FfnHeap::Gtt }
    }
}

impl fmt::Display for FfnChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = if self.is_vram_first { "VRAM" } else { "GTT" };
        match self.reason {
            FfnReason::OneKind => write!(f, "in {first}, the only memory for weights"),
            FfnReason::Configured => write!(f, "{first} first, as memory.ffn_heap says"),
            FfnReason::Measured { vram, gtt } => {
                let why = if self.is_vram_first { "clearly" } else { "not clearly" };
                let (vram, gtt) = (vram.gb_per_s(), gtt.gb_per_s());
                write!(
                    f,
                    "{first} first: VRAM was read at {vram:.1} GB/s, {why} faster than GTT at {gtt:.1} GB/s"
                )
            }
            FfnReason::NotMeasured => {
                write!(f, "{first} first: it was not measured how fast VRAM and GTT are read")
            }
        }
    }
}

pub(super) fn heap_name(index: usize, device_local: bool) -> String {
    format!("heap {index} ({})", if device_local { "device-local" } else { "host" })
}

/// Limits that the user configures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes in device-local heaps. `None`: no limit besides the driver's budget.
    pub vram: Option<u64>,
    /// The most bytes in other heaps. `None`: no limit besides the driver's budget.
    pub gtt: Option<u64>,
    /// Bytes that stay free for other programs, divided over the heaps in proportion to their sizes. `None`: 512 MiB or
    /// a tenth of the memory, whichever is more.
    pub reserve: Option<u64>,
    /// The heap that FFN weights are placed in first, on a device with unified memory ([`Machine::ffn_choice`]).
    pub ffn_heap: FfnHeap,
}

/// One buffer that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub class: Class,
    pub kind: MemoryKind,
    /// Size of the buffer; at least 1.
    pub bytes: u64,
    /// Name of the buffer, for errors and debuggers.
    pub name: String,
}

/// One allocation, of one class and kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The heap's index in [`Machine::heaps`].
    pub heap: usize,
    pub class: Class,
    pub kind: MemoryKind,
    /// The sum of the buffers' bytes.
    pub used: u64,
    /// Name of the allocation's first buffer.
    pub name: String,
}

impl Chunk {
    /// Bytes that are allocated.
    pub fn bytes(&self) -> u64 {
        self.used.next_multiple_of(GRAIN)
    }
}

/// The place of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The chunk's index in [`Plan::chunks`].
    pub chunk: usize,
    pub offset: u64,
}

/// Bytes of one class in one heap: a row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub class: Class,
    /// The heap's name ([`Heap::name`]).
    pub heap: String,
    pub buffers: usize,
    /// Bytes of the buffers.
    pub bytes: u64,
    /// Bytes that are allocated for them, with the rounding of chunks.
    pub allocated: u64,
}

/// The part of a heap that a plan uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeapUse {
    pub heap: Heap,
    /// Usable bytes.
    pub usable: u64,
    /// Bytes that the plan allocates in the heap.
    pub placed: u64,
}

/// All requests, and the place of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub requests: Vec<Request>,
    /// The place of each request.
    pub slots: Vec<Slot>,
    pub chunks: Vec<Chunk>,
    pub heaps: Vec<HeapUse>,
}

impl Plan {
    /// Bytes that are allocated in all heaps.
    pub fn bytes(&self) -> u64 {
        self.heaps.iter().map(|heap| heap.placed).sum()
    }

    /// Whether more bytes of FFN weights are in VRAM than in GTT.
    pub fn has_ffn_in_vram(&self) -> bool {
        let in_heaps = |local: bool| -> u64 {
            let chunks =
                self.chunks.iter().filter(|chunk| matches!(chunk.class, Class::Ffn | Class::Experts));
            chunks.filter(|chunk| self.heaps[chunk.heap].heap.device_local == local).map(Chunk::bytes).sum()
        };
        in_heaps(true) > in_heaps(false)
    }

    /// The lowest speed at which the heaps that hold weights, keys and values were read, in bytes per second. `None`: one
    /// of them was not measured.
    pub fn slowest_read(&self) -> Option<u64> {
        let read = |chunk: &Chunk| self.heaps[chunk.heap].heap.read.map(|read| read.bytes_per_s);
        let steady =
            self.chunks.iter().filter(|chunk| chunk.class.is_weights() || chunk.class == Class::KvCache);
        steady.map(read).min().flatten()
    }

    /// The same plan with a separate chunk for each request.
    pub(super) fn one_chunk_each(self) -> Plan {
        let chunk = |(request, slot): (&Request, &Slot)| Chunk {
            heap: self.chunks[slot.chunk].heap,
            class: request.class,
            kind: request.kind,
            used: request.bytes,
            name: request.name.clone(),
        };
        let chunks: Vec<Chunk> = self.requests.iter().zip(&self.slots).map(chunk).collect();
        let slots = (0..chunks.len()).map(|chunk| Slot { chunk, offset: 0 }).collect();
        Plan { chunks, slots, ..self }
    }

    /// The rows of the placement table, one for each class and heap with a buffer, in the order of [`Class`].
    pub fn placements(&self) -> Vec<Placement> {
        let mut rows: BTreeMap<(Class, usize), Placement> = BTreeMap::new();
        for chunk in &self.chunks {
            let row = rows.entry((chunk.class, chunk.heap)).or_insert_with(|| {
                let heap = self.heaps[chunk.heap].heap.name.clone();
                Placement { class: chunk.class, heap, buffers: 0, bytes: 0, allocated: 0 }
            });
            row.bytes += chunk.used;
            row.allocated += chunk.bytes();
        }
        for slot in &self.slots {
            let chunk = &self.chunks[slot.chunk];
            let row = rows.get_mut(&(chunk.class, chunk.heap));
            row.expect("a row for every chunk").buffers += 1;
        }
        rows.into_values().collect()
    }
}

/// The reason why a request was not placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// No heap for this buffer has room.
    Full,
    /// The buffer exceeds the device's largest allocation, `limit` bytes.
    TooLarge { limit: u64 },
}

/// The requests do not fit; nothing was allocated. `Display` gives one line, and [`Refusal::table`] a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The first request that was not placed.
    pub request: Request,
    pub obstacle: Obstacle,
    /// Requested bytes by class.
    pub asked: Vec<(Class, u64)>,
    /// The heaps. `placed` counts only the requests before the one that failed.
    pub heaps: Vec<HeapUse>,
}

impl Refusal {
    pub fn asked_bytes(&self) -> u64 {
        self.asked.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The rows of the table: the requested bytes by class, then the usable and free bytes by heap.
    pub fn table(&self) -> Vec<String> {
        let asked =
            self.asked.iter().map(|(class, n)| format!("needed {:>10} {}", show_bytes(*n), class.name()));
        let heaps = self.heaps.iter().map(|HeapUse { heap, usable, .. }| {
            let (usable, free, size) = (show_bytes(*usable), show_bytes(heap.free), show_bytes(heap.size));
            format!("usable {usable:>10} {}: {free} free of {size}", heap.name)
        });
        asked.chain(heaps).collect()
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |parts: Vec<String>| parts.join(", ");
        let asked = self.asked.iter().map(|(class, n)| format!("{} {}", class.name(), show_bytes(*n)));
        let usable = self.heaps.iter().map(|HeapUse { heap, usable, .. }| {
            format!("{} of {} ({} free)", show_bytes(*usable), heap.name, show_bytes(heap.free))
        });
        write!(
            f,
            "{} are needed ({}); usable are {}; ",
            show_bytes(self.asked_bytes()),
            list(asked.collect()),
            list(usable.collect())
        )?;
        let Request { class, bytes, name, .. } = &self.request;
        let buffer = format!("{} {name:?} ({})", class.name(), show_bytes(*bytes));
        match self.obstacle {
            Obstacle::Full => write!(f, "there is no room for {buffer}"),
            Obstacle::TooLarge { limit } => {
                write!(
                    f,
                    "{buffer} exceeds the limit of one allocation on this device, {}",
                    show_bytes(limit)
                )
            }
        }
    }
}

impl std::error::Error for Refusal {}

/// Places all requests, or refuses all of them.
pub fn place(machine: &Machine, limits: &Limits, requests: Vec<Request>) -> Result<Plan, Box<Refusal>> {
    let usable = machine.usable(limits);
    let mut heaps: Vec<HeapUse> = (machine.heaps.iter().zip(usable))
        .map(|(heap, usable)| HeapUse { heap: heap.clone(), usable, placed: 0 })
        .collect();
    let limit = machine.max_allocation_bytes / GRAIN * GRAIN;
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut slots = vec![Slot { chunk: usize::MAX, offset: 0 }; requests.len()];
    // For each heap, the shared chunk that small buffers of the current class and kind are placed in.
    let mut open: Vec<Option<usize>> = vec![None; heaps.len()];
    let mut placing = None;

    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&i| (requests[i].class, requests[i].kind));
    for i in order {
        let Request { class, kind, bytes, ref name } = requests[i];
        assert!(bytes > 0, "{name}: empty buffer");
        if placing != Some((class, kind)) {
            placing = Some((class, kind));
            open.fill(None);
        }
        let refuse = |obstacle, heaps| {
            let asked = Class::ALL.map(|class| {
                let of_class = requests.iter().filter(|r| r.class == class);
                (class, of_class.map(|r| r.bytes).fold(0, u64::saturating_add))
            });
            let asked = asked.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
            Box::new(Refusal { request: requests[i].clone(), obstacle, asked, heaps })
        };
        if bytes > limit {
            return Err(refuse(Obstacle::TooLarge { limit }, heaps));
        }
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let shares = kind != MemoryKind::Shared && bytes <= CHUNK_BYTES.min(limit) / 2;
        let found = machine.preference(class, kind, limits.ffn_heap).into_iter().find_map(|h| {
            let left = heaps[h].usable - heaps[h].placed;
            let shared = open[h].filter(|&c| shares && chunks[c].used + bytes <= CHUNK_BYTES.min(limit));
            let before = shared.map_or(0, |c| chunks[c].used);
            let cost = (before + bytes).next_multiple_of(GRAIN) - before.next_multiple_of(GRAIN);
            (cost <= left).then_some((h, shared, before, cost))
        });
        let Some((h, shared, offset, cost)) = found else {
            return Err(refuse(Obstacle::Full, heaps));
        };
        heaps[h].placed += cost;
        let chunk = shared.unwrap_or_else(|| {
            chunks.push(Chunk { heap: h, class, kind, used: 0, name: name.clone() });
            chunks.len() - 1
        });
        chunks[chunk].used += bytes;
        slots[i] = Slot { chunk, offset };
        if shares {
            open[h] = Some(chunk);
        }
    }
    Ok(Plan { requests, slots, chunks, heaps })
}
