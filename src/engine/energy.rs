//! The energy of answers. The energy that the machine uses for a step is shared among the step's sequences, in
//! proportion to their tokens in the step.
//!
//! A span is a period in which the engine always has work. The first step of a span gets the energy from the beginning
//! of the span to the end of the step. Every other step gets the energy since the end of the step before. So the shares
//! of all answers of a span add up to the energy of the span, even if steps overlap. If an answer ends while a step
//! computes it, the step's other answers get its share; without others, the next step gets the energy. A cancelled
//! answer keeps the energy that it got until then.
//!
//! The energy between spans, of a load of the model, and of a step that is lost belongs to no answer. The counter
//! measures the whole machine, so it includes the idle power and other programs.

use std::fmt::Debug;
use std::sync::Arc;

/// Counts the energy that the machine uses.
pub trait EnergyCounter: Debug + Send + Sync {
    /// The name of the measured source, for reports.
    fn source(&self) -> &'static str;

    /// The energy until now, or `None` if it cannot be read. The engine calls this function at the beginning of a span
    /// and at the end of each step. It does not block; only the first call after a second without calls may take up to
    /// 2 ms.
    fn read(&self) -> Option<Energy>;
}

/// A reading of an [`EnergyCounter`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Energy {
    /// Joules since the counter was opened. A reading may be slightly lower than the one before, if that one was an
    /// estimate that was too high.
    pub joules: f64,
    /// How often energy was not measured. If two readings have different numbers of gaps, the energy between them is
    /// unknown.
    pub gaps: u32,
}

/// The energy of an answer until now, in joules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Joules {
    pub source: &'static str,
    /// Energy up to the first id.
    pub prompt: f64,
    /// Energy from the first id on.
    pub predicted: f64,
}

/// Divides the energy of a counter into the energy of steps.
#[derive(Debug)]
pub(super) struct Ledger {
    counter: Option<Arc<dyn EnergyCounter>>,
    /// The reading up to which steps have got the energy. The outer `Option` is `None` outside a span. The inner one is
    /// `None` if the counter could not be read.
    last: Option<Option<Energy>>,
}

impl Ledger {
    pub(super) fn new(counter: Option<Arc<dyn EnergyCounter>>) -> Self {
        Self { counter, last: None }
    }

    /// The energy of an answer that begins, or `None` if there is no counter.
    pub(super) fn zero(&self) -> Option<Joules> {
        let source = self.counter.as_ref()?.source();
        Some(Joules { source, prompt: 0.0, predicted: 0.0 })
    }

    /// Begins a span, if no span has begun.
    pub(super) fn begin_span(&mut self) {
        if let Some(counter) = &self.counter {
            self.last.get_or_insert_with(|| counter.read());
        }
    }

    pub(super) fn end_span(&mut self) {
        self.last = None;
    }

    /// The joules of the step that has just ended, or `None` if they are unknown.
    pub(super) fn take_step(&mut self) -> Option<f64> {
        let now = self.counter.as_ref()?.read();
        let before = self.last.replace(now)??;
        let now = now.filter(|now| now.gaps == before.gaps)?;
        let spent = (now.joules - before.joules).max(0.0);
        self.last = Some(Some(Energy { joules: before.joules + spent, ..now }));
        Some(spent)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A counter that returns the given readings in order.
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
    fn a_reading_below_the_one_before_counts_as_zero_and_reduces_later_steps() {
        let mut ledger = ledger(&[Some((10.0, 0)), Some((14.0, 0)), Some((13.0, 0)), Some((15.0, 0))]);
        ledger.begin_span();
        ledger.begin_span(); // changes nothing: the span has begun
        assert_eq!(
            [ledger.take_step(), ledger.take_step(), ledger.take_step()],
            [Some(4.0), Some(0.0), Some(1.0)]
        );
    }

    #[test]
    fn the_energy_is_unknown_across_a_gap_and_next_to_a_failed_reading() {
        let mut ledger =
            ledger(&[Some((1.0, 0)), Some((2.0, 1)), Some((4.0, 1)), None, Some((5.0, 2)), Some((7.0, 2))]);
        ledger.begin_span();
        let joules: Vec<_> = (0..5).map(|_| ledger.take_step()).collect();
        assert_eq!(joules, [None, Some(2.0), None, None, Some(2.0)]);
    }

    #[test]
    fn the_energy_between_spans_belongs_to_no_step() {
        let mut ledger = ledger(&[Some((1.0, 0)), Some((2.0, 0)), Some((50.0, 0)), Some((53.0, 0))]);
        for joules in [1.0, 3.0] {
            ledger.begin_span();
            assert_eq!(ledger.take_step(), Some(joules));
            ledger.end_span();
        }
    }
}
