//! The pool of KV blocks, and who owns each.
//!
//! A [`Block`] is neither `Clone` nor constructible outside this file, so a block is in exactly one place: the
//! pool's free list, or the table of one sequence.
//!
//! ```text
//! ids      0 .................................................. total
//! owners   | free list | sequence a | free list | sequence b  |
//! ```
//!
//! Invariant, checked by [`BlockManager::check`]: free + owned = total, and no id occurs twice.

/// One KV block of the runner's pool, owned by whoever holds this value.
#[derive(Debug, PartialEq, Eq)]
pub struct Block(u32);

impl Block {
    pub fn id(&self) -> u32 {
        self.0
    }
}

/// Hands out blocks and takes them back. Last freed is first out.
#[derive(Debug)]
pub struct BlockManager {
    free: Vec<Block>,
    total: usize,
    block_size: usize,
}

impl BlockManager {
    /// `total` blocks of `block_size` tokens, all free.
    pub fn new(total: usize, block_size: usize) -> Self {
        assert!(block_size > 0, "a KV block holds at least one token");
        let ids = 0..u32::try_from(total).expect("block ids are u32");
        Self { free: ids.rev().map(Block).collect(), total, block_size }
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn total(&self) -> usize {
        self.total
    }

    /// Grows `table` until it holds `tokens` positions; false, and nothing taken, where the pool lacks blocks.
    #[must_use]
    pub fn grow(&mut self, table: &mut Vec<Block>, tokens: usize) -> bool {
        let missing = tokens.div_ceil(self.block_size).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        table.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Takes every block of `table` back.
    pub fn release(&mut self, table: Vec<Block>) {
        self.free.extend(table.into_iter().rev());
    }

    /// Panics unless the free blocks and those of `tables` are the whole pool, each once.
    pub fn check<'a>(&'a self, tables: impl Iterator<Item = &'a [Block]>) {
        let mut seen = vec![false; self.total];
        for block in self.free.iter().chain(tables.flatten()) {
            assert!(
                !std::mem::replace(&mut seen[block.0 as usize], true),
                "KV block {} has two owners",
                block.0
            );
        }
        assert!(seen.iter().all(|s| *s), "KV blocks {:?} have no owner", lost(&seen));
    }
}

fn lost(seen: &[bool]) -> Vec<usize> {
    (0..seen.len()).filter(|id| !seen[*id]).collect()
}
