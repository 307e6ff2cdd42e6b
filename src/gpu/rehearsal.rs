//! Test options that change how commands are recorded and how buffers are allocated.

/// The order in which the commands between two barriers are recorded. No result may depend on it. A driver that runs
/// commands sequentially in the recorded order hides a missing barrier, so tests record them in other orders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    AsRecorded,
    Reversed,
    /// A pseudorandom order with this seed.
    Shuffled(u64),
}

/// How a device's commands are recorded and its buffers allocated; see [`Device::rehearse`](super::Device::rehearse).
#[derive(Debug, Clone, Default)]
pub struct Rehearsal {
    pub order: Order,
    /// The recorder ignores accesses of this shader through this address, or of ("copy", "to") or ("fill", "buffer").
    /// That simulates a missing barrier.
    pub forgotten: Option<(&'static str, &'static str)>,
    /// Whether every buffer gets its own allocation, so that a layer that checks addresses knows where each buffer
    /// ends.
    pub separate_buffers: bool,
    /// Whether every buffer ends at a page that no one may access. Only a device that imports host memory can do this;
    /// lavapipe does.
    pub guard_pages: bool,
}

impl Rehearsal {
    /// Whether every buffer is the only one in its chunk.
    pub(super) fn has_separate_buffers(&self) -> bool {
        self.separate_buffers || self.guard_pages
    }

    pub(super) fn forgets(&self, command: &str, pointer: &str) -> bool {
        self.forgotten == Some((command, pointer))
    }
}
