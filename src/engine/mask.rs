//! Masks say which ids may come next in an answer. A grammar is the usual reason for a mask.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Says which ids may come next in one answer.
///
/// The engine asks for a mask once for each id, and shows it all ids before: a sequence with a mask has no step in
/// flight while its next step is prepared. The engine asks when the device computes the layers of that step.
pub trait TokenMask: Send {
    /// The ids that may follow `answer`: bit `id % 32` of word `id / 32` is set for each of them. At least one bit is
    /// set, and the words cover the whole vocabulary. `answer` has one id more than at the last call, or the same ids
    /// if that draw was lost.
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]>;

    /// Whether every id may follow `answer` from now on. The engine asks after each id. An answer that has become free
    /// runs ahead of the host again, and may get draft tokens.
    fn is_free(&mut self, answer: &[u32]) -> bool;

    /// The time that this answer's masks took since the last call, with all work that they needed. All other answers
    /// wait meanwhile, so the scheduler counts that time against the client.
    fn take_time(&mut self) -> Duration {
        Duration::ZERO
    }

    /// A copy for another answer. The copy has taken no time yet.
    fn boxed_clone(&self) -> Box<dyn TokenMask>;
}

impl Clone for Box<dyn TokenMask> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

impl fmt::Debug for dyn TokenMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenMask")
    }
}

/// The mask of one answer, which all steps that draw its ids share.
#[derive(Debug)]
pub struct SharedMask(Arc<Mutex<Box<dyn TokenMask>>>);

impl SharedMask {
    pub fn new(mask: Box<dyn TokenMask>) -> Self {
        Self(Arc::new(Mutex::new(mask)))
    }

    pub(super) fn is_free(&self, answer: &[u32]) -> bool {
        self.0.lock().expect("a grammar does not panic").is_free(answer)
    }

    pub(super) fn take_time(&self) -> Duration {
        self.0.lock().expect("a grammar does not panic").take_time()
    }

    /// The mask of the id behind `answer`, to be made later.
    pub(super) fn behind(&self, answer: &[u32]) -> PendingMask {
        PendingMask { mask: Arc::clone(&self.0), answer: answer.to_vec() }
    }
}

/// The mask of one draw of a step. The engine makes it when the layers of the step are under way.
#[derive(Debug)]
pub(super) struct PendingMask {
    mask: Arc<Mutex<Box<dyn TokenMask>>>,
    answer: Vec<u32>,
}

impl PendingMask {
    pub(super) fn words(&self) -> Arc<[u32]> {
        self.mask.lock().expect("a grammar does not panic").mask(&self.answer)
    }
}

/// A clone belongs to another answer.
impl Clone for SharedMask {
    fn clone(&self) -> Self {
        Self::new(self.0.lock().expect("a grammar does not panic").clone())
    }
}
