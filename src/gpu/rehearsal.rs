//! How tests have commands recorded and buffers laid out: in ways that must change nothing, or that must be noticed.

/// In what order the commands between two barriers are handed to the device: nothing may depend on it. Drivers that run
/// them one after the other, as they were recorded, hide a barrier that is missing; tests record them in other orders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    AsRecorded,
    Reversed,
    /// By chance, from this seed.
    Shuffled(u64),
}

/// How a device's commands are recorded and its buffers are laid, for tests; see [`Device::rehearse`](super::Device::rehearse).
#[derive(Debug, Clone, Default)]
pub struct Rehearsal {
    pub order: Order,
    /// A shader and its address, or "copy" and "to", or "fill" and "buffer", whose accesses are not noted: what a mistake in
    /// their derivation would be.
    pub forgotten: Option<(&'static str, &'static str)>,
    /// Whether every buffer is an allocation of its own, so that a layer that checks addresses sees where each ends.
    pub separate_buffers: bool,
}

impl Rehearsal {
    pub(super) fn forgets(&self, command: &str, pointer: &str) -> bool {
        self.forgotten == Some((command, pointer))
    }
}
