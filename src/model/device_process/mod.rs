//! A runner in a process of its own, so that the device can be lost, hang, or take its driver down, and the program that
//! serves lives on.
//!
//! To kill the process is the only way to get back the memory of a lost device, to end a wait that hangs, and to survive a
//! driver that ends its process with a signal. [`DeviceProcess`] is the runner as the parent has it: it passes batches,
//! masks and draws on as plain data, and bounds every wait. [`serve`] is the loop of the child, around any runner.
//!
//! The parent submits without waiting for an answer, so steps overlap as they do within one process. The child says how
//! far the device is by a counter in the shared memory; a device whose counter stands still for too long hangs. A process
//! that does not even run is noticed sooner ([`child_process`](super::child_process)).

mod child;
mod message;
mod parent;

pub use child::serve;
pub use parent::DeviceProcess;
