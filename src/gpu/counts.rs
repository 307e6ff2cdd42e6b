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
    /// Bytes that commands read or write, by [`Class`]: whole ranges, unless the caller says how many bytes a command
    /// accesses ([`Buffer::accessing`](super::Buffer::accessing)). A range that is both read and written counts once.
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

    /// Each count combined with the same count of `other`.
    fn with(self, other: Counts, combine: impl Fn(u64, u64) -> u64) -> Counts {
        Counts {
            dispatches: combine(self.dispatches, other.dispatches),
            copies: combine(self.copies, other.copies),
            barriers: combine(self.barriers, other.barriers),
            declared: std::array::from_fn(|class| combine(self.declared[class], other.declared[class])),
        }
    }

    pub(super) fn declare(&mut self, class: Class, bytes: u64) {
        self.declared[class as usize] += bytes;
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        *self = self.with(other, |sum, n| sum + n);
    }
}

impl std::ops::Sub for Counts {
    type Output = Counts;

    /// The counts between two readings of a running sum.
    fn sub(self, before: Counts) -> Counts {
        self.with(before, |now, before| now - before)
    }
}

impl std::ops::Div<u64> for Counts {
    type Output = Counts;

    /// The average over `by`, rounded down.
    fn div(self, by: u64) -> Counts {
        self.with(self, |n, _| n / by)
    }
}
