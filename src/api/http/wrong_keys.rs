//! Counts the wrong keys of each address. After some wrong keys, the refusal of each additional one is delayed longer.
//!
//! Delay is the only measure against guessed keys. A valid key is never delayed: many clients share an address, and
//! one of them must not be able to lock out the others. This module computes the delays without a clock;
//! `middleware::authenticate` waits.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::engine::ClientId;

/// The number of wrong keys of an address that are refused without delay, for mistakes in a configuration.
const FREE: u32 = 5;
/// How often the pause doubles from the first one to the longest.
const DOUBLINGS: u32 = 4;
/// The time without another wrong key after which one wrong key of an address is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30);
/// The maximum number of known addresses. An additional address replaces the one without wrong keys for the longest time. A
/// client with that many addresses need not use any of them twice.
const MAX_ADDRESSES: usize = 4096;

pub(in crate::api) struct WrongKeys {
    longest: Duration,
    by_address: Mutex<HashMap<ClientId, Wrong>>,
}

struct Wrong {
    /// The number of wrong keys, up to the first one with the longest pause. The number does not grow beyond it, so it is
    /// forgotten within a few minutes.
    count: u32,
    last: Instant,
}

impl WrongKeys {
    /// `longest` is the longest pause; zero = no delay.
    pub fn new(longest: Duration) -> Self {
        Self { longest, by_address: Mutex::default() }
    }

    /// Notes a wrong key. Returns how long its refusal is to wait.
    pub fn pause(&self, address: ClientId, now: Instant) -> Duration {
        let mut by_address = self.by_address.lock().expect("nothing panics under this lock");
        if by_address.len() >= MAX_ADDRESSES && !by_address.contains_key(&address) {
            let quiet = by_address.iter().min_by_key(|(_, wrong)| wrong.last).map(|(address, _)| *address);
            quiet.and_then(|address| by_address.remove(&address));
        }
        let wrong = by_address.entry(address).or_insert(Wrong { count: 0, last: now });
        let quiet_for = now.saturating_duration_since(wrong.last);
        let forgotten = quiet_for.as_secs() / FORGOTTEN_AFTER.as_secs();
        let left = wrong.count.saturating_sub(forgotten.try_into().unwrap_or(u32::MAX));
        wrong.count = (left + 1).min(FREE + 1 + DOUBLINGS);
        wrong.last = now;
        match wrong.count.checked_sub(FREE + 1) {
            None => Duration::ZERO,
            Some(doublings) => self.longest / 2u32.pow(DOUBLINGS - doublings),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_are_forgiven() {
        let wrong = WrongKeys::new(Duration::from_secs(2));
        let start = Instant::now();
        let pauses = |address, at: u64, n: usize| -> Vec<u128> {
            let now = start + Duration::from_secs(at);
            (0..n).map(|_| wrong.pause(address, now).as_millis()).collect()
        };
        assert_eq!(pauses(1, 0, 12), [0, 0, 0, 0, 0, 125, 250, 500, 1000, 2000, 2000, 2000]);
        assert_eq!(pauses(2, 0, 6), [0, 0, 0, 0, 0, 125], "another address is another's");
        // In a minute, two wrong keys are forgotten, and one is new.
        assert_eq!(pauses(1, 60, 1), [1000]);
        assert_eq!(pauses(1, 60 + 29, 1), [2000], "half a minute is not over");
        assert_eq!(pauses(1, 89 + 300, 6), [0, 0, 0, 0, 0, 125], "as if nothing had been");
    }

    #[test]
    fn without_a_pause_nobody_waits() {
        let wrong = WrongKeys::new(Duration::ZERO);
        assert!((0..99).all(|_| wrong.pause(1, Instant::now()).is_zero()));
    }

    #[test]
    fn addresses_are_bounded_and_who_goes_on_is_not_forgotten() {
        let seed = 0x401;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let wrong = WrongKeys::new(Duration::from_secs(2));
        let mut now = Instant::now();
        let mut last = Duration::ZERO;
        for _ in 0..3 * MAX_ADDRESSES {
            now += Duration::from_millis(1);
            let other = rng.random();
            wrong.pause(other, now);
            last = wrong.pause(7, now);
            assert!(wrong.by_address.lock().unwrap().len() <= MAX_ADDRESSES);
        }
        assert_eq!(last, Duration::from_secs(2));
    }
}
