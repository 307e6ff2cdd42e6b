//! Whose a request is, and what it may take: what the queue, the scheduler and the prefix cache go by.

use std::fmt;
use std::sync::Arc;

/// Whose request it is, as far as fairness goes: an API key, or a connection.
pub type ClientId = u64;

/// Who may share what is computed: a prompt finds in the prefix cache what came with the same salt, and nothing else. It is
/// compared byte by byte; the empty one, the default, is as good as any other.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt(Arc<[u8]>);

impl CacheSalt {
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self(bytes.into())
    }
}

/// Not the bytes: who knows them finds what others have asked.
impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheSalt({} bytes)", self.0.len())
    }
}

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Interactive,
    /// Gets on where no interactive request is there, and what it leaves in the prefix cache goes before what those left.
    Background,
}
