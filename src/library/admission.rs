//! Decides which model may be loaded, and which idle models are unloaded for it. No clock and no locks: the caller passes
//! the state and the time.
//!
//! A model is loaded if it fits in the memory that no other model holds. Otherwise idle models are unloaded, the cheapest
//! to lose first: those that were idle for long, and load fast. Never unloaded are models with requests, pinned models, and
//! a model that is being loaded.
//!
//! If a model cannot be loaded yet, its requests wait. After [`Turns::patience`], the models in their way get no new
//! requests, so that every model gets its turn.

use std::time::{Duration, Instant};

/// The shortest load that [`Slot::loss`] counts, so that no model is free to lose.
const LEAST_LOAD: Duration = Duration::from_millis(1);

/// How requests for several models share the device. `patience` must be longer than `settle`.
#[derive(Debug, Clone, Copy)]
pub struct Turns {
    /// How long a model must be idle before another one may take its memory.
    pub settle: Duration,
    /// After this wait, a request takes the memory of an idle model at once, and a busy model in its way gets no new
    /// requests. So two clients with two models do not swap them at every request.
    pub patience: Duration,
    /// How long a request waits for memory that other models hold.
    pub longest: Duration,
    /// For so long after a load that failed, requests for the model fail without another try.
    pub retry: Duration,
    /// How long an unload may take, which may have to wait for a load of the same model. If it takes longer, the engine is
    /// aborted, and its end may take as long again.
    pub unload: Duration,
    /// The maximum number of waiting requests, which keep their bodies, and of one client's.
    pub queue: usize,
    pub queue_of_one: usize,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            settle: Duration::from_millis(500),
            patience: Duration::from_secs(10),
            longest: Duration::from_secs(120),
            retry: Duration::from_secs(5),
            unload: Duration::from_secs(60),
            queue: 64,
            queue_of_one: 16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotState {
    Absent,
    /// It is being loaded, and its memory is reserved.
    Loading,
    Resident,
    /// It is being unloaded.
    Leaving,
}

/// One model, as far as its memory is concerned.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub(super) state: SlotState,
    /// Never unloaded for another model.
    pub(super) is_pinned: bool,
    /// It is no longer served. It is not loaded again, and it is unloaded once no request uses it.
    pub(super) is_removed: bool,
    /// Its engine was told to end and did not. It holds its memory until it ends.
    pub(super) is_stuck: bool,
    /// Bytes of device memory that it takes; `None` = not yet planned.
    pub(super) bytes: Option<u64>,
    /// Requests that use it.
    pub(super) users: usize,
    pub(super) last_used: Instant,
    /// How long its last load took.
    pub(super) load_time: Duration,
    /// When each request that waits for it began to wait.
    pub(super) waiting: Vec<Instant>,
    /// The last load that failed.
    pub(super) failure: Option<Failure>,
}

/// A load that failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    /// Its number among the failed loads of the model.
    pub(super) number: u64,
    pub(super) problem: String,
    pub(super) at: Instant,
}

/// What a request for a model that is not loaded has to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Unload these models, and then load.
    Swap(Vec<usize>),
    Wait,
}

impl Slot {
    pub(super) fn new(is_pinned: bool) -> Self {
        Self {
            state: SlotState::Absent,
            is_pinned,
            is_removed: false,
            is_stuck: false,
            bytes: None,
            users: 0,
            last_used: Instant::now(),
            load_time: LEAST_LOAD,
            waiting: Vec::new(),
            failure: None,
        }
    }

    /// Bytes of device memory that it holds now.
    pub(super) fn held(&self) -> u64 {
        if self.state == SlotState::Absent { 0 } else { self.bytes.unwrap_or(0) }
    }

    pub(super) fn loaded(&mut self) {
        (self.state, self.last_used) = (SlotState::Resident, Instant::now());
    }

    pub(super) fn fail(&mut self, problem: String) {
        let number = 1 + self.failure.as_ref().map_or(0, |failure| failure.number);
        self.state = SlotState::Absent;
        self.failure = Some(Failure { number, problem, at: Instant::now() });
    }

    /// How much is lost if the model is unloaded: the time of its load, divided by the time that it was idle.
    fn loss(&self, now: Instant) -> f64 {
        let idle = now.saturating_duration_since(self.last_used).max(LEAST_LOAD);
        self.load_time.max(LEAST_LOAD).as_secs_f64() / idle.as_secs_f64()
    }

    fn oldest_wait(&self) -> Option<Instant> {
        self.waiting.iter().min().copied()
    }
}

/// Decides for a request for `wanted`, which is not loaded. Its bytes must be planned if `budget` is known.
pub(super) fn decide(slots: &[Slot], wanted: usize, budget: u64, turns: Turns, now: Instant) -> Decision {
    let Some(leaving) = leaving_now(slots, wanted, budget, turns, now) else { return Decision::Wait };
    // Free memory is for every model. Idle models leave for the model that has waited the longest of those that they suffice
    // for.
    let is_older = |other: usize| slots[other].oldest_wait() < slots[wanted].oldest_wait();
    let waiting = (0..slots.len()).filter(|i| *i != wanted && slots[*i].oldest_wait().is_some());
    let mut older = waiting.filter(|i| is_older(*i));
    match leaving.is_empty() || !older.any(|i| leaving_now(slots, i, budget, turns, now).is_some()) {
        true => Decision::Swap(leaving),
        false => Decision::Wait,
    }
}

/// The idle models that must leave so that `wanted` can be loaded now. `None` = it cannot, or need not, be loaded.
fn leaving_now(slots: &[Slot], wanted: usize, budget: u64, turns: Turns, now: Instant) -> Option<Vec<usize>> {
    if slots[wanted].state != SlotState::Absent {
        return None;
    }
    let is_impatient = waited(&slots[wanted], now) >= turns.patience;
    leaving(slots, wanted, budget, now, |slot| {
        let is_settled = now.saturating_duration_since(slot.last_used) >= turns.settle;
        // A model that was loaded for an older request stays until that request has used it.
        let is_awaited = slot.oldest_wait().is_some_and(|since| Some(since) < slots[wanted].oldest_wait());
        slot.users == 0 && !is_awaited && (is_settled || is_impatient)
    })
}

/// Whether `wanted` fits if all models leave that are not pinned.
pub(super) fn may_fit(slots: &[Slot], wanted: usize, budget: u64) -> bool {
    let pinned = slots.iter().enumerate().filter(|(i, slot)| *i != wanted && slot.is_pinned);
    let held: u64 = pinned.map(|(_, slot)| slot.held()).sum();
    held.saturating_add(slots[wanted].bytes.unwrap_or(0)) <= budget
}

/// Whether a request for `index`, which is loaded, must wait, because another model has waited too long for its memory.
/// `since` is when the request came. One that came before those for the other model does not wait for them: the model may
/// have been loaded for it.
pub(super) fn yields(
    slots: &[Slot],
    index: usize,
    since: Instant,
    budget: u64,
    turns: Turns,
    now: Instant,
) -> bool {
    let Some(first) = first_waiting(slots) else { return false };
    first != index
        && waited(&slots[first], now) >= turns.patience
        && slots[first].oldest_wait().is_some_and(|oldest| oldest < since)
        && leaving(slots, first, budget, now, |_| true).is_some_and(|leaving| leaving.contains(&index))
}

/// The model that is not loaded and has waited the longest.
fn first_waiting(slots: &[Slot]) -> Option<usize> {
    let waiting = slots.iter().enumerate().filter(|(_, slot)| slot.state == SlotState::Absent);
    let waiting = waiting.filter_map(|(i, slot)| Some((slot.oldest_wait()?, i)));
    waiting.min().map(|(_, i)| i)
}

fn waited(slot: &Slot, now: Instant) -> Duration {
    slot.oldest_wait().map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
}

/// The models to unload so that `wanted` fits, from those that are not pinned and `may_leave`. `None` = it does not fit.
fn leaving(
    slots: &[Slot],
    wanted: usize,
    budget: u64,
    now: Instant,
    may_leave: impl Fn(&Slot) -> bool,
) -> Option<Vec<usize>> {
    let needed = slots[wanted].bytes.unwrap_or(0);
    let held: u64 = slots.iter().map(Slot::held).sum();
    let mut lacking = (held + needed).saturating_sub(budget);
    let candidates = slots.iter().enumerate().filter(|(i, slot)| {
        let can_leave = slot.state == SlotState::Resident && !slot.is_pinned && !slot.is_stuck;
        *i != wanted && can_leave && may_leave(slot)
    });
    let mut candidates: Vec<_> = candidates.collect();
    candidates.sort_by(|(_, a), (_, b)| a.loss(now).total_cmp(&b.loss(now)));
    let mut leaving = Vec::new();
    for (i, slot) in candidates {
        if lacking == 0 {
            break;
        }
        leaving.push(i);
        lacking = lacking.saturating_sub(slot.held());
    }
    if lacking > 0 {
        return None;
    }
    // A small model that was chosen first may be needless after a large one.
    let freed: u64 = leaving.iter().map(|i| slots[*i].held()).sum();
    let mut spare = budget.saturating_sub(held - freed + needed);
    leaving.retain(|i| {
        let is_needless = slots[*i].held() <= spare;
        if is_needless {
            spare -= slots[*i].held();
        }
        !is_needless
    });
    Some(leaving)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURNS: Turns = Turns {
        settle: Duration::from_secs(1),
        patience: Duration::from_secs(10),
        longest: Duration::from_secs(100),
        retry: Duration::ZERO,
        unload: Duration::from_secs(60),
        queue: 4,
        queue_of_one: 4,
    };

    /// A slot of `bytes` that was used `idle` seconds before `now`.
    fn resident(now: Instant, bytes: u64, idle: u64) -> Slot {
        let last_used = now - Duration::from_secs(idle);
        Slot { state: SlotState::Resident, bytes: Some(bytes), last_used, ..Slot::new(false) }
    }

    fn absent(now: Instant, bytes: u64, waited: u64) -> Slot {
        Slot { bytes: Some(bytes), waiting: vec![now - Duration::from_secs(waited)], ..Slot::new(false) }
    }

    /// A time from which a hundred seconds can be subtracted.
    fn now() -> Instant {
        Instant::now() + Duration::from_secs(1000)
    }

    #[test]
    fn the_model_with_the_cheapest_loss_leaves_and_no_more_than_needed() {
        let now = now();
        let slow = Duration::from_secs(60);
        let slots = vec![
            resident(now, 10, 50),
            Slot { load_time: slow, ..resident(now, 40, 90) },
            resident(now, 30, 20),
            absent(now, 60, 0),
        ];
        let decide = |budget| decide(&slots, 3, budget, TURNS, now);
        assert_eq!(decide(140), Decision::Swap(vec![]), "it fits with the others");
        assert_eq!(decide(130), Decision::Swap(vec![0]));
        assert_eq!(decide(110), Decision::Swap(vec![2]), "the first is cheap to lose, but not needed");
        assert_eq!(decide(100), Decision::Swap(vec![0, 2]));
        assert_eq!(decide(60), Decision::Swap(vec![0, 2, 1]));
        assert_eq!(decide(59), Decision::Wait);
        assert_eq!(super::decide(&slots[3..], 0, u64::MAX, TURNS, now), Decision::Swap(vec![]));
    }

    #[test]
    fn models_in_use_pinned_loading_or_used_just_now_stay() {
        let now = now();
        let with = |slot: Slot, waited| decide(&[slot, absent(now, 60, waited)], 1, 60, TURNS, now);
        assert_eq!(with(resident(now, 10, 5), 0), Decision::Swap(vec![0]));
        assert_eq!(with(Slot { users: 1, ..resident(now, 10, 5) }, 50), Decision::Wait);
        assert_eq!(with(Slot { is_pinned: true, ..resident(now, 10, 5) }, 50), Decision::Wait);
        assert_eq!(with(Slot { is_stuck: true, ..resident(now, 10, 5) }, 50), Decision::Wait);
        assert_eq!(with(Slot { state: SlotState::Loading, ..resident(now, 10, 5) }, 50), Decision::Wait);
        assert_eq!(with(Slot { state: SlotState::Leaving, ..resident(now, 10, 5) }, 50), Decision::Wait);
        assert_eq!(with(resident(now, 10, 0), 0), Decision::Wait, "its client may ask again at once");
        assert_eq!(with(resident(now, 10, 0), 10), Decision::Swap(vec![0]), "after the patience");
    }

    #[test]
    fn only_the_model_that_waited_the_longest_may_unload_others() {
        let now = now();
        let slots = [resident(now, 100, 5), absent(now, 60, 3), absent(now, 60, 4), absent(now, 20, 0)];
        assert_eq!(decide(&slots, 1, 120, TURNS, now), Decision::Wait);
        assert_eq!(decide(&slots, 2, 120, TURNS, now), Decision::Swap(vec![0]));
        assert_eq!(decide(&slots, 3, 120, TURNS, now), Decision::Swap(vec![]), "free memory is for everyone");
        // The first needs more than the idle model holds, so it does not keep that from the second.
        let busy = Slot { users: 1, ..resident(now, 60, 0) };
        let slots = [busy, resident(now, 40, 5), absent(now, 100, 4), absent(now, 40, 3)];
        assert_eq!(decide(&slots, 2, 100, TURNS, now), Decision::Wait);
        assert_eq!(decide(&slots, 3, 100, TURNS, now), Decision::Swap(vec![1]));
    }

    #[test]
    fn a_model_stays_until_the_request_that_it_was_loaded_for_has_used_it() {
        let now = now();
        let loaded =
            |waited| Slot { waiting: vec![now - Duration::from_secs(waited)], ..resident(now, 60, 5) };
        assert_eq!(decide(&[loaded(30), absent(now, 60, 20)], 1, 60, TURNS, now), Decision::Wait);
        assert_eq!(decide(&[loaded(10), absent(now, 60, 20)], 1, 60, TURNS, now), Decision::Swap(vec![0]));
    }

    #[test]
    fn pinned_models_are_never_counted_as_room() {
        let now = now();
        let pinned = Slot { is_pinned: true, ..resident(now, 60, 5) };
        let slots = [pinned, resident(now, 40, 5), absent(now, 50, 0)];
        assert!(!may_fit(&slots, 2, 100));
        assert!(may_fit(&slots, 2, 110));
    }

    #[test]
    fn a_busy_model_yields_to_one_that_waited_for_too_long() {
        let now = now();
        let busy = Slot { users: 3, ..resident(now, 60, 0) };
        let yields = |slots: &[Slot]| [0, 1].map(|i| super::yields(slots, i, now, 100, TURNS, now));
        let slots = |waited| [busy.clone(), resident(now, 40, 50), absent(now, 40, waited)];
        assert_eq!(yields(&slots(9)), [false, false]);
        assert_eq!(yields(&slots(10)), [false, true], "the idle model suffices");
        let before = now - Duration::from_secs(11);
        assert!(!super::yields(&slots(10), 1, before, 100, TURNS, now), "an older request does not yield");
        let slots = [busy.clone(), Slot { is_pinned: true, ..resident(now, 40, 50) }, absent(now, 40, 10)];
        assert_eq!(yields(&slots), [true, false]);
        let slots = [busy.clone(), Slot { is_pinned: true, ..resident(now, 40, 50) }, absent(now, 70, 10)];
        assert_eq!(yields(&slots), [false, false], "it would not fit anyway");
    }
}
