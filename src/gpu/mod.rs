//! The Vulkan layer. Only this module uses `ash`, and it contains all `unsafe` code of the compute path.
//!
//! It provides a device that is chosen by a policy, memory that is never moved, pipelines, and a recorder that derives
//! barriers. It does not know tensors or models, never falls back to another device, and allocates only on request.

mod cache;
mod caps;
mod choose;
#[doc(hidden)]
pub mod compiler;
mod counts;
mod courtesy;
mod device;
mod enumerate;
mod error;
mod heaps;
mod info;
mod instance;
mod memory;
pub mod memory_types;
mod need;
mod note;
mod null_driver;
mod pipeline;
pub mod placement;
mod read_speeds;
mod recorder;
mod rehearsal;
pub mod residency;
mod shader;
mod external_memory;
mod guard;
mod stopwatch;
mod upload;
mod watchdog;

pub use caps::Caps;
pub use choose::{DevicePolicy, NO_DRIVER_HINT, choose, chosen_device};
pub use counts::{Counts, Profile};
pub use device::Device;
pub use enumerate::list_devices;
pub use error::GpuError;
pub use info::{DeviceInfo, DeviceKind, HeapInfo, QueueKind, ReadSpeed};
pub use instance::ValidationLog;
pub use memory::{Arena, Buffer};
pub use need::Need;
pub use note::Note;
pub use pipeline::Pipeline;
pub use placement::{Class, MemoryKind, Placement};
pub use recorder::{Arguments, CommandBuffer, INDIRECT_BYTES, MAX_WORKGROUPS, Recorder, Submission};
pub use rehearsal::{Order, Rehearsal};
pub(crate) use shader::sum_of_aligned;
pub use shader::{Access, Shader};
pub use stopwatch::timed;
pub use upload::Uploader;
pub use watchdog::{longest_submit, quarter_of_timeout};
