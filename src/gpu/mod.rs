//! The Vulkan layer: all of `ash` lives here, and all `unsafe` of the compute path.
//!
//! It offers a device chosen by policy, memory that stays where it was put, pipelines, and a recorder that
//! derives barriers. It refuses to know what a tensor or a model is, to fall back to another device, and to
//! allocate behind its caller's back.

mod cache;
mod caps;
#[doc(hidden)]
pub mod compiler;
mod device;
mod error;
mod instance;
#[doc(hidden)]
pub mod isa;
mod memory;
pub mod memory_types;
mod pipeline;
pub mod placement;
mod recorder;
pub mod residency;
mod upload;
mod watchdog;

pub use caps::{Caps, Need};
pub use device::{
    Device, DeviceInfo, DeviceKind, DevicePolicy, HeapInfo, NO_DRIVER_HINT, QueueKind, chosen_device,
    list_devices,
};
pub use error::GpuError;
pub use instance::ValidationLog;
pub use memory::{Arena, Buffer};
pub use pipeline::{Access, Arguments, Pipeline, Shader};
pub use placement::{Class, MemoryKind, Placement};
pub use recorder::{CommandBuffer, Counts, INDIRECT_BYTES, Order, Profile, Recorder, Rehearsal, Submission};
pub use upload::Uploader;
pub use watchdog::longest_submit;
