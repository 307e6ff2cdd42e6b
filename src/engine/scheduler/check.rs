//! Checks the scheduler's invariants, and describes its state in the message of a panic.

use super::Scheduler;
use crate::engine::block_manager::BlockTable;
use crate::engine::sequence::Sequence;
use crate::model::BlockList;

impl Scheduler {
    /// Panics with a description of the scheduler's state unless it has no sequence. To be called when no step could be
    /// scheduled and none is in flight: any sequence would then wait forever.
    pub fn expect_idle(&self) {
        assert!(self.is_idle(), "no step can be scheduled, but there are sequences: {}", self.state());
    }

    /// The state for the message of a panic: one line of limited length, without any token of a sequence.
    fn state(&self) -> String {
        /// Maximum number of running and of waiting sequences that are described.
        const MAX_DESCRIBED: usize = 6;
        let available = |pool| {
            let used = self.blocks.usage(pool);
            format!("{} of {}", used.free + used.cached, self.limits.kv.pools[pool].blocks)
        };
        let available: Vec<String> = (0..self.limits.kv.pools.len()).map(available).collect();
        let describe = |sequences: &[Sequence]| {
            let described: Vec<String> = sequences.iter().take(MAX_DESCRIBED).map(Sequence::state).collect();
            described.join("; ")
        };
        format!(
            "step {}, {} of {} slots free, available blocks of each pool: {}; {} running: {}; {} waiting: {}; \
             {:?}; {:?}",
            self.steps,
            self.free_slots.len(),
            self.limits.max_sequences,
            available.join(", "),
            self.running.len(),
            describe(&self.running),
            self.waiting.len(),
            describe(&self.waiting),
            self.limits,
            self.config,
        )
    }

    /// Panics if an invariant of the scheduler is broken.
    pub fn check(&self) {
        self.blocks.check(self.running.iter().map(|s| &s.table).chain(self.stored.tables()));
        let mut slots: Vec<u32> = self.free_slots.clone();
        for s in &self.running {
            slots.extend(s.slot);
            slots.extend(&s.fork_slots);
            assert_eq!(s.forks.len(), s.fork_slots.len(), "sequence {}: slots of its forks", s.id);
            assert!(s.slot.is_some() && s.computed <= s.submitted, "sequence {}", s.id);
            let is_whole = |position| position == s.found || s.image_split_at(position).is_none();
            assert!(is_whole(s.computed) && is_whole(s.submitted), "sequence {}: an image is split", s.id);
            let known = s.tokens.len() + s.drawn;
            assert!(
                s.speculating || s.submitted <= known,
                "sequence {} submitted more than its known ids",
                s.id
            );
            assert!(
                s.draft_tokens.is_empty() || s.pending() == 1 && s.drawn == 0,
                "draft tokens of sequence {}",
                s.id
            );
            assert_eq!(*s.table.salt(), s.request.cache_salt, "sequence {}: the salt of its blocks", s.id);
            let suffices = |list: &BlockList| list.end() * self.limits.kv.block_size >= s.submitted;
            assert!(s.table.blocks().iter().all(suffices), "sequence {} lacks blocks", s.id);
        }
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..self.limits.max_sequences as u32), "slots {slots:?}");
        for s in &self.waiting {
            assert!(
                s.table == BlockTable::default()
                    && s.slot.is_none()
                    && s.fork_slots.is_empty()
                    && s.draft_tokens.is_empty(),
                "waiting sequence {}",
                s.id
            );
            assert_eq!((s.computed, s.submitted, s.drawn), (0, 0, 0), "waiting sequence {}", s.id);
        }
        let order = |list: &[Sequence]| list.is_sorted_by_key(|s| s.arrival);
        assert!(order(&self.waiting) && order(&self.running), "order of arrival");
        for client in self.waiting.iter().chain(&self.running).map(|s| s.request.client) {
            assert!(self.served.knows(client), "client {client} has no token counter");
        }
    }
}
