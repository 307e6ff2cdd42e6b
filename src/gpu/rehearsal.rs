//! Ways in which tests change how commands are recorded and buffers allocated.

/// The order in which commands between two barriers are recorded. No result may depend on it. A driver that runs
/// commands one after the other in the recorded order hides a missing barrier, so tests record them in other orders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    AsRecorded,
    Reversed,
    /// A random order that follows from this seed.
    Shuffled(u64),
}

/// How a device's commands are recorded and its buffers allocated; see [`Device::rehearse`](super::Device::rehearse).
#[derive(Debug, Clone, Default)]
pub struct Rehearsal {
    pub order: Order,
    /// A shader and its address, or "copy" and "to", or "fill" and "buffer", whose accesses the recorder ignores: it
    /// simulates a mistake in deriving barriers.
    pub forgotten: Option<(&'static str, &'static str)>,
    /// Whether every buffer is an allocation of its own, so that a layer that checks addresses knows where each buffer
    /// ends.
    pub separate_buffers: bool,
}

impl Rehearsal {
    pub(super) fn forgets(&self, command: &str, pointer: &str) -> bool {
        self.forgotten == Some((command, pointer))
    }
}
