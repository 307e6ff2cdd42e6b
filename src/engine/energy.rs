//! The energy of answers: what the machine used for a step is shared among the step's sequences, by their tokens in it.
//!
//! A span is a time in which the engine always has work. The first step of a span has what the machine used from the
//! span's begin to the step's end, and every other step what it used since the end of the step before. So the shares of
//! all answers of a span add up to what the machine used in it, however the steps overlap. A step may be under way when
//! one of its answers ends: then the others have its energy, or the next step if there are no others. An answer that is
//! cancelled takes along what it has had.
//!
//! What the machine uses between spans, for a load, and for a step that is lost belongs to no answer. The counter knows
//! the machine and not the program: idle draw and other programs are in it.

use std::fmt::Debug;
use std::sync::Arc;

/// Counts the energy that the machine uses.
pub trait EnergyCounter: Debug + Send + Sync {
    /// The name of what is counted, for reports.
    fn source(&self) -> &'static str;

    /// The energy up to now; none while it cannot be read. The engine calls this function at the begin of a span and at
    /// the end of each step. It returns at once, or within 2 ms if it was not called for a second.
    fn read(&self) -> Option<Energy>;
}

/// A reading of an [`EnergyCounter`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Energy {
    /// Joules since the counter was opened. A reading may be a little less than the one before, where that one was
    /// ahead of the counter.
    pub joules: f64,
    /// How often energy went by uncounted. Two readings with different numbers have no known difference.
    pub gaps: u32,
}

/// The energy of an answer so far, in joules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Joules {
    pub source: &'static str,
    /// Energy up to the first id.
    pub prompt: f64,
    /// Energy from the first id on.
    pub predicted: f64,
}

/// What of a counter's energy is given to steps already.
#[derive(Debug)]
pub(super) struct Ledger {
    counter: Option<Arc<dyn EnergyCounter>>,
    /// The reading up to which energy is given to steps; none outside of a span. The inner one is none if the counter
    /// could not be read.
    given: Option<Option<Energy>>,
}

impl Ledger {
    pub(super) fn new(counter: Option<Arc<dyn EnergyCounter>>) -> Self {
        Self { counter, given: None }
    }

    /// The energy of an answer that begins; none if nothing counts it.
    pub(super) fn nothing_yet(&self) -> Option<Joules> {
        let source = self.counter.as_ref()?.source();
        Some(Joules { source, prompt: 0.0, predicted: 0.0 })
    }

    /// Begins a span, if none has begun.
    pub(super) fn begin_span(&mut self) {
        if let Some(counter) = &self.counter {
            self.given.get_or_insert_with(|| counter.read());
        }
    }

    pub(super) fn end_span(&mut self) {
        self.given = None;
    }

    /// The joules of the step that has just ended; none if they are not known.
    pub(super) fn settle(&mut self) -> Option<f64> {
        let now = self.counter.as_ref()?.read();
        let before = self.given.replace(now)??;
        let now = now.filter(|now| now.gaps == before.gaps)?;
        let spent = (now.joules - before.joules).max(0.0);
        self.given = Some(Some(Energy { joules: before.joules + spent, ..now }));
        Some(spent)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A counter whose readings are written down.
    #[derive(Debug)]
    struct Scripted(Mutex<Vec<Option<Energy>>>);

    impl EnergyCounter for Scripted {
        fn source(&self) -> &'static str {
            "script"
        }

        fn read(&self) -> Option<Energy> {
            self.0.lock().unwrap().remove(0)
        }
    }

    fn ledger(readings: &[Option<(f64, u32)>]) -> Ledger {
        let energy = |reading: &Option<(f64, u32)>| reading.map(|(joules, gaps)| Energy { joules, gaps });
        Ledger::new(Some(Arc::new(Scripted(Mutex::new(readings.iter().map(energy).collect())))))
    }

    #[test]
    fn a_reading_that_was_ahead_is_made_up_for_by_the_next_steps() {
        let mut ledger = ledger(&[Some((10.0, 0)), Some((14.0, 0)), Some((13.0, 0)), Some((15.0, 0))]);
        ledger.begin_span();
        ledger.begin_span(); // changes nothing: the span has begun
        assert_eq!([ledger.settle(), ledger.settle(), ledger.settle()], [Some(4.0), Some(0.0), Some(1.0)]);
    }

    #[test]
    fn no_energy_is_known_across_a_gap_or_beside_a_reading_that_failed() {
        let mut ledger =
            ledger(&[Some((1.0, 0)), Some((2.0, 1)), Some((4.0, 1)), None, Some((5.0, 2)), Some((7.0, 2))]);
        ledger.begin_span();
        let settled: Vec<_> = (0..5).map(|_| ledger.settle()).collect();
        assert_eq!(settled, [None, Some(2.0), None, None, Some(2.0)]);
    }

    #[test]
    fn what_an_idle_machine_uses_is_in_no_step() {
        let mut ledger = ledger(&[Some((1.0, 0)), Some((2.0, 0)), Some((50.0, 0)), Some((53.0, 0))]);
        for joules in [1.0, 3.0] {
            ledger.begin_span();
            assert_eq!(ledger.settle(), Some(joules));
            ledger.end_span();
        }
    }
}
