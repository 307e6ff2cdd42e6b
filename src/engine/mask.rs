//! Masks that restrict the ids that may come next in an answer, for example to those that a grammar allows.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Decides which ids may come next in one answer.
///
/// The engine requests a mask for each id, and passes all ids before it: a sequence with a mask has no step in flight
/// while its next step is prepared. The engine requests the mask while the device computes the layers of that step.
pub trait TokenMask: Send {
    /// The ids that may follow `answer`: bit `id % 32` of word `id / 32` is set for each of them. At least one bit must
    /// be set, and the words must cover the whole vocabulary. `answer` has one id more than at the last call, or the
    /// same ids if the draw was lost.
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]>;

    /// Whether every id may come from now on, after `answer`. The engine calls this function after each id. Once it
    /// returns true, the engine drops the mask: the answer's steps overlap again, and it may get draft tokens.
    fn is_free(&mut self, answer: &[u32]) -> bool;

    /// The time that this answer's masks took since the last call, including all work for them. All other answers wait
    /// in that time, so the scheduler charges it to the client.
    fn take_time(&mut self) -> Duration {
        Duration::ZERO
    }

    /// A copy for another answer. Its time starts at 0.
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

/// The mask of one answer. All steps that draw ids of the answer share it.
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

    /// The mask of the id after `answer`, which is computed later.
    pub(super) fn after(&self, answer: &[u32]) -> PendingMask {
        PendingMask { mask: Arc::clone(&self.0), answer: answer.to_vec() }
    }
}

/// The mask of one draw of a step. The engine computes it while the device computes the layers of the step.
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

/// A clone is the mask of another answer.
impl Clone for SharedMask {
    fn clone(&self) -> Self {
        Self::new(self.0.lock().expect("a grammar does not panic").clone())
    }
}
