//! Which ids may come next in an answer, as whoever asked for it says: a grammar, mostly.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rayon::prelude::*;

use super::scheduler::Step;
use crate::model::{Runner, RunnerError, Ticket};

/// Says which ids may come next in one answer, as a grammar has it.
///
/// It is asked once for each id, and sees all that came before: a sequence with a mask has no step in flight while its
/// next one is prepared. It is asked when the layers of that step are under way on the device.
pub trait TokenMask: Send {
    /// Bit `id % 32` of word `id / 32` is set where an id may follow `answer`, at least one, for the whole vocabulary.
    /// `answer` is what it was at the last call and one id more, or the same again, where that draw was lost.
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]>;

    /// Whether every id may follow `answer`, and will from then on. Asked when an id has come: an answer that has become free
    /// runs ahead of the host again, and is guessed.
    fn is_free(&mut self, answer: &[u32]) -> bool;

    /// How long its masks took since this was last asked, and what they follow from: all others wait meanwhile, so it is
    /// counted against its client.
    fn take_time(&mut self) -> Duration {
        Duration::ZERO
    }

    /// A copy for another answer, which has taken no time yet.
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

/// The mask of one answer, which the steps that draw it share.
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

    /// The mask of what may follow `answer`, to be made later.
    pub(super) fn behind(&self, answer: &[u32]) -> PendingMask {
        PendingMask { mask: Arc::clone(&self.0), answer: answer.to_vec() }
    }
}

/// The mask of one draw of a step, which is made when the step's layers are under way.
#[derive(Debug)]
pub(super) struct PendingMask {
    mask: Arc<Mutex<Box<dyn TokenMask>>>,
    answer: Vec<u32>,
}

impl PendingMask {
    fn words(&self) -> Arc<[u32]> {
        self.mask.lock().expect("a grammar does not panic").mask(&self.answer)
    }
}

/// Hands a step to the runner, and pushes the masks of its draws: these are made while the device computes the layers.
pub fn submit(runner: &mut dyn Runner, step: &Step) -> Result<Ticket, RunnerError> {
    let ticket = runner.submit(&step.batch, &step.sampling)?;
    if !step.masks.is_empty() {
        // In parallel, for each is some grammar's work.
        let words: Vec<_> = step.masks.par_iter().map(PendingMask::words).collect();
        runner.masks(&ticket, &words)?;
    }
    Ok(ticket)
}

/// A clone is the mask of another answer.
impl Clone for SharedMask {
    fn clone(&self) -> Self {
        Self::new(self.0.lock().expect("a grammar does not panic").clone())
    }
}
