//! Stored responses, which clients may refer to later: in memory, bounded in number and bytes.
//!
//! A response belongs to the client that requested it. Other clients get the same error as for an unknown id, so they do
//! not learn which ids exist.
//!
//! If a new response would exceed the bound on number, the owner of the most responses loses its least recently used
//! one. If it would exceed the bound on bytes, the owner of the most bytes does. The new response already counts for its
//! owner. So a single owner may use all of the store, and one of `n` owners loses nothing to the others while it has at
//! most an `n`th of both.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Bytes;
use serde_json::Value;

use crate::engine::ClientId;

/// Whether a reply from this path may be as large as a request's body.
pub(in crate::api) fn is_kept(path: &str) -> bool {
    path.starts_with("/v1/responses/")
}

/// A stored response, with what a later response needs of it.
#[derive(Debug)]
pub(in crate::api) struct Stored {
    pub owner: ClientId,
    /// The response object as JSON.
    pub body: Bytes,
    /// The items of the conversation before the answer, as a JSON list. Instructions are left out, since they count for
    /// one response alone.
    pub input: Bytes,
}

impl Stored {
    /// The items before the answer.
    fn input(&self) -> Vec<Value> {
        serde_json::from_slice(&self.input).expect("a list was kept")
    }

    /// The items before the answer, and the items of the answer.
    pub fn items(&self) -> Vec<Value> {
        let mut items = self.input();
        let mut body: Value = serde_json::from_slice(&self.body).expect("an object was kept");
        if let Value::Array(output) = body["output"].take() {
            items.extend(output);
        }
        items
    }
}

#[derive(Debug)]
pub(in crate::api) struct Responses {
    max: usize,
    max_bytes: usize,
    max_input_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, Entry>,
    /// The clients that own any response.
    owners: HashMap<ClientId, Owner>,
    /// The owners, ordered by their number of responses and by their bytes.
    by_number: BTreeSet<(usize, ClientId)>,
    by_bytes: BTreeSet<(usize, ClientId)>,
    uses: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    stored: Arc<Stored>,
    bytes: usize,
    used: u64,
}

#[derive(Debug, Default)]
struct Owner {
    /// The owner's ids, ordered by when each was last used.
    by_use: BTreeMap<u64, String>,
    bytes: usize,
}

impl Responses {
    /// Stores at most `max` responses in about `max_bytes` of memory; 0 of either stores none. `max_body_bytes` is the
    /// longest body of a request.
    pub fn new(max: usize, max_bytes: usize, max_body_bytes: usize) -> Self {
        // A conversation that continues a stored one is read as if all of it had come in a body, so a stored input is
        // bounded, too. Items are stored with defaults for what their senders left out, so an input may be longer than
        // the body that it came in.
        Self { max, max_bytes, max_input_bytes: max_body_bytes.saturating_mul(2), kept: Mutex::default() }
    }

    /// Whether responses are stored at all.
    pub(in crate::api) fn is_open(&self) -> bool {
        self.max > 0 && self.max_bytes > 0
    }

    /// Stores a response, and evicts others for it if needed. False if the response alone is too large, or exceeds
    /// its owner's share of the store.
    pub(in crate::api) fn insert(&self, id: String, stored: Stored) -> bool {
        let bytes = size(&id, &stored);
        if self.max == 0 || bytes > self.max_bytes || stored.input.len() > self.max_input_bytes {
            return false;
        }
        let mut kept = self.lock();
        let mut evicted: Vec<_> = kept.remove(&id).into_iter().collect();
        while let Some(owner) = self.owner_to_evict(&kept, stored.owner, bytes) {
            let oldest = kept.owners.get(&owner).and_then(|owner| owner.by_use.values().next().cloned());
            let Some(oldest) = oldest else {
                evicted.into_iter().for_each(|(id, entry)| kept.add(id, entry));
                return false;
            };
            evicted.extend(kept.remove(&oldest));
        }
        kept.uses += 1;
        let used = kept.uses;
        kept.add(id, Entry { stored: Arc::new(stored), bytes, used });
        true
    }

    /// The owner that must lose a response before `owner` can store `bytes` more. `None` = there is room.
    fn owner_to_evict(&self, kept: &Kept, owner: ClientId, bytes: usize) -> Option<ClientId> {
        let own = kept.owners.get(&owner);
        let (order, claim) = if kept.by_id.len() >= self.max {
            (&kept.by_number, own.map_or(0, |own| own.by_use.len()) + 1)
        } else if kept.bytes + bytes > self.max_bytes {
            (&kept.by_bytes, own.map_or(0, |own| own.bytes) + bytes)
        } else {
            return None;
        };
        let most = order.last().filter(|(most, _)| *most > claim);
        Some(most.map_or(owner, |(_, other)| *other))
    }

    pub(in crate::api) fn get(&self, id: &str, owner: ClientId) -> Option<Arc<Stored>> {
        let mut kept = self.lock();
        let Kept { by_id, owners, uses, .. } = &mut *kept;
        let entry = by_id.get_mut(id).filter(|entry| entry.stored.owner == owner)?;
        *uses += 1;
        let by_use = &mut owners.get_mut(&owner).expect("it owns this one").by_use;
        let id = by_use.remove(&entry.used).expect("each has its place");
        by_use.insert(*uses, id);
        entry.used = *uses;
        Some(Arc::clone(&entry.stored))
    }

    /// Deletes a response; false if `owner` has no response with this id.
    pub(in crate::api) fn remove(&self, id: &str, owner: ClientId) -> bool {
        let mut kept = self.lock();
        let there = kept.by_id.get(id).is_some_and(|entry| entry.stored.owner == owner);
        if there {
            kept.remove(id);
        }
        there
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("nothing panics under this lock")
    }
}

impl Kept {
    fn add(&mut self, id: String, entry: Entry) {
        self.bytes += entry.bytes;
        self.update(entry.stored.owner, |owner| {
            owner.by_use.insert(entry.used, id.clone());
            owner.bytes += entry.bytes;
        });
        self.by_id.insert(id, entry);
    }

    fn remove(&mut self, id: &str) -> Option<(String, Entry)> {
        let (id, entry) = self.by_id.remove_entry(id)?;
        self.bytes -= entry.bytes;
        self.update(entry.stored.owner, |owner| {
            owner.by_use.remove(&entry.used);
            owner.bytes -= entry.bytes;
        });
        Some((id, entry))
    }

    /// Changes an owner's entry, and updates the orders of owners.
    fn update(&mut self, id: ClientId, change: impl FnOnce(&mut Owner)) {
        let owner = self.owners.entry(id).or_default();
        self.by_number.remove(&(owner.by_use.len(), id));
        self.by_bytes.remove(&(owner.bytes, id));
        change(owner);
        if owner.by_use.is_empty() {
            self.owners.remove(&id);
        } else {
            self.by_number.insert((owner.by_use.len(), id));
            self.by_bytes.insert((owner.bytes, id));
        }
    }
}

/// Roughly the bytes of memory that a response takes.
fn size(id: &str, stored: &Stored) -> usize {
    let maps = size_of::<Entry>() + 2 * (id.len() + size_of::<String>());
    stored.body.len() + stored.input.len() + size_of::<Stored>() + maps
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const MAX_BODY_BYTES: usize = 1 << 20;

    fn responses(max: usize, max_bytes: usize) -> Responses {
        Responses::new(max, max_bytes, MAX_BODY_BYTES)
    }

    fn stored(owner: ClientId, n: usize) -> Stored {
        Stored { owner, body: "x".repeat(n).into(), input: "[]".into() }
    }

    #[test]
    fn a_response_is_its_owners_alone() {
        let responses = responses(9, 9000);
        assert!(responses.insert("a".into(), stored(1, 10)));
        assert!(responses.get("a", 2).is_none() && responses.get("b", 1).is_none());
        assert!(!responses.remove("a", 2));
        assert_eq!(responses.get("a", 1).expect("kept").body.len(), 10);
        assert!(responses.remove("a", 1) && !responses.remove("a", 1));
        assert!(responses.get("a", 1).is_none());
        let kept = responses.lock();
        assert!(kept.bytes == 0 && kept.owners.is_empty());
        assert!(kept.by_number.is_empty() && kept.by_bytes.is_empty());
    }

    #[test]
    fn the_least_recently_used_are_evicted() {
        let two = responses(2, 1 << 20);
        for id in ["a", "b"] {
            assert!(two.insert(id.into(), stored(1, 10)));
        }
        assert!(two.get("a", 1).is_some());
        assert!(two.insert("c".into(), stored(1, 10)));
        assert!(two.get("b", 1).is_none(), "it was not requested");
        assert!(two.get("a", 1).is_some() && two.get("c", 1).is_some());
        assert!(!responses(0, 1 << 20).insert("a".into(), stored(1, 10)));
    }

    #[test]
    fn whoever_holds_the_most_gives_way() {
        let responses = responses(100, 10_000);
        for i in 0..9 {
            assert!(
                responses.insert(format!("a{i}"), stored(1, 800)),
                "all of the store, while there is no other owner"
            );
        }
        assert!(responses.insert("b".into(), stored(2, 4000)));
        let left: Vec<bool> = (0..9).map(|i| responses.get(&format!("a{i}"), 1).is_some()).collect();
        assert_eq!(left, [false, false, false, true, true, true, true, true, true], "the oldest went");
        // Owner 1 holds fewer bytes than owner 2 would, so only owner 2's own response may go. The new one does not fit
        // then, either.
        assert!(!responses.insert("c".into(), stored(2, 6000)));
        assert!(responses.get("b", 2).is_some() && responses.get("a3", 1).is_some(), "nothing went for it");
        assert!(responses.insert("c".into(), stored(2, 4100)), "at the cost of its owner's own");
        assert!(responses.get("b", 2).is_none() && responses.get("a3", 1).is_some());
    }

    #[test]
    fn what_nobody_could_send_is_not_kept() {
        let responses = responses(9, 1 << 30);
        let input = |n: usize| Stored { owner: 1, body: "{}".into(), input: vec![b' '; n].into() };
        assert!(responses.insert("a".into(), input(2 * MAX_BODY_BYTES)));
        assert!(!responses.insert("b".into(), input(2 * MAX_BODY_BYTES + 1)));
    }

    /// A model of the store that looks at everything each time. Each entry has an id, an owner and bytes; the least
    /// recently used comes first.
    struct Model {
        max: usize,
        max_bytes: usize,
        kept: Vec<(String, ClientId, usize)>,
    }

    impl Model {
        fn of(&self, owner: ClientId) -> (usize, usize) {
            let own = || self.kept.iter().filter(|(_, other, _)| *other == owner);
            (own().count(), own().map(|(_, _, bytes)| bytes).sum())
        }

        fn insert(&mut self, id: &str, owner: ClientId, bytes: usize) -> bool {
            if bytes > self.max_bytes {
                return false;
            }
            let before = self.kept.clone();
            self.kept.retain(|(other, ..)| other != id);
            loop {
                let full = self.kept.len() == self.max;
                if !full && self.kept.iter().map(|(_, _, n)| n).sum::<usize>() + bytes <= self.max_bytes {
                    self.kept.push((id.to_owned(), owner, bytes));
                    return true;
                }
                let measure = |who: ClientId| {
                    let (number, held) = self.of(who);
                    let claims = who == owner;
                    if full { number + usize::from(claims) } else { held + if claims { bytes } else { 0 } }
                };
                let others = self.kept.iter().map(|(_, other, _)| *other).filter(|other| *other != owner);
                let most = others.max_by_key(|other| (measure(*other), *other));
                let victim = most.filter(|other| measure(*other) > measure(owner)).unwrap_or(owner);
                let Some(at) = self.kept.iter().position(|(_, other, _)| *other == victim) else {
                    self.kept = before;
                    return false;
                };
                self.kept.remove(at);
            }
        }
    }

    #[test]
    fn bounds_and_shares_hold_whatever_comes() {
        let seed = 0x57;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (max, max_bytes, owners) = (12, 20_000, 3);
        let responses = responses(max, max_bytes);
        let mut model = Model { max, max_bytes, kept: Vec::new() };
        let mut refused = 0;
        for _ in 0..20_000 {
            let (id, owner) = (rng.random_range(0..40u32).to_string(), rng.random_range(0..owners));
            let at = model.kept.iter().position(|(other, o, _)| *other == id && *o == owner);
            match rng.random_range(0..4) {
                0 => {
                    assert_eq!(responses.get(&id, owner).is_some(), at.is_some());
                    if let Some(at) = at {
                        let used = model.kept.remove(at);
                        model.kept.push(used);
                    }
                }
                1 => {
                    assert_eq!(responses.remove(&id, owner), at.is_some());
                    at.map(|at| model.kept.remove(at));
                }
                _ => {
                    let n = if rng.random_bool(0.1) { 25_000 } else { 6000 };
                    let one = stored(owner, rng.random_range(0..n));
                    let bytes = size(&id, &one);
                    let is_modest = |who: ClientId| {
                        let (number, held) = model.of(who);
                        who != owner && number <= max / owners as usize && held <= max_bytes / owners as usize
                    };
                    let of_modest =
                        model.kept.iter().filter(|(other, who, _)| is_modest(*who) && *other != id);
                    let of_modest: Vec<String> = of_modest.map(|(id, ..)| id.clone()).collect();
                    let fits = model.insert(&id, owner, bytes);
                    refused += usize::from(!fits);
                    assert_eq!(responses.insert(id.clone(), one), fits);
                    let kept = responses.lock();
                    assert!(of_modest.iter().all(|id| kept.by_id.contains_key(id)), "within its share");
                }
            }
            let kept = responses.lock();
            assert!(kept.by_id.len() <= max && kept.bytes <= max_bytes);
            assert_eq!(kept.by_id.values().map(|entry| entry.bytes).sum::<usize>(), kept.bytes);
            let ids: BTreeSet<&String> = model.kept.iter().map(|(id, ..)| id).collect();
            assert_eq!(kept.by_id.keys().collect::<BTreeSet<_>>(), ids);
            for (id, owner) in &kept.owners {
                assert_eq!((owner.by_use.len(), owner.bytes), model.of(*id));
                assert!(owner.by_use.iter().all(|(used, id)| kept.by_id[id].used == *used));
            }
            let number = kept.owners.iter().map(|(id, owner)| (owner.by_use.len(), *id));
            assert_eq!(number.collect::<BTreeSet<_>>(), kept.by_number);
            let bytes = kept.owners.iter().map(|(id, owner)| (owner.bytes, *id));
            assert_eq!(bytes.collect::<BTreeSet<_>>(), kept.by_bytes);
        }
        assert!(refused > 100, "{refused}: some are too large");
    }
}
