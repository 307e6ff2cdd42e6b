//! Plans the place of every byte of a model. A load and `unicorn plan` follow the same plan, which is arithmetic alone.
//!
//! Classes are placed in the order of [`Class`], each into the first heap of its list that has room:
//!
//! | class | heaps where the GPU reaches all memory at one speed (integrated, software) | elsewhere |
//! |---|---|---|
//! | attention weights, embedding, norms, activations, KV cache | VRAM, then GTT | VRAM |
//! | FFN weights, the bulk | GTT, then VRAM; or as the others ([`Limits::ffn_heap`]) | VRAM |
//! | staging | host-visible: GTT, then VRAM | the same |
//!
//! VRAM are the device-local heaps, GTT the others, larger heaps first. Bytes that spill into a second heap get a row
//! of the table of their own, as every class and heap has. On a discrete GPU, weights in host memory are refused:
//! reading them over PCIe would be slow without a warning.
//!
//! Invariants: no heap is filled beyond what may be used of it; no allocation is larger than the device's largest;
//! every request is placed, or all are refused with the table of what was asked and what is free.

use std::fmt;

use super::info::{DeviceInfo, DeviceKind, HeapInfo};
use crate::config::{FfnHeap, show_bytes};

/// The largest chunk that small buffers share. Sharing keeps allocations few: drivers allow some 4096.
pub(super) const CHUNK_BYTES: u64 = 32 << 20;
/// Every buffer starts at a multiple of this number, for cache lines and `vec4`-aligned shader access.
pub(super) const ALIGNMENT: u64 = 256;
/// Every chunk is a multiple of this number, the largest page of common GPUs' small-page modes. So the driver takes
/// what was planned.
const GRAIN: u64 = 64 << 10;
/// The reserve for other programs if none is configured: this number, or a tenth of the memory, whichever is more.
const RESERVE_BYTES: u64 = 512 << 20;
/// RADV's largest allocation, which plans assume for machines that are not present.
const PAPER_MAX_ALLOCATION: u64 = 0xffff_fffc;

/// The memory that a buffer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryKind {
    /// Memory that shaders read and write; the host reaches it through copies.
    Device,
    /// Memory that the host writes and the device reads.
    Upload,
    /// Memory that the device writes and the host reads.
    Readback,
    /// Memory that a device outside Vulkan reads and writes, too ([`Buffer::export`](super::Buffer::export)). Such a
    /// buffer has an allocation of its own, because all of an allocation is shared.
    Shared,
}

/// The purpose of a buffer. The purposes are the rows of the placement table, in the order in which they are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    Attention,
    Embedding,
    Norms,
    Activations,
    Staging,
    KvCache,
    Ffn,
}

impl Class {
    pub const ALL: [Class; 7] = [
        Class::Attention,
        Class::Embedding,
        Class::Norms,
        Class::Activations,
        Class::Staging,
        Class::KvCache,
        Class::Ffn,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Class::Attention => "attention weights",
            Class::Embedding => "embedding",
            Class::Norms => "norms",
            Class::Activations => "activations",
            Class::Staging => "staging",
            Class::KvCache => "KV cache",
            Class::Ffn => "FFN weights",
        }
    }

    /// Whether the buffer's bytes come from the checkpoint.
    pub const fn is_weights(self) -> bool {
        matches!(self, Class::Attention | Class::Embedding | Class::Norms | Class::Ffn)
    }
}

/// A heap that buffers may lie in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heap {
    /// The driver's index of the heap.
    pub index: usize,
    /// The name of the heap, e.g. `heap 0 (device-local)`.
    pub name: String,
    pub size: u64,
    /// Bytes that this process may still allocate, by the driver's budget; at most `size`.
    pub free: u64,
    pub device_local: bool,
    pub host_visible: bool,
}

/// The memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub heaps: Vec<Heap>,
    /// Whether the GPU reaches all memory at one speed, so that weights may lie in any heap.
    pub unified: bool,
    /// The device's `maxMemoryAllocationSize`.
    pub max_allocation_bytes: u64,
}

impl Machine {
    /// The heaps of a device that buffers may lie in.
    pub fn of(heaps: &[HeapInfo], device: DeviceKind, max_allocation_bytes: u64) -> Machine {
        let usable = heaps.iter().enumerate().filter(|(_, info)| info.usable);
        let heaps = usable.map(|(index, info)| Heap {
            index,
            name: heap_name(index, info.device_local),
            size: info.size_bytes,
            free: info.free_bytes,
            device_local: info.device_local,
            host_visible: info.host_visible,
        });
        Machine { heaps: heaps.collect(), unified: device.is_unified(), max_allocation_bytes }
    }

    /// The memory of a device that is not open.
    pub fn of_device(info: &DeviceInfo) -> Machine {
        Machine::of(&info.heaps, info.kind, info.max_allocation_bytes)
    }

    /// A machine that is not present: an integrated AMD GPU with these bytes of VRAM and GTT, or with one heap if `gtt`
    /// is 0.
    pub fn on_paper(vram: u64, gtt: u64) -> Machine {
        let heap = |index, name: &str, size, device_local| Heap {
            index,
            name: name.to_owned(),
            size,
            free: size,
            device_local,
            host_visible: true,
        };
        let heaps = [heap(0, "VRAM", vram, true), heap(1, "GTT", gtt, false)];
        Machine {
            heaps: heaps.into_iter().filter(|heap| heap.size > 0).collect(),
            unified: true,
            max_allocation_bytes: PAPER_MAX_ALLOCATION,
        }
    }

    /// Usable bytes of each heap: the free bytes, less the heap's share of the reserve; at most the limit of the heap's
    /// kind.
    pub fn usable(&self, limits: &Limits) -> Vec<u64> {
        let counts = |heap: &Heap| self.unified || heap.device_local;
        let total: u64 = self.heaps.iter().filter(|heap| counts(heap)).map(|heap| heap.size).sum();
        let reserve = limits.reserve.unwrap_or(RESERVE_BYTES.max(total / 10)).min(total);
        let mut left = [limits.gtt.unwrap_or(u64::MAX), limits.vram.unwrap_or(u64::MAX)];
        // The larger heap of a kind gets the limit first, as it gets buffers first.
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

    /// Indices of the device-local heaps, or of the others, larger heaps first.
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
            (MemoryKind::Device, Class::Ffn) if ffn_heap == FfnHeap::Gtt => [gtt, vram].concat(),
            (MemoryKind::Device, _) => [vram, gtt].concat(),
        }
    }
}

pub(super) fn heap_name(index: usize, device_local: bool) -> String {
    format!("heap {index} ({})", if device_local { "device-local" } else { "host" })
}

/// Limits that a user sets; `None` leaves the limit to the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes in device-local heaps.
    pub vram: Option<u64>,
    /// Most bytes in other heaps.
    pub gtt: Option<u64>,
    /// Bytes that stay free for other programs, taken off the heaps in proportion to their sizes. `None`: 512 MiB or a
    /// tenth of the memory, whichever is more.
    pub reserve: Option<u64>,
    /// Where FFN weights go first if the GPU reaches all memory at one speed.
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
    /// Bytes of the allocation's buffers together.
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
    /// Bytes that are allocated for them: small buffers share chunks.
    pub allocated: u64,
}

/// The part of a heap that a plan uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeapUse {
    pub heap: Heap,
    /// Usable bytes.
    pub usable: u64,
    /// Bytes that the plan allocates there.
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

    /// The plan with a chunk for each request.
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

    /// The table's rows, one per class and heap that hold a buffer, in the order of placing.
    pub fn placements(&self) -> Vec<Placement> {
        let mut rows: Vec<(Class, usize, Placement)> = Vec::new();
        for chunk in &self.chunks {
            let row =
                match rows.iter().position(|(class, heap, _)| (*class, *heap) == (chunk.class, chunk.heap)) {
                    Some(row) => row,
                    None => {
                        let heap = self.heaps[chunk.heap].heap.name.clone();
                        let row = Placement { class: chunk.class, heap, buffers: 0, bytes: 0, allocated: 0 };
                        rows.push((chunk.class, chunk.heap, row));
                        rows.len() - 1
                    }
                };
            rows[row].2.bytes += chunk.used;
            rows[row].2.allocated += chunk.bytes();
        }
        for slot in &self.slots {
            let chunk = &self.chunks[slot.chunk];
            let row = rows.iter_mut().find(|(class, heap, _)| (*class, *heap) == (chunk.class, chunk.heap));
            row.expect("a row for every chunk").2.buffers += 1;
        }
        rows.sort_by_key(|(class, heap, _)| (*class, *heap));
        rows.into_iter().map(|(_, _, row)| row).collect()
    }
}

/// The reason why a request has no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// No heap that the buffer may lie in has room.
    Full,
    /// The buffer exceeds the device's largest allocation, `limit` bytes.
    TooLarge { limit: u64 },
}

/// The requests do not fit; nothing was allocated. Displays as one line; [`Refusal::table`] has the rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The first request that found no place.
    pub request: Request,
    pub obstacle: Obstacle,
    /// Bytes that were asked for, by class.
    pub asked: Vec<(Class, u64)>,
    /// `placed` counts the requests before the one that failed.
    pub heaps: Vec<HeapUse>,
}

impl Refusal {
    pub fn asked_bytes(&self) -> u64 {
        self.asked.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The rows of the table: what was asked for, by class; and what is free, by heap.
    pub fn table(&self) -> Vec<String> {
        let asked =
            self.asked.iter().map(|(class, n)| format!("asked  {:>10} {}", show_bytes(*n), class.name()));
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
            "{} are asked ({}), usable are {}; ",
            show_bytes(self.asked_bytes()),
            list(asked.collect()),
            list(usable.collect())
        )?;
        let Request { class, bytes, name, .. } = &self.request;
        write!(f, "{} {name:?} with {}", class.name(), show_bytes(*bytes))?;
        match self.obstacle {
            Obstacle::Full => write!(f, " has no room"),
            Obstacle::TooLarge { limit } => {
                write!(f, " is more than one allocation holds on this device, {}", show_bytes(limit))
            }
        }
    }
}

impl std::error::Error for Refusal {}

/// Places every request, or none.
pub fn place(machine: &Machine, limits: &Limits, requests: Vec<Request>) -> Result<Plan, Box<Refusal>> {
    let usable = machine.usable(limits);
    let mut heaps: Vec<HeapUse> = (machine.heaps.iter().zip(usable))
        .map(|(heap, usable)| HeapUse { heap: heap.clone(), usable, placed: 0 })
        .collect();
    let limit = machine.max_allocation_bytes / GRAIN * GRAIN;
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut slots = vec![Slot { chunk: usize::MAX, offset: 0 }; requests.len()];
    // The shared chunk of each heap that has room for small buffers of the class and kind being placed.
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
