//! Responses that clients may name later: in memory, bounded in number and bytes, those least recently used given up first.
//!
//! Each belongs to who asked for it. To anybody else it is not there, so that nobody learns which ids are.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Bytes;
use serde_json::Value;

use super::super::Options;
use crate::engine::ClientId;

/// One response, and what a further one needs to know of it.
#[derive(Debug)]
pub(super) struct Stored {
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

    /// Those of its answer too.
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
pub(in super::super) struct Responses {
    max: usize,
    max_bytes: usize,
    max_input_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, Entry>,
    /// By when each was used last.
    by_use: BTreeMap<u64, String>,
    uses: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    stored: Arc<Stored>,
    bytes: usize,
    used: u64,
}

impl Responses {
    /// Keeps at most [`Options::stored_responses`], in about [`Options::stored_response_bytes`] of memory; 0 of either keeps
    /// none.
    pub fn new(options: &Options) -> Self {
        let &Options { stored_responses: max, stored_response_bytes: max_bytes, max_body_bytes, .. } =
            options;
        // A conversation that goes on from one that is kept is read as if it had come in a body. Items are kept with what
        // their senders may leave out, so those of one body may be longer than it was.
        Self { max, max_bytes, max_input_bytes: max_body_bytes.saturating_mul(2), kept: Mutex::default() }
    }

    /// Whether any is kept at all.
    pub(super) fn is_open(&self) -> bool {
        self.max > 0 && self.max_bytes > 0
    }

    /// Keeps one, at the cost of others; false where it alone is too large.
    pub(super) fn insert(&self, id: String, stored: Stored) -> bool {
        let bytes = size(&id, &stored);
        if self.max == 0 || bytes > self.max_bytes || stored.input.len() > self.max_input_bytes {
            return false;
        }
        let mut kept = self.lock();
        kept.remove(&id);
        while kept.by_id.len() >= self.max || kept.bytes + bytes > self.max_bytes {
            let Some((_, oldest)) = kept.by_use.pop_first() else { break };
            kept.remove(&oldest);
        }
        kept.uses += 1;
        let used = kept.uses;
        kept.bytes += bytes;
        kept.by_use.insert(used, id.clone());
        kept.by_id.insert(id, Entry { stored: Arc::new(stored), bytes, used });
        true
    }

    pub(super) fn get(&self, id: &str, owner: ClientId) -> Option<Arc<Stored>> {
        let mut kept = self.lock();
        let kept = &mut *kept;
        let entry = kept.by_id.get_mut(id).filter(|entry| entry.stored.owner == owner)?;
        kept.uses += 1;
        kept.by_use.remove(&entry.used);
        kept.by_use.insert(kept.uses, id.to_owned());
        entry.used = kept.uses;
        Some(Arc::clone(&entry.stored))
    }

    /// False where it is not there.
    pub(super) fn remove(&self, id: &str, owner: ClientId) -> bool {
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
    fn remove(&mut self, id: &str) {
        if let Some(entry) = self.by_id.remove(id) {
            self.bytes -= entry.bytes;
            self.by_use.remove(&entry.used);
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

    use super::super::super::exchange::tests::OPTIONS;
    use super::*;

    fn responses(max: usize, max_bytes: usize) -> Responses {
        Responses::new(&Options { stored_responses: max, stored_response_bytes: max_bytes, ..OPTIONS })
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
        assert_eq!(responses.lock().bytes, 0);
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
    fn what_nobody_could_send_is_not_kept() {
        let responses = responses(9, 1 << 30);
        let input = |n: usize| Stored { owner: 1, body: "{}".into(), input: vec![b' '; n].into() };
        assert!(responses.insert("a".into(), input(2 * OPTIONS.max_body_bytes)));
        assert!(!responses.insert("b".into(), input(2 * OPTIONS.max_body_bytes + 1)));
    }

    #[test]
    fn both_bounds_hold_whatever_comes() {
        let seed = 0x57;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (max, max_bytes) = (12, 20_000);
        let responses = responses(max, max_bytes);
        for _ in 0..20_000 {
            let (id, owner) = (rng.random_range(0..40u32).to_string(), rng.random_range(0..3));
            match rng.random_range(0..4) {
                0 => drop(responses.get(&id, owner)),
                1 => drop(responses.remove(&id, owner)),
                _ => {
                    let n = rng.random_range(0..25_000);
                    let fits = size(&id, &stored(owner, n)) <= max_bytes;
                    assert_eq!(responses.insert(id.clone(), stored(owner, n)), fits);
                    assert!(!fits || responses.get(&id, owner).is_some());
                }
            }
            let kept = responses.lock();
            assert!(kept.by_id.len() <= max && kept.bytes <= max_bytes);
            assert_eq!(kept.by_id.values().map(|entry| entry.bytes).sum::<usize>(), kept.bytes);
            assert_eq!(kept.by_use.len(), kept.by_id.len());
            assert!(kept.by_use.iter().all(|(used, id)| kept.by_id[id].used == *used));
        }
    }
}
