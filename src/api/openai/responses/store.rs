//! Responses that clients may name later: in memory, bounded in number and bytes.
//!
//! Each belongs to who asked for it. To anybody else it is not there, so that nobody learns which ids are.
//!
//! Where there is no room for one more, whoever holds the most gives up what it used the longest ago: the most responses or
//! the most bytes, whichever there is no room for. What is to be kept counts as its owner's already. So who is alone has all
//! of the room, and of `n` owners none loses anything to the others as long as it has no more than an `n`th of both.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Bytes;
use serde_json::Value;

use crate::engine::ClientId;

/// Whether what is asked for at a path may be as large as a body is.
pub(in crate::api) fn is_kept(path: &str) -> bool {
    path.starts_with("/v1/responses/")
}

/// One response, and what a further one needs to know of it.
#[derive(Debug)]
pub(in crate::api) struct Stored {
    pub owner: ClientId,
    /// The response's object, as JSON.
    pub body: Bytes,
    /// The items of the conversation before its answer, as a list in JSON; without instructions, which count for one response
    /// alone.
    pub input: Bytes,
}

impl Stored {
    /// The items before its answer.
    fn input(&self) -> Vec<Value> {
        serde_json::from_slice(&self.input).expect("a list was kept")
    }

    /// The items before its answer, and those of its answer.
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
    /// Clients that own something.
    owners: HashMap<ClientId, Owner>,
    /// Clients by how many responses they own, and by how many bytes.
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
    /// Ids by when each was used last.
    by_use: BTreeMap<u64, String>,
    bytes: usize,
}

impl Responses {
    /// Keeps at most `max`, in about `max_bytes` of memory; 0 of either keeps none. `max_body_bytes` is how long a request may
    /// be.
    pub fn new(max: usize, max_bytes: usize, max_body_bytes: usize) -> Self {
        // A conversation that goes on from one that is kept is read as if it had come in a body. Items are kept with what
        // their senders may leave out, so those of one body may be longer than it was.
        Self { max, max_bytes, max_input_bytes: max_body_bytes.saturating_mul(2), kept: Mutex::default() }
    }

    /// Whether any is kept at all.
    pub(in crate::api) fn is_open(&self) -> bool {
        self.max > 0 && self.max_bytes > 0
    }

    /// Keeps one, at the cost of others; false where it alone is too large, or more than its owner may have beside others.
    pub(in crate::api) fn insert(&self, id: String, stored: Stored) -> bool {
        let bytes = size(&id, &stored);
        if self.max == 0 || bytes > self.max_bytes || stored.input.len() > self.max_input_bytes {
            return false;
        }
        let mut kept = self.lock();
        let mut given_up: Vec<_> = kept.remove(&id).into_iter().collect();
        while let Some(owner) = self.who_gives_way(&kept, stored.owner, bytes) {
            let oldest = kept.owners.get(&owner).and_then(|owner| owner.by_use.values().next().cloned());
            let Some(oldest) = oldest else {
                given_up.into_iter().for_each(|(id, entry)| kept.add(id, entry));
                return false;
            };
            given_up.extend(kept.remove(&oldest));
        }
        kept.uses += 1;
        let used = kept.uses;
        kept.add(id, Entry { stored: Arc::new(stored), bytes, used });
        true
    }

    /// Whoever has to give something up, before `owner` can have `bytes` more; none where there is room.
    fn who_gives_way(&self, kept: &Kept, owner: ClientId, bytes: usize) -> Option<ClientId> {
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

    /// False where it is not there.
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

    /// Changes what one owns, and keeps the orders true.
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

/// Bytes of memory, roughly.
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
    fn the_least_recently_used_are_given_up() {
        let two = responses(2, 1 << 20);
        for id in ["a", "b"] {
            assert!(two.insert(id.into(), stored(1, 10)));
        }
        assert!(two.get("a", 1).is_some());
        assert!(two.insert("c".into(), stored(1, 10)));
        assert!(two.get("b", 1).is_none(), "nobody asked for it");
        assert!(two.get("a", 1).is_some() && two.get("c", 1).is_some());
        assert!(!responses(0, 1 << 20).insert("a".into(), stored(1, 10)));
    }

    #[test]
    fn whoever_holds_the_most_gives_way() {
        let responses = responses(100, 10_000);
        for i in 0..9 {
            assert!(
                responses.insert(format!("a{i}"), stored(1, 800)),
                "all of the room, while nobody else is there"
            );
        }
        assert!(responses.insert("b".into(), stored(2, 4000)));
        let left: Vec<bool> = (0..9).map(|i| responses.get(&format!("a{i}"), 1).is_some()).collect();
        assert_eq!(left, [false, false, false, true, true, true, true, true, true], "the oldest went");
        // Somebody else has more than what this would leave, and less than this takes.
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

    /// What is kept, as it should be, by looking at everything each time: id, owner, bytes; the least recently used first.
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
