//! The invariants of the scheduler, and the line that describes its state if one is broken.

use super::Scheduler;
use crate::engine::block_manager::{BlockTable, PoolUse};
use crate::engine::sequence::Sequence;
use crate::model::{BlockPool, Limits};

impl Scheduler {
    /// Panics with the scheduler's state unless no sequence is there. The caller has scheduled nothing and has no step
    /// under way, so any sequence would wait for ever.
    pub fn expect_idle(&self) {
        assert!(self.is_idle(), "nobody gets on, and somebody is there: {}", self.state());
    }

    /// The state for a panic's message: one line of bounded length, without a token of any sequence.
    fn state(&self) -> String {
        /// The most sequences of each list, running and waiting, that the state names.
        const NAMED: usize = 6;
        let Limits { max_sequences, kv, .. } = self.limits;
        let room = |pool, all: usize| {
            let PoolUse { free, cached, .. } = self.usage(pool);
            format!("{} of {all}", free + cached)
        };
        let named = |sequences: &[Sequence]| {
            let named: Vec<String> = sequences.iter().take(NAMED).map(Sequence::state).collect();
            named.join("; ")
        };
        format!(
            "step {}, {} of {max_sequences} slots free, blocks that can be had: {} full, {} sliding; {} running: {}; \
             {} waiting: {}; {:?}; {:?}",
            self.steps,
            self.free_slots.len(),
            room(BlockPool::Full, kv.full_blocks),
            room(BlockPool::Sliding, kv.sliding_blocks),
            self.running.len(),
            named(&self.running),
            self.waiting.len(),
            named(&self.waiting),
            self.limits,
            self.config,
        )
    }

    /// Panics where an invariant of the scheduler is broken.
    pub fn check(&self) {
        self.blocks.check(self.running.iter().map(|s| &s.table));
        let mut slots: Vec<u32> = self.free_slots.clone();
        for s in &self.running {
            slots.extend(s.slot);
            slots.extend(&s.fork_slots);
            assert_eq!(s.forks.len(), s.fork_slots.len(), "sequence {}: slots of its forks", s.id);
            assert!(s.slot.is_some() && s.computed <= s.submitted, "sequence {}", s.id);
            let known = s.tokens.len() + s.drawn;
            assert!(s.speculating || s.submitted <= known, "sequence {} submitted what is not there", s.id);
            assert!(
                s.draft_tokens.is_empty() || s.pending() == 1 && s.drawn == 0,
                "draft tokens of sequence {}",
                s.id
            );
            assert_eq!(*s.table.salt(), s.cache_salt, "sequence {}: the salt of its blocks", s.id);
            let blocks = s.table.full().len();
            assert!(blocks * self.limits.kv.block_size >= s.submitted, "sequence {} lacks blocks", s.id);
        }
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..self.limits.max_sequences as u32), "slots {slots:?}");
        for s in &self.waiting {
            assert!(
                s.table == BlockTable::default()
                    && s.slot.is_none()
                    && s.fork_slots.is_empty()
                    && s.draft_tokens.is_empty(),
                "waiting {}",
                s.id
            );
            assert_eq!((s.computed, s.submitted, s.drawn), (0, 0, 0), "waiting {}", s.id);
        }
        let order = |list: &[Sequence]| list.is_sorted_by_key(|s| s.arrival);
        assert!(order(&self.waiting) && order(&self.running), "order of arrival");
        for client in self.waiting.iter().chain(&self.running).map(|s| s.client) {
            assert!(self.served.knows(client), "client {client} is forgotten");
        }
    }
}
