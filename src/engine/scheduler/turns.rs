//! The turns that are to be stored, and the blocks that are reserved for a text from the disk.

use std::collections::VecDeque;

use crate::engine::block_manager::{BlockTable, KnownPrefix, NodeRef};
use crate::engine::request::{CacheSalt, PromptImage};
use crate::engine::sequence::SequenceId;

/// A text, and the salt under which it is stored.
#[derive(Debug)]
pub(in crate::engine) struct SaltedText {
    pub salt: CacheSalt,
    pub tokens: Vec<u32>,
    pub images: Vec<PromptImage>,
}

/// The end of a turn: a text whose whole blocks are registered.
#[derive(Debug)]
pub struct EndedTurn {
    pub(in crate::engine) text: SaltedText,
    /// The nodes of its whole blocks.
    pub(in crate::engine) nodes: Vec<NodeRef>,
}

/// A text that the disk may have.
pub(in crate::engine) struct DiskLookup<'a> {
    pub id: SequenceId,
    pub tokens: &'a [u32],
    pub images: &'a [PromptImage],
    pub salt: CacheSalt,
    pub known: KnownPrefix,
}

/// Blocks that are reserved for a waiting sequence.
#[derive(Debug)]
pub(super) struct Restored {
    /// [`Sequence::begun_as`] of the sequence.
    pub sequence: SequenceId,
    pub table: BlockTable,
    /// The number of tokens in the blocks, and how many of them the prefix cache had.
    pub tokens: usize,
    pub known: usize,
    /// Whether the blocks are written.
    pub is_complete: bool,
}

/// Turns and restores of a scheduler.
#[derive(Debug, Default)]
pub(super) struct DiskState {
    pub turns: VecDeque<EndedTurn>,
    /// Texts that must not be found again, because their logits were not finite.
    pub forgotten: Vec<SaltedText>,
    pub restored: Option<Restored>,
    /// How many sequences began with tokens from the disk and computed a step, and the tokens.
    pub hits: u64,
    pub hit_tokens: u64,
}

impl DiskState {
    /// The tables of reserved blocks.
    pub(super) fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.restored.iter().map(|restored| &restored.table)
    }

    pub(super) fn tables_mut(&mut self) -> impl Iterator<Item = &mut BlockTable> {
        self.restored.iter_mut().map(|restored| &mut restored.table)
    }

    /// Forgets the reserved blocks, because all blocks are empty.
    pub(super) fn clear(&mut self) {
        self.restored = None;
    }
}
