//! The turns of several engines that share a device.
//!
//! Each engine computes its steps in its own device process. If their steps ran at the same time, each would take as long as
//! both, and neither engine could predict its steps. So an engine takes the lease before it submits a step, and gives it
//! back when no step is in flight. Engines get it in the order in which they asked. A load takes it too, while it measures
//! the device.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How often an engine that waits looks whether it must end.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A device that several engines share.
#[derive(Debug, Default)]
pub struct Lease {
    /// The engine that has the device is the first; the others wait.
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    numbers: VecDeque<u64>,
    next: u64,
    /// The number of engines that have work.
    working: usize,
}

/// An engine that has work, until this is dropped.
#[derive(Debug)]
pub(super) struct Working(Arc<Lease>);

/// The right to compute, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    lease: Arc<Lease>,
    number: u64,
}

impl Lease {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under this lock")
    }

    /// Whether an engine has the device now.
    pub(super) fn is_taken(&self) -> bool {
        !self.lock().numbers.is_empty()
    }

    /// Counts an engine that has work.
    pub(super) fn begin(self: &Arc<Self>) -> Working {
        self.lock().working += 1;
        Working(Arc::clone(self))
    }

    /// Waits for the device, until `must_end`. `None` = it must end. A step of another engine takes no longer than a device
    /// may hang, and a load measures for some ten seconds.
    pub fn take(self: &Arc<Self>, must_end: impl Fn() -> bool) -> Option<Turn> {
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        queue.numbers.push_back(number);
        // Dropping the turn also ends the wait.
        let turn = Turn { lease: Arc::clone(self), number };
        while queue.numbers.front() != Some(&number) {
            if must_end() {
                drop(queue);
                return None;
            }
            queue = self.changed.wait_timeout(queue, LOOK_AGAIN).expect("nothing panics under this lock").0;
        }
        Some(turn)
    }
}

impl Working {
    /// The number of other engines that have work.
    pub fn others(&self) -> usize {
        self.0.lock().working - 1
    }
}

impl Turn {
    /// Whether another engine, or a load, waits for the device.
    pub(super) fn is_wanted(&self) -> bool {
        self.lease.lock().numbers.len() > 1
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.lock().working -= 1;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.lease.lock().numbers.retain(|number| *number != self.number);
        self.lease.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn turns_are_taken_one_at_a_time_in_order() {
        let lease = Arc::new(Lease::default());
        let first = lease.take(|| false).expect("it is free");
        assert!(lease.is_taken() && !first.is_wanted());
        let (done, order) = mpsc::channel();
        let mut threads = Vec::new();
        for i in 0..3 {
            let (lease, done) = (Arc::clone(&lease), done.clone());
            let waiting = Arc::clone(&lease);
            threads.push(thread::spawn(move || {
                let _turn = lease.take(|| false).expect("its turn comes");
                done.send(i).expect("the test waits");
            }));
            while waiting.lock().numbers.len() < i + 2 {
                thread::yield_now();
            }
        }
        assert!(first.is_wanted());
        assert!(order.try_recv().is_err(), "the first has not given it back");
        // One that must end leaves the queue.
        assert!(lease.take(|| true).is_none());
        drop(first);
        assert_eq!(order.iter().take(3).collect::<Vec<_>>(), [0, 1, 2]);
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert!(!lease.is_taken());
    }

    #[test]
    fn engines_with_work_are_counted() {
        let lease = Arc::new(Lease::default());
        let (first, second) = (lease.begin(), lease.begin());
        assert_eq!((first.others(), second.others()), (1, 1));
        drop(second);
        assert_eq!(first.others(), 0);
    }
}
