//! A device's properties as its driver reports them: name, kind, queues, heaps, limits. This module does not call
//! Vulkan.

use serde::{Deserialize, Serialize};
use strum::Display;

use super::caps::Caps;

/// The kind of a queue: compute only, or compute and graphics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "lowercase")]
pub enum QueueKind {
    Compute,
    Graphics,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Display)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    #[strum(to_string = "discrete GPU")]
    Discrete,
    #[strum(to_string = "integrated GPU")]
    Integrated,
    #[strum(to_string = "virtual GPU")]
    Virtual,
    #[strum(to_string = "other")]
    Other,
    /// Software Vulkan.
    #[strum(to_string = "software (CPU)")]
    Cpu,
}

impl DeviceKind {
    /// Whether all memory is equally near to the GPU. On an integrated GPU, GTT and VRAM are the same chips; only the
    /// sizes of their pages differ.
    pub(super) fn is_unified(self) -> bool {
        matches!(self, DeviceKind::Integrated | DeviceKind::Cpu)
    }
}

/// One memory heap as the driver reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HeapInfo {
    pub device_local: bool,
    /// Whether the host can access the heap without flushing (host-visible and host-coherent).
    pub host_visible: bool,
    /// Whether this program can use a memory type of the heap.
    pub usable: bool,
    pub size_bytes: u64,
    /// Bytes that this process may still allocate, from `VK_EXT_memory_budget`; at most the heap's size.
    pub free_bytes: u64,
    /// How fast weights were read from the heap. `None`: this was not measured.
    #[serde(default)]
    pub read: Option<ReadSpeed>,
}

/// How fast a device read weights from a heap, by its own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadSpeed {
    /// Bytes per second; at least 1.
    pub bytes_per_s: u64,
    /// When this was measured, in seconds since 1970.
    pub measured_at: u64,
}

impl ReadSpeed {
    pub fn gb_per_s(self) -> f64 {
        self.bytes_per_s as f64 / 1e9
    }

    /// Whether this heap is faster than another by more than the variation of measurements, 5 %.
    pub fn is_clearly_above(self, other: ReadSpeed) -> bool {
        u128::from(self.bytes_per_s) * 100 > u128::from(other.bytes_per_s) * 105
    }
}

/// A Vulkan device as `unicorn devices` shows it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub index: usize,
    pub name: String,
    pub kind: DeviceKind,
    /// Driver name and version, e.g. `radv Mesa 25.0.7`.
    pub driver: String,
    /// PCI vendor id.
    pub vendor_id: u32,
    /// The kinds of queues that support compute, the default first.
    pub queues: Vec<QueueKind>,
    pub heaps: Vec<HeapInfo>,
    pub caps: Caps,
    pub max_allocation_bytes: u64,
    pub max_storage_buffer_bytes: u64,
    /// The PCI address, e.g. `0000:c5:00.0`, if the driver reports one.
    pub pci: Option<String>,
    /// Names of required features that the device lacks. Empty if the device can run this program.
    pub missing: Vec<String>,
}
