//! Counts of recorded commands, and GPU time per kernel.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::placement::Class;

/// GPU time per kernel.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Kernel -> (dispatches, nanoseconds).
    pub kernels: BTreeMap<String, (u64, u64)>,
    /// Dispatches that were not timed, because their command buffers had no queries left.
    pub untimed: u64,
}

/// Dispatches, copies, barriers and bytes of recorded commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub dispatches: u64,
    pub copies: u64,
    pub barriers: u64,
    /// Bytes that commands declare to read or write, by [`Class`]. A declared range counts as a whole, even if the
    /// command accesses only a part of it. A range that is both read and written counts once.
    pub declared: [u64; Class::ALL.len()],
}

impl Counts {
    /// Declared bytes of all weights.
    pub fn weight_bytes(&self) -> u64 {
        Class::ALL.iter().filter(|class| class.is_weights()).map(|class| self.declared[*class as usize]).sum()
    }

    pub fn kv_bytes(&self) -> u64 {
        self.declared[Class::KvCache as usize]
    }

    /// Declared bytes of activations and staging.
    pub fn activation_bytes(&self) -> u64 {
        self.declared.iter().sum::<u64>() - self.weight_bytes() - self.kv_bytes()
    }

    pub(super) fn declare(&mut self, class: Class, bytes: u64) {
        self.declared[class as usize] += bytes;
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        let Counts { dispatches, copies, barriers, declared } = other;
        self.dispatches += dispatches;
        self.copies += copies;
        self.barriers += barriers;
        self.declared.iter_mut().zip(declared).for_each(|(sum, bytes)| *sum += bytes);
    }
}

impl std::ops::Sub for Counts {
    type Output = Counts;

    /// The counts between two readings of a running sum.
    fn sub(mut self, before: Counts) -> Counts {
        self.dispatches -= before.dispatches;
        self.copies -= before.copies;
        self.barriers -= before.barriers;
        self.declared.iter_mut().zip(before.declared).for_each(|(now, before)| *now -= before);
        self
    }
}

impl std::ops::Div<u64> for Counts {
    type Output = Counts;

    /// The average over `by`, rounded down.
    fn div(mut self, by: u64) -> Counts {
        self.dispatches /= by;
        self.copies /= by;
        self.barriers /= by;
        self.declared.iter_mut().for_each(|bytes| *bytes /= by);
        self
    }
}
