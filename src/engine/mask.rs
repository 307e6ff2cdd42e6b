//! Masks that restrict the ids that may come next in an answer, for example to those that a grammar allows.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Whether a mask restricts the next id of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restriction {
    /// Only the ids of the mask may come.
    Binding,
    /// Every id may come. A later id may make the mask binding again.
    Idle,
    /// Every id may come from now on.
    Over,
}

/// Decides which ids may come next in one answer.
///
/// While the mask is binding, the engine requests a mask for each id, and passes all ids before it: the sequence has no
/// step in flight while its next step is prepared. The engine requests the mask while the device computes the layers of
/// that step. While the mask is idle, steps overlap, and draft tokens may come. If an id then makes the mask binding, the
/// ids that steps in flight draw after it are discarded and drawn again.
pub trait TokenMask: Send {
    /// The ids that may follow `answer`: bit `id % 32` of word `id / 32` is set for each of them. At least one bit must
    /// be set, and the words must cover the whole vocabulary. `answer` has one id more than at the last call, or the
    /// same ids if the draw was lost.
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]>;

    /// Whether the id after `answer` is restricted. The engine calls this function before the first id and after each
    /// id, until it returns [`Restriction::Over`].
    fn restriction(&mut self, answer: &[u32]) -> Restriction;

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
pub struct SharedMask {
    mask: Arc<Mutex<Box<dyn TokenMask>>>,
    /// What the mask said after the last id.
    restriction: Restriction,
}

impl SharedMask {
    /// The mask of an answer that has no ids yet.
    pub fn new(mut mask: Box<dyn TokenMask>) -> Self {
        let restriction = mask.restriction(&[]);
        Self { mask: Arc::new(Mutex::new(mask)), restriction }
    }

    pub(super) fn is_binding(&self) -> bool {
        self.restriction == Restriction::Binding
    }

    /// Says whether the id after `answer` is restricted. `answer` has a new id at its end.
    pub(super) fn update(&mut self, answer: &[u32]) -> Restriction {
        self.restriction = self.mask.lock().expect("a grammar does not panic").restriction(answer);
        self.restriction
    }

    pub(super) fn take_time(&self) -> Duration {
        self.mask.lock().expect("a grammar does not panic").take_time()
    }

    /// The mask of the id after `answer`, which is computed later.
    pub(super) fn after(&self, answer: &[u32]) -> PendingMask {
        PendingMask { mask: Arc::clone(&self.mask), answer: answer.to_vec() }
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
        let mask = self.mask.lock().expect("a grammar does not panic").clone();
        Self { mask: Arc::new(Mutex::new(mask)), restriction: self.restriction }
    }
}
